"""PCIe links: what their lanes carry."""

from __future__ import annotations

# Bytes per second of one lane in one direction, after encoding.
_LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9, 7: 15.1e9}


def link_bytes_s(gen: float, width: float) -> float:
    """Payload bandwidth of a PCIe link in one direction, before protocol overhead."""
    return _LANE_BYTES_S.get(round(gen), 0.25e9) * width
