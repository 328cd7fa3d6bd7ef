"""What several modules of tests look at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/train_transformer.py"


@pytest.fixture(scope="session")
def slow_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a real job of two ranks, of which rank 1 is slow."""
    folder = tmp_path_factory.mktemp("slow-rank-1")
    job = [EXAMPLE, "--steps", "8", "--device-ms", "40", "--fault", "slow-rank", "--fault-rank", "1"]
    command = [Path(sys.executable).with_name("rankscope"), "run", "--standalone", "--nproc-per-node", "2", *job]
    subprocess.run([str(word) for word in command], cwd=folder, check=True, capture_output=True, timeout=150)
    (found,) = (folder / "runs").iterdir()
    return found
