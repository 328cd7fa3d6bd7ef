"""The headline of a report, its color, and how sure each finding is: never in contradiction to the tables below it.

Levels: a finding is *confirmed* where statistics and replay agree, *likely* where only one of them shows it or where
few operations were seen. Time that is lost and that no finding explains is *unexplained*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, spec_of
from rankscope.analysis.diagnosis import remarks
from rankscope.analysis.diagnosis.losses import lost_fraction, unexplained_fraction
from rankscope.analysis.model.finding import (
    MANY_OUTLIERS,
    Fidelity,
    Finding,
    Healthy,
    Lead,
    Loss,
    NotChecked,
    Rate,
    StepSummary,
)
from rankscope.analysis.model.money import cost_of, money_text
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.replay.pipeline import theory_fraction
from rankscope.analysis.text.message import Text, joined, plural, text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.code_samples import Code

__all__ = ["CONFIRMED", "LIKELY", "Seen", "status_of", "verdict_of", "with_levels", "without_coarse"]

CONFIRMED, LIKELY = "confirmed", "likely"
_CLEAR_CHANCE = 0.001  # how rarely chance may show as much in operations that stand for too few steps
_AGREES = 0.5  # share of a finding's cost that the replay of its fix must bring
_LEAST = 0.01  # share of the step: no headline claims to see less
MUCH_LOST = 0.05  # share of the step from which on a job is not called healthy
_SAY_WHY = ("input", "gc", "compile", "checkpoint")  # losses whose kind is the cause
_FEW = 20  # steps: more than that are what a profiler's schedule is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The evidence of a verdict: the ranks, the steps, and the tables of judged steps."""

    ranks: tuple[int, ...]
    world_size: int | None
    steps: StepSummary
    rate: Rate
    breakdown: pl.DataFrame
    waits: pl.DataFrame  # (rank, waited_ns), of all matched operations
    lead: Lead | None
    device_waits: pl.DataFrame | None  # None: more than the hosts was seen
    waits_unseen: bool  # the tables may show them as computing
    profiled: bool  # a profiler's capture, not a run that was recorded
    schedule: tuple[int, int] | None  # stages and microbatches of a pipeline, as far as a capture shows them
    is_running: bool  # as far as is known; else it has to be recorded again
    code: Code
    scheduled: float = 0.0  # share of the step that the schedule of a pipeline needs as its bubble
    outliers: str  # why steps that were excluded as outliers take long, where they take much
    aside: str  # the headline's note on steps that were not read

    @property
    def without_steps(self) -> list[int]:
        judged = set(self.breakdown["rank"].unique()) if self.steps.count else set(self.ranks)
        return sorted(set(self.ranks) - judged) if judged else []


def with_levels(findings: Sequence[Finding], steps: StepSummary, fidelity: Fidelity | None) -> tuple[Finding, ...]:
    """Return the findings, each with its level."""
    return tuple(
        replace(finding, confidence=finding.confidence or _level(finding, steps, fidelity)) for finding in findings
    )


def _level(finding: Finding, steps: StepSummary, fidelity: Fidelity | None) -> str:
    if not finding.lost_ns_per_step:  # not an estimate
        return CONFIRMED
    is_sampled = steps.count >= ENOUGH_STEPS if finding.chance is None else finding.chance <= _CLEAR_CHANCE
    is_clear = is_sampled and finding.uncertainty_ns < finding.lost_ns_per_step
    is_replayed = fidelity is not None and fidelity.steps > 1 and finding.fix is not None
    agrees = is_replayed and (finding.gain_fraction or 0.0) >= _AGREES * finding.lost_fraction
    return CONFIRMED if is_clear and agrees else LIKELY


def without_coarse(
    healthy: Sequence[Healthy], losses: Sequence[Loss], steps: StepSummary
) -> tuple[list[Healthy], list[NotChecked]]:
    """Return healthy checks, and apart those that cannot say so where much is lost that nothing explains.

    They are too coarse, or have overlooked a loss of their own kind.
    """
    kept: list[Healthy] = []
    coarse: list[NotChecked] = []
    for check in healthy:
        could_be = [loss for loss in losses if loss.kind in spec_of(check.detector).lost_as]
        left = max(could_be, key=lambda loss: loss.unexplained_fraction, default=None)
        limit = (check.resolution_ns or 0) / (steps.mean_ns or 1)
        overlooked = [loss for loss in could_be if loss.kind == spec_of(check.detector).own_loss]
        if any(loss.unexplained_fraction >= MUCH_LOST for loss in overlooked):
            why = _overlooked(overlooked[0])
        elif left is not None and left.unexplained_fraction >= MUCH_LOST and limit > 1.01 * MUCH_LOST:
            why = text(
                "{loss} of the step for no known reason, and losses below {limit} are not detected",
                loss=_unexplained_of(left),
                limit=percent(limit),
            )
        else:
            kept.append(check)
            continue
        coarse.append(NotChecked(detector=check.detector, why=why, unclear=True))
    return kept, coarse


def _overlooked(loss: Loss) -> str:
    return _of_no_known_reason(_unexplained_of(loss))


def _of_no_known_reason(loss: str) -> str:
    return text("{loss} of the step for no known reason", loss=loss)


def status_of(
    findings: Sequence[Finding],
    healthy: Sequence[Healthy],
    not_checked: Sequence[NotChecked],
    losses: Sequence[Loss],
    seen: Seen,
) -> str:
    """Return the color of the verdict.

    "red": something costs 5 % of the step or more, or the job hangs. "green": the tables show that less than 5 % is
    lost, and no loss of 5 % could have been overlooked. Else "amber".
    """
    if any(finding.severity != "low" for finding in findings):
        return "red"
    if findings or not _was_judged(healthy, losses, seen) or lost_fraction(losses) >= MUCH_LOST:
        return "amber"
    open_checks = [check for check in not_checked if check.unclear and not _is_bounded(check.detector, seen)]
    limit, _ = _limit(healthy, losses, seen)
    is_open = limit >= MUCH_LOST or seen.steps.outliers_fraction >= MANY_OUTLIERS
    return "amber" if open_checks or is_open or _remarks(seen) else "green"


def verdict_of(
    findings: Sequence[Finding],
    healthy: Sequence[Healthy],
    not_checked: Sequence[NotChecked],
    losses: Sequence[Loss],
    seen: Seen,
) -> str:
    """Return the costliest finding, or the largest loss that nothing explains, or that there is none.

    It begins with the outliers where these take more than that.
    """
    share = seen.steps.outliers_fraction
    said = {"share": percent(share), "why": seen.outliers}
    if share < MANY_OUTLIERS:
        return _of_analyzed(findings, healthy, not_checked, losses, seen)
    if share > _costliest(findings, losses):
        return plural(
            "{count} step, excluded as an outlier, takes {share} of the time{why}. {judged}",
            "{count} steps, excluded as outliers, take {share} of the time{why}. {judged}",
            seen.steps.outliers,
            count=seen.steps.outliers,
            judged=_of_analyzed(findings, healthy, not_checked, losses, seen),
            **said,
        )
    excluded = text(
        "; steps excluded as outliers ({count}) take {share} of the time{why}", count=seen.steps.outliers, **said
    )
    beside = replace(seen, aside=joined("", (excluded, seen.aside)))
    return _of_analyzed(findings, healthy, not_checked, losses, beside)


def _costliest(findings: Sequence[Finding], losses: Sequence[Loss]) -> float:
    """Return the share of the step that the first finding or the largest loss takes; of a hang all of it."""
    first = [finding.lost_fraction if finding.lost_ns_per_step else 1.0 for finding in findings[:1]]
    return max([*first, *(loss.fraction for loss in losses)], default=0.0)


def _of_analyzed(
    findings: Sequence[Finding],
    healthy: Sequence[Healthy],
    not_checked: Sequence[NotChecked],
    losses: Sequence[Loss],
    seen: Seen,
) -> str:
    """Return what the analyzed steps show."""
    absent = _absent(seen)
    if findings:
        headline = _headline(findings, seen)
        return text(
            "{headline}{absent}.",
            headline=joined("", (headline, _besides(findings, losses, len(seen.ranks)))),
            absent=absent,
        )
    if not _was_judged(healthy, losses, seen):
        return _cannot_judge(healthy, not_checked, seen, absent)
    status = status_of(findings, healthy, not_checked, losses, seen)
    counts = text(
        "{steps} of {ranks}",
        steps=counted(seen.steps.count, "analyzed step"),
        ranks=counted(len(seen.ranks) - len(seen.without_steps), "rank"),
    )
    is_unexplained = unexplained_fraction(losses) >= MUCH_LOST
    said = _overlooked(_least_explained(losses)) if is_unexplained else None  # in other words, the headline
    unclear = remarks.unclear([_left_to_say(said, check) for check in not_checked if check.why != said])
    more = joined("", (_by_schedule(seen), unclear if status != "green" else "", _remarks(seen), absent))
    if is_unexplained:
        loss, least_explained = _unexplained(losses, seen, counts), _least_explained(losses)
        if least_explained.steps and least_explained.kind in _SAY_WHY:
            return text("Seen once: {loss}{more}.", loss=loss, more=more)
        return text("Unexplained: {loss}{more}.", loss=loss, more=more)
    limit, detector = _limit(healthy, losses, seen)
    if limit >= MUCH_LOST:
        return text(
            "No finding in {counts}; {detector} below {limit} of the step would not be detected{more}.",
            counts=counts,
            detector=name_of(detector),
            limit=percent(limit),
            more=more,
        )
    if status != "green":
        return text("No bottleneck found in {counts}{more}.", counts=counts, more=more)
    largest = max(limit, lost_fraction(losses), _LEAST)
    return text(
        "No bottleneck above {limit} of the step in {counts}{more}.", limit=percent(largest), counts=counts, more=more
    )


def _left_to_say(said: str | None, check: NotChecked) -> NotChecked:
    """Return the check, its reason without what the headline has `said`."""
    known = check.why.values if isinstance(check.why, Text) else {}
    if "limit" not in known or _of_no_known_reason(str(known.get("loss"))) != said:
        return check
    return replace(check, why=text("losses below {limit} are not detected", limit=known["limit"]))


def _was_judged(healthy: Sequence[Healthy], losses: Sequence[Loss], seen: Seen) -> bool:
    """Say whether there is anything to say: a check of the speed was made, or a profiler's tables show what is lost."""
    return (seen.profiled and lost_fraction(losses) >= MUCH_LOST) or any(
        spec_of(check.detector).judges_speed for check in healthy
    )


def _is_bounded(detector: str, seen: Seen) -> bool:
    """Say whether what it looks for costs no more than the table of losses shows: it needs the ranks' communication."""
    shows_waits = seen.device_waits is None and not seen.waits_unseen
    return bool(spec_of(detector).lost_as) and shows_waits and not seen.breakdown.is_empty()


def _limit(healthy: Sequence[Healthy], losses: Sequence[Loss], seen: Seen) -> tuple[float, str]:
    """Return the largest share of the step that a check may have overlooked, and which check.

    One whose cost the tables show as lost has overlooked no more than is lost there for no known reason.
    """
    lost, mean_ns = unexplained_fraction(losses), seen.steps.mean_ns or 1
    limits = []
    for check in healthy:
        own = (check.resolution_ns or 0) / mean_ns
        limits.append((min(own, lost) if _is_bounded(check.detector, seen) else own, check.detector))
    return max(limits, default=(0.0, ""))


def _remarks(seen: Seen) -> str:
    return joined(
        "",
        (
            remarks.unknown(seen.breakdown, seen.code),
            remarks.left_open(seen.breakdown, seen.lead, seen.code),
            "" if seen.device_waits is None else remarks.stopped(seen.breakdown),
            "" if seen.device_waits is None else remarks.devices_wait(seen.device_waits, seen.breakdown),
        ),
    )


def _unexplained(losses: Sequence[Loss], seen: Seen, counts: str) -> str:
    """Return the largest loss with rank and place, what is lost in all, and which recording would show why."""
    largest = _least_explained(losses)
    step = duration(seen.steps.mean_ns or 0)
    said = [
        text("{loss} of the {step} step in {counts}", loss=_unexplained_of(largest), step=step, counts=counts),
        _place(largest, len(seen.ranks)),
    ]
    if len(losses) > 1 and lost_fraction(losses) - largest.fraction >= 0.01:
        said.append(text("; {share} is lost in total", share=percent(lost_fraction(losses))))
    return joined("", (*said, _what_would_show_it(largest, seen)))


def _least_explained(losses: Sequence[Loss]) -> Loss:
    return max(losses, key=lambda loss: loss.unexplained_fraction)


def _by_schedule(seen: Seen) -> str:
    if seen.scheduled < MUCH_LOST:
        return ""
    return text("; the pipeline's schedule alone idles {share} of the step", share=percent(seen.scheduled))


def _loss(loss: Loss) -> str:
    share = percent(loss.fraction)
    named_by_kind = {
        "wait": text("wait for peers takes {share}", share=share),
        "bubble": text("wait for other pipeline stages takes {share}", share=share),
        "idle": text("the GPU idles for its host {share}", share=share),
        "queued": text("the GPU idles with work queued that does not start {share}", share=share),
        "unseen": text("the GPU idles before work whose launch is not in the trace {share}", share=share),
        "communication": text("exposed communication takes {share}", share=share),
        "unattributed": text("unattributed communication takes {share}", share=share),
        "input": text("wait for input takes {share}", share=share),
        "gc": text("garbage collection takes {share}", share=share),
        "compile": text("compilation takes {share}", share=share),
        "checkpoint": text("checkpoints take {share}", share=share),
    }
    return named_by_kind[loss.kind]


def _unexplained_of(loss: Loss) -> str:
    """Return what the findings leave of it."""
    return _loss(replace(loss, fraction=loss.unexplained_fraction))


def _place(loss: Loss, ranks: int) -> str:
    """Return the rank that loses most of it or waits least, and where."""
    label = f"{loss.where} ({loss.call})" if loss.where and loss.call else loss.where or loss.call
    where = text(", most in {label}", label=label) if label else ""
    if loss.steps:
        where = joined("", (where, text(", nearly all of it in {steps}", steps=named("step", loss.steps))))
    if ranks < 2:
        return where
    least, most = duration(loss.least_ns), duration(loss.most_ns)
    if loss.kind in ("wait", "bubble"):
        said = text(
            " (rank {rank} waits least: {least}, others up to {most})", rank=loss.least_rank, least=least, most=most
        )
        return joined("", (where, said))
    if loss.most_ns >= 1.5 * loss.ns_per_step:
        return joined("", (where, text(" (rank {rank}: {most})", rank=loss.most_rank, most=most)))
    return where


def _what_would_show_it(loss: Loss, seen: Seen) -> str:
    if not seen.profiled:
        if seen.is_running:
            return text("; rankscope trigger RUN --count 10 records what ranks and devices do meanwhile")
        return text("; rankscope run --profile-steps A-B records what ranks and devices do meanwhile")
    if loss.kind in ("bubble", "unattributed") and seen.schedule is not None:
        stages, microbatches = seen.schedule
        return plural(
            "; with {number} microbatch on {stages} stages 1F1B idles {share} of its time by itself, less with more of "
            "them or an interleaved schedule",
            "; with {number} microbatches on {stages} stages 1F1B idles {share} of its time by itself, less with more "
            "of them or an interleaved schedule",
            microbatches,
            number=microbatches,
            stages=stages,
            share=percent(theory_fraction(stages, microbatches)),
        )
    if loss.kind == "queued":
        return text("; an Nsight Systems capture shows what the queued work waits for")
    if loss.kind == "unseen":
        return text("; a capture with warm-up steps and with the host's calls holds the launches")
    is_of_others = loss.kind in ("wait", "bubble", "communication", "unattributed")
    if is_of_others and len(seen.ranks) < (seen.world_size or 0):
        return text("; captures of all ranks would show who causes it")
    if loss.steps and seen.steps.count < _FEW:
        return text("; a capture of {steps} steps on all ranks would show whether it recurs", steps=_FEW)
    if loss.kind == "idle" and not loss.call:
        return text("; a capture with with_stack=True shows where the host is")
    if loss.kind == "communication":
        return text("; NCCL's profiler plugin shows whether a link or a rank is slow")
    if seen.steps.count < _FEW:
        return text("; a capture of {steps} steps on all ranks would show whether it recurs", steps=_FEW)
    return text("; recording with rankscope run shows what ranks do meanwhile")


def _besides(findings: Sequence[Finding], losses: Sequence[Loss], ranks: int) -> str:
    """Return the largest loss that the findings do not explain, where it is much."""
    if not losses or not findings[0].lost_ns_per_step:
        return ""
    left = _least_explained(losses)
    if left.unexplained_fraction < max(MUCH_LOST, findings[0].lost_fraction):
        return ""
    said = text("; unexplained: {loss} of the step", loss=_unexplained_of(left))
    return joined("", (said, _place(left, ranks)))


def _absent(seen: Seen) -> str:
    """Return which steps and ranks the verdict does not cover."""
    missing = sorted(set(range(seen.world_size or 0)) - set(seen.ranks))
    not_recorded = (
        plural(
            "; {missing} of {world} was not recorded",
            "; {missing} of {world} were not recorded",
            len(missing),
            missing=named("rank", missing),
            world=seen.world_size,
        )
        if missing
        else ""
    )
    no_steps = seen.without_steps
    not_judged = (
        plural(
            "; {ranks} has no steps and was not analyzed",
            "; {ranks} have no steps and were not analyzed",
            len(no_steps),
            ranks=named("rank", no_steps),
        )
        if no_steps
        else ""
    )
    return joined("", (seen.aside, not_judged, not_recorded))


def _cannot_judge(healthy: Sequence[Healthy], not_checked: Sequence[NotChecked], seen: Seen, absent: str) -> str:
    steps = seen.steps
    why = next((check.why for check in not_checked if check.detector == "slow_rank"), not_checked[0].why)
    if not steps.count:
        hang = (check.why for check in not_checked if check.detector == "hang" and check.unclear)
        why = next(hang, text("no step was seen"))
    if steps.warmup and not steps.count:
        why = text("{steps} seen, all of them warm-up", steps=counted(steps.warmup, "step"))
    place = None if steps.count else seen.code.most()
    seen_at = text("; main threads were mostly at {place}", place=place) if place else ""
    late = "" if steps.count else remarks.waited_for(seen.waits)
    more = joined("", (remarks.made_of(seen.breakdown), seen_at, late, absent))
    if healthy and not steps.count:
        return text("No rank hangs; no verdict: {why}{more}.", why=why, more=more)
    return text("No verdict: {why}{more}.", why=why, more=more)


def _headline(findings: Sequence[Finding], seen: Seen) -> str:
    """Return the first finding, and how many more there are that do not follow from it."""
    first, steps, rate = findings[0], seen.steps, seen.rate
    waiting = len({*seen.ranks} - {*first.ranks})
    said = [text("Likely: {title}", title=first.title) if first.confidence == LIKELY else first.title]
    if steps.mean_ns is not None and first.lost_ns_per_step:
        share, step = percent(first.lost_fraction), duration(steps.mean_ns)
        lost = duration(first.lost_ns_per_step)
        if lost in first.title:
            said.append(text(" ({share} of the {step} step)", share=share, step=step))
        else:  # what is longer is not all lost
            said.append(text(" (it costs {lost}, {share} of the {step} step)", lost=lost, share=share, step=step))
    if first.ranks and waiting and spec_of(first.detector).waited_for and first.chance is None:
        said.append(
            plural(
                "; {waiting} waits for {whom}",
                "; {waiting} wait for {whom}",
                waiting,
                waiting=counted(waiting, "rank"),
                whom=plural("it", "them", len(first.ranks)),
            )
        )
    money = cost_of(first, rate).lost_money_per_hour
    if money is not None and rate.price is not None:
        whole = money_text(rate.ranks * rate.price)
        said.append(text("; it costs {money} of {whole} an hour", money=money_text(money), whole=whole))
    more = sum(1 for finding in findings[1:] if finding.caused_by is None)
    if more:
        said.append(text("; {findings}", findings=counted(more, "more finding")))
    return joined("", said)
