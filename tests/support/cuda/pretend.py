"""Makes torch take `driver.c` for CUDA in use: what a build with CUDA would say of it."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("driver.c")


def build(folder: Path) -> Path:
    """Compile the driver under the name that the real one has. Raises OSError or CalledProcessError."""
    path = folder / "libcuda.so.1"
    flags = ["-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(path)], check=True)
    return path


def pretend(path: Path, *, drift_ppm: float = 0.0, connections: int = 8) -> ctypes.CDLL:
    """Load the driver and let torch seem to use it; `current_device` on what is returned can be set."""
    import torch

    driver = ctypes.CDLL(str(path))
    driver.fake_truth.restype = ctypes.c_int64
    driver.fake_work.argtypes = (ctypes.c_int64,)
    driver.fake_set_up(ctypes.c_double(drift_ppm), connections)
    driver.current_device = driver.current_stream = 0
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: driver.current_device
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        name="NVIDIA H100", uuid=f"{device}-0", total_memory=80 << 30
    )
    torch.cuda.memory_stats = lambda device: {}
    torch._C._cuda_getDevice = lambda: driver.current_device
    torch._C._cuda_getCurrentRawStream = lambda device: driver.current_stream
    torch.cuda.is_current_stream_capturing = lambda: bool(driver.fake_is_capturing())
    torch._C._cuda_isCurrentStreamCapturing = torch.cuda.is_current_stream_capturing
    Event.driver = driver
    torch.cuda.Event = Event
    learn(0)
    return driver


def learn(device: int) -> None:
    """The recording takes it for the device of the weights, which are on none."""
    from rankscope.collectors.in_rank import session

    if session._session is not None:
        session._session.emit.device = device


def wait_for_anchors(driver: ctypes.CDLL, count: int) -> None:
    """Until the collector has begun to read the device's clock so many times more."""
    wanted = driver.fake_anchors() + count
    while driver.fake_anchors() < wanted:
        time.sleep(0.02)


class Event:
    """What a stream waits for so long, as for communication in another stream."""

    driver: Any

    def __init__(self, takes_ns: int) -> None:
        self.takes_ns = takes_ns

    def record(self, stream: Any = None) -> None:
        """The stream of `stream.cuda_stream` comes to it: nothing to do."""

    def wait(self, stream: Any = None) -> None:
        if self.driver.current_stream == 0:  # the driver's queue of work
            self.driver.fake_work(self.takes_ns)


def on_device(driver: ctypes.CDLL, forward_ns: int, backward_ns: int) -> Any:
    """A function of autograd that gives on what it gets, and has the device compute for so long."""
    import torch

    class OnDevice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            driver.fake_work(forward_ns)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            driver.fake_work(backward_ns)
            return gradient

    return OnDevice
