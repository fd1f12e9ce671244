"""Pooled hidden states against the float64 forward pass of reference.py, on every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import ask, crc32c, pool
from random_cases import CUDA_CASES, Case, prompts_of
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.engine.abi import RequestFlag
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_backends import Backend

DATA = Path(__file__).parent / "data"
PROMPTS = [case["prompt_ids"] for case in json.loads((DATA / "hummingbird-13m.golden.json").read_text())["cases"]]
BOTH = (RequestFlag.POOL_MEAN, RequestFlag.POOL_LAST)
EXACT = 1e-4  # of a value, where K and V are fp32


def _expected(reference: Reference, prompt: list[int], flag: RequestFlag) -> np.ndarray:
    """As the formula says, in float64."""
    states = reference.forward(prompt)["final_norm"]
    vector = states.mean(axis=0) if flag == RequestFlag.POOL_MEAN else states[-1]
    return vector / np.linalg.norm(vector)


def _bound(backend: Backend) -> float:
    """Of the length of the difference of two vectors of length 1."""
    return EXACT if backend.device is None else backend.relative_error


@pytest.fixture(scope="module")
def bundled(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """The bundled model for the backend, and its float64 twin."""
    if backend.slow:
        pytest.skip("the emulator takes minutes for the bundled model")
    folder = tmp_path_factory.mktemp("packs")
    convert(BUNDLED_MODEL, folder / "pack", crc32c=crc32c, backend=backend.layout)
    convert(BUNDLED_MODEL, folder / "flat", crc32c=crc32c, backend="any")
    return folder / "pack", Reference(folder / "flat")


@pytest.mark.parametrize("flag", BOTH, ids=["mean", "last"])
def test_the_bundled_model_pools_what_the_formula_says(
    bundled: tuple[Path, Reference], backend: Backend, flag: RequestFlag, record_property: Callable[[str, object], None]
) -> None:
    """Golden prompts in chunks beside generating neighbours: the float64 vector, and of length 1."""
    pack, reference = bundled
    prompts = PROMPTS[::3]
    with backend.open(pack, slots=8, max_seq_len=256, prefill_chunk=16, prefill_tokens=64) as engine:
        company = [ask(prompt, 4) for prompt in PROMPTS[1::3]]
        answers = engine.run([pool(prompt, flag) for prompt in prompts] + company)[: len(prompts)]
        assert engine.stats().allocations_after_open == 0
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        vector = np.frombuffer(answer.pooled, np.float32).astype(np.float64)
        assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-6)
        worst = max(worst, float(np.linalg.norm(vector - _expected(reference, prompt, flag))))
    record_property("figure", f"bundled {backend.name} {flag.name}: largest distance {worst:.1e}")
    assert worst <= _bound(backend)


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
def test_every_family_pools_what_the_formula_says(case: Case, backend: Backend, tmp_path: Path) -> None:
    """Random checkpoints, mean and last: one vector in ten may be farther, where an expert was a near tie."""
    convert(write_checkpoint(case, tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    reference = Reference(tmp_path / "flat")
    prompts = [prompts_of(case)[1][:length] for length in (1, 6, 21)] if backend.slow else prompts_of(case)
    requests = [(prompt, flag) for prompt in prompts for flag in BOTH]
    with backend.open(
        backend.pack(case, tmp_path), slots=3, max_seq_len=128, prefill_chunk=8, prefill_tokens=64
    ) as engine:
        answers = engine.run([pool(prompt, flag) for prompt, flag in requests])
    far = [
        float(np.linalg.norm(np.frombuffer(answer.pooled, np.float32) - _expected(reference, prompt, flag)))
        for (prompt, flag), answer in zip(requests, answers, strict=True)
    ]
    assert np.quantile(far, 0.9) <= _bound(backend), far


def test_company_and_chunks_change_no_bit(backend: Backend, tmp_path: Path) -> None:
    """Both kinds of vectors are the same alone, and in chunks beside neighbours that pool and generate."""
    case = CUDA_CASES[0]
    pack = backend.pack(case, tmp_path)
    prompt = prompts_of(case)[1][:40]
    asked = [pool(prompt, flag) for flag in BOTH]
    options = {"max_seq_len": 64, "prefill_chunk": 16, "prefill_tokens": 64}
    with backend.open(pack, slots=1, **options) as engine:
        alone = [answer.pooled for answer in engine.run(asked)]
    company = [ask(prompt[: 3 * length], 5) for length in range(1, 4)] + [pool(prompt[5:], BOTH[0])]
    with backend.open(pack, slots=6, **options) as engine:
        answers = engine.run([*company[:2], *asked, *company[2:]])
    assert [answer.pooled for answer in answers[2:4]] == alone


def test_a_last_state_may_stand_on_a_prefix(backend: Backend, tmp_path: Path) -> None:
    """With a prefix run the last state has the same bits; a mean is refused there."""
    case = CUDA_CASES[0]
    prompt = prompts_of(case)[1][:40]
    with backend.open(backend.pack(case, tmp_path), slots=2, max_seq_len=64) as engine:
        (first,) = engine.run([pool(prompt, RequestFlag.POOL_LAST, publish_run=1)])
        prefix = {"prefix_run": 1, "prefix_tokens": 17}
        last, mean = engine.run([pool(prompt, flag, **prefix) for flag in (BOTH[1], BOTH[0])])
        engine.release_run(1)
        engine.settle()
    assert last.pooled == first.pooled
    assert (last.status, mean.status) == (None, 1)


def test_fewer_experts_give_another_vector(backend: Backend, tmp_path: Path) -> None:
    """The request's expert policy holds for pooling too, and is counted."""
    case = CUDA_CASES[0]
    prompt = prompts_of(case)[1][:20]
    with backend.open(backend.pack(case, tmp_path), slots=2, max_seq_len=64) as engine:
        few = pool(prompt, RequestFlag.POOL_MEAN, policy=[(int(k > 0), 0.0) for k in _own(engine)])
        whole, trimmed = engine.run([pool(prompt, RequestFlag.POOL_MEAN), few])
    moe = sum(k > 0 for k in _own(engine))
    assert whole.pooled != trimmed.pooled
    assert whole.usage is not None
    assert trimmed.usage is not None
    assert (whole.usage.trimmed, trimmed.usage.trimmed) == (0, moe * len(prompt))
    assert trimmed.usage.assignments * 2 == whole.usage.assignments


def _own(engine: object) -> list[int]:
    return [layer.experts_per_token for layer in engine.manifest.layers]  # type: ignore[attr-defined]
