"""The report on a run that has ended is kept in its folder: the next one reads none of the run's tables."""

import json
import os
import subprocess
import sys

import pytest

from faults import Case, simulated
from rankscope.analysis.diagnosis import diagnose
from rankscope.analysis.diagnosis.kept_report import report_of
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.report import html, json_form, terminal
from rankscope.errors import BadInput
from record import write
from simulate import Job, healthy_resources, run

KEPT = "summary/report.json"


@pytest.fixture
def recorded(tmp_path):
    """40 steps on 4 ranks, of which rank 2 computes 8 % longer, all of it closed."""
    job = Job(parallel="ddp", ranks=4, steps=40, seed=3, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness[:, 2] *= 1.08
    folder = write(run(job, can), tmp_path / "run")
    for node in folder.glob("run/node=*.json"):
        node.write_text(json.dumps(json.loads(node.read_text()) | {"state": "closed"}))
    return folder


@pytest.fixture
def no_tables(monkeypatch):
    """Make opening a run fail."""

    def refuse(*_):
        raise BadInput("its tables are read")

    return lambda: monkeypatch.setattr(diagnose.Trace, "open", refuse)


def test_the_second_report_is_the_first_one_without_reading_a_table(recorded, no_tables):
    first = report_of(recorded)
    no_tables()
    again = report_of(recorded)
    assert json_form.render(again) == json_form.render(first)
    assert terminal.render(again, width=100) == terminal.render(first, width=100)
    for language in ("en", "zh"):
        assert html.render(again, language=language) == html.render(first, language=language)


def test_a_kept_hang_says_what_it_said(tmp_path, no_tables):
    """Its title is made of an operation, which is kept as what it says of itself."""
    folder = write(simulated(Case("hang", "loud", 0), small=True)[0], tmp_path / "run")
    for node in folder.glob("run/node=*.json"):
        node.write_text(json.dumps(json.loads(node.read_text()) | {"state": "closed"}))
    first = report_of(folder)
    no_tables()
    assert [finding.detector for finding in first.findings] == ["hang"]
    assert [finding.title for finding in report_of(folder).findings] == [first.findings[0].title]


def test_a_change_of_all_ranks_is_kept_and_shown_as_json(tmp_path):
    can = healthy_resources(job := Job(parallel="ddp", ranks=4, steps=60, seed=3, compute_ns=90e6))
    can.slowness[30:] *= 1.3
    folder = write(run(job, can), tmp_path / "changed")
    for node in folder.glob("run/node=*.json"):
        node.write_text(json.dumps(json.loads(node.read_text()) | {"state": "closed"}))
    (finding,) = json.loads(json_form.render(report_of(folder)))["findings"]
    assert (finding["detector"], (folder / KEPT).exists()) == ("step_change", True)


@pytest.mark.parametrize(
    "shown",
    [
        "from rankscope.profiler.commands import report; report.command(run=[run])",
        "from rankscope.profiler.commands import ui; ui._serve = os._exit = lambda *_: None; ui.command(run=[run])",
        "from rankscope.dashboard.at_once import Front; assert Front(run, price=None, lang='en', hosts=())._report",
    ],
    ids=["report", "ui", "first page"],
)
def test_what_is_kept_is_shown_without_numpy_and_polars(shown, recorded):
    """To import them takes half of the time."""
    report_of(recorded)
    loaded = "print([m for m in ('numpy', 'polars', 'pyarrow') if m in sys.modules], file=sys.stderr)"
    code = f"import os, sys, pathlib; run = pathlib.Path({str(recorded)!r}); {shown}; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n", done.stderr


def test_one_on_the_last_steps_is_kept_where_these_are_all(recorded, no_tables):
    """As `rankscope run` makes it at the end of a job."""
    first = report_of(recorded, recent=True)
    no_tables()
    assert json_form.render(report_of(recorded)) == json_form.render(first)


def test_a_report_says_the_path_by_which_it_was_asked_for(recorded, monkeypatch):
    report_of(recorded)
    monkeypatch.chdir(recorded.parent)
    assert report_of("run").path == "run"


def test_other_files_or_another_question_get_a_report_of_their_own(recorded, no_tables):
    report_of(recorded)
    no_tables()
    with pytest.raises(BadInput, match="its tables are read"):
        report_of(recorded, ReportOptions(price=3))
    with pytest.raises(BadInput, match="its tables are read"):
        report_of(recorded / "steps=10-30")
    os.utime(next(recorded.glob("phases/*/*.arrow"), next(recorded.rglob("*.arrow"))), ns=(1, 1))
    with pytest.raises(BadInput, match="its tables are read"):
        report_of(recorded)


def test_that_on_a_running_job_is_not_kept(recorded):
    node = next(recorded.glob("run/node=*.json"))
    node.write_text(json.dumps(json.loads(node.read_text()) | {"state": "running"}))
    report_of(recorded)
    assert not (recorded / KEPT).exists()


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"made_of": 3}', "null"])
def test_a_torn_one_is_made_anew(recorded, torn):
    said = json_form.render(report_of(recorded))
    whole = (recorded / KEPT).read_text()
    (recorded / KEPT).write_text(torn)
    assert json_form.render(report_of(recorded)) == said
    assert (recorded / KEPT).read_text() == whole


def test_one_that_rankscope_cannot_have_written_is_made_anew(recorded):
    said = json_form.render(report_of(recorded))
    held = json.loads((recorded / KEPT).read_text())
    for verdict in ({"template": "{a.__class__}", "values": {"a": "x"}, "forms": None}, 5):
        held["value"]["verdict"] = verdict
        (recorded / KEPT).write_text(json.dumps(held))
        assert json_form.render(report_of(recorded)) == said
