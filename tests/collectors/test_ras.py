"""NCCL's RAS: its two forms of answer, a server that speaks as it does, and a real job that hangs beside one."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.timeline.nccl_ras import late_ranks
from rankscope.collectors.agent import nccl_ras
from rankscope.collectors.agent.nccl_ras import Ras, address, ask, understood

SUMMARY = """\
NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  {errors}

Errors
======

"""
BEHIND = """\
Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 17
  Rank 2 has launched up to operation 16 -- GPU 2 managed by process 1002 on node 10.0.0.1

"""
SILENT = """\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 1003 on node 10.0.0.1 managing GPU 3

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 3 managed by process 1003 on node 10.0.0.1

Warnings
========

TIMEOUT
  Encountered 1 communication timeout while gathering communicator data

"""
DEAD = """\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 1001 on node 10.0.0.1 managing GPU 1 (NVML 5)

Warnings
========

"""
NONE = """\
Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different status
  3 ranks have status RUNNING
  Rank 0 has status INIT -- GPU 0 managed by process 1000 on node 10.0.0.1
  Communicator ranks have different Broadcast operation counts
  2 ranks have not launched any operations
  Rank 0 -- GPU 0 managed by process 1000 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 1001 on node 10.0.0.1
  5 ranks have launched up to operation 2

"""


def text(rest, errors="OK"):
    return SUMMARY.format(errors=errors) + rest


def as_json(pids, launched, missing=(), host="10.0.0.1"):
    """The answer of one communicator: its ranks' processes, and how many all-reduces each has launched."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    device = {"cuda_dev": 0, "nvml_dev": 0}

    def counts(count, rank):
        return {"Broadcast": 0, "AllReduce": count, "SendRecv": rank}  # transfers differ in a job that is well

    ranks = [
        {"rank": rank, "host": host, "pid": pid, **device, "status": status, "collective_counts": counts(count, rank)}
        for rank, (pid, count) in enumerate(zip(pids, launched, strict=True))
        if count is not None
    ]
    absent = [
        {"rank": rank, "host": host, "pid": pids[rank], **device}
        | {"status": {"unresponsive": True, "considered_dead": dead}}
        for rank, dead in missing
    ]
    communicator = {"hash": "0xcf264af53edbe986", "secondary_hash": "0x1:0x2", "size": len(pids)}
    communicator |= {"ranks_count": len(ranks), "missing_ranks_count": len(absent)}
    communicator |= {"ranks": ranks, "missing_ranks": absent}
    return json.dumps({"nccl_version": "2.29.2", "communicators_count": 1, "communicators": [communicator]})


def said(answer):
    """(rank in the communicator, process, operation, launched, state) of each row."""
    return [tuple(row[c] for c in ("comm_rank", "pid", "operation", "launched", "state")) for row in understood(answer)]


def test_text_names_who_differs_and_counts_the_others():
    rows = understood(text(BEHIND, "MISMATCH"))
    assert {(row["communicator"], row["size"]) for row in rows} == {("cf264af53edbe986", 4)}
    assert said(text(BEHIND)) == [(None, None, "AllReduce", 17, "running"), (2, 1002, "AllReduce", 16, "running")]
    assert said(text(SILENT)) == [(None, 1003, "", None, "unresponsive"), (3, 1003, "", None, "unresponsive")]
    assert said(text(DEAD)) == [(None, 1001, "", None, "dead")]
    assert said(text(NONE)) == [
        (None, None, "Broadcast", 0, "running"),
        (0, 1000, "Broadcast", 0, "running"),
        (1, 1001, "Broadcast", 0, "running"),
        (None, None, "Broadcast", 2, "running"),
    ]
    assert said(text("Warnings\n========\n\n")) == []  # nothing differs


def test_json_names_every_rank():
    answer = as_json([1000, 1001, 1002], [17, 16, None], missing=[(2, True)])
    assert [row for row in said(answer) if row[2] != "SendRecv"] == [
        (0, 1000, "AllReduce", 17, "running"),
        (1, 1001, "AllReduce", 16, "running"),
        (2, 1002, "", None, "dead"),
    ]


@pytest.mark.parametrize("answer", ["", "HTTP/1.1 400 Bad Request", '{"communicators": [{}]}', '{"communicat'])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises((ValueError, LookupError)):
        understood(answer)


def late(answer, *, bye=(), since_ns=0):
    """(rank, launched, most, state) of the late ranks of a run whose ranks 0-3 are the processes 1000-1003."""
    rows = [{"node": 0, "time_ns": 100, **row} for row in understood(answer)]
    numbers = {"size": pl.Int32, "comm_rank": pl.Int32, "pid": pl.Int64, "launched": pl.Int64}
    frame = pl.DataFrame(rows, schema_overrides=numbers)
    ranks = pl.DataFrame({"rank": range(4), "node": 0, "pid": range(1000, 1004)}, schema_overrides={"node": pl.Int32})
    entries = [{"rank": rank, "bye": rank in bye} for rank in range(4)]
    found = late_ranks(frame, ranks, {0: {"addresses": ["10.0.0.1"], "ranks": entries}}, since_ns)
    return found.select("rank", "launched", "most", "state").rows()


def test_late_are_those_that_launched_less_or_do_not_answer():
    four = [1000, 1001, 1002, 1003]
    assert late(text(BEHIND)) == late(as_json(four, [17, 17, 16, 17])) == [(2, 16, 17, "running")]
    assert (
        late(text(SILENT)) == late(as_json(four, [17, 17, 17, None], [(3, False)])) == [(3, None, None, "unresponsive")]
    )
    assert late(text(DEAD)) == [(1, None, None, "dead")]
    assert late(as_json(four, [17] * 4)) == []


def test_an_old_answer_another_jobs_and_that_of_a_rank_that_left_do_not_count():
    assert late(text(BEHIND), since_ns=100) == []  # rank 2 began something after it
    assert late(as_json([7, 8], [17, 16])) == []
    assert late(as_json([1000, 1001], [17, 16], host="10.0.0.2")) == []
    assert late(text(DEAD), bye=(1,)) == []


class Server(socketserver.ThreadingTCPServer):
    """RAS's listening socket: what it greets with, whether it knows JSON, and its answer."""

    daemon_threads = True
    allow_reuse_address = True
    greeting = "SERVER PROTOCOL 2"
    silent = 0  # how many connections get no greeting, as those that a stopped process takes
    knows_json = True
    heard: tuple[str, ...] = ()

    def answer(self) -> str:
        return ""


class Client(socketserver.StreamRequestHandler):
    def handle(self):
        server = self.server
        if server.silent > 0:
            server.silent -= 1
            self.rfile.read()  # until the client gives up
            return
        for line in self.rfile:
            command = line.decode().strip()
            server.heard += (command,)
            if command == "VERBOSE STATUS":
                self.wfile.write(server.answer().encode())
                return
            unknown = command == "SET FORMAT json" and not server.knows_json
            reply = server.greeting if command.startswith("CLIENT") else f"ERROR: Unknown command {command}"
            self.wfile.write((reply if unknown or command.startswith("CLIENT") else "OK").encode() + b"\n")


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Client) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield listening
        listening.shutdown()


def environ(server):
    host, port = server.server_address
    return {"NCCL_RAS_ADDR": f"{host}:{port}"}


def asked(server, still_s=20.0):
    """What comes of it where the job hangs for so long."""
    question = Ras(environ(server))
    question.look(time.perf_counter_ns() - round(still_s * 1e9), 0)
    if question._thread:
        question._thread.join()
    question.finish()
    return [rows for _, _, rows in iter_queue(question.answers)], list(iter_queue(question.gaps))


def iter_queue(queue):
    while not queue.empty():
        yield queue.get()


def test_json_is_asked_for_and_text_is_taken_from_older_versions(server):
    server.answer = lambda: as_json([1, 2], [5, 5])
    server.silent = 2  # two connections go to a process that is stopped
    assert ask(*server.server_address) == as_json([1, 2], [5, 5])
    assert server.heard == ("CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS")
    server.knows_json, server.answer = False, lambda: text(BEHIND)
    assert ask(*server.server_address) == text(BEHIND)


def test_a_job_that_moves_is_not_asked_about_and_one_that_hangs_once(server):
    server.answer = lambda: as_json([1, 2], [5, 5])
    assert asked(server, still_s=9.0) == ([], [])
    assert server.heard == ()
    question = Ras(environ(server))
    since = time.perf_counter_ns() - 20_000_000_000
    question.look(since, 5_000_000_000)  # five of its steps are longer
    assert server.heard == ()
    for last_ns in (since, since, since + 1):  # the same again, and another within a minute
        question.look(last_ns, 0)
        question.finish()
    assert [len(rows) for _, _, rows in iter_queue(question.answers)] == [4]


@pytest.mark.parametrize(
    ("greeting", "silent", "answer", "why"),
    [
        ("SSH-2.0-OpenSSH", 0, "", "what answers is not RAS: 'SSH-2.0-OpenSSH'"),
        ("SERVER PROTOCOL 2", 99, "", "it is silent"),
        ("SERVER PROTOCOL 2", 0, "Killed\n", "its answer, run/ras.txt, is not understood"),
        ("SERVER PROTOCOL 2", 0, '{"communicators": 3}', "its answer, run/ras.txt, is not understood"),
    ],
)
def test_garbage_and_silence_are_one_line(server, monkeypatch, greeting, silent, answer, why):
    monkeypatch.setattr(nccl_ras, "_GREETING_S", 0.05)
    server.greeting, server.silent, server.answer = greeting, silent, lambda: answer
    answers, (gap,) = asked(server)
    assert not any(answers)
    assert why in gap
    assert "\n" not in gap


def test_without_a_listener_nccl_is_too_old():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        question = Ras({"NCCL_RAS_ADDR": f"127.0.0.1:{free.getsockname()[1]}"})
    question.look(time.perf_counter_ns() - 20_000_000_000, 0)
    question.finish()
    (gap,) = iter_queue(question.gaps)
    assert "NCCL is older than 2.24" in gap


def test_address_is_nccls_own():
    assert address({}) == ("localhost", 28028)
    assert address({"NCCL_RAS_ADDR": "[::1]:28100"}) == ("::1", 28100)
    assert address({"NCCL_RAS_ADDR": ":28100"}) == ("localhost", 28100)
    assert address({"NCCL_RAS_ENABLE": "0"}) is None


HANGS = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=13))
for step in range(6):
    if (dist.get_rank(), step) == (1, 5):
        time.sleep(60)
    dist.all_reduce(torch.ones(8))
"""


@pytest.mark.real_job
def test_a_job_that_hangs_is_asked_about_and_the_report_has_the_answer_of_ras(server, tmp_path):
    """A real gloo job whose rank 1 does not come to the sixth all-reduce; RAS says that it has launched five."""
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
    run, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(textwrap.dedent(HANGS))

    def answer():
        entries = json.loads((run / "run" / "node=00000.json").read_text())["ranks"]
        pids = [entry["pid"] for entry in sorted(entries, key=lambda entry: entry["rank"])]
        return as_json(pids, [6, 5], host="127.0.0.1")

    server.answer = answer
    tool = str(Path(sys.executable).with_name("rankscope"))
    command = [tool, "run", "--out", str(run), "--no-report", "--standalone", "--nproc-per-node", "2", str(script)]
    job = subprocess.run(
        command, env=os.environ | environ(server) | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=150
    )
    assert job.returncode != 0  # gloo gave up
    assert server.heard.count("VERBOSE STATUS") == 1
    assert json.loads((run / "run" / "ras.txt").read_text())["nccl_version"] == "2.29.2"
    assert rankscope.open(run).table("ras").collect()["launched"].drop_nulls().max() == 6
    done = subprocess.run([tool, "report", str(run), "--json", "-"], capture_output=True, check=True, timeout=120)
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["detector"], finding["ranks"]) == ("hang", [1])
    first, *others = finding["evidence"]
    assert (first["table"], first["rank"]) == ("ras", 1)
    assert first["note"] == "NCCL's RAS: has launched 5 AllReduce, others up to 6"
    assert [(seen["table"], seen["rank"]) for seen in others] == [("collectives", 0)]
