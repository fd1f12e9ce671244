"""Reads a Hugging Face folder: config.json, text files, and safetensors in one file or in shards with an index.

The safetensors library validates every header (bounds, overlaps, sizes); the bytes are then read here, because
numpy has no bfloat16. Reads are positional, so a file that shrinks meanwhile is an error and not a signal.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Self

import msgspec

from colibrid.errors import ModelError
from colibrid.model.manifest import FloatPrecision, TextFiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_JSON_BYTES = 256 << 20
MAX_HEADER_BYTES = 100 << 20  # the format's own limit is 100 MB
PRECISION_BY_DTYPE: dict[str, FloatPrecision] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
# In the pack under the same name; the last two are alternatives.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies."""

    name: str
    file: str
    dtype: str  # safetensors' name: "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    bytes: int

    @property
    def precision(self) -> FloatPrecision:
        """ModelError: a type that cannot be converted."""
        found = PRECISION_BY_DTYPE.get(self.dtype)
        if found is None:
            raise ModelError(
                f"{self.file}: tensor {self.name} has type {self.dtype}; supported: {', '.join(PRECISION_BY_DTYPE)}"
            )
        return found


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """An object from one of the folder's JSON files. ModelError: unreadable or something else."""
    data = read_bounded(folder / name, MAX_JSON_BYTES)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{folder / name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{folder / name}: expected a JSON object, found {type(value).__name__}")
    return value


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a small file. ModelError: unreadable or over the limit."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise ModelError(f"{path}: larger than {limit} bytes")
    return data


def shard_names(folder: Path) -> tuple[str, ...]:
    """The safetensors files of a checkpoint, sorted; those that the index names, else the single file."""
    if (folder / INDEX_FILE).exists():
        names = tuple(sorted(set(_read_index(folder).values())))
    elif (folder / SINGLE_FILE).exists():
        names = (SINGLE_FILE,)
    else:
        raise ModelError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints are read")
    for name in names:
        if "/" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise ModelError(f"{INDEX_FILE}: {name!r} is not the name of a safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: missing, though {INDEX_FILE} names it; download the checkpoint again")
    return names


def _read_index(folder: Path) -> dict[str, str]:
    try:
        return msgspec.convert(read_json(folder, INDEX_FILE), _Index).weight_map
    except msgspec.ValidationError as error:
        raise ModelError(f"{folder / INDEX_FILE}: {error}") from None


def header_bytes(path: Path) -> bytes:
    """The raw JSON header of a safetensors file. ModelError: too short, or an impossible length."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise ModelError(f"{path}: not a safetensors file: header of {size} bytes")
            header = file.read(size)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(header) != size:
        raise ModelError(f"{path}: truncated: header of {size} bytes expected, {len(header)} found")
    return header


class Checkpoint:
    """An open checkpoint. Owns one descriptor per shard; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder, "config.json")
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors: dict[str, int] = {}
        try:
            for name in shard_names(folder):
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
                self._add_shard(name)
            self._check_index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, info: TensorInfo, begin: int, count: int) -> bytearray:
        """`count` bytes of a tensor from its byte `begin`. ModelError: the file ended before them."""
        if begin < 0 or count < 0 or begin + count > info.bytes:
            raise ValueError(f"bytes {begin} to {begin + count} of {info.name} are outside its {info.bytes}")
        buffer = bytearray(count)
        view = memoryview(buffer)
        done = 0
        while done < count:
            got = os.preadv(self._descriptors[info.file], [view[done:]], info.offset + begin + done)
            if got == 0:
                raise ModelError(f"{info.file}: ended inside tensor {info.name}; download the checkpoint again")
            done += got
        return buffer

    def _add_shard(self, name: str) -> None:
        path = self.folder / name
        header = header_bytes(path)
        _validate(path)
        entries = msgspec.json.decode(header, type=dict[str, Any])
        entries.pop("__metadata__", None)
        for tensor, entry in msgspec.convert(entries, dict[str, _Entry]).items():
            if tensor in self.tensors:
                raise ModelError(f"tensor {tensor} is in {self.tensors[tensor].file} and again in {name}")
            begin, end = entry.data_offsets
            self.tensors[tensor] = TensorInfo(
                tensor, name, entry.dtype, entry.shape, 8 + len(header) + begin, end - begin
            )

    def _check_index(self) -> None:
        if not (self.folder / INDEX_FILE).exists():
            return
        for tensor, file in _read_index(self.folder).items():
            info = self.tensors.get(tensor)
            if info is None or info.file != file:
                where = "in no file" if info is None else f"in {info.file}"
                raise ModelError(f"{INDEX_FILE}: says that tensor {tensor} is in {file}, but it is {where}")


def _validate(path: Path) -> None:
    # Imported here: it brings numpy along, which nothing but a conversion needs.
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a valid safetensors file: {error}") from None


def text_files(folder: Path, config: Mapping[str, Any]) -> TextFiles:
    """Which text files the folder has, and the ids that end a text: generation_config.json's, else config.json's."""
    present = {name for name in TEXT_FILES if (folder / name).is_file()}
    generation = read_json(folder, "generation_config.json") if "generation_config.json" in present else {}
    template = next((name for name in ("chat_template.jinja", "chat_template.json") if name in present), None)
    eos = generation.get("eos_token_id")
    bos = generation.get("bos_token_id")
    return TextFiles(
        tokenizer=_if_present("tokenizer.json", present),
        tokenizer_config=_if_present("tokenizer_config.json", present),
        chat_template=template,
        generation_config=_if_present("generation_config.json", present),
        eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id") if eos is None else eos),
        bos_token_id=next(iter(_token_ids("bos_token_id", config.get("bos_token_id") if bos is None else bos)), None),
    )


def _if_present(name: str, present: set[str]) -> str | None:
    return name if name in present else None


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 1 << 31 for i in ids):
        raise ModelError(f"{field} is {value!r}, expected a token id or a list of them")
    return tuple(ids)
