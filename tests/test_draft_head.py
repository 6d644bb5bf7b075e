"""A draft head: the target's output and distribution, whatever the head drafts."""

import re

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens, refused
from constrained import END, letters
from draft_heads import head_of
from draws import seeded
from engines import alone
from families import EACH_FAMILY, family
from natives import native
from test_speculative_decoding import p_value, passes, sequence_probs, tokens

import infer
from infer import generate
from infer_speculative import generate_speculative, main
from loading.load import load_model, save_model
from sampling import SamplingParams

LLAMA = CHECKPOINTS / "stories-llama"
HEAD = CHECKPOINTS / "stories-llama-head"


@pytest.mark.step(1)
@EACH_FAMILY
@pytest.mark.parametrize("gamma, stride", [(1, None), (3, 5), (16, 6)])
def test_greedy_output_is_the_targets(kind, gamma, stride, request):
    """Contexts shift, drafts are rejected, and the head's cache begins again."""
    target = family(request, kind)(block_size=16)
    for count in (5, None):
        prompt = random_tokens(count or 20, seed=gamma)
        expected = alone(target, prompt, stride=stride, max_new_tokens=40, ignore_eos=True)
        steps = passes(
            target,
            head_of(target, count),
            prompt,
            gamma,
            stride=stride,
            max_new_tokens=40,
            ignore_eos=True,
        )
        assert tokens(steps) == expected
        assert sum(len(step.drafts) for step in steps) > 5
        drafted = {token for step in steps for token in step.drafts}
        assert drafted <= set(range(count) if count else range(0, 61, 2))


@pytest.mark.step(1)
@torch.inference_mode()
def test_each_draft_is_computed_from_true_states_up_to_the_last_token(tiny_llama):
    """And from the head's own after it: rejected drafts leave no state behind."""
    target = tiny_llama(block_size=64)
    head = head_of(target, 61, window=100)
    text = [1, 2, 3]
    first = len(text) - 1  # the first observed state
    steps = passes(target, head, text, 4, max_new_tokens=50, ignore_eos=True)
    rejected = 0
    for step in steps:
        whole = torch.tensor([text])
        positions = torch.arange(len(text))
        states = target.hidden(whole, positions, target.causal_attention)[:, first:-1]
        for index, token in enumerate(step.drafts):
            whole = torch.tensor([text + step.drafts[:index]])[:, first + 1 :]
            positions = torch.arange(whole.shape[1])
            x = head.hidden(whole, positions, head.causal_attention, states)
            assert head.head(x)[0, -1].argmax() == token
            states = torch.cat([states, x[:, -1:]], dim=1)
        rejected += len(step.drafts) - step.accepted
        text = text + step.tokens
    assert rejected > 5


@pytest.mark.step(1)
@pytest.mark.parametrize(
    "params", [{"temperature": 0.9, "top_k": 3, "top_p": 0.95}, {"temperature": 1.5}], ids=str
)
def test_hundreds_of_outputs_follow_the_targets_probabilities(tiny, params):
    """With a head that never drafts token 1."""
    target = tiny(seed=3, vocab_size=4, eos_token_id=3, n_layer=1, n_embd=8, block_size=8)
    head = head_of(target, [0, 2, 3], seed=2)
    probs = sequence_probs(target, [0, 1], 4, params)
    generator = seeded(0)
    counts = dict.fromkeys(probs, 0)
    accepted = set()
    for _ in range(600):
        steps = passes(target, head, [0, 1], 2, generator, max_new_tokens=4, **params)
        counts[tuple(tokens(steps))] += 1
        accepted |= {step.accepted for step in steps}
    assert accepted == {0, 1, 2}
    assert all(probs[output] > 0 for output, count in counts.items() if count)
    assert p_value(torch.tensor(list(counts.values())), torch.tensor(list(probs.values()))) > 0.001


@pytest.mark.step(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"choices": ("abc", "acb", "ccc")},
        {"repetition_penalty": 1.5, "logit_bias": {5: 3.0}},
        {"min_tokens": 5, "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_constraints_and_penalties(tiny, fields):
    """Drafts are tokens that the target may choose; where there are none, a pass has no drafts."""
    target = tiny(vocab_size=8, eos_token_id=END)
    params = SamplingParams(12, **fields)
    expected = [token for (token,) in generate(target, [[1, 2]], params, encoding=letters())]
    for count in (1, 8):
        head = head_of(target, count)
        steps = generate_speculative(target, head, [1, 2], params, encoding=letters())
        assert tokens(steps) == expected


@pytest.mark.step(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_target_in_c(compiled, tiny_llama, tmp_path, dtype):
    """With its own head, or one matrix for both."""
    for tied in (False, True):
        save_model(tiny_llama(tie_word_embeddings=tied).float(), tmp_path)
        target = native(load_model(tmp_path, dtype))
        expected = alone(target, [1, 2, 3], max_new_tokens=30)
        assert tokens(passes(target, head_of(target), [1, 2, 3], max_new_tokens=30)) == expected


@pytest.mark.step(1)
def test_a_head_whose_output_is_not_finite_is_refused(tiny):
    target = tiny()
    head = head_of(target)
    head.fc.weight.data[0, 0] = torch.nan
    said = refused(passes, target, head, [1, 2])
    assert said == "the draft head returned values that are NaN or infinite"


@pytest.mark.step(2)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_the_targets_text(run_main, backend):
    """Most first drafts of a trained head are accepted."""
    options = "--prompt", "Once upon a time", "--max-new-tokens", 40, "--temperature", 0
    options += "--backend", backend
    code, expected, _ = run_main(infer.main, "--model", LLAMA, *options)
    result = run_main(main, "--target", LLAMA, "--draft", HEAD, *options)
    assert code == 0 and result[:2] == (0, expected)
    accepted, drafts = map(int, re.search(r"(\d+) of (\d+) drafts accepted", result[2]).groups())
    assert drafts > 20 and accepted > drafts / 3


@pytest.mark.step(2)
def test_a_head_of_another_target_is_one_line(run_main):
    result = run_main(main, "--target", CHECKPOINTS / "stories-draft", "--draft", HEAD)
    words = f"{HEAD / 'config.json'}: hidden_size 192: must be the target's (128)"
    assert is_one_line(result, words), result
