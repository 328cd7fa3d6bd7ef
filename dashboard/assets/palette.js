/* Ctrl-K: pages, ranks, events and commands in one list that is searched by typing. */
"use strict";
(() => {
  const { COMMANDS, make, signs, text } = window.rankscope_timeline;

  const MOST = 12; // of the list

  const onTimeline = () => window.rankscope_timeline.shown;

  /* As Dash's own links do. */
  const go = (href) => {
    window.history.pushState({}, "", href);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
  };

  const address = (page, words) => {
    const run = new URLSearchParams(location.search).get("run");
    return `/${page}?${new URLSearchParams({ ...(run ? { run } : {}), ...words })}`;
  };

  /* Whether the run has this rank, of ranks written as `0-3,8`. */
  const has = (ranks, rank) => ranks.split(",").some((range) => {
    const [first, last = first] = range.split("-").map(Number);
    return range && rank >= first && rank <= last;
  });

  function pages() {
    return [...document.querySelectorAll("a.nav-link")].map((link) => ({ name: link.innerText, keys: [], run: () => go(link.getAttribute("href")) }));
  }

  function ofRank(typed) {
    const [number] = typed.match(/\d+/) || [];
    const known = document.querySelector("[data-ranks]");
    if (number === undefined || !known || !has(known.dataset.ranks, Number(number))) return [];
    const rank = Number(number);
    return [
      { name: text("go to rank {rank} in the timeline", { rank }), run: () => (onTimeline() ? onTimeline().goTo(rank) : go(address("timeline", { rank }))) },
      { name: text("compare rank {rank} with the median", { rank }), run: () => go(address("compare", { rank })) },
      { name: text("flame graph of rank {rank}", { rank }), run: () => go(address("flame", { rank })) },
    ];
  }

  function finding(typed) {
    const name = typed.trim();
    if (!name) return [];
    return [{ name: text("find events named “{name}”", { name }), run: () => (onTimeline() ? onTimeline().look(name) : go(address("timeline", { find: name }))) }];
  }

  function ofHeader() {
    return [...document.querySelectorAll(".header button:not(.palette-opens)")].filter((button) => button.offsetParent)
      .map((button) => ({ name: button.getAttribute("aria-label") || button.title || button.innerText, run: () => button.click() }));
  }

  /* Entries that contain all typed words; ranks first, and last the search for events. */
  function matching(typed) {
    const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
    const ofTimeline = onTimeline() ? COMMANDS.map((one) => ({ name: one.name, keys: signs(one), run: () => one.run(onTimeline()) })) : [];
    const all = [...pages(), ...ofTimeline, ...ofHeader()];
    const found = all.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
    return [...ofRank(typed), ...found.slice(0, MOST), ...finding(typed)];
  }

  const input = make("input", { type: "text", role: "combobox", "aria-expanded": "true", "aria-controls": "palette-list", "aria-autocomplete": "list",
    "aria-label": text("command, page, rank or event"), placeholder: text("command, page, rank or event"), autocomplete: "off", spellcheck: "false" });
  const list = make("ul", { id: "palette-list", role: "listbox", "aria-label": text("commands") });
  const box = make("dialog", { class: "palette", "aria-label": text("commands") }, input, list);
  let shown = [];
  let at = 0;

  function choose(number) {
    at = (number + shown.length) % Math.max(shown.length, 1);
    [...list.children].forEach((row, i) => row.setAttribute("aria-selected", String(i === at)));
    const row = list.children[at];
    if (row) row.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", row ? row.id : "");
  }

  function search() {
    shown = matching(input.value);
    list.replaceChildren(...shown.map(({ name, keys = [] }, i) => make("li", { id: `palette-${i}`, role: "option", onclick: () => take(i), onpointermove: () => { if (i !== at) choose(i); } },
      make("span", {}, name), ...keys.map((key) => make("kbd", {}, key)))));
    choose(0);
  }

  function take(number) {
    box.close();
    if (shown[number]) shown[number].run();
  }

  function open() {
    if (!box.isConnected) document.body.append(box);
    input.value = "";
    search();
    box.showModal();
    input.focus();
  }

  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => {
    const actions = { ArrowDown: () => choose(at + 1), ArrowUp: () => choose(at - 1), Enter: () => take(at) };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
  box.addEventListener("keydown", (event) => event.stopPropagation()); // the timeline has keys of its own
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    const asked = ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") || (event.key === "?" && !typing && !onTimeline());
    if (!asked || box.open) return;
    event.preventDefault();
    open();
  }, true);
  document.addEventListener("click", (event) => { if (event.target.closest(".palette-opens")) open(); });
})();
