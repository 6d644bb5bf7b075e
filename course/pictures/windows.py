"""Sliding-window attention: masks, receptive field of the last logits, and pages held."""

from types import SimpleNamespace as Record

import torch

from cache import make_causal_mask
from engine.engine import Engine
from gemma import Gemma, GemmaConfig
from llama import Llama, LlamaConfig
from pictures import runs, scene
from pictures.scene import percent, times, word
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
PAGES_WINDOW = 32


def record_tables(engine: Engine, ids: list[int]) -> list[Record]:
    """Return a request's page tables after each step, from its first token to the last.

    An entry is the page, or None if it was freed to the pool.
    """
    request = engine.add(ids, SamplingParams(LENGTH - len(ids), ignore_eos=True))
    found = []
    while engine.busy:
        engine.step()
        if request.finish_reason is None:
            tables = [list(table) for table in request.page_tables]
            found.append(Record(length=len(request.tokens), tables=tables))
    return found


@torch.inference_mode()
def record_pages(prompt: str) -> list[Record]:
    """Record the page table of a request in a model whose layers all have windows."""
    windows = (PAGES_WINDOW, 2 * PAGES_WINDOW)
    model = Llama(LlamaConfig(n_layer=len(windows), sliding_windows=windows))
    model.init_weights(0.1, torch.Generator().manual_seed(0))
    engine = Engine(model, max_num_seqs=1, max_num_batched_tokens=64, page_size=PAGE)
    return record_tables(engine, runs.encode(prompt, 40))


def draw_pages(record: list[Record]) -> scene.Scene:
    rows = []
    shown = [each for each in record if each.length % EVERY == 0]
    for each in shown:
        table = each.tables[0]  # the only KV cache group
        cells = [scene.Cell("idle" if page is None else "first") for page in table]
        cells += [scene.Cell()] * (-(-LENGTH // PAGE) - len(cells))
        rows.append(scene.Row(f"{each.length} tokens", cells, str(held_count(table))))
    return scene.Scene(
        "Where every layer has a sliding window, a running request frees its pages behind the "
        f"largest window. After {shown[-1].length} tokens it holds "
        f"{held_count(shown[-1].tables[0])} pages.",
        scene.Panel(
            f"The page table of a request, windows of {PAGES_WINDOW} and {2 * PAGES_WINDOW}",
            scene.Cells(rows),
            f"A column is a page of {PAGE} positions. The number is the count of held pages.",
            {"first": "held", "idle": "freed to the pool"},
        ),
    )


def held_count(table: list[int | None]) -> int:
    return sum(page is not None for page in table)


@torch.inference_mode()
def record_groups(prompt: str) -> Record:
    """Record the two page tables of a request in a Gemma whose last layer sees all positions."""
    shape = {"n_head": 4, "n_embd": 64, "n_kv_head": 2, "head_dim": 16, "n_inner": 128}
    windows = (PAGES_WINDOW,) * 5 + (None,)
    model = Gemma(GemmaConfig(4096, 256, len(windows), sliding_windows=windows, **shape))
    model.init_weights(0.1, torch.Generator().manual_seed(0))
    engine = Engine(model, max_num_seqs=1, max_num_batched_tokens=PAGE, page_size=PAGE)
    return Record(
        steps=record_tables(engine, runs.encode(prompt, 40)),
        pool_sizes=[pool.num_pages for pool, _ in engine.scheduler.kv_cache_groups],
        layers=[windows.count(None), len(windows) - windows.count(None)],  # of each group
        bytes=[storage.nbytes for storage in engine.cache.storages],
    )


def draw_groups(record: Record) -> scene.Scene:
    shown = [each for each in record.steps if each.length % EVERY == 0]
    titles = (
        f"Full attention: {times(record.layers[0], 'layer')}",
        f"Window of {PAGES_WINDOW}: {times(record.layers[1], 'layer')}",
    )
    panels = []
    curves = []
    for group, (title, color) in enumerate(zip(titles, ("first", "second"))):
        rows = []
        for each in shown:
            table = each.tables[group]
            kinds = ["idle" if page is None else color for page in table]
            names = ["" if page is None else str(page) for page in table]
            cells = [scene.Cell(*pair) for pair in zip(kinds, names)]
            cells += [scene.Cell()] * (-(-LENGTH // PAGE) - len(cells))
            rows.append(scene.Row(str(each.length), cells))
        key = {color: "held"} | ({"idle": "freed to the pool"} if group else {})
        panels.append(
            scene.Panel(
                f"Page table, {title[0].lower()}{title[1:]}",
                scene.Cells(rows),
                f"A row is the table after that many tokens, a column {PAGE} positions, a "
                "number the page of the pool."
                if not group
                else f"This pool has {times(record.pool_sizes[1], 'page')}, so freed pages are "
                "soon used again.",
                key,
            )
        )
        points = [(each.length, held_count(each.tables[group])) for each in record.steps]
        curves.append(scene.Curve(title, points, color))
    last = [held_count(table) for table in shown[-1].tables]
    panels.append(
        scene.Panel(
            "Pages held as the request grows",
            scene.Lines(
                curves,
                scene.Axis("tokens"),
                scene.Axis("pages"),
                [scene.Mark(f"second pool: {record.pool_sizes[1]}", y=record.pool_sizes[1])],
            ),
        )
    )
    share = record.bytes[1] / record.layers[1] / (record.bytes[0] / record.layers[0])
    return scene.Scene(
        "A request has one page table per KV cache group: full attention keeps every page, "
        "sliding-window layers free pages behind the window. After "
        f"{shown[-1].length} tokens it holds {last[0]} and {last[1]}. A sliding-window layer "
        f"has {percent(share)} of the other's memory.",
        *panels,
    )


PICTURES = {
    "cache-groups": scene.Picture("Once upon a time", record_groups, draw_groups),
    "window-pages": scene.Picture("Once upon a time", record_pages, draw_pages),
    "window-layers": scene.Picture(
        "One day, a boy named Tim saw a ball.", record_windows, draw_windows
    ),
}
