"""Compiled constraints, cached, and a matcher for a request."""

import functools
import weakref

from constraints.choices import ChoiceTrie
from constraints.grammar import Grammar
from constraints.matcher import Matcher
from constraints.reasoning import ReasoningMatcher
from constraints.vocabulary import Vocabulary, get_vocabulary
from errors import UserError
from sampling import SamplingParams

compiled = weakref.WeakValueDictionary()  # constraints in use, for example by a matcher


@functools.lru_cache(8)  # keeps recent constraints, which clients often reuse
def compile_source(constraint_field: str, source, vocabulary: Vocabulary) -> ChoiceTrie | Grammar:
    """Compile the source of a SamplingParams field, or return its constraint if still in use."""
    key = constraint_field, source, vocabulary
    found = compiled.get(key)
    if found is None:
        found = ChoiceTrie(source, vocabulary) if constraint_field == "choices" else Grammar(*key)
        found = compiled.setdefault(key, found)  # another thread may have been faster
    return found


@functools.lru_cache(1)
def compile_large_source(*key) -> ChoiceTrie | Grammar:
    """Compile a constraint that is too large to keep eight of, as `compile_source` does."""
    return compile_source.__wrapped__(*key)


def clear_constraint_cache() -> None:
    """Drop the constraints that the cache keeps for later requests."""
    compile_source.cache_clear()
    compile_large_source.cache_clear()


CONSTRAINT_BYTES = 2**18  # minimum memory of a constraint
SOURCE_BYTES = 2**9  # additional memory per source byte; an enum of objects takes 300
LARGE_BYTES = 2**23  # above this, cache one constraint instead of eight


def constraint_bytes(source: str | tuple[str, ...]) -> int:
    """Estimate the bytes of a constraint from its source. Its sequences take additional memory."""
    texts = [source] if isinstance(source, str) else source
    return CONSTRAINT_BYTES + SOURCE_BYTES * sum(len(text.encode()) for text in texts)


def compiled_bytes() -> int:
    """Estimate the memory of all compiled constraints in use, in bytes."""
    return sum(constraint_bytes(source) for _, source, _ in compiled.copy())


def compile_constraint(
    params: SamplingParams, vocabulary: Vocabulary
) -> ChoiceTrie | Grammar | None:
    """Return the compiled constraint of these parameters; None if unconstrained.

    Raises UserError as `ChoiceTrie` and `Grammar` do.
    """
    constraint = params.constraint
    if constraint is None:
        return None
    large = constraint_bytes(constraint.source) > LARGE_BYTES
    return (compile_large_source if large else compile_source)(*constraint, vocabulary)


def make_matcher(params: SamplingParams, encoding, config) -> Matcher | None:
    """Return a matcher for a sequence with these parameters; None if all tokens are allowed.

    config: the model's configuration. Raises UserError as `compile_constraint` does, and if
    encoding is None.
    """
    if not params.needs_matcher:
        return None
    field = params.constraint.field if params.constraint else "thinking_token_budget"
    if encoding is None:
        raise UserError(f"{field}: a token mask needs an encoding")
    if params.constraint is None and not config.eos_token_ids:
        raise UserError(f"{field}: needs a model with an EOS token")
    vocabulary = get_vocabulary(encoding, config.vocab_size, tuple(config.eos_token_ids))
    constraint = compile_constraint(params, vocabulary)
    matcher = constraint.matcher() if constraint else None
    return ReasoningMatcher(params, vocabulary, matcher) if params.reasoning else matcher
