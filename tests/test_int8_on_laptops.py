"""int8 products without AVX-512 VNNI. AVX-VNNI's are emulated too. Oracle: plain C's bits."""

import copy
import ctypes
from pathlib import Path

import pytest
import torch
from conftest import AVX2, PLAIN, TARGETS
from natives import in_pieces, native, quantised, random_rows, random_texts
from test_blocks import block_layer

from infer import generate
from native import build
from native.linear import NativeLinear
from quantisation.int8 import Int8Linear, load_weight_rows
from sampling import SamplingParams

# The header has the instruction in C, and counts in `dot_products`.
EMULATED = *AVX2, "-D__AVXVNNI__", "-include", str(Path(__file__).with_name("avx_vnni.h"))
REAL = *AVX2, "-mavxvnni"
CPU_INFO = Path("/proc/cpuinfo")
has_avx_vnni = CPU_INFO.exists() and "avx_vnni" in CPU_INFO.read_text("utf-8")
EMULATIONS = [EMULATED] if AVX2 in TARGETS else []  # none on ARM
EACH_LIBRARY = pytest.mark.parametrize("library", EMULATIONS, indirect=True, ids=["emulated"])
BUILDS = [*EMULATIONS, *([REAL] if has_avx_vnni else [])]


def products(library) -> int:
    """Return the number of emulated instructions so far."""
    return ctypes.c_int64.in_dll(library, "dot_products").value


@pytest.mark.parametrize(
    "library, name, zero_point",
    [*((target, "AVX-VNNI", 128) for target in BUILDS), *((AVX2, "AVX2", 0) for _ in EMULATIONS)],
    indirect=["library"],
    ids=str,
)
def test_groups_of_four_bytes(library, name, zero_point):
    """Unsigned where the instruction takes unsigned inputs."""
    kernel = (ctypes.c_char * 64).in_dll(library, "kernel").value.decode().split(",")[0]
    numbers = "int8_group", "activation_zero_point"
    found = [ctypes.c_int.in_dll(library, number).value for number in numbers]
    assert (kernel, found) == (name, [4, zero_point])


def layers(name: str, out: int, size: int, extreme=None):
    """Return a random layer, or one with equal weights."""
    if name != "int8":
        return block_layer(name, out, size, extreme)
    layer = Int8Linear(torch.nn.Linear(size, out))
    weight = random_rows(out, size) if extreme is None else torch.full((out, size), float(extreme))
    load_weight_rows(layer.state_dict(), "weight", slice(None), weight)
    return layer


@torch.inference_mode()
@EACH_LIBRARY
@pytest.mark.parametrize("name", ["int8", "Q8_0", "Q4_0", "Q4_1"])
def test_bits_of_a_layer(library, name):
    """One instruction multiplies 32 weights; the last of 37 outputs are in a panel of 16."""
    layer = layers(name, 37, 96)
    plain = NativeLinear(copy.deepcopy(layer), build.load(PLAIN))
    ours = NativeLinear(layer, library)
    for rows in (1, 2, 3, 6, 19):
        x = random_rows(rows, 96, seed=rows)
        before = products(library)
        assert torch.equal(ours(x), plain(x))
        assert products(library) - before == rows * 48 * 96 // 32


@torch.inference_mode()
@EACH_LIBRARY
@pytest.mark.parametrize("name, low, high", [("Q8_0", -128, 127), ("Q4_0", -8, 7), ("Q4_1", 0, 15)])
def test_sums_of_the_largest_numbers(library, name, low, high):
    for extreme in (low, high):
        layer = layers(name, 40, 96, extreme)
        x = torch.full((3, 96), 127.0)
        x[1] *= -1
        x[2, ::2] *= -1
        before = products(library)
        assert torch.equal(NativeLinear(copy.deepcopy(layer), library)(x), layer(x))
        assert products(library) > before


@EACH_LIBRARY
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_the_tokens_of_generate(tiny_llama, library, dtype):
    models = [quantised(tiny_llama(dtype=torch.float32), dtype) for _ in range(2)]
    prompts = random_texts(models[0], 3).tolist()
    steps = [
        list(generate(native(model, target), prompts, SamplingParams(8, seed=1)))
        for model, target in zip(models, (EMULATED, PLAIN))
    ]
    assert steps[0] == steps[1] and products(library)


@torch.inference_mode()
@pytest.mark.parametrize("target", BUILDS, ids=lambda target: target[4][2:])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_still_the_bits_of_passes(tiny_llama, target, dtype):
    models = [quantised(tiny_llama(dtype=torch.float32), dtype) for _ in range(2)]
    texts = random_texts(models[0], 3)
    ours, plain = (native(model, each) for model, each in zip(models, (target, PLAIN)))
    for size in (16, 5):
        assert torch.equal(in_pieces(ours, texts, size), in_pieces(plain, texts, size))
