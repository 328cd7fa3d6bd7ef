"""Root causes of hangs: states of a few ranks, written down, and two real hangs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rankscope.analysis.detectors import hang
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.hang_progress import last_progress
from rankscope.errors import NotResolvable
from support.paths import DATA

NVRX = DATA / "flight_recorder" / "nvrx"

ALL, FIRST, LAST = 1, 2, 3  # groups


def state(*rows, groups=((ALL, "all", "0-3"),)):
    """Tables `progress` and `groups`. A row is (rank, group, enqueued, completed[, what it is held in])."""
    progress = []
    for rank, group, enqueued, completed, *held in rows:
        row = {"rank": rank, "group_id": group, "enqueued": enqueued, "completed": completed, "is_p2p": False}
        if enqueued > completed:
            row |= {"seq": completed + 1, "op": "allreduce", "start_ns": 100 + completed, "peer": -1}
        progress.append(row | (held[0] if held else {}))
    columns = {c: [row.get(c) for row in progress] for c in schema_of("progress")}
    named = [{"group_id": g, "name": str(g), "role": role, "members": members} for g, role, members in groups]
    return {
        "progress": pl.DataFrame(columns, schema=schema_of("progress")),
        "groups": pl.DataFrame({c: [g.get(c) for g in named] for c in schema_of("groups")}, schema=schema_of("groups")),
    }


def named(tables):
    return [(finding.ranks, finding.title) for finding in hang.detect(**tables)]


def test_rank_that_does_not_come_to_an_operation_is_named():
    """Ranks 0, 1 and 3 are in all-reduce 5; rank 2 has finished 4 and enqueued no more."""
    tables = state((0, ALL, 5, 4), (1, ALL, 5, 4), (2, ALL, 4, 4), (3, ALL, 5, 4))
    assert named(tables) == [((2,), "Rank 2 does not reach allreduce number 5 of all")]
    (found,) = hang.detect(**tables)
    assert found.advice == "Look at the host's stacks of rank 2: no operation of it is outstanding."


ALIKE = {"dtype": "float32", "size_bytes": 400}


@pytest.mark.parametrize(
    ("held", "does"),
    [
        ({"op": "broadcast"}, "Rank 2 does broadcast where the others do allreduce"),
        ({"dtype": "bfloat16"}, "Rank 2 does allreduce of bfloat16 where the others do allreduce of float32"),
        ({"size_bytes": 1_200}, "Rank 2 does allreduce of 1,200 bytes where the others do allreduce of 400 bytes"),
    ],
)
@pytest.mark.parametrize("quiet_ns", [None, 200_000_000])
def test_rank_whose_operation_is_another_is_named_also_while_the_job_runs(held, does, quiet_ns):
    rows = [(rank, ALL, 5, 4, ALIKE | {"quiet_ns": quiet_ns} | (held if rank == 2 else {})) for rank in range(4)]
    assert named(state(*rows)) == [((2,), f"{does}: desynchronized")]


def test_of_two_ranks_that_differ_none_is_named_alone():
    rows = [(rank, ALL, 5, 4, ALIKE | {"size_bytes": 400 * (1 + rank)}) for rank in range(2)]
    (found,) = hang.detect(**state(*rows, groups=((ALL, "all", "0-1"),)))
    assert (found.ranks, found.title) == ((0, 1), "Ranks 0,1 do not do the same in one operation: desynchronized")
    assert "rank 0: allreduce of 400 bytes, rank 1: allreduce of 800 bytes" in found.advice


def test_ranks_may_give_another_number_of_bytes_to_an_all_to_all():
    rows = [(rank, ALL, 5, 4, {"op": "alltoall", "size_bytes": 400 * (1 + rank)}) for rank in range(4)]
    assert named(state(*rows)) == [
        ((0, 1, 2, 3), "All of ranks 0-3 are in alltoall number 5 of all, and none finishes")
    ]


@pytest.mark.parametrize("last", [(4, 4), (5, 5)])
def test_a_job_that_ran_when_its_state_was_saved_does_not_hang(last):
    """Rank 2 is one operation behind, or ahead; rank 1 began something 0.3 s before its state was saved."""
    quiet = [{"quiet_ns": ns} for ns in (9_000_000_000, 300_000_000, 9_000_000_000)]
    rows = [(0, ALL, 5, 4, quiet[0]), (1, ALL, 5, 4, quiet[1]), (2, ALL, *last, quiet[2])]
    with pytest.raises(NotResolvable, match=r"the job ran when its state was saved, 300 ms after its last operation"):
        hang.detect(**state(*rows, groups=((ALL, "all", "0-2"),)))
    assert named(state(*((*row[:4], {"quiet_ns": 60_000_000_000}) for row in rows), groups=((ALL, "all", "0-2"),)))


def test_nothing_outstanding_is_no_hang():
    assert hang.detect(**state(*((rank, ALL, 5, 5) for rank in range(4)))) == []
    assert hang.resolution_ns(state((0, ALL, 5, 5))["progress"]) is None


def test_nothing_outstanding_on_the_ranks_that_were_seen_is_no_proof_of_health():
    with pytest.raises(NotResolvable, match="3 ranks of 4 left no state, and the others are not held"):
        hang.detect(**state((0, ALL, 5, 5)))


def test_a_rank_that_waits_itself_is_not_blamed_though_it_is_behind():
    """Rank 0 waits for rank 1 in the first pair, which waits for rank 2 in the last: rank 1 is a healthy neighbour."""
    groups = ((FIRST, "first", "0-1"), (LAST, "last", "1-2"))
    tables = state((0, FIRST, 8, 7), (1, FIRST, 7, 7), (1, LAST, 3, 2), (2, LAST, 2, 2), groups=groups)
    assert [ranks for ranks, _ in named(tables)] == [(2,)]


def test_the_oldest_operation_is_what_holds_a_rank():
    """Rank 1 enqueued the first pair's operation after the last pair's, in which rank 2 is missing."""
    groups = ((FIRST, "first", "0-1"), (LAST, "last", "1-2"))
    rows = (
        (0, FIRST, 8, 7, {"start_ns": 50}),
        (1, FIRST, 8, 7, {"start_ns": 90}),
        (1, LAST, 3, 2, {"start_ns": 60}),
        (2, LAST, 2, 2),
    )
    assert [ranks for ranks, _ in named(state(*rows, groups=groups))] == [(2,)]


def test_rank_whose_peers_finished_what_it_is_in_is_stuck_on_its_device():
    """Rank 2 enqueued 5 and 6 and finished 4; the others finished 5 and wait in 7, which rank 2 did not enqueue."""
    tables = state((0, ALL, 7, 6), (1, ALL, 7, 6), (2, ALL, 6, 4), (3, ALL, 7, 6))
    assert named(tables) == [((2,), "Rank 2 does not finish allreduce, which its peers finished")]


def test_all_in_the_same_operation_is_the_transport():
    tables = state(*((rank, ALL, 5, 4) for rank in range(4)))
    assert named(tables) == [((0, 1, 2, 3), "All of ranks 0-3 are in allreduce number 5 of all, and none finishes")]


def test_different_operations_under_one_number_are_a_desync():
    tables = state((0, ALL, 5, 4), (1, ALL, 5, 4, {"op": "broadcast"}), (2, ALL, 5, 4), (3, ALL, 5, 4))
    assert named(tables) == [((1,), "Rank 1 does broadcast where the others do allreduce: desynchronized")]


def test_a_rank_that_calls_two_operations_in_another_order_than_three_others_is_named():
    """Rank 2 is in the one of all first, the others in that of ranks 0-2; all have enqueued both."""
    groups = ((ALL, "all", "0-3"), (FIRST, "first", "0-2"))
    rows = [(rank, FIRST, 4, 3, {"start_ns": 60 if rank == 2 else 50}) for rank in range(3)]
    rows += [(2, ALL, 8, 7, {"start_ns": 50}), (3, ALL, 8, 7, {"start_ns": 50})]
    rows += [(rank, ALL, 7, 7) for rank in range(2)]
    said = "Rank 2 calls operations in another order than ranks 0,1: deadlock"
    assert named(state(*rows, groups=groups)) == [((2,), said)]


def test_ranks_that_wait_for_each_other_in_different_groups_are_a_deadlock():
    """Rank 0 is in the first group's operation 1, rank 1 in the last one's: neither enqueued the other's."""
    groups = ((FIRST, "first", "0-1"), (LAST, "last", "0-1"))
    rows = ((0, FIRST, 1, 0), (0, LAST, 0, 0), (1, FIRST, 0, 0), (1, LAST, 1, 0))
    assert named(state(*rows, groups=groups)) == [((0, 1), "Ranks 0,1 wait for each other: deadlock")]


def test_receive_without_its_send_waits_for_the_sender():
    """Rank 1 receives from rank 0, which has nothing outstanding."""
    groups = ((FIRST, "pipeline", "0-1"),)
    receives = {"op": "recv", "peer": 0, "is_p2p": True}
    tables = state((0, FIRST, 3, 3, {"is_p2p": True}), (1, FIRST, 4, 3, receives), groups=groups)
    assert named(tables) == [((0,), "Rank 0 does not reach recv number 4 of pipeline")]


def test_rank_without_a_state_is_named_only_where_no_other_can_be():
    """Rank 3 left nothing: it is named if the others are all in the operation, not if rank 2 is known to be away."""
    there = [(0, ALL, 5, 4), (1, ALL, 5, 4)]
    assert named(state(*there, (2, ALL, 5, 4))) == [((3,), "Rank 3 left no state")]
    assert [ranks for ranks, _ in named(state(*there, (2, ALL, 4, 4)))] == [(2,)]


def test_state_that_cannot_be_read_is_no_evidence():
    """Rank 3 left a state that is damaged (a row without values): rank 2 is away, or no rank can be named."""
    damaged = (3, ALL, 0, 0, {"enqueued": None, "completed": None})
    there = [(0, ALL, 5, 4), (1, ALL, 5, 4)]
    assert [ranks for ranks, _ in named(state(*there, (2, ALL, 4, 4), damaged))] == [(2,)]
    with pytest.raises(NotResolvable, match="the state of rank 3 could not be read, and others may wait there"):
        hang.detect(**state(*there, (2, ALL, 5, 4), damaged))


def test_transfer_with_an_unknown_peer_names_no_rank_as_away():
    """Rank 0 is in a transfer with an unknown peer: it is named as being in it."""
    held = {"op": "recv", "peer": -1, "is_p2p": True}
    found = hang.detect(**state((0, FIRST, 4, 3, held), groups=((FIRST, "pipeline", "0-2"),)))
    assert [(f.ranks, f.where) for f in found] == [((0,), "recv number 4 of pipeline")]


def recorded(*rows, until, steps=(), said_late=False, early=()):
    """`last_progress` of a run of three ranks. A row is (rank, seq, start s, end s or None, whole); then the operation.

    `early`: ends that were moved by so many s, to the arrival of a last rank that came after them, by (rank, seq).
    """
    second = 1_000_000_000
    collectives = pl.DataFrame(
        [
            {
                "rank": rank,
                "group_id": ALL,
                "seq": seq,
                "op": op[0] if op else "allreduce",
                "start_ns": round(start * second),
                "end_ns": None if end is None else round(end * second),
                "instance_id": seq if whole else None,
                "group_size": 3,
                "early_ns": round(dict(early)[rank, seq] * second) if (rank, seq) in dict(early) else None,
                "peer": -1,
                "tag": 0,
                "size_bytes": 8,
            }
            for rank, seq, start, end, whole, *op in rows
        ],
        schema_overrides={"end_ns": pl.Int64, "early_ns": pl.Int64, "instance_id": pl.Int64},
    )
    regions = pl.DataFrame({"start_ns": [], "end_ns": []}, schema={"start_ns": pl.Int64, "end_ns": pl.Int64})
    lengths = pl.DataFrame({"start_ns": [0 for _ in steps], "end_ns": [round(s * second) for s in steps]})
    return last_progress(
        collectives,
        regions,
        None if until is None else round(until * second),
        lengths.cast(pl.Int64),
        said_late=said_late,
    )


STUCK = ((0, 1, 0, 1, True), (1, 1, 0, 1, True), (2, 1, 0, 1, True), (0, 2, 2, None, False), (1, 2, 2, 14, False))


def held(progress):
    return progress.select("rank", "enqueued", "completed", "seq").rows()


def test_recorded_run_that_waited_for_10_seconds_was_hung():
    """Ranks 0 and 1 entered operation 2 at 2 s; rank 1's was ended by the interrupt at 14 s. Rank 2 never came."""
    progress = recorded(*STUCK, until=14.5)
    assert held(progress) == [(0, 2, 1, 2), (1, 2, 1, 2), (2, 1, 1, None)]
    groups = state(groups=((ALL, "all", "0-2"),))["groups"]
    assert named({"progress": progress, "groups": groups}) == [
        ((2,), "Rank 2 does not reach allreduce number 2 of all")
    ]


def test_recorded_run_that_ended_soon_or_has_long_steps_was_not_hung():
    """The job ended 3 s after the last call; or its steps take 4 s, of which 12.5 s are no five."""
    soon = ((*STUCK[:3], (0, 2, 2, None, False), (1, 2, 2, 4, False)), 5, ())
    slow = (STUCK, 14.5, (4, 4))
    for rows, until, steps in (soon, slow):
        assert recorded(*rows, until=until, steps=steps)["seq"].null_count() == 3


def test_where_nothing_was_sampled_it_is_not_known_whether_the_job_hung():
    progress = recorded(*STUCK, until=None)
    assert held(progress) == [(0, 2, None, None), (1, 2, None, None), (2, 1, 1, None)]
    with pytest.raises(NotResolvable, match="whether the job hung at its end"):
        hang.detect(progress, state(groups=((ALL, "all", "0-2"),))["groups"])


def test_timeout_of_2_seconds_was_a_hang_if_a_rank_never_came():
    """Operation 2 failed on ranks 0 and 1 after 2 s, which are 20 steps of 0.1 s, or 4 of 0.5 s."""
    failed = (*STUCK[:3], (0, 2, 2, 4, False), (1, 2, 2, 4, False))
    assert held(recorded(*failed, until=4.1, steps=(0.1, 0.1))) == [(0, 2, 1, 2), (1, 2, 1, 2), (2, 1, 1, None)]
    assert recorded(*failed, until=4.1, steps=(0.5, 0.5))["seq"].null_count() == 3
    all_came = (*failed, (2, 2, 2, None, False))  # its end may only have been lost
    assert recorded(*all_came, until=4.1, steps=(0.1, 0.1))["seq"].null_count() == 3


def test_rank_that_comes_back_when_the_others_have_given_up_was_hung():
    """Ranks 0 and 1 gave operation 2 up at 4 s. Rank 2 came at 6 s; if rank 0 goes on then, a clock is wrong."""
    ended = (*STUCK[:3], (0, 2, 2, 6, True), (1, 2, 2, 6, True), (2, 2, 6, 6, True), (2, 3, 6.1, 6.2, False))
    early = {(0, 2): 2, (1, 2): 2}.items()
    progress = recorded(*ended, until=7, steps=(0.1, 0.1), early=early)
    assert held(progress) == [(0, 2, 1, 2), (1, 2, 1, 2), (2, 1, 1, None)]
    goes_on = (*ended, (0, 3, 6.1, 6.2, False))
    assert recorded(*goes_on, until=7, steps=(0.1, 0.1), early=early)["seq"].null_count() == 3


def test_operation_whose_end_was_lost_does_not_hold_its_rank():
    """The end of operation 1 was lost; operation 2 ended on all ranks, and then nothing was called for a minute."""
    lost = ((0, 1, 0, None, False), (1, 1, 0, 1, False), *((rank, 2, 2, 3, True) for rank in (0, 1)))
    assert recorded(*lost, until=63)["seq"].null_count() == 2


def test_first_operation_of_its_kind_was_hung_where_the_groups_others_have_ends():
    """Ranks 0 and 1 come to a barrier, the first of the job; rank 2 does not. NCCL's operations never have ends."""
    barrier = [(rank, 2, 2, None, False, "barrier") for rank in (0, 1)]
    assert held(recorded(*STUCK[:3], *barrier, until=14.5)) == [(0, 2, 1, 2), (1, 2, 1, 2), (2, 1, 1, None)]
    unseen = [(rank, seq, start, None, whole) for rank, seq, start, _, whole in STUCK[:3]]
    assert held(recorded(*unseen, *barrier, until=14.5))[0] == (0, 2, None, None)


NCCL = [(rank, seq, start, None, whole) for rank, seq, start, _, whole in STUCK]  # without ends


def said_by_ras(*rows):
    """What RAS said 14 s after the start. A row is (rank, launched, most, state)."""
    columns = {"rank": pl.Int32, "launched": pl.Int64, "most": pl.Int64, "state": pl.String}
    frame = pl.DataFrame(rows, columns, orient="row")
    return frame.with_columns(communicator=pl.lit("cf26"), operation=pl.lit("AllReduce"), time_ns=14_000_000_000)


def test_nccls_operations_are_outstanding_where_ras_says_that_a_rank_lags():
    """Rank 2 has not called operation 2. Without RAS it is not known whether 2 has ended, and no health is claimed."""
    groups = state(groups=((ALL, "all", "0-2"),))["groups"]
    alone = recorded(*NCCL, until=14.5)
    assert held(alone) == [(0, 2, None, None), (1, 2, None, None), (2, 1, 1, None)]
    with pytest.raises(NotResolvable, match="or which operations had ended then, was not seen"):
        hang.detect(alone, groups)
    (found,) = hang.detect(recorded(*NCCL, until=14.5, said_late=True), groups, said_by_ras((2, 1, 2, "running")))
    assert (found.ranks, found.title) == ((2,), "Rank 2 does not reach allreduce number 2 of all")
    assert [(seen.table, seen.rank) for seen in found.evidence] == [("ras", 2), ("collectives", 0), ("collectives", 1)]
    assert found.evidence[0].note == "NCCL's RAS: has launched 1 AllReduce, others up to 2"


def test_nccl_job_that_ended_soon_was_not_hung():
    progress = recorded(*NCCL, until=5)
    assert held(progress) == [(0, 2, 2, None), (1, 2, 2, None), (2, 1, 1, None)]
    assert hang.detect(progress, state(groups=((ALL, "all", "0-2"),))["groups"]) == []


def test_process_that_does_not_answer_is_named_where_operations_show_nothing():
    """All ranks have called operation 5. RAS has given rank 3 up."""
    tables = state(*((rank, ALL, 5, 5) for rank in range(4)))
    (found,) = hang.detect(**tables, ras=said_by_ras((3, None, None, "dead")))
    assert (found.ranks, found.title) == ((3,), "Rank 3 does not answer NCCL's RAS, and the job hangs")
    assert [seen.note for seen in found.evidence] == ["NCCL's RAS: its process is dead"]


@pytest.mark.needs_data
@pytest.mark.parametrize("kept", [2600, 0, None])
def test_real_hang_with_a_damaged_or_missing_dump_names_the_same_ranks(tmp_path, kept):
    """Of rank 13, which is innocent, 2,600 bytes are left, or none, or no file."""
    shutil.copytree(NVRX / "gpu_error_2nd", tmp_path / "run")
    dump = tmp_path / "run" / "_dump_13"
    if kept is None:
        dump.unlink()
    else:
        dump.write_bytes(dump.read_bytes()[:kept])
    found = diagnose(Trace.open(tmp_path / "run")).findings
    assert [(finding.detector, finding.ranks) for finding in found] == [("hang", (9, 14))]


@pytest.mark.needs_data
def test_of_a_dump_alone_no_rank_is_named_but_the_others_dumps_are_asked_for():
    report = diagnose(Trace.open(NVRX / "gpu_error_2nd" / "_dump_9"))
    assert report.findings == ()
    assert report.verdict.startswith(
        "No verdict: rank 9 may wait for ranks 8,10,11, and the states of 1 of 16 ranks were given: give those of all"
    )


@pytest.mark.needs_data
@pytest.mark.parametrize(("run", "title"), [("lock_gil_1st", "do not reach"), ("gpu_error_2nd", "do not finish")])
def test_real_hangs_name_the_ranks_with_the_injected_fault(run, title):
    """`fault_injection.log` says ranks 9 and 14; the neighbours in the pipeline are behind too, and are not named."""
    command = [Path(sys.executable).with_name("rankscope"), "report", NVRX / run, "--json", "-"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    found = report["findings"]
    assert [(f["detector"], f["ranks"], f["severity"]) for f in found] == [("hang", [9, 14], "high")]
    assert title in found[0]["title"]
    assert report["verdict"].startswith("Ranks 9,14")
    assert "slow_rank" in {unchecked["detector"] for unchecked in report["not_checked"]}
