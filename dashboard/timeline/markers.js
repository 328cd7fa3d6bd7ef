// Two markers with the time between them, and the time at the pointer.
(function () {
  "use strict";

  const { LABELS, RULER, text } = window.rankscope_timeline;

  const NAMES = ["A", "B"];
  const SNAP_PX = 8; // from an edge, within which a marker is put on it

  /** To the nanosecond, in the unit that suits it; like `_exact` in details.py. */
  function exact(ns) {
    const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, least]) => Math.abs(ns) >= least) || ["ns", 1];
    return size === 1 ? `${Math.round(ns)} ns` : `${(ns / size).toFixed(3)} ${unit}`;
  }

  const Markers = (Base) => class extends Base {
    /** Puts a marker at the pointer, on the nearest edge of what lies there. A third one starts over. */
    async putMarker() {
      const { pointer } = this;
      if (!pointer || pointer.x < LABELS) return;
      const at = Math.round(this.time(pointer.x));
      const near = (SNAP_PX / this.plot) * (this.t1 - this.t0);
      const event = await this.eventAt(this.lineAt(pointer.y), pointer.x, SNAP_PX).catch(() => null);
      const away = (t) => Math.abs(t - at);
      const [edge] = event ? [event.start, event.end].sort((a, b) => away(a) - away(b)) : [];
      const t = edge !== undefined && away(edge) <= near ? edge : at;
      this.setMarkers(this.markers.length === NAMES.length ? [t] : [...this.markers, t]);
      this.changed();
    }

    setMarkers(times) {
      this.markers = times;
      const [a, b] = times;
      this.between.textContent = b !== undefined ? text("A to B: {time}", { time: exact(b - a) }) : times.length ? text("M again: marker B") : "";
      this.redraw();
    }

    drawMarkers() {
      const { pen, ink } = this;
      this.markers.forEach((t, i) => {
        const x = Math.round(this.x(t));
        if (x < LABELS || x > this.width) return;
        pen.fillStyle = ink.accent;
        pen.fillRect(x, RULER - 34, 1.5, this.height);
        this.flag(NAMES[i], x, RULER - 27, ink.accent);
      });
    }

    /** The time under the pointer, on the ruler. */
    drawCursorTime() {
      if (!this.pointer || this.pointer.x < LABELS || this.drag) return;
      const perPixel = (this.t1 - this.t0) / this.plot;
      const digits = Math.max(3, Math.min(9, Math.ceil(9 - Math.log10(perPixel))));
      this.flag(`${(this.time(this.pointer.x) / 1e9).toFixed(digits)} s`, this.pointer.x, RULER - 10, this.ink.text);
    }

    flag(name, x, y, colour) {
      const { pen } = this;
      const wide = pen.measureText(name).width + 8;
      const left = Math.min(x, this.width - wide);
      pen.fillStyle = colour;
      pen.fillRect(left, y - 7, wide, 14);
      pen.fillStyle = this.ink.page;
      pen.fillText(name, left + 4, y);
    }
  };

  Object.assign(window.rankscope_timeline, { Markers });
})();
