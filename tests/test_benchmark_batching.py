"""Lesson 29: engines over batch sizes; those that are missing are left out."""

import multiprocessing
import os
import signal
import sys
import types

import numpy
import pytest
import torch
import transformers
from benches import Bench

from benchmarks import batching
from benchmarks.llama_cpp import greedy
from errors import UserError

pytestmark = pytest.mark.usefixtures("compiled")
OURS = ["no cache", "cache", "bfloat16", "int8", "native", "native int8", "native blocks"]
TRANSFORMERS = ["transformers"]


class Here:
    """An EngineProcess without a process, which would take seconds to start."""

    def __init__(self, name, directory, device):
        self.state = (name, batching.load(name, directory, device))

    def __call__(self, function, *arguments):
        return function(*self.state, *arguments)

    def close(self):
        pass


@pytest.fixture
def bench(request, checkpoint, monkeypatch):
    monkeypatch.setattr(batching, "EngineProcess", Here)
    small = ("--repeats", 2, "--max-new-tokens", 6, "--prompt-tokens", 5, "--batch-size", 2)
    bench = Bench(request, batching, "--model", checkpoint, *small)
    bench.installed(ctranslate2=False, llama_cpp=False, gguf=False)
    return bench


def test_a_row_for_each_run_of_each_engine(bench):
    bench.draws = True
    code, rows, err = bench("--batch-size", 1, 3, 1)
    assert code == 0
    assert "without CTranslate2, CTranslate2 int8: pip install ctranslate2\n" in err
    assert "without llama.cpp, llama.cpp int8: pip install llama-cpp-python gguf\n" in err
    assert list(rows["mode"]) == (OURS + TRANSFORMERS) * 4  # in turns
    assert list(rows["batch_size"]) == 16 * [1] + 16 * [3]
    assert list(rows["repeat"][:16]) == 8 * [0] + 8 * [1]
    dtypes = ["float32", "float32", "bfloat16", "int8", "float32", "int8", "blocks", "float32"]
    assert list(rows["dtype"][:8]) == dtypes
    assert list(rows["peak_memory_mb"][:16]) == [1, 2, 3, 4, 5, 6, 7, 8] * 2
    assert [job[2].__name__ for job in bench.memory_jobs] == 16 * ["run_once"]
    assert rows["roofline_share"].notna().equals(~rows["mode"].isin(["no cache", "transformers"]))
    assert rows["library"].notna().equals(rows["mode"] == "transformers")
    read = rows.assign(bytes=rows["roofline_share"] / rows["decode_tokens_per_s"])
    read = read.groupby("mode")["bytes"].median()
    assert read["int8"] < 0.6 * read["cache"]
    summary = bench.summary
    cached = summary[summary["mode"] == "cache"]
    assert len(summary) == 16 and list(cached["speedup_median"]) == [1, 1]
    assert summary["speedup_median"].notna().all()  # of every dtype, against the same rows
    assert bench.figures[0].axes[0].get_legend_handles_labels()[1] == OURS + TRANSFORMERS


def test_peers_get_the_same_prompts_and_a_file_of_each_dtype(bench, monkeypatch):
    loaded, prompts, written = [], [], {}

    class Generator:
        def __init__(self, directory, **options):
            loaded.append(options)
            self.model = batching.load_model(directory.removesuffix("/ctranslate2"))

        def generate_batch(self, token_strings, callback, **options):
            prompts.append((token_strings, options))
            rows = [[int(token) for token in prompt] for prompt in token_strings]
            steps, *_ = batching.run("cache", self.model, rows, options["max_length"], "cpu")
            assert not any(callback(None) for step in steps for _ in step)
            rows = [list(map(str, row)) for row in zip(*steps)]
            return [types.SimpleNamespace(sequences=[row]) for row in rows]

        def forward_batch(self, token_strings, return_log_probs):
            tokens = torch.tensor([[int(token) for token in token_strings[0]]])
            return self.model(tokens).log_softmax(-1).detach().numpy()

    class Converter:
        def __init__(self, directory):
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            assert tokenizer.get_vocab() == {str(token): token for token in range(61)}

        def convert(self, directory):
            assert directory.endswith("/ctranslate2")

    class LlamaCpp:
        def __init__(self, file):
            loaded.append(written[file])
            self.model = batching.load_model(file.parent)

        def run(self, *args):
            return batching.run("cache", self.model, *args)

        def log_probs(self, tokens):
            return batching.log_probs("cache", self.model, tokens)

    converters = types.SimpleNamespace(TransformersConverter=Converter)
    names = {"__version__": "4.8.5", "Generator": Generator, "converters": converters}
    monkeypatch.setitem(sys.modules, "ctranslate2", types.SimpleNamespace(**names))
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", converters)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(__version__="0.3"))
    monkeypatch.setattr(batching, "LlamaCpp", LlamaCpp)
    monkeypatch.setattr(batching, "write_gguf", lambda model, *to: written.update([to]))
    bench.installed(ctranslate2=True, llama_cpp=True, gguf=True)
    engines = ["CTranslate2", "CTranslate2 int8", "llama.cpp", "llama.cpp int8"]
    rows = bench.rows("--engines", *engines)
    assert list(rows["mode"]) == ["cache", *engines] * 2
    assert list(rows["dtype"][1:5]) == ["float32", "int8"] * 2
    assert [options["compute_type"] for options in loaded[:2]] == ["float32", "int8"]
    assert loaded[0]["intra_threads"] == torch.get_num_threads()
    assert loaded[2:] == ["float32", "int8"]
    given, options = prompts[0]
    assert [len(prompt) for prompt in given] == [5, 5]
    known = {"max_length": 6, "max_batch_size": 2, "sampling_topk": 1, "end_token": []}
    assert known.items() <= options.items()
    assert rows["roofline_share"].notna().tolist() == [True, *[False] * 4] * 2
    assert rows["library"].dropna().tolist() == 2 * (
        2 * ["ctranslate2 4.8.5"] + 2 * ["llama_cpp 0.3"]
    )
    packages = [[], *2 * [["ctranslate2"]], *2 * [["llama_cpp"]]]
    assert [imports for _, imports, *_ in bench.memory_jobs] == packages


def test_llama_cpp_decodes_the_prompts_and_then_its_own_tokens():
    passes = []

    def decode(new, position):
        passes.append((new, position))
        return numpy.eye(8)[[row[-1] + 1 for row in new]]

    assert list(greedy(decode, [[1, 2], [3, 4]], 3)) == [[3, 5], [4, 6], [5, 7]]
    assert passes == [([[1, 2], [3, 4]], 0), ([[3], [5]], 2), ([[4], [6]], 3)]
    assert list(greedy(decode, [[1]], 2)) == [[2], [3]]  # of one prompt, too


@pytest.mark.parametrize("tie", [0.0, 99.0, float("nan")])
def test_of_two_tokens_nearly_as_probable_either_is_timed(bench, monkeypatch, tie):
    def other_end(run, name, *args):
        steps, *times = run(name, *args)
        if name == "native":
            steps = [*steps[:-1], [steps[-1][0], (steps[-1][1] + 1) % 61]]
        return steps, *times

    bench.change("run", other_end)
    monkeypatch.setitem(bench.script.TIES, "native", tie)
    if tie == 99.0:
        assert len(bench.rows("--engines", "native")) == 4
    else:
        bench.stops("generate different tokens", "--engines", "native")


@pytest.mark.parametrize(
    "engine, one, many",
    [("bfloat16", 8.0, 0.0), ("int8", 0.0, 2.0), ("native int8", torch.nan, 0.0)]
    + [("native blocks", 8.0, 0.0), ("bfloat16", 0.0, 2.0)],
)
def test_neither_one_large_error_nor_many_small_ones_are_timed(bench, engine, one, many):
    def wrong(log_probs, name, *args):
        found = log_probs(name, *args).clone()
        if name == engine:
            found[:, ::2] += many
            found[0, 0] += one
        return found.log_softmax(dim=-1)

    bench.change("log_probs", wrong)
    bench.stops(f"{engine}: log-probabilities are off", "--engines", engine)


def test_an_engine_that_cannot_run_is_left_out(bench, monkeypatch):
    def no_compiler():
        raise batching.common.BuildError("no compiler here")

    monkeypatch.setattr(batching.common, "kernel", no_compiler)
    words = "without native, native int8, native blocks: no compiler here\n"
    engines = ["native", "native int8", "native blocks", "int8"]
    rows = bench.rows("--engines", *engines, says=words)
    assert list(rows["mode"][:2]) == ["cache", "int8"]
    only_cpu = ["native", "CTranslate2", "llama.cpp"]
    assert batching.available(["int8", *only_cpu], "cuda") == ["cache", "int8"]


def test_an_engine_is_a_process_of_its_own(checkpoint, monkeypatch):
    engine_process = batching.EngineProcess("native", checkpoint, "cpu")
    name, positions, threads, process = engine_process(what_it_is, 7)
    assert (name, positions, threads) == ("native", 64 + 7, torch.get_num_threads())
    assert process != os.getpid()
    with pytest.raises(ZeroDivisionError):
        engine_process(divide, 0)
    os.kill(process, signal.SIGINT)  # Ctrl-C reaches each process of a terminal
    assert engine_process(divide, 2) == 4  # it goes on
    engine_process.connection.close()  # as when the process that waits is killed
    engine_process.process.join(timeout=60)
    assert engine_process.process.exitcode == 0
    fork = multiprocessing.get_context("fork")  # one more, which need not import torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: fork)
    engine_process = batching.EngineProcess("native", checkpoint, "cpu")
    with pytest.raises(UserError, match="the process of native ended"):
        engine_process(end_it)
    engine_process.close()


def divide(name, model, number):
    return 8 // number


def what_it_is(name, model, number):
    assert hasattr(model.runner, "draw")
    return name, model.config.block_size + number, torch.get_num_threads(), os.getpid()


def end_it(name, model):
    os._exit(1)


def test_an_engine_computes_with_the_threads_of_who_started_it(monkeypatch):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    here, there = multiprocessing.Pipe()
    there.close()
    batching.run_engine_process(here, "native", None, "cpu", 3)
    assert counts == [3]
