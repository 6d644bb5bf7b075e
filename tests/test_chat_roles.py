"""Which roles a model's template writes, and what is refused because it would be lost."""

import pytest
from chats import CHATML, conversation, write_template
from conftest import is_one_line, refused
from serving import serving, small_engine

from errors import UserError
from text.chat import Chat

ALL = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
NO = "{{ raise_exception('no') }}{% endif %}"
TEMPLATES = [  # template, the roles whose words are in the prompt
    (ALL, ["system", "user", "assistant"]),
    ("{% if messages[0].role == 'system' %}" + NO + ALL, ["user", "assistant"]),
    (ALL.replace("%}", "if m.role != 'system' %}", 1), ["user", "assistant"]),
    (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ messages[-1].content | trim | upper | lower }}",
        ["system", "user"],
    ),
    ("{% if messages[0].role != 'system' %}" + NO + ALL, ["system", "user", "assistant"]),
    ("I say what I like", []),
    ("{{ messages[7].content }}", []),
]


def told(client) -> list[str] | None:
    (model,) = client.get("/v1/models")[1]["data"]
    assert client.get("/v1/models/small") == (200, model)
    return model.get("chat_roles")


@pytest.mark.parametrize("template, roles", TEMPLATES)
def test_the_roles_are_those_whose_words_are_in_the_prompt(tiny_llama, tmp_path, template, roles):
    write_template(tmp_path, template)
    with serving(lambda: small_engine(tiny_llama), chat=Chat(str(tmp_path))) as client:
        assert told(client) == roles


def test_a_model_without_a_template_has_no_roles_and_an_adapter_those_of_its_model(tiny_llama):
    with serving(lambda: small_engine(tiny_llama), chat=UserError("not a chat model")) as client:
        assert told(client) == []
    adapters = {"frogs": "somewhere/frogs"}
    with serving(lambda: small_engine(tiny_llama), adapters=adapters) as client:
        found = client.get("/v1/models")[1]["data"]
        assert [model.get("chat_roles") for model in found] == [["user", "assistant"]] * 2


ONLY_USERS = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
FIRST = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}"
FIRST += "{% endif %}{% endfor %}"
TURNS = "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
DEFAULT = """{% set says = 'Be kind.' %}{% if messages[0].role == 'system' %}
{% set says = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{ says }}{% for m in messages %}{{ m.content }}{% endfor %}"""
HINT = "put its text at the start of the first user message"
SYSTEM, USER = conversation("x", system="Be kind.")


def test_what_a_system_message_says_is_not_lost(cli, write_chat, chat_encoding):
    arguments = ("--chat", "--prompt", "x", "--max-new-tokens", 1, "--system")
    result = cli("--model", write_chat(ONLY_USERS), *arguments, "Be kind.")
    assert is_one_line(result, f"chat template: it ignores messages of the role system; {HINT}")
    result = cli("--model", write_chat(REFUSING), *arguments, "Be kind.")
    assert is_one_line(result, f"chat template: no; {HINT}")
    assert cli("--model", write_chat(ONLY_USERS), *arguments, " ")[0] == 0
    for template, messages, error in (
        (ONLY_USERS, [SYSTEM | {"role": "developer"}, USER], "role developer; " + HINT),
        (CHATML, [SYSTEM | {"role": "developer"}, USER], None),
        (FIRST, [SYSTEM, USER], None),
        (FIRST, [SYSTEM, USER, SYSTEM, USER], "it ignores messages of the role system; " + HINT),
        # The template writes system messages; the conversation is wrong with and without one.
        (TURNS + CHATML, [SYSTEM, USER | {"role": "assistant"}], "chat template: no user"),
    ):
        encode = Chat(write_chat(template)).encode
        if error:
            assert refused(encode, messages, chat_encoding).endswith(error)
        else:
            assert encode(messages, chat_encoding)
    chat = Chat(write_chat(DEFAULT))  # what it says by itself may be said
    assert chat.encode([SYSTEM, USER], chat_encoding) == chat.encode([USER], chat_encoding)
