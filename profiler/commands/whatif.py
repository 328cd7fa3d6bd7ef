"""Predict what a step would take with a fix.

The recorded steps are replayed with the fixes put in. Fixes: rank:2, rank:2,5 and node:1 (their compute time becomes
the median of the others), balance (all ranks' compute time becomes the mean), link:node1 or link:node1,node4 (transfers
at the speed of other links), op:allreduce=0.5 (takes half, 0: nothing), gc, input, compile, checkpoint and, on devices,
host (take no time), stage:3 (of a pipeline: its operations as long as those of the others), balance:stages (all stages
have as much to do), bucket-mb:50 (DDP's buckets of gradients are merged or cut to that size; the same as --bucket-mb
50), overlap:GROUP:OPERATION (what is exposed of it is hidden behind compute), prefetch:1 (parameters are gathered that
many gathers earlier), reshard:off (they are not gathered again in backward).

Example: rankscope whatif runs/NAME --fix rank:2
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.text.message import speaking, text
from rankscope.errors import RankscopeError
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Json, Lang, Runs, Steps, World, part_of, write

if TYPE_CHECKING:
    from rankscope.analysis.model.finding import Fidelity
    from rankscope.analysis.replay.protocol import Gain

__all__ = ["command"]


def command(
    run: Runs,
    fix: Annotated[list[str] | None, typer.Option("--fix", help="Fix to simulate (repeatable).")] = None,
    bucket_mb: Annotated[
        float | None, typer.Option("--bucket-mb", help="DDP's bucket_cap_mb instead of the recorded one.")
    ] = None,
    steps: Steps = None,
    world: World = None,
    json: Json = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.metrics.links import judged_links
    from rankscope.analysis.replay.fixes import Fix, check_form
    from rankscope.analysis.replay.whatif import rerun
    from rankscope.analysis.runs.trace import Trace
    from rankscope.analysis.timeline.build import build_timeline
    from rankscope.errors import NotReplayable

    fixes = [*(fix or []), *([str(Fix("bucket-mb", f"{bucket_mb:g}"))] if bucket_mb is not None else [])]
    if not fixes:
        raise RankscopeError("nothing to fix: give --fix, as in --fix rank:2, or --bucket-mb")
    for one in fixes:
        check_form(one)
    trace = Trace.open(part_of(run, steps, world))
    timeline = build_timeline(trace)
    try:
        addresses = {node: launch.get("addresses", ()) for node, launch in trace.run.items()}
        replayable = rerun(timeline, judged_links(timeline.counters, timeline.steps, addresses))
        gains = [replayable.gain(one) for one in fixes]
        if len(fixes) > 1:
            gains.append(replayable.gain(*fixes))
    except NotReplayable as reason:
        raise NotReplayable(f"nothing is predicted: {reason}") from None
    if json:
        write(json, _as_json(trace.path, replayable.step_ns, replayable.fidelity, gains))
    if json != "-":
        with speaking(lang):
            _print(replayable.step_ns, replayable.fidelity, gains)


def _print(step_ns: float, fidelity: Fidelity, gains: list[Gain]) -> None:
    from rankscope.analysis.text.units import duration, duration_with_error, percent

    mean = round(100 * fidelity.mean_error, 1)
    met = text(
        "{steps} steps met within {median:.1f} % (median), {p90:.1f} % (90th percentile); mean step {mean} %",
        steps=fidelity.steps,
        median=100 * fidelity.median_error,
        p90=100 * fidelity.p90_error,
        mean=f"{mean:+.1f}" if mean else "0.0",
    )
    now = text("{step}, mean over the analyzed steps", step=duration(step_ns))
    print(aligned([(text("step now"), "", now), (text("replay"), "", met)]) + "\n")
    rows: list[tuple[str, ...]] = [(text("fix"), text("step"), text("speedup"), "")]
    for gain in gains:
        name = gain.fixes[0] if len(gain.fixes) == 1 else text("together")
        saved = duration_with_error(round(gain.gain_ns), round(gain.uncertainty_ns))
        rows.append((name, duration(gain.step_ns), saved, percent(gain.gain_ns / step_ns)))
    print(aligned(rows, right=(1, 2, 3)))


def _as_json(path: str, step_ns: float, fidelity: Fidelity, gains: list[Gain]) -> str:
    import json

    predictions = [
        {**dataclasses.asdict(gain), "fixes": list(gain.fixes), "gain_fraction": gain.gain_ns / step_ns}
        for gain in gains
    ]
    said = {"schema_version": 1, "path": path, "step_ns": step_ns, "fidelity": dataclasses.asdict(fidelity)}
    return json.dumps({**said, "predictions": predictions}, indent=1) + "\n"
