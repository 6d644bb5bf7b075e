"""Tokens/s, TTFT and peak memory of engines by batch size: python -m benchmarks.batching."""

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

import benchmark_kv_cache
from benchmarks import common
from benchmarks.export_gguf import write_gguf
from benchmarks.llama_cpp import LlamaCpp
from cache import KVCache
from command_line.models import pick_dtype
from command_line.options import MAX_SEQUENCES, STORIES
from command_line.parser import Parser
from errors import UserError
from infer import generate, pass_logits
from loading.load import load_model, save_model
from native import use_native
from sampling import SamplingParams


class Engine(NamedTuple):
    """An engine that can be timed."""

    package: str  # required package, or ""
    dtype: str
    description: str

    @property
    def is_ours(self) -> bool:
        """Return whether the engine belongs to this repository, not to another library."""
        return self.package in ("", "native")


ENGINES = {
    "no cache": Engine("", "float32", "torch, recomputing all positions in each step"),
    "cache": Engine("", "float32", "torch"),
    "bfloat16": Engine("", "bfloat16", "torch"),
    "int8": Engine("", "int8", "torch"),
    "native": Engine("native", "float32", "C code"),
    "native int8": Engine("native", "int8", "C code"),
    "native blocks": Engine("native", "blocks", "C code, in the format of Q8_0"),
    "transformers": Engine("transformers", "float32", "generate()"),
    "CTranslate2": Engine("ctranslate2", "float32", "Generator"),
    "CTranslate2 int8": Engine("ctranslate2", "int8", "Generator"),
    "llama.cpp": Engine("llama_cpp", "float32", "llama_decode with a float16 cache"),
    "llama.cpp int8": Engine("llama_cpp", "int8", "llama_decode of a Q8_0 file"),
}
IMPORTS = {
    "transformers": benchmark_kv_cache.TRANSFORMERS_IMPORTS,
    "ctranslate2": ["ctranslate2"],
    "llama_cpp": ["llama_cpp"],
}
# Packages with more requirements, or with a different name in pip: module -> name in pip.
NEEDS = {"llama_cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}}
LABELS = (  # y-axes of a model's panels
    "tokens/s of the batch",
    "tokens/s per sequence",
    "time to first token, s",
    "peak memory, MB",
)
COLOURS = [*(f"C{number}" for number in range(10)), "black", "gold"]  # of the engines' lines
# Maximum KL divergence of a position from float32, in nats; the mean may be a tenth of it.
BOUNDS = {"bfloat16": 0.1, "int8": 0.5, "blocks": 0.5}
# How far a log-probability may be below that of float32's choice. llama.cpp has a float16
# cache, and a float16 table for GPT-2's GELU.
TIES = {"llama.cpp": 0.05}


def load(name: str, directory: Path, device: str):
    """Return the model as the engine runs it. directory: written by `prepare`."""
    package, dtype, _ = ENGINES[name]
    if package == "transformers":
        return benchmark_kv_cache.load(package, directory, torch.float32, device)
    if package == "ctranslate2":
        import ctranslate2

        threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()}
        return ctranslate2.Generator(str(directory / "ctranslate2"), compute_type=dtype, **threads)
    if package == "llama_cpp":
        return LlamaCpp(directory / f"{dtype}.gguf")
    model = load_model(directory, pick_dtype(dtype, device), device)
    if package == "native":
        use_native(model)
    return model


def prepare(model, directory: Path, names: list[str]) -> None:
    """Write the model in the format of each engine.

    CTranslate2's is converted, with the ids as its vocabulary; llama.cpp gets one file per dtype.
    """
    save_model(model, directory)
    for dtype in [ENGINES[name].dtype for name in names if ENGINES[name].package == "llama_cpp"]:
        write_gguf(model, directory / f"{dtype}.gguf", dtype)
    if any(ENGINES[name].package == "ctranslate2" for name in names):
        from ctranslate2.converters import TransformersConverter
        from tokenizers import Tokenizer, models
        from transformers import logging

        ids = {str(token): token for token in range(model.config.vocab_size)}
        Tokenizer(models.WordLevel(ids, unk_token="0")).save(str(directory / "tokenizer.json"))
        config = {f"{name}_token": "0" for name in ("unk", "bos", "eos")}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        logging.disable_progress_bar()
        TransformersConverter(str(directory)).convert(str(directory / "ctranslate2"))


def run(
    name: str, model, prompts: list[list[int]], length: int, device: str
) -> tuple[list, float, float]:
    """Generate greedily; return steps (a token per prompt), TTFT and decode time in seconds."""
    package = ENGINES[name].package
    if package == "transformers":
        return benchmark_kv_cache.run(package, model, prompts, length, device)
    if package == "ctranslate2":
        return run_ctranslate2(model, prompts, length, device)
    if package == "llama_cpp":
        return model.run(prompts, length, device)
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    steps = generate(model, prompts, params, use_cache=name != "no cache")
    return common.timed(steps, device)


def run_ctranslate2(
    generator, prompts: list[list[int]], length: int, device: str
) -> tuple[list, float, float]:
    """Run CTranslate2's Generator, and return what `run` returns."""
    token_strings = [[str(token) for token in prompt] for prompt in prompts]
    times = []

    def clock(step) -> bool:  # called for each token; False: continue
        if not times:
            times.append(common.now(device))
        return False

    options = {"max_length": length, "sampling_topk": 1, "end_token": []}
    options |= {"include_prompt_in_result": False, "max_batch_size": len(token_strings)}
    began = common.now(device)
    results = generator.generate_batch(token_strings, callback=clock, **options)
    ended = common.now(device)
    outputs = [[int(token) for token in result.sequences[0]] for result in results]
    return [list(step) for step in zip(*outputs)], times[0] - began, ended - times[0]


def throughput_columns(
    name: str, model, prompts: list[list[int]], length: int, device: str, bandwidth: float
) -> dict:
    """Run the engine once and return its columns.

    The roofline share needs the bytes read, so only our engines with a cache have one.
    """
    _, ttft, decode_time = run(name, model, prompts, length, device)
    engine = ENGINES[name]
    known = engine.is_ours and name != "no cache"
    row = common.throughput_columns(
        model if known else None, prompts, length, ttft, decode_time, bandwidth
    )
    return row | {"library": "" if engine.is_ours else common.library(engine.package)}


def run_once(
    name: str, directory: Path, device: str, prompts: list[list[int]], length: int
) -> None:
    """Load the model and generate once, so that its peak memory can be measured."""
    run(name, load(name, directory, device), prompts, length, device)


class EngineProcess:
    """A process for one engine and its model, so that its idle threads do not disturb others.

    Call it with a function and arguments: function(name, model, *arguments) runs there, and its
    result is returned here.
    """

    def __init__(self, name: str, directory: Path, device: str):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        state = (there, name, directory, device, torch.get_num_threads())
        self.process = context.Process(target=run_engine_process, args=state, daemon=True)
        self.process.start()
        there.close()

    def __call__(self, function, *arguments):
        try:
            self.connection.send((function, arguments))
            result = self.connection.recv()
        except (EOFError, OSError):
            why = "perhaps for lack of memory"
            raise UserError(f"the process of {self.name} ended, {why}") from None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()


def run_engine_process(connection, name: str, directory: Path, device: str, threads: int) -> None:
    """Serve calls in an engine's process until the connection closes or breaks."""
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    model = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
            try:
                model = model or load(name, directory, device)
                result = function(name, model, *arguments)
            except Exception as error:
                result = error
            connection.send(result)


@torch.inference_mode()
def log_probs(name: str, model, tokens: list[int]) -> torch.Tensor:
    """Return the engine's log-probabilities after each position, (T, vocab_size)."""
    if ENGINES[name].package == "ctranslate2":
        import numpy

        found = model.forward_batch([list(map(str, tokens))], return_log_probs=True)
        return torch.tensor(numpy.array(found))[0].float()
    if ENGINES[name].package == "llama_cpp":
        return model.log_probs(tokens)
    cache = KVCache(model, 1, len(tokens))
    logits = [pass_logits(model, [[token]], [0], cache, 1)[0] for token in tokens]
    return torch.cat(logits).log_softmax(dim=-1)


def check(engine_processes: dict, prompts: list[list[int]], length: int, device: str) -> None:
    """Exit unless float32 engines generate the same tokens, and others nearly the same log-probs.

    For an engine in TIES, a token less probable by at most that amount counts as the same.
    """
    outputs = {}
    for name, engine_process in engine_processes.items():
        outputs[name] = engine_process(run, prompts, length, device)[0]  # this also warms up
    exact = [name for name in outputs if ENGINES[name].dtype == "float32"]
    for name, output in outputs.items():
        known = (engine_processes["cache"], prompts, outputs["cache"], TIES.get(name, 0.0))
        if len(output) != length or (name in exact and diverges(output, *known)):
            sys.exit(f"{', '.join(exact)} generate different tokens; wrong results are not timed")
    tokens = prompts[0] + [step[0] for step in outputs["cache"][:-1]]
    expected = engine_processes["cache"](log_probs, tokens)
    for name in [name for name in outputs if name not in exact]:
        error = common.kl_divergence(engine_processes[name](log_probs, tokens), expected)
        bound = BOUNDS[ENGINES[name].dtype]
        if not (error.max() <= bound and error.mean() <= bound / 10):  # NaN is an error too
            off = f"{name}: log-probabilities are off by up to {error.max():.3f} nats"
            sys.exit(f"{off}; wrong results are not timed")


def diverges(
    output: list, engine_process, prompts: list[list[int]], expected: list, tie: float
) -> bool:
    """Return whether a sequence picks a token less probable than expected by more than `tie`.

    output, expected: steps of one token per prompt. engine_process: computes log-probabilities.
    """
    for prompt, sequence, expected_tokens in zip(prompts, zip(*output), zip(*expected)):
        if sequence != expected_tokens:
            at = [token == other for token, other in zip(sequence, expected_tokens)].index(False)
            found = engine_process(log_probs, prompt + list(expected_tokens[:at]))[-1]
            if not found[expected_tokens[at]] - found[sequence[at]] <= tie:  # NaN diverges too
                return True
    return False


def unavailable_reason(name: str, device: str) -> str:
    """Return the reason why an engine cannot run here, or ""."""
    package = ENGINES[name].package
    if package == "native":
        return common.native_refusal(device)
    if package in ("ctranslate2", "llama_cpp") and device != "cpu":
        return f"runs on the CPU only, not on {device}"
    modules = NEEDS.get(package, {package: package} if package else {})
    absent = [pip for module, pip in modules.items() if not importlib.util.find_spec(module)]
    return f"pip install {' '.join(absent)}" if absent else ""


def available(names: list[str], device: str) -> list[str]:
    """Return the engines that can run here, `cache` always among them.

    The others are reported on stderr with the reason.
    """
    wanted = [name for name in ENGINES if name in ("cache", *names)]
    reasons = {}
    for name in wanted:
        reasons.setdefault(unavailable_reason(name, device), []).append(name)
    running = reasons.pop("")
    for reason, left_out in reasons.items():
        print(f"without {', '.join(left_out)}: {reason}", file=sys.stderr)
    return running


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all engines for each model, batch size, length and repeat.

    Raises UserError for bad options.
    """
    engines = available(args.engines, device)
    models = common.models_that_fit(args.model, max(args.max_new_tokens) + args.prompt_tokens)
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        peaks[dtype] = common.bandwidth(device, dtype)
    for model_name in models:
        model = load_model(model_name, torch.float32, device)
        environment = common.describe_environment(model_name, model, device)
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
            directory = Path(temporary)
            prepare(model, directory, engines)
            engine_processes = {}
            for name in engines:
                engine_processes[name] = EngineProcess(name, directory, device)
                stack.callback(engine_processes[name].close)
            for batch_size, length in itertools.product(args.batch_size, args.max_new_tokens):
                vocab_size = model.config.vocab_size
                prompts = common.random_prompts(vocab_size, batch_size, args.prompt_tokens)
                check(engine_processes, prompts, length, device)
                memory = {}
                for name in engines:
                    alone = (run_once, name, directory, device, prompts, length)
                    imports = IMPORTS.get(ENGINES[name].package, [])
                    memory[name] = common.in_own_process(device, imports, *alone) / 1e6
                for repeat, name in itertools.product(range(args.repeats), engines):
                    dtype = ENGINES[name].dtype
                    peak = peaks[torch.bfloat16 if dtype == "bfloat16" else torch.float32]
                    row = environment | engine_processes[name](
                        throughput_columns, prompts, length, device, peak
                    )
                    row |= {"mode": name, "dtype": dtype, "temperature": 0.0, "prompt": 0}
                    results.write(**row, repeat=repeat, peak_memory_mb=memory[name])


def plot(summary):
    """Plot decode rates, times to the first token, and peak memory over batch sizes.

    Each model and length has four panels: the rate of the whole batch, the rate of each sequence,
    then the other two.
    """
    from matplotlib.figure import Figure

    groups = list(summary.groupby(["model", "new_tokens"], sort=False))
    figure = Figure(figsize=(12.5, 8 * len(groups)), layout="constrained")
    all_panels = figure.subplots(2 * len(groups), 2).reshape(len(groups), 4)
    for ((model, length), rows), panels in zip(groups, all_panels):
        for name, points in rows.groupby("mode", sort=False):
            draw_engine(panels, name, points)
        sizes = sorted(set(rows["batch_size"]))
        for axes, what in zip(panels, LABELS):
            axes.set_title(f"{textwrap.fill(model, 45)}, {length} tokens", fontsize="medium")
            axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel=what)
            axes.set_xticks(sizes, sizes, minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        panels[-1].set(yscale="linear", ylim=(0, None))
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize="small")
    what = "median of the repeats, min and max of decode rates"
    figure.suptitle(f"Greedy decoding by engine: {what}")
    return figure


def draw_engine(panels, name: str, points) -> None:
    """Draw a line in each panel, dashed for the engine of another library."""
    sizes = points["batch_size"]
    rate = "decode_tokens_per_s"
    median, low, high = (points[f"{rate}_{what}"] for what in ("median", "min", "max"))
    line = "-" if ENGINES[name].is_ours else "--"
    colour = dict(zip(ENGINES, COLOURS, strict=True))[name]
    style = {"marker": "o", "capsize": 3, "label": name, "linestyle": line, "color": colour}
    for axes, count in zip(panels, (1, sizes)):
        spread = [(median - low) / count, (high - median) / count]
        axes.errorbar(sizes, median / count, yerr=spread, **style)
    del style["capsize"]
    for axes, name in zip(panels[2:], ("first_token_s", "peak_memory_mb")):
        axes.plot(sizes, points[name], **style)


def main(argv=None) -> None:
    description = "; ".join(
        f"{name}: {what}, {dtype}" for name, (_, dtype, what) in ENGINES.items()
    )
    parser = Parser(description=f"Time greedy decoding of batches by engine. {description}.")
    models = {"nargs": "+", "default": [str(STORIES)]}
    parser.add_argument("--model", **models, help="directories, or model names of infer.py")
    engines = {"nargs": "+", "default": list(ENGINES), "choices": ENGINES}
    parser.add_argument("--engines", **engines, help="engines to time besides cache")
    sizes = {"type": common.integer_in_range(1, MAX_SEQUENCES), "default": [1, 8, 32]}
    parser.add_argument("--batch-size", **common.LIST, **sizes, help="sequences per batch")
    tokens = {"type": common.integer_in_range(1), "default": 16}
    prompt = "random token ids per prompt"
    parser.add_argument("--prompt-tokens", **tokens, help=prompt)
    common.add_options(parser, "batching_cpu.csv", lengths=[100], repeats=3, dtypes=False)
    common.run_benchmark(parser, measure, {"mode": "cache", "dtype": "float32"}, plot, argv)


if __name__ == "__main__":
    main()
