"""Parts that were damaged after they were written: named, and never read as other numbers."""

import random
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest

import rankscope
from rankscope.collectors.agent.arrow_writer import write_sealed
from rankscope.collectors.checksum import is_intact

RANKSCOPE = [sys.executable, "-m", "rankscope"]


def content(run, table):
    """A table of the run, and the files that gaps name."""
    opened = rankscope.open(run)
    rows = opened.table(table).collect()
    named = [gap.why.split()[0] for gap in opened.gaps() if "checksum" in gap.why]
    return rows, named


def flipped(part, bit):
    data = bytearray(part.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    part.write_bytes(data)


@pytest.mark.long
def test_a_flipped_bit_of_a_recorded_part_is_named_wherever_it_is(slow_rank_1, tmp_path):
    run = shutil.copytree(slow_rank_1, tmp_path / "run")
    chance = random.Random(7)
    for table in ("collectives", "regions", "counters", "strings", "ranks", "gaps"):
        part = sorted(run.glob(f"{table}/*=00000/*.arrow"))[0]
        whole, good = part.read_bytes(), content(run, table)
        assert good[1] == []
        for _ in range(8):
            flipped(part, chance.randrange(8 * len(whole)))
            assert content(run, table)[1] == [part.name]
            part.write_bytes(whole)
        assert content(run, table)[0].equals(good[0])


def test_every_bit_counts(tmp_path):
    write_sealed(tmp_path, "", pa.table({"time_ns": [1, 2, 3]}))
    (part,) = tmp_path.iterdir()
    whole = part.read_bytes()
    assert is_intact(whole)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not is_intact(bytes(damaged)), bit


def test_the_report_names_the_damaged_file(slow_rank_1, tmp_path):
    run = shutil.copytree(slow_rank_1, tmp_path / "run")
    (part,) = run.glob("collectives/rank=00001/*.arrow")
    flipped(part, 8 * (part.stat().st_size // 2))
    printed = subprocess.run([*RANKSCOPE, "report", str(run)], capture_output=True, text=True, timeout=100, check=True)
    said = " ".join(printed.stdout.split())
    assert f"{part.name} was damaged after it was written: its checksum is wrong; nothing of it is good" in said


@pytest.mark.parametrize("closed", [True, False])
def test_parts_without_a_checksum_are_read_as_before(slow_rank_1, tmp_path, closed):
    run = shutil.copytree(slow_rank_1, tmp_path / "run")
    good, _ = content(run, "collectives")
    for part in run.glob("*/*/*.arrow"):
        rows = pa.ipc.open_file(pa.BufferReader(part.read_bytes())).read_all().replace_schema_metadata()
        with pa.ipc.new_file(part, rows.schema) as file:
            file.write_table(rows)
        if not closed:  # an agent that was killed left no footer
            part.write_bytes(part.read_bytes()[:-10])
    rows, named = content(run, "collectives")
    assert rows.equals(good)
    assert named == []
