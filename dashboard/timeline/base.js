// Shared by the canvas's scripts: measures, words and numbers. Loaded first; each of the others adds its part to the
// class in timeline.js. Times are ns since the start of the run's picture, as plain numbers. On the run's own clock they
// are beyond what a number counts exactly, so only the address, which holds such times, is read and written with BigInt.
(function () {
  "use strict";

  const LABELS = 168; // px of the column of names
  const RULER = 52; // px: findings, steps, times
  const ROOMY = 18; // px of a lane's line, of which 2 stay empty
  const FEW_STEPS = 5; // in view, up to which the critical path is drawn: with more it would cover the picture
  const RETRY_MS = 300;

  const WORDS = window.rankscope_words || {}; // the page's: English -> the language that is spoken

  /** A text in the language that is spoken, with values put in. `script_texts.py` finds them by this function's name. */
  function text(english, values = {}) {
    return (WORDS[english] || english).replace(/\{(\w+)\}/g, (_, name) => values[name]);
  }

  function duration(ns) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (Math.abs(ns) >= size) return `${ns / size >= 100 ? (ns / size).toFixed(0) : (ns / size).toPrecision(3)} ${unit}`;
    }
    return `${Math.round(ns)} ns`;
  }

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  window.rankscope_timeline = { LABELS, RULER, ROOMY, FEW_STEPS, RETRY_MS, duration, make, text };
})();
