"""Time the kernels of quantised weights on this machine's GPU 0 beside those of bf16: microseconds and bytes that must be
read, as bench/gpu_kernels.py does.

    python bench/gpu_quant.py --cubins FOLDER --out results.json [--prompts]

Layers are Qwen3-30B-A3B's (hidden 2,048, 128 experts of 768, k 8), uniform routing. A mix gives expert e the format
number e of its list; its row ends with the time that the bytes of its pure layers of the same run would have it take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cuda"), str(ROOT / "bench")]

import cuda_harness  # noqa: E402 - found through the path above
import gpu_kernels  # noqa: E402 - found through the path above
import kernel_abi  # noqa: E402 - found through the path above
import kernel_harness as harness  # noqa: E402 - found through the path above
import numpy as np  # noqa: E402 - found through the path above
from gpu_bench import measure_copy  # noqa: E402 - found through the path above
from quantised import BY_NAME, Format  # noqa: E402 - found through the path above

from colibrid.model import formats  # noqa: E402 - found through the path above

PURE = ("fp16", "int8", "int4-g64", "int4-g128-z", "fp8")
MIX = ("fp16", "int8", "int4-g64")
BATCHES = (1, 8, 32)
EXPERTS, K, HIDDEN, WIDTH = 128, 8, 2048, 768


def matrix_bytes(rows: int, cols: int, format_: Format) -> int:
    """Bytes of a matrix as it lies in device memory."""
    if format_.kind == "half":
        return rows * cols * 2
    groups = (128 if format_.blocks else 1, format_.group or cols)
    found = formats.parts(format_.kind, "mma", (rows, cols), groups, zero_points=format_.zeros)
    return formats.align(found.bytes, 256)


class Bench(gpu_kernels.Bench):
    """The same with quantised weights; the bytes of the weights are whatever the bf16 ones are."""

    def quant_linear(self, name: str, rows: int, cols: int, batch: int, format_: Format, *, residual: bool) -> None:
        each = matrix_bytes(rows, cols, format_)
        sets = min(96, gpu_kernels.WEIGHT_BYTES // each)
        _, made = self.linear_launches(rows, cols, batch, residual=residual, sets=1)
        args = [kernel_abi.struct("clb_matmul_args").from_buffer_copy(made[0]) for _ in range(sets)]
        eight = "8_" if batch <= 8 else ""
        limit = kernel_abi.constant(f"CLB_LINEAR_QUANT_{eight}BLOCKS") * self.multiprocessors
        blocks = min(rows // 16 if eight else -(-rows // 32), limit)
        stages = kernel_abi.constant(f"CLB_LINEAR_QUANT_{eight}STAGES")
        shared = 8 * stages * (1 if eight else 2) * (512 + format_.meta)
        for i, arg in enumerate(args):
            arg.weights, arg.format = self.weights + i * each, format_.word
        launches = [
            self.machine.launch(f"clb_linear_quant_{eight}{format_.kind}", a, grid=blocks, block=256, shared=shared)
            for a in args
        ]
        self.time(f"{name} {format_}", f"{rows} x {cols}, {batch} rows", launches, args, moved=each)

    def tables(self, listed: list[Format]) -> list[int]:
        """Tables of as many layers as fit, expert e in format e of the list."""
        sizes = [(matrix_bytes(WIDTH, HIDDEN, f), matrix_bytes(HIDDEN, WIDTH, f)) for f in listed]
        layer = sum(2 * up + down for up, down in sizes) * (EXPERTS // len(listed) + 1)
        made = []
        for index in range(min(48, gpu_kernels.WEIGHT_BYTES // layer)):
            at, rows = self.weights + index * layer, []
            for e in range(EXPERTS):
                (up, down), word = sizes[e % len(listed)], listed[e % len(listed)].word
                rows.append([at, at + up, at + 2 * up, word | word << 32])
                at += 2 * up + down
            made.append(self.machine.put(np.array(rows, np.uint64)))
        return made

    def mixed_experts(self, names: tuple[str, ...], batch: int) -> tuple[float, float]:
        """gate_up and down of a layer; microseconds of both, and the bytes that the experts in use have."""
        listed = [BY_NAME[name] for name in names]
        tables, meta = self.tables(listed), max(f.meta for f in listed)
        ups, _, kept, _ = self.expert_launches(EXPERTS, K, HIDDEN, WIDTH, 0, batch)
        choices = [self.rng.permuted(np.tile(np.arange(EXPERTS), (batch, 1)), axis=1)[:, :K] for _ in ups]
        places = [self.machine.put(choice.astype(np.uint32)) for choice in choices]
        eight = "_8" if batch <= 8 else ""
        both = []
        for i, (up, down) in enumerate(zip(kept[::2], kept[1::2], strict=True)):
            for op, args in (("gate_up", up), ("down", down)):
                args.experts, args.indices, args.meta = tables[i % len(tables)], places[i], meta
                stages, blocks = (
                    kernel_abi.constant(f"CLB_{op.upper()}_MIXED{eight}_{what}") for what in ("STAGES", "BLOCKS")
                )
                both.append(
                    self.machine.launch(
                        f"clb_expert_{op}_mixed{eight}", args, grid=blocks * self.multiprocessors, block=256,
                        shared=16 * stages * (512 + meta),
                    )
                )  # fmt: skip
        each = [2 * matrix_bytes(WIDTH, HIDDEN, f) + matrix_bytes(HIDDEN, WIDTH, f) for f in listed]
        moved = float(np.mean([sum(each[e % len(each)] for e in np.unique(choice)) for choice in choices]))
        for op, launches, part in (("gate_up", both[::2], 2 / 3), ("down", both[1::2], 1 / 3)):
            self.time(f"{op} {'+'.join(names)}", f"{batch} rows", launches, kept, moved=moved * part)
        self.time(f"experts {'+'.join(names)}", f"{batch} rows", both, kept, moved=moved, per=len(ups))
        return self.rows[-1]["us"], moved

    def quant_prompts(self, names: tuple[str, ...], rows: int) -> None:
        listed = [BY_NAME[name] for name in names]
        tables = self.tables(listed)
        choice = np.argsort(self.rng.random((rows, EXPERTS)), 1)[:, :K].reshape(-1)
        places = np.argsort(choice, kind="stable").astype(np.uint32)
        offsets = np.searchsorted(choice[places], np.arange(EXPERTS + 1)).astype(np.uint32)
        put = self.machine.put
        common = {
            "offsets": put(offsets), "tokens": put(places // K), "places": put(places), "row_count": self.count(rows),
            "input": self.half(rows, HIDDEN), "sumsq": self.space(rows, -(-HIDDEN // 64)),
            "activation": self.half(rows * K, WIDTH), "partial": self.half(rows * K, HIDDEN), "expert_count": EXPERTS,
            "hidden": HIDDEN, "width": WIDTH, "epsilon": gpu_kernels.EPSILON,
        }  # fmt: skip
        args = [kernel_abi.struct("clb_expert_many_args")(experts=table, **common) for table in tables]
        kinds = sorted({"fp16" if f.kind == "half" else f.kind for f in listed})
        launches = [
            self.machine.launch(f"clb_expert_{op}_many_{kind}", a, **harness.many_launch(self.machine, self.many_blocks))
            for a in args for op in ("gate_up", "down") for kind in kinds
        ]  # fmt: skip
        flops = 6.0 * rows * K * HIDDEN * WIDTH
        self.time(f"prompt {'+'.join(names)}", f"{rows} rows", launches, args, moved=0, flops=flops, per=len(args))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cubins", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", action="store_true", help="also the kernels of prompts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = cuda_harness.build_library(Path(folder))
        assert library is not None, "no C compiler"
        copy = cuda_harness.Gpu(options.cubins, arena_bytes=3 << 30)
        roof = measure_copy(copy)
        copy.close()
        bench = Bench(library, options.cubins)
        for batch in BATCHES:
            for name, rows, cols, residual in (("qkv", 5120, 2048, False), ("out", 2048, 4096, True)):
                bench.linear(f"{name} bf16", rows, cols, batch, residual=residual)
                for format_ in (BY_NAME[each] for each in PURE[1:]):
                    bench.quant_linear(name, rows, cols, batch, format_, residual=residual)
            bench.experts("bf16", EXPERTS, K, HIDDEN, WIDTH, 0, batch)
            pure = {name: bench.mixed_experts((name,), batch) for name in PURE}
            us, moved = bench.mixed_experts(MIX, batch)
            parts = [pure[name] for name in MIX]
            expected = moved * sum(us for us, _ in parts) / sum(size for _, size in parts)
            bench.rows[-1]["shape"] += f": {us / expected:.3f} of its bytes' mean"
        for rows in (512, 2048) if options.prompts else ():
            for names in (*((name,) for name in PURE), MIX):
                bench.quant_prompts(names, rows)
        bench.machine.close()
    options.out.write_text(json.dumps({"copy_gbs": roof, "kernels": bench.rows}, indent=1) + "\n")
    print(f"copy {roof:.0f} GB/s\n{'op':34} {'shape':44} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8}")
    for row in bench.rows:
        print(f"{row['op']:34} {row['shape']:44} {row['us']:9.2f} {row['gbs']:7.0f} {row['tflops']:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
