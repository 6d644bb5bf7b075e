"""SmolLM2's file writes what transformers writes with the same weights, greedy."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, run_rows
from natives import in_pieces, native
from serving import Script
from transformers import AutoModelForCausalLM

import infer
from command_line.models import load_head
from infer_speculative import generate_speculative
from loading.load import load_model, resolve_source
from native import use_native
from sampling import SamplingParams
from text.chat import Chat
from text.tokenizer import load_encoding

PROMPTS = ["The capital of France is", "Water boils at", "Bonjour, je", "def fibonacci(n):\n"]
TALKS = [
    ("What is the capital of France?", "And of Italy?"),
    ("Name three fruits.", "Three more."),
    ("Is the moon a planet?", "And Pluto?"),
]
LENGTH = 32


@pytest.fixture(scope="module")
def theirs():
    """transformers' model of the same file, whose numbers it reads by itself."""
    path = Path(resolve_source("smollm2").name)
    options = {"gguf_file": path.name, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()


@pytest.fixture(scope="module")
def ours():
    model = load_model("smollm2")
    use_native(model)
    return model


@pytest.fixture(scope="module")
def encoding():
    return load_encoding("smollm2", 49152)


def written(theirs, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0}
    options["eos_token_id"] = [2, 0]
    out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return out[0, len(prompt) :].tolist()


def test_texts_are_those_of_transformers(ours, theirs, encoding):
    prompts = [encoding.encode(prompt) for prompt in PROMPTS]
    expected = [written(theirs, prompt) for prompt in prompts]
    assert run_rows(ours, prompts, max_new_tokens=LENGTH) == expected


def test_a_draft_head_changes_no_text(ours, encoding):
    head = load_head(CHECKPOINTS / "smollm2-head", ours)
    params = SamplingParams(LENGTH)
    drafts = accepted = 0
    for prompt in PROMPTS:
        tokens = encoding.encode(prompt)
        steps = list(generate_speculative(ours, head, tokens, params))
        written = [token for step in steps for token in step.tokens]
        assert [written] == run_rows(ours, [tokens], max_new_tokens=LENGTH)
        drafts += sum(len(step.drafts) for step in steps)
        accepted += sum(step.accepted for step in steps)
    assert accepted > drafts / 5


def test_conversations_are_those_of_transformers(theirs, encoding, monkeypatch):
    chat = Chat("smollm2")
    for talk in TALKS:
        messages = []
        for said in talk:
            messages.append({"role": "user", "content": said})
            reply = written(theirs, chat.encode(messages, encoding))
            text = encoding.decode([token for token in reply if token not in (2, 0)])
            messages.append({"role": "assistant", "content": text})
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(talk).encode())))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            greedy = ["--temperature", "0", "--max-new-tokens", str(LENGTH)]
            infer.main(["--model", "smollm2", "--chat", *greedy])
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert out.getvalue() == "".join(f"{reply}\n" for reply in replies)


@torch.inference_mode()
def test_int8_is_as_near_as_q8_0(ours):
    """Over 2 x 512 tokens of English: llama.cpp's Q8_0 has a KL of 0.004 and 0.96 equal tops."""
    text = (ROOT / "benchmarks" / "texts" / "english.txt").read_text("utf-8")
    ids = load_encoding("smollm2", ours.config.vocab_size).encode_ordinary(text)
    tokens = torch.tensor(ids[:1024]).view(2, 512)
    rounded = native(load_model("smollm2", torch.int8))
    p, q = (in_pieces(model, tokens, 128).log_softmax(dim=-1) for model in (ours, rounded))
    assert (p.exp() * (p - q)).sum(dim=-1).mean() <= 0.005
    assert (p.argmax(dim=-1) == q.argmax(dim=-1)).float().mean() >= 0.96


def test_an_agent_answers_with_what_two_tools_found(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("agent", ROOT / "examples" / "agent.py")
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    adapter = CHECKPOINTS / "smollm2-tools"
    options = "--adapter", adapter, "--chat-template", adapter / "chat_template.jinja"
    with Script(tmp_path, "--model", "smollm2", *options) as script:
        url = f"http://127.0.0.1:{script.client().port}/v1"
        agent.main(["What is the weather in Rome?", "And what is 17 times 23?"], url)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == '  get_weather({"city": "Rome"}) -> {"sky": "sunny", "celsius": 24}'
    assert "sunny" in lines[2]
    assert lines[4] == '  multiply({"a": 17, "b": 23}) -> {"product": 391}'
    assert "391" in lines[5] and len(lines) == 6
