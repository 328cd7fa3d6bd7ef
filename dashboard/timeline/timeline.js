// The timeline canvas: draws what the server sends for the pixels in view (see lod.py), and asks again when they change.
(function () {
  "use strict";

  const { Drawing, Server, Lanes, Counters, Panel, Markers, Input, make, text, FEW_STEPS, RETRY_MS } = window.rankscope_timeline;

  const STYLE = `
#page:has(.rst) { max-width: none; }
.rst { display: flex; flex-direction: column; color: var(--text); background: var(--page); min-height: 320px;
  font: 13px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.rst-bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 4px 2px 6px; }
.rst-bar input, .rst-bar select, .rst button { font: inherit; color: var(--text); background: var(--panel);
  border: 1px solid var(--rule); border-radius: 4px; padding: 3px 8px; }
.rst-bar input { width: 210px; }
.rst button { cursor: pointer; } .rst button:hover { border-color: var(--quiet); }
.rst-between { color: var(--accent); font-weight: 600; }
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
.rst-keys td:first-child { white-space: nowrap; width: 1%; }
.rst-names { margin-top: 8px; table-layout: fixed; } .rst-names td[colspan] { border-bottom: 0; padding-bottom: 0; }
.rst-found [aria-current] td { font-weight: 600; }
.rst-switch { display: inline-flex; gap: 5px; align-items: center; cursor: pointer; }
.rst-bar .rst-switch input { width: auto; } .rst-switch[hidden] { display: none; }
.rst-tip { position: fixed; z-index: 1000; pointer-events: none; max-width: 360px; padding: 6px 9px; border-radius: 4px; font-size: 12px;
  color: var(--text); background: var(--panel); border: 1px solid var(--quiet); box-shadow: 0 2px 8px rgba(0,0,0,.25); overflow-wrap: anywhere; }
.rst-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 6px 2px 0; font-size: 12px; color: var(--quiet); }
.rst-swatch { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px; }
.rst-turn { display: flex; justify-content: space-between; align-items: center; gap: 6px; flex-wrap: wrap; }
.rst-body { position: relative; overflow: hidden; } .rst-drawer { display: flex; }
.rst-bar .rst-narrow, .rst-drawer .rst-narrow { display: none; }
@media (max-width: 900px) {
  .rst-bar .rst-narrow, .rst-drawer .rst-narrow { display: inline-block; }
  .rst-drawer { position: absolute; inset: auto 0 0 0; max-height: 55%; background: var(--page); box-shadow: 0 -4px 12px rgba(0,0,0,.3); }
  .rst-drawer .rst-side { width: 100%; } .rst-side h3 { padding-right: 32px; }
  .rst-drawer:not(.rst-open) { display: none; }
  .rst-drawer > .rst-narrow { position: absolute; top: 4px; right: 4px; }
}
`;

  class Timeline extends Input(Markers(Panel(Counters(Lanes(Server(Drawing(Object))))))) {
    constructor(root, { base, run }) {
      super();
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
      this.marks = []; // evidence of findings
      this.findings = [];
      this.markers = []; // two instants that the user put
      this.path = null;
      this.counters = [];
      this.countersShown = null; // not chosen
      this.readings = null;
      this.opened = performance.now();
      this.stops = [];
      this.build();
      this.start();
      window.rankscope_timeline.shown = this;
    }

    destroy() {
      this.stopped = true;
      if (window.rankscope_timeline.shown === this) window.rankscope_timeline.shown = null;
      this.stops.forEach((stop) => stop());
      this.tip.remove();
      this.root.replaceChildren();
    }

    listen(target, event, handler, options) {
      target.addEventListener(event, handler, options);
      this.stops.push(() => target.removeEventListener(event, handler, options));
    }

    build() {
      const button = (label, title, click) => make("button", { type: "button", title, "aria-label": title, onclick: click }, label);
      this.search = make("input", { type: "search", placeholder: text("search names  ( / )"), "aria-label": text("search names") });
      this.count = make("span", { class: "rst-quiet", role: "status" });
      this.grouping = make("select", { "aria-label": text("group ranks by") });
      this.pathSwitch = make("input", { type: "checkbox", checked: "", onchange: () => this.redraw() });
      this.pathLabel = make("label", { class: "rst-switch", title: text("drawn where at most {steps} steps are in view", { steps: FEW_STEPS }), hidden: "" }, this.pathSwitch, text("critical path"));
      this.countersSwitch = make("input", { type: "checkbox", onchange: () => { this.countersShown = this.countersSwitch.checked; this.layOut(); } });
      this.countersLabel = make("label", { class: "rst-switch", title: text("of nodes, GPUs and processes, below the ranks"), hidden: "" }, this.countersSwitch, text("counters"));
      this.between = make("span", { class: "rst-between", "aria-live": "polite" });
      this.where = make("span", { class: "rst-quiet rst-where" });
      this.drawerSwitch = button(text("details"), text("show or hide the details"), () => this.openDrawer(!this.drawer.classList.contains("rst-open")));
      this.drawerSwitch.classList.add("rst-narrow");
      const bar = make("div", { class: "rst-bar" },
        this.search, button("‹", text("previous match"), () => this.nextMatch(-1)), button("›", text("next match"), () => this.nextMatch(1)), this.count,
        make("span", { class: "rst-space" }), this.between, this.where, this.pathLabel, this.countersLabel, this.grouping,
        button(text("unfold"), text("unfold all ranks"), () => this.unfold(true)), button(text("fold"), text("fold all ranks"), () => this.unfold(false)),
        button("−", text("zoom out (S)"), () => this.zoom(1.6)), button("+", text("zoom in (W)"), () => this.zoom(1 / 1.6)),
        button(text("all"), text("whole run (0)"), () => this.show(0, this.end)),
        button(text("analyzed"), text("analyzed steps (Home)"), () => this.show(...this.home)),
        make("span", { class: "exports" }, ...["PNG", "SVG"].map((format) => make("button", { type: "button", title: text("Save the chart as {format}", { format }) }, format))), this.drawerSwitch);
      this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": text("timeline of the ranks") });
      this.spacer = make("div", {});
      this.scroll = make("div", { class: "rst-scroll" }, this.canvas, this.spacer);
      this.side = make("div", { class: "rst-side" });
      const shut = button("×", text("hide the details"), () => this.openDrawer(false));
      shut.classList.add("rst-narrow");
      this.drawer = make("div", { class: "rst-drawer" }, this.side, shut);
      this.legend = make("div", { class: "rst-legend" });
      this.tip = make("div", { class: "rst-tip", hidden: "" });
      this.root.classList.add("rst", "figure");
      this.root.replaceChildren(make("style", {}, STYLE), bar, make("div", { class: "rst-body" }, this.scroll, this.drawer), this.legend, this.tip);
      this.pen = this.canvas.getContext("2d");
    }

    async start() {
      try {
        let scene = await this.askJson("scene", {});
        while (scene.waiting && !this.stopped) {
          this.say(text("The run is being read…"));
          await new Promise((done) => setTimeout(done, RETRY_MS));
          scene = await this.askJson("scene", {});
        }
        if (this.stopped) return;
        this.take(scene);
        if (!scene.present.length) {
          this.say(text("There is nothing to draw: the run holds no steps, regions, communication or device work."));
          return;
        }
        scene.groupings.forEach(([title], i) => this.grouping.append(make("option", { value: String(i) }, text("by {what}", { what: title }))));
        this.grouping.hidden = scene.groupings.length < 2;
        this.paint();
        this.readAddress();
        this.attach();
        this.hint();
        this.pollMarks();
        this.pollCounters();
      } catch (error) {
        if (!this.stopped) this.say(text("The timeline cannot be shown: {error}", { error: error.message }));
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
      this.path = null;
      this.layOut();
      if (atHome) this.show(...this.home);
      else if (whole) this.show(0, this.end);
      else this.show(this.t0 - later, this.t1 - later);
      this.pollMarks();
      this.pollCounters();
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

  Object.assign(window.rankscope_timeline, { TimelineCanvas });
})();
