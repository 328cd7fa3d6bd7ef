"""The docs say what is true."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import typer

from rankscope.analysis.diagnosis.step_summaries import STEP_SUMMARIES
from rankscope.dashboard.page_kit import all_pages
from rankscope.dashboard.script_texts import script_texts
from rankscope.profiler import commands
from support.paths import ROOT

# Words of our own making, for which the field has others: see docs/glossary.md.
NOT_USED = re.compile(
    r"\b(told|tells?|stood|stands? (still|idle)|mend\w*|nobody|somebody|whoever|judged|judges|set aside|ma[dk]es? room|"
    r"half width|false alarms?|deep windows?|looked (into|at)|culprits?|to blame|blamed?|(is|are|was|were) said|anew|"
    r"(comes?|came) to it|r[au]ns? dry|tak(e|es|ing) turns|own time)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def test_the_table_reference_is_up_to_date():
    written = runpy.run_path(str(ROOT / "docs/write_tables.py"))
    assert (ROOT / "docs/tables.md").read_text() == written["render"](), "run `make docs`"


def test_every_file_that_the_docs_link_to_exists():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_is_in_the_reference_and_every_page_in_the_navigation():
    commands = runpy.run_path(str(ROOT / "docs/write_commands.py"))["names"]()
    assert re.findall(r"^## (.+)$", (ROOT / "docs/commands.md").read_text(), re.MULTILINE) == commands
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert sorted(listed) == sorted(pages)


def test_users_read_the_words_of_the_field():
    found = [f"{where}: {said}" for where, prose in read_by_users() for said in NOT_USED.finditer(prose)]
    assert found == []


def read_by_users() -> Iterator[tuple[str, str]]:
    """Pages without their code, help, the JSON schema, sentences in the code (texts, errors, gaps), and in scripts."""
    for page in pages():
        prose = page.read_text() if page.name == "commands.md" else CODE.sub("", page.read_text())
        yield page.name, prose
    for description in re.findall(r'"description": "(.*)"', (ROOT / "docs/report.schema.json").read_text()):
        yield "report.schema.json", description
    for folder in ("analysis", "collectors", "dashboard", "profiler"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ((path.name, sentence) for sentence in sentences(ast.parse(path.read_text())))
    yield from (("scripts of the browser", said) for said in map(str, script_texts()))


def sentences(tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings and " " in str(node.value):
            yield re.sub(r"\{\w*\}", "", str(node.value))


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/**/*.md"))]


def test_every_command_and_option_that_the_docs_show_exists():
    """In code only: `rankscope report RUN --lang zh`. Options of other programs stand after theirs."""
    help_ = (ROOT / "docs/commands.md").read_text()
    of = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", help_, re.MULTILINE | re.DOTALL))
    wrong = []
    for page in (page for page in pages() if page.name != "commands.md"):  # that one is made from the help
        for line in "\n".join(CODE.findall(page.read_text())).splitlines():
            for command, rest in re.findall(r"\brankscope ([a-z]+)\b([^`|]*)", line.partition("# ")[0]):
                if command not in of:
                    wrong.append(f"{page.name}: rankscope {command}")
                elif command not in ("run", "exec"):  # what follows may be torchrun's, or the script's
                    options = re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)
                    wrong += [f"{page.name}: {command} {option}" for option in options if option not in of[command]]
    assert wrong == []


def test_every_option_of_the_commands_is_in_the_reference():
    """Each command's section lists the options of its signature, and no other."""
    help_ = (ROOT / "docs/commands.md").read_text()
    app = typer.Typer()
    for module in pkgutil.iter_modules(commands.__path__):
        found = importlib.import_module(f"{commands.__name__}.{module.name}")
        if hasattr(found, "command"):
            app.command(module.name.rstrip("_"))(found.command)
    for name, command in typer.main.get_command(app).commands.items():
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", help_, re.MULTILINE | re.DOTALL)
        listed = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", section[1], re.MULTILINE)) - {"--help"}
        assert {max(one.opts, key=len) for one in command.params if one.param_type_name == "option"} == listed, name


OF_OTHERS = {"overlap_moe_expert_parallel_comm"}  # names that only the docs mention, of other programs


def test_every_name_that_the_docs_show_as_code_exists():
    """Detectors, tables, columns, parts, functions: each `snake_case` word is one of the code, or a file's name."""
    known = OF_OTHERS | {column.name for column in STEP_SUMMARIES.columns}
    for folder in ("analysis", "benchmarks", "collectors", "dashboard", "docs", "examples", "profiler", "src", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".c", ".cpp", ".j2", ".js", ".json", ".py"):
                known |= {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace"))}
    for page in pages():
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose):
            shown = re.findall(r"(?<![\w./-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w-])", span)
            assert set(shown) <= known, f"{page.name}: `{span}`"


def test_every_page_of_the_browser_is_described_and_no_other():
    described = re.findall(r"\*\*(?:\[)?([A-Z][\w ]+?)(?:\]\([^)]+\))?\*\*", (ROOT / "docs/ui.md").read_text())
    assert sorted(described) == sorted(str(page.title) for page in all_pages().values())
