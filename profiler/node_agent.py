"""Starting and ending the agent of this node, which is a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from rankscope.collectors.agent.upload import LATE_S, UPLOAD_S
from rankscope.collectors.agent_socket import connect
from rankscope.errors import NotRecorded

__all__ = ["NEUTRAL_FOLDER", "Agent", "answers", "await_answer", "start_detached"]

READY_S = 15.0
_CONNECT_S = 5.0
ENDING_S = 20.0
_WORDS, _WORD = 100, 1000
# `python -m` puts the working directory on sys.path, where a user's own `queue.py` would break what we start.
NEUTRAL_FOLDER = "/"


class Agent:
    """The agent of a run: it is up when this exists, and ends after `end()`, or when this process is gone.

    After the end, `out` is the folder that it wrote to, on other nodes than the first perhaps another one than it was
    given, and `node` the index of this node, None if it could not even write that. `came` is what came of the upload
    to object storage (see `upload.Upload.finish`), None if it did not say.
    """

    def __init__(self, name: str, out: Path, hz: float, launch: Mapping[str, Any], options: Sequence[str] = ()) -> None:
        """Start it and wait until it is ready. Raises NotRecorded."""
        self.out = out
        self.node: int | None = None
        self.came: dict[str, Any] | None = None
        self._name = name
        self._ending_s = ENDING_S + (UPLOAD_S + 2 * LATE_S if "--upload" in options else 0)
        with TemporaryFile() as errors:
            # Its own session: a Ctrl-C on the terminal must not end it before the ranks are gone.
            self._process = subprocess.Popen(
                [*_command(name, out, hz, launch), "--until-stdin-closes", *options],
                cwd=NEUTRAL_FOLDER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            assert self._process.stdin
            assert self._process.stdout
            self._stdin = self._process.stdin
            with self._process.stdout as output:
                if not select.select([output], [], [], READY_S)[0]:
                    self._process.kill()
                    raise NotRecorded(f"the agent was not ready after {READY_S:.0f} s")
                if not output.readline():
                    self._process.wait()
                    raise NotRecorded(_last_line(errors))

    def end(self) -> str | None:
        """Let it write what it has and end; give one line if it did not end well, else None."""
        early = self._process.poll()
        self._stdin.close()
        try:
            code = self._process.wait(self._ending_s)
        except subprocess.TimeoutExpired:
            return f"the agent is still writing to {self.out}, as some rank has not ended after {self._ending_s:.0f} s"
        written = _written_by(self._name, self.out)
        if written:
            self.out, state = written
            self.node, self.came = state["node"], state.get("upload")
        if not self.out.exists():
            return f"{self.out} was removed during the job: there is no recording"
        if early is None and code == 0:
            return None
        when = "at the end of" if early is None else "during"
        return f"the agent ended {when} the job with code {code}; what it had written until then is in {self.out}"


def answers(name: str) -> bool:
    """Say whether an agent of this user listens on the socket of this name.

    Raises NotRecorded if it belongs to another user.
    """
    try:
        connect(name, _CONNECT_S).close()
    except OSError:
        return False
    return True


def start_detached(name: str, out: Path, hz: float, launch: Mapping[str, Any], options: Sequence[str] = ()) -> None:
    """Start an agent that answers on the name. It is no child of this process, and ends by itself after the last rank.

    Raises NotRecorded.
    """
    alive, inherited = os.pipe()  # which ends with the agent
    with TemporaryFile() as errors, os.fdopen(alive) as alive_file:
        starter = os.fork()
        if starter == 0:
            # Not from here: the job would find a child that it has not started when it waits for its own.
            try:
                subprocess.Popen(
                    [*_command(name, out, hz, launch), *options],
                    cwd=NEUTRAL_FOLDER,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    pass_fds=[inherited],
                )
            finally:
                os._exit(0)
        os.close(inherited)
        os.waitpid(starter, 0)
        if not await_answer(name, until=lambda: bool(select.select([alive_file], [], [], 0)[0])):
            raise NotRecorded(_last_line(errors))


def await_answer(name: str, until: Callable[[], bool] = lambda: False) -> bool:
    """Wait for an agent to answer on the name; return False if it does not in time, or `until` says to give up."""
    deadline = time.monotonic() + READY_S
    while not answers(name):
        if until() or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _command(name: str, out: Path, hz: float, launch: Mapping[str, Any]) -> list[str]:
    described = json.dumps({**launch, "command": _shortened(launch["command"]), "socket": name})
    options = ["--socket", name, "--out", str(out), "--hz", str(hz), "--launch", described]
    return [sys.executable, "-m", "rankscope.collectors.agent.loop", *options]


def _shortened(command: Sequence[str]) -> list[str]:
    """Return the part of a command that the run keeps: an argument of the agent takes no more than 128 KiB."""
    words = [word.encode(errors="replace").decode()[:_WORD] for word in command[:_WORDS]]
    return words if len(command) <= _WORDS else [*words, f"… and {len(command) - _WORDS} more"]


def _written_by(name: str, out: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the agent's folder and its JSON; the folder is beside `out` if node 0's has another name."""
    for path in chain(out.glob("run/node=*.json"), out.parent.glob("*/run/node=*.json")):
        try:
            state = json.loads(path.read_bytes())
            if state["launch"]["socket"] == name:
                return path.parent.parent, state | {"node": int(state["node"])}
        except (OSError, ValueError, KeyError):
            continue
    return None


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return (
        lines[-1].removeprefix("rankscope: ").removeprefix("nothing is recorded: ")
        if lines
        else "the agent did not start"
    )
