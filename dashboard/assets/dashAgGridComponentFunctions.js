/* Table cells that are more than a text. */
"use strict";
(() => {
  const components = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  /* A link to the row's moment in the timeline, on the rank in this column; followed without reloading the page. */
  components.RankscopeMoment = ({ value, data, run, label }) => {
    if (!data || value === null || value === undefined || data.start_ns === null || data.end_ns === null) return null;
    const query = new URLSearchParams({ t0: data.start_ns, t1: data.end_ns, rank: value, ...(run ? { run } : {}) });
    const follow = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      history.pushState({}, "", event.currentTarget.href);
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    };
    return React.createElement("a", { href: `/timeline?${query}`, onClick: follow }, label.replace("{rank}", value));
  };
})();
