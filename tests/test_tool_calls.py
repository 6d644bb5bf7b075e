"""Tools in requests, calls in replies. Oracles: the engine alone, jsonschema, OpenAI's client."""

import json
import re
from types import SimpleNamespace

import jsonschema
import pytest
from chats import BARE, CHATML, HERMES, LISTED, NEEDS_SYSTEM, WITH_TOOLS, call, conversation, tool
from serving import refusal, results_of, serving

from sampling import SamplingParams
from server.backend import GenerateInput
from server.protocol import APIError
from server.served import ServedModel
from text.chat import Chat
from text.tokenizer import load_encoding

PATH = "/v1/chat/completions"
MESSAGES = conversation("Tom")
PLACE = {
    "place": {"enum": ["sea", 'w"{}\\o\u00e9d']},
    "far": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "integer", "maximum": 9, "minimum": 0},
    },
}
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


@pytest.fixture(scope="module")
def engine(tiny_llama, write_chat):
    """A function that makes an engine of a random model with the vocabulary of `write_chat`."""
    from engine.engine import Engine

    shape = {"vocab_size": 4104, "block_size": 1280, "bos_token_id": 4096, "eos_token_id": 4098}
    encoding = load_encoding(write_chat(HERMES), 4104)
    return lambda: Engine(tiny_llama(**shape), encoding=encoding)


@pytest.fixture(scope="module", params=WITH_TOOLS)
def served(request, engine, write_chat):
    """A Client, and the chat behind it."""
    chat = Chat(write_chat(WITH_TOOLS[request.param]))
    with serving(engine, chat) as client:
        yield client, chat, WITH_TOOLS[request.param]


def known(engine, chat, fields: dict, seed: int, length: int) -> tuple[str, str]:
    """Text and finish reason of the engine alone."""
    from constraints import get_vocabulary
    from text.tools import build_tool_grammar, detect_tool_format

    alone = engine()
    vocabulary = get_vocabulary(alone.encoding, 4104, (4098,))
    tool_format = detect_tool_format(chat, alone.encoding, (4098,))
    choice = fields.get("tool_choice", "auto")
    tools = [COUNT] if choice == NAMED else TOOLS
    parallel = fields.get("parallel_tool_calls", True) and choice != NAMED
    choice = "required" if choice == NAMED else choice
    grammar = build_tool_grammar(tool_format, tools, vocabulary, choice, parallel)
    biases = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
    options = {"temperature": 1.0, "seed": seed, "tool_grammar": grammar, "logit_bias": biases}
    prompt = chat.with_tools(TOOLS).encode(MESSAGES, alone.encoding)
    (found,) = results_of(alone, [prompt], [SamplingParams(length, **options)])
    return found[1], found[3]


def written(template: str, message: dict) -> str:
    """How a template writes a reply, but for the ids of calls."""
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
def test_a_reply_is_the_text_of_the_engine(served, engine, fields):
    client, chat, template = served
    called = 0
    length = 250 if fields.get("tool_choice") in ("required", NAMED) else 60
    for seed in range(4):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": length} | fields
        text, reason = known(engine, chat, fields, seed, length)
        status, found = client.post(PATH, body)
        assert status == 200, found
        (choice,) = found["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
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
        if "parallel_tool_calls" in fields or fields.get("tool_choice") == NAMED:
            assert len(calls) == 1
        if fields.get("tool_choice") == "none":
            assert not calls
    assert called or fields.get("tool_choice") not in ("required", NAMED)


def whole_of(events: list[dict]) -> tuple[dict, str]:
    """The message and the finish reason that the events of one text amount to."""
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


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_stream_tells_the_same(served, fields):
    client, _, _ = served
    named = pieces = 0
    for seed in range(3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": 120} | fields
        (choice,) = client.post(PATH, body)[1]["choices"]
        events = client.events(PATH, body | {"stream": True})
        message, reason = whole_of(events)
        assert without_ids(message) == without_ids(choice["message"])
        assert reason == choice["finish_reason"]
        for event in events:
            parts = event["choices"][0]["delta"].get("tool_calls", ())
            named += sum("id" in part for part in parts)
            pieces += sum("id" not in part for part in parts)
    assert fields.get("tool_choice") != "required" or pieces > named > 0


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_a_call_that_is_cut_says_so(served, engine):
    """Its arguments are told as far as they were written; nothing of it is content."""
    client, chat, template = served
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    for length in range(1, 60, 3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "max_tokens": length} | fields
        text, reason = known(engine, chat, fields, 5, length)
        (choice,) = client.post(PATH, body)[1]["choices"]
        streamed = whole_of(client.events(PATH, body | {"stream": True}))
        assert without_ids(streamed[0]) == without_ids(choice["message"])
        assert choice["finish_reason"] == streamed[1]
        if reason == "length":
            assert choice["finish_reason"] == "length"
            made = choice["message"].get("tool_calls")
            begun = re.search(r'(?:arguments|parameters)": ', text)
            assert bool(made) == bool(begun)
            assert text.startswith(choice["message"]["content"] or "")  # the beginning of a call
            assert not made or choice["message"]["content"] is None
            arguments = made[0]["function"]["arguments"] if made else ""
            if arguments and not is_json(arguments):
                assert text.endswith(arguments)


def test_results_go_back(served):
    """The prompt has what the template makes of the call and of its result."""
    client, chat, template = served
    said = call("look", '{"place": "sea", "far": []}', "aB3dE6gH9")
    back = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "a ship"}
    reply = {"role": "assistant", "content": None, "tool_calls": [said]}
    parsed = {
        "id": said["id"],
        "type": "function",
        "function": {"name": "look", "arguments": {"place": "sea", "far": []}},
    }
    plain = [*MESSAGES, reply | {"content": "", "tool_calls": [parsed]}, back]
    encoding = client.thread.engine.encoding
    for tools in (TOOLS, None):
        body = {"messages": [*MESSAGES, reply, back], "tools": tools, "max_tokens": 1}
        status, found = client.post(PATH, body)
        assert status == 200, found
        ids = chat.with_tools(tools).encode(plain, encoding)
        assert found["usage"]["prompt_tokens"] == len(ids)
    client.post(
        PATH, body | {"messages": [*MESSAGES, reply | {"tool_calls": [said | {"index": 0}]}, back]}
    )


def test_n_replies_have_calls_of_their_own(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 3, "seed": 2}
    body |= {"max_tokens": 120, "parallel_tool_calls": False}
    choices = client.post(PATH, body)[1]["choices"]
    alone = [
        client.post(PATH, body | {"n": 1, "seed": 2 + row})[1]["choices"][0] for row in range(3)
    ]
    assert [without_ids(each["message"]) for each in choices] == [
        without_ids(each["message"]) for each in alone
    ]
    ids = [made["id"] for each in choices for made in each["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids) > 0
    events = client.events(PATH, body | {"stream": True})
    for index in range(3):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert without_ids(whole_of(own)[0]) == without_ids(choices[index]["message"])


def test_log_probabilities_are_of_all_tokens(served):
    client, _, template = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "seed": 1, "logprobs": True}
    (choice,) = client.post(PATH, body | {"max_tokens": 120})[1]["choices"]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    text = "".join(tokens).removesuffix("<|im_end|>")
    assert same(template, text, choice["message"])


def test_the_official_client_calls_tools(served):
    import openai

    client, _, _ = served
    where = {"base_url": f"http://127.0.0.1:{client.port}/v1", "api_key": "none"}
    with openai.OpenAI(**where, max_retries=0) as openai_client:
        messages = list(MESSAGES)
        ask = {"model": "small", "tools": TOOLS, "seed": 1, "parallel_tool_calls": False}
        for turn in range(2):
            options = ask | {"messages": messages, "tool_choice": "required"}
            reply = openai_client.chat.completions.create(**options, max_tokens=200)
            (made,) = reply.choices[0].message.tool_calls
            jsonschema.validate(json.loads(made.function.arguments), SCHEMAS[made.function.name])
            with openai_client.chat.completions.stream(**options, max_tokens=200) as stream:
                events = list(stream)
                (again,) = stream.get_final_completion().choices[0].message.tool_calls
            assert again.function.arguments == made.function.arguments
            kinds = {event.type for event in events}
            assert "tool_calls.function.arguments.delta" in kinds
            assert "tool_calls.function.arguments.done" in kinds, events
            messages.append(reply.choices[0].message)
            result = {"role": "tool", "tool_call_id": made.id, "content": json.dumps(turn)}
            messages.append(result)


WITHOUT = "this chat template does not support tools"
NONE = "messages.1.tool_call_id is not the id of an earlier tool call"
ONLY = "messages.0.tool_calls is allowed for the role assistant only"
NEEDED = "messages.1.tool_call_id must be set for the role tool, and only for it"
FUNCTION = '{"type": "function", "function": {"name": ...}}'
CHOICE = f"tool_choice: it must be none, auto, required or {FUNCTION}"
OBJECT = "messages.1.tool_calls.0.function.arguments: it must be a JSON object, as a string"


def said(arguments) -> list[dict]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call("look", arguments)]}]


@pytest.mark.parametrize(
    "fields, message, param",
    [
        ({"tools": [LOOK, LOOK]}, "tools.1.function.name: duplicate name look", "tools"),
        ({"tools": [LOOK] * 129}, "tools: it must be a list of 1 to 128 tools", "tools"),
        ({"tools": {}}, "tools: Input should be a valid list", "tools"),
        ({"tools": TOOLS, "tool_choice": "some"}, CHOICE, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice requires tools", "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice requires tools", "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": NAMED},
            "tool_choice.function.name: count is not in tools",
            "tool_choice",
        ),
        (
            {"tools": [tool("f", parameters={"not": {}})]},
            "the keyword 'f.parameters.not' is not supported",
            "tools",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "structured_outputs cannot be combined with tools, unless tool_choice is none",
            "structured_outputs",
        ),
        ({"tools": TOOLS, "min_tokens": 3, "max_tokens": 9}, None, "min_tokens"),
        ({"messages": [MESSAGES[0] | {"tool_calls": [call("f", "{}")]}]}, ONLY, "messages"),
        ({"messages": [*MESSAGES, MESSAGES[0] | {"tool_call_id": "a"}]}, NEEDED, "messages"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, NEEDED, "messages"),
        (
            {"messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
            NONE,
            "messages",
        ),
        ({"messages": said("{")}, OBJECT, "messages"),
        ({"messages": said("[1]")}, OBJECT, "messages"),
        ({"messages": said("[" * 10**5)}, OBJECT, "messages"),
        (
            {"messages": said('{"a": ' + "[" * 900 + "]" * 900 + "}")},
            "",  # too deep for older Pythons, and too long for this model
            "messages",
        ),
    ],
)
def test_what_is_refused(served, fields, message, param):
    client, _, _ = served
    body = {"messages": MESSAGES, "max_tokens": 4} | fields
    for stream in (False, True):
        status, found = client.post(PATH, body | {"stream": stream})
        assert status == 400, found
        assert found["error"]["param"] == param and len(found["error"]["message"]) < 500
        if message:
            assert (status, found) == (400, refusal(message, param))


def test_what_is_too_deep_for_python_is_refused():
    """How deep that is depends on its version."""
    served = SimpleNamespace(chat=None)
    with pytest.raises(APIError, match="^messages: nested too deeply$") as found:
        with ServedModel.as_api_error(served, "messages"):
            raise RecursionError
    assert (found.value.status, found.value.param) == (400, "messages")


def test_a_template_may_want_a_system_message(engine, write_chat):
    """Which the conversation has, and no probe of ours has by itself."""
    chat = Chat(write_chat(NEEDS_SYSTEM))
    with serving(engine, chat) as client:
        body = {"tools": TOOLS, "max_tokens": 300, "temperature": 1.0, "tool_choice": NAMED}
        messages = conversation("Tom", system="Be kind.")
        status, found = client.post(PATH, body | {"messages": messages, "seed": 1})
        assert status == 200, found
        (made,) = found["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "count"
        status, found = client.post(PATH, body | {"messages": MESSAGES})
        assert (status, found) == (
            400,
            refusal("chat template: a system message first", "messages"),
        )


def test_still_refused(served):
    client, _, _ = served
    nothing = [*MESSAGES, {"role": "user", "tool_calls": []}]
    for fields in ({"tools": [{}]}, {"functions": [{"name": "f"}]}, {"messages": nothing}):
        status, found = client.post(PATH, {"messages": MESSAGES} | fields)
        assert status == 400 and found["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("template", [CHATML, "{{ messages[0].content }}"])
def test_a_template_without_calls_is_named(engine, write_chat, template):
    with serving(engine, Chat(write_chat(template))) as client:
        status, found = client.post(PATH, {"messages": MESSAGES, "tools": TOOLS})
        assert status == 400 and found["error"]["param"] == "tools"
        assert found["error"]["message"].startswith("this chat template ")
        messages = [*said("{}"), {"role": "tool", "content": "x", "tool_call_id": "abcdefghi"}]
        status, found = client.post(PATH, {"messages": messages})
        assert status == 400 and found["error"]["param"] == "messages"
        assert client.post(PATH, {"messages": MESSAGES, "tools": [], "max_tokens": 1})[0] == 200
        body = {"messages": MESSAGES, "tools": None, "tool_choice": "auto", "max_tokens": 1}
        assert client.post(PATH, body | {"parallel_tool_calls": True})[0] == 200


def test_a_model_that_reasons_can_be_told_not_to(engine, write_chat):
    """Its replies begin with an empty reasoning then, in new messages and not in old ones."""
    empty = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    template = HERMES.replace(
        "'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n' }}" + empty
    )
    assert template != HERMES
    messages = [*said("{}"), {"role": "tool", "content": "x", "tool_call_id": "abcdefghi"}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 9}
    with serving(engine, Chat(write_chat(template))) as client:
        for variables in ({}, {"enable_thinking": False}):
            status, found = client.post(PATH, body | {"chat_template_kwargs": variables})
            assert status == 200, found


def test_what_arguments_say_is_seen_by_checks():
    """Whether the vocabulary lacks bytes of them, also of escaped characters."""
    from server.protocol import Message

    made = [call("f", '{"a": "\\u00e9"}')]
    message = Message.model_validate({"role": "assistant", "content": "b", "tool_calls": made})
    assert message.text_fields == ["b", '{"a": "\u00e9"}']


def test_a_finish_reason_comes_after_all_calls(write_chat):
    """Also where a whole reply is new at once: clients look for the end of a call after it."""
    from server.chat_completions import ChatCompletionBuilder
    from server.engine_thread import Update
    from server.protocol import ChatRequest
    from text.tools import detect_tool_format

    directory = write_chat(HERMES)
    tool_format = detect_tool_format(Chat(directory), load_encoding(directory, 4104), (4098,))
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "model": "a"}
    body = ChatRequest.model_validate(body)
    inputs = GenerateInput([[1]], [SamplingParams()])
    reply = ChatCompletionBuilder(body, None, inputs, None, tool_format)
    text = f"Yes{tool_format.begin}count{tool_format.middle}{{}}{tool_format.end}"
    deltas = reply.delta(0, Update((1,), text, (), "stop"))
    assert [each["finish_reason"] for each in deltas] == [None, None, "tool_calls"]
    first, second, last = [each["delta"] for each in deltas]
    assert (first["role"], first["content"], last) == ("assistant", "Yes", {})
    assert first["tool_calls"][0]["function"] == {"name": "count", "arguments": ""}
    assert second["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    cut = ChatCompletionBuilder(body, None, inputs, None, tool_format)  # in what could begin a call
    texts = ["Yes <tool", "_ca", ""]
    deltas = [
        delta["delta"]["content"]
        for text, reason in zip(texts, [None, None, "length"])
        for delta in cut.delta(0, Update((1,), text, (), reason))
    ]
    assert deltas == ["Yes ", "", "<tool_ca"]


def test_results_come_in_any_order():
    """Also after other messages, as long as their calls came before."""
    from server.protocol import ChatRequest

    made = [call("f", "{}", id) for id in ("first", "second")]
    results = [
        {"role": "tool", "tool_call_id": id, "content": "x"} for id in ("second", "first", "second")
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": made},
        *results[:2],
        *MESSAGES,
        results[2],
    ]
    assert len(ChatRequest.model_validate({"messages": messages}).messages) == 6


def test_a_text_of_another_form_calls_nothing(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "seed": 1}
    text = {"response_format": {"type": "text"}, "max_tokens": 9}
    assert client.post(PATH, body | text)[0] == 200
    status, found = client.post(PATH, body | {"structured_outputs": {"choice": ["Yes.", "No."]}})
    assert found["choices"][0]["message"]["content"] in ("Yes.", "No.")
