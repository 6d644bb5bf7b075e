"""How far dtypes and GGUF files are from float32: by hand and by torch, and their rows."""

import ctypes
import functools
import itertools
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from benches import Bench, near
from conftest import CHECKPOINTS, is_one_line, record, save_speaking

from benchmarks import quality
from benchmarks.llama_cpp import LlamaCpp

BACKENDS = list(
    itertools.product(("float32", "float16", "bfloat16", "int8", "blocks"), ("torch", "native"))
)


@pytest.fixture
def bench(request, tiny_llama, tmp_path):
    model = save_speaking(tiny_llama, tmp_path / "model", tie_word_embeddings=True)
    text = CHECKPOINTS.parent / "benchmarks" / "texts" / "stories.txt"
    bench = Bench(request, quality, "--model", model, "--text", text, "--length", 24)
    bench.model = model
    return bench


@pytest.fixture
def llama_cpp(bench, monkeypatch):
    """A package of that name that runs our own model, off by what its file's name says."""
    model = bench.script.load_model(bench.model)
    calls = SimpleNamespace(chunks=[], size=4096, closed=0)

    class FakeLlamaCpp:
        def __init__(self, file):
            self.off = float(file.stem)
            self.weight_bytes = 1000
            self.vocab_size = calls.size

        def close(self):
            calls.closed += 1

        def logits(self, tokens, pass_size):
            calls.chunks.append(tokens)
            for logits in bench.script.model_logits(model, tokens):
                assert len(logits) <= pass_size
                logits[:, 7] += self.off
                yield logits

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="0.3"))
    monkeypatch.setattr(bench.script, "LlamaCpp", FakeLlamaCpp)
    bench.installed(llama_cpp=True)
    for name in ("0.0", "2"):
        (bench.directory / f"{name}.gguf").touch()
    return calls


def test_divergences_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 50, 1000, generator=generator).mul(4)
    targets = torch.randint(1000, (50,), generator=generator)
    kl, same, loss = quality.compare(logits, reference, targets)
    log_q, log_p = (x.double().log_softmax(dim=-1) for x in (logits, reference))
    terms = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True)
    assert torch.allclose(kl, terms.sum(dim=-1), rtol=1e-12)
    assert torch.equal(same.bool(), logits.argmax(dim=-1) == reference.argmax(dim=-1))
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    assert torch.allclose(loss, expected, rtol=1e-12)


def test_what_runs_if_nothing_is_named(monkeypatch):
    asked = record(monkeypatch, quality, "resolve_source", lambda name: name)
    assert quality.default_text("checkpoints/stories-draft").name == "stories.txt"
    assert quality.default_text("random:gpt2").name == "english.txt"
    assert quality.default_model().endswith(("smollm2", "stories-llama"))
    assert asked[-1] == "smollm2"


def test_each_token_but_the_first_of_a_chunk_is_predicted_from_those_before_it(
    tiny_llama, monkeypatch
):
    monkeypatch.setattr(quality, "PASS_SIZE", 4)
    models = tiny_llama(seed=1), tiny_llama()
    chunks = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    found = quality.quality(
        *(functools.partial(quality.model_logits, model) for model in models), chunks
    )
    tokens = torch.tensor(chunks)
    with torch.inference_mode():
        logits = [model(tokens)[:, :-1].flatten(0, 1) for model in models]
    kl, same, loss = quality.compare(*logits, tokens[:, 1:].flatten()).numpy()
    expected = {"kl": kl.mean(), "kl_99": numpy.quantile(kl, 0.99), "top_1": same.mean()}
    expected |= {"perplexity": numpy.exp(loss.mean()), "predictions": 12}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_row_for_each_dtype_and_backend(bench):
    bench.draws = True
    rows = bench.rows()
    assert list(zip(rows["dtype"], rows["backend"])) == BACKENDS
    assert list(rows["predictions"]) == len(BACKENDS) * [2 * 23]
    kl = dict(zip(BACKENDS, rows["kl"]))
    assert kl["float32", "torch"] == 0 and rows["top_1"][0] == 1
    assert kl["float32", "native"] < 1e-6  # rounding
    for backend in ("torch", "native"):
        assert 0 < kl["float16", backend] < min(kl["bfloat16", backend], kl["int8", backend])
    assert kl["float16", "native"] < kl["float16", "torch"]
    for dtype in ("int8", "blocks"):
        assert kl[dtype, "native"] == near(kl[dtype, "torch"])
    assert (rows["kl_99"][1:] > rows["kl"][1:]).all()
    numbers = rows["parameters"][0]
    sizes = list(rows["weight_bytes"])
    assert sizes[:6] == [4 * numbers] * 2 + [2 * numbers] * 4
    assert numbers < sizes[6] == sizes[7] < 1.5 * numbers  # with scales, and norms in float32
    assert sizes[6] < sizes[8] == sizes[9] < sizes[0]  # rows of 16 fill blocks of 32
    assert rows["bytes_per_weight"][6] == near(sizes[6] / numbers)
    assert rows["library"].isna().all()
    assert list(bench.summary["perplexity"]) == list(rows["perplexity"])
    (axes,) = bench.figures[0].axes
    assert axes.get_legend_handles_labels()[1] == ["torch", "native"]


def test_gguf_files_compute_the_same_tokens(bench, llama_cpp, tmp_path):
    rows = bench.rows("--dtype", "float32", "--gguf", tmp_path / "0.0.gguf", tmp_path / "2.gguf")
    assert list(rows["dtype"]) == ["float32", "float32", "0.0", "2"]
    assert list(rows["backend"]) == ["torch", "native", "llama.cpp", "llama.cpp"]
    assert rows["kl"][2] == 0 and rows["kl"][3] > 1e-6
    assert rows["perplexity"][2] == rows["perplexity"][0] != rows["perplexity"][3]
    assert rows["weight_bytes"][2] == 1000
    assert list(rows["library"].dropna()) == ["llama_cpp 0.3"] * 2
    encoding = bench.script.load_encoding(bench.model, 4096)
    tokens = encoding.encode_ordinary(bench.default_args[3].read_text())
    assert llama_cpp.closed == 2
    assert llama_cpp.chunks == 2 * [tokens[:23], tokens[24:47]]


def test_llama_cpp_gives_the_logits_after_each_token_with_a_float32_cache():
    options = SimpleNamespace(type_k=1, type_v=1, flash_attn_type=-1)
    numbers = (ctypes.c_float * 6)(*range(6))
    passes = []
    freed = []

    def batch(size, *_):
        lists = {name: [None] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(seq_id=[[None] for _ in range(size)], **lists)

    def decode(context, batch):
        count = batch.n_tokens
        passes.append([batch.token[:count], batch.pos[:count], batch.logits[:count]])
        return 0

    api = SimpleNamespace(
        GGML_TYPE_F32=0,
        LLAMA_FLASH_ATTN_TYPE_DISABLED=0,
        llama_context_default_params=lambda: options,
        llama_init_from_model=lambda model, options: "context",
        llama_batch_init=batch,
        llama_batch_free=freed.append,
        llama_decode=decode,
        llama_get_logits=lambda _: ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float)),
        llama_free=freed.append,
    )
    llama_cpp = LlamaCpp.__new__(LlamaCpp)
    llama_cpp.api, llama_cpp.model, llama_cpp.vocab_size = api, "model", 3
    pieces = list(llama_cpp.logits([5, 6, 7], 2))
    assert [chunk.tolist() for chunk in pieces] == [[[0, 1, 2], [3, 4, 5]], [[0, 1, 2]]]
    assert passes == [[[5, 6], [0, 1], [True, True]], [[7], [2], [True]]]
    assert (options.type_k, options.type_v, options.flash_attn_type) == (0, 0, 0)
    assert options.n_ctx == 3 and len(freed) == 2


@pytest.mark.parametrize(
    "given, words",
    [
        (["--text", "missing.txt"], ["--text missing.txt: No such file"]),
        (["--text", "{bytes}"], ["not UTF-8 text"]),
        (["--text", "{short}"], ["4 tokens, and --chunks 2 of --length 24 need 48"]),
        (["--length", 65], ["65 tokens do not fit the context window of ", "(64)"]),
        (["--length", 1], ["'1': must be an integer >= 2"]),
        (["--gguf", "a.gguf"], ["--gguf: needs llama.cpp; pip install llama-cpp-python"]),
        (["--gguf", "{short}", "a.gguf"], ["--gguf a.gguf: no such file"]),
    ],
)
def test_bad_input_is_one_line(bench, tmp_path, given, words):
    bench.installed(llama_cpp="{short}" in given)
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "short").write_text("a a a a")
    names = {name: tmp_path / name for name in ("bytes", "short")}
    code, rows, err = bench(*(str(word).format(**names) for word in given))
    assert is_one_line((code, "", err), *words), err
    assert rows is None


def test_what_cannot_be_measured_is_refused(bench, llama_cpp, tmp_path, monkeypatch):
    llama_cpp.size = 61
    code, rows, err = bench("--dtype", "float32", "--gguf", tmp_path / "2.gguf")
    said = err.splitlines()[-1]
    assert code == 2
    assert said.endswith(f"2.gguf: the vocabulary size is 61, that of {bench.model} is 4096")
    assert list(rows["backend"]) == ["torch", "native"]  # what was measured stays
    monkeypatch.setattr(quality.common, "native_refusal", lambda device: "no compiler")
    code, _, err = bench("--dtype", "float16", "bfloat16", "--backend", "native")
    expected = "--backend native: supports none of --dtype float16 bfloat16 here"
    assert code == 2 and err.splitlines()[-1].endswith(expected)
