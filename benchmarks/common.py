"""What the benchmarks share: options, results, times, the memory roofline and peak memory."""

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
from command_line import DTYPES, HelpFormatter, pick_device, run_script
from errors import UserError
from loading.load import load_config, resolve_source
from native import BuildError, kernel

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark_results"  # the default directory
PROFILED = 8  # steps in a profile: a trace of more opens slowly
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
SETTING = {  # what a summary keeps apart
    "model": "what --model or --target names",
    "draft": "what --draft names",
    "dtype": "of weights, activations and cache",
    "batch_size": "texts at once",
    "new_tokens": "tokens generated after each prompt; EOS is ignored",
    "temperature": "0: greedy",
    "mode": "how the tokens were generated",
}
CONDITIONS = {
    "prompt_tokens": "tokens of each prompt",
    "prompt": "which of the prompts",
    "repeat": "each repeat runs all modes once; ratios are taken within it",
    "parameters": "of the model",
    "device": "what computed",
    "kernel": "the instruction set of the C code; none: it is not compiled here",
    "threads": "of torch",
    "torch": "its version",
    "library": "whose engine ran, with its version; none: this repository",
    "commit": "of this repository; -dirty: files differ from it",
}
MEASURED = {
    "first_token_s": "seconds to the first token (prefill); with drafts: to the end of the first"
    " pass",
    "prefill_tokens_per_s": "tokens of all prompts over first_token_s; none with drafts",
    "inter_token_s": "mean seconds between two tokens of a text, after the first token (the first"
    " pass)",
    "decode_tokens_per_s": "tokens after the first one (the first pass) in all texts, over the"
    " seconds after it",
    "roofline_share": "the seconds that reading the weights once a step and the cache must take,"
    " over the seconds that decoding took; above 1 if it reads faster than the matrix-vector"
    " product that the bandwidth was measured with",
    "peak_memory_mb": "10**6 bytes that one greedy run takes at most in a process of its own,"
    " imports not counted",
    "acceptance": "share of the drafts that were accepted",
    "tokens_per_pass": "tokens for each pass of the target",
}
COLUMNS = SETTING | CONDITIONS | MEASURED
ENVIRONMENT = (  # the columns of every file
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
    """Return these columns, followed by those that say what ran on what."""
    return own | {name: COLUMNS[name] for name in ENVIRONMENT if name not in own}


# Options


class Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of the list of columns."""


class Unique(argparse.Action):
    """Drops values that were given before: the runs of both could not be told apart."""

    def __call__(self, parser, args, values, option=None):
        setattr(args, self.dest, list(dict.fromkeys(values)))


LIST = {"nargs": "+", "action": Unique}  # keywords of an option with several values


def integer_in_range(least: int, most: int | None = None):
    """An argparse type: an integer from `least` to `most`, None for no limit."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= (most or int(text)):
            limits = f">= {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: it must be an integer {limits}")
        return int(text)

    return convert


def trace_file(text: str) -> Path:
    """An argparse type: a .json file that can be written."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in .json")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: no directory {path.parent}")
    if taken := [file for file in (path, path.with_suffix(".txt")) if file.is_dir()]:
        raise argparse.ArgumentTypeError(f"{text!r}: {taken[0]} is a directory")
    return path


def add_profile_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --profile. what: the run that is profiled."""
    help_text = (
        f"Chrome trace of {PROFILED} steps of {what}, not timed; none if not given. A table of"
    )
    help_text += " its operations is written beside it, as .txt. Open the trace in ui.perfetto.dev"
    parser.add_argument("--profile", type=trace_file, metavar="FILE.json", help=help_text)


def add_options(
    parser: argparse.ArgumentParser,
    output: str,
    lengths: list[int] | None,
    repeats: int | None,
    dtypes: bool = True,
    columns: dict[str, str] = COLUMNS,
) -> None:
    """The options that benchmarks share, and an explanation of the columns.

    lengths, repeats: the defaults of --max-new-tokens and --repeats, None for no such option.
    dtypes: --dtype is one.
    """
    parser.formatter_class = Formatter
    explained = (f"  {name:20} {text}" for name, text in columns.items())
    parser.epilog = "\n".join(["columns of the CSV file:", *explained])
    number = integer_in_range(1)
    cores = os.cpu_count() or 1
    if lengths:
        length = {"type": integer_in_range(2), "default": lengths, "help": "lengths to time"}
        parser.add_argument("--max-new-tokens", **LIST, **length)
    if dtypes:
        dtype = {"choices": FLOATS, "default": ["float32"], "help": "of the weights"}
        parser.add_argument("--dtype", **LIST, **dtype)
    devices = ("auto", "cuda", "mps", "cpu")
    parser.add_argument("--device", default="auto", choices=devices, help="where to run")
    threads = integer_in_range(1, cores)
    parser.add_argument("--threads", type=threads, help=f"of torch on the CPU, 1 to {cores}")
    if repeats:
        repeat = {"type": number, "default": repeats, "help": "how often each mode runs"}
        parser.add_argument("--repeats", **repeat)
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / output,
        help="CSV file, replaced at the end of the run together with its summary, both as JSON, and"
        " its plot; until then the rows are in a file of that name with .part behind it, and no"
        " other run may use it",
    )


# Results


class ResultsFile:
    """A CSV file that has each row as soon as it is measured; a summary and a plot lie beside it.

    Rows and summary are there as JSON, too: a list of records with the values of the CSV.
    Rows are written to PATH.part. It must not exist, so two runs never share a file, and the rows
    of a run that was killed stay there. `close` renames it. Raises UserError for a path that
    cannot be used, OSError for a full disk.
    """

    columns = COLUMNS

    def __init__(self, path: Path):
        if path.suffix != ".csv":
            raise UserError(f"--output {path}: the name must end in .csv")
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.summary = path.with_name(path.stem + "_summary.csv")
        self.plot = path.with_suffix(".png")
        self.records = path.with_suffix(".json")
        self.summary_records = self.summary.with_suffix(".json")
        self.related_files = (self.summary, self.plot, self.records, self.summary_records)
        self.rows = []
        self.lines = []  # what the file has, its header first
        if taken := [file for file in (path, *self.related_files) if file.is_dir()]:
            raise UserError(f"--output {path}: {taken[0]} is a directory")
        if path.parent.resolve() == RESULTS:  # any other directory must be there
            RESULTS.mkdir(exist_ok=True)
        try:
            self.file = self.part.open("xb", buffering=0)  # x: fails if it is there
        except FileExistsError:
            why = "another run writes to it, or was killed and left its rows there"
            raise UserError(f"{self.part} exists: {why}; wait, or move that file") from None
        try:
            self.append(dict(zip(self.columns, self.columns)))
        except OSError:
            self.close()
            raise

    def append(self, row: dict) -> None:
        """Write a line, or nothing: no part of a line that does not fit on the disk is left."""
        line = io.StringIO()
        csv.DictWriter(line, self.columns, lineterminator="\n").writerow(row)
        data = line.getvalue().encode()
        end = self.file.tell()
        try:
            while data:  # a nearly full disk takes the beginning first
                data = data[self.file.write(data) :]
        except OSError:
            self.file.truncate(end)
            raise
        self.lines.append({name: row.get(name) for name in self.columns})

    def write(self, **row) -> None:
        """Add a row, and show it on stderr. Measured numbers get four digits.

        Raises ValueError for unknown columns.
        """
        rounded = {name: four_digits(value) for name, value in row.items() if name in MEASURED}
        self.append(row | rounded)
        self.rows.append(row)
        what = "{model}  {dtype}  batch {batch_size}  {new_tokens} tokens"
        run = "temperature {temperature}  prompt {prompt}  repeat {repeat}"
        shown = f"{what}  {run}  {{mode}}: {{decode_tokens_per_s:.1f}}/s"
        print(shown.format(**row), file=sys.stderr)

    def summarise(self, baseline: str | dict | None):
        """The table of all rows, as the function of that name."""
        return summarise(self.rows, baseline)

    def close(self) -> bool:
        """Put the rows where an older file may be, and remove what lies beside that one.

        Returns False if there are no rows; then the older files stay.
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

    Its columns are those in which runs differ, then "measure", "value" and "repeat", and what ran
    on what. A subclass says in `setting` which of them a summary keeps apart.
    """

    setting: list[str]
    environment = {}  # what ran on what

    def add(self, which: str, run: dict, values: dict) -> None:
        """Add the values of a run, measure -> number, and show them on stderr after its name."""
        for measure, value in values.items():
            self.rows.append(self.environment | run | {"measure": measure, "value": value})
            self.append(self.rows[-1] | {"value": four_digits(value)})
        shown = "; ".join(f"{measure} {value:.4g}" for measure, value in values.items())
        print(f"{which}: {shown}", file=sys.stderr)

    def summarise(self, baseline):
        """A table with a line for each measure of each setting: median, min and max of repeats."""
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

    That is done with whatever rows are there, also after Ctrl-C and errors. baseline: as in
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
        except OSError as error:  # of the results, or no space for a temporary file
            raise UserError(f"{error.filename or args.output}: {error.strerror or error}") from None

    run_script(parser, run, argv)


def check_profile(args, results: ResultsFile) -> None:
    """Raise UserError for a --profile that is one of the files of --output."""
    profile = getattr(args, "profile", None)
    if profile and profile.resolve() in [file.resolve() for file in results.related_files]:
        raise UserError(f"--profile {profile}: --output writes it; give it another name")


def report(results: ResultsFile, baseline: str | dict | None, plot) -> None:
    """Close the results; if there are any, write and print the summary, and draw the plot."""
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
    """Return rows as a JSON list of records; a float that is not finite is null.

    Not `DataFrame.to_json`, which cuts numbers after 15 decimal places.
    """
    records = []
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        missing = {name: None for name, value in numbers.items() if not math.isfinite(value)}
        records.append(row | missing)
    return json.dumps(records, indent=1).encode()


def four_digits(value: float | None) -> float | None:
    """A measured number, rounded to what is worth reading."""
    return None if value is None else float(f"{value:.4g}")


def summarise(rows: list[dict], baseline: str | dict):
    """A table with a line for each setting.

    It has the median, min and max over repeats and prompts of the decode rate and of the speed-up,
    which is the ratio to the baseline in the same repeat and prompt; medians of the rest.
    baseline: values of columns, or a mode alone. The rows compared with it are equal to it in all
    other settings.
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


# What ran on what


def describe_environment(name, model, device: str, draft: str = "") -> dict:
    """The columns that say what ran on what."""
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
    """What the C code uses of this CPU; "" where it cannot compute."""
    return "" if native_refusal(device) else kernel()


def native_refusal(device: str) -> str:
    """Why the C code cannot compute on a device, or ""."""
    if device != "cpu":
        return f"for the CPU only, not {device}"
    try:
        kernel()
    except BuildError as error:
        return str(error)
    return ""


def library(package: str) -> str:
    """A package that is imported, and its version."""
    return f"{package} {sys.modules[package].__version__}"


def commit() -> str:
    """The commit of this repository, with -dirty if its files differ.

    `unknown` without git or outside a repository.
    """
    # Not the commit of some other repository that this directory lies in; no names of tags.
    here = [f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    command = ["git", *here, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        return line.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def models_that_fit(names: list[str], tokens: int) -> list[str]:
    """Each of the models once, however it was spelled.

    Raises UserError if the window of one holds fewer tokens.
    """
    different = {resolve_source(name).label: name for name in names}
    for name in different.values():
        size = load_config(name).block_size
        if tokens > size:
            raise UserError(f"{tokens} tokens do not fit the window of {name}, which is {size}")
    return list(different.values())


def random_prompts(vocab_size: int, batch_size: int, tokens: int) -> list[list[int]]:
    """batch_size prompts of random ids, equal in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch_size, tokens), generator=generator).tolist()


# Time


def now(device: str) -> float:
    """The time in seconds, after the device has finished all that it was asked for."""
    if device != "cpu":
        getattr(torch, device).synchronize()
    return time.perf_counter()


def timed(steps, device: str) -> tuple[list, float, float]:
    """Run an iterator: its items, the seconds to the first of them, and from there to the end."""
    items = []
    began = now(device)
    for item in steps:
        items.append(item)
        if len(items) == 1:
            first = now(device)
    return items, first - began, now(device) - first


def profile(file: Path, device: str, function, *arguments) -> None:
    """Call a function under torch.profiler, and write what it did.

    file: for a Chrome trace. Beside it, as .txt, is a table of the operations, sorted by their own
    time on the device. Passes in C are no operations of torch.
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
    """Bytes a second that the product of a 256 MB matrix with a vector reads.

    The median of nine products, after one more.
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
    """The columns about `length` new tokens a prompt, with `first_pass_tokens` in `ttft` seconds.

    model: what each step read, with its cache; None if that is not known, and then neither is the
    roofline.
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
    """The share of the seconds after the first token that reading takes at that bandwidth.

    Each step reads all weights once, except embeddings, of which it takes a row, and the keys and
    values of all positions so far. A head counts, also where its weight is an embedding's.
    bandwidth: in bytes a second.
    """
    config = model.config
    # By class name: Int8Embedding is no nn.Embedding.
    read = [part for part in model.children() if not type(part).__name__.endswith("Embedding")]
    weights = sum(tensor.nbytes for part in read for tensor in part.state_dict().values())
    positions = prompt_tokens + new_tokens / 2  # on average
    numbers = 2 * config.n_layer * config.n_kv_head * config.head_dim * positions  # of a row
    cache = batch_size * numbers * model.dtype.itemsize
    return (new_tokens - 1) * (weights + cache) / bandwidth / seconds


# Checks


@torch.inference_mode()
def check_half_precision(model, tokens: torch.Tensor, pass_size: int = 1, reference=None) -> None:
    """Compare the log-probabilities with a cache and of one pass without it.

    For half precision, where rounding may change greedy tokens. tokens: (B, T). pass_size: how many
    tokens a pass with the cache takes. reference: a function of (1, T) tokens that returns
    (1, T, vocab_size) logits, which are checked too.
    Raises SystemExit if the divergence of a position is above 0.1 nats, or the mean above 0.01.
    """
    cache = KVCache(model, *tokens.shape)
    hidden_states = []
    for new in tokens.split(pass_size, dim=1):
        _, positions, _ = cache.prepare(cache.spans(new.tolist()))
        hidden_states.append(model.hidden(new, positions, cache.attend))
        cache.commit()
    cached = torch.cat(hidden_states, dim=1)
    # One row at a time: the logits of a batch may be gigabytes.
    for row, sequence in enumerate(tokens.split(1)):
        expected = model(sequence)[0].float().log_softmax(dim=-1)
        found = [model.head(cached[row])]
        if reference is not None:
            found.append(reference(sequence)[0])
        for logits in found:
            error = kl_divergence(logits.float().log_softmax(dim=-1), expected)
            if not (error.max() <= 0.1 and error.mean() <= 0.01):  # NaN is an error too
                off = f"log-probabilities are off by up to {error.max():.3f} nats"
                sys.exit(f"{off}: no timing of wrong results")


def kl_divergence(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of each position, (T,), of log-probs (T, vocab_size).

    Not the largest difference: in a large vocabulary bfloat16 changes log-probs by 0.7
    where a token is so improbable that nothing depends on it.
    """
    return (expected.exp() * (expected - found)).sum(dim=-1)


# Memory


def memory_in_use(device: str) -> float:
    """The most memory that this process has had, in bytes: of the GPU, or of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # not ru_maxrss here: on Linux a child inherits its parent's
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        import resource  # here: Windows has none

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from benchmarks import common; common.print_memory()"
)


def in_own_process(device: str, imports: list[str], function, *arguments) -> float:
    """The bytes that function(*arguments) takes at most in a process of its own, after imports.

    imports: modules that it imports when it runs. Raises UserError if the process fails, for want
    of memory say.
    """
    module = function.__module__
    if module == "__main__":  # a file, or what `python -m` names
        spec = sys.modules["__main__"].__spec__
        module = spec.name if spec else Path(sys.argv[0]).stem
    job = pickle.dumps((device, [module, *imports], function.__name__, arguments))
    command = [sys.executable, "-c", CHILD, str(ROOT)]
    # In a session of its own the child does not get Ctrl-C: it has nothing to say, and is killed.
    child = subprocess.run(command, input=job, capture_output=True, start_new_session=True)
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines()
        reason = "it was killed; is there too little memory?" if child.returncode < 0 else lines[-1]
        raise UserError(f"the process that measures memory failed: {reason}")
    return float(child.stdout.split()[-1])


def print_memory() -> None:
    """What the child of `in_own_process` does."""
    device, names, function, arguments = pickle.load(sys.stdin.buffer)
    modules = [importlib.import_module(name) for name in names]
    before = memory_in_use(device)
    getattr(modules[0], function)(*arguments)
    print(memory_in_use(device) - before)
