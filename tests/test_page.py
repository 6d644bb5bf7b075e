"""The page is a file and a script, and asks its server only."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from urllib.parse import urljoin

import anyio
from conftest import ROOT

BASE = "http://here/"


class Reader(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.found = {}  # (tag, attribute) -> all of its values
        self.feed(text)

    def handle_starttag(self, tag, pairs):
        for name, value in pairs:
            self.found.setdefault((tag, name), []).append(value)

    def all(self, *names: str) -> list[str]:
        """The values of attributes of any tag, without the links to other pages."""
        found = [value for key, value in self.found.items() if key[1] in names and key[0] != "a"]
        return sum(found, [])


def fetch(client, path: str) -> tuple[str, str]:
    with client.send("GET", path) as answer:
        assert answer.status == 200
        return answer.read().decode(), answer.headers["Content-Type"]


def test_the_page_and_its_script_are_served(client, monkeypatch):
    # While a page is sent to a client that does not read, no file is open.
    monkeypatch.setattr(anyio, "open_file", None)
    files = (("/", "page.html", "text/html"), ("/player.js", "player.js", "text/javascript"))
    for path, name, kind in files:
        text, given = fetch(client, path)
        assert text == (ROOT / "server" / name).read_text("utf-8")
        assert given.startswith(kind)
        # Nothing is asked from elsewhere.
        assert re.findall(r"https?:|//[\w.-]+\.\w|@import|url\(", text) == []


def test_what_the_page_loads_links_and_names_is_there(client):
    page, _ = fetch(client, "/")
    reader = Reader(page)
    assert sorted(reader.all("src", "href")) == ["data:,", "player.js"]
    for link in reader.found["a", "href"]:
        assert urljoin(BASE, link).startswith(BASE)
        fetch(client, "/" + link)  # none is dead
    ids = reader.all("id")
    assert len(set(ids)) == len(ids)
    assert {"texts", "player"} <= set(re.findall(r'get\("([a-z]+)"\)', page)) <= set(ids)
    paths = set(re.findall(r'"(v1/[a-z/]+|live|metrics)"', page))
    assert paths == {"v1/completions", "v1/chat/completions", "v1/models", "live", "metrics"}


def test_the_sliders_ask_for_what_the_server_knows(client):
    page, _ = fetch(client, "/")
    sliders = re.findall(r'^  \["(\w+)", "[^"]*", ([\d., -]+)\],$', page, re.MULTILINE)
    names = {name for name, _ in sliders}
    assert names >= {"temperature", "top_p", "top_k", "max_tokens", "repetition_penalty"}
    body = {"prompt": "Once", "logprobs": 5, "seed": None, "max_tokens": 2}
    first = {name: float(numbers.split(",")[3]) for name, numbers in sliders}
    assert client.post("/v1/completions", body | whole(first) | {"max_tokens": 2})[0] == 200
    for name, numbers in sliders:
        least, most, *_ = (float(number) for number in numbers.split(","))
        if name != "max_tokens":
            for value in (least, most):
                assert client.post("/v1/completions", body | whole({name: value}))[0] == 200
        status, answer = client.post("/v1/completions", body | {name: "much"})
        assert status == 400 and name in answer["error"]["message"]


def whole(values: dict[str, float]) -> dict:
    return {name: int(value) if value == int(value) else value for name, value in values.items()}


def test_the_page_may_run_and_ask_nothing_but_its_server(client):
    with client.send("GET", "/") as answer:
        page = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    rules = {name: values for name, *values in map(str.split, policy.split(";"))}
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    assert rules["default-src"] == ["'none'"] and rules["connect-src"] == ["'self'"]
    assert len(hashes) == 1
    assert rules["script-src"] == ["'self'", f"'sha256-{hashes[0].decode()}'"]
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    # Such a policy lets no attribute run, so there must be none.
    assert [name for _, name in Reader(page).found if name.startswith("on")] == []
