"""A model from its name: what a name means, and how a model is loaded and saved."""

import functools
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import read_json, read_tensors, write_checkpoint
from config import gpt_fields, read_gpt_config
from errors import UserError, memory_for
from int8 import Int8Embedding, store, to_int8, with_int8_layers
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PRESETS = {  # shapes that are known without a file: `random:` stands before their names
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    kind: "directory", "hub" or "random". name: a path, the model's name on the hub, or a shape's.
    """

    kind: str
    name: str

    @property
    def label(self) -> str:
        """A name for tables; a directory's path, relative if it is in this repository."""
        if self.kind == "directory":
            path, root = Path(self.name).resolve(), Path(__file__).resolve().parent
            return str(path.relative_to(root) if path.is_relative_to(root) else path)
        return self.name if self.kind == "hub" else f"random:{self.name}"

    @functools.cached_property
    def directory(self) -> Path:
        """The directory with the model's two files, fetched from the hub if need be.

        Raises UserError without both.
        """
        directory = fetch(self.name) if self.kind == "hub" else Path(self.name)
        for file in ("config.json", "model.safetensors"):
            if not is_file(directory / file):
                hint = ""
                if file == "model.safetensors" and is_file(directory / "pytorch_model.bin"):
                    hint = PICKLE
                raise UserError(f"{directory}: no {file} in this directory{hint}")
        return directory


PICKLE = (
    "; pytorch_model.bin is a pickle, which can run any code, and is not read: convert it with"
    " transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
)


def is_file(path: Path) -> bool:
    """As `Path.is_file`. Raises UserError where one may not look, and for too long a name."""
    try:
        return path.is_file()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def parse_name(name) -> Source:
    """What a model's name means: a directory (it comes first), a name on the hub, or a known shape.

    name: a string or a path; a Source is what it is. Raises UserError for anything else.
    """
    if isinstance(name, Source):
        return name
    name = str(name)
    if os.path.isdir(name):
        return Source("directory", name)
    if name in HUB_NAMES:
        return Source("hub", name)
    shape = name.removeprefix("random:")
    if shape != name and shape in PRESETS:
        return Source("random", shape)
    allowed = f"{', '.join(HUB_NAMES)} (from the Hugging Face hub), or random: before one of these"
    raise UserError(
        f"unknown model {name!r}: give a directory with config.json and model.safetensors,"
        f" one of {allowed}"
    )


def fetch(name: str) -> Path:
    """Download a model's two files from the hub, unless they are in its cache; the directory.

    Raises UserError if that cannot be done.
    """
    # Here, because importing it takes longer than loading a small model.
    from huggingface_hub import hf_hub_download, logging

    logging.set_verbosity_error()  # one error at the end says what a warning for each retry would
    try:
        for file in ("config.json", "model.safetensors"):
            path = hf_hub_download(f"openai-community/{name}", file)
    except Exception as error:  # offline, refused, disk full: the hub's errors share no base class
        raise UserError(
            f"{name} could not be fetched from the Hugging Face hub: {first_line(error)}"
        ) from None
    return Path(path).parent


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


PREFIX = "transformer."  # may stand before the names of tensors in a file
# Tensors of some files that are not read: the head once more, and old mask buffers.
SKIPPED = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")
# GPT-2's linear layers are stored as (in, out).
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def load_config(name) -> GPTConfig:
    """The configuration of a model, without its weights. name and errors: as of `load_model`."""
    source = parse_name(name)
    if source.kind == "random":
        return PRESETS[source.name]
    file = source.directory / "config.json"
    return read_gpt_config(file, read_json(file))


def load_model(name, dtype: torch.dtype = torch.float32, device="cpu") -> GPT:
    """Load a model for inference, straight to its dtype and device; torch.int8: as int8.py has it.

    name: what `parse_name` understands: a directory in Hugging Face form, `gpt2`, `gpt2-medium`,
    `gpt2-large` or `gpt2-xl` from the hub, or `random:` before one of these, for its shape with
    random weights. Raises UserError, in one line that says what is wrong, for anything else, and if
    memory runs out.
    """
    source = parse_name(name)
    config = load_config(source)
    with torch.device("meta"):
        model = GPT(config)
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    floats = torch.float32 if dtype == torch.int8 else dtype  # of all that is not int8
    with memory_for(f"{source.label}: {size:,} bytes of weights"):
        if source.kind == "random":
            seeded = torch.Generator(device).manual_seed(0)  # the same weights in each process
            model = model.to(floats).to_empty(device=device).tie_weights()
            model.init_weights(generator=seeded).eval()
            return to_int8(model) if dtype == torch.int8 else model
        shapes = {key: weight.shape for key, weight in model.named_parameters()}
        if dtype == torch.int8:
            with_int8_layers(model)
        weights = {}
        for key, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            kind = tensor.dtype if tensor.dtype == torch.int8 else floats
            weights[key] = torch.empty(tensor.shape, dtype=kind, device=device)
        file = source.directory / "model.safetensors"
        for key, rows, block in read_tensors(file, shapes, PREFIX, SKIPPED, TRANSPOSED):
            store(weights, key, rows, block)
    model.load_state_dict(weights, assign=True, strict=False)
    return model.tie_weights().eval()


def save_model(model: GPT, directory) -> None:
    """Write `config.json` and `model.safetensors`, in the weights' dtype; transformers reads them.

    Raises UserError if they cannot be written; then nothing half-written is left. Raises ValueError
    for weights in int8, which this format does not hold.
    """
    if isinstance(model.wte, Int8Embedding):
        raise ValueError("a model with int8 weights is not saved; save the one it was made from")
    fields = gpt_fields(model.config) | {"dtype": str(model.dtype).removeprefix("torch.")}
    # Not state_dict: there the head is a second name for the embedding, and would be written twice.
    weights = {}
    for key, weight in model.named_parameters():
        stored = weight.t() if key.endswith(TRANSPOSED) else weight
        weights[key] = stored.detach().contiguous()
    write_checkpoint(Path(directory), fields, weights)
