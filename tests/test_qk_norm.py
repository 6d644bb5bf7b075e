"""Lesson 105: Qwen3, a Llama whose queries and keys are normalized, in every backend."""

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    TARGETS,
    check_command_line,
    check_modes,
    difference,
    edit_json,
    load,
    random_tokens,
)
from engines import check_own_runs
from natives import (
    WEIGHT_DTYPES,
    in_pieces,
    native,
    native_in_dtype,
    on_each_target,
    random_texts,
    threads,
    to_int8,
)
from ranks import ROUNDING, check_two_ranks, compared, logits_of, results, save_uneven
from test_llama import check_greedy_text
from test_llama_config import SMALL

from errors import UserError
from loading.load import save_model


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_llama):
    """`tiny_llama` with norms whose weights are not 1."""

    def build(seed=0, **shape):
        model = tiny_llama(seed, qk_norm=True, **shape)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
        return model

    return build


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    check_command_line(cli, tmp_path, "Qwen3", 20, "--backend", backend, head_dim=6)


@pytest.mark.parametrize("seed", range(25))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    keys = choose([1, 2, 3])
    theirs, directory = peer(
        "Qwen3",
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_attention_heads=keys * choose([1, 2, 3]),
        num_key_value_heads=keys,
        head_dim=choose([2, 6, 16, 20]),
        hidden_size=choose([7, 16, 30]),
        num_hidden_layers=choose([1, 3]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        rope_parameters={"rope_type": "default", "rope_theta": choose([10.0, 1e6])},
    )
    ours = load(directory)
    attention = ours.layers[0].self_attn
    assert attention.q_proj.bias is attention.k_proj.bias is attention.v_proj.bias is None
    assert difference(ours, theirs) < 1e-9
    assert difference(load(directory, torch.float32), theirs.float()) < 1e-4


def test_greedy_text_equals_transformers(peer):
    check_greedy_text(peer, "Qwen3", head_dim=6)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_modes_of_the_lessons_before(tiny_qwen3, dtype):
    """Ragged rows, the window, speculation and beams give the text that a pass over all gives."""
    model = tiny_qwen3() if dtype == "float64" else to_int8(tiny_qwen3())
    prompts = [[1, 2, 3], [4], random_tokens(30)]
    check_modes(model, tiny_qwen3(seed=1), prompts, 40)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_close(tiny_qwen3, dtype):
    model = tiny_qwen3()
    texts = random_texts(model, 2)
    exact = model(texts).log_softmax(-1)
    half = copy.deepcopy(model).to(dtype)(texts).double().log_softmax(-1)
    divergence = (exact.exp() * (exact - half)).sum(-1).mean()
    assert divergence < {torch.float16: 1e-3, torch.bfloat16: 0.01}[dtype]


@pytest.mark.parametrize("backend", ["torch", "native", "int8"])
def test_the_engine_writes_the_text_of_each_own_run(tiny_qwen3, compiled, backend):
    model = tiny_qwen3(dtype=torch.float64 if backend == "torch" else torch.float32)
    if backend != "torch":
        model = native_in_dtype(model, torch.int8 if backend == "int8" else torch.float32)
    check_own_runs(model, (3, 1, 16, 40, 9, 2), 30)


# In C.

FORMS = [
    {"n_head": 1, "n_kv_head": 1, "head_dim": 2, "n_embd": 3, "n_inner": 1},
    {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57},
    {"head_dim": 64, "n_embd": 130, "n_inner": 130, "tie_word_embeddings": True},
    {"n_kv_head": 1, "head_dim": 128, "n_embd": 33, "norm_eps": 0.1},
]


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_computes_logits_as_near_float64s_as_torch_does(tiny_qwen3, compiled, target, form):
    model = tiny_qwen3(dtype=torch.float32, **form)
    texts = random_texts(model, 2)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 5, 16):  # decode, and prefill in blocks of queries and without
        found = in_pieces(model, texts, size)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@WEIGHT_DTYPES
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_c_has_the_same_bits_for_each_number_of_tokens_and_threads(
    tiny_qwen3, compiled, dtype, form
):
    model = native_in_dtype(tiny_qwen3(dtype=torch.float32, **form), dtype)
    texts = random_texts(model, 2)
    expected = in_pieces(model, texts, 1)
    for size, count in ((16, 1), (5, 2), (1, 5)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts, size), expected)


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_int8_logits_in_c_are_those_of_every_processor_and_near_torchs(tiny_qwen3, compiled, form):
    model = to_int8(tiny_qwen3(dtype=torch.float32, **form))
    texts = random_texts(model, 1)
    expected = model(texts)
    found = on_each_target(model, texts, 4)
    assert (found - expected).abs().mean() < 0.03 * expected.std()


def test_c_reads_no_norm_of_another_size(tiny_qwen3, compiled):
    model = tiny_qwen3(dtype=torch.float32)
    model.layers[1].self_attn.k_norm.weight = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match=r"reads contiguous torch.float32 \(6,\) .* \(16,\)"):
        native(model)


# On several processes.


@WEIGHT_DTYPES
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_logits_of_one_process(tiny_qwen3, compiled, tmp_path, dtype, size):
    name = save_uneven(tiny_qwen3, tmp_path, "tiny_llama")
    found, _, heads = compared(size, name, torch.tensor([random_tokens(23)]), dtype=dtype)
    assert found <= ROUNDING[dtype] and heads == {2: [3, 2], 4: [2, 1, 1, 1]}[size]


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_ranks_in_float64(tiny_qwen3, tmp_path, parallel_mode):
    name = save_uneven(tiny_qwen3, tmp_path, "tiny_llama")
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    found = results(3, lambda: logits_of(name, tokens, parallel_mode, **options))[0][0]
    with torch.inference_mode():
        assert (torch.from_numpy(found) - load(name)(tokens)).abs().max() < 1e-11


def test_every_rank_has_both_norms_whole(tiny_qwen3):
    from parallel.shards import ShardPlan

    model = tiny_qwen3()
    for rank in range(2):
        plan = ShardPlan(model, SimpleNamespace(size=2, rank=rank, parallel_mode="gather"))
        for name in ("q_norm", "k_norm"):
            assert plan.shards[f"layers.1.self_attn.{name}.weight"].rows == [range(6)]


def test_two_ranks_write_the_texts_of_one(tiny_qwen3, engine_cli, tmp_path):
    check_two_ranks(tiny_qwen3, engine_cli, tmp_path, 20)


# Its files.


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"n_embd": 18}], ids=str)
def test_save_and_load_give_the_same_model(tiny_qwen3, tmp_path, shape):
    """Heads of a Qwen3 need not divide its width."""
    from transformers import AutoModelForCausalLM

    ours = tiny_qwen3(dtype=torch.float32, rope_theta=500.0, **shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert difference(ours, theirs) < 1e-4
    assert load(tmp_path).config == ours.config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["architectures"], saved["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")


QWEN3 = SMALL | {"model_type": "qwen3"}


def read(**values):
    from loading.config import read_llama_config

    return read_llama_config(Path("config.json"), QWEN3 | values)


def test_what_a_config_lacks_is_as_in_transformers():
    import transformers

    config = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "bos_token_id")}
    (ours, theirs) = read(head_dim=None, bos_token_id=None), transformers.Qwen3Config(**config)
    assert ours.head_dim == theirs.head_dim == 128
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings is False
    assert (ours.qk_norm, ours.qkv_bias, ours.bos_token_id) == (True, False, 60)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "layer_types": ["full_attention"] * 2, "use_sliding_window": False},
        {"rope_theta": 1e6, "layer_types": None, "sliding_window": 8, "max_window_layers": 1},
    ],
)
def test_older_and_newer_files(values):
    assert read(**values) == read(rope_theta=1e6)
    assert read(**values).rope_theta == 1e6


SLIDING = "layer_types is 'sliding_attention'; supported is 'full_attention'"


@pytest.mark.parametrize(
    "values, words",
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, SLIDING),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 2}, SLIDING),
        ({"layer_types": "sliding_attention"}, SLIDING),
        ({"layer_types": [None, None]}, "layer_types is None; supported is 'full_attention'"),
        ({"layer_types": 7}, "layer_types is 7; supported is 'full_attention'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"eos_token_id": None}, "eos_token_id None: must be an id below 61"),
        (
            {"model_type": "gpt_neox"},
            "model_type is 'gpt_neox'; supported is 'llama' or 'qwen2' or 'qwen3'",
        ),
        ({"head_dim": 5}, "head_dim 5: must be even"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert str(error.value).startswith("config.json: ") and words in str(error.value)


def test_a_file_without_its_norms_is_refused(tiny_qwen3, tiny_llama, tmp_path):
    save_model(tiny_llama(), tmp_path)
    edit_json(tmp_path / "config.json", {"model_type": "qwen3"})
    with pytest.raises(UserError, match="self_attn.[kq]_norm.weight"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_its_gguf_file_is_what_llama_cpp_reads(tiny_qwen3, tmp_path, tied):
    """Halves of a head stay where they are, and there are no rope_freqs, which it refuses."""
    import gguf

    from benchmarks.export_gguf import write_gguf

    model = tiny_qwen3(dtype=torch.float32, tie_word_embeddings=tied)
    write_gguf(model, tmp_path / "model.gguf", "float32")
    file = gguf.GGUFReader(tmp_path / "model.gguf")
    about = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 6}
    about |= {"rope.freq_base": 10000, "rope.dimension_count": 6, "block_count": 2}
    assert file.get_field("general.architecture").contents() == "qwen3"
    for name, value in about.items():
        assert file.get_field(f"qwen3.{name}").contents() == value, name
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    assert len(stored) == len(list(model.parameters()))
    names = {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
    }
    for name, module in names.items():
        weight = model.get_parameter(f"layers.1.self_attn.{module}.weight")
        assert torch.equal(stored[f"blk.1.{name}.weight"], weight)


def test_slowed_rotations_of_a_qwen3_are_not_exported(tiny_qwen3, tmp_path):
    from benchmarks.export_gguf import write_gguf
    from llama import RopeScaling

    model = tiny_qwen3(dtype=torch.float32, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))
    with pytest.raises(UserError, match="llama.cpp supports no RoPE scaling of a Qwen3"):
        write_gguf(model, tmp_path / "model.gguf", "float32")
    assert not (tmp_path / "model.gguf").exists()
