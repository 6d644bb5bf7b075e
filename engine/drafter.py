"""Guesses at the next tokens of a text."""

from typing import NamedTuple, Protocol

import torch

from cache import check_stride, shared_length, window_start
from checkpoint import UserError
from engine.cache import PagedCache, Span, last_logits
from engine.pages import PagePool
from engine.request import Request
from model import Model
from sampling import check_limits, choose


class Drafter(Protocol):
    """What an engine asks for drafts. They change no text: only those are kept that the target chooses itself."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Up to counts[i] tokens to follow the text of request i: ids that the target's vocabulary has."""


class LookupDrafter:
    """Drafts from each text itself, by `lookup`."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [lookup(request.tokens, count) for request, count in zip(requests, counts)]


class Held(NamedTuple):
    """What a drafter has in its cache of a text."""

    tokens: list[int]
    pages: list[int]


class ModelDrafter:
    """A smaller model that writes drafts for all texts together, with pages of its own.

    It draws with the random number that the target uses at the same position. So the more their distributions agree,
    the more often the draws are the same (Daliri et al. 2024, 2408.07978). max_rows: so many texts get drafts at once;
    the cache has a whole window for each. Raises UserError if the vocabularies differ.
    """

    def __init__(self, draft: Model, target: Model, max_rows: int = 32, page_size: int = 16):
        check_vocabularies(target.config, draft.config)
        check_limits(max_rows=max_rows, page_size=page_size)
        self.model, self.block_size = draft, draft.config.block_size
        self.stride = check_stride(None, self.block_size)
        self.pool = PagePool(max_rows * -(-self.block_size // page_size), page_size)
        self.cache = PagedCache(draft, self.pool.num_pages, page_size)
        self.max_rows, self.held = max_rows, {}  # request -> Held

    @torch.inference_mode()
    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        rows = [row for row, count in enumerate(counts) if count][: self.max_rows]
        for request in self.held.keys() - {requests[row] for row in rows}:
            self.pool.shrink(self.held.pop(request).pages, 0)
        drafts = [[] for _ in requests]
        while rows:
            texts = [requests[row].tokens + drafts[row] for row in rows]
            held = [self.held.setdefault(requests[row], Held([], [])) for row in rows]
            spans = [self.span(its, text) for its, text in zip(held, texts)]
            logits = last_logits(self.model, self.cache, spans, [1] * len(rows))
            lengths = [requests[row].prompt_length for row in rows]
            tokens = choose(logits, [requests[row].params for row in rows], texts, lengths)
            finite = logits.isfinite().all(dim=-1).tolist()
            for row, its, span, token, good in zip(rows, held, spans, tokens, finite):
                if good:
                    its.tokens.extend(span.tokens)
                    drafts[row].append(token)
                else:
                    self.cache.clear(span)
            rows = [row for row, good in zip(rows, finite) if good and len(drafts[row]) < counts[row]]
        return drafts

    def span(self, held: Held, text: list[int]) -> Span:
        """What is not computed yet of the draft model's window on a text."""
        window = text[window_start(len(text), self.block_size, self.stride) :]
        known = shared_length(held.tokens, window[:-1])
        del held.tokens[known:]
        self.pool.grow(held.pages, len(window))
        return Span(held.pages, known, window[known:])


def lookup(tokens: list[int], count: int, longest: int = 3, shortest: int = 2) -> list[int]:
    """Up to count tokens that followed the newest earlier occurrence of the last `longest` tokens, [] without one.

    If they are new, one token less is tried, down to `shortest`. An occurrence may overlap the end of the text.
    """
    for size in range(longest, shortest - 1, -1):
        newest = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):  # not the end of the text itself: nothing follows it
            if tokens[start : start + size] == newest:
                return tokens[start + size : start + size + count]
    return []


def check_vocabularies(target, draft) -> None:
    """Raises UserError if two configurations differ in the number of their tokens, or in those that end a text."""
    (size, eos), (draft_size, draft_eos) = (
        (config.vocab_size, set(config.eos_token_ids)) for config in (target, draft)
    )
    if (size, eos) != (draft_size, draft_eos):
        raise UserError(
            f"target and draft need the same vocabulary: the target has {size} tokens, EOS {sorted(eos)};"
            f" the draft {draft_size}, EOS {sorted(draft_eos)}"
        )
