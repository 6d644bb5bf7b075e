// Copy buttons, arrow keys, fades of cut-off code, and the search. Everything else works without
// JavaScript.
"use strict";

for (const code of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this command");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      // Some browsers block the clipboard for local files. Select the code for Ctrl-C.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  code.parentElement.append(button);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.closest("input, textarea, select")) return;
  if (event.key === "/") {
    document.querySelector("input[name=q]").focus();
    event.preventDefault();
  }
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`a[rel=${rel}]`);
  const scrolls = event.target.matches("pre, div, h4"); // these keys scroll it sideways
  if (link && !scrolls) location.href = link.href;
});

// Let arrow keys scroll a block that is wider than its box, and fade its cut-off edge.
function fade(block) {
  const hidden = block.scrollWidth - block.clientWidth;
  if (hidden > 1 && block.matches("pre, .wide, .panel")) block.tabIndex = 0;
  block.classList.toggle("goes-on", hidden - block.scrollLeft > 1);
}

const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => fade(target)));
for (const block of document.querySelectorAll("pre, .wide, .panel, .scroll, .where")) {
  sizes.observe(block); // also fires when a fold around it opens
  block.addEventListener("scroll", () => fade(block), { passive: true });
}

const here = document.querySelector(".side [aria-current]");
if (here) {
  const side = here.closest("nav");
  side.scrollTop = here.offsetTop - side.clientHeight / 2;
}

// The search. A query word matches words that begin with it. A query word whose last part has one
// or two letters, such as top-p, matches whole words only. Hyphens, underscores and spaces are equal.

const ALIASES = {
  "key value": "kv",
  quantization: "int8",
  quantisation: "int8",
  rope: "rotary",
  throughput: "tokens/s",
};

if (window.SEARCH_INDEX) {
  const query = new URLSearchParams(location.search).get("q") || "";
  document.querySelector("input[name=q]").value = query;
  show(termsOf(query), query);
}

function plain(text) {
  return text.toLowerCase().replace(/[-_"'`\u201c\u201d]/g, " ");
}

// Return the words of a query, normalised like `plain` texts.
function termsOf(query) {
  let asked = query.toLowerCase().trim();
  for (const [name, other] of Object.entries(ALIASES)) {
    asked = asked.replace(new RegExp(`(?<![a-z0-9])${name}(?![a-z0-9])`, "g"), other);
  }
  const terms = asked.split(/\s+/).map((word) => plain(word).trim().replace(/\s+/g, " "));
  return terms.filter((term) => /[a-z0-9]/.test(term));
}

function beginning(term) {
  const escaped = term.replace(/[^\w]/g, "\\$&");
  const short = /(?<![a-z0-9])[a-z0-9]{1,2}$/.test(term);
  return new RegExp(`(?<![a-z0-9])${escaped}${short ? "(?![a-z0-9])" : "[a-z0-9]*"}`, "g");
}

function count(text, term) {
  return [...text.matchAll(beginning(term))].length;
}

function found(index, terms) {
  const hits = index.map((entry) => score(entry, terms)).filter((hit) => hit.terms);
  const whole = hits.filter((hit) => hit.terms === terms.length);
  const best = (whole.length ? whole : hits).sort((a, b) => b.terms - a.terms || b.score - a.score);
  return { best, some: !whole.length && hits.length > 0 };
}

function show(terms, query) {
  const line = document.querySelector("#count");
  if (!terms.length) {
    line.textContent = "Enter a term, a function or an option above.";
    return;
  }
  const { best, some } = found(window.SEARCH_INDEX, terms);
  const pages = `${best.length} ${best.length === 1 ? "page" : "pages"}`;
  line.textContent = some
    ? `No page has all words of ${query}; ${pages} with some of them`
    : `${pages}: ${query}`;
  for (const { entry, at } of best) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = entry.page;
    link.textContent = entry.title;
    const excerpt = document.createElement("p");
    mark(excerpt, around(entry.text, at), terms);
    item.append(link, excerpt);
    document.querySelector("#found").append(item);
  }
}

function score(entry, terms) {
  const [title, text] = [plain(entry.title), plain(entry.text)];
  const phrase = terms.join(" ");
  const hit = { entry, terms: 0, score: 0, at: text.search(beginning(phrase)) };
  for (const term of terms) {
    const times = Math.min(count(text, term), 20) + 50 * Math.min(count(title, term), 1);
    hit.terms += times > 0;
    hit.score += times;
    if (hit.at < 0) hit.at = text.search(beginning(term));
  }
  const name = plain(entry.page);
  // The most for a page name that contains little else.
  if (beginning(phrase).test(name)) hit.score += 2000 / name.length;
  if (terms.length > 1) {
    hit.score += 300 * Math.min(count(title, phrase), 1);
    hit.score += 10 * Math.min(count(text, phrase), 20);
  }
  return hit;
}

// Return the line with a hit and the following ones, joined by dots, up to 220 letters.
function around(text, at) {
  const start = text.lastIndexOf("\n", Math.max(at, 0) - 1) + 1;
  const first = at - start > 80 ? text.indexOf(" ", at - 60) + 1 : start;
  let end = first + 220;
  if (end < text.length) end = Math.max(text.lastIndexOf(" ", end), first + 100);
  const shown = text.slice(first, end).trim().replace(/\s*\n\s*/g, " \u00b7 ");
  return `${first > start ? "\u2026 " : ""}${shown}${end < text.length ? " \u2026" : ""}`;
}

function mark(element, text, terms) {
  let end = 0;
  const places = terms
    .flatMap((term) => [...plain(text).matchAll(beginning(term))])
    .map((match) => [match.index, match[0].length]);
  for (const [at, length] of places.sort((a, b) => a[0] - b[0])) {
    if (at < end) continue;
    const hit = document.createElement("mark");
    hit.textContent = text.slice(at, at + length);
    element.append(text.slice(end, at), hit);
    end = at + length;
  }
  element.append(text.slice(end));
}
