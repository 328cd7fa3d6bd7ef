"""NCCL's profiler plugin: building and finding it.

Standard library only: the rank's collector `nccl` imports this.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.collectors.native.compiling import cache_folder, compile_to, compiler
from rankscope.collectors.schema import NCCL_ALGORITHMS, NCCL_EVENTS, NCCL_PROTOCOLS, OPS, RING_SLOTS, RecordType

__all__ = ["EVENTS", "VARIABLE", "build", "built", "installed_elsewhere", "settings", "too_old"]

VARIABLE = "NCCL_PROFILER_PLUGIN"
EVENTS = ("calls", "proxies", "steps", "kernels", "network")  # what RANKSCOPE_NCCL_EVENTS may hold

_FIRST_NCCL = (2, 26)

_SOURCE = Path(__file__).with_name("nccl_plugin.c")
_FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
_STAYS_LOADED = "-Wl,-z,nodelete"  # NCCL unloads it with its last communicator, while the agent still reads
_NAMED = {
    **{f"OP_{op.upper()}": code for code, op in enumerate(OPS)},
    **{f"ALGORITHM_{name.upper()}": code for code, name in enumerate(NCCL_ALGORITHMS)},
    **{f"PROTOCOL_{name.upper()}": code for code, name in enumerate(NCCL_PROTOCOLS)},
    **{f"RECORD_{name}": code for name, code in vars(RecordType).items() if name.startswith("NCCL_")},
    **{f"SPAN_{kind.upper()}": NCCL_EVENTS.index(kind) for kind in ("kernel", "network")},
    "RING_SLOTS": RING_SLOTS,
}


def built() -> Path | None:
    """Return the plugin that was built from this version's source for this machine, None if there is none."""
    path = _path()
    return path if path.exists() else None


def build(chosen: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile the plugin into the cache folder and return its path.

    Raises NotBuilt when there is no C compiler, or it refuses.
    """
    command = (chosen or compiler("CC", ("cc", "gcc", "clang"))).split()
    macros = [f"-D{name}={value}" for name, value in _NAMED.items()]
    path = _path()
    compile_to(path, [*command, *_FLAGS, *extra, *macros], _SOURCE, (_STAYS_LOADED,), 120)
    return path


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables by which NCCL finds the plugin; none if not built or wanted."""
    path = built()
    return {} if path is None or installed_elsewhere(environment) else {VARIABLE: str(path)}


def installed_elsewhere(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the user's own profiler plugin, which NCCL must find; None if there is none."""
    if environment.get(VARIABLE):
        return f"{VARIABLE}={environment[VARIABLE]}"
    own = environment.get("NCCL_CONF_FILE") or f"{environment.get('HOME', '')}/.nccl.conf"
    for path in (Path(own), root / "etc" / "nccl.conf"):
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        if any(line.strip().startswith(f"{VARIABLE}=") for line in lines):
            return str(path)
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        path = Path(folder, "libnccl-profiler.so")  # what NCCL looks for by default
        if path.exists():
            return str(path)
    return None


def too_old(nccl: Sequence[object]) -> str | None:
    """Return why NCCL of this version, `(2, 21, 5, …)`, does not load the plugin; None if it does."""
    if tuple(nccl[:2]) >= _FIRST_NCCL:
        return None
    number, first = (".".join(map(str, version)) for version in (nccl[:3], _FIRST_NCCL))
    return f"NCCL {number} cannot load rankscope's profiler plugin, {first} can"


def _path() -> Path:
    """In the user's cache folder, under a name that changes with all that goes into it."""
    parts = (_SOURCE.read_bytes(), repr(sorted(_NAMED.items())).encode(), os.uname().machine.encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
    return cache_folder() / f"libnccl-profiler-rankscope-{digest}.so"
