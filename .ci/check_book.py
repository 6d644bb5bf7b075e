"""Check the book of the whole course: python .ci/check_book.py BOOK [PICTURES]. PICTURES: a folder for screenshots.

First what tests/test_book.py holds against a small course. Then in headless Chromium, at 1280 and 360 pixels, light
and dark: no error on the console, no request but for files of the book, nothing wider than the page, contrast of all
text at least 4.5 to 1, a search that finds, arrow keys, copy buttons, and tips.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_book  # noqa: E402

import lessons  # noqa: E402

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
INSIDE = ("file:", "data:")
PAGES = {
    "first": "index.html",
    "lesson": "34-paged-cache.html",
    "code": "07-top-p.html#main",
    "file": "34-paged-cache.infer.html",
    "exercises": "exercises.html",
    "search": "search.html?q=preemption",
}

# The smallest contrast of any text with the nearest background behind it (WCAG 2.1, 1.4.3), and whose it is.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => (v * a + below[i] * (255 - a)) / 255);
  const background = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 255 ? own.slice(0, 3) : over(own, background(element.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let worst = [100, ""];
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.push(at.tagName + "." + at.className);
    const key = chain.join(" ");
    if (seen.has(key)) continue;
    seen.add(key);
    const below = background(element);
    const text = over(rgba(getComputedStyle(element).color), below);
    const [dark, light] = [luminance(text), luminance(below)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < worst[0]) worst = [ratio, key.slice(0, 80) + ": " + walker.currentNode.data.trim().slice(0, 30)];
  }
  return worst;
}"""


def check(page, name: str, width: int, scheme: str, problems: list[str]) -> None:
    def must(holds, what) -> None:
        if not holds:
            problems.append(f"{name}, {width} pixels, {scheme}: {what}")

    wide = page.evaluate("document.documentElement.scrollWidth")
    must(wide <= width, f"the page is {wide} pixels wide")
    page.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    wide = page.evaluate("document.documentElement.scrollWidth")
    must(wide <= width, f"with all that is folded open it is {wide} pixels wide")
    contrast, where = page.evaluate(CONTRAST)
    must(contrast >= 4.5, f"contrast {contrast:.2f} at {where}")
    if name == "first":
        page.locator(".story .token").nth(20).hover()
        must(page.locator(".story .tip").nth(20).is_visible(), "no tip")
        box = page.locator(".story .tip").nth(20).bounding_box()
        must(box["x"] >= 0 and box["x"] + box["width"] <= width, "the tip leaves the page")
        must(all(page.locator("img").evaluate_all("all => all.map((its) => its.alt)")), "a picture without a text")
    if name == "lesson":
        copy = page.locator("[data-copy]").count()
        must(copy and page.locator("pre.command button").count() == copy, "copy buttons")
        page.locator("pre.command button").first.click()
        page.locator("pre.command button").first.get_by_text("ed").wait_for(timeout=2000)  # Copied, Selected
        page.keyboard.press("ArrowRight")
        page.wait_for_url("**/35-preemption.html")
        page.keyboard.press("ArrowLeft")
        page.wait_for_url("**/34-paged-cache.html")
    if name == "search":
        links = page.locator("#found a")
        must(links.count() > 1, f"{links.count()} results")
        must(links.first.inner_text().startswith("35-preemption"), f"the first result is {links.first.inner_text()}")
        page.locator("input[name=q]").fill("qwertzuiop")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=qwertzuiop")
        must(page.locator("#found li").count() == 0, "results for what is nowhere")


def main(book: Path, pictures: Path | None) -> int:
    problems = []
    pages = {its.name: its.read_text("utf-8") if its.suffix != ".png" else its.read_bytes() for its in book.iterdir()}
    for oracle in test_book.ORACLES:
        oracle(lessons.read_main()[1], pages)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        for scheme in ("light", "dark"):
            for width, height in ((1280, 900), (360, 780)):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.on("console", lambda note: note.type == "error" and problems.append(f"console: {note.text}"))
                page.on("pageerror", lambda error: problems.append(f"error: {error}"))
                page.on("request", lambda its: its.url.startswith(INSIDE) or problems.append(f"asks for {its.url}"))
                for name, path in PAGES.items():
                    page.goto(f"{book.resolve().as_uri()}/{path}")
                    if pictures:
                        page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png")
                    check(page, name, width, scheme, problems)
                context.close()
        context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 780})
        page = context.new_page()
        page.goto(f"{book.resolve().as_uri()}/34-paged-cache.html")
        if not page.get_by_text("one pool of pages").first.is_visible() or page.locator("button").count():
            problems.append("without JavaScript a lesson does not read")
        browser.close()
    print(*problems or [f"the book: {len(test_book.ORACLES)} checks of its pages, 24 views of 6 in Chromium"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
