"""The agent builds the collectives hook in C++ for later jobs; this compiler copies one that was compiled before."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.collectors.agent.hook_builder import BUILD_AFTER_NS, HookBuilder
from rankscope.collectors.native import collectives_hook

torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")

COMPILER = """#!/bin/sh
for word; do [ "$last" = -o ] && to="$word"; last="$word"; done
echo "$(grep ^policy /proc/self/sched | tr -dc 0-9) $(cat /proc/self/oom_score_adj)" >>"$0.ran"
{does}
"""


@pytest.fixture
def compiler(compiled_hook, tmp_path, monkeypatch):
    """Makes `CXX` a script with these lines; no hook is built yet."""
    made = next((compiled_hook / "rankscope/native_hook").glob("*.so"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(does: str) -> Path:
        path = tmp_path / "c++"
        path.write_text(COMPILER.format(does=does.format(made=made)))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path.with_name("c++.ran")

    return make


def result(builder: HookBuilder, since_ns: int) -> str:
    for _ in range(400):
        came = builder.look(since_ns, torch.__version__)
        if came is not None:
            return came
        time.sleep(0.05)
    raise AssertionError("no build within 20 s")


def long_ago() -> int:
    return time.perf_counter_ns() - BUILD_AFTER_NS


@pytest.mark.long
def test_a_job_of_a_minute_builds_it_once_at_idle_priority_and_as_the_first_victim(compiler):
    ran = compiler('cp {made} "$to"')
    assert result(HookBuilder({}), long_ago()) == f"built: {collectives_hook.built()}"
    assert ran.read_text() == "5 1000\n"  # SCHED_IDLE
    assert not collectives_hook.is_wanted(torch.__version__)


def test_a_shorter_job_another_torch_and_a_job_that_disables_it_build_nothing(compiler):
    ran = compiler('cp {made} "$to"')
    now_ns = time.perf_counter_ns()
    for environment, since_ns, version in (
        ({}, now_ns, torch.__version__),
        ({}, None, torch.__version__),
        ({}, long_ago(), "2.0.0"),
        ({"RANKSCOPE_DISABLE": "memory,build"}, long_ago(), torch.__version__),
    ):
        builder = HookBuilder(environment)
        assert builder.look(since_ns, version) is None
        builder.finish()
    assert not ran.exists()
    assert collectives_hook.built() is None


def test_a_compiler_that_refuses_is_asked_once_and_doctor_says_why(compiler):
    ran = compiler("echo 'hook.cpp:1: error: no such header' >&2; exit 1")
    why = "refused: hook.cpp:1: error: no such header"
    assert result(HookBuilder({}), long_ago()).endswith(why)
    assert HookBuilder({}).look(long_ago(), torch.__version__) is None
    assert ran.read_text().count("\n") == 1
    done = subprocess.run([sys.executable, "-m", "rankscope", "doctor"], capture_output=True, text=True, timeout=60)
    assert why in " ".join(done.stdout.split())


def test_an_agent_that_ends_leaves_no_compiler_and_no_half_of_a_hook(compiler):
    ran = compiler("exec sleep 60")
    builder = HookBuilder({})
    assert builder.look(long_ago(), torch.__version__) is None
    while not ran.exists():
        time.sleep(0.05)
    builder.finish()
    left = [path.suffix for path in ran.parent.glob("rankscope/native_hook/*")]
    assert left == [".lock"]
    assert subprocess.run(["pgrep", "-f", "sleep 60"], capture_output=True).returncode == 1
