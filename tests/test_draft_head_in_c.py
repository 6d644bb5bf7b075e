"""A draft head in C: the pass of torch up to rounding, and the same bits in every batch."""

import pytest
import torch
from conftest import random_tokens, record
from draft_heads import head_of
from drafting import write
from engines import alone
from families import EACH_FAMILY, SAVED, family
from natives import native, threads
from test_draft_head import HEAD, LLAMA
from test_draft_head_in_batches import check_same_drafts, engine_drafter
from test_speculative_decoding import passes, tokens
from torch import nn

import infer_engine
import infer_speculative
from cache import KVCache, Span
from engine.cache import PagedCache
from loading.load import load_model, save_model
from native import use_native
from quantisation.int8 import Int8Linear, quantize, unrotate_channels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)


def use_int8(head) -> None:
    """Quantise a head's weights in torch."""
    for name, layer in [*head.named_modules(), ("", head.target_layers[2])]:
        if isinstance(layer, nn.Linear):
            quantised = Int8Linear(layer)
            quantised.weight, quantised.scale = quantize(unrotate_channels(layer.weight.detach()))
            if name:
                head.set_submodule(name, quantised)
    head.target_layers = *head.target_layers[:2], quantised


@pytest.fixture
def pair(compiled, request, tmp_path):
    """A function that returns a native target, and its head twice: in torch and in C."""

    def build(kind, dtype=torch.float32, window=5, **shape):
        save_model(
            family(request, kind)(n_embd=64, **SAVED.get(kind, {}), **shape).float(), tmp_path
        )
        target = native(load_model(tmp_path, dtype))
        heads = [head_of(target, window=window) for _ in range(2)]
        use_int8(heads[0])
        use_native(heads[1])
        return target, *heads

    return build


@pytest.mark.step(1)
@EACH_FAMILY
@DTYPES
@torch.inference_mode()
def test_c_computes_what_torch_does(kind, dtype, pair):
    """With int8 weights: several tokens, then one at a time, past the sliding window."""
    _, *heads = pair(kind, dtype, block_size=32)
    caches = [KVCache(head) for head in heads]
    states = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    new = random_tokens(20)
    for start, end in ((0, 9), *((i, i + 1) for i in range(9, 20))):
        outputs = []
        for head, cache in zip(heads, caches):
            spans = cache.spans([new[start:end]])
            outputs.append(head.runner.forward(head, cache, spans, states[start:end]))
            cache.commit()
        for want, found in zip(*outputs):
            drafted = want.isfinite()
            assert want.shape == found.shape and torch.equal(drafted, found.isfinite())
            difference = (want - found)[drafted].square().mean() / want[drafted].square().mean()
            assert difference < 0.01**2


@pytest.mark.step(1)
@EACH_FAMILY
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_batch(kind, pair):
    """With fewer tokens than threads, and with more."""
    target, _, head = pair(kind)
    spans = [
        Span([2, 0], 0, random_tokens(7, seed=1)),
        Span([1], 0, random_tokens(1, seed=2)),
        Span([3], 0, random_tokens(4, seed=3)),
    ]
    states = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    expected = []
    for span, own in zip(spans, states.split([7, 1, 4])):
        expected.append(head.runner.forward(head, PagedCache(head, 4, 4), [span], own))
    for count in (1, 2, 16):
        with threads(count):
            output = head.runner.forward(head, PagedCache(head, 4, 4), spans, states)
        for row, want in enumerate(expected):
            assert torch.equal(output.logits[row], want.logits[0])
            assert torch.equal(output.hidden[row], want.hidden[0])


@pytest.mark.step(1)
@EACH_FAMILY
@DTYPES
def test_outputs_are_the_targets(kind, dtype, pair):
    """In generate_speculative and in the engine. Contexts shift, and requests are preempted."""
    target, _, head = pair(kind, dtype, block_size=16)
    expected = alone(target, [1, 2, 3], max_new_tokens=40, ignore_eos=True)
    steps = passes(target, head, [1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert tokens(steps) == expected
    for cache_dtype in (None, torch.int8):
        options = {"num_pages": 12, "page_size": 4, "max_num_seqs": 3, "cache_dtype": cache_dtype}
        drafter = engine_drafter(target, head, cache_dtype=cache_dtype)
        engine, _ = write(target, drafter, max_num_batched_tokens=16, **options)
        assert engine.num_draft_tokens > 50


@pytest.mark.step(1)
def test_an_engine_drafts_what_one_sequence_drafts(pair):
    for window in (3, 100):
        target, _, head = pair("Llama", window=window, block_size=64)
        check_same_drafts(target, head)


@pytest.mark.step(1)
def test_without_a_native_target_it_is_refused(compiled, tiny_llama):
    head = head_of(tiny_llama(n_embd=64).float())
    before = head.state_dict()
    with pytest.raises(ValueError, match="a native draft head requires a native target"):
        use_native(head)
    assert head.state_dict().keys() == before.keys()


@pytest.mark.step(1)
def test_a_head_becomes_native_once(pair):
    _, _, head = pair("Llama")
    with pytest.raises(ValueError, match="the layers of this draft head are native already"):
        use_native(head)


@pytest.mark.step(2)
@pytest.mark.parametrize("script", [infer_speculative, infer_engine])
def test_the_command_line_computes_heads_in_c(run_main, monkeypatch, script):
    from draft_head import DraftHead

    in_torch = record(monkeypatch, DraftHead, "hidden", lambda *_: None)
    model = "--target" if script is infer_speculative else "--model"
    options = model, LLAMA, "--draft", HEAD, "--prompt", "Tom", "--max-new-tokens", 30
    for backend in ("torch", "native"):
        code, out, err = run_main(script.main, *options, "--backend", backend, "--temperature", 0)
        assert code == 0 and out and "drafts accepted" in err
        assert bool(in_torch) == (backend == "torch")
        in_torch.clear()
