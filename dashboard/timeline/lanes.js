// The order of lines, the part of them and of the run in view, and the address of that.
(function () {
  "use strict";

  const { LABELS, RULER, duration, text, ROOMY } = window.rankscope_timeline;

  const HEAD = 22; // px of a group's line
  const DENSE = 14; // the same where there are many ranks
  const MANY_RANKS = 24;
  const MOST_OPEN = 256; // ranks up to which the groups start unfolded
  const FEW_RANKS = 4; // up to which the ranks start unfolded
  const LEAST_NS = 200; // no view is shorter

  const Lanes = (Base) => class extends Base {
    /** Lines of the present grouping and folding, with the lanes that each draws. */
    layOut() {
      const [, groups] = this.scene.groupings[this.by];
      this.pitch = this.ranks.size > MANY_RANKS ? DENSE : ROOMY;
      this.lines = [];
      this.lineOfLane = new Map();
      this.lineOfRank = new Map();
      let y = 0;
      const lastOf = new Map(groups.flatMap(([, ranks]) => ranks.map((rank) => [this.nodeOf.get(rank), rank])));
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
          this.lineOfRank.set(rank, add({ type: "rank", rank, open, tracks, title: text("rank {rank}", { rank }), lanes: lead, track: tracks.length ? tracks[0][0] : text("no events") }, this.pitch));
          if (open) {
            tracks.forEach(([track, lanes, hidden], i) => lanes.forEach((lane, depth) => {
              if (i === 0 && depth === 0) return;
              const more = hidden && depth === lanes.length - 1 ? text("{hidden} more not drawn", { hidden }) : "";
              add({ type: "lane", rank, title: depth === 0 ? track : more, lanes: [lane] }, this.pitch);
            }));
            this.counterLines(this.nodeOf.get(rank), rank).forEach((line) => add(line, this.pitch));
            y += 4;
          }
          const node = this.nodeOf.get(rank);
          if (lastOf.get(node) === rank) this.counterLines(node, null).forEach((line) => add({ ...line, rank }, this.pitch));
        }
      });
      this.tall = y;
      this.resize();
    }

    clockNote(ranks) {
      const nodes = new Set(ranks.map((rank) => this.nodeOf.get(rank)));
      const errors = [...nodes].map((node) => this.clockOf.get(node));
      if (errors.some((error) => error === null || error === undefined)) return text("clock unknown");
      const worst = Math.max(0, ...errors);
      return worst > 0 ? text("clock ± {error}", { error: duration(worst) }) : "";
    }

    /** ± ns of this rank's clock against node 0's; null: unknown. */
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
      this.fetchReadings();
      clearTimeout(this.addressTimer);
      this.root.dataset.moving = ""; // until the address says what is in view
      this.addressTimer = setTimeout(() => this.writeAddress(), 250);
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

    /** Unfolds what hides a rank, and the rank itself. */
    reveal(rank) {
      const group = this.scene.groupings[this.by][1].findIndex(([, ranks]) => ranks.includes(rank));
      this.foldedGroups.delete(group);
      this.openRanks.add(rank);
    }

    goTo(rank) {
      this.reveal(rank);
      this.layOut();
      this.scrollTo(this.lineOfRank.get(rank));
    }

    scrollTo(line) {
      if (!line) return;
      const room = this.height - RULER;
      if (line.y < this.scroll.scrollTop || line.y + line.height > this.scroll.scrollTop + room) this.scroll.scrollTop = line.y - room / 3;
    }

    readAddress() {
      const query = new URLSearchParams(location.search);
      const [range, ...rest] = location.hash.slice(1).split("&");
      const kept = new URLSearchParams(rest.join("&"));
      const listed = (list, all) => (list === "all" ? all : list.split(",").filter(Boolean).map(Number).filter(Number.isInteger));
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
        window_ = null; // no whole numbers: the analyzed steps are shown
      }
      const evidence = window_ && !range.includes(",");
      const rank = query.get("rank") === null ? null : Number(query.get("rank"));
      if (evidence) {
        this.selection = { t0: window_[0], t1: window_[1], rank };
        const room = (window_[1] - window_[0]) * 0.5 || this.end * 0.01;
        window_ = [window_[0] - room, window_[1] + room];
      }
      if (kept.has("counters")) this.countersShown = kept.get("counters") === "1"; // else what was chosen since stays
      this.switchCounters();
      this.setMarkers(kept.has("marks") ? listed(kept.get("marks"), []).slice(0, 2) : []);
      if (rank !== null && this.ranks.has(rank)) this.reveal(rank);
      [this.t0, this.t1] = window_ || this.home;
      this.layOut();
      this.show(this.t0, this.t1);
      this.asked = undefined;
      if (rank !== null) this.scrollTo(this.lineOfRank.get(rank));
      this.fetch();
      this.showEvidence();
      if (query.get("find")) this.look(query.get("find"));
    }

    writeAddress() {
      if (this.stopped || !this.scene) return;
      delete this.root.dataset.moving;
      const at = (t) => String(this.origin + BigInt(Math.round(t)));
      const list = (chosen, count) => (chosen.size === count ? "all" : [...chosen].join(",")); // thousands would not fit
      const [, groups] = this.scene.groupings[this.by];
      const folds = `lanes=${list(this.openRanks, this.ranks.size)}&fold=${list(this.foldedGroups, groups.length)}`;
      const chosen = `${this.markers.length ? `&marks=${this.markers}` : ""}${this.countersShown === null ? "" : `&counters=${Number(this.countersShown)}`}`;
      const hash = `#${at(this.t0)},${at(this.t1)}&by=${this.by}&${folds}${chosen}`;
      // Dash looks at pushes only: a replaced address starts no callback.
      history.replaceState(history.state, "", location.pathname + location.search + hash);
    }
  };

  Object.assign(window.rankscope_timeline, { Lanes });
})();
