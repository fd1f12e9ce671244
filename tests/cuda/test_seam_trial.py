"""The seam trial: real rings and blocks, one captured graph, events through mapped memory; on the fake and on a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import cuda_harness as harness
import numpy as np
import pytest

from colibrid.engine import abi

if TYPE_CHECKING:
    from numpy.typing import NDArray

Backend = harness.Fake | harness.Gpu
VOCAB = 97
EXPERTS = 24
K = 4


def make_table(seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (VOCAB, EXPERTS)).astype(np.float32)


def expected_tokens(
    library: ctypes.CDLL, table: NDArray[np.float32], first: int, count: int, k: int, threshold: float
) -> list[int]:
    """What the stand-in model says, through the host twin alone."""
    policy = np.zeros((1, 2), np.uint32)
    policy[0, 0] = k
    policy[0, 1] = np.float32(threshold).view(np.uint32)
    tokens, token = [], first
    for _ in range(count):
        out = harness.route_on_host(
            library, table[token : token + 1].copy(), policy, k=K, k_max=K, score=0, renormalise=1, scale=1.0
        )
        kept = int(out["kept"][0])
        token = (token + sum((r + 1) * (int(out["indices"][0, r]) + 1) for r in range(kept))) % VOCAB
        tokens.append(token)
    return tokens


def drain(trial: harness.Trial, *, turns: int = 4000, read: bool = True) -> list[abi.Event]:
    """Turn until every opened slot ended (or `turns` are over), reading records as a daemon does."""
    events: list[abi.Event] = []
    open_slots: set[int] = set()
    ended = False
    for _ in range(turns):
        assert trial.turn() == 0
        for event in trial.events():
            events.append(event)
            if event.kind == abi.EventKind.OPENED:
                open_slots.add(event.slot)
            if event.kind == abi.EventKind.TOKEN and read:
                record = trial.record(event.slot, event.record)
                assert (record.position, record.token) == (event.position, event.token)
                trial.advance(event.slot, event.record + 1)
            if event.flags or event.kind in (abi.EventKind.CLOSED, abi.EventKind.FAILED):
                open_slots.discard(event.slot)
                ended = True
        if ended and not open_slots:
            break
    return events


def tokens_of(events: list[abi.Event], slot: int) -> list[int]:
    return [event.token for event in events if event.slot == slot and event.kind == abi.EventKind.TOKEN]


@pytest.mark.parametrize("edge", [0, 1])
def test_tokens_equal_the_host_twin(library: ctypes.CDLL, backend: Backend, edge: int) -> None:
    """Five slots of different lengths, k and threshold give exactly the tokens that the host twin gives."""
    table = make_table()
    trial = harness.Trial(library, backend, table, k=K, k_max=K, edge=edge)
    asked = [(3, 20, 0, 0.0), (40, 7, 1, 0.0), (41, 33, 3, 0.3), (96, 1, 0, 1.0), (0, 40, 2, 0.0)]
    for slot, (first, count, k, threshold) in enumerate(asked):
        trial.open(slot, 1, [5, first], count, k=k, threshold=threshold)
    events = drain(trial)
    trial.close()
    for slot, (first, count, k, threshold) in enumerate(asked):
        assert tokens_of(events, slot) == expected_tokens(library, table, first, count, k, threshold)
        last = [event for event in events if event.slot == slot][-1]
        assert last.flags == abi.Finish.LENGTH


def test_neighbours_and_joining_late_change_nothing(library: ctypes.CDLL, backend: Backend) -> None:
    """A slot that joins while others run, and is opened again under the next generation, keeps its own tokens."""
    table = make_table(2)
    trial = harness.Trial(library, backend, table, k=K, k_max=K)
    trial.open(2, 1, [10], 30)
    for _ in range(20):
        assert trial.turn() == 0
    trial.open(7, 1, [11], 12)
    events = drain(trial)
    assert tokens_of(events, 2) == expected_tokens(library, table, 10, 30, 0, 0.0)
    assert tokens_of(events, 7) == expected_tokens(library, table, 11, 12, 0, 0.0)
    trial.open(7, 2, [12], 5)
    events = drain(trial)
    trial.close()
    assert tokens_of(events, 7) == expected_tokens(library, table, 12, 5, 0, 0.0)
    assert {event.generation for event in events} == {2}


def test_a_stop_id_ends_on_the_device(library: ctypes.CDLL, backend: Backend) -> None:
    """Generation ends with the first stop id, which is in the record, and nothing follows though a step is in flight."""
    table = make_table(3)
    expected = expected_tokens(library, table, 20, 16, 0, 0.0)
    stop = expected[5]
    trial = harness.Trial(library, backend, table, k=K, k_max=K)
    trial.open(0, 1, [20], 16, stops=(stop,))
    events = drain(trial)
    for _ in range(20):
        assert trial.turn() == 0
    assert trial.events() == []
    trial.close()
    assert tokens_of(events, 0) == expected[: expected.index(stop) + 1]
    assert events[-1].flags & abi.Finish.STOP


def test_a_full_result_ring_makes_the_slot_wait(library: ctypes.CDLL, backend: Backend) -> None:
    """Nothing unread is overwritten, in-flight steps included: the slot sits out until its records are read."""
    table = make_table(4)
    trial = harness.Trial(library, backend, table, k=K, k_max=K, records=4)
    trial.open(1, 1, [30], 11)
    got: list[int] = []
    for _ in range(5):
        events = drain(trial, turns=300, read=False)
        batch = [event for event in events if event.kind == abi.EventKind.TOKEN]
        assert len(batch) <= 4
        got += [trial.record(1, event.record).token for event in batch]
        trial.advance(1, len(got))
        if batch and batch[-1].flags:
            break
    trial.close()
    assert got == expected_tokens(library, table, 30, 11, 0, 0.0)


def test_close_is_answered_and_silences_the_slot(library: ctypes.CDLL, backend: Backend) -> None:
    """After CLOSE comes CLOSED, once in-flight steps were seen, and nothing else."""
    trial = harness.Trial(library, backend, make_table(5), k=K, k_max=K, records=64)
    trial.open(3, 9, [1], 60)
    for _ in range(9):
        assert trial.turn() == 0
    trial.events()
    trial.push(abi.Command(kind=abi.CommandKind.CLOSE, slot=3, generation=9))
    events = drain(trial)
    trial.close()
    assert [event.kind for event in events] == [abi.EventKind.CLOSED]


def test_a_failing_driver_call_fails_every_open_request_and_leaks_nothing(library: ctypes.CDLL) -> None:
    """For every driver call n: either opening reports DEVICE, or both requests get FAILED; handles all come back."""
    table = make_table(6)
    backend = harness.Fake(library)
    trial = harness.Trial(library, backend, table, k=K, k_max=K)
    trial.open(0, 1, [1], 3)
    drain(trial)
    trial.close()
    calls = library.seam_fake_calls()
    assert calls > 15
    for n in range(1, calls + 1):
        backend = harness.Fake(library)
        library.seam_fake_reset(n)
        try:
            trial = harness.Trial(library, backend, table, k=K, k_max=K)
        except AssertionError:
            continue  # the upload of the table failed, which is the test's own call
        if trial.status != 0:
            assert trial.status == abi.Status.DEVICE
            assert library.seam_fake_live() == 0
            continue
        trial.open(0, 1, [1], 3)
        status, events = 0, []
        for _ in range(20):
            status = trial.turn()
            events += trial.events()
            if status:
                break
        if status:
            assert status == abi.Status.DEVICE
            assert events[-1].kind == abi.EventKind.FAILED
            assert events[-1].status == abi.Status.DEVICE
        trial.close()
        assert library.seam_fake_live() == 0


def test_a_kernel_of_another_size_is_refused_by_name(library: ctypes.CDLL, backend: Backend) -> None:
    """A cubin whose argument struct has another size than C's is MODULE, with the kernel and both sizes."""
    table = make_table(7)
    first = harness.Trial(library, backend, table, k=K, k_max=K)
    first.close()
    kernels = first.desc.kernels
    for index in range(first.desc.kernel_count):
        if kernels[index].name == b"clb_bucket":
            assert kernels[index].parameter_bytes == 64
            kernels[index].parameter_bytes = 72
    error = abi.Error()
    status = library.seam_open(ctypes.byref(first.config), ctypes.byref(first.handle), ctypes.byref(error))
    assert status == abi.Status.MODULE
    assert b"clb_bucket takes a struct of 72 bytes, this engine passes 64" in error.message
