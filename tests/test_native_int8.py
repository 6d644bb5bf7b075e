"""Lesson 24: int8 products in C, equal bit for bit to those of lesson 23, however and wherever gpt.c was compiled."""

import math

import pytest
import torch
from conftest import CHECKPOINTS

import infer

PLAIN, AVX2 = (), ("-mavx2", "-mfma")  # what to compile for, instead of this processor
HAS_AVX2 = torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))
TARGETS = [None, PLAIN, *([AVX2] if HAS_AVX2 else [])]


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(params=TARGETS, ids=str)
def target(request, monkeypatch):
    """All code in this test is compiled for that processor."""
    from native import build

    library = build.load(request.param)
    monkeypatch.setattr(build, "load", lambda *_: library)
    return request.param


def layer(out: int, size: int, bias: bool = True, seed: int = 0):
    """The arguments of int8_linear after x, random."""
    from int8 import quantize

    generator = torch.Generator().manual_seed(seed)
    weight, scale = quantize(torch.randn(out, size, generator=generator))
    return weight, scale, torch.randn(out, generator=generator) if bias else None


def random_rows(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)


def test_the_command_line_takes_the_backend(cli):
    args = ("--prompt", "Once upon a time", "--max-new-tokens", 12, "--dtype", "int8")
    code, out, _ = cli(*args, "--backend", "native")
    assert (code, out) == cli(*args)[:2] and code == 0


@pytest.mark.parametrize("out, size", [(1024, 256), (256, 1024), (61, 16), (7, 3), (1, 1), (3, 1000), (5, 4096)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17])
def test_equal_to_torch_bit_for_bit(target, out, size, rows):
    from int8 import int8_linear
    from native import linear

    weight, scale, bias = layer(out, size, bias=rows % 2 == 1)
    x = random_rows(rows, size)
    assert torch.equal(linear.int8_linear(x, weight, scale, bias), int8_linear(x, weight, scale, bias))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_at_any_number_of_threads(threads):
    from int8 import int8_linear
    from native import linear

    before, (weight, scale, bias), x = torch.get_num_threads(), layer(100, 40), random_rows(9, 40)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(linear.int8_linear(x, weight, scale, bias), int8_linear(x, weight, scale, bias))
    finally:
        torch.set_num_threads(before)


def test_extreme_sums(target):
    from int8 import int8_linear
    from native import linear

    for sign in (1, -1):
        weight, scale, x = torch.full((2, 6400), 127 * sign).to(torch.int8), torch.ones(2), torch.ones(3, 6400)
        assert torch.equal(linear.int8_linear(x, weight, scale), int8_linear(x, weight, scale))


def test_halves_and_tiny_numbers_round_as_in_torch(target):
    from int8 import int8_linear
    from native import linear

    weight, scale, bias = layer(8, 6)
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -126.5], [0.0] * 6, [1e-45, -1e-40, 1e-38, 0, 0, 0]])
    assert torch.equal(linear.int8_linear(x, weight, scale, bias), int8_linear(x, weight, scale, bias))
    large = scale * 1e38  # so that what is left of tiny numbers can be seen
    tiny = linear.int8_linear(x, weight, large)
    assert torch.equal(tiny, int8_linear(x, weight, large)) and tiny[2].any()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(target, bad):
    from native import linear

    x = torch.ones(2, 70)
    x[1, 3] = bad
    y = linear.int8_linear(x, *layer(40, 70))
    assert y[0].isfinite().all() and not y[1].isfinite().any()


def test_it_is_an_operator_of_torch():
    from native import linear

    weight, scale, bias = layer(10, 6)
    x = random_rows(12, 6).view(2, 6, 6).transpose(0, 1)  # not contiguous
    y = torch.ops.native.int8_linear(x, weight, scale, bias)
    assert y.shape == (6, 2, 10) and torch.equal(y[4, 1], linear.int8_linear(x[4, 1], weight, scale, bias))
    torch.library.opcheck(linear.operator, (x, weight, scale, bias), test_utils=("test_schema", "test_faketensor"))
    assert linear.int8_linear(x[:0], weight, scale).shape == (0, 2, 10)
    every_second = random_rows(3, 12)[:, ::2]
    assert torch.equal(
        linear.int8_linear(every_second, weight, scale), linear.int8_linear(every_second + 0, weight, scale)
    )


@pytest.mark.parametrize("which", ["x", "x dtype", "weight", "scale", "bias", "bias dtype", "weight strides"])
def test_nothing_outside_its_arrays_is_read(which):
    from native import linear

    x, (weight, scale, bias) = random_rows(2, 6), layer(10, 6)
    wrong = {
        "x": (x[:, :5], weight, scale, bias),
        "x dtype": (x.double(), weight, scale, bias),
        "weight": (x, weight.float(), scale, bias),
        "scale": (x, weight, scale[:9], bias),
        "bias": (x, weight, scale, bias[:9]),
        "bias dtype": (x, weight, scale, bias.half()),
        "weight strides": (x, torch.zeros(6, 10, dtype=torch.int8).t(), scale, bias),
    }
    with pytest.raises(ValueError, match="native code reads contiguous torch"):
        linear.int8_linear(*wrong[which])


def test_the_products_of_a_model_are_native(monkeypatch):
    from infer import generate
    from model import GPT
    from native import linear, use_native
    from sampling import SamplingParams

    model, seen, load = GPT.from_pretrained(CHECKPOINTS / "stories-draft", torch.int8), [], linear.build.load
    monkeypatch.setattr(linear.build, "load", lambda *args: seen.append(1) or load(*args))
    params, texts = SamplingParams(max_new_tokens=20), []
    for _ in range(2):
        seen.clear()
        texts.append(list(generate(model, [[5, 6, 7]], params, use_cache=False)))
        assert len(seen) == 20 * 9 * len(texts) - 20 * 9  # products in a pass: four in each layer, and the head
        use_native(model)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "compiler, words",
    [("no-such-compiler", "cannot be run: No such file"), ("false", "failed: no reason given")],
)
def test_without_a_compiler_torch_computes(fresh, cli, monkeypatch, compiler, words):
    monkeypatch.setenv("CC", compiler)
    args = ("--prompt", "Once", "--max-new-tokens", 3, "--dtype", "int8")
    code, out, err = cli(*args, "--backend", "native")
    assert (code, out) == cli(*args)[:2] and err.count("\n") == 2
    assert err.startswith(f"note: --backend native: the C compiler {compiler} {words}")
    assert err.splitlines()[0].endswith("; torch computes instead")


def test_a_note_says_what_is_not_there(cli, monkeypatch):
    for kernel, noted in (("AVX2", False), ("plain C", True), ("AVX2, one thread", True)):
        monkeypatch.setattr(infer, "kernel", lambda kernel=kernel: kernel)
        code, _, err = cli("--max-new-tokens", 1, "--dtype", "int8", "--backend", "native")
        note = f"note: --backend native: without what makes it fast: {kernel}\n"
        assert code == 0 and err.startswith(note) == noted and err.count("note") == noted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_are_refused(cli, dtype):
    code, out, err = cli("--backend", "native", "--dtype", dtype)
    assert code == 2 and out == "" and err.count("\n") == 1 and "--backend native is for --device cpu" in err
