"""`rankscope export`: what a reader of Perfetto's format finds in the file is what the run's own tables say."""

from __future__ import annotations

import gzip
import io
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.report import perfetto, phrases, protobuf_wire
from rankscope.analysis.report.lane_packing import nest_rows
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.schema import OPS
from rankscope.errors import NotExportable
from support.command_line import MS, rankscope_
from support.ddp_run import record
from support.paths import DATA

RESNET = DATA / "kineto/torchrec/resnet18"
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


# ---- a reader of the format, by its public description


def fields(data: bytes) -> dict[int, list]:
    """A message's fields by number: whole numbers, or bytes."""
    found, at = defaultdict(list), 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            found[tag >> 3].append(number())
            continue
        assert tag & 7 in (1, 2)
        size = 8 if tag & 7 == 1 else number()
        found[tag >> 3].append(data[at : at + size])
        assert at + size <= len(data)
        at += size
    return found


class Opened:
    """slices: dicts with rank's title, track's title, name, start, end, args, depth, flows; arrows: pairs of these."""

    def __init__(self, path: Path) -> None:
        packets = [fields(packet) for packet in fields(gzip.decompress(path.read_bytes()))[1]]
        texts, tracks, events = {}, {}, []
        for packet in packets:
            for interned in packet[12]:
                for kind, entries in fields(interned).items():
                    for entry in map(fields, entries):
                        assert (kind, entry[1][0]) not in texts
                        texts[kind, entry[1][0]] = entry[2][0].decode()
            for said in map(fields, packet[60]):
                parent = said[5][0] if said[5] else None
                tracks[said[1][0]] = (tracks[parent][1] if parent else None, said[2][0].decode())
            for event in map(fields, packet[11]):
                assert event[11][0] in tracks, "a track is declared before its events"
                events.append((packet[8][0], event))
        self.slices, self.arrivals, self.counters = [], [], defaultdict(list)
        begins, ends = {}, {}
        stacks = defaultdict(list)
        for time, event in sorted(events, key=lambda one: one[0]):  # equal times as they are in the file, as Perfetto
            group, title = tracks[event[11][0]]
            stack, what = stacks[event[11][0]], event[9][0]
            if what == END:
                stack.pop()["end"] = time
                continue
            if what == COUNTER:
                self.counters[group, title].append((time, float(np.frombuffer(event[44][0])[0])))
                continue
            one = {"group": group, "track": title, "lane": event[11][0], "depth": len(stack), "start": time}
            one["name"], one["category"] = texts[2, event[10][0]], texts[1, event[3][0]]
            one["args"] = {texts[3, arg[1][0]]: value(arg, texts) for arg in map(fields, event[4])}
            one["in"] = stack[-1] if stack else None
            for flow in event[47]:
                begins[flow] = one
            for flow in event[48]:
                assert flow in begins, "an arrow begins before it ends"
                ends[flow] = one
            if what == BEGIN:
                stack.append(one)
                self.slices.append(one)
            else:
                assert what == INSTANT
                self.arrivals.append(one)
        assert not any(stacks.values()), "every slice ends"
        assert set(begins) == set(ends)
        self.arrows = [(begins[flow], ends[flow]) for flow in begins]
        self.groups = [title for parent, title in tracks.values() if parent is None]

    def of(self, category: str) -> list[dict]:
        return [one for one in self.slices if one["category"] == category]


def value(arg, texts):
    if arg[17]:
        return texts[29, arg[17][0]]
    return bool(arg[2][0]) if arg[2] else arg[4][0]


def export(run: Path, target: Path, *options: str) -> Opened:
    done = rankscope_("export", run, "--out", target, *options)
    assert (done.returncode, done.stderr) == (0, "")
    opened = Opened(target)
    events = len(opened.slices) + len(opened.arrivals) + sum(map(len, opened.counters.values()))
    assert done.stdout.startswith(f"{target}: {events:,} events, ")
    assert " kB; open it at " in done.stdout
    return opened


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Three ranks, of which rank 2 computes 30 ms longer than the others before each all-reduce of 10 ms."""
    return record(tmp_path_factory.mktemp("late") / "late", {0: 40, 1: 40, 2: 70})


@pytest.fixture(scope="module")
def opened(late, tmp_path_factory):
    return export(late, tmp_path_factory.mktemp("out") / "late.pftrace.gz")


def also(run: Path, rank: int, **tables: list[dict]) -> None:
    """These rows too are in the run."""
    part = Partition(RunFolder(run), f"rank={rank:05}", "a9-")
    for table, rows in tables.items():
        for row in rows:
            part.add_row(table, row)
    part.flush()
    part.close()
    for path in run.glob("*/*/a9-part-*.arrow"):
        path.rename(path.with_name("a0-part-0009.arrow"))


# ---- what is in it


def test_parts_of_the_judged_steps_sum_to_the_breakdown(late, opened):
    timeline = build_timeline(Trace.open(late))
    judged = {(f"rank {r}", s) for r, s in timeline.steps.filter("judged").select("rank", "step").iter_rows()}
    drawn = defaultdict(int)
    for one in opened.of("phases"):
        rank = one["group"].removesuffix(" (node 0)")
        if (rank, one["args"]["step"]) in judged:
            drawn[rank, one["args"]["step"], one["name"]] += one["end"] - one["start"]
    table = {
        (f"rank {rank}", step, part): ns
        for rank, step, part, ns in timeline.breakdown.iter_rows()
        if ns and (f"rank {rank}", step) in judged
    }
    assert drawn == table
    assert table["rank 0", 5, "wait"] == 30 * MS
    steps = {(one["name"], one["args"]["judged"]) for one in opened.of("steps")}
    assert {("step 0 (warm-up)", False), ("step 5", True)} < steps


def test_operations_are_those_of_the_table_each_with_its_wait(late, opened):
    timeline = build_timeline(Trace.open(late))
    origin = timeline.phases["start_ns"].min()
    facts = ("rank", "start_ns", "end_ns", "seq", "wait_ns", "transfer_ns", "size_bytes", "instance_id")
    table = {(r, a - origin, z - origin, *more) for r, a, z, *more in timeline.collectives.select(facts).iter_rows()}
    operations = [one for one in opened.of("collectives") if one["name"] == "allreduce"]
    drawn = [
        (int(one["group"].split()[1]), one["start"], one["end"], *(one["args"][name] for name in facts[3:]))
        for one in operations
    ]
    assert len(drawn) == len(table) == 3 * 14
    assert set(drawn) == table
    assert {one["args"]["last_rank"] for one in operations} == {2}
    waits = [one for one in opened.of("collectives") if one["name"] == "wait"]
    assert len(waits) == 2 * 14
    assert all(one["in"]["start"] == one["start"] and one["end"] - one["start"] == 30 * MS for one in waits)


def test_arrows_lead_from_the_last_rank_to_the_others_of_the_same_operation(opened):
    assert len(opened.arrows) == 2 * 14  # from rank 2 to ranks 0 and 1, and to no other
    for begin, end in opened.arrows:
        assert begin["args"]["instance_id"] == end["in"]["args"]["instance_id"]
        assert begin["group"] == "rank 2 (node 0)" != end["group"]
        assert end["name"] == "rank 2 has come"
        assert end["start"] == begin["start"] == end["in"]["start"] + 30 * MS


def test_findings_have_cost_and_gain_and_what_was_not_checked_is_there(late, opened):
    report = report_on(Trace.open(late), build_timeline(Trace.open(late))).report
    by_track = defaultdict(list)
    for one in opened.of("job"):
        by_track[one["track"]].append(one)
    (verdict,) = by_track["verdict"]
    assert verdict["name"] == report.verdict
    assert verdict["args"]["clock of node 0"] == "the run's"
    assert [one["name"] for one in by_track["findings"]] == [f.title for f in report.findings]
    first = by_track["findings"][0]["args"]
    assert (first["ranks"], first["lost_ns_per_step"]) == ("2", report.findings[0].lost_ns_per_step)
    assert first["cost"].startswith("30.0 ")
    assert first["gain"] == phrases.gain(report, report.findings[0])
    assert len(by_track["not checked"]) == len(report.not_checked)
    evidence = [one["name"] for one in opened.of("findings")]
    assert evidence == [f.title for f in report.findings for _ in f.evidence]


def test_a_healthy_run_has_no_finding(tmp_path):
    opened = export(record(tmp_path / "run", {0: 40, 1: 40}), tmp_path / "out.pftrace.gz")
    assert not [one for one in opened.slices if one["track"] == "findings"]
    assert not opened.arrows


def test_what_was_not_seen_is_there(tmp_path):
    """Of three ranks one left nothing, and another lost three records between two times."""
    run = record(tmp_path / "run", {0: 40, 1: 40, 2: 40})
    for folder in run.glob("*/rank=00002"):
        shutil.rmtree(folder)
    lost = {"table": "regions", "source": "ring", "count": 3, "why": "the ring was full"}
    also(run, 1, gaps=[lost | {"start_ns": 200 * MS, "end_ns": 250 * MS}])
    opened = export(run, tmp_path / "out.pftrace.gz")
    labels = [one["name"] for one in opened.of("job") if one["track"] == "not seen"]
    assert labels[0] == "ranks 2 were not recorded"
    assert "rank 1, regions: the ring was full" in labels
    (gap,) = opened.of("gaps")
    assert (gap["group"], gap["track"], gap["name"]) == ("rank 1 (node 0)", "not seen", "regions: the ring was full")
    assert (gap["start"], gap["end"], gap["args"]["count"]) == (100 * MS, 150 * MS, 3)


def test_an_operation_that_hangs_lasts_to_the_end_and_those_at_once_share_a_title(tmp_path):
    run = record(tmp_path / "run", {0: 40, 1: 40}, after=20)
    op = {"issued_ns": 1075 * MS, "group_id": 7, "op": OPS.index("allreduce"), "dtype": 2, "device_start_ns": None}
    op |= {"is_async": True, "peer": -1, "tag": 0, "thread": 0, "size_bytes": 4096, "end_ns": None}
    numbered = ({"start_ns": (1070 + n) * MS, "seq": 100 + n, "number": 100 + n} for n in range(2))
    also(run, 0, collectives=[op | one for one in numbered])
    opened = export(run, tmp_path / "out.pftrace.gz")
    end = max(one["end"] for one in opened.slices)
    hanging = [one for one in opened.of("collectives") if one["args"].get("end") == "not seen"]
    assert [(one["start"], one["end"]) for one in hanging] == [(970 * MS, end), (971 * MS, end)]
    assert len({one["lane"] for one in hanging}) == 2
    assert {one["track"] for one in hanging} == {"group 0"}


def test_counters_are_rates_and_gauges(tmp_path):
    run = record(tmp_path / "run", {0: 40, 1: 40})
    for node in (0, 1):  # of node 1 no rank was recorded
        part = Partition(RunFolder(run), f"node={node:05}", "")
        for number, name in enumerate(("nic", "eth0", "tx_bytes", "host", "", "load_1min")):
            part.add_row("strings", {"name_id": number, "name": name})
        for second in range(1, 4):
            nic = {"source_id": 0, "device_id": 1, "name_id": 2, "value": 500.0 * second**2}
            part.add_row("counters", {"time_ns": second * 200 * MS, **nic})
            load = {"source_id": 3, "device_id": 4, "name_id": 5, "value": float(second)}
            part.add_row("counters", {"time_ns": second * 200 * MS, **load})
        part.flush()
        part.close()
    counters = export(run, tmp_path / "out.pftrace.gz").counters
    assert counters["resources of node 0", "nic eth0 tx_bytes per s"] == [(100 * MS, 7500.0), (300 * MS, 12500.0)]
    assert ("resources of node 1", "host load_1min") in counters
    assert counters["resources of node 0", "host load_1min"] == [(100 * MS, 1.0), (300 * MS, 2.0), (500 * MS, 3.0)]


# ---- what is chosen, and what is refused


def test_ranks_and_steps_are_chosen_and_times_stay_those_of_the_run(late, opened, tmp_path):
    part = export(late, tmp_path / "part.pftrace.gz", "--ranks", "0", "--steps", "5-6")
    assert part.groups == ["job", "rank 0 (node 0)", "resources of node 0"]
    assert {one["args"]["step"] for one in part.of("phases")} == {5, 6}

    def drawn(all_of: Opened, category: str) -> list:
        return [
            (one["name"], one["start"], one["end"])
            for one in all_of.of(category)
            if one["group"] == "rank 0 (node 0)" and one["args"].get("step") in (5, 6)
        ]

    for category in ("steps", "phases", "collectives"):
        assert drawn(part, category) == drawn(opened, category) != []
    last = {one["args"]["last_rank"] for one in part.of("collectives") if one["args"]}
    assert last == {2}, "the last rank is named, also where it is not in the file"
    assert not part.arrows


@pytest.mark.long
def test_what_makes_no_sense_is_refused_in_one_line_and_leaves_no_file(late, tmp_path):
    there = tmp_path / "there.pftrace.gz"
    there.write_text("mine")
    for options, said in (
        (("--ranks", "7"), "there is no rank 7: the run has ranks 0-2"),
        (("--ranks", "all"), "--ranks is as in 0-7,12; got all"),
        (("--steps", "50-60"), "there is no step 50-60: the run has steps 0-13"),
        (("--steps", "6-5"), "--steps is as in 100-110; got 6-5"),
        (("--out", str(tmp_path / "none/x.gz")), "cannot write"),
        (("--out", str(there)), f"{there} exists already"),
    ):
        target = () if "--out" in options else ("--out", tmp_path / "new.pftrace.gz")
        done = rankscope_("export", late, *target, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("rankscope: ")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.pftrace.gz"]
    assert there.read_text() == "mine"
    done = rankscope_("export", tmp_path / "nothing")
    assert (done.returncode, done.stderr) == (2, f"rankscope: {tmp_path}/nothing does not exist\n")


def test_more_events_than_a_browser_opens_are_refused_with_what_to_choose(late):
    trace = Trace.open(late)
    timeline = build_timeline(trace)
    report = report_on(trace, timeline).report
    file = io.BytesIO()
    with pytest.raises(NotExportable, match=r"^\d+ events .* 50 .* fewer with --ranks 0-7 or --steps 100-110"):
        perfetto.write(timeline, timeline, report, trace.table("gaps").collect(), file, most=50)
    assert not file.getvalue()


@pytest.mark.needs_data
def test_kernels_of_a_profilers_trace(tmp_path):
    opened = export(RESNET, tmp_path / "out.pftrace.gz")
    timeline = build_timeline(Trace.open(RESNET))
    kernels = opened.of("kernels")
    assert len(kernels) == len(timeline.kernels)
    assert (
        sum(one["end"] - one["start"] for one in kernels)
        == (timeline.kernels["end_ns"] - timeline.kernels["start_ns"]).sum()
    )
    assert {one["track"] for one in kernels} >= {"stream 7"}
    assert sum(one["args"].get("bytes", 0) for one in kernels) == timeline.kernels["bytes"].sum() > 0
    assert all(one["depth"] == 0 for one in kernels)


# ---- the pieces


@pytest.mark.parametrize("seed", range(5))
def test_a_row_holds_only_what_nests(seed):
    rng = np.random.default_rng(seed)
    start = np.sort(rng.integers(0, 300, 200))
    end = start + rng.integers(0, 60, 200)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    row = nest_rows(start, end, 200)
    for number in np.unique(row):
        open_until = []
        for a, z in zip(start[row == number], end[row == number], strict=True):
            while open_until and open_until[-1] <= a:
                open_until.pop()
            assert not open_until or z <= open_until[-1]
            open_until.append(z)


def test_calls_that_nest_are_one_row_and_what_crosses_them_another():
    events = [(0, 100), (0, 50), (10, 20), (10, 10), (40, 50), (45, 120), (100, 110)]
    start, end = (np.array(column, np.int64) for column in zip(*events, strict=True))
    assert nest_rows(start, end, 9).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert nest_rows(start, end, 1).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert nest_rows(start[:5], end[:5], 1).tolist() == [0, 0, 0, 0, 0]


def test_numbers_are_written_as_the_wire_format_has_them():
    numbers = np.array([0, 1, 127, 128, 300, 2**40, 2**63 - 1, -1])
    there = np.array([True, False] * 4)
    inner = protobuf_wire.message(11, [protobuf_wire.varint(2, numbers)], there)
    packed = protobuf_wire.message(
        1, [protobuf_wire.varint(8, numbers), protobuf_wire.fixed64(47, numbers, there), inner]
    )
    read = [fields(one) for one in fields(protobuf_wire.encoded(packed))[1]]
    assert [one[8][0] for one in read] == [int(n) % 2**64 for n in numbers]
    assert [int.from_bytes(one[47][0], "little") if one[47] else None for one in read] == [
        int(n) % 2**64 if t else None for n, t in zip(numbers, there, strict=True)
    ]
    assert [bool(one[11]) for one in read] == there.tolist()
    assert fields(protobuf_wire.one(60, protobuf_wire.one(1, 300) + protobuf_wire.one(2, "äö")))[60] == [
        b"\x08\xac\x02\x12\x04" + "äö".encode()
    ]
