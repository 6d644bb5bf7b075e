"""Lesson 25: a whole pass in C gives the logits of the eager one, and all that is built on them the same texts."""

import concurrent.futures
import copy

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths, random_tokens, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCache
from checkpoint import UserError
from model import GPT

pytestmark = pytest.mark.usefixtures("compiled")
AVX2 = torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))
TARGETS = [None, (), *([("-mavx2", "-mfma")] if AVX2 else [])]  # None: this processor
FORMS = [
    {},
    {"n_head": 1, "n_embd": 20},
    {"n_head": 3, "n_embd": 51},
    {"n_layer": 1, "n_head": 2, "n_embd": 64},
    {"layer_norm_epsilon": 0.1},
]


def native(model: GPT, target=None) -> GPT:
    from native import use_native
    from native.step import NativePass

    use_native(model)
    model.native = NativePass(model, target)
    return model


def both(tiny, **shape) -> tuple[GPT, GPT]:
    """The same random model in float32, in torch and in C."""
    return tiny(dtype=torch.float32, **shape), native(tiny(dtype=torch.float32, **shape))


def in_pieces(model: GPT, texts: torch.Tensor, size: int) -> torch.Tensor:
    """The logits at all positions of equally long texts, from passes of so many tokens of each."""
    from infer import pass_logits

    cache, rows = KVCache(model, *texts.shape), list(range(len(texts)))
    parts = [pass_logits(model, part.tolist(), rows, cache, part.shape[1]) for part in texts.split(size, dim=1)]
    assert cache.tokens == texts.tolist()
    return torch.cat(parts, dim=1)


def test_the_command_line_takes_the_backend(cli):
    args = ("--prompt", "Once upon a time", "--prompt", "Lily", "--max-new-tokens", 30)
    code, out, _ = cli(*args, "--backend", "native")
    assert (code, out) == cli(*args)[:2] and code == 0


@torch.inference_mode()
@pytest.mark.parametrize("name", ["stories", "stories-draft"])
def test_logits_of_the_checkpoints(name):
    """Nearer to those of float64 than the eager pass is, so the two differ by more than either is wrong."""
    model, exact = GPT.from_pretrained(CHECKPOINTS / name), GPT.from_pretrained(CHECKPOINTS / name, torch.float64)
    texts = torch.tensor([random_tokens(256, 4096, seed=row) for row in range(2)])
    eager, expected = model(texts), exact(texts)
    logits = in_pieces(native(model), texts, 8)
    assert (logits - expected).abs().max() <= 1e-5 and (logits - eager).abs().max() <= 2e-5


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_of_any_form_in_any_pieces(tiny, target, form):
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(2)])
    model = tiny(dtype=torch.float32, **form)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 2, 3, 5, 7, 8):
        torch.testing.assert_close(in_pieces(model, texts, size), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_activations_far_from_zero(tiny, target):
    """The exponentials of GELU and of the softmax leave the range of float32 there."""
    model, texts = tiny(dtype=torch.float32), torch.tensor([random_tokens(16)])
    model.h[0].mlp.c_fc.bias.copy_(torch.linspace(-40, 40, 64))
    model.h[1].attn.c_attn.weight[:32].mul_(200)
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model, target), texts, 4), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_int8_logits_stay_close(tiny, target):
    """Norms, softmax and gelu round differently, and then a value of an activation may fall on another step."""
    model = GPT.from_pretrained(CHECKPOINTS / "stories-draft", torch.int8)
    texts = torch.tensor([random_tokens(100, 4096)])
    expected = model(texts)
    error = (in_pieces(native(model, target), texts, 10) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_same_bits_at_any_number_of_threads_and_rows(dtype):
    model = native(GPT.from_pretrained(CHECKPOINTS / "stories-draft", dtype))
    texts, before = torch.tensor([random_tokens(12, 4096, seed=row) for row in range(3)]), torch.get_num_threads()
    expected = in_pieces(model, texts, 4)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(in_pieces(model, texts, 4), expected)
    finally:
        torch.set_num_threads(before)
    for row in range(3):
        assert torch.equal(in_pieces(model, texts[row : row + 1], 1)[0], expected[row]) or dtype == torch.float32


def check_rows_of_any_past(build, data, tolerance: float) -> None:
    """Rows of these pasts get the logits of their own texts from C, and nothing else in the cache changes."""
    from infer import pass_logits

    eager, model = both(build)
    pasts = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=4))
    keep = data.draw(st.integers(1, 3))
    rows = data.draw(st.permutations(range(len(pasts))))[: data.draw(st.integers(1, len(pasts)))]
    lengths = [data.draw(st.integers(keep, 4)) for _ in rows]
    texts = [random_tokens(16, seed=row) for row in range(len(pasts))]
    caches = [KVCache(eager, len(pasts)) for _ in range(2)]
    for row, past in enumerate(pasts):
        if past:
            for cache in caches:
                pass_logits(eager, [texts[row][:past]], [row], cache, 1)
    new = [texts[row][pasts[row] : pasts[row] + length] for row, length in zip(rows, lengths)]
    expected, logits = (pass_logits(each, new, rows, cache, keep) for each, cache in zip((eager, model), caches))
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert caches[0].tokens == caches[1].tokens
    torch.testing.assert_close(caches[0].storage, caches[1].storage, rtol=1e-5, atol=1e-5)


@given(st.data())
@settings(max_examples=30)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(tiny, data):
    """Each row's logits are those of its own text, whatever is beside it, and nothing else in the cache changes."""
    check_rows_of_any_past(tiny, data, tolerance=1e-5)


def test_greedy_text_for_a_thousand_tokens():
    model = GPT.from_pretrained(CHECKPOINTS / "stories-draft")
    expected = run_rows(model, [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True)
    assert run_rows(native(model), [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True) == expected


MODES = {
    "hops": {"max_new_tokens": 50},
    "every step a hop": {"max_new_tokens": 30, "options": {"stride": 1}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "max_new_tokens": 30},
    "sampled": {"temperature": 1.0, "max_new_tokens": 30},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "max_new_tokens": 30},
}


@pytest.mark.parametrize("mode", MODES)
def test_texts_of_ragged_rows(tiny, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]

    def texts(model):
        generator = torch.Generator().manual_seed(0)
        return run_rows(model, prompts, generator=generator, ignore_eos=mode != "sampled", **MODES[mode])

    eager, compiled = both(tiny)
    assert texts(compiled) == texts(eager)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 15, 16])  # 16 drafts and one token are too many for one native pass
def test_speculation(tiny, gamma, temperature):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=temperature, presence_penalty=0.3)
    drafts = both(tiny, n_layer=1)

    def passes(target, draft):
        return list(generate_speculative(target, draft, [3], params, gamma, torch.Generator().manual_seed(0)))

    assert passes(*(pair[1] for pair in (both(tiny), drafts))) == passes(tiny(dtype=torch.float32), drafts[0])


def test_beams(tiny):
    from infer import beam_search

    eager, compiled = both(tiny)
    (texts, scores), (same_texts, same_scores) = (
        zip(*beam_search(model, random_tokens(6), 3, max_new_tokens=24)) for model in (eager, compiled)
    )
    assert same_texts == texts and same_scores == pytest.approx(scores, abs=1e-5)


def test_speculation_on_the_command_line(run_main):
    from infer_speculative import main

    args = ("--prompt", "One day", "--max-new-tokens", 20)
    code, out, err = run_main(main, *args, "--backend", "native")
    assert (code, out) == run_main(main, *args)[:2] and code == 0 and "note" not in err


def test_it_is_compiled_for_its_target(tiny):
    from native import build

    for target in TARGETS:
        assert native(tiny(dtype=torch.float32), target).native.library is build.load(target)
    assert build.load(None) is not build.load(())


def test_which_passes_are_native(tiny):
    model, widths = passed_widths(native(tiny(dtype=torch.float32, block_size=32)))
    calls, logits = [], model.native.logits
    model.native.logits = lambda new, *args: calls.append(sum(map(len, new))) or logits(new, *args)
    run_rows(model, [random_tokens(16)] * 2, max_new_tokens=3, ignore_eos=True)
    assert calls == [2, 2] and widths == [16]
    run_rows(model, [random_tokens(16)], max_new_tokens=3, ignore_eos=True)
    assert calls[2:] == [16, 1, 1] and widths == [16]
    run_rows(model, [random_tokens(3)], options={"use_cache": False}, max_new_tokens=3, ignore_eos=True)
    assert len(calls) == 5 and widths == [16, 3, 4, 5]


def test_weights_may_change_in_place(tiny):
    eager, model = both(tiny)
    prompt = [random_tokens(4)]
    before = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    for each in (eager, model):
        with torch.no_grad():
            each.wpe.weight.mul_(-1)
    after = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    assert after == run_rows(eager, prompt, max_new_tokens=20, ignore_eos=True) != before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["wte.weight", "h.0.mlp.c_fc.weight", "h.1.attn.c_attn.bias", "ln_f.bias"])
def test_logits_that_are_not_finite_are_noticed(tiny, where, bad):
    model = native(tiny(dtype=torch.float32))
    with torch.no_grad():
        dict(model.named_parameters())[where].view(-1)[7] = bad
    with pytest.raises(UserError, match="logits that are NaN or infinite"):
        run_rows(model, [[0, 1, 2]], max_new_tokens=2)


@pytest.mark.parametrize(
    "new, message",
    [
        ([[61]], "tokens are .61.; it takes 16 at most, from 0 to 60"),
        ([[-1]], "16 at most, from 0 to 60"),
        ([[1] * 17], "16 at most"),
        ([[1] * 9], "9 positions do not fit into a cache of 8"),
        ([[]], "with at least one token"),
    ],
)
def test_nothing_outside_its_arrays_is_touched(tiny, new, message):
    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 1, 40 if len(new[0]) > 10 else 8)
    with pytest.raises(ValueError, match=message):
        model.native.logits(new, [0], cache, 1)
    assert cache.tokens == [[]] and not cache.storage.any()


@pytest.mark.parametrize(
    "new, rows, keep", [([[1]], [0], 2), ([[1, 2]], [0], 0), ([[1]], [-1], 1), ([[1, 2], [3]], [0, 1], 2)]
)
def test_rows_and_positions_to_keep_are_checked(tiny, new, rows, keep):
    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 2)
    with pytest.raises(ValueError, match=r"rows \[.* to keep"):
        model.native.logits(new, rows, cache, keep)
    assert cache.tokens == [[], []] and not cache.storage.any()


@pytest.mark.parametrize("shape", [{"n_layer": 1}, {"n_head": 4}, {"n_embd": 32}])
def test_the_cache_of_another_model_is_refused(tiny, shape):
    model = native(tiny(dtype=torch.float32))
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        model.native.logits([[1]], [0], KVCache(tiny(dtype=torch.float32, **shape), 1), 1)


def test_two_threads_may_use_one_model(tiny):
    model = native(tiny(dtype=torch.float32, n_embd=64, n_layer=4))
    prompts = [random_tokens(6, seed=seed) for seed in range(4)]
    expected = [run_rows(model, [prompt], max_new_tokens=200, ignore_eos=True) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run_rows, model, [prompt], max_new_tokens=200, ignore_eos=True) for prompt in prompts]
        assert [run.result() for run in runs] == expected


def test_positions_end_with_the_window(tiny):
    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 1, 20)
    model.native.logits([[1] * 16], [0], cache, 1)
    with pytest.raises(ValueError, match="position 16 is outside the window of 16"):
        model.native.logits([[1]], [0], cache, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_weights_are_refused(tiny, dtype):
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(tiny(dtype=dtype))
