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
    """Everything that the session knows about one collector.

    tables: what it writes rows of.
    start: puts its hooks in. An exception switches it off.
    stop: takes them out, and leaves nothing behind.
    """

    tables: tuple[str, ...]
    start: Callable[[Emit], None]
    stop: Callable[[], None]
