"""Reads the run folders that rankscope's own agent writes (layout: docs/architecture.md)."""

from __future__ import annotations

from rankscope.analysis.model.address import address_of
from rankscope.analysis.readers.base import Reader
from rankscope.analysis.readers.native.arrow_files import at_once
from rankscope.analysis.readers.native.files import (
    existing_folder,
    partitions,
    parts_in,
    recognises,
    refuse_two_runs,
    run_files,
    why_no_run,
)
from rankscope.analysis.readers.native.run_folder import NativeReader
from rankscope.collectors.schema import SCHEMA_VERSION
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]


def open_run(folders: list[str]) -> NativeReader:
    """Everything that these folders hold of one run. Raises `BadInput` if that is nothing."""
    address = address_of(folders)
    roots = list(dict.fromkeys(existing_folder(folder) for folder in address.folders))
    run, torn = run_files(roots)
    parts = [part for root in roots for of_one in at_once(parts_in, partitions(root)) for part in of_one]
    refuse_two_runs(parts)
    where = ", ".join(folders)
    if not run and not torn and not parts:
        raise BadInput(why_no_run(roots[0], where) if roots else "no run folder was given")
    for node, launch in run.items():
        version = launch.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise BadInput(
                f"{where}: node {node} wrote schema version {version}, this rankscope reads up to {SCHEMA_VERSION}: "
                "update rankscope"
            )
    reader = NativeReader(run, parts, torn, roots, where=address.folders[0], world=address.world, steps=address.steps)
    if not reader.ranks():
        raise BadInput(f"{where}: {reader.why_no_rank()}")
    return reader


reader = Reader(recognises=recognises, open_run=open_run, asked=-1)  # rankscope's own
