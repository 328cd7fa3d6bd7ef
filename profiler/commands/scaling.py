"""Say how a job scales: several runs of it, on different numbers of ranks.

Step time and throughput against linear scaling of the run on fewest ranks, the efficiency of each run, and which parts
of the step the rest went to. Weak scaling (each rank does the same work) or strong (all share the same work) is
inferred from what a rank computes.

Example: rankscope scaling runs/8-ranks runs/64-ranks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.text.message import speaking, spoken, text
from rankscope.errors import RankscopeError
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Json, Lang, Steps, World, part_of, write

if TYPE_CHECKING:
    from rankscope.analysis.compare.scaling import Scaling

__all__ = ["command"]


def command(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Runs of one job on different numbers of ranks, in any order."),
    ],
    weak: Annotated[bool, typer.Option("--weak", help="Each rank does the same work, whatever their number.")] = False,
    strong: Annotated[bool, typer.Option("--strong", help="All ranks share the same work.")] = False,
    steps: Steps = None,
    world: World = None,
    json: Json = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.compare.compared_run import compared_run
    from rankscope.analysis.compare.scaling import scaling
    from rankscope.analysis.report.json_form import strict

    if weak and strong:
        raise RankscopeError("--weak or --strong, not both")
    kind = "weak" if weak else "strong" if strong else ""
    found = scaling([compared_run(path) for path in part_of(run, steps, world)], kind)
    if json:
        write(json, strict({"schema_version": 1, **dataclasses.asdict(found)}))
    if json != "-":
        with speaking(lang):
            print("\n".join(map(spoken, _text(found))))


def _text(found: Scaling) -> Iterable[str]:
    from rankscope.analysis.model.parts import part_name
    from rankscope.analysis.text.units import percent

    base, *others = found.points
    said = {"why": found.why, "run": base.path, "n": base.ranks}
    if found.kind == "weak":
        yield text("Weak scaling ({why}), against {run} on {n} ranks", **said)
    else:
        yield text("Strong scaling ({why}), against {run} on {n} ranks", **said)
    yield from found.notes
    yield f"\n{_runs(found)}"
    for point in others:
        if point.mostly:
            yield text("{n} ranks: most of the loss is in {part}", n=point.ranks, part=part_name(point.mostly))
    if base.lost:
        yield f"\n{spoken(text('Beyond linear, per step'))}\n{_parts(found)}"
    law = found.law
    if law is None:
        yield f"\n{spoken(text('No law: {why}.', why=found.no_law))}"
        return
    grows = text("grows with the ranks") if found.kind == "weak" else text("does not shrink with more ranks")
    fits = text(
        "{law}: {share} of the base's step {grows}; it misses no efficiency by more than {misses}. "
        "On {n} ranks it gives {twice} of linear.",
        law=law.name,
        share=percent(law.serial_fraction),
        grows=grows,
        misses=f"{law.misses:.2f}",
        n=2 * found.points[-1].ranks,
        twice=percent(law.twice),
    )
    yield f"\n{spoken(fits)}"


def _runs(found: Scaling) -> str:
    from rankscope.analysis.text.units import duration, duration_with_error, percent

    fewest = found.points[0].ranks
    rows: list[tuple[str, ...]] = [
        (
            *(text("run"), text("ranks"), text("nodes"), text("steps"), text("mean step")),
            *(text("linear"), text("speedup"), text("of"), text("efficiency")),
        )
    ]
    for point in found.points:
        step = duration(point.step_ns) if point.error_ns is None else duration_with_error(point.step_ns, point.error_ns)
        error = "" if point.efficiency_error is None else f" ± {100 * point.efficiency_error:.1f}"
        rows.append(
            (
                Path(point.path).name,
                *(str(n) for n in (point.ranks, point.nodes, point.steps)),
                step,
                duration(point.linear_ns),
                f"{point.speedup:.2f}",
                f"{point.ranks / fewest:.2f}",
                percent(point.efficiency).replace(" %", f"{error} %"),
            )
        )
    return aligned(rows, right=range(1, 9))


def _parts(found: Scaling) -> str:
    """One row per part, one column per run but the base. What is shown of a column adds up."""
    from rankscope.analysis.model.parts import part_name
    from rankscope.analysis.text.units import scale_for

    scale = scale_for(max(point.step_ns for point in found.points))
    points = found.points[1:]
    names = list(dict.fromkeys(name for point in points for name in point.lost))
    columns = [scale.row([point.lost.get(name, 0) for name in names]) for point in points]
    head = ("", *(text("{n} ranks, {unit}", n=point.ranks, unit=scale.unit) for point in points))
    rows = [(part_name(name), *(texts[i] for texts, _ in columns)) for i, name in enumerate(names)]
    return aligned([head, *rows, (text("sum"), *(whole for _, whole in columns))], right=range(1, len(head)))
