"""The kernel that measures the memory: it must read every word once."""

from __future__ import annotations

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest


@pytest.mark.parametrize(("vectors", "grid"), [(0, 1), (1, 2), (255, 1), (4099, 1), (8 * 512 * 3 + 5, 2)])
def test_the_sum_is_that_of_all_words(machine: harness.Machine, vectors: int, grid: int) -> None:
    """Whatever the number of vectors and blocks, all words are in the sum, once, and nothing behind them is."""
    rng = np.random.default_rng(vectors + grid)
    words = rng.integers(0, 1 << 32, 4 * vectors + 4, dtype=np.uint32)
    total = harness.Output(machine.put(np.array([7], np.uint32)), (1,), np.dtype(np.uint32))
    args = kernel_abi.struct("clb_read_args")(input=machine.put(words), sum=total.address, vectors=vectors)
    machine.run("clb_read", args, grid=grid, block=256)
    assert machine.get(total)[0] == (7 + int(words[: 4 * vectors].sum(dtype=np.uint64))) % (1 << 32)
