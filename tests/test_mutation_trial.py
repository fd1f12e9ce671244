"""The daemon against mutated requests, and that the trial tells what is wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from mutation_trial import Case, Trial, _answer, make_case, trial

if TYPE_CHECKING:
    from pathlib import Path

    from daemon_process import DaemonProcess

CASES = 3000  # `make fuzz-mutate` makes a million


@pytest.mark.slow
def test_no_mutation_breaks_the_server(tmp_path: Path) -> None:
    """No server error, every refusal in the contract, an answer to all that is HTTP, the canary the same, a clean log."""
    problems, statuses = trial(tmp_path, CASES, seed=2)
    assert problems == []
    assert statuses[200] > CASES / 20
    assert statuses[400] > CASES / 4
    assert {200, 400, 404, 405, 415} <= statuses.keys()


def test_cases_are_repeatable_and_many() -> None:
    """A number makes a case what it is; most differ, and both kinds are there."""
    cases = [make_case(number, 1) for number in range(500)]
    assert cases == [make_case(number, 1) for number in range(500)]
    assert cases != [make_case(number, 2) for number in range(500)]
    assert len(set(cases)) > 450
    assert {case.framed for case in cases} == {True, False}


@pytest.mark.parametrize(
    ("status", "head", "body", "good"),
    [
        (200, b"", b"{}", True),
        (
            400,
            b"content-type: application/json",
            b'{"error":{"message":"m","type":"t","param":null,"code":null}}',
            True,
        ),
        (400, b"content-type: application/json", b'{"error":{"message":"m","type":"t"}}', False),
        (400, b"content-type: application/json", b"[]", False),
        (500, b"", b"", False),
        (503, b"retry-after: 1", b"", True),
        (503, b"", b"", False),
        (504, b"", b"", False),
    ],
)
def test_answers_are_judged(status: int, head: bytes, body: bytes, good: bool) -> None:
    """Only what the API promises is good."""
    one = Trial(_no_daemon(), 1)
    one._judge(7, Case(b"", framed=True), status, head, body)
    assert (one.problems == []) is good
    assert all("case 7 of seed 1" in problem for problem in one.problems)


def _no_daemon() -> DaemonProcess:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", (200, b"ab")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", (200, b"abc")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
    ],
)
async def test_answers_are_read(data: bytes, expected: tuple[int, bytes]) -> None:
    """With a length, in chunks, without a body, and after an interim answer."""
    assert await _read(data) == expected
    assert await _read(data, b"HEAD / HTTP/1.1") == (expected[0], b"")


async def _read(data: bytes, asked: bytes = b"") -> tuple[int, bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    status, _, body = await _answer(reader, asked)
    return status, body
