"""A step on a GPU uploads once and waits once, whatever its requests ask for."""

import pytest
import torch
from families import EACH_FAMILY, family
from lora_files import with_adapters
from pretend_gpu import gpu, no_inference_mode_fixture  # noqa: F401

from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from infer import generate
from sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("no_inference_mode")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1, 2, 3, 0, 4], [5]]
MIXED = [
    SamplingParams(12, seed=1, temperature=0.8, top_p=0.7, min_tokens=4),
    SamplingParams(12, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(12, seed=2, temperature=1.0, min_p=0.1, logit_bias={5: 2.0}),
]


def counted(engine, adapters=("", "", "")) -> tuple[list, set]:
    """The outputs, and the (uploads, syncs) that occur in steps."""
    device = gpu()
    requests = [engine.add(*each, "", name) for *each, name in zip(PROMPTS, MIXED, adapters)]
    counts = set()
    while engine.busy:
        device.reset()
        engine.step()
        counts.add((sum(device.uploads.values()), sum(device.syncs.values())))
    return [request.output for request in requests], counts


def engine_of(model, **options) -> Engine:
    fields = {"max_num_seqs": 3, "page_size": 4, "max_num_batched_tokens": 6}
    return Engine(model, **fields | options)


def own_texts(model) -> list[list[int]]:
    return [
        [token for (token,) in generate(model, [prompt], params)]
        for prompt, params in zip(PROMPTS, MIXED)
    ]


@pytest.mark.step(2)
@EACH_FAMILY
def test_one_upload_and_one_sync(kind, request):
    """Prefill in chunks, decode, a context shift; experts wait, once a layer."""
    model = family(request, kind)(block_size=16)
    there = gpu().move(model)
    counted(engine_of(there))  # grows the tables of cosines
    texts, counts = counted(engine_of(there))
    waits = model.config.n_layer if kind == "Qwen3Moe" else 0
    assert {uploads for uploads, _ in counts} == {1}
    assert waits or {syncs for _, syncs in counts} == {1}
    assert texts == own_texts(model)


@pytest.mark.step(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_quantised_caches(tiny_llama, dtype):
    model = tiny_llama()
    there = gpu().move(model)
    counted(engine_of(there))
    texts, counts = counted(engine_of(there, cache_dtype=dtype))
    assert counts == {(1, 1)}
    assert texts == counted(engine_of(model, cache_dtype=dtype))[0]


@pytest.mark.step(2)
def test_drafts(tiny_llama):
    """A draft model adds one upload and one sync for each of its passes."""
    model = tiny_llama()
    there = gpu().move(model)
    texts, counts = counted(engine_of(there, drafter=PromptLookupDrafter()))
    assert counts == {(1, 1)} and texts == own_texts(model)
    drafter = PagedModelDrafter(gpu().move(tiny_llama(1)), there, 3, 4)
    texts, counts = counted(engine_of(there, drafter=drafter, gamma=2))
    assert texts == own_texts(model)
    assert counts <= {(1, 1), (2, 2), (3, 3)} and (3, 3) in counts


@pytest.mark.step(3)
def test_adapters(tiny_llama):
    there = with_adapters(gpu().move(tiny_llama()))
    counted(engine_of(there))
    for names in (("a", "b", ""), ("a", "a", "a")):
        want = counted(engine_of(with_adapters(tiny_llama())), names)[0]
        assert counted(engine_of(there), names) == (want, {(1, 1)})


@pytest.mark.step(1)
def test_a_broken_row_alone_fails(tiny_llama):
    """NaN is found in the same sync."""
    there = gpu().move(tiny_llama())
    with torch.no_grad():
        there.layer("embedding").weight[5] = float("nan")
    engine = engine_of(there)
    texts, counts = counted(engine)
    assert counts == {(1, 1)}
    assert texts[2] == [] and texts[0] == own_texts(tiny_llama())[0]
