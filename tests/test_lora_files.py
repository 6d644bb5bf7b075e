"""Adapters in peft's format are read as pairs of matrices, or refused in one line."""

import pytest
import torch
from conftest import CHECKPOINTS, refused
from lora_files import ATTENTION, peft_adapter, random_tensors, refusal, save_adapter

from loading.checkpoint import read_json
from loading.load import empty_model, load_config, save_model

LLAMA = CHECKPOINTS / "stories-llama"
FROGS = CHECKPOINTS / "stories-frogs"


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_matrices_are_those_of_peft(peer, tiny, tmp_path, kind, use_rslora):
    """Their product is what peft would add to each weight."""
    from loading.lora import read_adapter

    if kind == "GPT2":
        from transformers import GPT2LMHeadModel

        save_model(tiny(), tmp_path)
        theirs, base = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64), tmp_path
    else:
        theirs, base = peer(kind)
    theirs = peft_adapter(theirs, tmp_path / "adapter", use_rslora=use_rslora)
    model = empty_model(load_config(base))
    prefix = "base_model.model." + model.BASE_MODEL_PREFIX
    expected = {
        path.removeprefix(prefix) + ".weight": layer.get_delta_weight("default")
        for path, layer in theirs.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    found = read_adapter(tmp_path / "adapter", model)
    assert found.keys() == expected.keys()
    for name, (a, b) in found.items():
        product = (b @ a).T if kind == "GPT2" else b @ a  # GPT-2's files hold W as (in, out)
        assert (product - expected[name]).abs().max() < 1e-12


def test_the_embedded_adapter_is_small():
    import importlib.util

    assert importlib.util.find_spec("loading.lora"), "no loading/lora.py"
    read_adapter = importlib.import_module("loading.lora").read_adapter
    model = empty_model(load_config(LLAMA))
    adapter = read_adapter(FROGS, model)
    assert len(adapter) == 56
    assert sum(a.numel() + b.numel() for a, b in adapter.values()) == 108544
    assert (FROGS / "adapter_model.safetensors").stat().st_size < 10**6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_adapters_of_fewer_bits(tiny_llama, tmp_path, dtype):
    from loading.lora import read_adapter

    model = tiny_llama()
    tensors = random_tensors(model, ATTENTION)
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    small = read_adapter(save_adapter(tmp_path / "small", rounded), model)
    whole = {name: tensor.float() for name, tensor in rounded.items()}
    expected = read_adapter(save_adapter(tmp_path / "whole", whole), model)
    assert small.keys() == expected.keys()
    for name in small:
        assert all(map(torch.equal, small[name], expected[name]))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"peft_type": "LOHA"}, ["peft_type is 'LOHA'", "'LORA'"]),
        ({"bias": "lora_only"}, ["bias is 'lora_only'", "'none'"]),
        ({"use_dora": True}, ["'use_dora' is True", "not supported"]),
        ({"use_rslora": "yes"}, ["use_rslora is 'yes'", "False or True"]),
        ({"rank_pattern": {"q_proj": 2}}, ["'rank_pattern' is {'q_proj': 2}"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'"]),
        ({"task_type": "SEQ_CLS"}, ["task_type is 'SEQ_CLS'"]),
        ({"a_new_field": 1}, ["'a_new_field' is 1, which is not supported"]),
        ({"r": 4}, ["k_proj.lora_A.weight has shape (3, 16); adapter_config.json"]),
        ({"r": 0}, ["r 0", "an integer from 1"]),
        ({"r": True}, ["r True"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha nan"]),
        ({"lora_alpha": "16"}, ["lora_alpha '16'"]),
    ],
    ids=str,
)
def test_configurations_that_are_refused(tiny_llama, tmp_path, fields, words):
    message = refusal(tiny_llama(), tmp_path, fields)
    assert all(word in message for word in ("config.json", *words))


NAME = "base_model.model.model.layers.0.self_attn.q_proj"
CHANGED = {  # what is written in the place of some tensors, None for none; and what is said
    "missing": ({f"{NAME}.lora_B.weight": None}, f"{NAME}.lora_B.weight is missing"),
    "width": (
        {f"{NAME}.lora_A.weight": torch.ones(3, 17)},
        "q_proj.lora_A.weight has shape (3, 17)",
    ),
    "outputs": (
        {f"{NAME}.lora_B.weight": torch.ones(23, 3)},
        "q_proj.lora_B.weight has shape (23, 3)",
    ),
    "dtype": ({f"{NAME}.lora_A.weight": torch.ones(3, 16).int()}, "must be floating-point"),
    "dora": ({f"{NAME}.lora_magnitude_vector": torch.ones(24)}, "is not lora_A or lora_B"),
    "bias": ({f"{NAME}.lora_B.bias": torch.ones(24)}, "is not lora_A or lora_B"),
    "layer": (
        {NAME.replace("0", "7") + ".lora_A.weight": torch.ones(3, 16)},
        "layers.7.self_attn.q_proj.lora_A.weight' is not lora_A or lora_B of a linear",
    ),
    "newline": ({"a.b.c\nd": torch.ones(3, 16)}, r"tensor 'a.b.c\nd' is not lora_A or"),
    "norm": (
        {"base_model.model.model.norm.lora_A.weight": torch.ones(3, 16)},
        "is not lora_A or lora_B",
    ),
    "embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 61)},
        "embed_tokens.lora_embedding_A' is not lora_A or",
    ),
    "twice": (
        {NAME.replace("model.model.model.", "model.model.") + ".lora_A.weight": torch.ones(3, 16)},
        "q_proj, with and without 'model.'",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_tensors_that_are_refused(tiny_llama, tmp_path, change):
    changes, words = CHANGED[change]

    def edit(adapter, tensors):
        kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
        fields = read_json(adapter / "adapter_config.json")
        save_adapter(adapter, kept, target_modules=fields["target_modules"])

    message = refusal(tiny_llama(), tmp_path, edit)
    assert "adapter_model.safetensors: " in message and words in message


def test_the_head_of_an_embedding_has_no_adapter(tiny_llama, tmp_path):
    from loading.lora import read_adapter

    adapter = save_adapter(tmp_path / "a", random_tensors(tiny_llama(), ("lm_head",)))
    message = refused(read_adapter, adapter, tiny_llama(tie_word_embeddings=True))
    assert "lm_head.lora_A.weight' is not lora_A or lora_B of a linear layer of this" in message


def test_files_that_are_refused(tiny_llama, tmp_path):
    from loading.lora import read_adapter

    def only_pickle(adapter, tensors):
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")

    def cut(adapter, tensors):
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])

    def no_tensors(adapter, tensors):
        save_adapter(adapter, {})

    def no_json(adapter, tensors):
        (adapter / "adapter_config.json").write_text("[")

    def gone(adapter, tensors):
        (adapter / "adapter_model.safetensors").unlink()

    model = tiny_llama()
    for change, words in (
        (cut, "not a complete safetensors file"),
        (no_tensors, "no tensors"),
        (no_json, "adapter_config.json: not a JSON object"),
        (gone, "adapter_model.safetensors: not a complete safetensors file"),
        (only_pickle, "adapter_model.bin is a pickle"),
    ):
        assert words in refusal(model, tmp_path, change)
    assert "nowhere/adapter_config.json: No such file" in refused(read_adapter, "nowhere", model)


def test_a_wrong_base_is_refused():
    from loading.lora import read_adapter

    for name in ("stories-experts", "stories"):
        model = empty_model(load_config(CHECKPOINTS / name))
        message = refused(read_adapter, FROGS, model)
        assert "adapter_model.safetensors: tensor " in message
        assert "is not lora_A or lora_B of a linear layer of this model" in message
