"""Texts of masked logits. Oracle: the chances of all spellings of eight tokens, by hand."""

import functools
import inspect

import pytest
import torch
from conftest import refused
from constrained import CHOICE_LISTS, chances, counts_of, letters, small, spelled, write
from draws import chi_square

from infer import generate
from native import use_native
from sampling import SamplingParams
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import Encoding


def test_what_is_compiled_is_kept_for_its_own_vocabulary():
    from constraints.compiler import compile_constraint
    from constraints.vocabulary import get_vocabulary

    vocabularies = [get_vocabulary(letters(), 8, (end,)) for end in (6, 7, 6)]
    compiled = [compile_constraint(SamplingParams(choices=("a",)), each) for each in vocabularies]
    assert compiled[0] is compiled[2]
    found = [each.matcher().token_mask([0]).nonzero()[:, 0].tolist() for each in compiled]
    assert found == [[6], [7], [6]]


@pytest.mark.parametrize("choices", CHOICE_LISTS[1:2] + CHOICE_LISTS[4:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_texts_have_the_renormalised_probabilities(choices, dtype, tiny, compiled):
    """float64: torch draws; float32: C does."""
    model = small(tiny, dtype=dtype)
    choices = list(dict.fromkeys(choices))
    expected = torch.tensor(list(chances(model, [1, 2], choices).values()), dtype=torch.float64)
    assert expected.sum().item() == pytest.approx(1)
    if dtype == torch.float32:
        use_native(model)
    counts = counts_of(write(model, choices, 1500), choices)
    assert chi_square(counts, expected) < 5 * len(choices) + 6


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 7},  # more than are allowed
        {"top_k": 1},
        {"top_p": 0.5},
        {"top_p": 0.999, "temperature": 30.0},
        {"repetition_penalty": 1e300},  # its clamp makes numbers of -inf
        {"repetition_penalty": 1e-300, "presence_penalty": 2.0},
        {"temperature": 1e-30},
        {"temperature": 1e300},
        {"seed": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("native", [False, True])
def test_nothing_else_is_ever_written(fields, native, tiny, compiled):
    for choices in CHOICE_LISTS:
        model = small(tiny, dtype=torch.float32)
        if native:
            use_native(model)
        counts_of(write(model, choices, 12, **fields), choices)


def test_each_text_is_that_of_its_own_run_also_past_the_window(tiny):
    """Rows of a batch with other choices or none, and no cache."""
    model = small(tiny)
    long = "abcabcaab" * 5  # the window is 16
    each = [
        SamplingParams(60, choices=(long, long + "c", "b"), temperature=1.0, seed=3),
        SamplingParams(5, temperature=1.0, seed=4, ignore_eos=True),
        SamplingParams(60, choices=("b" + long, "ba")),
        SamplingParams(3, choices=(long,)),
    ]
    prompts = [[1], [2, 3], [4, 5, 1], [0]]
    options = {"encoding": letters()}
    together = list(zip(*generate(model, prompts, each, **options)))
    for prompt, own, row in zip(prompts, each, together):
        for use_cache in (True, False):
            steps = generate(model, [prompt], own, use_cache=use_cache, **options)
            assert [token for (token,) in steps] == [token for token in row if token is not None]
    assert spelled([token for token in together[0] if token is not None][:-1]) in each[0].choices
    assert long.startswith(spelled(together[3][:3]))  # cut by its limit, and no choice


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_first_blank_of_sentencepiece_is_written_as_it_stands(kind, tiny):
    """What infer.py and servers print of an output is the choice itself, with its blanks."""
    from test_sentencepiece import FORMS, made

    encoding = Encoding("tokenizer.json", made(FORMS[kind]))
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
    assert message in refused(lambda: SamplingParams(**fields))


def test_what_cannot_be_written_is_refused_before_anything_is(tiny):
    assert "encoding" in inspect.signature(generate).parameters
    model = small(tiny)

    def write(encoding, choice):
        list(generate(model, [[1]], SamplingParams(choices=(choice,)), encoding=encoding))

    assert "needs an encoding" in refused(write, None, "a")
    assert "choices: the vocabulary lacks these bytes" in refused(write, letters(), "a d")


def test_a_value_that_is_too_long_does_not_come_back_in_its_error():
    for fields in ({"temperature": "x" * 10**6}, {"choices": ("x" * 10**6,)}):
        message = refused(functools.partial(SamplingParams, **fields))
        assert 500 < len(message) < 700
