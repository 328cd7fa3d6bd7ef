"""Flame graphs of main threads, from samples: calls, each below its caller, as wide as its time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import polars as pl
from markupsafe import Markup, escape

from rankscope.analysis.model.parts import PARTS
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.text.message import spoken, text
from rankscope.analysis.text.phrases import place_in_code
from rankscope.analysis.text.units import duration, percent

__all__ = ["flame", "matching"]

_WIDTH, _PITCH, _LETTER = 1200, 22, 7.4  # of the drawing; it is scaled to the page
_LEAST = 0.5  # narrower calls are left out, with what they call


def flame(
    tree: pl.DataFrame,
    step_ns: float | None,
    link: Callable[[int], str],
    *,
    root: int = 0,
    cause: Container[int] = (),
    found: Container[int] | None = None,
) -> Markup:
    """`tree` is that of `Code.tree` or `Code.difference`; with a `root`, that call and what it calls.

    `link` is the address that shows a place as the root, `cause` are the places that a finding names. Calls that are
    not `found` by a search are dimmed. A tree with `usual` is colored by how it differs from the others.
    """
    rows = {row["place"]: row for row in tree.sort("share", "place", descending=[True, False]).iter_rows(named=True)}
    children: dict[int, list[int]] = {}
    for place, row in rows.items():
        children.setdefault(row["parent"], []).append(place)
    tops = [root] if root in rows else children.get(0, [])
    scale = _WIDTH / max(sum(rows[place]["share"] for place in tops), 1e-9)
    left = [(place, x, 0) for place, x in _beside(tops, rows, 0.0, scale)]
    shapes, deepest = [], 0
    while left:
        place, x, depth = left.pop()
        row = rows[place]
        if row["share"] * scale < _LEAST:
            continue
        deepest = max(deepest, depth)
        css = "dimmed" if found is not None and place not in found else _look(row)
        shapes.append(
            _call(row, step_ns, (x, depth * _PITCH, row["share"] * scale), link(place), css, is_cause=place in cause)
        )
        left += [(child, at, depth + 1) for child, at in _beside(children.get(place, []), rows, x, scale)]
    height = (deepest + 1) * _PITCH
    return Markup('<svg class="flame" viewBox="0 0 {} {}">{}</svg>').format(_WIDTH, height, Markup("").join(shapes))


def _beside(
    places: list[int], rows: Mapping[int, Mapping[str, Any]], x: float, scale: float
) -> Iterator[tuple[int, float]]:
    for place in places:
        yield place, x
        x += rows[place]["share"] * scale


def _look(row: Mapping[str, Any]) -> str:
    """Return the class that colors a call.

    By its part of the step, or by its difference where that is clear of chance.
    """
    if "usual" not in row:
        return f"on p-{row['part'] if row['part'] in PARTS else 'other'}"
    beyond = row["share"] - row["usual"]
    return "unclear" if abs(beyond) <= row["error"] else "longer" if beyond > 0 else "shorter"


def _call(
    row: Mapping[str, Any],
    step_ns: float | None,
    at: tuple[float, int, float],
    href: str,
    css: str,
    *,
    is_cause: bool,
) -> Markup:
    line, _, function = place_in_code(row["function"], row["file"], row["line"]).rpartition(" (")
    name = f"{function.removesuffix(')')}  {line}"
    if is_cause:
        name, css = spoken(text("▶ root cause: {line}", line=name)), f"{css} cause"
    said = "\n".join((name, ", ".join(map(spoken, _numbers(row, step_ns))), row["file"]))
    x, y, width = at
    letters = int((width - 6) / _LETTER)
    shown = name if len(name) <= letters else f"{name[: letters - 1]}…"
    label = f'<text x="{x + 4:.1f}" y="{y + 15}">{escape(shown)}</text>' if letters > 2 else ""
    return Markup(
        f'<a href="{escape(href)}" class="{css}" aria-label="{escape(said)}"><title>{escape(said)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.6, 0.3):.2f}" height="{_PITCH - 1}"/>{label}</a>'
    )


def _numbers(row: Mapping[str, Any], step_ns: float | None) -> Iterator[str]:
    share = row["share"]
    if step_ns is None:
        yield percent(share)
    else:
        yield text("{time} of the step ({share})", time=duration(share * step_ns), share=percent(share))
    if "usual" in row:
        beyond = share - row["usual"]
        change, error = (duration(ns * step_ns) if step_ns else percent(ns) for ns in (abs(beyond), row["error"]))
        change = f"{'+' if beyond >= 0 else '−'}{change}"
        yield text("{change} ± {error} against the others", change=change, error=error)
    if row["part"]:
        yield part_label(row["part"])


def matching(tree: pl.DataFrame, wanted: str) -> tuple[set[int], float]:
    """Return the calls with this text in function or file, and the share of the time in those or what they call."""
    name = (pl.col("function") + " " + pl.col("file") + ":" + pl.col("line").cast(pl.String)).str.to_lowercase()
    found = set(tree.filter(name.str.contains(wanted.lower(), literal=True))["place"])
    inside: set[int] = set()
    share = 0.0
    for place, parent, of in tree.select("place", "parent", "share").iter_rows():  # each after its parent
        if parent in inside or place in found:
            inside.add(place)
            share += 0.0 if parent in inside else of
    return found, share
