"""A whole pass in C gives the logits of the eager one, and texts stay the same."""

import copy
import random

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, run_rows, save_speaking
from engines import own_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import both, in_pieces, native, threads

from cache import KVCache
from int8 import to_int8
from loading.load import load_model
from model import GPT, Linear, TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
GPT_FORMS = [
    {},
    {"n_head": 1, "n_embd": 20},
    {"n_head": 3, "n_embd": 51},
    {"n_layer": 1, "n_head": 2, "n_embd": 64},
    {"layer_norm_epsilon": 0.1},
]


def any_llama(tiny_llama, seed: int):
    """A random shape, of sizes that are no multiples of a vector's; half of them have biases."""
    choose = random.Random(seed).choice
    kv_heads = choose([1, 1, 2, 3])
    shape = {
        "vocab_size": choose([11, 61, 300]),
        "n_layer": choose([1, 2, 3]),
        "n_head": kv_heads * choose([1, 2, 3]),
        "n_kv_head": kv_heads,
        "head_dim": choose([2, 6, 16, 20, 64]),
        "n_embd": choose([3, 16, 33, 51, 64, 130]),
        "n_inner": choose([1, 24, 57, 64, 130]),
        "norm_epsilon": choose([1e-6, 0.1]),
        "rope_theta": choose([10.0, 10000.0]),
        "tied_head": choose([False, True]),
    }
    model = tiny_llama(dtype=torch.float32, **shape)
    generator = torch.Generator().manual_seed(seed)
    if choose([False, True]):
        for block in model.layers:
            for name in choose([("q_proj",), ("v_proj",), ("q_proj", "k_proj", "v_proj")]):
                weight = getattr(block.self_attn, name).weight
                setattr(block.self_attn, name, Linear(weight.shape[1], len(weight)))
    model.init_weights(std=0.8 * shape["n_embd"] ** -0.5, generator=generator)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def random_texts(model, count: int, length: int = 16) -> torch.Tensor:
    rows = [random_tokens(length, model.config.vocab_size, seed=row) for row in range(count)]
    return torch.tensor(rows)


def of_kind(model, kind):
    """The model in C, in float32 or int8."""
    return native(to_int8(model) if kind == torch.int8 else model)


# The command line


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


@pytest.fixture(params=["tiny", "tiny_llama"])
def speaking(request, tmp_path):
    """A directory with a random model that speaks the embedded models' vocabulary."""
    return save_speaking(request.getfixturevalue(request.param), tmp_path, eos_token_id=4095)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", [(), ("--backend", "auto"), ("--backend", "native")], ids=str)
def test_the_command_line_takes_the_backend(cli, speaking, passes, backend, dtype):
    args = ("--model", speaking, "--prompt", "Once upon a time", "--prompt", "Lily")
    args += ("--max-new-tokens", 30, "--ignore-eos", "--dtype", dtype)
    code, out, err = cli(*args, *backend)
    assert code == 0 and "note" not in err and len(passes) >= 30
    passes.clear()
    code, expected, _ = cli(*args, "--backend", "torch")
    assert code == 0 and not passes and (out == expected or dtype == "int8")


def test_a_prompt_and_many_rows_are_native(cli, torch_passes):
    """No pass with a cache is left for torch."""
    args = ("--prompt", "Once upon a time, there was a little girl named Lily. " * 5)
    args += ("--num-samples", 3, "--max-new-tokens", 12)
    expected = cli(*args, "--backend", "torch")[:2]
    torch_passes.clear()
    assert cli(*args)[:2] == expected and expected[0] == 0
    assert torch_passes == []


@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_another_architecture_is_computed_by_torch(run_main, tiny, monkeypatch, unknown, backend):
    """Each model of a command line by itself."""
    import command_line
    from infer_speculative import main

    models = [tiny(dtype=torch.float32, vocab_size=4096) for _ in range(2)]
    models[unknown].__class__ = type("Mamba", (GPT,), {})
    left = list(models)
    monkeypatch.setattr(command_line, "load_model", lambda *_: left.pop(0))
    monkeypatch.setattr(command_line, "kernel", lambda: "plain C")
    code, _, err = run_main(main, "--max-new-tokens", 3, "--backend", backend)
    assert code == 0 and type(models[unknown].runner) is TorchRunner
    assert type(models[1 - unknown].runner) is not TorchRunner
    said = backend == "native"
    assert err.count("note: --backend native: native code computes GPT") == said
    assert err.count("this is Mamba; torch computes instead\n") == said
    assert err.count("without what makes it fast: plain C\n") == said


def test_speculation_on_the_command_line(run_main):
    from infer_speculative import main

    args = ("--prompt", "One day", "--max-new-tokens", 20)
    code, out, err = run_main(main, *args, "--backend", "native")
    assert (code, out) == run_main(main, *args, "--backend", "torch")[:2] and code == 0
    assert "note" not in err


# Logits


@torch.inference_mode()
@pytest.mark.parametrize("name", ["stories", "stories-draft"])
def test_logits_of_the_checkpoints(name):
    """Nearer to float64's than the eager ones, so the two differ by more than one is wrong."""
    model = load_model(CHECKPOINTS / name)
    texts = random_texts(model, 2, 256)
    eager = model(texts)
    expected = load_model(CHECKPOINTS / name, torch.float64)(texts)
    logits = in_pieces(native(model), texts, 8)
    assert (logits - expected).abs().max() <= 1e-5 and (logits - eager).abs().max() <= 2e-5


@torch.inference_mode()
@ALL_TARGETS
@pytest.mark.parametrize("form", [*GPT_FORMS, *range(24)], ids=str)
def test_logits_of_any_form_in_any_pieces(tiny, tiny_llama, target, form):
    """Those of float64, as near as the eager pass is. A number is the seed of a Llama."""
    gpt = isinstance(form, dict)
    model = tiny(dtype=torch.float32, **form) if gpt else any_llama(tiny_llama, form)
    texts = random_texts(model, 2)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 2, 3, 5, 7, 8):
        torch.testing.assert_close(in_pieces(model, texts, size), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@ALL_TARGETS
def test_activations_far_from_zero(tiny, tiny_llama, target):
    """The exponentials of GELU, SwiGLU and the softmax leave the range of float32 there."""
    gpt = tiny(dtype=torch.float32)
    gpt.h[0].mlp.c_fc.bias.copy_(torch.linspace(-40, 40, 64))
    gpt.h[1].attn.c_attn.weight[:32].mul_(200)
    llama = tiny_llama(dtype=torch.float32)
    llama.layers[0].mlp.gate_proj.weight.mul_(torch.linspace(-200, 200, 24)[:, None])
    llama.layers[1].self_attn.q_proj.weight.mul_(200)
    for model in (gpt, llama):
        texts = random_texts(model, 1)
        expected = copy.deepcopy(model).double()(texts).float()
        logits = in_pieces(native(model, target), texts, 4)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


WIDE = {"n_embd": 192, "n_head": 6, "head_dim": 32, "n_inner": 300, "block_size": 64}


@torch.inference_mode()
@pytest.mark.parametrize("which", ["stories-draft", "tied", "not tied"])
def test_int8_logits_stay_close(tiny_llama, which):
    """Norms, softmax and GELU round differently, and then an activation may become another int8."""
    if which == "stories-draft":
        model = load_model(CHECKPOINTS / which, torch.int8)
    else:
        model = tiny_llama(dtype=torch.float32, tied_head=which == "tied", **WIDE)
        to_int8(model.init_weights(std=0.05, generator=torch.Generator().manual_seed(0)))
        assert (model.lm_head.scale is model.embed_tokens.scale) == (which == "tied")
    texts = random_texts(model, 1, 64)
    expected = model(texts)
    error = (in_pieces(native(model), texts, 10) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("odd", [False, True])
def test_int8_logits_have_the_same_bits_on_every_processor(build, odd):
    """In pieces of any size, too."""
    shape = {"n_head": 3, "n_embd": 51} if odd else {}
    if odd and build(0).path("embedding") == "embed_tokens":
        shape = {"head_dim": 20, "n_embd": 51, "n_inner": 57}
    model = to_int8(build(dtype=torch.float32, **shape))
    texts = random_texts(model, 2)
    expected = in_pieces(native(copy.deepcopy(model)), texts, 8)
    for target in TARGETS:
        compiled = native(copy.deepcopy(model), target)
        for size in (1, 3, 8):
            assert torch.equal(in_pieces(compiled, texts, size), expected)


@torch.inference_mode()
@KINDS
@pytest.mark.parametrize("name", ["stories-draft", "stories-llama", "odd"])
def test_the_same_bits_in_pieces_of_any_size(tiny, name, kind):
    """What a token gives does not depend on those beside it: not only int8, float32 too."""
    if name == "odd":
        model = of_kind(tiny(dtype=torch.float32, n_head=3, n_embd=51), kind)
    else:
        model = native(load_model(CHECKPOINTS / name, kind))
    texts = random_texts(model, 3, 16 if name == "odd" else 100)
    whole = in_pieces(model, texts, 100)
    for size in (1, 2, 3, 5, 7, 8) if name == "odd" else (1, 7, 32, 64):
        assert torch.equal(in_pieces(model, texts, size), whole)
    alone = torch.cat([in_pieces(model, text[None], 100) for text in texts])
    assert torch.equal(alone, whole)


@torch.inference_mode()
@KINDS
@pytest.mark.parametrize("keys", [None, 1, 2, 6])
def test_the_same_bits_at_any_number_of_threads(tiny, tiny_llama, kind, keys):
    """Fewer tokens than threads each thread prepares for itself, more are shared out.

    With a key for each query, threads do not wait between the two; with fewer they do.
    """
    if keys is None:
        model = tiny(dtype=torch.float32, n_embd=64)
    else:
        heads = {"n_head": 6, "n_kv_head": keys}
        model = tiny_llama(dtype=torch.float32, n_embd=64, n_inner=96, **heads)
    model = of_kind(model, kind)
    for rows, length in ((1, 1), (1, 2), (2, 1), (3, 1), (1, 16), (5, 7)):
        texts = random_texts(model, rows, length)
        expected = in_pieces(model, texts, length)
        for count in (2, 3, 5):
            with threads(count):
                for _ in range(3):
                    assert torch.equal(in_pieces(model, texts, length), expected)


@given(st.data())
@settings(max_examples=30)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(build, data):
    """Each row's logits are those of its own text; nothing else in the cache changes."""
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
    torch.testing.assert_close(logits, expected, rtol=3e-5, atol=3e-5)
    assert caches[0].tokens == caches[1].tokens
    torch.testing.assert_close(caches[0].storage, caches[1].storage, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_still_ragged_prompts_in_one_pass(build):
    from infer import pass_logits

    eager, model = both(build, block_size=64)
    new = [random_tokens(length, seed=length) for length in (50, 3, 31, 64)]
    results = [
        pass_logits(each, new, [2, 0, 3, 1], KVCache(eager, 4), 3) for each in (eager, model)
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_angles_are_those_of_torch(tiny_llama):
    """One is 150,000 radians at the last position: computed in another way it is off by 0.01."""
    model = tiny_llama(dtype=torch.float32, rope_theta=1e-6)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model), texts, 3), expected, rtol=2e-5, atol=2e-5)


# Texts


def test_greedy_text_for_a_thousand_tokens():
    model = load_model(CHECKPOINTS / "stories-draft")
    expected = run_rows(model, [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True)
    assert run_rows(native(model), [[5, 6, 7]], max_new_tokens=1000, ignore_eos=True) == expected


MODES = {
    "hops": {"max_new_tokens": 50},
    "every step a hop": {"options": {"stride": 1}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "sampled": {"temperature": 1.0, "ignore_eos": False},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    "a prompt of two windows": {"prompts": [random_tokens(100), random_tokens(30, seed=1)]},
}


@pytest.mark.parametrize("mode", MODES)
def test_texts_of_ragged_rows(build, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]
    given = {"prompts": prompts, "max_new_tokens": 30, "ignore_eos": True} | MODES[mode]

    def texts(model):
        return run_rows(model, generator=torch.Generator().manual_seed(0), **given)

    eager, compiled = both(build)
    assert texts(compiled) == texts(eager)


def test_still_float32_texts_do_not_depend_on_their_batch():
    """Sampled ones too, bit for bit: not only but for rounding."""
    from infer import generate
    from sampling import SamplingParams

    model = native(load_model(CHECKPOINTS / "stories-draft"))
    prompts = [random_tokens(length, 4096, seed=length) for length in (1, 40, 7, 90)]
    each = [SamplingParams(120, True, temperature=1.0, seed=seed) for seed in range(4)]
    together = [list(column) for column in zip(*generate(model, prompts, each))]
    assert together == own_texts(model, prompts, each)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["tiny", "tiny_llama"])
def test_speculation(build, request, drafter, gamma, temperature):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    params = SamplingParams(40, True, temperature=temperature, presence_penalty=0.3)

    def passes(use):
        target = use(build(dtype=torch.float32))
        draft = use(request.getfixturevalue(drafter)(dtype=torch.float32, n_layer=1))
        generator = torch.Generator().manual_seed(0)
        return list(generate_speculative(target, draft, [3], params, gamma, generator))

    assert passes(native) == passes(lambda model: model)


def test_beams(build):
    from infer import beam_search

    eager, compiled = both(build)
    texts, scores = zip(*beam_search(eager, random_tokens(6), 3, max_new_tokens=24))
    same_texts, same_scores = zip(*beam_search(compiled, random_tokens(6), 3, max_new_tokens=24))
    assert same_texts == texts and same_scores == pytest.approx(scores, abs=1e-4)


def test_which_passes_are_native(build, passes):
    """All that have a cache, of any number of tokens."""
    model = build(dtype=torch.float32, block_size=32)
    seen = []
    hidden = model.hidden
    model.hidden = lambda tokens, *args: seen.append(tokens.shape[1]) or hidden(tokens, *args)
    native(model)
    run_rows(model, [random_tokens(16)] * 2, max_new_tokens=3, ignore_eos=True)
    assert [sum(map(len, new)) for new in passes] == [32, 2, 2] and not seen
    without = {"use_cache": False}
    run_rows(model, [random_tokens(3)], options=without, max_new_tokens=3, ignore_eos=True)
    assert len(passes) == 3 and seen == [3, 4, 5]


def test_weights_may_change_in_place(build):
    eager, model = both(build)
    prompt = [random_tokens(4)]
    before = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    for each in (eager, model):
        with torch.no_grad():
            [norm] = [part for name, part in each.named_children() if name in ("ln_f", "norm")]
            norm.weight.mul_(-1)
    after = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    assert after == run_rows(eager, prompt, max_new_tokens=20, ignore_eos=True) != before
