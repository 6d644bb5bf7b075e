"""Which positions a layer sees, and which tokens the last logits depend on."""

from types import SimpleNamespace as Record

import torch

from cache import seen
from llama import Llama, LlamaConfig
from pictures import runs, scene
from pictures.scene import times, word

WINDOW = 4
MODELS = ((WINDOW, WINDOW), (WINDOW, None, WINDOW))  # two of the lesson's Try


@torch.inference_mode()
def record_windows(prompt: str) -> Record:
    """What each position sees in a layer, and what the last logits read, layer by layer."""
    ids = runs.encode(prompt, 20)
    positions = torch.arange(len(ids))
    masks = {
        window: seen(positions[:, None], positions, window).tolist() for window in (None, WINDOW)
    }
    return Record(
        tokens=runs.texts_of(ids),
        masks=masks,  # window -> whether position i sees position j
        # windows of a model -> of each layer, whether the last logits need its input at a position
        needed={windows: needed_inputs(windows, ids) for windows in MODELS},
    )


def needed_inputs(windows: tuple, ids: list[int]) -> list[list[bool]]:
    """Change the input of each layer at each position: do the last logits change, too?"""
    model = Llama(LlamaConfig(n_layer=len(windows), windows=windows)).double()
    model.init_weights(0.1, torch.Generator().manual_seed(0))
    text = torch.tensor([ids])
    logits = model(text)[0, -1]

    def changes(block, position: int) -> bool:
        def spoil(module, args):
            x = args[0].clone()
            x[0, position] += 1
            return x, *args[1:]

        hook = block.register_forward_pre_hook(spoil)
        change = (model(text)[0, -1] - logits).abs().max().item()
        hook.remove()
        return change > 1e-12

    return [[changes(block, position) for position in range(len(ids))] for block in model.layers]


def draw_windows(record: Record) -> scene.Scene:
    panels = []
    scores = {}
    for window, mask in record.masks.items():
        rows = []
        for at, (text, row) in enumerate(zip(record.tokens, mask)):
            kinds = ["first" if sees else "idle" for sees in row[: at + 1]]
            cells = [scene.Cell(kind) for kind in kinds]
            cells += [scene.Cell() for _ in row[at + 1 :]]
            rows.append(scene.Row(word(text), cells, str(sum(row))))
        scores[window] = sum(map(sum, mask))
        title = "A layer that sees all" if window is None else f"A layer with a window of {window}"
        panels.append(
            scene.Panel(
                f"{title}: {times(scores[window], 'score')}",
                scene.Cells(rows),
                "A row is a position, a column a key; the number is how many keys it sees.",
                {"first": "seen"} | ({} if window is None else {"idle": "before the window"}),
            )
        )
    for windows, layers in record.needed.items():
        lines = []
        for layer in reversed(range(len(windows))):
            kinds = ["first" if needed else "idle" for needed in layers[layer]]
            tokens = [scene.Token(*pair) for pair in zip(record.tokens, kinds)]
            name = f"layer {layer}: sees {windows[layer] or 'all'}"
            lines.append(scene.Line(tokens, name, times(sum(layers[layer]), "position")))
        panels.append(
            scene.Panel(
                f"{len(windows)} layers: what the last logits need",
                scene.Tokens(lines),
                "From the last layer down: the positions whose input to that layer they depend on.",
                {"first": "needed", "idle": "not needed"},
                wide=True,
            )
        )
    (two, three) = (sum(layers[0]) for layers in record.needed.values())
    return scene.Scene(
        f"A window of {WINDOW} leaves {scores[WINDOW]} of {scores[None]} scores. Two such layers "
        f"reach the last {times(two, 'token')}. With one layer between them that sees all, the "
        f"last logits depend on all {times(three, 'token')}.",
        *panels,
    )


PICTURES = {
    "window-layers": scene.Picture(
        "One day, a boy named Tim saw a ball.", record_windows, draw_windows
    )
}
