"""Reads the dumps of PyTorch's flight recorder: pickles (every class forbidden) or JSON, one file per rank.

A dump does not say which rank wrote it: the rank stands at the end of the file's name (`nccl_trace_rank_3`, `_dump_3`).
It gives process groups, how far the rank had come in each, and the latest operations. Times are the host's unix time.
A rank that hangs may hold nothing but its counters.

Source: `torch/csrc/distributed/c10d/FlightRecorder`, formats 2.0 to 2.10.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.base import FrameReader, Reader, files_in, fits, gap, table
from rankscope.analysis.readers.bounds import check_pickle, check_structure
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, is_installed, place_in_code
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import MOST_RANKS, NO_PEER
from rankscope.errors import BadInput

__all__ = ["Group", "open_run", "peers", "reader", "recognises"]

_HEAD, _TAIL = 1 << 16, 1 << 12
_OF_THE_FORMAT = (b"pg_config", b"pg_status", b"nccl_version", b"time_created_ns")
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.(?:pkl|pickle|json|bin|dump))?$")
_LIST = re.compile(r"\s*\[[\s\d,]*\]\s*")
_NUMBER = re.compile(r"\d{1,18}")
_DIGITS = 7  # of a rank
_A_DAY_NS = 86_400 * 10**9
_DIRECTION = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,  # JSON and text that is not UTF-8 too
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
    struct.error,
)
_LAST_ONLY = text("a flight recorder holds the last operations only, and when they were enqueued")
_LACKS = {
    "breakdown": _LAST_ONLY,
    "phases": _LAST_ONLY,
    "steps": _LAST_ONLY,
    "regions": text("a flight recorder does not record what the host does"),
    "collectives": _LAST_ONLY,
}
_OPS = {
    "all_reduce": "allreduce",
    "allreduce": "allreduce",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "allreduce_coalesced",
    "all_gather": "allgather",
    "_all_gather_base": "allgather_base",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "alltoall",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "Short": 2, "Half": 2}
_BYTES |= {"BFloat16": 2}
_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    role: str
    ranks: tuple[int, ...]  # global

    @property
    def id(self) -> int:
        """Equal on all ranks of the group."""
        key = f"{self.name}|{self.ranks}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operation that the recorder held."""

    group: Group
    op: str
    is_p2p: bool
    seq: int
    collective_seq: int
    peer: int
    size_bytes: int
    dtype: str
    start_ns: int
    started: bool | None
    end_ns: int | None
    pending: bool
    number: int
    frame: str | None


@dataclass(frozen=True, slots=True)
class _Counters:
    """Numbers of a rank's last operations in a group."""

    enqueued: int
    started: int | None
    completed: int


@dataclass(frozen=True, slots=True)
class _Dump:
    path: Path
    rank: int
    groups: tuple[Group, ...]
    status: Mapping[Group, _Counters]
    entries: tuple[_Entry, ...]
    skipped: int
    quiet_ns: int | None


class _NoClasses(pickle.Unpickler):
    """Builds numbers, strings, lists, tuples and dicts, and nothing else."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _Unusable(f"it wants to load {module}.{name}, and no class is loaded from a dump")


def recognises(path: Path) -> bool:
    """Return a dump, or a folder in which one lies."""
    if path.is_dir():
        return any(f.is_file() and _is_dump(f) for f in path.iterdir())
    return _is_dump(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """Everything these dumps hold of one run. Raises `BadInput` if nothing of it is good."""
    dumps, damaged, missing = _read_all(_dumps_in(paths))
    if not dumps:
        why = missing[0].why if missing else "holds no dump of the flight recorder"
        raise BadInput(f"{', '.join(paths)}: {why}")
    ordered = [dumps[rank] for rank in sorted(dumps)]
    damaged = damaged - dumps.keys()
    world = max((rank + 1 for dump in ordered for group in dump.groups for rank in group.ranks), default=len(ordered))
    return FrameReader(
        frames={
            "ranks": table("ranks", [{"rank": d.rank, "start_ns": 0, "world_size": world} for d in ordered]),
            "groups": table("groups", [row for dump in ordered for row in _group_rows(dump)]),
            "collectives": table("collectives", [_collective_row(d.rank, e) for d in ordered for e in d.entries]),
            "progress": table(
                "progress",
                [*(row for dump in ordered for row in _progress_rows(dump)), *_unread_rows(damaged, ordered)],
            ),
        },
        missing=[*missing, *_missing(ordered, damaged, world)],
        lacks=_LACKS,
    )


def _dumps_in(paths: Sequence[str]) -> list[Path]:
    """Return the dumps, and the files that are called like one but for the rank.

    One that is empty or damaged is no other.
    """
    files = files_in(paths)
    dumps = {path for path in files if _is_dump(path)}
    alike = {_RANK_IN_NAME.sub("", path.name) for path in dumps if _RANK_IN_NAME.search(path.name)}
    return [
        path
        for path in files
        if path in dumps or (_RANK_IN_NAME.search(path.name) and _RANK_IN_NAME.sub("", path.name) in alike)
    ]


def _read_all(paths: Sequence[Path]) -> tuple[dict[int, _Dump], set[int], list[Gap]]:
    """Return the dumps by rank, the ranks whose dumps cannot be read, as far as their names say, and what is wrong."""
    dumps: dict[int, _Dump] = {}
    damaged: set[int] = set()
    missing: list[Gap] = []
    for path in paths:
        try:
            dump = _read(path)
        except _BROKEN as error:
            why = str(error) if isinstance(error, _Unusable) else "it is cut or damaged"
            named = _RANK_IN_NAME.search(path.name)
            rank = int(named[1]) if named and len(named[1]) <= _DIGITS else None
            damaged |= set() if rank is None else {rank}
            missing.append(gap("progress", text("{name} was not read: {why}", name=path.name, why=why), rank=rank))
            continue
        if dump.rank in dumps:
            raise BadInput(f"two dumps of rank {dump.rank}: {dumps[dump.rank].path} and {path}; give those of one run")
        dumps[dump.rank] = dump
    return dumps, damaged, missing


class _Unusable(ValueError):  # noqa: N818
    """The dump is well-formed but lacks what is needed; the message says what."""


def _is_dump(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            file.seek(-min(_TAIL, path.stat().st_size), 2)
            ends = head + file.read(_TAIL)
    except OSError:
        return False
    is_json = head[:256].lstrip()[:1] == b"{"
    if not is_json and not (len(head) > 1 and head[0] == 0x80 and head[1] in (2, 3, 4, 5)):
        return False
    return b"entries" in ends and any(word in ends for word in _OF_THE_FORMAT)


def _read(path: Path) -> _Dump:
    """Return the dump of one rank. Raises any of `_BROKEN`."""
    content = path.read_bytes()
    if content.startswith(b"\x80"):
        check_pickle(content)
        loaded = _NoClasses(io.BytesIO(content)).load()
    else:
        loaded = json.loads(content)
    check_structure(loaded, len(content))
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries", []), list):
        raise _Unusable("it is no dump of the flight recorder")
    groups = tuple(_groups(loaded.get("pg_config", {})))
    rank = _rank(path, groups)
    by_name = {group.name: group for group in groups}
    entries: list[_Entry] = []
    pg_ids: dict[int, Group] = {}
    skipped = 0
    ended: dict[tuple[str, int, int], int] = {}  # groups of coalesced operations, and where their own entries are
    for raw in reversed(loaded.get("entries", [])):
        try:
            entry, part = _entry(raw, by_name, rank), _part_of(raw)
            if not fits("collectives", _collective_row(rank, entry)):
                raise OverflowError
        except _BROKEN:
            skipped += 1
            continue
        if _word(raw["profiling_name"]).endswith(":coalesced") and not entry.pending:
            ended[part] = entry.number
        elif ended.get(part, -1) > entry.number:  # the recorder never says of its parts that they have ended
            entry = replace(entry, pending=False, started=True)
        entries.append(entry)
        pg_ids[int(raw.get("pg_id", -1))] = entry.group
    status = _status(loaded.get("pg_status") or {}, groups, pg_ids)
    dump = _Dump(path, rank, groups, status, tuple(reversed(entries)), skipped, _quiet_ns(path, entries))
    if not all(fits("progress", row) for row in _progress_rows(dump)):
        raise OverflowError
    return dump


def _quiet_ns(path: Path, entries: Sequence[_Entry]) -> int | None:
    """Return how long before the file was written the last operation began or ended.

    None where the file's date is that of a copy, a day later or more, or of a clock that does not agree.
    """
    latest_ns = max((max(entry.start_ns, entry.end_ns or 0) for entry in entries), default=0)
    quiet_ns = path.stat().st_mtime_ns - latest_ns
    return quiet_ns if 0 <= quiet_ns < _A_DAY_NS else None


def _part_of(raw: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the same for the parts of a group of coalesced operations, and for its own entry, which comes after."""
    name, _ = raw["process_group"]
    return _word(name), int(raw.get("collective_seq_id", raw.get("seq_id", 0))), int(raw.get("p2p_seq_id", 0))


def _groups(config: Mapping[str, Any]) -> Iterator[Group]:
    for name, said in config.items():
        ranks = said["ranks"]
        members = tuple(sorted(int(r) for r in (_ranks_in(ranks) if isinstance(ranks, str) else ranks)))
        if members and not 0 <= members[0] <= members[-1] < MOST_RANKS:
            raise _Unusable(text("it names ranks that cannot be: {ranks}", ranks=f"{members[0]} … {members[-1]}"))
        yield Group(_word(said.get("name", name)), _word(said.get("desc", "")), members)


def _ranks_in(said: str) -> list[int]:
    """Return the numbers of `[0, 1]`."""
    if not _LIST.fullmatch(said):
        raise _Unusable(text("its process groups do not list their ranks"))
    return [int(number) for number in _NUMBER.findall(said)]


def _word(said: object) -> str:
    """Return a name, which may be a number. Raises TypeError: to write out what is nested may take for ever."""
    if not isinstance(said, (str, int)):
        raise TypeError("no name")
    return str(said)


def _rank(path: Path, groups: Sequence[Group]) -> int:
    """Return the rank that wrote the dump: by the file's name, if its groups agree; else by the groups alone."""
    named = _RANK_IN_NAME.search(path.name)
    in_all = set.intersection(*(set(group.ranks) for group in groups)) if groups else set()
    if named and (not groups or int(named[1]) in in_all):
        return int(named[1])
    if len(in_all) == 1:
        return in_all.pop()
    if named and groups:
        raise _Unusable(
            text(
                "by its name it is of rank {rank}, but its groups are of {ranks}",
                rank=named[1],
                ranks=ranges(sorted(in_all)),
            )
        )
    raise _Unusable(text("its rank is unknown; end its name with the rank"))


def _entry(raw: Mapping[str, Any], by_name: Mapping[str, Group], rank: int) -> _Entry:
    name, role = (_word(part) for part in raw["process_group"])
    group = by_name.get(name) or Group(name, role, ())
    title = _word(raw["profiling_name"]).split(":", 1)[-1]
    is_p2p = bool(raw.get("is_p2p", False)) or _DIRECTION.match(title) is not None
    collective_seq = int(raw.get("collective_seq_id", raw.get("seq_id", 0)))
    state = _word(raw.get("state", ""))
    end = raw.get("time_discovered_completed_ns") or None  # 0 in JSON, where a pickle has none
    done = state == "completed" or bool(raw.get("retired", False)) or end is not None
    sizes: list[Sequence[int]] = []
    dtypes: list[str] = []
    for way in ("input", "output"):
        sizes += raw.get(f"{way}_sizes") or []
        dtypes += raw.get(f"{way}_dtypes") or []
    return _Entry(
        group=group,
        op=_OPS.get(title.split(" ")[0], "unknown"),
        is_p2p=is_p2p,
        seq=int(raw.get("p2p_seq_id", 0)) if is_p2p else collective_seq,
        collective_seq=collective_seq,
        peer=peers(title, group.ranks, rank) if is_p2p else NO_PEER,
        size_bytes=_size_bytes(sizes, dtypes),
        dtype=_DTYPES.get(dtypes[0] if dtypes else "", "unknown"),
        start_ns=int(raw["time_created_ns"]),
        # Without timing the recorder never learns of starts: "scheduled" then says nothing.
        started=True if done or state == "started" else None,
        end_ns=None if end is None else int(end),
        pending=not done,
        number=int(raw.get("record_id", raw.get("id", 0))),
        frame=_frame(raw.get("frames")),
    )


def _frame(frames: object) -> str | None:
    """Return the innermost frame of the job's own code, as `train.py:12 (step)`; without one, the innermost."""
    if not isinstance(frames, list) or not frames:
        return None
    own = (frame for frame in frames if not is_installed(_word(frame["filename"])))
    frame = next(own, frames[0])
    return place_in_code(_word(frame["name"]), _word(frame["filename"]), int(frame["line"]))


def peers(title: str, members: Sequence[int], rank: int) -> int:
    """Return the global rank at the other end of `send 0->1` or `recv 1<-0`, which `rank` recorded.

    -1 if unknown.

    The numbers are ranks within the group; global ones are accepted where only they make sense.
    """
    match = _DIRECTION.match(title)
    if not match:
        return NO_PEER
    own, other = int(match[2]), int(match[3])
    if own < len(members) and other < len(members) and members[own] == rank:
        return members[other]
    return other if own == rank and other in members else NO_PEER


def _size_bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    largest = 0
    for shape, dtype in zip(sizes, dtypes, strict=False):
        elements = 1
        for extent in shape:
            elements *= int(extent)
        largest = max(largest, elements * _BYTES.get(dtype, 1))
    return largest


def _status(raw: Mapping[Any, Any], groups: Sequence[Group], pg_ids: Mapping[int, Group]) -> dict[Group, _Counters]:
    """Return the counters by group. They stand under the process's own numbers of the groups, not under their names.

    The entries say which number is which group. The others follow from the order in which groups are made: numbers and
    names both grow with it. Where that contradicts an entry, only the entries are believed.
    """
    numbers = sorted(int(number) for number in raw)
    made = sorted(groups, key=lambda g: (not g.name.isdigit(), int(g.name) if g.name.isdigit() else 0, g.name))
    by_order = dict(zip(numbers, made, strict=True)) if len(numbers) == len(made) else {}
    if any(by_order.get(number, group) != group for number, group in pg_ids.items()):
        by_order = {}
    status = {}
    for number, said in raw.items():
        group = pg_ids.get(int(number)) or by_order.get(int(number))
        if group is not None:
            enqueued, completed = said["last_enqueued_collective"], said["last_completed_collective"]
            started = int(said.get("last_started_collective", -1))
            status[group] = _Counters(int(enqueued), None if started < 0 else started, int(completed))
    return status


def _group_rows(dump: _Dump) -> Iterator[dict[str, Any]]:
    for group in dump.groups:
        yield {
            "rank": dump.rank,
            "start_ns": 0,
            "group_id": group.id,
            "name": group.name,
            "backend": "",
            "role": group.role,
            "members": ranges(group.ranks),
        }


def _collective_row(rank: int, entry: _Entry) -> dict[str, Any]:
    return {
        "rank": rank,
        "start_ns": entry.start_ns,
        "issued_ns": entry.start_ns,
        "end_ns": entry.end_ns,
        "group_id": entry.group.id,
        "seq": entry.seq,
        "op": entry.op,
        "dtype": entry.dtype,
        "peer": entry.peer,
        "tag": 0,
        "size_bytes": entry.size_bytes,
        "thread": 0,
        "number": entry.number,
    }


def _progress_rows(dump: _Dump) -> Iterator[dict[str, Any]]:
    """Yield a row for each group of which anything is known."""
    for group in dict.fromkeys([*dump.groups, *dump.status, *(entry.group for entry in dump.entries)]):
        mine = [entry for entry in dump.entries if entry.group == group]
        p2p = [e for e in mine if e.is_p2p]
        # The counters include ends that the entries lack, if both count the same thing.
        alike = group in dump.status and len(p2p) in (0, len(mine))
        ended = dump.status[group].completed if alike else -1
        open_entries = [e for e in mine if e.pending and e.seq > ended]
        pending = min(open_entries, key=lambda e: (e.start_ns, e.number), default=None)
        row: dict[str, Any] = {"rank": dump.rank, "group_id": group.id, "is_p2p": bool(p2p) and len(p2p) == len(mine)}
        row["quiet_ns"] = dump.quiet_ns
        if group in dump.status:
            counters = dump.status[group]
            row |= {"enqueued": counters.enqueued, "started": counters.started, "completed": counters.completed}
        elif mine and dump.skipped:
            pass  # one that cannot be read may be the last that was enqueued, or the one that holds the rank
        elif mine:
            row["enqueued"] = max(e.seq for e in mine)
            row["completed"] = min((e.seq - 1 for e in mine if e.pending), default=row["enqueued"])
        else:
            continue
        if pending is not None:
            row |= {
                "seq": pending.seq,
                "op": pending.op,
                "start_ns": pending.start_ns,
                "is_started": pending.started,
                "peer": pending.peer,
                "dtype": pending.dtype,
                "size_bytes": pending.size_bytes,
                "frame": pending.frame,
            }
        yield row


def _unread_rows(damaged: Set[int], dumps: Sequence[_Dump]) -> Iterator[dict[str, Any]]:
    """Yield a row without values for each group of a rank whose dump cannot be read.

    It left a state, and it is not known.
    """
    groups = dict.fromkeys(group for dump in dumps for group in dump.groups)
    for rank in sorted(damaged):
        yield from ({"rank": rank, "group_id": group.id, "is_p2p": False} for group in groups if rank in group.ranks)


def _missing(dumps: Sequence[_Dump], damaged: Set[int], world: int) -> Iterator[Gap]:
    absent = sorted(set(range(world)) - {dump.rank for dump in dumps} - damaged)
    if absent:
        why = text(
            "{absent} of {world} left no dump: {ranks}",
            absent=counted(len(absent), "rank"),
            world=world,
            ranks=ranges(absent),
        )
        yield gap("ranks", why, rank=absent[0] if len(absent) == 1 else None, count=len(absent))
    for dump in dumps:
        if dump.skipped:
            why = text(
                "{count} of {name} could not be read", count=counted(dump.skipped, "operation"), name=dump.path.name
            )
            yield gap("collectives", why, rank=dump.rank, count=dump.skipped)
        unknown = sum(1 for e in dump.entries if e.is_p2p and e.peer == NO_PEER)
        if unknown:
            why = text(
                "{name}: the peer of {transfers} is unknown",
                name=dump.path.name,
                transfers=counted(unknown, "transfer"),
            )
            yield gap("collectives", why, rank=dump.rank, count=unknown)
        if dump.groups and not dump.status and not dump.entries:
            yield gap(
                "progress", text("{name} holds neither counters nor operations", name=dump.path.name), rank=dump.rank
            )


reader = Reader(recognises=recognises, open_run=open_run)
