"""The output of `generate` for one prompt."""

import functools

from infer import generate
from sampling import SamplingParams


def alone(model, prompt, params=None, stride=None, **fields) -> list[int]:
    """Return the output of `generate` for one prompt. fields: of params None."""
    params = SamplingParams(**fields) if params is None else params
    return list(remembered(model, tuple(prompt), params, stride))


@functools.lru_cache(4000)
def remembered(model, prompt: tuple, params, stride) -> list[int]:
    return [token for (token,) in generate(model, [list(prompt)], params, stride=stride)]


def poison(model, token: int):
    """Make every activation that depends on this token NaN, but no weight."""

    def spoil(module, args, out):
        return out.masked_fill((args[0] == token)[..., None], float("nan"))

    model.layer("embedding").register_forward_hook(spoil)
    return model
