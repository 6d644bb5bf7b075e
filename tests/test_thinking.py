"""Lesson 106: a model that reasons first replies at once, where its template lets it."""

import io
import sys

import pytest
from chats import CHATML, control_ids, conversation, theirs
from conftest import is_one_line
from serving import engine_alone, refusal, serving, small_encoding, small_engine

from server.protocol import ChatRequest
from server.served import ServedModel
from text.chat import Chat

# In the form of Qwen3's: old reasoning is left out, and an empty one stands for none.
THINKING = r"""{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
ADDED = THINKING.replace("</think>", "[INST]").replace("<think>", "<tool_call>")  # tokens there
OFF = {"enable_thinking": False}
PATH = "/v1/chat/completions"


@pytest.fixture(params=[THINKING, ADDED], ids=["text", "tokens"])
def template(request):
    return request.param


def check_prompt(run, arguments, given_prompts, tokenizer, given, controls: int) -> None:
    """The prompt of one message is transformers', with this number of added tokens."""
    code, _, err = run(*arguments, "--chat", "--prompt", "Tom", "--max-new-tokens", 1)
    assert code == 0, err
    prompt = theirs(tokenizer, conversation("Tom"), **given)
    assert given_prompts == [[prompt]] and len(control_ids(prompt)) == controls


def test_a_prompt_is_what_transformers_makes_of_it(
    cli, write_chat, chat_pair, given_prompts, template
):
    arguments = ("--model", write_chat(template), "--no-thinking")
    controls = 3 + 2 * (template == ADDED)
    check_prompt(cli, arguments, given_prompts, chat_pair(template)[1], OFF, controls)


def test_still_a_prompt_without_the_option(cli, write_chat, chat_pair, given_prompts, template):
    arguments = ("--model", write_chat(template))
    check_prompt(cli, arguments, given_prompts, chat_pair(template)[1], {}, 3)


def test_the_engine_has_it_too(cli, engine_cli, write_chat):
    arguments = ("--model", write_chat(THINKING), "--chat", "--prompt", "Tom", "--temperature", 0)
    arguments += ("--max-new-tokens", 12)
    texts = [
        [run(*arguments, *option)[:2] for run in (cli, engine_cli)]
        for option in ([], ["--no-thinking"])
    ]
    assert all(code == 0 for both in texts for code, _ in both)
    assert all(ours == engines for ours, engines in texts)
    assert texts[0] != texts[1]


def test_each_message_of_a_conversation_is_answered_at_once(
    cli, monkeypatch, write_chat, chat_pair, given_prompts
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"One\nTwo\n")))
    directory = write_chat(THINKING)
    code, out, _ = cli("--model", directory, "--chat", "--no-thinking", "--max-new-tokens", 3)
    asked = [conversation("One"), conversation("One", out.splitlines()[0], "Two")]
    tokenizer = chat_pair(THINKING)[1]
    assert code == 0
    assert given_prompts == [[theirs(tokenizer, messages, **OFF)] for messages in asked]


@pytest.mark.parametrize("given", [OFF, {"enable_thinking": True}, {"another": False}, {}], ids=str)
def test_texts_and_ids_equal_transformers(chat_pair, chat_encoding, template, given):
    ours, tokenizer = chat_pair(template)
    old = "<think>\nHe asks.\n</think>\n\nYes." if template == THINKING else "Yes."
    messages = conversation("Tom?", old, "Lily?", system="Hi.")
    chat = ours.with_template_kwargs(given)
    assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, **given)
    assert chat.encode(messages, chat_encoding) == theirs(tokenizer, messages, **given)
    assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)  # as it was


def test_a_user_cannot_write_the_tokens_that_the_template_writes(chat_pair, chat_encoding):
    chat = chat_pair(ADDED)[0].with_template_kwargs(OFF)
    ids = chat.encode(conversation("<tool_call>Tom[INST]"), chat_encoding)
    assert len(control_ids(ids)) == 5


def test_what_does_not_go_together_is_one_line(cli, write_chat):
    alone = cli("--model", write_chat(THINKING), "--prompt", "x", "--no-thinking")
    assert is_one_line(alone, "error: --no-thinking requires --chat")
    other = cli("--model", write_chat(CHATML), "--chat", "--prompt", "x", "--no-thinking")
    words = "tokenizer_config.json: the template does not use enable_thinking"
    assert is_one_line(other, "error: --no-thinking: ", words)


SWITCH = "{{ 'One day' if enable_thinking is defined and not enable_thinking else 'Yes' }}"
TOM = {"messages": conversation("Tom"), "max_tokens": 9, "temperature": 0}


def test_the_server_takes_variables_of_a_request(tiny_llama, write_chat):
    chat = Chat(write_chat(SWITCH + "{{ messages[0].content }}"))
    found = []
    with serving(lambda: small_engine(tiny_llama), chat) as client:
        for given in (OFF, None, {}, {"enable_thinking": True}, {"another": False}, OFF):
            body = TOM | {"chat_template_kwargs": given}
            status, answer = client.post(PATH, body)
            assert status == 200, answer
            found.append(answer["choices"][0]["message"]["content"])
    off, on = (
        engine_alone(
            tiny_llama,
            own.encode(TOM["messages"], small_encoding()),
            max_new_tokens=9,
            temperature=0,
        )[1]
        for own in (chat.with_template_kwargs(OFF), chat)
    )
    assert off != on
    assert found == [off, on, on, on, on, off]


WORDS = """{{ messages[0].content }}
{{- ' off' if enable_thinking is defined and not enable_thinking }}
{{- ' ' + reasoning_effort if reasoning_effort is defined }}
{{- messages[1].reasoning_content if messages | length > 1 }}"""
HEADER = "X-Ignored-Fields"


@pytest.mark.parametrize(
    "template, fields, written, ignored",
    [
        (WORDS, {}, "Tom", None),
        (WORDS, {"enable_thinking": False}, "Tom off", None),
        (WORDS, {"enable_thinking": True}, "Tom", None),
        (WORDS, {"think": False}, "Tom off", None),
        (WORDS, {"think": "low"}, "Tom low", None),
        (WORDS, {"reasoning_effort": "low"}, "Tom low", None),
        (WORDS, {"reasoning_effort": "none"}, "Tom off none", None),
        (WORDS, {"reasoning_effort": "<|im_end|>"}, "Tom", "reasoning_effort"),
        (WORDS, {"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "Tom", None),
        (SWITCH, {"reasoning_effort": "none"}, "One day", None),
        (SWITCH, {"reasoning_effort": "high"}, "Yes", "reasoning_effort"),
        ("{{ messages[0].content }}", {"reasoning_effort": "none"}, "Tom", "reasoning_effort"),
        (
            "{{ messages[0].content }}",
            {"enable_thinking": True, "think": "max", "store": True},
            "Tom",
            "store, think, enable_thinking",
        ),
    ],
)
def test_a_wish_about_reasoning_is_for_the_template(template, fields, written, ignored, write_chat):
    served = ServedModel(None, "small", "small", Chat(write_chat(template)))
    variables, names = served.variables(ChatRequest(messages=TOM["messages"], **fields))
    assert served.chat.with_template_kwargs(variables).render(TOM["messages"]) == written
    assert ", ".join(names) == (ignored or "")


def test_reasoning_that_is_sent_back_is_for_the_template(tiny_llama, write_chat):
    """Its control tokens are text, and only a reply has some."""
    chat = Chat(write_chat(WORDS))
    encoding = small_encoding()
    reply = {"role": "assistant", "content": "b"}
    prompts = []
    with serving(lambda: small_engine(tiny_llama), chat) as client:
        generate = client.thread.generate
        client.thread.generate = lambda inputs, *more: (
            prompts.append(inputs.prompts[0]) or generate(inputs, *more)
        )
        for name in ("reasoning_content", "reasoning"):
            messages = [*TOM["messages"], reply | {name: " why<|endoftext|>"}]
            body = TOM | {"messages": messages, "think": "max", "keep_alive": 3}
            with client.send("POST", PATH, body) as answer:
                assert (answer.status, answer.headers[HEADER]) == (200, "keep_alive")
        other = [*TOM["messages"], {"role": "user", "content": "b", "reasoning": " why"}]
        assert client.post(PATH, TOM | {"messages": other})[0] == 200
    assert prompts == [
        encoding.encode_ordinary("Tom max why<|endoftext|>"),
        encoding.encode_ordinary("Tom max why<|endoftext|>"),
        encoding.encode_ordinary("Tom"),
    ]


BOOLEANS = "must be an object of up to 16 fields, each true or false"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"enable_thinking": "no <|im_end|>"}, BOOLEANS),
        ({"enable_thinking": 0}, BOOLEANS),
        ({"enable_thinking": None}, BOOLEANS),
        ({"enable_thinking": [False]}, BOOLEANS),
        ([["enable_thinking", False]], BOOLEANS),
        ({str(number): True for number in range(17)}, BOOLEANS),
        ({"messages": False}, "messages cannot be set by a request"),
        ({"tools": True}, "tools cannot be set by a request"),
        ({"documents": True}, "documents cannot be set by a request"),
        ({"add_generation_prompt": False}, "add_generation_prompt cannot be set by a request"),
        ({"eos_token": False}, "eos_token cannot be set by a request"),
    ],
)
def test_other_values_are_refused(client, given, message):
    found = client.post(PATH, TOM | {"chat_template_kwargs": given})
    field = "chat_template_kwargs"
    assert found == (400, refusal(f"{field}: {message}", field))


def test_what_fails_in_the_template_is_the_requests(tiny_llama, write_chat):
    chat = Chat(write_chat("{{ raise_exception('no') if deep else messages[0].content }}"))
    with serving(lambda: small_engine(tiny_llama), chat) as client:
        found = client.post(PATH, TOM | {"chat_template_kwargs": {"deep": True}})
        assert found == (400, refusal("chat template: no", "messages"))
        assert client.post(PATH, TOM)[0] == 200


def test_still_no_variables_without_a_template(client):
    body = {"prompt": "Tom", "max_tokens": 1, "chat_template_kwargs": OFF}
    field = "chat_template_kwargs"
    assert client.post("/v1/completions", body) == (
        400,
        refusal(f"{field} is not supported", field),
    )
