"""Online softmax: attention in blocks of keys, with a running maximum and rescaled weights."""

import math
from types import SimpleNamespace as Record

import torch

from model import causal_attention
from pictures import runs, scene
from pictures.scene import percent, signed, times, word

BLOCK = 32  # keys per block, as in native/gpt.c
LENGTH = 4 * BLOCK


@torch.inference_mode()
def record_blocks(prompt: str) -> Record:
    """Record the last position's scores in a head whose running maximum grows in two later blocks.

    The model extends the prompt to LENGTH tokens.
    """
    ids = runs.encode(prompt, LENGTH)
    ids += runs.generate_tokens(ids, max_new_tokens=LENGTH - len(ids), ignore_eos=True)
    model = runs.load()
    scores = []  # per layer, at the last position: (heads, T)

    def attend(layer: int, q, k, v):
        scores.append(torch.einsum("hd, thd -> ht", q[0, -1], k[0]) / math.sqrt(q.shape[-1]))
        return causal_attention(layer, q, k, v)

    model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
    largest = torch.stack(scores).unflatten(-1, (-1, BLOCK)).amax(-1).cummax(-1).values
    moves = (largest.diff() > 0).sum(-1)
    layer, head = divmod((moves == 2).int().argmax().item(), moves.shape[1])
    row = scores[layer][head].tolist()
    blocks = []
    m, total = -math.inf, 0.0
    for start in range(0, LENGTH, BLOCK):
        block = row[start : start + BLOCK]
        before, m = m, max(m, *block)
        r = math.exp(before - m)
        weights = [math.exp(score - m) for score in block]
        total = total * r + sum(weights)
        blocks.append(Record(m=m, r=r, total=total, weights=weights))
    return Record(layer=layer, head=head, token=runs.token_text(ids[-1]), scores=row, blocks=blocks)


def draw_blocks(record: Record) -> scene.Scene:
    ticks = [(start, str(start)) for start in range(0, LENGTH + 1, BLOCK)]
    running = []
    for number, block in enumerate(record.blocks):
        running += [(number * BLOCK, block.m), ((number + 1) * BLOCK, block.m)]
    now = [weight for block in record.blocks for weight in block.weights]
    end = [math.exp(score - record.blocks[-1].m) for score in record.scores]
    rows = []
    for number, block in enumerate(record.blocks):
        rescaled = number and block.r < 1
        cells = [
            scene.Cell("", signed(block.m)),
            scene.Cell("second" if rescaled else "", f"{block.r:.3f}"),
            scene.Cell("", f"{block.total:.3f}"),
        ]
        rows.append(scene.Row(f"{number * BLOCK} to {number * BLOCK + BLOCK - 1}", cells))
    moved = sum(block.r < 1 for block in record.blocks[1:])
    scaled = math.prod(block.r for block in record.blocks[1:])
    marks = [scene.Mark("", x=start) for start in range(BLOCK, LENGTH, BLOCK)]
    key = scene.Axis("key", ticks)
    return scene.Scene(
        f"After a block of {BLOCK} keys only the largest score so far is known. {moved} of "
        f"{times(len(rows) - 1, 'later block')} had a larger one, and earlier sums were scaled "
        f"down. The weights of the first block are {percent(scaled)} of their initial values.",
        scene.Panel(
            "Scores of the last query, and the running maximum",
            scene.Lines(
                [
                    scene.Curve("score", list(enumerate(record.scores)), "first"),
                    scene.Curve("the largest so far", running, "second"),
                ],
                key,
                scene.Axis("q k / \u221aD"),
                marks,
            ),
            f"Head {record.head} of layer {record.layer}, at {word(record.token)}; a block "
            "ends at each dashed line.",
        ),
        scene.Panel(
            "Weights exp(score \u2212 running maximum)",
            scene.Lines(
                [
                    scene.Curve("when its block is read", list(enumerate(now)), "kept", bars=True),
                    scene.Curve("after the last block", list(enumerate(end)), "first", bars=True),
                ],
                key,
                scene.Axis("weight"),
                marks,
            ),
            "Only sums are kept, one of the weights and one of the weighted values, so two "
            "multiplications rescale all earlier keys.",
        ),
        scene.Panel(
            "State of the loop after each block",
            scene.Cells(rows, ["largest", "r", "sum"]),
            "r = exp(old maximum \u2212 new maximum). The first block has no old maximum.",
            {"second": "earlier sums are multiplied by r"},
        ),
    )


PICTURES = {"long-texts": scene.Picture("Once upon a time", record_blocks, draw_blocks)}
