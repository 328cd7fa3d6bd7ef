"""Part of a long run: `RUN/steps=70-99` reads what these steps need, and no more, with the same numbers."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pytest

import rankscope
from rankscope.analysis.diagnosis import diagnose
from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.report import html, terminal
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.agent import arrow_writer
from rankscope.errors import BadInput
from record import write
from simulate import Job, healthy_resources, run

RANKSCOPE = [sys.executable, "-m", "rankscope"]
SLOW, SINCE = 5, 60
AT = ["rank", "step"]


@pytest.fixture(scope="module", params=["fsdp", "3d", "ddp-nccl", "pp-1f1b", "3d-nccl"])
def job(request, tmp_path_factory):
    """120 steps of 16 ranks on two nodes whose clocks differ; one rank is slow from 60 on.

    Files have 256 rows, in batches of 50.
    """
    return written(request.param, tmp_path_factory.mktemp(request.param) / "run")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return written("fsdp", tmp_path_factory.mktemp("fsdp") / "run")


def written(parallel: str, folder: Path) -> Path:
    job = Job(parallel=parallel, ranks=16, steps=120, seed=1, nic_bytes_per_s=20e9)
    can = healthy_resources(job)
    can.slowness[SINCE:, SLOW] *= 1.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_writer, "SEAL_ROWS", 256)
        patch.setattr(arrow_writer, "_BATCH_ROWS", 50)
        return write(run(job, can), folder)


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RANKSCOPE, *map(str, arguments)], capture_output=True, text=True, timeout=100)


@pytest.mark.long
def test_steps_of_part_of_a_run_are_those_of_all_of_it(job):
    whole, read = read_run(job).timeline, read_run(job / "steps=70-99")
    report, part = read.report, read.timeline
    wanted = pl.col("step").is_between(70, 99)
    assert part.steps.equals(whole.steps.filter(wanted))
    assert part.steps["judged"].all()
    assert len(part.steps) == 16 * 30
    assert part.breakdown.sort(*AT, "part").equals(whole.breakdown.filter(wanted).sort(*AT, "part"))
    assert part.matched_fraction == 1
    assert len(part.collectives) < len(whole.collectives) / 3
    assert report.findings[0].ranks == (SLOW,)
    not_read = ["only steps 70-99 of 120 were read"]
    assert [gap.why for gap in report.gaps] == not_read
    assert [gap.why for gap in rankscope.open(job / "steps=70-99").gaps()] == not_read
    assert "were read" not in cli("ls", job / "steps=70-99").stdout  # it lists what the files hold
    assert next(check for check in report.not_checked if check.detector == "hang").why.startswith("only steps before")


def test_a_rank_that_becomes_slow_is_no_slowdown_of_all(fsdp):
    """Other ranks then compute more beside communication and less alone."""
    report = read_run(fsdp).report
    assert [finding.detector for finding in report.findings] == ["slow_rank"]
    assert report.history is None


def test_of_a_run_that_is_too_large_the_last_steps_are_analyzed_and_the_others_summarized(fsdp, monkeypatch):
    """By steps of 130 ms before step 60 and 190 ms after it."""
    rows = sum(Trace.open(fsdp).reader.estimated_rows().values())
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 1300 // 4)
    read = read_run(fsdp)
    report, timeline = read.report, read.timeline
    assert timeline.steps["step"].min() in range(87, 93)
    assert timeline.steps["step"].max() == 119
    first = timeline.steps["step"].min()
    assert "(in steps 60-119) (it costs 30.0 ms, 18.6 % of the 161 ms step); 15 ranks wait for it." in report.verdict
    assert report.steps.count == 118  # without warm-up
    assert (report.history.count, report.history.rank, len(report.history.spans)) == (120, 0, 60)
    fast, slow = (f(span.median_ns for span in report.history.spans) for f in (min, max))
    assert fast == pytest.approx(130e6, rel=0.1)
    assert slow > 185e6
    assert report.history.median_ns == pytest.approx(report.history.read.median_ns, rel=0.35)
    text = terminal.render_short(report, width=200)
    assert f"the critical path and predicted fixes are those of steps {first}-119: on rank 0 they take" in text
    assert f"Of steps {first}-119 only." in terminal.render(report, width=200)
    assert "Steps 0-59 take 130 ms, 31.6 % less than the last ones; " in text
    assert "Over the whole run a step takes from" in html.render(report)
    assert "hang" in [check.detector for check in report.healthy]


@pytest.mark.parametrize(("least", "first"), [(10, 100), (48, 72)], ids=["enough bytes", "enough steps"])
def test_a_run_that_does_not_fit_is_held_as_far_as_it_is_enough(fsdp, monkeypatch, least, first):
    """Of 120 steps 90 would fit; 20 take as much as is enough, if these are steps enough."""
    size = memory_budget.bytes_of_rows(Trace.open(fsdp).reader)
    for name, share in (("_MOST", 0.75), ("_ENOUGH", 1.0001 / 6)):
        monkeypatch.setattr(memory_budget, name, memory_budget._BEFORE + size * share)
    monkeypatch.setattr(memory_budget, "_ENOUGH_LAST_STEPS", least + 0.01)
    stretch = Trace.open(fsdp).stretch
    assert (stretch.first, stretch.last) == (first, 119)


def test_what_does_not_fit_is_one_line(fsdp, monkeypatch):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 161_000_000)
    with pytest.raises(BadInput, match=r"so many steps need about 0\.2 GB, and 0\.2 GB are free: name fewer of them"):
        Trace.open(fsdp / "steps=10-100")


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ("steps=120-130", "has no step 120: the last is 119"),
        ("steps=30-20", "the last of these steps is before the first"),
        ("steps=all", "does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["report", "export"])
def test_steps_that_are_not_there_are_one_line(fsdp, command, steps, why):
    done = cli(command, fsdp / steps)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_every_command_takes_steps_of_a_run(fsdp, tmp_path):
    before, after = fsdp / "steps=20-49", fsdp / "steps=70-99"
    changed = json.loads(cli("diff", before, after, "--json").stdout)
    assert changed["step"]["change_ns"] > 50e6
    assert cli("check", after, "--against", before).returncode == 1
    assert cli("export", after, "--out", tmp_path / "part.pftrace.gz").returncode == 0
    assert "rank:5" in cli("whatif", after, "--fix", "rank:5").stdout
    assert cli("report", after).returncode == 0
    assert (after / "report.html").exists()


def test_ls_counts_what_the_files_hold(fsdp):
    lines = {line.split()[0]: line.split() for line in cli("ls", fsdp / "steps=20-49").stdout.splitlines() if line}
    rows = len(Trace.open(fsdp).table("collectives").collect())
    assert lines["collectives"][1:3] == [f"{rows:,}", "16"]


def test_a_rank_whose_first_records_were_lost_has_the_steps_of_the_others(fsdp, tmp_path):
    """Steps are numbered by when they were, not by how many a rank has left."""
    run = tmp_path / "run"
    shutil.copytree(fsdp, run)
    for part in run.glob("*/rank=00003/a0-part-000[0-2].arrow"):
        if part.parents[1].name in ("regions", "collectives"):
            part.unlink()
    whole, part_of = read_run(fsdp).timeline, read_run(run / "steps=70-99").timeline
    assert part_of.steps.equals(whole.steps.filter(pl.col("step").is_between(70, 99)))


def test_files_that_are_being_written_count(fsdp, tmp_path):
    """They have no footer yet; of a large job that has just begun all files are such."""
    run = tmp_path / "run"
    shutil.copytree(fsdp, run)
    for part in run.glob("collectives/*/*.arrow"):
        rows = pa.ipc.open_file(pa.BufferReader(part.read_bytes())).read_all().replace_schema_metadata()
        with pa.ipc.new_file(part, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(rows)
        part.write_bytes(part.read_bytes()[:-8])
    whole, live = (Trace.open(path).reader.estimated_rows()["collectives"] for path in (fsdp, run))
    assert live == pytest.approx(whole, rel=0.01)


def kept(run: Path, folder: Path, since_ns: int, *nodes: int) -> Path:
    """The run, whose agents say that before this time they have removed records."""
    shutil.copytree(run, folder)
    for node in nodes:
        path = folder / "run" / f"node={node:05d}.json"
        there = path if path.exists() else path.with_stem("node=00000")
        said = json.loads(there.read_text()) | ({} if there is path else {"ranks": []})
        path.write_text(json.dumps(said | {"node": node, "kept_since_ns": since_ns, "keep_bytes": 10**7}))
    return folder


@cache
def ends_ns(run: Path) -> list[int]:
    return read_run(run).timeline.steps.filter(rank=0)["end_ns"].to_list()


def test_a_job_of_whose_steps_nothing_is_left_is_judged_by_what_came_after(fsdp, tmp_path):
    """One that hangs or evaluates for long, until its last steps are evicted too."""
    report = read_run(kept(fsdp, tmp_path / "run", ends_ns(fsdp)[-1] + 10**9, 0, 1)).report
    assert "no verdict: no step was seen; rank 5 arrives late" in report.verdict
    assert report.verdict.endswith("were read (older records were evicted).")
    assert [step for step in report.breakdown if step.ns_per_step] == []


def test_what_a_node_without_ranks_of_this_world_removed_is_no_loss(fsdp, tmp_path):
    report = read_run(kept(fsdp, tmp_path / "run", ends_ns(fsdp)[-5], 7)).report
    assert report.history is None
    assert report.findings[0].ranks == (SLOW,)


def test_a_run_whose_last_attempt_came_no_further_than_its_first_word_is_read(fsdp, tmp_path):
    folder = kept(fsdp, tmp_path / "run", ends_ns(fsdp)[60], 0, 1)
    for path in folder.glob("ranks/*/a0-part-0000.arrow"):
        later = pl.read_ipc(path).with_columns(start_ns=pl.lit(ends_ns(fsdp)[-1] + 10**9))
        arrow_writer.write_sealed(path.parent, "a1-", later.to_arrow())
    report = read_run(folder).report
    assert report.verdict == "No verdict: no step was seen."


def test_records_that_are_evicted_while_they_are_read_are_read_again(fsdp, tmp_path, monkeypatch):
    """The agents of a running job write down that steps before 40 go, just as the run has been opened."""
    ends = ends_ns(fsdp)
    folder = kept(fsdp, tmp_path / "run", ends[20], 0, 1)
    states = sorted((folder / "run").glob("node=*.json"))
    for path in states:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "running"}))
    opened = []

    def open_and_remove(path):
        opened.append(trace := Trace.open(path))
        if len(opened) == 1:
            for state in states:
                said = json.loads(state.read_text()) | {"kept_since_ns": ends[40]}
                state.write_text(json.dumps(said))
        return trace

    monkeypatch.setattr(diagnose, "Trace", SimpleNamespace(open=open_and_remove))
    report = read_run(folder).report
    assert len(opened) == 2
    assert report.history.kept > 40


def test_a_file_that_cannot_be_read_costs_no_other(fsdp, tmp_path):
    """It lies in the midst of a rank's files, among which those of the steps are searched."""
    folder = tmp_path / "run"
    shutil.copytree(fsdp, folder)
    files = sorted((folder / "collectives" / "rank=00003").iterdir())
    files[len(files) // 2].write_bytes(b"")
    rows = [len(read_run(run / "steps=100-110").timeline.collectives.filter(rank=3)) for run in (fsdp, folder)]
    assert rows[0] == rows[1] > 0
