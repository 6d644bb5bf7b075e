"""What does the cache gain, and how far is transformers? python benchmark_kv_cache.py --max-new-tokens 60 120 220."""

import importlib.util
import itertools
import sys
import tempfile
import time

import torch

from benchmark_common import (
    Rows,
    add_options,
    bandwidth,
    check_half_precision,
    describe,
    in_own_process,
    roofline_share,
    run_and_report,
    synchronize,
    timed,
)
from infer import STORIES, Parser, SamplingParams, generate, pick_dtype
from model import GPT, PRESETS, find_checkpoint, read_config

MODES = ("cache", "no cache", "transformers")
PEER_IMPORTS = ["transformers.models.gpt2.modeling_gpt2", "transformers.generation.utils"]


def load(mode: str, name, dtype: torch.dtype, device: str):
    """The model as that mode runs it; `transformers` reads a directory that save_pretrained has written."""
    if mode != "transformers":
        return GPT.from_pretrained(name, dtype, device)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    peer = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    peer.generation_config.eos_token_id = None  # there is no other way to make it ignore EOS
    return peer


def run(mode: str, model, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
    """Greedy steps of one token a prompt, the seconds to the first, and from there to the last."""
    if mode != "transformers":
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return timed(generate(model, prompts, params, use_cache=mode == "cache"), device)
    inputs, clock = torch.tensor(prompts, device=device), Clock(device)
    options = {"max_new_tokens": length, "do_sample": False, "use_cache": True, "pad_token_id": 0, "streamer": clock}
    began = clock.now()
    tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    return tokens[:, inputs.shape[1] :].t().tolist(), clock.times[1] - began, clock.now() - clock.times[1]


class Clock:
    """A streamer for transformers' generate, which puts the prompt first and then each step's tokens."""

    def __init__(self, device: str):
        self.device, self.times = device, []

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def put(self, tokens) -> None:
        if len(self.times) < 2:  # the prompt, and the first tokens
            self.times.append(self.now())

    def end(self) -> None:
        pass


def run_once(mode: str, name, dtype: torch.dtype, device: str, prompts: list[list[int]], length: int) -> None:
    """One run from nothing, for its memory."""
    run(mode, load(mode, name, dtype, device), prompts, length, device)


def measure(args, device: str, rows: Rows) -> None:
    """Run all modes for each model, dtype, batch size, length and repeat. Raises ValueError for bad options."""
    modes, dtypes = [mode for mode in MODES if mode in args.modes], [pick_dtype(name, device) for name in args.dtype]
    if "transformers" in modes and importlib.util.find_spec("transformers") is None:
        modes.remove("transformers")
        print("transformers is not installed: its rows are missing; pip install transformers", file=sys.stderr)
        if not modes:
            raise ValueError("--modes transformers: nothing else to run")
    longest = max(args.max_new_tokens) + args.prompt_tokens
    for name in args.model:  # before anything is timed
        shape = PRESETS.get(str(name).removeprefix("random:")) or read_config(
            find_checkpoint(str(name)) / "config.json"
        )
        if longest > shape.block_size:
            raise ValueError(f"{longest} tokens do not fit the window of {name}, {shape.block_size}")
    for name, dtype in itertools.product(args.model, dtypes):
        model = GPT.from_pretrained(name, dtype, device)
        about, peak = describe(name, model, device), bandwidth(device, dtype)
        with tempfile.TemporaryDirectory() as directory:  # all modes load the same file
            model.save_pretrained(directory)
            models = {mode: load(mode, directory, dtype, device) if mode == "transformers" else model for mode in modes}
            for batch_size, length in itertools.product(args.batch_size, args.max_new_tokens):
                ids = torch.Generator().manual_seed(0)
                prompts = torch.randint(
                    model.config.vocab_size, (batch_size, args.prompt_tokens), generator=ids
                ).tolist()
                check(model, models, prompts, length, device)  # this also warms up
                memory = {}
                for mode in modes:
                    imports = PEER_IMPORTS if mode == "transformers" else []
                    run_alone = (run_once, mode, directory, dtype, device, prompts, length)
                    memory[mode] = in_own_process(device, imports, *run_alone) / 1e6
                for repeat in range(args.repeats):
                    for mode in modes:
                        _, first, rest = run(mode, models[mode], prompts, length, device)
                        share = roofline_share(model, batch_size, args.prompt_tokens, length, rest, peak)
                        rows.write(
                            **about,
                            mode=mode,
                            batch_size=batch_size,
                            prompt_tokens=args.prompt_tokens,
                            new_tokens=length,
                            temperature=0.0,
                            prompt=0,
                            repeat=repeat,
                            first_token_s=first,
                            decode_tokens_per_s=batch_size * (length - 1) / rest,
                            roofline_share=None if mode == "no cache" else share,
                            peak_memory_mb=memory[mode],
                        )


def check(ours: GPT, models: dict, prompts: list[list[int]], length: int, device: str) -> None:
    """Before timing: in float32 the same greedy tokens in all modes, in half precision logits that are close."""
    texts = {mode: run(mode, model, prompts, length, device)[0] for mode, model in models.items()}
    first = next(iter(texts.values()))
    same = all(text == first for text in texts.values()) or ours.wte.weight.dtype != torch.float32
    if not same or any(len(text) != length for text in texts.values()):
        raise SystemExit(f"{', '.join(texts)} do not make the same tokens; no timing of wrong results")
    if ours.wte.weight.dtype != torch.float32:
        peer = models.get("transformers")
        tokens = torch.tensor([prompts[0] + [step[0] for step in first[:-1]]], device=device)
        check_half_precision(ours, tokens, peer and (lambda tokens: peer(tokens).logits))


def plot(summary):
    """Decode tokens/s by length for each mode; a panel for each model, dtype and batch size."""
    import matplotlib.pyplot as plt

    settings = list(summary.groupby(["model", "dtype", "batch_size"], sort=False))
    figure, panels = plt.subplots(
        1, len(settings), figsize=(1 + 4.5 * len(settings), 4), layout="constrained", squeeze=False
    )
    for axes, ((name, dtype, batch_size), group) in zip(panels[0], settings):
        for mode, rows in group.groupby("mode", sort=False):
            median, low, high = (rows[f"decode_tokens_per_s_{statistic}"] for statistic in ("median", "min", "max"))
            axes.errorbar(
                rows["new_tokens"], median, yerr=[median - low, high - median], marker="o", capsize=3, label=mode
            )
        axes.set_title(f"{name}, {dtype}, batch of {batch_size}", fontsize="medium")
        axes.set(xlabel="new tokens", ylim=(0, None))
        axes.set_xticks(sorted(set(group["new_tokens"])))
    panels[0][0].set_ylabel("tokens/s after the first: median, min to max")
    panels[0][0].legend(fontsize="small")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Time greedy decoding with the cache, without it, and by transformers' generate.")
    parser.add_argument(
        "--model", nargs="+", default=[STORIES], help="as of infer.py; random:gpt2-xl needs no download"
    )
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="default: all three")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], help="default: 1")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="random token ids; default: 16")
    add_options(parser, "kv_cache_cpu.csv", lengths=[60, 120, 220])
    run_and_report(parser, argv, measure, "no cache", plot)


if __name__ == "__main__":
    main()
