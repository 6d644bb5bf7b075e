"""An architecture is one class with one table. Oracle: Llama, with other names for the same."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import random_tokens
from ranks import logits_of, results
from safetensors.torch import load_file, save_file

from benchmarks.export_gguf import gguf_name, write_gguf
from cache import KVCache
from infer import next_logits
from llama import Llama, LlamaConfig, RMSNorm, apply_rotary_emb, rotary_embedding
from loading import load
from loading.config import llama_to_dict, read_llama_config
from loading.load import load_model, save_model
from model import Model
from native import structs, use_native

TOKENS = torch.tensor([random_tokens(23)])


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.n_head * config.head_dim
        self.wqkv = nn.Linear(config.n_embd, 3 * width, bias=False)
        self.wo = nn.Linear(width, config.n_embd, bias=False)

    def forward(self, x, cos, sin, attend):
        q, k, v = self.wqkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        return self.wo(
            attend(apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v).flatten(-2)
        )


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config)
        self.w1 = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.w3 = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.w2 = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x, cos, sin, attend):
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        inner = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(inner)) * self.w3(inner))


class Other(Llama):
    """A Llama with one matrix for queries, keys and values; its files hold w2 transposed."""

    ROLES = {
        "embedding": ("tok_embeddings", "token_embd"),
        "attn_norm": ("blocks.*.attention_norm", "blk.*.attn_norm"),
        "qkv": ("blocks.*.attention.wqkv", "blk.*.attn_qkv"),
        "attn_out": ("blocks.*.attention.wo", "blk.*.attn_output"),
        "mlp_norm": ("blocks.*.ffn_norm", "blk.*.ffn_norm"),
        "gate": ("blocks.*.w1", "blk.*.ffn_gate"),
        "up": ("blocks.*.w3", "blk.*.ffn_up"),
        "down": ("blocks.*.w2", "blk.*.ffn_down"),
        "norm": ("last_norm", "output_norm"),
        "head": ("output", "output"),
    }
    BASE_MODEL_PREFIX = "inner."
    TRANSPOSED = ("down",)
    IGNORED_SUFFIXES = ("rope.freqs",)

    def __init__(self, config):
        Model.__init__(self)
        self.config = config
        tokens = torch.empty(config.vocab_size, config.n_embd)
        self.tok_embeddings = nn.Embedding.from_pretrained(tokens, freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.last_norm = RMSNorm(config)
        self.output = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def hidden(self, tokens, positions, attend):
        tables = rotary_embedding(self.config, self.dtype, self.device).cos_sin(
            int(positions.max()) + 1
        )
        cos, sin = (table[positions] for table in tables)
        x = self.tok_embeddings(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, functools.partial(attend, layer))
        return x

    def head(self, hidden):
        return self.output(self.last_norm(hidden))


class OtherConfig(LlamaConfig):
    pass


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def both(request, tiny_llama, tmp_path, monkeypatch):
    """Directories with the same weights, as Llama's and as the other architecture's."""

    def read(file, raw):
        return OtherConfig(**vars(read_llama_config(file, raw | {"model_type": "llama"})))

    def fields(config):
        return llama_to_dict(config) | {"model_type": "other"}

    other = load.Architecture(Other, OtherConfig, read, fields)
    monkeypatch.setitem(load.ARCHITECTURES, "other", other)
    shape = {"block_size": 64, "n_kv_head": 4, "n_embd": 32, "n_inner": 64, "n_layer": 11}
    model = tiny_llama(dtype=torch.float32, tie_word_embeddings=request.param, head_dim=8, **shape)
    load.save_model(model, tmp_path / "llama")
    given = load_file(tmp_path / "llama" / "model.safetensors")
    tensors = {"inner.blocks.0.rope.freqs": torch.ones(4)}
    for role, (path, _) in Other.ROLES.items():
        for numbers in [(block,) for block in range(11)] if "*" in path else [()]:
            parts = ("query", "key", "value") if role == "qkv" else (role,)
            names = [f"{model.path(part, *numbers)}.weight" for part in parts]
            if all(name in given for name in names):
                weight = torch.cat([given[name] for name in names])
                stored = weight.t().contiguous() if role == "down" else weight
                tensors[f"inner.{path.replace('*', '{}').format(*numbers)}.weight"] = stored
    config = (tmp_path / "llama" / "config.json").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(config.replace('"llama"', '"other"'))
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    return tmp_path / "llama", tmp_path / "other"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_it_is_loaded_and_saved(both, tmp_path, dtype):
    llama, other = (load_model(name, dtype) for name in both)
    assert type(other) is Other
    assert (other.output.weight is other.tok_embeddings.weight) == llama.config.tie_word_embeddings
    torch.testing.assert_close(other(TOKENS), llama(TOKENS), rtol=1e-4, atol=1e-6)
    if dtype != torch.int8:
        save_model(other, tmp_path / "saved")
        again = load_model(tmp_path / "saved", dtype)
        assert torch.equal(again(TOKENS), other(TOKENS))
        turned = load_file(tmp_path / "saved" / "model.safetensors")["blocks.10.w2.weight"]
        assert torch.equal(turned.t(), other.blocks[10].w2.weight)


def test_random_weights_end_branches_small():
    config = OtherConfig(block_size=64)
    model = Other(config).init_weights()
    wide, small = (getattr(model.blocks[1], name).weight.std().item() for name in ("w1", "w2"))
    assert small == pytest.approx(wide / (2 * config.n_layer) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    "both, parallel_mode", [(False, "gather"), (True, "reduce")], indirect=["both"]
)
def test_ranks_share_it(both, parallel_mode):
    _, other = both
    options = {"dtype": torch.float64, "native": False}
    found = results(3, lambda: logits_of(other, TOKENS, parallel_mode, **options))
    logits, (collectives, _), heads = found[0]
    assert (torch.from_numpy(logits) - load_model(other, torch.float64)(TOKENS)).abs().max() < 1e-12
    assert collectives == 11 * (4 if parallel_mode == "gather" else 2) + 2 and heads == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_c_computes_it(both, compiled, monkeypatch, dtype):
    monkeypatch.setattr(structs, "SUPPORTED", (Llama, Other))
    found = []
    for model in [load_model(name, dtype) for name in both]:
        use_native(model)
        found.append(next_logits(model, TOKENS.tolist(), KVCache(model, 1)))
    assert torch.equal(*found)


def test_its_gguf_file_has_llama_cpps_names(both, tmp_path):
    import gguf

    model = load_model(both[1])
    write_gguf(model, tmp_path / "model.gguf", "float32")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(stored) == len(list(model.parameters())) + 1  # its rotations
    for role, name in (("qkv", "blk.10.attn_qkv"), ("down", "blk.10.ffn_down")):
        data = torch.tensor(stored[f"{name}.weight"].data)
        assert torch.equal(data, model.layer(role, 10).weight)


def test_layers_may_have_numbers_of_their_own_and_end_in_them():
    class Experts(Model):
        ROLES = {
            "down": ("layers.*.experts.*.down", "blk.*.ffn_down_exps"),
            "up": ("h.*.mlp.*", "blk.*.up.*"),
        }

    assert Experts().path("down", 3, 17) == "layers.3.experts.17.down"
    assert Experts().role("layers.3.experts.17.down.weight") == "down"
    name = Experts().path("up", 1, 20) + ".weight"
    assert name == "h.1.mlp.20.weight" and Experts().role(name) == "up"
    assert gguf_name(Experts(), name) == "blk.1.up.20.weight"
