"""The structs of gpt.c that describe a model, filled after each tensor is checked."""

import ctypes

import torch

from model import GPT
from native.linear import LinearStruct, NativeEmbedding, NativeLinear, address, check_layer


def struct(name: str, **fields) -> type[ctypes.Structure]:
    """Return a ctypes structure type with these fields, in order."""
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
    **dict.fromkeys(("n_layer", "n_head", "head_dim", "n_embd", "max_width"), INT),
    eps=ctypes.c_float,
    embedding=LinearStruct,
    head=LinearStruct,
    wpe=POINTER,
    norm=NormStruct,
    layers=ctypes.POINTER(LayerStruct),
)


def model_struct(model) -> ModelStruct:
    """Return the C struct of a model. It holds addresses, so the tensors must not move.

    Raises ValueError for another architecture, and for weights that are neither float32 nor int8,
    are not on the CPU, or do not have the shape that the config gives.
    """
    if type(model) is not GPT:
        raise ValueError(f"native code computes GPT; this is {type(model).__name__}")
    config = model.config
    C = config.n_embd
    blocks = model.get_submodule(model.ROLES["attn_norm"].partition(".*")[0])
    layers = [layer_struct(model, block) for block in range(len(blocks))]
    positions = model.layer("positions").weight
    return ModelStruct(
        n_layer=len(layers),
        n_head=config.n_head,
        head_dim=config.head_dim,
        n_embd=C,
        max_width=max(layers[0].attn_in.out_features, layers[0].mlp_in.out_features),
        eps=config.norm_eps,
        embedding=linear(model.layer("embedding"), config.vocab_size, C),
        head=linear(model.layer("head"), config.vocab_size, C),
        wpe=address(positions, torch.float32, config.block_size, C),
        norm=norm(model.layer("norm"), C),
        layers=(LayerStruct * len(layers))(*layers),
    )


def layer_struct(model, block: int) -> LayerStruct:
    """Return the C struct of a transformer block, by the roles of its layers."""
    config = model.config
    C = config.n_embd
    inner = config.n_inner
    queries = config.n_head * config.head_dim
    return LayerStruct(
        attn_norm=norm(model.layer("attn_norm", block), C),
        attn_in=linear(model.layer("qkv", block), 3 * queries, C),
        attn_out=linear(model.layer("attn_out", block), C, queries),
        mlp_norm=norm(model.layer("mlp_norm", block), C),
        mlp_in=linear(model.layer("up", block), inner, C),
        mlp_out=linear(model.layer("down", block), C, inner),
    )


def norm(layer, size: int) -> NormStruct:
    """Return the C struct of a norm."""
    tensors = layer.weight, layer.bias
    return NormStruct(*(address(tensor, torch.float32, size) for tensor in tensors))


def linear(layer, out: int, size: int) -> LinearStruct:
    """Return the C struct of a native layer, or check a layer that is to become native.

    The struct of a layer that is not native yet has only sizes.
    """
    if isinstance(layer, NativeEmbedding):
        layer = layer.linear
    if isinstance(layer, NativeLinear):
        return layer.struct()
    check_layer(layer, out, size)
    return LinearStruct(out_features=out, in_features=size)
