"""What a stretch of a long run tells, in some kilobytes; and the file in the run's folder that keeps it.

`RUN/summary/stretches.json` holds what was made of the very files and by the very code that are there; anything else is
made anew. The folder may be deleted.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rankscope.analysis.runs.fingerprint import code_fingerprint
from rankscope.analysis.text.message import Text

__all__ = ["FOLDER", "StretchFinding", "StretchSummary", "load", "made_of", "store"]

FOLDER = "summary"
_FILE = "stretches.json"
_CODE = ("analysis", "collectors")
_FIELD = re.compile(r"\{([a-z_]\w*)(![rs])?(:[^{}]{0,6})?\}")
_LARGEST = 100_000_000  # bytes that are read of it

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchFinding:
    """A root cause in a stretch; ns are those of `Finding`."""

    detector: str
    severity: str
    confidence: str
    title: str
    ranks: tuple[_Count, ...]
    nodes: tuple[_Count, ...]
    groups: tuple[str, ...]
    lost_ns_total: _Count
    uncertainty_ns: _Count  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchSummary:
    """Steps `first` to `last` of a run: the mean of those analyzed, its parts (over ranks), and root causes.

    `errors` are 95 % half widths of the parts, ns; empty with too few steps. Where nothing was analyzed, `why` says so.
    """

    first: _Count
    last: _Count
    analyzed: _Count = 0
    step_ns: _Count = 0
    parts: dict[str, _Count] = field(default_factory=dict)
    errors: dict[str, _Count] = field(default_factory=dict)
    findings: tuple[StretchFinding, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Stored:
    made_of: str
    stretches: list[StretchSummary]


def made_of(files: str, asked: Sequence[object]) -> str:
    """Return what summaries depend on: the run's files by their fingerprint, this code, and what was asked for."""
    return json.dumps([files, code_fingerprint(*_CODE), *asked])


def load(run: Path, of: str) -> list[StretchSummary]:
    """Return the summaries in the run's folder that were made of exactly this.

    None if there are none, or of anything else.
    """
    try:
        with (run / FOLDER / _FILE).open("rb") as file:
            found = msgspec.convert(_with_texts(json.loads(file.read(_LARGEST))), _Stored)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, msgspec.ValidationError):
        return []  # none, or torn
    return found.stretches if found.made_of == of else []


def store(run: Path, of: str, stretches: Sequence[StretchSummary]) -> None:
    """Keep them for the next report; a folder that cannot be written to stays as it is."""
    said = json.dumps(_without_texts(asdict(_Stored(of, list(stretches)))), separators=(",", ":"))
    with suppress(OSError):
        (run / FOLDER).mkdir(exist_ok=True)
        file, made = tempfile.mkstemp(dir=run / FOLDER)
        try:
            with os.fdopen(file, "w", encoding="utf-8") as out:
                out.write(said)
            os.chmod(made, 0o644)
            os.replace(made, run / FOLDER / _FILE)
        except OSError:
            Path(made).unlink(missing_ok=True)


def _without_texts(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the value with each text as what it was made of, so that it can still be translated."""
    if isinstance(value, Text):
        return {"template": value.template, "values": _without_texts(dict(value.values)), "forms": value.forms}
    if isinstance(value, dict):
        return {name: _without_texts(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_texts(held) for held in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _with_texts(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the reverse. Raises ValueError for a text that rankscope cannot have made."""
    if isinstance(value, dict):
        held = {name: _with_texts(of) for name, of in value.items()}
        if held.keys() != {"template", "values", "forms"}:
            return held
        forms = held["forms"] and msgspec.convert(held["forms"], tuple[str, str, int])
        for template in (held["template"], *(forms or ())[:2]):
            if set(_FIELD.sub("", template)) & set("{}"):
                raise ValueError(template)
        return Text(held["template"], held["values"], forms)
    return [_with_texts(of) for of in value] if isinstance(value, list) else value
