/* Chart shows SVG made on the server; Raster draws cells that it fetches at the resolution of the screen; Select and
 * Ticks are the browser's own fields, which every keyboard and screen reader knows.
 * All are plain React components for Dash, which brings React; nothing is built. */
"use strict";
(() => {
  const { createElement: h, useEffect, useRef, useState } = window.React;

  /* One tooltip for the whole page: the browser's own comes after a second, and not on touch. */
  const tip = (() => {
    let box = null;
    const element = () => {
      if (!box) {
        box = document.createElement("div");
        box.className = "tip";
        box.setAttribute("role", "tooltip");
        document.body.appendChild(box);
      }
      return box;
    };
    return {
      show(text, x, y) {
        const shown = element();
        shown.textContent = text;
        shown.style.display = "block";
        const { width, height } = shown.getBoundingClientRect();
        shown.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - width - 4))}px`;
        shown.style.top = `${y + 18 + height > window.innerHeight ? y - height - 8 : y + 18}px`;
      },
      hide() {
        if (box) box.style.display = "none";
      },
    };
  })();

  /* As page_kit.exports; what they do is in exports.js. */
  const exports = () => h("div", { className: "exports" }, ["PNG", "SVG"].map((format) =>
    h("button", { key: format, type: "button", title: window.rankscope_timeline.text("Save the chart as {format}", { format }) }, format)));

  function Chart({ markup, title }) {
    const box = useRef(null);
    useEffect(() => {
      for (const named of box.current.querySelectorAll("title")) {
        named.parentNode.dataset.tip = named.textContent;
        named.remove();
      }
      return tip.hide;
    }, [markup]);
    const over = (event) => {
      const named = event.target.closest("[data-tip]");
      if (named) tip.show(named.dataset.tip, event.clientX, event.clientY);
      else tip.hide();
    };
    const followed = (event) => {
      const link = event.target.closest("a[href^='/']");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      tip.hide();
      window.history.pushState({}, "", link.getAttribute("href")); // as Dash's own links do
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    };
    const drawn = h("div", {
      ref: box, className: "chart-box", onClick: followed, role: title ? "group" : undefined, "aria-label": title || undefined,
      onPointerMove: over, onPointerLeave: tip.hide, dangerouslySetInnerHTML: { __html: markup },
    });
    return h("div", { className: "figure" }, drawn, exports());
  }

  const LEVELS = ["level0", "level1", "level2", "level3", "level4"];
  const MISSING = 255;
  const CLICK_PX = 4; // a drag that is shorter is a click

  /* The page's colour of each byte: 0 is the lowest, 254 the highest, 255 nothing. */
  function ramp() {
    const style = getComputedStyle(document.documentElement);
    const rgb = (name) => {
      const hex = style.getPropertyValue(`--${name}`).trim();
      return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    };
    const stops = LEVELS.map(rgb);
    const colours = new Uint32Array(256);
    for (let byte = 0; byte < MISSING; byte += 1) {
      const at = (byte / (MISSING - 1)) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      const [r, g, b] = stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (at - low)));
      colours[byte] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    return colours;
  }

  function Raster({ source, rows, columns, title }) {
    const box = useRef(null);
    const canvas = useRef(null);
    const whole = { r0: 0, r1: rows, c0: 0, c1: columns };
    const [view, setView] = useState(whole);
    const [drag, setDrag] = useState(null);
    const [labels, setLabels] = useState({ rows: [], columns: [] });
    const asked = useRef(0);
    const height = Math.max(60, Math.min(560, (view.r1 - view.r0) * 26));

    useEffect(() => setView(whole), [source, rows, columns]);

    useEffect(() => {
      let gone = false;
      let cells = null;
      let shape = [0, 0];
      const paint = () => {
        if (!cells || !canvas.current) return;
        const [height_, width_] = shape;
        canvas.current.width = width_;
        canvas.current.height = height_;
        const context = canvas.current.getContext("2d");
        const image = context.createImageData(width_, height_);
        const pixels = new Uint32Array(image.data.buffer);
        const colours = ramp();
        for (let i = 0; i < pixels.length; i += 1) pixels[i] = colours[cells[i]];
        context.putImageData(image, 0, 0);
      };
      const load = async () => {
        const { width } = box.current.getBoundingClientRect();
        const words = { ...view, width: Math.max(1, Math.round(width)), height };
        const answer = await fetch(`${source}&${new URLSearchParams(words)}`);
        if (!answer.ok || gone) return;
        const head = JSON.parse(answer.headers.get("X-Labels"));
        cells = new Uint8Array(await answer.arrayBuffer());
        if (gone) return;
        shape = head.shape;
        setLabels(head);
        paint();
      };
      const resized = new ResizeObserver(() => load()); // it also calls once to begin with
      resized.observe(box.current);
      const recoloured = new MutationObserver(paint);
      recoloured.observe(document.documentElement, { attributeFilter: ["data-scheme"] });
      return () => {
        gone = true;
        resized.disconnect();
        recoloured.disconnect();
        tip.hide();
      };
    }, [source, view, height]);

    const at = (event) => {
      const frame = box.current.getBoundingClientRect();
      const part = (value, from, size) => Math.min(Math.max((value - from) / size, 0), 0.999999);
      return [part(event.clientX, frame.left, frame.width), part(event.clientY, frame.top, frame.height)];
    };
    const cell = ([x, y]) => ({
      row: view.r0 + Math.floor(y * (view.r1 - view.r0)),
      column: view.c0 + Math.floor(x * (view.c1 - view.c0)),
    });
    const moved = async (event) => {
      const here = at(event);
      if (drag) {
        setDrag({ ...drag, to: here });
        return;
      }
      const number = (asked.current += 1);
      const { clientX, clientY } = event;
      const words = new URLSearchParams({ ...cell(here), ...view, height, width: box.current.clientWidth });
      const answer = await fetch(`${source}&${words}`);
      if (answer.ok && number === asked.current) tip.show((await answer.json()).text, clientX, clientY);
    };
    const left = () => {
      asked.current += 1; // an answer that is still on its way comes too late
      tip.hide();
    };
    const released = (event) => {
      if (!drag) return;
      const from = cell(drag.from);
      const to = cell(at(event));
      setDrag(null);
      const [r0, r1] = [Math.min(from.row, to.row), Math.max(from.row, to.row) + 1];
      const [c0, c1] = [Math.min(from.column, to.column), Math.max(from.column, to.column) + 1];
      const apart = Math.hypot(...[0, 1].map((i) => (at(event)[i] - drag.from[i]) * [box.current.clientWidth, height][i]));
      if (apart < CLICK_PX) open(from);
      else setView({ r0, r1, c0, c1 });
    };
    const open = async (here) => {
      const words = new URLSearchParams({ ...here, ...view, height, width: box.current.clientWidth });
      const answer = await fetch(`${source}&${words}`);
      const { href } = answer.ok ? await answer.json() : {};
      if (!href) return;
      window.history.pushState({}, "", href); // as Dash's own links do
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    };
    const keyed = (event) => {
      if (event.key === "Escape") setView(whole);
    };
    const area = drag && drag.to && {
      left: `${Math.min(drag.from[0], drag.to[0]) * 100}%`,
      top: `${Math.min(drag.from[1], drag.to[1]) * 100}%`,
      width: `${Math.abs(drag.to[0] - drag.from[0]) * 100}%`,
      height: `${Math.abs(drag.to[1] - drag.from[1]) * 100}%`,
    };
    const spans = (list, side) => list.map(([place, text]) => h("span", { key: place, style: { [side]: `${place * 100}%` } }, text));
    const closer = view.r1 - view.r0 < rows || view.c1 - view.c0 < columns;
    const drawn = h("div", { className: "raster-frame" },
      h("div", { className: "raster-rows" }, spans(labels.rows, "top")),
      h("div", {
        ref: box, className: "raster", style: { height: `${height}px` }, tabIndex: 0, role: "img", "aria-label": title,
        onPointerMove: moved, onPointerLeave: left, onKeyDown: keyed,
        onPointerDown: (event) => { left(); setDrag({ from: at(event), to: null }); },
        onPointerUp: released,
      }, h("canvas", { ref: canvas }), area && h("div", { className: "drag", style: area })),
      h("div", { className: "raster-columns" }, spans(labels.columns, "left")),
      closer && h("button", { className: "raster-whole", onClick: () => setView(whole) }, window.rankscope_timeline.text("Show all (Esc)")));
    return h("div", { className: "figure" }, drawn, exports());
  }

  function Select({ id, options, value, placeholder, setProps }) {
    const listed = options.map((one) => (typeof one === "string" ? { value: one, label: one } : one));
    const none = value === null && h("option", { value: "", disabled: true }, placeholder);
    return h("select", { id, value: value ?? "", onChange: (event) => setProps({ value: event.target.value }) },
      none, listed.map((one) => h("option", { key: one.value, value: one.value }, one.label)));
  }

  function Ticks({ id, children, values, value, setProps }) {
    const changed = ({ target }) => setProps({ value: values.filter((one) => (one === target.value ? target.checked : value.includes(one))) });
    const tick = (one) => h("input", { type: "checkbox", value: one, checked: value.includes(one), onChange: changed });
    return h("div", { id, className: "ticks" }, values.map((one, i) => h("label", { key: one }, tick(one), children[i])));
  }

  window.rankscope_ui = { Chart, Raster, Select, Ticks };
})();
