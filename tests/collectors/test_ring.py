"""What a rank packs into a record comes out of it as the same values, in the columns of its table."""

from __future__ import annotations

import itertools
import multiprocessing
import struct
import threading
import time

import numpy as np
import pytest

from rankscope.collectors.agent import ring_reader
from rankscope.collectors.agent.ring_reader import RECORD_DTYPE
from rankscope.collectors.in_rank import ring_writer
from rankscope.collectors.schema import RECORD, RECORD_FIELDS, RING_SLOTS, RecordType


def read_back(write):
    """Columns by table, as plain values, of what `write` puts into a ring."""
    ring = ring_writer.Ring()
    write(ring)
    records = ring_reader.Ring(ring.fd).read(0, last=True)
    tables = ring_reader.columns_by_table(records, ring_reader.Threads(threading.get_ident()))
    return {table: {name: values.tolist() for name, values in columns.items()} for table, columns in tables.items()}


@pytest.mark.parametrize(
    ("write", "table", "row"),
    [
        (
            lambda ring: ring.region(1, 7, 10, 20, microbatch=4, stage=2),
            "regions",
            {"kind": 1, "name_id": 7, "start_ns": 10, "end_ns": 20, "thread": 0, "microbatch": 4, "stage": 2},
        ),
        (
            lambda ring: ring.region(1, 7, 10, 20),
            "regions",
            {"kind": 1, "name_id": 7, "start_ns": 10, "end_ns": 20, "thread": 0, "microbatch": None, "stage": None},
        ),
        (lambda ring: ring.step(80), "steps", {"end_ns": 80, "thread": 0}),
        (lambda ring: ring.memory(7, 90, 1 << 40), "memory", {"name_id": 7, "time_ns": 90, "value": 1 << 40}),
        (
            lambda ring: ring.mark(3, 1, 50, 60, 5),
            "device_marks",
            {"mark": 3, "device": 1, "recorded_ns": 50, "device_ns": 60, "clock_error_ns": 5},
        ),
        (
            lambda ring: ring.mark(3, 1, 50, 0, -1),
            "device_marks",
            {"mark": 3, "device": 1, "recorded_ns": 50, "device_ns": None, "clock_error_ns": None},
        ),
        (lambda ring: ring.sample(11, 70), "samples", {"frame": 11, "time_ns": 70}),
    ],
)
def test_record_comes_back(write, table, row):
    assert read_back(write) == {table: {name: [value] for name, value in row.items()}}


def test_operation_gets_its_end():
    """All-reduce (1) of float32 (2), asynchronous, 4096 bytes, from the main thread: it took from 50 to 60."""

    def write(ring):
        number = ring.write(RecordType.COLLECTIVE, 1, 2 | 1 << 8, 0, 50, 51, 42, 4096, 1)
        ring.write(RecordType.DONE, 0, 0, 0, 60, number, 0, 0, 0)

    collectives = read_back(write)["collectives"]
    said = ("start_ns", "issued_ns", "end_ns", "group_id", "op", "dtype", "is_async", "size_bytes", "peer", "thread")
    assert [collectives[name] for name in said] == [[50], [51], [60], [42], [1], [2], [True], [4096], [-1], [0]]


def test_how_far_a_rank_is_comes_back_as_it_last_said():
    ring = ring_writer.Ring()
    ring.progress(3, 50, 7)
    ring.progress(4, 60, 8)
    ring.step(61)
    records = ring_reader.Ring(ring.fd).read(0, last=True)
    assert ring_reader.progress_in(records) == (60, 4, 8)
    ring.progress(5, -1, 8)  # a time that cannot be
    assert ring_reader.progress_in(ring_reader.Ring(ring.fd).read(0, last=True)) is None


@pytest.mark.parametrize("record_type", sorted({*np.flatnonzero(ring_reader.IS_KNOWN)} - {RecordType.PROGRESS}))
def test_every_type_of_record_becomes_rows_of_a_table(record_type):
    """A type that is added to the schema alone would be read, counted as known, and lost without a gap."""
    record = np.array([(1, record_type, *[0] * 8, 1)], ring_reader.RECORD_DTYPE)
    tables = ring_reader.columns_by_table(record, ring_reader.Threads(1))
    assert {len(column) for columns in tables.values() for column in columns.values()} == {1}


def write_slowly(ring, seconds):
    """Write records whose values are their number, one value after the other: the number first and the check last."""
    places = {name: RECORD_DTYPE.fields[name][1] for name in RECORD_FIELDS if name not in ("a", "b", "c")}
    ends = time.monotonic() + seconds
    following = itertools.count(1)
    while time.monotonic() < ends:
        for number in itertools.islice(following, 200):
            at = number % RING_SLOTS * RECORD.size
            for name, place in places.items():
                kind, value = ("<B", number % 100) if name == "type" else ("<Q", number)
                struct.pack_into(kind, ring._memory, at + place, value)


def test_a_record_that_is_being_written_is_not_taken():
    ring = ring_writer.Ring()
    reader = ring_reader.Ring(ring.fd)
    writing = multiprocessing.get_context("fork").Process(target=write_slowly, args=(ring, 2.0))
    writing.start()
    taken = 0
    while writing.is_alive():
        records = reader.read(time.perf_counter_ns())
        number = records["number"].astype(np.int64)
        taken += len(records)
        assert (records["type"] == number % 100).all()
        assert (records["q0"] == number).all()
        assert (records["q4"] == number).all()
    assert taken > 100_000
