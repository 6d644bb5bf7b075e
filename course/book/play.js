// The page Play: a form, the text that model.js generates, and the alternatives of each token.
"use strict";

const find = (id) => document.getElementById(id);
const form = find("play");
const model = new PageModel();
const PROBABILITY_LEVELS = [0.9, 0.5, 0.2, 0.05, 0]; // as in make_book.py
const OFF = {
  top_k: 0,
  top_p: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
  repetition_penalty: 1,
};
const MADE = "This text was generated when the book was built.";
let textTokens = []; // data of each token of the text
let numKept = 0; // leading tokens that the reader fixed by choosing an alternative
let lastRunId = 0; // number of runs started

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function percent(p) {
  if (p === 0) return "cut";
  if (p < 0.0005) return "< 0.1 %";
  return `${(100 * p).toFixed(p < 0.095 ? 1 : 0)} %`;
}

function visible(text) {
  return text === "" || text === "<|endoftext|>" ? "(the end)" : text.replace(/\n/g, "\\n");
}

function parameters() {
  const params = Object.fromEntries(new FormData(form));
  for (const name of Object.keys(params)) if (name !== "draft") params[name] = +params[name];
  return params;
}

// Generate after the kept tokens.
async function write() {
  const runId = ++lastRunId;
  const params = { ...parameters(), logprobs: 8, begin: textTokens.slice(0, numKept).map((t) => t.token) };
  textTokens.length = numKept;
  // Keep the height, so that the sliders below do not jump while the text is regenerated.
  find("text").style.minHeight = `${find("text").offsetHeight}px`;
  find("status").textContent = "Generating …";
  find("stop").hidden = false;
  showCommand(params);
  try {
    await model.load(["stories-llama"]);
    if (params.draft === "stories-draft") await model.load([params.draft]);
  } catch (error) {
    fail(error.message);
    return;
  }
  if (runId !== lastRunId) return;
  const counts = { tokens: 0, passes: 0, drafts: 0, accepted: 0, began: performance.now() };
  counts.byTarget = params.draft ? "target" : ""; // CSS class of tokens that are no drafts
  find("drafted").hidden = !params.draft;
  model.write(find("prompt").value, params, (event) => onEvent(event, counts));
}

// Show the recording and the reason why the model does not run.
function fail(reason) {
  showRecording();
  find("status").textContent = `The model does not run here: ${reason}. ${MADE}`;
  find("stop").hidden = true;
}

function showRecording() {
  numKept = 0;
  textTokens = [...RECORDING.tokens];
  clear(RECORDING.prompt);
}

function onEvent(event, counts) {
  if (event.error) fail(event.error);
  if (event.prompt) clear(event.prompt.map(({ text }) => text).join(""));
  for (const [i, token] of (event.tokens ?? []).entries()) {
    add({ ...token, draft: event.drafts[i], by: i < event.accepted ? "accepted" : counts.byTarget });
  }
  if (event.tokens) {
    counts.passes++;
    counts.tokens += event.tokens.length;
    counts.drafts += event.drafts.length;
    counts.accepted += event.accepted;
  }
  if ("rest" in event) end(event.rest, counts);
}

function end(rest, { tokens, passes, drafts, accepted, began }) {
  find("text").append(rest);
  find("stop").hidden = true;
  const seconds = (performance.now() - began) / 1000;
  const rate = `${Math.round(tokens / seconds)} a second`;
  const each = `${(tokens / passes).toFixed(2)} tokens per pass`;
  const some = drafts ? `; ${accepted} of ${drafts} drafts accepted, ${each}` : "";
  find("status").textContent = `${tokens} tokens in ${seconds.toFixed(2)} s, ${rate}${some}.`;
}

// Show the prompt and the kept tokens.
function clear(prompt) {
  find("text").replaceChildren(prompt.startsWith("<|") ? "" : prompt);
  find("alternatives").hidden = true;
  for (const token of textTokens.splice(0)) add(token);
}

function add(token) {
  const shade = PROBABILITY_LEVELS.findIndex((least) => Math.exp(token.logprob) >= least);
  const element = make("span", { className: `token p${shade}`, tabIndex: textTokens.length ? -1 : 0 });
  element.setAttribute("role", "button");
  element.dataset.index = textTokens.length;
  if (token.by) element.classList.add(token.by);
  const [first, ...rest] = (token.text || "∎").split("\n");
  element.append(first, ...rest.flatMap((line) => [make("br"), line]));
  textTokens.push(token);
  find("text").append(element);
}

// Show the alternatives of a token.
function showAlternatives(element) {
  const index = Number(element.dataset.index);
  const { text, logprob, p, draft, by, top } = textTokens[index];
  for (const other of document.querySelectorAll(".chosen")) other.classList.remove("chosen");
  element.classList.add("chosen");
  element.focus();
  const about = [make("code", {}, visible(text)), ` ${percent(Math.exp(logprob))} by the model`];
  if (by === "reader") about.push("; your choice");
  else about.push(`, ${percent(p)} after filters`);
  if (by === "accepted") about.push(`; drafted with ${percent(draft.q)}`);
  else if (draft) {
    about.push("; the draft ", make("code", {}, visible(draft.text)));
    about.push(`, drafted with ${percent(draft.q)}, was rejected`);
  }
  const head = ["token", "model", "", "after filters"].map((words) =>
    make("th", { textContent: words, scope: "col" }),
  );
  find("alternatives").replaceChildren(
    make("p", { className: "hint" }, ...about, "."),
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...top.map((other) => alternative(other, index))),
    ),
  );
  find("alternatives").hidden = false;
}

function alternative(other, index) {
  const probability = Math.exp(other.logprob);
  const button = make("button", { type: "button" }, make("code", {}, visible(other.text)));
  button.title = "Continue from here with this token";
  button.addEventListener("click", () => {
    textTokens = [...textTokens.slice(0, index), { ...other, top: textTokens[index].top, by: "reader" }];
    if (other.text === "<|endoftext|>") textTokens[index].text = "";
    numKept = index + 1;
    write();
  });
  const bars = make("span", { className: "probabilities" }, make("i"), make("i"));
  bars.firstChild.style.width = `${100 * probability}%`;
  bars.lastChild.style.width = `${100 * other.p}%`;
  return make(
    "tr",
    {},
    make("td", {}, button),
    make("td", { className: "count", textContent: percent(probability) }),
    make("td", {}, bars),
    make("td", { className: "count", textContent: percent(other.p) }),
  );
}

// Show the command that generates the same text in a clone; none if the reader chose tokens.
function showCommand(params) {
  const words = ["python infer.py --model checkpoints/stories-llama --dtype int8 --backend native"];
  words.push(`--prompt='${find("prompt").value.replaceAll("'", `'\\''`)}'`);
  words.push(`--max-new-tokens ${params.max_new_tokens}`);
  if (params.temperature) words.push(`--temperature ${params.temperature} --seed ${params.seed}`);
  else params = { ...params, top_k: OFF.top_k, top_p: OFF.top_p }; // greedy decoding ignores them
  for (const [name, off] of Object.entries(OFF))
    if (params[name] !== off) words.push(`--${name.replaceAll("_", "-")} ${params[name]}`);
  find("command").textContent = words.join(" ");
  find("clone").hidden = numKept > 0;
}

function showValues() {
  for (const output of find("sliders").querySelectorAll("output"))
    output.textContent = find(output.htmlFor.value).value;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  numKept = 0;
  find("text").style.minHeight = "";
  write();
});

find("prompt").addEventListener("input", () => {
  numKept = 0;
  showCommand(parameters());
});

// A moved slider regenerates the text.
find("sliders").addEventListener("input", () => {
  showValues();
  if (form.checkValidity()) write();
});

find("stop").addEventListener("click", () => {
  model.stop();
  lastRunId++;
  find("stop").hidden = true;
  find("status").textContent = "Stopped.";
});

find("text").addEventListener("click", ({ target }) => {
  const element = target.closest("[data-index]");
  if (element) showAlternatives(element);
});

find("text").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Enter: 0, " ": 0 }[event.key];
  const index = Number(event.target.dataset.index) + step;
  const element = find("text").querySelector(`[data-index="${index}"]`);
  if (!element) return;
  event.preventDefault();
  showAlternatives(element);
});

showValues();
showRecording();
showCommand(parameters());
find("status").textContent =
  `${MADE} Generate or a slider loads the model, 6 MB, and generates a new one.`;
