"""The token embedding and the head, a part of the vocabulary on each rank."""

import pytest
import torch
from conftest import random_tokens
from ranks import (
    LLAMA,
    ROUNDING,
    attention_in_float64,
    logits_of,
    results,
    run_engine_script,
    single_process_logits,
)

from loading.load import save_model


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_three_does_not_divide(compiled, tiny_llama, tmp_path, tied):
    shape = {"n_embd": 64, "n_head": 4, "head_dim": 32, "n_inner": 96, "tie_word_embeddings": tied}
    save_model(tiny_llama(dtype=torch.float32, **shape), tmp_path)
    edges = [0, 20, 21, 40, 41, 60]  # the first and the last id of each part
    tokens = torch.tensor([[*edges, *random_tokens(10)]])

    def action():
        return logits_of(tmp_path, tokens)

    def near(logits, expected):
        return (torch.from_numpy(logits) - expected).abs().max() <= ROUNDING[torch.float32]

    with attention_in_float64():
        (logits, (collectives, bytes_sent), _), *others = results(3, action)
        expected = single_process_logits(tmp_path, tokens)
    assert near(logits, expected)
    ends = 0, 21, 41, 61
    assert collectives == 2 * 4 + 2
    # Heads, two of a rank at most, outputs, inputs, outputs; of the others: what they lack.
    layers = 2 * 2 * 16 * 4 * (64 + 22 + 32 + 22)
    rows = 2 * 2 * 16 * 4 * 64 // 3
    assert bytes_sent == layers + rows  # the logits go to rank 0 only
    for (own, (_, bytes_sent), _), first, end in zip(others, ends[1:], ends[2:]):
        assert near(own, expected[..., first:end])
        assert bytes_sent == layers + rows + 16 * 4 * 21


def test_what_crosses(engine_cli, tmp_path):
    prompts = "A big ball, a red ball, a", "A big ball, a red ball and"
    arguments = ["--model", LLAMA, "--prompt", prompts[0], "--prompt", prompts[1]]
    arguments += ["--max-new-tokens", 14, "--dtype", "int8", "--draft", "lookup", "--gamma", 3]
    arguments += [
        "--num-pages",
        14,
        "--page-size",
        2,
        "--max-num-seqs",
        2,
        "--max-num-batched-tokens",
        6,
    ]
    _, out, err = engine_cli(*arguments, "--backend", "torch")
    work = err.splitlines()[-1]  # all that an engine does
    assert " 0 shared" not in work and " 0 preempt" not in work and " of 0 drafts" not in work
    found, err = run_engine_script(3, tmp_path, *arguments)
    assert found == out and work in err
    # 8 layers of four, the embedding and the head.
    assert "3 ranks: 34 collectives a step, " in err
