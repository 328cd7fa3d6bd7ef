"""Damaged and made-up files: one line or an answer, never a traceback, a hang, or gigabytes. `long.py` tries more."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import rankscope
from rankscope.analysis.compare.gate import gate
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.readers.arrow_lengths import decoded_bytes
from rankscope.analysis.readers.bounds import check_pickle, check_structure
from rankscope.analysis.runs.trace import BadInput, Trace
from record import write
from simulate import Job, healthy_resources, run
from support.fuzz import mutants
from support.fuzz.long import tried

RANKSCOPE = Path(sys.executable).with_name("rankscope")
needs_files = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's device files")


def made(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    mutants.FORMATS[name](folder)
    return folder


@pytest.mark.parametrize("name", sorted(mutants.FORMATS))
def test_files_that_are_whole_are_read(name, tmp_path):
    assert tried(made(name, tmp_path / "run")) == "read"


@pytest.mark.parametrize("name", sorted(mutants.FORMATS))
def test_mutants_are_read_or_refused_in_one_line(name, tmp_path):
    for seed in range(20):
        folder = made(name, tmp_path / f"{seed}")
        how = mutants.mutate(folder, seed)
        assert tried(folder) in ("read", "refused"), how


@pytest.mark.parametrize(("name", "seed"), [("operations", 101117)])
def test_mutants_that_ended_in_a_traceback_are_read_or_refused(name, seed, tmp_path):
    """Of 101117 no operation is a computation: there is no pipeline, and no failed detector either."""
    folder = made(name, tmp_path / "run")
    how = mutants.mutate(folder, seed)
    assert tried(folder) in ("read", "refused"), how


def refused(*arguments: object) -> str:
    """The one line in which the command refuses."""
    command = [str(word) for word in (RANKSCOPE, *arguments)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert said.returncode != 0
    assert said.stderr.count("\n") == 1, said.stderr
    return said.stderr


@needs_files
@pytest.mark.parametrize("command", ["import", "report", "ls"])
@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/dev/stdin"])
def test_devices_are_no_runs(command, path):
    assert "is no regular file" in refused(command, path)


@needs_files
def test_a_pipe_is_no_run_alone_or_among_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is no regular file"):
        Trace.open(tmp_path / "pipe")
    folder = made("flight_recorder", tmp_path / "run")
    os.mkfifo(folder / "dump_3")
    assert Trace.open(folder).table("ranks").collect().height == 3


def test_arguments_are_checked_before_anything_is_read(tmp_path):
    folder = made("operations", tmp_path / "run")
    assert "--ranks is as in 0-7,12; got 0-99999999999" in refused("export", folder, "--ranks", "0-99999999999")
    assert "--port is 0 to 65535; got 99999" in refused("ui", folder, "--port", 99999)
    assert "no fix is written 'foo'; there are rank:2" in refused("whatif", folder, "--fix", "foo")
    assert "ftp is none of s3, gs, hdfs, az, file" in refused("run", "--out", "ftp://host/run", "train.py")


@pytest.mark.parametrize("ranks", ["[0, 1", "[-5,0]", "[0,2000000000]", [0, 2**40], "[[0]]", 5, None])
def test_dumps_beside_one_with_bad_groups_are_read(ranks, tmp_path):
    folder = made("flight_recorder", tmp_path / "run")
    dump = json.loads((folder / "dump_0").read_text())
    dump["pg_config"]["0"]["ranks"] = ranks
    (folder / "dump_0").write_text(json.dumps(dump))
    trace = Trace.open(folder)
    assert trace.table("ranks").collect()["rank"].to_list() == [1, 2]
    assert any("dump_0 was not read" in gap.why for gap in trace.gaps())


@pytest.mark.parametrize(("field", "value"), [("collective_seq_id", 2**63), ("input_sizes", [[2**62] * 40])])
def test_an_operation_whose_numbers_cannot_be_is_left_out_alone(field, value, tmp_path):
    folder = made("flight_recorder", tmp_path / "run")
    dump = json.loads((folder / "dump_0").read_text())
    dump["entries"].append(dump["entries"][0] | {field: value})
    (folder / "dump_0").write_text(json.dumps(dump))
    trace = Trace.open(folder)
    assert trace.table("collectives").collect()["rank"].sort().to_list() == [0, 1, 2]
    assert "1 operation of dump_0 could not be read" in [gap.why for gap in trace.gaps()]


@pytest.mark.parametrize("field", ["process_group", "profiling_name", "input_sizes", "input_dtypes", "state"])
def test_dumps_that_say_one_list_a_million_times_are_not_followed(field, tmp_path):
    nested: object = ("x",)
    for _ in range(40):
        nested = (nested, nested)
    folder = made("flight_recorder", tmp_path / "run")
    dump = pickle.loads((folder / "dump_1").read_bytes())
    dump["entries"][0][field] = nested
    (folder / "dump_1").write_bytes(pickle.dumps(dump))
    assert Trace.open(folder).table("ranks").collect()["rank"].to_list() == [0, 2]


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p4000000000\n"], ids=["binary", "text"])
def test_a_dump_with_a_very_high_memo_number_is_refused_before_it_takes_memory(put, tmp_path):
    """What the unpickler would give room for: 2**31 places of 8 bytes, twice."""
    folder = made("flight_recorder", tmp_path / "run")
    whole = (folder / "dump_1").read_bytes()
    (folder / "dump_1").write_bytes(whole[:-1] + put + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Trace.open(folder).table("ranks").collect()["rank"].to_list() == [0, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_pickles_of_all_protocols_may_keep_what_they_hold():
    said = {"entries": [{"r": "p" * n, "x": (n, float(n), 2**70, None, b"r\xff")} for n in range(700)]}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_pickle(pickle.dumps(said, protocol))


def test_a_list_that_is_written_once_may_be_nested_and_long():
    check_structure({"a": [[1, 2], {"b": ()}] * 100}, 0)
    with pytest.raises(ValueError, match="many times"):
        check_structure([[0] * 1000] * 1000, 2_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": None},
        {"ranks": None},
        {"launch": 5},
        {"versions": None},
        {"topology": {"gpus": 5}},
        {"ranks": [{"rank": 2**40}]},
        {"ranks": [5]},
        {"gaps": [{}]},
    ],
)
def test_run_folders_whose_json_is_damaged_are_read_without_it(changes, tmp_path):
    folder = made("run_folder", tmp_path / "run")
    (file,) = (folder / "run").glob("node=*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    trace = Trace.open(folder)
    assert "node=00000.json is not whole" in {gap.why for gap in trace.gaps()}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("ranks", "world_size", 2_000_000_000),
        ("ranks", "world_size", -5),
        ("groups", "members", "0-2000000000"),
        ("groups", "members", "a-b"),
    ],
)
def test_run_folders_that_claim_impossible_ranks_are_refused(table, column, value, tmp_path):
    folder = made("run_folder", tmp_path / "run")
    part = next((folder / table).glob("rank=*/*.arrow"))
    rows = pa.ipc.open_file(pa.BufferReader(part.read_bytes())).read_all().replace_schema_metadata()
    number = rows.schema.get_field_index(column)
    values = pa.array([value] * rows.num_rows, rows.schema.field(column).type)
    with pa.ipc.new_file(part, rows.schema) as file:
        file.write_table(rows.set_column(number, rows.schema.field(column), values))
    with pytest.raises(BadInput, match="damaged"):
        rankscope.open(folder).gaps()


def test_ranks_that_nothing_describes_are_in_the_report_with_a_gap_and_do_not_pass(tmp_path):
    """Without their own files and their node's JSON it is unknown how many ranks there were."""
    folder = tmp_path / "run"
    job = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)
    write(run(job, healthy_resources(job)), folder)
    for lost in ("run", "ranks"):
        shutil.rmtree(folder / lost)
    report = diagnose(Trace.open(folder))
    assert report.ranks == (0, 1, 2, 3)
    assert " analyzed steps of 4 ranks" in report.verdict
    assert [gap.rank for gap in report.gaps if gap.why.startswith("nothing describes the rank")] == [0, 1, 2, 3]
    assert gate(report).unseen == ("how many ranks the job had",)


def test_a_folder_of_an_impossible_rank_is_refused(tmp_path):
    folder = made("run_folder", tmp_path / "run")
    (folder / "ranks" / "rank=00000").rename(folder / "ranks" / "rank=2000000000")
    assert "2000000000" in refused("report", folder)


def test_small_files_of_very_many_rows_are_refused_before_they_are_decoded(tmp_path):
    """5 million equal rows are 0.4 GB in a file of 0.2 MB."""
    equal = pa.chunked_array([pa.nulls(1_000_000, pa.int64()).fill_null(7)] * 5)
    names = ("dp_rank", "stage", "rank", "step", "start_ts", "duration", "seq_id", "mc", "mb_id")
    rows = pa.table(dict.fromkeys(names, equal) | {"optype": equal.cast(pa.string())})
    from pyarrow import parquet

    parquet.write_table(rows, tmp_path / "ops.parquet")
    assert (tmp_path / "ops.parquet").stat().st_size < 300_000
    with pytest.raises(BadInput, match=r"claims 0\.4 GB in a file of"):
        Trace.open(tmp_path / "ops.parquet")


def test_packed_rows_are_counted_before_they_are_decoded():
    rows = pa.table({"a": pa.nulls(100_000, pa.int64()).fill_null(7)})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(rows)
    packed = out.getvalue().to_pybytes()
    assert len(packed) < 30_000
    assert 800_000 <= decoded_bytes(packed) < 801_000
    assert decoded_bytes(packed[: len(packed) // 2]) <= 801_000
    assert decoded_bytes(b"\xff" * 100) == 0


def test_an_endless_view_in_an_export_is_no_table(tmp_path):
    folder = made("nsight", tmp_path / "run")
    with sqlite3.connect(folder / "a.sqlite") as database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        endless = "WITH RECURSIVE t(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM t) SELECT * FROM t"
        database.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    database.close()
    with pytest.raises(BadInput, match="holds no device work"):
        Trace.open(folder)


@pytest.mark.parametrize("stage", [2**40, "first", None])
def test_operations_of_impossible_stages_are_refused(stage, tmp_path):
    folder = made("operations", tmp_path / "run")
    rows = pl.read_parquet(folder / "ops.parquet").with_columns(pl.lit(stage).alias("stage"))
    rows.write_parquet(folder / "ops.parquet")
    assert tried(folder) == "refused"


def test_numbers_of_operations_that_are_far_apart_take_no_room_in_between(tmp_path):
    """Mutant 108389 had a stage of 20 million; 5,000 operations in steps and replicas of their own are 125 billion."""
    folder = made("operations", tmp_path / "run")
    rows = pl.read_parquet(folder / "ops.parquet")
    far = pl.when(pl.int_range(pl.len()) == 0).then(2**31 - 1).otherwise("stage")
    rows.with_columns(far.alias("stage")).write_parquet(folder / "ops.parquet")
    assert tried(folder) == "read"
    number, same = pl.int_range(pl.len()), pl.lit(0)
    apart = dict.fromkeys(("seq_id", "step", "dp_rank"), number) | {"stage": same, "rank": same}
    many = pl.concat([rows] * 500).head(5000).with_columns(**apart)
    many.write_parquet(folder / "ops.parquet")
    assert tried(folder) == "read"


def test_names_with_half_a_character_are_read(tmp_path):
    folder = made("kineto", tmp_path / "run")
    file = folder / "rank0.json"
    file.write_text(file.read_text().replace("sgemm", "sg\\ud800emm"))
    assert tried(folder) == "read"
