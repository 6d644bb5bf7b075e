"""Guesses at the next tokens of a text, and what they need to be of use to another model."""

from errors import UserError


def prompt_lookup(
    tokens: list[int], count: int, max_ngram_size: int = 3, min_ngram_size: int = 2
) -> list[int]:
    """Up to count tokens that followed the newest earlier occurrence of the last `max_ngram_size`.

    If they are new, one token less is tried, down to `min_ngram_size`; then there is no guess, [].
    An occurrence may overlap the end of the text.
    """
    for size in range(max_ngram_size, min_ngram_size - 1, -1):
        newest = tokens[-size:]
        # Not from the end of the text itself: nothing follows it.
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == newest:
                return tokens[start + size : start + size + count]
    return []


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
