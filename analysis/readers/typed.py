"""Foreign JSON becomes typed values here, or is refused in one line."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import msgspec

from rankscope.collectors.schema import MOST_RANKS

__all__ = ["launch_of"]

Rank = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
Ns = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class _RankReport(TypedDict, total=False):
    rank: Rank
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    world: str | None
    world_size: Rank | None
    start_ns: Ns | None
    end_ns: Ns | None
    gpu_uuid: str | None


class _Gpu(TypedDict, total=False):
    uuid: str | None
    index: int | None
    pci: str
    numa_node: int | None
    nics: list[str]
    pcie: str | None
    pcie_max: str | None
    distance: str | None


class _Nic(TypedDict):
    name: str


class _Topology(TypedDict, total=False):
    gpus: list[_Gpu]
    nics: list[_Nic]


class _Command(TypedDict, total=False):
    command: list[str]


class _Gap(TypedDict):
    table: str
    rank: int | None
    node: int | None
    count: int | None
    why: str


class _Launch(TypedDict, total=False):
    """The fields that are used of `run/node=*.json`; it may have more."""

    state: str
    source: str
    agent: str
    peer: str | None
    hostname: str
    addresses: list[str]
    ranks: list[_RankReport]
    launch: _Command
    versions: dict[str, str | None]
    topology: _Topology | None
    start_ns: Ns
    end_ns: Ns | None
    kept_since_ns: Ns | None
    keep_bytes: int | None
    gaps: list[_Gap]
    cannot: dict[str, str]
    window: int
    reason: str
    first_step: Ns
    steps: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    clock_error_ns: dict[str, Ns]


def launch_of(content: bytes) -> dict[str, Any]:
    """Return a node's JSON, whose known fields have their types. Raises ValueError, in one line."""
    try:
        said = msgspec.json.decode(content)
        msgspec.convert(said, _Launch)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return dict(said)
