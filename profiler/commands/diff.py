"""Say what changed from one run of a job to another.

By how much a step became longer or shorter and whether that is clear of chance, in which parts of it, on which ranks;
which findings are new or gone; which communication and which kernels take more.

Example: rankscope diff runs/old runs/new
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.profiler.columns import aligned

if TYPE_CHECKING:
    from rankscope.analysis.compare.two_runs import Comparison, KernelChange, OperationChange

__all__ = ["command"]

_SHOWN = 8  # operations and kernels
_NAME = 60  # letters of a kernel's name


def command(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The run to compare with; any trace that can be read.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The run that may have changed.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from rankscope.analysis.compare.two_runs import compare
    from rankscope.analysis.diagnosis.diagnose import read_run

    found = compare(*read_run(a), *read_run(b))
    if json:
        _print_json(found)
    else:
        print("\n".join(_text(found)))


def _print_json(found: Comparison) -> None:
    from rankscope.analysis.report.json_form import strict

    said = {"schema_version": 1, **dataclasses.asdict(found)}
    said["step"] |= {"change_ns": found.step.change_ns, "clear": found.step.clear}
    for part, change in zip(said["parts"], found.parts, strict=True):
        part["change_ns"] = change.change_ns
    sys.stdout.write(strict(said))


def _text(found: Comparison) -> Iterable[str]:
    from rankscope.analysis.text.phrases import counted

    for name, side in (("A", found.a), ("B", found.b)):
        yield f"{name}  {side.path}: {counted(side.ranks, 'rank')}, {counted(side.steps, 'judged step')}"
        yield f"   {side.verdict}"
    yield from (f"   {note}" for note in found.notes)
    yield f"\n{_step(found)}"
    if found.parts:
        yield f"\n{_parts(found)}"
    if found.ranks:
        yield f"\nRanks whose own time changed otherwise than that of most\n{_ranks(found)}"
    yield f"\nFindings\n{_findings(found)}"
    if found.operations:
        yield f"\nCommunication, mean over judged steps\n{_operations(found.operations)}"
    if found.kernels:
        yield f"\nDevice work, per rank and judged step\n{_kernels(found.kernels)}"


def _step(found: Comparison) -> str:
    from rankscope.analysis.report.diff_text import step_change
    from rankscope.analysis.text.units import duration

    return f"Mean step  {duration(found.step.a_ns)} -> {duration(found.step.b_ns)}: {step_change(found.step)}"


def _parts(found: Comparison) -> str:
    from rankscope.analysis.report.diff_text import part_columns

    unit, rows = part_columns(found)
    return aligned([("part", f"A, {unit}", f"B, {unit}", "change", "±"), *rows], right=(1, 2, 3, 4))


def _ranks(found: Comparison) -> str:
    from rankscope.analysis.report.labels import part_label
    from rankscope.analysis.text.units import duration, signed

    rows = [
        (
            f"rank {one.rank}",
            f"{duration(one.a_ns)} -> {duration(one.b_ns)}",
            signed(one.b_ns - one.a_ns),
            f"mostly {part_label(one.part)}; usual is {signed(one.usual_ns)}",
        )
        for one in found.ranks
    ]
    return aligned(rows, right=(2,))


def _findings(found: Comparison) -> str:
    from rankscope.analysis.report.diff_text import finding_row

    if not found.findings:
        return "none in either run"
    return aligned([finding_row(change) for change in found.findings])


def _operations(operations: Sequence[OperationChange]) -> str:
    from rankscope.analysis.report.diff_text import arrow
    from rankscope.analysis.text.units import duration, signed

    rows = [("operation", "group", "per step", "bytes", "transfer", "time of a rank")]
    for one in operations[:_SHOWN]:
        sizes = arrow(one.a_bytes, one.b_bytes, lambda size: f"{size:,.0f}")
        counts = arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}")
        transfers = arrow(one.a_transfer_ns, one.b_transfer_ns, duration)
        rows.append((one.op, one.group, counts, sizes, transfers, signed(one.b_time_ns - one.a_time_ns)))
    return aligned(rows, right=(5,)) + _more(len(operations))


def _kernels(kernels: Sequence[KernelChange]) -> str:
    from rankscope.analysis.report.diff_text import arrow
    from rankscope.analysis.text.units import duration, signed

    rows = [("kernel", "time", "count", "change")]
    for one in kernels[:_SHOWN]:
        counts = arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}")
        rows.append((one.name[:_NAME], arrow(one.a_ns, one.b_ns, duration), counts, signed(one.b_ns - one.a_ns)))
    return aligned(rows, right=(3,)) + _more(len(kernels))


def _more(count: int) -> str:
    return f"\nand {count - _SHOWN} more, that changed less: --json" if count > _SHOWN else ""
