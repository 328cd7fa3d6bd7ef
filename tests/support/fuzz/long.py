"""Try very many mutants of every reader's files in a process of their own.

    PYTHONPATH=tests python -m support.fuzz.long --mutants N --seed S

Prints how many were read or refused in one line, and how many ended in a traceback, hung, or took too much memory: each
500 mutants, so that a run that is stopped has a result too, and at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from support.fuzz import mutants

_LONGEST_S = 20.0
_MOST_BYTES = 1 << 30
_OF_A_WORKER = 200  # mutants, then a new process
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
        results = context.Queue()
        worker = context.Process(target=_work, args=(range(seed, min(seed + _OF_A_WORKER, end)), results))
        worker.start()
        last = min(seed + _OF_A_WORKER, end)
        while seed < last:
            which, how, said, used = _next(results, worker)
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
        worker.kill()
        worker.join()
    _print_totals(counts, most, begun)
    sys.exit(any(counts[kind] for kind in _KINDS[2:]))


def _print_totals(counts: Counter[str], most_bytes: int, begun: float) -> None:
    said = ", ".join(f"{kind} {counts[kind]}" for kind in _KINDS)
    took = f"{time.monotonic() - begun:.0f} s, the largest process held {most_bytes / 1e6:.0f} MB"
    print(f"tried {sum(counts.values())}: {said}; {took}", flush=True)


_last: dict[str, Any] = {"mutant": (-1, "")}


def _next(results: Any, worker: Any) -> tuple[int, str, str | None, int]:
    """The next report; a mutant that is read for too long, or ends its process, is one too."""
    import queue

    until = time.monotonic() + (_LONGEST_S if _last["mutant"][0] >= 0 else 120)
    while time.monotonic() < until:
        try:
            found = results.get(timeout=0.5)
        except queue.Empty:
            if not worker.is_alive():
                return (*_last["mutant"], "died", 0)
            continue
        _last["mutant"] = found[:2]
        return found
    return (*_last["mutant"], "hang", 0)


if __name__ == "__main__":
    main()
