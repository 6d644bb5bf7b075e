"""Lesson 119: layers that see only the last positions, as those of Mistral and some of Qwen."""

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import (
    check_command_line,
    check_modes,
    difference,
    edit_json,
    load,
    random_tokens,
    run_rows,
    their_rows,
)
from engines import check_own_runs
from gguf_files import edited
from natives import to_int8
from ranks import ROUNDING, check_two_ranks, compared, save_uneven
from test_llama_config import SMALL
from test_mixture_of_experts import EXPERTS

from errors import UserError
from loading.load import save_model

KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)


def test_the_command_line_writes_what_transformers_does(cli, tmp_path):
    check_command_line(cli, tmp_path, "Mistral", 30, sliding_window=5)


@pytest.mark.parametrize("seed", range(24))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    kind = ["Mistral", "Qwen2", "Qwen3"][seed % 3]
    n_layer = choose([1, 3, 4])
    shape = {"num_hidden_layers": n_layer, "sliding_window": choose([1, 2, 7, 24, 100])}
    if kind != "Mistral":
        shape["use_sliding_window"] = True
        shape["max_window_layers"] = choose([0, 1, 2])
        if choose([False, True]):
            types = ["full_attention", "sliding_attention"]
            shape["layer_types"] = [choose(types) for _ in range(n_layer)]
    theirs, directory = peer(kind, **shape)
    ours = load(directory)
    assert difference(ours, theirs) < 1e-9
    assert difference(load(directory, torch.float32), theirs.float()) < 1e-4


@pytest.mark.parametrize("size", [1, 7, 24])
def test_a_mixture_of_experts_has_one_in_all_layers(peer, tmp_path, size):
    theirs, directory = peer("Qwen3Moe", use_sliding_window=True, sliding_window=size, **EXPERTS)
    ours = load(directory)
    assert ours.config.sliding_windows == (size, size)
    assert difference(ours, theirs) < 1e-9
    save_model(ours, tmp_path / "copy")
    copy = load(tmp_path / "copy")
    assert copy.config == ours.config
    assert difference(copy, theirs) < 1e-9


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3"])
def test_greedy_text_equals_transformers(peer, kind):
    shape = {"use_sliding_window": True, "max_window_layers": 1} if kind == "Qwen3" else {}
    shape |= {"max_position_embeddings": 64, "sliding_window": 6}
    theirs, directory = peer(kind, **shape)
    ours = run_rows(load(directory), [[1, 5, 9]], max_new_tokens=61, ignore_eos=True)
    assert ours == their_rows(theirs, [[1, 5, 9]], 61)


@torch.inference_mode()
def test_each_layer_reaches_its_window_further(tiny_windows):
    """Two layers of windows 3 and 4 see 1 + 2 + 3 positions, and nothing of what was before."""
    model = tiny_windows(sliding_windows=(3, 4))
    text = torch.tensor([random_tokens(30)])
    last = model(text)[0, -1]
    changes = []
    for position in range(30):
        other = text.clone()
        other[0, position] = (other[0, position] + 1) % 61
        changes.append((model(other)[0, -1] - last).abs().max().item() > 1e-12)
    assert changes == [False] * 24 + [True] * 6


@pytest.mark.parametrize("dtype", ["float64", "int8"])
@pytest.mark.parametrize("sliding_windows", [(3, None, 8), (5, 5)])
def test_modes_of_the_lessons_before(tiny_windows, dtype, sliding_windows):
    """Ragged rows, the hop, speculation and beams give the text that a pass over all gives."""
    model = tiny_windows(sliding_windows=sliding_windows)
    model = model if dtype == "float64" else to_int8(model)
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(model, tiny_windows(seed=1, sliding_windows=sliding_windows), prompts, 60)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_engine_writes_the_text_of_each_own_run(tiny_windows, page_size):
    model = tiny_windows()
    pages = {"page_size": page_size, "num_pages": 100 // page_size}
    check_own_runs(model, (3, 1, 38, 60, 9, 2, 20), 50, **pages)


@torch.inference_mode()
def test_a_step_reads_no_more_than_the_window(tiny_windows, attended):
    """A row alone reads its keys, several read from the first that one sees, the engine pages."""
    from cache import KVCache, Span
    from engine.cache import PagedCache

    model = tiny_windows()
    cache = KVCache(model, 2)
    read = []
    for rows, new in (([0, 1], 30), ([0, 1], 1), ([1], 4), ([0, 1], 1)):
        attended.clear()
        spans = cache.spans([random_tokens(new)] * len(rows), rows)
        model.runner.logits(model, cache, spans, [1] * len(rows))
        cache.commit()
        read.append([k.shape[2] for _, k, _ in attended])
    # The last step computes positions 31 and 35.
    assert read == [[30, 30, 30], [3, 31, 8], [6, 35, 11], [7, 36, 12]]
    paged = PagedCache(model, 10, page_size=4)
    attended.clear()
    tables = [list(range(10)), list(range(10))]
    spans = [Span(tables[0], 37, [1]), Span(tables[1], 30, [1])]
    model.runner.logits(model, paged, spans, [1, 1])
    assert sorted(k.shape[2] for _, k, _ in attended) == [8, 12, 40]  # whole pages


# On several processes.


@KINDS
def test_ranks_have_the_logits_of_one_process(tiny_windows, compiled, tmp_path, kind):
    def build(**shape):
        return tiny_windows(sliding_windows=(5, 5), **shape)

    name = save_uneven(build, tmp_path, "tiny_llama")
    tokens = torch.tensor([random_tokens(40)])
    assert compared(2, name, tokens, dtype=kind)[0] <= ROUNDING[kind]


def test_two_ranks_write_the_texts_of_one(tiny_windows, engine_cli, tmp_path):
    def build(**shape):
        return tiny_windows(sliding_windows=(5, 5), **shape)

    check_two_ranks(build, engine_cli, tmp_path, 30)


# Its files.


@pytest.mark.parametrize(
    "name, shape",
    [
        ("Mistral", {"sliding_windows": (5, 5)}),
        ("Mistral", {"sliding_windows": (5, 5), "n_embd": 18}),
        ("Qwen2", {"sliding_windows": (5, None, 5), "qkv_bias": True}),
        ("Qwen3", {"sliding_windows": (None, 5), "qk_norm": True}),
    ],
)
def test_save_and_load_give_the_same_model(tiny_windows, tmp_path, name, shape):
    from transformers import AutoModelForCausalLM

    ours = tiny_windows(dtype=torch.float32, **shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == f"{name}ForCausalLM"
    assert difference(ours, theirs) < 1e-4
    assert load(tmp_path).config == ours.config


@pytest.mark.parametrize(
    "name, shape",
    [
        ("Mistral", {"sliding_windows": (5, None)}),
        ("Mistral", {"sliding_windows": (5, 6)}),
        ("Qwen3", {"sliding_windows": (5, 6), "qk_norm": True}),
    ],
)
def test_windows_that_transformers_does_not_have_are_not_written(
    tiny_windows, tmp_path, name, shape
):
    with pytest.raises(UserError) as error:
        save_model(tiny_windows(**shape), tmp_path)
    windows = f"sliding_windows are {shape['sliding_windows']}"
    assert f"{windows}; transformers supports no such {name}" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def read(**values):
    from loading.config import read_llama_config

    fields = {key: value for key, value in (SMALL | values).items() if value != "missing"}
    return read_llama_config(Path("config.json"), fields)


MISTRAL = {"model_type": "mistral"}
QWEN = {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 3}
EXPERTS_TOO = {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 8}
TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "values, sliding_windows",
    [
        (MISTRAL | {"sliding_window": 8}, (8, 8)),
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, ()),
        (QWEN | {"sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        (QWEN | {"sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        (QWEN | {"sliding_window": 8}, ()),
        (QWEN | {"max_window_layers": 2}, (None, None, 4096)),
        (QWEN | {"sliding_window": None, "max_window_layers": 1}, ()),
        (
            QWEN | {"sliding_window": 8, "layer_types": TYPES, "max_window_layers": 0},
            (None, 8, None),
        ),
        (QWEN | {"use_sliding_window": False, "max_window_layers": 0}, ()),
        ({"sliding_window": 8}, ()),
        (EXPERTS_TOO | {"max_window_layers": 1}, (8, 8)),
        (EXPERTS_TOO | {"use_sliding_window": False}, ()),
    ],
)
def test_windows_of_a_config(values, sliding_windows):
    assert read(**values).sliding_windows == sliding_windows


def test_what_a_mistrals_config_lacks_is_as_in_transformers():
    import transformers

    left_out = ("head_dim", "bos_token_id", "eos_token_id", "num_key_value_heads")
    config = {key: value for key, value in SMALL.items() if key not in left_out}
    config |= {"hidden_size": 48, "num_attention_heads": 8, "model_type": "mistral"}
    theirs = transformers.MistralConfig(**config)
    ours = read(**config, **dict.fromkeys(left_out, "missing"))
    assert ours.n_kv_head == theirs.num_key_value_heads == 8
    assert ours.head_dim == theirs.head_dim == 6
    assert ours.sliding_windows == (theirs.sliding_window,) * 2
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "values, words",
    [
        (QWEN | {"layer_types": TYPES[:2]}, "layer_types of length 2: must have length 3"),
        (QWEN | {"layer_types": ["local"] * 3}, "layer_types is 'local'; supported is 'full_att"),
        (QWEN | {"max_window_layers": "two"}, "max_window_layers 'two': must be an integer"),
        (QWEN | {"sliding_window": 0, "max_window_layers": 0}, "sliding_window 0: must be"),
        (MISTRAL | {"sliding_window": "8"}, "sliding_window '8': must be an integer from 1"),
        (MISTRAL | {"layer_types": TYPES[:2]}, "is 'full_attention'; supported is 'sliding_att"),
        (EXPERTS_TOO | {"layer_types": TYPES[:2]}, "is 'full_attention'; supported is 'sliding_"),
        (
            QWEN | {"use_sliding_window": "yes"},
            "use_sliding_window is 'yes'; supported is False or",
        ),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert str(error.value).startswith("config.json: ") and words in str(error.value)


def test_a_llama_has_no_windows():
    with pytest.raises(UserError, match="is 'sliding_attention'; supported is 'full_attention'"):
        read(layer_types=TYPES[:2])


def test_a_mistral_without_a_window_is_a_llama(tiny_llama, tmp_path):
    save_model(tiny_llama(), tmp_path)
    edit_json(tmp_path / "config.json", {"model_type": "mistral", "sliding_window": None})
    assert load(tmp_path).config == tiny_llama().config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["sliding_window"] is None


def test_a_gguf_file_of_a_model_with_windows_is_refused(tiny_llama, tmp_path):
    from benchmarks.export_gguf import write_gguf

    write_gguf(tiny_llama(dtype=torch.float32), tmp_path / "model.gguf", "float32")
    key = "llama.attention.sliding_window"
    for size in (0, 8):
        edited(tmp_path / "model.gguf", tmp_path / f"{size}.gguf", values={key: size})
    assert load(tmp_path / "0.gguf").config.sliding_windows == ()
    with pytest.raises(UserError) as error:
        load(tmp_path / "8.gguf")
    assert str(error.value) == f"{tmp_path / '8.gguf'}: {key} is 8; supported is 0"
