"""Runs in object storage: read by their URL, from a real S3 server that refuses and stalls now and then."""

import sys
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem, copy_files

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.runs import storage
from rankscope.analysis.runs.storage import local_path
from rankscope.collectors import object_storage
from rankscope.errors import BadInput
from rankscope.profiler import main
from support.object_storage import judged, record, s3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def server(recorded, monkeypatch):
    with s3(monkeypatch) as (served, there):
        copy_files(str(recorded), "bucket/jobs/run", source_filesystem=LocalFileSystem(), destination_filesystem=there)
        yield served


@pytest.mark.long
def test_a_run_is_read_by_its_url_as_from_its_folder(server, recorded):
    assert judged("s3://bucket/jobs/run") == judged(recorded)
    assert read_run("s3://bucket/jobs/run").report.path == "s3://bucket/jobs/run"
    assert judged(Path("s3://bucket/jobs/run/steps=5-25")) == judged(recorded / "steps=5-25")


@pytest.mark.long
def test_what_the_server_refuses_or_leaves_unanswered_is_asked_for_again(server, recorded, monkeypatch):
    monkeypatch.setattr(object_storage, "_SILENT_S", 3)
    server.refused, server.stalled = 3, 1
    assert judged("s3://bucket/jobs/run") == judged(recorded)
    assert (server.refusals, server.stalls) == (3, 1)


def test_a_server_that_refuses_for_good_is_one_line(server, monkeypatch):
    monkeypatch.setattr(storage, "_ATTEMPTS", 2)
    server.refused = 10_000
    with pytest.raises(BadInput, match=r"^cannot read s3://bucket/jobs/run: .*") as raised:
        read_run("s3://bucket/jobs/run")
    assert "\n" not in str(raised.value)


def test_a_missing_object_is_reported(server):
    with pytest.raises(BadInput, match=r"^s3://bucket/jobs/other does not exist$"):
        read_run("s3://bucket/jobs/other")


def test_keys_that_lead_out_of_the_folder_are_not_copied():
    with pytest.raises(BadInput, match=r"holds '\.\.'"):
        storage._below(Path("/copy"), "bucket/run/../../x", "bucket/run")


def test_an_unknown_scheme_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rankscope", "report", "ftp://host/run"])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rankscope: ftp:/host/run: ftp is none of s3, gs, hdfs, az, file; copy it to a folder here and name that"
    ]


def test_paths_stay_what_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s3:/odd").mkdir(parents=True)
    assert local_path("s3:/odd") == "s3:/odd"
    assert local_path("a/b:c") == "a/b:c"
    assert local_path(f"file://{tmp_path}") == str(tmp_path)
