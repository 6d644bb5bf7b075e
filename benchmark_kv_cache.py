"""What does the cache gain, and how does transformers compare? python benchmark_kv_cache.py --max-new-tokens 60 220."""

import importlib.util
import itertools
import sys
import tempfile
import textwrap

import torch

import benchmark_common as common
from checkpoint import UserError
from infer import MOST_TEXTS, STORIES, Parser, generate, pick_dtype
from load import load_model
from model import Model
from sampling import SamplingParams

MODES = ("cache", "no cache", "transformers")
PEER_IMPORTS = ["transformers.models.gpt2.modeling_gpt2", "transformers.generation.utils"]


def load(mode: str, directory, dtype: torch.dtype, device: str):
    """The model as that mode runs it."""
    if mode != "transformers":
        return load_model(directory, dtype, device)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    peer.generation_config.eos_token_id = None  # so that it ignores EOS
    return peer


def run(mode: str, model, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
    """Greedy steps of one token a prompt, the seconds to the first step, and from there to the last."""
    if mode != "transformers":
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return common.timed(generate(model, prompts, params, use_cache=mode == "cache"), device)
    inputs, clock = torch.tensor(prompts, device=device), Clock(device)
    options = {"max_new_tokens": length, "do_sample": False, "use_cache": True, "pad_token_id": 0, "streamer": clock}
    began = common.now(device)
    tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    return tokens[:, inputs.shape[1] :].t().tolist(), clock.times[1] - began, common.now(device) - clock.times[1]


class Clock:
    """A streamer: transformers' generate calls `put` with the prompt first, and then with each step's tokens."""

    def __init__(self, device: str):
        self.device, self.times = device, []

    def put(self, tokens) -> None:
        if len(self.times) < 2:
            self.times.append(common.now(self.device))

    def end(self) -> None:
        pass


def run_once(mode: str, directory, dtype: torch.dtype, device: str, prompts: list[list[int]], length: int) -> None:
    """Load the model and generate once, for its memory."""
    run(mode, load(mode, directory, dtype, device), prompts, length, device)


def check(ours: Model, models: dict, prompts: list[list[int]], length: int, device: str) -> None:
    """Exit unless all modes make the same greedy tokens (float32), or logits that are close (half precision)."""
    texts = {mode: run(mode, model, prompts, length, device)[0] for mode, model in models.items()}
    first = next(iter(texts.values()))
    if any(len(text) != length or (text != first and ours.dtype == torch.float32) for text in texts.values()):
        sys.exit(f"{', '.join(texts)} do not make the same tokens: no timing of wrong results")
    if ours.dtype != torch.float32:
        peer = models.get("transformers")
        tokens = torch.cat([torch.tensor(prompts), torch.tensor(first[:-1]).t()], dim=1).to(device)
        common.check_half_precision(ours, tokens, peer=peer and (lambda tokens: peer(tokens).logits))


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all modes for each model, dtype, batch size, length and repeat. Raises UserError for bad options."""
    modes, dtypes = [mode for mode in MODES if mode in args.modes], [pick_dtype(name, device) for name in args.dtype]
    if "transformers" in modes and importlib.util.find_spec("transformers") is None:
        modes.remove("transformers")
        print("transformers is not installed: its rows are missing; pip install transformers", file=sys.stderr)
        if not modes:
            raise UserError("--modes transformers: nothing else to run")
    names = common.models_that_fit(args.model, max(args.max_new_tokens) + args.prompt_tokens)
    for name, dtype in itertools.product(names, dtypes):
        model = load_model(name, dtype, device)
        about, peak = common.describe(name, model, device), common.bandwidth(device, dtype)
        with tempfile.TemporaryDirectory() as directory:  # all modes load the same file
            model.save_pretrained(directory)
            models = {mode: load(mode, directory, dtype, device) if mode == "transformers" else model for mode in modes}
            for batch_size, length in itertools.product(args.batch_size, args.max_new_tokens):
                prompts = common.random_prompts(model.config.vocab_size, batch_size, args.prompt_tokens)
                check(model, models, prompts, length, device)  # this also warms up
                memory = {}
                for mode in modes:
                    imports = PEER_IMPORTS if mode == "transformers" else []
                    alone = (run_once, mode, directory, dtype, device, prompts, length)
                    memory[mode] = common.in_own_process(device, imports, *alone) / 1e6
                for repeat, mode in itertools.product(range(args.repeats), modes):
                    _, first, rest = run(mode, models[mode], prompts, length, device)
                    read = None if mode == "no cache" else model  # that reads no cache, and computes all positions
                    speeds = common.speeds(read, prompts, length, first, rest, peak)
                    results.write(
                        **about | speeds,
                        mode=mode,
                        temperature=0.0,
                        prompt=0,
                        repeat=repeat,
                        peak_memory_mb=memory[mode],
                    )


def plot(summary):
    """Decode rate by length, a line for each mode; a row of panels for each model and dtype, a column a batch size."""
    from matplotlib.figure import Figure

    models = list(summary.groupby(["model", "dtype"], sort=False).groups)
    sizes = list(summary["batch_size"].unique())
    figure = Figure(figsize=(1.5 + 4 * len(sizes), 3.7 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), squeeze=False)
    lines = summary.groupby(["model", "dtype", "batch_size", "mode"], sort=False)
    for (model, dtype, batch_size, mode), rows in lines:
        axes = panels[models.index((model, dtype))][sizes.index(batch_size)]
        median, low, high = (rows[f"decode_tokens_per_s_{name}"] for name in ("median", "min", "max"))
        axes.errorbar(rows["new_tokens"], median, yerr=[median - low, high - median], marker="o", capsize=3, label=mode)
        axes.set_title(f"{textwrap.fill(model, 45)}\n{dtype}, batch size {batch_size}", fontsize="medium")
        axes.set_xticks(sorted(set(summary["new_tokens"])))
        axes.set(xlabel="new tokens in each text", ylim=(0, None))
    for axes in panels[:, 0]:
        axes.set_ylabel("decode rate, tokens/s in all texts")
    panels[0][0].legend(fontsize="small")
    figure.suptitle("Greedy decoding after the first token: median, min and max")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Time greedy decoding with the cache, without it, and by transformers' generate.")
    parser.add_argument(
        "--model", nargs="+", default=[str(STORIES)], help="directories, gpt2[-medium|-large|-xl] or random:gpt2"
    )
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="what to time")
    texts = common.whole_number(1, MOST_TEXTS)
    parser.add_argument("--batch-size", type=texts, **common.LIST, default=[1], help="texts at once")
    parser.add_argument("--prompt-tokens", type=common.whole_number(1), default=16, help="random ids in each prompt")
    common.add_options(parser, "kv_cache_cpu.csv", lengths=[60, 120, 220], repeats=3)
    common.run_benchmark(parser, measure, "no cache", plot, argv)


if __name__ == "__main__":
    main()
