"""Weights for a browser: what gpt.c will find there, read as a processor with 32 bits reads it."""

import base64
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "course"))


@pytest.fixture(params=["stories-draft", "stories-llama"])
def name(request) -> str:
    return request.param


class Memory:
    """The image of a model, by the addresses in it."""

    def __init__(self, exported: dict):
        self.data = bytearray(base64.b64decode(exported["image"]))

    def at(self, address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        import web_model

        offset = address - web_model.BASE
        assert address % 16 == 0 and 0 <= offset < len(self.data)
        return torch.frombuffer(self.data, dtype=dtype, count=count, offset=offset)

    def struct(self, address: int, kind):
        import web_model

        return web_model.small(kind).from_buffer_copy(self.data, address - web_model.BASE)

    def weight(self, linear) -> torch.Tensor:
        """The weight of a packed layer, (out, in)."""
        panel = 8  # outputs; as the comment on products in gpt.c has it
        group = 2  # inputs
        out, size = linear.out_features, linear.in_features
        whole = out // panel
        packed = self.at(linear.weight, torch.int8, whole * panel * size)
        packed = packed.view(whole, size // group, panel, group)
        rest = self.at(linear.rest, torch.int8, panel * size)
        rest = rest.view(1, size // group, panel, group)
        return torch.cat([packed, rest]).transpose(1, 2).reshape(-1, size)[:out]


def test_the_weights_are_those_of_the_model(name):
    import web_model

    from loading.load import load_model
    from native.structs import LayerStruct, ModelStruct

    directory = web_model.CHECKPOINTS / name
    model = load_model(directory, torch.int8)
    config = model.config
    exported = web_model.export(directory)
    memory = Memory(exported)
    struct = memory.struct(exported["model"], ModelStruct)
    shape = config.n_layer, config.n_head, config.n_kv_head, config.n_embd
    assert (struct.n_layer, struct.n_head, struct.n_kv_head, struct.n_embd) == shape
    table = model.layer("embedding")
    for linear in (struct.embedding, struct.head):
        assert torch.equal(memory.weight(linear), table.weight)
        assert torch.equal(memory.at(linear.scale, torch.float32, len(table.scale)), table.scale)
        assert not memory.at(linear.offset, torch.int32, len(table.scale)).any()
    assert struct.embedding.weight == struct.head.weight  # once for both
    layers = memory.struct(struct.layers, LayerStruct * config.n_layer)
    if name == "stories-llama":
        own = [(block.mlp.down_proj, block.input_layernorm) for block in model.layers]
    else:
        own = [(block.mlp.c_proj, block.ln_1) for block in model.h]
    for layer, (linear, norm) in zip(layers, own, strict=True):
        assert torch.equal(memory.weight(layer.mlp_out), linear.weight)
        weight = memory.at(layer.attn_norm.weight, torch.float32, config.n_embd)
        assert torch.equal(weight, norm.weight)
        assert bool(layer.mlp_out.bias) == (linear.bias is not None)
    assert bool(exported["cos"]) == bool(exported["sin"]) == (name == "stories-llama")
    if exported["cos"]:
        cos, sin = (memory.at(exported[part], torch.float32, 64) for part in ("cos", "sin"))
        half = config.head_dim // 2
        angle = 1 / config.rope_theta ** (torch.arange(half) / half)  # of position 1
        torch.testing.assert_close(cos[32 : 32 + half], angle.cos())
        torch.testing.assert_close(sin[32 + half :], angle.sin())


def test_what_a_page_loads_is_small_and_one_vocabulary():
    import web_model

    found = [web_model.export(web_model.CHECKPOINTS / name) for name in web_model.MODELS]
    assert sum(len(each["image"]) for each in found) < 8e6
    assert found[0]["tokens"] == found[1]["tokens"] and len(found[0]["tokens"]) == 4096
    assert found[0]["tokens"][found[0]["special"]["<|endoftext|>"]] == "<|endoftext|>"
    assert "\\s" not in found[0]["pattern"].lower()


def test_play_shows_a_recording_of_the_model_that_it_loads():
    """Each token's own probability is that of a pass over the text before it, without a cache."""
    import web_model

    from loading.load import load_model
    from loading.tokenizer import load_encoding

    found = web_model.record()
    directory = web_model.CHECKPOINTS / "stories-llama"
    model = load_model(directory, torch.int8)
    encoding = load_encoding(directory, model.config.vocab_size)
    ids = encoding.encode("Once upon a time")
    tokens = found["tokens"]
    written = [token["token"] for token in tokens]
    assert found["prompt"] == "Once upon a time" and 100 < len(written) <= 200
    with torch.inference_mode():
        logits = model(torch.tensor([ids + written]))[0, len(ids) - 1 : -1].double()
    own = logits.log_softmax(dim=-1)
    apart = []
    for row, token in zip(own, tokens, strict=True):
        apart.append(abs(token["logprob"] - row[token["token"]].item()))
        ends = token["token"] in model.config.eos_token_ids
        assert token["text"] == ("" if ends else encoding.decode([token["token"]]))
        assert len(token["top"]) == 8 and token["p"] > 0
        chances = [other["logprob"] for other in token["top"]]
        assert chances == sorted(chances, reverse=True)
        # Top-p cuts the tail, and what stays shares the mass: all that is cut is less likely.
        kept = [other["p"] > 0 for other in token["top"]]
        assert kept == sorted(kept, reverse=True)
        assert sum(other["p"] for other in token["top"]) <= 1 + 1e-5
    # C rounds otherwise, and a value may meet the middle between two of int8.
    assert max(apart) < 0.5 and sum(apart) / len(apart) < 0.03
