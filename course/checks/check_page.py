"""Look at the server's page in headless Chromium: python course/checks/check_page.py [PICTURES].

PICTURES: a folder for screenshots. At 1280 pixels, light, and at 360, dark: no error on the
console, no request but to the server, nothing wider than the page, contrast of all text at least
4.5 to 1, and none smaller than 11 pixels. Eight texts at once are batched, shared and preempted,
and the numbers that the page shows are those of /metrics. Then tips, keys, drafts, stop, errors, a
chat, and a server that goes away, at once though somebody watches, and comes back.
"""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from browser import DRAWN, ROOT, SIZES, View, chromium
from playwright.sync_api import sync_playwright
from prometheus_client.parser import text_string_to_metric_families

# Without --gamma the engine itself stops drafting where it measures that drafts do not pay.
OPTIONS = ["--num-pages", "48", "--draft", "lookup", "--gamma", "3", "--backend", "native"]

# Of the last frame and of all frames: what the page shows is made of them.
TOTALS = """() => {
  const frames = player.frames;
  const rows = frames.flatMap((frame) => [...frame.requests.values()]);
  const shared = ({ owners }) => [...owners.values()].filter((ids) => ids.length > 1).length;
  const sum = (index) => rows.reduce((total, row) => total + row.work[index], 0);
  return {
    positions: sum(0), drafted: sum(1), accepted: sum(2), tokens: sum(3),
    preempted: frames.flatMap((frame) => frame.preempted).length,
    shared: Math.max(...frames.map(shared)),
    running: Math.max(...frames.map((frame) => frame.running.length)),
    last: { ...frames.at(-1), requests: null, owners: null },
    marked: document.querySelectorAll("#texts .accepted").length,
  };
}"""
QUIET = "player && player.frames.length && !player.frames.at(-1).running.length && !writing.size"


def serve(port: int) -> tuple[subprocess.Popen, str]:
    """A server, and its address."""
    command = [sys.executable, "serve.py", "--port", str(port), *OPTIONS]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # the browser needs the other core
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def read_metrics(address: str) -> dict[str, float]:
    """The counts of /metrics by their names, of all labels together."""
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts[sample.name] = counts.get(sample.name, 0) + sample.value
    return counts


class Check(View):
    """The server's page at one size and in one scheme."""

    def __init__(self, browser, problems, address: str, size, scheme: str, pictures, **options):
        super().__init__(browser, problems, size, scheme, address, pictures, **options)
        self.address = address
        self.page.goto(address)
        self.page.wait_for_function("player && player.frames.length")
        self.shows("live")

    def shows(self, state: str) -> None:
        """Wait until the page says that this is what it shows."""
        self.page.wait_for_function(f"document.querySelector('#state').innerText === '{state}'")

    def quiet(self) -> None:
        """Wait until nothing is written or computed, and all of it is shown."""
        self.page.wait_for_function(QUIET)
        self.page.evaluate("player.follow()")
        self.page.evaluate(DRAWN)

    def figure(self, name: str) -> str:
        """What the page shows under a name."""
        return self.page.locator(f".figures div:has(dt:text-is('{name}')) dd").inner_text()


def eight(check: Check) -> None:
    """Eight texts at once, and the numbers that are shown of them."""
    page = check.page
    check.looks()
    check.picture("idle")
    before = read_metrics(check.address)
    page.evaluate("get('settings').open = true")
    page.locator("input[name=seed]").fill("7")
    page.click("#eight")
    page.wait_for_function("player.frames.some((frame) => frame.preempted.length)")
    page.evaluate("player.play(false)")
    page.evaluate("player.seek(player.frames.findIndex((frame) => frame.preempted.length))")
    page.evaluate(DRAWN)
    check.shows("paused")
    check.picture("paused")
    check.looks()
    check.quiet()
    check.shows("live")
    check.picture("after")
    check.looks()
    totals = page.evaluate(TOTALS)
    after = read_metrics(check.address)
    grown = {name: after[name] - before[name] for name in after}
    check.must(totals["running"] == 8, f"{totals['running']} of 8 requests ran at once")
    check.must(totals["shared"] >= 2, f"{totals['shared']} pages were shared")
    for mine, counted in {
        "tokens": "generation_tokens_total",
        "preempted": "num_preemptions_total",
        "drafted": "spec_decode_num_draft_tokens_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
    }.items():
        check.must(
            totals[mine] == grown[f"vllm:{counted}"] > 0,
            f"{totals[mine]} {mine}, but {counted} grew by {grown[f'vllm:{counted}']}",
        )
    check.must(0 < totals["marked"] <= totals["accepted"], f"{totals['marked']} drafts are marked")
    counts = page.locator("#texts header span").all_inner_texts()
    written = sum(int(count.split(" tokens")[0].split()[-1]) for count in counts)
    check.must(written == totals["tokens"], f"the texts say {written} tokens")
    last = totals["last"]
    for name, value in {
        "running": "0 of 32",
        "waiting": "0",
        "pages in use": "0 of 48",
        "pages shared": "0",
        "preemptions": f"{last['preemptions']:,}",
        "positions computed": f"{last['positions']:,}",
        "positions found in the cache": f"{last['shared']:,}",
        "drafts accepted": f"{last['accepted']:,} of {last['drafted']:,}",
        "tokens a second": "0",
    }.items():
        check.must(check.figure(name) == value, f"{name}: {check.figure(name)}, not {value}")


def hands(check: Check) -> None:
    """Pointer, keys, buttons and wrong values."""
    page = check.page
    token = page.locator("#texts .token").nth(3)
    token.hover()
    tip = page.locator(".tip")
    check.must(tip.is_visible() and "%" in tip.inner_text(), "no tip")
    check.looks()
    page.mouse.move(5, 5)
    check.must(tip.is_hidden(), "the tip stays")
    page.locator("#texts .text").nth(1).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    at = page.locator("#texts article").nth(1).locator(".token").nth(1)
    check.must("at" in at.get_attribute("class").split(), "arrow keys do not reach a token")
    check.picture("tip")
    page.keyboard.press("Escape")
    check.must(tip.is_hidden(), "Escape leaves the tip")
    page.get_by_role("button", name="Again, slowly").click()
    page.locator(".pool").focus()
    page.wait_for_function("player.frames[player.index].owners.size")
    page.get_by_role("button", name="Pause").click()
    page.locator(".pool").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "document.querySelector('.player [aria-live]').innerText.includes('Page')"
    )
    page.locator(".requests").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelectorAll('.requests .lit').length === 1")
    check.picture("again")
    page.get_by_role("button", name="Now").click()
    check.shows("live")

    page.locator("input[name=top_p]").focus()
    page.keyboard.press("End")
    page.keyboard.type("e")
    page.locator("input[name=seed]").fill(str(2**53))
    for line in (f"seed: it must be a whole number from 0 to {2**53 - 1}", "top-p: not a number"):
        page.click("button.first")
        found = page.locator("form .error").inner_text()
        check.must(found == line, f"the form says {found}, not {line}")
        page.locator("input[name=seed]").fill("7")
    page.locator("input[name=top_p]").fill("0.95")
    page.locator("input[name=max_tokens]").fill("500")
    page.locator("input[name=temperature]").fill("0")
    page.locator("textarea").fill("Once upon a time")
    for _ in range(20):  # until a text is long enough to be stopped
        page.click("button.first")
        page.wait_for_function("document.querySelectorAll('#texts .token').length > 2")
        page.evaluate("document.querySelector('#stop').click()")
        state = page.locator("#texts header span").first.inner_text()
        if state.endswith("stopped"):
            break
    check.must(state.endswith("stopped"), f"a stopped text says {state}")
    check.quiet()
    check.must(check.figure("pages in use") == "0 of 48", "a stopped text keeps its pages")

    page.locator("input[name=temperature]").fill("-1")
    page.click("button.first")
    error = page.locator("#texts .error")
    error.wait_for()
    check.must("temperature" in error.inner_text(), f"the error is {error.inner_text()}")
    check.looks()
    check.picture("wrong")
    page.locator("input[name=temperature]").fill("0.8")
    page.locator("input[name=max_tokens]").fill("60")
    page.check("input[value=chat]")
    page.locator("textarea").fill("rocket, moon")
    for temperature, messages in ((0.8, 2), (-1, 2), (0.8, 4)):  # a turn that fails is none
        page.locator("input[name=temperature]").fill(str(temperature))
        check.must(page.evaluate("go.click(), go.disabled"), "two turns at a time")
        check.quiet()
        found = page.evaluate("messages.length")
        check.must(found == messages, f"{found} messages of the chat, not {messages}")
    check.must(page.locator("#texts .error").count() == 1, "the chat fails")
    check.looks()
    check.picture("chat")


def main(pictures: Path | None = None) -> int:
    problems = []
    process, address = serve(0)
    port = int(address.rsplit(":", 1)[1])
    try:
        with sync_playwright() as play:
            browser = chromium(play)
            for scheme, size in zip(("light", "dark"), SIZES):
                check = Check(browser, problems, address, size, scheme, pictures)
                eight(check)
                hands(check)
                check.context.close()
            still = {"reduced_motion": "reduce"}
            calm = Check(browser, problems, address, SIZES[0], "light", pictures, **still)
            calm.page.click("#eight")
            calm.quiet()
            moving = "document.getAnimations().length"
            calm.must(calm.page.evaluate(moving) == 0, "something moves where nothing should")
            process.terminate()
            process.wait(30)
            calm.page.wait_for_function("document.querySelector('#state').innerText !== 'live'")
            calm.page.click("button.first")
            calm.page.locator("#texts .error").wait_for()
            calm.looks()
            calm.picture("gone")
            process, _ = serve(port)
            calm.shows("live")
            browser.close()
    finally:
        process.terminate()
        process.wait(30)
    print(*problems or ["the server's page in Chromium: eight texts at once, a chat"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
