"""Every counter that a node collector may record: its unit, and whether it is a gauge or a counter.

A gauge is read at a moment and may fall; a counter is cumulative and is shown as a rate. A collector cannot record a
name that is not here: the agent leaves it out and says so in `gaps`. Names that several sources share mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COUNTERS", "GAUGES", "UNITS", "Counter"]

GAUGE: Literal["gauge"] = "gauge"
COUNTER: Literal["counter"] = "counter"


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter: the collector that reads it, its name with its unit, the unit alone, and how it is read."""

    source: str
    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    doc: str


COUNTERS = (
    Counter("host", "cpu_busy_s", "s", COUNTER, "All processors: busy."),
    Counter("host", "cpu_steal_s", "s", COUNTER, "All processors: given away by the hypervisor."),
    Counter("host", "cpu_idle_s", "s", COUNTER, "All processors: idle."),
    Counter("host", "cpu_busy_fraction", "fraction", GAUGE, "Of all processors, since the last reading."),
    Counter("host", "load_1min", "tasks", GAUGE, "Load average over one minute."),
    Counter("host", "memory_available_bytes", "bytes", GAUGE, "Memory that programs can still get."),
    Counter("host", "memory_stalled_s", "s", COUNTER, "All tasks that could run waited for memory (PSI, full)."),
    Counter("host", "swap_used_bytes", "bytes", GAUGE, "Swap space in use."),
    Counter("host", "swap_in_bytes", "bytes", COUNTER, "Read from swap."),
    Counter("host", "swap_out_bytes", "bytes", COUNTER, "Written to swap."),
    Counter("host", "page_faults", "faults", COUNTER, "Page faults of all kinds."),
    Counter("host", "major_page_faults", "faults", COUNTER, "Page faults that read a disk, of the node or of a rank."),
    Counter("host", "cgroup_cpus", "processors", GAUGE, "Limit of the control group."),
    Counter("host", "cgroup_periods", "periods", COUNTER, "Scheduling periods of the control group."),
    Counter("host", "cgroup_throttled_periods", "periods", COUNTER, "Those in which the group used up its limit."),
    Counter("host", "cgroup_throttled_s", "s", COUNTER, "The group was stopped because of its limit."),
    Counter("host", "cpu_s", "s", COUNTER, "Processor time of a rank's process."),
    Counter("host", "rss_bytes", "bytes", GAUGE, "Resident memory of a rank's process."),
    Counter("host", "main_thread_involuntary_switches", "switches", COUNTER, "Of the main thread, to others."),
    Counter("host", "main_thread_queued_s", "s", COUNTER, "The main thread could run and had no processor."),
    Counter("pressure", "cpu_some_s", "s", COUNTER, "A task waited for a processor."),
    Counter("pressure", "io_some_s", "s", COUNTER, "A task waited for storage."),
    Counter("pressure", "io_full_s", "s", COUNTER, "All tasks that were not idle waited for storage."),
    Counter("pressure", "memory_some_s", "s", COUNTER, "A task waited for memory."),
    Counter("disk", "read_bytes", "bytes", COUNTER, "Read."),
    Counter("disk", "written_bytes", "bytes", COUNTER, "Written."),
    Counter("disk", "read_wait_s", "s", COUNTER, "From a read's request to its end, summed over reads."),
    Counter("disk", "write_wait_s", "s", COUNTER, "From a write's request to its end, summed over writes."),
    Counter("disk", "io_busy_s", "s", COUNTER, "A request was under way."),
    Counter("nic", "rx_bytes", "bytes", COUNTER, "Received."),
    Counter("nic", "rx_packets", "packets", COUNTER, "Received."),
    Counter("nic", "rx_errors", "packets", COUNTER, "Received with an error."),
    Counter("nic", "rx_drops", "packets", COUNTER, "Received and dropped."),
    Counter("nic", "tx_bytes", "bytes", COUNTER, "Sent."),
    Counter("nic", "tx_packets", "packets", COUNTER, "Sent."),
    Counter("nic", "tx_errors", "packets", COUNTER, "Not sent because of an error."),
    Counter("nic", "tx_drops", "packets", COUNTER, "Dropped before they were sent."),
    Counter("nic", "speed_bytes_per_s", "bytes/s", GAUGE, "Speed of the link."),
    Counter("tcp", "bytes_sent", "bytes", COUNTER, "Sent and acknowledged."),
    Counter("tcp", "bytes_received", "bytes", COUNTER, "Received."),
    Counter("tcp", "retransmits", "segments or packets", COUNTER, "Sent again."),
    Counter("tcp", "busy_s", "s", COUNTER, "Data was under way."),
    Counter("tcp", "rwnd_limited_s", "s", COUNTER, "Limited by the receiver's window."),
    Counter("tcp", "sndbuf_limited_s", "s", COUNTER, "Limited by the send buffer."),
    Counter("tcp", "rtt_s", "s", GAUGE, "Mean round-trip time, weighted by what was sent."),
    Counter("tcp", "min_rtt_s", "s", GAUGE, "Shortest round-trip time."),
    Counter("tcp", "window_bytes", "bytes", GAUGE, "Largest window that a receiver offers."),
    Counter("tcp", "notsent_bytes", "bytes", GAUGE, "In the send buffer and not sent."),
    Counter("tcp", "sockets", "sockets", GAUGE, "Open connections."),
    Counter("rdma", "port_xmit_data_bytes", "bytes", COUNTER, "Sent."),
    Counter("rdma", "port_rcv_data_bytes", "bytes", COUNTER, "Received."),
    Counter("rdma", "port_xmit_packets", "packets", COUNTER, "Sent."),
    Counter("rdma", "port_rcv_packets", "packets", COUNTER, "Received."),
    Counter("rdma", "port_xmit_wait", "ticks", COUNTER, "There was data to send and no credit to send it."),
    Counter("rdma", "port_xmit_discards", "packets", COUNTER, "Not sent and discarded."),
    Counter("rdma", "port_rcv_errors", "packets", COUNTER, "Received with an error."),
    Counter("rdma", "rx_drops", "packets", COUNTER, "Received and dropped."),
    Counter(
        "rdma",
        "limit_drops",
        "packets",
        COUNTER,
        "Dropped by the cloud's limits, both directions.",
    ),
    Counter("rdma", "symbol_error", "errors", COUNTER, "Symbols received with an error."),
    Counter("rdma", "link_error_recovery", "times", COUNTER, "The link was trained again."),
    Counter("rdma", "link_downed", "times", COUNTER, "The link went down."),
    Counter("rdma", "local_link_integrity_errors", "errors", COUNTER, "Too many local physical errors."),
    Counter("rdma", "retransmits", "segments or packets", COUNTER, "Sent again."),
    Counter("rdma", "out_of_sequence", "packets", COUNTER, "Received out of order."),
    Counter("rdma", "out_of_buffer", "packets", COUNTER, "No receive was posted for them."),
    Counter("rdma", "packet_seq_err", "NAKs", COUNTER, "For lost packets."),
    Counter("rdma", "implied_nak_seq_err", "NAKs", COUNTER, "Implied, for lost packets."),
    Counter("rdma", "local_ack_timeout_err", "timeouts", COUNTER, "An acknowledgement did not come."),
    Counter("rdma", "rnr_nak_retry_err", "times", COUNTER, "The receiver was not ready."),
    Counter("rdma", "roce_adp_retrans", "times", COUNTER, "Adaptive retransmission."),
    Counter("rdma", "roce_slow_restart", "times", COUNTER, "Restart after idling."),
    Counter("rdma", "unresponsive_remotes", "times", COUNTER, "A peer did not answer."),
    Counter("rdma", "impaired_remotes", "times", COUNTER, "A peer's connection was bad."),
    Counter("rdma", "np_cnp_sent", "notifications", COUNTER, "Congestion notifications sent."),
    Counter("rdma", "np_ecn_marked_roce_packets", "packets", COUNTER, "Received, and marked by a congested switch."),
    Counter("rdma", "rp_cnp_handled", "notifications", COUNTER, "Congestion notifications obeyed."),
    Counter("rdma", "rate_bytes_per_s", "bytes/s", GAUGE, "Speed of the port."),
    Counter("gpu", "busy_fraction", "fraction", GAUGE, "Of the time, a kernel ran."),
    Counter("gpu", "memory_used_bytes", "bytes", GAUGE, "Of the GPU's memory."),
    Counter("gpu", "sm_clock_hz", "Hz", GAUGE, "Clock of the multiprocessors."),
    Counter("gpu", "sm_clock_max_hz", "Hz", GAUGE, "Its highest."),
    Counter("gpu", "memory_clock_hz", "Hz", GAUGE, "Clock of the memory."),
    Counter("gpu", "power_w", "W", GAUGE, "Power drawn."),
    Counter("gpu", "power_limit_w", "W", GAUGE, "Power limit in force."),
    Counter("gpu", "power_limit_default_w", "W", GAUGE, "Power limit as delivered."),
    Counter("gpu", "temperature_c", "°C", GAUGE, "Of the chip."),
    Counter("gpu", "memory_temperature_c", "°C", GAUGE, "Of the memory."),
    Counter("gpu", "clock_event_reasons", "bit mask", GAUGE, "Why the clocks are held down: NVML's bits."),
    Counter("gpu", "energy_j", "J", COUNTER, "Energy used."),
    Counter("gpu", "pcie_generation", "generation", GAUGE, "Of the PCIe link now."),
    Counter("gpu", "pcie_lanes", "lanes", GAUGE, "Of the PCIe link now."),
    Counter("gpu", "pcie_tx_bytes", "bytes", COUNTER, "Sent over PCIe."),
    Counter("gpu", "pcie_rx_bytes", "bytes", COUNTER, "Received over PCIe."),
    Counter("gpu", "pcie_replays", "packets", COUNTER, "Sent again over PCIe."),
    Counter("gpu", "nvlinks_up", "links", GAUGE, "NVLinks that are up."),
    Counter("gpu", "nvlink_tx_bytes", "bytes", COUNTER, "Sent over NVLink."),
    Counter("gpu", "nvlink_rx_bytes", "bytes", COUNTER, "Received over NVLink."),
    Counter("gpu", "nvlink_errors", "errors", COUNTER, "NVLink: CRC errors, replays, recoveries."),
    Counter("gpu", "ecc_corrected", "errors", COUNTER, "Memory errors that were corrected."),
    Counter("gpu", "ecc_uncorrected", "errors", COUNTER, "Memory errors that were not."),
    Counter("gpu", "remapped_rows_pending", "flag", GAUGE, "Rows of memory wait for a reset to be remapped."),
    Counter("gpu", "xid_errors", "errors", COUNTER, "The driver's error events (Xid)."),
    Counter("gpu", "power_capped_s", "s", COUNTER, "Clocks held down by the power limit."),
    Counter("gpu", "thermal_slowdown_s", "s", COUNTER, "Clocks held down by temperature."),
    Counter("gpu", "hw_thermal_slowdown_s", "s", COUNTER, "The same, by the hardware."),
    Counter("gpu", "power_brake_s", "s", COUNTER, "Clocks held down by the power brake."),
)
GAUGES = frozenset(counter.name for counter in COUNTERS if counter.kind == GAUGE)
UNITS = {counter.name: counter.unit for counter in COUNTERS}
