"""What a plugin is: its parts, what each of them is given and what it may answer. docs/PLUGINS.md: how to write one.

A package names a `Plugin` under the entry-point group `colibrid.plugins`. It is imported only if the configuration names
it, in `plugins:`; its settings are a msgspec struct of its own. Each part is called at the border of a request, never for
a token. A part says no to a request by raising colibrid.errors.RequestError; anything else that it raises is its mistake:
the host counts it, logs it with the plugin's name, and answers that request with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from colibrid.text.structured import Grammar

if TYPE_CHECKING:
    from colibrid.model.families.base import Family
    from colibrid.text.reasoning import ReasoningFormat
    from colibrid.text.tools import ToolFormat

GROUP = "colibrid.plugins"
API_VERSION = 1  # another one where a part is given or may answer something that it could not before


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request."""

    request_id: str
    path: str
    key: str | None  # id of the key, or of who an authenticator says it is; None where no key is asked for


class RequestFilter(Protocol):
    """Sees the JSON body of every API request before its fields are checked."""

    def filter(self, call: Call, body: dict[str, Any]) -> dict[str, Any] | None:
        """The body to go on with; None: as it is. Large bodies are filtered in a thread, one at a time."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request for text that is about to be queued."""

    call: Call
    prompts: tuple[tuple[int, ...], ...]  # token ids
    vocab_size: int


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling policy adds to a request, for all of its choices."""

    bias: Mapping[int, float] = {}  # token id: -100 .. 100; it wins over the request's own of the same id
    allowed_ids: Collection[int] | None = None  # nothing else, but the end of the text; a grammar is made of it
    stops: tuple[str, ...] = ()  # texts that end the answer
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None  # colibrid.text.structured makes one: regex(...), choice(...), json_schema(...)


class SamplingPolicy(Protocol):
    """Says at admission how a request's tokens may be chosen."""

    def admit(self, asked: Asked) -> Policy | None:
        """None: as the request says."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. Prompts of one id may share computed beginnings; the host keeps no budgets for it."""

    id: str  # letters, digits and ._@-, at most 64; it stands in the log
    scopes: frozenset[Literal["inference", "admin", "metrics"]] = frozenset({"inference"})


class Authenticator(Protocol):
    """Knows keys that are not in the credential file. With one, no request is answered without a key."""

    async def authenticate(self, headers: Mapping[str, str]) -> Identity | None:
        """None: not mine. Asked if the credential file does not know the key, on the event loop, for 5 s at most."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """An answered request; neither prompt nor answer is in it."""

    call: Call
    status: int
    ms: float
    facts: dict[str, Any]  # of the log line: prompt_tokens, completion_tokens, finish_reasons, queue_ms …


class ResponseObserver(Protocol):
    """Hears of every request that is over."""

    def observe(self, response: Observed) -> None:
        """Called on the event loop; hand on what takes longer than a millisecond."""


class Sample(NamedTuple):
    """One value of GET /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsSink(Protocol):
    """Carries the metrics elsewhere."""

    @property
    def interval_s(self) -> float:
        """How often; at least 1."""

    def send(self, samples: Sequence[Sample]) -> None:
        """Called in a thread of its own; while it is busy, samples are left out and counted as failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a plugin is made of: one part or several."""

    families: tuple[Family, ...] = ()  # architectures that `convert` and `serve` can then read
    request_filter: RequestFilter | None = None
    sampling_policy: SamplingPolicy | None = None
    authenticator: Authenticator | None = None
    observer: ResponseObserver | None = None
    tool_format: ToolFormat | None = None  # in the place of model.tool_parser: auto
    reasoning_format: ReasoningFormat | None = None  # in the place of model.reasoning_parser: auto
    metrics_sink: MetricsSink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What the entry point names."""

    api: int  # the API_VERSION that it was written for, as a number
    settings: type[msgspec.Struct]  # of its section below `plugins:`
    make: Callable[[Any], Parts]  # from its settings; called once, at the start
