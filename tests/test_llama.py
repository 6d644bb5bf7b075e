"""Lesson 30: Llama computes what transformers does, in the modes of the lessons before too."""

import json
import random

import pytest
import torch
from conftest import CHECKPOINTS, difference, load, random_tokens, run, run_rows, their_rows
from natives import to_int8
from safetensors.torch import load_file, save_file

import infer_speculative
from cache import KVCache
from errors import UserError
from infer_speculative import generate_speculative, propose_prompt_lookup
from loading.load import load_config, load_model, resolve_source, save_model
from sampling import SamplingParams

LLAMA = CHECKPOINTS / "stories-llama"


def check_logits(peer, kind: str, seed: int) -> None:
    """A random model of this kind and of a random shape has the logits of transformers."""
    choose = random.Random(seed).choice
    kv_heads = choose([1, 1, 2, 2, 3, 4])
    heads = kv_heads * choose([size for size in (1, 2, 3, 4, 8) if kv_heads * size <= 8])
    of_llama = {"vocab_size": choose([11, 61]), "head_dim": choose([None, None, 2, 6, 16])}
    rope = {"rope_type": "default", "rope_theta": choose([10.0, 10000.0, 500000.0])}
    theirs, directory = peer(
        kind,
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * choose([2, 4, 10]),
        intermediate_size=choose([1, 24, 57]),
        num_hidden_layers=choose([1, 2, 3]),
        max_position_embeddings=choose([8, 24, 40]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        rope_parameters=rope,
        **(of_llama if kind == "Llama" else {}),
    )
    ours = load(directory)
    attention = ours.layers[0].self_attn
    assert [attention.q_proj.bias is None, attention.o_proj.bias is None] == [kind == "Llama", True]
    assert difference(ours, theirs) < 1e-10


@pytest.mark.parametrize("seed", range(25))
def test_logits_equal_transformers_in_float64(peer, seed):
    check_logits(peer, "Llama", seed)


def test_logits_equal_transformers_on_the_checkpoint():
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    assert difference(load(LLAMA, torch.float32), theirs) < 1e-4


@torch.inference_mode()
def check_greedy_text(peer, kind: str, **shape) -> None:
    """A random model of this kind writes what transformers writes, up to its window."""
    theirs, directory = peer(kind, max_position_embeddings=64, **shape)
    ours = run_rows(load(directory), [[1, 5, 9]], max_new_tokens=61, ignore_eos=True)
    assert ours == their_rows(theirs, [[1, 5, 9]], 61)


def test_greedy_text_equals_transformers(peer):
    check_greedy_text(peer, "Llama")


def test_a_large_window_costs_nothing_until_it_is_used(tiny_llama):
    """A table for all of it would be 4 GB here: a config.json of one line would fill the memory."""
    from llama import rotary_embedding

    model = tiny_llama(block_size=10**6, head_dim=500, dtype=torch.float32)
    run(model, [[1, 2]], max_new_tokens=3, options={"use_cache": False})
    table = rotary_embedding(model.config, torch.float32, torch.device("cpu"))
    assert len(table.cos) == len(table.sin) < 100


def test_a_model_that_has_generated_can_be_trained(tiny_llama):
    """What it keeps was made in inference mode, and gradients go through none of that."""
    model = tiny_llama(rope_theta=123.0)  # its table of rotations is made while it generates
    run(model, [[1, 2]], max_new_tokens=3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    for layer in model.layers:
        assert layer.self_attn.k_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("stride", [1, 5, None])
def test_past_the_window_the_text_is_that_without_a_cache(tiny_llama, stride):
    model = tiny_llama()
    assert KVCache(model).storage.shape == (2, 2, 1, 2, 16, 6)  # keys of 2 heads, not of 4
    params = {"max_new_tokens": 50, "ignore_eos": True}
    cached = run_rows(model, [[1, 2, 3]], **params, options={"stride": stride})
    options = {"stride": stride, "use_cache": False}
    assert cached == run_rows(model, [[1, 2, 3]], **params, options=options)
    assert len(set(cached[0])) > 5


def test_rows_of_any_length_have_the_texts_of_their_own_runs(tiny_llama):
    model = tiny_llama()
    prompts = [random_tokens(length, seed=length) for length in (3, 1, 16, 40, 9)]
    prompts.append([])
    params = {"max_new_tokens": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.2}
    rows = run_rows(model, prompts, **params)
    assert rows == [run_rows(model, [prompt], **params)[0] for prompt in prompts]
    # An empty prompt starts from BOS, which is not EOS here.
    assert rows[-1] == run_rows(model, [[59]], **params)[0]


@pytest.mark.parametrize("drafter", ["itself", "a Llama", "a GPT-2", "lookup"])
def test_speculation_gives_the_text_of_the_target(tiny, tiny_llama, drafter):
    target = tiny_llama(seed=5)
    drafts = {
        "itself": target,
        "a Llama": tiny_llama(seed=6, n_layer=1, block_size=10),
        "a GPT-2": tiny(seed=1),
        "lookup": propose_prompt_lookup,
    }
    prompt = [1, 2, 1, 2]
    params = {"max_new_tokens": 45, "ignore_eos": True, "presence_penalty": 0.1}
    steps = list(generate_speculative(target, drafts[drafter], prompt, SamplingParams(**params), 4))
    text = [token for step in steps for token in step.tokens]
    assert [text] == run_rows(target, [prompt], **params)
    assert (len(steps) < 45 / 4) == (drafter == "itself")


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_int8_rounds_all_matrices_and_nothing_else(tiny_llama, tmp_path, tied):
    whole = tiny_llama(dtype=torch.float32, tie_word_embeddings=tied)
    save_model(whole, tmp_path)
    rounded = to_int8(tiny_llama(dtype=torch.float32, tie_word_embeddings=tied)).state_dict()
    read = load(tmp_path, torch.int8)
    tensors = read.state_dict()
    assert tensors.keys() == rounded.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, tensors[name]), name
        is_matrix = name.endswith("weight") and "norm" not in name
        assert (tensor.dtype == torch.int8) == is_matrix, name
    assert (read.lm_head.weight is read.embed_tokens.weight) == tied
    assert (read.lm_head.scale is read.embed_tokens.scale) == tied
    assert read.dtype == torch.float32
    tokens = torch.tensor([random_tokens(16)])
    exact = whole(tokens)
    assert 0 < (read(tokens) - exact).abs().max() < 0.25 * exact.std()


def test_a_gpt2_drafts_for_a_llama_on_the_command_line(run_main, cli):
    prompt = ("--prompt", "Once upon a time", "--max-new-tokens", 30)
    code, out, _ = run_main(infer_speculative.main, "--target", LLAMA, *prompt)
    assert code == 0
    assert out == cli("--model", LLAMA, *prompt)[1]


@torch.inference_mode()
def test_half_precision_stays_close():
    tokens = torch.tensor([random_tokens(64, 4096)])
    exact = load(LLAMA, torch.float32)(tokens).log_softmax(-1)
    half = load(LLAMA, torch.bfloat16)(tokens).float().log_softmax(-1)
    assert (exact.exp() * (exact - half)).sum(-1).mean() < 5e-3  # KL divergence


def test_a_shape_with_random_weights():
    from llama import Llama

    assert resolve_source("random:smollm2-135m").type == "random"
    with torch.device("meta"):
        model = Llama(load_config("random:smollm2-135m"))
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008  # as its card says
    with pytest.raises(UserError, match="unknown model 'smollm2-135m'.* random: .*smollm2-135m$"):
        resolve_source("smollm2-135m")


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_give_the_same_model(tiny_llama, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    shape = {"eos_token_ids": (60, 3), "rope_theta": 500.0, "norm_eps": 1e-3}
    ours = tiny_llama(dtype=torch.float32, tie_word_embeddings=tied, **shape)
    save_model(ours, tmp_path)
    again = load(tmp_path, torch.float32)
    assert again.config == ours.config
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert difference(ours, AutoModelForCausalLM.from_pretrained(tmp_path).eval()) < 1e-4


def test_a_width_that_heads_do_not_divide_is_not_written(tiny_llama, tmp_path):
    """transformers would refuse the file."""
    model = tiny_llama(n_embd=18)
    run(model, [[1]], max_new_tokens=2)  # though it computes
    with pytest.raises(UserError, match="n_embd is 18; transformers needs a multiple of n_head"):
        save_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_llama_that_does_not_say_so_is_one_line(tiny_llama, tmp_path):
    save_model(tiny_llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="config.json: .*model_type"):
        load_model(tmp_path)


def test_files_may_hold_what_is_not_read(peer):
    theirs, directory = peer("Llama", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, directory / "model.safetensors")
    assert difference(load(directory), theirs) < 1e-10
