"""The sampler, its events and the prompt's log-probabilities against numpy, by the rules of engine_c/src/sampler.h."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass, field
from typing import Any

import kernel_abi
import kernel_harness as harness
import numpy as np
import pytest

from colibrid.engine import abi

NONE, PROMPT = 0xFFFFFFFF, 0x80000000
MAX_BIAS, MAX_STOPS = 1024, 64
EVENT = kernel_abi.struct("clb_device_event")
RING = 4
LOGPROBS, MASKED = 1, 4
STOP, LENGTH = 1, 2
NOT_FINITE, NO_TOKEN = int(abi.Status.NOT_FINITE), int(abi.Status.NO_TOKEN)
RECORD = np.dtype(
    [
        ("position", "<u4"),
        ("token", "<i4"),
        ("logprob", "<f4"),
        ("count", "<u4"),
        ("ids", "<i4", 20),
        ("logs", "<f4", 20),
    ]
)
PROMPT_RECORD = np.dtype([("logprob", "<f4"), ("count", "<u4"), ("ids", "<i4", 20), ("logs", "<f4", 20)])


@dataclass(frozen=True)
class Ask:
    """What one slot asks for, and where it stands."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 50
    generated: int = 3
    logprobs: int | None = None
    mask: tuple[int, ...] | None = None
    seed: int = 1

    @property
    def counted(self) -> bool:
        return bool(self.presence or self.frequency or self.repetition != 1.0)


def philox(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) of the draw."""
    c, keys, low = [choice, position, 0, 0], [seed & NONE, seed >> 32], NONE
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ keys[0], second & low, (first >> 32) ^ c[3] ^ keys[1], first & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return float((c[0] << 21) ^ (c[1] >> 11)) / 2.0**53


def adjusted(ask: Ask, logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Logits after penalties and bias; NaN where banned."""
    values = logits.astype(np.float64)
    if ask.counted:
        seen, generated = counts != 0, (counts & ~np.uint32(PROMPT)).astype(np.float64)
        values[seen] = np.where(values > 0, values / ask.repetition, values * ask.repetition)[seen]
        values -= np.where(generated > 0, ask.frequency * generated + ask.presence, 0)
    for token, bias in ask.bias.items():
        values[token] += bias
    if ask.generated < ask.min_tokens:
        values[list(ask.stops)] = np.nan
    if ask.mask is not None:
        values[~np.isin(np.arange(len(values)), ask.mask)] = np.nan
    return values


def expected_token(ask: Ask, logits: np.ndarray, counts: np.ndarray, choice: int) -> int:
    values = adjusted(ask, logits, counts)
    order = sorted(np.flatnonzero(~np.isnan(values)), key=lambda i: (-values[i], i))
    if ask.temperature == 0:
        return int(order[0])
    mass = np.exp((values - values[order[0]]) / ask.temperature)
    kept = order[: ask.top_k] if ask.top_k else order
    if ask.top_p < 1:
        sums = np.cumsum(mass[kept])
        kept = kept[: int(np.searchsorted(sums, ask.top_p * sums[-1])) + 1]
    kept = sorted(i for i in kept if mass[i] >= ask.min_p)
    sums = np.cumsum(mass[kept])
    return int(kept[int(np.searchsorted(sums, philox(ask.seed, choice, ask.generated) * sums[-1], side="right"))])


class Case:
    """One slot a row; row i belongs to slot len - 1 - i."""

    def __init__(
        self, machine: harness.Machine, asks: list[Ask], vocab: int, *, logits: np.ndarray | None = None
    ) -> None:
        rng = np.random.default_rng(zlib.crc32(repr((asks, vocab)).encode()))
        slots = len(asks)
        self.machine, self.asks, self.vocab = machine, asks, vocab
        made = rng.normal(0, 3, (slots, vocab)) if logits is None else logits
        self.logits = made.astype(np.float32)
        self.counts = np.where(rng.random((slots, vocab)) < 0.3, rng.integers(0, 4, (slots, vocab)), 0).astype(
            np.uint32
        )
        self.counts[rng.random((slots, vocab)) < 0.2] |= PROMPT
        self.records = machine.poisoned((slots, RING), RECORD)
        self.states = (kernel_abi.struct("clb_device_slot") * slots)()
        bias = np.zeros((slots, MAX_BIAS), [("token", "<i4"), ("bias", "<f4")])
        stops, masks = np.zeros((slots, MAX_STOPS), np.int32), np.zeros((slots, 2, (vocab + 31) // 32), np.uint32)
        for index, (state, ask) in enumerate(zip(self.states, asks, strict=True)):
            values: dict[str, Any] = {
                "generation": 70 + index, "seed": ask.seed, "records": self.records.address + index * RING * RECORD.itemsize,
                "written": 5 + index, "record_mask": RING - 1, "active": 1, "position": 100, "generated": ask.generated,
                "choice": index, "max_tokens": ask.max_tokens, "min_tokens": ask.min_tokens, "top_k": ask.top_k,
                "top_logprobs": ask.logprobs or 0, "stop_count": len(ask.stops), "bias_count": len(ask.bias),
                "temperature": ask.temperature, "top_p": ask.top_p, "min_p": ask.min_p, "assignments": 11,
                "presence_penalty": ask.presence, "frequency_penalty": ask.frequency,
                "repetition_penalty": ask.repetition, "needs_counts": int(ask.counted), "trimmed": 2,
                "flags": (LOGPROBS if ask.logprobs is not None else 0) | (MASKED if ask.mask is not None else 0),
            }  # fmt: skip
            for name, value in values.items():
                setattr(state, name, value)
            bias[index, : len(ask.bias)] = list(ask.bias.items())
            stops[index, : len(ask.stops)] = ask.stops
            for token in ask.mask or ():
                masks[index, ask.generated % 2, token // 32] |= np.uint32(1 << token % 32)
        rows = np.array([[slots - 1 - i, 0, 0, 0] for i in range(slots)], np.uint32)
        self.rows = rows
        tiles = np.full((slots, -(-vocab // 16) * 16), -np.inf, np.float32)
        tiles[:, :vocab] = self.logits[::-1]
        grouped = tiles.reshape(slots, -1, 16)
        candidates = np.zeros(grouped.shape[:2], [("token", "<i4"), ("bias", "<f4")])
        candidates["token"] = grouped.argmax(2) + 16 * np.arange(grouped.shape[1])
        candidates["bias"] = np.where(np.isfinite(self.logits).all(), grouped.max(2), np.nan)
        self.slots_at, self.events = (
            machine.put(np.frombuffer(bytes(self.states), np.uint8)),
            machine.poisoned((slots + 1, ctypes.sizeof(EVENT)), np.uint8),
        )
        self.counts_at = machine.put(self.counts)
        self.args = {
            "logits": machine.put(self.logits[::-1]), "candidates": machine.put(candidates), "rows": machine.put(rows),
            "wanted": 0, "wanted_count": machine.put(np.array([slots], np.uint32)), "slots": self.slots_at,
            "bias": machine.put(bias), "stops": machine.put(stops), "masks": machine.put(masks),
            "counts": self.counts_at, "scratch": machine.poisoned((slots, vocab * 4), np.uint32).address,
            "events": self.events.address, "scratch_stride": vocab * 16, "vocab": vocab, "not_finite": NOT_FINITE,
            "no_token": NO_TOKEN,
        }  # fmt: skip

    def run(self) -> list[tuple[Any, Any, np.ndarray]]:
        """Event, slot afterwards and the record at its place, by slot."""
        slots = len(self.asks)
        self.machine.run("clb_sample", kernel_abi.struct("clb_sample_args")(**self.args), grid=(slots + 1,), block=1024)
        raw = self.machine.get(self.events)
        assert (raw[slots] == 0xFF).all(), "an event beyond the count"
        events = [
            kernel_abi.struct("clb_device_event").from_buffer_copy(raw[slots - 1 - i].tobytes()) for i in range(slots)
        ]
        size = ctypes.sizeof(self.states)
        memory = self.machine.get(harness.Output(self.slots_at, (size,), np.dtype(np.uint8))).tobytes()
        after = type(self.states).from_buffer_copy(memory)
        records = self.machine.get(self.records)
        return [(events[i], after[i], records[i, (5 + i) % RING]) for i in range(slots)]


ASKS = [
    Ask(), Ask(temperature=1.0), Ask(temperature=0.7, top_k=5, seed=9), Ask(temperature=1.5, top_p=0.8, seed=1 << 60),
    Ask(temperature=2.0, min_p=0.1, seed=4), Ask(temperature=1.0, top_k=40, top_p=0.5, min_p=0.02, seed=77),
    Ask(repetition=1.7, presence=0.5, frequency=0.3), Ask(temperature=0.9, frequency=1.0, seed=5),
    Ask(bias={3: 50.0, 9: -100.0}), Ask(stops=(7, 8), min_tokens=10, bias={7: 90.0, 11: 40.0}),
    Ask(temperature=1.0, mask=(2, 30, 63), seed=3), Ask(mask=(61,), generated=4), Ask(temperature=1e-4, logprobs=3),
    Ask(logprobs=20), Ask(logprobs=0, generated=49),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [64, 1000, 4099])
def test_every_rule_chooses_the_token_that_numpy_does(machine: harness.Machine, vocab: int) -> None:
    """Penalties, bias, bans, masks, temperature, top-k, top-p and min-p, with records, slots and events moved on."""
    case = Case(machine, ASKS, vocab)
    for index, (event, after, record) in enumerate(case.run()):
        ask, logits = case.asks[index], case.logits[index]
        token = expected_token(ask, logits, case.counts[index], index)
        assert record["token"] == token, f"{ask}: {record['token']}, not {token}"
        assert (event.kind, event.token, event.slot, event.generation, event.record) == (
            1,
            token,
            index,
            70 + index,
            5 + index,
        )
        assert (event.position, event.assignments, event.trimmed, event.status) == (ask.generated, 11, 2, 0)
        assert (after.written, after.token, after.position, after.generated) == (
            6 + index,
            token,
            101,
            ask.generated + 1,
        )
        ended = LENGTH if ask.generated + 1 == ask.max_tokens else 0
        assert (event.flags, after.active) == (ended, int(not ended))
        assert record["position"] == ask.generated
        check_record(record, ask, logits, token)


def check_record(record: np.ndarray, ask: Ask, logits: np.ndarray, token: int) -> None:
    if ask.logprobs is None:
        assert np.isnan(record["logprob"])
        assert record["count"] == 0
        assert not record["ids"].any()
        return
    wide = logits.astype(np.float64)
    logs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(len(logs)), -wide))[: ask.logprobs]
    assert abs(record["logprob"] - logs[token]) < 1e-5
    assert record["count"] == ask.logprobs
    assert (record["ids"][: ask.logprobs] == order).all()
    np.testing.assert_allclose(record["logs"][: ask.logprobs], logs[order], atol=1e-5)
    assert not record["ids"][ask.logprobs :].any()


def test_counts_follow_only_where_penalties_are_on(machine: harness.Machine) -> None:
    """A generated token is counted once, in the row of its own slot, if a penalty asks for it."""
    case = Case(machine, [Ask(frequency=0.5), Ask(temperature=1.0)], 64)
    results = case.run()
    counts = machine.get(harness.Output(case.counts_at, case.counts.shape, case.counts.dtype))
    expected = case.counts.copy()
    expected[0, results[0][0].token] += 1
    assert (counts == expected).all()


def test_a_stop_id_ends_the_slot(machine: harness.Machine) -> None:
    """The stop id is in the record, the flag says stop, and the slot is inactive."""
    best = int(Case(machine, [Ask()], 64).logits[0].argmax())
    case = Case(machine, [Ask(stops=(best, 1))], 64, logits=Case(machine, [Ask()], 64).logits)
    ((event, after, record),) = case.run()
    assert (event.flags, after.active, record["token"]) == (STOP, 0, best)


def test_ties_go_to_the_lowest_id(machine: harness.Machine) -> None:
    """Equal logits: argmax and the border of top-k both take the lowest ids."""
    logits = np.zeros((2, 200))
    case = Case(machine, [Ask(), Ask(temperature=1.0, top_k=1)], 200, logits=logits)
    assert [event.token for event, _, _ in case.run()] == [0, 0]


def test_rows_that_cannot_go_on_fail_alone(machine: harness.Machine) -> None:
    """No legal token, a logit that is not finite and a row marked bad fail with their status; a neighbour goes on."""
    logits = np.random.default_rng(5).normal(0, 1, (4, 70)).astype(np.float32)
    logits[1, 69] = np.nan
    asks = [Ask(mask=()), Ask(temperature=1.0), Ask(temperature=1.0), Ask()]
    case = Case(machine, asks, 70, logits=logits)
    case.rows[1, 3] = NOT_FINITE  # the row of slot 2
    case.args["rows"] = machine.put(case.rows)
    candidates = np.zeros((4, 5), [("token", "<i4"), ("bias", "<f4")])
    candidates["token"][0] = [3, 17, 35, 50, 65]
    candidates["bias"][0] = [1, 5, 2, 5, 1]
    case.args["candidates"] = machine.put(candidates)
    results = case.run()
    assert [event.kind for event, _, _ in results] == [2, 2, 2, 1]
    assert [event.status for event, _, _ in results] == [NO_TOKEN, NOT_FINITE, NOT_FINITE, 0]
    assert [after.active for _, after, _ in results] == [0, 0, 0, 1]
    assert results[3][0].token == 17


def test_publish_announces_each_step_in_its_own_place(machine: harness.Machine) -> None:
    """Events go to the place of the step's number, then the number appears; idle rows are told as such."""
    case = Case(machine, [Ask(), Ask()], 64)
    case.rows[0, 0] = NONE
    case.args["rows"] = machine.put(case.rows)
    machine.run("clb_sample", kernel_abi.struct("clb_sample_args")(**case.args), grid=(2,), block=1024)
    size = kernel_abi.constant("CLB_MAILBOX_BYTES")
    mailbox = harness.Output(machine.put(np.zeros(size, np.uint8)), (size,), np.dtype(np.uint8))
    step = harness.Output(machine.put(np.array([5], np.uint64)), (1,), np.dtype(np.uint64))
    args = kernel_abi.struct("clb_publish_args")(
        events=case.events.address, wanted_count=case.args["wanted_count"], step=step.address, mailbox=mailbox.address
    )
    machine.run("clb_publish", args, grid=(1,), block=64)
    raw, events = machine.get(mailbox), machine.get(case.events)
    place = kernel_abi.constant("CLB_MAILBOX_EVENTS") + 5 % 4 * 64 * ctypes.sizeof(EVENT)
    assert raw[:8].view(np.uint64)[0] == machine.get(step)[0] == 6
    assert (raw[place : place + 2 * ctypes.sizeof(EVENT)] == events[:2].reshape(-1)).all()
    kinds = [kernel_abi.struct("clb_device_event").from_buffer_copy(events[i].tobytes()).kind for i in range(2)]
    assert kinds == [0, 1]
    assert not raw[place + 2 * ctypes.sizeof(EVENT) :].any()


def test_prompt_records_hold_log_probabilities(machine: harness.Machine) -> None:
    """The next token's log-probability and the likeliest ids; rows to skip are left alone, bad ones are NaN."""
    vocab, rng = 777, np.random.default_rng(3)
    logits = rng.normal(0, 4, (4, vocab)).astype(np.float32)
    logits[3, 5] = np.inf
    records = machine.poisoned((4,), PROMPT_RECORD)
    items = np.zeros(4, [("record", "<u8"), ("next", "<i4"), ("count", "<u4")])
    items["record"] = records.address + np.arange(4) * PROMPT_RECORD.itemsize
    items["record"][1] = 0
    items["next"], items["count"] = [700, 0, 3, 9], [20, 1, 0, 2]
    status = machine.poisoned((4,), np.int32)
    args = kernel_abi.struct("clb_prompt_logprobs_args")(
        logits=machine.put(logits), items=machine.put(items), wanted_count=machine.put(np.array([4], np.uint32)),
        status=status.address, vocab=vocab, not_finite=NOT_FINITE,
    )  # fmt: skip
    machine.run("clb_prompt_logprobs", args, grid=(6,), block=1024)
    made, found = machine.get(records), machine.get(status)
    assert [int(found[i]) for i in (0, 2, 3)] == [0, 0, NOT_FINITE]
    for row in (0, 2):
        check_record(made[row], Ask(logprobs=int(items["count"][row])), logits[row], int(items["next"][row]))
    assert (made[1:2].view(np.uint8) == 0xFF).all()
    assert np.isnan(made[3]["logprob"])
    assert made[3]["count"] == 0
