"""The worked examples of docs/how-to/extend.md do what they say, each as the file that it would be."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.collectors import node, rank
from rankscope.collectors.node import Node
from rankscope.collectors.schema import TABLES
from rankscope.dashboard.page_kit import Page
from rankscope.errors import BadInput, Unavailable
from support import by_hand

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "extend.md"


def example(section):
    """The module that a section shows."""
    code = re.search(rf"^## {section}\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    module = ModuleType(section.replace(" ", "_"))
    exec(compile(code, f"{PAGE.name}, {section}", "exec"), module.__dict__)
    return module


def test_detector_finds_an_optimizer_of_10_ms_in_a_step_of_100_ms():
    detector = example("A detector")
    breakdown = build_timeline(by_hand.run({0: 20, 1: 20})).breakdown
    (found,) = detector.detect(breakdown)
    assert (found.title, found.lost_ns_per_step) == ("The optimizer takes 10.0 % of the step", 10_000_000)
    assert detector.detect(breakdown, min_fraction=0.11) == []
    assert detector.resolution_ns(breakdown) == 10_000_000


def test_collector_reads_a_counter_or_says_that_there_is_none(tmp_path):
    collector = example("A collector").collector
    of = Node(addresses=frozenset(), gap=lambda *_: None, proc=tmp_path)
    with pytest.raises(Unavailable):
        collector.start(of)
    (tmp_path / "loadavg").write_text("0.50 0.40 0.30 3/812 4711\n")
    collector.start(of)
    assert list(collector.sample(of)) == [("load", "running_tasks", "", 3), ("load", "tasks", "", 812)]


def test_reader_gives_a_run_that_can_be_reported_on(tmp_path):
    reader = example("A reader").reader
    file = tmp_path / "spans.csv"
    file.write_text("rank,name,start_us,end_us\n0,forward,0,5\n1,forward,1,8.5\n")
    assert reader.recognises(file)
    assert not reader.recognises(PAGE)
    opened = reader.open_run([str(file)])
    assert opened.read("regions")["end_ns"].to_list() == [5000, 8500]
    report = diagnose(Trace(paths=(str(file),), source="csv", run={}, reader=opened))
    assert report.ranks == (0, 1)
    assert not report.healthy
    file.write_text("rank,name,start_us,end_us\n0,forward,0,\n")
    with pytest.raises(BadInput, match="line 2"):
        reader.open_run([str(file)])


def test_command_prints_its_line(monkeypatch):
    app = typer.Typer()
    app.command()(example("A command").command)
    monkeypatch.setattr(Trace, "open", lambda _: by_hand.run({0: 20, 1: 20, 2: 20}))
    assert CliRunner().invoke(app, ["RUN"]).output == "Ranks 0-2 were recorded.\n"


def test_page_shows_what_is_known():
    page = example("A page of the browser").page
    assert isinstance(page, Page)
    report = replace(diagnose(by_hand.run({0: 20, 1: 20})), environment={"torch": "2.9"})
    shown = page.layout(SimpleNamespace(report=report), {})
    assert "torch: 2.9" in str(shown)


def test_every_collector_declares_itself_and_fills_tables_of_the_schema():
    importlib.import_module("torch")  # as in a rank, where the job has imported it
    for package, of in ((rank, rank.Collector), (node, node.Collector)):
        for module in pkgutil.iter_modules(package.__path__):
            collector = importlib.import_module(f"{package.__name__}.{module.name}").collector
            assert isinstance(collector, of), module.name
            assert set(getattr(collector, "tables", ())) <= set(TABLES), module.name
