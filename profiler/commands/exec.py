"""Record a rank that srun, mpirun or an operator starts, or those that a script starts itself.

\b
Usage: srun rankscope exec [--out FOLDER | --name NAME] [--hz HZ] [--keep SIZE] -- python train.py ARGUMENTS

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

Lightning, torch.multiprocessing.spawn and the launchers of DeepSpeed and Accelerate start ranks themselves: put it
before their command, once on each node. The first one on a node starts the node's agent. The command then takes this
process's place.

Example: srun rankscope exec -- python train.py
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from rankscope.collectors.native import nccl_plugin
from rankscope.collectors.switched_off import unknown_names
from rankscope.errors import NotRecorded, RankscopeError
from rankscope.profiler.arguments import Options, program_name, split
from rankscope.profiler.errors import say
from rankscope.profiler.folder import claim
from rankscope.profiler.node_agent import answers, await_answer, start_detached

__all__ = ["agent_name", "main", "place"]

# Schedulers' names of the job; the first entry whose variables are all set counts.
_JOB = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("TORCHELASTIC_RUN_ID",),
    ("MASTER_ADDR", "MASTER_PORT"),
)
# Where a rank's place stands if not under torch's names, and what rankscope calls it. The job's own variables stay as
# they are, since a script may decide by them how it was started.
_PLACE = {
    "RANKSCOPE_LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "RANKSCOPE_LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"),
    "RANKSCOPE_NODE": ("SLURM_NODEID",),
}
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")


def main(arguments: list[str]) -> None:
    """Become the command, with an agent on this node and the environment by which a rank finds it."""
    options, command = split(arguments)
    if command[:1] == ["--"]:
        del command[0]
    if options.help or not command:
        print((__doc__ or "").replace("\b\n", ""))
        sys.exit(0 if options.help else 2)
    if not options.report:
        raise RankscopeError("--no-report is for `rankscope run`; `rankscope exec` makes no report")
    program = shutil.which(command[0])
    if program is None:
        say(f"cannot run {command[0]}: it is not on PATH")
        sys.exit(127)  # as a shell does
    environment = dict(os.environ)
    environment.pop("RANKSCOPE_CLAIM", None)  # where a rank starts a job of its own
    if PurePath(command[0]).name not in _LAUNCHERS:  # they are no rank, even where srun starts them like one
        environment.update(place(os.environ))
    name = agent_name(os.environ)
    try:
        _ensure_agent(name, options, command)
        environment["RANKSCOPE_AGENT"] = name
        environment.update(nccl_plugin.settings(environment))
    except (NotRecorded, OSError) as error:
        say(f"nothing is recorded: {error}; the job runs as without rankscope")
    try:
        os.execve(program, command, environment)
    except OSError as error:
        say(f"cannot run {program}: {error.strerror}")
        sys.exit(126)  # as a shell does


def agent_name(environment: Mapping[str, str]) -> str:
    """Give the socket's name that all ranks of this user's job on this node agree on."""
    for variables in _JOB:
        values = [environment.get(variable, "") for variable in variables]
        if not {"", "none"} & set(values):  # torchrun calls a job without a name `none`
            break
    else:
        values = [f"pid {os.getpid()}", *_process()]
    return f"rankscope-{os.getuid()}-{hashlib.sha256(' '.join(values).encode()).hexdigest()[:16]}"


def _process() -> Iterator[str]:
    """Yield facts that distinguish this process from one of another container with the same pid and network."""
    with contextlib.suppress(OSError):
        yield str(os.stat("/proc/self/ns/pid").st_ino)
        yield Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # when it began


def place(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the rank's place on its node under rankscope's own names, as far as the environment has it.

    A rank without a local rank is alone on its node, as under an operator that makes a pod per rank.
    """
    found = {own: environment[name] for own, names in _PLACE.items() for name in reversed(names) if name in environment}
    if "RANK" in environment:
        found.setdefault("RANKSCOPE_LOCAL_RANK", "0")
    return found


def _ensure_agent(name: str, options: Options, command: list[str]) -> None:
    """Wait until an agent answers on the socket. Raises NotRecorded."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as starting:
        try:
            # The process that gets this name starts the agent; it is free again when this process is the command.
            starting.bind(f"\0{name}-starts")
        except OSError:
            if not await_answer(name):
                raise NotRecorded("the node's first rank has started no agent") from None
        else:
            if not answers(name):
                out = claim(options.out, options.name or program_name(command))
                launch = {"command": command, "directory": os.getcwd()}
                start_detached(name, out, options.hz, launch, options.for_agent())
                say(f"recording this node in {f'{options.url}, by way of {out}' if options.url else out}")
                if unknown := unknown_names(os.environ):
                    say(unknown)
