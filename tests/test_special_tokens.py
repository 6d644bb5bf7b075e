"""Special tokens in texts: the server leaves them out, as OpenAI's API and vLLM do."""

import pytest
from chats import CONTROL, END, EOS, START, WITH_TOOLS, tool
from serving import PATH, check_refused, serving, writing

from engine.engine import Engine
from text.chat import Chat

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
IDS = dict(zip(CONTROL, range(4095, 4104)))
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def written(chat_encoding) -> list[int]:
    """Token ids of a text with tokens of all kinds, which <|im_end|> ends."""
    text = f"One{START}user day{EOS}, <tool_call>{{[INST]}}{START}."
    return chat_encoding.encode(text, allowed_special="all") + [IDS[END]]


@pytest.fixture(scope="module")
def client(tiny, write_chat, chat_encoding, written):
    def make():
        model = tiny(vocab_size=4104, block_size=128, eos_token_id=IDS[END])
        return writing(Engine(model, encoding=chat_encoding), written)

    with serving(make, Chat(write_chat(TEMPLATE))) as client:
        yield client


def texts_of(client, fields: dict) -> set[str]:
    found = set()
    for path, asked in ((PATH, {"prompt": "Tom"}), (CHAT, {"messages": MESSAGES})):
        status, answer = client.post(path, {"max_tokens": 64} | asked | fields)
        assert status == 200, answer
        choices = [answer["choices"]]
        events = client.events(path, {"max_tokens": 64, "stream": True} | asked | fields)
        choices.append([event["choices"][0] for event in events])
        for parts in choices:
            texts = [part.get("message") or part.get("delta") or part for part in parts]
            found.add("".join(each.get("text") or each.get("content") or "" for each in texts))
    return found


@pytest.mark.parametrize("said", [{}, {"skip_special_tokens": True}, {"skip_special_tokens": None}])
def test_a_text_leaves_special_tokens_out(client, written, chat_pair, said):
    tokenizer = chat_pair(TEMPLATE)[1]
    expected = tokenizer.decode(written, skip_special_tokens=True)
    assert expected == "Oneuser day, <tool_call>{[INST]}."
    for fields in ({}, {"ignore_eos": True, "max_tokens": len(written)}):
        assert texts_of(client, fields | said) == {expected}


def test_false_shows_them(client, written, chat_encoding):
    whole = chat_encoding.decode(written)
    show = {"skip_special_tokens": False}
    assert texts_of(client, show) == {whole.removesuffix(END)}
    ignoring = {"ignore_eos": True, "max_tokens": len(written)}
    assert texts_of(client, show | ignoring) == {whole}
    check_refused(client.post(PATH, {"skip_special_tokens": "no"}), "skip_special_tokens")


@pytest.mark.parametrize(
    "stop, text",
    [
        (EOS, "Oneuser day"),  # a special token that is looked for is found
        ([START], "One"),
        ([f"{EOS},", "never"], "Oneuser day"),
        ("user day, <", "One"),  # across one that is left out
        ("<tool_call>", "Oneuser day, "),
    ],
)
def test_stop_strings_are_found(client, stop, text):
    assert texts_of(client, {"stop": stop}) == {text}


def test_offsets_count_what_is_shown(client, written, chat_encoding):
    body = {"prompt": "Tom", "max_tokens": 64, "logprobs": 0}
    (choice,) = client.post(PATH, body)[1]["choices"]
    table = choice["logprobs"]
    special = set(chat_encoding.special_token_ids)
    assert special == {*CONTROL} - {"<tool_call>", "[INST]"}
    ends = [*table["text_offset"][1:], len(choice["text"])]
    assert table["tokens"] == [chat_encoding.decode([token]) for token in written]
    for token, start, end in zip(table["tokens"], table["text_offset"], ends):
        assert choice["text"][start:end] == ("" if token in special else token)


def test_what_a_call_is_found_by_is_not_left_out(tiny, write_chat, chat_encoding):
    """Of a template that writes a call after a special token; another one is not shown."""
    template = WITH_TOOLS["hermes"].replace("<tool_call>", "<|start_header_id|>")
    call = '<|start_header_id|>\n{"name": "look", "arguments": {}}\n</tool_call>'
    text = f"Wait.{EOS}{call}{END}"
    ids = chat_encoding.encode(text, allowed_special="all")

    def make():
        model = tiny(vocab_size=4104, block_size=256, eos_token_id=IDS[END])
        return writing(Engine(model, encoding=chat_encoding), ids)

    body = {"messages": MESSAGES, "tools": [tool("look")], "max_tokens": 64}
    with serving(make, Chat(write_chat(template))) as client:
        status, answer = client.post(CHAT, body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert message["content"] == "Wait."
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["look"]
