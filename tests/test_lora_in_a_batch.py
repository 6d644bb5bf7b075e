"""Lesson 147: each request of a batch may have an adapter of its own."""

import random

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens, refused, run_rows, save_speaking
from engines import check_pages, finish, make_engine
from lora_files import (
    ATTENTION,
    LINEAR,
    NAMES,
    add_at_random,
    check_own,
    own_text,
    params_of,
    peft_adapter,
    random_pairs,
    random_tensors,
    save_adapter,
    with_adapters,
)
from ranks import script, start, wait, written

import infer_engine
from adapters import Adapters
from engine import options
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from infer import generate
from loading.load import load_model, save_model
from loading.lora import read_adapter
from native import use_native
from sampling import SamplingParams

LLAMA = CHECKPOINTS / "stories-llama"
FROGS = CHECKPOINTS / "stories-frogs"
WORDS = ["--model", LLAMA, "--prompt", "Once upon a time", "--prompt", "Tom"]


def merged_model(build, lora_weights, **options):
    """A random model with an adapter in its weights."""
    model = build(**options)
    for name, (a, b) in lora_weights.items():
        model.get_parameter(name).data += b.to(model.dtype) @ a.to(model.dtype)
    return model


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3"])
def test_rows_are_those_of_peft(peer, tmp_path, kind):
    """In peft adapter_names says which adapter each row of a batch has."""
    theirs, base = peer(kind, max_position_embeddings=40)
    theirs = peft_adapter(theirs, tmp_path / "a")
    theirs.load_adapter(tmp_path / "a", "b")
    generator = torch.Generator().manual_seed(2)
    for name, weight in theirs.named_parameters():
        if ".b.weight" in name:
            weight.data = weight.data.double().normal_(std=0.3, generator=generator)
    theirs.save_pretrained(tmp_path, selected_adapters=["b"])
    model = load_model(base, torch.float64)
    lora_weights = {"a": tmp_path / "a", "b": tmp_path / "b"}
    lora_weights = {
        name: read_adapter(directory, model) for name, directory in lora_weights.items()
    }
    model.adapters = Adapters(model, lora_weights)
    prompts = [random_tokens(9, seed=row) for row in range(3)] * 2
    names = ["", "a", "b", "a", "b", ""]
    their_names = {"": "__base__", "a": "default", "b": "b"}
    engine = Engine(model, page_size=4)
    params = SamplingParams(8, ignore_eos=True)
    requests = [engine.add(*pair, "", name) for *pair, name in zip(prompts, [params] * 6, names)]
    finish(engine)
    tokens = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(8):
            rows = theirs(tokens, adapter_names=[their_names[name] for name in names])
            tokens = torch.cat([tokens, rows.logits[:, -1:].argmax(-1)], dim=1)
    assert [request.tokens for request in requests] == tokens.tolist()
    assert len({tuple(request.output) for request in requests}) >= 3


@pytest.mark.parametrize("kind", ["tiny", "tiny_llama", "tiny_gemma", "tiny_windows"])
def test_a_run_is_that_of_the_merged_model(request, kind):
    build = request.getfixturevalue(kind)
    model = with_adapters(build())
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19)]
    params = {"max_new_tokens": 25, "ignore_eos": True}
    texts = []
    for seed, name in enumerate("ab"):
        merged = merged_model(build, random_pairs(model, LINEAR, seed))
        for use_cache in (True, False):
            options = {"adapter": name, "use_cache": use_cache}
            texts.append(run_rows(model, prompts, options=options, **params))
            assert texts[-1] == run_rows(merged, prompts, **params)
    base = run_rows(build(), prompts, **params)
    assert run_rows(model, prompts, **params) == base
    assert base not in texts and texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "kind, seed", [("tiny", 0), ("tiny_gemma", 1), ("tiny_llama", 2), ("tiny_experts", 0)]
)
def test_histories(request, kind, seed):
    chance = random.Random(seed)
    build = request.getfixturevalue(kind)
    experts = kind == "tiny_experts"
    model = with_adapters(build(), (*ATTENTION, "gate") if experts else LINEAR)
    options = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 9, "num_pages": 12}
    # A model that drafts has no adapters: what it proposes is checked by one that has.
    options["drafter"] = (None, PromptLookupDrafter(), PagedModelDrafter(build(), model))[seed]
    engine, _ = make_engine(model, [], [], **options)
    requests = add_at_random(engine, chance, NAMES, ("", "x"))
    assert engine.scheduler.prefix_cache_hits > 0 and engine.scheduler.num_preemptions > 0
    assert {request.adapter for request in requests} == set(NAMES)
    check_own(model, requests)


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
    """The base is rounded, what an adapter adds is not."""
    from natives import to_int8

    from adapters import use_adapters

    model = tiny_llama(dtype=torch.float32)
    base = to_int8(tiny_llama(dtype=torch.float32)).layers[1].mlp.down_proj
    model = with_adapters(to_int8(model))
    a, b = random_pairs(model, LINEAR, seed=1)["layers.1.mlp.down_proj.weight"]
    x = torch.randn(5, 24)
    with use_adapters(model, ["b", "", "a"], [range(1), range(1, 4), range(4, 5)]):
        found = model.layers[1].mlp.down_proj(x)
    assert torch.equal(found[1:4], base(x)[1:4])
    assert (found[0] - base(x)[0] - b.float() @ (a.float() @ x[0])).abs().max() < 1e-4
    assert not torch.equal(found[4], base(x)[4])
    assert torch.equal(model.layers[1].mlp.down_proj(x), base(x))  # it is over


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_products_in_c(build, compiled, tmp_path, dtype):
    save_model(build(dtype=torch.float32), tmp_path)
    native = load_model(tmp_path, dtype)
    use_native(native)
    with_adapters(native)
    whole = load_model(tmp_path, dtype).float() if dtype == torch.float16 else None
    plain = with_adapters(whole or load_model(tmp_path, dtype))
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 4)]
    engine, _ = make_engine(native, [], [], page_size=4)
    requests = [
        engine.add(prompt, SamplingParams(6, ignore_eos=True), "", name)
        for prompt, name in zip(prompts, NAMES)
    ]
    finish(engine)
    check_own(plain, requests)


def test_a_failed_pass_leaves_no_adapter(tiny):
    model = with_adapters(tiny())
    tokens = torch.tensor([random_tokens(5)])
    before = model(tokens)

    def fail(module, args):
        raise MemoryError

    hook = model.h[1].register_forward_pre_hook(fail)
    engine, requests = make_engine(model, [], [], page_size=4)
    request = engine.add([1, 2, 3], params_of(4, 1), "", "a")
    (event,) = engine.step()
    assert event.finish_reason == "error"
    hook.remove()
    check_pages(engine)
    assert torch.equal(model(tokens), before)
    request = engine.add([1, 2, 3], params_of(4, 1), "", "a")
    finish(engine)
    check_own(model, [request])


def test_unknown_names_are_refused(tiny):
    model = with_adapters(tiny())
    engine, _ = make_engine(model, [], [])
    expected = "adapter 'c': must be one of: a, b"
    assert refused(engine.add, [1], params_of(1, 1), "", "c") == expected
    assert refused(list, generate(model, [[1]], params_of(1, 1), adapter="c")) == expected
    engine, _ = make_engine(tiny(), [], [])
    expected = "adapter 'a' is unknown: the model has no adapters"
    assert refused(engine.add, [1], params_of(1, 1), "", "a") == expected


def test_heads_and_experts_are_only_merged(tiny_llama, tiny_experts):
    message = refused(with_adapters, tiny_llama(), ("q_proj", "lm_head"))
    assert message == "adapter 'a' changes lm_head: merge it with --adapter"
    message = refused(with_adapters, tiny_experts(), ("up_proj",))
    assert message.startswith("adapter 'a' changes layers.0.mlp.experts.0.up_proj: merge")


def test_the_command_line_writes_each_text(engine_cli, cli):
    own = ["--max-new-tokens", 30, "--temperature", 0.7, "--seed", 3]
    code, out, err = engine_cli(*WORDS, *own, "--lora-modules", f"frogs={FROGS}")
    assert code == 0 and "frog" in out, err
    texts = out.rstrip("\n").split("\n" + "-" * 40 + "\n")
    base = cli(*WORDS, *own)[1].rstrip("\n").split("\n" + "-" * 40 + "\n")
    frogs = cli(*WORDS, *own, "--adapter", FROGS)[1].rstrip("\n").split("\n" + "-" * 40 + "\n")
    assert texts == [base[0], frogs[0], base[1], frogs[1]]


def test_options_that_are_refused(engine_cli, tiny_llama, tmp_path):
    given = f"a={FROGS}"
    for words, *expected in (
        (["frogs"], "--lora-modules frogs: must be NAME=DIR"),
        (["=x"], "--lora-modules =x: must be NAME=DIR"),
        (["a="], "--lora-modules a=: must be NAME=DIR"),
        ([given, given], f"--lora-modules {given}: name a occurs twice"),
        (["a=nowhere"], "nowhere/adapter_config.json: No such file or directory"),
    ):
        assert is_one_line(engine_cli(*WORDS, "--lora-modules", *words), *expected)
        for_each = [word for each in words for word in ("--lora-modules", each)]
        assert is_one_line(engine_cli(*WORDS, *for_each), *expected)
    chat = ["--model", LLAMA, "--chat", "--lora-modules", given]
    assert is_one_line(engine_cli(*chat), "--lora-modules requires --prompt or --prompt-file")
    model = save_speaking(tiny_llama, tmp_path)
    head = save_adapter(tmp_path / "a", random_tensors(load_model(model), ("lm_head",)))
    result = engine_cli("--model", model, "--prompt", "Tom", "--lora-modules", f"x={head}")
    assert is_one_line(result, "adapter 'x' changes lm_head: merge it")


def test_several_processes_take_merged_ones_only(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "load_models", None)

    words = [*WORDS, "--lora-modules", f"frogs={FROGS}"]
    codes = wait(start(2, script, tmp_path, infer_engine.main, words))
    assert 2 in codes
    (out, err), _ = written(tmp_path, 2)
    assert out == "" and err.endswith(
        "error: --lora-modules requires a single process; with several use --adapter\n"
    )
