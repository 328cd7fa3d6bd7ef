"""Records the names that scripts and torch itself give to spans with `record_function`.

torch names DDP's forward and the microbatches of its pipeline schedules this way. Names of spans that another collector
records (optimizer, DataLoader) and FSDP's many internal ones are left out.

Those of FSDP2's groups of parameters, a dozen a layer and step, are not even looked at: its module gets a subclass
whose methods are torch's own.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING

from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import REGION_KINDS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_LEFT_OUT = ("Optimizer.", "enumerate(DataLoader)", "FSDP::")
_NOT_LOOKED_AT = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_MAX_KNOWN = 10_000  # names that a script makes in every step must not grow without bound
_USER = REGION_KINDS.index("user")
_FORWARD = REGION_KINDS.index("forward")
_BACKWARD = REGION_KINDS.index("backward")
# "Forward 3" of single-stage schedules; "PP:1B3", "PP:0F2", "PP:1I3", "PP:1W3": stage, action, microbatch
_SCHEDULE = re.compile(r"(?:(Forward|Backward) (\d+)|PP:(\d+)([A-Z_]+)(\d+))$")
_ACTIONS = {"Forward": _FORWARD, "Backward": _BACKWARD, "F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD, "W": _BACKWARD}
_undos: list[Callable[[], None]] = []

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    owner = sys.modules["torch.autograd.profiler"].record_function
    enter, leave = owner.__dict__["__enter__"], owner.__dict__["__exit__"]
    known: dict[str, tuple[int, int, int, int] | None] = {}
    left_out: set[str] = set()
    is_compiling = sys.modules["torch"].compiler.is_compiling

    def record(span: Foreign) -> None:
        start_ns = span.__dict__.pop("_rankscope_start_ns", None)
        if start_ns is None or not emit.live:
            return
        name = span.name
        if name not in known:
            if len(known) >= _MAX_KNOWN:
                known.clear()
                left_out.clear()
            known[name] = _classify(emit, name)
            if known[name] is None:
                left_out.add(name)
        found = known[name]
        if found is not None:
            kind, name_id, microbatch, stage = found
            emit.region(kind, name_id, start_ns, clock(), microbatch, stage)

    record = emit.guard("annotations", record)

    @wraps(enter)
    def enter_and_note(self: Foreign) -> Foreign:
        if self.name not in left_out and not is_compiling():
            self._rankscope_start_ns = clock()
        return enter(self)

    @wraps(leave)
    def leave_and_record(self: Foreign, *exc: Foreign) -> Foreign:
        if self.name in left_out:
            return leave(self, *exc)
        try:
            return leave(self, *exc)
        finally:
            record(self)

    for attribute, original, replacement in (
        ("__enter__", enter, enter_and_note),
        ("__exit__", leave, leave_and_record),
    ):
        setattr(owner, attribute, replacement)
        _undos.append(partial(setattr, owner, attribute, original))

    class Unseen(owner):  # type: ignore[misc, valid-type]
        """The class without our methods."""

        __enter__, __exit__ = enter, leave

    def spare(module: Foreign) -> None:
        if getattr(module, "record_function", None) is owner:
            module.record_function = Unseen
            _undos.append(partial(setattr, module, "record_function", owner))

    _undos.append(after_import(_NOT_LOOKED_AT, emit.guard("annotations", spare)))


def stop() -> None:
    while _undos:
        _undos.pop()()


def _classify(emit: Emit, name: str) -> tuple[int, int, int, int] | None:
    """Return (kind, name_id, microbatch, stage) for a name, or None for one that is left out."""
    if name.startswith(_LEFT_OUT):
        return None
    if name == "DistributedDataParallel.forward":
        return _FORWARD, emit.name("forward"), -1, -1
    match = _SCHEDULE.match(name)
    if match:
        word, microbatch, stage, action, number = match.groups()
        kind = _ACTIONS.get(word or action, _USER)
        label = {_FORWARD: "forward", _BACKWARD: "backward"}.get(kind, name)
        return kind, emit.name(label), int(microbatch or number), int(stage or -1)
    return _USER, emit.name(name), -1, -1


collector = Collector(tables=("regions",), start=start, stop=stop)
