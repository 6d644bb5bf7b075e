"""Lesson 12: what is left of a number in 16 bits."""

from typing import NamedTuple

import torch

from pictures import runs
from pictures.scene import Cell, Cells, Panel, Picture, Row, Scene, word


class Rounded(NamedTuple):
    """A number in three formats."""

    token: str  # whose logit it is
    rows: list[tuple[str, str, float]]  # format, its bits, and the value that they stand for


FORMATS = {  # name: dtype, its integer of the same size, bits of the exponent
    "float32": (torch.float32, torch.int32, 8),
    "float16": (torch.float16, torch.int16, 5),
    "bfloat16": (torch.bfloat16, torch.int16, 8),
}


def record_rounded(prompt: str) -> Rounded:
    """The largest logit after a prompt."""
    logits = runs.next_logits(runs.encode(prompt, 200))
    best = logits.argmax().item()
    rows = []
    for name, (dtype, integer, _) in FORMATS.items():
        value = logits[best].to(dtype)
        width = 8 * value.itemsize
        rows.append((name, f"{value.view(integer).item() % 2**width:0{width}b}", value.item()))
    return Rounded(runs.text_of(best), rows)


def draw_rounded(record: Rounded) -> Scene:
    exact = record.rows[0][2]
    rows = []
    for name, bits, value in record.rows:
        exponent = FORMATS[name][2]
        kinds = ["bad"] + ["second"] * exponent + ["first"] * (len(bits) - 1 - exponent)
        cells = [Cell(kind, bit) for kind, bit in zip(kinds, bits)]
        cells += [Cell()] * (32 - len(bits))
        off = f", off by {abs(value - exact):.2g}" if value != exact else ""
        rows.append(Row(name, cells, f"{value:.8g}{off}"))
    half, brain = (abs(row[2] - exact) for row in record.rows[1:])
    return Scene(
        f"Half the bytes, nearly the same number: float16 is off by {half:.2g} and ends at "
        f"{torch.finfo(torch.float16).max:,.0f}; bfloat16 is off by {brain:.2g} and keeps the "
        "range of float32.",
        [
            Panel(
                f"The logit of {word(record.token)}, bit by bit",
                Cells(rows),
                "Here one number is rounded once. In the lesson weights and all intermediate "
                "values are rounded, so a whole pass is off by more.",
                {"bad": "sign", "second": "exponent: the range", "first": "fraction: the digits"},
                wide=True,
            )
        ],
    )


PICTURES = {"fp16-bf16": Picture("Once upon a time", record_rounded, draw_rounded)}
