"""The embedded models for a browser: gpt.c as WebAssembly, and an image of its weights.

A page of the book loads them with script tags, because a page opened from a file may not read other
files. course/book/inference.js runs them.
"""

import base64
import contextlib
import ctypes
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn as nn

from cache import KVCache
from errors import UserError
from gemma import GemmaConfig
from infer import generate, next_logits
from llama import Llama, rotary_embedding
from loading.byte_level import PATTERNS
from loading.load import load_config, load_model
from native import build, use_native
from native.linear import QUANT_TYPES, NativeLinear, pack
from native.structs import model_struct, struct
from quantisation.int8 import Int8Linear
from sampling import SamplingParams, sampling_probs, token_logprob
from text.tokenizer import EOT, load_encoding

BOOK = Path(__file__).with_name("book")
CHECKPOINTS = build.SOURCE.parent.parent / "checkpoints"
MODELS = ("stories-llama", "stories-draft")  # target model and draft model
TIMEOUT = 600  # seconds; the compiler's first run also builds a C library
BASE = 2**21  # address of the weights; the compiler's data and stack are below
FLAGS = (
    *("-target", "wasm32-wasi", "-std=gnu11", "-O3", "-msimd128"),
    # As in native/build.py: a product and a sum are rounded separately.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-mexec-model=reactor", "-s", f"-Wl,--initial-memory={BASE}", "-Wl,-z,stack-size=65536"),
    *("-Wl,--export=gpt_pass", "-Wl,--export=work_floats"),
)
PROMPT = "Once upon a time"  # of Play's recording; play.html has the same prompt and parameters
PARAMS = SamplingParams(max_new_tokens=200, temperature=0.8, top_p=0.95, seed=1)
ALTERNATIVES = 8  # listed for each token
PANEL = 8  # outputs per panel of gpt.c's WebAssembly kernel, whose vectors have 4 floats
GROUP = 2  # int8 weights per multiplication of the kernel


def scripts() -> dict[str, str]:
    """Return the scripts that a page loads on demand, name -> text. Raises BuildError."""
    engine = {
        "source": (BOOK / "inference.js").read_text("utf-8"),
        "code": base64.b64encode(compile_gpt()).decode(),
    }
    found = {"engine.js": f"window.ENGINE = {json.dumps(engine)};\n"}
    for name in MODELS:
        weights = json.dumps(export(CHECKPOINTS / name))
        found[f"weights-{name}.js"] = f'(window.WEIGHTS ??= {{}})["{name}"] = {weights};\n'
    found["recording.js"] = f"window.RECORDING = {json.dumps(record())};\n"
    return found


@torch.inference_mode()
def record() -> dict:
    """Record the text that Play shows before it loads a model, with data of each token."""
    directory = CHECKPOINTS / MODELS[0]
    model = load_model(directory, torch.int8)
    with contextlib.suppress(build.BuildError):
        use_native(model)
    encoding = load_encoding(directory, model.config.vocab_size)
    ids = encoding.encode(PROMPT)
    output = [token for (token,) in generate(model, [ids], PARAMS)]
    (rows,) = next_logits(model, [ids + output[:-1]], KVCache(model), keep=len(output))
    tokens = []
    for row, token in zip(rows, output):
        probs = sampling_probs(row, PARAMS)
        scored = token_logprob(row, token, ALTERNATIVES)
        candidates = [(token, scored.logprob), *scored.top]
        about = [
            {
                "token": id,
                "text": encoding.decode([id]),
                "logprob": round(logprob, 6),
                "p": round(probs[id].item(), 6),
            }
            for id, logprob in candidates
        ]
        if token in model.config.eos_token_ids:
            about[0]["text"] = ""
        tokens.append(about[0] | {"top": about[1:]})
    return {"prompt": PROMPT, "tokens": tokens}


def compile_gpt() -> bytes:
    """Compile gpt.c to WebAssembly without imports. Raises BuildError."""
    if not importlib.util.find_spec("ziglang"):
        raise build.BuildError("gpt.c needs a compiler: pip install '.[book]'")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpt.wasm")
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, str(build.SOURCE)]
        try:
            build.run_compiler([*command, "-o", str(file)], TIMEOUT)
        except subprocess.TimeoutExpired:
            raise build.BuildError(f"ziglang took more than {TIMEOUT} s") from None
        return file.read_bytes()


def export(directory: Path) -> dict:
    """Export a checkpoint for inference.js: int8 weights, shape and tokens.

    Raises UserError for a model that inference.js does not support.
    """
    config = load_config(directory)
    if any(config.sliding_windows) or isinstance(config, GemmaConfig):
        raise UserError(f"{directory}: inference.js supports neither sliding windows nor Gemma")
    model = replace_with_plain_linear(load_model(directory, torch.int8))
    tensors = list(model.state_dict().values())
    tables = [torch.empty(0)] * 2
    if isinstance(model, Llama):
        tables = rotary_embedding(config, torch.float32, torch.device("cpu")).cos_sin(
            config.block_size
        )
    image = Image([*tensors, *tables], config.n_layer)
    shape = ("n_layer", "n_kv_head", "head_dim", "vocab_size", "block_size", "bos_token_id")
    return {
        **{name: getattr(config, name) for name in shape},
        "eos_token_ids": config.eos_token_ids,
        "cos": image.addresses.get(tables[0].data_ptr(), 0),
        "sin": image.addresses.get(tables[1].data_ptr(), 0),
        "model": image.add(bytes(image.translate(model_struct(model)))),
        **vocabulary(directory, config.vocab_size),
        "image": base64.b64encode(image.data).decode(),
    }


def vocabulary(directory: Path, vocab_size: int) -> dict:
    """Return each token's bytes as characters up to U+00FF, and the pre-tokenizer's pattern."""
    encoding = load_encoding(directory, vocab_size)
    tokens = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
    # \s differs between Python and JavaScript.
    pattern = PATTERNS["GPT-2"].replace(r"\s", r"\p{White_Space}")
    return {
        "tokens": [token.decode("latin-1") for token in tokens],
        "special": {EOT: encoding.encode_single_token(EOT)},
        "pattern": pattern.replace(r"\S", r"\P{White_Space}"),
    }


class PlainLinear(NativeLinear):
    """An int8 layer packed for vectors of 4 floats, whatever the vector width of this machine."""

    quant_type = QUANT_TYPES[torch.int8]

    def __init__(self, layer: Int8Linear):
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.weight.shape
        self.weight, self.tail_panel = map(nn.Buffer, pack(layer.weight, PANEL, GROUP))
        self.scale = nn.Buffer(layer.scale)
        self.compensation = nn.Buffer(torch.zeros(self.out_features, dtype=torch.int32))
        self.minimum = None
        self.bias = layer.bias


def replace_with_plain_linear(model: nn.Module) -> nn.Module:
    """Replace int8 layers with packed layers. Layers that share a weight share the packed layer."""
    packed = {}
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, Int8Linear):
                address = layer.weight.data_ptr()
                if address not in packed:
                    packed[address] = PlainLinear(layer)
                setattr(module, name, packed[address])
    return model


class Image:
    """The memory of a WebAssembly program from BASE on, filled with tensors.

    n_layer: length of an array behind a pointer to layers. addresses: data_ptr of a tensor ->
    address in the image.
    """

    def __init__(self, tensors: list[torch.Tensor], n_layer: int):
        self.n_layer = n_layer
        self.data = bytearray()
        self.addresses = {}
        for tensor in tensors:
            if tensor.numel() and tensor.data_ptr() not in self.addresses:
                self.addresses[tensor.data_ptr()] = self.add(tensor.numpy().tobytes())

    def add(self, data: bytes) -> int:
        """Append data, aligned to 16 bytes; return its address."""
        self.data += bytes(-len(self.data) % 16)
        address = BASE + len(self.data)
        self.data += data
        return address

    def translate(self, value, kind: type | None = None):
        """Translate a struct, an array, a pointer or a number to its counterpart in the image.

        kind: ctypes type, because ctypes returns a field's value as a plain number; None:
        type(value).
        """
        kind = kind or type(value)
        if issubclass(kind, ctypes.Structure):
            fields = {name: self.translate(getattr(value, name), of) for name, of in kind._fields_}
            return wasm32_type(kind)(**fields)
        if issubclass(kind, ctypes.Array):
            return wasm32_type(kind)(*(self.translate(each, kind._type_) for each in value))
        if issubclass(kind, ctypes._Pointer):  # to layers; NULL in a layer without experts
            if not value:
                return 0
            layers = (kind._type_ * self.n_layer).from_address(ctypes.addressof(value.contents))
            return self.add(bytes(self.translate(layers)))
        if kind is ctypes.c_void_p:
            return self.addresses[value] if value else 0
        return value


@functools.cache
def wasm32_type(kind: type) -> type:
    """Return the counterpart of a ctypes type in wasm32, where pointers have 32 bits."""
    if issubclass(kind, ctypes.Structure):
        return struct(kind.__name__, **{name: wasm32_type(of) for name, of in kind._fields_})
    if issubclass(kind, ctypes.Array):
        return wasm32_type(kind._type_) * kind._length_
    if issubclass(kind, ctypes._Pointer | ctypes.c_void_p):
        return ctypes.c_uint32
    return kind
