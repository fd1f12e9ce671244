"""What can never be served is refused with field, value and limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fake_engine import MEMORY, VOCAB

from colibrid.batch.admission import check_request
from colibrid.batch.request import ExpertPolicy, GenerateRequest, Sampling
from colibrid.errors import RequestError

if TYPE_CHECKING:
    from colibrid.batch.interfaces import EngineInfo

RequestOf = Callable[..., GenerateRequest]
NAN = float("nan")


@pytest.fixture
def ready_info(info: EngineInfo) -> EngineInfo:
    return msgspec.structs.replace(info, memory=MEMORY)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 0},
        {"prompt": (0, VOCAB - 1)},
        {"stop_token_ids": (5,) * 64},
        {"experts": ExpertPolicy(per_token=4, threshold=0.5)},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"sampling": Sampling(seed=2**64 - 1, temperature=2.0, top_p=1.0, logit_bias=((5, -100.0),) * 1024)},
    ],
)
def test_good_requests_pass(more: dict[str, Any], request_of: RequestOf, ready_info: EngineInfo) -> None:
    """Values at their limits are fine."""
    check_request(request_of(**more), ready_info)


@pytest.mark.parametrize(
    ("more", "param", "pattern"),
    [
        ({"prompt": ()}, "prompt", "empty"),
        ({"prompt": (1, VOCAB)}, "prompt", str(VOCAB)),
        ({"prompt": (-1,)}, "prompt", "-1"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"min_tokens": 4}, "min_tokens", "0 to max_tokens 3"),
        ({"max_tokens": 998}, "max_tokens", "1001 together, but the context has 1000"),
        ({"prompt": (1,) * 1001}, "prompt", "1004 together"),
        ({"max_tokens": 398}, "max_tokens", "reserve 416 tokens of KV memory, but it holds 400"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids", "at most 64"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids", str(VOCAB)),
        ({"experts": ExpertPolicy(per_token=5)}, "experts.per_token", "1 to 4"),
        ({"experts": ExpertPolicy(per_token=0)}, "experts.per_token", "1 to 4"),
        ({"experts": ExpertPolicy(threshold=1.01)}, "experts.threshold", "0 to 1"),
        ({"experts": ExpertPolicy(threshold=NAN)}, "experts.threshold", "0 to 1"),
        ({"pooling": "mean"}, "max_tokens", "0 where"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0 to 20"),
    ],
)
def test_bad_requests_are_named(
    more: dict[str, Any], param: str, pattern: str, request_of: RequestOf, ready_info: EngineInfo
) -> None:
    """Each error is a 400 with the field and both numbers."""
    with pytest.raises(RequestError, match=pattern) as caught:
        check_request(request_of(**more), ready_info)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        *[({name: value}, name) for name in ("temperature", "min_p") for value in (-0.1, 2.1, NAN, float("inf"))],
        *[({"top_p": value}, "top_p") for value in (0.0, 1e-46, 1e-300, 1.1, NAN)],
        ({"top_k": -1}, "top_k"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": NAN}, "frequency_penalty"),
        *[({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, 1e-46, 1e-300, 1e7, NAN)],
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, NAN),)}, "logit_bias"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias"),
    ],
)
def test_sampling_out_of_range_is_named(
    changes: dict[str, Any], param: str, request_of: RequestOf, ready_info: EngineInfo
) -> None:
    """Ranges hold for every number, and NaN is in none of them."""
    with pytest.raises(RequestError) as caught:
        check_request(request_of(sampling=Sampling(**{"seed": 0, **changes})), ready_info)
    assert caught.value.param == param


def test_context_errors_have_openais_code(request_of: RequestOf, ready_info: EngineInfo) -> None:
    """What clients look for when they shorten a prompt."""
    with pytest.raises(RequestError) as caught:
        check_request(request_of(max_tokens=5000), ready_info)
    assert caught.value.code == "context_length_exceeded"


def test_before_the_first_engine_only_memory_is_unknown(request_of: RequestOf, info: EngineInfo) -> None:
    """Without a memory plan everything else is checked all the same."""
    check_request(request_of(max_tokens=398), info)
    with pytest.raises(RequestError):
        check_request(request_of(max_tokens=1000), info)
