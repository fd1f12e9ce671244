"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): each head of q and k is normed before RoPE; no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.model.families.base import (
    MAX_LAYERS,
    MAX_WIDTH,
    Description,
    Family,
    Names,
    expert_count,
    is_dense,
    moe_layer,
    read_hyperparameters,
    sliding_window,
)
from colibrid.model.manifest import Layer

if TYPE_CHECKING:
    from colibrid.model.families.config import Config


def read(config: Config) -> Description:
    bias = config.flag("attention_bias", default=False)  # of all four projections
    hyper = read_hyperparameters(
        config, qkv_bias=bias, out_bias=bias, qk_norm="head", rope_theta=10_000.0, rms_norm_eps=1e-6
    )
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    window = _window(config)
    return Description(hyper, tuple(_layer(config, index, count, window) for index in range(count)))


def _window(config: Config) -> int:
    """The window of every layer: this family has one for all or none, whatever max_window_layers says."""
    used = config.flag("use_sliding_window", default=False)
    kinds = config.raw("layer_types")
    if kinds is not None:
        kind = "sliding_attention" if used else "full_attention"
        if not isinstance(kinds, list) or any(other != kind for other in kinds):
            raise config.error("layer_types", f"is {kinds!r}, only {kind!r} fits use_sliding_window here")
    return sliding_window(config) if used else 0


def _layer(config: Config, index: int, count: int, window: int) -> Layer:
    if is_dense(config, index, count):
        return Layer(ffn="dense", window=window, shared_width=config.integer("intermediate_size", 1, MAX_WIDTH))
    return moe_layer(
        config,
        index,
        experts=expert_count(config),
        width=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        renormalise=config.flag("norm_topk_prob", default=False),
        window=window,
    )


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    read=read,
    names=Names(moe=("mlp",), router="gate.weight", expert=("gate_proj", "up_proj", "down_proj"), dense="mlp"),
)
