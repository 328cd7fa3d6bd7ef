// The nodes' counters, as lanes below the ranks and nodes that they are of.
(function () {
  "use strict";

  const { LABELS, RETRY_MS, make, text } = window.rankscope_timeline;

  const MANY = 8; // lanes, above which they are folded away at first
  const MARGIN = 0.5; // of the view, fetched on either side
  const UNKNOWN = 255;
  const HIGHEST = 254;

  const Counters = (Base) => class extends Base {
    /** Polls until the run has been read: its lanes may have been there before. */
    async pollCounters() {
      let said = { waiting: true };
      while (said.waiting && !this.stopped) {
        said = await this.askJson("counters", {}).catch(() => ({ lanes: [] }));
        if (said.waiting) await new Promise((done) => setTimeout(done, 3 * RETRY_MS));
      }
      if (this.stopped) return;
      this.counters = said.lanes;
      this.readings = null;
      this.countersLabel.hidden = !this.counters.length;
      this.switchCounters();
      this.layOut();
    }

    /** As was chosen; else they are shown unless there are many. */
    switchCounters() {
      this.countersSwitch.checked = this.countersShown ?? this.counters.length <= MANY;
    }

    /** The lines of the counters of a rank, or of a node's own. */
    counterLines(node, rank) {
      if (!this.countersSwitch.checked) return [];
      return this.counters.flatMap((one, counter) => (one.node === node && one.rank === rank ? [{ type: "counter", counter, rank, node, title: one.label, lanes: [] }] : []));
    }

    async fetchReadings() {
      const lanes = this.inView().filter((line) => line.type === "counter").map((line) => line.counter);
      const span = this.t1 - this.t0;
      const density = (this.plot * this.dpr) / span;
      const have = this.readings;
      const same = have && Math.abs(have.density / density - 1) < 1e-6 && lanes.every((lane) => have.places.has(lane));
      if (!lanes.length || this.askingReadings || (same && have.t0 <= this.t0 && have.t1 >= this.t1)) return;
      const [t0, t1] = [Math.floor(this.t0 - MARGIN * span), Math.ceil(this.t1 + MARGIN * span)];
      const pixels = Math.min(8192, Math.max(1, Math.round((t1 - t0) * density)));
      this.askingReadings = true;
      try {
        const answer = await this.ask("readings", { t0, t1, pixels, lanes });
        const bytes = new Uint8Array(await answer.arrayBuffer());
        this.readings = { t0, t1, pixels, density, bytes, places: new Map(lanes.map((lane, i) => [lane, 2 * i * pixels])) };
        this.redraw();
      } catch {
        return; // the picture's own question says that the server does not answer
      } finally {
        this.askingReadings = false;
      }
      this.fetchReadings(); // the view may have moved meanwhile
    }

    /** Each counter from 0 to the highest that it reads anywhere: an area up to the lowest of a column, a band to its highest. */
    drawReadings() {
      const have = this.readings;
      if (!have) return;
      const { pen, dpr } = this;
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.fillStyle = this.ink.line;
      const wide = (this.plot * dpr) / (this.t1 - this.t0) * ((have.t1 - have.t0) / have.pixels);
      const left = this.x(have.t0) * dpr;
      const [from, to] = [Math.max(0, Math.floor((LABELS * dpr - left) / wide)), Math.min(have.pixels, Math.ceil((this.width * dpr - left) / wide))];
      for (const line of this.inView()) {
        const place = have.places.get(line.counter);
        if (place === undefined) continue;
        const tall = (line.height - 3) * dpr;
        const bottom = (this.top(line) + line.height - 1) * dpr;
        const area = new Path2D();
        const band = new Path2D();
        for (let i = from; i < to; i++) {
          const high = have.bytes[place + have.pixels + i];
          if (high === UNKNOWN) continue;
          const [y0, y1] = [have.bytes[place + i], high].map((value) => Math.round((value / HIGHEST) * tall));
          const [x0, x1] = [Math.round(left + i * wide), Math.round(left + (i + 1) * wide)];
          area.rect(x0, bottom - y0, x1 - x0, y0);
          band.rect(x0, bottom - y1 - dpr, x1 - x0, y1 - y0 + dpr);
        }
        pen.globalAlpha = 0.22;
        pen.fill(area);
        pen.globalAlpha = 1;
        pen.fill(band);
      }
      pen.setTransform(dpr, 0, 0, dpr, 0, 0);
    }

    /** The value at the pointer. */
    async hoverReading(line, pointer) {
      const { value } = await this.askJson("reading", { lane: line.counter, t: Math.floor(this.time(pointer.x)) }).catch(() => ({ value: null }));
      if (this.stopped || this.pointer !== pointer) return;
      this.unhover();
      this.showTip(pointer, make("b", {}, this.counters[line.counter].title), make("div", {}, value === null ? text("not read here") : value),
        make("div", { class: "rst-quiet" }, text("the lane's height is {top}", { top: this.counters[line.counter].top })));
    }
  };

  Object.assign(window.rankscope_timeline, { Counters });
})();
