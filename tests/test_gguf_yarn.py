"""YaRN in GGUF files: keys as llama.cpp's converter writes them."""

import gguf
import pytest
import torch
from conftest import random_tokens, refused, run
from gguf_files import edited
from test_gguf import same

from benchmarks.export_gguf import write_gguf
from llama import RotaryEmbedding, YarnScaling, yarn_attention_factor
from loading.load import load_config, load_model, save_model

DEFAULT = YarnScaling(4.0, 16, yarn_attention_factor(4.0))
SHAPES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},  # the export calls it llama
    "qwen3": {"qk_norm": True},
}


@pytest.fixture
def made(tiny_llama, tmp_path):
    """A function that writes a random model with YaRN: the model, its file."""

    def make(kind="qwen3", scaling=DEFAULT, **shape):
        shape = {"head_dim": 16, "block_size": 64, "rope_theta": 1000.0} | SHAPES[kind] | shape
        model = tiny_llama(dtype=torch.float32, rope_scaling=scaling, **shape)
        write_gguf(model, tmp_path / "model.gguf", "float32")
        return model, tmp_path / "model.gguf"

    return make


@pytest.mark.parametrize("kind", SHAPES)
def test_what_was_written_comes_back_bit_for_bit(made, tmp_path, kind):
    model, file = made(kind)
    found = load_model(file)
    assert same(found, model)
    options = {"max_new_tokens": 60, "ignore_eos": True}
    assert run(found, [random_tokens(3)], **options) == run(model, [random_tokens(3)], **options)
    save_model(found, tmp_path / "directory")
    assert load_config(tmp_path / "directory") == model.config
    factors = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name[:4] == "rope"]
    assert all((tensor.data == 1).all() for tensor in factors)  # which llama.cpp applies too


def test_llama_cpp_multiplies_its_attention_factor(made):
    model, file = made(scaling=YarnScaling(4.0, 16, 1.5))
    fields = gguf.GGUFReader(file).fields
    found = {key: field.contents() for key, field in fields.items() if "rope.scaling" in key}
    multiplier = 1.5 / (1 + 0.1 * torch.tensor(4.0).log().item())
    assert found == {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 16,
        "qwen3.rope.scaling.attn_factor": pytest.approx(multiplier),
    }
    assert load_config(file).rope_scaling.attention_factor == pytest.approx(1.5)


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, {"beta_fast": 16, "beta_slow": 2}),
        ({"yarn_attn_factor": 1.25}, {"attention_factor": 1.25}),
        ({"yarn_attn_factor": 1.25, "attn_factor": 2.0}, {"attention_factor": 2.5}),
        ({"yarn_log_multiplier": 1.0}, {"attention_factor": 1.0}),
        ({"yarn_log_multiplier": 0.5}, {"attention_factor": yarn_attention_factor(4.0, 1, 0.5)}),
        ({"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0}, {}),
        ({"original_context_length": None}, {"original_max_position_embeddings": 64}),
    ],
    ids=str,
)
def test_keys_of_other_files(made, tmp_path, values, expected):
    model, file = made()
    values = {f"qwen3.rope.scaling.{key}": value for key, value in values.items()}
    config = load_config(edited(file, tmp_path / "other.gguf", values=values))
    assert config.rope_scaling == YarnScaling(**vars(DEFAULT) | expected)
    assert config.block_size == 64


def test_frequency_factors_divide_what_yarn_scaled(made, tmp_path):
    """As llama.cpp does with both."""
    model, file = made("llama")
    values = {"rope_freqs.weight": [1, 2, 1, 1, 1, 1, 1, 4]}
    config = load_config(edited(file, tmp_path / "other.gguf", tensors=values))
    cpu = torch.device("cpu")
    found = RotaryEmbedding(config, torch.float32, cpu)
    plain = RotaryEmbedding(model.config, torch.float32, cpu)
    assert (plain.inv_freq / found.inv_freq).tolist() == pytest.approx(values["rope_freqs.weight"])
    assert found.scale == DEFAULT.attention_factor


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("factor", None, "rope.scaling.factor None: must be above 0"),
        ("factor", 0.0, "rope.scaling.factor 0.0: must be above 0"),
        ("original_context_length", 0, "original_context_length 0: must be an integer from 1"),
        ("attn_factor", -1.0, "attn_factor -1.0: must be above 0"),
        ("yarn_attn_factor", 0.0, "yarn_attn_factor 0.0: must be above 0"),
        ("yarn_beta_fast", 0.5, "yarn_beta_fast 0.5: must be at least qwen3.rope.scaling.yarn_"),
        ("yarn_log_multiplier", -1.0, "yarn_log_multiplier -1.0: must be above 0"),
        ("yarn_ext_factor", 0.5, "yarn_ext_factor is 0.5; supported is 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(made, tmp_path, key, value, words):
    _, file = made()
    values = {f"qwen3.rope.scaling.{key}": value}
    message = refused(load_config, edited(file, tmp_path / "other.gguf", values=values))
    assert words in message and message.startswith(f"{tmp_path / 'other.gguf'}: ")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"beta_fast": 16}, "beta_fast is 16; llama.cpp supports only 32"),
        ({"beta_slow": 2}, "beta_slow is 2; llama.cpp supports only 1"),
        ({"truncate": False}, "truncate is False; llama.cpp supports only True"),
    ],
)
def test_what_llama_cpp_ignores_is_not_exported(made, tmp_path, changes, words):
    scaling = YarnScaling(**vars(DEFAULT) | changes)
    assert words in refused(lambda: made(scaling=scaling))
    assert not list(tmp_path.iterdir())
