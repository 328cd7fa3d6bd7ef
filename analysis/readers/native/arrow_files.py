"""One Arrow file that an agent wrote: its good rows, also while it is being written, or if it was cut."""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from rankscope.analysis.readers.arrow_lengths import decoded_bytes
from rankscope.analysis.readers.bounds import check_bytes
from rankscope.analysis.text.message import text
from rankscope.collectors.checksum import is_intact

__all__ = [
    "AT_THE_END",
    "NO_MORE",
    "Batch",
    "Within",
    "at_once",
    "between",
    "count_rows",
    "only",
    "order_of",
    "read_on",
    "read_rows",
    "time_in_the_middle",
]

_MAGIC = b"ARROW1"
_HEADER = 8  # the magic, padded
_FILES_AT_ONCE = 16
_PATIENCE_S = 0.02
AT_THE_END = 1 << 62
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)
_Version = tuple[Path, int, int]  # of a file, with its size and when it was written
_INTACT: dict[_Version, dict[int, int]] = {}  # whose checksum and lengths were found right; when which batch begins
_DAMAGED = (pa.ArrowException, OSError, IndexError, KeyError, ValueError)  # as pyarrow says it


class Within(NamedTuple):
    """A time, its ends included, by the column that orders a table's rows."""

    order: str
    begin_ns: int
    end_ns: int


class Batch(NamedTuple):
    """The next batch of a file, and when it begins."""

    number: int
    begin_ns: int


NO_MORE = Batch(0, AT_THE_END)


def read_rows(
    path: Path, *, closed: bool, columns: Sequence[str] | None = None, within: Within | None = None
) -> tuple[pa.Table | None, str | None]:
    """Return the good rows of an Arrow file, and what is wrong with it.

    Of a whole file only these columns, if it has them; and only the rows `within` a time. Of a file that this process
    has read before, and that has not changed since, only what holds these rows is unpacked.

    The part that is being written has no footer: it is read as a stream. So is a file that was cut.
    """
    rows, problem, _ = read_on(path, closed=closed, columns=columns, within=within)
    return (only(rows, within) if rows is not None and within else rows), problem


def read_on(
    path: Path, *, closed: bool, columns: Sequence[str] | None = None, within: Within | None = None, since: int = 0
) -> tuple[pa.Table | None, str | None, Batch]:
    """Return as `read_rows` does all rows of the batches that may have some `within` a time, from number `since` on.

    And the batch to read on with, for later times. What is read as a stream is one batch.
    """
    try:
        which, data = _version(path), path.read_bytes()
        begins = _INTACT.get(which)
        if begins is not None:
            rows, following = _read_file(pa.BufferReader(data), begins, columns, within, since)
            return rows, None, following
    except _DAMAGED as error:
        return None, text("could not be read ({error})", error=getattr(error, "strerror", None) or error), NO_MORE
    if not is_intact(data):
        return None, text("was damaged after it was written: its checksum is wrong"), NO_MORE
    check_bytes(path, decoded_bytes(data[_HEADER:]), len(data))
    if data.startswith(_MAGIC) and data.endswith(_MAGIC) and len(data) > 2 * _HEADER:
        try:
            begins = {}
            rows, following = _read_file(pa.BufferReader(data), begins, columns, within, since)
            _INTACT[which] = begins
            return rows, None, following
        except _DAMAGED:
            pass  # what is good of it may still be read as a stream
    batches: list[pa.RecordBatch] = []
    problem = text("has no footer although the run was closed: its last rows may be missing") if closed else None
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(data[_HEADER:]))
        while True:
            batches.append(_checked(stream.read_next_batch()))
    except StopIteration:
        pass
    except _DAMAGED:
        problem = text("was cut off: its last rows are lost")
    return (pa.Table.from_batches(batches) if batches else None), problem, NO_MORE


def _version(path: Path) -> _Version:
    found = os.stat(path)  # a path's own takes twice as long, and there are ten thousand files
    return path, found.st_size, found.st_mtime_ns


def _checked(rows: _Rows) -> _Rows:
    """Return the rows, whose texts and lengths are what they claim. Raises an Arrow error."""
    rows.validate(full=True)
    return rows


def _read_file(
    source: pa.NativeFile,
    begins: dict[int, int],
    columns: Sequence[str] | None,
    within: Within | None,
    since: int,
) -> tuple[pa.Table, Batch]:
    """Read on as `read_on` does; `begins` is when which batch begins, as far as known, and is added to."""
    file = _opened(source)
    schema, count = file.schema, file.num_record_batches
    if columns is not None:
        file = _of_columns(source, schema, columns)
    if within is None or within.order not in schema.names:
        return _checked(file.read_all()), NO_MORE
    first, after = since, count
    if count > 1:

        def begin_ns(number: int) -> int:
            if number not in begins:
                of_order = _of_columns(source, schema, [within.order])
                begins[number] = of_order.get_batch(number)[within.order][0].as_py()
            return begins[number]

        numbers = range(since, count)
        # The last rows of the batch before may be as late.
        first = max(since + bisect_left(numbers, within.begin_ns, key=begin_ns) - 1, since)
        if within.end_ns < AT_THE_END:
            after = since + bisect_right(numbers, within.end_ns, key=begin_ns)
    rows = pa.Table.from_batches([file.get_batch(number) for number in range(first, after)], file.schema)
    return _checked(rows), NO_MORE if after == count else Batch(after, begin_ns(after))


def _of_columns(source: pa.NativeFile, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatchFileReader:
    wanted = [number for number, name in enumerate(schema.names) if name in columns]
    return _opened(source, wanted)


def _opened(source: pa.NativeFile, columns: list[int] | None = None) -> pa.RecordBatchFileReader:
    """Open a file that lies in memory: threads of pyarrow's own take more to hand columns over than to unpack them."""
    return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns))


def only(rows: pa.Table, within: Within) -> pa.Table:
    """Return the rows within a time."""
    return between(rows, within.order, [(within.begin_ns, within.end_ns)]).get(0, rows[:0])


def between(rows: pa.Table, order: str, spans: Sequence[tuple[int, int]]) -> dict[int, pa.Table]:
    """Return the rows between each two times, both included, by this column, by the number of those that have some.

    The rows of a sealed file are in order.
    """
    if order not in rows.column_names:
        return dict.fromkeys(range(len(spans)), rows)
    at = rows[order]
    times = at.to_numpy()
    if not at.null_count and (times[1:] >= times[:-1]).all():
        edges = np.searchsorted(times, np.array(spans) + np.array([0, 1])).tolist()
        return {number: rows[first:end] for number, (first, end) in enumerate(edges) if first < end}
    from pyarrow import compute as pc  # 0.1 s

    found = (rows.filter(pc.and_(pc.greater_equal(at, begin), pc.less_equal(at, end))) for begin, end in spans)
    return {number: some for number, some in enumerate(found) if len(some)}


def time_in_the_middle(path: Path, order: str) -> int:
    """Return a time in the midst of a file's rows.

    That of a file without rows is at its end, where one may be written.
    """
    try:
        return _middle(_version(path), order)
    except OSError:
        return AT_THE_END


@lru_cache(maxsize=1 << 16)
def _middle(which: _Version, order: str) -> int:
    rows = order_of(which[0], order)
    return rows[len(rows) // 2].as_py() if len(rows) else AT_THE_END


def order_of(path: Path, order: str) -> pa.ChunkedArray:
    """Return the column that orders a file's good rows; empty without such. The part being written may have some."""
    table, _ = read_rows(path, closed=False, columns=[order])
    return table[order] if table is not None and order in table.column_names else pa.chunked_array([], pa.int64())


def count_rows(path: Path) -> int:
    """Return the number of rows by the file's footer; 0 where it has none."""
    from pyarrow import dataset  # 3 MB

    try:
        return int(dataset.dataset(path, format="ipc").count_rows())
    except (OSError, pa.ArrowException):
        return 0


def at_once(do: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """Return the results for all items, in their order.

    Once waiting for files takes longer than what is done with them, as on shared storage, several are read at a time.
    """
    left = iter(items)
    done: list[_Out] = []
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    looked_s = begun_s
    while True:
        now_s = time.perf_counter()
        if now_s - looked_s > _PATIENCE_S:  # to ask for the time that was worked takes as long as a small file
            looked_s = now_s
            if _waits_since(begun_s, begun_cpu_s):
                break
        try:
            done.append(do(next(left)))
        except StopIteration:
            return done
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return done + list(pool.map(do, left))


def _waits_since(begun_s: float, begun_cpu_s: float) -> bool:
    worked_s = time.process_time() - begun_cpu_s
    return time.perf_counter() - begun_s - worked_s > worked_s + _PATIENCE_S
