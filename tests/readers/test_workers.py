"""Tasks in worker processes give what they give in this one, and one that is killed costs its task only."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.readers import dask_cluster, workers
from rankscope.analysis.readers.dask_cluster import on_cluster
from rankscope.analysis.readers.kineto.scan import read_file
from rankscope.analysis.readers.workers import Lost, begun, each
from rankscope.analysis.report import json_form
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.dashboard.state import State
from rankscope.errors import BadInput, RankscopeError
from record import write
from simulate import Job, healthy_resources, run
from support.agent import wait_for
from support.command_line import rankscope_
from support.paths import DATA
from support.tasks import endless, killed, missing, refused, where

SECONDS = [4.0, 4.0, 4.0]  # worth worker processes


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


def test_tasks_begin_before_results_are_asked_for_and_are_given_up_with_the_context(tmp_path):
    files = [tmp_path / str(number) for number in range(2)]
    with begun(endless, [(file,) for file in files], SECONDS[:2]):
        wait_for(lambda: all(file.exists() for file in files))
        assert len(workers_of_this_process()) == 2
    assert not workers_of_this_process()


@pytest.mark.parametrize(("cpu_s", "more"), [(12.0, 1), (4.0, 0)])
def test_while_this_process_works_one_fewer_does_and_comes_when_enough_is_left(cpu_s, more):
    with begun(time.sleep, [(0.5,), (0.5,)], [cpu_s, cpu_s], beside=1) as found:
        assert len(workers_of_this_process()) == 1
        assert list(found) == [None, None]
        assert len(workers_of_this_process()) == 1 + more


def test_workers_say_nothing_when_the_process_that_asked_is_gone():
    """What they would print came into the terminal after the prompt."""
    code = """
import os, time
from rankscope.analysis.readers.workers import begun
with begun(time.sleep, [(1.0,), (1.0,)], [4.0, 4.0]):
    time.sleep(0.5)
    os._exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60)  # theirs, too
    assert (ended.returncode, ended.stderr) == (7, "")


def workers_of_this_process() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "serve" in command_of(one)]


def command_of(process: psutil.Process) -> str:
    """The command line of a process that runs; of one that another test ended, and did not wait for, none."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also one that has ended and was not waited for yet
        return ""


def test_what_a_task_raises_is_raised_here():
    with pytest.raises(BadInput, match="file 1 is no trace"):
        list(each(refused, [(0,), (1,), (2,)], SECONDS))


def test_traces_read_alike_in_worker_processes(tmp_path, monkeypatch):
    traces(tmp_path)
    check_alike(tmp_path, monkeypatch)


def kernel(name: str, *, ts: int, dur: int) -> dict[str, object]:
    where = {"pid": 0, "tid": 7, "args": {"device": 0, "stream": 7, "correlation": ts}}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, **where}


NSIGHT = DATA / "nsys" / "mfu_2gpu_before.sqlite"


@pytest.mark.skipif(not NSIGHT.exists(), reason=f"the public export is not at {NSIGHT}")
def test_exports_of_nsight_read_alike_in_worker_processes(tmp_path, monkeypatch):
    for number in range(2):
        shutil.copy(NSIGHT, tmp_path / f"report_{number}.sqlite")
    check_alike(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def cluster():
    """The address of a scheduler with two workers, processes of this machine."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made:
        yield made.scheduler_address


def test_results_of_a_dask_cluster_are_the_same(tmp_path, cluster):
    traces(tmp_path / "traces")
    here = tables_of(Trace.open(tmp_path / "traces"))
    with on_cluster(cluster):
        ran_by = {process for _, process in each(where, [(n,) for n in range(4)], [0.0] * 4)}
        assert tables_of(Trace.open(tmp_path / "traces")) == here
    assert os.getpid() not in ran_by


def test_a_killed_dask_worker_costs_its_task_at_most(tmp_path, cluster):
    """The worker is killed once; its task runs on the other one, or on the next."""
    with on_cluster(cluster):
        assert list(each(killed, [(n, tmp_path, 1) for n in range(3)], SECONDS)) == [0, 1, 2]


@pytest.mark.long
def test_the_report_of_a_dask_cluster_is_the_same_to_the_byte(tmp_path, monkeypatch, cluster):
    monkeypatch.chdir(tmp_path)
    traces(tmp_path / "traces")
    here, there = (rankscope_("report", "traces", "--json", "-", *more) for more in ([], ["--dask", cluster]))
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout == here.stdout
    done = rankscope_("import", "traces", "-o", "run", "--dask", cluster)
    assert done.returncode == 0, done.stderr


def test_a_long_run_is_judged_alike_on_a_dask_cluster(tmp_path, monkeypatch, cluster):
    """Of 80 steps a quarter fits at once: the others are three stretches, which the workers analyze."""
    job = Job(parallel="ddp", ranks=2, steps=80, seed=3)
    recorded = write(run(job, healthy_resources(job)), tmp_path / "run")
    rows = memory_budget.bytes_of_rows(Trace.open(recorded).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.26)
    here = json_form.render(read_run(recorded).report)
    shutil.rmtree(recorded / "summary")
    asked = []
    run_there = dask_cluster._begun
    monkeypatch.setattr(
        dask_cluster, "_begun", lambda client, task, of: asked.extend(of) or run_there(client, task, of)
    )
    with on_cluster(cluster):
        there = json_form.render(read_run(recorded).report)
    assert [stretches for _, _, _, stretches, *_ in asked] == [[(0, 19)], [(20, 39)], [(40, 59)]]
    assert there == here


def test_the_ui_reads_in_its_threads_on_a_dask_cluster(tmp_path, monkeypatch, cluster):
    traces(tmp_path / "traces")
    asked = []
    run = dask_cluster._begun
    monkeypatch.setattr(dask_cluster, "_begun", lambda client, task, of: asked.append(task) or run(client, task, of))
    state = State([tmp_path / "traces"])
    with on_cluster(cluster):
        state.start()
        state.wait(60)
    (key,) = state.keys
    assert state.report(key).ranks == (0, 1, 2), state.progress(key).error
    assert asked == [read_file]


def test_workers_that_do_not_see_the_temporary_folder_are_named(cluster, monkeypatch):
    monkeypatch.setattr(dask_cluster, "_sees", missing)
    with (
        pytest.raises(RankscopeError, match=r"Dask worker tcp://\S+ does not see \S+: set TMPDIR"),
        on_cluster(cluster),
    ):
        pass


def test_a_scheduler_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(dask_cluster, "_PATIENCE_S", 1)
    with (
        pytest.raises(RankscopeError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
        on_cluster("tcp://127.0.0.1:9"),
    ):
        pass


def traces(folder: Path) -> None:
    """Those of ranks 0 to 2 of 4."""
    folder.mkdir(exist_ok=True)
    for rank in range(3):
        kernels = [kernel(f"k{i % 7}", ts=100 * i + rank, dur=60 + rank) for i in range(200)]
        trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": kernels}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def tables_of(trace: Trace) -> dict[str, object]:
    return {"gaps": trace.gaps()} | {name: trace.table(name).collect().to_dicts() for name in trace.tables()}


def check_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tables_of(Trace.open(folder))
    monkeypatch.setattr(workers, "_WORTH_S", 0)
    assert tables_of(Trace.open(folder)) == here
