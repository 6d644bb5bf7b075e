"""Sampling defaults for chats, as a model's authors recommend them."""

from collections.abc import Collection, Mapping

from errors import UserError, check_limits
from loading.checkpoint import read_json
from loading.load import Source
from sampling import LIMITS, SamplingParams

GGUF_KEYS = {  # field of SamplingParams -> GGUF key; generation_config.json uses the fields' names
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
FILTERS = ("top_k", "top_p", "min_p")
MODEL_CARD_DEFAULTS = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}  # without either file


def read_sampling_defaults(source: Source) -> dict[str, float]:
    """Return a model's sampling defaults for chats, by the fields of SamplingParams.

    They come from the keys general.sampling.* of a GGUF file, or from generation_config.json, as
    in vLLM with --generation-config auto. "do_sample": false means temperature 0. Filters without a
    temperature imply temperature 1, as in transformers.
    Raises UserError for a value out of range.
    """
    if source.package in MODEL_CARD_DEFAULTS:
        return dict(MODEL_CARD_DEFAULTS[source.package])
    where, keys, values = read_sampling_values(source)
    off = vars(SamplingParams())
    defaults = {}
    for field, key in keys.items():
        value = values.get(key)
        if value is None:
            continue
        if field == "top_k" and value == -1:  # off in llama.cpp and vLLM
            value = 0
        try:
            check_limits({key: LIMITS[field]}, **{key: value})
        except UserError as error:
            hint = "--generation-config none ignores the model's sampling defaults"
            raise UserError(f"{where}: {error}; {hint}") from None
        if field == "temperature" or value != off[field]:
            defaults[field] = value
    if values.get("do_sample") is False:
        defaults["temperature"] = 0.0
    elif values.get("do_sample") or any(field in defaults for field in FILTERS):
        defaults.setdefault("temperature", 1.0)
    return apply_sampling_defaults(defaults, ())


def read_sampling_values(source: Source) -> tuple[str, dict[str, str], dict]:
    """Return the file with a model's sampling parameters, their keys in it, and its contents."""
    keys = GGUF_KEYS
    if source.type == "gguf" and any(key in source.gguf.metadata for key in keys.values()):
        return source.name, keys, source.gguf.metadata
    keys = {field: field for field in keys}
    file = None if source.type == "random" else source.find("generation_config.json")
    return str(file), keys, read_json(file) if file else {}


def apply_sampling_defaults(
    defaults: Mapping[str, float], explicit: Collection[str], temperature: float = 0.0
) -> dict[str, float]:
    """Return the defaults that apply in addition to the user's explicit parameters.

    explicit: their names. temperature: of the request, unless the defaults set it. Greedy decoding
    ignores filters, so they are dropped.
    """
    used = {name: value for name, value in defaults.items() if name not in explicit}
    if used.get("temperature", temperature) == 0:
        used = {name: value for name, value in used.items() if name not in FILTERS}
    return used


def describe_sampling_defaults(defaults: Mapping[str, float]) -> str:
    """Return a note that lists the defaults and says how to turn them off."""
    values = ", ".join(f"{name.replace('_', '-')} {value:.10g}" for name, value in defaults.items())
    return f"note: sampling defaults of the model: {values}; --generation-config none ignores them"
