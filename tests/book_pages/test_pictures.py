"""The pictures of the lessons show what the runs gave that they are drawn from."""

import html
import inspect
import json
import math
import re
import struct
import subprocess

import html5lib
import pytest
import torch
from conftest import ROOT, run, slide
from drawings import caption_of, drawn, of_class, tokens_of, tree_of, widths, words_of

import lessons as course
from drafts import lookup
from sampling import top_p_filter


@pytest.fixture(scope="module")
def figures():
    """id -> the picture on the lesson's page."""
    from book.pictures import PICTURES, figure

    _, lessons = course.read_main()
    return {lesson.id: figure(lesson.id) for lesson in lessons if lesson.id[3:] in PICTURES}


def test_each_picture_is_valid_and_says_what_it_shows(figures):
    from book.pictures import PICTURES

    assert {id[3:] for id in figures} == set(PICTURES)
    for id, shown in figures.items():
        tree = tree_of(shown)
        (drawing,) = of_class(tree, "div", "drawing")
        assert drawing.get("role") == "img" and len(drawing.get("aria-label")) > 80, id
        assert len(words_of(tree.find(".//figcaption"))) > 40, id
        (command,) = [code for code in tree.iter("code") if code.get("data-copy") is not None]
        assert "</" not in "".join(words_of(script) for script in tree.iter("script")), id
        option = "rows" if PICTURES[id[3:]].rows else "prompt"
        assert words_of(command).startswith(f"python lessons.py picture {id[:2]} --{option} "), id
        # That of lesson 08 is about them.
        assert id.endswith("sanity-checks") or not re.search(r"\bnan\b|\binf\b", shown), id
        assert len(shown.encode()) < 120_000, id


def test_a_pass(figures):
    """Ids, the vectors of the first layer, a head's weights and the answer of lesson 00."""
    from book.draw import percent
    from book.recordings import encoding, load

    record, tree = drawn("init")
    ids = [id for _, id in record.tokens]
    text = "".join(text for text, _ in record.tokens)
    assert text == "Lily lost her doll. Lily was very" and ids == encoding().encode(text)
    model = load()
    with torch.inference_mode():
        probs = model(torch.tensor([ids]))[0, -1].softmax(dim=-1)
        vectors = model.wte.weight[ids] + model.wpe.weight[: len(ids)]
    assert torch.equal(record.vectors, vectors)
    assert [p for _, p in record.top] == pytest.approx(probs.topk(5).values.tolist(), rel=1e-4)
    assert record.after[-1][0] == record.top[0] and len(record.after) == 17
    with torch.inference_mode():
        logits = model(torch.tensor([ids]))[0, -1]
    assert record.logits == pytest.approx(logits.topk(5).values.tolist(), rel=1e-4)
    shown = [words_of(cell) for cell in of_class(tree, "td", "value")]
    for (_, p), logit in zip(record.top, record.logits):  # a probability is exp(logit) / sum
        assert p == pytest.approx((logit - logits.logsumexp(0)).exp().item(), rel=1e-3)
        assert f"logit {logit:.1f}, {percent(p)}" in shown
    turn = max(at for at, (own, other) in enumerate(record.after) if other[1] > own[1])
    words = words_of(tree)
    assert f"After layer {turn}  happy is ahead, from layer {turn + 1} on  sad." in words
    assert record.attention.sum(dim=-1).allclose(torch.ones(len(ids)), atol=1e-5)
    assert not record.attention.triu(1).any()
    # The caption's story: a head looks at "lost", and the answer turns.
    assert record.attention[-1].argmax() == ids.index(encoding().encode(" lost")[0])
    turned = [first[1] > second[1] for first, second in record.after]
    assert not turned[record.layer] and turned[-1]
    assert [name for name, _ in record.after[0]] == [" sad", " happy"]
    assert caption_of("init").endswith(
        "On the way through the layers  very looks back at  lost, and the answer turns from  happy "
        "to  sad."
    )
    drawn_numbers = len(of_class(tree, "rect", "plus")) + len(of_class(tree, "rect", "minus"))
    assert f"The first {drawn_numbers // len(ids)} numbers of each" in words
    assert f"number {record.head} of layer {record.layer}." in words
    assert "Then 16 layers change these vectors, one after the other; in each," in words
    assert f"dashed: layer {record.layer}." in words
    assert tokens_of(of_class(tree, "ol", "chips")[0]) == [text for text, _ in record.tokens]


def test_attention_is_that_of_the_model():
    """With the weights in the place of torch's attention the logits are the same."""
    from book import first_steps, recordings

    record = first_steps.record_pass("The cat sat")
    ids = [id for _, id in record.tokens]
    model = recordings.load()
    seen = []

    def attend(layer, q, k, v):
        from model import causal_attention

        attended = causal_attention(layer, q, k, v)
        if layer == record.layer - 1:
            head = record.head - 1
            seen.append((record.attention @ v[0, :, head], attended[0, :, head]))
        return attended

    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
    ((own, real),) = seen
    assert own.allclose(real, atol=1e-4)


def test_steps_of_greedy_decoding(figures):
    """Each step's text is that before it and the token with its largest logit."""
    from book.recordings import encoding, load

    (prompt, steps), tree = drawn("greedy-decoding")
    ids = encoding().encode("Once upon a time")
    tokens = [token for (token,) in run(load(), [ids], max_new_tokens=len(steps))]
    assert [step.chosen for step in steps] == [encoding().decode([token]) for token in tokens]
    assert all(step.choices[0][0] == step.chosen for step in steps)
    logits = [[logit for _, logit in step.choices] for step in steps]
    assert all(row == sorted(row, reverse=True) for row in logits)
    rows = of_class(tree, "td", "text")
    assert [words_of(row) for row in rows] == [
        encoding().decode(ids + tokens[:count]) for count in range(len(steps))
    ]
    assert tokens_of(tree.find(".//tbody"), "new") == [step.chosen for step in steps]


def logits_after(text: str) -> torch.Tensor:
    from book.recordings import encoding, load

    with torch.inference_mode():
        return load()(torch.tensor([encoding().encode(text)]))[0, -1]


def test_the_end_of_a_text():
    """Each chance is that of a pass of its own; the last one is larger than any other token's."""
    from book.recordings import encoding, load

    record, tree = drawn("eos-handling")
    ids = encoding().encode("Once upon a time")
    written = [token for (token,) in run(load(), [ids])]
    assert record.tokens == [encoding().decode([token]) for token in written]
    for place in (0, 100, len(written) - 1):
        with torch.inference_mode():
            probs = load()(torch.tensor([ids + written[:place]]))[0, -1].softmax(dim=-1)
        assert record.chances[place] == pytest.approx(probs[4095].item(), rel=1e-3)
    assert record.tokens[-1] == "<|endoftext|>" and record.chances[-1] == max(record.chances)
    assert tokens_of(tree)[-9:] == [token.replace("\n", "\\n") for token in record.tokens[-9:]]
    assert widths(tree)[-1] == pytest.approx(100 * record.chances[-1], abs=0.01)
    assert "any other: EOS, written <|endoftext|>. It has" in caption_of("eos-handling")
    shown = [words_of(cell) for cell in of_class(tree, "td", "value")]
    small = [p < 0.0005 for p in record.chances[-9:]]
    assert [text == "< 0.1\u00a0%" for text in shown] == small and True in small
    assert "0.0\u00a0%" not in shown  # nothing that is possible has no chance


def test_windows_are_those_that_the_model_saw():
    from book.recordings import encoding, load

    record, tree = drawn("context-window")
    ids = [id for text in record.text for id in encoding().encode(text, allowed_special="all")]
    text = "".join(record.text)
    assert record.size == 256 and len(record.text) == 259 and text.startswith("Once upon a time,")
    rows = [
        [words_of(cell) for cell in row.iter("td")]
        for row in tree.iter("tr")
        if row.find("td") is not None
    ]
    assert rows[0][:4] == ["Once0", " upon1", " a2", "\u2026"]
    assert rows[2][:4] == ["Onceout", " upon0", " a1", "\u2026"]
    assert rows[3][:4] == ["Onceout", " uponout", " a0", "\u2026"]
    assert f"sees the last {record.size} tokens, its window." in caption_of("context-window")
    assert all(row[-2].endswith(place) for row, place in zip(rows, ("254", "255", "255", "255")))
    assert [row[-1] for row in rows] == record.text[-4:]
    with torch.inference_mode():
        best = load("stories-draft")(torch.tensor([ids[2:258]]))[0, -1].argmax().item()
    assert len(ids) == 259 and encoding().decode([best]) == record.text[258]
    (written,) = slide(load("stories-draft"), [ids[:4]], max_new_tokens=255, ignore_eos=True)
    assert ids == ids[:4] + written
    assert "stories-draft, with --ignore-eos." in words_of(of_class(tree, "p", "note")[0])


def test_draws_are_counted():
    from book.recordings import encoding
    from sampling import SamplingParams, sample

    record, tree = drawn("multinomial")
    probs = logits_after("The cat").softmax(dim=-1)
    assert [p for _, p in record.likely] == pytest.approx(probs.topk(10).values.tolist(), rel=1e-4)
    assert record.counts == [record.drawn.count(text) for text, _ in record.likely]
    assert len(record.drawn) == 1000
    for (_, p), count in zip(record.likely, record.counts):
        assert abs(count - 1000 * p) < 5 * (1000 * p) ** 0.5
    (bars, draws) = of_class(tree, "div", "panel")
    assert tokens_of(bars) == ["The cat", *(text for text, _ in record.likely)]
    assert "Each draw has a seed of its own, 1 to 1,000" in words_of(draws)
    ids = encoding().encode("The cat")
    logits = logits_after("The cat")[None]
    params = SamplingParams(temperature=1.0)
    seeds = [[(seed, len(ids))] for seed in (1, 2, 3)]
    own = [sample(logits, params, None, each).item() for each in seeds]
    assert [encoding().decode([id]) for id in own] == record.drawn[:3]
    shares = [p for _, p in record.likely] + [1 - sum(p for _, p in record.likely)]
    drawn_shares = [count / 1000 for count in (*record.counts, 1000 - sum(record.counts))]
    longest = max(shares + drawn_shares)
    assert widths(bars) == pytest.approx([100 * p / longest for p in shares], abs=0.01)


def test_temperatures_have_the_sums_and_the_figures_of_the_lesson():
    record, tree = drawn("temperature")
    assert [each.temperature for each in record] == [0.5, 1.0, 2.0]
    first = [each.likely[0] for each in record]
    assert [name for name, _ in first] == [" big"] * 3
    assert [round(p, 3) for _, p in first] == [0.956, 0.441, 0.027]  # as its Try prints them
    logits = logits_after("One day, Tom saw a")
    assert caption_of("temperature").endswith(
        "big has 96\u00a0% at T = 0.5 and 2.7\u00a0% at T = 2."
    )
    for each, part in zip(record, of_class(tree, "div", "panel")):
        probs = (logits / each.temperature).softmax(dim=-1)
        assert [p for _, p in each.likely] == pytest.approx(probs.topk(6).values.tolist(), rel=1e-4)
        assert sum(p for _, p in each.likely) + each.rest == pytest.approx(1)
        assert sum(widths(part)) == pytest.approx(100, abs=0.1)


def test_top_k_gives_the_mass_to_ten_tokens():
    record, tree = drawn("top-k")
    probs = (logits_after("The cat") / 2).softmax(dim=-1)
    best = probs.topk(14).values
    assert [p for _, p in record.before] == pytest.approx(best.tolist(), rel=1e-4)
    assert record.kept == pytest.approx(best[:10].sum().item(), rel=1e-4)
    assert record.after == pytest.approx(
        [*(best[:10] / record.kept).tolist(), 0, 0, 0, 0], rel=1e-4
    )
    told = caption_of("top-k")
    assert f"At temperature 2 they had {100 * best[:10].sum():.0f}\u00a0% of the prob" in told
    assert f"the other {100 - 100 * best[:10].sum():.0f}\u00a0%, cannot be drawn" in told
    before, after = of_class(tree, "div", "panel")
    names = [text for text, _ in record.before]
    for part in (before, after):
        assert tokens_of(part) == names and tokens_of(part, "gone") == names[10:]
    assert len(widths(before)) == 15 and len(widths(after)) == 10


def test_top_p_keeps_as_many_as_the_lesson_says():
    record, tree = drawn("top-p")
    assert [each.kept for each in record] == [1, 5, 74, 266]  # as its Try prints them
    for each in record:
        assert each.mass[each.kept - 1] >= 0.9 and each.mass[-1] == pytest.approx(1, abs=1e-4)
        assert each.kept == 1 or each.mass[each.kept - 2] < 0.9
        total = sum(p for _, p in each.likely)
        assert each.mass[7] == pytest.approx(total, rel=1e-4)
    _, example = of_class(tree, "div", "panel")
    assert tokens_of(example, "gone") == [text for text, _ in record[1].likely[5:]]
    assert [each.own for each in record] == [False, True, False, False]
    left = top_p_filter(logits_after(record[1].prompt), 0.9).softmax(dim=-1).max()
    assert words_of(example).endswith(
        f"Only these are drawn then,  Lily with {100 * left:.0f}\u00a0%."
    )
    assert (
        "90\u00a0% together. How many that is depends on how sure the model is: 1, 5, 74, 266 "
        in (caption_of("top-p"))
    )
    assert caption_of("top-p").endswith("Top-k would keep the same number after each.")


@pytest.mark.parametrize(
    "slug, text, sliders",
    [
        ("temperature", "One day, Tom saw a", {"temperature": "1"}),
        ("top-k", "The cat", {"temperature": "2", "k": "10"}),
        ("top-p", "One day, a girl named", {"temperature": "1", "k": "0", "p": "0.9"}),
    ],
)
def test_sliders_have_the_whole_distribution(slug, text, sliders):
    from book.pictures import PICTURES, recorded
    from book.recordings import encoding

    picture = PICTURES[slug]
    tree = tree_of(picture.draw(recorded(picture, picture.prompt)).live)
    assert {part.get("name"): part.get("value") for part in tree.iter("input")} == sliders
    assert words_of(of_class(tree, "p", "title")[0]) == f"Move it yourself, after {text}"
    (script,) = tree.iter("script")
    data = json.loads(words_of(script))
    ordered = logits_after(text).sort(descending=True)
    assert data["logits"] == pytest.approx(ordered.values.tolist(), abs=1e-3)
    best = [encoding().decode([id]) for id in ordered.indices[:12].tolist()]
    assert data["tokens"] == best == tokens_of(tree)


def test_computed_positions():
    """Without the cache all of each text, with it each position once."""
    record, tree = drawn("kv-cache-dynamic")
    lengths = [4 + step for step in range(10)]
    assert record.plain == [list(range(length)) for length in lengths]
    assert [place for step in record.cached for place in step] == list(range(13))
    plain, cached = of_class(tree, "div", "panel")
    assert len(of_class(plain, "rect", "first")) == sum(lengths) == 85
    assert not of_class(plain, "rect", "kept")
    assert len(of_class(cached, "rect", "first")) == 13
    assert len(of_class(cached, "rect", "kept")) == 85 - 13
    assert tokens_of(plain) == tokens_of(cached) == record.words
    told = f"For {len(lengths)} tokens the model computes 85 positions, or, if it keeps the keys"
    assert told in caption_of("kv-cache-dynamic")


def test_the_storage_fills_up():
    record, tree = drawn("kv-cache-static")
    assert record.filled == list(range(4, 14)) and record.room == 13
    assert record.bytes == 32_768  # as the lesson's Try prints it
    grown, static = of_class(tree, "div", "panel")
    assert len(of_class(grown, "rect", "second")) == sum(range(4, 13))
    assert len(of_class(static, "rect", "first")) == 13
    assert words_of(grown).startswith(
        f"Joined to a longer array each time (torch.cat): {sum(range(4, 13))} c"
    )
    copied = [int(words_of(cell)) for cell in of_class(grown, "td", "value")]
    assert copied == [0, *range(4, 13)]
    kinds = [len(of_class(static, "rect", kind)) for kind in ("first", "kept", "empty")]
    assert sum(kinds) == 10 * 13


def test_hops():
    """All of a window is computed at each hop, and at stride 1 in each step past it."""
    from cache import window_start

    record, tree = drawn("kv-cache-fix")
    for each in record:
        assert len(each.spans) == 500
        for step, ((first, last), start) in enumerate(zip(each.spans, each.starts)):
            assert last == 4 + step - 1 and start == window_start(4 + step, 256, each.stride)
            hopped = step == 0 or start != each.starts[step - 1]
            assert first == (start if hopped else last)
    totals = [sum(last - first + 1 for first, last in each.spans) for each in record]
    assert [each.stride for each in record] == [128, 1]
    assert totals[0] == 4 + 499 + 2 * 128 and totals[1] > 80 * totals[0]
    told = (
        f"In hops of 128 tokens that is seldom: {totals[0]:,} positions instead of {totals[1]:,}."
    )
    assert caption_of("kv-cache-fix").endswith(told)
    titles = [words_of(part) for part in of_class(tree, "p", "title")]
    assert titles == [
        "Stride 128: the window moves in hops",
        "Stride 1: lesson 03\u2019s window, with the cache",
    ]
    for each, part in zip(record, of_class(tree, "div", "panel")):
        wide = sum(last > first for first, last in each.spans)
        assert len(of_class(part, "rect", "first")) == wide
        axes = {words_of(text) for text in part.iter() if str(text.tag).endswith("text")}
        assert {"token of the text", "step"} < axes


def test_a_batch_of_different_lengths():
    record, tree = drawn("variable-batching")
    assert record.lengths == [4, 6, 2] and [len(row) for row in record.prefill] == [6, 6, 6]
    for row, (length, tokens) in enumerate(zip(record.lengths, record.prefill)):
        assert [place for _, place in tokens[:length]] == list(range(length))
        assert set(tokens[length:]) <= {tokens[length - 1]}  # padding
        later = [each[row][0][1] for each in record.decode]
        assert later == [length]
    assert len(tokens_of(tree.find(".//tbody"), "pad")) == 18 - 12
    assert "3 texts in one pass" in caption_of("variable-batching")
    for length, tokens in zip(record.lengths, record.prefill):  # what padding writes is there
        assert tokens[length:] == [tokens[length - 1]] * (6 - length)
    note = words_of(of_class(tree, "p", "note")[0])
    assert "fills the row, here in 6 places:" in note and note.endswith("its result is ignored.")
    assert len(tokens_of(tree.find(".//tbody"), "new")) == 3


def test_drafts_and_a_refusal():
    """The statistics are those of the lesson's Try; the bars' parts add up to p and to q."""
    record, tree = drawn("speculative-decoding")
    verdicts = record.verdicts
    assert (len(verdicts), sum(len(each.drafts) for each in verdicts)) == (12, 36)
    assert sum(each.accepted for each in verdicts) == 28
    assert sum(len(each.tokens) for each in verdicts) == 40
    for each in verdicts:
        assert each.tokens[: each.accepted] == each.drafts[: each.accepted]
        assert len(each.tokens) == each.accepted + 1
    told = "drafted 36 tokens, the large one kept 28: 12 of its passes made 40 tokens, with the sam"
    assert told in caption_of("speculative-decoding")
    passes, bars = of_class(tree, "div", "panel")
    (lines,) = of_class(passes, "ol", "passes")
    assert len(tokens_of(lines, "new")) == 28 and len(tokens_of(lines, "own")) == 12
    written = [text for each in verdicts for text in each.tokens]
    assert "".join(written).startswith(", a little boy named Tim was in his room.")
    found = record.refusal
    common = sum(min(p, q) for _, p, q in found.rows) + found.rest[0]
    more_p = sum(max(p - q, 0) for _, p, q in found.rows) + found.rest[2]
    more_q = sum(max(q - p, 0) for _, p, q in found.rows) + found.rest[1]
    assert common + more_p == pytest.approx(1, abs=1e-4)
    assert more_p == pytest.approx(more_q, abs=1e-4)
    p, q = next((p, q) for text, p, q in found.rows if text == found.draft)
    assert found.chance == pytest.approx(p / q) and found.chance < 1
    p, q = next((p, q) for text, p, q in found.rows if text == found.drawn)
    assert p > q
    note = words_of(of_class(bars, "p", "note")[0])
    assert "both at temperature 0.8." in note
    names = [text for text, _, _ in found.rows]
    assert len(set(names)) == len(names) and tokens_of(bars.find("table")) == names


@pytest.mark.parametrize(
    "slug, common, own, change",
    [
        ("presence-penalty", {}, {"presence_penalty": 1.0}, lambda x, count: x - (count > 0)),
        (
            "frequency-penalty",
            {"presence_penalty": 1.0},
            {"frequency_penalty": 0.5},
            lambda x, count: x - 0.5 * count,
        ),
        ("repetition-penalty", {}, {"repetition_penalty": 1.3}, None),
    ],
)
def test_penalties_move_what_was_written(slug, common, own, change):
    """By the lesson's formula, at the step where the texts of its Try part."""
    from book.recordings import encoding, load

    record, tree = drawn(slug)
    ids = encoding().encode("The big bear")
    plain, penalized = (
        encoding().decode([token for (token,) in run(load(), [ids], max_new_tokens=60, **params)])
        for params in (common, common | own)
    )
    assert plain.startswith(record.before + record.chosen[0])
    assert penalized.startswith(record.before + record.chosen[1])
    assert record.chosen[0] != record.chosen[1]
    for _, before, after, count, seen in record.rows:
        if change:
            assert after == pytest.approx(change(before, count), abs=1e-5)
        else:
            assert after == pytest.approx(before / 1.3 if seen else before, abs=1e-5)
    best = [max(record.rows, key=lambda row: row[column])[0] for column in (1, 2)]
    assert tuple(best) == record.chosen
    assert any(after != before for _, before, after, _, _ in record.rows)
    part, texts = of_class(tree, "div", "panel")
    quote = words_of(texts.find(".//q"))
    before = "The big bear" + record.before
    end = quote.removeprefix("\u2026")
    whole = quote == before or (quote != end and before[: -len(end)].endswith(" "))
    assert len(end) > 20 and before.endswith(end) and whole  # no word is cut
    written = encoding().encode(record.before)
    for (text, own, penalized, *_), cell in zip(record.rows, of_class(part, "td", "value")):
        counted = written.count(encoding().encode(text)[0])
        shown = words_of(cell).partition(", ")[2]
        if counted or own == penalized:
            assert shown == ("" if not counted else "once" if counted == 1 else f"{counted} times")
        else:  # only a penalty on the prompt is left
            assert shown == "in the prompt" and encoding().encode(text)[0] in ids
    assert tokens_of(part.find("table")) == [row[0] for row in record.rows]
    assert tokens_of(part, "new") == [record.chosen[1]]


def test_bits_stand_for_the_number():
    record, tree = drawn("fp16-bf16")
    exact = logits_after("Once upon a time").max()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert [value for _, _, value in record.rows] == [exact.to(dtype).item() for dtype in dtypes]
    for (_, bits, value), (exponent, fraction) in zip(record.rows, ((8, 23), (5, 10), (8, 7))):
        assert len(bits) == 1 + exponent + fraction
        power = int(bits[1 : 1 + exponent], 2) - (2 ** (exponent - 1) - 1)
        assert value == (1 + int(bits[1 + exponent :], 2) / 2**fraction) * 2.0**power
    shown = [words_of(line) for line in of_class(tree, "p", "bits")]
    assert shown == [bits for _, bits, _ in record.rows]
    titles = [words_of(title) for title in of_class(tree, "p", "title")]
    sizes = (4, 2, 2)
    assert all(f": {size} bytes, " in title for size, title in zip(sizes, titles, strict=True))
    off = [abs(value - exact.item()) for _, _, value in record.rows]
    told = caption_of("fp16-bf16")
    assert f"this one, rounded once, is off by {off[1]:.2g} in float16" in told
    assert f"by {off[2]:.2g} in bfloat16" in told
    assert f"ends at {torch.finfo(torch.float16).max:,.0f}," in told
    assert "the score of" in words_of(tree) and tokens_of(tree) == [record.token]


def test_a_tree_of_beams():
    """Each sum is that of the log-probabilities of its text, and the best of each step are kept."""
    from book.recordings import encoding, load

    record, tree = drawn("beam-search")
    model = load()
    ids = encoding().encode("The cat sat on")

    def total(text) -> float:
        tokens = [encoding().encode(word)[0] for word in text]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens]), logits_to_keep=len(tokens) + 1)[0, :-1]
        logprobs = logits.double().log_softmax(dim=-1)
        return sum(row[token].item() for row, token in zip(logprobs, tokens))

    for number, nodes in enumerate(record.steps):
        scores = [node.score for node in nodes]
        assert scores == sorted(scores, reverse=True)
        assert [node.kept for node in nodes] == [rank < 2 for rank in range(len(nodes))]
        for node in nodes:
            assert node.score == pytest.approx(total(node.text), abs=1e-3)
            if number:
                parent = record.steps[number - 1][node.parent]
                assert parent.kept and node.text[:-1] == parent.text
    assert record.best == record.steps[-1][0].text
    assert record.scores == pytest.approx((total(record.greedy), total(record.best)), abs=1e-3)
    assert record.scores[1] > record.scores[0] and record.greedy != record.best
    times = math.exp(total(record.best) - total(record.greedy))
    assert caption_of("beam-search").endswith(f"one that is {times:.1f} times as probable.")
    shown = [words_of(part) for part in of_class(tree, "text", "kept-node")]
    assert shown == [node.text[-1].strip() for nodes in record.steps for node in nodes[:2]]


def test_rounds_of_the_race():
    """The last one is what `sample` draws, the others stand behind p."""
    from book.recordings import encoding
    from sampling import SamplingParams, sample

    record, tree = drawn("top-p-without-sorting")
    logits = logits_after("She was very")
    params = SamplingParams(temperature=1.0, top_p=0.5)
    draws = [(record.seed, len(encoding().encode("She was very")))]
    (drawn_id,) = sample(logits[None], params, None, draws).tolist()
    assert record.rounds[-1].token == encoding().decode([drawn_id])
    assert [each.inside for each in record.rounds] == [False, False, True]
    masses = [each.mass for each in record.rounds]
    assert masses == sorted(masses, reverse=True) and masses[-1] < 0.5 <= masses[-2]
    probs = logits.softmax(dim=-1)
    for each in record.rounds:
        (id,) = encoding().encode(each.token)
        assert each.p == pytest.approx(probs[id].item(), rel=1e-4)
        assert each.mass == pytest.approx(probs[probs > probs[id]].sum().item(), abs=1e-4)
    assert "exponential: with them a token is the fastest as often as its probability says." in (
        words_of(tree)
    )
    assert "sorted for the eye only" in words_of(of_class(tree, "p", "note")[0])
    left = [sum(widths(line)) for line in of_class(tree, "div", "race")]
    assert left == pytest.approx([100, 100 * masses[0], 100 * masses[1]], abs=0.1)


def test_int8_products():
    from book import recordings
    from int8 import int8_linear, quantize

    record, tree = drawn("int8-weights")
    layer = recordings.load().h[0].mlp.c_fc
    values, scale = quantize(layer.weight.detach()[:1])
    x = []
    hook = layer.register_forward_pre_hook(lambda _, args: x.append(args[0][0, -1:]))
    recordings.next_logits(recordings.encode("Once upon a time", 9))
    hook.remove()
    assert record.exact == pytest.approx((x[0] @ layer.weight[0]).item(), abs=1e-5)
    assert record.rounded == pytest.approx(int8_linear(x[0], values, scale).item(), abs=1e-6)
    assert record.sum * record.x_scale * record.scale == pytest.approx(record.rounded, abs=1e-6)
    for w, value, whole, one in record.weights:
        assert value == round(w / record.scale)
        assert abs(w - value * record.scale) <= record.scale / 2 + 1e-9
        assert whole == struct.pack(">f", w) and one == struct.pack("b", value)
    assert record.weights[-1][1] in (-127, 127)
    held = [f"{byte:02x}" for *_, whole, one in record.weights for byte in whole + one]
    assert tokens_of(tree.find(".//tbody")) == held
    shown = [words_of(cell) for cell in tree.find(".//tbody").iter("b")]
    assert shown == [str(each[1]).replace("-", "\u2212") for each in record.weights]
    # A byte is 7 wide in lines of 64; no byte is drawn twice, and none left out.
    assert record.bytes == (layer.weight[0].nbytes, values.nbytes, scale.nbytes) == (1024, 256, 4)
    for part, weight, extra in zip(of_class(tree, "svg", "bytes"), (4, 1), (0, 4)):
        boxes = of_class(part, "rect", "first") + of_class(part, "rect", "second")
        sizes = [(int(each.get("width")) + 1) // 7 for each in boxes]
        assert sizes == [weight] * 256 + [4] * (extra > 0)
        places = [int(each.get("x")) // 7 + int(each.get("y")) // 10 * 64 for each in boxes]
        taken = [at + byte for at, size in zip(places, sizes) for byte in range(size)]
        assert taken == list(range(256 * weight + extra))


def test_a_message_is_no_control_token():
    from loading.chat import Chat
    from loading.tokenizer import load_encoding

    record, tree = drawn("chat")
    name = ROOT / "checkpoints" / "stories-llama"
    encoding = load_encoding(name, 4096)
    said = [{"role": "user", "content": "rain<|endoftext|>"}]
    ids = Chat(name).encode(said, encoding)
    assert [text for text, _ in record.tokens] == [encoding.decode([id]) for id in ids]
    assert [text for text, control in record.tokens if control] == ["<|endoftext|>"]
    assert [text for text, control in record.naive if control] == ["<|endoftext|>"] * 2
    assert record.rendered.replace(record.hidden, record.message) == Chat(name).render(said)
    assert not set("<>") & set(record.hidden) and len(record.hidden) == len(record.message)
    assert len(of_class(tree, "b", "stand-in")) == 4
    assert tokens_of(tree, "out") == ["<|endoftext|>"] * 3


def test_batches_have_each_token_once():
    record, tree = drawn("continuous-batching")
    for steps in (record.static, record.continuous):
        taken = [number for step in steps for number in step if number is not None]
        assert [taken.count(number) for number in range(6)] == record.lengths == [3, 9, 5, 4, 7, 3]
    for number in range(6):  # one row each
        for steps in (record.static, record.continuous):
            assert len({step.index(number) for step in steps if number in step}) == 1
    assert len(record.static) == 9 + 7 and len(record.continuous) < 16
    counted = f"{len(record.continuous)} steps instead of {len(record.static)}."
    assert caption_of("continuous-batching").endswith(counted)
    for number, step in enumerate(record.continuous):  # no place is idle while somebody waits
        waiting = set(range(6)) - {n for early in record.continuous[: number + 1] for n in early}
        assert None not in step or not waiting
    for steps, part in zip(record[1:3], of_class(tree, "table", "batch")):
        idle = sum(step.count(None) for step in steps)
        assert len(of_class(part, "td", "idle")) == idle
        assert len(list(part.iter("td"))) == 3 * len(steps)


def test_pages_hold_what_their_owners_wrote():
    record, tree = drawn("paged-cache")
    assert list(record.tables) == [1, 2, 3]  # the first one has left
    tables = [page for pages in record.tables.values() for page in pages]
    assert len(set(tables)) == len(tables)
    for number, pages in record.tables.items():
        assert all(record.pages[page][0] == number for page in pages)
        text = "".join(word for page in pages for word in record.pages[page][1])
        assert len(text) > 20 and record.texts[number].startswith(text)
        sizes = [len(record.pages[page][1]) for page in pages]  # then room that it has not used
        assert sizes == [min(4, max(0, sum(sizes) - 4 * place)) for place in range(len(pages))]
    free = [page for page, (owner, _) in enumerate(record.pages) if owner is None]
    assert len(free) + len(tables) == len(record.pages) == 15
    assert len(of_class(tree, "li", "free")) == len(free)


def test_copied_drafts():
    """The statistics are those of the lesson's Try; what is marked is the same and goes on so."""
    record, tree = drawn("prompt-lookup")
    drafts = sum(len(each.drafts) for each in record.verdicts)
    assert (sum(each.accepted for each in record.verdicts), drafts) == (24, 33)
    assert len(record.verdicts) == 16
    start, end = record.found
    size = end - start
    assert size == 3 and record.text[start:end] == record.text[-size:]
    sizes = [each.default for each in inspect.signature(lookup).parameters.values()][-2:]
    assert sizes == [3, 2] and "last three tokens, or two, occurred" in caption_of("prompt-lookup")
    assert caption_of("prompt-lookup").endswith("24 of 33 guessed tokens were accepted.")
    assert record.text[end : end + len(record.drafts)] == record.drafts
    (flow,) = of_class(tree, "p", "flow")
    assert tokens_of(flow) == record.text + record.drafts
    assert tokens_of(flow, "found") == 2 * record.text[start:end]
    assert tokens_of(flow, "new") == 2 * record.drafts


def test_turned_queries_and_keys():
    """The score that the model has is the one at the text's own places, and at that distance."""
    from book.recordings import encoding, load

    record, tree = drawn("llama")
    shown = [[words_of(line) for line in part.iter("p")] for part in of_class(tree, "div", "turn")]
    assert [line[0] for line in shown] == [f"positions {a} and {b}" for (a, b), *_ in record.shown]
    for each, (_, words) in zip(record.shown, shown, strict=True):
        apart, score = words.split(" apart: score ")
        assert int(apart) == each.places[0] - each.places[1]
        assert float(score.replace("\u2212", "-")) == pytest.approx(each.score, abs=6e-4)
    model = load("stories-llama")
    ids = encoding().encode("The cat sat on")
    scores = []

    def attend(layer, q, k, v):
        from model import causal_attention

        if layer == 0:
            scores.append((q[0, 3, 0] @ k[0, 1, 0]).item())
        return causal_attention(layer, q, k, v)

    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), torch.arange(4), attend)
    assert (record.query, record.key) == (" on", " cat")
    first, *_ = of_class(tree, "p", "note")  # before the clocks
    assert words_of(first).endswith("the score is how well they fit.")
    note = words_of(of_class(tree, "p", "note")[-1])
    assert f"Both have {model.config.head_dim // 2} pairs of numbers; one is drawn" in note
    assert "The score is the sum of the products of all numbers of both." in note
    own, *others, far = record.shown
    assert own.places == (3, 1) and own.score == pytest.approx(scores[0], abs=1e-4)
    for each in others:
        assert each.places[0] - each.places[1] == 2
        assert each.score == pytest.approx(own.score, abs=1e-4)
    assert far.places[0] - far.places[1] == 7 and abs(far.score - own.score) > 0.1
    for which in (0, 1):  # a turn changes no length
        lengths = [each.arrows[which][0] ** 2 + each.arrows[which][1] ** 2 for each in record.shown]
        assert lengths == pytest.approx(lengths[:1] * 4, rel=1e-4)


def test_budgets():
    from book.recordings import STORY, encoding

    record, tree = drawn("chunked-prefill")
    count = len(encoding().encode(STORY))
    for budget, steps in zip(record.budgets, record.steps):
        assert all(0 < sum(step) <= budget for step in steps)
        assert [sum(step[row] for step in steps) for row in range(2)] == [
            len(encoding().encode(text)) + 11 for text in ("Lily", "The dog")
        ]
        assert sum(step[2] for step in steps) == count + 11
        assert all(step[0] and step[1] for step in steps[:12])  # they wait for nobody
    assert max(map(sum, record.steps[0])) == count + 2
    for steps, part in zip(record.steps, of_class(tree, "div", "panel")):
        sizes = [number for step in steps for number in step if number]
        assert widths(part) == pytest.approx([100 * n / (count + 2) for n in sizes], abs=0.01)


def test_the_page_before_all_lessons_has_the_numbers_of_the_model():
    from book.pictures import introduction
    from book.recordings import load

    config = load().config
    page = (ROOT / "course" / "book" / "transformer.html").read_text("utf-8")
    said = ("4,096 of them", "256 numbers", "four such attentions", "16 layers")
    assert all(words in page for words in said)
    shape = (config.vocab_size, config.n_embd, config.n_head, config.n_layer)
    assert shape == (4096, 256, 4, 16)
    prompt, pieces = introduction()
    assert prompt == "Lily lost her doll. Lily was very"
    assert all(f"pieces.{name})" in page and len(piece.text) > 40 for name, piece in pieces.items())


# The command


def draw(*args) -> int:
    import draw_picture

    return draw_picture.main(list(args))


def test_a_picture_of_the_reader_s_own_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert draw("01-greedy-decoding", "--prompt", "Tom <and>") == 0
    path = tmp_path / "picture-01-greedy-decoding.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text("utf-8")
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    (first, *_) = of_class(tree, "td", "text")
    assert words_of(first) == "Tom <and>" and "http" not in page and "src=" not in page
    assert "--prompt 'Tom <and>'" in html.unescape(page)


@pytest.mark.parametrize("prompt", ["Tom", "<b> &\n"])
def test_odd_prompts(prompt):
    """One token, tokens of no story, and what HTML would take for its own."""
    from book import replicating, scaling, spreading
    from book.pictures import PICTURES, page

    slow = {"eos-handling", "context-window", "kv-cache-fix", "prompt-lookup", "chunked-prefill"}
    slow |= {"batched-speculation", "drafts-that-pay"}
    slow |= {slug for slug in PICTURES if slug.endswith("-penalty")}
    slow |= {slug for slug, picture in PICTURES.items() if picture.rows}  # files, not prompts
    slow |= {"sanity-checks", "llama-3", "request-seeds"}
    slow |= {*spreading.PICTURES, *replicating.PICTURES, "replica-failures"}
    slow |= {*scaling.PICTURES}  # numbers of texts
    for slug in sorted(set(PICTURES) - slow - {"variable-batching"}):
        html5lib.HTMLParser(strict=True).parse(page(f"00-{slug}", prompt))


@pytest.mark.parametrize(
    "args, words",
    [
        (("16-variable-batching", "--prompt", "Tom"), "shows 2 to 8"),
        (("01-greedy-decoding", "--prompt", "a " * 30), "this picture shows 1 to "),
        (("01-greedy-decoding", "--prompt", ""), "the prompt has 0 tokens"),
        (("07-top-p", "--prompt", "\udcff"), "--prompt '\\udcff': not UTF-8 text"),
        (("99-nothing",), "99-nothing has no picture"),
        (("00-init", "--output", "nowhere/x.html"), "nowhere/x.html"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    assert draw(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())


def test_the_command_of_the_course(monkeypatch, tmp_path, capsys):
    """It runs the script with the packages of `make`, and says where main is if it is not there."""
    calls = []

    def called(args, **_):
        calls.append(args)
        return subprocess.CompletedProcess(args, 3)

    lessons = [course.Lesson("07-top-p", "", "")]
    monkeypatch.setattr(course.subprocess, "run", called)
    monkeypatch.setattr(course, "read_main", lambda: (course.REFS[0], lessons))
    script = str(ROOT / "course" / "draw_picture.py")
    assert course.main(["picture", "7", "--prompt", "a b"]) == 3
    assert calls[0][1:] == [script, "07-top-p", "--prompt", "a b"]
    assert course.main(["picture", "7"]) == 3 and calls[1][1:] == [script, "07-top-p"]
    monkeypatch.setattr(course, "ROOT", tmp_path)
    assert course.main(["picture", "7"]) == 2
    line = "lessons.py: error: what draws pictures is on main only; go there with: git switch main"
    assert capsys.readouterr().err == line + "\n"


def test_pictures_of_the_own_prompt_have_a_form_and_their_functions(figures):
    """What these draw is compared in a browser, by course/checks/check_live.py."""
    from book.pictures import LIVE, PICTURES, SMALL

    assert SMALL < LIVE
    book = ROOT / "course" / "book"
    for id, shown in figures.items():
        slug = id.partition("-")[2]
        forms = of_class(tree_of(shown), "form", "own-prompt")
        assert [form.get("data-picture") for form in forms] == [slug] * (slug in LIVE)
        for form in forms:
            assert form.get("hidden") is not None  # until live.js is there
            small = form.get("data-model") == "stories-draft"
            assert small == (slug in SMALL) == ("2 MB" in words_of(form))
            assert form.find(".//input").get("value") == PICTURES[slug].prompt
    for name, end in (("live.js", "DRAW = {"), ("records.js", "RECORDS = {")):
        text = (book / name).read_text("utf-8").partition(end)[2]
        assert LIVE <= set(re.findall(r'^ +"?([a-z0-9-]+)"?(?::|\()', text, re.MULTILINE)), name
