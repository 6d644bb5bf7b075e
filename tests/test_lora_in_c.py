"""Lesson 148: C adds what adapters do, and no bit of a text depends on its neighbours."""

import copy
import random

import pytest
import torch
from conftest import TARGETS, random_tokens, record, run_rows
from engines import make_engine
from lora_files import (
    ATTENTION,
    LINEAR,
    NAMES,
    add_at_random,
    check_own,
    random_pairs,
    with_adapters,
)
from natives import native, native_in_dtype, threads, to_int8

from cache import KVCache
from infer import next_logits
from model import TorchRunner

FAMILIES = ["tiny", "tiny_llama", "tiny_gemma", "tiny_experts", "tiny_windows"]


@pytest.fixture
def passes_in_torch(monkeypatch) -> list:
    """To this list each pass with a cache that torch computes adds something."""
    return record(monkeypatch, TorchRunner, "logits", lambda *_: None)


def targets_of(family: str) -> tuple[str, ...]:
    return (*ATTENTION, "gate") if family == "tiny_experts" else LINEAR


def logits_of(model, adapter: str, pieces=(5, 1, 1)) -> torch.Tensor:
    """The logits at the last position of a text, from passes of so many tokens."""
    tokens = random_tokens(sum(pieces))
    cache = KVCache(model, 1, len(tokens))
    end = 0
    for count in pieces:
        end += count
        logits = next_logits(model, [tokens[:end]], cache, adapter=adapter)
    return logits[0, 0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_torch(request, compiled, passes_in_torch, family):
    build = request.getfixturevalue(family)
    exact = with_adapters(build(), targets_of(family))
    expected = [logits_of(exact, name) for name in NAMES]
    passes_in_torch.clear()
    model = with_adapters(native(build().float()), targets_of(family))
    for name, logits in zip(NAMES, expected):
        largest = logits.abs().max()
        assert (logits_of(model, name) - logits).abs().max() < 1e-4 * largest
    assert passes_in_torch == []
    assert (expected[0] - expected[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("family", FAMILIES)
def test_histories_bit_for_bit(request, compiled, passes_in_torch, family, dtype):
    """Also with int8 weights, where a last bit could become a step."""
    build = request.getfixturevalue(family)
    model = with_adapters(native_in_dtype(build(dtype=torch.float32), dtype), targets_of(family))
    options = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 9, "num_pages": 12}
    if family == "tiny_windows":
        options["num_pages"] = 20
    engine, _ = make_engine(model, [], [], **options)
    requests = add_at_random(engine, random.Random(1), NAMES)
    assert {request.adapter for request in requests} == set(NAMES)
    check_own(model, requests)
    assert passes_in_torch == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@torch.inference_mode()
def test_still_the_same_bits_at_any_number_of_threads(tiny_llama, compiled, dtype):
    model = native_in_dtype(tiny_llama(dtype=torch.float32, n_embd=66, n_inner=72), dtype)
    with_adapters(model)
    expected = [logits_of(model, name) for name in NAMES]
    for count in (2, 5):
        with threads(count):
            found = [logits_of(model, name) for name in NAMES]
        assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])


@torch.inference_mode()
def test_still_int8_logits_have_the_same_bits_on_every_processor(tiny_llama, compiled):
    base = to_int8(tiny_llama(dtype=torch.float32))
    models = [with_adapters(native(copy.deepcopy(base), target)) for target in TARGETS]
    for name in NAMES:
        expected, *others = [logits_of(model, name) for model in models]
        assert all(torch.equal(logits, expected) for logits in others)


@torch.inference_mode()
def test_still_adapters_of_different_layers_are_told_apart(tiny_llama, compiled):
    """One leaves alone what another changes, and the layers beside it."""
    from adapters import Adapters

    def adapted(model):
        pairs = {"a": ("k_proj",), "b": ("v_proj", "up_proj"), "c": ("down_proj",)}
        model.adapters = Adapters(
            model, {name: random_pairs(model, targets) for name, targets in pairs.items()}
        )
        return model

    exact = adapted(tiny_llama())
    model = adapted(native(tiny_llama().float()))
    for name in ("", "a", "b", "c"):
        expected = logits_of(exact, name)
        assert (logits_of(model, name) - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.inference_mode()
def test_still_other_adapters_take_the_place_of_earlier_ones(tiny_llama, compiled):
    """A layer that the new ones leave alone keeps nothing of the old ones."""
    exact = tiny_llama()
    model = native(tiny_llama().float())
    for targets, names in ((("q_proj", "v_proj"), "a"), (("k_proj",), "cde"), (("o_proj",), "")):
        for each in (exact, model):
            with_adapters(each, targets, names)
        for name in ("", *names):
            expected = logits_of(exact, name)
            assert (logits_of(model, name) - expected).abs().max() < 1e-4 * expected.abs().max()
    model.adapters = None
    assert torch.equal(logits_of(model, ""), logits_of(native(tiny_llama().float()), ""))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", ["native", "to_int8", "both"])
def test_adapters_stay_where_layers_are_replaced(request, compiled, family, change):
    """With a cache or without, in one order or the other."""
    changes = {"native": native, "to_int8": to_int8, "both": lambda model: native(to_int8(model))}
    build = request.getfixturevalue(family)
    targets = targets_of(family)
    models = [
        changes[change](with_adapters(build(dtype=torch.float32), targets)),
        with_adapters(changes[change](build(dtype=torch.float32)), targets),
    ]
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19)]
    for use_cache in (True, False):
        texts = []
        for name in NAMES:
            options = {"adapter": name, "use_cache": use_cache}
            params = {"max_new_tokens": 9, "ignore_eos": True, "options": options}
            found, expected = [run_rows(model, prompts, **params) for model in models]
            assert found == expected and found not in texts
            texts.append(found)


def test_adapters_of_a_model_of_16_bits_become_those_of_a_native_one(tiny_llama, compiled):
    model = native(with_adapters(tiny_llama(dtype=torch.float16)))
    for own in model.adapters.layers.values():
        assert {each.dtype for pair in own.values() for each in pair} == {torch.float32}
    texts = [
        run_rows(
            model, [[1, 2, 3]], max_new_tokens=9, options={"adapter": "a", "use_cache": cached}
        )
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]


@torch.inference_mode()
def test_still_a_model_computes_before_it_has_adapters(tiny_llama, compiled):
    model = native(tiny_llama(dtype=torch.float32))
    before = logits_of(model, "")
    with_adapters(model)
    assert torch.equal(logits_of(model, ""), before)
