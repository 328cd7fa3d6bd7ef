"""Holistic Trace Analysis (HTA, from PyPI) and rankscope side by side: load a trace, and break its device time down.

    python benchmarks/vs_hta.py TRACE.json.gz [--size-mb 1000] [--hta-python HTA/bin/python]

HTA gets an environment of its own, made here unless one is given. The trace is repeated up to the size for CPU time
and memory; the answers are compared on the trace itself. HTA counts whole steps only and, as called here, also the last
one; rankscope counts every device row of the capture. Each run is a process of its own; its imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from large_trace import write_large

MEASURE = """
import json, pathlib, sys, time

def peak_memory():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

def measured(load, analyse):
    cpu = time.process_time()
    loaded = load()
    loaded_s = time.process_time() - cpu
    answer = analyse(loaded)
    took = {"load_s": loaded_s, "analyse_s": time.process_time() - cpu - loaded_s, "memory": peak_memory()}
    print(json.dumps(took | {"answer": answer}))
"""

HTA = (
    MEASURE
    + """
import logging
from hta.trace_analysis import TraceAnalysis

logging.disable()

def load():
    return TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True)

def analyse(trace):
    row = trace.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = trace.get_comm_comp_overlap(visualize=False).iloc[0]
    names = {"idle": "idle_time(us)", "compute": "compute_time(us)", "window": "kernel_time(us)"}
    share = float(overlap["comp_comm_overlap_pctg"]) / 100
    return {name: float(row[column]) for name, column in names.items()} | {"overlap share": share}

measured(load, analyse)
"""
)

RANKSCOPE = (
    MEASURE
    + """
import polars, pyarrow
from rankscope.analysis.readers import kineto
from rankscope.analysis.timeline.device_time import device_parts
from rankscope.analysis.runs.trace import Trace

def load():
    return Trace.open(sys.argv[1])

def analyse(trace):
    part = device_parts(trace.table("kernels").collect())[0]
    share = part.overlap_ns / part.communication_ns if part.communication_ns else 0.0
    times = {"idle": part.idle_ns, "compute": part.compute_ns, "window": part.window_ns}
    return {name: ns / 1_000 for name, ns in times.items()} | {"overlap share": share}

measured(load, analyse)
"""
)


def hta_environment(folder: Path) -> str:
    """Python of a fresh environment with HTA."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "HolisticTraceAnalysis"], check=True)
    return python


def run(python: str, script: str, trace: Path) -> dict[str, object]:
    done = subprocess.run([python, "-c", script, str(trace)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} failed on {trace}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--size-mb", type=int, default=1000)
    parser.add_argument("--hta-python", help="Python of an environment that has HTA")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hta_python = arguments.hta_python or hta_environment(Path(folder, "hta"))
        tools = {"HTA": (hta_python, HTA), "rankscope": (sys.executable, RANKSCOPE)}
        trace = arguments.trace.resolve()
        answers = {name: run(*tool, trace)["answer"] for name, tool in tools.items()}
        print(f"{'':16}{'HTA':>16}{'rankscope':>16}   on {trace.name}")
        for quantity, value in answers["HTA"].items():
            print(f"{quantity:16}{value:16,.3f}{answers['rankscope'][quantity]:16,.3f}")
        large = Path(folder, "rank0.json.gz")
        size = write_large(trace, large, arguments.size_mb * 1_000_000)
        print(f"\n{'':16}{'load s':>10}{'analyse s':>10}{'memory MB':>12}   of {size / 1e6:,.0f} MB, CPU time")
        took = {name: run(*tool, large) for name, tool in tools.items()}
        for name, of in took.items():
            print(f"{name:16}{of['load_s']:10.2f}{of['analyse_s']:10.2f}{of['memory'] / 1e6:12,.0f}")
        both = [of["load_s"] + of["analyse_s"] for of in took.values()]
        memory = took["rankscope"]["memory"] / took["HTA"]["memory"]
        print(f"rankscope takes 1/{both[0] / both[1]:.0f} of the CPU time and {memory:.2f} of the memory")


if __name__ == "__main__":
    main()
