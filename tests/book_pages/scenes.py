"""What tests of pictures share: records, scenes, and the text that `generate` writes."""

import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "course"))


def drawn(slug: str, prompt: str | None = None):
    """The record of a picture and its scene. prompt: None is that of the book."""
    import pictures

    return pictures.recorded(slug, prompt), pictures.scene_of(slug, prompt)


def forms(scene, kind: type) -> list:
    return [panel.form for panel in scene.panels if isinstance(panel.form, kind)]


def written(prompt: str, name: str = "stories", **params) -> list[str]:
    """The tokens that `generate` writes after a prompt."""
    from pictures import runs

    return runs.token_texts(runs.generate_tokens(runs.encode(prompt, 200), name, **params))


def probs_after(text: str, temperature: float = 1.0):
    """The model's probabilities of the next token, by a pass of its own, in float64."""
    import torch

    from pictures import runs

    with torch.inference_mode():
        logits = runs.load()(torch.tensor([runs.encode(text, 300)]))[0, -1]
    return (logits.double() / temperature).softmax(dim=-1)
