"""Lesson 18: speculation against its cached target, in turns, and no timing of wrong results."""

import pandas
import pytest
import torch
from conftest import save_speaking
from matplotlib.figure import Figure

from model import GPT


def test_help_names_its_options(run_file):
    code, out = run_file("benchmark_speculative.py", "--help")
    assert code == 0 and "--gamma" in out and "acceptance" in out and "speculative_cpu.csv" in out


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """A model in which each token is an EOS, so a run that does not ignore EOS ends after one."""
    return save_speaking(tiny, tmp_path_factory.mktemp("models"), eos_token_ids=tuple(range(4096)))


@pytest.fixture
def bench(checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on that model as its own draft: exit code, the rows, stderr."""
    import benchmark_speculative as script

    alone = []  # what would have run in a process of its own, which takes seconds
    monkeypatch.setattr(script.common, "in_own_process", lambda *job: alone.append(job) or 1e6 * len(alone))
    monkeypatch.setattr(script.common, "bandwidth", lambda *_: 1e9)

    def run(*args):
        output = tmp_path / "run.csv"
        pair = ("--target", checkpoint, "--draft", checkpoint, "--output", output)
        code, _, err = run_main(script.main, *pair, "--prompts", 2, "--repeats", 2, "--max-new-tokens", 12, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    run.alone, run.plot = alone, script.plot
    monkeypatch.setattr(script, "plot", lambda summary: Figure())  # the real one takes a while
    return run


def test_a_row_for_each_run_in_turns(bench, tmp_path, monkeypatch):
    import benchmark_speculative

    figures = []
    monkeypatch.setattr(benchmark_speculative, "plot", lambda table: figures.append(bench.plot(table)) or figures[0])
    code, rows, _ = bench("--gamma", 2, 4, 2, "--temperature", 0, 0.8, 0.80001, 0)
    assert code == 0 and len(rows) == 3 * 2 * 2 * 3  # temperatures, repeats, prompts, modes: each value once
    assert list(rows["mode"][:6]) == ["target", "gamma 2", "gamma 4"] * 2
    assert list(rows["prompt"][:12]) == [0, 0, 0, 1, 1, 1] * 2 and list(rows["repeat"][:12]) == 6 * [0] + 6 * [1]
    assert set(rows["new_tokens"]) == {12} and set(rows["batch_size"]) == {1}
    assert set(rows["temperature"]) == {0, 0.8, 0.80001} and set(rows["prompt_tokens"]) == {4, 8}
    assert rows["draft"].equals(rows["model"]) and rows["parameters"][0] == 4096 * 16 + 64 * 16 + 6592
    alone, drafted = rows[rows["mode"] == "target"], rows[rows["mode"] != "target"]
    assert alone["roofline_share"].notna().all() and alone[["acceptance", "tokens_per_pass"]].isna().all(axis=None)
    assert drafted["roofline_share"].isna().all()
    assert list(rows["peak_memory_mb"][:3]) == [1, 2, 3]  # millions of bytes, of each mode
    summary = pandas.read_csv(tmp_path / "run_summary.csv")
    assert len(summary) == 9 and (summary[summary["mode"] == "target"]["speedup_median"] == 1).all()
    labels = figures[0].axes[0].get_legend_handles_labels()[1]
    assert labels[1:] == [f"float32, 12 tokens, temperature {value}" for value in (0.0, 0.8, 0.80001)]
    assert (tmp_path / "run.png").stat().st_size > 5000


def test_time_is_that_of_the_passes_and_the_target_has_a_cache(bench, clock):
    code, rows, _ = bench("--gamma", 3, "--temperature", 0)
    alone, drafted = rows.iloc[0], rows.iloc[1]
    assert code == 0 and alone["first_token_s"] == 4 and alone["decode_tokens_per_s"] == 1  # a position a token
    # The draft is the target, so a pass makes 4 tokens. The first takes 4 + 1 + 1 positions to draft, 4 + 3 to verify;
    # each other 2 + 1 + 1, since the draft has not yet seen its third proposal, and 4.
    assert drafted["first_token_s"] == 13 and drafted["decode_tokens_per_s"] == pytest.approx((12 - 4) / 16, rel=1e-3)
    assert drafted["acceptance"] == 1 and drafted["tokens_per_pass"] == 4


def test_the_draft_is_another_model(bench, tiny, tmp_path):
    other = tmp_path / "other"
    tiny(1, torch.float32, vocab_size=4096, block_size=64, eos_token_ids=tuple(range(4096))).save_pretrained(other)
    _, rows, _ = bench("--draft", other, "--gamma", 2, "--temperature", 0)
    assert set(rows["draft"]) == {str(other)} and rows["acceptance"].max() < 1


def test_draws_have_one_seed_for_all_modes_and_another_for_each_run(bench, monkeypatch):
    import benchmark_speculative

    generators, warm_up, passes = [], [], benchmark_speculative.passes

    def recorded(*args):
        generators.extend(args[5:])
        if args[3].temperature and not generators:
            warm_up.append(args[4])
        return passes(*args)

    monkeypatch.setattr(benchmark_speculative, "passes", recorded)
    bench("--gamma", 2, "--temperature", 0.8)
    assert warm_up == [0, 2]  # each mode, before anything is timed
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4
    for generator in generators:  # each was drawn from
        assert not generator.get_state().equal(torch.Generator().manual_seed(generator.initial_seed()).get_state())


def test_memory_is_of_one_greedy_run(bench, checkpoint, monkeypatch):
    import benchmark_speculative

    bench("--gamma", 2, "--repeats", 1, "--temperature", 0)
    (_, imports, function, *alone), (*_, gamma) = bench.alone
    assert imports == [] and function is benchmark_speculative.run_once and alone[-1] == 0 and gamma == 2
    loaded, counts, load, passes = [], [], GPT.from_pretrained, benchmark_speculative.passes
    monkeypatch.setattr(GPT, "from_pretrained", lambda *args: loaded.append(args) or load(*args))
    monkeypatch.setattr(benchmark_speculative, "passes", lambda *args: counts.append(x := list(passes(*args))) or x)
    function(*alone)
    assert len(loaded) == 1  # no second model resident
    function(*alone[:-1], 2)
    assert len(loaded) == 3 and [sum(len(item.tokens) for item in items) for items in counts] == [12, 12]


@pytest.mark.parametrize("finished", [1, 5])
def test_ctrl_c_leaves_the_finished_rows(bench, tmp_path, monkeypatch, finished):
    import benchmark_speculative

    timed, count = benchmark_speculative.common.timed, []

    def interrupted(*args):
        count.append(1)
        if len(count) > finished:
            raise KeyboardInterrupt
        return timed(*args)

    monkeypatch.setattr(benchmark_speculative.common, "timed", interrupted)
    monkeypatch.setattr(benchmark_speculative, "plot", bench.plot)
    code, rows, err = bench("--gamma", 2)
    assert code == 130 and len(rows) == finished and (tmp_path / "run.png").exists() and "Traceback" not in err


@pytest.mark.parametrize("last", [False, True])
def test_wrong_text_is_not_timed(bench, monkeypatch, last):
    import benchmark_speculative

    generate, calls = benchmark_speculative.generate_speculative, []

    def wrong(target, draft, prompt, *args):
        calls.append(prompt)
        for item in generate(target, draft, prompt, *args):
            yield item._replace(tokens=[7] * len(item.tokens)) if not last or prompt != calls[0] else item

    monkeypatch.setattr(benchmark_speculative, "generate_speculative", wrong)
    code, rows, _ = bench("--gamma", 2)
    assert "not generate the target's text" in code and rows is None


def test_half_precision_is_checked_by_its_logits(bench, monkeypatch):
    import benchmark_speculative

    checked, check = [], benchmark_speculative.common.check_half_precision

    def recorded(model, tokens, piece):
        checked.append((model.dtype, tokens.shape, piece))
        check(model, tokens, piece)

    monkeypatch.setattr(benchmark_speculative.common, "check_half_precision", recorded)
    code, rows, _ = bench("--dtype", "bfloat16", "--gamma", 2, 4, "--temperature", 0)
    assert code == 0 and len(rows) == 12 and set(rows["dtype"]) == {"bfloat16"}
    assert checked == [(torch.bfloat16, (1, 4 + 12), 5), (torch.bfloat16, (1, 8 + 12), 5)]
    other = [benchmark_speculative.Pass([7] * 6, [7] * 5, 5)] * 2  # rounding may well change the text
    monkeypatch.setattr(benchmark_speculative, "generate_speculative", lambda *_: iter(other))
    assert bench("--dtype", "bfloat16", "--gamma", 2, "--temperature", 0, "--repeats", 1, "--prompts", 1)[0] == 0


@pytest.mark.parametrize(
    "args, said",
    [
        (("--gamma", 17), "from 1 to 16"),
        (("--gamma", 0), "from 1 to 16"),
        (("--target", "random:gpt2"), "random:gpt2: a random model"),
        (("--draft", "random:gpt2"), "random:gpt2: a random model"),
        (("--max-new-tokens", 9, "--gamma", 2, 4), "--max-new-tokens 9: two passes may make 10"),
        (("--max-new-tokens", 20, 9, "--gamma", 4, 2), "--max-new-tokens 9: two passes may make 10"),
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
    assert code == 2 and said in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_the_longest_text_that_fits_runs(bench):
    assert bench("--max-new-tokens", 56, "--gamma", 2, "--repeats", 1, "--temperature", 0)[0] == 0
