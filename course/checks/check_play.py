"""The page Play against the repository: the same tokens as `generate` with int8 weights in C."""

import json

import torch

from cache import KVCache
from infer import generate, next_logits
from loading.load import load_model
from loading.tokenizer import load_encoding
from native import use_native
from sampling import SamplingParams, token_logprob

CHECKPOINT = "checkpoints/stories-llama"
LONG = {"max_new_tokens": 300, "ignore_eos": True}  # past the window, which moves
CASES = (
    ("Once upon a time", {"max_new_tokens": 200, "ignore_eos": True}),
    ("Lily and Tom", LONG),
    ('The cat\'s 12 "Ünïcödé" 日本\u0085!\n\n  mats', {"max_new_tokens": 200}),
    ("", {"max_new_tokens": 40}),
    ("Day.<|endoftext|>One", LONG | {"temperature": 1.0, "seed": 1}),
    ("Once upon a time", LONG | {"temperature": 0.8, "top_p": 0.95, "seed": 2}),
    ("Once upon a time", LONG | {"temperature": 1.3, "top_k": 40, "seed": 2**53 - 1}),
    ("Tom", LONG | {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "seed": 4}),
    ("The dog", LONG | {"presence_penalty": 0.7, "frequency_penalty": 0.3}),
    (
        "The dog",
        LONG | {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": -0.5},
    ),
)
RATE = 100  # tokens a second that it writes at least
WAIT = 50  # milliseconds for which the page answers nobody, at most
# Writes a text and returns its tokens; what a pass said is checked on the way.
WRITE = """async ([prompt, params]) => {
  window.checked ??= new PageModel();
  await window.checked.load(["stories-llama", "stories-draft"]);
  const found = { tokens: [], text: "", passes: 0, drafts: 0, wrong: 0, logprobs: [] };
  const began = performance.now();
  await new Promise((done, fail) =>
    window.checked.write(prompt, params, (event) => {
      if (event.error) fail(new Error(event.error));
      if (event.prompt) found.prompt = event.prompt.map(({ token }) => token);
      for (const { token, text, p, top, logprob } of event.tokens ?? []) {
        found.tokens.push(token);
        found.text += text;
        found.logprobs.push([logprob, top.map((each) => [each.token, each.logprob])]);
        const mass = top.reduce((sum, each) => sum + Math.exp(each.logprob), 0);
        const sorted = top.every((each, i) => !i || each.logprob <= top[i - 1].logprob);
        found.wrong += !(p > 0 && p <= 1 && logprob <= 0 && mass <= 1 + 1e-9 && sorted);
      }
      found.passes += Boolean(event.tokens);
      found.drafts += event.drafts?.length ?? 0;
      if ("rest" in event) {
        found.text += event.rest;
        done();
      }
    }),
  );
  found.seconds = (performance.now() - began) / 1000;
  return found;
}"""
# The first of two texts must end where the second begins, and both by what comes after.
CANCEL = """() => new Promise((done) => {
  const heard = [0, 0, 0];
  const hear = (which) => (event) => {
    heard[which]++;
    if (which === 0 && heard[0] === 5) window.checked.write("One", {}, hear(1));
    if (which === 1 && heard[1] === 5) {
      window.checked.stop();
      window.checked.load(["stories-llama"]).then(() => setTimeout(() => done(heard), 200));
    }
  };
  window.checked.write("Once", { max_new_tokens: 400, ignore_eos: true }, hear(0));
})"""


@torch.inference_mode()
def logprobs_agree(model, ids: list[int], written: list[int], found: list) -> bool:
    """Whether those of the page are the repository's, while the text is within the window."""
    written = written[: model.config.block_size - len(ids)]
    text = ids + written[:-1]
    (rows,) = next_logits(model, [text], KVCache(model), keep=len(written))
    for row, token, (logprob, top) in zip(rows, written, found):
        wanted = token_logprob(row, token, len(top))
        pairs = [*zip(wanted.top, top, strict=True), ((0, wanted.logprob), (0, logprob))]
        if any(one[0] != other[0] or abs(one[1] - other[1]) > 1e-9 for one, other in pairs):
            return False
    return True


def compare(page, cases: tuple = CASES) -> tuple[list[str], str]:
    """Problems of the open page Play, and its speed in words."""
    torch.set_num_threads(1)
    model = load_model(CHECKPOINT, torch.int8)
    use_native(model)
    encoding = load_encoding(CHECKPOINT, model.config.vocab_size)
    problems = []
    page.evaluate(WRITE, ["warm up", {"max_new_tokens": 20}])
    rate = 0.0
    for number, (prompt, params) in enumerate(cases):
        ids = encoding.encode(prompt, allowed_special="all")
        wanted = [token for (token,) in generate(model, [ids], SamplingParams(**params))]
        silent = () if params.get("ignore_eos") else model.config.eos_token_ids
        text = encoding.decode([token for token in wanted if token not in silent])
        for draft in ("", ("lookup", "stories-draft")[number % 2]):
            found = page.evaluate(WRITE, [prompt, params | {"draft": draft}])
            what = f"{prompt!r}, {params}, drafts {draft or 'none'}"
            if found["tokens"] != wanted or found["text"] != text:
                same = [a == b for a, b in zip(found["tokens"], wanted)]
                place = same.index(False) if False in same else len(same)
                problems.append(f"{what}: token {place} is not that of generate")
            if found["prompt"] != (ids or [model.config.bos_token_id]):
                problems.append(f"{what}: the prompt is {found['prompt']}")
            if found["wrong"]:
                problems.append(f"{what}: {found['wrong']} tokens whose numbers cannot be")
            if bool(found["drafts"]) != bool(draft) or found["passes"] > len(wanted):
                problems.append(f"{what}: {found['drafts']} drafts, {found['passes']} passes")
            if prompt == CASES[0][0] and not logprobs_agree(model, ids, wanted, found["logprobs"]):
                problems.append(f"{what}: the log-probabilities differ")
            if not draft:
                rate = max(rate, len(wanted) / found["seconds"])
    heard = page.evaluate(CANCEL)
    if heard != [5, 5, 0]:
        problems.append(f"a text that was stopped went on: {heard}")
    if rate < RATE:
        problems.append(f"the page writes {rate:.0f} tokens a second")
    return problems, f"{rate:.0f} tokens/s"


# Whether the text of the page is the recording, and what is said of its tokens, too.
SAME = """() => {
  const near = (a, b) => a.token === b.token && Math.abs(a.logprob - b.logprob) < 2e-6 &&
    Math.abs(a.p - b.p) < 2e-6 && a.text === b.text;
  const tokens = RECORDING.tokens;
  return shown.length === tokens.length && tokens.every((token, i) =>
    near(token, shown[i]) && token.top.every((other, j) => near(other, shown[i].top[j])));
}"""
# Whether the alternatives show, in words and in bars, the chances of the chosen token's.
CHANCES = """() => {
  const { top } = shown[document.querySelector(".chosen").dataset.index];
  const rows = [...document.querySelectorAll("#place tbody tr")];
  const width = (bar) => bar.getBoundingClientRect().width;
  const whole = width(rows[0].querySelector(".chances i")) / Math.exp(top[0].logprob);
  return rows.every((row, i) => {
    const bars = [...row.querySelectorAll(".chances i")].map((bar) => width(bar) / whole);
    const chances = [Math.exp(top[i].logprob), top[i].p];
    const right = chances.every((p, j) => Math.abs(p - bars[j]) < 0.01);
    return right && (row.cells[3].textContent === "cut") === (top[i].p === 0);
  });
}"""
STATUS = "document.querySelector('#status').textContent"
WRITTEN = "#text .token"


def written(page, act) -> list[str]:
    """The tokens of the text that the page writes after this."""
    page.evaluate(f"{STATUS} = ''")
    act()
    page.wait_for_function(f"{STATUS}.includes(' tokens in ')")
    return page.locator(WRITTEN).all_text_contents()


def longest_task(page, act) -> float:
    """The longest that Chromium's main thread of the page computes at a stretch, in milliseconds.

    Processor time: on a busy machine the page waits for others, too.
    """
    browser = page.context.browser
    browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    act()
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        event.get("tdur", 0) / 1000
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in threads
    ]
    return max(tasks, default=0.0)


def use(page) -> list[str]:
    """Write on the page as a reader does: a text, its alternatives, one of these, a slider."""
    problems = []

    def must(holds, what) -> None:
        if not holds:
            problems.append(f"Play: {what}")

    write = page.locator("#play [type=submit]")
    before = page.locator(WRITTEN).all_text_contents()
    must(len(before) > 100 and page.evaluate(SAME), "the recording is not shown")
    # Stop while the model is loaded; then the same text as the recording.
    page.evaluate(
        "['#play [type=submit]', '#stop'].map((id) => document.querySelector(id).click())"
    )
    must(written(page, write.click) == before, "it does not write what it shows first")
    must(page.evaluate(SAME), "its numbers are not those of the recording")
    page.select_option("#draft", "stories-draft")
    first = written(page, write.click)
    must(first == before, "drafts change the text")
    marks = [page.locator(f"#text .{kind}").count() for kind in ("accepted", "own")]
    must(sum(marks) == len(first) and min(marks) > 20, f"{marks} tokens are marked")
    page.locator(WRITTEN).nth(4).click()
    page.keyboard.press("ArrowRight")
    must(page.locator("#text .chosen").get_attribute("data-index") == "5", "no arrow keys")
    others = page.locator("#place button")
    must(others.count() == 8, f"{others.count()} alternatives")
    must(page.evaluate(CHANCES), "the chances of the alternatives are not what was said of them")
    names = [name.replace("\\n", "") for name in others.all_text_contents()]
    place = next(i for i, name in enumerate(names) if name.strip() != first[5].strip())
    second = written(page, others.nth(place).click)
    must(second[:5] == first[:5], "what is before the choice has changed")
    must(second[5].strip() == names[place].strip() and second[6:] != first[6:], "it is not taken")
    third = written(page, lambda: page.locator("#temperature").fill("0"))
    must(third[:6] == second[:6] and third[6:] != second[6:], "the slider moves nothing")
    longest = longest_task(page, lambda: written(page, write.click))
    must(0 < longest <= WAIT, f"while it writes the page answers nobody for {longest:.0f} ms")
    page.locator(WRITTEN).nth(4).click()
    return problems


def fail(browser, address: str) -> list[str]:
    """What the page says, and shows, where it has no model or is too slow."""
    problems = []
    slow = """loadScript("engine.js").then(() => {
      ENGINE.source = ENGINE.source.replace("performance.now() - began", "700 + $&");
    })"""
    cases = (
        ("WebAssembly.validate = () => false", "", "this browser has no WebAssembly with SIMD"),
        ("", slow, "a token takes 0.7 s"),
    )
    for first, then, reason in cases:
        page = browser.new_page()
        page.add_init_script(first)
        page.goto(address)
        if then:
            page.evaluate(then)
        page.locator("#play [type=submit]").click()
        page.wait_for_function(f"{STATUS}.includes('does not run')")
        said = page.locator("#status").inner_text()
        if said != f"The model does not run here: {reason}. This is a recording.":
            problems.append(f"Play: it says {said!r}")
        if not page.evaluate(SAME):
            problems.append("Play: the recording is not shown where the model does not run")
        page.close()
    return problems
