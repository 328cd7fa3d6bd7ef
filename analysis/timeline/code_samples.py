"""Time of main threads by place in the job's code, from samples of their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import CodeShare, Finding
from rankscope.analysis.model.parts import BLOCKED
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import is_installed, named, place_in_code
from rankscope.analysis.text.units import duration, duration_with_error
from rankscope.analysis.timeline.steps import last_begun

__all__ = ["PLACES", "SAMPLES", "Code", "merged_places", "sampled_in"]

SAMPLES = dict.fromkeys(("rank", "step"), pl.Int32) | {"part": pl.String, "time_ns": pl.Int64, "place": pl.Int64}
PLACES = {"place": pl.Int64, "parent": pl.Int64, "function": pl.String, "file": pl.String, "line": pl.Int32}

_LISTED, _DEEPEST = 20, 4  # calls of the tree, and of how many that call several others one is in another
_LEAST_SHARE, _LEAST_SAMPLES = 0.04, 4  # of what is listed by itself
_PASSED_ON = 0.9  # share of a call that one other in it must have to stand for it
_MOSTLY = 0.75  # of a call, to be attributed to this part of the step
_MOST = 0.7  # of a part, to be named as its place
_FEW = 20  # with fewer samples nothing is reported
_SAME_WAY = 0.7  # share of what a call has beyond the other ranks, that one call below it must have to be named instead
_ONE_WAY = 0.1  # share of it from which a call is one of several ways to the same line
_EXPLAINS = 0.3  # share of a finding's cost from which a place is named beside it
_SURE = 2.5  # standard deviations
_EVERYWHERE = 0.5  # share of the others' time from which a place says nothing about one rank
_Z95 = 1.96

Floats = NDArray[np.float64]


def merged_places(frames: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the trees of all ranks as one.

    Its places (PLACES), each after its parent, and the place of each rank's frame.

    Place 0 is the empty chain of calls. `frames` is the table of the schema.
    """
    key = ["parent", "function", "file", "line"]
    of_frames = [frames.select("rank", frame=pl.lit(0, pl.UInt32), place=pl.lit(0, pl.Int64)).unique("rank")]
    levels = [pl.DataFrame(schema=PLACES)]
    count = 0
    while len(of_frames[-1]):
        above = of_frames[-1].rename({"frame": "_above", "place": "_of_parent"})
        reached = (
            frames.join(above, left_on=["rank", "parent"], right_on=["rank", "_above"])
            .drop("parent")
            .rename({"_of_parent": "parent"})
        )
        places = reached.select(key).unique().sort(key).with_row_index("place", offset=count + 1)
        places = places.with_columns(pl.col("place").cast(pl.Int64))
        count += len(places)
        levels.append(places.select(*PLACES))
        of_frames.append(reached.join(places, on=key).select("rank", "frame", "place"))
    return pl.concat(levels), pl.concat(of_frames)


def sampled_in(samples: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the samples (SAMPLES): `step` and `part` are those of the span around each, null where there is none.

    Spans are disjoint on each rank: step, start_ns, end_ns and, if they have one, part.
    """
    part = pl.col("part") if "part" in spans.columns else pl.lit(None, pl.String).alias("part")
    begun = last_begun(spans, samples["rank"], samples["time_ns"])
    of_spans = spans.select("step", part, _end="end_ns")
    around = pl.concat([of_spans, of_spans.clear(1)])[begun]  # its last row is for those before all spans
    inside = pl.col("time_ns") < pl.col("_end")
    return (
        samples.hstack(around)
        .with_columns(pl.when(inside).then("step").alias("step"), pl.when(inside).then("part").alias("part"))
        .select(*SAMPLES)
        .sort("rank", "time_ns")
    )


@dataclass(frozen=True, slots=True)
class Code:
    """The samples of judged steps (SAMPLES), the tree of places (PLACES), and the mean step in ns.

    Where no step was judged the samples are those of the whole recording, and there is no step. `last` is where each
    rank was seen last, also if that is in no step.
    """

    samples: pl.DataFrame
    places: pl.DataFrame
    step_ns: float | None
    last: Mapping[int, int]

    def shares(self) -> tuple[CodeShare, ...]:
        """Return the main threads' tree of calls, each with those below it, down to 4 % of the time.

        Of calls that do nothing but call one other the last is listed. Empty with fewer than 20 samples.
        """
        total = len(self.samples)
        if total < _FEW:
            return ()
        counts, children, part_of = self._below(self.samples["place"]), self._children(), self._parts()
        least = max(_LEAST_SHARE * total, _LEAST_SAMPLES)
        found: list[CodeShare] = []
        left = [(place, 0) for place in self._large(children, counts, 0, least)]
        while left and len(found) < _LISTED:
            place, depth = left.pop()
            large = self._large(children, counts, place, least)
            while len(large) == 1 and counts[large[0]] >= _PASSED_ON * counts[place]:
                place = large[0]
                large = self._large(children, counts, place, least)
            found.append(self._share(place, depth, part_of[place], float(counts[place]) / total, total))
            left += [(child, depth + 1) for child in large] if depth < _DEEPEST else []
        return tuple(found)

    def of_finding(self, finding: Finding) -> str | None:
        """Return the place where the finding's ranks spend more time, as a sentence; None: unknown from samples."""
        if finding.detector == "hang":
            return self._last(finding.ranks)
        found = self._beyond_others(finding)
        if found is None or self.step_ns is None:
            return None
        places, (here, sigma), there = found
        return text(
            "{place}: {time} of the step on {ranks}, {usual} on the others",
            place=self._called(places[0]),
            time=duration_with_error(here * self.step_ns, _Z95 * sigma * self.step_ns),
            ranks=named("rank", finding.ranks),
            usual=duration(there * self.step_ns),
        )

    def places_of(self, finding: Finding) -> Sequence[int]:
        """Return the places of the line that `of_finding` names; none if that is None, or of a hang."""
        found = None if finding.detector == "hang" else self._beyond_others(finding)
        return found[0] if found else ()

    def _beyond_others(self, finding: Finding) -> tuple[list[int], tuple[float, float], float] | None:
        """Return the places of one line, their share of the finding's ranks and its deviation, and of the others."""
        mine = pl.col("rank").is_in(finding.ranks)
        own = ~pl.col("part").is_in(BLOCKED).fill_null(value=False)
        count, others = self.samples.filter(mine).height, self.samples.filter(~mine).height
        if min(count, others) < _FEW or not finding.lost_fraction or self.step_ns is None:
            return None
        share = self._below(self.samples.filter(mine & own)["place"]) / count
        usual = self._below(self.samples.filter(~mine & own)["place"]) / others
        beyond = share - usual
        children = self._children()
        places = self._one_line(children, beyond, _way_down(children, beyond))
        here, there = float(share[places].sum()), float(usual[places].sum())
        sigma = math.hypot(_sigma(here, count), _sigma(there, others))
        if (
            not places[0]
            or there >= _EVERYWHERE
            or here * count < _LEAST_SAMPLES
            or here - there < max(_SURE * sigma, _EXPLAINS * finding.lost_fraction)
        ):
            return None
        return places, (here, _sigma(here, count)), there

    def of_ranks(self, ranks: Sequence[int]) -> Code:
        """Return the same of these ranks only."""
        return replace(self, samples=self.samples.filter(pl.col("rank").is_in(ranks)))

    def difference(self, rank: int, least: float) -> pl.DataFrame:
        """Return the `tree` of one rank, with the share that the others have of each place in all, `usual`.

        `error` is the 95 % half width of the difference.
        """
        mine = self.of_ranks([rank])
        rest = self.samples.filter(pl.col("rank") != rank)
        counts = self._below(rest["place"])
        usual = pl.DataFrame({"place": range(1, len(counts)), "usual": counts[1:] / max(len(rest), 1)})
        here, there = (
            pl.col(share) * (1 - pl.col(share)) / max(count, 1)
            for share, count in (("share", len(mine.samples)), ("usual", len(rest)))
        )
        tree = mine.tree(least).join(usual, on="place", maintain_order="left")
        return tree.with_columns((_Z95 * (here + there).sqrt()).alias("error"))

    def tree(self, least: float) -> pl.DataFrame:
        """Return the places with this share of the samples or more, each after its parent.

        PLACES, `share` and `part`.
        """
        share = pl.Series("share", self._below(self.samples["place"])[1:] / max(len(self.samples), 1))
        part = pl.Series("part", self._parts()[1:], dtype=pl.String)
        return self.places.with_columns(share, part).filter(pl.col("share") >= least)

    def most_of(self, part: str | None) -> str | None:
        """Return the innermost call in which main threads are for most of this part.

        None: of what is in no known part.
        """
        return replace(self, samples=self.samples.filter(pl.col("part").eq_missing(pl.lit(part)))).most()

    def most(self, least: int = _FEW) -> str | None:
        """Return the innermost call in which main threads are for most of the time, of so many samples at least."""
        places = self.samples["place"]
        if len(places) < least:
            return None
        counts, children = self._below(places), self._children()
        place = 0
        while large := self._large(children, counts, place, _MOST * len(places)):
            place = large[-1]
        return self._called(place) if place else None

    def _last(self, ranks: Sequence[int]) -> str | None:
        """Return the last place of these ranks."""
        places = Counter(place for rank in ranks if (place := self.last.get(rank, 0)))
        if not places:
            return None
        ((place, _),) = places.most_common(1)
        at = [rank for rank in ranks if self.last.get(rank) == place]
        return text("{ranks} last seen at {place}", ranks=named("rank", at), place=self._called(place))

    def _below(self, leaves: pl.Series) -> Floats:
        """Return how many of these samples are in each place or in what it calls; by place."""
        counts = np.bincount(leaves.to_numpy(), minlength=len(self.places) + 1).astype(np.float64)
        parents = self.places["parent"].to_list()
        for place in range(len(parents), 0, -1):  # each after its parent
            counts[parents[place - 1]] += counts[place]
        return counts

    def _parts(self) -> list[str | None]:
        """In which part of the step most of each place is, by place; None: in none."""
        counts = self._below(self.samples["place"])
        found: list[str | None] = [None] * len(counts)
        for (part,), rows in self.samples.drop_nulls("part").group_by("part"):
            for place in np.flatnonzero(self._below(rows["place"]) > _MOSTLY * counts):
                found[place] = part
        return found

    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for place, parent in self.places.select("place", "parent").iter_rows():
            children.setdefault(parent, []).append(place)
        return children

    def _large(self, children: Mapping[int, list[int]], counts: Floats, place: int, least: float) -> list[int]:
        """Return the calls of the place that last so long, the longest last."""
        return sorted((c for c in children.get(place, ()) if counts[c] >= least), key=lambda child: counts[child])

    def _one_line(self, children: Mapping[int, list[int]], beyond: Floats, place: int) -> list[int]:
        """Return the places below this one with the same line of code, largest first, if most beyond them is in it.

        A line is reached in several ways where backward computes a forward again. Else the place alone.
        """
        if beyond[place] <= 0:
            return [place]
        found: dict[tuple[object, ...], list[int]] = {}
        left: list[tuple[int, frozenset[tuple[object, ...]]]] = [(place, frozenset())]
        while left:
            above, lines = left.pop()
            for child in children.get(above, ()):
                if beyond[child] < _ONE_WAY * beyond[place]:
                    continue
                _, _, *line = self.places.row(child - 1)
                if tuple(line) not in lines:  # a recursion counts once
                    found.setdefault(tuple(line), []).append(child)
                left.append((child, lines | {tuple(line)}))
        same = [places for places in found.values() if beyond[places].sum() >= _SAME_WAY * beyond[place]]
        innermost = max(same, key=max, default=[place])  # places come after those that they are in
        return sorted(innermost, key=lambda each: -beyond[each])

    def _share(self, place: int, depth: int, part: str | None, fraction: float, total: int) -> CodeShare:
        _, _, function, file, line = self.places.row(place - 1)
        return CodeShare(
            depth=depth,
            part=part,
            function=function,
            file=file,
            line=line,
            fraction=fraction,
            uncertainty=_Z95 * _sigma(fraction, total),
            ns_per_step=None if self.step_ns is None else round(fraction * self.step_ns),
        )

    def _called(self, place: int) -> str:
        """Return a place, and where it is a library's, the job's own line that led there."""
        _, _, function, file, line = self.places.row(place - 1)
        above = self._own_code_above(place)
        here = place_in_code(function, file, line)
        return text("{here}, from {above}", here=here, above=above) if above else here

    def _own_code_above(self, place: int) -> str:
        """Return the innermost call in code that is not installed, if the place itself is."""
        own = place
        while own:
            _, parent, function, file, line = self.places.row(own - 1)
            if not is_installed(file):
                return "" if own == place else place_in_code(function, file, line)
            own = parent
        return ""


def _way_down(children: Mapping[int, list[int]], beyond: Floats) -> int:
    """Return the innermost call that holds the excess, before it spreads over several."""
    place = 0
    while following := children.get(place):
        largest = max(following, key=lambda child: beyond[child])
        if beyond[largest] < _SAME_WAY * beyond[place]:
            break
        place = largest
    return place


def _sigma(share: float, count: int) -> float:
    """Return the standard deviation of a share of so many samples."""
    return math.sqrt(share * (1 - share) / count)
