"""A Hugging Face folder of safetensors, read one tensor at a time."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fullbore.errors import ModelError

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"

_BUFFER_BYTES = 8 * 1024 * 1024

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """Where one tensor lies and what it is, from its file's header."""

    file: Path
    offset_bytes: int  # from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """The tensors of a folder, by their names in the files. Opening reads headers only, and checks every file's length.

    Tensors are read, not memory-mapped: mapped pages of a whole file would count as this process's memory.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = tensors

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises:
            ModelError: no safetensors in the folder; a shard is missing, truncated or broken.
        """
        folder = Path(folder)
        tensors: dict[str, TensorInfo] = {}
        index_path = folder / "model.safetensors.index.json"
        if index_path.exists():
            weight_map = _read_index(index_path)
            for file_name in sorted(set(weight_map.values())):
                tensors.update(_read_header(folder / file_name))
            for name, file_name in weight_map.items():
                if name not in tensors:
                    raise ModelError(
                        f"{folder / file_name} lacks the tensor {name} that the index names; download the model again."
                    )
            return cls(folder, tensors)
        single_path = folder / "model.safetensors"
        if single_path.exists():
            return cls(folder, _read_header(single_path))
        raise ModelError(_explain_missing_weights(folder))

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """File, type, shape and size in bytes of a tensor.

        Raises:
            ModelError: there is no such tensor.
        """
        info = self._tensors.get(name)
        if info is None:
            raise ModelError(f"{self.folder} has no tensor {name}; its weights do not fit its config.json.")
        return info

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def nbytes(self, name: str) -> int:
        """Size in the file."""
        return self.info(name).nbytes

    def head_name(self, tied_embeddings: bool) -> str:
        """The tensor that serves as the LM head: [vocab_size, hidden_size].

        With tied embeddings it is the embedding, whether or not the file carries a head too.
        """
        return EMBEDDING_NAME if tied_embeddings else HEAD_NAME

    def load(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Reads one tensor into memory of its own; `dtype` None keeps the file's.

        Raises:
            ModelError: there is no such tensor, or its file cannot be read any more.
        """
        info = self.info(name)
        out = torch.empty(info.shape, dtype=dtype or info.dtype, device=device)
        self.load_into(name, out)
        return out

    def load_into(self, name: str, out: torch.Tensor) -> None:
        """Reads one tensor into `out` (contiguous, same shape, any type and device), e.g. one expert's slice.

        Where type or device differ it goes through a small buffer, so that no second whole copy exists at any time.

        Raises:
            ModelError: there is no such tensor, its shape is another, or its file cannot be read any more.
        """
        info = self.info(name)
        if tuple(out.shape) != info.shape:
            raise ModelError(
                f"{info.file}: {name} has shape {list(info.shape)} where config.json asks for {list(out.shape)}."
            )
        flat = out.detach().view(-1)
        try:
            with info.file.open("rb", buffering=0) as file:
                file.seek(info.offset_bytes)
                if out.dtype == info.dtype and out.device.type == "cpu":
                    _read_exactly(file, flat)
                else:
                    _read_converting(file, flat, info.dtype)
        except OSError as error:
            raise ModelError(f"{info.file} cannot be read ({error}); download the model again.") from None


def _read_exactly(file: BinaryIO, out: torch.Tensor) -> None:
    """Fills a flat tensor in main memory from the file's current position."""
    view = out.view(torch.uint8).numpy().data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file is shorter than when it was opened")
        view = view[count:]


def _read_converting(file: BinaryIO, out: torch.Tensor, file_dtype: torch.dtype) -> None:
    buffer = torch.empty(min(out.numel(), _BUFFER_BYTES // file_dtype.itemsize), dtype=file_dtype)
    for start in range(0, out.numel(), max(1, buffer.numel())):
        part = buffer[: out.numel() - start]
        _read_exactly(file, part)
        out[start : start + part.numel()].copy_(part)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from None
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ModelError(f"{path} names no files, or files outside its folder; download the model again.")
    return dict(weight_map)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The JSON header of a safetensors file: 8 bytes of length, then name -> {dtype, shape, data_offsets}."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > file_bytes - 8:
                raise ValueError("the file is truncated")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(path, 8 + header_bytes, entry) for name, entry in header.items()}
        data_end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again.") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error}); download it again.") from None
    if 8 + header_bytes + data_end != file_bytes:
        raise ModelError(
            f"{path} has {file_bytes} bytes where its header asks for {8 + header_bytes + data_end}; download it again."
        )
    return tensors


def _tensor_info(path: Path, data_start: int, entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"tensor type {entry['dtype']} is not supported")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("its header contradicts itself")
    return TensorInfo(path, data_start + begin, dtype, shape, end - begin)


def _explain_missing_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give a Hugging Face model folder, a hub id or a GGUF file."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{folder} holds its weights as pickles (.bin), which can run code when read, so fullbore does not; "
            "get the model as safetensors, or convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    return f"{folder} has neither model.safetensors nor model.safetensors.index.json; download the model again."
