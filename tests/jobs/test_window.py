"""Deep windows and live stacks: real gloo jobs that are looked into while they run."""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import rankscope
from rankscope.analysis.report import html, terminal
from rankscope.analysis.runs.deep_windows import self_times, with_windows
from rankscope.analysis.timeline.build import build_timeline
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.deep_windows import ask
from rankscope.collectors.rank.window import _Steps
from rankscope.collectors.schema import REGION_KINDS
from rankscope.profiler.window import convert, place
from support.paths import DATA, ROOT

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")

THREE_NODES = ROOT / "examples/three_nodes.py"
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))),
    reason="network namespaces need root, ip and unshare",
)
TRACES = DATA / "kineto" / "torchrec" / "resnet18"
HEADER = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(4, 8)).sum().backward()
    time.sleep(0.01)
    optimizer.step()
"""


def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def trigger(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "trigger", str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def standing_still(run: Path) -> set[int]:
    """The ranks whose main thread is in `stand_still`, while all others are in an operation of `go_on`."""
    done = trigger(run, "--stacks")
    assert done.returncode == 0, done
    ranks = {int(text.split(",")[0]): text.split("  MainThread\n")[1] for text in done.stdout.split("rank ")[1:]}
    assert all("train.py" in stack for stack in ranks.values())
    still = {rank for rank, stack in ranks.items() if " stand_still\n" in stack}
    return still if all(" all_reduce\n" in ranks[rank] for rank in set(ranks) - still) else set()


def requests(run: Path) -> dict[int, dict]:
    """What came of each request on node 0."""
    answers = (run / "run").glob("window=*.node=00000.json")
    return {int(path.name[7:11]): json.loads(path.read_bytes()) for path in answers}


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(HEADER + textwrap.dedent(body))
    return path


@pytest.mark.alone
@pytest.mark.real_job
def test_a_running_job_is_sampled_and_its_report_has_the_windows(tmp_path):
    """Two ranks: steps 3 and 4, a window of both, one of rank 1 alone, stacks; the report has it on the run's clock."""
    train = script(
        tmp_path,
        """
        def stand_still():
            while Path(sys.argv[1] + ".hang").exists():
                time.sleep(0.1)
        def go_on():
            if dist.get_rank() == 1:
                stand_still()
            more = torch.tensor(float(not Path(sys.argv[1]).exists()))
            dist.all_reduce(more, dist.ReduceOp.MIN)
            return bool(more)
        while go_on():
            step()
        """,
    )
    run, stop, hang = (tmp_path / name for name in ("run", "stop", "stop.hang"))
    options = ["--out", str(run), "--no-report", "--profile-steps", "3-4", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "rankscope", "run", *options, str(train), str(stop)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: (run / "regions" / "rank=00001").exists())
        both = trigger(run, "--count", "2")
        assert (both.returncode, both.stdout.startswith("2 steps of ranks 0,1: ")) == (0, True), both
        alone = trigger(run, "--ranks", "1", "--count", "1")
        assert (alone.returncode, alone.stdout.startswith("1 step of rank 1: ")) == (0, True), alone
        hang.touch()
        wait_for(lambda: standing_still(run) == {1})
        hang.unlink()
        refused = trigger(run, "--ranks", "7")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "rank 7 does not write to this folder (ranks 0,1 do)" in refused.stderr
    finally:
        stop.touch()
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert "no rank of" in trigger(run).stderr

    trace = rankscope.open(run)
    report = rankscope.diagnose(trace)
    fixed, first, second = report.windows
    assert (fixed.ranks, fixed.steps, fixed.reason) == ((0, 1), (3, 4), "--profile-steps")
    assert (first.ranks, len(first.steps), second.ranks, len(second.steps)) == ((0, 1), 2, (1,), 1)
    assert (first.folder, first.reason, first.kernels) == ("window-0002", "rankscope trigger", 0)
    linear = next(operator for operator in first.operators if operator.name == "aten::addmm")
    assert linear.calls_per_step == 2  # two linear layers
    assert [gap.count for gap in report.gaps if "profiler" in gap.why and gap.table == "steps"] != []
    assert not {finding.detector for finding in report.findings} & {"slow_rank", "load_imbalance"}

    # The profiler's call of DDP's all-reduce is the one that rankscope recorded.
    window = rankscope.open(run / "window-0002")
    said = window.table("regions").filter(pl.col("name") == "c10d::allreduce_").sort("rank", "start_ns").collect()
    recorded = trace.table("collectives").select("rank", "start_ns", own_ns="start_ns").sort("start_ns").collect()
    nearest = said.sort("start_ns").join_asof(
        recorded, on="start_ns", by="rank", strategy="nearest", check_sortedness=False
    )
    away_ns = (nearest["own_ns"] - nearest["start_ns"]).abs()
    assert len(said) >= 4
    assert first.clock_error_ns is not None
    assert away_ns.median() < first.clock_error_ns + 200_000  # the hook's own way to its clock


@needs_namespaces
@pytest.mark.real_job
def test_a_trigger_reaches_the_ranks_of_all_nodes(tmp_path):
    """Two nodes with networks of their own, one clock 5 s ahead, one folder: both record the same two steps."""
    train = script(
        tmp_path,
        """
        more = torch.ones(1)
        while more:
            step()
            more = torch.tensor(float(not Path(sys.argv[1]).exists()))
            dist.all_reduce(more, dist.ReduceOp.MIN)
        """,
    )
    stop = tmp_path / "stop"
    launcher = [THREE_NODES, "--nodes", "2", "--skewed-node", "1", "--skew-s", "5", "--"]
    recorded = [
        Path(sys.executable).with_name("rankscope"),
        "run",
        "--out",
        tmp_path / "run",
        "--no-report",
        train,
        stop,
    ]
    command = [str(word) for word in (sys.executable, *launcher, *recorded)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def shared() -> list[Path]:
        return [run for run in tmp_path.glob("run*") if len(list(run.glob("regions/rank=*"))) == 2]

    try:
        wait_for(shared)
        (run,) = shared()
        done = trigger(run, "--count", "2")
        assert (done.returncode, done.stdout.startswith("2 steps of ranks 0,1: ")) == (0, True), done
        stacks = trigger(run, "--stacks")
        assert all(f"rank {rank}, in step" in stacks.stdout for rank in (0, 1)), stacks
    finally:
        stop.touch()
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    answers = [json.loads((run / "run" / f"window=0001.node=0000{node}.json").read_bytes()) for node in (0, 1)]
    assert answers[0]["first"] == answers[1]["first"]
    assert [set(answer["ranks"]) for answer in answers] == [{"0"}, {"1"}]  # each node's agent asked its own
    rows = rankscope.open(run).table("windows").collect()
    assert sorted(rows.select("rank", "node", "first_step", "steps").rows()) == [
        (rank, rank, answers[0]["first"], 2) for rank in (0, 1)
    ]


@pytest.fixture
def one_rank(tmp_path):
    """Runs a script as the only rank beside an agent; requests may be there before it begins."""

    def record(body: str, *options: str, asked: list[dict]) -> tuple[subprocess.CompletedProcess[str], Path]:
        run, name = tmp_path / "run", f"rankscope-test-{uuid.uuid4().hex}"
        command = [
            sys.executable,
            "-m",
            "rankscope.collectors.agent.loop",
            "--socket",
            name,
            "--out",
            str(run),
            *options,
        ]
        agent = subprocess.Popen([*command, "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["ready"]
        for request in asked:
            ask(run, {"kind": "window", "ranks": None, "steps": 2, "reason": "test"} | request)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, str(script(tmp_path, body)), str(tmp_path)],
            env=os.environ | rank | {"RANKSCOPE_AGENT": name, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        agent.stdin.close()
        assert agent.wait(60) == 0
        return done, run

    return record


@pytest.mark.long
def test_other_profilers_are_not_disturbed_and_failures_cost_the_window_only(one_rank, tmp_path):
    """Steps 3, 4: a window. 10: the script profiles, refused. 20: the script begins to, thrown away. 30: nsys, refused.
    36: cannot be saved. 44: the job ends within it, what there is counts."""
    starts = [3, 10, 20, 30, 36, 44]
    done, run = one_rank(
        """
        from torch.profiler import ProfilerActivity, profile, schedule
        traces = Path(sys.argv[1])
        def own(name, steps, plan):
            with profile(activities=[ProfilerActivity.CPU], schedule=plan) as own:
                for _ in range(steps):
                    step()
                    own.step()
            own.export_chrome_trace(str(traces / name))
        for _ in range(8): step()                                           # 0 to 7
        own("first.json", 8, None)                                          # 8 to 15
        for _ in range(3): step()                                           # 16 to 18
        own("second.json", 9, schedule(wait=2, warmup=1, active=6))         # 19 to 27: it begins in ours
        os.environ["NSYS_PROFILING_SESSION_ID"] = "1"
        for _ in range(6): step()                                           # 28 to 33
        del os.environ["NSYS_PROFILING_SESSION_ID"]
        (traces / "run" / "window-0005" / ".rank0.pt.trace.json.part" / "taken").mkdir(parents=True)
        for _ in range(12): step()                                          # 34 to 45
        """,
        asked=[{"first": first, "steps": 3 if first == 20 else 2} for first in starts],
    )
    assert done.returncode == 0, done.stderr
    states = {number: answer["ranks"]["0"]["state"] for number, answer in requests(run).items()}
    assert states == {
        1: "recorded",
        2: "refused",
        3: "discarded",
        4: "refused",
        5: "failed",
        6: "recorded",
    }, requests(run)
    for name in ("first.json", "second.json"):
        steps = [e for e in json.loads((tmp_path / name).read_bytes())["traceEvents"] if "addmm" in e.get("name", "")]
        assert len(steps) == 2 * (8 if name == "first.json" else 6)  # nothing of the script's own is lost
    trace = rankscope.open(run)
    gaps = [gap.why for gap in trace.gaps() if gap.table == "windows"]
    assert len(gaps) == 4, gaps  # one for each that is not there
    assert any("torch.profiler of the script's own" in why for why in gaps)
    assert any("Nsight Systems" in why for why in gaps)
    assert done.stderr.count("switched off") == 0
    rows = trace.table("windows").collect()
    assert rows["window"].to_list() == [1, 3, 5, 6]  # in these the profiler was on
    assert (rows["stop_stall_ns"] <= rows["end_ns"] - rows["start_ns"]).all()
    windows = rankscope.diagnose(trace).windows
    assert [window.number for window in windows] == [1, 6]
    assert windows[0].steps == (3, 4)
    counts = {operator.name: operator.calls_per_step for operator in windows[0].operators}
    assert counts["aten::addmm"] == 2


@pytest.mark.long
def test_a_profiler_of_the_scripts_own_is_left_alone_while_it_warms_up_and_does_not_count_while_it_waits(
    one_rank, tmp_path
):
    """It waits for 12 steps, in which it names steps all the same, warms up for 8 and records 4. Two at once would end
    the process with SIGSEGV."""
    done, run = one_rank(
        """
        from torch.profiler import ProfilerActivity, profile, schedule
        plan = schedule(wait=12, warmup=8, active=4, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=plan) as own:
            for _ in range(24):
                step()
                own.step()
        own.export_chrome_trace(str(Path(sys.argv[1]) / "own.json"))
        for _ in range(8): step()
        """,
        asked=[{"first": first} for first in (4, 15, 27)],
    )
    assert done.returncode == 0, done.stderr
    assert [answer["ranks"]["0"]["state"] for _, answer in sorted(requests(run).items())] == [
        "recorded",
        "refused",
        "recorded",
    ], requests(run)
    trace = rankscope.open(run)
    assert [gap.why for gap in trace.gaps() if gap.table == "windows"] == [
        "window 2 was not opened: a torch.profiler of the script's own, which warms up, is at work and is not disturbed"
    ]
    assert [window.steps for window in rankscope.diagnose(trace).windows] == [(4, 5), (27, 28)]
    named = json.loads((tmp_path / "own.json").read_bytes())["traceEvents"]
    assert len([event for event in named if event.get("name") == "aten::addmm"]) == 2 * 4


@pytest.mark.long
def test_a_window_that_was_prepared_and_never_records_leaves_no_profiler_behind(one_rank):
    """A step before its first one the collector is switched off; what the script profiles then is whole."""
    done, run = one_rank(
        """
        from rankscope.collectors.rank import window
        from torch.profiler import ProfilerActivity, profile
        for _ in range(3): step()
        print("prepared:", window._current._profile is not None)
        window.stop()
        with profile(activities=[ProfilerActivity.CPU]) as own: step()
        print("seen:", sum(event.name == "aten::addmm" for event in own.events()))
        """,
        asked=[{"first": 4}],
    )
    assert done.returncode == 0, done.stderr
    assert "prepared: True\nseen: 2\n" in done.stdout
    assert "no active profiling session" not in done.stderr
    assert requests(run)[1]["ranks"]["0"]["state"] == "refused", requests(run)


@pytest.mark.long
def test_optimizers_that_run_within_backward_make_no_steps_of_windows(one_rank):
    """torch's profiler would be lost where a backward ends: the steps are those that the script says."""
    done, run = one_rank(
        """
        import rankscope
        weights = list(model.parameters())
        of = {weight: torch.optim.SGD([weight], lr=0.1) for weight in weights}
        for weight in weights:
            weight.register_post_accumulate_grad_hook(lambda weight: of[weight].step())
        for _ in range(12):
            model(torch.ones(4, 8)).sum().backward()
            rankscope.step()
            time.sleep(0.01)
        print("on:", torch.autograd._profiler_enabled(), torch.autograd.profiler._is_profiler_enabled)
        """,
        asked=[{"first": 4, "steps": 2}],
    )
    assert done.returncode == 0, done.stderr
    assert "on: False False" in done.stdout
    assert "Leaked" not in done.stderr
    assert "no active" not in done.stderr
    assert requests(run)[1]["ranks"]["0"]["state"] == "recorded", requests(run)
    assert rankscope.open(run).table("windows").collect()["steps"].to_list() == [2]


@pytest.mark.long
def test_a_window_whose_steps_take_too_long_is_closed(one_rank):
    """A validation begins within it: half a second is the most here."""
    done, run = one_rank(
        """
        from rankscope.collectors.rank import window
        window._LONGEST_S, window._LONGEST = 0.5, 0
        for _ in range(6): step()
        for _ in range(30):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.1)
        print("on:", torch.autograd._profiler_enabled())
        for _ in range(6): step()
        """,
        asked=[{"first": 4, "steps": 4}],
    )
    assert done.returncode == 0, done.stderr
    assert "on: False" in done.stdout
    assert requests(run)[1]["ranks"]["0"]["state"] == "discarded", requests(run)
    (gap,) = [gap.why for gap in rankscope.open(run).gaps() if gap.table == "windows"]
    assert gap.startswith("window 1: its steps took too long")


@pytest.mark.alone
@pytest.mark.real_job
def test_a_slow_step_opens_one_window_and_a_profiler_that_fails_ends_all(one_rank):
    """Steps of about 10 ms, two of 400 ms: one window, 3 steps long. From step 280 on torch's profiler is broken.

    Where the rank is when the agent names the window's first step is not known to a second, which is 100 steps.
    """
    done, run = one_rank(
        """
        for i in range(300):
            step()
            time.sleep(0.4 if i in (40, 60) else 0)
            if i == 280:
                torch.autograd.profiler.profile = None
        print("through")
        """,
        "--profile-slow",
        "1",
        asked=[{"first": 285}, {"first": 288}, {"first": 600}],
    )
    assert (done.returncode, done.stdout[-8:]) == (0, "through\n"), done.stderr
    trace = rankscope.open(run)
    (window,) = rankscope.diagnose(trace).windows
    assert len(window.steps) == 3
    assert window.reason.startswith("step ")
    assert "x the usual on rank 0" in window.reason
    answers = requests(run)
    assert {answers[number]["ranks"]["0"]["state"] for number in (1, 2, 3)} == {"refused"}
    assert "'NoneType' object is not callable" in done.stderr
    assert len([gap for gap in trace.gaps() if gap.table == "windows"]) == 3


def test_steps_are_counted_alike_whatever_the_optimizers_do():
    """One optimizer; two in turn; a rare third; a discriminator that runs twice; the script's own word wins.

    Three runs after each backward, not known to be one in the first step; backwards that a graph hides.
    """

    def steps(ends: list[int | None], backwards: list[int] | None = None) -> list[int]:
        counter = _Steps()
        after = backwards or range(len(ends))
        return [counter.done for end, count in zip(ends, after, strict=True) if counter.ended(end, count)]

    assert steps([7, 7, 7]) == [1, 2, 3]
    assert steps([1, 2, 1, 2, 1, 2]) == [1, 2, 3]  # the first time it is not known that 2 is to come
    assert steps([1] * 30 + [9] + [1] * 2) == [*range(1, 33)]
    assert steps([1, 1, 2, 1, 1, 2, 1, 1, 2])[-2:] == [2, 3]
    assert steps([1, 1, None, 1, None]) == [1, 2, 1, 2]
    assert steps([1] * 12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]) == [1, 2, 3, 4, 5, 6]
    assert steps([1] * 30, [1, 2, *[3] * 18, 4, *[5] * 9]) == [*range(1, 31)]


def test_clock_of_a_trace_from_spans_of_which_both_clocks_are_known():
    """Spans began at 100 and 200 in the trace, between 1095 and 1115, 1190 and 1208: 990 to 1008 and 995 to 1015."""
    assert place([100, 200], [[0, 1095, 1115], [1, 1190, 1208]]) == (1001, 7)


def test_own_time_of_nested_operators():
    """`a` takes 10 ns, 6 of them in `b`, which spends 2 in `c`; `d` comes after."""
    rows = [("a", 0, 10), ("b", 2, 8), ("c", 3, 5), ("d", 10, 13)]
    frame = pl.DataFrame(rows, schema=["name", "start_ns", "end_ns"], orient="row").with_columns(rank=0, thread=0)
    own = self_times(frame)
    assert dict(own.select("name", "self_ns").iter_rows()) == {"a": 4, "b": 4, "c": 2, "d": 3}


def a_run(folder: Path, *, steps: int, step_ns: int) -> Path:
    """Rank 0 took steps of this length, the first from 0 on, and computes in them all."""
    (folder / "run").mkdir(parents=True)
    rank = Partition(RunFolder(folder), "rank=00000", "a0-")
    said = {"hostname": "host", "device": "cuda", "torch": "2.13.0", "python": "3.11", "command": "train.py"}
    rank.add_row("ranks", said | {"start_ns": 0, "local_rank": 0, "world_size": 2, "pid": 1, "node": 0})
    rank.add("strings", {"name_id": [0], "name": ["SGD#0"]})
    ends = np.arange(1, steps + 1) * step_ns
    of_all = {column: np.zeros(steps, np.int64) for column in ("name_id", "thread")}
    kind = np.full(steps, REGION_KINDS.index("optimizer"))
    rank.add("regions", of_all | {"start_ns": ends - 1000, "end_ns": ends, "kind": kind})
    rank.close()
    (folder / "run" / "node=00000.json").write_text('{"state": "closed"}')
    return folder


@pytest.mark.needs_data
def test_device_work_of_a_window_is_judged_and_stays_out_of_the_runs_own_steps(tmp_path):
    """A profiler's traces of 2 ranks and 3 steps become a window of a run: same verdict, on the run's clock."""
    traces = [str(shutil.copyfile(trace, tmp_path / trace.name)) for trace in sorted(TRACES.glob("*.json"))]
    own = rankscope.diagnose(rankscope.open(traces))
    assert len(own.device) == 2
    steps = rankscope.open(traces).table("steps").collect()
    run = a_run(tmp_path / "run", steps=200, step_ns=50_000_000)
    folder = run / "window-0001"
    folder.mkdir()
    shift = 2_000_000_000 - steps["start_ns"].min()
    begins = {rank: steps.filter(pl.col("rank") == rank)["start_ns"].sort() + shift for rank in (0, 1)}
    marks = {rank: [[i, ns - 4_000, ns + 6_000] for i, ns in enumerate(begins[rank])] for rank in (0, 1)}
    ranks = {str(rank): {"path": traces[rank], "marks": marks[rank]} for rank in (0, 1)}
    convert(folder, {"node": 0, "window": 1, "first_step": 40, "steps": 3, "reason": "test", "ranks": ranks})

    assert rankscope.diagnose(rankscope.open(folder)).device == own.device
    kernels = rankscope.open(folder).table("kernels").collect()
    assert kernels["clock_error_ns"].unique().to_list() == [5_001]
    assert abs(rankscope.open(folder).table("steps").collect()["start_ns"].min() - 2_000_000_000) == 1_000
    trace = rankscope.open(run)
    report = rankscope.diagnose(trace)
    assert (report.windows[0].verdict, report.windows[0].kernels) == (own.verdict, len(kernels))
    for shown in (terminal.render(report, width=400), html.render(report)):
        assert "Window 1: steps 40-42 of ranks 0,1 (test)." in shown
        assert f"Of its {len(kernels)} rows of device work: Likely: Host-bound" in shown
        assert report.windows[0].operators[0].name in shown
    assert report.device == ()
    assert report.steps.median_ns == 50_000_000
    drawn = with_windows(build_timeline(trace), trace)
    assert len(drawn.kernels) == len(kernels)
    assert drawn.regions["start_ns"].is_between(0, 10_000_000_000).all()
