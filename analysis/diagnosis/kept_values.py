"""Results kept in a run's folder: read again only for the same files and the same code.

`RUN/summary/` may be deleted. A file there that rankscope cannot have written is not used.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from rankscope.analysis.runs.fingerprint import code_fingerprint
from rankscope.analysis.text.message import Text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["FOLDER", "keep", "keep_file", "kept", "made_of"]

FOLDER = "summary"
_CODE = ("analysis", "collectors")
_FIELD = re.compile(r"\{([a-z_]\w*)(![rs])?(:[^{}]{0,6})?\}")
_LARGEST = 100_000_000  # bytes that are read of a file

_Value = TypeVar("_Value")


class _Made(msgspec.Struct):
    """What a text was made of."""

    template: str
    values: dict[str, object]
    forms: tuple[str, str, int] | None


def made_of(files: str, asked: Sequence[object]) -> str:
    """Return the key of values: the run's files by their fingerprint, this code, and the options."""
    return json.dumps([files, code_fingerprint(*_CODE), *asked])


def kept(run: Path, name: str, of: str, kind: type[_Value]) -> _Value | None:
    """Return the value of this name in the run's folder, if there is one that was made of exactly this."""
    try:
        with (run / FOLDER / f"{name}.json").open("rb") as file:
            held = json.loads(file.read(_LARGEST))
        return msgspec.convert(_with_texts(held["value"]), kind, str_keys=True) if held["made_of"] == of else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError, msgspec.ValidationError):
        return None  # none, or torn


def keep(run: Path, name: str, of: str, value: DataclassInstance) -> None:
    """Keep the value for the next time; a folder that cannot be written to stays as it is."""
    plain = msgspec.to_builtins(value, enc_hook=_plain)  # the lengths of all steps of all ranks are in it
    said = json.dumps({"made_of": of, "value": plain}, separators=(",", ":")).encode()
    keep_file(run, f"{name}.json", lambda out: out.write(said))


def keep_file(run: Path, name: str, write: Callable[[BinaryIO], object]) -> bool:
    """Put in the run's folder, whole or not at all, the file that `write` writes; say whether it is there."""
    with suppress(OSError):
        (run / FOLDER).mkdir(exist_ok=True)
        file, made = tempfile.mkstemp(dir=run / FOLDER)
        try:
            with os.fdopen(file, "wb") as out:
                write(out)
            os.chmod(made, 0o644)
            os.replace(made, run / FOLDER / name)
        except OSError:
            Path(made).unlink(missing_ok=True)
        else:
            return True
    return False


def _plain(value: object) -> object:
    """Return a text as what it was made of, so that it can still be translated, and numbers of numpy as Python's."""
    if isinstance(value, Text):
        return {"template": value.template, "values": dict(value.values), "forms": value.forms}
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)


def _with_texts(value: object) -> object:
    """Return the value with its texts. Raises ValueError for a text that rankscope cannot have made."""
    if isinstance(value, dict):
        held = {name: _with_texts(of) for name, of in value.items()}
        if held.keys() != {"template", "values", "forms"}:
            return held
        made = msgspec.convert(held, _Made)
        for template in (made.template, *(made.forms or ())[:2]):
            if set(_FIELD.sub("", template)) & set("{}"):
                raise ValueError(template)
        return Text(made.template, made.values, made.forms)
    return [_with_texts(of) for of in value] if isinstance(value, list) else value
