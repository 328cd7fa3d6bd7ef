"""Two runs of a job side by side: by how much the step changed, in which parts, on which ranks, and what was found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import polars as pl

from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.metrics.step_matrix import estimate, step_grid
from rankscope.analysis.model import digest
from rankscope.analysis.model.comparison import (
    Comparison,
    FindingChange,
    KernelChange,
    OperationChange,
    PartChange,
    RankChange,
    RunSide,
    StepChange,
)
from rankscope.analysis.model.finding import Finding, Part, Report
from rankscope.analysis.model.parts import MAYBE_BLOCKED, PART_ORDER
from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.phrases import NO_ROLES, counted
from rankscope.analysis.text.units import duration, duration_with_error, percent, rounded, scale_for
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.steps import in_steps
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotComparable

__all__ = [
    "compare",
    "error_of_change",
    "in_order",
    "judged_breakdown",
    "mean_parts",
    "part_errors",
    "step_change",
    "step_error",
    "work_per_step",
]

_OUTLYING = 5.0  # robust standard deviations from the usual change of a rank
_WORTH = 0.01  # share of the step from which a change of a rank or of a finding's cost is one
_LISTED_RANKS = 8
_SCALE = 1.4826  # of a median absolute deviation
_MATCHED = 0.99  # share of the operations below which the report says that some are left out
_COMPARED = ("command", "hostname", "rankscope", "torch", "python")


def compare(a: Report, of_a: Timeline, b: Report, of_b: Timeline) -> Comparison:
    """B against A, by their reports and timelines.

    A change's uncertainty is the root of the sum of the squares of both runs' own. Raises `NotComparable`.
    """
    for name, report in (("A", a), ("B", b)):
        if not report.steps.count:
            raise NotComparable(
                text(
                    "run {name}, {path}, has no analyzed step, so there is nothing to compare",
                    name=name,
                    path=report.path,
                )
            )
    step, parts, no_parts = _parts(a, of_a, b, of_b)
    same_ranks = a.ranks == b.ranks
    notes = [*_what_differs(a, b), *no_parts, *_unmatched(a, b)]
    if not same_ranks and len(a.ranks) > 1 and len(b.ranks) > 1:
        notes.append(text("ranks are not compared one by one, since the runs do not have the same ones"))
    return Comparison(
        a=_side(a),
        b=_side(b),
        step=step,
        parts=parts,
        ranks=_ranks(a, b, step) if same_ranks and parts else (),
        findings=tuple(_findings(a, b, same_ranks=same_ranks)),
        operations=_operations(of_a, of_b) if all(r.matched_fraction != 0 for r in (a, b)) else (),
        kernels=_kernels(of_a, of_b),
        notes=tuple(notes),
    )


def _side(report: Report) -> RunSide:
    return RunSide(
        path=report.path,
        verdict=report.verdict,
        ranks=len(report.ranks),
        nodes=len(report.nodes),
        steps=report.steps.count,
        outliers_fraction=report.steps.outliers_fraction,
    )


def _what_differs(a: Report, b: Report) -> Iterator[str]:
    if len(a.ranks) != len(b.ranks):
        yield text("A has {ranks}, B {number}", ranks=counted(len(a.ranks), "rank"), number=len(b.ranks))
    if a.source != b.source:
        yield text("A was recorded by {a}, B by {b}", a=a.source, b=b.source)
    if a.steps.source != b.steps.source:
        yield text("a step of A ends with {a}, one of B with {b}", a=a.steps.source, b=b.steps.source)
    for name in _COMPARED:
        one, other = a.environment.get(name, ""), b.environment.get(name, "")
        if one != other and one and other:
            yield text("{name}: {one} in A, {other} in B", name=name, one=one, other=other)


def _unmatched(a: Report, b: Report) -> Iterator[str]:
    """Yield notes on communication that is left out, since its peers were not seen."""
    for name, report in (("A", a), ("B", b)):
        matched = report.matched_fraction
        if matched == 0:
            yield text("communication is not compared: none of {name}'s was matched on all its ranks", name=name)
        elif matched is not None and matched < _MATCHED:
            yield text(
                "{share} of {name}'s communication was not matched on all its ranks and is left out",
                share=percent(1 - matched),
                name=name,
            )


def _parts(
    a: Report, of_a: Timeline, b: Report, of_b: Timeline
) -> tuple[StepChange, tuple[PartChange, ...], list[str]]:
    """Return the step, its parts where both runs have them of the same clock, and why not where they do not."""
    step = StepChange(
        a_ns=a.steps.mean_ns or 0,
        b_ns=b.steps.mean_ns or 0,
        uncertainty_ns=error_of_change(step_error(a), step_error(b)),
    )
    means = {"A": mean_parts(a.breakdown), "B": mean_parts(b.breakdown)}
    uncut = [name for name, of in means.items() if not of]
    why = text("the steps of run {name} could not be cut into parts", name=uncut[0]) if uncut else None
    if of_a.kernels.is_empty() != of_b.kernels.is_empty():
        of_device, of_host = ("B", "A") if of_a.kernels.is_empty() else ("A", "B")
        why = text(
            "parts are those of the devices in {of_device} and of the host's main thread in {of_host}: not compared",
            of_device=of_device,
            of_host=of_host,
        )
    if why:
        return step, (), [why]
    scatter = tuple(part_errors(judged_breakdown(timeline)) for timeline in (of_a, of_b))
    parts = tuple(
        PartChange(
            part=part,
            a_ns=means["A"].get(part, 0),
            b_ns=means["B"].get(part, 0),
            uncertainty_ns=error_of_change(*(of.get(part, 0.0) if of else None for of in scatter)),
        )
        for part in in_order(*means.values())
    )
    exact = StepChange(
        a_ns=sum(p.a_ns for p in parts), b_ns=sum(p.b_ns for p in parts), uncertainty_ns=step.uncertainty_ns
    )
    return exact, parts, []


def mean_parts(parts: Iterable[Part]) -> dict[str, int]:
    """Return ns of the mean judged step by part, over ranks, in the order in which parts are shown; empty: not cut up.

    They sum to the mean step.
    """
    split = digest.breakdown(parts)
    return dict(zip(split.parts, rounded(split.sums, len(split.rows)), strict=True)) if split.rows else {}


def in_order(*means: Mapping[str, int]) -> list[str]:
    """All parts that one of them has, in the order in which parts are shown."""
    used = {part for of in means for part in of}
    return [*(part for part in PART_ORDER if part in used), *sorted(used - set(PART_ORDER))]


def step_error(report: Report) -> float | None:
    """95 % half width of the mean step, ns; None where there is only one."""
    shortest = min(map(len, report.step_ns.values()))
    lengths = np.array([of_rank[:shortest] for of_rank in report.step_ns.values()], np.float64)
    return estimate(lengths.mean(axis=0)).half_width_ns if shortest > 1 else None


def judged_breakdown(timeline: Timeline) -> pl.DataFrame:
    """Return the breakdown of judged steps."""
    return in_judged_steps(timeline.breakdown, timeline.steps)


def part_errors(breakdown: pl.DataFrame) -> dict[str, float]:
    """By part the 95 % half width of its mean, of the breakdown of these ranks and steps; empty with too few steps."""
    grid = step_grid(breakdown)
    if len(grid.steps) < 2:
        return {}
    return {part: estimate(values.mean(axis=0)).half_width_ns for part, values in grid.parts.items()}


def error_of_change(a: float | None, b: float | None) -> int | None:
    """95 % half width of a difference, from those of both sides."""
    return None if a is None or b is None else round((a * a + b * b) ** 0.5)


def _ranks(a: Report, b: Report, step: StepChange) -> tuple[RankChange, ...]:
    """Return the ranks whose busy time changed unlike that of most, the furthest first."""
    by_rank = [_by_rank(report) for report in (a, b)]
    parts = sorted({part for of in by_rank for row in of.values() for part in row})
    changes = np.array([[by_rank[1][r].get(p, 0) - by_rank[0][r].get(p, 0) for p in parts] for r in a.ranks])
    busy = np.array([part not in MAYBE_BLOCKED for part in parts])
    change = changes[:, busy].sum(axis=1)
    usual = float(np.median(change))
    beyond = np.abs(change - usual)
    least = max(_OUTLYING * _SCALE * float(np.median(beyond)), _WORTH * step.a_ns)
    unusual = np.abs(changes - np.median(changes, axis=0)) * busy
    rows = [i for i in np.argsort(-beyond, kind="stable") if beyond[i] > least][:_LISTED_RANKS]
    return tuple(
        RankChange(
            rank=a.ranks[i],
            a_ns=sum(ns for part, ns in by_rank[0][a.ranks[i]].items() if part not in MAYBE_BLOCKED),
            b_ns=sum(ns for part, ns in by_rank[1][a.ranks[i]].items() if part not in MAYBE_BLOCKED),
            usual_ns=round(usual),
            part=parts[int(unusual[i].argmax())],
        )
        for i in rows
    )


def _by_rank(report: Report) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {rank: {} for rank in report.ranks}
    for part in report.breakdown:
        found[part.rank][part.part] = found[part.rank].get(part.part, 0) + part.ns_per_step
    return found


def _findings(a: Report, b: Report, *, same_ranks: bool) -> Iterator[FindingChange]:
    """B's findings beside those of A that are about the same, in B's order; then what is gone."""
    left = list(a.findings)
    for finding in b.findings:
        before = next((f for f in left if _about_the_same(f, finding, same_ranks=same_ranks)), None)
        if before is not None:
            left.remove(before)
            error = (before.uncertainty_ns**2 + finding.uncertainty_ns**2) ** 0.5
            change = abs(finding.lost_ns_per_step - before.lost_ns_per_step)
            changed = change > max(error, _WORTH * (a.steps.mean_ns or 0))
            yield FindingChange(status="changed" if changed else "stays", a=before, b=finding)
        else:
            yield _one_sided(finding, a, "A")
    for finding in left:
        yield _one_sided(finding, b, "B")


def _about_the_same(a: Finding, b: Finding, *, same_ranks: bool) -> bool:
    if a.detector != b.detector:
        return False
    pairs = ((a.ranks, b.ranks), (a.nodes, b.nodes), (a.groups, b.groups))
    common = [set(one) & set(other) for one, other in pairs if one and other]
    return not same_ranks or not common or any(common)


def _one_sided(finding: Finding, other: Report, name: str) -> FindingChange:
    """Return a finding that the other run, called `name`, does not have; or could not have."""
    why = next((check.why for check in other.not_checked if check.detector == finding.detector), "")
    status = f"not checked in {name}" if why else "new" if name == "A" else "gone"
    return FindingChange(status=status, a=finding if name == "B" else None, b=finding if name == "A" else None, why=why)


def _operations(a: Timeline, b: Timeline) -> tuple[OperationChange, ...]:
    keys = ["group", "op"]
    both = _by_kind(a).join(_by_kind(b), on=keys, how="full", coalesce=True, suffix="_b")
    both = both.with_columns(pl.col("per_step", "time_ns", "per_step_b", "time_ns_b").fill_null(0.0))
    both = both.sort((pl.col("time_ns_b") - pl.col("time_ns")).abs(), *keys, descending=[True, False, False])
    return tuple(
        OperationChange(
            group=row["group"],
            op=row["op"],
            a_per_step=row["per_step"],
            b_per_step=row["per_step_b"],
            a_bytes=row["size_bytes"],
            b_bytes=row["size_bytes_b"],
            a_transfer_ns=row["transfer_ns"],
            b_transfer_ns=row["transfer_ns_b"],
            a_time_ns=row["time_ns"],
            b_time_ns=row["time_ns_b"],
        )
        for row in both.iter_rows(named=True)
    )


def _by_kind(timeline: Timeline) -> pl.DataFrame:
    """Whole operations of judged steps by what their group is for and what they do.

    Groups with a role are taken together, the others by their name; so are a send and its receive.
    """
    judged = timeline.steps.filter("judged")
    roles = timeline.groups.select(pl.col("name").alias("group"), "role").unique("group")
    roles = roles.filter(~pl.col("role").is_in(NO_ROLES))
    rows = timeline.collectives.filter(pl.col("instance_id").is_not_null())
    rows = rows.join(judged.select("rank", "step"), on=["rank", "step"], how="semi").join(roles, on="group", how="left")
    op = pl.when(pl.col("op").is_in(P2P_OPS)).then(pl.lit("send/recv")).otherwise(pl.col("op").cast(pl.String))
    whole = rows.group_by("instance_id").agg(
        pl.coalesce("role", "group").first().alias("group"),
        op.first().alias("op"),
        pl.col("size_bytes").max(),
        pl.col("transfer_ns").max(),
        (pl.col("transfer_ns") + pl.col("wait_ns").fill_null(0)).sum().alias("time_ns"),
    )
    steps, ranks = max(judged["step"].n_unique(), 1), max(judged["rank"].n_unique(), 1)
    return whole.group_by("group", "op").agg(
        (pl.len() / steps).alias("per_step"),
        pl.col("size_bytes").mean(),
        pl.col("transfer_ns").mean(),
        (pl.col("time_ns").sum() / (steps * ranks)).alias("time_ns"),
    )


def _kernels(a: Timeline, b: Timeline) -> tuple[KernelChange, ...]:
    if a.kernels.is_empty() or b.kernels.is_empty():
        return ()
    keys = ["name", "work"]
    sides = [work_per_step(one.kernels, one.steps.filter("judged")) for one in (a, b)]
    both = sides[0].join(sides[1], on=keys, how="full", coalesce=True, suffix="_b").fill_null(0.0)
    both = both.sort((pl.col("ns_b") - pl.col("ns")).abs(), *keys, descending=[True, False, False])
    names = {"ns": "a_ns", "ns_b": "b_ns", "per_step": "a_per_step", "per_step_b": "b_per_step"}
    return tuple(KernelChange(**row) for row in both.rename(names).iter_rows(named=True))


def work_per_step(kernels: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """name, work, ns and per_step: of a rank in one of these steps, on average."""
    inside = in_steps(kernels.select("rank", "start_ns", "end_ns", "name", "work"), steps)
    count = max(len(steps), 1)
    return (
        inside.drop_nulls("step")
        .group_by("name", "work")
        .agg(((pl.col("end_ns") - pl.col("start_ns")).sum() / count).alias("ns"), (pl.len() / count).alias("per_step"))
    )


def step_change(step: StepChange) -> Text:
    """Return `30.1 ± 2.0 ms longer (25 %)`; or that it may be chance, or that there is no interval."""
    way = text("longer") if step.change_ns > 0 else text("shorter")
    quantum_ns = scale_for(max(step.a_ns, step.b_ns)).quantum_ns  # of the tables, where steps are what is shown of them
    a, b = (rounded([length_ns], quantum_ns)[0] * quantum_ns for length_ns in (step.a_ns, step.b_ns))
    change_ns = abs(b - a) or abs(step.change_ns)
    share = percent(abs(step.change_ns) / step.a_ns) if step.a_ns else "?"
    if step.uncertainty_ns is None:
        change = duration(change_ns)
        return text(
            "{change} {way} ({share}); a single step of a run gives no confidence interval",
            change=change,
            way=way,
            share=share,
        )
    change = duration_with_error(change_ns, step.uncertainty_ns)
    if step.clear:
        return text("{change} {way} ({share})", change=change, way=way, share=share)
    return text("{change} {way} ({share}), which is not clear of chance", change=change, way=way, share=share)
