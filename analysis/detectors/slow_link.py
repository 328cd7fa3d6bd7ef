"""The link of one node, or between two nodes, or a network card is slower than the others.

**Signal.** Blocked time in transfer, after the last rank has arrived, is above `min_fraction` of the step, of all ranks
or of those at the link, for which the others of a pipeline wait, and the sockets between some nodes get through less
than 1 / `min_ratio` of the bytes per busy second that they do between others. Among 16 other links or more, which show
how much links differ by chance, 1 / `min_ratio_of_many` is enough, if that is `min_z` robust standard deviations below
them: on many nodes most of a transfer is latency. A node is named when all of its links are slow and those among the
other nodes are not; so are several, no more than have all slow links. Otherwise the link between two nodes is. With
two nodes there is one link only, and it is named where one of its directions is slow. Links are compared with those
that carry about as many bytes over as many sockets, which do the same for the job: a socket of a pipeline may share its
card with seven others, that of a ring has one for itself. If the run can be replayed, the cost is what the replay gains
with the others' rate, for as long as the link had data under way.

Where NCCL's profiler plugin was at work, links are compared by what its proxies sent while the network had data: that
is free of late peers and late GPUs, and works with RDMA. Besides nodes, single ranks are compared, which send through
cards of their own: a card is named where all of its links are slow and those among the others are not, else the one
way. Where how long ranks wait was not recorded, transfers between nodes bound the loss: at least the last one of
a step is waited for, at most all are. The lower number is reported, the title has the upper one, which must be above
`min_fraction`. The detection limit is at least what the slowest link costs without being reported.

**Why it costs time.** A collective is as fast as the slowest link it uses, so all ranks get slower at once, and
each one's own view shows nothing but long communication. A slow rank is different: its own communication is the
shortest.

**False positives.** Links that differ by design (nodes in two racks, mixed NICs). A node whose processors are
overloaded sends slowly as well. Links that are all slow alike are no finding here: there is no healthy one to
compare with.

**What to try.** Compare the node's link speed, duplex and error counters with the others (`ethtool`), look for
other traffic on it, for a wrong interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`) and for shaping; retransmits
point at a cable or a switch port.

**Source.** Slow links by aligned arrivals and long transfers: Greyhound. Their 1.2 for links that many others are
compared with. Locating by intersection of the slow edges. Busy time and round trips: Linux `tcp_info`. Thresholds were
measured between network namespaces with a shaped link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, price, transfer_grid, visible
from rankscope.analysis.metrics.exposed_communication import held_up, is_bounded
from rankscope.analysis.metrics.links import PairsOfNodes, busy_links, links_of_sends, nodes_of_groups, pairs_of_nodes
from rankscope.analysis.metrics.step_matrix import TRIM, Estimate, Floats, StepGrid, estimate, robust_deviation, sums
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.text.message import Text, plural, text
from rankscope.analysis.text.phrases import named, some_ranges
from rankscope.analysis.text.units import bytes_text, duration, percent
from rankscope.analysis.timeline.nccl_durations import sends
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives", "tcp"),
    explains=("load_imbalance", "exposed_communication", "low_bandwidth", "pipeline_bubble"),
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    # Waiting for a neighbour's transfer is not bound by bytes; what is left of a shorter one may be hidden.
    cost="as_replayed",
    waited_for=False,
    parts=("transfer",),
    lost_as=(*AS_EXPOSED, "wait", "bubble"),
)

_MANY = 16  # links show how much healthy ones differ
_Slower = Callable[[float, Floats], bool]  # is a rate slower than these others
_ALIKE = 2.0  # times the rate of the slowest: then the job would still wait for it
_MORE = 2.0  # times as long as the median rank: then the ranks at a link are blocked, and the others wait for them
_MODEL_ERROR = 0.25  # of the loss: transfer is not bytes alone, so it does not shrink quite as the rate grows


@dataclass(frozen=True, slots=True)
class _Slow:
    """The nodes named (all of their links, or the link between two) and the rates that show it.

    With `ranks` their cards are named, not the nodes': one, all of its links; two, the way from one to the other.
    """

    nodes: tuple[int, ...]
    rate: float
    healthy_rate: float
    ranks: tuple[int, ...] = ()
    is_pair: bool = False


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Time per step for which transfers block a rank (median over ranks); an upper bound if it was not recorded.

    `nodes`: it is that of their ranks, which are blocked for longer than the others; empty: of all.
    """

    grid: StepGrid
    ns: Estimate
    most_ns: float | None
    nodes: tuple[int, ...] = ()

    @property
    def bound_ns(self) -> float:
        return self.ns.ns if self.most_ns is None else self.most_ns


def detect(
    breakdown: pl.DataFrame,
    ranks: pl.DataFrame,
    steps: pl.DataFrame,
    links: pl.DataFrame | None = None,
    collectives: pl.DataFrame | None = None,
    proxies: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_ratio: float = 2.0,
    min_ratio_of_many: float = 1.2,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name the node, the link or the card that is slower than the others, if transfer costs the job time."""
    transfer = _transfer(breakdown, ranks, collectives)
    seen, sent = _seen(links, proxies)
    busy = busy_links(seen)
    if busy.is_empty():
        raise NotResolvable(text("no traffic between nodes was seen in TCP sockets"))
    grid = transfer.grid

    def slower(rate: float, others: Floats) -> bool:
        usual = float(np.median(others))
        by_chance = min_z * robust_deviation(others) if len(others) >= _MANY else np.inf
        return usual >= min_ratio * rate or (usual >= min_ratio_of_many * rate and usual - rate >= by_chance)

    pairs = pairs_of_nodes(busy)
    slow = _slow_nodes(pairs, slower, 1 / min(min_ratio, min_ratio_of_many)) or _slow_pair(pairs, busy, slower)
    if slow is None and sent is not None:
        slow = _slow_card(sent, min_ratio)
        transfer = _transfer(breakdown, ranks, collectives, slow.ranks) if slow is not None else transfer
    elif slow is not None:
        transfer = _at(slow.nodes, transfer, breakdown, ranks, collectives)
    if slow is None:
        if len(pairs) == 1 and transfer.bound_ns >= min_fraction * grid.step_ns:
            raise NotResolvable(
                text(
                    "the only link between the nodes is equally fast in both directions; transfer takes {transfer} "
                    "({share}) of the step, and there is no other link to compare with",
                    transfer=duration(transfer.bound_ns),
                    share=percent(transfer.bound_ns / grid.step_ns),
                )
            )
        return []
    share = 1 - slow.rate / slow.healthy_rate
    error = 0.0 if transfer.most_ns is not None else _MODEL_ERROR * transfer.ns.ns * share
    lost = Estimate(transfer.ns.ns * share, transfer.ns.half_width_ns * share + error)
    if (transfer.most_ns is None and not lost.clear) or share * transfer.bound_ns < min_fraction * grid.step_ns:
        return []
    return [_finding(slow, transfer, lost, share, ranks, _evidence(seen, slow, steps, sent))]


def resolution_ns(
    breakdown: pl.DataFrame,
    ranks: pl.DataFrame,
    links: pl.DataFrame | None = None,
    collectives: pl.DataFrame | None = None,
    proxies: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> int:
    """Return the smallest loss by a slow link that would have been reported, or what the slowest one costs if more."""
    transfer = _transfer(breakdown, ranks, collectives)
    judged = pl.col("rank").is_in(transfer.grid.ranks)
    unseen = sorted(set(ranks["node"].drop_nulls()) - set(ranks.filter(judged)["node"]))
    if unseen:
        raise NotResolvable(text("no step of {nodes} was seen", nodes=named("node", unseen)))
    seen, _ = _seen(links, proxies)
    busy = busy_links(seen)
    nodes, relative = _slowest(pairs_of_nodes(busy), busy)
    slowest_ns = (1 - relative) * _at(nodes, transfer, breakdown, ranks, collectives).bound_ns
    return visible(transfer.grid, max(min_fraction * transfer.grid.step_ns, transfer.ns.half_width_ns, slowest_ns))


def _seen(links: pl.DataFrame | None, proxies: pl.DataFrame | None) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Return the links between nodes, and what NCCL's proxies sent over them where they say so."""
    sent = None if proxies is None else sends(proxies)
    if sent is not None and len(sent):
        return links_of_sends(sent), sent
    if links is None:
        raise NotResolvable(text("no TCP traffic between nodes was recorded, nor what NCCL's proxies sent"))
    return links, None


def _transfer(
    breakdown: pl.DataFrame, ranks: pl.DataFrame, collectives: pl.DataFrame | None, of: tuple[int, ...] = ()
) -> _Transfer:
    """Return the time per step in which a rank is blocked while bytes move, or bounds where only durations are known.

    Of the median rank, or of that of these.
    """
    if ranks["node"].n_unique() < 2:
        raise NotResolvable(text("all ranks that were seen run on one node"))
    grid = transfer_grid(breakdown, FEW_STEPS, collectives)
    mine = np.isin(grid.ranks, of or grid.ranks)
    if collectives is not None and is_bounded(collectives):
        across = nodes_of_groups(collectives, ranks).filter(pl.col("nodes") > 1)["group_id"]
        rows = held_up(collectives, breakdown.clear()).filter(pl.col("group_id").is_in(across.implode()))
        least, most = (
            estimate(np.median(sums(grid, rows, column)[mine], axis=0), TRIM) for column in ("least_ns", "exposed_ns")
        )
        return _Transfer(grid, least, most.ns)
    return _Transfer(grid, estimate(np.median(grid.of("transfer")[mine], axis=0), TRIM), None)


def _at(
    nodes: tuple[int, ...],
    transfer: _Transfer,
    breakdown: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None,
) -> _Transfer:
    """Return the transfer of the ranks on these nodes if they are blocked for much longer, else as it is, of all."""
    there = set(ranks.filter(pl.col("node").is_in(nodes))["rank"]) & set(transfer.grid.ranks)
    if not there:
        return transfer
    theirs = _transfer(breakdown, ranks, collectives, tuple(sorted(there)))
    return replace(theirs, nodes=nodes) if theirs.bound_ns > _MORE * transfer.bound_ns else transfer


def _finding(
    slow: _Slow,
    transfer: _Transfer,
    lost: Estimate,
    share: float,
    ranks: pl.DataFrame,
    evidence: tuple[Evidence, ...],
) -> Finding:
    what = _name(slow)
    if transfer.most_ns is None:
        blocked = duration(transfer.ns.ns)
        cost = text("all ranks are blocked {transfer} per step while bytes move", transfer=blocked)
        if transfer.nodes:
            on = named("node", sorted(transfer.nodes))
            cost = text("ranks on {nodes} are blocked {transfer} per step while bytes move", nodes=on, transfer=blocked)
    else:
        cost = text(
            "transfers between nodes take {transfer} per step, up to {lost} more than at that rate",
            transfer=duration(transfer.most_ns),
            lost=duration(share * transfer.most_ns),
        )
    of_node = tuple(ranks.filter(pl.col("node").is_in(slow.nodes))["rank"].unique().sort().to_list())
    seen_blocked = transfer.most_ns is None
    return Finding(
        detector="slow_link",
        title=plural(
            "The {what} is slow ({rate}/s against {usual}/s elsewhere): {cost}",
            "The {what} are slow ({rate}/s against {usual}/s elsewhere): {cost}",
            1 if slow.is_pair else len(slow.nodes),
            what=what,
            rate=bytes_text(slow.rate),
            usual=bytes_text(slow.healthy_rate),
            cost=cost,
        ),
        where=text("the {what}", what=what),
        advice=text(
            "Compare interface, link speed and error counters of {nodes} with the others (ethtool); look for other "
            "traffic, shaping, or a wrong GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME.",
            nodes=named("node", sorted(set(slow.nodes))),
        ),
        ranks=slow.ranks or (() if slow.is_pair else of_node),
        nodes=tuple(sorted(set(slow.nodes))),
        evidence=evidence,
        fix=str(Fix.link(*slow.nodes, is_pair=slow.is_pair)) if seen_blocked and not slow.ranks else None,
        gain_why=None if seen_blocked else text("for how long transfers block ranks was not recorded"),
        **price(transfer.grid, lost),
    )


def _name(slow: _Slow) -> Text:
    if slow.ranks:
        way = [text("rank {rank} (node {node})", rank=r, node=n) for r, n in zip(slow.ranks, slow.nodes, strict=True)]
        if len(way) == 1:
            return text("network card of {rank}", rank=way[0])
        return text("network from {rank} to {peer}", rank=way[0], peer=way[1])
    if slow.is_pair:
        return text("link between node {node} and node {peer}", node=slow.nodes[0], peer=slow.nodes[1])
    nodes = some_ranges(slow.nodes)
    return plural("link of node {node}", "links of nodes {nodes}", len(slow.nodes), node=slow.nodes[0], nodes=nodes)


def _slow_card(sent: pl.DataFrame, min_ratio: float) -> _Slow | None:
    """Return the rank all of whose links are slow, of few that are; else the one way that is."""
    ways, rate = busy_links(sent), pl.col("rate_bytes_per_s")
    slow = ways.filter(rate * min_ratio <= rate.median())
    healthy = ways.filter(rate * min_ratio > rate.median())
    if slow.is_empty() or len(slow) >= len(healthy):
        return None
    slow_rate, healthy_rate = (float(np.median(of["rate_bytes_per_s"].to_numpy())) for of in (slow, healthy))
    ends = [(row["rank"], row["peer_rank"]) for row in slow.iter_rows(named=True)]
    node_of = dict([*sent.select("rank", "node").iter_rows(), *sent.select("peer_rank", "peer_node").iter_rows()])
    shared = set.intersection(*map(set, ends)) - {*healthy["rank"], *healthy["peer_rank"]}
    if len(shared) == 1:
        (rank,) = shared
        return _Slow((node_of[rank],), slow_rate, healthy_rate, (rank,))
    if len({frozenset(way) for way in ends}) > 1:
        return None
    return _Slow((node_of[ends[0][0]], node_of[ends[0][1]]), slow_rate, healthy_rate, ends[0], is_pair=True)


def _slow_nodes(pairs: PairsOfNodes, slower: _Slower, most: float) -> _Slow | None:
    """Return the nodes of which even the fastest link is slower than those among the others.

    Such a link has no more than the share `most` of the usual rate: others are not compared one by one.

    Of several such nodes no more than have all of their links: between two with slow cards one has slow links only.
    """
    slow = []
    for node in pairs.nodes_below(most):
        _, own, among_others = pairs.against_others(pairs.of(node))
        if len(own) > 1 and len(among_others) and slower(own.max(), among_others):
            slow.append(node)
    if not slow:
        return None
    needed = list(slow)
    for node in slow:
        others = [other for other in needed if other != node]
        if others and (pairs.of(*others) == pairs.of(*slow)).all():
            needed = others
    each = {}
    for node in needed:
        rate, own, among_others = pairs.against_others(pairs.of(node))
        each[node] = _Slow((node,), rate, _usual(rate, own, among_others))
    slowest = min(each.values(), key=lambda one: one.rate / one.healthy_rate)
    least = _ALIKE * slowest.rate / slowest.healthy_rate
    return replace(slowest, nodes=tuple(n for n, one in each.items() if one.rate / one.healthy_rate <= least))


def _slow_pair(pairs: PairsOfNodes, busy: pl.DataFrame, slower: _Slower) -> _Slow | None:
    """Return the pair of nodes whose link is slower than those of all other pairs.

    Of two nodes, than its other direction.
    """
    nodes, _ = _slowest(pairs, busy)
    if len(pairs) == 1 and len(busy) == 2:
        low, high = sorted(busy["rate_bytes_per_s"])
        return _Slow(nodes, low, high, is_pair=True) if slower(low, np.array([high])) else None
    rate, own, others = pairs.against_others(pairs.of(*nodes, is_pair=True))
    if not len(own) or not len(others) or not slower(own[0], others):
        return None
    return _Slow(nodes, rate, _usual(rate, own, others), is_pair=True)


def _slowest(pairs: PairsOfNodes, busy: pl.DataFrame) -> tuple[tuple[int, ...], float]:
    """Return the nodes of the slowest link, and its rate over the usual one; of two nodes, over the other direction."""
    if not len(pairs):
        return (), 1.0
    if len(pairs) == 1:
        rates = busy["rate_bytes_per_s"].to_numpy()
        return tuple(pairs.nodes[0].tolist()), float(rates.min() / rates.max())
    _, _, relative = pairs.against_others(np.zeros(len(pairs), bool))
    return tuple(pairs.nodes[relative.argmin()].tolist()), float(relative.min())


def _usual(rate: float, own: Floats, others: Floats) -> float:
    """Return the rate that links would have with what is usual of the others."""
    return rate * float(np.median(others) / np.median(own))


def _evidence(links: pl.DataFrame, slow: _Slow, steps: pl.DataFrame, sent: pl.DataFrame | None) -> tuple[Evidence, ...]:
    """Each direction that starts at a named node or rank, over the judged steps."""
    start_ns, end_ns = steps["start_ns"].min(), steps["end_ns"].max()
    assert isinstance(start_ns, int)
    assert isinstance(end_ns, int)
    if slow.ranks and sent is not None:
        rates = sent.filter(pl.col("rank").is_in(slow.ranks)).select("rank", "peer_rank", "rate_bytes_per_s")
        return tuple(
            Evidence(
                table="nccl_events",
                rank=rank,
                note=text("to rank {peer}: {rate}/s while the network has data", peer=peer, rate=bytes_text(rate)),
                start_ns=start_ns,
                end_ns=end_ns,
            )
            for rank, peer, rate in rates.iter_rows()
        )
    rows = links.filter(pl.col("node").is_in(slow.nodes)).select("node", "peer_node", "rate_bytes_per_s", "rtt_s")
    return tuple(
        Evidence(
            table="counters" if rtt is not None else "nccl_events",
            node=node,
            note=text(
                "to node {peer}: {rate}/s while it sends{round_trip}",
                peer=peer,
                rate=bytes_text(rate),
                round_trip="" if rtt is None else text(", round trip {time}", time=duration(rtt * 1e9)),
            ),
            start_ns=start_ns,
            end_ns=end_ns,
        )
        for node, peer, rate, rtt in rows.iter_rows()
    )
