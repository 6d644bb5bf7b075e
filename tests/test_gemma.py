"""Gemma 3 computes what transformers does, in the modes of the lessons before too."""

import random
from pathlib import Path

import pytest
import torch
from conftest import (
    check_command_line,
    difference,
    edit_json,
    load,
    random_tokens,
    run_rows,
    their_rows,
)
from ranks import ROUNDING, check_two_ranks, compared, logits_of, results, save_uneven
from test_llama_config import SMALL

from errors import UserError
from loading.load import save_model

LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}


def test_the_command_line_writes_what_transformers_does(cli, tmp_path):
    shape = {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 6}
    check_command_line(cli, tmp_path, "Gemma3", 30, "--backend", "torch", **shape)


@pytest.mark.parametrize("seed", range(15))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    keys = choose([1, 2, 3])
    n_layer = choose([1, 3, 7])
    full = choose([LINEAR, {"rope_type": "default", "rope_theta": 1e6}])
    local = {"rope_type": "default", "rope_theta": choose([10.0, 10000.0])}
    shape = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    heads = keys * choose([1, 2, 3])
    if choose([False, True]):
        types = ["full_attention", "sliding_attention"]
        shape["layer_types"] = [choose(types) for _ in range(n_layer)]
    theirs, directory = peer(
        "Gemma3",
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=choose([2, 6, 16, 20]),
        hidden_size=heads * choose([2, 4, 10]),
        num_hidden_layers=n_layer,
        max_position_embeddings=40,
        sliding_window=choose([1, 4, 8, 100]),
        query_pre_attn_scalar=choose([1, 16, 256]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        **shape,
    )
    ours = load(directory)
    assert ours.config.rope_linear_factor == full.get("factor", 1)
    assert difference(ours, theirs) < 1e-9
    if n_layer < 7:  # deeper random weights magnify float32's rounding
        assert difference(load(directory, torch.float32), theirs.float()) < 1e-4


def test_greedy_text_equals_transformers(peer):
    shape = {"max_position_embeddings": 64, "sliding_window": 8, "num_hidden_layers": 7}
    theirs, directory = peer("Gemma3", head_dim=6, **shape)
    ours = run_rows(load(directory), [[1, 5, 9]], max_new_tokens=61, ignore_eos=True)
    assert ours == their_rows(theirs, [[1, 5, 9]], 61)


# On several processes.
@pytest.mark.parametrize("size, kind", [(2, torch.int8), (4, torch.float32)], ids=str)
def test_ranks_have_the_logits_of_one_process(tiny_gemma, compiled, tmp_path, kind, size):
    name = save_uneven(tiny_gemma, tmp_path, "tiny_llama", sliding_windows=(5, None))
    assert compared(size, name, torch.tensor([random_tokens(23)]), dtype=kind)[0] <= ROUNDING[kind]


def test_ranks_that_add_up_in_float64(tiny_gemma, tmp_path):
    name = save_uneven(tiny_gemma, tmp_path, "tiny_llama", sliding_windows=(5, None))
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    found = results(3, lambda: logits_of(name, tokens, "reduce", **options))[0][0]
    with torch.inference_mode():
        assert (torch.from_numpy(found) - load(name)(tokens)).abs().max() < 1e-10


def test_two_ranks_write_the_texts_of_one(tiny_gemma, engine_cli, tmp_path):
    def build(**shape):
        return tiny_gemma(sliding_windows=(5, None), **shape)

    check_two_ranks(build, engine_cli, tmp_path, 30)


# Its files.
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": False},
        {"sliding_windows": (None, None)},
        {"rope_linear_factor": 1.0, "sliding_windows": (5, 5)},
    ],
    ids=str,
)
def test_save_and_load_give_the_same_model(tiny_gemma, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    if "sliding_windows" not in shape:
        shape = shape | {"sliding_windows": (5, 5, None)}
    ours = tiny_gemma(dtype=torch.float32, **shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Gemma3ForCausalLM"
    assert difference(ours, theirs) < 2e-4
    again = load(tmp_path).config
    assert [*again.sliding_windows] == [*ours.config.sliding_windows] or not any(
        ours.config.sliding_windows
    )
    assert {**vars(again), "sliding_windows": ()} == {**vars(ours.config), "sliding_windows": ()}


def read(**values):
    from loading.config import read_gemma_config

    fields = {key: value for key, value in (GEMMA | values).items() if value != "missing"}
    return read_gemma_config(Path("config.json"), fields)


GEMMA = SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 7}


def test_what_a_config_lacks_is_as_in_transformers():
    import transformers

    kept = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads")
    kept += ("hidden_size", "intermediate_size")
    theirs = transformers.Gemma3TextConfig(**{key: GEMMA[key] for key in kept})
    ours = read(**dict.fromkeys(GEMMA.keys() - {*kept, "model_type"}, "missing"))
    assert ours.head_dim == theirs.head_dim == 256
    assert ours.n_kv_head == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings is True
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    sliding_windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert ours.sliding_windows == tuple(sliding_windows[kind] for kind in theirs.layer_types)
    assert ours.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert ours.rope_local_base_freq == theirs.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"rope_theta": 77.0, "rope_local_base_freq": 5.0, "rope_scaling": None}, (77, 5, 1)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (1e6, 1e4, 8)),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 3.0}, (3, 1e4, 8)),
        ({"rope_parameters": {"full_attention": LINEAR}}, (1000, 1e4, 8)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}}, (1e6, 7, 1)),
    ],
)
def test_rotations_in_older_and_newer_files(values, expected):
    config = read(**values)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_linear_factor) == expected


@pytest.mark.parametrize(
    "values, sliding_windows",
    [
        ({"sliding_window": 8}, (8, 8, 8, 8, 8, None, 8)),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, (8, None) * 3 + (8,)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 7}, ()),
    ],
)
def test_windows_of_a_config(values, sliding_windows):
    assert read(**values).sliding_windows == sliding_windows


@pytest.mark.parametrize(
    "values, words",
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported is None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported is None"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported is 'gelu_pyt"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0: must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor None: must be above 0"),
        ({"rope_local_base_freq": 0}, "rope_theta 0: must be above 0"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention: rope_type is"),
        ({"rope_parameters": {"full_attention": 7}}, "full_attention 7: must be an object"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear': must be an object"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern 0: must be an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types of length 1: must have length 7"),
        ({"head_dim": 5}, "head_dim 5: must be even"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert str(error.value).startswith("config.json: ") and words in str(error.value)


def test_the_model_of_pictures_and_texts_is_refused(tiny_gemma, tmp_path):
    save_model(tiny_gemma(sliding_windows=(5, None)), tmp_path)
    edit_json(tmp_path / "config.json", {"model_type": "gemma3"})
    with pytest.raises(UserError, match="model_type is 'gemma3'; supported is 'gpt2' or"):
        load(tmp_path)
