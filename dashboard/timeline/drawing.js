// Draws what is in view on the canvas.
(function () {
  "use strict";

  const { LABELS, RULER, duration, make, text, ROOMY, FEW_STEPS } = window.rankscope_timeline;

  const INKS = ["page", "text", "quiet", "rule", "panel", "accent", "line", "high", "medium", "low"]; // of the palette
  const FONT = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

  const THIN_PX = 0.5; // narrower pieces of the critical path are left out

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

  const Drawing = (Base) => class extends Base {
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
      if (!this.pathLabel.hidden) {
        const said = text("critical path: the ranks that the step waits for (up to {steps} steps in view)", { steps: FEW_STEPS });
        this.legend.append(make("span", {}, make("span", { class: "rst-swatch", style: `background:${this.ink.text};height:2px;vertical-align:3px` }), said));
      }
      if (this.data) Object.assign(this.data, paintRasters(this.data, this.rgba));
    }

    swatch(kind) {
      return make("span", { class: "rst-swatch", style: `background:${this.css[kind]}` });
    }

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
      this.drawReadings();
      this.drawPath();
      this.drawSelection();
      this.drawChosen();
      this.drawCrosshair();
      pen.restore();
      this.drawLabels(lines);
      this.drawRuler();
      this.drawMarkers();
      this.drawCursorTime();
      this.where.textContent = text("{time} in view", { time: duration(this.t1 - this.t0) });
    }

    drawStripes(lines) {
      const { pen, ink } = this;
      for (const line of lines) {
        if (line.type === "group") {
          pen.fillStyle = ink.panel;
          pen.fillRect(0, this.top(line), this.width, line.height);
        }
        pen.fillStyle = ink.rule;
        if (line.type === "group" || line.type === "rank") pen.fillRect(0, this.top(line), this.width, 0.5);
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
        // Where others lie in the same lane, a rectangle takes whole pixels only: the raster shows the rest.
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
        pen.fillStyle = indent > 14 ? ink.quiet : ink.text;
        pen.textAlign = "left";
        pen.font = line.type === "group" ? `600 ${FONT}` : FONT;
        const title = arrow + line.title;
        this.write(title, indent, y, LABELS - indent - 6);
        const note = line.type === "group" ? this.clockNote(line.ranks) : line.type === "rank" && this.pitch === ROOMY ? line.track : line.type === "counter" ? this.counters[line.counter].top : "";
        const used = indent + pen.measureText(title).width + 10;
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
    write(whole, x, y, room) {
      let shown = whole;
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
        if (named) pen.fillText(text("step {step}", { step: number }), x + 4, 25);
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
      const said = [[this.marks.length ? text("findings") : "", 9], [this.scene.steps[0].length ? text("steps") : "", 25], [text("time since the first event"), RULER - 10]];
      said.forEach(([name, y]) => this.write(name, 8, y, LABELS - 12));
      pen.fillStyle = ink.rule;
      pen.fillRect(0, RULER - 1, this.width, 1);
    }

    stepsInView() {
      return 1 + this.scene.steps[1].filter((start) => start > this.t0 && start < this.t1).length; // one began before
    }

    /** Whether the critical path is wanted, and few enough steps are in view for it to be read. */
    pathShows() {
      return this.pathSwitch.checked && this.stepsInView() <= FEW_STEPS;
    }

    /** The critical path: a line through the ranks that the steps had to wait for. */
    drawPath() {
      if (!this.path || !this.path.length || !this.pathShows()) return;
      const { pen, ink } = this;
      pen.strokeStyle = ink.text;
      pen.lineWidth = 2;
      pen.beginPath();
      let last = null;
      for (const [rank, t0, t1] of this.path) {
        const line = this.lineOfRank.get(rank);
        if (!line || this.x(t1) - this.x(t0) < THIN_PX) continue;
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
  };

  Object.assign(window.rankscope_timeline, { Drawing, paintRasters });
})();
