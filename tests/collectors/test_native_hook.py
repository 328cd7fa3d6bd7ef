"""The collectives hook in C++: building and loading it. That it records what Python's does is tested where that is."""

import json
import os
import subprocess
import sys

import pytest

from rankscope.collectors.native import collectives_hook
from rankscope.errors import NotBuilt

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")


@pytest.mark.long
def test_doctor_builds_it_and_says_where_it_is(compiled_hook, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_hook))
    command = [sys.executable, "-m", "rankscope", "doctor", "--build", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (check,) = [check for check in json.loads(done.stdout) if check["name"] == "collectives hook in C++"]
    assert check["ok"]
    assert check["detail"] == str(collectives_hook.built())


def test_a_machine_without_a_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NotBuilt, match=r"^there is no C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+\) on PATH$"):
        collectives_hook.build()
    assert collectives_hook.built() is None


def test_a_compiler_that_refuses_leaves_nothing(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": "false"}
    command = [sys.executable, "-m", "rankscope", "doctor", "--build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("rankscope: the collectives hook was not built: false refused: ")
    assert list((tmp_path / "rankscope/native_hook").iterdir()) == []


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_file_that_others_could_have_written_is_not_loaded(compiled_hook, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_hook))
    theirs = tmp_path / "rankscope/native_hook" / collectives_hook.built().name
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(collectives_hook.built().read_bytes())
    theirs.chmod(mode)
    ask = "import torch; from rankscope.collectors.native import collectives_hook; print(collectives_hook.load())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


_SAVES = """
import sys, threading, time, torch
from rankscope.collectors.native import collectives_hook
from rankscope.collectors.rank.window import _Profile

profile = _Profile(None, collectives_hook.load())
profile.prepare()
profile.start()
x = torch.ones(8)
for _ in range(10_000):
    x.add(1)
profile.stop()
thread = threading.Thread(target=profile.save, args=sys.argv[1:])
last = begun = time.perf_counter()
longest = 0.0
thread.start()
while thread.is_alive():
    now = time.perf_counter()
    longest, last = max(longest, now - last), now
print(longest / (time.perf_counter() - begun))
"""


@pytest.mark.long
def test_python_goes_on_while_it_saves_the_trace_of_a_window(compiled_hook, tmp_path):
    """torch's own `save` lets no other thread in: this one would stop for nearly as long as it takes."""
    environment = os.environ | {"XDG_CACHE_HOME": str(compiled_hook)}
    command = [sys.executable, "-c", _SAVES, str(tmp_path / "trace.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert sum(event.get("name") == "aten::add" for event in events) == 10_000
    assert float(done.stdout.split()[-1]) < 0.3  # torch's: 0.6 to 0.7
