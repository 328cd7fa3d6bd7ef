"""How many FLOPs an operator does, from the shapes of its inputs as torch.profiler writes them.

A product of m x k and k x n matrices takes 2 m k n; attention two such products forward and five backward, one of which
computes the scores again, and no less where it is causal. Source: `torch.utils.flop_counter`, with whose sums the tests
compare these. Convolutions are not counted: their strides are no shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any

__all__ = ["SHAPED", "flops"]

_Shapes = list[Any]


def _mm(a: list[int], b: list[int]) -> int:
    return 2 * a[0] * a[1] * b[1] if a[1] == b[0] else 0


def _bmm(a: list[int], b: list[int]) -> int:
    return 2 * prod(a) * b[2] if a[0] == b[0] and a[2] == b[1] else 0


def _grouped(a: list[int], b: list[int]) -> int:
    """Rows of `a` each meet one matrix of `b`; of two matrices, the common side is what is cut into groups."""
    return 2 * prod(a) * b[-1]


def _attention(query: list[int], key: list[int], value: list[int], *, of_scores: int, of_values: int) -> int:
    """Of (batch, heads, length, size); so many products of the size of the scores' and of the values'."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (of_scores * size + of_values * value[3])


def _forward(shapes: _Shapes) -> int:
    return _attention(*shapes[:3], of_scores=1, of_values=1)


def _backward(shapes: _Shapes) -> int:
    return _attention(*shapes[1:4], of_scores=3, of_values=2)


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_OF: dict[str, Callable[[_Shapes], int]] = {
    "aten::mm": lambda shapes: _mm(*shapes[:2]),
    "aten::_scaled_mm": lambda shapes: _mm(*shapes[:2]),
    "aten::_int_mm": lambda shapes: _mm(*shapes[:2]),
    "aten::addmm": lambda shapes: _mm(*shapes[1:3]),
    "aten::_addmm_activation": lambda shapes: _mm(*shapes[1:3]),
    "aten::bmm": lambda shapes: _bmm(*shapes[:2]),
    "aten::baddbmm": lambda shapes: _bmm(*shapes[1:3]),
    "aten::_grouped_mm": lambda shapes: _grouped(*shapes[:2]),
    "aten::_scaled_grouped_mm": lambda shapes: _grouped(*shapes[:2]),
    **{f"aten::_scaled_dot_product_{kind}": _forward for kind in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kind}_backward": _backward for kind in _ATTENTION},
}
SHAPED = tuple(name.encode() for name in _OF)


def flops(operator: str, dims: str) -> int | None:
    """FLOPs of the operator on inputs of these shapes, `[[64, 512], [512, 8]]`; None: they are not what it takes."""
    try:
        return _OF[operator](json.loads(dims)) or None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
