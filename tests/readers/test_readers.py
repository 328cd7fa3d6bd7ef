"""Readers of foreign formats: small files made here, broken ones, and real ones where they lie beside the project."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import sqlite3
import tarfile

import polars as pl
import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.readers.flight_recorder import peers
from rankscope.analysis.runs.trace import Trace
from rankscope.errors import BadInput
from support.flight_dumps import dump, write_dumps
from support.paths import DATA

US = 1_000


def whys(trace):
    return " | ".join(gap.why for gap in trace.gaps())


def refused(path):
    with pytest.raises(BadInput) as refusal:
        diagnose(Trace.open(path))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# ---------------------------------------------------------------- flight recorder


@pytest.mark.parametrize("suffix", ["", ".json"])
def test_dumps_as_pickles_and_as_json_say_the_same(tmp_path, suffix):
    """Rank 0 is in all-reduce 5 of 16 bytes, rank 1 holds nothing but its counters."""
    trace = Trace.open(write_dumps(tmp_path, dump(0), dump(1, enqueued=4, entries=False), suffix=suffix))
    assert trace.source == "flight_recorder"
    rows = trace.table("progress").select("rank", "enqueued", "completed", "seq", "op", "size_bytes").collect().rows()
    assert rows == [(0, 5, 4, 5, "allreduce", 16), (1, 4, 4, None, None, None)]
    report = diagnose(trace)
    assert [(f.detector, f.ranks) for f in report.findings] == [("hang", (1,))]
    assert report.findings[0].title == "Rank 1 does not reach allreduce number 5 of group 0"


@pytest.mark.parametrize(("after_s", "quiet_s"), [(0.5, 0.5), (600, 600), (90_000, None), (-1, None)])
def test_how_long_a_rank_was_quiet_before_its_dump_follows_from_the_date_of_the_file(tmp_path, after_s, quiet_s):
    """The last operation began at 1,000 ns of the year 2023; a copy has the date of its own making."""
    began_s = 1_700_000_000
    content = dump(0)
    content["entries"][0] |= {"time_created_ns": began_s * 10**9}
    write_dumps(tmp_path, content, dump(1, enqueued=4, entries=False))
    (file,) = tmp_path.glob("*_0")
    os.utime(file, (began_s + after_s, began_s + after_s))
    trace = Trace.open(tmp_path)
    quiet = trace.table("progress").filter(rank=0).collect()["quiet_ns"].to_list()
    assert quiet == [None if quiet_s is None else quiet_s * 10**9]
    verdict = diagnose(trace).verdict
    ran = "No verdict: the job ran when its state was saved, 500 ms after its last operation"
    assert verdict.startswith(ran if quiet_s == 0.5 else "Rank 1 does not reach allreduce number 5")


def test_the_rank_that_a_running_jobs_others_wait_for_is_said_of_its_dumps(tmp_path):
    """Rank 1 comes to each of four all-reduces 1 s after ranks 0 and 2; all end 0.1 s later."""
    contents = []
    for rank in range(3):
        content = dump(rank)
        content["pg_config"]["0"]["ranks"] = "[0, 1, 2]"
        (pending,) = content["entries"]
        ended = []
        for number in range(4):
            called_s, end_s = 2 * number + (rank == 1), 2 * number + 1.1
            times = {"time_created_ns": int(called_s * 1e9) + 1, "time_discovered_completed_ns": int(end_s * 1e9)}
            ids = {"record_id": number, "collective_seq_id": number + 1}
            ended.append(pending | ids | times | {"state": "completed", "retired": True})
        contents.append(content | {"entries": ended, "pg_status": {}})
    verdict = diagnose(Trace.open(write_dumps(tmp_path, *contents))).verdict
    assert "rank 1 arrives late: it waited 0 ns in the matched operations, the others 4.00 s to 4.00 s" in verdict


def test_parts_of_a_coalesced_operation_that_has_ended_block_no_rank(tmp_path):
    """The recorder says "scheduled" of a batch's send for good; what rank 0 waits in is the all-reduce after it."""
    content = dump(0)
    (pending,) = content["entries"]
    batch = pending | {"p2p_seq_id": 3, "collective_seq_id": 4, "time_created_ns": 500}
    send = batch | {"record_id": 7, "profiling_name": "nccl:send 0->1", "is_p2p": True}
    whole = batch | {"record_id": 8, "profiling_name": "nccl:coalesced", "state": "completed", "retired": True}
    content |= {"entries": [send, whole, pending], "pg_status": {}}
    trace = Trace.open(write_dumps(tmp_path, content, dump(1, enqueued=4, entries=False)))
    held = trace.table("progress").filter(rank=0).select("op", "seq").collect().rows()
    assert held == [("allreduce", 5)]


class Payload:
    def __reduce__(self):
        return (print, ("a dump must not be able to call anything",))


def test_dump_that_wants_to_load_a_class_is_refused(tmp_path, capsys):
    write_dumps(tmp_path, dump(0), dump(1) | {"entries": [Payload()]})
    trace = Trace.open(tmp_path)
    assert "nccl_trace_rank_1 was not read: it wants to load builtins.print" in whys(trace)
    assert "must not" not in capsys.readouterr().out
    assert trace.table("ranks").collect()["rank"].to_list() == [0]


@pytest.mark.parametrize("kept", [-40, 0])
def test_damaged_dump_is_a_gap_and_names_no_rank(tmp_path, kept):
    """Cut or empty, it says nothing about rank 1: whether rank 0 waits for it is unknown."""
    write_dumps(tmp_path, dump(0), dump(1))
    file = tmp_path / "nccl_trace_rank_1"
    file.write_bytes(file.read_bytes()[:kept])
    report = diagnose(Trace.open(tmp_path))
    said = {gap.why: gap.rank for gap in report.gaps}
    assert said["nccl_trace_rank_1 was not read: it is cut or damaged"] == 1
    assert not any("left no dump" in why for why in said)
    assert not report.findings
    (unchecked,) = [unchecked for unchecked in report.not_checked if unchecked.detector == "hang"]
    assert unchecked.why == "the state of rank 1 could not be read, and others may wait there"


def test_missing_dump_is_blamed_only_as_likely(tmp_path):
    """Rank 0 of two waits, and rank 1 left no dump: nothing else explains it."""
    report = diagnose(Trace.open(write_dumps(tmp_path, dump(0))))
    assert "1 rank of 2 left no dump: 1" in {gap.why for gap in report.gaps}
    (found,) = report.findings
    assert found.title == "Rank 1 left no state"
    assert report.verdict.startswith(f"Likely: {found.title}; 1 rank waits for it")
    assert (found.severity, found.confidence) == ("medium", "likely")


def test_entry_that_cannot_be_read_is_counted(tmp_path):
    content = dump(0)
    content["entries"].append({"process_group": 7})
    assert "1 operation of nccl_trace_rank_0 could not be read" in whys(Trace.open(write_dumps(tmp_path, content)))


def test_rank_comes_from_the_name_if_the_groups_agree_else_from_the_groups(tmp_path):
    """A dump whose groups are those of rank 1 alone is of rank 1, whatever it is called."""
    alone = {"9": {"name": "9", "desc": "alone", "ranks": [1]}}
    for name in ("dump", "dump_7"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps(dump(1) | {"pg_config": dump(1)["pg_config"] | alone}))
        assert Trace.open(folder).table("ranks").collect()["rank"].to_list() == [1]
    (tmp_path / "nameless").write_bytes(pickle.dumps(dump(0)))
    assert "its rank is unknown; end its name with the rank" in refused(tmp_path / "nameless")


def test_folder_of_several_runs_names_them(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_dumps(tmp_path / name, dump(0))
    assert "is no run, but these in it can be read: first, second; give one" in refused(tmp_path)


def test_counters_include_ends_that_the_entries_lack(tmp_path):
    trace = Trace.open(write_dumps(tmp_path, dump(0, enqueued=5, completed=5), dump(1, enqueued=5, completed=5)))
    assert trace.table("progress").collect()["seq"].null_count() == 2
    assert [healthy.detector for healthy in diagnose(trace).healthy] == ["hang"]


def test_two_dumps_of_one_rank_are_refused(tmp_path):
    write_dumps(tmp_path, dump(0))
    (tmp_path / "later_0").write_bytes(pickle.dumps(dump(0)))
    assert "two dumps of rank 0" in refused(tmp_path)


def test_peers_are_numbered_within_the_group_or_globally():
    assert peers("send 0->1", [3, 11], 3) == 11
    assert peers("recv 1<-0", [3, 11], 11) == 3
    assert peers("send 3->11", [3, 11], 3) == 11
    assert peers("recv 0<-8", list(range(16)), 0) == 8
    assert peers("send 5->6", [3, 11], 3) == -1


# ---------------------------------------------------------------- op traces and pipelines


def op_trace(**changes):
    rows = {
        "dp_rank": [0, 0],
        "stage": [0, 1],
        "rank": [0, 1],
        "step": [7, 7],
        "optype": ["forward-compute", "forward-compute"],
        "start_ts": [0.0, 0.5],
        "duration": [0.5, 0.25],
        "seq_id": [0, 0],
        "mc": [0, -1],
        "mb_id": [0, -1],
        "gmc": [0, 0],
    }
    return pl.DataFrame(rows | changes)


def test_op_trace_is_read_in_ns_with_its_steps_laid_end_to_end(tmp_path):
    both = pl.concat([op_trace(), op_trace(step=[9, 9])])
    both.write_parquet(tmp_path / "trace.parquet")
    trace = Trace.open(tmp_path)
    rows = trace.table("ops").select("rank", "step", "start_ns", "end_ns", "chunk", "microbatch").collect().rows()
    second = 1_000_000_000
    assert trace.source == "bytedance_ops"
    assert rows == [
        (0, 7, 0, second // 2, 0, 0),
        (0, 9, 3 * second // 4, 5 * second // 4, 0, 0),
        (1, 7, second // 2, 3 * second // 4, None, None),
        (1, 9, 5 * second // 4, 3 * second // 2, None, None),
    ]


def test_operations_without_a_time_are_counted_and_left_out(tmp_path):
    op_trace(duration=[0.5, float("nan")]).write_parquet(tmp_path / "a.parquet")
    trace = Trace.open(tmp_path)
    assert [gap.count for gap in trace.gaps()] == [1]
    assert len(trace.table("ops").collect()) == 1
    op_trace(duration=[-1.0, None]).write_parquet(tmp_path / "a.parquet")
    assert "holds no operation" in refused(tmp_path)
    op_trace().drop("stage").write_parquet(tmp_path / "a.parquet")
    assert "format" in refused(tmp_path / "a.parquet")


def stage(start_ms):
    return {"total": 9.0, "fwd_start": [start_ms], "fwd_end": [start_ms + 1], "bwd_start": [5.0], "bwd_end": [7.5]}


def test_pipeline_files_are_read_and_what_is_broken_is_reported(tmp_path):
    (tmp_path / "pp_rank_0.json").write_text(json.dumps({"1": stage(0.0), "2": stage(0.5)}))
    (tmp_path / "pp_rank_1.json").write_text(json.dumps({"1": stage(1.0), "2": stage(1.5) | {"bwd_end": []}}))
    (tmp_path / "pp_rank_2.json").write_text(json.dumps({"1": stage(2.0)})[:-9])
    (tmp_path / "config.json").write_text('{"world_size": 4, "pp_size": 4, "vp_size": 1}')
    trace = Trace.open(tmp_path)
    first = trace.table("ops").filter(pl.col("rank") == 1, pl.col("step") == 1).collect()
    assert first.select("name", "start_ns", "end_ns").rows() == [
        ("forward-compute", 1_000_000, 2_000_000),
        ("backward-compute", 5_000_000, 7_500_000),
    ]
    said = whys(trace)
    assert "pp_rank_1.json: iteration 2 has no whole bwd times" in said
    assert "pp_rank_2.json was not read: it is cut or no JSON" in said
    assert "no file of stage 2,3" in said


def test_unknown_operations_of_a_pipeline_are_refused(tmp_path):
    file = tmp_path / "pp_rank_0.json"
    file.write_text(json.dumps({"1": stage(0.0) | {"recompute_start": [8.0], "recompute_end": [9.0]}}))
    assert "operations 'recompute'" in refused(file)


@pytest.mark.parametrize("config", ['{"pp_size": 1000000000000}', '{"vp_size": 1000000000000}', '{"world_size": -1}'])
def test_impossible_sizes_of_a_pipeline_are_refused_in_one_line(tmp_path, config):
    (tmp_path / "pp_rank_0.json").write_text(json.dumps({"1": stage(0.0)}))
    (tmp_path / "config.json").write_text(config)
    assert "config.json names rank or world size" in refused(tmp_path)


def test_an_impossible_number_of_a_stage_is_refused(tmp_path):
    (tmp_path / "pp_rank_999999999999.json").write_text(json.dumps({"1": stage(0.0)}))
    assert "names rank or world size 999999999999" in refused(tmp_path)


def test_chunks_of_an_interleaved_pipeline_are_stages_in_the_order_of_megatron(tmp_path):
    """Two ranks with two chunks each: forwards go through chunk 0 twice, then through chunk 1; backwards reversed."""
    times = {f"{kind}_{side}": [n + end for n in range(4)] for kind in ("fwd", "bwd") for side, end in ENDS}
    for rank in range(2):
        (tmp_path / f"pp_rank_{rank}.json").write_text(json.dumps({"1": times}))
    (tmp_path / "config.json").write_text('{"world_size": 2, "pp_size": 2, "vp_size": 2}')
    ops = Trace.open(tmp_path).table("ops").filter(pl.col("rank") == 1).sort("name", "start_ns", descending=True)
    assert ops.select("name", "start_ns", "stage", "chunk", "seq").collect().rows() == [
        *(("forward-compute", ns * 1_000_000, stage, stage // 2, seq) for ns, stage, seq in CHUNKS[::-1]),
        *(("backward-compute", ns * 1_000_000, 4 - stage, 1 - stage // 2, seq) for ns, stage, seq in CHUNKS[::-1]),
    ]


ENDS = (("start", 0), ("end", 0.5))
CHUNKS = ((0, 1, 0), (1, 1, 1), (2, 3, 0), (3, 3, 1))  # start in ms, stage, microbatch on rank 1


# ---------------------------------------------------------------- Nsight Systems


def nsight(path, *, kernels, runtime=(), extra=""):
    """An export. A kernel is (start, end, device, process, correlation, name), a stream too if it has one of its own.

    A call is (start, end, thread, …).
    """
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL'), (3, 'launch');
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
                start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER, streamId INTEGER,
                correlationId INTEGER, demangledName INTEGER
            );
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
                start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER
            );
            """
            + extra
        )
        rows = [(*row[:6], *(row[6:] or [7])) for row in kernels]
        columns = "start, end, deviceId, globalPid, correlationId, demangledName, streamId"
        database.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 3)", runtime)
    return path


def process(pid):
    return pid << 24


def test_two_gpus_in_one_export_are_two_ranks(tmp_path):
    """Processes 50 and 51 use the same correlation ids; device 1 is process 50's."""
    kernels = [(10, 20, 1, process(50), 5, 1), (12, 30, 0, process(51), 5, 2), (40, 30, 0, process(51), 6, 1)]
    runtime = [(1, 2, process(50) + 50, 5), (3, 4, process(51) + 99, 5)]
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=runtime))
    rows = trace.table("kernels").select("rank", "start_ns", "end_ns", "work", "device").collect().rows()
    assert rows == [(0, 12, 30, "communication", 0), (1, 10, 20, "compute", 1)]
    launches = trace.table("launches").select("rank", "start_ns", "thread", "correlation").collect().rows()
    assert launches == [(0, 3, 65535, 5), (1, 1, 0, 5)]
    said = whys(trace)
    for part in (
        "2 GPUs: their ranks are taken in the order of the devices",
        "1 row of CUPTI_ACTIVITY_KIND_KERNEL have no times, or end before they start",
        "no TARGET_INFO_GPU",
        "no META_DATA_EXPORT",
        "no NVTX_EVENTS",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("job7_0", "job7_2", "job7_10"), (0, 2, 10)),
        (("a_rank3_x", "b_rank1_y"), (3, 1)),
        (("node1", "node10", "node2_late"), (0, 2, 1)),
    ],
)
def test_exports_of_one_gpu_each_are_the_ranks_that_their_names_say_or_counted_by_name(tmp_path, names, ranks):
    """Each begins at another time; they are given as a shell sorts them."""
    files = [tmp_path / f"{name}.sqlite" for name in sorted(names)]
    for file in files:
        nsight(file, kernels=[(names.index(file.stem), 20, 0, process(50), 5, 1)])
    trace = Trace.open(files)
    starts = dict(trace.table("kernels").select("rank", "start_ns").collect().rows())
    assert starts == {rank: start for start, rank in enumerate(ranks)}
    assert ("numbered in the order of their names" in whys(trace)) == (names[0] == "node1")


def test_a_gpu_on_which_a_process_only_copies_is_no_rank(tmp_path):
    """The process of GPU 1 has cleared something on GPU 0."""
    extra = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER);"
    extra += f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (1, 2, 0, {process(51)}), (3, 4, 1, {process(51)});"
    kernels = [(10, 20, 0, process(50), 5, 1), (12, 30, 1, process(51), 5, 1)]
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, extra=extra))
    rows = trace.table("kernels").select("rank", "start_ns", "device").collect().sort("rank", "start_ns").rows()
    assert rows == [(0, 10, 0), (1, 3, 1), (1, 12, 1)]
    assert "copies on GPUs on which their process computes nothing" in whys(trace)


def test_export_data_under_its_other_name_and_memory_copies(tmp_path):
    extra = """
        CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT);
        INSERT INTO EXPORT_META_DATA VALUES ('EXPORT_PRODUCT_VERSION', '2021.3');
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100');
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, copyKind INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (20, 25, 0, 1);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);
        INSERT INTO NVTX_EVENTS VALUES (1, 9, 59, 'aten::add, op_id = 3', NULL), (2, NULL, 59, 'open', NULL);
    """
    with sqlite3.connect(nsight(tmp_path / "a.sqlite", kernels=[(10, 20, 0, None, 5, 1)], extra=extra)) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")
    report = diagnose(trace := Trace.open(tmp_path))
    assert report.environment["nsys"] == "2021.3"
    assert trace.table("ranks").collect()["device"].to_list() == ["H100"]
    assert trace.table("regions").collect()["name"].to_list() == ["aten::add"]
    assert [(d.busy_ns, d.compute_ns, d.memory_ns) for d in report.device] == [(15, 10, 5)]
    assert "1 NVTX range did not end in the capture" in whys(trace)


def test_copies_and_fills_of_an_export_have_their_bytes(tmp_path):
    """A copy of 1 MB, two whose size is none, a fill of 4 kB, and a kernel."""
    extra = """
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, copyKind INTEGER, bytes);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (20, 25, 0, 1, 1000000), (30, 35, 0, 1, 'many');
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (40, 45, 0, 1, -1);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, bytes INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (50, 55, 0, 4096);
    """
    with sqlite3.connect(nsight(tmp_path / "a.sqlite", kernels=[(10, 20, 0, None, 5, 1)], extra=extra)) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")
    rows = Trace.open(tmp_path).table("kernels").sort("start_ns").select("name", "bytes").collect().rows()
    copies = [("Memcpy HtoD", 1_000_000), ("Memcpy HtoD", None), ("Memcpy HtoD", None)]
    assert rows == [("gemm", None), *copies, ("Memset", 4096)]


def test_export_without_device_work_and_a_report_that_was_not_exported_say_what_to_do(tmp_path):
    assert "holds no device work: record with" in refused(nsight(tmp_path / "empty.sqlite", kernels=[]))
    (tmp_path / "a.nsys-rep").write_bytes(b"not to be read")
    assert "nsys export --type sqlite" in refused(tmp_path / "a.nsys-rep")


def all_reduces(starts, lasts_ns=100_000, every_ns=5_000_000, count=40, late_ns=0, late=None):
    """Kernels of GPUs by their first start: all end an operation together, `late` begins each `late_ns` later."""
    rows = []
    for i in range(count):
        for pair, begin in starts:
            end = begin + i * every_ns + late_ns + lasts_ns
            for gpu in pair:
                own = begin + i * every_ns + (late_ns if gpu == late else 0)
                rows.append((own, end, gpu, process(50 + gpu), 2 * i, 2))
                rows.append((end, end + every_ns // 2, gpu, process(50 + gpu), 2 * i + 1, 1))
    return rows


def test_groups_of_an_export_are_the_gpus_whose_operations_overlap_and_end_together(tmp_path):
    """GPUs 0 and 2 reduce in the gaps of 1 and 3: the same kernels in the same order, never at one time."""
    kernels = all_reduces([((0, 2), 0), ((1, 3), 700_000)])
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels))
    groups = trace.table("groups").select("rank", "members").collect().sort("rank").rows()
    assert groups == [(0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")]
    assert "2 groups inferred from order, names and ends" in whys(trace)
    assert trace.table("collectives").collect()["op"].unique().to_list() == ["allreduce"]


def test_gpus_that_keep_in_step_by_one_group_are_not_taken_for_one_of_their_other_groups(tmp_path):
    """GPUs 0 and 1, 2 and 3 reduce on stream 7, 0 and 2, 1 and 3 on stream 8, each second pair 0.1 ms early or late."""
    kernels = []
    for pair, stream, off in (((0, 1), 7, 0), ((2, 3), 7, 100_000), ((0, 2), 8, 0), ((1, 3), 8, 100_000)):
        for i in range(40):
            begin = i * 5_000_000 + (1_000_000 if stream == 8 else 0) + off * (-1) ** (i // 2)
            kernels += [(begin, begin + 300_000, gpu, process(50 + gpu), 2 * i + stream, 2, stream) for gpu in pair]
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels))
    groups = trace.table("groups").collect()
    assert sorted(groups["members"].unique()) == ["0,1", "0,2", "1,3", "2,3"]


def test_operations_of_two_groups_on_one_stream_are_taken_apart_by_their_names(tmp_path):
    """GPUs 0 and 1 reduce, and each gathers with a GPU of its own: GPU 0 on two streams, GPU 1 on one."""
    kernels = []
    for i in range(40):
        for gpus, at, name in (((0, 1), 0, 2), ((0, 2), 1_000_000, 4), ((1, 3), 2_500_000, 4)):
            begin = 5_000_000 * i + at + 1_000 * (i % 7)
            for gpu in gpus:
                stream = 8 if name == 4 and gpu == 0 else 7
                kernels.append((begin, begin + 300_000, gpu, process(50 + gpu), 10 * i + name, name, stream))
    extra = "INSERT INTO StringIds VALUES (4, 'ncclDevKernel_AllGather_RING_LL');"
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, extra=extra))
    groups = trace.table("groups").collect()
    assert sorted(groups["members"].unique()) == ["0,1", "0,2", "1,3"]


def test_the_gpu_of_an_export_that_others_wait_for_is_named(tmp_path):
    """GPU 1 begins each of 40 reductions 1 ms late, in a capture of 40 times 5 ms: GPU 0 waits 40 ms for it."""
    kernels = all_reduces([((0, 1), 0)], late_ns=1_000_000, late=1)
    report = diagnose(Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels)))
    assert {wait.rank: wait.waited_ns for wait in report.waits} == {0: 40_000_000, 1: 0}
    assert [(f.detector, f.ranks) for f in report.findings] == [("slow_rank", (1,))]


def one_f_one_b(stage, stages, microbatches):
    """A stage's step of a 1F1B schedule: forward, backward, and the stages with which it exchanges something."""
    before = [stage - 1] if stage else []
    after = [stage + 1] if stage + 1 < stages else []
    warm = stages - 1 - stage
    turns = [*before, "forward", *after] * warm + before
    turns += ["forward", *after, "backward", *before] * (microbatches - warm)
    return turns + [*after, "backward", *before] * warm


def pipeline(forward_ns, microbatches, *, steps=3, lanes=1, slow=()):
    """Kernels of a pipeline by GPU, of which stage `s` takes `forward_ns[s]`, backward twice as long.

    Each GPU exchanges what it computed on one stream, 9: a kernel ends on both within 5 us. `lanes` GPUs of a stage are
    in step by a reduction on stream 8 after each forward and backward. Those that are `slow` take a third longer.
    """
    chance, stages = random.Random(5), len(forward_ns)
    turns = [[*one_f_one_b(stage, stages, microbatches), "update"] for stage in range(stages)]
    kernels = {gpu: [] for gpu in range(stages * lanes)}

    def add(gpu, begin, end, name, stream):
        kernels[gpu].append((round(begin), round(end), gpu, process(50 + gpu), len(kernels[gpu]), name, stream))

    at = dict.fromkeys(kernels, 1_000_000.0)
    left = [turn * steps for turn in turns]
    while any(left):
        for stage, todo in enumerate(left):
            gpus = range(stage * lanes, stage * lanes + lanes)
            while todo and isinstance(todo[0], str):
                work = todo.pop(0)
                times = {"forward": 1, "backward": 2, "update": 0.2}[work]
                took_ns = forward_ns[stage] * times * chance.uniform(0.95, 1.05)
                for gpu in gpus:
                    begin, each_ns = (
                        at[gpu],
                        took_ns * chance.uniform(0.999, 1.001) * (4 / 3 if gpu in slow else 1) / 20,
                    )
                    for n in range(20):
                        add(
                            gpu, begin + n * each_ns, begin + (n + 1) * each_ns - 1_000, 5 if work == "update" else 1, 7
                        )
                    at[gpu] = begin + 20 * each_ns
                if lanes > 1:
                    end = max(at[gpu] for gpu in gpus) + 50_000
                    for gpu in gpus:
                        add(gpu, at[gpu], end + chance.uniform(0, 3_000), 2, 8)
                        at[gpu] = end + chance.uniform(3_000, 9_000)
            other = todo[0] if todo else None
            if other is not None and left[other] and left[other][0] == stage and other > stage:
                todo.pop(0)
                left[other].pop(0)
                for lane in range(lanes):
                    both = [stage * lanes + lane, other * lanes + lane]
                    end = max(at[gpu] for gpu in both) + 200_000 * chance.uniform(0.95, 1.05)
                    for gpu in both:
                        begin, at[gpu] = at[gpu], end + chance.uniform(0, 5_000)
                        add(gpu, begin, at[gpu], 4, 9)
    return kernels


def pipeline_exports(folder, kernels, files, *, extra=""):
    """Write these GPUs' kernels, `files` being the GPUs, host and clock (by how much it is late, unix time) of each."""
    for number, (gpus, host, late_ns, unix_ns) in enumerate(files):
        began = f"""
            INSERT INTO StringIds VALUES (4, 'ncclDevKernel_SendRecv'), (5, 'multi_tensor_apply_kernel<FusedAdam>');
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
            INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', '{host}');
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, systemClockNs INTEGER);
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES ({unix_ns}, NULL);
        """
        rows = [(begin - late_ns, end - late_ns, *rest) for gpu in gpus for begin, end, *rest in kernels[gpu]]
        nsight(folder / f"part{number}.sqlite", kernels=rows, extra=began + extra)
    return folder


UNIX_NS = 1_700_000_000 * 10**9
ONE_FILE = [((0, 1, 2, 3), "a", 0, UNIX_NS)]
ONE_HOST = [((gpu,), "a", gpu * 10**9, UNIX_NS + gpu * 10**9 + 20_000 * gpu) for gpu in range(4)]
TWO_HOSTS = [((0, 1), "a", 0, UNIX_NS), ((2, 3), "b", -7 * 10**9, UNIX_NS - 7 * 10**9 + 2_500_000)]


@pytest.mark.parametrize("files", [ONE_FILE, ONE_HOST, TWO_HOSTS], ids=["one file", "one host", "two hosts"])
def test_stages_of_a_pipeline_that_use_one_stream_are_found_by_what_each_two_exchange(tmp_path, files):
    """Stage 3 takes 4 ms for each forward, the others 3 ms; clocks of files are 20 us, those of hosts 2.5 ms apart."""
    trace = Trace.open(pipeline_exports(tmp_path, pipeline([3e6, 3e6, 3e6, 4e6], 16), files))
    groups = trace.table("groups").collect()
    assert sorted(groups["members"].unique()) == ["0,1", "1,2", "2,3"]
    assert "whose counterpart on another GPU is not in these exports" not in whys(trace)
    report = diagnose(trace)
    assert [(found.detector, found.ranks) for found in report.findings] == [("stage_imbalance", (3,))]


def test_gpus_of_one_stage_that_keep_in_step_are_not_taken_for_those_that_it_exchanges_with(tmp_path):
    """Each of three stages has two GPUs, which end what they exchange within some us of each other."""
    files = [(tuple(range(6)), "a", 0, UNIX_NS)]
    trace = Trace.open(pipeline_exports(tmp_path, pipeline([1e6] * 3, 8, lanes=2), files))
    groups = trace.table("groups").collect()
    assert sorted(groups["members"].unique()) == ["0,1", "0,2", "1,3", "2,3", "2,4", "3,5", "4,5"]


def test_the_slow_gpu_of_a_stage_is_named_by_what_the_other_gpus_of_its_stage_take(tmp_path):
    """Of the two GPUs of each of three stages, GPU 3 of stage 1 computes a third longer."""
    files = [(tuple(range(6)), "a", 0, UNIX_NS)]
    kernels = pipeline([2e6] * 3, 12, lanes=2, slow=(3,))
    report = diagnose(Trace.open(pipeline_exports(tmp_path, kernels, files)))
    assert [(finding.detector, finding.ranks) for finding in report.findings] == [("slow_rank", (3,))]


@pytest.mark.parametrize(("microbatches", "found"), [(32, []), (4, ["pipeline_bubble"])])
def test_a_pipeline_in_an_export_whose_stages_are_even_waits_by_design(tmp_path, microbatches, found):
    trace = Trace.open(pipeline_exports(tmp_path, pipeline([2e6] * 4, microbatches), ONE_FILE))
    report = diagnose(trace)
    assert [finding.detector for finding in report.findings] == found


def test_a_pipeline_of_which_a_stage_is_not_in_the_exports_has_no_groups(tmp_path):
    """Stage 2 exchanges with stage 3 as often as with stage 1, and its kernels do not say with which."""
    files = [((0, 1, 2), "a", 0, UNIX_NS)]
    trace = Trace.open(pipeline_exports(tmp_path, pipeline([2e6] * 4, 8), files))
    assert trace.table("groups").collect().is_empty()


def test_what_ranges_of_nccl_say_of_sends_and_receives_names_the_other_gpu(tmp_path):
    """Every second kernel of GPU 0 sends, and GPU 1 has no ranges."""
    kernels = pipeline([2e6, 2e6], 8)
    sent = [row for row in kernels[0] if row[5] == 4]
    ranges = [(row[0] - 1_000, row[0] + 1_000, ("ncclSend", "ncclRecv")[number % 2]) for number, row in enumerate(sent)]
    values = ", ".join(f"({begin}, {end}, 59, '{said}', {process(50) + 50})" for begin, end, said in ranges)
    extra = "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);"
    extra += f"INSERT INTO NVTX_EVENTS VALUES {values};"
    trace = Trace.open(pipeline_exports(tmp_path, kernels, [((0, 1), "a", 0, UNIX_NS)], extra=extra))
    rows = (
        trace.table("collectives").select("rank", "op", "peer").collect().sort("rank", "op").unique(maintain_order=True)
    )
    assert rows.rows() == [(0, "send", 1), (0, "recv", 1), (1, "send", 0), (1, "recv", 0)]


@pytest.mark.parametrize(
    ("kernel", "op"), [("ncclDevKernel_SendRecv", "alltoall"), ("ncclDevKernel_Generic", "unknown")]
)
def test_what_several_gpus_exchange_at_once_is_an_all_to_all(tmp_path, kernel, op):
    kernels = [(*row[:5], 4 if row[5] == 2 else 1) for row in all_reduces([((0, 1, 2, 3), 0)], late_ns=10**6, late=1)]
    extra = f"INSERT INTO StringIds VALUES (4, '{kernel}');"
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, extra=extra))
    assert trace.table("groups").collect()["members"].unique().to_list() == ["0-3"]
    assert trace.table("collectives").collect()["op"].unique().to_list() == [op]


@pytest.mark.parametrize(
    ("hosts", "since", "nodes"),
    [
        (("a", "a"), ((1_000, 100), (1_700, 800)), [0, 0]),  # the second began 700 ns later
        (("a", "b"), ((1_000, 100), (1_700, 800)), [0, 1]),
        (("a", "a"), ((1_000, 100), (10**18, 800)), [0, 1]),  # another machine with that name
        (("a", "a"), ((1_000, "NULL"), (1_700, "NULL")), [0, 0]),  # before systemClockNs was written
        (("a", "a"), ((1_000, "NULL"), (1_700, 800)), [0, 1]),
        (("a", "a"), (None, None), [0, 1]),
    ],
    ids=["one host", "two hosts", "started at other times", "unix time", "not one version", "not said"],
)
def test_exports_of_one_host_share_its_clock(tmp_path, hosts, since, nodes):
    """Device 1 begins each of 40 reductions 1 ms late. Times in a file count from 0 or 30 ns when its capture began.

    Without a clock in common it is open which of the reductions, one every 5 ms, are one.
    """
    for rank, (host, began) in enumerate(zip(hosts, since, strict=True)):
        extra = f"""
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
            INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', '{host}');
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, systemClockNs INTEGER);
        """
        extra += f"INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES ({began[0]}, {began[1]});" if began else ""
        extra += (
            f"CREATE TABLE ANALYSIS_DETAILS (startTime INTEGER); INSERT INTO ANALYSIS_DETAILS VALUES ({30 * rank});"
        )
        later = (700 - 30) * rank if began else 0
        kernels = [
            (begin - later, end - later, *rest)
            for begin, end, gpu, *rest in (
                (*row[:3], *row[2:]) for row in all_reduces([((0, 1), 0)], late_ns=10**6, late=1)
            )
            if gpu == rank
        ]
        nsight(tmp_path / f"rank{rank}.sqlite", kernels=kernels, extra=extra)
    trace = Trace.open(tmp_path)
    assert trace.table("ranks").collect()["node"].to_list() == nodes
    found = [(finding.detector, finding.ranks) for finding in diagnose(trace).findings]
    assert found == ([("slow_rank", (1,))] if nodes == [0, 0] else [])
    starts = dict(trace.table("kernels").group_by("rank").agg(pl.col("start_ns").min()).collect().rows())
    assert starts == {0: 0, 1: 1_000_000 if nodes == [0, 0] else 1_000_000 - later}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("iteration {}", "named ranges"),
        ("ProfilerStep#{}", "named ranges"),
        ("Optimizer.step#SGD.step, op_id = {}", "optimizer"),
    ],
)
def test_ranges_of_an_export_give_its_steps_and_the_time_that_they_wait_for_input(tmp_path, name, source):
    """40 steps of 5 ms: a reduction of 0.1 ms, 2.5 ms of work, and of the 2.4 ms after it 2 ms for the next batch."""
    events = [(n * 5_000_000 + 1, n * 5_000_000 + 2_900_000, name.format(n)) for n in range(40)]
    events += [(end, end + 2_000_000, f"enumerate(DataLoader)#Iter.__next__, op_id = {end}") for _, end, _ in events]
    values = ", ".join(f"({begin}, {end}, 59, '{said}', {process(50) + 50})" for begin, end, said in events)
    extra = "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);"
    extra += f"INSERT INTO NVTX_EVENTS VALUES {values};"
    kernels = all_reduces([((0,), 0)])
    calls = [(begin, begin + 10, process(50) + 50, correlation) for begin, *_, correlation, _ in kernels]
    report = diagnose(Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls, extra=extra)))
    assert (report.steps.source, report.steps.mean_ns) == (source, pytest.approx(5_000_000, rel=0.02))
    found, host = report.findings
    assert (host.detector, host.lost_ns_per_step) == ("host_bound", pytest.approx(400_000, rel=0.05))
    assert (found.detector, found.lost_ns_per_step) == ("input_stall", pytest.approx(2_000_000, rel=0.05))


@pytest.mark.parametrize(
    ("own", "around", "op"),
    [("ncclSend", None, "send"), ("ncclSend", "nccl:all_to_all, op_id = 3", "alltoall"), (None, None, "allreduce")],
)
def test_ranges_of_torch_and_else_of_nccl_itself_say_what_a_kernel_does(tmp_path, own, around, op):
    """The host launches each kernel 2 us after it called NCCL for it, and torch calls NCCL."""
    kernels = all_reduces([((0,), 0)])
    ranges = [(name, before) for name, before in ((own, 1_000), (around, 2_000)) if name]
    events = [(begin - before, begin + before, name) for begin, *_ in kernels for name, before in ranges]
    values = ", ".join(f"({begin}, {end}, 59, '{said}', {process(50) + 50})" for begin, end, said in events)
    extra = "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);"
    extra += f"INSERT INTO NVTX_EVENTS VALUES {values};" if events else ""
    calls = [(begin, begin + 10, process(50) + 50, correlation) for begin, *_, correlation, _ in kernels]
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls, extra=extra))
    ops = dict(trace.table("collectives").group_by("op").len().collect().rows())
    assert ops[op] >= 40


@pytest.mark.parametrize("runtime", [True, False], ids=["launches", "no launches"])
def test_steps_of_an_export_without_ranges_end_with_the_optimizers_kernels(tmp_path, runtime):
    """8 steps of 5 ms: 40 kernels of 0.1 ms and 3 of the optimizer with one between them; 20 kernels evaluate once.

    Many tensors are copied and zeroed in each step, by kernels of the same name otherwise.
    """
    adam, copy, zero = (
        f"void multi_tensor_apply_kernel<TensorListMetadata<{n}>, {functor}>"
        for n, functor in ((4, "FusedAdamMathFunctor<float>"), (2, "CopyFunctor<float>"), (1, "ZeroFunctor<float>"))
    )
    names = [4, *[1] * 20, 5, *[1] * 20, 6, 1, 6, 6]  # 46 kernels
    kernels, at = [], 0
    for step in range(8):
        for name in [*names, *([1] * 20 if step == 3 else [])]:
            kernels.append((at, at + 100_000, 0, process(50), len(kernels), name))
            at += 100_000
    calls = [(begin - 5_000, begin - 1_000, process(50) + 50, correlation) for begin, *_, correlation, _ in kernels]
    extra = f"INSERT INTO StringIds VALUES (4, '{zero}'), (5, '{copy}'), (6, '{adam}');"
    report = diagnose(
        Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls if runtime else (), extra=extra))
    )
    assert (report.steps.source, report.steps.count) == ("optimizer's kernels", 8)
    assert report.steps.median_ns == pytest.approx(4_600_000, abs=10_000)
    assert "nothing names the steps: they end where the kernels of the optimizer do" in {gap.why for gap in report.gaps}


def test_a_rank_whose_host_stalls_costs_what_a_replay_without_the_stall_saves_where_others_compute_meanwhile(tmp_path):
    """In each of 6 steps GPU 2 has nothing to do for 15 ms, then all compute 20 ms, and 4 times 5 ms for a bucket.

    The other GPUs reach their first reduction of 1.5 ms when GPU 2 has 15 ms left until its own, and compute on: of
    these they wait 10.5 ms without computing, and more of the reductions comes after what they compute.
    """
    stall, begin, kernels, calls = 15_000_000, 1_000_000, [], []

    def add(gpu, start, ns, launched, name, stream):
        calls.append((launched, launched + 10, process(50 + gpu) + 50 + gpu, len(kernels)))
        kernels.append((start, start + ns, gpu, process(50 + gpu), len(kernels), name, stream))

    for _ in range(6):
        own = [begin + (stall if gpu == 2 else 0) for gpu in range(3)]
        launched = [at - (5_000 if gpu == 2 else 500_000) for gpu, at in enumerate(own)]
        reduced = 0
        for bucket in range(5):
            for gpu in range(3):
                for _ in range(20 if bucket == 0 else 5):
                    add(gpu, own[gpu], 1_000_000, launched[gpu], 1, 7)
                    own[gpu] += 1_000_000
                    launched[gpu] += 10
            if bucket:
                starts = [max(at, reduced) for at in own]
                reduced = max(starts) + 1_500_000
                for gpu in range(3):
                    add(gpu, starts[gpu], reduced - starts[gpu], launched[gpu], 2, 8)
                    launched[gpu] += 10
        for gpu in range(3):
            add(gpu, reduced, 1_000_000, launched[gpu], 4, 7)
        begin = reduced + 1_000_000
    extra = "INSERT INTO StringIds VALUES (4, 'multi_tensor_apply_kernel<FusedAdam>');"
    report = diagnose(Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls, extra=extra)))
    found = report.findings[0]
    assert (found.detector, found.ranks) == ("slow_rank", (2,))
    assert found.lost_ns_per_step == pytest.approx(stall, rel=0.05)
    assert found.gain_fraction * report.steps.mean_ns == pytest.approx(stall, rel=0.05)


def test_exposed_communication_needs_no_ranges(tmp_path):
    """A reduction of 0.4 ms after each 0.9 ms of work, with nothing beside it; the capture is the step."""
    kernels = [
        (at, at + length, gpu, process(50), 10 * n + gpu, name, 7 if name == 1 else 8)
        for n in range(120)
        for gpu in range(2)
        for at, length, name in ((1_500_000 * n, 900_000, 1), (1_500_000 * n + 1_000_000, 400_000, 2))
    ]
    calls = [(begin, begin + 10, process(50) + 50, correlation) for begin, _, _, _, correlation, *_ in kernels]
    report = diagnose(Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls)))
    assert [finding.detector for finding in report.findings][:1] == ["exposed_communication"]
    assert report.findings[0].lost_fraction == pytest.approx(400 / 1500, abs=0.02)


@pytest.mark.parametrize(("lasts_ns", "found"), [(2_500_000, True), (1_200_000, False)])
def test_a_group_of_an_export_that_is_slower_than_another_one_is_named_though_no_size_is_known(
    tmp_path, lasts_ns, found
):
    """GPUs 0 and 1 reduce in 1 ms, 2 and 3 in 2.5: of each 5 ms they wait 1.5 longer."""
    kernels = all_reduces([((0, 1), 0)], lasts_ns=1_000_000) + all_reduces([((2, 3), 200_000)], lasts_ns=lasts_ns)
    calls = [(begin - 10, begin - 5, process(50 + gpu) + 50 + gpu, number) for begin, _, gpu, _, number, _ in kernels]
    report = diagnose(Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels, runtime=calls)))
    slow = [finding for finding in report.findings if finding.detector == "low_bandwidth"]
    assert [finding.ranks for finding in slow] == ([(2, 3)] if found else [])
    for finding in slow:
        assert "(ranks 2,3) takes 2.5 times as long as the same ones in other groups" in finding.title
        assert finding.lost_ns_per_step == pytest.approx(40 * 1_500_000, rel=0.02)  # the capture is the step


def test_a_gpu_that_communicates_alone_in_an_export_has_no_group(tmp_path):
    kernels = all_reduces([((0,), 0)])
    trace = Trace.open(nsight(tmp_path / "a.sqlite", kernels=kernels))
    assert trace.table("groups").collect().is_empty()
    assert "communication kernels whose counterpart on another GPU is not in these exports" in whys(trace)


# ---------------------------------------------------------------- NCCL


def inspector(rank, *, start=None, comm="0xa", ranks=2, sn=1, pid=None, coll="AllReduce"):
    times = {
        "coll_start_ts": start,
        "coll_stop_ts": (start or 0) + 1,
        "kernel_events": [{"channel_id": 0, "kernel_start_ts": start, "kernel_stop_ts": 500}],
    }
    return {
        "header": {"id": comm, "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "h", "pid": pid or 100 + rank},
        "coll_perf": {"coll": coll, "coll_sn": sn, "coll_msg_size_bytes": 64, "coll_exec_time_us": 9}
        | ({"event_trace_ts": times} if start else {}),
    }


def write_lines(path, *records):
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def test_inspector_with_times_shows_which_ranks_waited(tmp_path):
    """Rank 0 starts at 100 µs, rank 1 at 400; both end at 500: rank 0 waited 300 µs."""
    for rank, start in ((0, 100), (1, 400)):
        write_lines(tmp_path / f"{rank}.log", inspector(rank, start=start), "{broken")
    report = diagnose(trace := Trace.open(tmp_path))
    assert [(w.rank, w.waited_ns) for w in report.waits] == [(0, 300 * US), (1, 0)]
    assert "1 line of 0.log could not be read" in whys(trace)


def test_operations_are_numbered_together_where_nccl_counts_each_kind_by_itself(tmp_path):
    """All-gather 1, reduce-scatter 1, all-gather 2, reduce-scatter 2; rank 1's log begins with the second of these."""
    calls = [("AllGather", 1, 100), ("ReduceScatter", 1, 200), ("AllGather", 2, 300), ("ReduceScatter", 2, 400)]
    for rank in range(2):
        logged = [inspector(rank, start=start + rank, sn=sn, coll=coll) for coll, sn, start in calls[rank:]]
        write_lines(tmp_path / f"{rank}.log", *logged)
    rows = Trace.open(tmp_path).table("collectives").sort("rank", "start_ns").select("rank", "op", "seq").collect()
    assert rows.rows() == [
        *((0, op, seq) for seq, op in enumerate(["allgather", "reduce_scatter"] * 2)),
        *((1, op, seq) for seq, op in [(1, "reduce_scatter"), (2, "allgather"), (3, "reduce_scatter")]),
    ]


def test_inspector_without_times_says_what_to_set(tmp_path):
    trace = Trace.open(write_lines(tmp_path / "a.log", inspector(0)))
    assert "no start times for 1 operation: set NCCL_INSPECTOR_DUMP_VERBOSE=1" in whys(trace)
    assert "collectives" not in trace.tables()


def test_ranks_of_a_smaller_communicator_are_those_of_their_processes(tmp_path):
    """Ranks 0 and 1 of communicator b are processes 101 and 103: ranks 1 and 3 of the largest."""
    world = [inspector(rank, start=10, ranks=4) for rank in range(4)]
    small = [inspector(0, start=20, comm="0xb", pid=101), inspector(1, start=30, comm="0xb", pid=103)]
    stray = inspector(0, start=40, comm="0xc", pid=999)
    trace = Trace.open(write_lines(tmp_path / "a.log", *world, *small, stray))
    groups = trace.table("groups").filter(pl.col("name") == "0xb").collect()
    assert groups.select("rank", "members").rows() == [(1, "1,3"), (3, "1,3")]
    assert "1 operation are of processes outside the largest communicator" in whys(trace)


def test_example_profiler_writes_no_json_and_is_read_all_the_same(tmp_path):
    """Values without quotes; the end of the kernel, 0, was not seen."""

    def event(name, cat, ph, ts, args=""):
        return f'{{"name": "{name}", "cat": "{cat}", "ph": "{ph}", "id": 0, "pid": 9, "tid": 1, "ts": {ts}{args}}},'

    said = ', "args": {"CommHash": 77, "Rank": 0, "Peer": 1, "Count": 4, "Datatype": ncclFloat32, "Stream": 0x26}'
    trace = Trace.open(
        write_lines(
            tmp_path / "a.json",
            "[",
            event("Send", "P2P_API", "b", 0.0, said),
            event("Send", "P2P", "b", 12.5, said),
            event("KernelCh", "GPU", "e", 0.0),
            event("Send", "P2P", "e", 20.25),
            "{}]",
        )
    )
    rows = trace.table("collectives").select("rank", "peer", "op", "start_ns", "end_ns", "size_bytes", "dtype")
    assert rows.collect().rows() == [(0, 1, "send", 12_500, None, 16, "float32")]


# ---------------------------------------------------------------- execution traces


def test_execution_trace_is_read_where_it_has_times_and_refused_where_it_has_none(tmp_path):
    nodes = [{"id": 1, "name": "aten::add", "attrs": []}, {"id": 2, "name": "aten::mul", "ts": 5, "dur": 2}]
    file = tmp_path / "et_rank3.json"
    file.write_text(json.dumps({"schema": "1.0.2-chakra.0.0.4", "nodes": nodes}))
    trace = Trace.open(file)
    assert trace.table("regions").select("rank", "name", "start_ns", "end_ns").collect().rows() == [
        (3, "aten::mul", 5_000, 7_000)
    ]
    assert "1 of the 2 nodes of et_rank3.json carry no times" in whys(trace)
    file.write_text(json.dumps({"schema": "1.0.2-chakra.0.0.4", "nodes": nodes[:1]}))
    with tarfile.open(tmp_path / "packed.tgz", "w:gz") as archive:
        archive.add(file, "et_rank3.json")
    for path in (file, tmp_path / "packed.tgz"):
        assert "carry no times; record a torch.profiler trace beside it" in refused(path)


# ---------------------------------------------------------------- all of them, broken


def small_files(folder):
    """One good file of each format."""
    write_dumps(folder, dump(0))
    op_trace().write_parquet(folder / "ops.parquet")
    (folder / "pp_rank_0.json").write_text(json.dumps({"1": stage(0.0)}))
    nsight(folder / "nsight.sqlite", kernels=[(10, 20, 0, process(50), 5, 1)])
    write_lines(folder / "inspector.log", inspector(0, start=100), inspector(0, start=200, sn=2))
    (folder / "et.json").write_text(json.dumps({"schema": "1", "nodes": [{"id": 2, "name": "a", "ts": 5, "dur": 2}]}))
    return sorted(folder.iterdir())


def test_broken_files_of_every_format_are_read_in_part_or_refused_in_one_line(tmp_path):
    """Cut anywhere, or with some bytes overwritten: never anything but `BadInput`."""
    (tmp_path / "good").mkdir()
    chance = random.Random(0)
    for good in small_files(tmp_path / "good"):
        Trace.open(good).gaps()
        content = good.read_bytes()
        broken = tmp_path / good.name
        for trial in range(40):
            damaged = bytearray(content)
            if trial % 2:
                del damaged[chance.randrange(len(damaged)) :]
            else:
                for _ in range(chance.randint(1, 8)):
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            broken.write_bytes(damaged)
            with contextlib.suppress(BadInput):
                trace = Trace.open(broken)
                for name in trace.tables():
                    trace.table(name).collect()
                trace.gaps()
        broken.write_bytes(b"")
        assert "is empty" in refused(broken)


# ---------------------------------------------------------------- real files


@pytest.mark.needs_data
@pytest.mark.parametrize(
    ("name", "source", "ranks"),
    [
        ("flight_recorder/nvrx/lock_gil_1st", "flight_recorder", 16),
        ("ops/bytedance-st", "bytedance_ops", 8),
        ("pipeline/primus-pp8", "primus_pipeline", 8),
        ("nsys/mfu_2gpu_before.sqlite", "nsight", 2),
        ("nccl_profiler/minimal-profiler-allreduce.jsonl", "nccl_log", 4),
        ("nccl_profiler/nccl-example-profiler-p2p.json", "nccl_log", 4),
    ],
)
def test_real_files_are_recognised(name, source, ranks):
    trace = Trace.open(DATA / name)
    assert (trace.source, len(trace.table("ranks").collect())) == (source, ranks)


@pytest.mark.needs_data
def test_healthy_nsight_files_give_no_finding_and_their_idle_time():
    for name, idle in (("healthy_1pct", 0.0099), ("healthy_judged_1pct", 0.0094)):
        report = diagnose(Trace.open(DATA / "nsys" / f"{name}.sqlite"))
        assert report.findings == ()
        assert [d.idle_ns / d.window_ns for d in report.device] == [pytest.approx(idle, abs=5e-5)]


@pytest.mark.needs_data
def test_real_nsight_file_of_two_gpus_says_what_it_lacks():
    report = diagnose(Trace.open(DATA / "nsys" / "mfu_2gpu_before.sqlite"))
    assert [d.communication_ns > 0 for d in report.device] == [True, True]
    said = " | ".join(gap.why for gap in report.gaps)
    assert "it has no TARGET_INFO_GPU" in said
    assert "holds 2 GPUs" in said
    assert not any("record_shapes" in check.why for check in report.not_checked)


@pytest.mark.needs_data
def test_bytes_of_a_real_nsight_file_are_all_that_it_says():
    """1,020 copies of 8,046,134,544 bytes and 269 fills of 4 bytes each."""
    kernels = Trace.open(DATA / "nsys" / "mfu_2gpu_before.sqlite").table("kernels").collect()
    by_kind = kernels.filter(pl.col("work") == "memory").group_by(fill=pl.col("name") == "Memset")
    moved = by_kind.agg(pl.len(), pl.col("bytes").sum()).sort("fill")
    assert moved.rows() == [(False, 1020, 8_046_134_544), (True, 269, 1076)]


@pytest.mark.needs_data
def test_real_nccl_logs_show_which_ranks_waited_where_they_have_ends():
    """Four GPUs of one process, launched one after the other from 3 to 0: rank 0's kernel does not wait."""
    waits = diagnose(Trace.open(DATA / "nccl_profiler" / "minimal-profiler-allreduce++.jsonl")).waits
    assert [round(w.waited_ns / 1e6) for w in waits] == [0, 5, 9, 14]
    example = Trace.open(DATA / "nccl_profiler" / "nccl-example-profiler-p2p.json")
    assert len(example.table("collectives").collect()) == 8
    assert example.table("collectives").collect()["end_ns"].null_count() == 8
    assert "358 lines" in whys(example)


@pytest.mark.needs_data
def test_real_execution_trace_has_no_times():
    assert "263 of the 263 nodes" in refused(DATA / "chakra")
