"""The book, of a small course with all that is awkward: each line of a diff once, each command, valid and linked pages.

The functions in ORACLES hold for the pages of any course; the gate runs them on the real book too.
"""

import collections
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import html5lib
import pytest
from conftest import ROOT
from test_lessons import commit, git

import lessons as course

sys.path.insert(0, str(ROOT / "tools"))
HOSTS = ("arxiv.org", "cdn.openai.com", "doi.org", "www.usenix.org", "huggingface.co", "github.com", "pytorch.org")


@functools.cache
def parse(page: str):
    """The tree of a page; strict, so that it fails for one that is not valid."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


def text_of(element) -> str:
    return "".join(element.itertext())


def files_of(pages, name) -> list:
    """(path, section) of each file whose diff a page shows, preparing commits left out."""
    tree = parse(pages[name])
    inside = {
        id(its) for heading in tree.iter("section") if first(heading, "h2") == "Before it" for its in heading.iter()
    }
    found = [its for its in tree.iter("section") if its.get("class") == "file" and id(its) not in inside]
    return [(text_of(its.find(".//h3/code")), its) for its in found]


def first(element, tag) -> str:
    found = element.find(tag)
    return "" if found is None else text_of(found)


def lesson_files(pages, lesson) -> list:
    names = [name for name in (f"{lesson.id}.html", f"{lesson.id}.tests.html") if name in pages]
    return [found for name in names for found in files_of(pages, name)]


def lines_of(element, tag) -> list[str]:
    """The lines within each element of that name."""
    return [text_of(line).removesuffix("\n") for run in element.iter(tag) for line in run.findall("span")]


def marked(lesson, sign) -> list[tuple[str, str]]:
    """(path, line) of all that a lesson adds or removes, as git tells it."""
    options = ("--format=", "--unified=0", "--no-renames", "--no-color", "--no-ext-diff", "--root")
    patch = course.git("-c", "core.quotePath=false", "show", *options, lesson.commit)
    found, path = [], None
    for line in patch.split("\n"):
        if line.startswith("diff --git "):
            path, body = line.rpartition(" b/")[2], False
        elif line.startswith("@@ "):
            body = True
        elif body and line.startswith(sign):
            found.append((path, line[1:]))
    return found


def each_line_of_a_lesson_is_there_once(lessons, pages):
    for lesson in lessons:
        files = lesson_files(pages, lesson)
        for tag, sign in (("ins", "+"), ("del", "-")):
            shown = [(path, line) for path, section in files for line in lines_of(section, tag)]
            shown = [(path, "" if line == " " else line) for path, line in shown]
            wanted = [(path, "" if line == " " else line) for path, line in marked(lesson, sign)]
            missing = collections.Counter(wanted) - collections.Counter(shown)
            assert sorted(shown) == sorted(wanted), (lesson.id, list(missing)[:3])


def code_is_shown_whole_and_in_order(lessons, pages):
    """What a lesson leaves and adds is the new file, folded lines too; marks count the lines rightly."""
    for lesson in lessons:
        for path, section in lesson_files(pages, lesson):
            if path.startswith("tests/") or not path.endswith((".py", ".c", ".h")):
                continue
            blob = course.run_git("show", f"{lesson.commit}:{path}")
            removed = {id(line) for run in section.iter("del") for line in run.iter()}
            spans = [its for its in section.iter("span") if not its.get("class") and id(its) not in removed]
            shown = ["" if text_of(line) == " " else text_of(line) for line in spans]
            assert "\n".join(shown) == blob.stdout.removesuffix("\n"), (lesson.id, path)
        name = f"{lesson.id}.infer.html"
        if name in pages:
            blob = course.run_git("show", f"{lesson.commit}:infer.py").stdout
            tree = parse(pages[name])
            lines = [text_of(its) for its in tree.find(".//pre").iter("span") if not its.get("class")]
            assert "\n".join("" if line == " " else line for line in lines) == blob.removesuffix("\n"), lesson.id
            added = [line for path, line in marked(lesson, "+") if path == "infer.py"]
            assert ["" if line == " " else line for line in lines_of(tree, "ins")] == added, lesson.id


def each_command_and_its_output_is_there(lessons, pages):
    for lesson in lessons:
        tree = parse(pages[f"{lesson.id}.html"])
        copied = [text_of(code) for code in tree.iter("code") if code.get("data-copy") is not None]
        blocks = [text_of(pre) for pre in tree.iter("pre")]
        for kind, words in course.read_try(course.message(lesson)):
            assert kind != "command" or words in copied, (lesson.id, words)
            assert kind != "output" or words in blocks, (lesson.id, words)


def each_word_of_a_message_is_there(lessons, pages):
    for lesson in lessons:
        shown = re.sub(r"\s+|[`()]|arxiv:", "", text_of(parse(pages[f"{lesson.id}.html"]).find(".//main")).lower())
        for paragraph in re.split(r"\n\s*\n", course.message(lesson).partition("\n")[2]):
            paragraph = re.sub(r"^(Try|Read|Tests|Implement|Exercise):", "", paragraph.strip("\n"))
            for line in paragraph.split("\n"):
                words = re.sub(r"^\$ |^- |\s+|[`()]", "", line.strip()).lower()
                assert words in shown, (lesson.id, line)


def pages_are_valid_and_not_too_large(lessons, pages):
    """Strict HTML; headings in order, below one h1; each picture has a text, each id is there once."""
    for name, page in pages.items():
        if not name.endswith(".html"):
            continue
        assert len(page.encode()) < 400_000, name
        tree = parse(page)
        levels = [int(its.tag[1]) for its in tree.iter() if re.fullmatch(r"h[1-6]", str(its.tag))]
        assert levels[0] == 1 and levels.count(1) == 1, name
        assert all(after <= before + 1 for before, after in zip(levels, levels[1:])), (name, levels)
        assert all(image.get("alt") for image in tree.iter("img")) and tree.get("lang") == "en"
        ids = [its.get("id") for its in tree.iter() if its.get("id")]
        assert len(set(ids)) == len(ids), name


def all_links_lead_somewhere_and_few_of_them_out(lessons, pages):
    """Into the book, or to papers and projects."""
    ids = {name: set(re.findall(r'id="([^"]+)"', page)) for name, page in pages.items() if name.endswith(".html")}
    for name in ids:
        for its in parse(pages[name]).iter():
            for address in filter(None, (its.get("href"), its.get("src"), its.get("action"))):
                if address.startswith("https://"):
                    assert its.tag == "a" and address.split("/")[2] in HOSTS, (name, address)
                elif address != "data:,":
                    page, _, place = address.partition("#")
                    assert (page or name) in pages, (name, address)
                    assert not place or place in ids[page or name], (name, address)
        others = re.sub(
            r'<a [^>]*href="https://[^"]*"|<(pre|code|ins|del|table|q|p|li)\b.*?</\1>', "", pages[name], flags=re.S
        )
        assert "://" not in others, name
    styles = pages["style.css"] + pages["book.js"]
    assert "://" not in styles and "@import" not in styles and "url(" not in styles


def neighbours_and_lists_have_all_lessons(lessons, pages):
    names = [f"{lesson.id}.html" for lesson in lessons]
    for place, name in enumerate(names):
        links = {its.get("rel"): its.get("href") for its in parse(pages[name]).iter("a") if its.get("rel")}
        assert links.get("prev") == (names[place - 1] if place else "index.html")
        assert links.get("next") == (names[place + 1] if place + 1 < len(names) else None)
    for page in pages:
        if page.endswith(".html"):
            (side,) = [its for its in parse(pages[page]).iter("nav") if its.get("id") == "lessons"]
            assert [its.get("href") for its in side.iter("a")] == [*names, "exercises.html", "search.html"]
    found = json.loads(pages["search-index.js"].removeprefix("window.SEARCH_INDEX = ").removesuffix(";\n"))
    assert [entry["page"] for entry in found] == names
    exercises = parse(pages["exercises.html"])
    assert [its.find("h2/a").get("href") for its in exercises.find(".//main").iter("section")] == names


ORACLES = (
    each_line_of_a_lesson_is_there_once,
    code_is_shown_whole_and_in_order,
    each_command_and_its_output_is_there,
    each_word_of_a_message_is_there,
    pages_are_valid_and_not_too_large,
    all_links_lead_somewhere_and_few_of_them_out,
    neighbours_and_lists_have_all_lessons,
)


# A small course.

README = "# Learn <little>\n\nHow?\n\n- by `git`;\n- slowly.\n\nOne command sets it up:\n"
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
CHANGED = CHANGED.replace("\nx7 = 7\n", "\n").replace("return 4", "return 5").replace("return 7", "return 8")
BODY = """Why "it" is <so> & not else, with `ticks`, read_it(a, b) and Engine.step in a/b.py; --option
too (Kwon et al. 2023; RoFormer, 2104.09864). See infer.py.

    p(v) ~ exp(x / T)   <- a formula

- one item
  on two lines;
- two.

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

Read: Thing, then first in infer.py, not the last or after that; MOST.

Tests: all of it.

Implement: (in infer.py, which the
next line goes on with)
    infer.py: read_it(a, b) -> c; UserError "no <such>" of so many words that they
        take a line more;
        its member, alone
    --option

Exercise: why?"""
PNG = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 3, 2, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0" * 8)),
        (b"IEND", b""),
    )
)
STORY = {"prompt": "Once <", "tokens": []}


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    path = tmp_path_factory.mktemp("course")
    git(path, "init", "-q", "-b", "main")
    git(path, "commit", "-q", "--allow-empty", "-m", "before all lessons")
    git(path, "tag", "none")
    sections = "\n\nTry:\n\n    $ true\n\nRead: it.\n\nTests: it.\n\nExercise: what?"
    files = {
        "infer.py": INFER,
        "Readme.md": README,
        "gone.c": "int a;\n",
        "tests/test_init.py": "def test_a():\n    pass\n",
    }
    (path / "data.bin").write_bytes(bytes(range(256)))
    commit(path, "00 init: a place", "All." + sections, files | {"dir/ä b.md": "# Titel\n"}, "00-init")
    commit(path, "infer: a door, because <two> follow", "It & nothing.", {"infer.py": INFER + "door = 1\n"}, None)
    git(path, "rm", "-q", "gone.c")
    files = {
        "infer.py": CHANGED.removesuffix("\n"),
        "native.c": '#include "a.h"\nint b = 1; /* <c> */\n',
        "empty.py": "",
    }
    commit(path, "01 add: sums & <more>", BODY, files | {"tests/test_add.py": "assert 1 < 2\n\n"}, "01-add")
    large = "".join(f"def test_{n}():\n    assert first({n}) == 'two' and {n} < {n + 1}\n\n\n" for n in range(90))
    commit(path, "02 mul: products", "B." + sections, {"engine.py": "y = 2\n", "tests/test_mul.py": large}, "02-mul")
    (path / "benchmark_results").mkdir()
    (path / "benchmark_results" / "engine_cpu.png").write_bytes(PNG)
    answer = "# 01 add: because\n\n> Exercise: why?\n> So.\n\nBecause <b>.\n\n## A part\n\n"
    answer += "```sh\necho $((1 < 2))\n```\n\n```text\n1\n```\n"
    commit(path, "answers: worked out", "So.", {"answers/01-add.md": answer}, None)
    return path


@pytest.fixture
def here(repo, monkeypatch):
    """The small course, as that of `lessons`."""
    import make_book

    monkeypatch.setattr(course, "ROOT", repo)
    monkeypatch.setattr(make_book, "write_story", lambda: STORY)
    make_book.blob.cache_clear()
    return repo


@pytest.fixture(scope="module")
def pages(repo):
    import make_book

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "ROOT", repo)
        patch.setattr(make_book, "LIMIT", 20_000)
        return make_book.make_pages(*course.read_main(), STORY)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_of_a_small_course(here, pages, oracle):
    oracle(course.read_main()[1], pages)


def test_tests_that_are_too_long_have_a_page_of_their_own(pages):
    assert '<a href="02-mul.tests.html">Tests: test_mul.py, 360 new lines</a>' in pages["02-mul.html"]
    assert len(pages["02-mul.html"]) < 20_000 < len(pages["02-mul.tests.html"]) and "01-add.tests.html" not in pages


def test_a_commit_that_prepares_a_lesson_is_folded_behind_its_subject(pages):
    tree = parse(pages["01-add.html"])
    (fold,) = [its for its in tree.iter("details") if text_of(its.find("summary")).startswith("infer: a door")]
    assert text_of(fold.find("summary")) == "infer: a door, because <two> follow"
    assert "It & nothing." in text_of(fold) and lines_of(fold, "ins") == ["door = 1"]
    assert "a door" not in pages["02-mul.html"] and "Before it" not in pages["02-mul.html"]


def test_a_diff_names_functions_and_folds_the_rest(pages):
    """The one that changes, not the one above it; none where its first line is shown."""
    (section,) = [its for path, its in files_of(pages, "01-add.html") if path == "infer.py"]
    assert [text_of(its) for its in section.iter("h4")] == ["Thing.method"]
    assert "def first():" in [text_of(its) for its in section.iter("span")]
    folds = [text_of(its.find("summary")) for its in section.iter("details")]
    assert folds and all(re.fullmatch(r"\d+ unchanged lines", fold) for fold in folds)
    pairs = [its for its in section.iter("span") if its.get("class") == "pair"]
    assert [[part.tag for part in pair] for pair in pairs][0] == ["del", "ins"]
    assert lines_of(pairs[0], "del") == ["    return 1"]
    assert "Data: left out here." in text_of(dict(files_of(pages, "00-init.html"))["data.bin"])


def test_colours_are_of_the_whole_file(pages):
    """The lines of a string are one, though only the first has its quotation marks."""
    (section,) = [its for path, its in files_of(pages, "01-add.html") if path == "infer.py"]
    (line,) = [its for its in section.iter("span") if text_of(its) == "    two <i>" and not its.get("class")]
    assert [(its.get("class"), text_of(its)) for its in line] == [("s", "    two <i>")]


def test_prose(pages):
    tree = parse(pages["01-add.html"])
    main = tree.find(".//main")
    links = {text_of(its): its.get("href") for its in main.iter("a") if its.get("href").startswith("https")}
    assert links["Kwon et al. 2023"] == "https://arxiv.org/abs/2309.06180"
    assert links["arXiv:2104.09864"] == "https://arxiv.org/abs/2104.09864"
    codes = [text_of(its) for its in main.find("div").iter("code")]
    assert codes == ["ticks", "read_it(a, b)", "Engine.step", "a/b.py", "--option", "infer.py"]
    formulas = [text_of(its) for its in main.iter("pre") if its.get("class") == "formula"]
    assert formulas == ["p(v) ~ exp(x / T)   <- a formula", "indented at once", "with a formula"]
    items = ["one item on two lines;", "two.", "an itemwith a formulaand more"]
    assert [text_of(its) for its in main.find("div").iter("li")] == items
    (asked,) = [its for its in main.iter("details") if its.get("class") == "fold asked"]
    items = [
        'infer.py: read_it(a, b) -> c; UserError "no <such>" of so many words that they take a line more;',
        "--option",
    ]
    assert text_of(asked.find("p")) == "(in infer.py, which the next line goes on with)"
    (first, second) = asked.iter("li")
    assert [text_of(first), text_of(second)] == ["".join(items[:1]) + "its member, alone", items[1]]
    assert [its.tail for its in first.iter("br")] == ["its member, alone"]
    assert (
        "endian-ness" in pages["01-add.html"]
        and "https://github.com/vllm-project/vllm/issues/5" in pages["01-add.html"]
    )
    assert "A remark" in pages["01-add.html"] and "Prose between &lt;them&gt;." in pages["01-add.html"]
    assert "python lessons.py start 01" in pages["01-add.html"] and "lessons.py start" not in pages["00-init.html"]


def test_what_to_read_is_code(pages):
    """The functions, classes and constants that are there by then; but "the last" is a word."""
    (section,) = [its for its in parse(pages["01-add.html"]).iter("section") if first(its, "h2") == "Read"]
    assert [text_of(its) for its in section.find("p").iter("code")] == ["Thing", "first", "infer.py", "after", "MOST"]
    assert text_of(section.find("p")) == "Thing, then first in infer.py, not the last or after that; MOST."


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["    a.py: f(x),", "        more"], ["a.py: f(x),\n        more"]),  # it goes on in mid-sentence
        (["    a.py: f(x).", "        more of a long line"], ["a.py: f(x).", "more of a long line"]),
        (
            ["    a.py: a line that is so long that it is.", "        full"],
            ["a.py: a line that is so long that it is.\n        full"],
        ),
        (
            [
                "    class A",
                "        f(x): so and",
                "            so",
                "        g(x)",
                "        h(x): even",
                "            more",
            ],
            ["class A", "f(x): so and\n            so", "g(x)", "h(x): even\n            more"],
        ),
    ],
)
def test_members_of_an_item(lines, expected):
    from make_book import members

    assert [its.strip() for its in members(lines, 48)] == expected


def test_the_answer_is_folded_behind_the_exercise(pages):
    tree = parse(pages["01-add.html"])
    (fold,) = [its for its in tree.iter() if its.get("id") == "answer"]
    assert "answer" in [its.get("id") for folded in tree.iter("details") for its in folded.iter()]  # a link opens it
    assert text_of(fold.find("p/strong")) == "Because." and "So." not in text_of(fold)
    assert text_of(fold.find("h3")) == "A part" and "Because <b>." in text_of(fold)
    copied = [text_of(its) for its in fold.iter("code") if its.get("data-copy") is not None]
    assert copied == ["echo $((1 < 2))"] and [text_of(its) for its in fold.iter("pre")][1] == "1"
    assert "01-add.html#answer" in pages["exercises.html"] and "02-mul.html#answer" not in pages["exercises.html"]


def test_the_first_page(pages):
    tree = parse(pages["index.html"])
    rows = [[text_of(cell) for cell in row] for row in tree.iter("tr") if row.find("td") is not None]
    sizes = [(str(len(INFER.splitlines()) + 1), "2"), ("10", "2"), ("1", "360")]  # code and tests
    assert [tuple(row[2:]) for row in rows] == sizes and rows[1][:2] == ["01-add", "sums & <more>"]
    (image,) = tree.iter("img")
    assert (image.get("src"), image.get("width"), image.get("height")) == ("engine_cpu.png", "3", "2")
    assert pages["engine_cpu.png"] == PNG
    assert text_of(tree.find(".//h1")) == "Learn <little>" and "slowly." in pages["index.html"]


def test_a_plot_without_a_text_is_no_book(here, monkeypatch, tmp_path, capsys):
    import make_book

    monkeypatch.delitem(make_book.PLOTS, "engine_cpu.png")
    assert make(tmp_path / "book") == 2
    assert "benchmark_results/engine_cpu.png has no text for those who cannot see it" in capsys.readouterr().err


def test_the_index_of_the_search_has_no_output(pages):
    entries = json.loads(pages["search-index.js"].partition(" = ")[2].removesuffix(";\n"))
    text = entries[1]["text"]
    assert "a formula" in text and "echo c" in text and "after an empty line" not in text
    assert entries[0]["text"].endswith(". Defines MOST, Thing, after, first, last, method")
    assert "Papers: Kwon et al. 2023; Su et al. 2021" in text


def test_the_story_is_that_of_make_demo(cli):
    """With the probability of each token, and the most likely ones; the greedy one is the first of them."""
    import make_book

    story = make_book.write_story(top=3)
    text = cli("--prompt", "Once upon a time")[1]
    assert story["prompt"] + "".join("\n".join(token["lines"]) for token in story["tokens"]) == text.removesuffix("\n")
    bounds, shades = [100 * least for least in make_book.SHADES], set()
    for token in story["tokens"]:
        assert len(token["top"]) == 3 and token["top"][0]["text"] == token["text"]
        assert token["top"][0]["percent"] == token["percent"]
        shade, percent = token["shade"], float(token["percent"].rstrip(" %"))
        assert bounds[shade] - 0.5 <= percent <= (bounds[shade - 1] + 0.5 if shade else 100)
        shades.add(shade)
    assert len(shades) >= 4


# The command


def make(output, *args) -> int:
    import make_book

    return make_book.main(["--output", str(output), *args])


def test_a_new_folder_an_empty_one_and_an_older_book(here, tmp_path, capsys):
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        assert make(folder) == 0 and (folder / "index.html").exists()
        assert re.search(rf"{re.escape(str(folder))}/index.html: \d+ files, \d\.\d MB\n", capsys.readouterr().out)
    (tmp_path / "new" / "of-a-lesson-that-is-gone.html").write_text("old")
    assert make(tmp_path / "new") == 0
    assert sorted(os.listdir(tmp_path / "new")) == sorted(os.listdir(tmp_path / "empty"))
    assert sorted(os.listdir(tmp_path)) == ["empty", "new"]


@pytest.mark.parametrize(
    "prepare, words",
    [
        (
            lambda path: (path / "mine").mkdir() or (path / "mine" / "index.html").write_text("mine"),
            "something that is",
        ),
        (lambda path: (path / "mine").write_text("mine"), "something that is not this book"),
    ],
)
def test_what_is_no_book_is_not_overwritten(here, tmp_path, capsys, prepare, words):
    prepare(tmp_path)
    before = sorted(str(its) for its in tmp_path.rglob("*"))
    assert make(tmp_path / "mine") == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and out == "" and err.startswith("lessons.py: error: ")
    assert sorted(str(its) for its in tmp_path.rglob("*")) == before


def test_a_link_to_an_older_book_stays_one(here, tmp_path):
    assert make(tmp_path / "real") == 0
    (tmp_path / "real" / "old.html").write_text("old")
    (tmp_path / "link").symlink_to("real")
    assert make(tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "real" / "old.html").exists()


def test_a_folder_in_none(here, tmp_path, capsys):
    assert make(tmp_path / "a" / "b") == 2
    assert "is no folder; --output names a new folder in one that is there\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda repo: git(repo, "branch", "-m", "main", "other"), "neither main nor origin/main is here"),
        (lambda repo: (repo / ".git").rename(repo / "git"), "this folder is no git clone"),
        (lambda repo: git(repo, "reset", "-q", "--hard", "none"), "main has no lessons"),
    ],
)
def test_a_folder_without_lessons_writes_nothing(repo, tmp_path, monkeypatch, capsys, damage, words):
    shutil.copytree(repo, tmp_path / "repo")
    damage(tmp_path / "repo")
    monkeypatch.setattr(course, "ROOT", tmp_path / "repo")
    assert make(tmp_path / "book") == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "book").exists()


def test_a_shallow_clone_writes_nothing(repo, tmp_path, monkeypatch, capsys):
    subprocess.run(["git", "clone", "-q", "--depth", "1", repo.as_uri(), tmp_path / "repo"], check=True)
    monkeypatch.setattr(course, "ROOT", tmp_path / "repo")
    assert make(tmp_path / "book") == 2
    err = capsys.readouterr().err
    assert "this clone is shallow" in err and err.count("\n") == 1 and not (tmp_path / "book").exists()


def test_a_book_that_cannot_be_finished_leaves_the_older_one(here, tmp_path, monkeypatch, capsys):
    import make_book

    assert make(tmp_path / "book") == 0
    before = {its.name: its.read_bytes() for its in (tmp_path / "book").iterdir()}
    real = Path.write_bytes

    def full(self, data):
        if self.name == "style.css":
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(make_book.Path, "write_bytes", full)
    assert make(tmp_path / "book") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {its.name: its.read_bytes() for its in (tmp_path / "book").iterdir()} == before
    assert os.listdir(tmp_path) == ["book"]


def test_the_command_of_the_course(monkeypatch, tmp_path, capfd):
    """It runs the script with the packages of `make test`, and says where main is if the script is not there."""
    calls = []
    monkeypatch.setattr(
        course.subprocess, "run", lambda args, **_: calls.append(args) or subprocess.CompletedProcess(args, 7)
    )
    monkeypatch.setattr(course, "read_main", lambda: (course.REFS[0], []))
    monkeypatch.chdir(tmp_path)
    assert course.main(["book", "--output", "here"]) == 7
    assert calls[0][1:] == [str(ROOT / "tools" / "make_book.py"), "--output", str(tmp_path / "here")]
    assert course.main(["book"]) == 7 and len(calls[1]) == 2
    monkeypatch.setattr(course, "ROOT", tmp_path)
    assert course.main(["book"]) == 2
    assert (
        capfd.readouterr().err
        == "lessons.py: error: what makes the book is on main only; go there with: git switch main\n"
    )
