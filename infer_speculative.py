"""Speculative decoding, one model drafts and another verifies: python infer_speculative.py --prompt "One day"."""

import argparse
import codecs
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from infer import (
    STORIES,
    Decoder,
    Parser,
    SamplingParams,
    add_sampling_options,
    penalize,
    pick_device,
    pick_dtype,
    sampling_params,
    sampling_probs,
    seeded_generator,
    window_start,
)
from model import GPT
from tokenizer import load_encoding


class Pass(NamedTuple):
    """What one pass of the target gave."""

    tokens: list[int]  # added to the text: accepted drafts, then one token of the target's; nothing after an EOS
    drafts: list[int]  # proposed by the draft model
    accepted: int  # how many of them the target accepted, also where the text ends before the last of these


@torch.inference_mode()
def generate_speculative(
    target: GPT,
    draft: GPT,
    prompt: list[int],
    params: SamplingParams,
    gamma: int = 3,
    generator: torch.Generator | None = None,
    stride: int | None = None,
) -> Iterator[Pass]:
    """Continue a prompt as `infer.generate` does with the target alone: the same text if greedy, else the same
    distribution, but for rounding. The draft model proposes up to gamma tokens, the target judges them in one pass.

    generator, stride: as in `infer.generate`; the draft model's window moves by half of its block_size.
    Yields passes, of `params.max_new_tokens` tokens in all at most. Raises ValueError if gamma is not in 1..16, the
    models differ in vocabulary, stride is out of range, or logits are not finite.
    Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318).
    """
    if not 1 <= gamma <= 16:
        raise ValueError(f"gamma is {gamma}; it must be an integer from 1 to 16")
    vocab_size, eos, block_size = target.config.vocab_size, target.config.eos_token_id, target.config.block_size
    if (draft.config.vocab_size, draft.config.eos_token_id) != (vocab_size, eos):
        theirs = f"{draft.config.vocab_size} tokens, EOS {draft.config.eos_token_id}"
        raise ValueError(
            f"one vocabulary is needed: the target's has {vocab_size} tokens, EOS {eos}; the draft's {theirs}"
        )
    text = list(prompt) or [eos]
    end = len(text) + params.max_new_tokens
    verifier, drafter = Decoder(target, 1, end - 1, stride=stride), Decoder(draft, 1, end - 1)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=target.wte.weight.device)
    in_prompt = counts > 0
    in_prompt[text] = True
    while len(text) < end:
        # All positions of a pass have the target's window in common, so that no draft goes beyond its next hop.
        room = window_start(len(text), block_size, verifier.stride) + block_size - len(text)
        drafts, draft_probs = [], []
        for _ in range(min(gamma, room, end - len(text) - 1)):
            logits = penalize_drafted(drafter.logits([text + drafts]), params, counts, in_prompt, drafts)
            if params.temperature == 0:
                drafts.append(logits.argmax().item())
            else:
                draft_probs.append(sampling_probs(logits, params))
                drafts.append(torch.multinomial(draft_probs[-1], 1, generator=generator).item())
        logits = verifier.logits([text + drafts], keep=len(drafts) + 1)  # (len(drafts) + 1, vocab_size)
        logits = penalize_drafted(logits, params, counts, in_prompt, drafts)
        if params.temperature == 0:
            best = logits.argmax(dim=-1).tolist()
            accepted = first_false([token == choice for token, choice in zip(drafts, best)])
            token = best[accepted]
        else:
            q = torch.cat(draft_probs) if drafts else logits[:0]
            accepted, token = verify(sampling_probs(logits, params), q, drafts, generator)
        tokens = drafts[:accepted] + [token]
        ended = eos in tokens and not params.ignore_eos
        if ended:
            tokens = tokens[: tokens.index(eos) + 1]
        # Refused drafts leave each cache when it sees the text again: Decoder.logits truncates it to that length. (A
        # pass without drafts does not call the drafter, but then the drafts that its cache holds were accepted.)
        text += tokens
        counts += torch.bincount(torch.tensor(tokens, device=counts.device), minlength=vocab_size)
        yield Pass(tokens, drafts, accepted)
        if ended:
            return


def penalize_drafted(logits, params: SamplingParams, counts, in_prompt, drafts: list[int]) -> torch.Tensor:
    """Penalties for the last len(logits) positions of a text with drafts, each of which counts the drafts before it.

    logits: (n, vocab_size), n <= len(drafts) + 1. counts, in_prompt: (vocab_size,), without the drafts.
    """
    if drafts and (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
        drafted = torch.nn.functional.one_hot(torch.tensor(drafts, device=counts.device), len(counts)).cumsum(0)
        counts = torch.cat([counts[None], counts + drafted])[-len(logits) :]  # (n, vocab_size)
    return penalize(logits, params, counts, in_prompt)


def verify(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Accept drafts from the left as long as chance allows, and draw one token to follow: (accepted, token).

    p: (n + 1, vocab_size), the target's distributions at the n drafts and after the last of them. q: (n, vocab_size),
    those that the drafts were drawn from. The n + 1 tokens at most that result are distributed as draws from p.
    """
    chosen = torch.tensor(drafts, dtype=torch.int64, device=p.device)[:, None]  # (n, 1)
    chance = acceptance(p[: len(drafts)].gather(1, chosen), q.gather(1, chosen))
    uniform = torch.rand(len(drafts), 1, generator=generator, device=p.device)
    accepted = first_false((uniform < chance)[:, 0].tolist())
    last = p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted])
    return accepted, torch.multinomial(last, 1, generator=generator).item()


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chance min(1, p / q) to accept a token that has probability p in the target and q > 0 in the draft model."""
    return (p / q).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What to draw from after a refusal: max(p - q, 0), normalised. p, q: (..., vocab_size) distributions.

    Where nothing is left, which takes p <= q everywhere and so p = q but for rounding, it is p itself.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def first_false(flags: list[bool]) -> int:
    """The index of the first False, or the length."""
    return flags.index(False) if False in flags else len(flags)


COLOURS = {"draft": "\033[32m", "target": "\033[35m", "off": "\033[0m"}  # green, magenta


def main(argv=None) -> None:
    parser = Parser(
        description="Generate text with two GPT-2s, of which one drafts and the other verifies.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prompt", default="", help="text to continue; empty: a new text")
    parser.add_argument("--target", default=STORIES, help="whose text it is: directory, gpt2[-medium|-large|-xl]")
    parser.add_argument("--draft", default=STORIES.with_name("stories-draft"), help="a smaller one, same vocabulary")
    parser.add_argument("--gamma", type=int, default=3, help="how many tokens to draft for a pass; 1 to 16")
    parser.add_argument("--show", action="store_true", help="accepted drafts in green, the target's tokens in magenta")
    add_sampling_options(parser)
    args = parser.parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr. Raises ValueError for bad input."""
    params = sampling_params(args)
    device = pick_device(args.device)
    generator, seed = seeded_generator(args.seed, device)
    dtype = pick_dtype(args.dtype, device)
    target, draft = (GPT.from_pretrained(name, dtype, device) for name in (args.target, args.draft))
    encoding = load_encoding(args.target, target.config.vocab_size)
    prompt = encoding.encode(args.prompt, allowed_special="all")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds a character back until its last byte is there
    colours = COLOURS if args.show and sys.stdout.isatty() else dict.fromkeys(COLOURS, "")
    passes, times, shown = [], [time.perf_counter()], args.prompt
    for step in generate_speculative(target, draft, prompt, params, args.gamma, generator, args.stride):
        times.append(time.perf_counter())
        passes.append(step)
        for index, token in enumerate(step.tokens):
            if token != target.config.eos_token_id or params.ignore_eos:
                text = decoder.decode(encoding.decode_single_token_bytes(token))
                shown += colours["draft" if index < step.accepted else "target"] + text + colours["off"]
        print(shown, end="", flush=True)
        shown = ""
    print(shown + decoder.decode(b"", final=True))
    if passes:
        print(report(passes, times) + f", seed {seed}", file=sys.stderr)


def report(passes: list[Pass], times: list[float]) -> str:
    """Speed and acceptance of a run. times: seconds, at the start and after each pass."""
    tokens, drafts = sum(len(step.tokens) for step in passes), sum(len(step.drafts) for step in passes)
    accepted = [step.accepted for step in passes]
    histogram = ", ".join(f"{count}: {accepted.count(count)}" for count in range(max(accepted) + 1))
    return (
        f"{sum(accepted)} of {drafts} drafts accepted ({sum(accepted) / max(drafts, 1):.0%}),"
        f" {tokens / len(passes):.2f} tokens a target pass\n"
        f"passes by accepted drafts: {histogram}\n"
        f"{tokens} tokens, {tokens / (times[-1] - times[0]):.1f} tokens/s, the first after {times[1] - times[0]:.3f} s"
    )


if __name__ == "__main__":
    main()
