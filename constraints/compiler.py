"""Compiled constraints, cached, and a matcher for a request."""

from constraints.choices import ChoiceMatcher, ChoiceTrie, compile_choices
from constraints.vocabulary import Vocabulary, get_vocabulary
from errors import UserError
from sampling import SamplingParams


def compile_constraint(params: SamplingParams, vocabulary: Vocabulary) -> ChoiceTrie | None:
    """Return the compiled constraint of these parameters; None if unconstrained.

    Raises UserError as `ChoiceTrie` does.
    """
    return compile_choices(params.choices, vocabulary) if params.choices else None


def make_matcher(params: SamplingParams, encoding, config) -> ChoiceMatcher | None:
    """Return a matcher for a sequence with these parameters; None if unconstrained.

    config: the model's configuration. Raises UserError as `compile_constraint` does, and if
    encoding is None.
    """
    if not params.choices:
        return None
    if encoding is None:
        raise UserError("choices: a constraint needs an encoding")
    vocabulary = get_vocabulary(encoding, config.vocab_size, tuple(config.eos_token_ids))
    return compile_constraint(params, vocabulary).matcher()
