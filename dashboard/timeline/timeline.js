// The timeline canvas: draws what the server sends for the pixels in view (see lod.py), and asks again when they change.
//
// Times are ns since the start of the run's picture, as plain numbers. On the run's own clock they are beyond what a
// number counts exactly, so only the address, which holds such times, is read and written with BigInt.
(function () {
  "use strict";

  const LABELS = 168; // px of the column of names
  const RULER = 52; // px: findings, steps, times
  const HEAD = 22; // px of a group's line
  const ROOMY = 18; // px of a lane's line, of which 2 stay empty
  const DENSE = 14; // the same where there are many ranks
  const MANY_RANKS = 24;
  const MOST_OPEN = 256; // ranks up to which the groups start unfolded
  const FEW_RANKS = 4; // up to which the ranks start unfolded
  const MARGIN = 0.1; // of the view, fetched on either side so that panning shows something at once
  const LEAST_NS = 200; // no view is shorter
  const NEAR_PX = 3; // how far from an event the pointer still means it
  const HOVER_MS = 25;
  const RETRY_MS = 300;
  const INKS = ["page", "text", "quiet", "rule", "panel", "accent", "line", "high", "medium", "low"]; // of the palette
  const FONT = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

  const STYLE = `
#page:has(.rst) { max-width: none; }
.rst { display: flex; flex-direction: column; color: var(--text); background: var(--page); min-height: 320px;
  font: 13px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.rst-bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 4px 2px 6px; }
.rst-bar input, .rst-bar select, .rst button { font: inherit; color: var(--text); background: var(--panel);
  border: 1px solid var(--rule); border-radius: 4px; padding: 3px 8px; }
.rst-bar input { width: 210px; }
.rst button { cursor: pointer; } .rst button:hover { border-color: var(--quiet); }
.rst :focus-visible { outline: 2px solid var(--line); outline-offset: 1px; }
.rst-quiet { color: var(--quiet); }
.rst-space { flex: 1; }
.rst-body { display: flex; flex: 1; min-height: 0; gap: 10px; }
.rst-scroll { flex: 1; min-width: 0; overflow-y: auto; overflow-x: hidden; position: relative; border: 1px solid var(--rule); }
.rst-scroll canvas { position: sticky; top: 0; left: 0; display: block; touch-action: none; }
.rst-side { width: 300px; overflow: auto; border: 1px solid var(--rule); padding: 8px 10px; box-sizing: border-box; }
.rst-side h3 { font-size: 14px; margin: 0 0 6px; overflow-wrap: anywhere; } .rst-side h4 { font-size: 13px; margin: 12px 0 2px; }
.rst-side table { color: inherit; border-collapse: collapse; width: 100%; font-size: 12px; font-variant-numeric: tabular-nums; }
.rst-side td, .rst-side th { padding: 2px 6px 2px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); font-weight: 400; }
.rst-side th { color: var(--quiet); } .rst-side td { overflow-wrap: anywhere; } .rst-side .n { text-align: right; white-space: nowrap; padding-right: 0; padding-left: 6px; }
.rst-side kbd { border: 1px solid var(--rule); border-radius: 3px; padding: 0 4px; font: 12px monospace; }
.rst-names { margin-top: 8px; table-layout: fixed; } .rst-names td[colspan] { border-bottom: 0; padding-bottom: 0; }
.rst-tip { position: fixed; z-index: 1000; pointer-events: none; max-width: 360px; padding: 6px 9px; border-radius: 4px; font-size: 12px;
  color: var(--text); background: var(--panel); border: 1px solid var(--quiet); box-shadow: 0 2px 8px rgba(0,0,0,.25); overflow-wrap: anywhere; }
.rst-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 6px 2px 0; font-size: 12px; color: var(--quiet); }
.rst-swatch { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px; }
@media (max-width: 900px) { .rst-side { display: none; } }
`;

  // ---------------------------------------------------------------- words and numbers

  function duration(ns) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (Math.abs(ns) >= size) return `${ns / size >= 100 ? (ns / size).toFixed(0) : (ns / size).toPrecision(3)} ${unit}`;
    }
    return `${Math.round(ns)} ns`;
  }

  function tickLabel(t, step) {
    if (step >= 1e8) return `${(t / 1e9).toFixed(step >= 1e9 ? 0 : 1)} s`;
    return `${(t / 1e6).toFixed(Math.max(0, Math.min(6, Math.ceil(6 - Math.log10(step)))))} ms`;
  }

  function niceStep(least) {
    const size = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((n) => n * size).find((step) => step >= least * 0.999);
  }

  function rgb(hex) {
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  // ---------------------------------------------------------------- the server's answers

  async function post(url, question, signal) {
    const response = await fetch(url, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(question),
      credentials: "same-origin",
      signal,
    });
    if (!response.ok) {
      const said = await response.json().catch(() => ({}));
      throw new Error(said.error || `the server answered ${response.status}`);
    }
    return response;
  }

  /** A view's header and typed arrays; the layout is that of lod.view. */
  function unpack(buffer) {
    const size = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    const n = head.rects;
    let at = 4 + size;
    const take = (type) => {
      const array = new type(buffer, at, n);
      at += array.byteLength;
      return array;
    };
    const rects = { start: take(Uint32Array), length: take(Uint32Array), name: take(Uint16Array), lane: take(Uint16Array), kind: take(Uint8Array) };
    return { head, rects, bytes: new Uint8Array(buffer, at) };
  }

  /** All rasters of a view in one image, one lane below the other; kinds are stacked from the bottom up. */
  function paintRasters({ head, bytes }, colours) {
    const width = head.bins;
    const total = head.rasters.reduce((sum, [, , levels]) => sum + levels, 0);
    const places = new Map();
    if (!total) return { image: null, places };
    const image = new ImageData(width, total);
    const pixels = new Uint32Array(image.data.buffer);
    const used = new Uint16Array(width);
    let top = 0;
    let at = 0;
    for (const [lane, kinds, levels] of head.rasters) {
      places.set(lane, { top, levels });
      used.fill(0);
      const bottom = (top + levels - 1) * width;
      for (const kind of kinds) {
        const colour = colours[kind];
        for (let x = 0; x < width; x++) {
          const high = bytes[at + x];
          if (!high) continue;
          let p = bottom - used[x] * width + x;
          for (let i = 0; i < high; i++, p -= width) pixels[p] = colour;
          used[x] += high;
        }
        at += width;
      }
      top += levels;
    }
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = total;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return { image: canvas, places };
  }

  // ---------------------------------------------------------------- the timeline

  class Timeline {
    constructor(root, { base, run }) {
      this.root = root;
      this.base = base;
      this.run = run;
      this.t0 = 0;
      this.t1 = 1;
      this.lines = [];
      this.data = null; // the last view that came, and how it is drawn
      this.pointer = null;
      this.hovered = null;
      this.chosen = null;
      this.selection = null;
      this.found = null;
      this.marks = [];
      this.path = null;
      this.opened = performance.now();
      this.stops = [];
      this.build();
      this.start();
    }

    destroy() {
      this.stopped = true;
      this.stops.forEach((stop) => stop());
      this.tip.remove();
      this.root.replaceChildren();
    }

    listen(target, event, handler, options) {
      target.addEventListener(event, handler, options);
      this.stops.push(() => target.removeEventListener(event, handler, options));
    }

    ask(what, question, signal) {
      return post(`${this.base}/${what}`, { run: this.run, ...question }, signal);
    }

    async askJson(what, question) {
      return (await this.ask(what, question)).json();
    }

    build() {
      const button = (text, title, click) => make("button", { type: "button", title, "aria-label": title, onclick: click }, text);
      this.search = make("input", { type: "search", placeholder: "search names  ( / )", "aria-label": "search names" });
      this.count = make("span", { class: "rst-quiet", role: "status" });
      this.grouping = make("select", { "aria-label": "group ranks by" });
      this.where = make("span", { class: "rst-quiet rst-where" });
      const bar = make("div", { class: "rst-bar" },
        this.search, button("‹", "previous match", () => this.nextMatch(-1)), button("›", "next match", () => this.nextMatch(1)), this.count,
        make("span", { class: "rst-space" }), this.where, this.grouping,
        button("unfold", "unfold all ranks", () => this.unfold(true)), button("fold", "fold all ranks", () => this.unfold(false)),
        button("−", "zoom out (S)", () => this.zoom(1.6)), button("+", "zoom in (W)", () => this.zoom(1 / 1.6)),
        button("all", "whole run (0)", () => this.show(0, this.end)),
        button("judged", "judged steps (Home)", () => this.show(...this.home)));
      this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "timeline of the ranks" });
      this.spacer = make("div", {});
      this.scroll = make("div", { class: "rst-scroll" }, this.canvas, this.spacer);
      this.side = make("div", { class: "rst-side" });
      this.legend = make("div", { class: "rst-legend" });
      this.tip = make("div", { class: "rst-tip", hidden: "" });
      this.root.classList.add("rst");
      this.root.replaceChildren(make("style", {}, STYLE), bar, make("div", { class: "rst-body" }, this.scroll, this.side), this.legend, this.tip);
      this.pen = this.canvas.getContext("2d");
    }

    async start() {
      try {
        let scene = await this.askJson("scene", {});
        while (scene.waiting && !this.stopped) {
          this.say("The run is being read…");
          await new Promise((done) => setTimeout(done, RETRY_MS));
          scene = await this.askJson("scene", {});
        }
        if (this.stopped) return;
        this.take(scene);
        if (!scene.present.length) {
          this.say("There is nothing to draw: the run holds no steps, regions, communication or device work.");
          return;
        }
        scene.groupings.forEach(([title], i) => this.grouping.append(make("option", { value: String(i) }, `by ${title}`)));
        this.grouping.hidden = scene.groupings.length < 2;
        this.paint();
        this.readAddress();
        this.attach();
        this.hint();
        this.pollMarks();
      } catch (error) {
        if (!this.stopped) this.say(`The timeline cannot be shown: ${error.message}`);
      }
    }

    /** A run that goes on has been read again: the view stays. */
    async refresh() {
      if (!this.scene) return;
      const scene = await this.askJson("scene", {}).catch(() => null);
      if (!scene || scene.waiting || this.stopped) return;
      const atHome = this.t0 === this.home[0] && this.t1 === this.home[1];
      const whole = this.t1 - this.t0 > this.end;
      const later = Number(BigInt(scene.origin) - this.origin);
      this.take(scene);
      this.by = Math.min(this.by, scene.groupings.length - 1);
      this.data = null;
      this.layOut();
      if (atHome) this.show(...this.home);
      else if (whole) this.show(0, this.end);
      else this.show(this.t0 - later, this.t1 - later);
      this.pollMarks();
    }

    take(scene) {
      this.scene = scene;
      this.end = scene.end;
      this.home = scene.judged;
      this.origin = BigInt(scene.origin);
      this.ranks = new Map(scene.tracks);
      this.nodeOf = new Map(scene.nodes);
      this.clockOf = new Map(scene.clocks);
    }

    say(text) {
      this.side.replaceChildren(make("p", { class: "rst-quiet", role: "status" }, text));
    }

    async pollMarks() {
      while (!this.stopped) {
        const said = await this.askJson("marks", {}).catch(() => ({ marks: [] }));
        if (!said.waiting) {
          this.marks = said.marks;
          this.redraw();
          return;
        }
        await new Promise((done) => setTimeout(done, 3 * RETRY_MS));
      }
    }

    // -------------------------------------------------------------- colours

    /** Takes the page's colours, which change with its scheme. */
    paint() {
      const page = getComputedStyle(document.documentElement);
      const colour = (name) => page.getPropertyValue(`--${name}`).trim() || "#888888";
      this.ink = Object.fromEntries(INKS.map((name) => [name, colour(name)]));
      this.css = this.scene.kinds.map(([, name]) => colour(name));
      this.rgba = this.css.map((hex) => { const [r, g, b] = rgb(hex); return (255 << 24 | b << 16 | g << 8 | r) >>> 0; });
      this.onKind = this.css.map((hex) => { const [r, g, b] = rgb(hex); return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14181d" : "#ffffff"; });
      const byColour = Map.groupBy(this.scene.present, (kind) => this.css[kind]);
      this.legend.replaceChildren(...[...byColour.values()].map((kinds) =>
        make("span", {}, this.swatch(kinds[0]), kinds.map((kind) => this.scene.kinds[kind][0]).join(", "))));
      if (this.data) Object.assign(this.data, paintRasters(this.data, this.rgba));
    }

    swatch(kind) {
      return make("span", { class: "rst-swatch", style: `background:${this.css[kind]}` });
    }

    // -------------------------------------------------------------- lines: what stands below what

    /** Lines of the present grouping and folding, with the lanes that each draws. */
    layOut() {
      const [, groups] = this.scene.groupings[this.by];
      this.pitch = this.ranks.size > MANY_RANKS ? DENSE : ROOMY;
      this.lines = [];
      this.lineOfLane = new Map();
      this.lineOfRank = new Map();
      let y = 0;
      const add = (line, height) => {
        Object.assign(line, { y, height });
        y += height;
        this.lines.push(line);
        (line.lanes.length === 1 ? line.lanes : []).forEach((lane) => this.lineOfLane.set(lane, line));
        return line;
      };
      groups.forEach(([title, ranks], group) => {
        const folded = this.foldedGroups.has(group);
        if (groups.length > 1 || this.clockNote(ranks)) {
          const lead = ranks.map((rank) => this.ranks.get(rank)).filter((tracks) => tracks && tracks.length).map((tracks) => tracks[0][1][0]);
          const head = add({ type: "group", group, title, ranks, folded, lanes: folded ? lead : [] }, HEAD);
          if (folded) ranks.forEach((rank) => this.lineOfRank.set(rank, head));
        }
        if (folded) return;
        for (const rank of ranks) {
          const tracks = this.ranks.get(rank) || [];
          const open = this.openRanks.has(rank);
          const lead = tracks.length ? tracks[0][1].slice(0, 1) : [];
          this.lineOfRank.set(rank, add({ type: "rank", rank, open, tracks, title: `rank ${rank}`, lanes: lead, track: tracks.length ? tracks[0][0] : "nothing recorded" }, this.pitch));
          if (!open) continue;
          tracks.forEach(([track, lanes, hidden], i) => lanes.forEach((lane, depth) => {
            if (i === 0 && depth === 0) return;
            const more = hidden && depth === lanes.length - 1 ? `${hidden} more not drawn` : "";
            add({ type: "lane", rank, title: depth === 0 ? track : more, lanes: [lane] }, this.pitch);
          }));
          if (open) y += 4;
        }
      });
      this.tall = y;
      this.resize();
    }

    clockNote(ranks) {
      const nodes = new Set(ranks.map((rank) => this.nodeOf.get(rank)));
      const errors = [...nodes].map((node) => this.clockOf.get(node));
      if (errors.some((error) => error === null || error === undefined)) return "clock not known";
      const worst = Math.max(0, ...errors);
      return worst > 0 ? `clock ± ${duration(worst)}` : "";
    }

    /** ± ns of this rank's clock against node 0's; null: nobody knows. */
    clockError(rank) {
      const error = this.clockOf.get(this.nodeOf.get(rank));
      return error === undefined ? null : error;
    }

    resize() {
      const box = this.root.getBoundingClientRect();
      this.root.style.height = `${Math.max(320, window.innerHeight - box.top - 10)}px`;
      this.dpr = window.devicePixelRatio || 1;
      this.width = Math.max(this.scroll.clientWidth, LABELS + 50);
      this.height = Math.max(this.scroll.clientHeight, RULER + 50);
      this.plot = this.width - LABELS;
      const [w, h] = [Math.round(this.width * this.dpr), Math.round(this.height * this.dpr)];
      if (this.canvas.width !== w || this.canvas.height !== h) {
        this.canvas.width = w;
        this.canvas.height = h;
        this.canvas.style.width = `${this.width}px`;
        this.canvas.style.height = `${this.height}px`;
      }
      // The canvas sticks to the top; below it only as much room as the lines need more than it has.
      this.spacer.style.height = `${Math.max(0, this.tall + RULER + 8 - this.height)}px`;
      this.changed();
    }

    inView() {
      const from = this.scroll.scrollTop;
      const to = from + this.height - RULER;
      return this.lines.filter((line) => line.y + line.height > from && line.y < to);
    }

    lineAt(y) {
      const at = y - RULER + this.scroll.scrollTop;
      return y < RULER ? null : this.lines.find((line) => at >= line.y && at < line.y + line.height) || null;
    }

    top(line) {
      return RULER + line.y - this.scroll.scrollTop;
    }

    x(t) {
      return LABELS + ((t - this.t0) / (this.t1 - this.t0)) * this.plot;
    }

    time(x) {
      return this.t0 + ((x - LABELS) / this.plot) * (this.t1 - this.t0);
    }

    // -------------------------------------------------------------- the view

    /** Shows [t0, t1), kept within the run and not too short. */
    show(t0, t1) {
      const span = Math.min(Math.max(t1 - t0, LEAST_NS), this.end * 1.02);
      const slack = span * 0.5;
      const start = Math.min(Math.max((t0 + t1 - span) / 2, -Math.min(slack, this.end * 0.01)), Math.max(this.end * 1.01 - span, -this.end * 0.01));
      this.t0 = start;
      this.t1 = start + span;
      this.asked = performance.now();
      this.changed();
    }

    zoom(factor, x) {
      const at = this.time(x === undefined || x < LABELS ? LABELS + this.plot / 2 : x);
      this.show(at - (at - this.t0) * factor, at + (this.t1 - at) * factor);
    }

    pan(fraction) {
      const by = fraction * (this.t1 - this.t0);
      this.show(this.t0 + by, this.t1 + by);
    }

    changed() {
      this.redraw();
      this.fetch();
      clearTimeout(this.addressTimer);
      this.addressTimer = setTimeout(() => this.writeAddress(), 250);
    }

    /** Asks for what is in view, one question at a time: the newest one counts. */
    async fetch() {
      if (this.fetching) {
        this.again = true;
        return;
      }
      const lines = this.inView().filter((line) => line.lanes.length);
      const lanes = lines.map((line) => line.lanes);
      const key = JSON.stringify([lanes, this.dpr, this.pitch]);
      const span = this.t1 - this.t0;
      const density = (this.plot * this.dpr) / span;
      const data = this.data;
      const same = data && data.key === key && Math.abs(data.density / density - 1) < 1e-6;
      const covered = same && data.head.t0 <= Math.max(this.t0, data.least) && data.head.t1 >= Math.min(this.t1, data.most);
      if (covered || !lanes.length) return;
      const [least, most] = [-0.01 * this.end, 1.01 * this.end];
      const t0 = Math.floor(Math.max(this.t0 - MARGIN * span, Math.min(least, this.t0)));
      const t1 = Math.ceil(Math.min(this.t1 + MARGIN * span, Math.max(most, this.t1)));
      const question = { t0, t1, pixels: Math.min(8192, Math.max(1, Math.round((t1 - t0) * density))), levels: Math.round((this.pitch - 2) * this.dpr), lanes };
      this.fetching = true;
      const asked = this.asked;
      try {
        const answer = await this.ask("view", question);
        const buffer = await answer.arrayBuffer();
        if (this.stopped) return;
        const view = unpack(buffer);
        this.data = { ...view, ...paintRasters(view, this.rgba), key, density, least, most, lines };
        this.fetchPath(t0, t1);
        this.draw();
        this.measure(asked, Number(answer.headers.get("Content-Length")), view.head.events);
      } catch (error) {
        if (!this.stopped) this.say(`The server does not answer: ${error.message}`);
      } finally {
        this.fetching = false;
        if (this.again && !this.stopped) {
          this.again = false;
          this.fetch();
        }
      }
    }

    /** From the question to the painted frame, for anybody who measures: `performance.getEntriesByName`. */
    measure(asked, bytes, events) {
      requestAnimationFrame(() => setTimeout(() => {
        this.root.dataset.painted = String(Number(this.root.dataset.painted || 0) + 1);
        if (asked) performance.measure("rankscope-zoom-to-paint", { start: asked, detail: { bytes, events } });
        else performance.measure("rankscope-first-picture", { start: this.opened, detail: { bytes, events } });
        if (this.asked === asked) this.asked = undefined;
      }));
    }

    async fetchPath(t0, t1) {
      if (this.path === false) return; // this run has none
      const { pieces } = await this.askJson("path", { t0, t1 }).catch(() => ({ pieces: null }));
      this.path = pieces === null ? false : pieces;
      if (pieces) this.redraw();
    }

    // -------------------------------------------------------------- the address

    readAddress() {
      const query = new URLSearchParams(location.search);
      const [range, ...rest] = location.hash.slice(1).split("&");
      const kept = new URLSearchParams(rest.join("&"));
      const listed = (text, all) => (text === "all" ? all : text.split(",").filter(Boolean).map(Number).filter(Number.isInteger));
      const { groupings } = this.scene;
      this.by = Math.min(Math.max(Number(kept.get("by")) || 0, 0), groupings.length - 1);
      this.grouping.value = String(this.by);
      const few = this.ranks.size <= FEW_RANKS;
      this.openRanks = new Set(kept.has("lanes") ? listed(kept.get("lanes"), this.ranks.keys()) : few ? this.ranks.keys() : []);
      const groups = groupings[this.by][1];
      const many = this.ranks.size > MOST_OPEN && groups.length > 1;
      this.foldedGroups = new Set(kept.has("fold") ? listed(kept.get("fold"), groups.keys()) : many ? groups.keys() : []);
      const ends = range.includes(",") ? range.split(",") : [query.get("t0"), query.get("t1")];
      let window_ = null;
      try {
        if (ends[0] && ends[1]) window_ = ends.map((t) => Number(BigInt(t) - this.origin));
      } catch {
        window_ = null; // no whole numbers: the judged steps are shown
      }
      const evidence = window_ && !range.includes(",");
      const rank = query.get("rank") === null ? null : Number(query.get("rank"));
      if (evidence) {
        this.selection = { t0: window_[0], t1: window_[1], rank };
        const room = (window_[1] - window_[0]) * 0.5 || this.end * 0.01;
        window_ = [window_[0] - room, window_[1] + room];
      }
      if (rank !== null && this.ranks.has(rank)) this.reveal(rank);
      [this.t0, this.t1] = window_ || this.home;
      this.layOut();
      this.show(this.t0, this.t1);
      this.asked = undefined;
      if (rank !== null) this.scrollTo(this.lineOfRank.get(rank));
      this.fetch();
    }

    writeAddress() {
      if (this.stopped || !this.scene) return;
      const at = (t) => String(this.origin + BigInt(Math.round(t)));
      const list = (chosen, count) => (chosen.size === count ? "all" : [...chosen].join(",")); // thousands would not fit
      const [, groups] = this.scene.groupings[this.by];
      const folds = `lanes=${list(this.openRanks, this.ranks.size)}&fold=${list(this.foldedGroups, groups.length)}`;
      const hash = `#${at(this.t0)},${at(this.t1)}&by=${this.by}&${folds}`;
      // Dash looks at pushes only: a replaced address starts no callback.
      history.replaceState(history.state, "", location.pathname + location.search + hash);
    }

    // -------------------------------------------------------------- drawing

    redraw() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        if (!this.stopped && this.scene) this.draw();
      });
    }

    draw() {
      const { pen, ink } = this;
      pen.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
      pen.font = FONT;
      pen.textBaseline = "middle";
      pen.fillStyle = ink.page;
      pen.fillRect(0, 0, this.width, this.height);
      const lines = this.inView();
      this.drawStripes(lines);
      pen.save();
      pen.beginPath();
      pen.rect(LABELS, RULER, this.plot, this.height - RULER);
      pen.clip();
      this.drawSteps(true);
      this.drawEvents();
      this.drawPath();
      this.drawSelection();
      this.drawChosen();
      this.drawCrosshair();
      pen.restore();
      this.drawLabels(lines);
      this.drawRuler();
      this.where.textContent = `${duration(this.t1 - this.t0)} in view`;
    }

    drawStripes(lines) {
      const { pen, ink } = this;
      for (const line of lines) {
        if (line.type === "group") {
          pen.fillStyle = ink.panel;
          pen.fillRect(0, this.top(line), this.width, line.height);
        }
        pen.fillStyle = ink.rule;
        if (line.type !== "lane") pen.fillRect(0, this.top(line), this.width, 0.5);
      }
    }

    drawEvents() {
      const data = this.data;
      if (!data) return;
      const { pen, dpr } = this;
      const { head, rects } = data;
      // In device pixels, so that edges are sharp and a pixel of the raster is one of the screen.
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.imageSmoothingEnabled = false;
      const scale = (this.plot * dpr) / (this.t1 - this.t0);
      const left = LABELS * dpr - (this.t0 - head.t0) * scale;
      const wide = (head.t1 - head.t0) * scale;
      const place = data.lines.map((line) => {
        // Lines may have moved since the picture was asked for; the ones that are gone are not drawn.
        const now = line.lanes.length === 1 ? this.lineOfLane.get(line.lanes[0]) : this.lines.find((l) => l.type === "group" && l.folded && l.group === line.group);
        return now ? { y: Math.round((this.top(now) + 1) * dpr), h: Math.round((now.height - 2) * dpr) } : null;
      });
      for (const [lane, { top, levels }] of data.places) {
        if (place[lane]) pen.drawImage(data.image, 0, top, head.bins, levels, Math.round(left), place[lane].y, Math.round(wide), place[lane].h);
      }
      pen.font = FONT.replace("11px", `${11 * dpr}px`);
      pen.textBaseline = "middle";
      const perLetter = pen.measureText("abcdefghijklmnop").width / 16;
      const end = this.width * dpr;
      for (let i = 0; i < head.rects; i++) {
        const spot = place[rects.lane[i]];
        if (!spot) continue;
        const a = left + rects.start[i] * head.tick * scale;
        const b = a + rects.length[i] * head.tick * scale;
        if (b < LABELS * dpr || a > end) continue;
        const shared = data.places.has(rects.lane[i]);
        // Where others lie in the same lane, a rectangle takes whole pixels only: the raster shows who shares the rest.
        const x0 = shared ? Math.ceil(a) : Math.round(a);
        const x1 = shared ? Math.floor(b) : Math.max(Math.round(b), x0 + 1);
        if (x1 <= x0) continue;
        pen.fillStyle = this.css[rects.kind[i]];
        pen.fillRect(x0, spot.y, x1 - x0, spot.h);
        if (x1 - x0 > 4 * dpr) {
          pen.fillStyle = "rgba(0,0,0,.28)";
          pen.fillRect(x0, spot.y, Math.max(1, Math.floor(dpr / 2)), spot.h);
        }
        const from = Math.max(x0, LABELS * dpr) + 4 * dpr;
        const letters = Math.floor((Math.min(x1, end) - from - 2 * dpr) / perLetter);
        if (letters >= 3) {
          const name = head.names[rects.name[i]];
          pen.fillStyle = this.onKind[rects.kind[i]];
          pen.fillText(name.length > letters ? `${name.slice(0, letters - 1)}…` : name, from, spot.y + spot.h / 2 + dpr / 2);
        }
      }
      pen.setTransform(dpr, 0, 0, dpr, 0, 0);
      pen.font = FONT;
    }

    drawLabels(lines) {
      const { pen, ink } = this;
      const notes = [];
      pen.save();
      pen.beginPath();
      pen.rect(0, RULER, LABELS - 1, this.height - RULER);
      pen.clip();
      for (const line of lines) {
        const y = this.top(line) + line.height / 2;
        const arrow = line.type === "group" ? (line.folded ? "▸ " : "▾ ") : line.type === "rank" && line.tracks.length ? (line.open ? "▾ " : "▸ ") : "";
        const indent = line.type === "group" ? 6 : line.type === "rank" ? 14 : 34;
        pen.fillStyle = line.type === "lane" ? ink.quiet : ink.text;
        pen.textAlign = "left";
        pen.font = line.type === "group" ? `600 ${FONT}` : FONT;
        const text = arrow + line.title;
        this.write(text, indent, y, LABELS - indent - 6);
        const note = line.type === "group" ? this.clockNote(line.ranks) : line.type === "rank" && this.pitch === ROOMY ? line.track : "";
        const used = indent + pen.measureText(text).width + 10;
        pen.font = FONT;
        pen.fillStyle = ink.quiet;
        if (note && used + pen.measureText(note).width < LABELS - 6) {
          pen.textAlign = "right";
          pen.fillText(note, LABELS - 8, y);
          pen.textAlign = "left";
        } else if (note && line.type === "group" && !line.folded) notes.push([note, y]);
      }
      pen.restore();
      pen.fillStyle = ink.quiet;
      notes.forEach(([note, y]) => { if (y > RULER) pen.fillText(note, LABELS + 8, y); }); // an unfolded group draws nothing there
      pen.fillStyle = ink.rule;
      pen.fillRect(LABELS - 1, 0, 1, this.height);
    }

    /** Text that ends with … where it is longer than its room. */
    write(text, x, y, room) {
      let shown = text;
      while (shown.length > 1 && this.pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
      this.pen.fillText(shown, x, y);
    }

    drawSteps(lines) {
      const { pen, ink } = this;
      const [numbers, starts] = this.scene.steps;
      const inside = starts.map((t, i) => [this.x(t), numbers[i]]).filter(([x]) => x >= LABELS && x <= this.width);
      const apart = this.plot / Math.max(inside.length, 1);
      if (lines) {
        const bottom = Math.min(this.height, RULER + this.tall - this.scroll.scrollTop);
        pen.fillStyle = ink.rule;
        if (apart > 12) inside.forEach(([x]) => pen.fillRect(Math.round(x), RULER, 0.5, bottom - RULER));
        return;
      }
      const every = niceStep(Math.max(1, 64 / apart));
      for (const [x, number] of inside) {
        const named = number % every === 0;
        pen.fillStyle = named ? ink.text : ink.quiet;
        if (named || apart > 6) pen.fillRect(Math.round(x), named ? 18 : 28, 0.5, named ? 14 : 4);
        if (named) pen.fillText(`step ${number}`, x + 4, 25);
      }
    }

    drawRuler() {
      const { pen, ink } = this;
      pen.fillStyle = ink.panel;
      pen.fillRect(0, 0, this.width, RULER);
      pen.save();
      pen.beginPath();
      pen.rect(LABELS, 0, this.plot, RULER);
      pen.clip();
      this.drawSteps(false);
      const step = niceStep(((this.t1 - this.t0) / this.plot) * 110);
      pen.fillStyle = ink.text;
      for (let t = Math.max(0, Math.ceil(this.t0 / step)) * step; t <= this.t1; t += step) {
        const x = Math.round(this.x(t));
        pen.fillRect(x, RULER - 6, 1, 6);
        pen.fillText(tickLabel(t, step), x + 4, RULER - 10);
      }
      for (const mark of this.marks) {
        const x0 = this.x(mark.t0);
        const x1 = Math.max(this.x(mark.t1), x0 + 7);
        if (x1 < LABELS || x0 > this.width) continue;
        pen.fillStyle = ink[mark.severity] || ink.medium;
        pen.fillRect(x0, 3, x1 - x0, 11);
        if (x1 - x0 > 40) {
          pen.fillStyle = ink.page;
          this.write(mark.title, Math.max(x0, LABELS) + 4, 9, Math.min(x1, this.width) - Math.max(x0, LABELS) - 6);
        }
      }
      pen.restore();
      pen.fillStyle = ink.quiet;
      const said = [[this.marks.length ? "findings" : "", 9], [this.scene.steps[0].length ? "steps" : "", 25], ["time since the first event", RULER - 10]];
      said.forEach(([text, y]) => this.write(text, 8, y, LABELS - 12));
      pen.fillStyle = ink.rule;
      pen.fillRect(0, RULER - 1, this.width, 1);
    }

    /** The critical path: a line through the ranks that the steps had to wait for. */
    drawPath() {
      if (!this.path || !this.path.length) return;
      const { pen, ink } = this;
      pen.strokeStyle = ink.text;
      pen.lineWidth = 2;
      pen.beginPath();
      let last = null;
      for (const [rank, t0, t1] of this.path) {
        const line = this.lineOfRank.get(rank);
        if (!line) continue;
        const y = this.top(line) + line.height - 1.5;
        if (last !== null) pen.lineTo(this.x(t0), y);
        else pen.moveTo(this.x(t0), y);
        pen.lineTo(this.x(t1), y);
        last = rank;
      }
      pen.stroke();
    }

    drawSelection() {
      const chosen = this.selection;
      if (!chosen) return;
      const { pen, ink } = this;
      const line = chosen.rank === undefined || chosen.rank === null ? null : this.lineOfRank.get(chosen.rank);
      const y0 = line ? this.top(line) - 1 : chosen.y0 === undefined ? RULER : chosen.y0 + RULER - this.scroll.scrollTop;
      const y1 = line ? y0 + line.height + 2 : chosen.y1 === undefined ? this.height : chosen.y1 + RULER - this.scroll.scrollTop;
      const [x0, x1] = [this.x(chosen.t0), this.x(chosen.t1)];
      pen.globalAlpha = 0.14;
      pen.fillStyle = ink.line;
      pen.fillRect(x0, y0, x1 - x0, y1 - y0);
      pen.globalAlpha = 1;
      pen.strokeStyle = ink.line;
      pen.lineWidth = 1.5;
      pen.strokeRect(x0, y0, Math.max(x1 - x0, 1), y1 - y0);
    }

    drawChosen() {
      const event = this.hovered || this.chosen || this.found;
      for (const one of new Set([this.found, this.chosen, this.hovered])) if (one) this.outline(one);
      if (event) this.drawArrows(event);
    }

    outline({ lane, rank, start, end }) {
      const line = this.lineOfLane.get(lane) || this.lineOfRank.get(rank);
      if (!line) return;
      const { pen, ink } = this;
      const x0 = Math.max(this.x(start), LABELS - 4);
      const x1 = Math.min(Math.max(this.x(end), x0 + 2), this.width + 4);
      pen.strokeStyle = ink.text;
      pen.lineWidth = 2;
      pen.strokeRect(x0, this.top(line) + 1, x1 - x0, line.height - 2);
    }

    /** From the rank that arrived last to those that waited for it, at the time of its arrival. */
    drawArrows({ peers }) {
      const late = (peers || []).filter((peer) => peer.last)[0];
      if (!peers || peers.length < 2) return;
      const { pen, ink } = this;
      const spot = (peer) => this.lineOfLane.get(peer.lane) || this.lineOfRank.get(peer.rank);
      const middle = (peer) => this.top(spot(peer)) + spot(peer).height / 2;
      pen.lineWidth = 1.5;
      for (const peer of peers) {
        if (!spot(peer)) continue;
        pen.strokeStyle = ink.quiet;
        this.outline(peer);
        if (!late || peer === late || !peer.wait || !spot(late) || spot(late) === spot(peer)) continue;
        const [x0, y0, x1, y1] = [this.x(late.start), middle(late), this.x(peer.start + peer.wait), middle(peer)];
        const trusted = [late, peer].every((one) => this.clockError(one.rank) !== null) || late.node === peer.node;
        pen.setLineDash(trusted ? [] : [4, 3]);
        pen.strokeStyle = pen.fillStyle = ink.accent;
        pen.beginPath();
        pen.moveTo(x0, y0);
        pen.lineTo(x1, y1);
        pen.stroke();
        pen.setLineDash([]);
        const angle = Math.atan2(y1 - y0, x1 - x0);
        pen.beginPath();
        pen.moveTo(x1, y1);
        for (const side of [-0.4, 0.4]) pen.lineTo(x1 - 8 * Math.cos(angle + side), y1 - 8 * Math.sin(angle + side));
        pen.fill();
        if (late.node !== peer.node) this.errorBar(peer, x1, y1);
      }
      if (late && spot(late)) {
        pen.fillStyle = ink.accent;
        pen.beginPath();
        pen.arc(this.x(late.start), middle(late), 3.5, 0, 7);
        pen.fill();
      }
    }

    /** How far the other node's clock may be off. */
    errorBar(peer, x, y) {
      const error = this.clockError(peer.rank);
      const half = error === null ? 0 : (error / (this.t1 - this.t0)) * this.plot;
      if (half < 1) return;
      const { pen } = this;
      pen.beginPath();
      pen.moveTo(x - half, y);
      pen.lineTo(x + half, y);
      for (const end of [x - half, x + half]) {
        pen.moveTo(end, y - 4);
        pen.lineTo(end, y + 4);
      }
      pen.stroke();
    }

    /** The pointer's instant on every rank: as wide as the error of each node's clock. */
    drawCrosshair() {
      if (!this.pointer || this.pointer.x < LABELS || this.drag) return;
      const { pen, ink } = this;
      const { x } = this.pointer;
      pen.fillStyle = ink.quiet;
      for (const line of this.inView()) {
        const rank = line.rank === undefined ? line.ranks[0] : line.rank;
        const error = this.clockError(rank);
        const half = ((error || 0) / (this.t1 - this.t0)) * this.plot;
        pen.globalAlpha = 0.7;
        if (error === null) { // dashes: this instant cannot be placed on that node
          for (let y = 0; y < line.height; y += 6) pen.fillRect(x, this.top(line) + y, 1, 3);
          continue;
        }
        pen.fillRect(x, this.top(line), 1, line.height);
        if (half < 1) continue;
        pen.globalAlpha = 0.15;
        pen.fillRect(x - half, this.top(line), 2 * half, line.height);
      }
      pen.globalAlpha = 1;
    }

    // -------------------------------------------------------------- mouse, touchpad, keys

    attach() {
      const at = (event) => {
        const box = this.canvas.getBoundingClientRect();
        return { x: event.clientX - box.left, y: event.clientY - box.top, clientX: event.clientX, clientY: event.clientY };
      };
      this.listen(this.canvas, "wheel", (event) => {
        const { x } = at(event);
        if ((x < LABELS && !event.ctrlKey) || event.shiftKey) return; // the browser scrolls the lanes
        event.preventDefault();
        const unit = event.deltaMode === 1 ? 16 : 1; // lines or pixels
        if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX * unit) / this.plot);
        else this.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY * unit)) * (event.ctrlKey ? 0.01 : 0.002)), x); // a pinch comes as ctrl and small deltas
      }, { passive: false });
      this.listen(this.canvas, "pointerdown", (event) => {
        const from = at(event);
        if (event.button !== 0) return;
        this.canvas.focus({ preventScroll: true });
        this.canvas.setPointerCapture(event.pointerId);
        this.drag = { from, t0: this.t0, t1: this.t1, scroll: this.scroll.scrollTop, selects: event.shiftKey && from.x >= LABELS, moved: false };
      });
      this.listen(this.canvas, "pointermove", (event) => {
        this.pointer = at(event);
        if (this.drag) this.dragTo(this.pointer);
        else this.hoverSoon();
        this.redraw();
      });
      this.listen(this.canvas, "pointerup", (event) => {
        const { drag } = this;
        this.drag = null;
        if (!drag) return;
        if (!drag.moved) this.click(at(event));
        else if (drag.selects) this.askSpent();
      });
      this.listen(this.canvas, "pointercancel", () => { this.drag = null; });
      this.listen(this.canvas, "pointerleave", () => {
        this.pointer = null;
        this.unhover();
      });
      this.listen(this.canvas, "dblclick", () => { if (this.chosen) this.zoomTo(this.chosen); });
      this.listen(this.scroll, "scroll", () => this.changed());
      this.listen(document, "keydown", (event) => this.key(event));
      this.listen(this.grouping, "change", () => {
        this.by = Number(this.grouping.value);
        this.foldedGroups = new Set();
        this.layOut();
      });
      this.listen(this.search, "input", () => {
        clearTimeout(this.searchTimer);
        this.searchTimer = setTimeout(() => this.find(null), 200);
      });
      this.listen(this.search, "keydown", (event) => {
        if (event.key === "Enter") this.nextMatch(event.shiftKey ? -1 : 1);
        if (event.key === "Escape") this.canvas.focus();
      });
      for (const event of ["popstate", "_dashprivate_pushstate"]) this.listen(window, event, () => setTimeout(() => { if (!this.stopped) this.readAddress(); }));
      const resized = new ResizeObserver(() => this.resize());
      resized.observe(this.scroll);
      const recoloured = new MutationObserver(() => { this.paint(); this.redraw(); });
      recoloured.observe(document.documentElement, { attributes: true, attributeFilter: ["data-mantine-color-scheme"] });
      this.stops.push(() => { resized.disconnect(); recoloured.disconnect(); });
      this.listen(window, "resize", () => this.resize());
      this.listen(matchMedia("(prefers-color-scheme: dark)"), "change", () => { this.paint(); this.redraw(); });
    }

    dragTo({ x, y }) {
      const { drag } = this;
      if (Math.abs(x - drag.from.x) + Math.abs(y - drag.from.y) > 3) drag.moved = true;
      if (!drag.moved) return;
      this.unhover();
      if (drag.selects) {
        const times = [this.time(drag.from.x), this.time(Math.max(x, LABELS))].sort((a, b) => a - b);
        const heights = [drag.from.y, y].map((h) => Math.max(h, RULER) - RULER + this.scroll.scrollTop).sort((a, b) => a - b);
        const touched = this.lines.filter((line) => line.y < heights[1] && line.y + line.height > heights[0]);
        if (!touched.length) return;
        const last = touched[touched.length - 1];
        this.selection = { t0: times[0], t1: times[1], y0: touched[0].y, y1: last.y + last.height, lines: touched };
        return;
      }
      const by = ((drag.from.x - x) / this.plot) * (drag.t1 - drag.t0);
      if (drag.from.x >= LABELS) this.show(drag.t0 + by, drag.t1 + by);
      this.scroll.scrollTop = drag.scroll + drag.from.y - y;
    }

    click({ x, y }) {
      if (y < RULER) {
        const mark = this.marks.filter((one) => y < 16 && x >= this.x(one.t0) - 2 && x <= Math.max(this.x(one.t1), this.x(one.t0) + 7) + 2).pop();
        if (mark) this.openMark(mark);
        return;
      }
      const line = this.lineAt(y);
      if (line && x < LABELS) {
        if (line.type === "group") this.foldedGroups.has(line.group) ? this.foldedGroups.delete(line.group) : this.foldedGroups.add(line.group);
        if (line.type === "rank") this.openRanks.has(line.rank) ? this.openRanks.delete(line.rank) : this.openRanks.add(line.rank);
        this.layOut();
        return;
      }
      this.choose(line, x);
    }

    async choose(line, x) {
      this.selection = null;
      this.found = null;
      this.chosen = await this.eventAt(line, x).catch(() => null);
      if (this.chosen) this.tellEvent(this.chosen);
      else this.hint();
      this.redraw();
    }

    key(event) {
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable) return;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const x = this.pointer ? this.pointer.x : undefined;
      const actions = {
        w: () => this.zoom(0.75, x), s: () => this.zoom(1 / 0.75, x), a: () => this.pan(-0.15), d: () => this.pan(0.15),
        "+": () => this.zoom(0.75), "-": () => this.zoom(1 / 0.75),
        arrowleft: () => this.pan(-0.15), arrowright: () => this.pan(0.15),
        arrowup: () => { this.scroll.scrollTop -= 60; }, arrowdown: () => { this.scroll.scrollTop += 60; },
        0: () => this.show(0, this.end), home: () => this.show(...this.home),
        f: () => { const target = this.chosen || this.found || this.selection; if (target) this.zoomTo(target); },
        n: () => this.nextMatch(event.shiftKey ? -1 : 1),
        "/": () => this.search.focus(),
        escape: () => { this.chosen = this.selection = this.found = null; this.hint(); this.redraw(); },
      };
      const action = actions[event.key.toLowerCase()];
      if (!action) return;
      event.preventDefault();
      action();
    }

    zoomTo({ start, end, t0, t1 }) {
      const [a, b] = start === undefined ? [t0, t1] : [start, end];
      const room = Math.max((b - a) * 0.4, LEAST_NS);
      this.show(a - room, b + room);
    }

    unfold(open) {
      this.openRanks = new Set(open ? this.ranks.keys() : []);
      if (open) this.foldedGroups.clear();
      this.layOut();
    }

    /** Unfolds what hides a rank. */
    reveal(rank) {
      const group = this.scene.groupings[this.by][1].findIndex(([, ranks]) => ranks.includes(rank));
      this.foldedGroups.delete(group);
    }

    scrollTo(line) {
      if (!line) return;
      const room = this.height - RULER;
      if (line.y < this.scroll.scrollTop || line.y + line.height > this.scroll.scrollTop + room) this.scroll.scrollTop = line.y - room / 3;
    }

    // -------------------------------------------------------------- events, selections, searches

    async eventAt(line, x) {
      if (!line || line.lanes.length !== 1 || x < LABELS) return null;
      const slack = Math.round((NEAR_PX / this.plot) * (this.t1 - this.t0));
      return this.askJson("at", { lane: line.lanes[0], t: Math.floor(this.time(x)), slack });
    }

    hoverSoon() {
      clearTimeout(this.hoverTimer);
      this.hoverTimer = setTimeout(() => this.hover(), HOVER_MS);
    }

    async hover() {
      const { pointer } = this;
      if (!pointer || this.drag || this.stopped) return;
      const line = this.lineAt(pointer.y);
      if (pointer.y < 16) {
        const mark = this.marks.filter((one) => pointer.x >= this.x(one.t0) - 2 && pointer.x <= Math.max(this.x(one.t1), this.x(one.t0) + 7) + 2).pop();
        this.unhover();
        if (mark) this.showTip(pointer, make("b", {}, mark.title), make("div", {}, mark.note));
        return;
      }
      if (line && line.lanes.length > 1 && pointer.x >= LABELS) {
        this.unhover();
        this.showTip(pointer, make("b", {}, line.title), make("div", {}, `mean of ${line.lanes.length} ranks; click its name to unfold them`));
        return;
      }
      const event = await this.eventAt(line, pointer.x).catch(() => null);
      if (this.stopped || this.pointer !== pointer) return;
      this.hovered = event;
      if (!event) {
        this.unhover();
        return;
      }
      const facts = event.facts.filter(([word]) => ["what", "duration", "step", "size", "group", "waited for peers", "last to arrive", "not matched"].includes(word));
      this.showTip(pointer, make("b", {}, event.name), make("div", { class: "rst-quiet" }, `rank ${event.rank}`),
        ...facts.map(([word, text]) => make("div", {}, `${word}: ${text}`)),
        ...(event.peers.length > 1 ? [make("div", { class: "rst-quiet" }, `${event.peers.length} ranks took part; click for all`)] : []));
      this.redraw();
    }

    unhover() {
      clearTimeout(this.hoverTimer);
      this.hovered = null;
      this.tip.hidden = true;
      this.redraw();
    }

    showTip({ clientX, clientY }, ...content) {
      this.tip.replaceChildren(...content);
      this.tip.hidden = false;
      const { offsetWidth: w, offsetHeight: h } = this.tip;
      this.tip.style.left = `${clientX + 16 + w > window.innerWidth ? clientX - w - 12 : clientX + 16}px`;
      this.tip.style.top = `${Math.max(4, Math.min(clientY + 16, window.innerHeight - h - 8))}px`;
    }

    tellEvent(event) {
      const rows = event.facts.map(([word, text]) => make("tr", {}, make("th", {}, word), make("td", {}, text)));
      const parts = [make("h3", {}, event.name), make("table", {}, make("tr", {}, make("th", {}, "rank"), make("td", {}, String(event.rank))), ...rows)];
      if (event.peers.length) {
        const first = Math.min(...event.peers.map((peer) => peer.start));
        const unknown = event.peers.some((peer) => this.clockError(peer.rank) === null);
        const errors = event.peers.map((peer) => this.clockError(peer.rank) || 0);
        parts.push(make("h4", {}, "The same operation on all its ranks"),
          make("table", {}, make("tr", {}, make("th", {}, "rank"), make("th", { class: "n" }, "arrived"), make("th", { class: "n" }, "waited")),
            ...event.peers.map((peer) => make("tr", {}, make("td", {}, peer.last ? `${peer.rank}  ← last` : String(peer.rank)),
              make("td", { class: "n" }, `+${duration(peer.start - first)}`), make("td", { class: "n" }, peer.waited)))));
        if (unknown) parts.push(make("p", { class: "rst-quiet" }, "A node's clock is not known: arrivals on different nodes cannot be compared."));
        else if (Math.max(...errors) > 0) parts.push(make("p", { class: "rst-quiet" }, `Arrivals on different nodes: ± ${duration(Math.max(...errors))}.`));
      }
      const button = make("button", { type: "button", onclick: () => this.zoomTo(event) }, "zoom to it (F)");
      this.side.replaceChildren(...parts, make("p", {}, button));
    }

    async askSpent() {
      const chosen = this.selection;
      const lanes = [...new Set(chosen.lines.flatMap((line) => line.lanes))];
      const [t0, t1] = [Math.floor(chosen.t0), Math.ceil(chosen.t1)];
      const tables = await this.askJson("spent", { lanes, t0, t1 }).catch((error) => this.say(error.message));
      if (!tables || this.selection !== chosen) return;
      const parts = [make("h3", {}, `Selection: ${duration(t1 - t0)}`)];
      for (const table of tables) {
        parts.push(make("h4", {}, `${table.title}, ${table.lanes} ${table.lanes === 1 ? "lane" : "lanes"}`));
        parts.push(make("table", {}, ...table.kinds.map((row) =>
          make("tr", {}, make("td", {}, this.swatch(row.kind), row.label), make("td", { class: "n" }, row.time), make("td", { class: "n" }, row.share)))));
        const head = ["count", "time", "mean", "longest"].map((word) => make("th", { class: "n" }, word));
        parts.push(make("table", { class: "rst-names" }, make("tr", {}, ...head), ...table.names.flatMap((row) => [
          make("tr", {}, make("td", { colspan: "4" }, this.swatch(row.kind), row.name)),
          make("tr", {}, ...[row.count, row.time, row.mean, row.longest].map((text) => make("td", { class: "n" }, String(text)))),
        ])));
        if (table.more) parts.push(make("p", { class: "rst-quiet" }, `and ${table.more} names with less time`));
      }
      if (!tables.length) parts.push(make("p", { class: "rst-quiet" }, "No lane was selected."));
      this.side.replaceChildren(...parts);
    }

    async find(number) {
      const text = this.search.value.trim();
      this.found = null;
      this.matchNumber = null;
      if (!text) {
        this.count.textContent = "";
        this.redraw();
        return;
      }
      const said = await this.askJson("find", { text, number, after: Math.floor(this.t0) }).catch(() => null);
      if (!said || this.search.value.trim() !== text) return;
      this.count.textContent = said.count ? `${(said.number + 1).toLocaleString("en")} of ${said.count.toLocaleString("en")}` : "not found";
      this.matchNumber = said.count ? said.number : null;
      this.found = said.event;
      if (!said.event) return this.redraw();
      const { rank, lane, start, end } = said.event;
      this.openRanks.delete(this.unfoldedBySearch);
      this.unfoldedBySearch = undefined;
      this.reveal(rank);
      this.layOut();
      if (!this.lineOfLane.has(lane)) { // in a folded rank
        this.openRanks.add(rank);
        this.unfoldedBySearch = rank;
        this.layOut();
      }
      this.scrollTo(this.lineOfLane.get(lane));
      const span = this.t1 - this.t0;
      const tiny = ((end - start) / span) * this.plot < 4;
      if (tiny || end - start > span) this.zoomTo({ start: start - 2 * (end - start), end: end + 2 * (end - start) });
      else if (start < this.t0 || end > this.t1) this.show((start + end - span) / 2, (start + end + span) / 2);
      this.tellEvent(said.event);
      this.redraw();
    }

    nextMatch(by) {
      this.find(this.matchNumber === null || this.matchNumber === undefined ? null : this.matchNumber + by);
    }

    openMark(mark) {
      if (mark.rank !== null && this.ranks.has(mark.rank)) {
        this.reveal(mark.rank);
        this.layOut();
        this.scrollTo(this.lineOfRank.get(mark.rank));
      }
      this.selection = { t0: mark.t0, t1: mark.t1, rank: mark.rank };
      const room = (mark.t1 - mark.t0) * 0.5 || this.end * 0.01;
      this.show(mark.t0 - room, mark.t1 + room);
      this.side.replaceChildren(make("h3", {}, mark.title), make("p", {}, mark.note), make("p", { class: "rst-quiet" }, "The evidence is framed in the picture."));
    }

    hint() {
      const keys = [["W S", "zoom in, out"], ["A D", "left, right"], ["Home 0", "judged steps, whole run"], ["F", "zoom to what is chosen"], ["/", "search"], ["N", "next match"], ["Esc", "choose nothing"]];
      this.side.replaceChildren(
        make("h3", {}, "How to read it"),
        make("p", {}, "Each lane is a thread, group or stream of a rank. Zoomed out, a lane's height is shared by what happens there, in proportion to time; no kind is hidden."),
        make("p", {}, "Click an event for its details and for arrows from the rank that came last to those that waited. Shift and drag to sum up a part of the picture. Click a name on the left to fold or unfold."),
        make("table", {}, ...keys.map(([key, what]) => make("tr", {}, make("td", {}, make("kbd", {}, key)), make("td", {}, what)))),
        make("p", { class: "rst-quiet" }, "The wheel zooms at the pointer, sideways it pans; over the names, or with Shift, it scrolls."));
    }
  }

  // ---------------------------------------------------------------- the Dash component

  function TimelineCanvas({ id, base, run, version }) {
    const place = React.useRef(null);
    const timeline = React.useRef(null);
    React.useEffect(() => {
      timeline.current = new Timeline(place.current, { base, run });
      return () => timeline.current.destroy();
    }, [base, run]);
    React.useEffect(() => { timeline.current.refresh(); }, [version]);
    return React.createElement("div", { id, ref: place });
  }

  window.rankscope_timeline = { TimelineCanvas };
})();
