"""Recognizes the job's own code: not torch, Python's own library, nor rankscope."""

from __future__ import annotations

import os
import sys
import sysconfig

from rankscope.collectors.schema import INSTALLED

__all__ = ["is_hidden"]

# Installed packages may lie in a folder of the library's.
_OWN = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "/-/"),
        os.path.dirname(os.path.dirname(__file__)),
    )
)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_UNNAMED = ("<frozen ", "<eval_with_key")


def is_hidden(file: str) -> bool:
    """Say whether frames of this file are left out."""
    if file.startswith(_OWN) or file.startswith(_UNNAMED):
        return True
    return file.startswith(_STDLIB) and not any(folder in file for folder in INSTALLED)
