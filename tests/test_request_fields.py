"""Fields of requests: those that work, are refused, unknown or too long; limits of answers."""

import functools
import itertools

import pytest
from conftest import count_calls
from pydantic import ValidationError
from serving import (
    ENDLESS,
    IGNORED_FIELDS,
    PATH,
    check_refused,
    engine_alone,
    serving,
    small_encoding,
    small_engine,
)

from server import protocol
from server.protocol import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest, find_lone_surrogate

PARAMS = [
    {"seed": 2**64 - 1, "temperature": 0.5, "top_k": 9},
    {"seed": 3, "top_p": 0.5, "top_k": -1},
    {"seed": 4, "presence_penalty": 2, "frequency_penalty": -1.5},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"seed": 5, "stop": "e"},
    {"seed": 6, "stop": ["the", "an", "o"]},
    {"seed": 7, "ignore_eos": True, "stop": []},
    {"seed": 8, "stop": ["x" * 256] * 16},
]


def text_of(client, body: dict) -> tuple:
    status, found = client.post(PATH, body)
    assert status == 200, found
    return found["choices"][0]["text"], found["choices"][0]["finish_reason"]


def alone(tiny_llama, prompt: str, **params) -> tuple:
    return engine_alone(tiny_llama, prompt, max_new_tokens=40, **params)[1::2]


def test_parameters_are_those_of_the_engine(client, tiny_llama):
    for params in PARAMS:
        body = {"prompt": "Tom saw", "max_tokens": 40} | params
        assert text_of(client, body) == alone(tiny_llama, "Tom saw", **params)
    text, _ = alone(tiny_llama, "Tom", temperature=0)
    for start in range(1, 12):  # a stop string ends a text wherever tokens cut it
        stop = text[start : start + 5]
        body = {"prompt": "Tom", "max_tokens": 40, "temperature": 0, "stop": stop}
        assert text_of(client, body) == (text[: text.index(stop)], "stop")
    seeds = (-1, 2**64 - 1, 0, -(2**63), 2**63)  # modulo 2**64
    texts = [text_of(client, {"prompt": "Tom", "seed": seed}) for seed in seeds]
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4]


NONE = """allowed_token_ids audio chat_template documents guided_choice guided_grammar guided_json
    guided_regex guided_whitespace_pattern logits_processors prompt_embeds prompt_logprobs
    structural_tag thinking_token_budget web_search_options""".split()
FALSE = """continue_final_message include_stop_str_in_output parallel_tool_calls return_token_ids
    return_tokens_as_token_ids use_beam_search""".split()
TRUE = ["add_generation_prompt", "add_special_tokens", "include_reasoning"]
ASKING = {  # field -> what asks for nothing
    **(dict.fromkeys(NONE) | dict.fromkeys(FALSE, False) | dict.fromkeys(TRUE, True)),
    **dict.fromkeys(["bad_words", "functions", "tools"], []),
    **dict.fromkeys(["chat_template_kwargs", "kv_transfer_params", "vllm_xargs"], {}),
    **dict.fromkeys(["function_call", "tool_choice"], "none"),
    **{"suffix": "", "modalities": ["text"], "length_penalty": 1.0},
    "spaces_between_special_tokens": True,
}


def test_what_is_not_supported_is_refused_by_name(client):
    assert ASKING.keys() == UNSUPPORTED_FIELDS.keys()
    assert not UNSUPPORTED_FIELDS.keys() & CompletionRequest.model_fields.keys()
    for fields in (ASKING, dict.fromkeys(ASKING)):
        assert client.post(PATH, {"max_tokens": 1} | fields)[0] == 200
    for field, nothing in ASKING.items():
        other = field != "parallel_tool_calls" and isinstance(nothing, bool)
        something = not nothing if other else {"a": [1]}
        hint = "structured_outputs" if field.startswith("guided_") else ""
        answer = client.post(PATH, {"max_tokens": 1, field: something})
        check_refused(answer, field, f"{field} supported {hint}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_changes_no_text_is_taken_and_named(client, stream):
    known = IGNORED_FIELDS | dict.fromkeys(["think", "enable_thinking"], (False, True))
    known |= {"reasoning_effort": ("none", "low"), "verbosity": ("medium", "low")}
    assert known.keys() == protocol.IGNORED_FIELDS.keys()
    headers = []
    for place in (0, 1):
        fields = {name: values[place] for name, values in known.items()}
        fields |= {"stream_options": {"include_obfuscation": bool(place)}, "stream": stream}
        with client.send("POST", PATH, {"max_tokens": 1} | fields) as answer:
            assert answer.status == 200
            headers.append(answer.headers["X-Ignored-Fields"])
    assert headers == [None, ", ".join([*sorted(known), "stream_options.include_obfuscation"])]


def test_minus_one_is_no_limit_and_an_empty_stop_string_none(client):
    body = {"seed": 1, "ignore_eos": True}
    completion = body | {"prompt": "Tom", "max_tokens": -1}
    assert client.post(PATH, completion)[1]["usage"]["completion_tokens"] == 64
    chat = body | {"messages": [{"role": "user", "content": "Tom"}]}
    replies = [("chat/completions", chat | {name: -1}) for name in ("max_tokens", "seed")]
    replies += [("chat/completions", chat | {"max_completion_tokens": -1})]
    replies += [("responses", body | {"input": "Tom", "max_output_tokens": -1})]
    for value in (True, False):  # a template adds its own anyway
        replies.append(("chat/completions", chat | {"max_tokens": -1, "add_special_tokens": value}))
    for path, asked in replies:
        assert client.post(f"/v1/{path}", asked)[1]["usage"]["total_tokens"] == 64
    body = {"prompt": "Tom", "max_tokens": 9, "seed": 1}
    plain = client.post(PATH, body)[1]["choices"]
    for fields in ({"stop": ""}, {"stop": [""]}, {"stop": ["", "\0"]}, {"model": ""}):
        status, found = client.post(PATH, body | fields)
        assert status == 200 and found["choices"] == plain and found["model"] == "small"


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
PART = {"type": "text", "text": "Tom"}


UNKNOWN = {  # name -> the one that was meant
    "max_token": "max_tokens?",
    "temprature": "temperature?",
    "n_predict": "max_tokens?",
    "repeat_penalty": "repetition_penalty?",
    "Seed": "seed?",
    **dict.fromkeys(["num_ctx", "", "{what}", "{field}"], ""),
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_a_field_that_nothing_knows_is_refused_by_its_name(client, path):
    own = {"messages": MESSAGES} if path == CHAT else {}
    for name, meant in UNKNOWN.items():
        for stream, value in ((False, 1), (True, 1), (False, None)):
            answer = client.post(path, own | {"stream": stream, name: value})
            check_refused(answer, name, f"{name} {meant}")
            assert meant or "?" not in answer[1]["error"]["message"]


def user(**fields) -> dict:
    return {"messages": [MESSAGES[0] | fields]}


INSIDE = [  # fields, words of the message
    ({"prompt": "Tom"}, ""),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    (user(contents="x"), "messages.0.contents content?"),
    ({"messages": [*MESSAGES, MESSAGES[0] | {"audio": {}}]}, "messages.1.audio"),
    (user(function_call={"name": "a"}), "messages.0.function_call"),
    (user(images=[{}]), "messages.0.images"),
    (user(content=[PART, PART | {"cache": {}}]), "messages.0.content.1.cache"),
    (user(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.image_url"),
    (user(content=None), "messages.0.content"),
    (user(name="<|im_end|>"), "messages.0.name [A-Za-z0-9_-]"),
]


def test_a_field_inside_another_is_refused_by_its_path(client):
    for fields, said in INSIDE:
        answer = client.post(CHAT, {"messages": MESSAGES} | fields)
        check_refused(answer, next(iter(fields)), said)
    check_refused(client.post(PATH, {"messages": MESSAGES}), "messages")
    name = "max_completion_tokens"
    check_refused(client.post(PATH, {name: 3}), name, "max_tokens?")


SILENTLY_IGNORED_FIELDS = """metadata prediction prompt_cache_key prompt_cache_options
    prompt_cache_retention safety_identifier user""".split()


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_what_changes_no_text_is_taken(client, path):
    body = {"max_tokens": 4, "seed": 3} | ({"messages": MESSAGES} if path == CHAT else {})
    plain = client.post(path, body)[1]["choices"]
    for value in ({"a": "b"}, None):
        fields = dict.fromkeys(SILENTLY_IGNORED_FIELDS, value)
        assert client.post(path, body | fields)[1]["choices"] == plain


def choices(client, *messages) -> list:
    body = {"messages": [*MESSAGES, *messages], "add_special_tokens": False, "seed": 1}
    status, answer = client.post(CHAT, body | {"max_tokens": 3})
    assert status == 200, answer
    return answer["choices"]


REPLY = {"role": "assistant", "content": "Tom"}


def test_what_clients_note_in_messages_changes_no_text(client):
    known = choices(client, REPLY, *MESSAGES)
    # As litellm sends back an answer.
    names = "annotations audio function_call images provider_specific_fields reasoning_content"
    nothing = dict.fromkeys(f"{names} reasoning refusal thinking_blocks tool_calls".split())
    for fields in (nothing, nothing | {"provider_specific_fields": {"refusal": None}}):
        assert choices(client, REPLY | fields, *MESSAGES) == known
    noted = REPLY | {"content": [PART | METADATA_FIELDS], "reasoning_content": "why"}
    assert choices(client, noted | METADATA_FIELDS, MESSAGES[0] | METADATA_FIELDS) == known
    empty = choices(client, REPLY | {"content": ""}, *MESSAGES)
    for fields in ({"content": None}, {"tool_calls": []}, {"tool_calls": None, "refusal": None}):
        assert choices(client, {"role": "assistant"} | fields, *MESSAGES) == empty
    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatRequest(messages=MESSAGES, tools=[tool | {"cache_control": {"type": "ephemeral"}}])
    assert body.tools == [tool]


NOTED = """annotations cache_control created_at id opts prompt_cache_breakpoint reasoning_details
    thinking_blocks timestamp""".split()
METADATA_FIELDS = dict.fromkeys(NOTED, [{"a": 1}])  # what clients note in messages


RESPONSES = "/v1/responses"
HALF = "a\ud800"  # a lone surrogate: half a letter
FUNCTION = {"type": "function", "name": "f", "parameters": {"a": {"b": {"c": [HALF]}}}}


def called(id: str, arguments: str = "{}", **fields) -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    message = {"role": "assistant", "tool_calls": calls} | fields
    return {"messages": [*MESSAGES, message]}


ESCAPED = '{"a": "\\ud800"}'
HALVES = [
    (PATH, {"prompt": HALF, "echo": True}, "prompt"),
    (PATH, {"prompt": ["Tom", HALF]}, "prompt.1"),
    (PATH, {"stop": ["a", "\udfff"]}, "stop.1"),
    (PATH, {"logit_bias": {HALF: 1}}, "logit_bias"),
    (PATH, {"structured_outputs": {"choice": [HALF]}}, "structured_outputs.choice.0"),
    *((PATH, {name: HALF}, name) for name in ("stop", "user", "model", "cache_salt")),
    (CHAT, user(content=HALF), "messages.0.content"),
    (CHAT, user(content=[PART, PART | {"text": HALF}]), "messages.0.content.1.text"),
    (CHAT, called(HALF), "messages.1.tool_calls.0.id"),
    (CHAT, called("a", ESCAPED), "messages.1.tool_calls.0.function.arguments"),
    (CHAT, called("a", ESCAPED, reasoning=HALF), "messages.1.reasoning"),
    (CHAT, {"tools": [{"a\ud800.b": {"c": HALF}}]}, "tools.0"),
    (CHAT, {"tools": {HALF: 1}}, "tools"),
    (RESPONSES, {"input": [{"role": "user", "content": HALF}]}, "input.0.content"),
    (RESPONSES, {"input": "a", "instructions": HALF}, "instructions"),
    (RESPONSES, {"input": "a", "metadata": {HALF: "a"}}, "metadata"),
    (RESPONSES, {"input": "a", "tools": [FUNCTION]}, "tools.0.parameters.a.b.c"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": HALF}]}, "input.0.call_id"),
]


def test_half_a_letter_is_refused_by_the_path_of_its_field(client):
    for path, fields, field in HALVES:
        needed = {"messages": MESSAGES} if path == CHAT else {}
        for stream in (False, True):
            answer = client.post(path, needed | {"stream": stream} | fields)
            check_refused(answer, field.partition(".")[0], "UTF-8 surrogate")
            assert answer[1]["error"]["message"].startswith(f"{field}: ")
    check_refused(client.post(PATH, b'{"\\ud800": 1}'), "\\ud800", "\\ud800")
    assert client.post(PATH, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')[0] == 200
    deep = functools.reduce(lambda inner, _: {"a": [inner]}, range(900), HALF)
    assert find_lone_surrogate({"b": ["c"], "tools": deep}) == ("tools", "a", 0, "a", 0, "a")
    assert find_lone_surrogate({"b": [["c" * 9, 1, None, True, 1.5]]}) is None


CAT = {"messages": [{"role": "user", "content": "cat"}]}
OBJECT = "JSON object Content-Type: application/json"
STOPS = ["x" * 257, ["x" * 256] * 17, ["", *["x"] * 17], ["x", 1]]
WRONG = [  # body, the field that is named, words of the message
    (b"", None, OBJECT),
    (b"[1]", None, OBJECT),
    (b'{"prompt', None, "JSON Unterminated string"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "3"}, "max_tokens", "integer"),
    ({"max_tokens": -2}, "max_tokens", "-1"),
    ({"temperature": -1}, "temperature", "-1.0 0"),
    ({"top_p": 0}, "top_p", "0.0 (0, 1]"),
    ({"top_k": -2}, "top_k", "-2 0"),
    ({"presence_penalty": 2.1}, "presence_penalty", "2.1 [-2, 2]"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"seed": 2**64}, "seed", f"seed {2**64}"),
    ({"seed": -(2**63) - 1}, "seed", f"seed {-(2**63)}"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    *(({"stop": stop}, "stop", "stop string 16 256") for stop in STOPS),
    (b'{"temperature": NaN}', "temperature", "nan 0"),
    (b'{"prompt": "caf\xe9"}', None, "UTF-8 15"),
    (b"\x1f\x8b\x08\x00", None, "UTF-8 1"),  # compressed
    (b"\xff\xfe{\x00}\x00\x01", None, "UTF-8 6"),  # half a letter of UTF-16
]


def test_a_wrong_body_is_one_short_sentence(client):
    for body, param, said in WRONG:
        check_refused(client.post(PATH, body), param, said)
    # A page of another origin could send it unasked.
    check_refused(client.post(PATH, {}, {"Content-Type": "text/plain"}), None, OBJECT)
    body = b'{"prompt": "Tom", "max_tokens": 3, "seed": 1}'
    status, marked = client.post(PATH, b"\xef\xbb\xbf" + body)  # a mark of byte order
    assert status == 200 and marked["choices"] == client.post(PATH, body)[1]["choices"]
    names = {f"{number:x}": 1 for number in range(80_000)}
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with client.send("POST", PATH, body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300
    for fields in (names, {"x" * 10**6: 1}, {"messages": [CAT["messages"][0] | names]}):
        status, found = client.post(CHAT, CAT | fields)
        assert status == 400 and len(found["error"]["message"]) < 200
        assert "is not a field of this request" in found["error"]["message"]


def test_a_body_has_at_most_a_mebibyte(client):
    """A client that writes more, all of it before it reads, gets the 413."""
    for more in (0, 1, 2**20, 2**22):
        body = b"[" + b" " * (2**20 - 1 + more)
        parts = [body[start : start + 2**18] for start in range(0, len(body), 2**18)]
        for data in (iter(parts), body):
            answer = client.post(PATH, data)
            check_refused(answer, None, "body 1048576" if more else "JSON", 413 if more else 400)
    endless = itertools.repeat(b" " * 2**20, 64)
    with pytest.raises(OSError):
        client.post(PATH, endless)
    assert next(endless)  # it was cut off before all had been sent


MANY = 2**18  # elements, as a body of 1 MiB can have
MESSAGE = {"role": "user", "content": ""}
EMPTY_PART = {"type": "text", "text": ""}


def prompts(value):
    return CompletionRequest.model_validate({"prompt": value})


def stops(value):
    return CompletionRequest.model_validate({"stop": value})


def messages(value):
    return ChatRequest.model_validate({"messages": value})


def chat(content):
    return messages([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "make, value",
    [
        *((prompts, [item] * MANY) for item in ({}, [], [1])),
        *((prompts, [[{}] * MANY]), (prompts, ["a"] + [[]] * MANY), (prompts, [1] + [[]] * MANY)),
        *((chat, [{}] * MANY), (chat, [EMPTY_PART] * MANY), (messages, [MESSAGE] * MANY)),
        (stops, [[]] * MANY),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(make, value):
    """One error, after at most the elements that are allowed: all streams wait meanwhile."""

    def check() -> None:
        with pytest.raises(ValidationError) as refused:
            make(value)
        assert refused.value.error_count() == 1

    assert count_calls(check) < 16 * 2**14 < MANY * 2


@pytest.mark.parametrize(
    "make, item", [(prompts, "a"), (prompts, [1]), (chat, EMPTY_PART), (messages, MESSAGE)]
)
def test_the_longest_lists(make, item):
    make([item] * 2**14)
    with pytest.raises(ValidationError, match=str(2**14)):
        make([item] * (2**14 + 1))
    assert prompts([1] * MANY).prompts == [[1] * MANY]  # one of ids may be longer


@pytest.mark.parametrize(
    "body, texts, count",
    [
        ({}, 1, 0),
        ({"logprobs": 20, "n": 3}, 3, 20),
        ({"prompt": ["a", "b", "c"], "n": 2, "logprobs": 0}, 6, 0),
    ],
)
def test_all_texts_of_a_request_have_a_bound(client, body, texts, count):
    most = 2**22 // (texts * (16 + (64 * (1 + count) if "logprobs" in body else 0)))
    said = f"{most + 1} {texts} {count} {most}"
    asked = {"max_tokens": most + 1}
    for stream in (False, True):
        answer = client.post(PATH, body | asked | {"stream": stream})
        check_refused(answer, "max_tokens", said)
    body = ENDLESS | body | {"max_tokens": most, "stream": True}
    with client.send("POST", PATH, body) as answer:
        assert answer.status == 200
    if "prompt" not in body:
        talk = CAT | asked | {"n": texts, "logprobs": count > 0, "top_logprobs": count}
        check_refused(client.post(CHAT, talk), "max_tokens", said)


def test_what_an_echo_may_repeat(tiny_llama, monkeypatch):
    (word,) = small_encoding().encode(" uncomfortable")
    with serving(lambda: small_engine(tiny_llama), max_waiting=4000) as client:
        asked = {"prompt": [[word] * 60] * 11, "max_tokens": 0, "echo": True}
        said = f"{11 * 128 * 60 * 14} 1048576"
        check_refused(client.post(PATH, asked | {"n": 128}), "echo", said)
        assert not client.thread.generations
        assert client.post(PATH, asked | {"n": 113})[0] == 200
        monkeypatch.setattr(type(small_encoding()), "encode", None)
        for prompt, size in (("x" * 106_000, 106_000 * 128), ("\u20ac" * 2**16, 3 * 2**16 * 128)):
            answer = client.post(PATH, asked | {"prompt": prompt, "n": 128})
            check_refused(answer, "echo", f"{size} 1048576")


def test_a_reply_whose_length_is_not_asked_for_fits_the_answer(client, monkeypatch):
    monkeypatch.setattr("server.protocol.MAX_RESPONSE_BYTES", 3 * 2 * (16 + 6 * 64))
    body = CAT | {"n": 2, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    assert client.post(CHAT, body)[1]["usage"]["completion_tokens"] == 2 * 3
    check_refused(client.post(CHAT, body | {"max_tokens": 4}), "max_tokens", "4 3")
