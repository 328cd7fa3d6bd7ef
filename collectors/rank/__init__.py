"""Collectors that run in every rank: modules with `collector`, a `Collector`; being here is the registration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

__all__ = ["Collector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """One collector as the session sees it.

    tables: the tables it writes rows of.
    start: installs its hooks. An exception switches it off.
    stop: removes them without a trace.
    """

    tables: tuple[str, ...]
    start: Callable[[Emit], None]
    stop: Callable[[], None]
