"""Events of torch.profiler, and files of them."""

from __future__ import annotations

import gzip
import json

from rankscope.analysis.runs.trace import Trace

ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(cat, name, ts, dur, *, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name, ts, dur, correlation=None, *, stream=7, device=0, **args):
    known = {} if correlation is None else {"correlation": correlation}
    return event("kernel", name, ts, dur, pid=device, tid=stream, device=device, stream=stream, **known, **args)


def copy(name, ts, dur, correlation=None, **args):
    """A copy of memory, or a fill by its name."""
    category = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
    return {**kernel(name, ts, dur, correlation, **args), "cat": category}


def launch(ts, dur, correlation, *, tid=1, name="cudaLaunchKernel"):
    return event("cuda_runtime", name, ts, dur, tid=tid, cbid=211, correlation=correlation)


def step(number, ts, dur, **where):
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur, **where)


def text_of(events, **top):
    return json.dumps({"schemaVersion": 1, **top, "traceEvents": events}, indent=2)


def write(path, events, **top):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = text_of(events, **top)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def opened(tmp_path, events, name="rank0.json", **top):
    return Trace.open(write(tmp_path / name, events, **top))


def meta(name="allreduce", elements=1000, group="0", ranks="[0, 1]", **more):
    return {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "BFloat16",
        "Process Group Name": group,
        "Process Group Ranks": ranks,
        "Process Group Description": "default_pg",
        **more,
    }
