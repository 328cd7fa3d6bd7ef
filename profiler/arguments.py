"""Parses arguments. For `run` and `exec` rankscope's own options come first, the rest is another program's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from rankscope.collectors.object_storage import location, spool_url
from rankscope.errors import RankscopeError

__all__ = [
    "HELP",
    "OWN_FLAGS",
    "OWN_VALUES",
    "Options",
    "node_rank",
    "program_name",
    "split",
    "torchrun_program",
]

OWN_VALUES = ("--out", "--name", "--hz", "--keep", "--profile-first", "--profile-steps", "--profile-slow")
HELP = {"--help", "-h"}
OWN_FLAGS = ("--no-report", "--help", "-h")

FIRST, _MOST_FIRST = 2, 20  # steps of the window that a job on GPUs begins with

_UNITS = {"M": 10**6, "G": 10**9, "T": 10**12}

# torchrun's options that take no value. All others take one, which matters only for finding the script.
_TORCHRUN_FLAGS = (
    "-m",
    "-h",
    "--module",
    "--help",
    "--standalone",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    out: str | None = None  # a folder, or a URL in object storage
    name: str | None = None
    hz: float = 1.0
    keep_bytes: int | None = None  # 0: everything; None: what is usual
    report: bool = True
    help: bool = False
    profile_first: int = FIRST
    profile_steps: tuple[int, int] | None = None
    profile_slow: int = 0

    @property
    def url(self) -> str | None:
        """The run's place in object storage."""
        return self.out if self.out and spool_url(self.out) else None

    def for_agent(self) -> list[str]:
        """Return the agent's options on windows and retention."""
        first = ["--profile-first", str(self.profile_first)]
        steps = ["--profile-steps", json.dumps(self.profile_steps)] if self.profile_steps else first
        keep = [] if self.keep_bytes is None else ["--keep-bytes", str(self.keep_bytes)]
        upload = ["--upload", self.url] if self.url else []
        return [*steps, *(["--profile-slow", str(self.profile_slow)] if self.profile_slow else []), *keep, *upload]


def split(arguments: list[str]) -> tuple[Options, list[str]]:
    """Part rankscope's own options, up to the first argument that is none of them, from the rest."""
    values: dict[str, str] = {}
    flags: set[str] = set()
    rest = list(arguments)
    while rest:
        name, equals, value = rest[0].partition("=")
        if rest[0] in OWN_FLAGS:
            flags.add(name)
            taken = 1
        elif name in OWN_VALUES:
            taken = 1 if equals else 2
            if len(rest) < taken:
                raise RankscopeError(f"{name} needs a value")
            values[name] = value if equals else rest[1]
        else:
            break
        del rest[:taken]
    if "--out" in values and "--name" in values:
        raise RankscopeError(
            "give --out or --name, not both: --out is the whole run folder, --name the end of its name"
        )
    return (
        Options(
            out=_out(values["--out"]) if "--out" in values else None,
            name=values.get("--name"),
            hz=_hz(values.get("--hz", "1")),
            keep_bytes=_bytes(values["--keep"]) if "--keep" in values else None,
            report="--no-report" not in flags,
            help=bool(HELP & flags),
            profile_first=_first(values.get("--profile-first", str(FIRST))),
            profile_steps=_steps(values["--profile-steps"]) if "--profile-steps" in values else None,
            profile_slow=_slow(values.get("--profile-slow", "0")),
        ),
        rest,
    )


def _out(text: str) -> str:
    at = location(text)
    if at and at.scheme == "file":
        return f"/{at.path}"
    spool_url(text)
    return text


def _hz(text: str) -> float:
    try:
        hz = float(text)
    except ValueError:
        hz = math.nan
    if not 0 < hz <= 100:
        raise RankscopeError(f"--hz is how often per second the node's counters are read, above 0 to 100; got {text}")
    return hz


def _bytes(text: str) -> int:
    """As in 500M; 0 for `all`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MGT])", text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size and text != "all":
        raise RankscopeError(f"--keep is what a node's files may take, as in 500M, 20G or 1T, or all; got {text}")
    return size


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    numbers = [first, last if dash else first]
    steps = (int(numbers[0]), int(numbers[1])) if all(map(str.isdecimal, numbers)) else (0, 0)
    if not 1 <= steps[0] <= steps[1]:
        raise RankscopeError(f"--profile-steps is as in 100-102, the first step being 0 and never in it; got {text}")
    return steps


def _first(text: str) -> int:
    if not (text.isdecimal() and int(text) <= _MOST_FIRST):
        raise RankscopeError(f"--profile-first is how many steps the first window has, 0 to {_MOST_FIRST}; got {text}")
    return int(text)


def _slow(text: str) -> int:
    if not text.isdecimal():
        raise RankscopeError(f"--profile-slow is how many slow steps may open a window; got {text}")
    return int(text)


def torchrun_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part torchrun's own options from what it starts: `[script]`, `["-m", module]`, or nothing."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "--":
        position += 1 if _stands_alone(arguments[position]) else 2
    options, rest = arguments[:position], [word for word in arguments[position:] if word != "--"]
    is_module = bool({"-m", "--module"}.intersection(options))
    return options, ["-m", rest[0]] if rest and is_module else rest[:1]


def node_rank(torchrun_options: list[str], environment: Mapping[str, str]) -> int:
    """Give the node's rank if torchrun has one, else 0."""
    given = environment.get("PET_NODE_RANK", "0")
    for option, following in pairwise([*torchrun_options, ""]):
        name, equals, value = option.replace("_", "-").partition("=")
        if name == "--node-rank":
            given = value if equals else following
    return int(given) if given.isdecimal() else 0


def _stands_alone(option: str) -> bool:
    """Return whether the next argument is not this option's value."""
    if not option.startswith("--"):
        return option in _TORCHRUN_FLAGS or len(option) > 2  # -r3 holds its value
    # torchrun's parser takes any unambiguous beginning of a long option.
    dashed = option.replace("_", "-")
    return "=" in option or any(flag.startswith(dashed) for flag in _TORCHRUN_FLAGS)


def program_name(command: list[str]) -> str:
    """Give the name that people know a command by: `train` for `python -u src/train.py` and `python -m jobs.train`."""
    for before, word in pairwise(["", *command]):
        if before == "-m":
            return word.rpartition(".")[2]
        if word.endswith(".py"):
            return PurePath(word).stem
    return PurePath(command[0]).stem
