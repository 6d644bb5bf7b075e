"""Random histories of an engine: requests are added, steps are taken, requests are aborted, in any order.

Each text must be that of `generate` alone. Some dozens of histories run; for more:
HISTORIES=2000 pytest tests/test_engine.py
"""

import functools
import os

import hypothesis
import torch
from conftest import run_rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

PARAMS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(0, 24),
        "ignore_eos": st.booleans(),
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "seed": st.integers(0, 2**64 - 1),
    }
)
TOKENS = st.integers(0, 6)  # a small vocabulary, so that texts end, repeat themselves and have prefixes in common
PROMPTS = st.lists(TOKENS, max_size=14)
STOPS = st.lists(st.text("abc\u00e9", min_size=1, max_size=3), max_size=2)


class Letters:
    """What tokens print: five letters, and the two bytes of a sixth one."""

    def decode_single_token_bytes(self, token: int) -> bytes:
        return [b"a", b"b", b"c", b"ab", b"cc", b"\xc3", b"\xa9"][token]


def cut(tokens: list[int], stop: list[str], ends: bool) -> tuple[list[int], str]:
    """The tokens up to the one that completes a stop string, and their text before it. ends: token 6 prints nothing."""
    printed = [b"" if token == 6 and ends else Letters().decode_single_token_bytes(token) for token in tokens]
    for count in range(len(tokens) + 1):
        text = b"".join(printed[:count]).decode(errors="replace")
        for end in range(len(text) + 1):
            found = [its for its in stop if text[:end].endswith(its)]
            if found:
                return tokens[:count], text[: end - max(map(len, found))]
    return tokens, text


@functools.cache
def model(architecture: str, n_layer: int = 2, block_size: int = 12, seed: int = 0):
    """A random model in float64; token 6 ends a text."""
    from llama import Llama, LlamaConfig
    from model import GPT, GPTConfig

    shape = {"vocab_size": 7, "block_size": block_size, "n_layer": n_layer, "n_head": 4, "n_embd": 16}
    if architecture == "GPT-2":
        made = GPT(GPTConfig(**shape, eos_token_ids=(6,)))
    else:
        heads = {"n_kv_head": 2, "head_dim": 6, "n_inner": 24}
        made = Llama(LlamaConfig(**shape, **heads, bos_token_id=5, eos_token_ids=(6,), tied_head=False))
    return made.double().init_weights(std=0.4, generator=torch.Generator().manual_seed(seed)).eval()


class Histories(RuleBasedStateMachine):
    @initialize(architecture=st.sampled_from(["GPT-2", "Llama"]), data=st.data())
    def begin(self, architecture, data):
        from engine.drafter import LookupDrafter, ModelDrafter
        from engine.engine import Engine

        self.model, self.stride = model(architecture), data.draw(st.sampled_from([None, 1, 5, 12]))
        self.max_rows = data.draw(st.integers(1, 5))
        options = {"max_rows": self.max_rows}
        options["page_size"] = data.draw(st.integers(1, 4))
        smallest = -(-12 // options["page_size"])  # pages for a whole window
        options["num_pages"] = smallest + data.draw(st.integers(0, 2 * smallest))
        options["budget"] = data.draw(st.integers(1, 20))
        draft = data.draw(st.sampled_from([None, "lookup", "GPT-2", "Llama"]))
        options["gamma"] = data.draw(st.integers(1, 5))
        if draft == "lookup":
            options["drafter"] = LookupDrafter()
        elif draft:  # a smaller one, or the target itself
            made = model(draft, n_layer=data.draw(st.integers(1, 2)), block_size=data.draw(st.sampled_from([5, 12])))
            options["drafter"] = ModelDrafter(made, self.model, self.max_rows, options["page_size"])
        self.engine = Engine(self.model, stride=self.stride, encoding=Letters(), **options)
        self.prefix = data.draw(st.lists(TOKENS, max_size=10))
        self.requests = []  # with their prompts and parameters, and the tokens of their events
        plan = self.engine.cache.plan

        def checked(spans):
            result, storage = plan(spans), self.engine.cache.storage
            written = list(zip(*(index.tolist() for index in self.engine.cache.written)))
            assert len(set(written)) == len(written)
            assert all(0 <= index < storage.shape[2] and 0 <= at < storage.shape[4] for index, at in written)
            return result

        self.engine.cache.plan = checked

    @rule(
        prompt=PROMPTS,
        shared=st.integers(0, 10),
        params=PARAMS,
        salt=st.sampled_from("aab"),
        stop=STOPS,
        logprobs=st.sampled_from([None, 0, 2]),
    )
    def add(self, prompt, shared, params, salt, stop, logprobs):
        from sampling import SamplingParams

        prompt = self.prefix[:shared] + prompt
        request = self.engine.add(prompt, SamplingParams(**params), salt, stop, logprobs)
        self.requests.append((request, prompt, params, stop, logprobs, [], []))

    @precondition(lambda self: self.engine.busy)
    @rule()
    def step(self):
        for event in self.engine.step():
            (index,) = [index for index, entry in enumerate(self.requests) if entry[0] is event.request]
            assert event.error is None
            assert event.finish_reason == event.request.finish_reason
            self.requests[index][-2].extend(event.tokens)
            self.requests[index][-1].append(event.text)
        self.check()

    @precondition(lambda self: any(entry[0].finish_reason is None for entry in self.requests))
    @rule(data=st.data())
    def abort(self, data):
        running = [entry[0] for entry in self.requests if entry[0].finish_reason is None]
        self.engine.abort(running[data.draw(st.integers(0, len(running) - 1))])
        self.check()

    def check(self):
        """What must hold after each step."""
        scheduler = self.engine.scheduler
        assert len(scheduler.running) <= self.max_rows
        pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
        held = [page for request in running for page in request.pages]
        assert set(held) | set(pool.free) == set(range(pool.num_pages)) and not set(held) & set(pool.free)
        assert [held.count(page) for page in range(pool.num_pages)] == pool.holders
        assert all(pool.contents[page][0] == digest for digest, page in pool.published.items())
        assert len(pool.contents) == len(pool.published)
        assert all(len(set(request.pages)) == len(request.pages) for request in running)
        for request in running:  # a page too many at most, and never one too few
            assert request.computed <= len(request.pages) * pool.page_size
            assert len(request.pages) <= pool.count(len(request.window))
        assert not any(request.pages or request.computed for request in waiting)

    def check_logprobs(self, request, count):
        """Those of a request are those of whole passes over its windows."""
        from cache import check_stride, window_start
        from infer import next_logits

        assert len(request.logprobs) == (0 if count is None else len(request.output))
        for length, (logprob, top) in enumerate(request.logprobs, request.prompt_length):
            start = window_start(length, 12, check_stride(self.stride, 12))
            logits = next_logits(self.model, [request.tokens[start:length]], None)[0, 0]
            wanted = logits.double().log_softmax(dim=-1)
            assert abs(logprob - wanted[request.tokens[length]]) < 1e-5
            best = wanted.topk(count).values.tolist()
            assert all(abs(value - its) < 1e-5 for (_, value), its in zip(top, best)) and len(top) == len(best)
            assert all(abs(value - wanted[token]) < 1e-5 for token, value in top) and len(dict(top)) == len(top)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.step()
        for request, prompt, params, stop, logprobs, tokens, texts in self.requests:
            (expected,) = run_rows(self.model, [prompt], options={"stride": self.stride}, **params)
            expected, text = cut(expected, stop, not params["ignore_eos"])
            assert tokens == request.output
            assert tokens == (expected[: len(tokens)] if request.finish_reason == "abort" else expected)
            assert "".join(texts) == request.text
            assert text.startswith(request.text) if request.finish_reason == "abort" else text == request.text
            self.check_logprobs(request, logprobs)
        assert len(self.engine.scheduler.pool.free) == self.engine.scheduler.pool.num_pages


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis.settings(max_examples=int(os.environ.get("HISTORIES", 24)), stateful_step_count=30)
