"""A run as a trace of Perfetto's own format, which https://ui.perfetto.dev opens.

One group of tracks for each rank, and one for the run and for each node's counters. Times are ns since the run's first
event, on node 0's clock. An arrow leads from where the last rank came to an operation to where others of it stopped
waiting. Chrome's JSON, which Perfetto reads as well, would sort ranks by how many events they have, and put what
overlaps into threads of its own.

Source: perfetto.dev/docs/reference/synthetic-track-event and `protos/perfetto/trace/track_event/*.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.report.labels import detector_name
from rankscope.analysis.report.perfetto_tables import (
    OF_JOB,
    OF_NODE,
    TIMED,
    Pack,
    Table,
    operations_of,
    span_of,
    tables_of,
)
from rankscope.analysis.report.phrases import cost_per_step, gain
from rankscope.analysis.report.protobuf_wire import Block, encoded, fixed64, message, one, varint
from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import reached
from rankscope.analysis.text.units import duration, ranges
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.counters import rates
from rankscope.collectors.counters import GAUGES
from rankscope.errors import NotExportable

__all__ = ["MOST_EVENTS", "chosen", "write"]

MOST_EVENTS = 3_000_000
_MOST_ROWS = 64  # of one track; the rest is counted and reported
_CHUNK = 50_000  # rows that are packed at once
_LISTED = 200  # gaps that are written one by one


Ints = NDArray[np.int64]


def chosen(timeline: Timeline, ranks: Sequence[int] | None, steps: tuple[int, int] | None) -> Timeline:
    """Return the part of these ranks and steps, first and last included.

    None: all. What lasts beyond them is not cut.

    Raises `NotExportable` where a rank or all of the steps are not in the run.
    """
    if ranks is not None:
        timeline = _of_ranks(timeline, ranks)
    return timeline if steps is None else _of_steps(timeline, *steps)


def _of_ranks(timeline: Timeline, ranks: Sequence[int]) -> Timeline:
    there = timeline.ranks["rank"].to_list()
    absent = sorted(set(ranks) - set(there))
    if absent or not ranks:
        raise NotExportable(f"there is no rank {ranges(absent)}: the run has ranks {ranges(there)}")
    mine = pl.col("rank").is_in(list(ranks))
    kept = {name: getattr(timeline, name).filter(mine) for name in ("ranks", *TIMED) if len(getattr(timeline, name))}
    nodes = pl.col("node").is_in(kept["ranks"]["node"].implode())
    return replace(timeline, counters=timeline.counters.filter(nodes), **kept)


def _of_steps(timeline: Timeline, first: int, last: int) -> Timeline:
    mine = pl.col("step").is_between(first, last)
    inside = timeline.steps.filter(mine)
    if inside.is_empty():
        there = timeline.steps["step"].unique()
        here = f"steps {ranges(there)}" if len(there) else "none"
        if timeline.stretch and timeline.stretch.unread:
            raise NotExportable(f"only {here} were read: rankscope export RUN/steps={first}-{last} reads others")
        raise NotExportable(f"there is no step {first}-{last}: the run has {here}")
    window = inside.group_by("rank").agg(_from=pl.col("start_ns").min(), _to=pl.col("end_ns").max())

    def kept(name: str) -> pl.DataFrame:
        frame: pl.DataFrame = getattr(timeline, name)
        if name in ("steps", "phases", "marks"):
            return frame.filter(mine)
        start, end = TIMED[name]
        within = (pl.col(start) < pl.col("_to")) & (pl.coalesce(end, start) >= pl.col("_from"))
        return frame.join(window, on="rank", maintain_order="left").filter(within).drop("_from", "_to")

    start, end = window.select(pl.col("_from").min(), pl.col("_to").max()).row(0)
    counters = timeline.counters.filter(pl.col("time_ns").is_between(start, end))
    frames: dict[str, Any] = {name: kept(name) for name in TIMED if len(getattr(timeline, name))}
    return replace(timeline, counters=counters, **frames)


def write(
    whole: Timeline, part: Timeline, report: Report, gaps: pl.DataFrame, file: BinaryIO, most: int = MOST_EVENTS
) -> int:
    """Write this part of the run to the file, and return how many events it has.

    `gaps` is the table of that name, on the run's clock.

    Raises `NotExportable` where these are more than `most`, or nothing has a time, before anything is written.
    """
    span = span_of(whole)
    if span is None:
        raise NotExportable("nothing in it has a time, so there is nothing to draw")
    operations = operations_of(part.collectives, whole.collectives, span[1])
    tables = list(tables_of(part, operations, report, gaps, span))
    counted = sum(len(table.frame) for table in tables) + len(part.counters) + len(part.memory)
    if len(operations):
        counted += int(operations["_waited"].sum() + operations["_flow"].count())
    if counted > most:
        raise NotExportable(_too_much(counted, most, part))
    out = _Out(file, span[0])
    _write_run(out, report, span_of(part) or span, part)
    _name_ranks(out, report, part)
    for table in tables:
        _write_table(out, table)
    _write_counters(out, part)
    for (rank, title), events in out.hidden.items():
        _add_slice(
            out, span_of(part) or span, "not seen", f"rank {rank}, {title}: {events:,} events lie too deep to be drawn"
        )
    return out.events


def _too_much(events: int, most: int, part: Timeline) -> str:
    ranks, steps = part.ranks["rank"].n_unique(), part.steps["step"].n_unique()
    of_step = f", a step of all ranks about {events // steps:,}" if steps > 1 else ""
    of_rank = f"a rank has about {events // max(ranks, 1):,}" if ranks > 1 else "it is one rank"
    return (
        f"{events:,} events are more than the {most:,} that a browser opens: choose fewer with --ranks 0-7 or "
        f"--steps 100-110 ({of_rank}{of_step})"
    )


# ---- how it is written: messages and fields as `perfetto_trace.proto` numbers them

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.type
_CATEGORIES, _NAMES, _ARG_NAMES, _ARG_TEXTS = 1, 2, 3, 29  # InternedData: texts that events name by a number
_EXPLICIT = 3  # TrackDescriptor.child_ordering: as their ranks say
_JOB, _RANK, _NODE = "job", "rank", "resources of node"  # in the order of the alphabet, in which Perfetto puts them


class _Out:
    """The file as it grows: tracks and texts are declared before the events that name them."""

    def __init__(self, file: BinaryIO, origin_ns: int) -> None:
        self._file = file
        self.origin_ns = origin_ns
        self.events = 0
        self.hidden: dict[tuple[int, str], int] = {}  # events by rank and title of the track that has no room for them
        self._tracks: dict[tuple[int | str, ...], int] = {}
        self._places: dict[tuple[int, str], int] = {}
        self._texts: dict[int, dict[str, int]] = {}
        self._declared = bytearray(_packet(one(13, 1)))

    def process(self, kind: str, number: int, title: str, about: str = "") -> None:
        """Write a group of tracks."""
        fields = one(2, title) + one(11, _EXPLICIT) + (one(14, about) if about else b"")
        self._declare((kind, number), fields)

    def track(self, process: tuple[str, int], title: str, row: int = 0, more: bytes = b"") -> int:
        """Return the number of a track.

        Rows of one title are drawn as one, in the order of these calls.
        """
        if process not in self._tracks:  # a node of which no rank is shown
            self.process(*process, " ".join(map(str, process)))
        parent = self._tracks[process]
        place = self._places.setdefault((parent, title), len(self._places))
        return self._declare((parent, title, row), one(2, title) + one(5, parent) + one(12, place) + more)

    def _declare(self, key: tuple[int | str, ...], fields: bytes) -> int:
        if key not in self._tracks:
            self._tracks[key] = len(self._tracks) + 1
            self._declared += _packet(one(60, one(1, self._tracks[key]) + fields))
        return self._tracks[key]

    def texts(self, kind: int, values: pl.Series) -> Ints:
        """Return the number of each text, 0 for null."""
        known = self._texts.setdefault(kind, {})
        different = values.unique(maintain_order=True).drop_nulls()
        new = [text for text in different.to_list() if text not in known]
        known |= {text: len(known) + place for place, text in enumerate(new, 1)}
        interned = b"".join(one(kind, one(1, known[text]) + one(2, text)) for text in new)
        if interned:
            self._declared += _packet(one(13, 2) + one(12, interned))
        if not len(different):
            return np.zeros(len(values), np.int64)
        numbers = pl.Series([known[text] for text in different.to_list()], dtype=pl.Int64)
        numbered: Ints = values.replace_strict(different, numbers, default=0, return_dtype=pl.Int64).to_numpy()
        return numbered

    def text(self, kind: int, text: str, rows: int) -> Ints:
        """Return the number of one text, for each of so many rows."""
        return np.broadcast_to(self.texts(kind, pl.Series([text])), rows)

    def write(self, events: int, *packets: Block) -> None:
        self._file.write(self._declared)
        self._file.write(encoded(*packets))
        self._declared.clear()
        self.events += events
        reached(text("events"), self.events)


def _packet(fields: bytes) -> bytes:
    """Return a packet without a time, of the one sequence that there is."""
    return one(1, one(10, 1) + fields)


def _events(type_: int, times: Ints, track: Ints, fields: Sequence[Block] = ()) -> Block:
    """One packet for each event."""
    same = np.ones(len(times), np.int64)
    event = message(11, [varint(9, same * type_), varint(11, track), *fields])
    return message(1, [varint(8, times), varint(10, same), varint(13, same * 2), event])


def _write_table(out: _Out, table: Table) -> None:
    """Write the rows as slices, some whole ranks at a time. Of operations the wait is one in theirs."""
    for rows in _whole_ranks(table.frame):
        put = rows.with_columns(table.track.alias("_track"), table.name.cast(pl.String).fill_null("?").alias("_name"))
        put = put.with_columns(pl.max_horizontal("start_ns", "end_ns").alias("end_ns"))
        in_order = ("rank", "_track", "start_ns", -pl.col("end_ns"))
        put = put.sort(in_order, maintain_order=True)
        put = put.with_columns(pl.Series("_number", _numbers(out, put, table.pack), pl.Int64)).filter(
            pl.col("_number") > 0
        )
        if "_waited" in put.columns:
            waits = put.filter("_waited").select(
                *("rank", "_track", "_number", "start_ns"),
                pl.min_horizontal(pl.col("start_ns") + pl.col("wait_ns"), "end_ns").alias("end_ns"),
                pl.lit("wait").alias("_name"),
            )
            put = pl.concat([put, waits], how="diagonal").sort(in_order, maintain_order=True)
        for piece in put.iter_slices(_CHUNK):
            _write_slices(out, piece, table)
            if "_flow" in piece.columns:
                _write_arrivals(out, piece.drop_nulls("_flow"))


def _whole_ranks(frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the rows of some ranks, in order of rank, at least so many at a time."""
    if frame.is_empty():
        return
    first = np.flatnonzero(np.diff(frame["rank"].to_numpy())) + 1
    begun = 0
    for end in [*first.tolist(), len(frame)]:
        if end - begun >= _CHUNK or end == len(frame):
            yield frame[begun:end]
            begun = end


def _numbers(out: _Out, rows: pl.DataFrame, pack: Pack) -> Ints:
    """Return the track of each row; 0 where it lies too deep."""
    changes = rows.select(pl.struct("rank", "_track").rle_id()).to_series().to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(changes)) + 1).tolist(), len(rows)]
    ranks, titles = rows["rank"], rows["_track"]
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    number = np.zeros(len(rows), np.int64)
    for a, z in pairwise(bounds):
        rank, title = int(ranks[a]), str(titles[a])
        row = pack(start[a:z], end[a:z], _MOST_ROWS)
        rows_used = min(int(row.max()) + 1, _MOST_ROWS)
        tracks = [out.track(_group_of(rank), title, place) for place in range(rows_used)]
        number[a:z] = np.array([*tracks, 0], np.int64)[row]
        if not number[a:z].all():
            out.hidden[rank, title] = int((number[a:z] == 0).sum())
    return number


def _write_slices(out: _Out, rows: pl.DataFrame, table: Table) -> None:
    start, end = (rows[column].to_numpy() - out.origin_ns for column in ("start_ns", "end_ns"))
    track = rows["_number"].to_numpy()
    fields = [
        varint(3, out.text(_CATEGORIES, table.category, len(rows))),
        varint(10, out.texts(_NAMES, rows["_name"])),
        *(_arg(out, rows[name]) for name in table.args if name in rows.columns and rows[name].count()),
    ]
    if "_flows" in rows.columns:
        flows, first = (rows[column].fill_null(0).to_numpy() for column in ("_flows", "_first_flow"))
        fields += [fixed64(47, first + number, flows > number) for number in range(int(flows.max(initial=0)))]
    out.write(len(rows), _events(_BEGIN, start, track, fields), _events(_END, end, track))


def _arg(out: _Out, values: pl.Series) -> Block:
    """Return each event's argument of the column's name; none where it is null."""
    name = varint(1, out.text(_ARG_NAMES, values.name, len(values)))
    if values.dtype == pl.Boolean:
        value = varint(2, values.cast(pl.Int64).fill_null(0).to_numpy())
    elif values.dtype.is_integer():
        value = varint(4, values.cast(pl.Int64).fill_null(0).to_numpy())
    else:
        value = varint(17, out.texts(_ARG_TEXTS, values.cast(pl.String)))
    return message(4, [name, value], values.is_not_null().to_numpy())


def _write_arrivals(out: _Out, rows: pl.DataFrame) -> None:
    """Return the time at which a rank stopped waiting for the last one: there an arrow ends."""
    if len(rows):
        names = rows.select(pl.format("rank {} has come", "last_rank")).to_series()
        fields = [
            varint(3, out.text(_CATEGORIES, "arrivals", len(rows))),
            varint(10, out.texts(_NAMES, names)),
            fixed64(48, rows["_flow"].to_numpy()),
        ]
        times = rows["_over_ns"].to_numpy() - out.origin_ns
        out.write(len(rows), _events(_INSTANT, times, rows["_number"].to_numpy(), fields))


def _write_counters(out: _Out, part: Timeline) -> None:
    """Write what changed of the nodes' counters, cumulative ones as rates, and of the ranks' memory."""
    if len(part.counters):
        varied = pl.col("value").n_unique().over("node", "source", "device", "name") > 1
        device = pl.when(pl.col("device") != "").then("device")
        unit = pl.when(pl.col("name").is_in(tuple(GAUGES))).then(pl.lit("")).otherwise(pl.lit(" per s"))
        title = pl.concat_str("source", device, pl.concat_str("name", unit), separator=" ", ignore_nulls=True)
        _write_readings(out, _NODE, rates(part.counters.filter(varied)).rename({"node": "_owner"}), title)
    if len(part.memory):
        _write_readings(out, _RANK, part.memory.rename({"rank": "_owner"}), pl.format("memory {}", "name"))


def _write_readings(out: _Out, kind: str, readings: pl.DataFrame, title: pl.Expr) -> None:
    finite = pl.col("value").cast(pl.Float64).is_finite() & (pl.col("time_ns") >= out.origin_ns)
    rows = readings.filter(finite).select("_owner", "time_ns", pl.col("value").cast(pl.Float64), title.alias("_title"))
    for (owner, name), of_one in rows.group_by("_owner", "_title", maintain_order=True):
        track = out.track((kind, int(owner)), str(name), more=one(8, b""))
        times = of_one["time_ns"].to_numpy() - out.origin_ns
        value = fixed64(44, of_one["value"].to_numpy())
        out.write(len(of_one), _events(_COUNTER, times, np.full(len(of_one), track), [value]))


def _write_run(out: _Out, report: Report, span: tuple[int, int], part: Timeline) -> None:
    """Write the verdict, findings and what was not seen: slices as long as what is shown, below each other."""
    out.process(_JOB, 0, _JOB)
    _add_slice(out, span, "verdict", report.verdict, **_about(report, part))
    for finding in report.findings:
        _add_slice(out, span, "findings", finding.title, **_finding(report, finding))
    missing = sorted(set(range(report.world_size or 0)) - set(report.ranks))
    if missing:
        _add_slice(out, span, "not seen", f"ranks {ranges(missing)} were not recorded")
    for gap in report.gaps[:_LISTED]:
        place = f"rank {gap.rank}, " if gap.rank is not None else "" if gap.node is None else f"node {gap.node}, "
        _add_slice(out, span, "not seen", f"{place}{gap.table}: {gap.why}", count=gap.count)
    if len(report.gaps) > _LISTED:
        _add_slice(out, span, "not seen", f"and {len(report.gaps) - _LISTED} more gaps, which the report lists")
    for unchecked in report.not_checked:
        _add_slice(out, span, "not checked", f"{detector_name(unchecked.detector)}: {unchecked.why}")


def _add_slice(out: _Out, span: tuple[int, int], title: str, name: str, **args: object) -> None:
    """Write a slice of the run, below those of the same title."""
    first, last = span
    columns = {key: [value] for key, value in args.items() if value not in (None, "")}
    row = pl.DataFrame({"start_ns": [first], "end_ns": [last], "_name": [name], **columns})
    row = row.with_columns(pl.lit(out.track((_JOB, 0), title), pl.Int64).alias("_number"))
    _write_slices(out, row, Table(category="job", frame=row, track=pl.lit(title), name=pl.lit(name), args=[*columns]))


def _finding(report: Report, finding: Finding) -> dict[str, object]:
    return {
        "cost": cost_per_step(finding),
        "gain": gain(report, finding),
        "where": finding.where,
        "advice": finding.advice,
        "severity": finding.severity,
        "ranks": ranges(finding.ranks),
        "nodes": ranges(finding.nodes),
        "steps": ranges(finding.steps),
        "detector": finding.detector,
        "caused_by": finding.caused_by,
        "lost_ns_per_step": finding.lost_ns_per_step,
    }


def _about(report: Report, part: Timeline) -> dict[str, str]:
    """Return the file's metadata: its source, its content, and the error of its clocks."""
    steps, judged = part.steps["step"].unique(), part.steps.filter("judged")["step"].unique()
    return {
        "run": report.path,
        "source": report.source,
        "ranks": f"{ranges(part.ranks['rank'])} of {report.world_size or len(report.ranks)}",
        "steps": ranges(steps) or "none",
        "judged_steps": ranges(judged) or "none",
        "mean_step": "" if report.steps.mean_ns is None else duration(report.steps.mean_ns),
        **{f"clock of node {node}": error for node, error in _clock_errors(report).items()},
    }


def _clock_errors(report: Report) -> dict[int, str]:
    """Return how far each node's clock can be off the run's, which is node 0's."""
    return {
        clock.node: "the run's"
        if clock.source == "reference"
        else f"error unknown, by {clock.source}"
        if clock.error_ns is None
        else f"within {duration(clock.error_ns)}, by {clock.source}"
        for clock in report.clocks
    }


def _name_ranks(out: _Out, report: Report, part: Timeline) -> None:
    """Numbers are written so that the order of the alphabet is theirs."""
    errors = _clock_errors(report)
    width, widest = (len(str(max(numbers, default=0))) for numbers in (report.ranks, report.nodes))
    for rank, node, host, device in part.ranks.select("rank", "node", "hostname", "device").iter_rows():
        about = [host, device, f"clock: {errors[node]}" if node in errors else ""]
        title = f"{_RANK} {rank:0{width}}" + ("" if node is None else f" (node {node})")
        out.process(_RANK, rank, title, ", ".join(text for text in about if text))
    for node in part.ranks["node"].drop_nulls().unique().sort().to_list():
        out.process(_NODE, node, f"{_NODE} {node:0{widest}}", f"clock: {errors[node]}" if node in errors else "")


def _group_of(number: int) -> tuple[str, int]:
    """Return the group of the rows' owner: a rank; below 0 the job, or a node."""
    return (_RANK, number) if number >= 0 else (_JOB, 0) if number == OF_JOB else (_NODE, OF_NODE - number)
