"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, hummingbird): QKV bias, a gated shared expert, dense layers."""

from __future__ import annotations

from colibrid.errors import ModelError
from colibrid.model.families.base import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    Config,
    Description,
    Family,
    Names,
    moe_layer,
    read_hyperparameters,
    refuse_window,
)
from colibrid.model.manifest import Layer


def read(config: Config) -> Description:
    refuse_window(config, used=config.flag("use_sliding_window", default=False))
    hyper = read_hyperparameters(
        config, qkv_bias=config.flag("qkv_bias", default=True), rope_theta=10_000.0, rms_norm_eps=1e-6
    )
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return Description(hyper, tuple(_layer(config, index, count) for index in range(count)))


def _layer(config: Config, index: int, count: int) -> Layer:
    dense = config.integers("mlp_only_layers")
    if any(not 0 <= layer < count for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers {list(dense)} names a layer outside 0 to {count - 1}")
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    experts = config.integer("num_experts", 0, MAX_EXPERTS)
    if index in dense or experts == 0 or (index + 1) % step:
        return Layer(ffn="dense", shared_width=config.integer("intermediate_size", 1, MAX_WIDTH))
    return moe_layer(
        config,
        index,
        experts=experts,
        width=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        renormalise=config.flag("norm_topk_prob", default=False),
        shared_width=config.integer("shared_expert_intermediate_size", 0, MAX_WIDTH),
    )


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    read=read,
    names=Names(
        moe=("mlp",),
        router="gate.weight",
        expert=("gate_proj", "up_proj", "down_proj"),
        dense="mlp",
        shared="shared_expert",
        shared_gate="shared_expert_gate.weight",
    ),
)
