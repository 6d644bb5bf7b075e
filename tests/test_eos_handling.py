"""Lesson 02: a text ends with an EOS token that the model generates, and with no other."""

import json

import pytest
from conftest import CHECKPOINTS, run, run_rows

import infer
from loading.load import load_model
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import load_encoding


@pytest.fixture
def ending(tiny):
    """A random model, and its greedy text from [1]; the sixth token of that is declared the EOS."""
    (tokens,) = run_rows(tiny(seed=12), [[1]], max_new_tokens=12)
    assert tokens[5] not in tokens[:5]
    return tiny(seed=12, eos_token_id=tokens[5]), tokens


def test_generation_stops_with_eos(ending):
    model, tokens = ending
    assert run(model, [[1]], max_new_tokens=12) == [[token] for token in tokens[:6]]


def test_each_of_several_eos_tokens_ends_a_text(tiny, ending):
    _, tokens = ending
    assert tokens[2] not in tokens[:2]
    model = tiny(seed=12, eos_token_ids=(tokens[5], tokens[2]))
    assert run(model, [[1]], max_new_tokens=12) == [[token] for token in tokens[:3]]


def test_a_finished_row_yields_none_and_leaves_the_others_alone(ending):
    model, _ = ending
    prompts = [[1], [2], [3], [4]]
    alone = [run_rows(model, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    lengths = [len(tokens) for tokens in alone]
    assert len(set(lengths)) > 1
    steps = run(model, prompts, max_new_tokens=12)
    assert len(steps) == max(lengths)
    for row, tokens in enumerate(alone):
        assert [step[row] for step in steps] == tokens + [None] * (len(steps) - len(tokens))


def test_ignore_eos_goes_on(ending):
    model, tokens = ending
    assert run(model, [[1]], max_new_tokens=12, ignore_eos=True) == [[token] for token in tokens]


@pytest.mark.parametrize("prompt", [[60], [3, 60], [60, 60]])
def test_still_generates_after_a_prompt_that_ends_in_eos(tiny, prompt):
    assert len(run(tiny(), [prompt], max_new_tokens=3)) == 3


def test_skipped_tokens_print_nothing():
    encoding = load_encoding(CHECKPOINTS / "stories", 4096)
    tokens = encoding.encode("One<|endoftext|> day", allowed_special="all")

    def streamed(tokens, *skip):
        stream = IncrementalDetokenizer(encoding, *skip)
        return [*(stream.add(token) for token in tokens), stream.end()]

    assert "".join(streamed(tokens)) == "One<|endoftext|> day"
    assert "".join(streamed(tokens, (4095,))) == "One day"
    half, other = (encoding.encode_single_token(byte) for byte in (b"\xc3", b"\xa9"))
    assert "".join(streamed([half, 4095, other], (4095,))) == "é"
    assert streamed(tokens, tuple(set(tokens))) == [""] * (len(tokens) + 1)


def test_eos_is_not_printed(cli, tiny_checkpoint):
    """The last token that is new in a text becomes the EOS: what is printed ends before it."""
    encoding = load_encoding(tiny_checkpoint, 4096)
    prompt = "One day"
    (tokens,) = run_rows(load_model(tiny_checkpoint), [encoding.encode(prompt)], max_new_tokens=15)
    end = max(index for index, token in enumerate(tokens) if token not in tokens[:index])
    assert end > 0
    config = tiny_checkpoint / "config.json"
    fields = json.loads(config.read_text()) | {"eos_token_id": [4095, tokens[end]]}
    config.write_text(json.dumps(fields))
    args = ("--model", tiny_checkpoint, "--prompt", prompt, "--max-new-tokens", 30)
    code, out, err = cli(*args)
    assert (code, out) == (0, prompt + encoding.decode(tokens[:end]) + "\n")
    assert err.startswith(f"{end + 1} tokens")
    code, out, err = cli(*args, "--ignore-eos")
    assert code == 0
    assert err.startswith("30 tokens")
    assert out.startswith(prompt + encoding.decode(tokens[: end + 1]))


def test_rows_that_have_ended_are_not_printed_on(cli, monkeypatch, tiny_checkpoint):
    steps = [[65], [None], [None]]
    monkeypatch.setattr(infer, "generate", lambda *args, **options: iter(steps))
    code, _, err = cli("--model", tiny_checkpoint)
    assert code == 0
    assert err.startswith("1 tokens")
