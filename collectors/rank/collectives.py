"""Records every collective and point-to-point operation of torch.distributed, at the dispatcher.

All ways lead through the `c10d::` operators: Python calls, DDP's reducer in C++, FSDP2, functional collectives and
DTensor, pipeline schedules, compiled graphs. A kernel at the key BackendSelect sees them, times them and passes them on
with the interpreter's lock released. (Overriding the CPU key instead would keep the lock and deadlock.)

DDP broadcasts a model's buffers before each forward by a function in C++ that waits for its operations itself. That
call is timed as a wait, for tensors on the host.

The end comes from the work's future. Operations without one (`send`, `recv`, …) end when a thread waits for them. On an
accelerator neither says when the device is done, so the end stays empty there.

Where `rankscope doctor --build` has built the hook in C++ (`collectors/native`), its kernels take the place of
those of the collectives, of `wait_tensor` and of `Work.wait`. Point-to-point operations have no future and stay here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import ALL_TO_ALL_OPS, DTYPES, NO_PEER, OPS, P2P_OPS, REGION_KINDS, RecordType
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit, Group

_UNKNOWN = OPS.index("unknown")
_CODES = {op: code for code, op in enumerate(OPS)}
_COLLECTIVE, _DONE = RecordType.COLLECTIVE, RecordType.DONE
_WAIT = REGION_KINDS.index("wait")
_IS_ASYNC_UNKNOWN = 2
# How torch's C++ calls what Python calls otherwise.
_SCALAR_TYPES = {
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
    "float8_e4m3fnuz": "Float8_e4m3fnuz",
    "float8_e5m2fnuz": "Float8_e5m2fnuz",
}
# Works that are not waited for must not pile up, nor keep much memory.
_MAX_AWAITED = 256
_MAX_AWAITED_BYTES = 64 << 20
_library: Any = None
_functional_library: Any = None
_recorder: _Recorder | None = None
_undos: list[Callable[[], None]] = []
_active = False

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    """Put a kernel in front of every `c10d::` operator, and time `Work.wait`, `wait_tensor` and what waits in C++."""
    global _recorder, _active
    torch = sys.modules["torch"]
    native = emit.ring.native
    if _recorder is None:
        _recorder = _Recorder(emit, torch)
        if native is not None:
            _start_native(emit, _recorder, native)
        _put_kernels(emit, _recorder, torch)
    elif _active or _recorder.emit is not emit:
        raise RuntimeError("started twice")
    elif native is not None:
        native.resume()
    _active = True
    _undos.append(_time_waits(emit, _recorder, torch, native))
    distributed = sys.modules["torch.distributed"]
    if hasattr(distributed, "_broadcast_coalesced"):
        broadcast = _recorder.broadcast_coalesced
        _undos.append(emit.around("collectives", distributed, "_broadcast_coalesced", broadcast))


def _put_kernels(emit: Emit, recorder: _Recorder, torch: Foreign) -> None:
    """Put them where they stay: taken out, one could be missing under a thread that is in it."""
    global _library, _functional_library
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    native = emit.ring.native
    _library = torch.library.Library("c10d", "IMPL")
    unknown = []
    for name, overload in _operators(torch):
        code = _CODES.get(name.strip("_"), _UNKNOWN)
        if code == _UNKNOWN:
            unknown.append(name)
        if native is not None and OPS[code] not in P2P_OPS:
            shape = recorder.shape_of(overload, code)
            at = (shape.group_at, -1 if shape.async_at is None else shape.async_at, shape.async_default)
            native.add(name, code, OPS[code] in ALL_TO_ALL_OPS, shape.returns_work, *at, shape.tensors_at)
            continue
        _library.impl(overload, _kernel(emit, recorder, overload, code, after), "BackendSelect", with_keyset=True)
    if unknown:
        why = f"torch {torch.__version__} has operations that rankscope does not know and records as 'unknown'"
        emit.gap("collectives", "collectives", f"{why}: {', '.join(unknown)}")
    if recorder.lacks_async:
        why = f"torch {torch.__version__} does not say of most operations whether they are async: is_async is null"
        emit.gap("collectives", "collectives", why)

    _functional_library = torch.library.Library("_c10d_functional", "IMPL")
    for name in ("wait_tensor", "wait_tensors"):  # the second from torch 2.15 on
        if hasattr(torch.ops._c10d_functional, name):
            if native is not None:
                native.add_wait_tensor(name)
                continue
            overload = getattr(torch.ops._c10d_functional, name).default
            kernel = _wait_kernel(emit, recorder, overload, after)
            _functional_library.impl(overload, kernel, "BackendSelect", with_keyset=True)


def _time_waits(emit: Emit, recorder: _Recorder, torch: Foreign, native: Foreign) -> Callable[[], None]:
    """Time `Work.wait`; return what undoes it."""
    work_class = torch._C._distributed_c10d.Work
    if native is None:
        return emit.around("collectives", work_class, "wait", recorder.waited)
    original = work_class.__dict__["wait"]
    wrapper = native.Wait(original, recorder.wait_name)
    work_class.wait = wrapper
    return partial(_put_back, work_class, wrapper, original)


def stop() -> None:
    """Make the kernels pass calls on and nothing more."""
    global _active
    _active = False
    if _recorder is not None and _recorder.emit.ring.native is not None:
        _recorder.emit.ring.native.stop()
    while _undos:
        _undos.pop()()


def _put_back(owner: Foreign, wrapper: Foreign, original: Foreign) -> None:
    """Undo `owner.wait = wrapper`, unless other code has wrapped it since: then it only passes calls on."""
    if owner.__dict__["wait"] is wrapper:
        owner.wait = original


def _operators(torch: Foreign) -> Iterator[tuple[str, Foreign]]:
    """Name and operator of all that a process group does; torch writes them with underscores that vary."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("c10d::") and "." not in name:
            overload = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            if any(argument.name == "process_group" for argument in overload._schema.arguments):
                yield name.removeprefix("c10d::"), overload


def _kernel(emit: Emit, recorder: _Recorder, overload: Foreign, code: int, after: Foreign) -> Callable[..., Foreign]:
    redispatch = overload._handle.redispatch_boxed
    record = emit.guard("collectives", recorder.recorder_of(overload, code))
    async_at = recorder.shape_of(overload, code).async_at
    async_at = -1 if async_at is None else async_at

    def kernel(keyset: Foreign, *args: Foreign) -> Foreign:
        if not (_active and emit.live):
            return redispatch(keyset & after, *args)
        start_ns = clock()
        waits = emit.waits  # what is not async may run in the compute stream itself
        waited = waits if waits and len(args) > async_at >= 0 and not args[async_at] and waits[0]() else None
        result = redispatch(keyset & after, *args)
        issued_ns = clock()
        if waited:
            waited[1]()
        record(start_ns, issued_ns, args, result)
        return result

    return kernel


def _wait_kernel(emit: Emit, recorder: _Recorder, overload: Foreign, after: Foreign) -> Callable[..., Foreign]:
    redispatch = overload._handle.redispatch_boxed
    record = emit.guard("collectives", recorder.waited_for_output)

    def kernel(keyset: Foreign, *args: Foreign) -> Foreign:
        if not (_active and emit.live):
            return redispatch(keyset & after, *args)
        start_ns = clock()
        waits = emit.waits
        waited = waits if waits and waits[0]() else None
        result = redispatch(keyset & after, *args)
        end_ns = clock()
        if waited:
            waited[1]()
        record(start_ns, end_ns, args[0])
        return result

    return kernel


def _start_native(emit: Emit, recorder: _Recorder, native: Foreign) -> None:
    """Give the hook in C++ what it needs; rare cases call Python."""

    def on_device(index: int) -> None:
        if emit.device is None and index >= 0:
            emit.device = index
        recorder.report_device_gap()

    def group_of(name: str) -> int:
        known = emit.groups.get(name)
        if known is None:  # made by a way that torch's helper does not see
            group = sys.modules["torch"]._C._distributed_c10d._resolve_process_group(name)
            known = emit.group(name, recorder.group_ranks(group), group.name(), str(group.group_desc or ""))
        return known.id

    def tick(now_ns: int) -> None:
        emit.tick(now_ns)
        if not emit.live:  # the agent is gone
            native.stop()

    native.start(
        *(emit.ring.native_ring, emit.guard("collectives", group_of), emit.guard("collectives", on_device)),
        emit.guard("collectives", tick),
        *(partial(emit.switch_off, "collectives"), recorder.unbox_work),
        *(emit.guard("collectives", recorder.await_wait), emit.guard("collectives", recorder.ended_with)),
        *(recorder.awaited, recorder.awaited_outputs),
        {_SCALAR_TYPES.get(name, name): code for code, name in enumerate(DTYPES)},
        *(_COLLECTIVE, _DONE, RecordType.REGION, _WAIT, recorder.wait_tensor_name, emit.training_thread),
    )
    emit.on_training_thread = native.train_on
    emit.on_waits = native.on_waits
    emit.pending = native.pending


class _Shape(NamedTuple):
    """The positions of an operator's arguments that are recorded."""

    tensors_at: tuple[int, ...]
    group_at: int
    async_at: int | None
    async_default: int
    peer_at: int | None
    tag_at: int | None
    returns_work: bool


class _Recorder:
    """Turns one call of an operator into one COLLECTIVE record, and its completion into a DONE record."""

    def __init__(self, emit: Emit, torch: Foreign) -> None:
        self.emit = emit
        self.tensor = torch.Tensor
        self.unbox_group = torch._C._distributed_c10d.ProcessGroup.unbox
        self.unbox_work = torch._C._distributed_c10d.Work.unbox
        self.group_ranks = sys.modules["torch.distributed.distributed_c10d"].get_process_group_ranks
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}
        self.without_future: set[int] = set()
        self.lacks_async = False  # a collective's operator does not say whether it is asynchronous
        # Works without a future, and their record's number, bytes and output. Kept alive until waited for, since only
        # so is the object that `wait` gets this one. `wait_tensor` gets the output instead.
        self.awaited: dict[Any, tuple[int, int, int]] = {}
        self.awaited_outputs: dict[int, Any] = {}
        self.wait_name, self.wait_tensor_name = emit.name("Work.wait"), emit.name("wait_tensor")
        self.broadcast_name = emit.name("broadcast_coalesced")
        self.has_device_gap = False

    def shape_of(self, overload: Foreign, code: int) -> _Shape:
        """Return the places of an operator's arguments, looked up once."""
        arguments, returns = overload._schema.arguments, overload._schema.returns
        names = [argument.name for argument in arguments]
        # Spelled asyncOp or async_op, by torch's age.
        async_at = next((i for i, name in enumerate(names) if name.lower().replace("_", "") == "asyncop"), None)
        shape = _Shape(
            tensors_at=tuple(i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)),
            group_at=names.index("process_group"),
            async_at=async_at,
            async_default=_IS_ASYNC_UNKNOWN if async_at is None else int(bool(arguments[async_at].default_value)),
            peer_at=next((i for i, name in enumerate(names) if name in ("dst", "src")), None),
            tag_at=names.index("tag") if "tag" in names else None,
            returns_work=bool(returns) and str(returns[-1].type).endswith(".Work"),
        )
        self.lacks_async |= shape.returns_work and OPS[code] not in P2P_OPS and async_at is None
        return shape

    def recorder_of(self, overload: Foreign, code: int) -> Callable[..., None]:
        """Return the function that records one call of this operator."""
        tensors, group_at, async_at, async_default, peer_at, tag_at, returns_work = self.shape_of(overload, code)
        op = OPS[code]
        is_p2p, is_send, is_to_all = op in P2P_OPS, op == "send", op in ALL_TO_ALL_OPS

        def record(start_ns: int, issued_ns: int, args: tuple[Foreign, ...], result: Foreign) -> None:
            group = self.group_of(args[group_at])
            size, first = 0, None
            for i in tensors:
                if i < len(args) and args[i] is not None:
                    size = max(size, self.bytes_of(args[i]))
                    first = self.first_tensor(args[i]) if first is None else first
            dtype, on_host = (0, True) if first is None else (self.dtypes.get(first.dtype, 0), first.is_cpu)
            tag = 0
            if is_p2p:
                tag = 0 if tag_at is None else args[tag_at]
                at = NO_PEER if peer_at is None else args[peer_at]
                seq = _next_p2p(group, at, tag, is_send)
                peer = NO_PEER if at == NO_PEER else group.ranks[at]
            else:
                seq = group.seq
                group.seq = seq + 1
                peer = NO_PEER
            where = (peer + 1) << 32 | (tag & 0xFFFF) << 16
            if is_to_all:  # its output comes first, and may be shorter or longer than that of other ranks
                where = self.bytes_of(args[0]) << 16
            # Trailing arguments that have their default value are left out.
            is_async = int(bool(args[async_at])) if async_at is not None and async_at < len(args) else async_default
            thread_is_main = get_ident() == self.emit.training_thread
            number = self.emit.ring.write(
                _COLLECTIVE,
                code,
                dtype | is_async << 8,
                seq,
                start_ns,
                issued_ns,
                group.id,
                size,
                where | thread_is_main,
            )
            if not returns_work:
                self.emit.ring.write(_DONE, 0, 0, 0, issued_ns, number, 0, 0, 0)
            elif on_host:
                work = self.unbox_work(result[-1] if isinstance(result, (tuple, list)) else result)
                if work is not None:  # else part of a coalesced operation
                    self.watch(work, code, number, size, args[0])
            else:
                self.on_device(first)
            self.emit.tick(issued_ns)

        return record

    def on_device(self, tensor: Foreign) -> None:
        """Note what is known of an operation on a device."""
        self.emit.learn_device(tensor)
        self.report_device_gap()

    def report_device_gap(self) -> None:
        """Say once that ends on a device are not seen."""
        if not self.has_device_gap:
            self.has_device_gap = True
            self.emit.gap("collectives", "collectives", "when collectives end on the device is not seen")

    def group_of(self, boxed: Foreign) -> Group:
        group = self.unbox_group(boxed)
        known = self.emit.groups.get(group.group_name)
        if known is None:  # made by a way that torch's helper does not see
            known = self.emit.group(
                group.group_name, self.group_ranks(group), group.name(), str(group.group_desc or "")
            )
        return known

    def bytes_of(self, value: Foreign) -> int:
        """Return the bytes of a tensor, of a list of them (of lists), or of nothing; of a sparse one, of its parts."""
        if isinstance(value, self.tensor):
            if value.is_sparse:
                return int(value._indices().nbytes + value._values().nbytes)
            return int(value.nbytes)
        return sum(map(self.bytes_of, value)) if value else 0

    def first_tensor(self, value: Foreign) -> Foreign:
        """Return the first tensor in a tensor or list (of lists), None if there is none."""
        while isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, self.tensor) else None

    def watch(self, work: Foreign, code: int, number: int, size: int, output: Foreign) -> None:
        """Have a DONE record written when the work is complete."""
        if code not in self.without_future:
            try:
                future = work.get_future()
            except RuntimeError:  # "getFuture not implemented", for this operation on this backend
                self.without_future.add(code)
            else:
                emit = self.emit

                def done(_: Foreign) -> None:
                    emit.ring.write(_DONE, 0, 0, 0, clock(), number, 0, 0, 0)
                    emit.in_flight.discard(number)

                emit.in_flight.add(number)
                future.add_done_callback(done)
                return
        first = self.first_tensor(output)
        self.await_wait(work, number, size, 0 if first is None or first.is_sparse else first.data_ptr())

    def await_wait(self, work: Foreign, number: int, size: int, output_at: int) -> None:
        """Keep a work without a future until a thread waits for it or for its output."""
        kept = sum(bytes_of for _, bytes_of, _ in self.awaited.values())
        while self.awaited and (len(self.awaited) >= _MAX_AWAITED or kept + size > _MAX_AWAITED_BYTES):
            oldest = next(iter(self.awaited))
            kept -= self.awaited[oldest][1]
            self.forget(oldest)
        self.awaited[work] = (number, size, output_at)
        self.awaited_outputs[output_at] = work

    def forget(self, work: Foreign) -> int | None:
        """Let go of a work; return its record's number, None if it is not awaited."""
        number, _, at = self.awaited.pop(work, (None, 0, 0))
        if self.awaited_outputs.get(at) is work:
            del self.awaited_outputs[at]
        return number

    def waited(self, start_ns: int, end_ns: int, args: tuple[Any, ...], *_: object) -> None:
        """Note that a thread waited for a work."""
        self.emit.region(_WAIT, self.wait_name, start_ns, end_ns)
        self.ended_by_wait(args[0], end_ns)

    def broadcast_coalesced(
        self, start_ns: int, end_ns: int, args: tuple[Any, ...], kwargs: dict[str, Any], *_: object
    ) -> None:
        """Note that a thread was in torch's function that broadcasts tensors and waits for that in C++.

        Of tensors on a device it only enqueues the broadcasts, and waits for none.
        """
        tensors = args[1] if len(args) > 1 else kwargs["tensors"]
        if tensors and tensors[0].is_cpu:
            self.emit.region(_WAIT, self.broadcast_name, start_ns, end_ns)

    def ended_by_wait(self, work: Foreign, end_ns: int) -> None:
        """Write the end of an operation that has no future, and that a thread has waited for."""
        number = self.forget(work)
        if number is not None:
            self.emit.ring.write(_DONE, 0, 0, 0, end_ns, number, 0, 0, 0)

    def waited_for_output(self, start_ns: int, end_ns: int, output: Foreign) -> None:
        """Note that a thread waited for the works that make a tensor or a list of them."""
        self.emit.region(_WAIT, self.wait_tensor_name, start_ns, end_ns)
        for tensor in output if isinstance(output, list) else (output,):
            if self.awaited_outputs and tensor.is_cpu and not tensor.is_sparse:
                self.ended_with(tensor.data_ptr(), end_ns)

    def ended_with(self, output_at: int, end_ns: int) -> None:
        """Write the end of the operation whose output lies there, and that a thread has waited for."""
        work = self.awaited_outputs.get(output_at)
        if work is not None:
            self.ended_by_wait(work, end_ns)


def _next_p2p(group: Group, peer: int, tag: int, is_send: bool) -> int:
    """Return the ordinal among this rank's operations with that peer, direction and tag (peer -1: any source)."""
    key = (peer, tag, is_send)
    seq = group.p2p_seq.get(key, 0)
    group.p2p_seq[key] = seq + 1
    return seq


collector = Collector(tables=("collectives", "groups", "regions"), start=start, stop=stop)
