"""Records every optimizer step, whose end is the end of the training step to the analysis.

torch calls these hooks for every optimizer of `torch.optim` and its subclasses. An optimizer that is none is not seen:
such a script can say `rankscope.step()`. An optimizer that is given a closure (Lightning's always are) runs forward and
backward in its step: it begins where the closure has ended.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import DEVICE_MARKS, REGION_KINDS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_OPTIMIZER = REGION_KINDS.index("optimizer")
_MARKS = DEVICE_MARKS.index("optimizer_start"), DEVICE_MARKS.index("optimizer_end")
_removes: list[Callable[[], None]] = []

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    hooks = sys.modules["torch.optim.optimizer"]
    # By id, which another may have later; a weak dictionary takes 2 µs.
    names: dict[int, tuple[ref[Any], int]] = {}
    started: dict[int, int] = {}
    count = itertools.count()

    def begin(optimizer: Foreign) -> None:
        if emit.live:
            started[id(optimizer)] = clock()
            emit.mark(_MARKS[0])

    begin_safely = emit.guard("optimizer", begin)

    def before(optimizer: Foreign, args: tuple[Foreign, ...], kwargs: dict[str, Foreign]) -> Foreign:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not emit.live or not callable(closure):
            begin(optimizer)
            return None

        @functools.wraps(closure)
        def ending(*given: Foreign, **named: Foreign) -> Foreign:
            try:
                return closure(*given, **named)
            finally:
                begin_safely(optimizer)

        if "closure" in kwargs:
            return args, kwargs | {"closure": ending}
        return (args[0], ending, *args[2:]), kwargs

    def after(optimizer: Foreign, *_: Foreign) -> None:
        start_ns = started.pop(id(optimizer), None)
        if start_ns is None or not emit.live:
            return
        known = names.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            known = ref(optimizer), emit.name(f"{type(optimizer).__name__}#{next(count)}")
            names[id(optimizer)] = known
            emit.learn_device(next((weight for group in optimizer.param_groups for weight in group["params"]), None))
        name_id = known[1]
        end_ns = clock()
        emit.mark(_MARKS[1])
        emit.region(_OPTIMIZER, name_id, start_ns, end_ns)
        emit.stepped(end_ns, name_id)
        emit.tick(end_ns)

    _removes.append(hooks.register_optimizer_step_pre_hook(emit.guard("optimizer", before)).remove)
    _removes.append(hooks.register_optimizer_step_post_hook(emit.guard("optimizer", after)).remove)


def stop() -> None:
    while _removes:
        _removes.pop()()


collector = Collector(tables=("regions", "memory"), start=start, stop=stop)
