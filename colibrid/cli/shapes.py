"""The shapes of published models, to measure with random weights: what their config.json says, without their files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
_QWEN15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
_OLMOE_1B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
_MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
}
_COMMON: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen1.5-moe-a2.7b": _QWEN15_MOE,
    "olmoe-1b-7b": _OLMOE_1B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
}


def write_shape(name: str, folder: Path) -> Path:
    """A folder called `name` whose config.json describes the shape; returns it."""
    target = folder / name
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(_COMMON | SHAPES[name], indent=1))
    return target
