"""What tells this machine's processor from others: a cache folder may be shared by several."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Its name and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
