"""Headless Chromium, and checks common to every page of the book and the server."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tests/book_pages", "course")]

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
SIZES = ((1280, 900), (360, 780))
WIDTH = "document.documentElement.scrollWidth"
OPEN = "document.querySelectorAll('details').forEach((details) => (details.open = true))"
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# Smallest contrast of visible text with its background (WCAG 2.1, 1.4.3), and smallest font size in
# pixels, each with the text.
TEXTS = """() => {
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
  let contrast = [100, ""];
  let size = [100, ""];
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const words = walker.currentNode.data.trim();
    if (!words || element.closest("script, noscript, style, .unseen")) continue;
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.push(at.tagName + "." + at.className);
    const key = chain.join(" ");
    if (seen.has(key)) continue;
    seen.add(key);
    const style = getComputedStyle(element);
    const below = background(element);
    const [dark, light] = [over(rgba(style.color), below), below]
      .map(luminance)
      .sort((a, b) => a - b);
    const where = key.slice(0, 80) + ": " + words.slice(0, 30);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < contrast[0]) contrast = [ratio, where];
    if (parseFloat(style.fontSize) < size[0]) size = [parseFloat(style.fontSize), where];
  }
  return { contrast, size };
}"""


def chromium(play):
    return play.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)


class View:
    """A page of the browser, and the problems found on it.

    problems: list to append to, shared by all views. inside: URL prefix of permitted requests; the
    default is for a book, which loads files. pictures: a folder for screenshots, or None.
    """

    def __init__(
        self,
        browser,
        problems: list[str],
        size: tuple[int, int] = SIZES[0],
        scheme: str = "light",
        inside: str = "file:",
        pictures: Path | None = None,
        **options,
    ):
        self.problems = problems
        self.inside = (inside, "data:", "blob:")
        self.pictures = pictures
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", self.console)
        self.page.on("pageerror", lambda error: self.must(False, f"error: {error}"))
        self.page.on("request", self.request)
        self.resize(size, scheme)

    def resize(self, size: tuple[int, int], scheme: str) -> None:
        self.width = size[0]
        self.name = f"{size[0]}-{scheme}"
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(color_scheme=scheme)

    def console(self, note) -> None:
        # A server may refuse requests or go away; a book must load everything.
        refused = "Failed to load resource" in note.text and self.inside[0] != "file:"
        self.must(note.type != "error" or refused, f"console: {note.text}")

    def request(self, asked) -> None:
        self.must(asked.url.startswith(self.inside), f"asks for {asked.url}")

    def must(self, holds, what) -> None:
        if not holds:
            here = self.page.url.rpartition("/")[2] or "page"
            self.problems.append(f"{here}, {self.name}: {what}")

    def looks(self) -> None:
        """Check that the page fits the width, and that contrast and font size are sufficient."""
        wide = self.page.evaluate(WIDTH)
        self.must(wide <= self.width, f"the page is {wide} pixels wide")
        found = self.page.evaluate(TEXTS)
        self.must(found["contrast"][0] >= 4.5, f"contrast {found['contrast']}")
        self.must(found["size"][0] >= 11, f"text of {found['size']} pixels")

    def picture(self, name: str) -> None:
        if self.pictures:
            self.page.screenshot(path=self.pictures / f"{name}-{self.name}.png")
