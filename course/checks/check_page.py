"""Check the server's page in headless Chromium: python course/checks/check_page.py [PICTURES].

PICTURES: a folder for screenshots. The checks run in light mode at 1280 pixels and in dark mode at
360. The console has no errors, all requests go to the server, nothing is wider than the page, text
has a contrast of at least 4.5 to 1 and at least 11 pixels. Eight concurrent requests are batched,
share pages and are preempted, and the page shows the numbers of /metrics. Tips, keys, drafts, stop,
errors, chat and JSON with the allowed tokens of its schema work. The page says why its view of the
engine is not live. The server shuts down without waiting for open pages, and pages reconnect. On a
phone, fields have a font of at least 16 pixels, because the phone would zoom in otherwise. Buttons
are 40 pixels high there, and a tip covers no text. The page works under its
Content-Security-Policy, which blocks injected code.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from browser import DRAWN, ROOT, SIZES, View, chromium
from playwright.sync_api import sync_playwright
from prometheus_client.parser import text_string_to_metric_families

# --gamma is fixed, because the engine otherwise stops drafting when it measures no gain.
OPTIONS = [
    "--model",
    "checkpoints/stories-llama",
    "--num-pages",
    "48",
    "--draft",
    "lookup",
    "--gamma",
    "3",
    "--backend",
    "native",
]

# Totals over all frames, and the last frame, from which the page computes its numbers.
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
# At a phone's width: visible fields and buttons that are too small.
SMALL = """() => [...document.querySelectorAll("button, input, textarea")]
  .filter((element) => element.checkVisibility() && !/radio|range/.test(element.type))
  .filter((element) => element.matches("button")
    ? element.offsetHeight < 40
    : parseFloat(getComputedStyle(element).fontSize) < 16)
  .map((element) => element.name || element.innerText)"""
# Records each line of allowed next tokens that the page shows.
NOTED = """() => {
  window.noted = [];
  const own = SequenceView.prototype.showAllowed;
  SequenceView.prototype.showAllowed = function (place) {
    own.call(this, place);
    window.noted.push(this.next.textContent);
  };
}"""
AGED = """[...document.querySelectorAll("#texts .token")].findIndex((span) =>
  span.tokens.some(({ allowed }) => allowed.count === 7))"""
# Messages of a view about requests beyond its list, requests that left it, and dropped frames.
LEFT_OUT = """async () => {
  const drawn = () => new Promise((done) => setTimeout(done, 50));
  const other = new Player(document.createElement("div"), { ...player.setup });
  document.body.append(other.element);
  const kind = { prompt: 1, tokens: 2, start: 0, computed: 1, work: [0, 0, 0, 0] };
  const row = (number) => ({ ...kind, number, reason: "stop", pages: [] });
  const rows = (from, count) => Array.from({ length: count }, (_, index) => row(from + index));
  const none = { running: [], waiting: [], over: [], preempted: [], cached: [], queued: 0 };
  const frame = { ...player.frames.at(-1), ...none };
  const said = [];
  const more = async () => (await drawn(), said.push(other.listNote.textContent));
  other.add({ ...frame, time: 0, running: rows(1, 32), waiting: rows(33, 40), queued: 100 });
  await more();
  for (const first of [200, 220]) other.add({ ...frame, over: rows(first, 20) });
  other.play(false);
  for (let time = 1; time < 1000; time++) other.add({ ...frame, time });
  other.seek(other.frames.length - 1);
  await more();
  other.seek(0);
  for (let time = 1000; time < 1600; time++) other.add({ ...frame, time });
  await drawn();
  said.push(other.reasonLine.textContent);
  other.close();
  other.element.remove();
  return said;
}"""
# Whether the page lists alternatives in the order of their probability, for either API.
ORDERS = """() => {
  const top = [["a", -1], ["7", -2], ["3", -3]];
  const listed = top.map(([token, logprob]) => ({ token, logprob }));
  return [
    { content: [{ token: "a", logprob: -1, top_logprobs: listed }] },
    { tokens: ["a"], token_logprobs: [-1], top_logprobs: [Object.fromEntries(top)] },
  ].map((logprobs) => String(tokensOf({ logprobs })[0].top) === String(top));
}"""
# Whether an injected event handler runs, and whether a request to another server is possible.
INJECTED = """async () => {
  window.ran = false;
  const host = document.createElement("div");
  host.innerHTML = '<img src="data:," onerror="window.ran = true">';
  document.body.append(host);
  const asked = await fetch("http://127.0.0.2:9/", { mode: "no-cors" })
    .then(() => true, (error) => error.message !== "Failed to fetch");
  await new Promise((done) => setTimeout(done, 100));
  return [window.ran, asked];
}"""
OVER = """() => {
  const [tip, card] = [".tip", "#texts article"].map((name) =>
    document.querySelector(name).getBoundingClientRect());
  return tip.top < card.bottom && card.top < tip.bottom;
}"""
QUIET = "player && player.frames.length && !player.frames.at(-1).running.length && !active.size"


def serve(port: int) -> tuple[subprocess.Popen, str]:
    """Start a server; return its process and its address."""
    command = [sys.executable, "serve.py", "--port", str(port), *OPTIONS]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # leave the other core to the browser
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def read_metrics(address: str) -> dict[str, float]:
    """Return the values of /metrics by name, summed over labels."""
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts[sample.name] = counts.get(sample.name, 0) + sample.value
    return counts


class Check(View):
    """The server's page at one size and in one scheme."""

    def __init__(self, browser, problems, address: str, size, scheme: str, pictures, **options):
        # wait_for_function evaluates a string, which the page's policy forbids; `policy` checks it.
        options |= {"bypass_csp": True}
        super().__init__(browser, problems, size, scheme, address, pictures, **options)
        self.address = address
        self.page.goto(address)
        self.page.wait_for_function("player && player.frames.length")
        self.shows("live")

    def shows(self, state: str) -> None:
        """Wait until the page shows this state."""
        self.page.wait_for_function(f"document.querySelector('#state').innerText === '{state}'")

    def quiet(self) -> None:
        """Wait until no request is active and the page shows the last frame."""
        self.page.wait_for_function(QUIET)
        self.page.evaluate("player.goLive()")
        self.page.evaluate(DRAWN)

    def why(self) -> str:
        """Return the page's reason why the view of the engine is not live."""
        self.page.evaluate(DRAWN)
        return self.page.locator(".player .why").inner_text()

    def figure(self, name: str) -> str:
        """Return the number that the page shows under a name."""
        return self.page.locator(f".figures div:has(dt:text-is('{name}')) dd").inner_text()


def eight(check: Check) -> None:
    """Check eight concurrent requests, and the numbers that the page shows."""
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
    check.must(check.why() == "", f"a paused view says {check.why()}")
    check.picture("paused")
    check.looks()
    check.quiet()
    check.shows("live")
    check.picture("after")
    check.looks()
    totals = page.evaluate(TOTALS)
    after = read_metrics(check.address)
    grown = {name: after[name] - before[name] for name in after}
    check.must(totals["running"] == 8, f"{totals['running']} of 8 requests ran concurrently")
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
    """Check pointer, keys, buttons and invalid values."""
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
    check.must("10 frames a second" in check.why(), f"a slow view says {check.why()}")
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
    for line in (f"seed: must be an integer from 0 to {2**53 - 1}", "top-p: not a number"):
        page.click("button.first")
        found = page.locator("form .error").inner_text()
        check.must(found == line, f"the form says {found}, not {line}")
        page.locator("input[name=seed]").fill("7")
    page.locator("input[name=top_p]").fill("0.95")
    page.locator("input[name=max_tokens]").fill("500")
    page.locator("input[name=temperature]").fill("0")
    page.locator("textarea[name=prompt]").fill("Once upon a time")
    for _ in range(20):  # until a sequence is long enough to be stopped
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
    page.evaluate("player.step(-1)")
    page.click("button.first")
    page.wait_for_function("!active.size")
    check.must("A new request started" in check.why(), f"the view says {check.why()}")


def left_out(check: Check) -> None:
    """Check the messages about requests and frames that the view leaves out."""
    said = check.page.evaluate(LEFT_OUT)
    known = ["and 92 more: the list shows 40, running requests first"]
    known.append("Requests that finished earlier are not listed.")
    known.append("Only the last 1,500 frames are kept; the paused one was dropped.")
    check.must(said == known, f"the view says {said}")


def chat(check: Check) -> None:
    """Check a chat of several turns, one of which fails, and a second chat."""
    page = check.page
    field = page.locator("textarea[name=prompt]")
    page.check("input[value=chat]")
    check.must(field.input_value() == "", "a chat begins with the prompt of the completion mode")
    check.must(page.locator("#system").is_hidden(), "no template for system prompts")
    for temperature, messages in ((0.8, 2), (-1, 2), (0.8, 4)):  # a failed turn adds no messages
        page.locator("input[name=temperature]").fill(str(temperature))
        field.fill("rocket, moon")
        field.press("Enter")
        check.must(page.evaluate("submitButton.disabled || !active.size"), "two replies at a time")
        check.quiet()
        found = page.evaluate("messages.length")
        check.must(found == messages, f"{found} messages of the chat, not {messages}")
        kept = field.input_value()
        check.must((kept != "") == (temperature < 0), f"the field has {kept!r}")
    check.must(page.locator("#texts .error").count() == 1, "the chat fails")
    check.must(page.locator("#texts .message").count() == 3, "what was said is not shown")
    page.check("input[value=text]")
    page.click("button.first")
    page.wait_for_function("!active.size && document.querySelector('#texts .token')")
    page.check("input[value=chat]")
    kept = page.locator("#texts .message").count(), page.evaluate("messages.length")
    check.must(kept == (3, 4), f"after another text {kept} are left of the chat")
    check.looks()
    check.picture("chat")
    field.fill("")
    page.click("button.first")
    check.must(page.locator("#texts .message").count() == 3, "nothing was sent as a message")
    page.click("#anew")
    page.evaluate("roles.push('system'), setMode('chat')")
    page.locator("textarea[name=system]").fill("You write stories.")
    field.fill("rocket")
    page.click("button.first")
    page.locator("#texts .error").wait_for()
    error = page.locator("#texts .error").inner_text()
    check.must("the roles user and assistant only" in error, f"a system prompt: {error}")
    check.looks()
    check.picture("system")
    page.locator("textarea[name=system]").fill("")
    page.click("#anew")
    check.must(page.locator("#texts > *").count() == 0, "a new chat is not empty")
    check.must(field.input_value() == "rocket", "a new chat loses the message")
    page.check("input[value=text]")


def held(check: Check) -> None:
    """Check a sequence constrained by a schema, and the allowed tokens at each position."""
    page = check.page
    page.evaluate("get('constraint').open = true")
    schema = page.locator("textarea[name=schema]")
    schema.fill('{"type": ')
    page.click("button.first")
    error = page.locator("form .error")
    check.must(error.inner_text().startswith("JSON schema: "), f"no JSON: {error.inner_text()}")
    schema.fill('{"type": "objekt"}')
    page.click("button.first")
    page.locator("#texts .error").wait_for()
    schema.fill("")
    page.click("#example")
    check.must(
        "constrained" in page.locator("#constraint summary").inner_text(), "no word of a constraint"
    )
    page.locator("input[name=max_tokens]").fill("200")
    page.locator("input[name=seed]").fill("7")
    page.evaluate(NOTED)
    for kind in ("text", "chat"):
        page.check(f"input[value={kind}]")
        page.evaluate("noted = []")
        page.locator("textarea[name=prompt]").fill("A cat says")
        page.click("button.first")
        page.wait_for_function("!active.size && document.querySelector('#texts .token')")
        check.quiet()
        written = page.locator("#texts .token").all_inner_texts()
        names = json.loads("".join(written)).keys()
        check.must(list(names) == ["name", "pet", "age", "says"], f"the text is {written}")
        noted = page.evaluate("noted")
        check.must(any("next, 1 allowed:" in line for line in noted), f"what is next: {noted}")
        check.must(page.locator("#texts .next").count() == 0, "what is next stays")
        forced = page.locator("#texts .forced")
        check.must(5 < forced.count() < len(written), f"{forced.count()} tokens are forced")
        aged = page.locator("#texts .token").nth(page.evaluate(AGED))
        for token, words in ((forced.first, "1 allowed:"), (aged, "7 allowed:")):
            token.click()
            tip = page.locator(".tip")
            check.must(words in tip.inner_text(), f"the tip is {tip.inner_text()}")
            check.must(tip.locator("s").count() > 0, "no alternative is struck out")
            check.must(not page.evaluate(OVER), "the tip covers the text")
        check.looks()
        check.picture(f"held-{kind}")
        page.evaluate("showTip(null)")
    # Keys keep the schema's order; a JavaScript object would put "10" first.
    page.check("input[value=text]")
    schema.fill('{"enum": [{"b": 12, "10": true}]}')
    page.locator("textarea[name=prompt]").fill("A cat says")
    for most, end in ((9, "incomplete"), (200, "finished")):
        page.locator("input[name=max_tokens]").fill(str(most))
        page.click("button.first")
        page.wait_for_function("!active.size && document.querySelector('#texts .token')")
        state = page.locator("#texts header span").last.inner_text()
        check.must(state.endswith(end), f"of {most} tokens the state is {state}")
    written = page.locator("#texts .token").all_inner_texts()
    check.must("".join(written) == '{"b":12,"10":true}', f"the text is {written}")
    # The state counts all tokens; the last one, an empty EOS, may not be drawn yet.
    count = int(state.split(" tokens")[0].split()[-1])
    page.locator("input[name=max_tokens]").fill(str(count - 1))
    page.click("button.first")
    page.wait_for_function("!active.size && document.querySelector('#texts .token')")
    state = page.locator("#texts header span").last.inner_text()
    check.must(state.endswith("max tokens"), f"of a whole text without an end the state is {state}")
    orders = page.evaluate(ORDERS)
    check.must(orders == [True, True], f"alternatives are in order of their chances: {orders}")
    if check.width < 500:
        small = page.evaluate(SMALL)
        check.must(small == [], f"too small for a phone: {small}")
    page.click("#example")
    check.must(schema.input_value() == "", "the schema stays")
    page.check("input[value=text]")


def policy(browser, problems, address: str) -> None:
    """Check that the page works under its Content-Security-Policy, which blocks everything else."""
    view = View(browser, problems, inside=address)
    page = view.page
    page.goto(address)
    page.locator("#state", has_text="live").wait_for()
    page.click("button.first")
    page.locator("#texts .token").nth(3).wait_for()
    page.evaluate("document.querySelector('#stop').click()")
    refused: list[str] = []
    view.problems = refused  # the following violations are intended
    ran = page.evaluate(INJECTED)
    view.problems = problems
    view.must(ran == [False, False], f"what is put into the page runs, or asks elsewhere: {ran}")
    named = any("Content Security Policy" in line for line in refused)
    view.must(named, "no error says what the policy refused")
    view.context.close()


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
                left_out(check)
                chat(check)
                held(check)
                check.context.close()
            policy(browser, problems, address)
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
            calm.page.wait_for_function("player.reasonLine.innerText.startsWith('Reconnected')")
            browser.close()
    finally:
        process.terminate()
        process.wait(30)
    done = "the server's page in Chromium: eight concurrent requests, a chat, JSON"
    print(*problems or [done], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
