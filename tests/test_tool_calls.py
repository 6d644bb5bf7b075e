"""Tools in requests, calls in replies. Oracles: the engine alone, jsonschema, OpenAI's client."""

import json
import re

import jsonschema
import pytest
from chats import BARE, CHATML, HERMES, LISTED, NEEDS_SYSTEM, WITH_TOOLS, conversation, tool
from serving import check_refused, official_client, results_of, serving
from test_tools_in_requests import COUNT, LOOK, MESSAGES, PATH, TOOL_RESULT, TOOLS, said

from sampling import SamplingParams
from text.chat import Chat

SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
NAMED = {"type": "function", "function": {"name": "count"}}
FIELDS = [
    {"tool_choice": "required"},
    {"tool_choice": NAMED},
    {"tool_choice": "required", "parallel_tool_calls": False},
]
UNFORCED = [{"logit_bias": {"4102": 7}}, {"tool_choice": "none"}]


@pytest.fixture(scope="module", params=WITH_TOOLS)
def served(request, chat_engine, write_chat):
    """A Client, the chat behind it, and its template."""
    chat = Chat(write_chat(WITH_TOOLS[request.param]))
    with serving(chat_engine, chat) as client:
        yield client, chat, WITH_TOOLS[request.param]


@pytest.fixture(scope="module")
def hermes(chat_engine, write_chat):
    """A Client to a model that calls tools."""
    with serving(chat_engine, Chat(write_chat(HERMES))) as client:
        yield client


def known(engine, chat, fields: dict, seed: int, length: int) -> tuple[str, str]:
    """Text and finish reason of the engine alone."""
    from constraints.vocabulary import get_vocabulary
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


def check_replies(served, chat_engine, fields) -> None:
    """Compare replies with the engine's texts."""
    client, chat, template = served
    called = 0
    forced = fields.get("tool_choice") in ("required", NAMED)
    length = 250 if forced else 60
    for seed in range(3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": length} | fields
        text, reason = known(chat_engine, chat, fields, seed, length)
        (choice,) = client.post(PATH, body)[1]["choices"]
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
    assert called or not forced


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_reply_is_the_text_of_the_engine(served, chat_engine, fields):
    check_replies(served, chat_engine, fields)


@pytest.mark.parametrize("fields", UNFORCED, ids=str)
def test_still_a_reply_without_calls_is_the_text_of_the_engine(served, chat_engine, fields):
    check_replies(served, chat_engine, fields)


def without_ids(message: dict) -> tuple:
    return message["content"] or "", [each["function"] for each in message.get("tool_calls", ())]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_a_call_that_is_cut_says_so(served, chat_engine):
    """Its arguments are told as far as they were written; nothing of it is content."""
    client, chat, template = served
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    for length in range(1, 60, 5):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "max_tokens": length} | fields
        text, reason = known(chat_engine, chat, fields, 5, length)
        (choice,) = client.post(PATH, body)[1]["choices"]
        if reason == "length":
            assert choice["finish_reason"] == "length"
            made = choice["message"].get("tool_calls")
            assert bool(made) == bool(re.search(r'(?:arguments|parameters)": ', text))
            assert text.startswith(choice["message"]["content"] or "")  # the beginning of a call
            assert not made or choice["message"]["content"] is None
            arguments = made[0]["function"]["arguments"] if made else ""
            if arguments and not is_json(arguments):
                assert text.endswith(arguments)


def test_n_replies_have_calls_of_their_own(served):
    client, _, _ = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 3, "seed": 2}
    body |= {"max_tokens": 120, "parallel_tool_calls": False}
    messages = [choice["message"] for choice in client.post(PATH, body)[1]["choices"]]
    ids = [made["id"] for message in messages for made in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) > 0
    for index, message in enumerate(messages):
        alone = client.post(PATH, body | {"n": 1, "seed": 2 + index})[1]["choices"][0]["message"]
        assert without_ids(alone) == without_ids(message)


def test_log_probabilities_are_of_all_tokens(served):
    client, _, template = served
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "seed": 1, "logprobs": True}
    (choice,) = client.post(PATH, body | {"max_tokens": 120})[1]["choices"]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    text = "".join(tokens).removesuffix("<|im_end|>")
    assert same(template, text, choice["message"])


def test_the_official_client_calls_tools(hermes):
    with official_client(hermes) as openai_client:
        completions = openai_client.chat.completions
        messages = list(MESSAGES)
        ask = {"model": "small", "tools": TOOLS, "seed": 1, "parallel_tool_calls": False}
        ask |= {"tool_choice": "required", "max_tokens": 200}
        for turn in range(2):
            reply = completions.create(messages=messages, **ask)
            (made,) = reply.choices[0].message.tool_calls
            jsonschema.validate(json.loads(made.function.arguments), SCHEMAS[made.function.name])
            result = {"role": "tool", "tool_call_id": made.id, "content": json.dumps(turn)}
            messages += [reply.choices[0].message, result]


NOT = tool("f", parameters={"not": {}})
OTHER = {"structured_outputs": {"regex": "a"}}
REFUSED = [  # fields, the one that is named, words of the message
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "none auto required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": NAMED}, "tool_choice", "tools"),
    ({"tools": [LOOK], "tool_choice": NAMED}, "tool_choice", "tool_choice.function.name count"),
    ({"tools": [NOT]}, "tools", "f.parameters.not"),
    ({"tools": TOOLS} | OTHER, "structured_outputs", "tools"),
    ({"tools": TOOLS, "min_tokens": 3, "max_tokens": 9}, "min_tokens", ""),
]


@pytest.mark.parametrize("fields, param, words", REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(served, fields, param, words):
    client, _, _ = served
    body = {"messages": MESSAGES, "max_tokens": 4} | fields
    for stream in (False, True):
        check_refused(client.post(PATH, body | {"stream": stream}), param, words)


def test_a_template_whose_format_is_not_known_is_named(chat_engine, write_chat):
    with serving(chat_engine, Chat(write_chat(CHATML))) as client:
        body = {"messages": MESSAGES, "max_tokens": 1}
        check_refused(client.post(PATH, body | {"tools": TOOLS}), "tools", "chat template")
        body |= {"tool_choice": "auto", "parallel_tool_calls": True}
        for tools in ([], None):
            assert client.post(PATH, body | {"tools": tools})[0] == 200


def test_a_template_may_want_a_system_message(chat_engine, write_chat):
    """Which the conversation has, and no probe of ours has by itself."""
    with serving(chat_engine, Chat(write_chat(NEEDS_SYSTEM))) as client:
        body = {"tools": TOOLS, "max_tokens": 300, "temperature": 1.0, "tool_choice": NAMED}
        messages = conversation("Tom", system="Be kind.")
        (choice,) = client.post(PATH, body | {"messages": messages, "seed": 1})[1]["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "count"
        answer = client.post(PATH, body | {"messages": MESSAGES})
        check_refused(answer, "messages", "a system message first")


def test_a_model_that_reasons_can_be_told_not_to(chat_engine, write_chat):
    """Its replies begin with an empty reasoning then, in new messages and not in old ones."""
    start = "'<|im_start|>assistant\\n' }}"
    empty = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    template = HERMES.replace(start, start + empty)
    assert template != HERMES
    messages = [*said("{}"), TOOL_RESULT | {"tool_call_id": "abcdefghi"}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 9}
    with serving(chat_engine, Chat(write_chat(template))) as client:
        for variables in ({}, {"enable_thinking": False}):
            assert client.post(PATH, body | {"chat_template_kwargs": variables})[0] == 200


def test_still_where_no_tool_may_be_called_another_constraint_may_be_given(hermes):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "seed": 1}
    text = {"response_format": {"type": "text"}, "max_tokens": 9}
    assert hermes.post(PATH, body | text)[0] == 200
    _, found = hermes.post(PATH, body | {"structured_outputs": {"choice": ["Yes.", "No."]}})
    assert found["choices"][0]["message"]["content"] in ("Yes.", "No.")
