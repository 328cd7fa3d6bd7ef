"""The collectives hook in C++: where it lies, how it is built, and loading it. Standard library only.

It is built for the torch, Python and source that are installed; a rank that finds none records by the hook in Python.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rankscope.collectors.compiling import cache_folder, compile_to, compiler
from rankscope.errors import NotBuilt

__all__ = ["build", "built", "load"]

_SOURCE = Path(__file__).with_name("hook.cpp")
_NAME = "rankscope_hook"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_LIMIT_S = 120.0  # 17 s with g++ 12 on a quiet core
_loaded: tuple[Any] | None = None


def built(torch_version: str | None = None) -> Path | None:
    """Return the hook that was built for this torch (default: the one that is installed), None if there is none."""
    version = torch_version or _installed_torch()[1]
    path = _path(version) if version else None
    return path if path is not None and path.exists() else None


def build() -> Path:
    """Compile the hook into the cache folder and return its path.

    Raises:
        NotBuilt: there is no torch or no C++ compiler, or the compiler refuses or takes too long.
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
    compile_to(path, command, _SOURCE, (f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"), _LIMIT_S)
    path.chmod(0o755)
    return path


def load() -> Any:  # noqa: ANN401
    """Return the hook's module in a process that has imported torch, None where it is not built or not to be trusted.

    Raises ImportError where it is there and does not load.
    """
    global _loaded
    if _loaded is None:
        path = built(str(sys.modules["torch"].__version__))
        _loaded = (None if path is None or not _trusted(path) else _imported(path),)
    return _loaded[0]


def _imported(path: Path) -> Any:  # noqa: ANN401
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _trusted(path: Path) -> bool:
    """Whether nobody but this user (or root) can have written the file or put another in its place."""

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


def _path(torch_version: str) -> Path:
    """In the user's cache folder, under a name that changes with all that goes into it."""
    python = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:12]
    return cache_folder() / "native_hook" / f"{_NAME}-torch{torch_version}-{python}-{digest}.so"
