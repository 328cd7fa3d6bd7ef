"""A report that would not fit into memory says so, in one line, before it begins."""

import json

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.errors import BadInput
from rankscope.profiler.commands import import_

MEBI = 1 << 20


def machine(root, *, free_mib, mib=None, limit="max"):
    """A machine with so much free memory, and the group of this process: what it holds and may hold, in MiB."""
    proc, group = root / "proc", root / "cgroup" / "job" / "task"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free_mib * 1024} kB\nSwapFree: 0 kB\n")
    (proc / "self" / "status").write_text("Name: python\nVmRSS: 102400 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/task\n")
    if mib:
        (group.parent / "memory.max").write_text(limit if limit == "max" else str(limit * MEBI))
        (group.parent / "memory.current").write_text(str(mib * MEBI))
        (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {10 * MEBI}\nactive_file {20 * MEBI}\n")
    return proc, root / "cgroup"


@pytest.mark.parametrize(
    ("group", "mib"),
    [
        ({}, 1000),
        ({"mib": 300, "limit": "max"}, 1000),
        ({"mib": 300, "limit": 500}, 200 + 30),  # what files hold in memory can be given up
        ({"mib": 300, "limit": 5000}, 1000),
    ],
)
def test_free_is_what_the_machine_and_each_control_group_leave(tmp_path, group, mib):
    """This process holds 100 MiB already."""
    assert memory_budget.available_bytes(*machine(tmp_path, free_mib=1000, **group)) == (mib + 100) * MEBI


def test_where_the_system_does_not_say_nothing_is_refused(tmp_path):
    assert memory_budget.available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize("imported", [False, True])
def test_a_trace_that_does_not_fit_is_one_clear_line(tmp_path, monkeypatch, imported):
    """Three kernels and no launch; 0.16 GB are needed whatever the trace, and 0.1 GB are free."""
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "dur": 1, "args": {"stream": 7, "device": 0}}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [{**event, "ts": ts} for ts in (1, 2, 3)]}))
    if imported:
        import_.command([path], tmp_path / "run")
        path = tmp_path / "run"
    trace = Trace.open(path)
    assert trace.reader.rows("kernels") == 3
    assert diagnose(trace).device[0].busy_ns == 3000
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 100_000_000)
    with pytest.raises(BadInput, match=r"3 kernels and 0 launches need about 0.2 GB, and 0.1 GB are free\. Give the"):
        diagnose(trace)
