"""How far a command is: said on a terminal only, and only after a while."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import heard_by, reached, told
from rankscope.profiler import progress


class Terminal(io.StringIO):
    """Standard error of a terminal, which notes when something is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, said: str) -> int:
        written = super().write(said)
        if "/5" in self.getvalue():
            self.drawn.set()
        return written


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: between a fixture and its test pytest puts another standard error there."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


@pytest.mark.parametrize(("language", "said"), [("en", "checks 3/5"), ("zh", "检查 3/5")])
def test_a_terminal_shows_how_far_a_long_command_is(monkeypatch, language, said):
    screen = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_AFTER_S", 0.0)
    with progress.shown(language):
        reached(text("checks"), 3, 5)
        assert screen.drawn.wait(20)
    assert said in screen.getvalue()


def test_a_short_command_shows_nothing(monkeypatch):
    screen = terminal(monkeypatch)
    with progress.shown():
        reached(text("checks"), 3, 5)
    assert screen.getvalue() == ""


def test_a_file_gets_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_AFTER_S", 0.0)
    with progress.shown():
        reached(text("checks"), 3, 5)
    assert capsys.readouterr().err == ""


def test_items_are_reported_one_by_one():
    heard = []
    with heard_by(lambda *said: heard.append(said)):
        assert list(told("ranks", "ab", 2)) == ["a", "b"]
    assert heard == [("ranks", 0, 2), ("ranks", 1, 2), ("ranks", 2, 2)]


def test_a_report_reports_files_and_checks(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "pid": 0, "tid": 7, "args": {"device": 0}}
    (tmp_path / "rank0.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": [kernel]}))
    heard = []
    with heard_by(lambda *said: heard.append(said)):
        diagnose(Trace.open(tmp_path / "rank0.json"))
    assert ("files", 1, 1) in heard
    checks = [(done, of) for what, done, of in heard if what == "checks"]
    assert checks == [(done, len(checks) - 1) for done in range(len(checks))]
