"""Keys and values in float16 or int8, each rounded by itself."""

import functools
import math

import numpy
import pytest
import torch
from conftest import is_one_line, record
from engines import own_texts
from natives import in_pieces, random_numbers, random_texts
from ranks import SMALL, run_engine_script
from replicas import make_engine as load_replica
from replicas import parse, save_small

import infer
import infer_engine
import infer_speculative
from cache import KVCache, cached_attention, stored_head_dim, to_cache_dtype
from engine.cache import PagedCache
from engine.engine import Engine
from errors import UserError
from infer import beam_search
from infer_speculative import generate_speculative
from sampling import SamplingParams

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)


def hadamard(n: int) -> numpy.ndarray:
    pair = numpy.array([[1, 1], [1, -1]])
    return functools.reduce(numpy.kron, [pair] * (n.bit_length() - 1))


def restored(stored: torch.Tensor, dim: int) -> numpy.ndarray:
    """What int8 numbers with a scale behind them stand for, rotated back, in float64."""
    scale = stored[..., -4:].contiguous().numpy().view("<f4").astype(float)
    return stored[..., :dim].numpy() * scale @ hadamard(dim) / dim


def test_an_int8_key_by_hand():
    keys = random_numbers(5, 3, 8) * torch.tensor([1e-3, 1, 1e3])[:, None]
    stored = to_cache_dtype(keys, torch.int8)
    assert stored.dtype == torch.int8 and stored.shape == (5, 3, 12)
    scale = stored[..., -4:].contiguous().numpy().view("<f4")
    rotated = keys.numpy() @ hadamard(8)
    assert scale == pytest.approx(abs(rotated).max(-1, keepdims=True) / 127, rel=1e-6)
    assert abs(stored[..., :8].numpy() - rotated / scale).max() < 0.5001
    assert (stored[..., :8].abs().amax(-1) == 127).all()


@pytest.mark.parametrize("dim, width", [(1, 8), (5, 12), (6, 12), (7, 12), (8, 12), (64, 68)])
def test_stored_head_dim_aligns_the_scale(dim, width):
    assert stored_head_dim(dim, torch.int8) == width and stored_head_dim(dim, torch.float16) == dim
    stored = to_cache_dtype(random_numbers(2, dim), torch.int8)
    assert stored.shape == (2, width) and not stored[:, dim:-4].any()
    zeros = to_cache_dtype(torch.zeros(2, dim), torch.int8)
    assert (
        not zeros[:, :-4].any() and zeros[:, -4:].contiguous().view(torch.float32).isfinite().all()
    )


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_cached_attention_dequantizes_int8(q_dtype):
    q = random_numbers(2, 4, 3, 8).to(q_dtype)
    stored = [to_cache_dtype(random_numbers(2, 2, 5, 8, seed=seed), torch.int8) for seed in (1, 2)]
    mask = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    out = cached_attention(q, *stored, mask)
    keys, values = (numpy.repeat(restored(each, 8), 2, axis=1) for each in stored)
    scores = q.double().numpy() @ keys.swapaxes(2, 3) / math.sqrt(8)
    weights = numpy.exp(scores) * mask.numpy()
    expected = weights / weights.sum(-1, keepdims=True) @ values
    assert out.dtype == q_dtype
    bound = 0.02 if q_dtype == torch.bfloat16 else 1e-5
    assert out.double().numpy() == pytest.approx(expected, abs=bound)


@torch.inference_mode()
@DTYPES
def test_a_pass_stores_and_reads_rounded_keys_and_values(build, dtype):
    model = build(dtype=torch.float32)
    texts = random_texts(model, 2)
    exact, small = (KVCache(model, *texts.shape, *options) for options in ((), (dtype,)))
    for cache in (exact, small):
        model.runner.logits(model, cache, cache.spans(texts.tolist()), [1, 1])
    assert small.storage.dtype == dtype  # in the first layer: the same numbers, rounded
    assert torch.equal(small.storage[0], to_cache_dtype(exact.storage[0], dtype))
    model = model.double()
    exact = in_pieces(model, texts, 16)
    whole = in_pieces(model, texts, 16, dtype)
    assert 1e-6 < (whole - exact).abs().max() < 0.2
    for size in (1, 5):
        torch.testing.assert_close(in_pieces(model, texts, size, dtype), whole)


@torch.inference_mode()
@DTYPES
def test_beams_score_what_they_say(build, dtype):
    model = build()
    beams = beam_search(model, [1, 2, 3], 4, 6, ignore_eos=True, cache_dtype=dtype)
    assert len(beams) == 4
    for tokens, score in beams:
        logits = in_pieces(model, torch.tensor([[1, 2, 3, *tokens[:-1]]]), 8, dtype)[0, 2:]
        logprobs = logits.double().log_softmax(-1)[range(6), tokens]
        assert score == pytest.approx(logprobs.sum().item(), abs=1e-9)


@DTYPES
def test_speculation_equals_the_target(build, tiny, dtype):
    model = build()
    params = SamplingParams(24, ignore_eos=True)
    passes = generate_speculative(model, tiny(n_layer=1), [1, 2], params, cache_dtype=dtype)
    found = [token for step in passes for token in step.tokens]
    assert [found] == own_texts(model, [[1, 2]], params, None, dtype)


@pytest.mark.parametrize(
    "dtype, pages", [(None, 2**12), (torch.float16, 2**13), (torch.int8, 2**14)]
)
def test_an_engine_has_more_pages_where_memory_was_the_limit(tiny_llama, dtype, pages):
    engine = Engine(tiny_llama(block_size=8192), cache_dtype=dtype)
    assert engine.scheduler.pool.num_pages == engine.cache.storage.shape[2] == pages
    assert engine.config.cache_size(256) == 32 * 16  # all windows fit
    assert Engine(tiny_llama(block_size=256), cache_dtype=dtype).cache.storage.shape[2] == 32 * 16


@pytest.mark.parametrize("dtype, bytes_each", [(None, 32), (torch.float16, 16), (torch.int8, 12)])
def test_the_bytes_of_a_cache(tiny_llama, dtype, bytes_each):
    model = tiny_llama(dtype=torch.float32, head_dim=8)  # 2 layers, of 2 heads with keys
    keys = 2 * 2 * 2
    assert KVCache(model, 3, 10, dtype).storage.nbytes == 3 * 10 * keys * bytes_each
    assert PagedCache(model, 5, 4, None, dtype).storage.nbytes == 5 * 4 * keys * bytes_each
    with pytest.raises(UserError) as error:
        KVCache(model, 1, 10**12, dtype)
    assert f"a cache of {10**12 * keys * bytes_each:,} bytes does not fit" in str(error.value)
    assert " x 2 heads x " in str(error.value)
    with pytest.raises(UserError, match=f" {10**12 * 4 * keys * bytes_each:,} bytes "):
        PagedCache(model, 10**12, 4, None, dtype)


@pytest.mark.parametrize(
    "main, options",
    [(infer.main, ()), (infer.main, ("--num-beams", 2)), (infer_engine.main, ())]
    + [(infer_speculative.main, ())],
)
def test_scripts_have_the_option(run_main, monkeypatch, main, options):
    arguments = ["--prompt", "Once upon a time", "--max-new-tokens", 12, *options]
    _, expected, _ = run_main(main, *arguments)
    classes = KVCache, PagedCache
    made = [record(monkeypatch, each, "prepare", lambda self, _: self.storage) for each in classes]
    code, out, err = run_main(main, *arguments, "--cache-dtype", "int8", "--backend", "torch")
    assert (code, out) == (0, expected), err
    assert {storage.dtype for each in made for storage in each} == {torch.int8}


def test_servers_have_the_option(tiny, tmp_path):
    args = parse(save_small(tiny, tmp_path / "model"), "--kv-cache-dtype", "int8")
    assert load_replica(args).cache.storage.dtype == torch.int8


def test_ranks_equal_one_process(engine_cli, tmp_path):
    arguments = [*SMALL, "--prompt", "Lily", "--max-new-tokens", 12, "--cache-dtype", "int8"]
    code, out, _ = engine_cli(*arguments)
    assert code == 0 and run_engine_script(2, tmp_path, *arguments)[0] == out


@pytest.mark.parametrize(
    "given, words",
    [
        (["--cache-dtype", "q8_0"], ["--cache-dtype", "'q8_0'", "'auto', 'float16', 'int8'"]),
        (["--cache-dtype", "int8", "--no-cache"], ["--cache-dtype conflicts with --no-cache"]),
    ],
)
def test_bad_input_is_one_line(cli, given, words):
    assert is_one_line(cli("--prompt", "One", *given), *words)
