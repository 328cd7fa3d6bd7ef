"""Jobs that do to themselves what harms a recorder: each ends, prints and computes as without it.

Every scenario of `support/harm/scenarios.py` runs three times at once: without rankscope, and with each of the two
collectives hooks. One agent records all of them, one parent forks their ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import rankscope
from rankscope.collectors.schema import OPS, REGION_KINDS
from support.agent import Agent
from support.paths import ROOT

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
pytestmark = [pytest.mark.real_job, pytest.mark.skipif(os.geteuid() != 0, reason="some need root")]

NAMES = re.findall(r"^@harm\ndef (\w+)", (ROOT / "tests/support/harm/scenarios.py").read_text(), re.MULTILINE)
# What is not recorded there, a gap or a line on standard error says; nothing may be missing anywhere else.
LOSES_RECORDS = {
    "closes_descriptors_that_it_does_not_know",
    "closes_unix_sockets_and_takes_their_numbers",
    "is_another_user_from_the_start",
    "is_interrupted_by_errors",
    "is_interrupted_by_exits",
    "removes_modules",
    "replaces_what_the_interpreter_has",
}
# There no goodbye is expected either.
LEAVES_WITHOUT_A_WORD = {
    "becomes_another_program",
    "closes_standard_streams",
    "crashes_under_faulthandler",
    "exits_while_a_daemon_thread_communicates",
    "kills_itself",
    "leaves_by_os_exit",
}
KINDS = {"all-reduces": ("collectives", OPS.index("allreduce")), "steps": ("regions", REGION_KINDS.index("optimizer"))}


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

    def __init__(self, folder: Path, environments: dict[str, dict[str, str]]) -> None:
        self._folder = folder
        self._environments = environments
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-m", "support.harm.parent"]
        self.parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
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


def _rank(folder: Path, rank: int, answer: dict[str, Any]) -> Rank:
    said = {kind: (folder / f"{kind}-{rank}").read_text(errors="replace") for kind in ("stdout", "stderr")}
    did = dict(zip(KINDS, answer["counts"], strict=True))
    return Rank(pid=answer["pid"], code=answer["code"], did=did, **said)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """All of them, one after the other, and the run folder."""
    folder = tmp_path_factory.mktemp("harm")
    agent = Agent(folder / "run")
    caches = {"Python": str(folder / "nothing is built")}
    with contextlib.suppress(pytest.skip.Exception):  # there is no compiler
        caches["C++"] = str(request.getfixturevalue("compiled_hook"))
    recorded = {
        hook: {"RANKSCOPE_AGENT": agent.name, "XDG_CACHE_HOME": cache, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
        for hook, cache in caches.items()
    }
    made = Jobs(folder, {"": {}} | recorded)
    for name in NAMES:
        made.run(name)
    made.parent.stdin.close()
    assert made.parent.wait(20) == 0
    agent.end()
    return made.ended, folder / "run"


@pytest.mark.parametrize("scenario", NAMES)
def test_a_job_ends_prints_and_computes_as_without_rankscope(jobs, scenario):
    plain, *recorded = jobs[0][scenario].values()
    for ranks in recorded:
        for one, other in zip(plain, ranks, strict=True):
            assert (other.code, other.stdout) == (one.code, one.stdout), other.stderr
            if one.code >= 0:  # else a crash says what it comes to
                assert other.complaints == one.complaints, other.stderr


@pytest.mark.parametrize("scenario", NAMES)
def test_what_was_not_recorded_is_named(jobs, scenario):
    ended, run = jobs
    known = {report["pid"]: report for report in json.loads((run / "run/node=00000.json").read_text())["ranks"]}
    for hook in ended[scenario].keys() - {""}:
        for number, rank in enumerate(ended[scenario][hook]):
            if rank.pid not in known:
                assert not any(rank.did.values()) or "rankscope: this rank is not recorded" in rank.stderr
                continue
            if scenario not in LOSES_RECORDS:
                assert known[rank.pid]["bye"] == (scenario not in LEAVES_WITHOUT_A_WORD)
            of = run, number, known[rank.pid]["world"]
            found = {what: _rows(*of, table, kind) for what, (table, kind) in KINDS.items()}
            if any(found[what] < did for what, did in rank.did.items()):
                assert scenario in LOSES_RECORDS, found
                said = _table(*of, "gaps")["table"].to_list()
                assert {"*", "collectives", "regions"} & set(said), (hook, number, found, rank.did)


def _rows(run: Path, rank: int, world: str, table: str, kind: int) -> int:
    return _table(run, rank, world, table).filter(pl.col("op" if table == "collectives" else "kind") == kind).height


def _table(run: Path, rank: int, world: str, name: str) -> pl.DataFrame:
    parts = sorted((run / name / f"rank={rank:05}").glob(f"w{world}-*.arrow"))
    nothing = pl.DataFrame(schema={"table": pl.String, "kind": pl.UInt8, "op": pl.UInt8})
    return pl.concat([pl.read_ipc(part) for part in parts]) if parts else nothing


def test_the_run_of_all_these_jobs_is_read(jobs):
    report = rankscope.diagnose(rankscope.open(jobs[1]))
    assert report.ranks == (0, 1)
