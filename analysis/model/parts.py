"""The parts that a rank's step is cut into; they do not overlap, and sum to the step.

*Own* parts are what a rank does by itself, *apart* what stops it and has a detector of its own, *blocked* what it waits
for. What a device's marks do not distinguish is *mixed*: computing, waiting or transferring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rankscope.analysis.model.finding import Change
from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.units import signed

__all__ = [
    "APART",
    "BEGAN_LATE",
    "BLOCKED",
    "IDLE_LABELS",
    "LEFT_LATE",
    "MAYBE_BLOCKED",
    "MIXED",
    "OWN",
    "OWN_WORK",
    "PARTS",
    "PART_ORDER",
    "QUEUED",
    "UNSEEN",
    "Part",
    "in_order",
    "part_change",
    "part_name",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: its id, what kind it is, its color on light and on dark pages, and its names.

    `short` has at most 8 columns, for the heading of a column; without it the label serves.
    """

    name: str
    kind: Literal["own", "apart", "mixed", "blocked"]
    color: str
    dark: str = ""
    label: Text
    short: Text | None = None
    means: Text


# A rank's own work first and waiting last: the late rank is the one whose own work is long and whose waiting is short.
_IN_ORDER = (
    Part(
        name="compute",
        kind="own",
        color="#0072b2",
        dark="#2b8fd0",
        label=text("compute"),
        means=text("the rank works, with no communication seen in flight"),
    ),
    Part(
        name="overlapped",
        kind="own",
        color="#56b4e9",
        label=text("overlapped communication"),
        short=text("overlap"),
        means=text("the rank works while communication is in flight; this communication costs nothing"),
    ),
    Part(
        name="memory",
        kind="own",
        color="#7fcdbb",
        label=text("copies"),
        means=text("the device copies or fills memory, and nothing else"),
    ),
    Part(
        name="optimizer",
        kind="own",
        color="#009e73",
        label=text("optimizer"),
        short=text("optim."),
        means=text("the optimizer's step"),
    ),
    Part(
        name="host",
        kind="own",
        color="#5c2e00",
        dark="#fff1d6",
        label=text("host-bound"),
        short=text("host"),
        means=text("GPU idle: the next kernel was launched after the launch queue drained"),
    ),
    Part(
        name="input",
        kind="apart",
        color="#cc79a7",
        label=text("input"),
        means=text("waiting for the next batch"),
    ),
    Part(
        name="gc",
        kind="apart",
        color="#882255",
        dark="#b8457f",
        label=text("garbage collection"),
        short=text("gc"),
        means=text("Python's garbage collector stops the rank"),
    ),
    Part(
        name="compile",
        kind="apart",
        color="#4b3fa0",
        dark="#6a5acd",
        label=text("compile"),
        means=text("torch.compile builds code"),
    ),
    Part(
        name="checkpoint",
        kind="apart",
        color="#999933",
        label=text("checkpoint"),
        short=text("save"),
        means=text("the main thread saves a checkpoint"),
    ),
    Part(
        name="other",
        kind="own",
        color="#636a73",
        label=text("other"),
        means=text("none of the others"),
    ),
    Part(
        name="mixed",
        kind="mixed",
        color="#bbcc33",
        label=text("compute or communication"),
        short=text("mixed"),
        means=text("a phase with communication: only a profiled window distinguishes compute, waiting and transfer"),
    ),
    Part(
        name="unsplit",
        kind="blocked",
        color="#f0e442",
        label=text("unattributed communication"),
        short=text("unattr."),
        means=text("stopped by communication: waiting or transfer, it is not known which"),
    ),
    Part(
        name="transfer",
        kind="blocked",
        color="#e69f00",
        label=text("transfer"),
        means=text("stopped while bytes move"),
    ),
    Part(
        name="bubble",
        kind="blocked",
        color="#f4a582",
        label=text("waiting for a neighbour"),
        short=text("bubble"),
        means=text("stopped until the other side of a send or receive arrives"),
    ),
    Part(
        name="wait",
        kind="blocked",
        color="#d55e00",
        label=text("waiting for peers"),
        short=text("wait"),
        means=text("stopped until the last rank arrives"),
    ),
)
PARTS = {part.name: part for part in _IN_ORDER}
PART_ORDER = tuple(PARTS)
OWN_WORK = tuple(part.name for part in _IN_ORDER if part.kind in ("own", "apart"))
# In these the order is that of sums and of ties.
OWN = ("compute", "overlapped", "memory", "host", "optimizer", "other")
BLOCKED = ("wait", "bubble", "transfer", "unsplit")
MIXED = "mixed"
MAYBE_BLOCKED = (*BLOCKED, MIXED)
APART = ("input", "gc", "compile", "checkpoint")

# Labels that name no place in the program. Of a device's idle time: its own gap from one row to the next; longer,
# although the next was queued (it waits for an event, or for what the trace does not show); before work of unknown
# launch; and where the host was in no region.
QUEUED, UNSEEN = "queued, not started", "launch not in the trace"
IDLE_LABELS = ("between kernels", QUEUED, UNSEEN, "no region")
# Of what another rank waits for.
LEFT_LATE = "left the last operation late"  # the two did the same since, and one began it later
BEGAN_LATE = "began later"  # the same, and the two had never met before


def part_name(part: str) -> Text:
    """Give the name of a part of the step, for a text that is made before its language is known."""
    return PARTS[part].label if part in PARTS else Text(part, {})


def in_order(*parts: Iterable[str]) -> list[str]:
    """All parts that one of these has, in the order in which parts are shown."""
    used = {part for of in parts for part in of}
    return [*(part for part in PART_ORDER if part in used), *sorted(used - set(PART_ORDER))]


def part_change(change: Change) -> Text:
    """Give by how much a part of the step is another, with its name."""
    return text("{part} {ns}", part=part_name(change.part), ns=signed(change.ns))
