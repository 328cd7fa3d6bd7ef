"""Records forward and backward of every microbatch of Megatron-Core's pipeline schedules, with its stage.

A job without pipeline stages goes through the same functions, and is left to the other collectors.
"""

from __future__ import annotations

import sys
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

_OF_FORWARD = "_rankscope_microbatch"  # of a stage's output: its (microbatch, stage), for the backward from there
_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    install = emit.guard("megatron", partial(_install, emit))
    _undos.append(after_import("megatron.core.pipeline_parallel.schedules", install))


def stop() -> None:
    while _undos:
        _undos.pop()()


def _install(emit: Emit, schedules: ModuleType) -> None:
    parallel = sys.modules["megatron.core.parallel_state"]
    microbatches = Microbatches(emit)
    _undos.append(microbatches.close)
    of_backward: list[tuple[int, int]] = []

    def before_forward(_: object) -> None:
        if parallel.get_pipeline_model_parallel_world_size() > 1:
            microbatches.begin("forward")

    def forward(start_ns: int, end_ns: int, _: object, kwargs: dict[str, Foreign], result: Foreign) -> None:
        stages = parallel.get_pipeline_model_parallel_world_size()
        if stages < 2:
            return
        chunk = kwargs.get("vp_stage")
        if chunk is None:  # no chunks, or Megatron-Core before 0.13
            chunk = parallel.get_virtual_pipeline_model_parallel_rank() or 0
        microbatch, stage = kwargs["current_microbatch"], chunk * stages + parallel.get_pipeline_model_parallel_rank()
        microbatches.end("forward", start_ns, end_ns, microbatch, stage)
        if result is not None:
            setattr(_first(result[0]), _OF_FORWARD, (microbatch, stage))

    def before_backward(args: tuple[Any, ...]) -> None:
        of_backward.append(getattr(_first(args[1]), _OF_FORWARD, (-1, -1)))
        if of_backward[-1][1] >= 0:
            microbatches.begin("backward")

    def backward(start_ns: int, end_ns: int, *_: object) -> None:
        microbatch, stage = of_backward.pop()
        if stage >= 0:
            microbatches.end("backward", start_ns, end_ns, microbatch, stage)

    _undos.append(emit.around("megatron", schedules, "forward_step", forward, before_forward))
    _undos.append(emit.around("megatron", schedules, "backward_step", backward, before_backward))


def _first(output: Foreign) -> Foreign:
    return output[0] if isinstance(output, list) else output


def _lacks() -> str:
    return "" if find_spec("megatron") else "Megatron-Core is not installed"


collector = Collector(tables=("regions",), start=start, stop=stop, lacks=_lacks)
