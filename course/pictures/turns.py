"""An outlier in an activation vector, before and after a Hadamard rotation."""

from types import SimpleNamespace as Record

import torch

from pictures import runs, scene
from pictures.scene import percent, signed, times, word
from quantisation.int8 import prime_factors, quantize, rotate_channels

SHOWN = 64  # channels in the chart
FEW = 8  # channels that the first three stages mix


@torch.inference_mode()
def record_rotation(prompt: str) -> Record:
    """Record the row with the largest outlier among inputs of the Llama's linear layers."""
    ids = runs.encode(prompt, 60)
    model = runs.load("stories-llama")
    rows = []  # per layer: (ratio, name, position, row)

    def watch(name: str, layer: torch.nn.Linear):
        def look(_, args):
            ratios = largest_of(args[0][0])
            at = ratios.argmax().item()
            rows.append((ratios[at].item(), name, at, args[0][0, at]))

        return layer.register_forward_pre_hook(look)

    linear = [each for each in model.named_modules() if isinstance(each[1], torch.nn.Linear)]
    hooks = [watch(*each) for each in linear]
    try:
        model(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    _, layer, position, row = max(rows, key=lambda each: each[0])
    at = row.abs().argmax().item()
    steps = row / quantize(row)[1]
    first = at // FEW * FEW
    few = steps[first : first + FEW]
    only = torch.zeros(FEW)
    only[at - first] = 1
    sizes = (1, 2, 4, FEW)  # a rotation of 2 channels is stage 1, of 4 stages 1 and 2
    return Record(
        layer=layer,
        token=runs.token_texts(ids)[position],
        row=row.tolist(),
        rotated=rotate_channels(row).tolist(),
        largest=at,
        first=first,
        stages=[rotate_channels(few.view(-1, size)).flatten().tolist() for size in sizes],
        # (stage, channel): whether the outlier contributes
        mixed_with_outlier=[
            rotate_channels(only.view(-1, size)).flatten().bool().tolist() for size in sizes
        ],
    )


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row as a multiple of the row's RMS."""
    return x.abs().amax(-1) / x.pow(2).mean(-1).sqrt()


def draw_rotation(record: Record) -> scene.Scene:
    panels = []
    medians = []
    ratios = []
    start = record.largest // SHOWN * SHOWN
    whose = f"An input of {record.layer}, at the token {word(record.token)}"
    for title, said, numbers in (
        ("Unrotated", whose, record.row),
        ("Rotated", "The same vector", record.rotated),
    ):
        row = torch.tensor(numbers)
        values, scale = quantize(row)
        error = ((values * scale - row).norm() / row.norm()).item()
        sizes = values.int().abs().tolist()
        medians.append(sorted(sizes)[len(sizes) // 2])
        ratios.append(largest_of(row).item())
        bars = [
            (at, abs(numbers[at]) / scale.item())
            for at in range(start, min(start + SHOWN, len(sizes)))
        ]
        curves = [scene.Curve("", bars, "first", bars=True)]
        if numbers is record.row:
            curves.append(scene.Curve("", [bars[record.largest - start]], "second", bars=True))
        panels.append(
            scene.Panel(
                f"{title}: the maximum is {ratios[-1]:.1f} times the RMS",
                scene.Lines(
                    curves,
                    scene.Axis(f"channel, of {len(sizes)}"),
                    scene.Axis(
                        "|x| in steps of int8", [(at, str(at)) for at in (0, 32, 64, 96, 127)]
                    ),
                ),
                f"{said}: its median |x| is {times(medians[-1], 'step')}, and the rounding error "
                f"is {percent(error)} of its norm.",
                {"second": "the outlier"} if numbers is record.row else {},
            )
        )
    lines = []
    for number in range(FEW):
        cells = [
            scene.Cell("second" if mixed_with_outlier[number] else "", signed(stage[number], 1))
            for stage, mixed_with_outlier in zip(record.stages, record.mixed_with_outlier)
        ]
        lines.append(scene.Row(str(record.first + number), cells))
    first, last = len(record.stages) - 1, len(prime_factors(len(record.row)))
    return scene.Scene(
        f"An outlier, {ratios[0]:.0f} times the RMS of its vector, uses up the 127 steps of "
        f"int8: the median |x| is {times(medians[0], 'step')}. A rotation spreads the outlier "
        f"over all channels, and the median becomes {times(medians[1], 'step')}.",
        *panels,
        scene.Panel(
            f"The outlier and its neighbours in the first {first} of {last} stages",
            scene.Cells(lines, ["x / step", *(f"stage {at + 1}" for at in range(first))]),
            "A stage replaces a and b by a + b and a \u2212 b, for channels 1 apart, then 2, "
            f"then 4. After all {last} stages the outlier contributes to each of the "
            f"{len(record.row)} channels.",
            {"second": "includes the outlier"},
        ),
    )


PICTURES = {
    "rotated-int8": scene.Picture(
        "Once upon a time, there was a little girl", record_rotation, draw_rotation
    )
}
