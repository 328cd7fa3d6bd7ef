"""Runs in object storage: read by their URL, from a real S3 server that refuses and stalls now and then."""

import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files
from werkzeug.serving import make_server

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.report import json_form
from rankscope.analysis.runs import storage
from rankscope.analysis.runs.storage import local_path
from rankscope.collectors import object_storage
from rankscope.errors import BadInput
from rankscope.profiler import main

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "faults"))
from record import write
from simulate import Job, healthy_resources, run


class Server:
    """An S3 server. `refused` requests for objects get 503, `stalled` ones no answer for as long as a client waits.

    Requests for objects are of these `methods`. Where it is `away` all requests get 503.
    """

    def __init__(self):
        self.methods, self.away = ("GET",), False
        self._app = DomainDispatcherApplication(create_backend_app)
        self._served = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._served.port}"
        self.refused = self.stalled = self.refusals = self.stalls = 0
        self.released, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._served.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        is_object = environ["REQUEST_METHOD"] in self.methods and environ["PATH_INFO"].endswith(".arrow")
        with self._lock:
            refuses = is_object and self.refusals < self.refused
            stalls = is_object and not refuses and self.stalls < self.stalled
            self.refusals, self.stalls = self.refusals + refuses, self.stalls + stalls
        if refuses or self.away:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if stalls:
            self.released.wait(60)
        return self._app(environ, start_response)

    def close(self):
        self.released.set()
        self._served.shutdown()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    job = Job(parallel="ddp", ranks=4, steps=30, seed=1)
    can = healthy_resources(job)
    can.slowness[:, 2] *= 1.5
    return write(run(job, can), tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def server(recorded, monkeypatch):
    with s3(monkeypatch) as (served, there):
        copy_files(str(recorded), "bucket/jobs/run", source_filesystem=LocalFileSystem(), destination_filesystem=there)
        yield served


@contextmanager
def s3(monkeypatch):
    """A server with an empty bucket, which the environment names, and the file system that it serves."""
    served = Server()
    urlopen(f"{served.url}/moto-api/reset", b"").close()  # its buckets are this process's
    for name, value in {
        "AWS_ENDPOINT_URL": served.url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    there = S3FileSystem(endpoint_override=served.url, region="us-east-1", allow_bucket_creation=True)
    there.create_dir("bucket")
    yield served, there
    served.close()
    for kept in (storage._copy, storage._folder):
        kept.cache_clear()


def judged(path):
    report = json.loads(json_form.render(read_run(path)[0]))
    return {name: value for name, value in report.items() if name not in ("path", "command")}


def test_a_run_is_read_by_its_url_as_from_its_folder(server, recorded):
    assert judged("s3://bucket/jobs/run") == judged(recorded)
    assert read_run("s3://bucket/jobs/run")[0].path == "s3://bucket/jobs/run"
    assert judged(Path("s3://bucket/jobs/run/steps=5-25")) == judged(recorded / "steps=5-25")


def test_what_the_server_refuses_or_leaves_unanswered_is_asked_for_again(server, recorded, monkeypatch):
    monkeypatch.setattr(object_storage, "_SILENT_S", 3)
    server.refused, server.stalled = 3, 1
    assert judged("s3://bucket/jobs/run") == judged(recorded)
    assert (server.refusals, server.stalls) == (3, 1)


def test_a_server_that_refuses_for_good_is_one_line(server, monkeypatch):
    monkeypatch.setattr(storage, "_ATTEMPTS", 2)
    server.refused = 10_000
    with pytest.raises(BadInput, match=r"^cannot read s3://bucket/jobs/run: .*") as told:
        read_run("s3://bucket/jobs/run")
    assert "\n" not in str(told.value)


def test_what_is_not_there_is_said(server):
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
