"""The process groups that a file knows of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.analysis.text.units import ranges

__all__ = ["Groups"]


class Groups:
    """The process groups that a file knows of, by name; the group with the empty name is the one it does not name."""

    def __init__(self, distributed: Mapping[str, Any], start_ns: int) -> None:
        """`distributed` is what the file says of the job, `start_ns` when the groups have been there."""
        self.members: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.backends: dict[str, str] = {}
        self.start_ns = start_ns
        config = distributed.get("pg_config")
        for entry in config if isinstance(config, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("ranks"), list) and entry.get("pg_name") is not None:
                name = str(entry["pg_name"])
                self.members[name] = ranges(sorted(r for r in entry["ranks"] if isinstance(r, int)))
                self.roles[name] = str(entry.get("pg_desc", ""))
                self.backends[name] = str(entry.get("backend_config", ""))

    def add(self, name: str, ranks: str, role: str) -> None:
        """Add a group as a collective names it; what is known of it already stays."""
        if self.members.get(name):  # the configuration may leave it open
            return
        try:
            listed = json.loads(ranks)
        except ValueError:  # shortened: `[0, 1, ..., 7]`
            listed = []
        self.members[name] = ranges(sorted(r for r in listed if isinstance(r, int))) if isinstance(listed, list) else ""
        self.roles.setdefault(name, role)

    def identity(self, name: str) -> int:
        """Equal on all ranks of the group, and on no other group's."""
        text = f"{name} {self.members.get(name, '')}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)

    def frame(self) -> pl.DataFrame:
        rows = [
            {
                "start_ns": self.start_ns,
                "group_id": self.identity(name),
                "name": name or "not named in the trace",
                "backend": self.backends.get(name, ""),
                "role": self.roles.get(name, ""),
                "members": members,
            }
            for name, members in self.members.items()
        ]
        schema = {"start_ns": pl.Int64, "group_id": pl.Int64, "name": pl.String, "backend": pl.String}
        return pl.DataFrame(rows, schema=schema | {"role": pl.String, "members": pl.String})
