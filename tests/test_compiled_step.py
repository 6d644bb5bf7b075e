"""Decode steps that torch.compile compiles."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from families import family
from lora_files import with_adapters
from test_captured_step import replaying
from test_one_upload import engine_of, own_texts
from test_static_shapes import run
from torch._inductor.utils import run_and_get_code

from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams

COMPILE = torch.compile


@pytest.fixture(name="counted")
def counted_fixture(monkeypatch):
    """torch.compile traces, but runs the graph as it is, and appends to this list."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=backend))
    yield graphs
    torch.compiler.reset()


def compiled_model(model):
    from graphs import compile_step

    return replaying(model, compile_step)


@pytest.mark.step(2)
@pytest.mark.parametrize("kind", ["GPT2", "Qwen3", "Gemma3"])
def test_one_compilation_a_shape(kind, request, counted):
    """Two engines of the same shapes share them. The tokens are those of `generate`."""
    build = family(request, kind)
    model = compiled_model(build(block_size=16))
    engine = engine_of(model)
    assert run(engine) == own_texts(build(block_size=16))
    count = len(counted)
    assert count == len(engine.cache.steps) > 2
    assert run(engine_of(model)) == own_texts(build(block_size=16)) and len(counted) == count


@pytest.mark.step(2)
def test_more_shapes_than_torch_allows(counted, monkeypatch):
    """torch stops at 8 compilations of a function, and at 256 in all."""
    from graphs import compile_step

    monkeypatch.setattr(torch._dynamo.config, "accumulated_recompile_limit", 10)
    for size in range(1, 15):
        step = compile_step(lambda packed: (packed * 2,), torch.ones(size), torch.device("cpu"))
        assert step(torch.ones(size))[0].tolist() == [2] * size
    assert len(counted) == 14


@pytest.mark.step(2)
def test_adapters_and_int8_caches(tiny_llama, counted):
    """A step with adapters is not compiled."""
    texts = []
    for model in (tiny_llama(), compiled_model(tiny_llama())):
        engine = engine_of(with_adapters(model), cache_dtype=torch.int8)
        texts.append([run(engine, adapters=names) for names in (("a", "b", ""), ("", "", ""))])
    assert texts[0] == texts[1] and counted


@pytest.mark.step(1)
def test_compiled_code_copies_no_cache(tiny_llama):
    """torch.compile's own backend updates the pages in place, and finds the same tokens."""
    shape = {"n_layer": 1, "dtype": torch.float32}
    params = SamplingParams(3, ignore_eos=True)
    engine = Engine(compiled_model(tiny_llama(**shape)), num_pages=37, page_size=4)
    torch.compiler.reset()
    tokens, code = run_and_get_code(run, engine, [[1]], [params])
    torch.compiler.reset()
    assert tokens == run(Engine(tiny_llama(**shape)), [[1]], [params])
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", "".join(code))
    allocated = [math.prod(map(int, shape.strip(", ").split(","))) for shape in shapes]
    assert 0 < max(allocated) < engine.cache.layers[0][0].numel()  # keys of all pages


@pytest.mark.step(3)
def test_options(engine_cli, monkeypatch, tiny_experts):
    import command_line.models

    for options in (["--enforce-eager"], ["--backend", "native"]):
        code, _, err = engine_cli("--compile", *options)
        assert code == 2 and "--compile conflicts with " + " ".join(options) in err
    with monkeypatch.context() as patch:
        patch.setattr(command_line.models, "is_distributed", lambda: True)
        code, _, err = engine_cli("--compile")
        assert code == 2 and "--compile conflicts with several processes" in err
        args = {"dtype": "float32", "backend": "auto", "adapter": None, "enforce_eager": False}
        patch.setattr(command_line.models, "is_distributed", lambda: False)
        patch.setattr(command_line.models, "load_model", lambda *_: tiny_experts())
        patch.setattr(command_line.models, "check_compiler", lambda _: None)
        with pytest.raises(UserError, match="--compile: a mixture of experts"):
            command_line.models.load_models(["m"], SimpleNamespace(**args, compile=True), "cpu")

    def fails(*_):
        raise RuntimeError("No working C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    code, _, err = engine_cli("--compile")
    assert (code, err.splitlines()[-1].partition("error: ")[2]) == (
        2,
        "--compile: torch.compile fails here: No working C++ compiler",
    )


@pytest.mark.step(3)
def test_the_option_compiles(engine_cli, counted, monkeypatch):
    """In torch, also where C would compute."""
    options = "--prompt", "Once", "--max-new-tokens", 8, "--temperature", 0.8, "--seed", 1
    code, text, _ = engine_cli(*options, "--backend", "torch")
    monkeypatch.setattr("command_line.models.check_compiler", lambda _: None)
    assert (code, engine_cli(*options, "--compile")[:2]) == (0, (0, text)) and counted
