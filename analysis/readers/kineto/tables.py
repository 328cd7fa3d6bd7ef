"""The tables of all ranks, each made when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import polars as pl

from rankscope.analysis.readers.base import shaped
from rankscope.analysis.readers.kineto.capture import Capture
from rankscope.analysis.readers.kineto.collectives import collectives_frame
from rankscope.analysis.readers.kineto.host import launches_frames, operators_frames, regions_frames
from rankscope.analysis.readers.kineto.kernels import kernels_frames
from rankscope.analysis.readers.kineto.ranks import ranks_frame, world_of
from rankscope.analysis.readers.kineto.steps import steps_frame

__all__ = ["LARGE", "Tables", "table_builders"]

LARGE, _PIECE = ("kernels", "launches", "regions"), 1 << 14  # tables handed over in pieces of so many rows
_Frames = Iterator[tuple[int, pl.DataFrame]]  # each of a rank
_Builder = Callable[[int | None], _Frames]  # in pieces of at most so many rows


class Tables(Mapping[str, pl.DataFrame]):
    """The tables that have rows, each made when it is read: the columns behind the large ones are not in memory."""

    def __init__(self, nodes: Mapping[int, int], builders: Mapping[str, _Builder], folder: object) -> None:
        self._nodes = nodes
        self._builders = builders
        self._folder = folder  # its files are removed with it

    def __getitem__(self, name: str) -> pl.DataFrame:
        return shaped(name, pl.concat(self._of_ranks(name, None)))

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """Yield the table in pieces; each has rows of one rank."""
        for frame in self._of_ranks(name, _PIECE):
            yield shaped(name, frame)

    def _of_ranks(self, name: str, most_rows: int | None) -> Iterator[pl.DataFrame]:
        for rank, frame in self._builders[name](most_rows):
            where = {"rank": pl.lit(rank, pl.Int32), "node": pl.lit(self._nodes[rank], pl.Int32)}
            yield frame.with_columns(**where)

    def __contains__(self, name: object) -> bool:
        return name in self._builders  # a mapping's own would make the table to see whether there is one

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)


def table_builders(ranks: Mapping[int, Capture]) -> dict[str, _Builder]:
    """Return how each table that has rows is made: rank after rank, large ones in pieces of at most so many rows."""

    def of_each(frame_of: Callable[[Capture], pl.DataFrame]) -> _Builder:
        return lambda _: ((rank, frame_of(capture)) for rank, capture in ranks.items())

    def in_pieces(
        frames_of: Callable[[Capture, int | None], Iterator[pl.DataFrame]],
    ) -> _Builder:
        return lambda most: ((rank, frame) for rank, c in ranks.items() for frame in frames_of(c, most))

    world = world_of(ranks)
    builders = {
        "ranks": of_each(lambda capture: ranks_frame(capture, world)),
        "groups": of_each(lambda capture: capture.groups.frame()),
        "steps": of_each(steps_frame),
        "regions": in_pieces(regions_frames),
        "collectives": of_each(collectives_frame),
        "kernels": in_pieces(kernels_frames),
        "launches": in_pieces(launches_frames),
        "operators": in_pieces(operators_frames),
    }
    return {name: make for name, make in builders.items() if any(len(frame) for _, frame in make(_PIECE))}
