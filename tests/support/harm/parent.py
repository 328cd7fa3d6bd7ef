"""A process that has imported torch once, and forks the ranks of one job after the other.

    PYTHONPATH=tests python -m support.harm.parent

Each line on standard input is JSON: a scenario, and its jobs, which run at once: a folder for what they print, a port,
and the environment that makes their ranks recorded. The answer is a line, too: how each rank of each job ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in each rank, which takes seconds

from support.harm.scenarios import RANKS, SCENARIOS, become_rank, counts

LONGEST_S = 60.0
HUNG = 999  # in place of a status
_OF_A_RANK = 2  # counts


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each rank looks through all of torch at its end
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        ranks: dict[int, int] = {}  # by process: number among all ranks of all jobs
        for number in range(len(counts)):
            counts[number] = 0
        for job in asked["jobs"]:
            for rank in range(RANKS):
                number = len(ranks)
                pid = os.fork()
                if pid == 0:
                    _become(rank, number, job)
                    SCENARIOS[asked["scenario"]]()
                    _leave()
                ranks[pid] = number
        print(json.dumps(_ended(ranks)), flush=True)


def _become(rank: int, number: int, job: dict[str, Any]) -> None:
    """Take the place of a rank, as a launcher gives it, and load what torch loads at the end of its import."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"]}
    os.environ.update({name: str(value) for name, value in place.items()} | job["environment"])
    for descriptor, kind in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(job["folder"], f"{kind}-{rank}"), os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    become_rank(rank, number * _OF_A_RANK)
    torch._import_device_backends()


def _leave() -> None:
    """End as a script does that has come to its end, but for taking torch apart, which takes 0.3 s.

    A scenario in which that matters, or that fails, ends by an exception.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)


def _ended(ranks: dict[int, int]) -> list[dict[str, Any]]:
    codes: dict[int, int] = {}
    until = time.monotonic() + LONGEST_S
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < until:
            time.sleep(0.002)
        else:
            for pid, number in ranks.items():
                if number not in codes:
                    codes[number] = HUNG
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    return [
        {"pid": pid, "code": codes[number], "counts": list(counts[number * _OF_A_RANK :][:_OF_A_RANK])}
        for pid, number in ranks.items()
    ]


if __name__ == "__main__":
    main()
