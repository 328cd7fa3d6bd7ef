"""What is claimed of GPUs and not measured on one, and the checks that a machine with one NVIDIA GPU can do by itself.

    python benchmarks/gpu_checks.py --list
    python benchmarks/gpu_checks.py OUT
    python benchmarks/gpu_checks.py OUT --only 40 --minutes 9 --runs /tmp/runs

The claims are in gpu_checks.json, each with how it is checked and what was seen, with date and hardware; `--list`
prints those of which something was not. With a GPU do them in this order, write what was seen there, and keep small
traces (under 2 MiB) as fixtures of the tests.

Prints a line per check as it is done: its number, `FAILED` where it is not as claimed, and what was seen, which a
person compares with the claim. After each check OUT has what is to be kept, also if the machine is lost in the next:
OUT/checks.json the same by number, OUT/kept.tar what every command printed and the runs that are small, packed. The
runs themselves are in OUT/runs. Checks 21 and 40 take minutes and are done only when named. Nothing runs on after
`--minutes`. `--rehearse` shows on CPUs that the commands themselves run; without a GPU most must fail.

On a machine that is rented for a short time:

- Install rankscope: on the path alone it has no entry point, so torch loads nothing and nothing is recorded. Without a
  network bring the wheels that `pip download` says are missing (mostly polars, 55 MB), then
  `pip install --no-index --no-deps wheels/*.whl && pip install --no-index --no-deps --no-build-isolation -e .`
- Jobs with several ranks need the machine's name in /etc/hosts: `echo "127.0.0.1 $(hostname)" >>/etc/hosts`
- Nothing else may run on the GPU while something is timed. A job takes 8 to 25 s on an H100, most checks one or two.
  The most wanted first, each call with a new OUT; 6 minutes, then 4:
  `OUT1 --minutes 6 --only 33,29,43,10,7,40`
  `OUT2 --minutes 4 --only 21`
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import psutil

import rankscope

HERE = Path(__file__).parent
CLAIMS = HERE / "gpu_checks.json"
RANKSCOPE = [sys.executable, "-m", "rankscope"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PEAK_TFLOPS = "989"  # dense bf16 of an H100 or H200
LIMIT_S = 150
LEAST_S = 20  # no check begins with less time left
MOST_BYTES = 2 << 20
OF_DEVICE = ~pl.col("mark").is_in(("waits_seen", "waits_missed"))  # the others are the host's
ONLY_NAMED = {21, 40}

CHECKS: dict[int, Callable[[], str]] = {}
OUT = RUNS = LOGS = Path()
DEADLINE = 0.0  # by time.monotonic
REHEARSED: list[str] = []  # what makes the jobs run without a GPU
STEPS = 600


class NotAsClaimedError(Exception):
    """What was seen is not what the list says."""


@dataclass(frozen=True)
class Job:
    folder: Path
    code: int | None  # None: it was ended when its time was up
    output: str
    seconds: float

    def table(self, name: str) -> pl.DataFrame:
        return rankscope.open(self.folder).table(name).collect()

    def gaps(self, of: str) -> list[str]:
        """What a table or a collector says that it lacks."""
        return self.table("gaps").filter((pl.col("source") == of) | (pl.col("table") == of))["why"].unique().to_list()

    def report(self, *options: str) -> dict:
        path = LOGS / f"{self.folder.name}-report.json"
        said([*RANKSCOPE, "report", str(self.folder), "--json", str(path), *options], f"{self.folder.name}-report")
        found: dict = json.loads(path.read_bytes())
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


@contextlib.contextmanager
def begun(command: list[str], name: str, env: dict[str, str] | None = None) -> Iterator[psutil.Popen]:
    """What it prints is in its log; when the block ends, so does everything that it began."""
    with log(name).open("w") as to:
        process = psutil.Popen(command, env=os.environ | (env or {}), stdout=to, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            end(process)


def end(process: psutil.Popen) -> None:
    """Kill what is left 5 s after the launcher was asked to end: torchrun's ranks have sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = [process, *process.children(recursive=True)]
        process.terminate()
        for one in psutil.wait_procs(everyone, 5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def log(name: str) -> Path:
    return LOGS / f"{name}.txt"


def launched(
    command: list[str], name: str, folder: Path, env: dict[str, str] | None = None, limit_s: float = LIMIT_S
) -> Job:
    began = time.monotonic()
    code = None
    with begun(command, name, env) as process, contextlib.suppress(psutil.TimeoutExpired):
        code = process.wait(max(0.0, min(limit_s, DEADLINE - began)))
    return Job(folder, code, log(name).read_text(errors="replace"), time.monotonic() - began)


def said(command: list[str], name: str) -> str:
    """What a command prints that must end well."""
    done = launched(command, name, RUNS)
    claim(done.code == 0, f"{name} ended with {done.code}: {done.output[-400:]}")
    return done.output


def recording(name: str, *job: str, ranks: int = 1, options: tuple[str, ...] = ()) -> list[str]:
    """The command line of one job under `rankscope run`, in RUNS/name."""
    own = ["--no-report", "--profile-first", "0", "--out", str(RUNS / name), *options]
    return [*RANKSCOPE, "run", *own, "--standalone", "--nproc-per-node", str(ranks), *job]


@functools.cache
def recorded(name: str, *job: str, ranks: int = 1, options: tuple[str, ...] = (), env: str = "") -> Job:
    """That job; `env` is as in "A=1 B=2"."""
    command = recording(name, *job, ranks=ranks, options=options)
    return launched(command, name, RUNS / name, dict(pair.split("=", 1) for pair in env.split()))


def triggered(name: str, *job: str, ranks: int = 1) -> Job:
    """A job that is asked for two windows, one after the other, and then runs to its end."""
    with begun(recording(name, *job, ranks=ranks), name) as running:
        for number in (1, 2):
            asking = f"{name}-trigger-{number}"
            while launched([*RANKSCOPE, "trigger", str(RUNS / name), "--count", "3"], asking, RUNS).code != 0:
                has_ended = running.poll() is not None
                claim(
                    not has_ended and time.monotonic() < DEADLINE,
                    log(asking).read_text() + log(name).read_text()[-300:],
                )
                time.sleep(1)
        with contextlib.suppress(psutil.TimeoutExpired):
            running.wait(max(0.0, min(LIMIT_S, DEADLINE - time.monotonic())))
        code = running.poll()
    return good(Job(RUNS / name, code, log(name).read_text(errors="replace"), 0.0))


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
    path = LOGS / f"{name}.py"
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


@check(5)
def gpu_counters() -> str:
    rows = flight().table("counters").filter(pl.col("source") == "gpu")
    claim(rows.height > 0, f"none; gaps: {flight().gaps('counters')}")
    ranges = rows.group_by("name").agg(low=pl.col("value").min(), high=pl.col("value").max()).sort("name")
    return "; ".join(f"{name} {low:g}..{high:g}" for name, low, high in ranges.iter_rows())


@check(8)
def without_marks_it_says_so() -> str:
    found = all_reduces("no-marks", env="RANKSCOPE_DISABLE=device_events").report()
    return f"verdict: {found['verdict']}; findings: {[finding['title'] for finding in found['findings']]}"


@functools.cache
def build_hooks() -> str:
    return said([*RANKSCOPE, "doctor", "--build"], "build-hooks")


def plugin() -> Job:
    build_hooks()
    return all_reduces("plugin", env="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,PROFILE")


@check(17)
def plugin_is_loaded() -> str:
    job = plugin()
    lines = [line.split("NCCL INFO ")[-1] for line in job.output.splitlines() if "profiler" in line.lower()]
    is_loaded = any(re.search(r"[Ll]oaded rankscope \(v\d\)", line) for line in lines)
    claim(is_loaded, str(lines[:6] or job.output[-400:]))
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
    from rankscope.analysis.timeline.nccl_durations import nccl_waits

    return nccl_waits(job.table("collectives"), job.table("nccl_calls"), job.table("nccl_events"))


@check(19)
def calls_are_joined() -> str:
    found = waits(plugin())
    claim(found.height > 0 and found["number"].null_count() == 0, f"{found['number'].null_count()} of {found.height}")
    return f"all {found.height}"


def late() -> Job:
    build_hooks()
    return all_reduces("late", "--late", "1:20", "--steps", "100")


@check(20)
def waits_name_the_layer() -> str:
    rows = late().table("nccl_events").filter(pl.col("event") == "recv")
    claim(not rows.is_empty(), f"no call; gaps: {late().gaps('nccl')}")
    longest = rows.group_by("rank", "call").agg(pl.col("network_wait_ns", "gpu_wait_ns").max() / 1e6)
    of = {rank: ms for rank, *ms in longest.group_by("rank").agg(pl.exclude("rank", "call").median()).rows()}
    seen = f"median ms of a call's receives, network and GPU: rank 0 {of[0]}, rank 1 {of[1]}"
    claim(15 < of[0][0] - of[1][0] < 25, seen)
    return seen


@check(21)
def what_the_plugin_costs() -> str:
    """Two ranks that take turns on one GPU: differences below some percent are not to be seen so."""
    build_hooks()
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
    from rankscope.analysis.timeline.nccl_durations import nccl_durations

    job = flight()
    found = nccl_durations(job.table("collectives"), job.table("groups"), job.table("flight_records"))
    known = found.filter(pl.col("name").str.contains("all_?reduce"))
    untimed = known.filter(pl.col("record") > 0)["duration_ns"].null_count()
    claim(known.height >= 400, f"{known.height} records; gaps: {job.gaps('flight_recorder')}")
    claim(untimed == 0, f"{untimed} without a duration, the first aside")
    claim(known["number"].null_count() == 0, f"{known['number'].null_count()} of {known.height} are nobody's")
    return f"{known.height} records; ns: {median(known['duration_ns'])}; named {known['name'][0]}"


@check(25)
def worker_server_answers() -> str:
    """Asked while a job runs, with the handler that the collector chose."""
    from rankscope.collectors.rank.flight_recorder import NCCL_RECORDER

    before = set(Path("/tmp").glob("rankscope-*/rank"))
    job = [str(HERE / "nccl_job.py"), *REHEARSED[:2], "--steps", "20000", "--mib", "0.1", "--late", "0:1"]
    with begun(recording("asked", *job), "asked"):
        deadline = time.monotonic() + 40
        while not (new := set(Path("/tmp").glob("rankscope-*/rank")) - before):
            claim(time.monotonic() < deadline, f"no server came: {log('asked').read_text()[-300:]}")
            time.sleep(0.2)
        time.sleep(8)
        (path,) = new
        handlers, _ = asked(path, "GET /handler/")
        body, seconds = asked(path, f"POST /handler/{NCCL_RECORDER}")
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


@check(45)
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


def two_ranks(how: str) -> Job:
    """A smaller model on two ranks, which share the GPU, with a window."""
    job = ("--one-gpu", "--size", "tiny" if REHEARSED else "100m", "--parallel", how)
    return training(f"two-{how}", *job, ranks=2, options=("--profile-steps", "30-32"))


@check(9)
def window_has_the_device() -> str:
    job = two_ranks("ddp")
    inside = rankscope.open(job.folder / "window-0001")
    rows = {name: inside.table(name).collect().height for name in ("kernels", "launches", "collectives")}
    claim(all(rows.values()), f"{rows}; gaps: {job.gaps('window')}")
    return str(rows)


@check(10)
def window_stalls() -> str:
    job = [str(HERE / "gpu_step.py"), *REHEARSED[2:], "--steps", "400" if REHEARSED else "300"]
    run = triggered("twice", *job)
    rows = run.table("windows").sort("first_step").select("start_stall_ns", "stop_stall_ns").rows()
    claim(len(rows) == 2, f"{rows}; gaps: {run.gaps('window')}")
    return f"start, stop, ns, of the first and second: {rows}; {run.first(r'([0-9.]+) ms per step')} ms a step"


@check(11, 35)
def marks_lie_between_kernels() -> str:
    seen = said([sys.executable, str(HERE / "device_clock.py"), str(window().folder)], "device_clock")
    found = re.search(r"(\d+) marks; .*, 0 beyond the errors\nclaimed: marks (\d+) ns", seen)
    claim(found is not None and int(found[1]) >= 10 and int(found[2]) < 1_000_000, seen)
    return seen.replace("\n", "; ")


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

    after, without = usual(window()), usual(step())
    seen = f"median step from 39 on: {after:.2f} ms after a window, {without:.2f} ms without one"
    claim(after < 1.02 * without, seen)
    return seen


@check(16)
def windows_of_two_ranks() -> str:
    rows = all_reduces("two-windows", "--steps", "200", options=("--profile-steps", "50-52")).table("windows")
    claim(rows["rank"].n_unique() == 2 and rows["first_step"].n_unique() == 1, str(rows))
    return str(rows.select("rank", "first_step", "steps", "start_stall_ns", "stop_stall_ns").rows())


@check(64)
def microbatches_have_marks() -> str:
    """Two ranks take turns on one GPU, so which stage is long is not asked here."""
    side = "64" if REHEARSED else "2048"
    job = [str(HERE / "gpu_pipeline.py"), "--one-gpu", *REHEARSED[:2], "--width", side, "--rows", side]
    run = good(recorded("pipeline", *job, ranks=2, options=("--profile-steps", "20-22")))
    marks = run.table("device_marks").filter(OF_DEVICE).sort("rank", "recorded_ns")
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
    seen = said([sys.executable, str(HERE / "collectors.py"), "--rounds", "1"], "collectors")
    return "µs without, compiled, in Python: " + "; ".join(" ".join(line.split()) for line in seen.splitlines()[2:])


@check(34)
def every_mark_has_a_time() -> str:
    rows = step().table("device_marks").filter(OF_DEVICE)
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
for _ in range(60):
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


@check(37)
def captures_are_left_alone() -> str:
    text = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
compiled, optimizer = torch.compile(model, mode="reduce-overhead"), torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(200):
    compiled(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
"""
    job = training("capture", "--steps", "12", "--warmup", "2", "--captures", "3")
    compiled = good(recorded("compiled", script("compiled", text)))
    gaps = [run.gaps("device_events") for run in (job, compiled)]
    return f"3 captures of 1 s each, and reduce-overhead, ended well; gaps: {gaps}"


@check(69)
def captures_during_collectives_are_left_alone() -> str:
    job = all_reduces("captures", "--steps", "50", "--captures", "5")
    records = job.table("flight_records")
    without = records.filter(pl.col("record") > 0)["duration_ns"].null_count()
    claim(
        records.height >= 110 and not without,
        f"{records.height} records, {without} without a duration, the first aside",
    )
    return f"5 captures of 2 s each, ended well; {records.height} records; gaps: {job.gaps('flight_recorder')}"


@check(7, 14)
def graphs_survive_two_windows() -> str:
    text = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import argparse, time, torch, torch.distributed as dist, rankscope
from nccl_job import begin
begin(argparse.Namespace(backend="nccl", one_gpu=True))
layer, x = torch.nn.Linear(256, 256, device="cuda"), torch.ones(64, 256, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        layer(x).sum().backward(); dist.all_reduce(layer.weight.grad)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    layer(x).sum().backward(); dist.all_reduce(layer.weight.grad)
for _ in range(1000):
    graph.replay(); torch.cuda.synchronize(); time.sleep(0.03); rankscope.step()
dist.destroy_process_group()
"""
    job = triggered("graphs", script("graphs", text), ranks=2)
    rows = job.table("windows").select("rank", "first_step", "start_stall_ns", "stop_stall_ns").rows()
    claim(len(rows) == 4, f"{rows}; gaps: {job.gaps('window')}")
    return f"{rows}; gaps: {job.table('gaps')['why'].unique().to_list()}"


@check(38)
def one_connection_is_as_fast() -> str:
    off = "CUDA_DEVICE_MAX_CONNECTIONS=1 RANKSCOPE_DISABLE=device_events"
    with_marks, without = training("marks-1", env="CUDA_DEVICE_MAX_CONNECTIONS=1"), training("no-marks-1", env=off)
    ms = [job.first(r"([\d.]+) ms per step") for job in (with_marks, without)]
    errors = with_marks.table("device_marks")["clock_error_ns"]
    seen = f"{ms[0]} ms with marks, {ms[1]} without; clock error, ns: {median(errors)}"
    claim(ms[0] < 1.02 * ms[1] and (errors.median() or 0) < 1_000_000, seen)  # type: ignore[operator]
    return seen


@check(40)
def all_that_is_always_on() -> str:
    command = [sys.executable, str(HERE / "overhead_within.py"), "--ranks", "1", "--steps", str(STEPS), "--block", "5"]
    job = launched([*command, "--job", str(HERE / "gpu_step.py"), *REHEARSED[2:]], "overhead", RUNS, limit_s=3600)
    claim(job.code == 0, f"ended with {job.code}: {job.output}")
    return "; ".join(" ".join(line.split()) for line in job.output.splitlines())


@check(75)
def waits_are_those_of_kernels() -> str:
    """Two ranks on one GPU; what the steps outside of the window have of communication, and those inside."""
    seen = []
    for how in ("ddp", "fsdp2"):
        job = two_ranks(how)
        inside = Job(job.folder / "window-0001", 0, "", 0.0)
        marks, kernels = (communication(one.report()) for one in (job, inside))
        length = job.first(r"([\d.]+) ms per step")
        seen.append(f"{how} of {length} ms: by rank, by marks {marks}, by kernels {kernels}")
    return "; ".join(seen)


def communication(report: dict) -> dict[int, tuple[float, float]]:
    """Each rank's exposed communication and its step, ms."""
    found: dict[int, tuple[float, float]] = {}
    for row in report["breakdown"]:
        ms, of = row["ns_per_step"] / 1e6, found.get(row["rank"], (0.0, 0.0))
        is_exposed = row["part"] in ("wait", "bubble", "transfer", "unsplit")
        found[row["rank"]] = (round(of[0] + ms * is_exposed, 2), round(of[1] + ms, 2))
    return found


@check(76)
def native_hook_records_the_same() -> str:
    build_hooks()
    job = ("--steps", "60", "--mib", "1", "--captures", "2")
    compiled = all_reduces("hook", *job)
    python = all_reduces("hook-python", *job, env=f"XDG_CACHE_HOME={RUNS / 'none'}")
    columns = ["rank", "op", "group_id", "seq", "size_bytes", "dtype", "is_async"]
    both = [one.table("collectives").sort(columns) for one in (compiled, python)]
    claim(both[0].select(columns).equals(both[1].select(columns)), f"{both[0]} {both[1]}")
    claim(both[0]["end_ns"].null_count() == both[0].height, "some have an end")
    took = [median(rows["issued_ns"] - rows["start_ns"]) for rows in both]
    return f"{both[0].height} rows, the same; a call takes, ns: {took[0]}; in Python {took[1]}"


@check(41)
def mfu_is_that_by_hand() -> str:
    flops, by_hand = step().first(r"([\d.e+]+) FLOPs"), step().first(r"MFU ([\d.]+)%")
    found = step().report("--flops-per-step", str(flops), "--peak-tflops", PEAK_TFLOPS)["utilisation"]
    seen = f"{by_hand} % by hand, {found['mfu']:.2%} reported"
    claim(abs(100 * found["mfu"] - by_hand) < 0.02 * by_hand, seen)
    return seen


@check(54, 55)
def what_the_report_says_of_the_device() -> str:
    tiny = good(recorded("tiny", str(HERE / "gpu_step.py"), "--size", "tiny", "--steps", "200"))
    seen = []
    for job in (step(), tiny):
        report = said([*RANKSCOPE, "report", str(job.folder)], f"{job.folder.name}-printed")
        seen.append(" ".join(line.strip() for line in report.splitlines() if re.search("evice|host", line)))
    return f"1 B parameters: {seen[0][:500]} | tiny: {seen[1][:500]}"


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
for _ in range(150):  # after 10 s it is asked which device is the current one
    dist.all_reduce(torch.ones(4)); rankscope.step(); time.sleep(0.1)
print("used", subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"],
                             capture_output=True, text=True).stdout.split())
"""
    path = script("context", text)
    jobs = [recorded("context", path), recorded("context-off", path, env="RANKSCOPE_DISABLE=device_events")]
    on, off = (re.findall(r"^used (.*)", good(job).output, re.MULTILINE) for job in jobs)
    claim(on == off != [], f"{on} with, {off} without")
    return f"GPU memory in use, with and without: {on}"


@check(42)
def device_assert_ends_the_same() -> str:
    text = """
import torch, torch.distributed as dist, rankscope
import time
torch.cuda.set_device(0)
dist.init_process_group("nccl")
x = torch.zeros(8, device="cuda")
dist.all_reduce(x)
for step in range(40):
    x += 1; rankscope.step(); time.sleep(0.1)
    if step == 30:
        x[torch.full((4,), 99, device="cuda")] = 1
    torch.cuda.synchronize()
"""
    path = script("assert", text)
    ours = recorded("assert", path)
    plain = launched([*TORCHRUN, "--standalone", "--nproc-per-node", "1", path], "assert-torchrun", RUNS)
    claim(ours.code == plain.code != 0, f"exit {ours.code}, {plain.code} under torchrun")
    claim("device-side assert" in ours.output, ours.output[-400:])
    gaps = ours.gaps("device_events")
    claim(ours.table("device_marks").height > 0 and len(gaps) <= 1, f"gaps: {gaps}")
    return f"exit {ours.code} both; {ours.seconds:.1f} s, {plain.seconds:.1f} s under torchrun; gaps: {gaps}"


@check(43)
def hung_rank_ends_as_soon() -> str:
    """One rank is stopped, then torchrun is asked to end; how long that takes."""
    took = []
    job = [str(HERE / "nccl_job.py"), "--one-gpu", *REHEARSED[:2], "--steps", "100000"]
    plain = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *job]
    for name, command in (("hung", recording("hung", *job, ranks=2)), ("hung-torchrun", plain)):
        with begun(command, name) as running:
            time.sleep(25)
            ranks = [one for one in running.children(recursive=True) if "LOCAL_RANK" in one.environ()]
            claim(bool(ranks), f"no rank: {log(name).read_text()[-300:]}")
            ranks[-1].suspend()
            time.sleep(3)
            began = time.monotonic()
            running.terminate()
            running.wait(120)
            took.append(time.monotonic() - began)
    return f"{took[0]:.1f} s, {took[1]:.1f} s under torchrun"


@check(27)
def doctor_and_topology() -> str:
    launched([*RANKSCOPE, "doctor"], "doctor", RUNS)
    said(["nvidia-smi", "topo", "-m"], "nvidia-smi-topo")
    listed = said(["nvidia-smi", "-L"], "nvidia-smi-L")
    node = json.loads((flight().folder / "run/node=00000.json").read_bytes())
    uuids = {rank.get("gpu_uuid") for rank in node["ranks"]}
    claim(all(uuid and uuid in listed for uuid in uuids), f"{uuids} against {listed}")
    return f"{uuids} as nvidia-smi -L; compare doctor.txt with nvidia-smi-topo.txt: {node['topology']['gpus']}"


@check(29)
def reading_the_gpu_costs() -> str:
    setup = "from rankscope.collectors.node import Node, gpu; n = Node(addresses=frozenset(), gap=print); gpu.start(n)"
    return said([sys.executable, "-m", "timeit", "-n", "50", "-s", setup, "list(gpu.sample(n))"], "timeit")


# ----------------------------------------------------------------


def keep(packed: set[Path]) -> None:
    """Put into OUT/kept.tar what is new: logs, and runs that are small enough to be fixtures."""
    with tarfile.open(OUT / "kept.tar", "a") as kept:
        for path in sorted({*LOGS.iterdir(), *RUNS.glob("*/run")} - packed):
            packed.add(path)
            if path.parent == LOGS:
                kept.add(path, f"logs/{path.name}")
                continue
            run = path.parent
            if sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) > 4 * MOST_BYTES:
                continue
            small = io.BytesIO()
            with tarfile.open(fileobj=small, mode="w:xz") as into:
                into.add(run, run.name)
            if small.tell() <= MOST_BYTES:
                entry = tarfile.TarInfo(f"runs/{run.name}.tar.xz")
                entry.size = small.tell()
                small.seek(0)
                kept.addfile(entry, small)


def hardware() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}"


def print_open() -> None:
    """Print each claim of which something was not seen, with how it is checked and what was."""
    for one in json.loads(CLAIMS.read_bytes()):
        if not one["seen"] or re.search("not (tried|measured|compared)", one["seen"]):
            itself = " (by this command)" if one["number"] in CHECKS else ""
            print(f"{one['number']:3}  {one['claim']}\n     check{itself}: {one['how']}")
            print(f"     seen: {one['seen'] or 'nothing'}\n")


def main() -> None:
    global OUT, RUNS, LOGS, STEPS, DEADLINE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="a folder for what is to be kept")
    parser.add_argument("--list", action="store_true", help="print the claims of which something was not seen, and end")
    parser.add_argument("--runs", type=Path, help="a new folder for the runs themselves; without: OUT/runs")
    parser.add_argument("--only", help="numbers in the order in which they are done, as in 34,1,2")
    parser.add_argument("--minutes", type=float, default=60, help="after which all ends")
    parser.add_argument("--steps", type=int, default=STEPS, help="of check 40")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, where nearly all must fail")
    args = parser.parse_args()
    if args.list:
        print_open()
        return
    if args.out is None:
        parser.error("name a folder OUT, or --list")
    OUT, STEPS = args.out.resolve(), args.steps
    RUNS = (args.runs or OUT / "runs").resolve()
    if RUNS.exists():
        sys.exit(f"{RUNS} is there already: runs of two calls would be mixed; name another folder")
    LOGS = RUNS / "logs"
    LOGS.mkdir(parents=True)
    OUT.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        REHEARSED[:] = ["--backend", "gloo", "--size", "tiny"]
    numbers = [int(n) for n in args.only.split(",")] if args.only else sorted(CHECKS.keys() - ONLY_NAMED)
    if absent := [number for number in numbers if number not in CHECKS]:
        sys.exit(f"no such checks here: {absent}")
    seen_on = f"{datetime.date.today()}, {hardware()}"
    began = time.monotonic()
    DEADLINE = began + 60 * args.minutes
    packed: set[Path] = set()
    seen: dict[int, str] = {}
    for number in numbers:
        if time.monotonic() > DEADLINE - LEAST_S:
            print(f"{number:3}  left out: the time is up", flush=True)
            continue
        try:
            result, what = "seen", CHECKS[number]()
        except NotAsClaimedError as error:
            result, what = "FAILED", str(error)
        except Exception as error:  # one check must not cost the others
            result, what = "FAILED", f"{type(error).__name__}: {error}"
            log(f"check-{number}").write_text(traceback.format_exc())
        what = " ".join(what.split())
        print(f"{number:3}  {result:6}  {time.monotonic() - began:4.0f} s  {what}", flush=True)
        seen[number] = f"{seen_on}: {result}. {what}"
        (OUT / "checks.json").write_text(json.dumps(seen, indent=1, ensure_ascii=False))
        keep(packed)


if __name__ == "__main__":
    main()
