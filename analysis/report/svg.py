"""The report's charts as SVG text: pure functions from numbers to markup, coloured by the page's style sheet."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup, escape
from rich.cells import cell_len

from rankscope.analysis.model.digest import Breakdown
from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.report.labels import part_label, part_short, say
from rankscope.analysis.text.units import duration, percent

__all__ = ["COLUMNS_IN_A_ROW", "columns", "mean_bar", "rank_bars", "rank_columns", "step_chart", "step_strip", "swatch"]

WIDTH = 1000
COLUMNS_IN_A_ROW = 256
LEVELS = (1.05, 1.2, 1.5, 2.0)  # of the median step: where a cell of the strip gets darker
_LABEL_GAP = 30  # px between two labels under an axis


def swatch(part: str) -> Markup:
    return _svg(14, 14, f'<rect class="{_class(part)}" width="14" height="14"/>', css="swatch")


def mean_bar(split: Breakdown) -> Markup:
    """Return the mean step as one stacked bar, parts named where there is room."""
    height, total = 64, sum(split.sums)
    shapes = []
    for part, x, width, ns in _stack(split.parts, split.sums, WIDTH, total):
        share = percent(ns / total)
        title = f"<title>{escape(part_label(part))} {share}</title>"
        shapes.append(f'<rect class="{_class(part)}" x="{x:.1f}" width="{width:.1f}" height="{height}">{title}</rect>')
        name = next((n for n in (part_label(part), part_short(part)) if width > 7.2 * max(cell_len(n), 5) + 8), "")
        if name or width > 48:
            middle = x + width / 2
            upper = f'<text x="{middle:.1f}" y="27">{escape(name)}</text>' if name else ""
            y = 47 if name else 37
            shapes.append(f'<g class="on {_class(part)}">{upper}<text x="{middle:.1f}" y="{y}">{share}</text></g>')
    return _svg(WIDTH, height, "".join(shapes), label=say("time"), css="mean")


def rank_bars(split: Breakdown, marked: frozenset[int], missing: Sequence[int]) -> Markup:
    """One stacked bar per rank; a missing rank keeps an empty row."""
    left, right, pitch, thick = 76, 76, 20, 15
    longest = max(split.longest_ns, 1)
    shapes = []
    ranks = sorted({*split.rows, *missing})
    for i, rank in enumerate(ranks):
        y = i * pitch
        name = say("who.rank", rank)
        css = "mark" if rank in marked else "quiet"
        shapes.append(f'<text class="{css} end" x="{left - 8}" y="{y + 12}">{"▶ " * (rank in marked)}{name}</text>')
        if rank not in split.rows:
            shapes.append(f'<text class="quiet" x="{left}" y="{y + 12}">{escape(say("time.not_recorded"))}</text>')
            continue
        row = split.rows[rank]
        for part, x, width, ns in _stack(split.parts, row, WIDTH - left - right, longest):
            title = f"<title>{name}: {escape(part_label(part))} {duration(ns)}</title>"
            at = f'x="{left + x:.1f}" y="{y}" width="{width:.1f}" height="{thick}"'
            shapes.append(f'<rect class="{_class(part)}" {at}>{title}</rect>')
        shapes.append(f'<text class="{css}" x="{WIDTH - right + 8}" y="{y + 12}">{duration(sum(row))}</text>')
    return _svg(WIDTH, len(ranks) * pitch, "".join(shapes), label=say("time.per_rank"))


def rank_columns(split: Breakdown, marked: frozenset[int]) -> Markup:
    """One thin stacked column per rank, in rows of COLUMNS_IN_A_ROW; for more ranks than bars have room for."""
    left, height, pitch = 64, 90, 132
    ranks = list(split.rows)
    pieces = []
    across = min(len(ranks), COLUMNS_IN_A_ROW)
    step = (WIDTH - left) / across
    longest = max(split.longest_ns, 1)
    for row_number, start in enumerate(range(0, len(ranks), across)):
        chunk = ranks[start : start + across]
        bottom = row_number * pitch + 16 + height
        # Each part is drawn up to its upper end, and those below it over it.
        tops = [list(itertools.accumulate(split.rows[rank])) for rank in chunk]
        for n, part in reversed(list(enumerate(split.parts))):
            if any(split.rows[rank][n] for rank in chunk):
                pieces.append(_outline(_class(part), [top[n] / longest for top in tops], left, bottom, step, height))
        pieces.append(_y_axis(left, bottom, height, duration(longest)))
        pieces += _rank_labels(chunk, left, step, bottom, marked)
    rows = -(-len(ranks) // across)
    return _svg(WIDTH, rows * pitch, "".join(pieces), label=say("time.per_rank"))


def columns(values: dict[int, int], marked: frozenset[int]) -> Markup:
    """One column per rank, the marked ones set off, a dashed line at the median of the others."""
    width, left, height = 400, 58, 96
    ranks = sorted(values)
    step = (width - left) / len(ranks)
    longest = max(*values.values(), 1)
    bottom = 16 + height
    pieces = []
    many = len(ranks) > COLUMNS_IN_A_ROW
    if many:
        plain = [0 if rank in marked else values[rank] / longest for rank in ranks]
        pieces.append(_outline("col plain", plain, left, bottom, step, height))
    boxes: dict[str, list[str]] = {"plain": [], "marked": []}
    for i, rank in enumerate(ranks):
        if many and rank not in marked:
            continue
        tall = height * values[rank] / longest
        thick = max(step - min(3.0, 0.2 * step), 2.5 if rank in marked else 0.4)
        boxes["marked" if rank in marked else "plain"].append(_box(left + i * step, bottom - tall, thick, tall))
    pieces += [f'<path class="col {css}" d="{"".join(drawn)}"/>' for css, drawn in boxes.items() if drawn]
    others = [values[rank] for rank in ranks if rank not in marked]
    if others:
        y = bottom - height * statistics.median(others) / longest
        pieces.append(f'<line class="median" x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
    pieces.append(_y_axis(left, bottom, height, duration(longest)))
    pieces += _rank_labels(ranks, left, step, bottom, marked)
    return _svg(width, bottom + 26, "".join(pieces), label=say("finding.evidence"), css="picture")


def step_chart(
    step_ns: Mapping[int, Sequence[int]], *, points: int, ends: tuple[str, str] | None = None
) -> tuple[Markup, int]:
    """Median over the ranks as a line, shortest to longest rank as a band, and how many steps a point stands for.

    `ends` say what the first and the last one are, if not judged steps.
    """
    left, height, bottom = 64, 110, 122
    steps = max(len(row) for row in step_ns.values())
    per_point = -(-steps // points)
    low, middle, high = [], [], []
    for chunk in _chunks(range(steps), per_point):
        of_step = [[row[i] for row in step_ns.values() if i < len(row)] for i in chunk]
        low.append(min(min(values) for values in of_step))
        middle.append(statistics.median(statistics.median(values) for values in of_step))
        high.append(max(max(values) for values in of_step))
    longest = max(*high, 1)
    pitch = (WIDTH - left) / len(high)

    def line(values: Iterable[float], *, backwards: bool = False) -> str:
        at = [f"{left + (i + 0.5) * pitch:.1f} {bottom - height * v / longest:.1f}" for i, v in enumerate(values)]
        return " ".join(reversed(at) if backwards else at)

    first, last = ends or (say("steps.first"), say("steps.last", steps))
    css = "line" if len(high) > 1 else "line dot"
    pieces = [
        f'<polygon class="band" points="{line(high)} {line(low, backwards=True)}"/>' if len(step_ns) > 1 else "",
        f'<polyline class="{css}" points="{line(middle)} {line(middle[-1:]) if len(high) == 1 else ""}"/>',
        _y_axis(left, bottom, height, duration(longest)),
        f'<text class="quiet" x="{left}" y="{bottom + 18}">{escape(first)}</text>',
        f'<text class="quiet end" x="{WIDTH}" y="{bottom + 18}">{escape(last)}</text>',
    ]
    return _svg(WIDTH, bottom + 24, "".join(pieces), label=say("steps")), per_point


def step_strip(
    step_ns: Mapping[int, Sequence[int]], median_ns: float, *, rows: int, points: int
) -> tuple[Markup, int, int]:
    """Cells of (ranks, steps), darker for longer steps, and how many ranks and steps a cell stands for."""
    left = 64
    ranks = sorted(step_ns)
    steps = max(len(row) for row in step_ns.values())
    ranks_per_row, steps_per_cell = -(-len(ranks) // rows), -(-steps // points)
    thick = 14 if len(ranks) <= 16 else 5
    pitch = (WIDTH - left) / -(-steps // steps_per_cell)
    paths: dict[int, list[str]] = {}
    pieces = []
    groups = list(_chunks(ranks, ranks_per_row))
    for row_number, group in enumerate(groups):
        y = row_number * thick
        if len(ranks) <= 16 or row_number % 4 == 0:
            pieces.append(f'<text class="quiet end tiny" x="{left - 8}" y="{y + min(thick, 10)}">{group[0]}</text>')
        levels = []
        for chunk in _chunks(range(steps), steps_per_cell):
            cell = [step_ns[rank][i] for rank in group for i in chunk if i < len(step_ns[rank])]
            levels.append(sum(max(cell) > limit * median_ns for limit in LEVELS) if cell else -1)
        for level, first, count in _runs(levels):
            if level >= 0:
                box = _box(left + first * pitch, y, count * pitch, thick - (1 if thick > 5 else 0))
                paths.setdefault(level, []).append(box)
    pieces += [f'<path class="level{level}" d="{"".join(drawn)}"/>' for level, drawn in sorted(paths.items())]
    svg = _svg(WIDTH, len(groups) * thick + 2, "".join(pieces), label=say("steps"))
    return svg, ranks_per_row, steps_per_cell


def _svg(width: int, height: int, body: str, *, label: str = "", css: str = "chart") -> Markup:
    """`body` is markup made here: whatever comes from a user in it has been escaped."""
    named = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return Markup(f'<svg class="{css}" viewBox="0 0 {width} {height}" {named}>{body}</svg>')


def _class(part: str) -> str:
    return f"p-{part}" if part in PART_ORDER else "p-unknown"


def _stack(
    parts: Sequence[str], values: Sequence[int], length: float, total: int
) -> Iterator[tuple[str, float, float, int]]:
    """(part, start, length, ns) of each piece of a stack; empty pieces are left out."""
    start = 0
    for part, ns in zip(parts, values, strict=True):
        if ns > 0:
            yield part, length * start / total, length * ns / total, ns
        start += ns


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z"


def _outline(css: str, shares: Iterable[float], left: float, bottom: float, step: float, height: float) -> str:
    """Columns side by side as one shape, to half a pixel: of thousands of ranks each takes a few bytes."""
    way, done = [], 0
    for tall, same in itertools.groupby(round(2 * height * share) / 2 for share in shares):
        done += sum(1 for _ in same)
        way.append(f"V{bottom - tall:g}H{left + done * step:.1f}")
    return f'<path class="{css}" d="M{left} {bottom:g}{"".join(way)}V{bottom:g}z"/>'


def _y_axis(left: int, bottom: float, height: int, top_label: str) -> str:
    top = bottom - height
    return (
        f'<path class="axis" d="M{left} {top}V{bottom}H{left + 4}M{left} {top}h4"/>'
        f'<text class="quiet end" x="{left - 6}" y="{top + 9}">{top_label}</text>'
        f'<text class="quiet end" x="{left - 6}" y="{bottom}">0</text>'
    )


def _rank_labels(ranks: Sequence[int], left: int, step: float, bottom: float, marked: frozenset[int]) -> list[str]:
    """Label marked ranks first, then the first and the last one, as far as they do not run into each other."""
    taken: list[float] = []
    drawn = []
    order = [*(rank for rank in ranks if rank in marked), ranks[0], ranks[-1], *(ranks if len(ranks) <= 16 else ())]
    positions = {rank: left + (i + 0.5) * step for i, rank in enumerate(ranks)}
    for rank in dict.fromkeys(order):
        x = positions[rank]
        if all(abs(x - other) >= _LABEL_GAP for other in taken) or (len(ranks) <= 16 and step >= 18):
            taken.append(x)
            css = "mark" if rank in marked else "quiet"
            drawn.append(f'<text class="{css} mid" x="{x:.1f}" y="{bottom + 15:.1f}">{rank}</text>')
    arrows = "".join(f"M{positions[rank]:.1f} {bottom + 19:.1f}l4 6h-8z" for rank in ranks if rank in marked)
    return [*drawn, f'<path class="arrow" d="{arrows}"/>' if arrows else ""]


def _chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _runs(levels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(level, first, count) of each run of equal neighbours."""
    first = 0
    for i in range(1, len(levels) + 1):
        if i == len(levels) or levels[i] != levels[first]:
            yield levels[first], first, i - first
            first = i
