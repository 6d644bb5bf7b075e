"""Lesson 52: passes of any number of tokens in C, with the bits of passes of one."""

import pytest
import torch
from conftest import CHECKPOINTS, own_texts, random_tokens, run_rows
from test_native_step import both, in_pieces, native

from cache import KVCache
from loading.load import load_model

pytestmark = pytest.mark.usefixtures("compiled")


def test_a_prompt_and_many_rows_are_native(cli, torch_passes):
    """No pass with a cache is left for torch."""
    args = ("--prompt", "Once upon a time, there was a little girl named Lily. " * 5)
    args += ("--num-samples", 3, "--max-new-tokens", 12)
    expected = cli(*args, "--backend", "torch")[:2]
    torch_passes.clear()
    assert cli(*args)[:2] == expected and expected[0] == 0
    assert torch_passes == []


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["stories-draft", "stories-llama"])
def test_logits_have_the_same_bits_whole_and_in_pieces(name, dtype):
    model = native(load_model(CHECKPOINTS / name, dtype))
    texts = torch.tensor([random_tokens(100, 4096, seed=row) for row in range(3)])
    whole = in_pieces(model, texts, 100)
    for size in (7, 32, 64):
        assert torch.equal(in_pieces(model, texts, size), whole)
    alone = torch.cat([in_pieces(model, text[None], 100) for text in texts])
    assert torch.equal(alone, whole)


@torch.inference_mode()
@pytest.mark.parametrize("rows, length", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 16), (5, 7)])
def test_still_the_same_bits_at_any_number_of_threads(build, rows, length):
    """Fewer tokens than threads each thread prepares for itself, more are shared out."""
    model = native(build(dtype=torch.float32, n_embd=64, block_size=32))
    texts = torch.tensor([random_tokens(length, seed=row) for row in range(rows)])
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(in_pieces(model, texts, length))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, results[0]) for each in results)


@torch.inference_mode()
def test_still_ragged_prompts_in_one_pass(build):
    from infer import pass_logits

    eager, model = both(build, block_size=64)
    new = [random_tokens(length, seed=length) for length in (50, 3, 31, 64)]
    results = [
        pass_logits(each, new, [2, 0, 3, 1], KVCache(eager, 4), 3) for each in (eager, model)
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_still_float32_texts_do_not_depend_on_their_batch():
    """Sampled ones too, bit for bit: not only but for rounding."""
    from infer import generate
    from sampling import SamplingParams

    model = native(load_model(CHECKPOINTS / "stories-draft"))
    prompts = [random_tokens(length, 4096, seed=length) for length in (1, 40, 7, 90)]
    options = {"max_new_tokens": 120, "temperature": 1.0, "ignore_eos": True}
    each = [SamplingParams(seed=seed, **options) for seed in range(4)]

    together = [list(column) for column in zip(*generate(model, prompts, each))]
    assert together == own_texts(model, prompts, each)


def test_still_hops_and_long_prompts(tiny):
    """A prompt longer than the window, and each hop computes half a window at once."""
    eager, model = both(tiny, block_size=48)
    prompts = [random_tokens(100), random_tokens(30, seed=1)]
    expected = run_rows(eager, prompts, max_new_tokens=80, ignore_eos=True)
    assert run_rows(model, prompts, max_new_tokens=80, ignore_eos=True) == expected
