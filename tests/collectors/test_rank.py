"""What runs inside a training process: real scripts with one gloo rank, recorded by a real agent."""

import json
import socket

import polars as pl
import pytest

import rankscope
from rankscope.collectors.in_rank.ring_writer import Ring
from rankscope.collectors.in_rank.session import Emit
from rankscope.collectors.schema import OPS, REGION_KINDS
from support.one_rank import TORCH, names, record, run_script, table

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt torch")


def test_a_step_leaves_its_regions_and_collectives(tmp_path):
    """Two steps of DDP: two forwards, backwards and optimizer steps, three batches asked for, and a marked span."""
    done, run = record(
        tmp_path,
        """
        import rankscope
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in torch.utils.data.DataLoader(torch.ones(2, 4)):
            with rankscope.annotate("loss", microbatch=7, stage=1):
                loss = model(x).sum()
            loss.backward()
            optimizer.step()
            with rankscope.annotate("checkpoint"):
                pass
            rankscope.step()
        """,
    )
    assert done.returncode == 0, done.stderr
    regions = table(run, "regions")
    kinds = [REGION_KINDS[k] for k in regions["kind"]]
    assert {k: kinds.count(k) for k in ("forward", "backward", "optimizer", "input", "checkpoint")} == {
        "forward": 2,
        "backward": 2,
        "optimizer": 2,
        "input": 3,
        "checkpoint": 2,
    }
    named = {row["name_id"]: row for row in regions.iter_rows(named=True)}
    strings = names(run)
    loss = next(row for name_id, row in named.items() if strings[name_id] == "loss")
    assert (loss["microbatch"], loss["stage"]) == (7, 1)
    assert table(run, "steps").height == 2
    assert (regions["end_ns"] >= regions["start_ns"]).all()
    collectives = table(run, "collectives")
    assert [OPS[op] for op in collectives["op"]].count("allreduce") == 2  # one bucket a step
    assert collectives["seq"].to_list() == list(range(collectives.height))
    collectives = rankscope.open(run).table("collectives").collect()  # with ends that came after their rows
    assert collectives["end_ns"].null_count() == 0
    assert (collectives["end_ns"] >= collectives["start_ns"]).all()


def test_an_optimizer_that_runs_backward_in_its_step_begins_after_it(tmp_path):
    """A closure of 20 ms, given by position or by name, as Lightning does; the step gives back what the closure did."""
    done, run = record(
        tmp_path,
        """
        import time
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p], lr=0.1)

        def closure():
            time.sleep(0.02)
            loss = p.sum()
            loss.backward()
            return loss

        print(optimizer.step(closure).item(), round(optimizer.step(closure=closure).item(), 5))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "3.0 2.7\n"), done.stderr
    regions = table(run, "regions").with_columns(pl.col("kind").replace_strict(dict(enumerate(REGION_KINDS))))
    backward, optimizer = (regions.filter(kind=kind).sort("start_ns") for kind in ("backward", "optimizer"))
    assert (backward.height, optimizer.height) == (2, 2)
    assert (optimizer["start_ns"] >= backward["end_ns"]).all()
    assert (backward["start_ns"][1] - optimizer["end_ns"][0]) >= 20_000_000


@pytest.mark.long
def test_the_thread_that_trains_is_the_main_thread(tmp_path):
    """Ray Train trains in a thread; what another one does is not the step's."""
    done, run = record(
        tmp_path,
        """
        import threading, time
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                dist.all_reduce(torch.ones(1))
            time.sleep(2.5)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
    )
    assert done.returncode == 0, done.stderr
    trace = rankscope.open(run)
    regions, calls = trace.table("regions").collect(), trace.table("collectives").collect()
    assert regions.filter(kind="optimizer")["thread"].to_list() == [0] * 4
    assert calls.filter(op="allreduce", size_bytes=4)["thread"].to_list() == [0] * 4
    queued = trace.table("counters").collect().filter(name="main_thread_queued_s")
    assert queued["device"].unique().to_list() == ["rank0"]


def test_groups_after_one_that_this_rank_is_not_in_are_noted(tmp_path):
    """Every rank makes every row and column of a mesh, also those of others."""
    done, run = record(
        tmp_path,
        """
        import torch.distributed.distributed_c10d as c10d
        what = {"backend": "gloo", "store": c10d._get_default_store(), "timeout": c10d.default_pg_timeout}
        made, _ = c10d._new_process_group_helper(1, None, [5], group_name="another's", **what)
        assert made is dist.GroupMember.NON_GROUP_MEMBER
        dist.new_group([0], group_desc="mine")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "rankscope" not in done.stderr
    assert "mine" in table(run, "groups")["role"].to_list()


def test_groups_across_worlds_have_no_known_members(tmp_path):
    """As OpenRLHF and SGLang make them for weights, each side with numbers of the group's own."""
    done, run = record(
        tmp_path,
        """
        store = dist.PrefixStore("weights", dist.distributed_c10d._get_default_store())
        named = {"group_name": "weights", "timeout": dist.distributed_c10d.default_pg_timeout}
        group, _ = dist.distributed_c10d._new_process_group_helper(1, 0, [], "gloo", store, **named)
        dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0}
        dist.broadcast(torch.ones(2), 0, group=group)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        """,
    )
    assert done.returncode == 0, done.stderr
    groups = table(run, "groups")
    assert dict(groups.select("name", "members").rows())["weights"] == ""
    assert groups.filter(pl.col("name") != "weights")["members"].to_list() == ["0"] * 2
    report = rankscope.diagnose(rankscope.open(run))
    assert "1 of 1 collectives were not matched across ranks: group unknown" in [gap.why for gap in report.gaps]


def test_backend_and_device_are_those_that_torch_chose(tmp_path):
    """The script leaves both to torch, which takes gloo where there is no GPU."""
    done, run = record(
        tmp_path,
        """
        dist.destroy_process_group()
        dist.init_process_group()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert table(run, "ranks")["device"].to_list() == ["cpu"]
    assert table(run, "groups")["backend"].to_list() == ["gloo", "cpu:gloo"]


def test_every_kind_of_collective_is_seen_with_its_end(tmp_path, hook):
    """Python calls, object collectives, functional ones: one row each, sizes in bytes."""
    done, run = record(
        tmp_path,
        """
        from rankscope.collectors.in_rank import session
        print("Python" if session._session.emit.ring.native is None else "C++")
        import torch.distributed._functional_collectives as functional
        x = torch.ones(8)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.empty(8)], x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.reduce_scatter_tensor(torch.empty(8), x)
        dist.gather(x, [torch.empty(8)], dst=0)
        dist.scatter(x, [torch.ones(8)], src=0)
        dist.all_to_all_single(torch.empty(6), x[:6], [6], [6])
        dist.barrier()
        functional.all_reduce(x, "sum", dist.group.WORLD) + 1
        functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 1
        """,
    )
    assert (done.returncode, done.stdout) == (0, f"{hook}\n"), done.stderr
    rows = table(run, "collectives")
    assert [OPS[op] for op in rows["op"]] == [
        "allreduce",
        "allreduce",
        "broadcast",
        "reduce",
        "allgather",
        "allgather_base",
        "reduce_scatter_base",
        "gather",
        "scatter",
        "alltoall_base",
        "barrier",
        "allreduce",
        "reduce_scatter_tensor_coalesced",
    ]
    if rows["is_async"][0] is None:  # torch before 2.8 has it for few operations
        assert table(run, "gaps").filter(table="collectives")["why"].str.contains("is_async is null").all()
    else:
        assert rows["is_async"].to_list()[:2] == [False, True]
    assert rows["size_bytes"].to_list()[:10] == [32] * 9 + [24]
    assert rows["received_bytes"].to_list() == [None] * 9 + [24] + [None] * 3
    assert rows["peer"].unique().to_list() == [-1]
    ended = rankscope.open(run).table("collectives").collect()  # what ended after its row was written is joined to it
    assert ended["end_ns"].null_count() == 0


def test_what_accumulates_gradients_is_a_backward_pass_and_nothing_else(tmp_path):
    """`Tensor.backward`, `torch.autograd.backward`, and the engine called by itself as Megatron does: not `grad`."""
    done, run = record(
        tmp_path,
        """
        weight = torch.nn.Parameter(torch.ones(3))
        loss = lambda: (weight * 2).sum()
        loss().backward()
        torch.autograd.backward(loss())
        engine = torch.autograd.Variable._execution_engine
        asked = ((loss(),), (torch.ones(()),), False, False, ())
        engine.run_backward(*asked, allow_unreachable=True, accumulate_grad=True)
        engine.run_backward((loss(),), (torch.ones(()),), False, False, (), True, True)
        assert weight.grad.tolist() == [8.0] * 3
        (grad,) = torch.autograd.grad(loss(), weight)
        assert (grad.tolist(), weight.grad.tolist()) == ([2.0] * 3, [8.0] * 3)
        """,
    )
    assert done.returncode == 0, done.stderr
    kinds = [REGION_KINDS[kind] for kind in table(run, "regions")["kind"]]
    assert [kind for kind in kinds if kind != "gc"] == ["backward"] * 4


@pytest.mark.long
def test_torch_compile_and_torchscript_see_no_difference(tmp_path):
    """As many compiled graphs as without rankscope, no warning about our code, and record_function still scripts."""
    body = """
        import torch._dynamo
        model = torch.nn.Linear(8, 8)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())
        forward = torch.compile(ddp, backend="eager")
        update = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            forward(torch.ones(2, 8)).sum().backward()
            update()
        @torch.jit.script
        def scripted(x: torch.Tensor):
            with torch.autograd.profiler.record_function("inside"):
                return x + 1
        stats = torch._dynamo.utils.counters["stats"]
        print(stats["unique_graphs"], stats["calls_captured"], float(scripted(torch.ones(1))))
        """
    bare = run_script(tmp_path, body)
    done, run = record(tmp_path, body)
    assert bare.returncode == 0, bare.stderr
    assert done.stdout == bare.stdout
    assert "rankscope" not in done.stderr
    assert "perf_counter" not in done.stderr
    assert REGION_KINDS.index("compile") in table(run, "regions")["kind"]


@pytest.mark.skipif(TORCH.startswith(("2.5.", "2.6.")), reason="FSDP2 of torch 2.5 and 2.6 needs a GPU")
def test_fsdp_pays_for_none_of_its_spans(tmp_path):
    """torch.profiler sees them, as without rankscope; code of ours runs for those of the root module only."""
    done, run = record(
        tmp_path,
        """
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(torch.nn.Linear(8, 8))
        calls = 0
        def count(frame, event, _):
            global calls
            calls += event == "call" and frame.f_code.co_filename.endswith("rank/annotations.py")
        with torch.profiler.profile() as profile:
            sys.setprofile(count)
            model(torch.ones(2, 8)).sum().backward()
            sys.setprofile(None)
            with torch.profiler.record_function("mine"):
                pass
        spans = [event.name for event in profile.events() if event.name.startswith("FSDP::")]
        root = [name for name in spans if name.startswith("FSDP::root")]
        assert len(spans) - len(root) >= 5, spans
        assert calls <= 4 * len(root), (calls, root)  # the first time they look at the name, too
        """,
    )
    assert done.returncode == 0, done.stderr
    recorded = names(run)
    found = {recorded[name_id] for name_id in table(run, "regions")["name_id"]}
    assert [name for name in found if name == "mine" or "FSDP" in name] == ["mine"]


@pytest.mark.long
def test_the_jobs_random_numbers_are_its_own(tmp_path):
    done, run = record(
        tmp_path,
        """
        import random, time
        import numpy as np
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        time.sleep(2)
        drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        assert drawn == [random.random(), float(np.random.rand()), torch.rand(1).item()]
        """,
    )
    assert done.returncode == 0, done.stderr
    assert table(run, "samples").height > 3


@pytest.mark.long
def test_only_the_rank_itself_records(tmp_path, hook):
    """Spawned and forked workers, and subprocesses that import torch, leave no record and do not disturb it."""
    done, run = record(
        tmp_path,
        """
        import multiprocessing, subprocess
        def work(i):
            torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
            return i
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(work, [1, 2]) == [1, 2]
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=2)
            assert sum(1 for _ in loader) == 4
            torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
            print(sorted(m for m in ("pyarrow", "polars", "psutil", "typer") if m in sys.modules))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    state = json.loads((run / "run" / "node=00000.json").read_text())
    assert [(r["rank"], r["bye"]) for r in state["ranks"]] == [(0, True)]
    kinds = table(run, "regions")["kind"].to_list()
    assert kinds.count(REGION_KINDS.index("backward")) == 1


def test_a_collector_that_fails_costs_itself_only(tmp_path):
    """The optimizer collector breaks in its hook; the script ends well, the gap is named, the others go on."""
    done, run = record(
        tmp_path,
        """
        from rankscope.collectors.in_rank import session
        tick = session._session.emit.name
        def broken(text):
            if text.startswith("SGD"):
                raise KeyError("planted")
            return tick(text)
        session._session.emit.name = broken
        p = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([p], lr=0.1)
        for _ in range(3):
            p.sum().backward()
            optimizer.step()
        print("trained")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "collector 'optimizer' switched off: KeyError: 'planted'" in done.stderr
    gaps = table(run, "gaps")
    assert gaps.filter(pl.col("source") == "optimizer")["why"].to_list() == [
        "collector switched off: KeyError: 'planted'"
    ]
    kinds = table(run, "regions")["kind"].to_list()
    assert kinds.count(REGION_KINDS.index("backward")) == 3


def test_a_collector_fails_quietly_in_a_script_that_breaks_what_it_needs(tmp_path):
    """The exception has no text, the module json gives nonsense, and the agent still hears of it."""
    done, run = record(
        tmp_path,
        """
        import json
        from rankscope.collectors.in_rank import session
        class Silent(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        def broken(text):
            if text.startswith("SGD"):
                raise Silent
            return name(text)
        name = session._session.emit.name
        session._session.emit.name = broken
        json.dumps = json.loads = lambda *_, **__: b"nonsense"
        p = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([p], lr=0.1)
        for _ in range(3):
            p.sum().backward()
            optimizer.step()
        print("trained")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "Traceback" not in done.stderr
    gaps = table(run, "gaps")
    assert gaps.filter(pl.col("source") == "optimizer")["why"].to_list() == ["collector switched off: Silent"]
    kinds = table(run, "regions")["kind"].to_list()
    assert kinds.count(REGION_KINDS.index("backward")) == 3


def test_a_collectives_hook_that_fails_costs_itself_only(tmp_path, hook):
    """A group without a number: the collective ends as it would, the gap is named, nothing more is recorded."""
    done, run = record(
        tmp_path,
        """
        from rankscope.collectors.in_rank import session
        x = torch.ones(8)
        dist.all_reduce(x)
        session._session.emit.groups.clear()
        def broken(*_):
            raise KeyError("planted")
        session._session.emit.group = broken
        other = dist.new_group()
        for _ in range(3):
            dist.all_reduce(x, group=other)
        print(x.sum().item())
        """,
    )
    assert (done.returncode, done.stdout) == (0, "8.0\n"), done.stderr
    assert "'collectives' switched off" in done.stderr
    why = table(run, "gaps").filter(source="collectives")["why"]
    assert why.str.starts_with("collector switched off: ").any()
    assert table(run, "collectives").height == 1


def test_without_an_agent_the_script_runs_unrecorded(tmp_path):
    done = run_script(tmp_path, "print(dist.get_world_size())", RANKSCOPE_AGENT="without-a-listener")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "this rank is not recorded: ConnectionRefusedError" in done.stderr


def test_a_collector_can_be_left_off(tmp_path):
    done, run = record(tmp_path, "dist.barrier()", RANKSCOPE_DISABLE="collectives")
    assert done.returncode == 0, done.stderr
    assert not (run / "collectives").exists()
    assert "left off by RANKSCOPE_DISABLE" in table(run, "gaps")["why"].to_list()[0]
    assert "collectives: collector left off by RANKSCOPE_DISABLE" in [gap.why for gap in rankscope.open(run).gaps()]


def test_an_agent_that_does_not_read_never_blocks_the_rank():
    """4,000 messages of 1 kB do not fit into a socket without a reader; sending returns, and they are still owed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    emit = Emit(Ring(), ours)
    for i in range(4000):
        emit.gap("regions", "test", f"{i} " + "x" * 1000)
    assert emit.live
    received = 0
    theirs.setblocking(False)
    while True:
        try:
            theirs.recv(1 << 17)
            received += 1
        except BlockingIOError:
            emit.flush()
            try:
                theirs.recv(1 << 17)
                received += 1
            except BlockingIOError:
                break
    assert received == 4001  # and one for the name that stands for all names too many


def test_names_are_bounded():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    emit = Emit(Ring(), ours)
    ids = [emit.name(f"step {i}") for i in range(10_005)]
    assert ids[0] == 1
    assert ids[-1] == 0
    assert len(set(ids)) == 10_000
    theirs.close()
