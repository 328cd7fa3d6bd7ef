"""The order of the floors: what may import what, read from the source. `python tests/test_layers.py` prints it.

Exceptions are listed here, and may only become fewer: one that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.paths import ROOT

# From the lowest floor up. A room imports from rooms below it only.
FLOORS = (
    *("errors", "collectors"),
    *("analysis.text", "analysis.model", "analysis.readers", "analysis.timeline", "analysis.runs", "analysis.metrics"),
    *("analysis.replay", "analysis.detectors", "analysis.diagnosis", "analysis.compare"),
    "analysis.report",
    *("dashboard", "profiler"),
)
# What is done for a single file, so of one rank or node, in parallel; it knows nothing of what needs all of them: those
# modules of readers, and all floors from `analysis.timeline` up.
OF_ONE_FILE = ("analysis.readers.kineto.scan", "analysis.readers.native.arrow_files")
OF_ALL_RANKS = {"collective_numbering", "kineto.numbering", "kineto.tables", "native.worlds"}
# Collectors have floors of their own.
OF_COLLECTORS = ("collectors", "collectors.node", "collectors.agent")
IN_A_RANK = (
    "collectors/in_rank",
    "collectors/rank",
    "collectors/schema.py",
    "collectors/native",
    "collectors/agent_socket.py",
    "collectors/rank_ranges.py",
    "collectors/switched_off.py",
    "collectors/worker_server.py",
    "src/rankscope/errors.py",
)
LONG_MODULES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
MANY_PARAMETERS = {"collectors.in_rank.ring_writer.write"}  # of every record: fewer would cost the job time
# Imports inside functions: what is heavy, or need not be installed. Commands import all that is heavy so.
HEAVY = {"asyncio", "babel", "distributed", "polars", "pyarrow", "rich", "typer"}
IMPORTED_LATE = {
    "analysis.diagnosis.kept_report": {"rankscope.analysis.diagnosis.diagnose.read_run"},  # all of the analysis
    "collectors.agent.node_sampler": {"rankscope.collectors.node.gpu"},  # without NVML the others still work
    "collectors.in_rank.boot": {"rankscope.collectors.in_rank.session"},  # of all that import torch few are ranks
    "profiler.main": {"rankscope.profiler.options.with_json_path"},  # `rankscope run` needs no typer
    "profiler.options": {"rankscope.analysis.readers.native"},  # polars
}
MOST_LINES, MOST_IN_A_FUNCTION, MOST_PARAMETERS = 600, 60, 8


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `rankscope`."""
    found = {"errors": ROOT / "src" / "rankscope" / "errors.py"}
    for folder in ("analysis", "collectors", "dashboard", "profiler"):
        for path in (ROOT / folder).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """What a module, or a function of it, imports at run time; not what only a type checker sees."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Which modules of the package each module imports."""
    known = modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name in imports(parsed(path)):
            within = name.removeprefix("rankscope.")
            if within != name:
                target = within if within in known else within.rpartition(".")[0]
                found[module] |= {target} & known.keys() - {module}
    return found


def room(module: str) -> str:
    """The folder that a module is in; above the collectors and the analysis there are two rooms only."""
    parts = module.split(".")
    is_inner = parts[0] in ("analysis", "collectors") and (ROOT / parts[0] / "/".join(parts[1:2])).is_dir()
    return ".".join(parts[:2]) if is_inner else parts[0]


def upward() -> set[tuple[str, str]]:
    """Imports from a lower floor to a higher one."""
    height = {name: number for floors in (FLOORS, OF_COLLECTORS) for number, name in enumerate(floors)}
    return {
        (module, target)
        for module, targets in graph().items()
        for target in targets
        for floors in (FLOORS, OF_COLLECTORS)
        if room(module) in floors and room(target) in floors and height[room(module)] < height[room(target)]
    }


def reached(start: str) -> set[str]:
    """The modules that this one imports, directly or through others."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for target in graph()[ahead.pop()] - seen:
            seen.add(target)
            ahead.append(target)
    return seen


def cycles() -> set[frozenset[str]]:
    """Modules that import each other, directly or through others."""
    below = {module: reached(module) for module in graph()}
    return {
        frozenset(other for other in below[module] if module in below[other])
        for module in below
        if module in below[module]
    }


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function, called `module.function`, with classes in between left out."""
    for module, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{module}.{node.name}", node


def test_no_module_imports_from_a_higher_floor():
    assert not upward()


def test_modules_are_imported_at_the_top():
    late: dict[str, set[str]] = {}
    for module, path in modules().items():
        for function in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)):
            for name in imports(function):
                if not module.startswith("profiler.commands") and name.partition(".")[0] not in HEAVY:
                    late.setdefault(module, set()).add(name)
    assert late == IMPORTED_LATE


def test_every_room_has_a_floor():
    rooms = {room(module) for module in modules() if "." in module and not module.startswith("collectors")}
    assert rooms <= {*FLOORS, "dashboard", "profiler"}


def test_no_modules_import_each_other():
    assert not cycles()


def test_what_reads_one_file_knows_of_no_other():
    above = FLOORS[FLOORS.index("analysis.timeline") :]
    for module in OF_ONE_FILE:
        seen = {name for name in reached(module) if room(name) in above or name.split(".", 2)[-1] in OF_ALL_RANKS}
        assert not seen, module


def test_only_torch_and_the_standard_library_are_imported_inside_a_rank():
    allowed = {*sys.stdlib_module_names, "torch", "rankscope", "__future__"}
    own = ("rankscope.collectors", "rankscope.errors", "rankscope.annotate", "rankscope.step")
    paths = [p for name in IN_A_RANK for p in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    foreign = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in paths
        for name in imports(parsed(path))
        if name.partition(".")[0] not in allowed or (name.startswith("rankscope.") and not name.startswith(own))
    }
    assert not foreign


def test_modules_are_short():
    data = ("collectors.schema", "collectors.counters")
    long = {m for m, p in modules().items() if len(p.read_text(encoding="utf-8").splitlines()) > MOST_LINES}
    assert long - set(data) == LONG_MODULES


def test_functions_are_short():
    assert {name for name, node in functions() if lines_of(node) > MOST_IN_A_FUNCTION} == LONG_FUNCTIONS


def test_functions_have_few_parameters():
    many = {name for name, node in functions() if node.name != "detect" and parameters_of(node) > MOST_PARAMETERS}
    assert many == MANY_PARAMETERS


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    described = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    of_doc = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1 if described else 0
    return (node.end_lineno or 0) - node.lineno + 1 - of_doc


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has."""
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def test_test_files_stand_alone():
    """What two of them need is in tests/support, and paths are pytest's to set (pyproject.toml)."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        imported = {
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        assert not [name for name in imported if name.startswith(("test_", "tests"))], path
        assert "sys.path." not in path.read_text() or path.name == Path(__file__).name, path


if __name__ == "__main__":
    between = ((room(a), room(b)) for a, targets in graph().items() for b in targets)
    drawn = {(a, b) for a, b in between if a != b and b != "errors"}  # one file, beside the four folders
    for source in sorted({a for a, _ in drawn}):
        print(source, "->", ", ".join(sorted(b for a, b in drawn if a == source)))
    rooms = {room(module) for module in modules()} - {"errors"}
    print(f"{len(rooms)} rooms, {len(drawn)} arrows, {len(upward())} imports upward, {len(cycles())} cycles")
