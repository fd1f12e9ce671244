"""POST /v1/completions in all combinations of its main switches, on the real engine: counts, places and ends are exact."""

from __future__ import annotations

import functools
import itertools
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = ["Once upon a time", "The capital of Norway is"]  # the first goes on and on, the second comes to its end
ENDS = ["length", "stop"]
MAX_TOKENS = 6
TOP = 2
CHOICES = [1, 2]
SWITCHES = list(itertools.product([False, True], [None, TOP], [False, True], CHOICES, [False, True], [False, True]))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("matrix")) as process:
        yield process.wait_ready()


class Asker:
    """Sends requests, and knows each prompt's own answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.solo = functools.cache(self._solo)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    def ids(self, text: str) -> list[int]:
        return json.loads(self.post("/tokenize", {"prompt": text}))["tokens"]

    def _solo(self, text: str) -> dict[str, Any]:
        """The choice of one prompt asked for alone, with everything that can be told of it."""
        body = {"prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0, "echo": True, "logprobs": TOP}
        body["return_token_ids"] = True
        return json.loads(self.post("/v1/completions", body))["choices"][0]


@pytest.fixture(scope="module")
def asker(daemon: DaemonProcess) -> Asker:
    return Asker(daemon.port)


def joined(raw: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices and the usage of a stream, put together as a client does it."""
    blocks = [block.removeprefix(b"data: ") for block in raw.split(b"\n\n") if block.startswith(b"data: ")]
    assert blocks[-1] == b"[DONE]"
    *events, last = [json.loads(block) for block in blocks[:-1]]
    assert (last["choices"], {event["usage"] for event in events} if events else {None}) == ([], {None})
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        (part,) = event["choices"]
        choice = found.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
        assert choice.get("finish_reason") is None, "text after the end"
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        if part["logprobs"] is not None:
            lists = choice["logprobs"] or {key: [] for key in part["logprobs"]}
            choice["logprobs"] = {key: lists[key] + part["logprobs"][key] for key in lists}
    return [found[index] for index in sorted(found)], last["usage"]


@pytest.mark.parametrize(("echo", "logprobs", "several", "n", "as_ids", "stream"), SWITCHES)
def test_every_combination(
    asker: Asker, echo: bool, logprobs: int | None, several: bool, n: int, as_ids: bool, stream: bool
) -> None:
    """Each choice is the solo answer of its prompt, cut to what was asked for; usage, indices and ends are exact."""
    texts = TEXTS if several else TEXTS[:1]
    prompts = [asker.ids(text) if as_ids else text for text in texts]
    request: dict[str, Any] = {
        "prompt": prompts if several else prompts[0],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "echo": echo,
        "logprobs": logprobs,
        "n": n,
        "stream": stream,
    }
    if stream:
        choices, usage = joined(asker.post("/v1/completions", request | {"stream_options": {"include_usage": True}}))
    else:
        answer = json.loads(asker.post("/v1/completions", request))
        choices, usage = answer["choices"], answer["usage"]

    assert [choice["index"] for choice in choices] == list(range(len(texts) * n))
    for choice, text in zip(choices, [text for text in texts for _ in range(n)], strict=True):
        check(choice, asker.solo(text), text, echo=echo, logprobs=logprobs, prompt_tokens=len(asker.ids(text)))
    assert usage["prompt_tokens"] == sum(len(asker.ids(text)) for text in texts)
    assert usage["completion_tokens"] == n * sum(len(asker.solo(text)["token_ids"]) for text in texts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check(
    choice: dict[str, Any],
    solo: dict[str, Any],
    text: str,
    *,
    echo: bool,
    logprobs: int | None,
    prompt_tokens: int,
) -> None:
    """One choice against the solo answer, which holds prompt and log-probabilities."""
    assert choice["text"] == solo["text"][0 if echo else len(text) :]
    assert choice["finish_reason"] == solo["finish_reason"]
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    own = solo["logprobs"]
    first = 0 if echo else prompt_tokens
    moved = 0 if echo else len(text)
    assert choice["logprobs"] == {
        "tokens": own["tokens"][first:],
        "token_logprobs": own["token_logprobs"][first:],
        "top_logprobs": own["top_logprobs"][first:],
        "text_offset": [offset - moved for offset in own["text_offset"][first:]],
    }


@pytest.mark.parametrize(("text", "end"), list(zip(TEXTS, ENDS, strict=True)))
def test_the_solo_answer(asker: Asker, text: str, end: str) -> None:
    """What all others are compared with: lists as long as prompt and text, offsets that point at each token."""
    solo, count = asker.solo(text), len(asker.ids(text))
    lists = solo["logprobs"]
    assert {len(entries) for entries in lists.values()} == {count + len(solo["token_ids"])}
    assert solo["prompt_token_ids"] == asker.ids(text)
    assert solo["text"].startswith(text)
    assert "".join(lists["tokens"]).removesuffix("<|im_end|>") == solo["text"]
    whole = "".join(lists["tokens"])
    assert all(whole.startswith(*pair) for pair in zip(lists["tokens"], lists["text_offset"], strict=True))
    assert solo["finish_reason"] == end
    assert len(solo["token_ids"]) <= MAX_TOKENS
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert all(value <= 0 for value in lists["token_logprobs"][1:])
    for token, value, top in list(
        zip(*(lists[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value
        assert TOP <= len(top) <= TOP + 1


@pytest.mark.parametrize("n", CHOICES)
@pytest.mark.parametrize("stream", [False, True])
def test_scoring_alone(asker: Asker, n: int, stream: bool) -> None:
    """max_tokens 0 with echo and logprobs: the prompt's own text and values, no token more."""
    request: dict[str, Any] = {
        "prompt": TEXTS,
        "max_tokens": 0,
        "echo": True,
        "logprobs": TOP,
        "n": n,
        "stream": stream,
    }
    if stream:
        choices, usage = joined(asker.post("/v1/completions", request | {"stream_options": {"include_usage": True}}))
    else:
        answer = json.loads(asker.post("/v1/completions", request))
        choices, usage = answer["choices"], answer["usage"]
    assert usage["completion_tokens"] == 0
    for choice, text in zip(choices, [text for text in TEXTS for _ in range(n)], strict=True):
        own, count = asker.solo(text)["logprobs"], len(asker.ids(text))
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"] == {key: entries[:count] for key, entries in own.items()}
