// Everything that the timeline does at a key: for the keyboard, the list of keys, and the page's list of commands.
(function () {
  "use strict";

  const { text } = window.rankscope_timeline;

  const SIGNS = { arrowleft: "←", arrowright: "→", arrowup: "↑", arrowdown: "↓", home: "Home", escape: "Esc" };

  /** What is done is done to a timeline `t`. Only the first ones are in the list of keys; the others have none. */
  const COMMANDS = [
    { keys: ["w", "+"], name: text("zoom in"), run: (t) => t.zoom(0.75, t.pointer ? t.pointer.x : undefined) },
    { keys: ["s", "-"], name: text("zoom out"), run: (t) => t.zoom(1 / 0.75, t.pointer ? t.pointer.x : undefined) },
    { keys: ["a", "arrowleft"], name: text("go left"), run: (t) => t.pan(-0.15) },
    { keys: ["d", "arrowright"], name: text("go right"), run: (t) => t.pan(0.15) },
    { keys: ["arrowup"], name: text("scroll up"), run: (t) => { t.scroll.scrollTop -= 60; } },
    { keys: ["arrowdown"], name: text("scroll down"), run: (t) => { t.scroll.scrollTop += 60; } },
    { keys: ["home"], name: text("analyzed steps"), run: (t) => t.show(...t.home) },
    { keys: ["0"], name: text("whole run"), run: (t) => t.show(0, t.end) },
    { keys: ["f"], name: text("zoom to what is chosen"), run: (t) => { const target = t.chosen || t.found || t.selection; if (target) t.zoomTo(target); } },
    { keys: ["/"], name: text("search names"), run: (t) => t.search.focus() },
    { keys: ["n"], name: text("next match; with Shift the previous one"), run: (t, event) => t.nextMatch(event && event.shiftKey ? -1 : 1) },
    { keys: ["m"], name: text("marker A, then B, at the pointer"), run: (t) => t.putMarker() },
    { keys: ["escape"], name: text("choose nothing"), run: (t) => { t.chosen = t.selection = t.found = null; t.setMarkers([]); t.hint(); t.changed(); } },
    { keys: ["?"], name: text("this list"), run: (t) => { t.hint(); t.openDrawer(true); } },
    { keys: [], name: text("unfold all ranks"), run: (t) => t.unfold(true) },
    { keys: [], name: text("fold all ranks"), run: (t) => t.unfold(false) },
    { keys: [], name: text("show or hide the critical path"), run: (t) => t.pathSwitch.click() },
    { keys: [], name: text("show or hide counters"), run: (t) => t.countersSwitch.click() },
  ];

  const signs = (command) => command.keys.map((key) => SIGNS[key] || key.toUpperCase());

  Object.assign(window.rankscope_timeline, { COMMANDS, signs });
})();
