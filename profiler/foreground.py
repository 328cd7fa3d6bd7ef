"""Running a program in the foreground as if it had been started without us: signals, terminal and exit code."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping

__all__ = ["exit_like", "run_to_end"]

_WATCHED = {
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def run_to_end(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and give its exit code, -N if signal N ended it.

    It stays in our process group, so that the terminal's Ctrl-C, its input and job control reach it directly.
    A signal that a process sent to us is passed on, though not again within a second: `timeout` and schedulers signal
    the whole group too, and a third one would interrupt torchrun while it ends its ranks.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if our parent ignores it, children would vanish unseen
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        # CPython ignores these two, and a child would inherit that.
        ours = [signal.SIGPIPE, signal.SIGXFSZ]
        child = os.posix_spawnp(command[0], command, environment, setsigmask=mask, setsigdef=ours)
        passed_on_s: dict[int, float] = {}
        while True:
            arrived = signal.sigwaitinfo(_WATCHED)
            if arrived.si_signo == signal.SIGCHLD:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
            elif arrived.si_code <= 0:  # from a process; the terminal's have a positive code and reached the child too
                now_s = time.monotonic()
                if now_s - passed_on_s.get(arrived.si_signo, -math.inf) > 1:
                    passed_on_s[arrived.si_signo] = now_s
                    os.kill(child, arrived.si_signo)
    finally:
        while signal.sigtimedwait(_WATCHED, 0):  # what came for a child that is gone
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def exit_like(code: int) -> None:
    """Exit with the code, or for -N die of signal N, without a core file of our own."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # it has no reader
            stream.flush()
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
