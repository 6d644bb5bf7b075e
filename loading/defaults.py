"""Sampling parameters that a model's authors recommend, for chats where nobody names others."""

from collections.abc import Collection, Mapping

from errors import UserError, check_limits
from loading.checkpoint import read_json
from loading.load import Source
from sampling import LIMITS, SamplingParams

GGUF_KEYS = {  # by the field of SamplingParams; generation_config.json has the names of the fields
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
FILTERS = ("top_k", "top_p", "min_p")
CARDS = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}  # of models without either file


def read_defaults(source: Source) -> dict[str, float]:
    """Return the sampling parameters of a model for chats, by the fields of SamplingParams.

    They come from the keys general.sampling.* of a GGUF file, or from generation_config.json, as
    vLLM takes them with --generation-config auto. "do_sample": false is temperature 0. Parameters
    of a draw without a temperature mean 1, as in transformers.
    Raises UserError for a value out of range.
    """
    if source.package in CARDS:
        return dict(CARDS[source.package])
    where, keys, given = read_given(source)
    off = vars(SamplingParams())
    found = {}
    for field, key in keys.items():
        value = given.get(key)
        if value is None:
            continue
        if field == "top_k" and value == -1:  # llama.cpp's and vLLM's way to say that it is off
            value = 0
        try:
            check_limits({key: LIMITS[field]}, **{key: value})
        except UserError as error:
            hint = "--generation-config none leaves out the model's sampling defaults"
            raise UserError(f"{where}: {error}; {hint}") from None
        if field == "temperature" or value != off[field]:
            found[field] = value
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    elif given.get("do_sample") or any(field in found for field in FILTERS):
        found.setdefault("temperature", 1.0)
    return apply_defaults(found, ())


def read_given(source: Source) -> tuple[str, dict[str, str], dict]:
    """Return a model's file with sampling parameters, their names in it, and what it says."""
    keys = GGUF_KEYS
    if source.kind == "gguf" and any(key in source.gguf.metadata for key in keys.values()):
        return source.name, keys, source.gguf.metadata
    keys = {field: field for field in keys}
    file = None if source.kind == "random" else source.find("generation_config.json")
    return str(file), keys, read_json(file) if file else {}


def apply_defaults(
    defaults: Mapping[str, float], given: Collection[str], temperature: float = 0.0
) -> dict[str, float]:
    """Return the defaults that count beside the parameters that a user has given.

    given: their names. temperature: of the text, if the defaults do not say it. A greedy text has
    no use for filters.
    """
    used = {name: value for name, value in defaults.items() if name not in given}
    if used.get("temperature", temperature) == 0:
        used = {name: value for name, value in used.items() if name not in FILTERS}
    return used


def describe(defaults: Mapping[str, float]) -> str:
    """Return a note that names the defaults, and how to turn them off."""
    values = ", ".join(f"{name.replace('_', '-')} {value:.10g}" for name, value in defaults.items())
    return f"note: sampling defaults of the model: {values}; --generation-config none ignores them"
