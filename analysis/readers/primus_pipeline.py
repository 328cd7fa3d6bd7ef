"""Reads the pipeline files that Primus writes (`dump_pp_data`): `pp_rank_N.json`, one per pipeline stage.

Each holds, per iteration, the start and end of every forward and backward in ms since the iteration began, on a clock
that the stages share; newer ones also those of gradients of weights, where backward is split, and the microbatch and
model chunk of each. `config.json` beside them says how many stages and microbatches there should be.

Source: AMD-AGI/Primus, `tools/visualization/pp_vis`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.pipeline_ops import BACKWARD, FORWARD, WEIGHTS
from rankscope.analysis.readers.base import FrameReader, Reader, files_in, gap, shaped, table
from rankscope.analysis.readers.bounds import check_ranks
from rankscope.analysis.readers.bytedance_ops import OPS_LACK, end_to_end, virtual_stages
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import ranges
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]

_FILE = re.compile(r"pp_rank_(\d+)\.json")
_CONFIG = "config.json"
_HEAD = 4096
_NS_PER_MS = 1e6
_LONGEST_MS = 1e9  # no step takes eleven days
_KINDS = {"fwd": FORWARD, "bwd": BACKWARD, "wgrad": WEIGHTS}

Row = dict[str, Any]


def recognises(path: Path) -> bool:
    """Such a file, or a folder in which one lies."""
    if path.is_dir():
        return any(_is_stage(f) for f in path.glob("pp_rank_*.json"))
    return _is_stage(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """Return the stages that lie there. Raises `BadInput`."""
    missing: list[Gap] = []
    rows: list[Row] = []
    stages: list[int] = []
    for path in files_in(paths):
        match = _FILE.fullmatch(path.name)
        if match is None or not _is_stage(path):
            continue
        stage = int(match[1])
        try:
            iterations = _object(path)
        except ValueError:
            missing.append(gap("ops", text("{name} was not read: it is cut or no JSON", name=path.name), rank=stage))
            continue
        stages.append(stage)
        before = len(missing)
        rows += [row for step, said in iterations.items() for row in _rows(stage, step, said, missing)]
        missing[before:] = _once_each(missing[before:], path.name)
    if not rows:
        raise BadInput(f"{', '.join(paths)}: {missing[0].why if missing else 'no pipeline operation is in it'}")
    check_ranks(paths[0], stages)
    world, expected, chunks = _config(Path(paths[0]), missing)
    if chunks > 1 and any("chunk" not in row for row in rows):
        _place(rows, expected or max(stages) + 1, chunks)
    absent = sorted(set(range(expected or max(stages) + 1)) - set(stages))
    if absent:
        why = text(
            "no file of stage {stages}: neither the schedule nor its bubble is whole without", stages=ranges(absent)
        )
        missing.append(gap("ranks", why, count=len(absent)))
    return FrameReader(
        frames={
            "ranks": table("ranks", [{"rank": stage, "start_ns": 0, "world_size": world} for stage in sorted(stages)]),
            "ops": shaped("ops", end_to_end(virtual_stages(table("ops", rows)))),
        },
        missing=missing,
        lacks=OPS_LACK,
    )


def _is_stage(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return _FILE.fullmatch(path.name) is not None and head[:1] == b"{" and b'"fwd_start"' in head


def _object(path: Path) -> Mapping[str, Any]:
    loaded = json.loads(path.read_bytes())
    if not isinstance(loaded, dict):
        raise ValueError("no JSON object")
    return loaded


def _rows(stage: int, step: str, said: Any, missing: list[Gap]) -> Iterator[Row]:  # noqa: ANN401 - foreign JSON
    """Yield the operations of one iteration on one stage; what is wrong with it goes to `missing`."""
    others = {key.removesuffix("_start") for key in said if key.endswith("_start")} - set(_KINDS) if said else set()
    if others:
        raise BadInput(f"stage {stage} has operations '{min(others)}': only forward and backward are understood")
    for kind, name in _KINDS.items():
        if kind == "wgrad" and said and not said.get("wgrad_start"):
            continue
        try:
            starts, ends = said[f"{kind}_start"], said[f"{kind}_end"]
            times = [(_ns(start), _ns(end)) for start, end in zip(starts, ends, strict=True)]
            places = _said_places(said, kind, len(times))
            number = int(step)
        except (KeyError, TypeError, ValueError):
            missing.append(
                gap(
                    "ops", text("iteration {step} has no whole {kind} times", step=step, kind=kind), rank=stage, count=1
                )
            )
            continue
        for seq, (start_ns, end_ns) in enumerate(times):
            row = {
                "rank": stage,
                "start_ns": start_ns,
                "end_ns": end_ns,
                "name": name,
                "step": number,
                "stage": stage,
                "replica": 0,
                "microbatch": seq,
                "seq": seq,
            }
            if places:
                row["chunk"], row["microbatch"] = places[seq]
                row["seq"] = row["microbatch"]
            yield row


def _said_places(said: Mapping[str, Any], kind: str, count: int) -> list[tuple[int, int]]:
    """Return the chunk and microbatch of each operation of a kind, where the file says them; else empty."""
    chunks, microbatches = (said.get(f"{kind}_{name}") for name in ("chunk", "minibatch"))
    if not (isinstance(chunks, list) and isinstance(microbatches, list) and len(chunks) == len(microbatches) == count):
        return []
    numbers = [*chunks, *microbatches]
    if any(not isinstance(number, int) for number in numbers):
        return []
    check_ranks(f"{kind} of a stage", numbers)
    return list(zip(chunks, microbatches, strict=True))


def _ns(milliseconds: float) -> int:
    if not abs(milliseconds) < _LONGEST_MS:  # nor is it a number if this is false
        raise ValueError("no time")
    return round(milliseconds * _NS_PER_MS)


def _once_each(gaps: Sequence[Gap], name: str) -> list[Gap]:
    """One gap for all iterations of a file."""
    if not gaps:
        return []
    more = text(", and {count} more such", count=len(gaps) - 1) if len(gaps) > 1 else ""
    why = text("{file}: {why}{more}", file=name, why=gaps[0].why, more=more)
    return [gap("ops", why, rank=gaps[0].rank, count=len(gaps))]


def _place(rows: Sequence[Row], stages: int, chunks: int) -> None:
    """Write the model chunk and the microbatch of each operation of an interleaved schedule into its row.

    A file has the operations of all chunks of its stage in the order in which they ran: as many microbatches as there
    are stages through one chunk, then through the next; backward takes the chunks from the last to the first.

    Source: Megatron-LM's `get_model_chunk_id` (Narayanan et al. 2021). Raises `BadInput` where backward is split.
    """
    if any(row["name"] == WEIGHTS for row in rows):
        raise BadInput("the pipeline's files do not say which model chunk each gradient of weights belongs to")
    for row in rows:
        group, within = divmod(row["seq"], stages * chunks)
        chunk, microbatch = divmod(within, stages)
        row["chunk"] = chunk if row["name"] == FORWARD else chunks - 1 - chunk
        row["seq"] = row["microbatch"] = group * stages + microbatch


def _config(path: Path, missing: list[Gap]) -> tuple[int | None, int | None, int]:
    """World size, number of stages, where the configuration says them, and model chunks per stage."""
    file = (path if path.is_dir() else path.parent) / _CONFIG
    try:
        said = _object(file)
    except OSError:
        return None, None, 1
    except ValueError:
        missing.append(
            gap("ops", text("{name} is cut or no JSON: the number of stages is taken from the files", name=_CONFIG))
        )
        return None, None, 1
    sizes = (said.get(name) for name in ("world_size", "pp_size", "vp_size"))
    world, stages, chunks = (size if isinstance(size, int) else None for size in sizes)
    check_ranks(file, (world, stages, chunks, (stages or 1) * (chunks or 1)))
    return world, stages, chunks or 1


reader = Reader(recognises=recognises, open_run=open_run)
