"""Files of prefixes in a directory of limited size: what is removed first."""

import tempfile
from pathlib import Path
from types import SimpleNamespace as Record

from cache import hash_pages, root_hash
from engine.engine import Engine
from loading.prefix_files import PrefixFiles
from pictures import runs, scene
from pictures.scene import times
from sampling import SamplingParams

PAGE = 16  # positions, as by default
PAGES = 10  # of each prompt
ASKED = "ABAC"
LIMIT = 2**20 * 12  # bytes of all files; a page has 2**19


def ask(directory: Path, prompts: dict[str, list[int]], name: str) -> Record:
    """Record an engine that gets one request: what it finds, and the files it leaves.

    order: (name of the prompt, index of the page) of each file, least recently used first.
    """
    files = PrefixFiles(directory, "stories", LIMIT)
    engine = Engine(runs.load(), page_size=PAGE, prefix_files=files)
    request = engine.add(prompts[name], SamplingParams(max_new_tokens=1))
    try:
        while engine.busy:
            engine.step()
    finally:
        engine.close()
    pages = {
        files.name(0, page_hash): (name, index)
        for name, prompt in prompts.items()
        for index, page_hash in enumerate(hash_pages(prompt[:-1], PAGE, root_hash("")))
    }
    found = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    order = [pages[file.name] for file in found]
    return Record(name=name, cached=request.num_cached_tokens, order=order)


def record_files(prompt: str) -> Record:
    ids = runs.encode(prompt, 100)
    length = PAGE * PAGES + 1
    prompts = {name: ([ord(name)] + ids * length)[:length] for name in sorted(set(ASKED))}
    with tempfile.TemporaryDirectory() as folder:
        stages = [ask(Path(folder), prompts, name) for name in ASKED]
        restarts = [ask(Path(folder), prompts, name) for name in "CAB"]
    return Record(prompts=prompts, stages=stages, restarts=restarts)


def files_panel(title: str, stage: Record, removed: set, note: str = "") -> scene.Panel:
    """Draw the files of each prompt with their ranks, and those that the next request removes."""
    rows = []
    for name, kind in zip(sorted(set(ASKED)), ("owner1", "owner4", "owner3")):
        cells = []
        for index in range(PAGES):
            page = name, index
            if page in stage.order:
                text = str(stage.order.index(page) + 1)
                cells.append(scene.Cell("bad" if page in removed else kind, text))
            else:
                cells.append(scene.Cell("idle"))
        rows.append(scene.Row(name, cells))
    key = {"idle": "no file"}
    if removed:
        key = {"bad": "removed while C is written"} | key
    return scene.Panel(title, scene.Cells(rows), note, key)


def draw_files(record: Record) -> scene.Scene:
    *_, before, after = record.stages
    removed = set(before.order) - set(after.order)
    wanted = len(set(before.order) | set(after.order))
    (lost,) = {name for name, _ in removed}
    found = {each.name: each.cached for each in record.restarts}
    positions = PAGE * PAGES
    bars = [
        scene.Bar(name, [(found[name], "good")], f"{found[name]} of {positions}", positions)
        for name in found
    ]
    return scene.Scene(
        f"{wanted} pages are written, and {len(after.order)} files stay. Prompt {lost} was used "
        f"least recently and loses its last {times(len(removed), 'page')}, so that after a "
        f"restart its first {found[lost]} positions are still found.",
        files_panel(
            "Files after A, B and A again; 1 is removed first",
            before,
            removed,
            "A row: the ten pages of a prompt. They count as used when their request came, each a "
            "microsecond before the previous page.",
        ),
        files_panel("Files after C", after, set()),
        scene.Panel("Positions found after a restart", scene.Bars(bars, positions), wide=True),
    )


PICTURES = {"prefix-lru": scene.Picture("Once upon a time", record_files, draw_files)}
