"""Four families of random checkpoints against the float64 reference, with the experts that each position chose.

A router's near tie may be decided otherwise by a computation in 16 bits; from that position on the sequence is another
one. So logits are compared up to the first such flip, and the flip itself must have been a near tie. What a position
chose is the difference of two counts: of the prompt up to it, and of the prompt without it, which compute the same bits.

The reference is tests/reference.py; tests/test_golden_c.py compares the CPU engine, and the last test here itself, with
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import Answer, ask, crc32c
from random_cases import CASES, CUDA_CASES, Case, prompts_of
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.model.convert import convert

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_backends import Backend
    from numpy.typing import NDArray

ALL = 20  # ids of these vocabularies: a list of as many is the whole distribution
MARGIN = 1e-2  # of router logits: below it, a choice may flip
COMPARED = 0.7  # of all positions, at least


def _centred(answer: Answer) -> NDArray[np.float64]:
    """(positions, vocabulary) logits less their mean, of a prompt and its first token."""
    records = [*answer.prompt[1:], answer.records[0]]
    rows = np.full((len(records), ALL), np.nan)
    for row, record in zip(rows, records, strict=True):
        for token, logprob in record.top:
            row[token] = logprob
    return rows - rows.mean(axis=1, keepdims=True)


def _prefixes(prompt: list[int]) -> list[list[int]]:
    return [prompt[:length] for length in range(1, len(prompt) + 1)]


def _chosen(counts: list[list[int]], layers: int, per_token: int) -> NDArray[np.bool_]:
    """(positions, layers, experts): what each position chose, from the counts of all prefixes."""
    table = np.array(counts, np.int64).reshape(len(counts), layers, -1)
    steps = np.diff(table, axis=0, prepend=0)
    assert set(np.unique(steps)) <= {0, 1}, "a prefix chose otherwise than the whole prompt"
    assert set(np.unique(steps.sum(axis=2))) <= {0, per_token}
    return steps == 1


def _first_flip(buffers: dict[str, NDArray[np.float64]], chosen: NDArray[np.bool_], k: int) -> tuple[int, float]:
    """Position of the first choice that differs from the reference's, and the reference's margin there.

    Without one: the number of positions, and 0.
    """
    positions, layers, _ = chosen.shape
    for position in range(positions):
        for layer in range(layers):
            if f"{layer}.experts" not in buffers:
                continue
            if set(np.flatnonzero(chosen[position, layer])) != set(buffers[f"{layer}.experts"][position].astype(int)):
                best = np.sort(buffers[f"{layer}.router_logits"][position])[::-1]
                return position, float(best[k - 1] - best[k])
    return positions, 0.0


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
def test_logits_and_experts_are_those_of_the_reference(
    case: Case, backend: Backend, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Up to the first flip logits are within the backend's bound; flips are near ties; most positions are compared."""
    convert(write_checkpoint(case, tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    reference = Reference(tmp_path / "flat")
    layers = reference.manifest.layers
    per_token = max(layer.experts_per_token for layer in layers)
    prompts = [prompts_of(case)[0][:12]] if backend.slow else prompts_of(case)
    errors: list[float] = []
    margins: list[float] = []
    with backend.open(backend.pack(case, tmp_path), slots=32, max_seq_len=128) as engine:
        for prompt in prompts:
            (whole,) = engine.run([ask(prompt, 1, top=ALL, prompt_top=ALL)])
            parts = engine.run([ask(prefix, 0) for prefix in _prefixes(prompt)])
            chosen = _chosen([part.experts for part in parts], len(layers), per_token)
            buffers = reference.forward(prompt)
            end, margin = _first_flip(buffers, chosen, per_token)
            margins += [margin]
            expected = buffers["logits"] - buffers["logits"].mean(axis=1, keepdims=True)
            difference = np.linalg.norm(_centred(whole) - expected, axis=1)
            errors += list((difference / np.linalg.norm(expected, axis=1))[:end])
    compared = len(errors) / sum(map(len, prompts))
    record_property("figure", f"{case.name} {backend.name}: {100 * compared:.0f} % of positions compared, largest "
                    f"error {max(errors):.1e}, margin of the first flips {max(margins):.1e}")  # fmt: skip
    assert max(errors) <= backend.relative_error
    assert max(margins) < MARGIN
    assert compared >= COMPARED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_transformers(case: Case, tmp_path: Path) -> None:
    """The plain formulas in float64 give transformers' logits, for every family and setting."""
    convert(write_checkpoint(case, tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    golden = json.loads((Path(__file__).parent / "data" / "random" / f"{case.name}.json").read_text())["logits"]
    reference = Reference(tmp_path / "flat")
    for prompt, rows in zip(prompts_of(case), golden, strict=True):
        expected = np.array(rows)
        assert np.linalg.norm(reference.forward(prompt)["logits"] - expected) <= 1e-5 * np.linalg.norm(expected)
