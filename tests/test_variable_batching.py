"""Lesson 16: prompts of different lengths in one batch: each row's text is that of its own run."""

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths, random_tokens, run, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCache


def alone(model, prompts, **arguments):
    return [run_rows(model, [prompt], **arguments)[0] for prompt in prompts]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=5),
    stride=st.integers(1, 16),
    eos=st.integers(0, 60),
    use_cache=st.booleans(),
)
@settings(max_examples=25)
def test_each_row_equals_its_own_run(tiny, lengths, stride, eos, use_cache):
    model = tiny(seed=12, eos_token_id=eos)
    prompts = [random_tokens(length, seed=row) for row, length in enumerate(lengths)]
    options = {"stride": stride, "use_cache": False}
    expected = alone(model, prompts, options=options, max_new_tokens=25)
    options = {"stride": stride, "use_cache": use_cache}
    assert run_rows(model, prompts, options=options, max_new_tokens=25) == expected


def test_a_hop_prefills_its_row_only(tiny):
    model, passes = passed_widths(tiny(), shapes=True)
    prompts = [random_tokens(length) for length in (15, 5, 3)]
    run(model, prompts, max_new_tokens=4, ignore_eos=True)
    # Lengths 15, 5, 3; 16, 6, 4; then the first row has 17 tokens, and 9 of them stay in its
    # window.
    assert passes == [(3, 15), (3, 1), (2, 1), (1, 9), (3, 1)]


def run_pass(model, cache, new, rows) -> torch.Tensor:
    """The logits at all positions of a pass, padded."""
    tokens, positions, _ = cache.prepare(cache.spans(new, rows))
    logits = model.head(model.hidden(tokens, positions, cache.attend))
    cache.commit()
    return logits


@torch.inference_mode()
def test_a_pass_mixes_rows_of_any_past_and_any_number_of_new_tokens(tiny):
    """Logits against full recomputation; the longest past and most new tokens are in two rows."""
    model = tiny()
    tokens = [random_tokens(16, seed=row) for row in range(4)]
    pasts = [12, 1, 7, 3]
    new = [1, 6, 9, 2]
    cache = KVCache(model, 4)
    for rows in ([0, 1, 2, 3], [2, 3, 1, 0], [2, 0], [1], [3, 2]):
        cache.tokens = [[], [], [], []]  # its storage is stale
        for row, past in enumerate(pasts):
            begun = tokens[row][:past]
            run_pass(model, cache, [begun], [row])
        lists = [tokens[row][pasts[row] : pasts[row] + new[row]] for row in rows]
        logits = run_pass(model, cache, lists, rows)
        for row, part, ours in zip(rows, lists, logits):
            end = pasts[row] + len(part)
            full = model(torch.tensor([tokens[row][:end]]))[0, pasts[row] :]
            torch.testing.assert_close(ours[: len(part)], full, rtol=0, atol=1e-12)
            assert cache.tokens[row] == tokens[row][:end]


def test_rows_that_do_not_fit_change_nothing(tiny):
    cache = KVCache(tiny(), 2, max_len=4)
    cache.tokens = [[1, 2], [3]]
    with pytest.raises(ValueError, match="5 positions exceed max_len"):
        cache.spans([[1, 2, 3], [3]], [0, 1])
    once = r"rows \[1, 1\], new tokens .* each row must occur once"
    with pytest.raises(ValueError, match=once):
        cache.spans([[4], [5]], [1, 1])
    with pytest.raises(ValueError, match="at least one token"):
        cache.spans([[4], []], [0, 1])
    assert cache.tokens == [[1, 2], [3]]


@torch.inference_mode()
def test_finished_rows_cost_nothing_but_their_last_position(tiny):
    prompt = random_tokens(16)
    ((eos,),) = alone(tiny(), [prompt], max_new_tokens=1)  # it would not fit into the window
    model, passes = passed_widths(tiny(eos_token_id=eos), shapes=True)
    rows = run_rows(model, [prompt, [1, 2]], max_new_tokens=4)
    assert rows[0] == [eos]
    assert len(rows[1]) == 4
    assert passes == [(2, 16), (2, 1), (2, 1), (2, 1)]


def test_penalties_count_the_row_only(tiny):
    model = tiny(seed=31)
    prompts = [[1], [2, 3, 4, 5, 5, 5], random_tokens(30)]
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    params |= {"max_new_tokens": 30}
    assert run_rows(model, prompts, **params) == alone(model, prompts, **params)


def test_the_command_line_prints_prompts_in_order(cli):
    args = ("--model", CHECKPOINTS / "stories-draft", "--max-new-tokens", 6, "--ignore-eos")
    prompts = ("Once", "One day, a big dog", "Tom and Lily")
    texts = [cli("--prompt", prompt, *args)[1].removesuffix("\n") for prompt in prompts]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    code, out, err = cli(*given, *args)
    assert (code, out) == (0, ("\n" + "-" * 40 + "\n").join(texts) + "\n")
    assert err.startswith("18 tokens")
