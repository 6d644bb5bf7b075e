"""Pictures of lessons 21, 31 to 33 and 35 show what their runs gave."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import run_rows
from drawings import caption_of, drawn, of_class, tokens_of, tree_of, widths, words_of

from infer import beam_search, generate
from sampling import SamplingParams

TEXT = "Once upon a time"


def signed(number: float, digits: int = 2) -> str:
    return f"{number:.{digits}f}".replace("-", "\u2212")


def words(elements) -> list[str]:
    return [words_of(element) for element in elements]


def logprobs_of(name: str, ids: list[int], start: int) -> torch.Tensor:
    """What a pass over a text says of each token from a place on, (tokens, vocab_size)."""
    from book.recordings import load

    with torch.inference_mode():
        return load(name)(torch.tensor([ids]))[0, start - 1 : -1].double().log_softmax(dim=-1)


def test_sums_and_means_of_beams():
    from book.recordings import encoding, load

    record, tree = drawn("length-penalty")
    ids = encoding().encode("They went home and slept.")
    texts = []
    for text, n, total in record.texts:
        tokens = encoding().encode(text, allowed_special="all")
        texts.append(tokens)
        rows = logprobs_of("stories", ids + tokens, len(ids))
        own = sum(row[token].item() for row, token in zip(rows, tokens))
        assert len(tokens) == n and own == pytest.approx(total, abs=1e-3)
    short, long = record.won
    assert max(range(len(texts)), key=lambda at: record.texts[at][2]) == short
    assert max(range(len(texts)), key=lambda at: record.texts[at][2] / record.texts[at][1]) == long
    for penalty, place in zip((0, 1), record.won):
        best = beam_search(load(), ids, 4, 24, length_penalty=penalty)
        assert best[0].tokens == texts[place]

    rows = list(tree.find(".//tbody").iter("tr"))
    worst = [min(total for *_, total in record.texts), min(s / n for _, n, s in record.texts)]
    for at, (row, (text, n, total)) in enumerate(zip(rows, record.texts, strict=True)):
        cells = list(row.iter("td"))
        assert tokens_of(row) == [text.replace("<|endoftext|>", "\u25a0")]
        assert words_of(cells[1]) == str(n)
        for cell, score, longest, best in zip(cells[2:], (total, total / n), worst, record.won):
            assert words_of(cell) == signed(score) + " wins" * (at == best)
            assert widths(cell) == pytest.approx([100 * score / longest], abs=0.01)
            assert len(of_class(cell, "i", "good")) == (at == best)
    short, long = (record.texts[at] for at in record.won)
    assert max(n for _, n, _ in record.texts) == record.most == 24
    told = f"so by its sum a text of {short[1]} token wins. Divided by its length one of {long[1]} "
    told += "does: "
    told += f"{signed(long[2] / long[1])} a token against {signed(short[2] / short[1])}."
    assert short[1] == 1 and caption_of("length-penalty").endswith(told)
    note = words_of(of_class(tree, "p", "note")[0])
    assert "the texts that 4 beams find, of at most 24 tokens. sum is length penalty 0" in note
    assert "its sum of now / 24, so the search ends only when" in note


def arc(path) -> float:
    """The angle of a sector."""
    numbers = [float(number) for number in re.findall(r"[-\d.]+", path.get("d"))]
    middle = numbers[:2]
    start, end = (
        math.atan2(middle[1] - y, x - middle[0]) for x, y in (numbers[2:4], numbers[9:11])
    )
    return (end - start) % (2 * math.pi)


def test_dials_of_slow_turns():
    """Against the lesson's formula, and the model's own tables of cosines."""
    import llama
    from book.recordings import load
    from book.turning import SCALING

    record, tree = drawn("llama-3")
    assert (record.trained, record.long) == (256, 512) and len(record.pairs) == 16
    for pair, (plain, slow) in enumerate(record.pairs):
        wave = 2 * math.pi * 10000 ** (pair / 16)
        kept = min(max((256 / wave - 1) / 3, 0), 1)
        assert 2 * math.pi / plain == pytest.approx(wave, rel=1e-5)
        assert slow == pytest.approx(plain * (kept + (1 - kept) / 2), rel=1e-5)
    panels = of_class(tree, "div", "panel")
    for which, part in enumerate(panels[:2]):
        dials = list(part.iter("li"))
        assert words(dials) == [f"{2 * math.pi / pair[which]:,.0f}" for pair in record.pairs]
        for dial, pair in zip(dials, record.pairs):
            known = min(256 * pair[0], 2 * math.pi)
            angle = min(512 * pair[which], 2 * math.pi)
            red = of_class(dial, "path", "bad")
            assert len(red) == (angle > known * 1.001)
            if red:
                assert arc(red[0]) == pytest.approx(angle - known, abs=2e-2)
            if known < 2 * math.pi:
                assert arc(of_class(dial, "path", "kept")[0]) == pytest.approx(known, abs=2e-2)
    assert len(of_class(panels[0], "path", "bad")) == 9
    assert not of_class(panels[1], "path", "bad")

    model = load("stories-llama")
    assert model.config.block_size == 256 and model.config.rope_scaling is None  # as before
    ids = encoding_of(TEXT)
    stories = [[4095, *ids, *row] for row in drawn_rows(model, ids)]
    assert [len(story) for story in stories] == [32] * 16
    texts = torch.tensor([stories[at:] + stories[:at] for at in range(16)]).flatten(1)
    config = copy.copy(model.config.__dict__) | {"block_size": 512}
    losses = []
    for scaling in (None, SCALING):
        other = llama.Llama(llama.LlamaConfig(**config | {"rope_scaling": scaling}))
        other.load_state_dict(model.state_dict())
        own = torch.zeros(512)  # of the token in each place
        for text in texts:
            with torch.inference_mode():
                logprobs = other(text[None])[0, :-1].log_softmax(dim=-1)
            own[1:] -= logprobs[torch.arange(511), text[1:]] / 16
        counts = [63] + [64] * 7  # nothing is before the first token
        losses.append([own[64 * at : 64 * at + 64].sum().item() / n for at, n in enumerate(counts)])
    for found, expected in zip(zip(*record.losses), losses, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
    # As in the lesson's table: past the window it rises as it is, and slowed it does not.
    plain, slow = losses
    assert max(plain[1:4]) < 1.96 < 2.3 < min(plain[5:])
    assert max(slow[1:]) - min(slow[1:]) < 0.03 and max(slow[4:]) < max(plain[1:4]) + 0.15
    (chart,) = of_class(tree, "svg", "chart")
    for kind, losses in (("bad", plain), ("first", slow)):
        (line,) = of_class(chart, "polyline", kind)
        points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        places = [34 + 31.5 * (at + 0.5) for at in range(8)]
        assert [x for x, _ in points] == pytest.approx(places, abs=0.06)
        heights = [130 - y for _, y in points]
        assert heights == pytest.approx([120 * loss / max(plain) for loss in losses], abs=0.15)
    labels = [part for part in chart.iter() if str(part.tag).endswith("text")]
    shown = words(part for part in labels if part.get("class") != "middle")
    assert sorted(shown) == sorted(f"{loss:.2f}" for loss in (plain[0], plain[-1], slow[-1]))
    caption = caption_of("llama-3")
    assert f"its loss rises to {plain[-1]:.2f}" in caption and caption.endswith(f"{slow[-1]:.2f}.")
    assert "Red: in 9 circles as it is, in 0 slowed." in words_of(tree)
    assert record.texts == (len(stories), len(stories[0]))
    told = "Measured on 16 texts of the same 16 beginnings of stories, of 32 tokens, which the"
    assert told in words_of(tree)
    assert slow[3] > plain[3]
    told = (
        f"Just before position 256 slower turns cost a little: {slow[3]:.2f}, not {plain[3]:.2f}."
    )
    assert told in words_of(tree)
    slowed = [slow / plain for plain, slow in record.pairs]
    assert max(slowed) == 1 and min(slowed) == pytest.approx(1 / SCALING.factor)
    assert words_of(panels[1]).startswith("Slowed up to 2 times, read to 512")


def encoding_of(text: str) -> list[int]:
    from book.recordings import encoding

    return encoding().encode(text)


def drawn_rows(model, ids: list[int]) -> list[list[int]]:
    """The beginnings of stories; one of them also by itself."""
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 31 - len(ids)}
    each = [SamplingParams(seed=seed, **params) for seed in range(16)]
    steps = list(generate(model, [ids] * 16, each))
    rows = [[step[row] for step in steps] for row in range(16)]
    assert run_rows(model, [ids], seed=9, **params) == rows[9:10]
    return rows


def in_cells(part) -> list[str]:
    """The texts in boxes; each is as wide as its characters are many."""
    boxes = of_class(part, "code", "cell")
    assert [box.get("style") for box in boxes] == [f"--size:{len(words_of(box))}" for box in boxes]
    return [text.replace("\u00b7", " ") for text in words(boxes)]


def test_merges_are_those_of_the_library(monkeypatch):
    """The ids of its own run on the file, and after each merge what a smaller vocabulary gives."""
    import tiktoken
    from tokenizers import Tokenizer

    from book import tokenizing

    record, tree = drawn("llama-3-tokenizer")
    files = []
    load = tokenizing.load_encoding

    def noted(directory, size):
        files.append((Path(directory) / "tokenizer.json").read_text("utf-8"))
        return load(directory, size)

    monkeypatch.setattr(tokenizing, "load_encoding", noted)
    encoding, pairs = tokenizing.llama_form()
    theirs = Tokenizer.from_str(files[0])
    merges = json.loads(files[0])["model"]["merges"]
    prompt = "They'LL see 1234 sunflowers"
    assert [id for _, id in record.tokens] == theirs.encode(prompt).ids
    assert (record.pairs, record.size) == (len(merges), 4095) == (pairs, 4095)
    cut = [piece for piece, _ in theirs.pre_tokenizer.pre_tokenize_str(prompt)]
    assert [piece.replace("\u0120", " ") for piece in cut] == record.pieces["Llama 3"]
    assert "".join(record.pieces["GPT-2"]) == prompt and "'LL" not in record.pieces["GPT-2"]
    assert record.word == " sunflowers"
    ranks = [rank for _, _, rank in record.steps[1:]]
    assert ranks == sorted(ranks) and record.steps[0] == (list(record.word), None, None)
    for parts, new, rank in record.steps[1:]:
        smaller = {
            token: id for token, id in encoding._mergeable_ranks.items() if id <= max(rank, 255)
        }
        until = tiktoken.Encoding("x", pat_str=".+", mergeable_ranks=smaller, special_tokens={})
        assert [until.decode([id]) for id in until.encode(record.word)] == parts
        assert encoding._mergeable_ranks[parts[new].encode()] == rank
    assert "".join(record.steps[-1][0]) == record.word

    first, second, third = of_class(tree, "div", "panel")
    assert in_cells(first) == record.pieces["GPT-2"] + record.pieces["Llama 3"]
    assert in_cells(second) == [part for parts, *_ in record.steps for part in parts]
    assert words(of_class(second, "code", "new")) == [
        parts[new].replace(" ", "\u00b7") for parts, new, _ in record.steps[1:]
    ]
    named = [words_of(row.find("th")) for row in second.iter("tr")]
    assert named == ["", *(f"rank {rank:,}" for rank in ranks)]
    shown = [text.replace("\u00b7", " ") for text in tokens_of(third)]
    assert shown == [text for text, _ in record.tokens]
    assert [words_of(chip.find("span")) for chip in third.iter("li")] == [
        f"{id:,}" for _, id in record.tokens
    ]
    assert shown[0] == "<|endoftext|>" and tokens_of(third, "out") == shown[:1]
    # Where the loader needs an order, and where any would do.
    assert "tokens: some can be made of several pairs." in words_of(second)
    assert "A piece that is no token stays in several." in words_of(second)
    assert "'LL" in record.pieces["Llama 3"] and "'LL" not in shown
    vocabulary = json.loads(files[0])["model"]["vocab"]
    made = [vocabulary[a + b] for a, b in merges]
    assert made == sorted(made) and len(set(made)) < len(made)


def test_ends_of_a_reply():
    from book.recordings import encoding, load

    record, tree = drawn("qwen")
    told = "<|endoftext|>Words: rain, boat\n\nThe boat came home. The moral of the story is"
    ids = encoding().encode(told, allowed_special="all")
    model = load("stories-llama")
    (alone,) = run_rows(model, [ids], max_new_tokens=26, ignore_eos=True)
    (reply,) = run_rows(model, [ids], max_new_tokens=26)
    assert record.tokens == [encoding().decode([id]) for id in alone]
    assert record.stops == len(reply) < 26 and reply[-1] == 4095
    assert "".join(record.tokens[record.stops :]).startswith("Words: ")  # as the user
    assert record.files == {"config.json": ["!"], "generation_config.json": ["!", "<|endoftext|>"]}
    assert words(of_class(tree, "code", "text-box")) == [told.replace("\n", "\\n")]
    first, both = of_class(tree, "div", "panel")
    written = [text.replace("\n", "\\n") for text in record.tokens]
    for part, count in ((first, 26), (both, len(reply))):
        (flow,) = of_class(part, "p", "flow")
        assert tokens_of(flow) == written[:count]
        assert tokens_of(flow, "new") == written[: len(reply)]
        assert tokens_of(flow, "out") == written[len(reply) : count]
    titles = words(part.find("p") for part in (first, both))
    assert titles == ["config.json alone", "config.json and generation_config.json"]
    told = "Which token ends a reply stands in a second file. Where only config.json is read, the "
    told += "model writes on after its reply, with the user\u2019s next message."
    assert caption_of("qwen") == told
    note = of_class(tree, "p", "note")[-1]
    assert tokens_of(note) == ["!", "<|endoftext|>"]  # the wrong end, and where a reply ends
    assert "one of several differences" in words_of(note)
    notes = [of_class(part, "p", "note")[0] for part in (first, both)]
    assert [tokens_of(note) for note in notes] == list(record.files.values())
    assert words_of(notes[0]).endswith("26 tokens, and no end.")
    assert words_of(notes[1]).endswith(f"{len(reply)} tokens.")


def test_a_reply_that_has_no_end():
    from book.tokenizing import draw_ends, record_ends

    record = record_ends("Once upon a time", most=4)
    drawing = draw_ends(record)
    assert record.stops == len(record.tokens) == 4
    assert "has not come to its end in 4 tokens" in drawing.caption
    assert drawing.body.count("4 tokens, and no end.") == 2


def test_a_conversation_is_in_each_prompt():
    from conftest import CHECKPOINTS

    from book.recordings import encoding, load
    from loading.chat import Chat

    record, tree = drawn("conversation")
    template = Chat(CHECKPOINTS / "stories-llama")
    model = load("stories-llama")
    said = []
    before = []
    bars = of_class(tree, "div", "talk")
    for number, (message, reply, turn) in enumerate(zip(record.said, record.replies, record.turns)):
        said.append({"role": "user", "content": message})
        left_out = 0
        while len(template.encode(said, encoding())) > 256 - 64:
            assert left_out < 4
            said = said[2:]
            left_out += 1
        prompt = template.encode(said, encoding())
        assert turn.first == number - len(said) // 2
        assert sum(turn.parts) == len(prompt) and len(turn.parts) == len(said)
        new = encoding().encode(reply)
        if number == 3:
            (new,) = run_rows(model, [prompt], max_new_tokens=64)
            assert encoding().decode(new) == reply
        assert turn.reply == len(new) == 64
        same = next((n for n, pair in enumerate(zip(prompt, before)) if len({*pair}) > 1), None)
        assert turn.same == (min(len(prompt), len(before)) if same is None else same)
        said.append({"role": "assistant", "content": reply})
        before = prompt + new
        bar, below = bars[2 * number : 2 * number + 2]
        shares = [100 * size / 256 for size in [*turn.parts, turn.reply]]
        assert shares_of(bar) == pytest.approx(shares, abs=0.01)
        assert sum(shares) <= 100
        kept = [100 * turn.same / 256] if number else []
        assert shares_of(below) == pytest.approx(kept, abs=0.01)
    assert [turn.first for turn in record.turns] == [0, 0, 0, 1] and len(bars) == 8
    lines = words(of_class(tree, "p", "title"))
    assert [int(re.search(r"(\d+) tokens", line)[1]) for line in lines] == [
        sum(turn.parts) for turn in record.turns
    ]
    assert tokens_of(tree, "gone") == record.said[:1]
    assert "In turn 4 it is too long" in caption_of("conversation")


def shares_of(bar) -> list[float]:
    styles = [part.get("style") for part in bar.iter("i")]
    return [float(style.removeprefix("width:").removesuffix("%")) for style in styles]


@pytest.mark.parametrize("slug", ["llama-3", "length-penalty"])
def test_odd_prompts(slug):
    from book.pictures import PICTURES

    picture = PICTURES[slug]
    drawing = picture.draw(picture.record("<b> &\n"))
    tree_of(drawing.body + drawing.caption)


@pytest.mark.parametrize(
    "slug, prompt, line",
    [
        ("conversation", "", "this picture shows 1 to 5 messages"),
        ("conversation", "a/b/c/d/e/f", "this picture shows 1 to 5 messages"),
        ("qwen", "a " * 41, "this picture shows 1 to 40"),
        ("llama-3-tokenizer", "", "the prompt has 0 characters"),
        ("llama-3", "a " * 20, "this picture shows 1 to 16"),
    ],
)
def test_prompts_that_cannot_be_drawn(slug, prompt, line):
    from book.pictures import PICTURES
    from errors import UserError

    with pytest.raises(UserError, match=line):
        PICTURES[slug].record(prompt)


def test_one_merge_or_none():
    from book.tokenizing import draw_merges, record_merges

    assert "0 merges make" in draw_merges(record_merges("a")).caption
    record = record_merges("\u00e9\U0001f642")
    assert "\ufffd" in record.steps[0][0] and record.steps[0][1] is None
    tree_of(draw_merges(record).body)
