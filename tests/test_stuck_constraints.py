"""Constraints that never come to an end stop neither other requests nor a server's end."""

import asyncio
import itertools
import os
import signal
import threading
import weakref
from concurrent.futures import Future

import pytest
from serving import (
    PATH,
    Script,
    check_refused,
    collect,
    connect,
    request_of,
    run_calls,
    serving,
    small_encoding,
    small_engine,
    until,
)

from constraints import compiler
from constraints.compiler import compile_constraint, compiled_bytes, constraint_bytes
from constraints.grammar import GrammarMatcher
from constraints.vocabulary import get_vocabulary
from engine.engine import Engine
from errors import UserError
from sampling import SamplingParams
from server import engine_thread, structured_output
from server.backend import GenerateInput
from server.structured_output import MAX_TIMED_OUT, Deadline, MaskTimeBudget, QueueFull

BLOCKED = "a{3}b"  # the expression that `blocking` holds up


@pytest.fixture
def gate():
    """Set at the end: what waits for it must not outlive its test."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def impatient(monkeypatch, gate):
    """Deadlines of no seconds for what waits, and of a minute for all else."""

    class Impatient(Deadline):
        def call(self, function, *args):
            self.seconds = 0 if waits(function, args) else 60
            return super().call(function, *args)

    def waits(function, args) -> bool:
        if getattr(args[0], "__self__", None) in slow:  # a mask, which a budget is charged for
            return len(args[1]) == 2
        return BLOCKED in str(args[0])

    slow = []
    monkeypatch.setattr(structured_output, "COMPILER", Impatient(60))
    monkeypatch.setattr(structured_output, "MASKS", Impatient(60))
    return slow


def test_a_call_that_is_late_is_given_up(gate):
    deadline = Deadline(60)
    assert deadline.call(max, 3, 4) == 4
    with pytest.raises(ZeroDivisionError):
        deadline.call(divmod, 1, 0)
    assert len(deadline.idle) == 1  # one thread has done both
    deadline.seconds = 0
    for _ in range(MAX_TIMED_OUT):
        with pytest.raises(UserError, match="0 s"):
            deadline.call(gate.wait)
    deadline.seconds = 60
    with pytest.raises(QueueFull):
        deadline.call(max, 3, 4)
    gate.set()
    until(lambda: not deadline.full)
    assert deadline.call(max, 3, 4) == 4


def outputs(**fields) -> dict:
    return {"structured_outputs": fields}


BODY = outputs(regex="[ab]{9}") | {"max_tokens": 9, "logprobs": 0}  # a step for each token


def streamed_error(client, body: dict) -> tuple[list, dict]:
    *events, last = client.events(PATH, body | {"stream": True})
    return events, last["error"]


def test_constraints_that_are_compiled_for_ever_stop_no_text(
    tiny_llama, monkeypatch, impatient, gate
):
    grammar = compiler.Grammar

    def blocking(constraint, source, vocabulary):
        if source.startswith(BLOCKED):
            gate.wait()
        return grammar(constraint, source, vocabulary)

    monkeypatch.setattr(compiler, "Grammar", blocking)
    with serving(lambda: small_engine(tiny_llama)) as client:
        good = outputs(regex="[ab]c") | {"max_tokens": 9}
        assert client.post(PATH, good)[0] == 200
        answers = [client.post(PATH, outputs(regex=BLOCKED + "c" * count)) for count in range(6)]
        for answer in answers[:4]:
            check_refused(answer, "structured_outputs", "0 s")
        for answer in answers[4:]:
            check_refused(answer, None, "try again", 429, "rate_limit_exceeded")
        assert client.post(PATH, {"max_tokens": 2})[0] == 200
        assert client.get("/health") == (503, None)
        gate.set()
        until(lambda: client.get("/health") == (200, None))
        assert client.post(PATH, good)[0] == 200


def test_a_mask_that_never_comes_ends_its_own_request(tiny_llama, monkeypatch, impatient, gate):
    token_mask = GrammarMatcher.token_mask

    def blocking(matcher, output):
        if len(output) == 2 and matcher in impatient:
            gate.wait()
        return token_mask(matcher, output)

    init = GrammarMatcher.__init__

    def watched(matcher, grammar):
        init(matcher, grammar)
        if threading.current_thread().name == "engine":
            impatient.append(matcher)

    monkeypatch.setattr(GrammarMatcher, "token_mask", blocking)
    monkeypatch.setattr(GrammarMatcher, "__init__", watched)
    with serving(lambda: small_engine(tiny_llama)) as client:
        events, error = streamed_error(client, BODY)
        assert events and "0 s" in error["message"]
        assert (error["param"], error["code"]) == ("structured_outputs", "constraint_failed")
        assert client.post(PATH, {"max_tokens": 2})[0] == 200


def test_masks_of_a_request_share_a_budget():
    def matchers(seconds, count=2):
        now = itertools.count(0, seconds)
        budget = MaskTimeBudget(lambda: next(now))
        return [structured_output.TimedMatcher(constraint.matcher(), budget) for _ in range(count)]

    vocabulary = get_vocabulary(small_encoding(), 4096, (4095,))
    constraint = compile_constraint(SamplingParams(regex="a+"), vocabulary)
    first, second = matchers(0.5)
    for matcher in (first, second, first):
        assert matcher.token_mask([]).any()
    for matcher in (first, second, first):
        with pytest.raises(UserError, match="^regex: "):
            matcher.token_mask([])
        assert not matcher.busy
    (fair,) = matchers(structured_output.FAIR_SECONDS, 1)
    assert all(fair.token_mask([]).any() for _ in range(300))


def test_a_constraint_whose_masks_take_too_long_in_all_ends(tiny_llama, monkeypatch):
    now = itertools.count(0, 0.3)
    budget = structured_output.MaskTimeBudget
    monkeypatch.setattr(engine_thread, "MaskTimeBudget", lambda: budget(lambda: next(now)))
    with serving(lambda: small_engine(tiny_llama)) as client:
        events, error = streamed_error(client, BODY | {"n": 2})
        assert error["message"] == f"regex: {structured_output.TOO_SLOW}"
        assert (error["param"], error["code"]) == ("structured_outputs", "constraint_failed")
        assert events and round(next(now) / 0.3) == 8  # twice for each of four masks
        assert client.post(PATH, BODY | {"max_tokens": 3})[0] == 200


def test_a_constraint_that_fails_after_some_tokens_is_the_clients_fault(tiny_llama, monkeypatch):
    monkeypatch.setattr("constraints.grammar.MAX_ITEMS", 12)
    body = outputs(grammar='start: "a" start | "a"') | {"max_tokens": 40}
    body |= {"logit_bias": {"4095": -100}}
    with serving(lambda: small_engine(tiny_llama)) as client:
        events, error = streamed_error(client, body)
        texts = {letter for event in events for letter in event["choices"][0]["text"]}
        assert texts == {"a"} and "max is 12" in error["message"]
        check_refused(
            client.post(PATH, body), "structured_outputs", "grammar: 12", 400, "constraint_failed"
        )


def test_masks_of_others_that_are_late_are_no_fault_of_a_constraint(tiny_llama, monkeypatch):
    masks = Deadline(60)
    monkeypatch.setattr(structured_output, "MASKS", masks)
    masks.timed_out.update(Future() for _ in range(MAX_TIMED_OUT))
    with serving(lambda: small_engine(tiny_llama)) as client:
        assert streamed_error(client, BODY)[1]["code"] == "rate_limit_exceeded"
        assert client.post(PATH, BODY)[0] == 429
        masks.timed_out.clear()
        assert client.post(PATH, BODY)[0] == 200


def test_health_says_when_no_step_ends(tiny_llama, gate):
    engine = small_engine(tiny_llama)
    step = engine.step
    begun = threading.Event()
    now = [100.0]

    def slow():
        begun.set()
        gate.wait()
        return step()

    engine.step = slow
    with serving(lambda: engine, clock=lambda: now[0]) as client:
        now[0] += 1000
        assert client.get("/health") == (200, None)  # nothing waits for it
        worker = threading.Thread(target=client.post, args=(PATH, {"max_tokens": 2}))
        worker.start()
        assert begun.wait(60)
        now[0] += 10
        assert client.get("/health") == (200, None)
        now[0] += 1
        assert client.get("/health") == (503, None)
        gate.set()
        worker.join(60)
        until(lambda: client.thread.busy_since is None)
        now[0] += 1000
        assert client.get("/health") == (200, None)


def test_waiting_texts_hold_few_bytes_of_constraints(tiny_llama, monkeypatch, gate):
    """Each constraint of a text that waits is held, and texts of one constraint hold one."""
    compiler.clear_constraint_cache()
    monkeypatch.setattr(compiler, "compiled", weakref.WeakValueDictionary())
    sources = [f"[ab]{{{count}}}" for count in range(10, 14)]
    capacity = 3 * constraint_bytes(sources[0])
    monkeypatch.setattr(structured_output, "MAX_BYTES", capacity)

    async def use(thread):
        def generate(regex=None):
            return collect(thread.generate(GenerateInput([[1]], [SamplingParams(4, regex=regex)])))

        thread.commands.put(gate.wait)
        waiting = []
        for source in sources[:3] + sources[:3]:
            waiting.append(asyncio.ensure_future(generate(source)))
            while len(thread.generations) < len(waiting) or not all(
                each.matcher for each in thread.generations
            ):
                await asyncio.sleep(0.001)
        assert compiled_bytes() <= capacity
        with pytest.raises(QueueFull, match="0 MB"):
            await generate(sources[3])
        free = asyncio.ensure_future(generate())
        gate.set()
        await asyncio.gather(free, *waiting)
        await generate()  # the last step is forgotten
        return await generate(sources[3])

    assert run_calls(lambda: small_engine(tiny_llama), use)[0][3] == "length"


def test_a_signal_ends_a_server_whose_engine_is_stuck(tmp_path, monkeypatch):
    begun, tell = os.pipe()

    def stuck(engine):
        os.write(tell, b"x")
        threading.Event().wait()

    monkeypatch.setattr(Engine, "step", stuck)
    with Script(tmp_path, "--drain-seconds", 0) as server:
        with connect(server.client(), request_of(PATH, {})) as connection:
            os.read(begun, 1)
            server.signal(signal.SIGTERM)
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connection.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer
            assert server.end()[0] == 128 + signal.SIGTERM
