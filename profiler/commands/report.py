"""Say why a recorded run is slow.

Finds the root cause, its cost per step, and the predicted speedup of a fix. --out writes the HTML report there;
without it, --json and --pdf the report is also written into the run folder, as report.html and report.json.

Example: rankscope report runs/NAME -o report.html
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.model.address import says_what_was_launched
from rankscope.errors import RankscopeError
from rankscope.profiler.options import (
    Dask,
    Json,
    Lang,
    Out,
    Price,
    Runs,
    Steps,
    World,
    part_of,
    takes,
    write,
)
from rankscope.profiler.progress import shown

if TYPE_CHECKING:
    from rankscope.analysis.model.finding import Report

__all__ = ["command"]


@dataclass(frozen=True, slots=True)
class Options:
    """The input, and the forms of the report on it."""

    run: Runs
    steps: Steps = None
    world: World = None
    out: Out = None
    json: Json = None
    pdf: Annotated[Path | None, typer.Option(help="Print the HTML report here, with the Chromium on PATH.")] = None
    short: Annotated[bool, typer.Option("--short", help="Print the verdict and the main findings only.")] = False
    flops_per_step: Annotated[
        float | None,
        typer.Option(min=1, help="FLOPs that the model needs in a step on all ranks: 6 x parameters x tokens."),
    ] = None
    peak_tflops: Annotated[
        float | None, typer.Option(min=1e-3, help="What one device can do per second. [default: by its name, bf16]")
    ] = None
    lang: Lang = "en"
    price: Price = None
    recent: Annotated[
        bool, typer.Option("--recent", help="Analyze only the last steps of a long run, which takes half a minute.")
    ] = False
    dask: Dask = None


@takes(Options)
def command(options: Options) -> None:
    from rankscope.analysis.diagnosis.kept_report import report_of
    from rankscope.analysis.diagnosis.options import ReportOptions
    from rankscope.analysis.readers.dask_cluster import on_cluster

    run = part_of(options.run, options.steps, options.world)
    with shown(options.lang), on_cluster(options.dask):
        asked = ReportOptions(
            flops_per_step=options.flops_per_step, peak_tflops=options.peak_tflops, price=options.price
        )
        report = report_of(run, asked, recent=options.recent)
    written = _write_files(report, run[0], options)  # first: the reader of what is printed may leave early (`| head`)
    if options.json != "-":
        _print(report, options)
    if written:
        print(written)


def _write_files(report: Report, run: Path, options: Options) -> str:
    """Write the forms that were asked for, else the usual ones into the run folder; the line that says so."""
    from rankscope.analysis.report import html, json_form

    if options.out:
        write(options.out, html.render(report, language=options.lang))
    if options.json:
        write(options.json, json_form.render(report))
    if options.pdf:
        _print_to(options.pdf, report, options.lang)
    if options.out or options.json or options.pdf or not _is_run(run):
        return ""  # a folder of another tool's files stays as it is
    return _write_into(run, report, options.lang)


def _is_run(run: Path) -> bool:
    """Say whether it is a run folder and not another tool's files."""
    if says_what_was_launched(run):
        return True
    from rankscope.analysis.readers import native  # 0.2 s

    return native.recognises(run)


def _print(report: Report, options: Options) -> None:
    from rankscope.analysis.report import terminal

    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    render = terminal.render_short if options.short else terminal.render
    print(render(report, width=width, color=terminal.wants_color(sys.stdout), language=options.lang))


def _print_to(path: Path, report: Report, language: str) -> None:
    from rankscope.analysis.report.pdf import write_pdf

    try:
        write_pdf(report, path, language=language)
    except OSError as error:
        raise RankscopeError(f"cannot write {path}: {error.strerror}") from None
    print(f"{path}", file=sys.stderr)


def _write_into(folder: Path, report: Report, language: str) -> str:
    """Write both forms into the run folder, if it can be written to; the line that says so."""
    from rankscope.analysis.report import html, json_form

    try:
        folder.mkdir(parents=True, exist_ok=True)  # one world of a run, or some of its steps
        (folder / "report.json").write_text(json_form.render(report), encoding="utf-8")
        (folder / "report.html").write_text(html.render(report, language=language), encoding="utf-8")
    except OSError as error:
        print(f"rankscope: no report.html in {folder}: {error.strerror}; -o writes it elsewhere", file=sys.stderr)
        return ""
    return f"HTML report: {folder / 'report.html'}"
