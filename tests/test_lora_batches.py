"""Each request of a batch may have an adapter of its own, in torch and in C."""

import copy
import random

import pytest
import torch
from conftest import (
    CHECKPOINTS,
    TARGETS,
    is_one_line,
    random_tokens,
    record,
    refused,
    run_rows,
    save_speaking,
)
from engines import check_pages, finish, make_engine
from families import EACH_FAMILY, family
from lora_files import (
    ATTENTION,
    LINEAR,
    NAMES,
    add_at_random,
    check_own,
    own_text,
    params_of,
    random_pairs,
    random_tensors,
    save_adapter,
    with_adapters,
)
from natives import native, native_in_dtype, threads, to_int8
from ranks import script, start, wait, written

import infer_engine
from adapters import Adapters, use_adapters
from cache import KVCache
from engine import options
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from infer import generate, next_logits
from loading.load import load_model, save_model
from model import TorchRunner
from native import use_native
from sampling import SamplingParams

LLAMA = CHECKPOINTS / "stories-llama"
FROGS = CHECKPOINTS / "stories-frogs"
WORDS = ["--model", LLAMA, "--prompt", "Once upon a time", "--prompt", "Tom"]


@pytest.fixture
def passes_in_torch(monkeypatch) -> list:
    return record(monkeypatch, TorchRunner, "forward", lambda *_: None)


def targets_of(kind: str) -> tuple[str, ...]:
    return (*ATTENTION, "gate") if kind == "Qwen3Moe" else LINEAR


def merged_model(build, lora_weights):
    model = build()
    for name, (a, b) in lora_weights.items():
        model.get_parameter(name).data += b.to(model.dtype) @ a.to(model.dtype)
    return model


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma3", "Mistral"])
def test_a_run_is_that_of_the_merged_model(request, kind):
    build = family(request, kind)
    model = with_adapters(build())
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19)]
    params = {"max_new_tokens": 25, "ignore_eos": True}
    outputs = [run_rows(build(), prompts, **params)]
    assert run_rows(model, prompts, **params) == outputs[0]
    for seed, name in enumerate("ab"):
        outputs.append(
            run_rows(merged_model(build, random_pairs(model, LINEAR, seed)), prompts, **params)
        )
        for use_cache in (True, False):
            options = {"adapter": name, "use_cache": use_cache}
            assert run_rows(model, prompts, options=options, **params) == outputs[-1]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int8], ids=str)
@EACH_FAMILY
def test_histories_bit_for_bit(request, compiled, passes_in_torch, kind, dtype):
    """In float64 in torch, with drafts; and in C, where a last bit could become a step of int8."""
    build = family(request, kind)
    model = native_in_dtype(build(dtype=torch.float32), dtype) if dtype else build()
    model = with_adapters(model, targets_of(kind))
    options = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 9, "num_pages": 12}
    if dtype is None:  # a model that drafts has no adapters: one that has checks its drafts
        drafter = PagedModelDrafter(build(), model) if kind == "Llama" else PromptLookupDrafter()
        options["drafter"] = drafter
    engine, _ = make_engine(model, [], [], **options)
    requests = add_at_random(engine, random.Random(2), NAMES, ("", "x"))
    assert engine.scheduler.prefix_cache_hits > 0
    assert engine.scheduler.num_preemptions > 0 or kind == "Mistral"  # whose windows free pages
    assert {request.adapter for request in requests} == set(NAMES)
    check_own(model, requests)
    assert bool(passes_in_torch) == (dtype is None)


def test_prefixes_are_shared_with_one_adapter_only(tiny):
    model = with_adapters(tiny(), names=("a", "b", "ab"))
    engine, _ = make_engine(model, [], [], page_size=4)
    prompt = random_tokens(12)
    seen = set()
    for adapter in ("", "a", "b", "ab"):
        for cache_salt in ("", "a", "\0a\0", "\0a\0b"):
            for again in (False, True):
                before = engine.scheduler.prefix_cache_hits
                request = engine.add(prompt, params_of(9, 1), cache_salt, adapter)
                finish(engine)
                assert engine.scheduler.prefix_cache_hits - before == 8 * again
                assert request.output == own_text(model, request)
                seen.add((adapter, tuple(request.output)))
    assert len(seen) == 4 == len({text for _, text in seen})


def test_layers_of_whole_numbers_keep_them(tiny_llama):
    base = to_int8(tiny_llama(dtype=torch.float32)).layers[1].mlp.down_proj
    model = with_adapters(to_int8(tiny_llama(dtype=torch.float32)))
    layer = model.layers[1].mlp.down_proj
    a, b = random_pairs(model, LINEAR, seed=1)["layers.1.mlp.down_proj.weight"]
    x = torch.randn(5, 24)
    with use_adapters(model, ["b", "", "a"], [range(1), range(1, 4), range(4, 5)]):
        found = layer(x)
    assert torch.equal(found[1:4], base(x)[1:4])
    assert (found[0] - base(x)[0] - b.float() @ (a.float() @ x[0])).abs().max() < 1e-4
    assert not torch.equal(found[4], base(x)[4])
    assert torch.equal(layer(x), base(x))  # it is over


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_outputs_in_c_are_those_of_torch(build, compiled, tmp_path, dtype):
    save_model(build(dtype=torch.float32), tmp_path)
    model = load_model(tmp_path, dtype)
    use_native(model)
    with_adapters(model)
    whole = load_model(tmp_path, dtype)
    plain = with_adapters(whole.float() if dtype == torch.float16 else whole)
    engine, _ = make_engine(model, [], [], page_size=4)
    params = SamplingParams(6, ignore_eos=True)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 4)]
    requests = [engine.add(prompt, params, "", name) for prompt, name in zip(prompts, NAMES)]
    finish(engine)
    check_own(plain, requests)


def test_a_failed_pass_leaves_no_adapter(tiny):
    model = with_adapters(tiny())
    tokens = torch.tensor([random_tokens(5)])
    before = model(tokens)

    def fail(module, args):
        raise MemoryError

    hook = model.h[1].register_forward_pre_hook(fail)
    engine, _ = make_engine(model, [], [], page_size=4)
    engine.add([1, 2, 3], params_of(4, 1), "", "a")
    (event,) = engine.step()
    assert event.finish_reason == "error"
    hook.remove()
    check_pages(engine)
    assert torch.equal(model(tokens), before)
    request = engine.add([1, 2, 3], params_of(4, 1), "", "a")
    finish(engine)
    check_own(model, [request])


# In C


def logits_of(model, adapter: str) -> torch.Tensor:
    """The logits at the last position of a sequence, from passes of 5, 1 and 1 tokens."""
    tokens = random_tokens(7)
    cache = KVCache(model, 1, len(tokens))
    for end in (5, 6, 7):
        logits = next_logits(model, [tokens[:end]], cache, adapter=adapter)
    return logits[0, 0]


def check_near(model, exact, names) -> None:
    for name in names:
        expected = logits_of(exact, name)
        assert (logits_of(model, name) - expected).abs().max() < 1e-4 * expected.abs().max()


@EACH_FAMILY
@torch.inference_mode()
def test_logits_are_those_of_float64(request, compiled, kind):
    build = family(request, kind)
    exact = with_adapters(build(), targets_of(kind))
    model = with_adapters(native(build().float()), targets_of(kind))
    check_near(model, exact, NAMES)
    assert (logits_of(exact, "") - logits_of(exact, "a")).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@torch.inference_mode()
def test_the_same_bits_at_any_number_of_threads_and_on_every_processor(tiny_llama, compiled, dtype):
    base = tiny_llama(dtype=torch.float32, n_embd=66, n_inner=72)
    model = with_adapters(native_in_dtype(copy.deepcopy(base), dtype))
    expected = [logits_of(model, name) for name in NAMES]
    for count in (2, 5):
        with threads(count):
            found = [logits_of(model, name) for name in NAMES]
        assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])
    for target in TARGETS if dtype == torch.int8 else ():
        other = with_adapters(native(to_int8(copy.deepcopy(base)), target))
        assert all(
            torch.equal(*pair) for pair in zip([logits_of(other, n) for n in NAMES], expected)
        )


@torch.inference_mode()
def test_adapters_of_other_layers_take_the_place_of_earlier_ones(tiny_llama, compiled):
    """One leaves alone what another changes; a layer that the new ones leave keeps nothing."""
    exact = tiny_llama()
    model = native(tiny_llama().float())
    before = logits_of(model, "")
    for targets in (
        {"a": ("q_proj", "v_proj")},
        {"c": ("k_proj",), "d": ("v_proj", "up_proj"), "e": ("down_proj",)},
        {},
    ):
        for each in (exact, model):
            pairs = {name: random_pairs(each, own) for name, own in targets.items()}
            each.adapters = Adapters(each, pairs)
        check_near(model, exact, ("", *targets))
    model.adapters = None
    assert torch.equal(logits_of(model, ""), before)


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3Moe"])
@pytest.mark.parametrize("change", ["native", "to_int8", "both"])
def test_adapters_stay_where_layers_are_replaced(request, compiled, kind, change):
    changes = {"native": native, "to_int8": to_int8, "both": lambda model: native(to_int8(model))}
    build = family(request, kind)
    targets = targets_of(kind)
    models = [
        changes[change](with_adapters(build(dtype=torch.float32), targets)),
        with_adapters(changes[change](build(dtype=torch.float32)), targets),
    ]
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19)]
    for use_cache in (True, False):
        outputs = []
        for name in NAMES:
            options = {"adapter": name, "use_cache": use_cache}
            params = {"max_new_tokens": 9, "ignore_eos": True, "options": options}
            found, expected = [run_rows(model, prompts, **params) for model in models]
            assert found == expected and found not in outputs
            outputs.append(found)


def test_adapters_of_a_model_of_16_bits_become_those_of_a_native_one(tiny_llama, compiled):
    model = native(with_adapters(tiny_llama(dtype=torch.float16)))
    for own in model.adapters.layers.values():
        assert {each.dtype for pair in own.values() for each in pair} == {torch.float32}
    params = {"max_new_tokens": 9, "ignore_eos": True}
    cached, other = (
        run_rows(model, [[1, 2, 3]], options={"adapter": "a", "use_cache": use_cache}, **params)
        for use_cache in (True, False)
    )
    assert cached == other


# What is refused, and the command line


def test_unknown_names_and_layers_that_are_only_merged_are_refused(tiny, tiny_llama, tiny_experts):
    model = with_adapters(tiny())
    engine, _ = make_engine(model, [], [])
    expected = "adapter 'c': must be one of: a, b"
    assert refused(engine.add, [1], params_of(1, 1), "", "c") == expected
    assert refused(list, generate(model, [[1]], params_of(1, 1), adapter="c")) == expected
    engine, _ = make_engine(tiny(), [], [])
    expected = "adapter 'a' is unknown: the model has no adapters"
    assert refused(engine.add, [1], params_of(1, 1), "", "a") == expected
    message = refused(with_adapters, tiny_llama(), ("q_proj", "lm_head"))
    assert message == "adapter 'a' changes lm_head: merge it with --adapter"
    message = refused(with_adapters, tiny_experts(), ("up_proj",))
    assert message.startswith("adapter 'a' changes layers.0.mlp.experts.0.up_proj: merge")


def test_the_command_line_writes_each_output(engine_cli, cli):
    own = ["--max-new-tokens", 30, "--temperature", 0.7, "--seed", 3]
    results = [
        engine_cli(*WORDS, *own, "--lora-modules", f"frogs={FROGS}"),
        cli(*WORDS, *own),
        cli(*WORDS, *own, "--adapter", FROGS),
    ]
    outputs, base, frogs = (out.rstrip("\n").split(f"\n{'-' * 40}\n") for _, out, _ in results)
    assert "frog" in frogs[0] and outputs == [base[0], frogs[0], base[1], frogs[1]]


def test_options_that_are_refused(engine_cli, tiny_llama, tmp_path):
    given = f"a={FROGS}"
    for words, expected in (
        (["frogs"], "--lora-modules frogs: must be NAME=DIR"),
        (["=x"], "--lora-modules =x: must be NAME=DIR"),
        (["a="], "--lora-modules a=: must be NAME=DIR"),
        ([given, given], f"--lora-modules {given}: name a occurs twice"),
        (["a=nowhere"], "nowhere/adapter_config.json: No such file or directory"),
    ):
        assert is_one_line(engine_cli(*WORDS, "--lora-modules", *words), expected)
        for_each = [word for each in words for word in ("--lora-modules", each)]
        assert is_one_line(engine_cli(*WORDS, *for_each), expected)
    chat = ["--model", LLAMA, "--chat", "--lora-modules", given]
    assert is_one_line(engine_cli(*chat), "--lora-modules requires --prompt or --prompt-file")
    model = save_speaking(tiny_llama, tmp_path)
    head = save_adapter(tmp_path / "a", random_tensors(load_model(model), ("lm_head",)))
    result = engine_cli("--model", model, "--prompt", "Tom", "--lora-modules", f"x={head}")
    assert is_one_line(result, "adapter 'x' changes lm_head: merge it")


def test_several_processes_take_merged_ones_only(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "load_models", None)
    words = [*WORDS, "--lora-modules", f"frogs={FROGS}"]
    assert 2 in wait(start(2, script, tmp_path, infer_engine.main, words))
    (out, err), _ = written(tmp_path, 2)
    end = "error: --lora-modules requires a single process; with several use --adapter\n"
    assert out == "" and err.endswith(end)
