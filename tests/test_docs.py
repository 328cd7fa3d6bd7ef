"""The docs say what is true."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
