"""Chat templates against transformers', the model's and the user's, and each way to break one."""

import json

import pytest
from chats import AS_OBJECT, BOS, CHATML, CONTROL, END, EOS, HEADERS, LINES, conversation, theirs
from conftest import is_one_line
from gguf_files import metadata_of, written
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving import Script
from transformers import PreTrainedTokenizerFast

import serve
from text.chat import Chat
from text.tokenizer import load_encoding

PARTS = [*"<|>[]/ \n\tab\u00e9\u4f60\U0001f642\U0010fffd"]
PARTS += ["Once", " upon", "im_end", "  ", "INST", "e\u0301"]
harmless = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
chats = st.lists(harmless, min_size=1, max_size=5)


@pytest.mark.parametrize("template", [CHATML, HEADERS, LINES], ids=["chatml", "headers", "lines"])
@settings(max_examples=25)
@given(contents=chats, system=st.none() | harmless)
def test_ids_and_text_equal_transformers(chat_pair, chat_encoding, template, contents, system):
    assume(not any(token in text for token in CONTROL for text in [*contents, system or ""]))
    ours, tokenizer = chat_pair(template)
    messages = conversation(*contents, system=system)
    before = theirs(tokenizer, messages, tokenize=False), theirs(tokenizer, messages)
    made = ours.render(messages), ours.encode(messages, chat_encoding)
    after = theirs(tokenizer, messages, tokenize=False), theirs(tokenizer, messages)
    assert made in (before, after)  # it may be midnight
    assert chat_encoding.decode(made[1]) == made[0]
    assert messages == conversation(*contents, system=system)


NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}]
READ = [  # template, whether it is a file, other fields
    ("{{ bos_token }}file\n", True, {"chat_template": "{{ bos_token }}string"}),
    ("{{ bos_token }}string\n", False, {}),
    (NAMED, False, {}),
    ("{{ bos_token }}-{{ sep_token }}-{{ image_token }}", False, {"sep_token": None}),
    ("{{ eos_token is defined }}", False, {"bos_token": AS_OBJECT, "eos_token": None}),
]


@pytest.mark.parametrize("template, as_file, config", READ)
def test_a_template_is_read_where_transformers_reads_it(write_chat, template, as_file, config):
    directory = write_chat(template, as_file, **config)
    messages = conversation("x")
    expected = theirs(PreTrainedTokenizerFast.from_pretrained(directory), messages, tokenize=False)
    assert Chat(directory).render(messages) == expected


def test_a_byte_order_mark_is_no_text(write_chat):
    directory = write_chat("", as_file=True)
    given = directory / "given.jinja"
    for file in (directory / "chat_template.jinja", given):
        file.write_text("{{ bos_token }}\u00e9", "utf-8-sig")
    for chat in (Chat(directory), Chat(directory, given)):
        assert chat.render([]) == f"{BOS}\u00e9"
    (directory / "tokenizer_config.json").unlink()  # a file alone is a template
    assert Chat(directory).render([]) == "\u00e9"


NOT_FOR_CHAT = (
    "not a chat model: it has neither chat_template.jinja nor a default"
    " chat_template in tokenizer_config.json"
)
BROKEN = {
    "{{ 'x' }": "chat template: unexpected '}'",
    "{% for m in messages %}": "chat template: Unexpected end of template.",
    "{{ 'x' | shout }}": "chat template: No filter named 'shout'",
    "{% nosuch %}": "chat template: Encountered unknown tag 'nosuch'",
    "{{ shout('x') }}": "chat template: 'shout' is undefined",
    "{{ messages[7].content }}": "chat template: list object has no element 7",
    "{{ 'x' + 1 }}": "chat template: can only concatenate str",
    "{{ 1 / 0 }}": "chat template: division by zero",
    "{{ raise_exception('roles must\nalternate') }}": "chat template: roles must alternate",
    "{{ raise_exception('') }}": "chat template: ValueError",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe.",
    "{{ messages.append('x') }}": "access to attribute 'append' of 'list' object is unsafe.",
    "{{ raise_exception('\x1b[2J') }}": "chat template: \\x1b[2J",
    "{{ range(10 ** 9) | list }}": "chat template: Range too big.",
    "{% include 'config.json' %}": "chat template: no loader for this environment specified",
}


def test_a_broken_template_is_one_line(cli, write_chat):
    for template, words in BROKEN.items():
        directory = write_chat(template)
        result = cli("--model", directory, "--chat", "--prompt", "x")
        assert is_one_line(result, words, str(directory))
        assert "{" not in result[2]  # the text of a template may be long


def test_models_that_were_not_made_for_chat_are_one_line(cli, chat_base, write_chat):
    without = [None, 7, [], [{"name": "tool_use", "template": "x"}], ["default"]]
    models = [write_chat(template) for template in [*without, [{"name": "default"}]]]
    for model in (*models, chat_base, "random:gpt2"):
        assert is_one_line(cli("--model", model, "--chat", "--prompt", "x"), NOT_FOR_CHAT)


def test_files_that_cannot_be_read_are_one_line(cli, write_chat):
    directory = write_chat("x", as_file=True)
    ask = ("--model", directory, "--chat", "--prompt", "x")
    (directory / "chat_template.jinja").write_bytes(b"caf\xe9")
    assert is_one_line(cli(*ask), "chat_template.jinja: not UTF-8 text")
    (directory / "tokenizer_config.json").write_text("[]")
    assert is_one_line(cli(*ask), "tokenizer_config.json: not a JSON object")


def test_bad_options_are_one_line(cli, other):
    for arguments, words in (
        (["--system", "x"], "--system requires --chat"),
        (["--chat-template", other, "--prompt", "x"], "error: --chat-template requires --chat"),
        (["--chat", "--system", "caf\udce9", "--prompt", "x"], r"'caf\udce9': not UTF-8 text"),
        (["--chat", "--num-samples", 0], "--num-samples 0: it must be an integer >= 1"),
    ):
        assert is_one_line(cli(*arguments), words)


OTHER = (
    "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{{ eos_token }}{% endfor %}"
)


@pytest.fixture
def other(tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text(OTHER, "utf-8")
    return file


def test_a_template_takes_the_place_of_the_models(
    cli, engine_cli, write_chat, chat_pair, given_prompts, other
):
    arguments = ("--chat", "--prompt", "Tom", "--max-new-tokens", 5, "--chat-template", other)
    known = theirs(chat_pair(OTHER)[1], conversation("Tom"))
    for directory in (write_chat(CHATML), write_chat(HEADERS, as_file=True), write_chat(None)):
        found = cli("--model", directory, *arguments)
    assert given_prompts == [[known]] * 3
    assert found[:2] == engine_cli("--model", directory, *arguments, "--temperature", 0)[:2]


def test_its_tokens_are_those_of_a_gguf_file(write_chat, chat_pair, tmp_path, other):
    raw = json.loads((write_chat(CHATML) / "tokenizer.json").read_text("utf-8"))
    ids = {"bos_token_id": 4096, "eos_token_id": 4098, "padding_token_id": 4095}
    for template in ({}, {"tokenizer.chat_template": CHATML}):
        metadata = metadata_of(raw, "gpt-2", **ids) | template
        chat = Chat(written(tmp_path / "model.gguf", metadata), other)
        assert chat.special_tokens == {"bos_token": BOS, "eos_token": END, "pad_token": EOS}
        known = theirs(chat_pair(OTHER)[1], conversation("Tom", "Hi"), tokenize=False)
        assert chat.render(conversation("Tom", "Hi")) == known


def test_a_server_writes_prompts_with_it(tmp_path, other):
    body = {"messages": conversation("Tom"), "max_tokens": 1}
    with Script(tmp_path, "--model", "checkpoints/stories", "--chat-template", other) as script:
        status, answer = script.client().post("/v1/chat/completions", body)
    ids = load_encoding("checkpoints/stories", 4096).encode("[Tom]")
    assert status == 200 and answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("text, words", [(None, "No such file"), ("{% for %}", "chat template: ")])
def test_a_file_that_is_none_is_one_line(cli, run_main, write_chat, tmp_path, text, words):
    file = tmp_path / "template.jinja"
    if text:
        file.write_text(text)
    arguments = ("--model", write_chat(CHATML), "--chat", "--prompt", "x", "--chat-template", file)
    assert is_one_line(cli(*arguments), words, str(file))
    result = run_main(serve.main, "--port", 0, "--model", "random:gpt2", "--chat-template", file)
    assert is_one_line(result, words, str(file))
