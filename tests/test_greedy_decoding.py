"""Lesson 01: greedy decoding, against transformers' own, and the text on the screen."""

import subprocess
import sys

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line, run, run_rows, their_rows

import infer
from loading.load import save_model
from text.tokenizer import load_encoding


def test_one_command_writes_a_story():
    """Text and statistics in one pipe: the text is there first, and its line has ended."""
    command = [sys.executable, ROOT / "infer.py", "--prompt", "Once upon a time"]
    options = ["--max-new-tokens", "8", "--device", "cpu"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
    result = subprocess.run([*command, *options], **both)
    assert result.returncode == 0
    story = "Once upon a time, there was a little girl named Lily\n"
    assert result.stdout.startswith(story + "8 tokens, ")
    assert result.stdout.count("\n") == 2 and "tokens/s" in result.stdout


def test_equals_transformers_on_the_embedded_model(stories):
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "stories", dtype=torch.float32)
    encoding = load_encoding(CHECKPOINTS / "stories", 4096)
    prompts = [encoding.encode("Once upon a time")]
    ours = run_rows(stories, prompts, max_new_tokens=30)
    assert ours == their_rows(peer, prompts, 30)


def test_equals_transformers_on_a_random_model(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny()
    save_model(model, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompts = [[1, 2, 3], [7, 7, 7], [59, 0, 30]]
    assert run_rows(model, prompts, max_new_tokens=12) == their_rows(peer, prompts, 12)


def test_prompts_are_left_as_they_were(tiny):
    prompts = [[1, 2], []]
    run(tiny(), prompts[:1], max_new_tokens=3)
    run(tiny(), prompts[1:], max_new_tokens=3)
    assert prompts == [[1, 2], []]


def test_zero_new_tokens_is_no_step(tiny, cli, tiny_checkpoint):
    assert run(tiny(), [[1]], max_new_tokens=0) == []
    shown = cli("--model", tiny_checkpoint, "--prompt", "Hello", "--max-new-tokens", 0)
    assert shown == (0, "Hello\n", "")
    assert len(run(tiny(), [[1]], max_new_tokens=1)) == 1


def test_an_empty_prompt_starts_from_eos(tiny):
    assert run(tiny(), [[]], max_new_tokens=5) == run(tiny(), [[60]], max_new_tokens=5)


def test_the_special_token_in_a_prompt_is_one_token(cli, tiny, tiny_checkpoint, monkeypatch):
    seen = []

    def generate(model, prompts, *args, **options):
        seen.extend(prompts)
        return iter(())

    monkeypatch.setattr(infer, "generate", generate)
    assert cli("--model", tiny_checkpoint, "--prompt", "<|endoftext|>One<|endoftext|>")[0] == 0
    (tokens,) = seen
    assert tokens[0] == tokens[-1] == 4095
    assert len(tokens) < 5


def test_no_prompt_at_all_is_refused(tiny):
    with pytest.raises(ValueError, match="at least one prompt"):
        run(tiny(), [], max_new_tokens=1)


def test_bad_input_is_one_line(cli, tiny, tiny_checkpoint):
    words = "--max-new-tokens: invalid int value: 'many'"
    assert is_one_line(cli("--max-new-tokens", "many"), words)
    save_model(tiny(dtype=torch.float32), tiny_checkpoint)
    assert is_one_line(cli("--model", tiny_checkpoint), "4096 tokens")
