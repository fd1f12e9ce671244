"""Prints the sources of the CUDA kernels, one a line: meson rebuilds the cubins when one of them changes."""

from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels_cu"

for path in sorted(KERNELS.iterdir()):
    if path.suffix in (".cu", ".cuh", ".h", ".py"):
        print(path)
