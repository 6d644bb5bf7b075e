"""Guesses at the next tokens of texts, for an engine, and whether they pay."""

import statistics
import time
from collections import deque
from typing import NamedTuple, Protocol

import torch

from cache import Span, check_stride, common_prefix_length, window_start
from drafts import check_vocabularies, prompt_lookup
from engine.cache import PagedCache
from engine.pages import PagePool, page_count
from engine.request import Request
from engine.scheduler import LIMITS, ScheduledRequest
from errors import UserError, check_limits
from model import Model
from sampling import zero_nonfinite_rows


class Drafter(Protocol):
    """What an engine asks for drafts. Drafts change no text, with three exceptions.

    A pass with drafts has another shape, so it may round in another way. It is larger, so memory
    may run out in it. A text ends with an error if the logits behind a draft are not finite, which
    would go unseen without drafts.
    """

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Up to counts[i] tokens to follow the text of request i: ids of the target's vocabulary.

        If it has no memory there are no drafts in this step; other errors leave `Engine.step`.
        """


class PromptLookupDrafter:
    """Drafts from each text itself, by `prompt_lookup`."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [
            prompt_lookup(request.tokens, count) if count else []
            for request, count in zip(requests, counts)
        ]


class DraftState(NamedTuple):
    """What a drafter has in its cache of a text."""

    tokens: list[int]
    pages: list[int]


class PagedModelDrafter:
    """A smaller model that writes drafts for all texts together, with pages of its own.

    It draws with the random numbers that the target uses at the same position. So the more their
    distributions agree, the more often the draws are the same (Daliri et al. 2024, 2408.07978).
    max_num_seqs: how many of the texts that it is asked for get drafts, the first ones; the cache
    has a whole window for each. cache_dtype: as in `generate`. Raises UserError for a value out of
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
        self.model = draft
        self.max_num_seqs = max_num_seqs
        self.block_size = draft.config.block_size
        self.stride = check_stride(None, self.block_size)
        self.pool = PagePool(max_num_seqs * page_count(self.block_size, page_size), page_size)
        self.cache = PagedCache(draft, self.pool.num_pages, page_size, None, cache_dtype)
        self.states: dict[Request, DraftState] = {}

    @torch.inference_mode()
    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        for request in self.states.keys() - set(requests[: self.max_num_seqs]):
            self.free(request)
        wanted = counts[: self.max_num_seqs]
        drafts = [[] for _ in requests]
        while rows := [row for row, count in enumerate(wanted) if len(drafts[row]) < count]:
            drawing = [requests[row] for row in rows]
            texts = [requests[row].tokens + drafts[row] for row in rows]
            spans = [self.prepare_span(request, text) for request, text in zip(drawing, texts)]
            logits = self.model.runner.logits(self.model, self.cache, spans, [1] * len(rows))
            finite = zero_nonfinite_rows(logits)
            params = [request.params for request in drawing]
            lengths = [request.prompt_length for request in drawing]
            masks = [request.token_mask(text) for request, text in zip(drawing, texts)]
            good = [
                is_finite and not isinstance(mask, UserError)
                for is_finite, mask in zip(finite, masks)
            ]
            token_masks = [mask if usable else None for usable, mask in zip(good, masks)]
            eos = self.model.config.eos_token_ids
            tokens = self.model.runner.sample_batch(
                logits, params, texts, lengths, None, eos, token_masks
            )
            for row, span, token, usable in zip(rows, spans, tokens, good):
                if usable:
                    self.states[requests[row]].tokens.extend(span.tokens)
                    drafts[row].append(token)
                else:
                    self.free(requests[row])
                    wanted[row] = 0  # no more
        return drafts

    def prepare_span(self, request: Request, text: list[int]) -> Span:
        """Make room for a text; returns what is not computed yet of the draft model's window on it.

        Only what the window shares with the state of the request is kept.
        """
        state = self.states.setdefault(request, DraftState([], []))
        window = text[window_start(len(text), self.block_size, self.stride) :]
        num_cached = common_prefix_length(state.tokens, window[:-1])
        del state.tokens[num_cached:]
        self.pool.allocate(state.pages, len(window))
        return Span(state.pages, num_cached, window[num_cached:])

    def free(self, request: Request) -> None:
        """Give back the pages of a request."""
        self.pool.free_after(self.states.pop(request).pages, 0)


TRIAL_STEPS = 16  # steps of each way; after as many more it is decided again
COMMIT_STEPS = 256  # steps of the faster one, before both are tried again
MAX_SAMPLES = 64  # steps of each way that count, the newest


class SpeculationTrial:
    """Steps with drafts, then as many without, then those of the way that makes more tokens/s.

    What was measured before counts in the next trial, too, and steps of the term count: a few of
    one text say little.
    """

    def __init__(self):
        self.steps = 0  # of a trial and the term after it
        self.drafting_pays = True
        self.tokens = {drafts: deque(maxlen=MAX_SAMPLES) for drafts in (True, False)}  # per step
        self.seconds = {drafts: deque(maxlen=MAX_SAMPLES) for drafts in (True, False)}

    @property
    def should_draft(self) -> bool:
        """Whether the next step has drafts."""
        return self.drafting_pays if self.steps >= 2 * TRIAL_STEPS else self.steps < TRIAL_STEPS

    def record_step(self, drafts: bool, tokens: int, seconds: float) -> None:
        """Count a step with what it made and took."""
        self.tokens[drafts].append(tokens)
        self.seconds[drafts].append(seconds)
        self.steps = (self.steps + 1) % (2 * TRIAL_STEPS + COMMIT_STEPS)
        if self.steps >= 2 * TRIAL_STEPS and self.steps % TRIAL_STEPS == 0:
            self.drafting_pays = self.throughput(True) > self.throughput(False)

    def throughput(self, drafts: bool) -> float:
        """Tokens/s: the mean of tokens by the median of seconds, which no single pause moves."""
        return statistics.mean(self.tokens[drafts]) / statistics.median(self.seconds[drafts])


class AdaptiveSpeculation:
    """For an engine: in which of its steps drafts pay.

    A pass over more tokens takes little longer for one row and much longer for many, so each number
    of rows has a trial of its own; in powers of two: 1, 2 to 3, 4 to 7, ...
    """

    def __init__(self):
        self.trials: dict[int, SpeculationTrial] = {}
        self.drafted_before = False  # in the last step that only decoded

    def should_draft(self, num_seqs: int) -> bool:
        """Whether to ask for drafts in a step of `num_seqs` sequences that begins now."""
        self.start_time = time.perf_counter()
        self.num_seqs = num_seqs
        self.trial = self.trials.setdefault(num_seqs.bit_length(), SpeculationTrial())
        self.drafting = self.trial.should_draft
        return self.drafting

    def record_step(self, scheduled: list[ScheduledRequest], tokens: int) -> None:
        """The step that began has computed these requests, and chosen `tokens` tokens.

        A step in which a text comes in or a prompt is read does not count. Nor does the first one
        with drafts: in it a draft model reads all that was written without it.
        """
        seconds = time.perf_counter() - self.start_time
        decodes = all(len(entry.tokens) == len(entry.drafts) + 1 for entry in scheduled)
        if len(scheduled) != self.num_seqs or not decodes:
            return
        if self.drafted_before or not self.drafting:
            self.trial.record_step(self.drafting, tokens, seconds)
        self.drafted_before = self.drafting
