"""Whether a request can be served at all. Pure.

The HTTP side has checked its own fields; this is the last gate before shared memory, for every caller alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from colibrid.batch.plan import reserved_tokens
from colibrid.engine import abi
from colibrid.errors import RequestError

if TYPE_CHECKING:
    from colibrid.batch.interfaces import EngineInfo
    from colibrid.batch.request import ExpertPolicy, GenerateRequest, Sampling

_MAX_SEED = (1 << 64) - 1
MAX_PRIORITY = 1000
_TINY = 1.2e-38  # about the smallest normal float32, which the engine computes with: below it nothing is above 0


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """RequestError (400) naming field, value, limit and remedy if the request can never be served."""
    if not 1 <= request.n <= info.slots:
        raise _error("n", request.n, f"1 to {info.slots}, the number of slots")
    if abs(request.priority) > MAX_PRIORITY:
        raise _error("priority", request.priority, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")
    _check_lengths(request, info)
    _check_ids(request, info)
    _check_sampling(request.sampling, info)
    _check_experts(request.experts, info)
    if request.pooling is not None and request.max_tokens > 0:
        raise _error("max_tokens", request.max_tokens, "0 where the prompt is pooled")
    for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if value is not None and not 0 <= value <= abi.MAX_TOP_LOGPROBS:
            raise _error(name, value, f"0 to {abi.MAX_TOP_LOGPROBS}")


def _check_experts(experts: ExpertPolicy, info: EngineInfo) -> None:
    per_token, threshold = experts.per_token, experts.threshold
    if isinstance(per_token, int) and not 1 <= per_token <= info.experts_most:
        raise _error(
            "experts.per_token", per_token, f"1 to {info.experts_most}, the model's own number or what is allowed"
        )
    if threshold is not None and not 0 <= threshold <= 1:
        raise _error("experts.threshold", threshold, "0 to 1")


def _check_lengths(request: GenerateRequest, info: EngineInfo) -> None:
    prompt, output = len(request.prompt_ids), request.max_tokens
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if output < 0:
        raise _error("max_tokens", output, "0 or more")
    if not 0 <= request.min_tokens <= output:
        raise _error("min_tokens", request.min_tokens, f"0 to max_tokens {output}")
    if prompt + output > info.max_seq_len:
        raise RequestError(
            f"{prompt} prompt tokens and max_tokens {output} are {prompt + output} together, but the context has "
            f"{info.max_seq_len}; shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt < info.max_seq_len else "prompt",
            code="context_length_exceeded",
        )
    reserved = reserved_tokens(prompt, output, request.n)
    if info.memory is not None and reserved > info.memory.kv_tokens:
        choices = f" for each of {request.n} choices" if request.n > 1 else ""
        raise RequestError(
            f"{prompt} prompt tokens and max_tokens {output}{choices} reserve {reserved} tokens of KV memory, but it "
            f"holds {info.memory.kv_tokens}; shorten the prompt, lower max_tokens or n, or have "
            "memory.tiers.kv.bytes raised",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _check_ids(request: GenerateRequest, info: EngineInfo) -> None:
    vocab = info.vocab_size
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab:
        bad = next(token for token in request.prompt_ids if not 0 <= token < vocab)
        raise _error("prompt", bad, f"token ids from 0 to {vocab - 1}")
    if len(request.stop_token_ids) > abi.MAX_STOP_IDS:
        raise _error("stop_token_ids", len(request.stop_token_ids), f"at most {abi.MAX_STOP_IDS} ids")
    for token in request.stop_token_ids:
        if not 0 <= token < vocab:
            raise _error("stop_token_ids", token, f"token ids from 0 to {vocab - 1}")


def _check_sampling(sampling: Sampling, info: EngineInfo) -> None:
    if not 0 <= sampling.seed <= _MAX_SEED:
        raise _error("seed", sampling.seed, f"0 to {_MAX_SEED}")
    ranges = (
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature <= 2.0, "0 to 2"),
        ("top_p", sampling.top_p, _TINY <= sampling.top_p <= 1.0, f"{_TINY} to 1"),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "0 to 1"),
        ("top_k", sampling.top_k, 0 <= sampling.top_k < 1 << 31, "0 (off) or more"),
        ("presence_penalty", sampling.presence_penalty, -2.0 <= sampling.presence_penalty <= 2.0, "-2 to 2"),
        ("frequency_penalty", sampling.frequency_penalty, -2.0 <= sampling.frequency_penalty <= 2.0, "-2 to 2"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            _TINY <= sampling.repetition_penalty <= 1e6,
            f"{_TINY} to 1e6",
        ),
    )
    for name, value, good, allowed in ranges:
        if not good:
            raise _error(name, value, allowed)
    if len(sampling.logit_bias) > abi.MAX_BIAS:
        raise _error("logit_bias", len(sampling.logit_bias), f"at most {abi.MAX_BIAS} entries")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < info.vocab_size:
            raise _error("logit_bias", token, f"token ids from 0 to {info.vocab_size - 1}")
        if not math.isfinite(bias) or abs(bias) > 100:
            raise _error("logit_bias", bias, "-100 to 100")


def _error(field: str, value: float, allowed: str) -> RequestError:
    return RequestError(f"{field} is {value}; allowed: {allowed}", param=field)
