"""The shape of a Llama, as its config.json says it."""

import json
import math
from pathlib import Path

import pytest
from conftest import random_peer

from errors import UserError
from llama import LlamaConfig
from loading.config import llama_to_dict, read_llama_config

SMALL = {"model_type": "llama", "vocab_size": 61, "max_position_embeddings": 16}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 6, "hidden_size": 16, "intermediate_size": 24}
SMALL |= {"eos_token_id": 60, "bos_token_id": 59}


def read(**values):
    """The configuration in such a file with other values: "missing" for none."""
    fields = {key: value for key, value in (SMALL | values).items() if value != "missing"}
    return read_llama_config(Path("config.json"), fields)


def test_the_default_shape_can_be_written_and_read():
    assert read_llama_config(Path("config.json"), llama_to_dict(LlamaConfig())) == LlamaConfig()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_its_class_is_named_as_transformers_does(tmp_path, kind):
    """Other programs than transformers go by this name, not by model_type."""
    random_peer(kind, tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    ours = llama_to_dict(read_llama_config(tmp_path, theirs))
    keys = ("architectures", "model_type")
    assert [ours[key] for key in keys] == [theirs[key] for key in keys]


@pytest.mark.parametrize("value", ["missing", None])
def test_what_a_config_lacks_is_as_in_transformers(value):
    """null is as good as missing."""
    import transformers

    keys = ["model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"]
    keys += ["tie_word_embeddings", "eos_token_id", "bos_token_id"]
    ours = read(**dict.fromkeys(keys, value))
    theirs = transformers.LlamaConfig(hidden_size=16, num_attention_heads=4)
    assert ours.n_kv_head == theirs.num_key_value_heads == 4
    assert ours.head_dim == theirs.head_dim == 4
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert ours.bos_token_id == 2  # an empty prompt needs one


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77}},
        {"rope_theta": 77.0, "rope_scaling": None},
        {"rope_theta": 77.0, "rope_scaling": "default"},
        {
            "rope_theta": 77.0,
            "rope_scaling": {"rope_type": "default"},
            "rope_parameters": {"rope_theta": 10.0},
        },
        {"rope_theta": 10.0, "rope_parameters": {"rope_theta": 77.0}},
    ],
)
def test_theta_in_older_and_newer_files(rope):
    assert read(**rope).rope_theta == 77


@pytest.mark.parametrize(
    "values, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"mlp_bias": True}, "mlp_bias is True; supported is False"),
        ({"is_causal": False}, "is_causal is False; supported is True"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; supported is False or"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'; supported"),
        (
            {"rope_parameters": {"rope_theta": 10.0}, "rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling: rope_type",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling: rope_type is 'yarn'; supported is"),
        ({"rope_parameters": ["default"]}, "rope_type is ['default']; supported is"),
        ({"rope_theta": 0}, "rope_theta 0: must be above 0 and at most"),
        ({"rope_theta": math.nan}, "rope_theta nan"),
        ({"rope_theta": "10000"}, "rope_theta '10000'"),
        ({"rms_norm_eps": 2}, "rms_norm_eps 2: must be above 0 and at most 1"),
        ({"vocab_size": "missing"}, "vocab_size None: must be an integer from 1 to 1000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"intermediate_size": 10**9}, "must be an integer from 1 to 1000000"),
        ({"head_dim": 5}, "head_dim 5: must be even"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4: must be a multiple of num_key"),
        ({"num_attention_heads": 20, "head_dim": None}, "head_dim 0: must be even"),
        ({"eos_token_id": 61}, "eos_token_id 61: must be an id below 61, or a list of them"),
        ({"bos_token_id": -1}, "bos_token_id -1: must be an id below 61, or a list of them"),
    ],
)
def test_a_config_that_no_llama_has_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert words in str(error.value)
    assert str(error.value).startswith("config.json: ")
