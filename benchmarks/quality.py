"""Divergence of each dtype from float32: python -m benchmarks.quality."""

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from benchmarks import common
from benchmarks.llama_cpp import LlamaCpp
from cache import KVCache
from command_line.models import pick_dtype
from command_line.options import CACHE_DTYPES, DTYPES, STORIES
from command_line.output import warn_dropped_bytes
from command_line.parser import Parser
from errors import UserError
from infer import pass_logits
from loading.load import load_model, resolve_source
from native import use_native
from text.tokenizer import load_encoding

TEXTS = Path(__file__).resolve().parent / "texts"  # new, so in no training data
PASS_SIZE = 128  # positions per pass, which bounds the memory of the logits
LENGTH = 512  # tokens per chunk, if the context window is that large
FLOOR = 1e-8  # of the plot; rounding of float32 in C stays below
BACKENDS = ("torch", "native")
SIDES = {  # label offsets in the plot by backend, because points may coincide
    "torch": {"xytext": (7, -9)},
    "native": {"xytext": (7, 3)},
    "llama.cpp": {"xytext": (-7, -3), "ha": "right"},
}
MEASURED = {
    "kl": "mean Kullback-Leibler divergence from float32's probabilities, in nats",
    "kl_99": "99 % quantile of these divergences",
    "top_1": "share of predictions whose most probable token is float32's",
    "perplexity": "exp of the mean -log p of the text's tokens",
    "bytes_per_weight": "weight_bytes / parameters",
}
COLUMNS = {
    "model": common.COLUMNS["model"],
    "dtype": "dtype of the weights, and of the cache if given; or the GGUF file",
    "backend": "torch, native (C code), or llama.cpp for a GGUF file",
    **MEASURED,
    "weight_bytes": "bytes of the weights, with scales",
    "predictions": "predicted tokens: all but the first of each chunk",
    "text": "text file",
    "length": "tokens per chunk",
}
COLUMNS = common.columns(COLUMNS)
Logits = Callable[[list[int]], Iterator[torch.Tensor]]  # logits after each token, in pieces


class Results(common.ResultsFile):
    """A CSV file with a row for each dtype and backend, or GGUF file."""

    columns = COLUMNS

    def write(self, **row) -> None:
        """Add a row and print it on stderr."""
        row |= {name: common.four_digits(row[name]) for name in MEASURED}
        self.append(row)
        self.rows.append(row)
        values = "KL {kl:.2g}, 99 % {kl_99:.2g}, top-1 {top_1:.3f}, perplexity {perplexity:.2f}"
        shown = (
            "{model}  {dtype}  {backend}: " + values + ", {bytes_per_weight:.2f} bytes per weight"
        )
        print(shown.format(**row), file=sys.stderr)

    def summarise(self, baseline):
        """Return the rows without the columns that they have in common."""
        import pandas

        return pandas.DataFrame(self.rows)[["model", "dtype", "backend", *MEASURED]]


# Predictions


def model_logits(model, tokens: list[int], cache_dtype=None) -> Iterator[torch.Tensor]:
    """Yield the logits after each token, (n, vocab_size), PASS_SIZE tokens at a time."""
    cache = KVCache(model, 1, len(tokens), cache_dtype)
    for start in range(0, len(tokens), PASS_SIZE):
        new = tokens[start : start + PASS_SIZE]
        yield pass_logits(model, [new], [0], cache, len(new))[0]


def compare(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return three scores of each of N predictions, float64 (3, N).

    Row 0 is the KL divergence, the sum of p * log(p / q), with p from the reference and q from
    `logits`. Row 1 is 1.0 where both have the same top token, else 0.0. Row 2 is -log q of the
    target. logits, reference: (N, vocab_size). targets: (N,).
    """
    log_q = logits.cpu().double().log_softmax(dim=-1)  # differences of float32 logs are too coarse
    log_p = reference.cpu().double().log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    same = log_q.argmax(dim=-1) == log_p.argmax(dim=-1)
    loss = -log_q.gather(-1, targets[:, None]).squeeze(-1)
    return torch.stack([kl, same.double(), loss])


@torch.inference_mode()
def quality(logits: Logits, reference: Logits, chunks: list[list[int]]) -> dict:
    """Return the columns about next-token predictions within each chunk.

    Nothing predicts the first token of a chunk. The reference is recomputed piece by piece, because
    its logits for many chunks would not fit in memory.
    """
    parts = []
    for chunk in chunks:
        seen = chunk[:-1]
        targets = torch.tensor(chunk[1:]).split(PASS_SIZE)
        parts += map(compare, logits(seen), reference(seen), targets)
    kl, same, loss = torch.cat(parts, dim=1)
    return {
        "kl": kl.mean().item(),
        "kl_99": kl.quantile(0.99).item(),
        "top_1": same.mean().item(),
        "perplexity": loss.mean().exp().item(),
        "predictions": len(kl),
    }


# The whole benchmark


def read_chunks(args, vocab_size: int) -> list[list[int]]:
    """Return the text's token ids in chunks. Raises UserError for a short or unreadable text."""
    file = args.text
    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"--text {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--text {file}: not UTF-8 text") from None
    encoding = load_encoding(args.model, vocab_size)
    warn_dropped_bytes(encoding, text, plain=True)
    tokens = encoding.encode_ordinary(text)
    needed = args.chunks * args.length
    if len(tokens) < needed:
        reason = f"--chunks {args.chunks} of --length {args.length} need {needed}"
        raise UserError(f"--text {file}: has {len(tokens)} tokens, and {reason}")
    starts = range(0, needed, args.length)
    return [tokens[start : start + args.length] for start in starts]


def load_backend(name, dtype: str, backend: str, device: str):
    """Return a model on that backend, and the bytes of its weights.

    Raises UserError if the backend cannot compute it.
    """
    if backend == "native":
        if refusal := common.native_refusal(device):
            raise UserError(refusal)
    model = load_model(name, pick_dtype(dtype, device), device)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    if backend == "native":
        try:
            use_native(model)
        except ValueError as error:  # such as an architecture that gpt.c does not know
            raise UserError(str(error)) from None
    return model, sum(tensors.values())


def check_gguf_files(files: list[Path], device: str) -> None:
    """Raise UserError if llama.cpp cannot compute these files."""
    if files and not importlib.util.find_spec("llama_cpp"):
        raise UserError("--gguf: needs llama.cpp; pip install llama-cpp-python")
    if files and device != "cpu":
        raise UserError(f"--gguf: runs on the CPU only, not on {device}")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"--gguf {missing[0]}: no such file")


def measure(args, device: str, results: Results) -> None:
    """Compare each dtype on each backend, then each GGUF file, with float32.

    Raises UserError for bad options, or if nothing can be computed.
    """
    common.models_that_fit([args.model], args.length or 1)
    check_gguf_files(args.gguf, device)
    model = load_model(args.model, torch.float32, device)
    config = model.config
    args.length = args.length or min(LENGTH, config.block_size)
    chunks = read_chunks(args, config.vocab_size)
    environment = common.describe_environment(args.model, model, device)
    environment |= {"text": args.text.name, "length": args.length, "library": ""}
    reference = functools.partial(model_logits, model)

    def add(dtype: str, backend: str, logits: Logits, size: int, **more) -> None:
        row = environment | {"dtype": dtype, "backend": backend, **more}
        row |= {"weight_bytes": size, "bytes_per_weight": size / environment["parameters"]}
        results.write(**row, **quality(logits, reference, chunks))

    for dtype, backend in itertools.product(args.dtype, args.backend):
        try:
            other, size = load_backend(args.model, dtype, backend, device)
        except UserError as error:
            print(f"without {dtype} {backend}: {error}", file=sys.stderr)
        else:
            for name in args.cache_dtype:
                logits = functools.partial(model_logits, other, cache_dtype=CACHE_DTYPES[name])
                label = dtype if name == "auto" else f"{dtype}, {name} cache"
                add(label, backend, logits, size)
            del other, logits  # free memory before the next load
    for file in args.gguf:
        with contextlib.closing(LlamaCpp(file)) as llama_cpp:
            if llama_cpp.vocab_size != config.vocab_size:
                sizes = f"{llama_cpp.vocab_size}, that of {args.model} is {config.vocab_size}"
                raise UserError(f"--gguf {file}: the vocabulary size is {sizes}")
            logits = functools.partial(llama_cpp.logits, pass_size=PASS_SIZE)
            library = common.library("llama_cpp")
            add(file.stem, "llama.cpp", logits, llama_cpp.weight_bytes, library=library)
    if not results.rows:
        which = f"supports none of --dtype {' '.join(args.dtype)} here"
        raise UserError(f"--backend {' '.join(args.backend)}: {which}")


def plot(summary):
    """Plot means and 99 % quantiles of divergences over bytes per weight, with top-1 shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    for backend, rows in summary.groupby("backend", sort=False):
        number = list(SIDES).index(backend)
        mean = rows["kl"].clip(lower=FLOOR)
        spread = [0 * mean, (rows["kl_99"] - mean).clip(lower=0)]
        style = {"marker": "osD"[number], "linestyle": "", "capsize": 3, "color": f"C{number}"}
        axes.errorbar(rows["bytes_per_weight"], mean, yerr=spread, label=backend, **style)
        names = list(rows["dtype"])
        if backend == "llama.cpp":  # drop the prefix that all file names share
            same = os.path.commonprefix(names)
            names = [name.removeprefix(same) or name for name in names]
        for name, x, y, top_1 in zip(names, rows["bytes_per_weight"], mean, rows["top_1"]):
            offset = {"textcoords": "offset points", "fontsize": "x-small", **SIDES[backend]}
            axes.annotate(f"{name} ({top_1:.3f})", (x, y), **offset)
    axes.set(xscale="log", yscale="log", xlabel="bytes per weight")
    axes.set_ylabel(f"KL divergence from float32, nats (at least {FLOOR:g})")
    axes.set_xlim(0.4, 7)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{summary['model'][0]}: mean and 99 % quantile (share of equal top tokens)")
    return figure


def default_model() -> str:
    """Return SmolLM2 if it is installed, else the bundled Llama."""
    try:
        return resolve_source("smollm2").package or str(STORIES.with_name("stories-llama"))
    except UserError:
        return str(STORIES.with_name("stories-llama"))


def default_text(name: str) -> Path:
    """Return the text beside this script that is closer to the model's training data."""
    is_story = resolve_source(name).label.startswith("checkpoints/stories")
    return TEXTS / ("stories.txt" if is_story else "english.txt")


def main(argv=None) -> None:
    description = (
        "Compare each dtype, backend and GGUF file with float32 in torch, on the same text."
    )
    parser = Parser(description=description)
    model = "model, as in infer.py (default: smollm2 if installed, else stories-llama)"
    parser.add_argument("--model", help=model)
    dtypes = {"default": list(DTYPES), "choices": DTYPES, "help": "weight dtypes"}
    parser.add_argument("--dtype", **common.LIST, **dtypes)
    caches = {"default": ["auto"], "choices": CACHE_DTYPES, "help": "dtypes of the KV cache"}
    parser.add_argument("--cache-dtype", **common.LIST, **caches)
    backends = {"default": list(BACKENDS), "choices": BACKENDS, "help": "compute backends"}
    parser.add_argument("--backend", **common.LIST, **backends)
    gguf = "GGUF files of the same model, run by llama.cpp with a float32 cache"
    parser.add_argument("--gguf", **common.LIST, type=Path, metavar="FILE", default=[], help=gguf)
    text = "UTF-8 text (default: stories.txt or english.txt beside this script)"
    parser.add_argument("--text", type=Path, help=text)
    chunks = {"type": common.integer_in_range(1), "default": 2}
    parser.add_argument(
        "--chunks", **chunks, help="number of chunks, from the beginning of the text"
    )
    length = f"tokens per chunk (default: {LENGTH}, or the context window if shorter)"
    parser.add_argument("--length", type=common.integer_in_range(2), help=length)
    shared = {"lengths": None, "repeats": None, "dtypes": False, "columns": COLUMNS}
    common.add_options(parser, "quality_cpu.csv", **shared)

    def run(args, device: str, results: Results) -> None:
        args.model = args.model or default_model()
        args.text = args.text or default_text(args.model)
        measure(args, device, results)

    common.run_benchmark(parser, run, None, plot, argv, Results)


if __name__ == "__main__":
    main()
