// Pictures of the reader's own prompt: what records.js returns, drawn as draw.py, first_steps.py,
// choosing.py, penalties.py, searching.py and speculating.py draw it when the book is made.
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
  const short = (number) => String(Number(number.toPrecision(6))); // as Python's :g
  const thousands = (number) => number.toLocaleString("en");

  // As Python's repr.
  function quoted(text) {
    const shown = text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
    const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
    return mark + (mark === "'" ? shown.replaceAll("'", "\\'") : shown) + mark;
  }

  function bars(rows, largest) {
    largest ??= Math.max(...rows.flatMap(([, length, , , second]) => [length, second ?? 0])) || 1;
    const width = (length) => ((100 * length) / largest).toFixed(2);
    const shown = rows.map(([name, length, words, kind, second]) => {
      let bar = length ? `<i class="bar ${kind}" style="width:${width(length)}%"></i>` : "";
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
      body: `<table class="loop"><thead>${head}</thead><tbody>${rows.join("")}</tbody></table>`,
      caption:
        "Each step puts the whole text in, takes the token with the largest score and appends it: " +
        `after ${steps.length} steps the text is longer by ${steps.length} tokens.`,
      text:
        `A table of ${steps.length} steps after the prompt ${quoted(prompt.join(""))}; chosen: ` +
        `${chosen}.`,
    };
  }

  // Lessons 04 to 07, as draw_draws, draw_temperatures, draw_top_k and draw_top_p of choosing.py.

  const massOf = (shares) => shares.reduce((total, [, p]) => total + p, 0);

  function drawDraws({ likely, counts, drawn }) {
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
          `The softmax, and how often ${thousands(count)} draws took each`,
          bars(rows),
          "Bar: probability. Line: share of the draws.",
        ),
        panel("The first 30 draws, seeds 1 to 30", `<p class="draws">${chips.join(" ")}</p>`),
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
        `A temperature moves mass and never changes the order: ${token(best)} has ` +
        `${percent(sharp.likely[0][1])} at T = 0.5 and ${percent(flat.likely[0][1])} at T = 2, ` +
        `where the long tail has ${percent(flat.rest)}.`,
      text: `Bars of the same tokens three times. ${shown.join("; ")}.`,
    };
  }

  function drawTopK({ k, before, after, kept }) {
    const rest = 1 - massOf(before);
    const others = `${thousands(4096 - before.length)} others`;
    const left = before.map(([text, p], index) => [
      token(text),
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
        panel("At temperature 2", bars(left, largest)),
        panel(`The same, cut to the ${k} most likely`, bars(right, largest)),
      ),
      caption:
        `Top-k keeps ${k} tokens of 4,096. Here they had ${percent(kept)} of the mass, and now ` +
        `they share all of it: the ${percent(1 - kept)} of the tail cannot be drawn any more.`,
      text:
        `Bars before and after: ${quoted(name)} has ${percent(share)}, then ` +
        `${percent(after[0])}; tokens after the ${k}th have nothing.`,
    };
  }

  function drawTopP({ found, example: chosen }) {
    const p = 0.9;
    const [width, height, left, top] = [250, 180, 42, 10];
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
      body += path(ranks.map((rank) => place(rank, mass[rank - 1])), kind);
      body += dot(place(kept, mass[kept - 1]), kind);
      names += `<li><i class="${kind}"></i><q>${token(prompt)}</q> keeps ${kept}</li>`;
    });
    const chart = svg(width + left + 12, height + top + 36, body, "chart");
    const example = found[chosen];
    const rows = example.likely.map(([text, share], index) => {
      const kind = index < example.kept ? "" : "off";
      const words = `${percent(share)}, together ${percent(example.mass[index])}`;
      return [token(text, kind && "gone"), share, words, kind];
    });
    const note =
      `Before the last that stays they have less than ${percent(p)} together, with it enough.`;
    const shown = found.map(({ prompt, kept }) => `${quoted(prompt)} keeps ${kept}`);
    return {
      body: panels(
        panel(
          "Mass of the most likely tokens, added up",
          `${chart}<ul class="key tall">${names}</ul>`,
          "Each dot is where a curve first reaches p. The scale of ranks is logarithmic.",
        ),
        panel(
          `After <q>${token(example.prompt)}</q>: ${example.kept} stay`,
          bars(rows),
          example.kept < rows.length ? note : "",
        ),
      ),
      caption:
        `Top-p cuts where the mass reaches ${percent(p)}, so how many tokens stay is up to the ` +
        `model: ${found.map(({ kept }) => thousands(kept)).join(", ")} after these prompts. ` +
        "Top-k would cut all of them at one rank.",
      text: `Curves of the mass of the most likely tokens over their number: ${shown.join("; ")}.`,
    };
  }

  // Lessons 09 to 11, as draw_moved of penalties.py.

  function drawMoved({ before, rows, chosen, texts }, rule, seen) {
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
      const times = count > 1 ? `, ${count} times` : count ? ", once" : "";
      const change = from === to ? "" : ` &rarr; ${signed(to, 1)}`;
      return [token(text, kind), svg(width, 17, body), signed(from, 1) + change + times];
    });
    const goesOn = ["out", "new"].map(
      (kind, index) =>
        `<b>${["without", "with it"][index]}</b> ${token(chosen[index], kind)}` +
        `${escape(texts[index].slice(chosen[index].length))} &hellip;`,
    );
    const moved = rows.filter(([, from, to]) => from !== to).length;
    const turn =
      chosen[0] === chosen[1]
        ? "In this text no choice changes."
        : `Here ${token(chosen[0])} falls behind ${token(chosen[1])}.`;
    return {
      body: panels(
        panel(
          "The best tokens at the first step that changes",
          rowsOf(shown),
          `Hollow: the logit before. Full: after the penalty. ${seen}`,
        ),
        panel(
          "What is written",
          `<p class="fork"><q>&hellip;${escape(before.slice(-60))}</q></p>` +
            goesOn.map((words) => `<p class="fork">${words}</p>`).join(""),
        ),
      ),
      caption: `${rule} ${turn}`,
      text:
        `Logits of ${rows.length} tokens before and after the penalty, which moves ${moved} of ` +
        `them; ${quoted(chosen[1])} is chosen in place of ${quoted(chosen[0])}.`,
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
      "From top to bottom the steps; below each token the sum of log-probabilities so far. Bold: " +
      "the two that are kept. Grey: dropped.";
    const [one, two] = scores;
    const fork = (name, score, text) =>
      `<p class="fork"><b>${name}</b> ${signed(score, 2)} ${escape(text.join(""))}</p>`;
    return {
      body: panels(
        panel("Two beams", chart + legend, note),
        panel("What each finds", fork("greedy", one, greedy) + fork("two beams", two, best)),
      ),
      caption:
        "Beam search goes on with the two best texts of each step, so one that begins a little " +
        `worse can still win: ${signed(two, 2)} against greedy's ${signed(one, 2)}.`,
      text:
        `A tree of ${steps.length} steps after ${quoted(prompt)}. The best text is ` +
        `${quoted(best.join(""))} with ${two.toFixed(2)}; greedy's, ${quoted(greedy.join(""))}, ` +
        `has ${one.toFixed(2)}.`,
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
    const legend =
      '<ul class="key"><li><code class="tok found">the newest tokens, and where they occurred' +
      '</code></li><li><code class="tok new">what followed there: the drafts</code></li></ul>';
    return {
      body: panels(
        panel("The first pass with drafts", `<p class="flow">${chips.join("")}</p>${legend}`),
        panel(`${passes} passes, ${count} tokens`, linesOf(verdicts)),
      ),
      caption: drafted
        ? `No draft model: the last ${size} tokens occurred before, and what followed them there ` +
          `is the guess. ${accepted} of ${drafted} were accepted.`
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

  const DRAW = {
    "greedy-decoding": drawSteps,
    multinomial: drawDraws,
    temperature: drawTemperatures,
    "top-k": drawTopK,
    "top-p": drawTopP,
    "presence-penalty": (record) =>
      drawMoved(
        record,
        "Each token that was written already loses 1 from its logit, once.",
        "Those that were not written do not move.",
      ),
    "frequency-penalty": (record) =>
      drawMoved(
        record,
        "Each token loses 0.5 for every time it was written: what is frequent costs more.",
        "A presence penalty of 1 is on in both.",
      ),
    "repetition-penalty": (record) =>
      drawMoved(
        record,
        "Each token of prompt and output has its logit divided by 1.3; below 0, multiplied.",
        "A large logit loses more than a small one.",
      ),
    "beam-search": drawTree,
    "prompt-lookup": drawCopied,
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
        await model.load(["stories-llama"]);
        const record = await model.ask("record", form.dataset.picture, form.elements.prompt.value);
        show(figure, DRAW[form.dataset.picture](record), record.dial);
        status.textContent = "Drawn in this page, by stories-llama with int8 weights.";
      } catch (error) {
        status.textContent = `The picture stays as it was: ${error.message}.`;
      }
    });
    form.hidden = false;
  }

  function show(figure, { body, caption, text }, dial) {
    const drawing = figure.querySelector(".drawing");
    drawing.innerHTML = body;
    drawing.setAttribute("aria-label", text);
    figure.querySelector("figcaption").innerHTML = caption;
    const form = dial && figure.querySelector(".dial");
    if (!form) return;
    form.querySelector("script").textContent = JSON.stringify(dial);
    const names = form.querySelectorAll("th");
    dial.tokens.forEach((name, index) => (names[index].innerHTML = token(name)));
    form.dispatchEvent(new Event("input"));
  }
}
