"""The forward pass against transformers', and models written and read back."""

import dataclasses
import json
import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from safetensors.torch import load_file, save_file

from checkpoint import UserError, parse_name
from model import GPT, PRESETS, GPTConfig, causal_attention

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def batch(rows: int, length: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.tensor(random_tokens(rows * length, vocab_size)).view(rows, length)


def peer(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


# The forward pass


@pytest.mark.parametrize("name", ["stories", "stories-draft"])
@torch.inference_mode()
def test_logits_equal_transformers_on_the_checkpoints(name):
    ours, theirs = GPT.from_pretrained(CHECKPOINTS / name), peer(CHECKPOINTS / name)
    tokens = batch(2, 256, 4096)
    assert ours.config.eos_token_ids == (theirs.config.eos_token_id,) == (4095,)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **CLOSE)


@pytest.mark.parametrize("n_head, n_embd, vocab_size", [(1, 8, 11), (3, 12, 97), (5, 40, 1001), (7, 7, 2)])
@torch.inference_mode()
def test_logits_equal_transformers_on_random_shapes(tiny, tmp_path, n_head, n_embd, vocab_size):
    ours = tiny(dtype=torch.float32, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, eos_token_id=vocab_size - 1)
    ours.save_pretrained(tmp_path)
    tokens = batch(3, 16, vocab_size)
    torch.testing.assert_close(ours(tokens), peer(tmp_path)(tokens).logits, **CLOSE)


@torch.inference_mode()
def test_the_epsilon_of_the_configuration_is_used(tiny, tmp_path):
    """With small activations a large epsilon changes everything, in each of the layer norms."""
    ours = tiny(dtype=torch.float32, layer_norm_epsilon=0.5)
    ours.save_pretrained(tmp_path)
    loaded, tokens = GPT.from_pretrained(tmp_path), batch(2, 16)
    norms = [module for module in loaded.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 5 and all(norm.eps == 0.5 for norm in norms)
    torch.testing.assert_close(loaded(tokens), peer(tmp_path)(tokens).logits, **CLOSE)


@torch.inference_mode()
def test_hidden_takes_any_leading_shape(tiny):
    """What a layer does to a position does not depend on the shape that it comes in; only `attend` must know it."""
    model, tokens, positions = tiny(), batch(2, 6), torch.arange(6)

    def attend(layer, q, k, v):
        assert q.shape == k.shape == v.shape == (*leading, 2, 8)
        layers.append(layer)
        return causal_attention(layer, *(x.reshape(2, 6, 2, 8) for x in (q, k, v))).reshape(q.shape)

    whole = model.head(model.hidden(tokens, positions, causal_attention))  # (6,) broadcasts to (2, 6)
    torch.testing.assert_close(whole, model(tokens))
    for leading in [(2, 6), (12,), (1, 2, 3, 2)]:
        layers = []
        every = positions.expand(2, 6).reshape(leading)
        result = model.head(model.hidden(tokens.reshape(leading), every, attend))
        assert layers == [0, 1] and result.shape == (*leading, 61)
        torch.testing.assert_close(result.reshape(2, 6, 61), whole)


@torch.inference_mode()
def test_hidden_adds_the_position_that_it_is_told(tiny):
    model, tokens = tiny(), batch(2, 3)
    shifted = model.hidden(tokens, torch.tensor([[4], [9]]), lambda layer, q, k, v: torch.zeros_like(q))
    for row, position in [(0, 4), (1, 9)]:
        one = model.hidden(tokens[row], torch.tensor(position), lambda layer, q, k, v: torch.zeros_like(q))
        torch.testing.assert_close(shifted[row], one)
    assert not torch.allclose(shifted[0], model.hidden(tokens[0], torch.tensor(5), lambda layer, q, k, v: q * 0))


@torch.inference_mode()
def test_logits_to_keep_are_the_last_ones(tiny):
    model, tokens = tiny(), batch(2, 6)
    logits = model(tokens)
    assert logits.shape == (2, 6, 61)
    for n in (1, 3, 6):
        torch.testing.assert_close(model(tokens, logits_to_keep=n), logits[:, -n:])


@torch.inference_mode()
def test_a_position_sees_only_what_is_before_it(tiny):
    model, tokens = tiny(), torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 7] = 42
    torch.testing.assert_close(model(tokens)[0, :7], model(changed)[0, :7])
    assert not torch.allclose(model(tokens)[0, 7], model(changed)[0, 7])


@pytest.mark.parametrize("length", [0, 17])
def test_a_pass_takes_1_to_block_size_tokens(tiny, length):
    with pytest.raises(ValueError, match=rf"{length} tokens in one pass; .* block_size = 16"):
        tiny()(torch.zeros(1, length, dtype=torch.long))


def test_head_and_embedding_are_one_parameter(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    for model in (tiny(), GPT.from_pretrained(tmp_path)):
        assert model.lm_head.weight is model.wte.weight
        assert [name for name, _ in model.named_parameters() if name in ("wte.weight", "lm_head.weight")] == [
            "wte.weight"
        ]


def test_the_config_is_frozen_and_knows_its_heads():
    config = GPTConfig(n_head=4, n_embd=20)
    assert (config.head_dim, config.n_kv_head) == (5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 1


# Random weights


def test_random_weights_have_the_shape_of_the_preset(monkeypatch):
    small = GPTConfig(vocab_size=400, block_size=8, n_layer=2, n_head=2, n_embd=16, eos_token_ids=(399,))
    monkeypatch.setitem(PRESETS, "gpt2-xl", small)
    first, again = (GPT.from_pretrained("random:gpt2-xl", dtype=torch.bfloat16) for _ in range(2))
    assert first.config == small and first.dtype == torch.bfloat16 and first.device.type == "cpu"
    assert first.wte.weight.std().item() == pytest.approx(0.02, rel=0.1) and not first.training
    assert first.lm_head.weight is first.wte.weight
    assert torch.equal(first.h[1].mlp.c_fc.weight, again.h[1].mlp.c_fc.weight)


def test_weights_that_end_a_residual_branch_start_smaller():
    model = GPT(GPTConfig(vocab_size=400, block_size=8, n_layer=8, n_head=2, n_embd=64)).init_weights(std=0.1)
    for block in model.h:
        assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.1, rel=0.1)
        for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight):
            assert weight.std().item() == pytest.approx(0.1 / math.sqrt(2 * 8), rel=0.1)
        assert block.ln_1.weight.eq(1).all() and block.mlp.c_fc.bias.eq(0).all()


def test_presets_are_the_published_sizes():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in GPT(config).parameters()) for name, config in PRESETS.items()}
    # Parameters of the models on the hub, mask buffers and the second copy of the head not counted.
    assert sizes == {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}


def test_memory_that_does_not_suffice_is_one_line(monkeypatch):
    monkeypatch.setitem(PRESETS, "gpt2-xl", GPTConfig(vocab_size=2**40, block_size=1, n_layer=1, n_head=1, n_embd=1))
    with pytest.raises(
        UserError, match=r"^random:gpt2-xl: 2,199,023,255,[0-9]{3} bytes of weights do not fit in memory$"
    ):
        GPT.from_pretrained("random:gpt2-xl", dtype=torch.float16)


def test_a_device_that_is_not_there_is_not_a_lack_of_memory(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="no-such-device"):
        GPT.from_pretrained(tmp_path, device="no-such-device")


# Files


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
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    tensors[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config == GPTConfig(53, block_size=20, n_embd=24, n_layer=2, n_head=3, eos_token_ids=(7,))
    assert not ours.training
    tokens = batch(2, 20, 53)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **CLOSE)


@pytest.mark.parametrize("eos", [(60,), (60, 3)])
def test_save_and_load_give_the_same_model(tiny, tmp_path, eos):
    ours = tiny(dtype=torch.float16, eos_token_ids=eos, layer_norm_epsilon=1e-3)
    ours.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path, dtype=torch.float16)
    assert again.config == ours.config
    assert load_file(tmp_path / "model.safetensors")["wpe.weight"].dtype == torch.float16
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and b.dtype == torch.float16 and b.is_contiguous(), name
    assert GPT.from_pretrained(tmp_path).dtype == torch.float32


def test_the_tied_head_is_written_once(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "wte.weight" in names and not any("lm_head" in name for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 60


def test_a_model_can_be_written_where_it_was_read(tiny, tmp_path):
    """Loaded weights may lie in the file itself (it is mapped into memory), which must not change under them."""
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    model = GPT.from_pretrained(tmp_path)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tiny(seed=1, dtype=torch.float32).save_pretrained(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A directory with a model, and a function that loads it with other values in its config.json."""
    directory = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(directory)
    good = json.loads((directory / "config.json").read_text())

    def load(values: dict) -> GPT:
        (directory / "config.json").write_text(json.dumps(good | values))
        return GPT.from_pretrained(directory)

    return load


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("model_type", "llama", "is 'llama'; supported is 'gpt2'"),
        ("activation_function", "relu", "supported is 'gelu_new' or 'gelu_pytorch_tanh'"),
        ("n_inner", 7, "is 7; supported is None or 64"),
        ("tie_word_embeddings", False, "supported is True"),
        ("scale_attn_weights", False, "supported is True"),
        ("scale_attn_by_inverse_layer_idx", True, "supported is False"),
        ("add_cross_attention", True, "supported is False"),
        ("n_layer", -1, "an integer from 1 to 1000"),
        ("n_layer", 0, "an integer from 1 to 1000"),
        ("n_layer", 10**9, "an integer from 1 to 1000"),
        ("n_layer", True, "an integer from 1 to 1000"),
        ("n_embd", "16", "an integer from 1 to 100000"),
        ("n_embd", 2**62, "an integer from 1 to 100000"),
        ("n_embd", [[16]], "an integer from 1 to 100000"),
        ("n_positions", 1e30, "an integer from 1 to 1000000"),
        ("n_positions", 16.0, "an integer from 1 to 1000000"),
        ("vocab_size", 10**100, "an integer from 1 to 1000000"),
        ("vocab_size", None, "an integer from 1 to 1000000"),
        ("n_head", 3, "n_embd 16 is not a multiple of n_head 3"),
        ("n_head", 10**6, "an integer from 1 to 1000"),
        ("eos_token_id", 61, "is 61; it must be an id below 61, or a list of them"),
        ("eos_token_id", -1, "an id below 61"),
        ("eos_token_id", None, "an id below 61"),
        ("eos_token_id", [], "an id below 61"),
        ("eos_token_id", [60, 61], "an id below 61"),
        ("eos_token_id", [60, [1]], "an id below 61"),
        ("eos_token_id", True, "an id below 61"),
        ("layer_norm_epsilon", "small", "above 0 and at most 1"),
        ("layer_norm_epsilon", 0, "above 0 and at most 1"),
        ("layer_norm_epsilon", -1e-5, "above 0 and at most 1"),
        ("layer_norm_epsilon", math.inf, "above 0 and at most 1"),
        ("layer_norm_epsilon", math.nan, "above 0 and at most 1"),
        ("layer_norm_epsilon", 10**400, "above 0 and at most 1"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(saved, monkeypatch, key, value, words):
    monkeypatch.setattr(GPT, "__init__", None)  # before anything is built
    with pytest.raises(UserError) as error:
        saved({key: value})
    message = str(error.value)
    assert words in message and key in message and "config.json" in message and len(message) < 300


def test_several_tokens_may_end_a_text(saved):
    assert saved({"eos_token_id": [7, 60, 7]}).config.eos_token_ids == (7, 60)


def test_what_a_config_lacks_is_as_in_gpt2(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert GPT.read_config(parse_name(tmp_path)) == GPTConfig() == PRESETS["gpt2"]
