"""Packs of quantised weights through the CUDA engine, on the emulator and on a GPU, against the float64 forward pass over
the same dequantised weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import engine_device
import numpy as np
import pytest
from in_process import InProcessEngine, ask, crc32c, pool
from random_cases import Case
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.engine.abi import RequestFlag
from colibrid.errors import ColibridError
from colibrid.model.convert import convert
from colibrid.model.dummy import write_dummy_pack
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import Backend

Device = engine_device.EmulatedDevice | engine_device.Gpu
CASE = Case(
    name="quantised", family="qwen2_moe", precision="bf16", seed=41,
    config={
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 6,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256, "norm_topk_prob": True,
    },
)  # fmt: skip
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 20, 24)]
NEAR = 3e-3  # of vectors of length 1: activations of prompts and K and V have 11 bits
SERVE = {"prefill_tokens": 64, "prefill_chunk": 16, "max_seq_len": 48, "kv": "fp16"}
FORMATS = ("int8", "int8-g128", "int4-g32", "int4-g64-z", "fp8", "fp8-b128")
# Seven formats in one layer, both 16-bit ones among them, and a quantised head.
MIXED = (
    "dense=int8-g128, head=int8, expert *:0=fp16, expert *:1=int8, expert *:2=int4-g32, expert *:3=fp8, "
    "expert *:4=int4-g64-z, expert *:5=bf16"
)


@pytest.fixture(params=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """The same test on the CPU and on a GPU."""
    name = {"emulated": "emulated_device", "cuda": "gpu_device"}[request.param]
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


def written(folder: Path, rules: str, backend: Backend) -> Path:
    convert(
        write_checkpoint(CASE, folder / "src"), folder / backend, crc32c=crc32c, backend=backend, plan=parse_plan(rules)
    )
    return folder / backend


@pytest.mark.parametrize("rules", [*FORMATS, MIXED], ids=[*FORMATS, "mixed"])
def test_every_format_serves_a_whole_model(device: Device, rules: str, tmp_path: Path) -> None:
    """A prompt's pooled states are near the reference's; the decode steps after it say what the reference says."""
    with InProcessEngine(written(tmp_path, rules, "cuda"), slots=2, device=device, **SERVE) as engine:
        answer, said = engine.run([pool(PROMPT, RequestFlag.POOL_MEAN), ask(PROMPT, 3, top=20)])
        assert engine.stats().allocations_after_open == 0
    reference = Reference(written(tmp_path, rules, "cpu"))
    states = reference.forward(PROMPT)["final_norm"].mean(axis=0)
    vector = np.frombuffer(answer.pooled, np.float32).astype(np.float64)
    assert np.linalg.norm(vector - states / np.linalg.norm(states)) <= NEAR
    logits = reference.forward([*PROMPT, *said.tokens[:2]])["logits"][-3:]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for record, expected in zip(said.records, logprobs, strict=True):
        assert max(abs(logprob - expected[token]) for token, logprob in record.top) < 0.02


def test_company_changes_no_bit(device: Device, tmp_path: Path) -> None:
    """A request alone, and beside three others, has the same tokens and the same bits of their log-probabilities."""
    others = [ask(PROMPT[begin : begin + 9], 5) for begin in (1, 7, 13)]
    with InProcessEngine(written(tmp_path, MIXED, "cuda"), slots=4, device=device, **SERVE) as engine:
        (alone,) = engine.run([ask(PROMPT, 6)])
        beside = engine.run([*others, ask(PROMPT, 6)])[-1]
    assert [(record.token, record.logprob) for record in alone.records] == [
        (record.token, record.logprob) for record in beside.records
    ]


def test_dummy_weights_of_every_format_are_those_of_the_cpu(device: Device, tmp_path: Path) -> None:
    """A description alone is enough; the same seed gives the same model on both."""
    source, said = write_checkpoint(CASE, tmp_path / "src"), []
    for backend, where in (("cpu", {"max_seq_len": 48}), ("cuda", {"device": device, **SERVE})):
        write_dummy_pack(source, tmp_path / backend, backend=backend, plan=parse_plan(MIXED))  # type: ignore[arg-type]
        with InProcessEngine(tmp_path / backend, slots=1, weights="dummy", dummy_seed=5, **where) as engine:  # type: ignore[arg-type]
            (answer,) = engine.run([pool(PROMPT, RequestFlag.POOL_MEAN)])
        said.append(np.frombuffer(answer.pooled, np.float32).astype(np.float64))
    assert np.linalg.norm(said[0] - said[1]) < 0.03  # the CPU's codes of 8 bits


def test_a_quantised_embedding_is_refused(emulated_device: Device, tmp_path: Path) -> None:
    """The message says which rule to add."""
    with pytest.raises(ColibridError, match=r"the embedding is quantised.*embedding=bf16"):
        InProcessEngine(written(tmp_path, "embedding=int8", "cuda"), slots=1, device=emulated_device, **SERVE)
