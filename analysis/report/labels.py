"""The report's words: everything a reader sees that is not in the Report itself."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope.analysis.model.parts import PARTS, part_name
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.text.message import joined, spoken, translated

__all__ = [
    "detector_name",
    "part_label",
    "part_meaning",
    "part_short",
    "say",
    "together",
]

_ENGLISH: dict[str, str] = {
    # who
    "who.rank": "rank {0}",
    "who.ranks": "ranks {0}",
    "who.node": "node {0}",
    "who.nodes": "nodes {0}",
    "who.group": "group {0}",
    "who.groups": "groups {0}",
    "who.all": "the whole job",
    # finding
    "findings": "Findings",
    "findings.none.checked": "No finding. What was checked is healthy: {0}.",
    "findings.none.open": "No finding; the cause of the lost time is unknown. Checks that found nothing: {0}.",
    "findings.none.here": "No finding, but other steps take longer or less, see above. Checks that found nothing: {0}.",
    "findings.none.unchecked": "No finding: nothing could be checked, so the job may not be healthy.",
    "findings.more": "and {0} more, of {1} in total: see the full report",
    "finding.who": "who",
    "finding.where": "where",
    "finding.level": "level",
    "finding.level.loss.confirmed": "confirmed: statistics and replay agree",
    "finding.level.loss.likely": "likely: only statistics or replay, or few operations",
    "finding.level.hang.confirmed": "confirmed: it was seen",
    "finding.level.hang.likely": "likely: it left no state",
    "finding.cost": "cost",
    "finding.cost.value": "{0}, {1} in total: {2}",
    "finding.cost.money": "in money {0} of {1} an hour",
    "finding.cost.money.total": "{0} in the analyzed steps",
    "unit.GPU-hours": "GPU-hours",
    "unit.rank-hours": "rank-hours",
    "finding.cost.per_step": "{0} per step ({1})",
    "finding.steps": "in steps",
    "finding.cost.standstill": "everything: the job makes no progress",
    "finding.others_waited": "others",
    "finding.others_waited.value": "{0} waited {1} in total for it ({2})",
    "finding.gain": "speedup",
    "finding.gain.standstill": "a fix lets the job continue",
    "finding.gain.unknown": "not predicted: {0}",
    "finding.gain.no_fix": "there is no fix that could be replayed",
    "finding.gain.value": "a fix would make a step about {0} shorter ({1})",
    "finding.gain.both": ", and {0} ({1}) with {2} as well",
    "finding.gain.less": ", less than it costs, since other ranks or other work then hold the job up",
    "finding.gain.replayed": ", by a replay; see rankscope whatif --fix {0}",
    "finding.gain.more": ", all that it costs; rankscope whatif --fix {0} predicts {1}, as it fixes more",
    "finding.advice": "advice",
    "finding.cause": "follows from",
    "finding.evidence": "evidence",
    "finding.evidence.elsewhere": "open RUN/steps={0}-{1}",
    "finding.evidence.more": "and {0} more places, in the JSON form",
    "finding.evidence.at": "at {0} s of the run's clock, for {1}",
    "fixes": "Predicted speedup of fixes",
    "fixes.means": "Each fix alone, in a replay of the run that misses the measured steps by {0} (median over "
    "steps); ± is the 95 % confidence interval. Listed are speedups of {1} of the step or more that "
    "exceed it, and findings whose cost differs by a factor of two. A finding's cost is given where it differs by "
    "that, or by more than the error. Speedups do not add up; combine fixes with rankscope whatif --fix.",
    "fixes.fix": "fix",
    "fixes.step": "step",
    "fixes.gain": "speedup",
    "fixes.share": "share",
    "fixes.finding": "finding",
    "fixes.finding.costs": "{0}, measured cost {1} ({2})",
    "finding.error": "± is the 95 % confidence interval over the analyzed steps",
    "finding.picture": "{0} per step, one column per rank.",
    "finding.picture.own": "own work (all but communication) per step, one column per rank.",
    "finding.picture.numbers": "Marked: {0}, {1}. Dashed: median of the others, {2}.",
    "finding.picture.spread": "From {0} to {1}.",
    "severity.high": "high",
    "severity.medium": "medium",
    "severity.low": "low",
    # head
    "title": "rankscope report",
    "head.steps": "steps analyzed: {0}",
    "head.steps.set_aside": "excluded: warm-up {0}, outliers {1}",
    "head.steps.set_aside.time": "excluded: warm-up {0}, outliers {1} ({2} of the time)",
    "head.steps.none": "no steps were analyzed",
    "head.mean": "mean step {0}",
    "head.median": "median {0}",
    "head.p90": "90 % of steps within {0}",
    "head.mfu": "MFU {0} of {1:.4g} TFLOP/s",
    "head.hfu": "HFU {0} of {1:.4g} TFLOP/s by the shapes of operators",
    "head.hfu.least": "HFU at least {0} of {1:.4g} TFLOP/s: shapes cover {2} of the time of matrix products",
    "head.ranks": "{0} of {1}",
    "head.ranks.on": "{0}, on {1}",
    "head.ranks.none": "no ranks recorded",
    "head.step_source": "steps from {0}",
    "head.missing": "Not recorded: {0}. What they did is not in these numbers.",
    "head.unreadable": "The record holds no ranks and no steps. A rank is recorded from its first process group on.",
    "history": "The whole run",
    "history.read": "The tables hold steps {0} of {1}: on rank {2} they take {3}, all steps {4} (medians); "
    "RUN/steps=FIRST-LAST has others",
    "history.analyzed": "{0} of {1} steps were analyzed, in {2} stretches",
    "history.recent": "Only these steps were analyzed; rankscope report RUN analyzes all",
    "history.held": "Waits, groups, the critical path and predicted fixes are those of steps {0}: on rank {1} they "
    "take {2}, all steps {3} (medians); RUN/steps=FIRST-LAST has others",
    "history.of_last": "Of steps {0} only.",
    "history.changed": "Over the whole run a step takes from {0} ({1}) to {2} ({3})",
    "history.diff": "What changed between them: rankscope diff RUN/steps={0} RUN/steps={1}",
    "look.longer": "Steps {0} take {1}, {2} longer than the last ones",
    "look.shorter": "Steps {0} take {1}, {2} less than the last ones",
    "look.found": "found there: {0}",
    "look.nothing": "nothing",
    "look.lengths": "only the lengths of such are left",
    "history.kept": "Of steps before {0} only the length is left: older records were evicted (rankscope run --keep)",
    "history.evicted": "Records of steps before {0} were evicted (rankscope run --keep); {1} of these steps had been "
    "analyzed before",
    "history.chart": "Line: median length of {0} steps each on rank {1}, all steps of the run.",
    "history.first": "step 0",
    "history.last": "step {0}",
    # time
    "time": "Where a step's time goes",
    "time.mean": "mean over {0}; mean step {1}",
    "time.mean.marks": "mean over {0}; mean step {1}; what the devices' phases took, and while they had no work what "
    "stopped the host",
    "time.mean.device": "mean over {0}; mean step {1}; what the devices did, and while they idled what the host did",
    "time.mean.host": "mean over {0}; mean step {1}; the hosts' time only: what devices did meanwhile, waiting for "
    "peers too, counts as compute",
    "time.compute.host": "the host works or waits; what its device does meanwhile is not known",
    "time.none": "No step could be split into its parts: this needs steps and what the ranks did in them.",
    "time.step": "step",
    "time.part": "part",
    "time.total": "mean step",
    "time.smaller": "{0} smaller",
    "time.meaning": "what it is",
    "time.share": "%",
    "time.rank": "rank",
    "time.per_rank": "Each rank",
    "time.per_rank.caption": "Each rank: {0} per step, and % of the rank's step. "
    "The parts of each row sum to its step.",
    "time.per_rank.columns": "One column per rank, as high as its mean step; colours as above; {0} ranks in a row.",
    "time.per_rank.marked": "Marked: {0}, finding {1}.",
    "time.mean_row": "mean",
    "time.min_row": "least",
    "time.median_row": "median",
    "time.max_row": "most",
    "time.quantiles": "least, median and most are taken column by column, so they do not add up; the other rows do.",
    "time.shown": "Shown: {0} of {1} ranks, those that findings name and those furthest from the median. "
    "Not shown: {2}; all are in the JSON form.",
    "time.not_recorded": "not recorded",
    # steps
    "steps": "Step time over the steps",
    "steps.none": "No lengths of single steps are in this record.",
    "steps.chart": "Line: median of the ranks. Band: shortest to longest rank. Analyzed steps only, in order.",
    "steps.chart.one": "Line: the rank's step. Analyzed steps only, in order.",
    "steps.binned": "Each point covers up to {0} steps.",
    "steps.first": "first analyzed step",
    "steps.last": "last, {0}",
    "steps.strip": "One row per rank, one cell per step; the darker, the longer against the median step.",
    "steps.strip.binned": "One row per {0} ranks, one cell per {1} steps; the longest of them counts. "
    "The darker, the longer against the median step.",
    "steps.level.0": "up to 1.05 ×",
    "steps.level.1": "1.05–1.2 ×",
    "steps.level.2": "1.2–1.5 ×",
    "steps.level.3": "1.5–2 ×",
    "steps.level.4": "above 2 ×",
    "pipeline": "Pipeline",
    "pipeline.shape": "{0}, {1} stages, {2} microbatches",
    # waits
    "waits": "Who waited for whom",
    "waits.means": "Time that each rank waited for the last one to arrive, over all matched collectives that were "
    "read. The others wait for the rank that waits least.",
    "waits.item": "rank {0}: {1}",
    "waits.least": "least: {0}",
    "waits.median": "median: {0}",
    "waits.most": "most: {0}",
    "waits.hidden": "not shown: {0} ranks in between; all are in the JSON form",
    "waits.none": "No collective was matched on all its ranks, so waiting could not be measured.",
    # what ranks waited for
    "blames.means": "Wait time by root cause, summed over ranks. If the last-arriving rank was itself "
    "waiting, the cost moves on to the rank it waited for.",
    "blames.time": "waited",
    "blames.rank": "for rank",
    "blames.part": "part",
    "blames.label": "what it did longer",
    # what main threads did
    "code": "What the main threads did",
    "code.means": "Where in the code they were, sampled 5 times a second; each call includes what it calls. Calls "
    "into torch and Python's library count for the line that made them.",
    "code.whole": "No step was analyzed: these are shares of the whole run.",
    "code.share": "share",
    "code.share.value": "{0} ± {1}",
    "code.time": "per step",
    "code.part": "part",
    "code.place": "where",
    "finding.code": "code",
    # critical path
    "path": "What a step waits for",
    "path.means": "The chain of work over all ranks that ends when the step does, {0} on average. Only what is on it "
    "makes a step longer; all else had time to spare.",
    "path.time": "per step",
    "path.share": "share",
    "path.rank": "rank",
    "path.part": "part",
    "path.label": "what",
    "path.all": "all",
    "path.rest": "the rest",
    # phases by CUDA events
    "phases": "The devices' phases",
    "phases.means": "Device time per analyzed step between CUDA events: kernels, gaps between them and waiting in "
    "one. Communication is the sum of NCCL's operations of the phase, hidden or not; host run-ahead "
    "is the work enqueued where the phase ends (median).",
    "phases.phase": "phase",
    "phases.mean": "mean",
    "phases.least": "least (rank)",
    "phases.most": "most (rank)",
    "phases.communication": "comm.",
    "phases.communication.unknown": "unknown",
    "phases.ahead": "host run-ahead",
    "phases.of_rank": "{0} ({1})",
    "lead.device": "Device-bound: host run-ahead is {0} (median), and a device idles without work for at most {1} of "
    "the step.",
    "lead.host": "Host-bound in {0} of the step: the launch queue is empty, because the host is slow or waits for "
    "the device. Devices may idle for up to {1} of the step; a profiled window measures the cost: {2}",
    "lead.open": "Host run-ahead is {0} (median), less than the phases take. Devices may idle for up to {1} of the "
    "step; a profiled window shows whether they do: {2}",
    "lead.window": "see window {0} of this run",
    # device
    "device": "The devices, over the whole capture",
    "device.means": "Percent of the capture; communication that nothing hides is exposed. "
    "Compute, communication and memory may overlap each other.",
    "device.rank": "rank",
    "device.window": "capture",
    "device.busy": "busy",
    "device.idle": "idle",
    "device.compute": "compute",
    "device.communication": "comm.",
    "device.memory": "memory",
    "device.overlap": "overlap",
    "device.exposed": "exposed",
    "device.hidden": "Shown are the least and the most busy. Not shown: {0}; all are in the JSON form.",
    # groups
    "groups": "Communication by process group",
    "groups.means": "Per step and rank of the group. Exposed: transfers that no computation hides; unattributed: "
    "transfer or waiting for peers, it is not known which.",
    "groups.group": "group",
    "groups.kind": "kind",
    "groups.op": "operation",
    "groups.exposed": "exposed",
    "groups.wait": "wait",
    "groups.unattributed": "unattributed",
    "groups.overlapped": "overlapped",
    "groups.hidden_by": "hidden by",
    # checked
    "healthy": "Checked, nothing found",
    "healthy.none": "nothing",
    "healthy.resolution": "detection limit {0} per step",
    "healthy.resolution.share": "detection limit {0} per step ({1})",
    "healthy.item": "{0} (limit {1})",
    "healthy.resolution.unknown": "detection limit unknown",
    "healthy.check": "check",
    "healthy.sees": "resolution",
    "not_checked": "Not checked",
    "not_checked.short": "{0} (reasons: full report)",
    "not_checked.none": "Nothing was left out.",
    "not_checked.check": "check",
    "not_checked.why": "why",
    # gaps
    "windows": "Profiled windows",
    "windows.what": "Window {0}: {1} of {2} ({3}).",
    "windows.held": "It stalled the hosts for up to {0} at its start and {1} at its end.",
    "windows.more": "All of it: rankscope report {0}/{1}",
    "windows.device": "Of its {0} rows of device work: {1}",
    "windows.means": "Operators by the time of their own, without that of operators in them; mean per step over ranks.",
    "windows.time": "per step",
    "windows.calls": "calls",
    "windows.slowest": "slowest rank",
    "windows.its": "its time",
    "windows.operator": "operator",
    "states": "Progress of each rank",
    "states.means": "Numbers of operations in each process group in which one is outstanding. {0}",
    "states.few": "Shown: the groups of the finding; all are in the JSON form.",
    "states.rank": "rank",
    "states.group": "process group",
    "states.enqueued": "enqueued",
    "states.started": "started",
    "states.completed": "completed",
    "states.op": "outstanding",
    "states.state": "state",
    "states.frame": "called at",
    "states.op.value": "{0} number {1}",
    "states.state.started": "begun, not ended",
    "states.state.enqueued": "enqueued, not ended",
    "states.state.behind": "did not reach it",
    "states.state.idle": "nothing outstanding",
    "states.state.unread": "not readable",
    "gaps": "Gaps in the record",
    "gaps.none": "None.",
    "gaps.table": "table",
    "gaps.who": "where",
    "gaps.why": "why",
    "gaps.where": "{0}: {1}",
    "gaps.everywhere": "everywhere",
    "gaps.rows": "{0} missing",
    "gaps.more": "and {0} more, of {1} in total: see the full report",
    # clocks
    "clocks": "Clocks",
    "clocks.none": "Clocks were not synchronized.",
    "clocks.node": "node",
    "clocks.offset": "offset",
    "clocks.drift": "drift",
    "clocks.drift.value": "{0} ppm",
    "clocks.error": "error",
    "clocks.error.value": "± {0}",
    "clocks.error.unknown": "unknown: times across nodes are not to be trusted",
    "clocks.error.reference": "none: the others are brought to this clock",
    "clocks.source": "from",
    "clocks.matched": "{0} of the collectives' rows were matched on all their ranks.",
    "clocks.hidden": "smaller errors, not shown: {0}; all are in the JSON form",
    # environment and method
    "environment": "Environment",
    "environment.none": "Not recorded.",
    "environment.name": "name",
    "environment.value": "value",
    "method": "How this was analyzed",
    "method.parts": "Each rank's step is cut into parts that do not overlap and that sum to the step.",
    "method.wait": "A collective can only move bytes once its last rank has arrived. What a rank spends in it "
    "before that is waiting, caused by the last rank; what it spends after that is transfer.",
    "method.cost": "Cost: the time that the job loses per analyzed step, and its share of the mean analyzed step; ± "
    "is the 95 % confidence interval. Costs of several findings may overlap, so they need not add up.",
    "method.gain": "The speedup is the predicted shortening of the mean step if that finding alone were fixed: the "
    "run is replayed with the fix (rankscope whatif).",
    "method.silence": "A check that lacks its data is listed as not checked. A healthy check gives its detection "
    "limit.",
    "source": "source: {0}",
}


def say(key: str, *values: object) -> str:
    """Return the text of `key` with `values` put in, in the language that is spoken. Values are not parsed again."""
    return translated(_ENGLISH[key]).format(*map(spoken, values))


def together(separator: str, said: Iterable[str]) -> str:
    """Return the joined text, with the separator of the language that is spoken."""
    return spoken(joined(separator, said))


def part_label(part: str) -> str:
    return spoken(part_name(part))


def part_short(part: str) -> str:
    """At most 8 columns for the parts known here: the heading of a column."""
    known = PARTS.get(part)
    return spoken(known.short) if known and known.short else part_label(part)


def part_meaning(part: str, *, of_hosts: bool) -> str:
    """Return what a part is; `of_hosts`: where the hosts' time alone was seen."""
    if of_hosts and part == "compute":
        return say("time.compute.host")
    return spoken(PARTS[part].means) if part in PARTS else ""


def detector_name(detector: str) -> str:
    """Return the detector's name, in the language that is spoken."""
    return spoken(name_of(detector))
