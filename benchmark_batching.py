"""Tokens/s, time to the first token and memory of each engine over batch sizes: python benchmark_batching.py."""

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

import torch

import benchmark_common as common
import benchmark_kv_cache
from cache import KVCache
from checkpoint import UserError
from infer import MOST_TEXTS, STORIES, Parser, generate, pass_logits, pick_dtype
from load import load_model
from model import Model
from native import BuildError, kernel, use_native
from sampling import SamplingParams

ENGINES = {  # name: the package it needs or "", its dtype, what it is
    "no cache": ("", "float32", "torch, all positions again in each step"),
    "cache": ("", "float32", "torch"),
    "bfloat16": ("", "bfloat16", "torch"),
    "int8": ("", "int8", "torch, lesson 23"),
    "native": ("native", "float32", "the C code of lesson 25"),
    "native int8": ("native", "int8", "the same"),
    "transformers": ("transformers", "float32", "its generate"),
    "CTranslate2": ("ctranslate2", "float32", "its Generator"),
    "CTranslate2 int8": ("ctranslate2", "int8", "the same"),
}
IMPORTS = {"transformers": benchmark_kv_cache.PEER_IMPORTS, "ctranslate2": ["ctranslate2"]}
BOUNDS = {"bfloat16": 0.5, "int8": 1.0}  # the largest difference of a log-probability to float32's; a tenth on average


def load(engine: str, directory: Path, device: str):
    """The model as that engine runs it. The directory is what `prepare` made."""
    package, dtype, _ = ENGINES[engine]
    if package == "transformers":
        return benchmark_kv_cache.load(package, directory, torch.float32, device)
    if package == "ctranslate2":
        import ctranslate2

        threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()}
        return ctranslate2.Generator(str(directory / "ctranslate2"), compute_type=dtype, **threads)
    model = load_model(directory, pick_dtype(dtype, device), device)
    if package == "native":
        use_native(model)
    return model


def prepare(model: Model, directory: Path, engines: list[str]) -> None:
    """Write the model where all engines load it. For CTranslate2 it is converted, with the ids for a vocabulary."""
    model.save_pretrained(directory)
    if any(ENGINES[engine][0] == "ctranslate2" for engine in engines):
        from ctranslate2.converters import TransformersConverter
        from tokenizers import Tokenizer, models
        from transformers import logging

        ids = {str(token): token for token in range(model.config.vocab_size)}
        Tokenizer(models.WordLevel(ids, unk_token="0")).save(str(directory / "tokenizer.json"))
        tokens = {f"{name}_token": "0" for name in ("unk", "bos", "eos")}
        about = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens
        (directory / "tokenizer_config.json").write_text(json.dumps(about))
        logging.disable_progress_bar()
        TransformersConverter(str(directory)).convert(str(directory / "ctranslate2"))


def run(engine: str, model, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
    """Greedy steps of one token a prompt, the seconds to the first step, and from there to the last."""
    package = ENGINES[engine][0]
    if package == "transformers":
        return benchmark_kv_cache.run(package, model, prompts, length, device)
    if package != "ctranslate2":
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return common.timed(generate(model, prompts, params, use_cache=engine != "no cache"), device)
    texts, times = [[str(token) for token in prompt] for prompt in prompts], []

    def clock(step) -> bool:  # called for each token; False: go on
        if not times:
            times.append(common.now(device))
        return False

    options = {"max_length": length, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
    began = common.now(device)
    results = model.generate_batch(texts, max_batch_size=len(texts), callback=clock, **options)
    rows = [[int(token) for token in result.sequences[0]] for result in results]
    return [list(step) for step in zip(*rows)], times[0] - began, common.now(device) - times[0]


def speeds(engine: str, model, prompts: list[list[int]], length: int, device: str, bandwidth: float) -> dict:
    """The columns of one run. Shares of the roofline are for engines whose bytes are known: ours, with their cache."""
    _, first, rest = run(engine, model, prompts, length, device)
    known = ENGINES[engine][0] in ("", "native") and engine != "no cache"
    return common.speeds(model if known else None, prompts, length, first, rest, bandwidth)


def run_once(engine: str, directory: Path, device: str, prompts: list[list[int]], length: int) -> None:
    """Load the model and generate once, for its memory."""
    run(engine, load(engine, directory, device), prompts, length, device)


class Worker:
    """A process of its own in which an engine has its model, because threads of one that wait would disturb another.

    Call it with a function and arguments: function(engine, model, *arguments) runs there, and what it returns is here.
    """

    def __init__(self, engine: str, directory: Path, device: str):
        context, self.engine = multiprocessing.get_context("spawn"), engine
        self.connection, there = context.Pipe()
        state = there, engine, directory, device, torch.get_num_threads()
        self.process = context.Process(target=serve, args=state, daemon=True)
        self.process.start()
        there.close()

    def __call__(self, function, *arguments):
        try:
            self.connection.send((function, arguments))
            result = self.connection.recv()
        except (EOFError, OSError):
            raise UserError(f"the process of {self.engine} ended; is there too little memory?") from None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()


def serve(connection, engine: str, directory: Path, device: str, threads: int) -> None:
    """What a worker's process does, until the other end of the connection is closed, or gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    torch.set_num_threads(threads)
    model = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
            try:
                model = model or load(engine, directory, device)
                result = function(engine, model, *arguments)
            except Exception as error:
                result = error
            connection.send(result)


@torch.inference_mode()
def log_probs(engine: str, model, text: list[int]) -> torch.Tensor:
    """Of the token after each position of a text, (T, vocab_size), as that engine computes them."""
    if ENGINES[engine][0] == "ctranslate2":
        import numpy

        return torch.tensor(numpy.array(model.forward_batch([list(map(str, text))], return_log_probs=True)))[0].float()
    cache = KVCache(model, 1, len(text))
    return torch.cat([pass_logits(model, [[token]], [0], cache, 1)[0] for token in text]).log_softmax(dim=-1)


def check(workers: dict, prompts: list[list[int]], length: int, device: str) -> None:
    """Exit unless all engines with float32 make the same tokens, and the others have nearly the same probabilities."""
    texts = {engine: worker(run, prompts, length, device)[0] for engine, worker in workers.items()}  # also warms up
    exact = {engine: text for engine, text in texts.items() if ENGINES[engine][1] == "float32"}
    if any(len(text) != length for text in texts.values()) or any(text != exact["cache"] for text in exact.values()):
        sys.exit(f"{', '.join(exact)} do not make the same tokens: no timing of wrong results")
    text = prompts[0] + [step[0] for step in exact["cache"][:-1]]
    expected = workers["cache"](log_probs, text)
    for engine in [engine for engine in texts if engine not in exact]:
        error, bound = (workers[engine](log_probs, text) - expected).abs(), BOUNDS[ENGINES[engine][1]]
        if not (error.max() <= bound and error.mean() <= bound / 10):  # NaN is an error too
            sys.exit(f"{engine}: log-probabilities are off by up to {error.max():.3f}: no timing of wrong results")


def usable(names: list[str], device: str) -> list[str]:
    """The engines that can run here, `cache` always among them; a line on stderr says which cannot, and why."""
    engines, missing = [], {}
    for engine in [name for name in ENGINES if name in ("cache", *names)]:
        package = ENGINES[engine][0]
        if package in ("native", "ctranslate2") and device != "cpu":
            missing.setdefault(f"for the CPU only, not {device}", []).append(engine)
        elif package == "native":
            try:
                kernel()
                engines.append(engine)
            except BuildError as error:
                missing.setdefault(str(error), []).append(engine)
        elif package and not importlib.util.find_spec(package):
            missing.setdefault(f"pip install {package}", []).append(engine)
        else:
            engines.append(engine)
    for reason, left_out in missing.items():
        print(f"without {', '.join(left_out)}: {reason}", file=sys.stderr)
    return engines


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all engines for each model, batch size, length and repeat. Raises UserError for bad options."""
    engines = usable(args.engines, device)
    names = common.models_that_fit(args.model, max(args.max_new_tokens) + args.prompt_tokens)
    peaks = {dtype: common.bandwidth(device, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    for name in names:
        model = load_model(name, torch.float32, device)
        about = common.describe(name, model, device)
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
            directory = Path(temporary)
            prepare(model, directory, engines)
            workers = {engine: Worker(engine, directory, device) for engine in engines}
            for worker in workers.values():
                stack.callback(worker.close)
            for batch_size, length in itertools.product(args.batch_size, args.max_new_tokens):
                prompts = common.random_prompts(model.config.vocab_size, batch_size, args.prompt_tokens)
                check(workers, prompts, length, device)
                memory = {}
                for engine in engines:
                    alone = (run_once, engine, directory, device, prompts, length)
                    imports = IMPORTS.get(ENGINES[engine][0], [])
                    memory[engine] = common.in_own_process(device, imports, *alone) / 1e6
                for repeat, engine in itertools.product(range(args.repeats), engines):
                    dtype = ENGINES[engine][1]
                    peak = peaks["bfloat16" if dtype == "bfloat16" else "float32"]
                    measured = workers[engine](speeds, prompts, length, device, peak)
                    row = about | measured | {"mode": engine, "dtype": dtype, "temperature": 0.0, "prompt": 0}
                    results.write(**row, repeat=repeat, peak_memory_mb=memory[engine])


def plot(summary):
    """Decode rates of all texts together, and of each text, over batch sizes: two panels for each model and length."""
    from matplotlib.figure import Figure

    groups = list(summary.groupby(["model", "new_tokens"], sort=False))
    figure = Figure(figsize=(11, 4.2 * len(groups)), layout="constrained")
    for ((model, length), rows), panels in zip(groups, figure.subplots(len(groups), 2, squeeze=False)):
        for engine, points in rows.groupby("mode", sort=False):
            sizes = points["batch_size"]
            median, low, high = (points[f"decode_tokens_per_s_{name}"] for name in ("median", "min", "max"))
            style = {"marker": "o", "capsize": 3, "label": engine}
            style |= {"linestyle": "--"} if ENGINES[engine][0] in ("transformers", "ctranslate2") else {}
            for axes, texts in zip(panels, (1, sizes)):
                axes.errorbar(sizes, median / texts, yerr=[(median - low) / texts, (high - median) / texts], **style)
        for axes, what in zip(panels, ("of all texts together", "of each text")):
            axes.set_title(f"{textwrap.fill(model, 45)}, {length} tokens", fontsize="medium")
            axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel=f"tokens/s {what}")
            axes.set_xticks(sorted(set(rows["batch_size"])), sorted(set(rows["batch_size"])), minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle("Greedy decoding after the first token, by engine: median, min and max")
    return figure


def main(argv=None) -> None:
    about = "; ".join(f"{name}: {what}, {dtype}" for name, (_, dtype, what) in ENGINES.items())
    parser = Parser(description=f"Time greedy decoding of batches by engine. {about}.")
    parser.add_argument("--model", nargs="+", default=[str(STORIES)], help="directories, names as in infer.py")
    parser.add_argument(
        "--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="what to time beside cache"
    )
    texts = common.whole_number(1, MOST_TEXTS)
    parser.add_argument("--batch-size", type=texts, **common.LIST, default=[1, 8, 32], help="texts at once")
    parser.add_argument("--prompt-tokens", type=common.whole_number(1), default=16, help="random ids in each prompt")
    common.add_options(parser, "batching_cpu.csv", lengths=[100], repeats=3, dtypes=False)
    common.run_benchmark(parser, measure, {"mode": "cache", "dtype": "float32"}, plot, argv)


if __name__ == "__main__":
    main()
