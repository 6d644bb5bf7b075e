"""Check the book of the whole course: python .ci/check_book.py BOOK [PICTURES].

PICTURES: a folder for screenshots. First what tests/test_book.py holds against a small course. Then
in headless Chromium, at 1280 and 360 pixels, light and dark: no error on the console, no request
but for files of the book, nothing wider than the page, contrast of all text at least 4.5 to 1, a
search that finds, arrow keys, copy buttons, and tips.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_book  # noqa: E402

import lessons as course  # noqa: E402

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
INSIDE = ("file:", "data:")
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
        page.locator(".story .token").nth(20).hover()
        tip = page.locator(".story .tip").nth(20)
        must(tip.is_visible(), "no tip")
        box = tip.bounding_box()
        must(box["x"] >= 0 and box["x"] + box["width"] <= width, "the tip leaves the page")
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
    if name == "search":
        links = page.locator("#found a")
        must(links.count() > 1, f"{links.count()} results")
        found = links.first.inner_text()
        must("-preemption: " in found, f"the first result is {found}")
        page.locator("input[name=q]").fill("qwertzuiop")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=qwertzuiop")
        must(page.locator("#found li").count() == 0, "results for what is nowhere")


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
    views = {
        "first": "index.html",
        "lesson": f"{lesson}.html",
        "code": f"{course.find(lessons, 'top-p').id}.html#main",
        "file": f"{lesson}.infer.html",
        "exercises": "exercises.html",
        "search": "search.html?q=preemption",
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
                    if pictures:
                        page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png")
                    check(page, name, width, scheme, problems)
                context.close()
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(f"{address}/{lesson}.html")
        # Without JavaScript a lesson reads as with it, but for what could do nothing.
        texts = [page.locator(".prose p").first, page.locator("pre.command").first]
        if not all(text.is_visible() for text in texts) or page.locator("button").count():
            problems.append("without JavaScript a lesson does not read")
        browser.close()
    shown = 2 * len(SIZES) * len(views)
    passed = f"the book: {len(test_book.ORACLES)} checks of its pages, {shown} views in Chromium"
    print(*problems or [passed], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
