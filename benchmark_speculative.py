"""How much faster is speculation than its cached target alone? python benchmark_speculative.py --gamma 2 3 4."""

import dataclasses
import itertools
import sys
import textwrap
from collections.abc import Iterator

import torch

import benchmark_common as common
from checkpoint import UserError, parse_name
from infer import STORIES, Parser, generate, pick_dtype
from infer_speculative import Pass, generate_speculative
from load import load_model
from model import Model
from sampling import SamplingParams
from tokenizer import load_encoding

PROMPTS = (
    "Once upon a time",
    "One day, a little boy named Tim",
    "Lily and her mom went to the park.",
    "The big dog was sad because",
    "Sara had a red ball. She liked to",
    "There was a bird who wanted to fly.",
)


def passes(target: Model, draft: Model, prompt, params: SamplingParams, gamma: int, generator=None) -> Iterator[Pass]:
    """Passes of the target: by itself, with its cache, where gamma is 0."""
    if gamma == 0:
        return (Pass(step, [], 0) for step in generate(target, [prompt], params, generator))
    return generate_speculative(target, draft, prompt, params, gamma, generator)


def run_once(names: tuple, dtype: torch.dtype, device: str, prompt: list[int], params: SamplingParams, gamma: int):
    """Load what it takes and generate one text, for its memory."""
    target = load_model(names[0], dtype, device)
    draft = load_model(names[1], dtype, device) if gamma else None
    list(passes(target, draft, prompt, params, gamma))


def check(target: Model, draft: Model, prompt: list[int], params: SamplingParams, gammas: list[int]) -> None:
    """Exit unless all modes have the same greedy tokens (float32) or the cache gives close logits (half precision)."""
    texts = [[token for item in passes(target, draft, prompt, params, g) for token in item.tokens] for g in gammas]
    if target.dtype == torch.float32 and any(text != texts[0] for text in texts):
        sys.exit("speculation does not generate the target's text: no timing of wrong results")
    if target.dtype != torch.float32:
        tokens = torch.tensor([prompt + texts[0]], device=target.device)
        common.check_half_precision(target, tokens, piece=max(gammas) + 1)


def measure(args, device: str, results: common.ResultsFile) -> None:
    """Time all modes for each dtype, length, temperature, repeat and prompt. Raises UserError for bad options."""
    if random := [name for name in (args.target, args.draft) if parse_name(name).kind == "random"]:
        raise UserError(f"{random[0]}: a random model agrees with no other, so speculation says nothing; train a pair")
    least = 2 * (max(args.gamma) + 1)
    if min(args.max_new_tokens) < least:
        raise UserError(f"--max-new-tokens {min(args.max_new_tokens)}: two passes may make {least}; give at least that")
    gammas, dtypes = [0, *args.gamma], [pick_dtype(name, device) for name in args.dtype]
    settings = [SamplingParams(ignore_eos=True, temperature=temperature) for temperature in args.temperature]
    for dtype in dtypes:
        target, draft = (load_model(name, dtype, device) for name in (args.target, args.draft))
        encoding = load_encoding(args.target, target.config.vocab_size)
        prompts = [encoding.encode(text) for text in PROMPTS[: args.prompts]]
        longest = max(args.max_new_tokens) + max(len(prompt) for prompt in prompts)
        if longest > target.config.block_size:
            raise UserError(f"{longest} tokens do not fit the target's window of {target.config.block_size}")
        about, peak = common.describe(args.target, target, device, args.draft), common.bandwidth(device, dtype)
        for length in args.max_new_tokens:
            greedy = SamplingParams(max_new_tokens=length, ignore_eos=True)
            for prompt in prompts:
                check(target, draft, prompt, greedy, gammas)
            alone = (run_once, (args.target, args.draft), dtype, device, prompts[0], greedy)
            memory = {gamma: common.in_own_process(device, [], *alone, gamma) / 1e6 for gamma in gammas}
            for params in [dataclasses.replace(setting, max_new_tokens=length) for setting in settings]:
                for gamma in gammas:
                    list(passes(target, draft, prompts[0], params, gamma))  # to warm up
                runs = itertools.product(range(args.repeats), enumerate(prompts), gammas)
                for repeat, (number, prompt), gamma in runs:
                    generator = torch.Generator(device).manual_seed(len(PROMPTS) * repeat + number)
                    items, first, rest = common.timed(passes(target, draft, prompt, params, gamma, generator), device)
                    skip = len(items[0].tokens)
                    speeds = common.speeds(target, [prompt], length, first, rest, peak, skip)
                    results.write(
                        **about | speeds | (speculation(items) if gamma else {}),
                        mode=f"gamma {gamma}" if gamma else "target",
                        temperature=params.temperature,
                        prompt=number,
                        repeat=repeat,
                        peak_memory_mb=memory[gamma],
                    )


def speculation(items: list[Pass]) -> dict:
    """The columns about drafts. The roofline is that of the target alone."""
    drafts, accepted = sum(len(item.drafts) for item in items), sum(item.accepted for item in items)
    return {
        "roofline_share": None,
        "acceptance": accepted / drafts if drafts else None,
        "tokens_per_pass": sum(len(item.tokens) for item in items) / len(items),
    }


def plot(summary):
    """Speed-up over the cached target by gamma, a line for each setting, with bars from the smallest to the largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    drafted = summary[summary["mode"] != "target"]
    gammas = drafted["mode"].str.removeprefix("gamma ").astype(int)
    lines = drafted.groupby(["dtype", "new_tokens", "temperature"], sort=False)
    for index, (setting, rows) in enumerate(lines):
        median, low, high = (rows[f"speedup_{name}"] for name in ("median", "min", "max"))
        beside = gammas[rows.index] + 0.03 * (index - (len(lines) - 1) / 2)  # so that bars do not cover each other
        label = "{}, {} tokens, temperature {}".format(*setting)
        axes.errorbar(beside, median, yerr=[median - low, high - median], marker="o", capsize=3, label=label)
    axes.axhline(1, color="grey", linestyle="--", label="the target alone, with its cache")
    axes.set_xticks(sorted(set(gammas)))
    axes.set(
        xlabel="gamma: drafts for each pass of the target", ylabel="decode rate / that of the target", ylim=(0, None)
    )
    names = textwrap.fill("{} drafted by {}".format(*summary.loc[0, ["model", "draft"]]), 90)
    axes.set_title(f"Speculative decoding: median, min and max of paired ratios\n{names}", fontsize="medium")
    axes.legend(fontsize="small", loc="lower left")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Time speculative decoding against its cached target, on beginnings of stories.")
    gamma, prompts = common.whole_number(1, 16), common.whole_number(1, len(PROMPTS))
    parser.add_argument("--gamma", type=gamma, **common.LIST, default=[2, 3, 4], help="drafts a pass, 1 to 16")
    parser.add_argument("--temperature", type=float, **common.LIST, default=[0.0, 0.8], help="0: greedy")
    parser.add_argument("--target", default=STORIES, help="directory, gpt2[-medium|-large|-xl]")
    parser.add_argument("--draft", default=STORIES.with_name("stories-draft"), help="a smaller one, same vocabulary")
    parser.add_argument("--prompts", type=prompts, default=len(PROMPTS), help="how many, 1 to %(default)s")
    common.add_options(parser, "speculative_cpu.csv", lengths=[200], repeats=2)
    common.run_benchmark(parser, measure, "target", plot, argv)


if __name__ == "__main__":
    main()
