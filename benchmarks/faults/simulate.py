"""Training jobs that never ran: what every rank's main thread and every link would have done, in virtual time.

An event-driven scheduler. Ranks that run the same program together (all of a data-parallel job, one stage of a
pipeline) are a `team`; a team's program is a generator that gives way at every communication, and the team that is
furthest behind goes on. Inside a team ranks are the elements of numpy arrays, each with a clock of its own.

What a rank does takes its processor; what a collective moves takes the slowest link that it uses, after the last rank
has come and the group's earlier transfers are done. `Resources` say how fast these are, step by step. **Faults change
resources and nothing else**: the scheduler decides which ranks wait, and what that costs. Random numbers are
drawn in the same order with a fault as without, so the difference of two runs with one seed is what the fault costs.

Nothing here is shared with `rankscope.analysis`. Times are float ns of true time; `record.py` gives every node its own
clock. `inf` is "never": a rank that hangs is at `inf`, and so are those that wait for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = [
    "GPUS",
    "PARALLELS",
    "Job",
    "Recording",
    "Resources",
    "cut",
    "healthy_resources",
    "run",
    "stages_of",
    "step_ns",
    "steps_ns",
]

GPUS = 8  # ranks of a node
PARALLELS = (
    *("ddp", "ddp-gpu", "fsdp", "tp", "pp-1f1b", "pp-gpipe", "3d", "moe"),
    *("ddp-nccl", "ddp-rccl", "pp-nccl", "3d-nccl"),
)

_US, _MS = 1e3, 1e6
_ALPHA_NODE, _ALPHA_NET = 8 * _US, 40 * _US  # latency of one hop
_BUS = 6e9  # bytes/s between the ranks of a node
_CALL = 70 * _US  # what a call of torch.distributed takes
_WAKE = 30 * _US  # until a thread that was blocked runs again
_JITTER = 0.012  # of one stretch of work
_PREEMPTED, _PREEMPTED_NS = 0.002, 4 * _MS  # share of the stretches, and for how long
_HICCUP, _HICCUP_NS = 0.002, 3 * _MS  # of a transfer
_RTT = 90 * _US
_PYTHON, _DRIVER = 10 * _US, 5 * _US  # of host time for one kernel: around the launch, and in it
_QUEUE = 8  # kernels that may wait for a device, as many to these few as a thousand are to a model's
_LATENCY = 4 * _US  # from the launch until a device that is idle begins
_KERNELS = {"forward": 24, "backward": 48, "optimizer": 8}  # of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and on what. Work is that of one rank and step at full speed."""

    parallel: str
    ranks: int
    steps: int = 40
    seed: int = 0
    compute_ns: float = 120 * _MS  # forward a third, backward two thirds
    optimizer_ns: float = 4 * _MS
    layers: int = 4
    buckets: int = 4
    microbatches: int = 6
    gradient_bytes: float = 12e6
    activation_bytes: float = 0.25e6
    nic_bytes_per_s: float = 2.5e9
    loader_workers: bool = True  # else the loader loads when it is asked
    overlap: bool = True  # gradients are reduced while backward runs
    # What is no fault.
    common_lengths: float = 0.0  # all ranks' sequences are longer and shorter together, by this share
    numa: float = 0.0  # the second half of a node's ranks is slower by this share
    slowness: float = 1.0  # of all ranks alike
    checkpoint_every: int = 0
    lost: float = 0.0  # share of the records that are lost, in stretches
    warmup_steps: int = 2

    @property
    def nodes(self) -> int:
        return -(-self.ranks // GPUS)


@dataclass(slots=True)
class Resources:
    """How fast everything is, step by step."""

    slowness: np.ndarray  # [step, rank]: of the processor; 1 is full speed
    tokens: np.ndarray  # [step, rank]: how much work the data makes; 1 is the mean
    expert_tokens: np.ndarray  # [step, rank]: what the router sends to the rank's experts
    load_ns: np.ndarray  # [step, rank]: for one batch
    nic: np.ndarray  # [step, node]: bytes/s, both ways
    gc_ns: np.ndarray  # [step, rank]: a full collection in this step
    compile_ns: np.ndarray  # [step, rank]
    stage_work: np.ndarray  # [step, stage]: 1 is the mean
    launch_ns: np.ndarray  # [step, rank]: of the host, around the launch of one kernel
    hang: tuple[int, int] | None = None  # rank and step
    overlap: bool = True


@dataclass(slots=True)
class Recording:
    """What rankscope's collectors would have seen: columns of each table, in true time, and the length of each step."""

    job: Job
    regions: list[dict] = field(default_factory=list)
    collectives: list[dict] = field(default_factory=list)
    kernels: list[dict] = field(default_factory=list)  # with the host's call that launched each
    marks: list[dict] = field(default_factory=list)  # CUDA events at the ends of phases
    groups: list[tuple[int, str, str, np.ndarray]] = field(default_factory=list)  # id, name, role, members
    traffic: list[tuple] = field(default_factory=list)  # end, rank, node, peer node, bytes, busy s, rtt s
    optimizer_end: np.ndarray = field(default_factory=lambda: np.empty(0))  # [step, rank]
    start: np.ndarray = field(default_factory=lambda: np.empty(0))  # [rank]
    busy_ns: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # by kind of work, [step, rank]: what kernels would show


def stages_of(job: Job) -> int:
    return 4 if job.parallel in ("pp-1f1b", "pp-gpipe", "pp-nccl", "3d", "3d-nccl") else 1


def tensor_parallel(job: Job) -> int:
    """Ranks that share a layer."""
    split = 4 if job.ranks >= 64 else 2
    return {"tp": GPUS, "3d": split, "3d-nccl": split}.get(job.parallel, 1)


def healthy_resources(job: Job) -> Resources:
    """Machines and data as they are without a fault: alike, but not equal."""
    rng = np.random.default_rng([job.seed, 1])
    shape = (job.steps, job.ranks)
    slowness = np.broadcast_to(1 + 0.004 * rng.standard_normal(job.ranks), shape) * job.slowness
    slowness = slowness * (1 + job.numa * (np.arange(job.ranks) % GPUS >= GPUS // 2))
    slowness[: job.warmup_steps] *= 1 + 1.5 * rng.random((min(job.warmup_steps, job.steps), 1))  # caches, allocator
    tokens = 1 + 0.006 * rng.standard_normal(shape)
    tokens *= 1 + job.common_lengths * (2 * rng.random((job.steps, 1)) - 1)
    compile_ns = np.zeros(shape)
    compile_ns[0] = rng.uniform(0.4, 0.8, job.ranks) * 1e9
    # Now and then one rank collects, however many ranks there are.
    gc_ns = np.where(rng.random(shape) < 0.2 / job.ranks, rng.lognormal(np.log(1.5 * _MS), 0.3, shape), 0.0)

    def always(values: np.ndarray) -> np.ndarray:
        return np.tile(values, (job.steps, 1))

    return Resources(
        slowness=slowness,
        tokens=tokens,
        expert_tokens=1 + 0.02 * rng.standard_normal(shape),
        load_ns=np.full(shape, 0.3 * job.compute_ns if job.loader_workers else 0.8 * _MS),
        nic=always(job.nic_bytes_per_s * (1 + 0.01 * rng.standard_normal(job.nodes))),
        gc_ns=gc_ns,
        compile_ns=compile_ns,
        stage_work=always(1 + 0.01 * rng.standard_normal(stages_of(job))),
        launch_ns=always(_PYTHON * (1 + 0.03 * rng.standard_normal(job.ranks))),
        overlap=job.overlap,
    )


class _Communicator:
    """The groups of one kind that a team's ranks are in: `members` is [group, rank of the group]."""

    def __init__(self, scheduler: _Scheduler, team: np.ndarray, members: np.ndarray, name: str) -> None:
        self.members = members
        self.place = np.searchsorted(team, members)  # in the team's arrays
        self.seq = 0
        self.free = np.zeros(len(members))  # one transfer after the other
        node = members // GPUS
        self.nodes = [np.unique(n) for n in node]
        self.across = np.array([len(n) for n in self.nodes])
        self.per_node = members.shape[1] / self.across
        # Groups of one kind are busy at the same time: they share the links of the nodes that they meet on.
        users = np.bincount(np.concatenate([n for n in self.nodes if len(n) > 1] or [np.zeros(0, int)]))
        self.share = np.array([max(users[n]) if len(n) > 1 else 1 for n in self.nodes])
        self.leader = [
            np.array([g[np.argmax(m == k)] for k in ks]) for g, m, ks in zip(members, node, self.nodes, strict=True)
        ]
        self.first = np.concatenate([[0], np.cumsum(self.across)[:-1]])
        self.all_nodes = np.concatenate(self.nodes)
        self.id = np.array([scheduler.new_group(f"{name}{i}", name, g) for i, g in enumerate(members)])
        self.id_of = np.zeros(len(team), np.int64)
        self.id_of[self.place] = self.id[:, None]


@dataclass(slots=True)
class _Pending:
    """A transfer under way: when it ends for each rank of the team."""

    end: np.ndarray


class _Team:
    """Ranks that run one program. All methods take what they do from the ranks' clocks `now`."""

    def __init__(self, scheduler: _Scheduler, ranks: np.ndarray, stage: int) -> None:
        self.of, self.ranks, self.stage = scheduler, ranks, stage
        self.job, self.can, self.log = scheduler.job, scheduler.can, scheduler.log
        self.rng = np.random.default_rng([self.job.seed, 2, stage])
        self.now = np.array(scheduler.start[ranks])
        self.step = 0
        self.node = ranks // GPUS
        self.ready = np.array(self.now)  # the loader's next batch
        self.taken = [np.array(self.now), np.array(self.now)]
        self.compiled = 0  # how often

    def spend(self, ns: np.ndarray | float) -> None:
        self.now = self.now + ns

    def around(self, ns: float) -> None:
        """What Python takes around everything else; never twice the same."""
        self.spend(ns * np.exp(0.3 * self.rng.standard_normal(len(self.ranks))))

    def work(self, ns: float, *, data: bool = True, tokens: np.ndarray | None = None) -> None:
        """The ranks compute for `ns` at full speed, and are sometimes preempted."""
        size = len(self.ranks)
        scatter = np.exp(_JITTER * self.rng.standard_normal(size))
        away = np.where(self.rng.random(size) < _PREEMPTED, self.rng.exponential(_PREEMPTED_NS, size), 0.0)
        amount = self.can.tokens[self.step, self.ranks] if data else 1.0
        if tokens is not None:
            amount = tokens[self.step, self.ranks]
        lasts = ns * amount * self.can.slowness[self.step, self.ranks] * scatter + away
        self.log.busy_ns["compute" if data else "optimizer"][self.step, self.ranks] += lasts
        self.spend(lasts)

    def region(self, kind: str, name: str, start: np.ndarray, microbatch: int = -1) -> None:
        stage = self.stage if microbatch >= 0 else -1
        self.log.regions.append(
            {"rank": self.ranks, "start_ns": start, "end_ns": self.now, "kind": kind, "name": name}
            | {"microbatch": microbatch, "stage": stage}
        )

    def load(self) -> None:
        """The next batch: at once where workers have it ready, one batch ahead of the one that is used."""
        start = self.now
        load = self.can.load_ns[self.step, self.ranks] * np.exp(0.05 * self.rng.standard_normal(len(self.ranks)))
        if self.job.loader_workers:
            self.ready = np.maximum(self.ready, self.taken.pop(0)) + load
            self.now = np.maximum(self.now, self.ready)
            self.taken.append(self.now)
        else:
            self.spend(load)
        self.around(0.3 * _MS)
        self.log.busy_ns["input"][self.step, self.ranks] += np.where(np.isfinite(start), self.now - start, 0.0)
        self.region("input", "DataLoader", start)

    def stops(self) -> None:
        """What stops the main thread at the beginning of forward: compilation, garbage collection; or for ever."""
        for ns, kind, name in (
            (self.can.compile_ns, "compile", f"compile [0/{self.compiled}]"),  # of one function, again and again
            (self.can.gc_ns, "gc", "gc generation 2"),
        ):
            here = ns[self.step, self.ranks]
            if here.any():
                self.compiled += kind == "compile"
                start = self.now
                self.spend(here)
                row = here >= _MS  # shorter collections are not recorded
                self.log.regions.append(
                    {"rank": self.ranks[row], "start_ns": start[row], "end_ns": self.now[row], "kind": kind}
                    | {"name": name, "microbatch": -1, "stage": -1}
                )
        if self.can.hang is not None and self.can.hang[1] == self.step:
            self.now = np.where(self.ranks == self.can.hang[0], np.inf, self.now)

    def collective(
        self,
        comm: _Communicator,
        op: str,
        size: float,
        *,
        asynchronous: bool = True,
        ready: np.ndarray | None = None,
        received: np.ndarray | float = np.nan,
    ) -> _Pending:
        """All ranks of each group enter `op` with `size` bytes, a device when it is `ready`; no rank is blocked yet.

        `received` is what an all-to-all gives to each rank.
        """
        call = self.now
        self.around(_CALL)
        groups = len(comm.members)
        rounds = 2.0 if op == "allreduce" else 1.0
        crossing = comm.per_node if op == "alltoall_base" else 1.0  # every rank sends to all ranks elsewhere
        nic = self.can.nic[self.step]
        node = nic[comm.all_nodes]
        slowest = np.minimum.reduceat(node, comm.first) / comm.share
        inside = rounds * (comm.per_node - 1) * (_ALPHA_NODE + size / comm.per_node / _BUS * 1e9)
        sent = np.where(comm.across > 1, rounds * (comm.across - 1) / comm.across * crossing * size, 0.0)
        latency = rounds * (comm.across - 1) * _ALPHA_NET
        scatter = np.exp(0.04 * self.rng.standard_normal(groups))
        late = np.where(self.rng.random(groups) < _HICCUP, self.rng.exponential(_HICCUP_NS, groups), 0.0)
        lasts = (inside + latency + sent / slowest * 1e9) * scatter + late
        arrival = call if ready is None else np.maximum(ready, self.now)
        begin = np.maximum(arrival[comm.place].max(axis=1), comm.free)
        begin = np.where(comm.across > 1, np.maximum(begin, self.of.link_free(comm)), begin)
        comm.free = begin + lasts
        self.of.occupy(comm, nic, comm.free, sent, latency, op == "alltoall_base")
        wake = _WAKE * np.exp(0.6 * self.rng.standard_normal(comm.members.shape))
        end = np.empty(len(self.ranks))
        end[comm.place] = comm.free[:, None] + wake
        self.log.collectives.append(
            {"rank": self.ranks, "start_ns": call, "issued_ns": self.now, "end_ns": end, "group_id": comm.id_of}
            | {"seq": comm.seq, "op": op, "is_async": asynchronous, "peer": -1, "size_bytes": int(size)}
            | {"device_start_ns": np.full(len(call), np.inf) if ready is None else arrival, "received_bytes": received}
        )
        comm.seq += 1
        return _Pending(end)

    def wait(self, pending: _Pending, name: str = "Work.wait") -> None:
        """The main thread is blocked until the transfer has ended."""
        start = self.now
        self.now = np.maximum(self.now + 3 * _US, pending.end + 20 * _US)
        self.region("wait", name, start)

    def join(self, *pending: _Pending) -> None:
        """The same inside of torch, where no region shows it."""
        for one in pending:
            self.now = np.maximum(self.now, one.end + 20 * _US)

    def end_step(self) -> None:
        if self.job.checkpoint_every and self.step % self.job.checkpoint_every == self.job.checkpoint_every - 1:
            start = self.now
            self.spend(0.3 * self.job.compute_ns * np.exp(0.1 * self.rng.standard_normal(len(self.ranks))))
            self.region("checkpoint", "checkpoint", start)
        self.around(0.15 * _MS)

    def optimize(self) -> None:
        start = self.now
        self.around(0.1 * _MS)
        self.work(self.job.optimizer_ns, data=False)
        self.region("optimizer", "AdamW#0", start)
        self.log.optimizer_end[self.step, self.ranks] = self.now


class _Scheduler:
    """Teams, links, and messages between teams."""

    def __init__(self, job: Job, can: Resources) -> None:
        self.job, self.can = job, can
        self.log = Recording(job)
        rng = np.random.default_rng([job.seed, 3])
        self.start = 1e9 + rng.uniform(0, 5 * _MS, job.ranks)
        self.log.start = self.start
        self.log.optimizer_end = np.full((job.steps, job.ranks), np.inf)
        self.log.busy_ns = {kind: np.zeros((job.steps, job.ranks)) for kind in ("compute", "optimizer", "input")}
        self.pipeline_ids = np.empty(0, np.int64)
        self.ended: set[int] = set()  # stages whose program is over
        self.busy_until = np.zeros(job.nodes)
        self.messages: dict[tuple, list] = defaultdict(list)
        self.p2p_seq: dict[tuple, int] = defaultdict(int)
        self.rtt = np.random.default_rng([job.seed, 4])

    def new_group(self, name: str, role: str, members: np.ndarray) -> int:
        group_id = 1_000_003 * (len(self.log.groups) + 1)
        self.log.groups.append((group_id, name, role, members))
        return group_id

    def link_free(self, comm: _Communicator) -> np.ndarray:
        return np.maximum.reduceat(self.busy_until[comm.all_nodes], comm.first)

    def occupy(
        self,
        comm: _Communicator,
        nic: np.ndarray,
        until: np.ndarray,
        sent: np.ndarray,
        latency: np.ndarray,
        to_all: bool,
    ) -> None:
        """The links of the groups' nodes are busy until then; what they sent is counted per direction."""
        for group in np.flatnonzero(np.isfinite(until) & (comm.across > 1)):
            nodes = comm.nodes[group]
            self.busy_until[nodes] = np.maximum(self.busy_until[nodes], until[group])
            hops = [np.roll(nodes, -k) for k in (range(1, len(nodes)) if to_all else (1,))]
            for peers in hops:
                rate = np.minimum(nic[nodes], nic[peers]) / comm.share[group]
                size = sent[group] / len(hops)
                busy_s = size / rate + latency[group] / 1e9 / len(hops)
                # On a slow link the data stands in the sender's queue.
                queue = np.minimum(size, 128e3) / rate * 1e9
                rtt = (_RTT * np.exp(0.2 * self.rtt.standard_normal(len(nodes))) + queue) / 1e9
                self.log.traffic.append((until[group], comm.leader[group], nodes, peers, size, busy_s, rtt))

    def send(self, team: _Team, to: _Team, tag: int, size: float) -> None:
        """Asynchronous: the transfer begins when the receiver is there too, and the receiver writes down its end."""
        call = team.now
        team.around(_CALL)
        row = {"rank": team.ranks, "start_ns": call, "issued_ns": team.now, "end_ns": np.full(len(call), np.inf)}
        row |= {"group_id": self.pipeline_ids, "op": "send", "is_async": True}
        row |= {"peer": to.ranks, "size_bytes": int(size), "seq": self._next(team, to), "device_start_ns": np.inf}
        row |= {"received_bytes": np.nan}
        self.log.collectives.append(row)
        self.messages[(team.stage, to.stage, tag)].append((call, row, size))

    def receive(self, team: _Team, sender: _Team, tag: int) -> Iterator[float]:
        """Gives way until the other team has sent, then blocks the ranks until the data is there."""
        key = (sender.stage, team.stage, tag)
        while not self.messages[key] and sender.stage not in self.ended:
            yield np.inf
        if self.messages[key]:
            sent, row, size = self.messages[key].pop(0)
        else:  # it will never come
            sent, size = np.full(len(team.now), np.inf), 0.0
            seq = self._next(sender, team)
            row = {"group_id": self.pipeline_ids, "seq": seq}
        call = team.now
        team.around(_CALL)
        remote = team.node != sender.node
        pairs = np.bincount(sender.node[remote], minlength=self.job.nodes)[sender.node]  # share the sender's link
        nic = self.can.nic[team.step]
        rate = np.where(remote, np.minimum(nic[team.node], nic[sender.node]) / np.maximum(pairs, 1), _BUS)
        alpha = np.where(remote, _ALPHA_NET, _ALPHA_NODE)
        scatter = np.exp(0.04 * team.rng.standard_normal(len(call)))
        end = np.maximum(call, sent) + (alpha + size / rate * 1e9) * scatter
        wake = _WAKE * np.exp(0.6 * team.rng.standard_normal((2, len(call))))
        row["end_ns"] = end + wake[0]
        for i in np.flatnonzero(remote & np.isfinite(end)):
            busy_s, rtt = size / rate[i] + alpha[i] / 1e9, (_RTT + min(size, 128e3) / rate[i] * 1e9) / 1e9
            at = (sender.ranks[[i]], sender.node[[i]], team.node[[i]])
            self.log.traffic.append((end[i], *at, size, np.array([busy_s]), np.array([rtt])))
        self.log.collectives.append(
            {"rank": team.ranks, "start_ns": call, "issued_ns": team.now, "end_ns": end + wake[1]}
            | {"group_id": row["group_id"], "seq": row["seq"], "op": "recv", "is_async": True}
            | {"peer": sender.ranks, "size_bytes": int(size), "device_start_ns": np.inf, "received_bytes": np.nan}
        )
        team.wait(_Pending(end + wake[1]))

    def _next(self, team: _Team, to: _Team) -> int:
        key = (team.stage, to.stage)
        self.p2p_seq[key] += 1
        return self.p2p_seq[key] - 1


def run(job: Job, can: Resources) -> Recording:
    """The job from its start to its last step, or until no rank gets any further."""
    scheduler = _Scheduler(job, can)
    stages = stages_of(job)
    per_stage = job.ranks // stages
    teams = [_Team(scheduler, np.arange(s * per_stage, (s + 1) * per_stage), s) for s in range(stages)]
    if stages > 1:
        chains = np.arange(job.ranks).reshape(stages, per_stage).T
        scheduler.pipeline_ids = np.array([scheduler.new_group(f"pp{i}", "pp", c) for i, c in enumerate(chains)])
    programs = [_PROGRAMS[job.parallel](scheduler, team, teams) for team in teams]
    parked: list[int] = []
    queue = [(0.0, i) for i in range(stages)]
    while queue:
        _, i = heapq.heappop(queue)
        at = next(programs[i], None)
        if at is None:
            scheduler.ended.add(i)
            at = 0.0
        elif at != np.inf:
            heapq.heappush(queue, (at, i))
        if at == np.inf:  # it needs a message: another rank must go on first
            parked.append(i)
            continue
        for other in parked:
            heapq.heappush(queue, (at, other))
        parked = []
    return scheduler.log


def steps_ns(log: Recording) -> np.ndarray:
    """How long each step takes, by the slowest rank's optimizer."""
    return np.diff(log.optimizer_end.max(axis=1), prepend=log.start.max())


def step_ns(log: Recording) -> float:
    """Their mean after the job's warm-up."""
    return float(steps_ns(log)[log.job.warmup_steps :].mean())


def cut(log: Recording, steps: int) -> Recording:
    """What the recording held when the last rank had ended that many steps."""
    until = float(log.optimizer_end[steps - 1].max())

    def begun(rows: list[dict]) -> list[dict]:
        kept = []
        for row in rows:
            seen = np.broadcast_to(row["start_ns"] <= until, len(row["rank"]))
            columns = {
                n: np.broadcast_to(v, len(seen))[seen] if isinstance(v, np.ndarray) else v for n, v in row.items()
            }
            kept.append(columns | {"end_ns": np.where(columns["end_ns"] <= until, columns["end_ns"], np.inf)})
        return kept

    return replace(
        log,
        job=replace(log.job, steps=steps),
        regions=begun(log.regions),
        collectives=begun(log.collectives),
        kernels=begun(log.kernels),
        marks=[m for m in log.marks if m["recorded_ns"].max() <= until],
        traffic=[t for t in log.traffic if t[0] <= until],
        optimizer_end=log.optimizer_end[:steps],
    )


def _first(team: _Team) -> float:
    """Where in time a team is: its first rank that still moves."""
    finite = team.now[np.isfinite(team.now)]
    return float(finite.min()) if len(finite) else np.finfo(float).max


def _world(scheduler: _Scheduler, team: _Team, size: int | None = None, name: str = "default_pg") -> _Communicator:
    members = team.ranks.reshape(-1, size or len(team.ranks))
    return _Communicator(scheduler, team.ranks, members, name)


def _steps(team: _Team) -> Iterator[int]:
    for step in range(team.job.steps):
        if not np.isfinite(team.now).any():
            return
        team.step = step
        yield step


def _ddp(scheduler: _Scheduler, team: _Team, _: list[_Team]) -> Iterator[float]:
    job, world = scheduler.job, _world(scheduler, team)
    for _ in _steps(team):
        team.load()
        start = team.now
        team.stops()
        team.work(job.compute_ns / 3)
        team.region("forward", "forward", start)
        start = team.now
        yield from _backward_with_buckets(scheduler, team, world, job.compute_ns * 2 / 3)
        team.region("backward", "backward", start)
        team.optimize()
        team.end_step()


def _ddp_gpu(scheduler: _Scheduler, team: _Team, _: list[_Team]) -> Iterator[float]:
    """The host only launches, at most `_QUEUE` kernels ahead; the device computes, and reduces on a second stream."""
    job, world = scheduler.job, _world(scheduler, team)
    device = _Device(team)
    shares = {"forward": job.compute_ns / 3, "backward": job.compute_ns * 2 / 3, "optimizer": job.optimizer_ns}
    for _ in _steps(team):
        team.load()
        for kind, ns in shares.items():
            start = team.now
            if kind == "forward":
                team.stops()
            else:
                device.mark(f"{kind}_start")
            pieces = job.buckets if kind == "backward" else 1
            for _ in range(pieces):
                device.compute(kind, ns / pieces, _KERNELS[kind] // pieces)
                if kind == "backward" and scheduler.can.overlap:
                    device.reduce(world, job.gradient_bytes / pieces)
                    yield _first(team)
            if kind == "backward":
                if not scheduler.can.overlap:
                    device.reduce(world, job.gradient_bytes)
                    yield _first(team)
                device.join()
            if kind != "forward":
                device.mark(f"{kind}_end")
            if kind != "optimizer":
                team.region(kind, kind, start)
        team.region("optimizer", "AdamW#0", start)
        team.log.optimizer_end[team.step, team.ranks] = team.now
        team.end_step()


class _Device:
    """The devices of a team's ranks: one stream that computes, one that reduces."""

    def __init__(self, team: _Team) -> None:
        self.team = team
        self.free = np.array(team.now)
        self.reduced = np.array(team.now)
        self.queued = deque([self.free] * _QUEUE)

    def compute(self, kind: str, ns: float, count: int) -> None:
        """`count` kernels are launched, which at full speed take `ns` together. Some are long, most are short."""
        team = self.team
        size = (count, len(team.ranks))
        weights = np.exp(team.rng.standard_normal((count, 1)))
        amount = team.can.tokens[team.step, team.ranks] if kind != "optimizer" else 1.0
        lasts = ns * weights / weights.sum() * amount * team.can.slowness[team.step, team.ranks]
        lasts = lasts * np.exp(_JITTER * team.rng.standard_normal(size))
        calls = team.can.launch_ns[team.step, team.ranks] * np.exp(0.2 * team.rng.standard_normal(size))
        away = np.where(team.rng.random(len(team.ranks)) < _PREEMPTED, team.rng.exponential(_PREEMPTED_NS), 0.0)
        team.log.busy_ns["compute" if kind != "optimizer" else kind][team.step, team.ranks] += lasts.sum(axis=0)
        team.spend(away)
        for one, call in zip(lasts, calls, strict=True):
            team.spend(call)  # Python, the dispatcher; then the call of the driver
            launch = team.now
            team.now = np.maximum(launch, self.queued.popleft()) + _DRIVER
            start = np.maximum(team.now + _LATENCY, self.free + 1 * _US)
            self.free = start + one
            self.queued.append(start)
            self._row(launch, team.now, start, self.free, f"{kind}_kernel", "compute", 7)

    def reduce(self, comm: _Communicator, size: float) -> None:
        """An all-reduce of what has been computed so far."""
        team = self.team
        call = team.now
        start = np.maximum(np.maximum(self.free, self.reduced), call + _CALL + _LATENCY)
        self.reduced = team.collective(comm, "allreduce", size, ready=start).end
        arrival = team.log.collectives[-1]["device_start_ns"]
        self._row(call, team.now, arrival, self.reduced, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", 20)

    def join(self) -> None:
        self.free = np.maximum(self.free, self.reduced)

    def send(self, scheduler: _Scheduler, to: _Team, tag: int, size: float) -> None:
        """What has been computed goes to the other team's devices; the next computation does not wait for it."""
        team, host = self.team, self.team.now
        team.now = np.maximum(self.free, host + _CALL)
        scheduler.send(team, to, tag, size)
        self._called(host)

    def receive(self, scheduler: _Scheduler, sender: _Team, tag: int) -> Iterator[float]:
        """The devices wait for the data, the hosts do not."""
        team, host = self.team, self.team.now
        team.now = np.maximum(self.free, host + _CALL)
        yield from scheduler.receive(team, sender, tag)
        self.free = team.now
        team.log.regions.pop()  # the main threads' wait
        self._called(host)

    def _called(self, host: np.ndarray) -> None:
        """The hosts go on after the call of the last operation, which the devices came to when the log says."""
        row = self.team.log.collectives[-1]
        row["device_start_ns"], row["start_ns"], row["issued_ns"] = row["start_ns"], host, host + _CALL
        self.team.now = host + _CALL

    def mark(self, name: str) -> None:
        now, ranks = self.team.now, self.team.ranks
        row = {"rank": ranks, "recorded_ns": now, "device_ns": np.maximum(self.free, now + _LATENCY), "mark": name}
        self.team.log.marks.append(row)

    def _row(
        self,
        call: np.ndarray,
        called: np.ndarray,
        start: np.ndarray,
        end: np.ndarray,
        name: str,
        work: str,
        stream: int,
    ) -> None:
        row = {"rank": self.team.ranks, "call_ns": call, "called_ns": called, "start_ns": start, "end_ns": end}
        self.team.log.kernels.append(row | {"name": name, "work": work, "stream": stream})


def _backward_with_buckets(
    scheduler: _Scheduler, team: _Team, comm: _Communicator, ns: float, size: float | None = None
) -> Iterator[float]:
    """Each bucket is reduced as soon as its part of backward is done; or all at the end."""
    job = scheduler.job
    size = job.gradient_bytes if size is None else size
    pending = []
    for _ in range(job.buckets):
        team.work(ns / job.buckets)
        if scheduler.can.overlap:
            pending.append(team.collective(comm, "allreduce", size / job.buckets))
            yield _first(team)
    if not scheduler.can.overlap:
        pending.append(team.collective(comm, "allreduce", size))
        yield _first(team)
    team.join(*pending)


def _fsdp(scheduler: _Scheduler, team: _Team, _: list[_Team]) -> Iterator[float]:
    """Parameters are gathered one layer ahead; gradients are scattered while the next layer runs backward."""
    job, world = scheduler.job, _world(scheduler, team)
    size, layer_ns = job.gradient_bytes / job.layers, job.compute_ns / 3 / job.layers
    for _ in _steps(team):
        team.load()
        start = team.now
        team.stops()
        ahead = team.collective(world, "allgather_base", size)
        yield _first(team)
        for layer in range(job.layers):
            team.wait(ahead)
            if layer + 1 < job.layers:
                ahead = team.collective(world, "allgather_base", size)
                yield _first(team)
            team.work(layer_ns)
        team.region("forward", "forward", start)
        start = team.now
        ahead = team.collective(world, "allgather_base", size)
        scattered = None
        for layer in range(job.layers):
            team.wait(ahead)
            if layer + 1 < job.layers:
                ahead = team.collective(world, "allgather_base", size)
            team.work(2 * layer_ns)
            if scattered is not None:
                team.wait(scattered)
            scattered = team.collective(world, "reduce_scatter_base", size)
            yield _first(team)
        team.wait(scattered)
        team.region("backward", "backward", start)
        team.optimize()
        team.end_step()


def _tp(scheduler: _Scheduler, team: _Team, _: list[_Team]) -> Iterator[float]:
    """Layers are split within the node, gradients are reduced over nodes, each layer's while the next runs backward."""
    job = scheduler.job
    inside = _world(scheduler, team, min(GPUS, job.ranks), "tp")
    replicas = team.ranks.reshape(-1, min(GPUS, job.ranks)).T
    data = _Communicator(scheduler, team.ranks, replicas, "dp") if replicas.shape[1] > 1 else None
    for _ in _steps(team):
        team.load()
        start = team.now
        team.stops()
        for _ in range(job.layers):
            yield from _split_layer(team, inside, job.compute_ns / 3 / job.layers)
        team.region("forward", "forward", start)
        start = team.now
        pending = []
        for _ in range(job.layers):
            yield from _split_layer(team, inside, job.compute_ns * 2 / 3 / job.layers)
            if data is not None:
                pending.append(team.collective(data, "allreduce", job.gradient_bytes / GPUS / job.layers))
                yield _first(team)
        team.join(*pending)
        team.region("backward", "backward", start)
        team.optimize()
        team.end_step()


def _split_layer(team: _Team, comm: _Communicator, ns: float) -> Iterator[float]:
    team.work(ns)
    team.wait(team.collective(comm, "allreduce", team.job.activation_bytes, asynchronous=False), "wait_tensor")
    yield _first(team)


def _moe(scheduler: _Scheduler, team: _Team, _: list[_Team]) -> Iterator[float]:
    """Experts are spread over a node's ranks: tokens go there and back by all-to-all, in both directions."""
    job = scheduler.job
    experts = _world(scheduler, team, min(GPUS, job.ranks), "ep")
    world = _world(scheduler, team)
    for _ in _steps(team):
        team.load()
        start = team.now
        team.stops()
        for _ in range(job.layers):
            yield from _expert_layer(scheduler, team, experts, job.compute_ns / 3 / job.layers)
        team.region("forward", "forward", start)
        start = team.now
        pending = []
        for _ in range(job.layers):
            yield from _expert_layer(scheduler, team, experts, job.compute_ns * 2 / 3 / job.layers)
            pending.append(team.collective(world, "allreduce", job.gradient_bytes / job.layers))
            yield _first(team)
        team.join(*pending)
        team.region("backward", "backward", start)
        team.optimize()
        team.end_step()


def _expert_layer(scheduler: _Scheduler, team: _Team, comm: _Communicator, ns: float) -> Iterator[float]:
    """Tokens go to the experts' ranks, and back: there all ranks get as many as they had."""
    size = 2 * team.job.activation_bytes
    team.work(ns / 2)
    to_experts = np.rint(size * scheduler.can.expert_tokens[team.step, team.ranks])
    team.wait(team.collective(comm, "alltoall_base", size, asynchronous=False, received=to_experts))
    yield _first(team)
    team.work(ns / 2, tokens=scheduler.can.expert_tokens)
    team.wait(team.collective(comm, "alltoall_base", size, asynchronous=False, received=size))
    yield _first(team)


def _pipeline(scheduler: _Scheduler, team: _Team, teams: list[_Team]) -> Iterator[float]:
    """GPipe or 1F1B over the stages; in "3d" each stage's layers are split too. Then gradients over the replicas."""
    job, stage, last = scheduler.job, team.stage, len(teams) - 1
    split = tensor_parallel(job)
    inside = _world(scheduler, team, split, "tp") if split > 1 else None
    replicas = team.ranks.reshape(-1, split).T
    data = _Communicator(scheduler, team.ranks, np.ascontiguousarray(replicas), "dp") if replicas.shape[1] > 1 else None

    def compute(kind: str, microbatch: int, share: float) -> Iterator[float]:
        ns = job.compute_ns / job.microbatches * scheduler.can.stage_work[team.step, stage]
        start = team.now
        if microbatch == 0 and kind == "forward":
            team.stops()
        if inside is None:
            team.work(ns * share)
        else:
            for _ in range(2):
                yield from _split_layer(team, inside, ns * share / 2)
        team.region(kind, f"PP:{stage}{kind[0].upper()}{microbatch}", start, microbatch)

    def act(kind: str, microbatch: int) -> Iterator[float]:
        source, target = (stage - 1, stage + 1) if kind == "forward" else (stage + 1, stage - 1)
        if 0 <= source <= last:
            yield from scheduler.receive(team, teams[source], microbatch)
        yield from compute(kind, microbatch, 1 / 3 if kind == "forward" else 2 / 3)
        if 0 <= target <= last:
            scheduler.send(team, teams[target], microbatch, job.activation_bytes)
        yield _first(team)

    for _ in _steps(team):
        if stage in (0, last):  # inputs and labels
            team.load()
        for kind, microbatch in _schedule(job.parallel, stage, len(teams), job.microbatches):
            yield from act(kind, microbatch)
        if data is not None:
            team.wait(team.collective(data, "allreduce", job.gradient_bytes / split))
            yield _first(team)
        team.optimize()
        team.end_step()


def _pipeline_gpu(scheduler: _Scheduler, team: _Team, teams: list[_Team]) -> Iterator[float]:
    """1F1B on devices, as `_ddp_gpu` has them; gradients are reduced over the replicas after the last backward.

    In "3d-nccl" each stage's layers are split too: devices wait for each other in the middle and at the end of each.
    """
    job, stage, last = scheduler.job, team.stage, len(teams) - 1
    split = tensor_parallel(job)
    inside = _world(scheduler, team, split, "tp") if split > 1 else None
    replicas = np.ascontiguousarray(team.ranks.reshape(-1, split).T)
    data = _Communicator(scheduler, team.ranks, replicas, "dp")
    device = _Device(team)
    for _ in _steps(team):
        ns = job.compute_ns / job.microbatches * scheduler.can.stage_work[team.step, stage]
        if stage in (0, last):
            team.load()
        for kind, microbatch in _schedule(job.parallel, stage, len(teams), job.microbatches):
            source, target = (stage - 1, stage + 1) if kind == "forward" else (stage + 1, stage - 1)
            if 0 <= source <= last:
                yield from device.receive(scheduler, teams[source], microbatch)
            start = team.now
            device.mark(f"{kind}_start")
            if microbatch == 0 and kind == "forward":
                team.stops()
            for _ in range(2):
                device.compute(kind, ns * (1 / 3 if kind == "forward" else 2 / 3) / 2, 3)
                if inside is not None:
                    device.reduce(inside, job.activation_bytes)
                    device.join()
                    yield _first(team)
            device.mark(f"{kind}_end")
            team.region(kind, kind, start, microbatch)
            if 0 <= target <= last:
                device.send(scheduler, teams[target], microbatch, job.activation_bytes)
            yield _first(team)
        device.reduce(data, job.gradient_bytes / split)
        yield _first(team)
        device.join()
        start = team.now
        device.mark("optimizer_start")
        device.compute("optimizer", job.optimizer_ns, 4)
        device.mark("optimizer_end")
        team.region("optimizer", "AdamW#0", start)
        team.log.optimizer_end[team.step, team.ranks] = team.now
        team.end_step()


def _schedule(parallel: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    ahead = microbatches if parallel == "pp-gpipe" else min(stages - stage - 1, microbatches)
    order = [("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            order.append(("forward", ahead + i))
        order.append(("backward", i))
    return order


_PROGRAMS = {
    "ddp": _ddp,
    "ddp-gpu": _ddp_gpu,
    "ddp-nccl": _ddp_gpu,  # the same, recorded without a profiler
    "ddp-rccl": _ddp_gpu,  # and without events of the devices
    "fsdp": _fsdp,
    "tp": _tp,
    "moe": _moe,
    "pp-1f1b": _pipeline,
    "pp-nccl": _pipeline_gpu,  # recorded without a profiler
    "3d-nccl": _pipeline_gpu,
    "pp-gpipe": _pipeline,
    "3d": _pipeline,
}
