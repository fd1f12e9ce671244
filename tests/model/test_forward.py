"""The float32 forward pass against the plain float64 one of tests/reference.py, on every family."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from random_cases import CASES, Case
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.errors import ModelError
from colibrid.model import forward
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.convert import convert
from colibrid.model.forward import Forward
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1], [8])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predictions_of_every_family(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several texts at once, in small blocks, predict what each predicts alone in float64."""
    monkeypatch.setattr(forward, "QUERIES", 4)
    monkeypatch.setattr(forward, "POSITIONS", 5)
    source = write_checkpoint(case, tmp_path / "src")
    convert(source, tmp_path / "pack", dtype="fp32", crc32c=zlib.crc32, backend="any")
    reference = Reference(tmp_path / "pack")
    with Checkpoint(source) as checkpoint:
        texts = Forward(CheckpointModel(checkpoint), TEXTS)
        steps: list[tuple[int, int]] = []
        texts.run(lambda done, total: steps.append((done, total)))
        found = np.concatenate([block for _, block in texts.log_softmax()])
    assert steps[-1] == (len(texts.layers), len(texts.layers))
    wanted = np.concatenate([reference.log_softmax(list(text)) for text in TEXTS])
    assert np.abs(found - wanted).max() < 2e-4


def test_the_probe_sees_every_input(converted: Path) -> None:
    """Before each matrix: its role, its expert and its input, which the reference computes too."""
    reference = Reference(converted / "flat")
    seen = {}
    with Checkpoint(converted / "src") as checkpoint:
        texts = Forward(CheckpointModel(checkpoint), [TEXTS[0]])
        texts.embed()
        texts.layer(0, lambda role, expert, x: seen.__setitem__((role, expert), x))
    buffers = reference.forward(TEXTS[0])
    assert np.allclose(seen["qkv", None], buffers["0.attn_norm"], atol=1e-4)
    assert np.allclose(seen["out", None], buffers["0.attention"], atol=1e-4)
    assert np.allclose(texts.x, buffers["0.output"], atol=1e-3)
    for expert in range(texts.layers[0].experts):
        tokens = np.nonzero((buffers["0.experts"] == expert).any(axis=1))[0]
        if len(tokens):
            assert np.allclose(seen["gate", expert], buffers["0.ffn_norm"][tokens], atol=1e-4)
            assert seen["down", expert].shape == (len(tokens), texts.layers[0].expert_width)


@pytest.mark.parametrize(("text", "words"), [([1 << 20], "vocabulary"), ([1] * 100_000, "at most")])
def test_texts_that_do_not_fit(converted: Path, text: list[int], words: str) -> None:
    """Tokens and lengths that the model does not have are refused."""
    with Checkpoint(converted / "src") as checkpoint, pytest.raises(ModelError, match=words):
        Forward(CheckpointModel(checkpoint), [text])
