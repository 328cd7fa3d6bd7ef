"""rankscope: diagnose slow distributed PyTorch training: stragglers, their cost, and the predicted speedup of a fix.

In a training script, both optional and free where rankscope does not record:

- `rankscope.step()`: this step ends here, instead of at the optimizer's step.
- `rankscope.annotate("name", microbatch=…, stage=…)`: a context manager that names a span.

For analysis: `rankscope.open(path) -> Trace` and `rankscope.diagnose(trace) -> Report`, or with what was not recorded,
`rankscope.diagnose(trace, rankscope.ReportOptions(price=2.5))`. Both raise only kinds of `rankscope.RankscopeError` on
purpose; `rankscope.errors` has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.errors import RankscopeError

if TYPE_CHECKING:
    from rankscope.analysis.diagnosis.diagnose import diagnose
    from rankscope.analysis.diagnosis.options import ReportOptions
    from rankscope.analysis.runs.trace import Trace
    from rankscope.collectors.in_rank.session import annotate, step

    open = Trace.open

__all__ = ["RankscopeError", "ReportOptions", "annotate", "diagnose", "open", "step"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Lazily, since a training script imports this package for step() and annotate() only.
    if name in ("annotate", "step"):
        from rankscope.collectors.in_rank import session

        return getattr(session, name)
    if name == "ReportOptions":
        from rankscope.analysis.diagnosis.options import ReportOptions

        return ReportOptions
    if name == "diagnose":
        from rankscope.analysis.diagnosis.diagnose import diagnose

        return diagnose
    if name == "open":
        from rankscope.analysis.runs.trace import Trace

        return Trace.open
    raise AttributeError(f"module 'rankscope' has no attribute {name!r}")
