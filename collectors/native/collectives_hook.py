"""The collectives hook in C++: finding, building and loading it. Standard library only.

It is built for the torch, Python and source that are installed; a rank that finds none records by the hook in Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rankscope.collectors.native.compiling import cache_folder, compile_to, compiler
from rankscope.collectors.untyped import Foreign
from rankscope.errors import NotBuilt

__all__ = ["build", "build_quietly", "built", "failure", "is_wanted", "load"]

_SOURCE = Path(__file__).with_name("collectives_hook.cpp")
_NAME = "rankscope_hook"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_LIMIT_S = 120.0  # 17 s with g++ 12 on a quiet core
_QUIET_LIMIT_S = 3600.0  # where a job has all the cores
_loaded: tuple[Any] | None = None


def built(torch_version: str | None = None) -> Path | None:
    """Return the hook that was built for this torch (default: the one that is installed), None if there is none."""
    version = torch_version or _installed_torch()[1]
    path = _path(version) if version else None
    return path if path is not None and path.exists() else None


def failure(torch_version: str | None = None) -> str | None:
    """Return why the hook could not be built for this torch (default: the one that is installed) by an earlier job."""
    version = torch_version or _installed_torch()[1]
    try:
        return _failure(_path(version)).read_text().strip()
    except OSError:
        return None


def is_wanted(torch_version: str) -> bool:
    """Say whether a job with this torch would use a hook built here, and none is built nor has failed to be."""
    if _installed_torch()[1] != torch_version:
        return False
    return not _path(torch_version).exists() and failure(torch_version) is None


def build_quietly() -> str:
    """Build as `build` does, if the machine is idle; return the result in a line.

    One process of this user builds. A failure is kept beside the hook, so that no later job tries again.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/oom_score_adj").write_text("1000")
    path = _path(_installed_torch()[1])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return f"built: {build(limit_s=_QUIET_LIMIT_S)}"
    except BlockingIOError:
        return "not built: another process builds it"
    except NotBuilt as error:
        _failure(path).write_text(f"{error}\n")
        return f"not built: {error}"
    except OSError as error:
        return f"not built: {error}"


def build(limit_s: float = _LIMIT_S) -> Path:
    """Compile the hook into the cache folder and return its path.

    Raises:
        NotBuilt: there is no torch or no C++ compiler, or the compiler refuses or takes longer than `limit_s`.
    """
    folder, version = _installed_torch()
    if folder is None:
        raise NotBuilt(f"torch is not installed for {sys.executable}")
    path = _path(version)
    if path.exists():
        return path
    chosen = compiler("CXX", ("c++", "g++", "clang++")).split()
    include = folder / "include"
    where = (include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    command = [*chosen, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}", *(f"-isystem{path}" for path in where)]
    compile_to(path, command, _SOURCE, (f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"), limit_s)
    path.chmod(0o755)
    _failure(path).unlink(missing_ok=True)
    return path


def load() -> Foreign:
    """Return the hook's module in a process that has imported torch, None where it is not built or not to be trusted.

    Raises ImportError where it is there and does not load.
    """
    global _loaded
    if _loaded is None:
        path = built(str(sys.modules["torch"].__version__))
        _loaded = (None if path is None or not _trusted(path) else _imported(path),)
    return _loaded[0]


def _imported(path: Path) -> Foreign:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _trusted(path: Path) -> bool:
    """Say whether only this user (or root) can have written or replaced the file."""

    def kept(one: Path) -> bool:
        state = one.stat()
        return state.st_uid in (0, os.getuid()) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    return kept(path) and kept(path.parent)


def _installed_torch() -> tuple[Path | None, str]:
    """Return the folder and the version of the installed torch, without importing it; None and "" without one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, ""
    folder = Path(spec.origin).parent
    found = re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE)
    return folder, found[1] if found else ""


def _abi() -> int:
    """Return which of libstdc++'s two string layouts torch was built with; 1 since torch 2.6 or so."""
    ask = "import torch; print(int(torch._C._GLIBCXX_USE_CXX11_ABI))"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NotBuilt(f"torch cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout)


def _failure(path: Path) -> Path:
    return path.with_suffix(".failed")


def _path(torch_version: str) -> Path:
    """In the user's cache folder, under a name that changes with all that goes into it."""
    python = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:12]
    return cache_folder() / "native_hook" / f"{_NAME}-torch{torch_version}-{python}-{digest}.so"


if __name__ == "__main__":  # the agent runs this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is unfinished is removed
    print(build_quietly())
