"""OLMoE (OLMoE-1B-7B): q and k are normed over all their heads before RoPE; no shared expert, no dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.model.families.base import (
    MAX_LAYERS,
    MAX_WIDTH,
    Description,
    Family,
    Names,
    expert_count,
    moe_layer,
    read_hyperparameters,
    sliding_window,
)

if TYPE_CHECKING:
    from colibrid.model.families.config import Config


def read(config: Config) -> Description:
    if config.raw("clip_qkv") is not None:
        raise config.error("clip_qkv", f"is {config.raw('clip_qkv')!r}, clipped projections are not supported")
    if config.raw("sliding_window") is not None and sliding_window(config):
        raise config.error("sliding_window", f"is {sliding_window(config)}, this family has no windows")
    bias = config.flag("attention_bias", default=False)  # of all four projections
    hyper = read_hyperparameters(
        config, qkv_bias=bias, out_bias=bias, qk_norm="row", rope_theta=10_000.0, rms_norm_eps=1e-5
    )
    experts = expert_count(config)
    width = config.integer("intermediate_size", 1, MAX_WIDTH)
    renormalise = config.flag("norm_topk_prob", default=False)
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return Description(
        hyper,
        tuple(
            moe_layer(config, index, experts=experts, width=width, renormalise=renormalise) for index in range(count)
        ),
    )


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    read=read,
    names=Names(moe=("mlp",), router="gate.weight", expert=("gate_proj", "up_proj", "down_proj")),
)
