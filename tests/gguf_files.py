"""GGUF files like those of the export, in which something is different."""

from pathlib import Path

import gguf
import numpy as np

from errors import UserError
from loading.load import load_model

KEEP = gguf.GGUFValueType
OWNER = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
OF = {bool: KEEP.BOOL, int: KEEP.UINT32, float: KEEP.FLOAT32, str: KEEP.STRING}


def edited(file, to, architecture=None, kind=None, values=None, tensors=None, blocks=None):
    """Write a file again and return its path.

    architecture: instead of its own. kind: the type of all matrices, such as "F16". values: keys
    and what they are now, None for one that goes. tensors: names and arrays, or None. blocks:
    names, the bytes of each row, and their type.
    """
    reader = gguf.GGUFReader(file)
    own = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(to, architecture or own)
    given = {}
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            name = name.replace(f"{own}.", f"{architecture or own}.")
            inner = field.types[1] if len(field.types) > 1 else None
            given[name] = field.contents(), field.types[0], inner
    for name, value in (values or {}).items():
        kind_of = KEEP.ARRAY if isinstance(value, list) else OF.get(type(value))
        inner = OF[type(value[0])] if isinstance(value, list) else None
        given[name] = value, kind_of, inner
    for name, (value, *types) in given.items():
        if value is not None and name != "general.architecture":
            writer.add_key_value(name, value, *types)
    stored = {}
    for tensor in reader.tensors:
        stored[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type)
    for name, data in (stored | (tensors or {})).items():
        if data is None:
            continue
        if name in (blocks or {}):
            data, as_kind = blocks[name]
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[as_kind])
            continue
        data = np.asarray(data, np.float32)
        if kind and data.ndim > 1:
            as_kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(data, as_kind), raw_dtype=as_kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def mutated(data: bytes, head: int, count: int, seed: int):
    """Copies of a file with bytes changed, cut off or moved, mostly in its head of this size."""
    generator = np.random.default_rng(seed)
    whole = np.frombuffer(data, np.uint8)
    for number in range(count):
        changed = whole.copy()
        end = len(data) if number % 8 == 0 else head
        place = int(generator.integers(end))
        match number % 5:
            case 0:
                changed = changed[:place]
            case 1:  # a count, a size, an offset
                changed[place : place + 8] = generator.choice([0, 1, 127, 255])
            case 2:
                changed = np.delete(changed, slice(place, place + int(generator.integers(1, 9))))
            case _:
                places = generator.integers(place, min(place + 64, end), 1 + number % 3)
                changed[places] = generator.integers(256, size=len(places))
        yield changed.tobytes()


def loadable(file: Path, head: int, count: int, seed: int) -> int:
    """How many of so many changed files are models; each other is refused in one line."""
    models = 0
    broken = file.with_name("broken.gguf")
    for data in mutated(file.read_bytes(), head, count, seed):
        broken.write_bytes(data)
        try:
            load_model(broken)
            models += 1
        except UserError as error:
            assert "\n" not in str(error)
    return models


def metadata_of(raw: dict, pre: str | None, **keys) -> dict:
    """What a GGUF file says of a tokenizer.json."""
    added = {token["content"]: token["id"] for token in raw["added_tokens"]}
    ids = raw["model"]["vocab"] | added
    kinds = {
        token["content"]: CONTROL if token["special"] else USER_DEFINED
        for token in raw["added_tokens"]
    }
    tokens = sorted(ids, key=ids.get)
    about = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
    }
    return {f"{OWNER}.{key}": value for key, value in (about | keys).items() if value is not None}


def written(file: Path, metadata: dict) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        kinds = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
        kinds.get(type(value), writer.add_int32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
