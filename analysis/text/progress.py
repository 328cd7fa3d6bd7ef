"""Progress of a long piece of work, reported to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["heard_by", "reached", "told"]

Listener = Callable[[str, int, int | None], None]
_Item = TypeVar("_Item")
_listeners: list[Listener] = []


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """While the context is open, the listener is called with what `reached` says."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def reached(what: str, done: int, of: int | None = None) -> None:
    """Report how many of `what` are done, of how many if known. `what` is a text that names them: "ranks"."""
    for listener in _listeners:
        listener(what, done, of)


def told(what: str, items: Iterable[_Item], of: int, sizes: Sequence[int] = ()) -> Iterator[_Item]:
    """Yield the items, each done when the next one is asked for. It counts for as many as `sizes` say, else for one."""
    done = 0
    for number, item in enumerate(items):
        reached(what, done, of)
        yield item
        done += sizes[number] if sizes else 1
    reached(what, of, of)
