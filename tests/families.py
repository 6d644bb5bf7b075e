"""Model families for parametrised suites: random models of ours and shapes for transformers'."""

import pytest
import torch

from gemma import Gemma2Config

LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}
GEMMA_2 = {"kind": Gemma2Config, "sliding_windows": (3, None, 3)}
GEMMA_2 |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
# The class of transformers -> the fixture and shape of our random model.
FAMILIES = {
    "GPT2": ("tiny", {}),
    "Llama": ("tiny_llama", {}),
    "Qwen2": ("tiny_llama", {"qkv_bias": True}),
    "Qwen3": ("tiny_windows", {"qk_norm": True, "sliding_windows": (None, 5)}),
    "Qwen3Moe": ("tiny_experts", {}),
    "Mistral": ("tiny_windows", {"sliding_windows": (5, 5)}),
    "SmolLM3": ("tiny_llama", {"nope_layers": (1,)}),
    "Phi3": ("tiny_llama", {"rotary_dim": 4}),
    "Gemma2": ("tiny_gemma", GEMMA_2),
    "Gemma3": ("tiny_gemma", {}),
}
EACH_FAMILY = pytest.mark.parametrize("kind", FAMILIES)
SAVED = {"Gemma3": {"sliding_windows": (5, 5, None)}}  # transformers' files have one size
PEERS = [*(kind for kind in FAMILIES if kind not in ("GPT2", "Gemma2")), "Mixtral"]
EAGER = {"experts_implementation": "eager"}  # transformers' other products have no float64


def family(request, kind: str):
    """Return a function that builds a random model of a family; norms and biases are random too."""
    fixture, own = FAMILIES[kind]

    def build(seed=0, **shape):
        return randomize_norms(request.getfixturevalue(fixture)(seed, **own | shape), seed)

    return build


def randomize_norms(model, seed: int):
    """Return a model whose norms and biases are random too."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def random_shape(kind: str, choose) -> dict:
    """Return a random shape of transformers' model of this kind. choose: random.choice."""
    keys = choose([1, 2, 3])
    heads = keys * choose([1, 2, 3])
    n_layer = choose([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": choose([10.0, 10000.0, 500000.0])}
    shape = {
        "saved_as": choose([torch.float64, torch.float32, torch.bfloat16]),
        "shard_size": choose(["1GB", "3KB"]),
        "vocab_size": choose([11, 61]),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "hidden_size": heads * choose([2, 4, 10]),
        "intermediate_size": choose([1, 24, 57]),
        "num_hidden_layers": n_layer,
        "max_position_embeddings": choose([8, 24, 40]),
        "rms_norm_eps": choose([1e-6, 0.1]),
        "tie_word_embeddings": choose([False, True]),
        "rope_parameters": rope,
        "sliding_window": choose([1, 2, 7, 24, 100]),
    }
    if kind not in ("Qwen2", "Phi3"):
        shape["head_dim"] = choose([2, 6, 16, 20])
    if kind in ("Qwen3", "Qwen3Moe"):
        shape["hidden_size"] = choose([7, 16, 30])
    if kind.startswith("Qwen"):
        shape |= {"use_sliding_window": choose([False, True]), "max_window_layers": choose([0, 1])}
    if kind in ("Qwen2", "Qwen3", "Gemma3") and choose([False, True]):
        shape["use_sliding_window"] = True
        types = ["full_attention", "sliding_attention"]
        shape["layer_types"] = [choose(types) for _ in range(n_layer)]
    if kind in ("Qwen3Moe", "Mixtral"):
        count = choose([1, 2, 5, 9])
        shape |= EAGER | {"num_experts": count, "num_local_experts": count}
        shape["num_experts_per_tok"] = choose([1, min(2, count), count])
    if kind == "Qwen3Moe":
        shape |= {"moe_intermediate_size": choose([1, 12]), "norm_topk_prob": choose([False, True])}
        shape |= {"mlp_only_layers": choose([None, [0], [1, 7]])}
        shape |= {"decoder_sparse_step": choose([1, 2])}
    if kind == "SmolLM3":
        shape |= {"use_sliding_window": False}
        shape["no_rope_layers"] = [choose([0, 1]) for _ in range(n_layer)]
    if kind == "Phi3":
        shape["hidden_size"] = heads * choose([4, 8, 20])
        shape["rope_parameters"] = rope | {"partial_rotary_factor": choose([0.5, 0.6, 1.0])}
    if kind == "Gemma3":
        both = {"full_attention": choose([LINEAR, rope]), "sliding_attention": rope}
        shape |= {"rope_parameters": both, "query_pre_attn_scalar": choose([1, 16, 256])}
    return shape
