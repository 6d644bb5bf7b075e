"""Lesson 26: engines side by side over batch sizes; those that are not there are named and left out."""

import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, passed_widths

from model import GPT

pytestmark = pytest.mark.usefixtures("compiled")
OURS = ["no cache", "cache", "bfloat16", "int8", "native", "native int8"]
PEER = ["transformers"]


def test_help_names_the_engines():
    result = subprocess.run(
        [sys.executable, "benchmark_batching.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0 and "native int8" in result.stdout and "batching_cpu.csv" in result.stdout


class Here:
    """A Worker without a process, which would take seconds to start."""

    def __init__(self, engine, directory, device):
        import benchmark_batching

        self.state = engine, benchmark_batching.load(engine, directory, device)

    def __call__(self, function, *arguments):
        return function(*self.state, *arguments)

    def close(self):
        pass


@pytest.fixture
def bench(checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on that model: exit code, the rows, stderr."""
    import pandas  # here: a Worker's process, which takes its functions from this file, has no use for it
    from matplotlib.figure import Figure

    import benchmark_batching as script

    alone = []  # what would have run in a process of its own, which takes seconds
    monkeypatch.setattr(script.common, "in_own_process", lambda *job: alone.append(job) or 1e6 * len(alone))
    monkeypatch.setattr(script.common, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(script, "Worker", Here)
    have = script.importlib.util.find_spec
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name != "ctranslate2" and have(name))

    def run(*args):
        output = tmp_path / "run.csv"
        small = ("--model", checkpoint, "--repeats", 2, "--max-new-tokens", 6, "--prompt-tokens", 5, "--batch-size", 2)
        code, _, err = run_main(script.main, "--output", output, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    run.alone, run.plot = alone, script.plot
    monkeypatch.setattr(script, "plot", lambda summary: Figure())  # the real one takes a while
    return run


@pytest.fixture
def ctranslate2(monkeypatch, bench):
    """A package of that name that runs our own model: what its converter and generator were called with."""
    import benchmark_batching as script

    calls = types.SimpleNamespace(loaded=[], texts=[])

    class Generator:
        def __init__(self, directory, **options):
            calls.loaded.append(options)
            self.model = GPT.from_pretrained(directory.removesuffix("/ctranslate2"))

        def generate_batch(self, texts, callback, **options):
            calls.texts.append((texts, options))
            params = script.SamplingParams(max_new_tokens=options["max_length"], ignore_eos=options["end_token"] == [])
            prompts, rows = [[int(token) for token in text] for text in texts], [[] for _ in texts]
            for step in script.generate(self.model, prompts, params):
                for row, token in zip(rows, step):
                    row.append(str(token))
                    assert callback(None) is False
            return [types.SimpleNamespace(sequences=[row]) for row in rows]

        def forward_batch(self, texts, return_log_probs):
            assert return_log_probs
            return self.model(torch.tensor([[int(token) for token in texts[0]]])).log_softmax(-1).detach().numpy()

    class Converter:
        def __init__(self, directory):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            assert tokenizer.get_vocab() == {str(token): token for token in range(61)}

        def convert(self, directory):
            assert directory.endswith("/ctranslate2")

    package = types.ModuleType("ctranslate2")
    package.Generator, package.converters = Generator, types.ModuleType("ctranslate2.converters")
    package.converters.TransformersConverter = Converter
    monkeypatch.setitem(sys.modules, "ctranslate2", package)
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", package.converters)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    return calls


def test_a_row_for_each_run_of_each_engine(bench, tmp_path, monkeypatch):
    import pandas

    import benchmark_batching

    figures = []
    monkeypatch.setattr(benchmark_batching, "plot", lambda table: figures.append(bench.plot(table)) or figures[0])
    code, rows, err = bench("--batch-size", 1, 3, 1)
    assert code == 0 and "without CTranslate2, CTranslate2 int8: pip install ctranslate2\n" in err
    assert list(rows["mode"][:14]) == (OURS + PEER) * 2 and len(rows) == 2 * 2 * 7  # in turns
    assert list(rows["batch_size"]) == 14 * [1] + 14 * [3] and list(rows["repeat"][:14]) == 7 * [0] + 7 * [1]
    assert list(rows["dtype"][:7]) == ["float32", "float32", "bfloat16", "int8", "float32", "int8", "float32"]
    assert list(rows["peak_memory_mb"][:7]) == [1, 2, 3, 4, 5, 6, 7] == list(rows["peak_memory_mb"][7:14])
    assert [job[2].__name__ for job in bench.alone] == 14 * ["run_once"]
    assert rows["roofline_share"].notna().equals(~rows["mode"].isin(["no cache", "transformers"]))
    summary = pandas.read_csv(tmp_path / "run_summary.csv")
    assert (summary[summary["mode"] == "cache"]["speedup_median"] == 1).all() and len(summary) == 14
    assert summary["speedup_median"].notna().all()  # of every dtype, against the same rows
    together, each = figures[0].axes
    assert together.get_legend_handles_labels()[1] == OURS + PEER
    assert (together.get_ylabel(), each.get_ylabel()) == ("tokens/s of all texts together", "tokens/s of each text")
    for axes, texts in ((together, 1), (each, 3)):
        line = axes.containers[1].lines[0]
        rate = summary[(summary["mode"] == "cache") & (summary["batch_size"] == 3)]["decode_tokens_per_s_median"]
        assert line.get_ydata()[1] == pytest.approx(rate.item() / texts)


def test_only_no_cache_computes_all_positions_again(tiny):
    import benchmark_batching

    for engine, expected in (("no cache", [3, 4, 5]), ("cache", [3, 1, 1])):
        model, widths = passed_widths(tiny(dtype=torch.float32))
        steps, *_ = benchmark_batching.run(engine, model, [[1, 2, 3]], 3, "cpu")
        assert widths == expected and len(steps) == 3


def test_bytes_are_those_that_the_engine_reads(bench):
    code, rows, _ = bench("--engines", "cache", "int8")
    share = rows.assign(bytes=rows["roofline_share"] / rows["decode_tokens_per_s"]).groupby("mode")["bytes"].median()
    assert code == 0 and share["int8"] < 0.6 * share["cache"]


def test_ctranslate2_gets_the_same_prompts_and_ignores_eos(bench, ctranslate2):
    code, rows, _ = bench("--engines", "CTranslate2", "CTranslate2 int8")
    assert code == 0 and list(rows["mode"][:3]) == ["cache", "CTranslate2", "CTranslate2 int8"]
    kinds = [options["compute_type"] for options in ctranslate2.loaded]
    assert kinds == ["float32", "int8"] and ctranslate2.loaded[0]["intra_threads"] == torch.get_num_threads()
    texts, options = ctranslate2.texts[0]
    assert len(texts) == 2 and all(len(text) == 5 for text in texts)
    assert options["max_length"] == 6 and options["max_batch_size"] == 2 and options["sampling_topk"] == 1
    assert rows["roofline_share"].notna().tolist() == [True, False, False] * 2


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_different_tokens_are_not_timed(bench, monkeypatch, engine):
    import benchmark_batching as script

    run = script.run

    def wrong(name, *args):
        steps, *times = run(name, *args)
        return [[0] * len(step) for step in steps] if name == engine else steps, *times

    monkeypatch.setattr(script, "run", wrong)
    code, rows, _ = bench()
    assert "do not make the same tokens" in code and rows is None


@pytest.mark.parametrize("engine", ["bfloat16", "int8", "native int8"])
def test_other_probabilities_are_not_timed(bench, monkeypatch, engine):
    import benchmark_batching as script

    load = script.load

    def spoiled(name, *args):
        model = load(name, *args)
        if name == engine:
            with torch.no_grad():
                model.wpe.weight.zero_()
        return model

    monkeypatch.setattr(script, "load", spoiled)
    code, rows, _ = bench()
    assert f"{engine}: log-probabilities are off" in code and rows is None


@pytest.mark.parametrize("one, all_others", [(2.0, 0.0), (0.3, 0.3)])
def test_neither_one_large_error_nor_many_small_ones_are_timed(bench, monkeypatch, one, all_others):
    import benchmark_batching as script

    log_probs = script.log_probs

    def wrong(engine, *args):
        right = log_probs(engine, *args).clone()
        if engine == "int8":
            right += all_others
            right[0, 0] += one - all_others
        return right

    monkeypatch.setattr(script, "log_probs", wrong)
    code, rows, _ = bench("--engines", "int8")
    assert "int8: log-probabilities are off" in code and rows is None


def test_an_engine_that_cannot_run_is_left_out(bench, monkeypatch):
    import benchmark_batching as script

    def no_compiler():
        raise script.BuildError("no compiler here")

    monkeypatch.setattr(script, "kernel", no_compiler)
    code, rows, err = bench("--engines", "native", "native int8", "int8")
    assert code == 0 and "without native, native int8: no compiler here\n" in err
    assert list(rows["mode"][:2]) == ["cache", "int8"]
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    assert script.usable(["native", "int8", "CTranslate2"], "cuda") == ["cache", "int8"]


def test_a_worker_is_a_process_of_its_own(checkpoint):
    import os

    from benchmark_batching import UserError, Worker

    worker = Worker("native", checkpoint, "cpu")
    engine, positions, threads, process = worker(what_it_is, 7)
    assert (engine, positions, threads) == ("native", 64 + 7, torch.get_num_threads()) and process != os.getpid()
    with pytest.raises(ZeroDivisionError):
        worker(divide, 0)
    assert worker(divide, 4) == 2  # it goes on
    worker.connection.close()  # as when the process that waits is killed
    worker.process.join(timeout=20)
    assert worker.process.exitcode == 0
    worker = Worker("native", checkpoint, "cpu")
    with pytest.raises(UserError, match="the process of native ended"):
        worker(end_it)
    worker.close()


def divide(engine, model, number):
    return 8 // number


def what_it_is(engine, model, number):
    import os

    assert model.native
    return engine, model.config.block_size + number, torch.get_num_threads(), os.getpid()


def end_it(engine, model):
    import os

    os._exit(1)


def test_a_text_that_does_not_fit_is_one_line(bench):
    code, rows, err = bench("--max-new-tokens", 60)
    assert code == 2 and rows is None and err.count("\n") <= 2 and "65 tokens do not fit the window of" in err
