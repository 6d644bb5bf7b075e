"""Pictures of lessons 20 to 34 show what the runs gave."""

import math

import pytest
import torch
from scenes import drawn, forms, probs_after, written

from command_line import STORIES
from int8 import to_int8
from loading.chat import Chat
from model import causal_attention
from pictures import runs
from pictures.scene import Bars, Cells, Lines, Tokens


def test_beams_beat_greedy_decoding():
    record, shown = drawn("beam-search")
    prompt = "The cat sat on"

    def total(text) -> float:
        places = range(len(text))
        ids = [runs.encode(each, 1)[0] for each in text]
        return sum(probs_after(prompt + "".join(text[:at]))[ids[at]].log().item() for at in places)

    assert [text for text, _ in record.greedy] == written(prompt, max_new_tokens=5)
    finds, kept = forms(shown, Tokens)
    for line in finds.lines + kept.lines:
        text = [token.text for token in line.tokens]
        assert float(line.value.replace("\u2212", "-")) == pytest.approx(total(text), abs=0.006)
    scores = [total([text for text, _ in each]) for each in (record.steps[-1][0], record.greedy)]
    assert f"{math.exp(scores[0] - scores[1]):.1f} times as probable" in shown.caption


def test_drafts_are_copied_from_the_repeat():
    record, shown = drawn("prompt-lookup")
    prompt = "".join(record.prompt)
    tokens = [text for each in record.verdicts for text in each.tokens]
    assert tokens == written(prompt, max_new_tokens=16)
    text = record.prompt + [t for each in record.verdicts[: record.shown] for t in each.tokens]
    repeat = text[record.source : record.source + record.size]
    assert repeat == text[-record.size :] == [" upon", " a", " time"]
    drafts = record.verdicts[record.shown].drafts
    assert drafts == text[record.source + record.size :][: len(drafts)]
    line = forms(shown, Tokens)[0].lines[0].tokens
    assert [token.text for token in line if token.kind == "second"] == repeat * 2
    assert [token.text for token in line if token.kind == "first"] == drafts * 2


def test_only_the_fastest_is_asked():
    """`sample` draws the last one, and those before it stand behind the nucleus."""
    record, shown = drawn("top-p-without-sorting")
    probs = probs_after("She was very")
    params = {"max_new_tokens": 1, "temperature": 1.0, "top_p": record.p}
    asked = sorted((each for each in record.runners if each.round), key=lambda each: each.round)
    assert any(
        written("She was very", seed=seed, **params) == [asked[-1].token] for seed in range(200)
    )
    assert [each.before < record.p for each in asked] == [False, False, True]
    for each in record.runners:
        p = probs[runs.encode(each.token, 1)[0]]
        assert each.p == pytest.approx(p.item(), rel=1e-4)
        assert each.before == pytest.approx(probs[probs > p].sum().item(), abs=1e-4)
    speeds, rounds = forms(shown, Bars)
    lengths = [row.parts[0][0] for row in speeds.rows]
    assert lengths == sorted(lengths, reverse=True) and speeds.rows[0].parts[0][1] == "bad"
    left = [sum(length for length, _ in row.parts) for row in rounds.rows]
    assert left == pytest.approx([1, asked[0].before, asked[1].before])


def test_a_row_in_bytes_and_a_scale():
    record, shown = drawn("int8-weights")
    layer = to_int8(runs.watched()[0]).wte
    row = runs.encode("Once upon a time", 9)[-1]
    assert record.weights == runs.load().wte.weight[row].tolist()
    assert record.values == layer.weight[row].tolist()
    assert record.scale == layer.scale[row].item()
    for w, value in zip(record.weights, record.values):
        assert abs(w - value * record.scale) <= record.scale / 2 * (1 + 1e-6)
    (table,), (memory,) = forms(shown, Cells), forms(shown, Bars)
    marked = [row.cells[1].text for row in table.rows if row.cells[0].kind]
    assert marked in (["127"], ["\u2212127"])
    assert [sum(size for size, _ in row.parts) for row in memory.rows] == [1024, 260]
    assert "260 bytes instead of 1,024" in shown.caption


def test_a_score_depends_on_the_distance():
    """A pass with the tokens at other positions has the same scores."""
    record, shown = drawn("llama")
    here, later = record.scores.values()
    assert later == pytest.approx(here, abs=1e-4) and max(here) - min(here) > 0.05
    ids = torch.tensor([runs.encode("The cat sat on", 9)])
    seen = []

    def attend(layer, q, k, v):
        seen.append((q[0, -1, 0] @ k[0, -3, 0]).item())
        return causal_attention(layer, q, k, v)

    with torch.inference_mode():
        for distance in (2, 30):
            places = torch.tensor([0, 7, 8, 7 + distance])
            runs.load("stories-llama").hidden(ids, places, attend)
            assert seen[0] == pytest.approx(here[distance], abs=1e-4)
            seen.clear()
    line, dots = forms(shown, Lines)[0].curves
    assert line.points == list(enumerate(here)) and dots.points[1] == (4, later[4])


def test_a_message_has_no_control_token():
    record, shown = drawn("chat")
    template = Chat(STORIES.with_name("stories-llama"))
    text = template.render([{"role": "user", "content": "rain<|endoftext|>"}])
    for tokens in record:  # the same text, cut otherwise
        assert "".join(token for token, _ in tokens) == text
    assert [token for token, control in record.safe if control] == ["<|endoftext|>"]
    assert [token for token, control in record.naive if control] == ["<|endoftext|>"] * 2
    safe, naive = (form.lines[0].tokens for form in forms(shown, Tokens))
    assert [sum(token.kind == "bad" for token in line) for line in (safe, naive)] == [1, 2]
    assert "make 1 control token;" in shown.caption and shown.caption.endswith("have 2.")


def test_a_sum_and_a_mean_of_each_text():
    record, shown = drawn("length-penalty")
    prompt = "They went home and slept."
    ids = runs.encode(prompt, 60)
    for text, n, score in record.texts:
        tokens = runs.encode(text, 30)
        with torch.inference_mode():
            rows = runs.load()(torch.tensor([ids + tokens]))[0, len(ids) - 1 : -1]
        rows = rows.double().log_softmax(-1)
        own = sum(row[token].item() for row, token in zip(rows, tokens))
        assert len(tokens) == n and score == pytest.approx(own, abs=1e-3)
    short, long = record.won
    assert short == max(range(len(record.texts)), key=lambda at: record.texts[at][2])
    assert long == max(
        range(len(record.texts)), key=lambda at: record.texts[at][2] / record.texts[at][1]
    )
    for chart, at, power in zip(forms(shown, Lines), record.won, (0, 1)):
        _, n, score = record.texts[at]
        assert chart.curves[-1].points == [(n, score / n**power)]


@pytest.mark.parametrize("prompt", ["They went to the playground", "a butterfly", "\u00e9t\u00e9"])
def test_merges_end_in_the_tokens_of_the_word(prompt):
    record, shown = drawn("llama-3-tokenizer", prompt)
    ids = runs.encode(prompt, 20)
    parts = record[-1].parts
    assert parts == [runs.text_of(id) for id in ids][-len(parts) :]
    for before, merge in zip(record, record[1:]):
        new = merge.parts[merge.at]
        assert new == runs.text_of(merge.id) or "\\x" in "".join(before.parts)
        assert len(merge.parts) == len(before.parts) - 1
    lines = forms(shown, Tokens)[0].lines
    assert [[token.text for token in line.tokens] for line in lines] == [m.parts for m in record]
