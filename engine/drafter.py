"""Drafters for the engine, and adaptive speculation."""

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from cache import ContextWindow, Span, common_prefix_length
from draft_head import DraftHead
from drafts import check_vocabularies, prompt_lookup
from engine.cache import PagedCache
from engine.config import LIMITS
from engine.pages import PagePool, page_count
from engine.request import Request
from engine.scheduler import ScheduledRequest
from engine.static import use_device_runner
from errors import check_limits
from model import Model


class Drafter(Protocol):
    """Interface of a drafter. Drafts do not change the output, with three exceptions.

    A pass with drafts has more rows, so it may round differently. It is larger, so it may run
    out of memory. A request fails if the logits after a draft token are not finite, even if the
    draft would be rejected.
    """

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Return up to counts[i] draft tokens for request i, ids of the target's vocabulary.

        If it runs out of memory, the step has no drafts. Other errors propagate from `Engine.step`.
        """


class PromptLookupDrafter:
    """Prompt-lookup drafts from each sequence itself."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [
            prompt_lookup(request.tokens, count) if count else []
            for request, count in zip(requests, counts)
        ]


class DraftState(NamedTuple):
    """Cached tokens of a sequence in the draft model, and their page table."""

    tokens: list[int]
    pages: list[int]


class PagedModelDrafter:
    """A smaller model that drafts for all requests in batches, with its own paged KV cache.

    It samples with the random numbers that the target uses at the same position. The closer their
    distributions, the more often both draw the same token (Daliri et al. 2024, 2408.07978).
    max_num_seqs: only the first max_num_seqs requests get drafts. The cache holds a whole
    context window for each. cache_dtype: as in `generate`. Raises UserError for a value out of
    range, if the vocabularies differ, or if the cache does not fit in memory.
    """

    def __init__(
        self,
        draft: Model,
        target: Model,
        max_num_seqs: int = 32,
        page_size: int = 16,
        cache_dtype: torch.dtype | None = None,
    ):
        check_vocabularies(target.config, draft.config)
        check_limits(LIMITS, max_num_seqs=max_num_seqs, page_size=page_size)
        use_device_runner(draft)
        self.model = draft
        self.max_num_seqs = max_num_seqs
        self.context_window = ContextWindow(draft.config.block_size)
        num_pages = max_num_seqs * page_count(draft.config.block_size, page_size)
        self.pool = PagePool(num_pages, page_size)
        self.cache = PagedCache(draft, self.pool.num_pages, page_size, None, cache_dtype)
        self.states: dict[Request, DraftState] = {}

    @torch.inference_mode()
    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        for request in self.states.keys() - set(requests[: self.max_num_seqs]):
            self.free(request)
        wanted = counts[: self.max_num_seqs]
        drafts = [[] for _ in requests]
        while rows := [row for row, count in enumerate(wanted) if len(drafts[row]) < count]:
            pairs = [requests[row].masked_sequence(drafts[row]) for row in rows]
            sequences = [sequence for sequence, _ in pairs]
            spans = [
                self.prepare_span(requests[row], sequence.tokens)
                for row, sequence in zip(rows, sequences)
            ]
            count = len(rows)
            tokens, finite, *_ = self.model.runner.step(
                self.model, self.cache, spans, [1] * count, sequences, list(range(count))
            )
            for row, span, token, is_finite, (_, error) in zip(rows, spans, tokens, finite, pairs):
                if is_finite and error is None:
                    self.states[requests[row]].tokens.extend(span.tokens)
                    drafts[row].append(token)
                else:
                    self.free(requests[row])
                    wanted[row] = 0  # stop drafting
        return drafts

    def prepare_span(self, request: Request, tokens: list[int]) -> Span:
        """Allocate pages for the draft model's context window over a request's tokens and drafts.

        Returns the span of its uncomputed tokens. Cached tokens after the common prefix of the
        window and the request's state are dropped.
        """
        state = self.states.setdefault(request, DraftState([], []))
        window = self.context_window.crop(tokens)
        num_cached = common_prefix_length(state.tokens, window[:-1])
        del state.tokens[num_cached:]
        self.pool.allocate(state.pages, len(window))
        return Span(state.pages, num_cached, window[num_cached:])

    def free(self, request: Request) -> None:
        """Free the pages of a request."""
        self.pool.free_tail(self.states.pop(request).pages, 0)


@dataclass
class HeadState:
    """The state of a request in a draft head."""

    end: int  # position in the request of the next state to observe
    num_cached: int  # observed tokens in the head's cache; drafts after them are overwritten
    pages: list[int]
    tokens: list[int]  # observed, not cached yet
    states: list[torch.Tensor]  # that chose them: parts of (n, C)


MAX_WINDOWS = 4  # sliding windows of a request in the head's cache, before it begins again


class PagedHeadDrafter:
    """A draft head that drafts for all requests in batches, with its own paged KV cache.

    Its arguments and its random numbers are PagedModelDrafter's. The cache holds MAX_WINDOWS
    sliding windows for each request. A request whose states have a gap, such as jump-forward
    tokens, begins again with an empty cache. Raises UserError for a value out of range, or if the
    cache does not fit in memory.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Model,
        max_num_seqs: int = 32,
        page_size: int = 16,
        cache_dtype: torch.dtype | None = None,
    ):
        check_limits(LIMITS, max_num_seqs=max_num_seqs, page_size=page_size)
        self.model = head
        self.target = target
        self.max_num_seqs = max_num_seqs
        (self.window,) = head.config.sliding_windows
        self.max_len = min(head.config.block_size, MAX_WINDOWS * self.window)
        self.pool = PagePool(max_num_seqs * page_count(self.max_len, page_size), page_size)
        self.cache = PagedCache(head, self.pool.num_pages, page_size, None, cache_dtype)
        self.states: dict[Request, HeadState] = {}

    def observe(self, request: Request, tokens: list[int], states: torch.Tensor) -> None:
        """Observe new tokens of a request, and the target's states that chose them, (n, C).

        request.tokens do not include them yet. The next step may overwrite the states.
        """
        start = len(request.tokens) - 1
        state = self.states.setdefault(request, HeadState(start, 0, [], [], []))
        if state.end != start:
            self.states[request] = state = HeadState(start, 0, state.pages, [], [])
        if len(state.tokens) >= 2 * self.window:  # after many steps without drafts
            self.begin_again(state, self.window)
        state.end += len(tokens)
        state.tokens += tokens
        state.states.append(states.clone())

    def begin_again(self, state: HeadState, count: int) -> None:
        """Empty the cache of a request, and keep the last `count` observed tokens."""
        state.num_cached = 0
        state.tokens = state.tokens[-count:]
        state.states = [torch.cat(state.states)[-count:]]

    def keep(self, requests: list[Request]) -> None:
        """Free the states and pages of all requests but the first max_num_seqs of these."""
        for request in self.states.keys() - set(requests[: self.max_num_seqs]):
            self.pool.free_tail(self.states.pop(request).pages, 0)

    @torch.inference_mode()
    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        self.keep(requests)
        drafts = [[] for _ in requests]
        wanted = [0] * len(requests)
        for row, (request, count) in enumerate(zip(requests, counts)):
            state = self.states.get(request)
            if count and state and state.tokens:
                wanted[row] = min(count, self.max_len - 1)
                if state.num_cached + len(state.tokens) + wanted[row] > self.max_len:
                    self.begin_again(state, self.max_len - wanted[row])
        own = {}  # row -> the head's own state that chose the last draft, in place of the target's
        while rows := [row for row, count in enumerate(wanted) if len(drafts[row]) < count]:
            states = [self.states[requests[row]] for row in rows]
            spans = [self.prepare_span(state, drafts[row]) for row, state in zip(rows, states)]
            inputs = [part for row, state in zip(rows, states) for part in state.states or own[row]]
            pairs = [requests[row].masked_sequence(drafts[row]) for row in rows]
            logits, hidden = self.model.runner.forward(
                self.model, self.cache, spans, torch.cat(inputs)
            )
            sequences = [sequence for sequence, _ in pairs]
            tokens = self.target.runner.sample_batch(logits, sequences)
            finite = hidden.isfinite().all(dim=-1).tolist()
            for index, (row, state) in enumerate(zip(rows, states)):
                state.num_cached += len(state.tokens)
                state.tokens = []
                state.states = []
                own[row] = [hidden[index : index + 1]]
                if finite[index] and pairs[index][1] is None:
                    drafts[row].append(tokens[index])
                else:
                    wanted[row] = 0  # stop drafting
                if not finite[index]:
                    state.num_cached = 0
        return drafts

    def prepare_span(self, state: HeadState, drafts: list[int]) -> Span:
        """Allocate pages for the observed tokens, or else the last draft, and return their span."""
        start = state.num_cached + max(len(drafts) - 1, 0)
        tokens = state.tokens or drafts[-1:]
        self.pool.allocate(state.pages, start + len(tokens))
        return Span(state.pages, start, tokens)


TRIAL_STEPS = 16  # steps of each mode in a trial, and steps between later decisions
COMMIT_STEPS = 256  # steps of the faster mode before the next trial
MAX_SAMPLES = 64  # most recent steps of each mode that count


class SpeculationTrial:
    """Trial of TRIAL_STEPS steps with drafts and as many without, then COMMIT_STEPS of the faster.

    Samples carry over to the next trial, and committed steps add samples too, because a few steps
    of one sequence are too noisy.
    """

    def __init__(self):
        self.steps = 0  # of the trial and the committed steps after it
        self.drafting_pays = True
        self.tokens = {drafts: deque(maxlen=MAX_SAMPLES) for drafts in (True, False)}  # per step
        self.seconds = {drafts: deque(maxlen=MAX_SAMPLES) for drafts in (True, False)}

    @property
    def should_draft(self) -> bool:
        """Return whether the next step has drafts."""
        return self.drafting_pays if self.steps >= 2 * TRIAL_STEPS else self.steps < TRIAL_STEPS

    def record_step(self, drafts: bool, tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a step, and decide again when due."""
        self.tokens[drafts].append(tokens)
        self.seconds[drafts].append(seconds)
        self.steps = (self.steps + 1) % (2 * TRIAL_STEPS + COMMIT_STEPS)
        if self.steps >= 2 * TRIAL_STEPS and self.steps % TRIAL_STEPS == 0:
            self.drafting_pays = self.throughput(True) > self.throughput(False)

    def throughput(self, drafts: bool) -> float:
        """Return mean tokens / median seconds; the median ignores a single pause."""
        return statistics.mean(self.tokens[drafts]) / statistics.median(self.seconds[drafts])


class AdaptiveSpeculation:
    """Speculation only in steps where it raises the engine's throughput.

    More tokens per sequence cost little in a batch of one and much in a large batch. Therefore each
    batch size has its own trial, in powers of two: 1, 2 to 3, 4 to 7, ...
    """

    def __init__(self):
        self.trials: dict[int, SpeculationTrial] = {}
        self.drafted_before = False  # whether the last decode-only step had drafts

    def should_draft(self, num_seqs: int) -> bool:
        """Start timing a step of `num_seqs` sequences, and return whether it should have drafts."""
        self.start_time = time.perf_counter()
        self.num_seqs = num_seqs
        self.trial = self.trials.setdefault(num_seqs.bit_length(), SpeculationTrial())
        self.drafting = self.trial.should_draft
        return self.drafting

    def record_step(self, scheduled: list[ScheduledRequest], tokens: int) -> None:
        """Record the step that `should_draft` started: its requests and number of sampled tokens.

        A step that admits a request or computes a prompt does not count. Nor does the first step
        after drafting resumes, in which a draft model or head catches up on the tokens generated
        without it.
        """
        seconds = time.perf_counter() - self.start_time
        decodes = all(len(entry.tokens) == len(entry.drafts) + 1 for entry in scheduled)
        if len(scheduled) != self.num_seqs or not decodes:
            return
        if self.drafted_before or not self.drafting:
            self.trial.record_step(self.drafting, tokens, seconds)
        self.drafted_before = self.drafting
