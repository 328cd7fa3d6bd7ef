"""torch's Flight Recorder: asked while the job runs, by a server that answers as torch's does and by torch's own."""

from __future__ import annotations

import fcntl
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler

import polars as pl
import pytest

import rankscope
from rankscope.analysis.timeline.nccl_durations import nccl_durations
from rankscope.collectors import worker_server
from rankscope.collectors.agent import flight_recorder
from rankscope.collectors.rank.flight_recorder import NCCL_RECORDER

HANDLER = "fr_trace_json?backend=nccl2"


class Server(socketserver.ThreadingUnixStreamServer):
    """Torch's worker server, with the entries of the moment in the recorder of one backend."""

    daemon_threads = True
    handler = HANDLER
    entries: tuple[dict, ...] = ()

    def handle_error(self, request, client_address):
        pass  # the client has gone


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        if self.path != f"/handler/{self.server.handler}":
            self.send_error(404)
            return
        body = json.dumps({"version": "2.10", "entries": self.server.entries}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return ""

    def log_message(self, *_):
        pass


def entry(number, state="completed", duration_ms=None, **other):
    """An all-reduce as NCCL's recorder has it; the operation `number` is the one `number` + 1 of its group."""
    known = {"record_id": number, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"}
    known |= {"collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False, "state": state}
    known |= {"time_created_ns": time.time_ns(), "retired": state == "completed"}
    return known | other if duration_ms is None else known | {"duration_ms": duration_ms} | other


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A server in a rank's folder, and a recorder that asks it every 0.05 s."""
    monkeypatch.setattr(flight_recorder, "SHORTEST_S", 0.05)
    monkeypatch.setattr(flight_recorder, "LONGEST_S", 0.05)
    folder = tmp_path / "rank"
    folder.mkdir()
    (folder / worker_server.GATE).touch()
    server = Server(str(folder / worker_server.SOCKET), Answer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    recorder = flight_recorder.FlightRecorder(str(folder), HANDLER)
    yield server, recorder, folder
    recorder.finish()
    server.shutdown()
    server.server_close()


def rows(recorder, count):
    """As soon as so many rows have come."""
    found = []
    while len(found) < count:
        found += recorder.rows.get(timeout=10)
    return [(row["record"], row["seq"], row["duration_ns"]) for row in found]


def test_every_operation_is_a_row_once_it_has_ended(asked):
    """Operation 1 is still running when it is first seen; later the recorder has dropped 0, which was seen."""
    server, recorder, folder = asked
    server.entries = (entry(0, duration_ms=1.5), entry(1, "started"))
    recorder.start()
    assert rows(recorder, 1) == [(0, 1, 1_500_000)]
    server.entries = (entry(1, duration_ms=2.0), entry(2, duration_ms=0.25), entry(3, "scheduled"))
    assert rows(recorder, 2) == [(1, 2, 2_000_000), (2, 3, 250_000)]
    (folder / worker_server.LAST).write_text(json.dumps({"entries": [entry(3, "started"), entry(4, duration_ms=1.0)]}))
    recorder.finish()
    assert rows(recorder, 2) == [(3, 4, None), (4, 5, 1_000_000)]
    assert recorder.gaps.empty()
    assert not folder.exists()


def test_duration_that_comes_after_the_end_is_waited_for(asked):
    """Torch says that an operation has completed before its watchdog has measured how long it took."""
    server, recorder, _ = asked
    server.entries = (entry(0), entry(1, retired=False), entry(2, duration_ms=1.0))
    recorder.start()
    assert rows(recorder, 1) == [(2, 3, 1_000_000)]
    server.entries = (entry(1, duration_ms=2.0), entry(2, duration_ms=1.0))
    assert sorted(rows(recorder, 2)) == [(0, 1, None), (1, 2, 2_000_000)]
    assert recorder.gaps.empty()


def test_a_job_that_pauses_is_asked_as_often_as_before(asked, monkeypatch):
    """A first step may take minutes; the next ones then fill the recorder within seconds."""
    monkeypatch.setattr(flight_recorder, "LONGEST_S", 60.0)
    server, recorder, _ = asked
    server.entries = tuple(entry(number, duration_ms=1.0) for number in range(10))
    recorder.start()
    assert len(rows(recorder, 10)) == 10
    time.sleep(0.5)  # several answers in which nothing is new
    server.entries = (*server.entries, entry(10, duration_ms=1.0))
    assert rows(recorder, 1) == [(10, 11, 1_000_000)]


def test_parts_of_a_coalesced_operation_end_with_it(asked):
    """Torch says of the parts of a batch of sends and receives never more than that they were scheduled."""
    server, recorder, _ = asked
    batch = {"collective_seq_id": 4, "p2p_seq_id": 7}
    parts = [entry(n, "scheduled", is_p2p=True, profiling_name=f"nccl:send 0->{n}", **batch) for n in (0, 1)]
    server.entries = (*parts, entry(2, "started", profiling_name="nccl:coalesced", **batch))
    recorder.start()
    time.sleep(0.2)
    assert recorder.rows.empty()
    server.entries = (*parts, entry(2, duration_ms=1.0, profiling_name="nccl:coalesced", **batch), entry(3, "started"))
    assert rows(recorder, 3) == [(0, 7, None), (1, 7, None), (2, 4, 1_000_000)]
    server.entries = (entry(3, duration_ms=1.0),)
    assert rows(recorder, 1) == [(3, 4, 1_000_000)]
    assert recorder.gaps.empty()


def test_no_query_while_the_rank_captures_a_cuda_graph(asked):
    server, recorder, folder = asked
    server.entries = (entry(0, duration_ms=1.0),)
    with (folder / worker_server.GATE).open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        recorder.start()
        time.sleep(0.3)
        assert recorder.rows.empty()
    assert rows(recorder, 1) == [(0, 1, 1_000_000)]
    assert recorder.gaps.empty()


def test_what_was_overwritten_is_counted(asked):
    """Operations 1 to 9 came and went between two answers, and operation 0 had not ended."""
    server, recorder, _ = asked
    server.entries = (entry(0, "started"),)
    recorder.start()
    time.sleep(0.2)
    server.entries = (entry(10),)
    assert rows(recorder, 1) == [(10, 11, None)]
    why, count = recorder.gaps.get(timeout=5)
    assert "TORCH_FR_BUFFER_SIZE" in why
    assert count == 10


def test_server_without_a_recorder_is_reported(asked, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_GOING_S", 0)
    server, recorder, _ = asked
    server.handler = "fr_trace_json"
    recorder.start()
    why, count = recorder.gaps.get(timeout=5)
    assert f"{HANDLER} answered 404" in why
    assert count is None


def test_recorder_that_is_off_is_reported(asked):
    _, recorder, _ = asked
    recorder.start()
    time.sleep(0.2)
    recorder.finish()
    why, count = recorder.gaps.get(timeout=5)
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 turns it on" in why
    assert count is None


# On gloo torch's recorder has everything but times, and the collector would not ask it: here it is made to.
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
from rankscope.collectors.in_rank import session
from rankscope.collectors.rank import flight_recorder
dist.all_reduce(torch.ones(4))
flight_recorder.serve(session._session.emit, "fr_trace_json")
session._session.emit._stops["flight_recorder"] = flight_recorder.stop
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


# From torch 2.15 on the recorder of NCCL's operations is filled by a hook of their group, and asked for by the name of
# their backend. So is that of a group of the backend that does nothing.
HOOKED = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import FlightRecorderHook
from torch.testing._internal.distributed import fake_pg
dist.init_process_group("gloo")
from rankscope.collectors.in_rank import session
from rankscope.collectors.rank import flight_recorder
group = dist.new_group(backend="fake")
hook = FlightRecorderHook.attach(group, [0])
flight_recorder.serve(session._session.emit, flight_recorder.recorder_of(torch, group))
session._session.emit._stops["flight_recorder"] = flight_recorder.stop
dist.all_reduce(torch.ones(4))
for _ in range(3):
    dist.all_reduce(torch.ones(4), group=group)
dist.destroy_process_group()
"""


def recorded(tmp_path, script):
    """What torch's recorder and the dispatcher have of this job of one rank, and the groups."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "rankscope", "run", "--out", str(tmp_path / "run"), "--no-report"]
    job = [*command, "--standalone", "--nproc-per-node", "1", str(tmp_path / "script.py")]
    done = subprocess.run(job, env=os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trace = rankscope.open(tmp_path / "run")
    records = trace.table("flight_records").sort("record").collect()
    return records, trace.table("collectives").sort("start_ns").collect(), trace.table("groups").collect()


@pytest.mark.real_job
def test_jobs_recorder_is_in_its_run(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
    handlers = getattr(torch._C._distributed_c10d, "_get_handler_names", list)()
    if "fr_trace_json" not in handlers:
        pytest.skip("this torch does not record gloo's operations: 2.5 to 2.8")
    records, dispatched, groups = recorded(tmp_path, SCRIPT)
    assert records.select("group", "seq", "name", "duration_ns").rows() == [
        ("0", seq, "gloo:all_reduce", None) for seq in range(1, 5)
    ]
    joined = nccl_durations(dispatched, groups, records)
    assert joined["number"].to_list() == dispatched["number"].to_list()


# Without a GPU both calls fail, after what is done before them.
CAPTURES = """
import contextlib, fcntl
with flight_recorder._folder.joinpath("gate").open() as gate:
    for call in ("capture_begin", "capture_begin", "capture_end", "capture_end", "refused"):
        torch.cuda.is_current_stream_capturing = lambda: call != "refused"
        with contextlib.suppress(Exception):
            getattr(torch.cuda.CUDAGraph, call.replace("refused", "capture_begin"))(None)
        try:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(gate, fcntl.LOCK_UN)
            print("open")
        except BlockingIOError:
            print("shut")
dist.destroy_process_group()
"""


@pytest.mark.real_job
def test_gate_is_shut_while_graphs_are_captured(tmp_path):
    """The second capture begins before the first has ended; the last one is refused."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("dist.destroy_process_group()\n", CAPTURES))
    command = [sys.executable, "-m", "rankscope", "run", "--out", str(tmp_path / "run"), "--no-report"]
    job = [*command, "--standalone", "--nproc-per-node", "1", str(tmp_path / "script.py")]
    done = subprocess.run(job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split() if line in ("open", "shut")] == [
        "shut",
        "shut",
        "shut",
        "open",
        "open",
    ]


@pytest.mark.real_job
def test_recorder_that_is_off_is_a_gap(tmp_path):
    """As NCCL's is in torch 2.5, where nothing sets `TORCH_NCCL_TRACE_BUFFER_SIZE`."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
    if not hasattr(torch._C._distributed_c10d, "_dump_nccl_trace"):
        pytest.skip("this torch was built without NCCL")
    records, _, _ = recorded(tmp_path, SCRIPT.replace("fr_trace_json", NCCL_RECORDER))
    assert records.is_empty()
    (gap,) = (gap for gap in rankscope.open(tmp_path / "run").gaps() if gap.table == "flight_records")
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 turns it on" in gap.why


def test_recorder_of_a_backend_is_asked_for_by_its_name(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
    if [int(number) for number in torch.__version__.split(".")[:2]] < [2, 15]:
        pytest.skip("before torch 2.15 NCCL has one recorder, which has no name")
    records, dispatched, groups = recorded(tmp_path, HOOKED)
    (group,) = groups.filter(pl.col("backend") == "fake")["group_id"]
    assert records.select("seq", "name").rows() == [(seq, "fake:all_reduce") for seq in range(1, 4)]
    joined = nccl_durations(dispatched, groups, records)
    assert joined["number"].to_list() == dispatched.filter(pl.col("group_id") == group)["number"].to_list()


def test_duration_is_that_of_the_operation_that_was_enqueued_then():
    """Torch's operation 7 in group "0" is under way on the host from 1000 to 1050 µs, and 8 follows at 1060; the
    recorder took one at 1020 µs in that group, one at 1030 µs in another, and one at 2000 µs, which belongs to none. At
    3000 and 3100 µs a send and a receive, 9 and 10, are enqueued that begin together: the recorder times the whole."""
    us = 1000
    dispatched = pl.DataFrame(
        {
            "rank": [0] * 4,
            "number": [7, 8, 9, 10],
            "group_id": [42] * 4,
            "start_ns": [1000 * us, 1060 * us, 3000 * us, 3100 * us],
            "issued_ns": [1050 * us, 1090 * us, 3050 * us, 3150 * us],
        },
        schema_overrides={"number": pl.UInt64, "rank": pl.Int32},
    )
    groups = pl.DataFrame(
        {"rank": [0, 0], "group_id": [42, 43], "name": ["0", "1"]}, schema_overrides={"rank": pl.Int32}
    )
    of_one = ("nccl:all_reduce", False)
    records = pl.DataFrame(
        [
            (0, "0", 0, 1020 * us, 1, 5, *of_one),
            (0, "1", 1, 1030 * us, 1, 6, *of_one),
            (0, "0", 2, 2000 * us, 2, 7, *of_one),
            (0, "0", 3, 3020 * us, 1, None, "nccl:send 0->1", True),
            (0, "0", 4, 3120 * us, 1, None, "nccl:recv 0<-1", True),
            (0, "0", 5, 3200 * us, 2, 9, "nccl:coalesced", False),
        ],
        schema=["rank", "group", "record", "start_ns", "seq", "duration_ns", "name", "is_p2p"],
        schema_overrides={"rank": pl.Int32},
        orient="row",
    )
    found = nccl_durations(dispatched, groups, records).sort("record")
    assert found.select("duration_ns", "number").rows() == [(5, 7), (6, None), (7, None), (9, 9), (9, 10), (9, None)]
