"""The text that `generate` writes for one prompt."""

import functools

from sampling import SamplingParams


def alone(model, prompt, params=None, stride=None, **fields) -> list[int]:
    """The tokens that `generate` writes for one prompt.

    fields: those of the params, if none are given.
    """
    params = SamplingParams(**fields) if params is None else params
    return list(remembered(model, tuple(prompt), params, stride))


@functools.lru_cache(4000)
def remembered(model, prompt: tuple, params, stride) -> list[int]:
    from infer import generate

    return [token for (token,) in generate(model, [list(prompt)], params, stride=stride)]


def poison(model, token: int):
    """From now on, whatever sees this token is NaN; not its weights, which the head may share."""

    def spoil(module, args, out):
        return out.masked_fill((args[0] == token)[..., None], float("nan"))

    model.layer("embedding").register_forward_hook(spoil)
    return model
