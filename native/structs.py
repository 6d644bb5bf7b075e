"""The structs of gpt.c that describe a model, filled after each tensor is checked."""

import ctypes

from cache import layer_sliding_windows
from gemma import Gemma
from llama import ExpertsConfig, Llama, local_rope_layers
from model import GPT
from native.linear import LinearStruct, NativeEmbedding, NativeLinear, check_layer, float_address


def struct(name: str, **fields) -> type[ctypes.Structure]:
    """Return a ctypes structure type with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


POINTER = ctypes.c_void_p
INT = ctypes.c_int64
FLOAT = ctypes.c_float
NormStruct = struct(
    "NormStruct", weight=POINTER, bias=POINTER, weight_offset=FLOAT, output_scale=FLOAT
)
NORMS = "attn_norm", "query_norm", "key_norm", "attn_out_norm", "mlp_norm", "down_norm"
MLPStruct = struct("MLPStruct", inputs=LinearStruct * 2, out=LinearStruct)
LayerStruct = struct(
    "LayerStruct",
    **dict.fromkeys(NORMS, NormStruct),
    attn_in=LinearStruct * 3,
    attn_out=LinearStruct,
    mlp=MLPStruct,
    router=LinearStruct,
    experts=ctypes.POINTER(MLPStruct),
    sliding_window=INT,
    local=INT,
    nope=INT,
)
NO_SLIDING_WINDOW = 2**62  # more positions than any sequence has
ModelStruct = struct(
    "ModelStruct",
    **dict.fromkeys(("n_layer", "n_head", "n_kv_head", "head_dim", "rotary_dim", "n_embd"), INT),
    max_width=INT,
    **dict.fromkeys(("n_expert", "top_k", "norm_topk_prob"), INT),
    **dict.fromkeys(("eps", "embedding_scale", "attn_softcap", "final_softcap"), FLOAT),
    gelu_gate=INT,
    embedding=LinearStruct,
    head=LinearStruct,
    wpe=POINTER,
    norm=NormStruct,
    layers=ctypes.POINTER(LayerStruct),
    fc=LinearStruct,
    embed_norm=NormStruct,
)


SUPPORTED = (GPT, Llama, Gemma)  # gpt.c tells them apart by their layers


def model_struct(model) -> ModelStruct:
    """Return the C struct of a model. It holds addresses, so the tensors must not move.

    Raises ValueError for another architecture, and for weights that have an unsupported dtype, are
    not on the CPU, or do not have the shape that the config gives.
    """
    if type(model) not in SUPPORTED:
        allowed = " and ".join(each.__name__ for each in SUPPORTED)
        raise ValueError(f"native code computes {allowed}; this is {type(model).__name__}")
    config = model.config
    C = config.n_embd
    if config.n_head % config.n_kv_head:
        raise ValueError(f"{config.n_head} heads cannot share the keys of {config.n_kv_head}")
    blocks = model.get_submodule(model.ROLES["attn_norm"][0].partition(".*")[0])
    layers = [layer_struct(model, block) for block in range(len(blocks))]
    positions = getattr(model.layer("positions"), "weight", None)
    experts = getattr(config, "experts", None) or ExpertsConfig(
        num_experts=0, num_experts_per_tok=1, n_inner=0
    )
    rows = experts.num_experts_per_tok * max(C, 2 * experts.n_inner)
    mlps = [layer.mlp.inputs[0].row_stride for layer in layers]
    return ModelStruct(
        n_layer=len(layers),
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        rotary_dim=getattr(config, "rotary_dim", None) or config.head_dim,
        n_embd=C,
        max_width=max(C, layers[0].attn_in[0].row_stride, *mlps, experts.num_experts, rows),
        n_expert=experts.num_experts,
        top_k=experts.num_experts_per_tok,
        norm_topk_prob=experts.norm_topk_prob,
        eps=config.norm_eps,
        embedding_scale=getattr(model, "embedding_scale", 1.0),
        attn_softcap=config.attn_logit_softcapping or 0,
        final_softcap=getattr(config, "final_logit_softcapping", None) or 0,
        gelu_gate=isinstance(model, Gemma),
        embedding=linear(model.layer("embedding"), config.vocab_size, C),
        head=linear(model.layer("head"), config.vocab_size, C),
        wpe=float_address(positions, config.block_size, C),
        norm=norm(model.layer("norm"), C),
        layers=(LayerStruct * len(layers))(*layers),
    )


def draft_head_struct(head) -> ModelStruct:
    """Return the C struct of a native draft head: a model of one block."""
    config = head.config
    C = config.n_embd
    embedding, target_norm, lm_head = head.target_layers
    layer = layer_struct(head, 0)
    widths = layer.attn_in[0].row_stride, layer.mlp.inputs[0].row_stride
    return ModelStruct(
        n_layer=1,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        rotary_dim=config.head_dim,
        n_embd=C,
        max_width=max(2 * C, *widths),
        top_k=1,
        eps=config.norm_eps,
        embedding_scale=1.0,
        embedding=linear(embedding, config.vocab_size, C),
        head=lm_head.struct(),
        norm=norm(target_norm, C),
        layers=(LayerStruct * 1)(layer),
        fc=linear(head.fc, C, 2 * C),
        embed_norm=norm(head.embed_norm, C),
    )


def layer_struct(model, block: int) -> LayerStruct:
    """Return the C struct of a transformer block, by the roles of its layers."""
    config = model.config
    C = config.n_embd
    queries = config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    attn_in = {"qkv": queries + 2 * keys, "query": queries, "key": keys, "value": keys}

    def concatenated(outputs: dict[str, int], *numbers: int) -> tuple[LinearStruct, ...]:
        """Return the structs of layers that share an input and write side by side."""
        layers = {role: model.layer(role, *numbers) for role in outputs}
        roles = [role for role in outputs if layers[role] is not None]
        structs = tuple(linear(layers[role], outputs[role], C) for role in roles)
        for each in structs:
            each.row_stride = sum(outputs[role] for role in roles)
        return structs

    def mlp(prefix: str, inner: int, *numbers: int) -> MLPStruct:
        inputs = concatenated({f"{prefix}gate": inner, f"{prefix}up": inner}, *numbers)
        return MLPStruct(inputs, linear(model.layer(f"{prefix}down", *numbers), C, inner))

    router = model.layer("router", block)
    if router is not None:
        sizes = config.experts
        experts = [
            mlp("expert_", sizes.n_inner, block, number) for number in range(sizes.num_experts)
        ]
        mlps = {
            "router": linear(router, sizes.num_experts, C),
            "experts": (MLPStruct * len(experts))(*experts),
        }
    else:
        mlps = {"mlp": mlp("", config.n_inner, block)}
    return LayerStruct(
        attn_norm=norm(model.layer("attn_norm", block), C),
        attn_in=concatenated(attn_in, block),
        query_norm=norm(model.layer("query_norm", block), config.head_dim),
        key_norm=norm(model.layer("key_norm", block), config.head_dim),
        attn_out_norm=norm(model.layer("attn_out_norm", block), C),
        attn_out=linear(model.layer("attn_out", block), C, queries),
        mlp_norm=norm(model.layer("mlp_norm", block), C),
        **mlps,
        down_norm=norm(model.layer("down_norm", block), C),
        sliding_window=layer_sliding_windows(config)[block] or NO_SLIDING_WINDOW,
        local=isinstance(model, Llama) and local_rope_layers(config)[block],
        nope=isinstance(model, Llama) and block in config.nope_layers,
    )


def norm(layer, size: int) -> NormStruct:
    """Return the C struct of a norm, with NULL for a missing weight or bias."""
    tensors = (getattr(layer, name, None) for name in ("weight", "bias"))
    numbers = getattr(layer, "weight_offset", 0.0), getattr(layer, "output_scale", 1.0)
    return NormStruct(*(float_address(tensor, size) for tensor in tensors), *numbers)


def linear(layer, out: int, size: int) -> LinearStruct:
    """Return the C struct of a native layer, or check a layer that is to become native.

    The struct of a layer that is not native yet has only sizes.
    """
    if isinstance(layer, NativeEmbedding):
        layer = layer.linear
    if isinstance(layer, NativeLinear):
        return layer.struct()
    check_layer(layer, out, size)
    return LinearStruct(out_features=out, in_features=size, row_stride=out)
