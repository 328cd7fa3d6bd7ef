"""Every text has its Chinese: the catalogue covers what the code can say, and a report in Chinese is Chinese."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

from rankscope.analysis.detectors import detectors
from rankscope.analysis.report import texts
from rankscope.analysis.report.zh import CHINESE

ROOT = Path(__file__).parent.parent
CODE = sorted(path for folder in ("analysis", "dashboard") for path in (ROOT / folder).rglob("*.py"))


def templates() -> Iterator[str]:
    """What `text`, `counted` and `named` are called with anywhere, and the report's own words."""
    yield from texts._ENGLISH.values()
    yield from map(texts.detector_name, detectors())
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "text":
                yield literal(node.args[0], path)
            elif node.func.id == "counted":
                noun = literal(node.args[1], path)
                yield from (f"{{number}} {noun}", f"{{number}} {noun}s")
            elif node.func.id == "named":
                kind = literal(node.args[0], path)
                yield from (f"{kind} {{numbers}}", f"{kind}s {{numbers}}")


def literal(node: ast.expr, path: Path) -> str:
    assert isinstance(node, ast.Constant), f"{path}:{node.lineno}: a template is written out where it is used"
    return str(node.value)


def placeholders(template: str) -> set[tuple[str, str]]:
    """Names and formats, without those of English grammar."""
    parsed = string.Formatter().parse(template)
    return {(name, spec or "") for _, name, spec, _ in parsed if name is not None and not name.startswith("en_")}


def test_every_text_has_its_chinese_with_the_same_values():
    said = {template for template in templates() if any(c.isalpha() for c in template)}
    assert sorted(said - CHINESE.keys()) == []
    wrong = [template for template in said if placeholders(template) != placeholders(CHINESE[template])]
    assert wrong == []
