"""The embedded models, loaded once, and what the runs of several pictures share."""

import functools

import torch

from command_line import STORIES
from errors import UserError
from infer import generate
from loading.load import load_model
from loading.tokenizer import load_encoding
from model import Model
from native import BuildError, use_native
from sampling import SamplingParams

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys and eat "
    "yummy food. One day, she found a big, red ball in her room."
)


def load(name: str = "stories") -> Model:
    """An embedded model, in float32 on the CPU."""
    return load_once(name)


@functools.cache
def load_once(name: str) -> Model:
    torch.set_num_threads(1)  # fast enough, and on a busy machine several wait for each other
    return load_model(STORIES.with_name(name), torch.float32, "cpu").requires_grad_(False)


@functools.cache
def encoding():
    """That of all embedded models: they share a vocabulary."""
    return load_encoding(STORIES, load().config.vocab_size)


def encode(prompt: str, most: int, least: int = 1) -> list[int]:
    """The ids of a prompt. Raises UserError if they are fewer or more than a picture can show."""
    ids = encoding().encode(prompt, allowed_special="all")
    if not least <= len(ids) <= most:
        raise UserError(f"the prompt has {len(ids)} tokens; this picture shows {least} to {most}")
    return ids


def text_of(id: int) -> str:
    return encoding().decode([id])


@torch.inference_mode()
def next_logits(text: list[int], name: str = "stories") -> torch.Tensor:
    """The logits after a text, (vocab_size,)."""
    return load(name)(torch.tensor([text]))[0, -1]


def likely(probs: torch.Tensor, count: int) -> list[tuple[str, float]]:
    """The most likely tokens, best first."""
    best = probs.topk(count)
    return [(text_of(id), p) for id, p in zip(best.indices.tolist(), best.values.tolist())]


def write(ids: list[int], name: str = "stories", stride: int | None = None, **params) -> list[int]:
    """What `generate` writes after these ids. params: those of SamplingParams."""
    steps = generate(load(name), [ids], SamplingParams(**params), stride=stride)
    return [token for (token,) in steps]


@functools.cache
def native(name: str = "stories", dtype: torch.dtype = torch.float32) -> Model:
    """A model that C computes. Raises UserError where its code cannot be compiled."""
    torch.set_num_threads(1)
    model = load_model(STORIES.with_name(name), dtype, "cpu")
    try:
        use_native(model)
    except BuildError as error:
        raise UserError(f"this picture needs compiled code: {error}") from None
    return model
