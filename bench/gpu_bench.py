"""Measure the CUDA seams and the router on this machine's GPU 0; part of bench/gpu_check.sh.

    python bench/gpu_bench.py --cubins FOLDER --out results.json

Every line is a median. Times of kernels are taken with device events around replays of one graph that walks over
enough input sets to leave the L2 cache; the roof is this run's own device-to-device copy. Needs numpy and the cubins
of kernels_cu/build.py for router.cu and tests/cuda/seam_kernels.cu.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cuda")]

import cuda_harness as harness  # noqa: E402 - found through the path above
import numpy as np  # noqa: E402 - found through the path above

from colibrid.engine import device_cuda  # noqa: E402 - found through the path above

ROUTER_SHAPES = [(8192, 8, 2), (8192, 60, 4), (8192, 128, 8), (32, 128, 8), (1, 128, 8)]
SETS_BYTES = 160 << 20  # inputs of one replay: well beyond any L2


def timed(work: Any) -> tuple[float, Any]:
    """Milliseconds and the value of one call."""
    begin = time.perf_counter()
    value = work()
    return (time.perf_counter() - begin) * 1e3, value


def measure_setup(cubins: Path) -> dict[str, Any]:
    """Milliseconds of everything that happens once, and what the loader says where a cubin is missing."""
    rows: dict[str, Any] = {}
    rows["cuInit and probe"], info = timed(lambda: device_cuda.probe(0))
    rows["context and stream"], device = timed(lambda: device_cuda.CudaDevice.open(0))
    with device:
        rows["arena of 8 GiB"], _ = timed(lambda: device.take_arena(8 << 30))
        rows["load 2 cubins, check 4 kernels"], _ = timed(lambda: device.load(cubins))
        rows["the same again"], _ = timed(lambda: device.load(cubins))
        for mib in (1, 64, 1024):
            mapping = harness.Mapping(mib << 20)
            rows[f"register a memfd of {mib} MiB"], _ = timed(lambda m=mapping: device.map_host(m.address, m.bytes))
        rows["pinned 1 MiB"], pinned = timed(lambda: device.pinned(1 << 20))
        rows["describe (20 entry points)"], _ = timed(lambda: device.describe(pinned=pinned, channel_device=1))
        warnings: list[str] = []
        device.warn = warnings.append
        with tempfile.TemporaryDirectory() as folder:
            manifest = json.loads((cubins / "manifest.json").read_text())
            manifest["images"] = [entry for entry in manifest["images"] if entry["kind"] == "ptx"]
            for entry in manifest["images"]:
                (Path(folder) / entry["file"]).write_bytes((cubins / entry["file"]).read_bytes())
            (Path(folder) / "manifest.json").write_text(json.dumps(manifest))
            rows["load the PTX instead"], _ = timed(lambda: device.load(Path(folder)))
            rows["load the PTX again"], _ = timed(lambda: device.load(Path(folder)))
        rows["PTX warning"] = warnings[0] if warnings else "NONE"
    rows["device"] = f"{info.name}, sm_{info.capability[0]}{info.capability[1]}, CUDA {info.driver_api}"
    return rows


class RegisteredGpu(harness.Gpu):
    """The mailbox in registered memfd memory instead of the driver's own."""

    def pinned(self, size: int) -> device_cuda.HostMemory:
        self.mapping = harness.Mapping(size)
        address, size = self.mapping.address, self.mapping.bytes
        return device_cuda.HostMemory(address, self.device.map_host(address, size), size)


def quantiles(values: np.ndarray) -> str:
    low, middle, high = np.percentile(values, [5, 50, 99])
    return f"{middle:8.2f} {low:8.2f} {high:8.2f}"


def measure_seams(library: ctypes.CDLL, cubins: Path) -> dict[str, str]:
    """Microseconds (median, p5, p99) of a step of four kernels: of the launching call, and until the host knows."""
    table = np.random.default_rng(1).normal(0, 2, (97, 128)).astype(np.float32)
    rows: dict[str, str] = {}
    modes = ("graph, mailbox", "graph, cuStreamSynchronize", "4 launches, mailbox", "copy + graph, mailbox")
    count = 3000
    for kind, made in (("pinned", harness.Gpu), ("memfd", RegisteredGpu)):
        for edge in (0, 1):
            backend = made(cubins)
            trial = harness.Trial(library, backend, table, k=8, k_max=8, edge=edge)
            assert trial.status == 0
            name = f"{'programmatic' if edge else 'full'} edges, mailbox {kind}"
            for mode, label in enumerate(modes):
                if kind == "memfd" and mode != 0:
                    continue
                launch, done = np.zeros(count), np.zeros(count)
                status = library.seam_measure(trial.handle, mode, count, launch.ctypes.data, done.ctypes.data)
                assert status == 0, status
                rows[f"{name}: {label}: call"] = quantiles(launch[200:])
                rows[f"{name}: {label}: known"] = quantiles(done[200:])
            cpu, gpu = ctypes.c_double(), ctypes.c_double()
            for eager in (0, 1):
                status = library.seam_period(trial.handle, eager, 5000, ctypes.byref(cpu), ctypes.byref(gpu))
                assert status == 0, status
                label = "back to back, 4 launches" if eager else "back to back, graph"
                rows[f"{name}: {label}: host / device"] = f"{cpu.value:8.2f} {gpu.value:8.2f}"
            rows[f"{name}: edges of the captured graph"] = edges_of(library, backend, trial)
            trial.close()
            backend.close()
    return rows


def edges_of(library: ctypes.CDLL, backend: harness.Gpu, trial: harness.Trial) -> str:
    """How many edges the captured graph has, and how many of them are programmatic."""
    driver = backend.device.driver
    graph = driver.CUgraph(library.seam_graph(trial.handle))
    status, _, _, _, count = driver.cuGraphGetEdges(graph)
    assert int(status) == 0, status
    status, _, _, data, count = driver.cuGraphGetEdges(graph, count)
    assert int(status) == 0, status
    return f"{count} edges, {sum(int(entry.type) == 1 for entry in data)} programmatic"


def measure_copy(backend: harness.Gpu) -> float:
    """GB/s of a device-to-device copy of 1 GiB, bytes read plus bytes written."""
    driver, stream, size = backend.device.driver, backend.stream, 1 << 30
    source, target = backend.arena(size), backend.arena(size)
    best = 0.0
    for _ in range(5):
        backend.device.synchronise()
        begin = time.perf_counter()
        for _ in range(8):
            driver.cuMemcpyDtoDAsync(target, source, size, stream)
        backend.device.synchronise()
        best = max(best, 16 * size / (time.perf_counter() - begin) / 1e9)
    return best


def measure_router(library: ctypes.CDLL, cubins: Path) -> list[dict[str, Any]]:
    backend = harness.Gpu(cubins, arena_bytes=6 << 30)
    roof = measure_copy(backend)
    driver = harness.make_driver(library, backend)
    rows = [{"op": "copy 1 GiB", "shape": "", "us": 2 * (1 << 30) / roof / 1e3, "gbs": roof, "roof": 100.0}]
    for tokens, experts, k in ROUTER_SHAPES:
        each = tokens * experts * 4
        sets = max(2, min(64, -(-SETS_BYTES // each))) if tokens > 64 else 32
        runs = [harness.RouterRun(backend, max_tokens=tokens, experts=experts, k=k, k_max=k) for _ in range(sets)]
        rng = np.random.default_rng(2)
        policies = np.zeros((tokens, 2), np.uint32)
        for run in runs:
            run.upload(driver, rng.normal(0, 2, (tokens, experts)).astype(np.float32), policies)
            run.run(driver)
        moved = each + tokens * (8 * k + 4 + 8) + tokens * k * 8 + experts * 8
        for op, which in (("router", (0,)), ("bucket", (1,)), ("router + bucket", (0, 1))):
            launches = [run.launches[i] for run in runs for i in which]
            array = (harness.Launch * len(launches))(*launches)
            ms = np.zeros(60, np.float32)
            status = library.seam_time(
                ctypes.byref(driver), backend.stream, ctypes.byref(array), len(launches), len(ms), ms.ctypes.data
            )
            assert status == 0, status
            us = float(np.median(ms)) * 1e3 / sets
            row = {"op": op, "shape": f"{tokens} x {experts} k{k}", "us": us}
            if op == "router + bucket":
                row |= {"gbs": moved / us / 1e3, "roof": moved / us / 1e3 / roof * 100}
            rows.append(row)
    backend.close()
    return rows


def fault(library: ctypes.CDLL, cubins: Path) -> str:
    """What the driver table says after a kernel wrote to an address that does not exist. Ruins this process."""
    backend = harness.Gpu(cubins)
    driver = harness.make_driver(library, backend)
    run = harness.RouterRun(backend, max_tokens=4, experts=8, k=2, k_max=2)
    run.upload(driver, np.zeros((4, 8), np.float32), np.zeros((4, 2), np.uint32))
    run.router.indices = 0x10
    this = ctypes.byref(driver)
    answers = [
        ("launch", driver.launch(this, backend.stream, ctypes.byref(run.launches[0]))),
        ("wait", driver.stream_wait(this, backend.stream)),
        ("next launch", driver.launch(this, backend.stream, ctypes.byref(run.launches[1]))),
    ]
    text = ", ".join(f"{name}: status {status}" for name, status in answers)
    return f"{text}; {driver.last_name.decode()} ({driver.last_code})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cubins", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", action="store_true", help="only the fault answer; used by this script itself")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = harness.build_library(Path(folder))
        if library is None:
            print("no C compiler", file=sys.stderr)
            return 1
        if options.fault:
            print(fault(library, options.cubins))
            return 0
        results: dict[str, Any] = {"setup_ms": measure_setup(options.cubins)}
        results["seams_us"] = measure_seams(library, options.cubins)
        results["router"] = measure_router(library, options.cubins)
        command = [sys.executable, __file__, "--cubins", str(options.cubins), "--out", "-", "--fault"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        results["fault"] = ended.stdout.strip() or ended.stderr[-500:]
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, value in results["setup_ms"].items():
        print(f"{name:40} {value:10.2f} ms" if isinstance(value, float) else f"{name:40} {value}")
    print(f"\n{'us a step of 4 kernels, 8 rows':88}   median       p5      p99")
    for name, value in results["seams_us"].items():
        print(f"{name:88} {value}")
    print(f"\nafter a fault: {results['fault']}")
    print(f"\n{'op':16} {'shape':>18} {'us':>9} {'GB/s':>8} {'% of roof':>10}")
    for row in results["router"]:
        text = f"{row['op']:16} {row['shape']:>18} {row['us']:9.2f}"
        print(text + (f" {row['gbs']:8.0f} {row['roof']:10.1f}" if "gbs" in row else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
