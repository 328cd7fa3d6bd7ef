"""`rankscope ui`: figures on rows a reader can check in the head, access, and every page in a real browser."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from werkzeug.test import Client
from werkzeug.wrappers import Response

from support.paths import DATA

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")


import record
import simulate
from rankscope.analysis.diagnosis.kept_report import KeptReport
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.model import digest
from rankscope.analysis.report.view import view_of
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import speaking, spoken
from rankscope.dashboard import sql
from rankscope.dashboard import state as state_module
from rankscope.dashboard.app import _show, create_app
from rankscope.dashboard.at_once import Front, at_once
from rankscope.dashboard.figures import collectives, counters, kernels, pipeline, rank_step_heatmap
from rankscope.dashboard.figures.waterfall import waterfall
from rankscope.dashboard.page_kit import all_pages
from rankscope.dashboard.sql import answer, narrowed, written
from rankscope.dashboard.state import State
from rankscope.errors import BadQuery
from support.browser import BROWSER, FLAGS, Screen

KINETO = DATA / "kineto/torchrec/resnet18"
RANKSCOPE = Path(sys.executable).with_name("rankscope")
MS = 1_000_000
OWN = {"Host": "localhost", "Sec-Fetch-Site": "same-origin"}  # what a browser says of a request by the page itself


# ---------------------------------------------------------------- figures


def grid_of(values: list[list[float]]) -> rank_step_heatmap.Grid:
    array = np.array(values, np.float32)
    rows, columns = array.shape
    return rank_step_heatmap.Grid("step", np.arange(rows, dtype=np.int32), np.arange(columns), array, 0.0, 254.0)


def test_a_cell_of_the_raster_shows_the_largest_value_in_it_and_says_whose_it_is():
    """4 ranks by 4 steps on 2 by 2 pixels; the byte is the value, since 0 to 254 is the range."""
    grid = grid_of([[1, 2, 3, 4], [5, 99, 7, 8], [float("nan")] * 4, [float("nan"), float("nan"), 0, 200]])
    view = rank_step_heatmap.View(r0=0, r1=4, c0=0, c1=4, width=2, height=2)
    order = rank_step_heatmap.rank_order(grid, [[0, 1, 2, 3]])
    assert rank_step_heatmap.picture(grid, order, view).cells.tolist() == [[99, 8], [rank_step_heatmap.MISSING, 200]]
    assert rank_step_heatmap.cell(grid, order, view, row=0, column=0) == (1, 1, 99.0)
    rank, step, value = rank_step_heatmap.cell(grid, order, view, row=2, column=1)
    assert (rank, step) == (2, 1)
    assert np.isnan(value)


def test_ranks_are_ordered_by_group_or_the_largest_first():
    grid = grid_of([[1, 1], [9, 9], [5, 5]])
    assert rank_step_heatmap.rank_order(grid, [[2], [0, 1]]).tolist() == [2, 0, 1]
    assert rank_step_heatmap.rank_order(grid, None).tolist() == [1, 2, 0]


def test_a_raster_of_4096_ranks_and_1000_steps_is_made_at_once():
    ones = np.ones((4096, 1000), np.float32)
    grid = rank_step_heatmap.Grid("step", np.arange(4096, dtype=np.int32), np.arange(1000), ones, 0.0, 2.0)
    began = time.process_time()
    cells = rank_step_heatmap.picture(
        grid, np.arange(4096), rank_step_heatmap.View(r0=0, r1=4096, c0=0, c1=1000, width=1000, height=560)
    ).cells
    assert cells.shape == (560, 1000)
    assert time.process_time() - began < 0.5


def test_bandwidth_is_drawn_with_what_would_be_possible():
    """600 kB in 360 µs and 6 MB in 3.06 ms: 60 µs and 2 GB/s; as a ring of 4 ranks 10 µs for each of 6 messages."""
    moved = pl.DataFrame(
        {"op": "allreduce", "group_id": 7, "group": "dp", "group_size": 4, "alone": True}
        | {"size_bytes": [600_000, 6_000_000] * 3, "ns": [360_000, 3_060_000] * 3}
    )
    (fit,) = collectives.fits(moved)
    assert (fit.op, fit.group, fit.ranks) == ("allreduce", "dp", 4)
    assert fit.line.latency_ns == pytest.approx(60_000)
    drawn = collectives.algorithms(fit, moved, 12.5e9)
    by_name = {trace["name"]: trace for trace in drawn["data"]}
    assert {"measured", "fitted, as ring", "double binary tree", "in-network", "network interface"} <= set(by_name)
    assert by_name["measured"]["x"] == [600_000, 6_000_000]
    assert by_name["measured"]["y"] == pytest.approx([1.5 * 600_000 / 360e-6, 1.5 * 6e6 / 3060e-6])
    fitted = by_name["fitted, as ring"]
    assert max(fitted["y"]) < 1.5 * 2e9
    assert fitted["y"] == pytest.approx([1.5 * size / (60_000 + size / 2) * 1e9 for size in fitted["x"]])
    assert by_name["network interface"]["y"] == [12.5e9, 12.5e9]


def test_cumulative_counters_are_rates_and_gauges_are_not():
    rows = pl.DataFrame(
        {
            "node": [0] * 6,
            "time_ns": [0, 10**9, 3 * 10**9] * 2,
            "source": ["nic"] * 3 + ["gpu"] * 3,
            "name": ["tx_bytes"] * 3 + ["power_w"] * 3,
            "device": ["eth0"] * 3 + ["gpu0"] * 3,
            "value": [100.0, 300.0, 300.0, 50.0, 60.0, 70.0],
        }
    )
    assert counters.series(rows, "nic", "tx_bytes")["value"].to_list() == [None, 200.0, 0.0]
    assert counters.series(rows, "gpu", "power_w")["value"].to_list() == [50.0, 60.0, 70.0]
    assert counters.changing(rows) == ([("gpu", "power_w"), ("nic", "tx_bytes")], [])


COMPUTED = dict.fromkeys(("rank", "stage"), pl.Int32) | {"name": pl.String, "microbatch": pl.Int32}
COMPUTED |= dict.fromkeys(("start_ns", "end_ns"), pl.Int64)


def test_a_pipeline_in_theory_has_the_bubble_of_its_schedule():
    """2 stages, 2 microbatches, forward 1 and backward 1: F0 F1 . B0 . B1 on stage 0; bubble 1/3 of 6."""
    f, b = pipeline.FORWARD, pipeline.BACKWARD
    rows = [(0, 0, f, 0, 0, 10), (0, 0, f, 1, 10, 20), (0, 0, b, 0, 50, 60), (0, 0, b, 1, 80, 90)]
    rows += [(1, 1, f, 0, 20, 30), (1, 1, b, 0, 30, 40), (1, 1, f, 1, 45, 55), (1, 1, b, 1, 60, 70)]
    made = pipeline.ideal(pl.DataFrame(rows, schema=COMPUTED, orient="row"))
    assert made is not None
    assert made["end_ns"].max() == 60
    busy = made.filter(pl.col("stage") == 0).select((pl.col("end_ns") - pl.col("start_ns")).sum()).item()
    assert 1 - busy / 60 == pytest.approx(1 / 3)


def test_an_ideal_rank_runs_its_chunks_one_after_the_other():
    """Stages 0 and 2 on rank 0, stage 1 on rank 1; one microbatch: F0 F1 F2 B2 B1 B0, each 10."""
    f, b = pipeline.FORWARD, pipeline.BACKWARD
    rows = [(0, 0, f, 0, 0, 10), (0, 2, f, 0, 30, 40), (0, 2, b, 0, 40, 50), (0, 0, b, 0, 90, 100)]
    rows += [(1, 1, f, 0, 15, 25), (1, 1, b, 0, 60, 70)]
    made = pipeline.ideal(pl.DataFrame(rows, schema=COMPUTED, orient="row"))
    assert made is not None
    assert made.select("stage", "start_ns").rows() == [(0, 0), (0, 50), (1, 10), (1, 40), (2, 20), (2, 30)]


# ---------------------------------------------------------------- SQL


TABLES = {"steps": pl.DataFrame({"rank": [0, 1, 2], "ns": [10, 20, 30], "arrival_spread_ns": [1, 2, 3]})}


def test_sql_answers_from_the_runs_tables():
    assert answer(TABLES, "SELECT sum(ns) AS ns FROM steps WHERE rank > 0;").to_dicts() == [{"ns": 50}]
    assert answer(TABLES, "SELECT arrival_spread_ns FROM steps LIMIT 1").to_dicts() == [{"arrival_spread_ns": 1}]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM READ_CSV ('{file}')",
        "SELECT * FROM \"read_csv\"('{file}')",
        "WITH a AS (SELECT * FROM read_csv('{file}')) SELECT * FROM a",
        "SELECT * FROM '{file}'",
        'SELECT * FROM "{file}"',
        "DROP TABLE steps",
        "SELECT * FROM steps; DROP TABLE steps",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM glob('{file}')",
        "COPY steps TO '{file}'",
        "SELECT nothing FROM steps",
        "SELECT * FROM",
        "",
    ],
)
def test_sql_that_reads_files_changes_tables_or_makes_no_sense_is_refused_in_one_line(query, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("word\nxyzzy\n")
    with pytest.raises(BadQuery) as refused:
        answer(TABLES, query.format(file=secret))
    said = str(refused.value)
    assert said
    assert "\n" not in said
    assert "xyzzy" not in said


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT " + "(" * 5_000 + "1" + ")" * 5_000, "expression depth"),
        ("SELECT 1" + " UNION ALL SELECT 1" * 2_000, "20,000 characters"),
        ("SELECT repeat('x', 1000000) FROM range(100000)", "Out of Memory|too large|too much memory"),
    ],
)
def test_sql_that_takes_too_much_is_refused_in_one_line(query, why, monkeypatch):
    monkeypatch.setattr(sql, "_MEMORY_BYTES", 128 << 20)
    with pytest.raises(BadQuery, match=why) as refused:
        answer(TABLES, query)
    assert "\n" not in str(refused.value)


def test_sql_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(sql, "_PATIENCE_S", 2.0)
    with pytest.raises(BadQuery, match="no answer within 2 s; ask for less"):
        answer(TABLES, "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t")


def test_sql_keeps_order_types_and_columns_of_one_name():
    """A union of 500 answers at once; sums of integers are integers."""
    ordered = answer(TABLES, "SELECT a.rank, b.rank FROM steps a JOIN steps b USING (ns) ORDER BY ns DESC")
    assert ordered.to_dict(as_series=False) == {"rank": [2, 1, 0], "rank_1": [2, 1, 0]}
    assert answer(TABLES, "SELECT 1" + " UNION ALL SELECT 1" * 500).shape == (501, 1)


def test_a_grids_filters_and_order_are_applied_to_all_rows():
    filters = {"ns": {"filterType": "number", "type": "greaterThan", "filter": 10}}
    found = narrowed(TABLES["steps"], filters, [{"colId": "ns", "sort": "desc"}])
    assert found["rank"].to_list() == [2, 1]
    either = {"operator": "OR", "conditions": [{"filterType": "number", "type": "equals", "filter": n} for n in (0, 2)]}
    assert narrowed(TABLES["steps"], {"rank": either}, [])["rank"].to_list() == [0, 2]


@pytest.mark.parametrize(
    "model",
    [
        {"filterType": "number", "type": "inRange", "filter": 1, "filterTo": 2},
        {"filterType": "number", "type": "notBlank"},
        *({"filterType": "number", "type": kind, "filter": 1} for kind in sql._COMPARED),
        *({"filterType": "text", "type": kind, "filter": "A'%"} for kind in sql._FOUND),
        {"operator": "AND", "conditions": [{"filterType": "text", "type": "startsWith", "filter": x} for x in "1x"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("column", ["rank", "op"])
def test_a_grids_filters_and_order_are_the_same_in_sql(model, column):
    if column == "op" and model.get("filterType") == "number" and model["type"] != "notBlank":
        return
    rows = pl.DataFrame({"rank": [2, 0, 1, None], "op": ["a'%b", "A'%", "x", "1x"]})
    order = [{"colId": "op", "sort": "desc"}, {"colId": "rank", "sort": "asc"}]
    expected = narrowed(rows, {column: model}, order)
    for query in ("SELECT * FROM rows", "SELECT rank, op FROM rows WHERE true"):
        assert answer({"rows": rows}, written(query, {column: model}, order)).equals(expected)


def test_operations_are_one_row_each_with_who_came_last():
    """Two ranks arrive at 0 and 30 µs and leave at 50; of 1 MB in 20 µs, an allreduce of two has a busbw of 50 GB/s."""
    rows = pl.DataFrame(
        {
            "instance_id": [4, 4, None],
            "rank": [0, 1, 0],
            "op": "allreduce",
            "group": "dp",
            "group_size": 2,
            "step": 7,
            "seq": 3,
            "start_ns": [0, 30_000, 60_000],
            "device_start_ns": None,
            "end_ns": [50_000, 50_000, 70_000],
            "wait_ns": [30_000, 0, None],
            "transfer_ns": [20_000, 20_000, None],
            "arrival_spread_ns": [30_000, 30_000, None],
            "is_last": [False, True, None],
            "size_bytes": [1_000_000, 1_000_000, 5],
        }
    ).cast({"device_start_ns": pl.Int64})
    (one,) = collectives.operations(rows).to_dicts()
    assert (one["op"], one["group"], one["step"], one["seq"], one["last"]) == ("allreduce", "dp", 7, 3, 1)
    assert (one["duration_ns"], one["wait_ns"], one["skew_ns"]) == (50_000, 15_000, 30_000)
    assert one["busbw_bytes_per_s"] == pytest.approx(50e9)
    drawn = collectives.skews(collectives.operations(rows))
    assert drawn is not None
    assert [sum(trace["y"]) for trace in drawn["data"]] == [1]


def test_a_kernel_leads_to_its_longest_one():
    """Of `a` 5 and 10 ns on rank 0 and 8 on rank 1: the one of 10."""
    spans = {"rank": [0, 0, 1, 1], "start_ns": [0, 10, 20, 30], "end_ns": [5, 20, 28, 31]}
    a, b = kernels.by_name(pl.DataFrame({"name": list("aaab"), "work": "compute"} | spans)).to_dicts()
    assert (a["name"], a["total_ns"], a["longest_rank"], a["start_ns"], a["end_ns"]) == ("a", 23, 0, 10, 20)
    assert (b["longest_rank"], b["start_ns"], b["end_ns"]) == (1, 30, 31)


def test_no_fit_claims_a_latency_that_is_not_seen():
    """1 MB in 1 ms and 4 MB in 4 ms: no latency at all, so there is no fit of one."""
    moved = pl.DataFrame(
        {"op": "allreduce", "group_id": 7, "group": "dp", "group_size": 4, "alone": True}
        | {"size_bytes": [1_000_000, 4_000_000] * 3, "ns": [1_000_000, 4_000_000] * 3}
    )
    assert collectives.fits(moved) == []


# ---------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def run(slow_rank_1: Path) -> Path:
    return slow_rank_1


@pytest.fixture(scope="module")
def state(run: Path, tmp_path_factory: pytest.TempPathFactory) -> State:
    """The recorded run, one in which ranks began and did nothing, and where it is there a profiler's trace."""
    empty = tmp_path_factory.mktemp("empty") / "nothing"
    for name in ("run", "ranks", "strings"):
        shutil.copytree(run / name, empty / name)
    state = State([run, empty, *([KINETO] if KINETO.exists() else [])])
    state.start()
    state.wait(100)
    return state


@pytest.fixture(scope="module")
def server(state: State, served: Any) -> Iterator[str]:
    with served(create_app(state)) as address:
        yield address


def test_the_waterfall_adds_up_to_the_step_and_each_bar_begins_where_the_last_one_ended(state):
    report = state.report("")
    (shown,) = view_of(report).of("time")
    bars = waterfall(report, digest.breakdown(report.breakdown), shown.table)
    parts = [bar for bar in bars if bar.kind == "part"]
    (step,) = [bar for bar in bars if bar.kind == "sum"]
    assert sum(float(bar.time) for bar in parts) == pytest.approx(float(step.time), abs=1e-9)
    assert sum(float(bar.share) for bar in parts) == pytest.approx(100, abs=1e-9)
    for bar, following in itertools.pairwise(parts):
        assert bar.start + bar.length == pytest.approx(following.start)
    assert parts[-1].start + parts[-1].length == pytest.approx(1)


def test_without_the_token_nothing_is_shown_and_with_it_everything_is(state):
    client = create_app(state, token="right", host="0.0.0.0").server.test_client()
    for path in ("/", "/?token=wrong", "/_dash-layout", "/assets/style.css", "/data-download?query=SELECT+1"):
        answered = client.get(path)
        assert answered.status_code == 401
        assert b"rankscope" in answered.data
        assert b"Rank 1" not in answered.data
    assert client.get("/?token=right").status_code == 302
    assert client.get("/_dash-layout").status_code == 200


def test_pages_of_other_sites_that_point_a_name_here_see_nothing(state):
    client = create_app(state).server.test_client()
    assert client.get("/_dash-layout", headers={"Host": "localhost:8050"}).status_code == 200
    assert client.get("/_dash-layout", headers={"Host": "evil.example:8050"}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/data-download?query=SELECT+1", "/ranks-data"])
def test_pages_of_other_sites_get_nothing_and_make_nothing_work(state, site, path):
    client = create_app(state).server.test_client()
    assert client.get(path, headers={"Host": "localhost", "Sec-Fetch-Site": site}).status_code == 403
    assert client.get(path, headers={"Host": "localhost", "Origin": "http://evil.example"}).status_code == 403
    body = {"output": "version.data", "inputs": []}
    posted = client.post("/_dash-update-component", json=body, headers={"Host": "localhost", "Sec-Fetch-Site": site})
    assert posted.status_code == 403
    does_work = path.startswith(("/data", "/ranks"))
    assert (client.get(path, headers={"Host": "localhost"}).status_code == 403) == does_work


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"5",
        b"{}",
        b"[" * 60_000,
        b'{"output": 5, "inputs": []}',
        b'{"output": "nothing.data", "inputs": [5]}',
        b'{"output": "..version.data...status.children...tick.disabled..", "inputs": [{"id": "url", "value": 5}]}',
    ],
)
def test_a_body_that_is_none_of_the_pages_is_one_line(state, body, capfd):
    client = create_app(state).server.test_client()
    headers = {**OWN, "Content-Type": "application/json"}
    answered = client.post("/_dash-update-component", data=body, headers=headers)
    assert answered.status_code in (400, 500)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") <= 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/assets/../state.py", 404),
        ("/assets/..%2fstate.py", 404),
        ("/data-download?run=/etc&query=SELECT+1", 404),
        ("/data-download?query=SELECT+*+FROM+read_csv('/etc/passwd')", 400),
        ("/ranks-data?quantity=step&r0=0&r1=99&c0=0&c1=1&width=9&height=9", 400),
        ("/ranks-data?quantity=secret&r0=0&r1=1&c0=0&c1=1&width=9&height=9", 404),
        ("/ranks-data?quantity=step&r0=0&r1=x", 400),
    ],
)
def test_requests_for_what_is_not_of_the_run_are_refused(state, path, code):
    client = create_app(state).server.test_client()
    assert client.get(path, headers=OWN).status_code == code


def test_downloads_are_the_whole_table(state, tmp_path):
    client = create_app(state).server.test_client()
    got = client.get("/data-download?format=parquet&query=SELECT+*+FROM+collectives", headers=OWN)
    (tmp_path / "got.parquet").write_bytes(got.data)
    assert pl.read_parquet(tmp_path / "got.parquet").equals(state.ready("").timeline.collectives)


def test_what_the_overview_lists_can_be_taken_away(state):
    """Its findings, and the parts whose means over the ranks are the waterfall: they sum to the step."""
    client, report = create_app(state).server.test_client(), state.report("")

    def taken(query):
        got = client.get("/data-download", query_string={"format": "csv", "query": query}, headers=OWN)
        return pl.read_csv(io.BytesIO(got.data))

    findings = taken("SELECT detector, title, lost_ns_per_step FROM report_findings")
    assert findings.rows() == [(f.detector, f.title, f.lost_ns_per_step) for f in report.findings]
    parts = taken("SELECT part, sum(ns_per_step) AS ns FROM report_breakdown GROUP BY part")
    assert parts["ns"].sum() / len(report.ranks) == pytest.approx(report.steps.mean_ns, rel=1e-3)
    reasons = taken("SELECT detector, why FROM report_not_checked")
    assert len(reasons) == len(report.not_checked)


def test_an_ended_run_shows_its_kept_report_while_it_is_read(run, monkeypatch):
    """The overview needs none of the run's tables; other pages say what they wait for."""
    first = State([run])
    first._read("", "")
    never = threading.Event()
    monkeypatch.setattr(state_module.Trace, "open", lambda _: never.wait())
    again = State([run])
    reading = threading.Thread(target=again._read, args=("", ""), daemon=True)
    reading.start()
    while again.report("") is None:
        time.sleep(0.01)
    assert again.ready("") is None
    assert again.report("").findings == first.report("").findings
    shown = str(_show(again, "/", "", None)[0])
    assert again.report("").verdict in shown.replace(r"\xa0", " ")
    assert "Opening" in str(_show(again, "/ranks", "", None)[0])


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """120 steps of which a quarter is held at once; rank 2 is slow in steps 20 to 49."""
    job = simulate.Job(parallel="ddp", ranks=4, steps=120, seed=3, compute_ns=90e6)
    can = simulate.healthy_resources(job)
    can.slowness[20:50, 2] *= 1.5
    run = record.write(simulate.run(job, can), tmp_path / "run")
    rows = memory_budget.bytes_of_rows(Trace.open(run).reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.253)
    return run


def test_while_the_other_steps_of_a_long_run_are_analyzed_the_overview_says_so(long_run, monkeypatch):
    state, seen, whole_run = State([long_run]), [], state_module.with_whole_run

    def slowly(*asked):
        seen.append(str(_show(state, "/", "", None)[0]))
        return whole_run(*asked)

    monkeypatch.setattr(state_module, "with_whole_run", slowly)
    state._read("", "")
    (early,), (page, _, name, *_) = seen, _show(state, "/", "", None)
    assert "The other steps are being analyzed" in early
    assert "this is of steps 90-119 of 120" in early
    assert "being analyzed" not in str(page)
    assert "Rank 2 is slow" in str(page)
    assert "tables of steps 90-119 of 120" in str(name)


def test_the_heat_map_has_every_step_of_a_run_that_is_too_long_to_be_held(long_run, monkeypatch):
    """A file that is torn leaves its steps empty."""
    run, most = long_run, memory_budget._MOST

    def shown(**more):
        state = State([run])
        state._read("", "")
        assert state.ready("").trace.stretch.first == 90
        client = create_app(state).server.test_client()
        view = {"quantity": "own", "r0": 0, "r1": 4, "c0": 0, "c1": 120, "width": 120, "height": 4, **more}
        got = client.get("/ranks-data", query_string=view, headers=OWN)
        return got if more else np.frombuffer(got.data, np.uint8).reshape(4, 120)

    cells = shown()
    dark = cells[2] >= 200
    assert dark[20:50].all()
    assert dark[50:].sum() < 5
    assert (cells[[0, 1, 3], 20:50] >= 200).sum() < 5
    assert not (cells == rank_step_heatmap.MISSING).any()
    about = json.loads(shown(row=2, column=25).data)
    assert about["text"].startswith("rank 2 on node 0, step 25\nown work: 13")
    assert about["text"].endswith(f"rankscope ui {run}/steps=5-45")
    monkeypatch.setattr(rank_step_heatmap, "_MOST_CELLS", 4 * 50)
    state = State([run])
    state._read("", "")
    assert rank_step_heatmap.grid(state.ready("").timeline, "own", state.ready("").steps).steps[0] == 40
    assert "Steps before 40 are too many" in str(_show(state, "/ranks", "", None)[0])
    monkeypatch.undo()
    monkeypatch.setattr(memory_budget, "_MOST", most)
    file = next(file for file in (run / "summary").glob("steps-*") if not re.search("-0-|-119", file.name))
    first, last = map(int, file.stem.split("-")[1:])
    file.write_bytes(file.read_bytes()[:-100])
    empty = (shown() == rank_step_heatmap.MISSING).all(axis=0)
    assert np.flatnonzero(empty).tolist() == list(range(first, last + 1))
    assert json.loads(shown(row=2, column=first).data)["text"] == f"rank 2 on node 0, step {first}\nnot analyzed"


def test_the_command_says_where_it_serves_and_ends_when_interrupted(run):
    """A page is there although the analysis has only begun; no other address is listened on."""
    command = [str(RANKSCOPE), "ui", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("rankscope: http://localhost:")
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors == ""


def test_a_run_that_is_not_there_is_one_line(tmp_path):
    done = subprocess.run([RANKSCOPE, "ui", tmp_path / "none"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"rankscope: {tmp_path / 'none'} does not exist\n"


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def screen(server: str) -> Iterator[Screen]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(60_000)
        yield Screen(page, server)
        browser.close()


# What each page shows of a run recorded by rankscope, one without rows, and a profiler's trace.
SHOWN = {
    "overview": ("Where a step's time goes", "No step could be split into its parts", "Where a step's time goes"),
    "timeline": ("rank 1", "", "rank 1"),
    "ranks": ("One row per rank", "No steps to show", "One row per rank"),
    "compare": ("From rank", "There is no step that both have", "From rank"),
    "collectives": ("Bandwidth by size", "No collectives", "Arrival skew"),
    "pipeline": ("No pipeline", "No pipeline", "No pipeline"),
    "host": ("By rank, mean per analyzed step", "Nothing of the host", "From launch to start on the device"),
    "flame": ("samples", "No flame graph", "No flame graph"),
    "nodes": ("host: cpu busy", "No counters", "No counters"),
    "memory": ("By rank", "No memory", "No memory"),
    "kernels": ("No kernels", "No kernels", "Device work by name"),
    "what_if": ("What if", "Nothing can be predicted", "What if"),
    "diff": ("Nothing to compare", "Nothing to compare", "Nothing to compare"),
    "data": ("download csv", "Data", "download csv"),
}


@pytest.mark.browser
@pytest.mark.parametrize(
    "which", [0, 1, pytest.param(2, marks=pytest.mark.needs_data)], ids=["recorded", "empty", "profiler"]
)
def test_every_page_loads_without_a_complaint_and_without_asking_another_host(screen, state, which):
    assert set(SHOWN) == set(all_pages())
    key = state.keys[which]
    for name, page in all_pages().items():
        screen.open(f"/{'' if name == 'overview' else name}?run={key}")
        screen.page.locator(f"a.nav-link.on:has-text('{page.title}')").wait_for()
        if SHOWN[name][which] and name != "timeline":
            screen.wait_for_text(SHOWN[name][which])
    screen.page.wait_for_load_state("networkidle")
    assert screen.complaints == []


@pytest.mark.browser
def test_a_flame_graph_is_searched_and_enlarged_and_the_address_says_so(screen):
    screen.open("/flame?rank=1")
    screen.wait_for_text("longer than on the others")
    every = screen.page.locator(".flame a")
    every.first.wait_for()
    said = [call.lower() for call in every.evaluate_all("(calls) => calls.map((call) => call.ariaLabel)")]
    calls = [call.split()[0] for call in said if not call.startswith("▶")]
    once = next(call for call in calls if sum(call in other for other in said) == 1)
    field = screen.page.get_by_role("textbox", name="Search")
    field.fill(once)
    field.press("Enter")
    screen.page.locator(".flame .dimmed").first.wait_for()
    assert f"find={once}" in unquote_plus(screen.page.url)
    assert screen.page.locator(".flame a:not(.dimmed)").count() == 1
    screen.page.locator(".flame a:not(.dimmed)").first.click()
    screen.page.get_by_role("link", name="Show all calls").wait_for()
    assert "root=" in screen.page.url
    assert once in (every.first.get_attribute("aria-label") or "").lower()
    assert screen.complaints == []


@pytest.mark.browser
@pytest.mark.long
def test_every_page_of_512_ranks_loads(served, screen, tmp_path):
    """A simulated job in which one rank is slow."""
    job = simulate.Job(parallel="ddp", ranks=512, steps=6, buckets=2, compute_ns=90e6)
    slow = simulate.healthy_resources(job)
    slow.slowness = slow.slowness * np.where(np.arange(512) == 300, 1.4, 1.0)
    state = State([record.write(simulate.run(job, slow), tmp_path / "run")])
    state.start()
    state.wait(300)
    page = screen.page.context.browser.new_page()
    page.set_default_timeout(60_000)
    with served(create_app(state)) as address:
        wide = Screen(page, address)
        wide.open("/")
        wide.wait_for_text("Rank 300 is slow")
        for name, of_name in all_pages().items():
            if name == "diff":  # of one run there is none
                continue
            wide.open(f"/{'' if name == 'overview' else name}")
            page.locator(f"a.nav-link.on:has-text('{of_name.title}')").wait_for()
            if name not in ("timeline", "memory"):  # the ranks' memory was not recorded
                wide.wait_for_text(SHOWN[name][0])
        page.wait_for_load_state("networkidle")
        page.close()  # while the server answers
    assert wide.complaints == []


def test_each_browser_has_its_language(state):
    server = create_app(state, lang="en").server
    asked, other = server.test_client(), server.test_client()
    said = [
        b'<html lang="zh-CN">' in asked.get(path, headers={"Host": "localhost"}).data for path in ("/?lang=zh", "/")
    ]
    assert said == [True, True]
    assert b'<html lang="en">' in other.get("/?lang=tlh", headers={"Host": "localhost"}).data


@pytest.mark.browser
def test_the_verdict_can_be_read_before_the_scripts_have_arrived(screen, state):
    with speaking("zh"):
        report = spoken(state.report(""))
    context = screen.page.context.browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{screen.base}/?lang=zh")
    assert page.locator(".verdict h1").inner_text().replace("\u00a0", " ") == report.verdict
    assert page.locator(".finding h3").count() == len(report.findings)
    page.goto(f"{screen.base}/ranks?lang=en")
    assert page.locator(".verdict").count() == 0
    context.close()
    screen.open("/")
    screen.page.locator(".verdict").wait_for()  # of more than one it would complain


def test_what_a_job_names_is_text_in_the_first_page(state):
    shown = at_once(replace(state.report(""), verdict='<script>alert("1")</script>'))
    assert "<h1>&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;</h1>" in shown


def test_a_browser_reads_the_kept_verdict_while_the_app_is_imported(run, state, tmp_path):
    def later(environ, start_response):
        return Response("the app")(environ, start_response)

    opens = {"Sec-Fetch-Mode": "navigate"}
    kept = tmp_path / "run"
    shutil.copytree(run, kept)
    KeptReport([kept], ReportOptions()).keep(state.report(""))
    front = Front(kept, price=None, lang="en", hosts=("localhost",))

    def asked(path, of=front, **headers):
        return Client(of).get(path, headers={"Host": "localhost"} | headers).text.replace("\u00a0", " ")

    assert state.report("").verdict in asked("/", **opens)
    assert state.report("").verdict not in asked("/ranks", **opens)
    with speaking("zh"):
        assert spoken(state.report("")).verdict in asked("/?lang=zh", **opens)
    others = [{}, opens | {"Host": "elsewhere"}]  # scripts, and names that another site has given to this machine
    with ThreadPoolExecutor(len(others)) as pool:
        waiting = [pool.submit(asked, "/", **headers) for headers in others]
        time.sleep(0.3)
        assert not any(one.done() for one in waiting)
        front.open(later)
        assert [one.result(timeout=10) for one in waiting] == ["the app", "the app"]
    assert asked("/", **opens) == "the app"
    assert f"Opening {run.name} …" in asked("/", Front(run, price=2.5, lang="en", hosts=("localhost",)), **opens)


@pytest.mark.long
@pytest.mark.browser
def test_pages_are_light_and_their_scripts_are_sent_once(screen):
    """Bytes on the wire of the first visit; of the second, what is not a script."""
    sent: list[int] = []

    def begin() -> Any:
        page = screen.page.context.browser.new_context().new_page()
        wire = page.context.new_cdp_session(page)
        wire.send("Network.enable")
        wire.on("Network.loadingFinished", lambda event: sent.append(event["encodedDataLength"]))
        return page

    def visit(page: Any, path: str, shown: str) -> int:
        sent.clear()
        page.goto(screen.base + path)
        page.locator(shown).first.wait_for(timeout=60_000)
        page.wait_for_load_state("networkidle")
        return sum(sent)

    page = begin()
    overview = visit(page, "/", ".verdict h1")
    page.context.close()
    page = begin()
    collectives = visit(page, "/collectives", ".js-plotly-plot")
    again = visit(page, "/collectives", ".js-plotly-plot")
    page.context.close()
    assert 0 < overview < 1.2e6
    assert collectives < 2.6e6
    assert again < 0.2e6


def test_a_script_that_has_not_changed_is_not_sent_again(state):
    client = create_app(state).server.test_client()
    path = "/_dash-component-suites/dash/dcc/async-graph.js"
    packed = client.get(path, headers={**OWN, "Accept-Encoding": "gzip"})
    plain = client.get(path, headers=OWN)
    assert gzip.decompress(packed.data) == plain.data
    smaller = client.get(path, headers={**OWN, "Accept-Encoding": "gzip, br"})
    unpacked = pa.Codec("brotli").decompress(smaller.data, decompressed_size=len(plain.data), asbytes=True)
    assert (smaller.headers["Content-Encoding"], unpacked) == ("br", plain.data)
    assert len(smaller.data) < len(packed.data)
    assert plain.headers.get("Content-Encoding") is None
    unchanged = client.get(path, headers={**OWN, "Accept-Encoding": "gzip", "If-None-Match": packed.headers["ETag"]})
    assert (unchanged.status_code, unchanged.data) == (304, b"")


@pytest.mark.long
@pytest.mark.browser
def test_pages_in_chinese_leave_no_english_sentence(screen):
    page = screen.page.context.browser.new_context().new_page()
    page.add_init_script("""
        const fill = CanvasRenderingContext2D.prototype.fillText;
        window.drawn = new Set();
        CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
          window.drawn.add(text);
          fill.call(this, text, ...place);
        };""")
    page.goto(f"{screen.base}/data?lang=zh&sql=SELECT rank FROM regions WHERE rank > 99")
    page.locator(".ag-overlay-no-rows-center", has_text="没有行").wait_for(timeout=60_000)
    for name in ("overview", "ranks", "host", "nodes", "data", "what_if", "timeline"):
        page.goto(f"{screen.base}/{'' if name == 'overview' else name}?lang=zh")
        with speaking("zh"):
            title = spoken(all_pages()[name].title)
        page.locator(f"a.nav-link.on:has-text('{title}')").wait_for()
        page.locator("#page h1, #timeline[data-painted]").first.wait_for()
        assert re.findall(r"(?:[a-z']{2,}[,:;]? ){4,}[a-z']{2,}", page.inner_text("body")) == []
        if name == "nodes":
            page.get_by_text("host：CPU 忙碌").first.wait_for()
        if name == "timeline":
            drawn = page.evaluate("[...window.drawn]")
            assert {"主线程", "距第一个事件的时间"} <= set(drawn)
            assert [said for said in drawn if re.search(r"(?:[a-z]{2,} ){2,}[a-z]{2,}", said)] == []
    page.context.close()


@pytest.mark.browser
def test_the_verdict_is_there_and_a_finding_opens_its_evidence(screen, state):
    report = state.report("")
    number, finding = next((n, f) for n, f in enumerate(report.findings, 1) if f.evidence)
    evidence = finding.evidence[0]
    screen.load("/?run=")
    screen.page.get_by_role("heading", name=report.verdict).wait_for()
    names = screen.page.locator(f"#finding-{number} a.button").all_inner_texts()
    assert len(set(names)) == len(names)
    assert names[0].startswith("Show: rank 1, step ")
    screen.page.locator(f"#finding-{number} a.button").first.click()
    screen.page.wait_for_selector("#timeline[data-painted]")
    screen.page.wait_for_url("**/timeline?*#*")
    start, end = (int(edge) for edge in screen.page.url.partition("#")[2].partition("&")[0].split(","))
    assert start <= evidence.start_ns
    assert evidence.end_ns <= end
    assert end - start < 3 * max(evidence.end_ns - evidence.start_ns, 1000)
    assert screen.complaints == []


@pytest.mark.browser
def test_every_page_has_the_color_of_the_verdict(screen, state):
    color = "getComputedStyle(document.querySelector('{}')).borderLeftColor"
    screen.open("/?run=")
    verdict = screen.page.locator(f".verdict.{digest.status(state.report(''))}")
    verdict.wait_for()
    on_overview = screen.page.evaluate(color.format(".verdict"))
    screen.open("/ranks")
    screen.page.locator(".verdict-line", has_text=state.report("").verdict).wait_for()
    assert screen.page.evaluate(color.format(".verdict-line")) == on_overview


@pytest.mark.browser
def test_a_cell_of_the_raster_says_its_value_and_opens_the_timeline(screen, state):
    screen.open("/ranks")
    canvas = screen.page.locator(".raster canvas")
    canvas.wait_for()
    screen.page.wait_for_selector(".raster-rows span")
    box = canvas.bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    last = state.ready("").timeline.steps["step"].max()
    screen.wait_for_text(f"rank 1 on node 0, step {last}")
    screen.page.mouse.click(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    screen.page.wait_for_selector("#timeline[data-painted]")
    assert screen.complaints == []


@pytest.mark.long
@pytest.mark.browser
def test_sql_answers_and_says_in_one_line_why_it_does_not(screen, state):
    from playwright.sync_api import expect

    screen.open("/data")
    box = screen.page.get_by_label("SQL")
    box.fill("SELECT rank, count(*) AS n FROM steps GROUP BY rank ORDER BY rank")
    screen.page.get_by_role("button", name="Ask").click()
    screen.page.get_by_text("2 rows", exact=True).wait_for()
    cells = screen.page.locator(".ag-cell[col-id=n]")
    counted = state.ready("").timeline.steps.group_by("rank").len().sort("rank")["len"].to_list()
    expect(cells).to_have_text([str(count) for count in counted], timeout=60_000)
    box.fill("SELECT * FROM read_csv('/etc/passwd')")
    screen.page.get_by_role("button", name="Ask").click()
    screen.wait_for_text("only the run's own tables can be read here")
    assert screen.complaints == []
