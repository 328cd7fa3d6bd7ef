"""Part of a long run: some of its steps, from the files that hold them and no others.

Which rows are read is settled by time. One rank's steps are counted through the whole run; the stretch is from the
beginning of one to the end of another, with two more on either side, so that no operation in it lacks a rank; and
every node's clock says when that was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Clock, History, Span
from rankscope.analysis.runs.memory_budget import check_share, held_share, readable_share
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.clocks import apply_clocks, fit_clocks
from rankscope.analysis.timeline.steps import find_steps, judge
from rankscope.collectors.schema import COUNTS_STEPS
from rankscope.collectors.step_bounds import last_before_each
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.run_folder import NativeReader

__all__ = ["FEWEST", "Stretch", "final_steps", "stretch_of"]

FEWEST = 20  # steps that are worth a report
_EVER = 1 << 62  # later than all there is
_BESIDE = 2  # steps that are read before the first and after the last
# How far off a node's clock may be, by a few of its pings: beside its error what its drift changed meanwhile, as with
# the temperature. Of an unrelated clock so much.
_SLACK_NS, _SLACK_PPM, _SLACK_UNKNOWN_NS = 100_000_000, 10, 10_000_000_000
_AS_MUCH = 0.9  # as any other rank has in its files: it lost little, and did not end early
_FINAL_NS = 310_000_000_000  # later: clocks are fitted to what was exchanged up to 5 minutes after a stretch
_SPANS = 60  # of which a history has the length of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of a run that is read: steps `first` to `last`, both included, by the numbers of one rank.

    `said` is the note on it. Of the steps before `kept` the agents have removed the details; 0: of none.

    `counted` are that rank's steps in the whole run, on its node's clock: (rank, node, step, start_ns, end_ns, source,
    judged, aside). Where there are none, it is the last part of the run, and no step. `spans` says from when to when
    rows are read, by node, on its own clock, both included.
    """

    first: int
    last: int
    kept: int
    asked: bool  # for these steps; else they are what could be read
    said: str
    counted: pl.DataFrame
    spans: Mapping[int, tuple[int, int]]

    def span_on(self, node: int | None) -> tuple[int, int]:
        """Return the time span that is read of this node; of an unknown one, the union of the others'."""
        if node is not None and node in self.spans:
            return self.spans[node]
        return min(begin for begin, _ in self.spans.values()), max(end for _, end in self.spans.values())

    @property
    def unread(self) -> int:
        """How many steps were not read."""
        return len(self.counted) - (self.last - self.first + 1)

    def share(self, first: int, last: int) -> float:
        """Return the share that these steps, with what is read beside them, have of all that are left."""
        return _share(first, last, len(self.counted) - self.kept)

    @property
    def warmup(self) -> list[int]:
        """The steps of the whole run that are warm-up."""
        return self.counted.filter(aside="warm-up")["step"].to_list()

    @property
    def is_to_the_end(self) -> bool:
        """Whether all is read that came after its first step."""
        return any(until == _EVER for _, until in self.spans.values())

    def history(self) -> History | None:
        """Return the lengths of all steps of the counted rank; None where all were read, or there are none."""
        if not self.unread or self.counted.is_empty():
            return None
        per_span = -(-len(self.counted) // _SPANS)
        firsts = range(0, len(self.counted), per_span)
        return History(
            rank=self.counted["rank"][0],
            count=len(self.counted),
            kept=self.kept,
            median_ns=self.span(0, len(self.counted) - 1).median_ns,
            read=self.span(self.first, self.last),
            spans=tuple(self.span(first, min(first + per_span, len(self.counted)) - 1) for first in firsts),
        )

    def span(self, first: int, last: int) -> Span:
        """Return these steps of the counted rank, `last` included."""
        rows = self.counted[first : last + 1]  # numbered from 0
        lengths = (rows["end_ns"] - rows["start_ns"]).to_numpy()
        return Span(first=first, last=last, median_ns=round(float(np.median(lengths))))

    def beside(self, clocks: Sequence[Clock]) -> pl.DataFrame:
        """(rank, step, start_ns, end_ns) of the counted rank from the step before the first to that after the last.

        Times are on node 0's clock.
        """
        rows = self.counted.filter(pl.col("step").is_between(self.first - 1, self.last + 1))
        return apply_clocks(rows, clocks).select("rank", "step", "start_ns", "end_ns")


def stretch_of(reader: NativeReader, steps: tuple[int, int] | None) -> Stretch | None:
    """Return these steps of the run.

    None: the last ones, as many as a report holds, or no stretch if it holds all.

    Raises `BadInput` where the run does not have these steps, or they do not fit.
    """
    if steps and reader.imported:
        raise BadInput(f"{reader.where} was imported, and such a run is read as a whole: name it without its steps")
    share = 1.0 if steps or reader.imported else readable_share(reader)
    if not steps and share >= 1 and not reader.kept_since:
        return None
    rank, counted = _counted(reader)
    count = len(counted)  # numbered from 0
    if steps is None and not count:
        return _last_part(reader, rank, share, counted)
    if not count:
        raise BadInput(f"{reader.where} has no steps; call rankscope.step() once per step")
    kept = _first_kept(reader, counted)
    if not steps and share >= 1 and not kept:
        return None
    if kept == count and not steps:  # a job that hangs, say
        return _last_part(reader, rank, share, counted.clear())
    held = FEWEST if steps else max(int(held_share(reader, count - kept) * (count - kept)), FEWEST)
    first, last = steps or (max(count - held, kept), count - 1)
    last = min(last, count - 1)
    if first > last:
        raise BadInput(f"{reader.where} has no step {first}: the last is {last}")
    if first < kept:
        raise BadInput(
            f"{reader.where}: of step {first} only the length is left, older ones were evicted (rankscope run --keep); "
            f"the first that is there is {kept}"
        )
    check_share(reader, _share(first, last, count - kept))
    begin, end = counted["start_ns"].to_list(), counted["end_ns"].to_list()
    until = end[last + _BESIDE] if last + _BESIDE < count else None
    spans = _spans(reader, counted["node"][0], begin[max(first - _BESIDE, 0)], until)
    which = {"first": first, "last": last, "count": count}
    said = text("only steps {first}-{last} of {count} were read", **which) if last - first + 1 < count else ""
    if kept:
        said += text(" (of those before step {kept} only the length was kept)", kept=kept)
    asked = steps is not None
    return Stretch(first=first, last=last, kept=kept, asked=asked, said=said, counted=counted, spans=spans)


def final_steps(reader: NativeReader, counted: pl.DataFrame) -> int:
    """Return of how many steps, the first ones, nothing changes any more, although the job goes on.

    Every node has written what came 5 minutes later: no record of theirs is missing, and clocks are fitted as they will
    be.
    """
    clocks, pings = _clocks(reader), reader.sparse_clocks().filter(pl.col("peer") >= 0)
    own, last_ns = _of(clocks, counted["node"][0]), counted["end_ns"][-1]
    asked, answered = pings.select("node", at="t1_ns"), pings.select(node="peer", at="t3_ns")
    seen = dict(pl.concat([asked, answered]).group_by("node").agg(pl.col("at").max()).iter_rows())
    others = (clock for clock in clocks.values() if clock is not own)
    until = (_shown(own, _common(clock, seen[clock.node])) if clock.node in seen else 0 for clock in others)
    final_ns = min([last_ns, *until]) - _FINAL_NS
    return max(int(np.searchsorted(counted["end_ns"].to_numpy(), final_ns)) - _BESIDE, 0)


def _counted(reader: NativeReader) -> tuple[int, pl.DataFrame]:
    """Return a rank, and all its steps as `Stretch` has them; counted once for all parts of a run."""
    if "steps" not in reader.counted:
        node = reader.read("ranks").select("rank", "node")
        rank = _reference(reader)
        reader.counted["steps"] = rank, _count_steps(reader, rank).join(node, on="rank", maintain_order="left")
    found: tuple[int, pl.DataFrame] = reader.counted["steps"]
    return found


def _share(first: int, last: int, count: int) -> float:
    return (last - first + 1 + 2 * _BESIDE) / count


def _first_kept(reader: NativeReader, counted: pl.DataFrame) -> int:
    """Return the first step of which, with what is read beside it, no node has removed anything.

    Their count if none.
    """
    kept_ns = _kept_since(reader, counted["node"][0])
    whole = 0 if kept_ns is None else int(np.searchsorted(counted["start_ns"].to_numpy(), kept_ns))
    return min(whole + _BESIDE, len(counted)) if whole else 0


def _kept_since(reader: NativeReader, node: int | None) -> int | None:
    """Return when the records of all nodes begin, on the clock of `node`, with slack; None: nothing was removed."""
    if not reader.kept_since:
        return None
    clocks = _clocks(reader)
    own = _of(clocks, node)
    since = [(clocks[other], since_ns) for other, since_ns in reader.kept_since.items()]
    return max(_shown(own, _common(clock, since_ns)) + _slack_ns(reader, clock) for clock, since_ns in since)


def _last_part(reader: NativeReader, rank: int, share: float, counted: pl.DataFrame) -> Stretch | None:
    """As large a share of a run without steps as can be read; None where there is nothing to be read."""
    held = pl.concat(reader.extent(name, rank) for name in ("collectives", "regions", "samples")).drop_nulls("last")
    if held.is_empty():
        return None
    node = held["node"][0]
    last_ns = int(held["last"].to_numpy().max())
    first_ns = int(held["first"].to_numpy().min())
    kept_ns = max(first_ns, _kept_since(reader, node) or first_ns)
    kept_ns = min(kept_ns, int(held["first"].to_numpy().max()))  # the newest file of a table stays
    since_ns = round(last_ns - min(share, 1.0) * (last_ns - kept_ns))
    began_ns = first_ns  # of what was removed only the node's JSON says when it began
    if reader.kept_since and isinstance(started_ns := reader.run.get(node or 0, {}).get("start_ns"), int):
        began_ns = min(first_ns, started_ns)
    so = {"read": duration(last_ns - since_ns), "whole": duration(last_ns - began_ns)}
    said = text("only the last {read} of {whole} were read", **so)
    if reader.kept_since:
        said += text(" (older records were evicted)")
    spans = _spans(reader, node, since_ns, None)
    return Stretch(first=0, last=-1, kept=0, asked=False, said=said, counted=counted, spans=spans)


def _reference(reader: NativeReader) -> int:
    """Return the lowest rank that has about as much in its files as any other."""
    size = reader.sizes_of_ranks()
    return min(rank for rank, of_rank in size.items() if of_rank >= _AS_MUCH * max(size.values()))


def _count_steps(reader: NativeReader, rank: int) -> pl.DataFrame:
    """All steps of a rank, judged by their lengths."""
    marks = pl.concat(reader.pieces_of_rank("steps", rank, "start_ns", "end_ns", "thread"))
    regions = pl.concat(
        piece.filter(pl.col("kind").is_in(COUNTS_STEPS))
        for piece in reader.pieces_of_rank("regions", rank, "start_ns", "end_ns", "kind", "name", "thread")
    )
    called = pl.concat(
        _last_before(piece, regions.filter(kind="optimizer")["start_ns"])
        for piece in reader.pieces_of_rank("collectives", rank, "start_ns")
    )
    steps = find_steps(marks, regions.sort("start_ns"), called.sort("start_ns"))
    return judge(steps, regions)


def _last_before(calls: pl.DataFrame, optimizers: pl.Series) -> pl.DataFrame:
    """Return the last call between two runs of optimizers, and the first of all, which shows that there are any."""
    needed = last_before_each(optimizers.sort().to_numpy(), calls["start_ns"].to_numpy())
    return calls.filter(pl.Series(needed, dtype=pl.Boolean))


def _spans(reader: NativeReader, node: int | None, since_ns: int, until_ns: int | None) -> dict[int, tuple[int, int]]:
    """Return the time span that is read of each node, on its clock; the given one is on that of `node`."""
    clocks = _clocks(reader)
    own = _of(clocks, node)

    def on(clock: Clock) -> tuple[int, int]:
        slack_ns = _slack_ns(reader, clock)
        begin_ns = _shown(clock, _common(own, since_ns)) - slack_ns
        return begin_ns, _EVER if until_ns is None else _shown(clock, _common(own, until_ns)) + slack_ns

    return {clock.node: on(clock) for clock in clocks.values()}


def _clocks(reader: NativeReader) -> dict[int, Clock]:
    if "clocks" not in reader.counted:
        nodes = {*reader.run, *reader.read("ranks")["node"].drop_nulls()}
        pings = reader.sparse_clocks()
        at, by_node = pl.col("t1_ns"), pings.group_by("node")
        reader.counted["pinged_ns"] = by_node.agg(ns=at.max() - at.min())["ns"].to_numpy().max(initial=0)
        reader.counted["clocks"] = {clock.node: clock for clock in fit_clocks(pings, nodes)}
    found: dict[int, Clock] = reader.counted["clocks"]
    return found


def _of(clocks: Mapping[int, Clock], node: int | None) -> Clock:
    """Return the clock of a rank's node; None: it is lost whose rank that is."""
    return clocks[min(clocks) if node is None else node]


def _slack_ns(reader: NativeReader, clock: Clock) -> int:
    if clock.error_ns is None:
        return _SLACK_UNKNOWN_NS
    return int(_SLACK_NS + clock.error_ns + _SLACK_PPM * 1e-6 * reader.counted["pinged_ns"])


def _common(clock: Clock, own_ns: int) -> int:
    """Return a node's time on node 0's clock."""
    return own_ns + clock.offset_ns + round((own_ns - clock.at_ns) * clock.drift_ppm * 1e-6)


def _shown(clock: Clock, common_ns: int) -> int:
    """Node 0's time on a node's clock, but for the drift's second order."""
    own_ns = common_ns - clock.offset_ns
    return own_ns - round((own_ns - clock.at_ns) * clock.drift_ppm * 1e-6)
