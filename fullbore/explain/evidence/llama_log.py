"""llama.cpp's and ollama's log lines: layers offloaded, where they went, timings, slots, graphs."""

from __future__ import annotations

import re

from fullbore.explain.facts import Reading, Source
from fullbore.explain.series import Series

_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU|layers\.model=(\d+) layers\.offload=(\d+)")
_BUFFER = re.compile(r"\b((?:CUDA|ROCm|Vulkan)\d+|CPU\w*|RPC\[[^\]]*\])\s+model buffer size\s*=\s*(\d+(?:\.\d+)?) MiB")
_EVAL = re.compile(
    r"(?<!prompt )\beval time\s*=.*?\(\s*(\d+(?:\.\d+)?) ms per token,\s*(\d+(?:\.\d+)?) tokens per second"
)
_PROMPT_EVAL = re.compile(r"prompt eval time\s*=\s*(\d+(?:\.\d+)?) ms /\s*(\d+) tokens")
_SLOTS = re.compile(r"\bn_(?:parallel|slots|seq_max)\s*=\s*(\d+)|--parallel (\d+)|initializing slots, n_slots = (\d+)")
_LAYERS = re.compile(r"\bn_layer\s*=\s*(\d+)")
_HIDDEN = re.compile(r"\bn_embd\s*=\s*(\d+)")
_DEVICES = re.compile(r"found (\d+) (?:CUDA|ROCm) devices")


class LlamaLog:
    def __init__(self) -> None:
        self.settings: dict[str, Reading] = {}
        self.offloaded: Reading | None = None  # (on GPU, in all)
        self.buffers_mib: dict[str, Reading] = {}
        self.decode_ms = Series()
        self.decode_at: Source | None = None
        self.prompt_ms = Series()
        self.prompt_tokens = Series()
        self.graphs_disabled: Reading | None = None

    def read_line(self, line: str, source: Source) -> bool:
        if "layers" in line and (match := _OFFLOADED.search(line)) is not None:
            on_gpu, in_all = (match[1], match[2]) if match[1] else (match[4], match[3])
            self.offloaded = Reading("layers on GPU", (int(on_gpu), int(in_all)), source)
            return True
        if "model buffer size" in line and (match := _BUFFER.search(line)) is not None:
            self.buffers_mib[match[1]] = Reading(f"{match[1]} model buffer size in MiB", float(match[2]), source)
            return True
        if "eval time" in line:
            return self._read_timing(line, source)
        if "CUDA graph" in line and re.search(r"disabl", line):
            self.graphs_disabled = self.graphs_disabled or Reading("CUDA graphs", line.strip()[:160], source)
            return True
        return self._read_settings(line, source)

    def _read_timing(self, line: str, source: Source) -> bool:
        if (match := _PROMPT_EVAL.search(line)) is not None:
            self.prompt_ms.add(float(match[1]))
            self.prompt_tokens.add(int(match[2]))
            return True
        if (match := _EVAL.search(line)) is not None:
            self.decode_ms.add(float(match[1]))
            self.decode_at = self.decode_at or source
            return True
        return False

    def _read_settings(self, line: str, source: Source) -> bool:
        for name, pattern, key in (
            ("slots", _SLOTS, "n_"),
            ("num_hidden_layers", _LAYERS, "n_layer"),
            ("hidden_size", _HIDDEN, "n_embd"),
            ("devices", _DEVICES, " devices"),
        ):
            if (key in line or "--parallel" in line) and (match := pattern.search(line)) is not None:
                value = next(group for group in match.groups() if group)
                self.settings[name] = Reading(name, int(value), source)
                return True
        return False
