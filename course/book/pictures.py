"""The pictures of the lessons: which there are, and how a page shows one."""

import functools
import html
import shlex
from pathlib import Path
from typing import Any

from book import (
    asking,
    caching,
    choosing,
    compiled,
    crossing,
    drafting,
    first_steps,
    loading,
    measuring,
    numbers,
    operating,
    packing,
    paging,
    penalties,
    racing,
    replicating,
    requesting,
    routing,
    scaling,
    scoring,
    searching,
    serving,
    speculating,
    spreading,
    tokenizing,
    turning,
)
from book.draw import Picture

HERE = Path(__file__).parent
PLAYER = HERE.parents[1] / "server" / "player.js"
RECORDED = 'class="recorded"'  # where that script is wanted


PICTURES = {  # slug of a lesson -> its picture
    **first_steps.PICTURES,
    **choosing.PICTURES,
    **penalties.PICTURES,
    **numbers.PICTURES,
    **caching.PICTURES,
    **speculating.PICTURES,
    **searching.PICTURES,
    **turning.PICTURES,
    **serving.PICTURES,
    **measuring.PICTURES,
    **compiled.PICTURES,
    **racing.PICTURES,
    **packing.PICTURES,
    **asking.PICTURES,
    **scoring.PICTURES,
    **tokenizing.PICTURES,
    **crossing.PICTURES,
    **requesting.PICTURES,
    **operating.PICTURES,
    **loading.PICTURES,
    **paging.PICTURES,
    **drafting.PICTURES,
    **spreading.PICTURES,
    **replicating.PICTURES,
    **routing.PICTURES,
    **scaling.PICTURES,
}


LIVE = {  # those that live.js makes anew in the page, of the reader's own prompt
    *("greedy-decoding", "eos-handling", "context-window"),
    *("multinomial", "temperature", "top-k", "top-p"),
    *("presence-penalty", "frequency-penalty", "repetition-penalty"),
    "fp16-bf16",
    *("kv-cache-dynamic", "kv-cache-static", "kv-cache-fix", "variable-batching"),
    *("beam-search", "length-penalty", "top-p-without-sorting", "prompt-lookup"),
    *("stop-strings", "logprobs"),
}
SMALL = {"context-window", "kv-cache-fix"}  # of many passes, so those of the draft model


@functools.cache
def recorded(picture: Picture, prompt: str) -> Any:
    return picture.record(prompt)


def figure(id: str, prompt: str | None = None) -> str:
    """The picture of a lesson, with its caption and how to make it anew, as HTML; "" for none."""
    slug = id.partition("-")[2]
    picture = PICTURES.get(slug)
    if picture is None:
        return ""
    prompt = picture.prompt if prompt is None else prompt
    drawing = picture.draw(recorded(picture, prompt))
    option = "rows" if picture.rows else "prompt"
    command = f"python lessons.py picture {id[:2]} --{option} {shlex.quote(prompt)}"
    file = picture.draw.__module__.rpartition(".")[2]  # its own styles are under this name
    made = "Drawn from rows of a benchmark" if picture.rows else "Drawn from a run of this code"
    own = picture.own or f"The same for your own {option}"
    return (
        f'<figure class="picture of-{file}"><figcaption>{drawing.caption}</figcaption>'
        f'<div class="drawing" role="img" aria-label="{html.escape(drawing.text)}">'
        f"{drawing.body}</div>{drawing.live}{own_prompt(slug, prompt)}"
        f'<p class="made">{made}. {own}:</p>'
        f'<pre class="command"><code data-copy>{html.escape(command, quote=False)}</code></pre>'
        "</figure>"
    )


def own_prompt(slug: str, prompt: str) -> str:
    """The form for a prompt of the reader's own, which live.js shows where there is a model."""
    if slug not in LIVE:
        return ""
    model, size = ("stories-draft", 2) if slug in SMALL else ("stories-llama", 6)
    return (
        f'<form class="own-prompt" data-picture="{slug}" data-model="{model}" hidden>'
        "<label>Your own prompt "
        f'<input name="prompt" required maxlength="2000" value="{html.escape(prompt)}"></label> '
        '<button type="submit">Draw</button><p class="note" role="status">Draw loads the model, '
        f"{size} MB, from beside this page.</p></form>"
    )


def introduction() -> tuple[str, dict[str, first_steps.Piece]]:
    """The prompt and the pieces of the page on how a transformer makes a token."""
    picture = PICTURES["init"]
    return picture.prompt, first_steps.pieces(recorded(picture, picture.prompt))


def page(id: str, prompt: str | None = None) -> str:
    """The picture of a lesson as an HTML file that needs no other. Empty if it has none."""
    shown = figure(id, prompt)
    files = [PLAYER] if RECORDED in shown else []
    scripts = "".join(
        f"<script>\n{file.read_text('utf-8')}</script>\n" for file in [*files, HERE / "pictures.js"]
    )
    styles = "".join((HERE / name).read_text("utf-8") for name in ("style.css", "pictures.css"))
    return shown and (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{id}</title>\n<style>\n{styles}</style>\n</head>\n"
        f'<body class="alone"><main><h1>{id}</h1>\n{shown}\n</main>\n'
        f"{scripts}</body>\n</html>\n"
    )
