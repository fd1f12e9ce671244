"""Packs of quantised weights through the CPU's engine, against the float64 forward pass over the same dequantised weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import InProcessEngine, ask, crc32c, pool
from reference import Reference

from colibrid.engine.abi import RequestFlag
from colibrid.model.formats import FORMATS
from colibrid.model.precision import parse_plan
from colibrid.model.random_pack import write_random_pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 100,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 384,
    "intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 100, 40)]
QUANTISED = [name for name, form in FORMATS.items() if form.quantised]
# Of the length of the difference of two vectors of length 1: what codes of 8 bits do to inputs, and what fp32 does.
CODED, EXACT = 0.03, 1e-4


def everywhere(name: str) -> str:
    """All matrices in one format."""
    return f"{name}, embedding={name}, head={name}"


# Experts of one layer in all formats there are, dense matrices in int8.
MIXED = (
    "expert *:0=fp16, expert *:1=int8, expert *:2=int4-g32, expert *:3=fp8, expert *:4=int4-g64-z, expert *:5=bf16, "
    "dense=int8-g128, embedding=int8, head=int8-g128"
)


def written(folder: Path, rules: str) -> Path:
    source = folder / "src"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    write_random_pack(source, folder / "pack", crc32c=crc32c, plan=parse_plan(rules))
    return folder / "pack"


def distance(pack: Path) -> float:
    """Between the pooled vector of the engine and that of the reference."""
    with InProcessEngine(pack, slots=2, max_seq_len=64, prefill_chunk=16) as engine:
        answer, _ = engine.run([pool(PROMPT, RequestFlag.POOL_MEAN), ask(PROMPT[:5], 3)])
        stats = engine.stats()
        assert (stats.allocations_after_open, stats.expert_relaunches) == (0, 0)
    vector = np.frombuffer(answer.pooled, np.float32).astype(np.float64)
    states = Reference(pack).forward(PROMPT)["final_norm"].mean(axis=0)
    return float(np.linalg.norm(vector - states / np.linalg.norm(states)))


@pytest.mark.parametrize("name", QUANTISED)
def test_every_format_serves_a_whole_model(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """All matrices in one format, embedding and head too: near the reference by what codes cost, fp8 by fp32 rounding."""
    found = distance(written(tmp_path, everywhere(name)))
    record_property("figure", f"{name}: distance {found:.1e}")
    assert found <= (EXACT if name.startswith("fp8") else CODED)


def test_one_layer_mixes_all_formats(tmp_path: Path) -> None:
    """Six experts in six formats: as near as with one."""
    assert distance(written(tmp_path, MIXED)) <= CODED


@pytest.mark.parametrize("rules", [everywhere("int4-g64-z"), everywhere("fp8-b128"), MIXED])
def test_company_changes_no_bit(rules: str, tmp_path: Path) -> None:
    """A request alone, and beside three others, has the same tokens and the same bits of their log-probabilities."""
    pack = written(tmp_path, rules)
    others = [ask(PROMPT[begin : begin + 20], 9) for begin in (1, 7, 13)]
    with InProcessEngine(pack, slots=4, max_seq_len=64, prefill_chunk=16) as engine:
        (alone,) = engine.run([ask(PROMPT, 12)])
        beside = engine.run([*others, ask(PROMPT, 12)])[-1]
    assert [(record.token, record.logprob) for record in alone.records] == [
        (record.token, record.logprob) for record in beside.records
    ]


def test_dummy_weights_of_every_format_are_laid_out(tmp_path: Path) -> None:
    """A description alone is enough: the engine fills values and scales itself, and its logits are finite."""
    pack = written(tmp_path, MIXED)
    with InProcessEngine(pack, slots=1, max_seq_len=64, weights="dummy") as engine:
        (answer,) = engine.run([ask(PROMPT, 4)])
    assert len(answer.tokens) == 4
