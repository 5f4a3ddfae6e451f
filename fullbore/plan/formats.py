"""How weights are stored, and in which arithmetic they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fullbore.errors import ConfigError

Arithmetic = Literal["fp32", "bf16", "fp8", "fp4"]
ROLES = ("attention", "mlp", "shared", "experts", "router", "embedding", "head")

# A weight-only format is expanded to bf16 inside the kernel, which costs arithmetic that large batches feel.
WEIGHT_ONLY_EFFICIENCY = 0.85


@dataclass(frozen=True)
class WeightFormat:
    """Bytes of one weight, its share of the scales included; what the multiplication runs in."""

    name: str
    bytes_per_param: float
    arithmetic: Arithmetic
    compute_efficiency: float = 1.0  # relative to weights that are stored in `arithmetic` itself

    @property
    def is_weight_only(self) -> bool:
        return self.compute_efficiency < 1


FORMATS: dict[str, WeightFormat] = {
    each.name: each
    for each in (
        WeightFormat("fp32", 4.0, "fp32"),
        WeightFormat("bf16", 2.0, "bf16"),
        WeightFormat("fp8", 1.0, "fp8"),  # one scale per 128 × 128 block, or per channel: nothing worth counting
        WeightFormat("int8", 1.0, "fp8"),
        WeightFormat("nvfp4", 0.5625, "fp4"),  # 8-bit scale per 16
        WeightFormat("mxfp4", 0.53125, "bf16", WEIGHT_ONLY_EFFICIENCY),  # 8-bit scale per 32
        WeightFormat("int4", 0.5625, "bf16", WEIGHT_ONLY_EFFICIENCY),  # bf16 scale per 32
        WeightFormat("int4-g128", 0.53125, "bf16", WEIGHT_ONLY_EFFICIENCY),  # bf16 scale and zero per 128
    )
}

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_MLP_ROLES = ("mlp", "shared", "experts")


def weight_format(name: str) -> WeightFormat:
    """The format of that name.

    Raises:
        ConfigError: an unknown name, with those that are known.
    """
    found = FORMATS.get(name.lower())
    if found is None:
        raise ConfigError(f"Weight format {name!r} is unknown; known are {', '.join(FORMATS)}.")
    return found


def role_formats(config: dict[str, Any], override: str | None = None) -> dict[str, WeightFormat]:
    """The format of each kind of weight, from a Hugging Face config (its `dtype` and `quantization_config`).

    Args:
        override: a format for all decoder matrices in place of the checkpoint's own.
    """
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    formats = dict.fromkeys(ROLES, FORMATS[_DTYPES.get(dtype, "bf16")])
    quantization = config.get("quantization_config") or config.get("compression_config")
    if override is not None:
        formats.update(dict.fromkeys(("attention", *_MLP_ROLES), weight_format(override)))
    elif isinstance(quantization, dict) and quantization:
        quantized = _quantized_format(quantization)
        skipped = _skipped_roles(quantization)
        formats.update({role: quantized for role in ("attention", *_MLP_ROLES) if role not in skipped})
    return formats


def _quantized_format(quantization: dict[str, Any]) -> WeightFormat:
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "").lower()
    algorithm = str(quantization.get("quant_algo") or quantization.get("format") or "").lower()
    if "mxfp4" in method or "mxfp4" in algorithm:
        return FORMATS["mxfp4"]
    if "nvfp4" in method or "nvfp4" in algorithm or "fp4" in algorithm:
        return FORMATS["nvfp4"]
    if method in ("fp8", "fbgemm_fp8") or "fp8" in algorithm or "float-quantized" in algorithm:
        return FORMATS["fp8"]
    bits, group = _bits_and_group(quantization)
    if bits == 4:
        return FORMATS["int4"] if group == 32 else FORMATS["int4-g128"]
    return FORMATS["int8"] if bits == 8 else FORMATS["bf16"]


def _bits_and_group(quantization: dict[str, Any]) -> tuple[int | None, int]:
    """Bits per weight and weights per scale, wherever the method writes them."""
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        for each in groups.values():
            weights = each.get("weights") if isinstance(each, dict) else None
            if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
                return weights["num_bits"], weights.get("group_size") or 128
    if quantization.get("load_in_4bit"):
        return 4, 64
    if quantization.get("load_in_8bit"):
        return 8, 128
    bits = quantization.get("bits") or quantization.get("w_bit")
    return (bits if isinstance(bits, int) else None), quantization.get("group_size") or 128


def _skipped_roles(quantization: dict[str, Any]) -> set[str]:
    """Roles that the checkpoint leaves unquantised, from the module names and patterns it lists."""
    listed = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        value = quantization.get(key)
        listed += [str(each) for each in value] if isinstance(value, list) else []
    # Only rules for a whole kind of module: "re:.*self_attn.*" or "model.layers.*.self_attn", not one layer of many.
    rules = [each.lower() for each in listed if not any(part.isdigit() for part in each.replace("\\", "").split("."))]
    skipped = set()
    for rule in rules:
        if "attn" in rule or "attention" in rule:
            skipped.add("attention")
        if "shared_expert" in rule:
            skipped.add("shared")
        elif "mlp" in rule and "proj" in rule and "expert" not in rule:
            skipped.add("mlp")
    return skipped
