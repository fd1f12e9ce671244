"""The kernels of quantised weights against numpy in float64: every format and shape, and rows that stand alone."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest
import quantised
import test_experts as experts
import test_linear as linear

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW = [
    linear.Case(48, 256, 1), linear.Case(48, 256, 8, bias=True), linear.Case(160, 384, 9, blocks=3),
    linear.Case(33, 2048, 3, bias=True), linear.Case(64, 128, 17, residual=True),
    linear.Case(96, 640, 33, residual=True, bias=True, blocks=4), linear.Case(100, 128, 5, candidates=True, blocks=2),
    linear.Case(77, 256, 64, candidates=True, gathered=True, blocks=2), linear.Case(32, 128, 0, 4),
]  # fmt: skip
ODD = [linear.Case(48, 96, 3), linear.Case(48, 160, 20, bias=True), linear.Case(32, 1088, 8), linear.Case(272, 32, 2)]
MANY = [
    linear.Case(48, 256, 1), linear.Case(200, 128, 65, bias=True), linear.Case(256, 384, 130, residual=True),
    linear.Case(144, 640, 100, residual=True, bias=True), linear.Case(32, 128, 0, 70), linear.Case(272, 32, 20),
    linear.Case(48, 1120, 3),
]  # fmt: skip
LARGE_MANY = [
    linear.Case(5120, 2048, 300, bias=True, blocks=132), linear.Case(1024, 4096, 700, residual=True, blocks=132),
    linear.Case(1536, 1088, 2048, blocks=132), linear.Case(512, 128, 90),
]  # fmt: skip
LAYERS = [
    experts.Case(1, 4, 2, 256, 128), experts.Case(8, 12, 4, 128, 128, shared=256),
    experts.Case(40, 12, 2, 128, 256, choose="gaps", blocks=2), experts.Case(64, 12, 4, 256, 128, shared=128, choose="few"),
    experts.Case(0, 12, 2, 128, 128, shared=128), experts.Case(5, 12, 4, 128, 128, choose="none"),
    experts.Case(33, 12, 2, 128, 128, choose="one"),
]  # fmt: skip
ODD_LAYERS = [experts.Case(9, 6, 3, 96, 160, shared=32, scaled=False), experts.Case(20, 6, 2, 160, 96, choose="gaps")]
MANY_LAYERS = [*LAYERS, experts.Case(200, 12, 2, 128, 128, shared=128), experts.Case(130, 4, 1, 256, 384, choose="one")]
KINDS = ("fp16", "int8", "int4", "fp8")
MANY_LIMIT = 1e-3  # half rows of 11 bits, three times, and weights of groups rounded to as many
LARGE = [
    linear.Case(5120, 2048, 1, bias=True, blocks=320), linear.Case(5120, 2048, 64, blocks=132),
    linear.Case(2048, 4096, 32, residual=True, blocks=64), linear.Case(2048, 4096, 8, residual=True, blocks=128),
]  # fmt: skip


class Run(linear.Run):
    """A case of test_linear with quantised weights."""

    def __init__(
        self, machine: harness.Machine, case: linear.Case, format_: quantised.Format, *, many: bool, seed: int = 0
    ) -> None:
        self.format = format_
        super().__init__(machine, case, "fp16", many=many, seed=seed)

    def run(self, machine: harness.Machine, *, many: bool, kind: str = "") -> None:
        if self.weights.dtype != np.uint8:  # drawn once
            rng = np.random.default_rng(zlib.crc32(repr((self.case, self.format)).encode()))
            self.weights, self.w = quantised.random_matrix(rng, (self.case.rows, self.case.cols), self.format, 0.05)
        super().run(machine, many=many, kind=kind)

    def _launch_many(self, machine: harness.Machine, common: dict[str, Any]) -> None:
        case, put = self.case, machine.put
        args = kernel_abi.struct("clb_matmul_many_args")(
            input=put(harness.half_rows(self.x * self.norm if case.norm else self.x)),
            sumsq=put(harness.half_sums(self.x)) if case.norm else 0, next_input=self.next_input.address,
            next_sumsq=self.next_sumsq.address, format=self.format.word, **common,
        )  # fmt: skip
        machine.run(f"clb_linear_many_{self.format.kind}", args, **harness.many_launch(machine, case.blocks or 7))

    def _launch_few(self, machine: harness.Machine, common: dict[str, Any], kind: str) -> None:
        case, put = self.case, machine.put
        args = kernel_abi.struct("clb_matmul_args")(
            input=put(harness.split_rows(self.x * self.norm if case.norm else self.x, "fp16")),
            sumsq=put(harness.tile_sums(self.x)) if case.norm else 0, sumsq_count=case.cols // 16,
            input_rows=put(self.taken.astype(np.uint32)) if case.gathered else 0, next_input=self.next_input.address,
            next_sumsq=self.next_sumsq.address, candidates=self.candidates.address if case.candidates else 0,
            format=self.format.word, **common,
        )  # fmt: skip
        eight = "8_" if kind == "LINEAR_8" else ""
        shared = quant_shared(f"CLB_LINEAR_QUANT_{eight}STAGES", 1 if eight else 2, self.format.meta)
        machine.run(
            f"clb_linear_quant_{eight}{self.format.kind}", args, grid=case.blocks or -(-case.rows // 16), block=256,
            shared=shared,
        )  # fmt: skip


def quant_shared(stages: str, matrices: int, meta: int) -> int:
    """CLB_QUANT_SHARED of abi.h."""
    return 8 * kernel_abi.constant(stages) * matrices * (512 + meta)


def takes(case: linear.Case, format_: quantised.Format) -> bool:
    return case.cols % format_.step == 0


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", [*FEW, *ODD], ids=str)
def test_few_rows_equal_float64(machine: harness.Machine, case: linear.Case, format_: quantised.Format) -> None:
    """Every combination of inputs and outputs in every format, with poisoned outputs and one row too many that must
    stay; up to 8 rows both kernels give the same bits."""
    if not takes(case, format_):
        pytest.skip("a group must divide the columns")
    run = Run(machine, case, format_, many=False)
    linear.check(run)
    first = run.bits()
    for kind in ("LINEAR", *(("LINEAR_8",) if case.tokens <= 8 else ())):
        run.run(machine, many=False, kind=kind)
        assert run.bits() == first, kind


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_few_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: linear.Case, format_: quantised.Format) -> None:
    """Shapes of Qwen3-30B, on the GPU only."""
    linear.check(Run(gpu_machine, case, format_, many=False))
    gpu_machine.reset()


@pytest.mark.parametrize("name", ["int8", "int4-g32-z", "fp8-b128"])
def test_a_row_does_not_depend_on_its_neighbours(machine: harness.Machine, name: str) -> None:
    """A row's bits are the same alone and among 63, whatever the number of blocks."""
    case = linear.Case(80, 416, 64)
    whole = Run(machine, case, quantised.BY_NAME[name], many=False)
    for first in (0, 5, 63):
        alone = object.__new__(Run)
        alone.__dict__ |= whole.__dict__
        alone.case = linear.Case(case.rows, case.cols, 1, blocks=2)
        alone.x, alone.old, alone.taken = whole.x[first : first + 1], whole.old[:1], np.arange(1)
        alone.run(machine, many=False)
        assert alone.output[0].tobytes() == whole.output[first].tobytes()


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_rows_equal_float64(machine: harness.Machine, case: linear.Case, format_: quantised.Format) -> None:
    """The form of prompts."""
    if not takes(case, format_):
        pytest.skip("a group must divide the columns")
    linear.check(Run(machine, case, format_, many=True))


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", LARGE_MANY, ids=str)
def test_many_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: linear.Case, format_: quantised.Format) -> None:
    """Shapes of Qwen3-30B, on the GPU only."""
    if not takes(case, format_):
        pytest.skip("a group must divide the columns")
    linear.check(Run(gpu_machine, case, format_, many=True))
    gpu_machine.reset()


# ------------------------------------------------------------------------ experts


class Layer(experts.Layer):
    """A layer of test_experts whose experts have formats in turn, the shared one the last of them."""

    def __init__(self, case: experts.Case, formats: tuple[quantised.Format, ...]) -> None:
        super().__init__(case, "fp16")
        rng = np.random.default_rng(zlib.crc32(repr((case, formats)).encode()))
        drawn = [self._quantised(rng, case.width, formats[e % len(formats)]) for e in range(min(case.experts, 11))]
        self.experts = [drawn[e % 11] for e in range(case.experts)]
        self.shared = self._quantised(rng, case.shared, formats[-1]) if case.shared else None

    def _quantised(self, rng: np.random.Generator, width: int, format_: quantised.Format) -> list[tuple[Any, Any]]:
        hidden = self.case.hidden
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        made = [quantised.random_matrix(rng, shape, format_, 0.2) for shape in shapes]
        self.formats[id(made)] = format_.word | format_.word << 32
        return made


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", [*MANY_LAYERS, *ODD_LAYERS], ids=str)
def test_experts_of_many_rows_equal_float64(
    machine: harness.Machine, case: experts.Case, format_: quantised.Format
) -> None:
    """Layers of one format, in the form of prompts."""
    if case.hidden % format_.step or case.width % format_.step or case.shared % format_.step:
        pytest.skip("a group must divide the columns")
    experts.run_many(machine, Layer(case, (format_,)), half=case.tokens != 65, kinds=(format_.kind,), limit=MANY_LIMIT)


@pytest.mark.parametrize("case", MANY_LAYERS, ids=str)
def test_mixed_experts_of_many_rows_equal_float64(machine: harness.Machine, case: experts.Case) -> None:
    """Eleven formats in one layer, each in the nodes of its kind."""
    experts.run_many(machine, Layer(case, (quantised.HALF, *quantised.FORMATS)), kinds=KINDS, limit=MANY_LIMIT)


def run_few(machine: harness.Machine, layer: Layer, *, general: bool = False) -> NDArray[np.float32]:
    """gate_up and down by the kernels of mixed formats, those for 8 rows where these are enough unless `general`."""
    case, put = layer.case, machine.put
    meta = max((quantised.meta_of(word & 0xFFFF) for word in layer.formats.values()), default=0)
    activation = machine.poisoned((case.tokens * case.k, case.width), np.uint32)
    parts = harness.shared_parts(case.shared, case.width)
    tickets = -(-case.hidden // 32)
    ticket = harness.Output(put(np.zeros(tickets, np.uint32)), (tickets,), np.dtype(np.uint32))
    common = {
        "experts": layer.table(machine, layer.experts),
        "shared": layer.table(machine, [layer.shared]) if layer.shared else 0, "indices": put(layer.indices),
        "row_count": put(np.array([case.tokens], np.uint32)), "activation": activation.address,
        "shared_activation": machine.poisoned((case.tokens, case.shared), np.uint32).address,
        "expert_count": case.experts, "k_max": case.k, "hidden": case.hidden, "width": case.width,
        "shared_width": case.shared, "meta": meta,
    }  # fmt: skip
    stream = experts.Stream(machine, layer, limit=experts.LIMIT["fp16"])
    gate_up = kernel_abi.struct("clb_expert_gate_up_args")(
        input=put(harness.split_rows(layer.x * layer.norm, "fp16")), sumsq=put(harness.tile_sums(layer.x)),
        epsilon=experts.EPSILON, **common,
    )  # fmt: skip
    down = kernel_abi.struct("clb_expert_down_args")(
        weights=put(layer.weights), shared_scale=put(layer.scale) if case.scaled else 0,
        partial=machine.poisoned((64 * (case.k + parts), case.hidden), np.float32).address, tickets=ticket.address,
        shared_parts=parts, **stream.members, **common,
    )  # fmt: skip
    eight = "_8" if case.tokens <= 8 and not general else ""
    for op, args in (("gate_up", gate_up), ("down", down)):
        shared = quant_shared(f"CLB_{op.upper()}_MIXED{eight}_STAGES", 2, meta)
        machine.run(f"clb_expert_{op}_mixed{eight}", args, grid=case.blocks, block=256, shared=shared)
    assert (machine.get(ticket) == 0).all()
    words = machine.get(activation).reshape(case.tokens, case.k, case.width)
    assert (words[layer.indices == experts.NONE] == experts.NONE).all()
    return stream.check(machine, layer)


@pytest.mark.parametrize("format_", quantised.FORMATS, ids=str)
@pytest.mark.parametrize("case", [*LAYERS, *ODD_LAYERS], ids=str)
def test_experts_of_few_rows_equal_float64(
    machine: harness.Machine, case: experts.Case, format_: quantised.Format
) -> None:
    """Layers of one format; up to 8 rows both kernels give the same bits."""
    if case.hidden % format_.step or case.width % format_.step or case.shared % format_.step:
        pytest.skip("a group must divide the columns")
    layer = Layer(case, (format_,))
    residual = run_few(machine, layer)
    if case.tokens <= 8:
        assert run_few(machine, layer, general=True).tobytes() == residual.tobytes()


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_mixed_experts_of_few_rows_equal_float64(machine: harness.Machine, case: experts.Case) -> None:
    """Eleven formats in one layer, one node for all."""
    run_few(machine, Layer(case, (quantised.HALF, *quantised.FORMATS)))


def test_a_row_of_mixed_experts_does_not_depend_on_its_neighbours(machine: harness.Machine) -> None:
    """A row's bits are the same alone and among 63, whatever else its experts do."""
    case = experts.Case(64, 12, 3, hidden=128, width=256, shared=128, choose="gaps")
    formats = (quantised.HALF, *quantised.FORMATS)
    layer = Layer(case, formats)
    together = run_few(machine, layer)
    for row in (0, 31, 63):
        alone = Layer(case, formats)
        alone.case = experts.Case(1, 12, 3, hidden=128, width=256, shared=128, choose="gaps", blocks=11)
        for name in ("x", "old", "scale", "indices", "weights"):
            setattr(alone, name, getattr(layer, name)[row : row + 1])
        assert run_few(machine, alone)[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize(
    "case",
    [experts.Case(tokens, 128, 8, 2048, 768, blocks=264) for tokens in (1, 8, 64)]
    + [experts.Case(8, 60, 4, 2048, 1408, shared=5632, blocks=264)],
    ids=str,
)
def test_experts_of_model_shapes(gpu_machine: harness.OnGpu, case: experts.Case) -> None:
    """Shapes of Qwen3-30B and Qwen1.5-MoE in mixed formats, both forms, on the GPU only."""
    formats = tuple(format_ for format_ in (quantised.HALF, *quantised.FORMATS) if case.width % format_.step == 0)
    layer = Layer(case, formats)
    run_few(gpu_machine, layer)
    experts.run_many(gpu_machine, layer, kinds=KINDS, limit=MANY_LIMIT)
    gpu_machine.reset()
