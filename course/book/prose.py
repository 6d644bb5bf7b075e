"""Conversion of lesson messages and worked answers to HTML."""

import html
import itertools
import re
from collections.abc import Iterator

import markdown_it

import lessons as course
from book.diffs import colour

ARXIV = "https://arxiv.org/abs/"
PAPERS = {  # name in lessons and docstrings -> address
    "Agrawal et al. 2023": ARXIV + "2308.16369",
    "Ainslie et al. 2023": ARXIV + "2305.13245",
    "Braverman et al. 2019": ARXIV + "1906.05664",
    "Chen et al. 2023": ARXIV + "2302.01318",
    "Daliri et al. 2024": ARXIV + "2408.07978",
    "Dettmers et al. 2022": ARXIV + "2208.07339",
    "Eldan & Li 2023": ARXIV + "2305.07759",
    "Fan et al. 2018": ARXIV + "1805.04833",
    "Holtzman et al. 2020": ARXIV + "1904.09751",
    "Keskar et al. 2019": ARXIV + "1909.05858",
    "Kwon et al. 2023": ARXIV + "2309.06180",
    "Leviathan et al. 2022": ARXIV + "2211.17192",
    "Radford et al. 2019": "https://cdn.openai.com/better-language-models/"
    "language_models_are_unsupervised_multitask_learners.pdf",
    "Salmon et al. 2011": "https://doi.org/10.1145/2063384.2063405",
    "Saxena 2023": "https://github.com/apoorvumang/prompt-lookup-decoding",
    "Shazeer 2020": ARXIV + "2002.05202",
    "Su et al. 2021": ARXIV + "2104.09864",
    "Touvron et al. 2023": ARXIV + "2302.13971",
    "Llama 2 (Touvron et al. 2023)": ARXIV + "2307.09288",
    "Xiao et al. 2022": ARXIV + "2211.10438",
    "Yu et al. 2022": "https://www.usenix.org/conference/osdi22/presentation/yu",
    "Zhang & Sennrich 2019": ARXIV + "1910.07467",
    "Zheng et al. 2023": ARXIV + "2312.07104",
}
ARXIV_ID = r"\b\d\d(?:0[1-9]|1[0-2])\.\d{5}\b"  # year, month, sequence number
TRACKERS = {"transformers": "huggingface/transformers", "vllm": "vllm-project/vllm"}
# Messages as HTML.

PAPER_PATTERN = "|".join(re.escape(name).replace(r"\ ", r"\s") for name in PAPERS)
LINKS = re.compile(
    rf"""`(?P<code>[^`]+)`
    | (?P<arxiv>{ARXIV_ID})
    | (?P<issue>\b(?:{"|".join(TRACKERS)})\#\d+)
    | (?P<paper>{PAPER_PATTERN})""",
    re.VERBOSE,
)


def inline(text: str) -> str:
    """Convert a line of prose: code in backticks, and papers and issues as links."""
    parts = []
    end = 0
    for found in LINKS.finditer(text):
        parts += [html.escape(text[end : found.start()], quote=False), link_html(found)]
        end = found.end()
    return "".join(parts) + html.escape(text[end:], quote=False)


def link_html(found: re.Match) -> str:
    kind = found.lastgroup
    words = found[kind]
    shown = html.escape(words, quote=False)
    if kind == "arxiv":
        return f'<a href="{ARXIV}{shown}">arXiv:{shown}</a>'
    if kind == "paper":
        return f'<a href="{html.escape(PAPERS[join_lines(words)])}">{shown}</a>'
    if kind == "issue":
        tracker, _, number = words.partition("#")
        return f'<a href="https://github.com/{TRACKERS[tracker]}/issues/{number}">{shown}</a>'
    return f"<code>{shown}</code>"


def to_html(text: str) -> str:
    """Convert paragraphs, lists and indented formulas."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        for kind, pairs in itertools.groupby(
            zip(line_kinds(lines), lines), key=lambda pair: pair[0]
        ):
            run = "\n".join(line for _, line in pairs)
            if kind == "formula":
                shown = re.sub(r"^    ", "", run, flags=re.MULTILINE)
                parts.append(f'<pre class="formula">{html.escape(shown, quote=False)}</pre>')
            elif kind == "list":
                items = re.split(r"^- ", run, flags=re.MULTILINE)[1:]
                texts = [re.sub(r"^  ", "", item, flags=re.MULTILINE) for item in items]
                shown = "".join(f"<li>{to_html(item)}</li>" for item in texts)
                parts.append(f"<ul>{shown}</ul>")
            elif run.strip():
                parts.append(f"<p>{inline(join_lines(run))}</p>")
    return "".join(parts)


def line_kinds(lines: list[str]) -> Iterator[str]:
    """Yield "paragraph", "formula" or "list" for each line of a block."""
    in_list = False
    for line in lines:
        in_list |= line.startswith("- ")
        yield "list" if in_list else "formula" if line.startswith("    ") else "paragraph"


def join_lines(text: str) -> str:
    """Join lines into one; a compound split after its hyphen gets no space."""
    return " ".join(re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", text).split())


def capitalize(text: str) -> str:
    """Capitalize the first letter of a section, unless the section begins with code."""
    text = text.strip()
    return text if re.match(r"\w*[_.(`=A-Z]", text) else text[:1].upper() + text[1:]


def as_sentence(text: str) -> str:
    """Turn the text after a section's name into a sentence if it is entirely in parentheses."""
    whole = re.fullmatch(r"\((.*)\)", join_lines(text))
    return capitalize(f"{whole[1].rstrip('.')}." if whole else text)


def commands(message: str) -> str:
    """Convert the `Try:` section: each command with a copy button, then its output."""
    shown = {"prose": lambda text: to_html(as_sentence(text)), "command": command, "output": output}
    return "".join(shown[kind](text) for kind, text in course.read_try(message))


def command(text: str) -> str:
    """Convert a command to copy, and highlight the Python of a here-document."""
    script = re.fullmatch(r"(python -[^\n]*<<'(\w+)'[^\n]*\n)(.*\n)(\2)", text, re.DOTALL)
    before = html.escape(script[1] if script else text, quote=False)
    shown = re.sub(r"(?<![\w-])--\w[\w-]*", r"<span>\g<0></span>", before)
    if script:
        shown += "".join(line + "\n" for line in colour(script[3], "x.py")) + script[4]
    lines = " lines" if "\n" in text else ""
    return f'<pre class="command{lines}"><code data-copy>{shown}</code></pre>'


def output(text: str) -> str:
    """Convert the output of a command.

    Tables keep their columns; other lines, which may be stories, are wrapped.
    """
    table = " lines" if re.search(r"(?:\S|^) {2,}\S", text, re.MULTILINE) else ""
    return f'<pre class="output{table}">{html.escape(text, quote=False)}</pre>'


def listing(text: str, suffix: str) -> str:
    """Convert a code block. suffix: of files in its language."""
    code = "\n".join(colour(text, f"x.{suffix}"))
    return f'<pre class="listing"><code>{code}</code></pre>'


def traps(text: str) -> str:
    """Convert the `Traps:` section to one list, although blank lines may separate its items."""
    return to_html(re.sub(r"\n\s*\n(?=- )", "\n", text))


def question(text: str) -> str:
    """Convert the `Predict:` section, a question that the reader answers before Try."""
    shown = to_html(text.strip())
    mark = "<p><b>Before you run it:</b> "
    return f'<div class="predict">{shown.replace("<p>", mark, 1)}</div>' if shown else ""


def specification(text: str) -> str:
    """Convert a part of the `Implement:` section to a list.

    An item is indented once, its further lines twice. Under a line with only a path, each further
    line is an item of its own, unless it is indented three times.
    """
    before, *items = re.split(r"^ {4}(?=\S)", text, flags=re.MULTILINE)
    note = inline(join_lines(as_sentence(before)))
    shown = ""
    for item in items:
        path, *members = re.split(r"^ {8}(?=\S)", item, flags=re.MULTILINE)
        if re.fullmatch(r"[\w./]+:\s*", path):
            inner = "".join(f"<li>{inline(join_lines(member))}</li>" for member in members)
            shown += f"<li>{inline(join_lines(path))}<ul>{inner}</ul></li>"
        else:
            shown += f"<li>{inline(join_lines(item))}</li>"
    return (f"<p>{note}</p>" if note else "") + (f"<ul>{shown}</ul>" if shown else "")


def steps(text: str) -> str:
    """Convert the `Steps:` section, the order of writing the lesson, to a numbered list."""
    before, *items = re.split(r"^ {4}\d+\. ", text, flags=re.MULTILINE)
    note = inline(join_lines(as_sentence(before)))
    shown = "".join(f"<li>{inline(join_lines(item))}</li>" for item in items)
    return (f"<p>{note}</p>" if note else "") + (f"<ol>{shown}</ol>" if shown else "")


def answer(text: str) -> str:
    """Convert a worked answer from Markdown.

    The title becomes a bold sentence, and the quoted exercise is dropped.
    """
    parser = markdown_it.MarkdownIt("commonmark", {"html": False, "highlight": code_block})
    parser.validateLink = lambda address: address.startswith("https://")

    def title_sentence(found: re.Match) -> str:
        return f"**{found[1].upper()}{found[2]}.**\n"

    text = re.sub(r"^# [^:\n]*: (.)(.*)\n+(?:>.*\n)+", title_sentence, text)

    def demote_heading(tag: re.Match) -> str:
        return f"<{tag[1]}h{int(tag[2]) + 1}>"

    return re.sub(r"<(/?)h([1-5])>", demote_heading, parser.render(text))


def code_block(text: str, language: str, _) -> str:
    return (command if language == "sh" else output)(text.removesuffix("\n"))


def find_papers(text: str) -> dict[str, str]:
    """Return the papers that a text cites by name or arXiv id, name -> address."""
    words = join_lines(text)
    names = {address: name for name, address in PAPERS.items()}
    found = {name: address for name, address in PAPERS.items() if name in words}
    for number in re.findall(ARXIV_ID, words):
        address = ARXIV + number
        found[names.get(address, f"arXiv:{number}")] = address
    return dict(sorted(found.items()))
