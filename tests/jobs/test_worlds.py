"""Jobs of several worlds: trainers beside engines that generate for them, restarts, and jobs one after the other.

Every world has a rank 0. What is judged is the world that trains, alone; the others are named.
"""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.schema import REGION_KINDS
from rankscope.errors import BadInput
from support.agent import Agent, Rank, wait_for
from support.paths import SCRIPTS
from support.run_folder import RANK_ROW, REGION, whys, write, write_run

RANKSCOPE = [sys.executable, "-m", "rankscope"]
JOB = SCRIPTS / "worlds.py"
OPTIMIZER = REGION_KINDS.index("optimizer")


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def report(run: Path | str) -> dict:
    done = subprocess.run([*RANKSCOPE, "report", str(run), "--json", "-"], capture_output=True, timeout=100, check=True)
    return json.loads(done.stdout)


@pytest.mark.alone
@pytest.mark.real_job
def test_trainers_are_judged_alone_beside_what_generates_for_them(tmp_path):
    """Of each world one rank comes first and one last; the trainers' rank 1 sleeps 30 ms a step."""
    command = [*RANKSCOPE, "exec", "--out", "run", "--", sys.executable, str(JOB), *free_ports(3)]
    subprocess.run(command, cwd=tmp_path, timeout=100, check=True)
    wait_for(lambda: json.loads((tmp_path / "run/run/node=00000.json").read_text())["state"] == "closed")
    trainers = report(tmp_path / "run")
    assert trainers["ranks"] == [0, 1]
    assert (trainers["steps"]["count"], trainers["steps"]["warmup"]) == (18, 2)
    (finding,) = trainers["findings"]
    assert (finding["detector"], finding["ranks"]) == ("slow_rank", [1])
    assert finding["lost_ns_per_step"] == pytest.approx(30e6, rel=0.2)
    other = "ranks 0,1 of another world ran at the same time (no optimizer ran there) and are not analyzed here: "
    (said,) = (gap["why"] for gap in trainers["gaps"] if gap["why"].startswith(other))
    engines = said.removeprefix(f"{other}rankscope report {tmp_path}/")
    judged = {"run/world=0": "run/world=1", "run/world=1": "run/world=0"}[engines]  # whichever began first

    tables = {name: rankscope.open(tmp_path / name) for name in ("run", engines, judged)}
    operations = {name: run.table("collectives").collect()["op"].value_counts() for name, run in tables.items()}
    assert operations["run"].sort("op").equals(operations[judged].sort("op"))
    assert dict(operations[engines].rows()) == {"allreduce": 200}
    for name, pids in (("run", 2), (engines, 2)):
        counters = tables[name].table("counters").collect()
        assert set(counters.filter(source="host")["device"]) == {"", "rank0", "rank1"}
        assert tables[name].table("ranks").collect()["pid"].n_unique() == pids
    done = subprocess.run([*RANKSCOPE, "report", engines], cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0
    assert (tmp_path / engines / "report.html").exists()


def test_a_world_that_is_not_there_is_one_line(tmp_path):
    write_run(tmp_path)
    write(tmp_path, "ranks", "rank=0", [{**RANK_ROW, "world_size": 1}])
    assert Trace.open(tmp_path / "world=0").table("ranks").collect().height == 1
    with pytest.raises(BadInput, match=r"has no world=3: the last is world=0$"):
        Trace.open(tmp_path / "world=3")
    with pytest.raises(BadInput, match="does not exist"):
        Trace.open(tmp_path / "nowhere" / "world=0")


class Run:
    """A run of single-node worlds, written by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reports: list[dict] = []

    def world(self, name: str, ranks: int, since: int, until: int | None, *, trains: bool = True, attempt: int = 0):
        for rank in range(ranks):
            row = {**RANK_ROW, "world_size": ranks, "start_ns": since, "pid": hash((name, attempt, rank)) % 9999}
            region = {**REGION, "start_ns": since, "end_ns": since + 1, "kind": OPTIMIZER if trains else 0}
            for table, rows in (("ranks", [row]), ("regions", [region])):
                written = write(self.root, table, f"rank={rank}", rows, attempt=attempt)
                written.rename(written.with_name(f"w{name}-a{attempt}-part-0000.arrow"))
            entry = {"rank": rank, "world": name, "attempt": attempt, "start_ns": since, "end_ns": until}
            self.reports.append(entry)
        write_run(self.root, ranks=self.reports)

    def judged(self) -> tuple[int, list[str]]:
        """How many ranks are, and the gaps on the others."""
        trace = Trace.open(self.root)
        said = [why.replace(str(self.root), "RUN") for why in whys(trace)]
        return trace.table("ranks").collect().height, [why for why in said if "analyzed" in why]


def test_of_worlds_that_train_at_once_the_largest_is_judged(tmp_path):
    run = Run(tmp_path)
    run.world("aa", ranks=2, since=10, until=100)
    run.world("bb", ranks=4, since=20, until=90)  # the actor, beside its critic
    run.world("cc", ranks=8, since=30, until=None, trains=False)
    asked = "of another world ran at the same time"
    assert run.judged() == (
        4,
        [
            f"ranks 0,1 {asked} (they train) and are not analyzed here: rankscope report RUN/world=0",
            f"ranks 0-7 {asked} (no optimizer ran there) and are not analyzed here: rankscope report RUN/world=2",
        ],
    )
    assert Trace.open(tmp_path / "world=2").table("ranks").collect().height == 8


def test_what_has_ended_before_is_a_restart_or_another_job(tmp_path):
    """An elastic job that went on with fewer ranks is judged by what ran last."""
    run = Run(tmp_path)
    run.world("aa", ranks=3, since=10, until=20)
    run.world("bb", ranks=4, since=30, until=40)
    run.world("cc", ranks=2, since=50, until=60, attempt=1)
    assert run.judged() == (
        2,
        ["attempt 0 was restarted and is not analyzed, only the last attempt (1) is"] * 2,
    )
    stuck = Run(tmp_path / "stuck")
    stuck.world("aa", ranks=2, since=10, until=20)
    stuck.world("bb", ranks=2, since=30, until=None, trains=False, attempt=1)
    assert stuck.judged()[1] == ["attempt 0 was restarted and is not analyzed, only the last attempt (1) is"]
    earlier = Trace.open(tmp_path / "stuck" / "world=0")
    later = f"attempt 1, which came later, is not analyzed here: rankscope report {tmp_path}/stuck/world=1"
    assert later in whys(earlier)
    again = Run(tmp_path / "again")
    again.world("aa", ranks=3, since=10, until=20)
    again.world("bb", ranks=1, since=30, until=40)
    assert again.judged() == (
        1,
        ["another job of 3 ranks in this run is not analyzed here: rankscope report RUN/world=0"],
    )


def test_many_worlds_are_counted(tmp_path):
    run = Run(tmp_path)
    for number in range(7):
        run.world(f"a{number}", ranks=1, since=10 + number, until=100, trains=number == 3)
    _, said = run.judged()
    assert [why[:6] for why in said] == ["rank 0"] * 4 + ["2 furt"]
    assert said[-1] == "2 further worlds are not analyzed either"


def test_deep_windows_and_counters_are_of_the_world_that_steps(tmp_path):
    """The engines' rank 0 says hello first; only the trainers' is asked for a window, at the step that was agreed."""
    agent = Agent(tmp_path / "run", "--profile-steps", "[5, 6]", "--hz", "10")
    engine, trainer = (Rank(agent.name, world=name) for name in ("aa", "bb"))
    try:
        for rank in (engine, trainer):
            rank.do("agent.settimeout(20)")
        trainer.do("ring.progress(1, time.perf_counter_ns(), 1000000)")
        trainer.do("asked = json.loads(agent.recv(4096))", "assert asked['type'] == 'window', asked")
        trainer.do(
            "ring.progress(2, time.perf_counter_ns(), 1000000)", "say(type='window', id=1, state='gone', why='over')"
        )
        trainer.do(
            "say(type='gap', table='regions', source='x', start_ns=1, end_ns=2, count=asked['first'], why='first')"
        )
        time.sleep(1)
    finally:
        for rank in (engine, trainer):
            rank.bye()
        agent.end()
    trace = Trace.open(agent.out / "world=1")
    assert [gap.count for gap in trace.gaps() if gap.why == "first"] == [5]
    of_ranks = {
        name: Trace.open(agent.out / name).table("counters").filter(pl.col("device") == "rank0").collect().height
        for name in ("world=0", "world=1")
    }
    assert min(of_ranks.values()) > 5


def test_nodes_that_no_launcher_numbers_get_numbers_when_they_meet(tmp_path):
    """An engine and a trainer on each of two nodes; both nodes are 0 until the trainers meet.

    Later a launcher says on the first node that it is 7: its ranks, and the pings of the other one, are of node 7.
    """
    folders = tmp_path / "first", tmp_path / "second"
    agents = [Agent(folder) for folder in folders]
    engines = [Rank(agent.name, world=world, node=None) for agent, world in zip(agents, ("aa", "bb"), strict=True)]
    listens = ("127.0.0.1", None)
    trainers = [
        Rank(agent.name, world="cc", node=None, rank=rank, world_size=2, listen=listens[rank])
        for rank, agent in enumerate(agents)
    ]
    named = []
    try:
        engines[1].bye()  # its files are closed before its node is numbered
        assert [rank.reply["node"] for rank in (*engines, *trainers)] == [0, 0, 0, 0]
        trainers[1].do(f"say(type='peer', **{trainers[0].reply})", "regions(3)")
        wait_for(lambda: [path.name for path in sorted(tmp_path.glob("*/run/node=*.json"))][-1:] == ["node=00001.json"])
        named.append(Rank(agents[0].name, world="dd", node=7))
        wait_for(lambda: (folders[0] / "run" / "node=00007.json").exists())
        time.sleep(1)
    finally:
        for rank in (engines[0], *trainers, *named):
            rank.bye()
        for agent in reversed(agents):
            agent.end()
    assert not folders[1].exists()
    run = rankscope.open(folders[0])
    assert run.table("ranks").collect().select("rank", "node").sort("rank").rows() == [(0, 7), (1, 1)]
    clocks = run.table("clocks").collect().filter(pl.col("peer") >= 0)
    assert set(clocks.select("node", "peer").rows()) == {(1, 7)}
    assert not [gap.why for gap in run.gaps() if "NODE_RANK" in gap.why]
    of_worlds = [Trace.open(folders[0] / f"world={n}").table("ranks").collect()["node"].to_list() for n in range(4)]
    assert sorted(of_worlds) == [[1], [7], [7], [7, 1]]


def test_a_node_that_meets_no_other_has_the_number_of_its_lowest_rank(tmp_path):
    """Ranks 5 and 4 of 6; rank 0's node is not recorded. Beside them an engine, whose world is all here."""
    agent = Agent(tmp_path / "run")
    engine = Rank(agent.name, world="aa", node=None)
    ranks = [Rank(agent.name, world="bb", node=None, rank=rank, world_size=6) for rank in (5, 4)]
    try:
        wait_for(lambda: (agent.out / "run/node=00004.json").exists())
    finally:
        for rank in (engine, *ranks):
            rank.bye()
        agent.end()
    assert rankscope.open(agent.out).table("ranks").collect()["node"].to_list() == [4, 4]
    assert [path.name for path in (agent.out / "run").glob("node=*")] == ["node=00004.json"]


def test_two_nodes_with_one_number_are_distinguished_and_a_gap_names_them(tmp_path):
    first, second = agents = [Agent(tmp_path / name) for name in ("first", "second")]
    ranks = [Rank(agent.name, rank=r, node=3, world_size=2) for r, agent in enumerate(agents)]
    try:
        ranks[1].do(f"say(type='peer', **{ranks[0].reply})", "regions(3)")
        wait_for(lambda: not second.out.exists())
    finally:
        for rank in ranks:
            rank.bye()
        for agent in reversed(agents):
            agent.end()
    run = rankscope.open(first.out)
    assert run.table("ranks").collect()["node"].to_list() == [3, 1]
    said = "another node than this one is node 3 too, so this is node 1: set NODE_RANK on each node"
    assert [(gap.table, gap.node) for gap in run.gaps() if gap.why == said] == [("clocks", 1)]


def test_a_world_without_steps_reports_its_main_threads(tmp_path):
    """An engine that generates in 30 of its 40 samples, and waits for requests in the others."""
    write_run(tmp_path)
    write(tmp_path, "ranks", "rank=0", [RANK_ROW | {"world_size": 1}])
    calls = [(1, 0, "serve", 7), (2, 1, "generate", 8), (3, 1, "next_request", 9)]
    rows = [
        {"frame": f, "parent": p, "function": c, "file": "/home/me/engine.py", "line": line} for f, p, c, line in calls
    ]
    write(tmp_path, "frames", "rank=0", rows)
    write(tmp_path, "samples", "rank=0", [{"time_ns": i, "frame": 2 if i % 4 else 3} for i in range(40)])
    done = report(tmp_path)
    assert [(c["function"], c["fraction"], c["ns_per_step"]) for c in done["code"]] == [
        ("serve", 1.0, None),
        ("generate", 0.75, None),
        ("next_request", 0.25, None),
    ]
    assert done["verdict"] == "No verdict: no step was seen; main threads were mostly at engine.py:8 (generate)."
    text = subprocess.run([*RANKSCOPE, "report", str(tmp_path)], capture_output=True, text=True, timeout=100).stdout
    for said in (text, (tmp_path / "report.html").read_text()):
        assert "these are shares of the whole run." in " ".join(said.split())
