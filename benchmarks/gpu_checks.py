"""The checks of docs/gpu-checks.md that a machine with one NVIDIA GPU can do by itself.

    python benchmarks/gpu_checks.py OUT
    python benchmarks/gpu_checks.py OUT --only 40 --pairs 10

Prints a line per check as it is done: its number, `FAILED` where it is not as the list claims, and what was seen, which
a person compares with the claim. The same lines, as rows for the list, are in OUT/checks.md; every run is kept in OUT,
and OUT/traces has those that are small, packed. Check 40 takes most of a minute a pair and is done only when named.
`--rehearse` shows on CPUs that the commands themselves run; without a GPU most must fail.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

import rankscope

HERE = Path(__file__).parent
RANKSCOPE = [sys.executable, "-m", "rankscope"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PEAK_TFLOPS = "989"  # dense bf16 of an H100 or H200
LIMIT_S = 150
MOST_BYTES = 2 << 20

CHECKS: dict[int, Callable[[], str]] = {}
OUT = Path()
REHEARSED: list[str] = []  # what makes the jobs run without a GPU
PAIRS = 10


class NotAsClaimedError(Exception):
    """What was seen is not what the list says."""


@dataclass(frozen=True)
class Job:
    folder: Path
    code: int
    output: str
    seconds: float

    def table(self, name: str) -> pl.DataFrame:
        return rankscope.open(self.folder).table(name).collect()

    def gaps(self, of: str) -> list[str]:
        """What a table or a collector says that it lacks."""
        return self.table("gaps").filter((pl.col("source") == of) | (pl.col("table") == of))["why"].unique().to_list()

    def report(self, *options: str) -> dict:
        done = subprocess.run(
            [*RANKSCOPE, "report", str(self.folder), "--json", "-", *options], capture_output=True, text=True
        )
        claim(done.returncode == 0, done.stderr)
        found: dict = json.loads(done.stdout)
        return found

    def first(self, pattern: str) -> float:
        found = re.search(pattern, self.output)
        claim(found is not None, f"no {pattern!r} in: {self.output[-300:]}")
        assert found is not None
        return float(found[1])


def check(*numbers: int) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """These numbers of the list are what this function does."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        CHECKS.update(dict.fromkeys(numbers, functools.cache(function)))
        return function

    return register


def claim(holds: bool, seen: str) -> None:
    if not holds:
        raise NotAsClaimedError(seen)


def launched(command: list[str], folder: Path, env: dict[str, str]) -> Job:
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S)
    return Job(folder, done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def quiet(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@functools.cache
def recorded(name: str, *job: str, ranks: int = 1, options: tuple[str, ...] = (), env: str = "") -> Job:
    """One job under `rankscope run`; `env` is as in "A=1 B=2"."""
    folder = OUT / name
    own = ["--no-report", "--out", str(folder), *options, "--standalone", "--nproc-per-node", str(ranks)]
    return launched([*RANKSCOPE, "run", *own, *job], folder, dict(pair.split("=", 1) for pair in env.split()))


def good(job: Job) -> Job:
    claim(job.code == 0, f"{job.folder.name} ended with {job.code}: {job.output[-400:]}")
    return job


def all_reduces(name: str, *options: str, **kwargs: str) -> Job:
    """Two ranks on one GPU."""
    return good(recorded(name, str(HERE / "nccl_job.py"), "--one-gpu", *REHEARSED[:2], *options, ranks=2, **kwargs))


def training(name: str, *options: str, **kwargs: object) -> Job:
    """A step of 1 B parameters."""
    job = [str(HERE / "gpu_step.py"), "--peak-tflops", PEAK_TFLOPS, *REHEARSED[2:], *options]
    return good(recorded(name, *job, **kwargs))  # type: ignore[arg-type]


def script(name: str, text: str) -> str:
    path = OUT / f"{name}.py"
    path.write_text(text)
    return str(path)


def median(values: pl.Series) -> str:
    return f"median {values.median()}, largest {values.max()}"


# ---------------------------------------------------------------- NCCL: two ranks on one GPU


def flight() -> Job:
    return all_reduces("flight")


@check(1, 2)
def collectives_are_recorded() -> str:
    rows = flight().table("collectives").filter(pl.col("op") == "allreduce")
    claim(rows["rank"].n_unique() == 2, f"ranks {rows['rank'].unique().to_list()}")
    claim(rows.height == 400, f"{rows.height} all-reduces of 400")
    claim(rows["end_ns"].null_count() == rows.height, "some have an end")
    claim(rows["seq"].n_unique() == 200 and (rows["size_bytes"] == 64 << 20).all(), str(rows.head(3)))
    return f"400 all-reduces of 2 ranks; gaps: {flight().gaps('collectives')}"


@check(4)
def memory_has_the_allocator() -> str:
    names = set(flight().table("memory")["name"])
    claim({"cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_alloc_retries", "cuda_ooms"} <= names, str(names))
    return ", ".join(sorted(names))


@check(5, 30)
def gpu_counters() -> str:
    rows = flight().table("counters").filter(pl.col("source") == "gpu")
    claim(rows.height > 0, f"none; gaps: {flight().gaps('counters')}")
    ranges = rows.group_by("name").agg(low=pl.col("value").min(), high=pl.col("value").max()).sort("name")
    return "; ".join(f"{name} {low:g}..{high:g}" for name, low, high in ranges.iter_rows())


@check(8)
def without_marks_it_says_so() -> str:
    found = all_reduces("no-marks", env="RANKSCOPE_DISABLE=device_events").report()
    return f"verdict: {found['verdict']}; findings: {[finding['title'] for finding in found['findings']]}"


def plugin() -> Job:
    return all_reduces("plugin", env="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,PROFILE")


@check(17)
def plugin_is_loaded() -> str:
    built = subprocess.run([*RANKSCOPE, "doctor", "--build-nccl-plugin"], capture_output=True, text=True)
    claim(built.returncode == 0, built.stderr)
    job = plugin()
    lines = [line.split("NCCL INFO ")[-1] for line in job.output.splitlines() if "rofiler" in line]
    claim(any("rankscope" in line for line in lines), str(lines[:6] or job.output[-400:]))
    return " | ".join(dict.fromkeys(lines))[:600]


@check(18)
def plugin_sees_calls() -> str:
    job = plugin()
    calls, events = job.table("nccl_calls"), job.table("nccl_events")
    kinds = calls.group_by("op", "size_bytes", "algorithm", "protocol").len().rows()
    moved = events.group_by("event").agg(pl.len(), pl.col("size_bytes").sum()).rows()
    claim(calls.height >= 400, f"{calls.height} calls; gaps: {job.gaps('nccl')}")
    return f"{kinds}; {moved}; gaps: {job.gaps('nccl')}"


def waits(job: Job) -> pl.DataFrame:
    from rankscope.analysis.timeline.nccl import nccl_waits

    return nccl_waits(job.table("collectives"), job.table("nccl_calls"), job.table("nccl_events"))


@check(19)
def calls_are_joined() -> str:
    found = waits(plugin())
    claim(found.height > 0 and found["number"].null_count() == 0, f"{found['number'].null_count()} of {found.height}")
    return f"all {found.height}"


def late() -> Job:
    return all_reduces("late", "--late", "1:20", "--steps", "100")


@check(20)
def waits_name_the_layer() -> str:
    names = [name for name in waits(late()).columns if name.endswith("_wait_ns")]
    rows = waits(late()).group_by("rank").agg(pl.col(names).sum() / 1e6).sort("rank")
    return "ms by rank: " + "; ".join(str(row) for row in rows.iter_rows(named=True))


@check(21)
def what_the_plugin_costs() -> str:
    variants = {
        "off": "RANKSCOPE_DISABLE=nccl",
        "default": "",
        "calls": "RANKSCOPE_NCCL_EVENTS=calls",
        "steps": "RANKSCOPE_NCCL_EVENTS=calls,proxies,steps",
        "kernels": "RANKSCOPE_NCCL_EVENTS=calls,proxies,kernels",
    }
    took: dict[str, list[float]] = {}
    for turn in range(3):
        for name, env in variants.items():
            job = all_reduces(f"cost-{name}-{turn}", "--mib", "0.0625", "--steps", "2000", env=env)
            took.setdefault(name, []).append(job.first(r"([\d.]+) ms per step"))
    return "ms per step, median of 3: " + ", ".join(f"{name} {statistics.median(ms)}" for name, ms in took.items())


@check(24)
def flight_records_are_joined() -> str:
    from rankscope.analysis.timeline.nccl import nccl_durations

    job = flight()
    found = nccl_durations(job.table("collectives"), job.table("groups"), job.table("flight_records"))
    known = found.filter(pl.col("name").str.contains("all_?reduce"))
    claim(known.height >= 400, f"{known.height} records; gaps: {job.gaps('flight_recorder')}")
    claim(known["duration_ns"].null_count() == 0, f"{known['duration_ns'].null_count()} without a duration")
    claim(known["number"].null_count() == 0, f"{known['number'].null_count()} of {known.height} are nobody's")
    return f"{known.height} records; ns: {median(known['duration_ns'])}; named {known['name'][0]}"


@check(25)
def worker_server_answers() -> str:
    """Asked while a job runs, with the handler that the collector chose."""
    from rankscope.collectors.rank.flight_recorder import NCCL_RECORDER

    before = set(Path("/tmp").glob("rankscope-*/rank"))
    command = ["run", "--no-report", "--out", str(OUT / "asked"), "--standalone", "--nproc-per-node", "1"]
    job = [str(HERE / "nccl_job.py"), *REHEARSED[:2], "--steps", "20000", "--mib", "0.1", "--late", "0:1"]
    with quiet([*RANKSCOPE, *command, *job]) as running:
        try:
            deadline = time.monotonic() + 40
            while not (new := set(Path("/tmp").glob("rankscope-*/rank")) - before):
                claim(time.monotonic() < deadline, "no server came")
                time.sleep(0.2)
            time.sleep(8)
            (path,) = new
            handlers, _ = asked(path, "GET /handler/")
            body, seconds = asked(path, f"POST /handler/{NCCL_RECORDER}")
        finally:
            running.terminate()
    return f"handlers {handlers[:400]}; {NCCL_RECORDER}: {len(body)} bytes in {seconds * 1e3:.1f} ms"


def asked(path: Path, request: str) -> tuple[str, float]:
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(20)
        server.connect(str(path))
        server.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: server.recv(1 << 20), b""))
    return answer.partition(b"\r\n\r\n")[2].decode(), time.monotonic() - began


@check(26)
def one_connection_has_no_timing() -> str:
    job = all_reduces("one-connection", env="CUDA_DEVICE_MAX_CONNECTIONS=1")
    rows = job.table("flight_records")
    claim(rows.height > 0 and rows["duration_ns"].null_count() == rows.height, f"{rows.height} records, some are timed")
    return f"{rows.height} records without duration; gaps: {job.gaps('flight_recorder')}"


@check(45, 46)
def a_hang_is_explained() -> str:
    """Rank 1 does not come for 30 s."""
    job = all_reduces("ras", "--late", "1:30000", "--steps", "2")
    rows = job.table("ras")
    claim(rows.height > 0, f"RAS said nothing; gaps: {job.gaps('ras')}")
    return str(rows.group_by("operation", "state").agg(pl.len(), pl.col("launched").min()).rows())


@check(53)
def late_rank_is_named() -> str:
    named, healthy = (job.report()["findings"] for job in (late(), flight()))
    claim([finding["detector"] for finding in named] == ["slow_rank"], str([finding["title"] for finding in named]))
    claim(not healthy, f"healthy job: {[finding['title'] for finding in healthy]}")
    return f"{named[0]['title']}; nothing without --late"


# ---------------------------------------------------------------- a training step


def step() -> Job:
    return training("step")


def window() -> Job:
    return training("window", options=("--profile-steps", "30-32"))


@check(9)
def window_has_the_device() -> str:
    inside = rankscope.open(window().folder / "window-0001")
    rows = {name: inside.table(name).collect().height for name in ("kernels", "launches", "collectives")}
    claim(all(rows.values()), f"{rows}; gaps: {window().gaps('window')}")
    return str(rows)


@check(10)
def window_stalls() -> str:
    rows = window().table("windows").select("start_stall_ns", "stop_stall_ns").rows()
    claim(len(rows) > 0, f"no window; gaps: {window().gaps('window')}")
    return f"start, stop, ns: {rows}"


@check(11, 35)
def marks_lie_between_kernels() -> str:
    done = launched([sys.executable, str(HERE / "device_clock.py"), str(window().folder)], OUT, {})
    claim(done.code == 0 and ", 0 beyond the errors" in done.output, done.output[-600:])
    return done.output.replace("\n", "; ")


@check(12, 36)
def launch_latency() -> str:
    inside = rankscope.open(window().folder / "window-0001")
    launches = inside.table("launches").select("rank", "correlation", launched_ns="start_ns").collect()
    kernels = inside.table("kernels").collect().join(launches, on=["rank", "correlation"])
    marks = step().table("device_marks").drop_nulls("device_ns")
    depth = marks.with_columns(depth=pl.col("device_ns") - pl.col("recorded_ns"))
    by_mark = depth.group_by("mark").agg(pl.col("depth").median()).rows()
    return f"launch to start, ns: {median(kernels['start_ns'] - kernels['launched_ns'])}; depth at marks: {by_mark}"


@check(13)
def steps_after_a_window() -> str:
    def usual(job: Job) -> float:
        ends = job.table("regions").filter(pl.col("kind") == "optimizer").sort("end_ns")["end_ns"]
        return float(ends.diff().slice(38).median() or 0) / 1e6  # type: ignore[arg-type]

    return f"median step from 39 on: {usual(window()):.2f} ms after a window, {usual(step()):.2f} ms without one"


@check(16)
def windows_of_two_ranks() -> str:
    rows = all_reduces("two-windows", "--steps", "200", options=("--profile-steps", "50-52")).table("windows")
    claim(rows["rank"].n_unique() == 2 and rows["first_step"].n_unique() == 1, str(rows))
    return str(rows.select("rank", "first_step", "steps", "start_stall_ns", "stop_stall_ns").rows())


@check(64)
def microbatches_have_marks() -> str:
    """Two ranks take turns on one GPU, so which stage is long is not asked here."""
    small = ["--width", "64", "--rows", "64"] if REHEARSED else []
    job = [str(HERE / "gpu_pipeline.py"), "--one-gpu", *REHEARSED[:2], *small]
    run = good(recorded("pipeline", *job, ranks=2, options=("--profile-steps", "20-22")))
    marks = run.table("device_marks").sort("rank", "recorded_ns")
    count = dict(marks.group_by("rank", "mark").len().group_by("mark").agg(pl.col("len").min()).rows())
    untimed = marks["device_ns"].null_count()
    whole = count.get("forward_start", 0) >= 8 * 38 and not untimed
    claim(whole, f"{count}, {untimed} without a time; {run.gaps('device_events')}")
    schedule = (run.report()["pipeline"] or {}).get("schedule")
    claim(schedule == "1F1B", f"the report's schedule is {schedule}; gaps: {run.gaps('ops')}")
    kernels = rankscope.open(run.folder / "window-0001").table("kernels").filter(work="compute").collect()
    length = run.first(r"([0-9.]+) ms per step")
    return f"{count}; kernels of the window fill {filled_by(kernels, marks)} of what marks enclose; {length} ms a step"


def filled_by(kernels: pl.DataFrame, marks: pl.DataFrame) -> dict[str, float]:
    """The share of forwards and backwards, by marks, in which a kernel runs: median over those that hold any."""
    ends = pl.col("mark").is_in(("forward_end", "backward_end"))
    passes = marks.with_columns(begin_ns=pl.col("device_ns").shift(1).over("rank")).filter(ends).sort("begin_ns")
    inside = kernels.sort("start_ns").join_asof(
        passes, left_on="start_ns", right_on="begin_ns", by="rank", check_sortedness=False
    )
    inside = inside.filter(pl.col("end_ns") <= pl.col("device_ns") + pl.col("clock_error_ns"))
    share = (pl.col("end_ns") - pl.col("start_ns")).sum() / (pl.col("device_ns") - pl.col("begin_ns")).first()
    of_passes = inside.group_by("rank", "mark", "begin_ns").agg(share.alias("share"))
    return dict(of_passes.group_by("mark").agg(pl.col("share").median()).rows())


@check(33)
def what_a_mark_costs() -> str:
    done = launched([sys.executable, str(HERE / "collectors.py"), "--rounds", "1"], OUT, {})
    claim(done.code == 0, done.output[-400:])
    return "µs without, with, difference: " + "; ".join(done.output.splitlines()[-2:])


@check(34)
def every_mark_has_a_time() -> str:
    rows = step().table("device_marks")
    claim(rows.height > 0, f"none; gaps: {step().gaps('device_events')}")
    claim(rows["device_ns"].null_count() == 0, f"{rows['device_ns'].null_count()} of {rows.height} have none")
    claim(not step().gaps("device_events"), str(step().gaps("device_events")))
    claim(rows["clock_error_ns"].median() < 100_000, median(rows["clock_error_ns"]))  # type: ignore[operator]
    return f"{rows.group_by('mark').len().rows()}; clock error, ns: {median(rows['clock_error_ns'])}"


@check(66)
def samples_see_a_host_that_waits() -> str:
    """The device works 50 ms and more for each step, and the host waits for it in one line."""
    text = """
import torch, torch.distributed as dist
device, side = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 256)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
weights = torch.nn.Parameter(torch.randn(side, side, device=device))
optimizer = torch.optim.SGD([weights], 1e-9)
for _ in range(300):
    loss = sum((weights @ weights).mean() for _ in range(8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
dist.destroy_process_group()
"""
    calls = good(recorded("samples", script("waiting", text))).report()["code"]
    line = 1 + text.splitlines().index("    loss.item()")
    waits = sum(call["fraction"] for call in calls if call["line"] == line)
    claim(bool(REHEARSED) or waits > 0.5, f"{waits:.0%} of the samples are in .item(): {calls}")
    return f"{waits:.0%} of the samples are in .item()"


@check(7, 37)
def captures_are_left_alone() -> str:
    job = training("capture", "--steps", "12", "--warmup", "2", "--captures", "3")
    return f"3 captures of 1 s each, ended well; gaps: {job.gaps('device_events')}"


@check(69)
def captures_during_collectives_are_left_alone() -> str:
    job = all_reduces("graphs", "--steps", "50", "--captures", "5")
    records = job.table("flight_records")
    without = records["duration_ns"].null_count()
    claim(records.height >= 110 and not without, f"{records.height} records, {without} without a duration")
    return f"5 captures of 2 s each, ended well; {records.height} records; gaps: {job.gaps('flight_recorder')}"


@check(14)
def graphs_survive_a_window() -> str:
    text = """
import torch, torch.distributed as dist, rankscope
dist.init_process_group("nccl")
layer, x = torch.nn.Linear(256, 256, device="cuda"), torch.ones(64, 256, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        layer(x).sum().backward(); dist.all_reduce(layer.weight.grad)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    layer(x).sum().backward(); dist.all_reduce(layer.weight.grad)
for _ in range(60):
    graph.replay(); torch.cuda.synchronize(); rankscope.step()
print("sum", float(layer.weight.grad.sum()))
dist.destroy_process_group()
"""
    job = good(recorded("graphs", script("graphs", text), options=("--profile-steps", "20-22")))
    return f"{job.table('windows').height} window; gaps: {job.table('gaps')['why'].unique().to_list()}"


@check(38)
def one_connection_is_as_fast() -> str:
    off = "CUDA_DEVICE_MAX_CONNECTIONS=1 RANKSCOPE_DISABLE=device_events"
    with_marks, without = training("marks-1", env="CUDA_DEVICE_MAX_CONNECTIONS=1"), training("no-marks-1", env=off)
    ms = [job.first(r"([\d.]+) ms per step") for job in (with_marks, without)]
    error = median(with_marks.table("device_marks")["clock_error_ns"])
    return f"{ms[0]} ms with marks, {ms[1]} without; clock error, ns: {error}"


@check(40)
def all_that_is_always_on() -> str:
    command = [sys.executable, str(HERE / "overhead.py"), "--pairs", str(PAIRS), "--ranks", "1"]
    done = subprocess.run(
        [*command, "--job", str(HERE / "gpu_step.py"), *REHEARSED[2:]], capture_output=True, text=True
    )
    claim(done.returncode == 0, done.stderr[-400:])
    return "; ".join(" ".join(line.split()) for line in done.stdout.splitlines())


@check(41)
def mfu_is_that_by_hand() -> str:
    flops, by_hand = step().first(r"([\d.e+]+) FLOPs"), step().first(r"MFU ([\d.]+)%")
    found = step().report("--flops-per-step", str(flops), "--peak-tflops", PEAK_TFLOPS)["utilisation"]
    return f"{by_hand} % by hand, {found['mfu']:.2%} reported"


@check(54, 55)
def what_the_report_says_of_the_device() -> str:
    tiny = good(recorded("tiny", str(HERE / "gpu_step.py"), "--size", "tiny", "--steps", "200"))
    said = []
    for job in (step(), tiny):
        done = subprocess.run([*RANKSCOPE, "report", str(job.folder)], capture_output=True, text=True)
        said.append(" ".join(line.strip() for line in done.stdout.splitlines() if re.search("evice|host", line)))
    return f"1 B parameters: {said[0][:500]} | tiny: {said[1][:500]}"


# ---------------------------------------------------------------- jobs that go wrong, and what is asked of the machine


@check(3)
def nothing_initialises_cuda() -> str:
    text = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    assert float(torch.ones(4, device="cuda").sum()) == 4
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    good(recorded("no-cuda", script("no-cuda", text)))
    return "CUDA is not initialised, and a forked child can use it"


@check(39)
def no_context_is_made() -> str:
    text = """
import subprocess, time, torch, torch.distributed as dist, rankscope
torch.cuda.init()
dist.init_process_group("gloo")
for _ in range(30):
    dist.all_reduce(torch.ones(4)); rankscope.step(); time.sleep(0.1)
print("used", subprocess.run(["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader"],
                             capture_output=True, text=True).stdout.split())
"""
    path = script("context", text)
    off = good(recorded("context-off", path, env="RANKSCOPE_DISABLE=device_events")).output.rpartition("used")[2]
    on = good(recorded("context", path)).output.rpartition("used")[2]
    claim(on == off, f"{on} with, {off} without")
    return f"GPU memory of processes, with and without: {on.strip()}"


@check(42)
def device_assert_ends_the_same() -> str:
    text = """
import torch, torch.distributed as dist, rankscope
dist.init_process_group("nccl")
x = torch.zeros(8, device="cuda")
for step in range(20):
    x += 1; rankscope.step()
    if step == 10:
        x[torch.full((4,), 99, device="cuda")] = 1
    torch.cuda.synchronize()
"""
    path = script("assert", text)
    ours = recorded("assert", path)
    plain = launched([*TORCHRUN, "--standalone", "--nproc-per-node", "1", path], OUT, {})
    claim(ours.code == plain.code != 0, f"exit {ours.code}, {plain.code} under torchrun")
    claim("device-side assert" in ours.output, ours.output[-400:])
    gaps = ours.gaps("device_events")
    return f"exit {ours.code} both; {ours.seconds:.1f} s, {plain.seconds:.1f} s under torchrun; gaps: {gaps}"


@check(43)
def hung_rank_ends_as_soon() -> str:
    """One rank is stopped, then torchrun is asked to end; how long that takes."""
    took = []
    for name, launcher in (("hung", [*RANKSCOPE, "run", "--no-report", "--out", str(OUT / "hung")]), ("", TORCHRUN)):
        job = [str(HERE / "nccl_job.py"), "--one-gpu", *REHEARSED[:2], "--steps", "100000"]
        command = [*launcher, "--standalone", "--nproc-per-node", "2", *job]
        with quiet(command) as running:
            time.sleep(25)
            ranks = subprocess.run(["pgrep", "-f", "nccl_job.py --one-gpu"], capture_output=True, text=True)
            claim(bool(ranks.stdout), f"{name or 'torchrun'}: no rank")
            os.kill(int(ranks.stdout.split()[-1]), signal.SIGSTOP)
            time.sleep(3)
            began = time.monotonic()
            running.send_signal(signal.SIGTERM)
            running.wait(120)
            took.append(time.monotonic() - began)
    return f"{took[0]:.1f} s, {took[1]:.1f} s under torchrun"


@check(27)
def doctor_and_topology() -> str:
    done = launched([*RANKSCOPE, "doctor"], OUT, {})
    (OUT / "doctor.txt").write_text(done.output)
    asked_smi = {name: launched(["nvidia-smi", *name.split()], OUT, {}).output for name in ("-L", "topo -m")}
    (OUT / "nvidia-smi.txt").write_text("\n".join(asked_smi.values()))
    node = json.loads((flight().folder / "run/node=00000.json").read_bytes())
    uuids = {rank.get("gpu_uuid") for rank in node["ranks"]}
    claim(all(uuid and uuid in asked_smi["-L"] for uuid in uuids), f"{uuids} against {asked_smi['-L']}")
    return f"{uuids} as nvidia-smi -L; compare doctor.txt with nvidia-smi.txt: {node['topology']['gpus']}"


@check(29)
def reading_the_gpu_costs() -> str:
    setup = "from rankscope.collectors.node import Node, gpu; n = Node(addresses=frozenset(), gap=print); gpu.start(n)"
    done = launched([sys.executable, "-m", "timeit", "-n", "50", "-s", setup, "list(gpu.sample(n))"], OUT, {})
    claim(done.code == 0, done.output[-400:])
    return done.output.strip()


# ----------------------------------------------------------------


def pack() -> None:
    """Runs that are small enough to be fixtures."""
    (OUT / "traces").mkdir(exist_ok=True)
    for run in sorted(path.parent for path in OUT.glob("*/run")):
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        if size <= 4 * MOST_BYTES:
            with tarfile.open(OUT / "traces" / f"{run.name}.tar.xz", "w:xz") as packed:
                packed.add(run, run.name)


def hardware() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}"


def main() -> None:
    global OUT, PAIRS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="numbers, as in 1,2,24")
    parser.add_argument("--minutes", type=float, default=60, help="begin no check after that")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of check 40")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, where nearly all must fail")
    args = parser.parse_args()
    OUT, PAIRS = args.out.resolve(), args.pairs
    OUT.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        REHEARSED[:] = ["--backend", "gloo", "--size", "tiny"]
    numbers = [int(n) for n in args.only.split(",")] if args.only else [n for n in sorted(CHECKS) if n != 40]
    seen_on = f"{datetime.date.today()}, {hardware()}"
    began = time.monotonic()
    for number in numbers:
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{number:3}  left out: the time is up", flush=True)
            continue
        try:
            result, what = "seen", CHECKS[number]()
        except NotAsClaimedError as error:
            result, what = "FAILED", str(error)
        except Exception as error:  # one check must not cost the others
            result, what = "FAILED", f"{type(error).__name__}: {error}"
        what = " ".join(what.split())
        print(f"{number:3}  {result:6}  {time.monotonic() - began:4.0f} s  {what}", flush=True)
        with (OUT / "checks.md").open("a") as rows:
            rows.write(f"| {number} | {seen_on}: {result}. {what.replace('|', '/')} |\n")
    pack()


if __name__ == "__main__":
    main()
