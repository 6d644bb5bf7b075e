"""Check the book of the whole course: python course/checks/check_book.py BOOK [PICTURES].

PICTURES: a folder for screenshots. First run the oracles that test_book.py applies to a small
course. Then check each page type and each lesson with a picture with browser.py, in headless
Chromium at 1280 and 360 pixels, light and dark. Then check copy buttons, arrow keys, the search,
the engine's player by mouse, touch and keyboard, and a lesson without JavaScript. Last check the
page Play, in Chromium and in Firefox.
"""

import itertools
import re
import sys
from pathlib import Path

from browser import DRAWN, OPEN, SIZES, View, chromium
from check_play import compare, fail, use
from firefox import firefox
from playwright.sync_api import sync_playwright
from test_book import ORACLES

import lessons as course

FIRST_SCREEN = ("a.begin", "a[href='play.html']", "img.card")
# (query, pattern of the first result's title, pattern of every marked word)
SEARCHES = (
    ("preemption", "-preemption: ", r"preemptions?"),
    ("top-p", "-top-p: ", r"top[-_ ]p"),  # must not match "top_penalties"
    ("Top P", "-top-p: ", r"top\w*|p"),
    ("RoPE", "rotary|-llama|-rope", r"rotary"),  # an alias; must not match "europe"
)
# Number of blocks that overflow without a fade, or fade without overflow.
GOES_ON = """() => {
  const blocks = [...document.querySelectorAll("pre, .wide, .where")];
  const hidden = (block) => block.scrollWidth - block.clientWidth - block.scrollLeft > 1;
  const fades = (block) => getComputedStyle(block).maskImage !== "none";
  return blocks.filter((block) => hidden(block) !== fades(block)).length;
}"""
# Number of blocks that fade although there is room beside them.
ROOM = """() => {
  const main = document.querySelector("main");
  const padding = parseFloat(getComputedStyle(main).paddingRight);
  const end = main.getBoundingClientRect().right - padding;
  const room = (block) => end - block.getBoundingClientRect().right;
  return [...document.querySelectorAll("pre.goes-on")].filter((block) => room(block) > 30).length;
}"""
# The marked words, each with the beginning of the word before the mark.
MARKS = """() => [...document.querySelectorAll("#found mark")].map((mark) =>
  (mark.previousSibling?.data ?? "").match(/[a-z0-9]*$/i)[0] + mark.textContent)"""
PLAYER = "document.querySelector('.recorded').player"
# The tokens that Play shows first, and those it generates with the same settings.
WRITE_AGAIN = """async () => {
  const before = textTokens.map(({ token }) => token).join();
  form.requestSubmit();
  while (!find("status").textContent.includes(" tokens in "))
    await new Promise((done) => setTimeout(done, 50));
  return [before, textTokens.map(({ token }) => token).join()];
}"""


def look(view: View, name: str) -> None:
    """Check the open page at both sizes and in both colour schemes."""
    for size, scheme in itertools.product(SIZES, ("light", "dark")):
        view.resize(size, scheme)
        view.page.evaluate(DRAWN)
        view.picture(name)
        if name == "index":
            for selector in FIRST_SCREEN:
                top = view.page.locator(f"main {selector}").first.bounding_box()["y"]
                view.must(top < 700, f"{selector} is not on the first screen")
        view.looks()
        blocks = view.page.evaluate(ROOM)
        view.must(blocks == 0, f"{blocks} blocks fade although there is room beside them")
    view.page.evaluate(OPEN)
    for size in reversed(SIZES):
        view.resize(size, "light")
        view.page.evaluate(DRAWN)
        view.looks()
        blocks = view.page.evaluate(GOES_ON)
        view.must(blocks == 0, f"{blocks} blocks go on without a fade, or have one and do not")


def read(view: View, address: str, lesson: str) -> None:
    """Check copy buttons, arrow keys and the search."""
    page = view.page
    page.goto(f"{address}/{lesson}.html")
    buttons = page.locator("pre.command button")
    view.must(buttons.count() == page.locator("[data-copy]").count() > 0, "copy buttons")
    buttons.first.click()
    buttons.first.get_by_text("ed").wait_for(timeout=2000)  # Copied, Selected
    here = page.url
    following = page.locator("a[rel=next]").first.get_attribute("href")
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**/{following}")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(here)
    page.keyboard.press("/")
    for query, wanted, word in SEARCHES:
        page.locator("input[name=q]").fill(query)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**q={query.replace(' ', '+')}")
        found = page.locator("#found a").first.inner_text()
        view.must(re.search(wanted, found), f"{query}: first is {found}")
        marks = page.evaluate(MARKS)
        wrong = {mark for mark in marks if not re.fullmatch(word, mark, re.IGNORECASE)}
        view.must(marks and not wrong, f"{query}: these words are marked: {wrong}")
        view.looks()
    page.locator("input[name=q]").fill("qwertzuiop")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=qwertzuiop")
    view.must(page.locator("#found li").count() == 0, "results for what is nowhere")


class Hand:
    """A user of the engine's player on the open page."""

    def __init__(self, view: View):
        self.view = view
        self.page = view.page
        self.player = self.page.locator(".recorded")
        self.player.scroll_into_view_if_needed()
        self.last = self.page.evaluate(f"{PLAYER}.frames.length - 1")

    def at(self, index: int, what: str) -> None:
        found = self.page.evaluate(f"{PLAYER}.index")
        self.view.must(found == index, f"the player is at {found}, not {index}, after {what}")

    def seek(self, index: int) -> None:
        self.page.evaluate(f"{PLAYER}.seek({index})")

    def button(self, name: str):
        return self.player.get_by_role("button", name=name, exact=True)

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the screen positions of the slider's ends."""
        slider = self.player.locator("input")
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        middle = box["y"] + box["height"] / 2
        return (box["x"] + 2, middle), (box["x"] + box["width"] - 2, middle)

    def move(self) -> None:
        """Check the player with mouse and keyboard."""
        page = self.page
        here = page.url
        self.seek(0)
        self.button("Play").click()
        page.wait_for_function(f"{PLAYER}.index >= 2")
        self.button("Pause").click()
        at = page.evaluate(f"{PLAYER}.index")
        self.button("one frame on").click()
        self.at(at + 1, "a step on")
        self.button("one frame back").click()
        self.at(at, "a step back")
        page.wait_for_function(  # the text describes that frame
            "(at) => document.querySelector('.happened').innerText.startsWith(`Step ${at + 1}:`)",
            arg=at,
        )
        first, last = self.ends()
        page.mouse.move(*first)
        page.mouse.down()
        self.at(0, "a press on the slider")
        page.mouse.move(*last, steps=4)
        page.mouse.up()
        self.at(self.last, "a drag of the slider")
        page.keyboard.press("ArrowLeft")
        self.at(self.last - 1, "a key on the slider")
        self.button("Play").focus()
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
            page.keyboard.press(key)
        self.at(self.last - 2, "arrow keys")
        page.keyboard.press("Enter")
        page.wait_for_function(f"!{PLAYER}.playing")
        self.at(self.last, "playing to the end")
        self.seek(self.last // 2)
        self.player.locator(".requests").focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function("document.querySelectorAll('.recorded .lit').length === 1")
        if self.player.locator(".pool").is_visible():
            self.player.locator(".pool").focus()
            page.keyboard.press("ArrowRight")
            page.wait_for_function(
                "document.querySelector('.recorded [aria-live]').innerText.startsWith('Page 0')"
            )
        self.view.must(page.url == here, "the player leaves the page")
        self.view.looks()

    def touch(self) -> None:
        """Check the player with touch events."""
        session = self.page.context.new_cdp_session(self.page)

        def finger(kind: str, *points) -> None:
            points = [{"x": x, "y": y} for x, y in points]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        self.seek(0)
        (left, y), (right, _) = self.ends()
        finger("touchStart", (left, y))
        for share in (0.2, 0.5, 0.8, 1):
            finger("touchMove", (left + share * (right - left), y))
        finger("touchEnd")
        self.page.evaluate(DRAWN)
        self.at(self.last, "a drag by a finger")
        self.button("one frame back").tap()
        self.at(self.last - 1, "a tap")
        self.player.locator(".requests li").first.tap()
        self.page.wait_for_function("document.querySelectorAll('.recorded .lit').length === 1")


def check_players(browser, address: str, names: list[str], problems: list[str]) -> None:
    """Check the players of these pages at both widths."""
    for size, touch in zip(SIZES, (False, True)):
        view = View(browser, problems, size, has_touch=touch)
        for name in names:
            view.page.goto(f"{address}/{name}")
            hand = Hand(view)
            hand.move()
            if touch:
                hand.touch()
        view.context.close()


def check_without_scripts(browser, address: str, lesson: str, problems: list[str]) -> None:
    """Check that a lesson is readable without JavaScript and has no dead controls."""
    view = View(browser, problems, java_script_enabled=False)
    page = view.page
    page.goto(f"{address}/{lesson}.html")
    texts = [page.locator(f"{part} >> nth=0") for part in (".prose p", "pre.command", ".picture")]
    view.must(all(text.is_visible() for text in texts), "without JavaScript something is missing")
    view.must(page.locator("button").count() == 0, "without JavaScript there is a button")
    view.must(not page.locator(".recorded").first.is_visible(), "without JavaScript, a player")


def check_play(browser, book: Path, problems: list[str], pictures: Path | None) -> str:
    """Check Play in both browsers; return its speeds in words."""
    address = (book.resolve() / "play.html").as_uri()
    for size, scheme in zip(SIZES, ("light", "dark")):
        view = View(browser, problems, size, scheme, pictures=pictures)
        view.page.goto(address)
        top = view.page.locator("#text").bounding_box()["y"]
        view.must(top < 600, "the text is not on the first screen")
        use(view)
        view.picture("play-used")
        view.looks()
    speed = compare(view.page.evaluate, problems)
    problems += fail(browser, address)
    with firefox(book) as evaluate:
        before, after = evaluate(WRITE_AGAIN)
        if before != after:
            problems.append("Play in Firefox does not write what it shows first")
        return f"{speed} in Chromium, {compare(evaluate, problems, 2)} in Firefox"


def main(book: Path, pictures: Path | None = None) -> int:
    problems = []
    pages = {
        file.name: file.read_bytes() if file.suffix == ".png" else file.read_text("utf-8")
        for file in book.iterdir()
    }
    _, lessons = course.read_main()
    for oracle in ORACLES:
        oracle(lessons, pages)
    drawn = [f"{each.id}.html" for each in lessons if 'class="picture' in pages[f"{each.id}.html"]]
    players = [name for name in drawn if 'class="recorded"' in pages[name]]
    kinds = ("index", "exercises", "transformer", "glossary", "search", "play")
    lesson = course.find_lesson(lessons, "paged-cache").id  # a long page with preparing commits
    address = book.resolve().as_uri()
    with sync_playwright() as play:
        browser = chromium(play)
        view = View(browser, problems, pictures=pictures)
        summaries = sorted(name for name in pages if name.startswith("part-"))
        others = [f"{kind}.html" for kind in kinds]
        for name in [*others, *summaries, f"{lesson}.tests.html", *drawn]:
            if name in pages:
                view.page.goto(f"{address}/{name}")
                look(view, name.removesuffix(".html"))
        view.resize(SIZES[0], "light")
        read(view, address, lesson)
        check_players(browser, address, players, problems)
        if len(players) < 3:
            problems.append(f"{len(players)} lessons have the engine's player")
        check_without_scripts(browser, address, lesson, problems)
        speed = check_play(browser, book, problems, pictures)
        browser.close()
    passed = f"the book: {len(ORACLES)} checks of its pages, {len(drawn)} lessons with pictures"
    print(*problems or [f"{passed}, {len(players)} players; Play: {speed}"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
