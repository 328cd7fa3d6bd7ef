"""The interface of a replayable run, whatever its source; and the reason why another one cannot be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rankscope.analysis.model.finding import Fidelity
from rankscope.analysis.replay.host_graph import HostGraph

__all__ = ["Gain", "Replay", "Unreplayable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of fixes, mean over the ranks' judged steps; `uncertainty_ns` is a 95 % half width."""

    fixes: tuple[str, ...]
    step_ns: float  # with them
    gain_ns: float
    uncertainty_ns: float


class Replay(Protocol):
    """A run, ready to be replayed with fixes."""

    @property
    def fidelity(self) -> Fidelity:
        """How well a replay with no fix meets the steps."""
        ...

    @property
    def step_ns(self) -> float:
        """The mean step, as measured: gains are taken from it, and shares are of it."""
        ...

    @property
    def host(self) -> HostGraph | None:
        """The graph of what ranks did; None where only the operations of a pipeline are known."""
        ...

    def places(self, kind: str) -> Mapping[int, tuple[int, ...]]:
        """Return the "node" or "stage" of each rank, or all stages that it has; its own number for "rank"."""
        ...

    def gain(self, *fixes: str, beyond: tuple[str, ...] = ()) -> Gain:
        """Return the gain of these fixes together, or what they gain beyond other ones. Raises `BadFix`."""
        ...

    def possible(self, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the fixes that this run allows, most with a placeholder; a replay for some, but of those `without`."""
        ...


@dataclass(frozen=True, slots=True)
class Unreplayable:
    """Why nothing can be predicted, as a clause."""

    reason: str
