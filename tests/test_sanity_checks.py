"""Lesson 08: values out of range and broken models are refused, in one line that says what is allowed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

not_numbers = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.just([1]), st.just(math.nan))
BAD = {
    "max_new_tokens": not_numbers | st.integers(max_value=-1) | st.floats(),
    "temperature": not_numbers | st.floats(max_value=0, exclude_max=True) | st.sampled_from([math.inf, -math.inf]),
    "top_k": not_numbers | st.integers(max_value=-1) | st.floats(),
    "top_p": not_numbers | st.floats(max_value=0) | st.floats(min_value=1, exclude_min=True),
}
ALLOWED = {
    "max_new_tokens": "an integer >= 0",
    "temperature": "a finite number >= 0",
    "top_k": "an integer >= 0",
    "top_p": "a number in (0, 1]",
}


@pytest.mark.parametrize("name", BAD)
@given(data=st.data())
def test_bad_values_are_named_with_their_range(name, data):
    from infer import SamplingParams

    value = data.draw(BAD[name])
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name} is {value!r}; it must be {ALLOWED[name]}"


@given(
    max_new_tokens=st.integers(0, 10**9),
    temperature=st.floats(0, 1e308) | st.integers(0, 9),
    top_k=st.integers(0, 10**9),
    top_p=st.floats(0, 1, exclude_min=True) | st.just(1),
)
def test_still_accepts_every_good_value(**values):
    from infer import SamplingParams

    SamplingParams(**values)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--max-new-tokens", "-1"], "max_new_tokens is -1; it must be an integer >= 0"),
        (["--temperature", "-0.5"], "temperature is -0.5; it must be a finite number >= 0"),
        (["--temperature", "nan"], "temperature is nan; it must be a finite number >= 0"),
        (["--top-k", "-3"], "top_k is -3; it must be an integer >= 0"),
        (["--top-p", "0"], "top_p is 0.0; it must be a number in (0, 1]"),
        (["--top-p", "1.5"], "top_p is 1.5; it must be a number in (0, 1]"),
        (["--num-samples", "0"], "--num-samples 0: it must be an integer >= 1"),
        (["--seed", "-1"], "--seed -1: it must be an integer from 0 to 2**64 - 1"),
        (["--seed", str(2**64)], "2**64 - 1"),
    ],
)
def test_the_command_line_exits_with_one_line(cli, tiny_checkpoint, arguments, words):
    code, out, err = cli("--model", tiny_checkpoint, *arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "option", ["--max-new-tokens", "--temperature", "--top-k", "--top-p", "--num-samples", "--seed"]
)
def test_still_one_line_for_what_is_no_number(cli, option):
    code, out, err = cli(option, "much")
    assert code == 2 and out == "" and f"{option}: invalid" in err and err.count("\n") == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(tiny, broken, temperature):
    from infer import SamplingParams, generate

    model = tiny()
    with torch.no_grad():
        model.ln_f.bias[0] = broken
    with pytest.raises(ValueError, match="logits that are NaN or infinite"):
        next(generate(model, [[1]], SamplingParams(temperature=temperature)))


def test_a_broken_checkpoint_exits_with_one_line_and_no_text(cli, tiny, tiny_checkpoint):
    model = tiny(dtype=torch.float32, vocab_size=4096, eos_token_id=4095)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[3, 3] = math.nan
    model.save_pretrained(tiny_checkpoint)
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", "One day")
    assert code == 2 and out == "" and "NaN" in err and err.count("\n") == 1
