"""Constraints that never come to an end stop neither other texts nor the end of the server."""

import asyncio
import itertools
import os
import signal
import threading
import weakref

import pytest
from serving import (
    PATH,
    Script,
    collect,
    connect,
    refusal,
    request_of,
    run_calls,
    serving,
    small_engine,
    until,
)

from errors import UserError
from server.backend import GenerateInput

LATE = "the constraint takes more than 0 s to compute"
BUSY = "4 constraints are still being computed: try again"
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
    from server import structured_output

    class Impatient(structured_output.Deadline):
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
    from server.structured_output import MAX_TIMED_OUT, Deadline, QueueFull

    deadline = Deadline(60)
    assert deadline.call(max, 3, 4) == 4
    with pytest.raises(ZeroDivisionError):
        deadline.call(divmod, 1, 0)
    assert len(deadline.idle) == 1  # one thread has done both
    deadline.seconds = 0
    for _ in range(MAX_TIMED_OUT):
        with pytest.raises(UserError, match=f"^{LATE}$"):
            deadline.call(gate.wait)
    deadline.seconds = 60
    with pytest.raises(QueueFull, match=f"^{BUSY}$"):
        deadline.call(max, 3, 4)
    gate.set()
    until(lambda: not deadline.full)
    assert deadline.call(max, 3, 4) == 4


def test_constraints_that_are_compiled_for_ever_stop_no_text(
    tiny_llama, monkeypatch, impatient, gate
):
    import constraints

    grammar = constraints.Grammar

    def blocking(constraint, source, vocabulary):
        if source.startswith(BLOCKED):
            gate.wait()
        return grammar(constraint, source, vocabulary)

    monkeypatch.setattr(constraints, "Grammar", blocking)
    with serving(lambda: small_engine(tiny_llama)) as client:
        good = {"structured_outputs": {"regex": "[ab]c"}, "max_tokens": 9}
        assert client.post(PATH, good)[0] == 200
        bodies = [{"structured_outputs": {"regex": BLOCKED + "c" * count}} for count in range(6)]
        answers = [client.post(PATH, body) for body in bodies]
        assert [status for status, _ in answers] == [400] * 4 + [429] * 2
        assert answers[0][1] == refusal(LATE, "structured_outputs")
        assert answers[4][1]["error"]["message"] == BUSY
        assert client.post(PATH, {"max_tokens": 2})[0] == 200
        assert client.get("/health") == (503, None)
        gate.set()
        until(lambda: client.get("/health") == (200, None))
        assert client.post(PATH, good)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_mask_that_never_comes_ends_its_own_text(
    tiny_llama, monkeypatch, impatient, gate, stream
):
    from constraints import GrammarMatcher

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
    body = {"structured_outputs": {"regex": "[ab]{9}"}, "max_tokens": 9, "stream": stream}
    body |= {"logprobs": 0}  # a step for each token
    with serving(lambda: small_engine(tiny_llama)) as client:
        expected = refusal(LATE, "structured_outputs", "constraint_failed")
        if stream:
            *events, last = client.events(PATH, body)
            assert events and last == expected
        else:
            assert client.post(PATH, body) == (400, expected)
        assert client.post(PATH, {"max_tokens": 2})[0] == 200


def test_masks_of_a_request_share_a_budget():
    from serving import small_encoding

    from constraints import compile_constraint, get_vocabulary
    from sampling import SamplingParams
    from server.structured_output import FAIR_SECONDS, MaskTimeBudget, TimedMatcher

    def matchers(seconds, count=2):
        now = itertools.count(0, seconds)
        budget = MaskTimeBudget(lambda: next(now))
        return [TimedMatcher(constraint.matcher(), budget) for _ in range(count)]

    constraint = compile_constraint(
        SamplingParams(regex="a+"), get_vocabulary(small_encoding(), 4096, (4095,))
    )
    first, second = matchers(0.5)
    assert first.token_mask([]).any() and second.token_mask([]).any()
    assert first.token_mask([]).any()
    for matcher in (first, second, first):
        with pytest.raises(
            UserError, match="^regex: computing the allowed tokens takes too long: "
        ):
            matcher.token_mask([])
        assert not matcher.busy
    (fair,) = matchers(FAIR_SECONDS, 1)
    assert all(fair.token_mask([]).any() for _ in range(300))


def test_a_constraint_whose_masks_take_too_long_in_all_ends(tiny_llama, monkeypatch):
    from server import engine_thread, structured_output

    now = itertools.count(0, 0.3)

    def budget():
        return structured_output.MaskTimeBudget(lambda: next(now))

    monkeypatch.setattr(engine_thread, "MaskTimeBudget", budget)
    body = {"structured_outputs": {"regex": "[ab]{9}"}, "max_tokens": 9, "stream": True, "n": 2}
    body |= {"logprobs": 0}  # a step for each token
    with serving(lambda: small_engine(tiny_llama)) as client:
        *events, last = client.events(PATH, body)
        assert last == refusal(
            f"regex: {structured_output.TOO_SLOW}", "structured_outputs", "constraint_failed"
        )
        assert events and round(next(now) / 0.3) == 8  # twice for each of four masks
        assert client.post(PATH, body | {"stream": False, "n": 1, "max_tokens": 3})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_fails_in_mid_text_is_the_clients(tiny_llama, monkeypatch, stream):
    import constraints

    monkeypatch.setattr(constraints, "MAX_ITEMS", 12)
    body = {"structured_outputs": {"grammar": 'start: "a" start | "a"'}, "max_tokens": 40}
    body |= {"logit_bias": {"4095": -100}, "stream": stream}
    with serving(lambda: small_engine(tiny_llama)) as client:
        if stream:
            *events, last = client.events(PATH, body)
            assert set("".join(event["choices"][0]["text"] for event in events)) == {"a"}
        else:
            status, last = client.post(PATH, body)
            assert status == 400
        error = last["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "constraint_failed")
        assert error["param"] == "structured_outputs"
        assert error["message"].startswith("no token may follow after ")
        assert "tokens of the text: grammar: " in error["message"]
        assert "max is 12" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_masks_of_others_that_are_late_are_no_fault_of_a_constraint(
    tiny_llama, monkeypatch, stream
):
    from concurrent.futures import Future

    from server import structured_output

    monkeypatch.setattr(structured_output, "MASKS", structured_output.Deadline(60))
    structured_output.MASKS.timed_out.update(
        Future() for _ in range(structured_output.MAX_TIMED_OUT)
    )
    body = {"structured_outputs": {"regex": "[ab]{9}"}, "max_tokens": 9, "stream": stream}
    with serving(lambda: small_engine(tiny_llama)) as client:
        if stream:
            error = client.events(PATH, body)[-1]["error"]
        else:
            status, answer = client.post(PATH, body)
            assert status == 429
            error = answer["error"]
        assert (error["message"], error["code"]) == (BUSY, "rate_limit_exceeded")
        structured_output.MASKS.timed_out.clear()
        assert client.post(PATH, body | {"stream": False})[0] == 200


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
    import constraints
    from constraints import clear_constraint_cache, compiled_bytes, constraint_bytes
    from sampling import SamplingParams
    from server import structured_output
    from server.engine_thread import QueueFull

    clear_constraint_cache()
    monkeypatch.setattr(constraints, "compiled", weakref.WeakValueDictionary())
    sources = [f"[ab]{{{count}}}" for count in range(10, 20)]
    room = 3 * constraint_bytes(sources[0])
    monkeypatch.setattr(structured_output, "MAX_BYTES", room)

    async def use(thread):
        thread.commands.put(gate.wait)
        waiting = []
        for source in sources[:3] + sources[:3]:
            call = collect(thread.generate(GenerateInput([[1]], [SamplingParams(4, regex=source)])))
            waiting.append(asyncio.ensure_future(call))
            while len(thread.generations) < len(waiting) or not all(
                each.matcher for each in thread.generations
            ):
                await asyncio.sleep(0.001)
        assert compiled_bytes() <= room
        with pytest.raises(
            QueueFull, match="^the constraints of waiting and running requests take 0 MB"
        ):
            await collect(
                thread.generate(GenerateInput([[1]], [SamplingParams(4, regex=sources[3])]))
            )
        free = asyncio.ensure_future(
            collect(thread.generate(GenerateInput([[1]], [SamplingParams(4)])))
        )
        gate.set()
        await asyncio.gather(free, *waiting)
        await collect(
            thread.generate(GenerateInput([[1]], [SamplingParams(4)]))
        )  # the last step is forgotten
        return await collect(
            thread.generate(GenerateInput([[1]], [SamplingParams(4, regex=sources[3])]))
        )

    assert run_calls(lambda: small_engine(tiny_llama), use)[0][3] == "length"


def test_a_signal_ends_a_server_whose_engine_is_stuck(tmp_path, monkeypatch):
    from engine.engine import Engine

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
            assert answer.startswith(b"HTTP/1.1 503") and b"the server is shutting down" in answer
            assert server.end()[0] == 128 + signal.SIGTERM
