"""Captured decode steps: one launch replays all operations, on new inputs."""

import contextlib
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import EACH_FAMILY, FAMILIES, family
from pretend_gpu import PretendGraph, gpu, no_inference_mode_fixture  # noqa: F401
from test_one_upload import MIXED, PROMPTS, engine_of, own_texts
from torch.fx.experimental.proxy_tensor import make_fx

from infer import generate
from sampling import SamplingParams

GREEDY = [SamplingParams(count, ignore_eos=True) for count in (12, 9, 12)]
SAMPLED = [replace(GREEDY[0], seed=seed, temperature=0.9, top_p=0.8) for seed in range(3)]
STATIC = pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "Qwen3Moe"])


def run(engine, params) -> tuple[list[list[int]], list[dict]]:
    """The outputs, and the counts of each step that is a decode step of all requests."""
    device = gpu()
    requests = [engine.add(*each) for each in zip(PROMPTS, params)]
    counts = []
    while engine.busy:
        device.reset()
        engine.step()
        if len(engine.scheduled) == 3 == sum(len(each.tokens) for each in engine.scheduled):
            counts.append([dict(each) for each in (device.launches, device.uploads, device.syncs)])
    return [request.output for request in requests], counts


def replaying(model, make_step):
    """A model whose decode steps make_step makes."""
    from graphs import GraphRunner

    model.runner = GraphRunner(make_step)
    return model


def traced(function, packed, device):
    """A step as make_fx's graph, with one operation after the other and no Python."""
    return make_fx(function)(packed)


@pytest.mark.step(2)
@STATIC
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_launch_a_step(kind, params, request):
    """After a step of this shape was captured, without an upload or a sync inside."""
    model = family(request, kind)(block_size=16)
    there = replaying(gpu().move(model), PretendGraph)
    run(engine_of(there), params)  # grows RoPE's tables, by uploads
    engine = engine_of(there, max_num_batched_tokens=64)
    run(engine, params)
    texts, counts = run(engine, params)
    assert texts == [
        [token for (token,) in generate(model, [prompt], each)]
        for prompt, each in zip(PROMPTS, params)
    ]
    assert len(counts) > 5
    for launches, uploads, syncs in counts:
        assert launches == {"graph": 1}
        assert sum(uploads.values()) == sum(syncs.values()) == 1


@pytest.mark.step(2)
@pytest.mark.usefixtures("no_inference_mode")
def test_edits_of_logits_come_after_the_graph(tiny_llama):
    """In the same upload."""
    there = replaying(gpu().move(tiny_llama()), PretendGraph)
    run(engine_of(there), MIXED)
    engine = engine_of(there, max_num_batched_tokens=64)
    run(engine, MIXED)
    texts, counts = run(engine, MIXED)
    assert texts == own_texts(tiny_llama()) and counts
    for launches, uploads, syncs in counts:
        assert launches["graph"] == 1 and not {"aten.mm", "aten.addmm"} & launches.keys()
        assert sum(uploads.values()) == sum(syncs.values()) == 1


@pytest.mark.step(1)
@EACH_FAMILY
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_a_traced_step_computes_new_inputs(kind, dtype, request):
    """So no operation depends on a value. Each shape is traced once."""
    made = []

    def make_step(*arguments):
        made.append(1)
        return traced(*arguments)

    build = family(request, kind)
    model = replaying(build(block_size=16), make_step)
    engine = engine_of(model, cache_dtype=dtype)
    texts = run(engine, SAMPLED)[0]
    assert texts == run(engine_of(build(block_size=16), cache_dtype=dtype), SAMPLED)[0]
    count = len(made)
    assert count == len(engine.cache.steps) and (count > 0) == (kind != "Qwen3Moe")
    assert run(engine, SAMPLED)[0] == texts and len(made) == count


@pytest.mark.step(1)
def test_a_cache_goes_with_its_engine(tiny_llama):
    """Without the garbage collector, which does not know how large it is."""
    from graphs import eager_step

    engine = engine_of(replaying(tiny_llama(), eager_step))
    run(engine, GREEDY)
    cache = weakref.ref(engine.cache)
    assert engine.cache.steps
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.step(3)
def test_the_calls_of_cuda(monkeypatch):
    """A warm-up on a side stream, one capture in the shared pool, then copies and replays."""
    import graphs

    calls = []

    @contextlib.contextmanager
    def context(name):
        calls.append(name)
        yield
        calls.append(f"end {name}")

    class Stream(SimpleNamespace):
        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            calls.append("replay")
            outputs[0][:] = function(step.packed)[0]

    def function(packed):
        return (packed * 2,)

    pool = SimpleNamespace(id="the pool")
    fakes = {
        "MemPool": lambda: pool,
        "Stream": lambda: Stream(name="side"),
        "current_stream": lambda device: Stream(name="main"),
        "stream": lambda stream: context(stream.name),
        "CUDAGraph": Graph,
        "graph": lambda graph, pool, stream, capture_error_mode: context(
            f"capture in {pool} on {stream.name}"
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs.memory_pool.cache_clear()
    graphs.capture_stream.cache_clear()
    captures = "capture in the pool on side", "end capture in the pool on side"
    for _ in range(2):
        calls.clear()
        step = graphs.CapturedStep(function, torch.tensor([1, 2]), torch.device("cpu"))
        outputs = step.outputs
        side = ["side waits for main", "side", "end side", "main waits for side"]
        assert calls == [*side, *captures]
        assert step(torch.tensor([5, 7]))[0].tolist() == [10, 14] and calls[-1] == "replay"
    graphs.memory_pool.cache_clear()
    graphs.capture_stream.cache_clear()


@pytest.mark.step(4)
def test_enforce_eager_changes_no_text(engine_cli):
    options = "--prompt", "Once", "--max-new-tokens", 8, "--backend", "torch"
    code, text, _ = engine_cli(*options)
    assert (code, engine_cli(*options, "--enforce-eager")[:2]) == (0, (0, text))


@pytest.mark.step(4)
def test_enforce_eager_on_a_gpu(tiny_llama, monkeypatch):
    import command_line.models

    model = tiny_llama()
    monkeypatch.setattr(command_line.models, "load_model", lambda *_: model)
    args = {"dtype": "int8", "backend": "auto", "adapter": None, "compile": False}
    command_line.models.load_models(["m"], SimpleNamespace(**args, enforce_eager=True), "cuda")
    assert model.runner.make_step.__name__ == "eager_step"
