"""What a limit on the tokens of an expert drops: bit by bit what the host twin drops for equal weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda_harness
import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

if TYPE_CHECKING:
    import ctypes

NONE = 0xFFFFFFFF
BLOCK = 64
CLASSES = 3  # of weights: many ties
# tokens, experts, k, k_max, limit
FEW = [(1, 4, 2, 2, 1), (8, 4, 2, 2, 1), (64, 8, 2, 2, 5), (64, 128, 8, 8, 1), (63, 60, 4, 16, 3), (64, 1, 1, 1, 63),
       (0, 8, 2, 2, 1), (40, 512, 16, 16, 2)]  # fmt: skip
MANY = [
    (65, 4, 2, 2, 1),
    (200, 8, 2, 2, 50),
    (300, 40, 8, 8, 20),
    (130, 1, 1, 1, 64),
    (500, 6, 6, 8, 499),
    (3, 8, 2, 2, 1),
]


def make_logits(rng: np.random.Generator, tokens: int, experts: int, ties: bool) -> np.ndarray:
    """Some experts are liked more; with ties there are few different rows."""
    liking = rng.normal(0, 1.5, experts)
    if ties:
        kinds = rng.normal(0, 1, (CLASSES, experts))
        return (kinds[rng.integers(0, CLASSES, tokens)] + liking).astype(np.float32)
    return (rng.normal(0, 1, (tokens, experts)) + liking).astype(np.float32)


def put_struct(machine: harness.Machine, value: Any) -> harness.Output:
    data = np.frombuffer(bytes(value), np.uint8)
    return harness.Output(machine.put(data), data.shape, data.dtype)


def compare(library: ctypes.CDLL, machine: harness.Machine, shape: tuple[int, ...], many: bool, ties: bool) -> None:
    tokens, experts, k, k_max, limit = shape
    rng = np.random.default_rng([tokens, experts, limit, many, ties])
    logits, policies = make_logits(rng, tokens, experts, ties), np.zeros((tokens, 2), np.uint32)
    policies[:, 0] = rng.integers(0, min(k_max, experts) + 1, tokens)
    how = {"k": k, "k_max": k_max, "score": 0, "renormalise": 1, "scale": 1.0}
    before = cuda_harness.route_on_host(library, logits, policies, **how)
    after = cuda_harness.route_on_host(library, logits, policies, limit=limit, **how)
    blocks = max(1, -(-tokens // BLOCK))
    block_counts = np.zeros((blocks, experts), np.uint32)
    for place in np.flatnonzero(before["indices"].ravel() != NONE):
        block_counts[place // k_max // BLOCK, before["indices"].ravel()[place]] += 1
    slots = (kernel_abi.struct("clb_device_slot") * 4)()
    for state in slots:
        state.assignments, state.dropped = 10_000, 7
    rows = np.zeros((max(tokens, 1), 4), np.uint32)
    rows[:, 0] = np.arange(len(rows)) % 4
    counts = np.full((4, 2, experts), 1000, np.uint32)
    count = machine.put(np.array([tokens], np.uint32))

    def place(array: np.ndarray) -> harness.Output:
        return harness.Output(machine.put(array), array.shape, array.dtype)

    at = {
        "indices": place(before["indices"]), "weights": place(before["weights"]), "block_counts": place(block_counts),
        "slots": put_struct(machine, slots), "expert_counts": place(counts),
    }  # fmt: skip
    lists = {
        "counts": machine.poisoned((experts,), np.uint32), "offsets": machine.poisoned((experts + 1,), np.uint32),
        "tokens": machine.poisoned((tokens * k_max,), np.uint32), "places": machine.poisoned((tokens * k_max,), np.uint32),
    }  # fmt: skip
    bucket = kernel_abi.struct("clb_bucket_args")(
        indices=at["indices"].address, block_counts=at["block_counts"].address, token_count=count, experts=experts,
        k_max=k_max, **{name: output.address for name, output in lists.items()},
    )  # fmt: skip
    capacity = kernel_abi.struct("clb_capacity_args")(
        rows=machine.put(rows), token_count=count, counts_stride=2 * experts, experts=experts, k_max=k_max,
        max_tokens=limit, **{name: output.address for name, output in at.items() if many or name != "block_counts"},
        **({"offsets": lists["offsets"].address, "places": lists["places"].address} if many else {}),
    )  # fmt: skip
    if many:
        machine.run("clb_bucket", bucket, grid=blocks, block=1024)
    machine.run("clb_capacity", capacity, grid=experts, block=256)
    if many:
        machine.run("clb_bucket", bucket, grid=blocks, block=1024)
        used = int(after["offsets"][-1])
        for mine, theirs in (
            ("counts", "counts"),
            ("offsets", "offsets"),
            ("tokens", "token_list"),
            ("places", "place_list"),
        ):
            np.testing.assert_array_equal(machine.get(lists[mine])[: used if mine in ("tokens", "places") else None],
                                          after[theirs][: used if mine in ("tokens", "places") else None], err_msg=mine)  # fmt: skip
    for name in ("indices", "weights"):
        np.testing.assert_array_equal(machine.get(at[name]).view(np.uint32), after[name].view(np.uint32), err_msg=name)
    check_sums(machine, at, before, after, tokens)


def check_sums(
    machine: harness.Machine, at: dict[str, harness.Output], before: dict[str, Any], after: dict[str, Any], tokens: int
) -> None:
    """Slots count what they lost, in all and by expert; other layers' counts are left alone."""
    states = (kernel_abi.struct("clb_device_slot") * 4).from_buffer_copy(machine.get(at["slots"]).tobytes())
    counts = machine.get(at["expert_counts"])
    assert (counts[:, 1] == 1000).all()
    for slot, state in enumerate(states):
        mine = np.arange(tokens) % 4 == slot
        lost = int(after["dropped"][mine].sum())
        assert (state.dropped, state.assignments) == (7 + lost, 10_000 - lost)
        gone = before["indices"][mine][after["indices"][mine] != before["indices"][mine]]
        np.testing.assert_array_equal(1000 - counts[slot, 0], np.bincount(gone, minlength=counts.shape[2]))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", FEW)
def test_few_rows_drop_what_the_host_drops(
    library: ctypes.CDLL, machine: harness.Machine, shape: tuple[int, ...], ties: bool
) -> None:
    """At most 64 rows: indices, weights, and the sums of slots, with and without equal weights."""
    compare(library, machine, shape, many=False, ties=ties)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", MANY)
def test_many_rows_drop_what_the_host_drops(
    library: ctypes.CDLL, machine: harness.Machine, shape: tuple[int, ...], ties: bool
) -> None:
    """Any number of rows, over the lists of the bucket kernel, which are then those of the host, too."""
    compare(library, machine, shape, many=True, ties=ties)


@pytest.mark.parametrize("score", [0, 1])
@pytest.mark.parametrize("renormalise", [0, 1])
@pytest.mark.parametrize("shape", [(7, 4, 2), (20, 33, 3), (16, 60, 4), (9, 128, 8), (12, 300, 16), (5, 512, 16)])
def test_weights_are_those_of_the_host_to_the_bit(
    library: ctypes.CDLL, machine: harness.Machine, shape: tuple[int, int, int], renormalise: int, score: int
) -> None:
    """Both add the scores in one order, so that what is dropped by weight is the same from equal logits on."""
    tokens, experts, k = shape
    rng = np.random.default_rng([tokens, experts, renormalise, score])
    logits = (rng.normal(0, 4, (tokens, experts))).astype(np.float32)
    policies = np.zeros((tokens, 2), np.uint32)
    policies[:, 0] = rng.integers(0, k + 1, tokens)
    expected = cuda_harness.route_on_host(
        library, logits, policies, k=k, k_max=k, score=score, renormalise=renormalise, scale=1.7
    )
    weights, indices = machine.poisoned((tokens, k), np.float32), machine.poisoned((tokens, k), np.uint32)
    args = kernel_abi.struct("clb_router_args")(
        logits=machine.put(logits), policy=machine.put(policies), token_count=machine.put(np.array([tokens], np.uint32)),
        indices=indices.address, weights=weights.address, kept=machine.poisoned((tokens,), np.uint32).address,
        logits_stride=experts, policy_stride=1, experts=experts, k=k, k_max=k, score=score, renormalise=renormalise,
        routed_scale=1.7, block_tokens=BLOCK, not_finite=7,
    )  # fmt: skip
    machine.run("clb_router_fp32", args, grid=1, block=1024)
    np.testing.assert_array_equal(machine.get(indices), expected["indices"])
    np.testing.assert_array_equal(machine.get(weights).view(np.uint32), expected["weights"].view(np.uint32))
