"""Lesson 30: Llama. What transformers computes, and every mode of the lessons before on it."""

import json
import math
import random

import pytest
import torch
from conftest import (
    CHECKPOINTS,
    difference,
    in_cache,
    load,
    random_tokens,
    run,
    run_rows,
    slide,
    their_text,
)

from errors import UserError
from loading.load import load_config, load_model, parse_name, save_model
from model import GPT

LLAMA = CHECKPOINTS / "stories-llama"


@pytest.fixture(scope="module")
def stories_llama():
    return load_model(LLAMA)


# The forward pass


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("seed", range(40))
def test_logits_equal_transformers_in_float64(peer, kind, seed):
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


def test_logits_equal_transformers_on_the_checkpoint(stories_llama):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    config = stories_llama.config
    assert 1 < config.n_kv_head < config.n_head
    assert config.tied_head
    assert config.block_size == 256
    assert difference(stories_llama, theirs) < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_greedy_text_equals_transformers(peer, kind):
    theirs, directory = peer(kind, max_position_embeddings=64, tie_word_embeddings=kind == "Qwen2")
    ours = run_rows(load(directory), [[1, 5, 9]], max_new_tokens=61, ignore_eos=True)
    assert ours == [their_text(theirs, [1, 5, 9], 64)]


@torch.inference_mode()
def test_greedy_story_equals_transformers():
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64).eval()
    prompt = [385, 271, 4, 14]
    text = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=4095
    )
    assert run_rows(load(LLAMA), [prompt], max_new_tokens=60) == [text[0, 4:].tolist()]


CPU = torch.device("cpu")


def test_a_rotation_pairs_the_halves_of_a_head():
    """Not neighbours: files of transformers hold the halves, those of Meta neighbours."""
    from llama import LlamaConfig, rotate, rotations

    config = LlamaConfig(head_dim=4, rope_theta=100.0)
    cos, sin = rotations(config, torch.float64, CPU).first(8)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    for position in range(8):
        a = position * 1.0  # the angles of both pairs
        b = position * 0.1
        turned = [
            1 * math.cos(a) - 3 * math.sin(a),
            2 * math.cos(b) - 4 * math.sin(b),
            3 * math.cos(a) + 1 * math.sin(a),
            4 * math.cos(b) + 2 * math.sin(b),
        ]
        result = rotate(x, cos[position], sin[position])[0].tolist()
        assert result == pytest.approx(turned, abs=1e-6)


def test_a_score_depends_on_the_distance_only():
    from llama import LlamaConfig, rotate, rotations

    cos, sin = rotations(LlamaConfig(head_dim=16), torch.float64, CPU).first(64)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = []
    for i in range(59):
        score = rotate(q, cos[i + 5], sin[i + 5]) * rotate(k, cos[i], sin[i])
        scores.append(score.sum().item())
    assert scores == pytest.approx([scores[0]] * 59, abs=1e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 10, 128, 1000])
def test_rotations_are_the_same_however_far_the_first_texts_came(head_dim):
    """Else a text would depend on what the process has computed before."""
    from llama import LlamaConfig, Rotations

    config = LlamaConfig(head_dim=head_dim)
    whole = Rotations(config, torch.float32, CPU).first(700)
    grown = Rotations(config, torch.float32, CPU)
    for length in (1, 3, 64, 65, 300, 7, 700):
        for table, expected in zip(grown.first(length), whole):
            assert table.shape == (length, 1, head_dim)
            assert torch.equal(table, expected[:length])


def test_a_large_window_costs_nothing_until_it_is_used(tiny_llama):
    """A table for all of it would be 4 GB here: a config.json of one line would fill the memory."""
    from llama import rotations

    model = tiny_llama(block_size=10**6, head_dim=500, dtype=torch.float32)
    run(model, [[1, 2]], max_new_tokens=3, options={"use_cache": False})
    table = rotations(model.config, torch.float32, CPU)
    assert len(table.cos) == len(table.sin) < 100


def test_a_model_that_has_generated_can_be_trained(tiny_llama):
    """What it keeps was made in inference mode, and gradients go through none of that."""
    model = tiny_llama(rope_theta=123.0)  # its table of rotations is made while it generates
    run(model, [[1, 2]], max_new_tokens=3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    for layer in model.layers:
        assert layer.self_attn.k_proj.weight.grad.abs().max() > 0


def test_a_norm_in_half_precision_does_not_overflow():
    from llama import LlamaConfig, RMSNorm

    norm = RMSNorm(LlamaConfig(n_embd=4)).half()
    torch.nn.init.ones_(norm.weight)
    x = torch.tensor([300.0, -300.0, 300.0, -300.0], dtype=torch.float16)
    assert norm(x).tolist() == [1, -1, 1, -1]
    assert norm(x).dtype == torch.float16


# The modes of the lessons before


@torch.inference_mode()
def test_a_cache_in_pieces_gives_the_logits_of_one_pass(tiny_llama):
    from cache import KVCache

    model = tiny_llama()
    tokens = random_tokens(16)
    whole = model(torch.tensor([tokens]))
    assert KVCache(model).storage.shape == (2, 2, 1, 2, 16, 6)  # keys of 2 heads, not of 4
    for pieces in ([16], [1] * 16, [5, 1, 7, 3]):
        cache = KVCache(model)
        logits = []
        start = 0
        for size in pieces:
            logits.append(in_cache(model, cache, tokens[start : start + size]))
            start += size
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 5, None])
def test_past_the_window_the_text_is_that_without_a_cache(tiny_llama, stride):
    model = tiny_llama()
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


def test_greedy_equals_a_sliding_window_while_it_fits(tiny_llama):
    model = tiny_llama(seed=2)
    assert run_rows(model, [[1, 2]], max_new_tokens=14) == slide(model, [[1, 2]], max_new_tokens=14)


def test_draws_are_the_same_with_and_without_a_cache(tiny_llama):
    model = tiny_llama()
    params = {"max_new_tokens": 40, "temperature": 0.9, "top_k": 20, "top_p": 0.9}
    texts = []
    for use_cache in (True, False):
        generator = torch.Generator().manual_seed(7)
        options = {"use_cache": use_cache}
        texts.append(run(model, [[1], [2, 3]], generator=generator, options=options, **params))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("drafter", ["itself", "a Llama", "a GPT-2", "lookup"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_speculation_gives_the_text_of_the_target(tiny, tiny_llama, drafter, gamma):
    from infer_speculative import generate_speculative, propose_lookup
    from sampling import SamplingParams

    target = tiny_llama(seed=5)
    drafts = {
        "itself": target,
        "a Llama": tiny_llama(seed=6, n_layer=1, block_size=10),
        "a GPT-2": tiny(seed=1),
        "lookup": propose_lookup,
    }
    prompt = [1, 2, 1, 2]
    params = {"max_new_tokens": 45, "ignore_eos": True, "presence_penalty": 0.1}
    steps = list(
        generate_speculative(target, drafts[drafter], prompt, SamplingParams(**params), gamma)
    )
    text = [token for step in steps for token in step.tokens]
    assert [text] == run_rows(target, [prompt], **params)
    if gamma > 1:
        assert (len(steps) < 45 / gamma) == (drafter == "itself")


def test_a_llama_drafts_for_a_gpt2(tiny, tiny_llama):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    target = tiny(seed=12)
    params = {"max_new_tokens": 30, "ignore_eos": True}
    steps = generate_speculative(target, tiny_llama(seed=6), [1, 2], SamplingParams(**params), 3)
    text = [token for step in steps for token in step.tokens]
    assert [text] == run_rows(target, [[1, 2]], **params)


def test_beams_are_those_without_a_cache(tiny_llama):
    from infer import beam_search

    model = tiny_llama(seed=3)
    found = beam_search(model, [1, 2, 3], 4, max_new_tokens=25)
    plain = beam_search(model, [1, 2, 3], 4, max_new_tokens=25, use_cache=False)
    assert len(found) == 4
    assert [beam.tokens for beam in found] == [beam.tokens for beam in plain]
    scores = [beam.score for beam in plain]
    assert [beam.score for beam in found] == pytest.approx(scores, abs=1e-10)
    (best,) = beam_search(model, [1, 2, 3], 1, max_new_tokens=25)
    options = {"use_cache": False}
    assert [best.tokens] == run_rows(model, [[1, 2, 3]], max_new_tokens=25, options=options)


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_int8_rounds_all_matrices_and_nothing_else(tiny_llama, tmp_path, tied):
    from int8 import to_int8

    whole = tiny_llama(dtype=torch.float32, tied_head=tied)
    save_model(whole, tmp_path)
    rounded = to_int8(tiny_llama(dtype=torch.float32, tied_head=tied)).state_dict()
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


@pytest.mark.parametrize("tied", [True, False])
def test_int8_texts_are_those_without_a_cache(tiny_llama, tied):
    from int8 import to_int8

    model = to_int8(tiny_llama(tied_head=tied))
    params = {"max_new_tokens": 40, "ignore_eos": True}
    cached = run_rows(model, [[1], [2, 3]], **params)
    assert cached == run_rows(model, [[1], [2, 3]], **params, options={"use_cache": False})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_stays_close(stories_llama, dtype):
    model = load(LLAMA, dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    tokens = torch.tensor([random_tokens(64, 4096)])
    exact = stories_llama(tokens).log_softmax(-1)
    half = model(tokens).float().log_softmax(-1)
    assert (exact.exp() * (exact - half)).sum(-1).mean() < 5e-3  # KL divergence


# The command line


def test_the_command_line_tells_a_story(cli, stories_llama):
    from loading.tokenizer import load_encoding

    encoding = load_encoding(LLAMA, 4096)
    (text,) = run_rows(stories_llama, [encoding.encode("Once upon a time")], max_new_tokens=12)
    code, out, err = cli("--model", LLAMA, "--prompt", "Once upon a time", "--max-new-tokens", 12)
    assert (code, out) == (0, f"Once upon a time{encoding.decode(text)}\n")
    assert err.startswith("12 tokens")


def test_a_gpt2_drafts_for_a_llama_on_the_command_line(run_main, cli):
    import infer_speculative

    prompt = ("--prompt", "Once upon a time", "--max-new-tokens", 30)
    code, out, _ = run_main(infer_speculative.main, "--target", LLAMA, *prompt)
    assert code == 0
    assert out == cli("--model", LLAMA, *prompt)[1]


# Names and files


def test_a_shape_with_random_weights():
    from llama import Llama

    assert parse_name("random:smollm2-135m").kind == "random"
    with torch.device("meta"):
        model = Llama(load_config("random:smollm2-135m"))
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008  # as its card says
    with pytest.raises(UserError, match="unknown model 'smollm2-135m'.* random: .*smollm2-135m$"):
        parse_name("smollm2-135m")


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_give_the_same_model(tiny_llama, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    shape = {"eos_token_ids": (60, 3), "rope_theta": 500.0, "norm_epsilon": 1e-3}
    ours = tiny_llama(dtype=torch.float32, tied_head=tied, **shape)
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
    with pytest.raises(UserError, match="n_embd is 18, no multiple of n_head, which is 4: .*"):
        save_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["mamba", "mixtral", None])
def test_a_wrong_architecture_is_named_before_its_weights_are_fetched(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError, match=f"model_type is {kind!r}; supported is 'gpt2' or 'llama"):
        load_model(tmp_path)


def test_a_llama_that_does_not_say_so_is_one_line(tiny_llama, tmp_path):
    save_model(tiny_llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="config.json: .*model_type"):
        load_model(tmp_path)


def test_files_may_hold_what_is_not_read(peer):
    from safetensors.torch import load_file, save_file

    theirs, directory = peer("Llama", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, directory / "model.safetensors")
    assert difference(load(directory), theirs) < 1e-10


def test_still_a_gpt2_is_loaded_as_before():
    assert type(load_model(CHECKPOINTS / "stories-draft")) is GPT
