"""colibrid.http.gate."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from colibrid.config.settings import LimitsSettings
from colibrid.http.gate import Gate


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_counts_are_right_whatever_comes(steps: list[tuple[str, bool]]) -> None:
    """Of any coming and going, never more are in than allowed, in all and of one address, and none is turned away early."""
    gate, inside, refused = Gate(LimitsSettings(connections=4, connections_per_address=2), 1000), [], 0
    for address, comes in steps:
        if comes:
            free = len(inside) < 4 and inside.count(address) < 2
            assert (gate.enter(address) is None) == free
            refused += not free
            inside += [address] if free else []
        elif address in inside:
            gate.leave(address)
            inside.remove(address)
        assert gate.open == len(inside)
    assert gate.refused == refused


def test_descriptors_bound_connections() -> None:
    """With few descriptors fewer connections are taken, so that accepting never fails; some always are."""
    assert Gate(LimitsSettings(), 256).most == 192
    assert Gate(LimitsSettings(), 1 << 20).most == 4096
    assert Gate(LimitsSettings(), 10).most == 1


def test_refusals_are_whole_answers() -> None:
    """What is turned away gets an HTTP answer within the error contract."""
    gate = Gate(LimitsSettings(connections=1), 1000)
    assert gate.enter("a") is None
    answer = gate.enter("b")
    assert answer is not None
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_few_are_told_at_a_time() -> None:
    """Only so many that find no room keep a descriptor for the answer; the next may when one of them is gone."""
    gate = Gate(LimitsSettings(connections=1), 1000)
    told = 0
    while gate.tell():
        told += 1
        assert told < 64, "descriptors for everything but clients"
    gate.told()
    assert gate.tell()
    assert not gate.tell()


def test_handshakes_are_bounded_by_descriptors() -> None:
    """As many may begin as there is room for connections, and few more; each that may not is counted."""
    gate = Gate(LimitsSettings(connections=10), 1000)
    most = next(count for count in range(100) if not gate.may_begin(count))
    assert 10 < most < 10 + 64
    assert gate.enter("a") is None
    assert gate.may_begin(most - 2)
    assert not gate.may_begin(most - 1)
    assert gate.refused == 2
