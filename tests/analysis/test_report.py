"""What a reader of a report relies on, in each of its three forms."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from rankscope.analysis.model.finding import (
    REST,
    Blame,
    Clock,
    DevicePart,
    Evidence,
    Fidelity,
    Finding,
    Gap,
    Healthy,
    NotChecked,
    Part,
    PathPart,
    PredictedFix,
    Rate,
    Report,
    StepSummary,
    Wait,
)
from rankscope.analysis.model.parts import OWN_WORK
from rankscope.analysis.report import html, json_form, terminal
from rankscope.analysis.report.view import view_of
from rankscope.analysis.text.units import (
    duration,
    duration_with_error,
    percent,
    percent_at_least,
    ranges,
    rounded,
    shares,
)
from support.report_schema import SCHEMA, check

MS = 1_000_000

EMPTY = Report(
    path="runs/empty",
    source="native",
    verdict="There is nothing to judge.",
    ranks=(),
    world_size=None,
    nodes=(),
    rate=Rate(ranks=0, unit="rank-hours"),
    steps=StepSummary(count=0, warmup=0, outliers=0, mean_ns=None, median_ns=None, p90_ns=None, source="none"),
    findings=(),
    healthy=(),
    not_checked=(NotChecked(detector="slow_rank", why="no 'collectives' table"),),
    breakdown=(),
)


def slow_rank(rank: int, **changes: object) -> Finding:
    finding = Finding(
        detector="slow_rank",
        severity="high",
        title=f"Rank {rank} computes more slowly than its peers",
        where="forward",
        advice=f"Look at the clocks of rank {rank}.",
        ranks=(rank,),
        lost_ns_per_step=38 * MS,
        lost_ns_total=380 * MS,
        lost_fraction=0.19,
        uncertainty_ns=2 * MS,
        gain_fraction=0.185,
        confidence="likely",
        evidence=(Evidence(table="regions", rank=rank, start_ns=10**9, end_ns=10**9 + 140 * MS, note="forward"),),
        parts=OWN_WORK,
    )
    return dataclasses.replace(finding, **changes)


def job(world: int = 4, culprit: int = 2, **changes: object) -> Report:
    """Every rank's step is 200 ms; the culprit computes 140 ms of it, the others 100 ms, and they wait 40 ms more."""
    parts = []
    for rank in range(world):
        late = rank == culprit
        own = {"compute": 140 if late else 100, "input": 10, "transfer": 40, "wait": 10 if late else 50}
        parts += [Part(rank=rank, part=part, ns_per_step=ms * MS) for part, ms in own.items()]
    report = Report(
        path="runs/train",
        source="native",
        verdict=f"Rank {culprit} is slow and the others wait for it.",
        ranks=tuple(range(world)),
        world_size=world,
        nodes=(0,),
        rate=Rate(ranks=world, unit="GPU-hours"),
        steps=StepSummary(
            count=10,
            warmup=2,
            outliers=1,
            mean_ns=200 * MS,
            median_ns=200 * MS,
            p90_ns=210 * MS,
            source="rankscope.step()",
        ),
        findings=(slow_rank(culprit),),
        healthy=(Healthy(detector="gc_stall", resolution_ns=800_000), Healthy(detector="recompile")),
        not_checked=(NotChecked(detector="slow_link", why="all ranks are on one node"),),
        breakdown=tuple(parts),
        waits=tuple(
            Wait(
                rank=r,
                waited_ns=(100 if r == culprit else 500) * MS,
                caused_ns=(500 * world - 400) * MS * (r == culprit),
            )
            for r in range(world)
        ),
        blames=(Blame(rank=culprit, part="compute", label="forward", waited_ns=1600 * MS, blocked_ns=400 * MS),),
        critical_path=(
            PathPart(rank=culprit, part="compute", label="forward", ns_per_step=150 * MS),
            PathPart(rank=None, part="transfer", label="allreduce", ns_per_step=40 * MS),
            PathPart(rank=None, part=REST, label="", ns_per_step=10 * MS),
        ),
        fixes=(
            PredictedFix(
                fix=f"rank:{culprit}",
                step_ns=163 * MS,
                gain_ns=37 * MS,
                gain_fraction=0.185,
                uncertainty_ns=2 * MS,
                finding="slow_rank",
            ),
            PredictedFix(fix="gc", step_ns=190 * MS, gain_ns=10 * MS, gain_fraction=0.05, uncertainty_ns=MS),
        ),
        fidelity=Fidelity(steps=10, median_error=0.002, p90_error=0.005, mean_error=-0.001),
        clocks=(Clock(node=0, offset_ns=0, drift_ppm=0.0, error_ns=0, source="reference"),),
        matched_fraction=1.0,
        step_ns=dict.fromkeys(range(world), (200 * MS,) * 10),
        environment={"torch": "2.13.0"},
    )
    return dataclasses.replace(report, **changes)


def with_gaps() -> Report:
    """Ranks 3 and 5 of 6 left nothing; rows were lost on two of the others and, uncounted, on node 1."""
    whole = job(world=6)
    kept = (0, 1, 2, 4)
    return dataclasses.replace(
        whole,
        ranks=kept,
        nodes=(0, 1),
        breakdown=tuple(part for part in whole.breakdown if part.rank in kept),
        waits=(),
        step_ns={rank: whole.step_ns[rank] for rank in kept},
        gaps=(
            Gap(table="collectives", rank=0, node=0, count=100, why="the ring was full"),
            Gap(table="collectives", rank=1, node=0, count=23, why="the ring was full"),
            Gap(table="counters", rank=None, node=1, count=None, why="no RDMA devices"),
            Gap(table="regions", rank=4, node=0, count=1, why="the file was cut"),
        ),
        clocks=(
            Clock(node=0, offset_ns=0, drift_ppm=0.0, error_ns=0, source="reference"),
            Clock(node=1, offset_ns=5_000_000_000, drift_ppm=1.5, error_ns=None, source="none"),
        ),
        matched_fraction=0.9996,
    )


def with_devices() -> Report:
    device = DevicePart(
        rank=0,
        window_ns=100,
        busy_ns=80,
        idle_ns=20,
        compute_ns=60,
        communication_ns=30,
        memory_ns=0,
        overlap_ns=10,
        exposed_ns=20,
    )
    return job(device=(device,))


REPORTS = {
    "finding": job(),
    "healthy": job(findings=()),
    "gaps": with_gaps(),
    "devices": with_devices(),
    "one rank": job(world=1, culprit=0),
    "one step": job(step_ns={0: (200 * MS,), 1: (200 * MS,), 2: (200 * MS,), 3: ()}),
    "many ranks": job(world=70, culprit=33),
    "unknown names": job(
        breakdown=(Part(rank=0, part="new_part", ns_per_step=5),), findings=(slow_rank(2, detector="new"),)
    ),
    "not a number": job(findings=(slow_rank(2, lost_fraction=float("nan"), gain_fraction=float("inf")),)),
    "empty": EMPTY,
}
every_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())


class Page(HTMLParser):
    """The text that a reader sees, the tags, and the attributes of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(source)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() != "<style>":
            self.text += f" {data} "


# numbers


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 µs"),
        (38_123_456, "38.1 ms"),
        (182 * MS, "182 ms"),
        (999_600, "1.00 ms"),
        (9_996_000, "10.0 ms"),
        (59 * 10**9, "59.0 s"),
        (3 * 3600 * 10**9, "3.00 h"),
        (-1_500, "-1.50 µs"),
    ],
)
def test_a_duration_has_a_fitting_unit_and_three_digits(ns: int, text: str):
    assert duration(ns) == text


def test_an_error_has_the_unit_of_its_value():
    assert duration_with_error(38_123_456, 210_000) == "38.1 ± 0.21 ms"
    assert duration_with_error(-42, 19_123) == "0 ± 19 µs"
    assert duration_with_error(644_321, 3_123_456) == "0.6 ± 3.1 ms"


def test_percent_never_rounds_a_rest_away():
    assert [percent(f) for f in (0, 0.0004, 0.042, 0.21, 0.9906, 0.9994, 0.9996, 1)] == [
        "0 %",
        "< 0.1 %",
        "4.2 %",
        "21.0 %",
        "99.1 %",
        "99.9 %",
        "> 99.9 %",
        "100 %",
    ]
    assert percent(float("nan")) == "?"


def test_a_lower_bound_of_a_share_is_a_number():
    assert [percent_at_least(f) for f in (0, 0.00042, 0.042)] == ["0 %", "0.04 %", "4.2 %"]


def test_ranges_name_every_number():
    assert ranges([8, 0, 1, 2, 3]) == "0-3,8"
    assert ranges([5, 6]) == "5,6"


def test_rounded_values_sum_to_the_rounded_total():
    assert rounded([14, 14, 14], 10) == [2, 1, 1]  # 42 is 4 tens, not 3
    assert shares([1, 1, 1]) == ["33.4", "33.3", "33.3"]


# JSON


@every_report
def test_json_is_strict_and_as_the_schema_says(report: Report):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(json_form.render(report), parse_constant=refuse)
    check(document, SCHEMA, "report")
    assert set(document) == set(SCHEMA["properties"])


def test_json_holds_the_documented_values():
    document = json.loads(json_form.render(job()))
    assert document["schema_version"] == 1
    assert document["steps"]["median_ns"] == 200 * MS
    assert document["healthy"] == ["gc_stall", "recompile"]
    assert document["resolution"] == {"gc_stall": 800_000, "recompile": None}
    assert document["not_checked"] == [{"detector": "slow_link", "why": "all ranks are on one node", "unclear": False}]
    assert document["waits"][2] == {"rank": 2, "waited_ns": 100 * MS, "caused_ns": 1600 * MS}
    assert document["blames"] == [
        {"rank": 2, "part": "compute", "label": "forward", "waited_ns": 1600 * MS, "blocked_ns": 400 * MS}
    ]
    assert document["critical_path"][1] == {
        "rank": None,
        "part": "transfer",
        "label": "allreduce",
        "ns_per_step": 40 * MS,
    }
    assert sum(part["ns_per_step"] for part in document["critical_path"]) == 200 * MS
    [finding] = document["findings"]
    assert (finding["detector"], finding["ranks"], finding["lost_ns_per_step"]) == ("slow_rank", [2], 38 * MS)
    assert finding["evidence"][0]["rank"] == 2


def test_json_says_null_where_there_is_no_number():
    [finding] = json.loads(json_form.render(REPORTS["not a number"]))["findings"]
    assert (finding["lost_fraction"], finding["gain_fraction"]) == (None, None)


# one view, drawn by every form


@every_report
def test_terminal_and_page_show_every_fact_of_the_view_in_the_same_digits(report: Report):
    view = view_of(report)
    said = [*view.facts, view.warning, view.no_finding]
    said += [fact.value for shown in view.findings for fact in shown.facts]
    for section in view.sections:
        rows = [*section.table.rows, section.table.total] if section.table else []
        cells = [cell for row in rows for cell in row]
        said += [section.title, section.means, *cells] if section.key != "method" else []
    drawn = {"terminal": one_line(terminal.render(report, width=2000)), "page": Page(html.render(report)).text}
    for form, text in drawn.items():
        assert [fact for fact in said if one_line(fact) not in text] == [], form


# terminal


@every_report
@pytest.mark.parametrize("render", [terminal.render, terminal.render_short])
def test_terminal_fits_its_width_and_is_plain_without_colour(render, report: Report):
    for width in (100, 80):
        text = render(report, width=width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text


def test_terminal_and_page_say_what_a_step_waits_for():
    text = one_line(terminal.render(job()))
    assert "75.0 % 150 ms 2 compute forward 20.0 % 40.0 ms all transfer allreduce 5.0 % 10.0 ms the rest" in text
    assert "400 ms 2 compute forward" in text
    page = html.render(job())
    assert "What a step waits for" in page
    assert "<td>allreduce</td>" in page


def test_the_causes_of_waits_that_are_shown_add_up_to_all_of_them():
    """Of 100, 50, 2 and 1 ms on a rank each and 3 on others, the small ones are the rest."""
    causes = {0: 100, 1: 50, 2: 2, 3: 1, None: 3}
    blames = [
        Blame(rank=rank, part="compute" if rank is not None else "rest", label="", waited_ns=0, blocked_ns=ms * MS)
        for rank, ms in causes.items()
    ]
    text = terminal.render(dataclasses.replace(job(), blames=tuple(blames)), width=100)
    rows = [line.split() for line in text.partition("what it did longer\n")[2].splitlines()[:3]]
    assert rows == [["100", "ms", "0", "compute"], ["50.0", "ms", "1", "compute"], ["6.00", "ms", "the", "rest"]]


def test_terminal_has_colour_where_asked():
    assert "\x1b[" in terminal.render_short(job(), color=True)


@pytest.mark.parametrize("render", [terminal.render, terminal.render_short])
def test_terminal_says_who_what_cost_gain_and_what_to_do(render):
    text = one_line(render(job()))
    for expected in (
        "Rank 2 is slow and the others wait for it.",
        "rank 2",
        "38.0 ± 2.0 ms per step (19.0 %), 380 ms in total",
        "about 18.5 % shorter (37.0 ms)",
        "Look at the clocks of rank 2.",
        "GC stall",
        "slow link",
    ):
        assert expected in text


def test_a_job_that_hangs_has_no_cost_per_step():
    standing = slow_rank(2, detector="hang", lost_fraction=1.0, lost_ns_per_step=0, lost_ns_total=0, gain_fraction=1.0)
    report = job(findings=(standing,), fixes=(), fidelity=None)
    for text in (terminal.render_short(report), html.render(report)):
        assert "everything: the job makes no progress" in text
        assert "0 ns per step" not in text
        assert "0 ± " not in text
        assert "± is the 95 % confidence interval over" not in text  # where no ± is shown


def test_short_form_shows_where_the_step_goes():
    # mean over 4 ranks: compute (3 × 100 + 140) / 4, wait (3 × 50 + 10) / 4
    line = "200.0 ms = compute 55.0 % + transfer 20.0 % + wait 20.0 % + input 5.0 %"
    assert line in one_line(terminal.render_short(job()))


def test_short_form_says_from_which_loss_on_a_healthy_check_would_have_shown_it():
    report = job(findings=(), healthy=(Healthy(detector="slow_rank", resolution_ns=62 * MS),))
    assert "slow rank (limit 31.0 %)" in one_line(terminal.render_short(report))


def test_short_form_says_how_many_findings_it_leaves_out():
    text = terminal.render_short(job(findings=tuple(slow_rank(rank) for rank in range(4))))
    assert "Rank 2 computes" in text
    assert "Rank 3 computes" not in text
    assert "and 1 more, of 4 in total" in text


def test_per_rank_rows_sum_to_the_step():
    """9.99 + 8.88 + 7.77 + 3.36 ms are 30.00 ms, in whatever digits they are shown."""
    times = {"compute": 9_994_999, "input": 8_884_999, "transfer": 7_774_999, "wait": 3_345_003}
    report = job(breakdown=tuple(Part(rank=r, part=p, ns_per_step=ns) for r in (0, 1) for p, ns in times.items()))
    rows = re.findall(r"^[01] +([\d.]+ .*[\d.]+)$", terminal.render(report), re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        *parts, step = (float(number) for number in row.split())
        assert sum(parts) == pytest.approx(step, abs=1e-9)
        assert step == 30.0


def test_many_ranks_show_the_extremes_and_name_the_rest():
    text = one_line(terminal.render(job(world=70, culprit=33)))
    assert re.search(r"33 +140\.0", text)
    assert "Shown: 8 of 70 ranks" in text
    assert "Not shown: ranks 7-32,34-69" in text


@pytest.mark.parametrize("render", [terminal.render, terminal.render_short])
def test_terminal_shows_gaps_and_missing_ranks(render):
    text = one_line(render(with_gaps()))
    assert "Not recorded: ranks 3,5." in text
    assert "collectives ranks 0,1, 123 rows missing: the ring was full" in text
    assert "regions rank 4, 1 row missing: the file was cut" in text
    assert "no RDMA devices" in text


def test_terminal_says_which_clocks_cannot_be_trusted():
    text = one_line(terminal.render(with_gaps()))
    assert "times across nodes are not to be trusted" in text
    assert "> 99.9 % of the collectives' rows were matched" in text


def test_terminal_escapes_control_sequences_and_takes_no_markup():
    text = terminal.render(job(verdict="\x1b[2Jgone [bold red]x[/]", path="a\rb"), color=True)
    assert "\x1b[2J" not in text
    assert "\r" not in text
    assert "[bold red]x[/]" in text


def test_colour_needs_a_terminal_and_no_veto(monkeypatch):
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.wants_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.wants_color(Terminal())


@pytest.mark.parametrize("render", [terminal.render, terminal.render_short])
def test_nothing_checked_is_not_called_healthy(render):
    text = one_line(render(EMPTY))
    assert "nothing could be checked, so the job may not be healthy" in text
    assert "no ranks recorded" in text


def one_line(text: str) -> str:
    return " ".join(text.split())


# HTML


@every_report
def test_page_is_whole_and_loads_nothing(report: Report):
    source = html.render(report)
    page = Page(source)
    assert page.text.startswith("rankscope report")
    assert report.verdict in page.text
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert all(name not in ("src", "xlink:href", "action") for name, _ in page.attributes)
    assert all(value.startswith("#finding-") for name, value in page.attributes if name == "href")
    assert not re.search(r"url\((?!#)", source)
    assert "@import" not in source
    assert "http" not in source
    assert "NaN" not in source


def test_page_says_who_what_cost_gain_and_what_to_do():
    text = Page(html.render(job())).text
    for expected in (
        "Rank 2 computes more slowly than its peers",
        "38.0 ± 2.0 ms per step (19.0 %), 380 ms in total",
        "about 18.5 % shorter (37.0 ms)",
        "Look at the clocks of rank 2.",
        "Marked: rank 2, 150 ms. Dashed: median of the others, 110 ms.",  # own work: compute and input
        "detection limit 800 µs per step (0.4 %)",
        "all ranks are on one node",
        "2.13.0",
    ):
        assert expected in text


def test_page_begins_with_the_verdict_and_the_findings_with_their_advice():
    """What to do comes before where the time goes."""
    text = Page(html.render(job())).text
    parts = ("Rank 2 computes more slowly than its peers", "Look at the clocks of rank 2.", "Where a step's time goes")
    order = [text.index(part) for part in parts]
    assert order == sorted(order)


def test_a_finding_about_all_ranks_sets_none_of_them_off():
    everyone = slow_rank(0, detector="load_imbalance", ranks=(0, 1, 2, 3))
    text = Page(html.render(job(findings=(everyone,)))).text
    assert "From 110 ms to 150 ms." in text
    assert "Marked" not in text


def test_page_table_adds_up_to_the_mean_step():
    numbers = re.findall(r'<td class="number">([\d.]+)</td><td class="number">([\d.]+)</td>', html.render(job()))
    *parts, total = [(float(ms), float(share)) for ms, share in numbers]
    assert total == (200.0, 100.0)
    assert sum(ms for ms, _ in parts) == pytest.approx(200.0)
    assert sum(share for _, share in parts) == pytest.approx(100.0)


def test_page_bars_of_a_rank_fill_its_step():
    """All ranks take the longest step, 200 ms, so the pieces of each bar fill the 848 px between the labels."""
    widths = re.findall(r'y="40" width="([\d.]+)" height="15"', html.render(job()))
    assert sum(float(width) for width in widths) == pytest.approx(848, abs=0.3)


def test_page_shows_gaps_missing_ranks_and_bad_clocks():
    text = Page(html.render(with_gaps())).text
    assert "Not recorded: ranks 3,5." in text
    assert text.count("not recorded") == 2  # their two rows among the bars
    assert "collectives ranks 0,1, 123 rows missing the ring was full" in text
    assert "counters node 1 no RDMA devices" in text
    assert "times across nodes are not to be trusted" in text


def test_page_escapes_names():
    nasty = "<script>alert(1)</script>"
    finding = slow_rank(2, title=nasty, where=nasty, advice=nasty, groups=(nasty,), caused_by=nasty)
    source = html.render(
        job(
            path=nasty,
            verdict=nasty,
            findings=(finding,),
            environment={nasty: nasty},
            not_checked=(NotChecked(detector=nasty, why=nasty),),
            gaps=(Gap(table=nasty, rank=None, node=None, count=1, why=nasty),),
            breakdown=(Part(rank=0, part='"><script>', ns_per_step=200 * MS), Part(rank=1, part="wait", ns_per_step=1)),
        )
    )
    assert "<script" not in source
    assert "&lt;script&gt;alert(1)" in source
    assert '""' not in source.replace('=""', "")


def test_page_of_a_path_that_is_not_unicode_can_be_written():
    html.render(job(path="runs/\udcff")).encode("utf-8")


def test_page_of_512_ranks_stays_small():
    steps = {rank: tuple((150 + (rank * 7 + step * 13) % 100) * MS for step in range(300)) for rank in range(512)}
    gaps = tuple(Gap(table="collectives", rank=r, node=r // 8, count=r, why="the ring was full") for r in range(512))
    source = html.render(job(world=512, culprit=137, step_ns=steps, gaps=gaps))
    assert len(source.encode()) < 2_000_000
    text = Page(source).text
    assert "Marked: rank 137, finding 1." in text
    assert "collectives ranks 0-511, 130816 rows missing the ring was full" in text


def test_page_of_an_empty_report_says_why_instead_of_drawing():
    page = Page(html.render(EMPTY))
    assert "rect" not in page.tags[page.tags.index("main") :]
    assert "No step could be split into its parts" in page.text
    assert "nothing could be checked, so the job may not be healthy" in page.text
    assert "no 'collectives' table" in page.text
