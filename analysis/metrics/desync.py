"""Ranks that do something else in one operation than the others: another operation, data type or size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.analysis.text.message import joined, plural, text
from rankscope.analysis.text.phrases import named

__all__ = ["Apart", "Done", "apart"]

_AS_LARGE = frozenset(  # operations that need as many bytes on all ranks
    (
        *("allreduce", "allreduce_coalesced", "broadcast", "reduce"),
        *("allgather", "allgather_base", "allgather_into_tensor_coalesced"),
        *("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    )
)


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank does in an operation; data type and size are null where they are not known."""

    op: str
    dtype: str | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Apart:
    """The ranks that differ from the others, or all of them where nothing says which, and words for that."""

    ranks: tuple[int, ...]
    does: Mapping[int, str | None]  # by rank, also the others
    title: str
    advice: str


def apart(by_rank: Mapping[int, Done]) -> Apart | None:
    """Return who does something else in one operation than most others do; of two alike nothing says which."""
    ranks = sorted(by_rank)
    for said in (_op_of, _dtype_of, _size_of):
        does = {rank: said(by_rank[rank]) for rank in ranks}
        count = Counter(does.values())
        if None in count or len(count) <= 1:
            continue
        usual, most = count.most_common(1)[0]
        odd = [rank for rank in ranks if does[rank] != usual]
        advice = text("Look for a branch that depends on the rank, its data or its batch size.")
        if most <= len(odd):
            each = joined(", ", (text("rank {rank}: {does}", rank=rank, does=does[rank]) for rank in ranks[:4]))
            title = text("{subject} do not do the same in one operation: desynchronized", subject=named("Rank", ranks))
            return Apart(tuple(ranks), does, title, joined(" ", (each + ".", advice)))
        title = plural(
            "{subject} does {rarest} where the others do {usual}: desynchronized",
            "{subject} do {rarest} where the others do {usual}: desynchronized",
            len(odd),
            subject=named("Rank", odd),
            rarest=does[odd[0]],
            usual=usual,
        )
        return Apart(tuple(odd), does, title, advice)
    return None


def _op_of(done: Done) -> str | None:
    return None if done.op == "unknown" else done.op


def _dtype_of(done: Done) -> str | None:
    known = done.dtype is not None and done.dtype != "unknown" and done.op in _AS_LARGE
    return text("{op} of {dtype}", op=done.op, dtype=done.dtype) if known else None


def _size_of(done: Done) -> str | None:
    known = done.size_bytes and done.op in _AS_LARGE
    return text("{op} of {size} bytes", op=done.op, size=f"{done.size_bytes:,}") if known else None
