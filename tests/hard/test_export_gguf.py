"""A GGUF file is the model that it was made of, as llama.cpp reads it."""

import json

import gguf
import pytest
import torch
from conftest import CHECKPOINTS
from test_tokenizer import ADDS_EOT, EOT, MERGES, TEMPLATE, TEXT_A, tokenizer_json

from benchmarks.export_gguf import permute, rope_freq_factors, write_gguf
from llama import LlamaConfig, RopeScaling, RotaryEmbedding, apply_rotary_emb
from loading.load import load_model
from text.tokenizer import load_encoding


def test_queries_and_keys_in_llama_cpps_order_meet_as_in_ours():
    generator = torch.Generator().manual_seed(0)
    angles = torch.tensor([0.1, 0.7, 2.0])  # of a head of six numbers
    cos = torch.cat([angles.cos(), angles.cos()])
    sin = torch.cat([-angles.sin(), angles.sin()])
    x = torch.randn(16, generator=generator)
    ours = []
    theirs = []
    for turn in (torch.ones(3), torch.polar(torch.ones(3), angles)):
        weight = torch.randn(4 * 6, 16, generator=generator)
        vectors = (weight @ x).view(4, 6)
        points = torch.view_as_complex((permute(weight, 4) @ x).view(4, 3, 2))
        ours.append(apply_rotary_emb(vectors, cos, sin) if ours else vectors)
        theirs.append(torch.view_as_real(points * turn).flatten(1))
    assert torch.allclose((theirs[0] * theirs[1]).sum(-1), (ours[0] * ours[1]).sum(-1), atol=1e-5)


GGUF = {  # llama.cpp's names of what a model of one layer has, in the order of our modules
    "gpt2": "token_embd position_embd 0.attn_norm 0.attn_qkv 0.attn_output 0.ffn_norm 0.ffn_up"
    " 0.ffn_down output_norm",
    "llama": "token_embd 0.attn_norm 0.attn_q 0.attn_k 0.attn_v 0.attn_output 0.ffn_norm"
    " 0.ffn_gate 0.ffn_up 0.ffn_down output_norm output",
}
KINDS = [("tiny", "gpt2"), ("tiny_llama", "llama")]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind, family", [*KINDS, ("qwen", "llama")])
def test_a_gguf_file_holds_each_weight_under_llama_cpps_name(
    request, tmp_path, kind, family, dtype
):
    build = request.getfixturevalue(kind.replace("qwen", "tiny_llama"))
    bias = {"qkv_bias": True} if kind == "qwen" else {}
    model = build(dtype=torch.float32, n_embd=32, n_layer=1, **bias)
    write_gguf(model, tmp_path / "model.gguf", dtype)
    file = gguf.GGUFReader(tmp_path / "model.gguf")
    assert file.get_field("general.architecture").contents() == family
    stored = {tensor.name: tensor for tensor in file.tensors}
    names = GGUF[family].replace("0.", "blk.0.").split()
    modules = {}  # ours, in order
    for key, weight in model.named_parameters():
        module, _, part = key.rpartition(".")
        modules.setdefault(module, {})[part] = weight
    assert len(stored) == sum(map(len, modules.values())) + (family == "llama")  # its rotations
    for name, (module, parts) in zip(names, modules.items(), strict=True):
        for part, weight in parts.items():
            heads = {"q_proj": model.config.n_head, "k_proj": model.config.n_kv_head}
            turned = heads.get(module.rpartition(".")[2])
            expected = permute(weight, turned) if turned else weight
            tensor = stored[f"{name}.{part}"]
            found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            whole = weight.dim() == 2 and weight.shape[1] % 32 == 0 and name != "position_embd"
            is_rounded = dtype == "int8" and whole
            assert tensor.tensor_type.name == ("Q8_0" if is_rounded else "F32")
            bound = 0.0
            if is_rounded:
                # Of 32 numbers the largest is 127 steps from 0; the step is rounded, to a float16.
                steps = expected.unflatten(1, (-1, 32)).abs().amax(-1) / 127
                bound = 0.6 * steps.repeat_interleave(32, dim=1)
            assert ((found - expected).abs() <= bound).all()


SHAPES = {  # what llama.cpp reads of a model's shape
    "gpt2": {"feed_forward_length": 64, "attention.head_count": 2, "attention.head_count_kv": 2}
    | {"attention.layer_norm_epsilon": 1e-5},
    "llama": {"feed_forward_length": 24, "attention.head_count": 4, "attention.head_count_kv": 2}
    | {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000, "rope.dimension_count": 6}
    | {"attention.key_length": 6, "attention.value_length": 6},
}


@pytest.mark.parametrize("kind, family", KINDS)
def test_a_gguf_file_says_what_shape_the_model_has(request, tmp_path, kind, family):
    model = request.getfixturevalue(kind)(dtype=torch.float32, n_layer=3, block_size=20)
    write_gguf(model, tmp_path / "model.gguf", "float32")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    about = {"block_count": 3, "context_length": 20, "embedding_length": 16, "vocab_size": 61}
    for name, value in (about | SHAPES[family]).items():
        assert fields[f"{family}.{name}"].contents() == pytest.approx(value), name
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"


def test_llama_cpp_slows_rotations_down_as_we_do():
    """It divides each frequency, of a theta alone, by a number of the file."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    config = LlamaConfig(head_dim=16, rope_theta=1000.0, rope_scaling=scaling)
    plain = 1000.0 ** -(torch.arange(8) / 8)
    ours = RotaryEmbedding(config, torch.float32, "cpu").inv_freq
    assert (plain / rope_freq_factors(config)).tolist() == pytest.approx(ours.tolist())
    assert torch.equal(rope_freq_factors(LlamaConfig(head_dim=16)), torch.ones(8))


def test_a_gguf_file_has_the_vocabulary(tmp_path):
    directory = CHECKPOINTS / "stories-draft"
    model = load_model(directory, torch.float32, "cpu")
    write_gguf(model, tmp_path / "model.gguf", "float32", directory / "tokenizer.json")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")}
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert len(found["tokens"]) == model.config.vocab_size == len(kinds)
    ids = load_encoding(directory, model.config.vocab_size).encode("One day, a dog saw 12 cats.")
    assert "".join(found["tokens"][token] for token in ids) == "OneĠday,ĠaĠdogĠsawĠ12Ġcats."
    end = model.config.eos_token_ids[0]
    assert found["tokens"][end] == "<|endoftext|>"
    assert (kinds[end], kinds[ids[0]]) == (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    raw = json.loads((directory / "tokenizer.json").read_text())
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in raw["model"]["merges"]]
    assert [pair.split(" ") for pair in found["merges"]] == pairs
    names = ("model", "pre", "eos_token_id", "add_bos_token")
    about = [fields[f"tokenizer.ggml.{name}"].contents() for name in names]
    assert about == ["gpt2", "gpt-2", end, False]


def test_a_gguf_file_says_what_a_text_begins_and_ends_with(tiny_llama, tmp_path):
    raw = tokenizer_json(MERGES, ("<|end|>", EOT))
    start, end = (token["id"] for token in reversed(raw["added_tokens"]))
    special = {EOT: {"id": EOT, "ids": [start], "tokens": [EOT]}}
    template = {"single": [ADDS_EOT, TEXT_A], "special_tokens": special}
    raw["post_processor"] = TEMPLATE | template
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    ids = {"bos_token_id": start, "eos_token_ids": (end, start)}
    model = tiny_llama(dtype=torch.float32, vocab_size=start + 3, **ids)
    write_gguf(model, tmp_path / "model.gguf", "float32", tmp_path / "tokenizer.json")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")}
    unused = [f"<unused {token}>" for token in (start + 1, start + 2)]
    assert found["tokens"][end:] == ["<|end|>", EOT, *unused]
    assert found["token_type"][end:] == [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.UNUSED] * 2
    names = ("bos_token_id", "eos_token_id", "add_bos_token")
    about = [fields[f"tokenizer.ggml.{name}"].contents() for name in names]
    assert about == [start, end, True]
