"""The entries of glossary.md, and links to them from the lessons."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def after_words(words: str, form: str) -> str:
    """Return a pattern for `form` after one of `words`, which are separated by "|"."""
    return "|".join(f"(?<={word} )(?:{form})" for word in words.split("|"))


# Patterns of linked words that differ from the name and its plural; "" for no links. An ambiguous
# word is linked only where its neighbours decide the meaning.
LINK_PATTERNS = {
    "context shift": "context shifts?|hops?",
    "jump-forward": "jump-forward|forced tokens?",
    "token budget": "(?:token )?budgets?",
    "acceptance": r"acceptance|accepted(?= drafts| ones)|accepts(?= a draft)",
    "block": "",
    "KV cache": r"(?<!L1 )(?<!processor's )(?<!registers and the )(?<!stays in a )caches?"
    r"(?! director| of lesson)",
    "chat template": "(?:chat )?templates?",
    "closed loop, open loop": "(?:closed|open)[ -]loops?",
    "decode, prefill": "prefill(?:ed|s)?|(?:decode|decoding)(?= steps?)",
    "draw": "draws?|drawn",
    "constraint": after_words("with a|to a|fit the|its", "form")
    + "|forms?(?= allows| says| forces)",
    "gather, reduce": "gather(?:ed|s)?|all-reduces?",
    "greedy": "greedy|greedily",
    "head": "heads|" + after_words("one|each|tied|tie their", "head") + "|head(?= of [0-9])",
    "key, query, value": "keys and values|queries and keys|quer(?:y|ies)",
    "log-probability": "log-probabilit(?:y|ies)|logprobs?",
    "mask": "mask(?:s|ed)?",
    "noise": "(?<!is )noise",
    "padding": "padding|padded",
    "page, page pool, page table": "(?<!web )pages?|pools?|page tables?",
    "pass": after_words("the|one|a|each|first|whole", "pass") + "|(?<=forward )pass(?:es)?",
    "penalty": "penalt(?:y|ies)",
    "preemption": "preempt(?:ion|ions|ed|s)?",
    "exponential race": after_words("a|the", "races?"),
    "request": after_words("running|waiting|preempted|ended|Many", "requests?")
    + "|requests?(?= joins| leaves| runs| holds| is preempted)",
    "residual": "residuals?(?! stream)",
    "RoPE": "RoPE|rotary positions?|rotations?",
    "GQA": "GQA|shared keys",
    "TTFT": "TTFT|time to (?:the )?first token",
    "sequence": after_words("ragged|unequal|free|finished|shorter", "rows?")
    + "|row(?= is one text)|rows?(?= of (?:a|the) batch)",
    "sampling": "sampl(?:ing|ed)",
    "span": "spans?(?! several)",
    "step": after_words("decode|decoding|each|every|all|same|later|next", "steps?")
    + "|(?<=is a )step(?=:)|(?<=a )step(?= of the engine| takes| has| brings)",
    "trie": "trie",
    "weights": "(?<!sum of )(?<!sum of the )(?<!their )weights",
    "context window": "(?<!sliding )windows?",
    "scheduled request": after_words("a|each|one", "work") + "|works(?= of)",
}
# Slugs of lessons in which a word has another meaning.
EXCLUDED_LESSONS = {
    "KV cache": "response-format",
    "chat template": "known-fields",
    # An HTTP chunk, or a chunk of text in quality.py.
    "chunk": "request-fields streaming request-limits load-generator replicas quality",
    "draw": "page sanity-checks any-bpe gguf-tokenizer sentencepiece small-cache shard-loading",
    "gather, reduce": "show-allowed",
    "id": "server page tool-calls",
    "key, query, value": "keys-and-origins page",
    "page, page pool, page table": "early-ends completions keys-and-origins page host-names "
    "open-files idle-memory show-allowed chat-roles",
    "penalty": "length-penalty",
    "queue": "engine-thread early-ends load-generator open-files replicas",
    "rank": "any-bpe lora lora-in-a-batch",  # the rank of a merge or of a LoRA
    "RoPE": "rotated-int8 turns-in-registers small-cache small-cache-in-c",
    "context window": "server window-layers native-windows gemma native-gemma window-pages "
    "cache-groups gguf-gemma half-weights lora-in-c",  # a chat window or a layer's sliding window
}
# Elements that contain no prose.
UNLINKED_TAGS = ("a", "code", "pre", "h1", "h2", "h3", "h4", "summary", "q")


class GlossaryEntry(NamedTuple):
    name: str
    slug: str  # of the lesson that introduces it
    definition: str

    @property
    def id(self) -> str:
        """Return the anchor on the glossary page."""
        return self.name.split(",")[0].lower().replace(" ", "-")

    @property
    def pattern(self) -> str:
        parts = (rf"{re.escape(part)}(?:e?s)?" for part in self.name.split(", "))
        return LINK_PATTERNS.get(self.name, "|".join(parts))

    @property
    def excluded_lessons(self) -> list[str]:
        return EXCLUDED_LESSONS.get(self.name, "").split()


ENTRY_PATTERN = r"^- \*\*(.+?)\*\* \(([\w-]+)\): (.+\n(?:  .+\n)*)"
TEXT = Path(__file__).with_name("glossary.md").read_text("utf-8")
ENTRIES = [
    GlossaryEntry(name, slug, " ".join(definition.split()))
    for name, slug, definition in re.findall(ENTRY_PATTERN, TEXT, re.MULTILINE)
]


def number_of(id: str) -> int:
    return int(id.partition("-")[0])


def link_first_uses(id: str, ids: dict[str, str]) -> Callable[[str], str]:
    """Return a function that links the first use of each glossary word in a lesson, HTML -> HTML.

    The function remembers across calls which words it has linked. Words that a later lesson
    introduces are not linked. ids: slug -> id of all lessons.
    """
    names = {}  # group name in the pattern -> word
    for number, word in enumerate(sorted(ENTRIES, key=lambda word: -len(word.name))):
        is_introduced = word.slug in ids and number_of(ids[word.slug]) <= number_of(id)
        if word.pattern and is_introduced and id.partition("-")[2] not in word.excluded_lessons:
            names[f"w{number}"] = word
    if not names:
        return lambda text: text
    parts = "|".join(f"(?P<{name}>{word.pattern})" for name, word in names.items())
    # Skip paths, file names, calls and attributes.
    words = re.compile(rf"(?<![\w./-])(?:{parts})(?![\w/(=-]|\.\w)", re.IGNORECASE)
    seen = set()

    def link(found: re.Match) -> str:
        word = names[found.lastgroup]
        if word in seen:
            return found[0]
        seen.add(word)
        return f'<a class="word" href="glossary.html#{word.id}">{found[0]}</a>'

    def linked(text: str) -> str:
        shown = []
        inside = []  # stack of open elements whose words are not linked
        for piece in re.split(r"(<[^>]*>)", text):
            tag = re.match(r"<(/?)(\w+)", piece)
            if tag and tag[2] in UNLINKED_TAGS:
                inside = inside[:-1] if tag[1] else [*inside, tag[2]]
            shown.append(piece if tag or inside else words.sub(link, piece))
        return "".join(shown)

    return linked
