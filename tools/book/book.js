// Copy buttons, the arrow keys and the search. Without this file only these three are missing.
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
      getSelection().selectAllChildren(code); // a browser that lets no file write: Ctrl-C copies it now
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
  if (link && !event.target.matches("pre, div, h4")) location.href = link.href; // those scroll sideways themselves
});

for (const block of document.querySelectorAll("pre, .wide")) {
  if (block.scrollWidth > block.clientWidth) block.tabIndex = 0; // so that the arrow keys move it
}

const here = document.querySelector(".side [aria-current]");
if (here) {
  const side = here.closest("nav");
  side.scrollTop = here.offsetTop - side.clientHeight / 2;
}

// The search. Hyphens and underscores are spaces; a word counts where a word begins with it.

const ALIASES = { "key value": "kv", quantization: "int8", quantisation: "int8", throughput: "tokens/s" };

if (window.SEARCH_INDEX) {
  const query = new URLSearchParams(location.search).get("q") || "";
  document.querySelector("input[name=q]").value = query;
  let asked = plain(query).trim();
  for (const [name, other] of Object.entries(ALIASES)) asked = asked.replace(name, other);
  show(asked.split(/\s+/).filter((word) => /[a-z0-9]/.test(word)), query);
}

function plain(text) {
  return text.toLowerCase().replace(/[-_"'`\u201c\u201d]/g, " ");
}

function beginning(word) {
  const escaped = word.replace(/[^\w]/g, "\\$&");
  return new RegExp(`(?<![a-z0-9])${escaped}`, "g");
}

function count(text, word) {
  return [...text.matchAll(beginning(word))].length;
}

function show(words, query) {
  const line = document.querySelector("#count");
  if (!words.length) {
    line.textContent = "Write a word above: a term, a function, an option.";
    return;
  }
  const hits = window.SEARCH_INDEX.map((entry) => score(entry, words)).filter((hit) => hit.words);
  const whole = hits.filter((hit) => hit.words === words.length);
  const found = (whole.length ? whole : hits).sort((a, b) => b.words - a.words || b.score - a.score);
  const pages = `${found.length} ${found.length === 1 ? "page" : "pages"}`;
  line.textContent = whole.length || !found.length ? `${pages}: ${query}` : `No page has all of ${query}; ${pages} with some of it`;
  for (const { entry, at } of found) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = entry.page;
    link.textContent = entry.title;
    const excerpt = document.createElement("p");
    mark(excerpt, around(entry.text, at), words);
    item.append(link, excerpt);
    document.querySelector("#found").append(item);
  }
}

function score(entry, words) {
  const [title, text] = [plain(entry.title), plain(entry.text)];
  const phrase = words.join(" ");
  const hit = { entry, words: 0, score: 0, at: text.search(beginning(phrase)) };
  for (const word of words) {
    const times = Math.min(count(text, word), 20) + 50 * Math.min(count(title, word), 1);
    hit.words += times > 0;
    hit.score += times;
    if (hit.at < 0) hit.at = text.search(beginning(word));
  }
  const name = plain(entry.page);
  if (beginning(phrase).test(name)) hit.score += 2000 / name.length; // most where the name says little else
  if (words.length > 1) hit.score += 300 * Math.min(count(title, phrase), 1) + 10 * Math.min(count(text, phrase), 20);
  return hit;
}

function around(text, at) {
  const first = at > 60 ? text.indexOf(" ", at - 60) + 1 : 0;
  return (first ? "… " : "") + text.slice(first, first + 220).trim() + " …";
}

function mark(element, text, words) {
  let end = 0;
  const places = words.flatMap((word) => [...plain(text).matchAll(beginning(word))].map((its) => [its.index, its[0].length]));
  for (const [at, length] of places.sort((a, b) => a[0] - b[0])) {
    if (at < end) continue;
    const hit = document.createElement("mark");
    hit.textContent = text.slice(at, at + length);
    element.append(text.slice(end, at), hit);
    end = at + length;
  }
  element.append(text.slice(end));
}
