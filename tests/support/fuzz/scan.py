"""Feeds damaged traces to the C scanner under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/support/fuzz/scan.py [TRACE.json.gz …] [--seconds 600 | --inputs 20000] [--seed 1]

Needs gcc on Linux. The scanner is built into a temporary folder; a process of its own feeds it pieces of the traces
(without any: of a few events written here), each with some bytes removed, replaced or put in. An access outside of the
data, undefined behaviour or a crash ends it with what the sanitizer says; else it prints how many inputs there were.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "analysis" / "readers" / "_scan.c"
FLAGS = ("-shared", "-fPIC", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CATEGORIES = (b"kernel", b"cuda_runtime", b"gpu_memcpy"), (b"cpu_op", b"user_annotation"), (b"aten::mm", b"k")
ROW_BYTES, META_BYTES = 60, 64
PIECES = [bytes([n]) for n in b'"\\{}[],:0123456789.eE-X \n\x00\xff']
PIECES += [
    b'"Collective name"',
    b'"stream": ',
    b'"args": {',
    b'}, {"ph": "X", ',
    b'"correlation":',
    b'"bytes": 65536',
    b"9" * 20,
    b'"Input Dims": [',
    b'"cat": "cpu_op"',
]
EVENTS = [
    {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1712195495519689.123, "dur": 0.002},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": -1, "tid": "t", "ts": 4203669604595.407, "dur": 12},
    {"ph": "f", "id": 1, "pid": 1, "tid": -3, "ts": 1e15, "cat": "ac2g", "name": "ac2g", "bp": "e"},
]
ARGUMENTS = [
    {"device": 0, "stream": 7, "correlation": 9, "grid": [1, 2, {"x": [3]}], "queued": "a{b"},
    {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float", "Process Group Ranks": "[0, 1]", "Seq": 3},
    {"device": 0, "stream": 7, "bytes": 65536, "memory bandwidth (GB/s)": 7.827493261455525},
    {"External id": 1, "Input Dims": [[64, 32], [32, 8], []], "Ev Idx": 3},
    {"External id": 1, "Input Dims": [[1, "a]"], []], "Concrete Inputs": ["", "[1, 2]", "\\n"]},
]


def address_sanitizer() -> str | None:
    """The library to load before all others; None where gcc has none."""
    try:
        asked = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = asked.stdout.strip()
    return found if sys.platform == "linux" and Path(found).is_absolute() else None


def run(traces: list[Path], *, seconds: float, inputs: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Build the scanner and fuzz it in another process."""
    with tempfile.TemporaryDirectory() as folder:
        include = f"-I{sysconfig.get_paths()['include']}"
        subprocess.run(["gcc", *FLAGS, include, str(SOURCE), "-o", f"{folder}/_scan.so"], check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(address_sanitizer()),
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": folder,
        }
        limits = [f"--seconds={seconds}", f"--inputs={inputs}", f"--seed={seed}"]
        command = [sys.executable, __file__, "--inside", *limits, *map(str, traces)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)


def seeds(traces: list[Path]) -> list[bytes]:
    """The events of each trace, from the first on."""
    own = [{**event, "args": arguments} for event in EVENTS for arguments in ARGUMENTS]
    texts = [json.dumps(own, indent=indent)[1:].encode() for indent in (None, 1)]
    for trace in traces:
        content = trace.read_bytes()
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        at = text.find(b'"traceEvents"')
        texts.append(text[text.find(b"[", at) + 1 :][: 8 << 20])
    return texts


def fuzz(traces: list[Path], *, seconds: float, inputs: int, seed: int) -> int:
    """How many inputs the scanner took."""
    import _scan

    texts, chance = seeds(traces), random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while number < inputs and time.monotonic() < end:
        if number % 1000 == 0:  # names do not pile up
            scanner = _scan.new(*CATEGORIES)
        text = chance.choice(texts)
        begin = chance.randrange(len(text))
        data = bytearray(text[begin : begin + chance.choice((50, 500, 5_000, 40_000))])
        for _ in range(chance.randrange(8)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.choice((0, 0, 1, 2, 9))] = chance.choice(PIECES) * chance.choice((1, 1, 1, 3))
        data = bytearray(bytes(data))  # exactly as large as its content
        room = chance.choice((1, 4, 100))
        rows, metas = bytearray(ROW_BYTES * room), bytearray(META_BYTES * room)
        start = n_rows = n_metas = 0
        cut = chance.randrange(len(data) + 1) if len(data) else 0
        for stop in (cut, len(data)):
            final, lost, full = stop == len(data) and number % 2 == 0, number % 7 == 0, True
            while full:
                scanned = _scan.scan(scanner, data, start, stop, final, lost, rows, metas, n_rows, n_metas)
                n_rows, n_metas, start, why = scanned
                full, lost = why == 1, False
                if full:
                    n_rows = n_metas = 0
        if number % 100 == 0:
            _scan.names(scanner, 0)
        number += 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--inputs", type=int, default=1 << 60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limits = {"seconds": arguments.seconds, "inputs": arguments.inputs, "seed": arguments.seed}
    if arguments.inside:
        print(fuzz(arguments.traces, **limits), "inputs")
    elif address_sanitizer() is None:
        sys.exit("gcc has no AddressSanitizer here")
    else:
        done = run(arguments.traces, **limits)
        print(done.stdout, end="")
        sys.exit(done.stderr[-3000:] if done.returncode else 0)


if __name__ == "__main__":
    main()
