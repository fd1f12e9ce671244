"""colibrid.model.footprint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid.model.footprint import PART_NAMES, footprint

if TYPE_CHECKING:
    from colibrid.model.pack import Pack


def test_bundled_model(bundled_pack: Pack) -> None:
    """Parts sum to the sections' bytes, and parameters to what the model's README says."""
    found = footprint(bundled_pack.manifest)
    sections = [section for file in bundled_pack.manifest.files for section in file.sections]
    assert tuple(found.parts) == PART_NAMES
    assert found.total == sum(found.parts.values()) == sum(section.bytes for section in sections)
    assert round(found.parameters / 1e6, 1) == 12.9
    expert = 3 * 256 * 256
    assert found.active_parameters == found.parameters - 6 * (8 - 2) * expert
    assert (found.expert_count, found.mean_expert) == (48, expert * 2)
    assert found.dense_read == found.total - found.parts["experts"]


def test_shared_expert_file_counts_once_in_bytes(bundled_pack: Pack) -> None:
    """Two layers that name one file share its bytes, but not its parameters and runs."""
    manifest = bundled_pack.manifest
    first, second, *others = manifest.layers
    second = msgspec.structs.replace(second, expert_files=first.expert_files)
    files = tuple(file for file in manifest.files if not file.name.startswith("expert_1_"))
    shared = msgspec.structs.replace(manifest, layers=(first, second, *others), files=files)
    before, after = footprint(manifest), footprint(shared)
    assert after.parameters == before.parameters
    assert after.expert_count == before.expert_count
    assert after.parts["experts"] == before.parts["experts"] * 5 // 6


def test_untied_head_reads_no_embedding(bundled_pack: Pack) -> None:
    """An embedding that is not the head is looked up, not read."""
    manifest = bundled_pack.manifest
    untied = msgspec.structs.replace(
        manifest, hyperparameters=msgspec.structs.replace(manifest.hyperparameters, tied_head=False)
    )
    found = footprint(untied)
    assert found.dense_read == footprint(manifest).dense_read - found.parts["embedding"]
