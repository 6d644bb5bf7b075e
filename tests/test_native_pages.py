"""Lesson 53: the engine's passes in C, which read keys and values in their pages."""

import copy
import functools
import math
import random

import pytest
import test_engine
import torch
from conftest import CHECKPOINTS, finish_checked, make_engine, own_texts, random_tokens
from hypothesis.stateful import run_state_machine_as_test
from test_native_int8 import TARGETS
from test_native_step import in_pieces, native

from int8 import to_int8
from loading.load import load_model

pytestmark = pytest.mark.usefixtures("compiled")
ARGS = ("--prompt", "Once upon a time", "--prompt", "Lily", "--max-new-tokens", 20)


@pytest.mark.parametrize("backend", [(), ("--backend", "auto"), ("--backend", "native")], ids=str)
@pytest.mark.parametrize(
    "more", [(), ("--draft", CHECKPOINTS / "stories-draft")], ids=["", "draft"]
)
def test_the_passes_of_the_engine_are_native(engine_cli, torch_passes, backend, more):
    code, out, err = engine_cli(*ARGS, *more, *backend)
    assert code == 0 and "note" not in err
    assert torch_passes == []
    assert out == engine_cli(*ARGS, *more, "--backend", "torch")[1]
    assert torch_passes


def scattered(storage: torch.Tensor, pages: list[list[int]], tokens: torch.Tensor, model):
    """The logits of texts whose pages are these, in pieces of 5 tokens, all texts in each pass."""
    from cache import Span

    parts = []
    for start in range(0, tokens.shape[1], 5):
        new = tokens[:, start : start + 5].tolist()
        spans = [Span(own, start, part) for own, part in zip(pages, new)]
        counts = [len(part) for part in new]
        parts.append(model.runner.compute(storage, spans, counts).view(len(new), counts[0], -1))
    return torch.cat(parts, dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_pages_anywhere_give_the_bits_of_a_row(build, kind, page_size):
    model = build(dtype=torch.float32)
    model = native(to_int8(model) if kind == torch.int8 else model)
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(3)])
    count = -(-16 // page_size)
    numbers = random.Random(0).sample(range(4 * count), 3 * count)
    pages = [numbers[row * count : (row + 1) * count] for row in range(3)]
    config = model.config
    shape = config.n_layer, 2, 4 * count, config.n_kv_head, page_size, config.head_dim
    storage = torch.full(shape, math.nan)  # nobody reads what was not written
    logits = scattered(storage, pages, texts, model)
    assert torch.equal(logits, in_pieces(model, texts, 16))
    others = sorted(set(range(4 * count)) - set(numbers))
    assert storage[:, :, others].isnan().all()


def requests(count: int, seed: int) -> tuple[list, list]:
    """Prompts and parameters of every kind."""
    from sampling import SamplingParams

    choose = random.Random(seed).choice
    prompts = []
    params = []
    for number in range(count):
        prompts.append(random_tokens(choose([3, 60, 61, 100]), 4095, seed=choose([1, 2, 3])))
        own = SamplingParams(
            max_new_tokens=choose([20, 60]),
            temperature=choose([0.0, 0.8, 1.2]),
            top_p=choose([1.0, 0.9]),
            top_k=choose([0, 50]),
            presence_penalty=choose([0.0, 0.5]),
            repetition_penalty=choose([1.0, 1.2]),
            ignore_eos=True,
            seed=number,
        )
        params.append(own)
    return prompts, params


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["stories-draft", "stories-llama"])
@pytest.mark.parametrize("drafts", ["none", "lookup", "model"])
def test_still_texts_of_a_checkpoint_bit_for_bit(name, kind, drafts):
    """In float32 too, with preemption, shared prefixes, chunks and drafts: not but for rounding."""
    from engine.drafter import LookupDrafter, PagedDrafter

    model = native(load_model(CHECKPOINTS / name, kind))
    draft = native(load_model(CHECKPOINTS / "stories-draft", kind))
    prompts, params = requests(8, seed=len(drafts))
    options = {"max_rows": 4, "num_pages": 32, "page_size": 8, "budget": 40}
    if drafts != "none":
        options["drafter"] = (
            LookupDrafter() if drafts == "lookup" else PagedDrafter(draft, model, 4)
        )
    engine, made = make_engine(model, prompts, params, **options)
    finish_checked(engine, lambda: None)
    assert [request.output for request in made] == own_texts(model, prompts, params)
    assert engine.scheduler.preemptions
    assert drafts == "none" or engine.drafted


FORMS = [
    ("tiny", {"n_head": 1, "n_embd": 64}),  # what the compiler knows
    ("tiny", {"n_head": 1, "n_embd": 20}),
    ("tiny", {"n_head": 3, "n_embd": 252}),
    ("tiny_llama", {}),
    ("tiny_llama", {"n_head": 3, "n_kv_head": 1, "head_dim": 64}),
]


def in_passes(model, texts: list, passes: list[list[int]], page_size: int) -> torch.Tensor:
    """The logits at all positions of texts, from passes of so many tokens of each.

    Their pages lie in each other's midst, and are NaN before.
    """
    from cache import Span

    config = model.config
    rows, count = len(texts), -(-len(texts[0]) // page_size)
    shape = config.n_layer, 2, rows * count, config.n_kv_head, page_size, config.head_dim
    storage = torch.full(shape, math.nan)
    starts = [0] * rows
    parts = [[] for _ in texts]
    for lengths in passes:
        spans = [
            Span(list(range(row, rows * count, rows)), starts[row], text[starts[row] :][:length])
            for row, (text, length) in enumerate(zip(texts, lengths))
        ]
        for own, logits in zip(parts, model.runner.compute(storage, spans, lengths).split(lengths)):
            own.append(logits)
        starts = [start + length for start, length in zip(starts, lengths)]
    return torch.stack([torch.cat(own) for own in parts])


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind, form", FORMS, ids=str)
def test_tokens_together_have_the_bits_of_each_alone(request, target, kind, form):
    """Wherever they begin, in their text and in the pass."""
    build = request.getfixturevalue(kind)
    model = native(build(dtype=torch.float32, block_size=50, **form), target)
    texts = [random_tokens(50, seed=row) for row in range(3)]
    alone = in_passes(model, texts, [[1, 1, 1]] * 50, 16)
    for page_size in (1, 7, 16):
        for lengths in ([49, 1, 33], [17, 47, 34], [35, 16, 32]):
            passes = [lengths, [50 - length for length in lengths]]
            assert torch.equal(in_passes(model, texts, passes, page_size), alone)
        assert torch.equal(in_passes(model, texts, [[50, 50, 50]], page_size), alone)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)  # each has a text of its own
            two = in_passes(model, texts[:2], [[50, 50]], page_size)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(two, alone[:2])


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_token_does_not_see_those_behind_it(tiny, target):
    """Though they are computed together: what is NaN in these is not in its logits."""
    model = tiny(dtype=torch.float32, block_size=50, n_head=1)
    model.wpe.weight.data[42] = math.nan  # in the midst of 4, 8 or 16 tokens
    native(model, target)
    (logits,) = in_passes(model, [random_tokens(50)], [[50]], 7)
    assert logits[:42].isfinite().all() and logits[42:].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_still_a_broken_text_reaches_no_other(tiny, bad):
    """Its text ends with an error, and its pages go to others."""
    from sampling import SamplingParams

    model = tiny(dtype=torch.float32)
    model.wpe.weight.data[5] = bad
    native(model)
    prompts = [random_tokens(8 if row == 1 else 2, seed=row) for row in range(6)]
    params = [SamplingParams(max_new_tokens=3, ignore_eos=True)] * 6
    engine, made = make_engine(model, prompts, params, max_rows=2, num_pages=8, page_size=2)
    while engine.busy:
        engine.step()
    assert [request.finish_reason for request in made] == ["length", "error", *["length"] * 4]
    good = [row for row in range(6) if row != 1]
    expected = own_texts(model, [prompts[row] for row in good], params[1:])
    assert [made[row].output for row in good] == expected


@functools.cache
def native_model(architecture: str, *shape):
    """The same random model as the other histories have, in float32 and in C."""
    return native(copy.deepcopy(test_engine.model(architecture, *shape)).float())


@functools.cache
def int8_model(architecture: str, *shape):
    return native(to_int8(copy.deepcopy(test_engine.model(architecture, *shape)).float()))


class NativeHistories(test_engine.Histories):
    make = staticmethod(native_model)

    def logits(self, window):
        from cache import KVCache
        from infer import next_logits

        return next_logits(self.model, [window], KVCache(self.model, 1))[0, 0]


class Int8Histories(NativeHistories):
    make = staticmethod(int8_model)


@pytest.mark.parametrize("histories", [NativeHistories, Int8Histories])
def test_still_any_history(histories):
    """Those of the engine's state machine, with native models and texts of native runs."""
    run_state_machine_as_test(histories, settings=test_engine.TestHistories.settings)
