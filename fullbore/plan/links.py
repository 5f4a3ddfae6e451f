"""What devices of one host, or hosts, are joined by: figures measured with collectives, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """What two devices of one host are joined by. Times as measured with NCCL or an engine's own kernels."""

    name: str
    bandwidth_bytes_s: float  # reached by large transfers, one direction
    latency_s: float  # of a small point-to-point message inside a running engine
    all_reduce_latency_s: float  # of the one-shot all-reduce that engines use for small messages
    ring_step_latency_s: float  # of each of the 2·(n-1) steps of a ring all-reduce
    source: str


# Large-message bandwidth: for PCIe 5, 24 GB/s (collectives in the aiconfigurator 0.12 tables) to 55 GB/s (peer to peer)
# were published; 45 GB/s is what prefill of Kimi K2.6 over 8 RTX PRO 6000 was measured to reach. Latencies: decode
# steps under tensor parallelism in the same tables, divided by their all-reduces.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link(
            name="pcie5",
            bandwidth_bytes_s=45 * GB,
            latency_s=20e-6,
            all_reduce_latency_s=16e-6,
            ring_step_latency_s=2e-6,
            source="PCIe 5.0 x16 (64 GB/s raw); collectives measured at 24-55 GB/s",
        ),
        Link(
            name="pcie4",
            bandwidth_bytes_s=8 * GB,
            latency_s=25e-6,
            all_reduce_latency_s=20e-6,
            ring_step_latency_s=8e-6,
            source="PCIe 4.0 x16 (32 GB/s raw); cards without peer access copy twice, through host memory",
        ),
        Link(
            name="pcie3",
            bandwidth_bytes_s=5 * GB,
            latency_s=25e-6,
            all_reduce_latency_s=20e-6,
            ring_step_latency_s=8e-6,
            source="PCIe 3.0 x16 (16 GB/s raw), through host memory as on PCIe 4.0",
        ),
        Link(
            name="nvlink3",
            bandwidth_bytes_s=230 * GB,
            latency_s=12e-6,
            all_reduce_latency_s=9e-6,
            ring_step_latency_s=2e-6,
            source="NVIDIA A100 datasheet: 600 GB/s both directions",
        ),
        Link(
            name="nvlink4",
            bandwidth_bytes_s=340 * GB,
            latency_s=12e-6,
            all_reduce_latency_s=6e-6,
            ring_step_latency_s=1.0e-6,
            source="NVIDIA H100 datasheet: 900 GB/s both directions",
        ),
        Link(
            name="nvlink5",
            bandwidth_bytes_s=650 * GB,
            latency_s=12e-6,
            all_reduce_latency_s=6e-6,
            ring_step_latency_s=1.0e-6,
            source="NVIDIA Blackwell datasheet: 1,800 GB/s both directions",
        ),
        Link(
            name="infinity-fabric",
            bandwidth_bytes_s=310 * GB,
            latency_s=15e-6,
            all_reduce_latency_s=12e-6,
            ring_step_latency_s=2e-6,
            source="AMD MI300X datasheet: 7 links of 128 GB/s",
        ),
        Link(
            name="ethernet-400g",
            bandwidth_bytes_s=45 * GB,
            latency_s=40e-6,
            all_reduce_latency_s=35e-6,
            ring_step_latency_s=12e-6,
            source="400 Gb/s RDMA per device",
        ),
        Link(
            name="local",  # processes on the cores of one machine
            bandwidth_bytes_s=4 * GB,
            latency_s=250e-6,
            all_reduce_latency_s=250e-6,
            ring_step_latency_s=100e-6,
            source="gloo over loopback, measured: 264 us a hop",
        ),
    )
}
