"""The tables for detectors, judged steps only, and the reasons of empty ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from rankscope.analysis.metrics.host_stalls import device_waits, only_hosts_seen
from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.metrics.links import judged_links
from rankscope.analysis.model.finding import (
    COUNTED,
)
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.code_samples import Code
from rankscope.analysis.timeline.matching import with_least_waits

__all__ = ["code_of", "judged_tables"]

_EMPTY = {
    "breakdown": text("no step was analyzed"),
    "phases": text("no step was analyzed"),
    "steps": text("no step was analyzed"),
    "ranks": text("no rank was recorded"),
    "regions": text("no regions were recorded"),
    "collectives": text("no communication was recorded"),
    "ops": text("no operations of pipeline stages were recorded"),
    "kernels": text("no work of a device was recorded"),
    "launches": text("the calls that launch the device's work were not recorded"),
    "model": text("the FLOPs of a step are unknown: give --flops-per-step"),
    "progress": text("no state of a job that hangs was saved (PyTorch's flight recorder does)"),
    "exits": text("how ranks ended was not recorded, or none has ended"),
    "links": text("no TCP traffic between nodes was recorded"),
    "counters": text("no counters of the nodes were recorded"),
    "memory": text("no memory of the ranks was recorded"),
    "gpus": text("it was not recorded which GPU a rank uses"),
}
_OUT_OF_STEP = text(
    "the ranks number their steps differently; mark the same steps on all ranks, with rankscope.step() or the "
    "profiler's step()"
)


def judged_tables(
    timeline: Timeline,
    addresses: Mapping[int, Iterable[str]],
    cannot: Mapping[str, str],
    model: tuple[pl.DataFrame, float | None],
) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    """Return the tables, and why one is missing or empty.

    `cannot` and `model` as `conclude.conclude` has them.
    """
    tables = _judged_only(timeline, addresses)
    needs, share = model
    if share is None or share >= COUNTED:
        tables["model"] = needs
    reasons = _EMPTY | dict(cannot) | {gap.table: gap.why for gap in timeline.gaps if gap.table == "ops"}
    if share and "model" not in tables:
        reasons["model"] = text(
            "shapes give the FLOPs of only {share} of the time of matrix products: give --flops-per-step",
            share=percent(share),
        )
    if not timeline.comparable:
        tables["breakdown"] = tables["breakdown"].clear()
        reasons["breakdown"] = _OUT_OF_STEP
    if timeline.ranks["node"].n_unique() < 2:
        reasons["links"] = text("all ranks that were seen run on one node")
    return tables, reasons


def _judged_only(timeline: Timeline, addresses: Mapping[int, Iterable[str]]) -> dict[str, pl.DataFrame]:
    """Return the tables for the detectors, rows of judged steps only."""
    steps = timeline.steps.filter("judged")
    tables = {
        name: in_judged_steps(frame, timeline.steps)
        for name in ("collectives", "regions", "phases", "breakdown", "proxies")
        if (frame := getattr(timeline, name)) is not None
    }
    tables |= {"steps": steps, "all_steps": timeline.steps, "ranks": timeline.ranks, "counters": timeline.counters}
    tables |= {"groups": timeline.groups, "progress": timeline.progress, "ras": timeline.ras, "exits": timeline.exits}
    tables |= {"kernels": timeline.kernels, "launches": timeline.launches, "memory": timeline.memory}
    tables["gpus"] = timeline.gpus
    tables["all_collectives"] = timeline.collectives
    tables["ops"] = in_judged_steps(timeline.ops, timeline.steps)
    tables["links"] = judged_links(timeline.counters, timeline.steps, addresses)
    tables["marks"] = in_judged_steps(timeline.marks, timeline.steps)
    tables["collectives"] = with_least_waits(tables["collectives"], timeline.groups, timeline.clocks)
    if only_hosts_seen(timeline.ranks, timeline.collectives, timeline.kernels, timeline.marks):
        tables["device_waits"] = device_waits(steps, tables["collectives"])
    return tables


def code_of(timeline: Timeline) -> Code:
    """Return the main threads' samples in the judged steps, or, without such, in the recording; and the last ones."""
    judged = timeline.steps.filter("judged")
    step_ns = judged.select((pl.col("end_ns") - pl.col("start_ns")).mean()).item()
    samples = timeline.samples
    if len(judged):
        samples = samples.join(judged, on=["rank", "step"], how="semi")
    last = timeline.samples.group_by("rank", maintain_order=True).agg(pl.col("place").last())
    return Code(samples, timeline.places, step_ns, dict(last.iter_rows()))
