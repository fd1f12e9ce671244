from __future__ import annotations

import itertools

from random_cases import CASES, config_of

from colibrid.model import layout
from colibrid.model.families import family_of
from colibrid.model.families.config import Config


def _planned(index: int, matrices: layout.Layout = "flat") -> tuple[layout.PackFile, ...]:
    config = config_of(CASES[index])
    read = family_of(config).read(Config(config))
    return layout.planned_files(read.hyperparameters, read.layers, "bf16", matrices)


def test_sections_are_aligned_and_do_not_overlap() -> None:
    """Every section starts on 256 bytes and after the end of the one before it; the last one ends the file."""
    for index, matrices in itertools.product(range(len(CASES)), ("flat", "rows16", "mma")):
        for file in _planned(index, matrices):
            end = 0
            for section in file.sections:
                assert section.offset % 256 == 0
                assert section.offset >= end
                end = section.offset + section.bytes
            assert end == file.bytes


def test_small_tensors_are_fp32() -> None:
    """Norms, biases, routers and the shared gate are fp32 in a bf16 pack, matrices are not."""
    kinds = {(section.role, section.precision) for section in _planned(0)[0].sections}
    assert kinds == {
        *((role, "fp32") for role in ("final_norm", "attn_norm", "qkv_bias", "ffn_norm", "router", "shared_gate")),
        *((role, "bf16") for role in ("embedding", "qkv", "out", "gate", "up", "down")),
    }


def test_norms_of_q_and_k_and_biases_have_the_width_of_what_they_act_on() -> None:
    """Per head in Qwen3-MoE, of all heads in OLMoE; fp32 in a bf16 pack."""
    for name, q, k, width in (("qwen3-dense-second-biases", 16, 16, 32), ("olmoe-gqa-biases", 64, 32, 64)):
        index = next(index for index, case in enumerate(CASES) if case.name == name)
        wanted = {("q_norm", (1, q), "fp32"), ("k_norm", (1, k), "fp32"), ("out_bias", (1, width), "fp32")}
        for layer in range(3):
            of_layer = [section for section in _planned(index)[0].sections if section.layer == layer]
            assert wanted <= {(section.role, section.shape, section.precision) for section in of_layer}


def test_an_expert_is_gate_up_down_transposed() -> None:
    """A routed expert's file holds three (width, hidden) matrices in this order."""
    file = next(file for file in _planned(0) if file.name == "expert_1_3.bin")
    assert [(section.role, section.shape) for section in file.sections] == [
        ("gate", (24, 32)),
        ("up", (24, 32)),
        ("down", (24, 32)),
    ]


def test_rows16_pads_rows_and_does_not_transpose_down() -> None:
    """In a pack for the CPU matrices are padded to 16 rows, `down` is (hidden, width), vectors stay flat."""
    file = next(file for file in _planned(0, "rows16") if file.name == "expert_1_3.bin")
    assert [(s.role, s.shape, s.padded_shape, s.layout, s.bytes) for s in file.sections] == [
        ("gate", (24, 32), (32, 32), "rows16", 2048),
        ("up", (24, 32), (32, 32), "rows16", 2048),
        ("down", (32, 24), None, "rows16", 1536),
    ]
    vectors = {section.role for section in _planned(0, "rows16")[0].sections if section.layout == "flat"}
    assert vectors == {"final_norm", "attn_norm", "qkv_bias", "ffn_norm", "shared_gate"}


def test_mma_pads_both_sides_and_leaves_the_router_flat() -> None:
    """In a pack for CUDA matrices are padded to tiles of 16 x 16, `down` is (hidden, width), the router stays flat."""
    file = next(file for file in _planned(0, "mma") if file.name == "expert_1_3.bin")
    assert [(s.role, s.shape, s.padded_shape, s.layout, s.bytes) for s in file.sections] == [
        ("gate", (24, 32), (32, 32), "mma", 2048),
        ("up", (24, 32), (32, 32), "mma", 2048),
        ("down", (32, 24), (32, 32), "mma", 2048),
    ]
    flat = {section.role for section in _planned(0, "mma")[0].sections if section.layout == "flat"}
    assert flat == {"final_norm", "attn_norm", "qkv_bias", "ffn_norm", "router", "shared_gate"}


def test_packed_removes_the_gaps() -> None:
    """Without gaps a file is as long as its sections together."""
    for file in _planned(4):
        tight = layout.packed(file)
        assert tight.bytes == sum(section.bytes for section in file.sections)
        assert next(section.offset for section in tight.sections) == 0
