"""The command line, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MS = 1_000_000
RANK = {
    "start_ns": 0,
    "local_rank": 0,
    "world_size": 1,
    "node": 0,
    "hostname": "h",
    "pid": 1,
    "device": "cpu",
    "torch": "2.13",
    "python": "3.11",
    "command": "train.py",
}


def rankscope_(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankscope", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
