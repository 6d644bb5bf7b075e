"""A model's weights as gpt.c reads them: its structs, filled once each tensor is checked."""

import ctypes

import torch

from model import GPT
from native.linear import LinearStruct, NativeEmbedding, NativeLinear, address, check_layer


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
        widest=max(layers[0].attn_in.out_features, layers[0].mlp_in.out_features),
        epsilon=config.norm_epsilon,
        embedding=linear(model.layer("embedding"), config.vocab_size, C),
        head=linear(model.layer("head"), config.vocab_size, C),
        wpe=address(positions, torch.float32, config.block_size, C),
        norm=norm(model.layer("norm"), C),
        layers=(LayerStruct * len(layers))(*layers),
    )


def layer_struct(model, block: int) -> LayerStruct:
    """What C reads of a block, by the roles of its layers."""
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
    weight = address(layer.weight, torch.float32, size)
    return NormStruct(weight, address(layer.bias, torch.float32, size))


def linear(layer, out: int, size: int) -> LinearStruct:
    """A native layer as C reads it; of one that is to become native, the check that it can."""
    if isinstance(layer, NativeEmbedding):
        layer = layer.linear
    if isinstance(layer, NativeLinear):
        return layer.struct()
    check_layer(layer, out, size)
    return LinearStruct(out_features=out, in_features=size)
