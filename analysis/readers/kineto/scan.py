"""Reads files into captures: each row goes to the table that its category names."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rankscope.analysis.model.kernels import DEVICE_CATEGORIES, device_work
from rankscope.analysis.readers.flops import SHAPED
from rankscope.analysis.readers.json_scan import (
    META_COLUMNS,
    NO_NAME,
    ROW_COLUMNS,
    Events,
    Scan,
    new_scanner,
    scan_events,
)
from rankscope.analysis.readers.kineto.capture import META_KEPT, Capture, Ints
from rankscope.analysis.readers.kineto.collectives import collective_rows
from rankscope.analysis.readers.kineto.files import JSON_NAME, TAR_NAME, member_of, trace_files
from rankscope.analysis.readers.kineto.header import file_information, read_header
from rankscope.analysis.readers.kineto.ranks import devices_of
from rankscope.analysis.readers.kineto.threads import thread_numbers
from rankscope.analysis.readers.kineto.unpack import GZIP_ERRORS, Source, unpacked
from rankscope.analysis.readers.spill_file import Rows, Spill, joined
from rankscope.analysis.readers.workers import Lost, each
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.collectors.schema import WINDOW_STEP

__all__ = ["BRIEF", "WHOLE", "read_captures"]

# Of a core (docs/performance.md).
_BYTES_PER_S, _UNPACKED = 400_000_000, 20

_LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver", "xpu_runtime")
_ANNOTATIONS = ("user_annotation",)
_OPERATORS = ("cpu_op", "Operator")  # the oldest files have annotations among these
# What becomes rows. Most others are Python frames, where stacks were recorded, and arrows between rows.
WHOLE = tuple(name.encode() for name in (*DEVICE_CATEGORIES, *_LAUNCHES))
BRIEF = tuple(name.encode() for name in (*_OPERATORS, *_ANNOTATIONS))
_ANNOTATION_NAME = re.compile(rf"ProfilerStep#|{WINDOW_STEP}|enumerate\(DataLoader\)|Optimizer\.|gloo:")

_OTHER, _DEVICE, _LAUNCH, _SPAN, _OPERATOR = range(5)  # what a row's category makes of it
_NO_TIME_NS = -(10**15)  # before the trace's base: what is left of a time of 0


def read_captures(paths: Sequence[str], folder: Path, operators_from_ns: int) -> Iterator[Capture | str]:
    """Yield the content of each file, or one line on its error, in the order of the files.

    Their rows lie in files in this folder. Large files are read by several processes at once.
    """
    files = [(path, file) for path in paths for file in trace_files(Path(path))]
    alone = Counter(path for path, _ in files)
    tasks = [
        (file.absolute(), str(file) if alone[path] == 1 else file.name, folder / f"{number}.rows", operators_from_ns)
        for number, (path, file) in enumerate(files)
    ]
    for (file, *_), captures in zip(tasks, each(read_file, tasks, [_cpu_s(file) for _, file in files]), strict=True):
        if isinstance(captures, Lost):
            yield text("{name} was not read: {why}", name=file.name, why=captures.why)
        else:
            yield from captures


def _cpu_s(file: Path) -> float:
    """About what reading this file takes."""
    packed = file.name.endswith(("gz", "tgz"))
    return file.stat().st_size * (_UNPACKED if packed else 1) / _BYTES_PER_S


def read_file(file: Path, label: str, rows: Path, operators_from_ns: int) -> list[Capture | str]:
    """Return the content of the file; its rows lie in `rows`."""
    spill = Spill(rows)
    if not TAR_NAME.search(file.name):
        with file.open("rb") as opened:
            return [_read_capture(label, unpacked(opened), spill, operators_from_ns)]
    captures: list[Capture | str] = []
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                if member.isfile() and JSON_NAME.search(member.name):
                    inside = unpacked(member_of(tar, member))
                    captures.append(_read_capture(f"{file.name}:{member.name}", inside, spill, operators_from_ns))
    except (tarfile.TarError, *GZIP_ERRORS):
        captures.append(f"{file.name} is cut off or damaged")
    return captures


_KEPT: dict[str, tuple[str, ...]] = {
    "device": ("ts", "dur", "correlation", "bytes", "cat", "name", "stream", "device"),
    "launches": ("ts", "dur", "correlation", "name", "tid"),
    "spans": ("ts", "dur", "name", "tid"),
    "operators": ("ts", "dur", "name", "tid"),
    "shaped": ("ts", "dur", "name", "tid", "dims"),
}
_ABOUT_KERNELS = {c: META_COLUMNS[c] for c in META_KEPT} | {"row": "i8"}
_ABOUT_OPERATORS = {c: META_COLUMNS[c] for c in META_KEPT} | {c: ROW_COLUMNS[c] for c in ("ts", "dur", "tid")}


class _Kept:
    """The rows of one file that are kept, and the names behind their codes, batch by batch."""

    def __init__(self, spill: Spill, operators_from_ns: int) -> None:
        self.tables = {table: Rows({c: ROW_COLUMNS[c] for c in columns}, spill) for table, columns in _KEPT.items()}
        self.names: list[str] = [""]
        self.without_time = 0  # device rows
        self.on_device, self.of_operators = [_no_rows(_ABOUT_KERNELS)], [_no_rows(_ABOUT_OPERATORS)]
        self._operators_from_ns = operators_from_ns
        self._roles, self._annotates = np.array([_OTHER], np.int8), np.array([False])  # by code

    def learn(self, names: Sequence[bytes]) -> None:
        """Note the next names: what a row of the category of this name is, and whether an operator is an annotation."""
        decoded = [_decoded(raw) for raw in names]
        self.names += decoded
        self._roles = np.append(self._roles, np.array([_role(name) for name in decoded], np.int8))
        annotates = [bool(_ANNOTATION_NAME.match(name)) for name in decoded]
        self._annotates = np.append(self._annotates, np.array(annotates, bool))

    def add(self, batch: Events) -> None:
        """Put each row into its table."""
        role = self._roles[batch.rows["cat"]]
        role[(role == _OPERATOR) & self._annotates[batch.rows["name"]]] = _SPAN
        ts, dur = batch.rows["ts"], batch.rows["dur"]
        timeless = (role == _DEVICE) & ((ts < _NO_TIME_NS) | ((ts == 0) & (dur == 0)))
        role[timeless] = _OTHER
        self.without_time += int(timeless.sum())
        if len(batch.metas["row"]):
            self._add_metadata(batch, role)
        long_operator = (role == _OPERATOR) & (batch.rows["dur"] >= self._operators_from_ns)
        has_shapes = (role == _OPERATOR) & (batch.rows["dims"] != NO_NAME)
        chosen = (role == _DEVICE, role == _LAUNCH, role == _SPAN, long_operator, has_shapes)
        for (name, columns), where in zip(_KEPT.items(), chosen, strict=True):
            self.tables[name].add({c: batch.rows[c][where] for c in columns})

    def _add_metadata(self, batch: Events, role: Ints) -> None:
        at = batch.metas["row"]
        of_device = role[at] == _DEVICE
        position = np.cumsum(role == _DEVICE) - 1 + len(self.tables["device"])
        self.on_device.append({c: batch.metas[c][of_device] for c in META_KEPT} | {"row": position[at][of_device]})
        in_op = role[at] == _OPERATOR
        self.of_operators.append(
            {c: batch.metas[c][in_op] for c in META_KEPT} | {c: batch.rows[c][at[in_op]] for c in ("ts", "dur", "tid")}
        )


def _read_capture(label: str, source: Source, spill: Spill, operators_from_ns: int) -> Capture | str:
    """Return the capture in this file, or one line that says what is wrong with it."""
    header = read_header(source)
    if isinstance(header, str):
        return f"{label} {header}"
    before, begun = header
    scanner, result = new_scanner(WHOLE, BRIEF, SHAPED), Scan()
    kept = _Kept(spill, operators_from_ns)
    for batch in scan_events(scanner, source, begun, result):
        kept.learn(scanner.names(len(kept.names)))
        kept.add(batch)
    info, base = file_information(before, result.trailer)
    about_operators = joined(kept.of_operators)
    about_operators["ts"] += base
    for table in kept.tables.values():
        table.seal()
        table.shift_ns = base
    device, launches, spans, operators, shaped = kept.tables.values()
    if not (len(device) or len(launches) or len(spans)) and not scanner.counts()[0]:
        return f"{label} holds no event{': it ' + source.problem if source.problem else ''}"
    capture = Capture(
        label=label,
        info=info,
        names=kept.names,
        **kept.tables,
        device_metas=joined(kept.on_device),
        operator_metas=about_operators,
        devices=devices_of(device),
        threads=thread_numbers(kept.names, spans, launches, operators, shaped),
        found=[*_scan_problems(scanner.counts(), result, source.problem), *_timeless(kept.without_time)],
    )
    capture.calls = collective_rows(capture)
    capture.find_problems()
    return capture


def _timeless(count: int) -> list[tuple[str, int | None, str]]:
    why = text("{rows} to which the driver gave no time were left out", rows=counted(count, "device row"))
    return [("kernels", count, why)] if count else []


def _no_rows(kinds: Mapping[str, str]) -> dict[str, Ints]:
    return {name: np.empty(0, kind) for name, kind in kinds.items()}


def _role(category: str) -> int:
    if device_work(category, "") is not None:
        return _DEVICE
    if category in _LAUNCHES:
        return _LAUNCH
    if category in _ANNOTATIONS:
        return _SPAN
    return _OPERATOR if category in _OPERATORS else _OTHER


def _decoded(raw: bytes) -> str:
    """Return the name, with JSON's escapes undone where they are sound."""
    text = raw.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        said = str(json.loads(f'"{text}"', strict=False))
        return said.encode("utf-8", "replace").decode()  # half a character may be escaped, but cannot be text
    except ValueError:
        return text


def _scan_problems(counts: tuple[int, int, int, int], result: Scan, cut: str) -> list[tuple[str, int | None, str]]:
    _, malformed, untimed, unnamed = counts
    malformed += result.too_long
    problems: list[tuple[str, int | None, str]] = []
    if malformed:
        problems.append(
            (
                "*",
                malformed,
                text("{events} could not be read: the JSON is broken there", events=counted(malformed, "event")),
            )
        )
    if untimed:
        problems.append(
            (
                "*",
                untimed,
                text("{events} without a time or duration were left out", events=counted(untimed, "event")),
            )
        )
    if unnamed:
        problems.append(
            (
                "strings",
                unnamed,
                text("{names} beyond the first 262,142 are not kept", names=counted(unnamed, "name")),
            )
        )
    if result.cut:
        problems.append(
            (
                "*",
                None,
                text(
                    "the file {ends}: what came after is lost",
                    ends=cut or text("ends before its list of events does"),
                ),
            )
        )
    return problems
