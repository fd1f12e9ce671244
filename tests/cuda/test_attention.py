"""Attention of decode and of prefill against numpy in float64: runs, norms, rotation, windows, splits, idle rows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

NONE = 0xFFFFFFFF
EPSILON = 1e-5
HALF_LIMIT = 1.5e-3  # queries, shares and results of 11 bits, against means that cancel
SPLITS = kernel_abi.constant("CLB_ATTENTION_SPLITS")


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    qk_norm: int = 0
    kv: str = "fp16"


SHAPES = [
    Shape(), Shape(head_dim=32, heads=6, kv_heads=1, qk_norm=1), Shape(head_dim=128, heads=2, kv_heads=2, kv="bf16"),
    Shape(window=50, qk_norm=2), Shape(kv="fp32", heads=5, kv_heads=1, window=9),
]  # fmt: skip


def to_kv(values: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of K or V."""
    return values.astype(np.float32) if kind == "fp32" else harness.to_half(values, kind)


def from_kv(stored: np.ndarray, kind: str) -> np.ndarray:
    return stored.astype(np.float64) if kind == "fp32" else harness.from_half(stored, kind).astype(np.float64)


class Slots:
    """Slots whose second layer of two holds random K and V: {prefix tokens, tokens of the own run}."""

    def __init__(
        self, machine: harness.Machine, shape: Shape, sizes: list[tuple[int, int]], rng: np.random.Generator
    ) -> None:
        self.shape, self.machine = shape, machine
        self.states = (kernel_abi.struct("clb_device_slot") * len(sizes))()
        self.runs: list[tuple[np.ndarray, harness.Output]] = []
        for state, (prefix, own) in zip(self.states, sizes, strict=True):
            state.prefix_tokens = prefix
            for name, tokens in (("prefix", prefix), ("own", own)):
                capacity = tokens + 3
                given = to_kv(rng.normal(0, 1, (2, 2, shape.kv_heads, capacity, shape.head_dim)), shape.kv)
                address = machine.put(given)
                setattr(state, f"{name}_run", address)
                setattr(state, f"{name}_capacity", capacity)
                self.runs.append((given, harness.Output(address, given.shape, given.dtype)))
        self.address = machine.put(np.frombuffer(bytes(self.states), np.uint8))

    def layer(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V (kv_heads, tokens, head_dim) of layer 1 as they are now, prefix first."""
        prefix = self.states[slot].prefix_tokens
        runs = [from_kv(self.machine.get(self.runs[2 * slot + i][1])[1], self.shape.kv) for i in (0, 1)]
        both = np.concatenate([runs[0][:, :, :prefix], runs[1]], axis=2)
        return both[0], both[1]


def normed(values: np.ndarray, weights: np.ndarray | None, kind: int) -> np.ndarray:
    """QK-norm of (heads, head_dim): none, by head, or over all heads."""
    if kind == 0 or weights is None:
        return values
    axes = -1 if kind == 1 else (-2, -1)
    return values / np.sqrt((values**2).mean(axes, keepdims=True) + EPSILON) * weights


def rotated(values: np.ndarray, rope: np.ndarray) -> np.ndarray:
    half = values.shape[-1] // 2
    low, high, cosines, sines = values[..., :half], values[..., half:], rope[:half], rope[half:]
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


class Case:
    """Random rows, and what attention must make of them."""

    def __init__(
        self, machine: harness.Machine, shape: Shape, sizes: list[tuple[int, int]], rows: list[tuple[int, int]]
    ) -> None:
        rng = np.random.default_rng(zlib.crc32(repr((shape, rows)).encode()))
        self.shape, self.rows, self.machine = shape, rows, machine
        self.slots = Slots(machine, shape, sizes, rng)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = rng.normal(0, 1, (len(rows), width)).astype(np.float32)
        self.rope = rng.normal(0, 0.7, (len(rows), shape.head_dim)).astype(np.float32)
        self.norms: list[np.ndarray | None] = [None, None]
        if shape.qk_norm:
            lead = [() if shape.qk_norm == 1 else (count,) for count in (shape.heads, shape.kv_heads)]
            self.norms = [rng.normal(1, 0.3, (*shape_of, shape.head_dim)).astype(np.float32) for shape_of in lead]
        dims = kernel_abi.struct("clb_attention_dims")(
            layer_values=2 * shape.kv_heads * shape.head_dim, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, window=shape.window, qk_norm=shape.qk_norm, scale=shape.head_dim**-0.5,
            epsilon=EPSILON,
        )  # fmt: skip
        table = np.array([[slot % (1 << 32), position, 0, 0] for slot, position in rows], np.uint32)
        self.qkv_at = machine.put(self.qkv)
        self.q_scale: harness.Output
        self.attended: harness.Output
        self.common = {
            "qkv": self.qkv_at, "rope": machine.put(self.rope), "rows": machine.put(table),
            "q_norm": 0 if self.norms[0] is None else machine.put(self.norms[0]),
            "k_norm": 0 if self.norms[1] is None else machine.put(self.norms[1]),
            "row_count": machine.put(np.array([len(rows)], np.uint32)), "slots": self.slots.address, "shape": dims,
        }  # fmt: skip

    def space(self, dtype: type) -> harness.Output:
        """Where the results go: split rows (uint32) or half rows (uint16), one too many."""
        shape = self.shape
        self.attended = self.machine.poisoned((len(self.rows) + 1, shape.heads * shape.head_dim), dtype)
        return self.attended

    def parts(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q and k after norm and rotation, and v, in float64."""
        shape = self.shape
        values = self.qkv[row].astype(np.float64).reshape(-1, shape.head_dim)
        q, k, v = np.split(values, [shape.heads, shape.heads + shape.kv_heads])
        rope = self.rope[row].astype(np.float64)
        return (
            rotated(normed(q, self.norms[0], shape.qk_norm), rope),
            rotated(normed(k, self.norms[1], shape.qk_norm), rope),
            v,
        )

    def check(self, precision: str) -> None:
        words = self.machine.get(self.attended)[: len(self.rows)]
        half = words.dtype == np.uint16
        actual = harness.unhalf_rows(words.view(np.float16)) if half else harness.unsplit_rows(words, precision)
        group = self.shape.heads // self.shape.kv_heads
        for index, (slot, position) in enumerate(self.rows):
            if slot < 0:
                continue
            q, k, v = self.parts(index)
            keys, values = self.slots.layer(slot)
            tolerance = 1e-5 if self.shape.kv == "fp32" else 2e-2
            np.testing.assert_allclose(keys[:, position], k, rtol=tolerance, atol=tolerance, err_msg="K as appended")
            np.testing.assert_allclose(values[:, position], v, rtol=tolerance, atol=tolerance, err_msg="V as appended")
            first = max(0, position + 1 - self.shape.window) if self.shape.window else 0
            seen = slice(first, position + 1)
            scores = np.einsum("hd,htd->ht", q, np.repeat(keys[:, seen], group, 0)) * self.shape.head_dim**-0.5
            shares = np.exp(scores - scores.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            expected = np.einsum("ht,htd->hd", shares, np.repeat(values[:, seen], group, 0)).reshape(-1)
            error = harness.relative(actual[index], expected)
            assert error < (HALF_LIMIT if half else 2e-5), f"row {index}: relative error {error}"


def run_decode(machine: harness.Machine, case: Case, precision: str, blocks: int = 7) -> None:
    shape, count = case.shape, len(case.rows)
    partial = machine.poisoned((count, shape.heads, SPLITS, shape.head_dim), np.float32)
    state = machine.poisoned((count, shape.heads, SPLITS, 2), np.float32)
    tickets = np.zeros((count, shape.heads), np.uint32)
    held = harness.Output(machine.put(tickets), tickets.shape, tickets.dtype)
    args = kernel_abi.struct("clb_attend_args")(
        **case.common, partial=partial.address, partial_state=state.address, tickets=held.address,
        attended=case.space(np.uint32).address,
    )  # fmt: skip
    machine.run(f"clb_attend_{shape.kv}_{precision}", args, grid=blocks, block=128)
    assert not machine.get(held).any(), "the next layer finds tickets in use"


def attend_many(machine: harness.Machine, shape: Shape, args: object, rows: int) -> None:
    """Attention of `rows` prompt rows, launched as abi.h says."""
    group = shape.heads // shape.kv_heads
    most = min(group, kernel_abi.constant("CLB_FLASH_HEADS"))
    grid, block, shared = (shape.heads, (rows + 63) // 64), 128, 0
    if shape.kv != "fp32":
        grid = (shape.kv_heads * -(-group // most), -(-rows // (kernel_abi.constant("CLB_FLASH_PAIRS") // most)))
        block, shared = kernel_abi.constant("CLB_FLASH_THREADS"), kernel_abi.constant("CLB_FLASH_SHARED")
    machine.run(f"clb_attend_many_{shape.kv}", args, grid=grid, block=block, shared=shared)


def run_prefill(machine: harness.Machine, case: Case) -> None:
    shape, count = case.shape, len(case.rows)
    case.q_scale = machine.poisoned((count,), np.float32)
    args = kernel_abi.struct("clb_prefill_attention_args")(
        **case.common, q_scale=case.q_scale.address, attended=case.space(np.uint16).address
    )
    machine.run(f"clb_append_{shape.kv}", args, grid=(count + 1,), block=128)
    attend_many(machine, shape, args, count + 70)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_decode_rows_see_their_own_slots(machine: harness.Machine, shape: Shape) -> None:
    """Rows of slots with and without a shared prefix append and attend as float64 does; idle rows are zero."""
    sizes = [(0, 130), (40, 60), (70, 70), (0, 1)]
    case = Case(machine, shape, sizes, [(1, 99), (0, 128), (-1, 0), (2, 75), (3, 0)])
    precision = "fp16" if shape.kv == "fp16" else "bf16"
    run_decode(machine, case, precision)
    case.check(precision)
    attended = machine.get(case.attended)
    assert not attended[2].any(), "an idle row must be zero"
    assert (attended[5] == NONE).all(), "a row beyond the count must not be written"


def test_long_decode_rows_use_longer_splits(machine: harness.Machine) -> None:
    """A row with more than 64 splits of 128 positions still sees each position once."""
    case = Case(machine, Shape(heads=1, kv_heads=1, head_dim=32), [(0, 8400), (0, 2048)], [(0, 8300), (1, 2047)])
    run_decode(machine, case, "bf16")
    case.check("bf16")


def test_a_decode_row_has_the_same_bits_alone(machine: harness.Machine) -> None:
    """Neither other rows nor the number of blocks changes a bit of a row."""
    shape, sizes, rows = Shape(heads=9, kv_heads=1, qk_norm=1), [(0, 300), (20, 90)], [(1, 100), (0, 290)]
    together = Case(machine, shape, sizes, rows)
    run_decode(machine, together, "bf16")
    both = machine.get(together.attended)
    alone = Case(machine, shape, sizes, rows)
    for row in (0, 1):
        alone.common = {
            **alone.common, "qkv": machine.put(together.qkv[row : row + 1]),
            "rope": machine.put(together.rope[row : row + 1]), "row_count": machine.put(np.array([1], np.uint32)),
            "rows": machine.put(np.array([[*rows[row], 0, 0]], np.uint32)),
        }  # fmt: skip
        alone.rows = rows[row : row + 1]
        run_decode(machine, alone, "bf16", blocks=2)
        assert machine.get(alone.attended)[0].tobytes() == both[row].tobytes()


PROMPT_SHAPES = [
    *SHAPES, Shape(heads=32, kv_heads=1, head_dim=32), Shape(heads=21, kv_heads=3, window=30), Shape(heads=8, kv_heads=1, head_dim=128)
]  # fmt: skip


@pytest.mark.parametrize("shape", PROMPT_SHAPES, ids=repr)
def test_prefill_rows_see_what_lies_before_them(machine: harness.Machine, shape: Shape) -> None:
    """Chunks of several slots, of any length, behind shared prefixes or not, attend causally as float64 does."""
    sizes = [(0, 130), (40, 60), (16, 10), (70, 160)]
    rows = [(1, 40 + i) for i in range(7)] + [(2, 18)] + [(0, 90 + i) for i in range(25)]
    rows += [(3, 70 + i) for i in range(140)]
    case = Case(machine, shape, sizes, rows)
    run_prefill(machine, case)
    case.check("")
    assert (machine.get(case.attended)[-1].view(np.uint8) == harness.POISON).all(), "a row beyond the count was written"


def test_long_prompts_of_model_shapes(gpu_machine: harness.OnGpu) -> None:
    """Heads of Qwen3-30B and of OLMoE over 1,100 rows in two slots, on the GPU only."""
    for shape in (
        Shape(heads=32, kv_heads=4, head_dim=128, qk_norm=1),
        Shape(heads=16, kv_heads=16, head_dim=128, qk_norm=2),
    ):
        rows = [(0, i) for i in range(700)] + [(1, 300 + i) for i in range(400)]
        case = Case(gpu_machine, shape, [(0, 800), (256, 600)], rows)
        run_prefill(gpu_machine, case)
        case.check("")
        gpu_machine.reset()


@pytest.mark.parametrize(
    "shape",
    [Shape(window=50, qk_norm=2), Shape(kv="fp32"), Shape(heads=16, kv_heads=2, head_dim=128, qk_norm=1)],
    ids=repr,
)
def test_company_changes_no_bit(machine: harness.Machine, shape: Shape) -> None:
    """A prompt row has the same bits alone and at any place among others of its slot and of others."""
    sizes = [(0, 330), (0, 40)]
    rows = [(1, 7)] + [(0, 100 + i) for i in range(139)]
    together = Case(machine, shape, sizes, rows)
    run_prefill(machine, together)
    all_rows = machine.get(together.attended)
    for first, count in ((1, 1), (2, 2), (30, 4), (70, 70), (139, 1)):
        table = np.array([[0, 99 + i, 0, 0] for i in range(first, first + count)], np.uint32)
        attended = machine.poisoned((count, shape.heads * shape.head_dim), np.uint16)
        rotated_qkv = machine.get(harness.Output(together.qkv_at, together.qkv.shape, np.dtype(np.float32)))
        args = kernel_abi.struct("clb_prefill_attention_args")(
            **{
                **together.common, "qkv": machine.put(rotated_qkv[first : first + count]), "rows": machine.put(table),
                "rope": machine.put(together.rope[first : first + count]),
                "q_scale": machine.put(machine.get(together.q_scale)[first : first + count]),
                "row_count": machine.put(np.array([count], np.uint32)), "attended": attended.address,
            }
        )  # fmt: skip
        attend_many(machine, shape, args, count)
        assert (machine.get(attended) == all_rows[first : first + count]).all(), f"rows {first} .. {first + count - 1}"
