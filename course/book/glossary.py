"""The words of the course, as glossary.md has them, and links to them from the lessons."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# What is linked, where that is not a part of the name and its plural; "" for nothing.
FORMS = {
    "acceptance": r"accept(?:ance|ed|s)?",
    "block": "",
    "chat template": "template",
    "closed loop, open loop": "(?:closed|open)[ -]loops?",
    "decode, prefill": "prefill|decode|decoding step",
    "draw": "draws?|drawn",
    "gap": "",
    "greedy": "greedy|greedily",
    "key, query, value": "keys and values|quer(?:y|ies)|keys",
    "log-probability": "log-probabilit(?:y|ies)|logprobs?",
    "mask": "mask(?:s|ed)?",
    "padding": "padding|padded",
    "page, pool, table": "pages?|pools?|page tables?",
    "pass": "(?<=the )pass|(?<=one )pass|(?<=a )pass|(?<=each )pass|(?<=first )pass|(?<=whole )pass"
    "|(?<=forward )pass(?:es)?",
    "penalty": "penalt(?:y|ies)",
    "preemption": "preempt(?:ion|ions|ed|s)?",
    "rotary positions": "rotary positions?|rotations?",
    "sampling": "sampl(?:ing|ed)",
    "time to first token": "time to (?:the )?first token",
    "work": "(?<=a )work|(?<=each )work|(?<=one )work|works(?= of)",
}
# Slugs of the lessons in which a word means something else.
ELSEWHERE = {
    "acceptance": "request-fields",
    "chunk": "request-fields streaming",  # those of HTTP
    "draw": "page",
    "id": "server live",
    "key, query, value": "keys-and-origins page",
    "page, pool, table": "early-ends completions keys-and-origins page",
    "queue": "engine-thread early-ends closed-loop",
    "row": "benchmark-speculative benchmark-kv-cache int8-weights native-int8 native-linear "
    "native-step fast-draws packed-weights packed-int8 token-tables chat-completions",
    "step": "llama llama-3-tokenizer full-queue",
}
# A word in these elements is no prose.
CLOSED = ("a", "code", "pre", "h1", "h2", "h3", "h4", "summary", "q")


class Word(NamedTuple):
    name: str
    slug: str  # of the lesson that brings it
    meaning: str

    @property
    def id(self) -> str:
        """The anchor on the page of the glossary."""
        return self.name.split(",")[0].lower().replace(" ", "-")

    @property
    def pattern(self) -> str:
        parts = (rf"{re.escape(part)}(?:e?s)?" for part in self.name.split(", "))
        return FORMS.get(self.name, "|".join(parts))

    @property
    def elsewhere(self) -> list[str]:
        return ELSEWHERE.get(self.name, "").split()


ENTRY = r"^- \*\*(.+?)\*\* \(([\w-]+)\): (.+\n(?:  .+\n)*)"
TEXT = Path(__file__).with_name("glossary.md").read_text("utf-8")
WORDS = [
    Word(name, slug, " ".join(meaning.split()))
    for name, slug, meaning in re.findall(ENTRY, TEXT, re.MULTILINE)
]


def linker(id: str, ids: dict[str, str]) -> Callable[[str], str]:
    """A function that links words where they first fall on the page of a lesson, HTML -> HTML.

    It remembers which it has linked. Words that a later lesson brings are none yet. ids: of all
    lessons, by slug.
    """
    names = {}  # of a group of the pattern -> word
    for number, word in enumerate(WORDS):
        brought = word.slug in ids and ids[word.slug] <= id
        if word.pattern and brought and id.partition("-")[2] not in word.elsewhere:
            names[f"w{number}"] = word
    if not names:
        return lambda text: text
    parts = "|".join(f"(?P<{name}>{word.pattern})" for name, word in names.items())
    words = re.compile(rf"(?<![\w-])(?:{parts})(?![\w/-])", re.IGNORECASE)
    seen = set()

    def link(found: re.Match) -> str:
        word = names[found.lastgroup]
        if word in seen:
            return found[0]
        seen.add(word)
        return f'<a class="word" href="glossary.html#{word.id}">{found[0]}</a>'

    def linked(text: str) -> str:
        shown = []
        inside = []  # elements whose words stay as they are
        for piece in re.split(r"(<[^>]*>)", text):
            tag = re.match(r"<(/?)(\w+)", piece)
            if tag and tag[2] in CLOSED:
                inside = inside[:-1] if tag[1] else [*inside, tag[2]]
            shown.append(piece if tag or inside else words.sub(link, piece))
        return "".join(shown)

    return linked
