"""Tokens/s, memory and traffic of several processes, measured and predicted.

python -m benchmarks.scaling
"""

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import numpy

from benchmarks import client, common, predict
from benchmarks.engine import check
from benchmarks.predict import Step
from benchmarks.ranks import SIZES
from benchmarks.serving import server
from command_line.options import STORIES
from command_line.parser import Parser
from engine.pages import page_count
from errors import UserError
from loading.load import load_config, load_model, save_model

COLUMNS = {
    "mode": "one process: the engine without torchrun; gather, reduce: ranks, by --join; busy:"
    " parts of one rank's step while as many other groups run; replicas: serve_ray.py",
    "processes": "number of ranks or replicas",
    "measure": "measure and its unit",
    "value": "as measured, or as predicted if the measure says so",
    "repeat": "each repeat runs everything once",
    "max_num_seqs": "maximum number of sequences per step of an engine",
    "cores": "cores of this machine",
    "threads": "threads per process",
}
COLUMNS = common.columns(COLUMNS)
PAGE = 16  # positions per page, the engine's default
PROMPT = 8  # tokens per prompt
WORDS = (5, 20)  # min and max words of a prompt to a server
NEW = (20, 60)  # min and max tokens of its answer
LIMIT = 600  # seconds for a group of processes
PARTS = ("step", "hidden", "head", "products", "attention", "communication", "broadcast")
REPLICA = "ServeReplica:default:Replica"  # Ray's process name
INGRESS_PROCESSES = ("ServeReplica:default:Ingress", "ProxyActor")  # all tokens pass through both


class Results(common.MetricsFile):
    """A CSV file with a row for each value."""

    columns = COLUMNS
    setting = ["model", "mode", "processes", "measure"]

    def write(self, mode: str, processes: int, repeat: int, values: dict, threads: int = 1) -> None:
        """Add values, measure -> number."""
        run = {"mode": mode, "processes": processes, "repeat": repeat, "threads": threads}
        self.add(f"{self.environment['model']}  {mode}  {processes}  repeat {repeat}", run, values)


def both(name: str, measured: float, predicted: float) -> dict[str, float]:
    """Return a measure's value, its prediction and their ratio."""
    ratio = {f"{name}, predicted / measured": predicted / measured} if measured else {}
    return {name: measured, f"{name}, predicted": predicted} | ratio


# Ranks


def run_group(directory: Path, job: dict, size: int, times: int = 1) -> list[dict]:
    """Run benchmarks.ranks in a group of `size` processes; return the results of each group.

    times: number of concurrent groups. Raises UserError if one of them fails.
    """
    running = []
    line = [sys.executable]
    if job["join"]:
        line += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        line += ["--log-dir", str(directory)]
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # gloo may pick another interface
    settings = {"OMP_NUM_THREADS": str(job["threads"]), "GLOO_SOCKET_IFNAME": loopback}
    try:
        for number in range(times):
            output = directory / f"found{number}"
            output.unlink(missing_ok=True)
            log = (directory / f"log{number}").open("w+")
            task = json.dumps(job | {"output": str(output)})
            process = subprocess.Popen(
                [*line, "-m", "benchmarks.ranks", task],
                env=os.environ | settings,
                stdout=log,
                stderr=log,
            )
            running.append((process, output, log))
        for process, output, log in running:
            process.wait(LIMIT)
            if not output.exists():
                log.seek(0)
                said = re.findall(r"Error: (.+)", log.read()) or ["no error message"]
                raise UserError(f"a group of {size} failed: {said[-1]}")
        return [json.loads(output.read_text()) for _, output, _ in running]
    except subprocess.TimeoutExpired:
        raise UserError(f"a group of {size}: timeout after {LIMIT} s") from None
    finally:
        for process, _, log in running:
            process.terminate()  # torchrun then ends its workers
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.close()


def step_of(found: list[dict]) -> Step:
    """Return the mean Step of several groups of one rank each."""
    for each in found:
        each["products"] = sum(each[name] for name in each if name.startswith("product "))
    mean = {name: sum(each[name] for each in found) / len(found) for name in PARTS}
    passes = mean["hidden"] + mean["head"]
    split = mean["products"] + mean["attention"]
    # A single rank makes all calls too, but waits for no other rank.
    each = passes - split - mean["communication"]
    return Step(
        mean["step"] - passes - mean["broadcast"], each, mean["products"], mean["attention"]
    )


def cost(collective_times: list[dict], kind: str, size: int) -> float:
    """Return the seconds of a collective of `size` bytes, interpolated from measurements.

    Beyond the largest size they grow in proportion to the bytes.
    """
    found = []
    for times in (each[kind] for each in collective_times):
        if size <= SIZES[len(times) - 1]:
            found.append(numpy.interp(size, SIZES[: len(times)], times))
    return float(numpy.mean(found)) if found else collective_times[-1][kind][-1] * size / SIZES[-1]


def measure_ranks(args, directory: Path, config, repeat: int, results: Results) -> None:
    """Measure an engine on one process, and on several ranks."""
    threads = args.threads or args.cores
    job = {"model": str(directory), "join": None, "threads": threads, "parts": False}
    job |= {
        "native": args.native,
        "max_num_seqs": args.max_num_seqs,
        "prompt": PROMPT,
        "tokens": args.new_tokens,
    }
    (found,) = run_group(directory, job, 1)
    expected = found["outputs"]
    values = {"tokens/s": args.max_num_seqs / found["step"], "memory, MB": found["memory"][0] / 1e6}
    results.write("one process", 1, repeat, values, threads)
    job["threads"] = 1
    for join in args.join:
        job["join"] = join
        (one,) = run_group(directory, job, 1)
        check(f"{join}, 1 rank", one["outputs"], expected)
        values = {"tokens/s": args.max_num_seqs / one["step"], "memory, MB": one["memory"][0] / 1e6}
        results.write(join, 1, repeat, values)
        busy = {}  # number of concurrent groups -> Step
        for size in args.ranks:
            beside = min(size, args.cores)
            if beside not in busy:
                busy[beside] = step_of(run_group(directory, job | {"parts": True}, 1, beside))
                parts = busy[beside]._asdict().items()
                values = {f"{name}, ms": 1000 * value for name, value in parts}
                results.write(f"busy {join}", beside, repeat, values)
            (found,) = run_group(directory, job, size)
            if join == "gather":
                check(f"{join}, {size} ranks", found["outputs"], expected)
            values = rank_values(args, config, join, size, one, busy[beside], found)
            same = sum(text == other for text, other in zip(found["outputs"], expected))
            values["share of outputs equal to one process"] = same / len(expected)
            results.write(join, size, repeat, values)


def rank_values(args, config, join: str, size: int, one: dict, busy: Step, found: dict) -> dict:
    """Return measured and predicted values of a group of ranks. one, busy: of a single rank."""
    collectives = predict.collectives(config, size, join, args.max_num_seqs)
    collective_times = found["collective_times"]
    communication = sum(
        cost(collective_times, collective.kind, collective.size) for collective in collectives
    )
    broadcast = cost(collective_times, "broadcast", SIZES[0])
    share = predict.largest_shares(config, size, join)
    turns = math.ceil(size / args.cores)
    step = predict.step_seconds(busy, share, turns, communication + broadcast)
    values = both("tokens/s", args.max_num_seqs / found["step"], args.max_num_seqs / step)
    values["collectives per step"] = found["collectives"]
    values["bytes sent per step"] = found["sent"]
    sent = sum(predict.sent(collective, size) for collective in collectives)
    values["bytes sent per step, predicted"] = sent
    # With more ranks than cores this includes the turns of other ranks.
    values["collectives, ms per step"] = 1000 * found["communication"]
    values["collectives, ms per step, predicted"] = 1000 * communication
    positions = PAGE * page_count(PROMPT + args.new_tokens - 1, PAGE)
    held = []
    for of in (1, size):
        part = predict.shard_of(config, 0, of, join)
        held.append(predict.weights(part) + predict.cache_bytes(part, args.max_num_seqs, positions))
    memory = one["memory"][0] - held[0] + held[1]
    values |= both("memory of rank 0, MB", found["memory"][0] / 1e6, memory / 1e6)
    for kind, length in itertools.product(collective_times[0], SIZES):
        values[f"{kind} of {length // 1024} KiB, ms"] = 1000 * cost(collective_times, kind, length)
    return values


# Replicas


def measure_replicas(args, model: str, repeat: int, results: Results) -> None:
    """Measure engines of serve_ray.py, each under as many clients as its max_num_seqs."""
    expected = None
    one = {}
    for count in [1, *args.replicas]:
        line = [common.ROOT / "serve_ray.py", "--model", model, "--replicas", count]
        cpus = min(1.0, math.floor(1e4 * args.cores / count) / 1e4)  # rounded to Ray's resolution
        line += ["--cpus", cpus, "--device", "cpu", "--max-num-seqs", args.max_num_seqs]
        line += ["--backend", "native" if args.native else "torch"]
        with server(line, threads=1) as url:
            texts = [
                output.text
                for output in run_clients(args, url, "texts", max(args.replicas)).outputs
            ]
            expected = expected or texts
            if texts != expected:
                sys.exit(f"{count} replicas: outputs differ; wrong results are not timed")
            before = [processor_seconds(name) for name in ("", *INGRESS_PROCESSES)]
            load = run_clients(args, url, f"{count} {repeat}", count, args.seconds)
            after = [processor_seconds(name) for name in ("", *INGRESS_PROCESSES)]
            memory = memory_of(REPLICA)
        values = client.calculate_metrics(load, math.inf, math.inf)
        now = {"tokens/s": values["tokens/s"]}
        tokens = sum(output.tokens for output in load.outputs)
        if after[0]:
            busy, *ingress = [1000 * (new - old) / tokens for new, old in zip(after, before)]
            now |= {"core ms per token": busy, "of them in the ingress": sum(ingress)}
            now["of them in its busiest process"] = max(ingress)
            now["memory of replicas, MB"] = memory / 1e6
        one = one or now
        if count > 1 and "core ms per token" in one:
            busy = one["core ms per token"] / 1000
            busiest_ingress = one["of them in its busiest process"] / 1000
            rate = predict.replica_rate(one["tokens/s"], busy, busiest_ingress, count, args.cores)
            now |= both("tokens/s", now["tokens/s"], rate)
            name = "memory of replicas, MB"
            now |= both(name, now[name], count * one[name])
        results.write("replicas", count, repeat, now)


def run_clients(args, url: str, seed: str, count: int, seconds: float = 0) -> client.LoadResult:
    """Put `count` replicas under load. With seconds=0 each client sends one request.

    Raises UserError if a request fails.
    """
    clients = count * args.max_num_seqs
    request_bodies = client.request_bodies(seed, WORDS, NEW)
    exchanges = (client.Exchange(url, body | client.EXTRA_BODY) for body in request_bodies)
    if not seconds:
        exchanges = itertools.islice(exchanges, clients)
    load = client.run(client.closed_loop(exchanges, clients, seconds or math.inf))
    if failures := {output.failure for output in load.outputs if output.failure}:
        raise UserError(f"requests to {url} failed: {', '.join(sorted(failures))}")
    return load


def process_tree(name: str) -> list[Path]:
    """Return the /proc directories of this process and its descendants; none outside Linux.

    name: a regular expression to find in their command lines.
    """
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        fields = read(file).rpartition(")")[2].split()
        if fields:
            parents[int(file.parent.name)] = int(fields[1])
    own = {os.getpid()} & set(parents)
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    found = [Path("/proc", str(pid)) for pid in own]
    return [path for path in found if re.search(name, read(path / "cmdline"))]


def read(file: Path) -> str:
    """Return the content of a file in /proc, or "" if its process has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def processor_seconds(name: str = "") -> float:
    """Return the CPU seconds of these processes."""
    total = 0
    for process in process_tree(name):
        fields = read(process / "stat").rpartition(")")[2].split()
        total += sum(map(int, fields[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


def memory_of(name: str) -> int:
    """Return the private bytes of these processes, without shared memory such as libraries."""
    lines = "".join(read(process / "smaps_rollup") for process in process_tree(name))
    return sum(1024 * int(size) for size in re.findall(r"^Private_\w+: +(\d+)", lines, re.M))


# The whole benchmark


def measure(args, device: str, results: Results) -> None:
    """Measure and predict. Raises UserError for bad options."""
    if device != "cpu":
        raise UserError(f"--device {device}: only cpu is supported here")
    args.cores = os.cpu_count() or 1
    args.native = not common.native_refusal(device)
    models = common.models_that_fit(args.model, max(PROMPT + args.new_tokens, WORDS[1] + NEW[1]))
    for name, size in itertools.product(models, args.ranks):
        predict.shard_of(load_config(name), 0, size, "gather")
    with_ray = bool(args.replicas) and importlib.util.find_spec("ray")
    if args.replicas and not with_ray:
        print("without replicas: pip install '.[ray]'", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate(models):
            model = load_model(name)
            copy = Path(directory, str(number))
            save_model(model, copy)
            environment = vars(args) | common.describe_environment(name, model, device)
            results.environment = {
                name: environment[name] for name in COLUMNS if name in environment
            }
            config = model.config
            del model
            for repeat in range(args.repeats):
                measure_ranks(args, copy, config, repeat, results)
                if with_ray and number == 0:
                    measure_replicas(args, name, repeat, results)


def plot(summary):
    """Plot tokens/s of ranks and replicas, measured and predicted."""
    from matplotlib.figure import Figure

    shown = summary[summary["measure"].str.fullmatch("tokens/s(, predicted)?")]
    panels = list(shown.groupby("model", sort=False))
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    for axes, (model, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for number, (mode, lines) in enumerate(rows.groupby("mode", sort=False)):
            for measure, points in lines.groupby("measure"):
                style = {"ls": ":", "marker": "x"} if "predicted" in measure else {"marker": "o"}
                name = mode if measure == "tokens/s" else None
                axes.plot(
                    points["processes"], points["median"], color=f"C{number}", label=name, **style
                )
        axes.set(title=model, xlabel="ranks or replicas", ylabel="tokens/s", ylim=0)
        axes.set_xticks(sorted(set(rows["processes"])))
        axes.legend()
    figure.suptitle("Several processes: measured, and predicted (dotted)")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Measure and predict the speed of several processes.")
    served = "models of the ranks; the replicas serve the first"
    parser.add_argument("--model", **common.LIST, default=[STORIES], help=served)
    number = {"type": common.integer_in_range(2)}
    parser.add_argument(
        "--ranks", **common.LIST, **number, default=[2, 3, 4], help="numbers of ranks"
    )
    joins = {"default": ["gather", "reduce"], "choices": ["gather", "reduce"]}
    parser.add_argument(
        "--join", **common.LIST, **joins, help="how ranks combine results, as in infer_engine.py"
    )
    parser.add_argument(
        "--replicas",
        nargs="*",
        action=common.Unique,
        **number,
        default=[2, 3],
        help="numbers of replicas",
    )
    number = {"type": common.integer_in_range(1)}
    parser.add_argument("--max-num-seqs", **number, default=32, help="maximum sequences per step")
    tokens = {"type": common.integer_in_range(3), "default": 40}
    parser.add_argument("--new-tokens", **tokens, help="new tokens per sequence on ranks")
    seconds = {"type": client.positive_float, "default": 5.0}
    parser.add_argument("--seconds", **seconds, help="duration of the load on replicas in seconds")
    shared = {"lengths": None, "repeats": 1, "dtypes": False, "columns": COLUMNS}
    common.add_options(parser, "scaling_cpu.csv", **shared)
    parser.set_defaults(device="cpu")
    common.run_benchmark(parser, measure, None, plot, argv, Results)


if __name__ == "__main__":
    main()
