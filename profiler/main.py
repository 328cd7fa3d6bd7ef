"""The command line: every module of `profiler/commands/` is a command of its name.

A command's module has a function `command`, whose signature typer turns into options; or a function `main`, which gets
its arguments untouched because they belong to another program (`run`, `exec`). Only the named command is imported.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import sys
from importlib import import_module
from types import ModuleType

import rankscope
from rankscope.errors import RankscopeError
from rankscope.profiler import commands
from rankscope.profiler.errors import say

__all__ = ["main"]

_GARBAGE = 100_000  # objects more than were freed until Python looks for garbage


def main() -> None:
    """Run the command named on the command line; an error that the user can fix ends it with one line."""
    try:
        _dispatch(sys.argv[1:])
    except RankscopeError as error:
        say(str(error))
        _leave(error.exit_code)
    except SystemExit as ended:
        _leave(ended.code)
    else:
        _leave(0)


def _leave(code: int | str | None) -> None:
    """Exit with this code; where the reader of the output is gone (`| head`), without the interpreter's complaint."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there as Python ends
        code = code or 1
    sys.exit(code)


def _dispatch(arguments: list[str]) -> None:
    files = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(commands.__path__)}
    named = arguments[0] if arguments and arguments[0] in files else None
    wanted = [named] if named else sorted(files)
    modules = {name: import_module(f"{commands.__name__}.{files[name]}") for name in wanted}
    if named and hasattr(modules[named], "main"):
        modules[named].main(arguments[1:])
    else:
        _typer(modules, arguments)


def _typer(modules: dict[str, ModuleType], arguments: list[str]) -> None:
    import typer

    from rankscope.profiler.options import with_json_path

    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"rankscope {rankscope.__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        """Diagnose slow distributed PyTorch training: the straggler, its cost, and the predicted speedup of a fix."""

    for name, module in modules.items():
        app.command(name, help=module.__doc__)(module.command if hasattr(module, "command") else module.main)
    _use_few_threads()
    app(with_json_path(arguments), prog_name="rankscope")


def _use_few_threads() -> None:
    """Keep numpy and polars, not yet imported, in one thread, and Python from looking for garbage.

    A report has a thousand small tables: numpy's threads, which spin, cost 3 % of it, a second one of polars' up to
    7 %, and looking for garbage 5 %. Large runs are divided among processes (`analysis/readers/workers.py`).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    gc.set_threshold(_GARBAGE)
