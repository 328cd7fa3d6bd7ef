"""CUDA events without a GPU: a driver that is a queue on a clock of its own, under real jobs of real torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from rankscope.collectors.schema import DEVICE_MARKS
from support.cuda.pretend import build
from support.paths import SUPPORT

torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
pytestmark = [
    pytest.mark.real_job,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build the driver with"),
]

CUDA = SUPPORT / "cuda"
RANKSCOPE = str(Path(sys.executable).with_name("rankscope"))
MS = 1_000_000
STEPS = 10
IN_A_STEP = list(DEVICE_MARKS[:5])
AROUND_WAITS, NOTES = ("wait_start", "wait_end"), ("waits_seen", "waits_missed")
EVENTS = 4096


@dataclass(frozen=True)
class Job:
    output: str
    run: Path
    truths: Path

    def table(self, name: str, rank: int) -> pl.DataFrame:
        return pl.concat([pl.read_ipc(part) for part in (self.run / name / f"rank={rank:05d}").glob("*.arrow")])

    def marks(self, rank: int) -> pl.DataFrame:
        """In the order in which they were put, with their names."""
        names = pl.col("mark").replace_strict(dict(enumerate(DEVICE_MARKS)), return_dtype=pl.String)
        return self.table("device_marks", rank).sort("recorded_ns").with_columns(names)

    def of_phases(self, rank: int) -> pl.DataFrame:
        return self.marks(rank).filter(~pl.col("mark").is_in((*AROUND_WAITS, *NOTES)))

    def steps(self, rank: int) -> pl.DataFrame:
        """The marks beside the truth, and the step that each belongs to."""
        truth = pl.Series(json.loads((self.truths / f"{rank}.json").read_text()))
        marks = self.marks(rank).filter(~pl.col("mark").is_in(NOTES)).with_columns(true_ns=truth)
        marks = marks.filter(~pl.col("mark").is_in(AROUND_WAITS))
        return marks.with_columns(step=pl.int_range(pl.len()) // len(IN_A_STEP))

    def gaps(self, rank: int) -> list[tuple[str, int | None]]:
        if not (self.run / "gaps" / f"rank={rank:05d}").exists():
            return []
        return self.table("gaps", rank).filter(source="device_events").select("why", "count").rows()


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    """Four ranks that differ: see `support/cuda/device_marks.py`."""
    folder = tmp_path_factory.mktemp("device-marks")
    words = [RANKSCOPE, "run", "--no-report", "--out", str(folder / "run"), "--standalone", "--nproc-per-node", "4"]
    words += [str(CUDA / "device_marks.py"), str(build(folder)), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Job(done.stdout, folder / "run", folder)


def test_every_rank_trains_to_its_end_and_the_healthy_one_lacks_nothing(job):
    assert job.gaps(0) == []
    assert [rank for rank in range(3) if f"rank {rank} has trained" in job.output] == [0, 1, 2]


def test_the_device_is_known_by_its_name_though_the_job_used_it_after_its_first_group(job):
    assert job.table("ranks", 0)["device"].to_list() == ["cpu", "NVIDIA H100"]  # readers take the last


def test_marks_say_how_long_the_device_took_for_a_phase(job):
    """40 ms from the begin of backward to its end, and 10 ms of optimizer, but where the host was late."""
    steps = job.steps(0)
    assert steps["mark"].to_list()[: STEPS * len(IN_A_STEP)] == STEPS * IN_A_STEP
    came = steps.head(STEPS * len(IN_A_STEP)).pivot("mark", index="step", values="device_ns")
    assert (came["backward_end"] - came["backward_start"]).median() == pytest.approx(40 * MS, rel=0.001)
    assert (came["optimizer_end"] - came["optimizer_start"]).median() == pytest.approx(10 * MS, rel=0.001)


def test_marks_say_how_far_the_host_was_ahead(job):
    """The host enqueues 70 ms of work at once and then waits: in the step in which the machine let it do so."""
    depth = pl.col("device_ns") - pl.col("recorded_ns")
    by_mark = job.steps(0).group_by("mark").agg(depth.max()).rows()
    expected = {"backward_start": 20, "backward_end": 60, "optimizer_start": 60, "optimizer_end": 70, "step_end": 0}
    assert {mark: ns / MS for mark, ns in by_mark} == {mark: pytest.approx(ms, abs=8) for mark, ms in expected.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_device_was_there_within_the_error(job, rank):
    """Clocks that drift apart by 40 ppm; on rank 1 the clock's own events queue behind 70 ms of work."""
    steps = job.steps(rank)
    assert steps["device_ns"].null_count() == 0
    assert ((steps["device_ns"] - steps["true_ns"]).abs() <= steps["clock_error_ns"]).all()
    assert steps["clock_error_ns"].median() < (1 * MS, 5 * MS)[rank]
    assert (steps["device_ns"] >= steps["recorded_ns"]).all()


def test_nothing_is_marked_in_a_capture_nor_in_a_forked_child(job):
    """The job itself asserts that the capture was not broken; after it one more step has its marks."""
    assert job.steps(0)["mark"].to_list()[STEPS * len(IN_A_STEP) :] == IN_A_STEP


def test_another_device_and_an_error_cost_marks_and_nothing_else(job):
    """After 10 steps come 2 on another device, and 2 with an error that stays."""
    assert job.steps(1).height == STEPS * len(IN_A_STEP)
    assert job.table("steps", 1).height == 1 + STEPS + 2 + 2
    (elsewhere, _), (failed, _) = job.gaps(1)
    assert elsewhere == "the main thread computes on device 1: only marks of device 0, the first one used, are kept"
    assert failed.startswith("collector switched off: RuntimeError: cuEvent")
    assert failed.endswith(": unspecified launch failure (719)")


def test_a_device_that_hangs_costs_marks_and_blocks_no_rank(job):
    """5,000 marks after the hang: as many as there are events stay under way, the others are counted."""
    marks = job.of_phases(2)
    assert marks["device_ns"].is_null().sum() == marks["clock_error_ns"].is_null().sum() == EVENTS
    ((why, count),) = job.gaps(2)
    assert "no place for more" in why
    assert count == 5000 - EVENTS


def test_without_a_driver_one_line_says_so(job):
    why = "collector switched off: RuntimeError: CUDA is in use, but this process has no driver loaded (libcuda.so.1)"
    assert job.gaps(3) == [(why, None)]


# ---------------------------------------------------------------- what checks the marks on a real GPU


def test_a_mark_belongs_between_the_kernels_launched_before_and_after_it():
    """Launched at 10 and 20, run 100-150 and 160-200: a mark recorded at 15 belongs to 150-160."""
    from device_clock import outside

    columns = ("rank", "stream", "work", "launched_ns", "start_ns", "end_ns")
    kernels = pl.DataFrame([(0, 7, 0, 10, 100, 150), (0, 7, 0, 20, 160, 200)], schema=columns, orient="row")
    marks = pl.DataFrame({"rank": [0] * 5, "recorded_ns": 15, "device_ns": [140, 150, 160, 165, None]})
    placed = outside(marks, kernels).sort("device_ns")
    assert placed["outside_ns"].to_list() == [10, 0, 0, 5]


def test_flops_counted_by_hand_are_those_that_torch_counts():
    """But for attention, which torch counts in full and the model needs by half: 2 layers × 6 × 64 × 32² × 2 rows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    import gpu_step

    size = gpu_step.SIZES["tiny"]
    tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    model = gpu_step.Model(size)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stamps = gpu_step.train(model, tokens, steps=1, warmup=1)
    assert len(stamps) == 2
    assert counter.get_total_flops() == size.flops_per_step() + 2 * 6 * 64 * 32**2 * 2


@pytest.mark.parametrize("split", [False, True])
def test_every_microbatch_of_a_pipeline_has_marks_at_both_ends_of_its_passes(split, tmp_path):
    """Two stages, 4 microbatches, of which a device computes 10 ms forward and 20 ms backward.

    1F1B; and a zero-bubble schedule, which computes gradients of inputs and of weights apart, each of which is a
    backward then.
    """
    if torch.__version__.startswith("2.5."):
        pytest.skip("the job's stages are made as from torch 2.6 on")
    if torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9's pipelines do not run on gloo")
    words = [RANKSCOPE, "run", "--no-report", "--out", str(tmp_path / "run"), "--standalone", "--nproc-per-node", "2"]
    schedule = "ScheduleInterleavedZeroBubble" if split else "Schedule1F1B"
    words += [str(CUDA / "pipeline_marks.py"), str(build(tmp_path)), schedule]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout, tmp_path / "run", tmp_path)
    for rank in (0, 1):
        marks = job.of_phases(rank)["mark"].to_list()
        starts, ends = marks[::2], marks[1::2]
        assert [mark.replace("start", "end") for mark in starts] == ends
        passes = [mark.removesuffix("_start") for mark in starts]
        assert Counter(passes) == {"forward": 16, "backward": 32 if split else 16, "optimizer": 4}
        if not split:
            one_and_one = ["forward", "backward"] * 4
            ahead = ["forward", *one_and_one[:6], "backward"]
            assert passes[:9] == [*(ahead if rank == 0 else one_and_one), "optimizer"]
            took = (
                job.of_phases(rank).select(took=pl.col("device_ns").diff(), of="mark").filter(of="forward_end")["took"]
            )
            assert took.median() == pytest.approx(10 * MS, rel=0.1)


@pytest.mark.usefixtures("hook")
def test_the_compute_streams_waits_for_communication_have_marks(tmp_path):
    """An event of FSDP's stream (30 ms), the end of DDP's backward, an operation and `wait_tensor`; then too many."""
    words = [RANKSCOPE, "run", "--no-report", "--out", str(tmp_path / "run"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, str(CUDA / "device_waits.py"), str(build(tmp_path))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout, tmp_path / "run", tmp_path)
    for rank in (0, 1):
        assert job.gaps(rank) == []
        marks = job.marks(rank).with_columns(is_note=pl.col("mark").is_in(NOTES))
        marks = marks.with_columns(step=pl.col("is_note").cum_sum() - pl.col("is_note"))  # a note ends its step
        waits = marks.filter(pl.col("mark").is_in(AROUND_WAITS))
        assert waits["mark"].to_list() == [*AROUND_WAITS] * (len(waits) // 2)
        steps = {step: rows["mark"].to_list() for (step,), rows in marks.group_by("step", maintain_order=True)}
        assert [steps[step][-1] for step in range(7)] == ["waits_missed", *["waits_seen"] * 6]
        for step in range(1, 7):
            seen = [mark for mark in steps[step] if mark not in ("step_end", *NOTES)]
            assert seen[:6] == [*AROUND_WAITS, "backward_start", *AROUND_WAITS, "backward_end"]
            assert len(seen[6:]) >= 4  # `Work.wait` and `wait_tensor`; Python's hook also looks at operations on hosts
            assert waits.filter(step=step)["device_ns"].diff()[1] == pytest.approx(30 * MS, rel=0.01)
        fast = [marks for step, marks in steps.items() if step > 7]
        assert {marks.count("wait_start") for marks in fast if "waits_seen" in marks} == {300}
        assert any("waits_missed" in marks for marks in fast)


def test_a_device_that_is_not_the_current_one_has_no_marks_of_another(tmp_path):
    words = [RANKSCOPE, "run", "--no-report", "--out", str(tmp_path / "run"), "--standalone", "--nproc-per-node", "1"]
    words += [str(CUDA / "other_device.py"), str(build(tmp_path))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout, tmp_path / "run", tmp_path)
    why = "the main thread computes on device 1: no marks there without torch.cuda.set_device"
    assert job.gaps(0) == [(why, None)]
    assert not (job.run / "device_marks").exists()


@pytest.mark.parametrize(("options", "has_gpu"), [((), True), (("--profile-first", "0"), True), ((), False)])
def test_a_job_on_gpus_has_a_window_of_its_own_after_some_twenty_steps(tmp_path, options, has_gpu):
    words = [RANKSCOPE, "run", "--no-report", "--out", str(tmp_path / "run"), *options, "--standalone"]
    words += ["--nproc-per-node", "2", str(CUDA / "first_window.py"), *([str(build(tmp_path))] if has_gpu else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if options or not has_gpu:
        assert not (tmp_path / "run" / "windows").exists()
        return
    job = Job(done.stdout, tmp_path / "run", tmp_path)
    windows = [job.table("windows", rank).row(0, named=True) for rank in (0, 1)]
    assert {(window["steps"], window["window"]) for window in windows} == {(2, 1)}
    (first,) = {window["first_step"] for window in windows}
    assert 18 < first < 90
    asked = json.loads((tmp_path / "run/run/window=0001.json").read_text())
    assert asked["reason"] == "--profile-first"
    assert (tmp_path / "run/window-0001/steps").exists()
