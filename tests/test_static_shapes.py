"""Decode steps of fixed shapes: one list of operations, and the tokens of steps that vary."""

import pytest
import torch
from families import EACH_FAMILY, family
from pretend_gpu import gpu, no_inference_mode_fixture  # noqa: F401
from test_one_upload import MIXED, PROMPTS, engine_of, own_texts

from sampling import SamplingParams


def run(engine, prompts=PROMPTS, params=MIXED, adapters=None) -> list[list[int]]:
    names = adapters or [""] * len(prompts)
    requests = [engine.add(*each, "", name) for *each, name in zip(prompts, params, names)]
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


def static(model):
    """A model whose decode steps have fixed shapes, on any device."""
    from engine.static import StaticRunner
    from graphs import eager_step

    model.runner = StaticRunner(eager_step)
    return model


@pytest.mark.step(3)
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("greedy", [True, False])
def test_steps_on_a_gpu_have_the_same_operations(tiny_llama, greedy):
    """While sequences begin pages at different times."""
    device = gpu()
    sampled = {} if greedy else {"temperature": 0.9, "seed": 5}
    params = [SamplingParams(9, ignore_eos=True, **sampled)] * 3
    engine = engine_of(device.move(tiny_llama(block_size=32)), max_num_batched_tokens=64)
    prompts = [[1] * 17, [2] * 18, [3] * 23]
    requests = [engine.add(*each) for each in zip(prompts, params)]
    engine.step()  # the prefills
    launches = []
    while engine.busy:
        device.reset()
        engine.step()
        launches.append(dict(device.launches))
    assert len(launches) == 8 and all(each == launches[0] for each in launches)
    model = tiny_llama(block_size=32)
    assert [each.output for each in requests] == run(engine_of(model), prompts, params)


@pytest.mark.step(2)
@EACH_FAMILY
def test_tokens_of_steps_that_vary(kind, request):
    """In pages that hold NaN at first, past the context window."""
    model = static(family(request, kind)(block_size=16))
    engine = engine_of(model)
    for storage in engine.cache.storages:
        storage.fill_(torch.nan)
    assert run(engine) == own_texts(family(request, kind)(block_size=16))


@pytest.mark.step(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_quantised_caches(tiny_llama, dtype):
    texts = [
        run(engine_of(each, cache_dtype=dtype)) for each in (tiny_llama(), static(tiny_llama()))
    ]
    assert texts[0] == texts[1]


@pytest.mark.step(1)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3"])
def test_few_shapes(kind, request, monkeypatch):
    """Equal shapes have inputs of equal sizes; five sequences are computed as eight."""
    import engine.static

    plans = []
    plan_step = engine.static.plan_step

    def recorded(cache, spans):
        shape, parts = plan_step(cache, spans)
        plans.append((shape, [len(part) for part in parts]))
        return shape, parts

    monkeypatch.setattr(engine.static, "plan_step", recorded)
    model = static(family(request, kind)(block_size=64))
    params = [SamplingParams(40, ignore_eos=True)] * 5
    engine = engine_of(model, max_num_seqs=5, max_num_batched_tokens=64)
    run(engine, [[token] * 3 for token in range(5)], params)
    sizes = {}
    for shape, own in plans:
        assert sizes.setdefault(shape, own) == own
    assert {shape.num_seqs for shape in sizes} == {8} and len(plans) == 39
    assert len(sizes) == 5  # up to 4, 8, 16, 32 and 64 positions


@pytest.mark.step(2)
def test_a_broken_row_alone_fails(tiny_llama):
    """The last one, too, which fills the shape."""
    model = static(tiny_llama())
    with torch.no_grad():
        model.layer("embedding").weight[5] = float("nan")
    texts = run(engine_of(model), [[5], [1, 2], [3, 4]], MIXED)
    assert not texts[0] and all(texts[1:])
    params = [SamplingParams(5, ignore_eos=True, logit_bias=((5, 100),)), SamplingParams(5)]
    engine = engine_of(model)
    requests = [engine.add([1, 2], params[1]), engine.add([3, 4], params[0])]
    while engine.busy:
        engine.step()
    assert requests[1].finish_reason == "error" and len(requests[0].output) == 5
