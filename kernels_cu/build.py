#!/usr/bin/env python3
"""Compile the CUDA kernels: one cubin per source and architecture, PTX of the sm_80 set, and manifest.json.

    python3 kernels_cu/build.py --out build/cubins            sm_80 and sm_90a (what CI compiles)
    python3 kernels_cu/build.py --out build/cubins --all      also sm_86, sm_89, sm_100, sm_120
    python3 kernels_cu/build.py --out build/cubins --arch sm_90a    only this one

Needs nvcc 13 (on PATH, or --nvcc, or $CUDA_HOME/bin/nvcc). Exits 1 iff a source does not compile, a kernel
spills registers or uses a stack frame, ptxas serializes wgmma, or a kernel has other than one parameter; exits 3 iff
there is no nvcc.
The manifest names for every image its sha256 and for every kernel registers, shared memory and spills, and
for every kernel the bytes of its argument struct, which the loader compares with the driver's own answer.
Standard library only: it runs on machines that have nothing of ours installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_ARCHES = ("sm_80", "sm_90a")
MORE_ARCHES = ("sm_86", "sm_89", "sm_100", "sm_120")
PTX_ARCH = "compute_80"
# Fast-math is never allowed: it would change divisions and exponentials behind the host twin's back.
FLAGS = ("-std=c++17", "-O3", "--ftz=true", "-Werror", "all-warnings")

_SLOW = "Potential Performance Loss"  # ptxas serializes wgmma, or does not move registers between warps
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_PTX_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PTX_PARAM = re.compile(r"\.param\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]")


def find_nvcc(named: str | None) -> str | None:
    """The compiler to use, or None."""
    home = os.environ.get("CUDA_HOME")
    candidates = [named] if named else [shutil.which("nvcc"), f"{home}/bin/nvcc" if home else None]
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((c for c in candidates if c and shutil.which(c)), None)


def run(command: list[str]) -> str:
    """Stdout and stderr of a compiler call; prints them and exits 1 if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise SystemExit(1)
    return done.stdout + done.stderr


def read_resources(log: str) -> dict[str, dict[str, int]]:
    """What ptxas -v says of each kernel: registers, static shared memory, stack and spills in bytes."""
    kernels: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = kernels.setdefault(entry[1], {"registers": 0, "shared_bytes": 0})
        elif frame := _FRAME.search(line):
            current.update(stack_bytes=int(frame[1]), spill_store_bytes=int(frame[2]), spill_load_bytes=int(frame[3]))
        elif used := _USED.search(line):
            smem = _SMEM.search(line)
            current.update(registers=int(used[1]), shared_bytes=int(smem[1]) if smem else 0)
    return kernels


def read_parameters(ptx: str) -> dict[str, int]:
    """Bytes of the one argument struct of each kernel."""
    sizes: dict[str, int] = {}
    for name, parameters in _PTX_ENTRY.findall(ptx):
        found = _PTX_PARAM.findall(parameters)
        if len(found) != 1:
            print(f"{name}: {len(found)} struct parameters, expected exactly 1", file=sys.stderr)
            raise SystemExit(1)
        sizes[name] = int(found[0])
    return sizes


def spilling(kernels: dict[str, dict[str, int]]) -> list[str]:
    """Names of kernels that touch local memory."""
    keys = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
    return [name for name, used in kernels.items() if any(used.get(key, 0) for key in keys)]


def image(path: Path, source: Path, arch: str, kind: str, kernels: dict[str, dict[str, int]]) -> dict[str, Any]:
    data = path.read_bytes()
    return {
        "file": path.name,
        "source": source.stem,
        "arch": arch,
        "kind": kind,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "kernels": kernels,
    }


def compile_ptx(nvcc: str, source: Path, out: Path) -> dict[str, Any]:
    """The fallback that a driver compiles for GPUs without a cubin."""
    ptx = out / f"{source.stem}.sm_80.ptx"
    run([nvcc, *FLAGS, f"-I{HERE}", "-ptx", f"-arch={PTX_ARCH}", "-o", str(ptx), str(source)])
    return image(ptx, source, "sm_80", "ptx", {name: {} for name in read_parameters(ptx.read_text())})


def compile_cubin(nvcc: str, source: Path, arch: str, out: Path) -> dict[str, Any]:
    """Machine code for one architecture; exits 1 if a kernel touches local memory."""
    cubin = out / f"{source.stem}.{arch}.cubin"
    command = [nvcc, *FLAGS, f"-I{HERE}", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-o", str(cubin), str(source)]
    log = run(command)
    kernels = read_resources(log)
    if bad := spilling(kernels):
        print(f"{source.name} for {arch}: {', '.join(bad)} uses local memory\n{log}", file=sys.stderr)
        raise SystemExit(1)
    if _SLOW in log:
        print(f"{source.name} for {arch}: wgmma is not used as meant\n{log}", file=sys.stderr)
        raise SystemExit(1)
    return image(cubin, source, arch, "cubin", kernels)


def build(nvcc: str, sources: list[Path], arches: list[str], out: Path) -> dict[str, Any]:
    """Compile everything into `out`, write manifest.json there, return it."""
    out.mkdir(parents=True, exist_ok=True)
    abi = re.search(r"#define CLB_KERNELS_ABI (\d+)u", (HERE / "abi.h").read_text())
    if abi is None:
        raise SystemExit("kernels_cu/abi.h does not define CLB_KERNELS_ABI")
    parameters: dict[str, int] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = [pool.submit(compile_ptx, nvcc, source, out) for source in sources]
        codes = [pool.submit(compile_cubin, nvcc, source, arch, out) for source in sources for arch in arches]
        images = [future.result() for future in (*texts, *codes)]
    for text in texts:
        parameters |= read_parameters((out / text.result()["file"]).read_text())
    manifest = {
        "abi_version": int(abi[1]),
        "nvcc": run([nvcc, "--version"]).strip().splitlines()[-1],
        "parameter_bytes": parameters,
        "images": images,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    os.utime(out)  # its time tells build tools that everything in it is new
    return manifest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for cubins, PTX and manifest.json")
    parser.add_argument("--all", action="store_true", help=f"also {', '.join(MORE_ARCHES)} where nvcc has them")
    parser.add_argument("--arch", action="append", help="only this one; may be repeated")
    parser.add_argument("--nvcc", help="the compiler; default: PATH, then $CUDA_HOME")
    parser.add_argument("sources", nargs="*", type=Path, help="default: every .cu beside this script")
    options = parser.parse_args()
    nvcc = find_nvcc(options.nvcc)
    if nvcc is None:
        print("nvcc was not found: install the CUDA 13 toolkit, or pass --nvcc", file=sys.stderr)
        return 3
    arches = options.arch or list(DEFAULT_ARCHES)
    if options.all:
        known = run([nvcc, "--list-gpu-code"]).split()
        arches += [arch for arch in MORE_ARCHES if arch in known]
    manifest = build(nvcc, options.sources or sorted(HERE.glob("*.cu")), arches, options.out)
    for entry in manifest["images"]:
        for name, used in entry["kernels"].items() if entry["kind"] == "cubin" else ():
            print(f"{name:24} {entry['arch']:7} {used['registers']:4} registers {used['shared_bytes']:6} B shared")
    print(f"{len(manifest['images'])} images in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
