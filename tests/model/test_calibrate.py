"""Activation-aware scaling changes nothing but where rounding hurts, and goes on where it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from int4_checkpoints import CASES as WIDE
from int4_checkpoints import write_loud
from random_cases import CASES, Case, config_of
from random_checkpoints import write_checkpoint

from colibrid.model import calibrate as calibration
from colibrid.model.calibrate import Calibration, Store, calibrate
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.compare import Reference
from colibrid.model.formats import Format, format_of
from colibrid.model.rounding import rounded
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.layout import Tensor

FORM = format_of("int8")
SMALL = format_of("int4-g32")


def texts(vocabulary: int, count: int = 6, length: int = 40) -> list[list[int]]:
    return np.random.default_rng(5).integers(0, vocabulary, (count, length)).tolist()


def rounds(tensor: Tensor) -> Format | None:
    return FORM if tensor.role in ("qkv", "out", "gate", "up", "down") else None


def rounds_small(tensor: Tensor) -> Format | None:
    return SMALL if rounds(tensor) else None


class Changed:
    """A model whose tensors are what `change` makes of them."""

    def __init__(self, model: Any, change: Any) -> None:
        self.description = model.description
        self._model = model
        self._change = change

    def matrix(self, tensor: Tensor) -> Any:
        return self._change(tensor, self._model.matrix(tensor))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_folded_model_is_the_same(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real scales in norms, V, up and every reader, the predictions of every family stay."""
    monkeypatch.setattr(calibration, "ALPHAS", (0.5,))  # no family may escape by choosing no scaling
    write_checkpoint(case, tmp_path / "src")
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        ids = texts(config_of(case)["vocab_size"])
        found = calibrate(model, ids, rounds, lambda _done, _all: None, Store(tmp_path / "store", "key"))
        folded = Changed(model, found.fold)
        changed = [
            tensor.role
            for tensors in model.tensors.values()
            for tensor in tensors
            if not np.array_equal(folded.matrix(tensor), model.matrix(tensor))
        ]
        assert {"attn_norm", "qkv", "out", "ffn_norm", "gate", "up", "down"} <= set(changed)
        assert not {"embedding", "final_norm", "out_bias", "q_norm", "k_norm"} & set(changed)
        far = Reference(model, ids).distance(folded)
    assert far.kl < 1e-6
    assert far.top1 >= 0.995


def test_scales_help_where_channels_differ(tmp_path: Path) -> None:
    """With loud channels, rounding with scales and energies is much nearer to the source than without."""
    write_loud(tmp_path / "src")
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        ids = texts(20, count=12)
        found = calibrate(model, ids[:8], rounds_small, lambda _done, _all: None, Store(tmp_path / "store", "key"))

        def plain(tensor: Tensor, matrix: Any) -> Any:
            return matrix if rounds(tensor) is None else rounded(matrix, SMALL).dequantise()

        def scaled(tensor: Tensor, matrix: Any) -> Any:
            folded = found.fold(tensor, matrix)
            return folded if rounds(tensor) is None else rounded(folded, SMALL, found.energy(tensor)).dequantise()

        far = [Reference(model, ids[8:]).distance(Changed(model, change)).kl for change in (plain, scaled)]
    assert far[1] < 0.7 * far[0]


def same(one: Calibration, other: Calibration, model: CheckpointModel) -> bool:
    return all(
        np.array_equal(one.fold(tensor, matrix), other.fold(tensor, matrix))
        for tensors in model.tensors.values()
        for tensor in tensors
        for matrix in (model.matrix(tensor),)
    )


def test_an_interrupted_calibration_goes_on(tmp_path: Path) -> None:
    """Finished layers are taken from the folder, the rest is computed; another key, or damage, begins anew."""
    write_checkpoint(WIDE[0], tmp_path / "src")
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        ids = texts(20)

        def run(key: str, stop_at: int | None = None) -> tuple[list[int], Calibration | None]:
            steps: list[int] = []

            def progress(done: int, _total: int) -> None:
                steps.append(done)
                if done == stop_at:
                    raise KeyboardInterrupt

            try:
                return steps, calibrate(model, ids, rounds_small, progress, Store(tmp_path / "store", key))
            except KeyboardInterrupt:
                return steps, None

        assert run("one", stop_at=1) == ([0, 1], None)
        steps, resumed = run("one")
        assert steps == [1, 2]
        assert run("one")[0] == [2]
        steps, fresh = run("two")
        assert steps == [0, 1, 2]
        assert resumed is not None
        assert fresh is not None
        assert same(resumed, fresh, model)
        (tmp_path / "store" / "state.npz").write_bytes(b"damaged")
        assert run("two")[0] == [0, 1, 2]


def test_an_expert_that_no_text_reaches_is_not_scaled(tmp_path: Path) -> None:
    """It still gets the factors of the norm that it shares; its own stay out."""
    write_checkpoint(WIDE[0], tmp_path / "src")
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        found = calibrate(model, [[3]], rounds_small, lambda _done, _all: None, Store(tmp_path / "store", "key"))
        experts = [tensor for tensors in model.tensors.values() for tensor in tensors if tensor.layer == 0]
        downs = [tensor for tensor in experts if tensor.role == "down" and tensor.expert is not None]
        untouched = [t for t in downs if np.array_equal(found.fold(t, model.matrix(t)), model.matrix(t))]
        assert len(untouched) >= 2  # two of four experts are used by the one token
        for tensor in untouched:
            assert found.energy(tensor) is None
        gates = [tensor for tensor in experts if tensor.role == "gate"]
        ratios = [found.fold(t, model.matrix(t)) / model.matrix(t) for t in gates]
        assert all(np.allclose(ratio[0], ratios[0][0], rtol=1e-5) for ratio in ratios)
