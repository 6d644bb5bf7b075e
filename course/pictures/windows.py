"""Sliding-window attention: masks, receptive field of the last logits, and pages held."""

import functools
from types import SimpleNamespace as Record

import torch

from cache import make_causal_mask
from engine.engine import Engine
from llama import Llama, LlamaConfig
from pictures import runs, scene
from pictures.scene import times, word
from sampling import SamplingParams

WINDOW = 4
MODELS = ((WINDOW, WINDOW), (WINDOW, None, WINDOW))  # two models of the lesson's Try


@torch.inference_mode()
def record_windows(prompt: str) -> Record:
    """Record the masks of a layer, and the inputs of each layer that the last logits need."""
    ids = runs.encode(prompt, 20)
    positions = torch.arange(len(ids))
    masks = {
        window: make_causal_mask(positions[:, None], positions, window).tolist()
        for window in (None, WINDOW)
    }
    return Record(
        tokens=runs.token_texts(ids),
        masks=masks,  # window -> (T, T), whether position i sees position j
        # windows of a model -> (n_layer, T), whether the last logits need the layer's input
        needed={windows: needed_inputs(windows, ids) for windows in MODELS},
    )


def needed_inputs(windows: tuple, ids: list[int]) -> list[list[bool]]:
    """Return (n_layer, T): whether a changed input of a layer changes the last logits."""
    model = Llama(LlamaConfig(n_layer=len(windows), sliding_windows=windows)).double()
    model.init_weights(0.1, torch.Generator().manual_seed(0))
    text = torch.tensor([ids])
    logits = model(text)[0, -1]

    def changes(block, position: int) -> bool:
        def perturb(module, args):
            x = args[0].clone()
            x[0, position] += 1
            return x, *args[1:]

        hook = block.register_forward_pre_hook(perturb)
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
        title = "Full attention" if window is None else f"Sliding window of {window}"
        panels.append(
            scene.Panel(
                f"{title}: {times(scores[window], 'score')}",
                scene.Cells(rows),
                "A row is a query, a column a key. The number is the count of visible keys.",
                {"first": "make_causal_mask"}
                | ({} if window is None else {"idle": "outside the window"}),
            )
        )
    for windows, layers in record.needed.items():
        lines = []
        for layer in reversed(range(len(windows))):
            kinds = ["first" if needed else "idle" for needed in layers[layer]]
            tokens = [scene.Token(*pair) for pair in zip(record.tokens, kinds)]
            name = f"layer {layer}: window {windows[layer] or 'none'}"
            lines.append(scene.Line(tokens, name, times(sum(layers[layer]), "position")))
        panels.append(
            scene.Panel(
                f"{len(windows)} layers: receptive field of the last logits",
                scene.Tokens(lines),
                "From the last layer down: positions whose input to that layer affects the "
                "last logits.",
                {"first": "needed", "idle": "not needed"},
                wide=True,
            )
        )
    (two, three) = (sum(layers[0]) for layers in record.needed.values())
    return scene.Scene(
        f"A sliding window of {WINDOW} leaves {scores[WINDOW]} of {scores[None]} scores. Two "
        f"such layers reach the last {times(two, 'token')}. With a full-attention layer between "
        f"them, the last logits depend on all {times(three, 'token')}.",
        *panels,
    )


PAGE = 16
EVERY = 24  # tokens between rows of the picture
LENGTH = 176


@torch.inference_mode()
def record_pages(prompt: str, windows: tuple = ()) -> list[Record]:
    """Return which pages a request holds as it grows, one record per row of the picture.

    True: held. False: freed to the pool. The model has random weights and runs in torch.
    """
    ids = runs.encode(prompt, 40)
    model = Llama(LlamaConfig(n_layer=len(windows), sliding_windows=windows))
    model.init_weights(0.1, torch.Generator().manual_seed(0))
    engine = Engine(model, max_num_seqs=1, max_num_batched_tokens=64, page_size=PAGE)
    request = engine.add(ids, SamplingParams(LENGTH - len(ids), ignore_eos=True))
    found = []
    while engine.busy:
        engine.step()
        if len(request.tokens) % EVERY == 0 and request.finish_reason is None:
            tables = [[page is not None for page in table] for table in request.page_tables]
            found.append(Record(length=len(request.tokens), tables=tables))
    return found


def draw_pages(record: list[Record], names: tuple, caption: str) -> scene.Scene:
    panels = []
    widest = -(-LENGTH // PAGE)
    for at, name in enumerate(names):
        rows = []
        for each in record:
            cells = [scene.Cell("first" if held else "idle") for held in each.tables[at]]
            cells += [scene.Cell()] * (widest - len(cells))
            rows.append(scene.Row(f"{each.length} tokens", cells, str(sum(each.tables[at]))))
        panels.append(
            scene.Panel(
                name,
                scene.Cells(rows),
                f"A column is a page of {PAGE} positions. The number is the count of held pages.",
                {"first": "held", "idle": "freed to the pool"}
                if not all(record[-1].tables[at])
                else {},
            )
        )
    held = " and ".join(str(sum(record[-1].tables[at])) for at in range(len(names)))
    return scene.Scene(
        f"{caption} After {record[-1].length} tokens it holds {held} pages.", *panels
    )


def pages_picture(windows: tuple, names: tuple, caption: str) -> scene.Picture:
    return scene.Picture(
        "Once upon a time",
        functools.partial(record_pages, windows=windows),
        functools.partial(draw_pages, names=names, caption=caption),
    )


PICTURES = {
    "cache-groups": pages_picture(
        (32, 32, None),
        ("Page table of the full-attention layer", "Page table of the two layers with window 32"),
        "A request has one page table per KV cache group: full attention keeps every page, "
        "sliding-window layers free pages behind the window.",
    ),
    "window-pages": pages_picture(
        (32, 64),
        ("The page table of a request, windows of 32 and 64",),
        "Where every layer has a sliding window, a running request frees its pages behind the "
        "largest window.",
    ),
    "window-layers": scene.Picture(
        "One day, a boy named Tim saw a ball.", record_windows, draw_windows
    ),
}
