"""How long ranks were in some part between two moments, and which operations' transfers held them up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import polars as pl
import polars.selectors as cs

from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import Ints
from rankscope.analysis.model.segments import reached_before
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.timeline.rank_keys import RankKeys
from rankscope.collectors.rank_ranges import members_of

__all__ = [
    "by_group",
    "described",
    "held_up",
    "hidden_behind",
    "is_awaited",
    "is_bounded",
    "kind_of_group",
    "spent",
    "with_exposed",
]

_LISTED = 20
# Of each operation, what is asked of those that have a wait: copying all of their columns would take twice as much.
_OF_OPERATION = (
    *("rank", "step", "start_ns", "issued_ns", "end_ns", "device_start_ns", "transfer_ns", "wait_ns"),
    *("group_id", "group", "group_size", "op", "dtype", "size_bytes", "instance_id"),
)
_SHOWN_AS = {  # part of the breakdown -> what it is of a group's communication
    "transfer": "exposed_ns",
    "wait": "wait_ns",
    "bubble": "wait_ns",
    "unsplit": "unattributed_ns",
    "overlapped": "overlapped_ns",
}
# What a group is for, by its name and description as torch, Megatron and DeepSpeed write them; else by what it does.
_KINDS_BY_NAME = {
    "pipeline": r"(?i)(^|[^a-z])pp([^a-z]|$)|pipeline",
    "tensor": r"(?i)(^|[^a-z])(tp|sp)([^a-z]|$)|tensor",
    "expert": r"(?i)(^|[^a-z])ep([^a-z]|$)|expert",
    "sharded": r"(?i)fsdp|shard|zero",
}
_KINDS_BY_OP = {"pipeline": r"^(send|recv)$", "exchange": r"^alltoall"}
_SHARES = r"(?i)(^|[^a-z])d?dp([^a-z]|$)|data|replica"  # data, and so parameters
_SHARDS = r"^(allgather|reduce_scatter)"


def spent(phases: pl.DataFrame, parts: Collection[str], spans: pl.DataFrame) -> Ints:
    """How many ns of each span (rank, start_ns, end_ns) the rank was in one of these parts, 0 where it ends too early.

    Phases of one rank do not overlap.
    """
    wanted = (
        phases.filter(pl.col("part").is_in(parts))
        .select("rank", "start_ns", "end_ns")
        .pipe(in_order, "rank", "start_ns")
    )
    if wanted.is_empty() or spans.is_empty():
        return np.zeros(len(spans), np.int64)
    keys = RankKeys.covering(wanted, spans)
    start, length = keys.of(wanted, "start_ns"), (wanted["end_ns"] - wanted["start_ns"]).to_numpy()
    before = np.concatenate([[0], np.cumsum(length)])

    def until(at: Ints) -> Ints:
        latest = np.searchsorted(start, at, side="right") - 1
        known = np.maximum(latest, 0)
        return np.asarray(np.where(latest >= 0, before[known] + np.minimum(at - start[known], length[known]), 0))

    return np.asarray(np.maximum(until(keys.of(spans, "end_ns")) - until(keys.of(spans, "start_ns")), 0), np.int64)


@once
def with_exposed(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `collectives` that have a wait, by rank and by when their transfer begins, with two columns.

    Of the table's columns those of `_OF_OPERATION`.

    `begin_ns` is when the last rank had arrived; `exposed_ns` for how long the rank waited while it transferred.
    Of transfers at once the one that began first counts, then what is left of the next, so that a rank's rows sum to no
    more than its part `transfer`. Where only the devices' waits are known, they begin with the wait.
    """
    if is_awaited(collectives):
        return _with_awaited(collectives, phases)
    arrival = pl.coalesce("device_start_ns", "start_ns")
    rows = (
        collectives.filter(pl.col("wait_ns").is_not_null(), pl.col("end_ns").is_not_null())
        .select(cs.by_name(*_OF_OPERATION, require_all=False))
        .with_columns(begin_ns=arrival + pl.col("wait_ns"))
        .pipe(in_order, "rank", "begin_ns", "end_ns")
    )
    reached = reached_before(rows, "rank")
    alone = rows.select("rank", pl.max_horizontal("begin_ns", reached).alias("start_ns"), "end_ns")
    return rows.with_columns(exposed_ns=pl.Series(spent(phases, ("transfer",), alone), dtype=pl.Int64))


def _with_awaited(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """As `with_exposed`: a wait's transfer counts for the last operation that was enqueued before the wait."""
    rows = collectives.filter(pl.col("wait_ns").is_not_null(), pl.col("awaited_ns").is_not_null())
    rows = rows.sort("rank", "awaited_ns", "start_ns").with_row_index("_row")
    transfers = phases.filter(pl.col("part") == "transfer").sort("rank", "start_ns")
    placed = transfers.join_asof(
        rows.select("rank", "_row", "awaited_ns"),
        left_on="start_ns",
        right_on="awaited_ns",
        by="rank",
        check_sortedness=False,
    )
    exposed = placed.group_by("_row").agg(exposed_ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
    return (
        rows.join(exposed, on="_row", how="left", maintain_order="left")
        .with_columns(pl.col("exposed_ns").fill_null(0), begin_ns="awaited_ns", start_ns="awaited_ns")
        .with_columns(end_ns=pl.col("begin_ns") + pl.col("transfer_ns"))
        .drop("_row")
    )


def is_awaited(collectives: pl.DataFrame) -> bool:
    """Say whether it is known of operations when devices waited for them, and not when they ran."""
    return "awaited_ns" in collectives.columns and bool(collectives["awaited_ns"].is_not_null().any())


def is_bounded(collectives: pl.DataFrame) -> bool:
    """Say whether operations have durations and no ends: what ranks did while they transferred is unknown."""
    if "duration_ns" not in collectives.columns:
        return False
    return bool(collectives.select((pl.col("end_ns").is_null() & pl.col("transfer_ns").is_not_null()).any()).item())


def held_up(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """As `with_exposed`, or bounds of it.

    `exposed_ns` is for how long a transfer held the rank up at most, `least_ns` at least. Where operations have
    durations only, that is at most all of the transfer. At least it is that of the step's last operation, after which
    nothing is computed that it could hide behind, and nothing of the others.
    """
    if not is_bounded(collectives):
        return with_exposed(collectives, phases).with_columns(least_ns=pl.col("exposed_ns"))
    rows = collectives.filter(pl.col("end_ns").is_null(), pl.col("transfer_ns").is_not_null())
    is_latest = pl.col("start_ns") == pl.col("start_ns").max().over("rank", "step")
    least = pl.when(is_latest).then("transfer_ns").otherwise(0)
    return rows.with_columns(exposed_ns=pl.col("transfer_ns"), least_ns=least)


@once
def by_group(collectives: pl.DataFrame, phases: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the time of each group's operations, ns per step and rank that was seen in it; the largest first.

    Columns `group`, `group_size`, `kind`, `op`, `exposed_ns` (transfers that nothing hides), `wait_ns` (for late
    peers), `unattributed_ns` (either: not matched), `overlapped_ns`, and `hidden_by`.
    Of several operations in flight the one that began last counts, so that a rank's groups sum to its breakdown.
    """
    rows = _in_groups(collectives, phases, [*_SHOWN_AS])
    key = ["group_id", "group", "group_size", "op"]
    steps = phases.select(pl.col("step").n_unique()).item()
    ranks = rows.group_by("group_id").agg(ranks=pl.col("rank").n_unique())
    parts = {column: [p for p, shown in _SHOWN_AS.items() if shown == column] for column in _SHOWN_AS.values()}
    sums = [pl.col("ns").filter(pl.col("part").is_in(of)).sum().alias(column) for column, of in parts.items()]
    of_each = (pl.col(*parts) * (1 / (steps * pl.col("ranks")))).round().cast(pl.Int64)
    hidden = rows.filter(pl.col("part") == "overlapped").group_by("group_id", "op", "label").agg(pl.col("ns").sum())
    hidden = hidden.sort("ns", "label").group_by("group_id", "op").agg(hidden_by=pl.col("label").last())
    total = pl.sum_horizontal("exposed_ns", "wait_ns", "unattributed_ns")
    return (
        rows.group_by(key)
        .agg(*sums)
        .join(ranks, on="group_id")
        .with_columns(of_each)
        .join(described(groups), on="group_id", how="left")
        .join(hidden, on=["group_id", "op"], how="left")
        .with_columns(
            kind=kind_of_group(), group=pl.col("group").fill_null(""), hidden_by=pl.col("hidden_by").fill_null("")
        )
        .sort(total, "group", pl.col("op").cast(pl.String), descending=[True, False, False])
        .head(_LISTED)
        .drop("group_id", "ranks", "role", "about", "of_all")
    )


def hidden_behind(collectives: pl.DataFrame, phases: pl.DataFrame, groups: Sequence[str]) -> str:
    """Return the label of the phases that hide most of these groups' communication; empty where nothing does."""
    behind = _hidden(collectives, phases).filter(pl.col("group").is_in(groups))
    labels = behind.group_by("label").agg(pl.col("ns").sum()).sort("ns", "label")["label"]
    return str(labels[-1]) if len(labels) else ""


@once
def _hidden(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    rows = _in_groups(collectives, phases, ["overlapped"])
    return rows.group_by(pl.col("group").fill_null(""), "label").agg(pl.col("ns").sum())


def _in_groups(collectives: pl.DataFrame, phases: pl.DataFrame, parts: Sequence[str]) -> pl.DataFrame:
    """Return the phases in these parts (part, label, rank, ns), and the group and operation that each is for."""
    began = pl.coalesce(pl.col("^device_start_ns$"), "start_ns")
    if is_awaited(collectives):
        began = pl.col("awaited_ns")
    started = collectives.select("rank", "group_id", "group", "group_size", "op", at=began).drop_nulls("at")
    return (
        in_order(phases, "rank", "start_ns")
        .filter(pl.col("part").is_in(parts))
        .select("rank", "start_ns", "part", "label", ns=pl.col("end_ns") - pl.col("start_ns"))
        .join_asof(
            in_order(started, "rank", "at"),
            left_on="start_ns",
            right_on="at",
            by="rank",
            check_sortedness=False,
        )
        .drop_nulls("group_id")
    )


def described(groups: pl.DataFrame) -> pl.DataFrame:
    """Return (group_id, role, about, of_all): what a group is called, and whether it holds all ranks of any group."""
    members = {said: members_of(said or "") for said in groups["members"].unique()}
    everyone = len(set().union(*members.values()))
    of_all = [len(members[said]) >= everyone for said in groups["members"]]
    about = pl.concat_str("name", "role", separator=" ", ignore_nulls=True)
    named = groups.select("group_id", "role", about=about, of_all=pl.Series(of_all, dtype=pl.Boolean))
    return named.unique("group_id")


def kind_of_group() -> pl.Expr:
    """Return the group's purpose, of the columns of `described` and `op`, its most frequent operation.

    By its name, else by the operation. Where that says nothing, ranks that are all in it share data or parameters; what
    some of them do together is not known.
    """
    kind = pl.lit(None, pl.String)
    for column, patterns in (("about", _KINDS_BY_NAME), ("op", _KINDS_BY_OP)):
        for name, pattern in patterns.items():
            kind = (
                pl.when(kind.is_null() & pl.col(column).cast(pl.String).str.contains(pattern))
                .then(pl.lit(name))
                .otherwise(kind)
            )
    shards = pl.col("op").cast(pl.String).str.contains(_SHARDS)
    shares = pl.col("of_all").fill_null(True) | pl.col("about").str.contains(_SHARES).fill_null(False)
    by_op = pl.when(shards).then(pl.lit("sharded")).otherwise(pl.lit("data"))
    return kind.fill_null(pl.when(shares).then(by_op).otherwise(pl.lit("unknown")))
