"""The declarations of modules that are found by their folder: one frozen value each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from rankscope.analysis.model.finding import Finding
from rankscope.analysis.text.message import Text

if TYPE_CHECKING:
    import polars as pl

__all__ = ["AS_EXPOSED", "AS_WAITING", "Detector", "name_of"]

# Kinds of loss (`diagnosis/losses.py`) that several detectors' findings bring about.
AS_WAITING = ("wait", "bubble", "idle", "unattributed")
AS_EXPOSED = ("communication", "unattributed")
_ABBREVIATED = {"gc": "GC", "mfu": "MFU", "tcp": "TCP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One detector as the rest of rankscope sees it.

    needs: the collectors or tables that it needs; with one of them off, silence is no proof of health.
    per_rank: what it looks for may be on any single rank, so its silence says nothing of ranks without steps.
    judges_speed: False where finding nothing says nothing about how fast the job is.
    explains: findings that follow from its own, and are then no root causes.
    explains_of_ranks: the same, where its finding names ranks.
    explains_late: the same, where its finding names the ranks of one that names late ranks, or more.
    explains_by_part: the same, by the part of the step that is its finding's `where`; for these parts, instead.
    explains_share: the share of what another finding costs that its own must cost to explain it.
    explains_within_error: its cost is measured otherwise than that of what follows, and may differ by the error of it.
    cost: "measured" by itself; or that and at most what its fix brings in a replay ("bounded"), or just what its fix
        brings ("as_replayed"). The latter two need a threshold `min_fraction`.
    bound: the fix of a finding by which its cost is bounded, where that is not the one that it names.
    saves_at_least: what the fix by which its cost is bounded saves at least, ns per step, by the tables alone: where
        that is no less than the cost, nothing need be replayed for it.
    has_other_fixes: the fix that is replayed is one of several, so that its findings rank by what they cost.
    waited_for: other ranks wait for those that its finding names.
    slows_all_alike: what it finds does not explain that ranks wait for each other.
    parts: parts of the step that show its finding, added up per rank. Empty: it gets no picture.
    lost_as: the kinds of loss that its findings bring about. Empty: what they cost shows nowhere in the tables as lost.
    own_loss: the one of them that it judges as a whole, whatever the cause: where much of it is unexplained, the check
        has overlooked it. Empty: none.
    """

    needs: tuple[str, ...] = ()
    per_rank: bool = False
    judges_speed: bool = True
    explains: tuple[str, ...] = ()
    explains_of_ranks: tuple[str, ...] = ()
    explains_late: tuple[str, ...] = ()
    explains_by_part: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    explains_share: float = 1.0
    explains_within_error: bool = False
    cost: Literal["measured", "bounded", "as_replayed"] = "measured"
    bound: Callable[[Finding], str | None] = attrgetter("fix")
    saves_at_least: Callable[[Finding, Mapping[str, pl.DataFrame]], float] | None = None
    has_other_fixes: bool = False
    waited_for: bool = True
    slows_all_alike: bool = False
    parts: tuple[str, ...] = ()
    lost_as: tuple[str, ...] = ()
    own_loss: str = ""


def name_of(detector: str) -> Text:
    """Return the name of a detector, or of another check such as "device_time", that readers see everywhere."""
    return Text(" ".join(_ABBREVIATED.get(word, word) for word in detector.split("_")), {})
