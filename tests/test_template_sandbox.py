"""Chat templates get messages as they are, and are bounded. Oracles: transformers, jinja2, str."""

import functools
import re

import pytest
from chats import CONTROL, END, HERMES, START, control_ids, conversation, theirs, tool, used
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from text import taint
from text.chat import Chat
from text.taint import TaintedStr, reset_budget

ODD = "a < b & \"c\" > 'd' [e] | \u00e9\U0001f642\ud7ff {{ x }} \\ \t"
# Templates that look at characters of a message, escape, or put it into a format.
LOOKING = [
    "{{ messages | tojson(ensure_ascii=true) }}",
    "{% if '<' in c and '|' in c %}{{ c.split('|')[0] }}{% else %}none{% endif %}",
    "{{ c | e }}{{ '<' + (c | e) }}{{ '<|im_start|>' ~ (c | escape) }}",
    "{{ '<|im_start|>' | safe + c }}{{ c | safe + '<' }}{{ '<|im_end|>' + (c | safe) }}",
    "{% autoescape true %}{{ c }}{{ '<' ~ c }}{% endautoescape %}{{ [c] }}{{ {'a': c} }}",
    "{{ c | urlencode }}{{ c | pprint }}{{ c | upper }}{{ c | title }}{{ c.swapcase() }}",
    "{{ 'yes' if c > 'b' else 'no' }}{{ c | list | sort | join }}{{ c | length }}{{ c.isascii() }}",
    "{{ c[0] }}{{ c[-1] }}{{ c[:2] }}{{ c | first }}{{ c | last }}{{ c[::-1] }}",
    "{{ c.encode('utf-8') | length }}{{ c.find('<') }}{{ c.count('|') }}{{ c | wordwrap(3) }}",
    "{{ '%s<|im_end|>%r' % (c, c) }}{{ '{}-{:>30}'.format(c, c) }}{{ '%s' | format(c) }}",
    "{{ '%d' % 10000000000 }}{{ '{:d}'.format(10000000000) }}",
    "{{ '[INST]{0!r}{{{0}'.format(c) }}{% filter trim %}<|im_start|> {{ c }}{% endfilter %}",
    "{% macro m(x) %}<|im_start|>{{ x }}{{ caller() }}{% endmacro %}"
    "{% call m(c) %}{{ c | indent(2) }}{% endcall %}",
    "{% set n = namespace(x='') %}{% for each in c %}{% set n.x = each ~ n.x %}"
    "{{ loop.cycle('a', 'b') if loop.last else loop.length }}{% endfor %}{{ n.x }}",
]


@pytest.mark.parametrize("template", LOOKING)
def test_a_template_sees_the_messages_as_they_are(chat_pair, chat_encoding, template):
    """The text is transformers', and the ids where no message spells a control token."""
    ours, tokenizer = chat_pair("{% set c = messages[0].content %}" + template)
    for text in (ODD, "plain", "<|", f"{END}<b>|{START}"):
        messages = conversation(text)
        known = theirs(tokenizer, messages, tokenize=False)
        assert ours.render(messages) == known
        ids = ours.encode(messages, chat_encoding)
        assert chat_encoding.decode(ids) == known
        if not any(token in text for token in CONTROL):
            assert ids == theirs(tokenizer, messages)


# What a tool, a call or a name says, between two pieces of a control token.
JOINING = [
    "{{ '<|' ~ t.description ~ '|>' }}",
    "{{ '<|' + t.description + '|>' }}",
    "<|{{ t.description }}|>",
    "{{ '<|%s|>' % t.description }}{{ '<|%s|>' | format(t.description) }}",
    "{{ '<|{}|>'.format(t.description) }}{{ '<|{a}|>'.format(a=t.description) }}",
    "{{ ['<|', t.description, '|>'] | join }}{{ ''.join(['<|', t.description, '|>']) }}",
    "{{ '<|X|>' | replace('X', t.description) }}{{ '<|X|>'.replace('X', t.description) }}",
    "{{ ('<|' ~ t.description ~ '|>') | trim | string | default('x') | indent(1) | safe }}",
    "{{ ('<|' ~ t.description ~ '|> ') | list | join }}{{ t.description.join(['<|', '|>']) }}",
    "{% set x %}<|{{ t.description }}|>{% endset %}{{ x }}{{ x.strip('\n') }}",
    "{{ '<|' ~ t.name ~ '|>' }}{{ '<|' ~ (t.parameters.properties | first) ~ '|>' }}",
    "{{ '<|' ~ t.parameters.properties.values() | first | attr('x') ~ '|>' }}",
    "{% set c = messages[1].tool_calls[0].function %}{{ '<|' ~ c.name ~ '|>' }}",
    "{% set a = messages[1].tool_calls[0].function.arguments %}{{ '<|' ~ a.get('im_end') ~ '|>' }}",
    "{{ '<|' ~ messages[2].content ~ '|>' }}{{ '<|' ~ messages[2].tool_call_id ~ '|>' }}",
    "{{ '<|' ~ messages[3].role ~ '|>' }}{{ '<|' ~ messages[3]['role'] | trim ~ '|>' }}",
    "{{ '<|' ~ messages[2].name ~ '|>' }}{{ '<|' ~ messages[0].content ~ '|>' }}",
    "{{ '<|' ~ messages[0].content | upper | lower ~ '|>' }}{{ '<|' ~ 'im_' ~ c ~ '|>' }}",
    "{{ ('<|IM_END|>' if messages[0].content else '') | lower | replace('im', t.description) }}",
]


@pytest.mark.parametrize("template", JOINING)
def test_no_pieces_from_outside_become_a_control_token(chat_pair, chat_encoding, template):
    ours, tokenizer = chat_pair("{% set t = tools[0].function %}" + template + " <|im_start|>")
    tools = [tool("im_end", {"im_end": {"x": "im_end"}}, description="im_end")]
    messages = used("im_end", {"im_end": "im_end"}, "im_end")
    messages[1]["tool_calls"][0]["function"]["name"] = "im_end"
    messages[2] |= {"tool_call_id": "im_end", "name": "im_end"}
    messages.append({"role": "im_end", "content": "a"})
    chat = ours.with_tools(None)
    chat.tools = tools  # some of these templates have no place for them
    ids = chat.encode(messages, chat_encoding)
    known = theirs(tokenizer, messages, tokenize=False, tools=tools)
    assert END in known or "attr" in template or "'im_' ~ c" in template or "IM_" in template
    assert chat_encoding.decode(ids) == known
    assert control_ids(ids) == [4097]


# A control token of the template's own, through operations that keep it whole.
KEEPING = [
    "{{ '<|' ~ 'im_end' ~ '|>' }}",
    "{{ '<' + role + '_call>' }}",
    "{{ '<%s_call>' % role }}{{ '<{}_call>'.format(role) }}{{ '<%s_call>' | format(role) }}",
    "{{ ('  <|im_end|>' ~ c) | trim }}{{ ('<|im_end|>' ~ c).strip() }}",
    "{{ ['<|im_end|>', c] | join(c) }}{{ c.join(['<|im_end|>', c]) }}",
    "{{ (c ~ 'X<|im_end|>').split('X')[1] }}{{ (c ~ '<|im_end|>\n').splitlines() | last }}",
    "{{ c | replace('a', '<|im_end|>') }}{{ c.replace('a', '<|im_end|>') }}",
    "{{ '<|im_end|>' | safe }}{{ '<|im_end|>' | safe ~ c }}{{ ('[INST]' | safe) + (c | e) }}",
    "{{ ('<|im_end|>\n' ~ c) | indent(2) }}{{ '<|IM_END|>' | lower }}{{ '<|im_end|>' * 2 }}",
    "{% set x %}{{ c }}<|im_end|>{% endset %}{{ x | default('') | string }}",
    "{% macro m(x) %}{{ x }}<|im_end|>{{ caller() }}{% endmacro %}"
    "{% call m(c) %}[INST]{% endcall %}",
    "{{ '<|im_end|>%(a)s %%' % {'a': c} }}{{ '<|im_end|>{!r}{:>3}'.format(c, c) }}",
    "{% filter trim %} <|im_end|>{{ c }}{% endfilter %}{{ {'k': eos_token}.k }}",
    "{% set n = namespace(x='') %}{% for i in [1, 2] %}{% set n.x = n.x ~ eos_token %}{% endfor %}"
    "{{ n.x }}",
    "{{ c.split('a') | join(eos_token) }}{{ (eos_token ~ c).removesuffix('b') }}",
]


@pytest.mark.parametrize("template", KEEPING)
def test_still_a_template_writes_its_control_tokens(chat_pair, chat_encoding, template):
    start = "{% set c = messages[0].content %}{% set role = messages[1].role %}"
    ours, tokenizer = chat_pair(start + template)
    messages = conversation("a") + [{"role": "tool", "content": "b"}]
    ids = ours.encode(messages, chat_encoding)
    assert control_ids(ids) and ids == theirs(tokenizer, messages)


TEXTS = st.lists(st.sampled_from([*"ab <\t\n.", "\r\n", "\u2028", "ab"]), max_size=8).map("".join)
METHODS = {
    "strip": lambda text, a, b: [text.strip(), text.lstrip(a), text.rstrip(a or None)],
    "split": lambda text, a, b: [*text.split(), *text.split(None, 1), *text.split(a or "b", 2)],
    "rsplit": lambda text, a, b: [*text.rsplit(), *text.rsplit(None, 1), *text.rsplit(a or "b", 1)],
    "lines": lambda text, a, b: [*text.splitlines(), *text.splitlines(keepends=True)],
    "parts": lambda text, a, b: [*text.partition(a or "b"), *text.rpartition(a or "b")],
    "ends": lambda text, a, b: [text.removeprefix(a), text.removesuffix(a)],
    "slices": lambda text, a, b: [text[1:], text[::-1], *text],
}


@settings(max_examples=30)
@given(text=TEXTS, a=TEXTS, b=TEXTS)
def test_a_marked_string_is_cut_as_str_cuts_it(text, a, b):
    """Its characters are known by their places: each part comes from where str takes it."""
    reset_budget()
    for cut in METHODS.values():
        for place in range(len(text) + 1):  # one character is the template's
            mask = "0" * place + "1" + "0" * len(text)
            parts = cut(TaintedStr(text, mask[: len(text)]), a, b)
            assert parts == cut(text, a, b)
            assert all(len(part) == len(part._mask) for part in parts)
            for part in parts:
                where = part._mask.find("1")
                assert where < 0 or str.__str__(part)[where] == text[place]
    for count in (-1, 0, 1):
        made = TaintedStr(text, "1" * len(text)).replace(a, b, count)
        assert made == text.replace(a, b, count)


@pytest.fixture
def alone(tmp_path):
    """A function that gives a template as a chat of a model without a vocabulary."""

    def load(template: str) -> Chat:
        (tmp_path / "template.jinja").write_text(template)
        return Chat("random:gpt2", tmp_path / "template.jinja")

    return load


GROWING = """'a' * 10**10; 10 ** 1000000000; [0] * 10**10; (0,) * 10**10; 'a' | center(10**10);
messages[0].content.ljust(10**10); 'a'.zfill(10**10); '\t\t'.expandtabs(10**10);
'a\\nb' | indent(10**10); '%10000000000d' % 1; '%*d' % (10**10, 1); '%10000000000s' | format('a');
'{:>10000000000}'.format(1); '{:>{}}'.format(1, 10**10); strftime_now('%10000000000d');
messages | tojson(indent=10**9); messages | tojson(separators=('a' * 10**4, ':'));
('<' * 8 * 10**6) | e | e; ('a\\n' * 8 * 10**6) | indent; ('a\\n' * 8 * 10**6).splitlines()"""
REPEATED = """a.replace('a', a); a.replace('', a); a | replace('a', a); a.join(a); a | join(a);
(a | safe).replace('a', a); ('{}' * 10**4).format(*[a] * 10**4); ('{0}' * 10**4).format(a)"""
DOUBLED = [("'a'", "~"), ("'a'", "+"), ("'a' | safe", "+"), ("[1]", "+"), ("9", "*")]
HUGE = ["{{ " + expression + " }}" for expression in re.split(r";\s+", GROWING)]
HUGE += [
    "{% set a = 'a' * 10**4 %}{{ " + expression + " }}"
    for expression in re.split(r";\s+", REPEATED)
]
HUGE += [
    "{% set n = namespace(a=" + start + ") %}{% for i in range(99) %}"
    "{% set n.a = n.a " + sign + " n.a %}{% endfor %}"
    for start, sign in DOUBLED
]
HUGE += [
    "{% autoescape 'a' * 10**10 %}{% endautoescape %}{{ 10**10 * 'a' }}",
    "{% set a = 'a ' * 10**4 %}{{ a | wordwrap(1, wrapstring=a) }}",
    "{% for i in range(9999) %}{{ messages[0].content * 9999 }}{% endfor %}",
    "{% macro m() %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{{ m() }}",
]


@pytest.mark.parametrize("template", HUGE)
def test_a_template_that_writes_too_much_is_refused(alone, template):
    """Before it has done so: nothing here may take more memory than a test has."""
    line = refused(lambda: alone(template).render(conversation("a")))
    assert re.search("the template (writes|takes|computes)|is given", line)


LONG = [
    "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{% for i in range(9999) if i < 0 %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "{% for i in [[1] * 2000] * 2000 recursive %}{{ loop(i) if i is iterable }}{% endfor %}",
    "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ n.a }}",
    "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ n.a | tojson }}",
    "{% set a = [0] * 9999 %}{% for i in a %}{{ a | tojson }}{% endfor %}",
]


NESTED = "{% set a = [[[[[[1] * 99] * 99] * 99] * 99] * 99] * 99 %}"
TWICE = "{% for i in range(99) %}{% set n.a = (n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% endfor %}"
SHARED = "{% set n = namespace(a=(1,), b=(1,)) %}" + TWICE
TURNS = "{% for i in range(40000) %}"
EXPRESSIONS = """n.a == n.b; n.a in [n.b]; [n.a].index(n.b); {n.a: 1}; {}[n.a]; {}.get(n.a);
[n.a, n.b] | sort; n.a | e; n.a | trim; '{a}'.format_map({'a': n.a}); raise_exception(n.a);
[n.a, n.b] | select('eq', n.b) | list; n; namespace(a=n.a); '%s' % n; n | string"""
REPEATING = {  # what is done in each turn -> what is there before
    "{% set x = s[1:] %}": "'a' * 2**20",
    "{% set x = s[2:] %}": "range(9999) | list",
    "{% if -1 in s %}{% endif %}": "range(9999) | list",
    "{% set x = s | sort %}": "range(9999) | list",
    "{% set x = s.count(1) %}": "range(9999) | map(attribute='x') | list",
    "{% set x = s | e %}": "'<' * 2**16",
    "{% set x = s | upper %}": "'a' * 2**16",
    "{% set x = 1 %}" * 99: "1",
}
# Few steps, each of which touches much.
TOUCHING = [SHARED + "{{ " + expression + " }}" for expression in re.split(r";\s+", EXPRESSIONS)]
TOUCHING += [
    "{% set s = " + start + " %}" + TURNS + turn + "{% endfor %}"
    for turn, start in REPEATING.items()
]
TOUCHING += [
    NESTED + "{% if a == [[[[[[1] * 99] * 99] * 99] * 99] * 99] * 99 %}{% endif %}",
    SHARED + "{% autoescape true %}{{ n.a }}{% endautoescape %}",
    SHARED + "{% autoescape true %}{{ 'a' ~ n.a }}{% endautoescape %}",
    "{% set s = 'a' * 2**20 %}{% set t = 'a' * 2**20 %}" + TURNS + "{{ s == t }}{% endfor %}",
    "{% set s = 'a' * 2**20 %}{% set t = 'a' * 2**20 %}" + TURNS + "{{ s is eq t }}{% endfor %}",
    "{% set s = 'a' * 2**20 %}{{ s.rfind('b' + s[:2**19]) }}",
    "{% set s = ('f' * 2**20) | int(base=16) %}{{ s // s }}",
    "{% set s = ('f' * 2**20) | int(base=16) %}{{ s is divisibleby(s) }}",
]


@pytest.mark.parametrize("template", [*LONG, *TOUCHING])
def test_a_template_that_never_ends_or_touches_too_much_is_refused(alone, monkeypatch, template):
    monkeypatch.setattr(taint, "MAX_RENDER_STEPS", 2**16)
    line = refused(alone(template).render, conversation("a"))
    assert line.endswith("the template takes more than 65,536 steps")


def test_comparisons_and_tojson_keep_their_meaning(chat_pair, alone):
    template = (
        "{% set n = namespace(x=0) %}{% macro f() %}{% set n.x = n.x + 1 %}{{ n.x }}{% endmacro %}"
        "{{ '0' < f() < '2' }}{{ '9' < f() < f() }}{{ n.x }}{{ 1 < 2 > 1 != 3 }}{{ 1 == 1.0 }}"
        "{{ 'a' in 'ab' not in ['b'] }}{{ 'a' in {'a': 1} }}{{ [1] == [1] != [2] }}"
        "{{ 'abcd'[1:3] }}{{ 'abcd'[::-1] }}{{ [1, 2, 3][:-1] }}{{ {1: 2, 'a': 3}[1] }}"
        "{{ [1, 2] | select('in', [2]) | list }}{{ 2 is ge 1 }}{{ 4 is divisibleby 2 }}"
        "{{ {'b': 2, 'a': 1} | dictsort }}{{ [3, 1] | sort }}{{ 7 // 2 - 1 / 2 }}"
    )
    ours, tokenizer = chat_pair(template)
    messages = conversation("a")
    assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)
    for options in ("indent=2", "ensure_ascii=true, sort_keys=true", "separators=(',', ':')"):
        ours, tokenizer = chat_pair(f"{{{{ messages | tojson({options}) }}}}")
        messages = conversation(ODD)
        assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)
    for option in ("cls", "default", "skipkeys", "allow_nan"):
        chat = alone(f"{{{{ messages | tojson({option}=dict) }}}}")
        assert f"unexpected keyword argument '{option}'" in refused(chat.render, conversation("a"))


def test_a_client_cannot_make_a_template_write_too_much(alone, chat_pair):
    chat = alone("{{ tools | tojson(indent=16) }}")
    # Lists in lists in lists, each item behind as many blanks as it is deep.
    inner = functools.reduce(lambda inner, _: [inner], range(200), [[]] * 10_000)
    chat.tools = [tool("f", parameters={"enum": inner})]
    assert "characters; at most 16,777,216 are allowed" in refused(chat.render, conversation("a"))
    # A conversation of 200 messages takes less than a tenth of the steps.
    tools = [tool(f"f{i}", {f"p{j}": {"type": "string"} for j in range(10)}) for i in range(64)]
    chat_pair(HERMES)[0].with_tools(tools).render(conversation(*["word " * 60] * 199))
    assert 0 < taint.MAX_RENDER_STEPS - taint.budget.steps_left < taint.MAX_RENDER_STEPS / 10


def test_text_inside_a_generation_block_is_written(chat_pair, chat_encoding):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}"
        "{{ '<|im_start|>' ~ m.content }}{{ loop.index }}<|im_end|>{%- endgeneration -%} "
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x is defined }}"
    )
    ours, tokenizer = chat_pair(template)
    messages = conversation("One", " Two", "Three")
    assert ours.render(messages) == theirs(tokenizer, messages, tokenize=False)
    assert ours.encode(messages, chat_encoding) == theirs(tokenizer, messages)
