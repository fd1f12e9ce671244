"""The small kernels of a step against numpy: embedding and rows, router logits, and what the router adds for slots."""

from __future__ import annotations

import ctypes
import zlib

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

from colibrid.engine import abi

EPSILON = 1e-5
NONE = 0xFFFFFFFF
NOT_FINITE = int(abi.Status.NOT_FINITE)


def put_struct(machine: harness.Machine, value: object) -> int:
    return machine.put(np.frombuffer(bytes(value), np.uint8))  # type: ignore[call-overload]


def rope_of(positions: np.ndarray, frequencies: np.ndarray, scale: float) -> np.ndarray:
    """Cosines, then sines, of the fp32 product of position and frequency."""
    angle = (positions.astype(np.float32)[:, None] * frequencies[None]).astype(np.float64)
    return np.hstack([np.cos(angle), np.sin(angle)]) * scale


def embed(machine: harness.Machine, precision: str, *, decode: bool, hidden: int, head_dim: int, grid: int) -> None:
    rng = np.random.default_rng(zlib.crc32(repr((precision, decode, hidden)).encode()))
    vocab, slots = 50, 6
    table, values = harness.mma_weights(rng.normal(0, 1, (vocab, hidden)), precision)
    norm, frequencies = (
        rng.normal(1, 0.2, hidden).astype(np.float32),
        rng.uniform(1e-5, 1, head_dim // 2).astype(np.float32),
    )
    states = (kernel_abi.struct("clb_device_slot") * slots)()
    for index, state in enumerate(states):
        state.active, state.position, state.token = int(index != 3), 1000 * index + 7, (index * 11 + 17) % vocab
    chosen = np.array([5, 3, 0], np.uint32)
    step_list = kernel_abi.struct("clb_slot_list")(count=3)
    step_list.slots[:3] = [int(slot) for slot in chosen]
    rows = np.array([[s, states[s].position, states[s].token, 0] for s in chosen], np.int64)
    rows[1] = [NONE, 0, 0, 0]  # slot 3 is not active
    count = machine.put(np.array([3], np.uint32))
    given = np.vstack([rows.astype(np.uint32), np.full((1, 4), NONE, np.uint32)])
    at = (
        machine.poisoned((4, 4), np.uint32)
        if decode
        else harness.Output(machine.put(given), (4, 4), np.dtype(np.uint32))
    )
    outputs = {
        "residual": machine.poisoned((4, hidden), np.float32), "input": machine.poisoned((4, hidden), np.uint32),
        "sumsq": machine.poisoned((4, hidden // 16), np.float32), "rope": machine.poisoned((4, head_dim), np.float32),
    }  # fmt: skip
    args = kernel_abi.struct("clb_embed_args")(
        embedding=machine.put(table), norm=machine.put(norm), inv_freq=machine.put(frequencies),
        list=put_struct(machine, step_list) if decode else 0, slots=put_struct(machine, states), rows=at.address,
        row_count=count, hidden=hidden, head_dim=head_dim, rope_scale=1.25,
        **{name: output.address for name, output in outputs.items()},
    )  # fmt: skip
    machine.run(f"clb_embed_{precision}", args, grid=grid, block=256)
    got = {name: machine.get(output) for name, output in outputs.items()}
    np.testing.assert_array_equal(machine.get(at)[:3], rows.astype(np.uint32))
    expected = np.where((rows[:, :1] == NONE), 0, values[rows[:, 2] % vocab])
    np.testing.assert_array_equal(got["residual"][:3], expected)
    assert harness.relative(harness.unsplit_rows(got["input"][:3], precision), expected * norm) < 1e-5
    np.testing.assert_allclose(got["sumsq"][:3], harness.tile_sums(expected), rtol=1e-5)
    np.testing.assert_allclose(got["rope"][:3], rope_of(rows[:, 1], frequencies, 1.25), atol=1e-6)
    for name, output in got.items():
        assert (output[3].view(np.uint32) == NONE).all(), f"{name} of a row that does not exist was written"


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_embedding_starts_a_step(machine: harness.Machine, precision: str, decode: bool) -> None:
    """Rows come from the slots' own state or are given; an inactive slot is an idle row of zeros."""
    embed(machine, precision, decode=decode, hidden=48, head_dim=32, grid=8)
    embed(machine, precision, decode=decode, hidden=1040, head_dim=128, grid=3)


@pytest.mark.parametrize("tokens", [0, 1, 8, 21, 64])
@pytest.mark.parametrize("shape", [(4, 32, True), (60, 528, True), (130, 64, False), (7, 2048, False)])
def test_router_logits_equal_float64(machine: harness.Machine, tokens: int, shape: tuple[int, int, bool]) -> None:
    """Logits to 1e-6 of their size, and the shared expert's gate."""
    experts, hidden, gated = shape
    rng = np.random.default_rng([tokens, experts])
    x = rng.normal(0, 3, (tokens, hidden)).astype(np.float32)
    norm, gate = rng.normal(1, 0.3, hidden).astype(np.float32), rng.normal(0, 0.1, hidden).astype(np.float32)
    weights = rng.normal(0, 0.1, (experts, hidden)).astype(np.float32)
    logits, scale = machine.poisoned((tokens + 1, experts), np.float32), machine.poisoned((tokens + 1,), np.float32)
    args = kernel_abi.struct("clb_router_logits_args")(
        weights=machine.put(weights), shared_gate=machine.put(gate) if gated else 0, norm=machine.put(norm),
        residual=machine.put(x), sumsq=machine.put(harness.tile_sums(x)),
        row_count=machine.put(np.array([tokens], np.uint32)), logits=logits.address, shared_scale=scale.address,
        experts=experts, hidden=hidden, epsilon=EPSILON,
    )  # fmt: skip
    machine.run("clb_router_logits", args, grid=((experts + 4) // 4, -(-max(tokens, 1) // 8)), block=256)
    normed = harness.normed(x, norm, EPSILON)
    got, got_scale = machine.get(logits), machine.get(scale)
    assert harness.relative(got[:-1], normed @ weights.astype(np.float64).T) < 1e-6
    assert (got[-1].view(np.uint32) == NONE).all()
    if gated:
        np.testing.assert_allclose(got_scale[:-1], 1 / (1 + np.exp(-(normed @ gate.astype(np.float64)))), atol=2e-6)
    else:
        assert (got_scale.view(np.uint32) == NONE).all()


def test_router_of_a_decode_step_keeps_the_slots_accounts(machine: harness.Machine) -> None:
    """A warp a row: choices by each slot's policy, sums of work, counts per expert, idle rows and rows that fail."""
    experts, k, k_max, tokens, slots, layers, layer = 40, 4, 6, 5, 8, 3, 1
    rng = np.random.default_rng(5)
    logits = rng.permutation(tokens * experts).reshape(tokens, experts).astype(np.float32) / 16
    logits[3, 7] = np.nan
    row_slots = np.array([6, NONE, 2, 0, 3], np.int64)
    rows = np.zeros((tokens, 4), np.uint32)
    rows[:, 0] = row_slots
    policies = np.zeros((slots, layers, 2), np.uint32)
    policies[2, layer, 0], policies[6, layer, 0], policies[3, layer, 0] = 1, 6, 0
    states = (kernel_abi.struct("clb_device_slot") * slots)()
    for state in states:
        state.assignments, state.trimmed = 100, 10
    counts = np.full((slots, layers, experts), 1, np.uint32)
    outputs = {
        "indices": machine.poisoned((tokens, k_max), np.uint32), "weights": machine.poisoned((tokens, k_max), np.float32),
        "kept": machine.poisoned((tokens,), np.uint32),
    }  # fmt: skip
    at = {
        "rows": harness.Output(machine.put(rows), rows.shape, np.dtype(np.uint32)),
        "slots": harness.Output(put_struct(machine, states), (slots, ctypes.sizeof(states[0])), np.dtype(np.uint8)),
        "counts": harness.Output(machine.put(counts), counts.shape, np.dtype(np.uint32)),
    }
    args = kernel_abi.struct("clb_router_args")(
        logits=machine.put(logits), policy=machine.put(policies) + layer * 8, rows=at["rows"].address,
        token_count=machine.put(np.array([tokens], np.uint32)), slots=at["slots"].address,
        expert_counts=at["counts"].address + layer * experts * 4, logits_stride=experts, policy_stride=layers,
        counts_stride=layers * experts, experts=experts, k=k, k_max=k_max, renormalise=1, routed_scale=1.0,
        block_tokens=1, not_finite=NOT_FINITE, **{name: output.address for name, output in outputs.items()},
    )  # fmt: skip
    machine.run("clb_router_fp32", args, grid=tokens + 1, block=32)
    kept = [6, 0, 1, 0, 4]
    np.testing.assert_array_equal(machine.get(outputs["kept"]), kept)
    indices = machine.get(outputs["indices"])
    for row, count in enumerate(kept):
        best = np.argsort(-np.nan_to_num(logits[row]), kind="stable")[:count]
        np.testing.assert_array_equal(indices[row], [*best, *[NONE] * (k_max - count)])
        for expert in best:
            counts[row_slots[row], layer, expert] += 1
    np.testing.assert_array_equal(machine.get(at["counts"]), counts)
    np.testing.assert_array_equal(machine.get(at["rows"])[:, 3], [0, 0, 0, NOT_FINITE, 0])
    after = type(states).from_buffer_copy(machine.get(at["slots"]).tobytes())
    work = {6: (106, 10), 2: (101, 13), 3: (104, 10)}
    for slot, state in enumerate(after):
        assert (state.assignments, state.trimmed) == work.get(slot, (100, 10))
