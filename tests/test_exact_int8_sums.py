"""Lesson 96: with int8 weights every bit is that of one process, whatever --join says."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import SAMPLES, compared, run_engine_script


def test_texts(engine_cli, tmp_path):
    arguments = [*SAMPLES, "--dtype", "int8", "--seed", 1, "--temperature", 0.8]
    out = engine_cli(*arguments, "--backend", "torch")[1]
    found, err = run_engine_script(2, tmp_path, *arguments, "--join", "reduce")
    assert found == out
    # 8 layers of two products, with a gather before and after each; the embedding and the head.
    assert "2 ranks: 34 collectives a step, " in err


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_int8_logits_are_those_of_one_process(compiled, name, size, native):
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}
    assert compared(size, CHECKPOINTS / name, tokens, "reduce", **options)[0] == 0
