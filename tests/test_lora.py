"""A LoRA adapter that becomes a part of the weights, and adapters that are refused."""

import gguf_files
import pytest
import torch
from conftest import (
    CHECKPOINTS,
    difference,
    edit_json,
    is_one_line,
    random_tokens,
    refused,
    save_speaking,
)
from lora_files import ATTENTION, peft_adapter, random_tensors, save_adapter
from ranks import run_engine_script

import infer_speculative
from benchmarks.export_gguf import write_gguf
from loading.load import load_model, save_model
from loading.lora import read_adapter

LLAMA = CHECKPOINTS / "stories-llama"
FROGS = CHECKPOINTS / "stories-frogs"
WORDS = ["--model", LLAMA, "--prompt", "Once upon a time", "--max-new-tokens", 30]


def loaded(directory, adapter, dtype=torch.float64):
    return load_model(directory, dtype, "cpu", adapter)


def their_gpt2(tiny, directory):
    """A random GPT-2 of transformers, in float64, and where it is saved."""
    from transformers import GPT2LMHeadModel

    save_model(tiny(), directory)
    return GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float64), directory


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Mistral", "Qwen3", "Gemma3"])
def test_logits_are_those_of_peft(peer, tiny, tmp_path, kind):
    theirs, base = their_gpt2(tiny, tmp_path) if kind == "GPT2" else peer(kind)
    before = difference(load_model(base, torch.float64), theirs)
    theirs = peft_adapter(theirs, tmp_path / "adapter")
    assert before < 1e-10 < 0.1 < difference(load_model(base, torch.float64), theirs)
    assert difference(loaded(base, tmp_path / "adapter"), theirs) < 1e-10


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"target_modules": ["lm_head", "v_proj"]},
        {"target_modules": r".*\.1\..*down_proj", "r": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "lora_alpha": 0.5},
        {"lora_dropout": 0.5, "fan_in_fan_out": True},
        {"target_modules": ["q_proj", "query_key_value"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"]},
        {"target_modules": ["k_proj", "q_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["k_proj", "q_proj"], "exclude_modules": r".*\.0\..*k_proj"},
        {"target_modules": ["model.layers.0.self_attn.k_proj"]},
        {"target_modules": ["v_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    ],
    ids=str,
)
def test_options_are_those_of_peft(peer, tmp_path, monkeypatch, options):
    theirs, base = peer("Llama", tie_word_embeddings=False)
    theirs = peft_adapter(theirs, tmp_path / "adapter", **options)
    assert difference(loaded(base, tmp_path / "adapter"), theirs) < 1e-10


def test_experts_share_attention_with_an_adapter(tiny_experts, tmp_path):
    """transformers has all experts in one tensor, which peft reads and this project does not."""
    model = tiny_experts()
    save_model(model, tmp_path)
    tensors = random_tensors(model, (*ATTENTION, "gate", "up_proj"))
    adapter = save_adapter(tmp_path / "adapter", tensors)
    found = loaded(tmp_path, adapter).get_parameter("layers.1.mlp.experts.4.up_proj.weight")
    own = model.get_parameter("layers.1.mlp.experts.4.up_proj.weight")
    stem = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_"
    expected = own + 4 / 3 * tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
    assert (found - expected).abs().max() < 1e-12


def with_adapter(build, directory, dtype=torch.float32, **shape) -> tuple:
    """A random model and an adapter of it: where they are, and where both are in one."""
    model = build(dtype=dtype, **shape)
    save_model(model, directory)
    targets = (*ATTENTION, "c_attn", "c_proj", "up_proj", "down_proj")
    adapter = save_adapter(directory / "adapter", random_tensors(model, targets))
    both = directory / "both"
    save_model(loaded(directory, adapter, dtype), both)
    return adapter, both


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.uint8])
def test_weights_are_rounded_after_it_was_added(tiny_llama, tmp_path, dtype):
    adapter, both = with_adapter(tiny_llama, tmp_path)
    found = loaded(tmp_path, adapter, dtype).state_dict()
    expected = load_model(both, dtype).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    base = load_model(tmp_path, dtype).state_dict()
    assert any(not torch.equal(found[name], base[name]) for name in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_adapters_of_fewer_bits(tiny_llama, tmp_path, dtype):
    model = tiny_llama()
    save_model(model, tmp_path)
    tensors = random_tensors(model, ATTENTION)
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    small = loaded(tmp_path, save_adapter(tmp_path / "small", rounded))
    whole = {name: tensor.float() for name, tensor in rounded.items()}
    expected = loaded(tmp_path, save_adapter(tmp_path / "whole", whole))
    assert all(map(torch.equal, small.parameters(), expected.parameters()))


def test_weights_in_nibbles_get_8_bits(tiny_llama, tmp_path):
    model = tiny_llama(dtype=torch.float32, n_embd=64, n_inner=64, n_head=4, head_dim=16)
    write_gguf(model, tmp_path / "plain.gguf", "float32")
    file = gguf_files.edited(tmp_path / "plain.gguf", tmp_path / "small.gguf", kind="Q4_1")
    adapter = save_adapter(tmp_path / "adapter", random_tensors(model, ("q_proj", "down_proj")))
    found = loaded(file, adapter, torch.uint8)
    floats = loaded(file, adapter, torch.float32)
    for path, bits in (("self_attn.q_proj", 8), ("mlp.down_proj", 8), ("mlp.up_proj", 4)):
        layer = found.get_submodule(f"layers.1.{path}")
        assert layer.block_format.bits == bits
        expected = floats.get_submodule(f"layers.1.{path}").weight
        numbers = layer.blocks().dequantize()
        assert (numbers - expected).abs().max() <= expected.abs().max() / 127


def test_weights_of_a_gguf_file_get_it_in_their_order(tiny_llama, tmp_path):
    """There rows of queries and keys stand in another order, which is undone before the sum."""
    adapter, both = with_adapter(tiny_llama, tmp_path)
    write_gguf(load_model(tmp_path), tmp_path / "plain.gguf", "float32")
    found = loaded(tmp_path / "plain.gguf", adapter, torch.float32)
    assert all(map(torch.equal, found.parameters(), load_model(both).parameters()))


def test_all_scripts_tell_of_frogs(cli, engine_cli, run_main, tmp_path):
    code, text, err = cli(*WORDS, "--adapter", FROGS)
    assert code == 0 and "a little frog named" in text, err
    assert "frog" not in cli(*WORDS)[1]
    assert engine_cli(*WORDS, "--adapter", FROGS)[1] == text
    speculative = ["--target", *WORDS[1:], "--draft", LLAMA, "--adapter", FROGS]
    assert run_main(infer_speculative.main, *speculative)[1] == text
    assert run_engine_script(2, tmp_path, *WORDS, "--adapter", FROGS)[0] == text


def test_the_embedded_adapter_is_small_and_peft_reads_it():
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert (FROGS / "adapter_model.safetensors").stat().st_size < 10**6
    base = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, FROGS).eval()
    tokens = torch.tensor([random_tokens(40, 4096)])
    with torch.inference_mode():
        ours = loaded(LLAMA, FROGS, torch.float32)(tokens)
        assert (ours - theirs(tokens).logits).abs().max() < 1e-3


LAYER = "layers.0.self_attn.q_proj"
NAME = f"base_model.model.model.{LAYER}"
LEFT_OUT = "base_model.model.model.layers."
NO_PLACE = "is not lora_A or lora_B of a linear layer of this model"
CONFIGS = [  # fields, and what is said
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; supported is 'LORA'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'; supported is 'none'"),
    ({"use_dora": True}, "'use_dora' is True, which is not supported"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'; supported is False or True"),
    ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern' is {'q_proj': 2}"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"a_new_field": 1}, "'a_new_field' is 1, which is not supported"),
    ({"r": 4}, "k_proj.lora_A.weight has shape (3, 16); adapter_config.json"),
    ({"r": 0}, "r 0: must be an integer from 1"),
    ({"r": True}, "r True"),
    ({"lora_alpha": float("nan")}, "lora_alpha nan"),
    ({"lora_alpha": "16"}, "lora_alpha '16'"),
    (
        {"target_modules": [*ATTENTION, "gate_proj"]},
        "names 'gate_proj', but adapter_model.safetensors lacks layers.0.mlp.gate_proj",
    ),
    # Layers that peft would leave out.
    ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, LEFT_OUT, "target_modules of adapter_c"),
    ({"target_modules": []}, LEFT_OUT, "target_modules of adapter_config.json"),
    ({"target_modules": ["proj"]}, LEFT_OUT, "target_modules of adapter_config.json"),
    ({"exclude_modules": ["o_proj"]}, LEFT_OUT, "exclude_modules of adapter_config.json"),
    ({"exclude_modules": [f"model.{LAYER}"]}, LEFT_OUT, "exclude_modules of adapter_config.json"),
    ({"layers_to_transform": [0]}, LEFT_OUT, "layers_to_transform of adapter_config.json"),
    ({"layers_to_transform": 1}, LEFT_OUT, "layers_to_transform of adapter_config.json"),
]
TENSORS = [  # what is written in the place of a tensor, None for none; and what is said
    (f"{NAME}.lora_B.weight", None, f"{NAME}.lora_B.weight is missing"),
    (f"{NAME}.lora_A.weight", torch.ones(3, 17), "q_proj.lora_A.weight has shape (3, 17)"),
    (f"{NAME}.lora_B.weight", torch.ones(23, 3), "q_proj.lora_B.weight has shape (23, 3)"),
    (f"{NAME}.lora_A.weight", torch.ones(3, 16).int(), "must be floating-point"),
    (f"{NAME}.lora_magnitude_vector", torch.ones(24), NO_PLACE),
    (f"{NAME}.lora_B.bias", torch.ones(24), NO_PLACE),
    (
        f"{NAME.replace('0', '7')}.lora_A.weight",
        torch.ones(3, 16),
        f"7.self_attn.q_proj.lora_A.weight' {NO_PLACE}",
    ),
    ("a.b.c\nd", torch.ones(3, 16), rf"tensor 'a.b.c\nd' {NO_PLACE}"),
    ("base_model.model.model.norm.lora_A.weight", torch.ones(3, 16), NO_PLACE),
    ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(3, 61), NO_PLACE),
    (f"base_model.model.{LAYER}.lora_A.weight", torch.ones(3, 16), "with and without 'model.'"),
]


@pytest.fixture
def adapter(tiny_llama, tmp_path):
    """A model, the tensors of an adapter of it, and where this is saved."""
    model = tiny_llama()
    tensors = random_tensors(model, ATTENTION)
    directory = save_adapter(tmp_path / "adapter", tensors)
    read_adapter(directory, model)
    return model, tensors, directory


@pytest.mark.parametrize("fields, words", [(fields, words) for fields, *words in CONFIGS], ids=str)
def test_configurations_that_are_refused(adapter, fields, words):
    model, _, directory = adapter
    edit_json(directory / "adapter_config.json", fields)
    message = refused(read_adapter, directory, model)
    assert all(word in message for word in ("config.json", *words))


@pytest.mark.parametrize("name, tensor, words", TENSORS)
def test_tensors_that_are_refused(adapter, name, tensor, words):
    model, tensors, directory = adapter
    changed = {key: part for key, part in (tensors | {name: tensor}).items() if part is not None}
    save_adapter(directory, changed, target_modules=ATTENTION)
    message = refused(read_adapter, directory, model)
    assert "adapter_model.safetensors: " in message and words in message


def test_files_that_are_refused(adapter, cli, tiny_llama, tmp_path):
    model, tensors, directory = adapter
    file = directory / "adapter_model.safetensors"

    def says(*words) -> bool:
        message = refused(read_adapter, directory, model)
        return all(word in message for word in words)

    file.write_bytes(file.read_bytes()[:-1])
    assert says("not a complete safetensors file")
    file.rename(directory / "adapter_model.bin")
    assert says("adapter_model.bin is a pickle")
    (directory / "adapter_model.bin").unlink()
    assert says("adapter_model.safetensors: not a complete safetensors file")
    save_adapter(directory, {name: tensors[name] for name in tensors if ".layers.0." in name})
    assert says("target_modules", "layers.1.self_attn.k_proj")
    save_adapter(directory, {})
    assert says("no tensors")
    (directory / "adapter_config.json").write_text("[")
    assert says("adapter_config.json: not a JSON object")
    assert is_one_line(cli("--adapter", "nowhere"), "nowhere/adapter_config.json: No such file")
    assert is_one_line(cli("--adapter", FROGS), NO_PLACE)
    tied = save_speaking(tiny_llama, tmp_path, tie_word_embeddings=True)
    head = save_adapter(tmp_path / "head", random_tensors(load_model(tied), ("lm_head",)))
    words = f"lm_head.lora_A.weight' {NO_PLACE}"
    assert is_one_line(cli("--model", tied, "--adapter", head), words)


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_the_part_for_texts(tiny_gemma, tmp_path, beginning):
    """As peft writes it for a Gemma 3 of pictures and texts."""
    model = tiny_gemma()
    tensors = random_tensors(model, ("q_proj", "down_proj"))
    usual = read_adapter(save_adapter(tmp_path / "usual", tensors), model)
    stem = "base_model.model."
    others = {name.replace(f"{stem}model.", stem + beginning): a for name, a in tensors.items()}
    found = read_adapter(save_adapter(tmp_path / "other", others), model)
    assert found.keys() == usual.keys() and len(usual) == 2 * model.config.n_layer
    for name, pair in found.items():
        assert all(map(torch.equal, pair, usual[name]))
