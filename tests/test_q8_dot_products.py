"""Each processor's own instructions for blocks of bytes."""

import platform
import re

import pytest
import torch
from natives import quantized_in_blocks

# By machine: flags for some processors, and the instruction that multiplies their bytes.
INSTRUCTIONS = {
    "x86_64": [
        ("-mavx512f -mavx512bw -mavx512vnni", "vpdpbusd"),
        ("-mavx512f -mavx512bw", "vpmaddubsw"),
        ("-mavx2 -mfma", "vpmaddubsw"),
    ],
    "aarch64": [("-march=armv8.2-a+dotprod", "sdot")],
}


@torch.inference_mode()
def check_extremes(name: str, *extremes: int) -> None:
    """Sums of the largest numbers do not overflow: pairs of products are added in 16 bits."""
    from test_packed_q8 import block_layer, in_c

    for extreme in extremes:
        layer = block_layer(name, 40, 96, extreme)
        for sign in (1, -1):
            x = torch.full((3, 96), 127.0) * sign
            x[1, ::2] *= -1
            assert torch.equal(in_c(layer)(x), layer(x)), (extreme, sign)


@pytest.mark.parametrize("number", range(3))
def test_four_products_take_an_instruction(compiled, tmp_path, number):
    """The processor's own, which a compiler does not make of a loop over bytes."""
    from native import build

    known = INSTRUCTIONS.get(platform.machine(), [])
    if number >= len(known):
        pytest.skip("nothing to look for")
    flags, instruction = known[number]
    source, result = tmp_path / "product.c", tmp_path / "product.s"
    lines = f'#include "{build.SOURCE}"', "Sums product(Sums sums, int32_t x, ByteVector w) {"
    source.write_text("\n".join([*lines, "  return dot_add_q8(sums, x, w);", "}", ""]))
    options = "-std=gnu11", "-O0", "-w", *flags.split(), "-S", str(source), "-o", str(result)
    build.run_compiler([*build.default_compiler(), *options])
    _, text = re.split(r"^_?product:", result.read_text(), flags=re.M)
    assert instruction in re.split(r"\sret", text)[0]


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_K"])
def test_still_sums_do_not_overflow(name, target):
    check_extremes(name, -128, 127)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_K"])
def test_still_outputs_have_torchs_bits(name, target):
    from test_packed_q8 import check_outputs

    check_outputs(name)


def test_still_passes_have_the_bits_of_each_processor(tiny_llama, compiled):
    from test_packed_q8 import check_passes

    check_passes(quantized_in_blocks(tiny_llama(dtype=torch.float32)))
