"""Lesson 133: weights of 4 bits in blocks, in C."""

import pytest
import torch
from conftest import random_tokens
from gguf_files import edited, loaded
from ranks import LLAMA, compared
from test_block_panels import (
    block_layer,
    check_engine,
    check_extremes,
    check_outputs,
    check_passes,
    in_c,
)
from test_file_blocks import files  # noqa: F401
from test_gguf_blocks import made  # noqa: F401
from test_gguf_superblocks import made as made_super  # noqa: F401

from benchmarks.export_gguf import write_gguf

TYPES = ["Q4_0", "Q4_1", "Q4_K"]


@pytest.mark.parametrize("name", TYPES)
def test_outputs_have_torchs_bits(name, target):
    check_outputs(name)


@pytest.mark.parametrize("name, extremes", [("Q4_0", (-8, 7)), ("Q4_1", (0, 15))])
def test_sums_do_not_overflow(name, extremes, target):
    check_extremes(name, *extremes)


@pytest.mark.parametrize("name", TYPES)
def test_passes_of_a_file(files, name, compiled):  # noqa: F811
    check_passes(loaded(files(name)[0], torch.uint8))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_texts_of_the_engine_are_their_own(files, name, compiled):  # noqa: F811
    check_engine(loaded(files(name)[0], torch.uint8))


def test_ranks_have_the_bits_of_one_process(files, compiled):  # noqa: F811
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, files("Q4_1")[0], tokens, dtype=torch.uint8)[0] == 0


def test_the_command_line_computes_4_bits_in_c(cli, tmp_path):
    write_gguf(loaded(LLAMA), tmp_path / "f32.gguf", "float32", LLAMA / "tokenizer.json")
    file = edited(tmp_path / "f32.gguf", tmp_path / "blocks.gguf", kind="Q4_1")
    options = ("--model", file, "--prompt", "Once upon a time", "--max-new-tokens", 12)
    options += ("--dtype", "blocks", "--backend")
    code, out, err = cli(*options, "native")
    assert code == 0 and "note" not in err, err
    assert out == cli(*options, "torch")[1] != ""


def test_two_weights_take_a_byte(compiled):
    layer = in_c(block_layer("Q4_0", 192, 64))
    assert layer.weight.nbytes == 192 * 32
    assert layer.scale.nbytes == 192 * 2 * 2
