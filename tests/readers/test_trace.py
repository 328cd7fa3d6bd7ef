"""Opening run folders: whole, cut, merged, and everything that is not one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from rankscope.analysis.readers.native.arrow_files import Within, read_rows
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.agent.arrow_writer import write_sealed
from rankscope.collectors.schema import DEVICE_WORK
from rankscope.errors import BadInput
from support.run_folder import COLLECTIVE, REGION, whys, write, write_rank, write_run


def test_names_and_codes_are_resolved_and_a_whole_run_has_no_gap(tmp_path):
    write_run(tmp_path)
    for rank in (0, 1):
        write_rank(tmp_path, rank)
        write(tmp_path, "regions", f"rank={rank}", [{**REGION, "start_ns": 10, "end_ns": 20}])
    trace = Trace.open(tmp_path)
    regions = trace.table("regions").select("rank", "node", "attempt", "kind", "name", "start_ns").collect()
    assert regions.rows() == [(0, 0, 0, "gc", "gen 0", 10), (1, 0, 0, "gc", "gen 1", 10)]
    assert trace.run[0]["state"] == "closed"
    assert trace.tables() == ("ranks", "regions", "strings")
    assert "regions" in trace
    assert "collectives" not in trace
    assert trace.table("collectives").collect().shape[0] == 0
    assert trace.gaps() == []


def test_an_end_that_came_late_is_joined_and_one_that_never_came_is_a_gap(tmp_path):
    write_run(tmp_path)
    write_rank(tmp_path, 0, world=1)
    rows = [{**COLLECTIVE, "start_ns": n, "end_ns": None, "number": n} for n in (1, 2)]
    write(tmp_path, "collectives", "rank=0", rows)
    write(tmp_path, "completions", "rank=0", [{"end_ns": 50, "number": 2}])
    trace = Trace.open(tmp_path)
    assert trace.table("collectives").select("number", "end_ns", "op").collect().rows() == [
        (1, None, "allreduce"),
        (2, 50, "allreduce"),
    ]
    assert [(g.rank, g.count, g.why) for g in trace.gaps()] == [(0, 1, "the end of 1 collective was never seen")]


def test_a_file_that_was_written_before_a_column_was_added_opens_beside_a_new_one(tmp_path):
    """Rank 0's kernels have no column `bytes`, as in runs that were recorded before there was one."""
    write_run(tmp_path)
    row = {"start_ns": 10, "end_ns": 20, "name_id": 1, "work": DEVICE_WORK.index("memory")}
    for rank in (0, 1):
        write_rank(tmp_path, rank)
        path = write(tmp_path, "kernels", f"rank={rank}", [{**row, "bytes": 4096}])
        if rank == 0:
            old = pa.ipc.open_file(str(path)).read_all().drop_columns("bytes")
            with pa.ipc.new_file(str(path), old.schema) as file:
                file.write_table(old)
    trace = Trace.open(tmp_path)
    assert trace.table("kernels").select("rank", "work", "bytes").collect().rows() == [
        (0, "memory", None),
        (1, "memory", 4096),
    ]
    assert trace.gaps() == []


def two_batches(root: Path) -> Path:
    first, second = ({**REGION, "start_ns": start, "end_ns": start + 10} for start in (10, 30))
    return write(root, "regions", "rank=0", [first], [second])


def test_a_file_cut_at_any_byte_gives_its_whole_batches(tmp_path):
    path = two_batches(tmp_path)
    whole = path.read_bytes()
    seen = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        table, problem = read_rows(path, closed=True)
        assert problem, length
        seen.append(table.num_rows if table else 0)
    assert sorted(seen) == seen
    assert set(seen) == {0, 1, 2}


def test_rows_within_a_time_are_read_from_the_batches_that_hold_them(tmp_path):
    """Each way of reading gives the same rows: first, again, when the file was replaced, and while it is written."""
    at = [*range(0, 9000, 2), 9000, 9000, 9000]

    def rows(times: list[int]) -> pa.Table:
        return pa.table({"start_ns": pa.array(times, pa.int64()), "number": pa.array(range(len(times)), pa.int64())})

    def read(path: Path, begin: int, end: int) -> list[int]:
        table, problem = read_rows(path, closed=True, within=Within("start_ns", begin, end))
        assert problem is None or path.name == "live.arrow"
        return table["start_ns"].to_pylist()

    write_sealed(tmp_path, "", rows(at))
    (path,) = tmp_path.iterdir()
    batches = pa.ipc.open_file(path)
    edge = batches.get_batch(1)["start_ns"][0].as_py()
    sink, live = pa.BufferOutputStream(), tmp_path / "live.arrow"
    pa.ipc.new_file(sink, rows(at).schema).write_table(rows(at), max_chunksize=1000)
    live.write_bytes(sink.getvalue().to_pybytes())  # no footer yet
    spans = [(0, 9000), (edge - 2, edge), (edge, edge), (9000, 9000), (9001, 20000), (-5, -1), (101, 200)]
    for begin, end in (*spans, *spans):
        wanted = [time for time in at if begin <= time <= end]
        assert read(path, begin, end) == read(live, begin, end) == wanted, (begin, end)
    path.unlink()
    write_sealed(tmp_path, "", rows([0, *at]))
    assert read(path, 0, 3) == [0, 0, 2]


def test_a_cut_file_is_read_as_far_as_it_is_good_and_is_a_gap(tmp_path):
    write_run(tmp_path)
    write_rank(tmp_path, 0, world=1)
    path = two_batches(tmp_path)
    whole = path.read_bytes()
    for length in (0, 3, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        trace = Trace.open(tmp_path)
        assert tuple(trace.table("regions").collect()["start_ns"]) in ((), (10,), (10, 30))
        assert [(g.table, g.rank) for g in trace.gaps()] == [("regions", 0)]


@pytest.mark.parametrize("table", ["ranks", "strings"])
def test_cut_names_and_ranks_do_not_stop_the_reader(tmp_path, table):
    write_run(tmp_path)
    write_rank(tmp_path, 0, world=1)
    write(tmp_path, "regions", "rank=0", [{**REGION, "start_ns": 10, "end_ns": 20}])
    path = tmp_path / table / "rank=00000" / "a0-part-0000.arrow"
    path.write_bytes(path.read_bytes()[:100])
    trace = Trace.open(tmp_path)
    expected = "#1" if table == "strings" else "gen 0"
    assert trace.table("regions").select("name", "node").collect().rows() == [(expected, 0)]
    assert any(gap.table == table for gap in trace.gaps())


def test_a_part_being_written_is_read_and_the_open_node_is_named(tmp_path):
    write_run(tmp_path, state="running")
    write_rank(tmp_path, 0, world=1)
    rows = [{**REGION, "start_ns": 10, "end_ns": 2_000_000_000}]
    path = write(tmp_path, "regions", "rank=0", rows)
    data = path.read_bytes()
    # An unsealed part is the magic and a stream.
    path.write_bytes(data[: data.rindex(b"\xff\xff\xff\xff\0\0\0\0")])
    trace = Trace.open(tmp_path)
    assert trace.table("regions").collect()["end_ns"].to_list() == [2_000_000_000]
    assert whys(trace) == [
        "node 0 has not closed its run: it is still recording, or its agent was killed; nothing after 2.0 s"
    ]


def test_a_rank_that_left_no_trace_is_named(tmp_path):
    write_run(tmp_path)
    for rank in (0, 1, 2, 3, 4, 6, 7):
        write_rank(tmp_path, rank, world=8)
    gaps = Trace.open(tmp_path).gaps()
    assert [(g.table, g.rank, g.count) for g in gaps] == [("ranks", 5, 1)]
    assert gaps[0].why.startswith("rank 5 of 8 left no trace")


def test_only_the_last_attempt_is_read(tmp_path):
    write_run(tmp_path)
    for attempt in (0, 1):
        write_rank(tmp_path, 0, world=1, attempt=attempt)
        write(tmp_path, "regions", "rank=0", [{**REGION, "start_ns": attempt, "end_ns": 9}], attempt=attempt)
    trace = Trace.open(tmp_path)
    assert trace.table("regions").select("attempt", "start_ns").collect().rows() == [(1, 1)]
    assert whys(trace) == ["attempt 0 was restarted and is not analyzed, only the last attempt (1) is"]


def test_folders_of_two_nodes_are_one_run(tmp_path):
    for node, name in enumerate("ab"):
        write_run(tmp_path / name, node=node)
        write_rank(tmp_path / name, rank=node, node=node)
        write(tmp_path / name, "strings", f"node={node}", [{"name_id": 1, "name": f"nic{node}"}])
        row = {"time_ns": 5, "source_id": 1, "name_id": 1, "device_id": 1, "value": 2.0}
        write(tmp_path / name, "counters", f"node={node}", [row])
    trace = Trace.open([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert trace.table("counters").select("node", "name", "source").collect().rows() == [
        (0, "nic0", "nic0"),
        (1, "nic1", "nic1"),
    ]
    assert sorted(trace.run) == [0, 1]
    assert trace.gaps() == []
    write_rank(tmp_path / "b", rank=0)
    with pytest.raises(BadInput, match="two runs"):
        Trace.open([tmp_path / "a", tmp_path / "b"])


def test_the_recorders_gaps_are_passed_on_and_forbidden_nulls_are_left_out(tmp_path):
    write_run(tmp_path)
    write_rank(tmp_path, 0, world=1)
    write(tmp_path, "gaps", "rank=0", [{"table": "memory", "source": "memory", "count": 3, "why": "no /proc"}])
    rows = [{**REGION, "start_ns": 10, "end_ns": None}, {**REGION, "start_ns": 30, "end_ns": 40}]
    write(tmp_path, "regions", "rank=0", rows)
    trace = Trace.open(tmp_path)
    assert trace.table("regions").collect()["start_ns"].to_list() == [30]
    assert [(g.table, g.rank, g.count, g.why) for g in trace.gaps()] == [
        ("regions", 0, 1, "a0-part-0000.arrow: 1 rows lack a value that must be there; they were left out"),
        ("memory", 0, 3, "no /proc"),
    ]


def test_bad_input_is_one_line_that_says_what_and_where(tmp_path):
    with pytest.raises(BadInput, match="nothere does not exist"):
        Trace.open(tmp_path / "nothere")
    with pytest.raises(BadInput, match="is not a run"):
        Trace.open(tmp_path)
    begun = tmp_path / "begun"
    (begun / "run").mkdir(parents=True)
    with pytest.raises(BadInput, match="begun holds no rank yet"):
        Trace.open(begun)
    shutil.rmtree(begun)
    run = tmp_path / "20261121-x"
    write_run(run)
    with pytest.raises(BadInput, match=r"holds 1: give one of them, the newest is .*20261121-x"):
        Trace.open(tmp_path)
    with pytest.raises(BadInput, match="no rank reported: the job made no process group, or the agent ended before it"):
        Trace.open(run)
    write(run, "gaps", "node=0", [{"table": "ranks", "source": "agent", "why": "no rank reported: recording is off"}])
    with pytest.raises(BadInput, match="-x: no rank reported: recording is off"):
        Trace.open(run)
    write_run(run, schema_version=99)
    with pytest.raises(BadInput, match="schema version 99"):
        Trace.open(run)
