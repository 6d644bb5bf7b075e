"""Lesson 106: a model that reasons first replies at once, where its template lets it."""

import pytest
from chats import CHATML, control_ids, conversation, theirs
from conftest import is_one_line
from serving import refusal, serving, small_encoding, small_engine

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


def test_a_prompt_is_what_transformers_makes_of_it(cli, write_chat, chat_pair, given_prompts):
    for template, controls in ((THINKING, 3), (ADDED, 5)):
        arguments = ("--model", write_chat(template), "--chat", "--prompt", "Tom")
        code, _, err = cli(*arguments, "--max-new-tokens", 1, "--no-thinking")
        assert code == 0, err
        prompt = theirs(chat_pair(template)[1], conversation("Tom"), **OFF)
        assert given_prompts.pop() == [prompt] and len(control_ids(prompt)) == controls


@pytest.mark.parametrize("template", [THINKING, ADDED], ids=["text", "tokens"])
def test_texts_and_ids_equal_transformers(chat_pair, chat_encoding, template):
    ours, tokenizer = chat_pair(template)
    old = "<think>\nHe asks.\n</think>\n\nYes." if template == THINKING else "Yes."
    messages = conversation("Tom?", old, "Lily?", system="Hi.")
    for given in (OFF, {"enable_thinking": True}, {"another": False}, {}):
        chat = ours.with_template_kwargs(given)
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, **given)
        assert chat.encode(messages, chat_encoding) == theirs(tokenizer, messages, **given)
        assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)  # as it was


def test_what_does_not_go_together_is_one_line(cli, write_chat):
    alone = cli("--model", write_chat(THINKING), "--prompt", "x", "--no-thinking")
    assert is_one_line(alone, "error: --no-thinking requires --chat")
    other = cli("--model", write_chat(CHATML), "--chat", "--prompt", "x", "--no-thinking")
    words = "tokenizer_config.json: the template does not use enable_thinking"
    assert is_one_line(other, "error: --no-thinking: ", words)


SWITCH = "{{ 'One day' if enable_thinking is defined and not enable_thinking else 'Yes' }}"
TOM = {"messages": conversation("Tom"), "max_tokens": 9, "temperature": 0}


WORDS = """{{ messages[0].content }}
{{- ' off' if enable_thinking is defined and not enable_thinking }}
{{- ' ' + reasoning_effort if reasoning_effort is defined }}
{{- messages[1].reasoning_content if messages | length > 1 }}"""
CONTENT = "{{ messages[0].content }}"
KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    "template, fields, written, ignored",
    [
        (WORDS, {}, "Tom", ""),
        (WORDS, {KWARGS: None}, "Tom", ""),
        (WORDS, {KWARGS: {"enable_thinking": False, "another": True}}, "Tom off", ""),
        (WORDS, {"enable_thinking": False}, "Tom off", ""),
        (WORDS, {"enable_thinking": True}, "Tom", ""),
        (WORDS, {"think": False}, "Tom off", ""),
        (WORDS, {"think": "low"}, "Tom low", ""),
        (WORDS, {"reasoning_effort": "low"}, "Tom low", ""),
        (WORDS, {"reasoning_effort": "none"}, "Tom off none", ""),
        (WORDS, {"reasoning_effort": "<|im_end|>"}, "Tom", "reasoning_effort"),
        (WORDS, {"think": False, KWARGS: {"enable_thinking": True}}, "Tom", ""),
        (SWITCH, {"reasoning_effort": "none"}, "One day", ""),
        (SWITCH, {"reasoning_effort": "high"}, "Yes", "reasoning_effort"),
        (CONTENT, {"reasoning_effort": "none"}, "Tom", "reasoning_effort"),
        (CONTENT, {"enable_thinking": True, "think": "max"}, "Tom", "think, enable_thinking"),
    ],
)
def test_a_wish_about_reasoning_is_for_the_template(template, fields, written, ignored, write_chat):
    served = ServedModel(None, "small", "small", Chat(write_chat(template)))
    variables, names = served.variables(ChatRequest(messages=TOM["messages"], **fields))
    assert served.chat.with_template_kwargs(variables).render(TOM["messages"]) == written
    assert ", ".join(names) == ignored


def test_reasoning_that_is_sent_back_is_for_the_template(tiny_llama, write_chat):
    prompts = []
    with serving(lambda: small_engine(tiny_llama), Chat(write_chat(WORDS))) as client:
        generate = client.thread.generate
        client.thread.generate = lambda inputs, *more: (
            prompts.append(inputs.prompts[0]) or generate(inputs, *more)
        )
        reply = {"role": "assistant", "content": "b"}
        for name in ("reasoning_content", "reasoning"):
            messages = [*TOM["messages"], reply | {name: " why<|endoftext|>"}]
            body = TOM | {"messages": messages, "think": "max", "keep_alive": 3}
            with client.send("POST", PATH, body) as answer:
                named = answer.headers["X-Ignored-Fields"]
                assert (answer.status, named) == (200, "keep_alive")
        other = [*TOM["messages"], {"role": "user", "content": "b", "reasoning": " why"}]
        assert client.post(PATH, TOM | {"messages": other})[0] == 200
    encode = small_encoding().encode_ordinary
    assert prompts == [encode("Tom max why<|endoftext|>")] * 2 + [encode("Tom")]


BOOLEANS = "must be an object of up to 16 fields, each true or false"


def test_other_values_are_refused(client):
    values = [{"enable_thinking": value} for value in ("no <|im_end|>", 0, None, [False])]
    values += [[["enable_thinking", False]], {str(number): True for number in range(17)}]
    reserved = ("messages", "tools", "documents", "add_generation_prompt", "eos_token")
    cases = [(value, BOOLEANS) for value in values]
    cases += [({name: False}, f"{name} cannot be set by a request") for name in reserved]
    for given, message in cases:
        found = client.post(PATH, TOM | {KWARGS: given})
        assert found == (400, refusal(f"{KWARGS}: {message}", KWARGS))


def test_what_fails_in_the_template_is_the_requests(tiny_llama, write_chat):
    chat = Chat(write_chat("{{ raise_exception('no') if deep else messages[0].content }}"))
    with serving(lambda: small_engine(tiny_llama), chat) as client:
        found = client.post(PATH, TOM | {"chat_template_kwargs": {"deep": True}})
        assert found == (400, refusal("chat template: no", "messages"))
        assert client.post(PATH, TOM)[0] == 200
