"""Shared parts of the benchmarks: options, results, timing, memory roofline and peak memory."""

import argparse
import csv
import importlib
import io
import json
import math
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from cache import KVCache
from command_line.models import pick_device
from command_line.options import DTYPES
from command_line.parser import HelpFormatter, run_script
from errors import UserError
from loading.load import load_config, resolve_source
from native import BuildError, kernel

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark_results"  # the default directory
PROFILED = 8  # steps in a profile; a longer trace opens slowly
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
SETTING = {  # columns that a summary groups by
    "model": "from --model or --target",
    "draft": "from --draft",
    "dtype": "of weights, activations and cache",
    "batch_size": "sequences per batch",
    "new_tokens": "tokens generated after each prompt; EOS is ignored",
    "temperature": "0: greedy",
    "mode": "how the tokens were generated",
}
CONDITIONS = {
    "prompt_tokens": "tokens of each prompt",
    "prompt": "index of the prompt",
    "repeat": "each repeat runs all modes once; ratios are taken within it",
    "parameters": "number of weights of the model",
    "device": "GPU, or processor",
    "kernel": "instruction set of the C code; empty if it is not compiled here",
    "threads": "threads of torch",
    "torch": "version of torch",
    "library": "library of the engine and its version; empty for this repository",
    "commit": "commit of this repository; -dirty if files differ from it",
}
MEASURED = {
    "first_token_s": "seconds to the first token (prefill); with drafts, of the first pass",
    "prefill_tokens_per_s": "prompt tokens of the batch / first_token_s; empty with drafts",
    "inter_token_s": "mean seconds between two tokens of a sequence, after the first (pass)",
    "decode_tokens_per_s": "tokens of the batch per second, after the first token (or pass)",
    "roofline_share": "seconds to read weights and cache at the measured bandwidth / decode time."
    " Above 1 if decoding reads faster than the matrix-vector product that measures bandwidth",
    "peak_memory_mb": "peak memory of one greedy run in its own process, in MB, without imports",
    "acceptance": "share of drafts that were accepted",
    "tokens_per_pass": "tokens per pass of the target",
}
COLUMNS = SETTING | CONDITIONS | MEASURED
ENVIRONMENT = (  # columns in every file
    "model",
    "draft",
    "dtype",
    "parameters",
    "device",
    "kernel",
    "threads",
    "torch",
    "library",
    "commit",
)


def columns(own: dict[str, str]) -> dict[str, str]:
    """Return these columns, followed by the ENVIRONMENT columns that they lack."""
    return own | {name: COLUMNS[name] for name in ENVIRONMENT if name not in own}


# Options


class Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows defaults and keeps the line breaks of the column list."""


class Unique(argparse.Action):
    """An argparse action that drops duplicate values, whose runs could not be told apart."""

    def __call__(self, parser, args, values, option=None):
        setattr(args, self.dest, list(dict.fromkeys(values)))


LIST = {"nargs": "+", "action": Unique}  # keyword arguments of an option with several values


def integer_in_range(least: int, most: int | None = None):
    """Return an argparse type for integers from `least` to `most`, None for no limit."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= (most or int(text)):
            limits = f">= {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer {limits}")
        return int(text)

    return convert


def trace_file(text: str) -> Path:
    """Parse the path of a writable .json file, as an argparse type."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text!r}: the file name must end in .json")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: the directory {path.parent} does not exist")
    if taken := [file for file in (path, path.with_suffix(".txt")) if file.is_dir()]:
        raise argparse.ArgumentTypeError(f"{text!r}: {taken[0]} is a directory")
    return path


def add_profile_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --profile. what: the profiled run, for the help."""
    help_text = f"Chrome trace of {PROFILED} steps of {what}; FILE.txt gets its table"
    parser.add_argument("--profile", type=trace_file, metavar="FILE.json", help=help_text)


def add_options(
    parser: argparse.ArgumentParser,
    output: str,
    lengths: list[int] | None,
    repeats: int | None,
    dtypes: bool = True,
    columns: dict[str, str] = COLUMNS,
) -> None:
    """Add the options that benchmarks share, and explain the columns in the epilog.

    lengths, repeats: the defaults of --max-new-tokens and --repeats, None to omit the option.
    dtypes: whether to add --dtype.
    """
    parser.formatter_class = Formatter
    explained = (f"  {name:20} {text}" for name, text in columns.items())
    parser.epilog = "\n".join(["columns of the CSV file:", *explained])
    number = integer_in_range(1)
    cores = os.cpu_count() or 1
    if lengths:
        length = {
            "type": integer_in_range(2),
            "default": lengths,
            "help": "new tokens per sequence",
        }
        parser.add_argument("--max-new-tokens", **LIST, **length)
    if dtypes:
        dtype = {"choices": FLOATS, "default": ["float32"], "help": "weight dtypes"}
        parser.add_argument("--dtype", **LIST, **dtype)
    devices = ("auto", "cuda", "mps", "cpu")
    parser.add_argument("--device", default="auto", choices=devices, help="device of the model")
    threads = integer_in_range(1, cores)
    parser.add_argument(
        "--threads", type=threads, help=f"CPU threads of torch, 1 to {cores} (default: torch's)"
    )
    if repeats:
        repeat = {"type": number, "default": repeats, "help": "runs of each mode"}
        parser.add_argument("--repeats", **repeat)
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / output,
        help="CSV file, written as FILE.part during the run; summary, JSON and plot go beside it",
    )


# Results


class ResultsFile:
    """A CSV file, written row by row as results arrive, with a summary and a plot beside it.

    Rows and summary are also written as JSON: a list of records with the values of the CSV.
    Rows go to PATH.part, which `close` renames. PATH.part must not exist, so two runs never share a
    file, and the rows of a killed run stay there. Raises UserError for an unusable path, OSError
    for a full disk.
    """

    columns = COLUMNS

    def __init__(self, path: Path):
        if path.suffix != ".csv":
            raise UserError(f"--output {path}: the file name must end in .csv")
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.summary = path.with_name(path.stem + "_summary.csv")
        self.plot = path.with_suffix(".png")
        self.records = path.with_suffix(".json")
        self.summary_records = self.summary.with_suffix(".json")
        self.related_files = (self.summary, self.plot, self.records, self.summary_records)
        self.rows = []
        self.lines = []  # the file's lines, header first
        if taken := [file for file in (path, *self.related_files) if file.is_dir()]:
            raise UserError(f"--output {path}: {taken[0]} is a directory")
        if path.parent.resolve() == RESULTS:  # any other directory must exist
            RESULTS.mkdir(exist_ok=True)
        try:
            self.file = self.part.open("xb", buffering=0)  # x: fail if it exists
        except FileExistsError:
            why = "another run is writing it, or was killed"
            raise UserError(f"{self.part} exists: {why}; wait, or move that file") from None
        try:
            self.append(dict(zip(self.columns, self.columns)))
        except OSError:
            self.close()
            raise

    def append(self, row: dict) -> None:
        """Write a line. If the disk is full, remove its partial bytes and raise OSError."""
        line = io.StringIO()
        csv.DictWriter(line, self.columns, lineterminator="\n").writerow(row)
        data = line.getvalue().encode()
        end = self.file.tell()
        try:
            while data:  # a nearly full disk may take only the beginning
                data = data[self.file.write(data) :]
        except OSError:
            self.file.truncate(end)
            raise
        self.lines.append({name: row.get(name) for name in self.columns})

    def write(self, **row) -> None:
        """Add a row and print it on stderr. The file gets measured numbers with four digits.

        Raises ValueError for unknown columns.
        """
        rounded = {name: four_digits(value) for name, value in row.items() if name in MEASURED}
        self.append(row | rounded)
        self.rows.append(row)
        what = "{model}  {dtype}  batch {batch_size}  {new_tokens} tokens"
        run = "temperature {temperature}  prompt {prompt}  repeat {repeat}"
        shown = f"{what}  {run}  {{mode}}: {{decode_tokens_per_s:.1f}} tokens/s"
        print(shown.format(**row), file=sys.stderr)

    def summarise(self, baseline: str | dict | None):
        """Return the summary of all rows, as the function `summarise` does."""
        return summarise(self.rows, baseline)

    def close(self) -> bool:
        """Move the rows to `path`, and remove the summary, plot and JSON of an earlier run.

        Returns False if there are no rows. The earlier files then stay.
        """
        self.file.close()
        if not self.rows:
            self.part.unlink()
            return False
        for old in self.related_files:
            old.unlink(missing_ok=True)
        self.part.replace(self.path)
        return True


class MetricsFile(ResultsFile):
    """A CSV file with a row for each value, for a benchmark that measures different things.

    Columns that identify the run come first, then "measure", "value" and "repeat", then
    ENVIRONMENT. A subclass lists in `setting` the columns that a summary groups by.
    """

    setting: list[str]
    environment = {}  # columns with the same value in all rows

    def add(self, which: str, run: dict, values: dict) -> None:
        """Add the values of a run, measure -> number, and print them on stderr after `which`."""
        for measure, value in values.items():
            self.rows.append(self.environment | run | {"measure": measure, "value": value})
            self.append(self.rows[-1] | {"value": four_digits(value)})
        shown = "; ".join(f"{measure} {value:.4g}" for measure, value in values.items())
        print(f"{which}: {shown}", file=sys.stderr)

    def summarise(self, baseline):
        """Return the median, min and max over repeats for each measure of each setting."""
        import pandas

        values = pandas.DataFrame(self.rows).groupby(self.setting, sort=False)["value"]
        table = values.agg(["median", "min", "max"]).map(four_digits)
        return table.assign(runs=values.size()).reset_index()


def run_benchmark(
    parser: argparse.ArgumentParser,
    measure,
    baseline: str | dict | None,
    plot,
    argv=None,
    results_file: type[ResultsFile] = ResultsFile,
) -> None:
    """Parse a command line and call measure(args, device, results); then summarise and plot.

    Ctrl-C and errors also end in a summary and a plot, of the rows measured so far. baseline: as in
    `summarise`. plot: a function of the summary that returns a figure.
    """

    def run(args) -> None:
        if args.threads:
            torch.set_num_threads(args.threads)
        device = pick_device(args.device)
        try:
            results = results_file(args.output)
            try:
                check_profile(args, results)
                measure(args, device, results)
            finally:
                report(results, baseline, plot)
        except BrokenPipeError:
            raise
        except OSError as error:  # in a results file, or no space for a temporary file
            raise UserError(f"{error.filename or args.output}: {error.strerror or error}") from None

    run_script(parser, run, argv)


def check_profile(args, results: ResultsFile) -> None:
    """Raise UserError if --profile names one of the files of --output."""
    profile = getattr(args, "profile", None)
    if profile and profile.resolve() in [file.resolve() for file in results.related_files]:
        raise UserError(f"--profile {profile}: --output writes this file; choose another name")


def report(results: ResultsFile, baseline: str | dict | None, plot) -> None:
    """Close the results. If there are rows, write and print the summary, and draw the plot."""
    if results.close():
        summary = results.summarise(baseline)
        picture = io.BytesIO()
        plot(summary).savefig(picture, dpi=120, format="png")
        write_whole(results.summary, summary.to_csv(index=False).encode())
        write_whole(results.records, as_json(results.lines[1:]))
        write_whole(results.summary_records, as_json(summary.to_dict("records")))
        write_whole(results.plot, picture.getvalue())
        print(summary.to_string(index=False))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def as_json(rows: list[dict]) -> bytes:
    """Return rows as a JSON list of records, with null for floats that are not finite.

    `DataFrame.to_json` would cut numbers after 15 decimal places.
    """
    records = []
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        missing = {name: None for name, value in numbers.items() if not math.isfinite(value)}
        records.append(row | missing)
    return json.dumps(records, indent=1).encode()


def four_digits(value: float | None) -> float | None:
    """Round a measured number to four significant digits; None stays None."""
    return None if value is None else float(f"{value:.4g}")


def summarise(rows: list[dict], baseline: str | dict):
    """Return a table with a line for each setting.

    The decode rate and the speed-up have their median, min and max over repeats and prompts. Other
    measures have their median. The speed-up is the ratio to the baseline in the same repeat and
    prompt.
    baseline: a mode, or values of columns. Each row is compared with the baseline row that equals
    it in all other settings.
    """
    import pandas

    baseline = {"mode": baseline} if isinstance(baseline, str) else baseline
    rate = "decode_tokens_per_s"
    table = pandas.DataFrame(rows, columns=list(COLUMNS))
    pair = [name for name in SETTING if name not in baseline] + ["prompt", "repeat"]
    is_baseline = (table[list(baseline)] == pandas.Series(baseline)).all(axis=1)
    of_baseline = table.assign(rate=table[rate].where(is_baseline)).groupby(pair)["rate"]
    table["speedup"] = table[rate] / of_baseline.transform("first")
    groups = table.groupby(list(SETTING), sort=False)
    columns = {}
    for name in (rate, "speedup"):
        for statistic in ("median", "min", "max"):
            columns[f"{name}_{statistic}"] = groups[name].agg(statistic)
    columns |= {name: groups[name].median() for name in MEASURED if name != rate}
    return pandas.DataFrame(columns).map(four_digits).assign(runs=groups.size()).reset_index()


# Environment


def describe_environment(name, model, device: str, draft: str = "") -> dict:
    """Return the ENVIRONMENT columns except `library`."""
    return {
        "model": resolve_source(name).label,
        "draft": draft and resolve_source(draft).label,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{device} {cpu_name()}",
        "kernel": instruction_set(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def instruction_set(device: str) -> str:
    """Return the instruction set that the C code uses on this CPU, or "" if it cannot compute."""
    return "" if native_refusal(device) else kernel()


def native_refusal(device: str) -> str:
    """Return the reason why the C code cannot compute on a device, or ""."""
    if device != "cpu":
        return f"runs on the CPU only, not on {device}"
    try:
        kernel()
    except BuildError as error:
        return str(error)
    return ""


def library(package: str) -> str:
    """Return the name and version of an imported package."""
    return f"{package} {sys.modules[package].__version__}"


def commit() -> str:
    """Return the commit of this repository, with -dirty if its files differ.

    Returns `unknown` without git or outside a repository.
    """
    # --git-dir rules out an enclosing repository, --exclude rules out tag names.
    here = [f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    command = ["git", *here, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system hides the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        return line.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def models_that_fit(names: list[str], tokens: int) -> list[str]:
    """Return the models without duplicates, even if one is spelled in two ways.

    Raises UserError if the context window of one holds fewer than `tokens` tokens.
    """
    different = {resolve_source(name).label: name for name in names}
    for name in different.values():
        size = load_config(name).block_size
        if tokens > size:
            raise UserError(f"{tokens} tokens do not fit the context window of {name} ({size})")
    return list(different.values())


def random_prompts(vocab_size: int, batch_size: int, tokens: int) -> list[list[int]]:
    """Return batch_size prompts of random ids, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch_size, tokens), generator=generator).tolist()


# Time


def now(device: str) -> float:
    """Return the time in seconds, after the device has finished all queued work."""
    if device != "cpu":
        getattr(torch, device).synchronize()
    return time.perf_counter()


def timed(steps, device: str) -> tuple[list, float, float]:
    """Run an iterator; return its items, seconds to the first, and seconds from it to the end."""
    items = []
    began = now(device)
    for item in steps:
        items.append(item)
        if len(items) == 1:
            first = now(device)
    return items, first - began, now(device) - first


def profile(file: Path, device: str, function, *arguments) -> None:
    """Call a function under torch.profiler, and write a trace and a table.

    file: the Chrome trace. The table of operations is beside it as .txt, sorted by self time on
    the device. Passes in C do not appear, because they are not torch operations.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        function(*arguments)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(trace))
        write_whole(file, trace.read_bytes())
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    operations = profiler.key_averages().table(sort_by=order, row_limit=40)
    write_whole(file.with_suffix(".txt"), operations.encode())
    print(f"profile: {file}, {file.with_suffix('.txt')}", file=sys.stderr)


def bandwidth(device: str, dtype: torch.dtype) -> float:
    """Return the bytes per second that the product of a 256 MB matrix and a vector reads.

    The result is the median of nine products after a warm-up.
    """
    side = int((2**28 / dtype.itemsize) ** 0.5)
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    vector = torch.ones(side, dtype=dtype, device=device)
    seconds = [timed((matrix @ vector for _ in range(1)), device)[1] for _ in range(10)]
    return matrix.nbytes / statistics.median(seconds[1:])


def throughput_columns(
    model,
    prompts: list[list[int]],
    length: int,
    ttft: float,
    decode_time: float,
    bandwidth: float,
    first_pass_tokens: int = 1,
) -> dict:
    """Return the columns about `length` new tokens per prompt.

    ttft: seconds of the first pass, which yields `first_pass_tokens` tokens. decode_time: seconds
    after it. model: the model that each step reads, with its cache. None means unknown and leaves
    the roofline empty.
    """
    batch_size = len(prompts)
    prompt_tokens = len(prompts[0])
    share = None
    if model is not None:
        share = roofline_share(model, batch_size, prompt_tokens, length, decode_time, bandwidth)
    return {
        "batch_size": batch_size,
        "prompt_tokens": prompt_tokens,
        "new_tokens": length,
        "first_token_s": ttft,
        "prefill_tokens_per_s": batch_size * prompt_tokens / ttft,
        "inter_token_s": decode_time / (length - first_pass_tokens),
        "decode_tokens_per_s": batch_size * (length - first_pass_tokens) / decode_time,
        "roofline_share": share,
    }


def roofline_share(
    model, batch_size: int, prompt_tokens: int, new_tokens: int, seconds: float, bandwidth: float
) -> float:
    """Return the share of `seconds` that memory reads take at `bandwidth` bytes per second.

    Each step reads all weights once, and the keys and values of all positions so far. Embeddings
    are excluded, because a step reads only single rows. The head counts even if tied to an
    embedding. seconds: time after the first token.
    """
    config = model.config
    # Compare class names: Int8Embedding is not an nn.Embedding.
    read = [part for part in model.children() if not type(part).__name__.endswith("Embedding")]
    weights = sum(tensor.nbytes for part in read for tensor in part.state_dict().values())
    positions = prompt_tokens + new_tokens / 2  # on average
    numbers = 2 * config.n_layer * config.n_kv_head * config.head_dim * positions  # per sequence
    cache = batch_size * numbers * model.dtype.itemsize
    return (new_tokens - 1) * (weights + cache) / bandwidth / seconds


# Checks


@torch.inference_mode()
def check_half_precision(model, tokens: torch.Tensor, pass_size: int = 1, reference=None) -> None:
    """Compare the log-probabilities of cached passes with one pass without a cache.

    For half precision, where rounding may change greedy tokens. tokens: (B, T). pass_size: tokens
    of a cached pass. reference: a function from (1, T) tokens to (1, T, vocab_size) logits, which
    are checked too.
    Raises SystemExit if the divergence of a position is above 0.1 nats, or the mean above 0.01.
    """
    cache = KVCache(model, *tokens.shape)
    hidden_states = []
    for new in tokens.split(pass_size, dim=1):
        _, positions, _ = cache.prepare(cache.spans(new.tolist()))
        hidden_states.append(model.hidden(new, positions, cache.attend))
        cache.commit()
    cached = torch.cat(hidden_states, dim=1)
    # One sequence at a time: the logits of a batch may take gigabytes.
    for row, sequence in enumerate(tokens.split(1)):
        expected = model(sequence)[0].float().log_softmax(dim=-1)
        found = [model.head(cached[row])]
        if reference is not None:
            found.append(reference(sequence)[0])
        for logits in found:
            error = kl_divergence(logits.float().log_softmax(dim=-1), expected)
            if not (error.max() <= 0.1 and error.mean() <= 0.01):  # NaN is an error too
                off = f"log-probabilities are off by up to {error.max():.3f} nats"
                sys.exit(f"{off}; wrong results are not timed")


def kl_divergence(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of each position, (T,), of log-probs (T, vocab_size).

    The largest difference would mislead: in a large vocabulary bfloat16 changes log-probs by 0.7
    where a token is so improbable that nothing depends on it.
    """
    return (expected.exp() * (expected - found)).sum(dim=-1)


# Memory


def memory_in_use(device: str) -> float:
    """Return the peak memory of this process in bytes: of the GPU on cuda, else of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # not ru_maxrss here: on Linux a child inherits its parent's
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        import resource  # imported here, because Windows lacks it

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from benchmarks import common; common.print_memory()"
)


def in_own_process(device: str, imports: list[str], function, *arguments) -> float:
    """Return the peak bytes that function(*arguments) adds after imports, in its own process.

    imports: modules that the function imports when it runs. Raises UserError if the process fails,
    for example for lack of memory.
    """
    module = function.__module__
    if module == "__main__":  # run as a file or with `python -m`
        spec = sys.modules["__main__"].__spec__
        module = spec.name if spec else Path(sys.argv[0]).stem
    job = pickle.dumps((device, [module, *imports], function.__name__, arguments))
    command = [sys.executable, "-c", CHILD, str(ROOT)]
    # In its own session the child gets no Ctrl-C and prints no traceback. `run` kills it.
    child = subprocess.run(command, input=job, capture_output=True, start_new_session=True)
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines()
        reason = "it was killed, perhaps for lack of memory" if child.returncode < 0 else lines[-1]
        raise UserError(f"the process that measures peak memory failed: {reason}")
    return float(child.stdout.split()[-1])


def print_memory() -> None:
    """Run the job from stdin and print its memory, in the child of `in_own_process`."""
    device, names, function, arguments = pickle.load(sys.stdin.buffer)
    modules = [importlib.import_module(name) for name in names]
    before = memory_in_use(device)
    getattr(modules[0], function)(*arguments)
    print(memory_in_use(device) - before)
