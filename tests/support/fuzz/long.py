"""Try very many mutants of every reader's files in a process of their own.

    PYTHONPATH=tests python -m support.fuzz.long --mutants N --seed S

Prints how many were read or refused in one line, and how many ended in a traceback, hung, or took too much memory: each
500 mutants, so that a run that is stopped has a result too, and at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from support.fuzz import mutants

_LONGEST_S = 20.0  # of the processor's time
_LONGEST_WAIT_S = 200.0  # where it does not run
_MOST_BYTES = 1 << 30
_OF_A_WORKER = 1000  # mutants, then a new process
_SAID_EACH = 500
_KINDS = ("read", "refused", "traceback", "hang", "memory", "died", "several lines")


def tried(folder: Path) -> str:
    """`read` or `refused`; what was raised otherwise."""
    from rankscope.analysis.diagnosis.diagnose import diagnose
    from rankscope.analysis.runs.trace import BadInput, Trace

    try:
        diagnose(Trace.open(folder))
    except BadInput as why:
        return "refused" if "\n" not in str(why) else "several lines"
    except MemoryError:
        return "memory"
    except BaseException:
        return "traceback\n" + traceback.format_exc(limit=-4)
    return "read"


def _work(seeds: range, results: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="rankscope-fuzz-") as made:
        names = sorted(mutants.FORMATS)
        for name in names:
            (Path(made) / name).mkdir()
            mutants.FORMATS[name](Path(made) / name)
        for seed in seeds:
            name = names[seed % len(names)]
            folder = Path(made) / "mutant"
            shutil.copytree(Path(made) / name, folder)
            how = mutants.mutate(folder, seed)
            results.put((seed, f"{name}, {how}", None, 0))
            said = tried(folder)
            results.put((seed, f"{name}, {how}", said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
            shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    counts: Counter[str] = Counter()
    most, begun, seed, end = 0, time.monotonic(), asked.seed, asked.seed + asked.mutants
    while seed < end and time.monotonic() - begun < 60 * asked.minutes:
        last = min(seed + _OF_A_WORKER, end)
        reports = _Reports(context, range(seed, last))
        while seed < last:
            which, how, said, used = reports.next()
            if said is None:
                continue
            seed = which + 1
            most = max(most, used)
            kind = said.split("\n")[0]
            counts["memory" if used > _MOST_BYTES else kind] += 1
            if sum(counts.values()) % _SAID_EACH == 0:
                _print_totals(counts, most, begun)
            if kind not in ("read", "refused") or used > _MOST_BYTES:
                print(f"mutant {which} ({how}): {said}", flush=True)
            if kind in ("hang", "died") or used > _MOST_BYTES:
                break
        reports.end()
    _print_totals(counts, most, begun)
    sys.exit(any(counts[kind] for kind in _KINDS[2:]))


def _print_totals(counts: Counter[str], most_bytes: int, begun: float) -> None:
    said = ", ".join(f"{kind} {counts[kind]}" for kind in _KINDS)
    took = f"{time.monotonic() - begun:.0f} s, the largest process held {most_bytes / 1e6:.0f} MB"
    print(f"tried {sum(counts.values())}: {said}; {took}", flush=True)


class _Reports:
    """What a worker reports; a mutant that is read for too long, or ends its process, is reported too."""

    def __init__(self, context: Any, seeds: range) -> None:
        self._queue = context.Queue()
        self.worker = context.Process(target=_work, args=(seeds, self._queue))
        self.worker.start()
        self._mutant = seeds.start, ""

    def next(self) -> tuple[int, str, str | None, int]:
        until, used = time.monotonic() + _LONGEST_WAIT_S, self._used_s()
        while time.monotonic() < until and self._used_s() - used < _LONGEST_S:
            try:
                found = self._queue.get(timeout=0.5)
            except queue.Empty:
                if not self.worker.is_alive():
                    return (*self._mutant, "died", 0)
                continue
            self._mutant = found[:2]
            return found
        return (*self._mutant, "hang", 0)

    def end(self) -> None:
        self.worker.kill()
        self.worker.join()

    def _used_s(self) -> float:
        try:
            times = psutil.Process(self.worker.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system


if __name__ == "__main__":
    main()
