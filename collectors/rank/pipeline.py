"""Records forward and backward of every microbatch of `torch.distributed.pipelining`, with its stage.

Its schedules name some of these spans themselves, 1F1B none, and their spans include the wait for the input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.in_rank.pipeline_hooks import Microbatches
from rankscope.collectors.rank import Collector

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_METHODS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}
_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    _undos.append(after_import("torch.distributed.pipelining.stage", emit.guard("pipeline", partial(_install, emit))))
    schedules = "torch.distributed.pipelining.schedules"
    _undos.append(after_import(schedules, emit.guard("pipeline", partial(_report_unwaited, emit))))


def stop() -> None:
    while _undos:
        _undos.pop()()


def _install(emit: Emit, module: ModuleType) -> None:
    microbatches = Microbatches(emit)
    _undos.append(microbatches.close)
    for method, kind in _METHODS.items():
        _undos.append(microbatches.around("pipeline", module._PipelineStageBase, method, kind, _which))


def _which(args: tuple[Any, ...]) -> tuple[int, int]:
    return args[1], args[0].stage_index


def _report_unwaited(emit: Emit, module: ModuleType) -> None:
    if not hasattr(module, "_wait_batch_p2p"):  # torch 2.5
        why = f"torch {sys.modules['torch'].__version__} waits for one of several transfers of a pipeline begun at once"
        emit.gap("collectives", "pipeline", f"{why}: gloo's others have no end, and are not matched")


collector = Collector(tables=("regions",), start=start, stop=stop)
