"""Runs that are recorded into object storage, through a real S3 server that refuses, stalls and is away."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid

import polars as pl
import pytest

from rankscope.collectors import object_storage
from rankscope.collectors.agent import loop
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.process import bind
from rankscope.collectors.agent.retention import Retention
from rankscope.collectors.agent.upload import upload_rest
from rankscope.collectors.agent.uploader import Uploader
from rankscope.profiler.arguments import split
from support.agent import Agent, Rank
from support.object_storage import judged, record, s3
from support.paths import EXAMPLE

RANKSCOPE = [sys.executable, "-m", "rankscope"]
URL = "s3://bucket/jobs/run"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def storage(monkeypatch):
    """The server, and the names of the objects in the bucket."""
    with s3(monkeypatch) as (served, there):
        served.methods = ("PUT", "POST")
        served.there = there
        yield served


def keys(storage, below="bucket/jobs/run"):
    from pyarrow.fs import FileSelector

    found = storage.there.get_file_info(FileSelector(below, recursive=True, allow_not_found=True))
    return {entry.path.removeprefix(f"{below}/") for entry in found if entry.is_file}


def files(folder):
    """What of the folder goes to the storage."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not path.name.startswith(".")}


def spooled(recorded, folder):
    """A run as an agent leaves it."""
    shutil.copytree(recorded, folder)
    state = folder / "run/node=00000.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"agent": uuid.uuid4().hex}))
    return folder


@pytest.mark.long
def test_sealed_files_arrive_while_the_job_runs_and_the_rest_at_its_end(storage, tmp_path):
    storage.refused = 3
    agent = Agent(tmp_path / "run", "--upload", URL)
    rank = Rank(agent.name)
    sealed, began = "regions/rank=00000/a0-part-0000.arrow", time.monotonic()
    while not (tmp_path / "run/regions/rank=00000/a0-part-0001.arrow").exists():  # more than a file takes
        assert time.monotonic() < began + DEADLINE_S
        rank.do("regions(3000)", "time.sleep(0.25)")  # the ring holds so many until the agent looks
    while not {sealed, "run/node=00000.json"} <= keys(storage):
        assert time.monotonic() < began + 2 * DEADLINE_S
        time.sleep(0.1)
    assert "regions/rank=00000/a0-part-0001.arrow" not in keys(storage)  # it is still written
    rank.bye()
    agent.end()
    assert keys(storage) == files(tmp_path / "run")
    for name in (sealed, "strings/node=00000/part-0000.arrow"):
        assert (
            storage.there.open_input_stream(f"bucket/jobs/run/{name}").read() == (tmp_path / "run" / name).read_bytes()
        )
    state = json.loads((tmp_path / "run/run/node=00000.json").read_text())
    assert state["upload"] == {"url": URL, "missing": 0, "why": ""}
    there = json.loads(storage.there.open_input_stream("bucket/jobs/run/run/node=00000.json").read())
    assert there["state"] == "closed"


@pytest.mark.long
def test_what_is_refused_or_left_unanswered_is_sent_again(storage, recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "_SILENT_S", 2)
    run = spooled(recorded, tmp_path / "run")
    storage.refused, storage.stalled = 9, 1
    came = Uploader(run, object_storage.location(URL)).finish(time.monotonic() + DEADLINE_S)
    assert came == {"url": URL, "missing": 0, "why": ""}
    assert (storage.refusals, storage.stalls) == (9, 1)
    assert keys(storage) == files(run)
    assert judged(URL) == judged(run)


def test_what_is_written_again_is_sent_again_and_files_of_rows_are_not(storage, recorded, tmp_path):
    run = spooled(recorded, tmp_path / "run")
    assert upload_rest(run, URL)["missing"] == 0
    (run / "report.html").write_text("new")
    state = json.loads((run / "run/node=00000.json").read_text())
    (run / "run/node=00000.json").write_text(json.dumps(state | {"state": "closed", "kept_since_ns": 5}))
    rows = next(run.glob("regions/rank=00000/*.arrow"))  # of which retention has left less
    before = rows.stat().st_size
    rows.write_bytes(next(run.glob("strings/*/*.arrow")).read_bytes())
    assert upload_rest(run, URL)["missing"] == 0
    assert "report.html" in keys(storage)
    there = json.loads(storage.there.open_input_stream("bucket/jobs/run/run/node=00000.json").read())
    assert (there["state"], there["kept_since_ns"]) == ("closed", None)
    (still,) = storage.there.get_file_info([f"bucket/jobs/run/{rows.relative_to(run).as_posix()}"])
    assert still.size == before


def test_two_runs_of_one_url_do_not_mix(storage, recorded, tmp_path):
    first, second = (spooled(recorded, tmp_path / name) for name in ("first", "second"))
    assert upload_rest(first, URL)["url"] == URL
    assert upload_rest(second, URL)["url"] == f"{URL}-2"
    assert keys(storage) == files(first)
    peer = spooled(recorded, tmp_path / "peer")  # another node of the second run
    met = json.loads((second / "run/node=00000.json").read_text())["agent"]
    state = json.loads((peer / "run/node=00000.json").read_text()) | {"peer": met}
    (peer / "run/node=00000.json").unlink()
    (peer / "run/node=00001.json").write_text(json.dumps(state))
    assert upload_rest(peer, URL) == {"url": f"{URL}-2", "missing": 0, "why": ""}


def test_what_has_not_arrived_at_the_end_is_a_gap_and_stays(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "UPLOAD_S", 3)
    monkeypatch.setattr(loop, "LATE_S", 1)
    storage.away = True
    options = {"hz": 1.0, "launch": {}, "keep_bytes": None}
    out = tmp_path / "spool" / "run"
    agent = loop.Agent(bind(uuid.uuid4().hex), loop.Options(out=out, until_stdin_closes=False, upload=URL, **options))
    agent._terminated = True
    began = time.monotonic()
    agent.run()
    assert time.monotonic() - began < DEADLINE_S
    gaps = pl.concat(map(pl.read_ipc, out.glob("gaps/node=00000/*.arrow")))["why"].to_list()
    (gap,) = [why for why in gaps if why.startswith("files have not arrived in object storage: ")]
    state = json.loads((out / "run/node=00000.json").read_text())
    assert state["upload"]["missing"] > 1
    assert gap.startswith(f"files have not arrived in object storage: {state['upload']['missing']} ({URL}: ")
    assert gap.endswith(f"they are in {out}")
    storage.away = False
    assert upload_rest(out, URL) == {"url": URL, "missing": 0, "why": ""}
    assert keys(storage) == files(out)


def test_retention_removes_only_what_has_arrived(tmp_path):
    partition, arrived = Partition(RunFolder(tmp_path), "rank=00000"), set()
    retention = Retention(1, lambda path: path in arrived)
    retention.watch(partition)
    for number in range(4):
        times = list(range(number * 100, number * 100 + 100))
        partition.add("completions", {"number": times, "issued_ns": times, "end_ns": times})
        partition._writers["completions"].flush(tmp_path / "completions/rank=00000")
        partition._writers["completions"].seal(tmp_path / "completions/rank=00000")
    parts = sorted(tmp_path.glob("completions/rank=00000/*.arrow"))
    assert len(parts) == 4
    assert not retention.decide()
    arrived |= {parts[0], parts[2]}
    assert retention.decide()
    retention.work()
    assert [path.exists() for path in parts] == [False, True, True, True]


@pytest.mark.real_job
def test_a_job_that_is_recorded_into_object_storage_is_judged_as_from_its_folder(storage, tmp_path):
    """The report at its end reads the folder here, the other one the storage."""
    storage.refused = 2
    job = [EXAMPLE, "--steps", "16", "--fault", "slow-rank", "--fault-rank", "1", "--fault-ms", "100"]
    command = [*RANKSCOPE, "run", "--out", URL, "--standalone", "--nproc-per-node", "2", *map(str, job)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    said = done.stderr.splitlines()
    spool = tmp_path / f"rankscope-spool-{os.getuid()}"
    assert any(line.startswith(f"rankscope: recording into {URL}, by way of {spool}/") for line in said)
    assert f"HTML report: {URL}/report.html" in said
    assert not list(spool.iterdir())  # all has arrived
    here = json.loads(storage.there.open_input_stream("bucket/jobs/run/report.json").read())
    assert [finding["ranks"] for finding in here["findings"]][:1] == [[1]]
    assert judged(URL) == {name: value for name, value in here.items() if name not in ("path", "command")}


def test_a_url_that_cannot_be_recorded_into_is_refused_before_the_job(tmp_path):
    for out, why in {
        "ftp://host/run": "--out ftp://host/run: ftp is none of s3, gs, hdfs, az, file; give one of these or a folder",
        "s3://bucket": "--out s3://bucket: name the run's folder too, as in s3://BUCKET/runs/NAME",
        "az://bucket/run": "az://bucket/run: set AZURE_STORAGE_ACCOUNT to the name of the storage account",
    }.items():
        command = [*RANKSCOPE, "run", "--out", out, "--standalone", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stderr) == (2, f"rankscope: {why}\n")
    assert split(["--out", f"file://{tmp_path}/run", "train.py"])[0].out == f"{tmp_path}/run"
    assert not list(tmp_path.iterdir())
