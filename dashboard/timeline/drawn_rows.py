"""Which rows of the timeline are drawn: on which track, from when to when, as what kind and under what name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from rankscope.dashboard.timeline.scene import CODE

__all__ = ["DRAWN", "Drawn"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The drawn rows of a frame. An event is `kind` up to its middle and `then` from there on."""

    track: pl.Expr
    kind: pl.Expr
    name: pl.Expr
    start: pl.Expr | None = None
    end: pl.Expr | None = None
    middle: pl.Expr | None = None
    then: pl.Expr | None = None

    @property
    def times(self) -> dict[str, pl.Expr]:
        start = pl.col("start_ns") if self.start is None else self.start
        return {"start_ns": start, "end_ns": pl.col("end_ns") if self.end is None else self.end}

    @property
    def columns(self) -> dict[str, pl.Expr]:
        return self.times | {
            "track": self.track,
            "middle_ns": pl.lit(None, pl.Int64) if self.middle is None else self.middle,
            "kind": self.kind.cast(pl.UInt8),
            "then": (pl.lit(0) if self.then is None else self.then).cast(pl.UInt8),
            "name": self.name.cast(pl.String).replace("unknown", "communication").fill_null("?"),
        }


def _phases(_: pl.DataFrame) -> Drawn:
    name = pl.when(pl.col("label") == "").then("part").otherwise(pl.coalesce("label", "part"))
    return Drawn(track=pl.lit("main thread"), kind=_code(pl.col("part")), name=name)


def _regions(_: pl.DataFrame) -> Drawn:
    kind = pl.col("kind").cast(pl.String).replace("wait", "blocked")
    track = pl.when(pl.col("thread") == 0).then(pl.lit("regions")).otherwise(pl.format("thread {}", "thread"))
    return Drawn(track=track, kind=_code(kind), name=pl.coalesce("name", "kind"))


def _collectives(_: pl.DataFrame) -> Drawn:
    """Draw waiting and transfer of an operation apart, where they are known.

    Where its end is not, but how long it was, or that it was over when a later one of its group was, its call.
    """
    start = pl.coalesce("device_start_ns", "start_ns")
    known = pl.col("wait_ns").is_not_null() & pl.col("end_ns").is_not_null()
    is_over = pl.col("transfer_ns").is_not_null() | pl.col("end_ns").is_not_null()
    called = is_over.reverse().cum_max().reverse().over("rank", "group_id")
    return Drawn(
        track=pl.coalesce("group", pl.lit("unknown group")),
        start=start,
        end=pl.coalesce("end_ns", pl.when(called).then("issued_ns")),
        middle=pl.when(known).then(pl.min_horizontal(start + pl.col("wait_ns"), "end_ns")),
        kind=pl.when(known).then(CODE["wait"]).otherwise(CODE["unsplit"]),
        then=pl.lit(CODE["transfer"]),
        name=pl.col("op"),
    )


def _kernels(kernels: pl.DataFrame) -> Drawn:
    many = kernels.group_by("rank").agg(pl.col("device").n_unique())["device"].max() if len(kernels) else 1
    stream = pl.format("stream {}", pl.col("stream").cast(pl.String).fill_null("?"))
    track = pl.format("device {} {}", "device", stream) if isinstance(many, int) and many > 1 else stream
    return Drawn(track=track, kind=_code(pl.col("work")), name=pl.col("name"))


def _ops(_: pl.DataFrame) -> Drawn:
    name = pl.col("name")
    kind = (
        pl.when(name.str.contains("forward-compute"))
        .then(CODE["forward"])
        .when(name.str.contains("backward-compute"))
        .then(CODE["backward"])
        .when(name.str.contains("optimizer"))
        .then(CODE["optimizer"])
        .otherwise(CODE["unsplit"])
    )
    return Drawn(track=pl.lit("operations"), kind=kind, name=name)


DRAWN: dict[str, Callable[[pl.DataFrame], Drawn]] = {
    "phases": _phases,
    "ops": _ops,
    "kernels": _kernels,
    "collectives": _collectives,
    "regions": _regions,
}


def _code(key: pl.Expr) -> pl.Expr:
    return key.cast(pl.String).replace_strict(CODE, default=CODE["other"], return_dtype=pl.UInt8)
