// What pictures of the reader's own prompt are drawn from, in the worker of inference.js: as the
// functions record_* of first_steps.py, choosing.py, penalties.py, searching.py and speculating.py
// return it.
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

  multinomial(models, prompt) {
    const text = encode(models, prompt);
    const probs = samplingProbs(nextLogits(models, text), PLAIN);
    const seeds = Array.from({ length: 200 }, (_, index) => index + 1);
    const ids = seeds.map((seed) => draw(probs, seed, text.length));
    const counts = best(probs, 10).map((id) => ids.filter((other) => other === id).length);
    return { likely: likely(models, probs, 10), counts, drawn: ids.map((id) => textOf(models, id)) };
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
    const [first, second, third] = ["Once upon a", "One day, a girl named", "They went to the"];
    const found = [...new Set([first, second, prompt, third])].map((text) => {
      const logits = nextLogits(models, encode(models, text));
      const probs = samplingProbs(logits, PLAIN);
      let total = 0;
      const mass = [...probs.slice().sort().reverse()].map((p) => (total += p));
      const kept = topP(logits, 0.9).filter((logit) => logit > -Infinity).length;
      return { prompt: text, mass, kept, likely: likely(models, probs, 8) };
    });
    // The one that the second panel shows, and the sliders.
    const apart = found.map(({ kept }) => Math.abs(kept - 5));
    const example = apart.indexOf(Math.min(...apart));
    const logits = nextLogits(models, encode(models, found[example].prompt));
    return { found, example, dial: dial(models, logits) };
  },

  "presence-penalty": (models, prompt) => moved(models, prompt, {}, { presence_penalty: 1 }),

  "frequency-penalty": (models, prompt) =>
    moved(models, prompt, { presence_penalty: 1 }, { frequency_penalty: 0.5 }),

  "repetition-penalty": (models, prompt) => moved(models, prompt, {}, { repetition_penalty: 1.3 }),

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
};

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

function encode({ tokenizer }, prompt, most = 200) {
  const ids = tokenizer.encode(prompt);
  if (ids.length >= 1 && ids.length <= most) return ids;
  throw new UserError(`the prompt has ${ids.length} tokens; this picture shows 1 to ${most}`);
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
