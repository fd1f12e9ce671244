"""The random checkpoints: which configurations there are, and the prompts that their golden files answer."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from colibrid.model.manifest import FloatPrecision

DTYPE_NAMES: dict[FloatPrecision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PROMPT_LENGTHS = (23, 70)  # the second crosses a chunk border of 64


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `config` overrides the family's base below."""

    name: str
    family: str  # a key of _BASE
    config: dict[str, Any]
    precision: FloatPrecision = "fp32"
    fused: bool = False  # experts.gate_up_proj and experts.down_proj
    shards: int = 1
    seed: int = 0


_BASE: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 64,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    },
}
_COMMON = {
    "vocab_size": 20,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 19,
}

CASES: tuple[Case, ...] = (
    Case(name="qwen-tied-gqa", family="qwen2_moe", seed=1, config={"tie_word_embeddings": True}),
    Case(
        name="qwen-64-experts-k8",
        family="qwen2_moe",
        seed=2,
        precision="bf16",
        fused=True,
        shards=3,
        config={"num_hidden_layers": 1, "num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    ),
    Case(
        name="qwen-dense-first-renormalised",
        family="qwen2_moe",
        seed=3,
        shards=2,
        config={
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    Case(
        name="qwen-every-second-no-shared-k1",
        family="qwen2_moe",
        seed=4,
        fused=True,
        config={
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "num_experts": 6,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 0,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        name="qwen-odd-sizes",
        family="qwen2_moe",
        seed=5,
        precision="bf16",
        config={
            "num_hidden_layers": 4,
            "hidden_size": 44,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 22,
            "num_experts": 16,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 19,
            "shared_expert_intermediate_size": 37,
            "intermediate_size": 51,
            "mlp_only_layers": [1, 3],
            "vocab_size": 17,
            "eos_token_id": 16,
        },
    ),
    Case(name="qwen-fp16", family="qwen2_moe", seed=6, precision="fp16", config={"hidden_size": 64, "num_experts": 5}),
    Case(
        name="mixtral-gqa-sharded",
        family="mixtral",
        seed=7,
        shards=2,
        config={"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    Case(
        name="mixtral-k1-tied-fused",
        family="mixtral",
        seed=8,
        precision="bf16",
        fused=True,
        config={
            "num_hidden_layers": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    Case(
        name="mixtral-deep-head-dim",
        family="mixtral",
        seed=9,
        precision="bf16",
        config={
            "num_hidden_layers": 4,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
        },
    ),
    Case(
        name="mixtral-wide-vocabulary",
        family="mixtral",
        seed=10,
        config={"num_hidden_layers": 1, "vocab_size": 300, "eos_token_id": 299},
    ),
    Case(name="qwen3-gqa-renormalised", family="qwen3_moe", seed=11, shards=2, config={"head_dim": 20}),
    Case(
        name="qwen3-dense-second-biases",
        family="qwen3_moe",
        seed=12,
        precision="bf16",
        fused=True,
        config={
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        name="qwen3-window",
        family="qwen3_moe",
        seed=13,
        config={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_key_value_heads": 1},
    ),
    Case(
        name="qwen3-yarn",
        family="qwen3_moe",
        seed=14,
        config={"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    Case(
        name="qwen3-yarn-every-setting",
        family="qwen3_moe",
        seed=15,
        precision="bf16",
        config={
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 2.5,
                "original_max_position_embeddings": 51,
                "beta_fast": 6,
                "beta_slow": 0.5,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        },
    ),
    Case(
        name="olmoe-64-experts-k8",
        family="olmoe",
        seed=16,
        fused=True,
        config={"num_hidden_layers": 1, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    Case(
        name="olmoe-gqa-biases",
        family="olmoe",
        seed=17,
        precision="bf16",
        config={"num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True, "num_hidden_layers": 3},
    ),
    Case(
        name="olmoe-linear",
        family="olmoe",
        seed=18,
        config={"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    Case(
        name="olmoe-yarn-given-factor",
        family="olmoe",
        seed=19,
        precision="fp16",
        config={
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 0.8,
                "beta_fast": 2.0,
            }
        },
    ),
    Case(
        name="mixtral-llama3",
        family="mixtral",
        seed=20,
        config={
            "hidden_size": 64,
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Case(
        name="mixtral-window-linear",
        family="mixtral",
        seed=21,
        config={
            "sliding_window": 16,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0},
        },
    ),
    Case(
        name="qwen-window-below-third-layer",
        family="qwen2_moe",
        seed=22,
        config={
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    Case(
        name="qwen-window-by-layer-types",
        family="qwen2_moe",
        seed=23,
        precision="bf16",
        config={
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
)


# What the CUDA kernels take: 16-bit weights, heads of 32, 64 or 128, widths that are multiples of 16.
CUDA_CASES: tuple[Case, ...] = (
    Case(
        name="qwen2", family="qwen2_moe", precision="bf16", seed=31,
        config={
            "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1],
        },
    ),
    Case(
        name="mixtral-fp16-window", family="mixtral", precision="fp16", seed=32,
        config={"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 9},
    ),
    Case(
        name="qwen3", family="qwen3_moe", precision="bf16", seed=33,
        config={
            "hidden_size": 48, "head_dim": 32, "num_attention_heads": 4, "moe_intermediate_size": 16,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        name="olmoe-k4", family="olmoe", precision="bf16", seed=34,
        config={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32},
    ),
)  # fmt: skip


def config_of(case: Case) -> dict[str, Any]:
    """config.json."""
    merged = {**_COMMON, **_BASE[case.family], **case.config}
    merged["torch_dtype"] = DTYPE_NAMES[case.precision]
    return {key: value for key, value in merged.items() if value is not None or key == "bos_token_id"}


def prompts_of(case: Case) -> list[list[int]]:
    """Token ids of the prompts that the golden file answers."""
    vocabulary = config_of(case)["vocab_size"]
    raw = np.random.PCG64(1000 + case.seed)
    return [[int(value % vocabulary) for value in raw.random_raw(length)] for length in PROMPT_LENGTHS]
