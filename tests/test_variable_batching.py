"""Lesson 16: prompts of different lengths in one batch, with the cache: each row's text is that of its own run."""

import pytest
import torch
from conftest import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT


def run(model, prompts, options=None, **params):
    """The tokens of each row, up to the end of its text."""
    from infer import SamplingParams, generate

    steps = list(generate(model, prompts, SamplingParams(**params), **(options or {})))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def alone(model, prompts, options=None, **params):
    return [run(model, [prompt], options, **params)[0] for prompt in prompts]


def random_prompt(length, vocab_size=61, seed=0):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    stride=st.integers(1, 16),
    eos=st.integers(0, 60),
    use_cache=st.booleans(),
)
@settings(max_examples=60)
def test_each_row_equals_its_own_run(tiny, lengths, stride, eos, use_cache):
    model = tiny(seed=12, eos_token_id=eos)
    prompts = [random_prompt(length, seed=row) for row, length in enumerate(lengths)]
    expected = alone(model, prompts, {"stride": stride, "use_cache": False}, max_new_tokens=25)
    assert run(model, prompts, {"stride": stride, "use_cache": use_cache}, max_new_tokens=25) == expected


def test_rows_end_at_different_steps_and_the_others_go_on(tiny):
    model = tiny(seed=6)
    prompts = [random_prompt(length, seed=length) for length in (1, 20, 9, 14)]
    texts = alone(model, prompts, max_new_tokens=50, ignore_eos=True)
    model = tiny(seed=6, eos_token_id=texts[0][3])  # the first row ends at its fourth token at the latest
    rows = run(model, prompts, max_new_tokens=50)
    assert rows == alone(model, prompts, max_new_tokens=50)
    assert len(rows[0]) <= 4 and len({len(row) for row in rows}) > 1


def test_the_embedded_model_on_prompts_within_and_beyond_the_window():
    model = GPT.from_pretrained(CHECKPOINTS / "stories-draft", torch.float64)
    prompts = [random_prompt(length, 4096, seed=length) for length in (1, 300, 250, 40)]
    assert run(model, prompts, max_new_tokens=40, ignore_eos=True) == alone(
        model, prompts, {"use_cache": False}, max_new_tokens=40, ignore_eos=True
    )


def test_a_hop_prefills_its_row_only(tiny):
    model, passes = tiny(), []
    model.wte.register_forward_pre_hook(lambda module, args: passes.append(tuple(args[0].shape)))
    run(model, [random_prompt(15), random_prompt(5), random_prompt(3)], max_new_tokens=4, ignore_eos=True)
    # Lengths 15, 5, 3; 16, 6, 4; then the first row has 17 tokens, and 9 of them stay in its window.
    assert passes == [(3, 15), (3, 1), (2, 1), (1, 9), (3, 1)]


@torch.inference_mode()
def test_no_row_sees_padding(tiny):
    from infer import Decoder

    def logits(model):
        decoder, texts = Decoder(model, 3, 30), [random_prompt(length, seed=1) for length in (2, 12, 20)]
        texts = [[max(token, 1) for token in text] for text in texts]
        for step in range(12):
            yield decoder.logits(texts)[:, 1:].clone()
            for row, text in enumerate(texts):
                text.append(1 + (7 * step + row) % 59)

    model, other = tiny(), tiny()
    other.wte.weight.data[0] = 5.0  # the padding, which no text contains
    for ours, others in zip(logits(model), logits(other)):
        torch.testing.assert_close(ours, others, rtol=0, atol=1e-6)


def test_penalties_count_the_row_only(tiny):
    model, prompts = tiny(seed=31), [[1], [2, 3, 4, 5, 5, 5], random_prompt(30)]
    params = {"max_new_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    assert run(model, prompts, **params) == alone(model, prompts, **params)


def test_the_command_line_prints_prompts_in_order(cli, tmp_path):
    args = ("--max-new-tokens", 6, "--ignore-eos")
    prompts = ("Once", "One day, a big dog", "Tom and Lily")
    texts = [cli("--prompt", prompt, *args)[1].removesuffix("\n") for prompt in prompts]
    separator = "\n" + "-" * 40 + "\n"
    code, out, err = cli("--prompt", prompts[0], "--prompt", prompts[1], "--prompt", prompts[2], *args)
    assert code == 0 and out == separator.join(texts) + "\n" and err.startswith("18 tokens")

    file = tmp_path / "prompts.txt"
    file.write_text(f"{prompts[1]}\n\n{prompts[2]}\n", "utf-8")
    assert cli("--prompt-file", file, "--prompt", prompts[0], *args)[1] == out


@pytest.mark.parametrize(
    "content, complaint",
    [(None, "No such file"), (b"", "empty"), (b"\n\n", "empty"), (b"caf\xe9", "not UTF-8")],
)
def test_a_bad_prompt_file_is_one_line(cli, tmp_path, content, complaint):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    code, out, err = cli("--prompt-file", file)
    assert code == 2 and out == "" and str(file) in err and complaint in err and err.count("\n") == 1


def test_a_row_that_is_finished_does_not_hop(tiny):
    prompt, other = random_prompt(16), [1, 2]
    (eos,) = alone(tiny(), [prompt], max_new_tokens=1)[0]  # the 17th token, which would not fit into the window
    model, passes = tiny(eos_token_id=eos), []
    model.wte.register_forward_pre_hook(lambda module, args: passes.append(tuple(args[0].shape)))
    rows = run(model, [prompt, other], max_new_tokens=4)
    assert rows[0] == [eos] and len(rows[1]) == 4
    assert passes == [(2, 16), (2, 1), (2, 1), (2, 1)]


@torch.inference_mode()
def test_still_the_same_draws_for_prompts_of_one_length(tiny):
    from infer import SamplingParams, generate, sample

    model, params = tiny(), SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    steps = list(generate(model, [[1, 2], [3, 4]], params, torch.Generator().manual_seed(3)))
    generator, tokens = torch.Generator().manual_seed(3), torch.tensor([[1, 2], [3, 4]])
    for step in steps:
        drawn = sample(model(tokens)[:, -1].float(), params, generator)
        assert step == drawn.tolist()
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
