"""Passes in C: near float64, with the same bits whatever is computed beside a sequence."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, TARGETS, random_tokens, record, run_rows
from engines import check_texts, finish, greedy, make_engine
from families import EACH_FAMILY, family
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import (
    WEIGHT_DTYPES,
    both,
    call,
    in_passes,
    in_pieces,
    native,
    native_in_dtype,
    on_each_target,
    passed,
    quantised,
    random_numbers,
    random_texts,
    threads,
)

from cache import KVCache, stored_head_dim, to_cache_dtype
from infer import pass_logits
from infer_speculative import main
from llama import ExpertsConfig, Llama
from model import GPT, TorchRunner
from native import NativeRunner

pytestmark = pytest.mark.usefixtures("compiled")
ALL_TARGETS = pytest.mark.parametrize("target", TARGETS, ids=str)
CACHES = pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=str)
SMALLEST = {"n_head": 1, "n_kv_head": 1, "head_dim": 2, "n_embd": 3, "n_inner": 1}
UNEVEN = {"n_head": 9, "n_kv_head": 3, "head_dim": 20, "n_embd": 51, "n_inner": 57}
WIDE = {"head_dim": 64, "n_embd": 130, "n_inner": 130}
ONE_KEY = {"n_kv_head": 1, "head_dim": 128, "n_embd": 33, "norm_eps": 0.1}
FORMS = [
    ("GPT2", {"n_head": 1, "n_embd": 20}),
    ("GPT2", {"n_head": 3, "n_embd": 51, "layer_norm_epsilon": 0.1, "block_size": 50}),
    ("GPT2", {"n_layer": 1, "n_embd": 64}),
    *(("Llama", form) for form in (SMALLEST, UNEVEN, WIDE | {"block_size": 50})),
    ("Llama", {"n_head": 3, "n_kv_head": 1, "head_dim": 64, "n_embd": 64, "rope_theta": 10.0}),
    ("Qwen2", {"n_embd": 33, "n_layer": 3}),
    *(("Qwen3", form | {"sliding_windows": (3, None, 8)}) for form in (UNEVEN, ONE_KEY)),
    ("Mistral", SMALLEST | {"sliding_windows": (1, 2)}),
    ("Mistral", WIDE | {"sliding_windows": (20, None, 17), "block_size": 70}),
    ("Mistral", ONE_KEY | {"sliding_windows": (33,), "block_size": 80}),
    ("Mistral", {"qk_norm": True, "experts": ExpertsConfig(5, 2, 12, mlp_only_layers=(1,))}),
    ("Gemma3", SMALLEST | {"sliding_windows": (1, None)}),
    ("Gemma3", UNEVEN),
    ("Gemma3", WIDE | {"tie_word_embeddings": False, "rope_local_base_freq": 3.0}),
    ("Gemma3", ONE_KEY | {"sliding_windows": (None,)}),
]
for shape, count, chosen, width, options in (
    ({"n_embd": 3}, 1, 1, 1, {}),
    ({"n_embd": 51, "tie_word_embeddings": True}, 9, 9, 57, {}),
    ({"n_embd": 130}, 40, 8, 30, {"norm_topk_prob": False}),
    ({"n_layer": 3, "n_inner": 33}, 7, 3, 12, {"mlp_only_layers": (0,)}),
    ({"n_inner": 200}, 300, 1, 2, {"mlp_only_layers": (1,)}),
):
    sizes = {"num_experts": count, "num_experts_per_tok": chosen, "n_inner": width} | options
    FORMS.append(("Qwen3Moe", shape | {"sizes": sizes}))
EACH_FORM = pytest.mark.parametrize("kind, form", FORMS, ids=str)


def gentle(model):
    """A model whose weights do not magnify rounding."""
    for weight in model.parameters():
        if weight.dim() == 2:
            generator = torch.Generator().manual_seed(len(weight))
            weight.data.normal_(std=0.8 * model.config.n_embd**-0.5, generator=generator)
    return model


# Of any form


@torch.inference_mode()
@ALL_TARGETS
@EACH_FORM
def test_logits_are_as_near_to_float64s_as_torchs(request, target, kind, form):
    model = gentle(family(request, kind)(dtype=torch.float32, **form))
    texts = random_texts(model, 2, model.config.block_size)
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 5, len(texts[0])):  # decode, and prefill in blocks of queries and without
        found = in_pieces(model, texts, size)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@EACH_FORM
def test_the_same_bits_for_any_number_of_tokens_threads_and_pages(request, dtype, kind, form):
    model = native_in_dtype(family(request, kind)(dtype=torch.float32, **form), dtype)
    length = model.config.block_size
    texts = random_texts(model, 2, length)
    expected = in_pieces(model, texts, 1)
    # Fewer tokens than threads each thread prepares for itself, more are shared out.
    for size, count in ((16, 1), (5, 2), (length, 2)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts, size), expected)
    for rows, count in ((slice(2), 5), (slice(1, 2), 2)):
        with threads(count):
            assert torch.equal(in_pieces(model, texts[rows, :5], 1), expected[rows, :5])
    for page_size, size in ((1, 8), (7, length), (16, 20)):  # anywhere, and NaN elsewhere
        passes = [[min(size, length - start)] * 2 for start in range(0, length, size)]
        assert torch.equal(in_passes(model, texts.tolist(), passes, page_size), expected)
    uneven = [[3, 0], [1, 7], [length - 4, 1], [0, length - 8]]
    assert torch.equal(in_passes(model, texts.tolist(), uneven, 4), expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@EACH_FORM
def test_rounded_logits_are_those_of_every_processor_and_near_torchs(request, dtype, kind, form):
    model = quantised(gentle(family(request, kind)(dtype=torch.float32, **form)), dtype)
    texts = random_texts(model, 1, model.config.block_size)
    expected = model(texts)
    error = (on_each_target(model, texts, 4) - expected).abs()
    assert error.median() < 0.001 * expected.std() and error.mean() < 0.03 * expected.std()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@EACH_FAMILY
def test_16_bit_weights_give_the_bits_of_float32(request, kind, dtype, target):
    model = family(request, kind)(dtype=torch.float32).to(dtype)
    exact = native(copy.deepcopy(model).float())
    native(model)
    length = model.config.block_size
    texts = random_texts(model, 2, length)
    assert KVCache(model, 1, length).storage.dtype == model.dtype == torch.float32
    for size in (1, 5, length):
        assert torch.equal(in_pieces(model, texts, size), in_pieces(exact, texts, size))


# Where rounding or sharing is hard


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
        native(model, target)
        for size in (1, 16):
            logits = in_pieces(model, texts, size)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_angles_are_those_of_torch(tiny_llama):
    """One is 150,000 radians at the last position: computed in another way it is off by 0.01."""
    model = tiny_llama(dtype=torch.float32, rope_theta=1e-6)
    texts = random_texts(model, 1)
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model), texts, 1), expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@ALL_TARGETS
def test_a_token_does_not_see_those_behind_it(tiny, target):
    """Though they are computed together: what is NaN in these is not in its logits."""
    model = tiny(dtype=torch.float32, block_size=50, n_head=1)
    model.wpe.weight.data[42] = math.nan  # in the midst of 4, 8 or 16 tokens
    (logits,) = in_passes(native(model, target), [random_tokens(50)], [[50]], 7)
    assert logits[:42].isfinite().all() and logits[42:].isnan().all()


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


# The mixture of experts


@torch.inference_mode()
@pytest.mark.parametrize("count, chosen", [(5, 2), (200, 9)])
def test_of_experts_that_tie_the_lower_numbers_win(tiny_experts, count, chosen):
    sizes = {"num_experts": count, "num_experts_per_tok": chosen}
    model = tiny_experts(dtype=torch.float32, sizes=sizes)
    for layer in model.layers:
        layer.mlp.gate.weight.zero_()
        for expert in layer.mlp.experts[chosen:]:
            expert.down_proj.weight.fill_(math.nan)
    texts = random_texts(model, 2)
    expected = model(texts)
    assert expected.isfinite().all()
    torch.testing.assert_close(in_pieces(native(model), texts, 5), expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@WEIGHT_DTYPES
def test_experts_that_no_token_chose_are_not_read(tiny_experts, dtype):
    """Their addresses become one that nothing may read."""
    model = tiny_experts(dtype=torch.float32, sizes={"num_experts": 9, "num_experts_per_tok": 2})
    model = quantised(model, dtype) if dtype == torch.int8 else model
    text = random_texts(model, 1, 3)
    chosen = []
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(
            lambda mlp, args: chosen.append(mlp.route(args[0].flatten(0, 1))[1].unique().tolist())
        )
    model(text)
    expected = in_pieces(native(model), text, 3)
    for layer, numbers in enumerate(chosen):
        assert 2 <= len(numbers) <= 6
        for number in set(range(9)) - set(numbers):
            expert = model.runner.model.layers[layer].experts[number]
            for each in (*expert.inputs, expert.out):
                each.weight = each.tail_panel = each.compensation = 8
                each.scale = 8 if dtype == torch.int8 else None
    assert torch.equal(in_pieces(model, text, 3), expected)


@torch.inference_mode()
def test_shares_that_are_no_numbers_choose_experts_that_exist(tiny_experts):
    model = tiny_experts(dtype=torch.float32)
    model.layers[1].mlp.gate.weight.fill_(math.nan)
    assert in_pieces(native(model), random_texts(model, 2), 5).isnan().all()


# Keys and values of 16 and 8 bits


def stored_in_c(library, rows: torch.Tensor, dtype) -> torch.Tensor:
    stored = torch.full((len(rows), stored_head_dim(rows.shape[1], dtype)), 99, dtype=dtype)
    for row, to in zip(rows.clone(), stored):
        call(library.store_kv_row, {torch.float16: 1, torch.int8: 3}[dtype], len(row), row, to)
    return stored


def test_a_float16_is_the_nearest(library):
    """Every number between two of them, whose middle becomes the even one, and far ones."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    steps = torch.tensor([0, 0.25, 0.5, 0.5 + 2**-12, 0.5 - 2**-12, 0.75], dtype=torch.float64)
    below = halves[:, None] + steps * halves.diff(append=torch.tensor([65536.0]))[:, None]
    far = [65519.99, 65520, 65536, 1e9, torch.inf, 1e-8, 2.0**-25, 2.0**-149, 2.0**-126]
    numbers = torch.cat([below.flatten().float(), torch.tensor(far)])
    numbers = torch.cat([numbers, -numbers])
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 1000)).view(-1, 1000)
    found = stored_in_c(library, rows, torch.float16)
    assert torch.equal(found.view(torch.int16), rows.half().view(torch.int16))
    assert stored_in_c(library, torch.full((1, 7), torch.nan), torch.float16).isnan().all()


@pytest.mark.parametrize("dim", [1, 5, 6, 20, 32, 64, 100])
@CACHES
def test_stored_rows_have_torchs_bits(library, dim, cache_dtype):
    sizes = torch.tensor([0, 1e-45, 1e-30, 1e-3, 1, 30, 1e3, 1e4, 3])
    rows = random_numbers(9, dim) * sizes[:, None]
    found = stored_in_c(library, rows, cache_dtype).view(torch.uint8)
    assert torch.equal(found, to_cache_dtype(rows, cache_dtype).view(torch.uint8))


@torch.inference_mode()
@EACH_FAMILY
@CACHES
def test_a_small_cache_changes_no_bit_by_chunks_and_is_as_near_as_torchs(
    request, target, attended, kind, cache_dtype
):
    """A last bit may become a step, so logits are not torch's. torch attends to nothing."""
    model = family(request, kind)(dtype=torch.float32)
    texts = random_texts(model, 3, model.config.block_size)
    exact = in_pieces(model, texts, 5)
    torchs = in_pieces(copy.deepcopy(model), texts, 5, cache_dtype)
    attended.clear()
    whole = in_pieces(native(model), texts, 40, cache_dtype)
    for size in (1, 5, 13):
        assert torch.equal(in_pieces(model, texts, size, cache_dtype), whole)
    assert torch.equal(in_pieces(model, texts[1:2], 5, cache_dtype), whole[1:2])
    with threads(3):
        assert torch.equal(in_pieces(model, texts, 5, cache_dtype), whole)
    assert (whole - torchs).abs().mean() < 0.2 * (torchs - exact).abs().mean()
    storages = []
    for each in (None, cache_dtype):  # in the first layer: a float32 cache's, as torch rounds them
        cache = KVCache(model, *texts.shape, each)
        model.runner.logits(model, cache, cache.spans(texts.tolist()), [1, 1, 1])
        storages.append(cache.storage[0])
    assert torch.equal(storages[1], to_cache_dtype(storages[0], cache_dtype)) and not attended


@torch.inference_mode()
@EACH_FAMILY
@CACHES
def test_int8_models_with_a_small_cache_have_the_bits_of_every_processor(
    request, kind, cache_dtype
):
    model = quantised(family(request, kind)(dtype=torch.float32), torch.int8)
    texts = random_texts(model, 2)
    found = on_each_target(model, texts, 5, cache_dtype)
    assert torch.equal(found, on_each_target(model, texts, 16, cache_dtype))


@torch.inference_mode()
@pytest.mark.parametrize(
    "family, shape",
    [("tiny", {}), ("tiny", {"n_embd": 128}), *(("tiny_llama", {"head_dim": D}) for D in (20, 64))],
)
def test_float16_is_read_as_it_is(request, target, family, shape):
    """With numbers of all sizes in the cache: the bits are those of float32 with the same."""
    model = request.getfixturevalue(family)(block_size=100, dtype=torch.float32, **shape)
    for name, weight in model.named_parameters():  # new keys are 0, which no cache rounds
        if "k_proj" in name or "v_proj" in name:
            weight.data.zero_()
        elif "c_attn" in name:
            weight.data[len(weight) // 3 :] = 0
    native(model)
    bits = torch.randint(0x7C00, (50_000,), generator=torch.Generator().manual_seed(0))
    numbers = bits.to(torch.int16).view(torch.float16) * torch.tensor([-1, 1]).half().repeat(25_000)
    small = KVCache(model, 1, 70, torch.float16).storage
    small[:] = numbers.repeat(2)[: small.numel()].view(small.shape)
    for count in (1, 40):
        part = [0], 30, random_tokens(count)
        logits = [
            passed(model, storage, [part], [count]) for storage in (small.clone(), small.float())
        ]
        assert logits[0].isfinite().all() and torch.equal(*logits)


# On the command line, in generate, speculation and the engine


@pytest.mark.parametrize(
    "name, options",
    [
        ("stories", ()),
        ("stories", ("--cache-dtype", "int8")),
        ("stories-llama", ("--dtype", "int8")),
        ("stories-draft", ("--dtype", "blocks")),
        ("stories-llama", ("--cache-dtype", "float16")),
    ],
)
def test_no_pass_of_the_command_line_is_left_for_torch(cli, monkeypatch, name, options):
    passes = [record(monkeypatch, kind, "hidden", lambda *_: None) for kind in (GPT, Llama)]
    args = ("--prompt", "Once upon a time, there was a little girl named Lily. " * 5)
    args += ("--model", CHECKPOINTS / name, "--num-samples", 3, "--max-new-tokens", 12, *options)
    expected = cli(*args, "--backend", "torch")[:2]
    assert any(passes) and expected[0] == 0
    for each in passes:
        each.clear()
    code, out, err = cli(*args, "--backend", "native")
    assert (code, out) == expected and "instead" not in err and not any(passes)


@pytest.mark.parametrize("options", [(), ("--draft", CHECKPOINTS / "stories-draft")], ids=str)
def test_no_pass_of_the_engine_is_left_for_torch(engine_cli, torch_passes, options):
    args = ("--prompt", "Once upon a time", "--prompt", "Lily", "--max-new-tokens", 20, *options)
    code, out, err = engine_cli(*args)
    assert code == 0 and "note" not in err and torch_passes == []
    assert out == engine_cli(*args, "--backend", "torch")[1]


@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_another_architecture_is_computed_by_torch(run_main, tiny, monkeypatch, unknown, backend):
    models = [tiny(dtype=torch.float32, vocab_size=4096) for _ in range(2)]
    models[unknown].__class__ = type("Mamba", (GPT,), {})
    left = list(models)
    monkeypatch.setattr("command_line.models.load_model", lambda *_: left.pop(0))
    monkeypatch.setattr("command_line.models.kernel", lambda: "plain C")
    code, _, err = run_main(main, "--max-new-tokens", 3, "--backend", backend)
    assert code == 0 and type(models[unknown].runner) is TorchRunner
    assert type(models[1 - unknown].runner) is not TorchRunner
    said = backend == "native"
    assert err.count("note: --backend native: native code computes GPT") == said
    assert err.count("this is Mamba; torch computes instead\n") == said
    assert err.count("a slow build: plain C\n") == said


MODES = {
    "context shifts": {"max_new_tokens": 50},
    "a shift in every step": {"options": {"stride": 1}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "sampled": {"temperature": 1.0, "ignore_eos": False},
    "a prompt of two windows": {"prompts": [random_tokens(100), random_tokens(30, seed=1)]},
}


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_ragged_rows_are_those_of_torch(build, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]
    given = {"prompts": prompts, "max_new_tokens": 30, "ignore_eos": True} | MODES[mode]
    eager, compiled = (
        run_rows(model, generator=torch.Generator().manual_seed(0), **given)
        for model in both(build)
    )
    assert compiled == eager


def test_broken_logits_of_one_request_reach_no_other(tiny):
    model = tiny(dtype=torch.float32)
    model.wpe.weight.data[5] = math.nan
    native(model)
    prompts = [random_tokens(8 if row == 1 else 2, seed=row) for row in range(6)]
    pool = {"max_num_seqs": 2, "num_pages": 8, "page_size": 2}
    engine, made = make_engine(model, prompts, greedy(3), **pool)
    finish(engine)
    assert [request.finish_reason for request in made] == ["length", "error", *["length"] * 4]
    check_texts(model, [made[row] for row in (0, 2, 3, 4, 5)])


@torch.inference_mode()
def test_a_model_is_as_it_was_if_it_cannot_be_packed(tiny):
    model = tiny(dtype=torch.float32)
    texts = torch.tensor([random_tokens(9)])
    expected = model(texts)
    model.ln_f.weight.data = model.ln_f.weight.double()
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(model)
    model.ln_f.weight.data = model.ln_f.weight.float()
    assert torch.equal(model(texts), expected) and type(model.runner) is TorchRunner


def test_a_runner_takes_what_is_compiled_already(fresh, compilations, tmp_path):
    (tmp_path / "cache").write_text("")  # no directory
    assert fresh.kernel() == "small"
    with pytest.raises(AttributeError, match="work_floats"):  # which small.c lacks
        NativeRunner(SimpleNamespace(config=None))
    assert len(compilations) == 1


def test_weights_may_change_in_place(tiny):
    eager, model = both(tiny)
    prompt = [random_tokens(4)]
    before = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    for each in (eager, model):
        with torch.no_grad():
            each.ln_f.weight.mul_(-1)
    after = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    assert after == run_rows(eager, prompt, max_new_tokens=20, ignore_eos=True) != before
