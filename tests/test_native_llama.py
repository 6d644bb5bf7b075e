"""Lesson 36: a Llama's pass in C gives the logits of the eager one, and texts stay the same."""

import copy
import random

import pytest
import torch
from conftest import random_tokens, run_rows, save_speaking
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_int8 import TARGETS
from test_native_step import MODES, both, check_rows_of_any_past, in_pieces, native

from cache import KVCache, Span
from errors import UserError
from int8 import to_int8
from llama import Llama
from model import Linear, TorchRunner

pytestmark = pytest.mark.usefixtures("compiled")


def any_llama(tiny_llama, seed: int) -> Llama:
    """A random shape, of sizes that are no multiples of a vector's; half of them have biases."""
    choose = random.Random(seed).choice
    kv_heads = choose([1, 1, 2, 3])
    shape = {
        "vocab_size": choose([11, 61, 300]),
        "n_layer": choose([1, 2, 3]),
        "n_head": kv_heads * choose([1, 2, 3]),
        "n_kv_head": kv_heads,
        "head_dim": choose([2, 6, 16, 20, 64]),
        "n_embd": choose([3, 16, 33, 51, 64, 130]),
        "n_inner": choose([1, 24, 57, 64, 130]),
        "norm_epsilon": choose([1e-6, 0.1]),
        "rope_theta": choose([10.0, 10000.0]),
        "tied_head": choose([False, True]),
    }
    model = tiny_llama(dtype=torch.float32, **shape)
    generator = torch.Generator().manual_seed(seed)
    if choose([False, True]):
        for block in model.layers:
            for name in choose([("q_proj",), ("v_proj",), ("q_proj", "k_proj", "v_proj")]):
                weight = getattr(block.self_attn, name).weight
                setattr(block.self_attn, name, Linear(weight.shape[1], len(weight)))
    model.init_weights(std=0.8 * shape["n_embd"] ** -0.5, generator=generator)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def llama_checkpoint(tiny_llama, tmp_path):
    """A directory with a random Llama that speaks the embedded models' vocabulary."""
    return save_speaking(tiny_llama, tmp_path, eos_token_id=4095)


@pytest.mark.parametrize("backend", [(), ("--backend", "native")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_command_line_takes_the_backend(cli, llama_checkpoint, monkeypatch, backend, dtype):
    from native import NativeRunner

    passes = []
    compute = NativeRunner.compute

    def counted(*arguments):
        passes.append(1)
        return compute(*arguments)

    monkeypatch.setattr(NativeRunner, "compute", counted)
    args = ("--model", llama_checkpoint, "--prompt", "Once upon a time", "--prompt", "Lily")
    args += ("--max-new-tokens", 30, "--ignore-eos", "--dtype", dtype)
    code, out, err = cli(*args, *backend)
    assert code == 0 and out.startswith("Once upon a time") and "note" not in err
    count = len(passes)
    assert count >= 30
    if dtype == "float32":
        assert out == cli(*args, "--backend", "torch")[1] and len(passes) == count


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_logits_of_any_form_in_any_pieces(tiny_llama, target, seed):
    """Those of float64, as near as the eager pass is."""
    model = any_llama(tiny_llama, seed)
    texts = torch.tensor([random_tokens(16, model.config.vocab_size, seed=row) for row in range(2)])
    expected = copy.deepcopy(model).double()(texts).float()
    native(model, target)
    for size in (1, 2, 3, 5, 7, 8):
        torch.testing.assert_close(in_pieces(model, texts, size), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_activations_far_from_zero(tiny_llama, target):
    """The exponentials of SwiGLU and of the softmax leave the range of float32 there."""
    model = tiny_llama(dtype=torch.float32)
    texts = torch.tensor([random_tokens(16)])
    model.layers[0].mlp.gate_proj.weight.mul_(torch.linspace(-200, 200, 24)[:, None])
    model.layers[1].self_attn.q_proj.weight.mul_(200)
    expected = copy.deepcopy(model).double()(texts).float()
    logits = in_pieces(native(model, target), texts, 4)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_angles_are_those_of_torch(tiny_llama):
    """One is 150,000 radians at the last position: computed in another way it is off by 0.01."""
    model = tiny_llama(dtype=torch.float32, rope_theta=1e-6)
    texts = torch.tensor([random_tokens(16)])
    expected = copy.deepcopy(model).double()(texts).float()
    torch.testing.assert_close(in_pieces(native(model), texts, 3), expected, rtol=2e-5, atol=2e-5)


WIDE = {"n_embd": 192, "n_head": 6, "head_dim": 32, "n_inner": 300, "block_size": 64}


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
def test_int8_logits_stay_close(tiny_llama, tied):
    """Norms, softmax and SwiGLU round differently: an activation may become another int8."""
    model = tiny_llama(dtype=torch.float32, tied_head=tied, **WIDE)
    to_int8(model.init_weights(std=0.05, generator=torch.Generator().manual_seed(0)))
    assert (model.lm_head.scale is model.embed_tokens.scale) == tied
    texts = torch.tensor([random_tokens(64)])
    expected = model(texts)
    error = (in_pieces(native(model), texts, 10) - expected).abs()
    assert error.max() < 0.1 and error.mean() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"head_dim": 20, "n_embd": 51, "n_inner": 57}], ids=str)
def test_int8_logits_have_the_same_bits_on_every_processor(tiny_llama, shape):
    """In pieces of any size, too."""
    model = to_int8(tiny_llama(dtype=torch.float32, **shape))
    texts = torch.tensor([random_tokens(16, seed=row) for row in range(2)])
    expected = in_pieces(native(copy.deepcopy(model)), texts, 8)
    for target in TARGETS:
        compiled = native(copy.deepcopy(model), target)
        for size in (1, 3, 8):
            assert torch.equal(in_pieces(compiled, texts, size), expected)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 1}, {"n_kv_head": 6}], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_the_same_bits_at_any_number_of_threads(tiny_llama, kind, shape):
    """With a key for each query, threads do not wait between the two; with fewer they do."""
    model = tiny_llama(dtype=torch.float32, **{"n_embd": 64, "n_head": 6, "n_inner": 96} | shape)
    model = native(to_int8(model) if kind == torch.int8 else model)
    texts = torch.tensor([random_tokens(12, seed=row) for row in range(3)])
    before = torch.get_num_threads()
    expected = in_pieces(model, texts, 4)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            for _ in range(5):
                assert torch.equal(in_pieces(model, texts, 4), expected)
    finally:
        torch.set_num_threads(before)


@given(st.data())
@settings(max_examples=30)
@torch.inference_mode()
def test_rows_of_any_past_in_any_order(tiny_llama, data):
    """Each row's logits are those of its own text, whatever is beside it."""
    check_rows_of_any_past(tiny_llama, data, tolerance=3e-5)


@pytest.mark.parametrize("mode", MODES)
def test_texts_of_ragged_rows(tiny_llama, mode):
    prompts = [random_tokens(3), random_tokens(14, seed=1), [], random_tokens(25, seed=2)]

    def texts(model):
        generator = torch.Generator().manual_seed(0)
        return run_rows(
            model, prompts, generator=generator, ignore_eos=mode != "sampled", **MODES[mode]
        )

    eager, compiled = both(tiny_llama)
    assert texts(compiled) == texts(eager)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["a Llama", "a GPT-2"])
def test_speculation(tiny, tiny_llama, drafter, gamma, temperature):
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=40, ignore_eos=True, temperature=temperature, presence_penalty=0.3
    )

    def passes(use):
        target = use(tiny_llama(dtype=torch.float32))
        kind = tiny if drafter == "a GPT-2" else tiny_llama
        draft = use(kind(dtype=torch.float32, n_layer=1))
        generator = torch.Generator().manual_seed(0)
        return list(generate_speculative(target, draft, [3], params, gamma, generator))

    assert passes(native) == passes(lambda model: model)


def test_beams(tiny_llama):
    from infer import beam_search

    eager, compiled = both(tiny_llama)
    texts, scores = zip(*beam_search(eager, random_tokens(6), 3, max_new_tokens=24))
    same_texts, same_scores = zip(*beam_search(compiled, random_tokens(6), 3, max_new_tokens=24))
    assert same_texts == texts and same_scores == pytest.approx(scores, abs=1e-4)


def test_passes_with_a_cache_are_native(tiny_llama):
    eager, model = both(tiny_llama, block_size=32)
    prompts = [random_tokens(19), random_tokens(7, seed=1)]
    expected = run_rows(eager, prompts, max_new_tokens=20, ignore_eos=True)
    model.hidden = None
    assert run_rows(model, prompts, max_new_tokens=20, ignore_eos=True) == expected


def test_weights_may_change_in_place(tiny_llama):
    eager, model = both(tiny_llama)
    prompt = [random_tokens(4)]
    before = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    for each in (eager, model):
        with torch.no_grad():
            each.norm.weight.mul_(-1)
    after = run_rows(model, prompt, max_new_tokens=20, ignore_eos=True)
    assert after == run_rows(eager, prompt, max_new_tokens=20, ignore_eos=True) != before


def test_the_table_of_rotations_outlives_its_cache(tiny_llama):
    from llama import rotations

    eager, model = both(tiny_llama)
    prompt = [random_tokens(4)]
    expected = run_rows(eager, prompt, max_new_tokens=12, ignore_eos=True)
    rotations.cache_clear()
    others = [
        torch.full((64, 1, 6), torch.nan) for _ in range(1000)
    ]  # in its memory, if it is free
    assert run_rows(model, prompt, max_new_tokens=12, ignore_eos=True) == expected and others


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "where",
    [
        "embed_tokens.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.input_layernorm.weight",
        "norm.weight",
    ],
)
def test_logits_that_are_not_finite_are_noticed(tiny_llama, where, bad):
    model = tiny_llama(dtype=torch.float32)
    with torch.no_grad():
        dict(model.named_parameters())[where].view(-1)[7] = bad
    with pytest.raises(UserError, match="logits that are NaN or infinite"):
        run_rows(native(model), [[0, 1, 2]], max_new_tokens=2)


@pytest.mark.parametrize(
    "shape", [{"n_layer": 1}, {"n_kv_head": 4}, {"n_kv_head": 1}, {"head_dim": 4}]
)
def test_the_cache_of_another_model_is_refused(tiny_llama, shape):
    model = native(tiny_llama(dtype=torch.float32))
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        other = KVCache(tiny_llama(dtype=torch.float32, **shape), 1)
        model.runner.compute(other.storage, [Span([0], 0, [1])], [1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_weights_are_refused(tiny_llama, dtype):
    with pytest.raises(ValueError, match="native code reads contiguous torch.float32"):
        native(tiny_llama(dtype=dtype))


def test_the_table_of_rotations_grows_with_use(tiny_llama):
    """A table for a million positions would be 48 MB here; passes of another thread keep theirs."""
    eager, model = both(tiny_llama, block_size=10**6)
    prompt = [random_tokens(4)]
    expected = run_rows(eager, prompt, max_new_tokens=200, ignore_eos=True)
    assert run_rows(model, prompt, max_new_tokens=200, ignore_eos=True) == expected
    assert len(model.runner.rotations.cos) < 1000


@pytest.mark.parametrize("change", [{"n_kv_head": 3}, {"n_kv_head": 8}], ids=str)
def test_heads_that_cannot_share_keys_are_refused(tiny_llama, change):
    model = tiny_llama(dtype=torch.float32, **change)
    with pytest.raises(ValueError, match="4 heads cannot share the keys of"):
        native(model)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
def test_a_layer_of_another_width_is_refused(tiny_llama, name):
    """Also in a later layer than the first, and with all its tensors in step."""
    model = tiny_llama(dtype=torch.float32)
    for parent in (model.layers[1].self_attn, model.layers[1].mlp):
        old = getattr(parent, name, None)
        if old is not None:
            new = Linear(old.in_features, old.out_features + 6, bias=old.bias is not None)
            setattr(parent, name, new)
    with pytest.raises(ValueError, match="native code reads contiguous torch"):
        native(model)


def test_another_architecture_is_refused(tiny_llama):
    """One that computes something else, though it may have the same layers."""
    from native import use_native

    class Mamba(Llama):
        pass

    model = to_int8(tiny_llama(dtype=torch.float32))
    model.__class__ = Mamba
    with pytest.raises(ValueError, match="native code computes GPT and Llama; this is Mamba"):
        use_native(model)
    assert type(model.runner) is TorchRunner
