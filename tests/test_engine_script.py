"""The command line of the engine: the texts of `infer.py`, and what they took."""

import io
import sys

import pytest
from conftest import CHECKPOINTS, PROMPTS

from engine.engine import Engine
from text.tokenizer import load_encoding

SEEDED = ("--max-new-tokens", 12, "--temperature", 1, "--num-samples", 2, "--seed", 5)
FILTERED = ("--max-new-tokens", 12, "--temperature", 0.9, "--top-p", 0.9, "--seed", 2**64 - 1)


@pytest.mark.parametrize(
    "args, rows",
    [
        (("--max-new-tokens", 12), ()),
        (("--max-new-tokens", 60, "--ignore-eos", "--stride", 5), ("--max-num-seqs", 2)),
        (SEEDED, ("--max-num-seqs", 3)),
        ((*FILTERED, "--repetition-penalty", 2), ()),
        (("--max-new-tokens", 0), ()),
        (("--max-new-tokens", 5, "--prompt", "", "--dtype", "int8"), ("--max-num-seqs", 1)),
    ],
)
def test_the_engine_prints_what_is_printed_without_it(
    cli, engine_cli, tiny_checkpoint, prompts_file, args, rows
):
    args = ("--model", tiny_checkpoint, "--prompt-file", prompts_file, *args)
    code, out, err = engine_cli(*args, *rows)
    assert code == 0, err
    assert (code, out) == cli(*args)[:2]


def test_a_single_sequence_is_streamed(cli, engine_cli, tiny_checkpoint, monkeypatch):
    args = ("--model", tiny_checkpoint, "--prompt", "Once", "--max-new-tokens", 6)
    step = Engine.step
    shown = []
    expected = cli(*args)[1]
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(Engine, "step", lambda self: shown.append(out.getvalue()) or step(self))
    engine_cli(*args)
    assert shown[0] == "" and len(set(shown)) > 3 and out.getvalue() == expected
    assert all(expected.startswith(part) for part in shown)


def test_replies_of_a_chat_model(cli, engine_cli, prompts_file, monkeypatch):
    args = ["--model", CHECKPOINTS / "stories-llama", "--chat", "--max-new-tokens", 6]
    args += ["--temperature", 1, "--seed", 7]
    expected = cli(*args, "--prompt-file", prompts_file)[:2]
    assert engine_cli(*args, "--prompt-file", prompts_file, "--max-num-seqs", 2)[:2] == expected
    outs = []
    for script in (cli, engine_cli):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"dog, park\ncat, tree\n")))
        code, out, err = script(*args)
        assert code == 0 and err.count(" tokens, ") == 2
        outs.append(out)
    assert outs[0] == outs[1] != ""
    # The second line of steps counts those of both replies.
    steps = [line for line in err.splitlines() if " steps, " in line]
    assert [line.split()[0] for line in steps] == ["6", "12"]
    assert [line.endswith(", in all") for line in steps] == [False, True]


@pytest.mark.parametrize("max_num_seqs, steps", [(None, 7), (5, 7), (2, 3 * 7), (1, 5 * 7)])
def test_statistics(engine_cli, tiny_checkpoint, prompts_file, max_num_seqs, steps):
    args = ["--model", tiny_checkpoint, "--prompt-file", prompts_file, "--max-new-tokens", 7]
    args += ["--ignore-eos", "--seed", 3, "--temperature", 1]
    args += [] if max_num_seqs is None else ["--max-num-seqs", max_num_seqs]
    code, _, err = engine_cli(*args)
    tokens = sum(len(load_encoding(tiny_checkpoint, 4096).encode(prompt)) for prompt in PROMPTS)
    first, second = err.splitlines()
    assert code == 0 and first.startswith("35 tokens, ") and first.endswith(", seed 3")
    assert f"{second},".startswith(f"{steps} steps, {tokens + 5 * 6} positions computed,")
