"""How fast a trace of torch.profiler becomes Arrow columns, on one core, and in how much memory.

    python benchmarks/kineto_import.py TRACE.json.gz [--size-mb 1000]

The trace is repeated up to the size. Each part runs in a process of its own: unpacking alone, unpacking and scanning,
the same and writing an Arrow file (lz4), `rankscope import`, and `rankscope report` without output. CPU time counts,
since other work on the machine stretches the wall clock more; by what it shares, caches and cores, it still costs half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from large_trace import write_large

PARTS = ("unpack", "scan", "arrow", "python", "imported", "report")
PYTHON_SHARE = 20  # the Python scanner is timed on one twentieth of the size


def unpack(path: Path) -> None:
    from rankscope.analysis.readers.kineto.unpack import unpacked

    with path.open("rb") as file:
        source = unpacked(file)
        while source.read1(1 << 19):
            pass


def scan(path: Path) -> None:
    for _ in _batches(path):
        pass


def arrow(path: Path) -> None:
    import pyarrow as pa

    from rankscope.analysis.readers.json_scan import ROW_COLUMNS

    types = {"i8": pa.int64(), "i4": pa.int32()}
    schema = pa.schema([(name, types[kind]) for name, kind in ROW_COLUMNS.items()])
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(path.with_suffix(".arrow"), schema, options=options) as out:
        for batch in _batches(path):
            columns = [
                pa.Array.from_buffers(types[kind], len(batch.rows[name]), [None, pa.py_buffer(batch.rows[name])])
                for name, kind in ROW_COLUMNS.items()
            ]
            out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def python(path: Path) -> None:
    from rankscope.analysis.readers import json_scan as scanner

    scanner._scan = None
    scan(path)


def imported(path: Path) -> None:
    from rankscope.profiler.commands.import_ import command

    command([path], path.with_suffix(".run"))


def report(path: Path) -> None:
    from rankscope.analysis.diagnosis.diagnose import diagnose
    from rankscope.analysis.runs.trace import Trace

    diagnose(Trace.open(path))


def _batches(path: Path):
    from rankscope.analysis.readers.flops import SHAPED
    from rankscope.analysis.readers.json_scan import Scan, new_scanner, scan_events
    from rankscope.analysis.readers.kineto.scan import BRIEF, WHOLE
    from rankscope.analysis.readers.kineto.unpack import unpacked

    with path.open("rb") as file:
        source = unpacked(file)
        begun = b""
        while b'"traceEvents": [' not in begun:
            begun += source.read(1 << 16)
        events = begun[begun.index(b'"traceEvents": [') + len(b'"traceEvents": [') :]
        yield from scan_events(new_scanner(WHOLE, BRIEF, SHAPED), source, events, Scan())


def measure(part: str, path: Path) -> None:
    """Run one part in this process and print what it took beyond the imports."""
    import numpy  # noqa: F401
    import polars  # noqa: F401
    import pyarrow  # noqa: F401

    cpu, wall = time.process_time(), time.perf_counter()
    globals()[part](path)
    took = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    print(json.dumps(took | {"memory": peak_memory()}))


def peak_memory() -> int:
    """Bytes this process held at most. `ru_maxrss` would count what its parent held when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--size-mb", type=int, default=1000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, arguments.trace)
        return
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "rank0.json.gz"), Path(folder, "rank1.json.gz")
        size = write_large(arguments.trace, large, arguments.size_mb * 1_000_000)
        small_size = write_large(arguments.trace, small, arguments.size_mb * 1_000_000 // PYTHON_SHARE)
        print(f"{size / 1e6:,.0f} MB of JSON, {large.stat().st_size / 1e6:,.0f} MB packed")
        for part in PARTS:
            path, of_size = (small, small_size) if part == "python" else (large, size)
            command = [sys.executable, __file__, str(path), "--part", part]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took = json.loads(done.stdout.splitlines()[-1])
            rate = of_size / took["cpu_s"] / 1e6
            print(f"{part:8} {rate:7,.0f} MB/s of CPU  wall {took['wall_s']:6.2f} s  {took['memory'] / 1e6:6,.0f} MB")


if __name__ == "__main__":
    main()
