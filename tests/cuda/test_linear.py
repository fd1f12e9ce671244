"""clb_linear and clb_linear_many against numpy in float64: norm, bias, residual, gathered rows, candidates, edges."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

EPSILON = 1e-6
LIMIT = {"bf16": 3e-5, "fp16": 2e-5}  # relative L2 error: split rows of 16 or 22 bits; mma cuts fp32 sums off
HALF_LIMIT = 4e-4  # half rows of 11 bits


KINDS = {  # part of the kernel's name, its dynamic shared memory
    "LINEAR": ("", "CLB_LINEAR_SHARED"),
    "WIDE": ("wide_", "CLB_LINEAR_WIDE_SHARED"),
    "LINEAR_8": ("8_", "CLB_LINEAR_8_SHARED"),
    "STAGED": ("8_", "CLB_LINEAR_8_INPUT"),  # beside the ring
}


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    tokens: int
    max_tokens: int = 0  # 0: as tokens
    norm: bool = True
    bias: bool = False
    residual: bool = False
    gathered: bool = False
    candidates: bool = False
    blocks: int = 0  # 0: one a tile


FEW = [
    Case(48, 256, 1), Case(48, 256, 8, bias=True), Case(160, 96, 9, blocks=3), Case(33, 2048, 3, bias=True),
    Case(64, 128, 17, residual=True), Case(96, 176, 33, residual=True, bias=True, blocks=4),
    Case(32, 64, 64, norm=False), Case(128, 32, 40, gathered=True), Case(100, 144, 5, candidates=True, blocks=2),
    Case(77, 400, 64, candidates=True, gathered=True, blocks=2), Case(32, 16, 0, 4), Case(16, 16, 2),
    Case(32, 96, 0, 4, residual=True), Case(160, 96, 24, residual=True, blocks=2), Case(112, 416, 32),
]  # fmt: skip
MANY = [
    Case(48, 256, 1), Case(200, 96, 65, bias=True), Case(256, 80, 130, residual=True), Case(128, 16, 64, norm=False),
    Case(144, 352, 100, residual=True, bias=True), Case(32, 64, 0, 70), Case(17, 32, 3, 200),
]  # fmt: skip
LARGE_FEW = [
    Case(5120, 2048, 1, bias=True, blocks=320), Case(5120, 2048, 64, blocks=132),
    Case(2048, 4096, 32, residual=True, blocks=128), Case(32001, 2048, 7, candidates=True, blocks=264),
    Case(2048, 2048, 13, residual=True, blocks=128), Case(5120, 2048, 24, blocks=132),
]  # fmt: skip
LARGE_MANY = [
    Case(5120, 2048, 300, bias=True, blocks=132), Case(1024, 4096, 700, residual=True, blocks=132),
    Case(512, 5632, 513), Case(2048, 4096, 33, residual=True, blocks=132), Case(1536, 1040, 2048, blocks=132),
]  # fmt: skip


class Run:
    """One case on a machine: inputs drawn, kernel run, outputs fetched."""

    def __init__(self, machine: harness.Machine, case: Case, precision: str, *, many: bool, seed: int = 0) -> None:
        self.case, self.precision = case, precision
        rng = np.random.default_rng([zlib.crc32(repr((case, precision)).encode()), seed])
        sources = case.tokens + 3 if case.gathered else max(case.tokens, case.max_tokens)
        self.x = (rng.normal(0, 2, (sources, case.cols)) * rng.lognormal(0, 1, (sources, 1))).astype(np.float32)
        self.norm = rng.normal(1, 0.3, case.cols).astype(np.float32)
        self.weights, self.w = harness.mma_weights(rng.normal(0, 0.05, (case.rows, case.cols)), precision)
        self.bias = rng.normal(0, 1, case.rows).astype(np.float32)
        self.old = rng.normal(0, 1, (case.tokens, case.rows)).astype(np.float32)
        self.next_norm = rng.normal(1, 0.3, case.rows).astype(np.float32)
        self.taken = rng.permutation(sources)[: case.tokens] if case.gathered else np.arange(case.tokens)
        self.run(machine, many=many)

    def run(self, machine: harness.Machine, *, many: bool, kind: str = "") -> None:
        self.many = many
        case, put = self.case, machine.put
        tiles = -(-case.rows // 16)
        self.output = machine.poisoned((case.tokens + 1, case.rows), np.float32)
        self.next_input = machine.poisoned((case.tokens + 1, case.rows), np.uint16 if many else np.uint32)
        self.next_sumsq = machine.poisoned((case.tokens + 1, -(-tiles // 4) if many else tiles), np.float32)
        self.candidates = machine.poisoned((case.tokens + 1, tiles, 2), np.uint32)
        self.residual = harness.Output(
            put(np.vstack([self.old, np.full((1, case.rows), 7, np.float32)])), self.output.shape, np.dtype(np.float32)
        )
        common = {
            "weights": put(self.weights), "bias": put(self.bias) if case.bias else 0,
            "row_count": put(np.array([case.tokens], np.uint32)), "output": 0 if case.residual else self.output.address,
            "residual": self.residual.address if case.residual else 0, "next_norm": put(self.next_norm),
            "output_stride": case.rows, "rows": case.rows, "cols": case.cols, "epsilon": EPSILON,
        }  # fmt: skip
        if many:
            self._launch_many(machine, common)
        else:
            self._launch_few(machine, common, kind or ("LINEAR_8" if case.tokens <= 8 else "LINEAR"))
        for output in ("output", "next_input", "next_sumsq", "candidates", "residual"):
            setattr(self, output, machine.get(getattr(self, output)))

    def _launch_few(self, machine: harness.Machine, common: dict[str, Any], kind: str) -> None:
        case, precision, put = self.case, self.precision, machine.put
        args = kernel_abi.struct("clb_matmul_args")(
            input=put(harness.split_rows(self.x * self.norm if case.norm else self.x, precision)),
            sumsq=put(harness.tile_sums(self.x)) if case.norm else 0, sumsq_count=case.cols // 16,
            input_rows=put(self.taken.astype(np.uint32)) if case.gathered else 0, next_input=self.next_input.address,
            next_sumsq=self.next_sumsq.address, candidates=self.candidates.address if case.candidates else 0, **common,
        )  # fmt: skip
        name, shared = KINDS[kind]
        blocks = case.blocks or -(-case.rows // 16)
        size = kernel_abi.constant(shared) + (kernel_abi.constant("CLB_LINEAR_8_SHARED") if kind == "STAGED" else 0)
        machine.run(f"clb_linear_{name}{precision}", args, grid=blocks, block=256, shared=size)

    def _launch_many(self, machine: harness.Machine, common: dict[str, Any]) -> None:
        case, put = self.case, machine.put
        args = kernel_abi.struct("clb_matmul_many_args")(
            input=put(harness.half_rows(self.x * self.norm if case.norm else self.x)),
            sumsq=put(harness.half_sums(self.x)) if case.norm else 0, next_input=self.next_input.address,
            next_sumsq=self.next_sumsq.address, **common,
        )  # fmt: skip
        machine.run(f"clb_linear_many_{self.precision}", args, **harness.many_launch(machine, case.blocks or 7))

    def bits(self) -> list[bytes]:
        names = ("output", "next_input", "next_sumsq", "candidates", "residual")
        return [getattr(self, name).tobytes() for name in names]

    def expected(self) -> Any:
        case = self.case
        x = harness.normed(self.x, self.norm, EPSILON) if case.norm else self.x.astype(np.float64)
        return x[self.taken] @ self.w.astype(np.float64).T + (self.bias if case.bias else 0.0)


def check(run: Run) -> None:
    case, expected = run.case, run.expected()
    limit = HALF_LIMIT if run.many else LIMIT[run.precision]
    if not case.residual:
        assert harness.relative(run.output[:-1], expected) < limit
        assert run.output[-1:].view(np.uint32).min() == 0xFFFFFFFF, "a row beyond the last was written"
    else:
        new = run.old + expected
        assert harness.relative(run.residual[:-1], new) < limit
        assert (run.residual[-1] == 7).all()
        if run.many:
            got, sums = harness.unhalf_rows(run.next_input[:-1].view(np.float16)), harness.half_sums(run.residual[:-1])
        else:
            got, sums = harness.unsplit_rows(run.next_input[:-1], run.precision), harness.tile_sums(run.residual[:-1])
        assert harness.relative(got, run.residual[:-1].astype(np.float64) * run.next_norm) < limit
        np.testing.assert_allclose(run.next_sumsq[:-1], sums, rtol=1e-5)
        assert (run.next_input[-1:].view(np.uint8) == harness.POISON).all()
    if case.candidates:
        values = np.full((case.tokens, -(-case.rows // 16) * 16), -np.inf, np.float32)
        values[:, : case.rows] = run.output[:-1]
        tiles = values.reshape(case.tokens, -1, 16)
        np.testing.assert_array_equal(run.candidates[:-1, :, 1].view(np.float32), tiles.max(2))
        first = np.arange(tiles.shape[1]) * 16
        np.testing.assert_array_equal(run.candidates[:-1, :, 0], tiles.argmax(2) + first)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_rows_equal_float64(machine: harness.Machine, case: Case, precision: str) -> None:
    """Every combination of inputs and outputs, with poisoned outputs and one row too many that must stay; and the same
    bits from every kernel that can take the case."""
    run = Run(machine, case, precision, many=False)
    check(run)
    first = run.bits()
    for kind in ("LINEAR", "WIDE", *(("LINEAR_8", "STAGED") if case.tokens <= 8 else ())):
        run.run(machine, many=False, kind=kind)
        assert run.bits() == first, kind


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_rows_equal_float64(machine: harness.Machine, case: Case, precision: str) -> None:
    """The same for the form of prompts."""
    check(Run(machine, case, precision, many=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", LARGE_FEW, ids=str)
def test_few_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: Case, precision: str) -> None:
    """Shapes of Qwen3-30B, on the GPU only; the same bits from every kernel."""
    run = Run(gpu_machine, case, precision, many=False)
    check(run)
    first = run.bits()
    for kind in ("LINEAR", "WIDE", *(("LINEAR_8", "STAGED") if case.tokens <= 8 else ())):
        run.run(gpu_machine, many=False, kind=kind)
        assert run.bits() == first, kind
    gpu_machine.reset()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", LARGE_MANY, ids=str)
def test_many_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: Case, precision: str) -> None:
    """Shapes of Qwen3-30B, on the GPU only."""
    check(Run(gpu_machine, case, precision, many=True))
    gpu_machine.reset()


def test_a_row_does_not_depend_on_its_neighbours(machine: harness.Machine) -> None:
    """A row's bits are the same alone and among 63, whatever the number of blocks."""
    alone_and_among(machine, Case(80, 416, 64), (0, 5, 63), many=False)


@pytest.mark.parametrize("tokens", [31, 64, 96, 130])
def test_a_prompts_row_does_not_depend_on_its_neighbours(machine: harness.Machine, tokens: int) -> None:
    """A row's bits are the same alone and among others, wherever it lies in a unit of any size."""
    alone_and_among(machine, Case(80, 416, tokens), (0, 5, tokens - 1), many=True)


def alone_and_among(machine: harness.Machine, case: Case, rows: tuple[int, ...], *, many: bool) -> None:
    whole = Run(machine, case, "bf16", many=many)
    for first in rows:
        alone = object.__new__(Run)
        alone.__dict__ |= whole.__dict__
        alone.case = Case(case.rows, case.cols, 1, blocks=2)
        alone.x, alone.old, alone.taken = whole.x[first : first + 1], whole.old[:1], np.arange(1)
        alone.run(machine, many=many)
        assert alone.output[0].tobytes() == whole.output[first].tobytes()


def test_large_activations_saturate_in_fp16_and_what_is_not_finite_stays_so(machine: harness.Machine) -> None:
    """A residual of 1e6 passes through fp16 weights; infinity does not turn into a number."""
    case = Case(32, 64, 3, residual=True, bias=True, norm=False)
    run = Run(machine, case, "fp16", many=False)
    run.bias = np.full(case.rows, 1e6, np.float32)
    run.bias[5] = np.inf
    run.run(machine, many=False)
    got = harness.unsplit_rows(run.next_input[:-1], "fp16")
    finite = np.arange(case.rows) != 5
    assert harness.relative(got[:, finite], (run.residual[:-1] * run.next_norm)[:, finite]) < 1e-5
    assert not np.isfinite(got[:, 5]).any()
    assert not np.isfinite(run.next_sumsq[:-1, 0]).any()
