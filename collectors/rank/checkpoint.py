"""Records the calls that save a checkpoint, for as long as they hold their caller.

These are `torch.save`, `torch.distributed.checkpoint.save` and `async_save`, safetensors' `save_file`, and
Megatron-Core's `dist_checkpointing.save`. What an asynchronous save then does in a thread of its own is not on the main
thread and costs no step. Calls shorter than `MIN_NS` are not recorded: a sharded checkpoint calls `torch.save` for each
tensor. A script that imported such a function by its name before its first process group calls the original, which is
not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

MIN_NS = 1_000_000
_MEGATRON = "megatron.core.dist_checkpointing"
_CHECKPOINT = REGION_KINDS.index("checkpoint")
# The module that users take the function from, the one that defines it, the function, and how it is called in reports.
_SAVERS = (
    ("torch", "torch.serialization", "save", "torch.save"),
    ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver", "save", "dcp.save"),
    ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver", "async_save", "dcp.async_save"),
    ("safetensors.torch", "safetensors.torch", "save_file", "safetensors.save_file"),
    (_MEGATRON, f"{_MEGATRON}.serialization", "save", "dist_checkpointing.save"),
)
_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    for shown_in, defined_in, function, name in _SAVERS:
        install = partial(_install, emit, defined_in, function, name)
        _undos.append(after_import(shown_in, emit.guard("checkpoint", install)))


def stop() -> None:
    while _undos:
        _undos.pop()()


def _install(emit: Emit, defined_in: str, function: str, name: str, shown_in: ModuleType) -> None:
    owner = sys.modules[defined_in]
    original = owner.__dict__[function]

    def record(start_ns: int, end_ns: int, *_: object) -> None:
        if end_ns - start_ns >= MIN_NS:
            emit.region(_CHECKPOINT, emit.name(name), start_ns, end_ns)

    _undos.append(emit.around("checkpoint", owner, function, record))
    # One wrapper under both names: pickle looks a function up where it says that it was defined.
    if shown_in is not owner and shown_in.__dict__.get(function) is original:
        wrapper = owner.__dict__[function]
        setattr(shown_in, function, wrapper)
        _undos.append(partial(_restore, shown_in, function, wrapper, original))


def _restore(module: ModuleType, function: str, wrapper: object, original: object) -> None:
    if module.__dict__.get(function) is wrapper:
        setattr(module, function, original)


collector = Collector(tables=("regions",), start=start, stop=stop)
