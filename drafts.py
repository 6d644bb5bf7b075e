"""Prompt-lookup drafting, and the vocabulary check of a draft model."""

from errors import UserError

# argument of a drafter's caller: type, validity check, description of valid values
GAMMA_LIMITS = {"gamma": (int, lambda value: 1 <= value <= 16, "an integer from 1 to 16")}


def prompt_lookup(
    tokens: list[int], count: int, max_ngram_size: int = 3, min_ngram_size: int = 2
) -> list[int]:
    """Return up to `count` tokens that followed the latest earlier match of the trailing n-gram.

    The longest n-gram that matches is used, from `max_ngram_size` down to `min_ngram_size` tokens;
    [] if none matches. A match may overlap the trailing n-gram itself.
    """
    for size in range(max_ngram_size, min_ngram_size - 1, -1):
        newest = tokens[-size:]
        # Skip the trailing n-gram itself: no token follows it.
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == newest:
                return tokens[start + size : start + size + count]
    return []


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
