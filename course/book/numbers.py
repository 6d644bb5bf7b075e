"""Pictures of lessons 12 and 24: what is left of a number in 16 bits, and of weights in 8."""

from typing import NamedTuple

import torch

from book import recordings
from book.draw import Drawing, Picture, box, key, panel, panels, signed, svg, token
from int8 import quantize


class Products(NamedTuple):
    """A row of weights times an input, exactly and in int8."""

    bytes: tuple[int, int, int]  # of the row in float32, in int8, and of its scale
    weights: list[tuple[float, int, bytes, bytes]]  # w, w / scale rounded, the bytes of both
    scale: float
    exact: float  # the sum of all products
    rounded: float
    sum: int  # of the products of whole numbers
    x_scale: float


@torch.inference_mode()
def first_product(prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of the first MLP, (out, in), and its input at the last position of a prompt."""
    layer = recordings.load().h[0].mlp.c_fc
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
    recordings.next_logits(recordings.encode(prompt, 200))
    hook.remove()
    return layer.weight.detach(), seen[0]


@torch.inference_mode()
def record_products(prompt: str) -> Products:
    """The first output of that product."""
    weight, x = first_product(prompt)
    w = weight[0]
    values, scale = quantize(w)
    x_values, x_scale = quantize(x)
    sums = (x_values.int() * values.int()).sum().item()
    largest = w.abs().argmax().item()
    weights = []
    for at in (*range(3), largest):
        own = (w[at], values[at])
        held = (in_order(each[at : at + 1]) for each in (w, values))
        weights.append((*(number.item() for number in own), *held))
    return Products(
        (w.nbytes, values.nbytes, scale.nbytes),
        weights,
        scale.item(),
        (x @ w).item(),
        (sums * x_scale * scale).item(),
        sums,
        x_scale.item(),
    )


def in_order(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, the first one that of the sign."""
    return tensor.numpy().tobytes()[::-1]


def draw_products(record: Products) -> Drawing:
    def shown(held: bytes, kind: str) -> str:
        return "".join(token(f"{byte:02x}", kind) for byte in held)

    rows = ""
    for w, value, whole, one in record.weights:
        number = f"<b>{signed(value, 0)}</b>"
        cells = signed(w, 4), shown(whole, ""), number, shown(one, "new")
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    head = '<th>w</th><th>float32</th><th colspan="2">int8</th>'
    table = (
        f'<div class="scroll"><table class="figures"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    whole, small, one = record.bytes
    count = whole // 4
    exact, rounded = signed(record.exact, 4), signed(record.rounded, 4)
    sums = f"{record.sum:,}".replace("-", "\u2212")
    body = panels(
        panel(
            f"float32: {count} weights, {whole:,} bytes",
            in_memory([4] * count)
            + f'<p class="title one">int8: {small} bytes, and {one} for the scale</p>'
            + in_memory([1] * small, one)
            + key(first="a weight, as wide as its bytes", second="the scale of the row"),
        ),
        panel(
            f"{len(record.weights) - 1} of these {count} weights and the largest, a box a byte",
            table,
            f"scale = the largest / 127 = {record.scale:.6f}; int8 = w / scale, rounded. The row "
            f"times an input is {exact} in float32. In int8 the input is rounded too, with a scale "
            f"of its own: {sums} in whole numbers, times the scales of row and input {rounded}.",
        ),
    )
    caption = (
        f"A row of weights, the model&rsquo;s own numbers, in {small + one} bytes instead of "
        f"{whole:,}: one byte each, and one scale for all. Products of whole numbers add up "
        "exactly; the scales come last."
    )
    text = (
        f"A row of {count} weights in memory, {whole} bytes in float32 and {small + one} in int8; "
        f"a table of some; and the sum of all products: {record.exact:.4f} in float32, "
        f"{record.rounded:.4f} with int8."
    )
    return Drawing(body, caption, text)


def in_memory(sizes: list[int], scale: int = 0, byte: int = 7, line: int = 64) -> str:
    """A box for each number of so many bytes, in lines of so many, and one for a scale."""
    body = ""
    at = 0
    for size, kind in [*((size, "first") for size in sizes), *[(scale, "second")] * (scale > 0)]:
        body += box(at % line * byte, at // line * 10, size * byte - 1, 9, kind)
        at += size
    return svg(line * byte, -(-at // line) * 10, body, "bytes")


PICTURES = {  # slug of a lesson -> its picture
    "int8-weights": Picture(
        "Once upon a time",
        record_products,
        draw_products,
        own="A prompt of your own is another input for the same weights",
    ),
}
