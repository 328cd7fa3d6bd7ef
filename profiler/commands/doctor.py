"""Show what can be recorded here.

And why the rest cannot be recorded.

Example: rankscope doctor
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json as json_format
import os
import pkgutil
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rankscope.errors import NotBuilt, NotRecorded, RankscopeError
from rankscope.profiler.columns import aligned

__all__ = ["Check", "command"]

_EXTRAS = {"ui": ("dash", "dash_mantine_components", "dash_ag_grid")}
_COMPILED = ("rankscope.analysis.readers._scan", "rankscope.analysis.replay._replay")
_FREE_BYTES = 1e9


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that can be recorded or done here, or cannot, and why."""

    name: str
    ok: bool
    detail: str


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of the table.")] = False,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="First build what is compiled for this machine: the collectives hook (C++) and NCCL's plugin (C).",
        ),
    ] = False,
) -> None:
    if build:
        _build()
    asked = (_torch, _launcher, _agent, _clock, _collectors, _native_hook, _nccl_plugin, _disk, _compiled, _extras)
    checks = [check for ask in asked for check in ask()]
    if json:
        print(json_format.dumps([asdict(check) for check in checks], indent=1))
    else:
        print(aligned([(check.name, "yes" if check.ok else "no", check.detail) for check in checks]))


def _build() -> None:
    """Build both. Raises RankscopeError, after the second was tried."""
    from rankscope.collectors import native_hook, nccl_profiler

    refused = []
    for name, module in (("the collectives hook", native_hook), ("the NCCL plugin", nccl_profiler)):
        try:
            module.build()
        except NotBuilt as error:
            refused.append(f"{name} was not built: {error}")
    if refused:
        raise RankscopeError("; ".join(refused))


def _torch() -> Iterator[Check]:
    if sys.platform != "linux":
        yield Check("recording", False, f"rankscope records on Linux only, this is {sys.platform}")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Check("torch", False, f"not installed for {sys.executable}; torchrun on PATH is used, if there is one")
    else:
        loads = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (2, 5)
        yield Check("torch", loads, version if loads else f"{version} does not load rankscope into ranks; 2.5 does")
    found = [point for point in importlib.metadata.entry_points(group="torch.backends") if point.name == "rankscope"]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Check("into the ranks", False, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: unset it")
    else:
        yield Check("into the ranks", bool(found), "entry point torch.backends" if found else "reinstall rankscope")


def _launcher() -> Iterator[Check]:
    from rankscope.profiler.torchrun import is_own, torchrun

    try:
        command = torchrun()
    except RankscopeError as error:
        yield Check("torchrun", False, str(error))
    else:
        yield Check("torchrun", True, f"of {sys.executable}" if is_own() else command[0])


def _agent() -> Iterator[Check]:
    """An agent is started, and ended again, in a folder of its own."""
    from rankscope.profiler.node_agent import Agent, answers

    name = f"rankscope-{os.getuid()}-{os.getpid()}-doctor"
    with TemporaryDirectory(prefix="rankscope-") as folder:
        start = time.perf_counter()
        try:
            agent = Agent(name, Path(folder, "run"), 1.0, {"command": sys.argv, "directory": os.getcwd()})
        except (NotRecorded, OSError) as error:
            yield Check("agent", False, str(error))
            return
        ready_s = time.perf_counter() - start
        answered = answers(name)
        trouble = agent.end() if answered else f"nothing answers on the abstract socket {name}"
        yield Check("agent", trouble is None, trouble or f"ready after {ready_s:.1f} s, answers on its socket")


def _clock() -> Iterator[Check]:
    info = time.get_clock_info("perf_counter")
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = "unknown"
    yield Check("clock", "MONOTONIC" in info.implementation, f"{info.implementation}, clock source {source}")


def _collectors() -> Iterator[Check]:
    """Those of the node are started, read once and stopped, as the agent does it."""
    from rankscope.collectors import node, rank
    from rankscope.collectors.agent.node_sampler import Sampler
    from rankscope.collectors.topology import described

    for module in pkgutil.iter_modules(rank.__path__):
        yield Check(f"rank: {module.name}", True, "runs in the training process")
    sampler = Sampler(frozenset(), 1.0)
    sampler.start()
    sampler.finish()
    trouble = {}
    while not sampler.gaps.empty():
        source, why, _ = sampler.gaps.get()
        trouble[source] = why
    for module in pkgutil.iter_modules(node.__path__):
        problem = trouble.get(module.name)
        yield Check(f"node: {module.name}", problem is None, problem or "can be read")
    for name, where in described(sampler.topology) if sampler.topology else ():
        yield Check(f"node: {name}", True, where)


def _native_hook() -> Iterator[Check]:
    from rankscope.collectors import native_hook

    path = native_hook.built()
    missing = "not built, a slower one in Python serves; rankscope doctor --build builds it"
    yield Check("collectives hook in C++", path is not None, str(path or missing))


def _nccl_plugin() -> Iterator[Check]:
    from rankscope.collectors import nccl_profiler

    path, other = nccl_profiler.built(), nccl_profiler.installed_elsewhere(os.environ)
    name, version = _nccl()
    too_old = nccl_profiler.too_old([int(part) for part in version.split(".")[:3]]) if version else None
    if other:
        yield Check("NCCL plugin", False, f"another one is in its place: {other}")
    elif too_old:
        yield Check("NCCL plugin", False, too_old)
    elif path:
        yield Check("NCCL plugin", True, f"{path}, for NCCL {version} of {name}" if version else str(path))
    else:
        yield Check("NCCL plugin", False, "not built; rankscope doctor --build builds it")


def _nccl() -> tuple[str, str]:
    """Package and version of the NCCL that torch was installed with; empty where it is no package of its own."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for required in importlib.metadata.requires("torch") or ():
            name = re.match(r"nvidia-nccl[\w-]*", required)
            if name:
                return name[0], importlib.metadata.version(name[0])
    return "", ""


def _disk() -> Iterator[Check]:
    folder = Path("runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Check("disk", False, f"cannot write to {existing}; give `rankscope run --out` another folder")
    else:
        yield Check("disk", free_bytes > _FREE_BYTES, f"{free_bytes / 1e9:.1f} GB free for {folder}")


def _compiled() -> Iterator[Check]:
    """The C parts of the analysis, which `pip` leaves out without a word where it has no compiler."""
    try:
        for name in _COMPILED:
            importlib.import_module(name)
    except ImportError:
        why = "not built: profilers' traces are read some 200 times slower; install a C compiler, then rankscope again"
        yield Check("compiled parts", False, why)
    else:
        yield Check("compiled parts", True, "reading of traces, replay")


def _extras() -> Iterator[Check]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield Check(f"extra: {extra}", not missing, f"pip install 'rankscope[{extra}]'" if missing else "installed")
