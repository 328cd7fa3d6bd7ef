"""One error tree, and what each kind of error makes a command exit with."""

from __future__ import annotations

import ast
import inspect

import pytest

from rankscope import errors
from rankscope.profiler import main
from support.paths import ROOT

INTERNAL = {"IncompleteError", "InvariantError", "MalformedError", "_BadRequest", "_DoubtError", "_Unusable"}


def test_every_error_is_in_the_tree_or_does_not_leave_its_package():
    elsewhere = set()
    for folder in ("analysis", "collectors", "dashboard", "profiler"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                bases = {getattr(base, "id", "") for base in node.bases} if isinstance(node, ast.ClassDef) else set()
                if any(base.endswith(("Exception", "Error")) for base in bases):
                    elsewhere.add(node.name)
    assert elsewhere <= INTERNAL
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert all(issubclass(kind, errors.RankscopeError) for kind in kinds)
    assert {kind.__name__ for kind in kinds} == set(errors.__all__)


@pytest.mark.parametrize(("kind", "status"), [(errors.BadInput, 2), (errors.BadFix, 2), (errors.NotReplayable, 1)])
def test_an_error_is_one_line_and_its_class_gives_the_exit_status(kind, status, monkeypatch, capsys):
    def fail(arguments):
        raise kind("run/meta.json is empty: record the job again")

    monkeypatch.setattr(main, "_dispatch", fail)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == status
    assert capsys.readouterr().err == "rankscope: run/meta.json is empty: record the job again\n"
