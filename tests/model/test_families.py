from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from random_cases import CASES, config_of

from colibrid.errors import ModelError
from colibrid.model.families import FAMILIES, family_of
from colibrid.model.families.config import Config
from colibrid.model.families.rope import inverse_frequencies
from colibrid.model.layout import planned_files

if TYPE_CHECKING:
    from colibrid.model.families.base import Description

QWEN = config_of(next(case for case in CASES if case.family == "qwen2_moe"))
MIXTRAL = config_of(next(case for case in CASES if case.family == "mixtral"))
QWEN3 = config_of(next(case for case in CASES if case.family == "qwen3_moe"))
OLMOE = config_of(next(case for case in CASES if case.family == "olmoe"))


def _read(base: dict[str, Any], **changes: Any) -> Description:
    config = {**base, **changes}
    return family_of(config).read(Config(config))


# The shapes of published models, and their parameters as counted by the reference.
PUBLISHED = [
    (
        {**QWEN3, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_window_layers": 48}
        | {"rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
        30_532_122_624,
    ),
    (
        {**OLMOE, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096}
        | {"num_experts": 64, "num_experts_per_tok": 8, "rope_scaling": None, "clip_qkv": None},
        6_919_161_856,
    ),
]


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED, ids=["Qwen3-30B-A3B", "OLMoE-1B-7B"])
def test_published_shapes_have_their_parameters(config: dict[str, Any], parameters: int) -> None:
    """The tensors of a pack hold as many values as the model has parameters."""
    read = family_of(config).read(Config(config))
    files = planned_files(read.hyperparameters, read.layers, "bf16", "flat")
    assert sum(rows * cols for file in files for rows, cols in (part.shape for part in file.sections)) == parameters


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
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling asks for RoPE scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_parameters asks for .* 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor is miss"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 2, "high_freq_factor": 2}},
            "high_freq_factor is 2, expected more than",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, "rope_scaling.truncate is 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "rope_scaling.rope_theta is 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by kind of layer"),
        ({"rope_scaling": "yarn"}, "expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding_window is missing"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window is false"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types is .*expected 2 of"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*expected 2 of"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"sliding_window": 64}, "sliding_window is 64, this family has no windows"),
        ({"attention_bias": 1}, "attention_bias is 1"),
    ],
)
def test_what_olmoe_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """Clipped projections and windows are no part of what is computed."""
    with pytest.raises(ModelError, match=message):
        _read(OLMOE, **changes)


def test_a_window_that_is_never_reached_is_none() -> None:
    """A window as long as the context, or switched off, changes nothing."""
    assert _windows(QWEN, use_sliding_window=False, sliding_window=4) == [0, 0]
    assert _windows(MIXTRAL, sliding_window=128) == [0, 0]
    assert _windows(MIXTRAL, sliding_window=127) == [127, 127]
    assert _windows(OLMOE, sliding_window=4096) == [0]


def test_qwen2_windows_follow_layer_types_or_max_window_layers() -> None:
    """Listed layers, or every second one below the bound, dense or not."""
    window = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4, "mlp_only_layers": [2]}
    assert _windows(QWEN, **window) == [9, 0, 9, 0]
    assert _windows(QWEN, **window, max_window_layers=2) == [9, 0, 0, 0]
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert _windows(QWEN, **window, layer_types=kinds) == [0, 9, 0, 9]


def test_qwen3_windows_are_of_all_layers_or_none() -> None:
    """max_window_layers says nothing in this family; layer_types that ask for a mixture are refused."""
    assert _windows(QWEN3, sliding_window=9, max_window_layers=1) == [0, 0]
    assert _windows(QWEN3, use_sliding_window=True, sliding_window=9, max_window_layers=1) == [9, 9]
    with pytest.raises(ModelError, match="layer_types is .*only 'sliding_attention' fits"):
        _read(QWEN3, use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"])


def test_norms_of_q_and_k_and_biases_belong_to_their_families() -> None:
    """Qwen3 norms each head, OLMoE all of q and all of k; attention_bias is of all four projections."""
    for base, qk_norm in ((QWEN, "none"), (MIXTRAL, "none"), (QWEN3, "head"), (OLMOE, "row")):
        hyper = _read(base).hyperparameters
        assert (hyper.qk_norm, hyper.qkv_bias, hyper.out_bias) == (qk_norm, base is QWEN, False)
    for base in (QWEN3, OLMOE):
        hyper = _read(base, attention_bias=True).hyperparameters
        assert (hyper.qkv_bias, hyper.out_bias) == (True, True)


@pytest.mark.parametrize("base", [MIXTRAL, QWEN, QWEN3, OLMOE], ids=lambda base: base["model_type"])
def test_the_number_of_experts_may_have_either_name(base: dict[str, Any]) -> None:
    """`num_experts` and `num_local_experts` are one field."""
    plain = {key: value for key, value in base.items() if key not in ("num_experts", "num_local_experts")}
    for name in ("num_experts", "num_local_experts"):
        assert _read({**plain, name: 11}).layers[0].experts == 11


def _windows(base: dict[str, Any], **changes: Any) -> list[int]:
    return [layer.window for layer in _read(base, **changes).layers]
