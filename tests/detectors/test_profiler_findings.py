"""Verdicts on profilers' traces of real jobs whose truth is known, and silence on all the others."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.readers import kineto
from rankscope.analysis.runs.trace import Trace
from support.paths import DATA

KINETO = DATA / "kineto"
MS = 1_000_000
HOST_SIDE = ("host_bound", "host_sync")  # hosts too slow for their devices: true of many traces, no fault of a rank

pytestmark = pytest.mark.needs_data


@functools.cache
def report(name):
    return diagnose(Trace.open(DATA / name))


def parts(of):
    """rank -> part -> ns per step, without zeros."""
    found = {}
    for part in of.breakdown:
        if part.ns_per_step:
            found.setdefault(part.rank, {})[part.part] = part.ns_per_step
    return found


def only_root(name):
    """The one finding that names a rank and follows from no other, unless from hosts that are slow alike."""
    roots = [finding for finding in report(name).findings if finding.caused_by in (None, *HOST_SIDE)]
    (root,) = [finding for finding in roots if finding.detector not in HOST_SIDE]
    return root


def test_a_rank_that_sleeps_a_second_is_the_one_root_and_the_region_is_named():
    """Rank 2 sleeps 1,001 ms in each step; the others' waiting is no finding of its own."""
    found = only_root("kineto/torchrec/sst_long_a2a_optimizer")
    assert report("kineto/torchrec/sst_long_a2a_optimizer").findings == (found,)
    assert (found.detector, found.ranks, found.severity) == ("slow_rank", (2,), "high")
    assert found.lost_ns_per_step == pytest.approx(1_001 * MS, rel=0.02)
    assert found.where == "# running sparse arch"
    of_rank = parts(report("kineto/torchrec/sst_long_a2a_optimizer"))
    assert of_rank[2]["host"] > 1_000 * MS > of_rank[2].get("wait", 0)
    assert all(990 * MS < of_rank[rank]["wait"] < 1_005 * MS for rank in (0, 1, 3))


def test_a_rank_that_sleeps_20_ms_costs_what_its_device_then_lacks():
    """Rank 2 sleeps 20 ms in forward, where its launch queue drains, and 20 ms in backward, where work is queued."""
    found = only_root("kineto/torchrec/sst_long_a2a_optimizer_5")
    assert (found.detector, found.ranks) == ("slow_rank", (2,))
    assert found.lost_ns_per_step == pytest.approx(20 * MS, rel=0.2)
    assert "_AlltoAllSingleBackward" in found.where
    assert found.where.startswith("# running sparse arch")


@pytest.mark.parametrize(
    ("name", "rank", "level", "share"),
    [
        ("kineto/nanogpt-normuon", 1, "likely", 0.148),
        ("kineto/torchrec/sst_long_a2a_optimizer", 2, "confirmed", 0.913),
        ("kineto/torchrec/sst_long_a2a_optimizer_2.run1", 2, "confirmed", 0.831),
        ("kineto/torchrec/sst_long_a2a_optimizer_3", 2, "likely", 0.093),
        ("kineto/torchrec/sst_long_a2a_optimizer_5", 2, "likely", 0.069),
        ("kineto/torchrec/resnet18", 1, "likely", 0.055),
        ("kineto/param-dlrm8/dlrm_kineto.tar.gz", 7, "likely", 0.088),
    ],
)
def test_the_straggler_of_a_few_steps_is_named_with_its_level_and_costs_no_more_than_others_wait(
    name, rank, level, share
):
    of = report(name)
    (found,) = [finding for finding in of.findings if finding.detector == "slow_rank"]
    assert (found.ranks, found.confidence) == ((rank,), level)
    assert found.lost_fraction == pytest.approx(share, abs=0.01)
    others = [part.ns_per_step for part in of.breakdown if part.part == "wait" and part.rank != rank]
    assert found.lost_ns_per_step <= min(others)
    assert of.status == "red"


@pytest.mark.parametrize("name", ["sst_long_a2a_optimizer", "sst_long_a2a_optimizer_2.run1"])
def test_of_some_ranks_of_an_old_trace_the_late_one_is_named_and_none_if_it_is_missing(name):
    """Rank 2 of 4 sleeps 1,001 ms in each step. The files name no groups, and not what their operations do."""
    of_rank = sorted((KINETO / "torchrec" / name).glob("*.pt.trace.json.gz"))
    for seen in ((1, 2), (0, 2, 3)):
        (found,) = [f for f in diagnose(Trace.open([of_rank[r] for r in seen])).findings if f.detector == "slow_rank"]
        assert (found.ranks, found.confidence) == ((2,), "likely")
        assert found.lost_ns_per_step == pytest.approx(1_001 * MS, rel=0.02)
    without = diagnose(Trace.open([of_rank[r] for r in (0, 1, 3)]))
    assert "slow_rank" not in {finding.detector for finding in without.findings}


def test_a_host_that_stalls_on_one_rank_only_is_no_host_bound_job():
    """Rank 2 sleeps a second: without it hosts idle their devices for 6 % of the step, which is no part of that."""
    of = report("kineto/torchrec/sst_long_a2a_optimizer_2.run1")
    assert of.findings[0].ranks == (2,)
    assert all(finding.lost_fraction < 0.1 for finding in of.findings[1:])
    assert all(2 not in finding.ranks for finding in of.findings if finding.detector == "host_bound")


def test_what_hosts_cost_without_the_straggler_is_no_finding_where_it_may_be_chance():
    """Rank 2 sleeps 20 ms per step. Without it the devices idle 28 ms per step for their hosts, give or take 30; 8 of
    them follow waits for the device in each step."""
    found = report("kineto/torchrec/sst_long_a2a_optimizer_3").findings
    assert [(one.detector, one.ranks) for one in found] == [("slow_rank", (2,)), ("host_sync", (0, 1, 2, 3))]


def test_one_rank_bound_by_its_loader_is_found_as_published():
    """PyTorch's TensorBoard plugin publishes: mean step 177,592 µs, kernels 98,589, DataLoader 59,262 (33.4 %)."""
    of = report("kineto/tb-plugin-workers0")
    found = only_root("kineto/tb-plugin-workers0")
    assert (found.detector, found.ranks) == ("input_stall", (0,))
    assert found.lost_fraction == pytest.approx(0.334, abs=0.005)
    split = parts(of)[0]
    assert (split["compute"] // 1000, split["input"] // 1000) == (98_588, 59_261)
    assert sum(split.values()) == pytest.approx(177_592_000, abs=1_000)


def test_the_command_line_shows_the_exposed_communication_of_one_rank_of_eight():
    """The hook moved reduce-scatter into backward: 17.19 ms exposed before, 15.73 ms after."""
    exposed = {}
    for variant in ("current", "hook"):
        file = KINETO / f"nanogpt-adamsync/modded-nanogpt-{variant}-gpu-rank-00-chrome-trace.json.gz"
        command = [sys.executable, "-m", "rankscope", "report", file, "--json", "-"]
        got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
        exposed[variant] = got["device"][0]["exposed_ns"]
        assert got["findings"] == []
        assert "ranks 1-7 of 8 were not recorded" in got["verdict"]
        steps = {part["part"]: part["ns_per_step"] for part in got["breakdown"]}
        assert steps["unsplit"] * got["steps"]["count"] < exposed[variant]  # the capture is longer than its steps
    assert exposed == {"current": 17_193_351, "hook": 15_732_820}


def test_copies_of_8_bytes_for_which_hosts_wait_are_found_in_an_export_of_nsight():
    """17 and 16 times in 300 ms hosts wait 8 to 13 ms in `cudaStreamSynchronize` for 8 bytes to be on the device."""
    of = report("nsys/mfu_2gpu_before.sqlite")
    found = of.findings[0]
    assert (found.detector, found.ranks, found.where) == ("host_sync", (0, 1), "aten::copy_, cudaStreamSynchronize")
    assert "16.5 times per step" in found.title
    assert {finding.caused_by for finding in of.findings[1:]} == {"host_sync"}
    assert [(group.op, group.kind) for group in of.groups] == [("alltoall", "exchange")]


def test_two_gpus_of_one_export_that_wait_for_each_other_are_compared_and_chance_is_excluded():
    """Of 33 exchanges between two GPUs, GPU 1 begins 22 last; it waits 2.5 ms for GPU 0, and GPU 0 10.9 ms for it.

    Where both are alike, chance shows as much in one of ten captures.
    """
    of = report("nsys/mfu_2gpu_before.sqlite")
    assert {wait.rank: round(wait.waited_ns / MS, 1) for wait in of.waits} == {0: 10.9, 1: 2.5}
    wait = next(loss for loss in of.losses if loss.kind == "wait")
    assert (wait.least_rank, wait.most_rank) == (1, 0)
    assert "slow_rank" not in {finding.detector for finding in of.findings}


KNOWN = ("torchrec", "param-dlrm8", "tb-plugin-workers0", "mfu_2gpu_before.sqlite")
OTHERS = [
    path.relative_to(DATA)
    for path in sorted([*KINETO.glob("**/*.json*"), *DATA.glob("nsys/*.sqlite")])
    if not any(name in path.parts for name in KNOWN) and (path.suffix == ".sqlite" or kineto.recognises(path))
]


@pytest.mark.parametrize("name", OTHERS, ids=lambda name: name.name)
def test_no_other_real_trace_has_a_fault_or_a_clean_bill_of_what_it_cannot_show(name):
    of = report(name)
    of_all = (
        *HOST_SIDE,
        "exposed_communication",
    )  # that much of the step is communication is a fault of no rank either
    assert [f.title for f in of.findings if f.detector not in of_all] == []
    assert not {healthy.detector for healthy in of.healthy} & {"gc_stall", "recompile", "slow_rank", "load_imbalance"}
    assert not any("do not cover" in gap.why for gap in of.gaps)
    for rank, split in parts(of).items():
        mean_ns = sum(of.step_ns[rank]) / len(of.step_ns[rank])
        assert sum(split.values()) == pytest.approx(mean_ns, abs=1)
    # What ran on a device of which steps are known has been cut.
    assert {part.rank for part in of.device} <= set(parts(of))


@pytest.mark.parametrize(("file", "idle"), [("healthy_1pct", 0.0099), ("healthy_judged_1pct", 0.0094)])
def test_healthy_exports_of_nsight_idle_as_little_as_was_made(file, idle):
    of = report(f"nsys/{file}.sqlite")
    assert of.findings == ()
    split = parts(of)[0]
    assert split["host"] / sum(split.values()) == pytest.approx(idle, abs=0.0001)
    assert "the whole capture is taken as one step" in " ".join(gap.why for gap in of.gaps)
