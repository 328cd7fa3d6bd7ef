"""Write a run's timeline as a file that https://ui.perfetto.dev opens.

What was rebuilt of the run: all ranks on one clock, where each step went, who waited for whom, findings, and what was
not seen. The file has Perfetto's own format, packed; it is read in the browser and sent nowhere. Without --out it is
NAME.pftrace.gz, in this folder.

Example: rankscope export runs/NAME --ranks 0-7
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rankscope.errors import NotExportable, RankscopeError
from rankscope.profiler.options import Out, Ranks, Runs, Steps, World, part_of
from rankscope.profiler.progress import shown

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["command"]

_SUFFIX = ".pftrace.gz"


def command(
    run: Runs,
    out: Out = None,
    ranks: Ranks = None,
    steps: Steps = None,
    world: World = None,
) -> None:
    from rankscope.analysis.diagnosis.conclude import report_on
    from rankscope.analysis.report import perfetto
    from rankscope.analysis.runs.trace import Trace
    from rankscope.analysis.text.units import bytes_text
    from rankscope.analysis.timeline.build import build_timeline
    from rankscope.analysis.timeline.clocks import apply_clocks

    run = part_of(run, None, world)
    file = out or Path(_name(run[0]) + _SUFFIX)
    if file.exists():
        raise RankscopeError(f"{file} exists already: name a file that does not with --out")
    with shown():
        trace = Trace.open(run)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline).report
    gaps = apply_clocks(trace.table("gaps").collect(), timeline.clocks)
    unfinished = file.with_name(f"{file.name}.part")
    try:
        part = perfetto.chosen(timeline, ranks, steps)
        with shown(), _packed(unfinished) as packed:
            events = perfetto.write(timeline, part, report, gaps, cast("BinaryIO", packed))
        unfinished.rename(file)
    except NotExportable as why:
        raise RankscopeError(f"{trace.path}: {why}") from None
    except OSError as error:
        raise RankscopeError(f"cannot write {file}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{file}: {events:,} events, {bytes_text(file.stat().st_size)}; open it at https://ui.perfetto.dev")


def _name(run: Path) -> str:
    """Return the run's name, with what of it is named: `run-steps=100-110`."""
    from rankscope.analysis.model.address import run_folder

    folder, whole = run_folder(run).resolve(), run.resolve()
    return "-".join((folder.name.split(".")[0], *whole.parts[len(folder.parts) :]))


def _packed(path: Path) -> IO[bytes]:
    """Open a gzip file to write to; isal, where it is there, takes a fifth of the time."""
    try:
        from isal import igzip as gzip
    except ImportError:
        import gzip
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=2))
