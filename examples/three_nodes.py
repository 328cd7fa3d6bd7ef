"""Run a job on several nodes that are network namespaces of this machine (Linux, root), one link slow or one clock off.

    sudo python examples/three_nodes.py --slow-node 1 --mbit 200 -- rankscope run examples/train_transformer.py

Each node runs the command once; torchrun finds its options for the node (`--nnodes`, …) in the environment.
Exits with the worst exit status of the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

MASTER_PORT = "29500"  # any: each run has a network of its own


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@dataclass(frozen=True, slots=True)
class Node:
    """A network namespace; `link` is its end of the cable on the bridge."""

    index: int
    namespace: str
    link: str

    @property
    def address(self) -> str:
        return f"10.77.0.{self.index + 1}"

    def limit_bandwidth(self, mbit: int) -> None:
        """Shape the node's link to `mbit` Mbit/s both ways."""
        shaper = f"root tbf rate {mbit}mbit burst 128kb latency 100ms"
        sh(f"tc -n {self.namespace} qdisc add dev eth0 {shaper}")
        sh(f"tc qdisc add dev {self.link} {shaper}")

    def popen(
        self, command: list[str], environment: dict[str, str], skew_s: int = 0, log: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `command` in this node, with its monotonic clock `skew_s` ahead of this machine's."""
        clock = ["unshare", "-T", "--monotonic", str(skew_s)] if skew_s else []
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *clock, *command],
            env=os.environ | environment | {"GLOO_SOCKET_IFNAME": "eth0", "PET_NODE_RANK": str(self.index)},
            stdout=log,
            stderr=log,
        )


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Node]]:
    """`count` nodes joined by a bridge; their names hold this process's id, and all of them are gone afterwards."""
    bridge = f"rs{os.getpid()}"  # interface names have 15 characters at most
    nodes = [Node(i, f"{bridge}-{i}", f"{bridge}-{i}") for i in range(count)]
    try:
        sh(f"ip link add {bridge} type bridge")
        sh(f"ip link set {bridge} up")
        for node in nodes:
            sh(f"ip netns add {node.namespace}")
            sh(f"ip link add {node.link} type veth peer name eth0 netns {node.namespace}")
            sh(f"ip link set {node.link} master {bridge} up")
            sh(f"ip -n {node.namespace} addr add {node.address}/24 dev eth0")
            sh(f"ip -n {node.namespace} link set eth0 up")
            sh(f"ip -n {node.namespace} link set lo up")
        yield nodes
    finally:
        for node in nodes:  # what is left to the kernel goes some time after the namespace does
            subprocess.run(["ip", "link", "del", node.link], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", node.namespace], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--slow-node", type=int, help="the node whose link is shaped")
    parser.add_argument("--mbit", type=int, default=200, help="the slow link's bandwidth each way, Mbit/s")
    parser.add_argument("--skewed-node", type=int, help="the node whose monotonic clock is off")
    parser.add_argument("--skew-s", type=int, default=5, help="by how many seconds")
    parser.add_argument("command", nargs="+", help="rankscope run …, or torchrun …")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the network is taken down
    with network(args.nodes) as nodes, contextlib.ExitStack() as running:
        if args.slow_node is not None:
            nodes[args.slow_node].limit_bandwidth(args.mbit)
        environment = {
            "PET_NNODES": str(args.nodes),
            "PET_NPROC_PER_NODE": str(args.nproc_per_node),
            "PET_MASTER_ADDR": nodes[0].address,
            "PET_MASTER_PORT": MASTER_PORT,
        }
        jobs = []
        for node in nodes:
            jobs.append(node.popen(args.command, environment, args.skew_s if node.index == args.skewed_node else 0))
            running.callback(jobs[-1].terminate)
        return max(abs(job.wait()) for job in jobs)


if __name__ == "__main__":
    sys.exit(main())
