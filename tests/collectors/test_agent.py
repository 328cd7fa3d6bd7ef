"""The agent as a process, fed by ranks that are processes: what is on disk after which accident."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import typer

import rankscope
from rankscope.collectors.agent import arrow_writer, clock_ping
from rankscope.collectors.agent.arrow_writer import SEAL_ROWS, Partition, RunFolder, read_live
from rankscope.collectors.agent.deep_windows import ask
from rankscope.collectors.agent.ring_reader import Ring as RingReader
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.schema import RECORD, RING_SLOTS, RecordType
from rankscope.profiler.commands import trigger
from support.agent import AGENT, Agent, Rank, wait_for

NS_PER_S = 1_000_000_000


@pytest.fixture
def started():
    """Append processes to have them ended after the test, whatever happens."""
    processes = []
    yield processes
    for each in processes:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


@pytest.fixture
def agent(tmp_path, started):
    agent = Agent(tmp_path / "run")
    started.append(agent)
    return agent


@pytest.fixture
def rank(agent, started):
    rank = Rank(agent.name)
    started.append(rank)
    return rank


def table(run: Path, name: str, partition: str = "*") -> pl.DataFrame:
    """All sealed parts, in the order of their names."""
    return pl.concat([pl.scan_ipc(f).collect() for f in sorted(run.glob(f"{name}/{partition}/*.arrow"))])


def why(run: Path, partition: str) -> dict[str, int | None]:
    return dict(table(run, "gaps", partition).select("why", "count").iter_rows())


def live_rows(run: Path, name: str) -> int:
    files = list(run.glob(f"{name}/*/*.arrow"))
    return sum(read_live(file).num_rows for file in files if file.stat().st_size > 8)


def state(run: Path, node: int = 0) -> dict[str, object]:
    return json.loads((run / "run" / f"node={node:05d}.json").read_text())


def test_every_kind_of_record_and_message_becomes_rows(agent, rank):
    rank.do(
        "say(type='string', id=7, name='forward')",
        "say(type='group', id=42, name='0', backend='gloo', role='dp', members='0-3', start_ns=5)",
        "say(type='gap', table='memory', source='memory', start_ns=1, end_ns=2, count=3, why='because')",
        "ring.region(1, 7, 10, 20, microbatch=4)",
        "threading.Thread(target=ring.region, args=(2, 7, 30, 40)).start()",
        # all-reduce of float32, asynchronous, 4096 bytes, from the main thread; then its end
        "n = ring.write(T.COLLECTIVE, 1, 2 | 1 << 8, 0, 50, 51, 42, 4096, 1)",
        "ring.write(T.DONE, 0, 0, 0, 60, n, 0, 0, 0)",
        # send to rank 3 with tag 9, not known to be asynchronous, from another thread, never ends
        "ring.write(T.COLLECTIVE, 18, 5 | 2 << 8, 1, 70, 71, 42, 8, (3 + 1) << 32 | 9 << 16)",
        # all-to-all that gives 3000 bytes to this rank, from the main thread, never ends
        "ring.write(T.COLLECTIVE, 15, 2, 2, 72, 73, 42, 4096, 3000 << 16 | 1)",
        "ring.write(T.STEP, 0, 0, 0, 80, threading.get_ident(), 0, 0, 0)",
        "ring.write(T.MEMORY, 0, 0, 7, 90, 1000, 0, 0, 0)",
    )
    rank.bye()
    agent.end()
    run = agent.out
    assert table(run, "strings", "rank=00000").rows() == [(7, "forward")]
    assert table(run, "groups").rows() == [(5, 42, "0", "gloo", "dp", "0-3")]
    assert table(run, "gaps", "rank=00000").rows() == [(1, 2, "memory", "memory", 3, "because")]
    assert table(run, "regions").rows() == [(10, 20, 1, 7, 0, 4, None), (30, 40, 2, 7, 1, None, None)]
    assert table(run, "collectives").rows() == [
        (50, 51, 60, None, 42, 0, 1, 2, True, -1, 0, 4096, None, 0, 3),
        (70, 71, None, None, 42, 1, 18, 5, None, 3, 9, 8, None, 65535, 5),
        (72, 73, None, None, 42, 2, 15, 2, False, -1, 0, 4096, 3000, 0, 6),
    ]
    assert table(run, "steps").rows() == [(80, 0, None)]
    assert table(run, "memory").rows() == [(90, 7, 1000)]
    assert table(run, "ranks").select("local_rank", "world_size", "node", "pid", "torch").rows() == [
        (0, 1, 0, rank.process.pid, "2.13.0")
    ]
    assert {peer for peer, *_ in table(run, "clocks").rows()} == {-1}
    assert state(run)["state"] == "closed"
    (known,) = state(run)["ranks"]
    assert 0 < known.pop("end_ns") - known.pop("start_ns") < 10e9
    rank_0 = {"rank": 0, "world": None, "attempt": 0, "pid": rank.process.pid}
    assert known == rank_0 | {"bye": True, "ended": True, "world_size": 1}


def test_run_says_where_devices_are_and_which_gpu_a_rank_has(agent, rank):
    rank.do("say(type='gpu', name='NVIDIA H100', uuid='GPU-7')")
    wait_for(lambda: (agent.out / "run/node=00000.json").exists() and "topology" in state(agent.out))
    rank.bye()
    agent.end()
    assert set(state(agent.out)["topology"]) == {"gpus", "nics"}
    assert state(agent.out)["ranks"][0]["gpu_uuid"] == "GPU-7"
    assert table(agent.out, "ranks")["device"].to_list() == ["cpu", "NVIDIA H100"]
    assert rankscope.open(agent.out).table("ranks").collect()["device"].to_list() == ["NVIDIA H100"]


def test_ring_of_nccls_plugin_is_read_beside_the_ranks_own(agent, rank):
    """One all-reduce of two ranks, and a proxy that sent 100 bytes for it: 3 ns GPU, 4 ns peer and 5 ns network."""
    rank.do(
        "second = Ring()",
        "second.write(T.NCCL_CALL, 1, 0, 1, 10, 42, 2, 8, 1)",
        "second.write(T.NCCL_PROXY, 3, 0, 1, 20, 3 << 24 | 1, 4 << 24 | 1, 5 << 24, 100)",
        'socket.send_fds(agent, [b\'{"type": "nccl_ring"}\'], [second.fd])',
        "ring.region(1, 7, 10, 20)",
    )
    rank.bye()
    agent.end()
    assert table(agent.out, "nccl_calls").select("start_ns", "communicator", "nccl_size").rows() == [(10, 42, 2)]
    waits = table(agent.out, "nccl_events").select("end_ns", "gpu_wait_ns", "peer_wait_ns", "network_wait_ns")
    assert waits.rows() == [(32, 3, 4, 5)]
    assert table(agent.out, "regions").height == 1


def test_message_without_its_ring_is_a_gap(agent, rank):
    rank.do("say(type='nccl_ring')")
    rank.bye()
    agent.end()
    assert any("ring cannot be mapped" in reason for reason in why(agent.out, "node=00000"))


def test_end_that_comes_after_its_row_was_written_is_a_completion(agent, rank):
    rank.do("n = ring.write(T.COLLECTIVE, 1, 2, 0, 50, 51, 42, 8, 1)")
    wait_for(lambda: live_rows(agent.out, "collectives") == 1)
    rank.do("ring.write(T.DONE, 0, 0, 0, 99, n, 0, 0, 0)")
    rank.bye()
    agent.end()
    assert table(agent.out, "collectives")["end_ns"].to_list() == [None]
    assert table(agent.out, "completions").rows() == [(99, 1)]


def test_rank_killed_in_the_middle_of_a_record_loses_that_record_only(agent, rank):
    rank.do(
        "regions(1000)",
        "n = ring.write.__closure__[0].cell_contents()",  # takes the next number, 1001
        "RECORD.pack_into(ring._memory, n * RECORD.size, n, T.REGION, *[0] * 9)",  # the second number is not there yet
    )
    rank.process.kill()
    rank.process.wait()
    agent.end()
    assert table(agent.out, "regions")["start_ns"].to_list() == list(range(1000))
    gaps = why(agent.out, "rank=00000")
    assert gaps["records that a thread began and did not complete within a second"] == 1
    assert any("ended without a goodbye" in text for text in gaps)
    assert state(agent.out)["ranks"][0]["bye"] is False


def test_rank_that_dies_is_noticed_although_its_child_holds_the_connection(agent, rank):
    rank.do("child = os.fork() or (time.sleep(60), os._exit(0))", "regions(5)", "print(child, file=sys.stderr)")
    children = Path(f"/proc/{rank.process.pid}/task/{rank.process.pid}/children").read_text().split()
    rank.process.kill()
    rank.process.wait()
    try:
        agent.end()
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    assert table(agent.out, "regions").height == 5


def test_killed_agent_leaves_files_that_can_be_read(agent, rank):
    rank.do("regions(1000)")
    wait_for(lambda: live_rows(agent.out, "regions") == 1000)
    wait_for(lambda: (agent.out / "run/node=00000.json").exists())
    agent.process.kill()
    agent.process.wait()
    (part,) = agent.out.glob("regions/rank=00000/*.arrow")
    assert part.name == "a0-part-0000.arrow"
    assert read_live(part)["start_ns"].to_pylist() == list(range(1000))
    # as after a crash of the machine, with the last batch torn
    part.write_bytes(part.read_bytes()[:-100])
    assert read_live(part).num_rows < 1000
    assert state(agent.out)["state"] == "running"


def test_overwritten_records_are_counted_exactly(agent, rank):
    """100,000 records while the agent is stopped: the ring holds the last 65,536, the others are lost."""
    agent.process.send_signal(signal.SIGSTOP)
    rank.do("regions(100_000)")
    agent.process.send_signal(signal.SIGCONT)
    rank.bye()
    agent.end()
    rows = table(agent.out, "regions")["start_ns"].to_list()
    assert rows == list(range(34_464, 100_000))
    (count,) = why(agent.out, "rank=00000").values()
    assert count == 34_464


def test_terminated_agent_seals_its_files_while_the_rank_goes_on(agent, rank):
    rank.do("regions(10)")
    for harmless in (signal.SIGINT, signal.SIGHUP):
        agent.process.send_signal(harmless)
    agent.process.terminate()
    assert agent.process.wait(20) == 0
    assert table(agent.out, "regions").height == 10
    assert list(why(agent.out, "rank=00000")) == ["the agent was asked to end while the rank was still running"]
    assert rank.process.poll() is None


def test_agent_outlives_its_launcher_as_long_as_a_rank_lives(agent, rank):
    agent.process.stdin.close()
    rank.do("regions(1)")
    wait_for(lambda: live_rows(agent.out, "regions") == 1)
    rank.do("regions(1)")
    rank.bye()
    assert agent.process.wait(20) == 0
    assert table(agent.out, "regions").height == 2


def test_restarted_rank_gets_files_of_its_own(agent, started):
    for attempt in (0, 1, 1):  # the last: a second job in the same run
        rank = Rank(agent.name, attempt=attempt)
        started.append(rank)
        rank.do("regions(1)")
        rank.bye()
    agent.end()
    names = sorted(path.name for path in agent.out.glob("regions/rank=00000/*"))
    assert names == ["a0-part-0000.arrow", "a1-part-0000.arrow", "a2-part-0000.arrow"]


def test_two_ranks_do_not_mix(agent, started):
    ranks = [Rank(agent.name, rank=r) for r in (0, 1)]
    started.extend(ranks)
    for index, rank in enumerate(ranks):
        rank.do(f"regions(3, {index * 100})")
    for rank in ranks:
        rank.bye()
    agent.end()
    assert table(agent.out, "regions", "rank=00001")["start_ns"].to_list() == [100, 101, 102]


def test_message_that_makes_no_sense_is_a_gap_and_no_more(agent, rank):
    rank.do("agent.send(b'nonsense')", "say(type='string', id=-1, name='x')", "say(type='string', id=1, name='y')")
    rank.bye()
    agent.end()
    assert table(agent.out, "strings", "rank=00000").rows() == [(1, "y")]
    assert sum("was not understood" in text for text in why(agent.out, "node=00000")) == 2


def test_a_rank_that_writes_nonsense_costs_its_own_records_only(agent, started):
    """One rank's ring is all ones, another's has a number and a type that nothing takes, the third is as it should."""
    ranks = [Rank(agent.name, rank=rank, local_rank=rank, world_size=3) for rank in range(3)]
    started += ranks
    ranks[0].do("ring._memory[:] = b'\\xff' * len(ring._memory)", "agent.send(b'[' * 60_000)")
    ranks[1].do("regions(2)", "ring.region(1, 0, 5, 6, microbatch=2**31)", "ring.write(99, *[0] * 8)")
    ranks[2].do("regions(3)")
    for rank in ranks:
        rank.bye()
    agent.end()
    assert [table(agent.out, "regions", f"rank=0000{rank}").height for rank in (1, 2)] == [2, 3]
    assert any("nothing more of it is read" in reason for reason in why(agent.out, "rank=00000"))
    assert why(agent.out, "rank=00001") == {
        "records of a type that this version does not know": 1,
        "records with a value out of range, which were left out": 1,
    }
    assert not list(agent.out.glob("gaps/rank=00002/*"))
    assert [rank["bye"] for rank in state(agent.out)["ranks"]] == [True] * 3


def test_node_0_that_does_not_answer_pings_is_a_gap(agent, started):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed_port = server.getsockname()[1]
    rank = Rank(agent.name, rank=1, node=1)
    started.append(rank)
    rank.do(f"say(type='peer', name='run', host='127.0.0.1', port={closed_port}, node=0, agent='a')")
    rank.bye()
    agent.end()
    (text,) = (text for text in why(agent.out, "node=00001") if "pings" in text)
    assert text.startswith(f"node 0's agent does not answer pings at 127.0.0.1:{closed_port}: Connection refused")


def test_no_rank_at_all_is_reported(agent):
    agent.end()
    assert any(text.startswith("no rank reported") for text in why(agent.out, "node=00000"))
    assert state(agent.out)["state"] == "closed"


def test_second_agent_of_a_node_leaves_quietly(agent, tmp_path):
    command = [*AGENT, "--socket", agent.name, "--out", str(tmp_path / "other")]
    second = subprocess.run(command, capture_output=True, timeout=20)
    assert (second.returncode, second.stdout, second.stderr) == (0, b"", b"")
    assert not (tmp_path / "other").exists()


def test_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    command = [*AGENT, "--socket", uuid.uuid4().hex, "--out", str(tmp_path / "file" / "run")]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("rankscope: nothing is recorded: cannot write to")
    assert failed.stderr.count("\n") == 1


def test_launch_is_kept_with_the_run(tmp_path, started):
    agent = Agent(tmp_path / "run", "--launch", '{"command": "run", "argv": ["train.py"]}')
    started.append(agent)
    agent.end()
    assert state(agent.out)["launch"] == {"command": "run", "argv": ["train.py"]}


def test_hole_is_waited_for_and_then_counted():
    """Record 3 is never finished: 1 and 2 come at once, 4 after a second."""
    ring = Ring()
    reader = RingReader(ring.fd)
    for start in (1, 2, 3, 4):
        ring.region(0, 0, start, 0)
    RECORD.pack_into(ring._memory, 3 * RECORD.size, *[0] * 11)
    assert reader.read(0)["q0"].tolist() == [1, 2]
    assert reader.read(NS_PER_S - 1)["q0"].tolist() == []
    assert reader.read(NS_PER_S)["q0"].tolist() == [4]
    assert (reader.unfinished, reader.overwritten) == (1, 0)


def test_late_record_is_not_lost():
    ring = Ring()
    reader = RingReader(ring.fd)
    ring.region(0, 0, 1, 0)
    ring.region(0, 0, 2, 0)
    first = bytes(ring._memory[RECORD.size : 2 * RECORD.size])
    RECORD.pack_into(ring._memory, RECORD.size, *[0] * 11)
    assert reader.read(0)["q0"].tolist() == []
    ring._memory[RECORD.size : 2 * RECORD.size] = first
    assert reader.read(1)["q0"].tolist() == [1, 2]
    assert reader.unfinished == 0


def test_ring_is_read_across_its_end():
    ring = Ring()
    reader = RingReader(ring.fd)
    read = []
    for start in range(0, 3 * RING_SLOTS, 50_000):
        for i in range(start, start + 50_000):
            ring.write(RecordType.STEP, 0, 0, 0, i, 0, 0, 0, 0)
        read += reader.read(0)["q0"].tolist()
    assert read == list(range(200_000))
    assert (reader.unfinished, reader.overwritten) == (0, 0)


def test_full_part_is_sealed_in_order_and_the_next_begins(tmp_path):
    """70,000 steps, last first: 65,536 in a sealed part, the rest in a live one."""
    tables = Partition(RunFolder(tmp_path), "rank=00000", "a0-")
    ends = list(range(70_000, 0, -1))
    tables.add("steps", {"end_ns": ends, "thread": [0] * 70_000})
    tables.flush()
    folder = tmp_path / "steps" / "rank=00000"
    sealed = pl.scan_ipc(folder / "a0-part-0000.arrow").collect()
    assert sealed["end_ns"].to_list() == sorted(ends[:SEAL_ROWS])
    assert read_live(folder / "a0-part-0001.arrow").num_rows == 70_000 - SEAL_ROWS
    tables.close()
    assert table(tmp_path, "steps").height == 70_000


def test_rows_that_fit_no_schema_are_refused(tmp_path):
    tables = Partition(RunFolder(tmp_path), "rank=00000")
    with pytest.raises(ValueError, match=r"strings\.name is null"):
        tables.add_row("strings", {"name_id": 1, "name": None})


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and network namespaces need root")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def tried(*command: str) -> None:
    """Run `command`, or skip the test if this machine does not allow it."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tried("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@needs_root
def test_full_disk_costs_rows_that_are_counted_and_nothing_else(small_disk, started):
    """15,000 rows that do not compress take 380 kB: twice they fit, the third time they do not."""
    agent = Agent(small_disk / "run")
    started.append(agent)
    rank = Rank(agent.name)
    started.append(rank)
    rank.do("import random", "rand = random.Random(1).getrandbits")
    write = "[ring.region(1, rand(20), rand(62), rand(62), rand(30), rand(30)) for _ in range(15_000)]"
    for rows in (15_000, 30_000):
        rank.do(write)
        wait_for(lambda rows=rows: live_rows(agent.out, "regions") == rows)
    rank.do(write)
    rank.bye()
    agent.end()
    assert live_rows(agent.out, "regions") == 30_000
    (part,) = agent.out.glob("gaps/rank=*/*")
    (gap,) = read_live(part).to_pylist()
    assert (gap["table"], gap["count"]) == ("regions", 15_000)
    assert gap["why"] == "the rows could not be written: No space left on device"


@needs_root
def test_writing_goes_on_in_a_new_part_once_there_is_space_again(small_disk, monkeypatch):
    monkeypatch.setattr(arrow_writer, "RETRY_S", 0)
    tables = Partition(RunFolder(small_disk), "rank=00000")

    def write(seed: int) -> None:
        numbers = np.random.default_rng(seed).integers(0, 2**62, 20_000)
        tables.add("completions", {"end_ns": numbers, "number": numbers[::-1]})
        tables.flush()

    write(1)  # 310 kB
    (small_disk / "another user's").write_bytes(bytes(500_000))
    write(2)
    (small_disk / "another user's").unlink()
    write(3)
    tables.close()
    assert {path.name: read_live(path).num_rows for path in (small_disk / "completions/rank=00000").iterdir()} == {
        "part-0000.arrow": 20_000,
        "part-0001.arrow": 20_000,
    }
    assert why(small_disk, "rank=00000") == {"the rows could not be written: No space left on device": 20_000}


@pytest.fixture
def two_nodes():
    """Two network namespaces with a slow link, 10.99.0.1 and 10.99.0.2."""
    names = [f"rs{uuid.uuid4().hex[:6]}" for _ in range(2)]
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("iproute2 is not installed")
    try:
        for name in names:
            tried("ip", "netns", "add", name)
        tried("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for index, name in enumerate(names, 1):
            tried("ip", "link", "set", name, "netns", name)
            tried("ip", "-n", name, "addr", "add", f"10.99.0.{index}/24", "dev", name)
            tried("ip", "-n", name, "link", "set", name, "up")
            tried("ip", "-n", name, "link", "set", "lo", "up")
            shape = ["rate", "400mbit", "burst", "64k", "latency", "50ms"]
            tried("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", "tbf", *shape)
        tried("unshare", "-T", "--monotonic", "100", "true")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@needs_root
def test_two_nodes_find_each_other_share_a_folder_and_relate_their_clocks(two_nodes, tmp_path, started):
    """Node 1's clock is 100 s ahead; its pings say so to a fraction of a millisecond."""
    inside = [("ip", "netns", "exec", name) for name in two_nodes]
    ahead = ("unshare", "-T", "--monotonic", "100")
    first = Agent(tmp_path / "first", prefix=inside[0])
    second = Agent(tmp_path / "second", prefix=(*inside[1], *ahead))
    started += [first, second]
    zero = Rank(first.name, *inside[0], listen="10.99.0.1")
    one = Rank(second.name, *inside[1], *ahead, rank=1, node=1)
    started += [zero, one]
    one.do("regions(3)")
    wait_for(lambda: live_rows(tmp_path / "second", "regions") == 3)
    one.do(f"say(type='peer', **{zero.reply})")
    wait_for(lambda: live_rows(tmp_path / "first", "clocks") > 10)
    one.do("regions(2, 3)")
    one.bye()
    second.end()
    zero.bye()
    first.end()
    assert not (tmp_path / "second").exists()
    assert table(tmp_path / "first", "regions", "rank=00001")["start_ns"].to_list() == [0, 1, 2, 3, 4]
    assert {state(tmp_path / "first", node)["name"] for node in (0, 1)} == {"first"}
    pings = table(tmp_path / "first", "clocks", "node=00001").filter(pl.col("peer") == 0)
    assert pings.height >= 20  # the burst at the start and the one at the end
    ahead_ns = (pl.col("t1_ns") - pl.col("t2_ns") + pl.col("t4_ns") - pl.col("t3_ns")) // 2
    assert abs(pings.select(ahead_ns.median()).item() - 100 * NS_PER_S) < 500_000


@needs_root
@needs_torch
@pytest.mark.long
def test_a_node_finds_rank_0_where_only_the_script_says_it(two_nodes, tmp_path):
    """No launcher: each rank has what it needs in its call, and nothing of it in its environment."""
    (tmp_path / "train.py").write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "where = 'tcp://10.99.0.1:29511'\n"
        "dist.init_process_group('gloo', init_method=where, rank=int(sys.argv[1]), world_size=2)\n"
        "for _ in range(20):\n"
        "    dist.all_reduce(torch.ones(2)); time.sleep(0.2)\n"
        "dist.destroy_process_group()\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    env["TORCHELASTIC_RUN_ID"] = f"test-{uuid.uuid4().hex}"
    recorded = [sys.executable, "-m", "rankscope", "exec", "--out"]
    ranks = []
    for rank, node in enumerate(two_nodes):
        command = ["ip", "netns", "exec", node, *recorded, f"run{rank}", sys.executable, "train.py", str(rank)]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env | {"GLOO_SOCKET_IFNAME": node}))
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    wait_for(lambda: {state(tmp_path / "run0", node)["state"] for node in (0, 1)} == {"closed"})
    assert table(tmp_path / "run0", "clocks", "node=00001").filter(pl.col("peer") == 0).height >= 20


def test_nodes_that_share_a_folder_agree_on_the_steps_of_a_deep_window(tmp_path, started):
    """Both got steps 900 and 901, rank 1 again when its run has moved. Rank 0 is in step 100, rank 1 in 101,
    of 10 ms: the first step of the other window is one that neither can have reached in 4 s."""
    fixed = ("--profile-steps", "[900, 901]")
    first, second = Agent(tmp_path / "first", *fixed), Agent(tmp_path / "second", *fixed)
    started += [first, second]
    zero, one = Rank(first.name, world_size=2), Rank(second.name, rank=1, node=1, world_size=2)
    started += [zero, one]

    def hears(rank: Rank) -> dict[str, object]:
        rank.do(f"open({str(tmp_path / 'heard')!r}, 'w').write(agent.recv(4096).decode())")
        return json.loads((tmp_path / "heard").read_text())

    heard = [hears(zero), hears(one)]
    one.do(f"say(type='peer', **{zero.reply})")
    heard.append(hears(one))
    assert [(message["first"], Path(message["path"]).parents[1].name) for message in heard] == [
        (900, "first"),
        (900, "second"),
        (900, "first"),
    ]
    zero.do("ring.progress(100, time.perf_counter_ns(), 10_000_000)")
    one.do("ring.progress(101, time.perf_counter_ns(), 10_000_000)")
    request = {"kind": "window", "ranks": None, "first": None, "steps": 2, "reason": "test"}
    assert ask(tmp_path / "first", request) == 2
    windows = [hears(zero), hears(one)]
    assert windows[0]["first"] == windows[1]["first"] > 101 + 400
    assert [(window["type"], window["id"], window["steps"]) for window in windows] == [("window", 2, 2)] * 2
    zero.do("say(type='window', id=2, state='refused', why='because')")
    one.bye()
    answers = [tmp_path / "first" / "run" / f"window=0002.node=0000{node}.json" for node in (0, 1)]
    wait_for(lambda: all(json.loads(path.read_text())["over"] for path in answers))
    of_ranks = [json.loads(path.read_text())["ranks"] for path in answers]
    assert of_ranks[0] == {"0": {"state": "refused", "why": "because"}}
    assert of_ranks[1] == {"1": {"state": "gone", "why": "the rank ended before it was done"}}


@pytest.mark.long
def test_trigger_ends_where_the_agent_was_killed_after_it_had_answered(agent, rank, monkeypatch, capsys):
    monkeypatch.setattr(trigger, "_STILL_S", 5.0)
    rank.do("ring.progress(100, time.perf_counter_ns(), 10_000_000)")
    wait_for((agent.out / "run/node=00000.json").exists)

    def kill() -> None:
        wait_for((agent.out / "run/window=0001.node=00000.json").exists)
        agent.process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(typer.Exit):
        trigger.command(agent.out)
    killing.join()
    assert capsys.readouterr().out == (
        "rank 0: its agent has written nothing for 5 s: it was killed, or its disk is full\n"
    )


@needs_root
def test_trigger_ends_where_the_disk_is_full_of_others_files(small_disk, started, capsys):
    agent = Agent(small_disk / "run")
    started.append(agent)
    rank = Rank(agent.name)
    started.append(rank)
    rank.do("ring.progress(100, time.perf_counter_ns(), 10_000_000)")
    wait_for((agent.out / "run/node=00000.json").exists)

    def fill_and_fail() -> None:
        wait_for((agent.out / "run/window=0001.node=00000.json").exists)
        with contextlib.suppress(OSError), open(small_disk / "another user's", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        rank.do("say(type='window', id=1, state='failed', why='the trace could not be saved')")

    failing = threading.Thread(target=fill_and_fail)
    failing.start()
    with pytest.raises(typer.Exit):
        trigger.command(agent.out)
    failing.join()
    assert capsys.readouterr().out == "rank 0: the trace could not be saved\n"


def test_all_nodes_of_a_large_job_may_ask_for_the_time_at_once():
    """500 nodes ask before one is answered; none is turned away, and none fails."""
    server = clock_ping.Server("127.0.0.1")
    nodes = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(500)]
    for node in nodes:
        node.settimeout(5)
        node.sendall(server.key.encode())
    for node in nodes:
        with node:
            assert_answered(node)


def assert_answered(node: socket.socket) -> None:
    before = time.perf_counter_ns()
    node.sendall(b"rankscpe")
    received, answered = struct.unpack("<qq", node.recv(16))
    assert before < received <= answered < time.perf_counter_ns()


def test_without_the_jobs_key_there_is_no_answer_and_no_denial_of_service(monkeypatch):
    """300 say nothing and 300 a part of a wrong key; one has a wrong key, and one the right one, in two pieces."""
    monkeypatch.setattr(clock_ping, "_STRANGERS", 256)
    server = clock_ping.Server("127.0.0.1")
    place = ("127.0.0.1", server.port)
    silent = [socket.create_connection(place) for _ in range(600)]
    for one in silent[::2]:
        one.sendall(b"rank")
    wrong, right = (socket.create_connection(place, timeout=5) for _ in range(2))
    wrong.sendall(b"rankscpe" * 2)
    right.sendall(server.key[:5].encode())
    assert wrong.recv(16) == b""
    right.sendall(server.key[5:].encode())
    assert_answered(right)
    for one in silent:
        one.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(16) == b""
        one.close()
    wrong.close()
    right.close()


def test_nodes_that_are_slow_to_ask_are_given_up(monkeypatch):
    """As many as are answered at once ask a little now and then; later ones are answered all the same."""
    monkeypatch.setattr(clock_ping, "_BURST_S", 0.5)
    server = clock_ping.Server("127.0.0.1")
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(clock_ping._AT_ONCE)]
    for one in slow:
        one.sendall(server.key.encode())
        assert_answered(one)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as after:
        after.sendall(server.key.encode() + b"rankscpe")
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(after.recv(16)))
        waiting.start()
        while waiting.is_alive():
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"rankscpe")
            waiting.join(0.1)
        assert len(answers[0]) == 16
    for one in slow:
        one.close()


def test_a_node_does_not_move_into_another_run(tmp_path, started):
    """On this node's own disk lies an older run of the name that node 0, elsewhere, gives the run of today."""
    older = tmp_path / "exp" / "run" / "node=00000.json"
    older.parent.mkdir(parents=True)
    older.write_text(json.dumps({"agent": "of yesterday", "node": 0}))
    agent = Agent(tmp_path / "exp-2")
    rank = Rank(agent.name, rank=1, node=1, world_size=2)
    started += [agent, rank]
    rank.do("say(type='peer', name='exp', host='127.0.0.1', port=0, node=0, agent='of today')")
    rank.do("regions(3)")
    rank.bye()
    agent.end()
    assert table(tmp_path / "exp-2", "regions").height == 3
    assert list((tmp_path / "exp").iterdir()) == [older.parent]
    assert "this node's files stay in exp-2: exp, as node 0 calls the run, is another run here" in why(
        tmp_path / "exp-2", "node=00001"
    )


def test_an_agent_whose_run_was_removed_writes_nothing_into_the_next_one(tmp_path, started):
    """The first agent has recorded a rank, and another one nothing yet, when their folder is removed and used again."""
    agents = [Agent(tmp_path / "run"), Agent(tmp_path / "run")]
    rank = Rank(agents[0].name)
    started += [*agents, rank]
    rank.do("regions(3)")
    wait_for(lambda: live_rows(tmp_path / "run", "regions") == 3)
    (tmp_path / "run").rename(tmp_path / "removed")  # at once: agents write meanwhile
    after = Agent(tmp_path / "run")
    next_rank = Rank(after.name)
    started += [after, next_rank]
    next_rank.do("regions(5)")
    agents[0].process.wait(20)  # its rank need not end first
    rank.do("regions(3)")
    agents[1].end()
    next_rank.bye()
    after.end()
    assert table(tmp_path / "run", "regions").height == 5
    assert [rank["ended"] for rank in state(tmp_path / "run")["ranks"]] == [True]
    assert not [text for text in why(tmp_path / "run", "node=00000") if "no rank reported" in text]
