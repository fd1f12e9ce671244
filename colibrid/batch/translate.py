"""Between a request's values and what lies in the channel. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from colibrid.batch.request import ExpertPolicy, GenerateRequest, TokenRecord
from colibrid.engine import abi
from colibrid.engine.channel import SlotRecord, SlotRequest
from colibrid.errors import EngineFaultError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.slots import SlotMemory

_POOL_FLAGS = {None: abi.RequestFlag(0), "mean": abi.RequestFlag.POOL_MEAN, "last": abi.RequestFlag.POOL_LAST}


def layer_policies(policy: ExpertPolicy, layer_experts: Sequence[int]) -> list[tuple[int, float]]:
    """(k, threshold) of each layer; k = 0: the model's own. layer_experts: the most of each layer, 0 = dense."""
    asked = policy.per_token or 0
    each = [asked] * len(layer_experts) if isinstance(asked, int) else asked
    return [
        (min(wanted, most), (policy.threshold or 0.0) if most else 0.0)
        for wanted, most in zip(each, layer_experts, strict=True)
    ]


def slot_request(
    request: GenerateRequest, choice: int, generation: int, memory: SlotMemory, layer_experts: Sequence[int]
) -> SlotRequest:
    """The request block of one choice. layer_experts: the most experts per token in each layer, 0 = dense."""
    sampling = request.sampling
    flags = _POOL_FLAGS[request.pooling]
    if request.logprobs is not None:
        flags |= abi.RequestFlag.LOGPROBS
    prompt_logprobs = request.prompt_logprobs if memory.prefix == 0 else None  # else another choice's are used
    if prompt_logprobs is not None:
        flags |= abi.RequestFlag.PROMPT_LOGPROBS
    if request.masked:
        flags |= abi.RequestFlag.MASKED
    return SlotRequest(
        generation=generation,
        seed=sampling.seed,
        prompt_ids=request.prompt_ids,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        choice=choice,
        flags=flags,
        top_logprobs=request.logprobs or 0,
        prompt_top_logprobs=prompt_logprobs or 0,
        bias=sampling.logit_bias,
        stop_ids=request.stop_token_ids,
        policy=layer_policies(request.experts, layer_experts),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        prefix_run=(memory.source or memory.run) if memory.prefix else 0,
        prefix_tokens=memory.prefix,
        publish_run=memory.run if memory.writes else 0,
    )


def token_record(token: int, record: SlotRecord, wanted: int) -> TokenRecord:
    """A record with its `wanted` likeliest tokens."""
    logprob = None if math.isnan(record.logprob) else record.logprob  # NaN at prompt position 0
    return TokenRecord(token, logprob, record.top[:wanted])


def fault(status: int, request: GenerateRequest) -> RequestError:
    """Why the engine failed one request and not its neighbours."""
    if status == abi.Status.NO_TOKEN:
        return _no_token(request)
    if status == abi.Status.MEMORY:
        return RequestError(
            "the request can never fit the KV memory; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if status == abi.Status.NOT_FINITE:
        return EngineFaultError("the model produced values that are not finite; try another prompt or model precision")
    if status == abi.Status.ARGUMENT:
        return RequestError("the engine refuses a value of the request; report this as a bug of colibrid")
    return EngineFaultError(f"the engine failed this request (status {status}); send it again")


def _no_token(request: GenerateRequest) -> RequestError:
    """What forbids tokens: of several fields the one that is named is the likeliest."""
    if request.min_tokens and request.masked:
        text = (
            f"min_tokens = {request.min_tokens} forbids the end of an answer that is complete before, in the form"
            " that was asked for; lower it"
        )
        return RequestError(text, param="min_tokens", code="unsupported_value")
    if request.masked and not request.sampling.logit_bias:
        text = "the form that was asked for leaves no token to generate; allow more in the schema or grammar"
        return RequestError(text, code="unsupported_value")
    return RequestError(
        "logit_bias leaves no token to generate; allow at least one", param="logit_bias", code="unsupported_value"
    )
