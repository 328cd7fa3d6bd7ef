"""Reads traces of torch.profiler (Kineto): Chrome trace JSON of all its ages, gzipped or not, loose or in a tar.

One file is one rank's capture. Its device rows become `kernels`, its runtime and driver calls `launches`, its
annotations `regions`, `ProfilerStep` becomes `steps`, and the kernels of NCCL and RCCL become `collectives`, with what
the file says about them. Times are exact to the nanosecond, on the clock of the file.
"""

from __future__ import annotations

import functools
from pathlib import Path

from rankscope.analysis.model.annotations import compiles
from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.base import FrameReader, Reader, gap
from rankscope.analysis.readers.kineto.capture import Capture
from rankscope.analysis.readers.kineto.files import recognises
from rankscope.analysis.readers.kineto.numbering import number_collectives
from rankscope.analysis.readers.kineto.ranks import by_rank, missing_ranks, nodes_of
from rankscope.analysis.readers.kineto.scan import read_captures
from rankscope.analysis.readers.kineto.tables import LARGE, Tables, table_builders
from rankscope.analysis.readers.workers import scratch_folder
from rankscope.analysis.text.message import text
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]

_CANNOT = {
    "breakdown": text("the trace holds no device work, and a profiler's trace does not show what the host waits for"),
    "gc_pauses": text("a profiler's trace does not show when Python collects garbage"),
    "compile": text("the trace names no compilation by torch.compile"),
    "model": text(
        "the FLOPs of a step are unknown: give --flops-per-step, or record the trace with record_shapes=True"
    ),
}
_NO_STEPS = {
    "steps": text(
        "the trace has no ProfilerStep, no optimizer's name and no range that is named as a step is (call the "
        "profiler's step() once per step)"
    )
}
_LONG_OPERATOR_NS = 1_000_000  # long enough to explain why a device was idle, and too few to take memory


def open_run(paths: list[str], *, operators_from_ns: int = _LONG_OPERATOR_NS) -> FrameReader:
    """Return the run of which these files are the ranks, with operators that take this long. Raises `BadInput`."""
    folder = scratch_folder()
    captures: list[Capture] = []
    gaps: list[Gap] = []
    for capture in read_captures(paths, Path(folder.name), operators_from_ns):
        if isinstance(capture, str):
            gaps.append(gap("kernels", capture))
        else:
            captures.append(capture)
    if not captures:
        raise BadInput(gaps[0].why if gaps else f"{', '.join(paths)} holds no trace of torch.profiler")
    ranks = by_rank(captures, gaps)
    nodes = nodes_of(ranks)
    number_collectives(ranks, one_clock=len(set(nodes.values())) == 1)
    tables = Tables(nodes, table_builders(ranks), folder)
    for rank, capture in ranks.items():
        gaps += [gap(table, why, rank=rank, count=count) for table, count, why in capture.found]
    gaps += missing_ranks(ranks)
    lacks = _CANNOT if "steps" in tables else _CANNOT | _NO_STEPS
    if any(compiles(name) for capture in ranks.values() for name in capture.names):
        lacks = {table: why for table, why in lacks.items() if table != "compile"}
    pieces = {name: functools.partial(tables.pieces, name) for name in tables if name in LARGE}
    rows = {
        "kernels": sum(len(c.device) for c in ranks.values()),
        "launches": sum(len(c.launches) for c in ranks.values()),
    }
    return FrameReader(frames=tables, missing=tuple(gaps), lacks=lacks, large=pieces, large_rows=rows)


reader = Reader(recognises=recognises, open_run=open_run, asked=1)  # other formats are Chrome traces too
