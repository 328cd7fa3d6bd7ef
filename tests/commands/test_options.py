"""An option that several commands have is the same everywhere: its name, short form, value, help and meaning."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import typer

from rankscope.profiler import commands, options
from record import write
from simulate import Job, healthy_resources
from simulate import run as simulated

MODULES = {
    one.name.rstrip("_"): import_module(f"{commands.__name__}.{one.name}")
    for one in pkgutil.iter_modules(commands.__path__)
}
SHARED = {"--steps", "--world", "--ranks", "--out", "--json", "--lang", "--price"}


def rankscope_(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two ranks, steps 0 to 19."""
    job = Job(parallel="ddp", ranks=2, steps=20, compute_ns=90e6)
    return write(simulated(job, healthy_resources(job)), tmp_path_factory.mktemp("options") / "run")


def test_an_option_is_the_same_wherever_it_is():
    app = typer.Typer()
    for name, module in MODULES.items():
        if hasattr(module, "command"):
            app.command(name)(module.command)
    said: dict[str, set[object]] = {}
    for command in typer.main.get_command(app).commands.values():
        for one in command.params:
            if one.param_type_name == "option":
                meaning = (tuple(one.opts), one.metavar, one.help, repr(one.default), one.envvar)
                said.setdefault(max(one.opts, key=len), set()).add(meaning)
    assert said.keys() >= SHARED
    assert {name: held for name, held in said.items() if len(held) > 1} == {}


def test_run_and_exec_explain_their_options_in_the_same_words():
    """They are no typer commands, since most of their arguments belong to another program."""
    run_, exec_ = (
        {line for line in MODULES[name].__doc__.splitlines() if line.startswith("  ")} for name in ("run", "exec")
    )
    explained = {line for line in run_ if line.startswith("  --")}
    assert explained - exec_ == {"  --no-report    record only"}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--json"], ["--json=-"]),
        (["--json", "--short"], ["--json=-", "--short"]),
        (["--json", "a.json", "run"], ["--json", "a.json", "run"]),
        (["--json", "-", "run"], ["--json", "-", "run"]),
    ],
)
def test_json_without_a_path_is_standard_output(arguments, seen):
    assert options.with_json_path(arguments) == seen


def test_a_command_about_a_run_takes_a_part_of_it_in_a_language_and_gives_json():
    """What writes a file of its own has no JSON, and what writes no sentences no language."""
    of_runs = {"check", "diff", "export", "ls", "report", "scaling", "ui", "whatif"}
    has = {
        name: set(re.findall(r"^    (\w+): (?:Steps|World|Json|Lang)\b", inspect.getsource(MODULES[name]), re.M))
        for name in of_runs
    }
    assert {name for name in of_runs if {"steps", "world"} <= has[name]} == of_runs
    assert {name for name in of_runs if "lang" in has[name]} == of_runs - {"export"}
    assert {name for name in of_runs if "json" in has[name]} == of_runs - {"export", "ui"}


@pytest.mark.parametrize("command", [("report",), ("ls",), ("check",), ("whatif", "--fix", "rank:1"), ("doctor",)])
def test_json_goes_to_standard_output_or_a_file_and_is_the_same(command, run, tmp_path):
    arguments = [*command, *([run] if command[0] != "doctor" else [])]
    printed = rankscope_(*arguments, "--json")
    kept = rankscope_(*arguments, "--json", tmp_path / "said.json")
    assert (kept.returncode, kept.stderr) == (0, f"{tmp_path / 'said.json'}\n")
    written = (tmp_path / "said.json").read_text(encoding="utf-8")
    if command[0] == "doctor":  # how long the agent took, and what is free, differ
        assert [one["name"] for one in json.loads(written)] == [one["name"] for one in json.loads(printed.stdout)]
    else:
        assert written == printed.stdout
    assert not kept.stdout.startswith(("{", "["))
    assert kept.stdout


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """Four ranks, of which rank 2 takes half again as long."""
    job = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness = can.slowness * np.array([1.0, 1.0, 1.5, 1.0])
    return write(simulated(job, can), tmp_path_factory.mktemp("options") / "slow")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("ls", "{slow}"), "没有缺口"),
        (("whatif", "{slow}", "--fix", "rank:2", "--fix", "gc"), "已评估各步的平均"),
        (("diff", "{slow}", "{slow}"), "平均步时"),
        (("diff", "{run}", "{slow}"), "A 有 2 个 rank"),
        (("check", "{slow}"), "未通过："),
        (("check", "{slow}", "--against", "{run}"), "允许值为"),
        (("scaling", "{run}", "{slow}", "--weak"), "弱扩展（由参数指定），以 2 个 rank 的"),
        (("scaling", "{run}", "{slow}", "--strong"), "没有合适的定律："),
        (("doctor",), "在训练进程中运行"),
    ],
)
def test_a_command_in_chinese_leaves_no_english_sentence(command, said, run, slow):
    """Names, and what is quoted of the system behind a Chinese sentence, stay as they are."""
    done = rankscope_(*(word.format(run=run, slow=slow) for word in command), "--lang", "zh")
    assert done.stderr == ""
    assert said in done.stdout
    assert re.findall(r"(?:[a-z']{2,}[,:;]? ){3,}[a-z']{2,}", done.stdout) == []


@pytest.mark.long
def test_steps_are_those_of_the_path(run):
    by_option = json.loads(rankscope_("report", run, "--steps", "5-14", "--json").stdout)
    by_path = json.loads(rankscope_("report", run / "steps=5-14", "--json").stdout)
    assert by_option == by_path
    assert by_option["steps"]["count"] == 10
    assert rankscope_("ls", run, "--steps", "5-14").stdout == rankscope_("ls", run / "steps=5-14").stdout
    assert rankscope_("ls", run, "--world", "0").returncode == 0


def test_what_cannot_be_meant_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "trace.json").write_text("[]")
    for command, said in {
        ("ls", str(run), "--steps", "9-3"): "--steps is as in 100-110; got 9-3",
        ("check", str(run), "--steps", "all"): "--steps is as in 100-110; got all",
        ("ls", str(run), "--world", "7"): f"{run} has no world=7: the last is world=0",
        ("report", "trace.json", "--steps", "1-2"): "trace.json is no run folder, and is read as a whole: "
        "leave --steps and --world away",
        ("report", str(run), "--out", "none/r.html"): "cannot write none/r.html: No such file or directory",
    }.items():
        done = rankscope_(*command, cwd=tmp_path)
        assert (done.returncode, re.sub(r"^rankscope: ", "", done.stderr)) == (2, f"{said}\n")
