"""Every route in one table: the server answers from it, /openapi.json and docs/reference/api.md are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from colibrid.http.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    Generated,
    Health,
    Live,
    Model,
    ModelList,
    Ready,
    Tokenized,
    UiState,
    Version,
)
from colibrid.http.chat import chat_completions
from colibrid.http.completions import completions
from colibrid.http.embeddings import embeddings
from colibrid.http.generate import generate
from colibrid.http.health import health, livez, readyz, version
from colibrid.http.models import list_models, show_model
from colibrid.http.tokenize import detokenize, tokenize
from colibrid.http.types import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    EMBEDDINGS_REFUSED,
    GENERATE_REFUSED,
    TOKENIZE_REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    GenerateBody,
    Refused,
    TokenizeBody,
)
from colibrid.http.ui import ui_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec
    from aiohttp.typedefs import Handler

    from colibrid.http.credentials import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str  # a last part in braces may hold slashes
    handler: Handler
    summary: str
    answer: type[msgspec.Struct]
    body: type[msgspec.Struct] | None = None
    refused: Mapping[str, Refused] = field(default_factory=dict)  # fields that are 400 by name
    streams: bool = False  # answers with events where the body says `stream`
    queues: bool = False  # waits for a slot, so it is refused before its body is read when there is no room
    scope: Scope | None = "inference"  # that a key must have where keys are set; None: no key is asked for

    @property
    def needs_key(self) -> bool:
        """Where keys are set."""
        return self.scope is not None

    @property
    def pattern(self) -> str:
        """The path as the router takes it."""
        return self.path.replace("}", ":.+}")


ROUTES = (
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        answer=Completion,
        summary="Complete one prompt or several",
        body=CompletionBody,
        refused=COMPLETION_REFUSED,
        streams=True,
        queues=True,
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        answer=ChatCompletion,
        summary="Answer a conversation",
        body=ChatBody,
        refused=CHAT_REFUSED,
        streams=True,
        queues=True,
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        answer=Embeddings,
        summary="A vector for each text",
        body=EmbeddingsBody,
        refused=EMBEDDINGS_REFUSED,
        queues=True,
    ),
    Route(
        method="POST",
        path="/generate",
        handler=generate,
        answer=Generated,
        summary="Complete one prompt, in the short form",
        body=GenerateBody,
        refused=GENERATE_REFUSED,
        queues=True,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        answer=Tokenized,
        summary="The token ids of a prompt or of messages",
        body=TokenizeBody,
        refused=TOKENIZE_REFUSED,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        answer=Detokenized,
        summary="The text of token ids",
        body=DetokenizeBody,
    ),
    Route(
        method="GET", path="/v1/models", handler=list_models, answer=ModelList, summary="The served model, as a list"
    ),
    Route(
        method="GET",
        path="/v1/models/{id}",
        handler=show_model,
        answer=Model,
        summary="The served model, by its id or an alias",
    ),
    Route(method="GET", path="/version", handler=version, answer=Version, summary="The server's version"),
    Route(
        method="GET",
        path="/ui/state",
        handler=ui_state,
        answer=UiState,
        summary="What the page /ui shows of slots and experts",
        scope="metrics",
    ),
    Route(
        method="GET",
        path="/livez",
        handler=livez,
        answer=Live,
        summary="200 while the event loop turns",
        scope=None,
    ),
    Route(
        method="GET",
        path="/readyz",
        handler=readyz,
        answer=Ready,
        summary="200 while requests are served, else 503, with what the engine does",
        scope=None,
    ),
    Route(
        method="GET",
        path="/health",
        handler=health,
        answer=Health,
        summary="As /readyz, with the state of each engine",
        scope=None,
    ),
)
