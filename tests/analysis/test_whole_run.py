"""A run that is too long to be held at once is analyzed in stretches: here, in other processes, or from summaries."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from faults import Case, simulated
from rankscope.analysis.diagnosis import savings, stretches
from rankscope.analysis.diagnosis.diagnose import diagnose, read_run
from rankscope.analysis.diagnosis.kept_values import FOLDER, kept
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.step_summaries import STEP_SUMMARIES
from rankscope.analysis.diagnosis.stretch_summary import StretchSummaries
from rankscope.analysis.diagnosis.stretches import summarize
from rankscope.analysis.model.money import is_standstill
from rankscope.analysis.model.parts import PARTS
from rankscope.analysis.readers import workers
from rankscope.analysis.readers.native import arrow_files, unpacked_rows
from rankscope.analysis.readers.native.unpacked_rows import Shared
from rankscope.analysis.report import json_form, terminal
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import Text
from rankscope.collectors.agent import arrow_writer
from record import as_it_was, write
from simulate import Job, healthy_resources, run

STEPS, SLOW = 120, 2


def slow():
    """120 steps on 4 ranks, of which rank 2 computes 8 % longer in all."""
    job = Job(parallel="ddp", ranks=4, steps=STEPS, seed=3, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness[:, SLOW] *= 1.08
    return run(job, can)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return write(slow(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def report(recorded, monkeypatch):
    """Give the report where a quarter of the run fits at once."""
    rows = memory_budget.bytes_of_rows(Trace.open(recorded).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.253)
    return lambda: diagnose(Trace.open(recorded))


@pytest.fixture
def one_by_one(monkeypatch):
    """A process is given one stretch at a time, however many cores there are."""
    monkeypatch.setattr(stretches, "_TOGETHER", 1)


@pytest.fixture(autouse=True)
def no_summaries(recorded):
    (recorded / FOLDER / "stretches.json").unlink(missing_ok=True)


def test_what_costs_over_the_whole_run_is_added_up(recorded, report):
    """Every stretch says what `RUN/steps=FIRST-LAST` says of it, and together they say it of the run."""
    found_in_all = report()
    history, (found,) = found_in_all.history, found_in_all.findings
    assert (history.analyzed, history.stretches, history.count) == (STEPS, 4, STEPS)
    assert (found.detector, found.ranks, found.steps) == ("slow_rank", (SLOW,), ())
    parts = [diagnose(Trace.open(recorded / f"steps={first}-{first + 29}")) for first in range(0, STEPS, 30)]
    lost = [finding.lost_ns_total for part in parts for finding in part.findings if finding.ranks == (SLOW,)]
    assert found.lost_ns_total == sum(lost)
    time_ns = sum(part.steps.count * part.steps.mean_ns for part in parts)
    assert found.lost_fraction == pytest.approx(sum(lost) / time_ns, rel=1e-9)


@pytest.mark.parametrize(("growth", "grows"), [(0.08, True), (0.04, False), (0.0, False)])
def test_steps_that_grow_too_slowly_for_any_stretch_are_a_finding_over_the_run(tmp_path, monkeypatch, growth, grows):
    """Compute grows by 8 % in 240 steps, and by 2 % in any of the four stretches: the mean step is 4 % too long."""
    job = Job(parallel="ddp", ranks=4, steps=240, seed=5, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness *= np.linspace(1, 1 + growth, job.steps)[:, np.newaxis]
    folder = write(run(job, can), tmp_path / "run")
    rows = memory_budget.bytes_of_rows(Trace.open(folder).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.253)
    report = diagnose(Trace.open(folder))
    assert report.history.analyzed == job.steps
    assert [(one.detector, one.ranks, one.steps) for one in report.findings] == [("gradual_slowdown", (), ())] * grows
    for one in report.findings:
        assert "what grows is compute" in one.title
        assert report.verdict.startswith(f"Likely: {one.title}")
        assert one.lost_fraction == pytest.approx(growth / 2, rel=0.15)
        assert abs(one.lost_fraction * report.history.count - one.lost_ns_total / report.history.median_ns) < 5


@pytest.mark.parametrize("kind", ["hang", "slow_rank", "gc_stall", "gradual_slowdown"])
def test_a_run_in_stretches_has_the_verdict_of_the_run_held_at_once(tmp_path, monkeypatch, kind):
    """The first finding, its ranks, and what it costs: within 5 %, of a line through all steps within 12 %."""
    log, _ = simulated(Case(kind, "loud", 3), small=True)
    folder = write(log, tmp_path / "run")
    whole = diagnose(Trace.open(folder))
    rows = memory_budget.bytes_of_rows(Trace.open(folder).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.505)
    report = diagnose(Trace.open(folder))
    assert (whole.history, report.history.stretches) == (None, 2)
    (of_all, *_), (of_parts, *_) = whole.findings, report.findings
    assert (of_parts.detector, of_parts.ranks) == (of_all.detector, of_all.ranks) == (kind, of_all.ranks)
    assert is_standstill(of_parts) == (kind == "hang")
    within = 0.12 if kind == "gradual_slowdown" else 0.05
    assert of_parts.lost_ns_per_step == pytest.approx(of_all.lost_ns_per_step, rel=within)
    assert report.status == whole.status == "red"
    shares = sum(part.ns_per_step for part in report.breakdown), sum(part.ns_per_step for part in whole.breakdown)
    assert shares[0] == pytest.approx(shares[1], rel=0.01)


def test_every_step_of_every_rank_is_left_beside_the_report(recorded, report):
    """As `RUN/steps=FIRST-LAST` has it: its length, its parts, which sum to it, and how often the rank came last."""
    report()
    left = pl.scan_ipc(recorded / FOLDER / "steps-*.arrow").collect().sort("rank", "step")
    assert left.select("rank", "step").rows() == [(rank, step) for rank in range(4) for step in range(STEPS)]
    parts = [f"{part}_ns" for part in PARTS]
    assert left.select(pl.sum_horizontal(parts)).to_series().equals(left["step_ns"], check_names=False)
    assert left.columns == [column.name for column in STEP_SUMMARIES.columns]
    timeline = read_run(recorded / "steps=30-59").timeline
    some = left.filter(pl.col("step").is_between(30, 59))
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("step_ns")
    assert_frame_equal(
        some.select("rank", "step", "start_ns", "step_ns", "judged"),
        timeline.steps.select("rank", "step", "start_ns", length, "judged"),
        check_row_order=False,
        check_dtypes=False,
    )
    for part in ("compute", "transfer", "wait"):
        spent = timeline.breakdown.filter(pl.col("part") == part).sort("rank", "step")["ns"]
        assert some[f"{part}_ns"].to_list() == spent.to_list()
    last = timeline.collectives.filter("is_last").group_by("rank").len().sort("rank")
    came_last = some.group_by("rank").agg(pl.col("came_last").sum()).filter(pl.col("came_last") > 0).sort("rank")
    assert came_last.rows() == last.rows()


def test_steps_of_other_stretches_are_removed(recorded, report):
    """Where stretches were cut differs with the memory that is free: no step is there twice."""
    report()
    files = sorted(path.name for path in (recorded / FOLDER).glob("steps-*"))
    (recorded / FOLDER / files[0]).rename(recorded / FOLDER / "steps-0-44.arrow")
    (recorded / FOLDER / "stretches.json").unlink()
    report()
    assert sorted(path.name for path in (recorded / FOLDER).glob("steps-*")) == files


def test_a_stretch_is_replayed_where_the_cost_of_its_finding_depends_on_it(recorded, tmp_path):
    """What a slow rank costs is no more than fixing it brings: that confirms it, as in a report on these steps."""
    (summary,) = summarize((str(recorded),), "", "", [(0, 29)], ReportOptions(), "", None)
    (found,) = summary.findings
    (reported,) = diagnose(Trace.open(recorded / "steps=0-29")).findings
    assert (found.detector, found.confidence, reported.confidence) == ("slow_rank", "confirmed", "confirmed")
    assert found.lost_ns_total == reported.lost_ns_total


def test_a_stretch_is_not_replayed_where_its_tables_show_what_a_replay_would(tmp_path, monkeypatch):
    """16 ranks on 2 nodes gather parameters: had that taken no time, all would have ended earlier by what it costs."""
    job = Job(parallel="fsdp", ranks=16, steps=40, seed=4, gradient_bytes=120e6)
    folder = write(run(job, healthy_resources(job)), tmp_path / "run")
    (reported,) = diagnose(Trace.open(folder / "steps=0-39")).findings
    replayed = []
    monkeypatch.setattr(savings, "rerun", lambda *of: replayed.append(of))
    (summary,) = summarize((str(folder),), "", "", [(0, 39)], ReportOptions(), "", None)
    (found,) = summary.findings
    assert (found.detector, found.lost_ns_total) == ("exposed_communication", reported.lost_ns_total)
    assert reported.gain_fraction is not None
    assert not replayed


def test_other_processes_give_the_same_to_the_byte(report, monkeypatch, no_summaries):
    here = json_form.render(report())
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    monkeypatch.setattr(stretches, "kept", lambda *_: None)
    assert json_form.render(report()) == here


def no_room(_):
    raise OSError(errno.ENOSPC, "No space left on device")


ASKED = ((0, 29), (30, 59), (60, 89))


def together(folder, user=0):
    """How two processes share what is unpacked for three stretches."""
    folder.mkdir(exist_ok=True)
    return Shared(str(folder / "shared"), ASKED, shares=2, user=user, users=2)


@pytest.fixture
def small_shares(monkeypatch):
    monkeypatch.setattr(unpacked_rows, "_FEWEST", 1)


def test_stretches_whose_files_are_unpacked_together_are_the_same(recorded, tmp_path, monkeypatch, small_shares):
    options = ReportOptions()
    alone = [one for stretch in ASKED for one in summarize((str(recorded),), "", "", [stretch], options, "", None)]
    assert all(one.analyzed for one in alone)
    assert summarize((str(recorded),), "", "", ASKED[:2], options, "", together(tmp_path, 0)) == alone[:2]
    assert len(list(tmp_path.glob("shared/regions-*.arrow"))) == 2
    with monkeypatch.context() as patch:  # what the first one unpacked is used by the second
        patch.setattr(unpacked_rows._Share, "_unpack", None)
        assert summarize((str(recorded),), "", "", ASKED[2:], options, "", together(tmp_path, 1)) == alone[2:]
    assert list(tmp_path.iterdir()) == []  # what was unpacked is gone
    full = []
    monkeypatch.setattr(unpacked_rows._Share, "_unpack", lambda share: full.append(share) or no_room(share))
    assert summarize((str(recorded),), "", "", ASKED, options, "", together(tmp_path / "full")) == alone
    assert full


def test_two_processes_unpack_at_the_same_time(recorded, tmp_path, small_shares):
    options = ReportOptions()
    alone = [one for stretch in ASKED for one in summarize((str(recorded),), "", "", [stretch], options, "", None)]
    arguments = [
        ((str(recorded),), "", "", block, options, "", together(tmp_path, user))
        for user, block in enumerate((ASKED[:1], ASKED[1:]))
    ]
    with workers.begun(summarize, arguments, [1e3, 1e3]) as found:
        assert [one for block in found for one in block] == alone
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_leaves_its_share_to_others(recorded, tmp_path, small_shares):
    """Who needs that share waits as long as the other process is at it, and begins anew."""
    options = ReportOptions()
    alone = [one for stretch in ASKED for one in summarize((str(recorded),), "", "", [stretch], options, "", None)]
    share = tmp_path / "shared" / "regions-1"
    share.parent.mkdir()
    at_it = f"""
import fcntl, pathlib, time
lock = open("{share}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
pathlib.Path("{share}.arrow").write_bytes(b"half of it")
print("locked", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", at_it], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        killed = threading.Timer(2.0, other.kill)
        killed.start()
        assert summarize((str(recorded),), "", "", ASKED, options, "", together(tmp_path)) == alone
        assert killed.finished.is_set()
    assert other.returncode == -signal.SIGKILL


def test_damaged_files_are_read_by_each_stretch(tmp_path, small_shares):
    """A file without its second half has fewer rows for those who read it, and each stretch says so."""
    run = write(slow(), tmp_path / "run")
    file = next(run.glob("regions/rank=*1/*"))
    rows = pa.ipc.open_file(file).read_all().replace_schema_metadata()
    with pa.ipc.new_file(file, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as unsealed:
        unsealed.write_table(rows, max_chunksize=100)
    os.truncate(file, file.stat().st_size // 2)
    options = ReportOptions()
    alone = [one for stretch in ASKED for one in summarize((str(run),), "", "", [stretch], options, "", None)]
    assert summarize((str(run),), "", "", ASKED, options, "", together(tmp_path)) == alone
    every = Trace.open(run)
    parts = [every.part(*stretch) for stretch in ASKED]
    for part, sharing in zip(parts, every.parts(ASKED, together(tmp_path)), strict=True):
        assert_frame_equal(sharing.table("regions").collect(), part.table("regions").collect())
        assert sharing.gaps() == part.gaps()
        assert any("its last rows" in gap.why for gap in part.gaps())


def test_each_batch_is_unpacked_once(recorded, tmp_path, monkeypatch, small_shares):
    """Of ranks with several files, each of several batches, at whose edges no stretch begins."""
    monkeypatch.setattr(arrow_writer, "SEAL_ROWS", 100)
    monkeypatch.setattr(arrow_writer, "_BATCH_ROWS", 18)
    run = write(slow(), tmp_path / "run")
    assert len(list(run.glob("regions/rank=*1/*"))) > 3
    options, read = ReportOptions(), []
    alone = [one for stretch in ASKED for one in summarize((str(recorded),), "", "", [stretch], options, "", None)]

    def read_on(path, **asked):
        rows, problem, following = arrow_files.read_on(path, **asked)
        end = 6 if following == arrow_files.NO_MORE else following.number  # a file has no more than 100 rows
        read.extend((path, number) for number in range(asked["since"], end))
        return rows, problem, following

    monkeypatch.setattr(unpacked_rows, "read_on", read_on)
    for size in (1, 1_000_000):
        monkeypatch.setattr(unpacked_rows, "_BYTES", size)
        assert summarize((str(run),), "", "", ASKED, options, "", together(tmp_path / str(size))) == alone
        assert len(set(read)) == len(read) > 0
        read.clear()


def test_a_run_that_was_opened_before_is_not_opened_again(recorded, tmp_path, monkeypatch):
    (alone,) = summarize((str(recorded),), "", "", [(0, 29)], ReportOptions(), "", None)
    Trace.open(recorded).to_file(tmp_path / "opened")
    monkeypatch.setattr(Trace, "open", None)
    assert summarize((str(recorded),), "", "", [(0, 29)], ReportOptions(), str(tmp_path / "opened"), None) == [alone]


def test_a_full_temporary_folder_costs_nothing_but_time(report, monkeypatch):
    before = json_form.render(report())
    monkeypatch.setattr(stretches, "kept", lambda *_: None)
    monkeypatch.setattr(Trace, "to_file", lambda _, file: no_room(file.write_bytes(b"half of it")))
    assert json_form.render(report()) == before


def test_a_second_report_needs_summaries_only(recorded, report, monkeypatch):
    first = report()
    monkeypatch.setattr(stretches, "begun", lambda *asked, **_: nullcontext(iter([] if not asked[1] else [1 / 0])))
    again = report()
    assert json_form.render(again) == json_form.render(first)
    assert json_form.render(read_run(recorded).report) == json_form.render(first)  # as `rankscope check` does
    assert isinstance(again.findings[0].title, Text)  # so that it can be translated
    assert "比" in terminal.render(again, width=400, language="zh")


def test_summaries_of_other_files_are_not_used(recorded, report, one_by_one, monkeypatch):
    report()
    asked = []

    def begun(task, arguments, *_, **__):
        asked.extend(arguments)
        return nullcontext(task(*one) for one in arguments)

    monkeypatch.setattr(stretches, "begun", begun)
    node = next(recorded.glob("run/node=*.json"))
    os.utime(node, ns=(1, 1))
    report()
    assert [stretches for _, _, _, stretches, *_ in asked] == [[(0, 29)], [(30, 59)], [(60, 89)]]


def test_a_summary_that_rankscope_cannot_have_written_is_not_used(recorded, report):
    before = json_form.render(report())
    file = recorded / FOLDER / "stretches.json"
    stored = json.loads(file.read_text())
    (finding,) = (one for stretch in stored["value"]["stretches"][:1] for one in stretch["findings"])
    for title in ({"template": "{a.__class__}", "values": {"a": "x"}, "forms": None}, 5, {"x": 1}):
        finding["title"] = title
        file.write_text(json.dumps(stored))
        assert kept(recorded, "stretches", stored["made_of"], StretchSummaries) is None
    assert json_form.render(report()) == before


def killed(paths, files, of, asked, *rest):
    """Analyze a stretch, unless it is the second: that ends its process."""
    if asked == [(30, 59)]:
        os.kill(os.getpid(), signal.SIGKILL)
    return summarize(paths, files, of, asked, *rest)


def test_a_process_that_is_killed_costs_its_stretch(report, one_by_one, monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    monkeypatch.setattr(stretches, "summarize", killed)
    said = report()
    assert (said.history.analyzed, said.history.stretches) == (STEPS - 30, 3)
    assert "90 of 120 steps were analyzed, in 3 stretches" in terminal.render(said, width=400)
    assert any("killed 2 times" in gap.why and "30-59" in gap.why for gap in said.gaps)


def test_a_stretch_that_could_not_be_analyzed_leaves_no_steps_of_before(recorded, report, one_by_one, monkeypatch):
    report()
    node = next(recorded.glob("run/node=*.json"))
    os.utime(node, ns=(2, 2))  # so that all is analyzed again
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    monkeypatch.setattr(stretches, "summarize", killed)
    report()
    steps = pl.scan_ipc(recorded / FOLDER / "steps-*.arrow").select("step").unique().collect()["step"].sort().to_list()
    assert steps == [step for step in range(STEPS) if not 30 <= step <= 59]


def interrupted(paths, files, of, asked, *rest):
    """Analyze a stretch, unless it is the third: there the user has had enough."""
    if asked == [(60, 89)]:
        raise KeyboardInterrupt
    return summarize(paths, files, of, asked, *rest)


def test_what_was_analyzed_before_ctrl_c_is_kept(recorded, report, one_by_one, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stretches, "summarize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            report()
    stored = json.loads((recorded / FOLDER / "stretches.json").read_text())["value"]["stretches"]
    assert [(one["first"], one["last"]) for one in stored] == [(0, 29), (30, 59)]


@pytest.fixture(scope="module")
def hours(tmp_path_factory):
    """200 steps of some 6 s on 16 ranks of 2 nodes, of which rank 2 computes 8 % longer in all."""
    job = Job(parallel="ddp", ranks=16, steps=200, seed=3, compute_ns=5.4e9)
    can = healthy_resources(job)
    can.slowness[:, SLOW] *= 1.08
    return write(run(job, can), tmp_path_factory.mktemp("hours") / "run")


def test_while_a_job_goes_on_a_stretch_is_analyzed_again_only_as_long_as_it_may_change(hours, tmp_path, monkeypatch):
    """After 14 and 16 minutes: only stretches that ended less than 5 minutes before the first report, and new ones."""
    grown = as_it_was(hours, tmp_path / "run", 840)
    rows = memory_budget.bytes_of_rows(Trace.open(grown).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.21)
    asked = []

    def begun(task, arguments, *_, **__):
        asked.extend(stretch for one in arguments for stretch in one[3])
        return nullcontext([task(*one) for one in arguments])

    monkeypatch.setattr(stretches, "begun", begun)
    diagnose(Trace.open(grown))
    first = asked.copy()
    starts = pl.scan_ipc(grown / FOLDER / "steps-*.arrow").group_by("step").agg(pl.col("start_ns").min()).collect()
    final = starts.filter(pl.col("start_ns") < starts["start_ns"].max() - 300e9)["step"].max()
    as_it_was(hours, grown, 960)
    asked.clear()
    report = diagnose(Trace.open(grown))
    last_kept = min(asked)[0] - 1
    assert last_kept in [last for _, last in first]
    assert last_kept <= final < last_kept + 35  # a stretch has 29 steps, and the last clock exchange was 10 s ago
    assert [one.ranks for one in report.findings] == [(SLOW,)]
    steps = pl.scan_ipc(grown / FOLDER / "steps-*.arrow").select("rank", "step").collect().sort("rank", "step")
    assert steps.rows() == [(rank, step) for rank in range(16) for step in range(report.history.count)]
    file = grown / FOLDER / "stretches.json"
    kept_of_it = json.loads(file.read_text())
    kept_of_it["value"]["stretches"] = []
    file.write_text(json.dumps(kept_of_it))
    assert json_form.render(diagnose(Trace.open(grown))) == json_form.render(report)
    assert len(asked) > report.history.stretches


def evicted(run, seconds):
    """Let each node's agent have removed what is older."""
    for file in (run / "run").glob("node=*.json"):
        launch = json.loads(file.read_text())
        file.write_text(
            json.dumps(launch | {"kept_since_ns": int(launch["start_ns"] + seconds * 1e9), "keep_bytes": 1})
        )


def test_what_was_found_in_records_that_are_evicted_since_stays(hours, tmp_path, monkeypatch):
    """A report after 14 minutes, and one after the job, when those of the first 7 minutes are gone."""
    grown = as_it_was(hours, tmp_path / "run", 840)
    rows = memory_budget.bytes_of_rows(Trace.open(grown).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.21)
    diagnose(Trace.open(grown))
    stored = json.loads((grown / FOLDER / "stretches.json").read_text())["value"]["stretches"]
    gone = [(one["first"], one["last"]) for one in stored if not one["files"]]
    assert gone == [(0, 28), (29, 57)]
    for file in (*hours.glob("*/*/*.arrow"), *hours.glob("run/*.json")):
        (grown / file.relative_to(hours)).parent.mkdir(parents=True, exist_ok=True)
        (grown / file.relative_to(hours)).write_bytes(file.read_bytes())
    for kept_since_s in (420, 720):
        evicted(grown, kept_since_s)
        report = diagnose(Trace.open(grown))
        history = report.history
        assert history.kept > 58
        there = pl.scan_ipc(grown / FOLDER / "steps-*.arrow").select("step").unique().collect()["step"].sort().to_list()
        lost = list(range(58, history.kept))
        assert there == [step for step in range(200) if step not in lost]
        assert history.analyzed == len(there)
        (found,) = report.findings
        assert (found.ranks, found.steps) == ((SLOW,), ())  # in all that was analyzed
        said = " ".join(terminal.render(report, width=400).split())
        of_them = history.kept - len(lost)
        assert f"Records of steps before {history.kept} were evicted (rankscope run --keep); {of_them} of these" in said
