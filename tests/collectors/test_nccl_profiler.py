"""NCCL's profiler plugin, driven by a program that plays NCCL: support/nccl/driver.c has the events and their times."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import polars as pl
import pytest

import rankscope
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.timeline.nccl_durations import nccl_waits
from rankscope.collectors.agent.arrow_writer import batch_of
from rankscope.collectors.agent.ring_reader import Ring, Threads, columns_by_table
from rankscope.collectors.native import nccl_plugin
from rankscope.collectors.rank import nccl
from rankscope.collectors.schema import NCCL_ALGORITHMS, NCCL_EVENTS, NCCL_PROTOCOLS, OPS, TABLES
from rankscope.errors import NotBuilt
from support.paths import SUPPORT

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to build the plugin with")

DRIVER = SUPPORT / "nccl/driver.c"
NEWEST = 7


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert nccl_plugin.built() is None
        path = nccl_plugin.build("gcc", ("-Werror",))
        assert nccl_plugin.built() == path
        yield path


@pytest.fixture(scope="module")
def play(plugin, tmp_path_factory):
    """Play NCCL to the plugin, and give back the tables that the agent makes of its ring."""
    driver = tmp_path_factory.mktemp("driver") / "driver"
    subprocess.run(["gcc", "-O1", "-rdynamic", "-pthread", str(DRIVER), "-o", str(driver), "-ldl"], check=True)

    def play(version=NEWEST, threads=1, calls=1, **environment):
        environment = {"RANKSCOPE_AGENT": "recorded", **environment}
        command = [str(driver), str(plugin), str(version), str(threads), str(calls)]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert done.stderr.decode().splitlines()[-1] == "lost 0"
        fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
        os.write(fd, done.stdout)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        ring = Ring(fd)
        os.close(fd)
        columns = columns_by_table(ring.read(0, last=True), Threads(0))
        assert (ring.overwritten, ring.unfinished) == (0, 0)
        frames = {name: pl.from_arrow(batch_of(name, rows)) for name, rows in columns.items()}
        return frames.get("nccl_calls"), named(frames.get("nccl_events"))

    return play


def named(events):
    """With the event's name in the place of its code."""
    if events is None:
        return None
    return events.with_columns(pl.col("event").replace_strict(dict(enumerate(NCCL_EVENTS))))


@pytest.mark.parametrize("version", range(3, NEWEST + 1))
def test_every_version_of_the_interface_gives_the_same_call_and_waits(play, version):
    """The driver's send, from 9: GPU until 20, credit until 50, network until 80 and, for the second transfer, until
    100; for the third, whose data were ready by then, credit until 130 and network until 140. Version 3 has no
    credits, which it counts as waiting for the GPU, no sizes, and no size of the communicator."""
    calls, events = play(version)
    call = calls.row(0, named=True)
    assert (call["start_ns"], OPS[call["op"]], call["seq"], call["size_bytes"]) == (1005, "allreduce", 0, 4000)
    assert (NCCL_ALGORITHMS[call["algorithm"]], NCCL_PROTOCOLS[call["protocol"]], call["channels"]) == (
        "ring",
        "simple",
        2,
    )
    assert call["communicator"] == 0xF000000000000001 - (1 << 64)  # as int64
    assert (call["nccl_rank"], call["nccl_size"]) == (1, 2 if version > 3 else None)
    columns = ["start_ns", "end_ns", "gpu_wait_ns", "peer_wait_ns", "network_wait_ns", "flush_wait_ns", "size_bytes"]
    by_event = {row["event"]: tuple(row[c] for c in columns) for row in events.filter(call=1).iter_rows(named=True)}
    size = 1500 if version > 3 else None
    send = (11, 60, 60) if version > 3 else (71, None, 60)
    assert by_event == {"send": (1009, 1140, *send, None, size), "recv": (1009, 1110, 39, None, 56, 6, size)}


def test_waits_add_up_to_the_proxys_time(play):
    _, events = play(calls=50)
    waits = pl.sum_horizontal("gpu_wait_ns", "peer_wait_ns", "network_wait_ns", "flush_wait_ns")
    assert events.height == 150
    assert events.select((waits == pl.col("end_ns") - pl.col("start_ns")).all()).item()


def test_proxy_of_another_process_has_no_call_here(play):
    _, events = play()
    assert events.filter(pl.col("call").is_null()).select("event", "peer").rows() == [("send", 5)]


def test_what_is_recorded_can_be_chosen(play):
    calls, events = play(RANKSCOPE_NCCL_EVENTS="calls,kernels")
    assert calls.height == 1
    assert events.select("event", "start_ns", "end_ns", "call", "device_ns").rows() == [("kernel", 1020, 1150, 1, 100)]
    calls, events = play(RANKSCOPE_NCCL_EVENTS="steps")
    assert calls is None
    steps = events.filter(event="send_step").sort("step")
    assert steps.select("start_ns", "end_ns", "peer_wait_ns").rows() == [
        (1010, 1080, 30),
        (1012, 1100, 20),
        (1082, 1140, 40),
    ]


@pytest.mark.parametrize("environment", [{"RANKSCOPE_DISABLE": "gc_pauses,nccl"}, {"RANKSCOPE_DISABLE": "all"}])
def test_collector_that_is_left_off_records_nothing(play, environment):
    assert play(**environment) == (None, None)


def test_threads_lose_nothing_and_mix_nothing(play):
    """8 communicators with 500 calls each, every one with a send, a receive and a foreign send."""
    calls, events = play(threads=8, calls=500)
    assert (calls.height, events.height) == (4000, 12000)
    assert calls["call"].n_unique() == 4000
    per_communicator = calls.group_by("communicator").agg(pl.len(), pl.col("seq").n_unique().alias("seqs"))
    assert per_communicator.select("len", "seqs").unique().rows() == [(500, 500)]
    joined = calls.join(events.drop_nulls("call"), on="call", suffix="_event")
    assert joined.height == 8000
    assert joined.select((pl.col("start_ns_event") - pl.col("start_ns") == 4).all()).item()


# Proxy operations of 16,384 + 100 that never stop, then one that does after another has: what has no place is counted.
# NCCL never ends those of CollNet: after some seconds their places are taken by others.
HANGING = """
import ctypes as c, struct, sys, time
library = c.CDLL(sys.argv[1])
plugin = (c.c_void_p * 6).in_dll(library, "ncclProfiler_v7")
start = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)(plugin[2])
stop = c.CFUNCTYPE(c.c_int, c.c_void_p)(plugin[3])
library.rankscope_nccl_ring()
event = c.create_string_buffer(136)
struct.pack_into("<QQi4x", event, 0, 8, 0, 0)
handles = []
for _ in range(16384 + 100):
    handle = c.c_void_p()
    start(None, c.addressof(handle), c.addressof(event))
    handles.append(handle.value)
print(library.rankscope_nccl_lost(), handles.count(None))
stop(handles[0])
start(None, c.addressof(handle), c.addressof(event))
print(library.rankscope_nccl_lost(), handle.value == handles[0])
time.sleep(2.1)
handles = set()
for _ in range(1000):
    start(None, c.addressof(handle), c.addressof(event))
    handles.add(handle.value)
print(library.rankscope_nccl_lost(), library.rankscope_nccl_never_ended(), len(handles - {None}))
"""


def test_more_at_once_than_there_is_room_for_is_counted(plugin):
    done = subprocess.run([sys.executable, "-c", HANGING, str(plugin)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["100 100", "100 True", "100 1000 1000"]


def test_own_plugin_of_the_user_is_left_alone(tmp_path):
    def elsewhere(**environment):
        return nccl_plugin.installed_elsewhere({"HOME": str(tmp_path), **environment}, root=tmp_path)

    assert elsewhere() is None
    assert elsewhere(NCCL_PROFILER_PLUGIN="inspector") == "NCCL_PROFILER_PLUGIN=inspector"
    (tmp_path / "libnccl-profiler.so").touch()
    assert elsewhere(LD_LIBRARY_PATH=f"/nowhere:{tmp_path}") == str(tmp_path / "libnccl-profiler.so")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_PROFILER_PLUGIN=/opt/theirs.so\n")
    assert elsewhere() == str(tmp_path / "etc/nccl.conf")


def test_job_finds_the_plugin_unless_the_user_has_one(plugin, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(plugin.parent.parent))
    assert nccl_plugin.settings({}) == {"NCCL_PROFILER_PLUGIN": str(plugin)}
    assert nccl_plugin.settings({"NCCL_PROFILER_PLUGIN": "inspector"}) == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert nccl_plugin.settings({}) == {}


@pytest.mark.long
def test_doctor_builds_the_plugin_and_says_where_it_is(compiled_hook, tmp_path):
    """The collectives hook in C++, which it builds too, is there."""
    shutil.copytree(compiled_hook / "rankscope/native_hook", tmp_path / "rankscope/native_hook")
    command = [sys.executable, "-m", "rankscope", "doctor", "--build", "--json"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (check,) = [check for check in json.loads(done.stdout) if check["name"] == "NCCL plugin"]
    assert check["ok"]
    path = next((tmp_path / "rankscope").glob("libnccl-profiler-rankscope-*.so"))
    assert check["detail"].partition(", for NCCL 2.")[0] == str(path)
    refused = subprocess.run(command, env=environment | {"CC": "false"}, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rankscope: the NCCL plugin was not built: false refused")


def test_missing_compiler_is_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NotBuilt, match="no C compiler"):
        nccl_plugin.build()


@pytest.mark.parametrize(
    ("version", "environment", "why"),
    [
        ((2, 28, 9), "ours", None),
        ((2, 26, 0, "suffix"), "ours", None),
        ((2, 21, 5), "ours", "NCCL 2.21.5 cannot load rankscope's profiler plugin, 2.26 can"),
        ((2, 21, 5), "", "NCCL 2.21.5 cannot load rankscope's profiler plugin, 2.26 can"),
        ((2, 28, 9), "", "NCCL's profiler plugin is not built: rankscope doctor --build"),
        ((2, 28, 9), "inspector", "NCCL has another profiler plugin: NCCL_PROFILER_PLUGIN=inspector"),
    ],
)
def test_job_whose_nccl_has_no_plugin_says_why(plugin, monkeypatch, tmp_path, version, environment, why):
    cuda = SimpleNamespace(is_initialized=lambda: True, nccl=SimpleNamespace(version=lambda: version))
    distributed = SimpleNamespace(is_initialized=lambda: True, get_backend_config=lambda: "cuda:nccl")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, distributed=distributed))
    if not environment:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(nccl_plugin.VARIABLE, str(plugin) if environment == "ours" else environment)
    said, ticks, rings = [], [], []
    nccl.start(
        SimpleNamespace(
            gap=lambda *gap: said.append(gap),
            guard=lambda name, run: run,
            on_tick=lambda tick, **_: ticks.append(tick),
            hand_over=rings.append,
        )
    )
    for tick in ticks * 2:
        tick()
    assert said == [(table, "nccl", why) for table in nccl.collector.tables if why]
    assert len(rings) == (environment == "ours")


# A rank that plays NCCL's own part: it loads the plugin as NCCL does, and begins one all-gather of 10 halves.
SCRIPT = """
import ctypes as c, os, struct
import torch.distributed as dist
dist.init_process_group("gloo")
plugin = (c.c_void_p * 6).in_dll(c.CDLL(os.environ["NCCL_PROFILER_PLUGIN"]), "ncclProfiler_v7")
context, handle, mask = c.c_void_p(), c.c_void_p(), c.c_int()
init = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_void_p, c.c_char_p, c.c_int, c.c_int, c.c_int, c.c_void_p)
init(plugin[1])(c.addressof(context), 77, c.addressof(mask), b"world", 1, 1, 0, None)
func, datatype = c.create_string_buffer(b"AllGather"), c.create_string_buffer(b"ncclFloat16")
event = c.create_string_buffer(136)
struct.pack_into("<QQi4xQQQQQi4xQ", event, 0, 2, 0, 0, 5, c.addressof(func), 0, 0, 10, 0, c.addressof(datatype))
c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)(plugin[2])(context, c.addressof(handle), c.addressof(event))
dist.destroy_process_group()
"""


@pytest.mark.real_job
def test_job_leaves_nccls_calls_in_its_run(plugin, tmp_path):
    """The launcher has NCCL load the plugin, the rank hands its ring to the agent, and the run has the call."""
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rankscope", "run", "--out", str(tmp_path / "run"), "--no-report"]
    environment = os.environ | {"XDG_CACHE_HOME": str(plugin.parent.parent)}
    job = [*command, "--standalone", "--nproc-per-node", "1", str(tmp_path / "script.py")]
    done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    call = rankscope.open(tmp_path / "run").table("nccl_calls").collect().row(0, named=True)
    assert (call["op"], call["communicator"], call["seq"], call["size_bytes"]) == ("allgather", 77, 5, 20)
    assert (call["rank"], call["nccl_size"], call["algorithm"], call["protocol"]) == (0, 1, "unknown", "unknown")


def table(name, *rows, **defaults):
    """Rows of a table; columns that a test does not name are null, or 0 where they must not be."""
    schema = schema_of(name)
    nullable = {column.name for column in TABLES[name].columns if column.nullable}
    base = {c: None if c in nullable else "" if t == pl.String else 0 for c, t in schema.items()}
    return pl.DataFrame([{c: (base | defaults | row)[c] for c in schema} for row in rows], schema=schema)


def test_waits_are_those_of_the_operation_that_torch_made():
    """Torch's all-reduce 7 lasts from 100 to 120 on the host; NCCL begins one at 110 within it, and one at 130, which a
    CUDA graph replays. Of the first, two channels sent, waiting 5 and 7 for the network; the second has no proxies."""
    collectives = table("collectives", {"number": 7, "start_ns": 100, "issued_ns": 120, "op": "allreduce"})
    calls = table("nccl_calls", {"call": 1, "start_ns": 110}, {"call": 2, "start_ns": 130}, op="allreduce")
    waits = {"call": 1, "event": "send", "gpu_wait_ns": 1, "peer_wait_ns": 0, "size_bytes": 100}
    events = table(
        "nccl_events",
        waits | {"start_ns": 111, "end_ns": 117, "network_wait_ns": 5},
        waits | {"start_ns": 112, "end_ns": 120, "network_wait_ns": 7},
    )
    found = nccl_waits(collectives, calls, events)
    columns = ["call", "number", "end_ns", "sent_bytes", "gpu_wait_ns", "peer_wait_ns", "network_wait_ns"]
    assert found.select(columns).rows() == [(1, 7, 120, 200, 2, 0, 12), (2, None, None, None, None, None, None)]
    assert found["flush_wait_ns"].to_list() == [None, None]


def test_call_that_torchs_operation_cannot_be_has_no_number():
    """While torch broadcasts, another library of the process begins an all-gather."""
    collectives = table("collectives", {"number": 7, "start_ns": 100, "issued_ns": 120, "op": "broadcast"})
    calls = table("nccl_calls", {"call": 1, "start_ns": 110, "op": "allgather"})
    found = nccl_waits(collectives, calls, table("nccl_events"))
    assert found.select("call", "number").rows() == [(1, None)]
