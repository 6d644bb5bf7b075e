"""Thinking budgets. Oracles: `generate` without one, split strings, the tokens of each part."""

import functools
import json
import re
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
import reasoners
from chats import CHATML, conversation, tool
from conftest import is_one_line
from constrained import letters
from drafting import Scripted
from engines import finish
from pydantic import BaseModel
from reasoners import BRACKETS, QWEN3, R1, rows_of, spelled, thinker_engine, write_thinker
from serving import check_refused, official_client, serving

import serve
import serve_ray
from constraints.compiler import make_matcher
from constraints.matcher import single_allowed_token
from engine.drafter import PromptLookupDrafter
from errors import UserError
from infer_speculative import generate_speculative, propose_prompt_lookup
from loading.load import resolve_source
from sampling import Reasoning, SamplingParams
from server import structured_output
from text.chat import Chat
from text.tokenizer import load_encoding

PATH = "/v1/chat/completions"
ASKED = {"messages": conversation("Tom"), "max_tokens": 60, "seed": 3}
BUDGET = "thinking_token_budget"
OFF = {"enable_thinking": False}
PROMPT = [5, 6, 7, 5, 6]


def count_of(usage: dict) -> int:
    return usage["completion_tokens_details"]["reasoning_tokens"]


def write(client, **fields) -> tuple:
    """Return reasoning, content, finish reason and reasoning tokens; streamed they are the same."""
    status, found = client.post(PATH, ASKED | fields)
    assert status == 200, found
    (choice,) = found["choices"]
    message = choice["message"]
    said = message.get("reasoning_content"), message["content"], choice["finish_reason"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events(PATH, ASKED | fields | {"stream": True, "stream_options": options})
    streamed = reasoners.said(events)[0]
    names = "reasoning_content", "content", "finish_reason"
    assert tuple(streamed.get(name) or None for name in names) == said
    counts = [count_of(event["usage"]) for event in events]
    assert counts == sorted(counts) and counts[-1] == count_of(found["usage"])
    return *said, counts[-1]


ROWS = [*reasoners.COUNTED, (CHATML, "«<think>»a", "", f"«</think>»{reasoners.LAST}")]


@pytest.mark.step(n=1)
@pytest.mark.parametrize("template", dict.fromkeys(each[0] for each in ROWS))
def test_usage_counts_the_tokens_between_the_markers(tiny_llama, write_chat, template):
    directory = write_thinker(write_chat, template)
    encoding = load_encoding(directory, 4104)
    ids = []
    with serving(reasoners.playing(tiny_llama, directory, ids), Chat(directory)) as client:
        for _, *texts in (each for each in ROWS if each[0] == template):
            for one_by_one in (False, True):
                parts = [spelled(encoding, text, one_by_one) for text in texts]
                ids[:] = sum(parts, [])
                assert write(client, max_tokens=len(ids))[3] == len(parts[1]), texts
                found = client.post(PATH, ASKED | {"max_tokens": len(ids), "n": 3})[1]["usage"]
                assert count_of(found) == 3 * len(parts[1])


def thinking(count, budget, end="</think>", **fields) -> SamplingParams:
    options = {"temperature": 1.0, "seed": 4, "ignore_eos": not fields.get("choices")} | fields
    reasoning = Reasoning("<think>", end, True)
    return SamplingParams(count, reasoning=reasoning, thinking_token_budget=budget, **options)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("marker, text", [("</think>", "«</think>»"), ("[/THINK]", "[/THINK]")])
def test_a_budget_forces_the_end_marker_and_nothing_else(tiny_llama, write_chat, marker, text):
    engine = thinker_engine(tiny_llama, write_thinker(write_chat))
    model, encoding = engine.model, engine.encoding
    forced = spelled(encoding, text)
    (free,) = rows_of(model, encoding, [PROMPT], thinking(30, None, marker))
    for budget in (0, 1, 7, 30):
        counts = Counter()
        own = thinking(30, budget, marker)
        (found,) = rows_of(model, encoding, [PROMPT], own, counts=counts)
        until = budget + len(forced)
        assert found[:until] == (free[:budget] + forced)[:30]
        if until < 30:
            then = replace(own, max_new_tokens=30 - until, thinking_token_budget=None)
            assert rows_of(model, encoding, [PROMPT + found[:until]], then) == [found[until:]]
            assert counts["passes"] == 30 - len(forced)  # jump-forward
        own = replace(own, temperature=0.0)
        known = rows_of(model, encoding, [PROMPT], own)
        for draft in (propose_prompt_lookup, model):
            steps = generate_speculative(model, draft, PROMPT, own, encoding=encoding)
            assert [sum((step.tokens for step in steps), [])] == known


@pytest.mark.step(n=2)
def test_an_engine_writes_the_same_with_drafts_and_preempted(tiny_llama, write_chat):
    """Beside rows without a budget. Drafts continue the reasoning past its budget."""
    directory = write_thinker(write_chat)
    params = [thinking(24, budget) for budget in (0, 5, None, 9)]
    params.append(thinking(60, 6, "[/THINK]", choices=("Yes.", "No, he does not.")))
    params += [thinking(60, 3, choices=("Yes.", "No.")), SamplingParams(24, ignore_eos=True)]
    prompts = [[row + 1, 8, 9] for row in range(len(params))]
    engine = thinker_engine(tiny_llama, directory)
    model, encoding = engine.model, engine.encoding
    known = rows_of(model, encoding, prompts, params)
    free = [replace(each, thinking_token_budget=None) for each in params]
    free = rows_of(model, encoding, prompts, free)
    assert known[1][5] == reasoners.END and known[4] != free[4] and reasoners.END not in known[6]

    def propose(request, count):
        row, start = request.tokens[0] - 1, len(request.output)
        coming = free if request.output == free[row][:start] else known
        return coming[row][start : start + count]

    small = {"page_size": 4, "num_pages": 20, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    for drafter in (None, Scripted(propose), PromptLookupDrafter()):
        for options in ({}, small):
            engine = thinker_engine(tiny_llama, directory, drafter=drafter, **options)
            requests = [engine.add(*pair) for pair in zip(prompts, params)]
            finish(engine)
            assert [request.output for request in requests] == known
            assert (engine.scheduler.num_preemptions > 0) == bool(options)
            assert engine.num_accepted_tokens > 0 or not isinstance(drafter, Scripted)


@pytest.mark.step(n=2)
@pytest.mark.parametrize("end, text, count", reasoners.CUT)
def test_a_budget_may_run_out_within_a_character_or_marker(write_chat, end, text, count):
    encoding = load_encoding(write_thinker(write_chat), 4104)
    params = thinking(30, len(text), end, stop=("</think>.",))
    matcher = make_matcher(params, encoding, SimpleNamespace(vocab_size=4104, eos_token_ids=[4098]))
    output = [matcher.vocabulary.ids[bytes([byte])][0] for byte in text]
    while (token := single_allowed_token(matcher.token_mask(output))) is not None:
        output.append(token)
    written = b"".join(map(encoding.decode_single_token_bytes, output))
    assert written == text + end.encode()[len(text) - count :]


@pytest.mark.step(n=2)
def test_a_budget_needs_a_marker_that_it_can_force():
    stops = {"min_tokens": 5, "stop_token_ids": (3,)}
    for end, eos, fields, words in (
        ("cab", [7], stops | {"stop_token_ids": (6,)}, " conflicts with min_tokens"),
        ("abab", [7], stops, " conflicts with min_tokens"),
        ("</think>", [7], {}, ": .*</think>"),
        ("cab", [], {}, ": .*EOS"),
    ):
        config = SimpleNamespace(vocab_size=8, eos_token_ids=eos)
        with pytest.raises(UserError, match=BUDGET + words):
            make_matcher(thinking(30, 3, end, **fields), letters(), config)


class Animal(BaseModel, extra="forbid"):
    legs: Literal[2, 4]


CONSTRAINTS = [
    ({"structured_outputs": {"json": Animal.model_json_schema()}}, r'\{"legs":[24]\}'),
    ({"structured_outputs": {"choice": ["Yes.", "No."]}}, r"Yes\.|No\."),
    ({"structured_outputs": {"regex": r"\n ?[ab]{2}"}}, r"\n ?[ab]{2}"),
]
OPENING, CLOSED = ({"logit_bias": {str(reasoners.THINK): bias}} for bias in (100, -100))


@pytest.mark.step(n=3)
def test_a_server_constrains_the_answer_only(tiny_llama, write_chat, monkeypatch):
    for template, fields in ((R1, {}), (BRACKETS, {}), (QWEN3, OPENING)):
        directory = write_thinker(write_chat, template)
        engine = functools.partial(thinker_engine, tiny_llama, directory)
        with serving(engine, Chat(directory)) as client:
            for constraint, expected in CONSTRAINTS:
                asked = fields | constraint
                reasoning, content, *others = write(client, **asked, **{BUDGET: 9})
                assert reasoning and re.fullmatch(expected, content) and others == ["stop", 9]
                # These weights never end the block.
                assert write(client, **asked)[1:] == (None, "length", 60 - bool(fields))
                shown = asked | {BUDGET: 2, "logprobs": True, "show_allowed": 0, "n": 2}
                for choice in client.post(PATH, ASKED | shown)[1]["choices"]:
                    assert re.fullmatch(expected, choice["message"]["content"])
                for closed in (OFF, CLOSED) if template == QWEN3 else ():
                    found = write(client, **constraint | closed)
                    assert re.fullmatch(expected, found[1]) and not found[0] and not found[3]
            with monkeypatch.context() as patch:  # masks keep their time limit
                patch.setattr(structured_output, "BUDGET_SECONDS", -1)
                found = client.post(PATH, ASKED | asked)
                check_refused(found, "structured_outputs", "too long", code="constraint_failed")


TOOLS = [tool("look", {"far": {"type": "integer", "minimum": 0, "maximum": 9}})]
CALL = '\n[CALL]\n{"name": "look", "arguments": {"far": 1}}\n[/CALL]'


@pytest.mark.step(n=3)
def test_tools_are_called_after_the_block(tiny_llama, write_chat):
    directory = write_thinker(write_chat)
    asked = ASKED | {"tools": TOOLS}
    engine = functools.partial(thinker_engine, tiny_llama, directory)
    with serving(engine, Chat(directory)) as client:
        for fields, count in ((OPENING | {BUDGET: 5}, 5), (OFF, 0)):
            found = client.post(PATH, asked | {"tool_choice": "required"} | fields)[1]
            (call,) = found["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["far"] in range(10)
            assert count_of(found["usage"]) == count
    ids = spelled(
        load_encoding(directory, 4104), f"«<think>»a{CALL}«</think>»\n\nb{CALL}{reasoners.LAST}"
    )
    with serving(reasoners.playing(tiny_llama, directory, ids), Chat(directory)) as client:
        asked |= {"logprobs": True, "max_tokens": len(ids)}  # without jump-forward
        message = client.post(PATH, asked)[1]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("a" + CALL, "b\n")
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"far": 1}


@pytest.mark.step(n=4)
def test_a_request_sets_its_budget_or_gets_the_servers(tiny_llama, write_chat, monkeypatch):
    from server.served import budget_defaults

    directory = write_thinker(write_chat, R1)
    args = SimpleNamespace(chat_template=None, **{BUDGET: 4})
    defaults = budget_defaults(args, resolve_source(directory))
    engine = functools.partial(thinker_engine, tiny_llama, directory)
    with serving(engine, Chat(directory), defaults=defaults) as client:
        assert [write(client, **{BUDGET: n})[3] for n in (None, 7, 0, 99)] == [4, 7, 0, 60]
        with monkeypatch.context() as patch:  # other clients' constraints compile without end
            patch.setattr(structured_output.COMPILER, "timed_out", {Future() for _ in range(4)})
            assert write(client)[3] == 4
            assert client.post(PATH, ASKED | CONSTRAINTS[1][0])[0] == 429
        found = write(client, stop=write(client)[0][2:5])
        assert found[1:3] == (None, "stop") and 0 < found[3] <= 4
        body = {"messages": ASKED["messages"], "response_format": Animal, "model": "small"}
        found = official_client(client).chat.completions.parse(**body, extra_body={BUDGET: 5})
        assert found.choices[0].message.parsed.legs in (2, 4)
        assert found.usage.completion_tokens_details.reasoning_tokens == 5
        found = client.post("/v1/responses", {"input": "Tom", BUDGET: 6})[1]
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}


@pytest.mark.step(n=4)
def test_a_budget_is_refused_or_named_as_ignored(tiny_llama, write_chat):
    asked = {"input": "Tom", "max_output_tokens": 5}
    for template, fields, named in ((CHATML, {}, BUDGET), (QWEN3, OFF, BUDGET), (QWEN3, {}, None)):
        directory = write_thinker(write_chat, template)
        engine = functools.partial(thinker_engine, tiny_llama, directory)
        with serving(engine, Chat(directory)) as client:
            for path, body in ((PATH, ASKED), ("/v1/responses", asked)):
                with client.send("POST", path, body | fields | {BUDGET: 3}) as answer:
                    assert answer.headers["X-Ignored-Fields"] == named
            for value in (-1, 1.5, True, "a"):
                check_refused(client.post(PATH, ASKED | {BUDGET: value}), BUDGET, BUDGET)
            stops = {BUDGET: 3, "min_tokens": 4, "stop_token_ids": [reasoners.END]}
            if named is None:
                check_refused(client.post(PATH, ASKED | stops), BUDGET, "min_tokens")


@pytest.mark.step(n=5)
def test_the_command_line_has_the_option(cli, engine_cli, write_chat, capsys):
    asked = ("--chat", "--prompt", "Tom", "--max-new-tokens", 20, "--temperature", 1, "--seed", 1)
    plain = ("--model", write_thinker(write_chat, CHATML), *asked)
    budget = ("--thinking-budget", 5)
    for template, marker in ((BRACKETS, "[/THINK]"), (R1, "</think>")):
        thinker = ("--model", write_thinker(write_chat, template), *asked)
        free = cli(*thinker)[1]
        for options in ((), ("--regex", "[ab]{3}")):
            _, out, err = cli(*thinker, *options, *budget)
            inside, closed, answer = out.partition(marker)
            assert inside and closed and free.startswith(inside), err
            assert not options or re.fullmatch("[ab]{3}\n", answer)
            assert engine_cli(*thinker, *options, *budget)[1] == out
        assert "truncated 1 of 1 constrained" in cli(*thinker, "--regex", "[ab]{3}")[2]
    for run in (cli, engine_cli):
        assert is_one_line(run(*thinker, *budget[:1], -1), "--thinking-budget -1: must be")
        stops = ("--min-tokens", 3, "--stop-token-id", reasoners.END)
        assert is_one_line(run(*thinker, *budget, *stops), "--thinking-budget conflicts with")
        assert is_one_line(run("--prompt", "a", *budget), "--thinking-budget requires --chat")
        assert is_one_line(run(*plain, *budget), "--thinking-budget: ", "no reasoning block")
    for script in (serve, serve_ray):
        with pytest.raises(SystemExit):
            script.main([*map(str, plain[:2]), "--port", "0", *map(str, budget)])
        assert "no reasoning block" in capsys.readouterr().err
