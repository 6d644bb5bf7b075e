"""Pictures of the reader's own prompt: the same HTML as Python draws from the model of the page."""

import contextlib
import functools
import re
from unittest import mock

import torch

import infer
from book import choosing, recordings
from book.pictures import LIVE, PICTURES
from cache import KVCache
from errors import UserError
from loading.load import load_model
from native import use_native

CHECKPOINTS = {"stories": "checkpoints/stories-llama", "stories-draft": "checkpoints/stories-draft"}
PROMPTS = ("The little dog was", "She said, \"It's <b>\n")
SLUG_PROMPTS = {
    "prompt-lookup": ("One day, Tom saw a cat. One day, Tom", *PROMPTS),
    "kv-cache-dynamic": ("Lily", "Tom's <b>"),
    "kv-cache-static": ("Lily", "Tom's <b>"),
    "variable-batching": ("Lily saw", "Tom and Sue's <b>"),
    "length-penalty": ("They went home and slept.", "They all went to bed.", PROMPTS[1]),
    "fp16-bf16": ("She was very", PROMPTS[1]),
    "top-p-without-sorting": ("Once upon a time", PROMPTS[1]),
    "stop-strings": ("the the the the", PROMPTS[1]),
}
RECORD = {"multinomial": lambda prompt: choosing.record_draws(prompt, 200)}  # else the picture's
STATUS = ".own-prompt [role=status]"
SHOWN = """([body, caption]) => {
  const normal = (html) => {
    const element = document.createElement("div");
    element.innerHTML = html;
    return element.innerHTML;
  };
  const drawing = document.querySelector(".drawing");
  const own = [drawing.innerHTML, document.querySelector("figcaption").innerHTML];
  const data = document.querySelector(".dial script")?.textContent;
  return {
    pairs: [[own[0], normal(body)], [own[1], normal(caption)]],
    text: drawing.ariaLabel,
    dial: data ? JSON.parse(data) : null,
    names: [...document.querySelectorAll(".dial .tok")].map((name) => name.textContent),
  };
}"""


@contextlib.contextmanager
def model_of_the_page():
    """What records a picture runs the model that pages have."""

    @functools.cache
    def load(name: str = "stories"):
        model = load_model(CHECKPOINTS[name], torch.int8)
        use_native(model)
        return model

    @torch.inference_mode()
    def next_logits(text: list[int], name: str = "") -> torch.Tensor:
        return infer.next_logits(load(), [text], KVCache(load()))[0, -1]

    watched = recordings.watch

    @contextlib.contextmanager
    def watch(model):
        logits = model.native.logits

        def noted(storage, spans, keep):
            # C needs no padding; this is what there is without it.
            longest = max(len(span.tokens) for span in spans)
            rows = [[min(at, len(span.tokens) - 1) for at in range(longest)] for span in spans]
            tokens = [[span.tokens[at] for at in row] for span, row in zip(spans, rows)]
            positions = [[span.start + at for at in row] for span, row in zip(spans, rows)]
            seen.append(recordings.Pass(tokens, positions))
            return logits(storage, spans, keep)

        with watched(model) as seen, mock.patch.object(model.native, "logits", noted):
            yield seen

    with (
        mock.patch.object(recordings, "load", load),
        mock.patch.object(recordings, "next_logits", next_logits),
        mock.patch.object(recordings, "watch", watch),
    ):
        yield


def same(one: str, other: str) -> bool:
    """Whether texts are equal, but for the last digit of few numbers, which rounding changes."""
    number = r"-?\d+(?:\.\d+)?"
    if re.split(number, one) != re.split(number, other):
        return False
    apart = 0
    pairs = list(zip(re.findall(number, one), re.findall(number, other)))
    for a, b in pairs:
        digits = len(a.partition(".")[2])
        if abs(float(a) - float(b)) > 1.01 * 10**-digits:
            return False
        apart += a != b
    return apart <= len(pairs) / 50


def check(page, address: str, lessons: list) -> list[str]:
    """Problems of all these pictures, on the pages of these lessons."""
    problems = []
    with model_of_the_page():
        for lesson in lessons:
            slug = lesson.id.partition("-")[2]
            if slug in LIVE:
                page.goto(f"{address}/{lesson.id}.html")
                for prompt in SLUG_PROMPTS.get(slug, PROMPTS):
                    problems += compare(page, slug, prompt)
                problems += refuse(page, slug)
    return problems


def draw(page, prompt: str) -> str:
    """What the page says after it drew the picture of a prompt."""
    page.evaluate(f"document.querySelector('{STATUS}').textContent = ''")
    page.locator(".own-prompt input").evaluate(
        "(input, prompt) => { input.value = prompt; }", prompt
    )
    page.locator(".own-prompt button").click()
    page.wait_for_function(f"/\\.$/.test(document.querySelector('{STATUS}').textContent)")
    return page.locator(STATUS).inner_text()


def compare(page, slug: str, prompt: str) -> list[str]:
    prompt = prompt.replace("\n", " ")  # an input has one line
    said = draw(page, prompt)
    record = RECORD.get(slug, PICTURES[slug].record)(prompt)
    drawing = PICTURES[slug].draw(record)
    found = page.evaluate(SHOWN, [drawing.body, drawing.caption])
    problems = []
    if not said.startswith("Drawn in this page"):
        problems.append(f"says {said!r}")
    for kind, (shown, wanted) in zip(("drawing", "caption"), found["pairs"]):
        if not same(shown, wanted):
            problems.append(f"its {kind} is {shown!r}, not {wanted!r}")
    if not same(found["text"], drawing.text):
        problems.append(f"its text is {found['text']!r}, not {drawing.text!r}")
    if found["dial"]:
        data = re.search(r'json">(.*?)</script>', drawing.live)[1]
        wanted = page.evaluate("JSON.parse", data)
        rows = found["dial"]["logits"], wanted["logits"]
        near = torch.allclose(*map(torch.tensor, rows), atol=1e-3)
        tokens = wanted["tokens"]
        names = [name.replace("\n", "\\n") for name in tokens]
        if not near or found["dial"]["tokens"] != tokens or found["names"] != names:
            problems.append(f"its sliders have {found['dial']['tokens']}, not {tokens}")
    return [f"{slug} of {prompt!r}: {problem}" for problem in problems]


def refuse(page, slug: str) -> list[str]:
    """A prompt that is too long leaves the picture as it was, with the line of Python."""
    before = page.locator(".drawing").inner_html()
    said = draw(page, "the " * 300)
    try:
        PICTURES[slug].record("the " * 300)
        reason = "no error"
    except UserError as error:
        reason = str(error)
    if said != f"The picture stays as it was: {reason}.":
        return [f"{slug} of a long prompt: it says {said!r}, not {reason!r}"]
    if page.locator(".drawing").inner_html() != before:
        return [f"{slug} of a long prompt: the picture has changed"]
    return []
