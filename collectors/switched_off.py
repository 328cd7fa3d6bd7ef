"""What the environment leaves off.

`RANKSCOPE_DISABLE` holds names of collectors, separated by commas; `build`, the agent's build of the hook; or `all`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from rankscope.collectors import rank

__all__ = ["switched_off", "unknown_names", "why_no_rank"]

VARIABLE = "RANKSCOPE_DISABLE"


def switched_off(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names that the variable holds."""
    return frozenset(name.strip() for name in environment.get(VARIABLE, "").split(",")) - {""}


def unknown_names(environment: Mapping[str, str]) -> str | None:
    """Return one line on names that are no collector's, None if there is none."""
    known = {module.name for module in pkgutil.iter_modules(rank.__path__)} | {"build", "all"}
    unknown = switched_off(environment) - known
    if not unknown:
        return None
    return f"{VARIABLE}: no collector is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"


def why_no_rank(environment: Mapping[str, str]) -> str:
    """Return why no rank of a job in this environment was recorded, as far as it shows, with the next step."""
    if "all" in switched_off(environment):
        return f"no rank reported: {VARIABLE}=all switches recording off"
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return "no rank reported: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading rankscope; unset it"
    return (
        "no rank reported: the script made no process group (call torch.distributed.init_process_group(), with one "
        "process too), or its Python does not load rankscope (see `rankscope doctor`)"
    )
