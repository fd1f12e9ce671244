"""`colibrid tune` from the command line to its result: what the issue says that it must show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from tune_models import LAYERS, own_texts, write_model, write_texts

from colibrid.cli.main import run
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.tune.result import Result, Tried

if TYPE_CHECKING:
    from collections.abc import Collection

DATA = Path(__file__).resolve().parents[1] / "data"
ENGINE = ("--device", "cpu", "--set", "batch.slots=16")


class Tuned(NamedTuple):
    """What one run left."""

    result: Result
    folder: Path
    output: str

    def of(self, per_token: int | tuple[int, ...] | None) -> Tried:
        """The point that has so many experts and nothing else."""
        found = [one for one in self.result.tried if one.point.per_token == per_token and not one.point.threshold]
        assert len(found) == 1, f"{per_token}: {[one.point for one in self.result.tried]}"
        return found[0]

    @property
    def chosen(self) -> Tried:
        assert self.result.chosen is not None, self.result.reason
        return self.result.tried[self.result.chosen]


def tune(capsys: pytest.CaptureFixture[str], folder: Path, model: Path, data: Path, *more: str) -> Tuned:
    """Runs the command and reads what it wrote."""
    arguments = ["tune", str(model), "--data", str(data), "--out", str(folder), *more, *ENGINE]
    assert run(arguments) == 0, capsys.readouterr().err
    result = msgspec.json.decode((folder / "result.json").read_bytes(), type=Result)
    return Tuned(result, folder, capsys.readouterr().out)


def synthetic(folder: Path, needed: Collection[int]) -> tuple[Path, Path]:
    """A pack of three layers of which `needed` need their second experts, and texts that it has written itself."""
    checkpoint = write_model(folder / "checkpoint", needed)
    texts = own_texts(checkpoint, folder / "pack", 24, 48)
    return folder / "pack", write_texts(folder / "texts.jsonl", texts)


def test_a_useless_second_expert_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where second experts add nothing, one expert predicts to the last digit what two do, and is chosen for less work."""
    pack, data = synthetic(tmp_path, needed=())
    found = tune(capsys, tmp_path / "out", pack, data, "--grid", "per_token=1,2,3", "--quiet")
    own, one = found.result.tried[0], found.of(1)
    assert own.point.per_token is None
    assert one.quality.kl == 0.0
    assert one.quality.top1 == 1.0
    assert one.quality.loss == own.quality.loss
    assert found.chosen == one
    assert "per_token: 1" in (found.folder / "profile.yaml").read_text()


def test_one_layer_needs_two_and_the_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search by layer finds the only layer whose second experts matter, and gives one expert to all others."""
    needed = 1
    pack, data = synthetic(tmp_path, needed=[needed])
    found = tune(capsys, tmp_path / "out", pack, data, "--grid", "per_token=1,2", "--quiet")
    wanted = tuple(2 if layer == needed else 1 for layer in range(LAYERS))
    assert found.of(1).quality.kl > 0.01
    assert found.of(wanted).quality.kl == 0.0
    assert found.chosen.point.per_token == wanted
    cuts = [layer.cut.kl for layer in found.result.layers if layer.cut is not None]
    assert [kl == 0.0 for kl in cuts] == [layer != needed for layer in range(LAYERS)]
