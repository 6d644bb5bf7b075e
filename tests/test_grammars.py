"""Regular expressions and grammars: outputs by hand, what is refused, and limits on their cost."""

import json
import re
import signal
import weakref

import llguidance
import pytest
from conftest import refused
from constrained import allows, compiled, drawn, letters, texts_of, vocabulary
from serving import small_encoding

from constraints import compiler
from constraints.compiler import compile_constraint, compiled_bytes, constraint_bytes
from constraints.grammar import Grammar
from constraints.vocabulary import Vocabulary
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative
from sampling import SamplingParams


@pytest.mark.parametrize(
    "regex", [r"", r"[a-c]{2,5}", r"(x|yy)*z", r"\d{3}-\d", r"é+🙂?", r"[^ab]", r" a|b "]
)
def test_outputs_match_the_expression(regex, story_model):
    found = [text for text in texts_of(story_model, drawn(8, 80, regex=regex)) if text is not None]
    assert found and all(re.fullmatch(regex, text) for text in found)


def test_outputs_are_of_the_grammar(story_model):
    grammar = 'start: sum\nsum: num ("+" num)*\nnum: /[1-9][0-9]?/ | "(" sum ")"\n'
    found = texts_of(story_model, drawn(12, 60, grammar=grammar))
    found = [text for text in found if text is not None]
    assert len(found) > 3
    assert all(set(text) <= set("0123456789+()") and eval(text) > 0 for text in found)


PARAMETRIC = "parametric rules (::)"
REFUSED = [  # fields, words of the error
    ({"regex": "["}, 'regex: at 1(8): invalid regex "["'),
    ({"regex": "a" * 4097}, "regex "),
    ({"regex": r"[^\s\S]"}, "regex: no token is allowed after 0 output tokens: no"),
    ({"grammar": "begin: x"}, "grammar: no start rule found"),
    ({"grammar": "start: x"}, 'grammar: at 1(8): unknown name: "x"'),
    ({"grammar": 'start: %json {"foo": 1}'}, "grammar: %json is not supported in a grammar"),
    ({"grammar": "start: " + "(" * 4000 + '"a"' + ")" * 4000}, "grammar: "),
    ({"grammar": "a" * 8193}, "grammar "),
    ({"regex": "a", "grammar": "b"}, "regex conflicts with grammar: only one constraint"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos conflicts with regex: the constraint"),
    ({"json_schema": 3}, "json_schema 3: must be None or a string of at most 65,536 bytes"),
    # What has no known bound.
    ({"grammar": 'start: p::0x0\np::_: "a" p::incr([0:20]) | ""'}, PARAMETRIC),
    ({"grammar": 'start: "b"{60} p::0\np::_: p::set_bit(1) | "a"'}, PARAMETRIC),
    ({"grammar": 'start: "a" // "\nb::_: "a" b::decr(_)'}, PARAMETRIC),
    ({"grammar": 'start: b # /\nb ::_: b::incr(_) "a" // /'}, PARAMETRIC),
    ({"grammar": 'start: "\\"" p::0 "\\""\np::_: "a"'}, PARAMETRIC),
    ({"grammar": 'start: "a" %if true'}, "%if"),
    ({"grammar": 'start: %regex {"substring_words": "a b"}'}, "%regex"),
    ({"grammar": 'start: %lark { start: "a" }'}, "%lark"),
    ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "%llguidance"),
    ({"grammar": '%declare X\nstart: "a"'}, "%declare"),
    ({"grammar": '%override start: "a"'}, "%override"),
    ({"grammar": "start: @other"}, "@other"),
    ({"grammar": "start: <|im_end|>"}, "<|im_end|>"),
    ({"grammar": "start: <[*]>"}, "<[*]>"),
    ({"grammar": "start: <[^5]>"}, "<[^5]> is not supported: output cannot contain special"),
    ({"grammar": 'start: x\nx[stop="b"]: /a/'}, "'stop'"),
    ({"grammar": 'start: x\nx[suffix="b"]: /a/'}, "'suffix'"),
    ({"grammar": "start: x\nx[max_tokens=5]: /a+/"}, "'max_tokens'"),
    ({"grammar": "start: x\nx[lazy, temperature=0.5]: /a/"}, "'temperature'"),
    ({"grammar": "start: x\n?x[ capture ] : /a/"}, "'capture'"),
]


@pytest.mark.parametrize("constraint, words", REFUSED, ids=lambda value: str(value)[:40])
def test_constraints_are_refused_by_name_in_one_line(constraint, words, story_model):
    found = refused(lambda: texts_of(story_model, [SamplingParams(20, **constraint)]))
    assert words in found and found.startswith(("grammar", "regex", "ignore_eos", "json_schema"))


KEPT = [
    ('start: "::a" // ::\n# ::', "::a"),
    ("start: /::+/", ":::"),
    ('start: "\\"" "::"', '"::'),
    ('start: "<a>" "@b" "%if" "="', "<a>@b%if="),
    ("start: x\nx[lazy]: /a+b/", "aab"),
    ('%import common.INT\n%ignore " "\nstart: INT ("," INT)*', "12, 3"),
    ('start: [x] y~2..3 -> z\nx: "a"\n!y: "b" | "B"i', "abb"),
    ("start: C\nC: A & ~B\nA: /[ab]+/\nB: /a+/", "ab"),
    ("start: " + " | ".join(f'"{i}"' for i in range(1900)), "1899"),
]


@pytest.mark.parametrize("grammar, text", KEPT, ids=lambda value: str(value)[:30])
def test_rules_terminals_and_expressions_are_a_grammar(grammar, text):
    assert allows("grammar", grammar, text) and not allows("grammar", grammar, text + "x")


def test_what_a_vocabulary_cannot_write_ends_the_output_with_a_reason(tiny):
    model = tiny(vocab_size=8, eos_token_id=7)
    params = SamplingParams(20, regex="(a|b)c d")  # there is no blank
    options = {"encoding": letters()}
    for run in (
        lambda: list(generate(model, [[1]], params, **options)),
        lambda: list(generate_speculative(model, model, [1], params, 3, **options)),
    ):
        message = refused(run)
        assert message.startswith("no token is allowed after ") and "vocabulary" in message


def steps_of(kind, source, text: str) -> tuple[int, str]:
    """Return how many characters, one by one, until no token may follow, and why none may."""
    matcher = compiled(kind, source).matcher()
    output = []
    for character in text:
        token = vocabulary().ids[character.encode()][0]
        try:
            if not matcher.checked_token_mask(output)[token]:
                return len(output), "another text"
        except UserError as error:
            return len(output), str(error)
        output.append(token)
    return len(output), ""


AMBIGUOUS = [
    'start: start start | "a"',
    'start: start start start | "a"',
    'start: x+\nx: y+\ny: z+\nz: "a"+',
    'start: x{1000000}\nx: "a"? "b"?',
    'start: "a" start | "a"',
]


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_output(grammar, monkeypatch):
    """Each row takes time with the cube of its items; a server has a budget of time, too."""
    monkeypatch.setattr("constraints.grammar.MAX_ITEMS", 100)
    count, error = steps_of("grammar", grammar, "a" * 120)
    assert 0 < count < 120
    assert "max is 100" in error and "left-recursive" in error


def test_items_and_states_are_counted(monkeypatch):
    grammar = 'start: x ("," x)*\nx: "a" | "(" start ")"'
    assert steps_of("grammar", grammar, "a,(a,a)," * 80) == (640, "")
    lists = [{"type": "array", "items": {"$ref": "#"}, "maxItems": 1000 + i} for i in range(200)]
    count, error = steps_of("json_schema", json.dumps({"anyOf": [*lists, {"const": 1}]}), "[[")
    assert count == 1 and "max is 2000; use fewer alternatives and optional prop" in error
    monkeypatch.setattr("constraints.grammar.MAX_STATES", 1000)
    count, error = steps_of("regex", ".*a.{100}b.*c", "abdxfaad" * 20)
    assert count < 160 and "too many states" in error


def test_terminals_that_double_each_other_are_bounded():
    def doubled(levels):
        lines = [f"A{level}: A{level + 1} A{level + 1}" for level in range(levels)]
        return "\n".join(["start: A0", *lines, f'A{levels}: "a"'])

    assert allows("grammar", doubled(8), "a" * 256) and not allows("grammar", doubled(8), "a" * 255)
    for kind, source in (("grammar", doubled(16)), ("regex", "(a{300}){300}")):
        assert "too many expressions" in refused(compiled, kind, source)


INTEGERS = {"type": "array", "items": {"type": "integer"}}
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)} | {"a900": {"type": "null"}}
LARGE = [
    {"json_schema": INTEGERS | {"maxItems": 10**9}},
    {"json_schema": INTEGERS | {"minItems": 10**9}},
    {"json_schema": {"type": "string", "minLength": 10**9}},
    {"json_schema": {"$defs": CHAIN, "$ref": "#/$defs/a0"}},
    {"json_schema": {"enum": [f"word {i}" for i in range(3000)]}},
    {"json_schema": {"properties": {f"p{i}": {} for i in range(900)}, "type": "object"}},
    {"json_schema": {"type": "string", "pattern": "^(.*a){30}$"}},
    {"json_schema": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
    {"regex": "(.*a){1000}"},
    {"regex": "(a|b)*a(a|b){30}"},
    {"grammar": "start: start start | /a/"},
    {"grammar": 'start: "a"{1000000000}'},
]


@pytest.mark.parametrize("constraint", LARGE, ids=lambda value: str(value)[:50])
def test_a_large_constraint_costs_little_or_ends_with_a_reason(constraint, story_model):
    constraint = {
        name: v if isinstance(v, str) else json.dumps(v) for name, v in constraint.items()
    }
    try:
        texts_of(story_model, drawn(1, limit=8, **constraint))
    except UserError as error:
        assert str(error).startswith((*constraint, "no token may follow"))


LONG = "Lily saw a cat. " * 4000
FORCING = [
    {"json_schema": json.dumps({"const": LONG})},
    {"grammar": f'start: "{LONG[:16]}"{{20000}}'},
]


@pytest.mark.parametrize("constraint", FORCING, ids=lambda value: str(value)[:40])
def test_of_a_long_text_that_must_follow_little_is_tokenized(constraint, monkeypatch):
    """Else each token takes 10 ms to 300 ms, and what is kept of spellings half a gigabyte."""
    sizes = []
    tokenize = Vocabulary.tokenize

    def watched(vocabulary, text):
        sizes.append(len(text))
        return tokenize(vocabulary, text)

    monkeypatch.setattr(Vocabulary, "tokenize", watched)
    own = Vocabulary(small_encoding(), 4096, (4095,))
    matcher = compile_constraint(SamplingParams(**constraint), own).matcher()
    output = []
    for _ in range(20):
        (token,) = matcher.token_mask(output).nonzero()[:, 0].tolist()
        output.append(token)
    text = b"".join(own.pieces[token] for token in output).decode()
    assert len(text) > 40 and LONG.startswith(text.lstrip('"'))
    assert sizes and max(sizes) < 1000


def test_few_bytes_of_constraints_are_kept_for_later(monkeypatch):
    """Eight small constraints, or one large one; what something else holds counts, too."""
    compiler.clear_constraint_cache()
    monkeypatch.setattr(compiler, "compiled", weakref.WeakValueDictionary())
    values = [f"{number:x}" * 400 for number in range(10, 42)]
    large = [json.dumps({"enum": [name + value for value in values]}) for name in "abc"]
    assert constraint_bytes(large[0]) > compiler.LARGE_BYTES
    for source in large:
        compile_constraint(SamplingParams(json_schema=source), vocabulary())
    assert compiled_bytes() == constraint_bytes(large[-1])
    held = compile_constraint(SamplingParams(json_schema=large[0]), vocabulary())
    for count in range(12):
        compile_constraint(SamplingParams(regex=f"a{{{count + 1}}}b"), vocabulary())
    kept = constraint_bytes(large[0]) + 8 * constraint_bytes("a{9}b")
    assert abs(compiled_bytes() - kept) < 8 * compiler.SOURCE_BYTES
    compiler.clear_constraint_cache()
    assert compiled_bytes() == constraint_bytes(large[0])
    del held
    assert compiled_bytes() == 0


def test_ctrl_c_ends_a_script_in_native_code(monkeypatch):
    """Python's own handler waits for llguidance to return."""
    seen = []

    class Watched:
        def __init__(self, *args, **options):
            seen.append(signal.getsignal(signal.SIGINT))
            self.own = known(*args, **options)

        def __getattr__(self, name):
            if name in ("try_consume_tokens", "unsafe_compute_mask_ptr"):
                seen.append(signal.getsignal(signal.SIGINT))
            return getattr(self.own, name)

        def deep_copy(self):
            copy = Watched.__new__(Watched)
            copy.own = self.own.deep_copy()
            return copy

    known = llguidance.LLMatcher
    for name in ("grammar_from_lark", "grammar_from_regex"):
        setattr(Watched, name, staticmethod(getattr(known, name)))
    monkeypatch.setattr(llguidance, "LLMatcher", Watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Grammar("regex", "a", vocabulary()).matcher().token_mask([vocabulary().ids[b"a"][0]])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        count = len(seen)
        assert count > 4 and set(seen) == {signal.SIG_DFL}
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a script in the background
        Grammar("regex", "a", vocabulary())
        assert len(seen) > count and set(seen[count:]) == {signal.SIG_IGN}
    finally:
        signal.signal(signal.SIGINT, before)
