"""What a rank may send or write, and what a script may pass to rankscope: anything, and nothing of it does harm."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collectors.agent import messages
from rankscope.collectors.agent.arrow_writer import batch_of
from rankscope.collectors.agent.ring_reader import RECORD_DTYPE, Threads, columns_by_table, fitting
from rankscope.collectors.agent.ring_reader import Ring as RingReader
from rankscope.collectors.in_rank import session
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.schema import RECORD, RING_SLOTS
from rankscope.errors import BadInput

QUICK = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
TYPES = [
    "hello",
    "string",
    "frames",
    "group",
    "gap",
    "gpu",
    "training_thread",
    "flight_recorder",
    "peer",
    "step",
    "slow",
    "window",
    "stacks",
    "bye",
]
FIELDS = [
    *("rank", "local_rank", "world", "world_size", "node", "pid", "attempt", "hostname", "device", "torch", "python"),
    *("command", "start_ns", "main_thread", "id", "name", "rows", "backend", "role", "members", "table", "source"),
    *("end_ns", "count", "why", "uuid", "thread", "tid", "folder", "handler", "host", "port", "agent", "done"),
    *("step_ns", "step", "ns", "usual_ns", "state", "row", "marks", "threads", "dropped"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)


def parsed(packet: bytes) -> messages.Message | None:
    """None if it is refused, as the agent refuses it."""
    try:
        return messages.parse(packet)
    except BadInput:
        return None


@QUICK
@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_a_message_is_whole_or_refused(kind, fields):
    message = parsed(json.dumps({**fields, "type": kind}).encode())
    if isinstance(message, messages.String):
        batch_of("strings", {"name_id": [message.id], "name": [message.name]})


@QUICK
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(packet):
    assert parsed(packet) is None


@pytest.mark.parametrize(
    "packet",
    [
        b"[" * 60_000,
        b'{"type":"slow","step":1,"ns":1,"usual_ns":1,"more":' + b"[" * 60_000,
        b'{"type":"peer","host":"h","port":1,"node":0,"agent":"a","name":"' + b"n" * 3000 + b'"}',
        b'{"type":"peer","host":"h","port":1,"node":0,"agent":"a","name":".."}',
        b'{"type":"peer","host":"h","port":1,"node":0,"agent":"a","name":"a/b"}',
        b'{"type":"string","id":4294967296,"name":"n"}',
        b'{"type":"of tomorrow"}',
    ],
    ids=["nested", "nested field", "long name", "parent", "path", "number", "type"],
)
def test_what_an_attack_found_is_refused(packet):
    assert parsed(packet) is None


def assert_written(records: np.ndarray) -> None:
    """Each table takes what is left of the records."""
    for table, columns in columns_by_table(records, Threads(0)).items():
        fit, refused = fitting(table, columns)
        assert batch_of(table, fit).num_rows + refused == len(next(iter(columns.values())))


def test_random_records_are_rows_or_counted():
    chance = random.Random(25)
    for _ in range(40):
        records = np.frombuffer(chance.randbytes(200 * RECORD.size), RECORD_DTYPE).copy()
        records["type"] = [chance.choice((1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 99)) for _ in records]
        records["number"] = np.arange(1, len(records) + 1)
        assert_written(records)


def test_microbatch_that_no_column_takes_costs_its_row_only():
    records = np.zeros(3, RECORD_DTYPE)
    records["type"], records["q3"] = 1, (1, 2**31, 2)
    fit, refused = fitting("regions", columns_by_table(records, Threads(0))["regions"])
    assert (fit["microbatch"].tolist(), refused) == ([1, 2], 1)


def test_rings_of_any_bytes_are_read_or_refused():
    chance = random.Random(25)
    ring = Ring()
    for content in (b"\xff" * 64, b"\x01" * 64, chance.randbytes(64), chance.randbytes(6400)):
        ring._memory[:] = (content * RING_SLOTS)[: RING_SLOTS * RECORD.size]
        reader = RingReader(ring.fd)
        for last in (False, True):
            try:
                records = reader.read(0, last=last)
            except ValueError:  # as the numbers of its records are none
                break
            assert_written(records)
            assert 0 <= reader.overwritten < 2**62
            assert 0 <= reader.unfinished < 2**62


def test_ring_cannot_be_cut_and_one_that_can_is_refused():
    with pytest.raises(PermissionError):
        os.truncate(Ring().fd, 0)
    fd = os.memfd_create("cut", os.MFD_ALLOW_SEALING)
    os.truncate(fd, RING_SLOTS * RECORD.size)
    with pytest.raises(ValueError, match="not sealed"):
        RingReader(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="not sealed"):
        RingReader(fd)
    os.close(fd)


class Awkward:
    """Everything that one may ask of it raises."""

    def __index__(self) -> int:
        raise RuntimeError("index")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("equal")

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __str__(self) -> str:
        raise RuntimeError("text")


ANYTHING = st.builds(Awkward) | st.binary(max_size=5) | VALUES | st.just(2**31) | st.just("\ud800")


@pytest.fixture(scope="module")
def recording():
    """This process as a rank that records, to an agent that listens and keeps the messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    emit = session.Emit(Ring(), ours)
    session._session = SimpleNamespace(emit=emit)
    yield emit, theirs
    session._session = None
    ours.close()
    theirs.close()


def heard(theirs: socket.socket) -> list[messages.Message]:
    found = []
    while True:
        try:
            found.append(messages.parse(theirs.recv(1 << 17)))
        except BlockingIOError:
            return found


@QUICK
@given(ANYTHING, ANYTHING, ANYTHING)
def test_no_value_makes_a_public_call_raise(recording, name, microbatch, stage):
    emit, theirs = recording
    with session.annotate(name, microbatch=microbatch, stage=stage):
        session.step()
    session.annotate(name, microbatch=microbatch).__exit__()
    heard(theirs)  # which all are messages
    assert emit.live
    assert not emit._off


def test_bad_values_are_a_gap_once(recording):
    emit, theirs = recording
    emit._said.clear()
    heard(theirs)
    for microbatch in (1.0, "3", 2**70, 2**31, -1):
        with session.annotate("loss", microbatch=microbatch):
            pass
    for name in (5, b"x"):
        with session.annotate(name):
            pass
    gaps = [message for message in heard(theirs) if isinstance(message, messages.Gap)]
    assert [gap.source for gap in gaps] == ["annotate", "annotate"]
    _, _, _, _, _, _, _, _, index, _, _ = struct.unpack_from(
        RECORD.format, emit.ring._memory, emit.ring.write(1, *[0] * 8) % RING_SLOTS * RECORD.size - RECORD.size
    )
    assert index == -1
