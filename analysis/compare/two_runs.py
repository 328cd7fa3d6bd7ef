"""Two runs of a job side by side: by how much the step changed, in which parts, on which ranks, and what was found."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from rankscope.analysis.compare.compared_run import ComparedRun
from rankscope.analysis.metrics.step_matrix import error_of_change
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
from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.model.parts import MAYBE_BLOCKED, in_order
from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.phrases import NO_ROLES, counted
from rankscope.analysis.text.units import duration, duration_with_error, percent, rounded, scale_for
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.steps import in_steps
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotComparable

__all__ = ["compare", "step_change", "work_per_step"]

_OUTLYING = 5.0  # robust standard deviations from the usual change of a rank
_WORTH = 0.01  # share of the step from which a change of a rank or of a finding's cost is one
_LISTED_RANKS = 8
_SCALE = 1.4826  # of a median absolute deviation
_MATCHED = 0.99  # share of the operations below which the report says that some are left out
_COMPARED = ("command", "hostname", "rankscope", "torch", "python")


def compare(one: ComparedRun, other: ComparedRun) -> Comparison:
    """Return the other run (B) against the one (A).

    A change's uncertainty is the root of the sum of the squares of both runs' own. Raises `NotComparable`.
    """
    a, b = one.report, other.report
    for name, run in (("A", one), ("B", other)):
        if not run.steps.count:
            raise NotComparable(
                text(
                    "run {name}, {path}, has no analyzed step, so there is nothing to compare",
                    name=name,
                    path=run.report.path,
                )
            )
    step, parts, no_parts = _parts(one, other)
    same_ranks = a.ranks == b.ranks
    notes = [*_of_long(one, other), *_what_differs(a, b), *no_parts, *_unmatched(a, b)]
    if not same_ranks and len(a.ranks) > 1 and len(b.ranks) > 1:
        notes.append(text("ranks are not compared one by one, since the runs do not have the same ones"))
    return Comparison(
        a=_side(one),
        b=_side(other),
        step=step,
        parts=parts,
        ranks=_ranks(one, other, step) if same_ranks and parts else (),
        findings=tuple(_findings(one, other, same_ranks=same_ranks)),
        operations=_operations(one.timeline, other.timeline) if all(r.matched_fraction != 0 for r in (a, b)) else (),
        kernels=_kernels(one.timeline, other.timeline),
        notes=tuple(notes),
    )


def _side(run: ComparedRun) -> RunSide:
    report = run.report
    return RunSide(
        path=report.path,
        verdict=report.verdict,
        ranks=len(report.ranks),
        nodes=len(report.nodes),
        steps=run.steps.count,
        outliers_fraction=report.steps.outliers_fraction,
    )


def _of_long(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    for name, run in (("A", a), ("B", b)):
        if run.said:
            yield text("{name}: {said}", name=name, said=run.said)


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


def _parts(a: ComparedRun, b: ComparedRun) -> tuple[StepChange, tuple[PartChange, ...], list[str]]:
    """Return the step, its parts where both runs have them of the same clock, and why not where they do not."""
    step = StepChange(
        a_ns=a.steps.mean_ns,
        b_ns=b.steps.mean_ns,
        uncertainty_ns=error_of_change(a.steps.error_ns, b.steps.error_ns),
    )
    means = {"A": a.steps.parts, "B": b.steps.parts}
    uncut = [name for name, of in means.items() if not of]
    why = text("the steps of run {name} could not be cut into parts", name=uncut[0]) if uncut else None
    if a.timeline.kernels.is_empty() != b.timeline.kernels.is_empty():
        of_device, of_host = ("B", "A") if a.timeline.kernels.is_empty() else ("A", "B")
        why = text(
            "parts are those of the devices in {of_device} and of the host's main thread in {of_host}: not compared",
            of_device=of_device,
            of_host=of_host,
        )
    if why:
        return step, (), [why]
    scatter = tuple(run.steps.part_errors for run in (a, b))
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


def _ranks(a: ComparedRun, b: ComparedRun, step: StepChange) -> tuple[RankChange, ...]:
    """Return the ranks whose busy time changed unlike that of most, the furthest first."""
    ranks = a.report.ranks
    in_a, in_b = ([run.steps.by_rank.get(rank, {}) for rank in ranks] for run in (a, b))
    parts = sorted({part for of in (*in_a, *in_b) for part in of})
    changes = np.array([[to.get(p, 0) - of.get(p, 0) for p in parts] for of, to in zip(in_a, in_b, strict=True)])
    busy = np.array([part not in MAYBE_BLOCKED for part in parts])
    change = changes[:, busy].sum(axis=1)
    usual = float(np.median(change))
    beyond = np.abs(change - usual)
    least = max(_OUTLYING * _SCALE * float(np.median(beyond)), _WORTH * step.a_ns)
    unusual = np.abs(changes - np.median(changes, axis=0)) * busy
    rows = [i for i in np.argsort(-beyond, kind="stable") if beyond[i] > least][:_LISTED_RANKS]
    return tuple(
        RankChange(
            rank=ranks[i],
            a_ns=sum(ns for part, ns in in_a[i].items() if part not in MAYBE_BLOCKED),
            b_ns=sum(ns for part, ns in in_b[i].items() if part not in MAYBE_BLOCKED),
            usual_ns=round(usual),
            part=parts[int(unusual[i].argmax())],
        )
        for i in rows
    )


def _findings(a: ComparedRun, b: ComparedRun, *, same_ranks: bool) -> Iterator[FindingChange]:
    """B's findings beside those of A that are about the same, in B's order; then what is gone."""
    left = list(a.report.findings)
    for finding in b.report.findings:
        before = next((f for f in left if _about_the_same(f, finding, same_ranks=same_ranks)), None)
        if before is not None:
            left.remove(before)
            error = (before.uncertainty_ns**2 + finding.uncertainty_ns**2) ** 0.5
            change = abs(finding.lost_ns_per_step - before.lost_ns_per_step)
            changed = change > max(error, _WORTH * a.steps.mean_ns)
            yield FindingChange(status="changed" if changed else "stays", a=before, b=finding)
        else:
            yield _one_sided(finding, a.report, "A")
    for finding in left:
        yield _one_sided(finding, b.report, "B")


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
