"""An example of a plugin: one part of each kind, each as short as it can be. docs/PLUGINS.md explains it."""

from __future__ import annotations

import hmac
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from colibrid.errors import RequestError
from colibrid.model.families import mixtral
from colibrid.plugins import Identity, Parts, Plugin, Policy
from colibrid.text import structured
from colibrid.text.reasoning import ReasoningFormat
from colibrid.text.tools import Layout, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from colibrid.plugins import Asked, Call, Observed, Sample


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand below `plugins: example:`."""

    forbidden: tuple[str, ...] = ()  # words that no body may hold
    most_tokens: Annotated[int, Meta(ge=1)] | None = None  # max_tokens above it is lowered
    bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}  # by token id
    allowed_ids: tuple[int, ...] = ()
    pattern: str | None = None  # of all answers
    stop: str | None = None
    people: dict[str, Annotated[str, Meta(min_length=8)]] = {}  # name: key
    journal: str | None = None  # a line of JSON for each request goes to this file
    samples: str | None = None  # the newest metrics go to this file
    interval_s: Annotated[float, Meta(ge=1, le=3600)] = 10.0


class Filter:
    """Refuses words, and lowers max_tokens."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def filter(self, _call: Call, body: dict[str, Any]) -> dict[str, Any] | None:
        text = json.dumps([body.get("prompt"), body.get("messages")], ensure_ascii=False)
        for word in self._settings.forbidden:
            if word in text:
                raise RequestError(
                    "The request holds a word that this server does not take; leave it out.", code="refused"
                )
        most, asked = self._settings.most_tokens, body.get("max_tokens")
        return body | {"max_tokens": most} if most is not None and isinstance(asked, int) and asked > most else None


class Sampling:
    """The same for all requests."""

    def __init__(self, settings: Settings) -> None:
        self._policy = Policy(
            bias={int(token): value for token, value in settings.bias.items()},
            allowed_ids=settings.allowed_ids or None,
            stops=() if settings.stop is None else (settings.stop,),
            grammar=None if settings.pattern is None else structured.regex(settings.pattern, "plugins.example.pattern"),
        )

    def admit(self, _asked: Asked) -> Policy:
        return self._policy


class People:
    """Keys from the settings."""

    def __init__(self, people: Mapping[str, str]) -> None:
        self._people = people

    async def authenticate(self, headers: Mapping[str, str]) -> Identity | None:
        sent = headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        for name, key in self._people.items():
            if hmac.compare_digest(sent, key.encode()):
                return Identity(id=name)
        return None


class Journal:
    """Writes down what was asked, by whom, and how it ended."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)

    def observe(self, response: Observed) -> None:
        line = {"path": response.call.path, "key": response.call.key, "status": response.status}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"tokens": response.facts.get("completion_tokens")}) + "\n")


class File:
    """A file with the newest metrics."""

    def __init__(self, path: str, interval_s: float) -> None:
        self._path = pathlib.Path(path)
        self.interval_s = interval_s

    def send(self, samples: Sequence[Sample]) -> None:
        self._path.write_text(
            "".join(f"{one.name} {dict(one.labels)} {one.value}\n" for one in samples), encoding="utf-8"
        )


def _calls(section: str) -> Iterator[tuple[object, object]]:
    """`CALL name {"argument": 1}`."""
    _, name, arguments = section.split(maxsplit=2)
    yield name, msgspec.json.decode(arguments)


TOOLS = ToolFormat(
    name="example", begins=("CALL ",), layout=Layout(start="", opening="CALL {} ", between="\n"), read=_calls
)
THOUGHTS = ReasoningFormat(name="example", begin="HM:", end=":HM")
FAMILY = msgspec.structs.replace(mixtral.FAMILY, architecture="ExampleForCausalLM")  # Mixtral by another name


def make(settings: Settings) -> Parts:
    """All parts; those without settings are left out."""
    return Parts(
        families=(FAMILY,),
        request_filter=Filter(settings),
        sampling_policy=Sampling(settings),
        authenticator=People(settings.people) if settings.people else None,
        observer=None if settings.journal is None else Journal(settings.journal),
        tool_format=TOOLS,
        reasoning_format=THOUGHTS,
        metrics_sink=None if settings.samples is None else File(settings.samples, settings.interval_s),
    )


PLUGIN = Plugin(api=1, settings=Settings, make=make)
