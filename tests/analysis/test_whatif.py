"""What a step would take with a fix: against runs whose every millisecond is known."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields

import numpy as np
import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.metrics.exposed_operations import surely_saved_ns
from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.metrics.links import LINKS
from rankscope.analysis.model.finding import Fidelity
from rankscope.analysis.replay.graph import replay
from rankscope.analysis.replay.host_graph import fidelity, graph_of, step_lengths
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.collectors.schema import SCHEMA_VERSION
from rankscope.errors import BadFix, NotReplayable
from rankscope.profiler.commands import whatif
from support.command_line import MS, rankscope_
from support.ddp_run import STEPS, record, write
from support.paths import DATA

STUDY = DATA / "ops" / "bytedance-st"


def run_of(folder):
    return rerun(build_timeline(Trace.open(folder)), LINKS.to_frame())


def step_ms(gain):
    return pytest.approx(gain.step_ns / MS, abs=1e-6)


# ---- the replay is the run


def test_replay_of_a_run_as_it_was_meets_every_step(tmp_path):
    """Ranks take turns at being late, the transfer varies, and compute overlaps some of it."""
    before = {0: [40, 60, 50], 1: [55, 45], 2: 50}
    host = graph_of(
        build_timeline(Trace.open(record(tmp_path, before, {0: 20, 1: [0, 5], 2: 0}, transfer=[10, 14, 12])))
    )
    lengths = step_lengths(host, replay(host.graph, host.graph.duration_ns))
    assert lengths.tolist() == host.steps["measured_ns"].to_list()
    assert (host.matched, host.unmatched) == (STEPS, 0)


def test_operation_that_a_rank_did_not_record_keeps_its_length_and_is_counted(tmp_path):
    host = graph_of(build_timeline(Trace.open(record(tmp_path, {0: 40, 1: 60}, forgets=5))))
    lengths = step_lengths(host, replay(host.graph, host.graph.duration_ns))
    assert lengths.tolist() == host.steps["measured_ns"].to_list()
    assert (host.matched, host.unmatched) == (STEPS - 1, 1)


@pytest.mark.skipif(
    importlib.util.find_spec("rankscope.analysis.replay._replay") is None, reason="it was built without a C compiler"
)
def test_graph_of_the_compiled_loops_and_of_their_python_twins_agree(tmp_path, monkeypatch):
    """Also where an operation has no partner, and a rank is blocked when it calls the next one."""
    timeline = build_timeline(
        Trace.open(record(tmp_path, {0: [40, 60, 50], 1: [55, 45]}, {0: 20, 1: [0, 5]}, transfer=[10, 14], forgets=5))
    )
    fast = graph_of(timeline)
    for of in ("graph", "chains"):
        monkeypatch.setattr(f"rankscope.analysis.replay.{of}._replay", None)
    slow = graph_of(timeline)
    for column in (field.name for field in fields(fast.graph)):
        one, other = (getattr(host.graph, column) for host in (fast, slow))
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, column
    assert fast.cycle.tolist() == slow.cycle.tolist()
    assert fast.steps.equals(slow.steps)


def test_fidelity_is_of_steps_that_nothing_was_fitted_to(tmp_path):
    """Transfers of 10 ms in even and 18 ms in odd steps: each half is replayed with the other's, 8 ms off."""
    host = graph_of(build_timeline(Trace.open(record(tmp_path, {0: 60, 1: 60}, transfer=[10, 18]))))
    found = fidelity(host)
    assert found.median_error == pytest.approx((8 / 80 + 8 / 88) / 2)
    assert found.mean_error == pytest.approx(0)
    steady = graph_of(build_timeline(Trace.open(record(tmp_path / "steady", {0: [60, 90], 1: 60}))))
    assert fidelity(steady).p90_error == 0


def test_nothing_is_predicted_where_the_replay_misses_the_steps(tmp_path):
    with pytest.raises(NotReplayable, match=r"a replay misses the steps by 9\.5 %, more than 5\.0 %"):
        run_of(record(tmp_path, {0: 60, 1: 60}, transfer=[10, 18]))


@pytest.mark.parametrize(("after", "saved"), [(0, 10), ({0: 0, 1: 4}, 6), ({0: 40, 1: 4}, 0)])
def test_what_transfers_cost_at_least_is_known_without_a_replay(tmp_path, after, saved):
    """Of 10 ms rank 1 hides 4 ms, of which 6 are left; then rank 0 hides all of it, and all wait for it."""
    timeline = build_timeline(Trace.open(record(tmp_path, {0: 50, 1: 60}, after)))
    judged = [in_judged_steps(of, timeline.steps) for of in (timeline.collectives, timeline.phases)]
    assert surely_saved_ns(*judged, "allreduce") == saved * MS
    run = rerun(timeline, LINKS.to_frame())
    assert run.gain("op:allreduce=0").gain_ns == pytest.approx(saved * MS)


# ---- fixes


def test_fixed_rank_takes_what_its_peers_take(tmp_path):
    """Rank 1 needs 70 ms where the others need 40: without that, steps of 60 instead of 90 ms."""
    run = run_of(record(tmp_path, {0: 40, 1: 70, 2: 40}))
    assert run.step_ns == 90 * MS
    assert step_ms(run.gain("rank:1")) == 60
    assert step_ms(run.gain("rank:0")) == 90


def test_gain_ends_at_the_next_slowest_and_fixes_add_up(tmp_path):
    run = run_of(record(tmp_path, {0: 40, 1: 90, 2: 60, 3: 40, 4: 40}))
    assert [step_ms(run.gain(*fixes)) for fixes in (("rank:1",), ("rank:2",), ("rank:1", "rank:2"))] == [80, 110, 60]


def test_fixed_node_takes_what_the_other_nodes_take(tmp_path):
    """Both ranks of node 1 need 70 ms; fixing one of them saves nothing."""
    run = run_of(record(tmp_path, {0: 40, 1: 40, 2: 70, 3: 70}, ranks_per_node=2))
    assert [step_ms(run.gain(fix)) for fix in ("rank:2", "node:1")] == [90, 60]


def test_nothing_is_predicted_across_nodes_whose_clocks_are_too_uncertain(tmp_path):
    folder = record(tmp_path, {0: 40, 1: 70}, ranks_per_node=1)
    for part in (folder / "clocks").rglob("*.arrow"):
        part.unlink()
    with pytest.raises(NotReplayable, match="clocks"):
        run_of(folder)


def test_fixed_rank_takes_what_its_peers_take_between_the_same_operations(tmp_path):
    """Of two spans of forward rank 1 needs 30 ms more in the second one only; in the first no rank waits."""
    (tmp_path / "run").mkdir(parents=True)
    said = {"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}}
    (tmp_path / "run/node=00000.json").write_text(json.dumps(said))
    for rank, second in ((0, 20), (1, 50)):
        rows = []
        for step in range(STEPS):
            begin = 120 * step
            rows += [("forward", begin, begin + 110), ("optimizer", begin + 110, begin + 120)]
            calls = ((begin + 40, begin + 50), (begin + 50 + second, begin + 110))
            rows += [(2 * step + i, *call) for i, call in enumerate(calls)] + [("wait", *call) for call in calls]
        write(tmp_path, rank, rows, world_size=2, node=0, is_async=False)
    run = run_of(tmp_path)
    assert (run.step_ns, step_ms(run.gain("rank:1"))) == (120 * MS, 90)
    assert step_ms(run.gain("balance")) == 105


def test_balanced_ranks_all_take_the_mean(tmp_path):
    assert step_ms(run_of(record(tmp_path, {0: 40, 1: 70})).gain("balance")) == 75


def test_faster_operation_gains_what_was_not_hidden(tmp_path):
    """The transfer of 40 ms lies under 25 ms of compute: 15 ms show."""
    run = run_of(record(tmp_path, {0: 40, 1: 40}, 25, transfer=40))
    assert [step_ms(run.gain(f"op:allreduce={share}")) for share in (1, 0.5, 0)] == [90, 75, 75]


def test_operation_that_was_hidden_shows_when_compute_shrinks(tmp_path):
    """Rank 1 computes 50 ms after its call and hides the 30 ms that the operation takes. Fixed, it has to wait."""
    run = run_of(record(tmp_path, {0: 20, 1: 20}, {0: 10, 1: 50}, transfer=30))
    assert (run.step_ns, step_ms(run.gain("rank:1"))) == (80 * MS, 60)


def test_collection_on_the_slowest_rank_is_gained_and_on_another_is_not(tmp_path):
    """30 of rank 1's 70 ms are garbage collection, and 20 of rank 0's 40, which no rank waits for."""
    run = run_of(record(tmp_path, {0: 40, 1: 70}, gc={0: 20, 1: 30}))
    assert step_ms(run.gain("gc")) == 60


def test_end_that_was_written_down_when_the_collection_was_over_holds_up_no_other_operation(tmp_path):
    """Rank 1 collects for 90 ms after each step, and only then says that the step's operation is over."""
    run = run_of(record(tmp_path, {0: 40, 1: 130}, gc={1: 90}, late={1: 101}))
    assert step_ms(run.gain("gc")) == 60


def test_operations_that_ran_at_once_both_wait_for_the_last_rank(tmp_path):
    """Rank 1 calls 30 ms after rank 0. The second operation is over on rank 0 before the first one is on rank 1."""
    ranks = ([], [])
    for step in range(STEPS):
        begin = 100 * step
        for rank, (rows, ends) in enumerate(zip(ranks, ((87, 84), (86, 87)), strict=True)):
            call = begin + 40 + 30 * rank
            rows += [("forward", begin, call), ("backward", call, begin + 87), ("optimizer", begin + 87, begin + 100)]
            rows += [(2 * step + i, call + i, begin + end) for i, end in enumerate(ends)]
            rows.append(("wait", call + 2, begin + 87))
    (tmp_path / "run").mkdir(parents=True)
    said = {"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}}
    (tmp_path / "run/node=00000.json").write_text(json.dumps(said))
    for rank, rows in enumerate(ranks):
        write(tmp_path, rank, rows, world_size=2, node=0)
    run = run_of(tmp_path)
    assert (run.step_ns, step_ms(run.gain("rank:1"))) == (100 * MS, 70)


def test_fix_that_a_run_does_not_allow_is_answered_with_those_it_does(tmp_path):
    run = run_of(record(tmp_path, {0: 40, 1: 70}))
    reasons = {
        "rank:7": "it has no such rank beside others that do the same",
        "gc": "no time is lost to it",
        "op:allgather=0": "it has no such operation",
        "op:allreduce": "it has no such operation",
        "node:1": "it has no such node beside others that do the same",
        "link:node1": "no traffic between such nodes was recorded",
        "stage:0": "it has no such stage of a pipeline beside others",
        "bucket-mb:50": "no step has two buckets of gradients or more",
        "nonsense": "no run has it",
    }
    for fix, why in reasons.items():
        with pytest.raises(BadFix) as refused:
            run.gain(fix)
        assert str(refused.value) == (
            f"cannot fix '{fix}' in this run: {why}; possible: rank:0 … rank:1, balance, op:allreduce=0"
        )


@pytest.mark.needs_data
def test_pipeline_whose_long_stage_takes_what_the_others_do():
    """Its last stage was made 1.35 × as long, and costs 15.0 % of the step; the same work on even stages saves less."""
    folder = STUDY.parent / "derived-st"
    truth = json.loads((folder / "truth.json").read_text())["sets"]["st-longlast"]
    run = rerun(build_timeline(Trace.open(folder / truth["file"])), LINKS.to_frame())
    assert run.gain("stage:3").gain_ns / 1e9 == pytest.approx(truth["loss_s_per_step"], rel=0.01)
    assert run.gain("balance:stages").gain_ns == pytest.approx(0.56 * run.gain("stage:3").gain_ns, rel=0.02)
    with pytest.raises(BadFix, match="possible: rank:0 … rank:7, balance, stage:0, stage:1, stage:2, stage:3, balance"):
        run.gain("stage:4")


@pytest.mark.needs_data
def test_quick_hosts_do_not_begin_the_first_step_of_a_capture_sooner():
    """Rank 1's device idles 7.6 ms per step for its host. No rank computes or transfers in 10.0 ms of a step (mean)."""
    run = rerun(build_timeline(Trace.open(DATA / "kineto" / "nanogpt-normuon")), LINKS.to_frame())
    gain = run.gain("host")
    assert 7.6 < gain.gain_ns / MS < 10.0
    assert gain.uncertainty_ns / MS < 7.0  # four steps


# ---- through the doors


def test_report_predicts_the_gain_of_its_findings_and_names_the_fix(tmp_path):
    finding, _ = diagnose(Trace.open(record(tmp_path, {0: 40, 1: 70, 2: 40, 3: 50}))).findings
    assert (finding.fix, finding.gain_why) == ("rank:1", None)
    assert finding.gain_fraction == pytest.approx(20 / 90)  # rank 3 needs 50 ms


def test_report_says_why_a_gain_is_not_predicted(tmp_path):
    report = diagnose(Trace.open(record(tmp_path, {0: 40, 1: 70, 2: 40}, transfer=[10, 22])))
    (finding,) = report.findings
    assert (finding.fix, finding.gain_fraction, report.fidelity) == ("rank:1", None, None)
    assert finding.gain_why.startswith("a replay misses the steps by ")


def test_command_prints_each_fix_and_all_together(tmp_path):
    folder = record(tmp_path, {0: 40, 1: 70, 2: 40})
    said = rankscope_("whatif", folder, "--fix", "rank:1", "--fix", "op:allreduce=0")
    assert (said.returncode, said.stderr) == (0, "")
    assert [line.split()[0] for line in said.stdout.splitlines()[-4:]] == [
        "fix",
        "rank:1",
        "op:allreduce=0",
        "together",
    ]
    found = json.loads(rankscope_("whatif", folder, "--fix", "rank:1", "--json").stdout)
    assert (found["step_ns"], found["predictions"][0]["gain_ns"]) == (90 * MS, pytest.approx(30 * MS))
    assert found["fidelity"]["median_error"] == 0


def test_command_refuses_in_one_line(tmp_path):
    bad = rankscope_("whatif", record(tmp_path / "a", {0: 40, 1: 70}), "--fix", "rank:9")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert "possible: rank:0 … rank:1" in bad.stderr
    vague = rankscope_("whatif", record(tmp_path / "b", {0: 60, 1: 60}, transfer=[10, 18]), "--fix", "rank:0")
    assert (vague.returncode, vague.stdout) == (1, "")
    assert vague.stderr.startswith("rankscope: nothing is predicted: a replay misses the steps by ")


# ---- DDP's buckets


def three_buckets(folder, sizes_mib=(4, 16, 16), slower=0, stamped_late=0, is_async=True):
    """Two ranks; buckets that take 2 ms + 1 ms per MiB, ready 20, 40 and 60 ms after backward begins at 40.

    Rank 1's forward takes `slower` ms more; rank 0 writes down that the last bucket has ended `stamped_late` ms late.
    """
    ranks, end = ([], []), 0
    for step in range(STEPS):
        begin, end = end, end + 128 + slower
        for rank, rows in enumerate(ranks):
            forward = 40 + slower * rank
            rows += [
                ("forward", begin, begin + forward),
                ("backward", begin + forward, end - 10),
                ("wait", begin + forward + 61, end - 10),
                ("optimizer", end - 10, end),
            ]
            for number, mib in enumerate(sizes_mib):
                ready = begin + forward + 20 + 20 * number
                late = stamped_late if rank == 0 and number == 2 else 0
                over = begin + slower + 60 + 20 * number + 2 + mib + late
                rows.append((3 * step + number, ready, over, mib << 20))
    (folder / "run").mkdir(parents=True)
    said = {"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}}
    (folder / "run/node=00000.json").write_text(json.dumps(said))
    for rank, rows in enumerate(ranks):
        write(folder, rank, rows, world_size=2, node=0, is_async=is_async)
    return folder


@pytest.mark.parametrize("is_async", [True, None], ids=["asynchronous", "torch before 2.8"])
@pytest.mark.parametrize(
    ("fix", "longer_ms"),
    [
        ("bucket-mb:20", 2),  # 4 and 16 together end at 102, then the last ends at 120 instead of 118
        ("bucket-mb:50", 20),  # all together begin at 100 and take 38
    ],
)
def test_larger_buckets_begin_later_and_save_latency(tmp_path, fix, longer_ms, is_async):
    gain = run_of(three_buckets(tmp_path, is_async=is_async)).gain(fix)
    assert gain.gain_ns / MS == pytest.approx(-longer_ms, abs=1e-6)


def test_smaller_buckets_begin_while_the_rest_of_their_gradients_is_computed(tmp_path):
    """Halves of 10 ms each: of the second bucket ready at 70 and 80, of the third at 90 and 100, so that it ends at 110
    instead of 118. Were all of its gradients ready at its end only, it would end at 120."""
    gain = run_of(three_buckets(tmp_path)).gain("bucket-mb:8")
    assert gain.gain_ns / MS == pytest.approx(8, abs=1e-6)
    assert gain.uncertainty_ns / MS == pytest.approx((8 + 2) / 2, abs=1e-6)


def test_buckets_of_which_one_ends_before_the_one_called_before_it_can_be_cut(tmp_path):
    """The third ends at 103, the second at 112: as gloo moves two at once. The second's parts follow the third too."""
    gain = run_of(three_buckets(tmp_path, (4, 30, 1))).gain("bucket-mb:8")
    assert gain.gain_ns <= 0


@pytest.mark.parametrize(
    ("fix", "saved_ms"),
    [
        ("reshard:off", 10),  # the second gather is spared
        ("prefetch:1", 5),  # it follows the first one and ends at 20, when forward has computed for 5 ms
    ],
)
def test_parameters_that_are_gathered_again_in_backward(tmp_path, fix, saved_ms):
    """Two ranks gather what they compute with next, 10 ms each: at 0 for a forward of 5 ms, at 15 for backward."""
    rows = []
    for step, begin in enumerate(range(0, 100 * STEPS, 100)):
        gathers = (2 * step, begin, begin + 10), (2 * step + 1, begin + 15, begin + 25)
        rows += [*gathers, *(("wait", start, end) for _, start, end in gathers)]
        rows += [("forward", begin, begin + 15), ("backward", begin + 15, begin + 90)]
        rows += [("optimizer", begin + 90, begin + 100)]
    (tmp_path / "run").mkdir()
    said = {"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}}
    (tmp_path / "run/node=00000.json").write_text(json.dumps(said))
    for rank in range(2):
        write(tmp_path, rank, rows, world_size=2, node=0, op="allgather_base")
    assert run_of(tmp_path).gain(fix).gain_ns / MS == pytest.approx(saved_ms, abs=1e-6)


def test_wait_whose_operation_was_stamped_late_still_ends_with_it(tmp_path):
    """Two of three buckets end while rank 0 waits; the third, 3 ms after the wait is over, is what it waited for."""
    gain = run_of(three_buckets(tmp_path, slower=30, stamped_late=3)).gain("rank:1")
    assert gain.gain_ns / MS == pytest.approx(30, abs=1e-6)


def test_a_mean_error_that_rounds_to_nothing_has_no_sign_of_a_loss(capsys):
    whatif._print(1e6, Fidelity(steps=2, median_error=0.0, p90_error=0.0, mean_error=-0.0001), [])
    assert "mean step 0.0 %" in capsys.readouterr().out


def test_buckets_that_cannot_be_replayed_are_refused_with_the_reason(tmp_path):
    with pytest.raises(BadFix, match="no two of the recorded buckets fit into 18 MiB"):
        run_of(three_buckets(tmp_path)).gain("bucket-mb:18")
    with pytest.raises(BadFix, match="about the same size"):
        run_of(three_buckets(tmp_path / "alike", (16, 16, 16))).gain("bucket-mb:50")


def test_bucket_mb_is_an_option_of_its_own(tmp_path):
    run = three_buckets(tmp_path / "run")
    said = json.loads(rankscope_("whatif", run, "--bucket-mb", 50, "--json").stdout)
    assert [prediction["fixes"] for prediction in said["predictions"]] == [["bucket-mb:50"]]
    nothing = rankscope_("whatif", run)
    assert (nothing.returncode, "give --fix" in nothing.stderr) == (2, True)
