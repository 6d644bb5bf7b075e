// Pictures of the reader's own prompt: what records.js returns, drawn as draw.py, first_steps.py,
// choosing.py, penalties.py, caching.py, searching.py, scoring.py, speculating.py and tokenizing.py
// draw it when the book is made.
"use strict";

{
  // Pieces, as in draw.py. All are HTML.

  const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;" };
  const escape = (text) => text.replace(/[&<>"']/g, (found) => ENTITIES[found]);

  function token(text, kind = "") {
    const shown = escape(text.replaceAll("\n", "\\n")) || "&empty;";
    return `<code class="tok${kind && ` ${kind}`}">${shown}</code>`;
  }

  function percent(p) {
    const whole = p === 1 || (p >= 0.0995 && p < 0.995);
    return `${(100 * p).toFixed(whole ? 0 : 1)}\u00a0%`;
  }

  const signed = (number, digits) => number.toFixed(digits).replace("-", "\u2212");
  const short = (number) => general(number, 6);

  // As Python's :g.
  function general(number, digits) {
    const near = Number(number.toPrecision(digits));
    const small = near !== 0 && Math.abs(near) < 1e-4;
    return small ? near.toExponential().replace(/-(\d)$/, "-0$1") : String(near);
  }

  const tenth = (number) => Number(number.toFixed(1));
  const thousands = (number) => number.toLocaleString("en");

  // As Python's repr.
  function quoted(text) {
    const shown = text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
    const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
    return mark + (mark === "'" ? shown.replaceAll("'", "\\'") : shown) + mark;
  }

  const segment = (share, kind) =>
    share ? `<i class="bar ${kind}" style="width:${(100 * share).toFixed(2)}%"></i>` : "";

  function bars(rows, largest) {
    largest ??= Math.max(...rows.flatMap(([, length, , , second]) => [length, second ?? 0])) || 1;
    const width = (length) => ((100 * length) / largest).toFixed(2);
    const shown = rows.map(([name, length, words, kind, second]) => {
      let bar = segment(length / largest, kind);
      if (second !== undefined) bar += `<b class="tick" style="left:${width(second)}%"></b>`;
      const value = `<td class="value">${words}</td>`;
      return `<tr><th scope="row">${name}</th><td>${bar}</td>${value}</tr>`;
    });
    return `<table class="bars">${shown.join("")}</table>`;
  }

  function rowsOf(rows) {
    const shown = rows.map(
      ([name, drawing, words]) =>
        `<tr><th scope="row">${name}</th><td>${drawing}</td><td class="value">${words}</td></tr>`,
    );
    return `<table class="rows">${shown.join("")}</table>`;
  }

  function squares(kinds, size) {
    const body = kinds.map((kind, x) => kind && box(x * size, 1, size - 2, size - 2, kind));
    return svg(kinds.length * size, size, body.join(""));
  }

  function key(kinds) {
    const items = Object.entries(kinds).map(
      ([kind, words]) => `<li><i class="${kind}"></i>${escape(words)}</li>`,
    );
    return `<ul class="key">${items.join("")}</ul>`;
  }

  function panel(title, body, note = "") {
    const below = note && `<p class="note">${note}</p>`;
    return `<div class="panel"><p class="title">${title}</p>${body}${below}</div>`;
  }

  const panels = (...parts) => `<div class="panels">${parts.join("")}</div>`;

  function svg(width, height, body, kind = "plain") {
    const [w, h] = [short(width), short(height)];
    const size = `width="${w}" height="${h}" viewBox="0 0 ${w} ${h}"`;
    return `<svg class="${kind}" ${size} aria-hidden="true">${body}</svg>`;
  }

  function box(x, y, width, height, kind) {
    const [a, b, w, h] = [x, y, width, height].map(short);
    return `<rect class="${kind}" x="${a}" y="${b}" width="${w}" height="${h}"/>`;
  }

  function path(points, kind) {
    const places = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    return `<polyline class="line ${kind}" points="${places}"/>`;
  }

  const dot = ([x, y], kind) =>
    `<circle class="${kind}" cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="4.5"/>`;

  function label(x, y, text, kind = "") {
    const words = kind && ` class="${kind}"`;
    return `<text x="${short(x)}" y="${short(y)}"${words}>${escape(text)}</text>`;
  }

  // Lesson 01, as draw_steps of first_steps.py.

  function drawSteps({ prompt, steps }) {
    const rows = steps.map((step, number) => {
      const text = prompt.map((word) => token(word));
      text.push(...steps.slice(0, number).map(({ chosen }) => token(chosen, "old")));
      const three = step.choices.map(([word, logit], rank) => {
        return `<li>${token(word, rank ? "" : "new")}<span>${signed(logit, 1)}</span></li>`;
      });
      return (
        `<tr><th scope="row">${number + 1}</th><td class="text">${text.join("")}</td>` +
        `<td><ol class="best">${three.join("")}</ol></td></tr>`
      );
    });
    const head =
      "<tr><th>step</th><th>the text that goes in</th><th>best three of 4,096 scores</th></tr>";
    const chosen = steps.map((step) => quoted(step.chosen)).join(", ");
    return {
      body:
        `<table class="loop"><thead>${head}</thead><tbody>${rows.join("")}</tbody></table>` +
        '<ul class="key"><li><code class="tok new">taken</code></li>' +
        '<li><code class="tok old">taken in a step before</code></li></ul>' +
        '<p class="note">The number next to a token is its score, the logit.</p>',
      caption:
        "Each step puts the whole text into the model, takes the token with the largest score and " +
        `appends it: after ${steps.length} steps the text is longer by ${steps.length} tokens.`,
      text:
        `A table of ${steps.length} steps after the prompt ${quoted(prompt.join(""))}; chosen: ` +
        `${chosen}.`,
    };
  }

  // Lessons 02 and 03, as draw_ends and draw_windows of first_steps.py.

  function drawEnds({ tokens, chances }) {
    const [width, height, left, top] = [256, 130, 56, 8];
    const count = chances.length;
    const afterSentence = (at) => at > 0 && /[.!?"]$/.test(tokens[at - 1]);
    let body = "";
    for (const [power, words] of [
      [0, "1"],
      [-3, "1/1,000"],
      [-6, "1/10\u2076"],
      [-9, "1/10\u2079"],
    ]) {
      const y = top - (height * power) / 9;
      body +=
        path(
          [
            [left, y],
            [left + width, y],
          ],
          "grid",
        ) + label(left - 5, y + 4, words, "end");
    }
    const step = width / count;
    chances.forEach((p, at) => {
      const tall = tenth(height * Math.max(0, 1 + Math.log10(p) / 9));
      const kind = afterSentence(at) ? "first" : "kept";
      const wide = Number((step - 0.2).toFixed(2));
      body += box(tenth(left + at * step), tenth(top + height - tall), wide, tall, kind);
    });
    for (let at = 0; at < count; at += 50)
      body += label(left + at * step, top + height + 16, String(at), "middle");
    body += label(left + width / 2, top + height + 32, "tokens written", "middle");
    const chart = svg(width + left + 12, height + top + 38, body, "chart");
    const legend = key({ first: "after the end of a sentence", kept: "elsewhere" });
    // Nothing that is possible is said to be 0.
    const chance = (p) => (p >= 0.0005 ? percent(p) : "< 0.1\u00a0%");
    const rows = tokens.map((text, at) => {
      return [token(text), chances[at], escape(chance(chances[at])), ""];
    });
    const peaks = [...chances.keys()].filter((at) => chances[at] >= 0.001);
    const after =
      peaks.length && peaks.every(afterSentence) ? ", all of them after a sentence" : "";
    const end =
      tokens.at(-1) === "<|endoftext|>"
        ? ` At the last it has ${percent(chances.at(-1))}, more than any other: the text ends.`
        : "";
    return {
      body: panels(
        panel("The probability of EOS at each step", chart + legend, "The scale is logarithmic."),
        panel(
          "The last steps: how likely EOS was in the place of each token",
          bars(rows.slice(-9), 1),
        ),
      ),
      caption:
        "The end of a text is a token like any other: EOS, written " +
        `${token("<|endoftext|>")}. It has a probability of 0.1\u00a0% or more at ` +
        `${peaks.length} of ${count} places${after}.${end}`,
      text:
        `A chart of the probability of EOS over ${count} steps, and bars of the last ones: ` +
        `${chances.slice(-2).map(chance).join(", then ")}.`,
    };
  }

  function drawWindows({ size, text }) {
    let rows = "";
    for (let length = size - 1; length < text.length; length++) {
      const start = Math.max(0, length - size);
      const place = (at) => `<td>${token(text[at])}<span>${at - start}</span></td>`;
      const out = text
        .slice(0, start)
        .map((word) => `<td>${token(word, "gone")}<span>out</span></td>`);
      const first = [0, 1, 2].slice(start).map(place);
      const last = [length - 2, length - 1].map(place);
      rows +=
        `<tr><th scope="row">${length}</th>${out.join("")}${first.join("")}` +
        `<td class="dots">&hellip;</td>${last.join("")}<td>${token(text[length], "new")}</td></tr>`;
    }
    const words = "what the model sees, and where";
    const head = `<th>tokens</th><th colspan="6">${words}</th><th>next</th>`;
    return {
      body:
        `<div class="scroll"><table class="windows"><thead><tr>${head}</tr></thead>` +
        `<tbody>${rows}</tbody></table></div>` +
        '<p class="note">Written by a small model, stories-draft, with ' +
        "<code>--ignore-eos</code>.</p>",
      caption:
        `The model sees the last ${size} tokens, its window. In a longer text the first ones fall ` +
        `out, and all others move: ${token(text[1])} stands at position 1, then 0, then nowhere.`,
      text:
        `A table of windows on texts of ${size - 1} to ${text.length - 1} tokens: from ` +
        `${size + 1} on the first token is out and each other token has a smaller position.`,
    };
  }

  // Lessons 04 to 07, as draw_draws, draw_temperatures, draw_top_k and draw_top_p of choosing.py.

  const massOf = (shares) => shares.reduce((total, [, p]) => total + p, 0);

  function drawDraws({ prompt, likely, counts, drawn }) {
    const count = drawn.length;
    const rows = likely.map(([text, p], index) => {
      const times = counts[index];
      return [token(text), p, `${percent(p)}, drawn ${times}`, "", times / count];
    });
    const rest = 1 - massOf(likely);
    const times = count - counts.reduce((total, each) => total + each, 0);
    const words = `${percent(rest)}, drawn ${times}`;
    rows.push(["4,086 others", rest, words, "other", times / count]);
    const chips = drawn.slice(0, 30).map((text) => token(text));
    const [best, p] = likely[0];
    const shown = likely.slice(0, 5).map(([text, share]) => `${quoted(text)} ${percent(share)}`);
    return {
      body: panels(
        panel(
          `After <q>${token(prompt)}</q>: the probabilities, and how often ${thousands(count)} ` +
            "draws took each",
          bars(rows),
          "Bar: probability. Line: share of the draws.",
        ),
        panel(
          "The first 30 draws",
          `<p class="draws">${chips.join(" ")}</p>`,
          `Each draw has a seed of its own, 1 to ${thousands(count)}; the same seed gives the same draw.`,
        ),
      ),
      caption:
        `Greedy decoding takes ${token(best)} each time. A draw takes it ${percent(p)} of the ` +
        "time, and each other token as often as the model finds it likely: " +
        `${new Set(drawn).size} different ones in ${thousands(count)} draws.`,
      text:
        `Bars of the ten most likely tokens (${shown.join(", ")}, ...) beside how often each was ` +
        "drawn.",
    };
  }

  function drawTemperatures({ shares }) {
    const names = ["sharper", "as the model says", "flatter"];
    const parts = shares.map(({ temperature, likely, rest }, index) => {
      const rows = likely.map(([text, p]) => [token(text), p, percent(p), ""]);
      rows.push(["4,090 others", rest, percent(rest), "other"]);
      return panel(`T = ${temperature}: ${names[index]}`, bars(rows, 1));
    });
    const [sharp, plain, flat] = shares;
    const best = plain.likely[0][0];
    const shown = shares.map(
      ({ temperature, likely, rest }) =>
        `T = ${temperature}: ${quoted(best)} ${percent(likely[0][1])}, all but the first six ` +
        percent(rest),
    );
    return {
      body: panels(...parts),
      caption:
        "A temperature T sharpens or flattens the probabilities and never changes their order: " +
        `${token(best)} has ${percent(sharp.likely[0][1])} at T = 0.5 and ` +
        `${percent(flat.likely[0][1])} at T = 2.`,
      text: `Bars of the same tokens three times. ${shown.join("; ")}.`,
    };
  }

  function drawTopK({ k, before, after, kept }) {
    const rest = 1 - massOf(before);
    const others = `${thousands(4096 - before.length)} others`;
    const left = before.map(([text, p], index) => [
      token(text, after[index] ? "" : "gone"),
      p,
      percent(p),
      after[index] ? "" : "off",
    ]);
    const right = before.map(([text], index) => {
      const p = after[index];
      return [token(text, p ? "" : "gone"), p, p ? percent(p) : "0", ""];
    });
    left.push([others, rest, percent(rest), "off"]);
    right.push([others, 0, "0", ""]);
    const largest = Math.max(rest, after[0]);
    const [name, share] = before[0];
    return {
      body: panels(
        panel("At temperature 2; hatched or struck through: what is cut", bars(left, largest)),
        panel(`The same, cut to the ${k} most likely`, bars(right, largest)),
      ),
      caption:
        `Top-k keeps the ${k} most likely tokens of 4,096. At temperature 2 they had ` +
        `${percent(kept)} of the probability and now share all of it; the tail, with the other ` +
        `${percent(1 - kept)}, cannot be drawn.`,
      text:
        `Bars before and after: ${quoted(name)} has ${percent(share)}, then ` +
        `${percent(after[0])}; tokens after the ${k}th have nothing.`,
    };
  }

  function drawTopP({ found }) {
    const p = 0.9;
    const [width, height, left, top] = [250, 180, 46, 10];
    const place = (rank, mass) => [
      left + (width * Math.log(rank)) / Math.log(4096),
      top + height * (1 - mass),
    ];
    let body = "";
    for (const mass of [0, 0.5, 1]) {
      const start = place(1, mass);
      body += path([start, place(4096, mass)], "grid");
      body += label(left - 5, start[1] + 4, `${100 * mass} %`, "end");
    }
    for (const rank of [1, 10, 100, 1000])
      body += label(place(rank, 0)[0], top + height + 16, thousands(rank), "middle");
    body += label(left + width / 2, top + height + 32, "tokens, most likely first", "middle");
    body += path([place(1, p), place(4096, p)], "mark");
    body += label(left + width, place(1, p)[1] + 16, `p = ${p}`, "end");
    let names = "";
    found.forEach(({ prompt, mass, kept }, index) => {
      const kind = ["first", "good", "second", "other"][index];
      const steps = Array.from({ length: 121 }, (_, step) => Math.round(4096 ** (step / 120)));
      const ranks = [...new Set([...steps, kept])].sort((a, b) => a - b);
      body += path(
        ranks.map((rank) => place(rank, mass[rank - 1])),
        kind,
      );
      body += dot(place(kept, mass[kept - 1]), kind);
      names += `<li><i class="${kind}"></i><q>${token(prompt)}</q> keeps ${kept}</li>`;
    });
    const chart = svg(width + left + 12, height + top + 36, body, "chart");
    const example = found.find(({ own }) => own);
    const rows = example.likely.map(([text, share], index) => {
      const kind = index < example.kept ? "" : "off";
      const words = `${percent(share)}, together ${percent(example.mass[index])}`;
      return [token(text, kind && "gone"), share, words, kind];
    });
    const more = example.kept - rows.length;
    const [best, most] = example.likely[0];
    const drawn = percent(Math.min(most / example.mass[example.kept - 1], 1));
    const rest = more > 0 ? `And ${thousands(more)} more. ` : "";
    const shown = found.map(({ prompt, kept }) => `${quoted(prompt)} keeps ${kept}`);
    return {
      body: panels(
        panel(
          "Probability of the most likely tokens, added up",
          `${chart}<ul class="key tall">${names}</ul>`,
          "Each dot is where a curve first reaches p. The scale of ranks is logarithmic.",
        ),
        panel(
          `After <q>${token(example.prompt)}</q>: ${example.kept} stay`,
          bars(rows),
          `${rest}The last that stays crosses ${percent(p)}. Only these are drawn then, ` +
            `${token(best)} with ${drawn}.`,
        ),
      ),
      caption:
        `Top-p keeps the most likely tokens until they have ${percent(p)} together. How many ` +
        "that is depends on how sure the model is: " +
        `${found.map(({ kept }) => thousands(kept)).join(", ")} ` +
        "after these prompts. Top-k would keep the same number after each.",
      text: `Curves of the mass of the most likely tokens over their number: ${shown.join("; ")}.`,
    };
  }

  // Lessons 09 to 11, as draw_moved of penalties.py.

  function drawMoved({ prompt, before: output, rows, chosen, texts }, rule, seen) {
    const values = rows.flatMap(([, from, to]) => [from, to]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const width = 150;
    const place = (value) => 8 + ((width - 16) * (value - low)) / (high - low || 1);
    const shown = rows.map(([text, from, to, count]) => {
      const kind = text === chosen[1] ? "new" : text === chosen[0] ? "out" : "";
      const [x, y] = [place(from), place(to)];
      let body = box(0, 8, width, 1, "empty");
      if (from !== to) {
        body += box(Math.min(x, y), 7, Math.abs(x - y), 3, to < from ? "bad" : "good");
      }
      body += dot([x, 8.5], "hollow") + dot([y, 8.5], "first");
      const inPrompt = from === to ? "" : ", in the prompt";
      const times = count > 1 ? `, ${count} times` : count ? ", once" : inPrompt;
      const change = from === to ? "" : ` &rarr; ${signed(to, 1)}`;
      return [token(text, kind), svg(width, 17, body), signed(from, 1) + change + times];
    });
    const goesOn = ["out", "new"].map(
      (kind, index) =>
        `<b>${["without", "with it"][index]}</b> ${token(chosen[index], kind)}` +
        `${escape(texts[index].slice(chosen[index].length))} &hellip;`,
    );
    const moved = rows.filter(([, from, to]) => from !== to).length;
    const before = prompt + output;
    const end = before.length > 60 ? `\u2026${before.slice(-60).replace(/^[^ ]* ?/, "")}` : before;
    const turn =
      chosen[0] === chosen[1]
        ? "In this text no choice changes."
        : `Here ${token(chosen[0])} falls behind ${token(chosen[1])}.`;
    return {
      body: panels(
        panel(
          "The best tokens at the first step that the penalty changes",
          rowsOf(shown),
          `Hollow: the logit before. Full: after the penalty. ${seen}`,
        ),
        panel(
          "What is written",
          `<p class="fork"><q>${escape(end)}</q></p>` +
            goesOn.map((words) => `<p class="fork">${words}</p>`).join(""),
        ),
      ),
      caption: `${rule} ${turn}`,
      text:
        `Logits of ${rows.length} tokens before and after the penalty, which moves ${moved} of ` +
        `them; ${quoted(chosen[1])} is chosen in place of ${quoted(chosen[0])}.`,
    };
  }

  // Lesson 12, as draw_rounded of numbers.py.

  function drawRounded({ token: text, rows }) {
    const [exact, half, brain] = rows.map(([, , value]) => value);
    const off = (value) => general(Math.abs(value - exact), 2);
    const lines = rows.map(([name, bits, value]) => {
      const exponent = name === "float16" ? 5 : 8;
      const kind = (at) => (at === 0 ? "bad" : at <= exponent ? "second" : "first");
      const cells = [...bits].map((bit, at) => `<i class="bit ${kind(at)}">${bit}</i>`);
      const words = value === exact ? "as the model gave it" : `off by ${off(value)}`;
      return (
        `<p class="title">${name}: ${bits.length / 8} bytes, ${general(value, 10)}, ${words}</p>` +
        `<p class="bits">${cells.join("")}</p>`
      );
    });
    const legend = { bad: "sign", second: "exponent: the range", first: "fraction: the digits" };
    const shown = rows.map(([name, , value]) => `${name} ${general(value, 10)}`);
    return {
      body:
        lines.join("") +
        key(legend) +
        `<p class="note">The number is the score of ${token(text)}, its logit. The lesson rounds ` +
        "weights and all that is computed from them, so a whole pass is off by more: its Try " +
        "measures that. Logits are then turned back into float32.</p>",
      caption:
        "Half the bytes, nearly the same number: this one, rounded once, is off by " +
        `${off(half)} in float16, which keeps more digits but ends at 65,504, and by ` +
        `${off(brain)} in bfloat16, which keeps float32&rsquo;s range.`,
      text:
        `The bits of the logit of ${quoted(text)}: sign, exponent and fraction of ` +
        `${shown.join("; ")}.`,
    };
  }

  // Lessons 13 to 16, as draw_computed, draw_storage, draw_hops and draw_ragged of caching.py.

  const repeat = (count, kind) => Array(count).fill(kind);

  function drawComputed({ words, plain, cached }) {
    const size = ([first, end]) => end - first;
    const sizes = [plain, cached].map((spans) => spans.map(size));
    const [all, few] = sizes.map((each) => each.reduce((total, count) => total + count));
    const grid = (spans) =>
      rowsOf(
        spans.map(([first, end], step) => {
          const kinds = [...repeat(first, "kept"), ...repeat(end - first, "first")];
          kinds.push(...repeat(plain.at(-1)[1] - end, ""));
          return [token(words[step]), squares(kinds, 13), String(end - first)];
        }),
      );
    return {
      body:
        panels(
          panel(`Without a cache: ${all} positions`, grid(plain)),
          panel(`With it: ${few} positions`, grid(cached)),
        ) +
        key({ first: "computed", kept: "keys and values kept from before" }) +
        '<p class="note">Each row is a step, each square a position. Attention finds a token by ' +
        "its key, and takes its value: two vectors that each layer makes of each token.</p>",
      caption:
        `For ${words.length} tokens the model computes ${all} positions, or, if it keeps the ` +
        `keys and values that attention reads, ${few}. The text is the same.`,
      text:
        `Two grids. Without a cache the steps compute [${sizes[0].join(", ")}] positions, with ` +
        `it [${sizes[1].join(", ")}].`,
    };
  }

  function drawStorage({ words, filled, room, bytes }) {
    const [grown, fixed] = [[], []];
    let [before, copied] = [0, 0];
    words.forEach((word, step) => {
      const fresh = repeat(filled[step] - before, "first");
      const rest = room - filled[step];
      const kinds = [...repeat(before, "second"), ...fresh, ...repeat(rest, "")];
      const kept = [...repeat(before, "kept"), ...fresh, ...repeat(rest, "empty")];
      grown.push([token(word), squares(kinds, 13), String(before)]);
      fixed.push([token(word), squares(kept, 13), ""]);
      copied += before;
      before = filled[step];
    });
    const legend = {
      first: "written",
      second: "copied",
      kept: "stays where it is",
      empty: "zeros, for later",
    };
    return {
      body:
        panels(
          panel(`Joined to a longer array each time (torch.cat): ${copied} copied`, rowsOf(grown)),
          panel(`One allocation of ${thousands(bytes * room)} bytes: none copied`, rowsOf(fixed)),
        ) + key(legend),
      caption:
        `A cache that grows copies all that it holds in each step: here ${copied} positions of ` +
        `${thousands(bytes)} bytes. One that is allocated for ${room} positions at once only ` +
        "writes the new ones.",
      text:
        `Two grids of a row a step. In the first all held positions are copied, ${copied} in ` +
        `all; in the second the filled part of ${room} positions grows to ${before}.`,
    };
  }

  function drawHops(runs) {
    const counts = runs.map(({ spans }) =>
      spans.reduce((total, [first, end]) => total + end - first, 0),
    );
    const each = runs[0].spans.length;
    const names = [
      `Stride ${runs[0].stride}: the window moves in hops`,
      "Stride 1: lesson 03&rsquo;s window, with the cache",
    ];
    const parts = runs.map((run, index) => {
      const mean = (counts[index] / each).toFixed(1);
      const note = `${thousands(counts[index])} positions, ${mean} a token`;
      return panel(names[index], chartOf(run), note);
    });
    const [few, all] = counts.map(thousands);
    return {
      body:
        panels(...parts) +
        key({ first: "computed in this step", kept: "kept keys and values" }) +
        '<p class="note">Run with the small draft model; positions are those of any model with ' +
        "this window.</p>",
      caption:
        "When the window moves, every kept token gets another position, so all of it is computed " +
        `anew. In hops of ${runs[0].stride} tokens that is seldom: ${few} positions instead of ` +
        `${all}.`,
      text:
        `Two charts of what each of ${each} steps computes. With stride ${runs[0].stride} a line ` +
        `of single positions with a few wide hops, ${few} positions; with stride 1 a wide band, ` +
        `${all} positions.`,
    };
  }

  // Tokens of the text to the right, steps downwards.
  function chartOf({ stride, spans, starts }) {
    const [size, left, top] = [240, 34, 30];
    const ends = spans.map(([, end]) => end);
    const place = (at, step) => [
      tenth(left + (at * size) / ends.at(-1)),
      tenth(top + (step * size) / spans.length),
    ];
    const edge = [...starts.map(place), ...ends.map(place).reverse()];
    const points = edge.map((point) => point.map((number) => number.toFixed(1)).join(","));
    let body = `<polygon class="kept" points="${points.join(" ")}"/>`;
    spans.forEach(([first, end], step) => {
      if (end - first === 1) return;
      const [x, y] = place(first, step);
      body += box(x, y, tenth(place(end, step)[0] - x), stride === 1 ? 0.6 : 2, "first");
    });
    body += path(
      ends.map((end, step) => place(end - 1, step)),
      "first",
    );
    body += label(left + size / 2, 10, "token of the text", "middle");
    body += label(left - 4, top + 6, "step", "end");
    for (let at = 0; at < ends.at(-1); at += 100)
      body += label(place(at, 0)[0], top - 8, String(at), "middle");
    for (let step = 100; step <= spans.length; step += 100)
      body += label(left - 4, place(0, step)[1] + 4, String(step), "end");
    return svg(size + left + 12, size + top + 6, body, "chart");
  }

  function drawRagged({ lengths, prefill, decode }) {
    const width = prefill[0].length;
    const cell = ([text, place], kind) => `<td>${token(text, kind)}<span>${place}</span></td>`;
    const rows = prefill.map((tokens, row) => {
      const cells = tokens.map((each, at) => cell(each, at >= lengths[row] ? "pad" : ""));
      cells.push(...decode.map((pass) => cell(pass[row][0], "new")));
      return `<tr>${cells.join("")}</tr>`;
    });
    const later = decode.map((_, index) => `<th>pass ${index + 2}</th>`).join("");
    const first = `<th colspan="${width}">pass 1: the prompts, ${lengths.length} x ${width}</th>`;
    const padding = lengths.reduce((total, length) => total + width - length, 0);
    return {
      body:
        `<div class="scroll"><table class="windows"><thead><tr>${first}${later}</tr></thead>` +
        `<tbody>${rows.join("")}</tbody></table></div>` +
        '<ul class="key"><li><code class="tok">prompt</code></li>' +
        '<li><code class="tok pad">padding</code></li>' +
        '<li><code class="tok new">new</code></li></ul>' +
        '<p class="note">The number under a token is its position in its text. A hatched box ' +
        `only fills the row, here in ${padding} places: it is the last token once more, at its ` +
        "own position. So it writes the same keys and values, and its result is ignored.</p>",
      caption:
        `${lengths.length} texts in one pass, each as if it were alone. Shorter ones are filled ` +
        "up with copies of their last token, whose results are ignored.",
      text:
        `A table of a batch: rows of [${lengths.join(", ")}] tokens padded to ${width}, then one ` +
        "new token a row in each pass, at positions of its own.",
    };
  }

  // Lesson 20, as draw_tree of searching.py.

  function drawTree({ prompt, steps, greedy, scores, best }) {
    const [wide, tall] = [82, 62];
    const starts = (whole, text) => text.every((word, index) => word === whole[index]);
    let [lines, words] = ["", ""];
    steps.forEach((nodes, step) =>
      nodes.forEach(({ text, parent, score, kept }, place) => {
        const [x, y] = [place * wide + wide / 2, step * tall + 14];
        if (parent !== null) {
          const above = parent * wide + wide / 2;
          const style = starts(best, text) ? "first" : starts(greedy, text) ? "second" : "grid";
          lines +=
            `<path class="line ${style}" d="M${above},${y - 40} ` +
            `C${above},${y - 24} ${x},${y - 28} ${x},${y - 12}"/>`;
        }
        const last = text.at(-1);
        words += label(x, y, last.trim() || quoted(last), `middle ${kept ? "kept" : "gone"}-node`);
        words += label(x, y + 15, signed(score, 2), "middle soft");
      }),
    );
    const width = Math.max(...steps.map((nodes) => nodes.length)) * wide;
    const chart = svg(width, steps.length * tall - 20, lines + words);
    const legend =
      '<ul class="key"><li><i class="first"></i>the text that two beams find</li>' +
      '<li><i class="second"></i>greedy decoding, where it differs</li></ul>';
    const note =
      "From top to bottom the steps; below each token the sum of log-probabilities so far " +
      "(nearer to 0: more probable). Bold: the two that are kept. Grey: dropped.";
    const [one, two] = scores;
    const found =
      best.join("\0") === greedy.join("\0")
        ? "Here both find the same text."
        : `Here it finds one that is ${Math.exp(two - one).toFixed(1)} times as probable.`;
    const fork = (name, score, text) =>
      `<p class="fork"><b>${name}</b> ${signed(score, 2)} ${escape(text.join(""))}</p>`;
    return {
      body: panels(
        panel("Two beams", chart + legend, note),
        panel("What each finds", fork("greedy", one, greedy) + fork("two beams", two, best)),
      ),
      caption:
        "Beam search goes on with the two most probable texts of each step, greedy decoding with " +
        `one. ${found}`,
      text:
        `A tree of ${steps.length} steps after ${quoted(prompt)}. The best text is ` +
        `${quoted(best.join(""))} with ${two.toFixed(2)}; greedy's, ${quoted(greedy.join(""))}, ` +
        `has ${one.toFixed(2)}.`,
    };
  }

  // Lesson 21, as draw_lengths of scoring.py.

  function drawLengths({ texts, won, most }) {
    const name = (text) => token(text.replaceAll("<|endoftext|>", "\u25a0"));
    const scores = texts.map(([, n, total]) => [total, total / n]);
    const worst = [0, 1].map((which) => Math.min(...scores.map((both) => both[which])));
    const rows = texts.map(([text, n], at) => {
      const cells = scores[at].map((score, which) => {
        const wins = won[which] === at;
        const words = wins ? `<b>${signed(score, 2)} wins</b>` : signed(score, 2);
        return `<td>${segment(score / worst[which], wins ? "good" : "kept")}${words}</td>`;
      });
      return `<tr><td>${name(text)}</td><td>${n}</td>${cells.join("")}</tr>`;
    });
    const head = "<th>text</th><th>n</th><th>sum</th><th>sum / n</th>";
    const [[short, few, total], [long, many, other]] = won.map((at) => texts[at]);
    const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;
    const [mean, better] = [signed(total / few, 2), signed(other / many, 2)];
    const shown = texts.map(([text, n, sum]) => `${quoted(text)}: ${n} tokens, ${sum.toFixed(2)}`);
    return {
      body:
        `<table class="scores"><thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody>` +
        '</table><p class="note">\u25a0: the end of the text, a token too. n: tokens; sum: of ' +
        "their log-probabilities, all below 0, so the shortest bar of a column is the best. " +
        `These are the texts that 4 beams find, of at most ${most} tokens. sum is length penalty ` +
        "0, sum / n is 1. With 1 a text that goes on may still come up to its sum of now / " +
        `${most}, so the search ends only when that is too little.</p>`,
      caption:
        won[0] === won[1]
          ? `Here one text, of ${tokens(few)}, wins by its sum and by its mean: ` +
            `${signed(total, 2)} and ${mean}.`
          : `Each token lowers the sum of log-probabilities, so by its sum a text of ` +
            `${tokens(few)} wins. Divided by its length one of ${many} does: ${better} a token ` +
            `against ${mean}.`,
      text:
        `Bars of the sums of ${texts.length} texts, and of these by length: ${shown.join("; ")}. ` +
        `Best: ${quoted(short)} by its sum, ${quoted(long)} by sum / n.`,
    };
  }

  // Lesson 22, as draw_race of searching.py.

  function drawRace({ seed, p: limit, vocab, line, rounds }) {
    const wide = (share) => `width:${(100 * share).toFixed(2)}%`;
    const lines = rounds.map(({ token: text, mass, inside }, number) => {
      const end = number ? Math.min(1, rounds[number - 1].mass) : 1;
      let start = 0;
      const marks = line.map(([, p], index) => {
        const share = Math.min(p, Math.max(end - start, 0));
        start += p;
        return `<i class="bar part${index % 2}" style="${wide(share)}"></i>`;
      });
      marks.push(`<i class="bar other" style="${wide(Math.max(end - start, 0))}"></i>`);
      const verdict = inside ? "inside: it is drawn" : "outside: struck, with all behind it";
      return (
        `<p class="title">Round ${number + 1}: ${token(text)} is the fastest, with ` +
        `${percent(mass)} before it; ${verdict}</p><div class="race"><span class="stack">` +
        `${marks.join("")}</span><b class="limit" style="left:${(100 * limit).toFixed(2)}%"></b>` +
        `<b class="pin ${inside ? "good" : "bad"}" style="left:${(100 * mass).toFixed(2)}%"></b>` +
        "</div>"
      );
    });
    const names = line.slice(0, 5).map(([text, p]) => `${token(text)} ${percent(p)}`);
    const shown = rounds.map(
      ({ token: text, mass }) => `${quoted(text)}, ${percent(mass)} before it`,
    );
    return {
      body:
        `<div class="panel whole">${lines.join("")}<p class="note">A line of length 1: the ` +
        "tokens, each as long as its probability, " +
        `${names.join(" ")}, &hellip;, grey all the others. They are sorted for the eye only: to ` +
        "know what is before a token, the program adds up all that are more probable. What is " +
        "left of the line is still in the race. The mark at the same place of each line: top-p, " +
        `${limit}. Coloured mark: where the fastest token begins. The random numbers are ` +
        "exponential: with them a token is the fastest as often as its probability says.</p></div>",
      caption:
        `Each of ${thousands(vocab)} tokens gets a speed: its probability divided by a random ` +
        "number. Only the fastest is asked whether it is inside top-p: no sorting. " +
        `After ${rounds.length} round${rounds.length > 1 ? "s" : ""} ` +
        `${token(rounds.at(-1).token)} is.`,
      text: `The rounds of the race with seed ${seed}: ${shown.join("; ")}. The last one is drawn.`,
    };
  }

  // Lesson 23, as draw_copied and lines_of of speculating.py.

  function drawCopied({ text, found: [start, end], drafts, verdicts }) {
    const size = end - start;
    const chips = text.map((word, at) => {
      const newest = (start <= at && at < end) || (size > 0 && at >= text.length - size);
      const copied = end <= at && at < end + drafts.length;
      return token(word, newest ? "found" : copied ? "new" : "");
    });
    chips.push(...drafts.map((word) => token(word, "new")));
    const total = (numbers) => numbers.reduce((all, one) => all + one, 0);
    const drafted = total(verdicts.map((each) => each.drafts.length));
    const accepted = total(verdicts.map((each) => each.accepted));
    const count = total(verdicts.map((each) => each.tokens.length));
    const passes = verdicts.length;
    const legend = size
      ? `<ul class="key"><li><code class="tok found">the last ${size} tokens, found before</code>` +
        '</li><li><code class="tok new">what followed there: the drafts</code></li></ul>'
      : "";
    return {
      body: panels(
        panel("The first pass with drafts", `<p class="flow">${chips.join("")}</p>${legend}`),
        panel(`${passes} passes, ${count} tokens`, linesOf(verdicts)),
      ),
      caption: drafted
        ? "No draft model: where the text&rsquo;s last three tokens, or two, occurred before, what " +
          `followed them is the guess. ${accepted} of ${drafted} guessed tokens were accepted.`
        : "No draft model: the last tokens did not occur before, so there is no guess.",
      text:
        `A text of ${text.length} tokens with the place marked that its end repeats, and ` +
        `${passes} passes with ${accepted} of ${drafted} drafts accepted.`,
    };
  }

  function linesOf(verdicts) {
    const lines = verdicts.map(({ drafts, accepted, tokens }) => {
      const kind = (index) => (index < accepted ? "new" : index === accepted ? "out" : "gone");
      const chips = drafts.map((draft, index) => token(draft, kind(index)));
      if (!drafts.length) chips.push("<i>no draft</i>");
      const own = tokens.slice(accepted).map((text) => ` &rarr; ${token(text, "own")}`);
      return `<li>${chips.join("")}${own.join("")}</li>`;
    });
    const legend =
      '<ul class="key"><li><code class="tok new">accepted</code></li>' +
      '<li><code class="tok out">refused</code></li>' +
      '<li><code class="tok gone">not looked at</code></li>' +
      '<li><code class="tok own">the target&rsquo;s own</code></li></ul>';
    return `<ol class="passes">${lines.join("")}</ol>${legend}`;
  }

  // Lesson 46, as draw_held of tokenizing.py.

  function drawHeld({ stop, steps, stopped }) {
    let shown = "";
    const rows = steps.map(([text, fresh, held], index) => {
      const ends = stopped && index === steps.length - 1;
      const chips = ends ? token(stop, "gone") : held && token(held, "held");
      const now = fresh && `<mark class="now">${escape(fresh)}</mark>`;
      const row =
        `<tr><th scope="row">${index + 1}</th><td>${token(text)}</td>` +
        `<td class="text">${escape(shown)}${now}${chips}</td></tr>`;
      shown += fresh;
      return row;
    });
    const head =
      "<thead><tr><th></th><th>the model writes</th><th>the reader sees</th></tr></thead>";
    const longest = (texts) => texts.reduce((a, b) => (b.length > a.length ? b : a), "");
    const waited = steps.slice(0, -1).map(([, , held]) => held);
    const alarm = longest(waited.filter((held, at) => held && steps[at + 1][1].startsWith(held)));
    const twice =
      alarm && ` ${token(alarm)} was held once for nothing, and came out with the next token.`;
    const end = stopped
      ? "When that is complete, the text ends before it."
      : "That never comes, so the end of the text gives back what is held.";
    const words = steps.map(
      ([text, fresh, held]) => `${quoted(text)}: shown ${quoted(fresh)}, held ${quoted(held)}`,
    );
    const most = longest(steps.map(([, , held]) => held));
    return {
      body:
        `<table class="loop held-back">${head}<tbody>${rows.join("")}</tbody></table>` +
        '<ul class="key"><li><mark class="now">new</mark></li><li><code class="tok held">held ' +
        'back: it may become the stop string</code></li><li><code class="tok gone">the stop ' +
        "string, never shown</code></li></ul>" +
        `<p class="note">Stop string: ${token(stop)}.${twice} The model wrote ` +
        `${steps.map(([text]) => text).join("").length} characters, the reader got ` +
        `${shown.length}.</p>`,
      caption:
        "The end of a text is held back while it may become the stop string " +
        `${token(stop)}. ${end}`,
      text:
        `A line a token, up to the stop string ${quoted(stop)}; ${quoted(most)} is held. ` +
        `${words.join("; ")}.`,
    };
  }

  // Lesson 47, as draw_chances of scoring.py.

  function drawChances({ prompt, tokens }) {
    const visible = (text) => text.replaceAll(" ", "\u00b7").replaceAll("\n", "\\n");
    const columns = tokens.map(([text, own, top]) => {
      const rows = top.some(([other]) => other === text) ? top : [...top.slice(0, -1), [text, own]];
      const cells = rows.map(([other, logprob]) => {
        const p = Math.exp(logprob);
        const kind = other === text ? "taken" : "";
        return (
          `<li class="${kind}" style="--w:${p.toFixed(4)}"><code>${escape(visible(other))}</code>` +
          `<span>${percent(p)}</span></li>`
        );
      });
      return `<li><ol>${cells.join("")}</ol><b>${signed(own, 3)}</b></li>`;
    });
    const values = tokens.map(([, own]) => own);
    const total = values.reduce((all, own) => all + own);
    const mean = total / values.length;
    const terms = values.slice(0, 3).map((own) => signed(own, 3));
    const surprise = tokens.reduce((least, each) => (each[1] < least[1] ? each : least));
    const [[unsure, likely]] = surprise[2];
    const instead =
      unsure === surprise[0] ? "" : `, where ${token(unsure)} had ${percent(Math.exp(likely))}`;
    const shown = tokens.map(([text, own]) => `${quoted(text)} ${own.toFixed(3)}`);
    return {
      body:
        `<p class="title">${token(prompt)} goes on, at temperature 1:</p>` +
        `<ol class="lattice">${columns.join("")}</ol>` +
        '<ul class="key"><li>a column: the likeliest tokens of a place</li>' +
        '<li><i class="taken"></i>the token that was drawn</li>' +
        "<li>the stronger the colour, the more probable</li>" +
        "<li>below: its log-probability</li></ul>" +
        `<p class="note">Sum of all ${values.length}: ${terms.join(" ")} \u2026 = ` +
        `${signed(total, 3)}; mean ${signed(mean, 3)}; perplexity exp(${signed(-mean, 3)}) = ` +
        `${Math.exp(-mean).toFixed(2)}: as unsure as among so many equally likely tokens each ` +
        "time.</p>",
      caption:
        `A perplexity of ${Math.exp(-mean).toFixed(2)} says how sure the model was of this text. ` +
        `It was least sure of ${token(surprise[0])}, ` +
        `with ${percent(Math.exp(surprise[1]))}${instead}.`,
      text:
        `After ${quoted(prompt)} the model writes ` +
        `${quoted(tokens.map(([text]) => text).join(""))}, with log-probabilities ${shown.join("; ")}.`,
    };
  }

  const DRAW = {
    "greedy-decoding": drawSteps,
    "eos-handling": drawEnds,
    "context-window": drawWindows,
    multinomial: drawDraws,
    temperature: drawTemperatures,
    "top-k": drawTopK,
    "top-p": drawTopP,
    "presence-penalty": (record) =>
      drawMoved(
        record,
        "Each token of the output loses the penalty, here 1, from its score, the logit, however " +
          "often it is there.",
        "Those that are not in the output do not move.",
      ),
    "frequency-penalty": (record) =>
      drawMoved(
        record,
        "Each token of the output loses the penalty, here 0.5, from its score, the logit, for " +
          "every time that it is there.",
        "A presence penalty of 1 is on in both texts.",
      ),
    "repetition-penalty": (record) =>
      drawMoved(
        record,
        "Each token of prompt and output has its score, the logit, divided by the penalty, here " +
          "1.3 (a negative one is multiplied, so that it falls too).",
        "A large logit loses more than a small one.",
      ),
    "fp16-bf16": drawRounded,
    "kv-cache-dynamic": drawComputed,
    "kv-cache-static": drawStorage,
    "kv-cache-fix": drawHops,
    "variable-batching": drawRagged,
    "beam-search": drawTree,
    "length-penalty": drawLengths,
    "top-p-without-sorting": drawRace,
    "prompt-lookup": drawCopied,
    "stop-strings": drawHeld,
    logprobs: drawChances,
  };

  // The form below a picture, which puts another into its place.

  const model = new PageModel();

  for (const form of document.querySelectorAll("form.own-prompt")) {
    const figure = form.closest("figure");
    const status = form.querySelector("[role=status]");
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      status.textContent = "Drawing …";
      try {
        const { picture, model: name } = form.dataset;
        await model.load([name]);
        const record = await model.ask("record", picture, form.elements.prompt.value);
        show(figure, DRAW[picture](record), record.dial, form.elements.prompt.value);
        status.textContent = `Drawn in this page, by ${name} with int8 weights.`;
      } catch (error) {
        status.textContent = `The picture stays as it was: ${error.message}.`;
      }
    });
    form.hidden = false;
  }

  function show(figure, { body, caption, text }, dial, prompt) {
    const drawing = figure.querySelector(".drawing");
    drawing.innerHTML = body;
    drawing.setAttribute("aria-label", text);
    figure.querySelector("figcaption").innerHTML = caption;
    const form = dial && figure.querySelector(".dial");
    if (!form) return;
    form.querySelector("script").textContent = JSON.stringify(dial);
    form.querySelector("q").textContent = prompt;
    const names = form.querySelectorAll("th");
    dial.tokens.forEach((name, index) => (names[index].innerHTML = token(name)));
    form.dispatchEvent(new Event("input"));
  }
}
