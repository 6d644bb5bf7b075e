"""Lesson 150: a chat template of one's own. Oracle: transformers, with the same template."""

import json

import pytest
from chats import BOS, CHATML, END, EOS, HEADERS, conversation, theirs
from conftest import is_one_line
from gguf_files import metadata_of, written
from serving import Script

from text.chat import Chat
from text.tokenizer import load_encoding

OTHER = (
    "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{{ eos_token }}{% endfor %}"
)


@pytest.fixture
def other(tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text(OTHER, "utf-8")
    return file


def test_a_template_takes_the_place_of_the_models(cli, write_chat, chat_pair, given_prompts, other):
    arguments = ("--chat", "--prompt", "Tom", "--max-new-tokens", 1, "--chat-template", other)
    known = theirs(chat_pair(OTHER)[1], conversation("Tom"))
    for directory in (write_chat(CHATML), write_chat(HEADERS, as_file=True), write_chat(None)):
        assert cli("--model", directory, *arguments)[0] == 0
    assert given_prompts == [[known]] * 3


def test_the_engine_has_it_too(engine_cli, cli, write_chat, other):
    arguments = ("--model", write_chat(CHATML), "--chat", "--prompt", "Tom", "--temperature", 0)
    arguments += ("--max-new-tokens", 9)
    own, given = (run(*arguments, "--chat-template", other)[:2] for run in (cli, engine_cli))
    assert own == given and own != cli(*arguments)[:2] and own[0] == 0


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
    import serve

    result = run_main(serve.main, "--port", 0, "--model", "random:gpt2", "--chat-template", file)
    assert is_one_line(result, words, str(file))


def test_it_is_for_a_chat(cli, other):
    result = cli("--prompt", "x", "--chat-template", other)
    assert is_one_line(result, "error: --chat-template requires --chat")
