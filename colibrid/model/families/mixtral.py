"""Mixtral: no biases, no shared expert, kept router weights always divided by their sum."""

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
    hyper = read_hyperparameters(config, rope_theta=1_000_000.0, rms_norm_eps=1e-5)
    experts = expert_count(config)
    width = config.integer("intermediate_size", 1, MAX_WIDTH)
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    window = 0 if config.raw("sliding_window") is None else sliding_window(config)
    return Description(
        hyper,
        tuple(
            moe_layer(config, index, experts=experts, width=width, renormalise=True, window=window)
            for index in range(count)
        ),
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    read=read,
    names=Names(moe=("block_sparse_moe", "mlp"), router="gate.weight", expert=("w1", "w3", "w2")),
)
