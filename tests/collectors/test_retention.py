"""A recording that may take only so much: the newest steps stay whole, of older ones their lengths, exactly."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.report import html, terminal
from rankscope.analysis.runs.step_range import _count_steps
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.agent import arrow_writer, loop
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.process import bind
from rankscope.collectors.agent.retention import Retention
from rankscope.errors import BadInput
from record import write
from simulate import GPUS, Job, healthy_resources, run
from support.paths import SCRIPTS

RANKSCOPE = [sys.executable, "-m", "rankscope"]
JOB = SCRIPTS / "many_regions.py"
SLOW, SINCE = 5, 60
AT = ["rank", "step"]
SLICES = 30
FILES = 96  # rows of a file


@pytest.fixture(scope="module", params=["3d", "ddp-nccl"])
def both(request, tmp_path_factory):
    """120 steps of 16 ranks on two nodes whose clocks differ, one rank slow from step 60 on; and what was kept."""
    job = Job(parallel=request.param, ranks=16, steps=120, seed=1, nic_bytes_per_s=20e9)
    can = healthy_resources(job)
    can.slowness[SINCE:, SLOW] *= 1.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_writer, "SEAL_ROWS", FILES)
        whole = write(run(job, can), tmp_path_factory.mktemp(request.param) / "run")
        kept = as_kept(whole, whole.parent / "kept")
    read = read_run(kept)
    return whole, kept, read.report, read.timeline


def as_kept(whole: Path, folder: Path) -> Path:
    """The run as agents would have left it that may keep three fifths of its files, and less on the second node."""
    (folder / "run").mkdir(parents=True)
    for node, share in ((0, 0.6), (1, 0.55)):
        files = [*whole.glob(f"*/node={node:05d}")]
        files += [path for rank in range(node * GPUS, (node + 1) * GPUS) for path in whole.glob(f"*/rank={rank:05d}")]
        most = share * sum(part.stat().st_size for path in files for part in path.glob("*.arrow"))
        state = json.loads((whole / "run" / f"node={node:05d}.json").read_text())
        state |= {"keep_bytes": int(most), "kept_since_ns": keep(files, folder, int(most))}
        (folder / "run" / f"node={node:05d}.json").write_text(json.dumps(state))
    return folder


def keep(files: list[Path], folder: Path, most_bytes: int) -> int | None:
    """From when on the files are there; they are written bit by bit, and what is too much is removed on the way."""
    retention, kept = Retention(most_bytes), RunFolder(folder)
    partitions = {path.name: Partition(kept, path.name, "a0-" if "rank" in path.name else "") for path in files}
    for partition in partitions.values():
        retention.watch(partition)
    rows = [(path, pl.concat(map(pl.read_ipc, sorted(path.glob("*.arrow"))))) for path in files]
    orders = {path: arrow_writer.TABLES[path.parent.name].order for path in files}
    times = pl.concat(of[orders[path]].cast(pl.Int64) for path, of in rows if orders[path].endswith("_ns"))
    edges = [-1, *times.unique().sort().gather_every(times.n_unique() // SLICES), times.max()]
    for since, until in itertools.pairwise(edges):
        for path, of in rows:
            now = of.filter(pl.col(orders[path]).is_between(since, until, closed="right"))
            if not orders[path].endswith("_ns"):
                now = of if since < 0 else of.clear()
            if len(now):
                partitions[path.name].add(path.parent.name, dict(now.to_arrow().to_pydict()))
        for partition in partitions.values():
            partition.flush()
        retention.decide()
        for _ in range(5):  # each for a limited time
            retention.work()
    for partition in partitions.values():
        partition.close()
    return retention.since_ns


def size_of(run: Path) -> int:
    return sum(path.stat().st_size for path in run.glob("*/*/*.arrow"))


@pytest.mark.long
def test_kept_steps_are_those_of_the_whole_run_and_older_ones_have_their_lengths(both):
    whole, kept, report, part = both
    assert size_of(kept) < 0.65 * size_of(whole)
    first = report.history.kept
    assert 30 < first < 110
    all_of_it = read_run(whole).timeline
    wanted = pl.col("step") >= first
    assert part.steps.equals(all_of_it.steps.filter(wanted))
    assert part.breakdown.sort(*AT, "part").equals(all_of_it.breakdown.filter(wanted).sort(*AT, "part"))
    assert part.matched_fraction == 1
    counted = all_of_it.steps.filter(rank=report.history.rank)
    assert part.stretch.counted.select("start_ns", "end_ns").equals(
        _count_steps(Trace.open(whole).reader, report.history.rank).select("start_ns", "end_ns")
    )
    assert len(part.stretch.counted) == len(counted) == 120


@pytest.mark.long
def test_the_report_says_what_is_left(both):
    _, kept, report, _ = both
    first = report.history.kept
    assert report.findings == () or report.findings[0].ranks == (SLOW,)
    why = f"only steps {first}-119 of 120 were read (of those before step {first} only the length was kept)"
    gaps = [gap.why for gap in report.gaps]
    assert why in gaps
    assert f"; of steps before {first} only the length was kept." in report.verdict
    removed = r"records of the first [\d.]+ s were evicted, to keep within [\d.]+ [kM]B a node \(rankscope run --keep\)"
    assert any(re.fullmatch(removed, gap) for gap in gaps)
    said = terminal.render_short(report, width=200)
    assert f"Of steps before {first} only the length is left: older records were evicted (rankscope run --keep)" in said
    assert "Over the whole run a step takes from" in said
    assert "rankscope diff RUN/steps=" not in said  # of what was before nothing can be compared
    assert f"Of steps before {first} only" in html.render(report)
    with pytest.raises(BadInput, match=rf"of step 10 only the length is left, .*; the first that is there is {first}$"):
        Trace.open(kept / "steps=10-20")
    assert Trace.open(kept / f"steps={first}-{first + 3}").stretch.kept == first


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RANKSCOPE, *map(str, arguments)], capture_output=True, text=True, timeout=200)


@pytest.mark.alone
@pytest.mark.real_job
def test_a_job_that_may_keep_3_mb_has_its_last_steps_and_the_lengths_of_all(tmp_path):
    """Its 2,000 spans a step take 14 kB, so that it would write 28 MB."""
    out = tmp_path / "run"
    done = cli("run", "--out", out, "--keep", "3M", "--standalone", "--nproc-per-node", "2", JOB)
    assert done.returncode == 0, done.stderr
    (steps,) = map(int, re.findall(r"JOB (\d+) steps", done.stdout))
    state = json.loads((out / "run" / "node=00000.json").read_text())
    assert state["keep_bytes"] == 3_000_000
    assert state["kept_since_ns"] > state["start_ns"]
    assert size_of(out) < 6e6
    cli("report", out, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["history"]["count"] == steps
    assert steps > report["history"]["kept"] > steps / 4
    assert f"of steps before {report['history']['kept']} only the length was kept" in report["verdict"]
    assert [1] in [finding["ranks"] for finding in report["findings"] if finding["detector"] == "slow_rank"]


@pytest.mark.parametrize("size", ["20", "0G", "-1G", "some"])
def test_a_size_that_is_none_is_one_line(tmp_path, size):
    done = cli("run", "--keep", size, "--nproc-per-node", "1", JOB)
    assert done.returncode == 2
    assert f"--keep is what a node's files may take, as in 500M, 20G or 1T, or all; got {size}" in done.stderr
    assert done.stderr.count("\n") == 1


def filled(partition: Partition, table: str, since: int, count: int) -> None:
    """Rows that do not compress, `count` of them, a microsecond apart."""
    numbers = np.random.default_rng(since).integers(0, 2**62, count)
    times = np.arange(since, since + count) * 1000
    columns = {"end_ns": times, "number": numbers}
    if table == "regions":
        columns = {"start_ns": times, "end_ns": numbers, "name_id": numbers % 2**32}
        columns |= {"kind": np.zeros(count, np.uint8), "thread": np.zeros(count, np.uint16)}
    partition.add(table, columns)
    partition.flush()


def test_what_cannot_be_removed_is_tried_again_and_the_rest_goes(tmp_path, monkeypatch):
    """A file of regions cannot be read for a while."""
    monkeypatch.setattr(arrow_writer, "SEAL_ROWS", 1000)
    (tmp_path / "run").mkdir()
    partition = Partition(RunFolder(tmp_path), "rank=00000", "a0-")
    for since in range(0, 20_000, 1000):
        filled(partition, "regions", since, 1000)
        filled(partition, "completions", since, 1000)
    (broken, *_) = sorted((tmp_path / "regions" / "rank=00000").iterdir())
    content = broken.read_bytes()
    broken.write_bytes(b"x" * len(content))
    retention = Retention(partition.size_bytes // 2)
    retention.watch(partition)
    assert retention.decide()

    def work() -> None:
        for _ in range(100):
            retention.work()

    with pytest.raises((OSError, pa.ArrowInvalid)):
        work()
    work()
    assert len(partition.sealed("completions")) < 12
    assert not any(part.reduced for part in partition.sealed("regions"))
    broken.write_bytes(content)
    monkeypatch.setattr(retention, "_resting", {})
    while retention.decide():
        work()
    assert partition.sealed("regions")[0].reduced
    assert partition.size_bytes <= retention._most_bytes


def test_files_that_the_disk_did_not_let_seal_are_counted_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_writer, "SEAL_ROWS", 1000)
    (tmp_path / "run").mkdir()
    partition = Partition(RunFolder(tmp_path), "rank=00000", "a0-")
    retention = Retention(100_000)
    retention.watch(partition)

    def refuse(path: Path, rows: pa.Table) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(arrow_writer, "_write_file", refuse)
        for since in range(0, 10_000, 1000):
            filled(partition, "regions", since, 1000)
    assert partition.size_bytes == size_of(tmp_path) > 150_000
    for since in range(10_000, 20_000, 1000):
        filled(partition, "regions", since, 1000)
        while retention.decide():
            for _ in range(100):
                retention.work()
    assert partition.size_bytes == size_of(tmp_path) <= 100_000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_on_a_full_disk_older_records_are_still_evicted(tmp_path, monkeypatch):
    """Another job fills the disk in the moment in which there is too much: the run's JSON takes what was reserved."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]).returncode:
        pytest.skip("this machine mounts nothing")
    monkeypatch.setattr(arrow_writer, "SEAL_ROWS", 1000)
    monkeypatch.setattr(loop, "RETAIN_NS", 1)
    try:
        out = disk / "run"
        out.mkdir()
        options = {"hz": 1.0, "until_stdin_closes": False, "launch": {}}
        running = loop.Agent(bind(f"test-full-{os.getpid()}"), loop.Options(out=out, keep_bytes=200_000, **options))
        running._begin(0)
        partition = Partition(running._run, "rank=00000", "a0-")
        running._retention.watch(partition)
        for since in range(0, 40_000, 1000):
            filled(partition, "completions", since, 1000)
        with (disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(b"x" * 4096)
        for _ in range(5):
            running._read()
        assert partition.size_bytes <= 200_000
        state = json.loads((out / "run" / "node=00000.json").read_text())
        assert state["kept_since_ns"] == running._retention.since_ns
        assert (out / "run" / running._run._reserve).stat().st_size == arrow_writer.RESERVE_BYTES
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
