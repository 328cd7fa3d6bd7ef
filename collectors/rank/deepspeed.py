"""Records forward and backward of every microbatch of DeepSpeed's pipeline engine, with its stage.

Its instructions do not say which microbatch they are for: they come in order, and are counted in each batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.in_rank.pipeline_hooks import Microbatches
from rankscope.collectors.rank import Collector
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_INSTRUCTIONS = {"forward": "ForwardPass", "backward": "BackwardPass"}
_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    install = emit.guard("deepspeed", partial(_install, emit))
    _undos.append(after_import("deepspeed.runtime.pipe.engine", install))


def stop() -> None:
    while _undos:
        _undos.pop()()


def _install(emit: Emit, module: ModuleType) -> None:
    engine = module.PipelineEngine
    microbatches = Microbatches(emit)
    _undos.append(microbatches.close)
    count: Counter[str] = Counter()

    def which(kind: str, args: tuple[Any, ...]) -> tuple[int, int]:
        count[kind] += 1
        return count[kind] - 1, args[0].stage_id

    _undos.append(emit.around("deepspeed", engine, "_exec_schedule", lambda *_: None, lambda _: count.clear()))
    for kind, instruction in _INSTRUCTIONS.items():
        method = f"_exec_{kind}_pass"
        undo = microbatches.around("deepspeed", engine, method, kind, partial(which, kind))
        key = getattr(module.schedule, instruction)
        engine._INSTRUCTION_MAP[key] = engine.__dict__[method]  # the engine calls this entry
        _undos.append(partial(_restore, engine, key, method, undo))


def _restore(engine: Foreign, instruction: Foreign, method: str, undo: Callable[[], None]) -> None:
    undo()
    engine._INSTRUCTION_MAP[instruction] = engine.__dict__[method]


def _lacks() -> str:
    return "" if find_spec("deepspeed") else "DeepSpeed is not installed"


collector = Collector(tables=("regions",), start=start, stop=stop, lacks=_lacks)
