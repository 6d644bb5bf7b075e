"""What the two benchmarks share: timed runs, the memory roofline, rows that are written as they happen, the summary."""

import argparse
import csv
import importlib
import multiprocessing
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from infer import DTYPES, pick_device
from model import GPT, KVCache

ROOT = Path(__file__).resolve().parent
COLUMNS = {
    "model": "what --model or --target names",
    "draft": "what --draft names",
    "parameters": "of the model",
    "dtype": "of weights, activations and cache",
    "device": "what computed",
    "threads": "of torch",
    "torch": "its version",
    "commit": "of this repository; + if files differ from it",
    "mode": "how the tokens were made",
    "batch_size": "texts at once",
    "prompt_tokens": "tokens of each prompt",
    "new_tokens": "tokens made after each prompt; EOS is ignored",
    "temperature": "0: greedy",
    "prompt": "which of the prompts",
    "repeat": "each runs all modes once, and ratios are taken within it",
    "first_token_s": "seconds to the first token, the prefill; with drafts to the first pass, which gives several",
    "decode_tokens_per_s": "all tokens after the first (the first pass), over the seconds after it",
    "roofline_share": "where each step reads all weights once: bytes of weights and cache that decoding must read, over"
    " its seconds and the bandwidth of a large matrix-vector product in this process; above 1 where other products read"
    " faster than that one",
    "peak_memory_mb": "most memory of a process that does one such run, greedy, above what its imports took",
    "acceptance": "share of the drafts that were accepted",
    "tokens_per_pass": "tokens for each pass of the target",
}


def add_options(parser: argparse.ArgumentParser, output: str, lengths: list[int]) -> None:
    """The options of both benchmarks."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "columns of the CSV file:\n" + "\n".join(f"  {name:20} {text}" for name, text in COLUMNS.items())
    parser.add_argument("--max-new-tokens", type=int, nargs="+", default=lengths, help=f"default: {lengths}")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="default: float32")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"), help="default: auto")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's own choice")
    parser.add_argument("--repeats", type=int, default=3, help="how often each mode runs; default: %(default)s")
    default = ROOT / "benchmark_results" / output
    parser.add_argument("--output", type=Path, default=default, help="CSV file; summary and plot go beside it")


def check_options(args) -> str:
    """Set torch's threads and return the device. Raises ValueError for values out of range."""
    for name, least in (("max_new_tokens", 2), ("repeats", 1), ("threads", 1), ("batch_size", 1), ("prompt_tokens", 1)):
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: it must be an integer >= {least}")
    if args.threads:
        torch.set_num_threads(args.threads)
    for name, values in vars(args).items():
        if isinstance(values, list):
            setattr(args, name, list(dict.fromkeys(values)))  # a value given twice would be paired with itself
    return pick_device(args.device)


def describe(name, model: GPT, device: str) -> dict:
    """The columns that say what ran on what."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # no git
        commit = ""
    return {
        "model": Path(name).name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.wte.weight.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{device} {cpu_name()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def synchronize(device: str) -> None:
    """Wait until the device has done all it was asked for."""
    if device != "cpu":
        getattr(torch, device).synchronize()


def timed(steps, device: str) -> tuple[list, float, float]:
    """Run an iterator: its items, the seconds to the first of them, and from there to the last."""
    items = []
    synchronize(device)
    began = first = time.perf_counter()
    for item in steps:
        items.append(item)
        if len(items) == 1:
            synchronize(device)
            first = time.perf_counter()
    synchronize(device)
    return items, first - began, time.perf_counter() - first


def bandwidth(device: str, dtype: torch.dtype) -> float:
    """Bytes a second that the product of a 256 MB matrix with a vector reads: the median of nine."""
    side = int((2**28 / dtype.itemsize) ** 0.5)
    matrix, vector = torch.ones(side, side, dtype=dtype, device=device), torch.ones(side, dtype=dtype, device=device)
    seconds = [timed((matrix @ vector for _ in range(1)), device)[1] for _ in range(10)]
    return matrix.nbytes / sorted(seconds[1:])[4]


def roofline_share(model: GPT, batch_size: int, prompt_tokens: int, new_tokens: int, seconds: float, peak: float):
    """What decoding must read, over what the device could have read in that time. peak: bytes a second."""
    config, itemsize = model.config, model.wte.weight.itemsize
    weights = sum(weight.nbytes for weight in model.parameters()) - model.wpe.weight.nbytes
    positions = min(prompt_tokens + new_tokens / 2, config.block_size)  # in the cache, on average
    cache = 2 * config.n_layer * config.n_embd * positions * batch_size * itemsize
    return (new_tokens - 1) * (weights + cache) / seconds / peak


def check_half_precision(model: GPT, tokens: torch.Tensor, peer=None) -> None:
    """Hold cached log-probabilities, and those of a peer, against those without a cache on the same tokens.

    For half precision, where rounding may change greedy tokens. tokens: (1, T). peer: another function of the tokens to
    logits. Raises SystemExit if the largest difference is above 0.5, or the mean one above 0.05.
    """
    with torch.inference_mode():
        cache, others = KVCache(model), [] if peer is None else [peer(tokens)]
        others.append(torch.cat([model(piece, cache=cache) for piece in tokens.split(4, dim=1)], dim=1))
        full = model(tokens).float().log_softmax(dim=-1)
        for other in others:
            error = (other.float().log_softmax(dim=-1) - full).abs()
            if error.max() > 0.5 or error.mean() > 0.05:
                sys.exit(f"log-probabilities are off by up to {error.max():.3f}: no timing of wrong results")


def memory_in_use(device: str) -> float:
    """The most memory that this process has had, in bytes: of the GPU, or of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # not ru_maxrss here: on Linux a child inherits its parent's
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        import resource  # here: Windows has none

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_own_process(device: str, imports: list[str], function, *arguments) -> float:
    """The bytes that function(*arguments) takes at most in a process of its own, above those after its imports.

    imports: modules that it uses and this file does not. Raises ValueError if the process dies, for want of memory say.
    """
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_measured, device, imports, function, arguments).result()
    except BrokenProcessPool:
        raise ValueError("the process that measures memory was killed: too little memory for this model?") from None


def _measured(device: str, imports: list[str], function, arguments) -> float:
    for module in imports:
        importlib.import_module(module)
    before = memory_in_use(device)
    function(*arguments)
    return memory_in_use(device) - before


class Rows:
    """A CSV file that holds each row as soon as it is known, so that an interrupted run loses nothing."""

    def __init__(self, path: Path):
        self.path, self.file = path, None

    def write(self, **row) -> None:
        """Write a row and show it on stderr; the first one replaces an older file. Unknown columns raise ValueError."""
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("w", newline="", encoding="utf-8")
            self.writer = csv.DictWriter(self.file, COLUMNS)
            self.writer.writeheader()
        self.writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})
        self.file.flush()
        shown = ("model", "dtype", "batch_size", "new_tokens", "temperature", "prompt", "repeat", "mode")
        print(*(row[name] for name in shown), f"{row['decode_tokens_per_s']:.1f} tokens/s", sep="  ", file=sys.stderr)


def summarise(path: Path, baseline: str):
    """Write and return `..._summary.csv`: median, min and max over repeats and prompts, and the speed-up over the mode
    `baseline` as the median (min, max) of the ratios within each repeat and prompt."""
    import pandas

    rows = pandas.read_csv(path)
    setting = ["model", "dtype", "batch_size", "new_tokens", "temperature"]
    pair = setting + ["prompt", "repeat"]
    base = rows[rows["mode"] == baseline].set_index(pair)["decode_tokens_per_s"]
    rows = rows.join(base.rename("baseline"), on=pair)
    rows["speedup"] = rows["decode_tokens_per_s"] / rows["baseline"]
    groups = rows.groupby(setting + ["mode"], sort=False)
    columns = {"runs": groups.size()}
    for name in ("decode_tokens_per_s", "speedup"):
        for statistic in ("median", "min", "max"):
            columns[f"{name}_{statistic}"] = groups[name].agg(statistic)
    for name in ("first_token_s", "roofline_share", "peak_memory_mb", "acceptance", "tokens_per_pass"):
        columns[name] = groups[name].median()
    summary = pandas.DataFrame(columns).reset_index()
    summary.to_csv(path.with_name(path.stem + "_summary.csv"), index=False, float_format="%.4g")
    return summary


def run_and_report(parser, argv, measure, baseline: str, plot) -> None:
    """Parse, measure, then summarise and plot what is there, also after Ctrl-C. Bad input is one line, exit code 2."""
    args = parser.parse_args(argv)
    rows, interrupted = Rows(args.output), False
    try:
        try:
            measure(args, check_options(args), rows)
        except KeyboardInterrupt:
            interrupted = True
        if rows.file is not None:
            summary = summarise(args.output, baseline)
            import matplotlib

            matplotlib.use("Agg")  # a file, no window
            plot(summary).savefig(args.output.with_suffix(".png"), dpi=120)
            print(summary.to_string(index=False))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if interrupted:
        sys.exit(130)
