"""infer.py --prefix-cache: prompts and conversations go on from files.

Oracle: the same without files, in C bit for bit.
"""

import inspect
import io
import re
import sys

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens
from engines import greedy
from lora_files import LINEAR, random_pairs
from natives import native

from adapters import Adapters
from infer import generate

LLAMA = CHECKPOINTS / "stories-llama"
STORIES = [
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys.",
    "Tom",
    "Once upon a time, there was a little girl named Lily. She loved to play with her dog.",
]
TALK = ["dog, moon, sea and boat, tree and house", "cat, ball, sun, water", "bird"]


def lines_of(*lines: str):
    return io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()))


def write(cli, *options) -> tuple[str, int]:
    """Return the text, and how many positions came from files; options before them: none."""
    code, out, err = cli("--model", LLAMA, "--max-new-tokens", 24, *options)
    if code:
        at = options.index("--prefix-cache")
        code, out, err = cli("--model", LLAMA, "--max-new-tokens", 24, *options[:at])
    found = re.search(r"(\d+) positions from files", err)
    return out, int(found[1]) if found else 0


def generate_from(files, *arguments, **options):
    """Call `generate` with prefix files, if it takes any."""
    if "prefix_files" in inspect.signature(generate).parameters:
        options["prefix_files"] = files
    return generate(*arguments, **options)


@pytest.mark.step(2)
@pytest.mark.parametrize("options", [[], ["--cache-dtype", "int8"], ["--temperature", "0.8"]])
def test_prompts_are_read_from_files(cli, engine_cli, tmp_path, options):
    words = ["--seed", "1", *options]
    for prompt in STORIES:
        words += ["--prompt", prompt]
    text = write(cli, *words)[0]
    words += ["--prefix-cache", tmp_path / "cache"]
    assert write(cli, *words) == (text, 0)
    assert write(cli, *words) == (text, 2 * 16)
    code, out, err = engine_cli("--model", LLAMA, "--max-new-tokens", 24, *words)
    assert (code, out) == (0, text) and "32 shared (16 from files)" in err  # the same files


@pytest.mark.step(3)
def test_a_conversation_goes_on_after_a_restart(cli, tmp_path, monkeypatch):
    def talk(count: int, *options) -> tuple[str, int]:
        monkeypatch.setattr(sys, "stdin", lines_of(*TALK[:count]))
        return write(cli, "--chat", *options)

    texts = [talk(count)[0] for count in (2, 3)]
    first = talk(2, "--prefix-cache", tmp_path)
    assert first[0] == texts[0]
    again = talk(3, "--prefix-cache", tmp_path)
    assert again[0] == texts[1] and again[1] >= first[1] + 2 * 16


@pytest.mark.step(1)
@pytest.mark.parametrize("shape", ["tiny", "tiny_llama", "tiny_gemma", "tiny_windows"])
def test_rows_of_any_length_begin_in_files(request, tmp_path, shape):
    """Past the context window, too, and in a batch of rows that share a beginning."""
    from loading.prefix_files import PrefixFiles

    model = native(request.getfixturevalue(shape)(block_size=64, dtype=torch.float32))
    lengths = (40, 3, 64, 16, 17, 90)
    prompts = [random_tokens(length, seed=length % 2) for length in lengths]
    expected = list(generate(model, prompts, greedy(20)))
    loaded = []
    for _ in range(2):
        files = PrefixFiles(tmp_path, "model", 2**30)
        assert list(generate_from(files, model, prompts, greedy(20))) == expected
        files.close()
        loaded.append(files.num_loaded)
    # Windows as they were at the end are saved. The row of 64 begins as that of 40, and that of 90,
    # whose window begins at 32, as the row of 64 has ended.
    assert loaded == [0, 2 + 0 + 2 + 0 + 1 + 2]
    files = PrefixFiles(tmp_path, "model", 2**30)
    assert len(list(generate_from(files, model, [[5]], greedy(2)))) == 2
    expected = list(generate(model, prompts, greedy(3), use_cache=False))
    found = generate_from(files, model, prompts, greedy(3), use_cache=False)
    assert list(found) == expected and files.num_loaded == 0


@pytest.mark.step(1)
def test_adapters_use_no_files(tiny_llama, tmp_path):
    from loading.prefix_files import PrefixFiles

    model = native(tiny_llama(block_size=64, dtype=torch.float32))
    model.adapters = Adapters(model, {"a": random_pairs(model, LINEAR)})
    prompt = random_tokens(40)
    for name in ("", "a", ""):
        expected = list(generate(model, [prompt], greedy(8), adapter=name))
        files = PrefixFiles(tmp_path, "model", 2**30)
        found = generate_from(files, model, [prompt], greedy(8), adapter=name)
        assert list(found) == expected
        files.close()
    assert files.num_loaded == 2


@pytest.mark.step(2)
def test_what_has_no_prefix_is_refused(cli, tmp_path):
    words = "--model", LLAMA, "--prompt", "a", "--prefix-cache", tmp_path
    assert is_one_line(cli(*words, "--no-cache"), "--prefix-cache", "conflicts", "--no-cache")
    assert is_one_line(cli(*words, "--num-beams", 2), "--prefix-cache", "conflicts", "--num-beams")
    assert is_one_line(cli("--prefix-cache-bytes", 2), "--prefix-cache-bytes requires")
