"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import RequestError
from colibrid.http.errors import shown
from colibrid.http.outline import check_outline
from colibrid.http.prompts import Prompt, too_many_tokens_refused, usable_tokens
from colibrid.http.tool_choice import reasoning_of
from colibrid.text.reasoning import thinking_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.http.state import AppState
    from colibrid.http.types import ChatBody, Message
    from colibrid.text.template import ChatTemplate


async def chat_prompt(body: ChatBody, state: AppState, *, tools: bool = False) -> Prompt:
    """Renders and tokenizes the messages, with the request's tools or without.

    Raises RequestError for what the template or the limits refuse.
    """
    template = state.text.template
    if template is None:
        raise RequestError(
            f"The model {shown(state.scheduler.info.model_id)} has no chat template; send a finished prompt to"
            " /v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    try:
        text = await state.text.tokenizer.off_loop(
            len(msgspec.json.encode(body.messages)) + len(msgspec.json.encode(body.tools)),
            functools.partial(_rendered, body, state, template, tools=tools),
        )
    except RecursionError as error:
        raise RequestError("messages: nested too deeply; send flatter tool calls.", param="messages") from error
    with too_many_tokens_refused(state, "messages"):
        ids = await state.text.tokenizer.encode_async(
            text, add_special_tokens=bool(body.add_special_tokens), guarded=True, most=usable_tokens(body, state)
        )
    if not ids:
        raise RequestError("The messages give an empty prompt; send some text.", param="messages", code="empty_prompt")
    continued = plain_message(body.messages[-1], 0)["content"] if body.continue_final_message else None
    return Prompt(tuple(ids), thinking=thinking_at(reasoning_of(state), text, continued or ""))


def _rendered(body: ChatBody, state: AppState, template: ChatTemplate, *, tools: bool) -> str:
    """The prompt text, its special strings guarded. May run in another thread."""
    check_outline(*_arguments(body.messages), what="messages: what tool calls pass", param="messages")
    continued = _check_ending(body)
    messages = [plain_message(message, index) for index, message in enumerate(body.messages)]
    if not template.knows("developer", tools=tools):
        messages = [_as_system(message) for message in messages]
    if continued and not (messages[-1]["content"] or "").strip():
        raise RequestError(
            "The last message has no text to continue; leave continue_final_message out.",
            param="continue_final_message",
        )
    text = template.render(
        [_guarded(message, state) for message in messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=continued,
        tools=state.text.guard.guard(body.tools) if tools else None,
        **_variables(body, state, template, tools=tools),
    )
    _check_bytes(text, state)
    return text


def _arguments(messages: Sequence[Message]) -> Iterator[bytes]:
    """What the arguments of tool calls say in JSON, which templates get decoded."""
    for message in messages:
        for call in message.tool_calls or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"].encode("utf-8", "surrogatepass")


def _variables(body: ChatBody, state: AppState, template: ChatTemplate, *, tools: bool) -> dict[str, object]:
    """Variables that the client sets. Raises RequestError for those that the template does not read."""
    asked = body.chat_template_kwargs or {}
    settable = template.settable(tools=tools)
    for name in asked.keys() - settable:
        known = f"it reads {', '.join(sorted(settable))}" if settable else "it reads none"
        raise RequestError(
            f"chat_template_kwargs: {shown(name)} is no variable of the model's chat template; {known}.",
            param=f"chat_template_kwargs.{name}",
            code="unsupported_value",
        )
    found: dict[str, object] = {name: state.text.guard.guard(value) for name, value in asked.items()}
    if body.reasoning_effort is not None:
        if not template.knows("reasoning_effort", tools=tools):
            raise RequestError(
                "reasoning_effort is no variable of the model's chat template; leave it out.",
                param="reasoning_effort",
                code="unsupported_value",
            )
        found["reasoning_effort"] = body.reasoning_effort
    return found


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """One message as templates expect it: text parts joined, arguments of tool calls as objects."""
    name = f"messages[{index}]"
    plain: dict[str, Any] = {"role": message.role, "content": _text_of(message, name)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(
                f"{name}.tool_calls: only messages of the assistant call tools; leave it out.",
                param=f"{name}.tool_calls",
            )
        plain["tool_calls"] = [_tool_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return plain


def _text_of(message: Message, name: str) -> str | None:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return None
        raise RequestError(f"{name}.content is missing; send a string.", param=f"{name}.content")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{name}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: dict[str, Any], name: str) -> str:
    if part.get("type") != "text":
        raise RequestError(
            f"{name}.type = {shown(part.get('type'))} is not implemented yet; send parts of type text.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{name}.text: expected a string, not {shown(text)}.", param=f"{name}.text")
    return text


def _tool_call(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{name}.function.name: expected a string; send it.", param=f"{name}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            decoded = arguments  # what a model wrote need not be JSON
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    # Older templates would leave the newer name of the system role out without a word.
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _guarded(message: dict[str, Any], state: AppState) -> dict[str, Any]:
    """The client's strings with special-token strings broken; keys and role are ours."""
    return {key: value if key == "role" else state.text.guard.guard(value) for key, value in message.items()}


def _check_ending(body: ChatBody) -> bool:
    """True iff the last message is to be continued."""
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt is not False:
        raise RequestError(
            "continue_final_message needs add_generation_prompt: false; add it.", param="continue_final_message"
        )
    return True


def _check_bytes(text: str, state: AppState) -> None:
    mark = state.text.tokenizer.mark  # not part of the prompt
    total = len(text.encode("utf-8", "surrogatepass")) - text.count(mark) * len(mark.encode())
    limit = state.settings.limits.prompt_bytes
    if total > limit:
        raise RequestError(
            f"The prompt made of the messages has {total} bytes, more than the {limit} allowed (limits.prompt_bytes);"
            " send less.",
            param="messages",
            code="string_above_max_length",
        )
