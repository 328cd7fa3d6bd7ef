"""Prove that a change of the code's shape changes no number: reports before and after it.

    python benchmarks/golden.py write FOLDER [--data DATA] [--seeds N]   # data sets, and N simulated runs of a kind
    python benchmarks/golden.py compare BEFORE AFTER [--texts] [--id OLD=NEW]

`compare` ignores sentences unless `--texts` is given; `--id` gives an id that the change renames.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import rankscope
from faults import CLEAN, KINDS, UNPROFILED_KINDS, Case, simulated
from rankscope.analysis.report import json_form
from record import write as record

TEXTS = ("title", "where", "advice", "note", "why", "verdict", "gain_why", "explanation", "label", "code", "reason")


def main() -> None:
    """Write or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--data", type=Path, default=Path("../shared/data"))
    writing.add_argument("--seeds", type=int, default=1)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--texts", action="store_true")
    comparing.add_argument("--id", action="append", default=[])
    args = parser.parse_args()
    if args.command == "write":
        write(args.folder, args.data, args.seeds)
    else:
        sys.exit(compare(args.before, args.after, texts=args.texts, ids=dict(pair.split("=") for pair in args.id)))


def write(folder: Path, data: Path, seeds: int) -> None:
    """Write one JSON report of each run below `data`, and of simulated ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in sorted({path.parent for path in data.rglob("*") if path.is_file() and path.parent != data}):
        _write(folder / f"{run.relative_to(data).as_posix().replace('/', '+')}.json", run)
    for case, parallel in _cases(seeds):
        with tempfile.TemporaryDirectory(prefix="rankscope-golden-") as made:
            log, _ = simulated(case, small=True, parallel=parallel)
            name = f"simulated+{case.kind}+{case.dose}+{parallel}{case.seed}.json"
            _write(folder / name, record(log, Path(made) / "run"))


def _cases(seeds: int) -> Iterator[tuple[Case, str]]:
    for seed in range(seeds):
        yield from ((Case(CLEAN, "none", seed), parallel) for parallel in ("", *UNPROFILED_KINDS))
        yield from ((Case(kind, "loud", seed), "") for kind in KINDS)
        yield from ((Case("slow_rank", "loud", seed), parallel) for parallel in UNPROFILED_KINDS)
        yield Case("slow_rank+slow_link", "two", seed), ""


def _write(file: Path, run: Path) -> None:
    try:
        said = json.loads(json_form.render(rankscope.diagnose(rankscope.open(run))))
        said.update(path="", environment={})
    except Exception as error:
        said = {"error": type(error).__name__, "why": str(error).replace(str(run), "RUN")}
    file.write_text(json.dumps(said, indent=1, sort_keys=True), encoding="utf-8")
    print(file.stem, said.get("verdict", said.get("why")), flush=True)


def compare(before: Path, after: Path, *, texts: bool, ids: dict[str, str]) -> int:
    """Print what differs; the number of files that do."""
    names = sorted({path.name for path in (*before.glob("*.json"), *after.glob("*.json"))})
    different = 0
    for name in names:
        values = [_flat(folder / name, texts, ids if folder == before else {}) for folder in (before, after)]
        rows = [key for key in dict.fromkeys([*values[0], *values[1]]) if values[0].get(key) != values[1].get(key)]
        different += bool(rows)
        for key in rows[:8]:
            print(f"{name}: {key}: {values[0].get(key)!r} -> {values[1].get(key)!r}")
    print(f"{len(names)} reports, {different} differ")
    return different


def _flat(file: Path, texts: bool, ids: dict[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}

    def add(key: str, value: object) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                if texts or name not in TEXTS:
                    add(f"{key}.{ids.get(name, name)}", item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                add(f"{key}[{number}]", item)
        else:
            values[key] = ids.get(value, value) if isinstance(value, str) else value

    if file.exists():
        add("", json.loads(file.read_text(encoding="utf-8")))
    return values


if __name__ == "__main__":
    main()
