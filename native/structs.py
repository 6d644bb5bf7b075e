"""A model's weights as gpt.c reads them: its structs, filled once each tensor is checked."""

import ctypes

import torch

from model import GPT
from native.linear import LinearStruct, address, linear_struct


def struct(name: str, **fields) -> type[ctypes.Structure]:
    """A ctypes structure with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


POINTER = ctypes.c_void_p
INT = ctypes.c_int64
NormStruct = struct("NormStruct", weight=POINTER, bias=POINTER)
LayerStruct = struct(
    "LayerStruct",
    attn_norm=NormStruct,
    mlp_norm=NormStruct,
    attn_in=LinearStruct,
    attn_out=LinearStruct,
    mlp_in=LinearStruct,
    mlp_out=LinearStruct,
)
ModelStruct = struct(
    "ModelStruct",
    **dict.fromkeys(("n_layer", "n_head", "head_dim", "n_embd", "widest"), INT),
    epsilon=ctypes.c_float,
    embedding=LinearStruct,
    head=LinearStruct,
    wpe=POINTER,
    norm=NormStruct,
    layers=ctypes.POINTER(LayerStruct),
)


def model_struct(model) -> ModelStruct:
    """What C reads of a model. It holds addresses only: the tensors must stay where they are.

    Raises ValueError for another architecture, and for weights that are neither float32 nor int8,
    not on the CPU, or not of the shape that the config says.
    """
    if type(model) not in PARTS:
        allowed = " and ".join(kind.__name__ for kind in PARTS)
        raise ValueError(f"native code computes {allowed}; this is {type(model).__name__}")
    config = model.config
    layers, fields = PARTS[type(model)](model)
    return ModelStruct(
        n_layer=len(layers),
        n_head=config.n_head,
        head_dim=config.head_dim,
        n_embd=config.n_embd,
        widest=4 * config.n_embd,
        head=linear(model.lm_head, config.vocab_size, config.n_embd),
        layers=(LayerStruct * len(layers))(*layers),
        **fields,
    )


def gpt_parts(model: GPT) -> tuple[list[LayerStruct], dict]:
    """The layers, and the fields of ModelStruct that are GPT-2's own."""
    config = model.config
    C = config.n_embd
    layers = [
        LayerStruct(
            attn_norm=norm(block.ln_1, C),
            attn_in=linear(block.attn.c_attn, 3 * C, C),
            attn_out=linear(block.attn.c_proj, C, C),
            mlp_norm=norm(block.ln_2, C),
            mlp_in=linear(block.mlp.c_fc, 4 * C, C),
            mlp_out=linear(block.mlp.c_proj, C, 4 * C),
        )
        for block in model.h
    ]
    fields = {
        "epsilon": config.layer_norm_epsilon,
        "embedding": linear(model.wte, config.vocab_size, C),
        "wpe": address(model.wpe.weight, torch.float32, config.block_size, C),
        "norm": norm(model.ln_f, C),
    }
    return layers, fields


PARTS = {GPT: gpt_parts}


def norm(layer, size: int) -> NormStruct:
    weight = address(layer.weight, torch.float32, size)
    return NormStruct(weight, address(layer.bias, torch.float32, size))


def linear(layer, out: int, size: int) -> LinearStruct:
    scale = getattr(layer, "scale", None)
    return linear_struct(layer.weight, scale, getattr(layer, "bias", None), out, size)
