"""Which rank ended first, of what and at which step: real torchrun jobs, and rows of `exits` made by hand."""

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import rank_failure
from rankscope.collectors.agent.oom_kills import OomKills
from support.paths import SCRIPTS

JOB = SCRIPTS / "one_rank_fails.py"
RANKSCOPE = [sys.executable, "-m", "rankscope"]
S = 1_000_000_000
KERNEL_KEEPS_STATUS = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 15)


def failing(folder: Path, how: str) -> tuple[pl.DataFrame, dict]:
    """`exits` and the report of a job of three ranks, of which rank 2 ends at step 12."""
    command = [*RANKSCOPE, "run", "--out", "run", "--no-report", "--standalone", "--nproc-per-node", "3", str(JOB), how]
    subprocess.run(command, cwd=folder, timeout=100, check=False, capture_output=True)
    done = subprocess.run([*RANKSCOPE, "report", "run", "--json", "-"], cwd=folder, capture_output=True, timeout=100)
    return rankscope.open(folder / "run").table("exits").sort("rank").collect(), json.loads(done.stdout)


@pytest.mark.skipif(not KERNEL_KEEPS_STATUS, reason="torchrun may have waited for the rank before its status is read")
@pytest.mark.real_job
def test_a_rank_that_was_killed_died_first_and_nothing_hangs(tmp_path):
    exits, report = failing(tmp_path, "kill")
    assert exits["signal"][2] == signal.SIGKILL
    assert (exits["bye_ns"][2], exits["error"][2]) == (None, None)
    first = report["findings"][0]
    assert (first["detector"], first["ranks"]) == ("rank_failure", [2])
    assert first["title"] == "Rank 2 died first (SIGKILL) at step 12; the other ranks then waited in allreduce"
    assert "hang" not in {finding["detector"] for finding in report["findings"]}
    assert report["verdict"].startswith(first["title"])


@pytest.mark.real_job
def test_a_rank_that_raised_failed_first_with_its_exception_and_line(tmp_path):
    exits, report = failing(tmp_path, "raise")
    assert exits["error"][2] == "ValueError: no label for sample 7"
    line = next(n for n, line in enumerate(JOB.read_text().splitlines(), 1) if "raise ValueError" in line)
    assert exits["place"][2] == f"{JOB}:{line} (<module>)"
    assert [error is None or "gloo" in error for error in exits["error"][:2]] == [True, True]
    (finding,) = (finding for finding in report["findings"] if finding["detector"] == "rank_failure")
    title = "Rank 2 failed first (ValueError: no label for sample 7) at step 12"
    assert (finding["ranks"], finding["title"], finding["where"]) == (
        [2],
        f"{title}; the other ranks then waited in allreduce",
        exits["place"][2],
    )


@pytest.mark.real_job
def test_a_rank_that_skipped_an_operation_is_the_cause_of_another_ones_crash(tmp_path):
    """gloo ends a rank that gets more bytes than it expects, and torchrun the last one, maybe before it gets there."""
    _, report = failing(tmp_path, "skip")
    first = report["findings"][0]
    of_three = "Rank 2 does allreduce of 256 bytes where the others do allreduce of 12 bytes: desynchronized"
    of_two = "Ranks {} do not do the same in one operation: desynchronized"
    named = ",".join(map(str, first["ranks"]))
    assert (first["detector"], first["title"]) == ("rank_failure", of_three if named == "2" else of_two.format(named))
    assert named in ("2", "0,2", "1,2")
    assert first["where"].startswith("allreduce number ")
    assert report["verdict"].startswith(first["title"])


@pytest.mark.real_job
def test_a_job_that_ends_well_has_an_exit_per_rank_and_no_failure(tmp_path):
    exits, report = failing(tmp_path, "not at all")
    assert exits["rank"].to_list() == [0, 1, 2]
    assert set(exits["exit_code"]) <= ({0} if KERNEL_KEEPS_STATUS else {0, None})
    assert (exits["bye_ns"] <= exits["end_ns"]).all()
    assert "rank_failure" in report["healthy"]


GLOO = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37086"


def ended(rank, at_s, *, code=None, signal=None, error=None, bye=False, oom_kills=0, begun_s=None, op_ended=True):
    """A row of `exits` of a rank whose last operation lacked a rank if it did not end."""
    row = {"rank": rank, "failed_ns": at_s * S, "end_ns": at_s * S, "exit_code": code, "signal": signal}
    row |= {"bye_ns": at_s * S if bye else None, "oom_kills": oom_kills, "error": error, "place": "train.py:7 (main)"}
    row |= {"step": 41, "begun_ns": (at_s - 1 if begun_s is None else begun_s) * S}
    return row | {"op": "allreduce", "op_end_ns": at_s * S - 1 if op_ended else None, "op_is_whole": op_ended}


def found(*rows):
    return [(f.ranks, f.title) for f in rank_failure.detect(pl.DataFrame(rows, infer_schema_length=None))]


def operations(*sizes, seq=61, op="allreduce", start_s=45):
    """Rows of what ranks 0, 1, … did in one operation of group 7, in which not all of them ended."""
    kept = {"group_id": 7, "seq": seq, "dtype": "float32", "instance_id": None, "end_ns": None}
    ops = op if isinstance(op, list) else [op] * len(sizes)
    return [
        {"rank": rank, "op": ops[rank], "size_bytes": size, "start_ns": start_s * S + rank} | kept
        for rank, size in enumerate(sizes)
    ]


def whole(rows, instance_id):
    return [row | {"instance_id": instance_id} for row in rows]


def failed_with(collectives, *rows):
    groups = pl.DataFrame({"group_id": [7], "name": ["0"], "role": ["default_pg"]})
    exits, seen = (pl.DataFrame(made, infer_schema_length=None) for made in (rows, collectives))
    (finding,) = rank_failure.detect(exits, None, groups, seen)
    return finding


def test_ranks_that_do_not_do_the_same_are_the_cause_of_an_abort():
    aborted = ended(0, 50, signal=6, op_ended=False)
    lost = ended(3, 49.9, code=1, bye=True, error=GLOO)
    before = whole(operations(64, 64, 64, 64, seq=60), 3)
    finding = failed_with([*before, *operations(12, 64, 12, 12)], aborted, lost)
    does = "Rank 1 does allreduce of 64 bytes where the others do allreduce of 12 bytes: desynchronized"
    assert (finding.ranks, finding.title, finding.where) == ((1,), does, "allreduce number 61 of group 0")
    assert finding.advice.startswith("Rank 0 died first (SIGABRT) at step 41")
    notes = [seen.note for seen in finding.evidence]
    assert notes[:2] == ["allreduce of 64 bytes", "allreduce of 12 bytes"]
    assert notes[4:] == ["SIGABRT in train.py:7 (main)", f"100 ms earlier: {GLOO}"]
    finding = failed_with(operations(64, 64, 64, op=["allreduce", "allreduce", "barrier"]), aborted)
    assert finding.title == "Rank 2 does barrier where the others do allreduce: desynchronized"


def test_a_rank_that_went_on_after_the_operation_is_compared_too():
    """The root of a broadcast does not wait."""
    ahead = [row for row in operations(64, 64, 64, seq=62) if row["rank"] == 0]
    unlike = [*operations(12, 64, 64, op="broadcast"), *ahead]
    assert failed_with(unlike, ended(1, 50, signal=6)).ranks == (0,)
    behind = [row for row in operations(64, 64, 64, seq=60) if row["rank"] == 2]
    seen = [row for row in unlike if row["rank"] < 2]
    assert failed_with([*seen, *behind], ended(1, 50, signal=6)).ranks == (0, 1), "rank 2 never came to it"


def test_what_is_no_desync_keeps_the_rank_that_failed_first():
    unlike = operations(12, 64, 12)
    raised = ended(0, 50, code=1, bye=True, error="ValueError: no label")
    assert failed_with(unlike, raised).title.startswith("Rank 0 failed first (ValueError: no label)")
    killed = ended(0, 50, signal=9, oom_kills=1)
    assert failed_with(unlike, killed).title.startswith("Rank 0 died first (SIGKILL, killed by the OOM killer)")
    aborted = ended(0, 50, signal=6)
    assert failed_with(operations(64, 64, 64), aborted).title.startswith("Rank 0 died first (SIGABRT)")
    sparse = [*whole(operations(8, 24, 16, seq=60), 3), *unlike]
    assert failed_with(sparse, aborted).ranks == (0,), "its sizes have always differed"
    assert failed_with(operations(12, 64, 12, op="gather"), aborted).ranks == (0,)


def test_a_kill_for_want_of_memory_is_named_and_who_waited():
    others = [ended(r, 60, code=1, bye=True, error=GLOO, op_ended=False) for r in (0, 1, 3)]
    title = "Rank 2 died first (SIGKILL, killed by the OOM killer) at step 41; the other ranks then waited in allreduce"
    assert found(*others, ended(2, 61, signal=9, oom_kills=1)) == [((2,), title)], "noticed after the others' errors"


def test_what_follows_from_the_end_of_another_rank_is_no_cause():
    stopped = [ended(rank, 50, signal=15) for rank in (0, 1)]
    left = ended(2, 49, code=0, bye=True)
    assert found(*stopped, left) == [], "a job that was ended from outside"
    assert found(*stopped) == []
    assert found(ended(0, 50, code=1, bye=True, error="KeyboardInterrupt"), *stopped) == []
    lost = ended(0, 50, code=1, bye=True, error=GLOO)
    ((ranks, title),) = found(lost, ended(1, 51, signal=15), left)
    assert (ranks, title) == (
        (2,),
        "Rank 2 ended while the others continued (exit code 0) at step 41; the other ranks then waited in allreduce",
    )
    assert [ranks for ranks, _ in found(lost, ended(1, 51, signal=15))] == [(0,)], "with rank 2 not seen"


@pytest.mark.parametrize(("begun_s", "reported"), [(41, True), (40, False)])
def test_a_job_that_hung_for_10_s_before_is_one_that_hung(begun_s, reported):
    aborted = ended(3, 50, signal=6, begun_s=begun_s)
    assert bool(found(aborted, ended(0, 51, signal=15))) == reported
    assert found(ended(3, 50, signal=11, begun_s=begun_s)), "a crash has a cause of its own"
    assert found(ended(3, 50, signal=9, oom_kills=2, begun_s=begun_s))


def test_the_oom_killers_count_is_read_from_the_control_group(tmp_path):
    group = tmp_path / "cgroup" / "job"
    (tmp_path / "proc" / "7").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/job\n")
    (tmp_path / "proc" / "vmstat").write_text("oom_kill 90\n")
    (group / "memory.events").write_text("oom 3\noom_kill 3\n")
    counter = OomKills(7, tmp_path / "proc", tmp_path / "cgroup")
    assert counter.count() == 0
    (group / "memory.events").write_text("oom 4\noom_kill 5\n")
    assert counter.count() == 2
    (group / "memory.events").unlink()
    assert counter.count() is None, "the group is gone"
    (tmp_path / "proc" / "7" / "cgroup").write_text("4:memory:/job\n")
    (tmp_path / "cgroup" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "cgroup" / "memory" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert OomKills(7, tmp_path / "proc", tmp_path / "cgroup").count() == 0
    assert OomKills(8, tmp_path / "proc", tmp_path / "nowhere").count() == 0, "the host's"
