"""Lesson 20: speculation against its cached target, in turns, and no timing of wrong results."""

import pytest
import torch
from benches import Bench, near, save_endless


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    return save_endless(tiny, tmp_path_factory.mktemp("models"))


@pytest.fixture
def bench(request, checkpoint):
    """The model is its own draft."""
    import benchmark_speculative as script

    small = ("--prompts", 2, "--repeats", 2, "--max-new-tokens", 12)
    return Bench(request, script, "--target", checkpoint, "--draft", checkpoint, *small)


def test_a_row_for_each_run_in_turns(bench):
    bench.draws = True
    rows = bench.rows("--gamma", 2, 4, 2, "--temperature", 0, 0.8, 0.80001, 0)
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
    summary = bench.summary
    assert len(summary) == 9
    assert set(summary[summary["mode"] == "target"]["speedup_median"]) == {1}
    assert len(bench.figures[0].axes) == 1
    fits = ("--max-new-tokens", 56, "--gamma", 2, "--repeats", 1, "--temperature", 0)
    assert bench(*fits)[0] == 0


def test_time_is_that_of_the_passes_and_the_target_has_a_cache(bench, clock, tiny, tmp_path):
    rows = bench.rows("--gamma", 3, "--temperature", 0)
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
    rows = bench.rows("--draft", other, "--gamma", 2, "--temperature", 0)
    assert set(rows["draft"]) == {str(other)} and rows["acceptance"].max() < 1


def test_draws_have_one_seed_for_all_modes_and_another_for_each_run(bench):
    generators = []
    warm_up = []

    def recorded(passes, *args):
        generators.extend(args[5:])
        if args[3].temperature and not generators:
            warm_up.append(args[4])
        return passes(*args)

    bench.change("passes", recorded)
    bench("--gamma", 2, "--temperature", 0.8)
    assert warm_up == [0, 2]  # each mode, before anything is timed
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4
    for generator in generators:  # each was drawn from
        fresh = torch.Generator().manual_seed(generator.initial_seed())
        assert not generator.get_state().equal(fresh.get_state())


def test_memory_is_of_one_greedy_run(bench):
    bench("--gamma", 2, "--repeats", 1, "--temperature", 0)
    (_, imports, function, *alone), (*_, gamma) = bench.memory_jobs
    assert (imports, function) == ([], bench.script.run_once)
    assert (alone[-1], gamma) == (0, 2)
    loaded = bench.spy("load_model")
    ran = bench.spy("passes")
    function(*alone)
    assert len(loaded) == 1  # no second model resident
    function(*alone[:-1], 2)
    assert len(loaded) == 3 and [params.max_new_tokens for _, _, _, params, *_ in ran] == [12, 12]


@pytest.mark.parametrize("last", [False, True])
def test_wrong_text_is_not_timed(bench, last):
    prompts = []

    def wrong(generate, target, draft, prompt, *args):
        prompts.append(prompt)
        spoil = not last or prompt != prompts[0]
        for item in generate(target, draft, prompt, *args):
            yield item._replace(tokens=[7] * len(item.tokens)) if spoil else item

    bench.change("generate_speculative", wrong)
    bench.stops("generate different tokens", "--gamma", 2)


def test_half_precision_is_checked_by_its_logits(bench, monkeypatch):
    script = bench.script
    checked = bench.spy("check_half_precision", of=script.common)
    greedy = ("--dtype", "bfloat16", "--temperature", 0)
    assert list(bench.rows(*greedy, "--gamma", 2, 4)["dtype"]) == 12 * ["bfloat16"]
    found = [(model.dtype, tokens.shape, pass_size) for model, tokens, pass_size in checked]
    assert found == [(torch.bfloat16, (1, length + 12), 5) for length in (4, 8)]
    other = [script.SpeculativeStep([7] * 6, [7] * 5, 5)] * 2  # rounding may well change the text
    monkeypatch.setattr(script, "generate_speculative", lambda *_: iter(other))
    assert bench(*greedy, "--gamma", 2, "--repeats", 1, "--prompts", 1)[0] == 0
