"""Every text has its Chinese: the catalog covers what the code can say, and a report in Chinese is Chinese."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.model.finding import Report
from rankscope.analysis.report import html, json_form, terminal
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import joined, plural, speaking, spoken, text
from rankscope.analysis.text.phrases import counted, named
from support.by_hand import run
from support.paths import DATA, ROOT

SAYING = ("text", "plural")


def test_every_text_is_translated_and_nothing_else_is():
    """What fails here is put right by `make texts` and by translating what it then lists."""
    assert runpy.run_path(str(ROOT / "tools/texts.py"))["problems"]("zh") == []


def test_a_sentence_of_a_detector_is_a_text():
    """What is three words long in a detector and no docstring goes through `text`, or it could not be translated."""
    plain = []
    for path in sorted((ROOT / "analysis" / "detectors").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts_ = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in SAYING]
        skipped = {id(part) for node in texts_ for part in ast.walk(node)} | {id(part) for part in documentation(tree)}
        for node in ast.walk(tree):
            said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in skipped and re.search(r"[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}", said):
                plain.append(f"{path.name}:{node.lineno}: {said}")
    assert plain == []


def documentation(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield node.value


def test_text_keeps_what_it_was_made_of_wherever_it_goes():
    rank = text("rank {rank}", rank=2)
    late = text("{who} is late by {ms:.1f} ms", who=rank, ms=3.25)
    for same in (late, pickle.loads(pickle.dumps(late)), copy.deepcopy(late)):
        assert (same, same.template, same.values["who"].values) == (
            "rank 2 is late by 3.2 ms",
            late.template,
            {"rank": 2},
        )
    assert json.dumps({"said": late}) == '{"said": "rank 2 is late by 3.2 ms"}'
    assert (late + "!", joined("; ", ["a", late])) == (f"{late}!", f"a; {late}")
    with speaking("zh"):
        assert spoken([joined(", ", [counted(3, "rank"), named("node", (1,))])]) == ["3 个 rank、节点 1"]
        assert spoken(late) == late  # the catalog does not have it


def test_plural_follows_its_number_in_each_language():
    late = [
        plural(
            "{ranks} waits {time} {often} for the next batch",
            "{ranks} wait {time} {often} for the next batch",
            len(ranks),
            ranks=named("Rank", ranks),
            time="2 ms",
            often=text("per step"),
        )
        for ranks in ((3,), (3, 4))
    ]
    assert late == ["Rank 3 waits 2 ms per step for the next batch", "Ranks 3,4 wait 2 ms per step for the next batch"]
    with speaking("zh"):
        assert spoken(pickle.loads(pickle.dumps(late))) == [
            "Rank 3 每步等待下一个 batch 2 ms",
            "Rank 3,4 每步等待下一个 batch 2 ms",
        ]


PUBLIC = ("kineto/tb-plugin-workers0", "ops/bytedance-st")


@pytest.mark.parametrize("source", ["by hand", *(pytest.param(name, marks=pytest.mark.needs_data) for name in PUBLIC)])
def test_report_in_chinese_leaves_no_english_sentence_and_the_json_english(source):
    report = (
        diagnose(run({0: 40, 1: 70, 2: 40}), ReportOptions(price=2.5))
        if source == "by hand"
        else diagnose(Trace.open(recorded(DATA / source)))
    )
    in_json = json_form.render(report)
    page = html.render(report, language="zh")
    assert page.startswith('<!doctype html>\n<html lang="zh-CN">')
    read = re.sub(r"<(style|code)>.*?</\1>|<[^>]+>", "\n", page, flags=re.DOTALL)
    terminal_ = terminal.render(report, language="zh") + terminal.render_short(report, language="zh")
    for said in (read, terminal_):
        assert re.findall(r"(?:[A-Za-z']{2,}[,:;]? ){3,}[A-Za-z']{2,}", said) == []
    assert max(map(cell_len, terminal_.splitlines())) <= 100
    assert json_form.render(report) == in_json
    assert json.loads(in_json)["verdict"] == report.verdict


def recorded(path: Path) -> list[Path]:
    return [path] if any(path.glob("*.json*")) else sorted(path.iterdir())[:1]


def test_slow_rank_in_chinese():
    report = spoken_in("zh", diagnose(run({0: 40, 1: 70}), ReportOptions(price=30.0)))
    assert report.verdict == (
        "Rank 1 偏慢：每步比其他 rank 多计算 30.0 ms（占平均步时 150 ms 的 20.0 %）；1 个 rank 在等待它；"
        "每小时费用 60 中损失 12。"
    )
    assert {check.detector: check.why for check in report.not_checked}["memory_pressure"] == (
        "没有看到设备的显存分配器；rank 自身的内存不能说明问题"
    )


def spoken_in(language: str, report: Report) -> Report:
    with speaking(language):
        return spoken(report)
