"""Rounding of a logit to 16 bits, and of a weight row to int8."""

from types import SimpleNamespace as Record

import torch

from pictures import runs, scene
from pictures.scene import signed, word
from quantisation.int8 import quantize

FORMATS = {  # name -> dtype, integer dtype of the same size, exponent bits
    "float32": (torch.float32, torch.int32, 8),
    "float16": (torch.float16, torch.int16, 5),
    "bfloat16": (torch.bfloat16, torch.int16, 8),
}


def record_rounded(prompt: str) -> Record:
    """Record the largest logit after a prompt in each format."""
    logits = runs.next_logits(runs.encode(prompt, 200))
    best = logits.argmax().item()
    rows = []
    for name, (dtype, integer, _) in FORMATS.items():
        value = logits[best].to(dtype)
        width = 8 * value.itemsize
        rows.append((name, f"{value.view(integer).item() % 2**width:0{width}b}", value.item()))
    return Record(
        token=runs.token_text(best),  # token of the logit
        rows=rows,  # (format, bits, value)
    )


def draw_rounded(record: Record) -> scene.Scene:
    exact = record.rows[0][2]
    rows = []
    for name, bits, value in record.rows:
        exponent = FORMATS[name][2]
        kinds = ["bad"] + ["second"] * exponent + ["first"] * (len(bits) - 1 - exponent)
        cells = [scene.Cell(kind, bit) for kind, bit in zip(kinds, bits)]
        cells += [scene.Cell()] * (32 - len(bits))
        off = f", off by {abs(value - exact):.2g}" if value != exact else ""
        rows.append(scene.Row(name, cells, f"{value:.8g}{off}"))
    half, brain = (abs(row[2] - exact) for row in record.rows[1:])
    return scene.Scene(
        f"Half the bytes, nearly the same number: float16 is off by {half:.2g} and has a maximum "
        f"of {torch.finfo(torch.float16).max:,.0f}; bfloat16 is off by {brain:.2g} and keeps the "
        "range of float32.",
        scene.Panel(
            f"The logit of {word(record.token)}, bit by bit",
            scene.Cells(rows),
            "Here one number is rounded once. In the lesson weights and all activations are "
            "rounded, so a whole pass is off by more.",
            {"bad": "sign", "second": "exponent: the range", "first": "fraction: the digits"},
            wide=True,
        ),
    )


def record_weights(prompt: str) -> Record:
    """Quantize the last prompt token's embedding, which is also its row of the output head."""
    row = runs.load().wte.weight[runs.encode(prompt, 200)[-1]]
    values, scale = quantize(row)
    return Record(weights=row.tolist(), values=values.tolist(), scale=scale.item())


def draw_weights(record: Record) -> scene.Scene:
    largest = max(range(len(record.values)), key=lambda at: abs(record.values[at]))
    shown = sorted({*range(5), largest})
    off = max(abs(w - v * record.scale) for w, v in zip(record.weights, record.values))
    rows = []
    for at in shown:
        w, value = record.weights[at], record.values[at]
        kind = "second" if at == largest else ""
        cells = signed(w, 5), signed(value, 0), signed(value * record.scale, 5)
        rows.append(scene.Row(f"weight {at}", [scene.Cell(kind, text) for text in cells]))
    count = len(record.values)
    memory = [
        scene.Bar("float32", [(4 * count, "first")], f"{4 * count:,} bytes"),
        scene.Bar("int8", [(count, "first"), (4, "second")], f"{count + 4} bytes"),
    ]
    return scene.Scene(
        f"A row of {count} weights takes {count + 4} bytes instead of {4 * count:,}: one byte "
        "per weight and one scale. No weight changes by more than half a step.",
        scene.Panel(
            "Some of the weights, and the largest",
            scene.Cells(rows, ["weight", "int8", "int8 \u00d7 scale"]),
            f"scale = largest / 127 = {record.scale:.6f}. int8 = weight / scale, rounded. The "
            f"largest error is {off:.6f}, at most scale / 2.",
            {"second": "the largest: it becomes \u00b1127"},
        ),
        scene.Panel(
            "The row in memory",
            scene.Bars(memory),
            key={"first": "weights", "second": "the scale, 4 bytes"},
        ),
    )


PICTURES = {
    "fp16-bf16": scene.Picture("Once upon a time", record_rounded, draw_rounded),
    "int8-weights": scene.Picture("Once upon a time", record_weights, draw_weights),
}
