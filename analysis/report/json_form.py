"""The stable machine interface: one strict JSON object, described by `docs/report.schema.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rankscope.analysis.model.finding import Finding, Loss, Rate, Report, Window
from rankscope.analysis.model.money import cost_of

__all__ = ["REPORT_SCHEMA_VERSION", "render", "strict"]

REPORT_SCHEMA_VERSION = 1


def render(report: Report) -> str:
    """Return the report as one JSON object and a final newline, ASCII; a number that is not finite becomes null."""
    return strict(_as_object(report))


def strict(said: Mapping[str, Any]) -> str:
    """One JSON object and a final newline, ASCII; a number that is not finite becomes null."""
    whole = json.dumps(_finite(said), allow_nan=False)  # with an indent it would take its slow way
    return msgspec.json.format(whole, indent=1) + "\n"


def _as_object(report: Report) -> dict[str, Any]:
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "path": report.path,
        "source": report.source,
        "ranks": list(report.ranks),
        "world_size": report.world_size,
        "nodes": list(report.nodes),
        "rate": _plain(report.rate),
        "steps": _plain(report.steps),
        "history": None if report.history is None else _plain(report.history),
        "verdict": report.verdict,
        "status": report.status,
        "findings": [_finding(finding, report.rate) for finding in report.findings],
        "healthy": [healthy.detector for healthy in report.healthy],
        "resolution": {healthy.detector: healthy.resolution_ns for healthy in report.healthy},
        "not_checked": [_plain(unchecked) for unchecked in report.not_checked],
        "breakdown": [_plain(part) for part in report.breakdown],
        "losses": [_listed(loss) for loss in report.losses],
        "device": [_plain(part) for part in report.device],
        "groups": [_plain(group) for group in report.groups],
        "phases": [_plain(phase) for phase in report.phases],
        "lead": None if report.lead is None else _plain(report.lead),
        "code": [_plain(share) for share in report.code],
        "waits": [_plain(wait) for wait in report.waits],
        "blames": [_plain(blame) for blame in report.blames],
        "critical_path": [_plain(part) for part in report.critical_path],
        "pipeline": None if report.pipeline is None else _plain(report.pipeline),
        "fixes": [_plain(fix) for fix in report.fixes],
        "fidelity": None if report.fidelity is None else _plain(report.fidelity),
        "utilisation": None if report.utilisation is None else _plain(report.utilisation),
        "windows": [_window(window) for window in report.windows],
        "states": [_plain(state) for state in report.states],
        "gaps": [_plain(gap) for gap in report.gaps],
        "clocks": [_plain(clock) for clock in report.clocks],
        "matched_fraction": report.matched_fraction,
        "environment": dict(report.environment),
    }


def _finding(finding: Finding, rate: Rate) -> dict[str, Any]:
    return _listed(finding) | _plain(cost_of(finding, rate))


def _listed(said: Finding | Loss) -> dict[str, Any]:
    """Its fields; tuples as lists."""
    fields = _plain(said)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def _window(window: Window) -> dict[str, Any]:
    return _plain(window) | {"steps": list(window.steps), "ranks": list(window.ranks)}


def _plain(said: object) -> dict[str, Any]:
    """Return a dataclass as `dataclasses.asdict` does, which takes a second for thousands of ranks."""
    plain: dict[str, Any] = msgspec.to_builtins(said, enc_hook=_text)
    return plain


def _text(value: object) -> str:
    if isinstance(value, str):  # a class of its own
        return str(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
