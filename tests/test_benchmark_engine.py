"""What the benchmark of the engine measures, on a clock that counts positions; the peer may be missing."""

import importlib.util

import pandas
import pytest
import torch
from conftest import save_speaking
from matplotlib.figure import Figure

from model import GPT

PARTS = ["throughput", "overhead", "prefix", "chunks", "queue", "waste", "speculation"]


def test_help_names_the_parts(run_file):
    code, out = run_file("benchmark_engine.py", "--help")
    assert code == 0 and "engine_cpu.csv" in out and "temperature" in out
    assert all(part + ":" in out.replace("\n", " ") for part in PARTS)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """A model in which each token is an EOS, so a run that does not ignore EOS ends after one."""
    return save_speaking(tiny, tmp_path_factory.mktemp("models"), eos_token_ids=tuple(range(4096)))


@pytest.fixture
def bench(checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on that model as its own draft: exit code, the rows, stderr."""
    import benchmark_engine as script

    have = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "transformers" and have(name))
    monkeypatch.setattr(script, "STEPS", 6)
    small = ["--requests", 5, "--rows", 2, 3, "--prompt-tokens", 2, 6, "--new-tokens", 3, 8, "--long-prompt", 20]
    small += ["--decoding", 2, "--waiting", 7, "--draft-rows", 1, 2, "--repeats", 2]

    def run(*args):
        output = tmp_path / "run.csv"
        pair = ("--model", checkpoint, "--draft", checkpoint, "--output", output)
        code, _, err = run_main(script.main, *pair, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    run.plot, run.have = script.plot, have
    monkeypatch.setattr(script, "plot", lambda summary: Figure())  # the real one takes a while
    return run


def values(rows, mode, repeat=0, size=None, temperature=0.0):
    """measure -> value of one run."""
    its = rows[(rows["mode"] == mode) & (rows["repeat"] == repeat) & (rows["temperature"] == temperature)]
    return dict(its[its["rows"] == (size or its["rows"].max())][["measure", "value"]].itertuples(index=False))


def near(value):
    return pytest.approx(value, rel=1e-3)  # four digits


def queue(count=5, new_tokens=(3, 8)):
    """The prompts of the queue, and how many tokens follow each."""
    import benchmark_engine as script

    class bench:
        args = type("args", (), {"prompt_tokens": [2, 6], "new_tokens": new_tokens})
        model = type("model", (), {"config": type("config", (), {"vocab_size": 4096})})

    prompts, params = script.requests(bench, count)
    return prompts, [its.max_new_tokens for its in params]


def test_all_parts_in_turns_with_summary_and_plot(bench, tmp_path, monkeypatch):
    import benchmark_engine

    figures = []
    monkeypatch.setattr(benchmark_engine, "plot", lambda table: figures.append(bench.plot(table)) or figures[0])
    code, rows, err = bench()
    assert code == 0 and list(dict.fromkeys(rows["part"])) == PARTS and list(rows) == list(benchmark_engine.COLUMNS)
    runs = rows[rows["part"] == "throughput"][["repeat", "mode", "rows"]].drop_duplicates().values.tolist()
    modes = [["one at a time", 1], ["static batches", 2], ["static batches", 3], ["engine", 2], ["engine", 3]]
    assert runs == [[repeat, *mode] for repeat in (0, 1) for mode in modes]
    runs = rows[rows["part"] == "speculation"][["repeat", "rows", "temperature", "mode"]].drop_duplicates()
    modes = ["engine", "look-up", "draft model"]
    drafted = [[repeat, size, t, mode] for repeat in (0, 1) for size in (1, 2) for t in (0, 0.8) for mode in modes]
    assert runs[runs["mode"] != "passes"].values.tolist() == drafted
    for part, count in {"overhead": 1, "prefix": 2, "chunks": 2, "queue": 2}.items():
        its = rows[rows["part"] == part][["repeat", "mode"]].drop_duplicates()
        assert list(its["repeat"]) == [0] * count + [1] * count and its["mode"].nunique() == count
    assert set(rows["parameters"]) == {4096 * 16 + 64 * 16 + 6592} and rows["draft"].equals(rows["model"])
    assert "without transformers: pip install transformers" in err
    summary = pandas.read_csv(tmp_path / "run_summary.csv")
    assert (summary["min"] <= summary["median"]).all() and (summary["median"] <= summary["max"]).all()
    assert set(summary[summary["part"] != "waste"]["runs"]) == {2}
    assert len(figures[0].axes) == 3 and (tmp_path / "run.png").stat().st_size > 5000
    names = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert names[::-1][:2] == ["one at a time", "static batches, 2 rows"]
    labels = figures[0].axes[2].get_legend_handles_labels()[1]
    assert {"look-up, temperature 0.8", "draft model, temperature 0.0"} <= set(labels)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_alone(bench, part, monkeypatch):
    import benchmark_engine

    monkeypatch.setattr(benchmark_engine, "plot", bench.plot)
    code, rows, _ = bench("--only", part, "--repeats", 1)
    assert code == 0 and set(rows["part"]) == {part} and (rows["draft"].notna() == (part == "speculation")).all()


def test_throughput_is_of_all_tokens_and_padding_costs(bench, clock):
    code, rows, _ = bench("--only", "throughput")
    prompts, news = queue()
    assert len(set(news)) > 1 and len(set(map(len, prompts))) > 1
    alone = sum(news) / sum(len(prompt) + new - 1 for prompt, new in zip(prompts, news))
    assert code == 0 and values(rows, "one at a time") == {"tokens/s": near(alone), "x one at a time": 1}
    spent = 0
    for first in range(0, 5, 2):  # a shorter prompt is padded, and all rows run to the longest text
        lengths, most = [len(prompt) for prompt in prompts[first : first + 2]], max(news[first : first + 2])
        spent += len(lengths) * (max(lengths) + most - 1)
    batches = values(rows, "static batches", size=2)
    assert batches["tokens/s"] == near(sum(news) / spent) and batches["x one at a time"] < 1
    assert batches["x static batches"] == 1
    for size in (2, 3):  # the engine computes nothing but what each text needs
        engine, batches = values(rows, "engine", 1, size), values(rows, "static batches", 1, size)
        assert engine["tokens/s"] == near(alone) and engine["x one at a time"] == 1
        assert engine["x static batches"] == near(alone / batches["tokens/s"])


@pytest.mark.parametrize("mode", ["in_engine", "in_batches"])
def test_different_tokens_are_not_timed(bench, monkeypatch, mode):
    import benchmark_engine as script

    right = getattr(script, mode)

    def wrong(model, rows, prompts, params):
        texts = right(model, rows, prompts, params)
        return texts if rows < 3 else texts[:-1] + [texts[-1][:-1] + [4095 - texts[-1][-1]]]

    monkeypatch.setattr(script, mode, wrong)
    code, rows, _ = bench("--only", "throughput")
    assert " rows: 1 of 5 texts have other tokens: no timing of wrong results" in str(code)
    assert 3 not in set(rows[rows["mode"] == {"in_engine": "engine", "in_batches": "static batches"}[mode]]["rows"])


def test_transformers_writes_the_same_texts(bench, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", bench.have)
    code, rows, err = bench("--only", "throughput", "--repeats", 1)
    assert code == 0 and "without" not in err
    assert set(values(rows, "transformers", size=3)) == {"tokens/s", "x one at a time", "x static batches"}


def test_transformers_that_cannot_run_is_named_and_left_out(bench, monkeypatch):
    import benchmark_engine as script

    def broken(*_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(importlib.util, "find_spec", bench.have)
    monkeypatch.setattr(script, "peer", broken)
    code, rows, err = bench("--only", "throughput", "--repeats", 1)
    assert code == 0 and "without transformers: RuntimeError: no such device\n" in err
    assert set(rows["mode"]) == {"one at a time", "static batches", "engine"}


def test_what_is_not_the_models_pass_is_the_engine(bench, clock, monkeypatch):
    from engine.cache import PagedCache
    from engine.engine import Engine
    from engine.scheduler import Scheduler

    def slow(method, seconds):
        def call(*args):
            clock[0] += seconds
            return method(*args)

        return call

    monkeypatch.setattr(Scheduler, "schedule", slow(Scheduler.schedule, 2))
    monkeypatch.setattr(PagedCache, "plan", slow(PagedCache.plan, 3))
    monkeypatch.setattr(Engine, "compute", slow(Engine.compute, 10))
    monkeypatch.setattr(GPT, "head", slow(GPT.head, 7))
    code, rows, _ = bench("--only", "overhead")
    assert code == 0 and values(rows, "engine", 1) == {
        "step, ms": 25_000,  # three rows, and what is above
        "share of the engine": 0.6,
        "share of scheduling": 0.08,
        "share of plans": 0.12,
        "share of choosing": 0.4,
    }


def test_shared_prefixes_are_computed_once(bench, clock):
    code, rows, _ = bench("--only", "prefix", "--rows", 16, "--long-prompt", 40)
    apart, shared = values(rows, "not shared", 1), values(rows, "shared", 1)
    # Each has 40 + 8 tokens, then 7 more. A step of 512 holds the first eleven; the others find two pages of 16.
    assert code == 0 and apart["positions computed"] == 16 * 55 and apart["s to all first tokens"] == 768 + 10
    assert shared["positions computed"] == 16 * 55 - 5 * 32
    assert shared["s to all first tokens"] == 768 + 10 - 5 * 32
    assert shared["x fewer positions"] == near(880 / 720) and shared["x as fast"] == near(778 / 618)
    assert apart["x fewer positions"] == 1 == apart["x as fast"]


def test_chunks_bound_the_gap(bench, clock):
    code, rows, _ = bench("--only", "chunks")
    small, whole = values(rows, "budget 4, in chunks"), values(rows, "budget 22, whole prompt")
    assert code == 0 and small["plain step, ms"] == 2000 == whole["plain step, ms"]
    assert small["longest gap, ms"] == 4000 and small["x plain step"] == 2
    assert small["first token of the prompt, ms"] == 10 * 4000  # two of its 20 tokens a step
    assert whole["longest gap, ms"] == 22_000 == whole["first token of the prompt, ms"] and whole["x plain step"] == 11


def test_the_queue_is_there_while_steps_are_timed(bench, clock, monkeypatch):
    from engine.engine import Engine

    step = Engine.step

    def slower_for_waiting(self):
        clock[0] += len(self.scheduler.waiting)
        return step(self)

    monkeypatch.setattr(Engine, "step", slower_for_waiting)
    code, rows, _ = bench("--only", "queue")
    assert code == 0 and values(rows, "0 waiting", 1) == {"step, ms": 2000, "x nobody waiting": 1}
    assert values(rows, "7 waiting", 1) == {"step, ms": 9000, "x nobody waiting": 4.5}


def test_waste_is_of_the_last_page_alone(bench):
    code, rows, _ = bench("--only", "waste", "--rows", 1, "--requests", 2, "--new-tokens", 20, 20)
    used = [len(prompt) + step for prompt in queue(2, (20, 20))[0] for step in range(19)]  # the last step ends it
    assert code == 0 and values(rows, "pages of 16") == {
        "unused positions a request, mean": near(sum(-length % 16 for length in used) / len(used)),
        "unused, most": 15,
    }
    assert values(rows, "a whole window each") == {
        "unused positions a request, mean": near(64 - sum(used) / len(used)),
        "unused, most": 64 - min(used),
    }


def test_a_prompt_on_its_way_into_its_pages_is_no_waste(bench):
    size = ("--rows", 20, "--requests", 20, "--prompt-tokens", 40, 40, "--new-tokens", 3, 3)  # a step takes 512
    code, rows, _ = bench("--only", "waste", *size)
    assert code == 0 and values(rows, "pages of 16")["unused, most"] == 48 - 40


def test_a_draft_that_is_the_model_is_always_right_and_the_cost_model_knows_it(bench, clock):
    code, rows, _ = bench("--only", "speculation", "--new-tokens", 10, 24, "--gamma", 3)
    assert code == 0 and values(rows, "passes", size=2) == {"pass, ms": 2000, "x with 4 tokens a row": 4}
    for temperature in (0.0, 0.8):
        drafted = values(rows, "draft model", 1, 2, temperature)
        assert drafted["acceptance"] == 1 == drafted["share of equal texts"] and drafted["tokens a pass"] == 4
        assert drafted["tokens a row"] == 4 and drafted["drafting, ms a step"] > 2 * 3 * 1000
        assert drafted["x engine, predicted"] == near(drafted["x engine"])
        assert values(rows, "engine", 1, 2, temperature) == {"tokens/s": 1, "x engine": 1, "tokens a pass": 1}
    assert values(rows, "look-up")["drafting, ms a step"] == 0


def test_a_draft_that_is_another_model_is_not(bench, clock, tiny, tmp_path):
    other = tmp_path / "other"
    tiny(1, torch.float32, vocab_size=4096, block_size=64, eos_token_ids=tuple(range(4096))).save_pretrained(other)
    code, rows, _ = bench("--only", "speculation", "--draft", other, "--new-tokens", 10, 24)
    drafted = values(rows, "draft model", 1, 2)
    assert code == 0 and drafted["acceptance"] < 1 and drafted["share of equal texts"] == 1
    # Texts end before a whole pass of drafts, so a row has fewer than 1 + gamma tokens on average.
    assert 3 < drafted["tokens a row"] < 4 and drafted["x engine, predicted"] == near(drafted["x engine"])


def test_greedy_texts_with_drafts_are_those_without(bench, monkeypatch):
    import benchmark_engine as script

    right = script.decode

    def wrong(engine, added, device):
        run = right(engine, added, device)
        if engine.drafter:
            run.texts[0][0] += 1
        return run

    monkeypatch.setattr(script, "decode", wrong)
    code, rows, _ = bench("--only", "speculation")
    assert "look-up: 1 of 1 texts have other tokens" in str(code) and set(rows["mode"]) == {"passes", "engine"}


@pytest.mark.parametrize(
    "args, said",
    [
        (("--only", "nothing"), "--only"),
        (("--prompt-tokens", 6, 5), "--prompt-tokens: the first number"),
        (("--new-tokens", 6, 5), "--new-tokens: the first number"),
        (("--new-tokens", 3, 59), "65 tokens do not fit the window"),
        (("--prompt-tokens", 3, 43), "65 tokens do not fit the window"),
        (("--long-prompt", 49), "65 tokens do not fit the window"),
        (("--rows", 0), "--rows"),
        (("--gamma", 17), "from 1 to 16"),
        (("--draft", "random:gpt2"), "random:gpt2: a random model"),
        (("--temperature", -1), "temperature is -1"),
        (("--model", "nowhere"), "nowhere"),
        (("--draft", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(bench, tmp_path, args, said):
    code, rows, err = bench("--only", "speculation", *args)
    assert code == 2 and said in err and list(tmp_path.iterdir()) == []
