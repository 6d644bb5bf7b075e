"""What a model's name means, where its files come from, and models written and read back."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, refused
from safetensors.torch import load_file, save_file

from errors import UserError
from llama import Llama
from loading import load
from loading.load import (
    HUB_NAMES,
    PRESETS,
    Source,
    load_config,
    load_model,
    resolve_source,
    save_model,
)
from model import GPT, GPTConfig

# Names


@pytest.mark.parametrize("name", [*HUB_NAMES, "Qwen/Qwen2.5-0.5B", "a/b", "o_1/x.y_z"])
def test_names_of_the_hub(name):
    assert resolve_source(name) == Source("hub", name) and resolve_source(name).label == name
    if name in HUB_NAMES:
        assert resolve_source(f"random:{name}") == Source("random", name)
        assert resolve_source(f"random:{name}").label == f"random:{name}"


def test_a_directory_comes_before_a_name_of_the_hub_and_has_one_label(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert resolve_source("gpt2") == Source("directory", "gpt2") == resolve_source(Path("gpt2"))
    assert resolve_source("gpt2").label == str(tmp_path.resolve() / "gpt2")
    stories = CHECKPOINTS / "stories"
    spelled = [stories, f"{stories}/", CHECKPOINTS / "stories-draft/../stories"]
    labels = {resolve_source(name).label for name in spelled}
    monkeypatch.chdir(stories)
    assert labels | {resolve_source(".").label} == {"checkpoints/stories"}
    monkeypatch.chdir(CHECKPOINTS.parent)
    assert resolve_source("checkpoints/stories").type == "directory"
    assert "unknown model 'checkpoints/storis'" in refused(resolve_source, "checkpoints/storis")


UNKNOWN = "gpt3 random:gpt3 random: random:checkpoints/stories random:random:gpt2 random:org/name"
UNKNOWN += r" no/such/directory org/ /name ./name org/../name örg/name org\name"


@pytest.mark.parametrize(
    "name", [*UNKNOWN.split(), "", "x" * 300, "a\0b", __file__, "org/na me", "org/name\n"]
)
def test_an_unknown_name_lists_the_valid_ones(name):
    message = refused(resolve_source, name)
    assert repr(name) in message
    assert "gpt2, gpt2-medium, gpt2-large, gpt2-xl" in message
    assert "random:" in message


class Hub:
    """A hub with these files of a model, in a directory. It notes what is asked of it."""

    def __init__(self, directory):
        self.directory = directory
        self.files = {"config.json", "model.safetensors"}
        self.commit = "c0ffee"
        self.asked = []

    def download(self, repository, file, revision):
        from huggingface_hub.errors import EntryNotFoundError

        self.asked.append((repository, file, revision))
        if file not in self.files:
            raise EntryNotFoundError(f"404: no {file}")
        path = self.directory / self.commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub

    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    monkeypatch.setattr(load, "REVISIONS", {})
    return made


@pytest.mark.parametrize(
    "name, repository", [("gpt2-large", "openai-community/gpt2-large"), ("org/name", "org/name")]
)
def test_a_file_of_the_hub_is_fetched_when_it_is_asked_for(hub, name, repository):
    source = resolve_source(name)
    assert hub.asked == []
    path = source.file("config.json")
    assert path.name == "config.json" and path.is_file()
    assert hub.asked == [(repository, "config.json", None)]
    assert source.weight_files() == [path.with_name("model.safetensors")]
    assert source.find("chat_template.jinja") is None
    message = refused(source.file, "tokenizer.json")
    assert message == f"{name}: no tokenizer.json on the Hugging Face hub"


def test_all_files_of_a_model_are_of_one_commit(hub):
    """Its author may replace them while we read."""
    resolve_source("org/name").file("config.json")
    hub.commit = "badc0de"
    resolve_source("org/name").weight_files()
    resolve_source("org/other").file("config.json")
    resolve_source("org/other").weight_files()
    assert [revision for *_, revision in hub.asked] == [None, "c0ffee", None, "badc0de"]


def test_shards_of_the_hub(hub, monkeypatch):
    hub.files = {"config.json", "model.safetensors.index.json", "a.safetensors"}
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}
    monkeypatch.setattr(load, "read_json", lambda file: index)
    weights = resolve_source("org/name").weight_files
    assert [file.name for file in weights()] == ["a.safetensors"]
    for missing, files in (("a", hub.files - {"a.safetensors"}), ("model", {"pytorch_model.bin"})):
        hub.files = files
        assert refused(weights) == f"org/name: no {missing}.safetensors on the Hugging Face hub"
    assert "pytorch_model.bin" not in [file for _, file, _ in hub.asked]


@pytest.fixture
def break_hub(monkeypatch):
    """A function that lets each download end with an error."""
    import huggingface_hub

    def fail(error):
        def download(*args, **options):
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    return fail


@pytest.mark.parametrize("text, reason", [("offline\nsecond line", "offline"), ("", "OSError")])
@pytest.mark.parametrize(
    "name, words", [("gpt2", "gpt2"), ("org/name", "org/name is not a local directory, and")]
)
def test_a_hub_that_does_not_answer_is_one_line(break_hub, text, reason, name, words):
    break_hub(OSError(text))
    for ask in (
        resolve_source(name).weight_files,
        lambda: resolve_source(name).find("chat_template.jinja"),
    ):
        assert refused(ask) == f"{words} could not be fetched from the Hugging Face hub: {reason}"


def test_without_a_network_a_file_known_to_be_none_is_none(break_hub, monkeypatch):
    """A model in the hub's cache is used offline: that it has no template was noted before."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    break_hub(LocalEntryNotFoundError("offline"))
    known = {"generation_config.json": huggingface_hub._CACHED_NO_EXIST, "tokenizer.json": None}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, file: known[file])
    source = resolve_source("org/name")
    assert source.find("generation_config.json") is None
    message = refused(source.find, "tokenizer.json")
    assert message.endswith("could not be fetched from the Hugging Face hub: offline")


def test_ctrl_c_during_a_download_is_no_error_of_the_hub(break_hub):
    break_hub(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_model("gpt2")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_a_file_names_it(tiny, tmp_path, monkeypatch, missing):
    save_model(tiny(), tmp_path)
    load_model(tmp_path)
    (tmp_path / missing).rename(tmp_path / "other")
    assert refused(load_model, tmp_path) == f"{tmp_path}: no {missing} in this directory"
    (tmp_path / missing).mkdir()
    assert refused(load_model, tmp_path) == f"{tmp_path}: no {missing} in this directory"
    for pickle in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        (tmp_path / pickle).touch()
        message = refused(load_model, tmp_path)
        assert message.startswith(f"{tmp_path}: no {missing} in this directory")
        told = "pickle" in message and "save_pretrained" in message
        assert told == (missing == "model.safetensors")  # else it is not what is wrong here
        (tmp_path / pickle).unlink()

    def denied(path):  # a directory of mode 644, say; whoever runs as root may look everywhere
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert refused(load_model, tmp_path) == f"{tmp_path}/config.json: Permission denied"


def write_index(directory, weight_map) -> Path:
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return file


def test_an_index_names_the_shards(tmp_path):
    names = ["x-2.safetensors", "x-1.safetensors"]
    write_index(tmp_path, {"a": names[0], "d": names[0], "b.c": names[1]})
    for name in names:
        (tmp_path / name).touch()
    weights = resolve_source(tmp_path).weight_files
    assert weights() == [tmp_path / name for name in names]
    (tmp_path / "x-1.safetensors").unlink()
    assert refused(weights) == f"{tmp_path}: no x-1.safetensors in this directory"
    (tmp_path / "model.safetensors").touch()  # a whole model comes first
    assert weights() == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    name = "x" * 300 + ".safetensors"
    write_index(tmp_path, {"a": name})
    assert refused(weights) == f"{tmp_path}/{name}: File name too long"


ELSEWHERE = ["../x.safetensors", "/x.safetensors", "x.safetensors/../../y", "x.bin"]
ELSEWHERE += ["../x.safetensors/y.safetensors", "d/y.safetensors", ".safetensors\n"]


@pytest.mark.parametrize("file", [*ELSEWHERE, 1, None, ["x.safetensors"]])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, file):
    for weight_map in ({"a": file}, {"a": "x.safetensors", "b": file}, [file], file):
        index = write_index(tmp_path, weight_map)
        words = "weight_map must name a .safetensors file beside it for each tensor"
        assert refused(resolve_source(tmp_path).weight_files) == f"{index}: {words}"


def test_presets_are_the_published_sizes():
    with torch.device("meta"):
        models = [GPT(PRESETS[name]) for name in HUB_NAMES]
        models.append(Llama(load_config("random:smollm2-135m")))
    # Parameters of the models on the hub, except mask buffers and the second copy of the head.
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    assert sizes == [124439808, 354823168, 774030080, 1557611200, 134515008]
    # Parameters do not tell how many heads there are: each is of 64 numbers.
    assert all(PRESETS[name].n_embd == 64 * PRESETS[name].n_head for name in HUB_NAMES)
    message = refused(resolve_source, "smollm2-135m")
    assert re.match("unknown model 'smollm2-135m'.* random:NAME.*smollm2-135m$", message)


def test_random_weights_have_the_shape_of_the_preset(monkeypatch):
    shape = {"vocab_size": 400, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}
    small = GPTConfig(**shape, eos_token_ids=(399,))
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


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@torch.inference_mode()
def test_loads_what_transformers_saved(tmp_path, prefix):
    """Files come with and without the prefix, with the head a second time, with mask buffers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 53, "n_positions": 20, "n_embd": 24, "n_layer": 2, "n_head": 3}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=5, eos_token_id=7)).eval()
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
    shape["block_size"] = shape.pop("n_positions")
    assert ours.config == GPTConfig(**shape, eos_token_ids=(7,))
    assert not ours.training
    tokens = torch.tensor(random_tokens(40, 53)).view(2, 20)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eos", [(60,), (60, 3)])
def test_save_and_load_give_the_same_model(tiny, tmp_path, eos):
    ours = tiny(dtype=torch.float16, eos_token_ids=eos, layer_norm_epsilon=1e-3)
    save_model(ours, tmp_path)
    again = load_model(tmp_path, dtype=torch.float16)
    assert again.config == ours.config
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] == 60 and config["eos_token_id"] in (60, [60, 3])
    written = load_file(tmp_path / "model.safetensors")
    assert written["wpe.weight"].dtype == torch.float16
    assert "wte.weight" in written and not any("lm_head" in name for name in written)
    assert again.lm_head.weight is again.wte.weight
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and b.dtype == torch.float16 and b.is_contiguous(), name
    assert load_model(tmp_path).dtype == torch.float32
    # The meta device is there without any hardware; one that is not is no lack of memory.
    parameters = load_model(tmp_path, device="meta").parameters()
    assert {weight.device.type for weight in parameters} == {"meta"}
    for name in (tmp_path, "random:gpt2"):
        with pytest.raises(RuntimeError, match="no-such-device"):
            load_model(name, device="no-such-device")


def test_a_model_can_be_written_where_it_was_read(tiny, tmp_path):
    """Loaded weights may lie in the file itself, mapped into memory: it must not change there."""
    save_model(tiny(dtype=torch.float32), tmp_path)
    model = load_model(tmp_path)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    save_model(tiny(seed=1, dtype=torch.float32), tmp_path)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
