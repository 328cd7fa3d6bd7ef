"""An agent and ranks as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

AGENT = [sys.executable, "-m", "rankscope.collectors.agent.loop"]
# A rank that executes commands, line by line, and answers each line when it is done.
RANK = """
import json, os, signal, socket, sys, threading, time
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.schema import RECORD, RING_SLOTS, RecordType as T

name, hello = sys.argv[1], json.loads(sys.argv[2])
ring = Ring()
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect("\\0" + name)
hello |= {"type": "hello", "pid": os.getpid(), "main_thread": threading.get_ident(), "start_ns": time.perf_counter_ns()}
socket.send_fds(agent, [json.dumps(hello).encode()], [ring.fd])
print(agent.recv(4096).decode(), flush=True)

def say(**message):
    agent.send(json.dumps(message).encode())

def regions(count, first=0):
    for i in range(first, first + count):
        ring.region(1, 0, i, i + 1)

for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
HELLO = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "node": 0,
    "attempt": 0,
    "world": None,
    "hostname": "host",
    "device": "cpu",
    "torch": "2.13.0",
    "python": "3.11.7",
    "command": "train.py",
}


class Rank:
    """A rank process; `do` returns when the rank has done it."""

    def __init__(self, name: str, *prefix: str, **hello: object) -> None:
        command = [*prefix, sys.executable, "-c", RANK, name, json.dumps(HELLO | hello)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.reply = json.loads(self.process.stdout.readline())

    def do(self, *lines: str) -> None:
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "done\n"

    def bye(self) -> None:
        self.do("say(type='bye', dropped=0)")
        self.process.stdin.close()
        self.process.wait(10)


class Agent:
    """An agent process that is ready."""

    def __init__(self, out: Path, *options: str, prefix: tuple[str, ...] = ()) -> None:
        self.name = f"rankscope-test-{uuid.uuid4().hex}"
        self.out = out
        command = [*prefix, *AGENT, "--socket", self.name, "--out", str(out), "--until-stdin-closes", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert json.loads(self.process.stdout.readline())["ready"]

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(20) == 0


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
