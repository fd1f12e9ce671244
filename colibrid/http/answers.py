"""Answers as types, for /openapi.json. Routes write the same shapes as JSON piece by piece; a test holds them together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[list[Count] | UnsetType, Meta(description="with return_token_ids")]
PromptLogprobs = Annotated[
    list[dict[str, Any] | None] | UnsetType,
    Meta(
        description="with prompt_logprobs: for each position {id: {logprob, rank, decoded_token}}, null for the first"
    ),
]


class CachedTokens(msgspec.Struct, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: Count


class ReasoningTokens(msgspec.Struct, kw_only=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: Count


class ExpertSwitch(msgspec.Struct, kw_only=True):
    """An expert was replaced while a sequence was computed."""

    choice: Annotated[Count, Meta(description="index of the sequence")]
    weights_generation: Annotated[Count, Meta(description="that began")]
    position: Annotated[
        Count, Meta(description="positions below it, of prompt and output, were computed by the experts before")
    ]


class ExpertsUsed(msgspec.Struct, kw_only=True):
    """`usage.experts`: what the experts did."""

    per_token: Count
    assignments: Annotated[Count, Meta(description="of a token to an expert, over all layers")]
    trimmed: Annotated[
        Count, Meta(description="assignments left out by per_token or threshold, against the model's own")
    ]
    dropped: Annotated[Count, Meta(description="assignments left out by experts.max_tokens_per_expert")]
    profile: Annotated[
        str | UnsetType, Meta(description="whose experts these are; present where the request named one")
    ] = UNSET
    batch_dependent: Annotated[
        Literal[True] | UnsetType, Meta(description="experts.max_tokens_per_expert is on: neighbours change the answer")
    ] = UNSET
    weights_generation: Annotated[
        Count | UnsetType,
        Meta(description="with which the first position was computed; present once an expert was replaced"),
    ] = UNSET
    switches: Annotated[
        list[ExpertSwitch] | UnsetType, Meta(description="experts that were replaced since; present with the former")
    ] = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all choices together."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    experts: ExpertsUsed | UnsetType = UNSET


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all texts together."""

    prompt_tokens: Count
    total_tokens: Count
    experts: ExpertsUsed | UnsetType = UNSET


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one text."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[
        list[float] | str, Meta(description="of length 1; base64 of little-endian float32 if asked for")
    ]


class Embeddings(msgspec.Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class OlderLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of /v1/completions: lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text."""

    index: Count
    text: str
    logprobs: OlderLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs = UNSET
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: Annotated[str, Meta(description="changes with anything that may change the text")]
    choices: list[CompletionChoice]
    usage: Annotated[Usage | UnsetType | None, Meta(description="in streams only as stream_options say")] = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token of the text."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob] | None
    refusal: None


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: TokenIds = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = UNSET
    prompt_token_ids: TokenIds = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """Answer of /generate."""

    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: Annotated[list[str] | UnsetType, Meta(description="with return_token_strs")] = UNSET


class Detokenized(msgspec.Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class OfferedProfile(msgspec.Struct, kw_only=True):
    """A tuned setting that requests may name (experts.profiles)."""

    name: Annotated[str, Meta(description="what requests give as `profile`")]
    per_token: Annotated[
        int | list[int], Meta(description="experts a token: in all layers, or in each; 0: it has none")
    ]
    threshold: float


class Model(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: Annotated[Count, Meta(description="Unix seconds")]
    owned_by: str
    aliases: Annotated[list[str], Meta(description="other names that requests may use (model.aliases)")]
    profiles: Annotated[list[OfferedProfile], Meta(description="that requests may name (experts.profiles)")]
    max_model_len: Annotated[Count, Meta(description="tokens, prompt and output of one request together")]
    status: Literal["ready", "loading"]


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Version(msgspec.Struct, kw_only=True):
    """Answer of /version."""

    version: str


class Live(msgspec.Struct, kw_only=True):
    """Answer of /livez."""

    status: Literal["ok"]


class Ready(msgspec.Struct, kw_only=True):
    """Answer of /readyz."""

    status: Literal["ready", "not_ready"]
    phase: str
    percent: float | None
    reason: str | None
    last_step_age_s: float | None
    restarts: Count


class EngineHealth(msgspec.Struct, kw_only=True):
    """One engine in the answer of /health."""

    index: Count
    device: str
    phase: str
    percent: float | None
    reason: Annotated[str | None, Meta(description="why it is not as it should be")]
    last_step_age_s: float | None
    restarts: Count
    slots: Count
    running: Count
    queued: Count
    memory_bytes: Annotated[int | None, Meta(description="its bill; null until it was ready once")]
    kv_tokens: int | None


class Health(Ready, kw_only=True):
    """Answer of /health: as /readyz, and each engine."""

    engines_ready: Count
    engines: list[EngineHealth]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What is wrong: all four keys always."""

    message: Annotated[str, Meta(description="names field, value, limit, and what to do")]
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """Answer to a request that was refused or failed, and last event of a stream that failed."""

    error: ErrorDetail


class LayerWork(msgspec.Struct, kw_only=True):
    """What the experts of one layer have done since the daemon was started."""

    layer: Count
    assignments: Annotated[list[Count], Meta(description="of each expert: tokens that it was given")]
    imbalance: Annotated[float, Meta(description="the most loaded expert against the mean; 1: all alike")]
    unused: Annotated[Count, Meta(description="experts that were given nothing")]


class SlotState(msgspec.Struct, kw_only=True):
    """One slot; what a free one does not have is null."""

    slot: Count
    state: Literal["free", "reserved", "opening", "running", "closing"]
    waiting: Annotated[bool, Meta(description="for KV memory")]
    request_id: Annotated[str | None, Meta(description="null here; the admin socket tells it")]
    choice: Count | None
    priority: int | None
    prompt_tokens: Count | None
    cached_tokens: Annotated[Count | None, Meta(description="of the prompt, computed for an earlier request")]
    output_tokens: Annotated[Count | None, Meta(description="so far")]
    max_tokens: Count | None
    age_s: Annotated[float | None, Meta(description="since the request was submitted")]


class EngineSlots(msgspec.Struct, kw_only=True):
    """One engine's slots."""

    engine: Count
    phase: str
    running: Count
    queued: Count
    slots: list[SlotState]


class UiState(msgspec.Struct, kw_only=True):
    """What the page /ui shows, asked for once a second."""

    model: str
    device: str
    prompt_tokens: Annotated[Count, Meta(description="of complete prompts, since the daemon was started")]
    output_tokens: Annotated[Count, Meta(description="generated since the daemon was started")]
    engines: list[EngineSlots]
    load: list[LayerWork]
