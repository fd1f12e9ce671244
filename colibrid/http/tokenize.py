"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from colibrid.errors import RequestError
from colibrid.http.answer import json_response
from colibrid.http.body import read_body
from colibrid.http.limits import MAX_LISTED_TOKENS
from colibrid.http.messages import chat_prompt
from colibrid.http.params import check_model
from colibrid.http.prompts import check_ids, check_prompt_bytes
from colibrid.http.state import STATE
from colibrid.http.tool_choice import tool_use
from colibrid.http.types import TOKENIZE_REFUSED, ChatBody, DetokenizeBody, TokenizeBody
from colibrid.text.tokenizer import TooManyTokensError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from colibrid.http.state import AppState

_ONLY_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a prompt or of messages, counted."""
    state = request.app[STATE]
    body = await read_body(request, TokenizeBody, TOKENIZE_REFUSED, "prompt", "messages")
    check_model(body.model, state)
    ids = await _ids_of(body, state)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": state.scheduler.info.max_seq_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [state.text.tokenizer.token_text(token) for token in ids]
    return json_response(found)


async def _ids_of(body: TokenizeBody, state: AppState) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt, messages: send exactly one of them.", param="prompt")
    if body.messages is None:
        for name in _ONLY_MESSAGES:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} only goes with messages; leave it out.", param=name)
        return await _plain_ids(body.prompt or "", state, add_special=body.add_special_tokens is not False)
    chat = ChatBody(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return (await chat_prompt(chat, state, tools=tool_use(chat, state) is not None)).ids


async def _plain_ids(text: str, state: AppState, *, add_special: bool) -> Sequence[int]:
    """Also of texts that no context could hold, to be cut up by the client."""
    check_prompt_bytes([text], state)
    try:
        return await state.text.tokenizer.encode_async(text, add_special_tokens=add_special, most=MAX_LISTED_TOKENS)
    except TooManyTokensError as error:
        raise RequestError(
            f"The prompt has more than the {MAX_LISTED_TOKENS} tokens that one answer lists; send it in parts.",
            param="prompt",
            code="string_above_max_length",
        ) from error


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids."""
    state = request.app[STATE]
    body = await read_body(request, DetokenizeBody, {}, "tokens")
    check_model(body.model, state)
    if body.tokens:
        check_ids(body.tokens, state.scheduler.info.vocab_size, "tokens")
    decode = functools.partial(state.text.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": await state.text.tokenizer.off_loop(len(body.tokens), decode)})
