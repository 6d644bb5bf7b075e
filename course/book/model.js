// The embedded models in this page. Play uses it:
//
//   const model = new PageModel();
//   await model.load(["stories-llama", "stories-draft"]); // the first is the target, others are drafters
//   model.write("Once upon a time", { temperature: 0.8, seed: 7 }, (event) => ...);
//   model.stop();
//
// Names and defaults of parameters: DEFAULTS in inference.js, which runs in a worker. Events in
// order; list items also have {token, text}:
//   {prompt: [...]}
//   {start, numCached, computed,   first position of the context window, cached positions in it,
//                              and positions that this pass computed
//    drafts: [{q, p}],         probability of each in the draft model and in the target
//    accepted,                 number of accepted drafts
//    tokens: [{logprob, p, top: [{logprob, p}]}],   logprob: of the model; p: after penalties,
//                              temperature and filters, 0 for tokens that these remove
//    over}                     null, "stop" or "length"
//   {rest, over}               text of an incomplete character at the end
//   {error}
"use strict";

const MAX_TOKEN_SECONDS = 0.4; // a slower model is not used

class PageModel {
  #worker;
  #loaded = {}; // name -> promise
  #pending = new Map(); // id of a message -> callbacks for its answer
  #writing = 0; // id of the current run
  #onEvent; // receives the events of the current run
  #id = 0;

  // Throws an error with the reason if the models cannot run.
  async load(names) {
    const reason = unsupportedReason();
    if (reason) throw new Error(reason);
    await loadScript("engine.js");
    this.#worker ??= this.#start();
    for (const name of names) {
      this.#loaded[name] ??= this.#open(name);
      const { seconds } = await this.#loaded[name];
      if (seconds > MAX_TOKEN_SECONDS) throw new Error(`a token takes ${seconds.toFixed(1)} s`);
    }
  }

  // Ends the current run first.
  write(prompt, params, onEvent) {
    this.#onEvent = onEvent;
    this.#writing = this.#send({ write: { prompt, params } });
  }

  stop() {
    this.#writing = this.#send({});
  }

  // From a Blob, because a page opened from a file may not start a worker from another file.
  #start() {
    const source = new Blob([window.ENGINE.source, "\nserve();\n"], { type: "text/javascript" });
    const worker = new Worker(URL.createObjectURL(source));
    worker.onmessage = ({ data: { id, event, answer } }) => {
      const pending = this.#pending.get(id);
      this.#pending.delete(id);
      if (pending && event?.error) pending.fail(new Error(event.error));
      else if (pending) pending.done(answer);
      else if (id === this.#writing) this.#onEvent(event);
    };
    worker.onerror = ({ message }) => {
      for (const { fail } of this.#pending.values()) fail(new Error(message));
      this.#onEvent?.({ error: message });
    };
    return worker;
  }

  async #open(name) {
    await loadScript(`weights-${name}.js`);
    const id = this.#send({ open: [window.ENGINE.code, name, window.WEIGHTS[name]] });
    return new Promise((done, fail) => this.#pending.set(id, { done, fail }));
  }

  #send(message) {
    this.#worker?.postMessage({ id: ++this.#id, ...message });
    return this.#id;
  }
}

// Returns why this browser cannot run the model; "" if it can.
function unsupportedReason() {
  // A module with one 128-bit vector: gpt.c is compiled for SIMD.
  const program = [
    0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253,
    15, 253, 98, 11,
  ];
  const simd = typeof WebAssembly === "object" && WebAssembly.validate(new Uint8Array(program));
  return simd ? "" : "this browser has no WebAssembly with SIMD";
}

const scripts = {}; // name -> promise

function loadScript(name) {
  scripts[name] ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = name;
    script.onload = done;
    script.onerror = () => fail(new Error(`${name} not found beside this page`));
    document.head.append(script);
  });
  return scripts[name];
}
