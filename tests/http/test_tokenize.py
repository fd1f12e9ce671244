"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

ASK = [{"role": "user", "content": "Hi"}]


@pytest.mark.fields("/detokenize", "tokens")
@pytest.mark.fields("/tokenize", "prompt")
async def test_prompt_to_ids_and_back(server: Server) -> None:
    """A prompt's ids are counted and listed with the context's length; the ids give the prompt again."""
    found = (await server.post("/tokenize", {"prompt": "The capital of Norway is Oslo."})).json
    assert found == {"count": 8, "max_model_len": 2048, "tokens": [568, 572, 281, 3210, 1031, 303, 2827, 13]}
    text = (await server.post("/detokenize", {"tokens": found["tokens"]})).json
    assert text == {"prompt": "The capital of Norway is Oslo."}


@pytest.mark.fields("/tokenize", "return_token_strs")
async def test_special_tokens_are_parsed_and_shown(server: Server) -> None:
    """The string of a special token is the token, and reads the same on the way back."""
    found = (await server.post("/tokenize", {"prompt": "<|im_start|>", "return_token_strs": True})).json
    assert (found["tokens"], found["token_strs"]) == ([4092], ["<|im_start|>"])
    assert (await server.post("/detokenize", {"tokens": [4092]})).json["prompt"] == "<|im_start|>"


@pytest.mark.fields("/tokenize", "messages", "add_generation_prompt", "add_special_tokens", "tools")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"tools": [{"type": "function", "function": {"name": "clock"}}]},
    ],
)
async def test_messages_are_what_chat_would_send(server: Server, options: dict[str, Any]) -> None:
    """Messages give the very ids that the chat route computes."""
    found = (await server.post("/tokenize", {"messages": ASK} | options)).json
    await server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1} | options)
    assert tuple(found["tokens"]) == server.service.last.prompt_ids
    assert found["count"] == len(found["tokens"])


@pytest.mark.fields("/tokenize", "chat_template_kwargs")
async def test_variables_of_the_template(server: Server) -> None:
    """A variable that the template does not read is refused, as in chats."""
    answer = await server.post("/tokenize", {"messages": ASK, "chat_template_kwargs": {"level": 1}})
    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs.level")


@pytest.mark.fields("/tokenize", "continue_final_message")
async def test_final_message_can_be_left_open(server: Server) -> None:
    """continue_final_message ends the ids with the last message's text."""
    messages = [*ASK, {"role": "assistant", "content": "Well"}]
    request = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = (await server.post("/tokenize", request)).json["tokens"]
    assert (await server.post("/detokenize", {"tokens": tokens})).json["prompt"].endswith("Well")


async def test_longer_texts_than_the_context_are_counted(server: Server) -> None:
    """A text that no context could hold is counted all the same."""
    assert (await server.post("/tokenize", {"prompt": "a b " * 5000})).json["count"] > 2048


async def test_empty_texts(server: Server) -> None:
    """An empty prompt has no ids, and no ids have no text."""
    assert (await server.post("/tokenize", {"prompt": ""})).json["tokens"] == []
    assert (await server.post("/detokenize", {"tokens": []})).json["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": ASK, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_wrong_fields_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    """A wrong field is 400, named."""
    answer = await server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_limits(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many bytes, or more ids than one answer lists, are 400 with the limit."""
    monkeypatch.setattr("colibrid.http.tokenize.MAX_LISTED_TOKENS", 100)
    server = await make_server(limits={"prompt_bytes": 1000})
    for text, limit in (("a" * 1001, "1000"), ("a b " * 200, "100")):
        answer = await server.post("/tokenize", {"prompt": text})
        assert (answer.status, answer.error["code"]) == (400, "string_above_max_length")
        assert limit in answer.error["message"]
    answer = await server.post("/detokenize", {"tokens": [1] * ((1 << 18) + 1)})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


@pytest.mark.fields("/detokenize", "model")
@pytest.mark.fields("/tokenize", "model")
async def test_model_is_checked(server: Server) -> None:
    """Another model than the served one is 404."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await server.post(path, body | {"model": "gpt-4"})).status == 404
