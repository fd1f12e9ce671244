"""Write modules.json: name, file and sha256 of each CPU kernel module that the package carries.

Usage: write_modules.py OUTPUT MODULE.so ...
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys


def main() -> None:
    output, *modules = map(pathlib.Path, sys.argv[1:])
    rows = [
        {
            "name": path.stem.removeprefix("clb_"),
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(modules)
    ]
    output.write_text(json.dumps({"version": 1, "modules": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
