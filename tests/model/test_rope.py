from __future__ import annotations

from typing import Any

import pytest

from colibrid.errors import ModelError
from colibrid.model.families.config import Config
from colibrid.model.families.rope import inverse_frequencies, read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# (config.json, head_dim, max_positions, every fifth frequency and the factor of float32 transformers 5.24)
REFERENCE: list[tuple[dict[str, Any], int, int, list[float], float]] = [
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
        16,
        4096,
        [0.333333343, 0.00105409266],
        1.0,
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "rope_theta": 1e6},
        128,
        131072,
        [
            1.0,
            0.339820832,
            0.115478203,
            0.0392418988,
            0.0133352149,
            0.0041317381,
            0.00106436096,
            0.000246258394,
            4.44569851e-05,
            1.51074091e-05,
            5.13381246e-06,
            1.74457659e-06,
            5.92843435e-07,
        ],
        1.138629436111989,
    ),
    (
        {
            "rope_scaling": {
                **YARN,
                "beta_fast": 8,
                "beta_slow": 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
            "rope_theta": 5e3,
        },
        32,
        4000,
        [1.0, 0.0698347986, 0.00121922465, 8.5144311e-05],
        1.0648216253695715,
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}, "rope_theta": 5e3},
        32,
        4000,
        [1.0, 0.0698347986, 0.00259085232, 8.5144311e-05],
        1.5,
    ),
    (
        {"rope_scaling": {**YARN, "factor": None}, "rope_theta": 5e3},
        32,
        4000,
        [1.0, 0.0548701994, 0.00121922465, 8.5144311e-05],
        1.138629436111989,
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 512}
        | {"rope_theta": 5e5},
        64,
        131072,
        [1.0, 0.107239477, 0.00920024514, 0.0010655598, 0.000137124094, 1.76461381e-05, 2.27083524e-06],
        1.0693147180559945,
    ),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "rope_theta": 5e5},
        128,
        131072,
        [
            1.0,
            0.358730227,
            0.128687382,
            0.0461640507,
            0.0165604409,
            0.00594073068,
            0.00137189368,
            9.55621217e-05,
            3.42810235e-05,
            1.22976389e-05,
            4.41153452e-06,
            1.58255079e-06,
            5.6770881e-07,
        ],
        1.0,
    ),
    (
        {"rope_scaling": {**LLAMA3, "factor": 32.0}, "original_max_position_embeddings": 512, "rope_theta": 5e5},
        64,
        131072,
        [1.0, 0.128687382, 0.00238633342, 6.65974876e-05, 8.57025589e-06, 1.10288363e-06, 1.41927202e-07],
        1.0,
    ),
]


@pytest.mark.parametrize(("config", "head_dim", "max_positions", "wanted", "scale"), REFERENCE)
def test_scaled_frequencies_are_those_of_the_reference(
    config: dict[str, Any], head_dim: int, max_positions: int, wanted: list[float], scale: float
) -> None:
    """Each kind gives the reference's frequencies to the accuracy of its fp32, and its factor."""
    rope = read_rope(Config(config), head_dim, 1e4, max_positions)
    assert len(rope.inv_freq) == head_dim // 2
    assert rope.inv_freq[::5] == pytest.approx(wanted, rel=1e-6, abs=0)
    assert rope.scale == pytest.approx(scale, rel=1e-12)


def test_a_scaling_in_the_older_place_wins() -> None:
    """`rope_scaling` that is not empty is read alone, with the base beside it; empty, it says nothing."""
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 500.0}
    both = read_rope(Config({**newer, "rope_scaling": {"type": "linear", "factor": 2.0}}), 8, 1e4, 64)
    assert both.inv_freq == tuple(frequency / 2.0 for frequency in inverse_frequencies(500.0, 8))
    assert read_rope(Config({**newer, "rope_scaling": {}}), 8, 1e4, 64).inv_freq == inverse_frequencies(77.0, 8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "su", 3])
def test_other_kinds_are_refused_by_name(kind: object) -> None:
    """The message has the kind that was asked for and those that are there."""
    for field in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelError, match=f"{field} asks for RoPE scaling {kind!r}; supported: default, linear"):
            read_rope(Config({field: {"rope_type": kind, "factor": 2.0}}), 8, 1e4, 64)


def test_yarn_without_stretching_is_default_rope() -> None:
    """A factor of 1 changes neither frequencies nor cosines."""
    rope = read_rope(Config({"rope_scaling": {"type": "yarn", "factor": 1}}), 16, 1e4, 64)
    assert rope.inv_freq == pytest.approx(inverse_frequencies(1e4, 16), rel=1e-15)
    assert rope.scale == 1.0
