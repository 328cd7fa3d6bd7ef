"""The jobs of `scenarios`, one after the other, by one parent of all their ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.paths import ROOT

NAMES = re.findall(r"^@harm\ndef (\w+)", Path(__file__).with_name("scenarios.py").read_text(), re.MULTILINE)
DID = ("all-reduces", "steps")  # what is counted of each rank


@dataclass(frozen=True)
class Rank:
    """How a rank ended, what it printed, and how many all-reduces and optimizer steps it did."""

    pid: int
    code: int
    stdout: str
    stderr: str
    did: dict[str, int]

    @property
    def complaints(self) -> int:
        return sum(self.stderr.count(word) for word in ("Traceback", "Exception ignored", "Fatal"))


class Jobs:
    """The parent of all ranks, and the jobs that have ended, by scenario and hook ("" is without rankscope)."""

    def __init__(self, folder: Path, environments: dict[str, dict[str, str]], **environment: str) -> None:
        self._folder = folder
        self._environments = environments
        environment |= {"PYTHONPATH": str(ROOT / "tests"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-m", "support.harm.parent"]
        self.parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.ended: dict[str, dict[str, list[Rank]]] = {}

    def run(self, scenario: str) -> None:
        free = [socket.create_server(("127.0.0.1", 0)) for _ in self._environments]
        ports = [each.getsockname()[1] for each in free]
        for each in free:
            each.close()
        jobs = []
        for port, (hook, environment) in zip(ports, self._environments.items(), strict=True):
            folder = self._folder / scenario / (hook or "without")
            folder.mkdir(parents=True)
            jobs.append({"folder": str(folder), "port": port, "environment": environment})
        assert self.parent.stdin
        assert self.parent.stdout
        print(json.dumps({"scenario": scenario, "jobs": jobs}), file=self.parent.stdin, flush=True)
        answers = iter(json.loads(self.parent.stdout.readline()))
        self.ended[scenario] = {
            hook: [_rank(Path(job["folder"]), rank, next(answers)) for rank in range(2)]
            for hook, job in zip(self._environments, jobs, strict=True)
        }

    def end(self) -> None:
        assert self.parent.stdin
        self.parent.stdin.close()
        assert self.parent.wait(20) == 0


def recorded_by(agent: str, cache: Path) -> dict[str, str]:
    """The environment of a job that is recorded, with the hook in C++ if that is built in the cache."""
    return {"RANKSCOPE_AGENT": agent, "XDG_CACHE_HOME": str(cache), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def _rank(folder: Path, rank: int, answer: dict[str, Any]) -> Rank:
    said = {kind: (folder / f"{kind}-{rank}").read_text(errors="replace") for kind in ("stdout", "stderr")}
    did = dict(zip(DID, answer["counts"], strict=True))
    return Rank(pid=answer["pid"], code=answer["code"], did=did, **said)
