"""The KV cache of a static batch, and the context window: by hand, and what a pass computes."""

import importlib
import math

import pytest
import torch
from conftest import is_one_line, passed_widths, random_tokens, run, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from cache import KVCache


def write(model, prompts, max_new_tokens, **options):
    return run_rows(model, prompts, max_new_tokens=max_new_tokens, ignore_eos=True, options=options)


@torch.inference_mode()
def by_hand(model, prompt, max_new_tokens, stride):
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        start = math.ceil(max(0, len(tokens) - model.config.block_size) / stride) * stride
        tokens.append(model(torch.tensor([tokens[start:]]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    stride=st.integers(1, 16),
    use_cache=st.booleans(),
)
@settings(max_examples=12)
def test_each_row_equals_recomputing_its_window(build, lengths, stride, use_cache):
    model = build(seed=6)
    prompts = [random_tokens(length, seed=row) for row, length in enumerate(lengths)]
    expected = [by_hand(model, prompt, 34, stride) for prompt in prompts]
    assert write(model, prompts, 34, stride=stride, use_cache=use_cache) == expected


@pytest.mark.parametrize("block_size, half", [(16, 8), (5, 2), (1, 1)])
def test_the_default_stride_is_half_a_window(tiny, block_size, half):
    model = tiny(block_size=block_size)
    assert write(model, [[1]], 48) == [by_hand(model, [1], 48, stride=half)]


@pytest.mark.parametrize("stride", [0, -1, 17, 8.0, True])
def test_a_stride_out_of_range_is_refused(tiny, stride):
    words = rf"^stride {stride}: must be an integer from 1 to block_size \(16\)$"
    with pytest.raises(ValueError, match=words):
        write(tiny(), [[1]], 1, stride=stride)


@pytest.mark.parametrize(
    "lengths, count, options, passes",
    [
        ([5], 10, {}, [(1, 5)] + [(1, 1)] * 9),
        ([5], 4, {"use_cache": False}, [(1, 5), (1, 6), (1, 7), (1, 8)]),
        # A context shift by 8: 9 positions, then one for each of 7.
        ([16], 1 + 2 * 8, {}, [(1, 16), *([(1, 9)] + [(1, 1)] * 7) * 2]),
        # The first row has 15, 16, 17 tokens, and 9 of them stay in its window.
        ([15, 5, 3], 4, {}, [(3, 15), (3, 1), (2, 1), (1, 9), (3, 1)]),
    ],
)
def test_a_pass_computes_new_positions_only(tiny, lengths, count, options, passes):
    model, seen = passed_widths(tiny(), shapes=True)
    write(model, [random_tokens(length) for length in lengths], count, **options)
    assert seen == passes


def run_pass(model, cache, new, rows) -> torch.Tensor:
    tokens, positions, _ = cache.prepare(cache.spans(new, rows))
    logits = model.head(model.hidden(tokens, positions, cache.attend))
    cache.commit()
    return logits


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 16)), min_size=1, max_size=6),
    st.integers(0, 99),
)
@settings(max_examples=20)
@torch.inference_mode()
def test_logits_equal_recomputation_however_a_sequence_is_cut_and_cut_back(tiny, cuts, seed):
    model = tiny()
    cache = KVCache(model)
    tokens = []
    for step, (kept, count) in enumerate(cuts):
        tokens = (tokens[: min(kept, 15)] + random_tokens(count, seed=seed + step))[:16]
        cache.truncate_to_prefix([tokens])
        known = len(cache.tokens[0])
        assert cache.tokens[0] == tokens[:known] and known < len(tokens)
        logits = run_pass(model, cache, [tokens[known:]], [0])
        full = model(torch.tensor([tokens]))
        torch.testing.assert_close(logits, full[:, known:], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_a_pass_mixes_rows_of_any_past_and_any_number_of_new_tokens(tiny):
    model = tiny()
    tokens = [random_tokens(16, seed=row) for row in range(4)]
    pasts = [12, 1, 7, 3]
    new = [1, 6, 9, 2]
    cache = KVCache(model, 4)
    for rows in ([0, 1, 2, 3], [2, 3, 1, 0], [2, 0], [1], [3, 2]):
        cache.tokens = [[], [], [], []]  # its storage is stale
        for row, past in enumerate(pasts):
            run_pass(model, cache, [tokens[row][:past]], [row])
        lists = [tokens[row][pasts[row] : pasts[row] + new[row]] for row in rows]
        logits = run_pass(model, cache, lists, rows)
        for row, part, ours in zip(rows, lists, logits):
            end = pasts[row] + len(part)
            full = model(torch.tensor([tokens[row][:end]]))[0, pasts[row] :]
            torch.testing.assert_close(ours[: len(part)], full, rtol=0, atol=1e-12)
            assert cache.tokens[row] == tokens[row][:end]


@pytest.fixture
def caches(monkeypatch):
    made = []

    def make(*args):
        made.append(KVCache(*args))
        return made[-1]

    monkeypatch.setattr(infer, "KVCache", make)
    return made


def test_decoding_allocates_no_keys(tiny, attended):
    run(tiny(), [[1, 2, 3]], max_new_tokens=10, ignore_eos=True)
    places = [(k.data_ptr(), v.data_ptr()) for _, k, v in attended]
    assert len(places) == 2 * 10 and len(set(places)) == 2  # one for each of the two layers


def test_the_cache_has_the_positions_that_a_run_computes(tiny, caches):
    run(tiny(dtype=torch.bfloat16), [[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_new_tokens=6)
    run(tiny(), [[1] * 20], max_new_tokens=6)
    # Layers x keys and values x rows x heads x (3 + 6 - 1 positions) x head_dim x 2 bytes.
    assert caches[0].storage.untyped_storage().nbytes() == 2 * 2 * 3 * 2 * 8 * 8 * 2
    assert caches[1].storage.shape == KVCache(tiny()).storage.shape == (2, 2, 1, 2, 16, 8)


@torch.inference_mode()
def test_what_does_not_fit_raises_and_changes_nothing(tiny):
    model = tiny()
    tokens = random_tokens(12)
    cache = KVCache(model, 2, max_len=12)
    for row, length in ((0, 9), (1, 4)):
        run_pass(model, cache, [tokens[:length]], [row])
    before = cache.storage.clone()
    for new, rows, message in (
        ([tokens[:4], [3]], [0, 1], "13 positions exceed max_len"),
        ([[4], [5]], [1, 1], r"rows \[1, 1\], new tokens .* each row must occur once"),
        ([[4], []], [0, 1], "at least one token"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.spans(new, rows)
    assert torch.equal(cache.storage, before) and cache.tokens == [tokens[:9], tokens[:4]]
    logits = run_pass(model, cache, [tokens[9:]], [0])
    full = model(torch.tensor([tokens]))[:, 9:]
    torch.testing.assert_close(logits, full, rtol=0, atol=1e-12)


def test_no_memory_is_read_before_it_is_written(tiny, monkeypatch):
    """Allocators hand out memory as others left it, NaN included; 0 times NaN is NaN."""
    model = tiny()

    def left_over(shape, **options):
        return torch.full(shape, torch.nan, **options)

    monkeypatch.setattr(torch, "empty", left_over)
    assert KVCache(model).storage.eq(0).all()


def test_what_does_not_fit_in_memory_says_its_bytes(tiny):
    with pytest.raises(ValueError) as raised:
        KVCache(tiny(), max_len=10**12)
    said = str(raised.value)
    assert "a cache of 512,000,000,000,000 bytes does not fit" in said
    factors = "batch size 1 x 2 layers x keys and values x 2 heads x 1000000000000 positions x"
    assert factors in said


def test_the_command_line_takes_a_stride_and_needs_no_cache(cli, tiny_checkpoint, caches):
    prompt = ("--model", tiny_checkpoint, "--prompt", "Tom " * 50)
    args = (*prompt, "--max-new-tokens", 60, "--ignore-eos", "--stride")
    code, out, err = cli(*args, 5)
    assert code == 0 and err.startswith("60 tokens, ") and len(caches) == 1
    assert out == cli(*args, 5, "--no-cache")[1] and len(caches) == 1
    assert out != cli(*args, 64)[1]
    assert is_one_line(cli(*args, 65), "block_size (64)")


NOTE = "the context window of 64 tokens; of 100 tokens the model sees the last"


@pytest.mark.parametrize(
    "script, options, seen",
    [
        ("infer", ("--stride", 10), 60),
        ("infer", ("--num-beams", 2), 36),
        ("infer_engine", (), 36),
        ("infer_speculative", ("--draft", "lookup"), 36),
    ],
)
def test_a_prompt_that_the_window_cuts_is_noted(run_main, tiny_checkpoint, script, options, seen):
    main = importlib.import_module(script).main
    model = "--target" if script == "infer_speculative" else "--model"
    args = (model, tiny_checkpoint, "--max-new-tokens", 2, *options)
    _, _, err = run_main(main, *args, "--prompt", " dog" * 100)
    assert err.startswith(f"note: the prompt exceeds {NOTE} {seen}\n") and err.count("note") == 1
    prompts = [word for count in (64, 65, 100) for word in ("--prompt", " dog" * count)]
    _, _, err = run_main(main, *args, *prompts)
    assert err.startswith(f"note: 2 of 3 prompts exceed {NOTE} {seen}\n")
    assert "note" not in run_main(main, *args, *prompts[:2])[2]
