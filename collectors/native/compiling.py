"""Build a shared library into the user's cache folder, with the compiler of this machine. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rankscope.errors import NotBuilt

__all__ = ["cache_folder", "compile_to", "compiler"]


def cache_folder() -> Path:
    """Return the folder of rankscope's builds: `$XDG_CACHE_HOME/rankscope` or `~/.cache/rankscope`."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rankscope")
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def compiler(variable: str, names: Sequence[str]) -> str:
    """Return the compiler that the environment variable names, or the first of `names` on PATH. Raises NotBuilt."""
    found = os.environ.get(variable) or next(filter(shutil.which, names), None)
    if found is None:
        language = "C++" if variable == "CXX" else "C"
        raise NotBuilt(f"there is no {language} compiler ({', '.join(names[:-1])} or {names[-1]}) on PATH")
    return found


def compile_to(path: Path, command: Sequence[str], source: Path, last: Sequence[str], limit_s: float) -> None:
    """Run `command source -o … last` and put its output at `path` in one step. Raises NotBuilt.

    A job that starts meanwhile sees the old library or the new one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            whole = [*command, str(source), "-o", str(made), *last]
            done = subprocess.run(whole, capture_output=True, text=True, timeout=limit_s)
            if done.returncode:
                raise NotBuilt(f"{command[0]} refused: {_first_error(done.stderr)}")
            os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{command[0]} took more than {limit_s:.0f} s") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"{command[0]}: {error}") from None


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if "error" in line), lines[0])
