"""An S3 server that refuses and stalls, and a run to put there."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from urllib.request import urlopen

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow.fs import S3FileSystem
from werkzeug.serving import make_server

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.report import json_form
from rankscope.analysis.runs import storage
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


def record(folder):
    """A run of four ranks, of which rank 2 is slow."""
    job = Job(parallel="ddp", ranks=4, steps=30, seed=1)
    can = healthy_resources(job)
    can.slowness[:, 2] *= 1.5
    return write(run(job, can), folder)


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
    report = json.loads(json_form.render(read_run(path).report))
    return {name: value for name, value in report.items() if name not in ("path", "command")}
