"""Builds the collectives hook in C++ for later jobs, once a job has run for a minute, where the node can spare it.

The compiler runs at the kernel's idle priority, as the first victim of a lack of memory, and ends with the agent.
`RANKSCOPE_DISABLE=build` leaves it off; `rankscope doctor --build` does the same at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from rankscope.collectors.free_memory import available_bytes
from rankscope.collectors.native import collectives_hook
from rankscope.collectors.switched_off import switched_off

__all__ = ["HookBuilder"]

BUILD_AFTER_NS = 60_000_000_000
FREE_BYTES = 8 << 30  # the compiler takes about 1.5 GB

clock = time.perf_counter_ns


class HookBuilder:
    """Checks at each flush whether to begin, and for the result; one build in the agent's life."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._is_off = "build" in switched_off(environment)
        self._process: subprocess.Popen[str] | None = None

    def look(self, first_rank_ns: int | None, torch_version: str) -> str | None:
        """Begin when it is time; return the result of the build, once, as a line for the run's JSON."""
        if self._process is not None:
            return self._result()
        if self._is_off or first_rank_ns is None or clock() - first_rank_ns < BUILD_AFTER_NS:
            return None
        self._is_off = True
        if not collectives_hook.is_wanted(torch_version) or (available_bytes() or 0) < FREE_BYTES:
            return None
        command = [sys.executable, "-m", "rankscope.collectors.native.collectives_hook"]
        with contextlib.suppress(OSError):
            to, nowhere = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=nowhere, stdout=to, stderr=nowhere, text=True, start_new_session=True
            )
        return None

    def finish(self) -> None:
        """End a build that is under way, and remove its files."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)

    def _result(self) -> str | None:
        process = self._process
        if process is None or process.stdout is None or process.stdout.closed or process.poll() is None:
            return None
        with process.stdout:
            return process.stdout.readline().strip() or None
