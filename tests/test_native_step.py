"""Lesson 28: a whole pass in C gives the logits of the eager one, and texts stay the same."""

import concurrent.futures
import copy

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths, random_tokens, run_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_int8 import TARGETS

from cache import KVCache
from errors import UserError
from loading.load import load_model
from model import GPT, TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")
FORMS = [
    {},
    {"n_head": 1, "n_embd": 20},
    {"n_head": 3, "n_embd": 51},
    {"n_layer": 1, "n_head": 2, "n_embd": 64},
    {"layer_norm_epsilon": 0.1},
]


def native(model: GPT, target=None) -> GPT:
    from native.step import NativeRunner

    model.runner = NativeRunner(model, target)
    return model


def both(tiny, **shape) -> tuple[GPT, GPT]:
    """The same random model in float32, in torch and in C."""
    return tiny(dtype=torch.float32, **shape), native(tiny(dtype=torch.float32, **shape))


def in_pieces(model: GPT, texts: torch.Tensor, size: int) -> torch.Tensor:
    """The logits at all positions of equally long texts, from passes of so many tokens of each."""
    from infer import pass_logits

    cache = KVCache(model, *texts.shape)
    rows = list(range(len(texts)))
    parts = [
        pass_logits(model, part.tolist(), rows, cache, part.shape[1])
        for part in texts.split(size, dim=1)
    ]
    assert cache.tokens == texts.tolist()
    return torch.cat(parts, dim=1)


@pytest.fixture
def passes(monkeypatch):
    """A list to which each native pass adds its new tokens."""
    from native import NativeRunner

    seen = []
    compute = NativeRunner.compute

    def counted(self, storage, spans, keep):
        seen.append([span.tokens for span in spans])
        return compute(self, storage, spans, keep)

    monkeypatch.setattr(NativeRunner, "compute", counted)
    return seen


@pytest.mark.parametrize("backend", [(), ("--backend", "auto"), ("--backend", "native")], ids=str)
def test_the_command_line_takes_the_backend(cli, passes, backend):
    args = ("--prompt", "Once upon a time", "--prompt", "Lily", "--max-new-tokens", 30)
    code, out, err = cli(*args, *backend)
    assert passes
    assert (code, out) == cli(*args, "--backend", "torch")[:2] and code == 0 and "note" not in err


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_passes_of_a_command_line_are_native(cli, passes, dtype):
    args = ("--max-new-tokens", 5, "--ignore-eos", "--dtype", dtype)
    assert cli(*args, "--backend", "torch")[0] == 0 and not passes
    assert cli(*args)[0] == 0 and len(passes) == 5


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_another_architecture_is_computed_by_torch(cli, tiny, monkeypatch, backend):
    import command_line

    other = tiny(dtype=torch.float32, vocab_size=4096)
    other.__class__ = type("Mamba", (GPT,), {})
    monkeypatch.setattr(command_line, "load_model", lambda *_: other)
    code, _, err = cli("--max-new-tokens", 3, "--backend", backend)
    assert code == 0 and type(other.runner) is TorchRunner
    assert err.count("note: --backend native: native code computes GPT") == (backend == "native")
    assert err.count("this is Mamba; torch computes instead\n") == (backend == "native")


@pytest.mark.parametrize("unknown", [0, 1])
def test_each_model_of_a_command_line_is_native_by_itself(run_main, tiny, monkeypatch, unknown):
    import command_line
    from infer_speculative import main

    models = [tiny(dtype=torch.float32, vocab_size=4096) for _ in range(2)]
    models[unknown].__class__ = type("Mamba", (GPT,), {})
    left = list(models)
    monkeypatch.setattr(command_line, "load_model", lambda *_: left.pop(0))
    monkeypatch.setattr(command_line, "kernel", lambda: "plain C")
    code, _, err = run_main(main, "--max-new-tokens", 3, "--backend", "native")
    assert code == 0 and type(models[unknown].runner) is TorchRunner
    assert type(models[1 - unknown].runner) is not TorchRunner
    assert err.count("this is Mamba; torch computes instead\n") == 1
    assert err.count("without what makes it fast: plain C\n") == 1


@torch.inference_mode()
@pytest.mark.parametrize("name", ["stories", "stories-draft"])
def test_logits_of_the_checkpoints(name):
    """Nearer to float64's than the eager ones, so the two differ by more than one is wrong."""
    model = load_model(CHECKPOINTS / name)
    texts = torch.tensor([random_tokens(256, 4096, seed=row) for row in range(2)])
    eager = model(texts)
    expected = load_model(CHECKPOINTS / name, torch.float64)(texts)
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
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(16)])
    model.h[0].mlp.c_fc.bias.copy_(torch.linspace(-40, 40, 64))
    model.h[1].attn.c_attn.weight[:32].mul_(200)
    expected = copy.deepcopy(model).double()(texts).float()
    logits = in_pieces(native(model, target), texts, 4)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_int8_logits_stay_close():
    """Norms, softmax and GELU round differently, and then an activation may become another int8."""
    model = load_model(CHECKPOINTS / "stories-draft", torch.int8)
    texts = torch.tensor([random_tokens(100, 4096)])
    expected = model(texts)
    error = (in_pieces(native(model), texts, 10) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"n_head": 3, "n_embd": 51}], ids=str)
def test_int8_logits_have_the_same_bits_on_every_processor(tiny, shape):
    """In pieces of any size, too."""
    from int8 import to_int8

    model = to_int8(tiny(dtype=torch.float32, **shape))
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(2)])
    expected = in_pieces(native(copy.deepcopy(model)), texts, 8)
    for target in TARGETS:
        compiled = native(copy.deepcopy(model), target)
        for size in (1, 3, 8):
            assert torch.equal(in_pieces(compiled, texts, size), expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_same_bits_at_any_number_of_threads(dtype):
    model = native(load_model(CHECKPOINTS / "stories-draft", dtype))
    texts = torch.tensor([random_tokens(12, 4096, seed=row) for row in range(3)])
    before = torch.get_num_threads()
    expected = in_pieces(model, texts, 4)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(in_pieces(model, texts, 4), expected)
    finally:
        torch.set_num_threads(before)


def check_rows_of_any_past(build, data, tolerance: float) -> None:
    """Rows of any past get the logits of their own texts; nothing else in the cache changes."""
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
    expected, logits = (
        pass_logits(each, new, rows, cache, keep) for each, cache in zip((eager, model), caches)
    )
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert caches[0].tokens == caches[1].tokens
    torch.testing.assert_close(caches[0].storage, caches[1].storage, rtol=1e-5, atol=1e-5)


@given(st.data())
@settings(max_examples=30)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(tiny, data):
    """Each row's logits are those of its own text, whatever is beside it."""
    check_rows_of_any_past(tiny, data, tolerance=1e-5)


def test_greedy_text_for_a_thousand_tokens():
    model = load_model(CHECKPOINTS / "stories-draft")
    expected = run_rows(model, [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True)
    assert run_rows(native(model), [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True) == expected


MODES = {
    "hops": {"max_new_tokens": 50},
    "every step a hop": {"max_new_tokens": 30, "options": {"stride": 1}},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "max_new_tokens": 30,
    },
    "sampled": {"temperature": 1.0, "max_new_tokens": 30},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "max_new_tokens": 30},
}


@pytest.mark.parametrize("mode", MODES)
def test_texts_of_ragged_rows(tiny, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]

    def texts(model):
        generator = torch.Generator().manual_seed(0)
        return run_rows(
            model, prompts, generator=generator, ignore_eos=mode != "sampled", **MODES[mode]
        )

    eager, compiled = both(tiny)
    assert texts(compiled) == texts(eager)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 16])
def test_speculation(tiny, gamma, temperature):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=40, ignore_eos=True, temperature=temperature, presence_penalty=0.3
    )

    def passes(models):
        generator = torch.Generator().manual_seed(0)
        return list(generate_speculative(*models, [3], params, gamma, generator))

    eager, compiled = zip(both(tiny), both(tiny, n_layer=1))
    assert passes(compiled) == passes(eager)


def test_beams(tiny):
    from infer import beam_search

    eager, compiled = both(tiny)
    texts, scores = zip(*beam_search(eager, random_tokens(6), 3, max_new_tokens=24))
    same_texts, same_scores = zip(*beam_search(compiled, random_tokens(6), 3, max_new_tokens=24))
    assert same_texts == texts and same_scores == pytest.approx(scores, abs=1e-5)


def test_speculation_on_the_command_line(run_main):
    from infer_speculative import main

    args = ("--prompt", "One day", "--max-new-tokens", 20)
    code, out, err = run_main(main, *args, "--backend", "native")
    assert (code, out) == run_main(main, *args, "--backend", "torch")[:2] and code == 0
    assert "note" not in err


def test_it_is_compiled_for_its_target(tiny):
    from native import build

    for target in TARGETS:
        assert native(tiny(dtype=torch.float32), target).runner.library is build.load(target)
    assert build.load(None) is not build.load(())


def test_which_passes_are_native(tiny, passes):
    """All that have a cache, of any number of tokens."""
    model, widths = passed_widths(native(tiny(dtype=torch.float32, block_size=32)))
    run_rows(model, [random_tokens(16)] * 2, max_new_tokens=3, ignore_eos=True)
    assert [sum(map(len, new)) for new in passes] == [32, 2, 2] and not widths
    without = {"use_cache": False}
    run_rows(model, [random_tokens(3)], options=without, max_new_tokens=3, ignore_eos=True)
    assert len(passes) == 3 and widths == [3, 4, 5]


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
@pytest.mark.parametrize(
    "where", ["wte.weight", "h.0.mlp.c_fc.weight", "h.1.attn.c_attn.bias", "ln_f.bias"]
)
def test_logits_that_are_not_finite_are_noticed(tiny, where, bad):
    model = tiny(dtype=torch.float32)
    with torch.no_grad():
        dict(model.named_parameters())[where].view(-1)[7] = bad
    with pytest.raises(UserError, match="logits that are NaN or infinite"):
        run_rows(native(model), [[0, 1, 2]], max_new_tokens=2)


def spans(*parts) -> list:
    from cache import Span

    return [Span(*part) for part in parts]


@pytest.mark.parametrize(
    "parts, keep, message",
    [
        ([([0], 0, [61])], [1], r"tokens are \[61\]; they are from 0 to 60"),
        ([([0], 0, [-1])], [1], r"tokens are \[-1\]; they are from 0 to 60"),
        ([([2], 0, [1])], [1], r"pages are \[2\]; they are from 0 to 1"),
        ([([-1], 0, [1])], [1], "pages are .-1.; they are from 0 to 1"),
        ([([0], 5, [1] * 4)], [1], "4 tokens from 5 on, 1 to keep, in 1 pages of 8"),
        ([([0], -1, [1])], [1], "1 tokens from -1 on"),
        ([([0], 0, [1])], [2], "1 tokens from 0 on, 2 to keep"),
        ([([0], 0, [1])], [-1], "1 tokens from 0 on, -1 to keep"),
        ([([0, 1, 1], 16, [1])], [1], r"positions are \[16\]; they are from 0 to 15"),
        ([([0], 0, [1])], [1, 1], "zip"),
    ],
)
def test_nothing_outside_its_arrays_is_touched(tiny, parts, keep, message):
    model = native(tiny(dtype=torch.float32))
    storage = torch.zeros(2, 2, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=message):
        model.runner.compute(storage, spans(*parts), keep)
    assert not storage.any()


def test_a_span_may_want_no_logits(tiny):
    """Its keys and values are kept all the same."""
    model = native(tiny(dtype=torch.float32))
    storage, alone = torch.zeros(2, 2, 2, 2, 2, 8, 8)
    logits = model.runner.compute(storage, spans(([0], 0, [1, 2]), ([1], 0, [3])), [0, 1])
    assert torch.equal(logits, model.runner.compute(alone, spans(([1], 0, [3])), [1]))
    model.runner.compute(alone, spans(([0], 0, [1, 2])), [2])
    assert storage[:, :, 0].any() and torch.equal(storage, alone)


@pytest.mark.parametrize(
    "new, rows, message",
    [
        ([[1] * 9], [0], "9 positions do not fit into a cache of 8"),
        ([[]], [0], "with at least one token"),
    ],
)
def test_a_cache_that_is_full_is_not_touched(tiny, new, rows, message):
    from infer import pass_logits

    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 1, 8)
    with pytest.raises(ValueError, match=message):
        pass_logits(model, new, rows, cache, 1)
    assert cache.tokens == [[]] and not cache.storage.any()


def test_rows_that_only_the_list_of_tokens_has_are_refused(tiny):
    from infer import pass_logits

    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 1)
    cache.tokens = [[], [], []]
    with pytest.raises(ValueError, match=r"pages are \[2\]; they are from 0 to 0"):
        pass_logits(model, [[1]], [2], cache, 1)
    assert not cache.storage.any()


@pytest.mark.parametrize("shape", [{"n_layer": 1}, {"n_head": 4}, {"n_embd": 32}])
def test_the_cache_of_another_model_is_refused(tiny, shape):
    model = native(tiny(dtype=torch.float32))
    other = KVCache(tiny(dtype=torch.float32, **shape), 1)
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        model.runner.compute(other.storage, spans(([0], 0, [1])), [1])


def test_a_model_that_lacks_a_layer_has_no_cache(tiny):
    model = tiny(dtype=torch.float32)
    cache = KVCache(model, 1)
    del model.h[1]
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(model).runner.compute(cache.storage, spans(([0], 0, [1])), [1])


def test_layers_become_native_once(tiny):
    model = native(tiny(dtype=torch.float32))
    with pytest.raises(ValueError, match="the layers of this model are native already"):
        native(model)


def test_two_threads_may_use_one_model(tiny):
    model = native(tiny(dtype=torch.float32, n_embd=64, n_layer=4))
    prompts = [random_tokens(6, seed=seed) for seed in range(4)]
    expected = [
        run_rows(model, [prompt], max_new_tokens=200, ignore_eos=True) for prompt in prompts
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(run_rows, model, [prompt], max_new_tokens=200, ignore_eos=True)
            for prompt in prompts
        ]
        assert [run.result() for run in runs] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_weights_are_refused(tiny, dtype):
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(tiny(dtype=dtype))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_same_bits_in_pieces_of_any_size(tiny, dtype):
    """What a token gives does not depend on those beside it: not only int8, float32 too."""
    from int8 import to_int8

    model = tiny(dtype=torch.float32, n_head=3, n_embd=51)
    model = native(to_int8(model) if dtype == torch.int8 else model)
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(3)])
    expected = in_pieces(model, texts, 16)
    for size in (1, 2, 3, 5, 7, 8):
        assert torch.equal(in_pieces(model, texts, size), expected)
    alone = torch.cat([in_pieces(model, text[None], 16) for text in texts])
    assert torch.equal(alone, expected)
