"""A template writes tools, calls and results. Oracle: transformers."""

import json
import runpy

import pytest
from chats import (
    CHATML,
    CONTROL,
    HERMES,
    NEEDS_SYSTEM,
    WITH_TOOLS,
    control_ids,
    conversation,
    theirs,
    tool,
    used,
)
from conftest import ROOT, is_one_line, refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from text.chat import Chat
from text.tools import detect_tool_format

LOOK = tool("look", {"place": {"type": "string"}}, description="What is there?")
COUNT = tool("count", {"things": {"type": "array", "items": {"type": "string"}}})
TOOLS = [LOOK, COUNT]
PARTS = [*'<|>[]/ \n\t"\\\u00e9\U0001f642', "im_end", "tool_call", "INST", "Tom"]
texts = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


@settings(max_examples=25)
@given(word=texts, key=texts, result=texts)
def test_ids_and_text_equal_transformers(chat_pair, chat_encoding, word, key, result):
    assume(not any(token in text for token in CONTROL for text in (word, key, result)))
    tools = [tool("look", {key: {"enum": [word]}}, description=word), COUNT]
    messages = used(word, {key: [word, 1]}, result) + conversation(word, word, word)[1:]
    for template in WITH_TOOLS.values():
        ours, tokenizer = chat_pair(template)
        chat = ours.with_tools(tools)
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, tools=tools)
        assert chat.encode(messages, chat_encoding) == theirs(tokenizer, messages, tools=tools)
        assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)  # as it was


@pytest.mark.parametrize("template", WITH_TOOLS.values(), ids=WITH_TOOLS)
def test_no_text_from_outside_is_a_control_token(chat_pair, chat_encoding, template):
    """Not in a tool, its parameters, a call or its result; nor by what a template joins."""

    def controls(word, key, result):
        tools = [tool("look", {key: {"enum": [word]}}, description=word)]
        messages = used(word, {key: [word]}, result)
        return control_ids(ours.with_tools(tools).encode(messages, chat_encoding))

    ours = chat_pair(template)[0]
    for token in CONTROL:
        known = controls("x", "y", "z")
        assert controls(token, token, token) == controls(token[:2], "a", token[2:]) == known


def test_a_template_of_its_own_is_for_tools(write_chat):
    needing = HERMES.replace("{%- if tools %}", "{%- if true %}")
    several = [{"name": "tool_use", "template": needing}, {"name": "default", "template": CHATML}]
    directory = write_chat(several)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    messages = used("Tom", {"place": "sea"}, "a ship")
    for tools in (TOOLS, None):
        known = theirs(tokenizer, messages, tokenize=False, tools=tools)
        assert Chat(directory).with_tools(tools).render(messages) == known


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_for_tools_in_a_file_of_its_own(write_chat, default):
    directory = write_chat(CHATML, as_file=default == "chat_template.jinja")
    folder = directory / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("no")
    messages = used("Tom", {"place": "sea"}, "a ship")
    assert "<tools>" not in Chat(directory).with_tools(TOOLS).render(messages)
    (folder / "tool_use.jinja").write_text("\ufeff" + HERMES, "utf-8")
    (directory / "chat_template.jinja").write_text(CHATML)  # else transformers has no default
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    known = [theirs(tokenizer, messages, tokenize=False, tools=tools) for tools in (TOOLS, None)]
    if default == "tokenizer_config.json":
        (directory / "chat_template.jinja").unlink()
    made = [Chat(directory).with_tools(tools).render(messages) for tools in (TOOLS, None)]
    assert made == [each.removeprefix("\ufeff") for each in known]  # transformers keeps it
    given = directory / "given.jinja"
    given.write_text(HERMES.replace("Tools:", "Given:"))
    assert "Given:" in Chat(directory, given).with_tools(TOOLS).render(messages)
    (folder / "tool_use.jinja").write_text("{% for %}")
    line = refused(Chat(directory).with_tools, TOOLS)
    assert "additional_chat_templates/tool_use.jinja: chat template: Expected an expr" in line


NEEDS_TEXT = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('say something') }}"
    "{% endif %}{% endfor %}" + HERMES
)
# In the form of Command R+: a tool and all its parameters have descriptions.
DESCRIBED = HERMES.replace(
    "{{- '\\n' + (tool | tojson) }}",
    "{{- '\\n' + tool.function.name + ': ' + tool.function.description }}"
    "{%- for name, field in tool.function.parameters.properties | items %}"
    "{{- ' ' + name + ': ' + field.description }}"
    "{{- ' needed' if name in tool.function.parameters.required }}{%- endfor %}",
)
LATER = HERMES.replace("{%- if tools %}", "{%- if tools and messages | length > 3 %}")
WHERE = {"place": {"type": "string", "description": "where"}}
WANTING = [
    (NEEDS_SYSTEM, TOOLS, conversation("Tom", system="Be kind.")),
    (NEEDS_TEXT, TOOLS, conversation("Tom")),
    (DESCRIBED, [tool("look", WHERE, description="")], conversation("Tom")),
    (LATER, TOOLS, conversation("Tom", "Yes", "Tom", "No", "Tom")),
]


def test_tools_are_tried_as_the_user_has_them(chat_pair, chat_encoding):
    for template, tools, messages in WANTING:
        ours, tokenizer = chat_pair(template)
        chat = ours.with_tools(tools, messages)
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False, tools=tools)
        tool_format = detect_tool_format(chat, chat_encoding, (4098,))
        hermes = chat_pair(HERMES)[0].with_tools(tools)
        known = detect_tool_format(hermes, chat_encoding, (4098,))
        assert tool_format._replace(begin=tool_format.begin.lstrip()) == known
    line = refused(chat_pair(DESCRIBED)[0].with_tools, [COUNT], conversation("Tom"))
    assert line.endswith("'dict object' has no attribute 'description'"), line


def test_a_template_that_has_a_place_for_some_tools_is_refused(chat_pair):
    some = HERMES.replace("for tool in tools", "for tool in tools[:1]")
    ours = chat_pair(some)[0]
    assert ours.with_tools(TOOLS[:1])
    assert "this chat template does not support tools" in refused(ours.with_tools, TOOLS)


def test_the_command_line_shows_the_tools(cli, write_chat, chat_pair, given_prompts, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    arguments = ("--chat", "--prompt", "Tom", "--max-new-tokens", 1, "--tools", file)
    assert cli("--model", write_chat(HERMES), *arguments)[0] == 0
    assert given_prompts == [[theirs(chat_pair(HERMES)[1], conversation("Tom"), tools=TOOLS)]]
    result = cli("--model", write_chat("{{ messages[0].content }}"), *arguments)
    assert is_one_line(result, "tokenizer_config.json: this chat template does not support tools")
    assert is_one_line(cli("--prompt", "x", "--tools", file), "error: --tools requires --chat")


FUNCTION = {"name": "look"}
NUMBER = "tools: it must be a list of 1 to 128 tools"
WRONG = [
    ("[", "tools: not JSON: Expecting value"),
    *(({}, NUMBER), ([], NUMBER), ([LOOK] * 129, NUMBER)),
    ([LOOK, LOOK], "tools.1.function.name: duplicate name look"),
    ([LOOK, 1], "tools.1: it must be {"),
    ([FUNCTION], "tools.0: it must be {"),
    ([{"type": "web_search", "function": FUNCTION}], "tools.0: it must be {"),
    ([{"type": "function", "function": FUNCTION, "strict": True}], "tools.0: it must be {"),
    ([{"type": "function", "function": {}}], "tools.0.function.name: it must be a string"),
    ([tool("look at")], "tools.0.function.name is 'look at'; it must be 1 to 64 letters, digits"),
    ([tool("a" * 65)], "aaa'; it must be 1 to 64 letters"),
    ([tool("a", strict=1)], "tools.0.function.strict: it must be true or false"),
    ([tool("a", parameters=[])], "tools.0.function.parameters: it must be an object, a JSON"),
    ([tool("a", arguments={})], "tools.0.function: unknown field 'arguments'; known are name"),
]


def test_what_no_tool_is_is_one_line(cli, write_chat, tmp_path):
    file = tmp_path / "tools.json"
    arguments = ("--model", write_chat(HERMES), "--chat", "--prompt", "x", "--tools", file)
    for tools, words in WRONG:
        file.write_text(tools if isinstance(tools, str) else json.dumps(tools))
        assert is_one_line(cli(*arguments), words)


def test_the_adapters_training_script_renders_its_template(capsys):
    script = runpy.run_path(str(ROOT / "checkpoints/train_tools.py"))
    script["main"](["--out", "unused", "--show", "1"])
    assert "<tool_call>" in capsys.readouterr().out
