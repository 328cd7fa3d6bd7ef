"""A rank died, or an exception ended it, and the others could not go on without it.

**Signal.** The node's agent sees every rank's process end: with an exit code, by a signal, and with which exception. Of
the ranks that failed the first one is the cause, with these exceptions, which follow from another rank's end: errors of
the communication (gloo, NCCL, a connection that was closed), and SIGTERM, SIGINT or Ctrl-C, by which a launcher
ends the rest. A rank that ended with exit code 0 counts where others then failed in communication. SIGKILL together
with a kill by the kernel's OOM killer in the rank's control group is a kill for want of memory.

Ranks are desynchronized where those of a group did not do the same in the operation in which the job ended: another
operation or data type or, where the operation asks for it, another size. The transport then ends some of them. The
ranks that differ from most are the cause, unless the first one that failed raised an exception of its own or
ran out of memory. Sizes are compared where the group's earlier operations of the kind had the same on all ranks.

**Why it costs time.** The job ends, and a restart costs the work since the last checkpoint. There is no cost per step;
`lost_fraction` is 1.

**False positives.** A job that hung for 10 s and 5 steps before its first rank ended was ended because it hung: that is
`hang`, unless that rank crashed, ran out of memory or raised an exception of its own. Where all ranks were ended from
outside nothing is reported.

**What to try.** Look at the named rank's output and at the line of its exception. If the OOM killer ended it: what it
holds in host memory, or a higher limit. Without an exception: `PYTHONFAULTHANDLER=1`, and the node's kernel log.

**Source.** `/proc/PID/stat` and pidfd (Linux), `sys.excepthook`, `memory.events` of control groups.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import polars as pl

from rankscope.analysis.metrics.desync import Apart, Done, apart
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import NO_ROLES, group_title, named
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.rank_exits import last_operations
from rankscope.collectors.schema import STILL_NS, STILL_STEPS

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(needs=("exits",), judges_speed=False, waited_for=False)

_OF_COMMUNICATION = re.compile(
    r"gloo|nccl|ProcessGroup|Dist(Backend|Network|Store)?Error|Connection (closed|reset) by peer|Broken pipe", re.I
)
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_SHOWN = 8

_Exit = dict[str, Any]  # a row of `exits`


def detect(
    exits: pl.DataFrame,
    all_steps: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    all_collectives: pl.DataFrame | None = None,
) -> list[Finding]:
    """Name the rank that failed first, or who was desynchronized; nothing if none did, or if the job hung before."""
    rows = exits.sort("failed_ns", "rank").rows(named=True)
    failed = [row for row in rows if _has_failed(row)]
    by_others = [row for row in failed if _follows(row)]
    own = [row for row in failed if not _follows(row)]
    in_communication = [row for row in by_others if _is_of_communication(row)]
    left = [row for row in rows if in_communication and row["exit_code"] == 0 and _before(row, in_communication[0])]
    first = next(iter([*own, *left, *in_communication]), None)
    if first is None or (not _is_its_own(first) and _hung_before(first, all_steps)):
        return []
    finding = _finding(first, rows)
    if _raised(first) or _is_out_of_memory(first) or groups is None or all_collectives is None:
        return [finding]
    return [_desynchronized(finding, last_operations(all_collectives), groups) or finding]


def resolution_ns(exits: pl.DataFrame) -> int | None:  # noqa: ARG001 - what a detector must offer
    return None


def _has_failed(row: _Exit) -> bool:
    ended_well = row["exit_code"] == 0 or (
        row["exit_code"] is None and row["signal"] is None and row["bye_ns"] is not None
    )
    return row["error"] is not None or not ended_well


def _is_of_communication(row: _Exit) -> bool:
    return row["error"] is not None and bool(_OF_COMMUNICATION.search(row["error"]))


def _follows(row: _Exit) -> bool:
    """Say whether others may have brought it about."""
    if row["error"] is not None:
        return _is_of_communication(row) or row["error"].startswith("KeyboardInterrupt")
    return row["signal"] in _ASKED


def _before(row: _Exit, other: _Exit) -> bool:
    """Say whether it was over first; peers notice the loss before the process has ended."""
    return bool(row["failed_ns"] < other["end_ns"])


def _is_out_of_memory(row: _Exit) -> bool:
    return row["signal"] == signal.SIGKILL and bool(row["oom_kills"])


def _is_its_own(row: _Exit) -> bool:
    """Say whether a hanging job does not end so."""
    return _raised(row) or _is_out_of_memory(row) or row["signal"] in _CRASHES


def _raised(row: _Exit) -> bool:
    """Say whether an exception of its own ended it."""
    return row["error"] is not None and not _follows(row)


def _hung_before(row: _Exit, steps: pl.DataFrame | None) -> bool:
    median = None if steps is None else (steps["end_ns"] - steps["start_ns"]).median()
    still_ns = max(STILL_NS, STILL_STEPS * (median if isinstance(median, float) else 0))
    return row["begun_ns"] is not None and row["failed_ns"] - row["begun_ns"] >= still_ns


def _finding(first: _Exit, rows: list[_Exit]) -> Finding:
    subject, how = named("Rank", [first["rank"]]), _how(first)
    if first["exit_code"] == 0 and first["error"] is None:
        title = text("{subject} ended while the others continued ({how})", subject=subject, how=how)
    elif first["error"] is not None or first["bye_ns"] is not None:
        title = text("{subject} failed first ({how})", subject=subject, how=how)
    else:
        title = text("{subject} died first ({how})", subject=subject, how=how)
    if first["step"] is not None:
        title = text("{title} at step {step}", title=title, step=first["step"])
    ops = [row["op"] for row in rows if row is not first and _waits(row, first)]
    if ops:
        op = max(sorted(set(ops)), key=ops.count)
        title = text("{title}; the other ranks then waited in {op}", title=title, op=op)
    shown = [first, *(row for row in rows if row is not first and _has_failed(row))][:_SHOWN]
    return Finding(
        detector="rank_failure",
        severity="high",
        title=title,
        where=first["place"] or text("the process"),
        advice=_advice(first),
        ranks=(first["rank"],),
        lost_ns_per_step=0,
        lost_ns_total=0,
        lost_fraction=1.0,
        uncertainty_ns=0,
        gain_fraction=1.0,
        confidence="confirmed",
        evidence=tuple(_evidence(row, first) for row in shown),
    )


def _desynchronized(failed: Finding, operations: pl.DataFrame, groups: pl.DataFrame) -> Finding | None:
    """Return the failure with its cause: the first operation in which ranks of a group did not do the same."""
    known = groups.select("group_id", "name", "role").unique("group_id")
    operations = operations.join(known, on="group_id", maintain_order="left")
    for rows in operations.partition_by("group_id", "seq", maintain_order=True):
        done = {row["rank"]: Done(row["op"], row["dtype"], row["size_bytes"]) for row in rows.iter_rows(named=True)}
        unlike = apart(done)
        if unlike is None:
            continue
        seq, name, role = rows.select("seq", "name", "role").row(0)
        title, called = group_title(name, role), "" if role in NO_ROLES else role
        op = rows.filter(pl.col("rank").is_in(unlike.ranks))["op"][0]
        where = text("{op} number {seq} of {name}", op=op, seq=seq, name=called or title)
        return replace(
            failed,
            title=unlike.title,
            where=where,
            advice=joined(" ", (failed.title + ".", unlike.advice)),
            ranks=unlike.ranks,
            groups=(called or name,),
            evidence=(*_of_operation(rows, unlike), *failed.evidence),
        )
    return None


def _of_operation(rows: pl.DataFrame, unlike: Apart) -> Iterator[Evidence]:
    """Yield what ranks did, those first that differ."""
    first = rows.sort(~pl.col("rank").is_in(unlike.ranks), "rank").head(_SHOWN)
    for rank, start_ns in first.select("rank", "start_ns").iter_rows():
        note = unlike.does[rank] or ""
        yield Evidence(table="collectives", rank=rank, start_ns=start_ns, end_ns=start_ns, note=note)


def _waits(row: _Exit, first: _Exit) -> bool:
    """Say whether the last operation that it began lacked a rank, or ended later."""
    if row["op"] is None:
        return False
    return not row["op_is_whole"] or row["op_end_ns"] is None or bool(row["op_end_ns"] >= first["failed_ns"])


def _how(row: _Exit) -> str:
    if row["error"] is not None:
        return str(row["error"])
    if row["signal"] is not None:
        name = _signal_name(row["signal"])
        return text("{signal}, killed by the OOM killer", signal=name) if _is_out_of_memory(row) else name
    if row["exit_code"] is not None:
        return text("exit code {code}", code=row["exit_code"])
    return text("its exit status was not seen")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return text("signal {number}", number=number)


def _advice(row: _Exit) -> str:
    if _is_out_of_memory(row):
        return text(
            "Host memory ran out: look at what the rank holds there (loader workers, pinned buffers, checkpoints), or "
            "raise the limit."
        )
    if row["error"] is not None:
        return text("Look at the traceback in the rank's output, and fix what raised it.")
    if row["signal"] == signal.SIGKILL:
        return text(
            "SIGKILL was sent from outside: check the scheduler's log and the node's kernel log for its sender."
        )
    if row["signal"] is not None or row["bye_ns"] is None:
        return text("Set PYTHONFAULTHANDLER=1 to see where it crashes; look at its output and the node's kernel log.")
    return text("Check the rank's output: its script exited on its own.")


def _evidence(row: _Exit, first: _Exit) -> Evidence:
    how, at_ns = _how(row), row["failed_ns"]
    if row is first:
        note = text("{how} in {place}", how=how, place=row["place"]) if row["place"] else how
    else:
        after_ns = at_ns - first["failed_ns"]
        said = text("{later} later: {how}", later=duration(after_ns), how=how)
        note = said if after_ns >= 0 else text("{earlier} earlier: {how}", earlier=duration(-after_ns), how=how)
    return Evidence(table="exits", rank=row["rank"], start_ns=at_ns, end_ns=at_ns, note=note)
