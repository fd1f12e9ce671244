"""Between the scheduler's words and the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from colibrid.batch.request import Sampling
from colibrid.batch.translate import fault
from colibrid.engine import abi

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.request import GenerateRequest

BIASED = Sampling(seed=0, logit_bias=((1, -100.0),))


@pytest.mark.parametrize(("fields", "param", "part"), [
    ({"sampling": BIASED}, "logit_bias", "logit_bias leaves no token"),
    ({"sampling": BIASED, "masked": True}, "logit_bias", "logit_bias leaves no token"),
    ({"masked": True, "min_tokens": 2, "max_tokens": 2}, "min_tokens", "min_tokens = 2 forbids the end"),
    ({"masked": True}, None, "schema or grammar"),
])  # fmt: skip
def test_what_leaves_no_token_is_named(
    request_of: Callable[..., GenerateRequest], fields: dict[str, Any], param: str | None, part: str
) -> None:
    """Only a field that the request has is blamed."""
    error = fault(abi.Status.NO_TOKEN, request_of(**fields))
    assert (error.status, error.param, error.code) == (400, param, "unsupported_value")
    assert part in error.message
