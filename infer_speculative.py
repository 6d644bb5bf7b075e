"""Speculative decoding: python infer_speculative.py --prompt "One day"."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from cache import ContextWindow, KVCache
from command_line.models import load_head, load_models, names_draft_head, pick_device
from command_line.options import (
    CACHE_DTYPES,
    MODEL_HELP,
    STORIES,
    add_constraint_options,
    add_options,
    add_sampling_options,
    pick_seed,
    read_prompts,
    sampling_params,
)
from command_line.output import (
    OutputWriter,
    warn_dropped_bytes,
    warn_long_prompts,
    warn_truncated_outputs,
)
from command_line.parser import Parser, run_script
from constraints.compiler import make_matcher
from constraints.matcher import Matcher
from draft_head import DraftHead
from drafts import GAMMA_LIMITS, check_vocabularies, prompt_lookup
from errors import UserError, check_limits
from infer import next_logits, next_output
from loading.load import resolve_source
from model import Model
from sampling import (
    SamplingParams,
    Sequence,
    all_stop_token_ids,
    apply_logits_processors,
    apply_token_mask,
    check_engine_only_params,
    sampling_probs,
)
from text.tokenizer import Encoding, load_encoding


class SpeculativeStep(NamedTuple):
    """Output of one target pass."""

    # New tokens: accepted drafts, then one sampled from the target; cut after EOS or a stop token.
    tokens: list[int]
    drafts: list[int]  # proposed draft tokens
    # Number of drafts that the target accepted; `tokens` may have fewer if one ends the sequence.
    accepted: int


@torch.inference_mode()
def generate_speculative(
    target: Model,
    draft: Model | Callable[..., tuple[list[int], torch.Tensor | None]],
    prompt: list[int],
    params: SamplingParams,
    gamma: int = 3,
    generator: torch.Generator | None = None,
    stride: int | None = None,
    cache_dtype: torch.dtype | None = None,
    encoding: Encoding | None = None,
) -> Iterator[SpeculativeStep]:
    """Continue a prompt by speculative decoding, as `infer.generate` does with the target alone.

    Greedy output is equal and sampled output has the same distribution, up to rounding.
    The drafter proposes up to gamma tokens, 1 to 16, and the target verifies them in one pass.
    draft: a model, a draft head, or a function with the signature of `ModelDrafter.propose`, such
    as `propose_prompt_lookup`. generator, stride, cache_dtype, encoding: as in `infer.generate`,
    but params.seed is not used. The draft model's context shifts by half of its own block_size, and
    its cache has cache_dtype too. Yields one step per target pass, with at most
    `params.max_new_tokens` tokens in all. Raises UserError if gamma is out of range or the
    vocabularies differ, and as `infer.generate` does.
    """
    check_limits(GAMMA_LIMITS, gamma=gamma)
    check_engine_only_params([params])
    config = target.config
    sequence = Sequence.from_prompt(prompt, params, config)
    matcher = make_matcher(params, encoding, config)
    context_window = ContextWindow(config.block_size, stride)
    end = sequence.max_length
    cache = KVCache(target, 1, min(end - 1, config.block_size), cache_dtype)
    propose = draft
    if isinstance(draft, Model):
        check_vocabularies(config, draft.config)
        draft_matcher = make_matcher(params, encoding, config)
        drafter_class = HeadDrafter if isinstance(draft, DraftHead) else ModelDrafter
        drafter = drafter_class(draft, end - 1, generator, cache_dtype, draft_matcher)
        propose = drafter.propose
    while len(sequence.tokens) < end:
        start = context_window.start(len(sequence.tokens))
        # No pass crosses a context shift: all its positions share this window.
        window_left = start + config.block_size - len(sequence.tokens)
        count = min(gamma, window_left, end - len(sequence.tokens) - 1)
        drafts, q = propose(sequence, count)
        # The cache needs no rollback: `truncate_to_prefix` drops rejected drafts in the next pass.
        window = sequence.tokens[start:] + drafts
        logits, hidden = (each[0] for each in next_output(target, [window], cache, len(drafts) + 1))
        drafted = [sequence.with_drafts(drafts[:index]) for index in range(len(drafts) + 1)]
        logits = apply_logits_processors(logits, drafted)
        dead_ends = []  # lengths of draft prefixes after which no token is allowed
        if matcher:
            masks = [matcher.token_mask(each.output) for each in drafted]
            dead_ends = [index for index, mask in enumerate(masks) if not mask.any()]
            logits = apply_token_mask(logits, [mask if mask.any() else None for mask in masks])
        if q is None:
            draft_ids = torch.tensor(drafts, dtype=torch.int64, device=logits.device)
            q = torch.zeros_like(logits[:-1]).scatter_(1, draft_ids[:, None], 1.0)
        accepted, token = verify(sampling_probs(logits, params), q, drafts, generator)
        if dead_ends and dead_ends[0] <= accepted:
            matcher.checked_token_mask(drafted[dead_ends[0]].output)
        tokens = drafts[:accepted] + [token]
        if isinstance(draft, DraftHead):
            drafter.observe(tokens, hidden[: len(tokens)])
        continues = [token not in sequence.all_stop_token_ids for token in tokens]
        tokens = tokens[: first_false(continues) + 1]
        sequence.tokens += tokens
        yield SpeculativeStep(tokens, drafts, accepted)
        if not all(continues):
            return


class ModelDrafter:
    """A draft model for one sequence, with its own KV cache.

    max_len: maximum sequence length when drafting, in tokens.
    """

    def __init__(
        self,
        model: Model,
        max_len: int,
        generator: torch.Generator | None = None,
        cache_dtype: torch.dtype | None = None,
        matcher: Matcher | None = None,
    ):
        self.model = model
        self.matcher = matcher
        self.generator = generator
        self.context_window = ContextWindow(model.config.block_size)
        self.cache = KVCache(model, 1, min(max_len, model.config.block_size), cache_dtype)

    def propose(self, sequence: Sequence, count: int) -> tuple[list[int], torch.Tensor | None]:
        """Return up to `count` drafts and q, the distribution that each was sampled from.

        q: (drafts, vocab_size), or None at temperature 0, where it is one-hot.
        """
        drafts = []
        q = None
        if sequence.params.temperature > 0:
            q = torch.empty(count, self.model.config.vocab_size, device=self.model.device)
        for index in range(count):
            drafted = sequence.with_drafts(drafts)
            logits = apply_logits_processors(self.logits(drafted), [drafted])
            if self.matcher:
                logits = apply_token_mask(logits, [self.matcher.token_mask(drafted.output)])
            logits = logits[0]  # (vocab_size,)
            if logits.max() == -torch.inf:
                break  # no error: the target may reject an earlier draft, or allow other tokens
            if q is None:
                drawn = logits.argmax()
            else:
                q[index] = sampling_probs(logits, sequence.params)
                drawn = draw(q[index], self.generator)
            drafts.append(drawn.item())
        return drafts, None if q is None else q[: len(drafts)]

    def logits(self, drafted: Sequence) -> torch.Tensor:
        """Return the logits after a sequence and its drafts so far, (1, vocab_size)."""
        return next_logits(self.model, [self.context_window.crop(drafted.tokens)], self.cache)[0]


class HeadDrafter(ModelDrafter):
    """A draft head for one sequence; arguments as in ModelDrafter.

    Its cache begins at the first observed hidden state, because a prefill returns only the state of
    its last position. Context shifts do not move it. When it is full, it begins again.
    """

    def __init__(self, head: DraftHead, *arguments):
        super().__init__(head, *arguments)
        self.tokens = []  # observed, not cached yet
        self.states = None  # that chose each of them, (n, C)

    def observe(self, tokens: list[int], states: torch.Tensor) -> None:
        """Observe new tokens of the sequence, and the target's states that chose them, (n, C)."""
        self.states = torch.cat([self.states, states]) if self.tokens else states
        self.tokens += tokens

    def propose(self, sequence: Sequence, count: int) -> tuple[list[int], torch.Tensor | None]:
        max_len = self.cache.storage.shape[4]
        # There is no state before the first pass.
        count = min(count, max_len - 1) if self.tokens else 0
        known = len(self.cache.tokens[0]) + len(self.tokens)
        if known + count > max_len:
            self.cache.tokens = [[]]
            self.tokens = self.tokens[count - max_len :]
            self.states = self.states[count - max_len :]
            known = len(self.tokens)
        drafts, q = super().propose(sequence, count)
        del self.cache.tokens[0][known:]  # the states that chose drafts are the head's own
        return drafts, q

    def logits(self, drafted: Sequence) -> torch.Tensor:
        spans = self.cache.spans([self.tokens or drafted.tokens[-1:]])
        output = self.model.runner.forward(self.model, self.cache, spans, self.states)
        if not output.hidden.isfinite().all():
            raise UserError("the draft head returned values that are NaN or infinite")
        self.cache.commit()
        self.tokens = []
        self.states = output.hidden
        return output.logits


def propose_prompt_lookup(sequence: Sequence, count: int) -> tuple[list[int], None]:
    """Return drafts by `prompt_lookup`, and None for q; arguments as in `ModelDrafter.propose`.

    The drafts are deterministic, so q is one-hot. After Saxena 2023, "Prompt Lookup Decoding".
    """
    return prompt_lookup(sequence.tokens, count), None


def verify(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Accept a prefix of the drafts by rejection sampling, and sample the token after it.

    p: (n + 1, vocab_size), the target's distributions at the n drafts and after the last one.
    q: (n, vocab_size), the draft distributions. Returns the number of accepted drafts, and the
    token. Together, at most n + 1 tokens, they are distributed as samples from p.
    Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318).
    """
    draft_ids = torch.tensor(drafts, dtype=torch.int64, device=p.device)[:, None]  # (n, 1)
    chance = acceptance(p[: len(drafts)].gather(1, draft_ids), q.gather(1, draft_ids))
    uniform = torch.rand(len(drafts), 1, generator=generator, device=p.device)
    accepted = first_false((uniform < chance)[:, 0].tolist())
    last = p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted])
    return accepted, draw(last, generator).item()


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw an index of probs, (n,), by inverting their cumulative sums.

    torch.multinomial draws a random number for each index, which takes 20 times as long.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64  # MPS has no float64
    sums = probs.to(exact).cumsum(dim=0)
    uniform = torch.rand(1, generator=generator, dtype=exact, device=probs.device)
    # Below the last sum, because rounding could reach it. `right` skips indices of probability 0.
    threshold = (uniform * sums[-1:]).minimum(sums[-1:].nextafter(sums.new_zeros(1)))
    return torch.searchsorted(sums, threshold, right=True)[0]


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the probability of accepting a draft token, min(1, p / q) with q > 0."""
    return (p / q).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the distribution after a rejection, max(p - q, 0) normalised, (..., vocab_size).

    Where that is zero, the result is p: then p = q, and only rounding can cause a rejection.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def first_false(flags: list[bool]) -> int:
    """Return the index of the first False, or the length if there is none."""
    return flags.index(False) if False in flags else len(flags)


class DraftOutput(OutputWriter):
    """Output of speculative decoding.

    colours: show accepted drafts in green, the target's tokens in magenta.
    """

    def __init__(self, *args, colours: bool):
        super().__init__(*args)
        self.passes = []
        self.colours = colours

    def add_step(self, row: int, step: SpeculativeStep) -> None:
        """Append the tokens of a target pass to the text of a prompt, and end the step."""
        self.passes.append(step)
        for index, token in enumerate(step.tokens):
            text = self.texts[row]
            self.add(row, token)
            new = self.texts[row].removeprefix(text)
            if self.colours and new:
                colour = "\033[32m" if index < step.accepted else "\033[35m"
                self.texts[row] = text + colour + new + "\033[0m"
        self.end_step()

    def statistics(self) -> str:
        """Return acceptance statistics, then the speed of the run."""
        drafts = sum(len(step.drafts) for step in self.passes)
        counts = [step.accepted for step in self.passes]
        accepted = sum(counts)
        rate = f"{accepted} of {drafts} drafts accepted ({accepted / max(drafts, 1):.0%})"
        mean = f"{self.count / len(self.passes):.2f} tokens per target pass"
        passes = ", ".join(f"{count}: {counts.count(count)}" for count in range(max(counts) + 1))
        return f"{rate}, {mean}\npasses by accepted drafts: {passes}\n{super().statistics()}"


def main(argv=None) -> None:
    parser = Parser(description="Generate text with speculative decoding.")
    parser.group("model").add_argument("--target", default=STORIES, help=MODEL_HELP)
    group = parser.group("speculation")
    draft_help = "draft head, or smaller model with the same vocabulary; lookup: prompt lookup"
    group.add_argument("--draft", default=STORIES.with_name("stories-draft"), help=draft_help)
    gamma_help = "maximum number of draft tokens per target pass, 1 to 16"
    group.add_argument("--gamma", metavar="N", type=int, default=3, help=gamma_help)
    show_help = "show accepted drafts in green, the target's tokens in magenta"
    group.add_argument("--show", action="store_true", help=show_help)
    add_options(parser)
    add_sampling_options(parser)
    add_constraint_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Run the command line, with text on stdout and statistics on stderr.

    Raises UserError for bad input.
    """
    params = sampling_params(args)
    prompts = read_prompts(args)
    source = resolve_source(args.target)
    device = pick_device(args.device)
    seed = pick_seed(args.seed)
    generator = torch.Generator(device).manual_seed(seed)
    has_head = names_draft_head(args.draft)
    has_model = args.draft != "lookup" and not has_head
    target, *drafts = load_models([source, args.draft] if has_model else [source], args, device)
    draft = drafts[0] if drafts else propose_prompt_lookup
    if has_head:
        draft = load_head(args.draft, target)
    encoding = load_encoding(source, target.config.vocab_size)
    skip = all_stop_token_ids(params, target.config.eos_token_ids)
    warn_dropped_bytes(encoding, *prompts)
    encoded = [encoding.encode(prompt, allowed_special="all") for prompt in prompts]
    warn_long_prompts(encoded, target.config.block_size, args.stride)
    shown_seed = seed if params.temperature else None
    # no-color.org: any non-empty NO_COLOR turns colours off.
    colours = args.show and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    written = [[] for _ in prompts]
    with DraftOutput(prompts, encoding, skip, shown_seed, colours=colours) as output:
        for row, tokens in enumerate(encoded):
            options = args.gamma, generator, args.stride, CACHE_DTYPES[args.cache_dtype], encoding
            passes = generate_speculative(target, draft, tokens, params, *options)
            for step in passes:
                output.add_step(row, step)
                written[row] += step.tokens
    warn_truncated_outputs(params, encoding, target.config, written)


if __name__ == "__main__":
    main()
