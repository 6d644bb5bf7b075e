"""Lesson 125: GGUF files of Gemma 3, and of models whose windows llama.cpp does not know."""

import gguf
import pytest
import torch
from conftest import random_tokens, refused, run_rows
from gguf_files import CONTROL, NORMAL, OWNER, USER_DEFINED, edited, loaded
from test_gguf import same
from test_gguf_rotations import check_backends
from test_sentencepiece import BYTE, BYTES

from benchmarks.export_gguf import write_gguf
from errors import UserError
from loading.load import load_config, load_model
from text.tokenizer import load_encoding

SIXTH = (5, 5, 5, 5, 5, None, 5)  # one of six layers sees all


@pytest.fixture
def made(tiny_gemma, tmp_path):
    """A function that writes a random Gemma: the model, its file."""

    def make(sliding_windows=SIXTH, query_pre_attn_scalar=6, **shape):
        model = tiny_gemma(
            sliding_windows=sliding_windows, query_pre_attn_scalar=query_pre_attn_scalar, **shape
        )
        model = model.bfloat16().float()  # as real ones: 1 + w is exact
        try:
            write_gguf(model, tmp_path / "gemma.gguf", "float32")
        except UserError as error:
            raise AssertionError(str(error)) from None
        return model, tmp_path / "gemma.gguf"

    return make


def fields_of(file) -> dict:
    """What a file's metadata says of a Gemma."""
    fields = gguf.GGUFReader(file).fields
    return {
        name.removeprefix("gemma3."): field.contents()
        for name, field in fields.items()
        if name.startswith("gemma3.")
    }


def test_a_file_says_what_llama_cpps_says(made):
    model, file = made()
    assert gguf.GGUFReader(file).get_field("general.architecture").contents() == "gemma3"
    expected = {"attention.sliding_window": 5, "rope.freq_base_swa": 10000.0}
    expected |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    expected |= {"rope.freq_base": 10000.0, "attention.key_length": 6, "context_length": 40}
    found = fields_of(file)
    assert {key: found.get(key) for key in expected} == expected
    assert "attention.sliding_window_pattern" not in found
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    assert "rope_freqs.weight" not in stored
    block = model.layers[3]
    attention = block.self_attn
    names = {
        "attn_norm": block.input_layernorm,
        "attn_q_norm": attention.q_norm,
        "attn_k_norm": attention.k_norm,
        "post_attention_norm": block.post_attention_layernorm,
        "ffn_norm": block.pre_feedforward_layernorm,
        "post_ffw_norm": block.post_feedforward_layernorm,
    }
    for name, norm in names.items():
        assert torch.equal(stored[f"blk.3.{name}.weight"], 1 + norm.weight), name
    assert torch.equal(stored["output_norm.weight"], 1 + model.norm.weight)
    assert torch.equal(stored["blk.3.attn_q.weight"], attention.q_proj.weight)  # in its order


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"rope_linear_factor": 1.0, "tie_word_embeddings": False, "rope_local_base_freq": 77.0},
        {"sliding_windows": (None, 5, 5, None)},
        {"sliding_windows": (5, 5, 5)},
        {"sliding_windows": (), "n_layer": 4, "rope_theta": 1e6},
        pytest.param(
            {"sliding_windows": (5,) * 62, "query_pre_attn_scalar": 4}, id="as deep as the 27B"
        ),
    ],
    ids=str,
)
def test_what_was_written_comes_back_bit_for_bit(made, shape):
    model, file = made(**shape)
    found = load_model(file)
    assert same(found, model)
    if shape == {}:
        text = run_rows(model, [random_tokens(9)], max_new_tokens=50)
        assert run_rows(found, [random_tokens(9)], max_new_tokens=50) == text


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_1_goes_before_a_norm_is_rounded(made, kind):
    model, file = made(n_embd=32)
    model.norm.weight.data[0] = -0.99  # from 1 / 2 on, 16 bits hold the difference too
    name = "output_norm.weight"
    data = gguf.quantize(1 + model.norm.weight.detach().numpy(), gguf.GGMLQuantizationType[kind])
    file = edited(file, file.with_name("other.gguf"), blocks={name: (data, kind)})
    stored = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(load_model(file, dtype).norm.weight, torch.tensor(stored - 1).to(dtype))


@pytest.mark.parametrize(
    "values, sliding_windows",
    [
        ({"_pattern": 2}, (5, None, 5, None, 5, None, 5)),
        ({"_pattern": 1}, ()),
        ({"_pattern": 0}, (5,) * 7),
        ({"_pattern": [True, False] * 3 + [False]}, (5, None, 5, None, 5, None, None)),
        ({"_pattern": [False] * 7}, ()),
        ({"": 0}, ()),
        ({"": None}, ()),
    ],
    ids=str,
)
def test_which_layers_have_a_window(made, values, sliding_windows):
    _, file = made()
    values = {f"gemma3.attention.sliding_window{key}": value for key, value in values.items()}
    assert (
        load_model(edited(file, file.with_name("w.gguf"), values=values)).config.sliding_windows
        == sliding_windows
    )


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"rope.freq_base_swa": None}, (10000.0, 8.0)),  # older files
        ({"rope.scaling.type": None}, (77.0, 8.0)),
        ({"rope.scaling.factor": None}, (77.0, 1.0)),
        ({"rope.scaling.type": "none"}, (77.0, 1.0)),
    ],
    ids=str,
)
def test_rotations_of_a_file(made, values, expected):
    _, file = made(rope_local_base_freq=77.0)
    values = {f"gemma3.{key}": value for key, value in values.items()}
    config = load_config(edited(file, file.with_name("r.gguf"), values=values))
    assert (config.rope_local_base_freq, config.rope_linear_factor) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_in_c_and_on_ranks(made, compiled, dtype):
    _, file = made(
        sliding_windows=(5, None), n_embd=64, n_inner=64, head_dim=32, query_pre_attn_scalar=32
    )
    check_backends(file, dtype, 23)


def test_a_vocabulary_with_turns_and_runs_of_blanks(made):
    """Runs of blanks and HTML are tokens in any text, what ends a turn is not."""
    special = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    runs = ["\n", "\n\n", "  ", "<b>"]
    words = ["▁", "a", "b", "<", ">", "▁a"]
    tokens = [*special, *runs, *words, *BYTES]
    kinds = [CONTROL] * 4 + [USER_DEFINED] * 4 + [NORMAL] * 6 + [BYTE] * 256
    keys = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds}
    keys |= {"scores": [-1000.0] * 8 + [-1.0] * 262, "add_space_prefix": False}
    keys |= {"add_bos_token": True, "bos_token_id": 0, "eos_token_id": 1}
    _, file = made(vocab_size=270, bos_token_id=0)
    values = {f"{OWNER}.{key}": value for key, value in keys.items()}
    file = edited(file, file.with_name("v.gguf"), values=values | {f"{OWNER}.vocab_size": None})
    assert load_config(file).eos_token_ids == (1, 3)
    encoding = load_encoding(file, 270)
    assert encoding.encode("a  a\n\n a\n") == [0, 9, 6, 9, 5, 13, 4]
    assert encoding.encode_ordinary("<b>") == [7]  # as in transformers
    assert 3 not in encoding.encode_ordinary("a<end_of_turn>")
    assert encoding.encode("<b><end_of_turn>\n", allowed_special="all") == [0, 7, 3, 4]


def test_other_windows_limit_a_file_to_what_fits_into_them(tiny_windows, tiny_llama, tmp_path):
    """Up to there they change nothing. llama.cpp reads no windows of a Mistral or a Qwen."""
    file = tmp_path / "model.gguf"
    for shape in ({"sliding_windows": (8, 12)}, {"sliding_windows": (None, 8), "qk_norm": True}):
        model = tiny_windows(dtype=torch.float32, **shape)
        try:
            write_gguf(model, file, "float32")
        except UserError as error:
            raise AssertionError(str(error)) from None
        found = loaded(file)
        assert (found.config.sliding_windows, found.config.block_size) == ((), 8)
        rows = [random_tokens(3)]
        options = {"max_new_tokens": 6, "ignore_eos": True}  # the last pass is of 8 tokens
        assert run_rows(found, rows, **options) == run_rows(model, rows, **options)
    write_gguf(tiny_windows(dtype=torch.float32, sliding_windows=(50, None)), file, "float32")
    assert loaded(file).config.block_size == 40


@pytest.mark.parametrize(
    "shape, words",
    [
        ({"query_pre_attn_scalar": 5}, "query_pre_attn_scalar is 5; llama.cpp assumes 6"),
        pytest.param(
            {"sliding_windows": (5,) * 62},
            "query_pre_attn_scalar is 6; llama.cpp assumes 4",
            id="27B",
        ),
        (
            {"sliding_windows": (3, 8, None)},
            "sliding_windows are (3, 8, None); llama.cpp supports one size",
        ),
    ],
    ids=str,
)
def test_what_a_file_cannot_say_is_not_exported(tiny_gemma, tmp_path, shape, words):
    model = tiny_gemma(dtype=torch.float32, **{"query_pre_attn_scalar": 6} | shape)
    message = refused(write_gguf, model, tmp_path / "m.gguf", "float32")
    assert words in message
    assert not (tmp_path / "m.gguf").exists()


PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    "values, words",
    [
        ({PATTERN: [True] * 6}, f"{PATTERN} array('B', [1, 1, 1, 1, 1, ...]): must be an"),
        ({PATTERN: ["a"] * 7}, "must be an integer from 0, or 7 booleans"),
        ({PATTERN: True}, f"{PATTERN} True: must be an integer from 0"),
        ({"attention.sliding_window": 10**8}, "sliding_window 100000000: must be an integer"),
        ({"rope.scaling.type": "yarn"}, "type is 'yarn'; supported is 'linear' or 'none'"),
        ({"rope.scaling.factor": 0.0}, "rope.scaling.factor 0.0: must be above 0"),
        ({"rope.freq_base_swa": float("nan")}, "rope.freq_base_swa nan: must be above 0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported is 0"),
        ({"expert_count": 3}, "gemma3.expert_count is 3; supported is 0"),
    ],
    ids=str,
)
def test_a_file_of_another_model_is_refused(made, values, words):
    _, file = made()
    values = {f"gemma3.{key}": value for key, value in values.items()}
    assert words in refused(load_config, edited(file, file.with_name("o.gguf"), values=values))
