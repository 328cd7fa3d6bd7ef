"""Rows that are too many for memory lie in a temporary file, column by column, and are read again in order of time."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import BadInput

__all__ = ["BLOCK_ROWS", "Rows", "Spill", "joined"]

BLOCK_ROWS = 1 << 13  # of a table that are in memory while it is filled
_FIRST_ROOM = 1 << 10  # rows

Ints = NDArray[Any]


@dataclass(slots=True)
class Spill:
    """One file for many columns, made when it is needed. Any process that sees the path can read it."""

    path: Path
    _end: int = 0

    def put(self, values: Ints) -> int:
        """Write the values; return their place in the file. Raises `BadInput` if the disk is full."""
        try:
            with self.path.open("ab", buffering=0) as file:
                left = values.data.cast("B")
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            folder = tempfile.gettempdir()
            raise BadInput(f"no room for temporary files in {folder}: set TMPDIR to another folder ({error})") from None
        self._end += values.nbytes
        return self._end - values.nbytes

    def get(self, at: int, rows: int, kind: np.dtype[Any]) -> Ints:
        return np.fromfile(self.path, kind, rows, offset=at)


@dataclass(frozen=True, slots=True)
class _Block:
    rows: int
    at: dict[str, int]  # in the file, by column
    bounds: dict[str, tuple[int, int]]  # least and largest value, by column


class Rows:
    """A table whose rows are added in batches and, once `seal` was called, read as often as needed; one column is `ts`.

    `shift_ns` is added to every time that is read. What is pickled of it is where its rows lie.
    """

    def __init__(self, kinds: Mapping[str, str], spill: Spill) -> None:
        self.shift_ns = 0
        self._kinds = {name: np.dtype(kind) for name, kind in kinds.items()}
        self._spill = spill
        self._blocks: list[_Block] = []
        self._last = {name: np.empty(_FIRST_ROOM, kind) for name, kind in self._kinds.items()}
        self._filled = 0

    def __len__(self) -> int:
        return sum(block.rows for block in self._blocks) + self._filled

    def add(self, rows: Mapping[str, Ints]) -> None:
        """Add values of these columns."""
        added, count = 0, len(rows["ts"])
        while added < count:
            taken = min(count - added, BLOCK_ROWS - self._filled)
            full = self._filled + taken
            for name, column in self._last.items():
                if full > len(column):
                    self._last[name] = np.empty(min(2 * full, BLOCK_ROWS), column.dtype)
                    self._last[name][: self._filled] = column[: self._filled]
                self._last[name][self._filled : full] = rows[name][added : added + taken]
            self._filled, added = full, added + taken
            if full == BLOCK_ROWS:
                self._put_block()

    def seal(self) -> None:
        """End the table: no rows follow."""
        if self._filled:
            self._put_block()
        self._last = {}

    def _put_block(self) -> None:
        block = {name: column[: self._filled] for name, column in self._last.items()}
        at = {name: self._spill.put(values) for name, values in block.items()}
        self._blocks.append(_Block(self._filled, at, {name: _bounds(values) for name, values in block.items()}))
        self._filled = 0

    @property
    def first_ns(self) -> int:
        """The least time. There must be rows."""
        return min(self._bounds_of(number, "ts")[0] for number in self._numbers())

    def blocks(self, *names: str) -> Iterator[dict[str, Ints]]:
        """Add values of these columns."""
        return (self._read(number, names) for number in self._numbers())

    def where(self, chosen: Callable[[Ints], Ints], name: str) -> dict[str, Ints]:
        """Return the rows that are chosen by this column: all columns, and their numbers as `row`."""
        parts = [self._none()]
        for number in self._numbers():
            at = np.flatnonzero(chosen(self._read(number, [name])[name]))
            if len(at):
                parts.append({name: values[at] for name, values in self._numbered(number).items()})
        return joined(parts)

    def without(self, name: str, wanted: Ints) -> Ints:
        """Return those of these sorted values that no row has in this column."""
        for number in self._numbers():
            least, most = self._bounds_of(number, name)
            begin, end = np.searchsorted(wanted, [least, most + 1])
            if begin < end:
                known, near = np.sort(self._read(number, [name])[name]), wanted[begin:end]
                found = known[np.searchsorted(known, near)] == near
                wanted = np.concatenate([wanted[:begin], near[~found], wanted[end:]])
        return wanted

    def in_time(self, most: int | None = None) -> Iterator[dict[str, Ints]]:
        """All rows in order of time, equal ones as they were added: all at once, or `most` at a time.

        What lies before the first time of all blocks that are not read yet is final. So few blocks are in memory at
        once where rows were added almost in order, as profilers write them.
        """
        if most is None:
            order = np.argsort(self._column("ts"), kind="stable")
            yield {name: self._column(name)[order] for name in self._kinds}
            return
        firsts = {number: self._bounds_of(number, "ts")[0] for number in self._numbers()}
        numbers = sorted(firsts, key=firsts.__getitem__)
        held: list[dict[str, Ints]] = []
        for number, following in itertools.zip_longest(numbers, numbers[1:]):
            held.append(self._numbered(number))
            if following is not None and sum(len(part["ts"]) for part in held) < most:
                continue
            rows = joined(held)
            held.clear()
            order = np.lexsort((rows["row"], rows["ts"]))
            for name, values in rows.items():
                rows[name] = values[order]
            end = len(order)
            if following is not None:
                end = int(np.searchsorted(rows["ts"], firsts[following]))
                end -= end % most
            for begin in range(0, end, most):
                yield {name: rows[name][begin : min(begin + most, end)] for name in self._kinds}
            held = [{name: values[end:].copy() for name, values in rows.items()}]

    def _numbers(self) -> range:
        """Of the blocks."""
        return range(len(self._blocks))

    def _bounds_of(self, number: int, name: str) -> tuple[int, int]:
        least, most = self._blocks[number].bounds[name]
        shift = self.shift_ns if name == "ts" else 0
        return least + shift, most + shift

    def _read(self, number: int, names: Iterable[str]) -> dict[str, Ints]:
        block = self._blocks[number]
        rows = {name: self._spill.get(block.at[name], block.rows, self._kinds[name]) for name in names}
        if "ts" in rows:
            rows["ts"] = rows["ts"] + self.shift_ns
        return rows

    def _numbered(self, number: int) -> dict[str, Ints]:
        rows = self._read(number, self._kinds)
        begin = sum(block.rows for block in self._blocks[:number])
        return rows | {"row": np.arange(begin, begin + len(rows["ts"]))}

    def _column(self, name: str) -> Ints:
        return np.concatenate([self._none()[name], *(rows[name] for rows in self.blocks(name))])

    def _none(self) -> dict[str, Ints]:
        return {name: np.empty(0, kind) for name, kind in self._kinds.items()} | {"row": np.empty(0, np.int64)}


def _bounds(values: Ints) -> tuple[int, int]:
    return int(values.min()), int(values.max())


def joined(parts: Sequence[Mapping[str, Ints]]) -> dict[str, Ints]:
    """Return the rows of all parts, of which there is one at least."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
