"""What a model's name means, where its files come from, and models written and read back."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from safetensors.torch import load_file, save_file

from errors import UserError
from load import (
    HUB_NAMES,
    PRESETS,
    Source,
    load_config,
    load_model,
    parse_name,
    save_model,
)
from model import GPT, GPTConfig


def refused(function, *args) -> str:
    with pytest.raises(UserError) as error:
        function(*args)
    message = str(error.value)
    assert message and "\n" not in message
    return message


# Names


@pytest.mark.parametrize("name", HUB_NAMES)
def test_names_of_the_hub(name):
    assert parse_name(name) == Source("hub", name)
    assert parse_name(name).label == name
    assert parse_name(f"random:{name}") == Source("random", name)
    assert parse_name(f"random:{name}").label == f"random:{name}"


def test_every_size_of_gpt2_has_a_shape():
    assert tuple(PRESETS)[:4] == HUB_NAMES


def test_a_directory_comes_before_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert parse_name("gpt2") == Source("directory", "gpt2") == parse_name(Path("gpt2"))


def test_a_source_stays_what_it_is(tmp_path, monkeypatch):
    """So a name is parsed once in a run, even if what it means changes meanwhile."""
    source = parse_name("gpt2")
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert parse_name(source) is source
    source = parse_name("random:gpt2")
    assert load_config(source) == PRESETS["gpt2"]


@pytest.mark.parametrize(
    "name",
    [
        "gpt3",
        "random:gpt3",
        "random:",
        "random:checkpoints/stories",
        "no/such/directory",
        "random:random:gpt2",
        "",
        "x" * 300,
        "a\0b",
        __file__,
    ],
)
def test_an_unknown_name_lists_the_valid_ones(name):
    message = refused(parse_name, name)
    assert repr(name) in message
    assert "gpt2, gpt2-medium, gpt2-large, gpt2-xl" in message
    assert "random:" in message


def test_a_directory_has_one_label_however_it_is_spelled(tmp_path, monkeypatch):
    spelled = [
        CHECKPOINTS / "stories",
        f"{CHECKPOINTS}/stories/",
        CHECKPOINTS / "stories-draft/../stories",
    ]
    labels = {parse_name(name).label for name in spelled}
    monkeypatch.chdir(CHECKPOINTS / "stories")
    assert labels | {parse_name(".").label} == {"checkpoints/stories"}
    for name in ("a/stories", "b/stories"):
        (tmp_path / name).mkdir(parents=True)
        assert parse_name(tmp_path / name).label == str(tmp_path.resolve() / name)


# Where files come from


def test_the_hub_gives_two_files_and_no_pickle(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository, file):
        asked.append((repository, file))
        (tmp_path / file).touch()
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    source = parse_name("gpt2-large")
    assert asked == []
    assert source.directory == source.directory == tmp_path
    repository = "openai-community/gpt2-large"
    assert asked == [(repository, "config.json"), (repository, "model.safetensors")]


@pytest.mark.parametrize("text, reason", [("offline\nsecond line", "offline"), ("", "OSError")])
def test_a_hub_that_does_not_answer_is_one_line(monkeypatch, text, reason):
    import huggingface_hub

    def no_network(*args):
        raise OSError(text)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    message = refused(load_model, "gpt2")
    assert message == f"gpt2 could not be fetched from the Hugging Face hub: {reason}"


def test_ctrl_c_during_a_download_is_no_error_of_the_hub(monkeypatch):
    import huggingface_hub

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model("gpt2")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_a_file_names_it(tiny, tmp_path, missing):
    save_model(tiny(), tmp_path)
    load_model(tmp_path)
    (tmp_path / missing).unlink()
    assert refused(load_model, tmp_path) == f"{tmp_path}: no {missing} in this directory"
    (tmp_path / missing).mkdir()
    if missing == "config.json":
        (tmp_path / "pytorch_model.bin").touch()  # not what is wrong here
    assert refused(load_model, tmp_path) == f"{tmp_path}: no {missing} in this directory"


def test_a_directory_that_one_may_not_look_into_is_one_line(tmp_path, monkeypatch):
    """One of mode 644, say. (Whoever runs as root may look everywhere.)"""

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert refused(load_model, tmp_path) == f"{tmp_path}/config.json: Permission denied"


def test_a_pickle_is_refused_and_the_way_to_convert_it_told(tiny, tmp_path):
    save_model(tiny(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refused(load_model, tmp_path)
    assert "no model.safetensors" in message
    assert "pickle" in message and "save_pretrained" in message


# Models


def test_presets_are_the_published_sizes():
    with torch.device("meta"):
        models = [GPT(PRESETS[name]) for name in HUB_NAMES]
    # Parameters of the models on the hub, but for mask buffers and the second copy of the head.
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    assert sizes == [124439808, 354823168, 774030080, 1557611200]


def test_random_weights_have_the_shape_of_the_preset(monkeypatch):
    small = GPTConfig(
        vocab_size=400, block_size=8, n_layer=2, n_head=2, n_embd=16, eos_token_ids=(399,)
    )
    monkeypatch.setitem(PRESETS, "gpt2-xl", small)
    model = load_model("random:gpt2-xl", dtype=torch.bfloat16)
    assert model.config == small
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    assert not model.training
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.lm_head.weight is model.wte.weight
    again = load_model("random:gpt2-xl", dtype=torch.bfloat16)
    assert torch.equal(model.h[1].mlp.c_fc.weight, again.h[1].mlp.c_fc.weight)


def test_memory_that_does_not_suffice_is_one_line(monkeypatch):
    huge = GPTConfig(vocab_size=2**40, block_size=1, n_layer=1, n_head=1, n_embd=1)
    monkeypatch.setitem(PRESETS, "gpt2-xl", huge)
    words = r"^random:gpt2-xl: 2,199,023,255,[0-9]{3} bytes of weights do not fit in memory$"
    with pytest.raises(UserError, match=words):
        load_model("random:gpt2-xl", dtype=torch.float16)


def test_a_model_is_on_the_device_that_is_named(tiny, tmp_path):
    """The meta device is there without any hardware."""
    save_model(tiny(), tmp_path)
    model = load_model(tmp_path, device="meta")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["random:gpt2", "directory"])
def test_a_device_that_is_not_there_is_not_a_lack_of_memory(tiny, tmp_path, name):
    save_model(tiny(), tmp_path)
    with pytest.raises(RuntimeError, match="no-such-device"):
        load_model(tmp_path if name == "directory" else name, device="no-such-device")


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@torch.inference_mode()
def test_loads_what_transformers_saved(tmp_path, prefix):
    """Files come with and without the prefix, with the head a second time, with mask buffers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=53,
        n_positions=20,
        n_embd=24,
        n_layer=2,
        n_head=3,
        bos_token_id=5,
        eos_token_id=7,
    )
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
    ours = load_model(tmp_path)
    assert ours.config == GPTConfig(
        vocab_size=53, block_size=20, n_embd=24, n_layer=2, n_head=3, eos_token_ids=(7,)
    )
    assert not ours.training
    tokens = torch.tensor(random_tokens(40, 53)).view(2, 20)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eos", [(60,), (60, 3)])
def test_save_and_load_give_the_same_model(tiny, tmp_path, eos):
    ours = tiny(dtype=torch.float16, eos_token_ids=eos, layer_norm_epsilon=1e-3)
    save_model(ours, tmp_path)
    again = load_model(tmp_path, dtype=torch.float16)
    assert again.config == ours.config
    assert load_file(tmp_path / "model.safetensors")["wpe.weight"].dtype == torch.float16
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert b.dtype == torch.float16 and b.is_contiguous(), name
    assert load_model(tmp_path).dtype == torch.float32


def test_the_tied_head_is_written_once_and_read_as_one_parameter(tiny, tmp_path):
    save_model(tiny(), tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "wte.weight" in names
    assert not any("lm_head" in name for name in names)
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.wte.weight


def test_a_model_can_be_written_where_it_was_read(tiny, tmp_path):
    """Loaded weights may lie in the file itself, mapped into memory: it must not change there."""
    save_model(tiny(dtype=torch.float32), tmp_path)
    model = load_model(tmp_path)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    save_model(tiny(seed=1, dtype=torch.float32), tmp_path)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])


def test_the_configuration_is_read_once(tiny, tmp_path, monkeypatch):
    save_model(tiny(), tmp_path)
    read_text = Path.read_text
    read = []

    def watched(file, *args):
        read.append(file.name)
        return read_text(file, *args)

    monkeypatch.setattr(Path, "read_text", watched)
    load_model(tmp_path)
    assert read.count("config.json") == 1


# Configurations


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A function that gives the configuration in a config.json with other values in it."""
    directory = tmp_path_factory.mktemp("model")
    save_model(tiny(), directory)
    good = json.loads((directory / "config.json").read_text())

    def changed(values: dict) -> GPTConfig:
        (directory / "config.json").write_text(json.dumps(good | values))
        return load_config(directory)

    return changed


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("model_type", "bert", "is 'bert'; supported is 'gpt2'"),
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
def test_a_config_that_this_model_cannot_be_is_refused(saved, key, value, words):
    message = refused(saved, {key: value})
    assert words in message
    assert key in message and "config.json" in message
    assert len(message) < 300


def test_several_tokens_may_end_a_text_and_keep_their_order(saved, tmp_path, tiny):
    """Their order counts: an empty prompt starts from the first."""
    config = saved({"eos_token_id": [60, 7, 60, 9]})
    assert config.eos_token_ids == (60, 7, 9)
    save_model(tiny(eos_token_ids=(60, 7, 9)), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (60, [60, 7, 9])


def test_what_a_config_lacks_is_as_in_gpt2(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").touch()
    assert load_config(tmp_path) == GPTConfig() == PRESETS["gpt2"]
