"""Request bodies as types: each field with its bounds, and the fields that are refused by name.

This is the one list of what the API takes; docs/reference/api.md is printed from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from colibrid.http.limits import (
    MAX_BIAS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_INPUTS,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_PROFILE_NAME,
    MAX_PROMPTS,
    MAX_SLOTS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TIMEOUT_S,
)

TokenCount = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=1 << 31)]
KeptTokens = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
ProfileName = Annotated[str, Meta(min_length=1, max_length=MAX_PROFILE_NAME)]


_ONE: dict[str, Any] = {  # a text, or its token ids
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ]
}
_TEXT = Meta(extra_json_schema=_ONE)  # checked by params.prompt_entries, which can tell what is wrong


def _texts(most: int) -> Meta:
    many = {"type": "array", "items": _ONE, "minItems": 1, "maxItems": most}
    return Meta(extra_json_schema={"anyOf": [*_ONE["anyOf"], many]})


def _doc(text: str) -> Meta:
    return Meta(description=text)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: Annotated[bool | None, _doc("a last event with the usage of all choices")] = None
    continuous_usage_stats: Annotated[
        bool | None, _doc("with include_usage: in every event the tokens of its choice so far")
    ] = None
    include_obfuscation: Annotated[Literal[False] | None, _doc("true is refused")] = None


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`experts`: how many experts this request may use in every MoE layer."""

    per_token: Annotated[int, Meta(ge=1, le=MAX_EXPERTS_PER_TOKEN)] | None = None
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: Annotated[str | None, _doc("accepted, not used")] = None
    description: Annotated[str | None, _doc("accepted, not used")] = None
    schema: Annotated[dict[str, Any] | bool | None, _doc("what the answer must be; absent: any JSON")] = None
    strict: Annotated[bool | None, _doc("answers always follow the schema")] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, _doc("with type json_schema")] = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: exactly one of these."""

    json: Annotated[dict[str, Any] | bool | str | None, _doc("a JSON Schema, or its text")] = None
    regex: Annotated[str | None, _doc("matches the whole answer; no look-around")] = None
    choice: Annotated[list[str] | None, _doc("one of these texts")] = None
    grammar: Annotated[str | None, _doc("in Lark's form; the rule start is the answer")] = None
    json_object: Annotated[Literal[True] | None, _doc("any JSON object")] = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `messages`; fields that are not listed are reported as ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that the generating routes have in common."""

    model: Annotated[str | None, _doc("may be left out; another model than the served one is 404")] = None
    temperature: Annotated[
        Temperature | None,
        _doc("0 is argmax, ties to the lowest id; absent: the model's generation_config.json, else 1"),
    ] = None
    top_p: Annotated[TopP | None, _doc("absent: the model's generation_config.json, else 1")] = None
    top_k: Annotated[TopK | None, _doc("-1 and 0: off; absent: the model's generation_config.json, else off")] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, _doc("absent: the model's generation_config.json, else 0")
    ] = None
    seed: Annotated[Seed | None, _doc("same request, same seed: same tokens; absent: drawn anew")] = None
    stop: Annotated[Stops | None, _doc("never part of the text, nor any piece of one")] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None, _doc("added to the model's own end ids")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, _doc("keep the stop string found in the text")] = None
    ignore_eos: Annotated[bool | None, _doc("the model's own end ids do not end the text")] = None
    min_tokens: Annotated[TokenCount | None, _doc("no end id and no stop string before; at most max_tokens")] = None
    presence_penalty: Annotated[Penalty | None, _doc("over generated tokens")] = None
    frequency_penalty: Annotated[Penalty | None, _doc("over generated tokens")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        _doc("over prompt and generated tokens; absent: the model's generation_config.json, else 1"),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIAS)] | None,
        _doc("keys are token ids of the vocabulary"),
    ] = None
    prompt_logprobs: Annotated[
        Logprobs | None,
        _doc(
            "vLLM's shape: a list of {id: {logprob, rank, …}}; rank is null for a token that is not among the likeliest"
        ),
    ] = None
    return_token_ids: Annotated[bool | None, _doc("adds prompt_token_ids and token_ids")] = None
    skip_special_tokens: Annotated[bool | None, _doc("default true")] = None
    truncate_prompt_tokens: Annotated[
        KeptTokens | None,
        _doc("keep the last n prompt tokens; -1: as many as leave room for max_tokens; 0 is refused"),
    ] = None
    stream: Annotated[bool | None, _doc("server-sent events; one event may hold several tokens")] = None
    stream_options: Annotated[StreamOptions | None, _doc("only with stream; include_usage")] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SLOTS)] | None,
        _doc("choices of each prompt, at most batch.slots; the prompt is computed and counted once"),
    ] = None
    priority: Annotated[
        Priority | None,
        _doc("of requests that wait, a lower one is served earlier; default 0"),
    ] = None
    timeout_s: Annotated[
        Seconds | None,
        _doc("504, or an error event, when the answer takes longer; counted from the head of the request"),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, _doc("text, json_object, or json_schema: what the answer must be")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, _doc("vLLM's: json, regex, choice, grammar or json_object; not with response_format")
    ] = None
    user: Annotated[str | None, _doc("accepted, not used")] = None
    experts: Annotated[Experts | None, _doc("per_token 1..k of the model, threshold; reported in usage.experts")] = None
    profile: Annotated[
        ProfileName | None,
        _doc("experts of each layer and threshold as a profile of experts.profiles says; not with experts"),
    ] = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        Any,
        _texts(MAX_PROMPTS),
        _doc("a string, token ids, or a list of strings and lists of token ids: one choice each; never empty"),
    ]
    max_tokens: Annotated[TokenCount | None, _doc("default 16, or what the context leaves; 0: only the prompt")] = None
    suffix: Annotated[
        str | None,
        _doc("text behind a gap to be filled in; 400 unless the model has tokens for that (Qwen, StarCoder, DeepSeek)"),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SLOTS)] | None,
        _doc("generate so many, give the n of highest mean log-probability; at least n (0: absent); not with stream"),
    ] = None
    logprobs: Annotated[Logprobs | None, _doc("OpenAI's older shape; the sampled token is always listed")] = None
    echo: Annotated[bool | None, _doc("the prompt first; with logprobs also those of the prompt")] = None
    add_special_tokens: Annotated[bool | None, _doc("for string prompts; default true")] = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)],
        _doc("content: a string or text parts, joined by a newline; special-token strings in it are plain text"),
    ]
    max_tokens: Annotated[TokenCount | None, _doc("older name of max_completion_tokens")] = None
    max_completion_tokens: Annotated[
        TokenCount | None, _doc("absent: to the end of the context, at most limits.max_tokens_default")
    ] = None
    logprobs: Annotated[bool | None, _doc("log-probabilities of the generated tokens")] = None
    top_logprobs: Annotated[Logprobs | None, _doc("only with logprobs: true")] = None
    add_generation_prompt: Annotated[bool | None, _doc("default true")] = None
    continue_final_message: Annotated[
        bool | None, _doc("go on with the last message; needs add_generation_prompt: false")
    ] = None
    add_special_tokens: Annotated[bool | None, _doc("default false: templates write them themselves")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, _doc("functions, at most 128; strict: true holds calls to their parameters")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        _doc("none, auto, required or a named function; the last two constrain the reply to calls"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, _doc("false: the reply ends with its first call; default true")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, _doc("variables that the model's template reads; others are refused by name")
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        _doc("passed to templates that know it, refused by others"),
    ] = None
    metadata: Annotated[dict[str, Any] | None, _doc("accepted, not used")] = None
    store: Annotated[Literal[False] | None, _doc("true is refused: nothing is stored")] = None
    safety_identifier: Annotated[str | None, _doc("accepted, not used")] = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate, the short form."""

    prompt: Annotated[Any, _TEXT, _doc("a string or token ids")]
    max_new_tokens: Annotated[TokenCount | None, _doc("default 16, or what the context leaves")] = None
    temperature: Annotated[Temperature | None, _doc("as in /v1/completions")] = None
    top_p: Annotated[TopP | None, _doc("as in /v1/completions")] = None
    top_k: Annotated[TopK | None, _doc("as in /v1/completions")] = None
    seed: Annotated[Seed | None, _doc("as in /v1/completions")] = None
    stop: Annotated[Stops | None, _doc("as in /v1/completions")] = None
    experts: Annotated[Experts | None, _doc("as in /v1/completions")] = None
    profile: Annotated[ProfileName | None, _doc("as in /v1/completions")] = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt as /v1/completions takes it, or messages as /v1/chat/completions takes them."""

    model: Annotated[str | None, _doc("as in /v1/completions")] = None
    prompt: Annotated[str | None, _doc("a string; one of prompt and messages")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        _doc("as in /v1/chat/completions; one of prompt and messages"),
    ] = None
    add_special_tokens: Annotated[bool | None, _doc("default true with prompt, false with messages")] = None
    add_generation_prompt: Annotated[bool | None, _doc("only with messages; default true")] = None
    continue_final_message: Annotated[bool | None, _doc("only with messages, as in /v1/chat/completions")] = None
    tools: Annotated[list[dict[str, Any]] | None, _doc("only with messages, as in /v1/chat/completions")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _doc("only with messages, as in /v1/chat/completions")] = (
        None
    )
    return_token_strs: Annotated[bool | None, _doc("adds token_strs, the text of each id")] = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: Annotated[str | None, _doc("as in /v1/completions")] = None
    tokens: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_LISTED_TOKENS)], _doc("ids; special tokens are part of the text")
    ]


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: Annotated[str | None, _doc("may be left out; another model than the served one is 404")] = None
    input: Annotated[
        Any,
        _texts(MAX_INPUTS),
        _doc("a string, token ids, or a list of strings and lists of token ids: one embedding each; never empty"),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, _doc("default float; base64: of little-endian float32")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, lt=1 << 31)] | None,
        _doc("keep the first so many values, brought to length 1 again; at most the model's hidden size"),
    ] = None
    add_special_tokens: Annotated[bool | None, _doc("for strings; default true")] = None
    truncate_prompt_tokens: Annotated[
        KeptTokens | None,
        _doc("keep the last n tokens of each text; -1: as many as the context holds; 0 is refused"),
    ] = None
    priority: Annotated[
        Priority | None,
        _doc("of requests that wait, a lower one is served earlier; default 0"),
    ] = None
    timeout_s: Annotated[
        Seconds | None,
        _doc("504 when the answer takes longer; counted from the head of the request"),
    ] = None
    user: Annotated[str | None, _doc("accepted, not used")] = None
    experts: Annotated[Experts | None, _doc("absent: experts.embed of the settings; reported in usage.experts")] = None
    profile: Annotated[ProfileName | None, _doc("as in /v1/completions")] = None


class Refused(msgspec.Struct, frozen=True):
    """A known field that is not implemented. Null and the `harmless` values mean that it is off."""

    harmless: tuple[object, ...] = ()
    instead: str = "leave it out"


_STRUCTURED = Refused(instead="use structured_outputs")
_COMMON_REFUSED: dict[str, Refused] = {
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "use_beam_search": Refused((False,)),
}
_ELSEWHERE: dict[str, Refused] = {  # fields of other servers that change the answer there
    # vLLM
    "allowed_token_ids": Refused(([],), "use structured_outputs or logit_bias"),
    "bad_words": Refused(([],), "use logit_bias with the ids that /tokenize gives"),
    "cache_salt": Refused((), "give each user a key: keys share no prefixes"),
    "detokenize": Refused((True,), "use return_token_ids, and leave the text unread"),
    "kv_transfer_params": Refused(({},)),
    "length_penalty": Refused((1, 1.0)),
    "logits_processors": Refused(([],), "use logit_bias or structured_outputs"),
    "prompt_embeds": Refused((), "send text or token ids"),
    "return_tokens_as_token_ids": Refused((False,), "use return_token_ids"),
    "spaces_between_special_tokens": Refused((True,)),
    "vllm_xargs": Refused(({},)),
    # llama-server
    "dry_multiplier": Refused((0, 0.0), "use frequency_penalty"),
    "dynatemp_range": Refused((0, 0.0), "use temperature"),
    "grammar": Refused(("",), "use structured_outputs.grammar"),
    "image_data": Refused(([],)),
    "json_schema": Refused((), "use structured_outputs.json"),
    "lora": Refused(([],)),
    "mirostat": Refused((0,), "use temperature and top_p"),
    "n_keep": Refused((0,), "use truncate_prompt_tokens"),
    "n_predict": Refused((), "use max_tokens"),
    "n_probs": Refused((0,), "use logprobs"),
    "repeat_last_n": Refused((), "leave it out: penalties are over the whole text"),
    "repeat_penalty": Refused((1, 1.0), "use repetition_penalty"),
    "samplers": Refused((), "leave it out: the order is penalties, bias, temperature, top_k, min_p, top_p"),
    "t_max_predict_ms": Refused((0,), "use timeout_s"),
    "top_n_sigma": Refused((-1, -1.0), "use min_p"),
    "typical_p": Refused((1, 1.0), "use top_p"),
    "xtc_probability": Refused((0, 0.0)),
}
COMPLETION_REFUSED: dict[str, Refused] = _COMMON_REFUSED | _ELSEWHERE
CHAT_REFUSED: dict[str, Refused] = (
    _COMMON_REFUSED
    | _ELSEWHERE
    | {
        "best_of": Refused((0, 1), "use /v1/completions"),
        "functions": Refused(([],), "use tools"),
        "function_call": Refused(("none",), "use tool_choice"),
        "chat_template": Refused((), "the model's own template is used"),
        "documents": Refused(([],), "put them into a message"),
        "echo": Refused((False,), "use /v1/completions"),
        "verbosity": Refused(),
        "service_tier": Refused(("auto", "default")),
        "audio": Refused(),
        "modalities": Refused((["text"],)),
        "prediction": Refused(),
        "web_search_options": Refused(),
    }
)
GENERATE_REFUSED: dict[str, Refused] = {"stream": Refused((False,), "use /v1/completions")}
TOKENIZE_REFUSED: dict[str, Refused] = {"chat_template": Refused((), "the model's own template is used")}
EMBEDDINGS_REFUSED: dict[str, Refused] = {
    "stream": Refused((False,)),
    "messages": Refused((), "send their text as input"),
    "dtype": Refused(("float32",), "embeddings are float32"),
}
