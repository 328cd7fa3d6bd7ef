"""One Arrow file that an agent wrote: its good rows, also while it is being written, or if it was cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from rankscope.analysis.readers.arrow_lengths import decoded_bytes
from rankscope.analysis.readers.bounds import check_bytes
from rankscope.analysis.text.message import text
from rankscope.collectors.checksum import is_intact

__all__ = ["AT_THE_END", "at_once", "count_rows", "order_of", "read_rows", "time_in_the_middle"]

_MAGIC = b"ARROW1"
_HEADER = 8  # the magic, padded
_FILES_AT_ONCE = 16
_PATIENCE_S = 0.02
AT_THE_END = 1 << 62
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)
_DAMAGED = (pa.ArrowException, OSError, IndexError, KeyError, ValueError)  # as pyarrow says it


def read_rows(path: Path, *, closed: bool, columns: Sequence[str] | None = None) -> tuple[pa.Table | None, str | None]:
    """Return the good rows of an Arrow file, and what is wrong with it.

    Of a whole file only these columns, if it has them.

    The part that is being written has no footer: it is read as a stream. So is a file that was cut.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return None, text("could not be read ({error})", error=error.strerror)
    if not is_intact(data):
        return None, text("was damaged after it was written: its checksum is wrong")
    check_bytes(path, decoded_bytes(data[_HEADER:]), len(data))
    if data.startswith(_MAGIC) and data.endswith(_MAGIC) and len(data) > 2 * _HEADER:
        try:
            return _checked(_read_file(data, columns)), None
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
    return (pa.Table.from_batches(batches) if batches else None), problem


def _checked(rows: _Rows) -> _Rows:
    """Return the rows, whose texts and lengths are what they claim. Raises an Arrow error."""
    rows.validate(full=True)
    return rows


def _read_file(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    file = pa.ipc.open_file(pa.BufferReader(data))
    if columns is not None:
        wanted = [number for number, name in enumerate(file.schema.names) if name in columns]
        file = pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(included_fields=wanted))
    return file.read_all()


def time_in_the_middle(path: Path, order: str) -> int:
    """Return a time in the midst of a file's rows.

    That of a file without rows is at its end, where one may be written.
    """
    rows = order_of(path, order)
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
    while not _waits_since(begun_s, begun_cpu_s):
        try:
            done.append(do(next(left)))
        except StopIteration:
            return done
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return done + list(pool.map(do, left))


def _waits_since(begun_s: float, begun_cpu_s: float) -> bool:
    worked_s = time.process_time() - begun_cpu_s
    return time.perf_counter() - begun_s - worked_s > worked_s + _PATIENCE_S
