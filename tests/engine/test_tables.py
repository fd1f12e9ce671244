"""A manifest becomes flat tables that say the same."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.engine import abi
from colibrid.engine.tables import ModelTables, experts_per_token, max_experts
from colibrid.errors import ModelError

if TYPE_CHECKING:
    from colibrid.model.pack import Pack


def test_tables_say_what_the_manifest_says(bundled_pack: Pack) -> None:
    """Shapes, layers, files and section counts are those of colibri.json."""
    manifest = bundled_pack.manifest
    desc = ModelTables(manifest).desc
    shapes = manifest.hyperparameters
    assert (desc.vocab_size, desc.hidden, desc.heads) == (shapes.vocab_size, shapes.hidden, shapes.heads)
    assert desc.layers == len(manifest.layers)
    assert desc.struct_bytes == ctypes.sizeof(abi.ModelDesc)
    assert [desc.rope_inv_freq[i] for i in range(shapes.head_dim // 2)] == pytest.approx(shapes.rope_inv_freq)
    assert desc.section_count == sum(len(file.sections) for file in manifest.files)
    for index, layer in enumerate(manifest.layers):
        row = desc.layer_table[index]
        assert (row.experts, row.experts_per_token) == (layer.experts, layer.experts_per_token)
        assert row.kv_values_per_token == 2 * shapes.kv_heads * shapes.head_dim
    for index, file in enumerate(manifest.files):
        row = desc.file_table[index]
        assert (row.name.decode(), row.bytes) == (file.name, file.bytes)
        assert file.crc32c is not None
        assert tuple(row.crc32c[: row.crc_count]) == file.crc32c
        assert row.alignment == (4096 if file.name.startswith("expert_") else 2 << 20)


def test_a_shared_expert_file_has_rows_for_each_user(bundled_pack: Pack) -> None:
    """Two experts that name one file get a row each for its sections, all with that file's index."""
    manifest = bundled_pack.manifest
    first = manifest.layers[0]
    shared = msgspec.structs.replace(first, expert_files=(first.expert_files[1], *first.expert_files[1:]))
    changed = msgspec.structs.replace(manifest, layers=(shared, *manifest.layers[1:]))
    desc = ModelTables(changed).desc
    index = [file.name for file in manifest.files].index(first.expert_files[1])
    users = {(row.layer, row.expert) for row in desc.section_table[: desc.section_count] if row.file == index}
    assert users == {(0, 0), (0, 1)}


def test_files_without_checksums_have_no_crc_table(bundled_pack: Pack) -> None:
    """A file whose crc32c is absent reaches C with a count of 0."""
    manifest = bundled_pack.manifest
    files = tuple(msgspec.structs.replace(file, crc32c=None) for file in manifest.files)
    desc = ModelTables(msgspec.structs.replace(manifest, files=files)).desc
    assert all(desc.file_table[i].crc_count == 0 and not desc.file_table[i].crc32c for i in range(desc.file_count))


def test_an_expert_file_that_is_not_listed_is_named(bundled_pack: Pack) -> None:
    """A layer that names a file outside `files` is refused with layer and name."""
    manifest = bundled_pack.manifest
    first = msgspec.structs.replace(manifest.layers[0], expert_files=("nowhere.bin",))
    with pytest.raises(ModelError, match=r"layer 0 .*nowhere\.bin"):
        ModelTables(msgspec.structs.replace(manifest, layers=(first,)))


def test_expert_counts_are_the_largest_of_all_layers(bundled_pack: Pack) -> None:
    """A dense layer among MoE layers does not hide their experts."""
    manifest = bundled_pack.manifest
    dense = msgspec.structs.replace(manifest.layers[0], ffn="dense", experts=0, experts_per_token=0, expert_files=())
    mixed = msgspec.structs.replace(manifest, layers=(dense, *manifest.layers[1:]))
    assert max_experts(mixed) == manifest.layers[1].experts
    assert experts_per_token(mixed) == manifest.layers[1].experts_per_token
    assert max_experts(msgspec.structs.replace(manifest, layers=(dense,))) == 0
