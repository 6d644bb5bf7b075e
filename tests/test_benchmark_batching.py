"""Lesson 29: engines over batch sizes; those that are missing are left out."""

import json
import os
import signal
import sys
import types

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths

pytestmark = pytest.mark.usefixtures("compiled")
OURS = ["no cache", "cache", "bfloat16", "int8", "native", "native int8"]
PEER = ["transformers"]


def test_help_names_the_engines(run_file):
    code, out = run_file("benchmarks/batching.py", "--help")
    assert code == 0
    assert "native int8" in out and "batching_cpu.csv" in out


class Here:
    """A Worker without a process, which would take seconds to start."""

    def __init__(self, name, directory, device):
        from benchmarks import batching as benchmark_batching

        self.state = (name, benchmark_batching.load(name, directory, device))

    def __call__(self, function, *arguments):
        return function(*self.state, *arguments)

    def close(self):
        pass


@pytest.fixture
def bench(checkpoint, tmp_path, run_main, monkeypatch):
    """A function that runs the benchmark on that model: exit code, the rows, stderr."""
    import pandas  # here: a Worker's process takes its functions from this file and needs none
    from matplotlib.figure import Figure

    from benchmarks import batching as script

    alone = []  # what would have run in a process of its own, which takes seconds

    def in_own_process(*job):
        alone.append(job)
        return 1e6 * len(alone)

    have = script.importlib.util.find_spec
    absent = {"ctranslate2", "llama_cpp", "gguf"}

    def find_spec(name):
        return name not in absent and have(name)

    monkeypatch.setattr(script.common, "in_own_process", in_own_process)
    monkeypatch.setattr(script.common, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(script, "Worker", Here)
    monkeypatch.setattr(script.importlib.util, "find_spec", find_spec)
    small = ("--repeats", 2, "--max-new-tokens", 6, "--prompt-tokens", 5, "--batch-size", 2)

    def run(*args):
        output = tmp_path / "run.csv"
        files = ("--model", checkpoint, "--output", output)
        code, _, err = run_main(script.main, *files, *small, *args)
        return code, pandas.read_csv(output) if output.exists() else None, err

    run.alone = alone
    run.absent = absent
    run.plot = script.plot
    monkeypatch.setattr(script, "plot", lambda summary: Figure())  # the real one takes a while
    return run


@pytest.fixture
def ctranslate2(monkeypatch, bench):
    """A package of that name that runs our own model: what it was called with."""
    from benchmarks import batching as script

    calls = types.SimpleNamespace(loaded=[], texts=[])

    class Generator:
        def __init__(self, directory, **options):
            calls.loaded.append(options)
            self.model = script.load_model(directory.removesuffix("/ctranslate2"))

        def generate_batch(self, texts, callback, **options):
            calls.texts.append((texts, options))
            ignore_eos = options["end_token"] == []
            params = script.SamplingParams(options["max_length"], ignore_eos)
            prompts = [[int(token) for token in text] for text in texts]
            rows = [[] for _ in texts]
            for step in script.generate(self.model, prompts, params):
                for row, token in zip(rows, step):
                    row.append(str(token))
                    assert callback(None) is False
            return [types.SimpleNamespace(sequences=[row]) for row in rows]

        def forward_batch(self, texts, return_log_probs):
            assert return_log_probs
            tokens = torch.tensor([[int(token) for token in texts[0]]])
            return self.model(tokens).log_softmax(-1).detach().numpy()

    class Converter:
        def __init__(self, directory):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            assert tokenizer.get_vocab() == {str(token): token for token in range(61)}

        def convert(self, directory):
            assert directory.endswith("/ctranslate2")

    package = types.ModuleType("ctranslate2")
    package.__version__ = "4.8.5"
    package.Generator = Generator
    package.converters = types.ModuleType("ctranslate2.converters")
    package.converters.TransformersConverter = Converter
    monkeypatch.setitem(sys.modules, "ctranslate2", package)
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", package.converters)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    return calls


def test_a_row_for_each_run_of_each_engine(bench, tmp_path, monkeypatch):
    import pandas

    from benchmarks import batching as script

    figures = []

    def plot(summary):
        figures.append(bench.plot(summary))
        return figures[0]

    monkeypatch.setattr(script, "plot", plot)
    code, rows, err = bench("--batch-size", 1, 3, 1)
    assert code == 0
    assert "without CTranslate2, CTranslate2 int8: pip install ctranslate2\n" in err
    assert "without llama.cpp, llama.cpp int8: pip install llama-cpp-python gguf\n" in err
    assert len(rows) == 2 * 2 * 7
    assert list(rows["mode"][:14]) == (OURS + PEER) * 2  # in turns
    assert list(rows["batch_size"]) == 14 * [1] + 14 * [3]
    assert list(rows["repeat"][:14]) == 7 * [0] + 7 * [1]
    dtypes = ["float32", "float32", "bfloat16", "int8", "float32", "int8", "float32"]
    assert list(rows["dtype"][:7]) == dtypes
    assert list(rows["peak_memory_mb"][:14]) == [1, 2, 3, 4, 5, 6, 7] * 2
    assert [job[2].__name__ for job in bench.alone] == 14 * ["run_once"]
    assert rows["roofline_share"].notna().equals(~rows["mode"].isin(["no cache", "transformers"]))
    assert rows["library"].notna().equals(rows["mode"] == "transformers")
    summary = pandas.read_csv(tmp_path / "run_summary.csv")
    assert len(summary) == 14
    cached = summary[summary["mode"] == "cache"]
    assert list(cached["speedup_median"]) == [1, 1]
    assert summary["speedup_median"].notna().all()  # of every dtype, against the same rows
    together, each = figures[0].axes
    assert together.get_legend_handles_labels()[1] == OURS + PEER
    assert together.get_ylabel() == "tokens/s of all texts together"
    assert each.get_ylabel() == "tokens/s of each text"
    rate = cached[cached["batch_size"] == 3]["decode_tokens_per_s_median"].item()
    for axes, texts in ((together, 1), (each, 3)):
        line = axes.containers[1].lines[0]
        assert line.get_ydata()[1] == pytest.approx(rate / texts)


def test_only_no_cache_computes_all_positions_again(tiny):
    from benchmarks import batching as benchmark_batching

    for name, expected in (("no cache", [3, 4, 5]), ("cache", [3, 1, 1])):
        model, widths = passed_widths(tiny(dtype=torch.float32))
        steps, *_ = benchmark_batching.run(name, model, [[1, 2, 3]], 3, "cpu")
        assert widths == expected
        assert len(steps) == 3


def test_bytes_are_those_that_the_engine_reads(bench):
    code, rows, _ = bench("--engines", "cache", "int8")
    assert code == 0
    share = rows.assign(bytes=rows["roofline_share"] / rows["decode_tokens_per_s"])
    read = share.groupby("mode")["bytes"].median()
    assert read["int8"] < 0.6 * read["cache"]


def test_ctranslate2_gets_the_same_prompts_and_ignores_eos(bench, ctranslate2):
    code, rows, _ = bench("--engines", "CTranslate2", "CTranslate2 int8")
    assert code == 0
    assert list(rows["mode"][:3]) == ["cache", "CTranslate2", "CTranslate2 int8"]
    kinds = [options["compute_type"] for options in ctranslate2.loaded]
    assert kinds == ["float32", "int8"]
    assert ctranslate2.loaded[0]["intra_threads"] == torch.get_num_threads()
    texts, options = ctranslate2.texts[0]
    assert [len(text) for text in texts] == [5, 5]
    assert options["max_length"] == 6
    assert options["max_batch_size"] == 2
    assert options["sampling_topk"] == 1
    assert rows["roofline_share"].notna().tolist() == [True, False, False] * 2
    assert rows["library"].dropna().tolist() == ["ctranslate2 4.8.5"] * 4


def test_llama_cpp_gets_a_file_of_each_dtype(bench, monkeypatch):
    from benchmarks import batching as script

    written = {}
    loaded = []

    class LlamaCpp:
        """One that runs our own model."""

        def __init__(self, file):
            loaded.append(written[file])
            self.model = script.load_model(file.parent)

        def run(self, *args):
            return script.run("cache", self.model, *args)

        def log_probs(self, text):
            return script.log_probs("cache", self.model, text)

    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(__version__="0.3"))
    monkeypatch.setattr(script, "LlamaCpp", LlamaCpp)
    monkeypatch.setattr(script, "write_gguf", lambda model, *to: written.update([to]))
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    code, rows, _ = bench("--engines", "llama.cpp", "llama.cpp int8")
    assert code == 0
    assert list(rows["mode"][:3]) == ["cache", "llama.cpp", "llama.cpp int8"]
    assert list(rows["dtype"][:3]) == ["float32", "float32", "int8"]
    assert loaded == ["float32", "int8"]
    assert rows["library"].dropna().tolist() == ["llama_cpp 0.3"] * 4
    assert [imports for _, imports, *_ in bench.alone] == [[], ["llama_cpp"], ["llama_cpp"]]


def test_llama_cpp_decodes_the_prompts_and_then_its_own_tokens():
    import numpy

    from benchmarks.llama_cpp import greedy

    passes = []

    def decode(new, position):
        passes.append((new, position))
        return numpy.eye(8)[[row[-1] + 1 for row in new]]

    assert list(greedy(decode, [[1, 2], [3, 4]], 3)) == [[3, 5], [4, 6], [5, 7]]
    assert passes == [([[1, 2], [3, 4]], 0), ([[3], [5]], 2), ([[4], [6]], 3)]


def test_queries_and_keys_in_llama_cpps_order_meet_as_in_ours():
    from benchmarks.export_gguf import pairs_together
    from llama import rotate

    generator = torch.Generator().manual_seed(0)
    angles = torch.tensor([0.1, 0.7, 2.0])  # of a head of six numbers
    turn = torch.polar(torch.ones(3), angles)
    cos = torch.cat([angles.cos(), angles.cos()])
    sin = torch.cat([-angles.sin(), angles.sin()])
    x = torch.randn(16, generator=generator)
    ours = []
    theirs = []
    for still in (True, False):
        weight = torch.randn(4 * 6, 16, generator=generator)
        vectors = (weight @ x).view(4, 6)
        points = torch.view_as_complex((pairs_together(weight, 4) @ x).view(4, 3, 2))
        ours.append(vectors if still else rotate(vectors, cos, sin))
        theirs.append(torch.view_as_real(points if still else points * turn).flatten(1))
    assert torch.allclose((theirs[0] * theirs[1]).sum(-1), (ours[0] * ours[1]).sum(-1), atol=1e-5)


GGUF = {  # llama.cpp's names of what a model of one layer has, in the order of our modules
    "gpt2": "token_embd position_embd 0.attn_norm 0.attn_qkv 0.attn_output 0.ffn_norm 0.ffn_up"
    " 0.ffn_down output_norm",
    "llama": "token_embd 0.attn_norm 0.attn_q 0.attn_k 0.attn_v 0.attn_output 0.ffn_norm"
    " 0.ffn_gate 0.ffn_up 0.ffn_down output_norm output",
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["tiny", "tiny_llama", "qwen"])
def test_a_gguf_file_holds_each_weight_under_llama_cpps_name(request, tmp_path, kind, dtype):
    import gguf

    from benchmarks.export_gguf import pairs_together, write_gguf

    shape = {"n_embd": 32, "n_layer": 1}
    if kind == "qwen":
        shape["qkv_bias"] = True
    model = request.getfixturevalue("tiny" if kind == "tiny" else "tiny_llama")
    model = model(dtype=torch.float32, **shape)
    write_gguf(model, tmp_path / "model.gguf", dtype)
    file = gguf.GGUFReader(tmp_path / "model.gguf")
    family = "gpt2" if kind == "tiny" else "llama"
    assert file.get_field("general.architecture").contents() == family
    assert file.get_field(f"{family}.attention.head_count").contents() == model.config.n_head
    stored = {tensor.name: tensor for tensor in file.tensors}
    names = GGUF[family].replace("0.", "blk.0.").split()
    modules = {}  # ours, in order
    for key, weight in model.named_parameters():
        module, _, part = key.rpartition(".")
        modules.setdefault(module, {})[part] = weight
    assert len(stored) == sum(map(len, modules.values())) + (family == "llama")  # its rotations
    for name, (module, parts) in zip(names, modules.items(), strict=True):
        for part, weight in parts.items():
            heads = {"q_proj": model.config.n_head, "k_proj": model.config.n_kv_head}
            turned = heads.get(module.rpartition(".")[2])
            expected = pairs_together(weight, turned) if turned else weight
            tensor = stored[f"{name}.{part}"]
            found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            whole = weight.dim() == 2 and weight.shape[1] % 32 == 0 and name != "position_embd"
            bound = 0.0
            if dtype == "int8" and whole:
                assert tensor.tensor_type.name == "Q8_0"
                # Of 32 numbers the largest is 127 steps from 0; the step is rounded, to a float16.
                steps = expected.unflatten(1, (-1, 32)).abs().amax(-1) / 127
                bound = 0.6 * steps.repeat_interleave(32, dim=1)
            else:
                assert tensor.tensor_type.name == "F32"
            assert ((found - expected).abs() <= bound).all()


SHAPES = {  # what llama.cpp reads of a model's shape
    "gpt2": {"feed_forward_length": 64, "attention.head_count": 2, "attention.head_count_kv": 2}
    | {"attention.layer_norm_epsilon": 1e-5},
    "llama": {"feed_forward_length": 24, "attention.head_count": 4, "attention.head_count_kv": 2}
    | {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000, "rope.dimension_count": 6}
    | {"attention.key_length": 6, "attention.value_length": 6},
}


@pytest.mark.parametrize("kind", ["tiny", "tiny_llama"])
def test_a_gguf_file_says_what_shape_the_model_has(request, tmp_path, kind):
    """And that it is for token ids only, if there is no tokenizer."""
    import gguf

    from benchmarks.export_gguf import write_gguf

    model = request.getfixturevalue(kind)(dtype=torch.float32, n_layer=3, block_size=20)
    write_gguf(model, tmp_path / "model.gguf", "float32")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    family = "gpt2" if kind == "tiny" else "llama"
    about = {"block_count": 3, "context_length": 20, "embedding_length": 16, "vocab_size": 61}
    for name, value in (about | SHAPES[family]).items():
        assert fields[f"{family}.{name}"].contents() == pytest.approx(value), name
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"


def test_llama_cpp_slows_rotations_down_as_we_do():
    """It divides each frequency, of a theta alone, by a number of the file."""
    from benchmarks.export_gguf import slowness
    from llama import LlamaConfig, RopeScaling, Rotations

    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    config = LlamaConfig(head_dim=16, rope_theta=1000.0, rope_scaling=scaling)
    plain = 1000.0 ** -(torch.arange(8) / 8)
    ours = Rotations(config, torch.float32, "cpu").frequencies
    assert (plain / slowness(config)).tolist() == pytest.approx(ours.tolist())
    assert slowness(config).tolist()[::7] == pytest.approx([1, 8])  # the fastest, the slowest
    assert torch.equal(slowness(LlamaConfig(head_dim=16)), torch.ones(8))


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_different_tokens_are_not_timed(bench, monkeypatch, engine):
    from benchmarks import batching as script

    run = script.run

    def wrong(name, *args):
        steps, *times = run(name, *args)
        if name == engine:
            steps = [[0] * len(step) for step in steps]
        return steps, *times

    monkeypatch.setattr(script, "run", wrong)
    code, rows, _ = bench()
    assert "do not make the same tokens" in code
    assert rows is None


@pytest.mark.parametrize("tie", [0.0, 99.0, float("nan")])
def test_of_two_tokens_nearly_as_probable_either_is_timed(bench, monkeypatch, tie):
    from benchmarks import batching as script

    run = script.run

    def other_end(name, *args):
        steps, *times = run(name, *args)
        if name == "native":
            steps = [*steps[:-1], [steps[-1][0], (steps[-1][1] + 1) % 61]]
        return steps, *times

    monkeypatch.setattr(script, "run", other_end)
    monkeypatch.setitem(script.TIES, "native", tie)
    code, rows, _ = bench("--engines", "native")
    if tie == 99.0:
        assert code == 0
        assert len(rows) == 4
    else:
        assert "do not make the same tokens" in code
        assert rows is None


@pytest.mark.parametrize("engine", ["bfloat16", "int8", "native int8"])
def test_other_probabilities_are_not_timed(bench, monkeypatch, engine):
    from benchmarks import batching as script

    load = script.load

    def spoiled(name, *args):
        model = load(name, *args)
        if name == engine:
            with torch.no_grad():
                model.wpe.weight.zero_()
        return model

    monkeypatch.setattr(script, "load", spoiled)
    code, rows, _ = bench()
    assert f"{engine}: log-probabilities are off" in code
    assert rows is None


@pytest.mark.parametrize("one, all_others", [(2.0, 0.0), (0.3, 0.3)])
def test_neither_one_large_error_nor_many_small_ones_are_timed(bench, monkeypatch, one, all_others):
    from benchmarks import batching as script

    log_probs = script.log_probs

    def wrong(name, *args):
        found = log_probs(name, *args).clone()
        if name == "int8":
            found += all_others
            found[0, 0] += one - all_others
        return found

    monkeypatch.setattr(script, "log_probs", wrong)
    code, rows, _ = bench("--engines", "int8")
    assert "int8: log-probabilities are off" in code
    assert rows is None


def test_an_engine_that_cannot_run_is_left_out(bench, monkeypatch):
    from benchmarks import batching as script

    def no_compiler():
        raise script.common.BuildError("no compiler here")

    monkeypatch.setattr(script.common, "kernel", no_compiler)
    code, rows, err = bench("--engines", "native", "native int8", "int8")
    assert code == 0
    assert "without native, native int8: no compiler here\n" in err
    assert list(rows["mode"][:2]) == ["cache", "int8"]
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name != "gguf")
    assert script.missing("llama.cpp", "cpu") == "pip install gguf"
    only_cpu = ["native", "CTranslate2", "llama.cpp"]
    assert script.usable(["int8", *only_cpu], "cuda") == ["cache", "int8"]


def test_a_worker_is_a_process_of_its_own(checkpoint):
    from benchmarks.batching import UserError, Worker

    worker = Worker("native", checkpoint, "cpu")
    name, positions, threads, process = worker(what_it_is, 7)
    assert (name, positions, threads) == ("native", 64 + 7, torch.get_num_threads())
    assert process != os.getpid()
    with pytest.raises(ZeroDivisionError):
        worker(divide, 0)
    assert worker(divide, 4) == 2  # it goes on
    os.kill(process, signal.SIGINT)  # Ctrl-C reaches each process of a terminal
    assert worker(divide, 2) == 4
    worker.connection.close()  # as when the process that waits is killed
    worker.process.join(timeout=20)
    assert worker.process.exitcode == 0
    worker = Worker("native", checkpoint, "cpu")
    with pytest.raises(UserError, match="the process of native ended"):
        worker(end_it)
    worker.close()


def divide(name, model, number):
    return 8 // number


def what_it_is(name, model, number):
    assert hasattr(model.runner, "draw")
    return name, model.config.block_size + number, torch.get_num_threads(), os.getpid()


def end_it(name, model):
    os._exit(1)


def test_a_text_that_does_not_fit_is_one_line(bench):
    code, rows, err = bench("--max-new-tokens", 60, "--engines", "cache")
    assert code == 2
    assert rows is None
    assert err.count("\n") == 1
    assert "65 tokens do not fit the window of" in err


def test_a_gguf_file_has_the_vocabulary(tmp_path):
    import gguf

    from benchmarks.export_gguf import write_gguf
    from loading.load import load_model
    from loading.tokenizer import load_encoding

    directory = CHECKPOINTS / "stories-draft"
    model = load_model(directory, torch.float32, "cpu")
    write_gguf(model, tmp_path / "model.gguf", "float32", directory / "tokenizer.json")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")}
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert len(found["tokens"]) == model.config.vocab_size == len(kinds)
    ids = load_encoding(directory, model.config.vocab_size).encode("One day, a dog saw 12 cats.")
    assert "".join(found["tokens"][token] for token in ids) == "OneĠday,ĠaĠdogĠsawĠ12Ġcats."
    end = model.config.eos_token_ids[0]
    assert found["tokens"][end] == "<|endoftext|>"
    assert (kinds[end], kinds[ids[0]]) == (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    raw = json.loads((directory / "tokenizer.json").read_text())
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in raw["model"]["merges"]]
    assert [pair.split(" ") for pair in found["merges"]] == pairs
    names = ("model", "pre", "eos_token_id", "add_bos_token")
    about = [fields[f"tokenizer.ggml.{name}"].contents() for name in names]
    assert about == ["gpt2", "gpt-2", end, False]


def test_a_gguf_file_says_what_a_text_begins_and_ends_with(tiny_llama, tmp_path):
    """And which ids of the model no token has."""
    import gguf
    from test_tokenizer import ADDS_EOT, EOT, MERGES, TEMPLATE, TEXT_A, tokenizer_json

    from benchmarks.export_gguf import write_gguf

    raw = tokenizer_json(MERGES, ("<|end|>", EOT))
    start, end = (token["id"] for token in reversed(raw["added_tokens"]))
    special = {EOT: {"id": EOT, "ids": [start], "tokens": [EOT]}}
    template = {"single": [ADDS_EOT, TEXT_A], "special_tokens": special}
    raw["post_processor"] = TEMPLATE | template
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    ids = {"bos_token_id": start, "eos_token_ids": (end, start)}
    model = tiny_llama(dtype=torch.float32, vocab_size=start + 3, **ids)
    write_gguf(model, tmp_path / "model.gguf", "float32", tmp_path / "tokenizer.json")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")}
    unused = [f"<unused {token}>" for token in (start + 1, start + 2)]
    assert found["tokens"][end:] == ["<|end|>", EOT, *unused]
    assert found["token_type"][end:] == [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.UNUSED] * 2
    names = ("bos_token_id", "eos_token_id", "add_bos_token")
    about = [fields[f"tokenizer.ggml.{name}"].contents() for name in names]
    assert about == [start, end, True]
