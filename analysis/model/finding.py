"""Findings and the whole report: frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "COARSE",
    "LEAST_GAIN",
    "MANY_OUTLIERS",
    "REST",
    "Blame",
    "Change",
    "Clock",
    "DevicePart",
    "Evidence",
    "Fidelity",
    "Finding",
    "Found",
    "Gap",
    "Healthy",
    "History",
    "Lead",
    "Look",
    "Loss",
    "NotChecked",
    "Operator",
    "OthersWaited",
    "Part",
    "PathPart",
    "PhaseTime",
    "Pipeline",
    "PredictedFix",
    "Rate",
    "Report",
    "Span",
    "StepSummary",
    "Utilisation",
    "Wait",
    "Window",
]

REST = "rest"  # what is not listed of the critical path, or of the causes of waiting
COARSE = 0.15  # share of the step below which a verdict without a finding must say that it would see nothing
MANY_OUTLIERS = 0.05  # share of the time from which on what outliers take beyond the mean step is no side issue
LEAST_GAIN = 0.02  # share of the step from which on a predicted fix is listed
COUNTED = 0.9  # share of the products' time from which on the FLOPs by shapes are those of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Rows that show a finding: a table and a window on the run's clock (node 0), to open in the timeline."""

    table: str
    rank: int | None = None
    node: int | None = None
    start_ns: int
    end_ns: int
    note: str = ""
    steps: tuple[int, int] | None = None  # of a long run: these steps hold it, and are not held; RUN/steps=FIRST-LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersWaited:
    """The time that other ranks waited for the late ranks of a finding, over all that was read.

    Directly or through others, whatever the late ranks did meanwhile; `ns` is added over the ranks.
    """

    ranks: tuple[int, ...]
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that makes the job slow: its ranks, where, what it costs, what a fix would save.

    `lost_ns_per_step` is the mean over the steps judged, `uncertainty_ns` its 95 % half width;
    fractions are of the mean step, 0 to 1. A detector gives a finding its `fix`, as `rankscope whatif` takes it; the
    gain comes from a replay with that fix, see `diagnose`.

    `confidence` is "confirmed" where statistics and replay agree, "likely" where only one of them shows it or where few
    operations were seen; the diagnosis sets it where the detector has not. `chance` is how often ranks that are all
    alike would show as much, by permutation; None: another test was made.
    """

    detector: str
    severity: str  # "high" | "medium" | "low"
    title: str
    where: str
    advice: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()  # the steps where it shows, empty: all that were judged
    lost_ns_per_step: int
    lost_ns_total: int
    lost_fraction: float
    uncertainty_ns: int
    gain_fraction: float | None = None  # None: not predicted, and `gain_why` says why
    gain_uncertainty_fraction: float | None = None  # its 95 % half width; None: by the detector, or not predicted
    gain_why: str | None = None
    fix: str | None = None
    confidence: str = ""  # "confirmed" | "likely"
    chance: float | None = None
    caused_by: str | None = None
    others_waited: OthersWaited | None = None  # None: no rank is named, or none waited for it
    code: str | None = None  # where in the code its ranks are, and the others are not; None: unknown from samples
    evidence: tuple[Evidence, ...] = ()
    parts: tuple[str, ...] = ()  # of the step, that show it; empty: none do


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A detector that found nothing; `resolution_ns` per step is its detection limit."""

    detector: str
    resolution_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked:
    """`unclear`: what it looks for may well be there. The steps were too few, or scattered, or a collector failed."""

    detector: str
    why: str
    unclear: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Time of the mean step that is lost in one way, mean over the ranks, as the breakdown has it.

    `kind` is "wait" (for peers), "bubble" (for a pipeline's neighbour), "idle" (the device waits for its host),
    "queued" (it idles though work is queued), "unseen" (it idles before work whose launch was not recorded),
    "communication" (exposed transfers), "unattributed" (communication that was not matched), "input", "gc", "compile"
    or "checkpoint". `where` is the label that holds most of it; `steps` those that hold nearly all of it where they are
    few, else empty. `call` is what the host calls meanwhile, if that is mostly one. `least_rank` and `most_rank` lose
    the least and most.
    `unexplained_fraction` is what the findings, together, leave of `fraction`, and of a bubble the schedule, too.
    """

    kind: str
    ns_per_step: int
    fraction: float
    where: str
    least_rank: int
    least_ns: int
    most_rank: int
    most_ns: int
    steps: tuple[int, ...] = ()
    call: str = ""
    explained_by: tuple[str, ...] = ()
    unexplained_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The steps that were judged; `warmup` and `outliers` were excluded and are counted here.

    `outliers_fraction` of the time of judged steps and outliers together is what outliers take beyond the mean step.
    """

    count: int
    warmup: int
    outliers: int
    outliers_fraction: float = 0.0
    mean_ns: int | None  # over ranks and judged steps: what shares are shares of
    median_ns: int | None
    p90_ns: int | None
    source: str  # "rankscope.step()" | "ProfilerStep" | "optimizer" | "named ranges" | "optimizer's kernels" | …


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Steps that follow each other, `first` to `last`, and their median length."""

    first: int
    last: int
    median_ns: int

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Mean time per step that a part takes more, or less where it is negative."""

    part: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A finding in steps other than those that were read."""

    detector: str
    severity: str
    title: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A phase of a run whose steps are longer or shorter than the last ones, and its findings.

    Of its steps `analyzed` were; `findings` are root causes in these, `changes` what parts take more than in the last
    steps. Where there are none, `why` may say so. As many `others` differ in the same direction.
    """

    phase: Span
    others: int = 0
    analyzed: int = 0
    findings: tuple[Found, ...] = ()
    changes: tuple[Change, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All steps of a run of which only `read` are in the tables: lengths on one rank, by spans of as many steps each.

    Of steps before `kept` no record is left. The others, and those that had been analyzed before, were analyzed in
    stretches, `analyzed` steps in all, those in the tables included; the report's verdict, steps, findings, losses,
    checks and breakdown are of all of them, everything else is of those in the tables.
    """

    rank: int
    count: int
    kept: int
    median_ns: int
    read: Span
    spans: tuple[Span, ...]
    analyzed: int = 0  # 0: no more than what was read
    stretches: int = 0
    looks: tuple[Look, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Mean time per judged step of one rank in one part of the breakdown; a rank's parts sum to its mean step."""

    rank: int
    part: str
    ns_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    rank: int
    window_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    memory_ns: int
    overlap_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """The time of a process group's communication, mean per judged step of its ranks.

    `kind` is what it is for: "data", "sharded", "tensor", "pipeline", "expert"; where its name does not say, also
    "exchange" (all-to-alls) or "unknown" (other operations of some of the ranks). `exposed_ns` are transfers that no
    computation hides, `wait_ns` is for late peers, `unattributed_ns` either of them: not matched; `hidden_by` is where
    most of what runs meanwhile was launched.
    """

    group: str
    group_size: int | None
    kind: str
    op: str
    exposed_ns: int
    wait_ns: int
    unattributed_ns: int
    overlapped_ns: int
    hidden_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """A device's mean time per judged step in one phase, from CUDA events; a rank's phases sum to its mean step.

    `communication_ns_per_step` is what NCCL's operations of the phase took together, hidden or not, as far as it is
    known; None: nowhere.
    `ahead_ns`: how far the host was ahead where the phase ended, median.
    """

    rank: int
    phase: str
    ns_per_step: int
    communication_ns_per_step: int | None
    ahead_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeShare:
    """A call in which main threads were in this share of the samples of judged steps, with all that it calls.

    Where no step was judged it is the share of all samples, and `ns_per_step` is None. `depth` is how many listed calls
    it is in; calls follow the one that they are in. `part` is that of the step in which most of it is, None where that
    is none. `uncertainty` is the 95 % half width of `fraction`.
    """

    depth: int
    part: str | None
    function: str
    file: str
    line: int
    fraction: float
    uncertainty: float
    ns_per_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """How far hosts are ahead of their devices, by CUDA events in the judged steps.

    `ahead_ns` is the median over all marks. Of the step, `paced_fraction` is the share in which the host has no lead,
    be it slow or waiting for its device, and `idle_fraction` what a device idles for want of work at most.
    """

    ahead_ns: int
    paced_fraction: float
    idle_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank's wait for the last arriver, over all matched collectives that were read.

    `caused_ns` is what all ranks waited because of this one, directly or through others: both have the same sum.
    """

    rank: int
    waited_ns: int
    caused_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Wait time by one root cause, over all that was read: one rank took longer over something than the others.

    Operations may be waited for at once, or while a rank works: `blocked_ns` counts each moment of a rank once, and
    only where it waited. The last one of a report is the rest, of no rank, if there is any.
    """

    rank: int | None
    part: str
    label: str
    waited_ns: int
    blocked_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """Mean time per judged step on the critical path; all together sum to the mean step of the job.

    Rank None: a transfer, for which all its ranks had come. The last one, part "rest", is all that is not listed.
    """

    rank: int | None
    part: str
    label: str
    ns_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a pipeline-parallel job is scheduled, and how much of it is bubble. Fractions are 0 to 1.

    The bubble is what a stage idles between the first forward of any stage and the last backward of any, on average
    over the steps without the quarter of shortest and of longest ones. `theory_fraction` is that of equally fast
    stages that never wait for anything but each other's computation; None: the schedule is not known. `excess` splits
    the difference between the busiest stage's bubble and the theory, and sums to it.
    """

    schedule: str  # "1F1B" | "GPipe" | either "interleaved" | "ZB-H1" | "ZBV" | "DualPipe" | "DualPipeV" | "unknown"
    stages: int
    microbatches: int
    theory_fraction: float | None
    bubble: dict[int, float]  # stage -> fraction
    busiest_stage: int
    excess: dict[str, float]
    explanation: str

    @property
    def needed_fraction(self) -> float:
        """What the schedule needs as its bubble, as a share of the steps as they are; 0: not known."""
        theory = self.theory_fraction or 0.0
        return (1 - self.bubble[self.busiest_stage]) * theory / (1 - theory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How well a replay of the run, from the ranks' own time alone, meets its steps.

    Errors are fractions of the measured step: median and 90th percentile without sign; that of the mean step with it.
    """

    steps: int
    median_error: float
    p90_error: float
    mean_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFix:
    """The gain of a fix in a replay, as `rankscope whatif --fix` takes it; mean over the judged steps, never negative.

    `uncertainty_ns` is a 95 % half width. `finding` is the detector whose finding has this fix; where the gain differs
    from its cost by more than the error, or by a factor of two, `finding_lost_ns` is that cost, ns per step.
    """

    fix: str
    step_ns: int  # with the fix
    gain_ns: int
    gain_fraction: float
    uncertainty_ns: int
    finding: str | None = None
    finding_lost_ns: int | None = None

    @property
    def fixes(self) -> list[str]:
        """The single fixes, of which several are written `input + rank:8`."""
        return self.fix.split(" + ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    table: str
    rank: int | None
    node: int | None
    count: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """How far a rank had come in a process group when the job hung; numbers are those of operations in the group.

    `seq` and `op` are the first operation that has not ended; None: none is outstanding. `state` is
    "started" (its device has begun it), "enqueued", "behind" (others have enqueued more), "idle" (nothing is
    outstanding), or "unread" (its state could not be read). `frame` is the line that called it, or the
    training thread's last sampled place.
    """

    rank: int
    group: str
    enqueued: int | None
    started: int | None
    completed: int | None
    op: str
    seq: int | None
    state: str
    frame: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How a node's clock was brought to node 0's: time on node 0 = time + offset_ns + drift × (time - at_ns)."""

    node: int
    offset_ns: int
    drift_ppm: float
    at_ns: int = 0  # where on the node's own clock the offset holds
    error_ns: int | None  # None: unknown, cross-node times are not to be trusted
    source: str  # "reference" | "pings" | "causality" | "ends" | "unix time" | "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Time per step in operators of one name in a window, without that of operators in them; mean over ranks."""

    name: str
    ns_per_step: int
    calls_per_step: float
    slowest_rank: int
    slowest_ns_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A deep window: steps in which torch.profiler was on. `folder` is a run of its own, in the run's folder."""

    number: int
    folder: str
    reason: str
    steps: tuple[int, ...]  # as the ranks count them, from 0
    ranks: tuple[int, ...]
    clock_error_ns: int | None  # of the profiler's clock against the run's
    start_stall_ns: int | None  # for how long it held the training at most, at its start and at its end
    stop_stall_ns: int | None
    kernels: int
    verdict: str  # on what devices did in it, which only a window shows; empty where it has no device work
    operators: tuple[Operator, ...]  # the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """MFU of the mean step, a fraction: FLOPs that the model needs in it over those of its devices at peak.

    Both are of all ranks that were seen together; `peak_flops` is per second. Where `counted` is given, the FLOPs were
    not, but are those that operators did by the shapes of their inputs (HFU): these operators have this share of the
    time that the devices spend on products. Below `COUNTED` it is a lower bound.
    """

    mfu: float
    flops_per_step: float
    peak_flops: float
    counted: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The hourly use of the job: as many `unit` ("GPU-hours" or "rank-hours") as the job has `ranks`.

    `price` is that of one of them, in whatever the user counts in; None: not given.
    """

    ranks: int
    unit: str
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything the terminal, HTML and JSON forms show; they add nothing of their own."""

    path: str
    source: str
    verdict: str
    ranks: tuple[int, ...]
    world_size: int | None
    nodes: tuple[int, ...]
    rate: Rate
    steps: StepSummary
    findings: tuple[Finding, ...]
    healthy: tuple[Healthy, ...]
    not_checked: tuple[NotChecked, ...]
    breakdown: tuple[Part, ...]
    losses: tuple[Loss, ...] = ()  # the largest first; empty where no step was analyzed
    status: str = "amber"  # "green": no bottleneck | "amber": unexplained, or not known well enough | "red": a finding
    history: History | None = None  # None: all steps were read
    device: tuple[DevicePart, ...] = ()
    groups: tuple[GroupTime, ...] = ()  # those whose communication blocks most
    phases: tuple[PhaseTime, ...] = ()  # with `lead` only where CUDA events were recorded
    lead: Lead | None = None
    code: tuple[CodeShare, ...] = ()  # a tree; empty where too little was sampled
    waits: tuple[Wait, ...] = ()
    blames: tuple[Blame, ...] = ()  # the largest, by `blocked_ns`
    critical_path: tuple[PathPart, ...] = ()  # empty where the run cannot be replayed
    pipeline: Pipeline | None = None
    fixes: tuple[PredictedFix, ...] = ()  # the largest gain first; empty where none is worth it or nothing is replayed
    fidelity: Fidelity | None = None  # None: nothing was replayed
    utilisation: Utilisation | None = None  # None: the model's FLOPs were not given, or a device's peak is not known
    windows: tuple[Window, ...] = ()
    states: tuple[GroupState, ...] = ()  # of a job that hangs, the root cause's ranks first
    gaps: tuple[Gap, ...] = ()
    clocks: tuple[Clock, ...] = ()
    matched_fraction: float | None = None  # share of collective rows matched on all their ranks
    step_ns: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rank -> length of each judged step, in order
    environment: dict[str, str] = field(default_factory=dict)
