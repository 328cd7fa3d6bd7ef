"""What has no types here: objects of the job's torch and of vendors' libraries, which need not be installed."""

from __future__ import annotations

from typing import Any

__all__ = ["Foreign"]

Foreign = Any
