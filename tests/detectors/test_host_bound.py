"""A device that is idle because its host is late: how much, where, and what the host did instead."""

from __future__ import annotations

import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import host_bound
from rankscope.analysis.model.kernels import WAITING_CALLS
from rankscope.analysis.text.units import duration
from rankscope.errors import NotResolvable
from support.paths import DATA

MS = 1_000_000
STEPS = 10
KINETO = DATA / "kineto"


def tables(host_ms, *calls, step_ms=100, in_turn=False, only=range(STEPS), is_calling=True):
    """Steps of 100 ms that end with an idle device, `host_ms` by rank; `calls`: (name, start, end) in each.

    `in_turn`: in each step one rank only, the next one, for which the others wait. Devices idle in the steps `only`,
    in which their hosts call on (`is_calling`).
    """
    parts, phases, kernels, launches = [], [], [], []
    for rank, ms in enumerate(host_ms):
        for step in range(STEPS):
            idle_ms = ms if step in only else 0
            times = (step * step_ms, (step + 1) * step_ms - idle_ms, (step + 1) * step_ms)
            begin, dry, end = (round(x * MS) for x in times)
            part = "wait" if in_turn and step % len(host_ms) != rank else "host"
            parts += [(rank, step, "compute", dry - begin), (rank, step, part, end - dry)]
            phases += [(rank, step, "compute", "forward", begin, dry), (rank, step, part, "aten::loss", dry, end)]
            kernels.append((rank, begin, dry, begin, "compute"))
            kernels += [(rank, dry, end, begin, "communication")] * (part == "wait")
            launches += [
                (rank, round((step * step_ms + first) * MS), round((step * step_ms + last) * MS), name)
                for name, first, last in calls
            ]
            launches += [(rank, ns, ns + 1, "cudaEventQuery") for ns in range(begin, end, 2 * MS) if is_calling]
    span = {"start_ns": pl.Int64, "end_ns": pl.Int64}
    return (
        pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(phases, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row"),
        pl.DataFrame(kernels, ["rank", "start_ns", "end_ns", "launch_ns", "work"], orient="row").with_columns(
            launch_thread=0
        ),
        pl.DataFrame(launches, {"rank": pl.Int64, **span, "name": pl.String}, orient="row").with_columns(
            thread=0, waits=pl.col("name").str.contains(WAITING_CALLS)
        ),
    )


def test_device_idle_for_a_fifth_of_the_step_is_a_finding_with_its_place():
    (finding,) = host_bound.detect(*tables([20, 20, 22, 20]))
    assert (finding.ranks, finding.where, finding.lost_ns_per_step) == ((0, 1, 2, 3), "aten::loss", 20 * MS)
    assert finding.lost_fraction == pytest.approx(0.2)
    assert "Of this time 100 % are Python" in finding.advice


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        # 16 of the 20 ms in two calls that overlap, one of which began earlier
        ([("cudaMalloc", 70, 90), ("cudaFree", 85, 96)], "Of this time 80.0 % ask the driver for memory"),
        ([("cudaStreamSynchronize", 10, 81)], "Of this time 100 % come after the host waited for the device"),
        ([("cudaStreamSynchronize", 85, 86)], "Of this time 100 % are Python"),
        ([("cudaLaunchKernel", 84, 94)], "Of this time 50.0 % are launch calls"),
    ],
    ids=["memory", "drained by a synchronisation", "a synchronisation of nothing", "launching"],
)
def test_it_says_what_the_host_did_meanwhile(calls, said):
    (finding,) = host_bound.detect(*tables([20, 20], *calls))
    assert said in finding.advice


def beside_communication(over_ms):
    """Steps of 100 ms: a collective from 40 until `over_ms`, nothing computes from 50 until the late kernel at 80."""
    phases, kernels = [], []
    for rank, step in ((rank, step) for rank in range(2) for step in range(STEPS)):
        begin, sent, dry, alone, late, end = ((step * 100 + x) * MS for x in (0, 40, 50, min(over_ms, 80), 80, 100))
        phases += [(rank, step, "compute", "forward", begin, dry), (rank, step, "transfer", "allreduce", dry, alone)]
        phases += [(rank, step, "host", "aten::loss", alone, late), (rank, step, "compute", "backward", late, end)]
        kernels += [(rank, begin, dry, begin, "compute"), (rank, late, end, late, "compute")]
        kernels += [(rank, sent, (step * 100 + over_ms) * MS, sent, "communication")]
    table = pl.DataFrame(phases, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row")
    return (
        table.group_by("rank", "step", "part").agg(ns=(pl.col("end_ns") - pl.col("start_ns")).sum()),
        table.filter(pl.col("end_ns") > pl.col("start_ns")),
        pl.DataFrame(kernels, ["rank", "start_ns", "end_ns", "launch_ns", "work"], orient="row").with_columns(
            launch_thread=0
        ),
        pl.DataFrame(
            schema=dict.fromkeys(("rank", "start_ns", "end_ns", "thread"), pl.Int64)
            | {"name": pl.String, "waits": pl.Boolean}
        ),
    )


def test_a_collective_that_still_runs_when_late_work_begins_does_not_hide_the_host():
    """Between 50 and 80 nothing computes. Work that began before the collective was over did not wait for it: 30 ms."""
    (finding,) = host_bound.detect(*beside_communication(over_ms=90))
    assert (finding.ranks, finding.lost_ns_per_step) == ((0, 1), 30 * MS)
    assert "the device is idle or only communicates for 30.0 ms per step" in finding.title  # its row of idle time is 0
    (finding,) = host_bound.detect(*beside_communication(over_ms=75))  # what came next may have waited until 75
    assert finding.lost_ns_per_step == 5 * MS
    assert "the device is idle for 5.00 ms per step" in finding.title


@pytest.mark.parametrize("host_ms", [[2.9] * 4, [300, 5, 5, 5], [0] * 4], ids=["below 3 %", "one rank only", "none"])
def test_healthy_or_one_ranks_own_is_silent(host_ms):
    assert host_bound.detect(*tables(host_ms, step_ms=400 if max(host_ms) > 100 else 100)) == []


def test_hosts_that_are_late_in_turn_cost_the_job_each_time():
    """Each of 10 devices idles 2 ms per step, and the job waits for one in each: fixing one host saves a tenth."""
    (finding,) = host_bound.detect(*tables([20] * 10, in_turn=True))
    assert (len(finding.ranks), finding.lost_ns_per_step, finding.fix) == (10, 20 * MS, "host")
    assert "the device is idle for 2.00 ms per step" in finding.title


@pytest.mark.parametrize(
    ("host_ms", "only", "ranks"),
    [
        ([150] * 4, (3, 7), (0, 1, 2, 3)),
        ([150] * 4, (0,), None),  # the first step of a capture is often longer
        ([150, 0, 0, 0], (3,), None),  # the others wait for one rank
    ],
    ids=["all", "the first step", "one rank"],
)
def test_stalls_of_several_hosts_in_few_steps_are_likely_and_name_them(host_ms, only, ranks):
    """In two of 10 steps of 400 ms all devices idle for 150 ms: the mean step is 30 ms longer."""
    found = host_bound.detect(*tables(host_ms, ("cudaLaunchKernel", 0, 1), step_ms=400, only=only, is_calling=False))
    assert [(finding.ranks, finding.steps) for finding in found] == ([(ranks, only)] if ranks else [])
    for finding in found:
        assert (finding.lost_ns_per_step, finding.confidence) == (30 * MS, "likely")
        assert finding.title.startswith("Hosts stall in steps 3,7: the devices of ranks 0-3 are idle for up to 150 ms")
        assert "100 % are stalls of 5 ms or more in which the host launches nothing" in finding.advice


def test_trace_without_launches_is_not_judged():
    breakdown, phases, kernels, launches = tables([20, 20])
    unlaunched = kernels.with_columns(launch_ns=pl.lit(None, pl.Int64))
    with pytest.raises(NotResolvable, match="launched"):
        host_bound.detect(breakdown, phases, unlaunched, launches)


@pytest.mark.needs_data
def test_small_model_on_two_gpus_is_bound_by_its_host():
    """ResNet-18 on tiny images: the device works 0.4 of 43 ms per step."""
    report = rankscope.diagnose(rankscope.open(KINETO / "torchrec/resnet18"))
    (finding,) = [f for f in report.findings if f.detector == "host_bound"]
    assert finding.ranks == (0, 1)
    assert finding.lost_fraction > 0.9


@pytest.mark.needs_data
def test_of_several_ranks_the_title_has_the_longest_idle_time_that_the_table_has():
    report = rankscope.diagnose(rankscope.open(KINETO / "torchrec/resnet18"))
    (finding,) = [f for f in report.findings if f.detector == "host_bound"]
    idle = [part.ns_per_step for part in report.breakdown if part.part == "host"]
    assert f"the device is idle for up to {duration(max(idle))} per step" in finding.title
