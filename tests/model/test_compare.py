"""Divergence, loss and agreement against the definitions, from the float64 reference."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from int4_checkpoints import CASES
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.errors import ModelError
from colibrid.model import compare
from colibrid.model.convert import convert
from colibrid.model.golden import GOLDEN_FILE, golden_distance, make_golden, read_golden, write_golden
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8]]


@pytest.fixture
def models(tmp_path: Path) -> tuple[PackModel, PackModel]:
    """A model and its int4 form."""
    write_checkpoint(CASES[0], tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "own", "fp32", crc32c=zlib.crc32)
    convert(tmp_path / "src", tmp_path / "small", "fp32", crc32c=zlib.crc32, plan=parse_plan("int4-g32"))
    return PackModel(open_pack(tmp_path / "own")), PackModel(open_pack(tmp_path / "small"))


def test_figures_follow_their_definitions(models: tuple[PackModel, PackModel], tmp_path: Path) -> None:
    """KL over all positions, loss over those whose next token the text has, agreement on the likeliest."""
    convert(tmp_path / "src", tmp_path / "flat", "fp32", crc32c=zlib.crc32, backend="any")
    own = [Reference(tmp_path / "flat").log_softmax(text) for text in TEXTS]
    steps: list[tuple[int, int]] = []
    found = compare.Reference(models[0], TEXTS).distance(models[1], lambda done, total: steps.append((done, total)))
    assert found.tokens == 12
    losses = [
        -row[token] for text, rows in zip(TEXTS, own, strict=True) for row, token in zip(rows, text[1:], strict=False)
    ]
    assert found.reference_loss == pytest.approx(np.mean(losses), abs=1e-4)
    assert found.kl > 1e-4
    assert found.loss != found.reference_loss
    assert found.perplexity == pytest.approx(np.exp(found.loss))
    assert steps == [(1, 2), (2, 2)]
    itself = compare.Reference(models[0], TEXTS).distance(models[0])
    assert (itself.kl, itself.top1, itself.loss) == (0.0, 1.0, itself.reference_loss)


def test_models_of_other_vocabularies(models: tuple[PackModel, PackModel], tmp_path: Path) -> None:
    """They cannot be compared."""
    write_checkpoint(
        msgspec.structs.replace(CASES[0], config={**CASES[0].config, "vocab_size": 24}), tmp_path / "other"
    )
    convert(tmp_path / "other", tmp_path / "pack", crc32c=zlib.crc32)
    with pytest.raises(ModelError, match="vocabularies of 20 and 24"):
        compare.Reference(models[0], TEXTS).distance(PackModel(open_pack(tmp_path / "pack")))


def test_kept_predictions_stand_for_the_source(models: tuple[PackModel, PackModel], tmp_path: Path) -> None:
    """The eight likeliest of each position are enough to tell the model itself from its int4 form."""
    own, small = models
    write_golden(tmp_path / "small", make_golden("source", own, TEXTS))
    golden = read_golden(tmp_path / "small")
    assert golden is not None
    assert golden.source == "source"
    assert [len(row) for row in golden.top] == [8] * 12
    itself, other = golden_distance(golden, own), golden_distance(golden, small)
    assert itself.kl < 1e-6
    assert itself.top1 == 1.0
    assert 0 < other.kl <= compare.Reference(own, TEXTS).distance(small).kl * 1.001
    assert read_golden(tmp_path / "own") is None


@pytest.mark.parametrize("text", ["{", '{"source": "a", "texts": [[1, 2]], "top": [[[1, -0.5]]]}', '{"source": 1}'])
def test_damaged_golden_files(text: str, tmp_path: Path) -> None:
    """The message says what to do."""
    (tmp_path / GOLDEN_FILE).write_text(text)
    with pytest.raises(ModelError, match="store it again"):
        read_golden(tmp_path)
