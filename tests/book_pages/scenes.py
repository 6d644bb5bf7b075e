"""What tests of pictures share: records, scenes, and the text that `generate` writes."""

import sys

import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "course"))
import draw_picture  # noqa: E402

import pictures  # noqa: E402
from pictures import runs  # noqa: E402


def drawn(slug: str, prompt: str | None = None):
    """The record of a picture and its scene. prompt: None is that of the book."""
    return pictures.recorded(slug, prompt), pictures.scene_of(slug, prompt)


def draw(*args) -> int:
    """Run the command that draws a picture, and return its exit code."""
    return draw_picture.main(list(args))


def forms(scene, kind: type) -> list:
    return [panel.form for panel in scene.panels if isinstance(panel.form, kind)]


def lengths(bars) -> list[float]:
    """The length of the first part of each bar."""
    return [row.parts[0][0] for row in bars.rows]


def places(row, kind: str) -> list[int]:
    """Where the cells of that kind are in a row."""
    return [at for at, cell in enumerate(row.cells) if cell.kind == kind]


def token_texts(line) -> list[str]:
    return [token.text for token in line.tokens]


def signed(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def text_of(line) -> str:
    return "".join(token_texts(line))


def written(prompt: str, name: str = "stories", **params) -> list[str]:
    """The tokens that `generate` writes after a prompt."""
    return runs.token_texts(runs.generate_tokens(runs.encode(prompt, 200), name, **params))


def probs_after(text: str, temperature: float = 1.0):
    """The model's probabilities of the next token, by a pass of its own, in float64."""
    with torch.inference_mode():
        logits = runs.load()(torch.tensor([runs.encode(text, 300)]))[0, -1]
    return (logits.double() / temperature).softmax(dim=-1)
