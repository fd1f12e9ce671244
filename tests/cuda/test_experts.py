"""The expert kernels against numpy in float64: few rows (gate_up, down) and many rows (buckets, combine).

One reference for both: x = norm(input); act = silu(gate x) * (up x); residual + sum over ranks + shared expert.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

if TYPE_CHECKING:
    from numpy.typing import NDArray

EPSILON = 1e-6
LIMIT = {"bf16": 5e-5, "fp16": 2e-5}
HALF_LIMIT = 6e-4  # half rows of 11 bits, three times
NONE = 0xFFFFFFFF
DISTINCT = 7  # experts drawn; the others repeat them, so that large cases stay quick


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    k: int
    hidden: int = 64
    width: int = 48
    shared: int = 0  # width of the shared expert
    scaled: bool = True  # the shared expert has a gate
    choose: str = "random"  # one: all rows take expert 0; few: three experts of all; none: no expert at all; gaps
    blocks: int = 5


CASES = [
    Case(1, 4, 2), Case(8, 8, 2, shared=80), Case(9, 60, 4, shared=32, scaled=False), Case(40, 4, 2, choose="one"),
    Case(64, 16, 4, choose="few", hidden=96, width=32), Case(3, 512, 16, width=16), Case(0, 8, 2, shared=16),
    Case(5, 8, 4, choose="none", shared=16), Case(33, 6, 3, choose="gaps", blocks=1), Case(64, 40, 1, hidden=32, width=176),
    Case(7, 0, 0, shared=144), Case(64, 5, 5, shared=32, hidden=160, width=16, blocks=40), Case(17, 3, 3, choose="none"),
]  # fmt: skip
LARGE_FEW = [
    Case(1, 128, 8, 2048, 768, blocks=264), Case(64, 128, 8, 2048, 768, blocks=264),
    Case(8, 60, 4, 2048, 1408, shared=5632, blocks=264), Case(32, 8, 2, 1024, 3584, blocks=264),
    Case(64, 64, 8, 2048, 1024, choose="one", blocks=264),
]  # fmt: skip
MANY_CASES = [
    *CASES, Case(200, 8, 2, shared=48), Case(130, 4, 1, choose="one", hidden=160, width=208), Case(65, 300, 2, width=16),
    Case(129, 0, 0, shared=80),
]  # fmt: skip
LARGE_MANY = [
    Case(2048, 128, 8, 1024, 384, blocks=264), Case(1500, 60, 4, 2048, 704, shared=2816, blocks=264),
    Case(1024, 64, 8, 1024, 512, choose="one", blocks=264), Case(900, 16, 4, 1040, 400, shared=208, blocks=132),
    Case(512, 128, 8, 2048, 768, blocks=132),
]  # fmt: skip


def choose(rng: np.random.Generator, case: Case) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """(T, K) experts, NONE from a rank on, and their weights."""
    indices = np.full((case.tokens, case.k), NONE, np.uint32)
    kept = np.zeros(case.tokens, np.int64)
    for t in range(case.tokens):
        pool = {"few": np.array([1, case.experts // 2, case.experts - 1]), "one": np.array([0])}.get(
            case.choose, np.arange(case.experts)
        )
        count = min(case.k, len(pool))
        if case.choose == "gaps":
            count = int(rng.integers(0, count + 1))
        if case.choose == "none":
            count = 0
        indices[t, :count] = rng.permutation(pool)[:count]
        kept[t] = count
    weights = rng.uniform(0.05, 1, indices.shape).astype(np.float32)
    weights[indices == NONE] = 0
    return indices, weights


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


class Layer:
    """Weights and inputs of one case."""

    def __init__(self, case: Case, precision: str) -> None:
        self.case, self.precision = case, precision
        self.formats: dict[int, int] = {}  # by id of the expert, if it is quantised: both words of its format
        rng = np.random.default_rng(zlib.crc32(repr((case, precision)).encode()))
        self.x = rng.normal(0, 1.5, (case.tokens, case.hidden)).astype(np.float32)
        self.norm = rng.normal(1, 0.3, case.hidden).astype(np.float32)
        self.next_norm = rng.normal(1, 0.3, case.hidden).astype(np.float32)
        self.old = rng.normal(0, 1, (case.tokens, case.hidden)).astype(np.float32)
        self.scale = rng.uniform(0, 1, case.tokens).astype(np.float32)
        self.indices, self.weights = choose(rng, case)
        drawn = [self._expert(rng, case.width) for _ in range(min(case.experts, DISTINCT))]
        self.experts = [drawn[e % DISTINCT] for e in range(case.experts)]
        self.shared = self._expert(rng, case.shared) if case.shared else None

    def _expert(self, rng: np.random.Generator, width: int) -> list[tuple[Any, Any]]:
        hidden = self.case.hidden
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        return [harness.mma_weights(rng.normal(0, 0.2, shape), self.precision) for shape in shapes]

    def activation(self, expert: list[tuple[Any, Any]], rows: Any) -> NDArray[np.float64]:
        x = harness.normed(self.x, self.norm, EPSILON)[rows]
        gate, up = (matrix[1].astype(np.float64) for matrix in expert[:2])
        return silu(x @ gate.T) * (x @ up.T)

    def expected(self) -> NDArray[np.float64]:
        """residual after the layer."""
        out = np.zeros((self.case.tokens, self.case.hidden))
        for e in np.unique(self.indices[self.indices != NONE]):
            rows, ranks = np.nonzero(self.indices == e)
            part = self.activation(self.experts[e], rows) @ self.experts[e][2][1].astype(np.float64).T
            out[rows] += self.weights[rows, ranks, None] * part
        if self.shared is not None:
            part = self.activation(self.shared, slice(None)) @ self.shared[2][1].astype(np.float64).T
            out += part * (self.scale[:, None] if self.case.scaled else 1.0)
        return self.old + out

    def table(self, machine: harness.Machine, experts: list[Any]) -> int:
        """clb_expert_weights of each expert; 0 without any."""
        if not experts:
            return 0
        matrices = {id(matrix[0]): matrix[0] for expert in experts for matrix in expert}
        at = {key: machine.put(matrix) for key, matrix in matrices.items()}
        rows = [[*(at[id(matrix[0])] for matrix in expert), self.formats.get(id(expert), 0)] for expert in experts]
        return machine.put(np.array(rows, np.uint64))


class Stream:
    """Where the new residual goes: outputs with one row too many; half rows or split rows."""

    def __init__(self, machine: harness.Machine, layer: Layer, *, limit: float, half: bool = False) -> None:
        self.half, self.limit = half, limit
        tokens, hidden = layer.old.shape
        self.residual = harness.Output(
            machine.put(np.vstack([layer.old, np.full((1, hidden), 7, np.float32)])),
            (tokens + 1, hidden),
            np.dtype(np.float32),
        )
        self.next_input = machine.poisoned((tokens + 1, hidden), np.uint16 if half else np.uint32)
        self.next_sumsq = machine.poisoned((tokens + 1, -(-hidden // 64) if half else hidden // 16), np.float32)
        self.members = {
            "residual": self.residual.address, "next_norm": machine.put(layer.next_norm),
            "next_half" if half else "next_input": self.next_input.address, "next_sumsq": self.next_sumsq.address,
        }  # fmt: skip

    def check(self, machine: harness.Machine, layer: Layer) -> NDArray[np.float32]:
        residual, words, sums = (machine.get(o) for o in (self.residual, self.next_input, self.next_sumsq))
        assert harness.relative(residual[:-1], layer.expected()) < self.limit
        assert (residual[-1] == 7).all()
        if self.half:
            got, expected = harness.unhalf_rows(words[:-1].view(np.float16)), harness.half_sums(residual[:-1])
        else:
            got, expected = harness.unsplit_rows(words[:-1], layer.precision), harness.tile_sums(residual[:-1])
        assert harness.relative(got, residual[:-1].astype(np.float64) * layer.next_norm) < self.limit
        np.testing.assert_allclose(sums[:-1], expected, rtol=1e-5)
        assert (words[-1:].view(np.uint8) == harness.POISON).all()
        return np.asarray(residual[:-1])


def run_few(machine: harness.Machine, layer: Layer, *, general: bool = False) -> NDArray[np.float32]:
    """gate_up and down, by the kernels for 8 rows where these are enough unless `general`; the new residual."""
    case, precision, put = layer.case, layer.precision, machine.put
    experts = layer.table(machine, layer.experts)
    shared = layer.table(machine, [layer.shared]) if layer.shared else 0
    activation = machine.poisoned((case.tokens * case.k, case.width), np.uint32)
    shared_activation = machine.poisoned((case.tokens, case.shared), np.uint32)
    common = {
        "experts": experts, "shared": shared, "indices": put(layer.indices),
        "row_count": put(np.array([case.tokens], np.uint32)), "activation": activation.address,
        "shared_activation": shared_activation.address, "expert_count": case.experts, "k_max": case.k,
        "hidden": case.hidden, "width": case.width, "shared_width": case.shared,
    }  # fmt: skip
    gate_up = kernel_abi.struct("clb_expert_gate_up_args")(
        input=put(harness.split_rows(layer.x * layer.norm, precision)), sumsq=put(harness.tile_sums(layer.x)),
        epsilon=EPSILON, **common,
    )  # fmt: skip
    stream = Stream(machine, layer, limit=LIMIT[precision])
    parts = harness.shared_parts(case.shared, case.width)
    tickets = -(-case.hidden // 32)
    ticket = harness.Output(put(np.zeros(tickets, np.uint32)), (tickets,), np.dtype(np.uint32))
    partial = machine.poisoned((64 * (case.k + parts), case.hidden), np.float32)
    down = kernel_abi.struct("clb_expert_down_args")(
        weights=put(layer.weights), shared_scale=put(layer.scale) if case.scaled else 0, partial=partial.address,
        tickets=ticket.address, shared_parts=parts, **stream.members, **common,
    )  # fmt: skip
    eight = "8_" if case.tokens <= 8 and not general else ""
    for op, args in (("gate_up", gate_up), ("down", down)):
        shared_bytes = kernel_abi.constant(f"CLB_{op}_{eight}SHARED".upper())
        machine.run(f"clb_expert_{op}_{eight}{precision}", args, grid=case.blocks, block=256, shared=shared_bytes)
    assert (machine.get(ticket) == 0).all()
    words = machine.get(activation).reshape(case.tokens, case.k, case.width)
    for e in np.unique(layer.indices[layer.indices != NONE]):
        rows, ranks = np.nonzero(layer.indices == e)
        wanted = layer.activation(layer.experts[e], rows)
        assert harness.relative(harness.unsplit_rows(words[rows, ranks], precision), wanted) < LIMIT[precision]
    assert (words[layer.indices == NONE] == NONE).all()
    return stream.check(machine, layer)


def run_many(
    machine: harness.Machine,
    layer: Layer,
    *,
    half: bool = True,
    kinds: tuple[str, ...] = (),
    limit: float = HALF_LIMIT,
) -> NDArray[np.float32]:
    """The form of prompts over the buckets of the same choice; the new residual, as half or split rows too.

    kinds: whose nodes there are, if not those of the layer's precision alone.
    """
    case, precision, put = layer.case, layer.precision, machine.put
    count = put(np.array([case.tokens], np.uint32))
    flat = layer.indices.reshape(-1)
    places = np.argsort(flat, kind="stable")[: int((flat != NONE).sum())]
    offsets = np.searchsorted(flat[places], np.arange(case.experts + 1))
    struct = kernel_abi.struct("clb_expert_many_args")
    common = {
        "row_count": count, "input": put(harness.half_rows(layer.x * layer.norm)),
        "sumsq": put(harness.half_sums(layer.x)), "hidden": case.hidden, "epsilon": EPSILON,
    }  # fmt: skip

    def product(experts: list[Any], width: int, rows: int, lists: dict[str, int]) -> harness.Output:
        partial = machine.poisoned((rows, case.hidden), np.uint16)
        args = struct(
            experts=layer.table(machine, experts), activation=machine.poisoned((rows, width), np.uint16).address,
            partial=partial.address, expert_count=len(experts), width=width, **lists, **common,
        )  # fmt: skip
        for op in ("gate_up", "down"):
            for kind in kinds or (precision,):
                machine.run(f"clb_expert_{op}_many_{kind}", args, **harness.many_launch(machine, case.blocks))
        return partial

    stream = Stream(machine, layer, limit=limit, half=half)
    combine = kernel_abi.struct("clb_combine_args")(
        row_count=count, indices=put(layer.indices), weights=put(layer.weights), k_max=case.k, hidden=case.hidden,
        shared_scale=put(layer.scale) if case.scaled else 0, **stream.members,
    )  # fmt: skip
    if case.experts:
        lists = {
            "offsets": put(offsets.astype(np.uint32)), "tokens": put((places // case.k).astype(np.uint32)),
            "places": put(places.astype(np.uint32)),
        }  # fmt: skip
        combine.partial = product(layer.experts, case.width, case.tokens * case.k, lists).address
    if layer.shared is not None:
        combine.shared_partial = product([layer.shared], case.shared, case.tokens, {}).address
    machine.run(f"clb_combine_{precision}", combine, grid=max(case.tokens, 1) + 1, block=256)
    return stream.check(machine, layer)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_rows_equal_float64(machine: harness.Machine, case: Case, precision: str) -> None:
    """Activations of every (row, rank) and the new residual; ranks without an expert are left alone."""
    layer = Layer(case, precision)
    residual = run_few(machine, layer)
    if case.tokens <= 8:  # the kernels for any number of rows give the same bits
        assert run_few(machine, layer, general=True).tobytes() == residual.tobytes()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", MANY_CASES, ids=str)
def test_many_rows_equal_float64(machine: harness.Machine, case: Case, precision: str) -> None:
    """The same reference, by buckets."""
    run_many(machine, Layer(case, precision), half=case.tokens != 65)


@pytest.mark.parametrize("case", LARGE_FEW, ids=str)
def test_few_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: Case) -> None:
    """Shapes of Qwen3-30B, Qwen1.5-MoE, Mixtral (halved) and OLMoE, on the GPU only."""
    run_few(gpu_machine, Layer(case, "bf16"))
    gpu_machine.reset()


@pytest.mark.parametrize("case", LARGE_MANY, ids=str)
def test_many_rows_of_model_shapes(gpu_machine: harness.OnGpu, case: Case) -> None:
    """Narrowed shapes of the same models with many rows, on the GPU only."""
    run_many(gpu_machine, Layer(case, "bf16"))
    gpu_machine.reset()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_row_does_not_depend_on_its_neighbours(machine: harness.Machine, precision: str) -> None:
    """A row's bits are the same alone and among 63, whatever else its experts do."""
    case = Case(64, 6, 3, hidden=96, width=80, shared=48, choose="gaps")
    layer = Layer(case, precision)
    together = run_few(machine, layer)
    for row in (0, 31, 63):
        alone = Layer(case, precision)
        alone.case = Case(1, 6, 3, hidden=96, width=80, shared=48, choose="gaps", blocks=11)
        for name in ("x", "old", "scale", "indices", "weights"):
            setattr(alone, name, getattr(layer, name)[row : row + 1])
        assert run_few(machine, alone)[0].tobytes() == together[row].tobytes()


def test_a_prompts_row_does_not_depend_on_its_neighbours(machine: harness.Machine) -> None:
    """A row's bits are the same alone and in buckets of any size."""
    case = Case(150, 3, 2, hidden=96, width=80, shared=48)
    layer = Layer(case, "bf16")
    together = run_many(machine, layer)
    for row in (0, 31, 149):
        alone = Layer(case, "bf16")
        alone.case = Case(1, 3, 2, hidden=96, width=80, shared=48, blocks=11)
        for name in ("x", "old", "scale", "indices", "weights"):
            setattr(alone, name, getattr(layer, name)[row : row + 1])
        assert run_many(machine, alone)[0].tobytes() == together[row].tobytes()
