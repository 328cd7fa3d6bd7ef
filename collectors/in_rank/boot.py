"""The way into a training process: torch calls `autoload` at the end of `import torch`.

An exception here would abort the user's `import torch`, so nothing but the standard library is imported at the top and
`autoload` lets nothing out. Until the job makes its first process group, nothing is recorded and nothing is written.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rankscope.collectors.in_rank.stderr import say, text_of
from rankscope.collectors.switched_off import switched_off
from rankscope.collectors.untyped import Foreign

__all__ = ["autoload"]


def autoload() -> None:
    """Arrange for a session to start with the first process group, if this process may be a rank to be recorded."""
    try:
        if _may_be_recorded():
            _arm()
    except Exception as error:
        say(f"not recording this process: {text_of(error)}")


def _may_be_recorded() -> bool:
    env = os.environ
    # Subprocesses and spawned workers of a rank inherit the claim and are not recorded.
    is_claimed = env.get("RANKSCOPE_CLAIM", str(os.getpid())) != str(os.getpid())  # not by what execs itself
    return bool(env.get("RANKSCOPE_AGENT")) and "all" not in switched_off(env) and not is_claimed


def _arm() -> None:
    # `import torch` has not finished: take the modules that it has loaded, and import nothing.
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not hasattr(c10d, "_new_process_group_helper"):
        return  # a torch built without distributed
    if "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        _claim()
    # Else perhaps a launcher, which makes no process group and whose children are the ranks: srun may start torchrun as
    # it starts a rank.

    from rankscope.collectors.in_rank import session

    make_group, agent_name = c10d._new_process_group_helper, os.environ["RANKSCOPE_AGENT"]

    def make_group_and_record(*args: Foreign, **kwargs: Foreign) -> Foreign:
        made = make_group(*args, **kwargs)
        _claim()
        session.on_group(agent_name, made[0], args, kwargs)
        return made

    make_group_and_record.__wrapped__ = make_group  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_group_and_record


def _claim() -> None:
    os.environ.setdefault("RANKSCOPE_CLAIM", str(os.getpid()))
