"""Damage to the bundled model's pack, and that it is refused: by the size of a file, or by the checksum of a piece.

Needs tests/in_process.py beside it on the path: engines are opened in this process, so that thousands can be tried.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from fault_kit import require
from in_process import InProcessEngine, crc32c

import colibrid
from colibrid.errors import ModelError
from colibrid.model.convert import convert
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator

CUT = 4096


def bundled_copy(folder: Path) -> Path:
    """hummingbird-13m as a pack of its own."""
    pack = folder / "whole.colibri"
    convert(Path(colibrid.__file__).parent / "models" / "hummingbird-13m", pack, crc32c=crc32c)
    return pack


def weight_files(pack: Path) -> list[Path]:
    return [pack / file.name for file in open_pack(pack).manifest.files]


def truncations(pack: Path, most: int) -> int:
    """Shorten each file by 4 KiB again and again, `most` times all together at the most; returns how often."""
    files = weight_files(pack)
    every = max(1, sum(file.stat().st_size // CUT for file in files) // most)
    done = 0
    for file in files:
        whole = file.read_bytes()
        for size in range((len(whole) - 1) // CUT * CUT, -1, -CUT * every):
            os.truncate(file, size)
            said = _refusal(pack)
            require(file.name in said and str(size) in said and str(len(whole)) in said, f"cut at {size}: {said}")
            done += 1
        file.write_bytes(whole)
    open_pack(pack)
    return done


def flips(pack: Path, most: int) -> Iterator[str]:
    """Flip one bit after another, in every file and wherever else; yields what the refusals say."""
    files = weight_files(pack)
    draw = random.Random(4)  # noqa: S311 (repeatable, no secrets)
    sizes = [file.stat().st_size for file in files]
    picked = files[:most] + draw.choices(files, sizes, k=max(0, most - len(files)))
    for file in picked:
        place, bit = draw.randrange(file.stat().st_size), 1 << draw.randrange(8)
        with file.open("r+b", buffering=0) as opened:
            byte = os.pread(opened.fileno(), 1, place)[0]
            os.pwrite(opened.fileno(), bytes([byte ^ bit]), place)
            said = _refusal(pack, load=True)
            os.pwrite(opened.fileno(), bytes([byte]), place)
        named = file.name in said and "crc32c is" in said and "expected" in said
        require(named, f"bit {bit} of byte {place} of {file.name}: {said}")
        yield said
    with InProcessEngine(pack, slots=1, max_seq_len=64):
        pass  # everything was put back


def _refusal(pack: Path, *, load: bool = False) -> str:
    try:
        open_pack(pack)
        if load:
            with InProcessEngine(pack, slots=1, max_seq_len=64):
                pass
    except ModelError as error:
        return str(error)
    return "accepted"
