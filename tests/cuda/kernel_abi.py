"""The structs of kernels_cu/abi.h as ctypes classes, read from the header itself, so that there is no second truth.

struct("clb_matmul_args")(rows=32, ...)    unnamed members are 0
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

HEADER = Path(__file__).resolve().parents[2] / "kernels_cu" / "abi.h"
_SCALARS = {
    "uint64_t": ctypes.c_uint64, "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "float": ctypes.c_float,
}  # fmt: skip


@functools.cache
def _text() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


@functools.cache
def constant(name: str) -> int:
    """The value of a #define that is a plain unsigned number."""
    found = re.search(rf"#define {name} (\d+)u\b", _text())
    assert found, f"{name} is not in abi.h"
    return int(found[1])


@functools.cache
def struct(name: str) -> Any:
    """The class of struct `name`; its size is checked against the header's own assertion."""
    found = re.search(rf"typedef struct \w+ \{{([^}}]*)\}} {name};", _text())
    assert found, f"{name} is not in abi.h"
    fields: list[tuple[str, Any]] = []
    for line in filter(None, (part.strip() for part in found[1].split(";"))):
        if pointer := re.fullmatch(r"CLB_DEVICE_PTR\([^)]*\)\s*(\w+)", line):
            fields.append((pointer[1], ctypes.c_uint64))
            continue
        member = re.fullmatch(r"(\w+)\s+(\w+)(?:\[(\w+)\])?", line)
        assert member, f"{name}: what is {line!r}?"
        kind = _SCALARS.get(member[1]) or struct(member[1])
        fields.append((member[2], kind * constant(member[3]) if member[3] else kind))
    made = type(name, (ctypes.Structure,), {"_fields_": fields})
    size = re.search(rf"CLB_SIZE_ASSERT\({name}, (\d+)\)", _text())
    assert size, f"{name} has no CLB_SIZE_ASSERT"
    assert ctypes.sizeof(made) == int(size[1]), f"{name} has {ctypes.sizeof(made)} bytes here"
    return made
