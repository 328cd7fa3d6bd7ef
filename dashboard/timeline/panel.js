// Facts about events, selections, searches and findings, at the pointer and beside the picture.
(function () {
  "use strict";

  const { COMMANDS, LABELS, duration, make, signs, text } = window.rankscope_timeline;

  const NEAR_PX = 3; // how far from an event the pointer still means it
  const HOVER_MS = 25;

  const Panel = (Base) => class extends Base {
    say(what) {
      this.side.replaceChildren(make("p", { class: "rst-quiet", role: "status" }, what));
    }

    showFacts(...parts) {
      this.side.replaceChildren(...parts);
      this.openDrawer(true);
    }

    /** On narrow screens the facts lie over the picture, and can be hidden. */
    openDrawer(open) {
      this.drawer.classList.toggle("rst-open", open);
      this.drawerSwitch.setAttribute("aria-expanded", String(open));
    }

    async eventAt(line, x, near = NEAR_PX) {
      if (!line || line.lanes.length !== 1 || x < LABELS) return null;
      const slack = Math.round((near / this.plot) * (this.t1 - this.t0));
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
        this.showTip(pointer, make("b", {}, line.title), make("div", {}, text("mean of {ranks} ranks; click its name to unfold them", { ranks: line.lanes.length })));
        return;
      }
      if (line && line.type === "counter" && pointer.x >= LABELS) {
        await this.hoverReading(line, pointer);
        return;
      }
      const event = await this.eventAt(line, pointer.x).catch(() => null);
      if (this.stopped || this.pointer !== pointer) return;
      this.hovered = event;
      if (!event) {
        this.unhover();
        return;
      }
      this.showTip(pointer, make("b", {}, event.name), make("div", { class: "rst-quiet" }, text("rank {rank}", { rank: event.rank })),
        ...event.brief.map(([word, value]) => make("div", {}, `${word}: ${value}`)),
        ...(event.peers.length > 1 ? [make("div", { class: "rst-quiet" }, text("{ranks} ranks took part; click for all", { ranks: event.peers.length }))] : []));
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

    showEvent(event) {
      const rows = event.facts.map(([word, value]) => make("tr", {}, make("th", {}, word), make("td", {}, value)));
      const parts = [make("h3", {}, event.name), make("table", {}, make("tr", {}, make("th", {}, text("rank")), make("td", {}, String(event.rank))), ...rows)];
      if (event.peers.length) {
        const first = Math.min(...event.peers.map((peer) => peer.start));
        const unknown = event.peers.some((peer) => this.clockError(peer.rank) === null);
        const errors = event.peers.map((peer) => this.clockError(peer.rank) || 0);
        parts.push(make("h4", {}, text("The same operation on all its ranks")),
          make("table", {}, make("tr", {}, make("th", {}, text("rank")), make("th", { class: "n" }, text("arrived")), make("th", { class: "n" }, text("waited"))),
            ...event.peers.map((peer) => make("tr", {}, make("td", {}, peer.last ? text("{rank}  ← last", { rank: peer.rank }) : String(peer.rank)),
              make("td", { class: "n" }, `+${duration(peer.start - first)}`), make("td", { class: "n" }, peer.waited)))));
        if (unknown) parts.push(make("p", { class: "rst-quiet" }, text("A node's clock is not synchronized: arrivals on different nodes cannot be compared.")));
        else if (Math.max(...errors) > 0) parts.push(make("p", { class: "rst-quiet" }, text("Arrivals on different nodes: ± {error}.", { error: duration(Math.max(...errors)) })));
      }
      const button = make("button", { type: "button", onclick: () => this.zoomTo(event) }, text("zoom to it (F)"));
      this.showFacts(...parts, make("p", {}, button));
    }

    async askSpent() {
      const chosen = this.selection;
      const lanes = [...new Set(chosen.lines.flatMap((line) => line.lanes))];
      const [t0, t1] = [Math.floor(chosen.t0), Math.ceil(chosen.t1)];
      const tables = await this.askJson("spent", { lanes, t0, t1 }).catch((error) => this.say(error.message));
      if (!tables || this.selection !== chosen) return;
      const parts = [make("h3", {}, text("Selection: {time}", { time: duration(t1 - t0) }))];
      for (const table of tables) {
        parts.push(make("h4", {}, table.lanes === 1 ? text("{what}, 1 lane", { what: table.title }) : text("{what}, {lanes} lanes", { what: table.title, lanes: table.lanes })));
        parts.push(make("table", {}, ...table.kinds.map((row) =>
          make("tr", {}, make("td", {}, this.swatch(row.kind), row.label), make("td", { class: "n" }, row.time), make("td", { class: "n" }, row.share)))));
        const head = [text("count"), text("time"), text("mean"), text("longest")].map((word) => make("th", { class: "n" }, word));
        parts.push(make("table", { class: "rst-names" }, make("tr", {}, ...head), ...table.names.flatMap((row) => [
          make("tr", {}, make("td", { colspan: "4" }, this.swatch(row.kind), row.name)),
          make("tr", {}, ...[row.count, row.time, row.mean, row.longest].map((value) => make("td", { class: "n" }, String(value)))),
        ])));
        if (table.more) parts.push(make("p", { class: "rst-quiet" }, text("and {more} names with less time", { more: table.more })));
      }
      if (!tables.length) parts.push(make("p", { class: "rst-quiet" }, text("No lane was selected.")));
      this.showFacts(...parts);
    }

    /** Searches for events of this name. */
    look(name) {
      this.search.value = name;
      return this.find(null);
    }

    async find(number) {
      const wanted = this.search.value.trim();
      this.found = null;
      this.matchNumber = null;
      if (!wanted) {
        this.count.textContent = "";
        this.redraw();
        return;
      }
      const said = await this.askJson("find", { text: wanted, number, after: Math.floor(this.t0) }).catch(() => null);
      if (!said || this.search.value.trim() !== wanted) return;
      this.count.textContent = said.count ? text("{number} of {count}", { number: (said.number + 1).toLocaleString("en"), count: said.count.toLocaleString("en") }) : text("not found");
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
      this.showEvent(said.event);
      this.showLongest(said);
      this.redraw();
    }

    /** The matches of a search by duration; a click goes there. */
    showLongest({ count, number, longest }) {
      const rows = longest.map((one) => make("tr", one.number === number ? { "aria-current": "true" } : {},
        make("td", {}, make("button", { type: "button", title: one.name, onclick: () => this.find(one.number) }, text("rank {rank}", { rank: one.rank })), ` ${one.name}`),
        make("td", { class: "n" }, one.duration)));
      const title = longest.length < count ? text("The longest {shown} of {count} matches", { shown: longest.length, count: count.toLocaleString("en") }) : text("{count} matches, the longest first", { count });
      this.side.append(make("h4", {}, title), make("table", { class: "rst-found" }, ...rows));
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
      this.showMark(mark);
    }

    /** The finding, its evidence here, and links to the evidence before and after. */
    showMark(mark) {
      const number = this.marks.indexOf(mark);
      const at = (by) => this.marks[(number + by + this.marks.length) % this.marks.length];
      const to = (label, by) => make("button", { type: "button", onclick: () => this.openMark(at(by)) }, label);
      const facts = this.findings[mark.finding].facts.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, value)));
      const turn = make("p", { class: "rst-turn" }, to(text("‹ previous"), -1), text("evidence {number} of {count}", { number: number + 1, count: this.marks.length }), to(text("next ›"), 1));
      this.showFacts(make("h3", {}, mark.title), make("p", {}, mark.note),
        make("p", { class: "rst-quiet" }, text("The evidence is framed in the picture.")), turn, make("table", {}, ...facts));
    }

    /** If the address names the evidence of a finding: the finding. */
    showEvidence() {
      const seen = this.selection;
      const mark = seen && this.marks.find(({ t0, t1, rank }) => t0 === seen.t0 && t1 === seen.t1 && rank === seen.rank);
      if (mark) this.showMark(mark);
    }

    hint() {
      this.side.replaceChildren(
        make("h3", {}, text("How to read it")),
        make("p", {}, text("Each lane is a thread, group or stream of a rank. Zoomed out, a lane's height is shared by what happens there, in proportion to time; no kind is hidden.")),
        make("p", {}, text("Click an event for its details and for arrows from the rank that came last to those that waited. Shift and drag to sum up a part of the picture. Drag on the ruler to enlarge. Click a name on the left to fold or unfold.")),
        make("table", { class: "rst-keys" }, ...[[["Ctrl-K"], text("pages, ranks and commands")], ...COMMANDS.filter((one) => one.keys.length).map((one) => [signs(one), one.name])].map(([keys, what]) =>
          make("tr", {}, make("td", {}, ...keys.flatMap((key) => [make("kbd", {}, key), " "])), make("td", {}, what)))),
        make("p", { class: "rst-quiet" }, text("The wheel zooms at the pointer, sideways it pans; over the names, or with Shift, it scrolls.")));
    }
  };

  Object.assign(window.rankscope_timeline, { Panel });
})();
