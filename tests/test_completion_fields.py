"""What fields of /v1/completions do to the text, on the real engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "Once upon a time"
LENGTH = 24


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("fields")) as process:
        yield process.wait_ready()


def ask(daemon: DaemonProcess, **fields: Any) -> dict[str, Any]:
    """The only choice, greedy unless asked otherwise, with the ids of its tokens."""
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "return_token_ids": True} | fields
    status, answer = daemon.request("POST", "/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice


def streamed(daemon: DaemonProcess, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of a stream."""
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "stream": True} | fields
    with daemon.open("POST", "/v1/completions", body) as response:
        lines = [line[6:] for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_every_place_of_a_stop_string(daemon: DaemonProcess) -> None:
    """A stop string anywhere in the text, of any length, ends it just before, streamed or whole, and never leaks."""
    whole = ask(daemon)["text"]
    for start in range(1, 30, 3):
        for length in (1, 2, 5, 11):
            stop = whole[start : start + length]
            expected = (whole[: whole.index(stop)], "stop")
            choice = ask(daemon, stop=stop)
            assert (choice["text"], choice["finish_reason"]) == expected
            assert streamed(daemon, stop=stop) == expected
            assert (
                ask(daemon, stop=["no such text", stop], include_stop_str_in_output=True)["text"] == expected[0] + stop
            )


def test_bias_bans_and_forces(daemon: DaemonProcess) -> None:
    """-100 bans the likeliest token; 100 forces another one every time."""
    first = ask(daemon)["token_ids"][0]
    assert first not in ask(daemon, logit_bias={str(first): -100})["token_ids"]
    other = first + 1
    assert ask(daemon, logit_bias={str(other): 100}, max_tokens=5)["token_ids"] == [other] * 5


def test_penalties(daemon: DaemonProcess) -> None:
    """Each penalty changes a long text; where only two tokens are allowed, a frequency penalty makes both come."""
    plain = ask(daemon, max_tokens=80)["token_ids"]
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}):
        found = ask(daemon, max_tokens=80, **penalty)["token_ids"]
        assert found != plain
    two: dict[str, Any] = {"logit_bias": {"10": 100, "11": 100}, "max_tokens": 60}
    (only,) = set(ask(daemon, **two)["token_ids"])
    assert {only} < set(ask(daemon, **two, frequency_penalty=2)["token_ids"]) <= {10, 11}


def test_ends(daemon: DaemonProcess) -> None:
    """The model's own end, an end id of the request, min_tokens before either, and ignore_eos."""
    short = {"prompt": "The capital of Norway is"}
    ended = ask(daemon, **short)
    assert (ended["finish_reason"], ended["token_ids"][-1]) == ("stop", 4093)
    count = len(ended["token_ids"])
    assert len(ask(daemon, **short, min_tokens=count + 3)["token_ids"]) >= count + 3
    on = ask(daemon, **short, ignore_eos=True)
    assert (on["finish_reason"], len(on["token_ids"])) == ("length", LENGTH)
    second = ask(daemon)["token_ids"][1]
    cut = ask(daemon, stop_token_ids=[second])
    assert (cut["finish_reason"], cut["token_ids"][-1]) == ("stop", second)
    assert len(cut["token_ids"]) <= 2


def test_seeds(daemon: DaemonProcess) -> None:
    """The same seed gives the same text, another seed another one, and no seed a new one each time."""
    hot = {"temperature": 1.5, "top_p": 1, "max_tokens": 40}
    first = ask(daemon, **hot, seed=1)
    assert ask(daemon, **hot, seed=1) == first
    assert ask(daemon, **hot, seed=2)["token_ids"] != first["token_ids"]
    assert ask(daemon, **hot)["token_ids"] != ask(daemon, **hot)["token_ids"]


def test_ids_text_and_truncation_agree(daemon: DaemonProcess) -> None:
    """Ids in place of the text, and the end of a longer prompt, give the same; ids returned spell the text."""
    whole = ask(daemon)
    ids = whole["prompt_token_ids"]
    assert ask(daemon, prompt=ids)["token_ids"] == whole["token_ids"]
    cut = ask(daemon, prompt=[5, 6, 7, *ids], truncate_prompt_tokens=len(ids))
    assert (cut["prompt_token_ids"], cut["token_ids"]) == (ids, whole["token_ids"])
    _, spelled = daemon.request("POST", "/detokenize", {"tokens": whole["token_ids"]})
    assert spelled["prompt"] == whole["text"]


def test_top_k_of_one_is_greedy(daemon: DaemonProcess) -> None:
    """Filters that leave one token make any temperature greedy."""
    greedy = ask(daemon)["token_ids"]
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert ask(daemon, temperature=2, seed=5, **fields)["token_ids"] == greedy
