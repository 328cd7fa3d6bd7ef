"""Tasks that worker processes of the tests import."""

import os
import signal
import time
from pathlib import Path

from rankscope.errors import BadInput


def where(number: int) -> tuple[int, int]:
    print("what a task prints is no answer")
    return number, os.getpid()


def killed(number: int, marks: Path, times: int) -> int:
    """Its process is killed the first `times` times that number 1 runs."""
    if number == 1 and len(list(marks.iterdir())) < times:
        (marks / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refused(number: int) -> int:
    if number == 1:
        raise BadInput("file 1 is no trace")
    return number


def endless(begun: Path) -> None:
    begun.touch()
    time.sleep(3600)


def missing(folder: str) -> bool:
    return False
