"""Classifies device work as compute, communication or memory, by kernels' names, which only this module knows.

Communication is what a communication library runs on the device, whatever the profiler calls its row: NCCL (the old
`ncclKernel_AllReduce_RING_LL_Sum_float` and the new `ncclDevKernel_AllReduce_Sum_f32_RING_LL`), RCCL (which may name
nothing but `ncclDevKernel_Generic`), NVSHMEM and DeepEP (`deep_ep::…`, `…::ep::…`), MSCCL, MORI, torch's symmetric
memory, Transformer Engine's userbuffers, the all-reduces of inference engines. Memory is copies and fills. What only
marks or waits, such as `gpu_user_annotation`, `cuda_sync` or `overhead`, is no work of the device.

Source: names in traces of NCCL 2.4 to 2.27 and RCCL 2.22, and in the sources of NCCL 2.28; torch's
`c10d/nccl2/ProcessGroupNCCL.cpp` (2.15) and `symm_mem/CUDASymmetricMemoryOps.cu`; those of the libraries named above;
Kineto's activity types (`libkineto/src/ActivityType.cpp`).
"""

from __future__ import annotations

import re

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "COPIES_TO_HOST",
    "DEVICE_CATEGORIES",
    "HOST_COPIES",
    "LAUNCHING_CALLS",
    "MEMORY",
    "MEMORY_CALLS",
    "OPS_BY_NAME",
    "SEND_RECV",
    "WAITING_CALLS",
    "device_work",
    "kernel_op",
    "op_said",
    "updates_weights",
]

COMPUTE, COMMUNICATION, MEMORY = "compute", "communication", "memory"
SEND_RECV = "SendRecv"  # in the name of the kernel that runs sends and receives, so all-to-alls as well

# Categories of the profiler's rows that are work of the device, old names and new.
_KERNELS = ("kernel", "Kernel")
_COPIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
DEVICE_CATEGORIES = _KERNELS + _COPIES

# Calls of the host, as patterns: those that return when the device has caught up, and those that ask for memory.
# Nsight Systems writes `cudaStreamSynchronize_v3020`.
WAITING_CALLS = (
    r"^(((cuda|hip)(Stream|Device|Event|Ctx|Thread)|cu(Stream|Event|Ctx))Synchronize|(cuda|hip)Memcpy(WithStream)?)"
    r"(_ptsz|_ptds|_spt)?(_v\d+)?$"
)
# Those that a row of the device always follows.
LAUNCHING_CALLS = r"^((cuda|hip)(Ext)?(Module)?Launch(Cooperative)?Kernel|cuLaunchKernel|(cuda|hip)MemcpyAsync)"
COPIES_TO_HOST = r"DtoH|DeviceToHost"  # as profilers name them
HOST_COPIES = rf"{COPIES_TO_HOST}|HtoD|HostToDevice"
MEMORY_CALLS = r"^(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost|HostRegister)|^cuMem(Create|Map|Unmap|SetAccess)"

_COMMUNICATION = re.compile(
    r"nccl|rccl|(nv|roc)shmem|msccl|\bdeep_ep\b|(\b|_)ep::|\bmori::|userbuffers|multimem_\w*(reduce|gather)"
    r"|(one|two)_shot_(all_)?reduce|cross_device_reduce|all_?reduce_fusion",
    re.IGNORECASE,
)
# Kernels of optimizers: those of torch (for many tensors, or for one), of apex and of bitsandbytes. Copies, fills and
# norms of many tensors run elsewhere too, and embeddings are updated in the backward pass.
_UPDATES = re.compile(r"multi_tensor_apply|addcdiv|adam|adagrad|rmsprop|lamb(?!da)|sgd", re.IGNORECASE)
_NO_UPDATES = re.compile(r"copy|zero|norm|embedding|grad_clip", re.IGNORECASE)
_BLIT = re.compile(r"^__amd_rocclr_(copy|fill)")  # AMD's copies and fills that run as kernels
_NCCL_OP = re.compile(r"nccl(?:Symk?)?(?:Dev)?(?:Kernel)?_?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce)")

_OPS = {
    "AllReduce": "allreduce",
    "AllGather": "allgather_base",
    "ReduceScatter": "reduce_scatter_base",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}

# Collective names as profilers write them, without `_` and case, to the names of the schema.
OPS_BY_NAME = {
    "allreduce": "allreduce",
    "allreducecoalesced": "allreduce_coalesced",
    "allgather": "allgather",
    "allgatherbase": "allgather_base",
    "allgatherintotensor": "allgather_base",
    "allgathersingle": "allgather_base",
    "allgathercoalesced": "allgather_coalesced",
    "allgatherintotensorcoalesced": "allgather_into_tensor_coalesced",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter_base",
    "reducescattertensor": "reduce_scatter_base",
    "reducescattersingle": "reduce_scatter_base",
    "reducescattertensorcoalesced": "reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "reduce": "reduce",
    "reduceoop": "reduce",
    "gather": "gather",
    "gatherintotensor": "gather_into_tensor",
    "gathersingle": "gather_into_tensor",
    "scatter": "scatter",
    "alltoall": "alltoall",
    "alltoallv": "alltoall",
    "alltoallbase": "alltoall_base",
    "alltoallsingle": "alltoall_base",
    "alltoallvsingle": "alltoall_base",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


def device_work(category: str, name: str) -> str | None:
    """Return the kind of device work of a profiler's row; None if it is none."""
    if category in _KERNELS:
        return COMMUNICATION if _COMMUNICATION.search(name) else MEMORY if _BLIT.match(name) else COMPUTE
    return MEMORY if category in _COPIES else None


def op_said(name: str) -> str | None:
    """Return the operation that a profiler calls so.

    `_allgather_base`, `allGatherSingleImpl` (torch 2.15); None: none.
    """
    return OPS_BY_NAME.get(name.replace("_", "").lower().removesuffix("impl"))


def kernel_op(name: str) -> str | None:
    """Return the operation of a collective's kernel, `unknown` where its name does not say; None for other kernels.

    NVSHMEM and DeepEP are communication, but their kernels are no collectives of a process group.
    """
    if "nccl" not in name.lower() and "rccl" not in name.lower():
        return None
    found = _NCCL_OP.search(name)
    return _OPS[found[1]] if found else "unknown"


def updates_weights(name: str) -> bool:
    """Say whether a kernel of this name is part of an optimizer's step."""
    return bool(_UPDATES.search(name)) and not _NO_UPDATES.search(name)
