"""What a model's name means, and how its files are read and written. Nothing here knows an architecture."""

import contextlib
import json
import math
import os
import re
import reprlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
RANDOM_NAMES = (*HUB_NAMES, "smollm2-135m")  # shapes that are known without a file


class UserError(ValueError):
    """Something the user can put right: one line that says what is wrong and what is allowed."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))  # names of files and other libraries' texts may have more


@dataclass(frozen=True)
class Source:
    """Where a model comes from. kind: "directory", "hub" or "random". name: a path, or the model's name on the hub."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """A name for tables; of a directory, however spelled, its path: relative if it is in this repository."""
        if self.kind == "directory":
            path, root = Path(self.name).resolve(), Path(__file__).resolve().parent
            return str(path.relative_to(root) if path.is_relative_to(root) else path)
        return self.name if self.kind == "hub" else f"random:{self.name}"

    def find(self, file: str) -> Path | None:
        """The path of one of the model's files, fetched from the hub if need be; None if the model has no such file."""
        if self.kind == "hub":
            return fetch(self.name, file)
        path = Path(self.name) / file
        return path if path.is_file() else None

    def file(self, file: str) -> Path:
        """As `find`, but raises UserError if there is no such file."""
        if path := self.find(file):
            return path
        raise UserError(f"{self.name}: no {file} {self.place}")

    def weights(self) -> list[Path]:
        """The files with the model's tensors: model.safetensors, or else the shards that its index names.

        Raises UserError if one of them is not there, or the index names none.
        """
        if path := self.find("model.safetensors"):
            return [path]
        if index := self.find("model.safetensors.index.json"):
            shards = read_json(index).get("weight_map")
            shards = list(shards.values()) if isinstance(shards, dict) else []
            # Files beside the index only: a path could lead anywhere.
            if not shards or not all(re.fullmatch(r"[\w.-]+\.safetensors", str(file)) for file in shards):
                raise UserError(f"{index}: weight_map does not name a .safetensors file beside it for each tensor")
            return [self.file(shard) for shard in dict.fromkeys(shards)]
        hint = ""
        if self.kind == "directory" and self.find("pytorch_model.bin"):
            hint = (
                "; pytorch_model.bin is a pickle, which can run any code, and is not read: convert it with"
                " transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
            )
        raise UserError(f"{self.name}: no model.safetensors {self.place}{hint}")

    @property
    def place(self) -> str:
        return "in this directory" if self.kind == "directory" else "on the Hugging Face hub"


def parse_name(name) -> Source:
    """What a model's name means: a directory (it comes first), a model of the hub, or `random:` and a known shape.

    Raises UserError for anything else.
    """
    name = str(name)
    if os.path.isdir(name):
        return Source("directory", name)
    if name in HUB_NAMES or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII):
        if not os.path.isdir(os.path.dirname(name)):  # checkpoints/typo is a directory misspelled
            return Source("hub", name)
    if name.startswith("random:") and name.removeprefix("random:") in RANDOM_NAMES:
        return Source("random", name.removeprefix("random:"))
    raise UserError(
        f"unknown model {name!r}: give a directory with config.json and model.safetensors, {', '.join(HUB_NAMES)}"
        f" or ORG/NAME (from the Hugging Face hub), or random: before one of {', '.join(RANDOM_NAMES)}"
    )


COMMITS: dict[str, str] = {}  # of each repository on the hub that this process has read: all files are of one commit


def fetch(name: str, file: str) -> Path | None:
    """Download one file of a model from the hub, unless it is in its cache; None if the model has no such file.

    Raises UserError if that cannot be done. A file takes its place when it is complete, so an interrupted download
    leaves none.
    """
    # Here, because importing it takes longer than loading a small model.
    from huggingface_hub import _CACHED_NO_EXIST, errors, hf_hub_download, logging, try_to_load_from_cache

    logging.set_verbosity_error()  # one error at the end says what a warning for each retry would
    repository = f"openai-community/{name}" if name in HUB_NAMES else name
    try:
        path = Path(hf_hub_download(repository, file, revision=COMMITS.get(repository)))
    except Exception as error:  # offline, refused, disk full: the hub's own errors share no base class
        if isinstance(error, errors.EntryNotFoundError):
            offline = isinstance(error, errors.LocalEntryNotFoundError)
            if not offline or try_to_load_from_cache(repository, file) is _CACHED_NO_EXIST:
                return None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        missing = "" if name in HUB_NAMES else "is no directory here, and "
        raise UserError(f"{name} {missing}could not be fetched from the Hugging Face hub: {reason}") from None
    COMMITS[repository] = path.parent.name
    return path


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises UserError if it cannot be read or holds anything else."""
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a number of 5,000 digits; nested too deeply
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: not a JSON object")
    return raw


def check_values(where, raw: dict, supported: dict[str, tuple]) -> None:
    """Raise UserError unless each key of a JSON object has one of these values; the first is what a missing key means.

    where: what the error begins with. A key `a.b` is that of b in the object a; its value is None if a is no object.
    """
    for key, values in supported.items():
        outer, _, inner = key.rpartition(".")
        owner = raw.get(outer) if outer else raw
        value = owner.get(inner, values[0]) if isinstance(owner, dict) else None
        if value not in values:
            raise UserError(f"{where}: {key} is {reprlib.repr(value)}; supported is {' or '.join(map(repr, values))}")


def read_sizes(file: Path, raw: dict, sizes: dict[str, tuple[str, int]], missing: dict[str, int]) -> dict[str, int]:
    """The sizes in a config.json. sizes: field -> its key, and the largest value. missing: what a missing key means.

    Raises UserError unless each is an integer from 1 to that value.
    """
    fields = {}
    for field, (key, limit) in sizes.items():
        fields[field] = value = raw.get(key, missing.get(field))
        if type(value) is not int or not 1 <= value <= limit:
            raise UserError(f"{file}: {key} is {reprlib.repr(value)}; it must be an integer from 1 to {limit}")
    return fields


def read_token_ids(file: Path, raw: dict, key: str, vocab_size: int, missing: int | None = None) -> tuple[int, ...]:
    """The different ids in a field of a config.json, an id or a list of ids. Raises UserError if it is neither."""
    value = raw.get(key, missing)
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        allowed = f"an id below {vocab_size}, or a list of them"
        raise UserError(f"{file}: {key} is {reprlib.repr(value)}; it must be {allowed}")
    return tuple(dict.fromkeys(ids))


def read_eos(source: Source, raw: dict, vocab_size: int, missing: int | None) -> tuple[int, ...]:
    """The ids that end a text: those of config.json and of generation_config.json, where chat models add theirs.

    raw: what is in config.json. missing: what it means if neither has any. Raises UserError if one of them is no id.
    """
    file, ids = source.find("generation_config.json"), ()
    if file and (more := read_json(file)).get("eos_token_id") is not None:
        ids = read_token_ids(file, more, "eos_token_id", vocab_size)
        if raw.get("eos_token_id") is None:
            return ids
    ids = read_token_ids(source.file("config.json"), raw, "eos_token_id", vocab_size, missing) + ids
    return tuple(dict.fromkeys(ids))


def read_number(file: Path, raw: dict, key: str, missing: float | None, limit: float) -> float:
    """A number in a config.json, above 0 and up to limit. Raises UserError if it is anything else."""
    value = raw.get(key, missing)
    if type(value) not in (int, float) or not 0 < value <= limit:
        raise UserError(f"{file}: {key} is {reprlib.repr(value)}; it must be above 0 and at most {limit}")
    return value


@contextlib.contextmanager
def memory_for(what: str):
    """Raise a UserError that names `what` if memory runs out inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # on a CPU torch raises a plain RuntimeError, as for much else
        if isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error):
            raise UserError(f"{what} do not fit in memory") from None
        raise


BLOCK = 2**22  # bytes of float32 in a block of `read_tensors`


def read_tensors(
    files: list[Path], shapes: dict, prefix: str = "", skip: tuple[str, ...] = (), transposed: tuple[str, ...] = ()
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """The tensors of safetensors files in blocks of rows: (name, which rows, these rows in the dtype of the file).

    With blocks of a few megabytes, loading takes hardly more memory than what becomes of them.
    shapes: name -> shape, what the files must hold together. prefix: may stand before each name. skip: endings of
    names that may be in the files and are not read. transposed: endings of names that are stored as (columns, rows);
    these come whole. Raises UserError if a file is cut short, or a tensor is missing, unexpected, there twice, of
    another shape or not of floating-point numbers.
    """
    file = files[0]
    try:
        stored = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    name = key.removeprefix(prefix)
                    if name in stored:
                        other = stored[name][0]
                        how = f"with and without {prefix!r}" if other == file else f"also in {other.name}"
                        raise UserError(f"{file}: tensor {name} is there twice, {how}")
                    if name not in shapes and not name.endswith(skip):
                        raise UserError(f"{file}: unexpected tensor {name}")
                    stored[name] = file, key
        opened, read = None, 0
        for name, shape in shapes.items():
            if name not in stored:
                raise UserError(f"{file if len(files) == 1 else file.parent}: tensor {name} is missing")
            file, key = stored[name]
            turned = name.endswith(transposed)
            expected = tuple(reversed(shape) if turned else shape)
            height = shape[0] if turned else max(1, BLOCK // (4 * math.prod(shape[1:])))
            for start in range(0, shape[0], height):
                if file != opened or read >= BLOCK:  # what was read of a file counts as memory until it is closed
                    tensors, opened, read = safe_open(file, framework="pt"), file, 0
                tensor, rows = tensors.get_slice(key), slice(start, start + height)
                if (found := tuple(tensor.get_shape())) != expected:
                    raise UserError(f"{file}: tensor {name} is {found}, and config.json says {expected}")
                block = tensor[:].t() if turned else tensor[rows]
                if not block.is_floating_point():
                    raise UserError(f"{file}: tensor {name} is {block.dtype}; it must be floating-point")
                read += block.nbytes
                yield name, rows, block
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None


def write_checkpoint(directory: Path, config: dict, tensors: dict) -> None:
    """Write `config.json` and `model.safetensors`. Raises UserError if that fails; nothing half-written is left then.

    Both are written in a temporary directory first. An old configuration is removed before its weights are replaced,
    and the new one is moved last: at any time a directory with a configuration holds the weights that belong to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            save_file(tensors, Path(temporary) / "model.safetensors", metadata={"format": "pt"})
            (Path(temporary) / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            (directory / "config.json").unlink(missing_ok=True)
            for file in ("model.safetensors", "config.json"):
                (Path(temporary) / file).replace(directory / file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: the model could not be written: {error}") from None
