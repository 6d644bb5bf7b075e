"""Picture of lesson 27: how often and in which order C reads weights."""

import re
from typing import NamedTuple

import torch

import lessons as course
from book import recordings
from book.draw import (
    Drawing,
    Picture,
    box,
    label,
    panel,
    panels,
    path,
    signed,
    svg,
)
from book.numbers import first_product
from errors import UserError


class Order(NamedTuple):
    """The weights of a few outputs, read in one order."""

    name: str
    lines: list[int]  # of memory, in the order in which they are read
    sums: list[float]  # of each output
    speed: int  # GB/s, as the lesson's message has it


class Reading(NamedTuple):
    orders: list[Order]
    bytes: int  # of the weights that a token is multiplied with


LINE = 16  # weights in the 64 bytes that memory brings at once


@torch.inference_mode()
def record_reading(prompt: str, outputs: int = 4) -> Reading:
    weight, x = first_product(prompt)
    try:
        _, all_lessons = course.read_main()
        message = course.message(course.find(all_lessons, "native-linear"))
    except course.LessonError as error:
        raise UserError(str(error)) from None
    slow, fast = re.search(r"\((\d+)\s+GB/s\s+instead\s+of\s+(\d+)", message).groups()
    starts = range(0, len(x), LINE)
    orders = {
        "One row after the other": ([(o, i) for o in range(outputs) for i in starts], fast),
        f"{outputs} rows side by side": ([(o, i) for i in starts for o in range(outputs)], slow),
    }
    found = []
    for name, (order, speed) in orders.items():
        lines = []
        sums = [0.0] * outputs
        for output, start in order:
            part = weight[output, start : start + LINE]
            lines.append(part.storage_offset() // LINE)
            sums[output] += (part @ x[start : start + LINE]).item()
        found.append(Order(name, lines, sums, int(speed)))
    layers = recordings.load().modules()
    linears = (layer.weight.nbytes for layer in layers if isinstance(layer, torch.nn.Linear))
    return Reading(found, sum(linears))


def draw_reading(record: Reading) -> Drawing:
    parts = []
    names = ("as C reads", "slower")
    for order, kind, name in zip(record.orders, ("good", "bad"), names):
        beside = sum(b == a + 1 for a, b in zip(order.lines, order.lines[1:]))
        note = f"The next line lies beside the last one {beside} of {len(order.lines) - 1} times."
        parts.append(panel(f"{order.name}: {name}", way_of(order, kind), note))
    fast, slow = record.orders
    body = panels(*parts) + (
        f'<p class="note">A cache line, what memory sends at once, is 64 bytes, {LINE} weights. A '
        "band is a row of weights, its places in memory from top to bottom. On the machine where "
        f"this code was first measured weights came at {fast.speed} GB/s one row after the "
        f"other, at {slow.speed} with {len(slow.sums)} rows side by side.</p>"
    )
    caption = (
        f"A token is multiplied with {record.bytes / 1e6:.1f} MB of weights, each used once, so "
        "memory sets the speed. It is fastest where it can foresee the next read: for few tokens "
        "C reads a row to its end, then the next."
    )
    text = "Which line of memory is read, over time: " + "; ".join(
        f"{order.name} {order.lines[:8]} and so on, {order.speed} GB/s" for order in record.orders
    )
    return Drawing(body, caption, text + f". Sums of {len(fast.sums)} outputs.")


def way_of(order: Order, kind: str, wide: int = 240, high: int = 36) -> str:
    """From left to right the reads, from top to bottom the places in memory, row by row."""
    outputs = len(order.sums)
    count = len(order.lines)
    body = ""
    for output, total in enumerate(order.sums):
        body += box(44, output * high, wide, high - 2, "empty")
        body += label(0, (output + 0.6) * high, f"row {output}")
        body += label(48 + wide, (output + 0.6) * high, signed(total))
    places = [
        (44 + (at + 0.5) / count * wide, (line + 0.5) / count * outputs * high)
        for at, line in enumerate(order.lines)
    ]
    body += path(places, kind) + label(44, outputs * high + 14, "time \u2192")
    body += label(48 + wide, outputs * high + 14, "sums")
    return svg(wide + 84, outputs * high + 18, body, "chart")


INPUT = "A prompt of your own is another input for the same weights"
PICTURES = {  # slug of a lesson -> its picture
    "native-linear": Picture("Once upon a time", record_reading, draw_reading, own=INPUT),
}
