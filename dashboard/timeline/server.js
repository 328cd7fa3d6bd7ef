// The canvas's requests to the server, and how the answers are read; the layout of a picture is that of lod.view.
(function () {
  "use strict";

  const { FEW_STEPS, RETRY_MS, paintRasters, text } = window.rankscope_timeline;

  const MARGIN = 0.1; // of the view, fetched on either side so that panning shows something at once

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
    const bytes = new Uint8Array(buffer);
    let at = 4 + size;
    const take = (type) => { // low bytes of all values first
      const array = new type(n);
      for (let byte = 0; byte < type.BYTES_PER_ELEMENT; byte++, at += n) {
        for (let i = 0; i < n; i++) array[i] |= bytes[at + i] << (8 * byte);
      }
      return array;
    };
    const rects = { start: take(Uint32Array), length: take(Uint32Array), name: take(Uint16Array), lane: take(Uint16Array), kind: take(Uint8Array) };
    for (let i = 1; i < n; i++) rects.start[i] += rects.start[i - 1];
    return { head, rects, bytes: bytes.subarray(at) };
  }

  const Server = (Base) => class extends Base {
    ask(what, question, signal) {
      return post(`${this.base}/${what}`, { run: this.run, ...question }, signal);
    }

    async askJson(what, question) {
      return (await this.ask(what, question)).json();
    }

    /** Requests what is in view, one request at a time: the newest one counts. */
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
        if (!this.stopped) this.say(text("The server does not answer: {error}", { error: error.message }));
      } finally {
        this.fetching = false;
        if (this.again && !this.stopped) {
          this.again = false;
          this.fetch();
        }
      }
    }

    /** From the question to the painted frame, for measurements: `performance.getEntriesByName`. */
    measure(asked, bytes, events) {
      requestAnimationFrame(() => setTimeout(() => {
        this.root.dataset.painted = String(Number(this.root.dataset.painted || 0) + 1);
        if (asked) performance.measure("rankscope-zoom-to-paint", { start: asked, detail: { bytes, events } });
        else performance.measure("rankscope-first-picture", { start: this.opened, detail: { bytes, events } });
        if (this.asked === asked) this.asked = undefined;
      }));
    }

    /** The critical path there; where many more steps are in view than it is drawn for, only whether there is one. */
    async fetchPath(t0, t1) {
      if (this.path === false) return; // this run has none
      if (this.stepsInView() > 2 * FEW_STEPS) t1 = t0;
      const { pieces } = await this.askJson("path", { t0, t1 }).catch(() => ({ pieces: null }));
      this.path = pieces === null ? false : pieces;
      if (!pieces) return;
      if (this.pathLabel.hidden) {
        this.pathLabel.hidden = false;
        this.paint();
      }
      this.redraw();
    }

    async pollMarks() {
      while (!this.stopped) {
        const said = await this.askJson("marks", {}).catch(() => ({ marks: [], findings: [] }));
        if (!said.waiting) {
          this.marks = said.marks.map((mark) => ({ ...mark, title: said.findings[mark.finding].title }));
          this.findings = said.findings;
          this.showEvidence();
          this.redraw();
          return;
        }
        await new Promise((done) => setTimeout(done, 3 * RETRY_MS));
      }
    }
  };

  Object.assign(window.rankscope_timeline, { Server });
})();
