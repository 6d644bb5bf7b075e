"""A model in a GGUF file is the model that it was made of, in any family."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line, load, random_tokens, refused, run
from families import family
from gguf_files import edited, loadable
from ranks import ROUNDING, compared

import errors
from benchmarks.export_gguf import write_gguf
from llama import ExpertsConfig, RopeScaling, RotaryEmbedding
from loading import gguf_model
from loading.gguf import read_split
from loading.gguf_model import gguf_name
from loading.load import load_config, load_model, resolve_source, save_model
from native import use_native
from server.served import served_name
from text.tokenizer import load_encoding

SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
FACTORS = "rope_freqs.weight"
EXPERTS = ExpertsConfig(num_experts=5, num_experts_per_tok=2, n_inner=24, norm_topk_prob=True)
KINDS = {  # what a file calls itself -> the family, and its shape
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {}),
    "mixtral": ("Llama", {"experts": EXPERTS}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"sliding_windows": (), "n_layer": 2}),
    "qwen3moe": ("Qwen3Moe", {}),
    # One of six layers sees all. llama.cpp assumes head_dim for the scalar.
    "gemma3": ("Gemma3", {"sliding_windows": (5,) * 5 + (None, 5), "query_pre_attn_scalar": 6}),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def made(request, tmp_path):
    """A function that writes a random model of a kind: the model, its file."""

    def make(kind, **shape):
        name, own = KINDS[kind]
        model = family(request, name)(dtype=torch.float32, **own | shape)
        if kind == "gemma3":
            model = model.bfloat16().float()  # as real ones: 1 + w is exact
        file = tmp_path / f"{kind}.gguf"
        write_gguf(model, file, "float32")
        if kind == "qwen2":  # the export writes it as a Llama, whose queries have another order
            named = model.named_parameters()
            ours = {gguf_name(model, key): weight.detach() for key, weight in named}
            ours[FACTORS] = None
            file = edited(file, tmp_path / "own.gguf", "qwen2", tensors=ours)
        return model, file

    return make


def same(ours, theirs) -> bool:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    return equal and ours.config == theirs.config


@pytest.mark.parametrize(
    "kind, shape",
    [
        *((kind, {}) for kind in KINDS),
        ("gpt2", {"n_layer": 12, "eos_token_ids": (4, 9, 7)}),
        ("llama", {"n_layer": 3, "n_head": 6, "head_dim": 8, "qkv_bias": True}),
        ("qwen2", {"tie_word_embeddings": True, "rope_theta": 500.0, "norm_eps": 1e-5}),
        ("qwen3", {"n_layer": 12, "tie_word_embeddings": True}),
        ("qwen3moe", {"n_layer": 12, "sizes": {"num_experts": 11}}),
        ("qwen3moe", {"tie_word_embeddings": True, "head_dim": 16, "n_embd": 33}),
        ("gemma3", {"rope_linear_factor": 1.0, "rope_local_base_freq": 77.0}),
        ("gemma3", {"sliding_windows": (None, 5, 5, None), "tie_word_embeddings": False}),
        ("gemma3", {"sliding_windows": (5, 5, 5)}),
        ("gemma3", {"sliding_windows": (), "n_layer": 4, "rope_theta": 1e6}),
        ("gemma3", {"sliding_windows": (5,) * 62, "query_pre_attn_scalar": 4}),  # as the 27B
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_was_written_comes_back_bit_for_bit(made, monkeypatch, kind, shape):
    """Also in blocks of rows, which end with a head's or an expert's."""
    model, file = made(kind, **shape)
    assert same(load_model(file), model)
    for rows in (1, 5, 13):
        monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 16 * rows)
        assert same(load_model(file), model)
    blocks = gguf_model.read_gguf_tensors(resolve_source(file).gguf, model)
    if kind in ("gpt2", "qwen2", "qwen3"):  # others have whole heads or experts
        widest = max(weight.shape[-1] for weight in model.parameters())
        assert max(block.nbytes for _, _, block in blocks) <= 4 * (16 * 13 + widest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@EACH_KIND
def test_in_int8_in_c_and_on_ranks(made, compiled, tmp_path, kind, dtype):
    shape = {"n_embd": 64} | ({} if kind == "gpt2" else {"n_inner": 64, "head_dim": 32})
    if kind == "gemma3":
        shape |= {"sliding_windows": (5, None), "query_pre_attn_scalar": 32}
    if kind == "qwen3moe":
        shape |= {"sizes": {"n_inner": 64}}
    if kind == "mixtral":
        del shape["n_inner"]  # that of its experts
    model, file = made(kind, **shape)
    found = load_model(file, dtype)
    if kind not in ("mixtral", "llama"):  # a Llama's rotations become a table
        save_model(model, tmp_path / "directory")
        theirs = load(tmp_path / "directory", dtype).state_dict()
        ours = found.state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    prompts = [random_tokens(9), random_tokens(3)]
    expected = run(found, prompts, max_new_tokens=12)
    use_native(found)
    assert run(found, prompts, max_new_tokens=12) == expected
    tokens = torch.tensor([random_tokens(15)])
    assert compared(2, file, tokens, dtype=dtype)[0] <= ROUNDING[dtype]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_are_read_as_they_are(made, tmp_path, kind):
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    model, file = made("qwen3")
    file = edited(file, tmp_path / "half.gguf", kind=kind)
    found = load_model(file)
    for name, weight in model.named_parameters():
        rounded = weight.to(dtype).float() if weight.dim() > 1 else weight
        assert torch.equal(found.get_parameter(name), rounded)
    for name, weight in load_model(file, dtype).named_parameters():
        assert torch.equal(weight, model.get_parameter(name).to(dtype))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_1_goes_before_a_norm_of_a_gemma_is_rounded(made, kind):
    model, file = made("gemma3", n_embd=32)
    model.norm.weight.data[0] = -0.99  # from 1 / 2 on, 16 bits hold the difference too
    data = gguf.quantize(1 + model.norm.weight.detach().numpy(), gguf.GGMLQuantizationType[kind])
    file = edited(file, file.with_name("o.gguf"), blocks={"output_norm.weight": (data, kind)})
    stored = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(load_model(file, dtype).norm.weight, torch.tensor(stored - 1).to(dtype))


# What the export writes, as llama.cpp reads it.


HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 6}
ROPE = {"rope.freq_base": 10000, "block_count": 2}
SAYS = {
    "qwen3": HEADS | ROPE | {"rope.dimension_count": 6},
    "qwen3moe": ROPE
    | {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 12},
    "gemma3": HEADS
    | {"attention.sliding_window": 5, "rope.freq_base_swa": 10000.0, "context_length": 40}
    | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
}
NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NAMED = {
    "qwen3": NORMS | {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"},
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "gemma3": NORMS
    | {
        "attn_q": "self_attn.q_proj",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


@pytest.mark.parametrize("kind", SAYS)
def test_a_file_is_what_llama_cpp_reads(made, kind):
    """Halves of a head stay where they are, and the experts of a layer are one tensor."""
    model, path = made(kind)
    file = gguf.GGUFReader(path)
    assert file.get_field("general.architecture").contents() == kind
    for key, value in SAYS[kind].items():
        assert file.get_field(f"{kind}.{key}").contents() == value, key
    assert not file.get_field(f"{kind}.attention.sliding_window_pattern")
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    assert FACTORS not in stored
    weights = dict(model.named_parameters())
    for name, path in NAMED[kind].items():
        if "{}" in path:
            paths = [path.format(number) for number in range(5)]
            expected = torch.stack([weights[f"layers.1.{each}.weight"] for each in paths])
        else:
            expected = weights[f"layers.1.{path}.weight"]
        expected = expected + (kind == "gemma3" and expected.dim() == 1)
        assert torch.equal(stored[f"blk.1.{name}.weight"], expected), name


def test_experts_are_exported_and_read_in_blocks_and_their_router_is_not(made):
    model, file = made("qwen3moe", n_embd=64, sizes={"n_inner": 32})
    write_gguf(model, file, "int8")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert stored["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"  # as llama.cpp's own
    experts = load_model(file).layers[1].mlp.experts
    for role in ("gate", "up", "down"):
        tensor = stored[f"blk.1.ffn_{role}_exps.weight"]
        assert tensor.tensor_type.name == "Q8_0"
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        found = torch.stack([getattr(expert, f"{role}_proj").weight for expert in experts])
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "kind, shape, words",
    [
        ("qwen3", {"rope_scaling": SCALING}, "llama.cpp supports no RoPE scaling of a Qwen3"),
        ("qwen3moe", {"sizes": {"mlp_only_layers": (0,)}}, "supports only experts in all layers"),
        ("qwen3moe", {"sizes": {"norm_topk_prob": False}}, "supports only experts in all layers"),
        ("mixtral", {"n_inner": 64}, "the experts' n_inner is 24; llama.cpp needs 64"),
        ("gemma3", {"query_pre_attn_scalar": 5}, "scalar is 5; llama.cpp assumes 6"),
        ("gemma3", {"sliding_windows": (5,) * 62}, "scalar is 6; llama.cpp assumes 4"),  # the 27B
        ("gemma3", {"sliding_windows": (3, 8, None)}, "(3, 8, None); llama.cpp supports one size"),
    ],
)
def test_what_a_file_cannot_say_is_not_exported(made, tmp_path, kind, shape, words):
    assert words in refused(lambda: made(kind, **shape))
    assert not list(tmp_path.iterdir())


def test_other_windows_limit_a_file_to_what_fits_into_them(tiny_windows, tmp_path):
    """Up to there they change nothing. llama.cpp reads no windows of a Mistral or a Qwen."""
    file = tmp_path / "model.gguf"
    for shape in ({"sliding_windows": (8, 12)}, {"sliding_windows": (None, 8), "qk_norm": True}):
        model = tiny_windows(dtype=torch.float32, **shape)
        write_gguf(model, file, "float32")
        found = load_model(file)
        assert (found.config.sliding_windows, found.config.block_size) == ((), 8)
        options = {"max_new_tokens": 6, "ignore_eos": True}  # the last pass is of 8 tokens
        prompts = [random_tokens(3)]
        assert run(found, prompts, **options) == run(model, prompts, **options)
    write_gguf(tiny_windows(dtype=torch.float32, sliding_windows=(50, None)), file, "float32")
    assert load_model(file).config.block_size == 40


# Rotations and windows


def test_slowed_rotations_are_a_table_of_factors(made, tmp_path):
    options = {"rope_scaling": SCALING, "head_dim": 16, "rope_theta": 1000.0, "block_size": 90}
    model, file = made("llama", **options)
    found = load_model(file)
    factors = found.config.rope_freq_factors
    assert len(factors) == 8 and (factors[0], factors[-1]) == (1.0, 8.0)
    assert hash(found.config) and found.config.rope_scaling is None
    tokens = torch.tensor([random_tokens(90)])
    with torch.inference_mode():
        assert (found(tokens) - model(tokens)).abs().max() < 1e-4
        plain = load_model(edited(file, tmp_path / "plain.gguf", tensors={FACTORS: None}))
        assert plain.config.rope_freq_factors is None
        assert (plain(tokens) - model(tokens)).abs().max() > 1e-2
    write_gguf(found, tmp_path / "again.gguf", "float32")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()
    words = "config.json has no key for the rope_freqs"
    assert words in refused(save_model, found, tmp_path / "directory")
    assert not (tmp_path / "directory").exists()


def test_factors_divide_each_frequency(made, tmp_path):
    file = edited(made("llama")[1], tmp_path / "f.gguf", tensors={FACTORS: [1, 2, 0.5]})
    config = load_model(file).config
    assert config.rope_freq_factors == (1.0, 2.0, 0.5)
    plain = 10000.0 ** -(torch.arange(3) / 3)
    found = RotaryEmbedding(config, torch.float32, "cpu").inv_freq
    assert torch.allclose(found, plain / torch.tensor([1, 2, 0.5]), rtol=1e-6)


WINDOW = "attention.sliding_window"
GEMMA_ROTATIONS = ("rope_local_base_freq", "rope_linear_factor")


@pytest.mark.parametrize(
    "values, fields, expected",
    [
        ({f"{WINDOW}_pattern": 2}, ("sliding_windows",), ((5, None, 5, None, 5, None, 5),)),
        ({f"{WINDOW}_pattern": 1}, ("sliding_windows",), ((),)),
        ({f"{WINDOW}_pattern": 0}, ("sliding_windows",), ((5,) * 7,)),
        (
            {f"{WINDOW}_pattern": [True, False] * 3 + [False]},
            ("sliding_windows",),
            ((5, None, 5, None, 5, None, None),),
        ),
        ({WINDOW: 0}, ("sliding_windows",), ((),)),
        ({WINDOW: None}, ("sliding_windows",), ((),)),
        ({"rope.freq_base_swa": None}, GEMMA_ROTATIONS, (10000.0, 8.0)),  # older files
        ({"rope.scaling.type": None}, GEMMA_ROTATIONS, (77.0, 8.0)),
        ({"rope.scaling.factor": None}, GEMMA_ROTATIONS, (77.0, 1.0)),
        ({"rope.scaling.type": "none"}, GEMMA_ROTATIONS, (77.0, 1.0)),
    ],
    ids=str,
)
def test_windows_and_rotations_of_a_gemma(made, values, fields, expected):
    _, file = made("gemma3", rope_local_base_freq=77.0)
    values = {f"gemma3.{key}": value for key, value in values.items()}
    config = load_config(edited(file, file.with_name("w.gguf"), values=values))
    assert tuple(getattr(config, field) for field in fields) == expected


def test_a_mixtral_is_a_llama_with_experts(made, tmp_path):
    model, file = made("mixtral")
    values = {"llama.expert_feed_forward_length": None}  # as llama.cpp's converter writes it
    assert same(load_model(edited(file, tmp_path / "other.gguf", values=values)), model)
    assert "a Mixtral" in refused(save_model, model, tmp_path)


@pytest.mark.parametrize("name", [None, "name", "basename"])
def test_a_note_says_what_is_assumed(made, tmp_path, capsys, name):
    errors.warn_once.cache_clear()
    architecture = "llama" if name else "qwen2"
    _, file = made(architecture)
    given = {f"general.{name}": "Mistral 7B"} if name else {}
    other = edited(file, tmp_path / "other.gguf", values=given)
    load_config(other)
    load_config(other)
    keys = [f"{architecture}.{key}" for key in (WINDOW, "rope.scaling.type")]
    assumed = "assuming no sliding window and no RoPE scaling"
    assert capsys.readouterr().err == f"note: {other}: no {keys[0]} and {keys[1]}: {assumed}\n"
    load_config(made("llama")[1])
    load_config(edited(other, tmp_path / "says.gguf", values=dict(zip(keys, (0, "none")))))
    assert capsys.readouterr().err == ""


def test_a_gpt_2_may_have_a_head_as_well_but_none_of_its_own(made, tmp_path):
    """Older files have a copy of the embedding, which may be of another type."""
    model, file = made("gpt2", n_embd=32)
    head = model.wte.weight.detach()
    changed = head.clone()
    changed[60, 31] += 1e-3
    q4_0 = gguf.quantize(head.numpy(), gguf.GGMLQuantizationType.Q4_0)
    q8_0 = gguf.quantize(head.roll(1, 0).numpy(), gguf.GGMLQuantizationType.Q8_0)
    for stored, blocks, equal in (
        (head, None, True),
        (head, (q4_0, "Q4_0"), True),
        (changed, None, False),
        (head, (q8_0, "Q8_0"), False),
    ):
        given = {"blocks": {"output.weight": blocks}} if blocks else {}
        other = edited(file, tmp_path / "f.gguf", tensors={"output.weight": stored}, **given)
        if equal:
            assert same(load_model(other), model)
        else:
            words = "output.weight differs from token_embd.weight; a GPT-2 has one"
            assert words in refused(load_model, other)


# Tokenizers and templates beside a file, and names.


def test_a_tokenizer_and_a_template_beside_it_are_its_own(cli, tmp_path):
    file = tmp_path / "Stories.v1.gguf"
    write_gguf(load_model(CHECKPOINTS / "stories"), file, "float32")
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", tmp_path)
    options = ["--prompt", "One day", "--temperature", 0, "--max-new-tokens", 20]
    code, out, err = cli("--model", file, *options)
    assert (code, out) == cli("--model", CHECKPOINTS / "stories", *options)[:2], err
    result = cli("--model", file, "--chat", *options)
    assert is_one_line(result, "not a chat model", str(file))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert cli("--model", file, "--chat", *options)[0] == 0
    (tmp_path / "tokenizer.json").unlink()  # then its tokens are numbers
    options[1] = "a 300 301"
    code, out, err = cli("--model", file, *options)
    assert code == 0 and out.startswith("a 300 301"), err
    assert load_encoding(file, 4096).encode("a 300 301") == [97, 300, 301]


def test_what_a_model_in_a_file_is_called(tmp_path):
    source = resolve_source(tmp_path / "Stories.v1.gguf")
    assert (source.type, source.label) == ("gguf", str(tmp_path / "Stories.v1.gguf"))
    assert served_name(source) == "Stories.v1"
    assert resolve_source(ROOT / "a.gguf").label == "a.gguf"
    assert source.weight_files() == [tmp_path / "Stories.v1.gguf"]


# Files that are wrong.


METADATA = [
    ("qwen3", "context_length", None, "context_length None: must be an integer from 1 to"),
    ("qwen3", "block_count", 10**6, "block_count 1000000: must be an integer from 1 to 1000"),
    ("qwen3", "embedding_length", "16", "embedding_length '16': must be an integer"),
    ("qwen3", "feed_forward_length", [24, 24], "feed_forward_length array"),
    ("qwen3", "attention.head_count", 0, "head_count 0: must be an integer"),
    ("qwen3", "attention.head_count_kv", 3, "head_count 4: must be a multiple of "),
    ("qwen3", "attention.key_length", 7, "key_length 7: must be even"),
    ("qwen3", "attention.value_length", 8, "value_length is 8; supported is 6"),
    ("qwen3", "attention.layer_norm_rms_epsilon", None, "epsilon None: must be above 0"),
    ("qwen3", "rope.freq_base", -1.0, "freq_base -1.0: must be above 0"),
    ("qwen3", "rope.dimension_count", 4, "dimension_count is 4; supported is 6"),
    ("qwen3", "rope.scaling.type", "linear", "type is 'linear'; supported is 'none' or 'yarn'"),
    ("qwen3", "rope.scaling.factor", 4.0, "rope.scaling.factor is 4.0; supported is 1"),
    ("qwen3", "rope.scaling.attn_factor", 2.0, "scaling.attn_factor is 2.0; supported is 1"),
    ("qwen3", "rope.scale_linear", 4.0, "rope.scale_linear is 4.0; supported is 1"),
    ("qwen3", "expert_count", 8, "expert_count is 8; supported is 0"),
    ("llama", "attention.sliding_window", 8, "attention.sliding_window is 8; supported is 0"),
    ("gpt2", "feed_forward_length", 63, "must be (2, 8.0, 64)"),
    ("gpt2", "attention.head_count_kv", 1, "must be (2, 8.0, 64)"),
    ("qwen3moe", "expert_count", 0, "qwen3moe.expert_count 0: must be an integer from 1"),
    # Before a model is built: a million experts would take minutes.
    ("qwen3moe", "expert_count", 1000, "blk.0.ffn_gate_inp.weight has shape (5, 16); the metadata"),
    ("qwen3moe", "block_count", 1000, "blk.2.ffn_gate_inp.weight is missing"),
    ("qwen3moe", "expert_used_count", 6, "expert_used_count 6: must be at most "),
    ("qwen3moe", "expert_used_count", None, "expert_used_count None: must"),
    ("gemma3", f"{WINDOW}_pattern", [True] * 6, "array('B', [1, 1, 1, 1, 1, ...]): must be"),
    ("gemma3", f"{WINDOW}_pattern", ["a"] * 7, "must be an integer from 0, or 7 booleans"),
    ("gemma3", f"{WINDOW}_pattern", True, "_pattern True: must be an integer from 0"),
    ("gemma3", WINDOW, 10**8, "sliding_window 100000000: must be an integer"),
    ("gemma3", "rope.scaling.type", "yarn", "type is 'yarn'; supported is 'linear' or 'none'"),
    ("gemma3", "rope.scaling.factor", 0.0, "rope.scaling.factor 0.0: must be above 0"),
    ("gemma3", "rope.freq_base_swa", float("nan"), "freq_base_swa nan: must be above 0"),
    ("gemma3", "final_logit_softcapping", 30.0, "softcapping is 30.0; supported is 0"),
    ("gemma3", "expert_count", 3, "gemma3.expert_count is 3; supported is 0"),
]


@pytest.mark.parametrize("kind, key, value, words", METADATA)
def test_metadata_that_this_model_cannot_have(made, tmp_path, kind, key, value, words):
    file = edited(made(kind)[1], tmp_path / "f.gguf", values={f"{kind}.{key}": value})
    message = refused(load_config, file)
    assert message.startswith(f"{file}: ") and words in message


def test_other_keys(made, tmp_path):
    _, file = made("qwen3")
    ends = "tokenizer.ggml.eos_token_id"
    for values, words in (
        ({"split.count": 3}, "split.count 3: must be 0, 1, or N for files named"),
        ({ends: 61}, f"{ends} [61]: must be an id below 61"),
        ({ends: None}, f"{ends} []: must be an id below 61"),
        ({"tokenizer.ggml.bos_token_id": 99}, "bos_token_id 99: must be an id below 61"),
    ):
        message = refused(load_config, edited(file, tmp_path / "f.gguf", values=values))
        assert words in message
    values = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eot_token_id": 3}
    config = load_config(edited(file, tmp_path / "f.gguf", values=values))
    assert (config.bos_token_id, config.eos_token_ids) == (60, (60, 3))
    words = "general.architecture is 'bert'; supported are gpt2, "
    assert words in refused(load_config, edited(file, tmp_path / "f.gguf", "bert"))


UP = "blk.1.ffn_up.weight"
STACKED = "blk.0.ffn_gate_exps.weight"
WIDTH = "qwen3moe.expert_feed_forward_length"


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("qwen3", {UP: None}, f"tensor {UP} is missing"),
        ("qwen3", {"blk.2.ffn_up.weight": np.zeros((24, 16))}, "unexpected tensor blk.2.ffn_up.w"),
        ("gpt2", {"blk.0.attn_q.bias": np.zeros(24)}, "unexpected tensor blk.0.attn_q.bias"),
        ("qwen3", {FACTORS: [1, 1, 1]}, f"unexpected tensor {FACTORS}"),
        ("qwen3", {"output_norm.weight": np.zeros(17)}, "has shape (17,); the metadata says (16,)"),
        ("qwen3", {UP: np.zeros((16, 24))}, f"tensor {UP} has shape (16, 24); the metadata says ("),
        ("qwen3moe", {STACKED: None}, f"tensor {STACKED} is missing"),
        ("qwen3moe", {STACKED: np.ones((60, 16))}, f"tensor {STACKED} has shape (60, 16); the"),
        ("qwen3moe", {"values": {WIDTH: 7}}, "metadata says (5, 7, 16)"),
        ("llama", {FACTORS: [1, 1]}, f"tensor {FACTORS} has shape (2,); the metadata says (3,)"),
        ("llama", {FACTORS: [1, 0, 1]}, f"tensor {FACTORS}: all numbers must be above 0"),
        ("llama", {FACTORS: [1, np.nan, 1]}, "all numbers must be above 0"),
        ("llama", {FACTORS: [1, np.inf, 1]}, "all numbers must be above 0"),
    ],
    ids=str,
)
def test_tensors_that_are_wrong(made, tmp_path, kind, changes, words):
    changes = changes if "values" in changes else {"tensors": changes}
    file = edited(made(kind)[1], tmp_path / "f.gguf", **changes)
    assert words in refused(load_model, file)


def test_a_file_that_becomes_shorter_while_it_is_read(made):
    _, file = made("gpt2")
    source = resolve_source(file)
    assert source.gguf.tensors
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(load_model, source) == f"{file}: truncated while it was read"
    file.unlink()
    assert refused(load_model, source) == f"{file}: No such file or directory"


def split_in(file, directory, count=3, **changes) -> list[Path]:
    """Write a file again in several parts. changes: keys of the last part, such as split_no."""
    directory.mkdir()
    names = list(resolve_source(file).gguf.tensors)
    parts = []
    for number in range(count):
        kept = {names[-number]} if number else {*names[: -(count - 1)]}
        values = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        if number == count - 1:
            values |= {key.replace("_", "."): value for key, value in changes.items()}
        to = directory / f"m-{number + 1:05}-of-{count:05}.gguf"
        parts.append(edited(file, to, values=values, tensors=dict.fromkeys({*names} - kept)))
    return parts


def test_a_model_in_several_files(made, tmp_path):
    model, file = made("qwen3")
    directory = tmp_path / "parts"
    parts = split_in(file, directory)
    assert [len(read_split(part).tensors) for part in parts][1:] == [1, 1]
    (directory / "mmproj-m.gguf").touch()
    assert all(same(load_model(name), model) for name in (*parts, directory))
    parts[1].unlink()
    assert refused(load_model, parts[0]) == f"{parts[1]}: No such file or directory"


@pytest.mark.parametrize(
    "changes, found",
    [({"split_no": 0}, (0, 3)), ({"split_count": 4}, (2, 4)), ({"split_no": None}, (None, 3))],
)
def test_parts_that_do_not_belong_together(made, tmp_path, changes, found):
    parts = split_in(made("qwen3")[1], tmp_path / "parts", **changes)
    words = f"split.no and split.count {found}: must be (2, 3)"
    assert refused(load_model, parts[0]) == f"{parts[2]}: {words}"


def test_parts_with_another_number_of_tensors(made, tmp_path):
    first, _ = split_in(made("qwen3")[1], tmp_path / "parts", count=2)
    values = {"split.no": 0, "split.count": 2, "split.tensors.count": 10**6}
    edited(first, tmp_path / "new.gguf", values=values).replace(first)
    assert "split.tensors.count is 1000000, but there are " in refused(load_model, first)


def test_a_tensor_of_a_type_that_is_not_read(made):
    _, file = made("qwen3", n_embd=32)
    data = bytearray(file.read_bytes())
    name = b"token_embd.weight"
    data[data.index(name) + len(name) + 4 + 2 * 8] = 39  # its type, after the dimensions
    file.write_bytes(data)
    assert "token_embd.weight has the type MXFP4; supported are F32" in refused(load_model, file)


def test_parts_with_one_tensor_twice(made, tmp_path):
    _, file = made("qwen3")
    first, second = split_in(file, tmp_path / "parts", count=2)
    name = next(iter(resolve_source(second).gguf.tensors.keys() - read_split(first).tensors.keys()))
    edited(file, first, values={"split.count": 2, "split.no": 0})
    words = f"duplicate tensor {name}, also in an earlier split"
    assert refused(load_model, first) == f"{second}: {words}"


def test_a_directory_with_a_file(made, tiny_llama, tmp_path):
    _, file = made("qwen3")
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(file, directory / "Model.GGUF")
    source = resolve_source(directory)
    assert (source.type, source.name) == ("gguf", str(directory / "Model.GGUF"))
    assert resolve_source(source.name).type == "gguf"
    load_model(directory)
    shutil.copy(file, directory / "b.gguf")
    words = "2 GGUF models; give the path of one: Model.GGUF, b.gguf"
    assert refused(resolve_source, directory) == f"{directory}: {words}"
    save_model(tiny_llama(dtype=torch.float32), directory)  # then it is in Hugging Face's form
    assert resolve_source(directory).type == "directory"
    (directory / "model.safetensors").unlink()
    words = "no model.safetensors in this directory; give the path of one of its GGUF files"
    assert refused(load_model, directory) == f"{directory}: {words}"


def test_a_name_without_a_file(cli, tmp_path):
    words = f"{tmp_path / 'm.gguf'}: No such file or directory"
    assert is_one_line(cli("--model", tmp_path / "m.gguf"), words)
    assert "a file that ends in .gguf, " in refused(resolve_source, "nothing")


@pytest.mark.parametrize("kind, blocks", [("gpt2", None), ("qwen3", None), ("llama", "Q4_1")])
def test_a_damaged_file_is_a_model_or_one_line(made, tmp_path, kind, blocks):
    _, file = made(
        kind, n_layer=1, **({"n_embd": 64, "n_inner": 96, "head_dim": 16} if blocks else {})
    )
    file = edited(file, tmp_path / "blocks.gguf", kind=blocks) if blocks else file
    head = min(tensor.offset for tensor in resolve_source(file).gguf.tensors.values())
    assert 5 < loadable(file, head, 110, seed=0) < 75
