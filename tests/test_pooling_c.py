"""Pooled hidden states of the C engine against the float64 forward pass of reference.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import InProcessEngine, ask, crc32c, pool
from random_cases import CASES, prompts_of
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.engine.abi import RequestFlag
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert

DATA = Path(__file__).parent / "data"
PROMPTS = [case["prompt_ids"] for case in json.loads((DATA / "hummingbird-13m.golden.json").read_text())["cases"]]
RANDOM = ("qwen-tied-gqa", "qwen3-gqa-renormalised", "mixtral-llama3", "olmoe-64-experts-k8", "qwen-fp16")
BOTH = (RequestFlag.POOL_MEAN, RequestFlag.POOL_LAST)


def _expected(reference: Reference, prompt: list[int], flag: RequestFlag) -> np.ndarray:
    """As the formula says, in float64."""
    states = reference.forward(prompt)["final_norm"]
    vector = states.mean(axis=0) if flag == RequestFlag.POOL_MEAN else states[-1]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def hummingbird(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a pack."""
    path = tmp_path_factory.mktemp("packs") / "hummingbird"
    convert(BUNDLED_MODEL, path, crc32c=crc32c)
    return path


@pytest.mark.parametrize("flag", BOTH, ids=["mean", "last"])
def test_the_bundled_model_pools_what_the_formula_says(hummingbird: Path, flag: RequestFlag) -> None:
    """All golden prompts, beside generating neighbours: within 1e-4 of the float64 vector, of length 1."""
    reference = Reference(hummingbird)
    prompts = PROMPTS[::3]
    with InProcessEngine(hummingbird, slots=8, max_seq_len=256, prefill_chunk=16, prefill_tokens=64) as engine:
        company = [ask(prompt, 4) for prompt in PROMPTS[1::3]]
        answers = engine.run([pool(prompt, flag) for prompt in prompts] + company)[: len(prompts)]
        assert engine.stats().allocations_after_open == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        vector = np.frombuffer(answer.pooled, np.float32)
        assert float(np.linalg.norm(vector.astype(np.float64))) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(vector, _expected(reference, prompt, flag), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RANDOM)
def test_every_family_pools_what_the_formula_says(name: str, tmp_path: Path) -> None:
    """Random checkpoints of each family, mean and last: within 1e-4."""
    case = next(case for case in CASES if case.name == name)
    convert(write_checkpoint(case, tmp_path / "src"), tmp_path / "pack", crc32c=crc32c)
    reference = Reference(tmp_path / "pack")
    requests = [(prompt, flag) for prompt in prompts_of(case) for flag in BOTH]
    with InProcessEngine(tmp_path / "pack", slots=3) as engine:
        answers = engine.run([pool(prompt, flag) for prompt, flag in requests])
    for (prompt, flag), answer in zip(requests, answers, strict=True):
        got = np.frombuffer(answer.pooled, np.float32)
        np.testing.assert_allclose(got, _expected(reference, prompt, flag), rtol=0, atol=1e-4)


def test_fewer_experts_give_another_vector(hummingbird: Path) -> None:
    """The request's expert policy holds for pooling too, and is counted."""
    few = pool(PROMPTS[0], RequestFlag.POOL_MEAN, policy=[(1, 0.0)] * 6)
    with InProcessEngine(hummingbird, slots=2, max_seq_len=256) as engine:
        whole, trimmed = engine.run([pool(PROMPTS[0], RequestFlag.POOL_MEAN), few])
    assert whole.pooled != trimmed.pooled
    assert whole.usage is not None
    assert trimmed.usage is not None
    assert (whole.usage.trimmed, trimmed.usage.trimmed) == (0, 6 * len(PROMPTS[0]))
    assert trimmed.usage.assignments * 2 == whole.usage.assignments
