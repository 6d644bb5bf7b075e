"""The vocabulary check of a draft model."""

from errors import UserError

# argument of a drafter's caller: type, validity check, description of valid values
GAMMA_LIMITS = {"gamma": (int, lambda value: 1 <= value <= 16, "an integer from 1 to 16")}


def check_vocabularies(target, draft) -> None:
    """Raise UserError if two configurations differ in vocabulary size or EOS tokens."""
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
