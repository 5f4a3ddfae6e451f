"""Tiny random models of every supported architecture, saved as real checkpoints are. Use: `from tiny_models import ...`

Greedy decoding of them is well defined: weights are scaled so that the two best logits (and the router's scores) are
seldom close, while every weight, bias, norm and position still matters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_TOKEN_ID = VOCAB_SIZE - 1  # <|im_end|>

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

# What each architecture needs beside the sizes that all share. "kimi_k2": DeepSeek-V3 under Kimi's model_type.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **_GQA},
    "MistralForCausalLM": {"model_type": "mistral", "head_dim": 24, "sliding_window": None, **_GQA},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **_GQA},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 24, **_GQA},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **_GQA,
    },
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **_GQA},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **_MLA},
    "kimi_k2": {"model_type": "deepseek_v3", **_MLA},
}


def make_tiny_model(
    architecture: str,
    folder: Path | str,
    *,
    tied: bool = False,
    num_layers: int = 4,
    seed: int = 0,
    hidden_size: int = 64,
    context_length: int = 512,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Builds a random float32 model with its tokenizer in `folder` (a Hugging Face folder) and returns the folder.

    `architecture` is a key of ARCHITECTURES. Experts are saved one tensor each and a tied model has no
    `lm_head.weight`, as in published checkpoints. `max_shard_size`, e.g. "100KB", makes a sharded checkpoint.
    """
    folder = Path(folder)
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
        **ARCHITECTURES[architecture],
        **config_overrides,
    }
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_with_random_weights(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_byte_tokenizer(context_length).save_pretrained(folder)
    if architecture == "kimi_k2":
        _rewrite_model_type(folder / "config.json", "kimi_k2")
    return folder


def poison_token(folder: Path, token_id: int) -> None:
    """Makes a token's embedding in an untied, unsharded tiny model NaN: sequences that contain it have NaN logits."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" in tensors, "tied, the token's own logit would be NaN in every sequence"
    tensors["model.embed_tokens.weight"][token_id] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def make_byte_tokenizer(context_length: int = 512) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and three special tokens, and a chat template in the style of ChatML."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        model_max_length=context_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def _fill_with_random_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    # The bias that steers DeepSeek's router is a buffer, but saved; rotary frequencies are not ours to change.
    tensors.update((name, tensor) for name, tensor in model.named_buffers() if name.endswith("correction_bias"))
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.2 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(0.2 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            # Logits with a standard deviation of about 2, whether the matrix is the head too or not.
            tensor.copy_(noise * 2 / math.sqrt(tensor.shape[-1]))
        else:
            gain = 2.0 if ".gate.weight" in name else 1.4 if "q_" in name or "k_proj" in name else 1.0
            tensor.copy_(noise * gain / math.sqrt(tensor.shape[-1]))


def _rewrite_model_type(path: Path, model_type: str) -> None:
    config = json.loads(path.read_text())
    config["model_type"] = model_type
    path.write_text(json.dumps(config, indent=2))
