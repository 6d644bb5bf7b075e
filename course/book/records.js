// What pictures of the reader's own prompt are drawn from, in the worker of inference.js: as the
// functions record_* of first_steps.py, choosing.py, penalties.py, caching.py, searching.py,
// scoring.py, speculating.py and tokenizing.py return it.
"use strict";

const PLAIN = { temperature: 1, top_k: 0, top_p: 1 };

QUESTIONS.record = (models, slug, prompt) => RECORDS[slug](models, prompt);

// slug of a lesson -> function of the models and a prompt
const RECORDS = {
  "greedy-decoding"(models, prompt) {
    const text = encode(models, prompt, 12);
    const steps = write(models, prompt, { max_new_tokens: 8 }).map((id, index, written) => {
      const logits = nextLogits(models, [...text, ...written.slice(0, index)]);
      const choices = best(logits, 3).map((other) => [textOf(models, other), logits[other]]);
      return { length: text.length + index, choices, chosen: textOf(models, id) };
    });
    return { prompt: text.map((id) => textOf(models, id)), steps };
  },

  "eos-handling"(models, prompt) {
    const text = encode(models, prompt, 36);
    const [eos] = models.target.config.eos_token_ids;
    const chances = [];
    const tokens = write(models, prompt, {}).map((id) => {
      chances.push(softmax(nextLogits(models, text))[eos]);
      text.push(id);
      return textOf(models, id);
    });
    return { tokens, chances };
  },

  "context-window"(models, prompt) {
    const size = models.target.config.block_size;
    const text = encode(models, prompt);
    const steps = passes(models, text, size + 3 - text.length, { stride: 1 });
    const ids = [...text, ...steps.map(({ id }) => id)];
    return { size, text: ids.map((id) => textOf(models, id)) };
  },

  multinomial(models, prompt) {
    const text = encode(models, prompt);
    const probs = samplingProbs(nextLogits(models, text), PLAIN);
    const seeds = Array.from({ length: 200 }, (_, index) => index + 1);
    const ids = seeds.map((seed) => draw(probs, seed, text.length));
    const counts = best(probs, 10).map((id) => ids.filter((other) => other === id).length);
    return {
      prompt,
      likely: likely(models, probs, 10),
      counts,
      drawn: ids.map((id) => textOf(models, id)),
    };
  },

  temperature(models, prompt) {
    const logits = nextLogits(models, encode(models, prompt));
    const shares = [0.5, 1, 2].map((temperature) => {
      const probs = samplingProbs(logits, { ...PLAIN, temperature });
      const some = likely(models, probs, 6);
      return { temperature, likely: some, rest: 1 - sum(some.map(([, p]) => p)) };
    });
    return { shares, dial: dial(models, logits) };
  },

  "top-k"(models, prompt) {
    const k = 10;
    const logits = nextLogits(models, encode(models, prompt));
    const probs = samplingProbs(logits, { ...PLAIN, temperature: 2 });
    const cut = samplingProbs(logits, { ...PLAIN, temperature: 2, top_k: k });
    const before = likely(models, probs, 14);
    const kept = sum(probs.filter((_, id) => cut[id] > 0));
    const after = best(probs, 14).map((id) => cut[id]);
    return { k, before, after, kept, dial: dial(models, logits) };
  },

  "top-p"(models, prompt) {
    const [first, second, third] = ["Once upon a", "She was very", "They went to the"];
    const found = [...new Set([first, prompt, second, third])].map((text) => {
      const logits = nextLogits(models, encode(models, text));
      const probs = samplingProbs(logits, PLAIN);
      let total = 0;
      const mass = [...probs.slice().sort().reverse()].map((p) => (total += p));
      const kept = topP(logits, 0.9).filter((logit) => logit > -Infinity).length;
      return { prompt: text, mass, kept, likely: likely(models, probs, 8), own: text === prompt };
    });
    return { found, dial: dial(models, nextLogits(models, encode(models, prompt))) };
  },

  "presence-penalty": (models, prompt) => moved(models, prompt, {}, { presence_penalty: 1 }),

  "frequency-penalty": (models, prompt) =>
    moved(models, prompt, { presence_penalty: 1 }, { frequency_penalty: 0.5 }),

  "repetition-penalty": (models, prompt) => moved(models, prompt, {}, { repetition_penalty: 1.3 }),

  "fp16-bf16"(models, prompt) {
    const logits = nextLogits(models, encode(models, prompt));
    const [id] = best(logits, 1);
    const formats = [
      ["float32", 8, 23],
      ["float16", 5, 10],
      ["bfloat16", 8, 7],
    ];
    const rows = formats.map(([name, ...sizes]) => [name, ...rounded(logits[id], ...sizes)]);
    return { token: textOf(models, id), rows };
  },

  "kv-cache-dynamic"(models, prompt) {
    const text = encode(models, prompt, 6);
    const [cached, plain] = [true, false].map((cache) => passes(models, text, 10, { cache }));
    const words = cached.map(({ id }) => textOf(models, id));
    return { words, plain: plain.map(({ span }) => span), cached: cached.map(({ span }) => span) };
  },

  "kv-cache-static"(models, prompt) {
    const text = encode(models, prompt, 6);
    const steps = passes(models, text, 10);
    const { n_layer, n_kv_head, head_dim } = models.target.config;
    return {
      words: steps.map(({ id }) => textOf(models, id)),
      filled: steps.map(({ span: [, end] }) => end),
      room: text.length + steps.length - 1,
      bytes: 4 * n_layer * 2 * n_kv_head * head_dim,
    };
  },

  "kv-cache-fix"(models, prompt) {
    const text = encode(models, prompt, 100);
    return [models.target.config.block_size / 2, 1].map((stride) => {
      const steps = passes(models, text, 500, { stride });
      return {
        stride,
        spans: steps.map(({ span }) => span),
        starts: steps.map(({ start }) => start),
      };
    });
  },

  "variable-batching"(models, prompt) {
    const beside = ["One day, a big dog", "Lily saw"];
    const texts = [prompt, ...beside].map((text) => encode(models, text, 8, 2));
    const lengths = texts.map((ids) => ids.length);
    const places = [...Array(Math.max(...lengths)).keys()];
    const prefill = texts.map((ids) =>
      places.map((at) => Math.min(at, ids.length - 1)).map((at) => [textOf(models, ids[at]), at]),
    );
    const next = (ids) => textOf(models, ...best(nextLogits(models, ids), 1));
    return { lengths, prefill, decode: [texts.map((ids) => [[next(ids), ids.length]])] };
  },

  "beam-search"(models, prompt) {
    const [beams, count] = [2, 5];
    const ids = encode(models, prompt, 100);
    const longer = ({ tokens, score }, parent) => {
      const logits = nextLogits(models, [...ids, ...tokens]);
      const probs = softmax(logits);
      return best(logits, beams).map((id) => {
        return { tokens: [...tokens, id], score: score + Math.log(probs[id]), parent };
      });
    };
    const steps = [];
    let running = [{ tokens: [], score: 0 }];
    while (steps.length < count) {
      const nodes = running.flatMap(longer).sort((a, b) => b.score - a.score);
      running = nodes.slice(0, beams);
      steps.push(
        nodes.map(({ tokens, score, parent }, rank) => {
          const text = tokens.map((id) => textOf(models, id));
          return { text, parent: tokens.length > 1 ? parent : null, score, kept: rank < beams };
        }),
      );
    }
    let alone = { tokens: [], score: 0 };
    while (alone.tokens.length < count) [alone] = longer(alone);
    const [greedy, winner] = [alone, running[0]].map(({ tokens }) =>
      tokens.map((id) => textOf(models, id)),
    );
    return { prompt, steps, greedy, scores: [alone.score, running[0].score], best: winner };
  },

  "length-penalty"(models, prompt) {
    const ids = encode(models, prompt, 60);
    const most = 24;
    const runs = [0, 1].map((penalty) => beamSearch(models, ids, 4, most, penalty));
    const found = new Map();
    for (const each of runs.flat()) found.set(`${each.tokens}`, each);
    const texts = [...found.values()].sort(
      (a, b) => a.tokens.length - b.tokens.length || b.total - a.total,
    );
    return {
      texts: texts.map(({ tokens, total }) => [textOf(models, ...tokens), tokens.length, total]),
      won: runs.map(([{ tokens }]) => texts.indexOf(found.get(`${tokens}`))),
      most,
    };
  },

  "top-p-without-sorting"(models, prompt) {
    const p = 0.5;
    const text = encode(models, prompt);
    const logits = applyTemperature(nextLogits(models, text), 1);
    const probs = softmax(logits);
    const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
    const before = []; // each token, of mass
    order.reduce((mass, id) => (before[id] = mass) + probs[id], 0);
    let [seed, rounds] = [-1, []];
    while (rounds.length !== 3 && seed < 199) {
      const state = splitmix(BigInt(++seed), BigInt(text.length));
      const speeds = probs.map((own, id) => own / noise(state, id));
      rounds = [];
      let left = order;
      while (!rounds.at(-1)?.inside) {
        const id = left.reduce((winner, other) =>
          speeds[other] > speeds[winner] ? other : winner,
        );
        const mass = before[id];
        rounds.push({ token: textOf(models, id), p: probs[id], mass, inside: mass < p });
        left = left.slice(0, left.indexOf(id)); // it and all behind it are out
      }
    }
    const kept = topP(logits, p).filter((logit) => logit > -Infinity).length;
    return { seed, p, kept, vocab: probs.length, line: likely(models, probs, 12), rounds };
  },

  "prompt-lookup"(models, prompt) {
    const text = encode(models, prompt, 120);
    const shown = (tokens) => tokens.map(({ token }) => textOf(models, token));
    const verdicts = [];
    let copied = { drafts: [] }; // the first pass that has drafts
    for (const pass of generate(models, prompt, { max_new_tokens: 40, draft: "lookup" })) {
      if (!pass.tokens) continue;
      const drafts = shown(pass.drafts);
      if (!copied.drafts.length) copied = { ids: [...text], drafts };
      verdicts.push({ drafts, accepted: pass.accepted, tokens: shown(pass.tokens) });
      text.push(...pass.tokens.map(({ token }) => token));
    }
    const { ids, drafts } = copied;
    // Where the newest tokens occurred before, as in lookup.
    let found = [0, 0];
    for (const size of drafts.length ? [2, 3] : []) {
      const newest = ids.slice(-size).join();
      for (let start = 0; start < ids.length - size; start++)
        if (ids.slice(start, start + size).join() === newest) found = [start, start + size];
    }
    return { text: ids.map((id) => textOf(models, id)), found, drafts, verdicts };
  },

  "stop-strings"(models, prompt) {
    encode(models, prompt, 100);
    const { eos_token_ids: eos } = models.target.config;
    const written = write(models, prompt, { max_new_tokens: 24 });
    const shown = written.filter((id) => !eos.includes(id)).map((id) => textOf(models, id));
    const stop = pickStop(shown.join(""));
    const decoder = textDecoder();
    const steps = [];
    let [held, stopped] = ["", false];
    for (const id of written) {
      if (!eos.includes(id)) held += models.tokenizer.text(id, decoder, true);
      stopped = stop !== "" && held.includes(stop);
      let waits = stopped
        ? held.length - held.indexOf(stop)
        : Math.min(stop.length - 1, held.length);
      // What may be the beginning of the stop string is held back.
      while (!stopped && waits > 0 && !held.endsWith(stop.slice(0, waits))) waits--;
      const certain = held.slice(0, held.length - Math.max(waits, 0));
      held = stopped ? "" : held.slice(certain.length);
      steps.push([textOf(models, id), certain, held]);
      if (stopped) break;
    }
    return { stop, steps, stopped };
  },

  logprobs(models, prompt) {
    encode(models, prompt, 100);
    const params = { max_new_tokens: 12, temperature: 1, seed: 5, logprobs: 5 };
    const tokens = [...generate(models, prompt, params)].flatMap((pass) => pass.tokens ?? []);
    const shown = ({ token, logprob }) => [textOf(models, token), logprob];
    return { prompt, tokens: tokens.map((each) => [...shown(each), each.top.map(shown)]) };
  },
};

// The bits of a number in a format, and the value that they stand for. exponent, fraction: how many
// bits it has for these; no number is too large or too small for it.
function rounded(value, exponent, fraction) {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  const rest = 23 - fraction;
  let bits = view.getUint32(0);
  // To the nearest, and from the middle to the even one.
  if (rest) bits += 2 ** (rest - 1) - 1 + ((bits >>> rest) & 1);
  view.setUint32(0, bits - (bits % 2 ** rest));
  const power = ((bits >>> 23) & 255) - 127 + 2 ** (exponent - 1) - 1;
  const binary = (number, count) => number.toString(2).padStart(count, "0");
  const shown = binary(power, exponent) + binary((bits & 0x7fffff) >>> rest, fraction);
  return [`${bits >>> 31}${shown}`, view.getFloat32(0)];
}

// Greedy decoding: of each step the token, where the window begins, and the first position of the
// text that it computes and the one after the last.
function passes({ target }, text, count, { cache = true, stride } = {}) {
  const all = [...text];
  const steps = [];
  while (steps.length < count) {
    if (!cache || !steps.length) target.held = [];
    const start = windowStart(all.length, target.config.block_size, stride);
    const { rows, known } = target.logits(all.slice(start), 1);
    const [id] = best(rows[0], 1);
    steps.push({ id, start, span: [start + known, all.length] });
    all.push(id);
  }
  return steps;
}

// 20-beam-search with the penalty of 21-length-penalty: finished texts, best first.
function beamSearch(models, prompt, beams, most, penalty) {
  const { eos_token_ids: eos } = models.target.config;
  const ends = ({ tokens }) => eos.includes(tokens.at(-1)) || tokens.length === most;
  const wanted = beams * (1 + eos.length);
  let [running, finished, steps] = [[{ tokens: [], total: 0 }], [], 0];
  while (running.length) {
    const longer = running.flatMap(({ tokens, total }) => {
      const probs = softmax(nextLogits(models, [...prompt, ...tokens]));
      return best(probs, wanted).map((id) => {
        return { tokens: [...tokens, id], total: total + Math.log(probs[id]) };
      });
    });
    const found = longer.sort((a, b) => b.total - a.total).slice(0, wanted);
    const length = ++steps;
    for (const each of found.slice(0, beams).filter(ends))
      finished.push({ ...each, score: each.total / length ** penalty });
    finished = finished.sort((a, b) => b.score - a.score).slice(0, beams);
    running = found.filter((each) => !ends(each)).slice(0, beams);
    // A sum can only fall, and its best divisor is that of the longest text.
    const hope = running[0]?.total / (penalty > 0 ? most : length + 1) ** penalty;
    if (finished.length === beams && hope <= finished.at(-1).score) break;
  }
  return finished;
}

// As pick_stop of tokenizing.py.
function pickStop(written) {
  const text = written.replace(/\ufffd+$/, "");
  let [found, longest] = [text.slice(-5).trim(), 2];
  for (let end = 0; end < text.length; end++) {
    for (let start = 0; start < end - longest; start++) {
      const [begun, stop] = [text.slice(start, end), text.slice(start, end + 1)];
      const before = text.slice(0, end - 1).includes(begun);
      if (before && text.indexOf(stop) === start && /^[\p{L}\p{N}]/u.test(begun)) {
        [found, longest] = [stop, end - start];
        break;
      }
    }
  }
  return found;
}

// The step at which a penalty first changes what greedy decoding takes.
function moved(models, prompt, common, own) {
  const ids = encode(models, prompt, 100);
  const params = [common, { ...common, ...own }].map((one) => ({ ...DEFAULTS, ...one }));
  const texts = params.map((one) => write(models, prompt, { ...one, max_new_tokens: 60 }));
  const shorter = Math.min(...texts.map((text) => text.length));
  let at = 0;
  while (at < shorter - 1 && texts[0][at] === texts[1][at]) at++;
  const output = texts[0].slice(0, at);
  const text = [...ids, ...output];
  const logits = nextLogits(models, text);
  const rows = params.map((one) => penalize(logits, one, text, ids.length));
  const shown = [...new Set(rows.flatMap((row) => best(row, 5)))];
  shown.sort((a, b) => rows[0][b] - rows[0][a]);
  return {
    prompt,
    before: textOf(models, ...output),
    rows: shown.map((id) => [
      textOf(models, id),
      rows[0][id],
      rows[1][id],
      output.filter((other) => other === id).length,
    ]),
    chosen: texts.map((written) => textOf(models, written[at])),
    texts: texts.map((written) => textOf(models, ...written.slice(at, at + 14))),
  };
}

// What pictures.js moves its cut through.
function dial(models, logits) {
  const tokens = likely(models, logits, 12).map(([text]) => text);
  return { logits: [...logits.slice().sort().reverse()], tokens };
}

function encode({ tokenizer }, prompt, most = 200, least = 1) {
  const ids = tokenizer.encode(prompt);
  if (ids.length >= least && ids.length <= most) return ids;
  throw new UserError(
    `the prompt has ${ids.length} tokens; this picture shows ${least} to ${most}`,
  );
}

// Something that the reader can put right.
class UserError extends Error {
  toString() {
    return this.message;
  }
}

function nextLogits({ target }, text) {
  return target.logits(text, 1).rows[0];
}

function write(models, prompt, params) {
  return [...generate(models, prompt, params)].flatMap(({ tokens }) =>
    (tokens ?? []).map(({ token }) => token),
  );
}

function textOf({ tokenizer }, ...ids) {
  const decoder = textDecoder();
  return ids.map((id) => tokenizer.text(id, decoder, true)).join("") + decoder.decode();
}

// The most likely tokens, best first.
function likely(models, probs, count) {
  return best(probs, count).map((id) => [textOf(models, id), probs[id]]);
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}
