"""Checkpoints: the calls that a real script makes, and what they cost a job whose every millisecond is known."""

from __future__ import annotations

import json

import pytest

import rankscope
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.schema import OPS, REGION_KINDS, SCHEMA_VERSION
from support.command_line import MS, RANK
from support.kineto import event, kernel, launch
from support.kineto import step as step_mark
from support.kineto import write as write_trace
from support.one_rank import names, record, table

RANKS = 4
NAMES = ("forward", "backward", "wait", "optimizer", "torch.save", "dcp.async_save")


def job(folder, save_ms, *, steps=42, call="torch.save"):
    """A run folder of steps of 100 ms: 40 forward, 40 backward, an all-reduce of 10, 10 optimizer.

    `save_ms[rank][step]` is saved before the step's forward, while the ranks that are done wait in the all-reduce.
    """
    (folder / "run").mkdir(parents=True)
    said = {"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}}
    (folder / "run/node=00000.json").write_text(json.dumps(said))
    for rank in range(RANKS):
        part = Partition(RunFolder(folder), f"rank={rank:05}", "a0-")
        part.add_row("ranks", RANK | {"world_size": RANKS})
        group = {"start_ns": 0, "group_id": 7, "name": "0", "backend": "gloo", "role": "", "members": f"0-{RANKS - 1}"}
        part.add_row("groups", group)
        for number, name in enumerate(NAMES):
            part.add_row("strings", {"name_id": number, "name": name})

        def region(name, start, end, part=part):
            kind = "checkpoint" if "save" in name else name
            where = {"kind": REGION_KINDS.index(kind), "name_id": NAMES.index(name), "thread": 0}
            times = {"start_ns": start * MS, "end_ns": end * MS}
            part.add_row("regions", times | where | {"microbatch": None, "stage": None})

        begin = 100
        for step in range(steps):
            saves = [save_ms.get(r, {}).get(step, 0) for r in range(RANKS)]
            at, end = begin + saves[rank], begin + max(saves) + 90
            if saves[rank]:
                region(call, begin, at)
            region("forward", at, at + 40)
            region("backward", at + 40, at + 80)
            region("wait", at + 80, end)
            region("optimizer", end, end + 10)
            times = {"start_ns": (at + 80) * MS, "issued_ns": (at + 80) * MS, "end_ns": end * MS}
            what = {"op": OPS.index("allreduce"), "dtype": 2, "group_id": 7, "seq": step, "peer": -1, "tag": 0}
            rest = {"device_start_ns": None, "is_async": True, "size_bytes": 4096, "thread": 0, "number": step + 1}
            part.add_row("collectives", times | what | rest)
            begin = end + 10
        part.flush()
        part.close()
    return rankscope.diagnose(rankscope.open(folder))


def every(nth, ms, steps=42):
    return dict.fromkeys(range(nth - 1, steps, nth), ms)


def test_one_rank_that_saves_for_all_is_the_one_finding_and_no_slow_rank(tmp_path):
    """200 ms in every 10th step: 4 of the 40 judged ones, 20 of 120 ms per step; a replay gives all of it back."""
    report = job(tmp_path / "run", {0: every(10, 200)})
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.steps) == ("checkpoint_stall", (0,), (9, 19, 29, 39))
    assert finding.title == "Saving a checkpoint (torch.save) stops rank 0 for 200 ms every 10 steps"
    assert (finding.lost_ns_per_step, finding.uncertainty_ns) == (20 * MS, 0)
    assert finding.gain_fraction == pytest.approx(20 / 120)
    assert finding.others_waited.ranks == (1, 2, 3)
    assert finding.others_waited.ns == 3 * 4 * 200 * MS
    parts = {(part.rank, part.part): part.ns_per_step for part in report.breakdown}
    assert (parts[0, "checkpoint"], parts[0, "other"], parts[1, "wait"]) == (20 * MS, 0, 20 * MS)


def test_all_ranks_save_and_the_longest_counts(tmp_path):
    """100 ms, 160 on rank 2, in each 5th step: 8 of 40 steps cost 160 ms."""
    report = job(tmp_path / "run", {r: every(5, 160 if r == 2 else 100) for r in range(RANKS)}, call="dcp.async_save")
    (finding,) = report.findings
    assert (finding.ranks, finding.lost_ns_per_step) == ((0, 1, 2, 3), 8 * 160 * MS // 40)
    assert finding.advice.startswith("An asynchronous save holds the rank")
    assert "Rank 2 takes longest" in finding.advice


def test_rare_long_checkpoints_count_although_they_are_as_long_as_twenty_steps(tmp_path):
    """2 s in 2 of 80 steps: without the calls these would be outliers; with them they are 50 ms per step."""
    report = job(tmp_path / "run", {0: {30: 2000, 70: 2000}}, steps=82)
    (finding,) = report.findings
    assert (finding.detector, finding.lost_ns_per_step) == ("checkpoint_stall", 50 * MS)
    assert (report.steps.outliers, report.steps.count) == (0, 80)


@pytest.mark.parametrize(
    ("save_ms", "why"),
    [
        ({0: every(10, 40)}, None),  # 4 of 104 ms per step: below 5 %
        ({}, "no call that saves a checkpoint was seen"),
        ({0: {20: 2000}}, "40 analyzed steps hold one checkpoint, of 2.00 s: how often the job saves one is unknown"),
    ],
    ids=["cheap", "none", "a single one"],
)
def test_cheap_checkpoints_are_healthy_and_what_is_not_known_is_reported(tmp_path, save_ms, why):
    report = job(tmp_path / "run", save_ms)
    assert report.findings == ()
    healthy = {check.detector: check.resolution_ns for check in report.healthy}
    reasons = {check.detector: check.why for check in report.not_checked}
    if why is None:
        assert healthy["checkpoint_stall"] == 5.2 * MS
    else:
        assert why in reasons["checkpoint_stall"]


def test_calls_of_a_real_script_are_recorded_under_any_name_and_work_as_before(tmp_path):
    """dcp is imported only after the recording began; small saves and those below others are left out."""
    done, run = record(
        tmp_path,
        """
        import io, pickle, tempfile, time
        torch.save(torch.ones(1), io.BytesIO())  # below 1 ms, or just above
        class Slow:
            def __getstate__(self):
                time.sleep(0.02)
                return {}
        folder = tempfile.mkdtemp()
        torch.save(Slow(), folder + "/plain")
        torch.serialization.save(Slow(), folder + "/plain")
        assert isinstance(torch.load(folder + "/plain", weights_only=False), Slow)
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import save
        state = {"weights": torch.ones(1 << 20)}
        dcp.save(state, checkpoint_id=folder + "/a")
        save(state, checkpoint_id=folder + "/b")
        dcp.async_save(state, checkpoint_id=folder + "/c").result()
        loaded = {"weights": torch.zeros(1 << 20)}
        dcp.load(loaded, checkpoint_id=folder + "/c")
        assert loaded["weights"].sum() == 1 << 20
        try:
            torch.save(Slow(), folder + "/no/such/folder")
        except RuntimeError:
            print("an error is still an error")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "an error is still an error\n"
    assert "rankscope" not in done.stderr
    rows = table(run, "regions").filter(kind=REGION_KINDS.index("checkpoint"), thread=0)
    strings = names(run)
    seen = [strings[name_id] for name_id in rows["name_id"]]
    assert [name for name in seen if name.startswith("dcp")] == ["dcp.save", "dcp.save", "dcp.async_save"]
    lasted = (rows["end_ns"] - rows["start_ns"]).to_list()
    assert sum(name == "torch.save" and ns >= 20 * MS for name, ns in zip(seen, lasted, strict=True)) >= 2


@pytest.mark.parametrize(("name", "found"), [("save_checkpoint", True), ("checkpoint", False)])
def test_a_checkpoint_in_a_profilers_capture_is_likely_though_it_is_seen_once(tmp_path, name, found):
    """Steps of 1 ms, in the third of which a range of the script's lasts 2 ms more, and the device idles."""
    events, at = [], 1000
    for number in range(4):
        saves = 2000 * (number == 2)
        events += [step_mark(number, at, 1000 + saves)]
        events += [event("user_annotation", name, at, saves)] if saves else []
        for place in range(20):
            correlation, begin = 100 * number + place, at + saves + 50 * place
            events += [launch(begin, 2, correlation), kernel("gemm", begin + 3, 50, correlation)]
        at += 1000 + saves
    write_trace(tmp_path / "rank0.json", events)
    report = rankscope.diagnose(rankscope.open(tmp_path))
    said = [(one.detector, one.steps, one.confidence) for one in report.findings]
    assert (said == [("checkpoint_stall", (2,), "likely")]) == found
    assert report.verdict.startswith("Likely: Saving a checkpoint (save_checkpoint) stops rank 0 for 2.00 ms") == found
