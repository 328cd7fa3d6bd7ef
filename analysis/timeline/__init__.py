"""Pure functions from tables to tables, each with an invariant that is checked."""

from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["Timeline", "build_timeline"]
