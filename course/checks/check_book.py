"""Check the book of the whole course: python course/checks/check_book.py BOOK [PICTURES].

PICTURES: a folder for screenshots. First what test_book.py holds against a small course. Then
in headless Chromium, at 1280 and 360 pixels, light and dark: no error on the console, no request
but for files of the book, nothing wider than the page, contrast of all text at least 4.5 to 1, a
search that finds, arrow keys, copy buttons, and tips; and on the page Play the repository's texts.
The same of each lesson that has a picture, whose text has at least 11 pixels.
The engine's player plays, steps and is dragged, by mouse, touch and keyboard.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tests/book_pages", "course")]

import check_play  # noqa: E402
import test_book  # noqa: E402

import lessons as course  # noqa: E402
from pictures import PICTURES  # noqa: E402

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
INSIDE = ("file:", "data:", "blob:")
SIZES = ((1280, 900), (360, 780))

# The smallest contrast of any text with the background behind it (WCAG 2.1, 1.4.3), and whose.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((v, i) => (v * a + below[i] * (255 - a)) / 255);
  const background = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 255 ? own.slice(0, 3) : over(own, background(element.parentElement));
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let worst = [100, ""];
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const words = walker.currentNode.data.trim();
    if (!words || ["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.push(at.tagName + "." + at.className);
    const key = chain.join(" ");
    if (seen.has(key)) continue;
    seen.add(key);
    const below = background(element);
    const text = over(rgba(getComputedStyle(element).color), below);
    const [dark, light] = [luminance(text), luminance(below)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < worst[0]) worst = [ratio, key.slice(0, 80) + ": " + words.slice(0, 30)];
  }
  return worst;
}"""
# The smallest size of any text, in pixels as shown, and whose.
SIZE = """() => {
  let least = [100, ""];
  const picture = document.querySelector(".picture");
  const walker = document.createTreeWalker(picture, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const words = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!words || element.tagName === "SCRIPT") continue;
    const svg = element.closest("svg");
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = parseFloat(getComputedStyle(element).fontSize) * scale;
    if (size < least[0]) least = [size, words.slice(0, 30)];
  }
  return least;
}"""
# Blocks that are wider than their place without a fade, and others with one.
GOES_ON = """async () => {
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const blocks = [...document.querySelectorAll("pre, .wide, .where, .prose table")];
  const hidden = (block) => block.scrollWidth - block.clientWidth - block.scrollLeft > 1;
  const fades = (block) => getComputedStyle(block).maskImage !== "none";
  return [
    blocks.filter((block) => hidden(block) && !fades(block)).length,
    blocks.filter((block) => !hidden(block) && fades(block)).length,
  ];
}"""
WIDTH = "document.documentElement.scrollWidth"
OPEN = "document.querySelectorAll('details').forEach((details) => (details.open = true))"


def check(page, name: str, width: int, scheme: str, problems: list[str]) -> None:
    def must(holds, what) -> None:
        if not holds:
            problems.append(f"{name}, {width} pixels, {scheme}: {what}")

    wide = page.evaluate(WIDTH)
    must(wide <= width, f"the page is {wide} pixels wide")
    page.evaluate(OPEN)
    wide = page.evaluate(WIDTH)
    must(wide <= width, f"with all that is folded open it is {wide} pixels wide")
    contrast, where = page.evaluate(CONTRAST)
    must(contrast >= 4.5, f"contrast {contrast:.2f} at {where}")
    if name == "first":
        for place in ("a.begin", "a[href='play.html']", "img.card"):
            box = page.locator(f"main {place}").first.bounding_box()
            must(box["y"] < 700, f"{place} is not on the first screen")
        texts = page.locator("img").evaluate_all("images => images.map((image) => image.alt)")
        must(all(texts), "a picture without a text")
    if name == "lesson":
        commands = page.locator("[data-copy]").count()
        buttons = page.locator("pre.command button")
        must(commands and buttons.count() == commands, "copy buttons")
        buttons.first.click()
        buttons.first.get_by_text("ed").wait_for(timeout=2000)  # Copied, Selected
        here = page.url
        following = page.locator("a[rel=next]").first.get_attribute("href")
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**/{following}")
        page.keyboard.press("ArrowLeft")
        page.wait_for_url(here)
    if name == "rotary":
        found = page.locator("#found a").first.inner_text()
        must("-llama: " in found, f"the first result for RoPE is {found}")
    if name == "whole_words":
        found = page.locator("#found a").first.inner_text()
        must("-top-p: " in found, f"the first result for top-p is {found}")
        marks = {text.lower() for text in page.locator("mark").all_inner_texts()}
        must(marks and marks <= {"top-p", "top_p", "top p"}, f"marked for top-p: {marks}")
    if name == "wide":
        wide = page.evaluate(GOES_ON)
        must(wide == [0, 0], f"{wide} blocks go on without a sign, or have one and do not")
    if name == "search":
        links = page.locator("#found a")
        must(links.count() > 1, f"{links.count()} results")
        found = links.first.inner_text()
        must("-preemption: " in found, f"the first result is {found}")
        page.locator("input[name=q]").fill("qwertzuiop")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=qwertzuiop")
        must(page.locator("#found li").count() == 0, "results for what is nowhere")


def check_picture(page, name: str, width: int, problems: list[str]) -> None:
    size, where = page.evaluate(SIZE)
    if size < 11:
        problems.append(f"{name}, {width} pixels: text of {size:.1f} pixels at {where}")


class Hand:
    """Moves the engine's player of a page."""

    def __init__(self, page, name: str, problems: list[str]):
        self.page = page
        self.name = name
        self.problems = problems
        self.place = page.locator(".recorded")
        self.place.scroll_into_view_if_needed()

    def must(self, holds, what) -> None:
        if not holds:
            self.problems.append(f"{self.name}: the player {what}")

    @property
    def index(self) -> int:
        return self.place.evaluate("place => place.player.index")

    @property
    def last(self) -> int:
        return self.place.evaluate("place => place.player.frames.length - 1")

    def seek(self, index: int) -> None:
        self.place.evaluate("(place, index) => place.player.seek(index)", index)

    def button(self, name: str):
        return self.place.get_by_role("button", name=name, exact=True)

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Where the slider begins and ends on the screen."""
        box = self.place.locator("input").bounding_box()
        middle = box["y"] + box["height"] / 2
        return (box["x"] + 2, middle), (box["x"] + box["width"] - 2, middle)

    def move(self) -> None:
        """By mouse and keyboard."""
        page = self.page
        wide = page.evaluate(WIDTH)
        here = page.url
        told = self.place.locator(".happened")
        self.seek(0)
        self.button("Play").click()
        page.wait_for_function("document.querySelector('.recorded').player.index >= 2")
        self.button("Pause").click()
        at = self.index
        self.button("one frame on").click()
        self.must(self.index == at + 1, "does not step on")
        self.button("one frame back").click()
        self.must(self.index == at, "does not step back")
        page.wait_for_function(  # what is said is that frame's
            "(at) => document.querySelector('.happened').innerText.startsWith(`Step ${at + 1}:`)",
            arg=at,
        )
        first, last = self.ends()
        page.mouse.move(*first)
        page.mouse.down()
        self.must(self.index == 0, "does not go where the slider is pressed")
        page.mouse.move(*last, steps=4)
        page.mouse.up()
        self.must(self.index == self.last, f"is dragged to {self.index}, not {self.last}")
        page.keyboard.press("ArrowLeft")
        self.must(self.index == self.last - 1, "ignores the keys of the slider")
        self.button("Play").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowRight")
        self.must(self.index == self.last - 2, "ignores the arrow keys")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "(place => !place.player.playing)(document.querySelector('.recorded'))"
        )
        self.must(self.index == self.last, "does not play to its end")
        self.seek(self.last // 2)
        self.place.locator(".requests").focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function("document.querySelectorAll('.recorded .lit').length === 1")
        if self.place.locator(".pool").is_visible():
            self.place.locator(".pool").focus()
            page.keyboard.press("ArrowRight")
            page.wait_for_function(
                "document.querySelector('.recorded [aria-live]').innerText.startsWith('Page 0')"
            )
        self.must(page.url == here and told.is_visible(), "leaves the page")
        self.must(page.evaluate(WIDTH) == wide, "makes the page wider")

    def touch(self) -> None:
        """By fingers."""
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
        self.page.evaluate("new Promise(requestAnimationFrame)")
        self.must(self.index == self.last, f"is dragged by a finger to {self.index}")
        self.button("one frame back").tap()
        self.must(self.index == self.last - 1, "ignores a tap")
        self.place.locator(".requests li").first.tap()
        self.page.wait_for_function("document.querySelectorAll('.recorded .lit').length === 1")


def check_players(browser, address: str, names: list[str], problems: list[str]) -> int:
    """The players of these lessons, at both widths; returns how many there are."""
    count = 0
    for (width, height), touch in zip(SIZES, (False, True)):
        screen = {"width": width, "height": height}
        context = browser.new_context(viewport=screen, has_touch=touch)
        page = context.new_page()
        page.set_default_timeout(10_000)
        listen(page, problems)
        for name in names:
            page.goto(f"{address}/{name}.html")
            if page.locator(".recorded").count():
                count += 1
                hand = Hand(page, name, problems)
                hand.move()
                if touch:
                    hand.touch()
        context.close()
    return count // len(SIZES)


def listen(page, problems: list[str]) -> None:
    """Note errors on the console, and requests that leave the book."""

    def console(note) -> None:
        if note.type == "error":
            problems.append(f"console: {note.text}")

    def request(asked) -> None:
        if not asked.url.startswith(INSIDE):
            problems.append(f"asks for {asked.url}")

    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("request", request)


def main(book: Path, pictures: Path | None) -> int:
    problems = []
    pages = {
        file.name: file.read_bytes() if file.suffix == ".png" else file.read_text("utf-8")
        for file in book.iterdir()
    }
    _, lessons = course.read_main()
    for oracle in test_book.ORACLES:
        oracle(lessons, pages)
    lesson = course.find(lessons, "paged-cache").id  # a long page, with commits before it
    drawn = [lesson.id for lesson in lessons if lesson.id.partition("-")[2] in PICTURES]
    views = {
        "first": "index.html",
        "lesson": f"{lesson}.html",
        "code": f"{course.find(lessons, 'top-p').id}.html#main",
        "file": f"{lesson}.infer.html",
        "exercises": "exercises.html",
        "transformer": "transformer.html",
        "glossary": "glossary.html",
        "search": "search.html?q=preemption",
        "whole_words": "search.html?q=top-p",
        "rotary": "search.html?q=RoPE",
        "wide": f"{lesson}.html#code",
        "play": "play.html",
    }
    address = book.resolve().as_uri()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        for scheme in ("light", "dark"):
            for width, height in SIZES:
                screen = {"width": width, "height": height}
                context = browser.new_context(viewport=screen, color_scheme=scheme)
                page = context.new_page()
                listen(page, problems)
                for name, path in views.items():
                    page.goto(f"{address}/{path}")
                    if name == "play":
                        problems += check_play.use(page)
                    if pictures:
                        page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png")
                    check(page, name, width, scheme, problems)
                context.close()
        page = browser.new_page()
        listen(page, problems)
        for name in drawn:
            page.goto(f"{address}/{name}.html")
            for width, height in SIZES:
                page.set_viewport_size({"width": width, "height": height})
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    if pictures:
                        file = pictures / f"{name}-{width}-{scheme}.png"
                        page.locator(".picture").screenshot(path=file)
                    check(page, name, width, scheme, problems)
                    check_picture(page, name, width, problems)
        page.close()
        players = check_players(browser, address, drawn, problems)
        if players < 6:
            problems.append(f"{players} lessons have the engine's player")
        page = browser.new_page()
        page.goto(f"{address}/play.html")
        wrong, speed = check_play.compare(page)
        problems += wrong + check_play.fail(browser, page.url)
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(f"{address}/{lesson}.html")
        # Without JavaScript a lesson reads as with it, but for what could do nothing.
        texts = [page.locator(".prose p").first, page.locator("pre.command").first]
        if not all(text.is_visible() for text in texts) or page.locator("button").count():
            problems.append("without JavaScript a lesson does not read")
        if page.locator(".recorded").is_visible() or not page.locator(".picture").is_visible():
            problems.append("without JavaScript a player is there, or no picture")
        browser.close()
    shown = 2 * len(SIZES) * (len(views) + len(drawn))
    passed = f"the book: {len(test_book.ORACLES)} checks of its pages, {shown} views in Chromium"
    passed += f"; Play: {speed}"
    print(*problems or [passed], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
