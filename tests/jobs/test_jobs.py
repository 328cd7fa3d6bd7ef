"""Real jobs under `rankscope run`: real torchrun, gloo, real processes. A job costs 10 to 20 s, so tests share them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import rankscope
from support.one_rank import TORCH, of_script
from support.paths import ROOT, SCRIPTS

pytestmark = pytest.mark.real_job
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))),
    reason="network namespaces need root, ip, tc and unshare",
)

TRANSFORMER = ROOT / "examples/train_transformer.py"
THREE_NODES = ROOT / "examples/three_nodes.py"
RANKSCOPE = str(Path(sys.executable).with_name("rankscope"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

STEPS = 24
MS = 1_000_000
JOB_S = 150  # a job that takes longer hangs
HEALTHY_RUNS = int(os.environ.get("RANKSCOPE_HEALTHY_RUNS", "1"))  # of each kind; a false alarm can be rare: try more


@dataclass(frozen=True)
class Job:
    """A job that has ended; `run` is its run folder."""

    code: int
    stdout: str
    stderr: str
    run: Path

    @property
    def report(self) -> dict:
        return json.loads((self.run / "report.json").read_text())

    def printed(self, word: str) -> str:
        """What the job printed after `word`."""
        return next(line.split(word, 1)[1].strip() for line in self.stdout.splitlines() if word in line)


class Running:
    """A job in a session of its own, that can be disturbed while it runs; `run` is its run folder."""

    def __init__(self, folder: Path, command: list[object], run: Path) -> None:
        self.run = run
        self._outputs = folder / "stdout", folder / "stderr"
        with self._outputs[0].open("w") as out, self._outputs[1].open("w") as err:
            self._process = subprocess.Popen(
                [str(word) for word in command], cwd=folder, stdout=out, stderr=err, start_new_session=True
            )

    def wait_for_output(self, text: str) -> None:
        deadline = time.monotonic() + JOB_S
        while text not in self._outputs[0].read_text():
            assert self._process.poll() is None, self._outputs[1].read_text()
            assert time.monotonic() < deadline, f"never printed {text!r}"
            time.sleep(0.01)

    def process(self, *words: str, rank: int | None = None) -> psutil.Process:
        """The process under this job that has all `words` in its command line."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            command = " ".join(process.cmdline())
            if all(word in command for word in words) and (rank is None or process.environ().get("RANK") == str(rank)):
                return process
        raise AssertionError(f"no process {words}")

    def end(self) -> Job:
        try:
            code = self._process.wait(JOB_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return Job(code, of_script(self._outputs[0].read_text()), self._outputs[1].read_text(), self.run)


def start(folder: Path, script: Path, *arguments: object, ranks: int, record: bool = True, run: str = "run") -> Running:
    launcher = [RANKSCOPE, "run", "--out", folder / run] if record else TORCHRUN
    return Running(folder, [*launcher, "--standalone", "--nproc-per-node", ranks, script, *arguments], folder / run)


def train(folder: Path, *arguments: object, ranks: int = 4, record: bool = True) -> Job:
    """Run the example transformer to its end."""
    job = start(folder, TRANSFORMER, "--steps", STEPS, *arguments, ranks=ranks, record=record).end()
    assert job.code == 0, job.stderr
    return job


def found(job: Job) -> list[tuple[str, list[int]]]:
    return [(finding["detector"], finding["ranks"]) for finding in job.report["findings"]]


def assert_adds_up(job: Job) -> None:
    """Every rank's breakdown sums to its mean step, to the nanosecond."""
    report = rankscope.diagnose(rankscope.open(job.run))
    parts: dict[int, int] = defaultdict(int)
    for part in report.breakdown:
        parts[part.rank] += part.ns_per_step
        assert part.ns_per_step >= 0
    assert set(parts) == set(report.ranks)
    for rank, steps_ns in report.step_ns.items():
        assert abs(parts[rank] * len(steps_ns) - sum(steps_ns)) <= len(steps_ns) / 2, "it is not the mean, rounded"


# ---- healthy jobs


@pytest.mark.alone
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("attempt", range(HEALTHY_RUNS))
def test_healthy_job_has_no_finding(parallel, attempt, tmp_path):
    if parallel == "fsdp2" and TORCH.startswith(("2.5.", "2.6.")):
        pytest.skip("FSDP2 of torch 2.5 and 2.6 needs a GPU")
    device_ms = {"ddp": 180, "fsdp2": 240}[parallel]  # FSDP2 exposes transfers, on a slow machine 15 ms a step
    job = train(tmp_path, "--parallel", parallel, "--device-ms", device_ms, "--steps", 40)
    assert found(job) == []
    assert {"input_stall", "gc_stall"} <= set(job.report["healthy"])
    # Where other work disturbs the ranks they wait for each other, and a check may be too coarse to know why.
    unclear = {check["detector"]: check["why"] for check in job.report["not_checked"]}
    for name in {"slow_rank", "load_imbalance"} - set(job.report["healthy"]):
        assert re.fullmatch(
            "wait for peers takes .* of the step for no known reason, and losses below .* are not detected",
            unclear[name],
        )
    assert job.report["ranks"] == [0, 1, 2, 3]
    assert job.report["matched_fraction"] == 1
    assert_adds_up(job)


# ---- jobs with one known fault


@pytest.mark.alone
def test_rank_that_sleeps_in_forward_is_named_with_what_it_costs(tmp_path):
    """While it sleeps the others compute, and then it has a core to itself: it makes up for some milliseconds."""
    job = train(tmp_path, "--fault", "slow-rank", "--fault-rank", 2, "--fault-ms", 60)
    assert found(job) == [("slow_rank", [2])]
    assert job.report["findings"][0]["lost_ns_per_step"] == pytest.approx(60 * MS, rel=0.15)
    assert_adds_up(job)


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_late_for_the_broadcast_of_buffers_is_the_only_one_named(rank, tmp_path):
    """Rank 0 has what DDP broadcasts before each forward: the others wait for it in C++, and then it for nobody."""
    job = start(tmp_path, SCRIPTS / "buffers.py", rank, ranks=2).end()
    assert job.code == 0, job.stderr
    assert found(job) == [("slow_rank", [rank])]
    finding = job.report["findings"][0]
    assert finding["lost_ns_per_step"] == pytest.approx(60 * MS, rel=0.15)
    assert finding["where"] == "before forward"
    assert_adds_up(job)


@pytest.mark.alone
def test_sleeping_dataloader_is_an_input_stall_and_no_slow_rank(tmp_path):
    job = train(tmp_path, "--fault", "input", "--fault-rank", 1, "--fault-ms", 30)
    assert found(job) == [("input_stall", [1])]
    assert job.report["findings"][0]["lost_ns_per_step"] == pytest.approx(30 * MS, rel=0.15)
    assert_adds_up(job)


@pytest.mark.alone
def test_collecting_a_large_heap_is_a_gc_stall_that_costs_what_the_script_measured(tmp_path):
    """With a collection every 5 steps, one costs a fifth of its time per step."""
    job = train(tmp_path, "--fault", "gc", "--fault-rank", 3)
    assert found(job) == [("gc_stall", [3])]
    measured_ns = json.loads(job.printed("collections_ns"))
    per_collection_ns = sum(measured_ns) / len(measured_ns)
    finding, steps = job.report["findings"][0], job.report["steps"]["count"]
    collections = finding["lost_ns_total"] / per_collection_ns
    assert collections == pytest.approx(round(collections), abs=0.15 * round(collections))
    assert steps // 5 <= round(collections) <= steps // 5 + 1
    assert finding["lost_ns_per_step"] == pytest.approx(finding["lost_ns_total"] / steps, rel=0.01)
    assert_adds_up(job)


@pytest.mark.alone
def test_uneven_sequences_are_no_slow_rank(tmp_path):
    job = train(tmp_path, "--fault", "uneven")
    assert [detector for detector, _ in found(job)] == ["load_imbalance"]
    assert_adds_up(job)


# ---- several nodes


def train_on_nodes(folder: Path, *options: object) -> Job:
    """Run the example on three namespaces, node 1's link at 200 Mbit/s; `run` holds the files of all nodes."""
    launcher = [sys.executable, THREE_NODES, "--slow-node", 1, "--mbit", 200, *options, "--"]
    job = [RANKSCOPE, "run", "--out", folder / "run", TRANSFORMER, "--steps", STEPS, "--width", 192]
    ended = Running(folder, [*launcher, *job], folder / "run").end()
    assert ended.code == 0, ended.stderr
    (whole,) = (run for run in folder.glob("run*") if len(list(run.glob("run/node=*.json"))) == 3)
    return Job(ended.code, ended.stdout, ended.stderr, whole)


def assert_blames_link_of_node_1(job: Job) -> None:
    roots = [finding for finding in job.report["findings"] if finding["caused_by"] is None]
    assert [(finding["detector"], finding["nodes"]) for finding in roots] == [("slow_link", [1])]
    assert_adds_up(job)


@pytest.mark.alone
@needs_namespaces
def test_slow_link_is_named(tmp_path):
    job = train_on_nodes(tmp_path)
    assert_blames_link_of_node_1(job)
    clocks = {clock["node"]: clock for clock in job.report["clocks"]}
    for node in (1, 2):
        assert abs(clocks[node]["offset_ns"]) <= clocks[node]["error_ns"] < MS


@pytest.mark.alone
@needs_namespaces
def test_slow_link_is_named_though_a_clock_is_5_s_off(tmp_path):
    job = train_on_nodes(tmp_path, "--skewed-node", 2, "--skew-s", 5)
    assert_blames_link_of_node_1(job)
    clock = next(clock for clock in job.report["clocks"] if clock["node"] == 2)
    assert abs(clock["offset_ns"] + 5_000 * MS) <= clock["error_ns"] < MS
    shutil.rmtree(job.run / "clocks")
    clock = next(clock for clock in rankscope.diagnose(rankscope.open(job.run)).clocks if clock.node == 2)
    assert clock.source == "causality"
    assert abs(clock.offset_ns + 5_000 * MS) <= clock.error_ns


# ---- the job is left alone


def test_own_files_and_workers_run_untouched(tmp_path):
    """The script's folder holds profiler.py, collectors.py and analysis/; its workers are spawned and forked."""
    script = SCRIPTS / "own_files/train.py"
    plain = start(tmp_path, script, ranks=2, record=False).end()
    job = start(tmp_path, script, ranks=2).end()
    assert (plain.code, job.code) == (0, 0), plain.stderr + job.stderr
    assert job.printed("mean loss") == plain.printed("mean loss")
    recorded = rankscope.open(job.run).table("ranks").collect()
    assert sorted(recorded["rank"]) == [0, 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Job:
    """A job of two ranks without rankscope."""
    return train(tmp_path_factory.mktemp("plain"), "--digest", ranks=2, record=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Job:
    """The same job with rankscope."""
    return train(tmp_path_factory.mktemp("recorded"), "--digest", ranks=2)


def test_recorded_job_is_bit_identical(undisturbed, recorded):
    assert recorded.printed("digest") == undisturbed.printed("digest")


IN_FLIGHT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
sys.setswitchinterval(100)
works = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]
"""


def test_ranks_that_end_while_operations_are_in_flight_end_well(tmp_path, hook):
    """The operations are not waited for, and Python's lock goes to others only when its thread waits: gloo's threads
    come to our callbacks, and let go of the tensors, when the script has ended.
    """
    (tmp_path / "script.py").write_text(IN_FLIGHT)
    command = [sys.executable, "-m", "rankscope", "run", "--no-report", "--out", "run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ended = rankscope.open(tmp_path / "run").table("collectives").collect()["end_ns"]
    assert (len(ended), ended.null_count()) == (6, 0)


def last_record_ns(run: Path, rank: int) -> int:
    ends = rankscope.open(run).table("collectives").collect().filter(rank=rank)["start_ns"]
    return max(ends)


def test_killed_rank_is_recorded_to_its_last_moment(tmp_path):
    exits = []
    for record in (False, True):
        folder = tmp_path / str(record)
        folder.mkdir()
        running = start(folder, TRANSFORMER, "--steps", 1000, ranks=2, record=record)
        running.wait_for_output("step 10 ")
        victim = running.process(TRANSFORMER.name, rank=1)
        victim.send_signal(signal.SIGKILL)
        killed_ns = time.perf_counter_ns()
        job = running.end()
        root_cause = re.findall(r"exitcode +: (-?\d+) ", job.stderr)[-1]  # torchrun also lists ranks that it ended
        exits.append((job.code, root_cause))
    assert exits[0] == exits[1] == (1, "-9")
    assert killed_ns - last_record_ns(job.run, rank=1) < 1000 * MS
    assert any(gap["rank"] == 1 and "killed" in gap["why"] for gap in job.report["gaps"])


def test_job_outlives_its_agent(undisturbed, tmp_path, hook):
    running = start(tmp_path, TRANSFORMER, "--steps", STEPS, "--digest", ranks=2)
    running.wait_for_output("step 10 ")
    running.process("rankscope.collectors.agent.loop").send_signal(signal.SIGKILL)
    killed_ns = time.perf_counter_ns()
    job = running.end()
    assert job.code == 0, job.stderr
    assert undisturbed.stdout in job.stdout
    step_ns = 300 * MS
    for rank in (0, 1):
        assert killed_ns - last_record_ns(job.run, rank) < 2000 * MS + step_ns
    assert any("agent" in gap["why"] for gap in job.report["gaps"])


@contextlib.contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@needs_root
def test_job_outlives_a_full_disk(undisturbed, tmp_path):
    with tmpfs(tmp_path / "disk", "size=160k"):
        running = start(tmp_path, TRANSFORMER, "--steps", STEPS, "--digest", ranks=2, run="disk/run")
        job = running.end()
        assert job.code == 0, job.stderr
        assert undisturbed.stdout in job.stdout
        trace = rankscope.open(job.run)
        assert trace.table("collectives").collect().height > 0
        gaps = trace.gaps()
    assert any("No space left" in gap.why and gap.count for gap in gaps)
    assert not any("has not closed" in gap.why for gap in gaps)


@needs_root
def test_job_runs_where_nothing_can_be_written(undisturbed, tmp_path):
    with tmpfs(tmp_path / "disk", "ro"):
        job = start(tmp_path, TRANSFORMER, "--steps", STEPS, "--digest", ranks=2, run="disk/run").end()
    assert job.code == 0, job.stderr
    assert job.stdout.endswith(undisturbed.stdout)
    assert len([line for line in job.stderr.splitlines() if line.startswith("rankscope: ")]) == 1


# ---- runs that are not as they should be


def report_of(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RANKSCOPE, "report", str(run), "--json", "-"], capture_output=True, text=True)


def assert_refused(run: Path, *words: str) -> None:
    """One line that has the words, and exit code 2."""
    answer = report_of(run)
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1), answer.stderr
    assert all(word in answer.stderr for word in words), answer.stderr


def test_missing_and_empty_runs_are_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", str(tmp_path / "nowhere"))
    assert_refused(tmp_path, str(tmp_path))


def test_run_of_a_newer_version_is_refused(recorded, tmp_path):
    newer = shutil.copytree(recorded.run, tmp_path / "newer")
    launch = newer / "run/node=00000.json"
    launch.write_text(json.dumps(json.loads(launch.read_text()) | {"schema_version": 99}))
    assert_refused(newer, "99")


def test_what_is_good_of_a_cut_file_is_read(recorded, tmp_path):
    """Rank 1's collectives are cut at every eighth: rank 0's stay whole, what is missing is named."""
    run = shutil.copytree(recorded.run, tmp_path / "cut")
    (part,) = run.glob("collectives/rank=00001/*.arrow")
    content = part.read_bytes()
    rows = {rank: len(last) for rank, last in rows_by_rank(run).items()}
    for eighth in range(8):
        part.write_bytes(content[: len(content) * eighth // 8])
        trace = rankscope.open(run)
        left = {rank: len(last) for rank, last in rows_by_rank(run).items()}
        assert left[0] == rows[0]
        assert left.get(1, 0) <= rows[1]
        assert any(part.name in gap.why or gap.rank == 1 for gap in trace.gaps()), f"cut at {eighth}/8 is not named"
    answer = report_of(run)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["gaps"]


def rows_by_rank(run: Path) -> dict[int, list[int]]:
    rows = defaultdict(list)
    for rank, start_ns in rankscope.open(run).table("collectives").select("rank", "start_ns").collect().rows():
        rows[rank].append(start_ns)
    return rows


# ---- every collective is seen

# gloo's own names for what the operators do
GLOO_SPAN = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter_base": "all_reduce",
    "reduce_scatter_tensor_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "alltoall_base": "all_to_all",
}


def test_every_collective_is_recorded(tmp_path, hook):
    """What torch's profiler counted of gloo's work, or the pipeline's schedule demands, is in the trace, per group."""
    job = start(tmp_path, SCRIPTS / "every_collective.py", tmp_path, ranks=4).end()
    assert job.code == 0, job.stderr
    trace = rankscope.open(job.run)
    sections = {(g["rank"], g["group_id"]): g["role"] for g in trace.table("groups").collect().rows(named=True)}
    seen = defaultdict(Counter)
    for row in trace.table("collectives").collect().rows(named=True):
        section = sections[row["rank"], row["group_id"]]
        seen[row["rank"], section][GLOO_SPAN.get(row["op"], row["op"])] += 1
    for rank in range(4):
        for section, expected in json.loads((tmp_path / f"expected-{rank}.json").read_text()).items():
            assert seen[rank, section] == expected, (rank, section)
    unwaited = [gap for gap in job.report["gaps"] if "waits for one of several transfers" in gap["why"]]
    assert len(unwaited) == (4 if TORCH.startswith(("2.5.", "2.6.", "2.7.")) else 0)
    assert job.report["matched_fraction"] == 1 or unwaited
