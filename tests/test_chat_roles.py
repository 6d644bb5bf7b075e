"""Which roles a model's template writes, in the list of models. Oracle: the lengths of prompts."""

import pytest
from chats import write_template
from serving import serving, small_engine

from errors import UserError
from text.chat import Chat

CHAT = "/v1/chat/completions"
ROLE_EXAMPLES = {
    "system": ["system", "user"],
    "user": ["user"],
    "assistant": ["user", "assistant", "user"],
}
TEMPLATES = {
    "names": (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
        ["system", "user", "assistant"],
    ),
    "refuses": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
        ["user", "assistant"],
    ),
    "drops": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
        ["user", "assistant"],
    ),
    "first": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ messages[-1].content | trim | upper | lower }}",
        ["system", "user"],
    ),
    "needs": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        ["system", "user", "assistant"],
    ),
    "silent": ("I say what I like", []),
    "breaks": ("{{ messages[7].content }}", []),
}


def told(client) -> list[str] | None:
    """What the list of models says, and the model's own page, too."""
    (model,) = client.get("/v1/models")[1]["data"]
    assert client.get("/v1/models/small") == (200, model)
    return model.get("chat_roles")


def length(client, role: str, content: str) -> int:
    """The tokens of a prompt in which this role says this; 0 for one that is refused."""
    for roles in (ROLE_EXAMPLES[role], ["system", *ROLE_EXAMPLES[role]]):
        talk = [{"role": each, "content": content if each == role else "a"} for each in roles]
        status, answer = client.post(CHAT, {"messages": talk, "max_tokens": 1})
        if status == 200:
            return answer["usage"]["prompt_tokens"]
    return 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_roles_are_those_whose_words_are_in_the_prompt(tiny_llama, tmp_path, name):
    template, roles = TEMPLATES[name]
    write_template(tmp_path, template)
    with serving(lambda: small_engine(tiny_llama), chat=Chat(str(tmp_path))) as client:
        assert told(client) == roles
        for role in ROLE_EXAMPLES:
            grows = length(client, role, "one two three four") > length(client, role, "one")
            assert grows == (role in roles)


def test_the_embedded_model_knows_no_system_prompt(client):
    assert told(client) == ["user", "assistant"]
    assert length(client, "system", "a") == 0


def test_a_model_without_a_template_has_no_roles(tiny_llama):
    chat = UserError("not a chat model")
    with serving(lambda: small_engine(tiny_llama), chat=chat) as client:
        assert told(client) == []
        assert length(client, "user", "a") == 0


def test_an_adapter_has_the_roles_of_its_model(tiny_llama):
    adapters = {"frogs": "somewhere/frogs"}
    with serving(lambda: small_engine(tiny_llama), adapters=adapters) as client:
        found = client.get("/v1/models")[1]["data"]
        assert [model.get("chat_roles") for model in found] == [["user", "assistant"]] * 2
