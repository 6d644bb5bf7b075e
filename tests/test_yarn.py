"""YaRN: outputs beyond the original window, against transformers."""

import dataclasses
import json

import pytest
import torch
from conftest import (
    check_bad_config,
    check_command_line,
    check_modes,
    difference,
    edit_json,
    load,
    random_tokens,
    refused,
    run_rows,
    their_rows,
)
from engines import check_own_runs
from families import EAGER
from natives import native_as_torch
from ranks import check_logits_of_ranks, save_uneven

from llama import LlamaConfig, RopeScaling, RotaryEmbedding
from loading.load import load_config, save_model

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
YARN |= {"rope_theta": 1000.0}
WINDOW = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 128}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral"]


@pytest.fixture
def yarn_peer(peer):
    """A function that saves a random model of transformers with YaRN, in float64."""

    def build(kind="Llama", shape=None, **scaling):
        shape = WINDOW | (EAGER if kind in ("Qwen3Moe", "Mixtral") else {}) | (shape or {})
        return peer(kind, rope_parameters=YARN | scaling, **shape)

    return build


@pytest.fixture
def build_yarn(tiny_llama):
    """`tiny_llama` with YaRN, an original window of 10 tokens and an extended one of 40."""
    from llama import YarnScaling

    scaling = YarnScaling(4.0, 10, 1.5, beta_fast=2.0, beta_slow=0.1)
    own = {"rope_scaling": scaling, "head_dim": 16, "block_size": 40, "rope_theta": 1000.0}
    return lambda seed=0, **shape: tiny_llama(seed, **own | shape)


# 1. Frequencies and the attention factor


@pytest.mark.step(n=1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_beyond_the_original_window_equal_transformers(yarn_peer, kind):
    theirs, directory = yarn_peer(kind)
    ours = load(directory)
    assert ours.config.block_size == 128
    assert difference(ours, theirs) < 1e-9


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 1.0},
        {"factor": 0.5},
        {"factor": 2.5, "original_max_position_embeddings": 48},
        {"factor": None},  # the ratio of both windows
        {"original_max_position_embeddings": 4, "factor": 32.0},  # no pair is scaled fully
        {"beta_fast": 2, "beta_slow": 0.25},
        {"beta_fast": 2.0, "beta_slow": 2.0},  # two limits in one place
        {"beta_fast": None, "beta_slow": None, "attention_factor": None, "mscale": None},
        {"beta_fast": 3.0, "truncate": False},
        {"attention_factor": 1.7},
        {"attention_factor": 1, "mscale": 2.0, "mscale_all_dim": 0.5},
        {"mscale": 2.0, "mscale_all_dim": 0.5},
        {"mscale": 0.7, "mscale_all_dim": 0.7},
        {"mscale": 2.0},
        {"mscale_all_dim": 2.0},
        {"mscale": 2.0, "mscale_all_dim": 0},
        {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=str,
)
def test_all_keys_mean_what_they_mean_in_transformers(yarn_peer, scaling):
    theirs, directory = yarn_peer(**scaling)
    assert difference(load(directory), theirs) < 1e-9


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "values, expected",
    [
        ({"original_max_position_embeddings": 32, "max_position_embeddings": 128}, (8.0, 32)),
        ({"rope_scaling": {"original_max_position_embeddings": None}}, (8.0, 128)),
    ],
    ids=str,
)
def test_older_files_and_where_they_name_the_original_window(yarn_peer, values, expected):
    """Beside rope_scaling it counts more than inside, and by default it is the whole window."""
    from transformers import AutoModelForCausalLM

    theirs, directory = yarn_peer(shape={"max_position_embeddings": 128})
    older = {"type": "yarn"} | {key: YARN[key] for key in ("factor", list(YARN)[2])}
    older |= values.pop("rope_scaling", {})
    older = {key: value for key, value in older.items() if value is not None}
    changes = {"rope_parameters": None, "rope_theta": 1000.0, "rope_scaling": older}
    edit_json(directory / "config.json", changes | values)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    ours = load(directory)
    scaling = ours.config.rope_scaling
    assert (scaling.factor, scaling.original_max_position_embeddings) == expected
    assert ours.config.block_size == scaling.factor * expected[1]
    tokens = torch.tensor([random_tokens(200)])
    with torch.inference_mode():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-9


@pytest.mark.step(n=1)
def test_the_scaling_alone_extends_the_window(tiny_llama, tmp_path):
    """As model cards tell: add rope_scaling to config.json and leave the rest."""
    save_model(tiny_llama(dtype=torch.float32), tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
    edit_json(tmp_path / "config.json", {"rope_scaling": scaling})
    config = load_config(tmp_path)
    assert (config.block_size, config.rope_scaling.factor) == (48, 4)
    edit_json(tmp_path / "config.json", {"max_position_embeddings": 90})
    assert load_config(tmp_path).block_size == 90


@pytest.mark.step(n=1)
def test_fast_rotations_stay_and_slow_ones_are_divided():
    """Qwen2.5's: 64 pairs, of which 23 or fewer rotate 32 times in 32,768 tokens."""
    from llama import YarnScaling, yarn_attention_factor

    scaling = YarnScaling(4.0, 32768, yarn_attention_factor(4.0))
    config = LlamaConfig(head_dim=128, rope_theta=1e6, rope_scaling=scaling)
    found = RotaryEmbedding(config, torch.float32, torch.device("cpu"))
    plain = dataclasses.replace(config, rope_scaling=None)
    ratio = RotaryEmbedding(plain, torch.float32, torch.device("cpu")).inv_freq / found.inv_freq
    assert torch.allclose(ratio[:24], torch.ones(24))
    assert torch.allclose(ratio[40:].min(), ratio[63])
    assert ratio[63].item() == pytest.approx(4) and (ratio.diff() > -1e-5).all()
    tiny = dataclasses.replace(config, rope_scaling=dataclasses.replace(scaling, beta_slow=1e-320))
    assert RotaryEmbedding(tiny, torch.float32, torch.device("cpu")).inv_freq.isfinite().all()
    cos, sin = found.cos_sin(70)
    norm = (cos**2 + sin**2).sqrt()
    assert torch.allclose(norm, torch.tensor(0.1 * 1.3862943611 + 1))


# 2. The command line, batches, C and ranks


@pytest.mark.step(n=2)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    shape = {"rope_parameters": YARN, "max_position_embeddings": 128, "head_dim": 16}
    shape |= {"hidden_size": 64}
    check_command_line(cli, tmp_path, "Qwen3", 100, "--backend", backend, **shape)


@pytest.mark.step(n=2)
def test_ragged_batches_equal_transformers(yarn_peer):
    theirs, directory = yarn_peer("Qwen2")
    prompts = [random_tokens(length, seed=length) for length in (1, 30, 7)]
    expected = [their_rows(theirs, [prompt], 70)[0] for prompt in prompts]
    found = run_rows(load(directory), prompts, max_new_tokens=70, ignore_eos=True)
    assert found == expected


@pytest.mark.step(n=2)
def test_batches_shifts_speculation_and_beams_equal_a_full_pass(build_yarn):
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(build_yarn(), build_yarn(seed=1), prompts, 60)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_c_computes_the_same(build_yarn, compiled, monkeypatch, dtype):
    model = native_as_torch(build_yarn().float(), dtype, monkeypatch)
    check_own_runs(model, (3, 14, 1, 38), 30, num_pages=25)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_ranks_have_the_logits_of_one_process(build_yarn, compiled, tmp_path, dtype):
    save_uneven(build_yarn, tmp_path, "tiny_llama")
    check_logits_of_ranks(tmp_path, dtype, length=60)


# 3. Files


@pytest.mark.step(n=3)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
@pytest.mark.parametrize(
    "values", [(4.0, 10, 1.0), (4, 10, 1.2, 16.0, 2, False), (2.5, 16, 1.0916290731874155)], ids=str
)
def test_a_saved_model_is_the_same_model(tiny_llama, tmp_path, kind, values):
    from transformers import AutoModelForCausalLM

    from llama import YarnScaling

    shape = {"Qwen2": {"qkv_bias": True}, "Qwen3": {"qk_norm": True}}
    shape = shape.get(kind, {}) | ({"sliding_windows": (30, 30)} if kind == "Mistral" else {})
    scaling = YarnScaling(*values)
    ours = tiny_llama(dtype=torch.float32, rope_scaling=scaling, block_size=48, **shape)
    save_model(ours, tmp_path)
    assert load(tmp_path, torch.float32).config == ours.config
    saved = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    assert saved == {"rope_type": "yarn", **dataclasses.asdict(scaling)}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert difference(ours, theirs) < 1e-4


@pytest.mark.step(n=3)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"factor": 0}, "factor 0: must be above 0"),
        ({"factor": 1e9}, "factor 1000000000.0: must be above 0 and at most 625000"),
        ({"factor": "4"}, "factor '4': must be above 0"),
        ({"original_max_position_embeddings": 0}, "embeddings 0: must be an integer from 1"),
        ({"original_max_position_embeddings": 7.5}, "embeddings 7.5: must be an integer"),
        ({"beta_fast": -1}, "beta_fast -1: must be above 0"),
        ({"beta_slow": "1"}, "beta_slow '1': must be above 0"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast 1: must be at least beta_slow (2)"),
        ({"attention_factor": 0}, "attention_factor 0: must be above 0"),
        ({"attention_factor": float("nan")}, "attention_factor nan: must be above 0"),
        ({"mscale": -1}, "mscale -1: must be above 0"),
        ({"mscale": []}, "mscale []: must be above 0"),
        ({"mscale_all_dim": "x"}, "mscale_all_dim 'x': must be above 0"),
        ({"truncate": "no"}, "truncate is 'no'; supported is True or False"),
        ({"truncate": None}, "truncate is None; supported is True or False"),
        ({"rope_theta": 1}, "rope_theta 1: must be above 1"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_one_line(cli, tiny_llama, tmp_path, changes, words):
    check_bad_config(cli, tiny_llama, tmp_path, {"rope_scaling": YARN | changes}, words)


@pytest.mark.step(n=3)
def test_a_factor_is_needed(tiny_llama, tmp_path):
    save_model(tiny_llama(), tmp_path)
    for scaling in ({"rope_type": "yarn"}, "yarn"):
        edit_json(tmp_path / "config.json", {"rope_scaling": scaling})
        assert "factor None: must be above 0" in refused(load_config, tmp_path)


def test_still_other_types_and_a_gemma_with_yarn_are_refused(tiny_llama, tiny_gemma, tmp_path):
    save_model(tiny_llama(), tmp_path)
    edit_json(tmp_path / "config.json", {"rope_scaling": {"type": "longrope"}})
    assert "rope_type is 'longrope'; supported is 'default'" in refused(load_config, tmp_path)
    save_model(tiny_gemma(sliding_windows=(5, None)), tmp_path)
    edit_json(tmp_path / "config.json", {"rope_scaling": YARN})
    assert "rope_type is 'yarn'; supported is 'default'" in refused(load_config, tmp_path)


def test_still_a_llama_3_has_no_attention_factor(tiny_llama, tmp_path):
    ours = tiny_llama(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16), block_size=64)
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    cos, sin = RotaryEmbedding(ours.config, torch.float64, torch.device("cpu")).cos_sin(64)
    assert torch.allclose(cos**2 + sin**2, torch.ones(()).double())
