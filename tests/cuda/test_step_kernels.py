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
    inputs, sums = ("input", hidden // 16) if decode else ("half_input", -(-hidden // 64))
    outputs = {
        "residual": machine.poisoned((4, hidden), np.float32),
        inputs: machine.poisoned((4, hidden), np.uint32 if decode else np.uint16),
        "sumsq": machine.poisoned((4, sums), np.float32), "rope": machine.poisoned((4, head_dim), np.float32),
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
    if decode:
        assert harness.relative(harness.unsplit_rows(got["input"][:3], precision), expected * norm) < 1e-5
        np.testing.assert_allclose(got["sumsq"][:3], harness.tile_sums(expected), rtol=1e-5)
    else:
        assert harness.relative(harness.unhalf_rows(got["half_input"][:3].view(np.float16)), expected * norm) < 3e-4
        np.testing.assert_allclose(got["sumsq"][:3], harness.half_sums(expected), rtol=1e-5)
    np.testing.assert_allclose(got["rope"][:3], rope_of(rows[:, 1], frequencies, 1.25), atol=1e-6)
    for name, output in got.items():
        assert (output[3].view(np.uint8) == harness.POISON).all(), f"{name} of a row that does not exist was written"


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_embedding_starts_a_step(machine: harness.Machine, precision: str, decode: bool) -> None:
    """Rows come from the slots' own state, or are given, as half rows; an inactive slot is an idle row of zeros."""
    embed(machine, precision, decode=decode, hidden=48, head_dim=32, grid=8)
    embed(machine, precision, decode=decode, hidden=1040, head_dim=128, grid=3)


class Router:
    """Random rows and router weights, and what the kernels of prompts and of decode make of them."""

    def __init__(
        self, machine: harness.Machine, x: np.ndarray, weights: np.ndarray, norm: np.ndarray, gate: object
    ) -> None:
        self.machine, self.tokens, (self.experts, hidden) = machine, len(x), weights.shape
        self.logits = machine.poisoned((self.tokens + 1, self.experts), np.float32)
        self.scale = machine.poisoned((self.tokens + 1,), np.float32)
        self.count = machine.put(np.array([self.tokens], np.uint32))
        self.scores = kernel_abi.struct("clb_router_logits_args")(
            weights=machine.put(weights), shared_gate=0 if gate is None else machine.put(np.asarray(gate)),
            norm=machine.put(norm), residual=machine.put(x), sumsq=machine.put(harness.tile_sums(x)),
            row_count=self.count, logits=self.logits.address, shared_scale=self.scale.address, experts=self.experts,
            hidden=hidden, epsilon=EPSILON,
        )  # fmt: skip
        self.grid = ((self.experts + 4) // 4, -(-max(self.tokens, 1) // 8))
        self.half_sums = machine.put(harness.half_sums(x))

    def score(self) -> None:
        """The prompts' kernel, with blocks of many rows and of few, which make the same bits."""
        args = type(self.scores).from_buffer_copy(self.scores)
        args.sumsq = self.half_sums
        made = []
        for args.block_rows in (32, 8):
            grid = (-(-(self.experts + (args.shared_gate != 0)) // 32), self.tokens // args.block_rows + 1)
            self.machine.run("clb_router_logits", args, grid=grid, block=256)
            made.append(self.machine.get(self.logits).tobytes())
        assert made[0] == made[1]

    def route(self, k: int, k_max: int, **choice: object) -> dict[str, np.ndarray]:
        """The decode steps' kernel."""
        outputs = {
            "indices": self.machine.poisoned((self.tokens, k_max), np.uint32),
            "weights": self.machine.poisoned((self.tokens, k_max), np.float32),
            "kept": self.machine.poisoned((self.tokens,), np.uint32),
        }
        given = {
            "logits": self.logits.address, "token_count": self.count, "logits_stride": self.experts, "renormalise": 1,
            "experts": self.experts, "k": k, "k_max": k_max, "routed_scale": 1.0, "block_tokens": 1,
            "not_finite": NOT_FINITE,
        }  # fmt: skip
        tickets = np.zeros((self.grid[1],), np.uint32)
        held = harness.Output(self.machine.put(tickets), tickets.shape, tickets.dtype)
        args = kernel_abi.struct("clb_route_args")(
            scores=self.scores, tickets=held.address,
            choice=kernel_abi.struct("clb_router_args")(
                **given, **choice, **{name: output.address for name, output in outputs.items()}
            ),
        )  # fmt: skip
        self.machine.run("clb_route", args, grid=self.grid, block=256)
        assert not self.machine.get(held).any(), "the next layer finds tickets in use"
        return {name: self.machine.get(output) for name, output in outputs.items()}


def random_router(
    machine: harness.Machine, tokens: int, shape: tuple[int, int, bool]
) -> tuple[Router, np.ndarray, np.ndarray]:
    """A router, its expected logits and gates."""
    experts, hidden, gated = shape
    rng = np.random.default_rng([tokens, experts])
    x = rng.normal(0, 3, (tokens, hidden)).astype(np.float32)
    norm, gate = rng.normal(1, 0.3, hidden).astype(np.float32), rng.normal(0, 0.1, hidden).astype(np.float32)
    weights = rng.normal(0, 0.1, (experts, hidden)).astype(np.float32)
    normed = harness.normed(x, norm, EPSILON)
    gates = 1 / (1 + np.exp(-(normed @ gate.astype(np.float64))))
    return Router(machine, x, weights, norm, gate if gated else None), normed @ weights.astype(np.float64).T, gates


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 8, 21, 64, 97])
@pytest.mark.parametrize("shape", [(4, 32, True), (60, 528, True), (130, 64, False), (7, 2064, False)])
def test_router_logits_equal_float64(
    machine: harness.Machine, tokens: int, shape: tuple[int, int, bool], decode: bool
) -> None:
    """Logits to 1e-6 of their size, the shared expert's gate, and in a decode step the choice that follows from them."""
    router, expected, gates = random_router(machine, tokens, shape)
    k = min(4, shape[0])
    chosen = router.route(k, k) if decode else router.score()
    got, got_scale = machine.get(router.logits), machine.get(router.scale)
    assert harness.relative(got[:-1], expected) < 1e-6
    assert (got[-1].view(np.uint32) == NONE).all()
    if shape[2]:
        np.testing.assert_allclose(got_scale[:-1], gates, atol=2e-6)
    else:
        assert (got_scale.view(np.uint32) == NONE).all()
    if chosen is not None:
        best = np.argsort(-got[:-1], axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(chosen["indices"], best)
        shares = np.exp(np.take_along_axis(expected, best, 1) - expected.max(1, keepdims=True, initial=-np.inf))
        np.testing.assert_allclose(chosen["weights"], shares / shares.sum(1, keepdims=True), atol=2e-5)


def test_a_row_is_routed_alone_as_among_others(machine: harness.Machine) -> None:
    """Logits and weights of a row have the same bits alone, in twos and among 21."""
    together, _, _ = random_router(machine, 21, (60, 528, True))
    all_weights = together.route(4, 4)["weights"]
    all_logits, x = machine.get(together.logits), together.scores
    for first, count in ((0, 1), (20, 1), (7, 2), (8, 8)):
        alone = object.__new__(Router)
        alone.__dict__ |= together.__dict__
        alone.tokens, alone.count = count, machine.put(np.array([count], np.uint32))
        alone.logits, alone.grid = machine.poisoned((count + 1, 60), np.float32), (together.grid[0], 1)
        alone.scores = type(x).from_buffer_copy(x)
        alone.scores.residual += first * 528 * 4
        alone.scores.sumsq += first * 33 * 4
        alone.scores.logits, alone.scores.row_count = alone.logits.address, alone.count
        weights = alone.route(4, 4)["weights"]
        assert machine.get(alone.logits)[:-1].tobytes() == all_logits[first : first + count].tobytes()
        assert weights.tobytes() == all_weights[first : first + count].tobytes()


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
    at = {
        "rows": harness.Output(machine.put(rows), rows.shape, np.dtype(np.uint32)),
        "slots": harness.Output(put_struct(machine, states), (slots, ctypes.sizeof(states[0])), np.dtype(np.uint8)),
        "counts": harness.Output(machine.put(counts), counts.shape, np.dtype(np.uint32)),
    }
    router = Router(
        machine, np.pad(logits, ((0, 0), (0, 8))), np.eye(experts, 48, dtype=np.float32), np.ones(48, np.float32), None
    )
    outputs = router.route(
        k, k_max, policy=machine.put(policies) + layer * 8, rows=at["rows"].address, slots=at["slots"].address,
        expert_counts=at["counts"].address + layer * experts * 4, policy_stride=layers, counts_stride=layers * experts,
    )  # fmt: skip
    kept = [6, 0, 1, 0, 4]
    np.testing.assert_array_equal(outputs["kept"], kept)
    indices = outputs["indices"]
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
