"""Fixtures of several test files, and what the markers mean."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rankscope.collectors.native import collectives_hook
from rankscope.errors import NotBuilt
from support.browser import BROWSER
from support.paths import DATA, EXAMPLE

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each command that a test starts compiles all its modules again

_LACKS = {
    "browser": "needs playwright and Chromium" if not (BROWSER and find_spec("playwright")) else "",
    "needs_data": "" if DATA.is_dir() else f"needs the public traces in {DATA}",
    "real_job": "recording needs Linux and torch" if sys.platform != "linux" or not find_spec("torch") else "",
}
"""What this machine lacks to run the tests with a marker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    take_long = set()
    for item in items:
        needs = {marker for marker in _LACKS if item.get_closest_marker(marker)}
        if "slow_rank_1" in getattr(item, "fixturenames", ()):
            needs.add("real_job")
        for why in filter(None, map(_LACKS.get, sorted(needs))):
            item.add_marker(pytest.mark.skip(reason=why))
        if needs & {"browser", "real_job"}:
            take_long.add(item.path)
    items.sort(key=lambda item: item.path not in take_long)  # first, so that no process ends long after another


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say of each marker how many of its tests were skipped."""
    outcomes = {name: terminalreporter.stats.get(name, []) for name in ("passed", "failed", "skipped")}
    for marker in _LACKS:
        counts = {name: sum(marker in report.keywords for report in found) for name, found in outcomes.items()}
        if any(counts.values()):
            terminalreporter.write_line(f"{marker}: {sum(counts.values())} tests, {counts['skipped']} skipped")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was built on this machine before decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@contextmanager
def _once_for_all_processes(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """Open a folder that all test processes share, one at a time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def compiled_hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the collectives hook in C++, built once."""
    with _once_for_all_processes(tmp_path_factory, "compiled") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        try:
            collectives_hook.build()
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
    """The run folder of a real job of two ranks, of which rank 1 is slow, recorded once; it is not to be changed."""
    with _once_for_all_processes(tmp_path_factory, "slow-rank-1") as folder:
        for _ in range(0 if (folder / "runs").exists() else 4):
            job = [EXAMPLE, "--steps", "8", "--device-ms", "40", "--fault", "slow-rank", "--fault-rank", "1"]
            rankscope = Path(sys.executable).with_name("rankscope")
            command = [str(word) for word in (rankscope, "run", "--standalone", "--nproc-per-node", "2", *job)]
            done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=150)
            if "Rank 1 is slow" in done.stderr:
                break
            shutil.rmtree(folder / "runs")  # other tests have disturbed its few steps
    (found,) = (folder / "runs").iterdir()
    return found
