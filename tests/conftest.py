"""What several modules of tests look at."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankscope.collectors import native_hook
from rankscope.errors import NotBuilt
from support.paths import EXAMPLE


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was built on this machine before decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def compiled_hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the collectives hook in C++, built once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "compiled"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        try:
            native_hook.build()
        except NotBuilt as error:
            pytest.skip(str(error))
    return folder


@pytest.fixture(params=["Python", "C++"])
def hook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Jobs of the test record collectives by this hook."""
    if request.param == "C++":
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("compiled_hook")))
    return str(request.param)


@pytest.fixture(scope="session")
def served() -> Callable[[Any], AbstractContextManager[str]]:
    """Serves a Dash application for as long as the context is open, at the address that it gives."""
    from werkzeug.serving import make_server

    @contextmanager
    def serve(app: Any) -> Iterator[str]:
        serving = make_server("127.0.0.1", 0, app.server, threaded=True)
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()

    return serve


@pytest.fixture(scope="session")
def slow_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a real job of two ranks, of which rank 1 is slow."""
    folder = tmp_path_factory.mktemp("slow-rank-1")
    job = [EXAMPLE, "--steps", "8", "--device-ms", "40", "--fault", "slow-rank", "--fault-rank", "1"]
    command = [Path(sys.executable).with_name("rankscope"), "run", "--standalone", "--nproc-per-node", "2", *job]
    subprocess.run([str(word) for word in command], cwd=folder, check=True, capture_output=True, timeout=150)
    (found,) = (folder / "runs").iterdir()
    return found
