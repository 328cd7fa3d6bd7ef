"""Text in aligned columns, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from rankscope.analysis.text.message import spoken

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Give one line per row, in the language spoken; columns are two spaces apart, those in `right` end flush."""
    said = [[spoken(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*said, strict=True)]
    lines = []
    for row in said:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            gap + cell if position in right else cell + gap
            for position, (cell, gap) in enumerate(zip(row, gaps, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
