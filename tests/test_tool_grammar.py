"""A reply calls tools only as its template writes calls. Oracle: transformers."""

import json
import re

import jsonschema
import pytest
from chats import (
    BARE,
    CHATML,
    HERMES,
    LISTED,
    WITH_TOOLS,
    call,
    conversation,
    theirs,
    tool,
    tool_grammar,
)
from conftest import is_one_line, refused

from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from infer import generate
from loading.load import load_model
from sampling import SamplingParams
from text.chat import Chat
from text.tokenizer import load_encoding
from text.tools import detect_tool_format

TRIGGER = 4102  # <tool_call>
PLACE = {"place": {"enum": ["sea", "wood"]}, "far": {"type": "boolean"}}
LOOK = tool("look", PLACE, description="What is there?")
COUNT = tool("count", {"things": {"type": "integer", "minimum": 3, "maximum": 40}})
TOOLS = [LOOK, COUNT]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
# A call as each template writes it, for a reader that knows no template: name, arguments.
CALL = r'\{"name": "(\w+)", "(?:arguments|parameters)": (\{[^{}]*\})(?:, "id": "[a-zA-Z0-9]{9}")?\}'
WHOLE = {
    HERMES: rf"(?s:(.*?))((?:(?:^|\n)?<tool_call>\n{CALL}\n</tool_call>)*)",
    BARE: rf"(?s:(.*?))({CALL})?",
    LISTED: rf"(?s:(.*?))(<tool_call>\[{CALL}(?:, {CALL})*\])?",
}


@pytest.fixture(params=WITH_TOOLS)
def template(request):
    return WITH_TOOLS[request.param]


@pytest.fixture
def directory(write_chat, template):
    return write_chat(template)


def matcher_of(directory, choice="auto"):
    vocabulary = get_vocabulary(load_encoding(directory, 4104), 4104, (4098,))
    return Grammar("tool_grammar", tool_grammar(directory, TOOLS, choice), vocabulary).matcher()


def replies(directory, seeds, length=110, cut=False, **params) -> list[str]:
    """Texts of a random model that follow a message, one for each seed, without the EOS.

    cut: those, too, that have none after this length.
    """
    encoding = load_encoding(directory, 4104)
    prompt = Chat(directory).with_tools(TOOLS).encode(conversation("Tom"), encoding)
    options = {"max_new_tokens": length, "temperature": 1.0} | params
    each = [SamplingParams(**options, seed=seed) for seed in seeds]
    steps = list(generate(load_model(directory), [prompt] * len(each), each, encoding=encoding))
    rows = [[step[row] for step in steps if step[row] is not None] for row in range(len(each))]
    rows = [row for row in rows if cut or row[-1] == 4098]
    return [encoding.decode([token for token in row if token != 4098]) for row in rows]


def read(template: str, text: str) -> tuple[str, list[tuple[str, dict]]]:
    """What a whole reply says before its calls, and what it calls, all as it must be."""
    found = re.fullmatch(WHOLE[template], text)
    assert found, text
    calls = [(name, json.loads(said)) for name, said in re.findall(CALL, found[2] or "")]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
        assert arguments.keys() == SCHEMAS[name]["properties"].keys()
    return found[1], calls


def test_the_format_is_what_transformers_writes(chat_pair, template):
    ours, tokenizer = chat_pair(template)
    encoding = load_encoding(ours.file.parent, 4104)
    tool_format = detect_tool_format(ours, encoding, (4098,))
    asked = conversation("Tom")
    before = theirs(tokenizer, asked, tokenize=False)
    for number in (1, 2, 3) if tool_format.between else (1,):
        said = [{"a": 'x"}', "b": [number, {}]}, {}, {"\u00e9": None}][:number]
        calls = [call(f"f-{number}", arguments, "id0123456") for arguments in said]
        messages = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        known = tokenizer.apply_chat_template(messages, tokenize=False)
        texts = [json.dumps(each, ensure_ascii=False) for each in said]
        written = [f"f-{number}{tool_format.middle}{text}" for text in texts]
        text = tool_format.begin + (tool_format.between or "").join(written) + tool_format.end
        assert before + text.replace("\0" * 9, "id0123456") + "<|im_end|>" == known.rstrip("\n")


NEEDING = HERMES.replace("{%- if tools %}", "{%- if true %}")  # as NousResearch's Hermes 3
SWITCHED = HERMES.replace(  # as Qwen3
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}{{- '' if thinking else '<think>\\n\\n</think>\\n\\n' }}",
)
OPENED = HERMES.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")  # as QwQ


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [NEEDING, SWITCHED, OPENED, LISTED])
def test_the_format_is_the_same(write_chat, template, tools):
    """Whatever a new reply begins with, and whether or not there are tools."""
    if template == NEEDING and not tools:
        return
    known = LISTED if template == LISTED else HERMES
    encoding = load_encoding(write_chat(template), 4104)
    tool_formats = [
        detect_tool_format(Chat(write_chat(each)).with_tools(tools), encoding, ends)
        for each, ends in ((template, (4098,)), (known, (4098,)), (known, (4097, 4098)))
    ]
    assert tool_formats[0] == tool_formats[1] == tool_formats[2]  # the first EOS counts


def test_a_format_has_no_result_and_no_numbers(write_chat):
    """Results in the turn of the reply (Apertus); ids that are counted (Command R7B)."""
    end = "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}"
    inside = HERMES.replace(
        end,
        "{%- if not message.tool_calls %}{{- '<|im_end|>' }}{%- endif %}"
        "\n    {%- elif message.role == 'tool' %}",
    ).replace("'<|im_start|>user\\n<tool_response>", "'<tool_response>")
    assert inside.count("im_end") == HERMES.count("im_end")
    directory = write_chat(inside)
    encoding = load_encoding(directory, 4104)
    assert "chat template" in refused(detect_tool_format, Chat(directory), encoding, (4098,))
    start = """<tool_call>\\n{"name": "'"""
    numbered = """<tool_call>\\n{"id": ' + loop.index | string + ', "name": "'"""
    counted = HERMES.replace(start, numbered)
    assert counted != HERMES
    tool_format = detect_tool_format(Chat(write_chat(counted)), encoding, (4098,))
    assert tool_format.between is None and tool_format.begin == '<tool_call>\n{"id": 1, "name": "'


def test_a_reply_calls_what_there_is(directory, template):
    """Drawn from random weights: each is whole, or was cut."""
    seen = set()
    grammar = tool_grammar(directory, TOOLS, "required")
    for text in replies(directory, range(24), tool_grammar=grammar):
        before, calls = read(template, text)
        assert before == "" and calls
        seen |= {name for name, _ in calls} | {len(calls)}
    assert {"look", "count", 1} <= seen and ({2} <= seen) == (template != BARE)


def test_a_text_may_come_first(directory, template):
    biases = {} if template == BARE else {TRIGGER: 6.0}
    seeds = range(4 if template == BARE else 24)
    grammar = tool_grammar(directory, TOOLS)
    texts = replies(directory, seeds, tool_grammar=grammar, logit_bias=biases)
    found = [read(template, text) for text in texts]
    assert template == BARE or any(before and made for before, made in found)


def test_one_tool_or_one_call_or_none(directory, template):
    def drawn(*grammar, **options):
        grammar = tool_grammar(directory, *grammar)
        biases = {TRIGGER: 100.0}
        return replies(directory, range(6), tool_grammar=grammar, logit_bias=biases, **options)

    texts = drawn([COUNT], "required", False)
    assert texts
    for text in texts:
        assert [name for name, _ in read(template, text)[1]] == ["count"]
    for text in drawn(TOOLS, "required", False):
        assert len(read(template, text)[1]) == 1
    if template != BARE:
        texts = drawn(TOOLS, "none", length=9, cut=True)
        assert len(texts) == 6 and "<tool_call>" not in "".join(texts)


@pytest.mark.parametrize("template", [HERMES, LISTED], ids=["hermes", "listed"])
def test_a_token_is_no_text(directory, template):
    """Added tokens may stand in a text, but not in a call; their letters begin none."""
    encoding = load_encoding(directory, 4104)
    matcher = matcher_of(directory)
    added = [*range(4095, 4098), *range(4099, 4104)]
    assert matcher.token_mask([])[added].all() and matcher.token_mask([4096, 4096])[added].all()
    letters = encoding.encode_ordinary("x <tool_call")
    after = matcher.token_mask(letters)
    assert not after[encoding.encode_single_token(">")] and after[TRIGGER]
    assert matcher.token_mask([*letters, TRIGGER]).sum() == 1
    begun = '{"name": "look", "arguments": {"place": "'
    begun = encoding.encode_ordinary("\n" + begun if template == HERMES else "[" + begun)
    assert not matcher.token_mask([*letters, TRIGGER, *begun])[added].any()
    assert matcher_of(directory, "required").token_mask([]).nonzero().tolist() == [[TRIGGER]]


@pytest.mark.parametrize("blank", ["", " "])
def test_items_are_separated_as_in_the_template(write_chat, blank):
    """Without blanks, too, as some templates write JSON."""
    dense = HERMES.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
    directory = write_chat(dense)
    arguments = f'{{"place":{blank}"sea","far":{blank}true}}'
    text = f'\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    tokens = [TRIGGER, *load_encoding(directory, 4104).encode_ordinary(text)]
    matcher = matcher_of(directory, "required")
    taken = [matcher.token_mask(tokens[:size])[tokens[size]] for size in range(len(tokens))]
    assert all(taken) == (blank == "")


@pytest.fixture
def tools_file(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    return file


@pytest.mark.parametrize("template", [HERMES, LISTED], ids=["hermes", "listed"])
def test_the_scripts_hold_replies_to_calls(cli, engine_cli, directory, template, tools_file):
    arguments = ("--model", directory, "--chat", "--prompt", "Tom", "--tools", tools_file)
    arguments += ("--max-new-tokens", 110, "--logit-bias", f"{TRIGGER}=100")
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert read(template, out.removesuffix("\n"))[1]
    assert engine_cli(*arguments, "--temperature", 0)[:2] == (code, out)


STRANGE = HERMES.replace('{"name": "', "call ").replace('", "arguments": ', " ")

DEAF = HERMES.replace("<tool_response>\\n' + message.content }}", "<tool_response>\\n' }}")
ONE_WORD = HERMES.replace('", "arguments": \'', "_'")  # where does a name end?


def test_what_cannot_be_held_is_one_line(cli, write_chat, tools_file):
    arguments = ("--chat", "--prompt", "x", "--tools", tools_file)
    for strange in (STRANGE, CHATML, DEAF, ONE_WORD):
        found = cli("--model", write_chat(strange), *arguments)
        assert is_one_line(found, "tokenizer_config.json: ", "chat template")
    model = "--model", write_chat(HERMES)
    assert is_one_line(cli(*model, *arguments, "--regex", "a"), "regex", "tool_grammar")
    assert is_one_line(cli(*model, *arguments, "--num-beams", 2), "--num-beams", "--tools")


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"type": "string"}, "f.parameters.type 'string'"),
        ({"not": {}}, "'f.parameters.not'"),
        ({"properties": 1}, "f.parameters.properties 1"),
        ({"x-guidance": {}}, "'f.parameters.x-guidance'"),
    ],
)
def test_parameters_that_are_not_done(write_chat, schema, words):
    tools = [LOOK, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert words in refused(tool_grammar, write_chat(HERMES), tools)


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"properties": {"a": {"type": "nummer"}}}, "Invalid type: nummer"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "Pointer '/$defs/b' does not exist"),
        ({"properties": {"a": {"pattern": "("}}}, "regex parse error: ( ^ error: unclosed group"),
    ],
)
def test_a_tool_that_cannot_be_compiled_is_named(cli, write_chat, tmp_path, schema, words):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([LOOK, tool("find-it", parameters=schema), COUNT]))
    arguments = ("--chat", "--prompt", "x", "--tools", file)
    code, out, err = cli("--model", write_chat(HERMES), *arguments)
    note, error = err.splitlines(keepends=True)
    assert (code, out, note[:39]) == (2, "", "note: the prompt exceeds the context wi")
    assert error.endswith(f"error: tools: find-it: failed to compile JSON schema: {words}\n")


def test_all_tools_together_are_bounded(write_chat):
    many = {f"p{number}": {"type": "integer"} for number in range(10)}
    tools = [tool(f"f{number}", many) for number in range(120)]
    assert "1,000 schemas" in refused(tool_grammar, write_chat(HERMES), tools)
    tools = [tool("f", {"a": {"description": "x" * 2**18}})]
    assert "262," in refused(tool_grammar, write_chat(HERMES), tools)
