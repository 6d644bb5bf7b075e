"""Lesson 121: Gemma 3 computes what transformers does, in the modes of the lessons before too."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import (
    check_command_line,
    check_modes,
    difference,
    edit_json,
    exact_gemma_norm,
    load,
    random_tokens,
)
from engines import check_own_runs
from ranks import ROUNDING, check_two_ranks, compared, save_uneven
from safetensors.torch import load_file, save_file
from test_llama_config import SMALL

import errors
from errors import UserError
from loading.config import read_gemma_config
from loading.load import load_config, save_model

LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}


def test_the_command_line_writes_what_transformers_does(cli, tmp_path):
    shape = {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 6}
    check_command_line(cli, tmp_path, "Gemma3", 30, **shape)


@pytest.mark.parametrize("seed", range(15))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    keys = choose([1, 2, 3])
    n_layer = choose([1, 3, 7])
    full = choose([LINEAR, {"rope_type": "default", "rope_theta": 1e6}])
    local = {"rope_type": "default", "rope_theta": choose([10.0, 10000.0])}
    shape = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    heads = keys * choose([1, 2, 3])
    if choose([False, True]):
        types = ["full_attention", "sliding_attention"]
        shape["layer_types"] = [choose(types) for _ in range(n_layer)]
    theirs, directory = peer(
        "Gemma3",
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=choose([2, 6, 16, 20]),
        hidden_size=heads * choose([2, 4, 10]),
        num_hidden_layers=n_layer,
        max_position_embeddings=40,
        sliding_window=choose([1, 4, 8, 100]),
        query_pre_attn_scalar=choose([1, 16, 256]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        **shape,
    )
    ours = load(directory)
    assert ours.config.rope_linear_factor == full.get("factor", 1)
    assert difference(ours, theirs) < 1e-9
    if n_layer < 7:  # deeper random weights magnify float32's rounding
        assert difference(load(directory, torch.float32), theirs.float()) < 1e-4


def test_batches_shifts_speculation_and_beams_equal_a_full_pass(tiny_gemma):
    model = tiny_gemma()
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(model, tiny_gemma(seed=1), prompts, 60)


@torch.inference_mode()
def test_bfloat16_rounds_where_transformers_does(tiny_gemma, tmp_path):
    """Norms round once, after the product with their weights, and the root of the width does."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    model = tiny_gemma(dtype=torch.bfloat16, n_embd=48)
    assert model.embedding_scale == 6.9375  # not 6.928
    tokens = torch.arange(61)
    assert torch.equal(model.embed(tokens), model.embed_tokens.weight * model.embedding_scale)
    theirs = Gemma3RMSNorm(48, 1e-6).bfloat16()
    theirs.weight.data = model.norm.weight.data
    x = 10 * torch.randn(500, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    different = (model.norm(x) != theirs(x)).float().mean()
    assert different < 1e-3  # torch's rms_norm may round the mean's last bit otherwise


def test_the_engine_writes_the_text_of_each_own_run(tiny_gemma):
    model = tiny_gemma()
    check_own_runs(model, (3, 1, 38, 60, 9, 2), 50)


# On several processes.


@pytest.mark.parametrize("size, kind", [(2, torch.int8), (4, torch.float32)], ids=str)
def test_ranks_have_the_logits_of_one_process(tiny_gemma, compiled, tmp_path, kind, size):
    name = save_uneven(tiny_gemma, tmp_path, "tiny_llama", sliding_windows=(5, None))
    assert compared(size, name, torch.tensor([random_tokens(23)]), dtype=kind)[0] <= ROUNDING[kind]


def test_two_ranks_write_the_texts_of_one(tiny_gemma, engine_cli, tmp_path):
    def build(**shape):
        return tiny_gemma(sliding_windows=(5, None), **shape)

    check_two_ranks(build, engine_cli, tmp_path, 30)


# Its files.


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": False},
        {"sliding_windows": (None, None)},
        {"rope_linear_factor": 1.0, "sliding_windows": (5, 5)},
    ],
    ids=str,
)
def test_save_and_load_give_the_same_model(tiny_gemma, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    if "sliding_windows" not in shape:
        shape = shape | {"sliding_windows": (5, 5, None)}
    ours = tiny_gemma(dtype=torch.float32, **shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Gemma3ForCausalLM"
    assert difference(ours, theirs) < 2e-4
    again = load(tmp_path).config
    assert [*again.sliding_windows] == [*ours.config.sliding_windows] or not any(
        ours.config.sliding_windows
    )
    assert {**vars(again), "sliding_windows": ()} == {**vars(ours.config), "sliding_windows": ()}


def read(**values):
    fields = {key: value for key, value in (GEMMA | values).items() if value != "missing"}
    return read_gemma_config(Path("config.json"), fields)


GEMMA = SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 7}


def test_what_a_config_lacks_is_as_in_transformers():
    import transformers

    kept = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads")
    kept += ("hidden_size", "intermediate_size")
    theirs = transformers.Gemma3TextConfig(**{key: GEMMA[key] for key in kept})
    ours = read(**dict.fromkeys(GEMMA.keys() - {*kept, "model_type"}, "missing"))
    assert ours.head_dim == theirs.head_dim == 256
    assert ours.n_kv_head == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings is True
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    sliding_windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert ours.sliding_windows == tuple(sliding_windows[kind] for kind in theirs.layer_types)
    assert ours.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert ours.rope_local_base_freq == theirs.rope_parameters["sliding_attention"]["rope_theta"]


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
def test_rotations_in_older_and_newer_files(values, expected):
    config = read(**values)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_linear_factor) == expected


@pytest.mark.parametrize(
    "values, sliding_windows",
    [
        ({"sliding_window": 8}, (8, 8, 8, 8, 8, None, 8)),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, (8, None) * 3 + (8,)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 7}, ()),
    ],
)
def test_windows_of_a_config(values, sliding_windows):
    assert read(**values).sliding_windows == sliding_windows


@pytest.mark.parametrize(
    "values, words",
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported is None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported is None"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported is 'gelu_pyt"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0: must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor None: must be above 0"),
        ({"rope_local_base_freq": 0}, "rope_theta 0: must be above 0"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention: rope_type is"),
        ({"rope_parameters": {"full_attention": 7}}, "full_attention 7: must be an object"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear': must be an object"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern 0: must be an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types of length 1: must have length 7"),
        ({"head_dim": 5}, "head_dim 5: must be even"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert str(error.value).startswith("config.json: ") and words in str(error.value)


def test_a_model_of_pictures_and_texts_needs_a_part_for_texts(tiny_gemma, tmp_path):
    save_model(tiny_gemma(sliding_windows=(5, None)), tmp_path)
    edit_json(tmp_path / "config.json", {"model_type": "gemma3"})
    with pytest.raises(UserError, match="text_config None: must be an object"):
        load(tmp_path)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A random model of pictures and texts of transformers, in float64, and where it is saved."""
    import transformers
    from transformers.models.gemma3 import modeling_gemma3

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", exact_gemma_norm)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    text |= {"max_position_embeddings": 24, "sliding_window": 5}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 14}
    vision |= {"num_attention_heads": 2, "patch_size": 14}
    parts = {"text_config": text, "vision_config": vision}
    config = transformers.Gemma3Config(**parts, mm_tokens_per_image=1, eos_token_id=[1, 7])
    model = transformers.Gemma3ForConditionalGeneration(config).double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(std=0.4, generator=generator)
    model.save_pretrained(tmp_path)
    return model.eval(), tmp_path


FORMS = {  # the beginning of names in a file, and of the head's: of transformers 5, 4, and before
    "newest": ("model.language_model.", "lm_head."),
    "published": ("language_model.model.", "language_model.lm_head."),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_head", [False, True])
@torch.inference_mode()
def test_the_texts_of_a_model_of_pictures(pictures, form, has_head, capsys):
    """As Gemma 3 4b and larger are published: a nested config, and names with a prefix."""
    theirs, directory = pictures
    errors.warn_once.cache_clear()
    stored = {}
    beginning, head = FORMS[form]
    for name, weight in load_file(directory / "model.safetensors").items():
        name = re.sub(r"^(model\.language_model|language_model\.model)\.", beginning, name)
        if form == "published":
            name = re.sub(r"^model\.(vision_tower|multi_modal)", r"\1", name)
        stored[name] = weight
    if has_head:
        stored[f"{head}weight"] = torch.randn(61, 16, dtype=torch.float64)
        theirs.lm_head.weight = torch.nn.Parameter(stored[f"{head}weight"])
    save_file(stored, directory / "model.safetensors")
    ours = load(directory)
    tokens = torch.arange(1, 21)[None]
    expected = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert (ours(tokens) - expected).abs().max() < 1e-9
    assert ours.config.eos_token_ids == (1, 7)
    assert ours.config.tie_word_embeddings == (not has_head)
    said = capsys.readouterr().err
    assert "tensors of multi_modal_projector and vision_tower are ignored" in said
    assert ("lm_head.weight differs from the embedding, though" in said) == has_head


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
    assert [size for size in ours.sliding_windows if size] == [1024] * 29 and len(
        ours.sliding_windows
    ) == 34
    assert (ours.rope_theta, ours.rope_local_base_freq, ours.rope_linear_factor) == (1e6, 1e4, 8.0)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((1, 106), 2)
