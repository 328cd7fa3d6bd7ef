/* PNG and SVG of a chart: of plotly's, of SVG made on the server, and of what is drawn on a canvas. */
"use strict";
(() => {
  const { make } = window.rankscope_timeline;

  const SVG = "http://www.w3.org/2000/svg";
  const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline", "display"];
  const SCALE = 2; // pixels of a PNG for one of the screen's

  const paper = () => getComputedStyle(document.body).backgroundColor;

  /* An SVG that needs no style sheet: each shape has what the page's gives it, and the patterns that are used. */
  function alone(drawn) {
    const { width, height } = drawn.getBoundingClientRect();
    const copy = drawn.cloneNode(true);
    const [from, to] = [drawn, copy].map((svg) => [svg, ...svg.querySelectorAll("*")]);
    from.forEach((shape, i) => {
      const style = getComputedStyle(shape);
      to[i].setAttribute("style", STYLES.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    });
    if (!drawn.getAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${width} ${height}`);
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const box = copy.viewBox.baseVal;
    const ground = document.createElementNS(SVG, "rect");
    Object.entries({ x: box.x, y: box.y, width: box.width, height: box.height, fill: paper() }).forEach(([name, value]) => ground.setAttribute(name, value));
    copy.prepend(...[...document.querySelectorAll("svg defs pattern")].map((pattern) => pattern.cloneNode(true)), ground);
    return { width, height, source: new XMLSerializer().serializeToString(copy) };
  }

  /* A canvas in an SVG: its pixels, since nothing else is known of it, and the names beside them. */
  function around(canvas) {
    const frame = canvas.closest(".raster-frame") || canvas;
    const { left, top, width, height } = frame.getBoundingClientRect();
    const place = (element) => {
      const box = element.getBoundingClientRect();
      return { x: box.left - left, y: box.top - top, width: box.width, height: box.height };
    };
    const svg = document.createElementNS(SVG, "svg");
    const add = (tag, attributes, said = "") => {
      const shape = document.createElementNS(SVG, tag);
      Object.entries(attributes).forEach(([name, value]) => shape.setAttribute(name, value));
      shape.textContent = said;
      svg.append(shape);
    };
    Object.entries({ width, height }).forEach(([name, value]) => svg.setAttribute(name, value));
    add("rect", { width, height, fill: paper() });
    add("image", { ...place(canvas), preserveAspectRatio: "none", style: "image-rendering:pixelated", href: canvas.toDataURL() });
    for (const name of frame.querySelectorAll("span")) {
      const { x, y, height: tall } = place(name);
      const { color, fontSize, fontFamily } = getComputedStyle(name);
      add("text", { x, y: y + 0.8 * tall, fill: color, "font-size": fontSize, "font-family": fontFamily }, name.innerText);
    }
    return { width, height, source: new XMLSerializer().serializeToString(svg) };
  }

  const address = (source) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;

  async function painted({ width, height, source }) {
    const image = new Image();
    image.src = address(source);
    await image.decode();
    const canvas = make("canvas", { width: Math.round(width * SCALE), height: Math.round(height * SCALE) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL();
  }

  async function picture(figure, format) {
    const plot = figure.querySelector(".js-plotly-plot");
    if (plot) return window.Plotly.toImage(plot, { format, scale: SCALE, width: plot.clientWidth, height: plot.clientHeight });
    const drawn = figure.querySelector(".chart-box svg");
    const made = drawn ? alone(drawn) : around(figure.querySelector("canvas"));
    return format === "svg" ? address(made.source) : painted(made);
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".exports button");
    if (!button) return;
    const format = button.innerText.toLowerCase();
    const name = document.title.replace(/ · rankscope$/, "").replace(/[^\p{L}\p{N}._-]+/gu, "-");
    make("a", { download: `${name}.${format}`, href: await picture(button.closest(".figure"), format) }).click();
  });
})();
