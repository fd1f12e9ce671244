from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from int4_checkpoints import CASES as WIDE
from int4_checkpoints import Int4, write_int4
from random_cases import CASES, Case
from random_checkpoints import write_checkpoint

from colibrid.errors import ConfigError, ModelError
from colibrid.model.cache import CacheOptions, resolve
from colibrid.model.convert import convert
from colibrid.model.dummy import dummy_manifest, write_dummy_pack
from colibrid.model.pack import open_pack
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_alone_gives_the_same_description_as_the_weights(case: Case, tmp_path: Path) -> None:
    """Shapes, layers, files and sections are those of a conversion; only checksums are missing."""
    src = write_checkpoint(case, tmp_path / "src")
    converted = convert(src, tmp_path / "pack", crc32c=zlib.crc32)
    for path in src.glob("*.safetensors*"):
        path.unlink()
    dummy = dummy_manifest(src)
    assert (dummy.hyperparameters, dummy.layers, dummy.precision, dummy.text) == (
        converted.hyperparameters,
        converted.layers,
        converted.precision,
        converted.text,
    )
    for made, planned in zip(converted.files, dummy.files, strict=True):
        assert (made.name, made.bytes, made.sections) == (planned.name, planned.bytes, planned.sections)
        assert planned.crc32c is None


def test_precision_is_bf16_unless_something_is_said(tmp_path: Path) -> None:
    """auto: config.json's dtype, else bf16; --dtype wins."""
    src = write_checkpoint(CASES[0], tmp_path)
    assert dummy_manifest(src).precision == "fp32"
    assert dummy_manifest(src, "fp16").precision == "fp16"
    config = json.loads((src / "config.json").read_text())
    del config["torch_dtype"]
    (src / "config.json").write_text(json.dumps(config))
    assert dummy_manifest(src).precision == "bf16"
    (src / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert dummy_manifest(src).precision == "fp16"


def test_a_dummy_pack_opens_without_files(tmp_path: Path) -> None:
    """The folder has a description and texts, and opens only when files are not asked for."""
    src = write_checkpoint(CASES[0], tmp_path / "src")
    (src / "tokenizer.json").write_text("{}")
    manifest = write_dummy_pack(src, tmp_path / "pack")
    opened = open_pack(tmp_path / "pack", check_files=False)
    assert (opened.manifest, opened.warnings) == (manifest, ())
    assert (tmp_path / "pack" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ModelError, match=r"dense.bin: missing"):
        open_pack(tmp_path / "pack")


def test_the_cache_keeps_dummy_packs_apart(tmp_path: Path) -> None:
    """A pack without weights is never taken for one with, and needs no weights to be made."""
    src = write_checkpoint(CASES[0], tmp_path / "src")
    places = {"cache_dir": tmp_path / "cache", "hub_cache": tmp_path / "hub"}
    whole = resolve(str(src), CacheOptions(**places), crc32c=zlib.crc32)
    (src / "model.safetensors").unlink()
    dummy = resolve(str(src), CacheOptions(**places, weights="dummy"), crc32c=zlib.crc32)
    assert dummy.path != whole.path
    assert dummy.path.name.endswith(".dummy.colibri")


def test_rules_of_precision(tmp_path: Path) -> None:
    """A description without weights has the formats of a conversion by the same rules; dummy packs of others are others."""
    src = write_checkpoint(WIDE[0], tmp_path / "src")
    rules = "experts=int4-g32, layer 0 attention=int8"
    plan = parse_plan(rules)
    planned = dummy_manifest(src, plan=plan)
    made = convert(src, tmp_path / "pack", crc32c=zlib.crc32, plan=plan)
    assert [file.sections for file in planned.files] == [file.sections for file in made.files]
    places: dict[str, Any] = {"cache_dir": tmp_path / "cache", "hub_cache": tmp_path, "weights": "dummy"}
    packs = [
        resolve(str(src), CacheOptions(**places, precision=each), crc32c=zlib.crc32).path
        for each in (None, rules, "int8")
    ]
    assert len(set(packs)) == 3
    assert open_pack(packs[1], check_files=False).manifest.files == planned.files
    with pytest.raises(ConfigError, match=r"model.precision: 'layer 9': layer 9 given"):
        resolve(str(src), CacheOptions(**places, precision="layer 9=int8"), crc32c=zlib.crc32)


def test_an_int4_checkpoint_is_described_as_one(tmp_path: Path) -> None:
    """By its configuration alone, with the parts that it says are not int4; a symmetric one may turn out smaller."""
    for number, (kind, kept) in enumerate(((Int4("awq"), None), (Int4("awq", attention=False), ["self_attn"]))):
        src = tmp_path / f"src{number}"
        write_int4(WIDE[0], kind, src)
        config = json.loads((src / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"] = kept
        (src / "config.json").write_text(json.dumps(config))
        planned = dummy_manifest(src, "fp16")
        made = convert(src, tmp_path / f"pack{number}", crc32c=zlib.crc32)
        assert [file.sections for file in planned.files] == [file.sections for file in made.files]
