"""The cost of a finding in hours of the ranks, and in money where the price of such an hour is known."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.analysis.model.finding import Finding, Rate

__all__ = ["HOUR_NS", "Cost", "cost_of", "is_standstill", "money_text"]

HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of every rank, for whose time the job pays: per hour of the job, and in the judged steps altogether.

    None: no price was given; in all, also for a job that hangs, which loses no time of a step.
    """

    lost_hours_per_hour: float
    lost_hours_total: float | None
    lost_money_per_hour: float | None
    lost_money_total: float | None


def cost_of(finding: Finding, rate: Rate) -> Cost:
    """Return the lost share of the step, and what is lost in all, times the job's ranks (and times their price)."""
    per_hour = finding.lost_fraction * rate.ranks
    total = None if is_standstill(finding) else finding.lost_ns_total / HOUR_NS * rate.ranks
    return Cost(
        lost_hours_per_hour=per_hour,
        lost_hours_total=total,
        lost_money_per_hour=None if rate.price is None else per_hour * rate.price,
        lost_money_total=None if rate.price is None or total is None else total * rate.price,
    )


def is_standstill(finding: Finding) -> bool:
    """Say whether the job does not get through its step at all, so that a cost per step means nothing."""
    return finding.lost_fraction >= 1 and not finding.lost_ns_per_step


def money_text(amount: float) -> str:
    """`8.4`, `41`, `1,250`: at most 3 significant digits below 1,000, in whatever the price was given in."""
    return f"{amount:,.0f}" if abs(amount) >= 1000 else f"{float(f'{amount:.3g}'):.12g}"
