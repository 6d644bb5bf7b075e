// Inference in plain JavaScript, around the forward pass of native/gpt.c as WebAssembly. Each part
// names the lesson that it comes from. It runs in a worker, so that the page stays responsive, and
// generates the same text as `python infer.py --dtype int8 --seed ...`.
//
// Logits are equal to the last bit. Probabilities are rounded to 53 bits here and to 24 bits in
// Python. So a draw may differ if two scores, or a mass and top-p, are within 1e-7 of each other.
"use strict";

// 00-init: the tokenizer, as in text/tokenizer.py. A byte string has characters up to U+00FF.
class Tokenizer {
  constructor({ tokens, special, pattern }) {
    this.tokens = tokens; // the bytes of each token
    this.ranks = new Map(tokens.map((characters, id) => [characters, id]));
    for (const name of Object.keys(special)) this.ranks.delete(name);
    this.special = special;
    this.pattern = new RegExp(pattern, "gu");
  }

  encode(text) {
    const names = Object.keys(this.special).map((name) => name.replace(/\W/g, "\\$&"));
    return text.split(new RegExp(`(${names.join("|")})`)).flatMap((part) => {
      if (Object.hasOwn(this.special, part)) return [this.special[part]];
      return (part.match(this.pattern) ?? []).flatMap((word) => this.merge(word));
    });
  }

  // Byte-pair encoding: merge the adjacent pair that forms the token with the lowest id.
  merge(word) {
    const parts = [...new TextEncoder().encode(word)].map((byte) => String.fromCharCode(byte));
    for (;;) {
      const ids = parts.slice(1).map((part, i) => this.ranks.get(parts[i] + part) ?? Infinity);
      const lowest = Math.min(...ids);
      if (lowest === Infinity) return parts.map((part) => this.ranks.get(part));
      const at = ids.indexOf(lowest);
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  // The decoder buffers the bytes of an incomplete character.
  text(token, decoder) {
    return decoder.decode(bytes(this.tokens[token]), { stream: true });
  }

  // Return the text of a single token, with the bytes of a partial character as \xc3.
  tokenText(token) {
    const part = (byte) => (byte < 128 ? String.fromCharCode(byte) : `\\x${byte.toString(16)}`);
    try {
      return textDecoder(true).decode(bytes(this.tokens[token]));
    } catch {
      return [...bytes(this.tokens[token])].map(part).join("");
    }
  }
}

const textDecoder = (fatal = false) => new TextDecoder("utf-8", { ignoreBOM: true, fatal });

function bytes(characters) {
  const found = new Uint8Array(characters.length);
  for (let i = 0; i < found.length; i++) found[i] = characters.charCodeAt(i);
  return found;
}

// A model with its own memory: weights, then the KV cache of one context window.
class Model {
  constructor(code, weights) {
    this.config = weights;
    const { exports } = new WebAssembly.Instance(code);
    this.exports = exports;
    const image = bytes(atob(weights.image));
    const { n_layer, n_kv_head, block_size, head_dim, vocab_size } = weights;
    const base = this.allocate(image.length); // the same address as in course/web_model.py
    new Uint8Array(exports.memory.buffer).set(image, base);
    this.cache = this.allocate(4 * n_layer * 2 * n_kv_head * block_size * head_dim);
    const floats = exports.work_floats(weights.model, BigInt(block_size), 1);
    this.work = this.allocate(4 * Number(floats));
    this.kept = this.allocate(4 * MAX_ROWS * vocab_size);
    this.lists = this.allocate(8 * 4 * block_size);
    this.pass = this.allocate(120);
    this.page = this.allocate(8); // page table: the cache is a single page, number 0
    this.layers = this.allocate(8 * 2 * n_layer); // KV cache group 0 for all layers, and their indices in it
    const places = new BigInt64Array(exports.memory.buffer, this.layers + 8 * n_layer, n_layer);
    places.forEach((_, i) => (places[i] = BigInt(i)));
    this.cachedTokens = []; // tokens with cached keys and values
  }

  allocate(bytes) {
    return this.exports.memory.grow(Math.ceil(bytes / 65536)) * 65536;
  }

  // 13-kv-cache-dynamic: return the logits of the last `keep` positions of a window, and the number
  // of cached positions. Positions of the common prefix with the cache are not computed again.
  logits(window, keep) {
    let numCached = 0;
    while (numCached < window.length - keep && this.cachedTokens[numCached] === window[numCached]) numCached++;
    const T = window.length - numCached;
    const numbers = new BigInt64Array(this.exports.memory.buffer, this.lists);
    const addresses = [0, 1, 2, 3].map((row) => this.lists + 8 * T * row);
    for (let t = 0; t < T; t++) {
      numbers[t] = BigInt(window[numCached + t]); // tokens
      numbers[T + t] = BigInt(numCached + t); // positions
      numbers[2 * T + t] = 0n; // start of each token's page table
      numbers[3 * T + t] = BigInt(T - keep + t); // positions that need logits
    }
    const [tokens, positions, starts, indices] = addresses;
    const view = new DataView(this.exports.memory.buffer, this.pass); // the struct Pass of gpt.c
    const { n_layer, block_size, cos, sin } = this.config;
    [this.cache, 0, this.page, 0].forEach((address, i) => view.setUint32(4 * i, address, true));
    [1, 0, block_size, T, keep].forEach((number, i) =>
      view.setBigInt64(16 + 8 * i, BigInt(number), true),
    );
    const layers = [this.layers, this.layers + 8 * n_layer];
    [...layers, tokens, positions, starts, indices, cos, sin, 0, 0].forEach((address, i) =>
      view.setUint32(56 + 4 * i, address, true),
    );
    this.exports.gpt_pass(this.config.model, this.pass, this.kept, this.work, 1);
    this.cachedTokens = window.slice();
    const size = this.config.vocab_size;
    const all = new Float32Array(this.exports.memory.buffer, this.kept, keep * size).slice();
    const rows = Array.from({ length: keep }, (_, i) => all.subarray(i * size, (i + 1) * size));
    return { rows, numCached };
  }
}

const MAX_ROWS = 17; // 16 drafts and the next token

// 15-kv-cache-fix: return the start of the context window, which shifts by whole strides.
function windowStart(length, blockSize, stride = Math.max(1, Math.floor(blockSize / 2))) {
  return Math.max(0, Math.ceil((length - blockSize) / stride)) * stride;
}

// 09-presence-penalty, 10-frequency-penalty, 11-repetition-penalty: return penalised logits. Each
// result is rounded to float32, as in torch.
function applyPenalties(logits, params, text, promptLength) {
  const round = Math.fround;
  const [presence, frequency, repetition] = [
    params.presence_penalty,
    params.frequency_penalty,
    params.repetition_penalty,
  ].map(round);
  const counts = new Map(text.map((token) => [token, 0]));
  for (const token of text.slice(promptLength)) counts.set(token, counts.get(token) + 1);
  const lowered = logits.slice();
  for (const [token, count] of counts) {
    let logit = logits[token];
    if (repetition !== 1) logit = round(logit > 0 ? logit / repetition : logit * repetition);
    if (frequency) logit = round(logit - round(frequency * count));
    if (presence) logit = round(logit - presence * (count > 0));
    lowered[token] = logit;
  }
  return lowered;
}

function softmax(logits) {
  const largest = maxOf(logits);
  const weights = new Float64Array(logits).map((logit) => Math.exp(logit - largest));
  let sum = 0;
  for (const weight of weights) sum += weight;
  return weights.map((weight) => weight / sum);
}

function maxOf(numbers) {
  let largest = -Infinity;
  for (const number of numbers) if (number > largest) largest = number;
  return largest;
}

// 05-temperature: below 1 it sharpens the softmax, above 1 it flattens it.
function applyTemperature(logits, temperature) {
  const largest = maxOf(logits);
  const round = Math.fround; // rounds to float32, as torch does
  return logits.map((logit) => round(logit - largest) / round(temperature));
}

// 06-top-k: keep the k largest logits, and ties with the k-th.
function topK(logits, k) {
  if (k === 0 || k >= logits.length) return logits;
  const kth = logits.slice().sort()[logits.length - k];
  return logits.map((logit) => (logit < kth ? -Infinity : logit));
}

// 07-top-p: keep the smallest set of most likely tokens with total probability of at least p.
function topP(logits, p) {
  if (p === 1) return logits;
  const sorted = logits.slice().sort().reverse();
  const probs = softmax(sorted);
  let count = 0;
  for (let mass = 0; mass < p && count < sorted.length; count++) mass += probs[count];
  const least = sorted[count - 1];
  // Among ties, lower ids are kept.
  let equal = count - sorted.indexOf(least);
  return logits.map((logit) =>
    logit > least || (logit === least && equal-- > 0) ? logit : -Infinity,
  );
}

// Return the sampling distribution, 0 for tokens that a filter removes.
function samplingProbs(logits, { temperature, top_k, top_p }) {
  if (temperature === 0) {
    // 01-greedy-decoding: probability 1 for the most likely token
    const probs = new Float64Array(logits.length);
    probs[logits.indexOf(maxOf(logits))] = 1;
    return probs;
  }
  return softmax(topP(topK(applyTemperature(logits, temperature), top_k), top_p));
}

// 04-multinomial, with the random numbers of 37-request-seeds: a token's score is its probability
// divided by an exponential random number, which depends only on seed, position and id. The highest
// score wins.
function draw(probs, seed, position) {
  const state = splitmix64(BigInt(seed), BigInt(position));
  let winner = -1;
  let best = -1;
  probs.forEach((p, id) => {
    if (p === 0) return;
    const score = p / noise(state, id);
    if (score > best) [winner, best] = [id, score];
  });
  return winner;
}

// Return the exponential random number of a token.
function noise(state, id) {
  return -Math.log((Number(splitmix64(state, BigInt(id)) >> 12n) + 0.5) * 2 ** -52);
}

// Return output `index` of the generator SplitMix64 in this state: 64 random bits.
function splitmix64(state, index) {
  const wrap = (number) => BigInt.asUintN(64, number);
  let bits = wrap(state + (index + 1n) * 0x9e3779b97f4a7c15n);
  bits = wrap((bits ^ (bits >> 30n)) * 0xbf58476d1ce4e5b9n);
  bits = wrap((bits ^ (bits >> 27n)) * 0x94d049bb133111ebn);
  return bits ^ (bits >> 31n);
}

// Sample the next token of a sequence; return it and its distribution.
function sample(logits, params, text, promptLength) {
  const probs = samplingProbs(applyPenalties(logits, params, text, promptLength), params);
  return { token: draw(probs, params.seed, text.length), probs };
}

// 19-prompt-lookup: propose what followed the latest earlier occurrence of the last 3 tokens, or 2.
function promptLookup(text, count) {
  for (const size of [3, 2]) {
    const newest = text.slice(-size).join();
    for (let start = text.length - size - 1; start >= 0; start--)
      if (text.slice(start, start + size).join() === newest)
        return text.slice(start + size, start + size + count);
  }
  return [];
}

// 18-speculative-decoding, as in 48-speculation-in-batches: a draft model samples with the random
// numbers that the target will use at the same positions. q: probability of each draft.
function propose(models, params, text, promptLength, count) {
  if (params.draft === "lookup") return promptLookup(text, count).map((token) => ({ token, q: 1 }));
  const model = models[params.draft];
  const drafts = [];
  while (model && drafts.length < count) {
    const longer = [...text, ...drafts.map((each) => each.token)];
    const window = longer.slice(windowStart(longer.length, model.config.block_size));
    const { token, probs } = sample(model.logits(window, 1).rows[0], params, longer, promptLength);
    drafts.push({ token, q: probs[token] });
  }
  return drafts;
}

const DEFAULTS = {
  max_new_tokens: 220,
  ignore_eos: false,
  temperature: 0,
  top_k: 0,
  top_p: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
  repetition_penalty: 1,
  seed: 0,
  draft: "", // "": none; "lookup"; or the name of a model
  gamma: 3, // drafts per pass, at most 16
  logprobs: 5, // alternatives listed for each token
  begin: [], // ids that follow the prompt and count as output
};

// 01-greedy-decoding: append the tokens of each target pass. Yields the events of model.js.
function* generate(models, prompt, given) {
  const params = { ...DEFAULTS, ...given };
  const { target, tokenizer } = models;
  const { block_size: blockSize, bos_token_id: bos, eos_token_ids: eos } = target.config;
  const text = tokenizer.encode(prompt);
  if (!text.length) text.push(bos);
  const promptLength = text.length;
  const reader = textDecoder();
  yield { prompt: text.map((token) => ({ token, text: tokenizer.text(token, reader) })) };
  const decoder = textDecoder();
  const ends = (token) => eos.includes(token) && !params.ignore_eos; // 02-eos-handling
  const decode = (token) => (ends(token) ? "" : tokenizer.text(token, decoder));
  const end = promptLength + params.max_new_tokens;
  let over = params.max_new_tokens > 0 ? null : "length";
  const add = (token) => {
    text.push(token);
    if (ends(token)) over = "stop";
    else if (text.length >= end) over = "length";
    return decode(token);
  };
  params.begin.forEach(add);
  while (!over) {
    const start = windowStart(text.length, blockSize);
    // No pass crosses a context shift, because all its positions share one window.
    const maxDrafts = Math.min(start + blockSize - text.length, end - text.length - 1, params.gamma);
    const drafts = propose(models, params, text, promptLength, maxDrafts);
    const window = [...text.slice(start), ...drafts.map((each) => each.token)];
    const { rows, numCached } = target.logits(window, drafts.length + 1);
    const tokens = [];
    // Continue after a draft only if the target sampled the same token.
    for (const [i, logits] of rows.entries()) {
      const { token, probs } = sample(logits, params, text, promptLength);
      if (drafts[i]) drafts[i].p = probs[drafts[i].token];
      const about = report(logits, probs, token, params.logprobs, tokenizer);
      tokens.push({ ...about, text: add(token) });
      if (over || token !== drafts[i]?.token) break;
    }
    const accepted = tokens.filter(({ token }, i) => token === drafts[i]?.token).length;
    for (const each of drafts) each.text = tokenizer.tokenText(each.token);
    yield { start, numCached, computed: window.length - numCached, drafts, accepted, tokens, over };
  }
  yield { rest: decoder.decode(), over };
}

// 52-logprobs: return the log-probabilities of a token and of the most likely ones. p: probability
// in the sampling distribution.
function report(logits, probs, token, count, tokenizer) {
  const modelProbs = softmax(logits);
  const one = (id) => ({ token: id, logprob: Math.log(modelProbs[id]), p: probs[id] });
  const top = topIds(logits, count).map((id) => ({ ...one(id), text: tokenizer.tokenText(id) }));
  return { ...one(token), top };
}

// Return the ids of the largest numbers, largest first, ties by lower id.
function topIds(numbers, count) {
  const ids = [];
  numbers.forEach((number, id) => {
    if (ids.length === count && number <= numbers[ids.at(-1)]) return;
    const place = ids.findIndex((other) => number > numbers[other]);
    ids.splice(place < 0 ? ids.length : place, 0, id);
    ids.length = Math.min(ids.length, count);
  });
  return ids;
}

// The worker side of model.js. Messages are {write}, {open} or neither, with an id that the answers
// repeat. Each message except {open} ends the current run.
function serve() {
  const models = {};
  const { port1, port2 } = new MessageChannel();
  let newest;
  port1.start();
  const nextTask = () =>
    new Promise((done) => {
      port1.addEventListener("message", done, { once: true });
      port2.postMessage(null); // faster than setTimeout, which waits for 4 ms
    });
  onmessage = async ({ data: { id, write, open } }) => {
    try {
      if (open) return postMessage({ id, answer: openModel(models, ...open) });
      newest = id;
      if (!write) return;
      for (const event of generate(models, write.prompt, write.params)) {
        postMessage({ id, event });
        await nextTask();
        if (newest !== id) return;
      }
    } catch (error) {
      postMessage({ id, event: { error: String(error) } });
    }
  };
}

// Load a model; return the seconds of a decode step.
function openModel(models, code, name, weights) {
  const model = new Model(new WebAssembly.Module(bytes(atob(code))), weights);
  models[name] = model;
  models.target ??= model;
  models.tokenizer ??= new Tokenizer(weights);
  const { bos_token_id: bos } = weights;
  model.logits([bos], 1); // compiles the code
  const began = performance.now();
  model.logits([bos, bos], 1);
  return { seconds: (performance.now() - began) / 1000 };
}
