"""`rankscope run` and `rankscope exec`: what they start behaves as if it had been started without them."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rankscope
from rankscope.errors import NotRecorded, RankscopeError
from rankscope.profiler.arguments import node_rank, program_name, split, torchrun_program
from rankscope.profiler.commands.exec import agent_name, place
from rankscope.profiler.folder import claim
from rankscope.profiler.node_agent import await_answer
from rankscope.profiler.torchrun import visible_package

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="recording needs Linux")

RANKSCOPE = [sys.executable, "-m", "rankscope"]
ONE_RANK = ["--standalone", "--nproc-per-node", "1"]
DEADLINE_S = 60

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('RANKSCOPE_AGENT'), os.getpid()]))\n"


def rankscope_(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RANKSCOPE, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- rankscope run, with torchrun


@pytest.mark.real_job
def test_run_passes_all_arguments_to_torchrun_and_the_script(tmp_path):
    """Options that look like ours belong to the script behind it; its output is all there is on standard output."""
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the user broke rankscope or torchrun')")
    theirs = ["--name", "a b", "--out=x", "--no-report", "-m", "--", "--hz"]
    done = rankscope_("run", "--no-report", "--hz=2", *ONE_RANK, "train.py", *theirs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    arguments, agent, _ = json.loads(done.stdout)
    assert arguments == theirs
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-train")
    launched = json.loads((run / "run/node=00000.json").read_text())
    assert launched["state"] == "closed"
    assert launched["launch"]["socket"] == agent
    assert launched["launch"]["command"] == ["torchrun", *ONE_RANK, "train.py", *theirs]
    assert done.stderr.splitlines()[-1] == f"rankscope: recorded in {run}"


@pytest.mark.real_job
def test_run_module_whose_agent_dies_ends_with_torchruns_code_and_one_line(tmp_path):
    """The module kills the agent and fails with 3, for which torchrun's own code is 1."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/train.py").write_text(
        "import os, signal, socket, struct, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect('\\0' + os.environ['RANKSCOPE_AGENT'])\n"
        "os.kill(struct.unpack('3i', s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0], signal.SIGKILL)\n"
        "sys.exit(3)\n"
    )
    done = rankscope_("run", "--no-report", "--name", "my job", *ONE_RANK, "-m", "jobs.train", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-my-job")
    said = [line for line in done.stderr.splitlines() if line.startswith("rankscope")]
    assert said[0] == (
        f"rankscope: the agent ended during the job with code -9; what it had written until then is in {run}"
    )


@pytest.mark.real_job
def test_run_whose_folder_is_removed_says_so_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "os.mkdir('away')\n"
        "os.rename('out', 'away/out')\n"  # at once: the agent writes meanwhile
        "time.sleep(3)\n"
        "print('trained')\n"
    )
    done = rankscope_("run", "--out", "out", *ONE_RANK, "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["trained"]), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("rankscope")]
    assert said == [f"rankscope: {tmp_path}/out was removed during the job: there is no recording"]
    assert not (tmp_path / "out").exists()


@pytest.mark.real_job
def test_run_where_nothing_can_be_written_runs_the_job_all_the_same(tmp_path):
    """The run folder's parent is a file; the program is no Python."""
    (tmp_path / "file").touch()
    program = ["--no-python", "sh", "-c", 'echo "[$RANKSCOPE_AGENT]$0"', "zero"]
    done = rankscope_("run", "--out", "file/run", *ONE_RANK, *program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]zero\n")
    assert done.stderr.splitlines() == [
        f"rankscope: nothing is recorded: cannot make the run folder {tmp_path}/file/run: Not a directory; "
        "the job runs as without rankscope"
    ]


@pytest.mark.real_job
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_run_hands_a_signal_to_the_ranks(tmp_path, sent):
    """Only the launcher is signalled, as by a scheduler; the rank gets it from torchrun."""
    (tmp_path / "train.py").write_text(
        "import os, pathlib, signal\n"
        f"signal.signal({int(sent)}, lambda *_: (pathlib.Path('got').touch(), os._exit(0)))\n"
        "pathlib.Path('up').touch()\n"
        "while True: signal.pause()\n"
    )
    command = [*RANKSCOPE, "run", "--no-report", *ONE_RANK, "train.py"]
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "up").exists)
    job.send_signal(sent)
    _, errors = job.communicate(timeout=DEADLINE_S)
    assert (tmp_path / "got").exists()
    assert job.returncode == 1, errors  # as torchrun's own
    assert "rankscope: recorded in" in errors


# ---- running in the foreground

IN_FRONT = (
    "import os, sys; from rankscope.profiler.foreground import *; exit_like(run_to_end(sys.argv[1:], os.environ))"
)


def test_exit_code_and_deadly_signal_are_the_childs():
    for script, code in (("exit 7", 7), ("kill -KILL $$", -signal.SIGKILL), ("kill -TERM $$", -signal.SIGTERM)):
        assert (
            subprocess.run([sys.executable, "-c", IN_FRONT, "sh", "-c", script], timeout=DEADLINE_S).returncode == code
        )


def test_ctrl_c_on_the_terminal_reaches_the_child_once(tmp_path):
    """The terminal signals the whole foreground group, so nothing is passed on."""
    child = (
        "import signal, sys, time\n"
        "signal.alarm(60)\n"
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
        "print('up', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"  # for a second one, were there one
        "sys.exit(40 + len(got))\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", IN_FRONT, sys.executable, "-c", child])
    seen = b""
    while b"up" not in seen:
        seen += os.read(terminal, 100)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41
    os.close(terminal)


@pytest.mark.real_job
@pytest.mark.parametrize(
    ("disable", "said"),
    [
        ("", ["out: no rank reported: the script made no process group (call torch.distributed.init_process_group()"]),
        ("all", ["out: no rank reported: RANKSCOPE_DISABLE=all switches recording off"]),
        (
            "memory, colectives",
            ["RANKSCOPE_DISABLE: no collector is named colectives; there are all, ", "out: no rank"],
        ),
    ],
)
def test_run_of_a_script_that_makes_no_process_group_says_what_to_do(tmp_path, disable, said):
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = rankscope_("run", "--out", "out", *ONE_RANK, "train.py", cwd=tmp_path, RANKSCOPE_DISABLE=disable)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("rankscope")]
    assert len(lines) == len(said)
    for line, start in zip(lines, said, strict=True):
        assert line.replace(f"{tmp_path}/", "").startswith(f"rankscope: {start}")


# ---- rankscope exec


@pytest.fixture
def job() -> Iterator[dict[str, str]]:
    """The environment of a job whose agent, if one was started, ends with the test."""
    environment = {"TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{time.monotonic_ns()}"}
    yield environment
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        try:
            channel.connect(f"\0{agent_name(environment)}")
        except ConnectionRefusedError:
            return
        pid, _, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(pid, signal.SIGTERM)


def test_exec_becomes_the_command_and_its_ranks_share_one_agent(tmp_path, job):
    (tmp_path / "train.py").write_text(SHOW + "sys.exit(5)\n")
    command = [*RANKSCOPE, "exec", "--hz", "2", "--", sys.executable, "train.py", "--name", "x"]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **job}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 5]
    assert [json.loads(output) for output in outputs] == [
        [["--name", "x"], agent_name(job), rank.pid] for rank in ranks
    ]
    assert await_answer(agent_name(job))
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-train")


@pytest.mark.real_job
def test_exec_records_ranks_that_only_slurm_has_numbered(tmp_path, job):
    """Two ranks, started as by srun; the agent ends by itself when they are gone."""
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "place = dict(rank=int(os.environ['SLURM_PROCID']), world_size=2)\n"
        "dist.init_process_group('gloo', f'file://{os.getcwd()}/store', **place)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "assert 'LOCAL_RANK' not in os.environ\n"
        "dist.destroy_process_group()\n"
    )
    job["SLURM_NTASKS_PER_NODE"] = "2"
    command = [*RANKSCOPE, "exec", "--out", "run", sys.executable, "train.py"]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("0", "1")
    ]
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    node = tmp_path / "run/run/node=00000.json"
    wait_for(lambda: json.loads(node.read_text())["state"] == "closed")
    assert sorted(file.parent.name for file in tmp_path.glob("run/collectives/*/*")) == ["rank=00000", "rank=00001"]


@pytest.mark.real_job
def test_exec_records_ranks_that_the_script_starts_itself(tmp_path, job):
    """By torch.multiprocessing, which sets no environment variables. What a rank starts is no rank."""
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def group(store, **place):\n"
        "    dist.init_process_group('gloo', f'file://{os.getcwd()}/{store}', **place)\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "    dist.destroy_process_group()\n"
        "def work(rank):\n"
        "    os.environ['MASTER_ADDR'] = 'localhost'\n"
        "    group('store', rank=rank, world_size=3)\n"
        "    subprocess.run([sys.executable, __file__, str(rank)], check=True)\n"
        "if __name__ == '__main__':\n"
        "    group('own' + sys.argv[1], rank=0, world_size=1) if sys.argv[1:] else mp.spawn(work, nprocs=3)\n"
    )
    done = rankscope_("exec", "--out", "run", sys.executable, "train.py", cwd=tmp_path, **job)
    assert done.returncode == 0, done.stderr
    node = tmp_path / "run/run/node=00000.json"
    wait_for(lambda: json.loads(node.read_text())["state"] == "closed")
    ranks = rankscope.open(tmp_path / "run").table("ranks").collect().sort("rank")
    assert ranks.select("rank", "local_rank", "node", "world_size").rows() == [(r, r, 0, 3) for r in range(3)]


def test_exec_without_an_agent_or_a_command(tmp_path, job):
    (tmp_path / "file").touch()
    done = rankscope_("exec", "--out", "file/run", "sh", "-c", "echo [$RANKSCOPE_AGENT]; exit 4", cwd=tmp_path, **job)
    assert (done.returncode, done.stdout) == (4, "[]\n")
    assert "nothing is recorded: cannot make the run folder" in done.stderr
    done = rankscope_("exec", "--out", "file/run", "no-such-program", cwd=tmp_path, **job)
    assert done.returncode == 127
    assert done.stderr == "rankscope: cannot run no-such-program: it is not on PATH\n"


TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
print("rank", os.environ["RANK"], "has ended")
"""


@pytest.mark.real_job
def test_exec_records_ranks_of_a_launcher_that_is_started_like_a_rank(tmp_path, job):
    """In a batch script Slurm says SLURM_LOCALID=0 to what then is torchrun."""
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = f"exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    done = rankscope_("exec", "--out", "run", "--", "bash", "-c", torchrun, cwd=tmp_path, SLURM_LOCALID="0", **job)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run/ranks").iterdir()) == ["rank=00000", "rank=00001"]


@pytest.mark.real_job
def test_the_agent_waits_for_what_exec_has_become(tmp_path, job):
    """A script trains twice, and prepares something in between that takes longer than an agent waits for ranks."""
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    twice = f"{sys.executable} train.py && sleep 6.5 && {sys.executable} train.py"
    done = rankscope_("exec", "--out", "run", "--", "bash", "-c", twice, cwd=tmp_path, **job, **env)
    assert done.returncode == 0, done.stderr
    node = tmp_path / "run/run/node=00000.json"
    wait_for(lambda: json.loads(node.read_text())["state"] == "closed")
    assert [rank["ended"] for rank in json.loads(node.read_text())["ranks"]] == [True, True]


@pytest.mark.real_job
def test_a_group_is_not_kept_alive(tmp_path):
    """A store in a file removes it with its last user; one on a port lets the next have it."""
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', f'file://{os.getcwd()}/store', rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "dist.destroy_process_group()\n"
        "assert not os.path.exists('store')\n"
        "port = 0\n"
        "for _ in range(2):\n"
        "    store = dist.TCPStore('127.0.0.1', port, 1, True)\n"
        "    port = store.port\n"
        "    dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "    dist.destroy_process_group()\n"
        "    del store\n"
    )
    done = rankscope_("run", "--no-report", "--out", "run", *ONE_RANK, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.real_job
@pytest.mark.parametrize("redirected", [">&-", "2>&-", "2>/dev/full", ">/dev/full"])
def test_a_job_does_not_depend_on_where_its_output_goes(redirected, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace('print("rank"', 'open("ended", "w"); ("rank"'))
    run = f"{sys.executable} -m rankscope run --out run {' '.join(ONE_RANK)} train.py {redirected}"
    done = subprocess.run(["bash", "-c", run], cwd=tmp_path, timeout=DEADLINE_S, capture_output=True)
    assert (done.returncode, (tmp_path / "ended").exists()) == (0, True)


def test_exec_is_not_misled_by_noise_nor_by_many_arguments(tmp_path, job):
    command = ["exec", "--out", "run", "sh", "-c", "echo [$RANKSCOPE_AGENT]", *(f"shard-{n:020}" for n in range(9000))]
    done = rankscope_(*command, cwd=tmp_path, LD_PRELOAD="/nowhere/libnoise.so", **job)
    assert done.stdout == f"[{agent_name(job)}]\n"
    assert "nothing is recorded" not in done.stderr


def test_a_user_without_a_home_runs_jobs(tmp_path):
    """As in a container whose user number has no name."""
    without = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    code = "from rankscope.collectors.native import nccl_plugin as p; print(p.built(), p.settings({}))"
    strange = "import os, pwd; pwd.getpwuid = lambda uid: {}[uid]; "
    done = subprocess.run([sys.executable, "-c", strange + code], env=without, capture_output=True, text=True)
    assert done.stdout == "None {}\n", done.stderr


def test_ranks_of_one_job_agree_on_the_agent_and_other_jobs_do_not():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert agent_name({**slurm, "SLURM_PROCID": "0"}) == agent_name({**slurm, "SLURM_PROCID": "1"})
    assert agent_name(slurm) != agent_name({**slurm, "SLURM_STEP_ID": "1"})
    by_address = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert agent_name(by_address) != agent_name({**by_address, "MASTER_PORT": "2"})
    in_a_batch_script = {"SLURM_JOB_ID": "7"}  # of which there may be several at once
    ask = f"from rankscope.profiler.commands.exec import agent_name; print(agent_name({in_a_batch_script}))"
    named = {subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(named) == 2


def test_a_ranks_place_is_passed_on_under_names_of_our_own():
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS_PER_NODE": "2"}
    assert place(slurm) == {
        "RANKSCOPE_LOCAL_RANK": "1",
        "RANKSCOPE_LOCAL_WORLD_SIZE": "2",
        "RANKSCOPE_NODE": "2",
    }
    mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert place(mpi) == {"RANKSCOPE_LOCAL_RANK": "3", "RANKSCOPE_LOCAL_WORLD_SIZE": "4"}
    assert place({"RANK": "6", "WORLD_SIZE": "8"}) == {"RANKSCOPE_LOCAL_RANK": "0"}
    assert place({}) == {}


# ---- a Python without rankscope


def test_a_python_without_rankscope_finds_it_through_the_folder():
    """`-S` leaves out site-packages, so this Python has nothing installed."""
    look = (
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='torch.backends')\n"
        "point.load()()\n"
        "import rankscope; print(point.value, rankscope.__file__)\n"
    )
    with visible_package() as folder:
        environment = {"PYTHONPATH": folder, "PATH": os.environ["PATH"]}
        done = subprocess.run([sys.executable, "-S", "-c", look], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["rankscope_entry:autoload", f"{folder}/rankscope/__init__.py"], done.stderr
    assert not Path(folder).exists()
    assert Path(rankscope.__file__).exists()


# ---- arguments and the run folder


def test_only_leading_options_are_ours():
    options, rest = split(["--hz", "5", "--out=o", "--no-report", "--nnodes", "2", "--name", "x", "t.py"])
    assert (options.hz, options.out, options.report, options.name) == (5.0, "o", False, None)
    assert rest == ["--nnodes", "2", "--name", "x", "t.py"]


def test_steps_to_be_profiled_reach_the_agent():
    options, _ = split(["--profile-steps", "100-102", "--profile-slow=2", "t.py"])
    assert options.for_agent() == ["--profile-steps", "[100, 102]", "--profile-slow", "2"]
    assert split(["--profile-steps", "7", "t.py"])[0].profile_steps == (7, 7)
    assert split(["t.py"])[0].for_agent() == ["--profile-first", "2"]
    assert split(["--profile-first", "0", "t.py"])[0].for_agent() == ["--profile-first", "0"]


@pytest.mark.parametrize("text", ["0-2", "5-3", "-3", "3-", "a-b", "1-2-3", ""])
def test_steps_that_cannot_be_profiled_are_refused(text):
    with pytest.raises(RankscopeError, match="--profile-steps is as in 100-102"):
        split(["--profile-steps", text, "t.py"])


@pytest.mark.parametrize(
    "arguments", [["--hz"], ["--hz", "fast"], ["--hz", "0"], ["--out", "a", "--name", "b"], ["--profile-first", "21"]]
)
def test_wrong_options_of_ours_are_refused(arguments):
    with pytest.raises(RankscopeError):
        split(arguments)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--standalone", "--nproc-per-node", "4", "src/train.py", "--x"], "train"),
        (["--nproc_per_node=4", "--no_python", "-r3", "./go.sh", "1"], "go"),
        (["--nnodes", "1:4", "--max-restarts", "3", "-m", "jobs.pretrain", "-m", "x"], "pretrain"),
        (["--stand", "--tee", "3", "--", "train.py"], "train"),
    ],
)
def test_the_script_is_found_among_torchruns_arguments(arguments, name):
    assert program_name(torchrun_program(arguments)[1]) == name


def test_the_rank_of_a_node_is_that_of_torchruns_options():
    assert node_rank(["--nnodes=3", "--node-rank", "2"], {}) == 2
    assert node_rank(["--node_rank=1"], {"PET_NODE_RANK": "2"}) == 1
    assert node_rank([], {"PET_NODE_RANK": "2"}) == 2
    assert node_rank(["--nnodes", "2"], {}) == 0


def test_the_name_of_a_command():
    assert program_name(["python", "-u", "src/train.py", "data.py"]) == "train"
    assert program_name(["python", "-m", "jobs.pretrain", "x"]) == "pretrain"
    assert program_name(["./finetune"]) == "finetune"


def test_no_two_runs_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claim("o", "x") == tmp_path / "o"
    assert claim("o", "x") == tmp_path / "o-2"
    (tmp_path / "made").mkdir()
    assert claim("made", "x") == tmp_path / "made"
    assert claim("p", "x", 2) == tmp_path / "p.node-2"
    assert claim("p", "x") == tmp_path / "p"
    assert claim(None, "../a b").name.endswith("-a-b")
    (tmp_path / "file").touch()
    with pytest.raises(NotRecorded):
        claim("file", "x")
