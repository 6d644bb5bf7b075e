"""Speculative decoding against its cached target: python benchmark_speculative.py --gamma 3."""

import dataclasses
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from benchmarks import common
from command_line.models import load_head, names_draft_head, pick_dtype
from command_line.options import STORIES
from command_line.parser import Parser
from errors import UserError
from infer import generate
from infer_speculative import SpeculativeStep, generate_speculative
from loading.load import load_model, resolve_source
from sampling import SamplingParams
from text.tokenizer import load_encoding

PROMPTS = (
    "Once upon a time",
    "One day, a little boy named Tim",
    "Lily and her mom went to the park.",
    "The big dog was sad because",
    "Sara had a red ball. She liked to",
    "There was a bird who wanted to fly.",
)


def passes(
    target, draft, prompt: list[int], params: SamplingParams, gamma: int, generator=None
) -> Iterator[SpeculativeStep]:
    """Return the passes of the target. Gamma 0 means cached decoding without drafts."""
    if gamma == 0:
        return (
            SpeculativeStep(step, [], 0) for step in generate(target, [prompt], params, generator)
        )
    return generate_speculative(target, draft, prompt, params, gamma, generator)


def run_once(
    names: tuple,
    dtype: torch.dtype,
    device: str,
    prompt: list[int],
    params: SamplingParams,
    gamma: int,
) -> None:
    """Load the models and generate one sequence, so that peak memory can be measured."""
    target = load_model(names[0], dtype, device)
    draft = load_draft(names[1], target) if gamma else None
    list(passes(target, draft, prompt, params, gamma))


def load_draft(name, target):
    """Return a draft head, or a draft model with the target's dtype and device."""
    if names_draft_head(name):
        return load_head(name, target)
    return load_model(name, target.dtype, target.device)


def check(target, draft, prompt: list[int], params: SamplingParams, gammas: list[int]) -> None:
    """Exit unless all modes generate the same greedy tokens, or the cache gives close logits.

    Float32 compares tokens, half precision compares logits.
    """
    outputs = []
    for gamma in gammas:
        items = passes(target, draft, prompt, params, gamma)
        outputs.append([token for item in items for token in item.tokens])
    if target.dtype != torch.float32:
        tokens = torch.tensor([prompt + outputs[0]], device=target.device)
        common.check_half_precision(target, tokens, pass_size=max(gammas) + 1)
    elif any(output != outputs[0] for output in outputs):
        sys.exit("speculation and target generate different tokens; wrong results are not timed")


def check_options(args) -> None:
    """Raise UserError for a random model, or for a length shorter than two full passes."""
    random = [name for name in (args.target, args.draft) if resolve_source(name).type == "random"]
    if random:
        why = "random models accept no drafts; give a trained target and draft"
        raise UserError(f"{random[0]}: {why}")
    least = 2 * (max(args.gamma) + 1)
    shortest = min(args.max_new_tokens)
    if shortest < least:
        why = f"must be at least 2 * (gamma + 1) = {least}"
        raise UserError(f"--max-new-tokens {shortest}: {why}")


def encode_prompts(args, config) -> list[list[int]]:
    """Return the encoded prompts of a run.

    Raises UserError if the target's context window cannot hold a prompt and its new tokens.
    """
    encoding = load_encoding(args.target, config.vocab_size)
    prompts = [encoding.encode(text) for text in PROMPTS[: args.prompts]]
    longest = max(args.max_new_tokens) + max(len(prompt) for prompt in prompts)
    if longest > config.block_size:
        size = config.block_size
        raise UserError(
            f"{longest} tokens of prompt and output exceed the target's context window of {size}"
        )
    return prompts


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all modes for each dtype, length, temperature, repeat and prompt.

    Raises UserError for bad options.
    """
    check_options(args)
    gammas = [0, *args.gamma]
    names = (args.target, args.draft)
    settings = []
    for temperature in args.temperature:
        settings.append(SamplingParams(ignore_eos=True, temperature=temperature))
    for dtype in [pick_dtype(name, device) for name in args.dtype]:
        target = load_model(args.target, dtype, device)
        draft = load_draft(args.draft, target)
        prompts = encode_prompts(args, target.config)
        environment = common.describe_environment(args.target, target, device, args.draft)
        peak = common.bandwidth(device, dtype)
        for length in args.max_new_tokens:
            greedy = SamplingParams(max_new_tokens=length, ignore_eos=True)
            for prompt in prompts:
                check(target, draft, prompt, greedy, gammas)
            if args.profile:
                steps = passes(target, draft, prompts[0], greedy, args.gamma[0])
                first = itertools.islice(steps, common.PROFILED)
                common.profile(args.profile, device, list, first)
                args.profile = None  # profile only the first setting
            alone = (run_once, names, dtype, device, prompts[0], greedy)
            memory = {}
            for gamma in gammas:
                memory[gamma] = common.in_own_process(device, [], *alone, gamma) / 1e6
            for setting in settings:
                params = dataclasses.replace(setting, max_new_tokens=length)
                for gamma in gammas:
                    list(passes(target, draft, prompts[0], params, gamma))  # warm up
                runs = itertools.product(range(args.repeats), enumerate(prompts), gammas)
                for repeat, (number, prompt), gamma in runs:
                    generator = torch.Generator(device).manual_seed(len(PROMPTS) * repeat + number)
                    steps = passes(target, draft, prompt, params, gamma, generator)
                    items, ttft, decode_time = common.timed(steps, device)
                    first_pass_tokens = len(items[0].tokens)
                    row = common.throughput_columns(
                        target, [prompt], length, ttft, decode_time, peak, first_pass_tokens
                    )
                    if gamma:
                        row |= speculation(items)
                    results.write(
                        **environment | row,
                        mode=f"gamma {gamma}" if gamma else "target",
                        temperature=params.temperature,
                        prompt=number,
                        repeat=repeat,
                        peak_memory_mb=memory[gamma],
                    )


def speculation(items: list[SpeculativeStep]) -> dict:
    """Return the columns about drafts. Prefill and roofline apply only to the target alone."""
    drafts = sum(len(item.drafts) for item in items)
    return {
        "prefill_tokens_per_s": None,
        "roofline_share": None,
        "acceptance": sum(item.accepted for item in items) / drafts if drafts else None,
        "tokens_per_pass": sum(len(item.tokens) for item in items) / len(items),
    }


def plot(summary):
    """Plot the speed-up over the cached target by gamma, with a line for each setting.

    Error bars span the minimum and maximum.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()
    drafted = summary[summary["mode"] != "target"]
    gammas = drafted["mode"].str.removeprefix("gamma ").astype(int)
    lines = drafted.groupby(["dtype", "new_tokens", "temperature"], sort=False)
    for index, (setting, rows) in enumerate(lines):
        median, low, high = (rows[f"speedup_{name}"] for name in ("median", "min", "max"))
        # Offset each line, so that error bars do not overlap.
        at = gammas[rows.index] + 0.03 * (index - (len(lines) - 1) / 2)
        spread = [median - low, high - median]
        label = "{}, {} tokens, temperature {}".format(*setting)
        axes.errorbar(at, median, yerr=spread, marker="o", capsize=3, label=label)
    axes.axhline(1, color="grey", linestyle="--", label="the target alone, with its cache")
    axes.set_xticks(sorted(set(gammas)))
    axes.set_xlabel("gamma: drafts per target pass")
    axes.set_ylabel("decode rate / decode rate of the target")
    axes.set_ylim(0, None)
    names = textwrap.fill("{} drafted by {}".format(*summary.loc[0, ["model", "draft"]]), 90)
    title = f"Speculative decoding: median, min and max of paired ratios\n{names}"
    axes.set_title(title, fontsize="medium")
    figure.legend(fontsize="small", loc="outside right upper")  # inside, it would cover lines
    return figure


def main(argv=None) -> None:
    description = "Time speculative decoding against the target alone, on story prompts."
    parser = Parser(description=description)
    gamma = {"type": common.integer_in_range(1, 16), "default": [2, 3, 4]}
    parser.add_argument("--gamma", **common.LIST, **gamma, help="drafts per target pass, 1 to 16")
    temperature = {"type": float, "default": [0.0, 0.8]}
    parser.add_argument(
        "--temperature", **common.LIST, **temperature, help="sampling temperatures; 0: greedy"
    )
    parser.add_argument("--target", default=STORIES, help="directory, gpt2[-medium|-large|-xl]")
    small = STORIES.with_name("stories-draft")
    parser.add_argument(
        "--draft", default=small, help="draft head, or smaller model with the same vocabulary"
    )
    prompts = {"type": common.integer_in_range(1, len(PROMPTS)), "default": len(PROMPTS)}
    parser.add_argument("--prompts", **prompts, help="number of prompts, 1 to %(default)s")
    common.add_profile_option(parser, "the first gamma and dtype, greedy")
    common.add_options(parser, "speculative_cpu.csv", lengths=[200], repeats=2)
    common.run_benchmark(parser, measure, "target", plot, argv)


if __name__ == "__main__":
    main()
