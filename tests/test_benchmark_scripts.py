"""The cache and drafts, timed in turns, and no timing of wrong results."""

import json

import pytest
import torch
from benches import Bench, near, save_endless
from draft_heads import head_of

import benchmark_kv_cache
import benchmark_speculative
from loading.draft_head import save_draft_head
from loading.load import load_model


@pytest.fixture
def bench(request, checkpoint):
    small = ("--repeats", 2, "--max-new-tokens", 6, 9, "--prompt-tokens", 5)
    return Bench(request, benchmark_kv_cache, "--model", checkpoint, *small)


def test_a_row_for_each_run_of_each_mode(bench):
    bench.draws = True
    rows = bench.rows("--batch-size", 1, 3, 1, "--max-new-tokens", 6, 59, 6)  # 59 fit
    # Batch sizes, lengths, repeats, modes: each value once.
    assert list(rows["mode"]) == ["cache", "no cache", "transformers"] * 8  # in turns
    assert rows["library"].notna().equals(rows["mode"] == "transformers")
    assert list(rows["repeat"][:6]) == [0, 0, 0, 1, 1, 1]
    assert list(rows["new_tokens"][:12]) == 6 * [6] + 6 * [59]
    assert list(rows["batch_size"]) == 12 * [1] + 12 * [3]
    assert (set(rows["prompt_tokens"]), set(rows["temperature"])) == ({5}, {0})
    assert rows["draft"].isna().all()
    assert rows["roofline_share"].notna().equals(rows["mode"] != "no cache")
    assert list(rows["peak_memory_mb"][:3]) == [1, 2, 3]  # millions of bytes, of each mode
    assert [job[1] for job in bench.memory_jobs[:3]] == [[], [], bench.script.TRANSFORMERS_IMPORTS]
    summary = bench.summary
    assert len(summary) == 12
    assert set(summary[summary["mode"] == "no cache"]["speedup_median"]) == {1}
    assert len(bench.figures[0].axes) == 2
    prompts = bench.memory_jobs[-1][-2]
    assert [len(prompt) for prompt in prompts] == [5] * 3 and prompts[0] != prompts[1]
    bench("--modes", "cache", "--batch-size", 3)
    assert bench.memory_jobs[-1][-2] == prompts  # the same in each run


def test_time_is_that_of_the_passes_each_mode_needs(bench, clock, monkeypatch):
    from transformers import GPT2Model

    forward = GPT2Model.forward

    def timed(self, input_ids, **options):
        clock[0] += input_ids.numel()
        return forward(self, input_ids, **options)

    monkeypatch.setattr(GPT2Model, "forward", timed)
    rows = bench.rows("--batch-size", 3, "--max-new-tokens", 5, "--repeats", 1)
    by_mode = rows.set_index("mode")
    assert set(by_mode["first_token_s"]) == {3 * 5}  # each prefills three prompts of 5
    rates = by_mode["decode_tokens_per_s"]
    assert rates["cache"] == 1 == rates["transformers"]
    assert set(by_mode["prefill_tokens_per_s"]) == {1}
    seconds = by_mode["inter_token_s"]  # a step computes three texts
    assert seconds["cache"] == 3 == seconds["transformers"]
    assert seconds["no cache"] == near(3 * (6 + 7 + 8 + 9) / 4)
    assert rates["no cache"] == near(4 / (6 + 7 + 8 + 9))


def test_half_precision_holds_the_reference_to_our_logits_in_each_row(bench):
    checked = bench.spy("check_half_precision", of=bench.script.common)
    rows = bench.rows("--dtype", "bfloat16", "--batch-size", 2, "--max-new-tokens", 6)
    assert list(rows["dtype"]) == 6 * ["bfloat16"]
    ((model, tokens, reference),) = checked
    assert model.dtype == torch.bfloat16 and tokens.shape == (2, 5 + 5)
    assert reference(torch.zeros(1, 4, dtype=int)).shape == (1, 4, 61)
    bench.rows("--dtype", "bfloat16", "--modes", "cache")
    assert checked[-1][2] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_texts_that_differ_at_the_end_are_not_timed(bench, dtype):
    def wrong(generate, *args, use_cache):
        *steps, last = generate(*args, use_cache=use_cache)
        if use_cache:
            return [*steps, last]
        return steps if dtype == "bfloat16" else [*steps, [60 - token for token in last]]

    bench.change("generate", wrong)
    bench.stops("generate different tokens", "--modes", "cache", "no cache", "--dtype", dtype)


def test_a_profile_is_of_the_first_setting_and_changes_no_row(bench, tmp_path):
    profiled = bench.spy("profile", of=bench.script.common)
    file = tmp_path / "trace.json"
    asked = ("--modes", "no cache", "cache", "--batch-size", 2, 1, "--max-new-tokens", 9, 6)
    rows = bench.rows(*asked, "--profile", file, says=f"profile: {file}, {tmp_path / 'trace.txt'}")
    assert len(rows) == 2 * 2 * 2 * 2
    ((_, _, function, mode, _, prompts, steps, _),) = profiled
    assert function is bench.script.run
    assert (mode, len(prompts), steps) == ("cache", 2, 8)
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    # Two layers of four products in each step, and a head.
    assert names.count("aten::scaled_dot_product_attention") == 8 * 2
    assert "aten::addmm" in (tmp_path / "trace.txt").read_text()
    ran = []  # memory is of one run
    bench.change("load", lambda load, mode, *_: mode)
    bench.change("run", lambda run, *arguments: ran.append(arguments))
    _, _, function, *arguments = bench.memory_jobs[0]
    function(*arguments)
    assert ran == [("cache", "cache", prompts, 9, "cpu")]


def test_without_transformers_its_rows_are_missing_and_it_says_so(bench):
    bench.installed(transformers=False)
    rows = bench.rows(says="transformers is not installed")
    assert set(rows["mode"]) == {"cache", "no cache"}
    assert "not installed" not in bench("--modes", "cache")[2]
    code, _, err = bench("--modes", "transformers")
    assert code == 2 and "nothing else to run" in err


# Drafts.


@pytest.fixture(scope="module")
def endless(tiny, tmp_path_factory):
    return save_endless(tiny, tmp_path_factory.mktemp("models"))


@pytest.fixture
def drafts(request, endless):
    small = ("--prompts", 2, "--repeats", 2, "--max-new-tokens", 12)
    return Bench(request, benchmark_speculative, "--target", endless, "--draft", endless, *small)


def test_a_draft_head(drafts, endless, tmp_path):
    save_draft_head(head_of(load_model(endless)), tmp_path)
    rows = drafts.rows("--draft", tmp_path, "--gamma", 2)
    drafted = rows[rows["mode"] == "gamma 2"]
    assert len(drafted) == 8 and drafted["acceptance"].between(0, 0.9).all()


def test_a_row_for_each_run_with_drafts(drafts):
    drafts.draws = True
    rows = drafts.rows("--gamma", 2, 4, 2, "--temperature", 0, 0.8, 0.80001, 0)
    # Temperatures, repeats, prompts, modes: each value once.
    assert list(rows["mode"]) == ["target", "gamma 2", "gamma 4"] * 12
    assert list(rows["prompt"][:12]) == [0, 0, 0, 1, 1, 1] * 2
    assert list(rows["repeat"][:12]) == 6 * [0] + 6 * [1]
    known = {"new_tokens": {12}, "batch_size": {1}, "prompt_tokens": {4, 8}}
    known["temperature"] = {0, 0.8, 0.80001}
    assert {column: set(rows[column]) for column in known} == known
    assert rows["draft"].equals(rows["model"])
    alone = rows[rows["mode"] == "target"]
    drafted = rows[rows["mode"] != "target"]
    assert alone[["roofline_share", "prefill_tokens_per_s"]].notna().all(axis=None)
    assert alone[["acceptance", "tokens_per_pass"]].isna().all(axis=None)
    assert drafted[["roofline_share", "prefill_tokens_per_s"]].isna().all(axis=None)
    assert list(rows["peak_memory_mb"][:3]) == [1, 2, 3]  # millions of bytes, of each mode
    summary = drafts.summary
    assert len(summary) == 9
    assert set(summary[summary["mode"] == "target"]["speedup_median"]) == {1}
    assert len(drafts.figures[0].axes) == 1
    fits = ("--max-new-tokens", 56, "--gamma", 2, "--repeats", 1, "--temperature", 0)
    assert drafts(*fits)[0] == 0


def test_time_with_drafts_is_that_of_the_passes(drafts, clock, tiny, tmp_path):
    rows = drafts.rows("--gamma", 3, "--temperature", 0)
    alone, drafted = rows.iloc[0], rows.iloc[1]
    assert alone["first_token_s"] == 4 and alone["prefill_tokens_per_s"] == 1
    assert alone["decode_tokens_per_s"] == alone["inter_token_s"] == 1  # a position a token
    # The draft is the target, so a pass makes 4 tokens. The first takes 4 + 1 + 1 positions to
    # draft, 4 + 3 to verify; each other 2 + 1 + 1, since the draft has not yet seen its third
    # proposal, and 4.
    assert drafted["first_token_s"] == 13
    assert drafted["decode_tokens_per_s"] == near((12 - 4) / 16)
    assert drafted["inter_token_s"] == 16 / (12 - 4)
    assert (drafted["acceptance"], drafted["tokens_per_pass"]) == (1, 4)
    other = save_endless(tiny, tmp_path / "other", seed=1)
    rows = drafts.rows("--draft", other, "--gamma", 2, "--temperature", 0)
    assert set(rows["draft"]) == {str(other)} and rows["acceptance"].max() < 1


def test_draws_have_one_seed_for_all_modes_and_another_for_each_run(drafts):
    generators = []
    warm_up = []

    def recorded(passes, *args):
        generators.extend(args[5:])
        if args[3].temperature and not generators:
            warm_up.append(args[4])
        return passes(*args)

    drafts.change("passes", recorded)
    drafts("--gamma", 2, "--temperature", 0.8)
    assert warm_up == [0, 2]  # each mode, before anything is timed
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4
    for generator in generators:  # each was drawn from
        fresh = torch.Generator().manual_seed(generator.initial_seed())
        assert not generator.get_state().equal(fresh.get_state())


def test_memory_is_of_one_greedy_run(drafts):
    drafts("--gamma", 2, "--repeats", 1, "--temperature", 0)
    (_, imports, function, *alone), (*_, gamma) = drafts.memory_jobs
    assert (imports, function) == ([], drafts.script.run_once)
    assert (alone[-1], gamma) == (0, 2)
    loaded = drafts.spy("load_model")
    ran = drafts.spy("passes")
    function(*alone)
    assert len(loaded) == 1  # no second model resident
    function(*alone[:-1], 2)
    assert len(loaded) == 3 and [params.max_new_tokens for _, _, _, params, *_ in ran] == [12, 12]


@pytest.mark.parametrize("last", [False, True])
def test_wrong_text_is_not_timed(drafts, last):
    prompts = []

    def wrong(generate, target, draft, prompt, *args):
        prompts.append(prompt)
        spoil = not last or prompt != prompts[0]
        for item in generate(target, draft, prompt, *args):
            yield item._replace(tokens=[7] * len(item.tokens)) if spoil else item

    drafts.change("generate_speculative", wrong)
    drafts.stops("generate different tokens", "--gamma", 2)


def test_half_precision_is_checked_by_its_logits(drafts, monkeypatch):
    script = drafts.script
    checked = drafts.spy("check_half_precision", of=script.common)
    greedy = ("--dtype", "bfloat16", "--temperature", 0)
    assert list(drafts.rows(*greedy, "--gamma", 2, 4)["dtype"]) == 12 * ["bfloat16"]
    found = [(model.dtype, tokens.shape, pass_size) for model, tokens, pass_size in checked]
    assert found == [(torch.bfloat16, (1, length + 12), 5) for length in (4, 8)]
    other = [script.SpeculativeStep([7] * 6, [7] * 5, 5)] * 2  # rounding may well change the text
    monkeypatch.setattr(script, "generate_speculative", lambda *_: iter(other))
    assert drafts(*greedy, "--gamma", 2, "--repeats", 1, "--prompts", 1)[0] == 0
