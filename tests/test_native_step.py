"""A whole pass in C gives the logits of the eager one, and texts stay the same."""

import copy

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, record, run_rows
from engines import own_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import both, in_pieces, native, threads

import command_line
from cache import KVCache
from infer import generate, pass_logits
from infer_speculative import generate_speculative, main
from int8 import to_int8
from loading.load import load_model
from model import GPT, TorchRunner
from sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
FORMS = [
    ("tiny", {}),
    ("tiny", {"n_head": 1, "n_embd": 20}),
    ("tiny", {"n_head": 3, "n_embd": 51, "layer_norm_epsilon": 0.1}),
    ("tiny", {"n_layer": 1, "n_embd": 64}),
    ("tiny_llama", {"n_head": 1, "n_kv_head": 1, "head_dim": 2, "n_embd": 3, "n_inner": 1}),
    ("tiny_llama", {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57}),
    ("tiny_llama", {"head_dim": 64, "n_embd": 130, "n_inner": 130, "tied_head": True}),
    ("tiny_llama", {"n_embd": 33, "n_layer": 3, "norm_epsilon": 0.1, "qkv_bias": True}),
    ("tiny_llama", {"n_kv_head": 1, "head_dim": 16, "n_embd": 64, "rope_theta": 10.0}),
]


def random_texts(model, count: int, length: int = 16) -> torch.Tensor:
    rows = [random_tokens(length, model.config.vocab_size, seed=row) for row in range(count)]
    return torch.tensor(rows)


def of_kind(model, kind):
    """The model in C, in float32 or int8."""
    return native(to_int8(model) if kind == torch.int8 else model)


@pytest.fixture
def passes(monkeypatch):
    """A list to which each native pass adds its new tokens."""
    from native import NativeRunner

    def tokens(runner, storage, spans, keep):
        return [span.tokens for span in spans]

    return record(monkeypatch, NativeRunner, "compute", tokens)


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


@torch.inference_mode()
def test_logits_of_a_checkpoint():
    """Nearer to float64's than the eager ones are."""
    texts = torch.tensor([random_tokens(256, 4096)])
    expected = load_model(CHECKPOINTS / "stories-draft", torch.float64)(texts)
    model = native(load_model(CHECKPOINTS / "stories-draft"))
    assert (in_pieces(model, texts, 8) - expected).abs().max() <= 1e-5


@torch.inference_mode()
@ALL_TARGETS
@pytest.mark.parametrize("family, form", FORMS, ids=str)
def test_logits_of_any_form_in_any_pieces(request, target, family, form):
    """Those of float64, as near as the eager pass is."""
    model = request.getfixturevalue(family)(dtype=torch.float32, **form)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(std=0.8 * model.config.n_embd**-0.5, generator=generator)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    texts = random_texts(model, 2)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 3, 7, 8):
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
def test_int8_logits_stay_close(tiny_llama):
    """Norms, softmax and GELU round differently, and then an activation may become another int8."""
    model = tiny_llama(dtype=torch.float32, **WIDE)
    to_int8(model.init_weights(std=0.05, generator=torch.Generator().manual_seed(0)))
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
@pytest.mark.parametrize("keys", [None, 2, 6])
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
        for count in (2, 5):
            with threads(count):
                for _ in range(2):
                    assert torch.equal(in_pieces(model, texts, length), expected)


@given(st.data())
@settings(max_examples=15)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(build, data):
    """Each row's logits are those of its own text; nothing else in the cache changes."""
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
def test_the_angles_are_those_of_torch(tiny_llama):
    """One is 150,000 radians at the last position: computed in another way it is off by 0.01."""
    model = tiny_llama(dtype=torch.float32, rope_theta=1e-6)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model), texts, 3), expected, rtol=2e-5, atol=2e-5)


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
    model = native(load_model(CHECKPOINTS / "stories-draft"))
    prompts = [random_tokens(length, 4096, seed=length) for length in (1, 40, 7, 90)]
    each = [SamplingParams(120, True, temperature=1.0, seed=seed) for seed in range(4)]
    together = [list(column) for column in zip(*generate(model, prompts, each))]
    assert together == own_texts(model, prompts, each)


@pytest.mark.parametrize("gamma, temperature", [(1, 0.0), (4, 1.0), (16, 0.0)])
def test_speculation(build, tiny_llama, gamma, temperature):
    params = SamplingParams(40, True, temperature=temperature, presence_penalty=0.3)

    def passes(use):
        target = use(build(dtype=torch.float32))
        draft = use(tiny_llama(dtype=torch.float32, n_layer=1))
        generator = torch.Generator().manual_seed(0)
        return list(generate_speculative(target, draft, [3], params, gamma, generator))

    assert passes(native) == passes(lambda model: model)


def test_which_passes_are_native(build, passes):
    """All that have a cache, of any number of tokens."""
    from native import use_native

    model = build(dtype=torch.float32, block_size=32)
    seen = []
    hidden = model.hidden
    model.hidden = lambda tokens, *args: seen.append(tokens.shape[1]) or hidden(tokens, *args)
    use_native(model)
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
