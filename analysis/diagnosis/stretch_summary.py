"""Summary of a stretch of a long run, in some hundred bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

__all__ = ["StretchFinding", "StretchSummaries", "StretchSummary"]

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
    One that is kept has `begin_ns`, when its first step began on the counted rank, and the fingerprint of the `files`
    that it was made of; none where these could not change it any more, although the job went on.
    """

    first: _Count
    last: _Count
    analyzed: _Count = 0
    step_ns: _Count = 0
    parts: dict[str, _Count] = field(default_factory=dict)
    errors: dict[str, _Count] = field(default_factory=dict)
    findings: tuple[StretchFinding, ...] = ()
    why: str = ""
    begin_ns: int = 0
    files: str = ""


@dataclass(frozen=True, slots=True)
class StretchSummaries:
    """Those of a run, none of more steps than `length`."""

    length: _Count
    stretches: list[StretchSummary]
