"""Writes tensors into a folder as Hugging Face does: safetensors shards with an index, one tensor in memory at a time.

The library's own writer wants all tensors at once and knows no bf16 of numpy's; the format is 8 bytes of header length,
a JSON header padded to a multiple of 8, and the tensors' bytes one after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.model.checkpoint import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from colibrid.model.floats import Array

SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written, and how its bytes are made."""

    name: str
    dtype: str  # safetensors' name: "BF16"
    shape: tuple[int, ...]
    bytes: int
    make: Callable[[], Array]


def write_tensors(
    folder: Path, entries: Sequence[Entry], progress: Callable[[int, int, str], None] = lambda *_: None
) -> None:
    """Writes one file, or as many as keep each below SHARD_BYTES. ValueError: a tensor of another size than planned."""
    shards = _shards(entries)
    total, done = sum(entry.bytes for entry in entries), 0
    places = {}
    for number, shard in enumerate(shards):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            header = _header(shard)
            file.write(struct.pack("<Q", len(header)) + header)
            for entry in shard:
                data = np.ascontiguousarray(entry.make()).data.cast("B")
                if len(data) != entry.bytes:
                    raise ValueError(f"{entry.name}: {entry.bytes} bytes planned, {len(data)} made")
                file.write(data)
                places[entry.name] = name
                done += entry.bytes
                progress(done, total, entry.name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))


def _shards(entries: Sequence[Entry]) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _header(entries: Sequence[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.bytes
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(fields)
    return text + b" " * (-len(text) % 8)
