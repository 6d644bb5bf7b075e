"""Lesson 113: what ends a text, and the chat template, in a GGUF file."""

import json

import pytest
from chats import BOS, CHATML, END, EOS, HEADERS, HERMES, control_ids, conversation, theirs, tool
from conftest import refused
from gguf_files import NORMAL, OWNER, edited, metadata_of, written
from test_any_bpe import TOOL
from test_tokenizer import MERGES, tokenizer_json

from benchmarks.export_gguf import write_gguf
from errors import UserError
from loading.load import load_config, load_model
from text.chat import Chat
from text.tokenizer import load_encoding


def test_all_that_ends_a_text(tiny, tmp_path):
    """The keys, in their order; then control tokens that are known to."""
    names = ["<|im_end|>", EOS, "<|eom_id|>", "</s>", "<|eot_id|>", "<tool>", "<|end_of_text|>"]
    metadata = metadata_of(tokenizer_json(MERGES, tuple(names)), "gpt-2")
    first = metadata[f"{OWNER}.tokens"].index(names[0])
    ids = {name: first + at for at, name in enumerate(names)}
    metadata[f"{OWNER}.token_type"][ids["</s>"]] = NORMAL
    write_gguf(
        tiny(vocab_size=first + 7, eos_token_ids=(1,)).float(), tmp_path / "m.gguf", "float32"
    )
    gone = dict.fromkeys([f"{OWNER}.eos_token_id", f"{OWNER}.bos_token_id", f"{OWNER}.vocab_size"])

    def ends(**keys) -> list[int]:
        about = gone | metadata | {f"{OWNER}.{key}_token_id": ids[keys[key]] for key in keys}
        return load_config(
            edited(tmp_path / "m.gguf", tmp_path / "n.gguf", values=about)
        ).eos_token_ids

    known = [ids[name] for name in ("<|im_end|>", EOS, "<|eom_id|>", "<|eot_id|>")]
    known = (*known, ids["<|end_of_text|>"])
    assert ends() == known
    assert ends(eos="<tool>") == (ids["<tool>"], *known)
    three = ["<|eot_id|>", "<tool>", "</s>"]
    others = [token for token in known if token != ids["<|eot_id|>"]]
    assert ends(eos=three[0], eot=three[1], eom=three[2]) == (*map(ids.get, three), *others)


def test_a_conversation_is_what_transformers_makes_of_it(write_chat, chat_pair, tmp_path):
    template = HEADERS
    directory = write_chat(template)
    raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    ids = {"bos_token_id": 4096, "eos_token_id": 4098, "padding_token_id": 4095}
    metadata = metadata_of(raw, "gpt-2", **ids) | {"tokenizer.chat_template": template}
    file = written(tmp_path / "model.gguf", metadata)
    encoding = load_encoding(file, 4104)
    tokenizer = chat_pair(template)[1]
    chat = Chat(file)
    assert chat.special_tokens == {"bos_token": BOS, "eos_token": END, "pad_token": EOS}
    for messages in (
        conversation("Tom?"),
        conversation("Tom?", "Yes.\n", " Lily  12", system="Hi <|im_start|>."),
    ):
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False)
        assert chat.encode(messages, encoding) == Chat(directory).encode(
            messages, load_encoding(directory, 4104)
        )
    messages = conversation("One", "Two", "Three", system="Four")
    assert chat.encode(messages, encoding) == theirs(tokenizer, messages)
    assert control_ids(chat.encode(conversation(END + TOOL), encoding)) == control_ids(
        chat.encode(conversation("x"), encoding)
    )


def test_a_file_may_have_another_template_for_tools(write_chat, tmp_path):
    directory = write_chat(
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    )
    file = tmp_path / "model.gguf"
    write_gguf(load_model(directory), file, "float32", directory / "tokenizer.json")
    messages = conversation("Tom?")
    tools = [tool("look")]
    for given in (None, tools):
        chats = [Chat(place).with_tools(given) for place in (directory, file)]
        assert len({chat.render(messages) for chat in chats}) == 1
    assert "<tools>" in chats[1].render(messages)
    raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    metadata = metadata_of(raw, "gpt-2") | {"tokenizer.chat_template": "\ufeff" + HERMES}
    (tmp_path / "additional_chat_templates").mkdir()  # of another model
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    chat = Chat(written(tmp_path / "other.gguf", metadata)).with_tools(tools)
    assert chat.render(messages).startswith("<|im_start|>system")
    metadata |= {"tokenizer.chat_template.tool_use": "{% for %}"}
    line = refused(Chat(written(tmp_path / "other.gguf", metadata)).with_tools, tools)
    assert "other.gguf: chat template: Expected an expression" in line


def test_an_exported_file_has_its_models_template(write_chat, tmp_path):
    directory = write_chat(CHATML)
    model = load_model(directory)
    write_gguf(model, tmp_path / "model.gguf", "float32", directory / "tokenizer.json")
    messages = conversation("Tom?", "Yes.", "Lily?")
    chats = [Chat(place) for place in (directory, tmp_path / "model.gguf")]
    encodings = [load_encoding(place, 4104) for place in (directory, tmp_path / "model.gguf")]
    ours, other = [chat.encode(messages, encoding) for chat, encoding in zip(chats, encodings)]
    assert ours == other
    (directory / "tokenizer_config.json").unlink()
    write_gguf(model, tmp_path / "model.gguf", "float32", directory / "tokenizer.json")
    words = "model.gguf: not a chat model: it has neither tokenizer.chat_template nor"
    assert words in refused(Chat, tmp_path / "model.gguf")


def test_a_wrong_id_that_no_template_names_is_ignored(tmp_path):
    metadata = metadata_of(tokenizer_json(MERGES), "gpt-2", padding_token_id=10**6)
    for template, words in (("x", ""), ("{{ pad_token }}", "padding_token_id 1000000: must")):
        about = metadata | {"tokenizer.chat_template": template}
        file = written(tmp_path / "model.gguf", about)
        try:
            found = Chat(file).special_tokens.get("pad_token")
        except UserError as error:
            assert words and words in str(error)
        else:
            assert not words and found is None


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% for %}", "chat template: Expected an expression, got 'end of statement block'"),
        (7, "not a chat model: it has neither tokenizer.chat"),
    ],
)
def test_a_template_that_fails_is_one_line(template, words, tmp_path):
    file = written(
        tmp_path / "model.gguf",
        metadata_of(tokenizer_json(MERGES), "gpt-2") | {"tokenizer.chat_template": template},
    )

    def render():
        return Chat(file).render(conversation("x"))

    message = refused(render)
    assert words in message and "model.gguf: " in message


@pytest.fixture(scope="module")
def speaking(tmp_path_factory, write_chat):
    """A chat model as a directory, and as one file."""
    directory = write_chat(CHATML)
    file = tmp_path_factory.mktemp("gguf") / "speaking.gguf"
    write_gguf(load_model(directory), file, "float32", directory / "tokenizer.json")
    # Only one of its control tokens ends a text of the directory.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return directory, file


ENDS = [4098, 4095, 4101]  # <|im_end|>, <|endoftext|> and <|eot_id|>


def test_one_file_prompts_and_chats_as_its_directory(speaking, cli, engine_cli):
    options = ("--temperature", 0, "--max-new-tokens", 12, "--prompt")
    for run in (cli, engine_cli):
        for more in ((*options, "2024 <|im_start|>user"), ("--chat", *options, "<|im_end|> Tom")):
            results = [run("--model", name, *more) for name in speaking]
            assert results[0][0] == 0, results[0][2]
            assert results[0][:2] == results[1][:2]


def test_a_template_beside_the_file_is_not_asked(speaking, cli, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(speaking[1].read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    assert cli("--model", file, "--chat", "--prompt", "Tom", "--max-new-tokens", 2)[0] == 0
