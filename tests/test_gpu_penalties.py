"""Apply biases, penalties, bans and token masks on a GPU without further uploads."""

import random

import pytest
import torch
from pretend_gpu import gpu, no_inference_mode_fixture  # noqa: F401

from engine.engine import Engine
from sampling import SamplingParams, Sequence, sample_batch

pytestmark = pytest.mark.usefixtures("no_inference_mode")


def check(model, fields: list[dict], masks=None, number: int = 0) -> None:
    """Check the tokens of `sample_batch`, in one upload and one sync."""
    generator = torch.Generator().manual_seed(number)
    logits = 4 * torch.randn(len(fields), 61, dtype=torch.float64, generator=generator)
    sequences = []
    for row, each in enumerate(fields):
        tokens = torch.randint(61, (3 + row,), generator=generator).tolist()
        params = SamplingParams(seed=row, **each)
        sequences.append(Sequence(tokens + tokens[:2], 2, params, (60, 3)))
        sequences[-1].token_mask = masks and masks[row]
    want = sample_batch(logits, sequences)
    device = gpu()
    there = device.moved(logits)
    device.reset()
    assert model.runner.sample_batch(there, sequences) == want, fields
    assert (sum(device.uploads.values()), sum(device.syncs.values())) == (1, 1)
    assert torch.equal(there.held, logits)  # the log-probabilities are those of the model


@pytest.fixture
def model(tiny_llama):
    return Engine(gpu().move(tiny_llama()), page_size=4).model


@pytest.mark.step(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {5: 9.0, 7: -100.0, 60: 3.0}},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 1e300, "temperature": 1.0},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"min_tokens": 9},
    ],
    ids=str,
)
def test_each_field(model, fields):
    check(model, [fields])
    check(model, [{}, fields, {"temperature": 1.0}, fields])


@pytest.mark.step(2)
def test_masks(model):
    """Sizes that are no multiple of 8, and a row that has none."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(61, generator=generator) < 0.1 for _ in range(4)]
    masks[2] = None
    check(model, [{"temperature": 1.0}, {}, {"temperature": 2.0}, {"logit_bias": {5: 9.0}}], masks)


@pytest.mark.step(3)
def test_all_at_once(model):
    choose = random.Random(1).choice
    for number in range(40):
        fields = [
            {
                "temperature": choose([0, 1.0]),
                "top_p": choose([1.0, 0.5]),
                "logit_bias": choose([{}, {4: 2.0}, {3: -100.0, 60: 50.0}]),
                "repetition_penalty": choose([1.0, 1.3, 0.5]),
                "presence_penalty": choose([0.0, 2.0]),
                "frequency_penalty": choose([0.0, 0.7, -2.0]),
                "min_tokens": choose([0, 3, 50]),
            }
            for _ in range(choose([2, 5]))
        ]
        mask = torch.ones(61, dtype=torch.bool)
        mask[7:50] = False
        masks = [choose([None, mask]) for _ in fields]
        if all(each["logit_bias"] == {} and each["min_tokens"] == 0 for each in fields):
            fields[0]["min_tokens"] = 50
        check(model, fields, masks, number)
