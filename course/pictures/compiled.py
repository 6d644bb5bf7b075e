"""Logarithms that the native sampler skips, and packed weights of the native backend."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from native.linear import pack
from pictures import runs, scene
from pictures.scene import signed, times, word
from sampling import SamplingParams, exponential_noise

SEED = 7
BLOCK = 256  # tokens that draw.c compares with the same best score


class Candidate(NamedTuple):
    """A token and its score in a draw; the highest score wins."""

    text: str
    bound: float  # upper bound of the score
    score: float
    before: float  # best score of earlier blocks
    drawn: bool

    @property
    def needs_logarithm(self) -> bool:
        """Return whether the draw computes this token's logarithm."""
        return self.bound > self.before


@torch.inference_mode()
def record_draw(prompt: str, shown: int = 12) -> Record:
    ids = runs.encode(prompt, 200)
    logits = runs.next_logits(ids)
    params = SamplingParams(temperature=0.8, seed=SEED)
    (drawn,) = runs.native().runner.draw(logits[None], [params], [len(ids)])
    weights = ((logits - logits.max()) / params.temperature).exp().double()
    noise = exponential_noise(logits[None].double(), [(SEED, len(ids))])[0]  # -ln(u)
    scores = weights / noise
    bounds = weights / -torch.expm1(-noise)  # 1 - u is at most -ln(u)
    first = weights.argmax().item()
    before = torch.zeros_like(scores)
    best = scores[first]
    for block, limit in zip(scores.split(BLOCK), before.split(BLOCK)):
        limit[:] = best
        best = torch.maximum(best, block.max())
    before[first] = 0  # computed before all blocks
    asked = (bounds > before).nonzero()[:, 0].tolist()
    order = sorted({first, *asked, *bounds.topk(shown).indices.tolist()} - {first})
    candidates = [
        Candidate(
            runs.token_text(id),
            *(each[id].item() for each in (bounds, scores, before)),
            id == drawn,
        )
        for id in [first, *order]
    ]
    return Record(
        vocabulary=len(logits),
        num_logarithms=len(asked),  # logarithms computed
        candidates=candidates,  # tokens with the highest bounds, in draw.c's order
    )


def draw_draw(record: Record) -> scene.Scene:
    (drawn,) = (each for each in record.candidates if each.drawn)
    largest = 1.25 * drawn.score
    bars = []
    for each in record.candidates:
        kind = "good" if each.drawn else "second" if each.needs_logarithm else "kept"
        value = f"at most {each.bound:.3g}" + f": {each.score:.3g}" * each.needs_logarithm
        tick = each.before or None
        bars.append(scene.Bar(word(each.text), [(min(each.bound, largest), kind)], value, tick))
    return scene.Scene(
        "A token whose bound is below the best score so far cannot win the draw. It needs no "
        f"logarithm: {times(record.num_logarithms, 'logarithm')} for a vocabulary of "
        f"{record.vocabulary:,} tokens.",
        scene.Panel(
            "Bar: bound of a token\u2019s score. Line: the best score so far",
            scene.Bars(bars, largest),
            "A draw gives each token a random number u and takes the one with the highest "
            "score p / \u2212ln u. Its bound p / (1 \u2212 u) needs no logarithm: 1 \u2212 u "
            "is at most \u2212ln u. Here p is relative to the most likely token, which is "
            "computed first. The line is the best score before the token\u2019s block of "
            f"{BLOCK} tokens. All other tokens have lower bounds.",
            {"good": "drawn", "second": "logarithm computed", "kept": "cannot win"},
            wide=True,
        ),
    )


WIDTH = 4  # outputs per panel, small enough to draw; real kernels use 8, 16 or 32


@torch.inference_mode()
def record_packed(prompt: str, outputs: int = 6, inputs: int = 4) -> Record:
    """Record a corner of a weight, its packed layout and its product with an input."""
    ids = runs.encode(prompt, 200)
    model = runs.load()
    layer = model.h[0].mlp.c_fc
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
    model(torch.tensor([ids]))
    hook.remove()
    x = seen[0][:inputs]
    weight = layer.weight[:outputs, :inputs]
    numbers = torch.arange(1, outputs * inputs + 1, dtype=torch.int32).view(outputs, inputs)
    whole, rest = pack(numbers, WIDTH)
    panels = [
        [[divmod(number - 1, inputs) if number else None for number in row] for row in panel]
        for panel in [*whole.tolist(), rest.tolist()]
    ]
    return Record(
        x=x.tolist(),
        weight=weight.tolist(),  # (out, in)
        panels=panels,  # (panel, input, output) -> (out, in); None for padding
        sums=(weight @ x).tolist(),
    )


def draw_packed(record: Record) -> scene.Scene:
    def shown(number: float) -> str:
        return signed(100 * number, 1)

    head = [*(f"x{at}" for at in range(len(record.x))), "sum"]
    plain = [scene.Row("x", [scene.Cell("", signed(x)) for x in record.x] + [scene.Cell()])]
    for output, (row, total) in enumerate(zip(record.weight, record.sums)):
        cells = [scene.Cell(f"owner{output + 1}", shown(w)) for w in row]
        plain.append(scene.Row(f"output {output}", [*cells, scene.Cell("", shown(total))]))
    packed = []
    for number, panel in enumerate(record.panels):
        for at, vector in enumerate(panel):
            cells = []
            for place in vector:
                if place is None:
                    cells.append(scene.Cell("idle", "0"))
                else:
                    output, column = place
                    weight = record.weight[output][column]
                    cells.append(scene.Cell(f"owner{output + 1}", shown(weight)))
            packed.append(scene.Row(f"panel {number}, times x{at}", cells))
        sums = [
            scene.Cell("", shown(record.sums[place[0]]) if place else "0") for place in panel[0]
        ]
        packed.append(scene.Row("sums", sums))
    return scene.Scene(
        f"Packed weights let one vector hold a weight of each of {WIDTH} outputs. Each lane "
        "accumulates the sum of one output. In row-major order, the products in a vector would "
        "still have to be added to each other.",
        scene.Panel(
            "Row-major",
            scene.Cells(plain, head),
            "The first weights of a layer, times 100. A colour is an output. A run of one "
            "colour is a vector in memory.",
        ),
        scene.Panel(
            f"Packed in panels of {WIDTH} outputs",
            scene.Cells(packed),
            "Each vector is multiplied by one input and added to the sums. A real panel has 8, "
            "16 or 32 outputs.",
            {"idle": "padding"},
        ),
    )


PICTURES = {
    "native-draws": scene.Picture("The cat", record_draw, draw_draw),
    "packed-weights": scene.Picture("Once upon a time", record_packed, draw_packed),
}
