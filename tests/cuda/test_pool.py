"""Pooled hidden states: sums of normed rows against float64, and the same bits for any cut into chunks."""

from __future__ import annotations

import itertools

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

EPSILON = 1e-5
SLOTS = 3


def pool(
    machine: harness.Machine, residual: np.ndarray, norm: np.ndarray, steps: list[list[tuple[int, int, int, int]]]
) -> np.ndarray:
    """Vectors of the slots after launches of (slot, first, count, fresh) items; the last launch writes them out."""
    hidden = residual.shape[1]
    sums, output = machine.poisoned((SLOTS, hidden), np.float32), machine.poisoned((SLOTS, hidden), np.float32)
    given = {
        "residual": machine.put(residual), "sumsq": machine.put(harness.tile_sums(residual)), "norm": machine.put(norm),
    }  # fmt: skip
    for number, step in enumerate(steps):
        items = (kernel_abi.struct("clb_pool_item") * len(step))()
        for item, (slot, first, count, fresh) in zip(items, step, strict=True):
            last = number == len(steps) - 1
            item.output = output.address + 4 * hidden * slot if last else 0
            item.slot, item.first, item.count, item.fresh = slot, first, count, fresh
        args = kernel_abi.struct("clb_pool_args")(
            items=machine.put(np.frombuffer(bytes(items), np.uint8)), sums=sums.address, hidden=hidden, epsilon=EPSILON,
            **given,
        )  # fmt: skip
        machine.run("clb_pool", args, grid=(-(-hidden // 256), len(step), 1), block=256)
    written = machine.get(output)
    for slot, *_ in steps[-1]:
        np.testing.assert_array_equal(written[slot], machine.get(sums)[slot])
    return written


@pytest.mark.parametrize("hidden", [16, 256, 272, 1040])
@pytest.mark.parametrize("rows", [1, 5, 64, 150])
def test_sums_equal_float64(machine: harness.Machine, rows: int, hidden: int) -> None:
    """Items over any rows of a step: the sum of RMSNorm(x) to 1e-5 of its length; other slots are not written."""
    rng = np.random.default_rng([rows, hidden])
    residual = rng.normal(0, 3, (rows + 7, hidden)).astype(np.float32)
    norm = rng.normal(1, 0.3, hidden).astype(np.float32)
    got = pool(machine, residual, norm, [[(2, 3, rows, 1), (0, rows + 2, 1, 1)]])
    states = harness.normed(residual, norm, EPSILON)
    assert harness.relative(got[2], states[3 : 3 + rows].sum(0)) < 1e-5
    assert harness.relative(got[0], states[rows + 2]) < 1e-5
    assert (got[1].view(np.uint32) == 0xFFFFFFFF).all()


def test_chunks_change_no_bit(machine: harness.Machine) -> None:
    """Cut into launches anywhere, beside other items or not, the sum has the same bits."""
    rng = np.random.default_rng(7)
    residual = rng.normal(0, 2, (200, 144)).astype(np.float32)
    norm = rng.normal(1, 0.3, 144).astype(np.float32)
    whole = pool(machine, residual, norm, [[(1, 20, 170, 1)]])[1]
    for cuts in ([1], [64, 65, 100], [37, 101]):
        edges = [0, *cuts, 170]
        steps = [
            [(0, 5 * number, 9, 1), (1, 20 + begin, end - begin, int(begin == 0))]
            for number, (begin, end) in enumerate(itertools.pairwise(edges))
        ]
        assert pool(machine, residual, norm, steps)[1].tobytes() == whole.tobytes()
