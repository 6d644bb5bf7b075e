"""With int8 weights the logits of ranks equal those of one process, whatever --join says."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import compared

from loading.load import load_model


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_int8_logits_are_those_of_one_process(compiled, name, size, native):
    model = CHECKPOINTS / name
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}
    difference, (collectives, _), _ = compared(size, model, tokens, "reduce", **options)
    assert difference == 0
    # A gather before and after each of two products a layer; the embedding and the head.
    assert collectives == 4 * load_model(model).config.n_layer + 2
