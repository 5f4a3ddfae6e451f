"""Sizes of models, from their names: parameters, those read for one token, layers, width, experts.

Sources: the models' published config.json and model cards. A name without an entry still gives its parameters when it
carries them ("70B", "235B-A22B").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


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

    @property
    def is_moe(self) -> bool:
        return bool(self.experts) or (
            self.parameters_b is not None and self.active_b is not None and self.active_b < 0.7 * self.parameters_b
        )


_DEEPSEEK = ModelSize(671, 37, 61, 7168, 256, 8, 1.0)
_KIMI = ModelSize(1040, 32, 61, 7168, 384, 8)

_MODELS: list[tuple[str, ModelSize]] = [
    # int4 experts, the rest bf16: 594 GB in all, 33.0 GB read for one token
    (r"kimi[-_ .]?k2(?:\.[56]|-thinking)", replace(_KIMI, bytes_per_parameter=0.571, active_gb=33.0)),
    (r"kimi[-_ .]?k2", replace(_KIMI, bytes_per_parameter=1.0)),
    (r"deepseek[-_ .]?(?:v3|r1)(?!.*distill)", _DEEPSEEK),
    (r"qwen3\.5[-_ ]?397b", ModelSize(397, 17, 60, 4096, 512, 10)),
    (r"qwen3[-_ ]?235b", ModelSize(235, 22, 94, 4096, 128, 8)),
    (r"qwen3[-_ ]?(?:coder[-_ ])?30b", ModelSize(30.5, 3.3, 48, 2048, 128, 8)),
    (r"qwen3[-_ ]?(?:coder[-_ ])?480b", ModelSize(480, 35, 62, 6144, 160, 8)),
    (r"glm[-_ ]?4\.[567]", ModelSize(355, 32, 92, 5120, 160, 8)),
    (r"minimax[-_ ]?m2", ModelSize(230, 10, 62, 3072, 256, 8)),
    (r"gpt[-_ ]?oss[-_ ]?120b", ModelSize(117, 5.1, 36, 2880, 128, 4, 0.53)),
    (r"gpt[-_ ]?oss[-_ ]?20b", ModelSize(21, 3.6, 24, 2880, 32, 4, 0.53)),
    (r"mixtral[-_ ]?8x22b", ModelSize(141, 39, 56, 6144, 8, 2)),
    (r"mixtral[-_ ]?8x7b", ModelSize(46.7, 12.9, 32, 4096, 8, 2)),
    (r"llama.*405b", ModelSize(405, 405, 126, 16384)),
    (r"llama.*70b|\b70b\b", ModelSize(70.6, 70.6, 80, 8192)),
    (r"llama.*13b", ModelSize(13, 13, 40, 5120)),
    (r"llama.*(?<!\d)8b", ModelSize(8, 8, 32, 4096)),
    (r"llama.*(?<!\d)7b", ModelSize(6.7, 6.7, 32, 4096)),
    (r"qwen2?\.?5?[-_ ]?72b", ModelSize(72.7, 72.7, 80, 8192)),
    (r"qwen3[-_ ]?32b|qwen2\.5[-_ ]?32b|qwq", ModelSize(32.8, 32.8, 64, 5120)),
    (r"mistral[-_ ]?(?:medium|large).*12[38]b", ModelSize(123, 123, 88, 12288)),
    (r"smollm2?[-_ ]?135m", ModelSize(0.1345, 0.1345, 30, 576)),
]

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
    size = next((known for pattern, known in _MODELS if re.search(pattern, low)), None) or _from_name(name)
    for pattern, per_parameter in _BITS:
        if re.search(rf"(?<![a-z]){pattern}", low):
            return replace(size, bytes_per_parameter=per_parameter, active_gb=None)
    return size


def _from_name(name: str) -> ModelSize:
    if (match := _ACTIVE.search(name)) is not None:
        return ModelSize(float(match[1]), float(match[2]))
    if (match := _TOTAL.search(name)) is not None:
        parameters = float(match[1]) * (1000 if match[2].upper() == "T" else 1)
        is_moe = re.search(r"\bmoe\b|\dx\d", name, re.I)
        return ModelSize(parameters, None if is_moe else parameters)
    return ModelSize()
