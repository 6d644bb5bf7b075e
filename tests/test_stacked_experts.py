"""Lesson 118: GGUF files stack the experts of a layer."""

import gguf
import numpy as np
import pytest
import torch
from conftest import random_tokens, run_rows
from gguf_files import edited
from ranks import ROUNDING, compared
from test_gguf import same
from test_mixture_of_experts import mixture

from benchmarks.export_gguf import write_gguf
from errors import UserError
from loading import gguf_model
from loading.load import load_config, load_model


@pytest.fixture
def made(tiny_experts, tmp_path):
    """A function that writes a random model: the model, its file."""

    def make(**shape):
        model = tiny_experts(dtype=torch.float32, **shape)
        write_gguf(model, tmp_path / "model.gguf", "float32")
        return model, tmp_path / "model.gguf"

    return make


def test_its_gguf_file_is_what_llama_cpp_reads(tiny_experts, tmp_path):
    """The experts of a layer are one tensor there."""
    model = tiny_experts(dtype=torch.float32, n_embd=32)
    write_gguf(model, tmp_path / "model.gguf", "float32")
    file = gguf.GGUFReader(tmp_path / "model.gguf")
    about = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 12}
    assert file.get_field("general.architecture").contents() == "qwen3moe"
    for name, value in about.items():
        assert file.get_field(f"qwen3moe.{name}").contents() == value, name
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    experts = mixture(model).experts
    assert stored["blk.1.ffn_gate_exps.weight"].shape == (5, 12, 32)
    assert stored["blk.1.ffn_down_exps.weight"].shape == (5, 32, 12)
    for number, expert in enumerate(experts):
        for name in ("gate", "up", "down"):
            weight = getattr(expert, f"{name}_proj").weight
            assert torch.equal(stored[f"blk.1.ffn_{name}_exps.weight"][number], weight)
    assert torch.equal(stored["blk.1.ffn_gate_inp.weight"], mixture(model).gate.weight)
    write_gguf(model, tmp_path / "model.gguf", "int8")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.1.ffn_up_exps.weight"] == "Q8_0"
    assert kinds["blk.1.ffn_gate_inp.weight"] == "F32"  # as llama.cpp's own files


@pytest.mark.parametrize("sizes", [{"mlp_only_layers": (0,)}, {"norm_topk_prob": False}], ids=str)
def test_experts_that_llama_cpp_would_read_wrongly_are_not_exported(tiny_experts, tmp_path, sizes):
    model = tiny_experts(dtype=torch.float32, sizes=sizes)
    with pytest.raises(UserError, match="supports only experts in all layers"):
        write_gguf(model, tmp_path / "model.gguf", "float32")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_layer": 12, "sizes": {"num_experts": 11}},
        {"tie_word_embeddings": True, "head_dim": 16, "n_embd": 33},
    ],
    ids=str,
)
def test_what_was_written_comes_back_bit_for_bit(made, shape):
    model, file = made(**shape)
    try:
        loaded = load_model(file)
    except UserError as error:
        raise AssertionError(str(error)) from None
    assert same(loaded, model)
    params = {"max_new_tokens": 30, "ignore_eos": True}
    assert run_rows(loaded, [random_tokens(9)], **params) == run_rows(
        model, [random_tokens(9)], **params
    )


@pytest.mark.parametrize("block", [1, 200, 10**6])
def test_blocks_of_rows_end_with_an_expert(made, monkeypatch, block):
    model, file = made()
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", block)
    assert same(load_model(file), model)


@pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
def test_two_ranks_read_their_rows_of_each_expert(made, compiled, kind):
    _, file = made(n_embd=64, head_dim=32, n_inner=64, sizes={"n_inner": 64}, block_size=64)
    found, *_ = compared(2, file, torch.tensor([random_tokens(23)]), dtype=kind)
    assert found <= ROUNDING[kind]


FIRST = "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"values": {"qwen3moe.expert_count": 4}}, "blk.0.ffn_gate_inp.weight has shape (5, 16)"),
        ({"values": {"qwen3moe.expert_count": 0}}, "qwen3moe.expert_count 0: must be an int"),
        ({"values": {"qwen3moe.expert_used_count": 6}}, "expert_used_count 6: must be at most "),
        ({"values": {"qwen3moe.expert_used_count": None}}, "expert_used_count None: must"),
        ({"values": {"qwen3moe.expert_feed_forward_length": 7}}, "metadata says (5, 7, 16)"),
        ({"tensors": {FIRST: None}}, f"tensor {FIRST} is missing"),
        ({"tensors": {FIRST: np.ones((60, 16))}}, f"tensor {FIRST} has shape (60, 16); the"),
        ({"architecture": "qwen3"}, "qwen3.expert_count is 5; supported is 0"),
    ],
    ids=str,
)
def test_a_file_that_lies_is_refused(made, changes, words):
    _, file = made()
    with pytest.raises(UserError) as error:
        load_model(edited(file, file.with_name("other.gguf"), **changes))
    assert words in str(error.value)


def test_experts_that_are_not_there_are_refused_before_a_model_is_built(made):
    """A million of them would take minutes."""
    _, file = made()
    for values, words in (
        ({"expert_count": 1000}, "blk.0.ffn_gate_inp.weight has shape (5, 16); the metadata says"),
        ({"block_count": 1000}, "blk.2.ffn_gate_inp.weight is missing"),
    ):
        values = {f"qwen3moe.{key}": value for key, value in values.items()}
        other = edited(file, file.with_name("other.gguf"), values=values)
        with pytest.raises(UserError) as error:
            load_config(other)
        assert words in str(error.value)


def test_blocks_of_numbers_are_read_expert_by_expert(made):
    model, file = made(n_embd=64, sizes={"n_inner": 32})
    write_gguf(model, file, "int8")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert stored["blk.1.ffn_down_exps.weight"].tensor_type.name == "Q8_0"
    loaded = load_model(file)
    for role in ("gate", "up", "down"):
        tensor = stored[f"blk.1.ffn_{role}_exps.weight"]
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        for number, expert in enumerate(mixture(loaded).experts):
            assert torch.equal(getattr(expert, f"{role}_proj").weight, expected[number])
