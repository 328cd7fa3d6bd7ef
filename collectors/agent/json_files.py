"""Files of JSON that can be read at any moment."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

__all__ = ["replace_json"]


def replace_json(path: Path, content: object) -> None:
    """Replace the file's content. On OSError it is unchanged."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        unfinished.write_text(json.dumps(content, indent=1))
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
