"""Converts a GGUF file to a Hugging Face folder in the cache, so that everything after this reads one format.

Weights are dequantised one tensor at a time. Quantised tensors are stored as float16: GGUF's own scales are float16,
its steps are a hundred times coarser than the rounding, and the folder is half of what float32 would take. Tensors
that the file holds as float32 (norms, biases), bfloat16 or float16 keep their type. The folder is the model from then
on: whoever compares against Hugging Face loads the same folder and so the same values.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from fullbore.errors import ModelError
from fullbore.model.cache import complete_or_absent, exclusive, models_folder, require_free_space
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.spec import ModelSpec

CONVERTER_VERSION = 1  # part of a converted folder's name; raise it when the same file would be converted differently

_SHARD_BYTES = 2_000_000_000

# general.architecture (and whether it has experts) -> Hugging Face class and model_type.
_ARCHITECTURES = {
    ("llama", False): ("LlamaForCausalLM", "llama"),  # Mistral and SmolLM too
    ("llama", True): ("MixtralForCausalLM", "mixtral"),
    ("qwen2", False): ("Qwen2ForCausalLM", "qwen2"),
    ("qwen3", False): ("Qwen3ForCausalLM", "qwen3"),
    ("qwen3moe", True): ("Qwen3MoeForCausalLM", "qwen3_moe"),
}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_QWEN_MOE_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}

# tokenizer.ggml.pre of byte-level vocabularies that transformers splits as their models do ...
_KNOWN_SPLITS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-2")
# ... of those among them that take a whole word that is in the vocabulary without merging it ...
_WHOLE_WORD_SPLITS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
# ... and of those where each digit stands alone before GPT-2's splitting, which transformers leaves out.
_DIGIT_SPLITS = ("smollm", "starcoder", "refact")


class _Source(NamedTuple):
    """One tensor to write: where it comes from and what it becomes."""

    name: str
    tensor: Any  # gguf.ReaderTensor
    expert: int | None  # index into a stack of experts
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def convert_gguf(path: Path, name: str | None = None, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """The Hugging Face folder of a GGUF file: converted into the cache at first, found there afterwards.

    `name` begins the folder's name (default: the file's). `progress(what, done_bytes, total_bytes)` is called while
    weights are written. Several processes may call it at once; one converts, the others wait.

    Raises:
        ModelError: the file is broken, its model, tokenizer or a tensor's type is not supported, or the disk is full.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from None
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {CONVERTER_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = models_folder() / f"{name or path.stem}-{key}"
    if _is_complete(target):
        return target
    with exclusive(target):
        if not _is_complete(target):  # another process may have converted it while we waited
            with complete_or_absent(target) as folder:
                _convert(path, folder, progress or (lambda what, done, total: None))
    return target


def _is_complete(folder: Path) -> bool:
    """Folders appear whole, so this catches only what was damaged later."""
    try:
        Checkpoint.open(folder)
        ModelSpec.from_folder(folder)
    except ModelError:
        return False
    return (folder / "tokenizer.json").exists()


def _convert(path: Path, folder: Path, progress: Callable[[str, int, int], None]) -> None:
    file_bytes = path.stat().st_size
    progress("reading the GGUF file", 0, file_bytes)
    reader = _open(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, metadata, tensors)
    sources = _sources(path, config, tensors)
    _check_complete(path, config, sources)
    require_free_space(folder, sum(source.nbytes for source in sources) + 100_000_000)
    _save_tokenizer(path, metadata, folder)
    progress("reading the GGUF file", file_bytes, file_bytes)
    _save_weights(path, config, sources, folder, progress)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config, metadata))


def _open(path: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever numpy does when the file is cut short
        raise ModelError(f"{path} is not a complete GGUF file ({error}); download it again.") from None
    split = reader.fields.get("split.count")
    if split is not None and split.contents() > 1:
        raise ModelError(f"{path} is one part of several; merge them first: llama-gguf-split --merge FIRST_PART OUT.")
    return reader


# ------------------------------------------------------------------------------------------------------- config


def _config(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """What Hugging Face's config.json says, from the file's metadata."""
    arch = str(metadata.get("general.architecture"))
    has_experts = bool(metadata.get(f"{arch}.expert_count"))
    if (arch, has_experts) not in _ARCHITECTURES or "token_embd.weight" not in tensors:
        supported = ", ".join(dict.fromkeys(name for name, _ in _ARCHITECTURES))
        raise ModelError(
            f"{path}: GGUF architecture {arch} is not supported; supported are {supported}. "
            "Use the model's Hugging Face folder if there is one."
        )
    architecture, model_type = _ARCHITECTURES[arch, has_experts]

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None or isinstance(value, list):
            raise ModelError(f"{path}: {arch}.{key} is {'missing' if value is None else 'not one number'}.")
        return value

    if metadata.get(f"{arch}.attention.sliding_window"):
        raise ModelError(f"{path}: sliding-window attention is not supported for GGUF files.")
    heads = read("attention.head_count")
    head_dim = read("attention.key_length", read("rope.dimension_count", read("embedding_length") // heads))
    if read("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: rotary embedding of a part of each head is not supported.")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read("context_length"),
        "rms_norm_eps": _shortest(read("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(path, metadata, tensors, head_dim),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "mixtral":
        config |= {"num_local_experts": read("expert_count"), "num_experts_per_tok": read("expert_used_count")}
    if model_type == "qwen3_moe":
        config |= {
            "num_experts": read("expert_count"),
            "num_experts_per_tok": read("expert_used_count"),
            "moe_intermediate_size": read("expert_feed_forward_length"),
            "norm_topk_prob": True,  # what llama.cpp computes for this architecture
        }
    return config


def _rope_parameters(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], head_dim: int) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _shortest(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
    }
    if "rope_freqs.weight" in tensors:
        return parameters | _llama3_scaling(path, tensors["rope_freqs.weight"].data, parameters["rope_theta"], head_dim)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling == "none":
        return parameters
    factor = _shortest(metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    if scaling == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if scaling == "yarn" and original:
        return parameters | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{path}: rotary scaling {scaling} is not supported for GGUF files.")


def _llama3_scaling(path: Path, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling: the file holds only what each frequency is divided by, so find parameters that give that."""
    factor = _shortest(float(divisors.max()))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(f"{path}: its rotary frequencies (rope_freqs.weight) are not those of Llama 3.1 or 3.2.")
    return scaling


def _generation_config(config: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": sorted({token for token in ends if token is not None}),
        "pad_token_id": config["pad_token_id"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


# ------------------------------------------------------------------------------------------------------ weights


def _sources(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> list[_Source]:
    """Every tensor to write, under the names of published Hugging Face checkpoints (experts one by one)."""
    names = _LAYER_NAMES | (_MIXTRAL_NAMES if config["model_type"] == "mixtral" else _QWEN_MOE_NAMES)
    sources = []
    for tensor in tensors.values():
        if tensor.name == "rope_freqs.weight":  # now in the config
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        dtype = _STORED_DTYPES.get(tensor.tensor_type, torch.float16)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if tensor.name in _TOP_NAMES:
            sources.append(_Source(_TOP_NAMES[tensor.name], tensor, None, shape, dtype))
        elif match and match[2] in names:
            name = f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
            if "{expert}" in name:
                experts = range(shape[0])
                sources += [_Source(name.format(expert=i), tensor, i, shape[1:], dtype) for i in experts]
            else:
                sources.append(_Source(name, tensor, None, shape, dtype))
        else:
            raise ModelError(f"{path}: tensor {tensor.name} has no place in a {config['architectures'][0]}.")
    return sources


_STORED_DTYPES = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


def _check_complete(path: Path, config: dict[str, Any], sources: list[_Source]) -> None:
    """As many weights as the architecture has: neither a tensor missing nor one too many."""
    spec = ModelSpec.from_config(config)
    expected = sum(layer.num_params for layer in spec.layers) + spec.hidden_size
    expected += spec.embedding_params * (1 if spec.tied_embeddings else 2)
    found = sum(math.prod(source.shape) for source in sources)
    if found != expected:
        raise ModelError(f"{path} holds {found} weights but its metadata describes {expected}; download it again.")


def _save_weights(
    path: Path,
    config: dict[str, Any],
    sources: list[_Source],
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> None:
    total_bytes = sum(source.nbytes for source in sources)
    done_bytes = 0
    shards = list(_shards(sources))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {}
        for source in shard:
            weights[source.name] = _dequantize(path, config, source)
            weight_map[source.name] = file_name
            done_bytes += source.nbytes
            progress("converting weights", done_bytes, total_bytes)
        try:
            save_file(weights, folder / file_name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ModelError(f"{folder / file_name} cannot be written ({error}).") from None
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(sources: list[_Source]) -> Iterator[list[_Source]]:
    shard: list[_Source] = []
    for source in sources:
        if shard and sum(other.nbytes for other in shard) + source.nbytes > _SHARD_BYTES:
            yield shard
            shard = []
        shard.append(source)
    yield shard


def _dequantize(path: Path, config: dict[str, Any], source: _Source) -> torch.Tensor:
    data = source.tensor.data if source.expert is None else source.tensor.data[source.expert]
    try:
        values = gguf.dequantize(data, source.tensor.tensor_type)
    except NotImplementedError:
        kind = source.tensor.tensor_type.name
        raise ModelError(f"{path}: tensors of type {kind} cannot be read; use another quantisation.") from None
    if config["model_type"] in ("llama", "mixtral"):
        if ".q_proj." in source.name:
            values = _restore_rotary_order(values, config["num_attention_heads"])
        elif ".k_proj." in source.name:
            values = _restore_rotary_order(values, config["num_key_value_heads"])
    # A copy in any case: the array may be a view of the memory-mapped file.
    return torch.from_numpy(np.array(values)).reshape(source.shape).to(source.dtype)


def _restore_rotary_order(values: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF files of the Llama family pair neighbouring rows of a head for rotation; Hugging Face pairs its halves."""
    rest = values.shape[1:]
    pairs = values.reshape(num_heads, -1, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(values.shape)


# ---------------------------------------------------------------------------------------------------- tokenizer


def _save_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template."""
    from transformers import AutoTokenizer  # takes seconds to import, and is needed at the first start only

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in _KNOWN_SPLITS + _DIGIT_SPLITS):
        raise ModelError(
            f"{path}: its tokenizer ({kind}, {split}) is not supported; use the model's Hugging Face folder instead."
        )
    try:
        # Alone in a folder: transformers would mix in the tokenizer files of another model that lie beside it.
        with tempfile.TemporaryDirectory() as alone:
            (Path(alone) / "model.gguf").symlink_to(path.resolve())
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
    except Exception as error:
        raise ModelError(f"{path}: its tokenizer cannot be read ({error}); use its Hugging Face folder.") from None
    if split in _DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if split in _WHOLE_WORD_SPLITS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the library raises no other class where the disk is full
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be written ({error}).") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
