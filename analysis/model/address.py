"""Parses a path: the folder of a run, optionally one of its worlds, and some of its steps."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import BadInput

__all__ = ["Address", "PathLike", "address_of", "run_folder", "says_what_was_launched"]

PathLike = str | os.PathLike[str]

_WORLD = re.compile(r"world=(\d+)")  # one world of a run, and one of its steps or more: after the run's folder
_STEPS = re.compile(r"steps=(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed path: the folders of a run, optionally one world by its number, and steps."""

    folders: list[str]
    world: int | None
    steps: tuple[int, int] | None


def run_folder(path: Path) -> Path:
    """Return the folder of a run.

    `path` may also be one of its worlds, or some of its steps, which need be no folder.
    """
    return Path(*address_of([str(path)]).folders)


def says_what_was_launched(path: Path) -> bool:
    """Say whether the run that this path names holds what an agent wrote about the launch."""
    return any(run_folder(path).glob("run/node=*.json"))


def address_of(paths: list[str]) -> Address:
    """Return the folders of a run, and what of it is named: `runs/…/world=1`, `runs/…/steps=100-200`, or both."""
    found = [_named_by(Path(path)) for path in paths]
    of = {(world, steps) for _, world, steps in found}
    if len(of) > 1:
        raise BadInput(f"{', '.join(paths)}: these are several parts of a run, give the folders of one")
    world, steps = next(iter(of), (None, None))
    return Address(folders=[str(folder) for folder, *_ in found], world=world, steps=steps)


def _named_by(path: Path) -> tuple[Path, int | None, tuple[int, int] | None]:
    steps = None
    if match := _STEPS.fullmatch(path.name):
        steps = int(match[1]), int(match[2] or match[1])
        if steps[1] < steps[0]:
            raise BadInput(f"{path}: the last of these steps is before the first")
        path = path.parent
    match = _WORLD.fullmatch(path.name)
    return (path.parent, int(match[1]), steps) if match else (path, None, steps)
