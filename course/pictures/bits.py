"""The cost of fewer bits: for weights, an activation vector with an outlier, and cached keys."""

from types import SimpleNamespace as Record

import torch

from cache import stored_head_dim
from command_line.options import STORIES
from loading.gguf_blocks import dequantize
from loading.load import load_model
from model import causal_attention
from pictures import runs, scene
from pictures.scene import percent, word
from pictures.turns import record_rotation
from quantisation.blocks import BLOCK_SIZE, pad_to_blocks
from quantisation.int8 import quantize, rotate_channels, unrotate_channels

LLAMA = "stories-llama"
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "blocks": torch.uint8,
    "int8": torch.int8,
}


@torch.inference_mode()
def record_quality(prompt: str) -> Record:
    """Return the KL divergence of each dtype from float32 at each token of a greedy text."""
    ids = runs.encode(prompt, 60)
    text = ids + runs.generate_tokens(ids, LLAMA, max_new_tokens=60)
    tokens = torch.tensor([text[:-1]])
    exact = runs.load(LLAMA)(tokens)[0].double().log_softmax(-1)
    found = {}
    for name, dtype in DTYPES.items():
        model = load_model(STORIES.with_name(LLAMA), dtype, "cpu").requires_grad_(False)
        log_q = model(tokens)[0].double().log_softmax(-1)
        kl = (exact.exp() * (exact - log_q)).sum(-1)
        same = log_q.argmax(-1) == exact.argmax(-1)
        found[name] = Record(kl=kl.tolist(), same=same.tolist())
    return Record(dtypes=found, tokens=runs.token_texts(text)[1:])


def draw_quality(record: Record) -> scene.Scene:
    count = len(record.tokens)
    kinds = ("good", "third", "second", "bad")
    curves = []
    bars = []
    means = {}
    for (name, each), kind in zip(record.dtypes.items(), kinds):
        means[name] = sum(each.kl) / count
        points = [(place, max(kl, 1e-9)) for place, kl in enumerate(each.kl, 1)]
        curves.append(scene.Curve(name, points, kind))
        share = sum(each.same) / count
        value = f"{means[name]:.1e}, {percent(share)}"
        bars.append(scene.Bar(name, [(means[name], kind)], value))
    worst = max(record.dtypes, key=means.get)
    at = max(range(count), key=lambda place: record.dtypes[worst].kl[place])
    return scene.Scene(
        "KL divergence shows what the text hides: how far each distribution is from float32's. "
        f"Over {count} tokens {worst} is furthest, with a mean of {means[worst]:.1e} nats and "
        f"its maximum at {word(record.tokens[at])}.",
        scene.Panel(
            "Divergence from float32 at each token",
            scene.Lines(curves, scene.Axis("token"), scene.Axis("KL in nats (log)", log=True)),
            "Where the model is certain of a token, rounding changes little. Where several "
            "tokens are likely, it shows.",
        ),
        scene.Panel(
            "Mean over all tokens",
            scene.Bars(bars),
            "Mean KL, and the share of tokens at which the most likely one is float32's. int8 "
            "has one scale per matrix row, blocks have one per 32 weights.",
            dict(zip(kinds, record.dtypes)),
        ),
    )


def record_blocks(prompt: str) -> Record:
    """Quantize the vector of `rotated-int8` with one scale, one per block, and rotated."""
    found = record_rotation(prompt)
    row = torch.tensor(found.row)
    values, scale = quantize(row)
    block_values, block_scales = quantize(pad_to_blocks(row))
    rotated, rotated_scale = quantize(rotate_channels(row))
    rounded = {
        "one scale": values * scale,
        f"a scale per {BLOCK_SIZE}": (block_values * block_scales[:, None]).flatten()[: len(row)],
        "rotated, one scale": unrotate_channels(rotated * rotated_scale),
    }
    return Record(
        layer=found.layer,
        token=found.token,
        row=found.row,
        largest=found.largest,
        scale=scale.item(),
        scales=block_scales.tolist(),
        rounded={name: each.tolist() for name, each in rounded.items()},
    )


def draw_blocks(record: Record) -> scene.Scene:
    hit = record.largest // BLOCK_SIZE
    points = list(enumerate(record.scales))
    row = torch.tensor(record.row)
    errors = {}
    for name, rounded in record.rounded.items():
        errors[name] = ((torch.tensor(rounded) - row).norm() / row.norm()).item()
    bars = [scene.Bar(name, [(error, "first")], percent(error)) for name, error in errors.items()]
    one, blocks, _ = errors.values()
    return scene.Scene(
        "An outlier sets the scale of its whole vector: rounding to int8 then costs "
        f"{percent(one)} of the norm. With one scale per {BLOCK_SIZE} values only its own block "
        f"has large steps, and the error is {percent(blocks)}.",
        scene.Panel(
            f"Step size of each block of {BLOCK_SIZE}",
            scene.Lines(
                [
                    scene.Curve("", points, "first", bars=True),
                    scene.Curve("", [points[hit]], "second", bars=True),
                ],
                scene.Axis(f"block of the vector of {len(row)} values"),
                scene.Axis("step = scale"),
                [scene.Mark("one scale for all", y=record.scale)],
            ),
            f"An input of {record.layer}, at the token {word(record.token)}.",
            {"first": "a block", "second": "the block with the outlier"},
        ),
        scene.Panel(
            "Rounding error relative to the norm",
            scene.Bars(bars),
            "A rotation (lesson 127) spreads the outlier over the vector instead.",
        ),
    )


@torch.inference_mode()
def record_keys(prompt: str) -> Record:
    """Return keys of the head whose channels differ most, and int8 errors plain and rotated."""
    ids = runs.encode(prompt, 60)
    model = runs.load(LLAMA)
    heads = []  # per KV head: (max / median channel size, (layer, head), keys)

    def attend(layer, q, k, v):
        for head in range(k.shape[2]):
            rows = k[0, :, head]
            sizes = rows.abs().mean(0)
            heads.append(((sizes.max() / sizes.median()).item(), (layer, head), rows))
        return causal_attention(layer, q, k, v)

    model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
    _, place, rows = max(heads, key=lambda each: each[0])
    values, scale = quantize(rows)
    rotated, rotated_scale = quantize(rotate_channels(rows))
    plain = values * scale[:, None]
    back = unrotate_channels(rotated * rotated_scale[:, None])
    width = rows.shape[-1]
    return Record(
        layer=place[0],
        head=place[1],
        sizes=rows.abs().mean(0).tolist(),  # mean magnitude per channel, over positions
        rotated=rotate_channels(rows).abs().mean(0).tolist(),
        errors=[((each - rows).norm() / rows.norm()).item() for each in (plain, back)],
        bytes={
            name: stored_head_dim(width, dtype) * dtype.itemsize
            for name, dtype in (
                ("float32", torch.float32),
                ("float16", torch.float16),
                ("int8 and its scale", torch.int8),
            )
        },
    )


def draw_keys(record: Record) -> scene.Scene:
    panels = []
    for title, sizes, error in (
        ("Unrotated", record.sizes, record.errors[0]),
        ("Rotated", record.rotated, record.errors[1]),
    ):
        ratio = max(sizes) / sorted(sizes)[len(sizes) // 2]
        panels.append(
            scene.Panel(
                f"{title}: the largest channel is {ratio:.1f} times the median",
                scene.Lines(
                    [scene.Curve("", list(enumerate(sizes)), "first", bars=True)],
                    scene.Axis(f"channel of the key, of {len(sizes)}"),
                    scene.Axis("mean of |k| over the positions"),
                ),
                f"Rounded to int8 with one scale per key, the error is {percent(error)} of the "
                "norm.",
            )
        )
    bars = [
        scene.Bar(name, [(count, "first")], f"{count} bytes")
        for name, count in record.bytes.items()
    ]
    return scene.Scene(
        "Some channels of keys are large at every position and set the scale of all others. "
        f"Keys are rotated before rounding: the error falls from {percent(record.errors[0])} to "
        f"{percent(record.errors[1])}. Queries are rotated the same way, so the scores do not "
        "change.",
        *panels,
        scene.Panel(
            "A key in memory",
            scene.Bars(bars),
            f"Layer {record.layer}, KV head {record.head}: the head whose channels differ most.",
        ),
    )


# Bits per weight for its code, its block's scales, and the data shared by a superblock of 256.
TYPES = {
    "Q8_0": (8, 16 / 32, 0),
    "Q6_K": (6, 8 / 16, 16 / 256),
    "Q5_K": (5, 96 / 256, 32 / 256),
    "Q4_K": (4, 96 / 256, 32 / 256),
    "Q4_0": (4, 16 / 32, 0),
    "Q3_K": (3, 96 / 256, 16 / 256),
    "Q2_K": (2, 8 / 16, 32 / 256),
}
PARTS = {"d": 1, "a scale": 4, "a minimum": 8, "high bits": 5, "two numbers": 16}  # bytes of a Q4_K


def record_superblock(prompt: str) -> Record:
    """Return which weights of a Q4_K superblock change when a bit of each part is flipped."""
    seed = sum(runs.encode(prompt, 60))  # the bytes are random
    block = torch.randint(1, 255, (144,), generator=torch.manual_seed(seed)).to(torch.uint8)
    block[:4] = torch.tensor([0, 0x3C, 0, 0x3C])  # d and dmin are 1
    before = dequantize("Q4_K", block)
    changed = {}
    for name, place in PARTS.items():
        other = block.clone()
        other[place] ^= 0x80 if name == "high bits" else 1
        changed[name] = (dequantize("Q4_K", other) != before).tolist()
    return Record(changed=changed)


def draw_superblock(record: Record) -> scene.Scene:
    rows = []
    for name, changed in record.changed.items():
        counts = [sum(changed[first : first + BLOCK_SIZE]) for first in range(0, 256, BLOCK_SIZE)]
        cells = [scene.Cell("second" if n else "idle", str(n)) for n in counts]
        rows.append(scene.Row(name, cells))
    bars = []
    for name, parts in TYPES.items():
        lengths = list(zip(parts, ("first", "second", "good")))
        bars.append(scene.Bar(name, lengths, f"{sum(parts):g} bits"))
    whole, part = (sum(record.changed[name]) for name in ("d", "a scale"))
    return scene.Scene(
        "A K-quant has scales on two levels: each block of 32 has a scale of 6 bits, in units "
        f"of one float16 for all 256. A bit of that float16 changes {whole} weights here, a bit "
        f"of a scale {part}.",
        scene.Panel(
            "A Q4_K superblock: weights that change with one bit, in each block of 32",
            scene.Cells(rows, [str(block) for block in range(8)]),
            "Four of the eight scales are contiguous in their bytes. The high bits of these "
            "bytes belong to the other four.",
            {"second": "weights that change", "idle": "none"},
        ),
        scene.Panel(
            "Bits per weight",
            scene.Bars(bars),
            key={"first": "the weight", "second": "its block's scale", "good": "for all 256"},
        ),
    )


BEGIN = "Once upon a time, there was a little girl"
PICTURES = {
    "gguf-superblocks": scene.Picture(BEGIN, record_superblock, draw_superblock),
    "quality": scene.Picture("Once upon a time", record_quality, draw_quality),
    "int8-blocks": scene.Picture(BEGIN, record_blocks, draw_blocks),
    "small-cache": scene.Picture(BEGIN, record_keys, draw_keys),
}
