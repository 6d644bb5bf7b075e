"""SmolLM3, whose every fourth layer has no RoPE, against transformers."""

import json

import gguf
import pytest
import torch
from conftest import (
    check_bad_config,
    check_command_line,
    check_modes,
    difference,
    load,
    random_tokens,
    refused,
    run,
    run_rows,
    their_rows,
)
from engines import check_own_runs
from families import randomize_norms
from gguf_files import edited
from lora_files import check_adapter_as_in_peft
from natives import native_as_torch
from ranks import check_logits_of_ranks, save_uneven
from test_gguf import same

from benchmarks.export_gguf import write_gguf
from loading.load import load_config, load_model, save_model

ROPE = {"rope_type": "default", "rope_theta": 1000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}


@pytest.fixture
def smollm(peer):
    """A function that saves a random SmolLM3 of transformers, in float64."""
    small = {"num_hidden_layers": 5, "rope_parameters": ROPE, "max_position_embeddings": 40}
    return lambda **shape: peer("SmolLM3", **small | shape)


@pytest.fixture
def build_nope(tiny_llama):
    """`tiny_llama` with one NoPE layer of three; norms are random too."""

    def build(seed=0, **shape):
        own = {"n_layer": 3, "nope_layers": (1,), "block_size": 40, "rope_theta": 1000.0}
        return randomize_norms(tiny_llama(seed, **own | shape), seed)

    return build


# 1. The forward pass


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "shape, expected",
    [
        ({}, (3,)),
        ({"no_rope_layer_interval": 2}, (1, 3)),
        ({"no_rope_layer_interval": 1}, (0, 1, 2, 3, 4)),
        ({"no_rope_layer_interval": 9}, ()),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 0, 0]}, (0, 3)),  # more than layers
        ({"no_rope_layers": [1, 1, 0, 1, 1], "no_rope_layer_interval": 2}, (2,)),
        ({"tie_word_embeddings": False, "head_dim": 6}, (3,)),
        ({"rope_parameters": ROPE | YARN}, (3,)),
    ],
    ids=str,
)
def test_logits_equal_transformers(smollm, shape, expected):
    theirs, directory = smollm(**shape)
    ours = load(directory)
    assert ours.config.nope_layers == expected
    assert difference(ours, theirs) < 1e-9


@pytest.mark.step(n=1)
@torch.inference_mode()
def test_the_order_of_earlier_tokens_counts_only_from_the_second_layer_on(tiny_llama):
    tokens = torch.tensor([random_tokens(12)])
    other = torch.cat([tokens[:, :11].flip(1), tokens[:, 11:]], 1)
    for nope_layers, counts in (((0,), False), ((), True), ((0, 1), True)):
        model = tiny_llama(n_layer=max(1, len(nope_layers)), nope_layers=nope_layers)
        change = (model(tokens)[0, -1] - model(other)[0, -1]).abs().max()
        assert (change > 1e-3) == counts and (change < 1e-12) == (not counts)


# 2. The command line, batches, C and ranks


@pytest.mark.step(n=2)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    shape = {"num_hidden_layers": 4, "pad_token_id": 1}
    check_command_line(cli, tmp_path, "SmolLM3", 40, "--backend", backend, **shape)


@pytest.mark.step(n=2)
def test_ragged_batches_equal_transformers(smollm):
    theirs, directory = smollm()
    prompts = [random_tokens(length, seed=length) for length in (1, 20, 7)]
    expected = [their_rows(theirs, [prompt], 20)[0] for prompt in prompts]
    assert run_rows(load(directory), prompts, max_new_tokens=20, ignore_eos=True) == expected


@pytest.mark.step(n=2)
def test_batches_shifts_speculation_and_beams_equal_a_full_pass(build_nope):
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(build_nope(), build_nope(seed=1), prompts, 60)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
def test_c_computes_the_same(build_nope, compiled, monkeypatch, dtype, cache_dtype):
    model = native_as_torch(build_nope(qk_norm=True).float(), dtype, monkeypatch)
    check_own_runs(model, (3, 14, 1, 38), 30, num_pages=25, cache_dtype=cache_dtype)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_ranks_have_the_logits_of_one_process(build_nope, compiled, tmp_path, dtype):
    save_uneven(build_nope, tmp_path, "tiny_llama")
    check_logits_of_ranks(tmp_path, dtype)


@pytest.mark.step(n=2)
def test_an_adapter_is_added_as_in_peft(smollm, tmp_path):
    check_adapter_as_in_peft(*smollm(), tmp_path / "adapter")


# 3. Files


@pytest.mark.step(n=3)
def test_a_saved_model_is_the_same_model(build_nope, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = build_nope(dtype=torch.float32, nope_layers=(0, 2), n_embd=18)
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "SmolLM3ForCausalLM" and theirs.config.model_type == "smollm3"
    assert difference(ours, theirs) < 1e-4


@pytest.mark.step(n=3)
def test_what_a_config_lacks_is_as_in_transformers(tmp_path):
    import transformers

    said = {"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 64}
    said |= {"num_attention_heads": 16, "num_hidden_layers": 9, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 16}))
    ours = load_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (ours.n_kv_head, ours.head_dim) == (theirs.num_key_value_heads, 4)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] == 2e6
    assert (ours.tie_word_embeddings, ours.norm_eps) == (True, theirs.rms_norm_eps)
    assert [layer not in ours.nope_layers for layer in range(9)] == theirs.no_rope_layers


@pytest.mark.step(n=3)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers [1, 1]: must be a list of at least 3 zeros"),
        ({"no_rope_layers": [1, 2, 1]}, "no_rope_layers [1, 2, 1]: must be a list of at least 3"),
        ({"no_rope_layers": 1}, "no_rope_layers 1: must be a list of at least 3 zeros and ones"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval 0: must be an integer"),
        ({"use_sliding_window": True}, "use_sliding_window is True; supported is False"),
        ({"layer_types": ["sliding_attention"] * 3}, "; supported is 'full_attention'"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(cli, build_nope, tmp_path, changes, words):
    check_bad_config(cli, build_nope, tmp_path, changes, words)


@pytest.mark.step(n=3)
def test_other_families_have_no_nope_layers_in_transformers(build_nope, tmp_path):
    words = "the model cannot be saved: transformers has no Qwen3 without RoPE"
    assert words in refused(save_model, build_nope(qk_norm=True), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.step(n=3)
@pytest.mark.parametrize("scaling", [None, YARN], ids=str)
def test_a_gguf_file_comes_back_bit_for_bit(build_nope, compiled, tmp_path, scaling):
    from llama import YarnScaling
    from native import use_native

    scaling = scaling and YarnScaling(4.0, 10, 1.1386294361119891)
    shape = {"n_layer": 9, "nope_layers": (3, 7), "rope_scaling": scaling}
    model = build_nope(dtype=torch.float32, **shape)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "float32")
    reader = gguf.GGUFReader(file)
    assert reader.get_field("general.architecture").contents() == "smollm3"
    assert "rope_freqs.weight" not in [tensor.name for tensor in reader.tensors]
    found = load_model(file)
    assert same(found, model)
    prompts = [random_tokens(9), random_tokens(3)]
    expected = run(model, prompts, max_new_tokens=12)
    use_native(found)
    assert run(found, prompts, max_new_tokens=12) == expected


@pytest.mark.step(n=3)
def test_frequency_factors_of_a_gguf_file_are_refused(build_nope, tmp_path):
    """llama.cpp's SmolLM3 does not read them."""
    model = build_nope(dtype=torch.float32, n_layer=4, nope_layers=(3,))
    write_gguf(model, tmp_path / "model.gguf", "float32")
    tensors = {"rope_freqs.weight": [1, 1, 1]}
    file = edited(tmp_path / "model.gguf", tmp_path / "other.gguf", tensors=tensors)
    assert "unexpected tensor rope_freqs.weight" in refused(load_model, file)


@pytest.mark.step(n=3)
@pytest.mark.parametrize(
    "shape, words",
    [
        ({}, "nope_layers are (1,); llama.cpp supports only ()"),
        ({"n_layer": 4, "nope_layers": (3,), "qkv_bias": True}, "supports no biases, QK-norm"),
        ({"n_layer": 4, "nope_layers": (3,), "qk_norm": True}, "supports no biases, QK-norm"),
    ],
)
def test_what_llama_cpp_assumes_differently_is_not_exported(build_nope, tmp_path, shape, words):
    model = build_nope(dtype=torch.float32, **shape)
    assert words in refused(write_gguf, model, tmp_path / "model.gguf", "float32")
    assert not list(tmp_path.iterdir())
