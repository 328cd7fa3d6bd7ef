"""Dash components: a chart made on the server, a raster of cells that is drawn as it is viewed, two kinds of fields.

Their code is `assets/components.js`; Dash needs nothing but these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash.development.base_component import Component
from markupsafe import Markup

from rankscope.analysis.text.message import Text

__all__ = ["Chart", "Raster", "Select", "Ticks"]


class Chart(Component):
    """SVG made on the server. What has a `<title>` shows it under the pointer."""

    _namespace = "rankscope_ui"
    _type = "Chart"

    def __init__(self, markup: Markup, *, title: str = "") -> None:
        _declare(self, "markup", "title")
        super().__init__(markup=str(markup), title=title)  # type: ignore[no-untyped-call]


class Raster(Component):
    """Cells of (row, column), fetched from `source` at the screen's resolution; drag to look closer, click to open.

    `source` answers `?r0=&r1=&c0=&c1=&width=&height=` with one byte per cell and the labels
    in a header `X-Labels`, and with `&row=&column=` also given with what to say of that cell, `text` and `href`.
    """

    _namespace = "rankscope_ui"
    _type = "Raster"

    def __init__(self, *, source: str, rows: int, columns: int, title: str) -> None:
        given: dict[str, Any] = {
            "source": source,
            "rows": rows,
            "columns": columns,
            "title": title,
        }
        _declare(self, *given)
        super().__init__(**given)  # type: ignore[no-untyped-call]


class Select(Component):
    """One of `options`, strings or `{"value": …, "label": …}`; `placeholder` is shown while `value` is None."""

    _namespace = "rankscope_ui"
    _type = "Select"

    def __init__(
        self, key: str | dict[str, str], options: Sequence[Any], value: str | None, placeholder: Text | str
    ) -> None:
        given: dict[str, Any] = {"id": key, "options": list(options), "value": value, "placeholder": placeholder}
        _declare(self, *given)
        super().__init__(**given)  # type: ignore[no-untyped-call]


class Ticks(Component):
    """A list of rows to tick; `value` holds those of `values`, one per row, that are."""

    _namespace = "rankscope_ui"
    _type = "Ticks"

    def __init__(self, key: str, rows: Sequence[Component], values: Sequence[str]) -> None:
        given: dict[str, Any] = {"id": key, "children": list(rows), "values": list(values), "value": []}
        _declare(self, *given)
        super().__init__(**given)  # type: ignore[no-untyped-call]


def _declare(component: Any, *names: str) -> None:  # noqa: ANN401 - attributes that Component does not declare
    """Write into the class what Dash's generator would have written."""
    component._prop_names = list(names)
    component.available_properties = list(names)
    component.available_wildcard_properties = []
    component._valid_wildcard_attributes = []
