"""Root causes of waits: small jobs whose ranks wait for one another, and real traces with a known root cause."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.metrics.wait_attribution import CHARGE_COLUMNS, caused_by_rank, delays, victims
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.analysis.timeline.host_breakdown import PHASE_COLUMNS
from rankscope.analysis.timeline.matching import match_collectives
from support.paths import DATA
from support.rows import ONE_NODE, table

TRANSFER = 2


def work(label, ns):
    return ("work", label, ns)


def together(*ranks):
    return ("allreduce", ranks)


def send(receiver):
    return ("send", receiver)


def recv(sender):
    return ("recv", sender)


def run(programs, steps=1):
    """What the ranks do, one after the other, as phases and matched collectives; every operation blocks all its
    ranks until the last has come, and then for `TRANSFER`. A list per rank of what it does in one step."""
    now, at = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
    arrived, count = defaultdict(dict), defaultdict(int)
    phases, rows, begun = [], [], dict.fromkeys(programs, 0)
    length = {rank: len(program) for rank, program in programs.items()}
    while any(at[rank] < length[rank] * steps for rank in programs):
        for rank, program in programs.items():
            while at[rank] < length[rank] * steps:
                kind, *rest = program[at[rank] % length[rank]]
                step = at[rank] // length[rank]
                if kind == "work":
                    phases.append((rank, step, "compute", rest[0], now[rank], now[rank] + rest[1]))
                    now[rank] += rest[1]
                    at[rank] += 1
                    continue
                key = {"send": ("p2p", rank, *rest), "recv": ("p2p", *rest, rank)}.get(kind, ("group", *rest))
                members = key[1:] if key[0] == "p2p" else rest[0]
                arrived[key, count[rank, key]].setdefault(rank, (now[rank], kind, step))
                if len(arrived[key, count[rank, key]]) < len(members):
                    break  # it stands until the others have come
                for member, (arrival, op, of_step) in arrived[key, count[rank, key]].items():
                    last = max(a for a, *_ in arrived[key, count[rank, key]].values())
                    end = last + TRANSFER
                    phases.append((member, of_step, "wait", op, arrival, last))
                    phases.append((member, of_step, "transfer", op, last, end))
                    peer = {"send": members[1], "recv": members[0]}.get(op, -1)
                    rows.append(
                        {"rank": member, "start_ns": arrival, "issued_ns": end, "end_ns": end, "op": op, "peer": peer,
                         "group_id": hash(key) if key[0] != "p2p" else 1, "seq": count[member, key]}
                    )  # fmt: skip
                    begun[member] = of_step
                    now[member] = end
                    at[member] += 1
                seen = count[rank, key]
                for member in members:
                    count[member, key] = seen + 1
    spans = pl.DataFrame([p for p in phases if p[5] > p[4]], schema=PHASE_COLUMNS, orient="row").sort(
        "rank", "start_ns"
    )
    collectives = table("collectives", *rows).sort("rank", "start_ns")
    known = {key: members for (key, _), members in arrived.items() if key[0] == "group"}
    everyone = {"group_id": 1, "name": "world", "members": ",".join(str(rank) for rank in programs)}
    groups = table(
        "groups",
        everyone,
        *({"group_id": hash(k), "name": str(k), "members": ",".join(map(str, sorted(m)))} for k, m in known.items()),
    )
    matched = match_collectives(collectives, groups, ONE_NODE)
    assert matched["unmatched"].null_count() == len(matched)
    return spans, matched.with_columns(step=pl.lit(0, pl.Int32))


def charged(found):
    rows = found.charges.group_by("rank", "label").agg(pl.col("direct_ns", "indirect_ns").sum()).sort("rank", "label")
    return {(rank, label): (direct, indirect) for rank, label, direct, indirect in rows.iter_rows()}


def test_wait_is_charged_to_what_the_last_rank_did_longer():
    """Rank 1 takes 40 ns longer over the forward pass, and rank 0 waits for that."""
    phases, collectives = run(
        {
            0: [work("forward", 10), work("backward", 20), together(0, 1)],
            1: [work("forward", 50), work("backward", 20), together(0, 1)],
        }
    )
    found = delays(phases, collectives)
    assert charged(found) == {(1, "forward"): (40, 0)}
    assert caused_by_rank(found) == {1: 40}
    assert victims(found, [1]).rows() == [(0, 40, 40), (1, 0, 0)]


def test_late_rank_that_had_waited_itself_passes_its_lateness_on():
    """Rank 0 is 90 ns late for rank 1, which is late for rank 2: by those 90, and by its transfer with rank 0."""
    phases, collectives = run(
        {
            0: [work("forward", 100), together(0, 1)],
            1: [work("forward", 10), together(0, 1), together(1, 2)],
            2: [work("forward", 10), together(1, 2)],
        }
    )
    found = delays(phases, collectives)
    assert charged(found) == {(0, "forward"): (90, 90), (1, "allreduce"): (TRANSFER, 0)}
    assert victims(found, [0]).rows() == [(0, 0, 0), (1, 90, 90), (2, 90, 90)]
    assert found.charges["blocked_ns"].sum() == 180 + TRANSFER


def test_late_rank_answers_only_for_its_own_share():
    """Rank 1 is 92 ns late for rank 2: 60 because it waited for rank 0, 2 in transfer with it, and 30 of its own."""
    phases, collectives = run(
        {
            0: [work("forward", 70), together(0, 1)],
            1: [work("forward", 10), together(0, 1), work("backward", 30), together(1, 2)],
            2: [work("forward", 10), together(1, 2)],
        }
    )
    own = {(1, "allreduce"): (TRANSFER, 0), (1, "backward"): (30, 0)}
    assert charged(delays(phases, collectives)) == {(0, "forward"): (60, 60)} | own


def test_comparison_begins_where_both_last_met():
    """In the first half rank 0 is slow, in the second rank 1: each answers for its own half."""
    phases, collectives = run(
        {
            0: [work("a", 100), together(0, 1), work("b", 10), together(0, 1)],
            1: [work("a", 10), together(0, 1), work("b", 60), together(0, 1)],
        },
        steps=3,
    )
    assert charged(delays(phases, collectives)) == {(0, "a"): (270, 0), (1, "b"): (150, 0)}


def test_operations_that_block_no_rank_do_not_hide_where_the_time_went():
    """Two buckets are reduced while backward runs; only the end of the second blocks. Rank 1's forward is 40 longer:
    it, not backward, delays both buckets, and the rank was blocked for 40 in all, not for 80."""
    rows = []
    for rank, late in ((0, 0), (1, 40)):
        for seq in (0, 1):
            start = 20 + late + 10 * seq
            end = 62 + 10 * seq
            rows.append({"rank": rank, "seq": seq, "start_ns": start, "issued_ns": start, "end_ns": end})
            rows[-1]["op"] = "allreduce"
    members = table("groups", {"name": "dp", "members": "0-1"})
    collectives = match_collectives(table("collectives", *rows), members, ONE_NODE)
    phases = pl.DataFrame(
        [
            (0, 0, "compute", "forward", 0, 20),
            (0, 0, "compute", "backward", 20, 30),
            (0, 0, "wait", "allreduce", 30, 70),
            (0, 0, "transfer", "allreduce", 70, 72),
            (1, 0, "compute", "forward", 0, 60),
            (1, 0, "compute", "backward", 60, 70),
            (1, 0, "transfer", "allreduce", 70, 72),
        ],
        schema=PHASE_COLUMNS,
        orient="row",
    )
    found = delays(phases, collectives.with_columns(step=pl.lit(0, pl.Int32)))
    assert charged(found) == {(1, "forward"): (80, 0)}
    assert found.charges["blocked_ns"].to_list() == [40]


def parallel(slow, extra=100, microbatches=3):
    """Tensor, pipeline and data parallel, 2 x 2 x 2: rank = 4 * replica + 2 * stage + shard; one rank is slow."""
    programs = {}
    for rank in range(8):
        replica, stage, shard = rank // 4, rank // 2 % 2, rank % 2
        tensor = together(*(4 * replica + 2 * stage + s for s in range(2)))
        data = together(*(4 * r + 2 * stage + shard for r in range(2)))
        program = []
        for direction in ("forward", "backward"):
            for _ in range(microbatches):
                first = stage == (0 if direction == "forward" else 1)
                peer = 4 * replica + 2 * (1 - stage) + shard
                program += [] if first else [recv(peer)]
                program += [work(direction, 50 + (extra if rank == slow and direction == "forward" else 0)), tensor]
                program += [send(peer)] if first else []
        programs[rank] = [*program, data, work("optimizer", 10)]
    return programs


def test_one_slow_rank_answers_for_all_that_its_job_waits_beyond_a_healthy_one():
    """Tensor, pipeline and data parallel groups of 2: rank 5 meets ranks 4, 7 and 1 only.

    The healthy job waits too, for its pipeline to fill: that is left over for others."""
    healthy = delays(*run(parallel(slow=None), steps=4)).charges
    found = delays(*run(parallel(slow=5), steps=4))
    own = healthy["direct_ns"].sum() + healthy["indirect_ns"].sum()
    whole = found.charges["direct_ns"].sum() + found.charges["indirect_ns"].sum()
    assert caused_by_rank(found)[5] > 0.95 * (whole - own)
    assert max(ns for rank, ns in caused_by_rank(found).items() if rank != 5) < 0.1 * whole
    assert charged(found)[5, "forward"][1] > 0
    assert all(waited > 0 for rank, waited, _ in victims(found, [5]).iter_rows() if rank != 5)


def test_charges_add_up_to_all_waiting():
    rng = np.random.default_rng(3)
    programs = parallel(slow=None)
    uneven = {
        rank: [work(item[1], int(rng.integers(1, 200))) if item[0] == "work" else item for item in program]
        for rank, program in programs.items()
    }
    phases, collectives = run(uneven, steps=3)
    found = delays(phases, collectives)
    assert dict(found.charges.schema) == CHARGE_COLUMNS
    waited = collectives["wait_ns"].sum()
    assert found.charges["direct_ns"].sum() + found.charges["indirect_ns"].sum() == waited
    assert sum(caused_by_rank(found).values()) == waited
    blocked = phases.filter(pl.col("part") == "wait").select(pl.col("end_ns") - pl.col("start_ns")).sum().item()
    assert found.charges["blocked_ns"].sum() == blocked
    each = sum(victims(found, [rank])["waited_ns"].to_numpy() for rank in range(8))
    of_rank = collectives.group_by("rank").agg(pl.col("wait_ns").sum()).sort("rank")["wait_ns"].to_numpy()
    assert np.abs(each - of_rank).max() <= 8  # of rounding


def test_without_phases_the_last_rank_is_charged():
    phases, collectives = run({0: [work("a", 10), together(0, 1)], 1: [work("a", 50), together(0, 1)]})
    assert caused_by_rank(delays(phases.clear(), collectives)) == {1: 40}


def test_no_rank_waits():
    phases, collectives = run({0: [work("a", 10), together(0, 1)], 1: [work("a", 10), together(0, 1)]})
    assert delays(phases, collectives).charges.is_empty()
    assert delays(phases, collectives.clear()).charges.is_empty()
    assert delays(phases.clear(), collectives.clear()).charges.is_empty()


def test_half_a_million_operations_take_a_second_or_so():
    """The bound is for a loaded machine; on a quiet core it is about a second."""
    phases, collectives = run(parallel(slow=5), steps=1)
    span = int(phases["end_ns"].max())
    repeats = 500_000 // len(collectives)
    shift = pl.DataFrame({"_n": np.arange(repeats)}).lazy()
    times = pl.col("^(start|issued|end)_ns$") + pl.col("_n") * span
    step, instance = pl.col("_n").cast(pl.Int32), pl.col("instance_id") + pl.col("_n").cast(pl.UInt32) * 1_000
    many = collectives.lazy().join(shift, how="cross").with_columns(times, instance_id=instance, step=step).collect()
    cut = phases.lazy().join(shift, how="cross").with_columns(times, step=step).sort("rank", "start_ns").collect()
    begun = time.process_time()
    found = delays(cut.select(*PHASE_COLUMNS), many)
    assert time.process_time() - begun < 10
    assert caused_by_rank(found)[5] > 0.7 * many["wait_ns"].sum()


# ---------------------------------------------------------------- real traces


@pytest.fixture
def torchrec():
    def opened(name):
        path = DATA / "kineto" / "torchrec" / name
        timeline = build_timeline(Trace.open(path))
        return delays(timeline.phases, timeline.collectives), timeline

    return opened


@pytest.mark.needs_data
def test_torchrec_sleeper_is_charged_with_the_region_it_slept_in(torchrec):
    """Rank 2 sleeps 1 s in `# running sparse arch` in each of three steps, and three ranks wait 9.1 s for it."""
    found, timeline = torchrec("sst_long_a2a_optimizer")
    waited = timeline.waits["waited_ns"].sum()
    assert caused_by_rank(found) == {2: waited}
    direct, indirect = charged(found)[2, "# running sparse arch"]
    assert direct + indirect >= 0.99 * waited


@pytest.mark.needs_data
def test_torchrec_short_sleeper_comes_first(torchrec):
    found, timeline = torchrec("sst_long_a2a_optimizer_5")
    by_rank = caused_by_rank(found)
    assert sum(by_rank.values()) == timeline.waits["waited_ns"].sum()
    assert by_rank[2] > 0.9 * sum(by_rank.values())
