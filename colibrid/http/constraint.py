"""What a request says about the form of its answer, and the masks that see to it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import RequestError
from colibrid.text import structured

if TYPE_CHECKING:
    from colibrid.http.params import Job
    from colibrid.http.state import AppState
    from colibrid.http.types import ResponseFormat, SamplingBody, StructuredOutputs
    from colibrid.text.structured import Grammar

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


def asked_grammar(body: SamplingBody) -> Grammar | None:
    """The grammar of response_format or structured_outputs. Raises RequestError for what cannot be one."""
    by_format = None if body.response_format is None else _of_format(body.response_format)
    by_outputs = None if body.structured_outputs is None else _of_outputs(body.structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise RequestError(
            "response_format and structured_outputs both say what the answer may be; send one of them.",
            param="structured_outputs",
        )
    found = by_format or by_outputs
    if found is not None:
        check_ending(body, found.param)
    return found


def check_ending(body: SamplingBody, param: str) -> None:
    """Raises RequestError when an answer that is complete could not end."""
    if body.ignore_eos:
        raise RequestError(
            f"ignore_eos does not go with {param}, whose answers end when they are complete; leave it out.",
            param="ignore_eos",
        )


def _of_format(asked: ResponseFormat) -> Grammar | None:
    described = asked.json_schema
    if (described is None) != (asked.type != "json_schema"):
        wanted = "needs json_schema" if described is None else "has no use for json_schema"
        raise RequestError(
            f"response_format of type {asked.type} {wanted}; correct it.", param="response_format.json_schema"
        )
    if described is not None:
        schema = {} if described.schema is None else described.schema
        return structured.json_schema(schema, "response_format.json_schema.schema")
    return structured.any_object("response_format") if asked.type == "json_object" else None


def _of_outputs(asked: StructuredOutputs) -> Grammar:
    given = [name for name in _FORMS if getattr(asked, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs takes exactly one of {', '.join(_FORMS)}, not {len(given)}; correct it.",
            param="structured_outputs",
        )
    param = f"structured_outputs.{given[0]}"
    if asked.regex is not None:
        return structured.regex(asked.regex, param)
    if asked.choice is not None:
        return structured.choice(asked.choice, param)
    if asked.grammar is not None:
        return structured.grammar(asked.grammar, param)
    if asked.json is not None:
        return structured.json_schema(_decoded(asked.json, param), param)
    return structured.any_object(param)


def _decoded(schema: object, param: str) -> object:
    """Schemas may be sent as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise RequestError(f"{param} is text, but not JSON; send the schema as an object.", param=param) from error


async def constrained(job: Job, grammar: Grammar | None, state: AppState) -> Job:
    """The job with a mask for each position. Raises RequestError when the grammar cannot be used."""
    if grammar is None or not any(request.max_tokens for request in job.requests):
        return job
    maskers = [await state.structured.masker(grammar) for request in job.requests for _ in range(request.n)]
    requests = [msgspec.structs.replace(request, masked=True) for request in job.requests]
    return dataclasses.replace(job, requests=tuple(requests), maskers=tuple(maskers))
