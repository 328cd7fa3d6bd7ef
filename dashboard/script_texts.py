"""The texts of the browser's scripts: they call `text("…")` as Python does, and the page has the translations."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from rankscope.analysis.text.message import language, translated

__all__ = ["script_texts", "words"]

_SAID = re.compile(r'\btext\("((?:[^"\\]|\\.)*)"')


@cache
def script_texts() -> frozenset[str]:
    """Every English template in a script."""
    scripts = sorted(Path(__file__).parent.rglob("*.js"))
    return frozenset(said for script in scripts for said in _SAID.findall(script.read_text(encoding="utf-8")))


def words() -> str:
    """Return a JSON object for use inside a `<script>`: English template -> template in the language that is spoken."""
    spoken = {} if language() == "en" else {english: translated(english) for english in sorted(script_texts())}
    return json.dumps(spoken, ensure_ascii=False).replace("<", "\\u003c")
