"""Shards of a model on each rank, and collectives between ranks."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from command_line.options import STORIES
from model import Model
from parallel.ranks import TensorParallelGroup
from parallel.shards import load_shard, parallelize_vocabulary
from pictures import runs, scene
from pictures.scene import word

NAME = "stories-llama"


class Table:
    """The tensors that ranks exchange as threads of one process."""

    def __init__(self, size: int):
        self.size = size
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Rank(TensorParallelGroup):
    """A rank that is a thread. collective_log: (name, own width, bytes sent) per collective."""

    def __init__(self, table: Table, rank: int, parallel_mode: str):
        self.table = table
        self.rank = rank
        self.size = table.size
        self.parallel_mode = parallel_mode
        self.collective_log: list[tuple[str, int, int]] = []

    def timed_collective(self, bytes_sent: int, collective, *arguments) -> None:
        (own, *_) = (each for each in arguments if isinstance(each, torch.Tensor))
        room = next((each for each in arguments if isinstance(each, list)), [])
        self.table.parts[self.rank] = own.clone()
        self.table.barrier.wait()
        parts = list(self.table.parts)
        self.table.barrier.wait()
        for place, part in zip(room, parts):
            place.copy_(part)
        if collective is torch.distributed.all_reduce:
            own.copy_(sum(parts))
        self.collective_log.append((collective.__name__, own.shape[-1], bytes_sent))


@functools.cache
def compute(parallel_mode: str, size: int, ids: tuple[int, ...]) -> Record:
    """Run a forward pass of several ranks over a sequence."""
    table = Table(size)

    def work(rank: Rank) -> tuple[Model, torch.Tensor]:
        torch.set_num_threads(1)
        model = load_shard(STORIES.with_name(NAME), tp_group=rank)
        parallelize_vocabulary(model)
        with torch.inference_mode():
            return model, model(torch.tensor([ids]))[0, -1]

    ranks = [Rank(table, number, parallel_mode) for number in range(size)]
    with ThreadPoolExecutor(size) as pool:
        models, logits = zip(*pool.map(work, ranks))
    return Record(
        models=list(models),  # per rank
        # per rank, with bytes per token
        collective_log=[
            [(*each, sent // len(ids)) for *each, sent in rank.collective_log] for rank in ranks
        ],
        logits=logits[0],  # of the last position, on rank 0
    )


class Stage(NamedTuple):
    """A weight sharded by rows or columns, or a collective."""

    name: str
    kind: str  # "rows", "columns"; "" for a collective
    widths: list[int]  # per rank
    sent: list[int]  # bytes per rank and token


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", 1, "self_attn.o_proj", 2]
MLP = ["mlp.gate_proj", "mlp.up_proj", 3, "mlp.down_proj", 4]
VOCABULARY = ["embed_tokens", 0, "lm_head", -1]


def record_half(prompt: str, steps: list[str | int], *parallel_modes: str, size: int = 2) -> Record:
    """Record shards and collectives of a part of the model.

    steps: names of weights in the first layer, and indices of collectives in mode gather.
    """
    ids = tuple(runs.encode(prompt, 20))
    whole = runs.load(NAME)
    alone = runs.next_logits(list(ids), NAME)
    found = {}
    off = {}
    for parallel_mode in parallel_modes or ("gather",):
        run = compute(parallel_mode, size, ids)
        off[parallel_mode] = (run.logits - alone).abs().max().item()
        found[parallel_mode] = []
        for step in steps:
            if isinstance(step, str):
                found[parallel_mode].append(weight_stage(step, whole, run.models))
            elif parallel_mode == "gather" or step % 2 == 0:  # two all-gathers, or one all-reduce
                collective_log = [
                    each[step if parallel_mode == "gather" else step // 2]
                    for each in run.collective_log
                ]
                names, widths, sent = map(list, zip(*collective_log))
                found[parallel_mode].append(Stage(names[0].replace("_", "-"), "", widths, sent))
    return Record(
        parallel_modes=found,
        off=off,  # largest logit difference to one process
        following=runs.token_text(run.logits.argmax().item()),  # the top token
        prompt=list(zip(runs.token_texts(list(ids)), ids)),  # (text, id)
        head=whole.config.head_dim,  # head_dim
    )


def weight_stage(name: str, whole: Model, models: list[Model]) -> Stage:
    """Return how a layer's weight is sharded. The head of a tied model is its embedding."""
    name = name if name in VOCABULARY else f"layers.0.{name}"
    names = (name, "embed_tokens") if name == "lm_head" else (name,)
    shapes = [
        next(weight.shape for key, weight in model.named_parameters() if key.startswith(names))
        for model in [whole, *models]
    ]
    columns = shapes[0][0] == shapes[1][0]
    widths = [shape[columns] for shape in shapes[1:]]
    return Stage(name.rpartition(".")[2], "columns" if columns else "rows", widths, [])


def cells_of(stage: Stage, rank: int, unit: int) -> list[scene.Cell]:
    """Draw the part of a stage that a rank holds, one square per `unit` numbers."""
    if stage.name == "all-reduce":
        return [scene.Cell("kept")] * max(1, stage.widths[rank] // unit)
    all_parts = stage.name == "all-gather" or (stage.name == "gather" and rank == 0)
    return [
        scene.Cell(f"owner{at}" if all_parts or at == rank + 1 else "idle")
        for at, width in enumerate(stage.widths, 1)
        for _ in range(width // unit)
    ]


def draw_half(record: Record, caption: str, unit: int, *more: scene.Panel) -> scene.Scene:
    """Draw a panel per rank, or rank 0 of each parallel mode if modes are compared."""
    panels = []
    for parallel_mode, stages in record.parallel_modes.items():
        ranks = range(len(stages[0].widths)) if len(record.parallel_modes) == 1 else [0]
        for rank in ranks:
            rows = []
            for stage in stages:
                value = (
                    f"{stage.sent[rank]:,} bytes sent"
                    if stage.sent
                    else (f"{stage.widths[rank]:,} of {sum(stage.widths):,} {stage.kind}")
                )
                rows.append(scene.Row(stage.name, cells_of(stage, rank, unit), value))
            title = f"Rank {rank}" + f", --join {parallel_mode}" * (len(record.parallel_modes) > 1)
            panels.append(scene.Panel(title, scene.Cells(rows)))
    reduced = any(
        stage.name == "all-reduce" for stages in record.parallel_modes.values() for stage in stages
    )
    key = {"owner1": "of rank 0", "owner2": "of rank 1", "idle": "on the other rank only"}
    panels[-1].key = key | ({"kept": "sums of both ranks"} if reduced else {})
    panels[-1].note = f"A square is {unit} rows, columns, or numbers of a token."
    return scene.Scene(caption, *panels, *more)


def same(off: float) -> str:
    return "bit-identical to one process" if off == 0 else f"within {off:.6f} of one process"


def bytes_of(record: Record, parallel_mode: str = "gather") -> int:
    """Return the bytes that rank 0 sends per token."""
    return sum(sum(stage.sent[:1]) for stage in record.parallel_modes[parallel_mode])


def draw_mlp(record: Record) -> scene.Scene:
    return draw_half(
        record,
        "Each rank computes half of the MLP. Two all-gathers send it the other half, "
        f"{bytes_of(record):,} bytes per token in each layer. The logits are "
        f"{same(record.off['gather'])}.",
        32,
    )


def draw_heads(record: Record) -> scene.Scene:
    (own, heads), (own_keys, keys) = (
        (stage.widths[0] // record.head, sum(stage.widths) // record.head)
        for stage in record.parallel_modes["gather"][:2]
    )
    return draw_half(
        record,
        f"Heads are independent of each other. Each rank attends with {own} of {heads} query "
        f"heads, and its KV cache holds {own_keys} of {keys} KV heads. A square is a head.",
        record.head,
    )


def draw_vocabulary(record: Record) -> scene.Scene:
    rows = record.parallel_modes["gather"][0].widths[0]
    tokens = [
        scene.Token(text, f"owner{id // rows + 1}", str(id // rows)) for text, id in record.prompt
    ]
    return draw_half(
        record,
        "Embedding and LM head are sharded by token id. A token's row is on one rank, and the "
        "others add zeros. Only rank 0 gets all logits, because it samples the next token, "
        f"{word(record.following)}.",
        512,
        scene.Panel(
            "The prompt, and the rank that embeds each token",
            scene.Tokens([scene.Line(tokens)]),
            wide=True,
        ),
    )


def draw_parallel_modes(record: Record) -> scene.Scene:
    gather, reduce = (bytes_of(record, parallel_mode) for parallel_mode in record.parallel_modes)
    return draw_half(
        record,
        "A row-parallel product takes the inputs that its rank already has. One all-reduce "
        f"replaces two all-gathers: {reduce:,} bytes per token in each layer instead of "
        f"{gather:,}. The sums round differently: logits change by up to "
        f"{record.off['reduce']:.6f}.",
        32,
    )


# shard-loading


def record_sizes(prompt: str) -> dict[int, list[int]]:
    """Return number of ranks -> weight bytes of each rank."""
    ids = tuple(runs.encode(prompt, 20))
    return {
        size: [
            sum(weight.nbytes for weight in model.parameters())
            for model in compute("gather", size, ids).models
        ]
        for size in (1, 2, 3)
    }


def draw_sizes(record: dict[int, list[int]]) -> scene.Scene:
    rows = []
    for size, ranks in record.items():
        for rank, held in enumerate(ranks):
            name = f"rank {rank} of {size}" if size > 1 else "one process"
            rows.append(scene.Bar(name, [(held, f"owner{rank + 1}")], f"{held / 1e6:.1f} MB"))
    most = [f"{max(ranks) / 1e6:.1f} MB" for ranks in record.values()]
    return scene.Scene(
        "Each rank reads the file in small blocks and keeps the rows and columns that it "
        f"computes with. No process ever holds all {most[0]}: each of two ranks holds at most "
        f"{most[1]}, each of three {most[2]}.",
        scene.Panel(
            "Weights in memory",
            scene.Bars(rows),
            "The shards of three ranks add up to more than the model: there are two KV heads, "
            "so one rank has a copy of both.",
        ),
    )


def half(steps: list[str | int], *parallel_modes: str) -> Callable[[str], Record]:
    return lambda prompt: record_half(prompt, steps, *parallel_modes)


PROMPT = "Once upon a time"
PICTURES = {
    "tensor-parallel": scene.Picture(PROMPT, half(MLP), draw_mlp),
    "split-heads": scene.Picture(PROMPT, half(ATTENTION), draw_heads),
    "split-vocabulary": scene.Picture(
        "The knight hid a treasure map in the garden", half(VOCABULARY), draw_vocabulary
    ),
    "row-parallel": scene.Picture(
        PROMPT, half(ATTENTION + MLP, "gather", "reduce"), draw_parallel_modes
    ),
    "shard-loading": scene.Picture(PROMPT, record_sizes, draw_sizes),
}
