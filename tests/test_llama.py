"""Lesson 27: Llama. What transformers computes, and every mode of the lessons before on it."""

import functools
import json
import math
import random

import pytest
import torch
from conftest import (
    CHECKPOINTS,
    difference,
    exact_norm,
    in_cache,
    load,
    random_peer,
    random_tokens,
    run,
    run_rows,
    slide,
)

from checkpoint import UserError, parse_name
from model import GPT

LLAMA = CHECKPOINTS / "stories-llama"


@pytest.fixture(scope="module")
def stories_llama():
    from load import load_model

    return load_model(LLAMA)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A function that builds a random Llama of transformers, in float64, and the directory that it was saved in."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)
    return functools.partial(random_peer, "Llama", tmp_path)


# The forward pass


@pytest.mark.parametrize("seed", range(48))
def test_logits_equal_transformers_in_float64(peer, seed):
    choose = random.Random(seed).choice
    kv_heads = choose([1, 1, 2, 2, 3, 4])
    heads = kv_heads * choose([size for size in (1, 2, 3, 4, 8) if kv_heads * size <= 8])
    theirs, directory = peer(
        saved_as=choose([torch.float64, torch.float32, torch.bfloat16]),
        shard_size=choose(["1GB", "3KB"]),
        vocab_size=choose([11, 61]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=choose([None, None, 2, 6, 16]),
        hidden_size=heads * choose([2, 4, 10]),
        intermediate_size=choose([1, 24, 57]),
        num_hidden_layers=choose([1, 2, 3]),
        max_position_embeddings=choose([8, 24, 40]),
        rms_norm_eps=choose([1e-6, 0.1]),
        tie_word_embeddings=choose([False, True]),
        rope_parameters={"rope_type": "default", "rope_theta": choose([10.0, 10000.0, 500000.0])},
    )
    assert difference(load(directory), theirs) < 1e-10


def test_logits_equal_transformers_on_the_checkpoint(stories_llama):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    config = stories_llama.config
    assert 1 < config.n_kv_head < config.n_head and config.tied_head and config.block_size == 256
    assert difference(stories_llama, theirs) < 1e-4


@torch.inference_mode()
def test_greedy_text_equals_transformers(peer):
    theirs, directory = peer(max_position_embeddings=64)
    ours, prompt = load(directory), [1, 5, 9]
    mask, fixed = torch.ones(1, 3, dtype=torch.int64), {"max_length": 64, "min_length": 64, "pad_token_id": 0}
    text = theirs.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, **fixed)
    assert run_rows(ours, [prompt], max_new_tokens=61, ignore_eos=True) == [text[0, 3:].tolist()]


@torch.inference_mode()
def test_greedy_story_equals_transformers(stories_llama):
    from transformers import AutoModelForCausalLM

    theirs, prompt = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64).eval(), [385, 271, 4, 14]
    text = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=4095)[0, 4:]
    assert run_rows(load(LLAMA), [prompt], max_new_tokens=60) == [text.tolist()]


def test_a_rotation_pairs_the_halves_of_a_head():
    """Not neighbours: files of transformers hold the halves, those of Meta neighbours."""
    from llama import LlamaConfig, rotate, rotations

    config = LlamaConfig(block_size=8, head_dim=4, rope_theta=100.0)
    cos, sin = rotations(config, torch.float64, torch.device("cpu"))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    for position in range(8):
        a, b = position * 1.0, position * 0.1  # the angles of both pairs
        turned = [
            *(1 * math.cos(a) - 3 * math.sin(a), 2 * math.cos(b) - 4 * math.sin(b)),
            *(3 * math.cos(a) + 1 * math.sin(a), 4 * math.cos(b) + 2 * math.sin(b)),
        ]
        assert rotate(x, cos[position], sin[position])[0].tolist() == pytest.approx(turned, abs=1e-6)


def test_a_score_depends_on_the_distance_only():
    from llama import LlamaConfig, rotate, rotations

    cos, sin = rotations(LlamaConfig(block_size=64, head_dim=16), torch.float64, torch.device("cpu"))
    q, k = torch.randn(2, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = [(rotate(q, cos[i + 5], sin[i + 5]) * rotate(k, cos[i], sin[i])).sum().item() for i in range(59)]
    assert scores == pytest.approx([scores[0]] * 59, abs=1e-5)


def test_a_model_that_has_generated_can_be_trained(tiny_llama):
    model = tiny_llama(rope_theta=123.0)  # its table of rotations is made while it generates
    run(model, [[1, 2]], max_new_tokens=3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


def test_a_norm_in_half_precision_does_not_overflow():
    from llama import LlamaConfig, RMSNorm

    norm = RMSNorm(LlamaConfig(n_embd=4)).half()
    torch.nn.init.ones_(norm.weight)
    x = torch.tensor([300.0, -300.0, 300.0, -300.0], dtype=torch.float16)
    assert norm(x).tolist() == [1, -1, 1, -1] and norm(x).dtype == torch.float16


# The modes of the lessons before


@torch.inference_mode()
def test_a_cache_in_pieces_gives_the_logits_of_one_pass(tiny_llama):
    from cache import KVCache

    model, tokens = tiny_llama(), random_tokens(16)
    assert KVCache(model).storage.shape == (2, 2, 1, 2, 16, 6)  # keys of 2 heads, not of 4
    for pieces in ([16], [1] * 16, [5, 1, 7, 3]):
        cache, logits, start = KVCache(model), [], 0
        for size in pieces:
            logits.append(in_cache(model, cache, tokens[start : start + size]))
            start += size
        torch.testing.assert_close(torch.cat(logits, 1), model(torch.tensor([tokens])), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 5, None])
def test_past_the_window_the_text_is_that_without_a_cache(tiny_llama, stride):
    model, options = tiny_llama(), {"max_new_tokens": 50, "ignore_eos": True}
    cached = run_rows(model, [[1, 2, 3]], **options, options={"stride": stride})
    assert cached == run_rows(model, [[1, 2, 3]], **options, options={"stride": stride, "use_cache": False})
    assert len(set(cached[0])) > 5


def test_rows_of_any_length_have_the_texts_of_their_own_runs(tiny_llama):
    model, prompts = tiny_llama(), [random_tokens(length, seed=length) for length in (3, 1, 16, 40, 9)] + [[]]
    params = {"max_new_tokens": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.2}
    rows = run_rows(model, prompts, **params)
    assert rows == [run_rows(model, [prompt], **params)[0] for prompt in prompts]
    assert rows[-1] == run_rows(model, [[59]], **params)[0]  # an empty prompt starts from BOS, which is not EOS here


def test_greedy_equals_a_sliding_window_while_it_fits(tiny_llama):
    model = tiny_llama(seed=2)
    assert run_rows(model, [[1, 2]], max_new_tokens=14) == slide(model, [[1, 2]], max_new_tokens=14)


def test_draws_are_the_same_with_and_without_a_cache(tiny_llama):
    texts = [
        run(
            tiny_llama(),
            [[1], [2, 3]],
            generator=torch.Generator().manual_seed(7),
            options={"use_cache": use_cache},
            max_new_tokens=40,
            temperature=0.9,
            top_k=20,
            top_p=0.9,
        )
        for use_cache in (True, False)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("drafter", ["itself", "a Llama", "a GPT-2", "lookup"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_speculation_gives_the_text_of_the_target(tiny, tiny_llama, drafter, gamma):
    from infer_speculative import generate_speculative, propose_lookup
    from sampling import SamplingParams

    target = tiny_llama(seed=5)
    drafts = {"itself": target, "a Llama": tiny_llama(seed=6, n_layer=1, block_size=10), "a GPT-2": tiny(seed=1)}
    params = SamplingParams(max_new_tokens=45, ignore_eos=True, presence_penalty=0.1)
    steps = list(generate_speculative(target, drafts.get(drafter, propose_lookup), [1, 2, 1, 2], params, gamma))
    text = [token for step in steps for token in step.tokens]
    assert [text] == run_rows(target, [[1, 2, 1, 2]], max_new_tokens=45, ignore_eos=True, presence_penalty=0.1)
    assert (len(steps) < 45 / gamma) == (drafter == "itself") or gamma == 1


def test_a_llama_drafts_for_a_gpt2(tiny, tiny_llama):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    target, params = tiny(seed=12), SamplingParams(max_new_tokens=30, ignore_eos=True)
    steps = generate_speculative(target, tiny_llama(seed=6), [1, 2], params, 3)
    text = [token for step in steps for token in step.tokens]
    assert [text] == run_rows(target, [[1, 2]], max_new_tokens=30, ignore_eos=True)


def test_beams_are_those_without_a_cache(tiny_llama):
    from infer import beam_search

    model = tiny_llama(seed=3)
    found = beam_search(model, [1, 2, 3], 4, max_new_tokens=25)
    plain = beam_search(model, [1, 2, 3], 4, max_new_tokens=25, use_cache=False)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in plain] and len(found) == 4
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in plain], abs=1e-10)
    (best,) = beam_search(model, [1, 2, 3], 1, max_new_tokens=25)
    assert [best.tokens] == run_rows(model, [[1, 2, 3]], max_new_tokens=25, options={"use_cache": False})


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_int8_rounds_all_matrices_and_nothing_else(tiny_llama, tmp_path, tied):
    from int8 import to_int8

    whole = tiny_llama(dtype=torch.float32, tied_head=tied)
    whole.save_pretrained(tmp_path)
    rounded, read = to_int8(tiny_llama(dtype=torch.float32, tied_head=tied)), load(tmp_path, torch.int8)
    tensors = read.state_dict()
    assert tensors.keys() == rounded.state_dict().keys()
    for name, tensor in rounded.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
        assert (tensor.dtype == torch.int8) == (name.endswith("weight") and "norm" not in name), name
    assert (read.lm_head.weight is read.embed_tokens.weight) == tied
    assert (read.lm_head.scale is read.embed_tokens.scale) == tied
    assert read.dtype == torch.float32
    tokens = torch.tensor([random_tokens(16)])
    assert 0 < (read(tokens) - whole(tokens)).abs().max() < 0.25 * whole(tokens).std()
    params = {"max_new_tokens": 40, "ignore_eos": True}
    cached = run_rows(to_int8(tiny_llama(tied_head=tied)), [[1], [2, 3]], **params)
    assert cached == run_rows(
        to_int8(tiny_llama(tied_head=tied)), [[1], [2, 3]], **params, options={"use_cache": False}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(stories_llama, dtype):
    model = load(LLAMA, dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    tokens = torch.tensor([random_tokens(64, 4096)])
    with torch.inference_mode():
        exact, half = (each(tokens).float().log_softmax(-1) for each in (stories_llama, model))
    assert (exact.exp() * (exact - half)).sum(-1).mean() < 5e-3  # KL divergence


# The command line


def test_the_command_line_tells_a_story(cli, stories_llama):
    from tokenizer import load_encoding

    encoding = load_encoding(LLAMA, 4096)
    (text,) = run_rows(stories_llama, [encoding.encode("Once upon a time")], max_new_tokens=12)
    code, out, err = cli("--model", LLAMA, "--prompt", "Once upon a time", "--max-new-tokens", 12)
    assert (code, out) == (0, f"Once upon a time{encoding.decode(text)}\n") and err.startswith("12 tokens")


def test_a_gpt2_drafts_for_a_llama_on_the_command_line(run_main, cli):
    import infer_speculative

    prompt = ("--prompt", "Once upon a time", "--max-new-tokens", 30)
    code, out, _ = run_main(infer_speculative.main, "--target", LLAMA, *prompt)
    assert code == 0 and out == cli("--model", LLAMA, *prompt)[1]


def test_a_shape_with_random_weights():
    from llama import Llama
    from load import load_config

    assert parse_name("random:smollm2-135m").kind == "random"
    with torch.device("meta"):
        model = Llama(load_config("random:smollm2-135m"))
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008  # as its card says
    with pytest.raises(UserError, match="unknown model 'smollm2-135m'"):
        parse_name("smollm2-135m")


# Files


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A function that loads the configuration of a Llama with other values, None for none."""
    tiny_llama().save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def read(**values):
        from load import load_config

        fields = {key: value for key, value in (good | values).items() if value != "missing"}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_config(tmp_path)

    return read


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_give_the_same_model(tiny_llama, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    ours = tiny_llama(dtype=torch.float32, tied_head=tied, eos_token_ids=(60, 3), rope_theta=500.0, norm_epsilon=1e-3)
    ours.save_pretrained(tmp_path)
    again = load(tmp_path, torch.float32)
    assert again.config == ours.config
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert difference(ours, AutoModelForCausalLM.from_pretrained(tmp_path).eval()) < 1e-4


def test_what_a_config_lacks_is_as_in_transformers(saved):
    from transformers import LlamaConfig

    lacking = dict.fromkeys(
        ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "bos_token_id"],
        "missing",
    )
    for values in (lacking, dict.fromkeys(lacking)):  # null is as good as missing
        ours = saved(**values, eos_token_id="missing")
        theirs = LlamaConfig(hidden_size=16, num_attention_heads=4)
        assert ours.n_kv_head == theirs.num_key_value_heads == 4 and ours.head_dim == theirs.head_dim == 4
        assert ours.norm_epsilon == theirs.rms_norm_eps and not ours.tied_head and not theirs.tie_word_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
        assert ours.bos_token_id == 2  # an empty prompt needs one


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0},
        {"rope_theta": "missing", "rope_parameters": {"rope_type": "default", "rope_theta": 77}},
        {"rope_theta": 77.0, "rope_scaling": None},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 10.0}},
        {"rope_theta": 10.0, "rope_parameters": {"rope_theta": 77.0}},
    ],
)
def test_theta_in_older_and_newer_files(saved, rope):
    assert saved(**rope).rope_theta == 77


@pytest.mark.parametrize(
    "values, words",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported is 'gpt2' or 'llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"mlp_bias": True}, "mlp_bias is True; supported is False"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; supported is False or True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; supported is"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'; supported is"),
        ({"is_causal": False}, "is_causal is False; supported is True"),
        ({"rope_parameters": {"rope_theta": 10.0}, "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type"),
        ({"rope_parameters": ["default"]}, "rope_parameters: rope_type is ['default']; supported is"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be above 0 and at most"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rms_norm_eps": 2}, "rms_norm_eps is 2; it must be above 0 and at most 1"),
        ({"vocab_size": "missing"}, "vocab_size is None; it must be an integer from 1 to 1000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": 10**9}, "intermediate_size is 1000000000; it must be an integer from 1 to 1000000"),
        ({"head_dim": 5}, "4 heads, 2 of them with keys, of 5 numbers each; num_attention_heads must be a multiple"),
        ({"num_key_value_heads": 3}, "4 heads, 3 of them with keys, of 6 numbers each"),
        ({"num_attention_heads": 20, "head_dim": None}, "of 0 numbers each"),
        ({"eos_token_id": 61}, "eos_token_id is 61; it must be an id below 61, or a list of them"),
        ({"bos_token_id": -1}, "bos_token_id is -1; it must be an id below 61, or a list of them"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(saved, values, words):
    with pytest.raises(UserError) as error:
        saved(**values)
    assert words in str(error.value) and "config.json" in str(error.value)


def test_a_wrong_architecture_is_named_before_its_weights_are_fetched(saved, tmp_path):
    from load import load_model

    saved()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(UserError, match="model_type is 'mixtral'; supported is 'gpt2' or 'llama"):
        load_model(tmp_path)


def test_files_may_hold_what_is_not_read(peer):
    from safetensors.torch import load_file, save_file

    theirs, directory = peer(tie_word_embeddings=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors
        | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
        file,
    )
    assert difference(load(directory), theirs) < 1e-10


def test_still_a_gpt2_is_loaded_as_before():
    from load import load_model

    assert type(load_model(CHECKPOINTS / "stories-draft")) is GPT
