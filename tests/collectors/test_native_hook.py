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
