"""The ranks' TCP connections to other nodes, summed per rank and remote address.

Device: `rank3>10.0.0.2`. Cumulative, over all sockets that were seen: `bytes_sent` (acknowledged), `bytes_received`,
`retransmits` (segments), `busy_s` (data under way), and the parts of it in which the receiver's window
(`rwnd_limited_s`) or the own buffer (`sndbuf_limited_s`) was the limit. Momentary: `rtt_s` (mean of the sockets that
sent since the last reading, weighted by what they sent; absent if none did), `min_rtt_s`, `window_bytes` (the largest
that a receiver offers; Linux 5.4), `notsent_bytes`, `sockets`.

Source: Linux sock_diag(7), `struct tcp_info`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from rankscope.collectors.node import Collector, Node, Sample
from rankscope.errors import Unavailable

MAX_PAIRS = 256
OWNERS_EVERY_S = 5.0

_NETLINK_SOCK_DIAG = 4
_TCPDIAG_GETSOCK = 18  # as ss asks: one walk over the kernel's table gives IPv4 and IPv6
_NLM_F_DUMP = 0x301  # request, root, match
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_STATES = 1 << 1 | 1 << 8  # ESTABLISHED, CLOSE_WAIT: the others have no owner any more
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=3xB48xI4x")  # extensions, states; any family
_MESSAGE = struct.Struct("=BBBB2s2s16s16s12xIIIII")  # family … ports, addresses … expires, queues, uid, inode
_ATTRIBUTE = struct.Struct("=HH")
_INFO = struct.Struct("=8x24I4Q6I4Q2I2Q4I")  # tcp_info up to tcpi_snd_wnd; older kernels end earlier, with 0 here
_RTT, _TOTAL_RETRANS, _BYTES_ACKED, _BYTES_RECEIVED = 15, 23, 26, 27
_NOTSENT, _MIN_RTT, _BUSY, _RWND_LIMITED, _SNDBUF_LIMITED, _WINDOW = 30, 31, 35, 36, 37, 45
_NO_RTT = 0xFFFFFFFF

_COUNTED = {
    "bytes_sent": (_BYTES_ACKED, 1.0),
    "bytes_received": (_BYTES_RECEIVED, 1.0),
    "retransmits": (_TOTAL_RETRANS, 1.0),
    "busy_s": (_BUSY, 1e-6),
    "rwnd_limited_s": (_RWND_LIMITED, 1e-6),
    "sndbuf_limited_s": (_SNDBUF_LIMITED, 1e-6),
}

Info = tuple[int, ...]
Pair = tuple[str, str]  # device of the rank, address


@dataclass(slots=True)
class _Connections:
    """State of the ranks' sockets between two readings."""

    channel: socket.socket
    before: dict[int, Info] = field(default_factory=dict)  # by inode
    totals: dict[Pair, dict[str, float]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)  # inode → device of the rank
    foreign: set[int] = field(default_factory=set)  # inodes that belong to no rank
    owners_of: dict[str, int] = field(default_factory=dict)  # the pids that `owners` was made from
    owners_at: float = float("-inf")
    said_limit: bool = False


_state: _Connections | None = None


def start(node: Node) -> None:  # noqa: ARG001
    global _state
    try:
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        channel.settimeout(1)
        _state = _Connections(channel)
        list(_dump(channel))
    except OSError as error:
        stop()
        raise Unavailable(f"the kernel does not report TCP connections: {error}") from None


def sample(node: Node) -> Iterator[Sample]:
    assert _state is not None
    sockets = {
        inode: (address, info) for inode, address, info in _dump(_state.channel) if address not in node.addresses
    }
    _find_owners(_state, node, sockets.keys())
    by_pair: dict[Pair, list[int]] = {}
    for inode, (address, _) in sockets.items():
        if inode in _state.owners:
            by_pair.setdefault((_state.owners[inode], address), []).append(inode)
    _limit(_state, node, by_pair)
    now = {inode: info for inode, (_, info) in sockets.items() if inode in _state.owners}
    for pair in _state.totals:
        yield from _pair(_state, pair, {inode: now[inode] for inode in by_pair.get(pair, ())})
    _state.before = now


def stop() -> None:
    global _state
    if _state:
        _state.channel.close()
    _state = None


def _limit(state: _Connections, node: Node, by_pair: dict[Pair, list[int]]) -> None:
    """Give every pair totals, up to the limit; report the first beyond it, once."""
    new = [pair for pair in by_pair if pair not in state.totals]
    for pair in islice(new, max(0, MAX_PAIRS - len(state.totals))):
        state.totals[pair] = dict.fromkeys(_COUNTED, 0.0)
    if len(state.totals) == MAX_PAIRS and any(pair not in state.totals for pair in new) and not state.said_limit:
        state.said_limit = True
        node.gap("tcp", f"the ranks talk to more than {MAX_PAIRS} addresses; further ones are not read")


def _pair(state: _Connections, pair: Pair, sockets: dict[int, Info]) -> Iterator[Sample]:
    device = ">".join(pair)
    totals = state.totals[pair]
    sent_at_rtt = sent_in_all = 0.0
    for inode, info in sockets.items():
        before = state.before.get(inode)
        for name, (place, unit) in _COUNTED.items():
            totals[name] += max(0, info[place] - (before[place] if before else 0)) * unit
        sent = max(0, info[_BYTES_ACKED] - (before[_BYTES_ACKED] if before else 0))
        sent_at_rtt += sent * info[_RTT] * 1e-6
        sent_in_all += sent
    for name, value in totals.items():
        yield "tcp", name, device, value
    if sent_in_all:
        yield "tcp", "rtt_s", device, sent_at_rtt / sent_in_all
    shortest = min((info[_MIN_RTT] for info in sockets.values()), default=_NO_RTT)
    if shortest != _NO_RTT:
        yield "tcp", "min_rtt_s", device, shortest * 1e-6
    window = max((info[_WINDOW] for info in sockets.values()), default=0)
    if window:
        yield "tcp", "window_bytes", device, float(window)
    yield "tcp", "notsent_bytes", device, float(sum(info[_NOTSENT] for info in sockets.values()))
    yield "tcp", "sockets", device, float(len(sockets))


def _find_owners(state: _Connections, node: Node, inodes: Collection[int]) -> None:
    """Every inode is in `owners` or `foreign`; a socket that is new may have to wait 5 s for that."""
    now = time.monotonic()
    unknown = any(inode not in state.owners and inode not in state.foreign for inode in inodes)
    if state.owners_of == node.pids and not (unknown and now - state.owners_at >= OWNERS_EVERY_S):
        return
    state.owners_of, state.owners_at = dict(node.pids), now
    state.owners = {inode: device for device, pid in node.pids.items() for inode in _socket_inodes(node, pid)}
    state.foreign = set(inodes) - state.owners.keys()


def _socket_inodes(node: Node, pid: int) -> Iterator[int]:
    folder = f"{node.proc}/{pid}/fd"
    try:
        fds = os.listdir(folder)
    except OSError:
        return  # the rank is gone
    for fd in fds:
        try:
            target = os.readlink(f"{folder}/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _dump(channel: socket.socket) -> Iterator[tuple[int, str, Info]]:
    """Inode, remote address and `tcp_info` of every connected socket of the network namespace. Raises OSError."""
    sequence = time.monotonic_ns() & 0xFFFFFFFF  # answers to an earlier question, given up on, are skipped
    request = _REQUEST.pack(1 << (_INET_DIAG_INFO - 1), _STATES)
    channel.send(_HEADER.pack(_HEADER.size + len(request), _TCPDIAG_GETSOCK, _NLM_F_DUMP, sequence, 0) + request)
    while True:
        packet = channel.recv(1 << 16)
        start = 0
        while start < len(packet):
            length, kind, _, answered, _ = _HEADER.unpack_from(packet, start)
            if answered == sequence:
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", packet, start + _HEADER.size)
                    raise OSError(-code, os.strerror(-code))
                yield from _parse(packet[start + _HEADER.size : start + length])
            start += _aligned(length)


def _parse(message: bytes) -> Iterator[tuple[int, str, Info]]:
    family, _, _, _, _, _, _, remote, _, _, _, _, inode = _MESSAGE.unpack_from(message)
    start = _MESSAGE.size
    while start + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, start)
        if kind == _INET_DIAG_INFO:
            info = message[start + _ATTRIBUTE.size : start + length][: _INFO.size]
            yield inode, _address(family, remote), _INFO.unpack(info.ljust(_INFO.size, b"\0"))
        start += max(_aligned(length), _ATTRIBUTE.size)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _address(family: int, packed: bytes) -> str:
    """As the node's own addresses are written: an IPv4 address also where the socket is an IPv6 one."""
    mapped = b"\0" * 10 + b"\xff\xff"
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, packed[:4])
    if packed.startswith(mapped):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)


collector = Collector(start=start, sample=sample, stop=stop)
