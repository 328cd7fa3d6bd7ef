"""`rankscope import`: a run folder that gives the same answers as the files it came from."""

import errno
import gzip
import json
import os
import subprocess
import sys

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.readers import spill_file
from rankscope.analysis.readers.kineto import tables
from rankscope.analysis.report import json_form
from rankscope.analysis.runs.trace import Trace
from rankscope.errors import RankscopeError
from rankscope.profiler.commands import import_
from support.paths import DATA

TRACE = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "pid": 0,
    "tid": 7,
    "ts": 10,
    "dur": 5,
    "args": {"device": 0, "stream": 7, "correlation": 1},
}


def rankscope(*arguments):
    command = [sys.executable, "-m", "rankscope", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def answers(path):
    report = json.loads(json_form.render(diagnose(Trace.open(path))))
    return {name: value for name, value in report.items() if name != "path"}


def write(path, **top):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": [TRACE]}))
    return path


@pytest.mark.needs_data
@pytest.mark.parametrize(
    "name",
    [
        "kineto/torchrec/sst_long_a2a_optimizer_5",
        "nsys/mfu_2gpu_before.sqlite",
        "flight_recorder/nvrx/gpu_error_2nd",
        "ops/bytedance-st",
        "nccl_profiler/minimal-profiler-allreduce.jsonl",
    ],
)
def test_an_imported_run_gives_the_same_answers(tmp_path, name):
    done = rankscope("import", DATA / name, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "run") == answers(DATA / name)


def test_a_large_table_is_written_in_pieces(tmp_path, monkeypatch):
    """Five kernels that are not in order of time, at most two at once in memory."""
    monkeypatch.setattr(tables, "_PIECE", 2)
    monkeypatch.setattr(spill_file, "BLOCK_ROWS", 2)
    events = [{**TRACE, "ts": ts, "name": f"k{ts}"} for ts in (50, 10, 40, 20, 30)]
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": events}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    import_.command([tmp_path / "trace.json"], tmp_path / "run")
    parts = sorted(path.name for path in (tmp_path / "run" / "kernels" / "rank=00003").iterdir())
    assert parts == ["a0-part-0000.arrow", "a0-part-0001.arrow", "a0-part-0002.arrow"]
    assert Trace.open(tmp_path / "run").table("kernels").select("rank", "name", "start_ns").collect().rows() == [
        (3, f"k{ts}", ts * 1000) for ts in (10, 20, 30, 40, 50)
    ]
    assert answers(tmp_path / "run") == answers(tmp_path / "trace.json")


def test_the_bytes_of_a_copy_are_written(tmp_path):
    copied = {**TRACE, "cat": "gpu_memcpy", "name": "Memcpy HtoD", "args": {**TRACE["args"], "bytes": 1_000_000}}
    events = [{**TRACE, "ts": 1}, copied]
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    import_.command([tmp_path / "trace.json"], tmp_path / "run")
    for path in (tmp_path / "trace.json", tmp_path / "run"):
        rows = Trace.open(path).table("kernels").select("name", "bytes").collect().rows()
        assert rows == [("k", None), ("Memcpy HtoD", 1_000_000)]


def test_an_imported_run_is_read_as_a_whole(tmp_path):
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": [TRACE]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    import_.command([tmp_path / "trace.json"], tmp_path / "run")
    done = rankscope("report", tmp_path / "run" / "steps=0-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "was imported, and such a run is read as a whole: name it without its steps" in done.stderr


def test_the_source_and_what_it_cannot_show_survive(tmp_path):
    write(tmp_path / "traces" / "rank0.json", distributedInfo={"rank": 0, "world_size": 1000})
    done = rankscope("import", tmp_path / "traces", "-o", tmp_path / "run")
    assert (done.returncode, "ranks 1-999 of 1000: no trace of them is here" in done.stdout) == (0, True)
    for path in (tmp_path / "traces", tmp_path / "run"):
        trace = Trace.open(path)
        assert trace.source == "kineto"
        assert "gc_pauses" in trace.reader.cannot()
        assert [(gap.table, gap.count) for gap in trace.gaps()] == [("ranks", 999)]
        assert trace.table("kernels").select("name", "start_ns", "end_ns", "stream").collect().rows() == [
            ("k", 10_000, 15_000, 7)
        ]
    assert "1 " in rankscope("ls", tmp_path / "run").stdout
    assert rankscope("report", tmp_path / "run", "--short").returncode == 0
    assert (tmp_path / "run" / "report.json").exists()
    assert not (tmp_path / "traces" / "report.json").exists()


def test_what_is_good_of_several_files_stays_and_the_rest_is_reported(tmp_path):
    write(tmp_path / "rank0.json")
    (tmp_path / "rank1.pt.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [')[:15])
    done = rankscope("import", tmp_path, "-o", tmp_path / "run")
    assert done.returncode == 0
    assert "rank1.pt.trace.json.gz is cut off" in done.stdout
    assert Trace.open(tmp_path / "run").table("ranks").collect()["rank"].to_list() == [0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["none.json"], "none.json does not exist"),
        (["empty.json"], "empty.json is empty"),
        (["rank0.json", "-o", "taken"], "taken exists already: name a folder that does not, or leave --out away"),
        (["run"], "run is a run folder already: `rankscope report` reads it"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, given, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rank0.json")
    (tmp_path / "empty.json").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "run" / "run").mkdir(parents=True)
    (tmp_path / "run" / "run" / "node=00000.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = rankscope("import", *given)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"rankscope: {says}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_half_a_folder_does_not_stay(tmp_path, monkeypatch):
    """A disk that fills up on the second table."""
    write(tmp_path / "rank0.json")
    write_rows, tables = import_._write_rows, []

    def full(folder, table, *rest):
        tables.append(table)
        if len(tables) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_rows(folder, table, *rest)

    monkeypatch.setattr(import_, "_write_rows", full)
    with pytest.raises(RankscopeError, match=r"cannot write .*run: No space left on device"):
        import_.command([tmp_path / "rank0.json"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_name_it_goes_to_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rank0.json")
    assert rankscope("import", "rank0.json").returncode == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-rank0")
    assert answers(folder) == answers(tmp_path / "rank0.json")
