// The embedded models in this page. Play uses it:
//
//   const model = new PageModel();
//   await model.load(["stories-llama", "stories-draft"]); // the first one writes, others draft
//   model.write("Once upon a time", { temperature: 0.8, seed: 7 }, (event) => ...);
//   model.stop();
//
// Names and defaults of parameters: DEFAULTS in inference.js, which runs in a worker. Events, in
// order; each list has {token, text}, and what stands here beside it:
//   {prompt: [...]}
//   {start, numCached, computed,   of the window: its first position in the text, how many positions
//                              were in the cache, and how many this pass of the model computed
//    drafts: [{q, p}],         what each was drawn from, in the draft model and in the target
//    accepted,                 how many of them
//    tokens: [{logprob, p, top: [{logprob, p}]}],   logprob: by the model itself; p: after
//                              penalties, temperature and filters, 0 where these cut
//    over}                     null, "stop" or "length"
//   {rest, over}               text of a character that is not whole
//   {error}
"use strict";

const MAX_TOKEN_SECONDS = 0.4; // seconds for a token; what is slower is no pleasure

class PageModel {
  #worker;
  #loaded = {}; // name -> promise
  #pending = new Map(); // id of a model that is opened -> what its answer goes to
  #writing = 0; // id of what is being written
  #onEvent; // who hears the events of that
  #id = 0;

  // Fails with the reason, in words, where the models cannot run.
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

  // It ends what was being written before.
  write(prompt, params, onEvent) {
    this.#onEvent = onEvent;
    this.#writing = this.#send({ write: { prompt, params } });
  }

  stop() {
    this.#writing = this.#send({});
  }

  // From a Blob, because a page in a file may have no worker in another file, and read none.
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

// Why there can be no model in this browser; "" if there can.
function unsupportedReason() {
  // A program that has one vector of 128 bits: SIMD, which gpt.c is compiled for.
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
    script.onerror = () => fail(new Error(`there is no ${name} beside this page`));
    document.head.append(script);
  });
  return scripts[name];
}
