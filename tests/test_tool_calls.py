"""Tools in requests, calls in replies, written and read as the template writes them.

Oracles: transformers, the engine alone, jsonschema.
"""

import itertools
import json
import re
import runpy
from types import SimpleNamespace

import jsonschema
import pytest
from chats import (
    CHATML,
    CONTROL,
    HERMES,
    LISTED,
    NEEDS_SYSTEM,
    WITH_TOOLS,
    call,
    conversation,
    theirs,
    tool,
    tool_grammar,
    used,
)
from conftest import ROOT, is_one_line, refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving import check_refused, results_of, serving
from transformers import PreTrainedTokenizerFast

from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from sampling import SamplingParams
from server.backend import GenerateInput
from server.chat_completions import ChatCompletionBuilder
from server.engine_thread import Update
from server.protocol import APIError, ChatRequest
from server.served import ServedModel
from text.chat import Chat
from text.tokenizer import load_encoding
from text.tools import ToolCallParser, detect_tool_format

PATH = "/v1/chat/completions"
MESSAGES = conversation("Tom")
FAR = {"type": "array", "maxItems": 2, "items": {"type": "integer", "maximum": 9, "minimum": 0}}
PLACE = {"place": {"enum": ["sea", 'w"{}\\o\u00e9d']}, "far": FAR}
LOOK = tool("look", PLACE, description="What is there?")
COUNT = tool("count", {"things": {"type": "integer", "minimum": 3, "maximum": 40}})
TOOLS = [LOOK, COUNT]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
TRIGGER = 4102  # <tool_call>
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
        yield client, chat


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


def format_of(chat, ends=(4098,)):
    return detect_tool_format(chat, load_encoding(chat.file.parent, 4104), ends)


def write(tool_format, text: str, made: list, id: str = "abcdefghi") -> str:
    if not made:
        return text
    said = [name + tool_format.middle + arguments for name, arguments in made]
    reply = text + tool_format.begin + (tool_format.between or "").join(said) + tool_format.end
    return reply.replace("\0" * 9, id)


def same(chat, text: str, message: dict) -> bool:
    """Whether a text is how the template writes this message, but for the ids of calls."""
    text = re.sub('"id": "[a-zA-Z0-9]{9}"', '"id": "abcdefghi"', text)
    made = [each["function"] for each in message.get("tool_calls", ())]
    calls = [(each["name"], each["arguments"]) for each in made]
    return text == write(format_of(chat), message["content"] or "", calls)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_reply_is_the_text_of_the_engine(served, chat_engine, fields):
    client, chat = served
    called = pieces = 0
    forced = fields.get("tool_choice") in ("required", NAMED)
    length = 250 if forced else 60
    for seed in range(3):
        body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "max_tokens": length} | fields
        text, reason = known(chat_engine, chat, fields, seed, length)
        (choice,) = client.post(PATH, body | {"logprobs": True})[1]["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        events = client.events(PATH, body | {"stream": True})
        streamed, stream_reason = whole_of(events)
        assert without_ids(streamed) == without_ids(message)
        assert stream_reason == choice["finish_reason"]
        assert not calls or fields.get("tool_choice") != "none"
        if reason == "length":
            assert choice["finish_reason"] == "length"
            continue
        assert same(chat, text, message)
        data = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
        assert data.decode().removesuffix("<|im_end|>") == text
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
    client, chat = served
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
    client, chat = served
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
    client, _ = served
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


def said(arguments) -> list[dict]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call("look", arguments)]}]


def after(*messages) -> dict:
    return {"messages": [*MESSAGES, *messages]}


TOOL_RESULT = {"role": "tool", "content": "x"}
REFUSED = [  # fields, the one that is named, words of the message
    ({"tools": [LOOK, LOOK]}, "tools", "tools.1.function.name look"),
    ({"tools": [LOOK] * 129}, "tools", "128"),
    ({"tools": {}}, "tools", "list"),
    ({"functions": [{"name": "f"}]}, "functions", ""),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "none auto required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": NAMED}, "tool_choice", "tools"),
    ({"tools": [LOOK], "tool_choice": NAMED}, "tool_choice", "tool_choice.function.name count"),
    ({"tools": [tool("f", parameters={"not": {}})]}, "tools", "f.parameters.not"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "tools"),
    ({"tools": TOOLS, "min_tokens": 3, "max_tokens": 9}, "min_tokens", ""),
    (after(MESSAGES[0] | {"tool_calls": [call("f", "{}")]}), "messages", ".tool_calls assistant"),
    (after(MESSAGES[0] | {"tool_call_id": "a"}), "messages", "messages.1.tool_call_id tool"),
    (after(TOOL_RESULT), "messages", "messages.1.tool_call_id tool"),
    (after(TOOL_RESULT | {"tool_call_id": "a"}), "messages", "messages.1.tool_call_id"),
    *(
        ({"messages": said(text)}, "messages", "messages.1.tool_calls.0.function.arguments JSON")
        for text in ("{", "[1]", "[" * 10**5)
    ),
]


def test_what_is_refused(hermes):
    for fields, param, words in REFUSED:
        for stream in (False, True):
            body = {"messages": MESSAGES, "max_tokens": 4, "stream": stream} | fields
            check_refused(hermes.post(PATH, body), param, words)
    with pytest.raises(APIError, match="^messages") as found:
        with ServedModel.as_api_error(SimpleNamespace(chat=None), "messages"):
            raise RecursionError
    assert (found.value.status, found.value.param) == (400, "messages")
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "seed": 1}
    _, found = hermes.post(PATH, body | {"structured_outputs": {"choice": ["Yes.", "No."]}})
    assert found["choices"][0]["message"]["content"] in ("Yes.", "No.")


def test_a_template_without_calls_is_named_and_one_may_want_a_system_message(
    chat_engine, write_chat
):
    for template in (CHATML, "{{ messages[0].content }}"):
        with serving(chat_engine, Chat(write_chat(template))) as client:
            body = {"messages": MESSAGES, "max_tokens": 1}
            check_refused(client.post(PATH, body | {"tools": TOOLS}), "tools", "chat template")
            messages = [*said("{}"), TOOL_RESULT | {"tool_call_id": "abcdefghi"}]
            check_refused(client.post(PATH, {"messages": messages}), "messages")
            body |= {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True}
            assert client.post(PATH, body)[0] == 200
    with serving(chat_engine, Chat(write_chat(NEEDS_SYSTEM))) as client:
        body = {"tools": TOOLS, "max_tokens": 300, "temperature": 1.0, "tool_choice": NAMED}
        messages = conversation("Tom", system="Be kind.")
        (choice,) = client.post(PATH, body | {"messages": messages, "seed": 1})[1]["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "count"
        answer = client.post(PATH, body | {"messages": MESSAGES})
        check_refused(answer, "messages", "a system message first")


def test_a_finish_reason_comes_after_all_calls(write_chat):
    tool_format = format_of(Chat(write_chat(HERMES)))
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
    """Also after other messages, as long as their calls came before."""
    made = {"role": "assistant", "tool_calls": [call("f", '{"a": "\\u00e9"}', id) for id in "ab"]}
    a, b = (TOOL_RESULT | {"tool_call_id": id} for id in "ab")
    found = ChatRequest.model_validate({"messages": [*MESSAGES, made, b, a, *MESSAGES, b]}).messages
    assert len(found) == 6
    assert found[1].text_fields[-2:] == ['{"a": "\u00e9"}'] * 2  # for checks of the vocabulary


def matcher_of(directory, choice="auto"):
    vocabulary = get_vocabulary(load_encoding(directory, 4104), 4104, (4098,))
    return Grammar("tool_grammar", tool_grammar(directory, TOOLS, choice), vocabulary).matcher()


@pytest.mark.parametrize("template", WITH_TOOLS.values(), ids=WITH_TOOLS)
def test_the_format_is_what_transformers_writes(chat_pair, template):
    ours, tokenizer = chat_pair(template)
    tool_format = format_of(ours)
    asked = conversation("Tom")
    before = theirs(tokenizer, asked, tokenize=False)
    for number in (1, 2, 3) if tool_format.between else (1,):
        said = [{"a": 'x"}', "b": [number, {}]}, {}, {"\u00e9": None}][:number]
        calls = [call(f"f-{number}", arguments, "id0123456") for arguments in said]
        messages = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        known = tokenizer.apply_chat_template(messages, tokenize=False)
        own = [(f"f-{number}", json.dumps(each, ensure_ascii=False)) for each in said]
        text = write(tool_format, "", own, "id0123456")
        assert before + text + "<|im_end|>" == known.rstrip("\n")


NEEDING = HERMES.replace("{%- if tools %}", "{%- if true %}")  # as NousResearch's Hermes 3
SWITCHED = HERMES.replace(  # as Qwen3
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}{{- '' if thinking else '<think>\\n\\n</think>\\n\\n' }}",
)
OPENED = HERMES.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")  # as QwQ


@pytest.mark.parametrize(
    "template, tools",
    [*itertools.product((SWITCHED, OPENED, LISTED), (None, TOOLS)), (NEEDING, TOOLS)],
)
def test_the_format_is_the_same(write_chat, template, tools):
    known = LISTED if template == LISTED else HERMES
    tool_formats = [
        format_of(Chat(write_chat(each)).with_tools(tools), ends)
        for each, ends in ((template, (4098,)), (known, (4098,)), (known, (4097, 4098)))
    ]
    assert len(set(tool_formats)) == 1  # the first EOS counts


def test_a_format_has_no_result_no_numbers_and_the_separators_of_its_template(write_chat):
    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}"
    inside = HERMES.replace(
        end,
        "{%- if not message.tool_calls %}{{- '<|im_end|>' }}{%- endif %}"
        "\n    {%- elif message.role == 'tool' %}",
    ).replace("'<|im_start|>user\\n<tool_response>", "'<tool_response>")
    assert "chat template" in refused(format_of, Chat(write_chat(inside)))
    start = """<tool_call>\\n{"name": "'"""
    numbered = """<tool_call>\\n{"id": ' + loop.index | string + ', "name": "'"""
    tool_format = format_of(Chat(write_chat(HERMES.replace(start, numbered))))
    assert tool_format.between is None and tool_format.begin == '<tool_call>\n{"id": 1, "name": "'
    dense = HERMES.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
    directory = write_chat(dense)
    matcher = matcher_of(directory, "required")
    for blank in ("", " "):
        arguments = f'{{"place":{blank}"sea","far":{blank}[]}}'
        text = f'\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        tokens = [TRIGGER, *load_encoding(directory, 4104).encode_ordinary(text)]
        taken = [matcher.token_mask(tokens[:size])[tokens[size]] for size in range(len(tokens))]
        assert all(taken) == (blank == "")


@pytest.mark.parametrize("template", [HERMES, LISTED], ids=["hermes", "listed"])
def test_a_token_is_no_text(write_chat, template):
    directory = write_chat(template)
    encoding = load_encoding(directory, 4104)
    matcher = matcher_of(directory)
    added = [*range(4095, 4098), *range(4099, 4104)]
    assert matcher.token_mask([])[added].all() and matcher.token_mask([4096, 4096])[added].all()
    letters = encoding.encode_ordinary("x <tool_call")
    after = matcher.token_mask(letters)
    assert not after[encoding.encode_single_token(">")] and after[TRIGGER]
    assert matcher.token_mask([*letters, TRIGGER]).sum() == 1
    begun = '{"name": "look", "arguments": {"place": "'
    begun = encoding.encode_ordinary("\n" + begun if template == HERMES else "[" + begun)
    assert not matcher.token_mask([*letters, TRIGGER, *begun])[added].any()
    assert matcher_of(directory, "required").token_mask([]).nonzero().tolist() == [[TRIGGER]]


def arguments_of(tmp_path, model, tools=TOOLS) -> tuple:
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    words = ("--chat", "--prompt", "x", "--tools", tmp_path / "tools.json")
    return ("--model", model, *words)


def test_the_scripts_hold_replies_to_calls(cli, engine_cli, write_chat, tmp_path):
    arguments = arguments_of(tmp_path, write_chat(HERMES))
    arguments += ("--max-new-tokens", 110, "--logit-bias", f"{TRIGGER}=100")
    code, out, err = cli(*arguments)
    assert code == 0, err
    line = r'<tool_call>\n\{"name": "\w+", "arguments": .*\n</tool_call>\n'
    assert re.fullmatch(f"({line})+", out)
    assert engine_cli(*arguments, "--temperature", 0)[:2] == (code, out)


STRANGE = HERMES.replace('{"name": "', "call ").replace('", "arguments": ', " ")
DEAF = HERMES.replace("<tool_response>\\n' + message.content }}", "<tool_response>\\n' }}")
ONE_WORD = HERMES.replace('", "arguments": \'', "_'")  # where does a name end?


def test_what_cannot_be_held_is_one_line(cli, write_chat, tmp_path):
    for strange in (STRANGE, CHATML, DEAF, ONE_WORD):
        found = cli(*arguments_of(tmp_path, write_chat(strange)))
        assert is_one_line(found, "tokenizer_config.json: ", "chat template")
    arguments = arguments_of(tmp_path, write_chat(HERMES))
    assert is_one_line(cli(*arguments, "--regex", "a"), "regex", "tool_grammar")
    assert is_one_line(cli(*arguments, "--num-beams", 2), "--num-beams", "--tools")
    for field, words in (
        ({"type": "nummer"}, "Invalid type: nummer"),
        ({"$ref": "#/$defs/b"}, "Pointer '/$defs/b' does not exist"),
        ({"pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
    ):
        tools = [LOOK, tool("find-it", parameters={"properties": {"a": field}}), COUNT]
        code, out, err = cli(*arguments_of(tmp_path, write_chat(HERMES), tools))
        note, error = err.splitlines(keepends=True)
        assert (code, out, note[:39]) == (2, "", "note: the prompt exceeds the context wi")
        assert error.endswith(f"error: tools: find-it: failed to compile JSON schema: {words}\n")


def test_parameters_that_are_not_done(write_chat):
    many = {f"p{number}": {"type": "integer"} for number in range(10)}
    tools = [tool(f"f{number}", many) for number in range(120)]
    assert "1,000 schemas" in refused(tool_grammar, write_chat(HERMES), tools)
    tools = [tool("f", {"a": {"description": "x" * 2**18}})]
    assert "262," in refused(tool_grammar, write_chat(HERMES), tools)
    for schema, words in (
        ({"type": "string"}, "f.parameters.type 'string'"),
        ({"not": {}}, "'f.parameters.not'"),
        ({"properties": 1}, "f.parameters.properties 1"),
        ({"x-guidance": {}}, "'f.parameters.x-guidance'"),
    ):
        tools = [LOOK, {"type": "function", "function": {"name": "f", "parameters": schema}}]
        assert words in refused(tool_grammar, write_chat(HERMES), tools)


words = st.text(st.sampled_from('ab"\\{}[]<>_/ \n\u00e9:,toolcall'), max_size=8)
objects = st.dictionaries(words, st.lists(words | st.integers(), max_size=2) | words, max_size=3)
arguments = objects.map(lambda value: json.dumps(value, ensure_ascii=False))
made_calls = st.lists(st.tuples(st.sampled_from(["a", "look_up-2"]), arguments), max_size=3)


def parse(tool_format, pieces: list[str]) -> tuple:
    parser = ToolCallParser(tool_format)
    content = ""
    made = []
    for piece in pieces:
        new, parts = parser.add(piece)
        content += new
        for part in parts:
            if part.name is not None:
                assert part.index == len(made)
                made.append([part.name, ""])
            made[part.index][1] += part.arguments
    return content + parser.end(), made, parser.is_complete


@pytest.fixture(scope="module")
def tool_formats(write_chat):
    return [format_of(Chat(write_chat(template))) for template in WITH_TOOLS.values()]


@settings(max_examples=100)
@given(text=words, made=made_calls, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_reply_is_read_however_it_is_cut(tool_formats, text, made, cuts):
    for tool_format in tool_formats:
        own = made if tool_format.between else made[:1]
        reply = write(tool_format, text, own)
        places = sorted({min(cut, len(reply)) for cut in cuts} | {0, len(reply)})
        pieces = [reply[start:end] for start, end in zip(places, places[1:])]
        content, found, is_complete = parse(tool_format, pieces)
        assert content == text and is_complete == bool(own)
        assert [(name, said) for name, said in found] == own
        # One that ends early is told as far as it goes.
        begun = reply[: places[len(places) // 2]]
        content, found, is_complete = parse(tool_format, list(begun))
        assert content == text[: len(content)] or tool_format.trigger not in begun
        assert is_complete == (begun == reply and bool(own))
        for (name, said), known in zip(found, own):
            assert name == known[0]
            assert known[1].startswith(said)


PARTS = [*'<|>[]/ \n\t"\\\u00e9\U0001f642', "im_end", "tool_call", "INST", "Tom"]
texts = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


@settings(max_examples=25)
@given(word=texts, key=texts, result=texts)
def test_ids_and_text_equal_transformers(chat_pair, chat_encoding, word, key, result):
    assume(not any(token in text for token in CONTROL for text in (word, key, result)))
    tools = [tool("look", {key: {"enum": [word]}}, description=word), COUNT]
    messages = used(word, {key: [word, 1]}, result) + conversation(word, word, word)[1:]
    for template in WITH_TOOLS.values():
        ours, tokenizer = chat_pair(template)
        chat = ours.with_tools(tools)
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, tools=tools)
        assert chat.encode(messages, chat_encoding) == theirs(tokenizer, messages, tools=tools)
        assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)  # as it was


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_for_tools_in_a_file_of_its_own(write_chat, default):
    directory = write_chat(CHATML, as_file=default == "chat_template.jinja")
    folder = directory / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("no")
    messages = used("Tom", {"place": "sea"}, "a ship")
    assert "<tools>" not in Chat(directory).with_tools(TOOLS).render(messages)
    (folder / "tool_use.jinja").write_text("\ufeff" + HERMES, "utf-8")
    (directory / "chat_template.jinja").write_text(CHATML)  # else transformers has no default
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    known = [theirs(tokenizer, messages, tokenize=False, tools=tools) for tools in (TOOLS, None)]
    if default == "tokenizer_config.json":
        (directory / "chat_template.jinja").unlink()
    made = [Chat(directory).with_tools(tools).render(messages) for tools in (TOOLS, None)]
    assert made == [each.removeprefix("\ufeff") for each in known]  # transformers keeps it
    given = directory / "given.jinja"
    given.write_text(HERMES.replace("Tools:", "Given:"))
    assert "Given:" in Chat(directory, given).with_tools(TOOLS).render(messages)
    (folder / "tool_use.jinja").write_text("{% for %}")
    line = refused(Chat(directory).with_tools, TOOLS)
    assert "additional_chat_templates/tool_use.jinja: chat template: Expected an expr" in line


NEEDS_TEXT = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('say something') }}"
    "{% endif %}{% endfor %}" + HERMES
)
# In the form of Command R+: a tool and all its parameters have descriptions.
DESCRIBED = HERMES.replace(
    "{{- '\\n' + (tool | tojson) }}",
    "{{- '\\n' + tool.function.name + ': ' + tool.function.description }}"
    "{%- for name, field in tool.function.parameters.properties | items %}"
    "{{- ' ' + name + ': ' + field.description }}"
    "{{- ' needed' if name in tool.function.parameters.required }}{%- endfor %}",
)
LATER = HERMES.replace("{%- if tools %}", "{%- if tools and messages | length > 3 %}")
WHERE = {"place": {"type": "string", "description": "where"}}
WANTING = [
    (NEEDS_SYSTEM, TOOLS, conversation("Tom", system="Be kind.")),
    (NEEDS_TEXT, TOOLS, conversation("Tom")),
    (DESCRIBED, [tool("look", WHERE, description="")], conversation("Tom")),
    (LATER, TOOLS, conversation("Tom", "Yes", "Tom", "No", "Tom")),
]


def test_tools_are_tried_as_the_user_has_them(chat_pair, chat_encoding):
    for template, tools, messages in WANTING:
        ours, tokenizer = chat_pair(template)
        chat = ours.with_tools(tools, messages)
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, tools=tools)
        tool_format = detect_tool_format(chat, chat_encoding, (4098,))
        hermes = chat_pair(HERMES)[0].with_tools(tools)
        known = detect_tool_format(hermes, chat_encoding, (4098,))
        assert tool_format._replace(begin=tool_format.begin.lstrip()) == known
    line = refused(chat_pair(DESCRIBED)[0].with_tools, [COUNT], conversation("Tom"))
    assert line.endswith("'dict object' has no attribute 'description'"), line


def test_a_template_that_has_a_place_for_some_tools_is_refused(chat_pair):
    some = HERMES.replace("for tool in tools", "for tool in tools[:1]")
    ours = chat_pair(some)[0]
    assert ours.with_tools(TOOLS[:1])
    assert "this chat template does not support tools" in refused(ours.with_tools, TOOLS)


def test_the_command_line_shows_the_tools(cli, write_chat, chat_pair, given_prompts, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    arguments = ("--chat", "--prompt", "Tom", "--max-new-tokens", 1, "--tools", file)
    assert cli("--model", write_chat(HERMES), *arguments)[0] == 0
    assert given_prompts == [[theirs(chat_pair(HERMES)[1], conversation("Tom"), tools=TOOLS)]]
    result = cli("--model", write_chat("{{ messages[0].content }}"), *arguments)
    assert is_one_line(result, "tokenizer_config.json: this chat template does not support tools")
    assert is_one_line(cli("--prompt", "x", "--tools", file), "error: --tools requires --chat")


FUNCTION = {"name": "look"}
NUMBER = "tools: must be a list of 1 to 128 tools"
WRONG = [
    ("[", "tools: not JSON: Expecting value"),
    *(({}, NUMBER), ([], NUMBER), ([LOOK] * 129, NUMBER)),
    ([LOOK, LOOK], "tools.1.function.name: duplicate name look"),
    ([LOOK, 1], "tools.1: must be {"),
    ([FUNCTION], "tools.0: must be {"),
    ([{"type": "web_search", "function": FUNCTION}], "tools.0: must be {"),
    ([{"type": "function", "function": FUNCTION, "strict": True}], "tools.0: must be {"),
    ([{"type": "function", "function": {}}], "tools.0.function.name: must be a string"),
    ([tool("look at")], "tools.0.function.name 'look at': must be 1 to 64 letters, digits"),
    ([tool("a" * 65)], "aaa': must be 1 to 64 letters"),
    ([tool("a", strict=1)], "tools.0.function.strict: must be true or false"),
    ([tool("a", parameters=[])], "tools.0.function.parameters: must be an object, a JSON"),
    ([tool("a", arguments={})], "tools.0.function: unknown field 'arguments'; known are name"),
]


def test_what_no_tool_is_is_one_line(cli, write_chat, tmp_path):
    file = tmp_path / "tools.json"
    arguments = ("--model", write_chat(HERMES), "--chat", "--prompt", "x", "--tools", file)
    for tools, words in WRONG:
        file.write_text(tools if isinstance(tools, str) else json.dumps(tools))
        assert is_one_line(cli(*arguments), words)


def test_the_adapters_training_script_renders_its_template(capsys):
    script = runpy.run_path(str(ROOT / "checkpoints/train_tools.py"))
    script["main"](["--out", "unused", "--show", "1"])
    assert "<tool_call>" in capsys.readouterr().out
