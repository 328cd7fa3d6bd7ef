"""The agent's side of deep windows and live stacks: requests in the run folder, answers beside them.

A request is a file `run/window=0001.json` that `rankscope trigger` writes, or an agent itself (steps given at the
start, a slow step). Every agent that shares the folder sees it. The agent of the first node names the steps, the others
read them from its answer, `run/window=0001.node=00000.json`; each asks its own ranks, and when their traces are saved,
converts them in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import msgspec

from rankscope.collectors.agent.json_files import replace_json
from rankscope.collectors.agent.messages import Slow, Stacks, Window

if TYPE_CHECKING:  # `rankscope trigger` asks without importing the writer, nor numpy
    from rankscope.collectors.agent.arrow_writer import RunFolder
    from rankscope.collectors.agent.ring_reader import Progress

__all__ = ["ENDED", "Asked", "Windows", "ask", "folder_of"]

ENDED = ("recorded", "refused", "failed", "discarded", "gone", "told")  # final states

_REQUEST = re.compile(r"window=(\d+)\.json")
_NODE = re.compile(r"node=(\d+)\.json")
_NOTICE_NS, _NOTICE_OTHERS_NS = 500_000_000, 4_000_000_000  # until every rank has heard of it; with other nodes
_NOTICE_STEPS = 2
_CHOOSE_S = 15.0  # for a first rank to end a step, or the first node to name the steps
_ANSWER_S, _PY_SPY_S = 3.0, 10.0  # for a rank to send its stacks; for py-spy
_CONVERT_S, _CONVERT_AT_END_S = 600.0, 15.0
_COOL_DOWN_S = 300.0
_SETTLED = 18  # steps before the window that a job on GPUs begins with
_ALL_RANKS = 64  # in larger jobs only the first node's are in that window: the others' traces would be many bytes
_OF_NVIDIA = "GPU-"  # a uuid begins with; others were not tried

Send = Callable[[Mapping[str, Any]], None]
Gap = Callable[[int, str], None]
Row = Callable[[int, Mapping[str, Any]], None]


def folder_of(number: int) -> str:
    """Return the folder of a window's tables in the run's folder."""
    return f"window-{number:04d}"


def _path_of(run: Path, number: int) -> Path:
    return run / "run" / f"window={number:04d}.json"


def _answer_of(run: Path, number: int, node: int) -> Path:
    return run / "run" / f"window={number:04d}.node={node:05d}.json"


def ask(run: Path, request: Mapping[str, Any]) -> int:
    """Put a request into the run's folder: its number. Raises OSError."""
    taken = [int(found[1]) for path in (run / "run").glob("window=*.json") if (found := _REQUEST.fullmatch(path.name))]
    number = max(taken, default=0) + 1
    unfinished = run / "run" / f".window-{os.getpid()}.new"
    while True:
        try:
            unfinished.write_text(json.dumps({"id": number} | dict(request)))
            os.link(unfinished, _path_of(run, number))
        except FileExistsError:
            number += 1
            continue
        finally:
            unfinished.unlink(missing_ok=True)
        return number


@dataclass(eq=False, slots=True)
class _Member:
    """A running rank of this node."""

    send: Send
    pid: int
    world_size: int
    done: int = 0
    step_ns: int = 0
    heard_ns: int = 0


@dataclass(eq=False, slots=True)
class _Request:
    """One request and what came of it on this node."""

    number: int
    kind: str
    ranks: frozenset[int] | None
    steps: int
    first: int | None
    reason: str
    since: float = field(default_factory=time.monotonic)
    asked: bool = False
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    converter: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None
    over: bool = False
    is_answered: bool = True  # its answer is on the disk

    def wants(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


def _overwrite(path: Path, answer: object) -> bool:
    """Overwrite the last answer, which takes no more of a full disk; return whether that succeeded."""
    content = json.dumps(answer).encode()
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        return file.write(content) == len(content) == file.truncate(len(content))
    return False


@dataclass(frozen=True, slots=True)
class Asked:
    """The windows that the command line asks for.

    `first` is how many steps a job on GPUs begins with, 0: none; `fixed` are the first and last step of another one
    instead; `slow` is how many slow steps may open one.
    """

    first: int = 0
    fixed: tuple[int, int] | None = None
    slow: int = 0


class Windows:
    """The windows and stacks of one node. Raises nothing: what fails is in the answer, and in `gaps`."""

    def __init__(self, run: RunFolder, gap: Gap, row: Row, asked: Asked) -> None:
        self._run = run
        self._sent_path = run.path  # where ranks save; the run may be moved since
        self._gap = gap
        self._row = row
        self._fixed = asked.fixed
        self._first = 0 if asked.fixed else asked.first
        self._slow_left = asked.slow
        self._slow_since = -math.inf
        self._node: int | None = None
        self._members: dict[int, _Member] = {}
        self._on_gpus: set[int] = set()
        self._requests: dict[int, _Request] = {}
        # Where a thousand nodes look every second, they look for one name: the folder has more entries than nodes.
        self._next = 1

    # ---- messages of ranks

    def join(self, rank: int, send: Send, pid: int, world_size: int) -> None:
        """Add a running rank, and send it the open requests."""
        self._members[rank] = _Member(send, pid, world_size)
        if self._slow_left:
            send({"type": "watch"})
        for request in self._requests.values():
            if request.asked and not request.over and request.wants(rank) and rank not in request.states:
                self._ask_rank(request, rank)

    def uses(self, rank: int, uuid: str) -> None:
        """Note that a rank uses this GPU."""
        if uuid.startswith(_OF_NVIDIA):
            self._on_gpus.add(rank)

    @property
    def step_ns(self) -> int:
        """How long a step of the slowest rank usually takes; 0 where none is known."""
        return max((member.step_ns for member in self._members.values()), default=0)

    def forget(self) -> None:
        """Forget the ranks that joined: others will train, and are asked for what is still open."""
        self._members.clear()
        for request in self._requests.values():
            if not request.over:
                request.states.clear()

    def leave(self, rank: int) -> None:
        self._members.pop(rank, None)
        for request in self._requests.values():
            if request.asked and rank in request.states and not self._has_ended(request, rank):
                self._note(request, rank, "gone", "the rank ended before it was done")

    def advance(self, rank: int, progress: Progress) -> None:
        """Take note of how far a rank is."""
        member = self._members.get(rank)
        if member is None:
            return
        member.done, member.step_ns = progress.done, progress.step_ns
        member.heard_ns = min(progress.time_ns, time.perf_counter_ns())
        if rank in self._on_gpus and member.done >= _SETTLED:
            self._ask_first(member.world_size)

    def hear(self, rank: int, message: Slow | Window | Stacks) -> None:
        """Take a message of a rank. Raises ValueError or TypeError."""
        if rank not in self._members:
            return
        if isinstance(message, Slow):
            self._slow(rank, message)
            return
        request = self._requests.get(message.id)
        if request is None:
            return
        if isinstance(message, Stacks):
            self._note(request, rank, "told", step=message.step, threads=message.threads)
            return
        if message.row is not None:
            known = {"window": request.number, "first_step": request.first, "steps": request.steps}
            self._row(rank, known | {"reason": request.reason} | msgspec.structs.asdict(message.row))
        if message.state == "saved":
            request.saved[rank] = {"marks": message.marks or [], "path": str(self._raw(request, rank))}
        self._note(request, rank, message.state, message.why)

    # ---- once a second

    def work(self, node: int) -> None:
        """Take up requests, and advance them as far as possible now."""
        if self._node is None and self._fixed:
            self._ask_fixed(*self._fixed)
        self._node = node
        if self._sent_path != self._run.path:
            self._sent_path = self._run.path
            self._send_new_paths()
        number = self._next
        while os.path.exists(path := _path_of(self._run.path, number)):
            if number not in self._requests:
                self._take_up(number, path)
            number += 1
        while self._next in self._requests:
            self._next += 1
        for request in self._requests.values():
            if not request.over:
                self._go_on(request)
            if not request.is_answered:
                self._answer(request)

    def close(self) -> None:
        """End with the job: conversions under way may finish."""
        deadline = time.monotonic() + _CONVERT_AT_END_S
        for request in self._requests.values():
            if not request.over:
                for rank in list(request.states):
                    if not self._has_ended(request, rank) and rank not in request.saved:
                        self._note(request, rank, "gone", "the job ended before it was done")
                self._go_on(request)
            if request.converter is not None and not request.over:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    request.converter.wait(max(deadline - time.monotonic(), 0))
                self._await_converter(request, at_end=True)

    # ---- requests

    def _take_up(self, number: int, path: Path) -> None:
        try:
            asked = json.loads(path.read_bytes())
            ranks = None if asked["ranks"] is None else frozenset(map(int, asked["ranks"]))
            first = None if asked["first"] is None else int(asked["first"])
            kind, steps, reason = str(asked["kind"]), int(asked["steps"]), str(asked["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # not whole yet
        self._requests[number] = _Request(number, kind, ranks, steps, first, reason)

    def _ask_fixed(self, first: int, last: int) -> None:
        """Ask for the steps from the command line, under the same number on each node."""
        path = _path_of(self._run.path, 1)
        request = {"id": 1, "kind": "window", "ranks": None, "first": first, "steps": last - first + 1}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(request | {"reason": "--profile-steps"}))

    def _ask_first(self, world_size: int) -> None:
        """Ask for the window that a job on GPUs begins with, as the first node's agent, if there was no other.

        Where each node has a folder of its own the others have none: they would begin theirs at other steps.
        """
        if not self._first or self._node != 0:
            return
        steps, self._first = self._first, 0
        ranks = None if world_size <= _ALL_RANKS else sorted(self._members)
        if not self._requests:
            with contextlib.suppress(OSError):
                request = {"kind": "window", "ranks": ranks, "first": None, "steps": steps}
                ask(self._run.path, request | {"reason": "--profile-first"})

    def _slow(self, rank: int, message: Slow) -> None:
        """Ask for a window after a slow step, as the first node's agent, if it may."""
        may = self._slow_left > 0 and time.monotonic() - self._slow_since > _COOL_DOWN_S and self._is_first_node()
        if not may:
            return
        self._slow_left -= 1
        self._slow_since = time.monotonic()
        times = message.ns / max(message.usual_ns, 1)
        reason = f"step {message.step} took {times:.1f} x the usual on rank {rank}"
        with contextlib.suppress(OSError):
            ask(self._run.path, {"kind": "window", "ranks": None, "first": None, "steps": 3, "reason": reason})

    def _go_on(self, request: _Request) -> None:
        if not request.asked:
            self._begin(request)
            return
        open_ranks = [rank for rank in request.states if not self._has_ended(request, rank)]
        if request.kind == "stacks":
            if open_ranks and time.monotonic() - request.since > _ANSWER_S:
                for rank in open_ranks:
                    self._look_from_outside(request, rank)
        elif request.converter is not None:
            self._await_converter(request)
            return
        elif request.saved and all(rank in request.saved for rank in open_ranks):
            self._convert(request)
            return
        if request.states and all(self._has_ended(request, rank) for rank in request.states):
            self._end(request)

    def _begin(self, request: _Request) -> None:
        mine = sorted(rank for rank in self._members if request.wants(rank))
        if request.kind == "window":
            if not self._has_first(request, mine):
                return
            try:
                (self._run.path / folder_of(request.number)).mkdir(exist_ok=True)
            except OSError as error:
                for rank in mine:
                    self._note(request, rank, "failed", f"its folder cannot be made: {error.strerror}")
                request.asked = True
                return
        request.asked = True
        request.since = time.monotonic()
        for rank in mine:
            self._ask_rank(request, rank)
        if not mine and request.ranks is not None:
            self._end(request)  # they are other nodes'
        self._answer(request)

    def _has_first(self, request: _Request, mine: list[int]) -> bool:
        """Say whether the first step of the window is known, or the request is over because it cannot be."""
        if request.first is not None:
            return True
        why = ""
        if self._is_first_node():
            request.first = self._choose()
            why = "no rank ends a step (neither an optimizer's step nor rankscope.step())"
        else:
            request.first = self._chosen(request)
            why = "the first node's agent named no step"
        if request.first is None and time.monotonic() - request.since > _CHOOSE_S:
            request.asked = True
            for rank in mine:
                self._gap(rank, f"window {request.number} was not opened: {why}")
                self._note(request, rank, "refused", why)
            self._end(request)
        return request.first is not None

    def _choose(self) -> int | None:
        """Return a step that no rank has reached when the last one gets the message."""
        now_ns = time.perf_counter_ns()
        known = [member for member in self._members.values() if member.done and member.step_ns]
        if not known:
            return None
        alone = all(member.world_size <= len(self._members) for member in known)
        notice_ns = _NOTICE_NS if alone else _NOTICE_OTHERS_NS
        return max(m.done + math.ceil((now_ns - m.heard_ns + notice_ns) / m.step_ns) for m in known) + _NOTICE_STEPS

    def _chosen(self, request: _Request) -> int | None:
        """Return the first step, as the first node's agent has answered."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(_answer_of(self._run.path, request.number, min(self._nodes())).read_bytes())["first"])
        return None

    def _nodes(self) -> list[int]:
        return [
            int(found[1]) for p in (self._run.path / "run").glob("node=*.json") if (found := _NODE.fullmatch(p.name))
        ]

    def _is_first_node(self) -> bool:
        return self._node is not None and self._node <= min(self._nodes(), default=self._node)

    def _send_new_paths(self) -> None:
        for request in self._requests.values():
            for rank in request.states if request.kind == "window" else ():
                if rank in self._members and request.states[rank]["state"] == "asked":
                    self._ask_rank(request, rank)

    def _ask_rank(self, request: _Request, rank: int) -> None:
        self._note(request, rank, "asked")
        message: dict[str, Any] = {"type": request.kind, "id": request.number}
        if request.kind == "window":
            path = str(self._raw(request, rank))
            message |= {"first": request.first, "steps": request.steps, "path": path}
        self._members[rank].send(message)

    def _raw(self, request: _Request, rank: int) -> Path:
        return self._run.path / folder_of(request.number) / f".rank{rank}.pt.trace.json"

    # ---- stacks

    def _look_from_outside(self, request: _Request, rank: int) -> None:
        """py-spy reads what a rank does that holds Python's lock; it neither stops nor changes the process."""
        member, py_spy = self._members.get(rank), shutil.which("py-spy")
        if member is None or py_spy is None:
            why = (
                f"no answer in {_ANSWER_S:.0f} s: code in C holds Python's lock (py-spy, once installed, shows where), "
            )
            why += "or the collector 'window' is off"
            self._note(request, rank, "failed", why)
            return
        command = [py_spy, "dump", "--nonblocking", "--pid", str(member.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
        except (OSError, subprocess.SubprocessError) as error:
            self._note(request, rank, "failed", f"py-spy: {error}")
            return
        if done.returncode:
            self._note(request, rank, "failed", f"py-spy: {done.stderr.strip()[-300:]}")
        else:
            self._note(request, rank, "told", step=member.done, text=done.stdout)

    # ---- conversion

    def _convert(self, request: _Request) -> None:
        folder = self._run.path / folder_of(request.number)
        described = {
            "node": self._node,
            "window": request.number,
            "first_step": request.first,
            "steps": request.steps,
            "reason": request.reason,
            "ranks": {str(rank): saved for rank, saved in request.saved.items()},
        }
        request.errors = TemporaryFile()  # noqa: SIM115 - read when the process has ended
        request.since = time.monotonic()
        for rank in request.saved:
            self._note(request, rank, "converting")
        try:
            with TemporaryFile() as stdin:  # too long for an argument, where there are many steps
                stdin.write(json.dumps(described).encode())
                stdin.seek(0)
                request.converter = subprocess.Popen(
                    [sys.executable, "-m", "rankscope.profiler.window", str(folder)],
                    cwd="/",
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=request.errors,
                )
        except OSError as error:
            self._converted(request, f"the traces were not converted: {error}")

    def _await_converter(self, request: _Request, *, at_end: bool = False) -> None:
        assert request.converter is not None
        assert request.errors is not None
        code = request.converter.poll()
        if code is None:
            if not at_end and time.monotonic() - request.since < _CONVERT_S:
                return
            request.converter.kill()
            request.converter.wait()
            self._converted(request, "the traces were not converted in time; they lie in its folder as .rank*.json")
            return
        why = ""
        if code:
            request.errors.seek(0)
            lines = request.errors.read().decode(errors="replace").strip().splitlines()
            why = f"the traces were not converted: {lines[-1] if lines else f'exit code {code}'}"
        self._converted(request, why)

    def _converted(self, request: _Request, why: str) -> None:
        for rank in request.saved:
            self._note(request, rank, "failed" if why else "recorded", why)
            if why:
                self._gap(rank, f"window {request.number}: {why}")
        if request.errors is not None:
            request.errors.close()
        self._end(request)

    # ---- answers

    def _has_ended(self, request: _Request, rank: int) -> bool:
        return request.states[rank]["state"] in ENDED

    def _note(self, request: _Request, rank: int, state: str, why: str = "", **more: object) -> None:
        request.states[rank] = {"state": state, "why": why} | more
        self._answer(request)

    def _end(self, request: _Request) -> None:
        request.over = True
        self._answer(request)

    def _answer(self, request: _Request) -> None:
        """Write the request's answer so far; what a full disk does not take is tried again each second."""
        answer = {"first": request.first, "over": request.over, "ranks": request.states}
        path = _answer_of(self._run.path, request.number, self._node or 0)
        try:
            replace_json(path, answer)
            request.is_answered = True
        except OSError:
            request.is_answered = _overwrite(path, answer)
