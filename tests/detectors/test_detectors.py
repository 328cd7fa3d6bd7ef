"""Each detector on jobs whose numbers are written down: one fault, none, near the threshold, one rank missing."""

from __future__ import annotations

import inspect
import random
import re
import runpy

import polars as pl
import pytest

from rankscope.analysis.detectors import detectors, gc_stall, input_stall, load_imbalance, slow_link, slow_rank
from rankscope.analysis.metrics.links import links
from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.phrases import every_nth
from rankscope.errors import NotResolvable
from support.paths import ROOT

MS = 1_000_000
STEPS = 40


def job(own, *, forward=None, transfer=10, **parts):
    """Tables of a synchronous job; everything is ms by rank and step.

    `own` is a rank's own work, a third of it forward unless `forward` says otherwise, the rest backward. `parts` are
    further parts of the same shape. A rank that is done early waits for the last, then all transfer.
    """
    forward = forward or {rank: [ms / 3 for ms in values] for rank, values in own.items()}
    busy = {r: [sum(p[r][s] for p in (own, *parts.values()) if r in p) for s in range(len(own[r]))] for r in own}
    rows, labels, steps, regions = [], [], [], []
    for rank, values in own.items():
        at = 0
        for step, ms in enumerate(values):
            longest = max(b[step] for b in busy.values())
            split = {"compute": ms, "wait": longest - busy[rank][step], "transfer": transfer}
            split |= {name: part[rank][step] for name, part in parts.items() if rank in part}
            rows += [(rank, step, part, round(value * MS)) for part, value in split.items()]
            begin, middle, end = (round((at + x) * MS) for x in (0, forward[rank][step], ms))
            labels += [
                (rank, step, "compute", "forward", begin, middle),
                (rank, step, "compute", "backward", middle, end),
            ]
            steps.append((rank, step, begin, begin + round((longest + transfer) * MS)))
            for kind in parts:
                if split.get(kind):
                    name = "gc generation 2" if kind == "gc" else kind
                    regions.append((rank, end, end + round(split[kind] * MS), kind, name))
            at += longest + transfer
    return {
        "breakdown": pl.DataFrame(rows, ["rank", "step", "part", "ns"], orient="row"),
        "phases": pl.DataFrame(labels, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row"),
        "steps": pl.DataFrame(steps, ["rank", "step", "start_ns", "end_ns"], orient="row"),
        "regions": pl.DataFrame(
            regions,
            {"rank": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64, "kind": pl.String, "name": pl.String},
            orient="row",
        ),
        "ranks": pl.DataFrame({"rank": list(own), "node": [rank // 2 for rank in own]}),
    }


def noisy(mean, *, seed, sigma=3.0, hiccups=0.05):
    """`STEPS` values around `mean` as on a busy host: a few ms of scatter, sometimes preempted for 30 ms."""
    rng = random.Random(seed)
    return [mean + abs(rng.gauss(0, sigma)) + (30 if rng.random() < hiccups else 0) for _ in range(STEPS)]


def healthy(ranks=range(4), seed=0):
    return {rank: noisy(180, seed=1000 * seed + rank) for rank in ranks}


def longest(own):
    """The mean over steps of the longest rank's work."""
    return sum(map(max, zip(*own.values(), strict=True))) / STEPS


def slow(tables, **thresholds):
    return slow_rank.detect(*(tables[n] for n in ("breakdown", "phases", "steps", "ranks")), **thresholds)


def stalled(tables):
    return input_stall.detect(tables["breakdown"], tables["regions"], tables["ranks"])


def collecting(tables):
    return gc_stall.detect(tables["breakdown"], tables["regions"])


def uneven(tables):
    return load_imbalance.detect(tables["breakdown"], tables["phases"], tables["steps"])


def test_rank_that_computes_30_ms_longer_is_named_with_what_it_costs():
    """Less than 30 ms: now and then another rank is preempted, and the job would wait for that one."""
    own = healthy()
    without = longest(own)
    own[2] = [ms + 30 for ms in own[2]]
    (finding,) = slow(job(own))
    assert finding.ranks == (2,)
    assert finding.lost_ns_per_step == pytest.approx((longest(own) - without) * MS, rel=0.1)
    assert finding.lost_ns_per_step < 28 * MS
    assert finding.severity == "high"
    said = re.match(r"Rank 2 is slow: it computes ([\d.]+) ms longer per step than its peers$", finding.title)
    assert float(said[1]) == pytest.approx(30, abs=1)


def test_slow_rank_names_the_label_that_holds_the_excess():
    own = {rank: [100 if rank != 1 else 130] * STEPS for rank in range(4)}
    forward = {rank: [40 if rank != 1 else 70] * STEPS for rank in range(4)}
    (finding,) = slow(job(own, forward=forward))
    assert (finding.where, finding.lost_ns_per_step, finding.uncertainty_ns) == ("forward", 30 * MS, 0)
    assert finding.lost_ns_total == STEPS * 30 * MS
    assert finding.fix == "rank:1"
    assert (finding.evidence[0].rank, finding.evidence[0].table) == (1, "steps")


@pytest.mark.parametrize("seed", range(20))
def test_noisy_healthy_job_has_no_finding(seed):
    tables = job(healthy(seed=seed))
    with_input = {rank: [0.3] * STEPS for rank in range(4)}
    assert slow(tables) == []
    assert stalled(job(healthy(seed=seed), input=with_input)) == []
    assert collecting(tables) == []
    own, rng = healthy(seed=seed), random.Random(seed)
    anywhere = {rank: [60 + rng.random() * (ms - 180) for ms in values] for rank, values in own.items()}
    assert uneven(job(own, forward=anywhere)) == []


@pytest.mark.parametrize(("excess_ms", "found"), [(2.5, 0), (4.5, 1)])
def test_slow_rank_speaks_from_3_percent_of_the_step(excess_ms, found):
    """The step is 113 to 115 ms long."""
    own = {rank: [103 + (excess_ms if rank == 0 else 0)] * STEPS for rank in range(4)}
    assert len(slow(job(own))) == found


def test_slow_rank_works_with_one_peer_and_with_a_rank_missing():
    own = healthy()
    own[2] = [ms + 30 for ms in own[2]]
    for seen in ((1, 2), (0, 2, 3)):
        assert [f.ranks for f in slow(job({rank: own[rank] for rank in seen}))] == [(2,)]


def test_excess_that_no_rank_waits_for_is_no_finding():
    """Rank 0 computes 30 ms longer and transfers 30 ms less: its peers were not blocked any longer for it."""
    own = {rank: [130 if rank == 0 else 100] * STEPS for rank in range(4)}
    tables = job(own)
    others_transfer = (pl.col("part") == "wait") & (pl.col("rank") != 0)
    tables["breakdown"] = tables["breakdown"].with_columns(pl.when(others_transfer).then(0).otherwise("ns").alias("ns"))
    assert slow(tables) == []


def test_bursts_of_one_rank_are_found_and_their_steps_named():
    """Rank 3 takes 150 ms longer in every 5th step: 30 ms per step."""
    own = healthy()
    own[3] = [ms + (150 if step % 5 == 0 else 0) for step, ms in enumerate(own[3])]
    (finding,) = slow(job(own))
    assert finding.ranks == (3,)
    assert finding.steps == tuple(range(0, STEPS, 5))
    assert finding.lost_ns_per_step == pytest.approx(30 * MS, rel=0.15)
    assert "every 5 steps" in finding.title


@pytest.mark.parametrize(("bursts_ms", "found"), [([300, 310], 1), ([300], 0), ([300, 80], 0)])
def test_two_bursts_that_are_alike_exclude_chance(bursts_ms, found):
    at = dict(zip((2, 7), bursts_ms, strict=False))
    own = {rank: [180] * 10 for rank in range(3)} | {3: [180 + at.get(step, 0) for step in range(10)]}
    assert [(f.ranks, f.steps) for f in slow(job(own))] == [((3,), (2, 7))] * found


def test_bursts_are_found_on_a_rank_that_is_always_a_little_behind_elsewhere():
    """Rank 3: forward takes 150 ms longer in every 5th step, backward half a ms longer in each."""
    own = {rank: [180.0] * STEPS for rank in range(4)}
    forward = {rank: [60.0] * STEPS for rank in range(4)}
    forward[3] = [60 + (150 if step % 5 == 0 else 0) for step in range(STEPS)]
    own[3] = [ms + 120.5 for ms in forward[3]]
    (finding,) = slow(job(own, forward=forward))
    assert (finding.ranks, finding.steps) == ((3,), tuple(range(0, STEPS, 5)))
    assert finding.lost_ns_per_step == pytest.approx(30 * MS, rel=0.05)


def loaded(seed, sigma=25, lasts=0.95):
    """`STEPS` values on a host where other load comes and goes: 95 % of it is still there a step later."""
    rng, load, values = random.Random(seed), 0, []
    for _ in range(STEPS):
        load = lasts * load + (1 - lasts**2) ** 0.5 * rng.gauss(0, sigma)
        values.append(180 + abs(load) + rng.gauss(0, 2))
    return values


@pytest.mark.parametrize("seed", [4, 20, 22, 34, 38, 57, 59])
def test_load_that_lasts_on_one_of_two_hosts_is_not_a_slow_rank(seed):
    """Of 60 such pairs these look slow where steps are taken for independent."""
    assert slow(job({0: loaded(2 * seed), 1: loaded(2 * seed + 1)})) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("when", [range(80, 160), range(0, 160, 2), range(100)])
def test_one_of_two_ranks_that_is_slow_for_a_part_of_the_run(seed, when):
    """Each is the other's only peer, so what half of the steps have looks like scatter."""
    own = {rank: [ms for part in range(4) for ms in noisy(180, seed=f"{seed} {rank} {part}")] for rank in (0, 1)}
    own[1] = [value + 50 * (step in when) for step, value in enumerate(own[1])]
    (finding,) = slow(job(own))
    assert finding.ranks == (1,)
    assert len({*when} ^ {*finding.steps}) <= 10  # hiccups of either rank
    assert finding.lost_ns_per_step == pytest.approx(50 * MS * len(when) / len(own[1]), rel=0.1)


def test_two_healthy_ranks_have_no_slow_one():
    found = [slow(job(healthy(range(2), seed))) for seed in range(100)]
    assert found == [[]] * 100


def test_one_long_hiccup_is_not_a_slow_rank():
    own = healthy()
    own[1][7] += 3000
    assert slow(job(own)) == []


def test_all_ranks_of_a_node_are_one_finding():
    """Ranks 2 and 3 are all of node 1: the node is to be fixed, since fixing either rank alone would save nothing."""
    own = {rank: [150 if rank in (2, 3) else 100] * STEPS for rank in range(8)}
    (finding,) = slow(job(own))
    assert (finding.ranks, finding.nodes) == ((2, 3), (1,))
    assert finding.title == "Node 1 is slow: ranks 2,3 compute 50.0 ms longer per step than their peers"
    assert finding.fix == "node:1"


def test_what_the_ranks_of_a_node_have_in_common_is_seen_before_any_of_them_stands_out():
    """Ranks 2 and 3 take 6 ms longer of 180, and each rank's steps scatter by as much."""
    own = {rank: noisy(180 + 6 * (rank in (2, 3)), seed=rank, sigma=4, hiccups=0) for rank in range(16)}
    (finding,) = slow(job(own), min_fraction=0.01)
    assert (finding.ranks, finding.nodes) == ((2, 3), (1,))


def test_slow_rank_on_a_slow_node_is_a_finding_besides_the_node():
    """Node 1 takes 20 ms longer, and rank 3 another 30 ms."""
    own = {rank: [100 + 20 * (rank in (2, 3)) + 30 * (rank == 3)] * STEPS for rank in range(8)}
    found = {(f.nodes, f.ranks): f.lost_ns_per_step / MS for f in slow(job(own))}
    assert found == {((1,), (2, 3)): 35, ((), (3,)): 15}


def test_rank_costs_what_it_takes_longer_than_the_next_and_alike_ones_cost_as_much_each():
    """Fixed, rank 2 would leave the job to rank 0, which takes 10 ms longer than the rest."""
    own = {rank: [100 + {0: 10, 2: 30}.get(rank, 0)] * STEPS for rank in range(8)}
    assert {f.ranks: f.lost_ns_per_step / MS for f in slow(job(own))} == {(2,): 20, (0,): 10}
    own[5] = own[2]
    assert {f.ranks: f.lost_ns_per_step / MS for f in slow(job(own))} == {(2,): 20, (5,): 20, (0,): 10}


def piped(own, stages):
    """The findings about a job whose `own` ranks, in order, make up so many pipeline stages."""
    tables = job(own)
    per_stage = len(own) // stages
    calls = [(rank, rank + per_stage, "send", 0) for rank in range(len(own) - per_stage)]
    calls += [(peer, rank, "recv", 0) for rank, peer, _, _ in calls]
    columns = {"rank": pl.Int64, "peer": pl.Int64, "op": pl.String, "group_id": pl.Int64}
    collectives = pl.concat([begun().clear(), pl.DataFrame(calls, columns, orient="row")], how="diagonal")
    regions = tables["regions"].with_columns(stage=pl.lit(None, pl.Int32), microbatch=pl.lit(None, pl.Int32))
    groups = pl.DataFrame({"group_id": [0], "name": ["0"], "role": [""], "members": [f"0-{len(own) - 1}"]})
    breakdown, phases, steps, ranks = (tables[n] for n in ("breakdown", "phases", "steps", "ranks"))
    return slow_rank.detect(breakdown, phases, steps, ranks, collectives, regions, groups)


def test_ranks_of_a_long_stage_are_not_slow_and_one_among_them_is():
    """4 stages of 2 ranks; those of stage 2 have twice the work."""
    own = {rank: [200 if rank in (4, 5) else 100] * STEPS for rank in range(8)}
    assert piped(own, stages=4) == []
    own[3] = [140] * STEPS
    own[4] = [230] * STEPS
    assert {f.ranks: f.lost_ns_per_step / MS for f in piped(own, stages=4)} == {(4,): 30}


def test_stages_of_one_rank_have_no_peer():
    with pytest.raises(NotResolvable, match="each pipeline stage has one rank only"):
        piped({rank: [200 if rank == 2 else 100] * STEPS for rank in range(4)}, stages=4)


def test_slow_rank_cannot_be_judged_alone_nor_in_one_step():
    with pytest.raises(NotResolvable, match="only one rank was seen"):
        slow(job({0: [100] * STEPS}))
    with pytest.raises(NotResolvable, match="1 analyzed step, at least 2"):
        slow(job({0: [100], 1: [130]}))


def test_few_steps_show_what_is_clear_and_nothing_else():
    """30 ms more in each of three steps is clear; 10, 30 and 50 ms more might be chance: ± 50 ms."""
    (finding,) = slow(job({0: [100] * 3, 1: [130] * 3, 2: [100] * 3}))
    assert (finding.ranks, finding.lost_ns_per_step) == ((1,), 30 * MS)
    unclear = job({0: [100] * 3, 1: [110, 130, 150], 2: [100] * 3})
    assert slow(unclear) == []
    with pytest.raises(NotResolvable, match=r"in 3 analyzed steps nothing could be distinguished from chance"):
        slow_rank.resolution_ns(unclear["breakdown"])


def begun(*steps):
    """Collectives as the devices began them: per step and operation when each rank did, ms. The last begins at once."""
    schema = {"rank": pl.Int64, "step": pl.Int64, "instance_id": pl.Int64, "device_start_ns": pl.Int64}
    schema |= {"wait_ns": pl.Int64, "group_size": pl.Int64}
    number = iter(range(100))
    rows = [
        (rank, step, instance, round((1000 * step + at) * MS), round((max(starts) - at) * MS), len(starts))
        for step, operations in enumerate(steps)
        for instance, starts in zip(number, operations, strict=False)
        for rank, at in enumerate(starts)
    ]
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.with_columns(op=pl.lit("allreduce"), arrival_spread_ns=pl.lit(0, pl.Int64))


@pytest.mark.parametrize("seed", range(20))
def test_few_steps_of_a_noisy_healthy_job_have_no_finding(seed, monkeypatch):
    monkeypatch.setitem(globals(), "STEPS", 2 + seed % 3)
    own = healthy(ranks=range(2 + seed % 7), seed=seed)
    assert slow(job(own)) == []
    assert stalled(job(own, input={rank: [0.3] * STEPS for rank in own})) == []


def test_rank_that_waits_for_input_is_named_and_is_not_slow():
    own = healthy()
    tables = job(own, input={rank: [40 if rank == 1 else 1] * STEPS for rank in range(4)})
    (finding,) = stalled(tables)
    assert (finding.ranks, finding.lost_ns_per_step) == ((1,), 39 * MS)
    assert finding.evidence[0].note == "longest: 40.0 ms"
    assert slow(tables) == []


@pytest.mark.parametrize("waits_ms", [{2: 40, 3: 38}, {2: 40, 3: 8}, {2: 40, 5: 30}])
def test_ranks_that_stall_alike_are_one_finding(waits_ms):
    """Ranks 2 and 3 are all of a node; elsewhere half of the longest stall is alike. The longest counts."""
    waits = {rank: [waits_ms.get(rank, 1)] * STEPS for rank in range(8)}
    (finding,) = stalled(job({rank: [100] * STEPS for rank in range(8)}, input=waits))
    assert (finding.ranks, finding.lost_ns_per_step) == (tuple(waits_ms), 39 * MS)


def test_ranks_that_take_turns_cost_the_sum():
    """Ranks 2 and 5 wait 80 ms longer in every second step each, rank 7 a fifth of that in all."""
    waits = {rank: [0] * STEPS for rank in range(8)}
    waits[2] = [80 * (step % 2) for step in range(STEPS)]
    waits[5] = [80 - ms for ms in waits[2]]
    waits[7] = [8] * STEPS
    found = {f.ranks: f.lost_ns_per_step for f in stalled(job({rank: [100] * STEPS for rank in range(8)}, input=waits))}
    assert found == {(2, 5): 80 * MS, (7,): 8 * MS}


def test_a_stall_of_some_steps_is_as_long_as_it_is_there():
    """As a rank that is slow now and then: 160 ms in every second step, which cost half of that per step."""
    waits = {1: [160 * (step % 2) for step in range(STEPS)]}
    (finding,) = stalled(job({rank: [100] * STEPS for rank in range(4)}, input=waits))
    assert (finding.title, finding.lost_ns_per_step) == (
        "Rank 1 waits 160 ms every 2 steps for the next batch",
        80 * MS,
    )


def test_hiccups_do_not_add_to_a_steady_stall():
    """One batch of 40 takes a second; the stall remains 39 ms longer than the peers'."""
    waits = {rank: [40 if rank == 1 else 1] * STEPS for rank in range(4)}
    waits[1][20] = 1000
    (finding,) = stalled(job(healthy(), input=waits))
    assert (finding.ranks, finding.lost_ns_per_step, finding.steps) == ((1,), 39 * MS, ())


def test_all_ranks_that_wait_for_input_are_one_finding():
    own = {rank: [100] * STEPS for rank in range(4)}
    (finding,) = stalled(job(own, input={rank: [20] * STEPS for rank in range(4)}))
    assert (finding.ranks, finding.lost_ns_per_step) == ((0, 1, 2, 3), 20 * MS)
    assert finding.fix == "input"


def test_loaders_that_are_all_too_slow_are_one_finding_though_one_rank_waits_most():
    """Rank 0 waits 30 ms in each step. The others' loaders get ahead meanwhile: they wait as long in 3 of 40 steps."""
    waits = {rank: [1 + 30 * (rank == 0 or step % 13 == rank) for step in range(STEPS)] for rank in range(8)}
    (finding,) = stalled(job({rank: [100] * STEPS for rank in range(8)}, input=waits))
    assert (finding.ranks, finding.lost_ns_per_step) == (tuple(range(8)), 31 * MS)


@pytest.mark.parametrize(
    ("slow", "named"), [((1, 3, 6), range(8)), ((4, 6, 7), (4, 5, 6, 7)), ((4, 6), (4, 6)), ((5,), (5,))]
)
def test_ranks_that_wait_now_and_then_speak_for_what_they_share(slow, named):
    """They wait 30 ms in turn, in no step together; ranks 0 to 3 and 4 to 7 are on a node each."""
    turns = [slow[step % len(slow)] if step % 4 else None for step in range(STEPS)]
    waits = {rank: [1 + 30 * (rank == turn) for turn in turns] for rank in range(8)}
    tables = job({rank: [100] * STEPS for rank in range(8)}, input=waits)
    nodes = pl.DataFrame({"rank": range(8), "node": [0] * 4 + [1] * 4})
    (finding,) = input_stall.detect(tables["breakdown"], tables["regions"], nodes)
    assert finding.ranks == tuple(named)


@pytest.mark.parametrize(("longest_ms", "named"), [(28, range(4)), (60, (3,))])
def test_ranks_that_all_wait_are_named_together_unless_one_waits_twice_as_long(longest_ms, named):
    """Ranks 0 to 2 wait 20 ms for each batch."""
    waits = {rank: [20 if rank < 3 else longest_ms] * STEPS for rank in range(4)}
    (finding,) = stalled(job({rank: [100] * STEPS for rank in range(4)}, input=waits))
    excess_ms = longest_ms if len(named) == 4 else longest_ms - 20
    assert (finding.ranks, finding.lost_ns_per_step) == (tuple(named), excess_ms * MS)


@pytest.mark.parametrize(("input_ms", "found"), [(3, 0), (4, 1)])
def test_input_stall_speaks_from_3_percent_of_the_step(input_ms, found):
    """The step is 113 to 114 ms long."""
    own = {rank: [100] * STEPS for rank in range(3)}  # rank 3 of the job is missing
    assert len(stalled(job(own, input={1: [input_ms] * STEPS}))) == found


def test_single_slow_batch_is_not_a_stall():
    own = {rank: [100] * STEPS for rank in range(4)}
    assert stalled(job(own, input={1: [1] * (STEPS - 1) + [2000]})) == []


@pytest.mark.parametrize(("waits", "lost_ms"), [([20, 40, 20], 20), ([0, 40, 0], None), ([0, 40], None), ([20], 20)])
def test_of_few_steps_input_counts_as_in_the_median_step(waits, lost_ms):
    found = stalled(job({rank: [100] * len(waits) for rank in range(4)}, input={1: waits}))
    assert [finding.lost_ns_per_step for finding in found] == ([] if lost_ms is None else [lost_ms * MS])


def test_input_is_not_judged_without_a_data_loader():
    with pytest.raises(NotResolvable, match="no data loader"):
        stalled(job(healthy()))


def test_collections_every_fifth_step_are_found_with_rank_and_period():
    own = healthy()
    tables = job(own, gc={3: [150 if step % 5 == 4 else 0 for step in range(STEPS)]})
    (finding,) = collecting(tables)
    assert (finding.ranks, finding.lost_ns_per_step) == ((3,), 30 * MS)
    assert finding.title == "Garbage collection (generation 2) stops rank 3 for 150 ms every 5 steps"
    assert finding.steps == tuple(range(4, STEPS, 5))
    assert slow(tables) == []


@pytest.mark.parametrize(("pauses_ms", "found"), [([200, 210], 1), ([200], 0), ([200, 40], 0)])
def test_two_collections_that_are_alike_show_more_than_one(pauses_ms, found):
    at = dict(zip((7, 29), pauses_ms, strict=False))
    gc = {3: [at.get(step, 0) for step in range(STEPS)]}
    assert len(collecting(job({rank: [100] * STEPS for rank in range(4)}, gc=gc))) == found


@pytest.mark.parametrize(("ms", "found"), [(100, 1), (40, 0)])
def test_one_collection_is_its_own_evidence_where_it_takes_a_tenth_of_all_time(ms, found):
    """Of 5 steps of 110 ms one takes 100 longer; how often it comes back is not known: 20 ms more or less."""
    own = {rank: [100] * 5 for rank in range(4)}
    findings = collecting(job(own, gc={3: [0, 0, ms, 0, 0]}))
    assert [(f.ranks, f.lost_ns_per_step, f.uncertainty_ns) for f in findings] == [((3,), 20 * MS, 20 * MS)] * found


def test_ranks_that_collect_in_different_steps_cost_the_sum():
    """Each of 4 ranks collects for 50 ms in every 8th step, never together: 4 × 50 / 8 = 25 ms per step."""
    own = {rank: [100] * STEPS for rank in range(4)}
    gc = {rank: [50 if step % 8 == 2 * rank else 0 for step in range(STEPS)] for rank in range(4)}
    (finding,) = collecting(job(own, gc=gc))
    assert (finding.ranks, finding.lost_ns_per_step) == ((0, 1, 2, 3), 25 * MS)
    assert finding.fix == "gc"


@pytest.mark.parametrize(("gc_ms", "found"), [(0.9, 0), (1.5, 1)])
def test_gc_stall_speaks_from_1_percent_of_the_step(gc_ms, found):
    own = {rank: [100] * STEPS for rank in range(3)}  # rank 3 of the job is missing
    assert len(collecting(job(own, gc={0: [gc_ms] * STEPS}))) == found


def lengths(seed, low=0.25, ranks=range(4)):
    """Random work per (rank, step): `low` to 1 times 200 ms, with 1 ms of noise in forward and in backward each."""
    rng = random.Random(seed)
    forward, own = {}, {}
    for rank in ranks:
        work = [rng.uniform(low, 1) * 200 for _ in range(STEPS)]
        forward[rank] = [w / 3 + rng.gauss(0, 1) for w in work]
        own[rank] = [f + 2 * w / 3 + rng.gauss(0, 1) for f, w in zip(forward[rank], work, strict=True)]
    return {"own": own, "forward": forward}


def test_uneven_sequences_are_uneven_work_and_no_rank_is_slow():
    tables = job(**lengths(seed=1))
    (finding,) = uneven(tables)
    longest = tables["breakdown"].filter(pl.col("part") == "compute").group_by("step")
    lost = longest.agg(pl.col("ns").max() - pl.col("ns").mean())["ns"].mean()
    assert finding.lost_ns_per_step == pytest.approx(lost, rel=0.05)  # hardly any of it is noise
    assert slow(tables) == []


@pytest.mark.parametrize(("low", "found"), [(0.92, 0), (0.8, 1)])
def test_uneven_work_speaks_from_3_percent_of_the_step(low, found):
    """The longest of three is a quarter of the range above the mean: 2 % and 5 %."""
    assert len(uneven(job(**lengths(seed=2, low=low, ranks=range(3))))) == found  # rank 3 of the job is missing


def test_uneven_work_costs_what_the_data_make_of_it_and_not_the_noise():
    """The longest of 8 ranks is 1.42 sigma above the mean: data of 10 ms and noise of 7 ms make 12 ms of it."""
    rng = random.Random(6)
    forward, own = {}, {}
    for rank in range(8):
        data = [rng.gauss(1, 0.05) for _ in range(STEPS)]
        forward[rank] = [100 * x + rng.gauss(0, 5) for x in data]
        own[rank] = [f + 100 * x + rng.gauss(0, 5) for f, x in zip(forward[rank], data, strict=True)]
    tables = [job(own, forward=forward)[name] for name in ("breakdown", "phases", "steps")]
    assert load_imbalance.detect(*tables) == []  # half of either part's variance is noise
    # Data of 12.2 ms would have been three fifths of it, and would have been seen.
    noise = 50**0.5
    seen_from = 1.42 * ((150 + noise**2) ** 0.5 - noise)
    assert load_imbalance.resolution_ns(*tables[:2]) == pytest.approx(seen_from * MS, rel=0.2)
    (finding,) = load_imbalance.detect(*tables, min_correlation=0.3)
    assert finding.lost_ns_per_step == pytest.approx(1.42 * (150**0.5 - noise) * MS, rel=0.15)


def test_uneven_without_correlation_of_forward_and_backward_is_noise():
    rng = random.Random(3)
    forward = {rank: [rng.uniform(20, 100) for _ in range(STEPS)] for rank in range(4)}
    own = {rank: [f + rng.uniform(20, 100) for f in values] for rank, values in forward.items()}
    assert uneven(job(own, forward=forward)) == []


def test_preempted_steps_do_not_hide_uneven_work():
    """One step in 20 is 300 ms longer, in forward or in backward: more than the lengths vary."""
    rng, tables = random.Random(5), lengths(seed=1)
    for rank, values in tables["own"].items():
        for step in range(STEPS):
            if rng.random() < 0.05:
                values[step] += 300
                tables["forward"][rank][step] += 300 * rng.randint(0, 1)
    assert len(uneven(job(**tables))) == 1


def test_bursts_of_one_rank_are_not_uneven_work():
    """Rank 1 takes twice as long in every fourth step, forward and backward alike; else all ranks take turns."""
    rng = random.Random(4)
    own = {rank: [180 * rng.uniform(0.99, 1.01) for _ in range(STEPS)] for rank in range(4)}
    own[1] = [ms * 2 if step % 4 == 0 else ms for step, ms in enumerate(own[1])]
    assert uneven(job(own)) == []


def test_uneven_work_is_silent_about_a_persistent_rank():
    own = {rank: [100 + (80 + step if rank == 2 else 0) for step in range(STEPS)] for rank in range(4)}
    assert uneven(job(own)) == []


def edges(rates, rtt_s=0.0005, sent_mb=100, pairs=1.0):
    """`links` from {(node, peer): MB/s}, all of which sent as much."""
    rows = [
        (a, b, sent_mb * 1e6, sent_mb / rate, rate * 1e6, rtt_s, 0.0001, 0.0, pairs) for (a, b), rate in rates.items()
    ]
    names = ["node", "peer_node", "sent_bytes", "busy_s", "rate_bytes_per_s", "rtt_s", "min_rtt_s", "retransmits"]
    return pl.DataFrame(rows, [*names, "pairs"], orient="row")


def all_pairs(nodes, slow_pairs, healthy_rate=100, slow_rate=10):
    return edges(
        {
            (a, b): slow_rate if {a, b} in slow_pairs else healthy_rate
            for a in range(nodes)
            for b in range(nodes)
            if a != b
        }
    )


def linked(table, transfer=60, nodes=3):
    tables = job({rank: noisy(100, seed=rank) for rank in range(2 * nodes)}, transfer=transfer)
    return slow_link.detect(tables["breakdown"], tables["ranks"], tables["steps"], table)


def test_node_of_which_all_links_are_slow_is_named():
    """Transfer takes 60 ms at a tenth of the others' rate: 54 ms would not be there."""
    (finding,) = linked(all_pairs(3, [{0, 1}, {1, 2}]))
    assert (finding.nodes, finding.ranks, finding.lost_ns_per_step) == ((1,), (2, 3), 54 * MS)
    assert finding.title.startswith("The link of node 1 is slow (10 MB/s against 100 MB/s elsewhere)")
    assert finding.fix == "link:node1"


def test_slow_link_between_two_of_four_nodes_is_named_as_a_pair():
    (finding,) = linked(all_pairs(4, [{1, 3}]), nodes=4)
    assert (finding.nodes, finding.ranks, finding.where) == ((1, 3), (), "the link between node 1 and node 3")


def test_links_that_are_alike_blame_no_node():
    assert linked(all_pairs(3, [], healthy_rate=10)) == []


def test_slow_link_that_costs_little_is_silent():
    assert linked(all_pairs(3, [{0, 1}, {1, 2}]), transfer=3) == []


@pytest.mark.parametrize(("slow_rate", "found"), [(60, 0), (45, 1)])
def test_slow_link_speaks_from_half_the_rate_of_the_others(slow_rate, found):
    assert len(linked(all_pairs(3, [{0, 1}, {1, 2}], slow_rate=slow_rate))) == found


def test_a_slowest_link_that_is_not_reported_says_what_it_may_cost():
    """Of 60 ms 40 % where one link gets through 60 MB/s and others 100; 25 % where one way does 60 and the other 80."""
    tables = job({rank: noisy(100, seed=rank) for rank in range(6)}, transfer=60)
    said = [tables["breakdown"], tables["ranks"]]
    alike, slower = all_pairs(3, []), all_pairs(4, [{0, 1}], slow_rate=60)
    assert slow_link.resolution_ns(*said, alike) < 6 * MS  # 3 % of the step
    assert slow_link.resolution_ns(*said, slower) == 24 * MS
    assert slow_link.resolution_ns(*said, edges({(0, 1): 60, (1, 0): 80})) == 15 * MS


@pytest.mark.parametrize(("scatter", "found"), [(2, 1), (20, 0)])
def test_among_many_links_one_is_slow_if_it_is_clear_of_their_scatter(scatter, found):
    """A ring of 20 nodes: of its 20 links the two of node 7 get through 70 MB/s, the others about 100."""
    rng = random.Random(0)
    rates = {(a, (a + 1) % 20): 70 if 7 in (a, a + 1) else 100 + rng.gauss(0, scatter) for a in range(20)}
    assert [f.nodes for f in linked(edges(rates), nodes=20)] == [(7,)] * found


@pytest.mark.parametrize(
    ("slow", "found"),
    [([], []), ([(3, 11)], [(3, 11)]), ([(8, 9)], [(8, 9)]), ([(5, 13), (13, 5), (12, 13), (13, 14)], [(13,)])],
    ids=["healthy", "of the pipeline", "of a ring", "a node"],
)
@pytest.mark.parametrize(("ring_mb", "ranks"), [(400, 1), (110, 8), (400, 8)])
def test_links_are_compared_with_those_that_do_the_same(slow, found, ring_mb, ranks):
    """Two stages of 8 nodes: each node sends 100 MB to its peer of the other stage, 8 ranks at once, so that a socket
    gets through 290 MB/s, and so much in its stage's ring at 2.4 GB/s. Slow links take twice as long.

    What the links do is told by their bytes, or by how many ranks send these, or both."""
    pipeline = [way for a in range(8) for way in ((a, a + 8), (a + 8, a))]
    ring = [(8 * stage + a, 8 * stage + (a + 1) % 8) for stage in range(2) for a in range(8)]
    kinds = (pipeline, 290, 100, ranks), (ring, 2400, ring_mb, 1)
    each = [
        edges({way: rate / (1 + (way in slow)) for way in ways}, sent_mb=mb, pairs=n) for ways, rate, mb, n in kinds
    ]
    assert [finding.nodes for finding in linked(pl.concat(each), nodes=16)] == found


def test_two_nodes_are_judged_by_their_two_directions_only():
    (finding,) = linked(edges({(0, 1): 100, (1, 0): 20}), nodes=2)
    assert (finding.nodes, finding.where) == ((0, 1), "the link between node 0 and node 1")
    with pytest.raises(NotResolvable, match="no other link"):
        linked(edges({(0, 1): 20, (1, 0): 20}), nodes=2)


def test_one_node_has_no_links_and_a_missing_node_leaves_the_others_to_compare():
    with pytest.raises(NotResolvable, match="one node"):
        linked(all_pairs(2, []), nodes=1)
    seen = all_pairs(4, [{0, 1}, {1, 2}, {1, 3}]).filter(pl.col("node") != 3)  # node 3's own counters are missing
    assert [f.nodes for f in linked(seen, nodes=4)] == [(1,)]


def test_links_are_rates_while_busy_and_round_trips_under_traffic():
    """3 MB in 0.3 busy seconds are 10 MB/s; the socket that closed between is not counted backwards."""
    device, rows = "rank0>10.0.0.2", []
    for second, (sent, busy, rtt) in enumerate([(0, 0, 0.1), (1e6, 0.1, 0.002), (0, 0, 0.1), (2e6, 0.2, 0.002)]):
        values = {"bytes_sent": sent, "busy_s": busy, "rtt_s": rtt, "retransmits": 0}
        rows += [(0, second, "tcp", name, device, float(value)) for name, value in values.items()]
    rows.append((0, 1, "tcp", "bytes_sent", "rank0>192.0.2.9", 5.0))  # an unknown address
    counters = pl.DataFrame(rows, ["node", "time_ns", "source", "name", "device", "value"], orient="row")
    (row,) = links(counters, {0: ["10.0.0.1"], 1: ["10.0.0.2"]}, 0, 10).iter_rows(named=True)
    assert (row["node"], row["peer_node"], row["sent_bytes"], row["busy_s"]) == (0, 1, 3e6, pytest.approx(0.3))
    assert row["rate_bytes_per_s"] == pytest.approx(10e6)
    assert row["rtt_s"] == pytest.approx(0.002)
    assert row["pairs"] == 1
    more = counters.filter(pl.col("name") == "bytes_sent", pl.col("device") == device)
    more = more.with_columns(device=pl.lit("rank1>10.0.0.2"))
    both = pl.concat([counters, more.with_columns(pl.col("value") / 3)])
    assert links(both, {0: ["10.0.0.1"], 1: ["10.0.0.2"]}, 0, 10)["pairs"].item() == pytest.approx(4**2 / (3**2 + 1))


def test_links_of_a_job_shorter_than_the_time_between_two_readings_are_known():
    """Counters begin at 0 and are first read at 1000: what was sent until then was sent from 300 to 900."""
    values = {"bytes_sent": 4e6, "busy_s": 0.1, "rtt_s": 0.002, "retransmits": 0.0}
    rows = [(0, second, "tcp", name, "rank0>10.0.0.2", v) for second in (1000, 2000) for name, v in values.items()]
    counters = pl.DataFrame(rows, ["node", "time_ns", "source", "name", "device", "value"], orient="row")
    (row,) = links(counters, {0: ["10.0.0.1"], 1: ["10.0.0.2"]}, 300, 900).iter_rows(named=True)
    assert row["rate_bytes_per_s"] == pytest.approx(40e6)
    assert links(counters, {0: ["10.0.0.1"], 1: ["10.0.0.2"]}, 1100, 1900).is_empty()  # nothing was sent since


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (range(40), "in every step"),
        ((3, 8, 13, 18, 23), "every 5 steps"),
        ((5, 10, 15, 25, 30), "every 5 steps"),
        ((5, 10, 16, 25, 30), "in 5 of 40 steps"),
        ((2, 4), "in 2 of 40 steps"),
        (range(0, 40, 2), "every 2 steps"),
    ],
)
def test_how_often_something_happens(shown, said):
    assert every_nth(tuple(shown), 40) == said


def test_every_detector_is_a_manual_page_that_names_its_collectors():
    sections = ["Signal", "Why it costs time", "False positives", "What to try", "Source"]
    assert set(detectors()) >= {"gc_stall", "input_stall", "slow_link", "slow_rank", "load_imbalance"}
    for module in detectors().values():
        assert re.findall(r"^\*\*(.+?)\.\*\* ", module.__doc__, re.MULTILINE) == sections
        assert isinstance(module.detector, Detector)


def test_what_detectors_declare_exists():
    parts = set(PART_ORDER)
    for name, module in detectors().items():
        spec = module.detector
        by_part = {other for others in spec.explains_by_part.values() for other in others}
        explained = {*spec.explains, *spec.explains_of_ranks, *by_part}
        assert explained <= set(detectors()) - {name}
        assert {*spec.parts, *spec.explains_by_part} <= parts
        if spec.cost != "measured":
            assert "min_fraction" in inspect.signature(module.detect).parameters


def test_docs_are_those_of_the_modules():
    docs = ROOT / "docs"
    render = runpy.run_path(str(docs / "write_detectors.py"))["render"]
    assert (docs / "detectors.md").read_text(encoding="utf-8") == render(), "run `make docs`"
