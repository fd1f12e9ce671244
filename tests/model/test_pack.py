from __future__ import annotations

import json
import os
import shutil
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from random_cases import CASES
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.errors import ModelError
from colibrid.model import layout
from colibrid.model.convert import convert
from colibrid.model.pack import MAX_TEXT_BYTES, is_pack, open_pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _edit(pack: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    described = json.loads((pack / "colibri.json").read_text())
    change(described)
    (pack / "colibri.json").write_text(json.dumps(described))


def test_a_converted_pack_opens_without_warnings(pack: Path) -> None:
    """What convert wrote is sound."""
    opened = open_pack(pack, backend="cpu")
    assert opened.warnings == ()
    assert opened.manifest.backend == "any"
    assert is_pack(pack)
    assert opened.manifest.files[0].name == "dense.bin"


def _section(described: dict[str, Any], role: str = "gate") -> dict[str, Any]:
    return next(s for file in described["files"] for s in file["sections"] if s["role"] == role)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at keys path[:-1] to path[-1]."""

    def change(described: Any) -> None:
        *where, last, value = path
        for key in where:
            described = described[key]
        described[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", 2), "version 2 found, 1 expected"),
        (_set("unknown", 1), "unknown field `unknown`"),
        (_set("text", "later", None), "unknown field `later`"),
        (_set("precision", "int4"), "Invalid enum value 'int4'"),
        (_set("files", 0, "bytes", -1), r"\$.files\[0\].bytes"),
        (_set("files", 0, "bytes", "12"), r"Expected `int`, got `str` - at `\$.files\[0\].bytes`"),
        (_set("files", 1, "name", "../../etc/passwd"), r"\$.files\[1\].name"),
        (_set("files", 1, "name", "/etc/passwd"), r"\$.files\[1\].name"),
        (_set("files", 1, "name", ".hidden"), r"\$.files\[1\].name"),
        (_set("files", 1, "name", "a\nb"), r"\$.files\[1\].name"),
        (_set("files", 1, "name", "dense.bin"), "files names dense.bin twice"),
        (_set("files", 1, "name", "other.bin"), "other.bin: section gate is there twice or not part of the model"),
        (_set("files", 0, "sections", []), "dense.bin: has no sections"),
        (_set("files", 0, "sections", 0, "offset", 2), "offset 2 is not a multiple of 4"),
        (_set("files", 0, "sections", 1, "offset", 0), "overlaps the section before it"),
        (_set("files", 0, "sections", 0, "offset", 1 << 40), "ends at byte"),
        (_set("files", 0, "sections", 0, "bytes", 4), "2560 bytes expected for \\(20, 32\\), 4 found"),
        (_set("files", 0, "sections", 0, "shape", [1 << 31, 1 << 31]), "bytes expected for"),
        (_set("files", 0, "sections", 0, "shape", [32, 20]), r"embedding has shape \[32, 20\], expected \[20, 32\]"),
        (_set("files", 0, "sections", 0, "padded_shape", [20, 64]), r"layout flat pads \(20, 32\) to \(20, 32\)"),
        (_set("files", 0, "sections", 0, "layout", "rows16"), r"layout rows16 pads \(20, 32\) to \(32, 32\)"),
        (_set("files", 0, "sections", 1, "layout", "rows16"), "layout rows16 is for matrices, expected flat"),
        (_set("files", 0, "sections", 0, "layout", "tiles"), "Invalid enum value 'tiles'"),
        (_set("files", 0, "sections", 0, "role", "head"), "section head is there twice or not part of the model"),
        (_set("files", 0, "sections", 0, "layer", 0), "section embedding of layer 0 is there twice or not part"),
        (_set("files", 0, "sections", 0, "scales", "x"), "unknown field `scales`"),
        (_set("files", 0, "sections", 0, "scales_offset", 256), "scales_offset is 256, expected 0"),
        (_set("files", 0, "sections", 0, "zeros_offset", 256), "zero points are for int4, not for fp32"),
        (_set("files", 0, "sections", 0, "group_cols", 32), "groups of 0 x 32 found, but fp32 has none"),
        (_set("files", 0, "sections", 1, "precision", "int8"), "final_norm: int8 found, expected fp32"),
        (_set("files", 0, "sections", 0, "precision", "int8"), "int8 in groups of 0 x 0 found"),
        (_set("files", 1, "sections", 0, "role", "up"), "sections must be gate, up and down, in this order"),
        (_set("files", 0, "crc32c", [1, 2]), "2 crc32c values found, 1 expected"),
        (_set("files", 0, "sha256", "zz"), "sha256 is not 64 hexadecimal digits"),
        (_set("layers", 0, "experts", 5), r"layers\[0\].expert_files names 4 files, expected 5"),
        (_set("layers", 0, "experts", 0), r"layers\[0\].experts is 0, expected 1 to 512"),
        (_set("layers", 0, "experts_per_token", 5), r"layers\[0\].experts_per_token is 5, expected 1 to 4"),
        (_set("layers", 0, "expert_width", 25), "layer 0 expert 0 gate has shape"),
        (_set("layers", 0, "shared_width", 0), "shared_gated is true without a shared_width"),
        (_set("layers", 0, "ffn", "dense"), r"layers\[0\] is dense, so experts"),
        (_set("layers", []), "layers has 0 rows, expected 1 to 256"),
        (_set("hyperparameters", "heads", 0), "hyperparameters.heads is 0"),
        (_set("hyperparameters", "kv_heads", 3), "heads 4 is not a multiple of kv_heads 3"),
        (_set("hyperparameters", "head_dim", 6), "rope_inv_freq has 4 values, expected 3"),
        (_set("hyperparameters", "head_dim", 9), "head_dim is 9, expected an even number"),
        (_set("hyperparameters", "vocab_size", 1 << 21), "vocab_size is 2097152, expected 1 to 1048576"),
        (_set("hyperparameters", "vocab_size", 21), r"embedding has shape \[20, 32\], expected \[21, 32\]"),
        (_set("hyperparameters", "rms_norm_eps", 0), "must be positive"),
        (_set("hyperparameters", "tied_head", False), "section head is in no file"),
        (_set("text", "eos_token_ids", [20]), "expected ids below 20"),
        (_set("text", "eos_token_ids", [1] * 65), "65 ids, expected at most 64"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, pack: Path
) -> None:
    """Each wrong value is named with what was expected, and the message says which file it is in."""
    _edit(pack, change)
    with pytest.raises(ModelError, match=message) as caught:
        open_pack(pack)
    assert "colibri.json" in str(caught.value)


def test_a_missing_section_is_named(pack: Path) -> None:
    """Every tensor that the model needs must be in some file."""
    _edit(pack, lambda d: d["files"][0]["sections"].pop(5))
    with pytest.raises(ModelError, match=r"section layer 0 out is in no file|is in no file"):
        open_pack(pack)


def test_norms_in_another_precision_are_refused(pack: Path) -> None:
    """Small tensors are fp32 in every pack."""

    def change(described: dict[str, Any]) -> None:
        norm = _section(described, "final_norm")
        norm.update(precision="bf16", bytes=norm["bytes"] // 2)

    _edit(pack, change)
    with pytest.raises(ModelError, match="final_norm is bf16, expected fp32"):
        open_pack(pack)


def test_a_pack_from_before_a_field_was_added_opens(pack: Path) -> None:
    """What a description of the same version leaves out reads as null does."""
    expected = open_pack(pack).manifest
    text = (pack / "colibri.json").read_text()
    described = json.loads(
        text, object_pairs_hook=lambda pairs: {key: value for key, value in pairs if value is not None}
    )
    assert len(json.dumps(described)) < len(json.dumps(json.loads(text)))
    (pack / "colibri.json").write_text(json.dumps(described))
    assert open_pack(pack).manifest == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "\xff", "[" * 100_000])
def test_a_broken_description_is_an_error(pack: Path, text: str) -> None:
    """colibri.json that is not JSON, not an object or empty is refused by name."""
    (pack / "colibri.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"colibri.json"):
        open_pack(pack)


def test_a_folder_without_a_description_says_how_to_make_one(tmp_path: Path) -> None:
    """The message names the command."""
    with pytest.raises(ModelError, match="colibrid convert"):
        open_pack(tmp_path)
    assert not is_pack(tmp_path)


@pytest.mark.parametrize("name", ["dense.bin", "expert_1_2.bin"])
def test_a_missing_or_truncated_file_is_named(pack: Path, name: str) -> None:
    """A file that is shorter, longer or missing is refused with both sizes."""
    path = pack / name
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"x", b""):
        path.write_bytes(wrong)
        with pytest.raises(ModelError, match=rf"{name}: {len(data)} bytes expected, {len(wrong)} found"):
            open_pack(pack)
    path.unlink()
    with pytest.raises(ModelError, match=f"{name}: missing"):
        open_pack(pack)


def test_links_and_folders_are_no_files_of_weights(pack: Path) -> None:
    """A link out of the folder is not followed, and a folder is not a file."""
    (pack / "dense.bin").rename(pack.parent / "elsewhere")
    (pack / "dense.bin").symlink_to(pack.parent / "elsewhere")
    with pytest.raises(ModelError, match=r"dense.bin: missing, or not a regular file"):
        open_pack(pack)
    (pack / "dense.bin").unlink()
    (pack / "dense.bin").mkdir()
    with pytest.raises(ModelError, match=r"dense.bin: missing, or not a regular file"):
        open_pack(pack)


TEXTS = ("tokenizer", "tokenizer_config", "chat_template", "generation_config")


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("kind", ["absent", "folder", "pipe", "device"])
def test_a_missing_text_is_named(pack: Path, field: str, kind: str) -> None:
    """A text file that the description names must be there, and be a file: others could be read for ever."""
    if kind == "folder":
        (pack / "text").mkdir()
    elif kind == "pipe":
        os.mkfifo(pack / "text")
    elif kind == "device":
        (pack / "text").symlink_to("/dev/zero")
    _edit(pack, lambda d: d["text"].update({field: "text"}))
    with pytest.raises(ModelError, match=r"text: missing"):
        open_pack(pack)


@pytest.mark.parametrize("field", TEXTS)
def test_an_endless_text_is_refused(pack: Path, field: str) -> None:
    """A text file far larger than any tokenizer is not read."""
    with (pack / "text").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    _edit(pack, lambda d: d["text"].update({field: "text"}))
    with pytest.raises(ModelError, match=r"text: larger than"):
        open_pack(pack)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b"])
def test_a_text_outside_the_folder_is_refused(pack: Path, name: str) -> None:
    """A pack cannot make the daemon read files of other folders."""
    _edit(pack, lambda d: d["text"].update(chat_template=name))
    with pytest.raises(ModelError, match=r"text.chat_template .* is not a plain file name"):
        open_pack(pack)


def test_a_pack_for_another_backend_names_the_command(pack: Path) -> None:
    """A pack made for cuda is refused on the CPU with what to run instead."""
    _edit(pack, lambda d: d.update(backend="cuda"))
    with pytest.raises(
        ModelError, match="for the cuda backend, not for cpu; make another with `colibrid convert --backend cpu HF_DIR"
    ):
        open_pack(pack, backend="cpu")
    assert open_pack(pack).manifest.backend == "cuda"


def test_without_checksums_there_is_a_warning(pack: Path) -> None:
    """Absent crc32c values are allowed, and said."""
    _edit(pack, lambda d: [file.pop("crc32c") for file in d["files"][1:]])
    (warning,) = open_pack(pack).warnings
    assert "8 of 9 files have no crc32c" in warning


def test_sizes_are_not_asked_for_without_files(pack: Path) -> None:
    """With dummy weights the files of weights need not exist."""
    for path in pack.glob("*.bin"):
        path.unlink()
    assert len(open_pack(pack, check_files=False).manifest.files) == 9


# ------------------------------------------------------------------ hand-written

HAND_WRITTEN = {
    "precision": "fp32",
    "hyperparameters": {"vocab_size": 20, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "tied_head": True, "qkv_bias": True},
    "layers": [
        {"ffn": "moe", "experts": 4, "experts_per_token": 2, "expert_width": 24, "shared_width": 40, "shared_gated": True},
        {"ffn": "moe", "experts": 4, "experts_per_token": 2, "expert_width": 24, "shared_width": 40, "shared_gated": True},
    ],
}  # fmt: skip


def test_a_small_hand_written_description_loads(pack: Path) -> None:
    """Files, names, frequencies and sizes are filled in; the model is the same, with a warning about checksums."""
    whole = Reference(pack).forward([1, 2, 3])["logits"]
    (pack / "colibri.json").write_text(json.dumps(HAND_WRITTEN))
    opened = open_pack(pack)
    assert opened.manifest.name == "pack"
    assert opened.manifest.layers[1].expert_files[3] == "expert_1_3.bin"
    assert len(opened.warnings) == 1
    np.testing.assert_allclose(Reference(pack).forward([1, 2, 3])["logits"], whole, rtol=1e-12)


def test_a_hand_written_pack_may_be_for_the_cpu(tmp_path: Path) -> None:
    """With `backend: cpu` files that are not described hold rows16."""
    pack = tmp_path / "pack"
    case = next(case for case in CASES if case.name == "qwen-odd-sizes")
    convert(write_checkpoint(case, tmp_path / "src"), pack, crc32c=zlib.crc32)
    expected = Reference(pack).forward([1, 2, 3])["logits"]
    _edit(pack, lambda described: described.pop("files"))
    np.testing.assert_array_equal(Reference(pack).forward([1, 2, 3])["logits"], expected)


def test_a_hand_written_folder_may_be_packed_without_gaps(tmp_path: Path) -> None:
    """Expert files that are gate, up and down one right after the other load as well, told by their size."""
    case = next(case for case in CASES if case.name == "qwen-odd-sizes")
    convert(write_checkpoint(case, tmp_path / "src"), tmp_path / "pack", crc32c=zlib.crc32, backend="any")
    pack = tmp_path / "pack"
    expected = Reference(pack).forward([1, 2, 3])["logits"]

    def strip(described: dict[str, Any]) -> None:
        for file in described.pop("files"):
            data = (pack / file["name"]).read_bytes()
            sections = [data[s["offset"] : s["offset"] + s["bytes"]] for s in file["sections"]]
            (pack / file["name"]).write_bytes(b"".join(sections))

    _edit(pack, strip)
    opened = open_pack(pack)
    assert all(file.bytes == layout.packed(file).bytes for file in opened.manifest.files)
    np.testing.assert_array_equal(Reference(pack).forward([1, 2, 3])["logits"], expected)


def test_a_hand_written_pack_of_the_wrong_size_says_what_was_expected(pack: Path) -> None:
    """A hand-made expert file of the wrong size is named with both sizes."""
    (pack / "colibri.json").write_text(json.dumps(HAND_WRITTEN))
    path = pack / "expert_0_1.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"expert_0_1.bin: 9216 bytes expected, 9212 found"):
        open_pack(pack)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("layers", 0, "experts", "many"), "experts"),
        (_set("layers", 0, "experts", 1 << 40), "experts"),
        (_set("layers", "none"), "layers"),
        (_set("hyperparameters", "head_dim", "8"), "head_dim"),
        (_set("hyperparameters", []), "hyperparameters"),
        (_set("precision", "int8"), "precision"),
        (_set("files", [1, 2]), "files"),
        (_set("files", "all"), "files"),
        (_set("files", 7), "files"),
        (_set("files", [{"name": ["dense.bin"]}]), "files"),
        (_set("hyperparameters", "rope_theta", "big"), "rope_inv_freq"),
        (_set("hyperparameters", "vocab_size", 1 << 31), "vocab_size"),
    ],
)
def test_mistakes_in_a_hand_written_description_are_named(
    change: Callable[[dict[str, Any]], Any], message: str, pack: Path
) -> None:
    """Filling in never hides a wrong value and never crashes on one."""
    described = json.loads(json.dumps(HAND_WRITTEN))
    change(described)
    (pack / "colibri.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=message):
        open_pack(pack)


def test_two_layers_may_name_one_expert_file(pack: Path) -> None:
    """A file that two (layer, expert) pairs name is described once."""
    shutil.copyfile(pack / "expert_0_1.bin", pack / "expert_1_2.bin")
    described = json.loads((pack / "colibri.json").read_text())
    described["layers"][1]["expert_files"][2] = "expert_0_1.bin"
    described["files"] = [file for file in described["files"] if file["name"] != "expert_1_2.bin"]
    (pack / "colibri.json").write_text(json.dumps(described))
    separate = Reference(pack).forward([4, 5])["logits"]
    (pack / "expert_1_2.bin").unlink()
    np.testing.assert_array_equal(Reference(pack).forward([4, 5])["logits"], separate)
    assert len(open_pack(pack).manifest.files) == 8
