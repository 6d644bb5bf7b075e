"""The page is a file and a script, and asks its server only."""

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

from conftest import ROOT

BASE = "http://here/"


class Reader(HTMLParser):
    """Notes the addresses that a page names, its ids and the texts of its controls."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded = []
        self.links = []
        self.ids = []
        self.language = None
        self.feed(text)

    def handle_starttag(self, tag, pairs):
        found = dict(pairs)
        if tag == "html":
            self.language = found.get("lang")
        if "id" in found:
            self.ids.append(found["id"])
        if "src" in found:
            self.loaded.append(found["src"])
        if "href" in found:
            (self.links if tag == "a" else self.loaded).append(found["href"])


def fetch(door, path: str) -> tuple[str, str]:
    """A file of the page, and its type."""
    with door.send("GET", path) as answer:
        assert answer.status == 200
        return answer.read().decode(), answer.headers["Content-Type"]


def test_the_page_and_its_script_are_served(door):
    for path, name, kind in (
        ("/", "page.html", "text/html"),
        ("/player.js", "player.js", "text/javascript"),
    ):
        text, given = fetch(door, path)
        assert text == (ROOT / "server" / name).read_text("utf-8")
        assert given.startswith(kind)


def test_nothing_is_asked_from_elsewhere(door):
    page, _ = fetch(door, "/")
    script, _ = fetch(door, "/player.js")
    for text in (page, script):
        assert re.findall(r"https?:|//[\w.-]+\.\w|@import|url\(", text) == []
    reader = Reader(page)
    assert sorted(reader.loaded) == ["data:,", "player.js"]
    assert all(urljoin(BASE, link).startswith(BASE) for link in reader.links)
    for link in reader.links:
        fetch(door, "/" + link)  # none is dead
    assert reader.language == "en" and len(set(reader.ids)) == len(reader.ids)


def test_what_the_script_names_is_there(door):
    page, _ = fetch(door, "/")
    asked = set(re.findall(r'get\("([a-z]+)"\)', page))
    assert {"texts", "player"} <= asked <= set(Reader(page).ids)
    paths = set(re.findall(r'"(v1/[a-z/]+|live|metrics)"', page))
    assert paths == {"v1/completions", "v1/chat/completions", "live", "metrics"}


def test_the_sliders_ask_for_what_the_server_knows(door):
    """Each at its first value, and all but the length at their ends."""
    page, _ = fetch(door, "/")
    sliders = re.findall(r'^  \["(\w+)", "[^"]*", ([\d., -]+)\],$', page, re.MULTILINE)
    names = {name for name, _ in sliders}
    assert names >= {"temperature", "top_p", "top_k", "max_tokens", "repetition_penalty"}
    body = {"prompt": "Once", "logprobs": 5, "seed": None, "max_tokens": 2}
    first = {name: float(numbers.split(",")[3]) for name, numbers in sliders}
    assert door.post("/v1/completions", body | whole(first) | {"max_tokens": 2})[0] == 200
    for name, numbers in sliders:
        least, most, *_ = (float(number) for number in numbers.split(","))
        if name != "max_tokens":
            for value in (least, most):
                assert door.post("/v1/completions", body | whole({name: value}))[0] == 200
        status, answer = door.post("/v1/completions", body | {name: "much"})
        assert status == 400 and name in answer["error"]["message"]


def whole(values: dict[str, float]) -> dict:
    """As JavaScript writes numbers: 1 and not 1.0."""
    return {name: int(value) if value == int(value) else value for name, value in values.items()}


def test_the_page_reads_what_the_live_view_sends():
    """The names of a frame, of its rows and of what comes first are those that the player uses."""
    script = (ROOT / "server" / "player.js").read_text("utf-8")
    made = (ROOT / "server" / "live.py").read_text("utf-8")
    used = set(re.findall(r"(?:frame|last|before|column)\.(\w+)", script))
    used |= set(re.findall(r"row\.(\w+)", script)) | set(re.findall(r"setup\.(\w+)", script))
    own = {"requests", "owners", "state", "recorded", "shows", "texts"}
    sent = set(re.findall(r'"(\w+)"', made))
    assert used - own - sent == set()
