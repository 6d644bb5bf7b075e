"""A model in a GGUF file is the model that it was made of."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line, load, random_tokens, refused, run, save_model
from gguf_files import edited, loadable, loaded
from ranks import ROUNDING, compared

from benchmarks.export_gguf import write_gguf
from loading import gguf_model
from loading.gguf import read_split
from loading.gguf_model import gguf_name
from loading.load import load_config, load_model, resolve_source
from native import use_native
from server.served import served_name
from text.tokenizer import load_encoding

KINDS = ["gpt2", "qwen2", "qwen3"]


@pytest.fixture
def made(tiny, tiny_llama, tmp_path):
    """A function that writes a random model of an architecture: the model, its file."""

    def make(kind, **shape):
        if kind == "gpt2":
            model = tiny(dtype=torch.float32, **shape)
        else:
            options = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}[kind]
            model = tiny_llama(dtype=torch.float32, **options | shape)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.data.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        file = tmp_path / f"{kind}.gguf"
        if kind == "qwen2":  # the export writes it as a Llama, whose queries have another order
            in_order = llama_without_its_order(model, file)
            return model, edited(in_order, tmp_path / "own.gguf", "qwen2")
        write_gguf(model, file, "float32")
        return model, file

    return make


def llama_without_its_order(model, file):
    """The export's file, with queries and keys in our order and no rotations."""
    write_gguf(model, file, "float32")
    ours = {gguf_name(model, key): weight.detach() for key, weight in model.named_parameters()}
    return edited(file, file.with_name("plain.gguf"), tensors=ours | {"rope_freqs.weight": None})


def same(ours, theirs) -> bool:
    """Whether two models have the same configuration and the same bits."""
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    return equal and ours.config == theirs.config


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_comes_back_bit_for_bit(made, kind):
    shapes = [{}, {"n_layer": 12, "eos_token_ids": (4, 9, 7)}]
    if kind != "gpt2":
        shapes += [{"tie_word_embeddings": True, "rope_theta": 500.0, "norm_eps": 1e-5}]
    for shape in shapes:
        model, file = made(kind, **shape)
        assert same(loaded(file), model), shape
        text = run(model, [random_tokens(9)], max_new_tokens=30)
        assert run(loaded(file), [random_tokens(9)], max_new_tokens=30) == text


@pytest.mark.parametrize("name", ["stories"])
def test_the_embedded_models_come_back(name, tmp_path):
    model = load_model(CHECKPOINTS / name)
    write_gguf(model, tmp_path / "m.gguf", "float32", CHECKPOINTS / name / "tokenizer.json")
    assert same(loaded(tmp_path / "m.gguf"), model)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_are_read_as_they_are(made, tmp_path, kind):
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    model, file = made("qwen3")
    file = edited(file, tmp_path / "half.gguf", kind=kind)
    found = loaded(file)
    for name, weight in model.named_parameters():
        rounded = weight.to(dtype).float() if weight.dim() > 1 else weight
        assert torch.equal(found.get_parameter(name), rounded)
    for name, weight in loaded(file, dtype).named_parameters():
        assert torch.equal(weight, model.get_parameter(name).to(dtype))


def test_blocks_of_rows_are_put_together(made, monkeypatch):
    model, file = made("qwen2")
    monkeypatch.setattr(gguf_model, "CHUNK_BYTES", 4 * 16 * 5)
    blocks = list(gguf_model.read_gguf_tensors(resolve_source(file).gguf, model))
    assert max(block.nbytes for _, _, block in blocks) <= 4 * 24 * 5
    assert same(loaded(file), model)


def test_straight_to_int8(made, tmp_path):
    model, file = made("qwen3")
    save_model(model, tmp_path / "directory")
    theirs = load(tmp_path / "directory", torch.int8).state_dict()
    ours = loaded(file, torch.int8).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("architecture", KINDS)
def test_in_c(made, compiled, tmp_path, architecture):
    model, file = made(architecture)
    save_model(model, tmp_path / "directory")
    ours, theirs = loaded(file), load(tmp_path / "directory", torch.float32)
    use_native(ours)
    use_native(theirs)
    prompts = [random_tokens(9), random_tokens(3)]
    assert run(ours, prompts, max_new_tokens=20) == run(theirs, prompts, max_new_tokens=20)


def test_ranks_read_what_is_theirs(made, compiled):
    _, file = made("qwen3", n_embd=32)
    loaded(file)
    found, _, heads = compared(2, file, torch.tensor([random_tokens(15)]), dtype=torch.int8)
    assert found <= ROUNDING[torch.int8] and heads == [1, 1]


def test_a_gpt_2_may_have_a_head_as_well(made, tmp_path):
    """Older files have a copy of the embedding, which may be of another type."""
    model, file = made("gpt2", n_embd=32)
    head = model.wte.weight.detach()
    copy = {"output.weight": head}
    assert same(loaded(edited(file, tmp_path / "f.gguf", tensors=copy)), model)
    q4_0 = gguf.quantize(head.numpy(), gguf.GGMLQuantizationType.Q4_0)
    blocks = {"output.weight": (q4_0, "Q4_0")}
    assert same(loaded(edited(file, tmp_path / "f.gguf", tensors=copy, blocks=blocks)), model)


def test_a_gpt_2_has_no_head_of_its_own(made, tmp_path):
    """It was passed over: another model than the file's."""
    model, file = made("gpt2", n_embd=32)
    head = model.wte.weight.detach()
    words = "output.weight differs from token_embd.weight; a GPT-2 has one"
    changed = head.clone()
    changed[60, 31] += 1e-3
    other = edited(file, tmp_path / "f.gguf", tensors={"output.weight": changed})
    assert words in refused(load_model, other)
    q8_0 = gguf.quantize(head.roll(1, 0).numpy(), gguf.GGMLQuantizationType.Q8_0)
    blocks = {"output.weight": (q8_0, "Q8_0")}
    other = edited(file, tmp_path / "f.gguf", tensors={"output.weight": head}, blocks=blocks)
    assert words in refused(load_model, other)


# Text, and names.


@pytest.fixture
def stories_file(tmp_path):
    """The embedded model's file, without tokens, in a directory with its tokenizer."""
    model = load_model(CHECKPOINTS / "stories")
    write_gguf(model, tmp_path / "Stories.v1.gguf", "float32")
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", tmp_path)
    return tmp_path / "Stories.v1.gguf"


def test_a_tokenizer_beside_it_is_its_own(cli, stories_file):
    options = ["--prompt", "One day", "--temperature", 0, "--max-new-tokens", 20]
    code, out, err = cli("--model", stories_file, *options)
    assert (code, out) == cli("--model", CHECKPOINTS / "stories", *options)[:2], err


def test_a_file_for_token_ids_has_numbers(cli, stories_file):
    stories_file.with_name("tokenizer.json").unlink()
    options = ["--prompt", "a 300 301", "--temperature", 0, "--max-new-tokens", 3]
    code, out, err = cli("--model", stories_file, *options)
    assert code == 0 and out.startswith("a 300 301"), err
    assert load_encoding(stories_file, 4096).encode("a 300 301") == [97, 300, 301]


def test_chat_templates_are_beside_it_too(cli, stories_file):
    words = ["not a chat model", str(stories_file)]
    assert is_one_line(cli("--model", stories_file, "--chat", "--prompt", "a"), *words)
    stories_file.with_name("chat_template.jinja").write_text("{{ messages[0].content }}")
    assert cli("--model", stories_file, "--chat", "--prompt", "One day")[0] == 0


def test_what_a_model_in_a_file_is_called(tmp_path):
    source = resolve_source(tmp_path / "Stories.v1.gguf")
    assert (source.type, source.label) == ("gguf", str(tmp_path / "Stories.v1.gguf"))
    assert served_name(source) == "Stories.v1"
    assert resolve_source(ROOT / "a.gguf").label == "a.gguf"
    assert source.weight_files() == [tmp_path / "Stories.v1.gguf"]


# Files that are wrong.


WRONG = {  # what is different -> what is said
    "context_length": (None, "qwen3.context_length None: must be an integer from 1 to"),
    "block_count": (10**6, "qwen3.block_count 1000000: must be an integer from 1 to 1000"),
    "embedding_length": ("16", "qwen3.embedding_length '16': must be an integer"),
    "feed_forward_length": ([24, 24], "qwen3.feed_forward_length array"),
    "attention.head_count": (0, "qwen3.attention.head_count 0: must be an integer"),
    "attention.head_count_kv": (3, "head_count 4: must be a multiple of "),
    "attention.key_length": (7, "key_length 7: must be even"),
    "attention.value_length": (8, "qwen3.attention.value_length is 8; supported is 6"),
    "attention.layer_norm_rms_epsilon": (None, "epsilon None: must be above 0"),
    "rope.freq_base": (-1.0, "qwen3.rope.freq_base -1.0: must be above 0"),
    "rope.dimension_count": (4, "qwen3.rope.dimension_count is 4; supported is 6"),
    "rope.scaling.type": ("yarn", "qwen3.rope.scaling.type is 'yarn'; supported is 'none'"),
    "rope.scaling.factor": (4.0, "qwen3.rope.scaling.factor is 4.0; supported is 1"),
    "rope.scale_linear": (4.0, "qwen3.rope.scale_linear is 4.0; supported is 1"),
    "expert_count": (8, "qwen3.expert_count is 8; supported is 0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_config_that_this_model_cannot_be(made, tmp_path, key):
    value, words = WRONG[key]
    _, file = made("qwen3")
    loaded(file)
    file = edited(file, tmp_path / "f.gguf", values={f"qwen3.{key}": value})
    message = refused(load_config, file)
    assert message.startswith(f"{file}: ") and words in message


def test_other_keys_that_are_wrong(made, tmp_path):
    _, file = made("qwen3")
    loaded(file)
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


@pytest.mark.parametrize("key, value", [("feed_forward_length", 63), ("head_count_kv", 1)])
def test_no_gpt_2(made, tmp_path, key, value):
    _, file = made("gpt2")
    loaded(file)
    key = f"gpt2.{'attention.' if 'head' in key else ''}{key}"
    message = refused(load_config, edited(file, tmp_path / "f.gguf", values={key: value}))
    assert "must be (2, 8.0, 64) in a GPT-2" in message


TENSORS = {
    "tensor blk.1.ffn_up.weight is missing": {"blk.1.ffn_up.weight": None},
    "tensor token_embd.weight is missing": {"token_embd.weight": None},
    "unexpected tensor blk.2.ffn_up.weight": {"blk.2.ffn_up.weight": np.zeros((24, 16))},
    "unexpected tensor blk.0.attn_q.bias": {"blk.0.attn_q.bias": np.zeros(24)},
    "tensor output_norm.weight has shape (17,); the metadata says (16,)": {
        "output_norm.weight": np.zeros(17)
    },
    "tensor blk.0.ffn_up.weight has shape (16, 24); the metadata says (24, 16)": {
        "blk.0.ffn_up.weight": np.zeros((16, 24))
    },
}


@pytest.mark.parametrize("words", TENSORS)
def test_tensors_that_are_wrong(made, tmp_path, words):
    _, file = made("gpt2" if "bias" in words else "qwen3")
    loaded(file)
    file = edited(file, tmp_path / "f.gguf", tensors=TENSORS[words])
    assert words in refused(load_model, file)


def test_types_that_are_not_read(made):
    _, file = made("qwen3", n_embd=32)
    loaded(file)
    data = bytearray(file.read_bytes())
    name = b"token_embd.weight"
    data[data.index(name) + len(name) + 4 + 2 * 8] = 39  # behind its dimensions
    file.write_bytes(data)
    assert "tensor token_embd.weight has the type MXFP4; supported are F32, F16" in refused(
        load_model, file
    )


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
        others = dict.fromkeys({*names} - kept)
        values = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        if number == count - 1:
            values |= {key.replace("_", "."): value for key, value in changes.items()}
        to = directory / f"m-{number + 1:05}-of-{count:05}.gguf"
        parts.append(edited(file, to, values=values, tensors=others))
    return parts


def test_a_model_in_several_files(made, tmp_path):
    """Any part names it; so does a directory that holds nothing else."""
    model, file = made("qwen3")
    directory = tmp_path / "parts"
    parts = split_in(file, directory)
    assert [len(read_split(part).tensors) for part in parts][1:] == [1, 1]
    (directory / "mmproj-m.gguf").touch()
    for name in (*parts, directory):
        ours = loaded(name)
        for key, weight in model.named_parameters():
            assert torch.equal(ours.get_parameter(key), weight)
    parts[1].unlink()
    assert refused(load_model, parts[0]) == f"{parts[1]}: No such file or directory"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"split_no": 0}, "split.no and split.count (0, 3): must be (2, 3)"),
        ({"split_count": 4}, "split.no and split.count (2, 4): must be (2, 3)"),
        ({"split_no": None}, "split.no and split.count (None, 3): must be (2, 3)"),
    ],
)
def test_parts_that_do_not_belong_together(made, tmp_path, changes, words):
    _, file = made("qwen3")
    parts = split_in(file, tmp_path / "parts", **changes)
    assert refused(load_model, parts[0]) == f"{parts[2]}: {words}"


def test_parts_with_one_tensor_twice(made, tmp_path):
    _, file = made("qwen3")
    first, second = split_in(file, tmp_path / "parts", count=2)
    name = next(iter(resolve_source(second).gguf.tensors.keys() - read_split(first).tensors.keys()))
    edited(file, first, values={"split.count": 2, "split.no": 0})
    assert (
        refused(load_model, first) == f"{second}: duplicate tensor {name}, also in an earlier split"
    )


def test_a_directory_with_a_file(made, tiny_llama, tmp_path):
    _, file = made("qwen3")
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(file, directory / "Model.GGUF")
    source = resolve_source(directory)
    assert (source.type, source.name) == ("gguf", str(directory / "Model.GGUF"))
    assert resolve_source(source.name).type == "gguf"
    loaded(directory)
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


def test_a_damaged_file_is_a_model_or_one_line(made):
    for architecture in ("gpt2", "qwen3"):
        _, file = made(architecture, n_layer=1)
        head = min(tensor.offset for tensor in resolve_source(file).gguf.tensors.values())
        assert 5 < loadable(file, head, 125, seed=0) < 75
