"""What Play loads; check_play.py compares the texts that it writes with those of the model."""

import sys

import torch
from conftest import ROOT, refused, save_speaking

sys.path.insert(0, str(ROOT / "course"))
import web_model  # noqa: E402

from loading.load import load_model  # noqa: E402
from text.tokenizer import load_encoding  # noqa: E402


def test_what_a_page_loads_is_small_and_one_vocabulary():
    found = [web_model.export(web_model.CHECKPOINTS / name) for name in web_model.MODELS]
    assert sum(len(each["image"]) for each in found) < 8e6
    assert found[0]["tokens"] == found[1]["tokens"] and len(found[0]["tokens"]) == 4096
    assert found[0]["tokens"][found[0]["special"]["<|endoftext|>"]] == "<|endoftext|>"
    assert "\\s" not in found[0]["pattern"].lower()


def test_a_page_gets_no_gemma_and_no_windows(tiny_gemma, tiny_llama, tmp_path):
    """It has one table of rotations, and each layer sees all."""
    for build, windows in (
        (tiny_gemma, (5, None)),
        (tiny_gemma, (None,) * 2),
        (tiny_llama, (5, 5)),
    ):
        save_speaking(build, tmp_path, sliding_windows=windows)
        assert "the page computes no layers with windows" in refused(web_model.export, tmp_path)


def test_play_shows_a_recording_of_the_model_that_it_loads():
    """Each token's own probability is that of a pass over the text before it, without a cache."""
    found = web_model.record()
    directory = web_model.CHECKPOINTS / "stories-llama"
    model = load_model(directory, torch.int8)
    encoding = load_encoding(directory, model.config.vocab_size)
    ids = encoding.encode("Once upon a time")
    tokens = found["tokens"]
    written = [token["token"] for token in tokens]
    assert found["prompt"] == "Once upon a time" and 100 < len(written) <= 200
    with torch.inference_mode():
        logits = model(torch.tensor([ids + written]))[0, len(ids) - 1 : -1].double()
    own = logits.log_softmax(dim=-1)
    apart = []
    for row, token in zip(own, tokens, strict=True):
        apart.append(abs(token["logprob"] - row[token["token"]].item()))
        ends = token["token"] in model.config.eos_token_ids
        assert token["text"] == ("" if ends else encoding.decode([token["token"]]))
        assert len(token["top"]) == 8 and token["p"] > 0
        candidates = [other["logprob"] for other in token["top"]]
        assert candidates == sorted(candidates, reverse=True)
        # Top-p cuts the tail, and what stays shares the mass: all that is cut is less likely.
        kept = [other["p"] > 0 for other in token["top"]]
        assert kept == sorted(kept, reverse=True)
        assert sum(other["p"] for other in token["top"]) <= 1 + 1e-5
    # C rounds otherwise, and a value may meet the middle between two of int8.
    assert max(apart) < 0.5 and sum(apart) / len(apart) < 0.03
