"""The agent's side of recording into object storage: the process that sends the run's files, and its answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.collectors.native.compiling import cache_folder

__all__ = ["LATE_S", "UPLOAD_S", "Upload", "missed", "remove_spool", "spool", "upload_rest"]

UPLOAD_S = 60.0  # after the job, for what has not arrived yet
LATE_S = 10.0  # for what is written after that: the report, or what has not arrived
_GRACE_S = 3.0
_RESTART_S = 10.0
_COMMAND = (sys.executable, "-m", "rankscope.collectors.agent.uploader")


def spool() -> Path:
    """Make a new folder of this user for a run on its way: in $TMPDIR, or where that is not set in the cache folder.

    Raises OSError.
    """
    scratch = os.environ.get("TMPDIR")
    above = Path(scratch, f"rankscope-spool-{os.getuid()}") if scratch else cache_folder() / "spool"
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-", time.gmtime()), dir=above))


def remove_spool(run: Path) -> None:
    """Remove the run's folder from the spool, all of it having arrived."""
    shutil.rmtree(run, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.parent.rmdir()


def missed(came: Mapping[str, Any], folder: Path) -> str:
    """Return how many files, where to, why, and where they are: as `finish` and `upload_rest` give it."""
    count = "how many is not known" if came["missing"] is None else came["missing"]
    return f"{count} ({came['url']}: {came['why']}); they are in {folder}"


def upload_rest(folder: Path, url: str) -> dict[str, Any]:
    """Send the folder's remaining files, after the agent; the result is that of `finish`."""
    command = [*_COMMAND, str(folder), url, "--within", str(LATE_S)]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, timeout=LATE_S + _GRACE_S, check=True)
        came: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return _no_answer(url)
    return came


def _no_answer(url: str) -> dict[str, Any]:
    return {"url": url, "missing": None, "why": "what sends them gave no answer"}


class Upload:
    """Sends a run's files to `url`. Only `finish` waits for the storage."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = float("-inf")
        self._heard = b""
        self._arrived: set[str] = set()
        self._result: dict[str, Any] | None = None

    def look(self, folder: Path) -> None:
        """Keep the process running, and read its answers."""
        self._folder = folder
        self._hear()
        if self._process is None and time.monotonic() - self._started_s > _RESTART_S:
            self._start()

    def has(self, path: Path) -> bool:
        """Say whether this sealed file has arrived."""
        return path.relative_to(self._folder).as_posix() in self._arrived

    def finish(self, folder: Path, within_s: float) -> dict[str, Any]:
        """Wait for the upload: `url`, how many files are `missing` at the deadline (None: unknown), `why`."""
        self._folder, self._result = folder, None
        deadline = time.monotonic() + within_s
        for _ in range(2):  # again, where it has died
            if self._process is None:
                self._start()
            self._ask(deadline)
            while self._process and self._result is None and time.monotonic() < deadline + _GRACE_S:
                assert self._process.stdout
                select.select([self._process.stdout], [], [], 0.5)
                self._hear()
            if self._result is not None:
                return self._result
        if self._process:
            self._process.kill()
        return _no_answer(self.url)

    def close(self) -> None:
        """End the process."""
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()

    def _start(self) -> None:
        self._started_s, self._heard = time.monotonic(), b""
        command = [*_COMMAND, str(self._folder), self.url]
        to, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command, stdin=to, stdout=to, stderr=nowhere, bufsize=0, cwd="/", start_new_session=True
            )
            assert self._process.stdout
            os.set_blocking(self._process.stdout.fileno(), False)

    def _ask(self, deadline: float) -> None:
        if self._process:
            assert self._process.stdin
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{deadline}\n".encode())

    def _hear(self) -> None:
        if self._process is None:
            return
        assert self._process.stdout
        with contextlib.suppress(BlockingIOError):
            while came := os.read(self._process.stdout.fileno(), 1 << 16):
                self._heard += came
            self._process.wait()
            self._process = None
        *lines, self._heard = self._heard.split(b"\n")
        for said in map(json.loads, lines):
            self._arrived |= set(said.get("arrived", ()))
            self._result = said.get("finished", self._result)
