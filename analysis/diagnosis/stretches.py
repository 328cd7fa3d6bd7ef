"""Analyzes a run that is too long for memory: stretch by stretch, in this process, in others or on a cluster.

The tables of a report hold the last steps of such a run. The steps before are analyzed in stretches, each exactly as
`RUN/steps=FIRST-LAST` would be, cut where the length of a step changes and else by their number of rows. Of each a
summary is left, kept in the run's folder; the whole run is judged from these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps, analyzed_steps
from rankscope.analysis.diagnosis.conclude import Concluded, losses_in, with_places
from rankscope.analysis.diagnosis.judged_tables import code_of
from rankscope.analysis.diagnosis.judgement import judge
from rankscope.analysis.diagnosis.kept_values import keep, kept, made_of
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.run_phases import looks_at, phases_of
from rankscope.analysis.diagnosis.step_summaries import (
    StepSummaries,
    keep_steps,
    kept_steps,
    remove_other_steps,
    steps_file,
)
from rankscope.analysis.diagnosis.stretch_summary import StretchSummaries, StretchSummary
from rankscope.analysis.diagnosis.summary import mean_step, pipeline_of
from rankscope.analysis.diagnosis.whole_report import whole_report
from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.metrics.step_matrix import part_errors
from rankscope.analysis.model.address import Address, address_of
from rankscope.analysis.model.finding import Gap, Report, Span, StepSummary
from rankscope.analysis.readers.native.unpacked_rows import Shared
from rankscope.analysis.readers.workers import Lost, begun, divided, local_cores, scratch_folder
from rankscope.analysis.runs.fingerprint import files_fingerprint
from rankscope.analysis.runs.memory_budget import bytes_of_rows, readable_share
from rankscope.analysis.runs.step_range import FEWEST, Stretch, final_steps
from rankscope.analysis.runs.storage import local_path
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import ranges
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.errors import BadInput

__all__ = ["OverAll", "steps_of", "summarize", "whole_run", "with_whole_run"]

_NAME, _OPENED = "stretches", "opened"  # files: of a run's folder, of the temporary one
_BYTES = 800_000_000  # that a report on the steps of a stretch would take in memory
_OF_REPORT = 0.55  # of that: the share that a stretch takes
_AS_LONG = 0.75  # as they are cut for what is known now: so long stretches may stay
_EACH = 3  # blocks for each core, so that none is without work before the end
_TOGETHER = 48  # stretches for which rows are unpacked once; more if there are more cores
_CPU_S_PER_BYTE = 7e-10  # that it is analyzed in, about


@dataclass(frozen=True, slots=True)
class OverAll:
    """The report on all of a run, whether every stretch of it could be analyzed, and the steps that are kept."""

    report: Report
    is_complete: bool = True
    steps: StepSummaries | None = None
    analyzed: AnalyzedSteps | None = None


def with_whole_run(trace: Trace, last: Concluded, timeline: Timeline, options: ReportOptions | None = None) -> OverAll:
    """Return what `whole_run` does where the report on the last steps is there already."""
    with whole_run(trace, options) as over_all:
        return over_all(last, timeline)


@contextmanager
def whole_run(trace: Trace, options: ReportOptions | None = None) -> Iterator[Callable[[Concluded, Timeline], OverAll]]:
    """Begin to analyze the steps before those that are held of a long run, as far as other processes do it.

    Yield what makes of the report on the last steps that on the whole run. What still runs at the end of the context
    is given up.
    """
    stretch, folder = trace.stretch, trace.reader.folder
    history = stretch.history() if stretch else None
    if stretch is None or history is None or folder is None or stretch.asked:
        yield lambda last, _: OverAll(last.report)
        return
    phases = phases_of(stretch, history)
    all_bytes, steps = bytes_of_rows(folder), len(stretch.counted) - stretch.kept
    step_bytes = all_bytes / steps
    most = max(FEWEST, int(min(_BYTES / all_bytes, readable_share(folder)) * steps))
    options = options or ReportOptions()
    before, held = _Kept(trace, options), (stretch.first, stretch.last)
    begin = max([stretch.kept, *(last + 1 for _, last in before.evicted)])
    number = stretch.first - begin
    evenly = -(-number // max(-(-number // most), 1))
    length = before.length if most * _AS_LONG <= before.length <= most / _AS_LONG else evenly
    cuts = [*before.evicted, *_cuts(range(begin, stretch.first), phases, length)]
    with _begun(trace, before, length, cuts, step_bytes, options) as found:

        def over_all(last: Concluded, timeline: Timeline) -> OverAll:
            file = steps_file(timeline, before.of)
            keep_steps(before.run, held, file)
            at_end = replace(
                _summary(*held, last.seen.steps, timeline),
                findings=last.report.findings,
                healthy=last.healthy,
                not_checked=last.not_checked,
                losses=last.report.losses,
                steps_file=file,
            )
            others = found()
            every = [one for one in (*others, at_end) if not one.why]
            remove_other_steps(before.run, {(one.first, one.last) for one in every})
            in_folder = kept_steps(before.run, before.of)
            files = {(one.first, one.last): one.steps_file for one in every if one.steps_file}
            steps = StepSummaries(dict(sorted({**(in_folder.files if in_folder else {}), **files}.items())))
            looks = looks_at(phases, history.read, at_end, others)
            whole = replace(
                history,
                analyzed=sum(len(one.numbers) for one in every),
                stretches=len(every),
                looks=tuple(sorted(looks, key=lambda look: look.phase.first)),
            )
            analyzed = analyzed_steps(steps)
            report = whole_report(last, whole, stretch, every, analyzed)
            unread = sum(one.analyzed for one in every) - analyzed.count
            report = replace(report, gaps=_gaps(report, stretch, others, unread))
            return OverAll(report, len(every) == len(others) + 1 and not unread, steps, analyzed)

        yield over_all


def steps_of(trace: Trace, options: ReportOptions) -> StepSummaries | None:
    """Return the steps of all stretches of a long run that are kept in its folder."""
    is_long = trace.stretch is not None and not trace.stretch.asked
    return kept_steps(*_kept_in(trace, options)) if is_long else None


def summarize(
    paths: tuple[str, ...],
    files: str,
    of: str,
    stretches: Sequence[tuple[int, int]],
    options: ReportOptions,
    opened: str,
    shared: Shared | None,
) -> list[StretchSummary]:
    """Analyze stretches of a run, from first to last step. If one fails, its summary says why.

    `files` is the fingerprint of the run's files: as long as it is the same they are not looked for again. If there is
    a file `opened`, the opened run is taken from there. The steps of each stretch are kept in the run's folder, as made
    `of` this.
    """
    parts: list[Trace] = []

    def summary(first: int, last: int) -> StretchSummary:
        try:
            if not parts:
                run, left = _opened(paths, files, opened), [each for each in stretches if each[0] >= first]
                try:
                    parts.extend(run.parts(left, shared))
                except BadInput:  # of one of them, which need not be the first
                    parts.append(run.part(first, last))
            trace = parts.pop(0)
            timeline = build_timeline(trace)
            judged = judge(trace, timeline, options, replays=False)
            file = steps_file(timeline, of)
            is_kept = keep_steps(Path(address_of(list(paths)).folders[0]), (first, last), file)
        except BadInput as error:
            return StretchSummary(first=first, last=last, why=str(error))
        except Exception as error:  # the report on other steps is done, and must not be lost for this
            why = text("analyzing it failed: {error}", error=f"{type(error).__name__}: {error}")
            return StretchSummary(first=first, last=last, why=why)
        return replace(
            _summary(first, last, judged.steps, timeline),
            findings=with_places(judged.findings, code_of(timeline)) if judged.findings else (),
            healthy=tuple(judged.healthy),
            not_checked=tuple(judged.not_checked),
            losses=losses_in(judged, pipeline_of(judged.tables["ops"])),
            steps_file=b"" if is_kept else file,
        )

    found = [summary(first, last) for first, last in stretches]
    if shared:
        shared.finish()
    return found


@lru_cache(maxsize=1)
def _opened(paths: tuple[str, ...], files: str, opened: str) -> Trace:  # noqa: ARG001 - part of the key
    return Trace.from_file(Path(opened)) if opened and Path(opened).exists() else Trace.open(paths)


def _address(trace: Trace) -> Address:
    return address_of([os.path.abspath(local_path(path)) for path in trace.paths])


def _kept_in(trace: Trace, options: ReportOptions) -> tuple[Path, str]:
    """Return the folder in which results on the run's stretches are kept, and what they are made of: run and code."""
    where = _address(trace)
    began = [(node, launch.get("start_ns")) for node, launch in sorted(trace.run.items())]
    of = made_of(str(began), [where.world, options.flops_per_step, options.peak_tflops])
    return Path(where.folders[0]), of


class _Kept:
    """What is kept in a run's folder of its stretches, as far as it still holds: `known`, by first and last step.

    Of a job that has ended that is what was made of its files as they are. While it goes on, which adds files, it is a
    stretch of which all is written that can change it; and where nothing was written since, each. In `evicted` are
    those of which agents have removed records since: they cannot be analyzed again.
    """

    def __init__(self, trace: Trace, options: ReportOptions) -> None:
        self.run, self.of = _kept_in(trace, options)
        self.files = " ".join(files_fingerprint(Path(one)) for one in _address(trace).folders)
        held = kept(self.run, _NAME, self.of, StretchSummaries) or StretchSummaries(0, [])
        self.length = held.length
        stretch, folder = trace.stretch, trace.reader.folder
        assert stretch
        assert folder
        steps = kept_steps(self.run, self.of)
        files = steps.files if steps else {}
        self._begin_ns = stretch.counted["start_ns"].to_list()
        self._final = 0 if trace.has_ended else final_steps(folder, stretch.counted)

        def is_evicted(one: StretchSummary) -> bool:
            return one.first < stretch.kept and one.last < stretch.first

        self.known = {
            (one.first, one.last): one
            for one in held.stretches
            if [one.begin_ns] == self._begin_ns[one.first : one.first + 1]
            and (one.first, one.last) in files
            and (one.files == self.files or (not one.files and (one.last < self._final or is_evicted(one))))
        }
        self.evicted = sorted(steps for steps, one in self.known.items() if not one.files and is_evicted(one))

    def keep(self, length: int, summaries: Sequence[StretchSummary]) -> None:
        """Keep these for the next time."""
        marked = [
            replace(
                one,
                steps_file=b"",
                begin_ns=self._begin_ns[one.first],
                files="" if one.last < self._final or (one.first, one.last) in self.evicted else self.files,
            )
            for one in summaries
        ]
        keep(self.run, _NAME, self.of, StretchSummaries(length, marked))


def _summary(first: int, last: int, steps: StepSummary, timeline: Timeline) -> StretchSummary:
    breakdown = in_judged_steps(timeline.breakdown, timeline.steps)
    return StretchSummary(
        first=first,
        last=last,
        steps=steps,
        parts=mean_step(breakdown),
        errors={part: round(ns) for part, ns in part_errors(breakdown).items()},
    )


def _gaps(report: Report, stretch: Stretch, others: Sequence[StretchSummary], unread: int) -> tuple[Gap, ...]:
    """Return the report's gaps, and stretches that could not be analyzed; not, if all were, that some were not read.

    `unread` steps are in no file that is left.
    """
    missing = [one for one in others if one.why]
    gaps = [gap for gap in report.gaps if gap.table != "*" or gap.why != stretch.said or missing or stretch.kept]
    whys = [text("steps {steps} were not analyzed: {why}", steps=ranges(one.numbers), why=one.why) for one in missing]
    if unread:
        steps = counted(unread, "analyzed step")
        whys.append(text("the breakdown lacks {steps}: their summaries were removed meanwhile", steps=steps))
    return (*gaps, *(Gap(table="*", rank=None, node=None, count=None, why=why) for why in whys))


def _cuts(steps: range, phases: Sequence[Span], length: int) -> list[tuple[int, int]]:
    """First and last steps of stretches, which together are these steps.

    No stretch is longer than `length`, nor crosses the edge of a phase; those too short for a report join the one
    before. Else they are cut at multiples of the length, so that a run that grows has new ones at its end only.
    """
    edges = {steps.start, steps.stop, *(edge for phase in phases for edge in (phase.first, phase.last + 1))}
    inside = sorted(edge for edge in edges if steps.start <= edge <= steps.stop)
    found: list[tuple[int, int]] = []
    for begin, end in pairwise(inside):
        if found and end - begin < FEWEST:
            found[-1] = found[-1][0], end - 1
            continue
        at = [begin, *range((begin // length + 1) * length, end, length), end]
        if end - begin <= length:
            at = [begin, end]
        else:  # one that is short and its neighbour, evenly
            for one, short in ((1, at[1] - at[0]), (-2, at[-1] - at[-2])):
                at[one] = (at[one - 1] + at[one + 1]) // 2 if short < length / 2 else at[one]
        found += [(first, until - 1) for first, until in pairwise(at)]
    return found


def _blocks(
    wanted: Sequence[tuple[int, int]], held: tuple[int, int], cores: int | None, scratch: str
) -> tuple[list[tuple[list[tuple[int, int]], Shared | None]], Shared | None]:
    """Return the stretches in the blocks of which each is a task, and what a block shares with others.

    Second, what this process shares, for the steps that are held. Where there is no folder, or tasks run elsewhere,
    each stretch is a block, and nothing is shared.
    """
    if cores is None or not scratch:
        return [([cut], None) for cut in wanted], None
    blocks: list[tuple[list[tuple[int, int]], Shared | None]] = []
    all_together = divided(wanted, -(-len(wanted) // max(_TOGETHER, cores)))
    with_held = len(all_together) == 1
    for number, together in enumerate(all_together):
        some = divided(together, _EACH * cores)
        users = len(some) + with_held
        folder, stretches = str(Path(scratch, str(number))), (*together, *([held] if with_held else []))
        shared = [Shared(folder, stretches, 2 * (cores + 1), user, users) for user in range(users)]
        blocks += [(list(block), one) for block, one in zip(some, shared, strict=False)]
    return blocks, shared[-1] if with_held else None


@contextmanager
def _scratch(trace: Trace) -> Iterator[str]:
    """Give a folder with the opened run, and for what is unpacked for stretches.

    None where there can be none, or tasks run elsewhere.
    """
    try:
        folder = scratch_folder() if local_cores() else None
    except BadInput:
        folder = None
    if folder is None:
        yield ""
        return
    with folder as path:
        try:
            trace.to_file(Path(path, _OPENED))
        except OSError:  # no room
            Path(path, _OPENED).unlink(missing_ok=True)
        yield path


@contextmanager
def _begun(
    trace: Trace,
    before: _Kept,
    length: int,
    cuts: Sequence[tuple[int, int]],
    step_bytes: float,
    options: ReportOptions,
) -> Iterator[Callable[[], list[StretchSummary]]]:
    """Yield what returns summaries of these stretches, in their order.

    Those that are kept from `before`, and of the others new ones, to be kept. This process analyzes the last steps
    meanwhile.
    """
    assert trace.stretch
    last_steps = trace.stretch.first, trace.stretch.last
    beside = round(step_bytes * (last_steps[1] + 1 - last_steps[0]))
    paths = tuple(os.path.abspath(local_path(path)) for path in trace.paths)  # other processes may work elsewhere
    known = dict(before.known)
    wanted = [cut for cut in cuts if cut not in known]
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch(trace)) if wanted else ""
        opened = str(Path(scratch, _OPENED)) if scratch else ""
        shared, with_held = _blocks(wanted, last_steps, local_cores(), scratch)
        if with_held:
            with suppress(BadInput):  # of one stretch
                trace.share(with_held)
        blocks = [block for block, _ in shared]
        costs = [[(last - first + 1) * step_bytes for first, last in block] for block in blocks]
        cpu_s = [sum(cost) * _CPU_S_PER_BYTE for cost in costs]
        memory = round(_OF_REPORT * max(map(max, costs), default=0))
        what, sizes = text("stretches"), [len(block) for block in blocks]
        arguments = [
            (paths, before.files, before.of, block, options, opened, with_others) for block, with_others in shared
        ]
        begin = begun(summarize, arguments, cpu_s, memory=memory, what=what, sizes=sizes, beside=beside)
        results = stack.enter_context(begin)

        def summaries() -> list[StretchSummary]:
            try:
                for block, found in zip(blocks, results, strict=True):
                    if isinstance(found, Lost):
                        found = [StretchSummary(first=first, last=last, why=found.why) for first, last in block]
                    known.update(zip(block, found, strict=True))
            finally:  # after Ctrl-C too: the next report goes on from there
                if wanted:
                    there = [known[cut] for cut in cuts if cut in known and known[cut].analyzed]
                    before.keep(length, there)
            return [known[cut] for cut in cuts]

        yield summaries
