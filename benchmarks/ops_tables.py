"""Operation tables with a known fault: what is found, and its estimated cost, against the truth.

    python benchmarks/ops_tables.py ../shared/data/ops/derived-st

The folder has a `truth.json` that names, for each file, the loss as a share of the step and the root cause.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rankscope


def main() -> None:
    folder = Path(sys.argv[1])
    sets = json.loads((folder / "truth.json").read_text())["sets"]
    print(f"{'table':16}{'truth':32}{'loss':>8}   {'found':42}{'cost':>8}{'CPU s':>8}")
    for name, truth in sets.items():
        began = time.process_time()
        report = rankscope.diagnose(rankscope.open(folder / truth["file"]))
        took = time.process_time() - began
        roots = [finding for finding in report.findings if finding.caused_by is None]
        found = "; ".join(f"{f.detector} {','.join(map(str, f.ranks))}" for f in roots) or "nothing"
        cost = sum(f.lost_fraction for f in roots[:1])
        print(f"{name:16}{truth['kind'][:30]:32}{truth['loss_share']:8.2%}   {found[:40]:42}{cost:8.2%}{took:8.2f}")


if __name__ == "__main__":
    main()
