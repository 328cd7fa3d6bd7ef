"""Samples the call stack of the training thread a few times a second.

Frames of torch, of Python's own library and of rankscope are left out: the line that called them stays. A stack is a
path in a tree of all stacks so far, so a sample is the number of a node.

A sample is taken when this thread gets Python's lock: a call in C that holds it is seen at its end.
"""

from __future__ import annotations

import random
import threading
import time
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from rankscope.collectors.in_rank.code_of_job import is_hidden
from rankscope.collectors.in_rank.thread_frames import UNSAFE, current_frames
from rankscope.collectors.rank import Collector

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

PERIOD_S = 0.2  # on average: a fixed one could keep step with the training
_MOST_NODES = 20_000
_MOST_FRAMES = 200

_stopped = threading.Event()

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    global _stopped
    if UNSAFE:
        emit.gap("samples", "samples", f"not sampled: {UNSAFE}")
        return
    _stopped = threading.Event()
    sampler = emit.guard("samples", _sample)
    threading.Thread(target=sampler, args=(emit, _stopped), name="rankscope-samples", daemon=True).start()


def stop() -> None:
    _stopped.set()


def _sample(emit: Emit, stopped: threading.Event) -> None:
    chains = Chains()
    chance = random.Random()  # the module's own numbers are the job's
    while not stopped.wait(chance.uniform(0.5, 1.5) * PERIOD_S):
        if not emit.live:
            return
        frame = current_frames().get(emit.training_thread or 0)
        now_ns = clock()
        node = chains.node(frame)
        del frame  # it would keep the job's tensors
        if chains.new:
            emit.send({"type": "frames", "rows": chains.new})
            chains.new = []
            if chains.is_full:
                emit.gap("frames", "samples", f"more than {_MOST_NODES} chains of calls; further ones are cut")
        emit.ring.sample(node, now_ns)


class Chains:
    """The tree of all chains of calls seen so far, by the place of each call; 0 is the empty chain."""

    def __init__(self) -> None:
        self.new: list[tuple[int, int, str, str, int]] = []  # node, parent, function, file, line: not yet sent
        self._nodes: dict[tuple[int, CodeType, int], int] = {}
        self._shown: dict[CodeType, bool] = {}

    @property
    def is_full(self) -> bool:
        return len(self._nodes) >= _MOST_NODES

    def node(self, frame: FrameType | None) -> int:
        """Return the node of this chain; of its longest known part, once the tree is full."""
        calls: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            shown = self._shown.get(code)
            if shown is None:
                if len(self._shown) >= _MOST_NODES:  # a job that makes code all the time
                    self._shown.clear()
                shown = self._shown[code] = not is_hidden(code.co_filename)
            if shown:
                calls.append((code, frame.f_lineno or 0))
            frame = frame.f_back
        node = 0
        for code, line in calls[: -_MOST_FRAMES - 1 : -1]:
            key = (node, code, line)
            known = self._nodes.get(key)
            if known is None:
                if self.is_full:
                    break
                known = self._nodes[key] = len(self._nodes) + 1
                self.new.append((known, node, getattr(code, "co_qualname", code.co_name), code.co_filename, line))
            node = known
        return node


collector = Collector(tables=("samples", "frames"), start=start, stop=stop)
