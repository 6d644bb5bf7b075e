"""Drafters for tests, and what must hold in an engine that has one."""

import dataclasses

import torch
from conftest import random_tokens
from engines import alone, check_texts, finish, make_engine

from sampling import SamplingParams

PROMPTS = [random_tokens(length, seed=seed) for seed, length in enumerate((3, 9, 1, 14, 5))]
FILTERED = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "seed": 2}
NUCLEUS = {"temperature": 1.2, "top_p": 0.7, "presence_penalty": 1.0, "seed": 2**64 - 1}
OTHERS = [{}, FILTERED, NUCLEUS, {"frequency_penalty": 1.5}]
MIXED = [SamplingParams(24, ignore_eos=True, **fields) for fields in OTHERS]  # contexts shift
MIXED.append(SamplingParams(24, temperature=1.0, seed=1))
GREEDY = MIXED[0]
ALWAYS = range(10**9)


def write(model, drafter, prompts=PROMPTS, params=MIXED, **options) -> tuple:
    """An engine with this drafter, which has written the texts of `generate`, and its steps."""
    engine, requests = make_engine(model, prompts, params, drafter=drafter, **options)
    steps = finish(engine)
    check_texts(model, requests, None, options.get("cache_dtype"))
    assert "error" not in {request.finish_reason for request in requests}
    return engine, steps


class Scripted:
    """A drafter that calls (request, count) -> drafts. counts: of each step, those asked for."""

    def __init__(self, function):
        self.function = function
        self.counts = []

    def propose(self, requests, counts):
        self.counts.append(counts)
        return [self.function(request, count) for request, count in zip(requests, counts)]


def knowing(model, wrong=(), more=0) -> Scripted:
    """Draft what `generate` writes next and `more`, with other tokens at the indices `wrong`."""

    def propose(request, count):
        length = request.params.max_new_tokens + more
        params = dataclasses.replace(request.params, ignore_eos=True, max_new_tokens=length)
        text = alone(model, request.tokens[: request.prompt_length], params)
        start = len(request.output)
        coming = enumerate(text[start : start + count + more], start)
        return [(token + (index in wrong)) % model.config.vocab_size for index, token in coming]

    return Scripted(propose)


def spoil(cache, texts) -> None:
    """Fill all slots but the first `length` of these (pages, length) with other numbers."""
    size = cache.storage.shape[4]
    unused = torch.ones(cache.storage.shape[2], size, dtype=torch.bool)
    for pages, length in texts:
        for index, page in enumerate(pages):
            unused[page, : max(length - index * size, 0)] = False
    cache.storage.masked_fill_(unused[:, None, :, None], 1e3)
