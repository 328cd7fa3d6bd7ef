"""A script as one rank beside a real agent, and the tables that they wrote."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import polars as pl

TORCH = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else ""
HEADER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
"""


def run_script(tmp_path: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HEADER) + textwrap.dedent(body))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | rank | env, capture_output=True, text=True, timeout=120
    )
    done.stdout = of_script(done.stdout)
    return done


def of_script(stdout: str) -> str:
    """Without what torch 2.6 to 2.9 say of gloo's connections."""
    return "".join(line for line in stdout.splitlines(keepends=True) if "peer ranks" not in line)


def record(tmp_path: Path, body: str, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a script as a rank beside an agent; return how it ended and the run folder."""
    run, name = tmp_path / "run", f"rankscope-test-{uuid.uuid4().hex}"
    options = ["--socket", name, "--out", str(run), "--until-stdin-closes", "--launch", "{}"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "rankscope.collectors.agent.loop", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    assert json.loads(agent.stdout.readline())["ready"]
    done = run_script(tmp_path, body, RANKSCOPE_AGENT=name, **env)
    agent.stdin.close()
    assert agent.wait(30) == 0
    return done, run


def table(run: Path, name: str, partition: str = "rank=00000") -> pl.DataFrame:
    return pl.concat([pl.read_ipc(part) for part in sorted((run / name / partition).glob("*.arrow"))])


def names(run: Path) -> dict[int, str]:
    return dict(table(run, "strings").iter_rows())
