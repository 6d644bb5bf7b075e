"""The pictures of lessons 55 to 63 show what a server, its threads and its engine really did."""

import asyncio
import contextlib
import json
import math
import re

import pytest
import torch
from conftest import CHECKPOINTS, run_rows
from drawings import drawn, of_class, tokens_of, tree_of, words_of

LESSONS = (
    "engine-thread early-ends server completions request-fields streaming choices token-tables "
    "chat-completions"
).split()


@pytest.fixture(scope="module")
def model():
    from book import recordings

    return recordings.load("stories-llama")


@pytest.fixture(scope="module")
def encoding():
    from book import recordings

    return recordings.encoding()


def alone(model, ids, **params) -> list[int]:
    """What `generate` writes."""
    (row,) = run_rows(model, [ids], **params)
    return row


def names_of(encoding, ids) -> list[str]:
    return [encoding.decode([id]) for id in ids]


def caption_of(slug: str) -> str:
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    return words_of(tree_of(picture.draw(recorded(picture, picture.prompt)).caption))


def rows_of(tree, kind: str) -> list:
    """Those of the body of a table."""
    (table,) = of_class(tree, "table", kind)
    (body,) = table.iter("tbody")
    return list(body)


@pytest.mark.parametrize("slug", LESSONS)
def test_a_picture_is_the_same_each_time(slug):
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    assert picture.record(picture.prompt) == recorded(picture, picture.prompt)


def test_lanes(model, encoding):
    """All that crosses is there once, in order; who was away gets what came since as one."""
    record, tree = drawn("engine-thread")
    prompts = {"A": encoding.encode("Lily"), "B": encoding.encode("The dog")}
    texts = {
        name: names_of(encoding, alone(model, ids, max_new_tokens=6, ignore_eos=True))
        for name, ids in prompts.items()
    }
    rows = []
    read = {"A": 0, "B": 0}
    for step in range(1, 8):
        if step < 3:
            name = "AB"[step - 1]
            asked = encoding.decode(prompts[name])
            rows.append(([f"{name} asks {asked}"], [f"add {name}"], []))
        here = [name for name, first in (("A", 1), ("B", 2)) if first <= step < first + 6]
        places = {name: step - "AB".index(name) - 1 for name in here}
        news = [f"{name}\u00a0{texts[name][places[name]]}" for name in here]
        sizes = [f"{name} {1 if places[name] else len(prompts[name])}" for name in here]
        shown = []
        for name in sorted(here, reverse=step == 5):
            if name == "A" and step in (3, 4):
                continue
            text = "".join(texts[name][read[name] : places[name] + 1])
            count = places[name] + 1 - read[name]
            shown.append(f"{name} reads {text}" + (f" {count} tokens at once" * (count > 1)))
            read[name] = places[name] + 1
        shown += ["A is away"] * (step in (3, 4))
        rows.append((shown, [" ".join(news)], [f"step {step}", " ".join(sizes)]))
    found = [
        tuple([words_of(words) for words in cell.iter("p")] for cell in row)
        for row in rows_of(tree, "lanes")
    ]
    assert found == rows
    kinds = [row.get("class") for row in rows_of(tree, "lanes")]
    assert kinds == ["in", "out"] * 2 + ["out"] * 5
    assert record.texts == {name: "".join(own) for name, own in texts.items()}
    assert "7 calls for 12 tokens" in caption_of("engine-thread")
    assert "finds 3 tokens joined" in words_of(tree)


def test_two_early_ends(encoding):
    """The same three texts in an engine without threads, one of them aborted between two steps."""
    from book import door
    from sampling import SamplingParams

    record, tree = drawn("early-ends")
    engine = door.make_engine(max_rows=2, page_size=4, num_pages=10)
    prompts = ("Once upon a time, there was a", "The dog", "Tom")
    params = SamplingParams(24, ignore_eos=True)
    requests = [engine.add(encoding.encode(prompt), params) for prompt in prompts]
    named = list(zip("ABC", requests))

    def state():
        owners = [""] * 10
        for name, request in named:
            for page in request.pages:
                owners[page] = name
        running = [name for name, request in named if request in engine.scheduler.running]
        waiting = [name for name, request in named if request in engine.scheduler.waiting]
        return engine.steps, running, waiting, owners

    def news():
        return {name: encoding.decode(r.tokens[-1:]) for name, r in named if r.pages}

    for _ in range(6):
        engine.step()
    expected = [state()]
    read = [news()]
    engine.abort(requests[0])
    expected.append(state())
    engine.step()
    expected.append(state())
    read.append(news())
    assert (record.states, record.read) == (expected, read)
    assert record.commands == ["abort"]
    dead = "EngineDead: the engine has failed: RuntimeError: a bug"
    assert record.failed == "RuntimeError: a bug"
    assert record.told == {"B": dead, "C": dead} and record.late == dead

    def stands(state):
        _, running, waiting, owners = state
        words = " ".join(running) + (" runs" if len(running) == 1 else " run")
        waits = f", {' '.join(waiting)} waits" if waiting else ""
        return [words + waits, f"{owners.count('')} of 10 pages free"]

    assert stands(expected[0])[0] == "A B run, C waits" and stands(expected[2])[0] == "B C run"
    crosses = [" ".join(f"{name}\u00a0{text}" for name, text in each.items()) for each in read]
    reads = [[f"{name} reads {text}" for name, text in each.items()] for each in read]
    rows = [
        (reads[0], [crosses[0]], ["step 6", *stands(expected[0])]),
        (["A leaves"], ["abort A"], stands(expected[1])),
        (reads[1], [crosses[1]], ["step 7", *stands(expected[2])]),
        (
            [f"B C get {dead}"],
            ["RuntimeError: a bug"],
            ["step 8 fails", "no engine any more"],
        ),
        (["Who asks later gets the same"], [], []),
    ]
    found = [
        tuple([words_of(words) for words in cell.iter("p")] for cell in row)
        for row in rows_of(tree, "lanes")
    ]
    assert found == rows
    assert [row.get("class") for row in rows_of(tree, "lanes")] == ["out", "in", "out", "out", ""]
    (note,) = of_class(tree, "p", "note")
    assert f"row and {expected[0][3].count('A')} pages are free" in words_of(note)
    assert record.left == 24 - 6 and "18 more tokens" in words_of(note)


def test_health(model):
    _, tree = drawn("server")
    own = {"id": "stories-llama", "object": "model", "created": 0, "owned_by": "serve.py"}
    own |= {"root": "checkpoints/stories-llama", "parent": None}
    own |= {"max_model_len": model.config.block_size}

    def error(message, kind, param=None, code=None):
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    invalid = "invalid_request_error"
    unknown = "the model 'gpt-4' does not exist; this server has 'stories-llama'"
    missing = ("404", error(unknown, invalid, "model", "model_not_found"))
    died = error("the engine has failed: RuntimeError: a bug", "server_error")
    expected = {
        "GET /health \u2192 health()": [("200", None), ("503", None)],
        "GET /v1/models \u2192 models()": [
            ("200", {"object": "list", "data": [own]}),
            ("503", died),
        ],
        "GET /v1/models/gpt-4 \u2192 model()": [missing],
        "GET /v2 \u2192 no function of ours": [("404", error("Not Found", invalid))],
    }
    titles = [words_of(title) for title in of_class(tree, "p", "title")]
    groups = of_class(tree, "div", "asked")
    assert titles == list(expected)
    for group, answers in zip(groups, expected.values(), strict=True):
        found = []
        for part in group:
            boxes = [words_of(box) for box in of_class(part, "code", "text-box")]
            body = json.loads(boxes[0].replace("\u2026", "0")) if boxes else None
            (status,) = of_class(part, "b", "tok")
            assert status.get("class") == f"tok {'new' if words_of(status) == '200' else 'out'}"
            found.append((words_of(status), body))
        assert found == answers
    states = [words_of(part[0]).split(":")[0] for group in groups for part in group]
    since = "engine died (at this lesson still 200, until 67)"
    assert states == ["engine works", "engine died", "engine works", since] + ["either way"] * 2
    assert "All errors with a body have one form." in words_of(tree)
    assert "200 while" in caption_of("server") and "503 when" in caption_of("server")


def json_of(panel) -> tuple[dict, dict[str, str]]:
    """What is written there, and the class of each field's line."""
    (lines,) = of_class(panel, "ol", "json")
    text = "".join(words_of(line) for line in lines).replace('"created": \u2026', '"created": 0')
    found = [re.match(r'"(\w+)": ', words_of(line)) for line in lines]
    return json.loads(text), {
        field[1]: line.get("class") for field, line in zip(found, lines) if field
    }


def test_a_completion(model, encoding):
    """One colour for what belongs together, from the question to the answer."""
    _, tree = drawn("completions")
    ids = encoding.encode("Once upon a time")
    written = alone(model, ids, max_new_tokens=12)
    sent, engine, got = of_class(tree, "div", "panel")
    body, kinds = json_of(sent)
    assert body == {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    assert kinds == {"prompt": "tint0", "max_tokens": "tint1", "temperature": "tint3"}
    stages = of_class(engine, "div", "stage")
    assert [stage.get("class") for stage in stages] == [f"stage tint{n}" for n in (0, 1, 3, 2)]
    assert tokens_of(stages[0]) == names_of(encoding, ids)
    assert tokens_of(stages[3]) == names_of(encoding, written)
    words = [words_of(stage) for stage in stages]
    assert words[0].startswith("4 tokens") and words[3].startswith("12 tokens")
    assert words[1:3] == ["up to 12 steps: all 12 are used", "the likeliest token each time"]
    answer, kinds = json_of(got)
    choice = {"index": 0, "text": encoding.decode(written), "logprobs": None}
    assert answer == {
        "id": "cmpl-\u2026",
        "object": "text_completion",
        "created": 0,
        "model": "stories-llama",
        "choices": [choice | {"finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16},
    }
    coloured = {field: kind for field, kind in kinds.items() if kind}
    assert coloured == {
        "text": "tint2",
        "finish_reason": "tint1",
        "prompt_tokens": "tint0",
        "completion_tokens": "tint2",
    }
    assert "4 tokens in, 12 out" in caption_of("completions")


def test_fields(model, encoding):
    """Texts are those of `generate` with such parameters; what is refused has no text."""
    _, tree = drawn("request-fields")
    ids = encoding.encode("Tom saw")
    base = {"max_new_tokens": 10, "temperature": 1.0, "seed": 7}

    def text(**params):
        return encoding.decode(alone(model, ids, **base | params))

    own = text()
    (line,) = of_class(tree, "p", "draws")
    assert tokens_of(line) == [own] and '{"prompt": "Tom saw", "seed": 7, "max_tokens": 10}' in (
        words_of(line)
    )
    expected = {
        "It works": {
            '"temperature": 0': text(temperature=0.0),
            '"top_p": 0.3': text(top_p=0.3),
            '"repetition_penalty": 1.5': text(repetition_penalty=1.5),
            '"stop": ["."]': own.partition(".")[0],
        },
        "Refused by name, with the reason": {
            '"min_p": 0.1': "400 min_p is not supported",
            '"tools": [{"type": "function"}]': "400 tools is not supported",
            '"logit_bias": {"50": -100}': "400 logit_bias is not supported",
            '"top_p": 0': "400 top_p: top_p is 0.0; it must be a number in (0, 1]",
        },
        "Not supported, but the value asks for nothing": dict.fromkeys(
            ('"min_p": 0', '"tools": []', '"suffix": ""'), "the same text"
        ),
        "Nobody has heard of it: it is ignored": {'"flavour": "mint"': "the same text"},
    }
    assert "." in own and len(set(expected["It works"].values()) | {own}) == 5
    found = {}
    for panel in of_class(tree, "div", "panel"):
        (title,) = of_class(panel, "p", "title")
        lines = found[words_of(title)] = {}
        for item in panel.iter("li"):
            code, words = item
            gone = tokens_of(words, "gone")
            shown = words_of(words)
            if gone:  # the rest of the text that the stop string has cut off
                assert shown == own
                shown = shown.removesuffix(gone[0])
            for new in tokens_of(words, "new"):  # where it is another text
                start = len(shown) - len(new)
                assert own[:start] == shown[:start] and own[start] != new[0]
            lines[words_of(code)] = shown
    assert found == expected
    words = caption_of("request-fields")
    assert words.endswith("nobody has heard of are ignored.")
    assert "Until lessons 60 to 62 n, stream, " in words_of(tree)


def test_a_stream(model, encoding):
    """An event a token; its bytes are those of its JSON, and together they have the text."""
    record, tree = drawn("streaming")
    ids = encoding.encode("Once upon a time")
    names = names_of(encoding, alone(model, ids, max_new_tokens=12))
    stops = [names[4] + " boy", names[7] + names[8]]
    text = "".join(names).partition(stops[1])[0]
    assert tokens_of(of_class(tree, "p", "draws")[0]) == stops
    rows = rows_of(tree, "wire")
    assert len(rows) == 10
    seen = ""
    for number, (row, chunk) in enumerate(zip(rows, record.chunks)):
        token, wire, reader = row
        (size,) = [words_of(span) for span in wire.iter("span")]
        if number < 9:
            assert tokens_of(token) == [names[number]]
            (shown,) = tokens_of(wire)
            own = json.loads(f"{{{shown}}}")["text"]
            held = number in (4, 7, 8)
            assert (own == "") == held == (tokens_of(token, "out") == [names[number]])
            seen += own
            ends = '"finish_reason":"stop"' in words_of(wire)
            assert ends == (number == 8)
            full = chunk.event | {"id": "cmpl-" + 32 * "0", "created": 1_700_000_000}
            assert full["choices"][0]["text"] == own and full["object"] == "text_completion"
            bytes_of = json.dumps(full, separators=(",", ":")).encode()
            assert size == f"{len(b'data: ' + bytes_of) + 2} bytes"
        else:
            assert words_of(wire) == "data: [DONE]14 bytes" and words_of(token) == ""
        assert words_of(reader) == seen
    assert seen == text and names[4] in text and names[7] not in text
    assert "content-type: text/event-stream; charset=utf-8" in record.head
    (head,) = of_class(tree, "code", "text-box")
    assert [part for part in head.itertext()] == record.head
    words = caption_of("streaming")
    assert "3 of these 9 events have no text" in words and "it may be several" in words


def test_choices(model, encoding):
    """Each text is that of its seed alone; pages that all have are counted once."""
    from book.recordings import STORY

    record, tree = drawn("choices")
    ids = encoding.encode(STORY)
    params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    texts = [encoding.decode(alone(model, ids, seed=5 + index, **params)) for index in range(4)]
    assert len(set(texts)) == 4
    boxes = list(of_class(tree, "ol", "prompt-pages")[0])
    names = names_of(encoding, ids)
    assert [tokens_of(box) for box in boxes] == [names[at : at + 8] for at in range(0, 39, 8)]
    branches = list(of_class(tree, "ol", "branches")[0])
    tables = []
    for index, branch in enumerate(branches):
        head, slots, text = branch
        assert (words_of(head), words_of(text)) == (
            f"choice {index} seed {5 + index}",
            texts[index],
        )
        tables.append([int(words_of(slot)) for slot in slots])
        shared = [slot.get("class") == "shared" for slot in slots]
        assert shared == [True] * 4 + [False]
    assert [box.get("class") == "shared" for box in boxes] == shared
    assert [words_of(box)[:6] for box in boxes] == [f"page {page}" for page in tables[0]]
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert len({table[4] for table in tables} | set(tables[0])) == 8
    assert record.found == [0, 32, 32, 32]
    computed = len(ids) + 3 * (len(ids) - 32) + 4 * 7
    words = caption_of("choices")
    assert "4 texts" in words and "find 4 of the prompt\u2019s 5 pages" in words
    words = words_of(tree)
    assert "n: 4, and the pages of each when it began" in words
    assert f"{computed} positions" in words and f"it would be {4 * (len(ids) + 7)}." in words


def test_columns(model, encoding):
    """The numbers are those of one pass over the whole text."""
    _, tree = drawn("token-tables")
    ids = encoding.encode("Once upon a time")
    written = alone(model, ids, max_new_tokens=8, temperature=1.0, seed=9)
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids + written]))[0, len(ids) - 1 : -1].log_softmax(dim=-1)
    names = names_of(encoding, written)
    (table,) = of_class(tree, "table", "columns")
    heads = [words_of(head) for head in table.iter("th")]
    assert heads == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    chips = list(of_class(tree, "ol", "chips")[0])
    assert [tokens_of(chip) for chip in chips] == [[name] for name in names]
    offset = 0
    outside = 0

    def number(text: str) -> float:
        return float(text.replace("\u2212", "-"))

    for row, chip, name, id, own in zip(rows_of(tree, "columns"), chips, names, written, logprobs):
        token, value, tops, begins = row
        assert tokens_of(token) == [name]
        (chance,) = [words_of(span) for span in value.iter("span")]
        shown = words_of(value).removesuffix(chance)
        assert number(shown) == pytest.approx(own[id].item(), abs=0.006)
        assert float(chance.removesuffix("\u00a0%")) == pytest.approx(
            100 * math.exp(own[id].item()), abs=0.51
        )
        best = own.topk(3).indices.tolist()
        outside += id not in best
        expected = [*best, *([id] if id not in best else [])]
        assert tokens_of(tops) == names_of(encoding, expected)
        assert tokens_of(tops, "own") == [name]
        numbers = [number(words_of(span)) for span in tops.iter("span")]
        assert numbers == pytest.approx(own[expected].tolist(), abs=0.006)
        assert words_of(begins) == words_of(chip[1]) == str(offset)
        offset += len(name)
    assert offset == len(encoding.decode(written))
    assert outside > 0 and f"as {outside} of 8 times here" in caption_of("token-tables")


def test_turns(model, encoding):
    """The second turn finds the full pages of all that the first one computed."""
    from loading.chat import Chat

    _, tree = drawn("chat-completions")
    template = Chat(CHECKPOINTS / "stories-llama")
    messages = []
    kept = 0
    panels = of_class(tree, "div", "panel")
    for number, (panel, said) in enumerate(zip(panels, ("rocket, moon", "dog, park")), 1):
        messages.append({"role": "user", "content": said})
        ids = template.encode(messages, encoding)
        written = alone(model, ids, max_new_tokens=24)
        bubbles, answer = of_class(panel, "ul", "bubbles")
        shown = [(line.get("class"), words_of(line)) for line in bubbles]
        assert shown == [(m["role"], f"{m['role']} {m['content']}") for m in messages]
        (box,) = of_class(panel, "code", "text-box")
        assert words_of(box).replace("\\n", "\n") == template.render(messages)
        (flow,) = of_class(panel, "p", "flow")
        names = names_of(encoding, ids)
        assert [name.replace("\\n", "\n") for name in tokens_of(flow)] == names
        assert len(tokens_of(flow, "kept")) == kept
        assert len(tokens_of(flow, "new")) == len(ids) - kept
        kinds = ["kept" in code.get("class").split() for code in of_class(flow, "code", "tok")]
        assert kinds == sorted(kinds, reverse=True)
        control = [name for name in names if name == "<|endoftext|>"]
        assert tokens_of(flow, "control") == control and len(control) == number
        titles = [words_of(title) for title in of_class(panel, "p", "title")]
        assert titles[0] == f"Turn {number}: messages"
        assert titles[2] == f"{len(ids)} ids: {kept} found, {len(ids) - kept} computed"
        messages.append({"role": "assistant", "content": encoding.decode(written)})
        assert words_of(answer) == f"assistant {messages[-1]['content']}"
        last = f"Turn 2 finds {kept} of {len(ids)} ids in pages."
        kept = (len(ids) + 24 - 1) // 16 * 16
    assert last in caption_of("chat-completions") and kept > 16
    (legend,) = of_class(tree, "ul", "key")
    assert "full pages of 16" in words_of(legend)


@pytest.mark.parametrize(
    "slug, parts",
    [
        ("engine-thread", ["step 7 computes {'B': 1}", "A reads ' were playing in'"]),
        ("early-ends", ["after step 7: running ['B', 'C']", "waiting ['C']", "told to B and C"]),
        ("server", ["/health gives 200", "/health gives 503", "a bug"]),
        ("completions", ["4 ids", '"completion_tokens": 12']),
        ("request-fields", ["logit_bias is not supported", "(works)", "(unknown)"]),
        ("streaming", ["197 bytes for [' little']: ''", "14 bytes"]),
        ("choices", ["39 tokens", "choice 3 with seed 8", "found 32 positions"]),
        ("token-tables", ["' calm' at 13"]),
        ("chat-completions", ["44 ids", "32 found, 12 computed"]),
    ],
)
def test_the_words_have_the_numbers(slug, parts):
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    words = picture.draw(recorded(picture, picture.prompt)).text
    assert all(part in words for part in parts), words


@pytest.mark.parametrize(
    "slug, prompt, words",
    [
        ("engine-thread", "", "the prompt has 0 tokens"),
        ("early-ends", "a " * 20, "this picture shows 1 to 12"),
        ("server", "x" * 41, "a name of 1 to 40"),
        ("streaming", "\udc80", "not UTF-8 text"),
        ("choices", "a " * 60, "shows 1 to 48"),
    ],
)
def test_prompts_that_cannot_be_shown(slug, prompt, words):
    from book.pictures import PICTURES
    from errors import UserError

    with pytest.raises(UserError, match=words):
        PICTURES[slug].record(prompt)


@pytest.mark.parametrize("slug", ["server", "streaming", "choices", "token-tables"])
def test_strange_prompts(slug):
    from book.pictures import page

    for prompt in ("\U0001f600", "/../a?b#c%", "<|endoftext|>"):
        tree_of(page(f"00-{slug}", prompt).partition("<main>")[2].partition("</main>")[0])


def test_what_fails_in_a_loop_is_raised():
    """And nobody waits for an engine that has failed."""
    from book import door

    async def use(thread, turns):
        with contextlib.suppress(asyncio.CancelledError):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        door.in_loop(use)


def test_a_door_is_closed():
    """Nothing that was started goes on."""
    import threading

    from book import door

    before = set(threading.enumerate())
    with door.open_door() as server:
        assert server.ask("GET", "/health").status == 200
        port = server.port
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before
    with pytest.raises(OSError):
        server.send("GET", "/health")
    assert port
