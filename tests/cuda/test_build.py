"""kernels_cu/build.py: what it reads from the compiler, and that it refuses spills."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "kernels_cu" / "build.py"
LOG = """ptxas info    : Compiling entry function 'clb_a' for 'sm_90a'
ptxas info    : Function properties for clb_a
    {stack} bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 54 registers, used 1 barriers, 2048 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'clb_b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers
"""
SPILLING = """struct Args { int* p; };
extern "C" __global__ void clb_bad(const __grid_constant__ Args a) {
  int many[64];
  for (int i = 0; i < 64; i++) many[i] = a.p[i * 32 + threadIdx.x];
  for (int i = 0; i < 64; i++) a.p[i] = many[(many[i] + i) & 63];
}
"""


@pytest.fixture(scope="module")
def build() -> Any:
    spec = importlib.util.spec_from_file_location("kernels_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_resources_are_read_from_the_compiler(build: Any) -> None:
    """Registers and shared memory of each kernel are found, and only local memory counts as spilling."""
    kernels = build.read_resources(LOG.format(stack=0, stores=0))
    assert kernels["clb_a"]["registers"] == 54
    assert kernels["clb_a"]["shared_bytes"] == 2048
    assert kernels["clb_b"]["shared_bytes"] == 0
    assert build.spilling(kernels) == []
    assert build.spilling(build.read_resources(LOG.format(stack=0, stores=8))) == ["clb_a"]
    assert build.spilling(build.read_resources(LOG.format(stack=56, stores=0))) == ["clb_a"]


def test_a_kernel_has_exactly_one_parameter(build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The struct's size is read from PTX; two parameters are refused by name."""
    one = ".visible .entry clb_a(\n.param .align 8 .b8 clb_a_param_0[104]\n)\n"
    two = ".entry clb_b(.param .align 8 .b8 x[8], .param .align 8 .b8 y[8])"
    assert build.read_parameters(one) == {"clb_a": 104}
    with pytest.raises(SystemExit):
        build.read_parameters(two)
    assert "clb_b: 2 struct parameters" in capsys.readouterr().err


def test_manifest_agrees_with_the_structs_of_c(cubins: Path) -> None:
    """The compiled kernels take structs of the sizes that abi.h asserts, for both architectures that CI compiles."""
    manifest = json.loads((cubins / "manifest.json").read_text())
    sizes = manifest["parameter_bytes"]
    assert (sizes["clb_router_fp32"], sizes["clb_bucket"]) == (136, 64)
    made = {(entry["source"], entry["arch"], entry["kind"]) for entry in manifest["images"]}
    assert {("router", arch, "cubin") for arch in ("sm_80", "sm_90a")} | {("router", "sm_80", "ptx")} <= made


def test_local_memory_fails_the_build(build: Any, tmp_path: Path) -> None:
    """A kernel that indexes a local array at run time is an error, not a warning."""
    if build.find_nvcc(None) is None:
        pytest.skip("nvcc was not found")
    source = tmp_path / "bad.cu"
    source.write_text(SPILLING)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "clb_bad uses local memory" in done.stderr
