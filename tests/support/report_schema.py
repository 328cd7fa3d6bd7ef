"""A report as JSON, held against its schema."""

from __future__ import annotations

import json

from support.paths import ROOT

SCHEMA = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))


def check(value: object, schema: dict, where: str) -> None:
    """Hold `value` against the keywords of JSON schema that docs/report.schema.json uses."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    kinds["boolean"] = bool
    schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    allowed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    fits = (isinstance(value, kinds[kind]) and isinstance(value, bool) == (kind == "boolean") for kind in allowed)
    assert any(fits), where
    assert value in schema.get("enum", [value]), where
    assert value == schema.get("const", value), where
    if isinstance(value, int):
        assert value >= schema.get("minimum", value), where
    if isinstance(value, list):
        for i, item in enumerate(value):
            check(item, schema["items"], f"{where}[{i}]")
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), where
        rest = schema.get("additionalProperties", True)
        for key, item in value.items():
            assert key in schema.get("properties", {}) or rest, f"{where}.{key}"
            check(item, schema.get("properties", {}).get(key) or rest, f"{where}.{key}")
