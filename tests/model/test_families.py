from __future__ import annotations

from typing import Any

import pytest
from random_checkpoints import CASES, config_of

from colibrid.errors import ModelError
from colibrid.model.families import FAMILIES, family_of
from colibrid.model.families.base import Config, Description, inverse_frequencies

QWEN = config_of(next(case for case in CASES if case.family == "qwen2_moe"))
MIXTRAL = config_of(next(case for case in CASES if case.family == "mixtral"))


def _read(base: dict[str, Any], **changes: Any) -> Description:
    config = {**base, **changes}
    return family_of(config).read(Config(config))


def test_an_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    """The message names what was found and every family that can be converted."""
    with pytest.raises(ModelError, match="LlamaForCausalLM is not supported") as caught:
        family_of({"architectures": ["LlamaForCausalLM"]})
    assert all(family.architecture in str(caught.value) for family in FAMILIES)


def test_a_config_without_architectures_is_refused() -> None:
    """A missing or odd `architectures` is a clear error, not a crash."""
    for value in (None, [], "Mixtral", 3):
        with pytest.raises(ModelError, match="not supported"):
            family_of({"architectures": value})


def test_qwen_layers_follow_mlp_only_layers_and_decoder_sparse_step() -> None:
    """A layer is dense if it is listed or if its number plus one is not a multiple of the step."""
    layers = _read(QWEN, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).layers
    assert [layer.ffn for layer in layers] == ["dense", "moe", "dense", "dense", "dense", "moe"]
    assert layers[0].shared_width == QWEN["intermediate_size"]
    assert layers[0].expert_files == ()
    assert layers[1].shared_width == QWEN["shared_expert_intermediate_size"]
    assert layers[1].expert_files[2] == "expert_1_2.bin"


def test_qwen_without_a_shared_expert_has_no_gate_for_it() -> None:
    """Width 0 means that there is neither a shared expert nor its gate."""
    layer = _read(QWEN, shared_expert_intermediate_size=0).layers[0]
    assert (layer.shared_width, layer.shared_gated) == (0, False)


def test_mixtral_always_renormalises_and_has_no_bias() -> None:
    """Mixtral divides kept weights by their sum; it has neither QKV bias nor shared experts."""
    read = _read(MIXTRAL)
    assert not read.hyperparameters.qkv_bias
    assert all(layer.renormalise and not layer.shared_width for layer in read.layers)


def test_rope_base_is_read_from_both_places() -> None:
    """`rope_parameters` wins over `rope_theta`, which wins over the family's default."""
    theta = {**QWEN, "rope_theta": 500.0}
    assert _read(theta).hyperparameters.rope_inv_freq == inverse_frequencies(500.0, 8)
    newer = _read(theta, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    assert newer.hyperparameters.rope_inv_freq == inverse_frequencies(700.0, 8)
    without = {key: value for key, value in MIXTRAL.items() if key != "rope_theta"}
    assert _read(without).hyperparameters.rope_inv_freq == inverse_frequencies(1e6, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "RoPE scaling 'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by kind of layer"),
        ({"rope_scaling": "yarn"}, "expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64 is in use"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "not a multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers is 1000"),
        ({"num_experts": 4096}, "num_experts is 4096"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"mlp_only_layers": [7]}, "mlp_only_layers"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """Unsupported features and impossible values name their field and value."""
    with pytest.raises(ModelError, match=message):
        _read(QWEN, **changes)


def test_a_window_that_is_never_reached_is_accepted() -> None:
    """A window as long as the context, or switched off, changes nothing and is no reason to refuse."""
    assert _read(QWEN, use_sliding_window=False, sliding_window=4).layers[0].window == 0
    assert _read(MIXTRAL, sliding_window=128).layers[0].window == 0
    with pytest.raises(ModelError, match="sliding_window 127"):
        _read(MIXTRAL, sliding_window=127)
