"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, hummingbird): QKV bias, a gated shared expert, dense layers."""

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
    hyper = read_hyperparameters(
        config, qkv_bias=config.flag("qkv_bias", default=True), rope_theta=10_000.0, rms_norm_eps=1e-6
    )
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    windows = _windows(config, count)
    return Description(hyper, tuple(_layer(config, index, count, windows[index]) for index in range(count)))


def _windows(config: Config, count: int) -> list[int]:
    """The window of each layer: by layer_types, else every second one below max_window_layers."""
    used = config.flag("use_sliding_window", default=False)
    kinds = config.raw("layer_types")
    if kinds is None:
        most = config.integer("max_window_layers", 0, MAX_LAYERS, 28)
        windowed = [used and index < most and index % 2 == 0 for index in range(count)]
    elif (
        isinstance(kinds, list)
        and len(kinds) == count
        and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    ):
        windowed = [kind == "sliding_attention" for kind in kinds]
    else:
        raise config.error("layer_types", f"is {kinds!r}, expected {count} of 'full_attention' or 'sliding_attention'")
    if any(windowed) and not used:
        raise config.error("layer_types", "asks for 'sliding_attention', but use_sliding_window is false")
    return [sliding_window(config) if window else 0 for window in windowed]


def _layer(config: Config, index: int, count: int, window: int) -> Layer:
    if is_dense(config, index, count):
        return Layer(ffn="dense", window=window, shared_width=config.integer("intermediate_size", 1, MAX_WIDTH))
    return moe_layer(
        config,
        index,
        experts=expert_count(config),
        width=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        renormalise=config.flag("norm_topk_prob", default=False),
        shared_width=config.integer("shared_expert_intermediate_size", 0, MAX_WIDTH),
        window=window,
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
