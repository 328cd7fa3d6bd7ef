"""Lanes of a large run in files beside its tables, mapped into memory: made once, and opened at once from then on.

`RUN/lanes/` holds the arrays of `lanes.py`, one file each, and `lanes.json` with the rest. They are used only for the
very tables and by the very code that they were made of; otherwise they are rebuilt. The folder may be deleted.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.runs.fingerprint import code_fingerprint, files_fingerprint
from rankscope.analysis.timeline.build import Timeline
from rankscope.dashboard.timeline.lanes import build_scene, events_of, lay_out
from rankscope.dashboard.timeline.scene import Scene, assemble

__all__ = ["FOLDER", "build_or_store", "load"]

FOLDER = "lanes"
_HEAD = "lanes.json"
_STORED_FROM = 1_000_000  # events; fewer are laid out in half a second
_BYTES_PER_EVENT = 80  # at most, about
_ABANDONED_S = 3600  # what is still being made after so long was left by a process that was killed
_CODE = ("analysis", "collectors", "dashboard/timeline")

_log = logging.getLogger(__name__)


def load(run: Path, tables: str) -> Scene | None:
    """Return the lanes stored for a run whose tables have this fingerprint.

    None if there are none, or of anything else.
    """
    folder = run / FOLDER
    try:
        head = json.loads((folder / _HEAD).read_bytes())
        if (head["tables"], head["code"]) != (tables, code_fingerprint(*_CODE)):
            return None
        return assemble(head["scene"], {name: _mapped(folder / name, *of) for name, of in head["arrays"].items()})
    except (OSError, ValueError, KeyError, TypeError):  # none, or torn
        return None


def build_or_store(run: Path, tables: str, timeline: Timeline) -> Scene:
    """Return the lanes of this timeline, stored if there are many.

    Of a run that can't be written to they stay in memory.

    `tables` is the run's fingerprint from before it was read, and behind a blank which of its steps were.
    """
    if events_of(timeline) < _STORED_FROM or not (run / "run").is_dir():
        return build_scene(timeline)
    try:
        _store(run, tables, timeline)
    except OSError as error:
        _log.warning("rankscope: the timeline's lanes are kept in memory, %s", error)
    return load(run, tables) or build_scene(timeline)


def _store(run: Path, tables: str, timeline: Timeline) -> None:
    needed = events_of(timeline) * _BYTES_PER_EVENT
    free = shutil.disk_usage(run).free
    if free < needed:
        raise OSError(f"{run} has {free / 1e9:.1f} GB free of the {needed / 1e9:.1f} GB that they may take")
    for left in run.glob(f"{FOLDER}-*"):
        if left.stat().st_mtime < time.time() - _ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{FOLDER}-", dir=run))
    try:
        files = _Files(made)
        head, arrays = lay_out(timeline, files)
        sizes = {name: [array.dtype.str, len(array)] for name, array in arrays.items()}
        whole = {"tables": tables, "code": code_fingerprint(*_CODE), "arrays": sizes, "scene": head}
        _write(made / _HEAD, json.dumps(whole, separators=(",", ":")).encode())
        if files_fingerprint(run) != tables.partition(" ")[0]:
            return  # it has grown since it was read
        shutil.rmtree(run / FOLDER, ignore_errors=True)
        made.chmod(0o755)
        made.rename(run / FOLDER)
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Files:
    """`Arrays` in files, one each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[BinaryIO, str, list[int]]] = {}

    def add(self, name: str, piece: NDArray[Any]) -> None:
        if name not in self._open:
            self._open[name] = ((self._folder / name).open("wb", buffering=1 << 20), piece.dtype.str, [0])
        file, dtype, length = self._open[name]
        file.write(np.ascontiguousarray(piece, dtype).data)
        length[0] += len(piece)

    def whole(self) -> Mapping[str, NDArray[Any]]:
        for file, _, _ in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return {name: _mapped(self._folder / name, dtype, n[0]) for name, (_, dtype, n) in self._open.items()}


def _mapped(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Raise ValueError if the file is not exactly as long as this."""
    size = np.dtype(dtype).itemsize * length
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(f"{path} does not have {size} bytes")
        if not size:
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), dtype)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
