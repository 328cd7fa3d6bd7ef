"""Where in the code main threads are: what a real job's samples say, and how trees of calls are read."""

import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from support.paths import SCRIPTS

pytest.importorskip("torch")

import rankscope
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.timeline.code_samples import PLACES, SAMPLES, Code, merged_places, sampled_in
from rankscope.collectors.in_rank.thread_frames import current_frames
from rankscope.collectors.rank import samples
from rankscope.dashboard.figures import flame

RANKSCOPE = [sys.executable, "-m", "rankscope"]
JOB = SCRIPTS / "where_in_the_code.py"


def line_of(text: str) -> int:
    """Of the only line of the job that has it."""
    (number,) = (n for n, line in enumerate(JOB.read_text().splitlines(), 1) if text in line)
    return number


def report(run: Path) -> dict:
    done = subprocess.run([*RANKSCOPE, "report", str(run), "--json", "-"], capture_output=True, timeout=100, check=True)
    return json.loads(done.stdout)


@pytest.mark.alone
@pytest.mark.real_job
def test_report_says_where_in_the_code_a_rank_is_late_and_where_the_step_goes(tmp_path):
    command = [*RANKSCOPE, "run", "--out", "run", "--no-report", "--nproc-per-node", "2", str(JOB), "200"]
    subprocess.run(command, cwd=tmp_path, timeout=100, check=True, capture_output=True)
    shown = report(tmp_path / "run")
    (finding,) = shown["findings"]
    assert (finding["detector"], finding["ranks"]) == ("slow_rank", [1])
    augment = f"where_in_the_code.py:{line_of('time.sleep(AUGMENT_S)')} (augment)"
    place, _, rest = finding["code"].partition(": ")
    assert (place, rest.partition(" on ")[2]) == (augment, "rank 1, 0 ns on the others")
    assert float(rest.split()[0]) == pytest.approx(40, abs=16), "some 60 samples of a step of 62 ms"

    evaluate = f"where_in_the_code.py:{line_of('time.sleep(seconds)')} (evaluate)"
    said = f"; steps excluded as outliers (2) take {{}} % of the time, mostly at {evaluate}"
    fraction = shown["steps"]["outliers_fraction"]
    assert said.format(f"{100 * fraction:.1f}") in shown["verdict"]
    assert fraction == pytest.approx(4 / (200 * 0.0625 + 4), abs=0.02)

    calls = {(call["function"], call["line"]): call for call in shown["code"]}
    main = calls["main", line_of("model(load(rank))")]
    assert (main["depth"], main["fraction"] > 0.9) == (0, True)
    of_package = next(call for call in shown["code"] if call["function"] == "tokenize")
    assert of_package["file"] == str(tmp_path / "site-packages/tokens/__init__.py")
    assert of_package["part"] in ("compute", "other")
    assert of_package["ns_per_step"] == pytest.approx(20e6, abs=11e6)
    files = rankscope.open(tmp_path / "run").table("frames").collect()["file"].unique()
    assert not [file for file in files if "/torch/" in file or file.endswith("/threading.py")]
    text = subprocess.run([*RANKSCOPE, "report", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert f"code      {augment}" in text.stdout
    assert "What the main threads did" in text.stdout


@pytest.mark.real_job
def test_a_job_that_hangs_says_where_its_rank_was_seen_last(tmp_path):
    command = [*RANKSCOPE, "run", "--out", "run", "--no-report", "--nproc-per-node", "2", str(JOB), "20", "--hang"]
    job = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert any("HANGS" in line for line in job.stdout)
    time.sleep(15)  # a rank without progress for 10 s hangs
    os.killpg(job.pid, signal.SIGTERM)
    job.wait(60)
    shown = report(tmp_path / "run")
    hang = next(finding for finding in shown["findings"] if finding["detector"] == "hang")
    line = line_of("time.sleep(seconds)")
    assert (hang["ranks"], hang["code"]) == ([0], f"rank 0 last seen at where_in_the_code.py:{line} (evaluate)")


def chain(chains: samples.Chains, depth: int, keep: list[int]) -> None:
    if depth:
        chain(chains, depth - 1, keep)
    else:
        keep.append(chains.node(inspect.currentframe()))


def test_a_chain_of_calls_is_sent_once_and_the_tree_is_bounded(monkeypatch):
    chains, nodes = samples.Chains(), []
    for _ in range(2):
        chain(chains, 3, nodes)
    first, second = nodes
    shown = {node: (parent, function, line) for node, parent, function, _, line in chains.new}
    assert len(chains.new) == len(shown)
    names = []
    node = first
    while node:
        node, function, _ = shown[node]
        names.append(function)
    assert names[:4] == ["chain"] * 4
    assert "test_a_chain_of_calls_is_sent_once_and_the_tree_is_bounded" in names
    assert first == second, "the same lines called it"
    monkeypatch.setattr(samples, "_MOST_NODES", len(shown) + 2)
    chains.new = []
    chain(chains, 10, nodes)
    assert chains.is_full
    assert len(chains.new) == 2
    assert nodes[-1] == chains.new[-1][0], "what does not fit counts for the call above"


# Threads that come and go, and a collector that runs Python code with nearly every object: before Python 3.11.12
# `sys._current_frames()` stopped 7 of 7 such processes within a second (gh-106883).
BUSY = """
import gc, os, sys, threading, time
from rankscope.collectors.in_rank.thread_frames import current_frames

class Node:
    def __init__(self):
        self.me = self
    def __del__(self):
        for _ in range(300):
            pass

def look():
    while True:
        current_frames()
        time.sleep(0.0005)

def work(depth):
    if depth:
        return work(depth - 1)
    for _ in range(20):
        Node()

def spawn():
    while True:
        threads = [threading.Thread(target=work, args=(10,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
for target in (look, spawn, spawn, spawn):
    threading.Thread(target=target, daemon=True).start()
time.sleep(4)
print(gc.isenabled(), flush=True)
os._exit(0)
"""


def test_looking_at_other_threads_never_stops_the_process():
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_looking_leaves_the_garbage_collector_as_it_is_and_keeps_nothing_alive():
    class Held:
        pass

    def hold(until: threading.Event, shown: list[weakref.ref[Held]]) -> None:
        held = Held()
        shown.append(weakref.ref(held))
        until.wait()

    for enabled in (True, False):
        until, shown = threading.Event(), []
        thread = threading.Thread(target=hold, args=(until, shown))
        thread.start()
        (gc.enable if enabled else gc.disable)()
        try:
            assert samples.Chains().node(current_frames()[thread.ident])
            assert gc.isenabled() == enabled
            gc.disable()
            until.set()
            thread.join()
            assert shown[0]() is None, "no collection was needed to let go of it"
        finally:
            gc.enable()


def frames(*rows: tuple[int, int, int, str, int]) -> pl.DataFrame:
    schema = {"rank": pl.Int32, "frame": pl.UInt32, "parent": pl.UInt32, "function": pl.String, "line": pl.Int32}
    return pl.DataFrame(list(rows), schema, orient="row").with_columns(file=pl.lit("/home/me/train.py"))


# Two ranks that number their calls differently: main > load > read, main > step.
TREE = frames(
    *((0, 1, 0, "main", 1), (0, 2, 1, "load", 2), (0, 3, 2, "read", 3), (0, 4, 1, "step", 4)),
    *((1, 1, 0, "main", 1), (1, 2, 1, "step", 4), (1, 3, 1, "load", 2)),
)


def code(*seen: tuple[int, str, str, int], step_ns: float = 1e6) -> Code:
    """Samples by rank, function, part of the step, and how many."""
    places, _ = merged_places(TREE)
    number = dict(places.select("function", "place").iter_rows())
    rows = [(rank, 0, part, 0, number[function]) for rank, function, part, count in seen for _ in range(count)]
    table = pl.DataFrame(rows, SAMPLES, orient="row")
    return Code(table, places, step_ns, {0: number["read"], 1: number["step"]})


def test_trees_of_ranks_become_one():
    places, of_frames = merged_places(TREE)
    assert places.columns == list(PLACES)
    assert places.select("function", "line").rows() == [("main", 1), ("load", 2), ("step", 4), ("read", 3)]
    parents = dict(places.select("place", "parent").iter_rows())
    assert all(parent < place for place, parent in parents.items())
    number = dict(places.select("function", "place").iter_rows())
    found = {(rank, frame): place for rank, frame, place in of_frames.iter_rows()}
    assert found[0, 0] == found[1, 0] == 0
    assert found[0, 4] == found[1, 2] == number["step"]
    assert found[0, 2] == found[1, 3] == number["load"]


def test_calls_have_what_they_call_and_pass_on():
    """Of 100 samples 60 are in load, 50 of them in read; 38 in step; 2 in main itself."""
    shown = code(
        *((0, "load", "other", 10), (0, "read", "other", 50), (1, "step", "compute", 38), (1, "main", "other", 2))
    ).shares()
    assert [(c.depth, c.function, round(c.fraction, 2), c.part, c.ns_per_step) for c in shown] == [
        (0, "main", 1.0, None, 1_000_000),
        (1, "load", 0.6, "other", 600_000),
        (2, "read", 0.5, "other", 500_000),
        (1, "step", 0.38, "compute", 380_000),
    ]
    assert shown[1].uncertainty == pytest.approx(1.96 * (0.6 * 0.4 / 100) ** 0.5)
    passed_on = code((0, "load", "other", 2), (0, "read", "other", 58), (1, "step", "compute", 40)).shares()
    assert [call.function for call in passed_on] == ["main", "read", "step"]
    assert code((0, "read", "other", 19)).shares() == ()
    spent = code(
        (0, "load", "other", 20), (0, "read", "other", 35), (1, "step", "compute", 40), (1, "main", "other", 5)
    )
    assert spent.most_of("other") == "train.py:2 (load)", "read has 35 of its 60, load with it 55"
    assert spent.most_of("gc") is None


def slow_rank() -> Finding:
    return Finding(
        detector="slow_rank",
        severity="high",
        title="",
        where="",
        advice="",
        ranks=(0,),
        lost_ns_per_step=300_000,
        lost_ns_total=0,
        lost_fraction=0.3,
        uncertainty_ns=0,
    )


def test_a_finding_has_the_place_where_its_ranks_are_and_the_others_are_not():
    finding = slow_rank()
    waits = [(1, "step", "compute", 60), (1, "step", "wait", 40)]
    apart = code((0, "read", "other", 40), (0, "step", "compute", 60), *waits)
    assert apart.of_finding(finding) == "train.py:3 (read): 400 ± 96 µs of the step on rank 0, 0 ns on the others"
    alike = code((0, "step", "compute", 100), *waits)
    assert alike.of_finding(finding) is None, "the others do that as well, and the rest of it is not their doing"
    few = code((0, "read", "other", 3), (0, "step", "compute", 5), (1, "step", "compute", 10))
    assert few.of_finding(finding) is None
    hang = replace(finding, detector="hang", ranks=(0, 1))
    assert few.of_finding(hang) in (
        "rank 0 last seen at train.py:3 (read)",
        "rank 1 last seen at train.py:4 (step)",
    )


def test_a_rank_beside_the_others_has_what_they_have_of_each_call():
    """Rank 0 reads half of its 100 samples, the others a tenth of theirs: 40 % more, ± 1.96 √(0.25 + 0.09) / 10."""
    seen = [(0, "read", "other", 50), (0, "step", "compute", 50), (1, "read", "other", 10), (1, "step", "compute", 90)]
    shown = code(*seen)
    rows = {row["function"]: row for row in shown.difference(0, 0.002).iter_rows(named=True)}
    assert (rows["read"]["share"], rows["read"]["usual"]) == (0.5, 0.1)
    assert rows["read"]["error"] == pytest.approx(1.96 * ((0.25 + 0.09) / 100) ** 0.5)
    assert rows["main"]["usual"] == rows["main"]["share"] == 1
    assert shown.of_ranks([1]).tree(0.2)["function"].to_list() == ["main", "step"]
    (read,) = shown.places_of(slow_rank())
    drawn = flame.flame(shown.difference(0, 0.002), 1e6, lambda place: f"/flame?root={place}", cause={read})
    looks = re.findall(r'class="([^"]*)" aria-label="(?:▶ root cause: )?(\w+)  train.py:\d', drawn)
    assert set(looks) == {("unclear", "main"), ("longer", "load"), ("longer cause", "read"), ("shorter", "step")}
    assert re.search(r"500 µs of the step \(50.*%\), \+400 µs ± 114 µs against the others", drawn)
    part = flame.flame(shown.difference(0, 0.002), 1e6, str, root=read)
    assert ("train.py:3" in part, "train.py:4" in part) == (True, False)


def test_a_search_counts_time_once():
    """`load` calls `read`: both are in train.py, with all that main has."""
    tree = code((0, "load", "other", 10), (0, "read", "other", 30), (0, "step", "compute", 60)).tree(0.002)
    found, share = flame.matching(tree, "TRAIN.py")
    assert (len(found), share) == (4, 1.0)
    found, share = flame.matching(tree, "load")
    assert (len(found), round(share, 2)) == (1, 0.4)


def test_a_line_that_is_reached_in_two_ways_is_one():
    """Forward and, computing it again, backward call the layer that is slow; below backward it calls itself."""
    ways = frames(
        *((0, 1, 0, "main", 1), (0, 2, 1, "forward", 2), (0, 3, 1, "backward", 3), (0, 4, 2, "layer", 4)),
        *((0, 5, 3, "layer", 4), (0, 6, 5, "layer", 4), (1, 1, 0, "main", 1), (1, 2, 1, "step", 5)),
    )
    places, of_frames = merged_places(ways)
    place = dict(of_frames.filter(pl.col("rank") == 0).select("frame", "place").iter_rows())
    step = dict(of_frames.filter(pl.col("rank") == 1).select("frame", "place").iter_rows())[2]
    seen = [(0, place[4], 22), (0, place[6], 20), (0, place[3], 3), (0, step, 55), (1, step, 55)]
    rows = [(rank, 0, "compute", 0, at) for rank, at, count in seen for _ in range(count)]
    rows += [(1, 0, "wait", 0, step)] * 45
    shown = Code(pl.DataFrame(rows, SAMPLES, orient="row"), places, 1e6, {}).of_finding(slow_rank())
    assert shown == "train.py:4 (layer): 420 ± 97 µs of the step on rank 0, 0 ns on the others"


def test_samples_outside_of_steps_are_kept_without_one():
    seen = pl.DataFrame([(0, at, 1) for at in (5, 15, 25)], ["rank", "time_ns", "place"], orient="row")
    spans = pl.DataFrame(
        [(0, 7, "input", 10, 20)],
        {"rank": pl.Int32, "step": pl.Int32, "part": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64},
        orient="row",
    )
    placed = sampled_in(seen.with_columns(pl.col("rank").cast(pl.Int32)), spans)
    assert placed.select("time_ns", "step", "part").rows() == [(5, None, None), (15, 7, "input"), (25, None, None)]
