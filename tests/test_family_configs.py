"""The shape of a model and what ends its texts, as its JSON files say."""

import json
import math

import pytest
from conftest import edit_json, refused

from llama import LlamaConfig
from loading.config import llama_to_dict, read_special_tokens
from loading.load import PRESETS, load_config, resolve_source
from model import GPTConfig

GPT2 = {"vocab_size": 61, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
LLAMA = {"vocab_size": 61, "max_position_embeddings": 16}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"head_dim": 6, "hidden_size": 16, "intermediate_size": 24, "bos_token_id": 59}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SMALL = {  # model_type -> a small config.json
    "gpt2": GPT2,
    "qwen3": LLAMA | {"num_hidden_layers": 3, "use_sliding_window": True},
    "qwen3_moe": LLAMA | MOE | {"use_sliding_window": True},
    "gemma3_text": LLAMA | {"num_hidden_layers": 7},
}


@pytest.fixture
def read(tmp_path):
    """A function that reads the configuration in a small config.json with other values.

    "missing": without the key.
    """

    def read(model_type: str, **values):
        fields = SMALL.get(model_type, LLAMA) | {"model_type": model_type, "eos_token_id": 60}
        fields = {key: value for key, value in (fields | values).items() if value != "missing"}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_config(tmp_path)

    return read


REFUSED = [
    ("gpt2", {"activation_function": "relu"}, "supported is 'gelu_new' or 'gelu_pytorch_tanh'"),
    ("gpt2", {"n_inner": 7}, "n_inner is 7; supported is None or 64"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings is False; supported is True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False; supported is True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True; supported is False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; supported is False"),
    ("gpt2", {"n_layer": -1}, "n_layer -1: must be an integer from 1 to 1000"),
    ("gpt2", {"n_layer": True}, "n_layer True: must be an integer from 1 to 1000"),
    ("gpt2", {"n_layer": 1001}, "n_layer 1001: must be an integer from 1 to 1000"),
    ("gpt2", {"n_head": 1001}, "n_head 1001: must be an integer from 1 to 1000"),
    ("gpt2", {"n_embd": "16"}, "n_embd '16': must be an integer from 1 to 100000"),
    ("gpt2", {"n_embd": 10**5 + 1}, "n_embd 100001: must be an integer from 1 to 100000"),
    ("gpt2", {"n_embd": [[16]]}, "n_embd [[16]]: must be an integer"),
    ("gpt2", {"n_positions": 16.0}, "n_positions 16.0: must be an integer from 1 to 1000000"),
    ("gpt2", {"vocab_size": 10**100}, "must be an integer from 1 to 1000000"),
    ("gpt2", {"vocab_size": None}, "vocab_size None: must be an integer from 1 to 1000000"),
    ("gpt2", {"n_head": 3}, "n_embd 16: must be a multiple of n_head (3)"),
    ("gpt2", {"eos_token_id": 61}, "61: must be an id below 61, or a list of them"),
    ("gpt2", {"eos_token_id": -1}, "eos_token_id -1: must be an id below 61"),
    ("gpt2", {"eos_token_id": []}, "eos_token_id []: must be an id below 61"),
    ("gpt2", {"eos_token_id": [60, [1]]}, "eos_token_id [60, [1]]: must be an id below 61"),
    ("gpt2", {"eos_token_id": True}, "eos_token_id True: must be an id below 61"),
    ("gpt2", {"layer_norm_epsilon": "small"}, "epsilon 'small': must be above 0 and at most"),
    ("gpt2", {"layer_norm_epsilon": True}, "layer_norm_epsilon True: must be above 0"),
    ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon 0: must be above 0"),
    ("gpt2", {"layer_norm_epsilon": math.nan}, "layer_norm_epsilon nan: must be above 0"),
    ("bert", {}, "model_type is 'bert'; supported is 'gpt2'"),
    ("missing", {}, "model_type is None; supported is 'gpt2'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True; supported is False"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True; supported is False"),
    ("llama", {"is_causal": False}, "is_causal is False; supported is True"),
    ("llama", {"tie_word_embeddings": "yes"}, "is 'yes'; supported is False or True"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: rope_type is 'linear'; support"),
    (
        "llama",
        {"rope_scaling": "dynamic"},
        "rope_scaling: rope_type is 'dynamic'; supported is 'default'",
    ),
    ("llama", {"rope_parameters": ["default"]}, "rope_parameters: rope_type is ['default']"),
    ("llama", {"rope_theta": 0}, "rope_theta 0: must be above 0 and at most"),
    ("llama", {"rms_norm_eps": 2}, "rms_norm_eps 2: must be above 0 and at most 1"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0"),
    ("llama", {"intermediate_size": 10**9}, "must be an integer from 1 to 1000000"),
    ("llama", {"head_dim": 5}, "head_dim 5: must be even"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4: must be a multiple of num"),
    ("llama", {"num_attention_heads": 20, "head_dim": None}, "head_dim 0: must be even"),
    ("llama", {"bos_token_id": -1}, "bos_token_id -1: must be an id below 61, or a list"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "; supported is 'full_attention'"),
    ("llama", {"layer_types": 7}, "layer_types is 7; supported is 'full_attention'"),
    ("qwen2", {"eos_token_id": None}, "eos_token_id None: must be an id below 61"),
    ("qwen3", {"eos_token_id": None}, "eos_token_id None: must be an id below 61"),
    (
        "qwen3",
        {"layer_types": ["full_attention"] * 2},
        "layer_types of length 2: must have length 3",
    ),
    ("qwen3", {"layer_types": ["local"] * 3}, "layer_types is 'local'; supported is 'full_atten"),
    ("qwen3", {"max_window_layers": "two"}, "max_window_layers 'two': must be an integer"),
    ("qwen3", {"sliding_window": 0, "max_window_layers": 0}, "sliding_window 0: must be an"),
    ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; supported is False"),
    ("mistral", {"sliding_window": "8"}, "sliding_window '8': must be an integer from 1"),
    ("mistral", {"layer_types": "full_attention"}, "; supported is 'sliding_attention'"),
    ("qwen3_moe", {"layer_types": "full_attention"}, "; supported is 'sliding_attention'"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts 0: must be an integer from 1 to 1000"),
    ("qwen3_moe", {"num_experts_per_tok": 6}, "per_tok 6: must be at most num_experts (5)"),
    ("qwen3_moe", {"moe_intermediate_size": "x"}, "moe_intermediate_size 'x': must be an in"),
    ("qwen3_moe", {"norm_topk_prob": 2}, "norm_topk_prob is 2; supported is False or True"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0: must be an integer"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3: must be a list of integers"),
    ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers ['a']: must be a list of"),
    ("mixtral", {"num_experts_per_tok": 9}, "per_tok 9: must be at most num_local_experts"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "softcapping is 30.0; supported is None"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "softcapping is 50.0; supported is None"),
    (
        "gemma3_text",
        {"hidden_activation": "gelu"},
        "hidden_activation is 'gelu'; supported is 'gel",
    ),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attention is True; supported is False"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0: must be above"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "yarn"}}, "full_attention: rope_type is 'yarn'"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, "factor None: must be above 0"),
    ("gemma3_text", {"rope_scaling": "linear"}, "rope_scaling 'linear': must be an object"),
    ("gemma3_text", {"rope_local_base_freq": 0}, "rope_theta 0: must be above 0"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        "sliding_attention: rope_type is 'linear'; supported is 'default'",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": 7}},
        "full_attention 7: must be an object",
    ),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern 0: must be an in"),
    (
        "gemma3_text",
        {"layer_types": ["full_attention"]},
        "layer_types of length 1: must have length 7",
    ),
    ("gemma3", {}, "text_config None: must be an object"),
]
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 16}
for changes, words in (
    ({"factor": None}, "factor None: must be above 0"),
    ({"factor": 0}, "factor 0: must be above 0"),
    ({"low_freq_factor": "1"}, "low_freq_factor '1'"),
    ({"high_freq_factor": 1.0}, "low_freq_factor 1.0: must be below high_freq_factor (1.0)"),
    ({"original_max_position_embeddings": -1}, "original_max_position_embeddings -1"),
    ({"rope_type": "dynamic"}, "rope_type is 'dynamic'; supported is 'default' or 'llama3' or "),
):
    REFUSED.append(("llama", {"rope_scaling": LLAMA_3 | changes}, words))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
for key, value, method in (
    ("quantization_config", FP8, "'fp8'"),
    ("quantization_config", {"load_in_4bit": True, "quant_method": "bitsandbytes"}, "'bits"),
    ("quantization_config", {"load_in_8bit": True}, "None"),
    ("compression_config", {"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
    ("quantization_config", "fp8", "'fp8'"),
):
    REFUSED.append(("gpt2", {key: value}, f"{key}: quant_method {method}"))


@pytest.mark.parametrize("model_type, values, words", REFUSED)
def test_a_config_that_no_such_model_has_is_refused(read, tmp_path, model_type, values, words):
    message = refused(lambda: read(model_type, **values))
    assert words in message and message.startswith(f"{tmp_path / 'config.json'}: ")
    assert len(message) < 350


NEWER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 77}}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 77.0, "rope_scaling": None},
        {"rope_theta": 77.0, "rope_scaling": "default", "rope_parameters": {"rope_theta": 9}},
        NEWER_ROPE,
        NEWER_ROPE | {"rope_theta": 10.0},
    ],
)
def test_theta_in_older_and_newer_files(read, values):
    assert read("llama", **values).rope_theta == 77


TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "model_type, values, windows",
    [
        ("llama", {"sliding_window": 8}, ()),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {}, (4096, 4096)),
        ("mistral", {"sliding_window": None}, ()),
        ("qwen3", {"max_window_layers": 1, "sliding_window": 8}, (None, 8, 8)),
        ("qwen3", {"max_window_layers": 0, "sliding_window": 8}, (8, 8, 8)),
        ("qwen3", {"sliding_window": 8}, ()),
        ("qwen3", {"max_window_layers": 2}, (None, None, 4096)),
        ("qwen3", {"max_window_layers": 1, "sliding_window": None}, ()),
        ("qwen3", {"max_window_layers": 0, "layer_types": TYPES}, (None, 4096, None)),
        ("qwen3", {"max_window_layers": 0, "use_sliding_window": False}, ()),
        ("qwen3", {"layer_types": [TYPES[0]] * 3, "use_sliding_window": False}, ()),
        ("qwen3_moe", {"sliding_window": 8, "max_window_layers": 1}, (8, 8)),
        ("qwen3_moe", {"use_sliding_window": False}, ()),
        ("gemma3_text", {"sliding_window": 8}, (8, 8, 8, 8, 8, None, 8)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None) * 3 + (8,)),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, ()),
    ],
)
def test_windows_of_a_config(read, model_type, values, windows):
    assert read(model_type, **values).sliding_windows == windows


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"rope_theta": 77.0, "rope_local_base_freq": 5.0, "rope_scaling": None}, (77, 5, 1)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (1e6, 1e4, 8)),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 3.0}, (3, 1e4, 8)),
        ({"rope_parameters": {"full_attention": LINEAR}}, (1000, 1e4, 8)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}}, (1e6, 7, 1)),
    ],
)
def test_rotations_of_a_gemma_in_older_and_newer_files(read, values, expected):
    config = read("gemma3_text", **values)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_linear_factor) == expected


@pytest.mark.parametrize(
    "values, dense",
    [
        ({"num_experts": None, "num_local_experts": 5}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": 1}, ()),
        ({"mlp_only_layers": [1, 40]}, (1,)),
        ({"decoder_sparse_step": 2}, (0,)),
        ({"decoder_sparse_step": 3}, (0, 1)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1)),
    ],
)
def test_layers_without_experts(read, values, dense):
    experts = read("qwen3_moe", **values).experts
    assert (experts.num_experts, experts.mlp_only_layers) == (5, dense)


@pytest.mark.parametrize("missing", ["missing", None])  # null is as good as missing
@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"]
)
def test_what_a_config_lacks_is_as_in_transformers(read, tmp_path, model_type, missing):
    import transformers

    keys = ["num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    keys += ["head_dim", "bos_token_id", "query_pre_attn_scalar", *MOE]
    lacking = dict.fromkeys(keys, missing) | {"use_sliding_window": missing}
    if not model_type.startswith("qwen"):  # those must say which token ends a text
        lacking["eos_token_id"] = missing
    sizes = {"hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 7}
    ours = read(model_type, **lacking | sizes)
    said = json.loads((tmp_path / "config.json").read_text())
    said = {key: value for key, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    heads = {"mistral": 8, "mixtral": 8, "gemma3_text": 4}
    assert ours.n_kv_head == heads.get(model_type, 16)
    assert ours.head_dim == {"qwen3": 128, "gemma3_text": 256}.get(model_type, 4)
    if model_type not in ("qwen2", "qwen3", "qwen3_moe"):
        assert ours.n_kv_head == theirs.num_key_value_heads
        assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == (2 if "eos_token_id" in lacking else 60)  # an empty prompt's
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    windows = {"full_attention": None, "sliding_attention": getattr(theirs, "sliding_window", None)}
    if model_type == "mistral":
        assert ours.sliding_windows == (theirs.sliding_window,) * 7
    elif model_type == "gemma3_text":
        assert ours.sliding_windows == tuple(windows[each] for each in theirs.layer_types)
        assert ours.rope_local_base_freq == rope["sliding_attention"]["rope_theta"]
        assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    else:
        assert ours.sliding_windows == ()
    if ours.experts:
        experts = ours.experts
        assert experts.num_experts == theirs.num_local_experts
        assert experts.num_experts_per_tok == theirs.num_experts_per_tok
        assert experts.n_inner == getattr(theirs, "moe_intermediate_size", 24)
        assert experts.norm_topk_prob == (model_type == "mixtral")
        assert experts.mlp_only_layers == ()


def test_what_a_text_config_lacks_is_as_in_transformers(tmp_path):
    """As in Gemma 3 4b's file, which says only what its text part has of its own."""
    import transformers

    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    said |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": said}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    ours = load_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert ours.vocab_size == theirs.vocab_size == 262208
    assert (ours.n_head, ours.n_kv_head) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.block_size) == (theirs.head_dim, theirs.max_position_embeddings)
    assert [*filter(None, ours.sliding_windows)] == [1024] * 29 and len(ours.sliding_windows) == 34
    assert (ours.rope_theta, ours.rope_local_base_freq, ours.rope_linear_factor) == (1e6, 1e4, 8.0)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((1, 106), 2)


def test_defaults_are_those_of_the_embedded_models(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_config(tmp_path) == GPTConfig() == PRESETS["gpt2"]
    (tmp_path / "config.json").write_text(json.dumps(llama_to_dict(LlamaConfig())))
    assert load_config(tmp_path) == LlamaConfig()


# Ends of a text


ADDED = {"7": {"content": "<end>", "special": True}}
TOKENIZER = {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"</s>": 9}}}
END = {"eos_token": "<end>"}
OTHER = {"eos_token": "</s>"}
IDS = {"generation_config": {"eos_token_id": [3, 7]}}
LISTED = {"tokenizer_config": END | {"added_tokens_decoder": ADDED}}
NAMED = {"tokenizer_config": END, "tokenizer": TOKENIZER}
MAPPED = {"special_tokens_map": OTHER, "tokenizer": TOKENIZER}
OUTSIDE = {"tokenizer": {"added_tokens": [{"id": 61, "content": "<end>"}]}}


def write(directory, **files) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    "in_config, files, expected",
    [
        (60, {}, (60,)),
        ([60, 3, 60], {}, (60, 3)),  # in their order: an empty prompt starts from the first
        (60, {"generation_config": {"eos_token_id": 5}}, (60, 5)),
        ([60, 3], IDS, (60, 3, 7)),
        (None, IDS, (3, 7)),
        (60, {"generation_config": {}}, (60,)),
        (60, {"generation_config": {"eos_token_id": None}}, (60,)),
        (60, LISTED, (60, 7)),
        (60, NAMED, (60, 7)),
        (None, NAMED, (7,)),
        (60, NAMED | {"tokenizer_config": {"eos_token": {"content": "<end>"}}}, (60, 7)),
        (60, NAMED | {"tokenizer_config": OTHER}, (60, 9)),
        (60, MAPPED, (60, 9)),
        (60, MAPPED | LISTED, (60, 7)),
        (60, IDS | NAMED, (60, 3, 7)),
        (60, NAMED | {"tokenizer_config": {"eos_token": "<none>"}}, (60,)),
        (60, NAMED | {"tokenizer_config": {"eos_token": None}}, (60,)),
        (60, {"tokenizer_config": END}, (60,)),
        (60, NAMED | OUTSIDE, (60,)),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_every_end_that_a_file_names_ends_a_text(
    read, tmp_path, model_type, in_config, files, expected
):
    write(tmp_path, **files)
    config = read(model_type, eos_token_id=in_config, bos_token_id="missing")
    assert (config.eos_token_ids, config.bos_token_id) == (expected, expected[0])


def test_a_llama_that_names_no_end_has_2(read):
    assert read("llama", eos_token_id=None).eos_token_ids == (2,)


@pytest.mark.parametrize("in_config", [60, None])
def test_an_end_of_text_that_is_none_is_named(read, tmp_path, in_config):
    write(tmp_path, generation_config={"eos_token_id": [60, 61]})
    message = refused(lambda: read("qwen2", eos_token_id=in_config))
    words = "generation_config.json: eos_token_id [60, 61]: must be an id below 61"
    assert words in message


def test_special_tokens_of_both_files(tmp_path):
    write(
        tmp_path,
        special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": 3},
        tokenizer_config={"eos_token": "<end>", "cls_token": "<c>", "unk_token": None},
    )
    expected = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<c>"}
    assert read_special_tokens(resolve_source(tmp_path)) == expected
    edit_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {}})
    expected = {"eos_token": "<end>", "cls_token": "<c>"}
    assert read_special_tokens(resolve_source(tmp_path)) == expected
