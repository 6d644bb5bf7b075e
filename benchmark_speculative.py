"""How much faster is speculation than its cached target alone? python benchmark_speculative.py --gamma 2 3 4."""

import dataclasses
import itertools
from pathlib import Path

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
    timed,
)
from infer import STORIES, Parser, SamplingParams, generate, pick_dtype
from infer_speculative import generate_speculative
from model import GPT
from tokenizer import load_encoding

PROMPTS = (
    "Once upon a time",
    "One day, a little boy named Tim",
    "Lily and her mom went to the park.",
    "The big dog was sad because",
    "Sara had a red ball. She liked to",
    "There was a bird who wanted to fly.",
)


def steps(target: GPT, draft: GPT, prompt: list[int], params: SamplingParams, gamma: int, generator):
    """Lists of new tokens: one token each by the target alone where gamma is 0, else one list for each pass."""
    if gamma == 0:
        return ([token] for (token,) in generate(target, [prompt], params, generator))
    return generate_speculative(target, draft, prompt, params, gamma, generator)


def run_once(names: tuple, dtype: torch.dtype, device: str, prompt: list[int], params: SamplingParams, gamma: int):
    """One run from nothing, for its memory."""
    target = GPT.from_pretrained(names[0], dtype, device)
    draft = GPT.from_pretrained(names[1], dtype, device) if gamma else None
    list(steps(target, draft, prompt, params, gamma, torch.Generator(device)))


def measure(args, device: str, rows: Rows) -> None:
    """Run all modes for each dtype, length, temperature, prompt and repeat. Raises ValueError for bad options."""
    for name in (args.target, args.draft):
        if str(name).startswith("random:"):
            raise ValueError(f"{name}: random models do not agree, so speculation with them says nothing; train a pair")
    if bad := [gamma for gamma in args.gamma if not 1 <= gamma <= 16]:
        raise ValueError(f"--gamma {bad[0]}: it must be an integer from 1 to 16")
    if min(args.max_new_tokens) < 2 * (max(args.gamma) + 1):
        raise ValueError(f"--max-new-tokens {min(args.max_new_tokens)}: too few to time, two passes may make as many")
    greedy = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in args.max_new_tokens]
    samplings = [[dataclasses.replace(params, temperature=value) for value in args.temperature] for params in greedy]
    modes = {"target": 0} | {f"gamma {gamma}": gamma for gamma in args.gamma}
    for dtype in [pick_dtype(name, device) for name in args.dtype]:
        target, draft = (GPT.from_pretrained(name, dtype, device) for name in (args.target, args.draft))
        encoding = load_encoding(args.target, target.config.vocab_size)
        prompts = [encoding.encode(text) for text in PROMPTS[: args.prompts]]
        longest = max(args.max_new_tokens) + max(len(prompt) for prompt in prompts)
        if longest > target.config.block_size:
            raise ValueError(f"{longest} tokens do not fit the target's window, {target.config.block_size}")
        about = describe(args.target, target, device) | {"draft": Path(args.draft).name}
        peak = bandwidth(device, dtype)
        memory = {}
        for params in greedy:
            check(target, draft, prompts, params, modes)
            for mode, gamma in modes.items():
                run = (run_once, (args.target, args.draft), dtype, device, prompts[0], params, gamma)
                memory[params.max_new_tokens, mode] = in_own_process(device, [], *run) / 1e6
        for params in itertools.chain(*samplings):
            length = params.max_new_tokens
            for gamma in modes.values():
                list(steps(target, draft, prompts[0], params, gamma, None))  # to warm up
            for repeat, (number, prompt) in itertools.product(range(args.repeats), enumerate(prompts)):
                for mode, gamma in modes.items():
                    generator = torch.Generator(device).manual_seed(1000 * repeat + number)
                    items, first, rest = timed(steps(target, draft, prompt, params, gamma, generator), device)
                    at_first = len(items[0].tokens) if gamma else 1
                    share = roofline_share(target, 1, len(prompt), length, rest, peak)
                    rows.write(
                        **about | (speculation(items) if gamma else {"roofline_share": share}),
                        mode=mode,
                        batch_size=1,
                        prompt_tokens=len(prompt),
                        new_tokens=length,
                        temperature=params.temperature,
                        prompt=number,
                        repeat=repeat,
                        first_token_s=first,
                        decode_tokens_per_s=(length - at_first) / rest,
                        peak_memory_mb=memory[length, mode],
                    )


def speculation(passes: list) -> dict:
    """The columns about drafts."""
    drafts, accepted = sum(len(step.drafts) for step in passes), sum(step.accepted for step in passes)
    return {
        "acceptance": accepted / max(drafts, 1),
        "tokens_per_pass": sum(len(step.tokens) for step in passes) / len(passes),
    }


def check(target: GPT, draft: GPT, prompts: list[list[int]], params: SamplingParams, modes: dict) -> None:
    """Before timing: in float32 the same greedy tokens in all modes, in half precision logits that are close."""
    for prompt in prompts:
        texts = {}
        for mode, gamma in modes.items():
            lists = steps(target, draft, prompt, params, gamma, None)
            texts[mode] = [token for item in lists for token in (item.tokens if gamma else item)]
        if target.wte.weight.dtype == torch.float32:
            for mode, text in texts.items():
                if text != texts["target"]:
                    raise SystemExit(f"{mode}: not the target's text; no timing of wrong results")
        else:
            text = (prompt + texts["target"])[: target.config.block_size]
            check_half_precision(target, torch.tensor([text], device=target.wte.weight.device))


def plot(summary):
    """Speed-up over the cached target by gamma, a line for each setting, from the smallest ratio to the largest."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drafted = summary[summary["mode"] != "target"]
    gammas = drafted["mode"].str.removeprefix("gamma ").astype(int)
    for setting, group in drafted.groupby(["model", "dtype", "new_tokens", "temperature"], sort=False):
        gamma = gammas[group.index]
        median, low, high = (group[f"speedup_{name}"] for name in ("median", "min", "max"))
        label = "{}, {}, {} tokens, temperature {}".format(*setting)
        axes.errorbar(gamma, median, yerr=[median - low, high - median], marker="o", capsize=3, label=label)
    axes.axhline(1, color="grey", linestyle="--", label="the cached target alone")
    axes.set_xticks(sorted(set(gammas)))
    axes.set(xlabel="gamma, drafts a pass", ylabel="tokens/s, times those of the target alone", ylim=(0, None))
    axes.set_title("Speculative decoding: median of paired ratios, min to max")
    axes.legend(fontsize="small", loc="lower left")
    return figure


def main(argv=None) -> None:
    parser = Parser(description="Time speculative decoding against its cached target; text of children's stories.")
    parser.add_argument("--gamma", type=int, nargs="+", default=[2, 3, 4], help="1 to 16; default: 2 3 4")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="default: 0 0.8")
    parser.add_argument("--target", default=STORIES, help="directory or name as of infer.py; default: stories")
    draft = STORIES.with_name("stories-draft")
    parser.add_argument("--draft", default=draft, help="of the same vocabulary; default: stories-draft")
    parser.add_argument("--prompts", type=int, default=6, choices=range(1, 7), help="how many prompts; default: 6")
    add_options(parser, "speculative_cpu.csv", lengths=[200])
    parser.set_defaults(repeats=2)
    run_and_report(parser, argv, measure, "target", plot)


if __name__ == "__main__":
    main()
