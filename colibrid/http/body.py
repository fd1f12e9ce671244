"""From an HTTP request to a typed body, or an error that names the field."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import re
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from msgspec import inspect

from colibrid.errors import OverloadedError, RequestError
from colibrid.http.context import current
from colibrid.http.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError, shown
from colibrid.http.limits import (
    BODY_TIMEOUT_S,
    INLINE_BODY_BYTES,
    MAX_INCOMING_BODIES,
    MAX_MESSAGES,
    OTHER_FIELDS_BYTES,
)
from colibrid.http.outline import check_outline, keys_of_object
from colibrid.http.plugged import call_of, filtered
from colibrid.http.state import STATE
from colibrid.http.types import Message, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from aiohttp import web

    from colibrid.http.state import Incoming

Body = TypeVar("Body", bound=msgspec.Struct)
LongField = Literal["prompt", "messages", "input", "tokens"]

_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_NOTHING = msgspec.Raw()
_MANY_NAMES = 64  # from here on keys are counted at once
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


async def read_body(
    request: web.Request, kind: type[Body], refused: Mapping[str, Refused], *long_fields: LongField
) -> Body:
    """The typed body of a request, which only `long_fields` may make large; fields unknown to the API go to the context.

    Raises RequestErrors of status 400, 408, 413 and 415.
    """
    state = request.app[STATE]
    settings = state.settings.server
    with _counted(state.incoming, settings.max_body_bytes) as count:
        raw = await _read(request, settings.max_body_bytes, count)
        change = None
        if state.plugins.filters and not request.path.startswith("/admin/"):
            change = functools.partial(filtered, call_of(request), filters=state.plugins.filters)
        work = functools.partial(_typed, raw, kind, refused, long_fields, change, strict=settings.strict)
        if len(raw) <= INLINE_BODY_BYTES:
            body, ignored = work()
        else:  # one thread for all: several large bodies at a time would keep the event loop from the interpreter's lock
            body, ignored = await asyncio.get_running_loop().run_in_executor(state.reader, work)
    current(request).ignored = ignored
    return body


@contextlib.contextmanager
def _counted(incoming: Incoming, max_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function that counts the bytes of one body, while it arrives and is decoded, among those of all others.

    It raises OverloadedError when there are too many of them.
    """
    own, most = 0, MAX_INCOMING_BODIES * max_bytes

    def count(arrived: int) -> None:
        nonlocal own
        if incoming.bytes + arrived > most:
            raise OverloadedError(
                f"More than {most} bytes of requests are arriving; try again shortly.",
                code="server_is_overloaded",
                retry_after_s=1.0,
            )
        own += arrived
        incoming.bytes += arrived

    try:
        yield count
    finally:
        incoming.bytes -= own


async def _read(request: web.Request, max_bytes: int, count: Callable[[int], None]) -> bytes:
    if "Content-Encoding" in request.headers:
        raise MediaTypeError("Compressed bodies are not accepted; send the body without Content-Encoding.")
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise MediaTypeError(
            f"The body must be JSON, not {shown(kind)}; send the header 'Content-Type: application/json'."
        )
    too_large = BodyTooLargeError(
        f"The body is larger than {max_bytes} bytes; send less, or raise server.max_body_bytes."
    )
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.content.iter_any():
                count(len(part))
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTimeoutError(f"The body did not arrive within {BODY_TIMEOUT_S:g} s; send it faster.") from error
    return bytes(body)


def _typed(
    raw: bytes,
    kind: type[Body],
    refused: Mapping[str, Refused],
    long_fields: Sequence[LongField],
    change: Callable[[dict[str, Any]], dict[str, Any]] | None,
    *,
    strict: bool,
) -> tuple[Body, list[str]]:
    """`parse` of what `decode_object` finds, and `change` makes of it. May run in another thread."""
    found = decode_object(raw, long_fields)
    return parse(found if change is None else change(found), kind, refused, strict=strict)


class _LongFields(msgspec.Struct):
    """The fields that may be long, found but not built; the others are skipped, which takes milliseconds."""

    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    tokens: msgspec.Raw = _NOTHING


_long_fields = msgspec.json.Decoder(_LongFields)


def decode_object(raw: bytes, long_fields: Sequence[LongField]) -> dict[str, Any]:
    """`raw` as a JSON object. NaN, Infinity, numbers that overflow and lone surrogates are refused.

    So is more than OTHER_FIELDS_BYTES beside `long_fields`, and a body of more values than any request has a use for:
    building millions of them that nobody wants would stop the event loop for as long. May run in another thread.
    """
    try:
        check_outline(raw)
        if len(raw) > OTHER_FIELDS_BYTES:
            _check_other_fields(raw, long_fields)
        with collector_off():
            value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # only for numbers that no float holds
        raise RequestError(f"The body holds a number out of range ({error}); send finite numbers.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON ({error}); correct it.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object; send one.", code="invalid_json")
    if _may_repeat(raw, value) and len(value) != keys_of_object(raw):
        raise RequestError("The body has a field twice; send each field once.", code="invalid_json")
    return value


def _may_repeat(raw: bytes, names: Collection[str]) -> bool:
    """False where no name stands in `raw` twice, plainly or escaped: told faster than the keys are counted."""
    return len(names) > _MANY_NAMES or b"\\u" in raw or any(raw.count(b'"%b"' % name.encode()) > 1 for name in names)


def _check_other_fields(raw: bytes, long_fields: Sequence[LongField]) -> None:
    try:
        found = _long_fields.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError("The body must be a JSON object; send one.", code="invalid_json") from error
    others = len(raw) - sum(len(memoryview(getattr(found, name))) for name in long_fields)
    if others > OTHER_FIELDS_BYTES:
        raise RequestError(
            f"All fields but {' and '.join(long_fields)} have {others} bytes together, more than {OTHER_FIELDS_BYTES}; send less.",
            code="string_above_max_length",
        )


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No search for garbage meanwhile: while millions of objects are made it would look at all of them many times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parse(
    raw: dict[str, Any], kind: type[Body], refused: Mapping[str, Refused], *, strict: bool
) -> tuple[Body, list[str]]:
    """The typed body, and the names of fields that the API does not know.

    Raises RequestError naming the field for known fields that are not implemented, wrong types, numbers out of
    range, and, with `strict`, unknown fields.
    """
    for name in raw.keys() & refused.keys():
        _check_off(name, raw[name], refused[name])
    known = frozenset(kind.__struct_encode_fields__)  # structs.fields reads annotations anew: a millisecond
    ignored = sorted(raw.keys() - known - refused.keys())
    ignored += _unknown_in_messages(raw.get("messages"))
    if strict and ignored:
        raise RequestError(
            f"Unknown field {shown(ignored[0])}; leave it out (server.strict is on).",
            param=ignored[0],
            code="unknown_parameter",
        )
    try:
        with collector_off():
            return msgspec.convert(raw, kind), ignored
    except msgspec.ValidationError as error:
        raise _explained(str(error), raw, kind) from error


def _check_off(name: str, value: object, rule: Refused) -> None:
    # 1 == True in Python, not in JSON: types must agree too.
    off = value is None or any(type(value) is type(harmless) and value == harmless for harmless in rule.harmless)
    if not off:
        raise RequestError(
            f"{name} = {shown(value)} is not implemented yet; {rule.instead}.", param=name, code="unsupported_value"
        )


def _unknown_in_messages(messages: object) -> list[str]:
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:  # too many are refused, whatever is in them
        return []
    known = frozenset(Message.__struct_encode_fields__)
    unknown: set[str] = set()
    for message in messages:
        if isinstance(message, dict) and not known.issuperset(message):
            # SDKs send their answers back with null and empty fields: these say nothing.
            unknown.update(name for name in message.keys() - known if message[name] not in (None, [], {}))
    return sorted(f"messages.{name}" for name in unknown)


def _explained(text: str, raw: dict[str, Any], kind: type[msgspec.Struct]) -> RequestError:
    """Msgspec's `Expected … - at `$.a[0].b`` as a message with the field and its value."""
    place = _PLACE.search(text)
    path = place.group(1) if place else ""
    reason = (text[: place.start()] if place else text).replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", reason)
    if missing:
        name = f"{path}.{missing.group(1)}".lstrip(".")
        return RequestError(f"{name} is missing; send it.", param=name, code="missing_required_parameter")
    unknown = re.fullmatch(r"Object contains unknown field (.+)", reason)
    if unknown:
        name = f"{path}.{unknown.group(1)}".lstrip(".")
        return RequestError(f"Unknown field {shown(name)}; leave it out.", param=name, code="unknown_parameter")
    param = path.replace("[...]", "") or None
    value = _value_at(raw, path)
    if reason.startswith("Invalid enum value"):
        allowed = ", ".join(map(shown, _listed(kind, path)))
        return RequestError(
            f"{param}: {shown(value)} is not one of the allowed values: {allowed}; correct it.",
            param=param,
            code="invalid_value",
        )
    separator = ": " if ", got " in reason else ", not "
    given = "" if value is _NOWHERE else separator + shown(value)
    reason = reason[:1].lower() + reason[1:]
    return RequestError(
        f"{param or 'The body'}: {reason}{given}; correct the value or leave it out.", param=param, code="invalid_value"
    )


def _listed(kind: type[msgspec.Struct], path: str) -> list[object]:
    """The values that `kind` allows at `path`, of a place where it lists them."""
    kinds = _unions_apart([_type_info(kind)])
    for _, name in _STEP.findall(path):
        if name:
            fields = [field for each in kinds if isinstance(each, inspect.StructType) for field in each.fields]
            below = [field.type for field in fields if field.encode_name == name]
        else:
            below = [each.item_type for each in kinds if isinstance(each, inspect.ListType)]
        kinds = _unions_apart(below)
    return [value for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _unions_apart(kinds: Sequence[inspect.Type]) -> list[inspect.Type]:
    apart: list[inspect.Type] = []
    for each in kinds:
        bare = each.type if isinstance(each, inspect.Metadata) else each  # what _doc() says is wrapped around it
        apart += _unions_apart(bare.types) if isinstance(bare, inspect.UnionType) else [bare]
    return apart


_type_info = functools.cache(inspect.type_info)
_NOWHERE = object()


def _value_at(raw: object, path: str) -> object:
    value: object = raw
    for index, name in _STEP.findall(path):
        try:
            value = value[int(index)] if index else value[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return _NOWHERE
    return value
