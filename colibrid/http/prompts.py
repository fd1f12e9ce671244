"""Prompts in all their forms, to token ids: every bound that needs the tokenizer is checked here."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibrid.errors import RequestError
from colibrid.http.errors import shown
from colibrid.http.limits import MAX_PROMPTS
from colibrid.text.tokenizer import TooManyTokensError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.http.state import AppState
    from colibrid.http.types import CompletionBody, EmbeddingsBody, SamplingBody
    from colibrid.text.reasoning import Thinking


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: the ids that the model gets, and the text if the client sent text and all of it is used."""

    ids: tuple[int, ...]
    text: str | None = None
    thinking: Thinking = "before"  # where the reply of a chat begins


def prompt_entries(prompt: object, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """The prompts in any of OpenAI's forms, of field `name`. Raises RequestError for empty and wrong ones."""
    if prompt is None:
        raise RequestError(f"{name} is missing; send it.", param=name, code="missing_required_parameter")
    if isinstance(prompt, str):
        return [_text_entry(prompt, name)]
    if not isinstance(prompt, list):
        raise RequestError(
            f"{name}: expected a string, token ids or a list of these, not {shown(prompt)}; correct it.", param=name
        )
    if not prompt:
        raise _empty(name)
    if type(prompt[0]) is int:
        return [_id_entry(prompt, name)]
    if len(prompt) > most:
        raise RequestError(
            f"{name}: {len(prompt)} entries are more than the {most} of one request; send several requests.",
            param=name,
        )
    return [_entry(entry, f"{name}[{index}]") for index, entry in enumerate(prompt)]


def _entry(entry: object, name: str) -> str | list[int]:
    if isinstance(entry, str):
        return _text_entry(entry, name)
    if isinstance(entry, list):
        return _id_entry(entry, name)
    raise RequestError(f"{name}: expected a string or token ids, not {shown(entry)}; correct it.", param=name)


def _text_entry(text: str, name: str) -> str:
    if not text:
        raise _empty(name)
    return text


def _id_entry(ids: list[Any], name: str) -> list[int]:
    if not ids:
        raise _empty(name)
    if not set(map(type, ids)) <= {int}:
        index = next(index for index, value in enumerate(ids) if type(value) is not int)
        raise RequestError(
            f"{name}[{index}]: expected a token id, not {shown(ids[index])}; send integers only.", param=name
        )
    return ids


def _empty(name: str) -> RequestError:
    return RequestError(f"{name} is empty; send at least one token.", param=name, code="empty_prompt")


def check_prompt_bytes(entries: Sequence[str | list[int]], state: AppState, field: str = "prompt") -> None:
    """Raises RequestError when all texts together have more than limits.prompt_bytes."""
    limit = state.settings.limits.prompt_bytes
    total = sum(len(entry.encode("utf-8", "surrogatepass")) for entry in entries if isinstance(entry, str))
    if total > limit:
        raise RequestError(
            f"The prompts have {total} bytes, more than the {limit} allowed (limits.prompt_bytes); send less.",
            param=field,
            code="string_above_max_length",
        )


async def encode_prompts(
    entries: Sequence[str | list[int]], state: AppState, *, add_special: bool, most: int | None, field: str = "prompt"
) -> list[Prompt]:
    """Token ids of each entry. Raises RequestError for too many bytes or tokens, and for ids out of range."""
    check_prompt_bytes(entries, state, field)
    prompts = []
    for index, entry in enumerate(entries):
        name = field if len(entries) == 1 else f"{field}[{index}]"
        await asyncio.sleep(0)  # many prompts together would hold the event loop for long
        if isinstance(entry, str):
            with too_many_tokens_refused(state, name):
                ids = await state.text.tokenizer.encode_async(entry, add_special_tokens=add_special, most=most)
            if not ids:
                raise _empty(name)
            prompts.append(Prompt(tuple(ids), entry))
        elif most is not None and len(entry) > most:  # the ids need not be looked at
            with too_many_tokens_refused(state, name):
                raise TooManyTokensError(len(entry), exact=True)
        else:
            check_ids(entry, state.scheduler.info.vocab_size, name)
            prompts.append(Prompt(tuple(entry)))
    return prompts


def usable_tokens(body: SamplingBody | EmbeddingsBody, state: AppState) -> int | None:
    """Prompts with more tokens than this are refused whatever else is asked; none where they are truncated."""
    return state.scheduler.info.max_seq_len if body.truncate_prompt_tokens is None else None


@contextmanager
def too_many_tokens_refused(state: AppState, name: str) -> Iterator[None]:
    """Turns TooManyTokensError into the RequestError of prompt `name`."""
    try:
        yield
    except TooManyTokensError as error:
        count = error.count if error.exact else f"at least {error.count}"
        raise RequestError(
            f"{name} has {count} tokens, more than the context of {state.scheduler.info.max_seq_len} tokens;"
            " shorten it.",
            param=name,
            code="context_length_exceeded",
        ) from error


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises RequestError naming the first id outside the vocabulary by its place."""
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    index = next(index for index, value in enumerate(ids) if not 0 <= value < vocab_size)
    raise RequestError(
        f"{name}[{index}] = {shown(ids[index])} is no token id; ids are 0 to {vocab_size - 1}.",
        param=name,
        code="invalid_token_id",
    )


async def with_gap(entries: Sequence[str | list[int]], body: CompletionBody, state: AppState) -> list[str | list[int]]:
    """Each prompt with the suffix behind it, and between them the gap that the model fills in."""
    tokenizer, suffix = state.text.tokenizer, body.suffix or ""
    marks = tokenizer.infill_tokens
    if marks is None:
        raise RequestError(
            f"suffix = {shown(suffix)}: the model has no tokens to fill in the middle; leave it out.",
            param="suffix",
            code="unsupported_value",
        )
    for name, given in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens)):
        if given:
            raise RequestError(f"{name} does not go with suffix; leave one out.", param=name)
    before, behind, gap = marks
    tail = await tokenizer.encode_async(behind + suffix + gap, add_special_tokens=False)
    head = tokenizer.encode(before, add_special_tokens=False)
    return [
        before + entry + behind + suffix + gap if isinstance(entry, str) else [*head, *entry, *tail]
        for entry in entries
    ]


def truncated(prompt: Prompt, asked: int | None, room: int) -> Prompt:
    """The last `asked` tokens; with -1 the last `room`, at least one; with None all."""
    if asked is None:
        return prompt
    keep = asked if asked > 0 else max(1, room)
    return prompt if len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:])
