"""Small jobs of two ranks that do to themselves what harms a recorder.

Each trains a few steps and prints its losses. `counts` notes, in memory that outlives a rank, how many all-reduces and
optimizer steps it has done.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import json
import locale
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 4
RANKS = 2
SCENARIOS: dict[str, Callable[[], object]] = {}
_NOBODY = 65534
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
ALL_REDUCES, OPTIMIZER_STEPS = range(2)
counts = memoryview(mmap.mmap(-1, 1 << 12)).cast("Q")  # of each rank of each job: all-reduces, optimizer steps
_counting = threading.Lock()
_place = _first = 0


def become_rank(rank: int, first: int) -> None:
    """Be this rank, whose counts begin at `first`."""
    global _place, _first
    _place, _first = rank, first


def harm(scenario: Callable[[], object]) -> Callable[[], object]:
    SCENARIOS[scenario.__name__] = scenario
    return scenario


def counted(what: int, do: Callable[..., object], *args: object, **kwargs: object) -> object:
    done = do(*args, **kwargs)
    with _counting:
        counts[_first + what] += 1
    return done


def reduce(tensor: torch.Tensor, **kwargs: object) -> object:
    return counted(ALL_REDUCES, dist.all_reduce, tensor, **kwargs)


def begin() -> None:
    dist.init_process_group("gloo")


class Training:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number: int) -> str:
        data = torch.linspace(-1, 1, 64).reshape(8, 8) * (1 + dist.get_rank() + number)
        loss = self.model(data).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for weight in self.model.parameters():
            reduce(weight.grad)
        counted(OPTIMIZER_STEPS, self.optimizer.step)
        return loss.item().hex()


def train(steps: int = STEPS) -> None:
    training = Training()
    for number in range(steps):
        print(training.step(number), flush=True)


def unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


# ---- what processes do


@harm
def does_nothing_harmful():
    begin()
    train()
    sys.exit()


@harm
def forks_a_child_that_trains_and_leaves_at_once():
    begin()
    train(2)
    child = os.fork()
    if child == 0:
        model = torch.nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    train(2)


@harm
def forks_a_child_that_is_a_rank_of_its_own():
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        os._exit(4)
    begin()
    train(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train(2)


@harm
def loads_data_with_many_forked_workers():
    begin()
    for _ in range(2):
        loader = torch.utils.data.DataLoader(torch.arange(16.0), batch_size=2, num_workers=6)
        print([batch.sum().item() for batch in loader])
    train()


@harm
def leaves_by_os_exit():
    begin()
    train()
    os._exit(3)


@harm
def kills_itself():
    begin()
    train()
    os.kill(os.getpid(), signal.SIGKILL)


@harm
def crashes_under_faulthandler():
    faulthandler.enable()
    begin()
    train()
    ctypes.string_at(0)


@harm
def stops_and_is_continued():
    begin()
    train(2)
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)
    os.wait()
    train(2)


@harm
def becomes_another_program():
    begin()
    train()
    os.execv("/bin/sh", ["sh", "-c", "echo another; exit 6"])


@harm
def exits_while_a_daemon_thread_communicates():
    begin()
    train()
    other = dist.new_group()

    def endless() -> None:
        for _ in range(100_000):
            dist.all_reduce(torch.ones(4), group=other)

    threading.Thread(target=endless, daemon=True).start()
    time.sleep(0.05)
    os._exit(0)


@harm
def exits_while_a_thread_still_trains():
    begin()
    threading.Thread(target=lambda: (time.sleep(0.3), train())).start()
    sys.exit()


# ---- limits, files and rights


@harm
def closes_standard_streams():
    begin()
    train()
    for number in range(3):
        os.close(number)
    held = [socket.socketpair() for _ in range(3)]
    for _ in range(STEPS):
        reduce(torch.ones(2))
    assert held
    os._exit(7)


@harm
def closes_descriptors_that_it_does_not_know():
    begin()
    train(2)
    os.closerange(3, 1024)
    train(2)


@harm
def closes_unix_sockets_and_takes_their_numbers():
    """What the recorder writes must not go into the job's own connections."""
    begin()
    train(2)
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=int(name))
            if found.family == socket.AF_UNIX:
                found.close()
            else:
                found.detach()
    ours = [socket.socketpair() for _ in range(8)]
    time.sleep(1.1)
    train(2)
    for near, far in ours:
        for end in (near, far):
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                print("came without a sender:", end.recv(1 << 16))


@harm
def has_no_descriptors_left():
    begin()
    train(2)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    train(2)


@harm
def may_write_no_file():
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    outputs = {number: (os.dup(number), *os.pipe()) for number in (1, 2)}
    for number, (_, _, writing) in outputs.items():
        os.dup2(writing, number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    begin()
    train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for number, (output, reading, _) in outputs.items():
        os.write(number, b"\n")
        os.write(output, os.read(reading, 1 << 16))


@harm
def has_hardly_any_address_space():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), most))
    begin()
    train()
    with contextlib.suppress(MemoryError, RuntimeError):
        held = []
        while True:
            held.append(bytearray(16 << 20))
    train(1)


@harm
def works_in_a_folder_that_is_gone():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    begin()
    train()


@harm
def shares_memory_that_is_full():
    unshare(_CLONE_NEWNS)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
    Path("/dev/shm/full").write_bytes(bytes(64 << 10))
    begin()
    train()


@harm
def becomes_another_user():
    begin()
    train(2)
    os.seteuid(_NOBODY)
    train(2)


@harm
def is_another_user_from_the_start():
    os.seteuid(_NOBODY)
    begin()
    train()


@harm
def leaves_the_network():
    begin()
    train(2)
    unshare(_CLONE_NEWNET)
    train(2)


@harm
def lives_in_a_network_of_its_own():
    """Without even a loopback address: gloo needs one, with and without a recorder."""
    unshare(_CLONE_NEWNET)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train()


@harm
def hides_from_others():
    begin()
    assert ctypes.CDLL(None).prctl(4, 0) == 0  # PR_SET_DUMPABLE
    train()


# ---- the interpreter


@harm
def replaces_json():
    json.dumps = json.loads = lambda *_, **__: 1 / 0
    json.JSONEncoder.encode = json.JSONDecoder.decode = json.dumps
    begin()
    train()


@harm
def replaces_print_and_standard_error():
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError(name)

    write = os.write

    def only_text(*said, **_):
        write(1, f"{' '.join(map(str, said))}\n".encode())
        if any("rankscope" in str(word) for word in said):
            raise RuntimeError("what is this?")

    builtins.print = only_text
    sys.stderr = sys.__stderr__ = Broken()
    begin()
    train()
    sys.exit()


@harm
def replaces_what_the_interpreter_has():
    def refuse(*_, **__):
        raise RuntimeError("not here")

    begin()
    train(2)
    for owner, name in ((time, "perf_counter_ns"), (time, "perf_counter"), (time, "time"), (time, "sleep")):
        setattr(owner, name, refuse)
    for owner, name in ((os, "getpid"), (os, "listdir"), (builtins, "open"), (threading, "get_ident")):
        setattr(owner, name, refuse)
    for owner, name in ((socket, "socket"), (socket, "send_fds"), (threading, "Thread"), (struct, "Struct")):
        setattr(owner, name, refuse)
    train(2)


@harm
def removes_modules():
    begin()
    train(2)
    for name in [name for name in sys.modules if name.startswith(("torch.distributed", "rankscope", "json"))]:
        del sys.modules[name]
    train(2)
    sys.exit()


@harm
def clears_its_environment():
    begin()
    train(2)
    os.environ.clear()
    train(2)


@harm
def clears_its_environment_at_the_beginning():
    kept = {name: os.environ[name] for name in ("GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    os.environ.clear()
    os.environ.update(kept)
    begin()
    train()


@harm
def changes_its_language():
    locale.setlocale(locale.LC_ALL, "C")
    os.environ |= {"LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0"}
    sys.stdout.reconfigure(encoding="ascii")
    begin()
    train()


@harm
def takes_warnings_for_errors():
    warnings.simplefilter("error")
    begin()
    train()


@harm
def traces_and_profiles_itself():
    seen = [0, 0]

    def trace(frame, event, argument):
        seen[0] += "harm" in frame.f_code.co_filename
        return trace

    def profile(frame, event, argument):
        seen[1] += "harm" in frame.f_code.co_filename and event == "call"

    threading.settrace(trace)
    begin()
    sys.settrace(trace)
    sys.setprofile(profile)
    train()
    sys.settrace(None)
    sys.setprofile(None)
    print(seen[1] > 0)


@harm
def does_things_to_the_garbage_collector():
    begin()
    gc.disable()
    gc.freeze()
    train(2)
    time.sleep(0.5)
    print(gc.isenabled(), gc.get_threshold())
    gc.unfreeze()
    gc.callbacks.clear()
    gc.set_threshold(1)
    gc.enable()
    train(2)
    print(gc.isenabled())
    gc.freeze()
    sys.exit()


@harm
def recurses_to_the_limit():
    begin()
    train(2)

    def deeper(depth):
        try:
            deeper(depth + 1)
        finally:
            if depth % 50 == 0:
                with contextlib.suppress(RecursionError):
                    torch.ones(1, requires_grad=True).sum().backward()

    for _ in range(3):
        with contextlib.suppress(RecursionError):
            deeper(0)
    train(2)


@harm
def raises_at_exit():
    def fails():
        dist.all_reduce(torch.ones(2))
        raise ValueError("at exit")

    atexit.register(fails)
    begin()
    atexit.register(fails)
    train()
    sys.exit()


@harm
def ends_by_an_exception_that_has_no_text():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    begin()
    train()
    raise SilentError


@harm
def ends_by_its_own_excepthook():
    def hook(*_):
        print("hook", flush=True)
        raise KeyError("in the hook")

    begin()
    sys.excepthook = hook
    train()
    raise ValueError("the end")


@harm
def leaves_in_the_middle_with_a_status():
    begin()
    train(2)
    sys.exit(9)


# ---- signals


def _interrupted(error: type[BaseException]) -> None:
    """Every alarm must arrive: as many are caught as were sent, whatever code they hit."""
    begin()
    train(1)  # torch catches what is raised in an import of its first step
    training = Training()
    caught = rang = 0

    def ring(*_):
        nonlocal rang
        rang += 1
        raise error(f"alarm {rang}")

    signal.signal(signal.SIGALRM, ring)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            torch.set_grad_enabled(True)  # torch itself may leave it off where its optimizer is interrupted
            signal.setitimer(signal.ITIMER_REAL, 0.001 * (1 + rang % 7))
            for number in range(10_000):
                training.optimizer.zero_grad()
                training.model(torch.ones(2, 8)).sum().backward()
                training.optimizer.step()
                if number % 4 == 0:
                    gc.collect(0)
        except error as raised:
            caught += str(raised) == f"alarm {rang}"
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    print("all were caught" if caught == rang else f"{caught} of {rang} were caught")
    dist.barrier()


@harm
def is_interrupted_by_errors():
    _interrupted(TimeoutError)


@harm
def is_interrupted_by_exits():
    _interrupted(KeyboardInterrupt)


@harm
def is_interrupted_while_garbage_is_collected():
    """The handler runs in the collector's callbacks, which may not raise; what it raised arrives in what comes next.

    Not before the script's own hook for what may not be raised, which takes its time.
    """
    import rankscope

    begin()
    train()
    before = sys.unraisablehook

    def slowly(unraisable):
        before(unraisable)
        time.sleep(0.005)

    sys.unraisablehook = slowly
    heap = [[] for _ in range(200_000)]  # so that the alarm comes before it is collected

    def ring(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    caught = 0
    for _ in range(50):
        until = time.monotonic() + 5
        with contextlib.suppress(TimeoutError):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            gc.collect()
            while time.monotonic() < until:
                rankscope.step()
            break
        caught += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    print(f"{caught} were caught", len(heap))
    dist.barrier()


@harm
def communicates_in_a_signal_handler():
    begin()
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]

    def again(*_):
        reduce(torch.ones(2), group=alone)
        signal.setitimer(signal.ITIMER_REAL, 0.003)

    signal.signal(signal.SIGALRM, again)
    again()
    train()
    for _ in range(100):
        reduce(torch.ones(2))
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@harm
def blocks_and_ignores_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    begin()
    train()


# ---- torch


@harm
def communicates_in_threads():
    begin()
    groups = [dist.new_group() for _ in range(4)]

    def work(group):
        for _ in range(50):
            reduce(torch.ones(8), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train()


@harm
def makes_its_process_group_again_and_again():
    for number in range(3):  # by files: a port is still taken by the store before
        method = f"file:///tmp/harm-{os.environ['MASTER_PORT']}-{number}"
        dist.init_process_group("gloo", init_method=method, rank=_place, world_size=RANKS)
        train(2)
        dist.destroy_process_group()
    print("ended", flush=True)


@harm
def makes_many_groups():
    begin()
    groups = [dist.new_group(use_local_synchronization=True) for _ in range(120)]
    for group in groups:
        reduce(torch.ones(1), group=group)
    train()


@harm
def wraps_what_torch_has():
    begin()
    plain = dist.all_reduce

    def all_reduce(*args, **kwargs):
        return plain(*args, **kwargs)

    dist.all_reduce = dist.distributed_c10d.all_reduce = all_reduce
    dist.distributed_c10d._new_process_group_helper = None
    step = torch.optim.SGD.step

    def step_and_more(self, *args):
        return step(self, *args)

    torch.optim.SGD.step = step_and_more
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda *args, **kwargs: backward(*args, **kwargs)
    torch.nn.Module.__call__ = torch.nn.Module._wrapped_call_impl
    train()


@harm
def raises_in_hooks():
    begin()
    training = Training()

    def refuse(*_):
        raise ValueError("in a hook")

    for register in (training.model.register_forward_pre_hook, training.optimizer.register_step_pre_hook):
        handle = register(refuse)
        for number in range(2):
            try:
                training.step(number)
            except ValueError as error:
                print(error)
        handle.remove()
    for number in range(STEPS):
        print(training.step(number))


@harm
def reduces_sparse_and_empty_tensors():
    begin()
    sparse = torch.eye(3).to_sparse()
    reduce(sparse)
    print(sparse.to_dense().tolist())
    reduce(torch.ones(0))
    reduce(torch.ones(2, dtype=torch.complex64))
    train()


@harm
def counts_what_is_done_to_its_tensors():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    begin()
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", "?"))
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Functions(), Operators():
        train()
    print(sorted(Counter(seen).items()))


@harm
def profiles_with_torch():
    begin()
    with torch.profiler.profile() as profiler:
        train()
    print(sorted({event.key for event in profiler.key_averages() if "rankscope" in event.key}))


@harm
def sets_defaults_of_torch():
    begin()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(1)
    train(2)
    with torch.inference_mode():
        reduce(torch.ones(2))
    with torch.device("meta"):
        made = torch.ones(2)
    print(made.device)
    train(2)
