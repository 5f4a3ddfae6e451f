"""Sizes of models, from their names: parameters, those read for one token, layers, width, experts.

They are counted from the published configs in `plan/model_table.py`. A name without an entry still gives its parameters
when it carries them ("70B", "235B-A22B").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fullbore.plan import model_table
from fullbore.plan.models import ACTIVATION_BYTES, DecoderModel


@dataclass(frozen=True)
class ModelSize:
    """`active_b`: parameters read for one token of one request. `bytes_per_parameter` None: not in the name."""

    parameters_b: float | None = None
    active_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    bytes_per_parameter: float | None = None
    active_gb: float | None = None  # read for one token, where mixed precision makes the product wrong
    is_assumed_16_bit: bool = False  # neither name nor settings say a precision
    kv_bytes_per_token: float | None = None  # 16-bit cache, all layers; None: not known, or layers forget

    @property
    def is_moe(self) -> bool:
        return bool(self.experts) or (
            self.parameters_b is not None and self.active_b is not None and self.active_b < 0.7 * self.parameters_b
        )


# How people and folders write the models of `fullbore plan`; the first that fits wins.
_NAMES: list[tuple[str, str]] = [
    (r"kimi[-_ .]?k2(?:\.[56]|-thinking)", "kimi-k2.5"),
    (r"kimi[-_ .]?k2", "kimi-k2"),
    (r"deepseek[-_ .]?(?:v3|r1)(?!.*distill)", "deepseek-v3"),
    (r"qwen3[-_ ]?235b", "qwen3-235b-a22b"),
    (r"qwen3[-_ ]?(?:coder[-_ ])?30b", "qwen3-30b-a3b"),
    (r"qwen3[-_ ]?(?:coder[-_ ])?480b", "qwen3-coder-480b-a35b"),
    (r"glm[-_ ]?4\.[567](?![-_ ]?(?:air|flash))", "glm-4.6"),
    (r"minimax[-_ ]?m2", "minimax-m2"),
    (r"gpt[-_ ]?oss[-_ ]?120b", "gpt-oss-120b"),
    (r"gpt[-_ ]?oss[-_ ]?20b", "gpt-oss-20b"),
    (r"mixtral[-_ ]?8x22b", "mixtral-8x22b"),
    (r"mixtral[-_ ]?8x7b", "mixtral-8x7b"),
    (r"llama.*405b", "llama-3.1-405b"),
    (r"llama.*70b|\b70b\b", "llama-3.1-70b"),
    (r"llama.*13b", "llama-2-13b"),
    (r"llama.*(?<!\d)8b", "llama-3.1-8b"),
    (r"llama.*(?<!\d)7b", "llama-2-7b"),
    (r"qwen2?\.?5?[-_ ]?72b", "qwen2.5-72b"),
    (r"qwen3[-_ ]?32b", "qwen3-32b"),
    (r"qwen2\.5[-_ ]?(?:coder[-_ ])?32b|qwq", "qwen2.5-32b"),
    (r"mistral[-_ ]?large.*123b", "mistral-large"),
    (r"smollm2?[-_ ]?135m", "smollm2-135m"),
]
# Most of its layers keep a state instead of a cache, which `fullbore plan` has no model of.
_NOT_PLANNED: list[tuple[str, ModelSize]] = [(r"qwen3\.5[-_ ]?397b", ModelSize(397, 17, 60, 4096, 512, 10))]

_ACTIVE = re.compile(r"(\d+(?:\.\d+)?)B[-_ ]A(\d+(?:\.\d+)?)B", re.I)
_TOTAL = re.compile(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)\s?([BT])(?![a-z])", re.I)
_BITS: list[tuple[str, float]] = [
    (r"nvfp4|mxfp4|fp4", 0.56),
    (r"fp8|int8|w8a8|w8a16|q8_0", 1.03),
    (r"awq|gptq|int4|w4a16|4bit|q4_0|iq4", 0.56),
    (r"q4_k|q4", 0.6),
    (r"q5", 0.71),
    (r"q6", 0.82),
    (r"q3|iq3", 0.47),
    (r"q2|iq2", 0.35),
    (r"bf16|fp16|float16|f16|bfloat16|half", 2.0),
    (r"fp32|float32", 4.0),
]


def find_model(name: str) -> ModelSize:
    """What the name of a model, or of its folder, says about its size."""
    low = name.lower()
    size = _from_table(low) or _from_name(name)
    for pattern, per_parameter in _BITS:
        if re.search(rf"(?<![a-z]){pattern}", low):
            return replace(size, bytes_per_parameter=per_parameter, active_gb=None)
    return size


def _from_table(low: str) -> ModelSize | None:
    for pattern, size in _NOT_PLANNED:
        if re.search(pattern, low):
            return size
    key = next((key for pattern, key in _NAMES if re.search(pattern, low)), None)
    model = model_table.find_model(key) if key is not None else None
    return _size_of(model) if model is not None else None


def _size_of(model: DecoderModel) -> ModelSize:
    """Of a published checkpoint."""
    experts = next((m for layer in model.layers for m in layer.matrices if m.num_experts), None)
    total = model.num_params / 1e9
    forgets = any(layer.attention.window_tokens for layer in model.layers)
    return ModelSize(
        parameters_b=total,
        active_b=model.num_active_params / 1e9 if experts else total,
        layers=model.num_layers,
        hidden=model.hidden_size,
        experts=experts.num_experts if experts else None,
        experts_per_token=experts.num_active if experts else None,
        bytes_per_parameter=model.weight_bytes / model.num_params if model.is_quantised else None,
        active_gb=model.bytes_read(1) / 1e9 if model.is_quantised else None,
        kv_bytes_per_token=None if forgets else model.cache_elements_per_token() * ACTIVATION_BYTES,
    )


def _from_name(name: str) -> ModelSize:
    if (match := _ACTIVE.search(name)) is not None:
        return ModelSize(float(match[1]), float(match[2]))
    if (match := _TOTAL.search(name)) is not None:
        parameters = float(match[1]) * (1000 if match[2].upper() == "T" else 1)
        is_moe = re.search(r"\bmoe\b|\dx\d", name, re.I)
        return ModelSize(parameters, None if is_moe else parameters)
    return ModelSize()
