"""Tokens/s of each lesson: python -m benchmarks.progress."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import lessons
from benchmark_speculative import PROMPTS
from benchmarks import common
from command_line.options import STORIES
from command_line.parser import Parser
from errors import UserError
from loading.load import load_model

COLUMNS = {
    "lesson": "lesson whose tag was run",
    "run": "script and options",
    "batch_size": "sequences per batch",
    "measure": "tokens/s: of the batch, after the first tokens; x first: ratio to the first lesson"
    " of this batch size, in the same repeat; same output: 1 if equal to that lesson's",
    "value": "as measured",
    "repeat": "each repeat runs all lessons once",
}
BATCH = 32  # sequences
NATIVE = "--backend native"
INT8 = f"{NATIVE} --dtype int8"
STEPS = (  # lessons that change the speed: slug, batch size, script, options
    ("greedy-decoding", 1, "infer.py", ""),
    ("kv-cache-dynamic", 1, "infer.py", ""),
    ("kv-cache-static", 1, "infer.py", ""),
    ("speculative-decoding", 1, "infer_speculative.py", ""),
    ("native-backend", 1, "infer.py", NATIVE),
    ("packed-int8", 1, "infer.py", INT8),
    ("int8-vectors", 1, "infer.py", INT8),
    ("native-step", 1, "infer.py", NATIVE),
    ("native-step", 1, "infer.py", INT8),
    ("native-greedy", 1, "infer.py", INT8),
    ("block-panels", 1, "infer.py", f"{NATIVE} --dtype blocks"),
    ("variable-batching", BATCH, "infer.py", ""),
    ("failed-texts", BATCH, "infer_engine.py", ""),
    ("native-backend", BATCH, "infer_engine.py", NATIVE),
    ("native-batches", BATCH, "infer_engine.py", NATIVE),
    ("native-greedy", BATCH, "infer_engine.py", INT8),
    ("block-panels", BATCH, "infer_engine.py", f"{NATIVE} --dtype blocks"),
)
SLUGS = list(dict.fromkeys(slug for slug, *_ in STEPS))


class Results(common.MetricsFile):
    """A CSV file with a row for each value."""

    columns = common.columns(COLUMNS)
    setting = ["lesson", "run", "batch_size", "measure"]


def run(lesson: str, tree: Path, command: list, batch_size: int) -> tuple[str, float]:
    """Run a script in a lesson's checkout; return stdout and tokens/s after the first tokens.

    Raises UserError if the script fails.
    """
    line = [sys.executable, *map(str, command)]
    ended = subprocess.run(line, cwd=tree, capture_output=True, encoding="utf-8")
    found = re.search(r"(\d+) tokens, (.+) tokens/s, the first after (.+) s", ended.stderr)
    if ended.returncode or not found:
        said = ended.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise UserError(f"{lesson}: {command[0]}: {said[0]}")
    tokens, rate, first = map(float, found.groups())
    return ended.stdout, (tokens - batch_size) / (tokens / rate - first)


def measure(args, device: str, results: Results) -> None:
    """Check out the lessons and run them in turns. Raises UserError for bad options."""
    refusal = common.native_refusal(device)
    steps = [step for step in STEPS if step[0] in args.lessons and not (refusal and step[3])]
    if not steps:
        raise UserError(f"--lessons {' '.join(args.lessons)}: {refusal}")
    if refusal:
        print(f"without lessons in C: {refusal}", file=sys.stderr)
    results.environment = common.describe_environment(STORIES, load_model(STORIES), device)
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the scripts
    with contextlib.ExitStack() as stack:
        try:
            _, every = lessons.read_main()
            found = {slug: lessons.find_lesson(every, slug) for slug, *_ in steps}
            enter = stack.enter_context
            trees = {slug: enter(lessons.worktree(lesson.commit)) for slug, lesson in found.items()}
        except lessons.LessonError as error:
            raise UserError(str(error)) from None
        file = Path(enter(tempfile.TemporaryDirectory()), "prompts")
        file.write_text("\n".join(itertools.islice(itertools.cycle(PROMPTS), BATCH)))
        baselines = {}  # (repeat, batch size) -> first lesson's stdout, rate
        for repeat, (slug, batch_size, script, options) in itertools.product(
            range(args.repeats), steps
        ):
            command = [script, *options.split(), "--device", device]
            command += ["--prompt", PROMPTS[0]] if batch_size == 1 else ["--prompt-file", file]
            command += ["--max-new-tokens", args.new_tokens]
            if slug != "greedy-decoding":  # which never stops at EOS
                command.append("--ignore-eos")
            lesson = found[slug]
            written, rate = run(lesson.id, trees[slug], command, batch_size)
            first, first_rate = baselines.setdefault((repeat, batch_size), (written, rate))
            values = {"tokens/s": rate, "x first": rate / first_rate}
            values["same output"] = float(written == first)
            line = f"{script} {options}".strip()
            which = {"lesson": lesson.id, "run": line, "batch_size": batch_size, "repeat": repeat}
            dtype = options.partition("--dtype ")[2] or "float32"
            which |= {"commit": lesson.commit[:7], "dtype": dtype}
            results.add(f"{lesson.id}  {line}  repeat {repeat}", which, values)


def plot(summary):
    """Plot a bar for each run, in a panel for each batch size."""
    from matplotlib.figure import Figure

    groups = list(summary[summary["measure"] == "tokens/s"].groupby("batch_size", sort=False))
    most = max(len(rows) for _, rows in groups)
    figure = Figure(figsize=(7.5 * len(groups), 1.5 + 0.35 * most), layout="constrained")
    for axes, (batch_size, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups):
        dtypes = rows["run"].str.partition("--dtype ")[2].replace("", "float32")
        colours = rows["run"].str.contains(NATIVE).map({False: "C0", True: "C2"})
        median = rows["median"]
        error = [median - rows["min"], rows["max"] - median]
        at = range(len(rows))[::-1]  # the first at the top
        drawn = axes.barh(at, median, xerr=error, capsize=2, color=colours)
        axes.bar_label(drawn, fmt="%.4g", padding=4, fontsize="small")
        axes.set_yticks(at, rows["lesson"] + ", " + dtypes, fontsize="small")
        axes.set(title=f"batch size {batch_size}", xlabel="tokens/s")
        axes.margins(x=0.15)
    figure.suptitle("Lesson by lesson: median, min and max (green: C)")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Time greedy decoding with each lesson's own script, at its tag.")
    slugs = {"default": SLUGS, "choices": SLUGS, "metavar": "SLUG", "help": "lessons to run"}
    parser.add_argument("--lessons", **common.LIST, **slugs)
    tokens = {
        "type": common.integer_in_range(20, 240),
        "default": 200,
        "help": "new tokens per sequence",
    }
    parser.add_argument("--new-tokens", **tokens)
    shared = {"lengths": None, "repeats": 2, "dtypes": False, "columns": Results.columns}
    common.add_options(parser, "progress_cpu.csv", **shared)
    common.run_benchmark(parser, measure, None, plot, argv, Results)


if __name__ == "__main__":
    main()
