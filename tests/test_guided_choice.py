"""Outputs that are one of a list, by hand over all outputs of eight tokens."""

import itertools

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, refused
from constrained import END, PIECES, chances, counts_of, letters, may_follow, spelled, write
from draws import chi_square
from test_sentencepiece import FORMS, made

import infer_speculative
from constraints.choices import ChoiceTrie
from constraints.compiler import compile_constraint, make_matcher
from constraints.vocabulary import Vocabulary, get_vocabulary
from infer import generate
from native import use_native
from sampling import SamplingParams
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import Encoding

DRAFT = CHECKPOINTS / "stories-draft"
LISTS = [
    ("a",),
    ("ab", "abc", "abcab"),  # each the beginning of the next one
    ("", "b"),
    ("",),
    ("ca", "cab", "ca"),  # a special token has this name; one comes twice
    ("aaaa", "abab", "cccc", "bca"),
]


def small(tiny, **shape):
    return tiny(vocab_size=8, eos_token_id=END, **shape)


@pytest.mark.parametrize("choices", LISTS, ids=str)
def test_the_allowed_tokens_are_those_that_may_follow(choices, tiny):
    """After each beginning of up to four tokens, also where the last call asked for another one."""
    matcher = make_matcher(SamplingParams(choices=choices), letters(), small(tiny).config)
    beginnings = [()]
    checked = 0
    for length in range(5):
        for tokens in itertools.product(range(len(PIECES)), repeat=length):
            if tokens and tokens[:-1] not in beginnings:
                continue
            if not any(choice.startswith(spelled(tokens)) for choice in choices):
                assert matcher.token_mask(list(tokens)).all()  # whoever left is not led
                continue
            beginnings.append(tokens)
            allowed = matcher.token_mask(list(tokens)).nonzero()[:, 0].tolist()
            assert set(allowed) == may_follow(tokens, choices)
            checked += 1
    assert checked >= 1


class Spelled:
    """An encoding of a few tokens: an empty one, one without text, two with the same text."""

    added_token_ids = {"<s>": 0}
    special_tokens_set = {"<s>"}
    decode_single_token_bytes = {0: b"<s>", 1: b"a", 2: b"", 4: b"a", 5: b"b"}.__getitem__


def test_a_vocabulary_leaves_out_what_is_no_text():
    vocabulary = Vocabulary(Spelled(), 6, (5, 1000, 0))
    assert vocabulary.pieces == [None, b"a", None, None, b"a", None]
    matcher = ChoiceTrie(("a", "aa"), vocabulary).matcher()
    for output, expected in [([], {1, 4}), ([1], {0, 1, 4, 5}), ([1, 4], {0, 5})]:
        assert set(matcher.token_mask(output).nonzero()[:, 0].tolist()) == expected


def test_what_is_compiled_is_kept_for_its_own_vocabulary():
    vocabularies = [get_vocabulary(letters(), 8, (end,)) for end in (6, 7, 6)]
    compiled = [compile_constraint(SamplingParams(choices=("a",)), each) for each in vocabularies]
    assert compiled[0] is compiled[2]
    found = [each.matcher().token_mask([0]).nonzero()[:, 0].tolist() for each in compiled]
    assert found == [[6], [7], [6]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_have_the_renormalised_probabilities(dtype, tiny, compiled):
    """float64: torch draws; float32: C does."""
    model = small(tiny, dtype=dtype)
    choices = LISTS[5]
    expected = torch.tensor(list(chances(model, [1, 2], choices).values()), dtype=torch.float64)
    assert expected.sum().item() == pytest.approx(1)
    if dtype == torch.float32:
        use_native(model)
    counts = counts_of(write(model, choices, 1500), choices)
    assert chi_square(counts, expected) < 5 * len(choices) + 6


FIELDS = [{"temperature": 0.0}, {"temperature": 1e-30}, {"temperature": 1e300}, {"seed": None}]
FIELDS += [{"top_k": 7}, {"top_k": 1}, {"top_p": 0.5}, {"top_p": 0.999, "temperature": 30.0}]
FIELDS.append({"repetition_penalty": 1e300})  # its clamp makes numbers of -inf
FIELDS.append({"repetition_penalty": 1e-300, "presence_penalty": 2.0})


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_nothing_else_is_ever_written(fields, native, tiny, compiled):
    for choices in LISTS:
        model = small(tiny, dtype=torch.float32)
        if native:
            use_native(model)
        counts_of(write(model, choices, 12, **fields), choices)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_first_blank_of_sentencepiece_is_written_as_it_stands(kind, tiny):
    """What infer.py and servers print of an output is the choice itself, with its blanks."""
    encoding = Encoding("tokenizer.json", made(FORMS[kind]))
    vocabulary = get_vocabulary(encoding, 640, (2,))
    for text in ("", " the", "the end", '{"é🙂": 1}'):
        pieces = [vocabulary.pieces[token] for token in vocabulary.tokenize(text)]
        assert b"".join(pieces) == text.encode()
    model = tiny(vocab_size=640, eos_token_id=2)
    choices = ("the end", " the end", "é🙂", "\n")
    for seed in range(20):
        params = SamplingParams(40, choices=choices, temperature=1.0, seed=seed)
        steps = [token for (token,) in generate(model, [[1, 300]], params, encoding=encoding)]
        stream = IncrementalDetokenizer(encoding, (2,))
        assert "".join(map(stream.add, steps)) + stream.end() in choices
        assert steps[-1] == 2


WRONG = [
    ({"choices": ["a"]}, "choices ['a']: must be a tuple of strings of at most"),
    ({"choices": (1,)}, "choices (1,): must be a tuple of strings"),
    ({"choices": ("\udcff",)}, "must be a tuple of strings of at most 16,384 bytes"),
    ({"choices": ("a" * 16385,)}, "must be a tuple of strings of at most 16,384 bytes"),
    ({"choices": ("a",), "ignore_eos": True}, "ignore_eos conflicts with choices"),
    ({"choices": ("a",), "min_tokens": 1}, "min_tokens conflicts with choices"),
    ({"choices": ("a",), "stop_token_ids": (1,)}, "stop_token_ids conflicts with choices"),
]


@pytest.mark.parametrize("fields, message", WRONG, ids=str)
def test_bad_values_are_named(fields, message):
    found = refused(lambda: SamplingParams(**fields))
    assert message in found and len(found) < 700  # without a value that is too long


def test_what_cannot_be_written_is_refused_before_anything_is(tiny):
    model = small(tiny)

    def write(encoding, *choices):
        list(generate(model, [[1]], SamplingParams(choices=choices), encoding=encoding))

    assert "needs an encoding" in refused(write, None, "a")
    message = refused(write, letters(), "abc", "a d", "é")
    assert message == "choices: the vocabulary lacks these bytes: 20 64 a9 c3"
    model = tiny(vocab_size=8, eos_token_ids=(60,))
    assert "no EOS token" in refused(write, letters(), "a")


SAID = ["--model", DRAFT, "--prompt", "Lily saw a big"]


def test_the_command_line_writes_one_of_them(cli, run_main, tmp_path):
    assert "--choice TEXT" in cli("--help")[1] and "()" not in cli("--help")[1]
    choices = ["--choice", " dog", "--choice", " dog.", "--choice", " elephant"]
    code, out, err = cli(*SAID, *choices)
    assert (code, "note" in err) == (0, False)
    assert out.removeprefix(SAID[3]).strip("\n") in (" dog", " dog.", " elephant")
    drafted = ["--target", DRAFT, "--draft", "lookup", *SAID[2:], *choices]
    assert run_main(infer_speculative.main, *drafted)[:2] == (0, out)
    assert cli(*SAID, "--choice", "")[:2] == (0, SAID[3] + "\n")
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: " dog" | " cat"')
    assert cli(*SAID, "--grammar", grammar)[1] in (SAID[3] + " dog\n", SAID[3] + " cat\n")
    assert cli(*SAID, "--regex", " (x|z) ?")[1].startswith(SAID[3] + " ")


def test_an_output_that_its_limit_cuts_is_noted(cli):
    options = ["--choice", " elephant and zebra", "--choice", " cat", "--num-samples", 40]
    options += ["--temperature", 3, "--seed", 1, "--max-new-tokens", 2]
    _, out, err = cli(*SAID, *options)
    rows = [text.strip("\n") for text in out.split("\n" + "-" * 40 + "\n")]
    cut = len(rows) - rows.count(SAID[3] + " cat")
    assert 0 < cut < 40
    assert err.endswith(f"note: --max-new-tokens 2 truncated {cut} of 40 constrained outputs\n")
    _, out, err = cli(*SAID, "--choice", " big", "--max-new-tokens", 1)  # whole, if not ended
    assert (out, "note" in err) == (SAID[3] + " big\n", False)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--choice", "a", "--ignore-eos"], ["ignore_eos conflicts with choices"]),
        (["--choice", "a", "--num-beams", 2], ["--num-beams", "omit --choice\n"]),
        (["--choice"], ["--choice", "expected one argument"]),
        (["--choice", "\udcff"], ["--choice '\\udcff': not UTF-8 text\n"]),
        (["--json-schema", "/missing.json"], ["--json-schema", "No such file"]),
        (["--grammar", CHECKPOINTS], ["--grammar", "Is a directory"]),
        (["--regex", "["], ["regex: ", "unclosed character class"]),
        (["--regex", "a", "--choice", "b"], ["choices conflicts with regex"]),
        (["--regex", "a", "--num-beams", 2], ["omit --regex"]),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(cli, options, words):
    assert is_one_line(cli(*SAID, *options), *words)
