"""Lesson 01: greedy decoding, against transformers' own, and the text on the screen."""

import io
import subprocess
import sys

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, run, run_rows

from loading.load import save_model


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


def greedy_text(peer, inputs, max_new_tokens):
    """What transformers' model generates, prompts included."""
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    return peer.generate(inputs, attention_mask=torch.ones_like(inputs), **options)


def test_equals_transformers_on_the_embedded_model(stories):
    from transformers import AutoModelForCausalLM

    from loading.tokenizer import load_encoding

    peer = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "stories", dtype=torch.float32)
    encoding = load_encoding(CHECKPOINTS / "stories", 4096)
    for beginning in ("Once upon a time", "Lily had a red ball. She"):
        prompt = encoding.encode(beginning)
        text = greedy_text(peer, torch.tensor([prompt]), 30)[0].tolist()
        theirs = text[len(prompt) :]  # stops after EOS
        assert run_rows(stories, [prompt], max_new_tokens=30)[0][: len(theirs)] == theirs


def test_equals_transformers_on_a_random_model(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny()
    save_model(model, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompts = [[1, 2, 3], [7, 7, 7], [59, 0, 30]]
    peer.generation_config.eos_token_id = None
    theirs = greedy_text(peer, torch.tensor(prompts), 12)[:, 3:].tolist()
    assert run_rows(model, prompts, max_new_tokens=12) == theirs


def test_each_row_of_a_batch_is_its_own_run(tiny):
    model = tiny(seed=12)
    prompts = [[5, 6], [40, 2], [5, 6], [0, 59]]
    alone = [run_rows(model, [prompt], max_new_tokens=10)[0] for prompt in prompts]
    assert run_rows(model, prompts, max_new_tokens=10) == alone


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
    import infer

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


def test_a_character_is_shown_when_it_is_whole(monkeypatch, tiny_checkpoint):
    import infer
    from loading.tokenizer import load_encoding

    encoding = load_encoding(tiny_checkpoint, 4096)
    data = "é🙂!".encode() + "🙂".encode()[:2]
    steps = [[encoding.encode_single_token(bytes([byte]))] for byte in data]
    monkeypatch.setattr(infer, "generate", lambda *args, **options: iter(steps))
    writes = []

    class Screen(io.StringIO):
        def write(self, piece):
            writes.append(piece)

    monkeypatch.setattr(sys, "stdout", Screen())
    infer.main(["--model", str(tiny_checkpoint), "--prompt", "A", "--device", "cpu"])
    assert "".join(writes) == "Aé🙂!\ufffd\n"  # the last character never became whole
    assert [piece for piece in writes if "🙂" in piece] == ["🙂"]


def test_ctrl_c_keeps_the_text(cli, monkeypatch, tiny_checkpoint):
    import infer

    def interrupted(*args, **options):
        yield [65]
        yield [66]
        raise KeyboardInterrupt

    monkeypatch.setattr(infer, "generate", interrupted)
    code, out, err = cli("--model", tiny_checkpoint, "--prompt", "One")
    assert code == 130
    assert out.startswith("One") and len(out) > 4 and out.endswith("\n")
    assert err.startswith("2 tokens, ") and err.count("\n") == 1


def test_an_id_without_text_does_not_end_the_run(cli, monkeypatch, tiny, tiny_checkpoint):
    """Real models pad their vocabulary to a round number; nothing forbids them such an id."""
    import infer

    save_model(tiny(dtype=torch.float32, vocab_size=4104, eos_token_id=4095), tiny_checkpoint)
    monkeypatch.setattr(infer, "generate", lambda *args, **options: iter([[4100]]))
    assert cli("--model", tiny_checkpoint, "--prompt", "One")[:2] == (0, "One\ufffd\n")


def test_bad_input_is_one_line(cli, tiny, tiny_checkpoint):
    code, out, err = cli("--max-new-tokens", "many")
    assert (code, out) == (2, "")
    assert "--max-new-tokens: invalid int value: 'many'" in err and err.count("\n") == 1
    save_model(tiny(dtype=torch.float32), tiny_checkpoint)
    code, out, err = cli("--model", tiny_checkpoint)
    assert (code, out) == (2, "")
    assert "4096 tokens" in err and err.count("\n") == 1
