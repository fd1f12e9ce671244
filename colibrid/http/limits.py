"""Bounds of requests that no setting changes."""

from __future__ import annotations

from colibrid.engine.abi import MAX_BIAS, MAX_STOP_IDS
from colibrid.engine.abi import MAX_TOP_LOGPROBS as MAX_LOGPROBS

__all__ = [
    "BODY_TIMEOUT_S",
    "MAX_BIAS",
    "MAX_EXPERTS_PER_TOKEN",
    "MAX_LOGPROBS",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "MAX_STOP_IDS",
    "OTHER_FIELDS_BYTES",
    "WRITE_TIMEOUT_S",
]

MAX_EXPERTS_PER_TOKEN = 16
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_CHARS = 256  # characters of one stop string
MAX_PROMPTS = 256  # prompts of one request
MAX_MESSAGES = 4096  # messages of one request
OTHER_FIELDS_BYTES = 256 << 10  # of a body beside prompt and messages
BODY_TIMEOUT_S = 30.0  # for the whole body to arrive
WRITE_TIMEOUT_S = 30.0  # a reader that takes nothing for so long is cut off
