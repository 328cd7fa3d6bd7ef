"""How the report writes numbers: durations, shares, lists of ranks, and columns that add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope.collectors.rank_ranges import as_ranges

__all__ = [
    "Scale",
    "bytes_text",
    "duration",
    "duration_with_error",
    "percent",
    "percent_at_least",
    "percent_at_most",
    "ranges",
    "rounded",
    "scale_for",
    "shares",
    "signed",
]

_UNITS = (("h", 3_600_000_000_000), ("min", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000))
_LARGEST_S = 600  # longer times are given in minutes or hours


def bytes_text(size: float) -> str:
    """`270 kB`."""
    unit, factor = next(
        ((u, f) for u, f in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= f), ("B", 1.0)
    )
    return f"{size / factor:.3g} {unit}"


def duration(ns: float) -> str:
    """Return a time in the unit that suits it, with at most 3 significant digits: `182 ms`, `38.1 ms`, `1.50 s`."""
    if not math.isfinite(ns):
        return "?"
    unit, unit_ns = _unit(ns)
    return f"{_significant(ns / unit_ns, 3, whole=unit_ns == 1)} {unit}"


def signed(ns: float) -> str:
    """`+30.1 ms`, `-2 µs`, `0`."""
    return "0" if round(ns) == 0 else f"{'+' if ns > 0 else '-'}{duration(abs(ns))}"


def duration_with_error(ns: float, error_ns: float) -> str:
    """Return a time and its error in one unit.

    `38.1 ± 2.1 ms`; what is less than its error is no more exact than that is.
    """
    unit, unit_ns = _unit(max(abs(ns), abs(error_ns)))
    value = _significant(ns / unit_ns, 3, whole=unit_ns == 1)
    error = _significant(error_ns / unit_ns, 2, whole=unit_ns == 1)
    if abs(ns) < abs(error_ns):
        decimals = len(error.partition(".")[2])
        value = f"{round(ns / unit_ns, decimals) + 0.0:.{decimals}f}"  # + 0.0: never -0
    return f"{value} ± {error} {unit}"


def percent_at_most(fraction: float) -> str:
    """Return an upper bound of a share: up to 99.9 %, not up to > 99.9 %."""
    return percent(min(fraction, 0.999))


def percent_at_least(fraction: float) -> str:
    """Return a lower bound of a share: at least 0.04 %, not at least < 0.1 %."""
    return f"{fraction * 100:.1g} %" if 1e-6 <= fraction < 0.001 else percent(fraction)


def percent(fraction: float | None) -> str:
    """Return a share to a tenth of a percent, as in tables.

    `21.0 %`, `4.2 %`, `< 0.1 %`; `?` where it is not a number.
    """
    if fraction is None or not math.isfinite(fraction):
        return "?"
    if 0 < abs(fraction) < 0.001:
        return "< 0.1 %"
    value = fraction * 100
    if fraction < 1 and f"{value:.1f}" == "100.0":  # a rest is never rounded away
        return "> 99.9 %"
    return f"{value:.0f} %" if fraction == 0 or abs(value) >= 99.95 else f"{value:.1f} %"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges, sorted, none left out: `0-3,8`."""
    return as_ranges(sorted(set(numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How the columns of one table are written: in whole quanta, so that what is shown adds up."""

    unit: str
    quantum_ns: int
    decimals: int

    def text(self, quanta: int) -> str:
        return f"{quanta / 10**self.decimals:.{self.decimals}f}"

    def row(self, values: Sequence[int], *, divisor: int = 1) -> tuple[list[str], str]:
        """Texts of `values / divisor` (ns) and of their total; the shown values sum to the shown total."""
        quanta = rounded(values, self.quantum_ns * divisor)
        return [self.text(q) for q in quanta], self.text(sum(quanta))


def scale_for(largest_ns: float) -> Scale:
    """Give the largest value of a table 4 digits, so that a part of 0.1 % is still seen."""
    exponent = max(0, math.floor(math.log10(max(largest_ns, 1))) - 3)
    unit, unit_exponent = ("µs", 3) if largest_ns < 1e6 else ("ms", 6) if largest_ns < 1e10 else ("s", 9)
    exponent = min(exponent, unit_exponent)
    return Scale(unit=unit, quantum_ns=10**exponent, decimals=unit_exponent - exponent)


def rounded(values: Sequence[int], quantum: int) -> list[int]:
    """Whole quanta per value that sum to the rounded total (the largest remainders are rounded up)."""
    quanta = [value // quantum for value in values]
    missing = (2 * sum(values) + quantum) // (2 * quantum) - sum(quanta)
    by_remainder = sorted(range(len(values)), key=lambda i: -(values[i] % quantum))
    for i in by_remainder[:missing]:
        quanta[i] += 1
    return quanta


def shares(values: Sequence[int]) -> list[str]:
    """Percent of the total with one decimal; what is shown sums to 100.0."""
    total = sum(values)
    if total <= 0:
        return ["" for _ in values]
    return [f"{tenths / 10:.1f}" for tenths in rounded([value * 1000 for value in values], total)]


def _unit(ns: float) -> tuple[str, int]:
    for unit, unit_ns in _UNITS:
        if unit in ("h", "min") and abs(ns) < max(_LARGEST_S * 1_000_000_000, unit_ns):
            continue
        if abs(ns) >= unit_ns * 0.9995:  # 999.6 µs is 1.00 ms, not 1000 µs
            return unit, unit_ns
    return "ns", 1


def _significant(value: float, digits: int, *, whole: bool = False) -> str:
    if whole or value == 0:
        return f"{value:.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    # 9.996 has three digits as 10.0, not as 10.00
    if round(abs(value), digits - 1 - magnitude) >= 10 ** (magnitude + 1):
        magnitude += 1
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"
