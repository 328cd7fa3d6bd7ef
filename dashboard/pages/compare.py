"""One rank against another, of the same run or of another one: what it does longer, in which kernels and lines."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from dash import Dash, Input, Output, dcc, html, no_update
from dash import State as Known

from rankscope.analysis.compare.two_ranks import (
    RankSide,
    code_changes,
    median_rank,
    part_changes,
    pieces,
    steps_of_both,
    work_changes,
)
from rankscope.analysis.compare.two_runs import step_change
from rankscope.analysis.model.comparison import PartChange, StepChange
from rankscope.analysis.model.parts import MAYBE_BLOCKED
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, signed
from rankscope.dashboard.figures.aligned_steps import MOST_PIECES, aligned
from rankscope.dashboard.figures.diff_waterfall import change_table, from_a_to_b
from rankscope.dashboard.figures.report_tables import frame_of
from rankscope.dashboard.grids import Shown, plain_table, plainly_away
from rankscope.dashboard.page_kit import (
    Children,
    Page,
    Query,
    address,
    card,
    choice,
    empty,
    facts,
    heading,
    in_language,
    plot,
    query_of,
    quiet,
    sentence,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State

_MEANING = text("One rank against another, mean per analyzed step. ± is a 95 % confidence interval over the steps.")
_TICK_MS = 700
_MEDIAN = "median"
_FIRST = "1"  # in the address: the run whose key is empty


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    return html.Div(
        [
            heading(page.title, _MEANING),
            html.Div(quiet(text("Comparing …")), id="compare"),
            dcc.Interval(id="compare-tick", interval=_TICK_MS),
        ]
    )


def register(app: Dash, state: State) -> None:
    app.callback(
        Output("compare", "children"),
        Output("compare-tick", "disabled"),
        Input("compare-tick", "n_intervals"),
        Known("url", "search"),
    )(lambda _, search: in_language(_when_ready(state, query_of(search))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Rank `rank` of `run` against rank `against` of `other`, which may be the same run."""

    run: Run
    other: Run
    rank: int
    against: int

    @property
    def sides(self) -> tuple[RankSide, RankSide]:
        """The reference side, then the compared one."""
        a, b = (
            RankSide(rank=rank, report=run.report, timeline=run.timeline)
            for rank, run in ((self.against, self.other), (self.rank, self.run))
        )
        return a, b

    @property
    def names(self) -> tuple[str, str]:
        a, b = text("rank {rank}", rank=self.against), text("rank {rank}", rank=self.rank)
        return (a, b) if self.run is self.other else (text("A: {rank}", rank=a), text("B: {rank}", rank=b))


def _when_ready(state: State, query: Query) -> tuple[Any, bool]:
    """Return the comparison, and whether there is nothing more to wait for."""
    run_key = query.get("run", "")
    asked = query.get("other", run_key)
    key = "" if asked == _FIRST else asked
    run = state.ready(run_key)
    if run is None or key not in state.keys:
        return empty(text("Nothing here"), text("No run “{key}” was opened here.", key=key)), True
    if state.progress(key).error:
        return empty(text("Nothing to compare"), state.progress(key).error), True
    other = state.ready(key)
    if other is None:
        return no_update, False
    pair = _pair(run, other, query)
    runs = {one or _FIRST: state.progress(one).name for one in state.keys}
    if pair is None:
        why = text("There is one rank only. To compare it with another run's: rankscope ui RUN_A RUN_B.")
        return [_of_runs(runs, key), empty(text("Nothing to compare"), why)], True
    return [_controls(pair, runs, query), *_page(pair, query)], True


def _pair(run: Run, other: Run, query: Query) -> _Pair | None:
    """By default the rank of the costliest finding that names one, against the median of the others."""
    ranks = run.report.ranks
    rank = _number(query.get("rank"), ranks)
    if rank is None:
        named = (rank for finding in run.report.findings for rank in finding.ranks if rank in ranks)
        rank = next(named, ranks[0] if ranks else None)
    against = _number(query.get("against"), other.report.ranks)
    if against is None:
        against = median_rank(other.report, rank if run is other else None)
    return None if rank is None or against is None else _Pair(run=run, other=other, rank=rank, against=against)


def _number(word: str | None, among: Container[int]) -> int | None:
    return int(word) if word and word.isdigit() and int(word) in among else None


def _controls(pair: _Pair, runs: Mapping[str, str], query: Query) -> Children:
    median = median_rank(pair.other.report, pair.rank if pair.run is pair.other else None)
    is_median = _number(query.get("against"), pair.other.report.ranks) is None
    ranks, others = (
        [{"value": str(rank), "label": text("rank {rank}", rank=rank)} for rank in run.report.ranks]
        for run in (pair.run, pair.other)
    )
    others.insert(0, {"value": _MEDIAN, "label": text("the median: rank {rank}", rank=median)})
    against = _MEDIAN if is_median else str(pair.against)
    return html.Div(
        [
            choice("rank", text("Rank"), ranks, str(pair.rank)),
            choice("against", text("against"), others, against),
            _of_runs(runs, pair.other.key),
        ],
        className="controls",
    )


def _of_runs(runs: Mapping[str, str], key: str) -> Children:
    """Return the choice of the other run, if several are open."""
    names = [{"value": key, "label": name} for key, name in runs.items()]
    return choice("other", text("of run"), names, key or _FIRST) if len(runs) > 1 else None


def _page(pair: _Pair, query: Query) -> list[Children]:
    a, b = pair.sides
    step, parts = part_changes(a, b)
    rows, unit = from_a_to_b(step, parts, pair.names)
    work, code = work_changes(a, b), code_changes(a, b)
    no_parts = pair.run.trace.reader.cannot().get("breakdown", text("no step was split into its parts"))
    runs = [f"{letter}: {run.name}" for letter, run in zip("AB", (pair.other, pair.run), strict=True)]
    return [
        html.Div(
            [html.H1(_headline(step, parts)), facts(*runs) if pair.run is not pair.other else None], className="verdict"
        ),
        card(
            text("From {a} to {b}", a=pair.names[0], b=pair.names[1]),
            *(
                [change_table(rows, unit, pair.names), plainly_away(pair.run.key, frame_of(parts))]
                if parts
                else [quiet(sentence(no_parts))]
            ),
        ),
        _one_step(pair, query),
        card(
            text("Lines of code"),
            plain_table(pair.run.key, code, {**_columns("place", text("line"), pair), "error_ns": Shown("±", "time")}),
            note=_CODE,
        )
        if len(code)
        else None,
        card(text("Work by name"), plain_table(pair.run.key, work, _columns("name", text("name"), pair)), note=_WORK)
        if len(work)
        else None,
    ]


def _headline(step: StepChange, parts: Sequence[PartChange]) -> str:
    if not parts:
        times = f"{duration(step.a_ns)} → {duration(step.b_ns)}"
        return text("Mean step {times}: {change}", times=times, change=step_change(step))
    own = [part for part in parts if part.part not in MAYBE_BLOCKED]
    a_ns, b_ns = sum(part.a_ns for part in own), sum(part.b_ns for part in own)
    times = f"{duration(a_ns)} → {duration(b_ns)}"
    return text("Without communication {times} per step: {change}", times=times, change=signed(b_ns - a_ns))


def _columns(name: str, title: str, pair: _Pair) -> dict[str, Shown]:
    a, b = pair.names
    times = {"a_ns": Shown(a, "time"), "b_ns": Shown(b, "time"), "change_ns": Shown(text("change"), "time")}
    return {name: Shown(title)} | times


def _one_step(pair: _Pair, query: Query) -> Children:
    """Return a step of both, one below the other, and the ways to it in the timeline."""
    a, b = pair.sides
    steps = steps_of_both(a, b)
    if not steps:
        return card(text("A step of both"), quiet(text("There is no step that both have.")))
    step = _number(query.get("step"), steps)
    step = steps[len(steps) // 2] if step is None else step
    drawn = {name: pieces(side, step) for name, side in zip(pair.names, (a, b), strict=True)}
    left_out = sum(max(len(rows) - MOST_PIECES, 0) for rows in drawn.values())
    links = [
        dcc.Link(text("Show: {what}", what=name), href=_moment(run, side, step), className="button")
        for name, run, side in zip(pair.names, (pair.other, pair.run), (a, b), strict=True)
    ]
    return card(
        text("Step {step}, from its start", step=step),
        html.Div([choice("step", text("Step"), [str(one) for one in steps], str(step)), *links], className="controls"),
        plot(aligned(drawn), height=230) if any(map(len, drawn.values())) else quiet(text("No events in this step.")),
        quiet(text("{pieces:,} of the shortest pieces are not drawn.", pieces=left_out)) if left_out else None,
        note=_ALIGNED,
    )


def _moment(run: Run, side: RankSide, step: int) -> str:
    start_ns, end_ns = side.rows("steps").filter(pl.col("step") == step).select("start_ns", "end_ns").row(0)
    return address("timeline", run.key, t0=start_ns, t1=end_ns, rank=side.rank)


_ALIGNED = text("Drag to enlarge, double-click for all of it. Click a name to hide it.")
_CODE = text("Time per step in the innermost line of the job's code, from samples of the main thread.")
_WORK = text("Time per step. Kernels of communication include waiting for other ranks.")


page = Page(title=text("Compare ranks"), order=35, layout=layout, register=register)
