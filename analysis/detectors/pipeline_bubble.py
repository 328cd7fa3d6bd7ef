"""The pipeline idles more than its schedule must.

**Signal.** The schedule is recognised from the order of forwards and backwards on each stage (1F1B, GPipe, interleaved
or not, ZB-H1, ZBV). Its bubble is known: (p - 1) / (v m + p - 1) for p ranks with v stages each and m microbatches
(zero-bubble schedules: see the definitions), and what
transfers add to it if all take as long as those between the quickest pair of stages, by replay. The busiest stage's
bubble is compared with that; more than `max_excess` above it, clear of its scatter over the steps, is reported, split
by replay into slower transfers, microbatches and stages of unequal length, and what the trace does not show.

Of a profiler's capture, which does not say which microbatch is whose, the waiting of the stage that waits least is
reported if it is 30 % of the step or more: what every stage waits goes away with more microbatches only, or with
another schedule. The speedup is that of four times as many of a quarter of the size.

Why the busiest stage: what the other stages idle beyond it is lack of work, see `stage_imbalance`.

**Why it costs time.** A stage that waits for a late input or gradient computes nothing meanwhile.

**False positives.** Computations that are not in the trace look like waiting.

**What to try.** More microbatches, or an interleaved schedule, make the theory itself smaller. Late transfers:
overlap sends and receives with computation, look at the links between neighbours. Unequal microbatches: balance
sequence lengths.

**Source.** GPipe, PipeDream-Flush (1F1B) and Qi et al. 2023 (zero bubble) for the theory; the split is ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity
from rankscope.analysis.metrics.step_matrix import estimate
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.replay.pipeline import TRANSFERS, measured_pipeline
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.pipeline_ops import steps_of_ops
from rankscope.errors import NotReplayable, NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(lost_as=(*AS_WAITING, "communication"))


def detect(ops: pl.DataFrame, steps: pl.DataFrame | None = None, *, max_excess: float = 0.03) -> list[Finding]:
    """Report the pipeline if its busiest stage idles more than it must. `steps` may be longer than their operations."""
    try:
        found, excess_ns = measured_pipeline(ops)
    except NotReplayable as reason:
        raise NotResolvable(reason.args[0]) from None
    if found.theory_fraction is None:
        raise NotResolvable(text("the schedule is neither 1F1B nor GPipe, so its bubble in theory is unknown"))
    share, needed = found.bubble[found.busiest_stage], found.theory_fraction + found.excess[TRANSFERS]
    if share - needed <= max_excess:
        return []
    spans = steps_of_ops(ops).unique("step").sort("step")
    length = spans if steps is None else steps
    mean_ns = float(np.mean((length["end_ns"] - length["start_ns"]).to_numpy()))
    lost = estimate(excess_ns)
    if not lost.clear:
        return []
    fraction = lost.ns / mean_ns
    cause = max(_ADVICE, key=lambda part: found.excess[part])
    return [
        Finding(
            detector="pipeline_bubble",
            severity=severity(fraction),
            title=text(
                "Steps of the pipeline take {lost} longer than {schedule} needs with its transfers, mostly for {cause}",
                lost=duration(lost.ns),
                schedule=found.schedule,
                cause=cause,
            ),
            where=text("stage {stage}", stage=found.busiest_stage),
            advice=_ADVICE[cause],
            lost_ns_per_step=round(lost.ns),
            lost_ns_total=round(lost.ns * len(excess_ns)),
            lost_fraction=fraction,
            uncertainty_ns=round(lost.half_width_ns),
            gain_fraction=fraction,
            evidence=tuple(
                Evidence(
                    table="ops",
                    start_ns=start,
                    end_ns=end,
                    note=text("step {step}: {explanation}", step=step, explanation=found.explanation),
                )
                for step, start, end in spans.select("step", "start_ns", "end_ns").head(1).iter_rows()
            ),
        )
    ]


def resolution_ns(ops: pl.DataFrame, *, max_excess: float = 0.03) -> int:
    """Return the cost per step of the largest excess that is not reported."""
    steps = steps_of_ops(ops).unique("step")
    return round(max_excess * float(np.mean((steps["end_ns"] - steps["start_ns"]).to_numpy())))


_ADVICE = {
    text("waiting for what is not recorded"): text(
        "Record what the hosts do between the operations: the stages wait, but neither "
        "for transfers nor for each other's computation."
    ),
    text("late transfers"): text(
        "Overlap sends and receives with computation, and look at the links between neighbouring stages."
    ),
    text("microbatches of unequal length"): text("Balance the microbatches: pack or sort sequences by length."),
    text("stages of unequal length"): text("Distribute the layers evenly over the stages."),
}
