"""A decode step in C gives the logits of the one in torch, and texts stay the same."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, run_rows
from natives import (
    WEIGHT_DTYPES,
    both,
    check_logits,
    in_pieces,
    native,
    native_in_dtype,
    passed,
    random_texts,
    threads,
    to_int8,
)

from cache import KVCache
from infer import pass_logits
from infer_speculative import main
from loading.load import load_model
from model import GPT, TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
FORMS = [
    {},
    {"n_head": 1, "n_embd": 20},
    {"n_head": 3, "n_embd": 51, "layer_norm_epsilon": 0.1},
    {"n_layer": 1, "n_embd": 64},
]


def test_decode_steps_make_no_pass_of_torch(cli, torch_passes):
    args = ("--prompt", "Once upon a time", "--max-new-tokens", 30)
    expected = cli(*args, "--backend", "torch")[:2]
    assert len(torch_passes) == 30 and expected[0] == 0
    torch_passes.clear()
    assert cli(*args)[:2] == expected
    assert not [shape for shape in torch_passes if shape[1] == 1]


@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_another_architecture_is_computed_by_torch(run_main, tiny, monkeypatch, unknown, backend):
    """Each model of a command line by itself."""
    models = [tiny(dtype=torch.float32, vocab_size=4096) for _ in range(2)]
    models[unknown].__class__ = type("Mamba", (GPT,), {})
    left = list(models)
    monkeypatch.setattr("command_line.models.load_model", lambda *_: left.pop(0))
    monkeypatch.setattr("command_line.models.kernel", lambda: "plain C")
    code, _, err = run_main(main, "--max-new-tokens", 3, "--backend", backend)
    assert code == 0 and type(models[unknown].runner) is TorchRunner
    assert type(models[1 - unknown].runner) is not TorchRunner
    said = backend == "native"
    assert err.count("note: --backend native: native code computes GPT") == said
    assert err.count("this is Mamba; torch computes instead\n") == said
    assert err.count("a slow build: plain C\n") == said


@torch.inference_mode()
def test_logits_of_a_checkpoint():
    """Nearer to float64's than torch's are."""
    texts = torch.tensor([random_tokens(256, 4096)])
    expected = load_model(CHECKPOINTS / "stories-draft", torch.float64)(texts)
    model = native(load_model(CHECKPOINTS / "stories-draft"))
    assert (in_pieces(model, texts, 1) - expected).abs().max() <= 1e-5


@torch.inference_mode()
@ALL_TARGETS
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_of_any_gpt(tiny, target, form):
    """They are as near to those of float64 as torch's."""
    check_logits(tiny(dtype=torch.float32, **form), target)


@torch.inference_mode()
@ALL_TARGETS
def test_activations_far_from_zero(tiny, target):
    """The exponentials of GELU and the softmax leave the range of float32 there."""
    model = tiny(dtype=torch.float32)
    model.h[0].mlp.c_fc.bias.copy_(torch.linspace(-40, 40, 64))
    model.h[1].attn.c_attn.weight[:32].mul_(200)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    logits = in_pieces(native(model, target), texts, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_int8_logits_stay_close(tiny):
    """Norms, softmax and GELU round differently, and then an activation may become another int8."""
    model = tiny(dtype=torch.float32, n_embd=192, n_head=6, block_size=64)
    to_int8(model.init_weights(std=0.05, generator=torch.Generator().manual_seed(0)))
    texts = random_texts(model, 1, 64)
    expected = model(texts)
    error = (in_pieces(native(model), texts, 1) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_int8_logits_have_the_same_bits_on_every_processor(tiny, shape):
    model = to_int8(tiny(dtype=torch.float32, **shape))
    texts = random_texts(model, 1)
    expected = in_pieces(native(copy.deepcopy(model)), texts, 1)
    for target in TARGETS:
        compiled = native(copy.deepcopy(model), target)
        assert torch.equal(in_pieces(compiled, texts, 1), expected)


@torch.inference_mode()
@WEIGHT_DTYPES
def test_the_same_bits_at_any_number_of_threads(tiny, dtype):
    model = native_in_dtype(tiny(dtype=torch.float32, n_embd=66, n_head=3), dtype)
    texts = random_texts(model, 1, 7)
    expected = in_pieces(model, texts, 1)
    for count in (2, 5):
        with threads(count):
            for _ in range(2):
                assert torch.equal(in_pieces(model, texts, 1), expected)


@torch.inference_mode()
def test_a_step_adds_to_its_row_of_the_cache(tiny):
    """The keys and values that it leaves are those of torch."""
    eager, model = both(tiny)
    texts = [random_tokens(16, seed=row) for row in range(3)]
    caches = [KVCache(eager, 3) for _ in range(2)]
    for row in (2, 0, 1):
        for cache in caches:
            pass_logits(eager, [texts[row][:9]], [row], cache, 1)
        new = [texts[row][9:10]]
        expected, logits = (
            pass_logits(each, new, [row], cache, 1) for each, cache in zip((eager, model), caches)
        )
        torch.testing.assert_close(logits, expected, rtol=3e-5, atol=3e-5)
    assert caches[0].tokens == caches[1].tokens
    torch.testing.assert_close(caches[0].storage, caches[1].storage, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [None, 1, 5])
def test_texts_beyond_the_window(tiny, stride):
    eager, model = both(tiny)
    given = {"max_new_tokens": 50, "ignore_eos": True, "options": {"stride": stride}}
    prompt = [random_tokens(3)]
    assert run_rows(model, prompt, **given) == run_rows(eager, prompt, **given)


@pytest.mark.parametrize(
    "pages, start, token, message",
    [
        ([0], 0, 61, r"tokens \[61\]: must be from 0 to 60"),
        ([0], 0, -1, r"tokens \[-1\]: must be from 0 to 60"),
        ([2], 0, 1, r"pages \[2\]: must be from 0 to 1"),
        ([0, 1, 1], 16, 1, r"positions \[16\]: must be from 0 to 15"),
    ],
)
def test_nothing_outside_its_arrays_is_touched(tiny, pages, start, token, message):
    model = native(tiny(dtype=torch.float32))
    storage = torch.zeros(2, 2, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=message):
        passed(model, storage, [(pages, start, [token])], [1])
    assert not storage.any()


@pytest.mark.parametrize("shape", [{"n_layer": 1}, {"n_head": 4}, {"n_embd": 32}], ids=str)
def test_the_cache_of_another_model_is_refused(tiny, shape):
    other = KVCache(tiny(dtype=torch.float32, **shape), 1)
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        passed(native(tiny(dtype=torch.float32)), other.storage, [([0], 0, [1])], [1])


@torch.inference_mode()
def test_a_model_is_as_it_was_if_it_cannot_be_packed(tiny):
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(9)])
    expected = model(texts)
    model.ln_f.weight.data = model.ln_f.weight.double()
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(model)
    model.ln_f.weight.data = model.ln_f.weight.float()
    assert torch.equal(model(texts), expected) and type(model.runner) is TorchRunner


def test_a_runner_takes_what_is_compiled_already(fresh, compilations, tmp_path):
    from native.step import NativeRunner

    (tmp_path / "cache").write_text("")  # no directory
    assert fresh.kernel() == "small"
    with pytest.raises(AttributeError, match="work_floats"):  # which small.c lacks
        NativeRunner(SimpleNamespace(config=None))
    assert len(compilations) == 1


def test_weights_may_change_in_place(tiny):
    eager, model = both(tiny)
    prompt = [random_tokens(4)]
    before = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    for each in (eager, model):
        with torch.no_grad():
            each.ln_f.weight.mul_(-1)
    after = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    assert after == run_rows(eager, prompt, max_new_tokens=20, ignore_eos=True) != before
