"""Every pass, sampler, mask, cache, draft and adapter runs on a GPU, with the CPU's tokens.

The GPU is tests/pretend_gpu.py.
"""

import pytest
import torch
from constrained import END, letters
from families import EACH_FAMILY, family
from lora_files import with_adapters
from pretend_gpu import gpu, no_inference_mode_fixture  # noqa: F401

from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from infer import beam_search, generate
from infer_speculative import generate_speculative
from quantisation.int8 import replace_with_int8_linear
from sampling import SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1, 2, 3, 0, 4], [5]]
pytestmark = pytest.mark.usefixtures("no_inference_mode")
FIELDS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1, "min_tokens": 9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {5: 3.0, 7: -100.0}, "stop_token_ids": (8,)},
    {"temperature": 1.0, "logprobs": 2},
]


def params(fields: dict, count: int = 9) -> list[SamplingParams]:
    return [SamplingParams(count, seed=row, **fields) for row in range(len(PROMPTS))]


def outputs(model, params, adapters=("", "", ""), **options) -> list:
    engine = Engine(model, max_num_seqs=2, page_size=4, max_num_batched_tokens=8, **options)
    requests = [engine.add(*each, "", name) for *each, name in zip(PROMPTS, params, adapters)]
    while engine.busy:
        engine.step()
    return [
        (request.output, request.finish_reason, [each.top for each in request.logprobs])
        for request in requests
    ]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_each_sampling_field(tiny_llama, fields):
    model = tiny_llama(block_size=16)
    assert outputs(gpu().move(model), params(fields)) == outputs(model, params(fields))
    if "logprobs" not in fields:
        steps = [
            list(generate(each, PROMPTS, params(fields))) for each in (gpu().move(model), model)
        ]
        assert steps[0] == steps[1]


@EACH_FAMILY
def test_each_family(kind, request):
    model = family(request, kind)()
    given = params({"temperature": 0.7}, 9)
    assert outputs(gpu().move(model), given) == outputs(model, given)
    for cache in (True, False):
        runs = [
            list(generate(each, PROMPTS, given, use_cache=cache))
            for each in (gpu().move(model), model)
        ]
        assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_each_cache_dtype(tiny_llama, dtype):
    model = tiny_llama()
    given = params({}, 9)
    assert outputs(gpu().move(model), given, cache_dtype=dtype) == outputs(
        model, given, cache_dtype=dtype
    )


def test_drafts(tiny_llama):
    model, draft = tiny_llama(), tiny_llama(1)
    given = params({"temperature": 0.5}, 9)
    want = outputs(model, given)
    assert outputs(gpu().move(model), given, drafter=PromptLookupDrafter()) == want
    there = gpu().move(model)
    drafter = PagedModelDrafter(gpu().move(draft), there, 2, 4)
    assert outputs(there, given, drafter=drafter) == want
    runs = []
    for target, small in ((model, draft), (gpu().move(model), gpu().move(draft))):
        torch.manual_seed(0)
        steps = generate_speculative(target, small, PROMPTS[0], given[0], 3)
        runs.append([token for each in steps for token in each.tokens])
    assert runs[0] == runs[1]


def test_beam_search(tiny_llama):
    model = tiny_llama()
    here, there = (beam_search(each, PROMPTS[0], 3, 9) for each in (model, gpu().move(model)))
    assert [beam.tokens for beam in there] == [beam.tokens for beam in here]


def test_int8_weights(tiny_llama):
    model = replace_with_int8_linear(tiny_llama(dtype=torch.float32))
    given = params({}, 9)
    assert outputs(gpu().move(model), given) == outputs(model, given)


def test_adapters(tiny_llama):
    given = params({"temperature": 0.5}, 12)
    there = with_adapters(gpu().move(tiny_llama()))
    for names in (("a", "b", ""), ("a", "a", "a")):
        want = outputs(with_adapters(tiny_llama()), given, names)
        assert outputs(there, given, names) == want


def test_constraints(tiny):
    model = tiny(vocab_size=8, eos_token_id=END)
    given = params({"temperature": 1.0, "choices": ("abcab", "cc", "ba")})
    want = outputs(model, given, encoding=letters())
    assert outputs(gpu().move(model), given, encoding=letters()) == want
    assert all(reason == "stop" for _, reason, _ in want)


def test_a_page_with_nan_is_cleared(tiny_llama):
    """A page that a broken request left does not spoil the next one."""
    model = tiny_llama()
    there = gpu().move(model)
    engine = Engine(there, max_num_seqs=2, page_size=4)
    for storage in engine.cache.storages:
        storage.fill_(float("nan"))
    request = engine.add(PROMPTS[1], SamplingParams(9))
    while engine.busy:
        engine.step()
    (alone,) = [list(generate(model, [PROMPTS[1]], SamplingParams(9)))]
    assert request.output == [token for (token,) in alone]


def test_devices_do_not_mix():
    """It refuses what a GPU refuses, and counts what a GPU waits for."""
    device = gpu()
    x = device.moved(torch.arange(6.0).view(2, 3))
    with pytest.raises(RuntimeError, match="one device"):
        x + torch.ones(3)
    device.reset()
    assert (x + 1).argmax(-1).tolist() == [2, 2] and x[[1]][0, 2] == 5
    assert sum(device.uploads.values()) == 1 and sum(device.syncs.values()) == 2
    assert device.launches == {"aten.add": 1, "aten.argmax": 1, "aten.index": 1, "aten.eq": 1}
    with device.capture(), pytest.raises(RuntimeError, match="no syncs"):
        (x + 1).tolist()
