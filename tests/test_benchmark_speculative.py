"""Lesson 18: speculation against its cached target, in turns, and no timing of wrong results."""

import pandas
import pytest
import torch
from conftest import save_speaking
from matplotlib.figure import Figure


def test_help_names_its_options(run_file):
    code, out = run_file("benchmark_speculative.py", "--help")
    assert code == 0
    assert "--gamma" in out and "acceptance" in out and "speculative_cpu.csv" in out


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """A model in which each token is an EOS, so a run that does not ignore EOS ends after one."""
    return save_speaking(tiny, tmp_path_factory.mktemp("models"), eos_token_ids=tuple(range(4096)))


@pytest.fixture
def bench(checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on that model as its own draft.

    It returns the exit code, the rows and stderr.
    """
    import benchmark_speculative as script

    alone = []  # what would have run in a process of its own, which takes seconds

    def in_own_process(*job):
        alone.append(job)
        return 1e6 * len(alone)

    monkeypatch.setattr(script.common, "in_own_process", in_own_process)
    monkeypatch.setattr(script.common, "bandwidth", lambda *_: 1e9)
    small = ("--prompts", 2, "--repeats", 2, "--max-new-tokens", 12)

    def run(*args):
        output = tmp_path / "run.csv"
        pair = ("--target", checkpoint, "--draft", checkpoint, "--output", output)
        code, _, err = run_main(script.main, *pair, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    run.alone = alone
    run.plot = script.plot
    monkeypatch.setattr(script, "plot", lambda summary: Figure())  # the real one takes a while
    return run


def test_a_row_for_each_run_in_turns(bench, tmp_path, monkeypatch):
    import benchmark_speculative as script

    figures = []

    def plot(summary):
        figures.append(bench.plot(summary))
        return figures[0]

    monkeypatch.setattr(script, "plot", plot)
    code, rows, _ = bench("--gamma", 2, 4, 2, "--temperature", 0, 0.8, 0.80001, 0)
    assert code == 0
    # Temperatures, repeats, prompts, modes: each value once.
    assert len(rows) == 3 * 2 * 2 * 3
    assert list(rows["mode"][:6]) == ["target", "gamma 2", "gamma 4"] * 2
    assert list(rows["prompt"][:12]) == [0, 0, 0, 1, 1, 1] * 2
    assert list(rows["repeat"][:12]) == 6 * [0] + 6 * [1]
    assert set(rows["new_tokens"]) == {12}
    assert set(rows["batch_size"]) == {1}
    assert set(rows["temperature"]) == {0, 0.8, 0.80001}
    assert set(rows["prompt_tokens"]) == {4, 8}
    assert rows["draft"].equals(rows["model"])
    assert rows["parameters"][0] == 4096 * 16 + 64 * 16 + 6592
    alone = rows[rows["mode"] == "target"]
    drafted = rows[rows["mode"] != "target"]
    assert alone["roofline_share"].notna().all()
    assert alone[["acceptance", "tokens_per_pass"]].isna().all(axis=None)
    assert drafted["roofline_share"].isna().all()
    assert list(rows["peak_memory_mb"][:3]) == [1, 2, 3]  # millions of bytes, of each mode
    summary = pandas.read_csv(tmp_path / "run_summary.csv")
    assert len(summary) == 9
    assert set(summary[summary["mode"] == "target"]["speedup_median"]) == {1}
    labels = figures[0].axes[0].get_legend_handles_labels()[1]
    assert labels[1:] == [f"float32, 12 tokens, temperature {t}" for t in (0.0, 0.8, 0.80001)]
    assert (tmp_path / "run.png").stat().st_size > 5000


def test_time_is_that_of_the_passes_and_the_target_has_a_cache(bench, clock):
    code, rows, _ = bench("--gamma", 3, "--temperature", 0)
    alone = rows.iloc[0]
    drafted = rows.iloc[1]
    assert code == 0
    assert alone["first_token_s"] == 4
    assert alone["decode_tokens_per_s"] == 1  # a position a token
    # The draft is the target, so a pass makes 4 tokens. The first takes 4 + 1 + 1 positions to
    # draft, 4 + 3 to verify; each other 2 + 1 + 1, since the draft has not yet seen its third
    # proposal, and 4.
    assert drafted["first_token_s"] == 13
    assert drafted["decode_tokens_per_s"] == pytest.approx((12 - 4) / 16, rel=1e-3)
    assert drafted["acceptance"] == 1
    assert drafted["tokens_per_pass"] == 4


def test_the_draft_is_another_model(bench, tiny, tmp_path):
    every = tuple(range(4096))
    other = save_speaking(tiny, tmp_path / "other", seed=1, eos_token_ids=every)
    _, rows, _ = bench("--draft", other, "--gamma", 2, "--temperature", 0)
    assert set(rows["draft"]) == {str(other)}
    assert rows["acceptance"].max() < 1


def test_draws_have_one_seed_for_all_modes_and_another_for_each_run(bench, monkeypatch):
    import benchmark_speculative as script

    generators = []
    warm_up = []
    passes = script.passes

    def recorded(*args):
        generators.extend(args[5:])
        if args[3].temperature and not generators:
            warm_up.append(args[4])
        return passes(*args)

    monkeypatch.setattr(script, "passes", recorded)
    bench("--gamma", 2, "--temperature", 0.8)
    assert warm_up == [0, 2]  # each mode, before anything is timed
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    for generator in generators:  # each was drawn from
        fresh = torch.Generator().manual_seed(generator.initial_seed())
        assert not generator.get_state().equal(fresh.get_state())


def test_memory_is_of_one_greedy_run(bench, monkeypatch):
    import benchmark_speculative as script

    bench("--gamma", 2, "--repeats", 1, "--temperature", 0)
    (_, imports, function, *alone), (*_, gamma) = bench.alone
    assert imports == []
    assert function is script.run_once
    assert (alone[-1], gamma) == (0, 2)
    loaded = []
    counts = []
    load_model = script.load_model
    passes = script.passes

    def recorded_load(*args):
        loaded.append(args)
        return load_model(*args)

    def recorded_passes(*args):
        items = list(passes(*args))
        counts.append(sum(len(item.tokens) for item in items))
        return items

    monkeypatch.setattr(script, "load_model", recorded_load)
    monkeypatch.setattr(script, "passes", recorded_passes)
    function(*alone)
    assert len(loaded) == 1  # no second model resident
    function(*alone[:-1], 2)
    assert len(loaded) == 3
    assert counts == [12, 12]


@pytest.mark.parametrize("finished", [1, 5])
def test_ctrl_c_leaves_the_finished_rows(bench, tmp_path, monkeypatch, finished):
    import benchmark_speculative as script

    timed = script.common.timed
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > finished:
            raise KeyboardInterrupt
        return timed(*args)

    monkeypatch.setattr(script.common, "timed", interrupted)
    monkeypatch.setattr(script, "plot", bench.plot)
    code, rows, err = bench("--gamma", 2)
    assert code == 130
    assert len(rows) == finished
    assert (tmp_path / "run.png").exists()
    assert "Traceback" not in err


@pytest.mark.parametrize("last", [False, True])
def test_wrong_text_is_not_timed(bench, monkeypatch, last):
    import benchmark_speculative as script

    generate = script.generate_speculative
    prompts = []

    def wrong(target, draft, prompt, *args):
        prompts.append(prompt)
        spoil = not last or prompt != prompts[0]
        for item in generate(target, draft, prompt, *args):
            yield item._replace(tokens=[7] * len(item.tokens)) if spoil else item

    monkeypatch.setattr(script, "generate_speculative", wrong)
    code, rows, _ = bench("--gamma", 2)
    assert "not generate the target's text" in code
    assert rows is None


def test_half_precision_is_checked_by_its_logits(bench, monkeypatch):
    import benchmark_speculative as script

    checked = []
    check = script.common.check_half_precision

    def recorded(model, tokens, piece):
        checked.append((model.dtype, tokens.shape, piece))
        check(model, tokens, piece)

    monkeypatch.setattr(script.common, "check_half_precision", recorded)
    greedy = ("--dtype", "bfloat16", "--temperature", 0)
    code, rows, _ = bench(*greedy, "--gamma", 2, 4)
    assert code == 0
    assert len(rows) == 12
    assert set(rows["dtype"]) == {"bfloat16"}
    assert checked == [(torch.bfloat16, (1, 4 + 12), 5), (torch.bfloat16, (1, 8 + 12), 5)]
    other = [script.Pass([7] * 6, [7] * 5, 5)] * 2  # rounding may well change the text
    monkeypatch.setattr(script, "generate_speculative", lambda *_: iter(other))
    assert bench(*greedy, "--gamma", 2, "--repeats", 1, "--prompts", 1)[0] == 0


@pytest.mark.parametrize(
    "args, said",
    [
        (("--gamma", 17), "from 1 to 16"),
        (("--gamma", 0), "from 1 to 16"),
        (("--target", "random:gpt2"), "random:gpt2: a random model"),
        (("--draft", "random:gpt2"), "random:gpt2: a random model"),
        (("--max-new-tokens", 9, "--gamma", 2, 4), "--max-new-tokens 9: two passes may make 10"),
        (
            ("--max-new-tokens", 20, 9, "--gamma", 4, 2),
            "--max-new-tokens 9: two passes may make 10",
        ),
        (("--max-new-tokens", 1), "--max-new-tokens"),
        (("--temperature", 0, -1), "temperature is -1"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--max-new-tokens", 12, 57), "65 tokens do not fit"),
        (("--prompts", 7), "from 1 to 6"),
        (("--target", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(bench, tmp_path, args, said):
    code, rows, err = bench(*args)
    assert code == 2
    assert said in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_longest_text_that_fits_runs(bench):
    greedy = ("--gamma", 2, "--repeats", 1, "--temperature", 0)
    assert bench("--max-new-tokens", 56, *greedy)[0] == 0
