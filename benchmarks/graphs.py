"""Decode steps of fixed shapes, captured and compiled: python -m benchmarks.graphs."""

import itertools
import sys
import textwrap
from collections.abc import Iterator

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from benchmarks import common
from command_line.models import check_compiler, pick_dtype
from command_line.options import MAX_SEQUENCES, STORIES
from command_line.parser import Parser
from engine.device import DeviceRunner
from engine.engine import Engine
from engine.pages import page_count
from engine.request import Event
from engine.static import StaticRunner
from errors import UserError
from graphs import CapturedStep, MakeStep, Step, compile_step, eager_step
from loading.load import load_model
from model import Model, TorchRunner
from native import use_native
from sampling import SamplingParams

MODES = {
    "dynamic": "torch, tensors as large as the batch needs",
    "static": "torch, fixed shapes, kernels launched one by one",
    "captured": "CUDA graphs, one launch a step",
    "compiled": "torch.compile, on a GPU also captured",
    "native": "C code, for comparison",
}
STEPS = {"static": eager_step, "captured": CapturedStep, "compiled": compile_step}
IMPORTS = {"compiled": ["torch._inductor.compile_fx"]}
BATCH_SIZES = {"cpu": [1, 8], "cuda": [1, 8, 64, 512]}
SAMPLERS = {0.0: {}, 0.8: {"temperature": 0.8, "top_p": 0.9}}  # temperature -> parameters
PAGE = 16  # positions per page
EQUAL = 0.9  # least share of equal sequences in float32; rounding may flip one in a large batch
MEASURED = {
    "make_s": "seconds to capture or compile the steps, each with its first run; nothing is cached",
    "shapes": "steps that were made: one for each shape",
    "equal_sequences": "sequences with the tokens of dynamic",
}
OWN = {
    "temperature": "0: greedy; 0.8: with top-p 0.9",
    "inter_token_s": "mean seconds of a decode step",
    "peak_memory_mb": "peak memory of one greedy run of the largest batch size in its own process,"
    " in MB, without imports",
}
COLUMNS = common.COLUMNS | OWN | MEASURED


class Results(common.ResultsFile):
    """A CSV file with a row for each run, which also says what it took to make the steps."""

    columns = COLUMNS

    def write(self, **row) -> None:
        """Add a row, as ResultsFile does."""
        super().write(**row | {"make_s": common.four_digits(row["make_s"])})

    def summarise(self, baseline):
        """Return the summary of ResultsFile, and for each setting the worst of MEASURED."""
        import pandas

        setting = list(common.SETTING)
        groups = pandas.DataFrame(self.rows).groupby(setting, sort=False)
        worst = groups.agg({"make_s": "max", "shapes": "max", "equal_sequences": "min"})
        return super().summarise(baseline).merge(worst.reset_index(), on=setting)


class TimedSteps:
    """A MakeStep that counts the steps it makes, and times each until its first result."""

    def __init__(self, make_step: MakeStep):
        self.make_step = make_step
        self.count = 0
        self.seconds = 0.0

    def __call__(self, function: Step, packed: torch.Tensor, device: torch.device) -> Step:
        began = common.now(device.type)
        with torch.compiler.config.patch(force_disable_caches=True):
            step = self.make_step(function, packed, device)
            step(packed)  # torch.compile compiles here; the next call writes the same numbers again
        self.seconds += common.now(device.type) - began
        self.count += 1
        return step


def load(name: str, dtype: torch.dtype, device: str, mode: str) -> Model:
    """Return the model as the mode runs it, except for its steps."""
    model = load_model(name, dtype, device)
    if mode == "native":
        use_native(model)
    return model


def make_engine(
    model: Model, mode: str, prompts: list[list[int]], length: int
) -> tuple[Engine, TimedSteps]:
    """Return an engine for these prompts and `length` new tokens each, and the steps it makes."""
    steps = TimedSteps(STEPS.get(mode, eager_step))
    if mode in STEPS:
        model.runner = StaticRunner(steps)
    elif mode == "dynamic":
        model.runner = DeviceRunner() if model.device.type == "cuda" else TorchRunner()
    tokens = len(prompts[0])
    pages = 1 + page_count(tokens + length, PAGE)
    sizes = {"max_num_seqs": len(prompts), "page_size": PAGE, "num_pages": len(prompts) * pages}
    # All prompts fit into one step, so the others are decode steps.
    return Engine(model, **sizes, max_num_batched_tokens=len(prompts) * tokens), steps


def sampling_params(count: int, length: int, temperature: float) -> list[SamplingParams]:
    """Return the parameters of `count` requests for exactly `length` new tokens."""
    fields = {"ignore_eos": True} | SAMPLERS[temperature]
    return [SamplingParams(length, seed=row, **fields) for row in range(count)]


def run(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], salt: str
) -> tuple[list, float, float]:
    """Generate; return outputs, TTFT and decode time in seconds.

    salt: a new one for each run, so that it finds no prompt in the prefix cache.
    """
    requests = [engine.add(*request, salt) for request in zip(prompts, params)]
    _, ttft, decode_time = common.timed(engine_steps(engine), engine.model.device.type)
    return [request.output for request in requests], ttft, decode_time


def engine_steps(engine: Engine) -> Iterator[list[Event]]:
    """Step until the engine is idle; yield the events of each step."""
    while engine.busy:
        yield engine.step()


def run_once(
    name: str, dtype: torch.dtype, device: str, mode: str, prompts: list[list[int]], length: int
) -> None:
    """Load the model and generate once, so that its peak memory can be measured."""
    engine, _ = make_engine(load(name, dtype, device, mode), mode, prompts, length)
    run(engine, prompts, sampling_params(len(prompts), length, 0.0), "")


def count_equal(mode: str, dtype: torch.dtype, outputs: list, expected: list) -> int:
    """Return how many sequences are the expected ones.

    In float32, exit if their share is below EQUAL.
    """
    equal = sum(output == other for output, other in zip(outputs, expected, strict=True))
    if equal < len(outputs):
        found = f"{mode}: {equal} of {len(outputs)} sequences equal those of dynamic"
        if dtype == torch.float32 and equal < EQUAL * len(outputs):
            sys.exit(f"{found}; wrong results are not timed")
        print(found, file=sys.stderr)
    return equal


def unavailable_reason(mode: str, device: str) -> str:
    """Return the reason why a mode cannot run here, or ""."""
    if mode == "native":
        return common.native_refusal(device)
    if mode == "captured" and device != "cuda":
        return f"CUDA graphs need --device cuda, not {device}"
    if mode in STEPS and device == "mps":
        return "steps of fixed shapes compute in float64, which mps lacks"
    if mode == "compiled":
        try:
            check_compiler(device)
        except UserError as error:
            return str(error).removeprefix("--compile: ")
    return ""


def available(names: list[str], device: str) -> list[str]:
    """Return the modes that can run here, `dynamic` always first; report the others on stderr."""
    modes = []
    for mode in MODES:
        if mode == "dynamic" or mode in names:
            reason = unavailable_reason(mode, device)
            if reason:
                print(f"without {mode}: {reason}", file=sys.stderr)
            else:
                modes.append(mode)
    return modes


def measure(args, device: str, results: Results) -> None:
    """Time all modes for each model, dtype, batch size, length, temperature and repeat.

    Raises UserError for bad options.
    """
    modes = available(args.modes, device)
    dtypes = [pick_dtype(name, device) for name in args.dtype]
    names = common.models_that_fit(args.model, max(args.max_new_tokens) + args.prompt_tokens)
    batch_sizes = args.batch_size or BATCH_SIZES.get(device, BATCH_SIZES["cpu"])
    for name, dtype in itertools.product(names, dtypes):
        models = {mode: load(name, dtype, device, mode) for mode in modes}
        reference = models["dynamic"]
        environment = common.describe_environment(name, reference, device)
        peak = common.bandwidth(device, dtype)
        for batch_size, length in itertools.product(batch_sizes, args.max_new_tokens):
            vocab_size = reference.config.vocab_size
            prompts = common.random_prompts(vocab_size, batch_size, args.prompt_tokens)
            memory = {}
            if batch_size == max(batch_sizes):
                for mode in modes:
                    alone = (run_once, name, dtype, device, mode, prompts, length)
                    imports = IMPORTS.get(mode, [])
                    memory[mode] = common.in_own_process(device, imports, *alone) / 1e6
            for temperature in SAMPLERS:
                engines = {}
                for mode, model in models.items():
                    engines[mode] = make_engine(model, mode, prompts, length)
                params = sampling_params(batch_size, length, temperature)
                for engine, _ in engines.values():
                    run(engine, prompts, params, "first")  # makes the steps
                if args.profile:
                    few = sampling_params(batch_size, common.PROFILED, temperature)
                    first = engines[modes[-1]][0]
                    common.profile(args.profile, device, run, first, prompts, few, "profile")
                    args.profile = None  # profile only the first setting
                for repeat, mode in itertools.product(range(args.repeats), modes):
                    engine, steps = engines[mode]
                    outputs, *times = run(engine, prompts, params, str(repeat))
                    if mode == "dynamic":
                        expected = outputs
                    columns = common.throughput_columns(reference, prompts, length, *times, peak)
                    results.write(
                        **environment | columns,
                        mode=mode,
                        temperature=temperature,
                        prompt=0,
                        repeat=repeat,
                        peak_memory_mb=memory.get(mode),
                        make_s=steps.seconds,
                        shapes=steps.count,
                        equal_sequences=count_equal(mode, dtype, outputs, expected),
                    )


def plot(summary):
    """Plot speed-ups over dynamic, and the seconds that it takes to make the steps.

    Each model, dtype and length is a row of panels.
    """
    from matplotlib.figure import Figure

    groups = list(summary.groupby(["model", "dtype", "new_tokens"], sort=False))
    settings = len(summary[["batch_size", "temperature"]].drop_duplicates())
    size = (5 + 1.8 * settings, 4 * len(groups) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    for ((model, dtype, length), rows), (speeds, makes) in zip(
        groups, figure.subplots(len(groups), 2, squeeze=False, width_ratios=(3, 2))
    ):
        draw_bars(speeds, rows, "speedup_median", "decode_tokens_per_s_median")
        draw_bars(makes, rows[rows["make_s"] > 0], "make_s", "make_s")
        title = f"{textwrap.fill(model, 45)}, {dtype}, {length} tokens; labels: tokens/s"
        speeds.set(title=title, ylabel="decode speed-up over dynamic")
        speeds.axhline(1, color="grey", linewidth=0.8, zorder=0)
        makes.set(title="Making the steps", ylabel="seconds, logarithmic", yscale="log")
        makes.set_ylim(bottom=1e-3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    figure.suptitle("Decode steps of the engine: median, min and max")
    return figure


def draw_bars(axes, rows, value: str, label: str) -> None:
    """Draw a bar for each mode, in a group for each batch size and temperature.

    value: column of the heights, with the spread of its repeats if it is a median. label: column of
    the numbers above the bars.
    """
    settings = list(rows.groupby(["batch_size", "temperature"], sort=False).groups)
    modes = [mode for mode in MODES if mode in set(rows["mode"])]
    width = 0.85 / max(len(modes), 1)
    for index, mode in enumerate(modes):
        bars = rows[rows["mode"] == mode]
        groups = map(settings.index, zip(bars["batch_size"], bars["temperature"]))
        at = [group + width * (index - (len(modes) - 1) / 2) for group in groups]
        style = {"label": mode, "color": f"C{list(MODES).index(mode)}"}
        if value.endswith("_median"):
            low, high = (bars[value.replace("median", name)] for name in ("min", "max"))
            style |= {"yerr": [bars[value] - low, high - bars[value]], "capsize": 2}
        drawn = axes.bar(at, bars[value], width, **style)
        names = [f"{float(f'{number:.3g}'):g}" for number in bars[label]]  # 2380, not 2.38e+03
        axes.bar_label(drawn, names, padding=3, fontsize="x-small", rotation=90)
    names = [f"{size}, {'sampled' if warm else 'greedy'}" for size, warm in settings]
    axes.set_xticks(range(len(settings)), names, fontsize="small")
    axes.set_xlabel("batch size, sampling")
    axes.margins(y=0.2)


def main(argv=None) -> None:
    description = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    parser = Parser(description=f"Time decode steps of the engine. {description}.")
    models = {"nargs": "+", "default": [str(STORIES.with_name("stories-llama")), str(STORIES)]}
    parser.add_argument("--model", **models, help="directories, or model names of infer.py")
    modes = {"nargs": "+", "default": list(MODES), "choices": MODES}
    parser.add_argument("--modes", **modes, help="modes to time besides dynamic")
    sizes = {"type": common.integer_in_range(1, MAX_SEQUENCES)}
    defaults = "; ".join(f"on {name}: {' '.join(map(str, of))}" for name, of in BATCH_SIZES.items())
    parser.add_argument(
        "--batch-size", **common.LIST, **sizes, help=f"sequences per batch (default {defaults})"
    )
    # All decode steps of the default lengths have 5 to 8 pages, which is one shape.
    tokens = {"type": common.integer_in_range(1), "default": 4 * PAGE + 1}
    parser.add_argument("--prompt-tokens", **tokens, help="random token ids per prompt")
    common.add_profile_option(parser, "the last mode, in the first setting")
    common.add_options(parser, "graphs_cpu.csv", lengths=[4 * PAGE], repeats=5, columns=COLUMNS)
    common.run_benchmark(parser, measure, "dynamic", plot, argv, Results)


if __name__ == "__main__":
    main()
