"""A cache for results that several callers need of the same tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

import polars as pl

__all__ = ["once"]

_Asked = ParamSpec("_Asked")
_Made = TypeVar("_Made")


def once(make: Callable[_Asked, _Made]) -> Callable[_Asked, _Made]:
    """Keep what `make` gives for these very tables and values, as long as all of the tables exist.

    Tables are distinguished by identity: nothing changes one in place. Kept results are shared: do not change them.
    """
    kept: dict[Hashable, tuple[_Made, list[weakref.ref[pl.DataFrame]]]] = {}

    @wraps(make)
    def remembered(*args: _Asked.args, **kwargs: _Asked.kwargs) -> _Made:
        given = (*args, *kwargs.values())
        key = tuple(id(each) if isinstance(each, pl.DataFrame) else each for each in given), tuple(kwargs)
        if key not in kept:
            made = make(*args, **kwargs)
            gone = [
                weakref.ref(each, lambda _: kept.pop(key, None)) for each in given if isinstance(each, pl.DataFrame)
            ]
            kept[key] = made, gone
        return kept[key][0]

    return remembered
