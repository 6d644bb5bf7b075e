"""A whole pass of GPT-2 or Llama for a few tokens, in C."""

import ctypes
import itertools

import torch

from cache import KVCache
from llama import Llama, rotations
from model import GPT
from native import build
from native.linear import Linear, address

MOST_TOKENS = 16  # in a pass; from 32 on the products of torch are as fast


def struct(name: str, **fields):
    """A ctypes structure with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


POINTER, INT = ctypes.c_void_p, ctypes.c_int64
Norm = struct("Norm", weight=POINTER, bias=POINTER)
SIZES = ("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd")
Layer = struct(
    "Layer", attn_norm=Norm, mlp_norm=Norm, attn_in=Linear * 3, attn_out=Linear, mlp_in=Linear * 2, mlp_out=Linear
)
Model = struct(
    "Model",
    **dict.fromkeys((*SIZES, "widest"), INT),
    epsilon=ctypes.c_float,
    embedding=Linear,
    head=Linear,
    wpe=POINTER,
    cos=POINTER,
    sin=POINTER,
    norm=Norm,
    layers=ctypes.POINTER(Layer),
)
Pass = struct(
    "Pass",
    cache=POINTER,
    **dict.fromkeys(("batch", "max_len", "T", "wanted"), INT),
    **dict.fromkeys(("tokens", "rows", "positions", "wants"), ctypes.POINTER(INT)),
)


class NativePass:
    """The passes of one model, in C. Its weights may change in place, but must stay where they are: what is loaded with
    assign=True, or moved, is not seen. It cannot be copied or pickled.

    target: as in `build.load`. Raises BuildError without compiled code, ValueError for another architecture, and for
    weights that are neither float32 nor int8 or not on the CPU.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config, self.library = model.config, build.load(target)
        self.library.work_floats.restype = INT
        if type(model) not in PARTS:
            allowed = " and ".join(kind.__name__ for kind in PARTS)
            raise ValueError(f"native code computes {allowed}; this is {type(model).__name__}")
        layers, fields, tables = PARTS[type(model)](model)
        # Kept, so that their memory goes to nothing else; `rotations` does not keep a table for ever.
        self.tensors = [*model.state_dict().values(), *tables]
        self.model = Model(
            **{size: getattr(model.config, size) for size in SIZES},
            widest=max(model.config.n_embd, layers[0].attn_in[0].width, layers[0].mlp_in[0].width),
            head=linear(model.lm_head),
            layers=(Layer * len(layers))(*layers),
            **fields,
        )

    def logits(self, new: list[list[int]], rows: list[int], cache: KVCache, keep: int) -> torch.Tensor:
        """As `infer.pass_logits`, for MOST_TOKENS new tokens in all: (B, keep, vocab_size), float32.

        Raises ValueError, before anything changes, for tokens, positions or a cache that C must not touch.
        """
        vocab_size, block_size = self.config.vocab_size, self.config.block_size
        starts, tokens = cache.plan(new, rows), [token for part in new for token in part]
        if len(tokens) > MOST_TOKENS or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"tokens are {tokens}; it takes {MOST_TOKENS} at most, from 0 to {vocab_size - 1}")
        if not all(1 <= keep <= len(part) for part in new) or min(rows) < 0:
            raise ValueError(f"rows {rows} with {[len(part) for part in new]} new tokens, of which {keep} are to keep")
        row_of_token = [row for row, part in zip(rows, new) for _ in part]
        positions = [start + index for start, part in zip(starts, new) for index in range(len(part))]
        if max(positions) >= block_size:
            raise ValueError(f"position {max(positions)} is outside the window of {block_size}")
        ends = itertools.accumulate(len(part) for part in new)
        wanted = [index for end in ends for index in range(end - keep, end)]
        batch, max_len = cache.storage.shape[2:5:2]
        lists = ((INT * len(numbers))(*numbers) for numbers in (tokens, row_of_token, positions, wanted))
        shape = self.config.n_layer, 2, batch, self.config.n_kv_head, max_len, self.config.head_dim
        storage = address(cache.storage, torch.float32, *shape)
        job, threads = Pass(storage, batch, max_len, len(tokens), len(wanted), *lists), torch.get_num_threads()
        # Room for each call its own: ctypes lets other threads of Python run meanwhile.
        work = torch.empty(self.library.work_floats(ctypes.byref(self.model), INT(len(tokens)), INT(max_len), threads))
        logits = torch.empty(len(new), keep, vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(ctypes.byref(self.model), ctypes.byref(job), *buffers, threads)
        cache.record()
        return logits


def gpt_parts(model: GPT) -> tuple[list[Layer], dict, tuple[torch.Tensor, ...]]:
    """The layers, other fields of the struct Model, and tensors in them that are no weights."""
    config = model.config
    layers = [
        Layer(
            attn_norm=norm(block.ln_1),
            attn_in=side_by_side(block.attn.c_attn),
            attn_out=linear(block.attn.c_proj),
            mlp_norm=norm(block.ln_2),
            mlp_in=side_by_side(block.mlp.c_fc),
            mlp_out=linear(block.mlp.c_proj),
        )
        for block in model.h
    ]
    fields = {
        "epsilon": config.layer_norm_epsilon,
        "embedding": linear(model.wte),
        "wpe": address(model.wpe.weight, torch.float32, config.block_size, config.n_embd),
        "norm": norm(model.ln_f),
    }
    return layers, fields, ()


def llama_parts(model: Llama) -> tuple[list[Layer], dict, tuple[torch.Tensor, ...]]:
    """As `gpt_parts`."""
    config = model.config
    layers = [
        Layer(
            attn_norm=norm(block.input_layernorm),
            attn_in=side_by_side(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
            attn_out=linear(block.self_attn.o_proj),
            mlp_norm=norm(block.post_attention_layernorm),
            mlp_in=side_by_side(block.mlp.gate_proj, block.mlp.up_proj),
            mlp_out=linear(block.mlp.down_proj),
        )
        for block in model.layers
    ]
    tables = rotations(config, torch.float32, torch.device("cpu"))
    cos, sin = (address(table, torch.float32, config.block_size, 1, config.head_dim) for table in tables)
    fields = {
        "epsilon": config.norm_epsilon,
        "embedding": linear(model.embed_tokens),
        "cos": cos,
        "sin": sin,
        "norm": norm(model.norm),
    }
    return layers, fields, tables


PARTS = {GPT: gpt_parts, Llama: llama_parts}


def norm(layer) -> Norm:
    shape, bias = layer.weight.shape, getattr(layer, "bias", None)
    return Norm(address(layer.weight, torch.float32, *shape), address(bias, torch.float32, *shape))


def linear(layer) -> Linear:
    (out, size), scale, bias = layer.weight.shape, getattr(layer, "scale", None), getattr(layer, "bias", None)
    kind = torch.float32 if scale is None else torch.int8
    pointers = (
        address(layer.weight, kind, out, size),
        address(scale, torch.float32, out),
        address(bias, torch.float32, out),
    )
    return Linear(*pointers, out, size, out)


def side_by_side(*layers) -> tuple[Linear, ...]:
    """Layers on the same input, whose outputs C writes one after the other."""
    linears = tuple(map(linear, layers))
    for each in linears:
        each.width = sum(other.out_features for other in linears)
    return linears
