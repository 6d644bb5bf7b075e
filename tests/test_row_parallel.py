"""Products by rows: half as many meetings, and logits that differ by rounding, if at all."""

import pytest
import torch
from conftest import random_tokens
from ranks import SAMPLES, compared, run_engine_script, save_uneven


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 4)])
def test_logits_differ_by_rounding(request, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    difference, (collectives, bytes_sent), _ = compared(size, name, tokens, "reduce", **options)
    assert difference < 1e-11 and collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert bytes_sent == 5 * (2 * (size - 1) * 23 * width * 8 // size)


def test_texts(engine_cli, tmp_path):
    out = engine_cli(*SAMPLES)[1]
    found, err = run_engine_script(2, tmp_path, *SAMPLES, "--join", "reduce")
    assert found == out
    assert "2 ranks: 18 collectives a step, " in err
