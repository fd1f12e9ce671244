"""bench/memory_trial.py compares what it says it compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import memory_trial
import pytest

from colibrid.config.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from colibrid.engine import tables
from colibrid.engine.spec import EngineSpec, make_spec

if TYPE_CHECKING:
    from colibrid.model.manifest import Manifest


@pytest.fixture
def manifest() -> Manifest:
    return memory_trial.describe("tiny", "fp32")


@pytest.fixture
def spec(manifest: Manifest) -> EngineSpec:
    settings = Settings(
        batch=BatchSettings(slots=1),
        engine=EngineSettings(threads=1),
        model=ModelSettings(weights="dummy", max_seq_len=512),
    )
    return make_spec(settings, "none", manifest)


def test_colours_follow_the_low_bits_of_the_expert(manifest: Manifest) -> None:
    """Expert e of every layer begins (e mod 8) strides later; nothing else moves."""
    before = {file.name: file for file in manifest.files}
    for file in memory_trial.coloured(manifest, 512).files:
        experts = [layer.expert_files.index(file.name) for layer in manifest.layers if file.name in layer.expert_files]
        shift = 512 * (experts[0] % 8) if experts else 0
        assert file.bytes == before[file.name].bytes + shift
        offsets = [section.offset for section in file.sections]
        assert offsets == [section.offset + shift for section in before[file.name].sections]


@pytest.mark.parametrize("question", ["huge-pages", "banks"])
def test_every_variant_is_measured_or_named(
    question: str,
    spec: EngineSpec,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each variant takes its turn in every round, or the output says why it is left out; the first one's ratio is 1."""
    monkeypatch.setattr(tables, "EXPERT_ALIGNMENT", tables.EXPERT_ALIGNMENT)  # which the trial changes
    found = memory_trial.variants(question, spec, manifest)
    times = memory_trial.measure(found, 2)
    assert {len(rows) for rows in times.values()} == {2}
    memory_trial.report(times)
    output = capsys.readouterr().out
    assert all(name in output for name, _, _ in found)
    assert "1.000 (1.000 .. 1.000)" in output
