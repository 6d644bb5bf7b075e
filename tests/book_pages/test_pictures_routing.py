"""The pictures of lessons 85 to 87 show which engine a request goes to, and who ends and begins."""

import json
import math
import random
import re

import pytest
from drawings import caption_of, drawn, of_class, tokens_of, tree_of, words_of

LESSONS = ("prefix-routing", "replica-failures", "scaling")
STARTS = (
    "Once upon a time, there was a little girl named Lily",
    "One day, a boy named Tom and his dog went to",
    "The lonely knight lived in a big castle on a hill,",
    "A little cat liked to sit in the sun and sleep until",
)
COLOURS = ("first", "second", "good", "other")
TOM = "Tom had a big red ball"


@pytest.fixture(scope="module")
def encode():
    from book import recordings

    return recordings.encoding().encode


def alone(ids: list[int], length: int, seed: int) -> list[str]:
    """The tokens that one process writes."""
    from book import recordings

    params = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
    found = recordings.write(ids, "stories-llama", max_new_tokens=length, **params)
    return [recordings.text_of(id) for id in found]


def share(element, name: str) -> float:
    """A length in percent, of a style."""
    return float(re.search(rf"{name}:([\d.]+)%", element.get("style"))[1])


def test_a_picture_is_the_same_each_time():
    from book.pictures import PICTURES, recorded

    for slug in LESSONS:
        picture = PICTURES[slug]
        assert picture.record(picture.prompt) == recorded(picture, picture.prompt), slug


# 85


class Known:
    """What an engine has, by the tokens themselves."""

    def __init__(self):
        self.pages = set()

    def found(self, prompt: list[int]) -> int:
        """Pages of a prompt, without its last token, from its beginning on."""
        count = 0
        while 4 * count + 4 < len(prompt) and tuple(prompt[: 4 * count + 4]) in self.pages:
            count += 1
        return count

    def add(self, prompt: list[int]) -> None:
        self.pages |= {tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)}


def rows_of(table) -> list[list]:
    return [list(row) for row in table.find("tbody")]


def drawings_of(element) -> list:
    return [part for part in element.iter() if str(part.tag).endswith("}svg")]


def rects_of(element) -> list:
    return [part for part in element.iter() if str(part.tag).endswith("}rect")]


def check_blocks(cell, beginning: int, length: int, found: int) -> None:
    """Frames for pages that are found, blocks for the rest, from left to right, none over another.

    beginning: its number; it has 12 tokens.
    """
    boxes = of_class(cell, "rect", "own") + of_class(cell, "rect", COLOURS[beginning])
    assert len(boxes) == len(rects_of(cell)) == found + length - 4 * found
    boxes.sort(key=lambda each: float(each.get("x")))
    kinds = [set(each.get("class").split()) for each in boxes]
    assert kinds[:found] == [{"found", COLOURS[beginning]}] * found
    expected = [{COLOURS[beginning]}] * (12 - 4 * found) + [{"own"}] * (length - 12)
    assert kinds[found:] == expected
    end = -1.0
    for kind, each in zip(kinds, boxes, strict=True):
        x, width = float(each.get("x")), float(each.get("width"))
        assert x > end and width == (23 if "found" in kind else 5)
        end = x + width
    (svg,) = drawings_of(cell)
    assert end <= float(svg.get("width"))


def test_beginnings_and_their_pages(encode):
    _, tree = drawn("prefix-routing")
    (table,) = of_class(tree, "table", "starts")
    for name, start, row in zip("ABCD", STARTS, table.iter("tr"), strict=True):
        assert words_of(row[0]) == name
        assert "".join(tokens_of(row[1])) == start
        frames = of_class(row[1], "span", "page")
        assert [len(tokens_of(frame)) for frame in frames] == [4, 4, 4]


def test_where_requests_go_and_what_is_found(encode):
    """By sets of the tokens before the end of each page; chance by the same seed."""
    record, tree = drawn("prefix-routing")
    order = [number for number in range(4) for _ in range(3)]
    random.Random(0).shuffle(order)
    ends = "and saw then found with who ate ran sat took gave made".split()
    prompts = [encode(STARTS[number]) + encode(f" {end}") for number, end in zip(order, ends)]
    draws = random.Random(0)
    tables = of_class(tree, "table", "lanes")[:2]
    sums = []
    for by_prefix, table in zip((True, False), tables, strict=True):
        engines = [Known() for _ in range(3)]
        counts = [[0, 0] for _ in range(3)]
        assert [words_of(cell) for cell in table.find("thead")[0]][1:] == [
            "engine 1",
            "engine 2",
            "engine 3",
        ]
        for number, prompt, row in zip(order, prompts, rows_of(table), strict=True):
            if by_prefix:
                ranks = [(-each.found(prompt), len(each.pages)) for each in engines]
                chosen = ranks.index(min(ranks))
            else:
                chosen = draws.sample(range(3), 2)[0]
            found = engines[chosen].found(prompt)
            engines[chosen].add(prompt)
            counts[chosen][0] += 4 * found
            counts[chosen][1] += len(prompt) - 4 * found
            assert words_of(row[0]) == "ABCD"[number]
            assert row[0][0].get("class").split()[0] == f"tint{number}"
            filled = [place for place, cell in enumerate(row[1:]) if len(cell)]
            assert filled == [chosen]
            check_blocks(row[1 + chosen], number, len(prompt), found)
        foot = [words_of(cell) for cell in table.find("tfoot")[0]][1:]
        assert foot == [f"{found} found{computed} computed" for found, computed in counts]
        sums.append(sum(found for found, _ in counts))
    total = sum(map(len, prompts))
    one = Known()
    found_alone = 0
    for prompt in prompts:
        found_alone += 4 * one.found(prompt)
        one.add(prompt)
    titles = [words_of(title) for title in of_class(tree, "p", "title")]
    assert titles[1:3] == [
        f"By prefix: {sums[0]} of {total} positions found",
        f"At random, as by load of idle engines: {sums[1]} of {total} found",
    ]
    caption = caption_of("prefix-routing")
    assert f"12 requests find {sums[0]} positions computed; at random, {sums[1]}." in caption
    assert f"One engine for all finds {found_alone}." in words_of(tree)
    assert sums[1] < sums[0] == found_alone == record.alone
    assert "here there is no Ray" in words_of(tree)


def test_an_engine_that_has_much_to_do(encode):
    """Texts and pages counted here: the smallest difference, then the fewest pages, is chosen."""
    _, tree = drawn("prefix-routing")
    (table,) = of_class(tree, "table", "scored")
    ends = "and saw then found with who ate ran".split()
    engines = [Known() for _ in range(3)]
    texts = [0, 0, 0]
    for number, (end, row) in enumerate(zip(ends, rows_of(table), strict=True), 1):
        prompt = encode(STARTS[0]) + encode(f" {end}")
        pages = [each.found(prompt) for each in engines]
        scores = [count - own for count, own in zip(texts, pages)]
        ranks = [(score, len(each.pages)) for score, each in zip(scores, engines)]
        chosen = ranks.index(min(ranks))
        assert words_of(row[0]) == str(number)
        for place, cell in enumerate(row[1:]):
            words = f"{texts[place]} \u2212 {pages[place]} = {scores[place]}"
            assert words_of(cell) == words.replace("-", "\u2212")
            assert (cell.get("class") == "chosen") == (place == chosen)
            assert len(drawings_of(cell)) == (place == chosen)
        check_blocks(row[1 + chosen], 0, len(prompt), pages[chosen])
        engines[chosen].add(prompt)
        texts[chosen] += 1
    assert texts == [3, 3, 2]


# 86


def test_of_a_killed_engine_texts_end_and_others_go_on(encode):
    record, tree = drawn("replica-failures")
    ids = encode(TOM)
    texts = {name: alone(ids, 9, seed) for seed, name in enumerate("ABCD")}
    (table,) = of_class(tree, "table", "fates")
    first, second = table.find("thead")
    assert [(words_of(cell), cell.get("colspan")) for cell in first][1:] == [
        ("engine 1", "2"),
        ("engine 2", "3"),
    ]
    assert [words_of(cell).strip() for cell in second] == ["step", "A", "C", "B", "D", "A again"]
    rows = rows_of(table)
    assert [words_of(row[0]) for row in rows] == [*map(str, range(1, 19)), ""]

    def shown(row: list) -> list[tuple[str, str | None]]:
        return [(words_of(cell), cell.get("class")) for cell in row[1:]]

    def token(name: str, place: int) -> tuple[str, None]:
        own = texts[name]
        return ("" if place > 9 else "length" if place == 9 else own[place], None)

    for place, row in enumerate(rows):
        end = [token(name, place) for name in "BD"]
        end.append(token("A", place - 9) if place >= 9 else ("", None))
        begin = {
            **{step: [token(name, step) for name in "AC"] for step in range(4)},
            4: [("error", "wrong"), ("503", "wrong")],
            5: [("no process", "nobody")],
        }
        assert shown(row) == begin.get(place, []) + end
    assert (rows[5][1].get("colspan"), rows[5][1].get("rowspan")) == ("2", "14")
    assert tokens_of(table, "kept") == texts["A"][:4] * 2
    columns = [[row[5 if len(row) == 6 else -1] for row in rows], [row[1] for row in rows[:4]]]
    kept = [len(tokens_of(cell, "kept")) for column in columns for cell in column]
    assert kept == [0] * 9 + [1] * 4 + [0] * 6 + [1] * 4
    title = of_class(tree, "p", "title")[0]
    assert words_of(title) == "A token a step; engine 1 is killed after 4"
    assert "As far as they came, 5 of 5 texts are the same as without others" in words_of(tree)
    assert "Ray would also start" in words_of(tree) and "with the same seed" in caption_of(
        "replica-failures"
    )
    assert record.code == -9
    assert [each.read for each in record.asked] == [
        "".join(texts["A"][:4]),
        "".join(texts["B"]),
        "",
        "".join(texts["D"]),
    ]
    assert record.again.read == "".join(texts["A"])


def test_what_clients_of_the_killed_engine_read():
    _, tree = drawn("replica-failures")
    panel = of_class(tree, "div", "panel")[1]
    names = [words_of(line) for line in panel.iter("p")]
    assert names == ["What the clients of engine 1 read at last", "A a stream", "C awaited whole"]
    stream, whole = ([words_of(line) for line in said] for said in panel.iter("ul"))
    gone = "the process that wrote this text has ended, or cannot be reached: ConnectionError"
    error = {"error": {"message": gone, "type": "server_error", "param": None, "code": None}}
    assert json.loads(stream[0].removeprefix("data: ")) == error == json.loads(whole[1])
    assert (stream[1], whole[0]) == ("data: [DONE]", "503")


# 87


def simulate() -> list[tuple]:
    """Of each second: what it shows, without an engine. Times to the end of each text are enough.

    (texts of each engine, those that leave, requests that wait, wanted, counts of the last 4 s)
    """
    there = {0: []}  # of each engine, of each text: steps that it lacks, and its client
    leaving = set()
    known = set()  # engines that have had the prompt: its one full page
    counts = []
    target, since = 1, None
    result = []
    while len(counts) < 38 or any(there.values()):
        now = len(counts)
        clients = 1 if now < 4 else 6 if now < 22 else 2 if now < 38 else 0
        for engine in range(target):
            there.setdefault(engine, [])
        busy = {client for texts in there.values() for _, client in texts}
        for client in sorted(set(range(clients)) - busy):
            ranks = []
            for engine in sorted(set(there) - leaving):
                texts = len(there[engine])
                ranks.append((texts - (engine in known and texts < 2), engine in known, engine))
            engine = min(ranks)[2]
            known.add(engine)
            there[engine].append([6, client])
        counts.append(sum(map(len, there.values())))
        computed = {engine: len(texts[:2]) for engine, texts in there.items()}
        for engine, texts in there.items():
            for text in texts[:2]:
                text[0] -= 1
            there[engine] = [text for text in texts if text[0]]
        recent = counts[-4:]
        wanted = min(max(math.ceil(sum(recent) / len(recent) / 2), 1), 3)
        result.append((computed, set(leaving), counts[-1] - sum(computed.values()), wanted, recent))
        if wanted == target:
            since = None
        else:
            since = now if since is None else since
            if now - since >= 4:
                leaving |= set(range(wanted, target))
                target, since = wanted, None
        for engine in [engine for engine in leaving if not there[engine]]:
            del there[engine]
            leaving.remove(engine)
            known.discard(engine)
    return result


def test_engines_come_and_go(encode):
    """By a simulation that has no engine."""
    record, tree = drawn("scaling")
    expected = simulate()
    (levels,) = of_class(tree, "div", "levels")
    for column, (computed, leaving, waiting, _, _) in zip(levels, expected, strict=True):
        *parts, line = column
        shown = {part.get("class"): share(part, "height") for part in parts}
        counts = {"kept": waiting, "first": sum(computed.values())}
        assert shown == pytest.approx(
            {kind: 100 * count / 6 for kind, count in counts.items() if count}, abs=0.01
        )
        rows = 2 * len(set(computed) - leaving)
        assert share(line, "bottom") == pytest.approx(100 * rows / 6, abs=0.01)
    lanes = of_class(tree, "div", "engine")
    assert len(lanes) == 3
    for engine, lane in enumerate(lanes):
        for cell, (computed, leaving, _, _, _) in zip(lane, expected, strict=True):
            assert cell.get("class") == ("there" if engine in computed else "")
            count = computed.get(engine, 0)
            kind = "second" if engine in leaving else "first"
            shown = [(part.get("class"), share(part, "height")) for part in cell]
            assert shown == ([(kind, 50 * count)] if count else [])
    (wanted,) = of_class(tree, "div", "wanted")
    digits = []
    for part in wanted:
        assert part.get("class") == f"want{words_of(part)}"
        digits += [int(words_of(part))] * int(part.get("style").removeprefix("flex:"))
    assert digits == [second[3] for second in expected]
    (marks,) = of_class(tree, "div", "marks")
    places = [int(part.get("style").removeprefix("flex:")) for part in marks]
    assert [words_of(part) for part in marks] == [str(10 * at) for at in range(len(places))]
    assert places[:-1] == [10] * (len(places) - 1) and sum(places) == len(expected)
    title = of_class(tree, "p", "title")[0]
    assert words_of(title) == "1, then 6, then 2 clients, each with one request at a time"
    drained = sum(bool(leaving) for _, leaving, *_ in expected)
    assert drained > 0
    caption = caption_of("scaling")
    assert "every 2 requests" in caption and "19 of 19 texts are whole." in caption
    words = words_of(tree)
    assert f"finishes its texts, here in {drained} s." in words and "averaged over 4 s" in words
    assert "Here there is no Ray" in words
    beside = [
        now
        for now, (computed, leaving, waiting, *_) in enumerate(expected)
        if waiting and any(n < 2 for engine, n in computed.items() if engine not in leaving)
    ]
    assert f"free rows, here in seconds {beside[0]} to {beside[-1]}." in words
    assert beside == list(range(beside[0], beside[-1] + 1))
    assert "wanted for 4 s, engines begin or end" in words
    assert record.settings["max_replicas"] == 3 and record.rows == 2


def test_numbers_that_change_the_number_of_engines():
    _, tree = drawn("scaling")
    expected = simulate()
    panels = of_class(tree, "div", "panel")
    cases = (("From 1 to 3", 4, 8), ("From 3 to 1", 24, 28))
    for panel, (title, first, last) in zip(panels, cases, strict=True):
        words = words_of(of_class(panel, "p", "title")[0])
        assert words == f"{title}: the last 4 counts, and what they ask for"
        head = [words_of(cell) for cell in next(panel.iter("thead"))[0]]
        assert head == ["", "requests", "average", "/ 2", "wanted"]
        rows = [[words_of(cell) for cell in row] for row in rows_of(next(panel.iter("table")))]
        for now, row in zip(range(first, last + 1), rows, strict=True):
            *_, wanted, recent = expected[now]
            average = sum(recent) / 4
            numbers = [f"{average:.2f}", f"{average / 2:.2f}", str(wanted)]
            assert row == [f"{now} s", " ".join(map(str, recent)), *numbers]


def test_no_request_is_lost_and_each_text_is_its_own(encode):
    from book import recordings

    record, _ = drawn("scaling")
    assert sorted(seed for seed, _ in record.texts) == list(range(19))
    for seed, tokens in record.texts:
        assert [recordings.text_of(id) for id in tokens] == alone(encode(TOM), 6, seed)


# All


@pytest.mark.parametrize("slug", LESSONS)
def test_prompts_that_cannot_be_shown(slug):
    from book.pictures import PICTURES
    from errors import UserError

    for prompt, words in (("", "has 0 tokens"), ("a " * 20, "shows 1 to 16"), ("\udc80", "UTF-8")):
        with pytest.raises(UserError, match=words):
            PICTURES[slug].record(prompt)


def test_strange_prompts():
    """A page of the first is full in none; the second is another's beginning."""
    from book.pictures import PICTURES, page

    for slug in LESSONS:
        tree_of(page(f"00-{slug}", "--chat <b>").partition("<main>")[2].partition("</main>")[0])
    tree_of(page("85-prefix-routing", STARTS[1]).partition("<main>")[2].partition("</main>")[0])
    record = PICTURES["prefix-routing"].record("a")
    assert {pages for each in record.burst for _, pages in each.scores} == {0}
    assert sorted(each.engine for each in record.burst) == [0, 0, 0, 1, 1, 1, 2, 2]
