"""Writes docs/detectors.md from the detectors' docstrings, which are their manual pages: `make docs`."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from rankscope.analysis.detectors import detectors
from rankscope.analysis.model.spec import name_of

PAGE = Path(__file__).with_name("detectors.md")


def render() -> str:
    """Give the whole page."""
    parts = [
        "# Detectors",
        "Generated from the modules in `analysis/detectors/` by `make docs`; edit those instead.",
        "Each analyzes the steps after warm-up and compares the ranks of one run. A finding is reported if it "
        "is large enough (the thresholds below) and clear of its own scatter over the steps: a single hiccup is not. "
        "Severity is high from 10 % of the mean step, medium from 5 %. A detector that cannot decide is in the "
        "report as not checked, with the reason; a healthy check comes with its "
        "detection limit.",
        *(_page(name, module) for name, module in detectors().items()),
    ]
    return "\n\n".join(parts) + "\n"


def _page(name: str, module: ModuleType) -> str:
    parameters = inspect.signature(module.detect).parameters.values()
    lists = {
        "**Reads.**": [f"`{p.name}`" for p in parameters if p.kind is not p.KEYWORD_ONLY],
        "Collectors:": [f"`{collector}`" for collector in module.detector.needs],
        "Thresholds:": [f"`{p.name}` = {p.default:_}" for p in parameters if p.kind is p.KEYWORD_ONLY],
    }
    shown = " ".join(f"{head} {', '.join(listed)}." for head, listed in lists.items() if listed)
    reads = f"**In JSON.** `{name}`.\n\n{shown}"
    of_a_part = (other for others in module.detector.explains_by_part.values() for other in others)
    explained = dict.fromkeys((*module.detector.explains, *module.detector.explains_of_ranks, *of_a_part))
    if explained:
        reads += "\n\n**Explains.** " + ", ".join(f"`{other}`" for other in explained) + "."
    return f"## {name_of(name)}\n\n{inspect.cleandoc(module.__doc__ or '')}\n\n{reads}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
