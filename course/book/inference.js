// What this repository teaches, in plain JavaScript, around the passes of native/gpt.c, which are
// WebAssembly here. Each part names the lesson that it comes from. It runs in a worker of its own,
// so that the page stays quick, and writes what `python infer.py --dtype int8 --seed ...` writes.
//
// Logits are the same to the last bit. Probabilities are rounded to 53 bits here and to 24 there: a
// draw may differ where two tokens arrive, or a mass meets top-p, within one part in ten million.
"use strict";

// 00-init: text to ids and back, as tokenizer.py. A string of bytes has characters up to U+00FF.
class Tokenizer {
  constructor({ tokens, special, pattern }) {
    this.tokens = tokens; // the bytes of each
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

  // Byte-pair encoding: join the neighbours that make the token of the lowest id, until none do.
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

  // Bytes of a character that is not whole yet wait in the decoder.
  text(token, decoder) {
    return decoder.decode(bytes(this.tokens[token]), { stream: true });
  }

  // A token that stands alone; bytes of a part of a character as \xc3.
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

// A model in memory of its own: the weights, then a cache of keys and values for one window.
class Model {
  constructor(code, weights) {
    this.config = weights;
    const { exports } = new WebAssembly.Instance(code);
    this.exports = exports;
    const image = bytes(atob(weights.image));
    const { n_layer, n_kv_head, block_size, head_dim, vocab_size } = weights;
    const base = this.allocate(image.length); // where course/web_model.py has it, too
    new Uint8Array(exports.memory.buffer).set(image, base);
    this.cache = this.allocate(4 * n_layer * 2 * n_kv_head * block_size * head_dim);
    const floats = exports.work_floats(weights.model, BigInt(block_size), 1);
    this.work = this.allocate(4 * Number(floats));
    this.kept = this.allocate(4 * MAX_ROWS * vocab_size);
    this.lists = this.allocate(8 * 4 * block_size);
    this.pass = this.allocate(104);
    this.page = this.allocate(8); // the cache is a single page, number 0
    this.layers = this.allocate(8 * 2 * n_layer); // all of group 0, and their indices
    const places = new BigInt64Array(exports.memory.buffer, this.layers + 8 * n_layer, n_layer);
    places.forEach((_, i) => (places[i] = BigInt(i)));
    this.cachedTokens = []; // the tokens whose keys and values are in the cache
  }

  allocate(bytes) {
    return this.exports.memory.grow(Math.ceil(bytes / 65536)) * 65536;
  }

  // 13-kv-cache-dynamic: the logits at the last `keep` positions of a window; what it shares with
  // the cache is not computed again. Returns them and how many positions were there already.
  logits(window, keep) {
    let numCached = 0;
    while (numCached < window.length - keep && this.cachedTokens[numCached] === window[numCached]) numCached++;
    const T = window.length - numCached;
    const numbers = new BigInt64Array(this.exports.memory.buffer, this.lists);
    const addresses = [0, 1, 2, 3].map((row) => this.lists + 8 * T * row);
    for (let t = 0; t < T; t++) {
      numbers[t] = BigInt(window[numCached + t]); // tokens
      numbers[T + t] = BigInt(numCached + t); // positions
      numbers[2 * T + t] = 0n; // where the pages of each begin
      numbers[3 * T + t] = BigInt(T - keep + t); // whose logits are wanted
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

const MAX_ROWS = 17; // 16 drafts and the token after them

// 15-kv-cache-fix: where the window on a text begins. It moves by a stride, when it must.
function windowStart(length, blockSize, stride = Math.max(1, Math.floor(blockSize / 2))) {
  return Math.max(0, Math.ceil((length - blockSize) / stride)) * stride;
}

// 09-presence-penalty, 10-frequency-penalty, 11-repetition-penalty: new logits, lower for tokens
// of the text. Each result is rounded to float32, as torch's are.
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
  const round = Math.fround; // as torch does
  return logits.map((logit) => round(logit - largest) / round(temperature));
}

// 06-top-k: all but the k largest are out; ties with the k-th stay.
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
  // Of equal ones the lower ids stay.
  let equal = count - sorted.indexOf(least);
  return logits.map((logit) =>
    logit > least || (logit === least && equal-- > 0) ? logit : -Infinity,
  );
}

// What a token is drawn from: probabilities, 0 where a filter cut.
function samplingProbs(logits, { temperature, top_k, top_p }) {
  if (temperature === 0) {
    // 01-greedy-decoding: all on the most likely token
    const probs = new Float64Array(logits.length);
    probs[logits.indexOf(maxOf(logits))] = 1;
    return probs;
  }
  return softmax(topP(topK(applyTemperature(logits, temperature), top_k), top_p));
}

// 04-multinomial, by the numbers of 37-request-seeds: a token's score is its probability over
// an exponential random number, a function of seed, position and id alone. The highest one wins.
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

// The exponential random number of a token.
function noise(state, id) {
  return -Math.log((Number(splitmix64(state, BigInt(id)) >> 12n) + 0.5) * 2 ** -52);
}

// Number `index` of the generator SplitMix64 in this state: 64 random bits.
function splitmix64(state, index) {
  const wrap = (number) => BigInt.asUintN(64, number);
  let bits = wrap(state + (index + 1n) * 0x9e3779b97f4a7c15n);
  bits = wrap((bits ^ (bits >> 30n)) * 0xbf58476d1ce4e5b9n);
  bits = wrap((bits ^ (bits >> 27n)) * 0x94d049bb133111ebn);
  return bits ^ (bits >> 31n);
}

// The next token of a text, and what it was drawn from.
function sample(logits, params, text, promptLength) {
  const probs = samplingProbs(applyPenalties(logits, params, text, promptLength), params);
  return { token: draw(probs, params.seed, text.length), probs };
}

// 19-prompt-lookup: what followed the newest earlier occurrence of the last three tokens, or two.
function promptLookup(text, count) {
  for (const size of [3, 2]) {
    const newest = text.slice(-size).join();
    for (let start = text.length - size - 1; start >= 0; start--)
      if (text.slice(start, start + size).join() === newest)
        return text.slice(start + size, start + size + count);
  }
  return [];
}

// 18-speculative-decoding, in the form of 48-batched-speculation: a small model writes on, with the
// random numbers that the target will use at the same places. q: what each draft was drawn from.
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
  gamma: 3, // drafts for a pass, at most 16
  logprobs: 5, // alternatives listed for each token
  begin: [], // ids that the text begins with after its prompt
};

// 01-greedy-decoding: a text grows by what each pass of the target gives. Yields the events that
// model.js describes.
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
    // No pass crosses a context shift: all of its positions see one window.
    const maxDrafts = Math.min(start + blockSize - text.length, end - text.length - 1, params.gamma);
    const drafts = propose(models, params, text, promptLength, maxDrafts);
    const window = [...text.slice(start), ...drafts.map((each) => each.token)];
    const { rows, numCached } = target.logits(window, drafts.length + 1);
    const tokens = [];
    // The target chooses after each draft that is what it chose itself.
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

// 52-logprobs: how probable a token was, by the model itself, and the most likely ones there. p: in
// what it was drawn from.
function report(logits, probs, token, count, tokenizer) {
  const modelProbs = softmax(logits);
  const one = (id) => ({ token: id, logprob: Math.log(modelProbs[id]), p: probs[id] });
  const top = topIds(logits, count).map((id) => ({ ...one(id), text: tokenizer.tokenText(id) }));
  return { ...one(token), top };
}

// The ids of the largest numbers, the largest first, and of equal ones the lower id.
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

// The worker's end of model.js: {write}, {open} or neither, each with an id that its answers carry.
// Anything but {open} ends what is being written.
function serve() {
  const models = {};
  const { port1, port2 } = new MessageChannel();
  let newest;
  port1.start();
  const nextTask = () =>
    new Promise((done) => {
      port1.addEventListener("message", done, { once: true });
      port2.postMessage(null); // sooner than setTimeout, which waits for 4 ms
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

// Returns how long the model takes for a token.
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
