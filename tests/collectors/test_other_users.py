"""Another user of the node: takes the agent's name, connects to it, and gets nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid

import pytest

from rankscope.collectors.agent_socket import connect
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.in_rank.session import Emit
from rankscope.errors import NotRecorded
from rankscope.profiler.node_agent import answers
from support.agent import HELLO

NOT_ROOT = 65_534
SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen(8)
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    channel, _ = listener.accept()
    print(len(channel.recv(1 << 17)), flush=True)
"""
FLOOD = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
while True:
    held = []
    try:
        for _ in range(900):
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel.setblocking(False)
            held.append(channel)
            channel.connect("\\0" + sys.argv[1])
    except OSError:
        pass
    if held:
        print("full", flush=True)
    for channel in held:
        channel.close()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user as well")


@pytest.fixture
def squatter():
    """Start one that has a name; `communicate` says how many bytes each connection got it."""
    started = []

    def start(name: str, connections: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SQUATTER, name, str(NOT_ROOT), str(connections)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@needs_root
def test_a_name_that_another_user_has_taken_gets_no_byte(squatter):
    name = f"rankscope-test-{uuid.uuid4().hex}"
    process = squatter(name, 2)
    with pytest.raises(NotRecorded, match="another user"):
        connect(name, 5)
    with pytest.raises(NotRecorded, match=f"uid {NOT_ROOT}"):
        answers(name)
    assert process.communicate(timeout=30)[0].split() == ["0", "0"]


@needs_root
def test_exec_says_who_has_the_name_and_runs_the_job(squatter, tmp_path):
    from rankscope.profiler.commands.exec import agent_name

    job = {"TORCHELASTIC_RUN_ID": f"test-{uuid.uuid4().hex}"}
    squatter(agent_name(job), 1)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMIX", "OMPI"))} | job
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "exec", "--out", "run", sys.executable, "-c", "print('ran')"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "nothing is recorded: the agent's socket" in done.stderr
    assert f"another user (uid {NOT_ROOT})" in done.stderr


@needs_root
def test_connections_of_another_user_keep_no_rank_out(tmp_path):
    """Two processes of another user connect as fast as they can; the rank's hello is answered all the same."""
    name = f"rankscope-test-{uuid.uuid4().hex}"
    command = [
        sys.executable,
        "-m",
        "rankscope.collectors.agent.loop",
        "--socket",
        name,
        "--out",
        str(tmp_path / "run"),
    ]
    agent = subprocess.Popen([*command, "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    flood = [sys.executable, "-c", FLOOD, name, str(NOT_ROOT)]
    flooding = [subprocess.Popen(flood, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert agent.stdout.readline()
        for one in flooding:
            for _ in range(3):
                one.stdout.readline()
        for rank in range(20):
            with connect(name, 5) as channel:
                hello = HELLO | {"type": "hello", "rank": rank, "pid": os.getpid(), "start_ns": 1}
                socket.send_fds(channel, [json.dumps(hello).encode()], [Ring().fd])
                assert json.loads(channel.recv(4096))["node"] == 0
    finally:
        for one in flooding:
            one.kill()
            one.wait()
        agent.stdin.close()
        agent.wait(20)
    assert len(json.loads((tmp_path / "run/run/node=00000.json").read_bytes())["ranks"]) == 20


def test_own_agent_is_connected_to():
    name = f"rankscope-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        assert answers(name)
    assert not answers(name)


def test_files_are_written_below_the_runs_only(tmp_path):
    emit = Emit.__new__(Emit)
    emit.runs = str(tmp_path / "runs")
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    (tmp_path / "runs" / "run" / "link").symlink_to(tmp_path / "file")
    assert emit.may_write(str(tmp_path / "runs" / "run" / "trace"))
    for path in ("runs/../file", "file", "runs/out/file", "runs/run/link"):
        assert not emit.may_write(str(tmp_path / path)), path
    emit.runs = ""
    assert not emit.may_write(str(tmp_path / "runs" / "run" / "trace"))
