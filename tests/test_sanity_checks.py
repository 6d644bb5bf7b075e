"""Lesson 08: values out of range and broken models are refused, in one line that says why."""

import math
from fractions import Fraction

import pytest
import torch
from conftest import is_one_line, run
from hypothesis import given
from hypothesis import strategies as st

import infer
from errors import UserError
from loading.load import save_model
from sampling import SamplingParams

ODD = [None, True, False, "", "2", [1], math.nan, math.inf, -math.inf, Fraction(1, 2), 1j]
odd_values = st.sampled_from(ODD)
no_integers = odd_values | st.floats()
too_large = st.just(10**400)
BAD = {  # bad values, and what is allowed
    "max_new_tokens": (no_integers | st.integers(max_value=-1), "an integer >= 0"),
    "temperature": (
        odd_values | st.floats(max_value=0, exclude_max=True) | too_large,
        "a finite number >= 0",
    ),
    "top_k": (no_integers | st.integers(max_value=-1), "an integer >= 0"),
    "top_p": (
        odd_values | st.floats(max_value=0) | st.floats(1, exclude_min=True) | too_large,
        "a number in (0, 1]",
    ),
    "ignore_eos": (st.sampled_from([None, "no", 0, 1, 0.0]), "True or False"),
}


@pytest.mark.parametrize("name", BAD)
@given(data=st.data())
def test_bad_values_are_named_with_their_range(name, data):
    values, allowed = BAD[name]
    value = data.draw(values)
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name} {value!r}: must be {allowed}"


@given(
    max_new_tokens=st.integers(0, 10**9),
    temperature=st.floats(0, 1e308) | st.integers(0, 9),
    top_k=st.integers(0, 10**9),
    top_p=st.floats(0, 1, exclude_min=True) | st.just(1),
    ignore_eos=st.booleans(),
)
def test_still_accepts_every_good_value(**values):
    SamplingParams(**values)


@pytest.mark.parametrize("temperature", [1, 10**300])
def test_an_integer_for_a_number_becomes_a_float(tiny, temperature):
    """torch takes no integer above 2**64 - 1."""
    params = SamplingParams(temperature=temperature, top_p=1)
    assert (type(params.temperature), type(params.top_p)) == (float, float)
    assert params == SamplingParams(temperature=float(temperature), top_p=1.0)
    tokens = run(tiny(), [[1]], max_new_tokens=2, temperature=temperature, ignore_eos=True)
    assert len(tokens) == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--max-new-tokens -1", "max_new_tokens -1: must be an integer >= 0"),
        ("--temperature nan", "temperature nan: must be a finite number >= 0"),
        ("--num-samples 0", "--num-samples 0: must be an integer >= 1"),
        ("--num-samples 65537", "--num-samples 65537: at most 65536 sequences are allowed"),
        ("--seed -1", "--seed -1: must be an integer from 0 to 2**64 - 1"),
        (f"--seed {2**64}", "2**64 - 1"),
        ("--top-k much", "--top-k: invalid"),
    ],
)
def test_the_command_line_exits_with_one_line(cli, tiny_checkpoint, monkeypatch, arguments, words):
    # A bad value that is let through costs no time.
    monkeypatch.setattr(infer, "generate", lambda *args: iter(()))
    given = ("--model", tiny_checkpoint, "--temperature", 1, *arguments.split())
    assert is_one_line(cli(*given), words)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(tiny, cli, tiny_checkpoint, broken, temperature):
    model = tiny(dtype=torch.float32, vocab_size=4096, eos_token_id=4095)
    with torch.no_grad():
        model.ln_f.bias[0] = broken
    with pytest.raises(ValueError, match="logits that are NaN or infinite"):
        run(model, [[1]], max_new_tokens=1, temperature=temperature)
    save_model(model, tiny_checkpoint)
    options = ("--prompt", "One day", "--temperature", temperature)
    assert is_one_line(cli("--model", tiny_checkpoint, *options), "NaN")


def test_an_error_in_mid_text_starts_a_line_of_its_own(cli, tiny_checkpoint, monkeypatch):
    def broken(*args):
        yield [65]
        raise UserError("broken now")

    monkeypatch.setattr(infer, "generate", broken)
    options = ("--prompt", "One day", "--temperature", 1, "--seed", 2**64 - 1)
    code, out, err = cli("--model", tiny_checkpoint, *options)
    assert code == 2 and out == "One dayb\n" and err.splitlines()[-1].endswith("error: broken now")
