"""The phrases of a report's view: texts with its numbers put in."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rankscope.analysis.model.digest import GapGroup, is_healthy
from rankscope.analysis.model.finding import (
    COUNTED,
    LEAST_GAIN,
    REST,
    Blame,
    Clock,
    CodeShare,
    Evidence,
    Finding,
    GroupState,
    Lead,
    Look,
    Operator,
    PathPart,
    PhaseTime,
    PredictedFix,
    Report,
    Span,
    Wait,
    Window,
)
from rankscope.analysis.model.money import HOUR_NS, cost_of, is_standstill, money_text
from rankscope.analysis.model.parts import BEGAN_LATE, IDLE_LABELS, LEFT_LATE, part_change
from rankscope.analysis.report.labels import detector_name, part_short, say, together
from rankscope.analysis.text.message import spoken, text, translated
from rankscope.analysis.text.phrases import counted, how_to_profile, named, place_in_code, some_ranges
from rankscope.analysis.text.units import (
    duration,
    duration_with_error,
    percent,
    percent_at_least,
    percent_at_most,
    ranges,
)

__all__ = [
    "STATE_COLUMNS",
    "clock_error",
    "code_means",
    "code_row",
    "cost",
    "cost_per_step",
    "evidence",
    "fix_row",
    "fixes_mean",
    "gain",
    "gap_extent",
    "head_facts",
    "healthy_items",
    "known_columns",
    "label",
    "lead_line",
    "level",
    "no_finding",
    "of_last",
    "one_or_many",
    "operator_row",
    "others_waited",
    "path_row",
    "phase_rows",
    "resolution",
    "state_row",
    "wait_lines",
    "who",
    "window_lines",
]


_MUCH_IDLE, _MOSTLY = 0.03, 0.5  # of the step, as host_bound judges


def lead_line(lead: Lead, windows: Sequence[Window]) -> str:
    """Return which is the limit, host or device, as far as CUDA events show, and what shows more."""
    ahead, idle = duration(lead.ahead_ns), percent_at_most(lead.idle_fraction)
    profiled = [window.number for window in windows if window.kernels]
    more = say("lead.window", profiled[-1]) if profiled else how_to_profile()
    if lead.idle_fraction < _MUCH_IDLE:
        return say("lead.device", ahead, idle)
    if lead.paced_fraction >= _MOSTLY:
        return say("lead.host", percent(lead.paced_fraction), idle, more)
    return say("lead.open", ahead, idle, more)


def phase_rows(phases: Sequence[PhaseTime]) -> list[tuple[str, ...]]:
    """One row per phase, in their order: its name, mean, least and most over ranks, communication, how far ahead."""
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(phase.phase for phase in phases):
        of_ranks = [phase for phase in phases if phase.phase == name]
        if not any(phase.ns_per_step for phase in of_ranks):
            continue
        least, most = (f(of_ranks, key=lambda phase: phase.ns_per_step) for f in (min, max))
        took = [phase.communication_ns_per_step for phase in of_ranks]
        known = [ns for ns in took if ns is not None]
        rows.append(
            (
                name,
                duration(statistics.mean(phase.ns_per_step for phase in of_ranks)),
                *(say("phases.of_rank", duration(phase.ns_per_step), phase.rank) for phase in (least, most)),
                duration(statistics.mean(known)) if len(known) == len(took) else say("phases.communication.unknown"),
                duration(statistics.median(phase.ahead_ns for phase in of_ranks)),
            )
        )
    return rows


_COMPARED = 50  # steps suffice for small differences
_PARTS = 3  # of a step, that say how another phase of the run differs
_CHANGED = 1.03  # a span of steps is that much longer than another
_OWN_LABELS = frozenset({LEFT_LATE, BEGAN_LATE, *IDLE_LABELS})


def one_or_many(kind: str, numbers: tuple[int, ...]) -> str:
    """`rank 2`, `ranks 0-3,8`; `kind` is `rank` or `node`."""
    return say(f"who.{kind}" if len(set(numbers)) == 1 else f"who.{kind}s", some_ranges(numbers))


def who(ranks: tuple[int, ...], nodes: tuple[int, ...] = (), groups: tuple[str, ...] = ()) -> str:
    """Everyone concerned, none left out."""
    said = [one_or_many("rank", ranks)] if ranks else []
    if nodes:
        said.append(one_or_many("node", nodes))
    if groups:
        said.append(say("who.group" if len(groups) == 1 else "who.groups", together(", ", groups)))
    return together("; ", said) or say("who.all")


def head_facts(report: Report) -> list[str]:
    steps = report.steps
    facts = [_recorded_ranks(report)]
    if steps.count:
        facts += [say("head.steps", steps.count), say("head.step_source", steps.source)]
        if steps.warmup or steps.outliers:
            key = "head.steps.set_aside.time" if steps.outliers_fraction else "head.steps.set_aside"
            facts.append(say(key, steps.warmup, steps.outliers, percent(steps.outliers_fraction)))
    else:
        facts.append(say("head.steps.none"))
    if steps.mean_ns is not None:
        facts.append(say("head.mean", duration(steps.mean_ns)))
    if steps.median_ns is not None and steps.count > 1:
        facts.append(say("head.median", duration(steps.median_ns)))
    if steps.p90_ns is not None and steps.count > 1:
        facts.append(say("head.p90", duration(steps.p90_ns)))
    if report.utilisation is not None:
        peak = report.utilisation.peak_flops / 1e12 / len(report.ranks)
        share = report.utilisation.counted
        key = "mfu" if share is None else "hfu" if share >= COUNTED else "hfu.least"
        share_of_peak = (percent if key != "hfu.least" else percent_at_least)(report.utilisation.mfu)
        facts.append(say(f"head.{key}", share_of_peak, peak, percent(share or 0.0)))
    return [*facts, say("source", report.source)]


def history_lines(report: Report) -> list[str]:
    """Return how long the steps of the whole run are, where only some were read, and how to see what changed."""
    history = report.history
    if history is None:
        return []
    read, fast, slow = history.read, *(f(history.spans, key=lambda span: span.median_ns) for f in (min, max))
    held, medians = ranges(read.steps), (duration(read.median_ns), duration(history.median_ns))
    if history.analyzed:
        lines = [
            say("history.analyzed", history.analyzed, history.count, history.stretches),
            say("history.held", held, history.rank, *medians),
        ]
    else:
        lines = [say("history.read", held, history.count, history.rank, *medians), say("history.recent")]
    if slow.median_ns >= _CHANGED * fast.median_ns:
        ends = ((duration(span.median_ns), named("step", span.steps)) for span in (fast, slow))
        lines.append(say("history.changed", *(said for end in ends for said in end)))
        if not history.looks and not history.analyzed and min(fast.first, slow.first) >= history.kept:
            most = max(len(read.steps), _COMPARED)  # many more might not fit
            lines.append(say("history.diff", *(f"{s.first}-{min(s.last, s.first + most - 1)}" for s in (fast, slow))))
    lines += [_looked(look, read) for look in history.looks]
    known_before = history.analyzed - (history.count - history.kept)
    if history.kept and known_before > 0:
        lines.append(say("history.evicted", history.kept, known_before))
    elif history.kept:
        lines.append(say("history.kept", history.kept))
    return lines


def of_last(report: Report) -> str:
    """Say of a long run that something is of its last steps only."""
    history = report.history
    return say("history.of_last", ranges(history.read.steps)) if history and history.analyzed else ""


def _looked(look: Look, read: Span) -> str:
    """Return how a phase of the run differs from the steps that were read."""
    length, steps = _span_facts(look.phase)
    if look.others:
        steps = text("{steps}, and {others},", steps=steps, others=counted(look.others, "other phase"))
    more_ns = look.phase.median_ns - read.median_ns
    line = say("look.longer" if more_ns > 0 else "look.shorter", steps, length, percent(abs(more_ns) / read.median_ns))
    if look.changes:
        changes = (spoken(part_change(change)) for change in look.changes[:_PARTS])
        line = together("; ", (line, together(", ", changes)))
    if not look.findings and not look.analyzed:
        return together("; ", (line, look.why or say("look.lengths")))
    found = together("; ", (found.title for found in look.findings)) or say("look.nothing")
    return together("; ", (line, say("look.found", found)))


def _span_facts(span: Span) -> tuple[str, str]:
    return duration(span.median_ns), ranges(span.steps)


def _recorded_ranks(report: Report) -> str:
    if not report.ranks:
        return say("head.ranks.none")
    said = one_or_many("rank", report.ranks)
    if report.world_size is not None:
        said = say("head.ranks", said, report.world_size)
    return say("head.ranks.on", said, one_or_many("node", report.nodes)) if report.nodes else said


def cost(report: Report, finding: Finding) -> str:
    """Per step and in all, in time, in hours of GPUs (or ranks), and in money where their price is known."""
    spent = cost_of(finding, report.rate)
    said = [cost_per_step(finding)]
    if spent.lost_hours_total is not None:
        hours = _hours(report, spent.lost_hours_total)
        said[0] = say("finding.cost.value", said[0], duration(finding.lost_ns_total), hours)
    if report.rate.price is not None and spent.lost_money_per_hour is not None:
        all_of_it = money_text(report.rate.ranks * report.rate.price)
        said.append(say("finding.cost.money", money_text(spent.lost_money_per_hour), all_of_it))
    if spent.lost_money_total is not None:
        said.append(say("finding.cost.money.total", money_text(spent.lost_money_total)))
    return together("; ", said)


def cost_per_step(finding: Finding) -> str:
    if is_standstill(finding):
        return say("finding.cost.standstill")
    lost = duration_with_error(finding.lost_ns_per_step, finding.uncertainty_ns)
    return say("finding.cost.per_step", lost, percent(finding.lost_fraction))


def path_row(part: PathPart | Blame) -> tuple[str, str, str]:
    """Rank, part and label of a row of the critical path, or of the causes of waiting, as they are shown."""
    if part.part == REST:
        return "", "", say("path.rest")
    return say("path.all") if part.rank is None else str(part.rank), part_short(part.part), label(part.label)


def code_means(code: Sequence[CodeShare]) -> str:
    """Return the explanation of the table of main threads."""
    return say("code.means") if code[0].ns_per_step is not None else f"{say('code.means')} {say('code.whole')}"


def code_row(share: CodeShare) -> tuple[str, str, str, str]:
    """Share and time of the step, part, and place of a row of what main threads did; without a step only its share."""
    part = "" if share.part is None else part_short(share.part)
    fraction = say("code.share.value", percent(share.fraction), percent(share.uncertainty).removesuffix(" %"))
    place = place_in_code(share.function, share.file, share.line)
    time = "" if share.ns_per_step is None else duration(share.ns_per_step)
    return fraction, time, part, "\u00a0\u00a0" * share.depth + place


def label(said: str) -> str:
    """Return a rank's activity, as the record calls it.

    In the language that is spoken where the words are rankscope's own.
    """
    return translated(said) if said in _OWN_LABELS else said


def others_waited(report: Report, finding: Finding) -> str | None:
    """Return which ranks waited for the finding's, and for how long."""
    found = finding.others_waited
    if found is None:
        return None
    hours = _hours(report, found.ns / HOUR_NS)
    return say("finding.others_waited.value", counted(len(found.ranks), "other rank"), duration(found.ns), hours)


def _hours(report: Report, hours: float) -> str:
    return f"{hours:.3g} {say(f'unit.{report.rate.unit}')}"


def gain(report: Report, finding: Finding) -> str:
    """Return the predicted gain as a share and, where the step is known, as a time.

    And the fix that was replayed for it.
    """
    if is_standstill(finding):
        return say("finding.gain.standstill")
    if finding.gain_fraction is None:
        return say("finding.gain.unknown", finding.gain_why or say("finding.gain.no_fix"))
    time = duration(finding.gain_fraction * report.steps.mean_ns) if report.steps.mean_ns is not None else "?"
    predicted = say("finding.gain.value", percent(finding.gain_fraction), time)
    if not finding.fix or not report.fidelity:
        return predicted
    fixes = () if of_last(report) else report.fixes
    more = next((fix.gain_ns for fix in fixes if fix.fix == finding.fix and _fixes_more(fix)), None)
    if more is not None:
        return predicted + say("finding.gain.more", finding.fix, duration(more))
    for both in fixes if finding.gain_fraction < finding.lost_fraction else ():
        others = [fix for fix in both.fixes if fix != finding.fix]
        if 0 < len(others) < len(both.fixes):
            said = percent(both.gain_fraction), duration(both.gain_ns), " + ".join(others)
            return predicted + say("finding.gain.both", *said) + say("finding.gain.replayed", finding.fix)
    if finding.ranks and finding.gain_fraction < finding.lost_fraction / 2:
        predicted += say("finding.gain.less")
    return predicted + say("finding.gain.replayed", finding.fix)


def _fixes_more(fix: PredictedFix) -> bool:
    return fix.finding_lost_ns is not None and fix.gain_ns > fix.finding_lost_ns


def fix_row(report: Report, fix: PredictedFix) -> tuple[str, str, str, str, str]:
    """Fix, predicted step, gain in time and as a share, and the finding that it belongs to."""
    finding = detector_name(fix.finding) if fix.finding else ""
    if fix.finding_lost_ns is not None and report.steps.mean_ns:
        share = percent(fix.finding_lost_ns / report.steps.mean_ns)
        finding = say("fixes.finding.costs", finding, duration(fix.finding_lost_ns), share)
    gained = duration_with_error(fix.gain_ns, fix.uncertainty_ns)
    return fix.fix, duration(fix.step_ns), gained, percent(fix.gain_fraction), finding


def fixes_mean(report: Report) -> str:
    """Return the explanation of the table of predicted fixes, with the replay's error."""
    error = percent(report.fidelity.median_error) if report.fidelity else "?"
    return say("fixes.means", error, percent(LEAST_GAIN))


def wait_lines(waits: Sequence[Wait], shown: int) -> tuple[str, ...]:
    """Return how long each rank waited; of more than `shown` ranks those that waited least and most, and the median."""
    ordered = sorted(waits, key=lambda wait: (wait.waited_ns, wait.rank))
    if len(ordered) <= shown:
        return (_wait_items(ordered),) if ordered else ()
    few = shown // 4
    return (
        say("waits.least", _wait_items(ordered[:few])),
        say("waits.median", duration(statistics.median(wait.waited_ns for wait in ordered))),
        say("waits.most", _wait_items(ordered[-few:])),
        say("waits.hidden", len(ordered) - 2 * few),
    )


def _wait_items(waits: Iterable[Wait]) -> str:
    return together(", ", (say("waits.item", wait.rank, duration(wait.waited_ns)) for wait in waits))


def resolution(report: Report, resolution_ns: int | None) -> str:
    """Return the detection limit of a healthy check."""
    if resolution_ns is None:
        return say("healthy.resolution.unknown")
    if not report.steps.mean_ns:
        return say("healthy.resolution", duration(resolution_ns))
    share = percent(resolution_ns / report.steps.mean_ns)
    return say("healthy.resolution.share", duration(resolution_ns), share)


def healthy_items(report: Report) -> str:
    """Return the healthy checks, each with the smallest loss that it would have shown: a coarse check says little."""
    mean_ns = report.steps.mean_ns
    items = [
        say("healthy.item", detector_name(healthy.detector), percent(healthy.resolution_ns / mean_ns))
        if mean_ns and healthy.resolution_ns is not None
        else detector_name(healthy.detector)
        for healthy in report.healthy
    ]
    return together(", ", items) or say("healthy.none")


def no_finding(report: Report) -> str:
    """Return what the absence of findings means, given what was checked."""
    if not report.healthy:
        return say("findings.none.unchecked")
    if is_healthy(report):
        return say("findings.none.checked", healthy_items(report))
    return say("findings.none.here" if report.status == "green" else "findings.none.open", healthy_items(report))


def level(finding: Finding) -> str:
    """Return how sure it is, and why."""
    return say(f"finding.level.{'hang' if is_standstill(finding) else 'loss'}.{finding.confidence}")


def evidence(seen: Evidence) -> str:
    """Return table, rank and time of the evidence: what to open in the timeline."""
    concerned = who(
        () if seen.rank is None else (seen.rank,),
        () if seen.node is None else (seen.node,),
    )
    when = say("finding.evidence.at", f"{seen.start_ns / 1e9:.6f}", duration(seen.end_ns - seen.start_ns))
    there = say("finding.evidence.elsewhere", *seen.steps) if seen.steps else ""
    return together(", ", (text for text in (seen.table, concerned, when, seen.note, there) if text))


def gap_extent(group: GapGroup) -> str:
    """Return the place and, if known, the number of rows, in words."""
    concerned = who(group.ranks, group.nodes) if group.ranks or group.nodes else say("gaps.everywhere")
    return (
        concerned if group.count is None else together(", ", (concerned, say("gaps.rows", counted(group.count, "row"))))
    )


STATE_COLUMNS = ("rank", "group", "enqueued", "started", "completed", "op", "state", "frame")


def state_row(state: GroupState) -> tuple[str, ...]:
    """Return how far a rank had come in a group, by STATE_COLUMNS; empty: not known."""
    counts = ("" if count is None else str(count) for count in (state.enqueued, state.started, state.completed))
    op = "" if state.seq is None else say("states.op.value", state.op, state.seq)
    return str(state.rank), state.group, *counts, op, say(f"states.state.{state.state}"), state.frame


def known_columns(states: Sequence[GroupState]) -> tuple[str, ...]:
    """Return those of STATE_COLUMNS that any of these states has."""
    rows = [state_row(state) for state in states]
    return tuple(name for at, name in enumerate(STATE_COLUMNS) if any(row[at] for row in rows))


def clock_error(clock: Clock) -> str:
    if clock.source == "reference":
        return say("clocks.error.reference")
    if clock.error_ns is None:
        return say("clocks.error.unknown")
    return say("clocks.error.value", duration(clock.error_ns))


def window_lines(report: Report, window: Window) -> list[str]:
    """Return the description of a deep window, and the command to go on with."""
    steps = f"{'step' if len(window.steps) == 1 else 'steps'} {ranges(window.steps)}"
    lines = [say("windows.what", window.number, steps, who(window.ranks), window.reason)]
    if window.start_stall_ns is not None and window.stop_stall_ns is not None:
        lines.append(say("windows.held", duration(window.start_stall_ns), duration(window.stop_stall_ns)))
    if window.verdict:
        lines.append(say("windows.device", window.kernels, window.verdict))
    if not report.path.endswith(window.folder):
        lines.append(say("windows.more", report.path, window.folder))
    return lines


def operator_row(operator: Operator) -> tuple[str, str, str, str, str]:
    """Time and calls per step, the slowest rank and its time, and the name."""
    times = duration(operator.ns_per_step), duration(operator.slowest_ns_per_step)
    return times[0], f"{operator.calls_per_step:.3g}", str(operator.slowest_rank), times[1], operator.name
