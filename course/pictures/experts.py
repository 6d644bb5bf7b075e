"""Experts that each token is routed to, and the bits of a GGUF block."""

from types import SimpleNamespace as Record

import torch

from loading.gguf_blocks import dequantize
from pictures import runs, scene
from pictures.scene import percent, signed, times, word

NAME = "stories-experts"
LAYER = 2  # the layer of the lesson's Try


@torch.inference_mode()
def record_routes(prompt: str) -> Record:
    """Record the experts and weights of each token in one layer."""
    ids = runs.encode(prompt, 20)
    model = runs.load(NAME)
    mixture = model.layers[LAYER].mlp
    seen = []
    hook = mixture.register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, -2)))
    model(torch.tensor([ids]))
    hook.remove()
    weights, experts = mixture.route(seen[0])
    return Record(
        tokens=runs.token_texts(ids),
        count=len(mixture.experts),
        chosen=mixture.top_k,
        weights=[dict(zip(*pair)) for pair in zip(experts.tolist(), weights.tolist())],
    )


def draw_routes(record: Record) -> scene.Scene:
    rows = []
    for text, weights in zip(record.tokens, record.weights):
        best = max(weights, key=weights.get)
        cells = [scene.Cell()] * record.count
        for expert, weight in weights.items():
            kind = "first" if expert == best else "second"
            cells[expert] = scene.Cell(kind, f"{100 * weight:.0f}")
        rows.append(scene.Row(word(text), cells))
    taken = [sum(expert in weights for weights in record.weights) for expert in range(record.count)]
    most = max(range(record.count), key=taken.__getitem__)
    return scene.Scene(
        f"The router sends each token to {record.chosen} of {times(record.count, 'expert')}, "
        f"different ones for different tokens. In this layer expert {most} is chosen most often, "
        f"by {taken[most]} of {times(len(rows), 'token')}.",
        scene.Panel(
            f"Experts 0 to {record.count - 1} of layer {LAYER}, and their weights in %",
            scene.Cells(rows, [str(expert) for expert in range(record.count)]),
            "A token uses the matrices of its own experts only. Their weights add up to "
            f"{percent(1)}.",
            {"first": "the larger weight", "second": "the other chosen expert"},
        ),
    )


def q4_1(weights: torch.Tensor) -> torch.Tensor:
    """Quantize 32 weights to a block of 20 bytes, with llama.cpp's rounding."""
    low = weights.min()
    scale = (weights.max() - low) / 15
    inverse = 1 / scale if scale else scale
    codes = ((weights - low) * inverse + 0.5).clamp(0, 15).byte()
    head = torch.stack([scale, low]).half().view(torch.uint8)
    return torch.cat([head, codes[:16] | codes[16:] << 4])


def record_block(prompt: str) -> Record:
    """Quantize the first 32 values of the last token's embedding to Q4_1."""
    id = runs.encode(prompt, 200)[-1]
    weights = runs.load("stories-llama").embed_tokens.weight[id, :32]
    data = q4_1(weights)
    return Record(
        token=runs.token_text(id),
        weights=weights.tolist(),
        data=data.tolist(),
        numbers=dequantize("Q4_1", data).tolist(),
    )


def draw_block(record: Record) -> scene.Scene:
    d, m = torch.tensor(record.data[:4], dtype=torch.uint8).view(torch.float16).tolist()
    heads = []
    for at, kind, value in ((0, "good", d), (2, "third", m)):
        low, high = record.data[at : at + 2]
        bits = scene.Cell(kind, f"{high:08b} {low:08b}")
        heads.append(scene.Row("dm"[at // 2], [bits], signed(value, 5)))
    rows = []
    for at, byte in enumerate(record.data[4:]):
        high, low = byte >> 4, byte & 15
        cells = [scene.Cell("second", f"{high:04b}"), scene.Cell("first", f"{low:04b}")]
        rows.append(scene.Row(f"byte {at + 4}", cells, f"q{at + 16} = {high}, q{at} = {low}"))
    off = max(abs(a - b) for a, b in zip(record.weights, record.numbers))
    curves = [
        scene.Curve("the weights", list(enumerate(record.weights)), "first"),
        scene.Curve("d q + m", list(enumerate(record.numbers)), "second", dots=True),
    ]
    return scene.Scene(
        f"A block of Q4_1 holds 32 weights in {len(record.data)} bytes: a scale, a minimum, and "
        f"4 bits per weight. The largest error in this block is {off:.4f}.",
        scene.Panel(
            "Bytes 0 to 3: the scale d and the minimum m",
            scene.Cells(heads, ["float16, its highest bit first"]),
            "The file is little-endian.",
            {"good": "scale", "third": "minimum"},
        ),
        scene.Panel(
            "Bytes 4 to 19: the codes q, two in a byte",
            scene.Cells(rows, ["high", "low"]),
            "The low nibble of a byte holds one of the first 16 codes, the high nibble one "
            "of the last 16.",
            {"first": "codes 0 to 15", "second": "codes 16 to 31"},
        ),
        scene.Panel(
            f"The embedding of {word(record.token)}, channels 0 to 31",
            scene.Lines(curves, scene.Axis("channel"), scene.Axis("value")),
            f"The 16 representable values are {d:.4f} apart.",
        ),
    )


PICTURES = {
    "gguf-blocks": scene.Picture("Once upon a time", record_block, draw_block),
    "mixture-of-experts": scene.Picture(
        "One day, a little boy named Tim saw a big, red ball.", record_routes, draw_routes
    ),
}
