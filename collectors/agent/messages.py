"""The ranks' messages to the agent: each one's fields, with the ranges that the tables take.

A rank's messages are untrusted: invalid ones are refused here, before anything of them is kept.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from rankscope.errors import BadInput

__all__ = ["Message", "OfWindow", "parse"]

PACKET_BYTES = 128 * 1024

_Int32: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_UInt32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Time: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=10_000_000)]
_Pid: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Short: TypeAlias = Annotated[str, Meta(max_length=1000)]
_Long: TypeAlias = Annotated[str, Meta(max_length=100_000)]
_Hex: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{1,16}$")]
_Host: TypeAlias = Annotated[str, Meta(pattern=r"^[^\x00-\x20]*$", max_length=255)]
# a run's name becomes that of a folder
_RunName: TypeAlias = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\x00-\x1f]+$", max_length=255)]


class Hello(Struct, tag="hello", tag_field="type"):
    rank: _Rank
    local_rank: _Rank
    world: _Hex | None
    world_size: Annotated[int, Meta(ge=1, le=10_000_000)]
    node: _Rank | None
    pid: _Pid
    attempt: Annotated[int, Meta(ge=0, le=1_000_000)]
    hostname: _Short
    device: _Short
    torch: _Short
    python: _Short
    command: _Long
    start_ns: _Time
    main_thread: _Int64 = 0
    listen: Annotated[str, Meta(pattern="^[0-9a-f.:]*$", max_length=45)] | None = (
        None  # where other nodes can reach rank 0, which alone says it; "": anywhere
    )


class String(Struct, tag="string", tag_field="type"):
    id: _UInt32
    name: _Short


class Frames(Struct, tag="frames", tag_field="type"):
    rows: Annotated[list[tuple[_UInt32, _UInt32, _Long, _Long, _Int32]], Meta(max_length=10_000)]


class Group(Struct, tag="group", tag_field="type"):
    id: _Int64
    name: _Long
    backend: _Short
    role: _Long
    members: _Long
    start_ns: _Time


class Gap(Struct, tag="gap", tag_field="type"):
    table: _Short
    source: _Short
    start_ns: _Time | None
    end_ns: _Time | None
    count: Annotated[int, Meta(ge=0, le=2**62)] | None
    why: _Long


class Gpu(Struct, tag="gpu", tag_field="type"):
    name: _Short
    uuid: _Short | None


class TrainingThread(Struct, tag="training_thread", tag_field="type"):
    thread: _Int64
    tid: _Pid


class FlightRecorder(Struct, tag="flight_recorder", tag_field="type"):
    folder: Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096)]
    handler: Annotated[str, Meta(pattern=r"^[\w?=&.:-]+$", max_length=200)]


class NcclRing(Struct, tag="nccl_ring", tag_field="type"):
    pass


class Peer(Struct, tag="peer", tag_field="type"):
    host: _Host
    port: Annotated[int, Meta(ge=0, le=65_535)]
    name: _RunName
    node: _Rank
    agent: _Short
    key: Annotated[str, Meta(pattern="^[0-9a-f]{0,64}$")] = ""


class Slow(Struct, tag="slow", tag_field="type"):
    step: _Int32
    ns: _Time
    usual_ns: _Time


class WindowRow(Struct):
    start_ns: _Time
    end_ns: _Time
    start_stall_ns: _Time
    stop_stall_ns: _Time


class Window(Struct, tag="window", tag_field="type"):
    id: _Int32
    state: Annotated[str, Meta(pattern="^(saving|saved|refused|failed|discarded)$")]
    why: _Long = ""
    row: WindowRow | None = None
    marks: list[tuple[_Int32, _Time, _Time]] | None = None


class Stacks(Struct, tag="stacks", tag_field="type"):
    id: _Int32
    step: _Int32
    threads: list[dict[str, str | list[str]]]


class Raised(Struct, tag="raised", tag_field="type"):
    time_ns: _Time
    error: _Short
    place: _Short


class Bye(Struct, tag="bye", tag_field="type"):
    dropped: Annotated[int, Meta(ge=0, le=2**62)]


Message: TypeAlias = (
    Hello
    | String
    | Frames
    | Group
    | Gap
    | Gpu
    | TrainingThread
    | FlightRecorder
    | NcclRing
    | Peer
    | Slow
    | Window
    | Stacks
    | Raised
    | Bye
)
OfWindow: TypeAlias = Slow | Window | Stacks
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def parse(packet: bytes) -> Message:
    """Read one packet. Raises BadInput."""
    try:
        return _decoder.decode(packet)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        raise BadInput(str(error)[:200]) from None
