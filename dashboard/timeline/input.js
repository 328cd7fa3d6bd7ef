// Mouse, touchpad and keys.
(function () {
  "use strict";

  const { COMMANDS, LABELS, RULER } = window.rankscope_timeline;

  const Input = (Base) => class extends Base {
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
        this.drag = { from, t0: this.t0, t1: this.t1, scroll: this.scroll.scrollTop, selects: event.shiftKey && from.x >= LABELS, zooms: from.y < RULER && from.x >= LABELS, moved: false };
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
        else if (drag.zooms) {
          const { t0, t1 } = this.selection;
          this.selection = null;
          this.show(t0, t1);
        }
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
      recoloured.observe(document.documentElement, { attributes: true, attributeFilter: ["data-scheme"] });
      this.stops.push(() => { resized.disconnect(); recoloured.disconnect(); });
      this.listen(window, "resize", () => this.resize());
      this.listen(matchMedia("(prefers-color-scheme: dark)"), "change", () => { this.paint(); this.redraw(); });
    }

    dragTo({ x, y }) {
      const { drag } = this;
      if (Math.abs(x - drag.from.x) + Math.abs(y - drag.from.y) > 3) drag.moved = true;
      if (!drag.moved) return;
      this.unhover();
      const times = [this.time(drag.from.x), this.time(Math.max(x, LABELS))].sort((a, b) => a - b);
      if (drag.zooms) {
        this.selection = { t0: times[0], t1: times[1] };
        return;
      }
      if (drag.selects) {
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
      if (this.chosen) this.showEvent(this.chosen);
      else this.hint();
      this.redraw();
    }

    key(event) {
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox" || event.target.isContentEditable) return;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const command = COMMANDS.find(({ keys }) => keys.includes(event.key.toLowerCase()));
      if (!command) return;
      event.preventDefault();
      command.run(this, event);
    }
  };

  Object.assign(window.rankscope_timeline, { Input });
})();
