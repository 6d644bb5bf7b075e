"""Lesson 31: texts longer than those first trained on, by slower rotations."""

import dataclasses
import json

import pytest
import torch
from conftest import edit_json, load, random_tokens, run_rows, their_rows

from errors import UserError
from llama import RopeScaling
from loading.load import save_model

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 16}


@pytest.fixture
def scaled_peer(peer):
    """A function that builds a random Llama of transformers with a window of 128, and saves it.

    older: in the form of the files of Llama 3.1. It gives the model and the directory.
    """

    def build(older=False, **scaling):
        shape = {"hidden_size": 32, "head_dim": 16, "max_position_embeddings": 128}
        rope = {"rope_type": "llama3", "rope_theta": 1000.0} | SCALING | scaling
        theirs, directory = peer("Llama", rope_parameters=rope, **shape)
        if older:
            config = json.loads((directory / "config.json").read_text())
            rope = config.pop("rope_parameters")
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = rope
            (directory / "config.json").write_text(json.dumps(config))
        return theirs, directory

    return build


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"factor": 32.0, "original_max_position_embeddings": 8},
        {"factor": 1.5, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        {"low_freq_factor": 0.1, "high_freq_factor": 0.2},
        {"rope_theta": 500000.0, "original_max_position_embeddings": 64, "low_freq_factor": 1},
    ],
)
@torch.inference_mode()
def test_logits_equal_transformers_beyond_the_original_window(scaled_peer, scaling, older):
    theirs, directory = scaled_peer(older, **scaling)
    ours = load(directory)
    tokens = torch.tensor([random_tokens(128)])
    logits = ours(tokens)
    assert (logits - theirs(tokens).logits).abs().max() < 1e-10
    unscaled = type(ours)(dataclasses.replace(ours.config, rope_scaling=None)).double()
    unscaled.load_state_dict(ours.state_dict())
    difference = (unscaled(tokens) - logits).abs().amax(-1)[0]
    assert difference[0] < 1e-10  # position 0 is never turned
    assert difference[64:].mean() > 0.05


@torch.inference_mode()
def test_text_beyond_the_original_window_equals_transformers(scaled_peer):
    theirs, directory = scaled_peer(original_max_position_embeddings=4)
    prompt = random_tokens(20)
    expected = their_rows(theirs, [prompt], 108)
    assert run_rows(load(directory), [prompt], max_new_tokens=108, ignore_eos=True) == expected
    assert len(set(expected[0])) > 8


def test_scaling_is_written_and_read(tiny_llama, tmp_path):
    ours = tiny_llama(rope_scaling=RopeScaling(**SCALING))
    save_model(ours, tmp_path)
    again = load(tmp_path)
    assert again.config == ours.config
    assert again.config.rope_scaling.factor == 8


@pytest.mark.parametrize(
    "rope, words",
    [
        ("llama3", "factor None: must be above 0"),  # in the place of an object
        ({"factor": None}, "factor None: must be above 0"),
        ({"factor": 0}, "factor 0: must be above 0"),
        ({"low_freq_factor": "1"}, "low_freq_factor '1'"),
        ({"high_freq_factor": 1.0}, "low_freq_factor 1.0: must be below high_freq_factor (1.0)"),
        ({"original_max_position_embeddings": -1}, "original_max_position_embeddings -1"),
        ({"rope_type": "dynamic"}, "rope_type is 'dynamic'; supported is 'default' or 'llama3'"),
    ],
)
def test_scaling_that_makes_no_sense_is_refused(tiny_llama, tmp_path, rope, words):
    save_model(tiny_llama(), tmp_path)
    if isinstance(rope, dict):
        rope = {"rope_type": "llama3"} | SCALING | rope
    edit_json(tmp_path / "config.json", {"rope_scaling": rope})
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert words in str(error.value)
    assert "config.json" in str(error.value)
