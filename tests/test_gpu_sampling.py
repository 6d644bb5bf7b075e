"""Sample a batch on a GPU without waiting for it."""

import random

import pytest
import torch
from pretend_gpu import gpu, no_inference_mode_fixture  # noqa: F401

from engine.drafter import PagedModelDrafter
from engine.engine import Engine
from sampling import SamplingParams, Sequence, sample_batch

pytestmark = pytest.mark.usefixtures("no_inference_mode")
MIXED = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.2, "top_p": 0.9, "top_k": 40},
]


def batch(fields: list[dict], vocab_size: int = 61) -> tuple[torch.Tensor, list[Sequence]]:
    """Random logits, and a sequence of another length and seed for each row."""
    generator = torch.Generator().manual_seed(len(fields))
    shape = len(fields), vocab_size
    logits = 4 * torch.randn(shape, dtype=torch.float64, generator=generator)
    sequences = []
    for row, each in enumerate(fields):
        params = SamplingParams(seed=2**63 + 7 * row, **each)
        sequences.append(Sequence([1, 2, 3, row % 61, 2], 2, params, (60,)))
    return logits, sequences


def sampled(model, logits, sequences) -> list[int]:
    device = gpu()
    there = device.moved(logits)
    device.reset()
    return model.runner.sample_batch(there, sequences)


@pytest.fixture
def model(tiny_llama):
    """A model on the GPU, in an engine."""
    return Engine(gpu().move(tiny_llama()), page_size=4).model


@pytest.mark.step(1)
@pytest.mark.parametrize("fields", [*([each] for each in MIXED[2:]), MIXED], ids=str)
def test_one_upload_and_one_sync(model, fields):
    sampled(model, *batch(fields * 3))
    device = gpu()
    assert (sum(device.uploads.values()), sum(device.syncs.values())) == (1, 1)


@pytest.mark.step(2)
def test_rows_with_other_parameters_cost_no_launch(model):
    """A batch takes the launches of its largest row, however many kinds of rows there are."""
    counts = []
    for fields in ([MIXED[4]], [{"temperature": 1 + row / 9, "top_p": 0.5} for row in range(30)]):
        sampled(model, *batch(fields))
        counts.append(sum(gpu().launches.values()))
    assert counts[0] == counts[1]


@pytest.mark.step(2)
def test_draft_models_too(model, tiny_llama):
    draft = PagedModelDrafter(gpu().move(tiny_llama(1)), model, 2, 4).model
    sampled(draft, *batch(MIXED))
    assert sum(gpu().syncs.values()) == 1


@pytest.mark.step(2)
def test_the_tokens_of_the_cpu(model):
    """Ties, extreme temperatures and one-token filters included."""
    choose = random.Random(0).choice
    for number in range(60):
        fields = [
            {
                "temperature": choose([0, 1e-300, 0.5, 1.0, 2.0, 1e300]),
                "top_k": choose([0, 1, 3, 61, 1000]),
                "top_p": choose([1.0, 1e-9, 0.3, 0.95]),
                "min_p": choose([0.0, 0.01, 0.5, 1.0]),
            }
            for _ in range(choose([1, 2, 9]))
        ]
        logits, sequences = batch(fields)
        if number % 3 == 0:  # ties, in float32, where 1e-300 would be 0
            logits = logits.round().float()
        assert sampled(model, logits, sequences) == sample_batch(logits, sequences), fields
        assert sum(gpu().syncs.values()) == 1
