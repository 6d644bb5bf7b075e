"""The forward pass against transformers', files in both directions, and every way in which loading can fail."""

import dataclasses
import json

import pytest
import torch
from conftest import CHECKPOINTS
from safetensors.torch import load_file, save_file

import model as model_module
from model import GPT, GPTConfig


def peer(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["stories", "stories-draft"])
@torch.inference_mode()
def test_logits_equal_transformers_on_the_checkpoints(name):
    ours, theirs = GPT.from_pretrained(CHECKPOINTS / name), peer(CHECKPOINTS / name)
    tokens = torch.randint(ours.config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0))
    assert ours.config.eos_token_id == theirs.config.eos_token_id == 4095
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_head, n_embd, vocab_size", [(1, 8, 11), (3, 12, 97), (5, 40, 1001), (7, 7, 2)])
@torch.inference_mode()
def test_logits_equal_transformers_on_random_shapes(tiny, tmp_path, n_head, n_embd, vocab_size):
    ours = tiny(dtype=torch.float32, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, eos_token_id=vocab_size - 1)
    ours.save_pretrained(tmp_path)
    tokens = torch.randint(vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), peer(tmp_path)(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@torch.inference_mode()
def test_loads_what_transformers_saved(tmp_path, prefix):
    """Files have been written with and without the prefix, with the head a second time, and with mask buffers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=53, n_positions=20, n_embd=24, n_layer=2, n_head=3, bos_token_id=5, eos_token_id=7)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors = {
        prefix + key.removeprefix("transformer."): value
        for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 20, 20)
    tensors[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config == GPTConfig(vocab_size=53, block_size=20, n_embd=24, n_layer=2, n_head=3, eos_token_id=7)
    tokens = torch.randint(53, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_save_and_load_give_the_same_weights(tiny, tmp_path):
    ours = tiny(dtype=torch.float16)
    ours.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path, dtype=torch.float16)
    assert again.config == ours.config
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and b.dtype == torch.float16 and b.is_contiguous(), name


@torch.inference_mode()
def test_logits_to_keep_are_the_last_ones(tiny):
    ours = tiny()
    tokens = torch.arange(12).view(2, 6)
    every = ours(tokens)
    assert every.shape == (2, 6, 61)
    for n in (1, 3, 6):
        torch.testing.assert_close(ours(tokens, logits_to_keep=n), every[:, -n:])


@torch.inference_mode()
def test_a_position_sees_only_what_is_before_it(tiny):
    ours = tiny()
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 7] = 42
    torch.testing.assert_close(ours(tokens)[0, :7], ours(changed)[0, :7])
    assert not torch.allclose(ours(tokens)[0, 7], ours(changed)[0, 7])


@pytest.mark.parametrize("length", [0, 17])
def test_a_pass_takes_1_to_block_size_tokens(tiny, length):
    with pytest.raises(ValueError, match=rf"{length} tokens in one pass; .* block_size = 16"):
        tiny()(torch.zeros(1, length, dtype=torch.long))


def test_random_weights_have_the_shape_of_the_preset(monkeypatch):
    small = GPTConfig(vocab_size=400, block_size=8, n_layer=2, n_head=2, n_embd=16, eos_token_id=399)
    monkeypatch.setitem(model_module.PRESETS, "gpt2-xl", small)
    ours = GPT.from_pretrained("random:gpt2-xl", dtype=torch.bfloat16)
    assert ours.config == small and ours.wte.weight.dtype == torch.bfloat16 and not ours.training
    assert ours.wte.weight.std().item() == pytest.approx(0.02, rel=0.1)
    again = GPT.from_pretrained("random:gpt2-xl", dtype=torch.bfloat16)
    assert torch.equal(ours.h[1].mlp.c_fc.weight, again.h[1].mlp.c_fc.weight)


def test_presets_are_the_published_sizes():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in GPT(config).parameters()) for name, config in model_module.PRESETS.items()
        }
    # Parameters of the models on the hub, mask buffers and the second copy of the head not counted.
    assert sizes == {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}


def one_line(error) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("name", ["gpt3", "random:gpt3", "random:", "no/such/directory", "random:random:gpt2"])
def test_an_unknown_name_lists_the_valid_ones(name):
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(name)
    assert all(word in one_line(error) for word in (name, "gpt2, gpt2-medium, gpt2-large, gpt2-xl", "random:"))


def test_a_hub_name_without_a_network_is_one_line(monkeypatch):
    import huggingface_hub

    def no_network(*args, **kwargs):
        raise OSError("we are offline\nand this is a second line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained("gpt2")
    assert one_line(error) == "gpt2 could not be fetched from the Hugging Face hub: we are offline"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_a_file_names_it(tiny, tmp_path, missing):
    tiny().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(tmp_path)
    assert missing in one_line(error)


def test_a_pickle_is_refused_and_the_way_to_convert_it_told(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(tmp_path)
    assert "pickle" in one_line(error) and "save_pretrained" in one_line(error)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_cut_short_is_named(tiny, tmp_path, size):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(tmp_path)
    assert "not a complete safetensors file" in one_line(error) and str(file) in one_line(error)


def test_wrong_tensors_are_named(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    for change, words in {
        "ln_f.bias": "tensor ln_f.bias is missing",
        "wpe.weight": "tensor wpe.weight is (3, 2), and config.json says (16, 16)",
        "extra": "unexpected tensor extra",
    }.items():
        tensors = {name: tensor for name, tensor in good.items() if name != "ln_f.bias" or change != name}
        if change != "ln_f.bias":
            tensors[change] = torch.zeros(3, 2)
        save_file(tensors, file)
        with pytest.raises(ValueError) as error:
            GPT.from_pretrained(tmp_path)
        assert words in one_line(error)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("model_type", "llama", "supported is 'gpt2'"),
        ("activation_function", "relu", "activation_function"),
        ("n_inner", 7, "n_inner"),
        ("tie_word_embeddings", False, "tie_word_embeddings"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx"),
        ("n_layer", -1, "positive integer"),
        ("n_embd", "16", "positive integer"),
        ("n_head", 3, "not a multiple"),
        ("eos_token_id", 61, "eos_token_id"),
        ("layer_norm_epsilon", "small", "number > 0"),
    ],
)
def test_a_config_of_another_architecture_is_refused(tiny, tmp_path, key, value, words):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(tmp_path)
    assert words in one_line(error) and key in one_line(error)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_config_that_is_not_json_is_named(tiny, tmp_path, text):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(tmp_path)
    assert "config.json: not a JSON object" in one_line(error)


def test_the_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig().n_layer = 1
