"""The arguments of `run` and `exec`: rankscope's own options come first, the rest belongs to another program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from rankscope.profiler.errors import RankscopeError

__all__ = ["OWN_FLAGS", "OWN_VALUES", "Options", "program_name", "split", "torchrun_script"]

OWN_VALUES = ("--out", "--name", "--hz")
OWN_FLAGS = ("--no-report", "--help")

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
    out: str | None = None
    name: str | None = None
    hz: float = 1.0
    report: bool = True
    help: bool = False


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
            out=values.get("--out"),
            name=values.get("--name"),
            hz=_hz(values.get("--hz", "1")),
            report="--no-report" not in flags,
            help="--help" in flags,
        ),
        rest,
    )


def _hz(text: str) -> float:
    try:
        hz = float(text)
    except ValueError:
        hz = math.nan
    if not 0 < hz <= 100:
        raise RankscopeError(f"--hz is how often per second the node's counters are read, above 0 to 100; got {text}")
    return hz


def torchrun_script(arguments: list[str]) -> int:
    """Give the position of the script, module or program in torchrun's arguments; their number if there is none."""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if not argument.startswith("-"):
            return position
        if argument == "--":
            return position + 1
        dashed = argument.replace("_", "-")
        # torchrun's parser takes any unambiguous beginning of a long option.
        is_flag = any(
            flag == dashed or (dashed.startswith("--") and flag.startswith(dashed)) for flag in _TORCHRUN_FLAGS
        )
        position += 1 if is_flag or "=" in argument or _has_value_attached(argument) else 2
    return len(arguments)


def _has_value_attached(argument: str) -> bool:
    """True for `-r3`, the short form of an option with its value."""
    return len(argument) > 2 and argument[1] != "-"


def program_name(command: list[str]) -> str:
    """Give the name that people know a command by: `train` for `python -u src/train.py` and `python -m jobs.train`."""
    scripts = [word for word in command if word.endswith(".py")]
    if "-m" in command[:-1]:
        module = command[command.index("-m") + 1]
        return module.rpartition(".")[2]
    return PurePath(scripts[0] if scripts else command[0]).stem
