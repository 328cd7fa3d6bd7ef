"""Tasks on single files, run in this process, in worker processes or on a Dask cluster, with the same results.

A task is a function of a module, with arguments and a result that can be pickled. Its rows lie in files: only paths and
small values travel between processes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import IO, Any, Protocol, TypeVar

from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import told
from rankscope.collectors.free_memory import available_bytes
from rankscope.errors import BadInput

__all__ = ["Elsewhere", "Lost", "begun", "divided", "each", "elsewhere", "local_cores", "scratch_folder", "serve"]

_WORTH_S = 2.0  # of CPU that other processes take over; to start one takes 0.4
_WORTH_LATE_S = 10.0  # of CPU that is left, for one more: it has to get its memory first
_THREADS = 8  # more wait for the interpreter
_OF_WORKER = 500_000_000  # bytes of memory, at most
_TRIES = 2
# A worker has one core; and the memory of one task serves the next one, of Python and of polars: to get it from the
# kernel again takes a tenth of a stretch.
_ENVIRONMENT = {
    "POLARS_MAX_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "_RJEM_MALLOC_CONF": "narenas:1,dirty_decay_ms:-1,muzzy_decay_ms:-1",
}

Result = TypeVar("Result")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of a result: the processes that ran the task were killed."""

    why: str


class Elsewhere(Protocol):
    """Runs tasks as `begun` does."""

    def __call__(
        self, task: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], /
    ) -> AbstractContextManager[Iterator[Result | Lost]]: ...


_runs_all: list[Elsewhere] = []  # not of a context: threads of the UI read runs


@contextmanager
def elsewhere(runs: Elsewhere) -> Iterator[None]:
    """While the context is open, this runs all tasks."""
    _runs_all.append(runs)
    try:
        yield
    finally:
        _runs_all.remove(runs)


def divided(items: Sequence[_Item], count: int) -> list[Sequence[_Item]]:
    """Return the items in so many sequences of those that follow each other, about equally long; none is empty."""
    bounds = [len(items) * number // count for number in range(count + 1)]
    return [items[first:end] for first, end in pairwise(bounds) if first < end]


def local_cores() -> int | None:
    """Return how many tasks can run at a time on this machine; None: they run elsewhere."""
    return None if _runs_all else len(os.sched_getaffinity(0))


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the rows of tasks, removed with this object. Raises `BadInput`."""
    try:
        return tempfile.TemporaryDirectory(prefix="rankscope-")
    except OSError as error:
        raise BadInput(f"no folder for temporary files: set TMPDIR to one that can be written to ({error})") from None


def each(
    task: Callable[..., Result],
    arguments: Sequence[tuple[Any, ...]],
    cpu_s: Sequence[float],
    *,
    memory: int = 0,
    what: str = "",
) -> Iterator[Result | Lost]:
    """Return the task's result for each of these arguments, in their order.

    `cpu_s` is about what each of them takes: where others could take much of it over, worker processes do, one for each
    core that this process may use, else threads; or whatever `elsewhere` named. What a task raises is raised here.
    Tasks hold `memory` bytes at most beside what each worker does. `what` names them for progress; empty: files.
    """
    with begun(task, arguments, cpu_s, memory=memory, what=what) as results:
        yield from results


@contextmanager
def begun(
    task: Callable[..., Result],
    arguments: Sequence[tuple[Any, ...]],
    cpu_s: Sequence[float],
    *,
    memory: int = 0,
    what: str = "",
    sizes: Sequence[int] = (),
    beside: int = 0,
) -> Iterator[Iterator[Result | Lost]]:
    """Begin what `each` does, as far as other processes do it, and yield the results.

    What still runs at the end of the context is given up. This process works too until it asks for results, and takes
    `beside` bytes; 0: it waits for them. Each of these arguments has as many of `what` as `sizes` say, else one.
    """
    with _running(task, arguments, cpu_s, _OF_WORKER + memory, beside) as results:
        yield told(what or text("files"), results, sum(sizes) if sizes else len(arguments), sizes)


def _running(
    task: Callable[..., Result],
    arguments: Sequence[tuple[Any, ...]],
    cpu_s: Sequence[float],
    of_worker: int,
    beside: int,
) -> AbstractContextManager[Iterator[Result | Lost]]:
    if _runs_all:
        return _runs_all[-1](task, arguments)
    if sum(cpu_s) - max(cpu_s, default=0) < _WORTH_S:
        return closing(_in_threads(task, arguments))
    free = available_bytes()
    fit = max(1, (free - beside) // of_worker) if free is not None else len(arguments)
    count = min(len(arguments), len(os.sched_getaffinity(0)), fit)
    return _in_processes(task, arguments, cpu_s, count, count - 1 if beside and count > 1 else count)


def _in_threads(task: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> Generator[Result, None, None]:
    if len(arguments) < 2:  # Ctrl-C ends what runs in this thread at once
        yield from (task(*of) for of in arguments)
        return
    with ThreadPoolExecutor(min(len(arguments), len(os.sched_getaffinity(0)), _THREADS)) as pool:
        yield from pool.map(lambda of: task(*of), arguments)


@contextmanager
def _in_processes(
    task: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], cpu_s: Sequence[float], count: int, at_first: int
) -> Iterator[Iterator[Result | Lost]]:
    """Run the tasks in so many processes; only `at_first` of them begin before results are asked for."""
    workers = [_Worker() for _ in range(at_first)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    waiting = dict(enumerate(cpu_s))

    def run(number: int) -> Result | Lost:
        worker = idle.get()
        try:
            waiting.pop(number)
            return worker.run(task, arguments[number])
        finally:
            idle.put(worker)

    def results(found: Iterator[Result | Lost]) -> Iterator[Result | Lost]:
        if len(workers) < count and sum(list(waiting.values())) >= _WORTH_LATE_S:
            workers.append(_Worker())
            idle.put(workers[-1])
        yield from found

    try:
        with ThreadPoolExecutor(count) as pool:
            try:
                yield results(pool.map(run, range(len(arguments))))
            finally:  # also where the caller stops early, or after Ctrl-C
                for worker in workers:
                    worker.end()
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """A process that runs one task after the other; it is started again when it was killed."""

    def __init__(self) -> None:
        self._ended = False
        self._lock = threading.Lock()
        self._process = self._started()

    def run(self, task: Callable[..., Result], arguments: tuple[Any, ...]) -> Result | Lost:
        """Return the result. Raises what the task raises."""
        for _ in range(_TRIES):
            try:
                pickle.dump((task, arguments), self._into)
                self._into.flush()
                raised, said = pickle.load(self._out)
            except (OSError, EOFError, pickle.UnpicklingError):  # nothing, or half an answer
                self._restart()
                continue
            if raised:
                raise said
            return said  # type: ignore[no-any-return]
        return Lost(text("the process that read it was killed {times} times", times=_TRIES))

    def end(self) -> None:
        """Kill the process; its task is lost."""
        with self._lock:
            self._ended = True
            self._process.kill()

    def _restart(self) -> None:
        with self._lock:
            if not self._ended:
                _close(self._process)
                self._process = self._started()

    def close(self) -> None:
        """Release everything of an ended process."""
        _close(self._process)

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        # multiprocessing would run the main module again, which need not be written for that.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )

    @property
    def _into(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not sent yet
            if pipe is not None:
                pipe.close()
    process.wait()


def serve() -> None:
    """Run the tasks that come on standard input; their results go to standard output. What they print is an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    with suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as out:  # the parent process is gone
        os.dup2(2, 1)
        while True:
            try:
                task, arguments = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = pickle.dumps((False, task(*arguments)))
            except Exception as error:  # it is raised where the task was given
                answer = pickle.dumps((True, error))
            out.write(answer)
            out.flush()
