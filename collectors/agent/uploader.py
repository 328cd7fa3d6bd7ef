"""Sends a run's files to object storage while they are written: a process beside the agent, of the lowest priority.

A file of rows goes once, when it is sealed; small tables also while they grow, and what is rewritten again, so that a
machine that dies leaves a run that can be read. Nothing is removed, there or here: what retention makes of a file that
has arrived stays here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil

from rankscope.collectors.object_storage import Location, file_system, location
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["Uploader", "main"]

_POLL_S = 4.0
_GROWING_S = 60.0
_AT_ONCE = 4
_LONGEST_PAUSE_S = 30.0
_ENDING_S = 60.0  # if the agent has died
_GROWING = ("ranks", "groups", "strings", "gaps")  # small, and nothing can be read without them
_SEAL = b"ARROW1"
_DONE = ".uploaded.json"


class Uploader:
    """One run folder and where it goes; what has arrived is kept in the folder, for another process to go on."""

    def __init__(self, folder: Path, at: Location) -> None:
        self._folder = folder
        self._at = at
        self._system: FileSystem | None = None
        self._root = ""  # in the storage; chosen when it first answers
        self._sent: dict[str, list[int]] = {}  # size and time of change, and 1 for a file of rows that was whole
        self._grown_at = time.monotonic()
        self._under_way: dict[Future[None], str] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._why = ""
        self._failures = 0  # rounds in a row
        with contextlib.suppress(OSError, ValueError, KeyError):
            done = json.loads((folder / "run" / _DONE).read_bytes())
            self._root, self._sent = done["root"], done["sent"]

    @property
    def arrived(self) -> list[str]:
        """The whole files of rows that are there, by their paths in the folder."""
        return [name for name, (_, _, whole) in dict(self._sent).items() if whole]

    def send(self, *, last: bool = False, until: Callable[[], bool]) -> float:
        """Send files until the storage refuses or `until` is true; return how long to pause, in s."""
        before = dict(self._sent)
        failed = False
        if self._system is None:
            failed = not self._finish({self._pool.submit(self._connect): "."}, until)
        if self._system is not None:
            going = set(self._under_way.values())
            new = {self._pool.submit(self._send, name): name for name in self._to_send(last) if name not in going}
            failed = not self._finish(self._under_way | new, until)
        if self._sent != before:
            self._remember()
        self._failures = self._failures + 1 if failed else 0
        longest = min(_LONGEST_PAUSE_S, 0.5 * 2**self._failures)
        return random.uniform(longest / 2, longest) if failed else _POLL_S

    def finish(self, deadline: float) -> dict[str, Any]:
        """Send until all has arrived or the deadline: `url`, how many files are `missing`, and `why`."""
        self._failures = 0
        while self._missing() and time.monotonic() < deadline:
            pause_s = self.send(last=True, until=lambda: time.monotonic() >= deadline)
            if self._missing():
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        url = f"{self._at.scheme}://{self._root or self._at.path}"
        missing = len(self._missing())
        return {"url": url, "missing": missing, "why": (self._why or "no time was left") if missing else ""}

    # ---- what

    def _missing(self) -> list[str]:
        return list(self._to_send(last=True))

    def _to_send(self, last: bool) -> Iterator[str]:
        """Yield the files that are new or have changed since they were sent, the run's JSON first."""
        grows = last or time.monotonic() - self._grown_at > _GROWING_S
        if grows:
            self._grown_at = time.monotonic()
        for path in sorted(self._files(last), key=lambda path: path.parent.name != "run"):
            name = path.relative_to(self._folder).as_posix()
            known = self._sent.get(name)
            if known and known[2]:
                continue
            with contextlib.suppress(OSError):  # it has been moved or removed
                is_growing = path.suffix == ".arrow" and not _is_whole(path)
                if is_growing and not last and not (grows and path.parts[-3] in _GROWING):
                    continue
                if known is None or known[:2] != _state(path):
                    yield name

    def _files(self, last: bool) -> Iterator[Path]:
        """All files of the folder but unfinished ones and those that the UI or the agent keep for themselves."""
        for folder, folders, files in os.walk(self._folder):
            here = Path(folder)
            folders[:] = [name for name in folders if name != "lanes"]
            hidden = last and here.name != "run"
            yield from (here / name for name in files if hidden or not name.startswith("."))

    # ---- how

    def _finish(self, futures: dict[Future[None], str], until: Callable[[], bool]) -> bool:
        """Say whether all were sent. If the storage refuses, the rest is left for later."""
        pending, failures = set(futures), 0
        while pending and not until():
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in done:
                error = None if future.cancelled() else future.exception()
                if error is not None:
                    failures += 1
                    self._why = " ".join(str(error).split()) or type(error).__name__
            if failures >= _AT_ONCE:
                pending = {future for future in pending if not future.cancel()}
        self._under_way = {future: futures[future] for future in pending if not future.cancel()}
        return not failures and not pending

    def _connect(self) -> None:
        system, root = file_system(self._at, attempts=1)
        self._root = self._root or self._free(system, root)
        self._system = system

    def _free(self, system: FileSystem, root: str) -> str:
        """Choose the folder in the storage: as asked for, with `-2` and so on behind it where another run has that."""
        from pyarrow.fs import FileSelector

        own = {said.get(key) for said in map(_json, self._folder.glob("run/node=*.json")) for key in ("agent", "peer")}
        number, free = 1, root
        while True:
            found = system.get_file_info(FileSelector(f"{free}/run", allow_not_found=True))
            states = [entry.path for entry in found if entry.is_file and entry.base_name.startswith("node=")]
            said = [json.loads(system.open_input_stream(path).read()) for path in states]
            if not said or any({state.get("agent"), state.get("peer")} & (own - {None}) for state in said):
                return free
            number += 1
            free = f"{root}-{number}"

    def _send(self, name: str) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        path, target, system = self._folder / name, f"{self._root}/{name}", self._system
        assert system is not None
        try:
            state, whole = _state(path), path.suffix == ".arrow" and _is_whole(path)
        except FileNotFoundError:  # moved or removed since it was seen
            return
        if name.startswith("run/node="):
            with system.open_output_stream(target) as stream:  # what is evicted here stays there
                stream.write(json.dumps(_json(path) | {"kept_since_ns": None}, indent=1).encode())
        else:
            here = LocalFileSystem()
            copy_files(str(path), target, source_filesystem=here, destination_filesystem=system, use_threads=False)
        self._sent[name] = [*state, int(whole)]

    def _remember(self) -> None:
        path = self._folder / "run" / _DONE
        with contextlib.suppress(OSError):
            path.with_name(f"{_DONE}.new").write_text(json.dumps({"root": self._root, "sent": dict(self._sent)}))
            os.replace(path.with_name(f"{_DONE}.new"), path)


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _is_whole(path: Path) -> bool:
    """Say whether this file of rows has its footer, without which it is still written. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(_SEAL)))
        return file.read() == _SEAL


def _json(path: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(path.read_bytes())
    return said


def _serve(uploader: Uploader) -> None:
    """Serve until the agent is gone: each of its lines is a deadline for the upload, and is answered."""
    deadlines: SimpleQueue[float | None] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            deadlines.put(float(line))
        deadlines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    pause_s, announced, has_finished = 0.0, set[str](), False
    while True:
        try:
            deadline = deadlines.get(timeout=pause_s)
        except Empty:
            pause_s = uploader.send(until=lambda: not deadlines.empty())
            new = set(uploader.arrived) - announced
            announced |= new
            if new:
                print(json.dumps({"arrived": sorted(new)}), flush=True)
            continue
        if deadline is None:
            break
        print(json.dumps({"finished": uploader.finish(deadline)}), flush=True)
        has_finished = True
    if not has_finished:
        uploader.finish(time.monotonic() + _ENDING_S)


def main(argv: list[str] | None = None) -> None:
    """Send the folder's files until standard input ends, or what there is now within so many seconds."""
    parser = argparse.ArgumentParser(prog="rankscope.collectors.agent.uploader", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("url", help="where it goes")
    parser.add_argument("--within", type=float, help="seconds; then what came of it is printed as JSON")
    said = parser.parse_args(argv)
    at = location(said.url)
    if at is None:
        raise BadInput(f"{said.url} is no URL")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends when the agent does
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    with contextlib.suppress(OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    uploader = Uploader(said.folder, at)
    with contextlib.suppress(BrokenPipeError):
        if said.within is None:
            _serve(uploader)
        else:
            print(json.dumps(uploader.finish(time.monotonic() + said.within)), flush=True)
    os._exit(0)  # without those that a storage keeps waiting


if __name__ == "__main__":
    main()
