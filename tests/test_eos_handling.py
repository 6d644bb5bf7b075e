"""Lesson 02: a text ends with the EOS token that the model generates, and with no other."""

import json

import pytest


def run(model, prompts, **params):
    from infer import SamplingParams, generate

    return list(generate(model, prompts, SamplingParams(**params)))


@pytest.fixture
def ending(tiny):
    """A random model whose greedy text from [1] ends with its sixth token, because that token is declared the EOS."""
    tokens = [step[0] for step in run(tiny(seed=12), [[1]], max_new_tokens=12)]
    assert tokens[5] not in tokens[:5]
    return tiny(seed=12, eos_token_id=tokens[5]), tokens


def test_generation_stops_with_eos(ending):
    model, tokens = ending
    assert run(model, [[1]], max_new_tokens=12) == [[token] for token in tokens[:6]]


def test_a_finished_row_yields_none_and_leaves_the_others_alone(ending):
    model, _ = ending
    prompts = [[1], [2], [3], [4]]
    alone = [[step[0] for step in run(model, [prompt], max_new_tokens=12)] for prompt in prompts]
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


def test_eos_is_not_printed(cli, tiny_checkpoint):
    """The last token that is new in a text becomes the EOS: what is printed is the text before it."""
    from infer import SamplingParams, generate
    from model import GPT
    from tokenizer import load_encoding

    encoding, prompt = load_encoding(tiny_checkpoint, 4096), "One day"
    steps = generate(GPT.from_pretrained(tiny_checkpoint), [encoding.encode(prompt)], SamplingParams(max_new_tokens=15))
    tokens = [token for (token,) in steps]
    end = max(index for index, token in enumerate(tokens) if token not in tokens[:index])
    assert end > 0
    config = tiny_checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": tokens[end]}))
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", prompt, "--max-new-tokens", 30)
    assert (code, out) == (0, prompt + encoding.decode(tokens[:end]) + "\n")
    assert err.startswith(f"{end + 1} tokens")
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", prompt, "--max-new-tokens", 30, "--ignore-eos")
    assert code == 0 and err.startswith("30 tokens") and out.startswith(prompt + encoding.decode(tokens[:end]))
