"""One rank's recording: it starts the collectors, guards them, and is the only place that catches broadly.

Collectors write through `Emit`. A hook that fails switches its collector off and leaves one row in `gaps`; the
training goes on. When the agent is gone, all hooks become no-ops.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import json
import operator
import os
import pkgutil
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankscope.collectors import agent_socket
from rankscope.collectors import rank as rank_collectors
from rankscope.collectors.in_rank import interrupts
from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.in_rank.placement import address_towards, host_of, place, world_of
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.in_rank.stderr import say, text_of
from rankscope.collectors.native import collectives_hook
from rankscope.collectors.rank import Collector
from rankscope.collectors.rank_ranges import as_ranges
from rankscope.collectors.schema import DEVICE_MARKS, LEFT_OFF, NO_PEER, REGION_KINDS
from rankscope.collectors.switched_off import switched_off
from rankscope.collectors.untyped import Foreign

__all__ = ["Emit", "annotate", "on_group", "step"]

_MAX_NAMES = 10_000  # a script that makes a new name every step must not grow without bound
_TICK_NS = 1_000_000_000
_PACKET_BYTES = 128 * 1024
_HELLO_S = 5  # for the agent's answer
_HIGHEST_INDEX = 2**31 - 1  # of a microbatch or stage
_STORE_KEY = "rankscope/agent"
_USER = REGION_KINDS.index("user")
_STEP_END = DEVICE_MARKS.index("step_end")
_INTERRUPTED = "a record may be missing that a signal handler of the script's interrupted by an exception"
_KINDS_BY_NAME = {kind: REGION_KINDS.index(kind) for kind in ("input", "checkpoint")}

clock = time.perf_counter_ns
_as_json, _of_json = json.JSONEncoder().encode, json.JSONDecoder().decode  # not those that the script may replace


class Emit:
    """The collectors' output. Every method is cheap, never blocks, and may be called from any thread."""

    def __init__(self, ring: Ring, channel: socket.socket) -> None:
        self.live = True
        self.runs = ""  # the folder below which the agent may have files written
        self.ring = ring
        self.region = ring.region
        self.mark: Callable[[int], None] = lambda _: None  # `device_events` puts its own here: position in DEVICE_MARKS
        self.on_backward: Callable[[Any], None] = lambda _: None  # called with the tensors that it begins with
        # Called at each mark, once there are any, with the device's.
        self.has_marks: Callable[[Any], None] = lambda _: None
        # Called before what may make the device wait for communication and, if that returns true, after it.
        self.waits: tuple[Callable[[], bool], Callable[[], None]] | None = None
        self.on_waits: Callable[..., object] = lambda *_: None  # called with them when they change
        self.groups: dict[str, Group] = {}
        self.in_flight: set[int] = set()  # records of operations whose end torch will report
        self.pending: Callable[[], int] = self.in_flight.__len__
        self.training_thread = threading.main_thread().ident  # by the first backward: of Ray Train's it is another one
        self.backwards = 0  # how many have begun
        self.in_backward = 0  # how many are under way on the training thread: one may begin within another
        self.device: int | None = None  # index of the CUDA device that the training uses, once something has shown it
        self.exiting = False  # the process ends
        self.in_microbatch = False  # of a pipeline's schedule, whose forwards and backwards have marks of their own
        self.channel = agent_socket.Channel(channel)
        self._sending = threading.Lock()
        self._backlog: list[bytes] = []
        self._lost = 0
        self._names: dict[str, int] = {}
        self._next_name = itertools.count().__next__
        self._names_full = False
        self.on_training_thread: Callable[[int], object] = lambda _: None  # called when it becomes another one
        self._incarnations: dict[tuple[str, str], int] = {}
        self._off: set[str] = set()
        self._said: set[tuple[str, str]] = set()
        self._on_tick: list[tuple[Callable[[], None], bool]] = []  # and whether it needs CUDA
        self._on_step: list[Callable[[int, int | None], None]] = []
        self._on_message: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._next_tick_ns = 0
        self._stops: dict[str, Callable[[], None]] = {}
        self.name("(further names)")

    def name(self, text: str) -> int:
        """Return the id that stands for `text` in this rank's `strings`."""
        name_id = self._names.get(text)
        if name_id is None:
            if len(self._names) >= _MAX_NAMES:
                if not self._names_full:
                    self._names_full = True
                    self.gap("regions", "names", f"more than {_MAX_NAMES} names; further ones share one")
                return 0
            name_id = self._names[text] = self._next_name()  # two threads may each give a new name an id: both are sent
            self.send({"type": "string", "id": name_id, "name": text[:500].encode(errors="replace").decode()})
        return name_id

    def gap(self, table: str, source: str, why: str, *, start_ns: int | None = None, count: int | None = None) -> None:
        """Record that `table` lacks rows from `start_ns` (default: now) on."""
        start_ns = clock() if start_ns is None else start_ns
        self.send(
            {"type": "gap", "table": table, "source": source, "start_ns": start_ns, "end_ns": None, "count": count}
            | {"why": why}
        )

    def gap_once(self, table: str, source: str, why: str) -> None:
        """Record it the first time only."""
        if (source, why) not in self._said:
            self._said.add((source, why))
            self.gap(table, source, why)

    def guard(self, collector: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` so that an exception in it switches `collector` off instead of reaching the training.

        An exception that comes from a signal handler of the script's is the training's, and passes.
        """

        def guarded(*args: Foreign) -> Foreign:
            try:
                return function(*args)
            except Exception as error:
                if interrupts.is_of_handler(error):
                    self.gap("*", collector, _INTERRUPTED, count=1)
                    raise
                with contextlib.suppress(Exception):  # what the script has replaced may fail too
                    self.switch_off(collector, text_of(error))
                return None

        return guarded

    def around(
        self,
        collector: str,
        owner: Foreign,
        attribute: str,
        record: Callable[..., None],
        before: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> Callable[[], None]:
        """Replace `owner.attribute` by `before(args)`, itself and `record(start_ns, end_ns, args, kwargs, result)`.

        Returns a function that undoes it. A call that raises has the result None.
        Once undone, a wrapper that other code has wrapped in turn only passes calls on.
        """
        original = owner.__dict__[attribute]
        record, before = self.guard(collector, record), before and self.guard(collector, before)
        active = True

        def wrapper(*args: Foreign, **kwargs: Foreign) -> Foreign:
            if not (active and self.live):
                return original(*args, **kwargs)
            start, result = clock(), None
            if before:
                before(args)
            try:
                result = original(*args, **kwargs)
            finally:
                record(start, clock(), args, kwargs, result)
            return result

        def undo() -> None:
            nonlocal active
            active = False
            if owner.__dict__.get(attribute) is wrapper:
                setattr(owner, attribute, original)

        wrapper.__wrapped__ = original  # type: ignore[attr-defined]
        wrapper.__name__ = getattr(original, "__name__", attribute)
        wrapper.__qualname__ = getattr(original, "__qualname__", attribute)
        wrapper.__doc__ = original.__doc__
        wrapper.__module__ = getattr(original, "__module__", __name__)
        setattr(owner, attribute, wrapper)
        return undo

    def mark_waits(self, begins: Callable[[], bool] | None, ends: Callable[[], None] | None) -> None:
        """Call `begins` and `ends` around what may make the device wait for communication; None: no longer."""
        self.waits = (begins, ends) if begins and ends else None
        self.on_waits(begins, ends)

    def backward_begins(self) -> None:
        """Count a backward. The thread of the first one is the one that trains."""
        self.backwards += 1
        if self.backwards == 1 and threading.get_ident() != self.training_thread:
            self.training_thread = threading.get_ident()
            self.on_training_thread(self.training_thread)
            ids = {"thread": self.training_thread, "tid": threading.get_native_id()}
            self.send({"type": "training_thread"} | ids)

    def learn_device(self, tensor: Foreign) -> None:
        """Learn the training's device from the first operation or weight on one.

        torch's current device differs where a script never sets it, and moves its model by number.
        """
        if self.device is None:
            with sys.modules["torch"]._C.DisableTorchFunction():  # a script may count what is done to its tensors
                self.device = tensor.device.index if getattr(tensor, "is_cuda", False) else None

    def on_tick(self, read: Callable[[], None], *, needs_cuda: bool = False) -> None:
        """Call `read` once a second from a training thread, as a step or collective ends; or only if CUDA is in use."""
        self._on_tick.append((read, needs_cuda))

    def tick(self, now_ns: int) -> None:
        """Run what is due once a second. Call it after a step or a collective, with its end."""
        if now_ns < self._next_tick_ns:
            return
        self._next_tick_ns = now_ns + _TICK_NS
        for read, needs_cuda in self._on_tick:
            if self.live and (not needs_cuda or sys.modules["torch"].cuda.is_initialized()):
                read()

    def on_step(self, call: Callable[[int, int | None], None]) -> None:
        """Call `call(end_ns, optimizer)` where a step may end: `rankscope.step()` (None), or an optimizer's name id."""
        self._on_step.append(call)

    def stepped(self, end_ns: int, optimizer: int | None) -> None:
        """Note that a step has ended on this thread, as far as `rankscope.step()` or this optimizer shows."""
        for call in self._on_step:
            call(end_ns, optimizer)

    def on_message(self, kind: str, call: Callable[[dict[str, Any]], None]) -> None:
        """Call `call(message)` with each message of this type from the agent, in a thread of the session's own."""
        self._on_message[kind] = call

    def receive(self, message: dict[str, Any]) -> None:
        """Pass a message of the agent to the collector that waits for it; others are for newer versions."""
        call = self._on_message.get(message["type"])
        if call is not None and self.live:
            call(message)

    def switch_off(self, collector: str, why: str) -> None:
        """Remove one collector's hooks and record why."""
        if collector in self._off:
            return
        self._off.add(collector)
        try:
            say(f"collector '{collector}' switched off: {why}")
            self.gap("*", collector, f"collector switched off: {why}")
        finally:
            stop = self._stops.get(collector)
            if stop is not None:
                self.guard(collector, stop)()

    def start(self, name: str, collector: Collector) -> None:
        """Start one collector under guard."""
        self._stops[name] = collector.stop
        self.guard(name, collector.start)(self)

    def stop(self) -> None:
        """Stop recording and remove every hook."""
        self.live = False
        for collector, stop in self._stops.items():
            if collector not in self._off:
                self.guard(collector, stop)()

    def group(self, name: str, ranks: list[int], backend: str, role: str) -> Group:
        """Announce a process group and return its entry; a name used again is a new group."""
        members = as_ranges([rank for rank in ranks if rank != NO_PEER])
        count = self._incarnations.get((name, members), 0)
        self._incarnations[name, members] = count + 1
        digest = blake2b(f"{name}\n{members}\n{count}".encode(), digest_size=8).digest()
        group = Group(int.from_bytes(digest, "little") >> 1, ranks)
        self.groups[name] = group
        self.send(
            {"type": "group", "id": group.id, "name": name, "backend": backend, "role": role, "members": members}
            | {"start_ns": clock()}
        )
        return group

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message to the agent, and send what can be sent without waiting."""
        self._backlog.append(_as_json(message).encode())
        self.flush()

    def may_write(self, path: str) -> bool:
        """Say whether the agent may have this file written: below the folder of its runs, without links on the way."""
        folder = os.path.realpath(os.path.dirname(path))
        return bool(self.runs) and folder.startswith(os.path.join(self.runs, "")) and not os.path.islink(path)

    def hand_over(self, ring_fd: int) -> None:
        """Let the agent read another ring of this process, that of the NCCL plugin. Raises OSError."""
        socket.send_fds(self.channel(), [_as_json({"type": "nccl_ring"}).encode()], [ring_fd], socket.MSG_NOSIGNAL)

    def flush(self) -> None:
        """Send queued messages as far as the socket takes them; what it does not take goes with a later call."""
        if not self._sending.acquire(blocking=False):
            return  # another thread, or this one below a garbage collection
        try:
            while self._backlog:
                self.channel().send(self._backlog[0], socket.MSG_NOSIGNAL)
                del self._backlog[0]
        except OSError as error:
            if interrupts.is_of_handler(error):
                raise
            if not isinstance(error, BlockingIOError):
                self.live = False  # the agent is gone
            elif len(self._backlog) > _MAX_NAMES:
                self._lost += len(self._backlog)
                self._backlog.clear()
        finally:
            self._sending.release()

    def bye(self) -> None:
        """Say goodbye, with the number of messages that never got out."""
        self.flush()
        self.send({"type": "bye", "dropped": self._lost + len(self._backlog)})
        with contextlib.suppress(OSError):
            self.channel().shutdown(socket.SHUT_RDWR)  # wakes the listening thread
            self.channel().close()


class Group:
    """A process group with this rank's counts: the ordinals make collectives comparable across ranks."""

    __slots__ = ("id", "p2p_seq", "ranks", "seq")

    def __init__(self, group_id: int, ranks: list[int]) -> None:
        self.id = group_id
        self.ranks = ranks
        self.seq = 0
        self.p2p_seq: dict[tuple[int, int, int], int] = {}


def _collector_of(name: str) -> Collector:
    found: Collector = importlib.import_module(f"{rank_collectors.__name__}.{name}").collector
    return found


class _Session:
    """The recording of this process, from its first process group on."""

    def __init__(
        self, agent_name: str, group: Foreign, rank: int, world_size: int, backend: str, store: Foreign
    ) -> None:
        """`backend` is by devices, as in `cpu:gloo,cuda:nccl`. Neither the group nor its store is kept alive."""
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.local_rank, local_world, self.node = place(rank, world_size)
        self._master = os.environ.get("MASTER_ADDR") or host_of(store)
        alone = rank != 0 or local_world >= world_size
        self._reached_at = None if alone else address_towards(self._master)
        self.pid = os.getpid()
        self._group = weakref.ref(group)
        self.world = world_of(store)
        ring = Ring(_native_hook(backend))
        try:
            channel = agent_socket.connect(agent_name, _HELLO_S)
            socket.send_fds(channel, [_as_json(self._hello()).encode()], [ring.fd])
        finally:
            os.close(ring.fd)  # the mapping and the agent hold it
        agent = _of_json(channel.recv(_PACKET_BYTES).decode())
        channel.setblocking(False)
        self.emit = Emit(ring, channel)
        self.emit.runs = agent.pop("runs", "")
        self._agent_gone = False
        # Where a launcher says which node this is, one rank of each is enough, and the first needs none.
        self._peer_known = rank == 0 or (self.node is not None and (self.node == 0 or self.local_rank != 0))
        if rank == 0 and (kept := self._store()):
            kept.set(_STORE_KEY, _as_json(agent))

    def _hello(self) -> dict[str, Any]:
        # Devices the job may use beside the CPU; the collector `device` reports the one in use.
        devices = [pair.partition(":")[0] for pair in self.backend.split(",")]
        return {
            "type": "hello",
            "rank": self.rank,
            "local_rank": self.local_rank,
            "world": self.world,
            "world_size": self.world_size,
            "node": self.node,
            "pid": self.pid,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "hostname": socket.gethostname(),
            "device": "cpu" if "cpu" in devices else devices[0],
            "torch": str(sys.modules["torch"].__version__),
            "python": sys.version.split()[0],
            "command": " ".join(sys.orig_argv)[:2000].encode(errors="replace").decode(),
            "main_thread": threading.main_thread().ident,
            "listen": self._reached_at,
            "start_ns": clock(),
        }

    def start(self) -> None:
        self.emit.on_tick(self.emit.guard("session", self._tick))
        self.emit.start("interrupts", interrupts.collector)
        # Dynamo compiles every Python frame that runs below a compiled function, unless it is set to leave it alone.
        after_import("torch._dynamo.trace_rules", self.emit.guard("session", lambda rules: rules.add("rankscope")))
        for module in pkgutil.iter_modules(rank_collectors.__path__):
            if module.name in switched_off(os.environ):
                self.emit.gap("*", module.name, LEFT_OFF)
                continue
            # A collector that cannot even be imported costs itself only.
            collector = self.emit.guard(module.name, _collector_of)(module.name)
            if collector is not None:
                self.emit.start(module.name, collector)
        atexit.register(self.emit.guard("session", self.close))
        threading.Thread(target=self.emit.guard("session", self._listen), name="rankscope", daemon=True).start()

    def _listen(self) -> None:
        """Take the agent's messages as they come, also while the training's threads wait."""
        ready = select.poll()
        ready.register(self.emit.channel(), select.POLLIN)
        while not self._agent_gone:
            ready.poll()
            try:
                packet = self.emit.channel().recv(_PACKET_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                packet = b""
            if packet:
                self.emit.receive(_of_json(packet.decode()))
            else:
                self._agent_gone = True

    def _tick(self) -> None:
        self.emit.flush()
        if self._agent_gone:
            if threading.get_ident() != self.emit.training_thread:
                return  # hooks come out where they were put in
            self.emit.live = False
        if not self.emit.live:
            self.emit.stop()
            return
        store = None if self._peer_known else self._store()
        if store and store.check([_STORE_KEY]):
            self._peer_known = True
            peer = _of_json(store.get(_STORE_KEY).decode())
            peer["host"] = peer["host"] or self._master
            self.emit.send({"type": "peer"} | peer)

    def _store(self) -> Foreign:
        """Return the group's store as torch keeps it; None where the group is gone. It ends with the group."""
        _, store = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map.get(self._group(), (None, None))
        return store

    def close(self) -> None:
        """End the recording: remove all hooks, and wait until no thread of torch can call into the ending interpreter.

        A gloo thread whose operation ended, and which our callback delayed, takes Python's lock to release tensors; it
        would abort the process if the interpreter ended meanwhile. So this returns when nothing is in flight and none
        of these threads has moved while the lock was free, after 0.5 s at the latest.
        """
        if os.getpid() != self.pid:
            return
        self.emit.exiting = True
        self.emit.stop()
        deadline = clock() + 500_000_000
        seen: list[bytes] | None = None
        while ((now := _running_operations()) != seen or self.emit.pending()) and clock() < deadline:
            seen = now if all(b") S " in one for one in now) else None
            time.sleep(0.002)
        self.emit.bye()


def _native_hook(backend: str) -> Foreign:
    """Return the hook in C++ where it is built, and where each operation of the backends has a future; else None."""
    if not {pair.partition(":")[2] for pair in backend.split(",")} <= {"gloo", "nccl"}:
        return None
    try:
        return collectives_hook.load()
    except Exception as error:
        say(f"the collectives hook in C++ does not load: {type(error).__name__}: {error}; Python's is used")
        return None


def _running_operations() -> list[bytes]:
    """Return the state of each thread that runs torch's operations on the host, and how often it ran."""
    found = []
    with contextlib.suppress(OSError):  # no descriptor is left to look with
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (task / "comm").read_bytes().endswith(b"runloop\n"):
                    found.append((task / "stat").read_bytes())
                    found[-1] += (task / "schedstat").read_bytes()  # not with every kernel
    return found


_session: _Session | None = None
_failed = False


def on_group(agent_name: str, group: Foreign, args: tuple[Foreign, ...], kwargs: dict[str, Foreign]) -> None:
    """Take note of a new process group; the first one starts the recording by the agent of this name.

    `args` and `kwargs` are those of torch's `_new_process_group_helper(group_size, group_rank, global_ranks_in_group,
    backend, store, group_name, …)`. Never raises: without an agent the job runs as if rankscope were not there.
    """
    global _session, _failed
    if _failed:
        return
    try:
        given = dict(zip(("size", "rank", "ranks", "backend", "store", "name"), args, strict=False)) | kwargs
        size = int(args[0])
        backend_of = sys.modules["torch"].distributed.get_backend_config
        first = _session is None
        if _session is None:
            _session = _Session(agent_name, group, int(args[1]), size, backend_of(group), given["store"])
            os.register_at_fork(after_in_child=_leave_child)
            _session.start()
        if hasattr(group, "group_name"):  # else this rank is no member, and has no number in it
            ranks = list(given["ranks"]) or _numbered(size, group.group_name, first)
            backend = str(given["backend"])
            if backend == "undefined":  # the script leaves it to torch
                backend = backend_of(group)
            _session.emit.group(group.group_name, ranks, backend, str(group.group_desc or ""))
    except Exception as error:
        _failed = True
        say(f"this rank is not recorded: {text_of(error)}")
        if interrupts.is_of_handler(error):
            raise


def _numbered(size: int, name: str, first: bool) -> list[int]:
    """Return the global ranks of a group that was made without a list of them.

    torch makes its default group so, and names it by a number. Others make groups across worlds, as for the weights
    that trainers send to engines: their ranks are unknown here.
    """
    return list(range(size)) if first or name.isdecimal() else [NO_PEER] * size


def _leave_child() -> None:
    """Leave the parent's ring and socket alone in a forked worker."""
    if _session is not None:
        _session.emit.live = False


def step() -> None:
    """Say that a training step ends here. Does nothing where rankscope does not record, and never raises."""
    if _session is not None and _session.emit.live:
        _session.emit.guard("step", _step)(_session.emit)


def _step(emit: Emit) -> None:
    now = clock()
    emit.mark(_STEP_END)
    emit.ring.step(now)
    emit.stepped(now, None)
    emit.tick(now)


class annotate:  # noqa: N801  (reads as a function, like torch's record_function)
    """Names a span: `with rankscope.annotate("loss", microbatch=3, stage=1): …`. No effect where nothing records.

    `annotate("input")` is time spent on fetching a batch, `annotate("checkpoint")` on saving: for loaders and
    checkpoints of the script's own, which no collector sees. Never raises: a span that is not named by a text is left
    out, and so is a `microbatch` or `stage` that is no whole number from 0 to 2147483647; `gaps` says so once.
    """

    __slots__ = ("_microbatch", "_name", "_stage", "_start")

    def __init__(self, name: str, *, microbatch: int | None = None, stage: int | None = None) -> None:
        self._name = name
        self._microbatch = microbatch
        self._stage = stage
        self._start = -1

    def __enter__(self) -> annotate:
        self._start = clock()
        return self

    def __exit__(self, *exc: object) -> None:
        if _session is not None and _session.emit.live:
            _session.emit.guard("annotate", self._end)(_session.emit)

    def _end(self, emit: Emit) -> None:
        if not isinstance(self._name, str):
            emit.gap_once("regions", "annotate", "a span whose name is no text was left out")
        elif self._start >= 0:
            kind = _KINDS_BY_NAME.get(self._name, _USER)
            microbatch, stage = (_index(emit, value) for value in (self._microbatch, self._stage))
            emit.region(kind, emit.name(self._name), self._start, clock(), microbatch, stage)


def _index(emit: Emit, value: Foreign) -> int:
    """Return a microbatch or stage as the ring takes it; unknown if invalid."""
    if value is None:
        return -1
    with contextlib.suppress(Exception):
        if 0 <= (number := operator.index(value)) <= _HIGHEST_INDEX:
            return number
    why = f"a microbatch or stage that is no whole number from 0 to {_HIGHEST_INDEX} was left out"
    emit.gap_once("regions", "annotate", why)
    return -1
