"""The pictures of the lessons; scene.py explains how to write one."""

import functools
import html
import importlib
import pkgutil
import shlex
from pathlib import Path
from typing import Any

from pictures import card, render
from pictures.scene import Picture, Scene

HERE = Path(__file__).parent
BOOK = HERE.parent / "book"
PLAYER = HERE.parents[1] / "server" / "player.js"
RECORDED = 'class="recorded"'  # marks a picture that needs player.js

PICTURES: dict[str, Picture] = {}  # slug of a lesson -> its picture
for found in pkgutil.iter_modules([str(HERE)]):
    PICTURES |= getattr(importlib.import_module(f"pictures.{found.name}"), "PICTURES", {})


@functools.cache
def recorded(slug: str, prompt: str | None = None) -> Any:
    """Return the record of a picture's run. prompt: None for the book's prompt."""
    picture = PICTURES[slug]
    return picture.record(picture.prompt if prompt is None else prompt)


def scene_of(slug: str, prompt: str | None = None) -> Scene:
    return PICTURES[slug].draw(recorded(slug, prompt))


def figure(id: str, prompt: str | None = None) -> str:
    """Return the picture, caption and redraw command of a lesson as HTML; "" without a picture."""
    slug = id.partition("-")[2]
    if slug not in PICTURES:
        return ""
    said = PICTURES[slug].prompt if prompt is None else prompt
    command = f"python lessons.py picture {id.partition('-')[0]} --prompt {shlex.quote(said)}"
    made = (
        '<p class="made">Drawn from a run of this code. With your own prompt:</p>'
        f'<pre class="command"><code data-copy>{html.escape(command, quote=False)}</code></pre>'
    )
    return render.picture(scene_of(slug, prompt), made)


def page(id: str, prompt: str | None = None) -> str:
    """Return the picture of a lesson as a self-contained HTML page; "" without a picture."""
    shown = figure(id, prompt)
    files = [PLAYER, BOOK / "pictures.js"] if RECORDED in shown else []
    scripts = "".join(f"<script>\n{file.read_text('utf-8')}</script>\n" for file in files)
    styles = "".join(file.read_text("utf-8") for file in (BOOK / "style.css", HERE / "scenes.css"))
    return shown and (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{id}</title>\n<style>\n{styles}</style>\n</head>\n"
        f'<body class="alone"><main><h1>{id}</h1>\n{shown}\n</main>\n'
        f"{scripts}</body>\n</html>\n"
    )


def svg_of(id: str, prompt: str | None = None) -> str:
    """Return the picture of a lesson as an SVG file; "" without a card."""
    slug = id.partition("-")[2]
    if slug not in PICTURES or not PICTURES[slug].card:
        return ""
    drawn = scene_of(slug, prompt)
    return card.card(drawn.caption, [drawn.panels[at] for at in PICTURES[slug].card])
