"""Makes a large trace of a small real one: its events again and again, each time later and with new correlations."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

NUMBERS = re.compile(rb'("ts": |"correlation": |"External id": )([0-9]+)')
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
LAST_EVENT = re.compile(rb"\}\s*\](?=[^\]]*\Z)")


def write_large(source: Path, target: Path, size_bytes: int) -> int:
    """Write at least `size_bytes` (unpacked) to `target`, packed as torch.profiler does; gives the size."""
    packed = source.read_bytes()
    text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
    begin, end = EVENTS.search(text).end(), LAST_EVENT.search(text).start() + 1
    head, events, tail = text[:begin], text[begin:end], text[end:]
    pieces = NUMBERS.split(events)
    fixed, kinds, numbers = pieces[0::3], pieces[1::3], [int(n) for n in pieces[2::3]]
    times = [n for kind, n in zip(kinds, numbers, strict=True) if kind.startswith(b'"ts')]
    ids = [n for kind, n in zip(kinds, numbers, strict=True) if not kind.startswith(b'"ts')]
    later, further = max(times) - min(times) + 1_000, max(ids, default=0) + 1
    written, copy = 0, 0
    with gzip.open(target, "wb", compresslevel=9) as out:
        written += out.write(head)
        while written < size_bytes:
            parts = [fixed[0]]
            for kind, number, text_after in zip(kinds, numbers, fixed[1:], strict=True):
                step = later if kind.startswith(b'"ts') else further
                parts += (kind, str(number + copy * step).encode(), text_after)
            written += out.write((b"," if copy else b"") + b"".join(parts))
            copy += 1
        written += out.write(tail)
    return written
