"""Guesses at the next tokens of texts, for an engine."""

from typing import NamedTuple

import torch

from cache import Span, check_stride, shared_length, window_start
from drafts import check_vocabularies, lookup
from engine.cache import PagedCache, last_logits
from engine.engine import LIMITS
from engine.pages import PagePool, page_count
from engine.request import Request
from errors import check_limits
from model import Model
from sampling import choose, finite_rows


class LookupDrafter:
    """Drafts from each text itself, by `lookup`."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [
            lookup(request.tokens, count) if count else []
            for request, count in zip(requests, counts)
        ]


class Held(NamedTuple):
    """What a drafter has in its cache of a text."""

    tokens: list[int]
    pages: list[int]


class PagedDrafter:
    """A smaller model that writes drafts for all texts together, with pages of its own.

    It draws with the random numbers that the target uses at the same position. So the more their
    distributions agree, the more often the draws are the same (Daliri et al. 2024, 2408.07978).
    max_rows: of the texts that it is asked for, the first so many get drafts; the cache has a whole
    window for each.
    Raises UserError for a value out of range, if the vocabularies differ, or if the cache does not
    fit in memory.
    """

    def __init__(self, draft: Model, target: Model, max_rows: int = 32, page_size: int = 16):
        check_vocabularies(target.config, draft.config)
        check_limits(LIMITS, max_rows=max_rows, page_size=page_size)
        self.model = draft
        self.max_rows = max_rows
        self.block_size = draft.config.block_size
        self.stride = check_stride(None, self.block_size)
        self.pool = PagePool(max_rows * page_count(self.block_size, page_size), page_size)
        self.cache = PagedCache(draft, self.pool.num_pages, page_size)
        self.held: dict[Request, Held] = {}

    @torch.inference_mode()
    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        for request in self.held.keys() - set(requests[: self.max_rows]):
            self.forget(request)
        wanted = counts[: self.max_rows]
        drafts = [[] for _ in requests]
        while rows := [row for row, count in enumerate(wanted) if len(drafts[row]) < count]:
            drawing = [requests[row] for row in rows]
            texts = [requests[row].tokens + drafts[row] for row in rows]
            spans = [self.extend(request, text) for request, text in zip(drawing, texts)]
            logits = last_logits(self.model, self.cache, spans, [1] * len(rows))
            finite = finite_rows(logits)
            params = [request.params for request in drawing]
            lengths = [request.prompt_length for request in drawing]
            tokens = choose(logits, params, texts, lengths, None, self.model.draws)
            for row, span, token, good in zip(rows, spans, tokens, finite):
                if good:
                    self.held[requests[row]].tokens.extend(span.tokens)
                    drafts[row].append(token)
                else:
                    self.forget(requests[row])
                    wanted[row] = 0  # no more
        return drafts

    def extend(self, request: Request, text: list[int]) -> Span:
        """Make room for a text; returns what is not computed yet of the draft model's window on it.

        Of what is held of the request, only what the window shares with it is kept.
        """
        held = self.held.setdefault(request, Held([], []))
        window = text[window_start(len(text), self.block_size, self.stride) :]
        known = shared_length(held.tokens, window[:-1])
        del held.tokens[known:]
        self.pool.grow(held.pages, len(window))
        return Span(held.pages, known, window[known:])

    def forget(self, request: Request) -> None:
        """Give back the pages of a request."""
        self.pool.shrink(self.held.pop(request).pages, 0)
