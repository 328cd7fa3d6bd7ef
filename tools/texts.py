"""Keep the catalogs of `analysis/text/` in step with the code: `make texts`, or with --check only say what is missing.

New texts get an empty entry; a text that was reworded keeps its translation, marked fuzzy until a translator
removes the mark; texts that the code no longer has are removed.
"""

from __future__ import annotations

import ast
import string
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

from rankscope.analysis.detectors import detectors
from rankscope.analysis.report import labels
from rankscope.analysis.text.message import LANGUAGES
from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.schema import TABLES
from rankscope.dashboard.figures.counters import words_of
from rankscope.dashboard.script_texts import script_texts

ROOT = Path(__file__).parents[1]
SPEAKING = ("analysis", "dashboard", "profiler")
HEADER = r"""# Names of detectors, options, variables and APIs, units, and what a run itself calls its regions,
# groups and operations stay as they are. `make texts` adds, keeps and removes entries; see CONTRIBUTING.md.
msgid ""
msgstr ""
"Language: {language}\n"
"Content-Type: text/plain; charset=utf-8\n"
"Plural-Forms: {plural_forms}\n"

"""
Message = str | tuple[str, str]


def messages() -> set[Message]:
    """Everything that can be said, by its English: a template, or one for one and one for several."""
    said: set[Message] = {*labels._ENGLISH.values(), *map(labels.detector_name, detectors()), *script_texts()}
    said |= {table.doc for table in TABLES.values()} | {words_of(counter.name) for counter in COUNTERS}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                said |= set(called(node.func.id, node, path))
    return {one for one in said if any(c.isalpha() for c in str(one))}


def sources() -> list[Path]:
    return sorted(path for folder in SPEAKING for path in (ROOT / folder).rglob("*.py"))


def called(function: str, node: ast.Call, path: Path) -> Iterator[Message]:
    if path.parent.name == "text" and function != "text":  # where `counted` and `named` are made
        return
    if function == "text":
        yield literal(node.args[0], path)
    elif function == "plural":
        yield literal(node.args[0], path), literal(node.args[1], path)
    elif function == "counted":
        noun = literal(node.args[1], path)
        yield f"{{number}} {noun}", f"{{number}} {noun}s"
    elif function == "named":
        kind = literal(node.args[0], path)
        yield f"{kind} {{numbers}}", f"{kind}s {{numbers}}"


def literal(node: ast.expr, path: Path) -> str:
    if not isinstance(node, ast.Constant):
        raise SystemExit(f"{path}:{node.lineno}: a template is written out where it is used")
    return str(node.value)


def plain() -> str:
    """All strings of the code: collectors record sentences that the report translates."""
    paths = (*sources(), *(ROOT / "collectors").rglob("*.py"))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def catalog_file(language: str) -> Path:
    return ROOT / "analysis" / "text" / f"{language}.po"


def read(language: str) -> Catalog:
    with catalog_file(language).open("rb") as file:
        return read_po(file, locale=language)


def update(language: str) -> None:
    """Write the catalog with the current texts, in the order of the English."""
    held, recorded, now = read(language), plain(), Catalog(locale=language)
    for message in messages():
        now.add(message)
    for entry in held:
        if isinstance(entry.id, str) and entry.id and entry.id not in now and entry.id in recorded:
            now.add(entry.id)
    held.update(now)
    held.obsolete.clear()
    for entry in held:
        entry.flags.discard("python-brace-format")
        entry.flags.discard("python-format")
        entry.previous_id = []
    written = BytesIO()
    write_po(written, held, width=0, sort_output=True, omit_header=True)
    header = HEADER.format(language=language, plural_forms=held.plural_forms)
    catalog_file(language).write_text(header + written.getvalue().decode(), encoding="utf-8")


def problems(language: str) -> list[str]:
    """What is missing, not looked at, wrong or no longer said."""
    held, said, recorded = read(language), messages(), plain()
    found = [f"{catalog_file(language).name}: no entry: {one}" for one in said if held.get(one) is None]
    for entry in filter(lambda entry: entry.id, held):
        forms = entry.string if isinstance(entry.string, tuple) else (entry.string,)
        ids = entry.id if isinstance(entry.id, tuple) else (entry.id,)
        if entry.id not in said and not (ids[0] in recorded or set(ids) & said):
            found.append(f"not said any more: {entry.id}")
        elif not all(forms):
            found.append(f"not translated: {entry.id}")
        elif entry.fuzzy:
            found.append(f"fuzzy, so to be looked at: {entry.id} = {entry.string}")
        elif any(placeholders(form) != placeholders(ids[-1]) for form in forms):
            found.append(f"not the same values: {entry.id} = {entry.string}")
    return sorted(found)


def placeholders(template: str) -> set[tuple[str, str]]:
    return {(name, spec or "") for _, name, spec, _ in string.Formatter().parse(template) if name is not None}


def main() -> None:
    for language in set(LANGUAGES) - {"en"}:
        if "--check" not in sys.argv:
            update(language)
        wrong = problems(language)
        print("\n".join(wrong) or f"{catalog_file(language).name}: complete")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
