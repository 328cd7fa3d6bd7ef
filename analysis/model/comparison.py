"""What differs between two runs, or two ranks: frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.analysis.model.finding import Finding

__all__ = [
    "Comparison",
    "FindingChange",
    "KernelChange",
    "OperationChange",
    "PartChange",
    "RankChange",
    "RunSide",
    "StepChange",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """Facts of one of the two runs."""

    path: str
    verdict: str
    ranks: int
    nodes: int
    steps: int  # judged
    outliers_fraction: float  # of the time, as in `StepSummary`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """Mean judged step, over ranks. `uncertainty_ns` is the 95 % half width of the change; None: too few steps."""

    a_ns: int
    b_ns: int
    uncertainty_ns: int | None

    @property
    def change_ns(self) -> int:
        return self.b_ns - self.a_ns

    @property
    def clear(self) -> bool:
        """Whether the change is clear of chance."""
        return self.uncertainty_ns is not None and abs(self.change_ns) > self.uncertainty_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """Mean per judged step over ranks: `a_ns` of all parts sum to the step of A, `b_ns` to that of B."""

    part: str
    a_ns: int
    b_ns: int
    uncertainty_ns: int | None

    @property
    def change_ns(self) -> int:
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """A rank whose busy time (all but being blocked on communication) changed unlike the others'."""

    rank: int
    a_ns: int
    b_ns: int
    usual_ns: int  # median change over the ranks
    part: str  # where it differs most from the usual change


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChange:
    """A finding of A, of B, or of both. `why` is the reason where one run did not check."""

    status: str  # "new" | "gone" | "changed" | "stays" | "not checked in A" | "not checked in B"
    a: Finding | None
    b: Finding | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationChange:
    """One kind of communication in judged steps. `time` is what a rank has it in flight per step, on average."""

    group: str
    op: str
    a_per_step: float
    b_per_step: float
    a_bytes: float | None  # mean size
    b_bytes: float | None
    a_transfer_ns: float | None  # mean of an operation; None: there is none
    b_transfer_ns: float | None
    a_time_ns: float
    b_time_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """Device work of one name in judged steps: time of a rank per step, on average."""

    name: str
    work: str
    a_ns: float
    b_ns: float
    a_per_step: float
    b_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole comparison. `notes` say what differs between the runs themselves, and what was left out for that."""

    a: RunSide
    b: RunSide
    step: StepChange
    parts: tuple[PartChange, ...]
    ranks: tuple[RankChange, ...]
    findings: tuple[FindingChange, ...]
    operations: tuple[OperationChange, ...]  # that changed most first
    kernels: tuple[KernelChange, ...]
    notes: tuple[str, ...]
