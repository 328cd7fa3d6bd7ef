"""Write docs/commands.md from the commands' own help: `make docs`."""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import sys
from pathlib import Path

from rankscope.profiler import commands, main

PAGE = Path(__file__).with_name("commands.md")
WIDTH = "100"


def names() -> list[str]:
    """Give the commands' names, in order."""
    return sorted(module.name.rstrip("_") for module in pkgutil.iter_modules(commands.__path__))


def render() -> str:
    """Give the whole page."""
    parts = [
        "# Commands",
        "Generated from the commands' `--help` by `make docs`; edit the modules in `profiler/commands/` instead.",
        "`RUN/steps=A-B` and `RUN/world=N` name the same part of a run as `--steps A-B` and `--world N` do, also where "
        "two parts of one run are compared. Most commands also read traces of other tools. "
        "[Record your job](how-to/record.md) explains both.",
        *(f"## {name}\n\n```\n{_help(name)}\n```" for name in names()),
    ]
    return "\n\n".join(parts) + "\n"


def _help(name: str) -> str:
    os.environ["COLUMNS"] = WIDTH
    sys.argv = ["rankscope", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main.main()
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
