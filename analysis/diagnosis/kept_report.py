"""The report on a run that has ended, kept in its folder: the next one needs no table of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

from rankscope.analysis.diagnosis.kept_values import keep, kept, made_of
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.model.address import PathLike, address_of
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.fingerprint import files_fingerprint
from rankscope.errors import BadInput

__all__ = ["KeptReport", "report_of"]


class KeptReport:
    """The place of the report on the run at these paths; `load` and `keep` do nothing where there is none.

    Parts of a run's steps, and what is no run folder on this machine, have none.
    """

    def __init__(self, paths: Sequence[PathLike], options: ReportOptions) -> None:
        self._paths = tuple(os.fspath(path) for path in paths)
        self._folder: Path | None = None
        try:
            where = address_of(list(self._paths))
            folders = [Path(folder) for folder in where.folders]
            if where.steps or not folders or not all((folder / "run").is_dir() for folder in folders):
                return
            files = " ".join(map(files_fingerprint, folders))
        except (BadInput, OSError):  # opening the run says why it cannot be read
            return
        self._folder = folders[0]
        self._name = "report" if where.world is None else f"report-{where.world}"
        self._of = made_of(files, [where.world, *astuple(options)])

    def load(self) -> Report | None:
        """Return the report that is kept for the run as it is now; None: there is none."""
        found = kept(self._folder, self._name, self._of, Report) if self._folder else None
        return found and replace(found, path=", ".join(self._paths))

    def keep(self, report: Report) -> None:
        """Keep the report on the run as it was when this was made."""
        if self._folder:
            keep(self._folder, self._name, self._of, report)


def report_of(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, recent: bool = False
) -> Report:
    """Return the report, as by `diagnose`, on the run at this path. Raises BadInput.

    That on a run that has ended is kept in its folder, and read again as long as its files and this code are the same.
    `recent`: of a run that is too long to be held at once only on the last steps, which is not kept.
    """
    place = KeptReport([path] if isinstance(path, (str, os.PathLike)) else path, options or ReportOptions())
    known = None if recent else place.load()
    if known is not None:
        return known
    from rankscope.analysis.diagnosis.diagnose import read_run  # 0.5 s, and what is kept needs nothing of it

    found = read_run(path, options, recent=recent)
    if found.is_final:
        place.keep(found.report)
    return found.report
