"""What several modules of tests look at."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/train_transformer.py"


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
