"""Greedy decoding with and without a KV cache and in transformers: python benchmark_kv_cache.py."""

import importlib.util
import itertools
import os
import sys
import tempfile
import textwrap

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from benchmarks import common
from command_line.models import pick_dtype
from command_line.options import MAX_SEQUENCES, STORIES
from command_line.parser import Parser
from errors import UserError
from infer import generate
from loading.load import load_model, save_model
from sampling import SamplingParams

MODES = ("cache", "no cache", "transformers")
TRANSFORMERS_IMPORTS = [
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
]


def load(mode: str, directory, dtype: torch.dtype, device: str):
    """Return the model as `mode` runs it."""
    if mode != "transformers":
        return load_model(directory, dtype, device)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hf_model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    hf_model.generation_config.eos_token_id = None  # ignore EOS
    return hf_model


def run(
    mode: str, model, prompts: list[list[int]], length: int, device: str
) -> tuple[list, float, float]:
    """Generate greedily; return steps (a token per prompt), TTFT and decode time in seconds."""
    if mode != "transformers":
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return common.timed(generate(model, prompts, params, use_cache=mode == "cache"), device)
    inputs = torch.tensor(prompts, device=device)
    clock = Clock(device)
    options = {"max_new_tokens": length, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(inputs), "streamer": clock}
    began = common.now(device)
    tokens = model.generate(inputs, **options)
    ended = common.now(device)
    steps = tokens[:, inputs.shape[1] :].t().tolist()
    return steps, clock.times[1] - began, ended - clock.times[1]


class Clock:
    """A streamer for transformers' `generate`: gets the prompt, then the tokens of each step."""

    def __init__(self, device: str):
        self.device = device
        self.times = []  # seconds, of the prompt and of the first token

    def put(self, tokens) -> None:
        if len(self.times) < 2:
            self.times.append(common.now(self.device))

    def end(self) -> None:
        pass


def run_once(
    mode: str, directory, dtype: torch.dtype, device: str, prompts: list[list[int]], length: int
) -> None:
    """Load the model and generate once, so that its peak memory can be measured."""
    run(mode, load(mode, directory, dtype, device), prompts, length, device)


def check(ours, models: dict, prompts: list[list[int]], length: int, device: str) -> None:
    """Exit unless all modes generate the same greedy tokens, or close logits.

    Float32 compares tokens, half precision compares logits. Both require `length` tokens.
    """
    outputs = {mode: run(mode, model, prompts, length, device)[0] for mode, model in models.items()}
    first = next(iter(outputs.values()))
    exact = ours.dtype == torch.float32
    for output in outputs.values():
        if len(output) != length or (exact and output != first):
            sys.exit(f"{', '.join(outputs)} generate different tokens; wrong results are not timed")
    if not exact:
        hf_model = models.get("transformers")
        generated = torch.tensor(first[:-1]).t()
        tokens = torch.cat([torch.tensor(prompts), generated], dim=1).to(device)
        common.check_half_precision(
            ours, tokens, reference=hf_model and (lambda ids: hf_model(ids).logits)
        )


def available(names: list[str]) -> list[str]:
    """Return the modes that can run here, in the order of MODES; report a missing one on stderr.

    Raises UserError if none can run.
    """
    modes = [mode for mode in MODES if mode in names]
    if "transformers" in modes and importlib.util.find_spec("transformers") is None:
        modes.remove("transformers")
        missing = "transformers is not installed: its rows are missing; pip install transformers"
        print(missing, file=sys.stderr)
        if not modes:
            raise UserError("--modes transformers: nothing else to run")
    return modes


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all modes for each model, dtype, batch size, length and repeat.

    Raises UserError for bad options.
    """
    modes = available(args.modes)
    dtypes = [pick_dtype(name, device) for name in args.dtype]
    names = common.models_that_fit(args.model, max(args.max_new_tokens) + args.prompt_tokens)
    for name, dtype in itertools.product(names, dtypes):
        model = load_model(name, dtype, device)
        environment = common.describe_environment(name, model, device)
        peak = common.bandwidth(device, dtype)
        with tempfile.TemporaryDirectory() as directory:  # all modes load the same file
            save_model(model, directory)
            models = dict.fromkeys(modes, model)
            if "transformers" in modes:
                models["transformers"] = load("transformers", directory, dtype, device)
            for batch_size, length in itertools.product(args.batch_size, args.max_new_tokens):
                vocab_size = model.config.vocab_size
                prompts = common.random_prompts(vocab_size, batch_size, args.prompt_tokens)
                check(model, models, prompts, length, device)  # this also warms up
                if args.profile:
                    first = (run, modes[0], models[modes[0]], prompts)
                    steps = min(length, common.PROFILED)
                    common.profile(args.profile, device, *first, steps, device)
                    args.profile = None  # profile only the first setting
                memory = {}
                for mode in modes:
                    imports = TRANSFORMERS_IMPORTS if mode == "transformers" else []
                    alone = (run_once, mode, directory, dtype, device, prompts, length)
                    memory[mode] = common.in_own_process(device, imports, *alone) / 1e6
                for repeat, mode in itertools.product(range(args.repeats), modes):
                    _, ttft, decode_time = run(mode, models[mode], prompts, length, device)
                    # Without a cache the roofline does not apply: a step recomputes all positions.
                    read = None if mode == "no cache" else model
                    results.write(
                        **environment
                        | common.throughput_columns(read, prompts, length, ttft, decode_time, peak),
                        mode=mode,
                        temperature=0.0,
                        prompt=0,
                        repeat=repeat,
                        library=common.library(mode) if mode == "transformers" else "",
                        peak_memory_mb=memory[mode],
                    )


def plot(summary):
    """Plot the decode rate over the length, with a line for each mode.

    Each model and dtype is a row of panels, each batch size a column.
    """
    from matplotlib.figure import Figure

    models = list(summary.groupby(["model", "dtype"], sort=False).groups)
    sizes = list(summary["batch_size"].unique())
    figure = Figure(figsize=(1.5 + 4 * len(sizes), 3.7 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), squeeze=False)
    lines = summary.groupby(["model", "dtype", "batch_size", "mode"], sort=False)
    for (model, dtype, batch_size, mode), rows in lines:
        axes = panels[models.index((model, dtype))][sizes.index(batch_size)]
        rate = "decode_tokens_per_s"
        median, low, high = (rows[f"{rate}_{name}"] for name in ("median", "min", "max"))
        spread = [median - low, high - median]
        axes.errorbar(rows["new_tokens"], median, yerr=spread, marker="o", capsize=3, label=mode)
        title = f"{textwrap.fill(model, 45)}\n{dtype}, batch size {batch_size}"
        axes.set_title(title, fontsize="medium")
        axes.set_xticks(sorted(set(summary["new_tokens"])))
        axes.set_xlabel("new tokens per sequence")
    for axes in panels.flat:
        axes.set_ylim(0)  # after all lines, because it turns autoscaling off
    for axes in panels[:, 0]:
        axes.set_ylabel("decode throughput (tokens/s)")
    panels[0][0].legend(fontsize="small")
    figure.suptitle("Greedy decoding after the first token: median, min and max")
    return figure


def main(argv=None) -> None:
    description = "Time greedy decoding with the cache, without it, and in transformers' generate."
    parser = Parser(description=description)
    models = {"nargs": "+", "default": [str(STORIES)]}
    names = "directories, gpt2[-medium|-large|-xl] or random:gpt2"
    parser.add_argument("--model", **models, help=names)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="modes to time")
    sizes = {"type": common.integer_in_range(1, MAX_SEQUENCES), "default": [1]}
    parser.add_argument("--batch-size", **common.LIST, **sizes, help="sequences per batch")
    tokens = {"type": common.integer_in_range(1), "default": 16}
    parser.add_argument("--prompt-tokens", **tokens, help="random tokens per prompt")
    common.add_profile_option(parser, "the first mode, model, dtype and batch size")
    common.add_options(parser, "kv_cache_cpu.csv", lengths=[60, 120, 220], repeats=3)
    common.run_benchmark(parser, measure, "no cache", plot, argv)


if __name__ == "__main__":
    main()
