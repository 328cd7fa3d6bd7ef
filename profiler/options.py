"""The options that commands share: each is declared here once, with its name, help and meaning.

A command takes them as the types of its parameters: `lang: Lang = "en"`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import typer

from rankscope.analysis.text.message import LANGUAGES
from rankscope.collectors.rank_ranges import members_of
from rankscope.errors import RankscopeError

__all__ = [
    "Dask",
    "Json",
    "Lang",
    "Out",
    "Price",
    "Ranks",
    "Runs",
    "Steps",
    "World",
    "part_of",
    "takes",
    "with_json_path",
    "write",
]

_JSON = "--json"

Taken = TypeVar("Taken")


class _StepRange(NamedTuple):
    first: int
    last: int  # included


def _language(text: str) -> str:
    if text not in LANGUAGES:
        raise RankscopeError(f"--lang is {' or '.join(LANGUAGES)}; got {text}")
    return text


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise RankscopeError(f"--price is that of an hour of one GPU, a number above 0 as in 2.5; got {text}")
    return price


def _ranks(text: str) -> Sequence[int]:
    try:
        ranks = sorted(set(members_of(text)))
    except ValueError:
        ranks = []
    if not ranks:
        raise RankscopeError(f"--ranks is as in 0-7,12; got {text}")
    return ranks


def _steps(text: str) -> _StepRange:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    steps = _StepRange(int(found[1]), int(found[2] or found[1])) if found else _StepRange(1, 0)
    if steps.first > steps.last:
        raise RankscopeError(f"--steps is as in 100-110; got {text}")
    return steps


Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="The run; for nodes without shared storage, the folder of each."),
]
Steps = Annotated[
    _StepRange | None, typer.Option("--steps", metavar="A-B", parser=_steps, help="Only these steps, as in 100-110.")
]
World = Annotated[
    int | None, typer.Option("--world", metavar="N", min=0, help="This one of several jobs in the run folder.")
]
Ranks = Annotated[
    Sequence[int] | None,
    typer.Option("--ranks", metavar="RANKS", parser=_ranks, help="Only these ranks, as in 0-7,12."),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="PATH", help="Where to write, instead of the default place.")
]
Json = Annotated[
    str | None,
    typer.Option(_JSON, metavar="[PATH]", help="Write JSON to this file; without a path, to standard output."),
]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask",
        metavar="ADDRESS",
        help="Scan traces of torch.profiler and Nsight, and analyze long runs, on the Dask cluster of this scheduler "
        "(tcp://host:8786). Its workers must see the files and TMPDIR.",
    ),
]
Lang = Annotated[
    str,
    typer.Option(
        "--lang",
        metavar="LANGUAGE",
        parser=_language,
        envvar="RANKSCOPE_LANG",
        help="Language of the output: en, or zh (Chinese). JSON stays English.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        parser=_price,
        help="Price of an hour of one GPU (on CPUs, of one rank): findings then say what they cost in it.",
    ),
]


def takes(options: type[Taken]) -> Callable[[Callable[[Taken], None]], Callable[..., None]]:
    """Return for a command of many options: it gets one frozen value, whose fields typer turns into them."""

    def decorate(run: Callable[[Taken], None]) -> Callable[..., None]:
        def command(**given: object) -> None:
            run(options(**given))

        command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        return command

    return decorate


def with_json_path(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--json -` for a `--json` that no path follows, which typer cannot express."""
    return [
        f"{_JSON}=-" if word == _JSON and after.startswith("-") and after != "-" else word
        for word, after in pairwise([*arguments, "--"])
    ]


def part_of(runs: Sequence[Path], steps: tuple[int, int] | None, world: int | None) -> list[Path]:
    """Return the paths with the part that is read: `RUN/world=1/steps=100-110`. Raises RankscopeError."""
    part = [*([f"world={world}"] if world is not None else []), *([f"steps={steps[0]}-{steps[1]}"] if steps else [])]
    if not part:
        return [*runs]
    from rankscope.analysis.readers import native  # 0.2 s

    for run in runs:
        if run.exists() and not native.recognises(run):
            raise RankscopeError(f"{run} is no run folder, and is read as a whole: leave --steps and --world away")
    return [run.joinpath(*part) for run in runs]


def write(path: str | Path, content: str) -> None:
    """Write the content to the file, or for `-` to standard output. Raises RankscopeError."""
    if str(path) == "-":
        typer.echo(content, nl=False)
        return
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise RankscopeError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(str(path), err=True)
