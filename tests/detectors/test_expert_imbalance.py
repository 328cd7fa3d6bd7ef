"""Experts of which some get more tokens: by the bytes that ranks receive, and what they compute with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import rankscope
from faults import Case, simulated
from rankscope.analysis.detectors import expert_imbalance
from rankscope.errors import NotResolvable
from record import write
from simulate import Job, healthy_resources, run
from support import kineto
from support.paths import SCRIPTS

MS, STEPS = 1_000_000, 20
MB = 1_000_000


def tables(received_mb, *, ns_per_byte=2.0, usual_ms=10.0, scatter_ms=0.0):
    """Four ranks; each step has one all-to-all to the experts and one back. `received_mb` is by step and rank.

    A rank computes 2 ms with each MB that it received, beside what it always does; then all wait for the last.
    """
    rng = np.random.default_rng(0)
    rows, parts, at = [], [], 0
    for step in range(STEPS):
        amount = np.array(received_mb(step), float) * MB
        own = amount * ns_per_byte + usual_ms * MS + rng.normal(0, scatter_ms * MS, 4)
        end = at + MS
        back = end + own.max() + MS
        for rank in range(4):
            arrival = round(end + own[rank])
            for seq, start, stop, size in ((2 * step, at, end, amount[rank]), (2 * step + 1, arrival, back, 4 * MB)):
                rows.append((rank, step, "ep", "alltoall_base", seq, round(start), round(stop), round(size)))
            parts += [(rank, step, "compute", round(own[rank])), (rank, step, "wait", round(own.max() - own[rank]))]
            parts.append((rank, step, "transfer", 2 * MS))
        at = round(back)
    names = ("rank", "step", "group", "op", "seq", "start_ns", "end_ns", "received_bytes")
    collectives = pl.DataFrame(rows, names, orient="row").with_columns(
        device_start_ns=pl.lit(None, pl.Int64), group_size=pl.lit(4, pl.UInt32)
    )
    return pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"), collectives


def test_a_rank_with_popular_experts_costs_what_the_mean_would_spare():
    """Rank 2 receives 13 MB, the others 1: at 4 MB each, 18 of its 26 ms would go."""
    (finding,) = expert_imbalance.detect(*tables(lambda _: [1, 1, 13, 1]))
    assert (finding.ranks, finding.groups) == ((2,), ("ep",))
    assert finding.gain_fraction == pytest.approx(18 / (2 + 10 + 26), rel=1e-6)
    assert finding.lost_ns_per_step == pytest.approx(18 * MS, rel=1e-6)
    assert "rank 2 always receives 3.2 × the mean" in finding.title
    assert finding.evidence[0].note == "received 13,000,000 bytes"


def test_what_another_group_takes_anyway_is_no_loss():
    """Its group's longest would go from 36 to 18 ms, but the other group takes 30: 6 are lost."""
    popular, usual = tables(lambda _: [1, 1, 13, 1]), tables(lambda _: [4, 4, 4, 4], usual_ms=22)
    others = [frame.with_columns(pl.col("rank") + 4) for frame in usual]
    others[1] = others[1].with_columns(group=pl.lit("ep1"))
    (finding,) = expert_imbalance.detect(*(pl.concat(both) for both in zip(popular, others, strict=True)))
    assert (finding.ranks, finding.groups) == ((2,), ("ep",))
    assert finding.lost_ns_per_step == pytest.approx(6 * MS, rel=1e-6)


def test_where_now_one_now_another_receives_more_all_ranks_are_named():
    (finding,) = expert_imbalance.detect(*tables(lambda step: np.roll([1, 1, 13, 1], step)))
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.lost_ns_per_step == pytest.approx(18 * MS, rel=1e-6)
    assert "now one rank, now another receives 3.2 × the mean" in finding.title


def test_what_follows_the_last_all_to_all_counts_until_the_next_collective():
    """Without the one back: 18 of 26 ms are lost before a reduction instead."""
    breakdown, collectives = tables(lambda _: [1, 1, 13, 1])
    is_back = pl.col("seq") % 2 == 1
    op = pl.when(is_back).then(pl.lit("allreduce")).otherwise("op")
    received = pl.when(~is_back).then("received_bytes")
    (finding,) = expert_imbalance.detect(breakdown, collectives.with_columns(op=op, received_bytes=received))
    assert finding.ranks == (2,)
    assert finding.lost_ns_per_step == pytest.approx(18 * MS, rel=1e-6)


@pytest.mark.parametrize(
    "job",
    [
        tables(lambda _: [4, 4, 4, 4], scatter_ms=3),
        tables(lambda step: 4 + 0.2 * np.sin(np.arange(4) + step)),
        tables(lambda _: [1, 1, 13, 1], ns_per_byte=0.02),
        tables(lambda _: [1, 1, 13, 1], ns_per_byte=0, scatter_ms=5),
    ],
    ids=["even", "nearly even", "costs nothing", "unrelated"],
)
def test_even_experts_and_bytes_that_cost_nothing_are_silent(job):
    assert expert_imbalance.detect(*job) == []


def test_without_bytes_received_nothing_is_judged():
    breakdown, collectives = tables(lambda _: [4] * 4)
    with pytest.raises(NotResolvable, match="no all-to-all was recorded"):
        expert_imbalance.detect(breakdown, collectives.with_columns(received_bytes=pl.lit(None, pl.Int64)))


def test_an_operation_that_one_rank_lacks_is_left_out():
    breakdown, collectives = tables(lambda _: [1, 1, 13, 1])
    lacks = (pl.col("rank") == 3) & (pl.col("step") == 5)
    (finding,) = expert_imbalance.detect(breakdown, collectives.filter(~lacks))
    assert finding.lost_ns_per_step == pytest.approx(18 * MS * 19 / 20, rel=1e-6)


def test_experts_of_ranks_that_were_not_recorded_are_not_called_even():
    breakdown, collectives = tables(lambda _: [1, 1, 13, 1])
    for seen in ([2], [0, 1, 3]):
        with pytest.raises(NotResolvable, match="not recorded on all ranks"):
            expert_imbalance.detect(breakdown, collectives.filter(pl.col("rank").is_in(seen)))


@pytest.mark.parametrize("seed", [1, 3, 5, 7])
def test_simulated_experts_are_the_one_cause_of_slow_ranks(seed, tmp_path):
    log, (truth,) = simulated(Case("expert_imbalance", "quiet", seed), small=True)
    report = rankscope.diagnose(rankscope.open(write(log, tmp_path / "run")))
    (root,) = [finding for finding in report.findings if finding.caused_by is None]
    assert root.detector == "expert_imbalance"
    assert not truth.ranks or root.ranks == truth.ranks
    assert root.lost_ns_per_step == pytest.approx(truth.cost_ns, rel=0.25)


def test_a_slow_rank_among_even_experts_stays_a_slow_rank(tmp_path):
    job = Job(parallel="moe", ranks=8, steps=20, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness = can.slowness * np.where(np.arange(8) == 3, 1.4, 1.0)
    (finding,) = rankscope.diagnose(rankscope.open(write(run(job, can), tmp_path / "run"))).findings
    assert (finding.detector, finding.ranks) == ("slow_rank", (3,))


def capture(folder, *, steps=3, sized=True, **longer):
    """Four ranks; a step is four times attention of 2 ms and experts of 3 ms, then a reduction and the optimizer, 1 ms.

    An all-to-all of 0.1 ms takes tokens to the experts, another one back. `longer`: ms that rank 2 takes longer.
    """
    to_all = kineto.meta("all_to_allv", elements=1 << 20, ranks="[0, 1, 2, 3]")
    if not sized:
        del to_all["In msg nelems"], to_all["Out msg nelems"]
    reduction = kineto.meta(ranks="[0, 1, 2, 3]")
    layer = [("attention", 2, "SendRecv", to_all), ("experts", 3, "SendRecv", to_all)]
    work = [*layer * 4, ("last", 0.1, "AllReduce", reduction), ("optimizer", 1, "", {})]
    files, at = {rank: [] for rank in range(4)}, 1_000
    for number in range(steps):
        begin = at
        for n, (name, ms, collective, words) in enumerate(work, 100 * (number + 1)):
            slowest = at + 1000 * (ms + longer.get(name, 0))
            for rank, events in files.items():
                own = 1000 * (ms + longer.get(name, 0) * (rank == 2))
                events += [kineto.launch(begin, 1, 2 * n), kineto.kernel(name, at, own, 2 * n, device=rank)]
                if collective:
                    seen = {"device": rank, "stream": 20, **words, "Seq": n}
                    took = slowest + 100 - at - own
                    events += [
                        kineto.launch(begin, 1, 2 * n + 1),
                        kineto.kernel(f"ncclDevKernel_{collective}", at + own, took, 2 * n + 1, **seen),
                    ]
            at = slowest + 100 * bool(collective)
        for events in files.values():
            events.append(kineto.step(number, begin, at - begin))
    for rank, events in files.items():
        kineto.write(folder / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 4})
    return folder


@pytest.mark.parametrize(("steps", "sized"), [(3, True), (3, False), (1, False)])
def test_a_rank_that_is_slow_between_all_to_alls_only_has_popular_experts(steps, sized, tmp_path):
    """3 ms longer for each of four layers, of which the bytes, padded or not recorded, show nothing."""
    report = rankscope.diagnose(rankscope.open(capture(tmp_path, experts=3, steps=steps, sized=sized)))
    found = [(one.detector, one.ranks, one.caused_by) for one in report.findings]
    assert found == [("expert_imbalance", (2,), None), ("slow_rank", (2,), "expert_imbalance")]
    root = report.findings[0]
    assert root.title.startswith("Rank 2 computes 12.0 ms longer per step than its peers, but only between all-to-alls")
    assert root.lost_ns_per_step == pytest.approx(12 * MS, rel=0.02)
    assert root.evidence[0].note == "longest: 6.00 ms"


@pytest.mark.parametrize(
    "longer",
    [
        {"attention": 1, "experts": 1.5, "last": 0.05, "optimizer": 0.5},
        {"attention": 3},
        {"attention": 0.5, "experts": 1.5},
    ],
    ids=["all that it computes", "what its data need", "experts, and attention by less"],
)
def test_a_rank_that_is_slow_elsewhere_too_stays_a_slow_rank(longer, tmp_path):
    report = rankscope.diagnose(rankscope.open(capture(tmp_path, **longer)))
    assert [(one.detector, one.ranks) for one in report.findings] == [("slow_rank", (2,))]


@pytest.mark.alone
@pytest.mark.real_job
def test_a_real_job_with_uneven_splits(tmp_path):
    """Three ranks of 120 tokens, of which rank 2's expert gets 240 of 360: 60 ms more than the mean."""
    job = [SCRIPTS / "experts.py", "--popular"]
    command = [Path(sys.executable).with_name("rankscope"), "run", "--out", tmp_path / "run", "--standalone"]
    subprocess.run([*command, "--nproc-per-node", "3", *job], cwd=tmp_path, check=True, timeout=150)
    report = rankscope.diagnose(rankscope.open(tmp_path / "run"))
    assert [(f.detector, f.ranks) for f in report.findings if f.caused_by is None] == [("expert_imbalance", (2,))]
    assert report.findings[0].lost_ns_per_step == pytest.approx(60 * MS, rel=0.2)
