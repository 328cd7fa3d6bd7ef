"""The contract: every table that a run holds, its columns, units and clocks, and the record that carries them.

Imported inside the training process, so it needs the standard library only: Arrow types are named by
their `pyarrow.type_for_alias` strings. The reference in `docs/tables.md` is generated from this file.

Times are int64 nanoseconds of the node's CLOCK_MONOTONIC (`time.perf_counter_ns`) unless the column says
otherwise. Strings are a `name_id` that points into the `strings` table of the same partition.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "ALL_TO_ALL_OPS",
    "COUNTS_STEPS",
    "DEVICE_MARKS",
    "DEVICE_WORK",
    "DTYPES",
    "INSTALLED",
    "NCCL_ALGORITHMS",
    "NCCL_EVENTS",
    "NCCL_PROTOCOLS",
    "NO_PEER",
    "OPS",
    "P2P_OPS",
    "RECORD",
    "RECORD_FIELDS",
    "REGION_KINDS",
    "RING_SLOTS",
    "SCHEMA_VERSION",
    "STILL_NS",
    "STILL_STEPS",
    "TABLES",
    "WINDOW_STEP",
    "Column",
    "RecordType",
    "Table",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `type` is an Arrow type alias, `unit` is empty for counts, codes and identifiers."""

    name: str
    type: str
    unit: str
    doc: str
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table: a file per `partition` ("rank" or "node"), rows in the order of `order`."""

    name: str
    doc: str
    partition: str
    order: str
    columns: tuple[Column, ...]


# Codes are positions in these tuples: append, never reorder.
REGION_KINDS = (
    "user",  # rankscope.annotate and record_function names that fit no kind below
    "forward",
    "backward",
    "optimizer",
    "input",
    "gc",
    "compile",
    "wait",  # the thread is blocked on communication
    "checkpoint",
    "sync",
    "operator",  # a long operator in a profiler's trace: read from such traces, not recorded
)
WINDOW_STEP = "rankscope step #"  # and its number: what a deep window calls the span of a step
# Steps are counted, and excluded, by these kinds: they stay when a long recording is reduced.
COUNTS_STEPS = ("optimizer", "backward", "compile", "checkpoint")

OPS = (
    "unknown",
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_any_source",
    "gather_into_tensor",
)
DEVICE_WORK = (
    "compute",
    "communication",
    "memory",
)
P2P_OPS = ("send", "recv", "recv_any_source")
INSTALLED = ("/site-packages/", "/dist-packages/")  # in the path of code that is a package's, not the job's
LEFT_OFF = "collector left off by RANKSCOPE_DISABLE"  # the why of such a gap
ALL_TO_ALL_OPS = ("alltoall", "alltoall_base")

DTYPES = (
    "unknown",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)

# NCCL's own words, as its profiler plugin gets them.
NCCL_ALGORITHMS = (
    "unknown",
    "tree",
    "ring",
    "collnet_direct",
    "collnet_chain",
    "nvls",
    "nvls_tree",
    "pat",
    "copy_engine",
)
NCCL_PROTOCOLS = ("unknown", "ll", "ll128", "simple")
DEVICE_MARKS = (
    *("backward_start", "backward_end", "optimizer_start", "optimizer_end", "step_end"),
    *("forward_start", "forward_end"),  # of a pipeline's microbatches
    *("wait_start", "wait_end"),  # the compute stream's wait for communication
    *("waits_seen", "waits_missed"),  # without an event: all waits since the last of these have marks, or some do not
)
NCCL_EVENTS = (
    "send",  # all that a proxy sent to one peer on one channel for one call
    "recv",
    "send_step",  # one network transfer of it
    "recv_step",
    "kernel",  # one channel's part of the kernel
    "network",  # an event of the network plugin
)

MOST_RANKS = 1 << 20  # a rank, or a number of ranks, above this is damage
NO_PEER = -1
# A job hangs when no rank has begun anything for so long, and for so many of its usual steps.
STILL_NS, STILL_STEPS = 10_000_000_000, 5

_START = Column("start_ns", "int64", "ns", "Start, on the node's monotonic clock.")
_END = Column("end_ns", "int64", "ns", "End, on the node's monotonic clock.")
_NAME = Column("name_id", "uint32", "", "Name, in this partition's `strings`.")
_THREAD = Column(
    "thread", "uint16", "", "0 is the rank's main thread: that of its first backward. Others in order of appearance."
)

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        Table(
            "ranks",
            "One rank of one attempt (torchrun counts a restart as a new attempt).",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "When the rank joined: its first process group."),
                Column("local_rank", "int32", "", "LOCAL_RANK."),
                Column("world_size", "int32", "", "WORLD_SIZE."),
                Column("node", "int32", "", "Index of the node (torchrun's GROUP_RANK)."),
                Column("hostname", "string", "", "Name of the host."),
                Column("pid", "int64", "", "Process id."),
                Column("device", "string", "", "`cpu`, or the accelerator's name, once it is used (before, `cuda`)."),
                Column("torch", "string", "", "Version of torch."),
                Column("python", "string", "", "Version of Python."),
                Column("command", "string", "", "The process's argv."),
            ),
        ),
        Table(
            "exits",
            "How one rank's process ended, as the node's agent saw it; a rank that still ran has no row.",
            "rank",
            "end_ns",
            (
                Column("end_ns", "int64", "ns", "When the agent saw that the process had ended."),
                Column("exit_code", "int32", "", "Its exit code; null: a signal ended it, or not seen.", nullable=True),
                Column("signal", "int32", "", "The signal that ended it; null: none, or not seen.", nullable=True),
                Column(
                    "bye_ns",
                    "int64",
                    "ns",
                    "When the agent saw that the interpreter had come to its end; null: killed or crashed.",
                    nullable=True,
                ),
                Column(
                    "oom_kills",
                    "int64",
                    "",
                    "Processes of its control group (else of the host) that the kernel's OOM killer killed since it "
                    "joined; null: not readable.",
                    nullable=True,
                ),
                Column("raised_ns", "int64", "ns", "When an exception ended the main thread.", nullable=True),
                Column("error", "string", "", "That exception: type and first line.", nullable=True),
                Column("place", "string", "", "The line of the job's own code that it came from.", nullable=True),
            ),
        ),
        Table(
            "groups",
            "One process group as one rank sees it.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "When the group was made."),
                Column("group_id", "int64", "", "Hash of name, ranks and use count: equal on all its ranks."),
                Column("name", "string", "", "torch's name of the group."),
                Column("backend", "string", "", "gloo, nccl, …"),
                Column("role", "string", "", "The group's description, when it has one (`mesh_dp`, …)."),
                Column("members", "string", "", "Global ranks as ranges: `0-3,8`; empty: of several worlds."),
            ),
        ),
        Table(
            "steps",
            "One step that the script announced with `rankscope.step()`, or a profiler's own. Where there is none, "
            "the analysis infers steps from the regions: the optimizer's, or those named as steps are.",
            "rank",
            "end_ns",
            (
                Column("end_ns", "int64", "ns", "When the step ended."),
                _THREAD,
                Column(
                    "start_ns",
                    "int64",
                    "ns",
                    "When it began; null: when the one before ended. Only a profiler's steps have it.",
                    nullable=True,
                ),
            ),
        ),
        Table(
            "regions",
            "A span of one host thread.",
            "rank",
            "start_ns",
            (
                _START,
                _END,
                Column("kind", "uint8", "", "Position in REGION_KINDS."),
                _NAME,
                _THREAD,
                Column("microbatch", "int32", "", "Microbatch, where known.", nullable=True),
                Column("stage", "int32", "", "Pipeline stage, where known.", nullable=True),
            ),
        ),
        Table(
            "collectives",
            "One collective or point-to-point operation on one rank.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "Enqueue: the rank entered the call (its arrival)."),
                Column("issued_ns", "int64", "ns", "The call returned to the caller."),
                Column(
                    "end_ns",
                    "int64",
                    "ns",
                    "Completion on this rank; null: see `completions`, else not seen.",
                    nullable=True,
                ),
                Column(
                    "device_start_ns",
                    "int64",
                    "ns",
                    "When it began on the device, which then is its arrival; null: not seen.",
                    nullable=True,
                ),
                Column("group_id", "int64", "", "The process group, in `groups`."),
                Column(
                    "seq",
                    "uint32",
                    "",
                    "Ordinal within the group; for point-to-point within (group, sender, receiver, tag).",
                ),
                Column("op", "uint8", "", "Position in OPS."),
                Column("dtype", "uint8", "", "Position in DTYPES."),
                Column("is_async", "bool", "", "The caller asked for asynchronous execution.", nullable=True),
                Column("peer", "int32", "", "Global rank of the peer; -1 for collectives and any source."),
                Column("tag", "int32", "", "Tag of a point-to-point operation, else 0."),
                Column(
                    "size_bytes",
                    "int64",
                    "bytes",
                    "Largest of the operation's tensor arguments; null: unknown.",
                    nullable=True,
                ),
                Column(
                    "received_bytes",
                    "int64",
                    "bytes",
                    "What an all-to-all gives this rank, its own share included; null: not one, or unknown.",
                    nullable=True,
                ),
                Column("thread", "uint16", "", "0 is the rank's main thread, 65535 another one."),
                Column("number", "uint64", "", "Number of the row's record, unique in a rank's attempt."),
            ),
        ),
        Table(
            "completions",
            "The end of a collective that ended after its row had been written (with a null `end_ns`). Readers "
            "join it to `collectives` by rank, attempt and `number`.",
            "rank",
            "end_ns",
            (
                Column("end_ns", "int64", "ns", "Completion on this rank."),
                Column("number", "uint64", "", "`number` of the row in `collectives`."),
            ),
        ),
        Table(
            "nccl_calls",
            "One operation as NCCL began it: a collective, a send or a receive. From NCCL's profiler plugin, where it "
            "is built.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "When NCCL enqueued it."),
                Column("call", "uint32", "", "Its number, unique in a rank's attempt."),
                Column("communicator", "int64", "", "NCCL's hash, equal on all ranks; null: unknown.", nullable=True),
                Column("nccl_rank", "int32", "", "This rank's place in the communicator."),
                Column("nccl_size", "int32", "", "Ranks in the communicator; null: unknown.", nullable=True),
                Column(
                    "seq",
                    "uint32",
                    "",
                    "Ordinal among the communicator's calls of this kind, as NCCL counts; null: point-to-point.",
                    nullable=True,
                ),
                Column("op", "uint8", "", "Position in OPS."),
                Column(
                    "size_bytes",
                    "int64",
                    "bytes",
                    "Count times the data type's size, as the caller gave them to NCCL; null: type unknown.",
                    nullable=True,
                ),
                Column("peer", "int32", "", "Peer of a send or receive, else the root, by place in the communicator."),
                Column("channels", "uint8", "", "Channels that share the work; 0: unknown."),
                Column("algorithm", "uint8", "", "Position in NCCL_ALGORITHMS."),
                Column("protocol", "uint8", "", "Position in NCCL_PROTOCOLS."),
            ),
        ),
        Table(
            "nccl_events",
            "What NCCL's proxy, kernels and network plugin did for a call. A proxy's waits add up to its duration: "
            "of several transfers under way, the oldest counts.",
            "rank",
            "start_ns",
            (
                _START,
                _END,
                Column("event", "uint8", "", "Position in NCCL_EVENTS."),
                Column("call", "uint32", "", "`call` in `nccl_calls`; null: another process's (PXN).", nullable=True),
                Column("channel", "uint8", "", "NCCL's channel; 0 for `network`."),
                Column("peer", "int32", "", "Place of the peer in the communicator; null: none.", nullable=True),
                Column("step", "int32", "", "Proxy: how many transfers; one transfer: its number.", nullable=True),
                Column("size_bytes", "int64", "bytes", "What the transfers carried; null: unknown.", nullable=True),
                Column(
                    "gpu_wait_ns",
                    "int64",
                    "ns",
                    "Waited for the GPU: for data to send, or to take what had come. Before NCCL 2.27 a send's wait "
                    "for its peer is in here too.",
                    nullable=True,
                ),
                Column(
                    "peer_wait_ns",
                    "int64",
                    "ns",
                    "Send: data were ready, the peer had not said where to put them; null: unknown.",
                    nullable=True,
                ),
                Column(
                    "network_wait_ns",
                    "int64",
                    "ns",
                    "Send: handed to the network, not yet reported as sent. Receive: nothing had come, be it that the "
                    "peer was late or the network slow.",
                    nullable=True,
                ),
                Column("flush_wait_ns", "int64", "ns", "Receive: had come, not yet visible to the GPU.", nullable=True),
                Column("device_ns", "int64", "ns", "Kernel: its time on the device's own clock.", nullable=True),
            ),
        ),
        Table(
            "flight_records",
            "One operation in torch's Flight Recorder, where the job uses NCCL; the agent asks the rank's server.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "Enqueue; the host's unix time, converted when it was asked for."),
                Column("record", "uint64", "", "Its number in the recorder."),
                Column("group", "string", "", "torch's name of the group."),
                Column("seq", "int64", "", "torch's own count in the group; those begun together share one."),
                Column("is_p2p", "bool", "", "A send or a receive, counted apart from the collectives."),
                Column("name", "string", "", "`nccl:all_reduce`, …"),
                Column(
                    "duration_ns",
                    "int64",
                    "ns",
                    "How long it took on the device, with waiting for peers; null: not timed, or not ended.",
                    nullable=True,
                ),
            ),
        ),
        Table(
            "device_marks",
            "A CUDA event that the rank put into its main thread's current stream where a phase begins or ends. What "
            "lies between two marks is the device's time for that phase; what lies between the host's and the device's "
            "time of one mark is how far the host was ahead: the depth of the launch queue. Two stand around each wait "
            "of that stream for communication.",
            "rank",
            "recorded_ns",
            (
                Column("recorded_ns", "int64", "ns", "When the host enqueued it."),
                Column(
                    "device_ns",
                    "int64",
                    "ns",
                    "When the device reached it, on the node's monotonic clock; null: not seen.",
                    nullable=True,
                ),
                Column(
                    "clock_error_ns",
                    "int64",
                    "ns",
                    "Error of the conversion from the device's clock; null: unknown.",
                    nullable=True,
                ),
                Column("mark", "uint8", "", "Position in DEVICE_MARKS."),
                Column("device", "int32", "", "Index of the device."),
            ),
        ),
        Table(
            "kernels",
            "One span of device work. Of a recorded run only its profiled windows have any.",
            "rank",
            "start_ns",
            (
                _START,
                _END,
                _NAME,
                Column("work", "uint8", "", "Position in DEVICE_WORK."),
                Column("device", "int32", "", "Index of the device.", nullable=True),
                Column("stream", "int32", "", "Stream of the device.", nullable=True),
                Column("correlation", "int64", "", "Joins the row to `launches`.", nullable=True),
                Column(
                    "bytes",
                    "int64",
                    "bytes",
                    "Size of a copy or fill of memory; null: neither of them, or unknown.",
                    nullable=True,
                ),
                Column(
                    "clock_error_ns",
                    "int64",
                    "ns",
                    "Error of the conversion from the device's clock; null: unknown.",
                    nullable=True,
                ),
            ),
        ),
        Table(
            "launches",
            "The host call that launched device work. Of a recorded run only its profiled windows have any.",
            "rank",
            "start_ns",
            (_START, _END, _NAME, _THREAD, Column("correlation", "int64", "", "Joins the row to `kernels`.")),
        ),
        Table(
            "operators",
            "A matrix product or attention, with the FLOPs given by the shapes of its inputs. Read from traces with "
            "shapes, not recorded.",
            "rank",
            "start_ns",
            (
                _START,
                _END,
                _NAME,
                _THREAD,
                Column("flops", "int64", "FLOPs", "Null: the shapes are not those that it takes.", nullable=True),
            ),
        ),
        Table(
            "ops",
            "One operation of a pipeline-parallel step, from a trace of operations only. Written by readers of such "
            "traces, not by collectors: of a recorded run the analysis makes it from regions and collectives.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "Start, on a clock that all ranks share."),
                Column("end_ns", "int64", "ns", "End, on the same clock."),
                Column("name_id", "uint32", "", "`forward-compute`, `backward-compute`, `forward-send`, …"),
                Column("step", "int32", "", "Number of the step in the source."),
                Column("stage", "int32", "", "Pipeline stage, from 0."),
                Column("replica", "int32", "", "Data-parallel replica of the pipeline, from 0."),
                Column("chunk", "int32", "", "Model chunk of the stage, where it has several.", nullable=True),
                Column("microbatch", "int32", "", "Microbatch, where known.", nullable=True),
                Column("seq", "int32", "", "Ordinal among the rank's operations of this name in the step."),
            ),
        ),
        Table(
            "progress",
            "Progress of one rank in one process group when its state was saved, and the first operation there that "
            "had not ended. Written by readers of such states, not by collectors.",
            "rank",
            "group_id",
            (
                Column("group_id", "int64", "", "The process group, in `groups`."),
                Column("enqueued", "int64", "", "Number of the last operation that the rank enqueued.", nullable=True),
                Column("started", "int64", "", "Number of the last that its device began.", nullable=True),
                Column("completed", "int64", "", "Number of the last operation that ended on it.", nullable=True),
                Column("is_p2p", "bool", "", "Both numbers count point-to-point operations."),
                Column("seq", "int64", "", "Number of the first that had not ended; null: none.", nullable=True),
                Column("op", "uint8", "", "What it is: position in OPS.", nullable=True),
                Column("start_ns", "int64", "ns", "When it was enqueued, on the source's clock.", nullable=True),
                Column("is_started", "bool", "", "The device has begun it; null: unknown.", nullable=True),
                Column("peer", "int32", "", "Global rank of its peer; -1: none or unknown.", nullable=True),
                Column("dtype", "uint8", "", "Position in DTYPES.", nullable=True),
                Column("size_bytes", "int64", "bytes", "Largest of its tensors.", nullable=True),
                Column("frame_id", "uint32", "", "The line that called it.", nullable=True),
                Column(
                    "quiet_ns",
                    "int64",
                    "ns",
                    "How long before the state was saved the rank last began or ended an operation, by the file's "
                    "date; null: unknown.",
                    nullable=True,
                ),
            ),
        ),
        Table(
            "memory",
            "One reading of a rank's memory, at most once a second, at the end of a step.",
            "rank",
            "time_ns",
            (
                Column("time_ns", "int64", "ns", "When it was read."),
                Column("name_id", "uint32", "", "`rss`, `cuda_allocated`, `cuda_reserved`, `cuda_alloc_retries`, …"),
                Column("value", "int64", "bytes or count", "The reading."),
            ),
        ),
        Table(
            "samples",
            "What the rank's main thread did at one moment, a few times a second.",
            "rank",
            "time_ns",
            (
                Column("time_ns", "int64", "ns", "When it was seen."),
                Column("frame", "uint32", "", "The innermost call, in this rank's `frames`; 0: no code but torch's."),
            ),
        ),
        Table(
            "frames",
            "One call in a chain of calls: a place in the code, reached by the calls above it. Without those of torch, "
            "of Python's library and of rankscope.",
            "rank",
            "frame",
            (
                Column("frame", "uint32", "", "Its number, unique in a rank's attempt."),
                Column("parent", "uint32", "", "The call above it; 0: none."),
                Column("function", "string", "", "Name of the function."),
                Column("file", "string", "", "Its file."),
                Column("line", "int32", "", "The line in it that runs, or that called what is below."),
            ),
        ),
        Table(
            "windows",
            "One profiled window on one rank: torch.profiler was on for some steps. Its trace is in the run's folder "
            "`window-0001`, a run folder of its own on the same clock. Steps that it touched are not analyzed.",
            "rank",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "The profiler began to be prepared, in the step before the first."),
                Column("end_ns", "int64", "ns", "It had stopped, and the training continued."),
                Column("start_stall_ns", "int64", "ns", "How long preparing and starting it held the training thread."),
                Column("stop_stall_ns", "int64", "ns", "How long stopping it did."),
                Column("window", "int32", "", "Number of the window in the run, from 1."),
                Column("first_step", "int32", "", "First step in it, as the rank counts them from 0."),
                Column("steps", "int32", "", "How many steps it holds."),
                Column("reason", "string", "", "Why it was opened."),
            ),
        ),
        Table(
            "counters",
            "One reading of a counter or gauge of the node.",
            "node",
            "time_ns",
            (
                Column("time_ns", "int64", "ns", "When it was read."),
                Column("source_id", "uint32", "", "The collector that read it, in `strings`."),
                Column("name_id", "uint32", "", "Name with its unit, in `strings`."),
                Column("device_id", "uint32", "", "Device, port, socket pair or process, in `strings`."),
                Column("value", "float64", "by name", "Counters are cumulative, gauges are momentary."),
            ),
        ),
        Table(
            "ras",
            "What NCCL's RAS said when the job hung: one row for each rank of a communicator and operation, and "
            "for each process that did not answer. The newest answer as it came is `run/ras.txt`.",
            "node",
            "time_ns",
            (
                Column("time_ns", "int64", "ns", "When it had answered."),
                Column("communicator", "string", "", "NCCL's hash of the communicator; empty: a process in general."),
                Column("size", "int32", "", "How many ranks the communicator has.", nullable=True),
                Column("comm_rank", "int32", "", "Rank in it; null: the ranks not listed one by one.", nullable=True),
                Column("pid", "int64", "", "Its process.", nullable=True),
                Column("host", "string", "", "Address of the process's node; empty: unknown."),
                Column("operation", "string", "", "NCCL's word for it; `collective`: all kinds together; empty: none."),
                Column("launched", "int64", "", "How many of them it has launched.", nullable=True),
                Column(
                    "state",
                    "string",
                    "",
                    "`running`, `initialising`, `ending`, `aborted`, `error`; of those that said nothing "
                    "`unresponsive`, `dead` (given up by RAS), `not a member` (of the communicator any more).",
                ),
            ),
        ),
        Table(
            "clocks",
            "One exchange that relates two clocks.",
            "node",
            "t1_ns",
            (
                Column("peer", "int32", "", "Node that answered; -1: t2 = t3 is this node's unix time."),
                Column("t1_ns", "int64", "ns", "Request sent, this node's monotonic clock."),
                Column("t2_ns", "int64", "ns", "Request received, the peer's clock."),
                Column("t3_ns", "int64", "ns", "Answer sent, the peer's clock."),
                Column("t4_ns", "int64", "ns", "Answer received, this node's monotonic clock."),
            ),
        ),
        Table(
            "gaps",
            "The evidence ledger: what was not seen.",
            "rank or node",
            "start_ns",
            (
                Column("start_ns", "int64", "ns", "From when; null: from the start.", nullable=True),
                Column("end_ns", "int64", "ns", "Until when; null: to the end.", nullable=True),
                Column("table", "string", "", "Table that lacks rows."),
                Column("source", "string", "", "Collector that says so."),
                Column("count", "int64", "", "Rows missing; null where it cannot be known.", nullable=True),
                Column("why", "string", "", "One sentence, with what to do where that is known."),
            ),
        ),
        Table(
            "strings",
            "The names behind the `*_id` columns of the same partition.",
            "rank or node",
            "name_id",
            (Column("name_id", "uint32", "", "The id."), Column("name", "string", "", "The name.")),
        ),
    )
}


class RecordType:
    """First byte of a ring record: which table the agent turns it into."""

    REGION = 1
    COLLECTIVE = 2
    DONE = 3
    STEP = 4
    MEMORY = 5
    MARK = 6
    SAMPLE = 7
    PROGRESS = 8
    NCCL_CALL = 16
    NCCL_PROXY = 17
    NCCL_STEP = 18
    NCCL_SPAN = 19


# One ring slot. The sequence number stands at both ends, so a torn write is recognised.
#   number, type, a, b, c, q0 … q4, number
# REGION      a kind · c name_id · q0 start · q1 end · q2 thread ident · q3 microbatch (-1 none) · q4 stage (-1 none)
# COLLECTIVE  a op · b dtype | is_async << 8 (0 no, 1 yes, 2 unknown) · c seq · q0 start · q1 issued · q2 group_id
#             · q3 size_bytes · q4 (peer + 1) << 32 | (tag & 0xffff) << 16 | is_main
#             of an all-to-all, which has neither: q4 received_bytes << 16 | is_main
# DONE        q0 end · q1 number of the COLLECTIVE record
# STEP        q0 end · q1 thread ident
# MEMORY      c name_id · q0 time · q1 value
# MARK        a mark · c device · q0 recorded · q1 device time (0 not seen) · q2 clock error (-1 not known)
# SAMPLE      c frame · q0 time
# PROGRESS    c steps that have ended · q0 time · q1 usual length of a step (0 not known); goes into no table
# NCCL's profiler plugin (native/nccl_plugin.c) writes these, to a ring of its own:
# NCCL_CALL   a op · b channels | algorithm << 8 | protocol << 12 · c call · q0 start · q1 communicator (0 not known)
#             · q2 rank << 32 | size (0 not known) · q3 size_bytes (-1 not known) · q4 seq << 32 | peer + 1
# NCCL_PROXY  a is_send | peer wait known << 1 · b channel · c call (0 not known) · q0 start · q1 gpu wait << 24 | peer
#             · q2 (send: peer wait, receive: flush wait) << 24 | steps · q3 network wait << 24 · q4 size_bytes (-1 …)
# NCCL_STEP   as NCCL_PROXY, with the step's number for the count of steps
# NCCL_SPAN   a kind · b channel · c call · q0 start · q1 end · q2 device_ns (-1 not known)
RECORD = struct.Struct("<QBBHIqqqqqQ")
RECORD_FIELDS = ("number", "type", "a", "b", "c", "q0", "q1", "q2", "q3", "q4", "check")
RING_SLOTS = 1 << 16
assert RECORD.size == 64
