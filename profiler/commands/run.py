"""Record a job under torchrun and say why it is slow.

\b
Usage: rankscope run [--out FOLDER | --name NAME] [--hz HZ] [--keep SIZE] [--no-report]
                     TORCHRUN-OPTIONS SCRIPT ARGUMENTS

\b
  --out FOLDER   the run folder, or where in object storage it goes, as in s3://BUCKET/runs/NAME;
                 otherwise runs/<UTC time>-<script>
  --name NAME    what stands in the folder's name instead of the script
  --hz HZ        how often per second the node's counters are read (1)
  --keep 20G     what a node's files may take (10G, or a quarter of the free disk if that is less): then the oldest
                 records are evicted, the lengths of their steps stay; `all` evicts nothing
  --profile-first N         on NVIDIA GPUs torch.profiler records so many steps after about 20 (2; 0: none)
  --profile-steps 100-102   these steps of all ranks instead (see `rankscope trigger`)
  --profile-slow N          and three steps after one that is slower than usual, at most N times
  --no-report    record only

What follows is torchrun's and the script's own, and reaches them unchanged. The exit code is torchrun's.

Example: rankscope run --nproc-per-node 8 train.py
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rankscope.collectors.agent.upload import missed, remove_spool, upload_rest
from rankscope.collectors.native import nccl_plugin
from rankscope.collectors.switched_off import unknown_names
from rankscope.errors import NotRecorded, RankscopeError
from rankscope.profiler.arguments import HELP, OWN_FLAGS, OWN_VALUES, node_rank, program_name, split, torchrun_program
from rankscope.profiler.errors import say
from rankscope.profiler.folder import claim
from rankscope.profiler.foreground import exit_like, run_to_end
from rankscope.profiler.node_agent import NEUTRAL_FOLDER, Agent
from rankscope.profiler.torchrun import is_own, torchrun, visible_package

__all__ = ["main"]

OTHER_NODES_S = 5.0
REPORT_S = 300.0


def main(arguments: list[str]) -> None:
    """Run torchrun with the arguments and exit as it does."""
    options, rest = split(arguments)
    if options.help or not rest:
        print((__doc__ or "").replace("\b\n", ""))
        sys.exit(0 if options.help else 2)
    torchrun_options, program = torchrun_program(rest)
    _refuse_own_options(torchrun_options)
    command = [*torchrun(), *rest]
    if not program:  # nothing to record: torchrun shows its help, or says what is missing
        exit_like(run_to_end(command, os.environ))
    environment = dict(os.environ)
    environment.pop("RANKSCOPE_CLAIM", None)  # where a rank starts a job of its own
    agent = None
    try:
        place = node_rank(torchrun_options, os.environ)
        out = claim(options.out, options.name or program_name(program), place)
        socket = f"rankscope-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
        launch = {"command": ["torchrun", *rest], "directory": os.getcwd()}
        agent = Agent(socket, out, options.hz, launch, options.for_agent())
        if options.url:
            say(f"recording into {options.url}, by way of {out}")
        environment["RANKSCOPE_AGENT"] = socket
        environment.update(nccl_plugin.settings(environment))
    except (NotRecorded, OSError) as error:
        say(f"nothing is recorded: {error}; the job runs as without rankscope")
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        say("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading rankscope: no rank will be recorded")
    if unknown := unknown_names(environment):
        say(unknown)
    with ExitStack() as stack:
        if agent and not is_own():
            paths = [stack.enter_context(visible_package()), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        code = run_to_end(command, environment)
    if agent:
        try:
            _finish(agent, options.url, report=options.report)
        except KeyboardInterrupt:
            say(f"no report; for one: rankscope report {agent.out}")
    exit_like(code)


def _refuse_own_options(torchrun_options: list[str]) -> None:
    for option in torchrun_options:
        if option.partition("=")[0] in (*OWN_VALUES, *OWN_FLAGS) and option not in HELP:
            raise RankscopeError(f"{option} is rankscope's own option: put it before those of torchrun")


def _finish(agent: Agent, url: str | None, *, report: bool) -> None:
    """End the agent, and say what was found, or where this node's part lies."""
    trouble = agent.end()
    if trouble:
        say(trouble)
    if not agent.out.exists():
        return
    where = (agent.came["url"] if agent.came else url) or str(agent.out)
    if agent.node:
        say(f"this node's part of the run is in {where}")
    elif not report:
        say(f"recorded in {where}")
    else:
        _await_other_nodes(agent.out)
        _report(agent.out, where)
    if url:
        _empty_spool(agent.out, url)


def _empty_spool(out: Path, url: str) -> None:
    """Upload the report too, and leave nothing here; or say what has not arrived."""
    came = upload_rest(out, url)
    if came["missing"] == 0:
        remove_spool(out)
    else:
        say(f"files have not arrived in object storage: {missed(came, out)}")


def _await_other_nodes(out: Path) -> None:
    """Wait until the other nodes whose files are in this folder are done with it, or have had their time."""
    deadline = time.monotonic() + OTHER_NODES_S
    others = [path for path in (out / "run").glob("node=*.json") if path.name != "node=00000.json"]
    while not all(map(_is_closed, others)) and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_closed(node: Path) -> bool:
    try:
        return bool(json.loads(node.read_bytes())["state"] == "closed")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _report(out: Path, where: str) -> None:
    """Print the report and write it into the folder, as `where`; if it fails, say so and do nothing else.

    It runs in a process of its own, since a report must not be able to end the job with anything but its exit code.
    """
    command = [sys.executable, "-m", "rankscope", "report", "--short", "--recent", str(out)]
    try:
        done = subprocess.run(
            command,
            cwd=NEUTRAL_FOLDER,
            stdout=sys.stderr if where == str(out) else subprocess.PIPE,
            timeout=REPORT_S,
            preexec_fn=lambda: os.nice(10),
        )
        if done.stdout:
            print(done.stdout.decode(errors="replace").replace(str(out), where), end="", file=sys.stderr)
        trouble = f"exit code {done.returncode}" if done.returncode not in (0, 2) else ""  # 2 has said why
    except (OSError, subprocess.SubprocessError) as error:
        trouble = str(error)
    if trouble:
        say(f"the report failed ({trouble}); the run is in {out}")
