"""Limits on experts, on every backend: tokens of an expert, and experts of a token beyond the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import ask, crc32c
from random_cases import CUDA_CASES, prompts_of
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.model.convert import convert
from colibrid.model.forward import Forward, Routing
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.steps import TokenLimit, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from engine_backends import Backend
    from random_cases import Case

CASE = CUDA_CASES[0]  # three layers, the second one dense; 2 of 4 experts a token
PROMPTS = [prompts_of(CASE)[1][:length] for length in (6, 21)]
NEW = 4
ALL = 20  # ids of the vocabulary: their list is the whole distribution
OPTIONS = {"slots": 3, "max_seq_len": 64, "prefill_chunk": 16, "prefill_tokens": 64}


@pytest.fixture(scope="module")
def pack(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return backend.pack(CASE, tmp_path_factory.mktemp("capacity"))


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_assignments_are_computed_trimmed_or_dropped(backend: Backend, pack: Path, threshold: float) -> None:
    """At most three tokens an expert and step: what is too much is dropped, and every assignment is accounted for."""
    requests = [ask(prompt, NEW, policy=[(0, threshold), (0, 0.0), (0, threshold)]) for prompt in PROMPTS]
    with backend.open(pack, max_tokens_per_expert=3, **OPTIONS) as engine:
        answers = engine.run(requests)
        stats = engine.stats()
    dropped = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = len(prompt) + NEW - 1
        assert answer.usage is not None
        dropped += answer.usage.dropped
        assert answer.usage.assignments + answer.usage.trimmed + answer.usage.dropped == tokens * 2 * 2
        assert (answer.usage.trimmed > 0) == (threshold > 0)
        assert sum(answer.experts) == answer.usage.assignments
    assert dropped > 0
    assert stats.expert_dropped == dropped


def test_a_limit_that_is_never_reached_changes_nothing(backend: Backend, pack: Path) -> None:
    """With room for every token of a step the records are those without a limit, to the bit."""
    requests = [ask(prompt, NEW, top=5) for prompt in PROMPTS]
    with backend.open(pack, **OPTIONS) as engine:
        free = engine.run(requests)
    with backend.open(pack, max_tokens_per_expert=27, **OPTIONS) as engine:
        limited = engine.run(requests)
    assert [answer.records for answer in limited] == [answer.records for answer in free]
    assert all(answer.usage is not None and answer.usage.dropped == 0 for answer in limited)


def test_more_experts_than_the_models_own(backend: Backend, pack: Path) -> None:
    """Where it is allowed, a request has more experts a token than the model's own, beside one that has fewer."""
    requests = [ask(PROMPTS[1], NEW, top=20, policy=[(k, 0.0), (0, 0.0), (k, 0.0)]) for k in (0, 1, 3)]
    with backend.open(pack, experts_most=4, **OPTIONS) as engine:
        answers = engine.run(requests)
        refused = engine.run([ask(PROMPTS[0], 1, policy=[(5, 0.0), (0, 0.0), (0, 0.0)])])
    tokens = len(PROMPTS[1]) + NEW - 1
    assert [answer.usage.assignments for answer in answers if answer.usage] == [tokens * 2 * k for k in (2, 1, 3)]
    assert [answer.usage.trimmed for answer in answers if answer.usage] == [0, tokens * 2, 0]
    assert refused[0].status == 1
    with backend.open(pack, **OPTIONS) as engine:
        (own,) = engine.run(requests[:1])
        (above,) = engine.run(requests[2:])
    assert answers[0].records == own.records
    assert above.status == 1


def test_policies_mean_what_the_formula_says(backend: Backend, tmp_path: Path) -> None:
    """Fewer and more experts a token and thresholds, mixed within one batch: each request's logits are the reference's."""
    case = CUDA_CASES[2]  # renormalised weights
    convert(write_checkpoint(case, tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    reference = Reference(tmp_path / "flat")
    prompt = prompts_of(case)[1][:16]
    policies = [(0, 0.0), (1, 0.0), (3, 0.0), (0, 0.5), (3, 0.25)]
    layers = len(reference.manifest.layers)
    requests = [ask(prompt, 1, top=ALL, prompt_top=ALL, policy=[policy] * layers) for policy in policies]
    with backend.open(backend.pack(case, tmp_path), slots=5, max_seq_len=64, experts_most=3) as engine:
        answers = engine.run(requests)
    for (per_token, threshold), answer in zip(policies, answers, strict=True):
        reference.per_token, reference.threshold = per_token or None, threshold
        expected = reference.log_softmax(prompt)
        got = np.full_like(expected, np.nan)
        for row, record in zip(got, [*answer.prompt[1:], answer.records[0]], strict=True):
            row[[token for token, _ in record.top]] = [logprob for _, logprob in record.top]
        errors = np.abs(got - expected).max(axis=1)
        assert np.quantile(errors, 0.8) < (1e-3 if backend.device is None else 3e-2), (per_token, threshold)


@pytest.mark.parametrize(
    ("case", "limit", "threshold"), [(CUDA_CASES[0], 3, 0.0), (CUDA_CASES[2], 12, 0.3)], ids=["plain", "renormalised"]
)
def test_the_float32_pass_leaves_out_the_same(
    backend: Backend, tmp_path: Path, case: Case, limit: int, threshold: float
) -> None:
    """Prompts that begin at one step take the planned steps, and are predicted as model/forward.py predicts them.

    Two assignments of almost the same weight may change places: of a device, which computes in half precision, half of
    the predictions are looked at.
    """
    convert(write_checkpoint(case, tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    prompts = [prompts_of(case)[1][begin : begin + length] for begin, length in ((0, 37), (5, 9), (11, 40))]
    dropping = TokenLimit(limit, OPTIONS["slots"], OPTIONS["prefill_chunk"], OPTIONS["prefill_tokens"])
    model = Forward(PackModel(open_pack(tmp_path / "flat")), prompts, [Routing(0, threshold, dropping)])
    model.run()
    policy = [(0, threshold)] * len(model.layers)
    with backend.open(backend.pack(case, tmp_path), max_tokens_per_expert=limit, **OPTIONS) as engine:
        answers = engine.run([ask(prompt, 0, policy=policy) for prompt in prompts])
        assert engine.stats().steps_prefill == steps_of([len(prompt) for prompt in prompts], dropping)[-1] + 1 == 2
    assert sum(answer.usage.dropped for answer in answers if answer.usage) > 0
    expected = model.predict(model.x, model.head())
    errors = [
        abs(record.logprob - float(expected[begin + place, token]))
        for (begin, _), prompt, answer in zip(model.bounds, prompts, answers, strict=True)
        for place, (record, token) in enumerate(zip(answer.prompt[1:], prompt[1:], strict=True))
    ]
    assert np.quantile(errors, 0.8 if backend.device is None else 0.5) < (1e-3 if backend.device is None else 3e-2)
