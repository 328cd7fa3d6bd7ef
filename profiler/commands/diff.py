"""Say what changed from one run of a job to another.

By how much a step became longer or shorter and whether that is clear of chance, in which parts of it, on which ranks;
which findings are new or gone; which communication and which kernels take more.

Example: rankscope diff runs/old runs/new
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.text.message import joined, speaking, spoken, text
from rankscope.analysis.text.phrases import counted
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Json, Lang, Steps, World, part_of, write

if TYPE_CHECKING:
    from rankscope.analysis.model.comparison import Comparison, KernelChange, OperationChange

__all__ = ["command"]

_SHOWN = 8  # operations and kernels
_NAME = 60  # letters of a kernel's name


def command(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The run to compare with; any trace that can be read.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The run that may have changed.")],
    steps: Steps = None,
    world: World = None,
    json: Json = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.compare.compared_run import compared_run
    from rankscope.analysis.compare.two_runs import compare

    one, other = part_of([a, b], steps, world)
    found = compare(compared_run(one), compared_run(other))
    if json:
        write(json, _as_json(found))
    if json != "-":
        with speaking(lang):
            print("\n".join(map(spoken, _text(found))))


def _as_json(found: Comparison) -> str:
    from rankscope.analysis.report.json_form import strict

    said = {"schema_version": 1, **dataclasses.asdict(found)}
    said["step"] |= {"change_ns": found.step.change_ns, "clear": found.step.clear}
    for part, change in zip(said["parts"], found.parts, strict=True):
        part["change_ns"] = change.change_ns
    return strict(said)


def _text(found: Comparison) -> Iterable[str]:
    for name, side in (("A", found.a), ("B", found.b)):
        size = joined(", ", (counted(side.ranks, "rank"), counted(side.steps, "analyzed step")))
        yield f"{name}  {side.path}: {spoken(size)}"
        yield f"   {spoken(side.verdict)}"
    yield from (f"   {spoken(note)}" for note in found.notes)
    yield f"\n{_step(found)}"
    if found.parts:
        yield f"\n{_parts(found)}"
    if found.ranks:
        head = text("Ranks whose time outside communication changed differently from the others")
        yield f"\n{spoken(head)}\n{_ranks(found)}"
    yield f"\n{spoken(text('Findings'))}\n{_findings(found)}"
    if found.operations:
        yield f"\n{spoken(text('Communication, mean over analyzed steps'))}\n{_operations(found.operations)}"
    if found.kernels:
        yield f"\n{spoken(text('Device work, per rank and analyzed step'))}\n{_kernels(found.kernels)}"


def _step(found: Comparison) -> str:
    from rankscope.analysis.compare.two_runs import step_change
    from rankscope.analysis.text.units import duration

    times = f"{duration(found.step.a_ns)} -> {duration(found.step.b_ns)}"
    return spoken(text("Mean step {times}: {change}", times=times, change=step_change(found.step)))


def _parts(found: Comparison) -> str:
    from rankscope.analysis.report.diff_text import part_columns

    unit, rows = part_columns(found.step, found.parts)
    return aligned([(text("part"), f"A, {unit}", f"B, {unit}", text("change"), "±"), *rows], right=(1, 2, 3, 4))


def _ranks(found: Comparison) -> str:
    from rankscope.analysis.model.parts import part_name
    from rankscope.analysis.text.units import duration, signed

    rows = [
        (
            text("rank {rank}", rank=one.rank),
            f"{duration(one.a_ns)} -> {duration(one.b_ns)}",
            signed(one.b_ns - one.a_ns),
            text(
                "the usual change is {usual}; the difference is mostly {part}",
                usual=signed(one.usual_ns),
                part=part_name(one.part),
            ),
        )
        for one in found.ranks
    ]
    return aligned(rows, right=(2,))


def _findings(found: Comparison) -> str:
    from rankscope.analysis.report.diff_text import finding_row

    if not found.findings:
        return spoken(text("None in either run."))
    return aligned([finding_row(change) for change in found.findings])


def _operations(operations: Sequence[OperationChange]) -> str:
    from rankscope.analysis.report.diff_text import arrow
    from rankscope.analysis.text.units import duration, signed

    names = (
        text("operation"),
        text("group"),
        text("per step"),
        text("bytes"),
        text("transfer"),
        text("time of a rank"),
    )
    rows: list[tuple[str, ...]] = [names]
    for one in operations[:_SHOWN]:
        sizes = arrow(one.a_bytes, one.b_bytes, lambda size: f"{size:,.0f}")
        counts = arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}")
        transfers = arrow(one.a_transfer_ns, one.b_transfer_ns, duration)
        rows.append((one.op, one.group, counts, sizes, transfers, signed(one.b_time_ns - one.a_time_ns)))
    return aligned(rows, right=(5,)) + _more(len(operations))


def _kernels(kernels: Sequence[KernelChange]) -> str:
    from rankscope.analysis.report.diff_text import arrow
    from rankscope.analysis.text.units import duration, signed

    rows: list[tuple[str, ...]] = [(text("kernel"), text("time"), text("count"), text("change"))]
    for one in kernels[:_SHOWN]:
        counts = arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}")
        rows.append((one.name[:_NAME], arrow(one.a_ns, one.b_ns, duration), counts, signed(one.b_ns - one.a_ns)))
    return aligned(rows, right=(3,)) + _more(len(kernels))


def _more(count: int) -> str:
    if count <= _SHOWN:
        return ""
    return "\n" + spoken(text("and {count} more, that changed less: --json", count=count - _SHOWN))
