"""Speculative decoding, one model drafts and another verifies: python infer_speculative.py --prompt "One day"."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from cache import KVCache, check_stride, window_start
from engine.drafter import check_vocabularies, lookup
from infer import (
    STORIES,
    Output,
    Parser,
    add_options,
    load_models,
    next_logits,
    pick_device,
    read_prompts,
    run_script,
    sampling_params,
    seeded_generator,
)
from model import Model
from sampling import SamplingParams, check_limits, penalize, sampling_probs
from tokenizer import load_encoding


class Pass(NamedTuple):
    """What one pass of the target gave."""

    tokens: list[int]  # added to the text: accepted drafts, then one token of the target's; nothing after an EOS
    drafts: list[int]  # proposed by the drafter
    accepted: int  # how many of them the target accepted, also where the text ends before the last of these


@torch.inference_mode()
def generate_speculative(
    target: Model,
    draft: Model | Callable[..., tuple[list[int], torch.Tensor]],
    prompt: list[int],
    params: SamplingParams,
    gamma: int = 3,
    generator: torch.Generator | None = None,
    stride: int | None = None,
) -> Iterator[Pass]:
    """Continue a prompt as `infer.generate` does with the target alone: the same text if greedy, else the same
    distribution, but for rounding. The drafter proposes up to gamma tokens, the target judges them in one pass.

    draft: a model, or a function that proposes, such as `propose_lookup`, with the arguments and results of
    `ModelDrafter.propose`.
    generator, stride: as in `infer.generate`, but params.seed is not used; the draft model's window moves by half of
    its own block_size.
    Yields passes, of `params.max_new_tokens` tokens in all at most.
    Raises UserError if gamma is not in 1..16, the models differ in vocabulary, or as `infer.generate` does.
    """
    check_limits(gamma=gamma)
    if isinstance(draft, Model):
        check_vocabularies(target.config, draft.config)
    config = target.config
    stride = check_stride(stride, config.block_size)
    sequence = list(prompt) or [config.bos_token_id]
    end = len(sequence) + params.max_new_tokens
    cache = KVCache(target, 1, min(end - 1, config.block_size))
    propose = ModelDrafter(draft, end - 1, params, generator).propose if isinstance(draft, Model) else draft
    counts = torch.zeros(config.vocab_size, dtype=torch.int64, device=target.device)
    in_prompt = counts > 0
    in_prompt[sequence] = True
    while len(sequence) < end:
        start = window_start(len(sequence), config.block_size, stride)
        room = start + config.block_size - len(sequence)  # all positions of a pass see this window: none crosses a hop
        drafts, q = propose(sequence, min(gamma, room, end - len(sequence) - 1), counts, in_prompt)
        # No cache is rolled back here: `match` forgets refused drafts when it meets the next window.
        logits = next_logits(target, [sequence[start:] + drafts], cache, keep=len(drafts) + 1)[0]
        logits = penalize_drafted(logits, params, counts, in_prompt, drafts)  # (len(drafts) + 1, vocab_size)
        accepted, token = verify(sampling_probs(logits, params), q, drafts, generator)
        tokens = drafts[:accepted] + [token]
        stays = [token not in config.eos_token_ids or params.ignore_eos for token in tokens]
        tokens = tokens[: first_false(stays) + 1]
        sequence += tokens
        counts += torch.bincount(torch.tensor(tokens, device=counts.device), minlength=config.vocab_size)
        yield Pass(tokens, drafts, accepted)
        if not all(stays):
            return


class ModelDrafter:
    """A model that drafts for one text, of at most max_len tokens when it drafts, with a cache of its own."""

    def __init__(self, model: Model, max_len: int, params: SamplingParams, generator: torch.Generator | None = None):
        self.model, self.params, self.generator = model, params, generator
        self.block_size = model.config.block_size
        self.stride = check_stride(None, self.block_size)
        self.cache = KVCache(model, 1, min(max_len, self.block_size))

    def propose(
        self, sequence: list[int], count: int, counts: torch.Tensor, in_prompt: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """Up to count drafts to follow the text, and q, (drafts, vocab_size): what each of them was drawn from.

        counts, in_prompt: (vocab_size,), of the text, for penalties.
        """
        drafts, q = [], torch.empty(count, len(counts), device=counts.device)
        for index in range(count):
            text = sequence + drafts
            window = text[window_start(len(text), self.block_size, self.stride) :]
            logits = next_logits(self.model, [window], self.cache)[0]
            logits = penalize_drafted(logits, self.params, counts, in_prompt, drafts)[0]  # (vocab_size,)
            q[index] = sampling_probs(logits, self.params)
            greedy = self.params.temperature == 0  # then the draw is known, and looking it up is faster
            drawn = logits.argmax() if greedy else torch.multinomial(q[index], 1, generator=self.generator)
            drafts.append(drawn.item())
        return drafts, q


def propose_lookup(sequence: list[int], count: int, counts: torch.Tensor, in_prompt) -> tuple[list[int], torch.Tensor]:
    """Drafts from the text itself, by `lookup`; arguments and results are those of `ModelDrafter.propose`.

    Nothing is drawn: all of q is on the draft. Saxena 2023, "Prompt Lookup Decoding".
    """
    drafts = lookup(sequence, count)
    chosen = torch.tensor(drafts, dtype=torch.int64, device=counts.device)
    return drafts, torch.nn.functional.one_hot(chosen, len(counts)).float()


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
    those that the drafts were drawn from. The tokens that result, n + 1 at most, are distributed as draws from p.
    Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318).
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

    It is p itself where nothing is left. Then p = q, and a refusal can only come from rounding.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def first_false(flags: list[bool]) -> int:
    """The index of the first False, or the length."""
    return flags.index(False) if False in flags else len(flags)


class DraftOutput(Output):
    """The output of passes. colours: accepted drafts in green, the target's own tokens in magenta."""

    def __init__(self, *args, colours: bool):
        super().__init__(*args)
        self.passes, self.colours = [], colours

    def add_pass(self, row: int, step: Pass) -> None:
        """Put the tokens of a pass at the end of a row's text, and end the step."""
        self.passes.append(step)
        for index, token in enumerate(step.tokens):
            text = self.texts[row]
            self.add(row, token)
            if self.colours and (new := self.texts[row].removeprefix(text)):
                self.texts[row] = text + ("\033[32m" if index < step.accepted else "\033[35m") + new + "\033[0m"
        self.end_step()

    def statistics(self) -> str:
        """Acceptance, then the speed of the run."""
        drafts, accepted = sum(len(step.drafts) for step in self.passes), [step.accepted for step in self.passes]
        histogram = ", ".join(f"{count}: {accepted.count(count)}" for count in range(max(accepted) + 1))
        return (
            f"{sum(accepted)} of {drafts} drafts accepted ({sum(accepted) / max(drafts, 1):.0%}),"
            f" {self.count / len(self.passes):.2f} tokens a target pass\n"
            f"passes by accepted drafts: {histogram}\n{super().statistics()}"
        )


def main(argv=None) -> None:
    parser = Parser(description="Generate text with two models, of which one drafts and the other verifies.")
    parser.add_argument("--target", default=STORIES, help="whose text it is: directory, ORG/NAME of the hub, gpt2, ...")
    draft_help = "a smaller one, same vocabulary; lookup: none, drafts are copied from the text before"
    parser.add_argument("--draft", default=STORIES.with_name("stories-draft"), help=draft_help)
    parser.add_argument("--gamma", type=int, default=3, help="how many tokens to draft for a pass; 1 to 16")
    parser.add_argument("--show", action="store_true", help="accepted drafts in green, the target's tokens in magenta")
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr. Raises UserError for bad input."""
    params, prompts = sampling_params(args), read_prompts(args)
    device = pick_device(args.device)
    generator = seeded_generator(args.seed, device)
    target, *drafts = load_models([args.target] + [args.draft] * (args.draft != "lookup"), args, device)
    draft = drafts[0] if drafts else propose_lookup
    encoding = load_encoding(args.target, target.config.vocab_size)
    skip = () if params.ignore_eos else target.config.eos_token_ids
    seed = generator.initial_seed() if params.temperature else None
    with DraftOutput(prompts, encoding, skip, seed, colours=args.show and sys.stdout.isatty()) as output:
        for row, prompt in enumerate(prompts):
            tokens = encoding.encode(prompt, allowed_special="all")
            for step in generate_speculative(target, draft, tokens, params, args.gamma, generator, args.stride):
                output.add_pass(row, step)


if __name__ == "__main__":
    main()
