"""The command line, as its user sees it: standard output, standard error, exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from rankscope.analysis.readers import json_scan
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.schema import REGION_KINDS, SCHEMA_VERSION
from rankscope.profiler import commands, main
from rankscope.profiler.commands import doctor
from support.command_line import MS, RANK, rankscope_
from support.kineto import kernel, text_of


@pytest.fixture
def run(tmp_path) -> Path:
    """One rank, ten optimizer steps of 100 ms, one gap."""
    folder = tmp_path / "run-1"
    (folder / "run").mkdir(parents=True)
    (folder / "run/node=00000.json").write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "node": 0, "state": "closed", "launch": {}})
    )
    rank = Partition(RunFolder(folder), "rank=00000", "a0-")
    rank.add_row("ranks", RANK)
    rank.add_row("strings", {"name_id": 0, "name": "SGD"})
    for step in range(10):
        end_ns = (step + 1) * 100 * MS
        region = {"start_ns": end_ns - 10 * MS, "end_ns": end_ns, "kind": REGION_KINDS.index("optimizer")}
        rank.add_row("regions", {**region, "name_id": 0, "thread": 0, "microbatch": None, "stage": None})
    rank.gap("memory", "not read", count=3)
    rank.flush()
    rank.close()
    return folder


def test_version_and_help():
    assert rankscope_("--version").stdout == f"rankscope {rankscope.__version__}\n"
    shown = rankscope_("--help")
    assert shown.returncode == 0
    for command in ("run", "exec", "report", "ls", "doctor"):
        assert f"\n  {command} " in shown.stdout
        assert "Usage: " in rankscope_(command, "--help").stdout


@pytest.mark.parametrize("command", [one.name.rstrip("_") for one in pkgutil.iter_modules(commands.__path__)])
def test_help_is_short_or_long_and_has_an_example(command, monkeypatch, capsys):
    shown = []
    for option in ("-h", "--help"):
        monkeypatch.setattr(sys, "argv", ["rankscope", command, option])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert re.search(rf"Example: (srun )?rankscope {command}\b", shown[0])


def test_a_shell_completes_commands():
    asked = {"_RANKSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "rankscope rep", "COMP_CWORD": "1"}
    assert rankscope_(**asked).stdout.split() == ["report"]
    assert "--install-completion" in rankscope_("-h").stdout


def test_the_way_to_torchrun_loads_nothing_heavy():
    loaded = (
        "import sys, rankscope.profiler.main, rankscope.profiler.commands.run; "
        "print([m for m in ('typer', 'rich', 'polars', 'pyarrow', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_ls_shows_rows_ranks_seconds_and_gaps(run):
    done = rankscope_("ls", run)
    rows = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("re")}
    assert rows == {"regions": ["10", "1", "0.9"]}
    assert re.search(r"size +bytes/row\n.* kB ", done.stdout, re.DOTALL)
    assert done.stdout.endswith("1 gap\n  rank 0, memory: not read\n")


def test_ls_has_no_sizes_of_a_trace_that_another_tool_wrote(tmp_path):
    (tmp_path / "rank0.json").write_text(text_of([kernel("gemm", 0, 10)]))
    done = rankscope_("ls", tmp_path / "rank0.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["table", "rows", "ranks", "seconds"]
    assert "MB" not in done.stdout
    (held,) = (
        one
        for one in json.loads(rankscope_("ls", tmp_path / "rank0.json", "--json").stdout)["tables"]
        if one["table"] == "kernels"
    )
    assert (held["rows"], held["size_bytes"]) == (1, None)


def test_report_prints_and_leaves_both_forms_in_the_run_folder(run):
    done = rankscope_("report", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"HTML report: {run}/report.html\n")
    written = json.loads((run / "report.json").read_text())
    assert written["verdict"] in done.stdout
    assert "<html" in (run / "report.html").read_text()


def test_report_as_json_writes_one_object_and_nothing_else(run):
    done = rankscope_("report", run, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranks"] == [0]
    assert not (run / "report.json").exists()


def test_report_where_one_may_not_write_is_a_report_all_the_same(run):
    (run / "report.json").mkdir()
    done = rankscope_("report", run, "--short")
    assert done.returncode == 0
    assert done.stderr == f"rankscope: no report.html in {run}: Is a directory; -o writes it elsewhere\n"


@pytest.mark.parametrize("short", [(), ("--short",)], ids=["more than a buffer", "less"])
def test_report_leaves_its_files_though_the_reader_of_what_it_prints_is_gone(short, run):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rankscope", "report", str(run), *short]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    assert (run / "report.json").exists()
    assert "<html" in (run / "report.html").read_text()


def test_report_goes_to_the_given_file(run, tmp_path):
    done = rankscope_("report", run, "-o", tmp_path / "r.html", "--json", tmp_path / "r.json")
    assert done.returncode == 0
    assert (tmp_path / "r.html").exists()
    assert json.loads((tmp_path / "r.json").read_text())["source"] == "native"
    assert rankscope_("report", run, "-o", tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["ls", "report"])
def test_bad_input_is_one_line_and_2(command, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/run").mkdir()
    node = run / "run/node=00000.json"
    node.write_text(node.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    for path, said in ((tmp_path / "none", "none"), (tmp_path / "empty", "empty"), (run, "99")):
        done = rankscope_(command, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("rankscope: ")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr


def test_price_of_an_hour_is_a_number_above_0(run):
    for command in ("report", "ui"):
        for price in ("0", "-1", "nan", "cheap"):
            done = rankscope_(command, run, f"--price={price}")
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == (
                f"rankscope: --price is that of an hour of one GPU, a number above 0 as in 2.5; got {price}\n"
            )
    assert json.loads(rankscope_("report", run, "--json", "-", "--price", "2.5").stdout)["rate"] == {
        "ranks": 1,
        "unit": "rank-hours",
        "price": 2.5,
    }


def test_report_in_chinese(run, tmp_path):
    done = rankscope_("report", run, "--lang", "zh", "-o", tmp_path / "r.html", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "未检查" in done.stdout
    assert '<html lang="zh-CN">' in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"].startswith(
        "No bottleneck above 1.0 % of the step in 8 analyzed steps"
    )
    for command in ("report", "ui"):
        done = rankscope_(command, run, "--lang", "tlh")
        assert (done.returncode, done.stderr) == (2, "rankscope: --lang is en or zh; got tlh\n")


def test_an_option_of_ours_among_torchruns_is_pointed_out():
    done = rankscope_("run", "--standalone", "--name", "x", "train.py")
    assert done.returncode == 2
    assert done.stderr == "rankscope: --name is rankscope's own option: put it before those of torchrun\n"


def test_doctor_names_what_cannot_be_recorded_and_why():
    done = rankscope_("doctor", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["agent"]["ok"], checks["agent"]
    assert not checks["into the ranks"]["ok"]
    assert "unset" in checks["into the ranks"]["detail"]
    assert all(check["detail"] for check in checks.values())
    assert checks["rank: memory"]["ok"]
    for package in ("deepspeed", "megatron"):
        assert checks[f"rank: {package}"]["ok"] == bool(importlib.util.find_spec(package))
    has_gpus = checks["node: gpu"]["ok"] and not checks["torch"]["detail"].endswith("+cpu")
    for name in ("device", "device_events", "device_waits", "flight_recorder"):
        assert checks[f"rank: {name}"]["ok"] == has_gpus
        assert has_gpus or "GPU" in checks[f"rank: {name}"]["detail"] or "CPUs" in checks[f"rank: {name}"]["detail"]
    assert not checks["rank: nccl"]["ok"] or has_gpus
    assert checks["compiled parts"]["ok"] == (json_scan._scan is not None)


def test_doctor_says_that_pip_found_no_compiler(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rankscope.analysis.readers._scan", None)
    doctor.command(json="-")
    (check,) = [check for check in json.loads(capsys.readouterr().out) if check["name"] == "compiled parts"]
    assert not check["ok"]
    assert "200 times slower; install a C compiler" in check["detail"]


@pytest.mark.browser
def test_report_is_printed_as_pdf_by_the_browser_at_hand(run, tmp_path):
    done = rankscope_("report", run, "--pdf", tmp_path / "report.pdf")
    assert (done.returncode, done.stderr.strip()) == (0, str(tmp_path / "report.pdf"))
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")


def test_report_without_a_browser_says_in_one_line_what_to_do_instead(run, tmp_path):
    done = rankscope_("report", run, "--pdf", tmp_path / "report.pdf", PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "rankscope: a PDF is printed by Chromium or Chrome, and none is on PATH: "
        f"-o {tmp_path / 'report.html'} writes a page to print"
    ]
