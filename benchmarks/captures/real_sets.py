"""Check the findings on every real set in ../shared/data.

    python benchmarks/captures/real_sets.py [--data ../shared/data]

What is true of a set is what its description says. Where that is only how a file is built, any report or one clear line
is right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rankscope
from captures.score import roots, told
from rankscope.errors import BadInput

DATA = Path(__file__).parents[2].parent / "shared" / "data"
_HOST = ("host_bound", "noisy_host")  # what a rank's host does shows as these as well


@dataclass(frozen=True, slots=True)
class Set:
    """Where it is, what is true of it, and which first finding says so: of these detectors, and naming these ranks."""

    path: str
    truth: str
    detectors: tuple[str, ...] = ()  # none: no finding is right, "*": any report is
    ranks: tuple[int, ...] = ()  # none: any
    anywhere: bool = False  # the finding need not be the first, nor a root: nothing was injected


def _straggler(path: str, rank: int, what: str, *, anywhere: bool = False) -> Set:
    return Set(path, f"rank {rank} {what}", ("slow_rank", *_HOST), (rank,), anywhere)


_ST = "ops/derived-st/trace-st-{}.parquet"
SETS = (
    _straggler("kineto/torchrec/sst_long_a2a_optimizer", 2, "sleeps 1,001 ms per step"),
    _straggler("kineto/torchrec/sst_long_a2a_optimizer_2.run1", 2, "sleeps 1,001 ms per step"),
    _straggler("kineto/torchrec/sst_long_a2a_optimizer_3", 2, "sleeps 20 ms per step"),
    _straggler("kineto/torchrec/sst_long_a2a_optimizer_5", 2, "sleeps 20 ms per step"),
    _straggler("kineto/torchrec/resnet18", 1, "is last at 12 of 12 collectives, 7.2 ms in all", anywhere=True),
    _straggler("kineto/nanogpt-normuon", 1, "waits 1.2 ms per step, the others 7 to 9"),
    _straggler("kineto/param-dlrm8/dlrm_kineto.tar.gz", 7, "waits least, 1.5 ms", anywhere=True),
    Set("kineto/tb-plugin-workers0", "bound by the data loader, 33 %", ("input_stall",)),
    Set(
        "kineto/nanogpt-adamsync/modded-nanogpt-current-gpu-rank-00-chrome-trace.json.gz",
        "one rank of 8; exposed communication 17.19 ms in 4 steps of 61 ms",
        ("exposed_communication", "unexplained"),
    ),
    Set("flight_recorder/nvrx/gpu_error_2nd", "ranks 9 and 14 hang", ("hang",), (9, 14)),
    Set("flight_recorder/nvrx/lock_gil_1st", "ranks 9 and 14 hang", ("hang",), (9, 14)),
    Set("ops/bytedance-st", "the last stage is long", ("stage_imbalance",), (6, 7)),
    _straggler("ops/bytedance-ar", 0, "is 2.4 x as slow: half of the step"),
    Set(_ST.format("none"), "no fault; the noise of the original"),
    _straggler(_ST.format("slow10"), 3, "is slower by 10 %: 2.4 % of the step"),
    _straggler(_ST.format("slow25"), 4, "is slower by 25 %: 8.5 % of the step"),
    _straggler(_ST.format("slow60"), 1, "is slower by 60 %: 9.7 % of the step"),
    _straggler(_ST.format("slow40-late"), 4, "is slower by 40 % from the middle on: 7.1 % of the step"),
    Set(_ST.format("longlast"), "the last stage is long: 15.0 % of the step", ("stage_imbalance",), (6, 7)),
    Set(_ST.format("seqlen"), "uneven sequence lengths: 15.7 % of the step", ("load_imbalance",)),
    Set("pipeline/primus-pp8", "the last stage is longer; 1F1B", ("stage_imbalance",), (7,)),
    Set("pipeline/primus-pp8-vpp2", "the same, interleaved with 2 chunks", ("stage_imbalance", "pipeline_bubble")),
    Set(
        "nsys/mfu_2gpu_before.sqlite",
        "16.5 times in 290 ms both hosts wait 10 ms for a copy of 8 bytes, and then the devices for them",
        ("host_sync",),
        (0, 1),
    ),
    Set("nsys/healthy_1pct.sqlite", "healthy, idles 0.99 %"),
    Set("nsys/healthy_judged_1pct.sqlite", "healthy, idles 0.94 %"),
    *(
        Set(path, "how a file is built", ("*",))
        for path in (
            "kineto/hta/rank_unavailable",
            "kineto/hta/distributed_info_unavailable",
            "kineto/hta/rank_non_gpu",
            "kineto/hta/trace_filter",
            "kineto/hta/ns_resolution_trace",
            "kineto/hta/cpu_only",
            "kineto/hta/triton_example",
            "kineto/hta/amd_trace",
            "kineto/hta/critical_path/simple_add",
            "kineto/hta/critical_path/alexnet",
            "kineto/tracelens/mi210/gpu_only_trace",
            "kineto/tracelens/h100",
            "kineto/tracelens/b200",
            "kineto/tracelens/mi300/resnet_act_checkpoint.json.gz",
            "kineto/tracelens/inference/vllm_decode_full",
            "nccl_profiler/nccl-example-profiler-p2p.json",
            "nccl_profiler/minimal-profiler-allreduce.jsonl",
            "chakra/1.0.2-chakra.0.0.4.tgz",
        )
    ),
)


def judged(one: Set, data: Path) -> tuple[bool, str, str]:
    """Whether the verdict is right, its level, and what it says."""
    try:
        report = rankscope.diagnose(rankscope.open(data / one.path))
    except BadInput as error:
        return one.detectors == ("*",), "refused", str(error).replace(f"{data}/", "")
    said = [told(finding) for finding in roots(report)]
    known = [s for s in said if s["level"] != "unexplained"]
    text = str(report.verdict)
    level = said[0]["level"] if said else "unexplained" if text.startswith("Unexplained") else "none"
    if one.detectors == ("*",):
        return True, level, text
    if not one.detectors:
        return not known and level != "unexplained", level, text
    if not known:
        return level in one.detectors, level, text
    looked_at = [told(finding) for finding in report.findings] if one.anywhere else known[:1]
    right = any(s["detector"] in one.detectors and (not one.ranks or tuple(s["ranks"]) == one.ranks) for s in looked_at)
    return right, level, text


def show(data: Path, out: Callable[[str], None] = print) -> int:
    """One line for each set. Returns how many are wrong."""
    wrong = absent = 0
    for one in SETS:
        if not (data / one.path).exists():
            out(f"absent {one.path}")
            absent += 1
            continue
        right, level, text = judged(one, data)
        wrong += not right
        out(f"{'right' if right else 'WRONG':6}{level:12}{one.path}\n      true: {one.truth}\n      said: {text[:180]}")
    seen = len(SETS) - absent
    out(f"{seen - wrong} of {seen} sets right, {absent} absent")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        print(f"The public sets are not at {arguments.data}: nothing to judge. --data says where they are.")
        return
    show(arguments.data)


if __name__ == "__main__":
    main()
