"""Gemma 2 in GGUF files, with its soft caps."""

import gguf
import pytest
import torch
from conftest import random_tokens, refused, run
from gguf_files import edited
from ranks import ROUNDING, compared
from test_gemma_2 import build_gemma2_fixture  # noqa: F401
from test_gguf import same

from benchmarks.export_gguf import write_gguf
from loading.load import load_config, load_model
from native import use_native

CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}


@pytest.fixture
def made(build_gemma2, tmp_path):
    """A function that writes a random Gemma 2: the model, its file."""

    def make(**shape):
        own = {"dtype": torch.bfloat16, "query_pre_attn_scalar": 6} | CAPS  # 1 + w is exact
        model = build_gemma2(**own | shape).float()
        write_gguf(model, tmp_path / "model.gguf", "float32")
        return model, tmp_path / "model.gguf"

    return make


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"rope_linear_factor": 2.0, "rope_theta": 77.0},
        {"sliding_windows": (7, None)},
        {"sliding_windows": (5, None) * 23, "query_pre_attn_scalar": 5},  # as the 27B
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_was_written_comes_back_bit_for_bit(made, shape):
    model, file = made(**shape | {"n_layer": len(shape.get("sliding_windows", (5, None, 5)))})
    assert same(load_model(file), model)


def test_a_file_is_what_llama_cpp_reads(made):
    model, path = made()
    file = gguf.GGUFReader(path)
    assert file.get_field("general.architecture").contents() == "gemma2"
    for key, value in (CAPS | {"attention.sliding_window": 5}).items():
        assert file.get_field(f"gemma2.{key}").contents() == value
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    assert {name.split(".")[2] for name in stored if ".1." in name} == {
        *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "post_attention_norm"),
        *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm"),
    }
    layer = model.layers[1]
    assert torch.equal(stored["blk.1.attn_q.weight"], layer.self_attn.q_proj.weight)
    assert torch.equal(stored["blk.1.ffn_norm.weight"], 1 + layer.pre_feedforward_layernorm.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_in_int8_in_c_and_on_ranks(made, compiled, kind, dtype):
    shape = {"n_embd": 64, "n_inner": 64, "head_dim": 32, "query_pre_attn_scalar": 32}
    model, file = made(**shape)
    write_gguf(model, file, kind)
    found = load_model(file, dtype)
    prompts = [random_tokens(9), random_tokens(3)]
    expected = run(found, prompts, max_new_tokens=12)
    use_native(found)
    assert run(found, prompts, max_new_tokens=12) == expected
    if dtype == torch.float32:
        difference, *_ = compared(2, file, torch.tensor([random_tokens(23)]), dtype=dtype)
        assert difference <= ROUNDING[dtype]


@pytest.mark.parametrize(
    "values, fields",
    [
        (dict.fromkeys(CAPS), {"attn_logit_softcapping": 50, "final_logit_softcapping": 30}),
        ({"attention.sliding_window": None}, {"sliding_windows": (4096, None, 4096)}),
        ({"attention.sliding_window": 0}, {"sliding_windows": ()}),
        ({"rope.freq_base": None}, {"rope_theta": 10000}),
    ],
    ids=str,
)
def test_missing_keys_are_llama_cpps_defaults(made, tmp_path, values, fields):
    _, file = made(rope_theta=77.0)
    values = {f"gemma2.{key}": value for key, value in values.items()}
    config = load_config(edited(file, tmp_path / "other.gguf", values=values))
    assert {key: getattr(config, key) for key in fields} == fields


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("attn_logit_softcapping", 0.0, "gemma2.attn_logit_softcapping 0.0: must be above 0"),
        ("final_logit_softcapping", float("nan"), "gemma2.final_logit_softcapping nan: must be"),
        ("final_logit_softcapping", "30", "gemma2.final_logit_softcapping '30': must be above 0"),
        ("attention.sliding_window", 10**8, "sliding_window 100000000: must be an integer"),
        ("rope.scaling.type", "yarn", "type is 'yarn'; supported is 'linear' or 'none'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(made, tmp_path, key, value, words):
    file = edited(made()[1], tmp_path / "other.gguf", values={f"gemma2.{key}": value})
    assert words in refused(load_config, file)


@pytest.mark.parametrize(
    "shape, words",
    [
        ({"attn_logit_softcapping": None}, "llama.cpp's Gemma 2 needs both soft caps"),
        ({"final_logit_softcapping": None}, "llama.cpp's Gemma 2 needs both soft caps"),
        ({"sliding_windows": (None, 5, None)}, "llama.cpp's Gemma 2 needs both soft caps, a slid"),
        ({"sliding_windows": ()}, "llama.cpp's Gemma 2 needs both soft caps, a sliding window"),
        ({"tie_word_embeddings": False}, "in every other layer and tied embeddings"),
        ({"query_pre_attn_scalar": 5}, "scalar is 5; llama.cpp assumes 6"),
        ({"sliding_windows": (5, None, 6)}, "(5, None, 6); llama.cpp supports one size"),
    ],
    ids=str,
)
def test_what_llama_cpp_does_not_read_is_not_exported(made, tmp_path, shape, words):
    assert words in refused(lambda: made(**shape))
    assert not list(tmp_path.iterdir())
