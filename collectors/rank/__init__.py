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
    needs_gpu: whether it records nothing on a machine without one.
    lacks: returns what else is not there, so that it records nothing on this machine; empty where nothing is lacking.
    """

    tables: tuple[str, ...]
    start: Callable[[Emit], None]
    stop: Callable[[], None]
    needs_gpu: bool = False
    lacks: Callable[[], str] = str
