from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.errors import ModelError
from colibrid.model.formats import ELEMENT_BYTES, float_of
from colibrid.model.manifest import Manifest
from colibrid.model.pack import open_pack
from colibrid.model.pack_check import check_manifest

if TYPE_CHECKING:
    from pathlib import Path

VALUES = (
    None, True, 0, 1, -1, 3, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 64, 0.5, -1e300, 1e400, "", "x", "../x", "fp16",
    "dense", "moe", "dense.bin", [], [1], ["a"], {}, {"a": 1},
)  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _assert_safe(manifest: Manifest) -> None:
    """What a reader of the tables relies on."""
    for file in manifest.files:
        for section in file.sections:
            assert section.offset + section.bytes <= file.bytes
            assert section.bytes == section.shape[0] * section.shape[1] * ELEMENT_BYTES[float_of(section)]
    assert manifest.hyperparameters.heads % manifest.hyperparameters.kv_heads == 0
    for layer in manifest.layers:
        assert len(layer.expert_files) == layer.experts
        assert layer.experts_per_token <= layer.experts


def test_random_damage_is_refused_or_harmless(pack: Path) -> None:
    """800 random changes of one to three values: a ModelError, or a description that is still sound."""
    random_ = random.Random(0)
    text = (pack / "colibri.json").read_text()
    refused = 0
    for _ in range(800):
        described = json.loads(text)
        for _ in range(random_.randint(1, 3)):
            container, key = random_.choice(_places(described))
            if random_.random() < 0.2:
                del container[key]
            else:
                container[key] = random_.choice(VALUES)
        (pack / "colibri.json").write_text(json.dumps(described))
        try:
            _assert_safe(open_pack(pack).manifest)
        except ModelError:
            refused += 1
    assert refused > 400


def test_a_sound_manifest_passes(pack: Path) -> None:
    """A converted pack's description is accepted, and still after a way through JSON."""
    manifest = open_pack(pack).manifest
    check_manifest(msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest))


def test_the_first_problem_is_named_without_a_path(pack: Path) -> None:
    """The check knows no folder; whoever calls it says which file it is about."""
    manifest = msgspec.structs.replace(open_pack(pack).manifest, layers=())
    with pytest.raises(ModelError, match=r"^layers has 0 rows, expected 1 to 256$"):
        check_manifest(manifest)
