"""Lesson 01: greedy decoding, against transformers' own; the text on the screen; what the command line refuses."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS

ROOT = Path(__file__).resolve().parent.parent


def greedy(model, prompts, max_new_tokens):
    """Our continuation of each prompt."""
    from infer import SamplingParams, generate

    steps = list(generate(model, prompts, SamplingParams(max_new_tokens=max_new_tokens)))
    return [[step[row] for step in steps] for row in range(len(prompts))]


def test_one_command_writes_a_story():
    command = [
        sys.executable,
        ROOT / "infer.py",
        "--prompt",
        "Once upon a time",
        "--max-new-tokens",
        "8",
        "--device",
        "cpu",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0
    assert result.stdout.startswith("Once upon a time") and len(result.stdout) > len("Once upon a time") + 8
    assert "tokens/s" in result.stderr and result.stderr.count("\n") == 1


def test_equals_transformers_on_the_embedded_model(stories):
    from transformers import AutoModelForCausalLM

    from tokenizer import load_encoding

    peer = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "stories", dtype=torch.float32)
    encoding = load_encoding(CHECKPOINTS / "stories", 4096)
    for text in ("Once upon a time", "Lily had a red ball. She", "One day, a big dog"):
        prompt = encoding.encode(text)
        inputs = torch.tensor([prompt])
        theirs = peer.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=40)
        theirs = theirs[0, len(prompt) :].tolist()  # stops after EOS
        assert greedy(stories, [prompt], 40)[0][: len(theirs)] == theirs


def test_equals_transformers_on_a_random_model(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny()
    model.save_pretrained(tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompts = [[1, 2, 3], [7, 7, 7], [59, 0, 30]]
    inputs = torch.tensor(prompts)
    peer.generation_config.eos_token_id = None
    theirs = peer.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12)
    assert greedy(model, prompts, 12) == theirs[:, 3:].tolist()


def test_each_row_of_a_batch_is_its_own_run(tiny):
    model = tiny(seed=12)
    prompts = [[5, 6], [40, 2], [5, 6], [0, 59]]
    assert greedy(model, prompts, 10) == [greedy(model, [prompt], 10)[0] for prompt in prompts]


def test_zero_new_tokens_is_no_step(tiny, cli, tiny_checkpoint):
    assert greedy(tiny(), [[1]], 0) == [[]]
    assert cli("--model", tiny_checkpoint, "--prompt", "Hello", "--max-new-tokens", 0) == (0, "Hello\n", "")


def test_an_empty_prompt_starts_from_eos(tiny):
    assert greedy(tiny(), [[]], 5) == greedy(tiny(), [[60]], 5)


@pytest.mark.parametrize("prompts", [[[1, 2], [3]], []])
def test_prompts_of_unequal_length_and_none_at_all_are_refused(tiny, prompts):
    with pytest.raises(ValueError, match="one length"):
        greedy(tiny(), prompts, 1)


def test_a_character_is_shown_when_it_is_whole(monkeypatch, tiny_checkpoint):
    import infer
    from tokenizer import load_encoding

    encoding = load_encoding(tiny_checkpoint, 4096)
    text = "é🙂!"
    tokens = [encoding.encode_single_token(bytes([byte])) for byte in text.encode() + "🙂".encode()[:2]]
    monkeypatch.setattr(infer, "generate", lambda *args: ([token] for token in tokens))
    writes = []

    class Screen(io.StringIO):
        def write(self, piece):
            writes.append(piece)

    monkeypatch.setattr(sys, "stdout", Screen())
    infer.main(["--model", str(tiny_checkpoint), "--prompt", "A", "--device", "cpu"])
    assert "".join(writes) == "Aé🙂!\ufffd\n"  # the last character never became whole
    assert [piece for piece in writes if "🙂" in piece] == ["🙂"]


def test_importing_does_nothing_and_loads_nothing_heavy():
    heavy = "{'transformers', 'pandas', 'huggingface_hub', 'tokenizers'}"
    code = f"import sys, infer; sys.exit(bool({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_device_that_is_named_is_used(monkeypatch):
    from infer import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == "cuda" and pick_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="--device cuda: not on this machine, which has cpu"):
        pick_device("cuda")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "gpt5"], "unknown model 'gpt5'"),
        (["--max-new-tokens", "many"], "--max-new-tokens: invalid int value: 'many'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_line(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_a_vocabulary_too_large_for_the_model_is_one_line(cli, tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", tmp_path)
    code, out, err = cli("--model", tmp_path)
    assert code == 2 and out == "" and "4096 tokens" in err and err.count("\n") == 1
