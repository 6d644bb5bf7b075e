"""A model's weights as gpt.c reads them: its structs, filled once each tensor is checked."""

import ctypes

import torch

from llama import Llama
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
    attn_in=LinearStruct * 3,
    attn_out=LinearStruct,
    mlp_in=LinearStruct * 2,
    mlp_out=LinearStruct,
)
ModelStruct = struct(
    "ModelStruct",
    **dict.fromkeys(("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "widest"), INT),
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
    if config.n_head % config.n_kv_head:
        raise ValueError(f"{config.n_head} heads cannot share the keys of {config.n_kv_head}")
    layers, fields = PARTS[type(model)](model)
    return ModelStruct(
        n_layer=len(layers),
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        n_embd=config.n_embd,
        widest=max(config.n_embd, layers[0].attn_in[0].width, layers[0].mlp_in[0].width),
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
            attn_in=side_by_side(C, (block.attn.c_attn, 3 * C)),
            attn_out=linear(block.attn.c_proj, C, C),
            mlp_norm=norm(block.ln_2, C),
            mlp_in=side_by_side(C, (block.mlp.c_fc, 4 * C)),
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


def llama_parts(model: Llama) -> tuple[list[LayerStruct], dict]:
    """As `gpt_parts`."""
    config = model.config
    C = config.n_embd
    inner = config.n_inner
    queries = config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    layers = []
    for block in model.layers:
        attn = block.self_attn
        mlp = block.mlp
        qkv = (attn.q_proj, queries), (attn.k_proj, keys), (attn.v_proj, keys)
        layer = LayerStruct(
            attn_norm=norm(block.input_layernorm, C),
            attn_in=side_by_side(C, *qkv),
            attn_out=linear(attn.o_proj, C, queries),
            mlp_norm=norm(block.post_attention_layernorm, C),
            mlp_in=side_by_side(C, (mlp.gate_proj, inner), (mlp.up_proj, inner)),
            mlp_out=linear(mlp.down_proj, C, inner),
        )
        layers.append(layer)
    fields = {
        "epsilon": config.norm_epsilon,
        "embedding": linear(model.embed_tokens, config.vocab_size, C),
        "norm": norm(model.norm, C),
    }
    return layers, fields


PARTS = {GPT: gpt_parts, Llama: llama_parts}


def norm(layer, size: int) -> NormStruct:
    weight = address(layer.weight, torch.float32, size)
    return NormStruct(weight, address(getattr(layer, "bias", None), torch.float32, size))


def linear(layer, out: int, size: int) -> LinearStruct:
    """A native layer as C reads it; of one that is to become native, the check that it can."""
    if isinstance(layer, NativeEmbedding):
        layer = layer.linear
    if isinstance(layer, NativeLinear):
        return layer.struct()
    check_layer(layer, out, size)
    return LinearStruct(out_features=out, in_features=size, width=out)


def side_by_side(size: int, *layers) -> tuple[LinearStruct, ...]:
    """Layers on the same input, each with its number of outputs, which C writes side by side."""
    structs = tuple(linear(layer, out, size) for layer, out in layers)
    for each in structs:
        each.width = sum(out for _, out in layers)
    return structs
