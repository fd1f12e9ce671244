"""Values that the HTTP side hands to the scheduler and gets back. Immutable; no I/O."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length"]
Pooling = Literal["mean", "last"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Ranges are checked by the HTTP side and again by the engine."""

    seed: int  # 0 .. 2**64 - 1; drawn at admission when the request names none
    temperature: float = 1.0  # 0 = argmax, ties to the lowest id
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # -2 .. 2
    frequency_penalty: float = 0.0  # -2 .. 2
    repetition_penalty: float = 1.0  # > 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)


class ExpertPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that one request may use in every MoE layer. None: what the settings say, and in the end the model's own."""

    per_token: int | tuple[int, ...] | None = None  # of all MoE layers, or of each layer
    threshold: float | None = None  # 0 .. 1


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and what to generate from it: each choice will occupy one slot."""

    request_id: str
    prompt_ids: tuple[int, ...]  # 1 .. max_seq_len ids, all in the vocabulary
    max_tokens: int  # 0 = only the prompt; prompt + max_tokens <= max_seq_len
    sampling: Sampling
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the model's own end ids included, unless ignore_eos
    logprobs: int | None = None  # None = no log-probabilities; 0 = of the token only; n = and the n likeliest
    prompt_logprobs: int | None = None  # the same for the prompt
    experts: ExpertPolicy = ExpertPolicy()
    n: int = 1  # choices: 1 .. slots; the prompt is computed once
    tenant: str = ""  # whose prompts may share computed beginnings with this one (batch.prefix_reuse)
    priority: int = 0  # a lower one is placed earlier
    masked: bool = False  # each output position waits for Generation.submit_mask
    pooling: Pooling | None = None  # with max_tokens 0: the prompt's hidden state as GenerateResult.pooled


class TokenRecord(msgspec.Struct, frozen=True):
    """One generated token, or one prompt position."""

    token: int
    logprob: float | None = None  # None where not asked for, and for prompt position 0
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


class Switch(NamedTuple):
    """An expert was replaced while a request was served."""

    weights_generation: int  # that began
    position: int  # positions below this one, of prompt and output, were computed by the experts before


class ExpertUsage(msgspec.Struct, frozen=True):
    """What the experts did for one request (`usage.experts`)."""

    per_token: int  # the most of any layer
    assignments: int
    trimmed: int
    dropped: int
    batch_dependent: bool = False  # experts.max_tokens_per_expert is on
    weights_generation: int = 0  # that the first position was computed with
    switches: tuple[Switch, ...] = ()


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Known when a generation has ended."""

    finish_reason: FinishReason
    stop_token: int | None  # the stop id that ended it
    prompt_tokens: int
    completion_tokens: int  # a stop id included
    cached_tokens: int  # of the prompt, computed for an earlier request; 0 for choices behind the first
    experts: ExpertUsage
    pooled: bytes | None = None  # float32 of this machine, length 1
    queue_ms: float
    prefill_ms: float
    decode_ms: float
