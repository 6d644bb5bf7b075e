"""Pictures of lessons 58 to 63: what a client asks the server, and what it answers."""

import json
import math
import re
import socket
import threading
from typing import Any, NamedTuple

from book import door
from book.draw import Drawing, Picture, escape, panel, panels, percent, signed, token
from book.recordings import STORY, text_of
from command_line import STORIES
from loading.chat import Chat
from server.engine_thread import Update
from server.protocol import UNSUPPORTED, CompletionRequest

PATH = "/v1/completions"


def names_of(ids: list[int] | tuple[int, ...]) -> list[str]:
    return [text_of(id) for id in ids]


def whole(updates: list[dict[int, Update]], index: int = 0) -> Update:
    """All that is new of a text."""
    return Update.join([parts[index] for parts in updates if index in parts])


def same_each_time(answer: dict) -> dict:
    """An answer without its random number and its time."""
    return answer | {"id": answer["id"].partition("-")[0] + "-\u2026", "created": 0}


def json_of(data: Any, narrow: bool = False) -> str:
    """narrow: without spaces, as the server writes it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":") if narrow else None)


def json_lines(data: dict, kinds: dict[str, str]) -> str:
    """JSON, a field a line. kinds: field -> CSS class of its line."""
    lines = ""
    for line in json.dumps(data, ensure_ascii=False, indent=1).split("\n"):
        field = re.match(r' *"(\w+)": ', line)
        kind = kinds.get(field[1], "") if field else ""
        depth = len(line) - len(line.lstrip())
        words = escape(line.strip()).replace("created&quot;: 0", "created&quot;: &hellip;")
        lines += f'<li class="{kind}" style="margin-left:{depth}ch">{words}</li>'
    return f'<ol class="json">{lines}</ol>'


class Asked(NamedTuple):
    """A request for a text, and its answer."""

    body: dict
    ids: list[int]
    greedy: bool
    most: int
    written: list[str]  # tokens
    answer: dict


def record_completion(prompt: str) -> Asked:
    door.check_prompt(prompt, 16)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    with door.open_door() as server:
        answer = same_each_time(server.write(body))
    ((ids,), (params,)) = server.asked[0]
    written = names_of(whole(server.updates).tokens)
    most = params.max_new_tokens
    return Asked(body, ids, params.temperature == 0, most, written, answer)


def draw_completion(record: Asked) -> Drawing:
    def chips(texts: list[str]) -> str:
        return f'<p class="flow">{" ".join(map(token, texts))}</p>'

    choice = record.answer["choices"][0]
    reason = choice["finish_reason"]
    draws = "the likeliest token each time" if record.greedy else "a draw each time"
    ended = f"all {record.most} are used" if reason == "length" else "the text ended by itself"
    middle = (
        f'<div class="stage tint0">{len(record.ids)} tokens{chips(names_of(record.ids))}</div>'
        f'<div class="stage tint1">up to {record.most} steps: {ended}</div>'
        f'<div class="stage tint3">{draws}</div>'
        f'<div class="stage tint2">{len(record.written)} tokens{chips(record.written)}</div>'
    )
    sent = {"prompt": "tint0", "max_tokens": "tint1", "temperature": "tint3"}
    told = {"prompt_tokens": "tint0", "completion_tokens": "tint2", "text": "tint2"}
    told["finish_reason"] = "tint1" if reason == "length" else "tint2"
    body = panels(
        panel(
            "The client sends",
            json_lines(record.body, sent),
            "A colour is a field, what the engine makes of it, and where that is in the answer, "
            "which does not name the temperature.",
        ),
        panel("The engine is asked, and writes", middle),
        panel("The client gets", json_lines(record.answer, told)),
    )
    usage = record.answer["usage"]
    caption = (
        "A request says what to write and how; the answer has the text and counts it: "
        f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out."
    )
    text = (
        f"The request {json_of(record.body)} becomes {len(record.ids)} ids; the engine writes "
        f"{record.written}; the answer is {json_of(record.answer)}."
    )
    return Drawing(body, caption, text)


class Tried(NamedTuple):
    """A request with one more field."""

    field: str
    value: Any
    kind: str  # "works", "nothing" (asks for nothing), "refused" or "unknown"
    words: str  # the text, or the error's message


class Fields(NamedTuple):
    base: dict
    text: str
    tried: list[Tried]


FIELDS = (
    ("temperature", 0),
    ("top_p", 0.3),
    ("repetition_penalty", 1.5),
    ("stop", ["."]),
    ("min_p", 0),
    ("tools", []),
    ("suffix", ""),
    ("min_p", 0.1),
    ("tools", [{"type": "function"}]),
    ("logit_bias", {"50": -100}),
    ("top_p", 0),
    ("flavour", "mint"),
)


def record_fields(prompt: str) -> Fields:
    door.check_prompt(prompt, 20)
    base = {"prompt": prompt, "seed": 7, "max_tokens": 10}
    tried = []
    with door.open_door() as server:
        text = server.write(base)["choices"][0]["text"]
        for field, value in FIELDS:
            status, answer, _ = server.ask("POST", door.PATH, base | {field: value})
            if status == 200:
                kind = "works" if field in CompletionRequest.model_fields else "unknown"
                kind = "nothing" if field in UNSUPPORTED else kind
                tried.append(Tried(field, value, kind, answer["choices"][0]["text"]))
            else:
                tried.append(Tried(field, value, "refused", answer["error"]["message"]))
    return Fields(base, text, tried)


def draw_fields(record: Fields) -> Drawing:
    def line(tried: Tried) -> str:
        sent = f"<code>{escape(json_of({tried.field: tried.value})[1:-1])}</code>"
        if tried.kind == "refused":
            words = f'<span class="tok out">400</span> {escape(tried.words)}'
        elif tried.words == record.text:
            words = "<i>the same text</i>"
        else:
            same = 0
            while record.text[: same + 1] == tried.words[: same + 1]:
                same += 1
            rest = token(tried.words[same:], "new") if tried.words[same:] else ""
            words = f"{escape(tried.words[:same])}{rest}"
            if record.text.startswith(tried.words):
                words += token(record.text[same:], "gone")
        return f"<li>{sent}<p>{words}</p></li>"

    titles = {
        "works": "It works",
        "refused": "Refused by name, with the reason",
        "nothing": "Not supported, but the value asks for nothing",
        "unknown": "Nobody has heard of it: it is ignored",
    }
    notes = {
        "works": "Green: where it is another text; struck through: what a stop string cuts off.",
        "unknown": "A client may be newer than this server. Until lessons 60 to 62 n, stream, "
        "echo, best_of and logprobs are ignored, too.",
    }
    parts = []
    for kind, title in titles.items():
        lines = "".join(line(tried) for tried in record.tried if tried.kind == kind)
        parts.append(panel(title, f'<ul class="fields">{lines}</ul>', notes.get(kind, "")))
    body = (
        f'<p class="draws"><code>{escape(json_of(record.base))}</code> writes '
        f"{token(record.text)}, and with one more field:</p>{panels(*parts)}"
    )
    caption = (
        "What a field asks for is done, or the request is refused by the field&rsquo;s name. Only "
        "fields that nobody has heard of are ignored."
    )
    text = f"Alone the text is {record.text!r}; " + "; ".join(
        f"with {json_of({tried.field: tried.value})} ({tried.kind}) it says {tried.words!r}"
        for tried in record.tried
    )
    return Drawing(body, caption, text)


class Chunk(NamedTuple):
    """What the socket gave, and the engine's update behind it."""

    size: int  # bytes
    event: Any  # JSON, or the word [DONE]
    tokens: list[str]  # new ones; none for [DONE]


class Stream(NamedTuple):
    stop: list[str]
    head: list[str]  # lines of HTTP
    chunks: list[Chunk]


def record_stream(prompt: str, count: int = 12) -> Stream:
    """Stop strings made of the text itself: one begins as it does and is not there, one is."""
    door.check_prompt(prompt, 20)
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    chunks = []
    turns = threading.Semaphore(1)
    with door.open_door() as server:
        server.write(body)
        texts = names_of(whole(server.updates).tokens)
        body["stop"] = [f"{texts[4]} boy", texts[7] + texts[8]]
        server.updates.clear()
        step = server.thread.engine.step

        def one_step():
            turns.acquire(timeout=door.PATIENCE)
            return step()

        server.thread.engine.step = one_step  # the next one when the client has read this one
        data = json.dumps(body | {"stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), door.PATIENCE) as client:
            client.sendall(head.encode() + data)
            answer = client.makefile("rb")
            lines = [answer.readline().decode().strip()]
            while lines[-1]:
                lines.append(answer.readline().decode().strip())
            while size := int(answer.readline(), 16):
                event = answer.read(size).decode()
                answer.readline()
                words = event.removeprefix("data: ").removesuffix("\n\n")
                last = words == "[DONE]"
                found = words if last else same_each_time(json.loads(words))
                tokens = [] if last else names_of(server.updates[len(chunks)][0].tokens)
                chunks.append(Chunk(size, found, tokens))
                turns.release()
    known = ("http", "content-type", "transfer-encoding")
    return Stream(body["stop"], [line for line in lines if line.lower().startswith(known)], chunks)


def draw_stream(record: Stream) -> Drawing:
    rows = ""
    text = ""
    held = 0
    said = []
    for size, event, tokens in record.chunks:
        if event == "[DONE]":
            wire = "data: [DONE]"
            words = ""
        else:
            choice = event["choices"][0]
            words = choice["text"]
            own = json_of({"text": words}, narrow=True)[1:-1]
            why = json_of({"finish_reason": choice["finish_reason"]}, narrow=True)[1:-1]
            why = f"{escape(why)} &hellip;" if choice["finish_reason"] else ""
            strong = "out" if not words else ""
            wire = f"data: {{&hellip; {token(own, strong)} &hellip; {why}}}"
        text += words
        kind = "held" if tokens and not words else ""
        held += bool(kind)
        chips = "".join(token(name, "out" if kind else "new") for name in tokens)
        said.append(f"{size} bytes for {tokens}: {words!r}")
        rows += (
            f"<tr><td>{chips}</td><td><code>{wire}</code><span>{size} bytes</span></td>"
            f"<td>{escape(text)}</td></tr>"
        )
    stops = " ".join(token(stop, "own") for stop in record.stop)
    head = "<th>new in the engine</th><th>one event, one chunk</th><th>the reader has</th>"
    body = (
        f'<p class="draws">Stop strings: {stops}</p>'
        f'<code class="text-box">{"<br>".join(map(escape, record.head))}</code>'
        f'<table class="wire"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        '<p class="note">Red: the token is there, and its event has no text. It may begin a stop '
        "string, and comes with a later token; or it is the stop string, and never comes. A part "
        "of a letter of several bytes waits in the same way.</p>"
    )
    events = len(record.chunks) - 1
    caption = (
        "Each new piece of text is sent as an event: here a token; with drafts, or to a slow "
        f"reader, it may be several. {held} of these {events} events have no text."
    )
    return Drawing(body, caption, f"Stop strings {record.stop}. Chunks: " + "; ".join(said) + ".")


class Choices(NamedTuple):
    pages: list[list[str]]  # the tokens of the prompt, page after page
    size: int  # of a page
    seeds: list[int]
    tables: list[list[int]]  # pages of each text when it began
    found: list[int]  # positions that each found instead of computing them
    computed: int  # positions, by all
    texts: list[str]
    usage: dict


def record_choices(prompt: str, count: int = 4) -> Choices:
    """Texts of one prompt; a step has room for the prompt once, so the first one is ahead."""
    ids = door.check_prompt(prompt, 48)
    size = 8
    tables = {}
    found = {}
    body = {"prompt": prompt, "n": count, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    with door.open_door(page_size=size, budget=len(ids)) as server:
        engine = server.thread.engine
        compute = engine.compute

        def noted(works):
            for work in works:
                index = server.thread.texts[work.request].index
                found.setdefault(index, work.request.computed)
                tables.setdefault(index, list(work.request.pages))
            return compute(works)

        engine.compute = noted
        answer = server.write(body)
    ((_, params),) = server.asked
    names = names_of(ids)
    return Choices(
        [names[start : start + size] for start in range(0, len(names), size)],
        size,
        [each.seed for each in params],
        [tables[index] for index in range(count)],
        [found[index] for index in range(count)],
        engine.positions,
        [choice["text"] for choice in answer["choices"]],
        answer["usage"],
    )


def draw_choices(record: Choices) -> Drawing:
    first = record.tables[0]
    shared = set(first).intersection(*record.tables)
    boxes = ""
    for page, tokens in zip(first, record.pages):
        kind = "shared" if page in shared else ""
        chips = "".join(map(token, tokens))
        boxes += f'<li class="{kind}"><b>page {page}</b> <span>{chips}</span></li>'
    rows = ""
    for index, pages in enumerate(record.tables):
        cells = "".join(
            f'<li class="{"shared" if page in shared else ""}">{page}</li>' for page in pages
        )
        rows += (
            f'<li><p><b>choice {index}</b> seed {record.seeds[index]}</p><ol class="slots">{cells}'
            f"</ol><p>{escape(record.texts[index])}</p></li>"
        )
    count = len(record.texts)
    length = record.usage["prompt_tokens"]
    alone = count * (length - 1) + record.usage["completion_tokens"]
    body = panels(
        panel(
            f"The prompt: {length} tokens in pages of {record.size}",
            f'<ol class="prompt-pages">{boxes}</ol>',
            "Blue: pages that all texts have.",
        ),
        panel(
            f"n: {count}, and the pages of each when it began",
            f'<ol class="branches">{rows}</ol>',
            f"A step has room for {length} tokens here, so the first text is ahead, and the others "
            f"find its full pages: {record.computed} positions are computed. If each text computed "
            f"the prompt, it would be {alone}.",
        ),
    )
    caption = (
        f"One request, {count} texts: text i draws with seed + i, so each can be repeated alone. "
        f"Those that begin later find {len(shared)} of the prompt&rsquo;s {len(first)} pages."
    )
    text = (
        f"A prompt of {length} tokens in pages {first}; "
        + "; ".join(
            f"choice {index} with seed {seed} has pages {pages}, found {found} positions, and is "
            f"{words!r}"
            for index, (seed, pages, found, words) in enumerate(
                zip(record.seeds, record.tables, record.found, record.texts)
            )
        )
        + "."
    )
    return Drawing(body, caption, text)


class Columns(NamedTuple):
    text: str
    table: dict  # as it is in the answer


def record_columns(prompt: str) -> Columns:
    door.check_prompt(prompt, 40)
    body = {"prompt": prompt, "max_tokens": 8, "seed": 9, "logprobs": 3}
    with door.open_door() as server:
        choice = server.write(body)["choices"][0]
    return Columns(choice["text"], choice["logprobs"])


def draw_columns(record: Columns) -> Drawing:
    table = record.table
    chips = ""
    rows = ""
    outside = 0
    for name, own, tops, offset in zip(*table.values()):
        ranks = sorted(tops, key=tops.get, reverse=True)
        outside += len(tops) > 3
        chips += f"<li>{token(name, 'own')}<span>{offset}</span></li>"
        others = ""
        for other in ranks:
            kind = "own" if other == name else ""
            others += f"<li>{token(other, kind)}<span>{signed(tops[other])}</span></li>"
        rows += (
            f"<tr><td>{token(name, 'own')}</td><td>{signed(own)}"
            f"<span>{percent(math.exp(own))}</span></td>"
            f'<td><ul class="best">{others}</ul></td><td>{offset}</td></tr>'
        )
    heads = "".join(f"<th>{name.replace('_', '_<wbr>')}</th>" for name in table)
    count = len(table["tokens"])
    body = (
        f'<p class="title">The text, and after how many characters each token begins</p>'
        f'<ol class="chips offsets">{chips}</ol>'
        f'<table class="columns"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        '<p class="note">Framed: the token of the answer. A log-probability of &minus;1 is a '
        "probability of e to the power &minus;1, 37&nbsp;%.</p>"
    )
    caption = (
        "Row i of each column is token i of the answer. top_logprobs has the three likeliest "
        "tokens, and the drawn one even where it is not among them"
        f"{f', as {outside} of {count} times here' if outside else ''}."
    )
    text = f"The text {record.text!r}: " + "; ".join(
        f"{name!r} at {offset}, log-probability {signed(own)}, best {list(tops)}"
        for name, own, tops, offset in zip(*table.values())
    )
    return Drawing(body, caption, text)


class Turn(NamedTuple):
    """A question with all that was said before it."""

    messages: list[dict[str, str]]
    rendered: str  # by the template
    tokens: list[tuple[str, bool]]  # text of each, and whether it is a control token
    found: int  # positions that the engine had from before
    computed: int  # of the prompt
    reply: str
    written: int  # tokens


class Conversation(NamedTuple):
    turns: list[Turn]
    page_size: int


def record_turns(prompt: str) -> Conversation:
    door.check_prompt(prompt, 16)
    messages = []
    turns = []
    control = door.recordings.encoding().special_tokens_set
    template = Chat(STORIES.with_name(door.NAME))
    with door.open_door() as server:
        for said in (prompt, "dog, park"):
            messages.append({"role": "user", "content": said})
            body = {"messages": messages, "temperature": 0, "max_tokens": 24}
            scheduler = server.thread.engine.scheduler
            before = scheduler.shared
            answer = server.write(body, "/v1/chat/completions")
            found = scheduler.shared - before
            ids = server.asked[-1][0][0]
            tokens = [(name, name in control) for name in names_of(ids)]
            rendered = template.render(messages)
            reply = answer["choices"][0]["message"]
            written = answer["usage"]["completion_tokens"]
            turns.append(
                Turn(
                    list(messages),
                    rendered,
                    tokens,
                    found,
                    len(ids) - found,
                    reply["content"],
                    written,
                )
            )
            messages.append(reply)
    return Conversation(turns, scheduler.pool.page_size)


def draw_turns(record: Conversation) -> Drawing:
    parts = []
    said = []
    for number, turn in enumerate(record.turns, 1):
        bubbles = "".join(
            f'<li class="{message["role"]}"><b>{message["role"]}</b> {escape(message["content"])}'
            "</li>"
            for message in turn.messages
        )
        rendered = escape(turn.rendered).replace("\n", '<b class="sign">\\n</b>')
        chips = ""
        for place, (name, special) in enumerate(turn.tokens):
            kind = "kept" if place < turn.found else "new"
            chips += token(name, f"{kind} control" if special else kind)
        counts = f"{turn.found} found, {turn.computed} computed"
        parts.append(
            panel(
                f"Turn {number}: messages",
                f'<ul class="bubbles">{bubbles}</ul>'
                f'<p class="title">The template writes</p><code class="text-box">{rendered}</code>'
                f'<p class="title">{len(turn.tokens)} ids: {counts}</p><p class="flow">{chips}</p>'
                f'<p class="title">The reply</p><ul class="bubbles"><li class="assistant">'
                f"<b>assistant</b> {escape(turn.reply)}</li></ul>",
            )
        )
        said.append(
            f"turn {number} has messages: {len(turn.messages)}, {len(turn.tokens)} ids, {counts}, "
            f"and the reply {turn.reply!r}"
        )
    legend = (
        '<ul class="key"><li><code class="tok kept">found, in full pages of '
        f"{record.page_size}</code></li>"
        '<li><code class="tok new">computed</code></li>'
        '<li><code class="tok new control">control token</code></li></ul>'
    )
    last = record.turns[-1]
    caption = (
        "The server keeps no conversation: each request has all messages, and a template makes one "
        f"text of them. Turn {len(record.turns)} finds {last.found} of {len(last.tokens)} ids in "
        "pages."
    )
    return Drawing(panels(*parts) + legend, caption, "A conversation: " + "; ".join(said) + ".")


PICTURES = {  # slug of a lesson -> its picture
    "completions": Picture("Once upon a time", record_completion, draw_completion),
    "request-fields": Picture("Tom saw", record_fields, draw_fields),
    "streaming": Picture("Once upon a time", record_stream, draw_stream),
    "choices": Picture(STORY, record_choices, draw_choices),
    "token-tables": Picture("Once upon a time", record_columns, draw_columns),
    "chat-completions": Picture("rocket, moon", record_turns, draw_turns),
}
