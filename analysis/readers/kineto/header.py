"""The header and trailer around the events of a file."""

from __future__ import annotations

import json
import re
from typing import Any

from rankscope.analysis.readers.kineto.unpack import Source

__all__ = ["BARE_ARRAY", "SNIFF", "file_information", "read_header"]

SNIFF = 1 << 16
_MAX_HEADER = 64 << 20  # groups of thousands of ranks are listed before the events
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
BARE_ARRAY = re.compile(rb'\s*\[\s*\{[^}]*"ph"\s*:')


def read_header(source: Source) -> tuple[bytes, bytes] | str:
    """Return the text before the events and what was read after it; or what is wrong."""
    begun = source.read(SNIFF)
    if not begun:
        return source.problem or "is empty"
    bare = BARE_ARRAY.match(begun)
    if bare:
        at = begun.index(b"[") + 1
        return b"[", begun[at:]
    while not (found := _EVENTS.search(begun)):
        more = source.read(SNIFF)
        if not more or len(begun) > _MAX_HEADER:
            is_execution_trace = b'"nodes"' in begun and b'"schema"' in begun
            kind = "an execution trace, not a profiler's trace" if is_execution_trace else "no trace of torch.profiler"
            return f"is {kind}: it has no traceEvents" if not source.problem else source.problem
        begun += more
    return begun[: found.end()], begun[found.end() :]


def file_information(before: bytes, after: bytes) -> tuple[dict[str, Any], int]:
    """Return the fields around the events, and ns to add to every time; of broken text, those that can be found."""
    try:
        whole = json.loads(before + (b"]" + after if before != b"[" else b"]"), strict=False)
        info = whole if isinstance(whole, dict) else {}
    except (ValueError, RecursionError):
        info = {}
        text = before + b" " + after
        for key in (b"distributedInfo", b"deviceProperties"):
            if found := re.search(b'"' + key + rb'"\s*:\s*', text):
                try:
                    rest = text[found.end() :].decode("utf-8", "replace")
                    info[key.decode()] = json.JSONDecoder(strict=False).raw_decode(rest)[0]
                except (ValueError, RecursionError):
                    pass
        if found := re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,18})', text):
            info["baseTimeNanoseconds"] = int(found[1])
    base = info.get("baseTimeNanoseconds", 0)
    return info, base if isinstance(base, int) and 0 <= base <= 3 * 10**18 else 0
