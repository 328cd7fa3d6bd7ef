"""Large collectives move their bytes more slowly than they should, and ranks wait for it.

**Signal.** Bus bandwidth, as nccl-tests counts it, of operations of 1 MB or more (and of 4 n½ where latency is known),
from the arrival of the last rank on. Three measures of what it should be:

- Groups that do the same (operation, size, number of ranks and of nodes; of sends and receives each pair of ranks): one
  is slow if it takes `min_ratio` times as long as the others usually do (where a profiler saw the devices,
  `min_ratio_on_devices` times), and longer than any of them in most steps. In
  a capture of few steps each operation is a sample: most of at least `min_operations` take longer than most of the
  others'. Where no size is known, all operations of a kind count, of which each group has the same.
- The speed of the nodes' network interfaces, where it was recorded: what a node sends while its collectives with other
  nodes transfer, is less than 1 / `min_ratio` of it.

- The run's other steps: in a stretch of at least `min_steps`, transfers take `min_change` times as long as the same
  ones do in the others, and a rank-sum test puts them `min_z` standard deviations apart.

The loss is the part of these transfers that ranks wait for, times what would be saved at the bandwidth of the
other groups or steps, or at four fifths of the interface's; of a group at least what its ranks wait longer for them
than those of other groups for theirs, which hide more of what is shorter.
Above `min_fraction` of the step it is reported.

**Why it costs time.** Communication that is not hidden behind computation lengthens the step by every byte.

**False positives.** An interface that other jobs share. A group whose ranks have slow processors: see `slow_rank`.
Links that differ between nodes are left to `slow_link`. The speed of NVLink and PCIe is not recorded, so a single group
within a node cannot be checked.

**What to try.** Within a node: the topology (`nvidia-smi topo -m`), `NCCL_DEBUG=INFO` for the transport that was
chosen (P2P, SHM, NET), `NCCL_P2P_DISABLE` left over from a test. Between nodes: the interface that is used
(`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, `NCCL_IB_HCA`), sockets instead of RDMA (`NCCL_IB_DISABLE`), more sockets
(`NCCL_NSOCKS_PERTHREAD`, `NCCL_SOCKET_NTHREADS`), MTU.

**Source.** nccl-tests for busbw; transfers above those of groups with the same role: Greyhound, 1.2 there. Thresholds
are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, judged_grid, longest_rows, price, refuse_unsized, transfer_grid
from rankscope.analysis.metrics.bandwidth import bus_factor, lines, transfers
from rankscope.analysis.metrics.exposed_communication import held_up, is_bounded
from rankscope.analysis.metrics.links import ATTAINABLE, busy_links, nic_speeds, nodes_of_groups
from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Estimate,
    StepGrid,
    by_rank_and_step,
    estimate,
    estimate_of_operations,
    over_occurrences,
)
from rankscope.analysis.metrics.trend import longer_stretch
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.lookup import looked_up
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.model.tables import WORDS, is_like
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import bytes_text, duration, percent
from rankscope.analysis.timeline.nccl_durations import sends
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    explains=("exposed_communication", "step_change"),
    explains_of_ranks=("slow_rank", "slow_link"),  # the group's ranks are late for all other ranks
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    lost_as=AS_EXPOSED,
)

_LARGE_BYTES, _LARGE = 1_000_000, 4.0  # and so many n½
_PERSISTENT = 0.8  # of the steps, or of the operations where these are few
_LINKS_DIFFER = 2.0  # as in slow_link
_OF_ALL = ("allreduce", "allgather", "reduce_scatter", "alltoall")


@dataclass(frozen=True, slots=True)
class _Slow:
    """Operations that take longer than they should, and the share of their time that would be saved."""

    title: str
    where: str
    advice: str
    instances: pl.Series
    saved: float
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...] = ()
    error: float | None = None  # of how long they take, as a share, where operations are the samples
    others: tuple[tuple[pl.Series, tuple[int, ...]], ...] = ()  # instances and ranks of other groups


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    ranks: pl.DataFrame,
    counters: pl.DataFrame | None = None,
    links: pl.DataFrame | None = None,
    proxies: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_ratio: float = 2.0,
    min_ratio_on_devices: float = 1.3,
    min_change: float = 1.5,
    min_operations: int = 6,
    min_steps: int = 10,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name groups slower than others, networks slower than their interfaces, and steps in which all are slower."""
    moved = _large(collectives, ranks)
    on_devices = "device_start_ns" in collectives.columns and collectives["device_start_ns"].is_not_null().any()
    ratio = min_ratio_on_devices if on_devices else min_ratio
    alike, checked = _against_groups([moved, _large_receives(collectives, ranks)], ratio, min_operations)
    grid = judged_grid(breakdown, 1)
    # A group that stands out needs neither many steps nor that all other communication is known.
    if grid.of(MIXED).any() or not alike:
        grid = transfer_grid(breakdown, collectives=collectives)
    every = held_up(collectives, phases)
    rows = every.filter(pl.col("instance_id").is_in(moved["instance_id"].implode()))
    if not alike and _loss(rows, grid, grid.ranks, 1.0).ns < min_fraction * grid.step_ns:
        refuse_unsized(every, grid, min_fraction)
        return []
    apart = (links is not None and _differ(links)) or (proxies is not None and _differ(sends(proxies)))
    if apart:
        moved = moved.filter(pl.col("nodes") == 1)
        alike, checked = _against_groups([moved], ratio, min_operations)
    network, known = _against_interfaces(moved, ranks, collectives, counters, min_ratio)
    stretch = _against_other_steps(moved, grid, min_change, min_steps, min_z)
    found = (_finding(slow, every, grid, min_fraction) for slow in [*alike, *network, *stretch])
    findings = [finding for finding in found if finding is not None]
    if not findings:
        _refuse(rows.filter(~pl.col("instance_id").is_in([*checked, *known])), every, grid, min_fraction, apart)
    return findings


def resolution_ns(
    breakdown: pl.DataFrame, collectives: pl.DataFrame | None = None, *, min_fraction: float = 0.05
) -> int:
    """Return the smallest loss per step that would have been reported."""
    return round(min_fraction * transfer_grid(breakdown, collectives=collectives).step_ns)


def _finding(slow: _Slow, every: pl.DataFrame, grid: StepGrid, min_fraction: float) -> Finding | None:
    """Return the finding on these operations, if they cost enough. Senders go on meanwhile."""
    bounded = is_bounded(every)
    of_it = every.filter(pl.col("instance_id").is_in(slow.instances.implode()), pl.col("op") != "send")
    most, lost = (
        _loss(of_it, grid, slow.ranks or grid.ranks, slow.saved, slow.steps, column, slow.error)
        for column in ("exposed_ns", "least_ns")
    )
    if slow.others:
        most, lost = (_beyond_others(slow, every, grid, *bound) for bound in ((most, "exposed_ns"), (lost, "least_ns")))
    if not most.clear or most.ns < min_fraction * grid.step_ns:
        return None
    title = text("{title}: up to {most} longer per step", title=slow.title, most=duration(most.ns))
    return Finding(
        detector="low_bandwidth",
        title=title if bounded else slow.title,
        where=slow.where,
        advice=slow.advice,
        ranks=slow.ranks,
        groups=slow.groups,
        steps=slow.steps,
        evidence=longest_rows(of_it, "collectives"),
        gain_why=text("for how long transfers block ranks was not recorded") if bounded else None,
        **price(grid, lost, None if bounded else lost.ns),
    )


def _beyond_others(slow: _Slow, every: pl.DataFrame, grid: StepGrid, lost: Estimate, column: str) -> Estimate:
    """Return the loss, at least what the group's ranks wait longer than others do for the same operations."""
    waited = [
        _loss(every.filter(pl.col("instance_id").is_in(instances.implode())), grid, of, 1.0, column=column).ns
        for instances, of in ((slow.instances, slow.ranks), *slow.others)
    ]
    beyond = waited[0] - float(np.median(waited[1:]))
    return lost if beyond <= lost.ns else Estimate(beyond, lost.half_width_ns * beyond / max(lost.ns, 1.0))


def _refuse(unchecked: pl.DataFrame, every: pl.DataFrame, grid: StepGrid, min_fraction: float, apart: bool) -> None:
    """Not resolvable where what could not be compared costs time, or what of `every` operation has no size."""
    refuse_unsized(every, grid, min_fraction)
    left = _loss(unchecked, grid, grid.ranks, 1.0)
    if left.ns < min_fraction * grid.step_ns:
        return
    op = unchecked.group_by("op").agg(pl.col("exposed_ns").sum()).sort("exposed_ns")["op"][-1]
    why = text("no other groups do the same, and the speed of the links was not recorded")
    why = text("the links between the nodes differ, which slow_link checks") if apart else why
    lost = percent(left.ns / grid.step_ns)
    if is_bounded(unchecked):
        raise NotResolvable(text("{op} takes {lost} of the step, but {why}", op=op, lost=lost, why=why))
    raise NotResolvable(text("{op} blocks the ranks for {lost} of the step, but {why}", op=op, lost=lost, why=why))


def _large(collectives: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """Return the transfers of all-to-all-ranks operations that are bound by bandwidth.

    With the number of `nodes`, and the members: `of` distinguishes groups. All, where no size is known.
    """
    moved = transfers(collectives, unsized=True).filter(is_like("op", f"^({'|'.join(_OF_ALL)})"))
    fitted = lines(moved.drop_nulls("size_bytes")).items()
    half = {key: line.half_bytes for key, line in fitted if np.isfinite(line.half_bytes)}
    known = pl.DataFrame(
        [(op, group, _LARGE * size) for (op, group), size in half.items()],
        {"op": WORDS["op"], "group_id": pl.Int64, "least_bytes": pl.Float64},
        orient="row",
    )
    least = pl.max_horizontal(pl.col("least_bytes").fill_null(0), pl.lit(_LARGE_BYTES))
    is_large = (pl.col("size_bytes") >= least).fill_null(moved["size_bytes"].null_count() == len(moved))
    large = moved.join(known, on=["op", "group_id"], how="left").filter(is_large, pl.col("ns") > 0)
    return large.join(nodes_of_groups(collectives, ranks), on="group_id").with_columns(of=pl.col("group_id"))


def _large_receives(collectives: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """Return the same of receives on devices, from the arrival of the sender; `of` distinguishes pairs of ranks."""
    node = ranks.select("rank", "node").unique("rank")
    return (
        collectives.filter(
            pl.col("op") == "recv",
            pl.col("instance_id").is_not_null() & pl.col("device_start_ns").is_not_null(),
            pl.col("size_bytes") >= _LARGE_BYTES,
            pl.col("transfer_ns") > 0,
        )
        .join(node, on="rank")
        .join(node.rename({"rank": "peer", "node": "_other"}), on="peer")
        .select(
            *("instance_id", "group_id", "group", "op", "step", "size_bytes"),
            group_size=pl.lit(2, pl.UInt32),
            ns="transfer_ns",
            nodes=pl.when(pl.col("node") == pl.col("_other")).then(1).otherwise(2),
            members=pl.concat_list("rank", "peer").list.sort(),
        )
        .with_columns(of=pl.struct("group_id", "members").rank("dense").cast(pl.Int64))
    )


def _loss(
    rows: pl.DataFrame,
    grid: StepGrid,
    ranks: tuple[int, ...],
    share: float,
    steps: tuple[int, ...] = (),
    column: str = "exposed_ns",
    error: float | None = None,
) -> Estimate:
    """Return the wait of these ranks' median per step, times the share; of `steps` alone where given.

    Of few steps the operations are the samples: of how long they take, where it is known to this `error`; else of how
    long each is waited for.
    """
    if not steps and len(grid.steps) < ENOUGH_STEPS:
        mine = rows.filter(pl.col("rank").is_in(ranks), pl.col("step").is_in(grid.steps))
        of_each = mine.group_by("instance_id").agg(pl.col(column).median())[column].to_numpy()
        waited = estimate_of_operations(share * of_each, len(grid.steps))
        return waited if error is None else Estimate(waited.ns, 1.96 * error * waited.ns)
    exposed = share * np.median(by_rank_and_step(rows, column, ranks, grid.steps), axis=0)
    return over_occurrences(exposed, np.isin(grid.steps, steps)) if steps else estimate(exposed, TRIM)


def _differ(links: pl.DataFrame) -> bool:
    """Say whether some link between nodes is so much slower than another that `slow_link` may name it."""
    rates = busy_links(links)["rate_bytes_per_s"].to_numpy()
    return len(rates) > 0 and bool(rates.max() >= _LINKS_DIFFER * rates.min())


def _against_groups(
    moved: Sequence[pl.DataFrame], min_ratio: float, min_operations: int
) -> tuple[list[_Slow], pl.Series]:
    """Return the groups that take longer than others for the same, and the instances that could be compared."""
    same = ["op", "group_size", "nodes", "size_bytes"]
    found, compared = [], [moved[0]["instance_id"].clear()]
    for rows in (rows for table in moved for _, rows in table.group_by(same, maintain_order=True)):
        groups = rows["of"].unique().sort().to_list()
        if len(groups) < 2:
            continue
        compared.append(rows["instance_id"])
        by_step = rows.group_by("step", "of").agg(pl.col("ns").median()).sort("of")
        taken = by_step.pivot("of", index="step", values="ns").drop("step").to_numpy()
        usual = np.nanmedian(taken, axis=0)
        for number, group in enumerate(groups):
            others = np.delete(taken, number, axis=1)
            others_ns = float(np.median(np.delete(usual, number)))
            if usual[number] < min_ratio * others_ns:
                continue
            if len(taken) >= ENOUGH_STEPS:
                is_slow = float(np.mean(taken[:, number] > np.nanmax(others, axis=1))) >= _PERSISTENT
            else:
                is_slow = _mostly_longer(rows, group, min_operations)
            if is_slow:
                found.append(_slow_group(rows, group, float(usual[number]), others_ns))
    return found, pl.concat(compared)


def _mostly_longer(rows: pl.DataFrame, group: int, least: int) -> bool:
    """Whether most of a group's operations take longer than most of each other group's; `least` of each are needed."""
    taken = {int(of): ns["ns"].to_numpy() for (of,), ns in rows.group_by("of")}
    if min(map(len, taken.values())) < least:
        return False
    shortest = np.quantile(taken.pop(group), 1 - _PERSISTENT)
    return all(shortest > np.quantile(ns, _PERSISTENT) for ns in taken.values())


def _slow_group(rows: pl.DataFrame, group: int, ns: float, others_ns: float) -> _Slow:
    own = rows.filter(pl.col("of") == group)
    op, size, name = str(own["op"][0]), own["size_bytes"][0], str(own["group"][0])
    members, taken = tuple(own["members"][0]), own["ns"].to_numpy()
    error = float(taken.std()) / float(taken.mean()) / len(taken) ** 0.5
    said = {"op": op, "name": name, "members": named("rank", members)}
    if size is None:
        title = text(
            "{op} in group {name} ({members}) takes {times:.2g} times as long as the same ones in other groups",
            times=ns / others_ns,
            **said,
        )
    else:
        moved = bus_factor(op, int(own["group_size"][0])) * int(size)
        busbw, usual = (bytes_text(moved / taken_ns * 1e9) for taken_ns in (ns, others_ns))
        title = text(
            "{op} of {size} in group {name} ({members}) runs at a bus bandwidth of {busbw}/s, in "
            "other groups at {usual}/s",
            **said,
            size=bytes_text(int(size)),
            busbw=busbw,
            usual=usual,
        )
    return _Slow(
        title=title,
        where=text("group {name}", name=name),
        advice=text(
            "Compare the links between {members} with those of the other groups: topology "
            "(nvidia-smi topo -m), the transport that NCCL_DEBUG=INFO names, link errors, other load "
            "on their host.",
            members=named("rank", members),
        ),
        instances=own["instance_id"],
        saved=1 - others_ns / ns,
        groups=(name,),
        ranks=members,
        error=error,
        others=tuple(
            (of_other["instance_id"], tuple(of_other["members"][0]))
            for _, of_other in rows.filter(pl.col("of") != group).group_by("of", maintain_order=True)
        ),
    )


def _against_interfaces(
    moved: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame,
    counters: pl.DataFrame | None,
    min_ratio: float,
) -> tuple[list[_Slow], pl.Series]:
    """Return the network, if it is slower than the interfaces allow, and the instances that could be compared."""
    between = moved.filter(pl.col("nodes") > 1)
    nothing = moved["instance_id"].clear()
    if counters is None or between.is_empty():
        return [], nothing
    speeds = nic_speeds(counters)
    taking_part = (
        collectives.select("instance_id", "rank", "group_id", "end_ns")
        .filter(pl.col("instance_id").is_not_null())
        .pipe(looked_up, between.select("instance_id", "op", "group_size", "size_bytes", "ns"), ["instance_id"])
        .pipe(looked_up, ranks.select("rank", "node").unique("rank"), ["rank"])
        .group_by("instance_id", "node")
        .agg(pl.col("group_id", "op", "group_size", "size_bytes", "ns").first(), pl.col("end_ns").max())
    )
    if not set(taking_part["node"]) <= speeds.keys():
        return [], nothing
    rates = _rates(taking_part)
    node = min(sorted(rates), key=lambda node: rates[node] / speeds[node])
    used = rates[node] / speeds[node]
    instances = between["instance_id"]
    if used * min_ratio >= 1:
        return [], instances
    ops = ", ".join(sorted(between["op"].unique()))
    return [
        _Slow(
            title=text(
                "Collectives between nodes ({ops}) send {rate}/s, {used} of the {speed}/s of the "
                "network interfaces of node {node}",
                ops=ops,
                rate=bytes_text(rates[node]),
                used=percent(used),
                speed=bytes_text(speeds[node]),
                node=node,
            ),
            where=text("between nodes"),
            advice=text(
                "Check which interface is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA), RDMA instead "
                "of sockets (NCCL_IB_DISABLE), more sockets (NCCL_NSOCKS_PERTHREAD, NCCL_SOCKET_NTHREADS), and the "
                "network itself with iperf3 or nccl-tests."
            ),
            instances=instances,
            saved=1 - used / ATTAINABLE,
            groups=tuple(between["group"].drop_nulls().unique().sort().to_list()),
            ranks=(),
        )
    ], instances


def _against_other_steps(
    moved: pl.DataFrame, grid: StepGrid, min_change: float, min_steps: int, min_z: float
) -> list[_Slow]:
    """Return the stretch of steps in which transfers take longer than the same ones do in the others."""
    same = ["op", "group_id", "size_bytes"]
    steps = moved.filter(pl.col("step").is_in(grid.steps)).with_columns(
        usual_ns=pl.col("ns").median().over(same), often=pl.col("step").n_unique().over(same)
    )
    steps = steps.filter(pl.col("often") >= _PERSISTENT * len(grid.steps))
    by_step = steps.group_by("step").agg(pl.col("ns").sum() / pl.col("usual_ns").sum()).sort("step")
    times = by_step["ns"].to_numpy()
    if len(times) < 2 * min_steps:
        return []
    inside = longer_stretch(times, min_change, min_steps, min_z)
    if inside is None:
        return []
    ratio = float(np.median(times[inside]) / np.median(times[~inside]))
    numbers = tuple(by_step["step"].to_numpy()[inside].tolist())
    slow = steps.filter(pl.col("step").is_in(numbers))
    most = slow.group_by([*same, "group", "group_size"]).agg(pl.col("ns").sum()).sort("ns").row(-1, named=True)
    its = pl.all_horizontal(pl.col(name) == most[name] for name in same)
    then, else_ = slow.filter(its), steps.filter(its, ~pl.col("step").is_in(numbers))
    sent = bus_factor(most["op"], most["group_size"]) * most["size_bytes"] * 1e9
    rates = [f"{bytes_text(sent / float(np.median(rows['ns'])))}/s" for rows in (then, else_)]
    until = "" if inside[-1] else text(" to {last}", last=numbers[-1])
    return [
        _Slow(
            title=text(
                "From step {first}{until} transfers take {ratio:.1f} times as long as in the others: "
                "{op} of {size} in group {group} runs at a bus bandwidth of {busbw}, else at {usual}",
                first=numbers[0],
                until=until,
                ratio=ratio,
                op=most["op"],
                size=bytes_text(most["size_bytes"]),
                group=most["group"],
                busbw=rates[0],
                usual=rates[1],
            ),
            where=text("from step {first}{until}", first=numbers[0], until=until),
            advice=text(
                "See what changed at step {first}: other jobs on the network or the hosts, links that "
                "failed over, retransmits and congestion in the nodes' counters before and after.",
                first=numbers[0],
            ),
            instances=slow["instance_id"],
            saved=1 - 1 / ratio,
            groups=tuple(slow["group"].drop_nulls().unique().sort().to_list()),
            ranks=(),
            steps=numbers,
        )
    ]


def _rates(rows: pl.DataFrame) -> dict[int, float]:
    """Bytes per second that each node sends while any of these transfers is under way, each by a ring.

    Where their times are unknown, as if those of all groups ran at once.
    """
    sizes = rows.select("op", "group_size").unique()
    factor = pl.Series([bus_factor(op, ranks) for op, ranks in sizes.iter_rows()], dtype=pl.Float64)
    sent = rows.join(sizes.with_columns(factor=factor), on=["op", "group_size"]).with_columns(
        sent=pl.col("factor") * pl.col("size_bytes"), start_ns=pl.col("end_ns") - pl.col("ns")
    )
    by_group = sent.group_by("node", "group_id").agg(rate=pl.col("sent").sum() / pl.col("ns").sum() * 1e9)
    at_once = dict(by_group.group_by("node").agg(pl.col("rate").sum()).iter_rows())
    timed = sent.filter(~pl.col("node").is_in(sent.filter(pl.col("end_ns").is_null())["node"].implode()))
    reached = pl.col("end_ns").cum_max().shift(1)
    busy_ns = (pl.col("end_ns") - pl.max_horizontal("start_ns", reached)).clip(0).sum()
    found = timed.sort("start_ns").group_by("node").agg(pl.col("sent").sum() / busy_ns * 1e9)
    return at_once | dict(found.iter_rows())
