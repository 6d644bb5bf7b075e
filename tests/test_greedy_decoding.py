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


def test_equals_transformers(stories, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    encoding = load_encoding(CHECKPOINTS / "stories", 4096)
    random = tiny()
    save_model(random, tmp_path)
    for model, directory, prompts, count in (
        (stories, CHECKPOINTS / "stories", [encoding.encode("Once upon a time")], 30),
        (random, tmp_path, [[1, 2, 3], [7, 7, 7], [59, 0, 30]], 12),
    ):
        peer = AutoModelForCausalLM.from_pretrained(directory, dtype=model.dtype)
        ours = run_rows(model, prompts, max_new_tokens=count)
        assert ours == their_rows(peer, prompts, count)


def test_zero_new_tokens_is_no_step(tiny, cli, tiny_checkpoint):
    assert run(tiny(), [[1]], max_new_tokens=0) == []
    shown = cli("--model", tiny_checkpoint, "--prompt", "Hello", "--max-new-tokens", 0)
    assert shown == (0, "Hello\n", "")
    assert len(run(tiny(), [[1]], max_new_tokens=1)) == 1


def test_an_empty_prompt_starts_from_eos(tiny):
    prompts = [[]]
    assert run(tiny(), prompts, max_new_tokens=5) == run(tiny(), [[60]], max_new_tokens=5)
    assert prompts == [[]]  # left as it was
    with pytest.raises(ValueError, match="at least one prompt"):
        run(tiny(), [], max_new_tokens=1)


def test_the_special_token_in_a_prompt_is_one_token(cli, tiny_checkpoint, monkeypatch):
    seen = []

    def generate(model, prompts, *args, **options):
        seen.extend(prompts)
        return iter(())

    monkeypatch.setattr(infer, "generate", generate)
    assert cli("--model", tiny_checkpoint, "--prompt", "<|endoftext|>One<|endoftext|>")[0] == 0
    (tokens,) = seen
    assert tokens[0] == tokens[-1] == 4095 and len(tokens) < 5


def test_bad_input_is_one_line(cli, tiny, tiny_checkpoint):
    words = "--max-new-tokens: invalid int value: 'many'"
    assert is_one_line(cli("--max-new-tokens", "many"), words)
    save_model(tiny(dtype=torch.float32), tiny_checkpoint)
    assert is_one_line(cli("--model", tiny_checkpoint), "4096 tokens")
