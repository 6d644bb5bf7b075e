"""Random histories of an engine: requests are added, steps are taken, requests are aborted.

Each text must be that of `generate` alone. Some dozens of histories run; for more:
HISTORIES=2000 pytest tests/hard/test_histories.py
"""

import copy
import functools
import os
from dataclasses import dataclass, field

import hypothesis
import pytest
import torch
from engines import alone, check_pages, check_passes, step
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from natives import to_int8
from stops import characters, cut, encoding_of

from cache import ContextWindow, KVCache
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from infer import next_logits
from llama import Llama, LlamaConfig
from model import GPT, GPTConfig
from native import use_native
from sampling import SamplingParams

BLOCK_SIZE = 12
VALUES = {
    "max_new_tokens": st.integers(0, 24),
    "ignore_eos": st.booleans(),
    "temperature": st.sampled_from([0.0, 0.8, 1.5]),
    "top_k": st.sampled_from([0, 3]),
    "top_p": st.sampled_from([1.0, 0.8, 0.5]),
    "min_p": st.sampled_from([0.0, 0.3]),
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "logit_bias": st.sampled_from([(), ((2, 4.0), (6, -100.0))]),
    "stop_token_ids": st.sampled_from([(), (3,)]),
    "min_tokens": st.sampled_from([0, 4]),
    "seed": st.integers(0, 2**64 - 1),
}
# Requests differ from each other in a single parameter, so that a step has rows nearly alike.
BASES = st.fixed_dictionaries(VALUES)
CHANGES = st.one_of([st.fixed_dictionaries({name: values}) for name, values in VALUES.items()])
# A small vocabulary, so that texts end, repeat themselves and have prefixes in common.
TOKENS = st.integers(0, 6)
PROMPTS = st.lists(TOKENS, max_size=14)
STOPS = st.lists(st.text("abc\u00e9", min_size=1, max_size=3), max_size=2).map(tuple)


PIECES = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b"cc",
    b"\xc3",
    b"\xa9",
]  # five letters, and a sixth in two tokens


def printed(tokens: list[int], params: dict) -> bytes:
    ends = params["stop_token_ids"] if params["ignore_eos"] else (6, *params["stop_token_ids"])
    return b"".join(PIECES[token] for token in tokens if token not in ends)


def stopped(tokens: list[int], stop: tuple[str, ...], params: dict) -> tuple[list[int], str]:
    """Return the tokens up to the one that completes a stop string, and the text before it."""
    after = len(characters(printed(tokens[: params["min_tokens"]], params)))
    for count in range(len(tokens) + 1):
        text, found = cut(printed(tokens[:count], params).decode(errors="replace"), stop, after)
        if found:
            return tokens[:count], text
    return tokens, text


@functools.cache
def model(architecture: str, n_layer: int = 2, block_size: int = BLOCK_SIZE, seed: int = 0):
    shape = {"vocab_size": 7, "block_size": block_size, "n_layer": n_layer}
    shape |= {"n_head": 4, "n_embd": 16, "eos_token_ids": (6,)}
    if architecture == "GPT-2":
        made = GPT(GPTConfig(**shape))
    else:
        heads = {"n_kv_head": 2, "head_dim": 6, "n_inner": 24}
        made = Llama(LlamaConfig(**shape, **heads, bos_token_id=5, tie_word_embeddings=False))
    return made.double().init_weights(std=0.4, generator=torch.Generator().manual_seed(seed)).eval()


@dataclass
class Entry:
    request: object
    prompt: list[int]
    params: dict
    tokens: list[int] = field(default_factory=list)  # of its events


class Histories(RuleBasedStateMachine):
    make = staticmethod(model)
    cache_dtypes = [None, torch.float16, torch.int8]

    @initialize(architecture=st.sampled_from(["GPT-2", "Llama"]), base=BASES, data=st.data())
    def begin(self, architecture, base, data):
        self.model = self.make(architecture)
        self.stride = data.draw(st.sampled_from([None, 1, 5, 12]))
        self.max_num_seqs = data.draw(st.integers(1, 5))
        options = {"max_num_seqs": self.max_num_seqs}
        options["page_size"] = data.draw(st.integers(1, 4))
        smallest = -(-BLOCK_SIZE // options["page_size"])  # pages for a whole window
        options["num_pages"] = smallest + data.draw(st.integers(0, 2 * smallest))
        options["max_num_batched_tokens"] = data.draw(st.integers(1, 20))
        options["gamma"] = data.draw(st.integers(1, 5))
        self.cache_dtype = options["cache_dtype"] = data.draw(st.sampled_from(self.cache_dtypes))
        draft = data.draw(st.sampled_from([None, "lookup", "GPT-2", "Llama"]))
        if draft == "lookup":
            options["drafter"] = PromptLookupDrafter()
        elif draft:  # a smaller one, or the target itself
            n_layer = data.draw(st.integers(1, 2))
            made = self.make(draft, n_layer, data.draw(st.sampled_from([5, BLOCK_SIZE])))
            options["drafter"] = PagedModelDrafter(
                made, self.model, self.max_num_seqs, options["page_size"]
            )
        options["encoding"] = encoding_of(PIECES)
        self.engine = Engine(self.model, stride=self.stride, **options)
        self.base = base
        self.prefix = data.draw(st.lists(TOKENS, max_size=10))
        self.entries = []
        check_passes(self.engine.cache, BLOCK_SIZE)

    @rule(
        prompt=PROMPTS,
        shared=st.integers(0, 10),
        change=CHANGES,
        cache_salt=st.sampled_from("aab"),
        stop=STOPS,
        logprobs=st.sampled_from([None, 0, 2]),
    )
    def add(self, prompt, shared, change, cache_salt, stop, logprobs):
        params = self.base | change | {"stop": stop, "logprobs": logprobs}
        params["min_tokens"] = min(params["min_tokens"], params["max_new_tokens"])
        prompt = self.prefix[:shared] + prompt
        request = self.engine.add(prompt, SamplingParams(**params), cache_salt)
        self.entries.append(Entry(request, prompt, params))

    @precondition(lambda self: self.engine.busy)
    @rule()
    def step(self):
        entries = {entry.request: entry for entry in self.entries}
        before = {request: request.text for request in entries}
        for event in step(self.engine):
            assert event.error is None
            entries[event.request].tokens.extend(event.tokens)
        assert len(self.engine.scheduler.running) <= self.max_num_seqs
        for request, text in before.items():
            assert request.text.startswith(text)

    @precondition(lambda self: any(not entry.request.finish_reason for entry in self.entries))
    @rule(data=st.data())
    def abort(self, data):
        requests = [entry.request for entry in self.entries if not entry.request.finish_reason]
        self.engine.abort(data.draw(st.sampled_from(requests)))
        check_pages(self.engine)

    def logits(self, window: list[int]) -> torch.Tensor:
        """Return the logits after a window, from a whole pass over it."""
        cache = KVCache(self.model, 1, None, self.cache_dtype)
        return next_logits(self.model, [window], cache)[0, 0]

    def check_logprobs(self, request):
        count = request.params.logprobs
        assert len(request.logprobs) == (0 if count is None else len(request.output))
        for length, (logprob, top) in enumerate(request.logprobs, request.prompt_length):
            start = ContextWindow(BLOCK_SIZE, self.stride).start(length)
            wanted = self.logits(request.tokens[start:length]).double().log_softmax(dim=-1)
            assert abs(logprob - wanted[request.tokens[length]]) < 1e-5
            best = wanted.topk(count).values.tolist()
            assert len(top) == len(dict(top)) == len(best)
            for (token, value), largest in zip(top, best):
                assert abs(value - largest) < 1e-5 and abs(value - wanted[token]) < 1e-5

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.step()
        for entry in self.entries:
            request = entry.request
            aborted = request.finish_reason == "abort"
            params = {name: entry.params[name] for name in VALUES}
            options = {"stride": self.stride, "cache_dtype": self.cache_dtype}
            expected = alone(self.model, entry.prompt, **options, **params)
            expected, text = stopped(expected, entry.params["stop"], params)
            assert entry.tokens == request.output
            assert request.output == (expected[: len(request.output)] if aborted else expected)
            assert text.startswith(request.text) if aborted else text == request.text
            self.check_logprobs(request)
        assert self.engine.scheduler.pool.num_free_pages == self.engine.scheduler.pool.num_pages


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis.settings(
    max_examples=int(os.environ.get("HISTORIES", 24)), stateful_step_count=30
)


@functools.cache
def native_model(int8: bool, architecture: str, *shape):
    made = copy.deepcopy(model(architecture, *shape)).float()
    if int8:
        to_int8(made)
    use_native(made)
    return made


class NativeHistories(Histories):
    make = staticmethod(functools.partial(native_model, False))


class Int8Histories(NativeHistories):
    make = staticmethod(functools.partial(native_model, True))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("histories", [NativeHistories, Int8Histories])
def test_any_history_in_c(histories):
    run_machine(histories, settings=TestHistories.settings)
