"""Tools in requests, calls in replies. Oracles: the engine alone, jsonschema, OpenAI's client."""

import json
import re
from types import SimpleNamespace

import jsonschema
import pytest
from chats import (
    BARE,
    CHATML,
    HERMES,
    LISTED,
    NEEDS_SYSTEM,
    WITH_TOOLS,
    call,
    conversation,
    tool,
    tool_grammar,
)
from serving import check_refused, results_of, serving

from sampling import SamplingParams
from server.backend import GenerateInput
from server.chat_completions import ChatCompletionBuilder
from server.engine_thread import Update
from server.protocol import APIError, ChatRequest
from server.served import ServedModel
from text.chat import Chat
from text.tokenizer import load_encoding
from text.tools import detect_tool_format

PATH = "/v1/chat/completions"
MESSAGES = conversation("Tom")
FAR = {"type": "array", "maxItems": 2, "items": {"type": "integer", "maximum": 9, "minimum": 0}}
PLACE = {"place": {"enum": ["sea", 'w"{}\\o\u00e9d']}, "far": FAR}
LOOK = tool("look", PLACE, description="What is there?")
COUNT = tool("count", {"things": {"type": "integer", "minimum": 3, "maximum": 40}})
TOOLS = [LOOK, COUNT]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
NAMED = {"type": "function", "function": {"name": "count"}}
FIELDS = [
    {"tool_choice": "required"},
    {"tool_choice": NAMED},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"logit_bias": {"4102": 7}},
    {"tool_choice": "none"},
]


@pytest.fixture(scope="module", params=WITH_TOOLS)
def served(request, chat_engine, write_chat):
    chat = Chat(write_chat(WITH_TOOLS[request.param]))
    with serving(chat_engine, chat) as client:
        yield client, chat, WITH_TOOLS[request.param]


@pytest.fixture(scope="module")
def hermes(chat_engine, write_chat):
    with serving(chat_engine, Chat(write_chat(HERMES))) as client:
        yield client


def known(engine, chat, fields: dict, seed: int, length: int) -> tuple[str, str]:
    alone = engine()
    choice = fields.get("tool_choice", "auto")
    tools = [COUNT] if choice == NAMED else TOOLS
    parallel = fields.get("parallel_tool_calls", True) and choice != NAMED
    choice = "required" if choice == NAMED else choice
    grammar = tool_grammar(chat.file.parent, tools, choice, parallel)
    biases = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
    options = {"temperature": 1.0, "seed": seed, "tool_grammar": grammar, "logit_bias": biases}
    prompt = chat.with_tools(TOOLS).encode(MESSAGES, alone.encoding)
    (found,) = results_of(alone, [prompt], [SamplingParams(length, **options)])
    return found[1], found[3]


def written(template: str, message: dict) -> str:
    made = [each["function"] for each in message.get("tool_calls", ())]
    said = {HERMES: "arguments", LISTED: "arguments", BARE: "parameters"}[template]
    texts = [f'{{"name": "{each["name"]}", "{said}": {each["arguments"]}' for each in made]
    content = message["content"] or ""
    if template == HERMES:
        return content + "\n".join(f"<tool_call>\n{text}}}\n</tool_call>" for text in texts)
    if template == BARE:
        return content + "".join(f"{text}}}" for text in texts)
    ends = ', "id": "?????????"}'
    return content + (f"<tool_call>[{', '.join(text + ends for text in texts)}]" if texts else "")


def same(template: str, text: str, message: dict) -> bool:
    if template == LISTED:
        text = re.sub('"id": "[a-zA-Z0-9]{9}"', '"id": "?????????"', text)
    return text == written(template, message)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_reply_is_the_text_of_the_engine(served, chat_engine, fields):
    client, chat, template = served
    called = pieces = 0
    forced = fields.get("tool_choice") in ("required", NAMED)
    length = 250 if forced else 60
    for seed in range(3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": length} | fields
        text, reason = known(chat_engine, chat, fields, seed, length)
        (choice,) = client.post(PATH, body)[1]["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        events = client.events(PATH, body | {"stream": True})
        streamed, stream_reason = whole_of(events)
        assert without_ids(streamed) == without_ids(message)
        assert stream_reason == choice["finish_reason"]
        if reason == "length":
            assert choice["finish_reason"] == "length"
            continue
        assert same(template, text, message)
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert message["content"] or (message["content"] is None) == bool(calls)
        for each in calls:
            assert each["type"] == "function" and len(each["id"]) == 9
            arguments = json.loads(each["function"]["arguments"])
            jsonschema.validate(arguments, SCHEMAS[each["function"]["name"]])
        assert len({each["id"] for each in calls}) == len(calls)
        called += len(calls)
        pieces += sum("tool_calls" in event["choices"][0]["delta"] for event in events)
        if "parallel_tool_calls" in fields or fields.get("tool_choice") == NAMED:
            assert len(calls) == 1
        assert not calls or fields.get("tool_choice") != "none"
    assert not forced or pieces > 2 * called > 0  # arguments come in pieces


def whole_of(events: list[dict]) -> tuple[dict, str]:
    message = {"content": None}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert ("role" in delta) == (event is events[0])
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls) and part["function"]["arguments"] == ""
                calls.append({name: part[name] for name in ("id", "type", "function")})
            else:
                assert part["index"] == len(calls) - 1 and part.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message, choice["finish_reason"]


def without_ids(message: dict) -> tuple:
    return message["content"] or "", [each["function"] for each in message.get("tool_calls", ())]


def test_a_call_that_is_cut_says_so(served, chat_engine):
    client, chat, template = served
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    for length in range(1, 60, 5):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "max_tokens": length} | fields
        text, reason = known(chat_engine, chat, fields, 5, length)
        (choice,) = client.post(PATH, body)[1]["choices"]
        message = choice["message"]
        streamed = whole_of(client.events(PATH, body | {"stream": True}))
        assert without_ids(streamed[0]) == without_ids(message)
        assert choice["finish_reason"] == streamed[1]
        if reason != "length":
            continue
        assert choice["finish_reason"] == "length"
        begun = re.search(r'(?:arguments|parameters)": ', text)
        assert bool(message.get("tool_calls")) == bool(begun)
        if begun:
            arguments = message["tool_calls"][0]["function"]["arguments"]
            assert message["content"] is None and text[begun.end() :].startswith(arguments)
        else:
            assert text.startswith(message["content"] or "")  # the beginning of a call


def test_results_go_back(served):
    client, chat, _ = served
    said = call("look", '{"place": "sea", "far": []}', "aB3dE6gH9")
    back = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
    reply = {"role": "assistant", "content": None, "tool_calls": [said | {"index": 0}]}
    parsed = call("look", {"place": "sea", "far": []}, said["id"])
    plain = [*MESSAGES, reply | {"content": "", "tool_calls": [parsed]}, back]
    for tools in (TOOLS, None):
        body = {"messages": [*MESSAGES, reply, back], "tools": tools, "max_tokens": 1}
        status, found = client.post(PATH, body)
        ids = chat.with_tools(tools).encode(plain, client.thread.engine.encoding)
        assert (status, found["usage"]["prompt_tokens"]) == (200, len(ids))


def test_n_replies_have_calls_of_their_own(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 3, "seed": 2}
    body |= {"max_tokens": 120, "parallel_tool_calls": False}
    messages = [choice["message"] for choice in client.post(PATH, body)[1]["choices"]]
    ids = [made["id"] for message in messages for made in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) > 0
    events = client.events(PATH, body | {"stream": True})
    for index, message in enumerate(messages):
        alone = client.post(PATH, body | {"n": 1, "seed": 2 + index})[1]["choices"][0]["message"]
        assert without_ids(alone) == without_ids(message)
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert without_ids(whole_of(own)[0]) == without_ids(message)


def test_log_probabilities_are_of_all_tokens(served):
    client, _, template = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "seed": 1, "logprobs": True}
    (choice,) = client.post(PATH, body | {"max_tokens": 120})[1]["choices"]
    text = "".join(each["token"] for each in choice["logprobs"]["content"])
    assert same(template, text.removesuffix("<|im_end|>"), choice["message"])


def said(arguments) -> list[dict]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call("look", arguments)]}]


def after(*messages) -> dict:
    return {"messages": [*MESSAGES, *messages]}


TOOL_RESULT = {"role": "tool", "content": "x"}
NOT = tool("f", parameters={"not": {}})
OTHER = {"structured_outputs": {"regex": "a"}}
REFUSED = [  # fields, the one that is named, words of the message
    ({"tools": [LOOK, LOOK]}, "tools", "tools.1.function.name look"),
    ({"tools": [LOOK] * 129}, "tools", "128"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": [{}]}, "tools", ""),
    ({"functions": [{"name": "f"}]}, "functions", ""),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "none auto required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": NAMED}, "tool_choice", "tools"),
    ({"tools": [LOOK], "tool_choice": NAMED}, "tool_choice", "tool_choice.function.name count"),
    ({"tools": [NOT]}, "tools", "f.parameters.not"),
    ({"tools": TOOLS} | OTHER, "structured_outputs", "tools"),
    ({"tools": TOOLS, "min_tokens": 3, "max_tokens": 9}, "min_tokens", ""),
    (after({"role": "user", "tool_calls": []}), "messages", "messages.1"),
    (after(MESSAGES[0] | {"tool_calls": [call("f", "{}")]}), "messages", ".tool_calls assistant"),
    (after(MESSAGES[0] | {"tool_call_id": "a"}), "messages", "messages.1.tool_call_id tool"),
    (after(TOOL_RESULT), "messages", "messages.1.tool_call_id tool"),
    (after(TOOL_RESULT | {"tool_call_id": "a"}), "messages", "messages.1.tool_call_id"),
    *(
        ({"messages": said(text)}, "messages", "messages.1.tool_calls.0.function.arguments JSON")
        for text in ("{", "[1]", "[" * 10**5)
    ),
]


@pytest.mark.parametrize("fields, param, words", REFUSED)
def test_what_is_refused(hermes, fields, param, words):
    for stream in (False, True):
        body = {"messages": MESSAGES, "max_tokens": 4, "stream": stream} | fields
        check_refused(hermes.post(PATH, body), param, words)


def test_what_is_too_deep_for_python_is_refused():
    with pytest.raises(APIError, match="^messages") as found:
        with ServedModel.as_api_error(SimpleNamespace(chat=None), "messages"):
            raise RecursionError
    assert (found.value.status, found.value.param) == (400, "messages")


def test_a_template_may_want_a_system_message(chat_engine, write_chat):
    with serving(chat_engine, Chat(write_chat(NEEDS_SYSTEM))) as client:
        body = {"tools": TOOLS, "max_tokens": 300, "temperature": 1.0, "tool_choice": NAMED}
        messages = conversation("Tom", system="Be kind.")
        (choice,) = client.post(PATH, body | {"messages": messages, "seed": 1})[1]["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "count"
        answer = client.post(PATH, body | {"messages": MESSAGES})
        check_refused(answer, "messages", "a system message first")


def test_a_template_without_calls_is_named(chat_engine, write_chat):
    for template in (CHATML, "{{ messages[0].content }}"):
        with serving(chat_engine, Chat(write_chat(template))) as client:
            body = {"messages": MESSAGES, "max_tokens": 1}
            check_refused(client.post(PATH, body | {"tools": TOOLS}), "tools", "chat template")
            messages = [*said("{}"), TOOL_RESULT | {"tool_call_id": "abcdefghi"}]
            check_refused(client.post(PATH, {"messages": messages}), "messages")
            body |= {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True}
            assert client.post(PATH, body)[0] == 200


def test_a_finish_reason_comes_after_all_calls(write_chat):
    directory = write_chat(HERMES)
    tool_format = detect_tool_format(Chat(directory), load_encoding(directory, 4104), (4098,))
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "model": "a"}
    inputs = GenerateInput([[1]], [SamplingParams()])

    def deltas(*texts, reason):
        given = ChatRequest.model_validate(body), None, inputs, None, tool_format
        reply = ChatCompletionBuilder(*given)
        reasons = [None] * (len(texts) - 1) + [reason]
        updates = [Update((1,), *pair) for pair in zip(texts, [()] * len(texts), reasons)]
        return [delta for update in updates for delta in reply.delta(0, update)]

    text = f"Yes{tool_format.begin}count{tool_format.middle}{{}}{tool_format.end}"
    found = deltas(text, reason="stop")
    assert [each["finish_reason"] for each in found] == [None, None, "tool_calls"]
    first, second, last = [each["delta"] for each in found]
    assert (first["role"], first["content"], last) == ("assistant", "Yes", {})
    assert first["tool_calls"][0]["function"] == {"name": "count", "arguments": ""}
    assert second["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    found = deltas("Yes <tool", "_ca", "", reason="length")  # cut in what could begin a call
    assert [each["delta"]["content"] for each in found] == ["Yes ", "", "<tool_ca"]


def test_results_come_in_any_order():
    made = {"role": "assistant", "tool_calls": [call("f", "{}", id) for id in "ab"]}
    a, b = (TOOL_RESULT | {"tool_call_id": id} for id in "ab")
    messages = [*MESSAGES, made, b, a, *MESSAGES, b]
    assert len(ChatRequest.model_validate({"messages": messages}).messages) == 6


def test_where_no_tool_may_be_called_another_constraint_may_be_given(hermes):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "seed": 1}
    _, found = hermes.post(PATH, body | {"structured_outputs": {"choice": ["Yes.", "No."]}})
    assert found["choices"][0]["message"]["content"] in ("Yes.", "No.")
