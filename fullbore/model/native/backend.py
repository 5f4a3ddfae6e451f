"""Chooses the kernels, and whether the native decoder can run a model at all."""

from __future__ import annotations

from pathlib import Path

import torch

from fullbore.model.checkpoint import Checkpoint
from fullbore.model.native.build import load_library
from fullbore.model.native.config import DecoderConfig, UnsupportedError
from fullbore.model.native.cpu_kernels import CpuKernels
from fullbore.model.native.decoder import NativeStage
from fullbore.model.native.flashinfer_kernels import make_flashinfer_kernels
from fullbore.model.native.kernels import HeadShape, Kernels
from fullbore.model.native.rope import RotaryTables
from fullbore.model.native.torch_kernels import TorchKernels
from fullbore.model.spec import ModelSpec


def make_native_stage(
    folder: Path, spec: ModelSpec, first_layer: int, end_layer: int, dtype: torch.dtype, device: str
) -> NativeStage:
    """A stage whose weights are not loaded yet. On CPU it uses as many threads as torch is set to.

    Raises:
        UnsupportedError: the decoder cannot run this model.
        ModelError: its weights are incomplete or broken.
    """
    config = DecoderConfig.from_folder(folder, spec)
    try:
        rotary = RotaryTables(config.rope, config.head_dim, device)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"the rotary embedding in its config.json is odd ({type(error).__name__}: {error})"
        ) from None
    kernels = choose_kernels(dtype, device, HeadShape(config.num_heads, config.num_kv_heads, config.head_dim))
    return NativeStage(config, first_layer, end_layer, dtype, device, kernels, rotary, Checkpoint.open(folder))


def runs_on_own_kernels(folder: Path, spec: ModelSpec) -> bool:
    """Whether on a CPU the model would be computed by our own C++ code; builds it if need be."""
    try:
        DecoderConfig.from_folder(folder, spec)
    except UnsupportedError:
        return False
    return load_library() is not None


def choose_kernels(dtype: torch.dtype, device: str, shape: HeadShape) -> Kernels:
    """Our own on a CPU with a compiler, torch's elsewhere, on a GPU with FlashInfer's attention if it is there."""
    if device == "cpu" and dtype in (torch.float32, torch.bfloat16):
        library = load_library()
        if library is not None:
            return CpuKernels(library, dtype, torch.get_num_threads())
    return make_flashinfer_kernels(dtype, device, shape) or TorchKernels(dtype, device)
