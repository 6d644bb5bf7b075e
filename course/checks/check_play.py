"""Checks of the page Play: the same tokens as `generate` with native int8 weights."""

from collections.abc import Callable

import torch
from browser import View

from infer import generate
from loading.load import load_model
from native import use_native
from sampling import SamplingParams
from text.tokenizer import load_encoding

CHECKPOINT = "checkpoints/stories-llama"
LONG = {"max_new_tokens": 300, "ignore_eos": True}  # past the context window, with context shifts
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
RATE = 100  # minimum tokens per second
# Generates and returns the tokens, and checks the data of each pass.
WRITE = """async ([prompt, params]) => {
  window.checked ??= new PageModel();
  await window.checked.load(["stories-llama", "stories-draft"]);
  const found = { tokens: [], text: "", passes: 0, drafts: 0, wrong: 0 };
  const began = performance.now();
  await new Promise((done, fail) =>
    window.checked.write(prompt, params, (event) => {
      if (event.error) fail(new Error(event.error));
      if (event.prompt) found.prompt = event.prompt.map(({ token }) => token);
      for (const { token, text, p, top, logprob } of event.tokens ?? []) {
        found.tokens.push(token);
        found.text += text;
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
# A second write must cancel the first, and stop must end the second.
CANCEL = """() => new Promise((done) => {
  const heard = [0, 0, 0];
  const onEvent = (which) => (event) => {
    heard[which]++;
    if (which === 0 && heard[0] === 5) window.checked.write("One", {}, onEvent(1));
    if (which === 1 && heard[1] === 5) {
      window.checked.stop();
      window.checked.load(["stories-llama"]).then(() => setTimeout(() => done(heard), 200));
    }
  };
  window.checked.write("Once", { max_new_tokens: 400, ignore_eos: true }, onEvent(0));
})"""


def compare(evaluate: Callable, problems: list[str], every: int = 1) -> str:
    """Run every `every`-th of CASES on the open page Play; return its speed in words.

    evaluate: runs a JavaScript function on the page.
    """
    torch.set_num_threads(1)
    model = load_model(CHECKPOINT, torch.int8)
    use_native(model)
    encoding = load_encoding(CHECKPOINT, model.config.vocab_size)
    evaluate(WRITE, ["warm up", {"max_new_tokens": 20}])
    rate = 0.0
    for number, (prompt, params) in enumerate(CASES[::every]):
        ids = encoding.encode(prompt, allowed_special="all")
        wanted = [token for (token,) in generate(model, [ids], SamplingParams(**params))]
        silent = () if params.get("ignore_eos") else model.config.eos_token_ids
        text = encoding.decode([token for token in wanted if token not in silent])
        for draft in ("", ("lookup", "stories-draft")[number % 2]):
            found = evaluate(WRITE, [prompt, params | {"draft": draft}])
            holds = {
                "the tokens equal those of generate": found["tokens"] == wanted,
                "the text equals the text of generate": found["text"] == text,
                "the prompt is encoded": found["prompt"] == (ids or [model.config.bos_token_id]),
                "probabilities are in range": not found["wrong"],
                "drafts occur if and only if requested": bool(found["drafts"]) == bool(draft),
                "each pass yields a token": found["passes"] <= len(wanted),
            }
            problems += [
                f"Play, {prompt!r}, {params}, drafts {draft or 'none'}: not so: {what}"
                for what, so in holds.items()
                if not so
            ]
            if not draft:
                rate = max(rate, len(wanted) / found["seconds"])
    heard = evaluate(CANCEL)
    if heard != [5, 5, 0]:
        problems.append(f"Play: a stopped run continued: {heard}")
    if rate < RATE:
        problems.append(f"Play generates {rate:.0f} tokens/s")
    return f"{rate:.0f} tokens/s"


# Whether the page shows the recording's tokens with their probabilities and alternatives.
SAME = """() => {
  const near = (a, b) => a.token === b.token && Math.abs(a.logprob - b.logprob) < 2e-6 &&
    Math.abs(a.p - b.p) < 2e-6 && a.text === b.text;
  const tokens = RECORDING.tokens;
  return textTokens.length === tokens.length && tokens.every((token, i) =>
    near(token, textTokens[i]) && token.top.every((other, j) => near(other, textTokens[i].top[j])));
}"""
# Whether the bars and texts of the alternatives match the probabilities at the chosen token.
PROBABILITIES = """() => {
  const { top } = textTokens[document.querySelector(".chosen").dataset.index];
  const rows = [...document.querySelectorAll("#alternatives tbody tr")];
  const width = (bar) => bar.getBoundingClientRect().width;
  const whole = width(rows[0].querySelector(".probabilities i")) / Math.exp(top[0].logprob);
  return rows.every((row, i) => {
    const bars = [...row.querySelectorAll(".probabilities i")].map((bar) => width(bar) / whole);
    const probabilities = [Math.exp(top[i].logprob), top[i].p];
    const right = probabilities.every((p, j) => Math.abs(p - bars[j]) < 0.01);
    return right && (row.cells[3].textContent === "cut") === (top[i].p === 0);
  });
}"""
STATUS = "document.querySelector('#status').textContent"
WRITTEN = "#text .token"


def written(page, act) -> list[str]:
    """Return the tokens that the page generates after act()."""
    page.evaluate(f"{STATUS} = ''")
    act()
    page.wait_for_function(f"{STATUS}.includes(' tokens in ')")
    return page.locator(WRITTEN).all_text_contents()


def use(view: View) -> None:
    """Use the page as a reader does: generate, show alternatives, choose one, move a slider."""
    page, must = view.page, view.must
    write = page.locator("#play [type=submit]")
    before = page.locator(WRITTEN).all_text_contents()
    must(len(before) > 100 and page.evaluate(SAME), "the recording is not shown")
    must(page.locator("#stop").is_hidden(), "Stop is shown before a run")
    # Stop while the model is loaded; then the same text as the recording.
    page.evaluate(
        "['#play [type=submit]', '#stop'].map((id) => document.querySelector(id).click())"
    )
    must(written(page, write.click) == before, "it does not write what it shows first")
    must(page.evaluate(SAME), "its numbers differ from the recording")
    page.select_option("#draft", "stories-draft")
    first = written(page, write.click)
    must(first == before, "drafts change the text")
    marks = [page.locator(f"#text .{kind}").count() for kind in ("accepted", "target")]
    must(sum(marks) == len(first) and min(marks) > 20, f"{marks} tokens are marked")
    page.locator(WRITTEN).nth(4).click()
    page.keyboard.press("ArrowRight")
    must(page.locator("#text .chosen").get_attribute("data-index") == "5", "no arrow keys")
    others = page.locator("#alternatives button")
    must(others.count() == 8, f"{others.count()} alternatives")
    must(
        page.evaluate(PROBABILITIES), "the bars of the alternatives do not show their probabilities"
    )
    names = [name.replace("\\n", "") for name in others.all_text_contents()]
    place = next(i for i, name in enumerate(names) if name.strip() != first[5].strip())
    second = written(page, others.nth(place).click)
    must(second[:5] == first[:5], "what is before the choice has changed")
    must(second[5].strip() == names[place].strip() and second[6:] != first[6:], "it is not taken")
    third = written(page, lambda: page.locator("#temperature").fill("0"))
    must(third[:6] == second[:6] and third[6:] != second[6:], "the slider moves nothing")
    page.locator(WRITTEN).nth(4).click()


SLOW = """loadScript("engine.js").then(() => {
  ENGINE.source = ENGINE.source.replace("performance.now() - began", "700 + $&");
})"""


def fail(browser, address: str) -> list[str]:
    """Return the problems of the page without WebAssembly SIMD, and with a model too slow."""
    problems = []
    for script, then, reason in (
        ("WebAssembly.validate = () => false", "0", "this browser has no WebAssembly with SIMD"),
        ("", SLOW, "a token takes 0.7 s"),
    ):
        page = browser.new_page()
        page.add_init_script(script)
        page.goto(address)
        page.evaluate(then)
        page.locator("#play [type=submit]").click()
        page.wait_for_function(f"{STATUS}.includes('does not run')")
        said = page.locator("#status").inner_text()
        made = "This text was generated when the book was built."
        if said != f"The model does not run here: {reason}. {made}":
            problems.append(f"Play: it says {said!r}")
        if not page.evaluate(SAME):
            problems.append("Play: the recording is not shown where the model does not run")
        page.close()
    return problems
