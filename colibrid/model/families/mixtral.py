"""Mixtral: no biases, no shared expert, kept router weights always divided by their sum."""

from __future__ import annotations

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


def read(config: Config) -> Description:
    refuse_window(config, used=True)
    hyper = read_hyperparameters(config, qkv_bias=False, rope_theta=1_000_000.0, rms_norm_eps=1e-5)
    experts = config.integer("num_local_experts", 1, MAX_EXPERTS)
    width = config.integer("intermediate_size", 1, MAX_WIDTH)
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return Description(
        hyper,
        tuple(moe_layer(config, index, experts=experts, width=width, renormalise=True) for index in range(count)),
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    read=read,
    names=Names(moe=("block_sparse_moe", "mlp"), router="gate.weight", expert=("w1", "w3", "w2")),
)
