"""Where things lie that tests read or start."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data"
"""Public traces, which are not part of the repository; what needs them is skipped where they are not."""
SUPPORT = Path(__file__).parent
SCRIPTS = SUPPORT / "scripts"
"""Training scripts of tests' jobs."""
EXAMPLE = ROOT / "examples/train_transformer.py"
