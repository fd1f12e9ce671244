"""Write crc32c_tables.h: the eight lookup tables of engine_c/src/crc32c.c.

Usage: write_crc32c_tables.py OUTPUT
"""

from __future__ import annotations

import pathlib
import sys

POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed


def tables() -> list[list[int]]:
    first = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        first.append(crc)
    rows = [first]
    for _ in range(7):
        rows.append([(crc >> 8) ^ first[crc & 0xFF] for crc in rows[-1]])
    return rows


def main() -> None:
    lines = ["/* Made by engine_c/tools/write_crc32c_tables.py. */", "#include <stdint.h>", ""]
    lines.append("static const uint32_t clb_crc32c_tables[8][256] = {")
    for row in tables():
        lines.append("  {")
        lines += ["    " + " ".join(f"0x{value:08x}u," for value in row[i : i + 8]) for i in range(0, 256, 8)]
        lines.append("  },")
    lines.append("};")
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
