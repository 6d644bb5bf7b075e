"""Guesses at the next tokens of a text."""

from checkpoint import UserError


def lookup(tokens: list[int], count: int, longest: int = 3, shortest: int = 2) -> list[int]:
    """Up to count tokens that followed the newest earlier occurrence of the last `longest` tokens, [] without one.

    If they are new, one token less is tried, down to `shortest`. An occurrence may overlap the end of the text.
    """
    for size in range(longest, shortest - 1, -1):
        newest = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):  # not the end of the text itself: nothing follows it
            if tokens[start : start + size] == newest:
                return tokens[start + size : start + size + count]
    return []


def check_vocabularies(target, draft) -> None:
    """Raises UserError if two configurations differ in the number of their tokens, or in those that end a text."""
    (size, eos), (draft_size, draft_eos) = (
        (config.vocab_size, set(config.eos_token_ids)) for config in (target, draft)
    )
    if (size, eos) != (draft_size, draft_eos):
        raise UserError(
            f"target and draft need the same vocabulary: the target has {size} tokens, EOS {sorted(eos)};"
            f" the draft {draft_size}, EOS {sorted(draft_eos)}"
        )
