"""Hidden states of kept positions: those from which the logits came, in torch and in C."""

import ctypes

import pytest
import torch
from conftest import random_tokens
from families import EACH_FAMILY, SAVED, family
from natives import threads
from pretend_gpu import PretendGraph, gpu, no_inference_mode_fixture  # noqa: F401
from ranks import parallel_model, results
from test_captured_step import replaying
from test_one_upload import counted, engine_of

from cache import Span
from engine.cache import PagedCache
from loading.load import load_model, save_model
from native import use_native
from parallel.ranks import TensorParallelGroup

SPANS = [
    Span([2, 0], 0, random_tokens(7, seed=1)),
    Span([1], 0, random_tokens(1, seed=2)),
    Span([3], 0, random_tokens(4, seed=3)),
]
KEEP = [3, 1, 4]


def passed(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and hidden states of a pass over pages."""
    return model.runner.forward(model, PagedCache(model, 4, 4), SPANS, KEEP)


def states_of(model) -> torch.Tensor:
    """Return the kept states of whole sequences."""
    kept = []
    for span, count in zip(SPANS, KEEP):
        positions = torch.arange(len(span.tokens))
        x = model.hidden(torch.tensor([span.tokens]), positions, model.causal_attention)
        kept.append(x[0, -count:])
    return torch.cat(kept)


def head_in_c(model, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits that the norm and the head of gpt.c make of hidden states."""
    norm = model.runner.model.norm
    normalize = model.runner.library.layer_norm if norm.bias else model.runner.library.rms_norm
    y = torch.empty_like(hidden)
    sizes = ctypes.c_float(model.config.norm_eps), *map(ctypes.c_int64, hidden.shape)
    normalize(ctypes.byref(norm), *sizes, *(ctypes.c_void_p(t.data_ptr()) for t in (hidden, y)))
    return model.layer("head")(y)


@pytest.mark.step(1)
@EACH_FAMILY
@torch.inference_mode()
def test_the_head_makes_the_logits_of_them(kind, request):
    model = family(request, kind)()
    logits, hidden = passed(model)
    torch.testing.assert_close(hidden, states_of(model), rtol=0, atol=1e-9)
    assert torch.equal(model.head(hidden).float(), logits)


@pytest.mark.step(2)
@EACH_FAMILY
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@torch.inference_mode()
def test_in_c_the_head_computes_the_same_bits(kind, dtype, compiled, request, tmp_path):
    """With fewer tokens than threads, and with more."""
    shape = {"n_embd": 64} | SAVED.get(kind, {})
    if kind == "Gemma2":
        shape["final_logit_softcapping"] = None  # `head_in_c` is a norm and a layer
    save_model(family(request, kind)(**shape).float(), tmp_path)
    want = states_of(load_model(tmp_path, dtype))
    model = load_model(tmp_path, dtype)
    use_native(model)
    for count in (1, 2, 16):
        with threads(count):
            logits, hidden = passed(model)
            assert torch.equal(head_in_c(model, hidden), logits)
        if dtype == torch.float32:
            torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-4)


@pytest.mark.step(1)
@EACH_FAMILY
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_of_an_engine(kind, graphs, request, monkeypatch):
    """On a GPU, where steps of fixed shapes are padded, and replayed."""
    model = gpu().move(family(request, kind)(block_size=16))
    engine = engine_of(replaying(model, PretendGraph) if graphs else model)
    step = model.runner.step
    shapes = []

    def checked(*arguments):
        output = step(*arguments)
        assert output[-1].shape == (len(output.finite), model.config.n_embd)
        assert torch.equal(model.head(output.hidden).float(), output.logits)
        shapes.append(output.hidden.shape)
        return output

    monkeypatch.setattr(model.runner, "step", checked)
    counted(engine)
    assert shapes


@pytest.mark.step(1)
def test_on_ranks(compiled, tiny_llama, tmp_path):
    save_model(tiny_llama().float(), tmp_path)

    def action():
        with TensorParallelGroup() as tp_group, torch.inference_mode():
            model = parallel_model(tmp_path, tp_group)
            if tp_group.rank:
                return model.runner.run_worker_loop(model, PagedCache(model, 4, 4))
            output = [each.numpy() for each in passed(model)]
            tp_group.broadcast()
            return output

    hidden = torch.from_numpy(results(2, action)[0][1])
    want = states_of(load_model(tmp_path, torch.float32))
    torch.testing.assert_close(hidden, want, rtol=3e-5, atol=3e-5)
