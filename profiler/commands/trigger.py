"""Look deeper into a job that runs: torch.profiler for a few steps, or live stacks.

All chosen ranks record the same steps, the next that all can hear of in time, and no rank waits. What was seen lies
in RUN/window-0001, a run of its own (`rankscope report RUN/window-0001`); reports on RUN include it. Needs the folder
that the job writes now; ranks of nodes that write elsewhere are not reached: trigger there with the same --at.

Example: rankscope trigger runs/NAME
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.collectors.agent.deep_windows import ENDED, ask, folder_of
from rankscope.errors import RankscopeError
from rankscope.profiler.options import Ranks

__all__ = ["command"]

_SILENT_S = 15.0  # after which no agent is there
_POLL_S = 0.2
_STILL_S = 120.0  # without a new reading of its counters an agent is gone; shared folders may show them a minute late

Answers = dict[int, dict[str, Any]]


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is being recorded.")],
    ranks: Ranks = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to record.")] = 3,
    at: Annotated[int | None, typer.Option(min=1, help="First step, counted from 0; without: the next.")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="No window: what every Python thread does now.")] = False,
) -> None:
    running = _running(run)
    _check_running(ranks or (), running)
    _report_unreached(running, ranks)
    request = {"kind": "stacks" if stacks else "window", "ranks": ranks, "first": at, "steps": count}
    try:
        number = ask(run, request | {"reason": "rankscope trigger"})
    except OSError as error:
        raise RankscopeError(f"cannot write into {run}: {error.strerror}") from None
    expected = set(running) if ranks is None else set(ranks)
    answers = _await(run, number, expected, is_far=at is not None)
    if stacks:
        _print_stacks(answers)
    else:
        _print_window(run, number, count, answers)
    if not any(answer["state"] in ("recorded", "told") for answer in answers.values()):
        raise typer.Exit(1)


def _nodes(run: Path) -> list[dict[str, Any]]:
    """Return each node's JSON, about its agent and ranks."""
    nodes = []
    for path in sorted((run / "run").glob("node=*.json")):
        try:
            nodes.append(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return nodes


def _running(run: Path) -> dict[int, int | None]:
    """Return the ranks that write to this folder now, and how many ranks each says there are."""
    nodes = _nodes(run)
    if not nodes:
        raise RankscopeError(f"{run} is no run folder: `rankscope run` prints the folder that it writes")
    found = {
        int(rank["rank"]): rank.get("world_size")
        for node in nodes
        if node.get("state") == "running"
        for rank in node.get("ranks", ())
        if not rank.get("ended")
    }
    if not found:
        raise RankscopeError(f"no rank of {run} is running: only a running job can be profiled")
    return found


def _check_running(ranks: Sequence[int], running: Mapping[int, int | None]) -> None:
    absent = [rank for rank in ranks if rank not in running]
    if absent:
        from rankscope.analysis.text.units import ranges

        raise RankscopeError(
            f"rank {ranges(absent)} does not write to this folder (ranks {ranges(running)} do): "
            "it has ended, or give the folder on its own node"
        )


def _report_unreached(running: Mapping[int, int | None], wanted: Sequence[int] | None) -> None:
    from rankscope.analysis.text.units import ranges

    world = max((size or 0 for size in running.values()), default=0)
    absent = sorted(set(range(world)) - set(running))
    if wanted is None and absent:
        typer.echo(f"ranks {ranges(absent)} of {world} write elsewhere or have ended: they are not reached", err=True)


def _await(run: Path, number: int, expected: set[int], *, is_far: bool) -> Answers:
    """Wait for what each rank made of the request. Ctrl-C leaves the request as it is."""
    begun = checked = time.monotonic()
    announced = False
    given_up: Answers = {}
    last_seen: dict[int, tuple[float, float]] = {}
    while True:
        first, answers = _answers(run, number)
        if not answers and time.monotonic() - begun > _SILENT_S:
            why = "the job was killed, its disk is full, or its nodes write to another folder"
            raise RankscopeError(f"no agent of {run} has answered within {_SILENT_S:.0f} s: {why}")
        if first is not None and answers and not announced:
            announced = True
            where = f", in {run / folder_of(number)}" if os.isatty(2) else ""
            typer.echo(f"window {number} begins with step {first}{where}", err=True)
        answers |= given_up
        if expected <= {rank for rank, answer in answers.items() if answer["state"] in ENDED}:
            return answers
        if answers and not is_far and time.monotonic() - begun > 2 * _SILENT_S:
            for rank in expected - set(answers):
                given_up[rank] = {"state": "failed", "why": "its agent did not answer"}
        if time.monotonic() - checked > _STILL_S / 10:
            checked = time.monotonic()
            ended = {rank for rank, answer in answers.items() if answer["state"] in ENDED}
            for rank in expected & _of_dead_agents(run, last_seen) - ended:
                why = f"its agent has written nothing for {_STILL_S:.0f} s: it was killed, or its disk is full"
                given_up[rank] = {"state": "failed", "why": why}
        time.sleep(_POLL_S)


def _of_dead_agents(run: Path, last_seen: dict[int, tuple[float, float]]) -> set[int]:
    """Return the ranks of nodes whose counters have not grown for long.

    `last_seen` keeps from call to call when each node's file was changed last, and since when that is known.
    """
    dead = set()
    for node in _nodes(run):
        number, now = int(node["node"]), time.monotonic()
        changed = max((path.stat().st_mtime for path in run.glob(f"counters/node={number:05d}/*.arrow")), default=None)
        if changed is None:
            continue
        if last_seen.get(number, (None, now))[0] != changed:
            last_seen[number] = (changed, now)
        elif now - last_seen[number][1] > _STILL_S:
            dead |= {int(rank["rank"]) for rank in node.get("ranks", ())}
    return dead


def _answers(run: Path, number: int) -> tuple[int | None, Answers]:
    first: int | None = None
    answers: Answers = {}
    for path in (run / "run").glob(f"window={number:04d}.node=*.json"):
        try:
            answer = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        first = answer["first"] if first is None else first
        answers |= {int(rank): state for rank, state in answer["ranks"].items()}
    return first, answers


def _print_window(run: Path, number: int, steps: int, answers: Answers) -> None:
    from rankscope.analysis.text.phrases import counted, named

    recorded = [rank for rank, answer in answers.items() if answer["state"] == "recorded"]
    if recorded:
        folder = run / folder_of(number)
        print(f"{counted(steps, 'step')} of {named('rank', recorded)}: rankscope report {folder}")
    for why in sorted({answer.get("why") or answer["state"] for answer in answers.values()} - {"recorded", ""}):
        ranks = [r for r, a in answers.items() if (a.get("why") or a["state"]) == why and a["state"] != "recorded"]
        if ranks:
            print(f"{named('rank', ranks)}: {why}")


def _print_stacks(answers: Answers) -> None:
    for rank, answer in sorted(answers.items()):
        if answer["state"] != "told":
            print(f"rank {rank}: {answer.get('why') or answer['state']}\n")
            continue
        print(f"rank {rank}, in step {answer['step']}")
        if "text" in answer:
            print(answer["text"])
        for thread in answer.get("threads", ()):
            print(f"  {thread['name']}")
            for call in thread["calls"]:
                print(f"    {call}")
        print()
