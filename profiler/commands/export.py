"""Write a run's timeline as a file that https://ui.perfetto.dev opens.

What was rebuilt of the run: all ranks on one clock, where each step went, who waited for whom, findings, and what was
not seen. The file has Perfetto's own format, packed; it is read in the browser and sent nowhere.

Example: rankscope export runs/NAME --ranks 0-7
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, cast

import typer

from rankscope.errors import NotExportable, RankscopeError

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["command"]

_SUFFIX = ".pftrace.gz"


def command(
    run: Annotated[list[Path], typer.Argument(help="The run; for nodes without shared storage, the folder of each.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=f"The file to make; without: NAME{_SUFFIX}, here.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Which ranks, as in 0-7,12; without: all.")] = None,
    steps: Annotated[str | None, typer.Option(help="Which steps, as in 100-110; without: all.")] = None,
) -> None:
    from rankscope.analysis.diagnosis.diagnose import report_on
    from rankscope.analysis.report import perfetto
    from rankscope.analysis.runs.trace import Trace
    from rankscope.analysis.timeline.build import build_timeline
    from rankscope.analysis.timeline.clocks import apply_clocks

    wanted, between = _ranks(ranks), _steps(steps)
    file = out or Path(_name(run[0]) + _SUFFIX)
    if file.exists():
        raise RankscopeError(f"{file} exists already: name a file that does not with --out")
    trace = Trace.open(run)
    timeline = build_timeline(trace)
    report = report_on(trace, timeline)
    gaps = trace.table("gaps").pipe(apply_clocks, timeline.clocks).collect()
    unfinished = file.with_name(f"{file.name}.part")
    try:
        part = perfetto.chosen(timeline, wanted, between)
        with _packed(unfinished) as packed:
            events = perfetto.write(timeline, part, report, gaps, cast("BinaryIO", packed))
        unfinished.rename(file)
    except NotExportable as why:
        raise RankscopeError(f"{trace.path}: {why}") from None
    except OSError as error:
        raise RankscopeError(f"cannot write {file}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{file}: {events:,} events, {file.stat().st_size / 1e6:,.1f} MB; open it at https://ui.perfetto.dev")


def _name(run: Path) -> str:
    """The run's, with what of it is named: `run-steps=100-110`."""
    from rankscope.analysis.readers.native import run_folder

    folder, whole = run_folder(run).resolve(), run.resolve()
    return "-".join((folder.name.split(".")[0], *whole.parts[len(folder.parts) :]))


def _packed(path: Path) -> IO[bytes]:
    """A gzip file to write to; isal, where it is there, takes a fifth of the time."""
    try:
        from isal import igzip as gzip
    except ImportError:
        import gzip
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=2))


def _ranks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    from rankscope.analysis.timeline.matching import members_of

    try:
        return sorted(set(members_of(text)))
    except ValueError:
        raise RankscopeError(f"--ranks is as in 0-7,12; got {text}") from None


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    numbers = [first, last if dash else first]
    if not all(map(str.isdecimal, numbers)) or int(numbers[0]) > int(numbers[1]):
        raise RankscopeError(f"--steps is as in 100-110; got {text}")
    return int(numbers[0]), int(numbers[1])
