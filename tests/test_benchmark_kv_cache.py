"""Lesson 21: three ways to the same tokens, timed apart; the reference may be missing."""

import json

import pytest
import torch
from benches import Bench, near


@pytest.fixture
def bench(request, checkpoint):
    import benchmark_kv_cache as script

    small = ("--repeats", 2, "--max-new-tokens", 6, 9, "--prompt-tokens", 5)
    return Bench(request, script, "--model", checkpoint, *small)


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
