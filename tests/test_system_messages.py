"""What a system message says reaches the model, or an error says where else to say it."""

from chats import CHATML, conversation
from conftest import is_one_line, refused

from text.chat import Chat

ONLY_USERS = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
HINT = "put its text at the start of the first user message"


def test_what_a_system_message_says_is_not_lost(cli, write_chat, chat_encoding):
    arguments = ("--chat", "--prompt", "x", "--max-new-tokens", 1, "--system")
    result = cli("--model", write_chat(ONLY_USERS), *arguments, "Be kind.")
    assert is_one_line(result, f"chat template: it ignores messages of the role system; {HINT}")
    result = cli("--model", write_chat(REFUSING), *arguments, "Be kind.")
    assert is_one_line(result, f"chat template: no; {HINT}")
    assert cli("--model", write_chat(ONLY_USERS), *arguments, " ")[0] == 0
    messages = [{"role": "developer", "content": "Be kind."}, *conversation("x")]
    line = refused(Chat(write_chat(ONLY_USERS)).encode, messages, chat_encoding)
    assert line.endswith(f"it ignores messages of the role developer; {HINT}")
    assert Chat(write_chat(CHATML)).encode(messages, chat_encoding)


FIRST = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}"
FIRST += "{% endif %}{% endfor %}"
TURNS = "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"


def test_what_a_template_says_by_itself_may_be_said(write_chat, chat_encoding):
    default = "{% set says = 'Be kind.' %}{% if messages[0].role == 'system' %}"
    default += "{% set says = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    default += "{{ says }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Chat(write_chat(default))
    user = {"role": "user", "content": "x"}
    system = {"role": "system", "content": "Be kind."}
    assert chat.encode([system, user], chat_encoding) == chat.encode([user], chat_encoding)


def test_a_later_message_is_not_lost_either(write_chat, chat_encoding):
    chat = Chat(write_chat(FIRST))
    user = {"role": "user", "content": "x"}
    system = {"role": "system", "content": "Be kind."}
    assert chat.encode([system, user], chat_encoding)
    line = refused(chat.encode, [system, user, system, user], chat_encoding)
    assert line.endswith(f"it ignores messages of the role system; {HINT}")


def test_an_error_of_the_template_is_its_own(write_chat, chat_encoding):
    """The template writes system messages; the conversation is wrong with and without one."""
    chat = Chat(write_chat(TURNS + CHATML))
    system = {"role": "system", "content": "Be kind."}
    reply = {"role": "assistant", "content": "x"}
    assert refused(chat.encode, [system, reply], chat_encoding).endswith("chat template: no user")
