"""Soft caps of attention scores and logits, of Gemma 2, against transformers."""

import copy
import dataclasses
import json

import pytest
import torch
from conftest import (
    check_bad_config,
    check_command_line,
    check_modes,
    difference,
    edit_json,
    load,
    random_tokens,
    refused,
    run_rows,
    their_rows,
)
from engines import check_own_runs, finish, make_engine, own_texts, request_params
from lora_files import check_adapter_as_in_peft
from natives import TARGETS, in_pieces, native, native_as_torch, on_each_target, to_int8
from pretend_gpu import no_inference_mode_fixture  # noqa: F401
from ranks import check_logits_of_ranks, save_uneven
from test_captured_step import replaying, traced
from test_gemma_2 import NO_CAPS, build_gemma2_fixture, gemma2_fixture  # noqa: F401
from test_static_shapes import static

from infer import beam_search, generate
from loading.load import load_config, save_model
from sampling import SamplingParams

CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
PUBLISHED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@pytest.fixture
def peer2(gemma2):
    """A function that saves a random Gemma 2 of transformers, in float64, with low caps."""
    return lambda **shape: gemma2(**CAPS | shape)


@pytest.fixture
def build(build_gemma2):
    """A function that builds a random Gemma 2 with low caps."""
    return lambda seed=0, **shape: build_gemma2(seed, **CAPS | shape)


def replaced(model, **fields):
    """Return a model with the same weights, and another configuration."""
    other = type(model)(dataclasses.replace(model.config, **fields)).to(model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


# 1. The forward pass in torch


@pytest.mark.step(n=1)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_hidden_layers": 4, "query_pre_attn_scalar": 6},
        {"layer_types": ["full_attention"] * 3},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "sliding_window": 1},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
    ],
    ids=str,
)
def test_logits_equal_transformers(peer2, shape):
    """And without a cap, they are others."""
    theirs, directory = peer2(**shape)
    ours = load(directory)
    assert difference(ours, theirs) < 1e-9
    for key in CAPS:
        cap = getattr(ours.config, key)
        assert (difference(replaced(ours, **{key: None}), theirs) > 0.1) == (cap is not None)


@pytest.mark.step(n=1)
def test_ragged_batches_equal_transformers(peer2):
    theirs, directory = peer2()
    prompts = [random_tokens(length, seed=length) for length in (1, 20, 7)]
    expected = [their_rows(theirs, [prompt], 20)[0] for prompt in prompts]
    assert run_rows(load(directory), prompts, max_new_tokens=20, ignore_eos=True) == expected


@pytest.mark.step(n=1)
@pytest.mark.parametrize("use_cache", [True, False])
def test_probabilities_are_of_capped_logits(peer2, use_cache):
    """A cap keeps the order of logits, so a greedy run does not show it."""
    theirs, directory = peer2(final_logit_softcapping=0.5)
    ours = load(directory)
    plain = replaced(ours, final_logit_softcapping=None)
    prompt = random_tokens(9)
    logprobs = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    (best, *_) = beam_search(ours, prompt, 3, 1, use_cache=use_cache)
    assert best.score == pytest.approx(logprobs[-1].max().item(), abs=1e-5)
    params = SamplingParams(1, logprobs=0, prompt_logprobs=0)
    engine, (scored,) = make_engine(ours, [prompt], params)
    finish(engine)
    found = [logprob for logprob, _ in (*scored.prompt_logprobs[1:], scored.logprobs[0])]
    expected = [row[token].item() for row, token in zip(logprobs, scored.tokens[1:])]
    assert found == pytest.approx(expected, abs=1e-5)
    params = [SamplingParams(20, temperature=1.0, seed=seed) for seed in range(50)]
    tokens = [
        [next(generate(model, [prompt], each, use_cache=use_cache))[0] for each in params]
        for model in (ours, plain)
    ]
    assert len(set(tokens[0])) > 20 > len(set(tokens[1]))


@pytest.mark.step(n=1)
def test_batches_shifts_speculation_and_beams_equal_a_full_pass(build):
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(build(), build(seed=1), prompts, 60)


@pytest.mark.step(n=1)
@pytest.mark.parametrize("cache_dtype", [None, torch.float16, torch.int8], ids=str)
def test_an_engine_in_torch_writes_the_texts_of_generate(build, cache_dtype):
    check_own_runs(build(), (3, 14, 1, 38), 30, num_pages=25, cache_dtype=cache_dtype)


@pytest.mark.step(n=1)
@pytest.mark.usefixtures("no_inference_mode")
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_steps_of_fixed_shapes(build, cache_dtype):
    """In an engine and in `generate`; no operation depends on a value."""
    options = {"page_size": 8, "cache_dtype": cache_dtype}
    prompts = [random_tokens(length, seed=length) for length in (3, 11)]
    params = request_params(2, max_new_tokens=7, temperature=0.8)
    expected = own_texts(build(), prompts, params, None, cache_dtype)
    for model in (static(build()), replaying(build(), traced)):
        engine, requests = make_engine(model, prompts, params, **options)
        finish(engine)
        assert [request.output for request in requests] == expected and engine.cache.steps
        assert own_texts(model, prompts, params, None, cache_dtype) == expected


@pytest.mark.step(n=1)
def test_16_bit_scores_and_logits_are_not_rounded(build):
    """Near 50, bfloat16 numbers are 0.25 apart."""
    from cache import capped_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 64, generator=generator).bfloat16() for _ in range(3))
    q = 20 * q
    exact = capped_attention(q.double(), k.double(), v.double(), None, 50.0)
    found = capped_attention(q, k, v, None, 50.0)
    assert found.dtype == torch.bfloat16 and (found - exact).abs().max() < 0.02
    hidden = torch.randn(5, 20, generator=generator).bfloat16()
    logits = build(dtype=torch.bfloat16).head(hidden)
    assert logits.abs().max() <= 4 and (logits != logits.bfloat16()).any()


# 2. C, and ranks


@pytest.mark.step(n=2)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    shape = {"query_pre_attn_scalar": 1, "sliding_window": 9, "attn_implementation": "eager"}
    shape |= {"num_hidden_layers": 3, "head_dim": 6} | CAPS
    check_command_line(cli, tmp_path, "Gemma2", 40, "--backend", backend, **shape)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("cache_dtype", [None, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
def test_c_computes_the_same(build, compiled, monkeypatch, dtype, cache_dtype):
    model = native_as_torch(build().float(), dtype, monkeypatch)
    check_own_runs(model, (3, 14, 1, 38), 30, num_pages=25, cache_dtype=cache_dtype)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("head_dim", [6, 64])
def test_bits_do_not_depend_on_the_processor_or_the_pass(build, compiled, head_dim):
    shape = {"block_size": 70, "sliding_windows": (40, None, 1), "head_dim": head_dim}
    model = build(dtype=torch.float32, **shape)
    texts = torch.tensor([random_tokens(70)])
    exact = copy.deepcopy(model).double()(texts)
    for target in TARGETS:
        there = native(copy.deepcopy(model), target)
        first, *others = (in_pieces(there, texts, size) for size in (70, 1, 33))
        assert all(torch.equal(each, first) for each in others)
        assert (first - exact).abs().max() < 1e-4
    to_int8(model)
    first, *others = (on_each_target(model, texts, size) for size in (70, 1, 33))
    assert all(torch.equal(each, first) for each in others)


@pytest.mark.step(n=2)
def test_small_scores_and_logits_keep_their_digits(build, compiled):
    """1 - 2 / (1 + exp(2 x)) has an error of 6e-8, which a cap of 1e5 would multiply."""
    model = build(dtype=torch.float32, **dict.fromkeys(CAPS, 1e5))
    texts = torch.tensor([random_tokens(40)])
    expected = in_pieces(native(replaced(model, **NO_CAPS)), texts, 40)
    for target in TARGETS:
        found = in_pieces(native(copy.deepcopy(model), target), texts, 40)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.step(n=2)
@torch.inference_mode()
def test_a_cap_hides_no_nan(build, compiled):
    for make in (native, lambda model: model):
        model = build(dtype=torch.float32)
        model.norm.weight.data[0] = torch.nan
        assert in_pieces(make(model), torch.tensor([random_tokens(9)]), 9).isnan().all()


@pytest.mark.step(n=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_ranks_have_the_logits_of_one_process(build, compiled, tmp_path, monkeypatch, dtype):
    import cache
    import model

    attend = cache.capped_attention

    def in_float64(q, keys, values, *options):  # as `ranks.attention_in_float64`
        return attend(q.double(), keys.double(), values.double(), *options).to(q.dtype)

    for module in (cache, model):
        monkeypatch.setattr(module, "capped_attention", in_float64)
    save_uneven(build, tmp_path, "tiny_llama")
    check_logits_of_ranks(tmp_path, dtype)


@pytest.mark.step(n=2)
def test_an_adapter_is_added_as_in_peft(peer2, tmp_path):
    check_adapter_as_in_peft(*peer2(), tmp_path / "adapter")


# 3. Files


@pytest.mark.step(n=3)
@pytest.mark.parametrize("caps", [PUBLISHED, PUBLISHED | {"attn_logit_softcapping": None}], ids=str)
def test_a_saved_model_is_the_same_model(build, tmp_path, caps):
    """With scores above 50 and logits above 30."""
    from transformers import AutoModelForCausalLM

    ours = build(dtype=torch.float32, **caps)
    with torch.no_grad():
        ours.embed_tokens.weight *= 16
        for layer in ours.layers:
            layer.self_attn.q_proj.weight *= 16
    save_model(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    assert json.loads((tmp_path / "config.json").read_text()).items() >= caps.items()
    options = {"attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert type(theirs).__name__ == "Gemma2ForCausalLM"
    assert difference(ours, theirs) < 1e-3
    for key, cap in caps.items():
        assert cap is None or difference(replaced(ours, **{key: None}), theirs) > 1


@pytest.mark.step(n=3)
def test_missing_caps_are_those_of_transformers(build, tmp_path):
    import transformers

    save_model(build(), tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in raw.items() if key not in CAPS}))
    ours, theirs = load_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert all(getattr(ours, key) == getattr(theirs, key) == PUBLISHED[key] for key in CAPS)


ALLOWED = "must be above 0 and at most 1000000.0"


@pytest.mark.step(n=3)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attn_logit_softcapping": 0}, f"attn_logit_softcapping 0: {ALLOWED}"),
        ({"attn_logit_softcapping": "50"}, f"attn_logit_softcapping '50': {ALLOWED}"),
        ({"attn_logit_softcapping": float("nan")}, f"attn_logit_softcapping nan: {ALLOWED}"),
        ({"attn_logit_softcapping": True}, f"attn_logit_softcapping True: {ALLOWED}"),
        ({"final_logit_softcapping": -30.0}, f"final_logit_softcapping -30.0: {ALLOWED}"),
        ({"final_logit_softcapping": [30.0]}, f"final_logit_softcapping [30.0]: {ALLOWED}"),
        ({"final_logit_softcapping": 1e7}, f"final_logit_softcapping 10000000.0: {ALLOWED}"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(cli, build, tmp_path, changes, words):
    check_bad_config(cli, build, tmp_path, changes, words)


@pytest.mark.step(n=3)
def test_still_a_gemma_3_has_no_caps(tiny_gemma, tmp_path):
    save_model(tiny_gemma(sliding_windows=(5, None)), tmp_path)
    edit_json(tmp_path / "config.json", {"attn_logit_softcapping": 50.0})
    assert "attn_logit_softcapping is 50.0; supported is None" in refused(load_config, tmp_path)
