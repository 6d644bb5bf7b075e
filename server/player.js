// The engine at work: batch, queue and pages over time, from live or recorded frames.
//
//   const player = new Player(element, setup, onChange);
//   player.add(frame);     // live: each frame as it arrives; recorded: all frames, then player.seek(0)
//   player.notice(why);    // show for some seconds why the view has changed
//   player.close();        // before another player uses the element
//
// setup: max_num_seqs, num_pages, page_size, block_size, max_num_batched_tokens and gamma (0: no drafts)
// of the engine; period: minimum seconds between frames. onChange: called with the state of the view:
// "live", "paused" or "replayed". A frame is made by server/live.py: the state of the engine, and its
// work since the previous frame. Each number shown is in a frame, or is a sum over frames.
//
// A recording has one frame per step. Its setup also has: recorded: true; shows: the PARTS to show;
// most_pages: the maximum number of pages of a request; texts: request number -> text of its tokens.
// The host page's style sheet defines --ink, --soft, --paper, --panel, --line and --link.
"use strict";

const PLAYER_STYLE = `
.player { --alarm: #b3261e; font: 0.875rem/1.45 var(--plain, system-ui, sans-serif); }
@media screen and (prefers-color-scheme: dark) { .player { --alarm: #ff8a7a; } }
.player canvas { display: block; width: 100%; }
.player .groups { display: flex; flex-wrap: wrap; gap: 0.8rem 2rem; margin: 0 0 1rem; }
.player .groups p { margin: 0 0 0.3rem; font-weight: 600; font-size: 0.8125rem; }
.player .groups section + section { padding-left: 2rem; border-left: 1px solid var(--line); }
.player .figures { display: flex; flex-wrap: wrap; gap: 0.6rem 1.8rem; margin: 0; }
.player .figures div { min-width: 4.2rem; }
.player dt { color: var(--soft); font-size: 0.75rem; }
.player dd { margin: 0; font-size: 1.35rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.player dd small { color: var(--soft); font-size: 0.75rem; }
.player dd.alarm { color: var(--alarm); }
.player .requests { list-style: none; margin: 0; padding: 0; min-height: 1.5rem; }
.player .requests:focus-visible, .player .pool:focus-visible { outline-offset: 4px; }
.player [hidden] { display: none !important; }
.player .requests li {
  display: grid;
  grid-template-columns: var(--columns);
  align-items: center;
  gap: 0 0.8rem;
  height: 1.6rem;
  margin: 0;
  border-radius: 0.25rem;
}
.player .requests li.lit { background: var(--panel); }
.player .requests li.over { color: var(--soft); }
.player .requests li.over i, .player .requests li.over canvas { opacity: 0.55; }
.player .requests b { display: flex; align-items: center; gap: 0.4rem; font-weight: 600; }
.player .requests b, .player .counts { font-variant-numeric: tabular-nums; }
.player .requests i { width: 0.8rem; height: 0.8rem; border-radius: 0.2rem; }
.player .counts { color: var(--soft); font-size: 0.8rem; white-space: nowrap; }
.player .state { white-space: nowrap; }
.player .state.alarm { color: var(--alarm); }
.player .heads, .player .legend, .player .note { color: var(--soft); font-size: 0.75rem; }
.player .heads {
  display: grid;
  grid-template-columns: var(--columns);
  gap: 0 0.8rem;
  border-bottom: 1px solid var(--line);
  margin-bottom: 0.3rem;
}
.player h3 { margin: 1.1rem 0 0.4rem; font: 600 0.95rem/1.3 var(--plain, system-ui, sans-serif); }
.player .note { margin: 0.35rem 0; min-height: 1.1rem; }
.player .note:empty { display: none; }
.player .why { min-height: 1.45em; margin: 0 0 0.4rem; font-weight: 600; }
.player .happened { margin: 0.6rem 0; min-height: 2.9em; font-weight: 600; }
.player .legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; margin: 0.4rem 0 0; }
.player .legend span { display: inline-flex; align-items: center; gap: 0.4rem; }
.player .legend canvas { width: 24px; flex: none; }
.player .controls { display: flex; gap: 0.4rem; align-items: center; margin-top: 0.9rem; }
.player .controls button {
  min-width: 2.4rem;
  min-height: 2rem;
  padding: 0.1rem 0.6rem;
  border: 1px solid var(--soft);
  border-radius: 0.3rem;
  background: var(--paper);
  color: var(--ink);
  font: inherit;
  cursor: pointer;
}
.player .controls button:disabled { opacity: 1; border-color: var(--line); color: var(--soft); }
.player .controls input { flex: 1; min-width: 3rem; accent-color: var(--link); }
.player .controls output {
  min-width: 6.5rem;
  color: var(--soft);
  text-align: right;
  font-size: 0.8rem;
  font-variant-numeric: tabular-nums;
}
@media (max-width: 60rem) {
  .player .heads { display: block; }
  .player .heads span + span, .player .heads span:first-child { display: none; }
  .player .heads span:last-child { display: inline; }
  .player .controls button { min-height: 2.5rem; }
  .player .why { min-height: 2.9em; }
  .player .requests li {
    grid-template-columns: 3.2rem 5fr 4fr 4fr;
    height: auto;
    padding: 0.2rem 0 0.35rem;
    row-gap: 0.15rem;
  }
  .player .counts { grid-column: 3 / 5; text-align: right; }
  .player .requests .past canvas { display: none; }
  .player .requests canvas { grid-column: 1 / 3; }
  .player .requests canvas + canvas { grid-column: 3 / 5; }
  .player .requests canvas[hidden] + canvas { grid-column: 1 / 5; }
  .player .figures { gap: 0.5rem 1.2rem; }
  .player .groups section + section { padding: 0; border: 0; }
  .player dd { font-size: 1.15rem; }
  .player .controls { flex-wrap: wrap; }
  .player .controls input { order: -1; flex-basis: 100%; }
  .player .controls output { flex: 1; min-width: 4rem; }
}
`;

const PARTS = ["pages", "preemption", "sharing", "drafts"]; // allowed in setup.shows
const HUES = [255, 145, 330, 75, 195, 295, 110, 20, 225, 50, 170, 350];
const MIN_COLUMN_WIDTH = 6; // minimum width of a frame in a strip, in pixels
const MAX_COLUMN_WIDTH = 16; // used if a whole recording fits
const MAX_FRAMES = 1500; // frames kept, at least half a minute
const SLOW_FRAME_MS = 100; // minimum milliseconds per frame in slow motion
const NOTICE_MS = 6000; // milliseconds for which a notice is shown
const MIN_LISTED = 12; // requests in the list, which keeps the latest finished ones
const MAX_LISTED = 40;
const REDUCED_MOTION = matchMedia("(prefers-reduced-motion: reduce)");
const DARK_SCHEME = matchMedia("(prefers-color-scheme: dark)");
const number = new Intl.NumberFormat("en");

function make(tag, parent, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

/** Fit a canvas to its box and clear it; return its context in CSS pixels, and its width. */
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

class Player {
  constructor(element, setup, onChange = () => {}) {
    if (!document.getElementById("player-style")) {
      const style = make("style", document.head, "", PLAYER_STYLE);
      style.id = "player-style";
    }
    this.setup = setup;
    this.onChange = onChange;
    this.shows = new Set(setup.shows || PARTS);
    if (!setup.gamma) this.shows.delete("drafts");
    this.columnWidth = MIN_COLUMN_WIDTH;
    this.frames = [];
    this.index = -1;
    this.playing = !setup.recorded;
    this.minFrameMs = 0; // minimum milliseconds per frame
    this.frameDropped = false; // whether the shown frame has been dropped
    this.noticeText = ""; // why the view has changed
    this.timer = null;
    this.slots = new Map(); // request number -> index of its colour
    this.highlighted = null; // number of the request under the pointer
    this.selectedPage = null; // page under the pointer
    this.build(element);
    this.abort = new AbortController();
    const { signal } = this.abort;
    for (const query of [DARK_SCHEME, REDUCED_MOTION]) query.addEventListener("change", () => this.draw(), { signal });
    this.resizeObserver = new ResizeObserver(() => this.draw());
    this.resizeObserver.observe(this.element);
    this.draw();
  }

  /** Release timers, listeners and the observer. */
  close() {
    clearTimeout(this.timer);
    clearTimeout(this.noticeTimer);
    this.abort.abort();
    this.resizeObserver.disconnect();
    this.onChange = () => {};
  }

  build(parent) {
    parent.replaceChildren();
    const root = (this.element = make("div", parent, "player"));
    const { shows } = this;
    const table = Math.min(Math.max(13 * this.mostPages, 100), 420);
    root.style.setProperty(
      "--columns",
      `3.2rem 9.5rem 6.2rem ${shows.has("pages") ? `${table}px` : ""} minmax(8rem, 1fr)`,
    );
    root.addEventListener("keydown", (event) => this.onKey(event));
    if (!this.setup.recorded) { // a recording changes only when the reader acts
      this.reasonLine = make("p", root, "why");
      this.reasonLine.setAttribute("role", "status");
    }
    const groups = make("div", root, "groups");
    this.figures = {};
    for (const [title, ...names] of [
      ["Now", "running", "waiting", "pages in use", "pages shared", "tokens a second"],
      ["Since the start", "preemptions", "positions computed", "positions found in the cache",
        "drafts accepted"],
    ]) {
      const group = make("section", groups);
      make("p", group, "", title);
      const figures = make("dl", group, "figures");
      for (const name of names) {
        const pair = make("div", figures);
        make("dt", pair, "", name);
        this.figures[name] = make("dd", pair, "", "0");
      }
    }
    for (const [name, shown] of Object.entries({
      "pages in use": shows.has("pages"),
      "pages shared": shows.has("sharing"),
      "tokens a second": !this.setup.recorded,
      preemptions: shows.has("preemption"),
      "positions found in the cache": shows.has("sharing"),
      "drafts accepted": shows.has("drafts"),
    })) this.figures[name].parentElement.hidden = !shown;

    const heads = make("div", root, "heads");
    const column = this.setup.period ? `a step or ${this.setup.period} s` : "a step";
    this.columnTitle = `what was computed; a column is ${column}`;
    for (const text of ["request", "state", "prompt + new", "page table", this.columnTitle]) {
      const head = make("span", heads, "", text);
      head.hidden = text === "page table" && !shows.has("pages");
      this.lastHead = head; // the last one
    }
    this.list = make("ol", root, "requests");
    this.list.tabIndex = 0;
    const marks = shows.has("pages") ? "one and its pages" : "one";
    this.list.setAttribute("aria-label", `requests; arrow keys up and down mark ${marks}`);
    this.listNote = make("p", root, "note");
    this.items = new Map();
    this.list.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!move) return;
      const ids = [...this.items.keys()];
      const at = ids.indexOf(this.highlighted);
      this.highlight(ids[Math.min(Math.max(at + move, 0), ids.length - 1)] ?? null);
      event.preventDefault();
    });
    this.list.addEventListener("pointerover", (event) => {
      const item = event.target.closest("li");
      this.highlight(item ? item.request : null);
    });
    this.onLeave(this.list, () => this.highlight(null));

    this.title = make("h3", root);
    this.pool = make("canvas", root, "pool");
    this.title.hidden = this.pool.hidden = !shows.has("pages");
    this.pool.tabIndex = 0;
    this.pool.setAttribute("role", "img");
    this.pool.addEventListener("pointermove", (event) => this.selectPage(this.pageAt(event)));
    this.pool.addEventListener("pointerdown", (event) => this.selectPage(this.pageAt(event)));
    this.onLeave(this.pool, () => this.selectPage(null));
    this.pool.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.poolColumns, ArrowDown: this.poolColumns };
      if (!move[event.key]) return;
      const page = this.selectedPage === null ? 0 : this.selectedPage + move[event.key];
      if (page >= 0 && page < this.setup.num_pages) this.selectPage(page);
      event.preventDefault();
    });
    this.description = make("p", root, "note");
    this.description.setAttribute("aria-live", "polite");
    this.legend = make("p", root, "legend");
    this.legendSamples = {};
    for (const [kind, text, part] of [
      ["own", "of one request", "pages"],
      ["shared", "shared by several requests, in their colours", "sharing"],
      ["cached", "free, but cached for requests with the same prefix", "sharing"],
      ["free", "free", "pages"],
      ["prompt", shows.has("preemption") ? "computed: prompt, or recomputed" : "computed: prompt"],
      ["token", "computed: a new token"],
      ["rejected", "computed for rejected drafts", "drafts"],
      ["preempted", "preempted: its pages are freed", "preemption"],
    ]) {
      if (part && !shows.has(part)) continue;
      const sample = make("span", this.legend);
      this.legendSamples[kind] = make("canvas", sample);
      make("span", sample, "", text);
    }

    const controls = make("div", root, "controls");
    if (this.setup.recorded) { // the description of a step is below the controls that change it
      this.stepLine = make("p", root, "happened");
      root.prepend(controls, this.stepLine);
    }
    const button = (text, label, act) => {
      const made = make("button", controls, "", text);
      made.type = "button";
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
      return made;
    };
    this.backButton = button("\u2039", "one frame back", () => this.step(-1));
    this.playButton = button("Pause", "play or pause", () => this.play(!this.playing));
    this.playButton.removeAttribute("aria-label");
    this.forwardButton = button("\u203a", "one frame on", () => this.step(1));
    this.range = make("input", controls);
    this.range.type = "range";
    this.range.min = 0;
    this.range.setAttribute("aria-label", "frame");
    this.range.addEventListener("input", () => {
      this.play(false);
      this.seek(Number(this.range.value));
    });
    this.stepOutput = make("output", controls);
    this.replayButton = button("Again, slowly", "", () => {
      this.index = this.activityStart(this.frames.length - 1);
      this.playSlowly();
    });
    this.liveButton = button("Now", "", () => this.goLive());
    for (const made of [this.replayButton, this.liveButton]) {
      made.hidden = Boolean(this.setup.recorded);
      made.removeAttribute("aria-label");
    }
  }

  /** The maximum number of pages of a request. */
  get mostPages() {
    const { block_size, page_size, most_pages } = this.setup;
    return most_pages || Math.ceil(block_size / page_size);
  }

  /** Call act() when a hovering pointer or the focus leaves. A tap stays until the next tap. */
  onLeave(element, act) {
    element.addEventListener("blur", act);
    element.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") act();
    });
  }

  /** Move one frame with the left and right keys, unless the focused element uses them. */
  onKey(event) {
    if (!event.key.startsWith("Arrow")) return;
    event.stopPropagation(); // the host page may use these keys
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.defaultPrevented || event.target === this.range) return;
    this.step(by);
    event.preventDefault();
  }

  /** Add a frame. Show it immediately if the view is live. */
  add(frame) {
    const requests = new Map();
    const states = ["running", "waiting", "over"];
    for (const state of states) {
      for (const request of frame[state]) requests.set(request.number, { pages: [], ...request, state });
    }
    const owners = new Map(); // page -> numbers of the requests that hold it
    for (const request of frame.running) {
      for (const page of request.pages) {
        if (page !== null) owners.set(page, [...(owners.get(page) || []), request.number]);
      }
    }
    const taken = new Set([...requests.keys()].map((id) => this.slots.get(id)));
    for (const id of requests.keys()) {
      if (this.slots.has(id)) continue;
      let slot = id % HUES.length;
      while (taken.has(slot)) slot += 1;
      taken.add(slot);
      this.slots.set(id, slot);
    }
    const tokens = [...requests.values()].reduce((sum, request) => sum + request.work[3], 0);
    const before = this.frames.at(-1)?.requests;
    for (const [id, request] of requests) {
      const still = request.state === "waiting" && before?.get(id)?.preempted;
      request.preempted = frame.preempted.includes(id) || still;
    }
    this.frames.push({ ...frame, requests, owners, tokens });
    if (this.frames.length > MAX_FRAMES && !this.setup.recorded) {
      for (const { number: id } of this.frames.shift().over) this.slots.delete(id);
      this.frameDropped ||= this.index === 0;
      this.index = Math.max(this.index - 1, 0);
    }
    if (this.index < 0 || (this.playing && !this.timer && !this.minFrameMs)) {
      this.index = this.frames.length - 1;
    }
    if (this.playing && !this.timer) this.tick();
    this.draw();
  }

  seek(index) {
    if (!this.playing) this.frameDropped = false;
    this.index = Math.min(Math.max(index, 0), this.frames.length - 1);
    this.draw();
  }

  step(by) {
    this.play(false);
    this.seek(this.index + by);
  }

  play(on, minFrameMs = 0) {
    clearTimeout(this.timer);
    this.timer = null;
    this.playing = on;
    this.minFrameMs = minFrameMs;
    this.frameDropped = false;
    if (on && this.setup.recorded && this.index === this.frames.length - 1) this.index = 0;
    if (on) this.tick();
    this.draw();
  }

  /** Show the latest frame and the following ones. why: the notice if the view was not live. */
  goLive(why = "") {
    if (!this.playing || this.index < this.frames.length - 1) this.notice(why);
    this.index = this.frames.length - 1;
    this.play(true);
  }

  /** Play the remaining and the following frames in slow motion. */
  playSlowly() {
    this.play(true, SLOW_FRAME_MS);
  }

  /** Show for some seconds why the view has changed. */
  notice(why) {
    clearTimeout(this.noticeTimer);
    this.noticeText = why;
    this.noticeTimer = setTimeout(() => {
      this.noticeText = "";
      this.draw();
    }, NOTICE_MS);
    this.draw();
  }

  /** Return why the view is not live or not at the original speed; "" if it is. */
  reason() {
    const last = this.frames.length - 1;
    const behind = this.index < last;
    const present = "\u201cNow\u201d returns to the live view.";
    if (!this.playing) {
      const kept = number.format(MAX_FRAMES);
      return this.frameDropped ? `Only the last ${kept} frames are kept; the paused one was dropped.` : "";
    }
    if (this.minFrameMs && (behind || (last >= 0 && !this.isIdle(last)))) {
      const left = this.frameDropped ? ", and so far behind that frames are skipped" : "";
      return `Slowed down to ${1000 / this.minFrameMs} frames a second${left}. ${present}`;
    }
    if (behind) return `Replay at the original speed, without idle times. ${present}`;
    if (this.noticeText) return this.noticeText;
    return REDUCED_MOTION.matches ? "Drawn twice a second, because this device prefers reduced motion." : "";
  }

  /** Play the following frames at their original speed. */
  tick() {
    this.timer = null;
    const [frame, next] = this.frames.slice(this.index, this.index + 2);
    if (!next) {
      if (this.setup.recorded) this.playing = false;
      this.draw();
      return;
    }
    const took = this.setup.recorded ? 250 : 1000 * (next.time - frame.time);
    const wait = this.isIdle(this.index) ? 0 : Math.max(Math.min(took, 1000), this.minFrameMs);
    this.timer = setTimeout(() => {
      this.seek(this.index + 1);
      this.tick();
    }, wait);
  }

  /** Return the first frame of the latest busy period before or at this frame. */
  activityStart(index) {
    let first = index;
    while (first > 0 && this.isIdle(first - 1)) first -= 1;
    while (first > 0 && !this.isIdle(first - 1)) first -= 1;
    return first;
  }

  /** Return whether the engine has no request. */
  isIdle(index) {
    const { running, waiting } = this.frames[index];
    return !running.length && !waiting.length;
  }

  highlight(request) {
    if (this.highlighted === request) return;
    this.highlighted = request;
    this.draw();
  }

  selectPage(page) {
    if (this.selectedPage === page) return;
    this.selectedPage = page;
    this.draw();
  }

  /** Return the page at a pointer position in the pool, or null. */
  pageAt(event) {
    const column = Math.floor(event.offsetX / this.poolCell);
    const page = Math.floor(event.offsetY / this.poolCell) * this.poolColumns + column;
    return column < this.poolColumns && page < this.setup.num_pages ? page : null;
  }

  colour(request) {
    const slot = this.slots.get(request) ?? request;
    const ring = Math.floor(slot / HUES.length) % 3;
    const light = (DARK_SCHEME.matches ? [0.72, 0.58, 0.84] : [0.6, 0.45, 0.74])[ring];
    return `oklch(${light} 0.13 ${HUES[slot % HUES.length]})`;
  }

  /** Schedule one redraw: in the next frame, or with reduced motion half a second later. */
  draw() {
    if (this.drawPending) return;
    this.drawPending = true;
    const now = () => requestAnimationFrame(() => {
      this.drawPending = false;
      this.show();
    });
    if (REDUCED_MOTION.matches && this.playing) setTimeout(now, 500);
    else now();
  }

  show() {
    const style = getComputedStyle(this.element);
    this.colours = Object.fromEntries(
      ["ink", "soft", "paper", "panel", "line", "alarm"]
        .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
    );
    this.showLegend();
    const frame = this.frames[this.index];
    this.showControls(frame);
    if (frame) {
      this.showFigures(frame);
      this.showRequests(frame);
      if (this.setup.recorded) this.stepLine.textContent = this.describeStep(frame);
    }
    if (this.reasonLine) this.reasonLine.textContent = this.reason();
    const shown = frame || { owners: new Map(), cached: [], requests: new Map() };
    if (this.shows.has("pages")) this.showPool(shown);
    this.description.textContent = this.describeTarget(shown);
  }

  /** Describe a step of a recording in words. */
  describeStep(frame) {
    const earlier = this.frames[this.index - 1];
    const parts = [];
    const addPart = (ids, one, many = one) => {
      if (ids.length) parts.push(`${ids.join(", ")} ${ids.length > 1 ? many : one}`);
    };
    const requests = [...frame.requests.values()];
    const ids = (condition) => requests.filter(condition).map((request) => request.number).sort((a, b) => a - b);
    const isScheduled = ({ work }) => work[0] > 0;
    const starts = (request) => isScheduled(request) && (earlier?.requests.get(request.number)?.state ?? "waiting") === "waiting";
    addPart(frame.preempted, "is preempted", "are preempted");
    addPart(ids(starts), "starts", "start");
    const found = frame.shared - (earlier?.shared ?? 0);
    if (found && this.shows.has("sharing")) parts.push(`${found} cached positions are reused`);
    for (const request of requests.filter((request) => request.work[0] - request.work[1] > 1)) {
      parts.push(`${request.number} prefills ${request.work[0] - request.work[1]} tokens`);
    }
    for (const request of requests.filter((request) => request.work[1])) {
      parts.push(`${request.number} accepts ${request.work[2]} of ${request.work[1]} drafts`);
    }
    addPart(ids((request) => request.work[3]), "emits tokens", "emit tokens");
    addPart(ids((request) => request.state === "over"), "finishes", "finish");
    const isWaiting = (request) => request.state === "waiting" && !frame.preempted.includes(request.number);
    addPart(ids(isWaiting), "waits", "wait");
    return `Step ${number.format(frame.steps)}: ${parts.join("; ")}.`;
  }

  showFigures(frame) {
    const shared = [...frame.owners.values()].filter((ids) => ids.length > 1).length;
    const set = (name, value, of = "") => {
      const element = this.figures[name];
      element.textContent = value;
      if (of) make("small", element, "", ` ${of}`);
    };
    set("running", frame.running.length, `of ${this.setup.max_num_seqs}`);
    set("waiting", number.format(frame.queued));
    set("pages in use", number.format(frame.owners.size), `of ${number.format(this.setup.num_pages)}`);
    set("pages shared", number.format(shared));
    set("preemptions", number.format(frame.preemptions));
    this.figures.preemptions.classList.toggle("alarm", frame.preempted.length > 0);
    set("tokens a second", this.rate());
    set("positions computed", number.format(frame.positions));
    set("positions found in the cache", number.format(frame.shared));
    set("drafts accepted", number.format(frame.accepted), `of ${number.format(frame.drafted)}`);
  }

  /** Return new tokens per second over the last second of frames. */
  rate() {
    const last = this.frames[this.index];
    if (this.isIdle(this.index)) return "0";
    let first = this.index;
    let tokens = 0;
    while (first > 0 && last.time - this.frames[first].time < 1 && !this.isIdle(first - 1)) {
      tokens += this.frames[first].tokens;
      first -= 1;
    }
    const seconds = last.time - this.frames[first].time;
    return seconds < 0.2 ? "\u2013" : number.format(Math.round(tokens / seconds));
  }

  showRequests(frame) {
    const room = this.stripWidth || 400;
    const { recorded } = this.setup;
    const widest = recorded ? Math.floor(room / this.frames.length) : MIN_COLUMN_WIDTH;
    this.columnWidth = Math.max(Math.min(widest, MAX_COLUMN_WIDTH), MIN_COLUMN_WIDTH);
    const count = Math.max(Math.floor(room / this.columnWidth), 8);
    const from = Math.max(this.index - count + 1, 0);
    const columns = this.frames.slice(from, this.index + 1);
    this.lastHead.textContent = this.columnTitle + (from ? `; the last ${count}` : "");
    const latest = new Map(); // the latest state of each request
    for (const column of columns) {
      for (const [id, request] of column.requests) latest.set(id, request);
    }
    for (let index = from - 1; index >= 0 && latest.size < MIN_LISTED; index--) {
      const { over, requests } = this.frames[index];
      for (const { number: id } of over) latest.set(id, requests.get(id));
    }
    const order = { running: 0, waiting: 1, over: 2 };
    const all = [...latest.keys()].sort(
      (a, b) => order[latest.get(a).state] - order[latest.get(b).state] || a - b,
    );
    const ids = all.slice(0, MAX_LISTED).sort((a, b) => a - b);
    this.listNote.textContent = this.hiddenNote(frame, all.length - ids.length, latest, from);
    if (!ids.length) this.listNote.textContent = "No requests.";
    for (const [id, item] of this.items) {
      if (ids.includes(id)) continue;
      item.remove();
      this.items.delete(id);
    }
    ids.forEach((id, place) => {
      const item = this.items.get(id) || this.newItem(id);
      if (this.list.children[place] !== item) this.list.insertBefore(item, this.list.children[place]);
      this.showRequest(item, latest.get(id), frame, columns);
    });
    this.items = new Map(ids.map((id) => [id, this.items.get(id)]));
  }

  /** Say which requests are not listed. hidden: number of requests in frames that are not listed. */
  hiddenNote(frame, hidden, latest, from) {
    const unseen = this.setup.recorded ? 0 : frame.queued - frame.waiting.length;
    const left = number.format(hidden + unseen);
    if (hidden + unseen) return `and ${left} more: the list shows ${MAX_LISTED}, running requests first`;
    const gone = ({ over }) => over.some((request) => !latest.has(request.number));
    return this.frames.slice(0, from).some(gone) ? "Requests that finished earlier are not listed." : "";
  }

  newItem(id) {
    const item = make("li", this.list);
    item.request = id;
    const name = make("b", item);
    item.chip = make("i", name);
    make("span", name, "", String(id));
    item.state = make("span", item, "state");
    item.counts = make("span", item, "counts");
    item.table = make("canvas", item);
    item.table.hidden = !this.shows.has("pages");
    item.strip = make("canvas", item);
    for (const canvas of [item.table, item.strip]) canvas.setAttribute("aria-hidden", "true");
    this.items.set(id, item);
    return item;
  }

  showRequest(item, request, frame, columns) {
    const id = request.number;
    const uncomputed = request.tokens - request.start - request.computed;
    const owns = this.selectedPage !== null && (frame.owners.get(this.selectedPage) || []).includes(id);
    let state = request.state === "over" ? `finished: ${request.reason}` : request.state;
    const again = request.state === "waiting" && request.preempted;
    if (again) state = "preempted, waiting";
    if (request.state === "running") {
      state = uncomputed > 1 ? `prefill, ${number.format(uncomputed)} to go` : "decode";
    }
    item.state.textContent = state;
    item.state.classList.toggle("alarm", again || request.reason === "error");
    item.classList.toggle("over", request.state === "over");
    item.classList.toggle("past", !columns.some(({ requests }) => requests.has(id)));
    item.classList.toggle("lit", id === this.highlighted || owns);
    item.chip.style.background = this.colour(id);
    item.counts.textContent = `${number.format(request.prompt)} + ${number.format(request.tokens - request.prompt)}`;
    if (this.shows.has("pages")) this.showTable(item.table, request, frame);
    this.showStrip(item.strip, id, columns);
  }

  /**
   * Draw the page table of a request, each page filled by its computed positions. Entries of freed
   * pages, null, stay empty.
   */
  showTable(canvas, request, frame) {
    const [context, width] = prepare(canvas, 14);
    const cell = Math.min(13, Math.max(width / this.mostPages, 2));
    const side = cell > 4 ? cell - 2 : cell - 0.5;
    const top = (14 - side) / 2;
    request.pages.forEach((page, index) => {
      if (page === null) return;
      const left = index * cell;
      const filled = request.computed - index * this.setup.page_size;
      const share = Math.min(Math.max(filled / this.setup.page_size, 0), 1);
      context.globalAlpha = 0.28;
      context.fillStyle = this.colour(request.number);
      context.fillRect(left, top, side, side);
      context.globalAlpha = 1;
      context.fillRect(left, top, side * share, side);
      if (frame.owners.get(page)?.length > 1 && side > 4) {
        context.fillStyle = this.colours.paper;
        context.beginPath();
        context.arc(left + side / 2, top + side / 2, side / 5, 0, 7);
        context.fill();
      }
      if (page === this.selectedPage) this.outline(context, left, top, side);
    });
  }

  /** Draw the positions that each frame computed for a request, on a logarithmic scale. */
  showStrip(canvas, id, columns) {
    const height = 22;
    const [context, width] = prepare(canvas, height);
    if (width && width !== this.stripWidth) {
      this.stripWidth = width;
      this.draw(); // with columns that fit the new width
    }
    columns.forEach((frame, index) => {
      const left = index * this.columnWidth;
      const before = columns[index - 1];
      if (before && !before.running.length && !before.waiting.length) {
        context.fillStyle = this.colours.line; // the engine was idle before
        context.fillRect(left, 0, 1, height);
      }
      const request = frame.requests.get(id);
      if (!request) return;
      this.bar(context, left, request, height);
      const old = before?.requests.get(id);
      if (old && request.start !== old.start) { // a context shift
        context.fillStyle = this.colours.ink;
        context.fillRect(left - 1, 0, 1, height);
      }
      if (frame.preempted.includes(id)) this.cross(context, left + this.columnWidth / 2 - 3, height / 2);
      if (request.state === "over") {
        context.fillStyle = request.reason === "error" ? this.colours.alarm : this.colours.ink;
        context.fillRect(left + this.columnWidth - 2, 2, 2, height - 2);
      }
    });
  }

  bar(context, left, request, height, wide = this.columnWidth) {
    const [positions, drafts, accepted, tokens] = request.work;
    if (!positions) {
      context.fillStyle = this.colours.soft;
      if (request.state === "waiting") context.fillRect(left, height - 3, wide - 2, 1);
      return;
    }
    const more = Math.log2(positions) / Math.log2(Math.max(this.setup.max_num_batched_tokens, 2));
    const full = 5 + (height - 6) * Math.min(more, 1);
    const rejected = (full * (drafts - accepted)) / positions;
    // A step that yields tokens has one position for the first and one per accepted draft.
    const prefill = (full * Math.max(positions - drafts - (tokens - accepted), 0)) / positions;
    context.fillStyle = this.colour(request.number);
    context.fillRect(left, height - full + rejected, wide - 1, full - rejected);
    if (rejected) {
      context.fillStyle = this.colours.soft;
      context.fillRect(left, height - full, wide - 1, 1);
      context.fillRect(left, height - full, 1, rejected);
      context.fillRect(left + wide - 2, height - full, 1, rejected);
    }
    if (prefill) {
      context.globalAlpha = 0.62;
      context.fillStyle = this.colours.paper;
      context.fillRect(left, height - full + rejected, wide - 1, prefill);
      context.globalAlpha = 1;
    }
  }

  cross(context, left, middle) {
    context.strokeStyle = this.colours.alarm;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(left - 2, middle - 4);
    context.lineTo(left + 6, middle + 4);
    context.moveTo(left + 6, middle - 4);
    context.lineTo(left - 2, middle + 4);
    context.stroke();
  }

  outline(context, left, top, side) {
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left - 1, top - 1, side + 2, side + 2);
  }

  /** Draw each page of the cache as a square, in the colours of its requests. */
  showPool(frame) {
    const pages = this.setup.num_pages;
    const width = this.pool.clientWidth;
    let cell = 24;
    while (cell > 4 && Math.ceil(pages / Math.floor((width - 2) / cell)) * cell > 150) cell -= 1;
    this.poolCell = cell;
    this.poolColumns = Math.max(Math.floor((width - 2) / cell), 1);
    const [context] = prepare(this.pool, Math.ceil(pages / this.poolColumns) * cell + 2);
    const side = cell > 6 ? cell - 3 : cell - 1;
    const cached = new Set(this.shows.has("sharing") ? frame.cached : []);
    for (let page = 0; page < pages; page++) {
      const left = (page % this.poolColumns) * cell + 1;
      const top = Math.floor(page / this.poolColumns) * cell + 1;
      const ids = frame.owners.get(page) || [];
      const dim = this.highlighted !== null && !ids.includes(this.highlighted);
      this.square(context, left, top, side, ids, cached.has(page), dim);
      if (page === this.selectedPage) this.outline(context, left, top, side);
    }
    const size = this.setup.page_size;
    this.title.textContent = `KV cache: ${number.format(pages)} pages of ${size} positions`;
    const use = frame.owners.size;
    this.pool.setAttribute(
      "aria-label",
      `${use} pages in use, ${cached.size} free but cached, `
        + `${pages - use - cached.size} free otherwise. Arrow keys describe each page.`,
    );
  }

  square(context, left, top, side, ids, cached, dim) {
    context.globalAlpha = dim ? 0.22 : 1;
    if (!ids.length) {
      context.strokeStyle = this.colours.line;
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
      if (cached) {
        context.fillStyle = this.colours.soft;
        context.globalAlpha *= 0.4;
        context.fillRect(left, top, side, side);
      }
    }
    const shown = ids.slice(0, 4);
    shown.forEach((id, index) => {
      context.fillStyle = this.colour(id);
      const part = side / shown.length;
      context.fillRect(left + index * part, top, part, side);
    });
    if (ids.length > 1) {
      context.fillStyle = this.colours.paper;
      context.beginPath();
      context.arc(left + side / 2, top + side / 2, side / 5, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  /** Describe the page or request under the pointer; without one, return a hint. */
  describeTarget(frame) {
    if (this.selectedPage !== null) return this.describePage(this.selectedPage, frame);
    const request = frame.requests.get(this.highlighted);
    const text = request && this.textOf(request.number, 0, request.tokens);
    return text ? `Request ${request.number}: ${text}` : this.hint();
  }

  /** Return a part of the text of a request, or "" if it is unknown. */
  textOf(id, from, to) {
    const tokens = this.setup.texts?.[id];
    return tokens ? `\u201c${tokens.slice(from, to).join("")}\u201d` : "";
  }

  hint() {
    if (this.setup.recorded) {
      const what = this.shows.has("pages") ? "a request or a page" : "a request";
      return `Point at ${what}, or tap it, for its text.`;
    }
    const { num_pages, max_num_seqs, block_size, page_size } = this.setup;
    const whole = max_num_seqs * Math.ceil(block_size / page_size);
    if (num_pages >= whole) {
      return `The cache has pages for ${max_num_seqs} full context windows: no request is ever preempted. `
        + "Start the server with a smaller --num-pages to see preemption.";
    }
    return "Point at a page, or tap it.";
  }

  describePage(page, frame) {
    const ids = frame.owners.get(page) || [];
    const { page_size } = this.setup;
    if (!ids.length) {
      const found = this.shows.has("sharing") && frame.cached.includes(page);
      const why = found ? ", but cached for requests with the same prefix" : "";
      return `Page ${page}: free${why}.`;
    }
    const request = frame.requests.get(ids[0]);
    const from = request.pages.indexOf(page) * page_size;
    const who = ids.length > 1 ? `shared by requests ${ids.join(", ")}` : `of request ${ids[0]}`;
    const to = Math.min(from + page_size, request.computed);
    const text = to > from && this.textOf(ids[0], request.start + from, request.start + to);
    const holds = text ? `: ${text}` : ".";
    return `Page ${page}: ${who}, positions ${from} to ${from + page_size - 1}${holds}`;
  }

  showLegend() {
    const works = { prompt: [64, 0, 0, 0], token: [2, 0, 0, 2], rejected: [4, 3, 0, 1] };
    for (const [kind, canvas] of Object.entries(this.legendSamples)) {
      const [context] = prepare(canvas, 18);
      const ids = { own: [0], shared: [0, 1] }[kind] || [];
      if (kind === "preempted") this.cross(context, 10, 9);
      else if (works[kind]) {
        for (const left of [3, 9, 15]) {
          this.bar(context, left, { number: 0, work: works[kind] }, 18, MIN_COLUMN_WIDTH);
        }
      } else this.square(context, 4, 1, 16, ids, kind === "cached", false);
    }
  }

  showControls(frame) {
    const last = this.frames.length - 1;
    this.range.max = Math.max(last, 0);
    this.range.value = Math.max(this.index, 0);
    this.range.disabled = last < 1;
    this.backButton.disabled = this.index <= 0;
    this.forwardButton.disabled = this.index >= last;
    this.playButton.textContent = this.playing ? "Pause" : "Play";
    this.liveButton.disabled = this.playing && this.index === last;
    this.replayButton.disabled = last < 1;
    const behind = frame ? this.frames[last].time - frame.time : 0;
    const late = behind && !this.setup.recorded ? `, ${behind.toFixed(1)} s ago` : "";
    this.stepOutput.textContent = frame ? `step ${number.format(frame.steps)}${late}` : "";
    if (this.playing) this.onChange(this.index < last ? "replayed" : "live");
    else this.onChange("paused");
  }
}
