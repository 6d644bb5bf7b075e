"""Servers under load, measured from their clients: python -m benchmarks.serving."""

import argparse
import contextlib
import http.client
import importlib.metadata
import itertools
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from benchmarks import client, common
from benchmarks.batching import ENGINES, NEEDS, EngineProcess, unavailable_reason
from benchmarks.export_gguf import write_gguf
from command_line.options import STORIES
from command_line.parser import Parser
from engine.engine import Engine
from engine.pages import page_count
from errors import UserError
from loading.load import load_model, resolve_source
from model import Model
from sampling import SamplingParams
from text.tokenizer import load_encoding

COLUMNS = {
    "mode": "the server",
    "load": "N clients (closed loop); Poisson arrivals at a share of those clients' tokens/s;"
    " one client with long prompts; `engine alone`: the N clients' requests without a"
    " server; `warm-up`: short requests before all others",
    "measure": "measure and its unit; a plain step is a step of the engine alone without prefill",
    "value": "as measured",
    "repeat": "each repeat runs all modes once, with new prompts",
}
COLUMNS = common.columns(COLUMNS)
MODES = {  # server -> engine of benchmarks.batching
    "one at a time": "cache",
    "engine": "cache",
    "engine native": "native",
    "engine native int8": "native int8",
    "transformers": "transformers",
    "llama.cpp": "llama.cpp",
}
EXTRA_BODIES = {  # package -> request fields that make its server ignore EOS
    "transformers": {"generation_config": '{"do_sample": false, "eos_token_id": -1}'},
    "llama_cpp": {"min_tokens": 10**6},
}
PAGE = 16  # positions per page
NEW = 8  # new tokens of a request that is timed for its first token
LONG = 9  # requests with long prompts
STARTUP_TIMEOUT = 120  # seconds for a server to start


class Results(common.MetricsFile):
    """A CSV file with a row for each value."""

    columns = COLUMNS
    setting = ["model", "mode", "load", "measure"]

    def write(self, mode: str, load: str, repeat: int, values: dict) -> None:
        """Add values, measure -> number."""
        engine = ENGINES[MODES[mode]]
        run = {"mode": mode, "dtype": engine.dtype, "load": load, "repeat": repeat}
        if not engine.is_ours:
            name = NEEDS.get(engine.package, {}).get(engine.package, engine.package)
            run["library"] = f"{name} {importlib.metadata.version(name)}"
        self.add(f"{mode}  {load}  repeat {repeat}", run, values)


# Servers


def max_num_seqs_of(mode: str, args) -> int:
    """Return the maximum number of sequences that the server runs concurrently."""
    return 1 if mode == "one at a time" else args.clients


def command(mode: str, args, model: Model, device: str, directory: Path) -> list:
    """Return Python's arguments to start a server, without the port."""
    engine = ENGINES[MODES[mode]]
    max_num_seqs = max_num_seqs_of(mode, args)
    if engine.is_ours:
        line = [common.ROOT / "serve.py", "--model", args.model, "--device", device]
        line += ["--dtype", engine.dtype, "--backend", engine.package or "torch"]
        return line + ["--max-num-seqs", max_num_seqs, "--page-size", PAGE]
    tokenizer = resolve_source(args.model).file("tokenizer.json")
    if engine.package == "transformers":
        line = ["-m", "transformers.cli.transformers", "serve", tokenizer.parent]
        line += ["--device", device, "--dtype", engine.dtype, "--continuous-batching"]
        pages = max_num_seqs * page_count(model.config.block_size, PAGE)
        return line + ["--cb-block-size", PAGE, "--cb-num-blocks", pages]
    write_gguf(model, directory / "model.gguf", engine.dtype, tokenizer)
    line = ["-m", "llama_cpp.server", "--model", directory / "model.gguf"]
    line += ["--interrupt_requests", "false", "--n_ctx", model.config.block_size]
    return line + ["--n_threads", torch.get_num_threads()]


@contextlib.contextmanager
def server(line: list, threads: int | None = None) -> Iterator[str]:
    """Start a server, yield its URL, and stop it after the block.

    threads: of each of its processes, by default as many as here. Raises UserError if the server
    does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [str(part) for part in [sys.executable, *line, "--port", port]]
    # Offline, because the model is already here.
    settings = {"OMP_NUM_THREADS": str(threads or torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | settings)
        try:
            until = time.monotonic() + STARTUP_TIMEOUT
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().rpartition("\n")[-1]
                    raise UserError(f"the server did not start: {said}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(port: int) -> bool:
    """Return whether a server lists its models: it may still load, or a proxy may answer first."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


# Loads


class Bench(NamedTuple):
    """A server under measurement."""

    args: argparse.Namespace
    mode: str
    url: str
    engine_process: EngineProcess | None  # the same engine without a server, if it is ours

    def exchanges(self, seed: str, *sizes) -> Iterator[client.Exchange]:
        """Yield requests with this server's fields. sizes: arguments of `client.request_bodies`."""
        extra_body = EXTRA_BODIES.get(ENGINES[MODES[self.mode]].package, client.EXTRA_BODY)
        for body in client.request_bodies(seed, *sizes):
            yield client.Exchange(self.url, body | extra_body)


def engine_alone(name: str, model: Model, args, max_num_seqs: int, seed: str) -> dict[str, float]:
    """Measure the engine without a server, on the requests of N clients."""
    encoding = load_encoding(args.model, model.config.vocab_size)
    request_bodies = client.request_bodies(seed, args.prompt_words, args.new_tokens)
    engine = Engine(model, max_num_seqs=max_num_seqs, page_size=PAGE, encoding=encoding)
    engine.add(encoding.encode(" the"), SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    while engine.busy:  # warm up, as the servers are
        engine.step()
    requests = []
    plain = []  # seconds of steps without prefill
    began = time.perf_counter()
    while (step_start := time.perf_counter()) < began + args.seconds:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < args.clients:
            body = next(request_bodies)
            params = SamplingParams(max_new_tokens=body["max_tokens"], ignore_eos=True)
            requests.append(engine.add(encoding.encode(body["prompt"]), params))
        before = engine.num_computed_tokens
        events = engine.step()
        if engine.num_computed_tokens - before == len(events):
            plain.append(time.perf_counter() - step_start)
    tokens = sum(len(request.output) for request in requests)
    values = {"tokens/s": tokens / (step_start - began)}
    if plain:
        values["plain step, ms"] = 1000 * statistics.median(plain)
    return values


def warmup_texts(bench: Bench) -> list[str]:
    """Warm up with one short request per client, and return the outputs.

    Raises UserError if a request fails.
    """
    clients = bench.args.clients
    exchanges = itertools.islice(
        bench.exchanges("texts", bench.args.prompt_words, (NEW, NEW)), clients
    )
    outputs = client.run(client.closed_loop(exchanges, clients, math.inf)).outputs
    if failures := {output.failure for output in outputs if output.failure}:
        raise UserError(f"the warm-up failed: {', '.join(sorted(failures))}")
    return [output.text for output in outputs]


def poisson_load(bench: Bench, rate: float, seed: str) -> client.LoadResult:
    """Send requests at Poisson arrival times that ask for `rate` tokens per second."""
    args = bench.args
    exchanges = bench.exchanges(seed, args.prompt_words, args.new_tokens)
    sent = [next(exchanges)]
    while (tokens := sum(exchange.max_tokens for exchange in sent)) < rate * args.seconds:
        sent.append(next(exchanges))
    arrival_times = client.poisson_arrivals(len(sent), rate * len(sent) / tokens, seed)
    return client.run(client.open_loop(sent, arrival_times))


def long_prompts(bench: Bench, seed: str, *sizes) -> dict[str, float]:
    """Return TTFTs of one client's long prompts. sizes: arguments of `client.request_bodies`."""
    exchanges = itertools.islice(bench.exchanges(seed, *sizes), LONG)
    values = client.calculate_metrics(
        client.run(client.closed_loop(exchanges, 1, math.inf)), math.inf, math.inf
    )
    return {name: values[name] for name in values if name.startswith(("ttft", "failed"))}


def run_loads(bench: Bench, repeat: int, write) -> None:
    """Put a server under each load. write: Results.write."""
    args = bench.args
    busy = f"{args.clients} clients"
    seed = f"{busy} {repeat}"
    baseline = {}
    if bench.engine_process:
        baseline = bench.engine_process(engine_alone, args, max_num_seqs_of(bench.mode, args), seed)
        write(bench.mode, "engine alone", repeat, baseline)
    exchanges = bench.exchanges(seed, args.prompt_words, args.new_tokens)
    load = client.run(client.closed_loop(exchanges, args.clients, args.seconds))
    values = client.calculate_metrics(load, *args.goodput)
    capacity = values["tokens/s"]
    if baseline.get("tokens/s"):
        values["x engine alone"] = capacity / baseline["tokens/s"]
    write(bench.mode, busy, repeat, values)
    for share in args.shares if capacity else []:
        name = f"{share:g} of capacity"
        load = poisson_load(bench, share * capacity, f"{name} {repeat}")
        values = client.calculate_metrics(load, *args.goodput)
        if "plain step, ms" in baseline:
            for measure in [measure for measure in values if measure.startswith(("ttft", "itl"))]:
                steps = values[measure] / baseline["plain step, ms"]
                values[measure.replace("ms", "plain steps")] = steps
        write(bench.mode, name, repeat, values)

    new = (NEW, NEW)
    whole = (args.long_prompt + NEW, args.long_prompt + NEW)
    write(bench.mode, "long prompts", repeat, long_prompts(bench, f"long {repeat}", whole, new))
    part = (args.long_prompt, args.long_prompt)
    first = next(client.request_bodies(f"shared {repeat}", part, new))["prompt"]
    values = long_prompts(bench, f"last {repeat}", new, new, first)
    write(bench.mode, "long prompts, shared", repeat, values)


# The whole benchmark


def measure(args, device: str, results: Results) -> None:
    """Put all servers under all loads, in turns. Raises UserError for bad options."""
    client.check_load_options(args)
    longest = max(args.prompt_words[1] + args.new_tokens[1], args.long_prompt + 2 * NEW)
    common.models_that_fit([args.model], longest)
    model = load_model(args.model, torch.float32, device)
    environment = common.describe_environment(args.model, model, device)
    results.environment = {name: environment[name] for name in COLUMNS if name in environment}
    benches = []
    expected = None  # outputs of the first server
    exact = None  # mode and outputs of our first float32 server
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for mode in args.modes:
            engine = ENGINES[MODES[mode]]
            try:
                if reason := unavailable_reason(MODES[mode], device):
                    raise UserError(reason)
                with contextlib.ExitStack() as startup:  # stops the servers if one fails to start
                    url = startup.enter_context(
                        server(command(mode, args, model, device, directory))
                    )
                    texts = warmup_texts(Bench(args, mode, url, None))
                    stack.push(startup.pop_all())
            except UserError as error:
                print(f"without {mode}: {error}", file=sys.stderr)
                continue
            expected = expected or texts
            same = sum(text == other for text, other in zip(texts, expected)) / len(texts)
            if engine.is_ours and engine.dtype == "float32":
                exact = exact or (mode, texts)
                if texts != exact[1]:
                    sys.exit(f"{mode}: outputs differ from {exact[0]}; wrong results are not timed")
            results.write(mode, "warm-up", 0, {"share equal to the first server": same})
            engine_process = None
            if engine.is_ours:
                engine_process = EngineProcess(MODES[mode], args.model, device)
                stack.callback(engine_process.close)
            benches.append(Bench(args, mode, url, engine_process))
        if not benches:
            raise UserError(f"--modes {' '.join(args.modes)}: no server could be started")
        for repeat, bench in itertools.product(range(args.repeats), benches):
            run_loads(bench, repeat, results.write)


PANELS = [  # title, unit, patterns of load and measure, column that sets the colour
    ("Closed loop", "tokens/s", "alone|clients", "tokens/s", "load"),
    ("Long prompts: time to first token", "ms", "long", "ttft, ms, p50", "load"),
    ("Poisson arrivals: time to first token", "ms", "capacity", "ttft, ms, p..", "measure"),
    (
        "Poisson arrivals: inter-token latency",
        "ms",
        "capacity",
        "(itl|chunk gap), ms, p..",
        "measure",
    ),
]


def plot(summary):
    """Plot tokens/s of busy clients, TTFT of long prompts, and latencies of Poisson arrivals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    for axes, (title, unit, loads, names, colour) in zip(figure.subplots(2, 2).flat, PANELS):
        shown = summary["load"].str.contains(loads) & summary["measure"].str.fullmatch(names)
        # Chunk gaps stand in for ITL where token times are unknown.
        rows = summary[shown].replace({"measure": {"chunk gap": "itl"}}, regex=True)
        labels = rows["mode"] if colour == "load" else rows["mode"] + ", " + rows["load"]
        draw(axes, rows.assign(label=labels), colour)
        axes.set(title=title, xlabel=unit)
    figure.suptitle("Servers under load: median, min and max of the repeats")
    return figure


def draw(axes, rows, colour: str) -> None:
    """Draw bars at each label."""
    labels = list(dict.fromkeys(rows["label"]))[::-1]  # the first at the top
    for index, (name, bars) in enumerate(rows.groupby(colour, sort=False)):
        at = [labels.index(label) - 0.4 * index for label in bars["label"]]
        error = [bars["median"] - bars["min"], bars["max"] - bars["median"]]
        drawn = axes.barh(at, bars["median"], 0.4, xerr=error, capsize=2, label=name)
        axes.bar_label(drawn, fmt="%.4g", padding=4, fontsize="x-small")
        axes.legend(fontsize="x-small")
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.margins(x=0.15)


def main(argv=None) -> None:
    parser = Parser(description="Time servers with OpenAI's API on greedy requests over a socket.")
    parser.add_argument("--model", default=STORIES, help="directory, or model name of infer.py")
    modes = {"default": list(MODES), "choices": MODES, "metavar": "MODE"}
    what = f"servers: {', '.join(MODES)}"
    parser.add_argument("--modes", **common.LIST, **modes, help=what)
    number = {"type": common.integer_in_range(1)}
    what = "clients of the closed loop, and maximum sequences per step"
    parser.add_argument("--clients", **number, default=32, help=what)
    shares = {"type": client.positive_float, "default": [0.7, 1.2]}
    what = "loads of Poisson arrivals, as shares of the closed loop's tokens/s"
    parser.add_argument("--shares", **common.LIST, **shares, help=what)
    what = "words of a long prompt, or of the prefix that long prompts share"
    parser.add_argument("--long-prompt", **number, default=200, help=what)
    shared = {"lengths": None, "repeats": 1, "dtypes": False, "columns": COLUMNS}
    common.add_options(parser, "serving_cpu.csv", **shared)
    client.add_load_options(parser)
    common.run_benchmark(parser, measure, None, plot, argv, Results)


if __name__ == "__main__":
    main()
