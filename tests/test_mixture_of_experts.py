"""Lesson 116: a mixture of experts, Qwen3-MoE. Oracle: transformers' Qwen3MoeForCausalLM."""

import copy
import functools
import json
import random
from pathlib import Path

import pytest
import torch
from conftest import (
    CHECKPOINTS,
    check_command_line,
    check_modes,
    difference,
    load,
    random_tokens,
    run_rows,
    their_rows,
)
from engines import check_own_runs
from natives import random_texts, to_int8
from ranks import ROUNDING, check_two_ranks, compared, logits_of, results, save_uneven
from safetensors.torch import load_file, save_file
from test_llama import check_greedy_text
from test_llama_config import SMALL

from errors import UserError
from loading.load import save_model
from text.tokenizer import load_encoding

# transformers' grouped products do not compute float64; its eager ones do.
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 6}
EXPERTS |= {"experts_implementation": "eager"}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, backend):
    check_command_line(cli, tmp_path, "Qwen3Moe", 20, "--backend", backend, **EXPERTS)


@pytest.mark.parametrize("seed", range(25))
def test_logits_equal_transformers(peer, seed):
    choose = random.Random(seed).choice
    count = choose([1, 2, 5, 9])
    theirs, directory = peer(
        "Qwen3Moe",
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_experts=count,
        num_experts_per_tok=choose([1, min(2, count), count]),
        moe_intermediate_size=choose([1, 12, 30]),
        experts_implementation="eager",
        norm_topk_prob=choose([False, True]),
        mlp_only_layers=choose([None, [0], [1, 7]]),
        decoder_sparse_step=choose([1, 2]),
        head_dim=choose([2, 6, 16]),
        hidden_size=choose([7, 16, 30]),
        num_hidden_layers=choose([2, 3]),
        tie_word_embeddings=choose([False, True]),
    )
    assert difference(load(directory), theirs) < 1e-9
    assert difference(load(directory, torch.float32), theirs.float()) < 1e-4


@pytest.mark.parametrize("normalized", [False, True])
def test_greedy_text_equals_transformers(peer, normalized):
    check_greedy_text(peer, "Qwen3Moe", norm_topk_prob=normalized, **EXPERTS)


# What the router chooses.


def mixture(model, layer: int = 1):
    return model.layers[layer].mlp


@torch.inference_mode()
def test_weights_are_shares_of_a_softmax_over_all_experts(tiny_experts):
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, experts = mixture(tiny_experts(sizes={"norm_topk_prob": False})).route(x)
    layer = mixture(tiny_experts())
    shares = layer.gate(x).float().softmax(-1)
    for row, own, chosen in zip(shares.tolist(), weights.tolist(), experts.tolist()):
        best = sorted(range(5), key=lambda expert: -row[expert])[:2]
        assert (chosen, own) == (best, [row[expert] for expert in best])
    normalized, same = layer.route(x)
    assert torch.equal(same, experts) and normalized.dtype == torch.float64
    assert torch.allclose(normalized, weights / weights.sum(-1, keepdim=True), atol=1e-7)
    assert torch.allclose(normalized.sum(-1), torch.ones(7).double(), atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("count", [5, 200])  # from some size on, sorts of torch are others
def test_of_experts_that_tie_the_lower_numbers_win(tiny_experts, count):
    """torch.topk leaves open which: for zeros it gives 6, 5 and 4 of 8."""
    layer = mixture(tiny_experts(sizes={"num_experts": count, "num_experts_per_tok": 3}))
    layer.gate.weight.zero_()
    weights, experts = layer.route(torch.randn(4, 16).double())
    assert experts.tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(weights, torch.full((4, 3), 1 / 3).double())
    layer.gate.weight[3] = 1
    assert layer.route(torch.ones(1, 16).double())[1].tolist() == [[3, 0, 1]]


@torch.inference_mode()
def test_each_chosen_expert_runs_once_for_all_its_tokens(tiny_experts):
    model = tiny_experts()
    layer = mixture(model)
    runs = {}
    for number, expert in enumerate(layer.experts):
        expert.register_forward_hook(
            lambda module, args, y, number=number: runs.setdefault(number, []).append(len(y))
        )
    x = torch.randn(3, 4, 16).double()
    y = layer(x)
    _, experts = layer.route(x.flatten(0, 1))
    assert runs == {number: [int((experts == number).sum())] for number in runs}
    assert sorted(runs) == experts.unique().tolist()
    runs.clear()
    assert torch.allclose(layer(x[0, :1]), y[0, :1], rtol=0, atol=1e-14)
    assert len(runs) == 2


def test_the_embedded_model_writes_what_transformers_does_with_all_its_experts():
    from transformers import AutoModelForCausalLM

    directory = CHECKPOINTS / "stories-experts"
    encoding = load_encoding(directory, 4096)
    prompt = encoding.encode("One day, Lily")
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load(directory, torch.float32)
    (row,) = run_rows(model, [prompt], max_new_tokens=60)
    assert [row] == their_rows(theirs, [prompt], 60)
    counts = torch.zeros(6, 8)

    def count(mlp, args, layer):
        _, experts = mlp.route(args[0].flatten(0, -2))
        counts[layer] += experts.flatten().bincount(minlength=8)

    for layer in range(6):
        mixture(model, layer).register_forward_pre_hook(functools.partial(count, layer=layer))
    with torch.inference_mode():
        model(torch.tensor([prompt + row]))
    assert counts.sum(1).tolist() == [2.0 * len(prompt + row)] * 6
    assert (counts > 0).all()  # trained to choose all of them


# The lessons before.


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_modes_of_the_lessons_before(tiny_experts, dtype):
    """Ragged rows, the window, speculation and beams give the text that a pass over all gives."""
    model = tiny_experts() if dtype == "float64" else to_int8(tiny_experts())
    prompts = [[1, 2, 3], [4], random_tokens(30)]
    check_modes(model, tiny_experts(seed=1), prompts, 40)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_close(tiny_experts, dtype):
    """Few tokens take other experts: where two are as good as equal."""
    model = tiny_experts()
    texts = random_texts(model, 8)
    exact = model(texts).log_softmax(-1)
    half = copy.deepcopy(model).to(dtype)(texts).double().log_softmax(-1)
    divergences = (exact.exp() * (exact - half)).sum(-1).flatten()
    assert divergences.median() < {torch.float16: 1e-4, torch.bfloat16: 0.005}[dtype]


def test_int8_rounds_every_expert_and_the_router(tiny_experts):
    from quantisation.int8 import Int8Linear

    model = tiny_experts(dtype=torch.float32)
    texts = random_texts(model, 4)
    with torch.inference_mode():
        expected = model(texts)
        found = to_int8(model)(texts)
    layer = mixture(model)
    assert all(isinstance(expert.up_proj, Int8Linear) for expert in layer.experts)
    assert isinstance(layer.gate, Int8Linear)
    assert (found - expected).abs().median() < 0.05 * expected.std()


def test_the_engine_writes_the_text_of_each_own_run(tiny_experts):
    model = tiny_experts()
    check_own_runs(model, (3, 1, 16, 40, 9, 2), 30)


# On several processes.

UNEVEN = {"sizes": {"n_inner": 160, "mlp_only_layers": (0,)}}


@pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_logits_of_one_process(tiny_experts, compiled, tmp_path, kind, size):
    name = save_uneven(tiny_experts, tmp_path, "tiny_llama", **UNEVEN)
    found, _, heads = compared(size, name, torch.tensor([random_tokens(23)]), dtype=kind)
    assert found <= ROUNDING[kind] and heads == {2: [3, 2], 4: [2, 1, 1, 1]}[size]


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_ranks_in_float64(tiny_experts, tmp_path, parallel_mode):
    name = save_uneven(tiny_experts, tmp_path, "tiny_llama", **UNEVEN)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    found = results(3, lambda: logits_of(name, tokens, parallel_mode, **options))[0][0]
    with torch.inference_mode():
        assert (torch.from_numpy(found) - load(name)(tokens)).abs().max() < 1e-11


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
def test_a_rank_has_a_share_of_each_expert_and_all_of_the_router(tiny_experts, parallel_mode):
    from types import SimpleNamespace

    from parallel.shards import ShardPlan

    parts = ShardPlan(
        tiny_experts(), SimpleNamespace(size=2, rank=1, parallel_mode=parallel_mode)
    ).shards
    expert = "layers.1.mlp.experts.4"
    assert parts["layers.1.mlp.gate.weight"].rows == [range(5)]
    for name in ("gate_proj", "up_proj"):
        assert parts[f"{expert}.{name}.weight"].rows == [range(6, 12)]
    down = parts[f"{expert}.down_proj.weight"]
    expected = (
        ([range(8, 16)], slice(None)) if parallel_mode == "gather" else ([range(16)], slice(6, 12))
    )
    assert (down.rows, down.columns) == expected


def test_two_ranks_write_the_texts_of_one(tiny_experts, engine_cli, tmp_path):
    check_two_ranks(tiny_experts, engine_cli, tmp_path, 20)


# Its files.


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"sizes": {"mlp_only_layers": (1,), "norm_topk_prob": False}},
    ],
)
def test_save_and_load_give_the_same_model(tiny_experts, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    ours = tiny_experts(dtype=torch.float32, rope_theta=500.0, **shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    assert difference(ours, theirs) < 1e-4
    assert load(tmp_path).config == ours.config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["architectures"], saved["model_type"]) == (["Qwen3MoeForCausalLM"], "qwen3_moe")
    names = set(load_file(tmp_path / "model.safetensors"))
    theirs.save_pretrained(tmp_path)  # one by one too, though it holds them in one tensor
    assert {
        name.removeprefix("model.") for name in load_file(tmp_path / "model.safetensors")
    } == names


QWEN3_MOE = SMALL | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE |= {"moe_intermediate_size": 12}


def read(**values):
    from loading.config import read_llama_config

    return read_llama_config(Path("config.json"), QWEN3_MOE | values)


def test_what_a_config_lacks_is_as_in_transformers():
    import transformers

    few = (
        "head_dim",
        "bos_token_id",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    )
    theirs = transformers.Qwen3MoeConfig(**{k: v for k, v in QWEN3_MOE.items() if k not in few})
    ours = read(**dict.fromkeys(few))
    experts = ours.experts
    assert (experts.num_experts, theirs.num_experts) == (128, 128)
    assert (experts.num_experts_per_tok, theirs.num_experts_per_tok) == (8, 8)
    assert (experts.n_inner, theirs.moe_intermediate_size) == (768, 768)
    assert (experts.norm_topk_prob, theirs.norm_topk_prob) == (False, False)
    assert experts.mlp_only_layers == ()
    assert (ours.head_dim, ours.qk_norm, ours.bos_token_id) == (4, True, 60)  # 4 heads of 16 / 4


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
def test_older_and_newer_files(values, dense):
    assert read(**values).experts.num_experts == 5
    assert read(**values).experts.mlp_only_layers == dense


@pytest.mark.parametrize(
    "values, words",
    [
        ({"num_experts": 0}, "num_experts 0: must be an integer from 1 to 1000"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6: must be at most num_experts"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size 'x': must be an integer"),
        ({"norm_topk_prob": 2}, "norm_topk_prob is 2; supported is False or True"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0: must be an integer from 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers 3: must be a list of integers"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers ['a']: must be a list of integers"),
        ({"eos_token_id": None}, "eos_token_id None: must be an id below 61"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(values, words):
    with pytest.raises(UserError) as error:
        read(**values)
    assert str(error.value).startswith("config.json: ") and words in str(error.value)


def test_a_file_that_lacks_an_expert_or_has_one_more_is_refused(tiny_experts, tmp_path):
    save_model(tiny_experts(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expert = "layers.1.mlp.experts.{}.up_proj.weight"
    save_file(tensors | {expert.format(5): tensors[expert.format(4)].clone()}, file)
    with pytest.raises(UserError, match=f"unexpected tensor {expert.format(5)}"):
        load(tmp_path)
    del tensors[expert.format(3)]
    save_file(tensors, file)
    with pytest.raises(UserError, match=f"tensor {expert.format(3)} is missing"):
        load(tmp_path)
