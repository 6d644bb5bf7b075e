"""The engine's player in the book, and the pictures of its lessons, against runs of their own."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT
from drawings import caption_of, drawn, of_class, tokens_of, tree_of, widths, words_of

from infer import generate
from sampling import SamplingParams

PLAYED = {  # lesson -> where its recording has the run
    "paged-cache": lambda record: record.run,
    "preemption": lambda record: record,
    "prefix-sharing": lambda record: record,
    "chunked-prefill": lambda record: record.run,
    "batched-lookup": lambda record: record,
}


def drawing_of(slug: str):
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    record = recorded(picture, picture.prompt)
    return record, picture.draw(record)


def data_of(live: str) -> dict:
    """What is handed to the player."""
    (script,) = tree_of(live).iter("script")
    return json.loads(words_of(script))


def rows_of(frame) -> list[dict]:
    return frame["running"] + frame["waiting"] + frame["over"]


def total(frames, number: int, which: int) -> int:
    return sum(
        row["work"][which] for frame in frames for row in rows_of(frame) if row["number"] == number
    )


def own_text(request) -> list[int]:
    """What `generate` writes for a request alone."""
    from book.recordings import load

    prompt = request.tokens[: request.prompt_length]
    steps = generate(load(), [prompt], request.params)
    return [token for (token,) in steps]


@pytest.mark.parametrize("slug", PLAYED)
def test_the_player_shows_the_run(slug):
    """Frames add up to it, tables hold what is computed, and the texts are those of `generate`."""
    from book import recordings

    record, drawing = drawing_of(slug)
    run = PLAYED[slug](record)
    data = data_of(drawing.live)
    setup = data["setup"]
    frames = data["frames"]
    assert 0 <= data["first"] < len(frames) and setup["recorded"] is True
    assert [frame["steps"] for frame in frames] == [*range(1, len(frames) + 1)]
    for number, request in enumerate(run.requests, 1):
        shown = setup["texts"][str(number)]
        assert shown == [recordings.text_of(id) for id in request.tokens]
        assert total(frames, number, 3) == len(request.output)
        assert request.output == own_text(request)
    whole = [sum(total(frames, number + 1, which) for number in range(len(run.requests)))
             for which in range(3)]  # fmt: skip
    assert whole == [frames[-1][name] for name in ("positions", "drafted", "accepted")]
    assert sum(len(frame["preempted"]) for frame in frames) == frames[-1]["preemptions"]
    texts = {number: request.tokens for number, request in enumerate(run.requests, 1)}
    for frame in frames:
        used = {}
        for row in frame["running"]:
            assert len(frame["running"]) <= setup["max_rows"]
            assert len(row["pages"]) * setup["page_size"] >= row["computed"]
            assert len(row["pages"]) <= setup["most_pages"]
            for place, page in enumerate(row["pages"]):
                size = setup["page_size"]
                before = texts[row["number"]][: size * (place + 1)]
                used.setdefault(page, []).append(before[: row["computed"]])
        assert set(used) <= set(range(setup["num_pages"]))
        for held in used.values():  # what several have on a page is the same, and all before it
            assert len(held) == 1 or all(text == held[0] for text in held)
    assert frames[-1]["running"] == frames[-1]["waiting"] == []
    hidden = {"preemption": "preemptions", "sharing": "shared", "drafts": "drafted"}
    for part, name in hidden.items():  # nothing happens that the page does not speak of
        assert part in setup["shows"] or frames[-1][name] == 0, part


def test_frames_are_those_of_the_scheduler():
    """The run of lesson 41 once more, by hand: pages, counts and preemptions of each step."""
    from book import recordings
    from engine.engine import Engine

    record, _ = drawn("preemption")
    engine = Engine(recordings.load(), max_rows=4, num_pages=10, page_size=4)
    engine.scheduler.pool.publish = lambda *_: None
    ids = recordings.encode("Lily", 9)
    requests = []
    preempted = 0
    for step, frame in enumerate(record.frames):
        for after, length in ((0, 16), (0, 14), (3, 13), (5, 12)):
            if after == step:
                params = SamplingParams(length, True, temperature=1.0, seed=len(requests))
                requests.append(engine.add(ids, params))
        engine.step()
        scheduler = engine.scheduler
        shown = [(row["number"], row["pages"], row["computed"]) for row in frame["running"]]
        assert shown == [
            (requests.index(request) + 1, request.pages, request.computed)
            for request in scheduler.running
        ]
        pages = [page for row in frame["running"] for page in row["pages"]]
        assert dict.fromkeys(pages, 1) == scheduler.pool.holders
        waiting = [requests[row["number"] - 1] for row in frame["waiting"]]
        assert waiting == list(scheduler.waiting)
        preempted += len(frame["preempted"])
        assert preempted == scheduler.preemptions == frame["preemptions"]
    assert not engine.busy and preempted == 2


def test_the_pool_is_that_of_its_frame():
    record, tree = drawn("paged-cache")
    frame = record.run.frames[record.at]
    boxes = tree.find(".//ol")
    for row in frame["running"]:
        for place, page in enumerate(row["pages"]):
            box = boxes[page]
            assert box.get("class") == f"owner{row['number']}"
            assert words_of(box.find("b")) == f"page {page}"
            held = record.run.texts()[row["number"] - 1][: row["computed"]]
            words = [words_of(item) for item in box.iter("li") if item is not box]
            words = [word for word in words if word != "\xa0"]
            assert words == held[4 * place : 4 * place + 4]


def check_tables(record) -> None:
    """All that a text may need, when it begins: what was given back last, then new ones."""
    back = []
    new = iter(range(15))
    tables = {}
    frames = record.run.frames
    for before, frame in zip([None, *frames], frames):
        gone = set(tables) - {row["number"] for row in before["running"]} if before else set()
        for number in gone:
            back += reversed(tables.pop(number))
        for row in frame["running"]:
            request = record.run.requests[row["number"] - 1]
            needed = -(-(len(request.tokens) - 1) // 4)  # the last token is not computed
            if row["number"] not in tables:
                tables[row["number"]] = [back.pop() if back else next(new) for _ in range(needed)]
            assert row["pages"] == tables[row["number"]]


def test_pages_are_taken_as_the_lesson_s_own_pool_takes_them():
    from book.playing import SMALL_PAGES
    from book.serving import record_pool

    check_tables(record_pool("One day, Lily saw a"))  # the first text gives several back
    record, tree = drawn("paged-cache")
    check_tables(record)
    frames = record.run.frames
    assert "16" in SMALL_PAGES and record.size == 4
    shown = [
        [int(words_of(code)) for code in row.iter("code")]
        for row in of_class(tree, "table", "rows")[0].iter("tr")
    ]
    assert shown == [row["pages"] for row in frames[record.at]["running"]]
    assert shown[-1][0] == 0 and max(map(max, shown)) == 10  # text 4 has the page of text 1
    free = of_class(tree, "li", "free")
    assert len(free) == 15 - sum(map(len, shown))


def test_what_two_budgets_compute():
    """Bars as a scheduler without a model gives them, and the steps of the first tokens."""
    from book import recordings

    record, drawing = drawing_of("chunked-prefill")
    prompts = [recordings.encode(text, 99) for text in ("Lily", "The dog", recordings.STORY)]
    panels = of_class(tree_of(drawing.body), "div", "panel")
    first = []
    for budget, panel in zip((512, 8), panels, strict=True):
        lacking = [len(prompt) for prompt in prompts]
        left = [12, 12, 12]
        lines = list(panel.iter("tr"))
        for number, line in enumerate(lines, 1):
            running = [row for row in range(3) if left[row] and (row < 2 or number > 2)]
            room = budget
            shares = []
            for place, row in enumerate(running):
                count = min(lacking[row], room - (len(running) - place - 1))
                room -= count
                shares.append(100 * count / 41)
                lacking[row] -= count
                if not lacking[row]:
                    lacking[row] = 1
                    left[row] -= 1
            name, value = words_of(line.find("th")), words_of(of_class(line, "td", "value")[0])
            assert name == f"step {number}" and int(value.partition(",")[0]) == budget - room
            assert widths(line) == pytest.approx(shares, abs=0.006)
            if "first token" in value:
                first.append(number)
                assert left[2] == 11 and lacking[2] == 1
        assert left == [0, 0, 0]
        words = words_of(of_class(panel, "p", "title")[0])
        most = 41 if budget == 512 else 8
        assert words == f"Budget {budget}: {len(lines)} steps of at most {most} tokens"
    assert first == record.first == [3, 9]
    words = words_of(tree_of(drawing.body))
    assert "comes after step 2." in words and "41 at once, 8 in chunks" in words
    assert "in step 9 instead of 3, the end after 20 steps instead of 14." in words
    assert "budget of 8 tokens a step nobody waits long" in drawing.caption
    assert "budget of 8" in drawing.caption and "step 20 instead of 14." in drawing.caption


def squares_of(table) -> list[tuple[int, int]]:
    """Of each row: pages of its own, and repeated ones."""
    return [
        (len(of_class(row, "rect", "first")), len(of_class(row, "rect", "waste")))
        for row in table.iter("tr")
    ]


def test_page_groups_count_what_attention_reads():
    from book import recordings
    from book.paging import SHORT

    record, tree = drawn("page-groups")
    prompts = [recordings.STORY, *SHORT]
    # Two steps: the prompt, and the token that followed it.
    lengths = [len(recordings.encode(text, 120)) + 1 for text in prompts]
    assert record.lengths == lengths
    own = [-(-length // 4) for length in lengths]
    together, apart = of_class(tree, "div", "panel")
    plain = [squares_of(table) for table in of_class(together, "table", "gather")]
    assert plain == [[(pages, max(own) - pages) for pages in sorted(own, reverse=True)]]
    groups = [squares_of(table) for table in of_class(apart, "table", "gather")]
    bits = sorted({pages.bit_length() for pages in own}, reverse=True)
    expected = []
    for bit in bits:
        members = sorted((pages for pages in own if pages.bit_length() == bit), reverse=True)
        expected.append([(pages, members[0] - pages) for pages in members])
    assert groups == expected and len(groups) == 3
    for part, tables in ((together, plain), (apart, groups)):
        count = sum(sum(pair) for table in tables for pair in table)
        assert words_of(part.find("p")).endswith(f" {count} pages")
    counts = [sum(sum(pair) for table in tables for pair in table) for tables in (plain, groups)]
    caption = caption_of("page-groups")
    told = f"{counts[0]} for these 5. In groups of similar length only {counts[1]}, and"
    assert told in caption
    assert caption.endswith(f"these texts have {sum(own)}.")
    assert "A page has 4 positions here" in words_of(tree)


def test_levels_and_steps_of_preemption():
    record, tree = drawn("preemption")
    (levels,) = of_class(tree, "div", "levels")
    for frame, column in zip(record.frames, levels, strict=True):
        shown = {
            part.get("class"): float(re.fullmatch(r"height:([\d.]+)%", part.get("style"))[1])
            for part in column
        }
        held = {f"owner{row['number']}": 10.0 * len(row["pages"]) for row in frame["running"]}
        assert shown == held and sum(shown.values()) <= 100
        assert list(shown) == sorted(shown, reverse=True)  # the youngest on top
    again = 0  # prompts are of one token here
    for number, line in enumerate(of_class(tree, "div", "steps"), 1):
        computed = 0
        for frame, cell in zip(record.frames, line, strict=True):
            kind = cell.get("class", "").split()
            assert ("lost" in kind) == (number in frame["preempted"])
            if "one" in kind:
                computed += 1
            if "many" in kind:  # so many before its newest token
                computed += int(words_of(cell)) + 1
                again += int(words_of(cell))
        assert computed == total(record.frames, number, 0)
    _, drawing = drawing_of("preemption")
    extra = record.frames[-1]["positions"] - sum(len(each.tokens) - 1 for each in record.requests)
    assert extra == again > 0 and f"once more later: {extra} positions more than" in drawing.caption
    assert record.frames[-1]["preemptions"] == 2 == len(of_class(tree, "i", "lost"))
    lost = [at for at, frame in enumerate(record.frames) if frame["preempted"]]
    for at in lost:  # as many pages as were free before the step were too few
        gone = {f"owner{number}" for number in record.frames[at]["preempted"]}
        assert gone & {part.get("class") for part in levels[at - 1]}
        assert not gone & {part.get("class") for part in levels[at]}


def test_shared_pages_stand_once():
    record, tree = drawn("prefix-sharing")
    boxes = {
        int(words_of(box.find("b")).removeprefix("page ")): box
        for pool in of_class(tree, "ol", "pool")
        for box in pool
    }
    chips = {page: [words_of(chip) for chip in box.iter("span")] for page, box in boxes.items()}
    (tables,) = of_class(tree, "table", "rows")
    entries = {}
    for line in tables.iter("tr"):
        number = words_of(line.find("th"))
        pages = [int(words_of(code)) for code in line.iter("code")]
        text = ""
        for page in pages:
            entries.setdefault(page, []).append(number)
            items = [item for item in boxes[page].iter("li") if item is not boxes[page]]
            text += "".join(words_of(item) for item in items).replace("\xa0", "")
        whole = "".join(record.texts()[int(number) - 1])
        assert whole.startswith(text) and len(text) > 60
    assert set(entries) == set(boxes)
    for page, numbers in entries.items():
        assert chips[page] == (numbers if len(numbers) > 1 else [])
        kind = "common" if len(numbers) > 1 else f"owner{numbers[0]}"
        assert boxes[page].get("class") == kind
    assert sorted(map(len, entries.values())) == [1] * 8 + [4] * 3
    # Twelve tokens fill three pages; the last one is computed, so that its logits are there.
    last = record.frames[-1]
    assert last["shared"] == 3 * 8 and last["positions"] == 12 + 3 * 4 + 4 * 8
    _, drawing = drawing_of("prefix-sharing")
    assert drawing.caption.startswith("4 texts that begin alike, in 11 pages instead of 20:")
    titles = [words_of(part) for part in of_class(tree, "p", "title")]
    assert titles == ["Pages of several texts: 3", "Pages of one text: 8", "Tables"]
    words = words_of(tree)
    assert "3 later prompts, of 12 tokens, found 2 pages: 3 \u00d7 8 = 24 positions." in words
    assert "The other 4 tokens it computed: the last one always is" in words


def test_drafts_that_rows_copy():
    """What is accepted and what is the model's own make the text of `generate`."""
    record, tree = drawn("batched-lookup")
    (table,) = of_class(tree, "table", "verdicts")
    lines = [list(line.iter("td")) for line in table.iter("tr")][1:]
    assert len(lines) == len(record.frames)
    counts = {"accepted": 0, "drafted": 0}
    for column, request in enumerate(record.requests):
        from book.recordings import text_of

        written = []
        for line in lines:
            cell = line[column]
            good, bad, rest, own = (tokens_of(cell, kind) for kind in ("new", "out", "gone", "own"))
            assert len(own) == (1 if tokens_of(cell) else 0) and len(bad) <= 1
            assert bad or not rest
            assert not bad or bad != own
            written += good + own
            counts["accepted"] += len(good)
            counts["drafted"] += len(good + bad + rest)
        assert written == [text_of(id) for id in own_text(request)]
    assert counts == {name: record.frames[-1][name] for name in counts}
    assert 0 < counts["accepted"] < counts["drafted"]
    words = words_of(tree)
    assert f"{counts['accepted']} of {counts['drafted']} were accepted" in words
    steps = [sum(bool(tokens_of(line[column])) for line in lines) for column in (0, 1)]
    assert f"16 tokens each, in {steps[0]} and {steps[1]} steps, the same texts" in (
        caption_of("batched-lookup")
    )


def test_both_models_draw_with_the_same_numbers():
    """Each draft and each token wins the race over the whole vocabulary."""
    from book import recordings
    from sampling import keyed_noise

    record, drawing = drawing_of("batched-speculation")
    tree = tree_of(drawing.body)
    assert len(record.races) > 30
    frames = record.run.frames
    for number, request in enumerate(record.run.requests, 1):
        assert request.output == own_text(request)
        assert total(frames, number, 3) == len(request.output)
    for which, name in ((1, "drafted"), (2, "accepted")):
        assert sum(total(frames, number, which) for number in (1, 2, 3)) == frames[-1][name]
    for race in record.races:
        number, position = race.place
        text = record.run.requests[number - 1].tokens
        speeds = []
        pair = []
        for name in ("stories", "stories-draft"):
            logits = recordings.next_logits(text[:position], name).double()
            probs = (logits / 0.8).softmax(dim=-1)
            noise = keyed_noise(logits[None], [(number, position)])[0]
            pair.append(probs)
            speeds.append(probs / noise)
        winners = [recordings.text_of(each.argmax().item()) for each in speeds]
        assert winners == [race.drawn, race.draft]
        for word, p, q, e in race.rows:
            id = recordings.encoding().encode_single_token(word)
            assert [p / e, q / e] == pytest.approx([each[id].item() for each in speeds], rel=1e-3)
        assert race.drawn == recordings.text_of(text[position])
        assert race.chance == pytest.approx((pair[0] * pair[1]).sum().item(), rel=1e-4)
        tv = (pair[0] - pair[1]).abs().sum().item() / 2
        assert race.most == pytest.approx(1 - tv, abs=1e-5)  # as the lesson says
    last = record.run.frames[-1]
    right = sum(race.drawn == race.draft for race in record.races)
    assert right == last["accepted"]
    count = len(record.races)
    assert f"{right} of {count} drafts are right, and the text is" in drawing.caption
    assert "the text is the one without drafts" in drawing.caption
    words = words_of(tree)
    assert f"{right} of these {count} drafts. " in words
    most, chance = (
        sum(getattr(race, name) for race in record.races) / count for name in ("most", "chance")
    )
    assert chance < right / count and chance < most < 1
    (shares,) = of_class(tree, "table", "bars")
    assert widths(shares) == pytest.approx(
        [100 * right / count, 100 * most, 100 * chance], abs=0.01
    )
    values = [words_of(value) for value in of_class(shares, "td", "value")]
    assert values == [f"{100 * share:.0f}\xa0%" for share in (right / count, most, chance)]
    (table,) = of_class(tree, "table", "figures")
    title, other = of_class(tree, "p", "title")
    assert words_of(other) == f"How many of {count} drafts are accepted"
    (race,) = [
        race
        for race in record.races
        if tokens_of(title) == [race.after] and race.drawn == race.draft
    ]
    lines = [[words_of(cell) for cell in line.iter("td")] for line in table.iter("tr")][1:]
    for (_, p, q, e), line in zip(race.rows, lines, strict=True):
        shown = [float(cell.removesuffix("\xa0%")) for cell in line]
        assert shown[:3] == pytest.approx([100 * p, 100 * q, e], rel=0.06, abs=0.051)
        assert shown[3:] == pytest.approx([p / e, q / e], abs=0.0051)
    assert tokens_of(table) == [row[0] for row in race.rows]
    wins = [
        words_of(line.find("th"))
        for line in table.iter("tr")
        for cell in line.iter("td")
        if cell.get("class") == "win"
    ]
    assert wins == [race.drawn] * 2


def test_trials_go_by_their_clock():
    from book import recordings

    record, tree = drawn("drafts-that-pay")
    sizes = [
        sum(weight.numel() for weight in recordings.load(name).parameters())
        for name in ("stories", "stories-draft")
    ]
    share = sizes[1] / sizes[0]
    for each, ways in zip(record, ([16, 32], [16])):
        drafted = [step[0] for step in each.steps]
        assert drafted == [True] * 16 + [False] * 16 + [len(ways) == 2] * 16
        assert all(took == 1 and count == 1 for way, count, took in each.steps if not way)
        assert all(1 <= count <= 4 for _, count, _ in each.steps)
    weights, products = record
    assert all(took == pytest.approx(1 + 3 * share) for way, _, took in weights.steps if way)
    for way, _, took in products.steps:
        # The draft model reads the last token, its own drafts, and one more after three right ones.
        assert not way or took in (pytest.approx(4 + 3 * share), pytest.approx(4 + 4 * share))
    strips = of_class(tree, "div", "trial")
    longest = sum(took for _, _, took in products.steps)
    highest = 4 / (1 + 3 * share)  # tokens in the time of a step without drafts
    for each, strip, panel in zip(record, strips, of_class(tree, "div", "panel")):
        for (way, count, took), block in zip(each.steps, strip, strict=True):
            assert block.get("class") == ("good" if way else "soft")
            style = re.fullmatch(r"width:([\d.]+)%;height:([\d.]+)%", block.get("style"))
            width, height = map(float, style.groups())
            assert width == pytest.approx(100 * took / longest, abs=0.001)
            assert height == pytest.approx(100 * count / took / highest, abs=0.001)
            # The block's area is its tokens.
            assert width * height == pytest.approx(1e4 * count / longest / highest, rel=1e-3)
        lines = [[float(words_of(cell)) for cell in line.iter("td")] for line in panel.iter("tr")]
        for way, (count, took, rate) in zip((True, False), lines[1:]):
            counts = [float(n) for own, n, _ in each.steps[:32] if own == way]
            mean = torch.tensor(counts).mean().item()
            assert count == pytest.approx(mean, abs=0.006)
            assert rate == pytest.approx(mean / took, abs=0.02)
        pays = "pay" if lines[1][2] > lines[2][2] else "do not pay"
        assert words_of(panel.find("p")).endswith(f": drafts {pays}")
        (win,) = of_class(panel, "td", "win")
        assert float(words_of(win)) == max(lines[1][2], lines[2][2])
        spans = list(of_class(panel, "div", "thirds")[0])
        words = [words_of(span) for span in spans]
        assert words == ["with", "without", "then with" if each.steps[-1][0] else "then without"]
        parts = [sum(took for _, _, took in each.steps[at : at + 16]) for at in (0, 16, 32)]
        shown = [float(span.get("style")[6:-1]) for span in spans]
        assert shown == pytest.approx([100 * part / longest for part in parts], abs=0.001)


@pytest.mark.parametrize("slug", ["batched-speculation", "drafts-that-pay"])
def test_a_prompt_of_one_token(slug):
    from pictures import page

    assert "<figcaption>" in page(f"00-{slug}", "Tom")


@pytest.mark.skipif(not shutil.which("node"), reason="node reads the script")
def test_the_player_s_script_is_read():
    subprocess.run(["node", "--check", ROOT / "server" / "player.js"], check=True)
