"""Time the matrix kernels of kernels_cu/ on this machine's GPU 0: microseconds against the bytes that must be read.

    python bench/gpu_kernels.py --cubins FOLDER --out results.json

Each line is the median of replays of one graph that runs the kernel over as many sets of weights as leave the L2 cache
useless, programmatic edges between. The roof is this run's own device-to-device copy. Shapes: Qwen3-30B-A3B (hidden
2,048, 128 experts of 768, k 8) and Qwen1.5-MoE-A2.7B (60 experts of 1,408, k 4, shared 5,632), uniform routing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cuda"), str(ROOT / "bench")]

import cuda_harness  # noqa: E402 - found through the path above
import kernel_abi  # noqa: E402 - found through the path above
import kernel_harness as harness  # noqa: E402 - found through the path above
import numpy as np  # noqa: E402 - found through the path above
from gpu_bench import measure_copy  # noqa: E402 - found through the path above

WEIGHT_BYTES = 6 << 30
BLOCK = 64 << 20
BATCHES = (1, 8, 32, 64)
PROMPTS = (64, 128, 512, 2048)
EPSILON = 1e-6
FEW_LOGITS = 256  # rows up to which blocks of router_logits take 8 of them (engine_c/src/cuda_prompt.c)
WIDE_TILES = 8  # row tiles a multiprocessor from which on clb_linear_wide takes more than 8 rows


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int = 128
    qk_norm: int = 0


@dataclass(frozen=True)
class Layer:
    heads: Heads
    experts: int
    k: int
    width: int
    shared: int = 0
    hidden: int = 2048


HEADS = {"qwen3-30b": Heads(32, 4, qk_norm=1), "qwen1.5-moe": Heads(16, 16)}
LAYERS = {
    "qwen3-30b": Layer(HEADS["qwen3-30b"], 128, 8, 768),
    "qwen1.5-moe": Layer(HEADS["qwen1.5-moe"], 60, 4, 1408, shared=5632),
}


class Bench:
    """Random weights, one buffer of each kind of activation, and the timing."""

    def __init__(self, library: ctypes.CDLL, cubins: Path) -> None:
        self.library = library
        self.machine = harness.OnGpu(library, cubins, arena_bytes=18 << 30)
        self.multiprocessors = self.machine.gpu.device.info.multiprocessors
        self.many_blocks = self.multiprocessors * (1 if self.machine.gpu.device.info.capability == (9, 0) else 2)
        rng = np.random.default_rng(1)
        bits = harness.to_half(rng.normal(0, 0.02, BLOCK // 2), "bf16")
        self.weights = self.machine.put(bits)
        driver = self.machine.gpu.device.driver
        for _ in range(WEIGHT_BYTES // BLOCK - 1):
            driver.cuMemcpyDtoD(self.machine.poisoned((BLOCK,), np.uint8).address, self.weights, BLOCK)
        self.rng = rng
        self.rows: list[dict[str, Any]] = []

    def split(self, rows: int, cols: int) -> int:
        return self.machine.put(harness.split_rows(self.rng.normal(0, 1, (rows, cols)).astype(np.float32), "bf16"))

    def half(self, rows: int, cols: int) -> int:
        return self.machine.put(harness.half_rows(self.rng.normal(0, 1, (rows, cols)).astype(np.float32)))

    def space(self, *shape: int) -> int:
        return self.machine.put(np.zeros(shape, np.float32))

    def time(
        self, op: str, shape: str, launches: list[Any], kept: list[Any], *, moved: float, flops: float = 0, per: int = 0
    ) -> None:
        array = (harness.Launch * len(launches))(*launches)
        ms = np.zeros(30, np.float32)
        driver = self.machine.driver
        status = self.library.seam_time(
            ctypes.byref(driver), self.machine.gpu.stream, ctypes.byref(array), len(launches), len(ms), ms.ctypes.data
        )
        assert status == 0, (op, status, driver.last_name)
        assert kept
        us = float(np.median(ms)) * 1e3 / (per or len(launches))
        self.rows.append({"op": op, "shape": shape, "us": us, "gbs": moved / us / 1e3, "tflops": flops / us / 1e6})

    def linear_many(self, name: str, rows: int, cols: int, batch: int, *, residual: bool) -> None:
        bytes_each = rows * cols * 2
        common = {
            "input": self.half(batch, cols), "sumsq": self.space(batch, -(-cols // 64)) if not residual else 0,
            "row_count": self.machine.put(np.array([batch], np.uint32)), "rows": rows, "cols": cols, "epsilon": EPSILON,
            "output_stride": rows, "next_norm": self.space(rows), "next_input": self.half(batch, rows),
            "next_sumsq": self.space(batch, -(-rows // 64)), "residual" if residual else "output": self.space(batch, rows),
        }  # fmt: skip
        struct = kernel_abi.struct("clb_matmul_many_args")
        args = [struct(weights=self.weights + i * bytes_each, **common) for i in range(16)]
        launch = harness.many_launch(self.machine, self.many_blocks)
        launches = [self.machine.launch("clb_linear_many_bf16", a, **launch) for a in args]
        flops = 2.0 * batch * rows * cols
        self.time(name, f"{rows} x {cols}, {batch} rows", launches, args, moved=bytes_each, flops=flops)

    def linear_launches(self, rows: int, cols: int, batch: int, *, residual: bool, sets: int) -> Any:
        """One launch a set of weights, and what must stay alive."""
        bytes_each = rows * cols * 2
        common = {
            "input": self.split(batch, cols), "sumsq": self.space(batch, cols // 16) if not residual else 0,
            "row_count": self.count(batch), "rows": rows, "cols": cols,
            "sumsq_count": cols // 16, "epsilon": EPSILON, "output_stride": rows, "next_norm": self.space(rows),
            "next_input": self.space(batch, rows), "next_sumsq": self.space(batch, rows // 16),
            "residual" if residual else "output": self.space(batch, rows),
        }  # fmt: skip
        struct = kernel_abi.struct("clb_matmul_args")
        args = [struct(weights=self.weights + i * bytes_each, **common) for i in range(sets)]
        kernel, grid, shared = self.linear_kernel(rows // 16, batch)
        return [self.machine.launch(f"{kernel}_bf16", a, grid=grid, block=256, shared=shared) for a in args], args

    def linear_kernel(self, tiles: int, batch: int) -> tuple[str, Any, int]:
        """Kernel, grid and dynamic shared memory as engine_c/src/cuda_step.c chooses them."""
        constant, blocks = kernel_abi.constant, self.multiprocessors
        if batch <= 8:
            few = min(tiles, blocks * constant("CLB_LINEAR_8_BLOCKS"))
            more = constant("CLB_LINEAR_8_INPUT") if batch <= constant("CLB_LINEAR_8_STAGED") else 0
            return "clb_linear_8", few, constant("CLB_LINEAR_8_SHARED") + more
        if tiles >= blocks * WIDE_TILES:
            return "clb_linear_wide", blocks, constant("CLB_LINEAR_WIDE_SHARED")
        return "clb_linear", min(tiles, blocks * constant("CLB_LINEAR_BLOCKS")), constant("CLB_LINEAR_SHARED")

    def linear(self, name: str, rows: int, cols: int, batch: int, *, residual: bool) -> None:
        bytes_each = rows * cols * 2
        sets = min(48, WEIGHT_BYTES // bytes_each)
        launches, args = self.linear_launches(rows, cols, batch, residual=residual, sets=sets)
        flops = 2.0 * batch * rows * cols
        self.time(name, f"{rows} x {cols}, {batch} rows", launches, args, moved=bytes_each, flops=flops)

    def count(self, rows: int) -> int:
        return self.machine.put(np.array([rows], np.uint32))

    def attend_launches(self, model: Heads, batch: int, context: int, sets: int) -> Any:
        """fp16 K and V of `context` positions a row, the last of them new; each set at its own addresses."""
        row_bytes = 4 * model.kv_heads * model.head_dim * (context + 64)
        table = np.array([[i, context - 1, 0, 0] for i in range(batch)], np.uint32)
        dims = kernel_abi.struct("clb_attention_dims")(
            heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, qk_norm=model.qk_norm,
            scale=model.head_dim**-0.5, epsilon=EPSILON,
        )  # fmt: skip
        splits, q = kernel_abi.constant("CLB_ATTENTION_SPLITS"), model.heads * model.head_dim
        ones = self.machine.put(np.ones(model.head_dim, np.float32))
        common = {
            "qkv": self.space(batch, q + 2 * model.kv_heads * model.head_dim), "rope": self.space(batch, model.head_dim),
            "q_norm": ones if model.qk_norm else 0, "k_norm": ones if model.qk_norm else 0,
            "rows": self.machine.put(table), "row_count": self.count(batch), "partial": self.space(batch, splits * q),
            "partial_state": self.space(batch, model.heads * splits * 2), "tickets": self.space(batch, model.heads),
            "attended": self.space(batch, q), "shape": dims,
        }  # fmt: skip
        args = []
        for layer in range(sets):
            states = (kernel_abi.struct("clb_device_slot") * batch)()
            for i, state in enumerate(states):
                place = (layer * batch + i) % (WEIGHT_BYTES // row_bytes)
                state.own_run, state.own_capacity = self.weights + place * row_bytes, context + 64
            slots = self.machine.put(np.frombuffer(bytes(states), np.uint8))
            args.append(kernel_abi.struct("clb_attend_args")(**common, slots=slots))
        items = (
            batch
            * model.kv_heads
            * -(-model.heads // model.kv_heads // kernel_abi.constant("CLB_ATTEND_HEADS"))
            * splits
        )
        blocks = min(items, self.multiprocessors * kernel_abi.constant("CLB_ATTEND_BLOCKS"))
        return [self.machine.launch("clb_attend_fp16_bf16", a, grid=blocks, block=128) for a in args], args

    def attend(self, name: str, model: Heads, batch: int, context: int) -> None:
        moved = 4.0 * model.kv_heads * model.head_dim * context * batch
        launches, args = self.attend_launches(model, batch, context, 48)
        self.time("attend", f"{name}, {batch} rows of {context}", launches, args, moved=moved)

    def route_launches(self, experts: int, k: int, hidden: int, batch: int, sets: int, indices: int) -> Any:
        score = kernel_abi.struct("clb_router_logits_args")
        choice = kernel_abi.struct("clb_router_args")(
            logits=self.space(batch, experts), token_count=self.count(batch), indices=indices,
            weights=self.space(batch, k), kept=self.space(batch, 1), logits_stride=experts, experts=experts, k=k, k_max=k,
            renormalise=1, routed_scale=1.0, block_tokens=1,
        )  # fmt: skip
        common = {
            "norm": self.space(hidden), "residual": self.space(batch, hidden), "sumsq": self.space(batch, hidden // 16),
            "row_count": choice.token_count, "logits": choice.logits, "experts": experts, "hidden": hidden,
            "epsilon": EPSILON,
        }  # fmt: skip
        tickets = self.space(batch, 1)
        args = [
            kernel_abi.struct("clb_route_args")(
                scores=score(weights=self.weights + i * experts * hidden * 4, **common), choice=choice, tickets=tickets
            )
            for i in range(sets)
        ]
        grid = ((experts + 4) // 4, -(-batch // 8))
        return [self.machine.launch("clb_route", a, grid=grid, block=256) for a in args], args

    def route(self, experts: int, k: int, hidden: int, batch: int) -> None:
        launches, args = self.route_launches(experts, k, hidden, batch, 48, self.space(batch, k))
        self.time("route", f"{experts} x {hidden}, {batch} rows", launches, args, moved=4.0 * experts * hidden)

    def layers(self, experts: int, hidden: int, width: int, shared: int) -> list[tuple[int, ...]]:
        """(experts table, shared table) of as many layers as fit."""
        each = hidden * width * 2
        layer_bytes = 3 * (experts * each + hidden * shared * 2)
        made = []
        for layer in range(max(1, WEIGHT_BYTES // layer_bytes)):
            base = self.weights + layer * layer_bytes
            table = base + np.arange(experts * 3).reshape(experts, 3) * each
            own = (base + experts * 3 * each + np.arange(3) * hidden * shared * 2).reshape(1, 3)
            made.append(tuple(self.machine.put(np.pad(at.astype(np.uint64), ((0, 0), (0, 1)))) for at in (table, own)))
        return made

    def few(self, op: str, eight: str, args: Any) -> Any:
        """A launch of an expert kernel for few rows, with as many blocks as run at once."""
        name = f"{op}_{eight}".upper().rstrip("_")
        blocks, shared = (kernel_abi.constant(f"CLB_{name}_{what}") for what in ("BLOCKS", "SHARED"))
        kernel = f"clb_expert_{op}_{eight}bf16"
        return self.machine.launch(kernel, args, grid=blocks * self.multiprocessors, block=256, shared=shared)

    def expert_launches(self, experts: int, k: int, hidden: int, width: int, shared: int, batch: int) -> Any:
        """24 launches each of gate_up and down, what must stay alive, and how many experts a layer uses."""
        layers = self.layers(experts, hidden, width, shared)
        choices = [np.argsort(self.rng.random((batch, experts)), 1)[:, :k].astype(np.uint32) for _ in range(24)]
        common = {
            "row_count": self.count(batch), "activation": self.split(batch * k, width),
            "shared_activation": self.split(batch, shared) if shared else 0, "expert_count": experts, "k_max": k,
            "hidden": hidden, "width": width, "shared_width": shared,
        }  # fmt: skip
        ups = {"input": self.split(batch, hidden), "sumsq": self.space(batch, hidden // 16), "epsilon": EPSILON}
        downs = {
            "weights": self.machine.put(np.full((batch, k), 0.1, np.float32)), "residual": self.space(batch, hidden),
            "next_norm": self.space(hidden), "next_input": self.space(batch, hidden),
            "next_sumsq": self.space(batch, hidden // 16), "tickets": self.space(hidden // 32),
        }  # fmt: skip
        downs["shared_parts"] = parts = harness.shared_parts(shared, width)
        downs["partial"] = self.space(64 * (k + parts), hidden)
        up_launches: list[Any] = []
        down_launches: list[Any] = []
        kept: list[Any] = []
        eight = "8_" if batch <= 8 else ""
        for i, choice in enumerate(choices):
            table, own = layers[i % len(layers)]
            mine = {"experts": table, "shared": own if shared else 0, "indices": self.machine.put(choice)}
            up = kernel_abi.struct("clb_expert_gate_up_args")(**common, **ups, **mine)
            down = kernel_abi.struct("clb_expert_down_args")(**common, **downs, **mine)
            kept += [up, down]
            for op, arg, launches in (("gate_up", up, up_launches), ("down", down, down_launches)):
                launches.append(self.few(op, eight, arg))
        return up_launches, down_launches, kept, float(np.mean([len(np.unique(choice)) for choice in choices]))

    def experts(self, model: str, experts: int, k: int, hidden: int, width: int, shared: int, batch: int) -> None:
        up_launches, down_launches, kept, used = self.expert_launches(experts, k, hidden, width, shared, batch)
        shape = f"{model}, {batch} rows, {used:.1f} experts"
        matrix = (used * width + shared) * hidden * 2.0
        self.time("gate_up", shape, up_launches, kept, moved=2 * matrix)
        self.time("down", shape, down_launches, kept, moved=matrix)
        both = [launch for pair in zip(up_launches, down_launches, strict=True) for launch in pair]
        self.time("gate_up + down (half)", shape, both, kept, moved=1.5 * matrix)

    def decode_layer(self, name: str, model: Layer, batch: int, context: int) -> None:
        """A layer of a decode step in its order, and the same with each node left out: what a node costs in its place."""
        heads, hidden = model.heads, model.hidden
        q = heads.heads * heads.head_dim
        up, down, kept, _ = self.expert_launches(model.experts, model.k, hidden, model.width, model.shared, batch)
        sets = len(up)
        rows = q + 2 * heads.kv_heads * heads.head_dim
        nodes: dict[str, Any] = {
            "qkv": self.linear_launches(rows, hidden, batch, residual=False, sets=sets),
            "attend": self.attend_launches(heads, batch, context, sets),
            "out": self.linear_launches(hidden, q, batch, residual=True, sets=sets),
            "route": self.route_launches(model.experts, model.k, hidden, batch, sets, self.space(batch, model.k)),
            "gate_up": (up, kept), "down": (down, kept),
        }  # fmt: skip
        shape = f"{name}, {batch} rows of {context}"
        for left_out in ("", *nodes):
            used = [launches for node, (launches, _) in nodes.items() if node != left_out]
            chain = [launch for layer in zip(*used, strict=True) for launch in layer]
            alive = [args for _, args in nodes.values()]
            self.time(f"layer without {left_out}" if left_out else "layer", shape, chain, alive, moved=0, per=sets)

    def prompts(self, model: str, experts: int, k: int, hidden: int, width: int, rows: int) -> None:
        layers = self.layers(experts, hidden, width, 0)
        choice = np.argsort(self.rng.random((rows, experts)), 1)[:, :k].reshape(-1)
        places = np.argsort(choice, kind="stable").astype(np.uint32)
        offsets = np.searchsorted(choice[places], np.arange(experts + 1)).astype(np.uint32)
        put = self.machine.put
        common = {
            "offsets": put(offsets), "tokens": put(places // k), "places": put(places), "row_count": put(np.array([rows], np.uint32)),
            "input": self.half(rows, hidden), "sumsq": self.space(rows, -(-hidden // 64)), "activation": self.half(rows * k, width),
            "partial": self.half(rows * k, hidden), "expert_count": experts, "hidden": hidden, "width": width, "epsilon": EPSILON,
        }  # fmt: skip
        args = [kernel_abi.struct("clb_expert_many_args")(experts=table, **common) for table, _ in layers]
        flops = 2.0 * rows * k * hidden * width
        for op, factor in (("gate_up", 2), ("down", 1)):
            launches = [
                self.machine.launch(
                    f"clb_expert_{op}_many_bf16", a, **harness.many_launch(self.machine, self.many_blocks)
                )
                for a in args
            ]
            moved = factor * 2.0 * experts * hidden * width
            self.time(f"{op}_many", f"{model}, {rows} rows", launches, args, moved=moved, flops=factor * flops)

    def attention(self, heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
        q, kv = heads * head_dim, kv_heads * head_dim
        put = self.machine.put
        slot = kernel_abi.struct("clb_device_slot")(own_run=self.space(2, kv_heads, rows, head_dim), own_capacity=rows)
        table = np.zeros((rows, 4), np.uint32)
        table[:, 1] = np.arange(rows)
        dims = kernel_abi.struct("clb_attention_dims")(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=1, scale=head_dim**-0.5, epsilon=EPSILON
        )
        args = kernel_abi.struct("clb_prefill_attention_args")(
            qkv=put(self.rng.normal(0, 1, (rows, q + 2 * kv)).astype(np.float32)), rope=self.space(rows, head_dim),
            q_norm=self.space(head_dim), k_norm=self.space(head_dim), rows=put(table),
            row_count=put(np.array([rows], np.uint32)), slots=put(np.frombuffer(bytes(slot), np.uint8)),
            attended=self.half(rows, q), q_scale=self.space(rows), shape=dims,
        )  # fmt: skip
        most = min(heads // kv_heads, kernel_abi.constant("CLB_FLASH_HEADS"))
        grid = (heads // most, -(-rows // (kernel_abi.constant("CLB_FLASH_PAIRS") // most)))
        append = self.machine.launch("clb_append_fp16", args, grid=rows, block=128)
        attend = self.machine.launch(
            "clb_attend_many_fp16", args, grid=grid, block=kernel_abi.constant("CLB_FLASH_THREADS"),
            shared=kernel_abi.constant("CLB_FLASH_SHARED"),
        )  # fmt: skip
        shape, flops = f"{heads} / {kv_heads} x {head_dim}, {rows} rows", 2.0 * q * rows * (rows + 1)
        self.time("append", shape, [append] * 16, [args], moved=rows * kv * 12.0)
        self.time("attend_many", shape, [attend] * 16, [args], moved=rows * q * 6.0, flops=flops)

    def combine(self, hidden: int, k: int, rows: int) -> None:
        args = kernel_abi.struct("clb_combine_args")(
            partial=self.weights, indices=self.machine.put(np.zeros((rows, k), np.uint32)), weights=self.space(rows, k),
            row_count=self.machine.put(np.array([rows], np.uint32)), residual=self.space(rows, hidden),
            next_norm=self.space(hidden), next_half=self.half(rows, hidden), next_sumsq=self.space(rows, -(-hidden // 64)),
            k_max=k, hidden=hidden,
        )  # fmt: skip
        launches = [self.machine.launch("clb_combine_bf16", args, grid=rows, block=256)] * 16
        self.time("combine", f"{hidden}, k {k}, {rows} rows", launches, [args], moved=rows * hidden * (k * 2.0 + 10))

    def router(self, experts: int, hidden: int, rows: int) -> None:
        args = kernel_abi.struct("clb_router_logits_args")(
            weights=self.weights, norm=self.space(hidden), residual=self.space(rows, hidden),
            sumsq=self.space(rows, hidden // 16), row_count=self.machine.put(np.array([rows], np.uint32)),
            logits=self.space(rows, experts), experts=experts, hidden=hidden, epsilon=EPSILON,
            block_rows=8 if rows <= FEW_LOGITS else 32,
        )  # fmt: skip
        grid = (-(-experts // 32), -(-rows // args.block_rows))
        launches = [self.machine.launch("clb_router_logits", args, grid=grid, block=256)] * 16
        self.time("router_logits", f"{experts} x {hidden}, {rows} rows", launches, [args], moved=4.0 * experts * hidden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cubins", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", action="store_true", help="the kernels of prompts only")
    parser.add_argument("--layers", action="store_true", help="layers of decode steps only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = cuda_harness.build_library(Path(folder))
        assert library is not None, "no C compiler"
        copy = cuda_harness.Gpu(options.cubins, arena_bytes=3 << 30)
        roof = measure_copy(copy)
        copy.close()
        bench = Bench(library, options.cubins)
        for name, layer in LAYERS.items() if options.layers else ():
            for batch in BATCHES[:3]:
                bench.decode_layer(name, layer, batch, 512)
        for batch in () if options.prompts or options.layers else BATCHES:
            bench.linear("qkv", 5120, 2048, batch, residual=False)
            bench.linear("out", 2048, 4096, batch, residual=True)
            bench.experts("qwen3-30b", 128, 8, 2048, 768, 0, batch)
            bench.experts("qwen1.5-moe", 60, 4, 2048, 1408, 5632, batch)
            bench.route(128, 8, 2048, batch)
            for name, heads in HEADS.items():
                bench.attend(name, heads, batch, 512)
            for name, layer in LAYERS.items():
                bench.decode_layer(name, layer, batch, 512)
            bench.linear("head", 151936, 2048, batch, residual=False)
        for rows in () if options.layers else PROMPTS:
            bench.linear_many("qkv_many", 5120, 2048, rows, residual=False)
            bench.linear_many("out_many", 2048, 4096, rows, residual=True)
            bench.prompts("qwen3-30b", 128, 8, 2048, 768, rows)
            bench.attention(32, 4, 128, rows)
            bench.combine(2048, 8, rows)
            bench.router(128, 2048, rows)
        bench.machine.close()
    options.out.write_text(json.dumps({"copy_gbs": roof, "kernels": bench.rows}, indent=1) + "\n")
    print(f"copy {roof:.0f} GB/s\n{'op':24} {'shape':38} {'us':>9} {'GB/s':>7} {'% of roof':>9} {'TFLOP/s':>8}")
    for row in bench.rows:
        share = row["gbs"] / roof * 100
        print(f"{row['op']:24} {row['shape']:38} {row['us']:9.2f} {row['gbs']:7.0f} {share:9.1f} {row['tflops']:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
