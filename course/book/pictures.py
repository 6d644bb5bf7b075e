"""The pictures of the lessons: which there are, and how a page shows one."""

import functools
import html
import shlex
from pathlib import Path
from typing import Any

from book import (
    asking,
    compiled,
    numbers,
    packing,
    scoring,
    searching,
    serving,
    tokenizing,
    turning,
)
from book.draw import Picture

HERE = Path(__file__).parent
PLAYER = HERE.parents[1] / "server" / "player.js"
RECORDED = 'class="recorded"'  # where that script is wanted


PICTURES = {  # slug of a lesson -> its picture
    **numbers.PICTURES,
    **searching.PICTURES,
    **turning.PICTURES,
    **serving.PICTURES,
    **compiled.PICTURES,
    **packing.PICTURES,
    **asking.PICTURES,
    **scoring.PICTURES,
    **tokenizing.PICTURES,
}


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
    command = f"python lessons.py picture {id[:2]} --prompt {shlex.quote(prompt)}"
    file = picture.draw.__module__.rpartition(".")[2]  # its own styles are under this name
    own = picture.own or "The same for your own prompt"
    return (
        f'<figure class="picture of-{file}"><figcaption>{drawing.caption}</figcaption>'
        f'<div class="drawing" role="img" aria-label="{html.escape(drawing.text)}">'
        f"{drawing.body}</div>{drawing.live}"
        f'<p class="made">Drawn from a run of this code. {own}:</p>'
        f'<pre class="command"><code data-copy>{html.escape(command, quote=False)}</code></pre>'
        "</figure>"
    )
