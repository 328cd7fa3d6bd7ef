"""Runs whose nodes' counters are written down."""

from __future__ import annotations

import json

import rankscope
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from support.command_line import MS

EVERY_MS, READINGS = 50, 60
POWER_CAP, THERMAL, IDLE = 0x4, 0x40, 0x1


def sampled(folder, readings):
    """Write counters; `readings` are by node, source, name and device: a number, or a list, one every 50 ms."""
    for node in sorted({node for node, *_ in readings}):
        part = Partition(RunFolder(folder), f"node={node:05}", "")
        own = {key[1:]: values for key, values in readings.items() if key[0] == node}
        ids = {text: number for number, text in enumerate(sorted({text for key in own for text in key}))}
        for text, number in ids.items():
            part.add_row("strings", {"name_id": number, "name": text})
        for index in range(READINGS):
            for (source, name, device), values in own.items():
                value = values[index % len(values)] if isinstance(values, list) else values
                if value is None:
                    continue  # not read
                where = {"source_id": ids[source], "name_id": ids[name], "device_id": ids[device]}
                part.add_row("counters", {"time_ns": index * EVERY_MS * MS} | where | {"value": float(value)})
        part.flush()
        part.close()
        known = sorted({device for source, _, device in own if source == "gpu"})
        _set_gpus(folder / f"run/node={node:05}.json", node, known)
    return rankscope.diagnose(rankscope.open(folder))


def _set_gpus(file, node, known):
    """Write down that the node's ranks use these GPUs, in their order."""
    said = json.loads(file.read_text())
    said["topology"] = {"gpus": [{"index": int(gpu[3:]), "uuid": f"GPU-{gpu}"} for gpu in known]}
    said["ranks"] = [{"rank": node * len(known) + i, "gpu_uuid": f"GPU-{gpu}"} for i, gpu in enumerate(known)]
    file.write_text(json.dumps(said))


def gpus(clocks_ghz, reasons, busy=None, node=0):
    """Readings of a node's GPUs."""
    found = {}
    for index, ghz in enumerate(clocks_ghz):
        values = {"sm_clock_hz": [g * 1e9 for g in ghz] if isinstance(ghz, list) else ghz * 1e9}
        values |= {"sm_clock_max_hz": 1.98e9, "clock_event_reasons": reasons.get(index, 0)}
        values["busy_fraction"] = (busy or {}).get(index, 0.95)
        found |= {(node, "gpu", name, f"gpu{index}"): value for name, value in values.items()}
    return found
