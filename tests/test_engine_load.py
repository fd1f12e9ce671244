"""What the C engine says to damaged weights and to none at all, in the test's own process."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import InProcessEngine, ask, crc32c
from random_cases import CASES, Case, prompts_of
from random_checkpoints import write_checkpoint

from colibrid.errors import ModelError
from colibrid.model.convert import convert
from colibrid.model.dummy import write_dummy_pack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound pack. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    convert(write_checkpoint(CASES[0], folder / "src"), folder / "pack", crc32c=crc32c)
    return folder / "pack"


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return shutil.copytree(whole, tmp_path / "pack")


def _damage(path: Path, offset: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def _forget_checksums(pack: Path) -> None:
    described = json.loads((pack / "colibri.json").read_text())
    for file in described["files"]:
        file["crc32c"] = None
    (pack / "colibri.json").write_text(json.dumps(described))


@pytest.mark.parametrize("name", ["dense.bin", "expert_0_0.bin", "expert_1_3.bin"])
def test_one_flipped_bit_is_refused(pack: Path, name: str) -> None:
    """Any bit counts, the first and the last; the message names the file and both checksums."""
    size = (pack / name).stat().st_size
    for offset in (0, size // 2, size - 1):
        _damage(pack / name, offset, 1)
        with pytest.raises(ModelError, match=rf"{name}.*crc32c.*CHECKSUM"):
            InProcessEngine(pack, slots=1, max_seq_len=32)
        _damage(pack / name, offset, 1)
    InProcessEngine(pack, slots=1, max_seq_len=32).__exit__()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(pack: Path, value: float) -> None:
    """Without checksums, NaN and infinity are still found, and the file is named."""
    _forget_checksums(pack)
    data = bytearray((pack / "expert_1_2.bin").read_bytes())
    data[400:404] = np.float32(value).tobytes()
    (pack / "expert_1_2.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"expert_1_2.bin.*NOT_FINITE"):
        InProcessEngine(pack, slots=1, max_seq_len=32)


def test_without_checksums_a_pack_still_loads(pack: Path) -> None:
    """Hand-made packs have none."""
    _forget_checksums(pack)
    with InProcessEngine(pack, slots=1, max_seq_len=32) as engine:
        assert len(engine.run([ask([1, 2, 3], 4)])[0].tokens) == 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dummy_weights_run_any_configuration(case: Case, tmp_path: Path) -> None:
    """Seeded noise: finite log-probabilities, the same for the same seed, others for another."""
    write_dummy_pack(write_checkpoint(case, tmp_path / "src"), tmp_path / "pack")
    outcomes = []
    for seed in (7, 7, 8):
        with InProcessEngine(tmp_path / "pack", slots=1, max_seq_len=64, weights="dummy", dummy_seed=seed) as engine:
            (answer,) = engine.run([ask(prompts_of(case)[0], 5)])
            outcomes.append(answer.records)
            assert engine.stats().allocations_after_open == 0
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert all(np.isfinite(record.logprob) for record in outcomes[0])
