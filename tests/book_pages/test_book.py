"""The book, of a small course with all that is awkward.

Each line of a diff once, each command, valid and linked pages. The functions in ORACLES hold for
the pages of any course; the gate runs them on the real book too.
"""

import collections
import functools
import io
import json
import keyword
import os
import re
import shutil
import sys
import tokenize
from pathlib import Path

import html5lib
import pytest
import torch
from conftest import ROOT, save_speaking
from conftest import refused as refusal
from test_lessons import commit, git

import lessons as course

sys.path.insert(0, str(ROOT / "course"))
import make_book  # noqa: E402
import web_model  # noqa: E402

from book import diffs, glossary, summaries  # noqa: E402
from loading.load import load_model  # noqa: E402
from text.tokenizer import load_encoding  # noqa: E402

HOSTS = "arxiv.org cdn.openai.com doi.org www.usenix.org huggingface.co github.com"
HOSTS = {*HOSTS.split(), "pytorch.org"}


@functools.cache
def parse(page: str):
    """The tree of a page; strict, so that it fails for one that is not valid."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


def text_of(element) -> str:
    return "".join(element.itertext())


def token_texts(element, tag: str) -> list[str]:
    return [text_of(found) for found in element.iter(tag)]


def of_class(element, tag: str, name: str) -> list:
    return [found for found in element.iter(tag) if found.get("class") == name]


def lines_of_code(element) -> list:
    return [span for span in element.iter("span") if not span.get("class")]


def first(element, tag: str) -> str:
    found = element.find(tag)
    return "" if found is None else text_of(found)


def of_id(element, id: str):
    (found,) = [part for part in element.iter() if part.get("id") == id]
    return found


def section(page: str, heading: str):
    (found,) = [part for part in parse(page).iter("section") if first(part, "h2") == heading]
    return found


def files_of(pages, name) -> list:
    tree = parse(pages[name])
    inside = {
        id(element)
        for part in tree.iter("section")
        if first(part, "h2") == "Before it"
        for element in part.iter()
    }
    found = [part for part in of_class(tree, "section", "file") if id(part) not in inside]
    return [(text_of(part.find(".//h3/code")), part) for part in found]


def lesson_files(pages, lesson) -> list:
    starts = f"{lesson.id}.html", f"{lesson.id}.tests.html", f"{lesson.id}.code-"
    names = [name for name in pages if name.startswith(starts)]
    return [found for name in names for found in files_of(pages, name)]


def lines_of(element, tag: str) -> list[str]:
    return [
        text_of(line).removesuffix("\n")
        for run in element.iter(tag)
        for line in run.findall("span")
    ]


def bare(line: str) -> str:
    """An empty line is shown with a space, so that it has a height."""
    return "" if line == " " else line


def marked(lesson, sign) -> list[tuple[str, str]]:
    options = ("--format=", "--unified=3", "--no-renames", "--no-color", "--no-ext-diff", "--root")
    patch = course.git("-c", "core.quotePath=false", "show", *options, lesson.commit)
    found = []
    path = None
    for line in patch.split("\n"):
        if line.startswith("diff --git "):
            path = line.rpartition(" b/")[2]
            body = False
        elif line.startswith("@@ "):
            body = True
        elif body and line.startswith(sign):
            found.append((path, line[1:]))
    return found


def each_line_of_a_lesson_is_there_once(lessons, pages):
    for lesson in lessons:
        files = lesson_files(pages, lesson)
        for tag, sign in (("ins", "+"), ("del", "-")):
            shown = [(path, bare(line)) for path, part in files for line in lines_of(part, tag)]
            wanted = [(path, bare(line)) for path, line in marked(lesson, sign)]
            missing = collections.Counter(wanted) - collections.Counter(shown)
            assert sorted(shown) == sorted(wanted), (lesson.id, list(missing)[:3])


def code_is_shown_whole_and_in_order(lessons, pages):
    """What a lesson leaves and adds is the new file, folded lines too; marks count them rightly."""
    for lesson in lessons:
        for path, part in lesson_files(pages, lesson):
            if path.startswith("tests/") or not path.endswith((".py", ".c", ".h", ".js", ".html")):
                continue
            blob = course.run_git("show", f"{lesson.commit}:{path}").stdout
            removed = {id(line) for run in part.iter("del") for line in run.iter()}
            lines = [line for line in lines_of_code(part) if id(line) not in removed]
            shown = "\n".join(bare(text_of(line)) for line in lines)
            assert shown == blob.removesuffix("\n"), (lesson.id, path)


def each_command_and_its_output_is_there(lessons, pages):
    for lesson in lessons:
        tree = parse(pages[f"{lesson.id}.html"])
        copied = [text_of(code) for code in tree.iter("code") if code.get("data-copy") is not None]
        blocks = token_texts(tree, "pre")
        for kind, words in course.read_try(course.message(lesson)):
            assert kind != "command" or words in copied, (lesson.id, words)
            assert kind != "output" or words in blocks, (lesson.id, words)


def each_word_of_a_message_is_there(lessons, pages):
    headings = r"^(Traps|Predict|Try|Read|Tests|Steps|Implement|Exercise)( \(.*?\))?:"
    for lesson in lessons:
        whole = text_of(parse(pages[f"{lesson.id}.html"]).find(".//main"))
        shown = re.sub(r"\s+|[`()]|arxiv:", "", whole.lower())
        for paragraph in re.split(r"\n\s*\n", course.message(lesson).partition("\n")[2]):
            for line in re.sub(headings, r"\2", paragraph.strip("\n")).split("\n"):
                line = line.strip().removeprefix("Errors and texts:")
                words = re.sub(r"^\$ |^- |^\d\. |\s+|[`()]", "", line).lower()
                assert words in shown, (lesson.id, line)


def pages_are_valid_and_not_too_large(lessons, pages):
    """Strict HTML; headings in order below one h1; a text for each picture; each id once."""
    for name, page in pages.items():
        if not name.endswith(".html"):
            continue
        assert len(page.encode()) < 400_000, name
        tree = parse(page)
        tags = [str(element.tag) for element in tree.iter()]
        levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1, name
        assert all(after <= before + 1 for before, after in zip(levels, levels[1:])), (name, levels)
        assert all(image.get("alt") for image in tree.iter("img"))
        assert tree.get("lang") == "en"
        ids = [element.get("id") for element in tree.iter() if element.get("id")]
        assert len(set(ids)) == len(ids), name


def all_links_lead_somewhere_and_few_of_them_out(lessons, pages):
    names = [name for name in pages if name.endswith(".html")]
    ids = {name: set(re.findall(r'id="([^"]+)"', pages[name])) for name in names}
    linked = r'<a [^>]*href="https://[^"]*"'
    texts = r"<(pre|code|ins|del|table|q|p|li)\b.*?</\1>"
    for name in names:
        for element in parse(pages[name]).iter():
            for address in map(element.get, ("href", "src", "action")):
                if not address or address == "data:,":
                    continue
                if address.startswith("https://"):
                    assert element.tag == "a" and address.split("/")[2] in HOSTS, (name, address)
                    continue
                page, _, place = address.partition("#")
                assert (page or name) in pages, (name, address)
                assert not place or place in ids[page or name], (name, address)
        assert "://" not in re.sub(f"{linked}|{texts}", "", pages[name], flags=re.S), name
    own = {"style.css", "scenes.css", "book.js", "pictures.js"}
    own |= {"model.js", "play.js", "engine.js", "player.js"} & pages.keys()
    styles = "".join(pages[name] for name in own)
    assert "://" not in styles and "@import" not in styles and "url(" not in styles


def names_in_order(lessons, pages) -> list[str]:
    """The pages of the lessons, each part's summary after its last lesson."""
    names = []
    summary = None
    for lesson in lessons:
        if lesson.slug in course.PARTS:
            names.append(summary)
            numeral = re.match(r"Part ([IVX]+):", course.PARTS[lesson.slug])[1]
            summary = f"part-{numeral.lower()}.html"
        names.append(f"{lesson.id}.html")
    names = [name for name in [*names, summary] if name]
    assert set(names) <= pages.keys()
    return names


def neighbours_and_lists_have_all_lessons(lessons, pages):
    names = names_in_order(lessons, pages)
    for place, name in enumerate(names):
        links = {link.get("rel"): link.get("href") for link in parse(pages[name]).iter("a")}
        assert links.get("prev") == (names[place - 1] if place else "index.html")
        assert links.get("next") == (names[place + 1] if place + 1 < len(names) else None)
    for page in pages:
        if page.endswith(".html"):
            (side,) = [nav for nav in parse(pages[page]).iter("nav") if nav.get("id") == "lessons"]
            links = [link.get("href") for link in side.iter("a")]
            play = ["play.html"] if "play.html" in pages else []
            assert links == [*names, *play, "exercises.html", "search.html"]
    assert [entry["page"] for entry in search_entries(pages)] == names
    index = parse(pages["index.html"])
    (lists,) = [part for part in index.iter("section") if first(part, "h2") == "The lessons"]
    links = [link.get("href") for row in lists.iter("tr") for link in row.iter("a")]
    assert links == names
    exercises = parse(pages["exercises.html"]).find(".//main")
    links = [part.find("h2/a").get("href") for part in exercises.iter("section")]
    assert links == [f"{lesson.id}.html" for lesson in lessons]


def search_entries(pages) -> list[dict]:
    script = pages["search-index.js"]
    return json.loads(script.removeprefix("window.SEARCH_INDEX = ").removesuffix(";\n"))


ORACLES = (
    each_line_of_a_lesson_is_there_once,
    code_is_shown_whole_and_in_order,
    each_command_and_its_output_is_there,
    each_word_of_a_message_is_there,
    pages_are_valid_and_not_too_large,
    all_links_lead_somewhere_and_few_of_them_out,
    neighbours_and_lists_have_all_lessons,
)


README = "# Learn <little>\n\nHow?\n\n- by `git`;\n- slowly.\n\n`make book` makes\npages.\n\n"
README += "One command sets it up:\n"
README += "\n## Start\n\n    make it\n\n## More\n"
CLASS = """

class Thing:
    def method(self):
        a = 1
        b = 2
        c = 3
        return 4

    def after(self):
        pass


MOST = 3
"""
MANY = ["".join(f"\n\nx{n} = {n}" for n in part) for part in (range(10), range(10, 20))]
INFER = "\n\nimport sys  # <b>&amp;\n\n\ndef first():\n    return 1\n" + MANY[0] + CLASS
INFER += MANY[1] + "\n\n\ndef last():\n    return 7\n\n\nend = 1\n"
CHANGED = INFER.replace("return 1", 'text = """\n    two <i>\n    lines"""\n\n    return text')
CHANGED = CHANGED.replace("\nx7 = 7\n", "\n")
CHANGED = CHANGED.replace("return 4", "return 5")
CHANGED = CHANGED.replace("return 7", "return 8")
BODY = """Why "it" is <so> & not else, with `read_it(a,
b)` and `Engine.step` in `a/b.py`; `--option`
too (Kwon et al. 2023; RoFormer, 2104.09864). See infer.py and p(x).

    p(v) ~ exp(x / T)   <- a formula

- one item
  on two lines;
- two.

Traps: in an older message, a paragraph.

In a list, endian-
ness (vllm#5):
    indented at once

- an item
      with a formula
  and more

Try: (a remark)

    $ python - <<'EOF'
    import sys
    print("<b>", f"{1 + 1}")
    EOF
    <b> 2

    after an empty line
    $ echo a \\
      b
    a b
Prose between <them>.
    $ echo c

Read: `Thing`, then `first` in `infer.py`, not the last or `after` that; `MOST`.

Tests: all of it.

Steps:
    1. `read_it`, which
       goes on.
    2. The rest.

Implement: (in infer.py, which the
next line goes on with)
    `infer.py`: `read_it(a, b) -> c`; UserError "no <such>" of so many words that they
        take a line more;
        `its_member`, alone
    `--option`

Exercise: why?"""
TICKED = """What is `a < b`, `<|end|>` or a call, `f(x,
y)`, is marked.

- and no_code in a list of tokens, each a token

Traps:
- `step` is no function, and goes
  on.

- Two of `y`.

Predict: how many times does
`true` print?

Try (`make it`):

    $ true

Read: `Thing`, then first and the step in `infer.py`.

Tests: tokens of a vocabulary.

Steps:
    1. `y`.

Implement: as above
    engine.py:
        `y(a, b) -> c`, which
            goes on
        `z`
    `w`
    Errors and texts: `UserError` "y: no <such>", also
        where it goes on; "no z"

Exercise: what is `y`?"""
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\3\0\0\0\2"  # 3 pixels wide, 2 high; no more is read
FIGURES = {"01-add": '<figure class="picture">a picture</figure>'}
SCRIPTS = {
    "engine.js": "window.ENGINE = {};\n",
    "recording.js": 'window.RECORDING = {"prompt": "", "tokens": []};\n',
}
SUMMARIES = """Not shown.

# Part I

What `init` made, in lesson {add}.

## Code

infer.py:

```pseudo
def first():  # <one>
    return "{mul}"
```

After it.

## Measured

- 2 < 3 (message of {mul})
- 1.5 things, as
  many (answer of {add})

# Part II

Of a part without lessons, {gone}.
"""
ANSWER = """# 01 add: because

> Exercise: why?
> So.

Because <b>, [says one](https://github.com/a/b), [another](http://evil.org),
[a third](javascript:alert) and [a fourth](../infer.py).

## A part

```sh
echo $((1 < 2))
```

```text
1
```
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    path = tmp_path_factory.mktemp("course")
    git(path, "init", "-q", "-b", "main")
    git(path, "commit", "-q", "--allow-empty", "-m", "before all lessons")
    git(path, "tag", "none")
    body = "All.\n\nTry:\n\n    $ true\n\nRead: it.\n\nTests: it.\n\nExercise: what?"
    files = {"infer.py": INFER, "Readme.md": README, "gone.c": "int a;\n"}
    files |= {"tests/test_init.py": "def test_a():\n    pass\n", "dir/ä b.md": "# Titel\n"}
    (path / "data.bin").write_bytes(bytes(range(256)))
    commit(path, "00 init: a place", files, "00-init", body)
    files = {"infer.py": INFER + "door = 1\n", "course/book/door.py": "window = 2\n" * 9}
    commit(path, "infer: a door, because <two> follow", files, None, "It & nothing.")
    git(path, "rm", "-q", "gone.c")
    files = {"infer.py": CHANGED.removesuffix("\n"), "empty.py": ""}
    files |= {"native.c": '#include "a.h"\nint b = 1; /* <c> */\n'}
    files |= {"tests/test_add.py": "assert 1 < 2\n\n"}
    commit(path, "01 add: sums & <more>", files, "01-add", BODY)
    body = "def test_{0}():\n    assert first({0}) == 'two' and {0} < {0} + 1\n\n\n"
    large = "".join(body.format(n) for n in range(90))
    files = {"engine.py": "y = 2\n", "tests/test_mul.py": large}
    commit(path, "02 mul: products", files, "02-mul", TICKED)
    (path / "benchmark_results").mkdir()
    (path / "benchmark_results" / "engine_cpu.png").write_bytes(PNG)
    commit(path, "answers: worked out", {"course/answers/01-add.md": ANSWER}, None, "So.")
    return path


@pytest.fixture
def here(repo, monkeypatch):
    monkeypatch.setattr(course, "ROOT", repo)
    monkeypatch.setattr(make_book.pictures, "figure", lambda id: FIGURES.get(id, ""))
    monkeypatch.setattr(make_book, "web_scripts", lambda: SCRIPTS)
    monkeypatch.setattr(summaries, "TEXT", SUMMARIES)
    diffs.blob.cache_clear()
    return repo


@pytest.fixture
def blobs(monkeypatch):
    """A function that puts these texts in the places of git's files, by their ids."""

    def put(**texts: str) -> None:
        monkeypatch.setattr(diffs, "blob", texts.get)

    def clear() -> None:
        diffs.definitions.cache_clear()
        diffs.definition_lines.cache_clear()
        diffs.definition_starts.cache_clear()

    clear()
    yield put
    clear()


@pytest.fixture(scope="module")
def pages(repo):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "ROOT", repo)
        patch.setattr(make_book, "LIMIT", 20_000)
        patch.setattr(summaries, "TEXT", SUMMARIES)
        patch.setitem(make_book.PLOTS, "engine", (("add",), make_book.PLOTS["engine"][1]))
        return make_book.make_pages(*course.read_main(), FIGURES, SCRIPTS)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_of_a_small_course(here, pages, oracle):
    oracle(course.read_main()[1], pages)


def test_without_webassembly_nothing_leads_to_the_page_play(here, pages):
    play = {"play.html", "model.js", "play.js", "engine.js"}
    without = make_book.make_pages(*course.read_main(), FIGURES, {})
    assert play <= pages.keys() and not play & without.keys()
    assert not any("play.html" in page for page in without.values() if isinstance(page, str))
    assert 'href="play.html"' in pages["index.html"]


@pytest.mark.parametrize("limit, apart", [(70, ""), (69, "c"), (39, "bc"), (19, "abc")])
def test_the_largest_part_of_a_page_goes_first(monkeypatch, pages, limit, apart):
    monkeypatch.setattr("make_book.LIMIT", limit)
    sizes = {"b": 20, "c": 30, "a": 10}
    sections = [make_book.Section(name, name, "x" * size) for name, size in sizes.items()]

    def render() -> str:
        return "x" * 10 + "".join(part.body for part in sections if not part.has_own_page)

    assert len(make_book.fit_page(render, sections, "07-top-p")) <= limit
    assert sorted(part.name for part in sections if part.has_own_page) == list(apart)
    monkeypatch.setattr("make_book.LIMIT", 9)
    with pytest.raises(course.LessonError, match="the page of 07-top-p has more than 9 bytes"):
        make_book.fit_page(render, sections, "07-top-p")
    link = '<a href="02-mul.tests.html">Tests: test_mul.py, 360 new lines</a>'
    assert link in pages["02-mul.html"] and "01-add.tests.html" not in pages


def test_a_diff_names_functions_and_folds_the_rest(pages):
    """The one that changes, not the one above it; none where its first line is shown."""
    part = dict(files_of(pages, "01-add.html"))["infer.py"]
    assert token_texts(part, "h4") == ["Thing.method"]
    folds = [text_of(fold.find("summary")) for fold in part.iter("details")]
    assert folds and all(re.fullmatch(r"\d+ unchanged lines", fold) for fold in folds)
    pairs = of_class(part, "span", "pair")
    assert [side.tag for side in pairs[0]] == ["del", "ins"]
    assert lines_of(pairs[0], "del") == ["    return 1"]
    assert "Data: left out here." in text_of(dict(files_of(pages, "00-init.html"))["data.bin"])
    # The lines of a string are one, though only the first has its quotation marks.
    (line,) = [line for line in lines_of_code(part) if text_of(line) == "    two <i>"]
    assert [(piece.get("class"), text_of(piece)) for piece in line] == [("s", "    two <i>")]
    # A commit that prepares a lesson is folded behind its subject.
    summary = "infer: a door, because <two> follow"
    folds = parse(pages["01-add.html"]).iter("details")
    (fold,) = [found for found in folds if text_of(found.find("summary")) == summary]
    assert "It & nothing." in text_of(fold) and lines_of(fold, "ins") == ["door = 1"]
    assert "course/book/door.py: 9 new lines, left out here." in text_of(fold)
    assert "a door" not in pages["02-mul.html"] and "Before it" not in pages["02-mul.html"]


def test_files_of_a_large_lesson_move(here, pages, monkeypatch):
    """Those that are closed and that Read does not name, such as all of the first lesson."""
    size = len(pages["00-init.html"].encode())
    fit_page = make_book.fit_page

    def fit_smaller(render, sections, name):
        with monkeypatch.context() as patch:
            patch.setattr(make_book, "LIMIT", size - 1 if name == "00-init" else 10 * size)
            return fit_page(render, sections, name)

    monkeypatch.setattr(make_book, "fit_page", fit_smaller)
    found = make_book.make_pages(*course.read_main(), FIGURES, SCRIPTS)
    (moved,) = [name for name in found if name.startswith("00-init.code-")]
    (link,) = [each for each in parse(found["00-init.html"]).iter("a") if each.get("href") == moved]
    assert text_of(link) == "infer.py" and "def " in text_of(parse(found[moved]))
    assert not any(name.startswith("00-init.code-") for name in pages)


def test_a_commit_of_thousands_of_lines_is_named_only(here, monkeypatch):
    monkeypatch.setattr(make_book, "MAX_SHOWN", 9)
    found = make_book.make_pages(*course.read_main(), FIGURES, SCRIPTS)
    folds = parse(found["01-add.html"]).iter("details")
    (fold,) = [each for each in folds if "a door" in text_of(each.find("summary"))]
    assert "infer.py: 1 new lines, left out here." in text_of(fold)


def test_prose(pages):
    page = pages["01-add.html"]
    main = parse(page).find(".//main")
    links = {text_of(link): link.get("href") for link in main.iter("a")}
    assert links["Kwon et al. 2023"] == "https://arxiv.org/abs/2309.06180"
    assert links["arXiv:2104.09864"] == "https://arxiv.org/abs/2104.09864"
    why, idea = main.findall("div")
    codes = ["read_it(a, b)", "Engine.step", "a/b.py", "--option"]
    assert token_texts(why, "code") == codes
    formulas = [text_of(found) for found in of_class(main, "pre", "formula")]
    assert formulas == ["p(v) ~ exp(x / T)   <- a formula", "indented at once", "with a formula"]
    items = ["one item on two lines;", "two.", "an itemwith a formulaand more"]
    assert token_texts(idea, "li") == items
    assert "endian-ness" in page and "https://github.com/vllm-project/vllm/issues/5" in page
    assert "python lessons.py start 01" in page
    assert "lessons.py start" not in pages["00-init.html"]
    (steps,), (asked,) = main.iter("ol"), of_class(main, "div", "asked")
    assert token_texts(steps, "li") == ["read_it, which goes on.", "The rest."]
    assert text_of(asked.find("p")) == "In infer.py, which the next line goes on with."
    words = 'UserError "no <such>" of so many words that they take a line more; its_member, alone'
    assert token_texts(asked, "li") == [f"infer.py: read_it(a, b) -> c; {words}", "--option"]
    # The problem, its picture, the idea; what to implement behind the code and the tests.
    order = ["Why ", "a picture", "a formula", "\nTry it\n", "\nRead\n", "\nThe code\n"]
    order += ["\nThe tests\n", "\nWrite it yourself\n", "\nExercise\n"]
    places = [text_of(main).rindex(words) for words in order]
    assert places == sorted(places) and "<figure" not in pages["02-mul.html"]


def test_traps_a_prediction_and_what_only_tests_need(pages):
    """Traps and the question before Try, the interface open, the texts of errors folded."""
    main = parse(pages["02-mul.html"]).find(".//main")
    words = text_of(main)
    order = ["each a token", "\nTraps\n", "\nTry it\n", "Before you run it:", "true"]
    order += ["\nRead\n", "\nInterface\n", "Errors and texts"]
    places = [words.rindex(each) for each in order]
    assert places == sorted(places)
    (question,) = of_class(main, "div", "predict")
    assert text_of(question) == "Before you run it: how many times does true print?"
    traps = section(pages["02-mul.html"], "Traps")
    assert token_texts(traps, "li") == ["step is no function, and goes on.", "Two of y."]
    assert len(list(traps.iter("ul"))) == 1
    assert main.find(".//nav[@class='within']/a[@href='#traps']") is not None
    (interface,), (texts,) = of_class(main, "div", "asked"), of_class(main, "details", "fold asked")
    assert [text_of(each) for each in interface.findall("ul/li/ul/li")] == [
        "y(a, b) -> c, which goes on",
        "z",
    ]
    assert first(interface, "p") == "As above" and token_texts(interface, "li")[-1] == "w"
    assert texts.get("open") is None and "such" not in text_of(interface)
    assert text_of(texts.find("p")) == 'UserError "y: no <such>", also where it goes on; "no z"'
    # A message without these sections has none; an older one has its traps in the explanation.
    for page in ("00-init.html", "01-add.html"):
        shown = parse(pages[page]).find(".//main")
        assert "Traps" not in token_texts(shown, "h2") and not of_class(shown, "div", "predict")
        assert not of_class(shown, "details", "fold asked") and "#traps" not in pages[page]
    assert "<p>Traps: in an older message, a paragraph.</p>" in pages["01-add.html"]


def test_what_to_read_leads_to_its_line(pages):
    tree = parse(pages["01-add.html"])
    ids = {element.get("id"): element for element in tree.iter() if element.get("id")}
    parents = {child: parent for parent in tree.iter() for child in parent}
    links = [link for link in section(pages["01-add.html"], "Read").iter("a")]
    lines = {
        text_of(link): text_of(parents[ids[link.get("href").removeprefix("#")]]).strip()
        for link in links
        if link.get("href", "").startswith("#code-")
    }
    expected = {"Thing": "class Thing:", "first": "def first():", "after": "def after(self):"}
    assert lines == expected | {"MOST": "MOST = 3"}


def test_links_into_code_know_files_and_their_order(blobs):
    """`draw` in b.py is not the method of a.py; files come as the text names them."""
    blobs(
        a="class A:\n    def step(self):\n        pass\n    def draw(self):\n        pass\n",
        b="def draw():\n    pass\n",
        c="INLINE void draw(int a) {\n}\nclass B {\n  step(frame) {\n",
    )
    changes = [diffs.Change(f"{name}.py", "", name) for name in "ab"]
    changes += [diffs.Change("dir/c.c", "", "c"), diffs.Change("d.md", "", "")]
    reading = "See <code>d.md</code>. <code>draw</code> and <code>step</code> in <code>c.c</code>, "
    reading += "<code>gone</code>; <code>draw(x)</code>; <code>A.draw</code>, firsts and x.pyc"
    shown, marks = make_book.link_code(reading, changes)
    targets = re.findall(r'<a href="#code-([\w-]+)"><code>([^<]+)</code></a>', shown)
    assert targets == [("2-1", "draw"), ("2-4", "step"), ("1-1", "draw(x)"), ("0-4", "A.draw")]
    assert list(marks) == ["d.md", "dir/c.c", "b.py", "a.py"]
    assert marks["dir/c.c"] == {0: "code-2-1", 3: "code-2-4"} and marks["d.md"] == {}
    assert re.sub("</?a[^>]*>", "", shown) == reading


def test_the_glossary_names_lessons_and_is_in_order():
    words = glossary.ENTRIES
    _, lessons = course.read_main()
    slugs = {lesson.slug for lesson in lessons}
    assert {slug for word in words for slug in (word.slug, *word.excluded_lessons)} <= slugs
    assert {slug for found, _ in make_book.PLOTS.values() for slug in found} <= slugs
    names = [word.name for word in words]
    assert names == sorted(names, key=str.lower) and len({word.id for word in words}) == len(words)
    assert glossary.LINK_PATTERNS.keys() | glossary.EXCLUDED_LESSONS.keys() <= set(names)
    assert len(words) == glossary.TEXT.count("\n- ")  # each entry is read


def test_the_first_use_of_a_word_is_a_link_and_no_other():
    """Of a word with several meanings, where the words beside it decide."""
    ids = {"init": "00-init", "paged-cache": "39-paged-cache", "page": "70-page"}
    ids |= {"choice-trie": "148-choice-trie"}

    def linked(id: str, *texts: str) -> list[tuple[str, str]]:
        link = glossary.link_first_uses(id, ids)
        shown = "".join(link(text) for text in texts)
        return re.findall(r'<a class="word" href="glossary.html#([\w-]+)">([^<]+)</a>', shown)

    tokens = "<p>Tokens, a <b>token</b>.</p>"
    assert linked("00-init", tokens, tokens) == [("token", "Tokens")]
    for tag in ("code", "a", "h2", "pre", "summary", "q"):
        assert linked("00-init", f"<{tag}>token <b>token</b></{tag}>") == []
        assert linked("00-init", f"<{tag}>token</{tag}> token") == [("token", "token")]
    assert linked("00-init", "tokenizer, subtoken, a-token, token/x, e_token") == []
    assert linked("00-init", "pages, rows, drafts") == []  # of lessons to come
    page = ("page", "pages")
    for id, words in (("39-a", [page]), ("103-a", [page]), ("150-a", [page, ("trie", "trie")])):
        assert linked(id, "pages of a trie, and pages") == words
    assert linked("87-page", "a page") == []  # on the web
    assert linked("00-init", "Tests pass. It has a pass.") == [("pass", "pass")]


def test_the_answer_is_folded_behind_the_exercise(here, pages):
    tree = parse(pages["01-add.html"])
    fold = of_id(tree, "answer")
    assert fold in [part for found in tree.iter("details") for part in found.iter()]
    assert text_of(fold.find("p/strong")) == "Because." and "So." not in text_of(fold)
    assert text_of(fold.find("h3")) == "A part" and "Because <b>," in text_of(fold)
    copied = [text_of(code) for code in fold.iter("code") if code.get("data-copy") is not None]
    assert copied == ["echo $((1 < 2))"]
    assert token_texts(fold, "pre")[1] == "1"
    # Links lead to other sites only, and only by https.
    links = [(link.get("href"), text_of(link)) for link in fold.iter("a")]
    assert links == [("https://github.com/a/b", "says one")]
    assert "[a third](javascript:alert) and [a fourth](../infer.py)" in text_of(fold)
    assert "01-add.html#answer" in pages["exercises.html"]
    assert "02-mul.html#answer" not in pages["exercises.html"]
    hash = git(here, "rev-parse", "--short", "main")
    exercise = text_of(section(pages["01-add.html"], "Exercise"))
    assert f"Its commands run at commit {hash}." in exercise
    assert "Its commands" not in pages["02-mul.html"]


def test_the_first_page(pages):
    tree = parse(pages["index.html"])
    rows = [token_texts(row, "td") for row in tree.iter("tr")]
    assert [row for row in rows if row] == [  # lines of code and of tests
        ["a place", str(len(INFER.splitlines()) + 1), "2"],
        ["sums & <more>", "10", "2"],
        ["products", "1", "360"],
        ["the part in pseudo-code, its figures, and what comes next"],
    ]
    (image,) = tree.iter("img")
    assert [image.get(name) for name in ("src", "width", "height")] == ["engine_cpu.png", "3", "2"]
    assert pages["engine_cpu.png"] == PNG
    assert text_of(tree.find(".//h1")) == "Learn <little>" and "slowly." in pages["index.html"]
    assert "makes\npages" not in pages["index.html"]  # of the book
    # A plot stands on the pages of its lessons, too.
    (image,) = section(pages["01-add.html"], "Measured").iter("img")
    assert image.get("src") == "engine_cpu.png" and len(image.get("alt")) > 40
    assert "engine_cpu.png" not in pages["02-mul.html"] and "#measured" not in pages["02-mul.html"]
    # The list of lessons is folded but for the part that is open.
    for name, is_open in (("01-add.html", True), ("index.html", False)):
        (fold,) = of_id(parse(pages[name]), "lessons").iter("details")
        assert (fold.get("open") is not None) == is_open, name


def test_a_part_ends_in_its_summary(here, pages, monkeypatch):
    main = parse(pages["part-i.html"]).find(".//main")
    assert text_of(main.find("h1")) == course.PARTS["init"]
    assert token_texts(main, "h2") == ["Code", "Measured"]
    (listing,) = of_class(main, "pre", "listing")
    assert text_of(listing) == 'def first():  # <one>\n    return "{mul}"'
    links = [(link.get("href"), text_of(link)) for link in main.iter("a") if link.get("title")]
    expected = [("01-add.html", "01 add"), ("02-mul.html", "02 mul")]
    assert links == [*expected, ("01-add.html#answer", "01 add")]
    items = token_texts(main, "li")
    assert items == ["2 < 3 (message of 02 mul)", "1.5 things, as many (answer of 01 add)"]
    (fold,) = of_id(parse(pages["part-i.html"]), "lessons").iter("details")
    assert fold.get("open") is not None
    (current,) = [link for link in fold.iter("a") if link.get("aria-current")]
    assert current.get("href") == "part-i.html"
    assert "part-ii.html" not in pages and "{add}" not in pages["part-i.html"]
    # Without a text a part has no summary; a slug that no lesson has is an error.
    monkeypatch.setattr(summaries, "TEXT", SUMMARIES.replace("# Part I\n", "# Part III\n"))
    made = make_book.make_pages(*course.read_main(), FIGURES, {})
    assert not any("part-i" in page for page in made.values() if isinstance(page, str))
    monkeypatch.setattr(summaries, "TEXT", SUMMARIES.replace("{add}", "{sub}"))
    with pytest.raises(course.LessonError, match="summaries.md: no lesson has the slug 'sub'"):
        make_book.make_pages(*course.read_main(), FIGURES, {})


REAL_SUMMARIES = summaries.read_summaries()
C_KEYWORDS = {"for", "if", "else", "return", "int", "float"}
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d)"


def numbers_in(text: str) -> set[str]:
    return set(re.findall(NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", text)))


def names_in(text: str, suffix: str) -> set[str]:
    """Names in code, without comments, strings and keywords."""
    if suffix == "py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return {each.string for each in tokens if each.type == tokenize.NAME} - set(keyword.kwlist)
    return set(re.findall(r"\b[A-Za-z_]\w*", re.sub("//.*", "", text))) - C_KEYWORDS


def test_each_part_has_a_summary_and_no_other():
    names = [title.partition(":")[0] for title in course.PARTS.values()]
    assert list(REAL_SUMMARIES) == names


@pytest.mark.parametrize("part", REAL_SUMMARIES)
def test_a_summary_is_short_and_its_pseudo_code_has_the_names_of_the_code(part):
    introduction, sections = REAL_SUMMARIES[part]
    code, measured, *others = sections
    assert measured.heading == summaries.MEASURED and len(others) == 2 and introduction
    ((suffix, pseudo_code),) = code.listings
    assert 20 <= pseudo_code.count("\n") <= 35
    assert max(map(len, pseudo_code.split("\n"))) <= 90
    words = summaries.LISTING.sub("", code.text)
    files = [ROOT / name for name in re.findall(r"[\w/]+\.(?:py|c)\b", words)]
    known = set().union(*(names_in(file.read_text(), file.suffix[1:]) for file in files))
    assert names_in(pseudo_code, suffix) - known == set()
    texts = [introduction, words, measured.text, *(other.text for other in others)]
    assert 100 < len(" ".join(texts).split()) <= 300


@pytest.mark.parametrize("part", REAL_SUMMARIES)
def test_the_figures_of_a_summary_are_those_of_its_sources(part):
    lessons = {lesson.slug: lesson for lesson in course.read_main()[1]}
    figures = REAL_SUMMARIES[part].figures
    assert 2 <= len(figures) <= 4
    for text, kind, source in figures:
        if kind is None:
            found = (ROOT / source).read_text("utf-8")
        elif kind == "answer":
            found = (ROOT / f"course/answers/{lessons[source].id}.md").read_text("utf-8")
        else:
            found = course.message(lessons[source])
        assert numbers_in(text) and numbers_in(text) <= numbers_in(found), text


def test_the_lessons_that_summaries_name_are_lessons():
    """Each reference becomes a link; a figure without a source is refused."""
    lessons = {lesson.slug: lesson for lesson in course.read_main()[1]}
    for introduction, sections in REAL_SUMMARIES.values():
        for text in (introduction, *(section.text for section in sections)):
            shown = summaries.to_html(text, lessons)
            assert "{" not in re.sub("<pre.*?</pre>", "", shown, flags=re.DOTALL)
    summary = summaries.Summary("", [summaries.Section("Measured", "- 1 (message of init)")])
    with pytest.raises(course.LessonError, match="a figure has no source"):
        summary.figures  # noqa: B018


def test_the_first_page_has_the_path_for_one_evening(here, pages, monkeypatch):
    assert "evening" not in text_of(parse(pages["index.html"])).lower()
    stop = course.EveningStop
    path = {"init": stop(5, "A <place>.", "Not shown."), "mul": stop(7, "Products.", "Sums.")}
    monkeypatch.setattr(course, "EVENING", path)
    made = make_book.make_pages(*course.read_main(), FIGURES, {})
    tree = parse(made["index.html"])
    (cards,) = of_class(tree, "ol", "evening")
    shown = [" ".join(words.split()) for words in token_texts(cards, "li")]
    assert shown == ["00 init 5 minutes A <place>.", "01: Sums. 02 mul 7 minutes Products."]
    assert [link.get("href") for link in cards.iter("a")] == ["00-init.html", "02-mul.html"]
    ends = [text_of(section(made[f"{name}.html"], "Try it")) for name in ("00-init", "02-mul")]
    ends = [" ".join(words.split()).partition("evening. ")[2] for words in ends]
    assert ends == ["01: Sums. Next on it: 02-mul.", "It ends here."]
    assert "evening" not in made["01-add.html"]


def test_the_index_of_the_search(pages):
    """Paragraphs, items, formulas and the lines of commands are lines; output is left out."""
    entries = search_entries(pages)
    lines = entries[1]["text"].split("\n")
    expected = ["p(v) ~ exp(x / T) <- a formula", "one item on two lines;", "two."]
    expected += ["In a list, endian-ness (vllm#5):", "indented at once", "an item"]
    expected += ["with a formula", "and more", "import sys", "echo c", "--option"]
    expected += ["Papers: Kwon et al. 2023; Su et al. 2021"]
    assert [line for line in expected if line not in lines] == []
    named = 'infer.py: read_it(a, b) -> c; UserError "no <such>" of so many words that they'
    assert any(line.startswith(named) and line.endswith("its_member, alone") for line in lines)
    lines = entries[2]["text"].split("\n")
    expected = ["step is no function, and goes on.", "y(a, b) -> c, which goes on"]
    expected += ["Before you run it: how many times does true print?"]
    expected += ['UserError "y: no <such>", also where it goes on; "no z"']
    assert [line for line in expected if line not in lines] == []
    assert "after an empty line" not in entries[1]["text"]
    assert entries[0]["text"].endswith("\nDefines MOST, Thing, after, first, last, method")


def make(output, *args) -> int:
    return make_book.main(["--output", str(output), *args])


def refused(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lessons.py: error: "), (out, err)
    return err


def test_a_new_folder_an_empty_one_and_an_older_book(here, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        assert make(folder) == 0 and (folder / "index.html").exists()
        line = rf"{re.escape(str(folder))}/index.html: \d+ files, \d\.\d MB\n"
        assert re.fullmatch(line, capsys.readouterr().out)
    (tmp_path / "link").symlink_to("new")
    for folder in (tmp_path / "new", tmp_path / "link"):
        (folder / "of-a-lesson-that-is-gone.html").write_text("old")
        assert make(folder) == 0
        assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "empty"))
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["empty", "link", "new"]


@pytest.mark.parametrize("name", ["mine", "mine/index.html", "link", "nowhere"])
def test_what_is_no_book_is_not_overwritten(here, tmp_path, capsys, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if "mine" in name:
        path.write_text("mine")
    else:
        (tmp_path / "mine").symlink_to(name.replace("link", "mine"))
    before = sorted(tmp_path.rglob("*"))
    assert make(tmp_path / "mine") == 2
    assert "files that are not this book" in refused(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_course_that_makes_no_book_writes_nothing(here, tmp_path, monkeypatch, capsys):
    assert make(tmp_path / "a\x1b[1m" / "b") == 2
    words = "/a\\x1b[1m is no directory; --output must be a new folder in an existing one\n"
    assert words in refused(capsys)
    monkeypatch.delitem(make_book.PLOTS, "engine")
    assert make(tmp_path / "book") == 2
    words = "benchmark_results/engine_cpu.png has no alternative text"
    assert words in refused(capsys)
    shutil.copytree(here, tmp_path / "repo")
    git(tmp_path / "repo", "reset", "-q", "--hard", "none")
    monkeypatch.setattr(course, "ROOT", tmp_path / "repo")
    assert make(tmp_path / "book") == 2
    assert "main has no lessons" in refused(capsys)
    assert os.listdir(tmp_path) == ["repo"]


def test_a_book_that_cannot_be_finished_leaves_the_older_one(here, tmp_path, monkeypatch, capsys):
    def contents():
        return {file.name: file.read_bytes() for file in (tmp_path / "book").iterdir()}

    assert make(tmp_path / "book") == 0
    capsys.readouterr()
    before = contents()
    real = Path.write_bytes

    def full(self, data):
        if self.name == "style.css":
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(make_book.Path, "write_bytes", full)
    assert make(tmp_path / "book") == 2
    assert "No space left on device" in refused(capsys)
    assert contents() == before and os.listdir(tmp_path) == ["book"]


# What Play loads; check_play.py compares the texts that it writes with those of the model.


def test_what_a_page_loads_is_small_and_one_vocabulary():
    found = [web_model.export(web_model.CHECKPOINTS / name) for name in web_model.MODELS]
    assert sum(len(each["image"]) for each in found) < 8e6
    assert found[0]["tokens"] == found[1]["tokens"] and len(found[0]["tokens"]) == 4096
    assert found[0]["tokens"][found[0]["special"]["<|endoftext|>"]] == "<|endoftext|>"
    assert "\\s" not in found[0]["pattern"].lower()


def test_a_page_gets_no_gemma_and_no_windows(tiny_gemma, tiny_llama, tmp_path):
    for build, windows in (
        (tiny_gemma, (5, None)),
        (tiny_gemma, (None,) * 2),
        (tiny_llama, (5, 5)),
    ):
        save_speaking(build, tmp_path, sliding_windows=windows)
        assert "neither sliding windows nor Gemma" in refusal(web_model.export, tmp_path)


def test_play_shows_a_recording_of_the_model_that_it_loads():
    """Each token's own probability is that of a pass over the text before it, without a cache."""
    found = web_model.record()
    directory = web_model.CHECKPOINTS / "stories-llama"
    model = load_model(directory, torch.int8)
    encoding = load_encoding(directory, model.config.vocab_size)
    ids = encoding.encode("Once upon a time")
    tokens = found["tokens"]
    written = [token["token"] for token in tokens]
    assert found["prompt"] == "Once upon a time" and 100 < len(written) <= 200
    with torch.inference_mode():
        logits = model(torch.tensor([ids + written]))[0, len(ids) - 1 : -1].double()
    own = logits.log_softmax(dim=-1)
    apart = []
    for row, token in zip(own, tokens, strict=True):
        apart.append(abs(token["logprob"] - row[token["token"]].item()))
        ends = token["token"] in model.config.eos_token_ids
        assert token["text"] == ("" if ends else encoding.decode([token["token"]]))
        assert len(token["top"]) == 8 and token["p"] > 0
        candidates = [other["logprob"] for other in token["top"]]
        assert candidates == sorted(candidates, reverse=True)
        # Top-p cuts the tail, and what stays shares the mass: all that is cut is less likely.
        kept = [other["p"] > 0 for other in token["top"]]
        assert kept == sorted(kept, reverse=True)
        assert sum(other["p"] for other in token["top"]) <= 1 + 1e-5
    # C rounds otherwise, and a value may meet the middle between two of int8.
    assert max(apart) < 0.5 and sum(apart) / len(apart) < 0.03
