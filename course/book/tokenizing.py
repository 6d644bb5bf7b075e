"""Pictures of lessons 32 and 33: text in pieces, and ends of a text."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import regex
import torch

from book import recordings
from book.draw import Drawing, Picture, escape, panel, panels, rows_of, token
from command_line import STORIES
from errors import UserError
from infer import generate
from loading.load import load_model
from loading.tokenizer import PATTERNS, Encoding, load_encoding
from sampling import SamplingParams


def check_length(prompt: str, most: int, least: int = 1) -> None:
    """Raise UserError for a prompt of more or fewer characters than a picture can show."""
    if not least <= len(prompt) <= most:
        raise UserError(
            f"the prompt has {len(prompt)} characters; this picture shows {least} to {most}"
        )


def cells(parts: list[str], kinds: list[str]) -> str:
    """Parts of a text in boxes, each as wide as it has characters, so that rows can be compared."""
    boxes = "".join(
        f'<code class="cell {kind}" style="--size:{len(part)}">{escape(visible(part))}</code>'
        for part, kind in zip(parts, kinds)
    )
    return f'<span class="cells" style="--size:{sum(map(len, parts))}">{boxes}</span>'


def visible(text: str) -> str:
    """With a sign for each character that shows nothing."""
    return text.translate({ord(" "): "\u00b7", ord("\n"): "\u21b5", ord("\t"): "\u2192"})


def cut_rows(pieces: dict[str, list[str]]) -> str:
    """What patterns cut a text into, one below the other. pieces: those of each pattern's name."""
    rows = ""
    for name, parts in pieces.items():
        kinds = [f"tint{at % 2}" for at in range(len(parts))]
        rows += f'<p class="cut-by">{escape(name)}: {len(parts)} pieces</p>'
        rows += f'<div class="scroll">{cells(parts, kinds)}</div>'
    return rows


class Merges(NamedTuple):
    """A text on its way to ids."""

    pieces: dict[str, list[str]]  # name of a pattern: what it cuts the text into
    word: str  # one of Llama 3's, with most merges
    steps: list[tuple[list[str], int | None, int | None]]  # parts, which is new, and its rank
    tokens: list[tuple[str, int]]
    pairs: int  # that the file lists as merges
    size: int  # tokens that they make


def record_merges(prompt: str) -> Merges:
    """With the embedded model's vocabulary, written as Llama 3's tokenizer.json would have it."""
    check_length(prompt, 40)
    encoding, pairs = llama_form()
    cut = {name: regex.findall(PATTERNS[name], prompt) for name in ("GPT-2", "Llama 3")}
    histories = {piece: history(piece, encoding._mergeable_ranks) for piece in cut["Llama 3"]}
    word = max(histories, key=lambda piece: len(histories[piece]))
    ids = encoding.encode(prompt)
    tokens = [(encoding.decode([id]), id) for id in ids]
    size = len(encoding._mergeable_ranks)
    return Merges(cut, word, histories[word], tokens, pairs, size)


def llama_form() -> tuple[Encoding, int]:
    """The encoding that a file in Llama 3's form gives, and how many merges this lists."""
    file = json.loads((STORIES / "tokenizer.json").read_text("utf-8"))
    (end,) = (added["content"] for added in file["added_tokens"])
    vocabulary = file["model"]["vocab"]
    rank = {name: id for name, id in vocabulary.items() if name != end}
    file["model"]["merges"] = [
        (name[:i], name[i:])
        for name in sorted(rank, key=rank.get)
        for i in range(1, len(name))
        if name[:i] in rank and name[i:] in rank
    ]
    file["model"]["ignore_merges"] = True
    split = {"type": "Split", "pattern": {"Regex": PATTERNS["Llama 3"]}, "behavior": "Isolated"}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False}, bytes_only | {"use_regex": False}]
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    id = file["added_tokens"][0]["id"]
    before = [{"SpecialToken": {"id": end, "type_id": 0}}]
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": before + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {end: {"id": end, "ids": [id], "tokens": [end]}},
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(file), "utf-8")
        encoding = load_encoding(directory, recordings.load().config.vocab_size)
    return encoding, len(file["model"]["merges"])


def history(piece: str, ranks: dict[bytes, int]) -> list[tuple[list[str], int | None, int | None]]:
    """The parts of a piece after each merge: of all that make a token, the lowest rank first."""
    parts = [bytes([byte]) for byte in piece.encode()]
    found = [([shown(part) for part in parts], None, None)]
    while True:
        joined = [a + b for a, b in zip(parts, parts[1:])]
        possible = [(ranks[pair], at) for at, pair in enumerate(joined) if pair in ranks]
        if not possible:
            return found
        rank, at = min(possible)
        parts[at : at + 2] = [joined[at]]
        found.append(([shown(part) for part in parts], at, rank))


def shown(part: bytes) -> str:
    """With U+FFFD for a part of a character."""
    return part.decode("utf-8", "replace")


def draw_merges(record: Merges) -> Drawing:
    cuts = cut_rows(record.pieces)
    lines = []
    for parts, new, rank in record.steps:
        kinds = ["new" if at == new else "" for at in range(len(parts))]
        lines.append(("" if rank is None else f"rank {rank:,}", cells(parts, kinds), ""))
    (prefix, id), *rest = record.tokens
    chips = "".join(
        f'<li><code class="tok {kind}">{escape(visible(text))}</code><span>{number:,}</span></li>'
        for text, number, kind in [(prefix, id, "out"), *((*each, "own") for each in rest)]
    )
    last = record.steps[-1]
    word = record.word
    body = panels(
        f'<div class="panel whole"><p class="title">1. Cut by a pattern: no token crosses a cut</p>'
        f"{cuts}</div>",
        panel(
            f"2. Merged inside each piece, here {token(word)}",
            f'<div class="scroll">{rows_of(lines)}</div>',
            "Rank: a token's place in the vocabulary. In each line, of all neighbours that make a "
            "token, those whose token has the lowest rank are merged. The file lists "
            f"{record.pairs:,} such pairs for {record.size:,} tokens: some can be made of several "
            "pairs. A piece that is no token stays in several.",
        ),
        panel(
            "3. One token before it all",
            f'<ol class="chips">{chips}</ol>',
            "Red: the beginning of text, put before. The vocabulary is the embedded model's, "
            "written in Llama 3's form; Llama 3 itself has 128,000 tokens and calls this one "
            "<code>&lt;|begin_of_text|&gt;</code>.",
        ),
    )
    merges = f"{len(record.steps) - 1} merge{'s' * (len(record.steps) != 2)}"
    tokens = "".join(token(part) for part in last[0])
    caption = (
        "Text becomes ids in three moves: cut it, merge neighbours in each piece, put one token "
        f"before. {merges} make {tokens}."
    )
    text = (
        f"The text cut by two patterns: {record.pieces}. The merges of {word!r}: "
        + "; ".join(" ".join(map(repr, parts)) for parts, *_ in record.steps)
        + f". The ids: {[id for _, id in record.tokens]}."
    )
    return Drawing(body, caption, text)


class Ends(NamedTuple):
    """A reply by a checkpoint that has two ends of text."""

    told: str  # what the model goes on with
    files: dict[str, list[str]]  # file: the tokens that it says end a text
    tokens: list[str]  # that are written where config.json alone is read
    stops: int  # so many of them are written where both files are


ASKED = "<|endoftext|>Words: rain, boat\n\n"  # before the prompt


def record_ends(prompt: str, most: int = 26) -> Ends:
    """A copy of the embedded Llama, whose config.json names a token that ends no reply."""
    recordings.encode(prompt, 40)
    text_of = recordings.text_of
    told = ASKED + prompt
    ids = recordings.encode(told, 80)
    ends = {"config.json": [text_of(0)]}
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "two-ends"
        shutil.copytree(STORIES.with_name("stories-llama"), directory)
        config = json.loads((directory / "config.json").read_text("utf-8"))
        both = [0, config["eos_token_id"]]
        (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}), "utf-8")
        more = directory / "generation_config.json"
        runs = []
        for found in ([0], both):
            more.unlink(missing_ok=True)
            if found == both:
                more.write_text(json.dumps({"eos_token_id": both}), "utf-8")
            model = load_model(directory, torch.float32, "cpu")
            assert list(model.config.eos_token_ids) == found
            steps = generate(model, [ids], SamplingParams(most))
            runs.append([text_of(id) for (id,) in steps])
    ends["generation_config.json"] = [text_of(id) for id in both]
    return Ends(told, ends, runs[0], len(runs[1]))


def draw_ends(record: Ends) -> Drawing:
    reply = record.tokens[: record.stops]
    on = record.tokens[record.stops :]
    first, second = record.files
    told = escape(record.told.replace("\n", "\\n"))
    parts = []
    for file, written in ((f"{first} alone", record.tokens), (f"{first} and {second}", reply)):
        flow = "".join(
            token(text, "new" if at < len(reply) else "out") for at, text in enumerate(written)
        )
        ends = record.files[first if written is record.tokens else second]
        names = " and ".join(map(token, ends))
        count = f"{len(written)} tokens" + ", and no end" * (written[-1] not in ends)
        parts.append(
            panel(
                file,
                f'<p class="flow">{flow}</p>',
                f"The program stops at: {names}. {count}.",
            )
        )
    body = f'<code class="text-box">{told}</code><p class="cut-by">goes on:</p>{panels(*parts)}'
    body += (
        '<p class="note">This is one of several differences between Qwen2.5 and a Llama; others '
        "are biases of queries, keys and values, and digits one by one. The embedded Llama stands "
        f"in for Qwen2.5: for this picture its {first} names a wrong end, "
        f"{token(record.files[first][0])}; a reply ends with {token(record.files[second][-1])}, as "
        "Qwen2.5&rsquo;s do with <code>&lt;|im_end|&gt;</code>.</p>"
    )
    user = ", with the user&rsquo;s next message" * "".join(on).startswith("Words:")
    caption = "Which token ends a reply stands in a second file. " + (
        f"Where only {first} is read, the model writes on after its reply{user}."
        if on
        else f"This reply has not come to its end in {len(reply)} tokens."
    )
    text = (
        f"After {record.told!r}: where {first} alone is read {record.tokens}, {len(record.tokens)} "
        f"tokens; where both files are, the first {len(reply)} of them. The files name "
        f"{record.files}."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "llama-3-tokenizer": Picture("They'LL see 1234 sunflowers", record_merges, draw_merges),
    "qwen": Picture("The boat came home. The moral of the story is", record_ends, draw_ends),
}
