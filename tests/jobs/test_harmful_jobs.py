"""Jobs that do to themselves what harms a recorder: each ends, prints and computes as without it.

Every scenario of `support/harm/scenarios.py` runs three times at once: without rankscope, and with each of the two
collectives hooks. One agent records all of them, one parent forks their ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.collectors.schema import OPS, REGION_KINDS
from support.agent import Agent
from support.harm.jobs import NAMES, Jobs, recorded_by

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
pytestmark = [
    pytest.mark.real_job,
    pytest.mark.skipif(os.geteuid() != 0, reason="some need root"),
    pytest.mark.timeout(900),  # the first test runs all jobs
]

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


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """All of them, one after the other, and the run folder."""
    folder = tmp_path_factory.mktemp("harm")
    agent = Agent(folder / "run")
    caches = {"Python": folder / "nothing is built"}
    with contextlib.suppress(pytest.skip.Exception):  # there is no compiler
        caches["C++"] = request.getfixturevalue("compiled_hook")
    made = Jobs(folder, {"": {}} | {hook: recorded_by(agent.name, cache) for hook, cache in caches.items()})
    for name in NAMES:
        made.run(name)
    made.end()
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
