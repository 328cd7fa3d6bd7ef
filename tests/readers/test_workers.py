"""Tasks in worker processes give what they give in this one, and one that is killed costs its task only."""

import json
import os
import signal
from pathlib import Path

import pytest

from rankscope.analysis.readers import workers
from rankscope.analysis.readers.workers import Lost, each
from rankscope.analysis.runs.trace import Trace
from rankscope.errors import BadInput

SECONDS = [1.0, 1.0, 1.0]  # worth worker processes


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


def test_small_tasks_stay_in_this_process():
    assert list(each(where, [(0,), (1,)], [0.1, 0.1])) == [(0, os.getpid()), (1, os.getpid())]


def test_results_come_in_order_from_other_processes():
    found = list(each(where, [(0,), (1,), (2,)], SECONDS))
    assert [number for number, _ in found] == [0, 1, 2]
    assert os.getpid() not in {process for _, process in found}


@pytest.mark.parametrize(("times", "second"), [(1, 1), (2, Lost("the process that read it was killed 2 times"))])
def test_a_killed_worker_costs_its_task_at_most(tmp_path, times, second):
    """Killed once, the task runs again; killed twice, it is lost, and no other is."""
    assert list(each(killed, [(n, tmp_path, times) for n in range(3)], SECONDS)) == [0, second, 2]


def test_what_a_task_raises_is_raised_here():
    with pytest.raises(BadInput, match="file 1 is no trace"):
        list(each(refused, [(0,), (1,), (2,)], SECONDS))


def test_traces_read_alike_in_worker_processes(tmp_path, monkeypatch):
    for rank in range(3):
        kernels = [kernel(f"k{i % 7}", ts=100 * i + rank, dur=60 + rank) for i in range(200)]
        trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": kernels}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    here = Trace.open(tmp_path)
    monkeypatch.setattr(workers, "_WORTH_S", 0)
    there = Trace.open(tmp_path)
    assert there.tables() == here.tables()
    assert there.gaps() == here.gaps()
    for table in here.tables():
        assert there.table(table).collect().equals(here.table(table).collect()), table


def kernel(name: str, *, ts: int, dur: int) -> dict[str, object]:
    where = {"pid": 0, "tid": 7, "args": {"device": 0, "stream": 7, "correlation": ts}}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, **where}
