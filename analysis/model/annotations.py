"""What the name of a range says: record_function's in a profiler's trace, NVTX's in an Nsight export."""

from __future__ import annotations

import re

from rankscope.collectors.schema import WINDOW_STEP

__all__ = ["STEP", "TRAINS", "compiles", "range_kind", "without_hash"]

_KINDS = {"Optimizer.step": "optimizer", "enumerate(DataLoader)": "input"}  # by how the name begins
# Of a range of the script's own that is a step.
STEP = r"(?i)^((train|training|global)[ _-]?)?(step|iter|iteration|batch)[ _#:=-]*\d*$|^ProfilerStep#\d+$"
TRAINS = tuple(_KINDS)  # how names begin of what only the thread that trains does
_LEFT_OUT = re.compile(r"ProfilerStep#|(nccl|gloo):|c10d::|nccl[A-Z]|" + re.escape(WINDOW_STEP))

_SAVES = re.compile(r"(?i)^torch\.save\b|save.*(checkpoint|ckpt)|(checkpoint|ckpt).*save")
_COMPILED = re.compile(r"^## Call (CompiledFxGraph) \w+ ##$")


def without_hash(name: str) -> str:
    """Return the name without the hash of compiled code: each rank has another one, and none could be compared."""
    compiled = _COMPILED.match(name)
    return compiled[1] if compiled else name


def compiles(name: str) -> bool:
    """Say whether a range or operator of this name is part of a compilation, as torch._dynamo calls them."""
    return name.endswith(" (dynamo_timed)")


def range_kind(name: str) -> str | None:
    """Return the kind of the region of this name; None for what steps or collectives say better."""
    if _LEFT_OUT.match(name):
        return None
    if compiles(name):
        return "compile"
    if _SAVES.search(name):
        return "checkpoint"
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), "user")
