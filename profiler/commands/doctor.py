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

from rankscope.analysis.text.message import speaking, text
from rankscope.analysis.text.phrases import as_recorded
from rankscope.errors import NotBuilt, NotRecorded, RankscopeError
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Json, Lang, write

__all__ = ["Check", "command"]

_EXTRAS = {"ui": ("dash", "dash_ag_grid")}
_COMPILED = ("rankscope.analysis.readers._scan", "rankscope.analysis.replay._replay")
_FREE_BYTES = 1e9


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that can be recorded or done here, or cannot, and why."""

    name: str
    ok: bool
    detail: str


def command(
    json: Json = None,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="First build what is compiled for this machine: the collectives hook (C++) and NCCL's plugin (C).",
        ),
    ] = False,
    lang: Lang = "en",
) -> None:
    if build:
        _build()
    asked = (_torch, _launcher, _agent, _clock, _collectors, _native_hook, _nccl_plugin, _disk, _compiled, _extras)
    checks = [check for ask in asked for check in ask()]
    if json:
        write(json, json_format.dumps([asdict(check) for check in checks], indent=1) + "\n")
    if json != "-":
        with speaking(lang):
            print(aligned([(check.name, text("yes") if check.ok else text("no"), check.detail) for check in checks]))


def _build() -> None:
    """Build both. Raises RankscopeError, after the second was tried."""
    from rankscope.collectors.native import collectives_hook, nccl_plugin

    refused = []
    for name, module in (("the collectives hook", collectives_hook), ("the NCCL plugin", nccl_plugin)):
        try:
            module.build()
        except NotBuilt as error:
            refused.append(f"{name} was not built: {error}")
    if refused:
        raise RankscopeError("; ".join(refused))


def _torch() -> Iterator[Check]:
    if sys.platform != "linux":
        this = sys.platform
        yield Check(text("recording"), False, text("rankscope records on Linux only, this is {system}", system=this))
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        why = text("not installed for {python}; torchrun on PATH is used, if there is one", python=sys.executable)
        yield Check("torch", False, why)
    else:
        loads = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (2, 5)
        too_old = text("{version} does not load rankscope into ranks; 2.5 does", version=version)
        yield Check("torch", loads, version if loads else too_old)
    found = [point for point in importlib.metadata.entry_points(group="torch.backends") if point.name == "rankscope"]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Check(text("into the ranks"), False, text("TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: unset it"))
    else:
        how = text("entry point torch.backends") if found else text("reinstall rankscope")
        yield Check(text("into the ranks"), bool(found), how)


def _launcher() -> Iterator[Check]:
    from rankscope.profiler.torchrun import is_own, torchrun

    try:
        command = torchrun()
    except RankscopeError as error:
        yield Check("torchrun", False, str(error))
    else:
        yield Check("torchrun", True, text("of {python}", python=sys.executable) if is_own() else command[0])


def _agent() -> Iterator[Check]:
    """Start an agent, and end it again, in a folder of its own."""
    from rankscope.profiler.node_agent import Agent, answers

    name = f"rankscope-{os.getuid()}-{os.getpid()}-doctor"
    with TemporaryDirectory(prefix="rankscope-") as folder:
        start = time.perf_counter()
        try:
            agent = Agent(name, Path(folder, "run"), 1.0, {"command": sys.argv, "directory": os.getcwd()})
        except (NotRecorded, OSError) as error:
            yield Check(text("agent"), False, str(error))
            return
        ready_s = time.perf_counter() - start
        answered = answers(name)
        trouble = agent.end() if answered else text("nothing answers on the abstract socket {name}", name=name)
        ready = text("ready after {seconds:.1f} s, answers on its socket", seconds=ready_s)
        yield Check(text("agent"), trouble is None, trouble or ready)


def _clock() -> Iterator[Check]:
    info = time.get_clock_info("perf_counter")
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = "?"
    how = text("{clock}, clock source {source}", clock=info.implementation, source=source)
    yield Check(text("clock"), "MONOTONIC" in info.implementation, how)


def _collectors() -> Iterator[Check]:
    """Start, read once and stop the node's collectors, as the agent does."""
    from rankscope.collectors import node, rank
    from rankscope.collectors.agent.node_sampler import Sampler
    from rankscope.collectors.topology import described

    sampler = Sampler(frozenset(), 1.0)
    sampler.start()
    sampler.finish()
    trouble = {}
    while not sampler.gaps.empty():
        source, why, _ = sampler.gaps.get()
        trouble[source] = why
    no_gpu = _torch_without_gpus() or trouble.get("gpu", "")
    for module in pkgutil.iter_modules(rank.__path__):
        collector = importlib.import_module(f"{rank.__name__}.{module.name}").collector
        problem = (no_gpu if collector.needs_gpu else "") or collector.lacks()
        how = as_recorded(problem) if problem else text("runs in the training process")
        yield Check(f"rank: {module.name}", not problem, how)
    for module in pkgutil.iter_modules(node.__path__):
        problem = trouble.get(module.name)
        yield Check(f"node: {module.name}", problem is None, as_recorded(problem) if problem else text("can be read"))
    for name, where in described(sampler.topology) if sampler.topology else ():
        yield Check(f"node: {name}", True, where)


def _torch_without_gpus() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "torch is built for CPUs only"
    return ""


def _native_hook() -> Iterator[Check]:
    from rankscope.collectors.native import collectives_hook

    path, failure = collectives_hook.built(), collectives_hook.failure()
    missing = text(
        "not built yet, a slower one in Python is used; a job of some minutes builds it, or rankscope doctor --build"
    )
    if failure:
        missing = text(
            "not built, a slower one in Python is used: {failure}; rankscope doctor --build tries again",
            failure=failure,
        )
    yield Check(text("collectives hook in C++"), path is not None, str(path) if path else missing)


def _nccl_plugin() -> Iterator[Check]:
    from rankscope.collectors.native import nccl_plugin

    path, other = nccl_plugin.built(), nccl_plugin.installed_elsewhere(os.environ)
    name, version = _nccl()
    too_old = nccl_plugin.too_old([int(part) for part in version.split(".")[:3]]) if version else None
    if other:
        yield Check(text("NCCL plugin"), False, text("another one is in its place: {other}", other=other))
    elif too_old:
        why = text("NCCL {version} is too old to load rankscope's profiler plugin", version=version)
        yield Check(text("NCCL plugin"), False, why)
    elif path:
        used = text("{path}, for NCCL {version} of {name}", path=path, version=version, name=name)
        yield Check(text("NCCL plugin"), True, used if version else str(path))
    else:
        yield Check(text("NCCL plugin"), False, text("not built; rankscope doctor --build builds it"))


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
        why = text("cannot write to {folder}; give `rankscope run --out` another folder", folder=existing)
        yield Check(text("disk"), False, why)
    else:
        free = text("{size:.1f} GB free for {folder}", size=free_bytes / 1e9, folder=folder)
        yield Check(text("disk"), free_bytes > _FREE_BYTES, free)


def _compiled() -> Iterator[Check]:
    """Check the C parts of the analysis, which `pip` leaves out without a word where it has no compiler."""
    try:
        for name in _COMPILED:
            importlib.import_module(name)
    except ImportError:
        why = text(
            "not built: profilers' traces are read some 200 times slower; install a C compiler, then rankscope again"
        )
        yield Check(text("compiled parts"), False, why)
    else:
        yield Check(text("compiled parts"), True, text("reading of traces, replay"))


def _extras() -> Iterator[Check]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        how = f"pip install 'rankscope[{extra}]'" if missing else text("installed")
        yield Check(text("extra: {name}", name=extra), not missing, how)
