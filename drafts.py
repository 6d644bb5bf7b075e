"""What a draft needs to be of use to another model."""

from errors import UserError


def check_vocabularies(target, draft) -> None:
    """Raise UserError if two configurations differ in the number of tokens, or in their EOS."""
    size = target.vocab_size
    eos = set(target.eos_token_ids)
    draft_size = draft.vocab_size
    draft_eos = set(draft.eos_token_ids)
    if (size, eos) != (draft_size, draft_eos):
        raise UserError(
            "target and draft need the same vocabulary:"
            f" the target has {size} tokens, EOS {sorted(eos)};"
            f" the draft {draft_size}, EOS {sorted(draft_eos)}"
        )
