"""The run folder: its name, and that no two runs share one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path, PurePosixPath

from rankscope.collectors.agent.upload import spool
from rankscope.collectors.object_storage import spool_url
from rankscope.errors import NotRecorded

__all__ = ["claim"]


def claim(out: str | None, name: str, node_rank: int = 0) -> Path:
    """Make a run folder that no other run has, and give its absolute path.

    It is `out`, or `runs/<UTC time>-<name>`; if that is taken, the same with `-2`, `-3`, … behind. A node that is known
    not to be the first takes another name, and leaves this one to the first node until its agent knows what that took.
    Where `out` is in object storage it is a folder of the spool. Raises NotRecorded where it cannot be made.
    """
    wanted = Path(out) if out else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{_safe(name)}"
    try:
        if out and (there := spool_url(out)):
            wanted = spool() / PurePosixPath(there.path).name
        wanted = wanted.absolute()
        if node_rank:
            wanted = wanted.with_name(f"{wanted.name}.node-{node_rank}")
        return next(path for path in _candidates(wanted) if _taken(path))
    except OSError as error:
        raise NotRecorded(f"cannot make the run folder {wanted}: {error.strerror}") from None


def _candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _taken(path: Path) -> bool:
    """Return whether the folder is now ours, and not another run's."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        # Making this folder is the claim: it is atomic, also where several nodes share the storage.
        (path / "run").mkdir()
    except FileExistsError:
        return False
    return True


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
