"""The two pictures of the Readme are what the code draws, and what it recorded."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "course"))
SVG = "{http://www.w3.org/2000/svg}"
IDS = ("17-speculative-decoding", "38-continuous-batching")


def card(id: str, prompt: str | None = None):
    from book.cards import svg_of

    return ElementTree.fromstring(svg_of(id, prompt))


def boxes(tree) -> list[tuple[float, float, str]]:
    """(y, x, colour) of each coloured box, but for the card's own and those of the legend."""
    found = []
    for box in tree.iter(f"{SVG}rect"):
        if box.get("stroke") == "none":
            found.append((float(box.get("y")), float(box.get("x")), box.get("fill")))
    return sorted(found)


@pytest.mark.parametrize("id", IDS)
def test_the_files_are_what_the_code_draws(id):
    from book.cards import CARDS, svg_of

    file = ROOT / "course" / "pictures" / f"{id}.svg"
    assert file.read_text("utf-8") == svg_of(id)
    assert (
        f"](course/pictures/{file.name})"
        in (ROOT / "Readme.md").read_text("utf-8").split("## Start")[0]
    )
    assert {name[3:] for name in IDS} == set(CARDS)


@pytest.mark.parametrize("id", IDS)
def test_a_card_holds_all_of_itself(id):
    """Nothing lies outside it, and its letters are stretched to where they were meant to be."""
    tree = card(id)
    width, height = (float(tree.get(name)) for name in ("width", "height"))
    assert tree.get("viewBox") == f"0 0 {width:g} {height:g}"
    for box in tree.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
    for text in tree.iter(f"{SVG}text"):
        assert 0 < float(text.get("x")) and float(text.get("y")) < height
        if text.get("textLength"):
            assert float(text.get("x")) + float(text.get("textLength")) <= width
    assert tree.find(f"{SVG}title").text == tree.get("aria-label")
    assert "http" not in ElementTree.tostring(tree, "unicode").replace(SVG[1:-1], "")


@pytest.mark.parametrize("prompt", [None, "Lily said <"])
def test_the_text_of_the_card_is_that_of_both_models(prompt):
    """Green where the verdicts of `generate_speculative` accept a draft."""
    from book import recordings
    from book.cards import GREEN, MAGENTA
    from infer_speculative import generate_speculative
    from sampling import SamplingParams

    tree = card(IDS[0], prompt)
    ids = recordings.encode(prompt or "One day", 100)
    models = [recordings.load(), recordings.load("stories-draft")]
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(40, temperature=0.8)
    passes = list(generate_speculative(*models, ids, params, generator=generator))
    written = [token for each in passes for token in each.tokens]
    kinds = ["none"] * len(ids)
    for each in passes:
        own = len(each.tokens) - each.accepted
        kinds += [GREEN] * each.accepted + [MAGENTA] * own
    assert [fill for _, _, fill in boxes(tree)] == kinds
    shown = [text.text for text in tree.iter(f"{SVG}text") if text.get("textLength")]
    text = recordings.encoding().decode([*ids, *written]).replace("\n", "\\n")
    assert "".join(shown).replace(" ", "") == text.replace(" ", "")
    accepted = sum(each.accepted for each in passes)
    title = f"{len(written)} tokens in {len(passes)} passes of the large model: {accepted} were "
    assert tree.get("aria-label").startswith(title)


def test_the_rows_of_the_card_are_those_of_the_recording():
    """Each text has as many places as tokens, static and continuous; others are idle."""
    from book.cards import EMPTY, OWNERS
    from book.pictures import PICTURES, recorded

    record = recorded(PICTURES["continuous-batching"], "Lily")
    found = [fill for _, _, fill in boxes(card(IDS[1]))]
    steps = (record.static, record.continuous)
    expected = [
        EMPTY if step[row] is None else OWNERS[step[row]]
        for run in steps
        for row in range(3)
        for step in run
    ]
    assert found == expected
    for owner, length in enumerate(record.lengths):
        assert found.count(OWNERS[owner]) == 2 * length
    counts = [text.text for text in card(IDS[1]).iter(f"{SVG}text") if "idle" in text.text]
    idle = [3 * len(run) - sum(record.lengths) for run in steps]
    assert [int(re.search(r"(\d+) places", line)[1]) for line in counts] == idle


def test_the_command_writes_one(tmp_path, capsys):
    import draw_picture

    file = tmp_path / "x.svg"
    assert draw_picture.main(["38-continuous-batching", "--output", str(file)]) == 0
    assert file.read_text("utf-8").startswith("<svg ")
    capsys.readouterr()
    assert draw_picture.main(["07-top-p", "--output", str(file)]) == 2
    line = (
        "lessons.py: error: 07-top-p has no picture as SVG; these have one: speculative-decoding,"
    )
    assert capsys.readouterr().err.startswith(line)


def test_the_first_page_of_the_book_leaves_them_to_the_lessons():
    import make_book

    _, words, _ = make_book.introduction((ROOT / "Readme.md").read_text("utf-8"))
    assert "<img" not in words and "in a picture" not in words
    assert words.endswith("offline.</p>\n")
