from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from random_checkpoints import write_safetensors, write_tensors

from colibrid.errors import ModelError
from colibrid.model.checkpoint import Checkpoint, header_bytes, text_files

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.float32([7, 8]),
    "c": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tensors in one bf16 file."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, TENSORS, "bf16")
    return tmp_path


def _rewrite_header(path: Path, change: object) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_tensors_of_one_file_are_read(folder: Path) -> None:
    """Names, shapes, types and bytes come out as they were written."""
    with Checkpoint(folder) as checkpoint:
        info = checkpoint.tensors["a"]
        assert (info.shape, info.dtype, info.precision, info.bytes) == ((2, 3), "BF16", "bf16", 12)
        bits = np.frombuffer(checkpoint.read(info, 4, 8), np.uint16)
        np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), [2, 3, 4, 5])
        assert checkpoint.tensors["c"].shape == (0, 4)


def test_shards_are_joined(tmp_path: Path) -> None:
    """The tensors of all shards that the index names are there."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, TENSORS, "fp32", shards=2)
    with Checkpoint(tmp_path) as checkpoint:
        assert {name: info.file for name, info in checkpoint.tensors.items()} == {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00001-of-00002.safetensors",
        }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """A shard that the index names but the folder lacks is an error that names the file."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, TENSORS, "fp32", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors: missing"):
        Checkpoint(tmp_path)


def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path: Path) -> None:
    """A tensor must be in the file that the index says."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, TENSORS, "fp32", shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="tensor a is in model-00002-of-00002"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", ".hidden.safetensors", "weights.bin"])
def test_hostile_shard_names_are_refused(folder: Path, name: str) -> None:
    """The index cannot lead out of the folder or to other kinds of files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="not the name of a safetensors file"):
        Checkpoint(folder)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Two shards with one tensor are ambiguous."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("x.safetensors", "y.safetensors"):
        write_safetensors(tmp_path / name, {"a": TENSORS["a"]}, "fp32")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor a is in x.safetensors and again in y.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8, 20, -1])
def test_truncated_files_are_refused(folder: Path, size: int) -> None:
    """A file that ends in its length, its header or its data is refused before anything is read from it."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "offsets",
    [[0, 1 << 40], [-8, 4], [4, 0], [0, 11], [2, 14], [1 << 63, (1 << 63) + 12]],
)
def test_impossible_offsets_are_refused(folder: Path, offsets: list[int]) -> None:
    """Offsets outside the file, reversed, overlapping or not matching the shape are refused."""
    _rewrite_header(folder / "model.safetensors", lambda header: header["a"].update(data_offsets=offsets))
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        Checkpoint(folder)


def test_a_shape_that_overflows_is_refused(folder: Path) -> None:
    """Dimensions whose product wraps around are refused."""
    _rewrite_header(folder / "model.safetensors", lambda header: header["a"].update(shape=[1 << 33, 1 << 33]))
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        Checkpoint(folder)


def test_a_header_of_absurd_length_is_refused(tmp_path: Path) -> None:
    """The length is checked before memory is taken for it."""
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelError, match="header of 1152921504606846976 bytes"):
        header_bytes(tmp_path / "x.safetensors")


def test_an_unsupported_type_is_named(folder: Path) -> None:
    """A type that cannot be converted is named together with the tensor."""
    _rewrite_header(folder / "model.safetensors", lambda header: header["a"].update(dtype="I16"))
    with Checkpoint(folder) as checkpoint, pytest.raises(ModelError, match="tensor a has type I16"):
        _ = checkpoint.tensors["a"].precision


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    """Reads behind the end raise; they never return other bytes."""
    with Checkpoint(folder) as checkpoint:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ModelError, match="ended inside tensor b"):
            checkpoint.read(checkpoint.tensors["b"], 0, 4)


def test_reads_outside_a_tensor_are_a_mistake_of_the_caller(folder: Path) -> None:
    """One tensor's bytes cannot be read through another."""
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match="outside"):
        checkpoint.read(checkpoint.tensors["a"], 4, 9)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\ufeff{}", "[" * 100_000])
def test_a_broken_config_is_an_error(tmp_path: Path, text: str) -> None:
    """config.json that is not a JSON object is refused by name."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_is_read(tmp_path: Path) -> None:
    """Other formats are not guessed at."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="only safetensors"):
        Checkpoint(tmp_path)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    """generation_config.json's eos ids win over config.json's; one id and a list are both read."""
    config = {"eos_token_id": 5, "bos_token_id": 1}
    assert text_files(tmp_path, config).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8], "bos_token_id": null}')
    texts = text_files(tmp_path, config)
    assert (texts.eos_token_ids, texts.bos_token_id) == ((7, 8), 1)


def test_bad_end_ids_are_refused(tmp_path: Path) -> None:
    """Ids that are not ids are named."""
    for value in ("</s>", [1, None], -1, True, 1.5):
        with pytest.raises(ModelError, match="eos_token_id"):
            text_files(tmp_path, {"eos_token_id": value})


def test_texts_that_exist_are_named(tmp_path: Path) -> None:
    """The jinja file is preferred over the JSON form of a chat template; absent files are none."""
    for name in ("tokenizer.json", "chat_template.jinja", "chat_template.json"):
        (tmp_path / name).write_text("{}")
    texts = text_files(tmp_path, {})
    assert (texts.tokenizer, texts.tokenizer_config) == ("tokenizer.json", None)
    assert texts.chat_template == "chat_template.jinja"
