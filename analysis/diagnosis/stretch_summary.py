"""Summary of a stretch of a long run, in some kilobytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from rankscope.analysis.model.finding import Finding, Healthy, Loss, NotChecked, StepSummary

__all__ = ["StretchSummaries", "StretchSummary"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchSummary:
    """Steps `first` to `last` of a run: what a report on them alone would say of them.

    `parts` are those of the mean step, over ranks; `errors` their 95 % half widths, ns, empty with too few steps. Where
    nothing was analyzed, `steps` is None, and `why` says why.
    One that is kept has `begin_ns`, when its first step began on the counted rank, and the fingerprint of the `files`
    that it was made of; none where these could not change it any more, although the job went on. `steps_file` has the
    steps of its ranks where the run's folder cannot keep them.
    """

    first: _Count
    last: _Count
    steps: StepSummary | None = None
    parts: dict[str, _Count] = field(default_factory=dict)
    errors: dict[str, _Count] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    healthy: tuple[Healthy, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    losses: tuple[Loss, ...] = ()
    why: str = ""
    begin_ns: int = 0
    files: str = ""
    steps_file: bytes = b""

    @property
    def numbers(self) -> range:
        """Those of its steps in the run."""
        return range(self.first, self.last + 1)

    @property
    def analyzed(self) -> int:
        """How many of its steps were."""
        return self.steps.count if self.steps else 0

    @property
    def mean_ns(self) -> int:
        return (self.steps.mean_ns or 0) if self.steps else 0

    @property
    def time_ns(self) -> int:
        """What those that were analyzed took, on a rank."""
        return self.analyzed * self.mean_ns


@dataclass(frozen=True, slots=True)
class StretchSummaries:
    """Those of a run, none of more steps than `length`."""

    length: _Count
    stretches: list[StretchSummary]
