"""`generate` and its relatives with captured or compiled decode steps."""

import functools
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, family
from lora_files import with_adapters
from pretend_gpu import PretendGraph, gpu, no_inference_mode_fixture  # noqa: F401
from test_captured_step import SAMPLED, replaying
from test_compiled_step import compiled_model, counted_fixture  # noqa: F401
from test_one_upload import MIXED, PROMPTS

import graphs
from graphs import eager_step
from infer import beam_search, generate
from infer_speculative import generate_speculative, main
from sampling import SamplingParams

LONG = [replace(each, max_new_tokens=16, ignore_eos=True) for each in MIXED]


@pytest.fixture(name="made")
def made_fixture(monkeypatch):
    """The steps that eager_step makes; with shapes from 4 positions on."""
    steps = []

    def make(*arguments):
        steps.append(arguments)
        return eager_step(*arguments)

    monkeypatch.setattr(graphs, "MIN_LENGTH", 4, raising=False)
    make.steps = steps
    return make


@pytest.fixture(name="compare")
def compare_fixture(request, made):
    """A function that checks the tokens of a family, and returns the lengths of its steps."""

    def compare(kind, dtype):
        build = family(request, kind)
        model = replaying(build(block_size=16), made)
        for count in (1, 3):
            arguments = PROMPTS[:count], LONG[:count]
            want = list(generate(build(block_size=16), *arguments, cache_dtype=dtype))
            assert list(generate(model, *arguments, cache_dtype=dtype)) == want
        return {function.args[-1] for function, *_ in made.steps}

    return compare


DTYPES = pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)


@pytest.mark.step(1)
@DTYPES
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "Qwen3Moe"])
def test_the_tokens_of_generate(compare, kind, dtype):
    """In a batch of ragged prompts, past the context window."""
    assert compare(kind, dtype) == {4, 8, 16}


@pytest.mark.step(1)
@DTYPES
def test_still_no_fixed_steps_of_experts(compare, dtype):
    assert compare("Qwen3Moe", dtype) == set()


@pytest.mark.step(1)
def test_beams(tiny_llama, made):
    """Their number changes, and so does the memory of the cache."""
    want = beam_search(tiny_llama(), PROMPTS[0], 3, 12)
    beams = beam_search(replaying(tiny_llama(), made), PROMPTS[0], 3, 12)
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in want] and made.steps


@pytest.mark.step(1)
def test_an_adapter_has_its_own_passes(tiny_llama, made):
    run = functools.partial(generate, prompts=PROMPTS, params=MIXED)
    model = replaying(with_adapters(tiny_llama()), made)
    for adapter in ("a", ""):
        want = list(run(with_adapters(tiny_llama()), adapter=adapter))
        assert list(run(model, adapter=adapter)) == want
        assert bool(made.steps) == (not adapter)


@pytest.mark.step(2)
@pytest.mark.usefixtures("no_inference_mode")
def test_one_launch_a_pass(tiny_llama):
    """All products are in the graph; what a step returns is kept, though a replay overwrites it."""
    device = gpu()
    model = replaying(device.move(tiny_llama()), PretendGraph)
    steps = generate(model, PROMPTS, SAMPLED)
    tokens = [next(steps), next(steps)]
    device.reset()
    tokens.append(next(steps))
    assert device.launches["graph"] == 1 and not {"aten.mm", "aten.addmm"} & device.launches.keys()
    assert [*tokens, *steps] == list(generate(tiny_llama(), PROMPTS, SAMPLED))
    draft = replaying(device.move(tiny_llama(1)), PretendGraph)
    runs = [
        list(generate_speculative(*models, PROMPTS[0], SamplingParams(10)))
        for models in ((model, draft), (tiny_llama(), tiny_llama(1)))
    ]
    assert runs[0] == runs[1]


@pytest.mark.step(3)
def test_calls_share_compiled_steps(tiny_llama, counted):
    """Each call of `generate` has a cache of its own."""
    model = compiled_model(tiny_llama())
    for seed in range(3):
        params = SamplingParams(8, seed=seed, temperature=0.9)
        want = list(generate(tiny_llama(), PROMPTS[:1], params))
        assert list(generate(model, PROMPTS[:1], params)) == want
    assert len(counted) == 1


@pytest.mark.step(4)
def test_options(cli, run_main, counted, monkeypatch):
    monkeypatch.setattr("command_line.models.check_compiler", lambda _: None)
    options = "--prompt", "Once", "--max-new-tokens", 8, "--temperature", 0
    for script in (cli, functools.partial(run_main, main)):
        texts = {script(*options, *more)[:2] for more in ([], ["--compile"], ["--enforce-eager"])}
        assert len(texts) == 1 and next(iter(texts))[0] == 0 and counted
        counted.clear()
    code, _, err = cli("--compile", "--no-cache")
    assert code == 2 and "--compile conflicts with --no-cache" in err
